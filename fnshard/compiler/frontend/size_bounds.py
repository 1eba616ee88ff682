"""Size bounds: what `fn` promises for sizes which depend on data, and by how much a step exceeds them.

A trace collects the bounds. `compiler.ir.program.Outputs` says which of the program's results the excesses
are, and they travel with the step's scalars, so that nothing waits for a device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.frontend import transforms
from fnshard.compiler.ir.program import Limit, Outputs
from fnshard.errors import StateError, TraceError

__all__ = ["bounded"]

_state = threading.local()


def bounded(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Return `x`, and promise that a length of it that depends on data is at most `size`.

    `x[mask]`, `torch.nonzero`, `torch.where(mask)`, `torch.masked_select`, `torch.unique` and
    `torch.repeat_interleave` have such a length. A step computes with as many entries as there can be at
    most: all of a mask's, or with a bound only `size` of them, which is less work. `repeat_interleave` has no
    such maximum, and needs a bound. Results are those of plain torch on the true length. In JAX it is the
    argument `size` of `jnp.nonzero`, where the caller masks entries past the count.

    Args:
        x: a tensor with that length along `dim`.
        size: a number known before the step, such as the capacity of an expert.

    Raises:
        TraceError: `size` is no integer, or `x` has no such dim.
        StateError: `x` is longer. A step raises it when its numbers are there: on a GPU with the next step,
            or with `metrics.numbers()`.

    >>> x, mask = torch.arange(6.0), torch.tensor([True, False, True, False, False, False])
    >>> rows = bounded(x[mask], 3)
    >>> torch.zeros(6).index_add(0, bounded(mask.nonzero()[:, 0], 3), rows * 10)
    tensor([ 0.,  0., 20.,  0.,  0.,  0.])
    """
    if not isinstance(size, Integral):
        raise TraceError(
            f"fs.bounded takes an integer as `size`, not {type(size).__name__}.",
            fix="a size that is known before the step: a plain Python number.",
        )
    if not -x.dim() <= dim < x.dim():
        raise TraceError(
            f"`fn` calls fs.bounded along dim {dim} of {list(x.shape)}.",
            fix="bound what is selected, x[mask] or mask.nonzero()[:, 0], before it is reduced.",
        )

    # In a trace the length is a symbol, of which the promise is noted; in plain torch it is known.
    length = x.shape[dim]
    if isinstance(length, torch.SymInt):
        torch._check(length <= size)
        limits = getattr(_state, "limits", None)
        if limits is not None:
            limits.promised.add(length.node.expr)
    elif length > size:
        raise StateError(
            f"dim {dim} of a tensor of shape {list(x.shape)} is longer than its bound of {size}.",
            fix=f"fs.bounded(x, {length}).",
        )
    return x


def check_limits(numbers: Mapping[Any, float]) -> None:
    """Refuse a step that has exceeded a limit.

    Args:
        numbers: the numbers of a step by name; by how much limits are exceeded, by `Limit`.
    """
    exceeded = {n: int(v) for n, v in numbers.items() if isinstance(n, Limit) and v > 0}
    if exceeded:
        enough = max(limit.size + more for limit, more in exceeded.items())
        raise StateError(
            "the batch needs more than `fn` has a bound for; what the step has computed is wrong:",
            [
                f"{limit.op}{f' at {limit.place}' if limit.place else ''}: {more} more than its bound of "
                f"{limit.size}, in all ranks and micro-batches together"
                for limit, more in exceeded.items()
            ],
            f"a bound of {enough} is enough for this batch; go on from the last checkpoint, or from a copy "
            "of the state.",
        )


class Limits:
    """A context that collects the limits which are required in it, each with its excess."""

    def __init__(self) -> None:
        self.found: list[tuple[Limit, Tensor]] = []
        self.promised: set[Any] = set()  # expressions of lengths that `bounded` has met

    def __enter__(self) -> Limits:
        self._before, _state.limits = getattr(_state, "limits", None), self
        return self

    def __exit__(self, *_: Any) -> None:
        _state.limits = self._before

    def clear(self) -> None:
        """Begin again with another trace."""
        self.found.clear()
        self.promised.clear()

    def append(self, outputs: Outputs, values: list[Tensor]) -> tuple[Outputs, list[Tensor]]:
        """Append the limits and excesses collected so far to outputs and values, and begin anew."""
        limits = tuple(replace(n, result=len(values) + i) for i, (n, _) in enumerate(self.found))
        values = values + [excess for _, excess in self.found]
        self.found.clear()
        return replace(outputs, limits=outputs.limits + limits), values


def is_promised(length: torch.SymInt) -> bool:
    """Return whether `fn` has called `bounded` for a length.

    Its excess is reported even where this batch cannot exceed it, so that programs of all batch shapes have
    the same results.
    """
    return length.node.expr in {length.node.shape_env.replace(e) for e in _state.limits.promised}


def require(excess: Tensor, size: int, op: str, place: str = "") -> None:
    """Have the step report its failure where an excess is positive.

    Args:
        excess: a 0-d integer tensor: by how much more is needed than `size`.
        size: the bound.
        op, place: the op that needs it, and the line of the user's code that calls it.

    Raises:
        TraceError: the call is inside `torch.func`, from where no value can be reported.
    """
    # A value of a functorch level cannot become a result of the program.
    if transforms.is_nested():
        raise TraceError(
            f"{op} has a bound of {size} inside a transform of torch.func, which cannot report that it is "
            "exceeded.",
            fix="select the rows before it is called, and pass them to it.",
        )
    with torch.no_grad():
        _state.limits.found.append((Limit(-1, size, op, place), excess.clamp(min=0).double()))
