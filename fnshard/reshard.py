"""Reshard: a state from one layout to another in memory, leaf by leaf, and what that sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.errors import SpecError
from fnshard.held import (
    blank_params,
    blank_slots,
    held_state,
    named_params,
    named_slots,
    path_of,
    saved_slots,
    wanted,
)
from fnshard.mesh import Mesh
from fnshard.runner import default_mesh
from fnshard.runtime.buckets import Packer, local_block, make_buckets
from fnshard.runtime.collectives import Collectives
from fnshard.runtime.connect import connection
from fnshard.runtime.dcp import Held, Wanted
from fnshard.runtime.manifest import Leaf
from fnshard.runtime.tensorfile import NAMES
from fnshard.shards import compare_paths, spec_paths
from fnshard.spec import LayoutSpec
from fnshard.state import TrainState


@dataclass(frozen=True)
class Cost:
    """What a reshard sends; prints as a short table.

    `leaves`: `{name: bytes}` that one rank sends of each leaf of the old state: its block, to all that the
    leaf was split over; nothing of a leaf that lies alike before and after, or was whole. `whole_bytes`: the
    largest leaf that is whole for a moment.
    """

    leaves: Mapping[str, int]
    whole_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Of one rank, all leaves."""
        return sum(self.leaves.values())

    def __str__(self) -> str:
        rows = sorted(((b, n) for n, b in self.leaves.items() if b), reverse=True)
        shown = [f"{size / 1e6:12.3f} MB  {name}" for size, name in rows[:8]]
        if len(rows) > 8:
            shown.append(f"{sum(b for b, _ in rows[8:]) / 1e6:12.3f} MB  {len(rows) - 8} more")
        count = f"{len(rows)} of {len(self.leaves)} leaves"
        head = f"{self.sent_bytes / 1e6:12.3f} MB sent by each rank, for {count}"
        return "\n".join([head, *shown, f"{self.whole_bytes / 1e6:12.3f} MB whole for a moment"])


def reshard_cost(
    state: TrainState, before: Any, after: Any, mesh: Mesh | None = None, *, to: Mesh | None = None
) -> Cost:
    """What `reshard` would send; nothing is moved, and the meshes may be abstract.

    Args:
        state, before, after, mesh, to: as for `reshard`.

    >>> import fnshard as fs
    >>> params, paper = {"w": torch.zeros(8, 4)}, fs.make_mesh(shard=4, abstract=True)
    >>> a, b = fs.presets.full_shard(params, paper), fs.presets.zero1(params, paper)
    >>> step = fs.shard_step(lambda p: p["w"].sum(), a, mesh=paper, optimizer=fs.optim.sgd(0.1))
    >>> fs.reshard_cost(step.init(params), a, b, paper).leaves
    {'params/w': 96}
    """
    moves = _moves(state, before, after, mesh or default_mesh(), to, None, on_paper=True)
    gathered = [moves.old[n] for n in moves.gathered]
    sent = {
        n: h.block.numel() * h.block.dtype.itemsize * (moves.mesh.axes_size(h.layout.axes) - 1)
        for n, h in moves.old.items()
    }
    return Cost(
        {n: size if n in moves.gathered else 0 for n, size in sent.items()},
        max((math.prod(h.shape) * h.block.dtype.itemsize for h in gathered), default=0),
    )


def reshard(
    state: TrainState,
    before: Any,
    after: Any,
    mesh: Mesh | None = None,
    *,
    to: Mesh | None = None,
    disk_dir: str | None = None,
) -> TrainState:
    """The same state in another layout, without a file. A collective; the old state is consumed.

    A leaf is gathered by the ranks it is split over, and each cuts its block; old and new state are there
    together. dtypes, tiers and master copies go as in `fnshard.checkpoint.restore`.

    Args:
        state: of `before` on `mesh`.
        before, after: spec trees of the same leaves.
        mesh: where it is; default one axis over all ranks.
        to: a mesh of the same ranks by other axes; default `mesh`.
        disk_dir: for leaves that rest on disk afterwards.

    Raises:
        SpecError: trees of other leaves, or meshes of other sizes.
        StateError: a state that is not of `before`.
    """
    moves = _moves(state, before, after, mesh or default_mesh(), to, disk_dir)
    comm = connection(moves.mesh)
    state.consume()
    with torch.no_grad():
        for name in list(moves.old):
            gathered = name in moves.gathered
            held = moves.old.pop(name)
            whole = _gathered(held, moves.specs[name], moves.mesh, comm) if gathered else held.block
            for leaf in moves.targets.get(name, ()):
                split = gathered or not moves.mesh.ordered(held.layout.axes)
                leaf.block.copy_(local_block(whole, leaf.layout, moves.to) if split else whole)
    return moves.new


def _gathered(held: Held, spec: LayoutSpec, mesh: Mesh, comm: Collectives) -> Tensor:
    """The full leaf, on every rank that has a part of it."""
    as_stored = {"leaf": replace(spec, storage=held.layout, storage_dtype=held.block.dtype)}
    (bucket,) = make_buckets(as_stored, mesh, lambda s: s.storage, lambda s: s.storage_dtype, "reshard")
    packer = Packer(bucket, mesh, mesh.rank)
    flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
    packer.pack_blocks({"leaf": held.block}, flat)
    handle = comm.all_gather(flat, bucket.axes)
    whole = packer.unpack_rows(handle.wait(), bucket.dtype)["leaf"]
    handle.release()
    return whole


@dataclass
class _Moves:
    """`old` leaves by name, with their `specs`; `new`, to be filled; and which of its leaves come from which
    old one (`targets`)."""

    old: dict[str, Held]
    specs: Mapping[str, LayoutSpec]
    new: TrainState
    targets: Mapping[str, Sequence[Wanted]]
    mesh: Mesh
    to: Mesh
    gathered: set[str] = field(init=False)

    def __post_init__(self) -> None:
        """Gathered are old leaves that are split, and lie otherwise than what comes from them."""
        same_mesh = (self.mesh.names, self.mesh.sizes) == (self.to.names, self.to.sizes)
        self.gathered = {
            name
            for name, targets in self.targets.items()
            if self.mesh.ordered(self.old[name].layout.axes)
            and not (same_mesh and all(leaf.layout == self.old[name].layout for leaf in targets))
        }


def _moves(
    state: TrainState,
    before: Any,
    after: Any,
    mesh: Mesh,
    to: Mesh | None,
    disk_dir: str | None,
    on_paper: bool = False,
) -> _Moves:
    (named, _), (others, structure) = spec_paths(before), spec_paths(after)
    compare_paths(named, others)
    target = to or mesh
    if target.size != mesh.size:
        raise SpecError(f"a state on {mesh} cannot be resharded to {target}: they have not the same ranks.")
    old = held_state(state, named, mesh)
    saved = {n: Leaf(h.shape, NAMES[h.block.dtype], repr(h.layout), ()) for n, h in old.items()}
    params = blank_params(others, target, disk_dir, on_paper=on_paper)
    slots = blank_slots(saved_slots(saved, others, target), others, target, disk_dir, on_paper=on_paper)
    new = TrainState(
        state.step.clone(),
        tree.unflatten(params.values(), structure),
        slots,
        {k: v.clone() for k, v in state.loss_scale.items()},
        state.seed.clone(),
        where=(after, target),
        data=state.data,
    )
    held = named_params(params, others) | named_slots(slots, others, target)
    trained = {p for p, s in others.items() if s.trainable}
    targets: dict[str, list[Wanted]] = {}
    for leaf in wanted(held, saved, trained).values():
        targets.setdefault(leaf.source, []).append(leaf)
    specs = {n: named[path_of(n)] for n in old if not n.startswith("loss_scale/")}
    return _Moves(old, specs, new, targets, mesh, target)
