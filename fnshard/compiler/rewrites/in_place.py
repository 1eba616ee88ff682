"""Turn every write into a new value, so that a program is pure and can be cut anywhere.

A write changes one tensor and all that shares its memory. Here it becomes one node: a pure function from the
memory's first tensor, its base, to a copy on which the op runs through the same views. A later reader of the
base, or of a view of it, reads the copy instead, through views that are made again. Autograd passes through
the copy, the views and the op as it does in torch, so that no op needs a rule of its own, and AOTAutograd
makes functional ops of them within a kernel.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.failures import error_at
from fnshard.compiler.ir.program import describe, mutated_args, replay, storage_id, tensors_in, tensors_of

aten = torch.ops.aten


def functionalize(graph: fx.Graph) -> fx.Graph:
    """Return the same program without writes, or `graph` itself if it has none.

    Args:
        graph: a graph whose nodes carry fake values; their storages say which nodes share memory. The nodes
            of the result have no values yet.

    Raises:
        TraceError: a write goes to memory whose copy would visibly have other strides, to an expanded tensor,
            or past `detach` with a gradient.

    >>> from fnshard.compiler.ir.program import propagate
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> row = graph.call_function(torch.ops.aten.select.int, (x, 0, 1))
    >>> _ = graph.call_function(torch.ops.aten.zero_.default, (row,))
    >>> _ = graph.output([x])
    >>> x = torch.ones(2, 2)
    >>> propagate(graph, [x.clone()])
    >>> pure = functionalize(graph)
    >>> [str(n.target) for n in pure.nodes if n.op == "call_function"]
    ['zero_(select.int(x0, 0, 1))']
    >>> replay(pure, [x])[0].tolist(), x.tolist()
    ([[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    """
    if not any(mutated_args(n) for n in graph.nodes):
        return graph
    _check_bases(graph)
    _check_expanded(graph)
    _check_detached(graph)
    return _Functional().run(graph)


def _check_bases(graph: fx.Graph) -> None:
    """Refuse writes to tensors with gaps or overlaps where strides show: a copy of such a tensor is dense."""
    bases = _bases(graph)
    strided: set[fx.Node] = set()
    for node in graph.nodes:
        views = {n for n in node.all_input_nodes if n in strided and _memories(n) & _memories(node)}
        if node.target is aten.as_strided.default or views:
            strided.add(node)

    # Gaps show only where `as_strided` looks into the memory.
    looked_into = {memory for node in strided for memory in _memories(node)}
    wrong = {}
    for node in graph.nodes:
        for memory, target in {(m, n) for n in mutated_args(node) for m in _memories(n)}:
            value = bases[memory].meta["val"]
            shown = "overlaps itself" if _overlaps(value) else "has gaps" if memory in looked_into else ""
            if shown and aten.clone.default(value).stride() != value.stride():
                wrong[memory] = (node, f"{describe(value)} with strides {list(value.stride())} {shown}")
            elif target in strided and bases[memory].op == "placeholder":  # a part of a larger tensor
                wrong[memory] = (node, f"{describe(value)}, an input, by as_strided")

    if wrong:
        raise error_at(
            f"`fn` writes in place to {len(wrong)} tensor(s) whose strides are not those of a copy:",
            list(wrong.values()),
            "make it dense (torch.empty, .contiguous()), or read it by index and slice, not by as_strided.",
        )


def _check_expanded(graph: fx.Graph) -> None:
    """Refuse writes through `expand`, as torch does on real tensors, but not on fake ones."""
    wrong = [
        (node, f"{describe(value)} with strides {list(value.stride())} by {node.target}")
        for node in graph.nodes
        for target in mutated_args(node)
        for value in tensors_of(_before_expand(node, target)[0])
        if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True))
    ]
    if wrong:
        raise error_at(
            f"`fn` writes in place to {len(wrong)} expanded tensor(s), whose elements share their memory:",
            wrong,
            "write to a copy (.expand(...).clone()), or to the tensor before it is expanded.",
        )


def _before_expand(node: fx.Node, target: fx.Node) -> tuple[fx.Node, bool]:
    """Return the tensor to write to: one number everywhere may be written to the tensor before an `expand`.

    Returns:
        That tensor, and whether a `detach` stands between it and the target.
    """
    detached = False
    while node.target in (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor):
        view = target
        while view.target is aten.detach.default:
            view = view.args[0]
        if view.target not in (aten.expand.default, aten.broadcast_to.default):
            break
        detached |= view is not target
        target = view.args[0]
    return target, detached


def _is_its_source(node: fx.Node) -> bool:
    """Return whether a node is a `detach` that cannot be told from its input, as of `torch.tensor(...)`."""
    if node.target is not aten.detach.default:
        return False
    source = node.args[0]
    fresh = all(_memories(source).isdisjoint(_memories(n)) for n in source.all_input_nodes)
    return fresh and len(source.users) == 1 and not source.meta["val"].requires_grad


def _check_detached(graph: fx.Graph) -> None:
    """Refuse gradients that are written through `detach`: other tensors of that memory get values alone."""
    wrong = [
        (node, f"{describe(node.meta['val'])} in the memory of {node.args[0]}")
        for node in graph.nodes
        if node.target is aten.detach.default and node.meta["val"].requires_grad and not _is_its_source(node)
    ]
    if wrong:
        raise error_at(
            f"`fn` writes values that need a gradient in place to {len(wrong)} detached tensor(s):",
            wrong,
            "write to a copy (.detach().clone()), or to the tensor itself.",
        )


@dataclass(frozen=True)
class Trial:
    """A run of a graph as it stands, which shows what shares memory, and which writes autograd sees.

    Autograd does not see a write through `detach`, or by an op that has no derivative (`logical_and_`).

    Args:
        values: the value of each node.
        bases: the first tensor in each memory.
        histories: the `grad_fn` of each base after the last node.
        recorded: writes that autograd has seen, each as (node, tensor argument).
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    bases: dict[int, Tensor] = field(default_factory=dict)
    histories: dict[int, Any] = field(default_factory=dict)
    recorded: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)

    def see(self, node: fx.Node, value: Any) -> None:
        """Note the value of a node that has run, and its inputs whose history has changed."""
        self.values[node] = value
        found = tensors_in(value)
        for read in node.all_input_nodes:
            for tensor in tensors_in(self.values[read]):
                memory = storage_id(tensor)
                if self.bases[memory].grad_fn is not self.histories[memory]:
                    self.recorded.add((node, read))
                found.append(tensor)
        for memory, tensor in [(storage_id(tensor), tensor) for tensor in found]:
            self.histories[memory] = self.bases.setdefault(memory, tensor).grad_fn

    def is_recorded(self, node: fx.Node, target: fx.Node) -> bool:
        """Return whether the write of `node` to `target` changes the gradient of what `target` shows."""
        return (node, target) in self.recorded


def _is_detached(node: fx.Node) -> bool:
    """Return whether a tensor is a view through `detach`, as under `no_grad` and by `.data`."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if node.target is aten.detach.default:
            return True
        if _memories(node).isdisjoint(_memories(node.args[0])):
            return False
        node = node.args[0]
    return False


def check_backward(
    graph: fx.Graph, loss: int, inputs: Sequence[Tensor], instead: Mapping[Any, Callable[..., Any]]
) -> None:
    """Refuse a write that autograd does not see, to a value that the backward of the loss reads.

    torch says nothing of one through `.data`, and takes the derivative at the new values.

    Args:
        loss: the index of the loss among the results.
        inputs: fake tensors; those that train require gradients.
        instead: functions that run in the place of operators without a derivative.

    Raises:
        TraceError: there is such a write.
    """
    writes = {node: [t for t in mutated_args(node) if _is_detached(t)] for node in graph.nodes}
    if not any(writes.values()):
        return
    trial = Trial()
    read: list[tuple[int, int]] = []  # memories that the backward reads, and how many nodes had run by then

    def keep(saved: Tensor) -> tuple[Tensor, int]:
        return saved, len(trial.values)

    def give(kept: tuple[Tensor, int]) -> Tensor:
        read.append((storage_id(kept[0]), kept[1]))
        return kept[0]

    trained = [v for v in inputs if v.requires_grad]
    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        total = replay(graph, inputs, trial.see, instead)[loss]
    if not total.requires_grad:
        return
    with suppress(RuntimeError):  # a fault of the backward itself is reported where its kernels are made
        torch.autograd.grad(total, trained, torch.ones_like(total), allow_unused=True)

    # Wrong is a write past autograd, after the value was saved, to memory that the backward reads.
    wrong = [
        (node, f"{describe(trial.values[target])} by {node.target}")
        for number, (node, targets) in enumerate(writes.items())
        for target in targets
        if not trial.is_recorded(node, target)
        and any(m == storage_id(trial.values[target]) and saved < number for m, saved in read)
    ]
    if wrong:
        raise error_at(
            f"`fn` writes past autograd to {len(wrong)} value(s) that its backward reads:",
            wrong,
            "write to a copy (h.clone() before it), or without .data and torch.no_grad().",
        )


def _overlaps(value: Tensor) -> bool:
    """Return whether two elements of a tensor may lie in the same place."""
    end = 0  # how far the dims so far reach
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += (size - 1) * stride
    return False


@dataclass(frozen=True, eq=False)
class Write:
    """An op in place as a pure function of the bases that it writes to, and of all else that it reads.

    It returns written copies of the bases, and after them what else the op returns; one tensor, or several.
    """

    graph: fx.Graph
    op: fx.Node  # the write inside `graph`

    def __call__(self, *values: Tensor) -> Any:
        results = replay(self.graph, values)
        return results[0] if len(results) == 1 else results

    @property
    def __name__(self) -> str:
        return self.op.target.__name__.split(".")[0]

    def __str__(self) -> str:
        """Return the op and the views that it writes through, of inputs x0, x1, ...; equal for equal code."""
        numbers = {n: f"x{i}" for i, n in enumerate(n for n in self.graph.nodes if n.op == "placeholder")}

        def text(value: Any) -> str:
            if isinstance(value, list | tuple):
                return f"[{', '.join(map(text, value))}]"
            if not isinstance(value, fx.Node):
                return repr(value)
            if value.target is aten.clone.default and value.args[0] in numbers:
                value = value.args[0]
            if value in numbers:
                return numbers[value]
            arguments = [*map(text, value.args), *(f"{k}={text(v)}" for k, v in value.kwargs.items())]
            name = getattr(value.target, "__name__", str(value.target)).removesuffix(".default")
            return f"{name}({', '.join(arguments)})"

        return text(self.op)


class _Functional:
    """A pass over a program: nodes of the old graph are keys, and `read` gives their current new node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.writes: Counter[int] = Counter()  # how often each memory was written to so far
        self.current: dict[fx.Node, fx.Node] = {}
        self.made_at: dict[fx.Node, dict[int, int]] = {}  # `writes` of its memories when `current` was made
        self.same: dict[fx.Node, fx.Node] = {}  # a node that is another: the result of an op in place
        self.results: dict[fx.Node, list[fx.Node]] = {}  # the results of an op in place that has several

    def run(self, graph: fx.Graph) -> fx.Graph:
        """Copy the graph node by node, with writes in the form of new values."""
        self.bases = _bases(graph)
        for node in graph.nodes:
            if node.op == "output":
                self.graph.output([self.read(n) for n in node.args[0]])
            elif mutated_args(node):
                self.write(node)
            elif _is_its_source(node):
                self.bind(node, node.args[0])
            elif node.target is operator.getitem and node.args[0] in self.results:
                self.bind(node, self.results[node.args[0]][node.args[1]])
            else:
                self.bind(node, self.graph.node_copy(node, self.read))
        self.graph.eliminate_dead_code()
        return self.graph

    def bind(self, node: fx.Node, value: fx.Node) -> None:
        """Let `node` be `value` from here on: a node of the new graph, or whatever an old node stands for."""
        if value.graph is self.graph:
            self.current[node] = value
            self.made_at[node] = self._writes(node)
        else:
            self.same[node] = self.same.get(value, value)

    def read(self, node: fx.Node) -> fx.Node:
        """Return `node` as it is now: a view of memory that was written to since is made again."""
        node = self.same.get(node, node)
        if self.made_at[node] != self._writes(node):
            self.bind(node, self.graph.node_copy(node, self.read))
        return self.current[node]

    def write(self, node: fx.Node) -> None:
        """Write a `Write` for `node`: its results become the bases, and whatever else `node` returned."""
        targets = mutated_args(node)
        memories = list(dict.fromkeys(m for n in targets for m in _memories(n)))
        bases = [self.bases[m] for m in memories]
        write, inputs = _make_write(node, bases, set(memories), self.same)
        made = self.graph.call_function(write, tuple(map(self.read, inputs)))
        made.meta = {k: node.meta[k] for k in _KEPT if k in node.meta}

        # The node returns the bases first, and then what the op returned that is none of their aliases.
        returned = [storage_id(v) in memories for v in tensors_of(node)]
        count = len(bases) + returned.count(False)
        parts = [self.graph.call_function(operator.getitem, (made, i)) for i in range(count)]
        parts = iter(parts if count > 1 else [made])

        self.writes.update(memories)
        for base in bases:
            self.bind(base, next(parts))
        aliases = iter(targets)
        self.results[node] = [next(aliases if alias else parts) for alias in returned]
        if isinstance(node.meta["val"], Tensor):
            self.bind(node, self.results[node][0])

    def _writes(self, node: fx.Node) -> dict[int, int]:
        """Return how often each memory of a node was written to so far."""
        return {m: self.writes[m] for m in _memories(node)}


def _make_write(
    node: fx.Node, bases: list[fx.Node], memories: set[int], same: dict[fx.Node, fx.Node]
) -> tuple[Write, list[fx.Node]]:
    """Return `node` as a pure function, and the old nodes that it takes."""
    body = fx.Graph()
    inputs: list[fx.Node] = []
    inside: dict[fx.Node, fx.Node] = {}
    # Views that no write can go through are copied; these are the functions that write them back, and inputs.
    copies: list[tuple[Any, ...]] = []

    def enter(old: fx.Node) -> fx.Node:
        inputs.append(old)
        return body.placeholder(f"x{len(inputs) - 1}")

    def place(old: fx.Node) -> fx.Node:
        old = same.get(old, old)
        if old not in inside:
            inside[old] = enter(old) if memories.isdisjoint(_memories(old)) else copy(old)
        return inside[old]

    def copy(old: fx.Node) -> fx.Node:
        new = body.node_copy(old, place)
        new.meta = {}  # all of it runs in the modes of the whole
        if old.target is aten._unsafe_view.default:
            new.target = aten.view.default  # autograd sees a write through this one
        if old.target is aten.unfold.default:
            new.target = read_windows
            copies.append((write_windows, new, *new.args))
        if old.target in _LAZY:
            (x,), new = new.args, body.call_function(resolve, (new,))
            copies.append((write_lazy, new, x, old.target))
        return new

    for base in bases:
        inside[base] = body.call_function(aten.clone.default, (enter(base),))

    # The op writes to the copies. One with odd strides is laid out by rows for it, and written back after it.
    targets: dict[fx.Node, fx.Node] = {}
    laid_out: list[tuple[fx.Node, fx.Node]] = []
    for old in dict.fromkeys(mutated_args(node)):
        before, detached = _before_expand(node, old)
        targets[old] = place(before)
        if detached:
            targets[old] = body.call_function(aten.detach.default, (targets[old],))
        if not _is_row_major(before):
            laid_out.append((targets[old], body.call_function(lay_out_by_rows, (targets[old],))))
            targets[old] = laid_out[-1][1]
    op = body.node_copy(node, lambda n: targets.get(n) or place(n))
    op.meta, op.target = {}, _TAKEN_APART.get(op.target, op.target)

    # Undo the copies in reverse order, then return the bases and all results in other memory.
    for target, rows in laid_out:
        body.call_function(aten.copy_.default, (target, rows))
    for back, *values in reversed(copies):
        body.call_function(back, tuple(values))
    values, several = tensors_of(node), not isinstance(node.meta["val"], Tensor)
    others = [i for i, v in enumerate(values) if storage_id(v) not in memories]
    fresh = [body.call_function(operator.getitem, (op, i)) if several else op for i in others]
    body.output((*(inside[base] for base in bases), *fresh))
    return Write(body, op), inputs


def read_windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Copy `x.unfold`: a write through the view itself would lose elements in no window, in torch."""
    return x.unfold(dim, size, step).clone()


def write_windows(windows: Tensor, x: Tensor, dim: int, size: int, step: int) -> None:
    """Write the windows that `read_windows` has copied back."""
    x.copy_(put_windows(windows, x, dim, size, step))


def put_windows(windows: Tensor, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Return a copy of x with the numbers of these windows in their places."""
    dim %= x.dim()
    starts = torch.arange(windows.shape[dim], device=x.device) * step
    places = (starts[:, None] + torch.arange(size, device=x.device)).flatten()
    return x.index_copy(dim, places, windows.movedim(-1, dim + 1).flatten(dim, dim + 1))


# Views that conjugate or negate when they are read, each its own inverse. A write through one would leave a
# base that does so too, which `view_as_real` refuses.
_LAZY = {
    aten.conj.default, aten._conj.default, aten._neg_view.default, aten.adjoint.default, aten.mH.default,
    aten.matrix_H.default,
}  # fmt: skip


def resolve(x: Tensor) -> Tensor:
    """Return the numbers of a tensor, in memory of their own if it is a lazy view."""
    return x.resolve_conj().resolve_neg()


def write_lazy(written: Tensor, x: Tensor, view: Any) -> None:
    """Write the copy that `resolve` has made of a view of x back."""
    x.copy_(resolve(view(written)))


def find_diagonal(x: Tensor, wrap: bool = False) -> Tensor:
    """Return a mask of the elements that `fill_diagonal_` writes to: equal indices, repeated if it wraps."""
    rows, *others = (
        torch.arange(size, device=x.device).reshape([-1 if d == dim else 1 for d in range(x.dim())])
        for dim, size in enumerate(x.shape)
    )
    rows = rows % (x.shape[1] + 1) if wrap and x.dim() == 2 else rows
    mask = torch.ones([1] * x.dim(), dtype=torch.bool, device=x.device)
    for other in others:
        mask = mask & (rows == other)
    return mask


def fill_diagonal(x: Tensor, value: Any, wrap: bool = False) -> Tensor:
    """Write as `fill_diagonal_` does, but not through strides."""
    return x.masked_fill_(find_diagonal(x, wrap), value)


def write_polygamma(x: Tensor, order: int) -> Tensor:
    """Write as `polygamma_` does."""
    return x.copy_(torch.polygamma(order, x.clone()))  # a clone, since autograd keeps the op's input


_TAKEN_APART = {  # ops that AOTAutograd cannot make functional
    aten.fill_diagonal_.default: fill_diagonal, aten.polygamma_.default: write_polygamma,
}  # fmt: skip


def _is_row_major(node: fx.Node) -> bool:
    """Return whether a tensor's strides fall from dim to dim, gaps or not."""
    value = node.meta["val"]
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return strides == sorted(strides, reverse=True)


def lay_out_by_rows(x: Tensor) -> Tensor:
    """Copy a tensor before a write.

    A pure op on `x` itself may return other strides, on which later views would fail.
    """
    return x.clone(memory_format=torch.contiguous_format)


_KEPT = ("autocast", "nn_module_stack", "stack_trace")


def _bases(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the first tensor in each memory."""
    bases: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            bases.setdefault(storage_id(node.meta["val"]), node)
    return bases


def _memories(node: fx.Node) -> set[int]:
    """Return the memories of a node's tensors."""
    return {storage_id(value) for value in tensors_of(node)}


def index_strided(graph: fx.Graph) -> bool:
    """Turn each `as_strided` into an index of the dense tensor whose memory it reads; return whether any was.

    The op's offset counts from the start of the memory. A program is traced with tensors that have memory of
    their own, but a step's leaves, micro-batches and saved values may be parts of larger tensors.

    Args:
        graph: a graph without writes; new nodes get no values.
    """
    bases, changed = _bases(graph), False
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value = node.meta["val"]
        base = bases[storage_id(value)]
        if not base.meta["val"].is_contiguous() or base.meta["val"].storage_offset():
            continue
        with graph.inserting_before(node):
            add = graph.call_function

            # The places in memory: the offset, and for each dim its stride times the index.
            places = add(
                aten.full.default,
                ([1] * value.dim(), value.storage_offset()),
                {"dtype": torch.int64, "device": value.device},
            )
            for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                row = add(aten.arange.start_step, (0, size), {"dtype": torch.int64, "device": value.device})
                row = add(aten.view.default, (row, [size if d == dim else 1 for d in range(value.dim())]))
                places = add(aten.add.Tensor, (places, row), {"alpha": stride})
            new = add(aten.index.Tensor, (add(aten.view.default, (base, [-1])), [places]))

        new.meta |= {k: v for k, v in node.meta.items() if k in _KEPT}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        changed = True
    return changed
