"""Families: leaves that one optimizer updates alike, with their state and what each rank does of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from fnshard.compiler.kernels.inductor import TRACING
from fnshard.compiler.update.derive import Compute, Derived, derive
from fnshard.compiler.update.slots import Slot, slots_of_leaf
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE, Traced, slot_name, trace_update
from fnshard.layout.partition import P, block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.optimizer import Optimizer


@dataclass(frozen=True, eq=False)
class Family:
    """A family of leaves of one shape, dtype, layout and setting, and what they share.

    Args:
        optimizer: the one that these leaves have.
        slots: their state by name, master copies apart.
        layouts, blocks: by slot, how it lies over ranks, and the shape and dtype of a rank's padded block.
        block, dtype: likewise of the parameter that is updated.
        traced: the update of a whole leaf; None of a leaf without numbers.
        derived: what a rank does of it.
    """

    optimizer: Optimizer
    slots: Mapping[str, Slot]
    layouts: Mapping[str, P]
    blocks: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    block: tuple[int, ...]
    dtype: torch.dtype
    traced: Traced | None
    derived: Derived

    @property
    def needs_norm(self) -> bool:
        """Whether the update reads the norm of all gradients."""
        return self.traced is not None and self.traced.prologue.norm

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype, on a rank, of a value, of state, the gradient or the update."""
        if name in self.derived.values:
            return self.derived.values[name]
        slot = name.removeprefix("slots.")
        if slot != name:
            return self.blocks[slot]
        return self.block, torch.promote_types(self.dtype, torch.float32) if name == GRAD else self.dtype


def families_of(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> dict[str, Family]:
    """Return by path the family of each leaf that trains.

    Args:
        specs: of stored tensors.

    Raises:
        OptimizerError: names the leaf that an update or its state is wrong for, and what to write instead.
    """
    out = {}
    with TRACING:  # simulated ranks are threads, and share what was found out
        for path, spec in specs.items():
            if spec.trainable:
                out[path] = family_of(optimizer.of(path, spec.shape), path, spec, mesh)
    return out


def family_of(rule: Optimizer, path: str, spec: LayoutSpec, mesh: Mesh) -> Family:
    """Return the family of one leaf, which is made for the first of those that are alike.

    Args:
        rule: the optimizer that the leaf has.
    """
    known, shape, dtype = rule.traces, tuple(spec.shape), spec.optimizer_dtype
    key = "family", rule.settings(path), shape, dtype, spec.optimizer, mesh.names, mesh.sizes
    if key not in known:
        slots = slots_of_leaf(rule, path, shape, dtype)
        traced = None if 0 in shape else trace_of(rule, path, spec, slots)
        layouts = {name: slot.layout(spec, mesh) for name, slot in slots.items()}
        blocks = {name: (slot.block(spec, mesh), slot.dtype) for name, slot in slots.items()}
        derived = _derive(traced, layouts, spec, mesh)
        block = block_shape(shape, spec.optimizer, mesh)
        known[key] = Family(rule, slots, layouts, blocks, block, dtype, traced, derived)
    return known[key]


def trace_of(rule: Optimizer, path: str, spec: LayoutSpec, slots: Mapping[str, Slot]) -> Traced:
    """Return the update of a whole leaf, traced once for all layouts; if it is elementwise and asks for no
    shape, once for all shapes too."""
    known, shape, dtype = rule.traces, tuple(spec.shape), spec.optimizer_dtype
    key = "trace", rule.settings(path), shape, dtype
    any_shape = None
    if shape and all(slot.shape == shape for slot in slots.values()):
        any_shape = "trace", rule.settings(path), dtype, tuple((n, s.dtype) for n, s in slots.items())
    if key not in known and any_shape in known:
        known[key] = known[any_shape].resize(shape)
    elif key not in known:
        described = {name: (slot.shape, slot.dtype) for name, slot in slots.items()}
        wide = torch.promote_types(dtype, torch.float32)
        known[key] = traced = trace_update(rule, path, shape, dtype, wide, described)
        if any_shape and traced.is_elementwise and not traced.asks and not traced.constants:
            known[any_shape] = traced
    return known[key]


def _derive(traced: Traced | None, slot_layouts: Mapping[str, P], spec: LayoutSpec, mesh: Mesh) -> Derived:
    """Return what a rank does; of a leaf without numbers nothing."""
    if traced is None:
        return Derived((_nothing(),), {}, 0.0, 0.0)
    layouts = dict.fromkeys((GRAD, PARAM, UPDATE), spec.optimizer)
    layouts |= {slot_name(name): layout for name, layout in slot_layouts.items()}
    derived = derive(traced, tuple(spec.shape), layouts, mesh)
    # A stretch begins and ends every update, also where all is sent as it comes.
    steps = list(derived.steps)
    steps = steps if isinstance(steps[0], Compute) else [_nothing(), *steps]
    steps = steps if isinstance(steps[-1], Compute) else [*steps, _nothing()]
    return replace(derived, steps=tuple(steps))


def _nothing() -> Compute:
    """Return a stretch that computes nothing."""
    graph = fx.Graph()
    graph.output(())
    return Compute(graph, (), ())
