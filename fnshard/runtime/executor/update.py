"""Update: one bucket's reduced gradients -> the optimizer, in place on stored shards and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_HOST, MASTER
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.errors import OptimizerError
from fnshard.layout.partition import block_shape, block_slices, side_by_side
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer, Slots, StepInfo, Tensors
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import FusedUpdates
from fnshard.runtime.tiers import rest

# gradients, slots, parameters, what was gathered of each leaf in order, and the step's control
Gathered = Mapping[str, list[Tensor]]
UpdateOf = Callable[[Tensors, Slots, Tensors, Gathered, StepControl], None]
SendOf = Callable[[Tensors, Slots, Tensors, Gathered, StepControl], dict[str, Tensor]]


class _Reached(Exception):
    """An optimizer's `leaf` has come to a gather whose result is not there yet."""

    def __init__(self, shard: Tensor):
        self.shard = shard


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

    def bind(self, bucket: Bucket) -> UpdateOf:
        """A function that updates the bucket's leaves from their reduced blocks, where these lie."""
        paths = bucket.paths
        self._locate(paths)
        if self.fused is not None and self.specs[paths[0]].updated_on == "device":
            return self._bind_fused(paths)
        if all(self._plain(p) for p in paths):

            def update_plain(
                blocks: Tensors, slots: Slots, params: Tensors, gathered: Gathered, control: StepControl
            ) -> None:
                if not control.skip:
                    self.optimizer.apply(blocks, slots, params, self._info(control, gathered))

            return update_plain

        def update(
            blocks: Tensors, slots: Slots, params: Tensors, gathered: Gathered, control: StepControl
        ) -> None:
            if control.skip:
                return
            grads, own_slots, targets = self._parts(paths, blocks, slots, params)
            self.optimizer.apply(grads, own_slots, targets, self._info(control, gathered))
            for path in paths:
                if MASTER in slots[path] and path in params:
                    _cut(params[path], self.places[path].stored).copy_(targets[path])

        return update

    def bind_send(self, bucket: Bucket) -> SendOf:
        """A function that runs an UpdateGather's leaves up to their next gather: padded blocks to send."""
        paths = bucket.paths
        self._locate(paths)

        def send(
            blocks: Tensors, slots: Slots, params: Tensors, gathered: Gathered, control: StepControl
        ) -> dict[str, Tensor]:
            grads, own_slots, targets = self._parts(paths, blocks, slots, params)
            out = {}
            for piece in bucket.pieces:
                info = self._info(control, {piece.path: gathered.get(piece.path, [])})
                shard = next_gathered(
                    self.optimizer,
                    piece.path,
                    grads[piece.path],
                    own_slots[piece.path],
                    targets[piece.path],
                    info,
                )
                if shard is None:
                    raise OptimizerError(
                        f"{self.optimizer} gathers less of params[{piece.path!r}] than when the step was "
                        "lowered: what it gathers may not depend on values."
                    )
                out[piece.path] = shard.new_zeros(piece.block)
                _cut(out[piece.path], self.places[piece.path].valid).copy_(shard)
            return out

        return send

    def _locate(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.places[path] = place(self.specs[path], self.mesh, self.rank)

    def _parts(
        self, paths: Sequence[str], blocks: Tensors, slots: Slots, params: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Gradients, slots and what is updated (parameters or their masters), padding cut off."""
        grads, own_slots, targets = {}, {}, {}
        for path in paths:
            where = self.places[path]
            grads[path] = _cut(blocks[path], where.gradient)
            own_slots[path] = {k: _cut(v, where.valid) for k, v in slots[path].items()}
            master = own_slots[path].pop(MASTER, None)
            targets[path] = _cut(params[path], where.stored) if master is None else master
        return grads, own_slots, targets

    def _info(self, control: StepControl, gathered: Gathered) -> StepInfo:
        """The step, with what was gathered for this update in the place of a collective."""
        if "gather" not in self.optimizer.needs:
            return control.info
        taken: dict[str, int] = {}

        def gather(path: str, shard: Tensor) -> Tensor:
            number = taken[path] = taken.get(path, -1) + 1
            if not self.mesh.ordered(self.specs[path].optimizer.axes):
                return shard
            if number >= len(gathered.get(path, ())):
                raise _Reached(shard)
            whole = gathered[path][number].to(shard.device)
            return side_by_side(whole, self.specs[path].optimizer, self.mesh, inverse=True)

        return control.info.with_gather(gather, self._cut_shard)

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

        def update(
            blocks: Tensors, slots: Slots, params: Tensors, gathered: Gathered, control: StepControl
        ) -> None:
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

    def _cut_shard(self, path: str, whole: Tensor) -> Tensor:
        spec, here = self.specs[path], self.mesh.coordinate(self.rank)
        whole = side_by_side(whole, spec.optimizer, self.mesh)
        return whole[block_slices(spec.shape, spec.optimizer.contiguous, self.mesh, here)]


def _cut(tensor: Tensor, slices: tuple[slice, ...] | None) -> Tensor:
    return tensor if slices is None else tensor[slices]


def next_gathered(
    optimizer: Optimizer, path: str, grad: Tensor, slots: Tensors, param: Tensor, info: StepInfo
) -> Tensor | None:
    """The shard that a leaf's update gathers next, or None where it comes to its end without."""
    try:
        optimizer.update_leaf(path, grad, slots, param, optimizer.given(path, info), info.grad_scale)
    except _Reached as reached:
        return reached.shard
    return None


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
