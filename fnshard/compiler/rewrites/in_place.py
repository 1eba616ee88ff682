"""Turn every write into a new value, so that a program is pure and can be cut anywhere.

A write changes one tensor and all that shares its memory. Here it becomes one node: a pure function from the
memory's first tensor, its base, to a copy on which the op runs through the same views. A later reader of the
base, or of a view of it, reads the copy instead, through views that are made again. Autograd passes through
the copy, the views and the op as it does in torch, so that ops need no rules here, and AOTAutograd makes
functional ops of them within a kernel.
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
    return _Functionalizer().run(graph)


def _check_bases(graph: fx.Graph) -> None:
    """Refuse writes to tensors with gaps or overlaps where strides show: a copy of such a tensor is dense."""
    # Find what `as_strided` returns, with all views of it.
    bases = _find_bases(graph)
    strided: set[fx.Node] = set()
    for node in graph.nodes:
        views = {n for n in node.all_input_nodes if n in strided and _find_memories(n) & _find_memories(node)}
        if node.target is aten.as_strided.default or views:
            strided.add(node)

    # Overlaps always show, and gaps only where `as_strided` looks into the memory.
    strided_memories = {memory for node in strided for memory in _find_memories(node)}
    wrong = {}
    for node in graph.nodes:
        for memory, target in {(m, n) for n in mutated_args(node) for m in _find_memories(n)}:
            value = bases[memory].meta["val"]
            fault = ""
            if _has_overlap(value):
                fault = "overlaps itself"
            elif memory in strided_memories:
                fault = "has gaps"
            if fault and aten.clone.default(value).stride() != value.stride():
                wrong[memory] = (node, f"{describe(value)} with strides {list(value.stride())} {fault}")
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
        That tensor, and whether there is a `detach` between it and the target.
    """
    is_detached = False
    while node.target in (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor):
        view = target
        while view.target is aten.detach.default:
            view = view.args[0]
        if view.target not in (aten.expand.default, aten.broadcast_to.default):
            break
        is_detached |= view is not target
        target = view.args[0]
    return target, is_detached


def _is_its_source(node: fx.Node) -> bool:
    """Return whether a node is a `detach` that cannot be told from its input, as in `torch.tensor(...)`."""
    if node.target is not aten.detach.default:
        return False
    source = node.args[0]
    is_fresh = all(_find_memories(source).isdisjoint(_find_memories(n)) for n in source.all_input_nodes)
    return is_fresh and len(source.users) == 1 and not source.meta["val"].requires_grad


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
    """A run of a graph without changes, which shows what shares memory, and which writes autograd sees.

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
        tensors = tensors_in(value)
        for read in node.all_input_nodes:
            for tensor in tensors_in(self.values[read]):
                # A write that autograd sees gives the base another `grad_fn`.
                memory = storage_id(tensor)
                if self.bases[memory].grad_fn is not self.histories[memory]:
                    self.recorded.add((node, read))
                tensors.append(tensor)
        for tensor in tensors:
            memory = storage_id(tensor)
            self.histories[memory] = self.bases.setdefault(memory, tensor).grad_fn

    def is_recorded(self, node: fx.Node, target: fx.Node) -> bool:
        """Return whether the write of `node` to `target` changes the gradient of what `target` shows."""
        return (node, target) in self.recorded


def _is_detached(node: fx.Node) -> bool:
    """Return whether a tensor is a view through `detach`, as under `no_grad` and by `.data`."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if node.target is aten.detach.default:
            return True
        if _find_memories(node).isdisjoint(_find_memories(node.args[0])):
            return False
        node = node.args[0]
    return False


def check_backward(
    graph: fx.Graph, loss: int, inputs: Sequence[Tensor], instead: Mapping[Any, Callable[..., Any]]
) -> None:
    """Refuse a write that autograd does not see, to a value that the backward of the loss reads.

    torch does not report a write through `.data`, and takes the derivative at the new values.

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

    # Run forward and backward, and note what the backward reads and when the forward has saved it.
    trial = Trial()
    reads: list[tuple[int, int]] = []  # a memory, and how many nodes had run when a tensor of it was saved

    def pack(saved: Tensor) -> tuple[Tensor, int]:
        return saved, len(trial.values)

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        saved, count = packed
        reads.append((storage_id(saved), count))
        return saved

    trained = [v for v in inputs if v.requires_grad]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        total = replay(graph, inputs, trial.see, instead)[loss]
    if not total.requires_grad:
        return
    with suppress(RuntimeError):  # a fault of the backward itself is reported where its kernels are made
        torch.autograd.grad(total, trained, torch.ones_like(total), allow_unused=True)

    # A write is wrong if it goes past autograd, after the value was saved, to memory that the backward reads.
    wrong = [
        (node, f"{describe(trial.values[target])} by {node.target}")
        for number, (node, targets) in enumerate(writes.items())
        for target in targets
        if not trial.is_recorded(node, target)
        and any(m == storage_id(trial.values[target]) and count < number for m, count in reads)
    ]
    if wrong:
        raise error_at(
            f"`fn` writes past autograd to {len(wrong)} value(s) that its backward reads:",
            wrong,
            "write to a copy (h.clone() before it), or without .data and torch.no_grad().",
        )


def _has_overlap(value: Tensor) -> bool:
    """Return whether two elements of a tensor may lie in the same place."""
    end = 0  # the last place that the dims so far reach
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += (size - 1) * stride
    return False


@dataclass(frozen=True, eq=False)
class Write:
    """A pure function that does what an op in place does, of its bases and of all else that the op reads.

    It returns written copies of the bases, and after them what else the op returns: one tensor, or several.
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
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        names = {n: f"x{i}" for i, n in enumerate(placeholders)}

        def show(value: Any) -> str:
            if isinstance(value, list | tuple):
                return f"[{', '.join(map(show, value))}]"
            if not isinstance(value, fx.Node):
                return repr(value)
            # The copy of a base is written as the base itself.
            if value.target is aten.clone.default and value.args[0] in names:
                value = value.args[0]
            if value in names:
                return names[value]
            arguments = [*map(show, value.args), *(f"{k}={show(v)}" for k, v in value.kwargs.items())]
            name = getattr(value.target, "__name__", str(value.target)).removesuffix(".default")
            return f"{name}({', '.join(arguments)})"

        return show(self.op)


class _Functionalizer:
    """A pass over a program: nodes of the old graph are keys, and `read` gives their current new node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.writes: Counter[int] = Counter()  # how often each memory was written to so far
        self.current: dict[fx.Node, fx.Node] = {}
        self.made_at: dict[fx.Node, dict[int, int]] = {}  # `writes` of its memories when `current` was made
        self.same: dict[fx.Node, fx.Node] = {}  # results of ops in place, with the nodes that they are
        self.results: dict[fx.Node, list[fx.Node]] = {}  # the results of an op in place that has several

    def run(self, graph: fx.Graph) -> fx.Graph:
        """Copy the graph node by node, with writes in the form of new values."""
        self.bases = _find_bases(graph)
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
        """Let `node` be `value` from here on: a node of the new graph, or that of an old node."""
        if value.graph is self.graph:
            self.current[node] = value
            self.made_at[node] = self._count_writes(node)
        else:
            self.same[node] = self.same.get(value, value)

    def read(self, node: fx.Node) -> fx.Node:
        """Return the current new node of `node`: a view of memory that was written since is made again."""
        node = self.same.get(node, node)
        if self.made_at[node] != self._count_writes(node):
            self.bind(node, self.graph.node_copy(node, self.read))
        return self.current[node]

    def write(self, node: fx.Node) -> None:
        """Insert a `Write` for `node`: its results become the bases, and whatever else `node` returned."""
        targets = mutated_args(node)
        memories = list(dict.fromkeys(m for n in targets for m in _find_memories(n)))
        bases = [self.bases[m] for m in memories]
        write, inputs = _make_write(node, bases, set(memories), self.same)
        new = self.graph.call_function(write, tuple(map(self.read, inputs)))
        new.meta = {k: node.meta[k] for k in _KEPT if k in node.meta}

        # The new node returns the bases first, and then what the op returns that is no alias of them.
        is_alias = [storage_id(v) in memories for v in tensors_of(node)]
        count = len(bases) + is_alias.count(False)
        parts = [self.graph.call_function(operator.getitem, (new, i)) for i in range(count)]
        parts = iter(parts if count > 1 else [new])

        # Readers of a base take its copy from here on. Aliases that the op returns are its targets, in order.
        self.writes.update(memories)
        for base in bases:
            self.bind(base, next(parts))
        aliases = iter(targets)
        self.results[node] = [next(aliases if each else parts) for each in is_alias]
        if isinstance(node.meta["val"], Tensor):
            self.bind(node, self.results[node][0])

    def _count_writes(self, node: fx.Node) -> dict[int, int]:
        """Return how often each memory of a node was written to so far."""
        return {m: self.writes[m] for m in _find_memories(node)}


def _make_write(
    node: fx.Node, bases: list[fx.Node], memories: set[int], same: dict[fx.Node, fx.Node]
) -> tuple[Write, list[fx.Node]]:
    """Return `node` as a pure function, and the old nodes that it takes."""
    body = fx.Graph()
    inputs: list[fx.Node] = []
    inside: dict[fx.Node, fx.Node] = {}
    # Views that no write can go through are copied. Each entry is the function that writes a copy back, and
    # its arguments.
    copies: list[tuple[Any, ...]] = []

    # Inside the body, a value in other memory is an input, and a view of a base is made again from its copy.
    def enter(old: fx.Node) -> fx.Node:
        inputs.append(old)
        return body.placeholder(f"x{len(inputs) - 1}")

    def place(old: fx.Node) -> fx.Node:
        old = same.get(old, old)
        if old not in inside:
            inside[old] = enter(old) if memories.isdisjoint(_find_memories(old)) else copy(old)
        return inside[old]

    def copy(old: fx.Node) -> fx.Node:
        new = body.node_copy(old, place)
        new.meta = {}  # the whole body runs in the modes of the write
        if old.target is aten._unsafe_view.default:
            new.target = aten.view.default  # autograd sees a write through this one
        if old.target is aten.unfold.default:
            new.target = read_windows
            copies.append((write_windows, new, *new.args))
        if old.target in _LAZY:  # the view's numbers are computed, and readers take these
            (x,), new = new.args, body.call_function(resolve, (new,))
            copies.append((write_lazy, new, x, old.target))
        return new

    for base in bases:
        inside[base] = body.call_function(aten.clone.default, (enter(base),))

    # The op writes to the copies. A copy whose strides do not fall is laid out by rows for the op, and the
    # result is written back.
    targets: dict[fx.Node, fx.Node] = {}
    laid_out: list[tuple[fx.Node, fx.Node]] = []
    for old in dict.fromkeys(mutated_args(node)):
        before, is_detached = _before_expand(node, old)
        target = place(before)
        if is_detached:
            target = body.call_function(aten.detach.default, (target,))
        if not _is_row_major(before):
            rows = body.call_function(lay_out_by_rows, (target,))
            laid_out.append((target, rows))
            target = rows
        targets[old] = target
    op = body.node_copy(node, lambda n: targets.get(n) or place(n))
    op.meta, op.target = {}, _DECOMPOSED.get(op.target, op.target)

    # Undo the copies in reverse order, then return the bases and all results in other memory.
    for target, rows in laid_out:
        body.call_function(aten.copy_.default, (target, rows))
    for write_back, *arguments in reversed(copies):
        body.call_function(write_back, tuple(arguments))
    has_several = not isinstance(node.meta["val"], Tensor)
    others = [i for i, v in enumerate(tensors_of(node)) if storage_id(v) not in memories]
    results = [body.call_function(operator.getitem, (op, i)) if has_several else op for i in others]
    body.output((*(inside[base] for base in bases), *results))
    return Write(body, op), inputs


def read_windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Copy `x.unfold`: a write through the view itself would lose elements in no window, in torch."""
    return x.unfold(dim, size, step).clone()


def write_windows(windows: Tensor, x: Tensor, dim: int, size: int, step: int) -> None:
    """Write windows of x, which `read_windows` has copied, back to x."""
    x.copy_(put_windows(windows, x, dim, size, step))


def put_windows(windows: Tensor, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Return a copy of x with the numbers of these windows in their places."""
    dim %= x.dim()
    starts = torch.arange(windows.shape[dim], device=x.device) * step
    indices = (starts[:, None] + torch.arange(size, device=x.device)).flatten()
    return x.index_copy(dim, indices, windows.movedim(-1, dim + 1).flatten(dim, dim + 1))


# Views that conjugate or negate when they are read, each its own inverse. A write through one would leave a
# base that does so too, which `view_as_real` refuses.
_LAZY = {
    aten.conj.default, aten._conj.default, aten._neg_view.default, aten.adjoint.default, aten.mH.default,
    aten.matrix_H.default,
}  # fmt: skip


def resolve(x: Tensor) -> Tensor:
    """Return the numbers of a tensor; those of a lazy view are computed into new memory."""
    return x.resolve_conj().resolve_neg()


def write_lazy(written: Tensor, x: Tensor, view: Any) -> None:
    """Write a view of x, which `resolve` has copied, back to x."""
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


_DECOMPOSED = {  # ops that AOTAutograd cannot make functional
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


def _find_bases(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the first tensor in each memory."""
    bases: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            bases.setdefault(storage_id(node.meta["val"]), node)
    return bases


def _find_memories(node: fx.Node) -> set[int]:
    """Return the memories of a node's tensors, by the identities of their storages."""
    return {storage_id(value) for value in tensors_of(node)}


def index_strided(graph: fx.Graph) -> bool:
    """Turn each `as_strided` into an index of the dense tensor whose memory it reads.

    The op's offset counts from the start of the memory. In the trace each tensor has memory of its own, but a
    step's leaves, micro-batches and saved values may be parts of larger tensors.

    Args:
        graph: a graph without writes; new nodes get no values.

    Returns:
        Whether the graph has changed.
    """
    bases, has_changed = _find_bases(graph), False
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value = node.meta["val"]
        base = bases[storage_id(value)]
        if not base.meta["val"].is_contiguous() or base.meta["val"].storage_offset():
            continue
        with graph.inserting_before(node):
            add = graph.call_function

            # The positions in memory: the offset, and for each dim its stride times the index.
            positions = add(
                aten.full.default,
                ([1] * value.dim(), value.storage_offset()),
                {"dtype": torch.int64, "device": value.device},
            )
            for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                row = add(aten.arange.start_step, (0, size), {"dtype": torch.int64, "device": value.device})
                row = add(aten.view.default, (row, [size if d == dim else 1 for d in range(value.dim())]))
                positions = add(aten.add.Tensor, (positions, row), {"alpha": stride})
            new = add(aten.index.Tensor, (add(aten.view.default, (base, [-1])), [positions]))

        new.meta |= {k: v for k, v in node.meta.items() if k in _KEPT}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        has_changed = True
    return has_changed
