"""Find the state (slots) that an optimizer keeps of each leaf, by tracing its `init` on the whole leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.compiler.frontend.control_flow import without_dynamo
from fnshard.compiler.ir.values import MASTER
from fnshard.compiler.kernels.inductor import TRACING
from fnshard.compiler.update.trace import Watch, explain_failures, refuse_random, trace_without_writes
from fnshard.errors import OptimizerError
from fnshard.layout.partition import P, block_shape, slot_layout
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.optimizer import Optimizer

aten = torch.ops.aten
Slots = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]  # shapes and dtypes, by path and name


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor of a leaf's state, before any update.

    Args:
        shape, dtype: those of the whole tensor.
        fill: the number that fills it, or None if there is no such number.
        copied: whether it is a copy of the parameter, in `dtype`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None
    copied: bool = False

    def layout(self, spec: LayoutSpec, mesh: Mesh) -> P:
        """Return its layout as state of a leaf of that spec: whole, if it is not shaped like the leaf."""
        return slot_layout(self.shape, spec.shape, spec.optimizer, mesh) or P()

    def block(self, spec: LayoutSpec, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of a rank's padded block of it."""
        return block_shape(self.shape, self.layout(spec, mesh), mesh)


def slot_blocks(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> Slots:
    """Return shapes and dtypes of the state on a rank, by path and name, master copies included."""
    out = {}
    for path, spec in specs.items():
        if spec.trainable:
            slots = slots_of_leaf(optimizer.of(path, spec.shape), path, spec.shape, spec.optimizer_dtype)
            out[path] = {name: (slot.block(spec, mesh), slot.dtype) for name, slot in slots.items()}
            if spec.has_master:
                out[path][MASTER] = block_shape(spec.shape, spec.optimizer, mesh), spec.optimizer_dtype
    return out


def slot_shapes(
    optimizer: Optimizer, specs: Mapping[str, LayoutSpec]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the whole shapes of slots that are not of their leaf's shape, by path and name."""
    out = {}
    for path, spec in specs.items():
        if spec.trainable:
            slots = slots_of_leaf(optimizer.of(path, spec.shape), path, spec.shape, spec.optimizer_dtype)
            odd = {name: slot.shape for name, slot in slots.items() if slot.shape != tuple(spec.shape)}
            if odd:
                out[path] = odd
    return out


def slots_of_leaf(rule: Optimizer, path: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Slot]:
    """Return the state that an optimizer keeps of a leaf, by name.

    Raises:
        OptimizerError: `init` computes it from the parameter's values, of which ranks have only parts.
    """
    # An `init` that never looks at a shape is traced once for leaves of all shapes.
    known, shape = rule.traces, tuple(shape)
    key, any_shape = (("slots", rule.trace_key(path), each, dtype) for each in (shape, None))
    if key not in known and shape and any_shape in known:
        known[key] = {name: replace(slot, shape=shape) for name, slot in known[any_shape].items()}
    elif key not in known:
        known[key], is_like_any = _trace_init(rule, path, shape, dtype)
        if is_like_any and shape:
            known[any_shape] = known[key]
    return known[key]


def _trace_init(
    rule: Optimizer, path: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[dict[str, Slot], bool]:
    """Return the state of a leaf, and whether a leaf of any other shape would have the same."""
    # Trace `init` on a fake parameter.
    names: list[str] = []
    watch = Watch()

    def init(param: Tensor) -> list[Tensor]:
        made = watch.wrap(rule.init)(path, param)
        names[:] = made
        return list(made.values())

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with explain_failures(rule, path), TRACING, without_dynamo(), mode, torch.no_grad():
        module = trace_without_writes(init, torch.empty(tuple(shape), dtype=dtype))
    refuse_random(rule, path, module.graph)

    # Each slot is a number everywhere, a copy of the parameter, or wrong.
    (param,) = module.graph.find_nodes(op="placeholder")
    out, wrong, is_like_any = {}, [], not watch.asks
    for name, node in zip(names, module.graph.output_node().args[0], strict=True):
        value, source, fill = node.meta["val"], _find_original(node), _find_fill(node)
        out[name] = Slot(tuple(value.shape), value.dtype, fill, source is param and fill is None)
        if fill is None and source is not param and _reads_values(node, param):
            wrong.append(f"params[{path!r}]: slot {name!r}")
        is_like_any &= source is param or (source.target in _LIKE and source.args[0] is param)
    if MASTER in names:
        raise OptimizerError(
            f"{rule} keeps a slot {MASTER!r} of params[{path!r}], which is the name of a master copy.",
            fix="give it another name.",
        )
    if wrong:
        raise OptimizerError(
            f"{rule} begins with state that it computes from the parameters' values:",
            wrong,
            "let init fill tensors, torch.zeros_like(param), or copy it, param.clone(); compute in update: "
            "there, step.count is 0 at first.",
        )
    return out, is_like_any


_COPIES = {aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default}
_FILLS = {
    aten.zeros_like.default: 0.0, aten.ones_like.default: 1.0, aten.new_zeros.default: 0.0,
    aten.new_ones.default: 1.0, aten.zeros.default: 0.0, aten.ones.default: 1.0,
}  # fmt: skip
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_FULLS = {aten.full_like.default, aten.new_full.default, aten.full.default}
_SHAPED = {*_FILLS, *_FULLS, aten.empty_like.default, aten.new_empty.default}


def _find_original(node: fx.Node) -> fx.Node:
    """Return the node that a value is a copy of, or the value itself."""
    while node.op == "call_function" and node.target in _COPIES:
        (node,) = node.all_input_nodes
    return node


def _find_fill(node: fx.Node) -> float | None:
    """Return the number that a tensor is filled with, or None."""
    node = _find_original(node)
    if node.target in _FULLS and isinstance(node.args[-1], int | float):
        return float(node.args[-1])
    return _FILLS.get(node.target)


def _reads_values(node: fx.Node, param: fx.Node) -> bool:
    """Return whether a value depends on the numbers of the parameter, and not on its shape alone."""
    if node is param:
        return True
    read = [] if node.target in _SHAPED else node.all_input_nodes
    return any(_reads_values(each, param) for each in read)
