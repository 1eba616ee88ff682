"""Strategies: ways to run a call of an op over a mesh axis, and the registry of the rules that yield them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fnshard.compiler.ir.program import Input, OpOverload, arguments_of, nodes_in, tensors_in
from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Placement, Split, divides, fits, local_shape

ContextAttention = Literal["auto", "ulysses", "gather", "ring"]
Residual = Literal["split", "whole"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis to place a program over.

    Args:
        name, ranks: its name, and how many ranks it has.
        inputs: placements of placeholders; those not named are replicated.
        residual: "split" lets a sum be split along another dim where its parts are summed (sequence
            parallelism, Korthikanti et al. 2022); "whole" keeps it on all ranks.
        sliced: inputs that every rank has whole, and takes its part of: a batch along its sequence.
        later: ranks along the axes that are placed after this one. Heads that are cut in so many runs can be
            split over these too.
        attention: how attention runs over a sequence that this axis splits.
        update: whether the program is an optimizer's. Then ranks may have nothing of a leaf, and padding may
            hold anything. Ranks sum and gather, and each takes its part of what all have; nothing is
            scattered, so that a split value costs all its bytes wherever the whole is needed.
    """

    name: str
    ranks: int
    inputs: Mapping[Input, Placement]
    residual: Residual = "split"
    sliced: Mapping[Input, Split] = field(default_factory=dict)
    later: int = 1
    attention: ContextAttention = "auto"
    update: bool = False


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """The target of a node that one rank runs for all, on whole values.

    It reads values as they are split.

    Args:
        results: the placement of each result, by axis.
        values: a fake tensor for each result, as large as its part over the axes that were placed.
    """

    results: tuple[Mapping[str, Placement], ...]
    values: tuple[Tensor, ...]
    __name__ = "elsewhere"  # fx prints targets by their names

    def __call__(self, *reads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(v) for v in self.values)


@dataclass(frozen=True)
class Call:
    """A call of an op, on whole (fake) values.

    Args:
        target, args, kwargs: the op and its arguments.
        value: its result.
        current: the placements that its tensors have now.
        axis: the axis to place it over.
        source_line: its line of the user's code, if that is known.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    current: tuple[Placement, ...]
    axis: Axis
    source_line: str = ""

    @property
    def ranks(self) -> int:
        return self.axis.ranks

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Return all arguments by name, defaults filled in."""
        return arguments_of(self.target, self.args, self.kwargs)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return its tensor arguments in the order of the schema, lists taken apart."""
        return [t for argument in self.arguments.values() for t in tensors_in(argument)]

    @cached_property
    def outers(self) -> tuple[int, ...]:
        """Return the `outer` of all splits that its tensors have, and 1, the first."""
        return tuple(sorted({1} | {p.outer for p in self.current if isinstance(p, Split)}))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for calls which differ in values and placements alone."""

        def describe(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return tuple(value.shape), value.stride(), value.dtype, value.requires_grad

        return self.target, repr(map_aggregate((self.args, dict(self.kwargs)), describe))

    @cached_property
    def shape(self) -> Sequence[int]:
        """Return the shape of its (first) result."""
        return (self.value if isinstance(self.value, Tensor) else self.value[0]).shape

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def rebuild(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords of the call with some arguments changed."""
        named = self.arguments | dict(changes)
        schema = self.target._schema.arguments
        args = tuple(named[a.name] for a in schema if not a.kwarg_only)
        return args, {a.name: named[a.name] for a in schema if a.kwarg_only}

    def on(self, tensors: Sequence[Tensor], **changes: Any) -> Any:
        """Call the op on other tensors in the places of its own, and with some arguments changed."""
        feed = iter(tensors)

        def take(value: Any) -> Any:
            return next(feed) if isinstance(value, Tensor) else value

        # In the order of `tensors`, which takes lists apart.
        named = {n: [take(v) for v in a] if is_list(a) else take(a) for n, a in self.arguments.items()}
        args, kwargs = self.rebuild(named | changes)
        return self.target(*args, **kwargs)

    def splits(
        self, shape: Sequence[int], dims: Sequence[int] | None = None, even: bool = False,
        more: Sequence[int] = (),
    ) -> Iterator[Split]:  # fmt: skip
        """Yield the splits of a tensor of this shape, the best for a sum first.

        Args:
            dims: the dims to split; None is all.
            even: yield only those without padding.
            more: values of `outer` to try before those of the call's tensors.
        """
        outers = dict.fromkeys([*more, *self.outers])
        # A sum is best scattered along a long dim, not the last, which norms reduce.
        for dim in sorted(range(len(shape)), key=lambda d: (d == len(shape) - 1, -shape[d])):
            for outer in outers if dims is None or dim in dims else ():
                split = Split(dim, outer)
                if fits(shape, split, self.ranks, self.axis.update) and not (
                    even and not divides(shape, split, self.ranks)
                ):
                    yield split

    def part(self, shape: Sequence[int], split: Split) -> int:
        """Return the length of each of a rank's blocks along a split dim."""
        return local_shape(shape, split, self.ranks)[split.dim] // split.outer

    def local(self, placement: Placement, shape: Sequence[int] | None = None) -> list[int]:
        """Return the shape of a rank's part of the (first) result, or of a tensor of another shape."""
        return list(local_shape(self.shape if shape is None else shape, placement, self.ranks))


def is_list(value: Any) -> bool:
    """Return whether an argument is a list of values."""
    return isinstance(value, list | tuple)


def dims_of(value: Any, rank: int) -> list[int]:
    """Return the dims that an argument names; all if it is None or empty."""
    if value is None or (is_list(value) and not value):
        return list(range(rank))
    return [d % max(rank, 1) for d in (value if is_list(value) else [value])]


@dataclass(frozen=True)
class OpStrategy:
    """A way to run a call over the axis.

    Args:
        inputs: the placements that its tensors must have, in order.
        output: the placement that its results then have, one for all of them.
        changes: arguments of the local call that differ, by name.
        run: a function that runs instead of the op, `run(index, *tensors)`; `index` is this rank's on the
            axis, int64 0-d.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    changes: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] | None = None


Rule = Callable[[Call], Iterator[OpStrategy]]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these ops."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return add


def move_dims(call: Call, order: Sequence[int | None], linear: bool = True) -> Iterator[OpStrategy]:
    """Yield strategies of an op that only moves dims of its first tensor, or works along some of them.

    Args:
        order: for each dim of the result the one of the tensor, or None. A dim that is not in it must be
            whole. Other tensors are replicated.
        linear: whether the op passes parts of a sum.
    """
    others = (REPLICATED,) * (len(call.tensors) - 1)
    for split in call.splits(call.tensors[0].shape, [d for d in order if d is not None]):
        yield OpStrategy((split, *others), Split(order.index(split.dim), split.outer))
    if linear:
        yield OpStrategy((PARTIAL, *others), PARTIAL)


def broadcast(shape: Sequence[int], to: Sequence[int], split: Split) -> Placement:
    """Return the placement of an operand that is broadcast to a result which is split."""
    dim = split.dim - (len(to) - len(shape))
    return Split(dim, split.outer) if dim >= 0 and shape[dim] != 1 else REPLICATED


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a call in the order of its schema, lists taken apart."""
    if not isinstance(node.target, OpOverload):
        return nodes_in((node.args, node.kwargs))
    return nodes_in(arguments_of(node.target, node.args, node.kwargs))


def local_arguments(
    node: fx.Node, call: Call, strategy: OpStrategy, reads: Sequence[fx.Node]
) -> tuple[Any, Any]:
    """Return arguments and keywords of the local call, with no default that the program does not pass."""
    # What the program passes, with this rank's values in the places of whole ones.
    schema, feed = call.target._schema.arguments, iter(reads)
    positional = [a.name for a in schema if not a.kwarg_only]
    passed = dict(zip(positional, node.args, strict=False)) | dict(node.kwargs)
    local = {
        a.name: map_aggregate(passed[a.name], lambda v: next(feed) if isinstance(v, fx.Node) else v)
        for a in schema
        if a.name in passed
    }

    # Positional arguments up to the last one that is passed or changed; the rest by keyword.
    named = call.arguments | local | dict(strategy.changes)
    count = max([len(node.args), *(positional.index(n) + 1 for n in strategy.changes if n in positional)])
    keywords = [n for n in (local | dict(strategy.changes)) if n not in positional[:count]]
    return tuple(named[n] for n in positional[:count]), {n: named[n] for n in keywords}
