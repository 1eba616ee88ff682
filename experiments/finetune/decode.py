"""Decoding with a key-value cache of fixed size: one compiled program for every token of every length.

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

from experiments.finetune.architecture import StatelessCache
from experiments.finetune.lm import LanguageModel

Cache = list[tuple[Tensor, Tensor]]
Prefill = Callable[[Any, Tensor, Tensor], tuple[Tensor, Cache]]
Decode = Callable[[Any, Tensor, Tensor, Cache], tuple[Tensor, Cache]]


class _Recorded(StatelessCache):
    """Of a whole prompt: causal attention among its tokens, whose keys and values are kept."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.layers[layer] = keys, values
        return keys, values


class _Extended(_Recorded):
    """Of one more token in each row, at the row's position."""

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


def _logits(lm: LanguageModel, params: Any, hidden: Tensor, at: Tensor) -> Tensor:
    index = at[:, None, None].expand(-1, 1, hidden.shape[-1])
    logits = lm.unembed(params, hidden.gather(1, index)).squeeze(1)
    return logits.float() if logits.dtype.itemsize < 4 else logits
