"""Batches: what a step is given beside its state: checked, cut, and what a lowering depends on of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.trace import flatten_batch
from fnshard.errors import StateError, report
from fnshard.losses import Whole


def micro_batch(batch: Sequence[Any], parts: int) -> tuple[Any, ...]:
    """The first of `parts` micro-batches; `Whole` leaves stay as they are.

    Raises:
        StateError: names every leaf that cannot be cut.
    """
    if parts == 1:
        return tuple(batch)
    named, structure = tree.flatten_with_paths(tuple(batch))
    tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
    wrong = [
        f"batch[{n!r}] {list(v.shape)}" for n, v in tensors.items() if v.dim() == 0 or v.shape[0] % parts
    ]
    if wrong:
        raise StateError(
            report(
                f"{len(wrong)} batch leaves cannot be cut into {parts} equal micro-batches along dim 0:",
                wrong,
                f"make their first dim a multiple of {parts}, or wrap what must not be cut in fs.Whole(...).",
            )
        )
    cut = [v.narrow(0, 0, v.shape[0] // parts) if n in tensors else v for n, v in named.items()]
    return tree.unflatten(cut, structure)


def bytes_of_batch(batch: Sequence[Any]) -> dict[str, int]:
    """Of its tensors, by name, all micro-batches together."""
    named = flatten_batch(batch)[0].items()
    return {n: v.numel() * v.element_size() for n, v in named if isinstance(v, Tensor)}


def batch_key(batch: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """What a lowering depends on: shapes, dtypes, and the values of all that is no tensor."""

    def describe(value: Any) -> Any:
        if isinstance(value, Whole):
            return ("whole", describe(value.value))
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.dtype)
        return (type(value).__name__, repr(value))

    named, structure = tree.flatten_with_paths(tuple(batch))
    return (("(structure)", str(structure)), *((n, describe(v)) for n, v in named.items()))


_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), Enum, slice, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def check_leaves(batch: Sequence[Any]) -> None:
    """Refuse batch leaves that are neither tensors nor constants: they would be baked in, as they are."""
    named = tree.flatten_with_paths(tuple(batch))[0]
    inner = {n: v.value if isinstance(v, Whole) else v for n, v in named.items()}
    wrong = [
        f"batch[{n!r}] is {'fs.Whole of ' if isinstance(named[n], Whole) else ''}{type(v).__name__}"
        for n, v in inner.items()
        if not isinstance(v, Tensor) and not isinstance(v, _CONSTANTS)
    ]
    if wrong:
        raise StateError(
            report(
                f"{len(wrong)} batch leaves are neither tensors nor plain Python constants:",
                wrong,
                "torch.as_tensor(array) for an array; for an object its tensors, in a dict; fs.Whole around "
                "each tensor, not around a tree of them.",
            )
        )


def check_arguments(fn: Callable[..., Any], batch: Sequence[Any]) -> None:
    """Refuse a batch that lacks an argument of `fn`, or has one too many."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *batch)
    except TypeError as error:
        raise StateError(
            report(
                f"the batch does not fit `fn`: {error}.",
                [f"fn{signature}, called with the parameters and {len(batch)} batch arguments"],
                "pass the arguments of `fn` behind the parameters, in order: step(state, *batch).",
            )
        ) from error
