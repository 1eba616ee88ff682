"""FLOPs: count the FLOPs, bytes, elementwise operations and launches of a kernel's graph.

A graph is counted once, whatever the hardware. Its seconds are a roofline for each piece of work (Williams et
al., CACM 2009). FLOPs of matmuls and convolutions are torch's own (`torch.utils.flop_counter`). Causal
attention counts half of the scores, since kernels skip the rest.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.analysis.hardware import Hardware
from fnshard.analysis.storages import tensors_of
from fnshard.compiler.ir.program import OpOverload, short_dtype
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Way


@dataclass(frozen=True)
class Work:
    """The work of one operator, or of a fused group of them.

    Args:
        kind: "matmul", "attention", "scatter" or "memory".
        flops: the FLOPs of matmuls and attention.
        cheap: the number of elementwise operations that are not transcendental.
        costly: the number of transcendental ones.
        launches: the number of operators that are started.
        size: the size by which the rate goes: a matmul's FLOPs, or an attention's length.
        head: the size of an attention's heads.
        unseen: the part of `flops` in blocks that a causal mask hides, which is half of all.
    """

    kind: str
    dtype: str
    flops: float
    read_bytes: float
    written_bytes: float
    cheap: float = 0.0
    costly: float = 0.0
    launches: int = 1
    size: float = 0.0
    head: float = 0.0
    unseen: float = 0.0

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds on the device, without the host's part."""
        streamed = hardware.memory.seconds(self.read_bytes + self.written_bytes)
        if self.kind == "scatter":
            worked = self.written_bytes / hardware.scatter
        elif self.kind == "memory":
            worked = self.cheap / hardware.elementwise + self.costly / hardware.transcendental
        elif self.kind == "attention":
            rate = hardware.rate_of(hardware.attention, self.dtype).at(self.size)
            worked = self.flops / rate / hardware.rate_of(hardware.attention_heads, self.dtype).at(self.head)
        else:
            worked = self.flops / hardware.rate_of(hardware.flops, self.dtype).at(self.size)
        return max(streamed, worked, self.launches * hardware.floor_seconds)


@dataclass(frozen=True)
class GraphCost:
    """A graph's work, in order."""

    work: tuple[Work, ...]

    @property
    def flops(self) -> float:
        """Count the FLOPs of matmuls, convolutions and attention."""
        return sum(w.flops for w in self.work)

    @property
    def model_flops(self) -> float:
        """Count the FLOPs without those of keys that no query sees."""
        return sum(w.flops - w.unseen for w in self.work)

    def flops_by_dtype(self) -> dict[str, float]:
        """Count the FLOPs by the dtype that is multiplied."""
        out: dict[str, float] = {}
        for w in self.work:
            if w.flops:
                out[w.dtype] = out.get(w.dtype, 0.0) + w.flops
        return out

    @property
    def launches(self) -> int:
        return sum(w.launches for w in self.work)

    def seconds(self, hardware: Hardware) -> float:
        return sum(w.seconds(hardware) for w in self.work)

    def host_seconds(self, hardware: Hardware) -> float:
        """Return the seconds that the host needs to start all of it."""
        return hardware.kernel_seconds + self.launches * hardware.launch_seconds


_COUNTED: weakref.WeakKeyDictionary[fx.GraphModule, dict[bool, GraphCost]] = weakref.WeakKeyDictionary()


def graph_cost(graph: fx.GraphModule | None, *, fused: bool) -> GraphCost:
    """Count one graph of core ATen ops. The result is remembered for as long as the graph lives.

    Args:
        graph: a graph whose nodes all have `meta["val"]`; None is no work.
        fused: whether elementwise chains and reductions between heavier operators touch memory only at their
            ends (Inductor). Otherwise every operator reads and writes (the eager backend).
    """
    if graph is None:
        return GraphCost(())
    known = _COUNTED.setdefault(graph, {})
    if fused not in known:
        known[fused] = GraphCost(
            tuple(_Counter(graph.graph).count_fused() if fused else _Counter(graph.graph).count_eager())
        )
    return known[fused]


def kernel_flops(kernel: Kernel, way: Way) -> float:
    """Count the FLOPs of a kernel one way, by which the tasks of a pipeline are put in order."""
    module = kernel.modules.get(way)
    return 0.0 if module is None else graph_cost(module, fused=True).flops


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """Return an argument of an operator, by name."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)
    return default


def _is_attention(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return "attention" in name and isinstance(node.target, OpOverload)


def _attention_flops(node: fx.Node) -> float:
    """Count the FLOPs of attention.

    A forward computes scores and their weighted sum, and a backward scores again and four gradients.
    Documents are data, so a row counts as one.
    """
    query, key, value = (_value(_argument(node, name, None)) for name in ("query", "key", "value"))
    scores, sums = (3, 2) if "backward" in node.target.__name__ else (1, 1)
    keys, window = key.shape[-2], _argument(node, "window", 0)
    causal = bool(_argument(node, "is_causal", False)) and not _is_other_block(node)
    seen = min(window if causal else 2 * window, keys) if window else keys * (0.5 if causal else 1.0)
    pairs = query.shape[:-1].numel() * seen
    return 2.0 * pairs * (scores * query.shape[-1] + sums * value.shape[-1])


def _is_other_block(node: fx.Node) -> bool:
    """Return whether a node attends to a block of other rows, which a mask shows or hides as a whole."""
    return not _argument(node, "first", True) or bool(_argument(node, "before", ()))


def flops_of(node: fx.Node) -> float:
    """Count the FLOPs of one node by torch's formulas; 0 if it neither multiplies matrices nor attends."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    if _is_attention(node):
        return _attention_flops(node)
    if node.target is torch.ops.aten.linalg_qr.default:  # Householder's
        shape = node.args[0].meta["val"].shape
        return 8 / 3 * shape.numel() * shape[-1]
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


_COSTLY = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf",
    "erfc", "erfinv", "pow", "silu", "gelu", "softplus", "atan", "atan2", "acos", "asin", "sinh", "cosh",
    "mish", "elu", "logit", "lgamma", "digamma",
}  # fmt: skip
_MOVERS = {
    "cat", "clone", "gather", "index", "index_select", "embedding", "constant_pad_nd", "slice_scatter",
    "select_scatter", "copy", "repeat", "_to_copy", "full", "full_like", "empty", "zeros", "ones", "iota",
    "arange", "scalar_tensor", "_unsafe_index", "empty_strided", "new_zeros", "new_full", "rev", "flip",
    "empty_permuted", "expand_copy", "where", "convert_element_type", "lift_fresh_copy", "masked_fill",
}  # fmt: skip
_LOOKUPS = {"embedding", "gather", "index", "index_select"}  # among them
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean", "argmax", "argmin", "any", "all",
    "logsumexp", "linalg_vector_norm", "count_nonzero", "_softmax", "_log_softmax", "native_layer_norm",
}  # fmt: skip
_SCATTERS = {
    "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter_add", "index_add",
    "embedding_dense_backward", "scatter_reduce",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    target = node.target
    return target._opname if isinstance(target, OpOverload) else getattr(target, "__name__", "")


def _kind(node: fx.Node) -> str:
    """Return "view", "matmul", "attention", "scatter", "pointwise", "reduction" or "other"."""
    if node.target is operator.getitem or (isinstance(node.target, OpOverload) and node.target.is_view):
        return "view"  # like a view, an item of what an operator returned moves no byte
    if _is_attention(node):
        return "attention"
    if flops_of(node):
        return "matmul"
    name, tags = _name(node), getattr(node.target, "tags", ())
    if name in _SCATTERS:
        return "scatter"
    if name in _REDUCTIONS or torch.Tag.reduction in tags:
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in tags or name in _MOVERS else "other"


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _bytes(value: Any) -> float:
    return float(sum(t.numel() * t.dtype.itemsize for t in tensors_of(value)))


def _numel(value: Any) -> int:
    return max((t.numel() for t in tensors_of(value)), default=0)


def _across_rows(node: fx.Node) -> bool:
    """Return whether a reduction sums over a dim before the last; its readers run in a loop of their own."""
    source, out = _value(node.args[0]), tensors_of(_value(node))
    if source is None or not out:
        return True
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else None
    return dims is None or any(d % max(source.dim(), 1) != source.dim() - 1 for d in dims)


class _Counter:
    """A walk over one graph."""

    def __init__(self, graph: fx.Graph):
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.kinds = {n: _kind(n) for n in self.nodes}
        self.bases: dict[fx.Node, fx.Node] = {}
        for n in graph.nodes:
            view = self.kinds.get(n) == "view" and n.all_input_nodes
            self.bases[n] = self.bases[n.all_input_nodes[0]] if view else n
        self.returned = {self.bases[n] for n in graph.output_node().all_input_nodes}

    def reads(
        self, node: fx.Node, skip: Callable[[fx.Node], bool] = lambda base: False
    ) -> dict[fx.Node, float]:
        """Return the bytes that a node reads of each value; a broadcast or a slice has fewer."""
        out: dict[fx.Node, float] = {}
        gathers = self.kinds[node] == "pointwise" and _name(node) in _LOOKUPS
        for source in node.all_input_nodes:
            base = self.bases[source]
            if not skip(base):
                size = min(_bytes(_value(source)), _bytes(_value(base)))
                size = min(size, _bytes(_value(node))) if gathers else size
                out[base] = max(out.get(base, 0.0), size)
        return out

    def work_of(self, node: fx.Node, read: float) -> Work:
        """Return the work of a node that reads so many bytes."""
        kind, value = self.kinds[node], _value(node)
        tensors = tensors_of(value)
        dtype = _compute_dtype(node, tensors)
        if kind == "matmul":
            flops = flops_of(node)
            return Work(kind, dtype, flops, read, _bytes(value), size=flops)
        if kind == "attention":
            length, head = tensors_of(_value(node.all_input_nodes[0]))[0].shape[-2:]
            flops, causal = flops_of(node), bool(_argument(node, "is_causal", False))
            unseen = flops / 2 if causal and _is_other_block(node) else 0.0
            size = {"size": float(length), "head": float(head), "unseen": unseen}
            return Work(kind, dtype, flops, read, _bytes(value), **size)
        if kind == "scatter":
            return Work(kind, dtype, 0.0, read, read + _bytes(value))

        # All the rest streams: its time is that of memory, or of its elementwise operations.
        cheap, costly = _operations(node, kind)
        return Work("memory", dtype, 0.0, read, _bytes(value), cheap, costly)

    def count_eager(self) -> Iterable[Work]:
        """Yield the work of each operator, which reads and writes memory by itself."""
        for node in self.nodes:
            if self.kinds[node] != "view":
                yield self.work_of(node, sum(self.reads(node).values()))

    def count_fused(self) -> Iterable[Work]:
        """Yield the work of groups of operators, which touch memory only at their ends."""
        for nodes in self._groups():
            if len(nodes) == 1 and not self._fusable(nodes[0]):
                yield self.work_of(nodes[0], sum(self.reads(nodes[0]).values()))
            else:
                yield self._group(nodes)

    def _fusable(self, node: fx.Node) -> bool:
        return self.kinds[node] in ("pointwise", "reduction")

    def _group(self, nodes: list[fx.Node]) -> Work:
        """Return the work of operators that are fused: only what comes from outside and leaves is in
        memory."""
        inside, reads = set(nodes), {}
        written = cheap = costly = 0.0
        for node in nodes:
            for base, size in self.reads(node, inside.__contains__).items():
                reads[base] = max(reads.get(base, 0.0), size)
            if node in self.returned or any(u not in inside for u in self._readers(node)):
                written += _bytes(_value(node))
            more_cheap, more_costly = _operations(node, self.kinds[node])
            cheap, costly = cheap + more_cheap, costly + more_costly
        return Work("memory", "f32", 0.0, sum(reads.values()), written, cheap, costly)

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        """Return what reads a value, itself or through views."""
        out, queue = set(), list(node.users)
        while queue:
            user = queue.pop()
            if self.kinds.get(user) == "view":
                queue += user.users
            elif user.op == "call_function":
                out.add(user)
        return out

    def _groups(self) -> list[list[fx.Node]]:
        """Return fused groups and single nodes, in an order in which they can run.

        Nodes of one level are fused if one reads the other. A level ends at every node that is not fused, and
        at sums over rows, so that no group reads a result of its own.
        """

        level: dict[fx.Node, int] = {}
        owner: dict[fx.Node, fx.Node] = {}  # a forest, in which roots stand for groups
        for node in self.nodes:
            if self.kinds[node] == "view":
                continue
            fusable = self._fusable(node)
            own, bases = 0, [self.bases[s] for s in node.all_input_nodes]
            for base in bases:
                if base in level:
                    joins = fusable and self._fusable(base) and not self._ends(base)
                    own = max(own, level[base] + (0 if joins else 1))

            level[node] = own
            owner[node] = node
            for base in bases if fusable else ():
                if base in level and self._fusable(base) and level[base] == own and not self._ends(base):
                    owner[_root(owner, base)] = _root(owner, node)

        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in level:
            groups.setdefault(_root(owner, node), []).append(node)
        return sorted(groups.values(), key=lambda nodes: level[nodes[0]])

    def _ends(self, node: fx.Node) -> bool:
        return self.kinds[node] == "reduction" and _across_rows(node)


def _root(owner: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while owner[node] is not node:
        node = owner[node]
    return node


def _operations(node: fx.Node, kind: str) -> tuple[float, float]:
    """Count elementwise operations, cheap ones and transcendental ones."""
    name = _name(node)
    count = _numel(_value(node))
    if kind == "reduction":
        count = max(count, _numel(_value(node.args[0])))
    power = node.args[1] if name == "pow" and len(node.args) > 1 else None
    cheap = isinstance(power, int | float) and float(power).is_integer() and abs(power) <= 4
    if name in _COSTLY and not cheap:
        return 0.0, float(count)
    return float(count), 0.0


def _compute_dtype(node: fx.Node, outputs: list[Tensor]) -> str:
    if _name(node).startswith("fp8_linear"):
        return short_dtype(torch.float8_e4m3fn)
    for source in node.all_input_nodes:
        for t in tensors_of(_value(source)):
            if t.dtype.is_floating_point:
                return short_dtype(t.dtype)
    return short_dtype(outputs[0].dtype) if outputs else "f32"
