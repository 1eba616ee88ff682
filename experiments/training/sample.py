"""Text from the model: a fixed window of tokens, so that one compiled program serves every token.

Nothing is cached from token to token: gathering weights that are sharded is most of what a token takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.step.lowered import Lowered
from fnshard.step.step import Forward

Logits = Callable[..., Tensor]


def last_logits(
    hidden: Callable[..., Tensor], head: Callable[[Any, Tensor], Tensor] = lambda _, x: x
) -> Logits:
    """`fn(params, tokens [B, T], last [B], *more) -> logits [B, V]`: what follows `last` in each row.

    Args:
        hidden: of tokens, and `more` of them, [B, T, D]; or their logits.
        head: what is left to do for a position: [B, 1, D] to [B, 1, V].
    """

    def fn(params: Any, tokens: Tensor, last: Tensor, *more: Any) -> Tensor:
        every = hidden(params, tokens, *more)
        index = last[:, None, None].expand(-1, 1, every.shape[-1])
        return head(params, every.gather(1, index)).squeeze(1)

    return fn


@dataclass(frozen=True)
class Sampler:
    """Draws tokens one by one.

    Args:
        forward: `last_logits`, of sharded parameters. All ranks call it together, each with rows of its own.
        context: T, tokens in the window. Beyond them the oldest fall out.
        temperature: logits are divided by it; below 1 keeps closer to the likely tokens, 0 takes the
            likeliest.
        more: what else `forward` takes of the prompts, their images.
    """

    forward: Forward
    context: int
    device: torch.device
    temperature: float = 0.8
    more: tuple[Any, ...] = ()

    def lower(self, params: Any) -> Lowered:
        """The program that draws a token for one row."""
        return self.forward.lower(params, *self._windows([[0]]))

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], length: int, seed: int = 0
    ) -> list[list[int]]:
        """`length` tokens after each prompt."""
        random = torch.Generator().manual_seed(seed)
        rows = [list(prompt) for prompt in prompts]
        for _ in range(length):
            logits = self.forward(params, *self._windows(rows), *self.more)  # [B, V]
            # A model that is not finite (run.watch=off) gives noise, not an error: all ranks continue.
            logits = logits.float().cpu().nan_to_num()
            if self.temperature:
                weights = torch.softmax(logits / self.temperature, dim=-1)
                drawn = torch.multinomial(weights, 1, generator=random)[:, 0]
            else:
                drawn = logits.argmax(-1)
            for row, token in zip(rows, drawn.tolist(), strict=True):
                row.append(token)
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    def _windows(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The arguments [B, T] and [B] of `last_logits`."""
        seen = [row[-self.context :] for row in rows]
        # What comes after `last` is never looked at: attention is causal.
        padded = [row + [0] * (self.context - len(row)) for row in seen]
        last = torch.tensor([len(row) - 1 for row in seen], device=self.device)
        return torch.tensor(padded, device=self.device), last


def safe(text: str) -> str:
    """Text without what a terminal would take for a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
