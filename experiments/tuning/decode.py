"""Decoding with a key-value cache of fixed size: one compiled program for tokens of every length.

A cache is a pair (keys, values) of tensors [B, heads, slots, D] for each layer; the slot of a token is its
position. What is beyond a row's own position is never looked at: prompts of many lengths are padded on the
right, and a row may begin anew while others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.tuning.architecture import StatelessCache
from experiments.tuning.lm import LanguageModel

Cache = list[tuple[Tensor, Tensor]]
Prefill = Callable[[Any, Tensor, Tensor], tuple[Tensor, Cache]]
Decode = Callable[[Any, Tensor, Tensor, Cache], tuple[Tensor, Cache]]
Drawn = tuple[Tensor, Tensor, Tensor]  # tokens, their log-probabilities, entropies; [B, count] each


class _Recorded(StatelessCache):
    """The cache of a whole prompt: attention is causal among its tokens, whose keys and values are kept."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.layers[layer] = keys, values
        return keys, values


class _Extended(_Recorded):
    """The cache of one more token in each row, at the row's position."""

    def __init__(self, cache: Cache, positions: Tensor):
        super().__init__()
        self.cache, self.slots = cache, cache[0][0].shape[2]
        self.here = (torch.arange(self.slots, device=positions.device) == positions[:, None])[
            :, None, :, None
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        old = self.cache[layer]
        new = tuple(torch.where(self.here, n, o) for n, o in zip((keys, values), old, strict=True))
        return super().update(*new, layer)

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.slots, 0


def prefill_of(lm: LanguageModel, slots: int) -> Prefill:
    """`fn(params, tokens [B, P], last [B]) -> (logits [B, V] of what follows position `last`, cache)`."""

    def fn(params: Any, tokens: Tensor, last: Tensor) -> tuple[Tensor, Cache]:
        seen = _Recorded()
        hidden = lm.run(params, tokens, None, None, seen)
        room = (0, 0, 0, slots - tokens.shape[1])
        cache = [tuple(F.pad(t, room) for t in seen.layers[layer]) for layer in sorted(seen.layers)]
        return _logits(lm, params, hidden, last), cache

    return fn


def decode_of(lm: LanguageModel) -> Decode:
    """`fn(params, tokens [B], positions [B], cache) -> (logits [B, V] of what follows, cache)`."""

    def fn(params: Any, tokens: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        seen = _Extended(cache, positions)
        distance = (positions[:, None] - torch.arange(seen.slots, device=positions.device))[:, None, None]
        mask = lm.mask(params, distance >= 0, distance)
        hidden = lm.run(params, tokens[:, None], positions[:, None], mask, seen)
        kept = [seen.layers[layer] for layer in sorted(seen.layers)]
        return _logits(lm, params, hidden, torch.zeros_like(positions)), kept

    return fn


def first_of(lm: LanguageModel, slots: int, temperature: float, top_p: float) -> Callable[..., Any]:
    """`fn(params, tokens [B, P], last [B], numbers [B, 1]) -> (drawn, cache)`: prompts, and a token after."""
    prefill = prefill_of(lm, slots)

    def fn(params: Any, tokens: Tensor, last: Tensor, numbers: Tensor) -> tuple[Drawn, Cache]:
        logits, cache = prefill(params, tokens, last)
        return tuple(t[:, None] for t in draw(logits, numbers[:, 0], temperature, top_p)), cache

    return fn


def next_of(lm: LanguageModel, count: int, temperature: float, top_p: float) -> Callable[..., Any]:
    """`fn(params, tokens [B], positions [B], numbers [B, count], cache) -> (drawn, cache)`: the next `count`
    tokens, in one program: what a call costs is shared by them. After a row's end they mean nothing."""
    decode = decode_of(lm)

    def fn(
        params: Any, tokens: Tensor, positions: Tensor, numbers: Tensor, cache: Cache
    ) -> tuple[Drawn, Cache]:
        drawn, last = [], cache[0][0].shape[2] - 1
        for each in range(count):
            logits, cache = decode(params, tokens, (positions + each).clamp(max=last), cache)
            drawn.append(draw(logits, numbers[:, each], temperature, top_p))
            tokens = drawn[-1][0]
        return tuple(torch.stack(part, 1) for part in zip(*drawn, strict=True)), cache

    return fn


def draw(
    logits: Tensor, numbers: Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """A token by row, its log-probability, and the entropy of the distribution.

    Args:
        logits: [B, V]. What is not finite is noise, not an error.
        numbers: fp64 [B] in [0, 1).

    >>> token, logprob, _ = draw(torch.tensor([[0.0, 3.0]]), torch.tensor([0.5], dtype=torch.float64))
    >>> token.item(), round(logprob.item(), 3)
    (1, -0.049)
    """
    logprobs = (logits.nan_to_num() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.double().exp()
    entropy = -(probs * logprobs).sum(-1).float()
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        if top_p < 1:
            most, order = probs.sort(-1, descending=True)
            kept = most.cumsum(-1) - most < top_p
            probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, most, 0.0))
        sums = probs.cumsum(-1)
        tokens = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0].float(), entropy


def _logits(lm: LanguageModel, params: Any, hidden: Tensor, at: Tensor) -> Tensor:
    index = at[:, None, None].expand(-1, 1, hidden.shape[-1])
    logits = lm.unembed(params, hidden.gather(1, index)).squeeze(1)
    return logits.float() if logits.dtype.itemsize < 4 else logits
