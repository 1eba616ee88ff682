"""Outputs: what `fn` returns, taken apart into tensors and the way they lie; what is no loss is refused."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.program import Outputs, describe
from fnshard.errors import TraceError, leaves
from fnshard.losses import Mean


def read_outputs(result: Any, loss: bool) -> tuple[Outputs, list[Tensor]]:
    """What `fn` returned as flat tensors, and how they lie in it.

    Args:
        loss: it is a loss, or `(loss, aux)`; else any tree.

    Raises:
        TraceError: no loss, or a Mean that is none.
    """
    values: list[Tensor] = []

    def add(value: Tensor) -> int:
        values.append(value)
        return len(values) - 1

    def aux_entry(leaf: Any) -> tuple[Any, ...]:
        if isinstance(leaf, Mean):
            _check_mean(leaf, "aux")
            return ("mean", add(leaf.total), add(_count(leaf)))
        if isinstance(leaf, Tensor):
            if not loss or leaf.dim():
                return ("tensor", add(leaf))
            return ("complex", add(leaf.real), add(leaf.imag)) if leaf.is_complex() else ("scalar", add(leaf))
        return ("python", leaf)

    if not loss:
        flat, structure = tree.flatten(result, constants=True)
        _check_leaves(flat, result, "output")
        return Outputs(None, None, structure, tuple(aux_entry(leaf) for leaf in flat)), values
    head, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(head, Mean):
        _check_mean(head, "the loss")
        _check_count(head.count)
    total = head.total if isinstance(head, Mean) else head
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        what = describe(total) if isinstance(total, Tensor) else type(total).__name__
        raise TraceError(
            f"`fn` must return a loss that is a 0-d float tensor, or (loss, aux); it returned {what}.",
            fix="reduce it: loss.mean(), or fs.Mean(total, count) for an exact mean over all ranks.",
        )
    index = add(total)
    count = add(_count(head)) if isinstance(head, Mean) else None
    flat, structure = tree.flatten(aux, constants=True) if aux is not None else ([], None)
    _check_leaves(flat, aux, "aux")
    entries = tuple(aux_entry(leaf) for leaf in flat)
    bound = head.bound if isinstance(head, Mean) else None
    return Outputs(index, count, structure, entries, bound), values


def _check_leaves(flat: list[Any], result: Any, place: str) -> None:
    """Refuse objects: a tensor inside would be the tracer's, without numbers."""
    wrong = [i for i, v in enumerate(flat) if not isinstance(v, Tensor | Mean) and not tree.is_constant(v)]
    if wrong:
        paths = list(tree.flatten_with_paths(result, constants=True)[0]) if flat[0] is not result else []
        names = [f"{place}[{paths[i]!r}] is {_class(flat[i])}" for i in wrong] if paths else []
        raise TraceError(
            f"`fn` returns {leaves(len(wrong))} that are neither tensors nor plain constants:",
            names or [f"{place} is {_class(result)}"],
            f"{tree.how_to_register(flat[i] for i in wrong)}return tensors and constants, in dicts, "
            "lists, tuples and registered classes.",
        )


def _class(value: Any) -> str:
    return f"{type(value).__name__}{', a dataclass' if is_dataclass(value) else ''}"


def _check_mean(mean: Mean, place: str) -> None:
    wrong = []
    total, count, bound = mean.total, mean.count, mean.bound
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        wrong.append(f"total is {_kind(total)}, not a 0-d float tensor")
    counted = isinstance(count, Tensor) and count.dim() == 0 and not count.dtype.is_complex
    if not counted and not _is_number(count) and not isinstance(count, torch.SymInt):
        wrong.append(f"count is {_kind(count)}, not a 0-d tensor or a number")
    if bound is not None and not (_is_number(bound) and 0 < bound < float("inf")):
        wrong.append(f"bound is {_kind(bound)}, not a positive finite number or None")
    if wrong:
        raise TraceError(
            f"`fn` returns in {place} a Mean that is none:",
            wrong,
            "fs.Mean(losses.sum(), mask.sum()): sums over this rank's items, not vectors of them.",
        )


def _check_count(count: Any) -> None:
    """Refuse a loss that is divided by what trains: gradients are summed before the count is known."""
    if isinstance(count, Tensor) and count.requires_grad:
        raise TraceError(
            "the count of the loss's Mean depends on leaves that train, and has no gradient.",
            fix="count.detach() where it is a mere number; else return total / count, the mean of one rank, "
            "and fs.Mean(total, count) in aux.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {str(value)[:40]}"


def _count(mean: Mean) -> Tensor:
    count = mean.count
    if isinstance(count, Tensor):
        return count if count.dtype.is_floating_point else count.to(torch.float32)
    number = count if isinstance(count, torch.SymInt) else float(count)  # x[mask].shape[0] is known by then
    return torch.full((), number, dtype=torch.float32, device=mean.total.device)
