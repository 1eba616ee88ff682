"""A model, data and a loss of one's own, in the smallest: functions, as `_target_`s name them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fnshard as fs


def linear(width: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a function and its parameters, in the place of a module."""
    return lambda params, x: x @ params["w"] + params["b"], {"w": torch.zeros(width, 1), "b": torch.zeros(1)}


class Embedder(nn.Module):
    """A module from tokens [B, T] to logits [B, T, vocab], with a table that is no parameter."""

    def __init__(self, context: int, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, context)
        self.register_buffer("table", torch.ones(context, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Score each token by its embedding."""
        return (self.embed(tokens) * self.table) @ self.embed.weight.T


def points(count: int, width: int = 64) -> tuple[Any, Any]:
    """Return what is trained on, and what is measured."""
    x = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(0))
    items = list(zip(x, x.sum(1, keepdim=True), strict=True))
    return items[:count], items[count:]


def squares(model: Any, x: Tensor, y: Tensor) -> Any:
    """Return the mean square error, and the worst one."""
    errors = (model(x) - y).square()
    return fs.Mean(errors.sum(), float(errors.numel())), {"worst": errors.amax()}


def digits(prompts: list[str], answers: list[str], rows: list[Any]) -> list[float]:
    """Reward answers by their share of digits."""
    return [sum(map(str.isdigit, answer)) / max(1, len(answer)) for answer in answers]


class Deep(nn.Module):
    """A stack of many layers of one width, each kept for the backward."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum(1, keepdim=True)


class Counted:
    """A data set that counts how often an item of it is read."""

    reads = 0

    def __init__(self, width: int):
        self.width = width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        Counted.reads += 1
        return torch.ones(self.width), torch.ones(1)


def counted(width: int) -> tuple[Any, Any]:
    """Give the same data set to train on and to measure."""
    return Counted(width), Counted(width)
