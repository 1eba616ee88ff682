"""Update: one bucket's reduced gradients -> the optimizer, in place on stored shards and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_HOST, MASTER
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.layout.partition import block_shape, block_slices
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer, Slots, Tensors
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import FusedUpdates
from fnshard.runtime.packing import padded
from fnshard.runtime.tiers import rest

# gradients, slots, parameters, and the step's control
UpdateOf = Callable[[Tensors, Slots, Tensors, StepControl], None]
BeginOf = Callable[[Tensors, Slots, Tensors, StepControl], dict[str, Tensor]]


@dataclass(frozen=True)
class Place:
    """How one leaf's optimizer block lies in its stored and its gradient block; padding cut off.

    `stored`, `gradient`: slices of the local tensors, or None for the whole. `valid`: extent of the
    part of the optimizer block that is not padding, or None where nothing is padded.
    """

    stored: tuple[slice, ...] | None
    gradient: tuple[slice, ...] | None
    valid: tuple[slice, ...] | None


def place(spec: LayoutSpec, mesh: Mesh, rank: int) -> Place:
    """Where a rank's optimizer block lies in what it stores and reduces."""
    spec = spec.local(mesh)
    here = mesh.coordinate(rank)
    mine = block_slices(spec.shape, spec.optimizer, mesh, here)
    block = block_shape(spec.shape, spec.optimizer, mesh)
    extent = tuple(slice(0, s.stop - s.start) for s in mine)
    whole = all(s.stop == b for s, b in zip(extent, block, strict=True))
    sliced = None if whole else extent
    return Place(
        stored=sliced if spec.storage == spec.optimizer else mine,
        gradient=sliced if spec.gradient == spec.optimizer else mine,
        valid=sliced,
    )


@dataclass
class Updater:
    """Runs the optimizer of one step on whatever buckets the schedule says, in its order.

    `fused`: where updates are compiled; those on the host never are.
    """

    optimizer: Optimizer
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    rank: int
    fused: FusedUpdates | None = None
    places: dict[str, Place] = field(default_factory=dict)

    def bind(self, paths: tuple[str, ...]) -> UpdateOf:
        """A function that updates leaves of one bucket from their reduced blocks, where these lie."""
        self._locate(paths)
        if self.fused is not None and self.specs[paths[0]].updated_on == "device":
            return self._bind_fused(paths)
        if all(self._plain(p) for p in paths):

            def update_plain(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
                if not control.skip:
                    self.optimizer.apply({p: blocks[p] for p in paths}, slots, params, control.info)

            return update_plain

        def update(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
            if control.skip:
                return
            grads = {p: _cut(blocks[p], self.places[p].gradient) for p in paths}
            own_slots, targets = self._state(paths, slots, params)
            self.optimizer.apply(grads, own_slots, targets, control.info)
            self._store(paths, slots, params, targets)

        return update

    def bind_begin(self, paths: tuple[str, ...]) -> BeginOf:
        """A function that runs an update up to what is sent to the owners of leaves: padded blocks."""
        self._locate(paths)
        specs = {p: self.specs[p] for p in paths}
        shapes = {p: block_shape(s.shape, s.optimizer, self.mesh) for p, s in specs.items()}

        def begin(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> dict[str, Tensor]:
            own_slots, targets = self._state(paths, slots, params)
            out = {}
            for path in paths:
                rule, info = self._rule(path), control.info
                grad, own = _cut(blocks[path], self.places[path].gradient), own_slots[path]
                given = rule.given(path, info)
                sent, new = rule.begin_leaf(path, grad, own, targets[path], given, info.grad_scale)
                out[path] = padded(sent, shapes[path])
                if not control.skip:
                    _write(own, new)
            return out

        return begin

    def bind_end(self, paths: tuple[str, ...]) -> UpdateOf:
        """A function that updates leaves from what their owners have made: padded blocks."""
        self._locate(paths)
        shapes = {p: tuple(self.specs[p].shape) for p in paths}

        def end(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
            if control.skip:
                return
            info = replace(control.info, shapes=shapes)
            own_slots, targets = self._state(paths, slots, params)
            for path in paths:
                rule, own = self._rule(path), own_slots[path]
                made = _cut(blocks[path], self.places[path].valid).to(targets[path].device)
                change, new = rule.end_leaf(path, made, own, targets[path], rule.given(path, info))
                targets[path].add_(change)
                _write(own, new)
            self._store(paths, slots, params, targets)

        return end

    def _rule(self, path: str) -> Optimizer:
        return self.optimizer.of(path, len(self.specs[path].shape))

    def _locate(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.places[path] = place(self.specs[path], self.mesh, self.rank)

    def _state(
        self, paths: Sequence[str], slots: Slots, params: Tensors
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Slots and what is updated (parameters or their masters), padding cut off."""
        own_slots, targets = {}, {}
        for path in paths:
            where = self.places[path]
            own_slots[path] = {k: _cut(v, where.valid) for k, v in slots[path].items()}
            master = own_slots[path].pop(MASTER, None)
            targets[path] = _cut(params[path], where.stored) if master is None else master
        return own_slots, targets

    def _store(self, paths: Sequence[str], slots: Slots, params: Tensors, targets: Tensors) -> None:
        """Masters to what is stored, where that is here."""
        for path in paths:
            if MASTER in slots[path] and path in params:
                _cut(params[path], self.places[path].stored).copy_(targets[path])

    def control(self, env: dict[str, Any], bucket: Bucket) -> tuple[StepControl, Any]:
        """What the bucket's update reads of the step, and the event after which it is there, if any.

        For an update on the host it is sent there, once before the scalars are known and once after.
        """
        control = env[CONTROL]
        if self.specs[bucket.paths[0]].updated_on != "host" or self.mesh.device_type == "cpu":
            return control, None
        sent = env.get(CONTROL_ON_HOST)
        if sent is None or sent[0] is not control:
            on_host, event = control.on_host(), torch.Event(self.mesh.device_type)
            event.record()
            sent = env[CONTROL_ON_HOST] = control, on_host, event
        return sent[1:]

    def _bind_fused(self, paths: tuple[str, ...]) -> UpdateOf:
        """The same, compiled. A bucket's leaves are of one dtype on the wire, and may differ in all else."""
        places, names = self.places, tuple(self.optimizer.slots)
        empty = {
            p for p in paths
            if 0 in self.specs[p].shape or any(s.start == s.stop for s in places[p].valid or ())
        }  # fmt: skip
        parts: list[tuple[list[str], Callable[..., None]]] = []
        for copied in (False, True):
            mine = [p for p in paths if self.specs[p].has_master is copied and p not in empty]
            if mine:
                parts.append((mine, self.fused.bind(mine, copied)))

        def tensors(path: str, blocks: Tensors, slots: Slots, params: Tensors) -> list[Tensor]:
            where, own_slots = places[path], slots[path]
            own = [_cut(params[path], where.stored)]
            if MASTER in own_slots:
                own.insert(0, _cut(own_slots[MASTER], where.valid))
            return [
                _cut(blocks[path], where.gradient),
                *own,
                *(_cut(own_slots[n], where.valid) for n in names),
            ]

        def update(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
            if control.skip:
                return
            for mine, run in parts:
                run({p: tensors(p, blocks, slots, params) for p in mine}, control.info)

        return update

    def stored_part(self, path: str, stored: Tensor) -> Tensor:
        """The part of a stored leaf that its optimizer block holds, padding cut off."""
        return _cut(stored, self.places[path].stored)

    def valid_part(self, path: str, block: Tensor) -> Tensor:
        """An optimizer block without its padding."""
        return _cut(block, self.places[path].valid)

    def _plain(self, path: str) -> bool:
        """Whether gradient, slots and stored block are the optimizer's as they are."""
        spec = self.specs[path]
        one_dtype = spec.storage_dtype == spec.optimizer_dtype == spec.reduce_dtype
        return one_dtype and not spec.has_master and self.places[path] == Place(None, None, None)


def _write(slots: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, value in new.items():
        slots[name].copy_(value)


def _cut(tensor: Tensor, slices: tuple[slice, ...] | None) -> Tensor:
    return tensor if slices is None else tensor[slices]


def init_slots(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    rank: int,
    disk_dir: str | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Optimizer state for this rank's blocks, where it rests, and master copies where there are any.

    `params`: stored blocks of all leaves; leaves that do not train get none. One leaf's state at a time is
    outside its tier.
    """
    trained = {p: s for p, s in specs.items() if s.trainable}
    optimizer.check({path: len(spec.shape) for path, spec in trained.items()})
    out = {}
    for path, spec in trained.items():
        block = optimizer_block(params[path], spec, mesh, rank).to(spec.optimizer_dtype)
        slots = dict(optimizer.init_leaf(path, block))
        if spec.has_master:
            slots[MASTER] = block.clone() if spec.optimizer_memory == "device" else block
        out[path] = {k: rest(v, spec.optimizer_memory, mesh.device, disk_dir) for k, v in slots.items()}
    return out


def optimizer_block(stored: Tensor, spec: LayoutSpec, mesh: Mesh, rank: int) -> Tensor:
    """The optimizer's padded block of a stored leaf."""
    if spec.storage == spec.optimizer:
        return stored
    where = place(spec, mesh, rank)
    block = torch.zeros(
        block_shape(spec.shape, spec.optimizer, mesh), dtype=stored.dtype, device=stored.device
    )
    _cut(block, where.valid).copy_(stored[where.stored])
    return block
