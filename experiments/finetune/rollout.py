"""Rollouts: answers that the sharded leaves which train give to prompts, with the log-probabilities of their
tokens. There is no second copy of the weights, and no server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnshard.step.forward import Forward

REFILL = 4  # prompts that wait are prefilled once a quarter of the rows is free


@dataclass(frozen=True)
class Answers:
    """Of N prompts, on the host; what comes after an answer's end is 0.

    Args:
        tokens: int64 [N, T].
        lengths: int64 [N]: tokens that were drawn, the one that ends an answer included.
        logprobs: fp32 [N, T], of the tokens, by the model at the temperature they were drawn at.
        entropy: fp32 [N, T], of what they were drawn from.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    entropy: Tensor

    def texts(self) -> list[list[int]]:
        """The tokens of each."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Rollouts:
    """Draws answers; all ranks call it together, each with prompts of its own and as many as it likes.

    Rows whose answer has ended take the next prompt, so that long answers hold up no others.

    Args:
        prefill, decode: of `decode.prefill_of` and `decode_of`.
        rows: prompts that are answered at once.
        width: the longest prompt.
        length: the most tokens of an answer.
        stops: tokens that end one.
        agree: one string of each rank to all, where forwards are collectives: ranks end together.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: tokens are drawn from the likeliest, as many as have this probability together (Holtzman et al.
            2020). Log-probabilities are of the whole distribution.
    """

    prefill: Forward
    decode: Forward
    rows: int
    width: int
    length: int
    stops: frozenset[int]
    agree: Callable[[str], list[str]]
    device: torch.device
    temperature: float = 1.0
    top_p: float = 1.0

    def __call__(self, params: Any, prompts: Sequence[Sequence[int]], numbers: Tensor) -> Answers:
        """Answers to prompts.

        Args:
            numbers: fp64 [N, length] in [0, 1): what tokens are drawn by. An answer depends on its own alone,
                not on which prompts share a batch with it, up to rounding.
        """
        shape = len(prompts), self.length
        answers = Answers(
            torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64),
            torch.zeros(shape), torch.zeros(shape),
        )  # fmt: skip
        waiting, cache = deque(range(len(prompts))), None
        owner = np.full(self.rows, -1)  # which prompt a row answers
        tokens, positions = np.zeros((2, self.rows), np.int64)
        while True:
            free = np.flatnonzero(owner < 0)
            wants = bool(waiting) and (len(free) * REFILL >= self.rows)
            said = self.agree(f"{int(wants)}{int(bool(waiting) or len(free) < self.rows)}")
            if not any(each[1] == "1" for each in said):
                return answers
            if any(each[0] == "1" for each in said):  # a rank that has no more prompts joins in
                fresh = free[: len(waiting)]
                owner[fresh] = [waiting.popleft() for _ in fresh]
                logits, new = self._begin(params, prompts, owner, fresh)
                cache = new if cache is None else _merged(cache, new, fresh, self.device)
                self._draw(logits, answers, fresh, owner, tokens, numbers)
                for row in fresh:
                    positions[row] = len(prompts[owner[row]])
                self._release(answers, owner, tokens)
                continue
            busy = np.flatnonzero(owner >= 0)
            at = (torch.from_numpy(v.copy()).to(self.device) for v in (tokens, positions))
            logits, cache = self.decode(params, *at, cache)
            self._draw(logits, answers, busy, owner, tokens, numbers)
            positions[busy] += 1
            self._release(answers, owner, tokens)

    def _begin(
        self, params: Any, prompts: Sequence[Sequence[int]], owner: np.ndarray, fresh: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """Prefill the rows that are new; the others are looked at by nobody."""
        padded, last = np.zeros((self.rows, self.width), np.int64), np.zeros(self.rows, np.int64)
        for row in fresh:
            prompt = prompts[owner[row]]
            padded[row, : len(prompt)], last[row] = prompt, len(prompt) - 1
        return self.prefill(params, *(torch.from_numpy(v).to(self.device) for v in (padded, last)))

    def _draw(
        self, logits: Tensor, answers: Answers, rows: Sequence[int], owner: np.ndarray, tokens: np.ndarray,
        numbers: Tensor,
    ) -> None:  # fmt: skip
        """The next token of some rows."""
        if not len(rows):
            return
        whose = torch.from_numpy(owner[rows])
        at = answers.lengths[whose]
        own = logits.cpu()[torch.as_tensor(rows)]
        drawn, logprobs, entropy = draw(own, numbers[whose, at], self.temperature, self.top_p)
        for of, values in ((answers.tokens, drawn), (answers.logprobs, logprobs), (answers.entropy, entropy)):
            of[whose, at] = values
        answers.lengths[whose] += 1
        tokens[rows] = drawn.numpy()

    def _release(self, answers: Answers, owner: np.ndarray, tokens: np.ndarray) -> None:
        """Answers that have ended leave their rows."""
        for row in np.flatnonzero(owner >= 0):
            if int(tokens[row]) in self.stops or int(answers.lengths[owner[row]]) == self.length:
                owner[row] = -1


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


def _merged(cache: Any, new: Any, rows: Sequence[int], device: torch.device) -> Any:
    """Some rows of the new one."""
    taken = torch.zeros(len(new[0][0]), 1, 1, 1, dtype=torch.bool)
    taken[list(rows)] = True
    taken = taken.to(device)
    return [
        tuple(torch.where(taken, n, o) for n, o in zip(*each, strict=True))
        for each in zip(new, cache, strict=True)
    ]
