"""Families of leaves that one optimizer updates alike, with their state and the steps of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from fnshard.compiler.ir.deferred_imports import trace_again
from fnshard.compiler.kernels.inductor import TRACING
from fnshard.compiler.update.derive import Compute, DerivedUpdate, derive
from fnshard.compiler.update.slot_shapes import Slot, slots_of_leaf
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE, TracedUpdate, slot_name, trace_update
from fnshard.layout.partition import P, block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.optimizer import Optimizer


@dataclass(frozen=True, eq=False)
class Family:
    """A family of leaves of one shape, dtype, layout and setting, and what they share.

    Args:
        optimizer: the optimizer of these leaves.
        slots: their state by name, without master copies.
        layouts, blocks: by slot its layout over ranks, and the shape and dtype of a rank's padded block.
        block, dtype: the shape and dtype of a rank's padded block of the parameter.
        traced: the update of a whole leaf; None for a leaf without elements.
        derived: the steps of each rank.
    """

    optimizer: Optimizer
    slots: Mapping[str, Slot]
    layouts: Mapping[str, P]
    blocks: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    block: tuple[int, ...]
    dtype: torch.dtype
    traced: TracedUpdate | None
    derived: DerivedUpdate

    @property
    def needs_norm(self) -> bool:
        """Return whether the update reads the norm of all gradients."""
        return self.traced is not None and self.traced.prologue.norm

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype that a value, state, the gradient or the update has on a rank."""
        if name in self.derived.values:
            return self.derived.values[name]
        slot = name.removeprefix("slots.")
        if slot != name:
            return self.blocks[slot]
        return self.block, torch.promote_types(self.dtype, torch.float32) if name == GRAD else self.dtype


def families_of(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> dict[str, Family]:
    """Return the family of each leaf that trains, by path.

    Args:
        specs: the specs of stored tensors.

    Raises:
        OptimizerError: an update or its state is wrong; it names the leaf, and says what to write instead.
    """
    out = {}
    with TRACING:  # simulated ranks are threads, and share the families
        for path, spec in specs.items():
            if spec.trainable:
                rule = optimizer.of(path, spec.shape)
                out[path] = trace_again(partial(family_of, rule, path, spec, mesh))
    return out


def family_of(rule: Optimizer, path: str, spec: LayoutSpec, mesh: Mesh) -> Family:
    """Return the family of one leaf, which is derived for the first of equal leaves.

    Args:
        rule: the leaf's optimizer.
    """
    # What depends on these settings alone is made once, and shared by all leaves that have them.
    known, shape, dtype = rule.traces, tuple(spec.shape), spec.optimizer_dtype
    key = "family", rule.trace_key(path), shape, dtype, spec.optimizer, mesh.names, mesh.sizes
    if key not in known:
        slots = slots_of_leaf(rule, path, shape, dtype)
        traced = None if 0 in shape else find_trace(rule, path, spec, slots)
        layouts = {name: slot.layout(spec, mesh) for name, slot in slots.items()}
        blocks = {name: (slot.block(spec, mesh), slot.dtype) for name, slot in slots.items()}
        derived = _derive_steps(traced, layouts, spec, mesh)
        block = block_shape(shape, spec.optimizer, mesh)
        known[key] = Family(rule, slots, layouts, blocks, block, dtype, traced, derived)
    return known[key]


def find_trace(rule: Optimizer, path: str, spec: LayoutSpec, slots: Mapping[str, Slot]) -> TracedUpdate:
    """Return the update of a whole leaf, which is traced once for all layouts.

    An elementwise update that asks for no shape is traced once for all shapes too.
    """
    known, shape, dtype = rule.traces, tuple(spec.shape), spec.optimizer_dtype
    key = "trace", rule.trace_key(path), shape, dtype
    any_shape = None
    if shape and all(slot.shape == shape for slot in slots.values()):
        any_shape = "trace", rule.trace_key(path), dtype, tuple((n, s.dtype) for n, s in slots.items())
    if key not in known and any_shape in known:
        known[key] = known[any_shape].resize(shape)
    elif key not in known:
        # A gradient comes in fp32 at least, however narrow the parameter is.
        described = {name: (slot.shape, slot.dtype) for name, slot in slots.items()}
        wide = torch.promote_types(dtype, torch.float32)
        known[key] = traced = trace_update(rule, path, shape, dtype, wide, described)
        # An update that has looked at a size may have put it into the graph as a number.
        if any_shape and traced.is_elementwise and not traced.asks and not traced.constants:
            known[any_shape] = traced
    return known[key]


def _derive_steps(
    traced: TracedUpdate | None, slot_layouts: Mapping[str, P], spec: LayoutSpec, mesh: Mesh
) -> DerivedUpdate:
    """Return the steps of a rank, which are empty for a leaf without elements."""
    if traced is None:
        return DerivedUpdate((_make_empty_step(),), {}, 0.0, 0.0)
    layouts = dict.fromkeys((GRAD, PARAM, UPDATE), spec.optimizer)
    layouts |= {slot_name(name): layout for name, layout in slot_layouts.items()}
    derived = derive(traced, tuple(spec.shape), layouts, mesh)
    # A computation begins and ends every update, if only an empty one: schedules rely on it.
    steps = list(derived.steps)
    if not isinstance(steps[0], Compute):
        steps.insert(0, _make_empty_step())
    if not isinstance(steps[-1], Compute):
        steps.append(_make_empty_step())
    return replace(derived, steps=tuple(steps))


def _make_empty_step() -> Compute:
    """Return a step that computes nothing."""
    graph = fx.Graph()
    graph.output(())
    return Compute(graph, (), ())
