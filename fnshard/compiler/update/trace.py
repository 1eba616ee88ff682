"""Trace an optimizer's update of one whole leaf into a graph of ATen ops.

Leaves of one shape, dtype and setting are a family, which is traced once. Numbers that the update computes
from those of the step alone (rates, bias corrections) are cut off, as a prologue that runs once a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fnshard import tree
from fnshard.compiler.frontend.control_flow import without_dynamo
from fnshard.compiler.ir.program import WRITES, OpOverload, mutated_args, storage_id, tensors_of
from fnshard.compiler.kernels.inductor import TRACING
from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.rules import rule_of
from fnshard.errors import OptimizerError
from fnshard.optim.optimizer import Optimizer, Step, as_number, update_leaf

GRAD, PARAM, UPDATE = "grad", "param", "update"


def slot_name(name: str) -> str:
    """Return the name of a slot in graphs."""
    return f"slots.{name}"


@dataclass(frozen=True, eq=False)
class Prologue:
    """The part of an update that computes with a step's numbers alone.

    Args:
        graph: takes (count, norm, *results of `functions`), and returns the numbers that the update reads.
        functions: functions of the count that run on the host.
        norm: whether the numbers depend on the norm of all gradients.
    """

    graph: fx.Graph
    functions: tuple[Callable[[Tensor], Any], ...]
    norm: bool

    @cached_property
    def run(self) -> fx.GraphModule:
        """The graph as a function, generated when it is first run: planning needs no code."""
        return fx.GraphModule({}, self.graph)

    def numbers(self, step: Step) -> tuple[Tensor, ...]:
        """Return the numbers of one step, 0-d."""
        norm = step.global_norm if self.norm else torch.zeros((), dtype=torch.float64)
        return self.run(step.count, norm, *(as_number(f(step.count)) for f in self.functions))


@dataclass(frozen=True, eq=False)
class TracedUpdate:
    """The update of one whole leaf.

    Args:
        graph: composite ATen ops; `meta["val"]` of a node is its fake value.
        inputs: names of the placeholders: "grad", "param", "slots.NAME", "number.I", "constant.I".
        outputs: names of the results: "update", then "slots.NAME" of those that change.
        constants: tensors of the update's own, by name.
        prologue: the part that runs once a step.
        asks: whether the update has looked at more of its tensors than their dtypes, such as their sizes.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    prologue: Prologue
    asks: bool
    fake_mode: FakeTensorMode = field(repr=False)

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """The placeholders by name."""
        return dict(zip(self.inputs, self.graph.find_nodes(op="placeholder"), strict=True))

    @property
    def results(self) -> dict[str, fx.Node]:
        """The nodes of the results by name."""
        return dict(zip(self.outputs, self.graph.output_node().args[0], strict=True))

    @cached_property
    def is_elementwise(self) -> bool:
        """Return whether each element of its results depends on numbers and on inputs at its place alone."""
        shapes = {(), tuple(self.placeholders[PARAM].meta["val"].shape)}
        return all(
            {tuple(v.shape) for v in tensors_of(node)} <= shapes
            and (node.target is operator.getitem or rule_of(node.target) is elementwise)
            for node in self.graph.nodes
            if node.op == "call_function"
        ) and all({tuple(v.shape) for v in tensors_of(node)} <= shapes for node in self.placeholders.values())

    def resize(self, shape: Sequence[int]) -> TracedUpdate:
        """Return the elementwise update of a leaf, or of a block, of another shape."""
        graph, copies = fx.Graph(), {}
        graph.output(graph.graph_copy(self.graph, copies))
        with self.fake_mode:
            for node in copies.values():
                resized = [v.new_empty(tuple(shape)) if v.dim() else v for v in tensors_of(node)]
                node.meta["val"] = resized[0] if isinstance(node.meta["val"], Tensor) else tuple(resized)
        return replace(self, graph=graph)


ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]


def trace_update(
    optimizer: Optimizer, path: str, shape: Sequence[int], dtype: torch.dtype, grad_dtype: torch.dtype,
    slots: Mapping[str, ShapeAndDtype],
) -> TracedUpdate:  # fmt: skip
    """Trace the update of a whole leaf.

    Args:
        optimizer: the leaf's optimizer (`Optimizer.of`).
        dtype: the dtype of the parameter that is updated.
        grad_dtype: the dtype of the gradient as it comes.
        slots: shapes and dtypes of the whole slots.

    Raises:
        OptimizerError: the update writes in place, reads values, draws random numbers, or returns something
            that is no update.
    """
    # Fake inputs: gradient, parameter, slots, and the step's numbers.
    names = list(slots)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        grad, param = torch.empty(tuple(shape), dtype=grad_dtype), torch.empty(tuple(shape), dtype=dtype)
        state = [torch.empty(tuple(s), dtype=d) for s, d in slots.values()]
        count, norm = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.float64)

    functions: list[Callable[[Tensor], Any]] = []
    outputs: list[str] = []

    def run(grad: Tensor, param: Tensor, *given: Tensor) -> list[Tensor]:
        *state, count, norm = given
        functions.clear()  # it may be traced twice

        def evaluate(function: Callable[[Tensor], Any], of: Tensor) -> Tensor:
            if of is not count:
                raise OptimizerError(
                    f"{optimizer} asks for step.host(function) of a Step whose count is not the step's own.",
                    fix="change the count in the function: step.host(lambda count: f(count % 10)).",
                )
            functions.append(function)
            return ON_HOST(count, len(functions) - 1)

        step = Step(count, norm, evaluate)
        update, new = update_leaf(optimizer, path, grad, dict(zip(names, state, strict=True)), param, step)
        outputs[:] = [UPDATE, *(slot_name(n) for n in new)]
        return [update, *new.values()]

    watch = Watch()
    optimizer = replace(optimizer, update=watch.wrap(optimizer.update))
    with explain_failures(optimizer, path), TRACING, without_dynamo(), mode, torch.no_grad():
        module = trace_without_writes(run, grad, param, *state, count, norm)

    # Refuse what cannot be right on blocks, and give every input of the graph a name.
    graph, inputs = module.graph, [GRAD, PARAM, *map(slot_name, names), "count", "norm"]
    graph.eliminate_dead_code()
    _refuse_impure(optimizer, path, graph, names)
    _copy_aliases(graph, inputs, outputs)
    constants = _lift_constants(module, inputs)
    prologue = _cut_prologue(graph, inputs, functions)
    _fold_branches(graph)
    return TracedUpdate(graph, tuple(inputs), tuple(outputs), constants, prologue, watch.asks, mode)


def trace_without_writes(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    """Trace a function; one that writes to its own tensors is traced again, and functionalised."""
    # Few updates write to their tensors, so that few are traced twice.
    module = make_fx(function)(*given)
    if any(mutated_args(node) for node in module.graph.nodes):
        module = make_fx(torch.func.functionalize(function))(*given)
    return module


@contextmanager
def explain_failures(optimizer: Optimizer, path: str) -> Iterator[None]:
    """Turn failures on fake tensors into an error with the leaf and the way out."""
    try:
        yield
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{optimizer} cannot be traced on params[{path!r}] ({type(error).__name__}: {error})",
            fix="write init and update without float(), .item() and branches on values of tensors: "
            "torch.where or torch.cond chooses by values, step.host(function) by the number of the step.",
        ) from error


def _refuse_impure(optimizer: Optimizer, path: str, graph: fx.Graph, names: Sequence[str]) -> None:
    """Refuse writes to the update's inputs, and random numbers that no key determines."""
    texts = [GRAD, PARAM, *(f"slots[{n!r}]" for n in names)]
    known = dict(zip(graph.find_nodes(op="placeholder"), texts, strict=False))
    written = [known[n] for node in graph.nodes for n in mutated_args(node) if n in known]
    if written:
        raise OptimizerError(
            f"{optimizer} writes in place to {', '.join(dict.fromkeys(written))} of params[{path!r}].",
            fix="return new tensors: slots['m'].lerp(grad, 0.1), not slots['m'].lerp_(grad, 0.1).",
        )
    refuse_random(optimizer, path, graph)


def refuse_random(optimizer: Optimizer, path: str, graph: fx.Graph) -> None:
    """Refuse random numbers that no key determines.

    Raises:
        OptimizerError: names the op and the leaf.
    """
    random = [
        node.target for node in graph.nodes
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    ]  # fmt: skip
    if random:
        raise OptimizerError(
            f"{optimizer} draws random numbers for params[{path!r}] ({random[0]}), and each mesh would draw "
            "others.",
            fix="keep a key among the slots, and make numbers of it and of the element's place by integer "
            "arithmetic.",
        )


@dataclass(frozen=True, eq=False)
class Branch:
    """A `torch.cond` as the target of one node: a 0-d bool chooses one of two graphs of the same tensors."""

    true: fx.GraphModule
    false: fx.GraphModule
    __name__ = "branch"  # fx prints targets by their names

    def __call__(self, condition: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Run one of the graphs, or on fake tensors both, so that both count for memory.

        The host waits for a condition that is on a device.
        """
        is_true = isinstance(condition, FakeTensor) or bool(condition)
        if isinstance(condition, FakeTensor):
            self.false(*tensors)
        made = (self.true if is_true else self.false)(*tensors)
        # Results have the strides of the trace, and memory of their own: a side may return one of its inputs,
        # to which the update writes later.
        given = {value.untyped_storage()._cdata for value in tensors}
        return [
            value.clone(memory_format=torch.contiguous_format)
            if value.untyped_storage()._cdata in given
            else value.contiguous()
            for value in made
        ]


LIBRARY = torch.library.Library("fnshard", "FRAGMENT")

# `on_host` stands for `step.host(function)` in a trace, until the prologue is cut off.
LIBRARY.define("on_host(Tensor count, int function) -> Tensor")
LIBRARY.impl(
    "on_host",
    lambda count, function: torch.empty((), dtype=torch.float64, device=count.device),
    "CompositeExplicitAutograd",
)
ON_HOST = torch.ops.fnshard.on_host.default

# `one_of` stands for `torch.cond` in a trace, until its two sides are folded into a Branch.
LIBRARY.define("one_of(Tensor condition, Tensor[] true, Tensor[] false) -> Tensor[]")
LIBRARY.impl(
    "one_of",
    lambda condition, true, false: [torch.empty_like(v, memory_format=torch.contiguous_format) for v in true],
    "CompositeExplicitAutograd",
)
ONE_OF = torch.ops.fnshard.one_of.default


class Watch(TorchFunctionMode):
    """A mode that watches what an optimizer's functions call, and traces both sides of a `torch.cond`.

    Attributes:
        asks: whether they have asked for more of a tensor than a dtype or a device, such as its shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asks = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, watched."""

        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.higher_order.cond:
            with self:
                return _trace_both_sides(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) and len(out) else [out]  # an empty shape is a tuple too
        self.asks |= not all(isinstance(value, Tensor | torch.dtype | torch.device) for value in made)
        return out


class _SideMode(TorchFunctionMode):
    """A mode that refuses writes of one side of a `torch.cond` to tensors that the other sees too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}  # the side's own tensors by id, kept alive so that no id comes twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        changed = args[:1] if WRITES.fullmatch(name) else ()
        written = tree.flatten([*changed, (kwargs or {}).get("out")])[0]
        if any(isinstance(value, Tensor) and id(value) not in self.made for value in written):
            raise TypeError(f"a side of a torch.cond writes by {name} to a tensor from outside: return it")
        out = func(*args, **(kwargs or {}))
        self.made |= {id(v): v for v in (out if isinstance(out, tuple | list) else [out])}
        return out


def _trace_both_sides(
    pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """Write both sides of a `torch.cond` into the graph; `_fold_branches` separates them later."""
    with _SideMode():
        true, structure = tree.flatten(true_fn(*operands))
    with _SideMode():
        false, other = tree.flatten(false_fn(*operands))
    forms = [[(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in side] for side in (true, false)]
    if structure != other or forms[0] != forms[1]:
        raise TypeError(
            f"the two sides of a torch.cond return {forms[0]} and {forms[1]}: let them return tensors of the "
            "same names, shapes and dtypes"
        )
    return tree.unflatten(ONE_OF(pred, true, false), structure)


def _fold_branches(graph: fx.Graph) -> None:
    """Move the nodes that only one side of a `torch.cond` reads into a graph that runs if it is chosen."""
    # The last choice first: an earlier one may be on a side of it, and is then folded within that.
    while choices := graph.find_nodes(op="call_function", target=ONE_OF):
        # The nodes of each side: those whose every reader is of that side, from its results backwards.
        chosen = choices[-1]
        condition, true, false = chosen.args
        nodes_of: list[list[fx.Node]] = []
        for side, others in ((true, (*false, condition)), (false, (*true, condition))):
            own: dict[fx.Node, None] = {}
            for node in reversed(list(graph.nodes)):
                users = {*node.users}
                if node in side and node not in others:
                    users -= {chosen}
                elif not users:
                    continue
                if node.op == "call_function" and users <= own.keys():
                    own[node] = None
            nodes_of.append(list(reversed(own)))

        # Both graphs take all that either reads.
        read = [v for nodes in nodes_of for node in nodes for v in node.all_input_nodes] + [*true, *false]
        operands = [v for v in dict.fromkeys(read) if v not in nodes_of[0] and v not in nodes_of[1]]
        bodies = []
        for side, nodes in zip((true, false), nodes_of, strict=True):
            body = fx.Graph()
            made = {v: body.placeholder(f"operand_{i}") for i, v in enumerate(operands)}
            for outer, inner in made.items():
                inner.meta = dict(outer.meta)
            for node in nodes:
                made[node] = body.node_copy(node, made.__getitem__)
            body.output([made[v] for v in side])
            _fold_branches(body)
            bodies.append(fx.GraphModule({}, body))

        # The choice becomes one node, and the sides leave the graph.
        chosen.target, chosen.args = Branch(*bodies), (condition, *operands)
        for nodes in nodes_of:
            for node in reversed(nodes):
                graph.erase_node(node)


def _copy_aliases(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Copy results that share memory with another input.

    A slot that becomes the parameter, or another slot, would otherwise be written after that has changed.
    """
    owners = {
        storage_id(node.meta["val"]): name
        for node, name in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    output = graph.output_node()
    results = list(output.args[0])
    for number, (node, name) in enumerate(zip(results, outputs, strict=True)):
        owner = owners.get(storage_id(node.meta["val"]))
        if owner is not None and not (node.op == "placeholder" and owner == name):
            with graph.inserting_before(output):
                results[number] = graph.call_function(torch.ops.aten.clone.default, (node,))
            results[number].meta = dict(node.meta)
    output.args = (results,)


def _lift_constants(module: fx.GraphModule, inputs: list[str]) -> dict[str, Tensor]:
    """Turn tensors that the update closes over into inputs."""
    graph, constants = module.graph, {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        name = f"constant.{len(constants)}"
        with graph.inserting_after(last):
            last = graph.placeholder(name.replace(".", "_"))
        last.meta = {"val": node.meta.get("val", value), **node.meta}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        constants[name] = value
        inputs.append(name)
    return constants


def _cut_prologue(
    graph: fx.Graph, inputs: list[str], functions: Sequence[Callable[[Tensor], Any]]
) -> Prologue:
    """Cut off the nodes that depend on the step's numbers alone; results that are read become inputs."""
    # Numbers that depend on the count and the norm alone, and those of them that the update reads.
    named = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
    count, norm = named["count"], named["norm"]
    alone = {count: None, norm: None}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and alone.keys() >= {*node.all_input_nodes}:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dim() == 0:
                alone[node] = None
    read = [node for node in alone if any(user not in alone for user in node.users)]

    # The prologue. What the host computes is among its inputs.
    hosts, prologue = [node for node in alone if node.target is ON_HOST], fx.Graph()
    made = {node: prologue.placeholder(node.name) for node in (count, norm, *hosts)}
    for node in alone:
        if node not in made:
            made[node] = prologue.node_copy(node, made.__getitem__)
    prologue.output(tuple(made[node] for node in read))
    prologue.eliminate_dead_code()

    # In the update itself, the numbers that it reads become inputs.
    last = graph.find_nodes(op="placeholder")[-1]
    for number, node in enumerate(read):
        with graph.inserting_after(last):
            last = graph.placeholder(f"number_{number}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in alone)
        inputs.append(f"number.{number}")
    for node in reversed(alone):
        graph.erase_node(node)
    inputs.remove("count")
    inputs.remove("norm")
    return Prologue(prologue, tuple(functions[node.args[1]] for node in hosts), bool(made[norm].users))
