"""`make_functional`: an `nn.Module`, unmodified, as a pure function over a flat `{path: tensor}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fnshard.errors import TraceError, leaves, report


def make_functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """`apply, params`: `apply(params, *args, **kwargs)` is the module's forward, and pure.

    `params` holds every parameter and buffer once, by path: an `nn.Parameter` stays one (so that a
    frozen one is known), a buffer is marked as `nn.Buffer`. A tied weight is one leaf, under the
    first of its names, as an alias of the module's own. The module may live on the meta device. Train
    or eval mode is what the module was when `apply` was traced.

    The marks (parameter, frozen, buffer, tied) are on the tensors and are lost with them: cast by
    `model.to(dtype)` beforehand or by `LayoutSpec(compute_dtype=)`, not by `{k: v.to(dtype) ...}`.

    Raises:
        TraceError: a parameter has gradient hooks; in `apply`, a module assigns to its own leaf.

    >>> import torch
    >>> apply, params = make_functional(nn.Linear(3, 2))
    >>> {k: tuple(v.shape) for k, v in params.items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> apply(params, torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    _check_hooks(model)
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

    names: dict[str, list[str]] = {}
    for other, path in aliases(model).items():
        names.setdefault(path, []).append(other)
    for path, others in names.items():
        params[path] = _alias(params[path])  # no mark is left on the module's own
        params[path].tied_names = tuple(others)

    def apply(params: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        held = dict(params)  # functional_call writes what the module assigns to its own names back here
        result = functional_call(model, held, args, kwargs, tie_weights=True)
        _check_assigned([p for p, leaf in params.items() if held[p] is not leaf])
        return result

    return apply, params


def _check_hooks(model: nn.Module) -> None:
    hooked = [
        f"params[{path!r}]"
        for path, leaf in model.named_parameters()
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks
    ]
    if hooked:
        raise TraceError(
            report(
                f"{leaves(len(hooked))} of {type(model).__name__} with a gradient hook, "
                "which a pure function does not run:",
                hooked,
                "remove the hooks; scale or mask gradients in the optimizer, as a transform by path.",
            )
        )


def _check_assigned(paths: list[str]) -> None:
    if paths:
        raise TraceError(
            report(
                f"the module assigns to {leaves(len(paths))} of its own in forward, which is lost:",
                [f"params[{path!r}]" for path in paths],
                "compute it as a local value, or return the new value in aux and pass it with the batch.",
            )
        )


def _mark(leaf: Tensor) -> Tensor:
    return nn.Buffer(leaf.detach())


def _alias(leaf: Tensor) -> Tensor:
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(leaf.detach(), requires_grad=leaf.requires_grad)
    return _mark(leaf)


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
