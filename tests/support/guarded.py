"""Steps of functions that read globals and closures, which guards watch; compared with plain autograd at each
call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from toys import plain_grads

import fnshard as fs
from fnshard import LayoutSpec

WIDTH = 4
PARAMS = {"w": torch.linspace(-1, 1, WIDTH, dtype=torch.float64)}
SPECS = fs.match_specs(PARAMS, [("*", LayoutSpec())])
X = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
Fn = Callable[[Any, Tensor], Tensor]


def assert_plain(step: Any, fn: Fn, params: dict[str, Tensor] = PARAMS, *batch: Any) -> None:
    """Assert that the step gives the loss and gradients of plain autograd, with what `fn` reads now."""
    batch = batch or (X,)
    torch.testing.assert_close(step(params, *batch), plain_grads(fn, params, *batch), atol=1e-12, rtol=0)


def make(fn: Fn, **options: Any) -> Any:
    """Make an eager step of a function of `PARAMS`."""
    return fs.shard_step(fn, SPECS, backend="eager", **options)


def scaled(p: Any, x: Tensor, scale: Any) -> Tensor:
    """Return a loss that depends on `scale`, a number or a tensor that the function reads."""
    return (p["w"] * x * scale).square().sum()
