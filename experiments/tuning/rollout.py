"""Rollouts: answers to prompts by the sharded leaves that train, with the log-probabilities of their tokens.

There is no second copy of the weights, and no server. One compiled program decodes tokens at all lengths,
with a key-value cache of fixed size. A cache is a pair (keys, values) of tensors [B, heads, slots, D] for
each layer, in which the slot of a token is its position. Slots beyond a row's own position are never looked
at. So prompts of many lengths are padded on the right, and a row may begin anew while others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.tuning.architecture import StatelessCache
from experiments.tuning.lm import LanguageModel
from fnshard.step.step import Forward

Cache = list[tuple[Tensor, Tensor]]
Prefill = Callable[[Any, Tensor, Tensor], tuple[Tensor, Cache]]
Decode = Callable[[Any, Tensor, Tensor, Cache], tuple[Tensor, Cache]]
Drawn = tuple[Tensor, Tensor, Tensor]  # tokens, their log-probabilities, entropies; [B, count] each
TOGETHER = 8  # the tokens of a row that a program draws, as a rule
REFILL = 4  # waiting prompts are prefilled once one in so many rows is free

# ------------------------------------------------------------------ decoding


class _RecordingCache(StatelessCache):
    """A cache of a whole prompt, whose tokens attend causally, that records their keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.layers[layer] = keys, values
        return keys, values


class _ExtendingCache(_RecordingCache):
    """A cache that is extended by one token in each row, at the row's position."""

    def __init__(self, cache: Cache, positions: Tensor):
        super().__init__()
        self.cache, self.slots = cache, cache[0][0].shape[2]
        index = torch.arange(self.slots, device=positions.device)
        self.here = (index == positions[:, None])[:, None, :, None]  # [B, 1, slots, 1]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        old = self.cache[layer]
        new = tuple(torch.where(self.here, n, o) for n, o in zip((keys, values), old, strict=True))
        return super().update(*new, layer)

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return self.slots, 0


def make_prefill(lm: LanguageModel, slots: int) -> Prefill:
    """Make `fn(params, tokens [B, P], last [B]) -> (logits [B, V], cache)`, with logits after position
    `last`."""

    def fn(params: Any, tokens: Tensor, last: Tensor) -> tuple[Tensor, Cache]:
        recorded = _RecordingCache()
        hidden = lm.run(params, tokens, None, None, recorded)
        room = (0, 0, 0, slots - tokens.shape[1])  # empty slots after the prompt's
        cache = [tuple(F.pad(t, room) for t in recorded.layers[layer]) for layer in sorted(recorded.layers)]
        return _compute_logits_at(lm, params, hidden, last), cache

    return fn


def make_decode(lm: LanguageModel) -> Decode:
    """Make `fn(params, tokens [B], positions [B], cache) -> (logits [B, V] of the next tokens, cache)`."""

    def fn(params: Any, tokens: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        extended = _ExtendingCache(cache, positions)
        distance = positions[:, None] - torch.arange(extended.slots, device=positions.device)
        distance = distance[:, None, None]  # [B, 1, 1, slots]
        mask = lm.mask(params, distance >= 0, distance)
        hidden = lm.run(params, tokens[:, None], positions[:, None], mask, extended)
        new_cache = [extended.layers[layer] for layer in sorted(extended.layers)]
        return _compute_logits_at(lm, params, hidden, torch.zeros_like(positions)), new_cache

    return fn


def make_first_draw(lm: LanguageModel, slots: int, temperature: float, top_p: float) -> Callable[..., Any]:
    """Make `fn(params, tokens [B, P], last [B], numbers [B, 1]) -> (drawn, cache)`.

    It reads prompts, and draws one token after each.
    """
    prefill = make_prefill(lm, slots)

    def fn(params: Any, tokens: Tensor, last: Tensor, numbers: Tensor) -> tuple[Drawn, Cache]:
        logits, cache = prefill(params, tokens, last)
        return tuple(t[:, None] for t in draw(logits, numbers[:, 0], temperature, top_p)), cache

    return fn


def make_next_draws(lm: LanguageModel, count: int, temperature: float, top_p: float) -> Callable[..., Any]:
    """Make `fn(params, tokens [B], positions [B], numbers [B, count], cache) -> (drawn, cache)`.

    It draws the next `count` tokens in one program, so that they share the cost of a call. Tokens after the
    end of a row's answer mean nothing.
    """
    decode = make_decode(lm)

    def fn(
        params: Any, tokens: Tensor, positions: Tensor, numbers: Tensor, cache: Cache
    ) -> tuple[Drawn, Cache]:
        drawn, last = [], cache[0][0].shape[2] - 1
        for n in range(count):
            # A row whose answer has ended may run past the last slot, which is then written again.
            logits, cache = decode(params, tokens, (positions + n).clamp(max=last), cache)
            drawn.append(draw(logits, numbers[:, n], temperature, top_p))
            tokens = drawn[-1][0]
        return tuple(torch.stack(part, 1) for part in zip(*drawn, strict=True)), cache

    return fn


def draw(
    logits: Tensor, numbers: Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row. Return it with its log-probability, and the entropy of the distribution.

    Args:
        logits: [B, V]. Numbers that are not finite are taken as noise, not as an error.
        numbers: fp64 [B] in [0, 1).

    >>> token, logprob, _ = draw(torch.tensor([[0.0, 3.0]]), torch.tensor([0.5], dtype=torch.float64))
    >>> token.item(), round(logprob.item(), 3)
    (1, -0.049)
    """
    logprobs = (logits.nan_to_num() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.double().exp()
    entropy = -(probs * logprobs).sum(-1).float()

    # A number in [0, 1) selects the token whose interval of the cumulative probabilities has it. At
    # temperature 0 the likeliest token is taken.
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        if top_p < 1:
            most, order = probs.sort(-1, descending=True)
            # The token that reaches `top_p` counts as well, so that one is left in any case.
            kept = most.cumsum(-1) - most < top_p
            probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, most, 0.0))
        sums = probs.cumsum(-1)
        # The probabilities that are left may add up to less than 1, so the number is scaled by their sum.
        tokens = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0].float(), entropy


def _compute_logits_at(lm: LanguageModel, params: Any, hidden: Tensor, at: Tensor) -> Tensor:
    """Compute the logits [B, V] after one position `at` [B] of each row, in fp32 or wider."""
    index = at[:, None, None].expand(-1, 1, hidden.shape[-1])
    logits = lm.unembed(params, hidden.gather(1, index)).squeeze(1)
    return logits.float() if logits.dtype.itemsize < 4 else logits


# ------------------------------------------------------------------ rollouts


@dataclass(frozen=True)
class Answers:
    """The answers to N prompts, on the host. All tensors are 0 after an answer's end.

    Args:
        tokens: int64 [N, T].
        lengths: int64 [N], the numbers of tokens that were drawn, the one that ends an answer included.
        logprobs: fp32 [N, T], the model's log-probabilities of the tokens, at the temperature of the draw.
        entropy: fp32 [N, T], the entropies of the distributions that they were drawn from.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    entropy: Tensor

    def texts(self) -> list[list[int]]:
        """Return the tokens of each answer."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Rollouts:
    """A function that draws answers. All ranks call it together, each with any number of its own prompts.

    Rows whose answer has ended take the next prompt, so that long answers hold up no others.

    Args:
        prefill, decode: forwards of `make_first_draw` and `make_next_draws`, with one `temperature` and
            `top_p`. Tokens are drawn from the likeliest, as many as have the probability `top_p` together
            (Holtzman et al. 2020), and their log-probabilities are those of the whole distribution. A
            temperature of 0 takes the likeliest.
        count: the tokens of a row that `decode` draws in a call.
        rows: the prompts that are answered at once.
        width: the tokens of the longest prompt.
        length: the most tokens of an answer.
        stops: the tokens that end an answer.
        agree: sends one string of each rank to all if forwards are collectives, so that ranks end together.
    """

    prefill: Forward
    decode: Forward
    count: int
    rows: int
    width: int
    length: int
    stops: frozenset[int]
    agree: Callable[[str], list[str]]
    device: torch.device

    def __call__(self, params: Any, prompts: Sequence[Sequence[int]], numbers: Tensor) -> Answers:
        """Draw answers to prompts.

        Args:
            numbers: fp64 [N, length] in [0, 1), by which tokens are drawn. An answer depends on its own
                numbers, and not on the prompts that share a batch with it, up to rounding.
        """
        shape = len(prompts), self.length
        answers = Answers(
            torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64),
            torch.zeros(shape), torch.zeros(shape),
        )  # fmt: skip
        # A call may draw past the last token of an answer, by numbers that count for nothing.
        numbers = F.pad(numbers, (0, self.count))

        # Each row answers one prompt at a time. Its state is the last token and that token's position.
        waiting, cache = deque(range(len(prompts))), None
        owner = np.full(self.rows, -1)  # the prompt that each row answers
        tokens, positions = np.zeros((2, self.rows), np.int64)
        while True:
            # Forwards may be collectives: ranks say whether they want to prefill, and whether they have
            # anything to do at all, and take the same turn.
            free = np.flatnonzero(owner < 0)
            wants_prefill = bool(waiting) and (len(free) * REFILL >= self.rows)
            is_busy = bool(waiting) or len(free) < self.rows
            votes = self.agree(f"{int(wants_prefill)}{int(is_busy)}")
            if not any(vote[1] == "1" for vote in votes):
                return answers

            # Free rows take waiting prompts. A rank that has no more of them joins in.
            if any(vote[0] == "1" for vote in votes):
                fresh = free[: len(waiting)]
                owner[fresh] = [waiting.popleft() for _ in fresh]
                drawn, new = self._prefill_rows(params, prompts, owner, fresh, numbers)
                cache = new if cache is None else _merge_caches(cache, new, fresh, self.device)
                for row in fresh:
                    positions[row] = len(prompts[owner[row]])
                self._record(drawn, answers, fresh, owner, tokens)
                continue

            # All rows decode the next tokens. What idle rows draw is dropped.
            busy = np.flatnonzero(owner >= 0)
            row_numbers = np.zeros((self.rows, self.count))
            if len(busy):
                at = answers.lengths[owner[busy], None] + torch.arange(self.count)
                row_numbers[busy] = numbers[torch.from_numpy(owner[busy])[:, None], at].numpy()
            drawn, cache = self.decode(params, *self._to_device(tokens, positions, row_numbers), cache)
            positions[busy] += self.count
            self._record(drawn, answers, busy, owner, tokens)

    def _to_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copy arrays to the device. The copies share no memory with these, which are written in place."""
        return [torch.from_numpy(array.copy()).to(self.device) for array in arrays]

    def _prefill_rows(
        self, params: Any, prompts: Sequence[Sequence[int]], owner: np.ndarray, fresh: Sequence[int],
        numbers: Tensor,
    ) -> tuple[Drawn, Any]:  # fmt: skip
        """Prefill the rows that are new, and draw their first tokens. Nobody looks at the others."""
        padded, last = np.zeros((self.rows, self.width), np.int64), np.zeros(self.rows, np.int64)
        row_numbers = np.zeros((self.rows, 1))
        for row in fresh:
            prompt = prompts[owner[row]]
            padded[row, : len(prompt)], last[row] = prompt, len(prompt) - 1
            row_numbers[row] = numbers[owner[row], 0]
        return self.prefill(params, *self._to_device(padded, last, row_numbers))

    def _record(
        self, drawn: Drawn, answers: Answers, rows: np.ndarray, owner: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Write the tokens that some rows have drawn into their answers, up to their ends.

        Rows whose answer has ended become free.
        """
        if not len(rows):
            return
        drawn_tokens, logprobs, entropy = (part.cpu()[torch.from_numpy(rows)] for part in drawn)
        prompts = torch.from_numpy(owner[rows])
        is_stop = torch.isin(drawn_tokens, torch.tensor(sorted(self.stops), dtype=torch.int64))
        at = answers.lengths[prompts, None] + torch.arange(drawn_tokens.shape[1])

        # Tokens count up to the first that ends the answer, that one included.
        counted = (is_stop.cumsum(1) - is_stop.long() == 0) & (at < self.length)
        target = prompts[:, None].expand_as(at)[counted], at[counted]
        answers.tokens[target] = drawn_tokens[counted]
        answers.logprobs[target] = logprobs[counted]
        answers.entropy[target] = entropy[counted]
        answers.lengths[prompts] += counted.sum(1)
        tokens[rows] = drawn_tokens[:, -1].numpy()
        has_ended = (counted & is_stop).any(1) | (answers.lengths[prompts] == self.length)
        owner[rows[has_ended.numpy()]] = -1


def _merge_caches(cache: Any, new: Any, rows: Sequence[int], device: torch.device) -> Any:
    """Return a cache with these rows of the new one, and all others of the old one."""
    is_new = torch.zeros(len(new[0][0]), 1, 1, 1, dtype=torch.bool)
    is_new[list(rows)] = True
    is_new = is_new.to(device)
    return [
        (torch.where(is_new, keys, old_keys), torch.where(is_new, values, old_values))
        for (keys, values), (old_keys, old_values) in zip(new, cache, strict=True)
    ]
