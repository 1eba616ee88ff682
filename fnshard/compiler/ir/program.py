"""The program: the forward of `fn` as a flat graph of composite ATen ops, with metadata of each node.

It is what a jaxpr is in JAX. Nodes are `torch.fx` nodes; `meta` of each holds `val` (its fake tensor) and
`autocast` (the mode it ran in, or None). Grad modes have become `aten.detach`, random ops have become
counter-based ones that read a key input, constants have become inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fnshard.compiler.ir.guard import Guard
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.tree import TreeDef

WRITES = re.compile(  # names of torch functions that change their first tensor
    r"__set(item)?__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|l?r?shift)__|.*[^_]_"
)


@dataclass(frozen=True)
class Input:
    """A placeholder: a "leaf" (name = path), "batch" leaf, "constant", random "key", or "axis" index."""

    kind: str
    name: str

    @property
    def value_name(self) -> ValueName:
        """Return the input's name in segments and schedules."""
        return ValueName(Kind(f"{self.kind}:"), self.name)


@dataclass(frozen=True)
class Limit:
    """A fixed size that the data may exceed; the excess, or 0, is one of the program's results.

    Args:
        result: the index of that result.
        size: the fixed size.
        op, place: the op that needs it, and its line of the user's code.
    """

    result: int
    size: int
    op: str
    place: str = ""


@dataclass(frozen=True)
class Outputs:
    """A description of which of the program's flat results are which of `fn`'s outputs.

    A forward-only program has no loss. Its entries of `aux` are tensors, Means and Python values.

    Args:
        loss: the index of the loss, or of the Mean's total.
        count: the index of the Mean's count, or None.
        aux_structure: the structure of the aux tree.
        aux: one entry per leaf of aux: ("scalar", i), ("complex", i, j), ("mean", i, j), ("tensor", i) or
            ("python", value).
        bound: the most that one rank's Mean may count, if `fn` says so.
        writes: by path, the index of the new value of a leaf that `fn` writes to.
        limits: limits that must not be exceeded.
    """

    loss: int | None
    count: int | None
    aux_structure: TreeDef | None
    aux: tuple[tuple[Any, ...], ...] = ()
    bound: float | None = None
    writes: Mapping[str, int] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()

    @property
    def summed(self) -> list[int]:
        """Return the indices that ranks sum: the loss, a Mean's count, scalars and Means of aux, limits.

        It is read of programs with a loss.
        """
        count = [] if self.count is None else [self.count]
        aux = [i for kind, *indices in self.aux if kind in ("scalar", "complex", "mean") for i in indices]
        return [self.loss, *count, *aux, *(limit.result for limit in self.limits)]

    @property
    def returned(self) -> list[int]:
        """Return the indices of results that are a rank's own.

        These are tensors of aux; in a program without a loss, Means and limits too.
        """
        kinds = ("tensor",) if self.loss is not None else ("tensor", "mean")
        aux = [i for kind, *indices in self.aux if kind in kinds for i in indices]
        return aux if self.loss is not None else [*aux, *(limit.result for limit in self.limits)]


@dataclass(frozen=True)
class Program:
    """A captured forward.

    Args:
        graph: the graph of composite ATen ops.
        inputs: names of the graph's placeholders, in order.
        constants: the tensors that `fn` closes over, by name.
        outputs: which results are which of `fn`'s outputs.
        fake_mode: the mode of the nodes' fake tensors.
        guard: the program is valid as long as it holds.
        rows: the rows of one rank's micro-batch.
        traced: for a program that is placed over axes, the one of whole values; otherwise None.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    constants: Mapping[str, Tensor]
    outputs: Outputs
    fake_mode: Any = field(repr=False, default=None)
    guard: Guard | None = field(repr=False, default=None)
    rows: int = 1
    traced: Program | None = field(repr=False, default=None)

    @property
    def placeholders(self) -> list[fx.Node]:
        """Return one node per entry of `inputs`."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])

    def as_text(self) -> str:
        """Return one line per node: name, op, arguments, shape and dtype."""
        lines = []
        names = dict(zip(self.placeholders, self.inputs, strict=True))
        for node in self.graph.nodes:
            if node.op == "placeholder":
                lines.append(
                    f"{node.name}: {names[node].kind} {names[node].name} {describe(node.meta['val'])}"
                )
            elif node.op == "call_function":
                target = str(node.target).removesuffix(".default")
                kwargs = "".join(f", {k}={v}" for k, v in node.kwargs.items())
                args = ", ".join(map(str, node.args))
                lines.append(f"{node.name} = {target}({args}{kwargs})  # {describe(node.meta.get('val'))}")
        lines.append(f"return {', '.join(str(n) for n in self.results)}")
        return "\n".join(lines)

    __str__ = as_text


# Results of decomposed ops may have other strides than those of the program's ops, and `view` may
# not fit them.
ANY_STRIDES = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Return `f32`, `bf16`, ...: a dtype as schedules and programs write it."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(value: Any) -> str:
    """Return `f32[2, 8]` for a tensor, and a tuple of these for several."""
    if isinstance(value, Tensor):
        return f"{short_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe, value)) + ")"
    return repr(value)


def replay(
    graph: fx.Graph, inputs: Sequence[Any], seen: Callable[[fx.Node, Any], None] | None = None,
    instead: Mapping[Any, Callable[..., Any]] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run a composite graph, each node in the autocast mode it was traced in, and return its outputs.

    Args:
        seen: called with each node and its value.
        instead: functions that run in the place of operators.
    """
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    with ExitStack() as stack:
        current = None
        for node in graph.nodes:
            if node.op == "output":
                return tuple(env[n] for n in node.args[0])
            if node.op == "placeholder":
                env[node] = next(feed)
            else:
                # Entering a mode takes time, so do it only where the mode changes.
                if node.meta.get("autocast") != current:
                    stack.close()
                    current = node.meta.get("autocast")
                    for device, dtype, enabled in current or ():
                        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = (instead or {}).get(node.target, node.target)(*args, **kwargs)
            if seen is not None:
                seen(node, env[node])
    raise AssertionError("a graph without an output")


def propagate(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """Run the graph on fakes, and keep each node's value (with its `requires_grad`) in `meta["val"]`."""

    def keep(node: fx.Node, value: Any) -> None:
        node.meta["val"] = value

    replay(graph, inputs, keep)


def propagate_gathered(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """Propagate values of a graph whose gathers make values contiguous that were none before.

    A view of a transpose, say, may not fit such a value. Then all views become reshapes.
    """
    try:
        propagate(graph, inputs)
    except (RuntimeError, ValueError):  # fake tensors raise both
        for view, reshape in ANY_STRIDES.items():
            for node in graph.find_nodes(op="call_function", target=view):
                node.target = reshape
        propagate(graph, inputs)


def storage_id(value: Tensor) -> int:
    """Return the identity of a (fake) tensor's storage: two values with the same one alias each other."""
    return value.untyped_storage()._cdata


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those in a list or tuple."""
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the tensors in a node's value."""
    return tensors_in(node.meta.get("val"))


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Return all nodes in the arguments of a call, in order."""
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults too."""
    schema = op._schema.arguments
    given = dict(zip([a.name for a in schema], args, strict=False)) | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments that this node's op writes to.

    A batch or instance norm in train mode writes to its running statistics, though its schema does not say
    so.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    statistics = [a.name for a in arguments if a.name in _RUNNING]
    if not node.target._schema.is_mutable and not statistics:
        return []

    # What the schema marks as written, and the running statistics of a norm in train mode.
    given = arguments_of(node.target, node.args, node.kwargs)
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if given.get("training") or given.get("use_input_stats"):
        written = list(dict.fromkeys([*written, *statistics]))
    return nodes_in([given[n] for n in written])


_RUNNING = ("running_mean", "running_var")


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Run `graph.eliminate_dead_code()`, but keep nodes that write, such as a norm that nobody reads."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(mutated_args(node)))
