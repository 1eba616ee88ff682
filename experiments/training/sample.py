"""Text from the model: a fixed window of tokens, so that one compiled program serves every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.step.forward import Forward
from fnshard.step.lowered import Lowered

Logits = Callable[[Any, Tensor, Tensor], Tensor]


def last_logits(apply: Callable[[Any, Tensor], Tensor]) -> Logits:
    """`fn(params, tokens [B, T], last [B]) -> logits [B, V]`: what follows position `last` of each row."""

    def fn(params: Any, tokens: Tensor, last: Tensor) -> Tensor:
        logits = apply(params, tokens)  # [B, T, V]
        index = last[:, None, None].expand(-1, 1, logits.shape[-1])
        return logits.gather(1, index).squeeze(1)

    return fn


@dataclass(frozen=True)
class Sampler:
    """Draws tokens one by one.

    Args:
        forward: `last_logits`, of sharded parameters. All ranks call it together, each with a row of its own.
        context: T, tokens in the window. Beyond them the oldest fall out.
        temperature: logits are divided by it; below 1 keeps closer to the likely tokens.
        encode, decode: text to tokens and back.
    """

    forward: Forward
    context: int
    device: torch.device
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    temperature: float = 0.8

    def lower(self, params: Any) -> Lowered:
        """The program that draws a token."""
        return self.forward.lower(params, *self._window([0]))

    def __call__(self, params: Any, prompt: str, length: int, seed: int) -> str:
        """`prompt` and `length` tokens after it; what is not printable is a replacement sign."""
        random = torch.Generator().manual_seed(seed)
        written = list(self.encode(prompt))
        for _ in range(length):
            logits = self.forward(params, *self._window(written[-self.context :]))  # [1, V]
            # A model that is not finite (run.watch=off) gives noise, not an error: all ranks continue.
            logits = logits[0].float().cpu().nan_to_num()
            weights = torch.softmax(logits / self.temperature, dim=-1)
            written.append(int(torch.multinomial(weights, 1, generator=random)))
        return safe(self.decode(written))

    def _window(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """The arguments [1, T] and [1] of `last_logits`."""
        last = torch.tensor([len(tokens) - 1], device=self.device)
        # What comes after `last` is never looked at: attention is causal.
        padded = tokens + [0] * (self.context - len(tokens))
        return torch.tensor([padded], device=self.device), last


def safe(text: str) -> str:
    """Text without what a terminal would take for a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
