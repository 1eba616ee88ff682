"""`make_functional`: an `nn.Module`, unmodified, as a pure function over a flat `{path: tensor}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def make_functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """`apply, params`: `apply(params, *args, **kwargs)` is the module's forward, and pure.

    `params` holds every parameter and buffer once, by path: an `nn.Parameter` stays one (so that a
    frozen one is known), a buffer is marked as `nn.Buffer`. A tied weight is one leaf, under the
    first of its names. The module may live on the meta device. Train or eval mode is what the
    module was when `apply` was traced.

    >>> import torch
    >>> apply, params = make_functional(nn.Linear(3, 2))
    >>> {k: tuple(v.shape) for k, v in params.items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> apply(params, torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    params: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, leaf in model.named_parameters(remove_duplicate=False):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            params[path] = leaf
    for path, leaf in model.named_buffers(remove_duplicate=False):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            params[path] = leaf if isinstance(leaf, nn.Buffer) else _mark(leaf)

    def apply(params: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(model, params, args, kwargs, tie_weights=True)

    return apply, params


def _mark(leaf: Tensor) -> Tensor:
    return nn.Buffer(leaf.detach())


def aliases(model: nn.Module) -> dict[str, str]:
    """`{other name: the path it is stored under}` for tied parameters and buffers."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, leaf in named:
        if id(leaf) in first:
            out[path] = first[id(leaf)]
        else:
            first[id(leaf)] = path
    return out
