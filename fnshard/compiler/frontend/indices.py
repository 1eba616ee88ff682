"""Indices by which a program looks up rows of a table, checked on the CPU before the step runs.

A kernel that meets an index outside of its table names nothing, ends the process (a loop of Inductor's on
several threads) or spoils the device. So indices that torch's own operations compute from the batch's
integers alone are computed beforehand too, as long as they are few numbers. Those that depend on floats,
parameters, a custom operation, or tensors on a device are left to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.deferred.tape import CPU, map_leaves
from fnshard.compiler.ir.program import Program, arguments_of, describe

# The most numbers that a result on the way to an index may have; or four for each integer of the batch.
FEW = 1 << 16
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_TABLES = {"embedding": "weight", "embedding_bag": "weight"}  # the argument that is the table, if not `self`
_INDICES = {
    "embedding": "indices", "embedding_bag": "indices", "gather": "index", "take": "index",
    "index": "indices", "index_put": "indices", "index_select": "index", "index_add": "index",
    "index_copy": "index", "scatter": "index", "scatter_add": "index", "scatter_reduce": "index",
    "cross_entropy_loss": "target", "nll_loss_nd": "target",
}  # fmt: skip


@dataclass(frozen=True)
class Lookup:
    """A lookup whose `index` has to be in `range(lowest, size)`, or to be `ignored`."""

    node: fx.Node
    table: fx.Node
    index: fx.Node
    size: int
    lowest: int = 0
    ignored: int | None = None

    def is_outside(self, values: Tensor) -> bool:
        """Return whether any of these indices is outside."""
        numbers = values.numpy()  # NumPy uses one thread; torch's wait for each other on a busy machine
        if self.ignored is not None:
            numbers = numbers[numbers != self.ignored]
        return bool(numbers.size) and not (self.lowest <= numbers.min() and numbers.max() < self.size)


@dataclass(frozen=True)
class Indices:
    """A program's lookups that can be checked; `compute` makes their indices from the inputs `names`."""

    lookups: tuple[Lookup, ...]
    names: tuple[tuple[str, str], ...]
    compute: Callable[..., Sequence[Tensor]]

    @staticmethod
    def of(program: Program) -> Indices:
        """Find the lookups whose indices depend on integers of the batch and constants on the CPU alone.

        They are those of the program of whole values: an index that is outside of this rank's part of a
        table may be in another rank's.
        """
        program = program.traced or program

        # Go forwards: which nodes can be computed on the CPU?
        known = dict(zip(program.placeholders, program.inputs, strict=True))
        integer_inputs = {n: i for n, i in known.items() if n.meta["val"].dtype in _INTEGERS}
        computable = {n for n, i in integer_inputs.items() if i.kind == "batch"}
        most = max(FEW, 4 * sum(n.meta["val"].numel() for n in computable))
        computable |= {
            n for n, i in integer_inputs.items() if i.kind == "constant" and program.constants[i.name].is_cpu
        }
        for node in program.graph.nodes:
            value, is_aten = node.meta.get("val"), getattr(node.target, "namespace", "") == "aten"
            is_cheap = isinstance(value, Tensor) and value.dtype in _INTEGERS and value.numel() <= most
            if is_aten and is_cheap and computable.issuperset(node.all_input_nodes):
                computable.add(node)
        lookups = tuple(k for n in program.graph.nodes for k in _find_lookups(n) if k.index in computable)

        # Go backwards: which of them do the indices need?
        needed = {k.index for k in lookups}
        for node in reversed(program.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)

        # Copy these into a graph of their own, in which tensors are made on the CPU.
        copied: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in program.graph.nodes:
            if node in needed:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                called = copied[node].args, copied[node].kwargs
                copied[node].args, copied[node].kwargs = map_leaves(called, torch.device, lambda _: CPU)
        graph.output([copied[k.index] for k in lookups])
        names = tuple((i.kind, i.name) for n, i in known.items() if n in needed)
        return Indices(lookups, names, fx.GraphModule(torch.nn.Module(), graph).forward)

    def outside(
        self, values: Mapping[str, Any], constants: Mapping[str, Tensor]
    ) -> list[tuple[Lookup, Tensor]]:
        """Return the lookups that would fail, with their indices.

        Reading a batch on a device would make the host wait for it: the list is then empty.

        Args:
            values: the values of one micro-batch, by name.
        """
        read = [(values if kind == "batch" else constants)[name] for kind, name in self.names]
        if not self.lookups or any(not v.is_cpu for v in read):
            return []
        with torch.no_grad():
            return [(k, v) for k, v in zip(self.lookups, self.compute(*read), strict=True) if k.is_outside(v)]


def explain(program: Program, outside: Sequence[tuple[Lookup, Tensor]]) -> list[str]:
    """Return a line for each lookup: its table, where `fn` calls it, and the numbers that it gets."""
    known = dict(zip(program.placeholders, program.inputs, strict=True))
    lines = []
    for lookup, values in outside:
        table = known.get(lookup.table)
        name = f"leaf {table.name!r} " if table is not None and table.kind == "leaf" else ""
        place = lookup.node.meta.get("stack_trace", "")
        op, shape = lookup.node.target.overloadpacket.__name__, describe(lookup.table.meta["val"])
        takes = f"takes {lookup.lowest} to {lookup.size - 1}, and gets {_describe_range(values)}"
        lines.append(f"{op} of {name}{shape} {takes}" + (f", at {place}" if place else ""))
    return lines


def ranges(named: Mapping[str, Any]) -> list[str]:
    """Describe the integer leaves of a batch, each with its least and its greatest number."""
    return [
        f"batch[{n!r}] {describe(v)}: {_describe_range(v)}"
        for n, v in named.items()
        if isinstance(v, Tensor) and v.numel() and not v.is_floating_point() and v.dtype != torch.bool
    ]


def _describe_range(values: Tensor) -> str:
    """Return the least and the greatest of some integers, in words."""
    low, high = map(int, torch.aminmax(values))
    return str(low) if low == high else f"{low} to {high}"


def _find_lookups(node: fx.Node) -> Iterator[Lookup]:
    """Yield a node's lookups: one for each tensor of indices."""
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    # A custom operator may have the name of one of torch's.
    if (
        node.op != "call_function"
        or packet is not getattr(torch.ops.aten, name, None)
        or name not in _INDICES
    ):
        return
    arguments = arguments_of(node.target, node.args, node.kwargs)
    table, index = arguments[_TABLES.get(name, "self")], arguments[_INDICES[name]]
    shape, ignored = table.meta["val"].shape, arguments.get("ignore_index")
    if not shape:
        return

    # Which dims are indexed, by which indices, and from which least number on?
    if name in ("index", "index_put"):
        used = [(d, i) for d, i in enumerate(index) if i is not None]
        if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in used):
            return  # a mask indexes as many dims as it has, and is never outside
        places = [(shape[d], i, -shape[d]) for d, i in used]
    elif name == "take":
        places = [(shape.numel(), index, -shape.numel())]
    else:
        dim = arguments.get("dim", 0 if name in _TABLES else min(1, len(shape) - 1))
        places = [(shape[dim], index, 0)]
    for size, indices, lowest in places:
        if indices.meta["val"].dtype in (torch.int64, torch.int32):
            yield Lookup(node, table, indices, size, lowest, ignored)
