"""Program: the forward of `fn` as a flat graph of composite ATen ops, with what is known of each node.

The framework's jaxpr. Nodes are `torch.fx` nodes; `meta` of each holds `val` (its fake tensor) and
`autocast` (the mode it ran in, or None). Grad modes have become `aten.detach`, random ops have
become counter-based ones that read a key input, constants have become inputs.
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
    """One placeholder: a "leaf" (name = path), "batch" leaf, "constant", random "key", index on an "axis"."""

    kind: str
    name: str

    @property
    def value_name(self) -> ValueName:
        """Return what segments and schedules call it."""
        return ValueName(Kind(f"{self.kind}:"), self.name)


@dataclass(frozen=True)
class Limit:
    """A limit of what `fn` has a fixed number of: by how much more it needs is a result, 0 if that is enough.

    `result`: its index. `op`, `place`: who needs it, and in which line of the user's code.
    """

    result: int
    size: int
    op: str
    place: str = ""


@dataclass(frozen=True)
class Outputs:
    """How `fn`'s outputs lie in the program's flat ones.

    `loss`: index of the loss (or of the Mean's total); `count`: index of the Mean's count, or None.
    `aux`: structure and one entry per aux leaf: ("scalar", i), ("complex", i, j), ("mean", i, j),
    ("tensor", i) or ("python", value). `bound`: the Mean's own. `writes`: by path, the index of a written
    leaf's new value. `limits`: what must not be exceeded. A forward-only program has no loss and only
    "tensor" entries.
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
        """Indices of what ranks sum with the loss: it, a Mean's count, scalars and Means of aux, limits."""
        count = [] if self.count is None else [self.count]
        aux = [i for kind, *rest in self.aux if kind in ("scalar", "complex", "mean") for i in rest]
        return [self.loss, *count, *aux, *(limit.result for limit in self.limits)]

    @property
    def returned(self) -> list[int]:
        """Indices of a rank's own results: tensors of aux, and what nobody sums where there is no loss."""
        kinds = ("tensor",) if self.loss is not None else ("tensor", "mean")
        aux = [i for kind, *rest in self.aux if kind in kinds for i in rest]
        return aux if self.loss is not None else [*aux, *(limit.result for limit in self.limits)]


@dataclass(frozen=True)
class Program:
    """The captured forward.

    `inputs` name the graph's placeholders in order. `rows`: of one rank's micro-batch. It holds while `guard`
    does. `traced`: of a program that is placed over axes, the one of whole values.
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
        """One node per entry of `inputs`."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])

    def as_text(self) -> str:
        """One line per node: name, op, arguments, shape and dtype."""
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


# Decomposed ops may have other strides than the ops of the program, whose views may not fit them.
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
    """`f32`, `bf16`, ...: the notation of schedules and programs."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(value: Any) -> str:
    """`f32[2, 8]` for a tensor, a tuple of these for several."""
    if isinstance(value, Tensor):
        return f"{short_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe, value)) + ")"
    return repr(value)


def replay(
    graph: fx.Graph, inputs: Sequence[Any], seen: Callable[[fx.Node, Any], None] | None = None,
    instead: Mapping[Any, Callable[..., Any]] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run a composite graph, each node in the autocast mode it was traced in; returns its outputs.

    Args:
        seen: called with each node and its value.
        instead: what runs in the place of an operator.
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
    """Run the graph on fakes, and keep each node's value (with its `requires_grad`) in `meta`."""

    def keep(node: fx.Node, value: Any) -> None:
        node.meta["val"] = value

    replay(graph, inputs, keep)


def storage_id(value: Tensor) -> int:
    """Identity of a (fake) tensor's storage: two values with the same one alias each other."""
    return value.untyped_storage()._cdata


def tensors_in(value: Any) -> list[Tensor]:
    """A value that is a tensor, or the tensors in a list of several."""
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """A node's value, or the tensors in it."""
    return tensors_in(node.meta.get("val"))


def nodes_in(arguments: Any) -> list[fx.Node]:
    """All nodes in the arguments of a call, in order."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults too."""
    schema = op._schema.arguments
    given = dict(zip([a.name for a in schema], args, strict=False)) | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments that this node's op writes to.

    Of a batch or instance norm in train mode its running statistics too, though its schema does not say so.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    statistics = [a.name for a in arguments if a.name in _RUNNING]
    if not node.target._schema.is_mutable and not statistics:
        return []
    given = arguments_of(node.target, node.args, node.kwargs)
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if given.get("training") or given.get("use_input_stats"):
        written = list(dict.fromkeys([*written, *statistics]))
    return nodes_in([given[n] for n in written])


_RUNNING = ("running_mean", "running_var")


def eliminate_dead_code(graph: fx.Graph) -> None:
    """`graph.eliminate_dead_code()`, that keeps a norm for its running statistics alone."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(mutated_args(node)))
