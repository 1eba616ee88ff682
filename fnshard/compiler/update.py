"""Update: one bucket's reduced gradients -> the optimizer, in place on stored shards and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.scalars import Summary
from fnshard.mesh import Mesh
from fnshard.runtime.buckets import Bucket
from fnshard.runtime.collectives import Collectives, Done
from fnshard.spec import LayoutSpec, block_shape, block_slices
from fnshard.transform import Optimizer, StepInfo

MASTER = "master"


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
    """Where a rank's optimizer block lies."""
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
    """Runs the optimizer of one step on whatever buckets the schedule says, in its order."""

    optimizer: Optimizer
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    rank: int
    comm: Collectives
    places: dict[str, Place] = field(default_factory=dict)

    def scalars_arrived(self, env: dict[str, Any], summary: Summary) -> None:
        """Fill in what the update reads of the whole step: norms, the factor, whether to skip."""
        factor = env["rescale"](summary)
        norms, leaf_norms = summary.norm, summary.leaf_norms
        info = StepInfo(
            env["info"].step, global_norm=norms, leaf_norms=leaf_norms or None, **self._moves(env)
        )
        env["info"] = info if factor is None else info.scaled(factor)
        env["skip"] = env["skip_if"] is not None and env["skip_if"](summary)

    def _moves(self, env: dict[str, Any]) -> dict[str, Any]:
        if "gather" not in self.optimizer.needs:
            return {}
        return {"gather": self._gather, "cut": self._cut}

    def start(self, env: dict[str, Any], step: Tensor) -> None:
        """At the beginning of a step."""
        info, factor = StepInfo(step, **self._moves(env)), env["rescale"](None)
        env["info"] = info if factor is None else info.scaled(factor)
        env["skip"] = False

    def bind(self, bucket: Bucket) -> Callable[[Mapping[str, Tensor], dict[str, Any]], None]:
        """A function that updates the bucket's leaves from their reduced blocks."""
        for path in bucket.paths:
            self.places[path] = place(self.specs[path], self.mesh, self.rank)
        paths = bucket.paths
        if all(self._plain(p) for p in paths):

            def update_plain(blocks: Mapping[str, Tensor], env: dict[str, Any]) -> None:
                if not env["skip"]:
                    opt_state = env["opt_state"]
                    slots = {p: opt_state[p] for p in paths}
                    self.optimizer.apply(blocks, slots, {p: env[f"s:{p}"] for p in paths}, env["info"])

            return update_plain

        def update(blocks: Mapping[str, Tensor], env: dict[str, Any]) -> None:
            if env["skip"]:
                return
            grads, slots, params = {}, {}, {}
            for path in paths:
                spec, where = self.specs[path], self.places[path]
                grads[path] = _cut(blocks[path], where.gradient).to(spec.optimizer_dtype)
                slots[path] = {k: _cut(v, where.valid) for k, v in env["opt_state"][path].items()}
                master = slots[path].pop(MASTER, None)
                params[path] = _cut(env[f"s:{path}"], where.stored) if master is None else master
            self.optimizer.apply(grads, slots, params, env["info"])
            for path in paths:
                if MASTER in env["opt_state"][path]:
                    _cut(env[f"s:{path}"], self.places[path].stored).copy_(params[path])

        return update

    def _plain(self, path: str) -> bool:
        """Whether gradient, slots and stored block are the optimizer's as they are."""
        spec = self.specs[path]
        one_dtype = spec.storage_dtype == spec.optimizer_dtype == spec.reduce_dtype
        return one_dtype and self.places[path] == Place(None, None, None)

    def _gather(self, path: str, shard: Tensor) -> Tensor:
        """The whole leaf from optimizer blocks (padding cut off); a collective."""
        spec = self.specs[path]
        axes = self.mesh.ordered(spec.optimizer.axes)
        block = block_shape(spec.shape, spec.optimizer, self.mesh)
        flat = shard.new_zeros(block)
        flat[tuple(slice(0, n) for n in shard.shape)] = shard
        handle = self.comm.all_gather(flat.flatten(), axes) if axes else Done([flat.flatten()])
        full = shard.new_empty(spec.shape)
        for rank, row in zip(self.mesh.group_ranks(axes, self.rank), handle.wait(), strict=True):
            slices = block_slices(spec.shape, spec.optimizer, self.mesh, self.mesh.coordinate(rank))
            full[slices] = row.view(block)[tuple(slice(0, s.stop - s.start) for s in slices)]
        handle.release()
        return full

    def _cut(self, path: str, whole: Tensor) -> Tensor:
        spec = self.specs[path]
        return whole[block_slices(spec.shape, spec.optimizer, self.mesh, self.mesh.coordinate(self.rank))]


def _cut(tensor: Tensor, slices: tuple[slice, ...] | None) -> Tensor:
    return tensor if slices is None else tensor[slices]


def init_slots(
    optimizer: Optimizer, params: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec], mesh: Mesh, rank: int
) -> dict[str, dict[str, Tensor]]:
    """Optimizer state for this rank's blocks, and master copies where the dtype differs.

    `params`: stored blocks of all leaves; leaves that do not train get none.
    """
    blocks = {}
    for path, spec in specs.items():
        if spec.trainable:
            blocks[path] = optimizer_block(params[path], spec, mesh, rank).to(spec.optimizer_dtype)
    slots = {p: dict(s) for p, s in optimizer.init(blocks).items()}
    for path, block in blocks.items():
        slots.setdefault(path, {})
        if specs[path].optimizer_dtype != specs[path].storage_dtype:
            slots[path][MASTER] = block.clone()
    return slots


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
