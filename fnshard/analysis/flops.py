"""FLOPs: count the FLOPs, bytes, elementwise operations and launches of a kernel's graph.

A graph is counted once for all hardware. Its seconds are a roofline for each piece of work (Williams et al.,
CACM 2009). FLOPs of matmuls and convolutions are counted by torch's own formulas
(`torch.utils.flop_counter`). Causal attention counts half of the scores, since kernels skip the rest.
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
        size: the size on which the rate depends: a matmul's FLOPs, or an attention's length.
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
        # A roofline: the slower one of memory and arithmetic bounds the work.
        memory = hardware.memory.seconds(self.read_bytes + self.written_bytes)
        if self.kind == "scatter":
            arithmetic = self.written_bytes / hardware.scatter
        elif self.kind == "memory":
            arithmetic = self.cheap / hardware.elementwise + self.costly / hardware.transcendental
        elif self.kind == "attention":
            rate = hardware.rate_of(hardware.attention, self.dtype).at(self.size)
            share = hardware.rate_of(hardware.attention_heads, self.dtype).at(self.head)
            arithmetic = self.flops / rate / share
        else:
            arithmetic = self.flops / hardware.rate_of(hardware.flops, self.dtype).at(self.size)
        return max(memory, arithmetic, self.launches * hardware.floor_seconds)


@dataclass(frozen=True)
class GraphCost:
    """The work of a graph, in order."""

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
        """Count the FLOPs by the dtype of the operands."""
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
    """Count one graph of core ATen ops. The result is cached for as long as the graph lives.

    Args:
        graph: a graph whose nodes all have `meta["val"]`; None is no work.
        fused: whether elementwise chains and reductions between heavier operators touch memory only at their
            ends (Inductor). Otherwise every operator reads and writes (the eager backend).
    """
    if graph is None:
        return GraphCost(())
    known = _COUNTED.setdefault(graph, {})
    if fused not in known:
        counter = _Counter(graph.graph)
        known[fused] = GraphCost(tuple(counter.count_fused() if fused else counter.count_eager()))
    return known[fused]


def kernel_flops(kernel: Kernel, way: Way) -> float:
    """Count the FLOPs of a kernel one way, by which a pipeline orders its tasks."""
    module = kernel.modules.get(way)
    return 0.0 if module is None else graph_cost(module, fused=True).flops


def _get_argument(node: fx.Node, name: str, default: Any) -> Any:
    """Return an argument of an operator, by name."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)
    return default


def _is_attention(node: fx.Node) -> bool:
    # By name: torch has one operator for each kernel, and the library has its own.
    name = getattr(node.target, "__name__", "")
    return "attention" in name and isinstance(node.target, OpOverload)


def _count_attention_flops(node: fx.Node) -> float:
    """Count the FLOPs of attention.

    A forward computes scores and their weighted sum, and a backward scores again and four gradients.
    Documents are data, so a row counts as one.
    """
    query, key, value = (_get_value(_get_argument(node, name, None)) for name in ("query", "key", "value"))
    scores, sums = (3, 2) if "backward" in node.target.__name__ else (1, 1)

    # The keys that a query sees on average. A window reaches to both sides unless the mask is causal.
    keys, window = key.shape[-2], _get_argument(node, "window", 0)
    causal = bool(_get_argument(node, "is_causal", False)) and not _is_other_block(node)
    seen = keys * (0.5 if causal else 1.0)
    if window:
        seen = min(window if causal else 2 * window, keys)
    pairs = query.shape[:-1].numel() * seen
    return 2.0 * pairs * (scores * query.shape[-1] + sums * value.shape[-1])


def _is_other_block(node: fx.Node) -> bool:
    """Return whether a node attends to a block of other rows, which a mask shows or hides as a whole."""
    return not _get_argument(node, "first", True) or bool(_get_argument(node, "before", ()))


def flops_of(node: fx.Node) -> float:
    """Count the FLOPs of one node by torch's formulas; 0 if it neither multiplies matrices nor attends."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    if _is_attention(node):
        return _count_attention_flops(node)
    if node.target is torch.ops.aten.linalg_qr.default:  # Householder's
        shape = node.args[0].meta["val"].shape
        return 8 / 3 * shape.numel() * shape[-1]

    # All others are those for which torch has a formula.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


# Elementwise operators that are transcendental, and so bound by another rate than additions and products.
_COSTLY = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf",
    "erfc", "erfinv", "pow", "silu", "gelu", "softplus", "atan", "atan2", "acos", "asin", "sinh", "cosh",
    "mish", "elu", "logit", "lgamma", "digamma",
}  # fmt: skip
# Operators that only move or fill values, which count as pointwise, since Inductor fuses them likewise.
_MOVERS = {
    "cat", "clone", "gather", "index", "index_select", "embedding", "constant_pad_nd", "slice_scatter",
    "select_scatter", "copy", "repeat", "_to_copy", "full", "full_like", "empty", "zeros", "ones", "iota",
    "arange", "scalar_tensor", "_unsafe_index", "empty_strided", "new_zeros", "new_full", "rev", "flip",
    "empty_permuted", "expand_copy", "where", "convert_element_type", "lift_fresh_copy", "masked_fill",
}  # fmt: skip
_LOOKUPS = {"embedding", "gather", "index", "index_select"}  # movers that read only some rows of a source
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean", "argmax", "argmin", "any", "all",
    "logsumexp", "linalg_vector_norm", "count_nonzero", "_softmax", "_log_softmax", "native_layer_norm",
}  # fmt: skip
_SCATTERS = {
    "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter_add", "index_add",
    "embedding_dense_backward", "scatter_reduce",
}  # fmt: skip


def _get_name(node: fx.Node) -> str:
    target = node.target
    return target._opname if isinstance(target, OpOverload) else getattr(target, "__name__", "")


def _classify(node: fx.Node) -> str:
    """Return "view", "matmul", "attention", "scatter", "pointwise", "reduction" or "other"."""
    if node.target is operator.getitem or (isinstance(node.target, OpOverload) and node.target.is_view):
        return "view"  # like a view, an item of what an operator returned moves no byte
    if _is_attention(node):
        return "attention"
    if flops_of(node):
        return "matmul"
    name, tags = _get_name(node), getattr(node.target, "tags", ())
    if name in _SCATTERS:
        return "scatter"
    if name in _REDUCTIONS or torch.Tag.reduction in tags:
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in tags or name in _MOVERS else "other"


def _get_value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _count_bytes(value: Any) -> float:
    return float(sum(t.numel() * t.dtype.itemsize for t in tensors_of(value)))


def _count_numel(value: Any) -> int:
    return max((t.numel() for t in tensors_of(value)), default=0)


class _Counter:
    """A counter of the work of one graph.

    `bases` has for each node the node that makes its memory, which is another one for views.
    """

    def __init__(self, graph: fx.Graph):
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.kinds = {n: _classify(n) for n in self.nodes}
        self.bases: dict[fx.Node, fx.Node] = {}
        for n in graph.nodes:
            is_view = self.kinds.get(n) == "view" and n.all_input_nodes
            self.bases[n] = self.bases[n.all_input_nodes[0]] if is_view else n
        self.returned = {self.bases[n] for n in graph.output_node().all_input_nodes}

    def reads(
        self, node: fx.Node, skip: Callable[[fx.Node], bool] = lambda base: False
    ) -> dict[fx.Node, float]:
        """Return the bytes that a node reads of each base, except for those to skip."""
        out: dict[fx.Node, float] = {}
        is_lookup = self.kinds[node] == "pointwise" and _get_name(node) in _LOOKUPS
        for source in node.all_input_nodes:
            base = self.bases[source]
            if skip(base):
                continue
            # A slice is smaller than its base, and a broadcast is larger.
            size = min(_count_bytes(_get_value(source)), _count_bytes(_get_value(base)))
            if is_lookup:
                size = min(size, _count_bytes(_get_value(node)))
            out[base] = max(out.get(base, 0.0), size)
        return out

    def work_of(self, node: fx.Node, read: float) -> Work:
        """Return the work of a node that reads so many bytes."""
        kind, value = self.kinds[node], _get_value(node)
        dtype = _find_compute_dtype(node, tensors_of(value))
        if kind == "matmul":
            flops = flops_of(node)
            return Work(kind, dtype, flops, read, _count_bytes(value), size=flops)
        if kind == "attention":
            length, head = tensors_of(_get_value(node.all_input_nodes[0]))[0].shape[-2:]
            flops, causal = flops_of(node), bool(_get_argument(node, "is_causal", False))
            # A block of other rows is computed in full even where a causal mask hides it.
            unseen = flops / 2 if causal and _is_other_block(node) else 0.0
            sizes = {"size": float(length), "head": float(head)}
            return Work(kind, dtype, flops, read, _count_bytes(value), unseen=unseen, **sizes)
        if kind == "scatter":
            return Work(kind, dtype, 0.0, read, read + _count_bytes(value))

        # All others stream: memory or their elementwise operations bound them.
        cheap, costly = _count_operations(node, kind)
        return Work("memory", dtype, 0.0, read, _count_bytes(value), cheap, costly)

    def count_eager(self) -> Iterable[Work]:
        """Yield the work of each operator, which reads and writes memory by itself."""
        for node in self.nodes:
            if self.kinds[node] != "view":
                yield self.work_of(node, sum(self.reads(node).values()))

    def count_fused(self) -> Iterable[Work]:
        """Yield the work of groups of operators, which touch memory only at their ends."""
        for nodes in self._make_groups():
            if len(nodes) == 1 and not self._is_fusable(nodes[0]):
                yield self.work_of(nodes[0], sum(self.reads(nodes[0]).values()))
            else:
                yield self._count_group(nodes)

    def _is_fusable(self, node: fx.Node) -> bool:
        return self.kinds[node] in ("pointwise", "reduction")

    def _count_group(self, nodes: list[fx.Node]) -> Work:
        """Return the work of operators that are fused, of which only inputs and results are in memory."""
        inside, reads = set(nodes), {}
        written = cheap = costly = 0.0
        for node in nodes:
            for base, size in self.reads(node, skip=inside.__contains__).items():
                reads[base] = max(reads.get(base, 0.0), size)
            if node in self.returned or any(reader not in inside for reader in self._find_readers(node)):
                written += _count_bytes(_get_value(node))
            more_cheap, more_costly = _count_operations(node, self.kinds[node])
            cheap, costly = cheap + more_cheap, costly + more_costly
        return Work("memory", "f32", 0.0, sum(reads.values()), written, cheap, costly)

    def _find_readers(self, node: fx.Node) -> set[fx.Node]:
        """Return the operators that read a value, directly or through views."""
        out, queue = set(), list(node.users)
        while queue:
            user = queue.pop()
            if self.kinds.get(user) == "view":
                queue += user.users
            elif user.op == "call_function":
                out.add(user)
        return out

    def _make_groups(self) -> list[list[fx.Node]]:
        """Return fused groups and single nodes, in an order in which they can run.

        Nodes of one level are fused if one reads the other. A level ends at every node that is not fused, and
        at sums over rows, so that no group reads a result of its own.
        """
        level: dict[fx.Node, int] = {}
        owner: dict[fx.Node, fx.Node] = {}  # a forest (union-find): the root of a tree represents a group
        for node in self.nodes:
            if self.kinds[node] == "view":
                continue

            # A node has the level of what it is fused with, and is one above all others that it reads.
            fusable = self._is_fusable(node)
            own_level, bases = 0, [self.bases[s] for s in node.all_input_nodes]
            for base in bases:
                if base in level:
                    joins = fusable and self._is_fusable(base) and not self._ends_level(base)
                    own_level = max(own_level, level[base] + (0 if joins else 1))

            # Unite its group with those of the values that it reads, if they have the same level.
            level[node] = own_level
            owner[node] = node
            for base in bases if fusable else ():
                has_same_level = base in level and level[base] == own_level
                if has_same_level and self._is_fusable(base) and not self._ends_level(base):
                    owner[_find_root(owner, base)] = _find_root(owner, node)

        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in level:
            groups.setdefault(_find_root(owner, node), []).append(node)
        return sorted(groups.values(), key=lambda nodes: level[nodes[0]])

    def _ends_level(self, node: fx.Node) -> bool:
        """Return whether a node reduces a dim before the last, so that its readers run in another loop."""
        if self.kinds[node] != "reduction":
            return False
        source, out = _get_value(node.args[0]), tensors_of(_get_value(node))
        if source is None or not out:
            return True
        # Without a list of dims all are reduced.
        dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else None
        return dims is None or any(d % max(source.dim(), 1) != source.dim() - 1 for d in dims)


def _find_root(owner: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while owner[node] is not node:
        node = owner[node]
    return node


def _count_operations(node: fx.Node, kind: str) -> tuple[float, float]:
    """Count elementwise operations, cheap ones and transcendental ones."""
    name = _get_name(node)
    count = _count_numel(_get_value(node))
    if kind == "reduction":
        count = max(count, _count_numel(_get_value(node.args[0])))
    # A small integer power is a few products.
    power = node.args[1] if name == "pow" and len(node.args) > 1 else None
    is_product = isinstance(power, int | float) and float(power).is_integer() and abs(power) <= 4
    if name in _COSTLY and not is_product:
        return 0.0, float(count)
    return float(count), 0.0


def _find_compute_dtype(node: fx.Node, outputs: list[Tensor]) -> str:
    """Return the dtype in which a node computes: that of its first floating-point operand."""
    if _get_name(node).startswith("fp8_linear"):
        return short_dtype(torch.float8_e4m3fn)
    for source in node.all_input_nodes:
        for t in tensors_of(_get_value(source)):
            if t.dtype.is_floating_point:
                return short_dtype(t.dtype)
    return short_dtype(outputs[0].dtype) if outputs else "f32"
