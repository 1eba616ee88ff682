"""Reuse: compiled kernels of a training step that serve a forward of the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnshard.compiler.kernels.differentiate import Kernel

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class FirstResults:
    """A compiled kernel without its last results, which only a backward reads."""

    compiled: Boxed
    count: int

    def __call__(self, args: list[Tensor]) -> Sequence[Tensor]:
        return self.compiled(args)[: self.count]


def reusable(
    kernels: Iterable[Kernel], others: Iterable[Kernel], compiled: Mapping[tuple[str, bool], Boxed]
) -> dict[tuple[str, bool], Boxed]:
    """Forwards of `kernels` that keep nothing and are compiled already, for a step that trains.

    Args:
        others: that step's kernels.
        compiled: what is compiled of these, by name and whether it is the backward.
    """
    by_code = {k.source.forward_code: k for k in others if (k.name, False) in compiled}
    found: dict[tuple[str, bool], Boxed] = {}
    for kernel in kernels:
        other = by_code.get(kernel.source.forward_code)
        if other is not None and not kernel.saved and _targets(kernel) == _targets(other):
            whole, count = compiled[other.name, False], len(kernel.source.outputs)
            found[kernel.name, False] = FirstResults(whole, count) if other.saved else whole
    return found


def _targets(kernel: Kernel) -> list[Any]:
    """What its code calls: functions of two users may print alike."""
    return [node.target for node in kernel.source.graph.nodes if node.op == "call_function"]
