"""Run the optimizer's programs on a bucket's reduced gradients, in place on stored shards and slots.

An update is a list of stretches of local computation, between which values of leaves travel between ranks
(`compiler.update.derive`). `Updater` runs one stretch for many leaves. Most optimizers have a single stretch,
which a kernel of Inductor's or a fused operator of torch's may run for all leaves at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_HOST, MASTER
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.schedule.instructions import Parts
from fnshard.compiler.update.derive import Compute
from fnshard.compiler.update.family import Family
from fnshard.compiler.update.steps import Flow, flow_of, is_state, stacks_of
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE
from fnshard.layout.partition import P, block_shape, block_slices, side_by_side
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.runtime.executor.compiled_update import CompiledUpdates, is_compilable
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import Leaves, find_fused, run_fused
from fnshard.runtime.packing import pad_to
from fnshard.runtime.tiers import copy_to_device

Tensors = Mapping[str, Tensor]
# (gradients, slots, parameters, values of earlier stretches, the step's control) ->
# values for later stretches
UpdateOf = Callable[[Tensors, Mapping[str, Tensors], Tensors, Parts, StepControl], Parts]
Slices = tuple[slice, ...] | None  # None is the whole


@dataclass(frozen=True)
class BlockPlace:
    """A description of how a leaf's optimizer block lies in its stored and its gradient block.

    Args:
        block: the padded shape of the optimizer's block.
        stored, gradient: the slices of these local tensors that make up the block, without padding.
        valid: the part of the block that is no padding.
        slots: the unpadded parts of slots that do not have the leaf's shape.
    """

    block: tuple[int, ...]
    stored: Slices
    gradient: Slices
    valid: Slices
    slots: Mapping[str, Slices] = field(default_factory=dict)


def place_block(
    spec: LayoutSpec, mesh: Mesh, rank: int, slots: Mapping[str, tuple[tuple[int, ...], P]]
) -> BlockPlace:
    """Return where a rank's optimizer block lies in its stored and its gradient block.

    Args:
        slots: whole shapes and layouts of the slots that do not have the leaf's shape.
    """
    here = mesh.coordinate(rank)
    extents = {
        name: _find_extent(block_slices(shape, layout.contiguous, mesh, here))
        for name, (shape, layout) in slots.items()
    }

    spec = spec.local(mesh)
    mine = block_slices(spec.shape, spec.optimizer, mesh, here)
    block, extent = block_shape(spec.shape, spec.optimizer, mesh), _find_extent(mine)

    # A tensor that is stored in the optimizer's layout is the optimizer's block. Any other, as ZeRO 1 has it,
    # is whole, and the block is cut out of it.
    # None means all of a block: only padding makes it larger than what is valid.
    whole = all(s.stop == b for s, b in zip(extent, block, strict=True))
    sliced = None if whole else extent
    return BlockPlace(
        block=block,
        stored=sliced if spec.storage == spec.optimizer else mine,
        gradient=sliced if spec.gradient == spec.optimizer else mine,
        valid=sliced,
        slots=extents,
    )


def _find_extent(mine: Sequence[slice]) -> tuple[slice, ...]:
    """Return the part of a rank's block that is no padding, given where that lies in the whole."""
    return tuple(slice(0, s.stop - s.start) for s in mine)


def cut(tensor: Tensor, slices: Slices) -> Tensor:
    """Return a view of a part of a tensor, or the tensor."""
    return tensor if slices is None else tensor[slices]


@dataclass(frozen=True, eq=False)
class LeafStep:
    """A stretch of one leaf's update.

    Args:
        path, family: the leaf, and how it is updated.
        place: where the leaf's blocks lie.
        compute, flow: the graph of the stretch, and what becomes of its values.
    """

    path: str
    family: Family
    place: BlockPlace
    compute: Compute
    flow: Flow


@dataclass
class Updater:
    """A runner of a step's optimizer on the leaves that lines of the schedule name.

    Args:
        families: how leaves are updated, by path.
        specs: the specs of stored tensors.
        mesh, rank: the mesh, and this rank.
        compiled: compiles updates on the device; None if they are not compiled.
        without_data: the device of all tensors in a run on fakes, which counts their memory.
        places: where leaves' blocks lie, by path.
    """

    families: Mapping[str, Family]
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    rank: int
    compiled: CompiledUpdates | None = None
    without_data: torch.device | None = None
    places: dict[str, BlockPlace] = field(default_factory=dict)
    _constants: dict[Any, Tensor] = field(default_factory=dict)

    def bind(self, paths: Sequence[str], number: int) -> UpdateOf:
        """Return a function that runs step `number` of leaves' updates on their blocks, in place."""
        # Each leaf is updated in one of three ways: by a compiled kernel together with others, by a fused
        # operator together with its family, or by its own graph.
        compiled: list[LeafStep] = []
        fused: dict[Family, list[LeafStep]] = {}
        others: list[LeafStep] = []
        for leaf in [self._make_leaf_step(path, number) for path in paths]:
            # A kernel of Inductor's updates whole blocks on the device, without padding.
            on_device = self.specs[leaf.path].updated_on == "device"
            has_work = bool(leaf.compute.reads) and leaf.place.valid is None
            if self.compiled is not None and on_device and has_work and is_compilable(leaf.family):
                compiled.append(leaf)
            elif find_fused(leaf.family) is not None:
                fused.setdefault(leaf.family, []).append(leaf)
            else:
                others.append(leaf)

        def update(
            blocks: Tensors, slots: Mapping[str, Tensors], params: Tensors, made: Parts, control: StepControl
        ) -> Parts:
            if control.skip:
                return {}
            if compiled:
                self._update_compiled(compiled, blocks, slots, params, control)
            for family, members in fused.items():
                self._update_fused(family, members, blocks, slots, params, control)
            out = {}
            for leaf in others:
                path = leaf.path
                out[path] = self._update_leaf(
                    leaf, blocks.get(path), slots[path], params.get(path), made.get(path, {}), control
                )
            return out

        return update

    def bind_whole(self, bucket: Bucket) -> Callable[[Parts, Parts, StepControl], Parts]:
        """Return a function that computes the whole leaves which this rank receives.

        Its arguments are these leaves, the values that all ranks have made of them, and the step's control;
        it returns the tensors to send back.
        """
        whole_steps = {}
        for path in bucket.paths:
            derived = self.families[path].derived
            whole_steps[path] = next(s for s in derived.steps if isinstance(s, Compute) and s.whole)

        def compute(parts: Parts, made: Parts, control: StepControl) -> Parts:
            if control.skip:
                return {}
            out = {}
            for path, sent in parts.items():
                # Collect what came from other ranks; matrices that were fused side by side are separated.
                there, back = stacks_of(self.families[path].derived)
                values = self._to_compute_dtypes(path, made.get(path, {}))
                for name, to, layout, dtype in zip(
                    there.sends, there.receives, there.layouts, there.dtypes, strict=True
                ):
                    part = sent[name].to(self.device(path), dtype)
                    values[to] = side_by_side(part, layout, self.mesh, inverse=True)
                # Compute the leaf's stretch, and fuse matrices again in what travels back.
                step = whole_steps[path]
                given = [values[n] if n in values else self._read_input(path, n, control) for n in step.reads]
                values |= zip(step.writes, step.run(*given), strict=True)
                out[path] = {
                    to: side_by_side(values[name], layout, self.mesh)
                    for name, to, layout in zip(back.sends, back.receives, back.layouts, strict=True)
                }
            return out

        return compute

    def _update_fused(
        self, family: Family, leaves: Sequence[LeafStep], blocks: Tensors, slots: Mapping[str, Tensors],
        params: Tensors, control: StepControl,
    ) -> None:  # fmt: skip
        """Update all leaves of a family by one call of torch's fused operator."""
        # Where there is a master copy it is updated, and then rounded into the stored leaf.
        targets, copies = [], {}
        for place, leaf in enumerate(leaves):
            stored, master = params.get(leaf.path), slots[leaf.path].get(MASTER)
            if master is None:
                targets.append(cut(stored, leaf.place.stored))
                continue
            targets.append(cut(master, leaf.place.valid))
            if stored is not None:
                copies[place] = cut(stored, leaf.place.stored)

        # Give the operator all tensors without their padding.
        gradients = [cut(blocks[leaf.path], leaf.place.gradient) for leaf in leaves]
        cut_slots = {}
        for name in family.slots:
            extents = [leaf.place.slots.get(name, leaf.place.valid) for leaf in leaves]
            of_leaves = zip(leaves, extents, strict=True)
            cut_slots[name] = [cut(slots[leaf.path][name], extent) for leaf, extent in of_leaves]
        path = leaves[0].path  # leaves of a family read the same numbers
        run_fused(
            find_fused(family), Leaves(targets, gradients, cut_slots, copies),
            lambda name: self._read_input(path, name, control), control.scale,
        )  # fmt: skip

    def _update_compiled(
        self, leaves: Sequence[LeafStep], blocks: Tensors, slots: Mapping[str, Tensors], params: Tensors,
        control: StepControl,
    ) -> None:  # fmt: skip
        """Update leaves by one kernel of Inductor's, which reads gradients in their dtype on the wire."""
        tensors, copied = [], []
        for leaf in leaves:
            place, of_leaf = leaf.place, slots[leaf.path]
            stored = cut(params[leaf.path], place.stored)
            has_master = MASTER in of_leaf
            written = [of_leaf[MASTER], stored] if has_master else [stored]
            copied.append(has_master)
            grad = cut(blocks[leaf.path], place.gradient)
            tensors.append([grad, *written, *(of_leaf[name] for name in leaf.family.slots)])
        self.compiled.run([leaf.family for leaf in leaves], tensors, copied, control)

    def _update_leaf(
        self, leaf: LeafStep, block: Tensor | None, slots: Tensors, stored: Tensor | None, made: Tensors,
        control: StepControl,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Run a stretch of a leaf's update: write final results, and return values for later stretches."""
        place = leaf.place
        master = slots.get(MASTER)
        target = cut(stored, place.stored) if master is None else cut(master, place.valid)

        # Collect all that the stretch reads or keeps: state, the gradient, numbers and earlier values. A
        # gradient that an earlier stretch has kept is one of these.
        reads, known, state = leaf.compute.reads, self._to_compute_dtypes(leaf.path, made), {}
        for name in (*reads, *leaf.flow.keeps):
            if name == PARAM:
                state[name] = pad_to(target, place.block) if master is None else master
            elif is_state(name):
                state[name] = slots[name.removeprefix("slots.")]
            elif name == GRAD and GRAD not in known:
                known[name] = self._scale_gradient(
                    block, place, target.dtype, control, GRAD in leaf.flow.keeps
                )
            elif name in reads and name not in known:
                known[name] = self._read_input(leaf.path, name, control)

        # Compute the stretch.
        given = [state[name] if is_state(name) else known[name] for name in reads]
        known |= zip(leaf.compute.writes, leaf.compute.run(*given), strict=True)

        # A kept value must not change with the state, or the bucket, that it is a view of. State itself is
        # kept without a copy: it is sent before it is written.
        owned = {t.untyped_storage()._cdata for t in (*slots.values(), target, block) if t is not None}
        kept = {name: state[name] if is_state(name) else known[name] for name in leaf.flow.keeps}
        for name, value in kept.items():
            if not is_state(name) and value.untyped_storage()._cdata in owned:
                kept[name] = value.clone()

        # Write the results that are final, padding cut off.
        for name in leaf.flow.commits:
            if name == UPDATE:
                target.add_(cut(known[name], place.valid))
                if master is not None and stored is not None:
                    cut(stored, place.stored).copy_(target)
                continue
            slot = name.removeprefix("slots.")
            extent = place.slots.get(slot, place.valid)
            cut(slots[slot], extent).copy_(cut(known[name], extent))
        return kept

    def _scale_gradient(
        self, block: Tensor, place: BlockPlace, dtype: torch.dtype, control: StepControl, is_kept: bool
    ) -> Tensor:
        """Return the optimizer's block of a gradient, in fp32 at least, scaled in place if possible.

        Args:
            is_kept: whether later stretches read it, after the bucket's memory is used again.
        """
        # Where no cast is needed this is the bucket's own memory, and is scaled there.
        unpadded = cut(block, place.gradient)
        grad = pad_to(unpadded.to(torch.promote_types(dtype, torch.float32), copy=is_kept), place.block)
        return grad if control.scale is None else grad.mul_(copy_to_device(control.scale, grad.device))

    def _to_compute_dtypes(self, path: str, made: Tensors) -> dict[str, Tensor]:
        """Return values in the dtypes and on the device that they are computed in.

        Some travel in other dtypes, and all travel over the device.
        """
        described, device = self.families[path].derived.values, self.device(path)
        return {n: v.to(device, described[n][1] if n in described else v.dtype) for n, v in made.items()}

    def _read_input(self, path: str, name: str, control: StepControl) -> Tensor:
        """Return an input of an update that is not a leaf's tensor: a number, a constant, a rank's index."""
        family, device = self.families[path], self.device(path)
        kind, _, key = name.partition(".")  # "number.0", "constant.name" or "index.axis,axis"

        # Numbers on the host stay there: 0-d tensors on the host combine with tensors of any device, and
        # `torch.cond` reads them there without waiting.
        def compute_numbers() -> list[Tensor]:
            return [
                n if n.device == device or n.device.type == "cpu" else copy_to_device(n, device)
                for n in family.traced.prologue.numbers(control.step)
            ]

        if kind == "number":
            return control.once((family, device), compute_numbers)[int(key)]
        if kind == "constant":
            if (family, name, device) not in self._constants:
                self._constants[family, name, device] = family.traced.constants[name].to(device)
            return self._constants[family, name, device]

        # The rank's place among those along some axes, the last of which varies fastest.
        axes = tuple(key.split(","))
        if (axes, device) not in self._constants:
            here, place = self.mesh.coordinate(self.rank), 0
            for axis in axes:
                place = place * self.mesh.axis_size(axis) + here[axis]
            self._constants[axes, device] = torch.tensor(place, device=device)
        return self._constants[axes, device]

    def device(self, path: str) -> torch.device:
        """Return the device on which a leaf is updated."""
        if self.without_data is not None:
            return self.without_data
        on_host = self.specs[path].updated_on == "host"
        return torch.device("cpu") if on_host else self.mesh.device

    def _make_leaf_step(self, path: str, number: int) -> LeafStep:
        """Make stretch `number` of a leaf's update; where its blocks lie is computed once."""
        family, spec = self.families[path], self.specs[path]
        if path not in self.places:
            of_other_shapes = {
                n: (slot.shape, family.layouts[n])
                for n, slot in family.slots.items()
                if slot.shape != tuple(spec.shape)
            }
            self.places[path] = place_block(spec, self.mesh, self.rank, of_other_shapes)
        step, flow = family.derived.steps[number], flow_of(family.derived, number)
        return LeafStep(path, family, self.places[path], step, flow)

    def control_for(self, env: dict[str, Any], bucket: Bucket) -> tuple[StepControl, Any]:
        """Return the step's control for a bucket's update, and the event after which its numbers are there.

        For an update on the host the numbers are sent there, once before the scalars are known and once
        after.
        """
        control = env[CONTROL]
        if self.specs[bucket.paths[0]].updated_on != "host" or self.mesh.device_type == "cpu":
            return control, None
        # The environment keeps the copy together with the control that it was made from, since a newer
        # control needs another.
        sent = env.get(CONTROL_ON_HOST)
        if sent is None or sent[0] is not control:
            on_host, event = control.on_host(), torch.Event(self.mesh.device_type)
            event.record()
            sent = env[CONTROL_ON_HOST] = control, on_host, event
        return sent[1:]

    def stored_part(self, path: str, stored: Tensor) -> Tensor:
        """Return the part of a stored leaf that its optimizer block holds, padding cut off."""
        return cut(stored, self.places[path].stored)

    def valid_part(self, path: str, block: Tensor) -> Tensor:
        """Return an optimizer block without its padding."""
        return cut(block, self.places[path].valid)
