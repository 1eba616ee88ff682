"""Reshard: a state from one layout to another in memory, leaf by leaf, and what that sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.checkpoint.coordination import all_or_none
from fnshard.checkpoint.state_leaves import (
    LocalLeaf,
    RestoreTarget,
    param_leaves,
    path_of,
    restore_targets,
    saved_slots,
    slot_leaves,
    state_leaves,
)
from fnshard.errors import SpecError
from fnshard.layout.codecs import Unfit, block_of, check_codecs, is_coded, parts_of
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.optimizers import ema_params
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.packing import local_block
from fnshard.step.runner import default_mesh
from fnshard.step.shards import blank_params, blank_slots, gather_full, stored_at_rest
from fnshard.step.state import TrainState

__all__ = ["Cost", "averaged", "reshard", "reshard_cost"]


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
    mesh = mesh or default_mesh()
    before, after = _aligned(state, before, after)
    old, before, plain = _decoded(state, before, after)
    moves = _moves(old, before, plain, mesh, to, None, on_paper=True)
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
    state: Any,
    before: Any,
    after: Any,
    mesh: Mesh | None = None,
    *,
    to: Mesh | None = None,
    disk_dir: str | None = None,
) -> Any:
    """The same state in another layout, without a file. A collective; the old state is consumed.

    A leaf is gathered by the ranks it is split over, and each cuts its block; old and new state are there
    together. dtypes, tiers and master copies go as in `fnshard.checkpoint.restore`. A leaf whose codec
    changes is decoded before and coded afterwards, block by block.

    Args:
        state: of `before` on `mesh`; or a tree of stored blocks: then such a tree is returned.
        before, after: spec trees of the same leaves.
        mesh: where it is; default one axis over all ranks.
        to: a mesh of the same ranks by other axes; default `mesh`.
        disk_dir: for leaves that rest on disk afterwards.

    Raises:
        SpecError: trees of other leaves, or meshes of other sizes.
        StateError: a state that is not of `before`; values of leaves to be coded that are not finite.

    >>> import fnshard as fs
    >>> params = {"w": torch.eye(2)}
    >>> plain = fs.match_specs(params, [("*", LayoutSpec())])
    >>> coded = fs.match_specs(params, [("*", LayoutSpec(codec="int8", trainable=False))])
    >>> reshard(params, plain, coded)["w"]["scales"]
    tensor([[0.0079],
            [0.0079]])
    """
    mesh = mesh or default_mesh()
    if not isinstance(state, TrainState):
        zero = torch.zeros((), dtype=torch.int64)
        alone = TrainState(zero, state, {}, {}, zero.clone())
        return reshard(alone, before, after, mesh, to=to, disk_dir=disk_dir).params
    before, after = _aligned(state, before, after)
    old, before, plain = _decoded(state, before, after)
    moves = _moves(old, before, plain, mesh, to, disk_dir)
    del old
    state.consume(by="fs.reshard")
    _move(moves)
    return _coded(moves.new, plain, after, moves.to, disk_dir)


def averaged(state: TrainState, name: str = "ema") -> TrainState:
    """The state with the averages that `fs.optim.ema` keeps as its parameters: to evaluate, save or export.

    A collective where parameters and optimizer state lie differently. `state` goes on as it is; leaves that
    do not train are those of `state`, and there is no optimizer state.

    Args:
        state: of `step.init`, `step.adopt` or a restore.
        name: the slot; a second `ema` of a chain keeps "ema_2".

    Raises:
        OptimizerError: trained leaves without that slot.

    >>> import fnshard as fs
    >>> params, mesh = {"w": torch.ones(2)}, fs.make_mesh(shard=1)
    >>> step = fs.shard_step(
    ...     lambda p, x: (p["w"] * x).sum(), fs.presets.zero1(params, mesh), mesh=mesh,
    ...     optimizer=fs.optim.chain(fs.optim.sgd(1.0), fs.optim.ema(0.75)), backend="eager")
    >>> state, _ = step(step.init(params), torch.ones(2))
    >>> state.params["w"], fs.averaged(state).params["w"]
    (tensor([0., 0.]), tensor([0.7500, 0.7500]))
    """
    specs, mesh = state.where
    trained, averages = ResolvedSpecs.of(specs).stored, ema_params(state.opt_state, name)
    after = {path: trained[path] for path in averages}
    before = {
        p: replace(s, storage=s.optimizer, storage_dtype=averages[p].dtype, memory=s.optimizer_memory)
        for p, s in after.items()
    }
    moved = reshard(averages, before, after, mesh)
    leaves, structure = tree.flatten_with_paths(state.params)
    params = tree.unflatten([moved.get(path, leaf) for path, leaf in leaves.items()], structure)
    return TrainState(state.step.clone(), params, {}, {}, state.seed.clone(), where=state.where)


def _aligned(state: TrainState, before: Any, after: Any) -> tuple[ResolvedSpecs, ResolvedSpecs]:
    before = ResolvedSpecs.of(before).align(state.params)
    return before, ResolvedSpecs.of(after).align(before.tree)


def _move(moves: _Moves) -> None:
    """Fill the new state, leaf by leaf."""
    comm = connection(moves.mesh)
    with torch.no_grad():
        for name in list(moves.old):
            gathered = name in moves.gathered
            old = moves.old.pop(name)
            full = old.block
            if gathered:
                spec = replace(moves.specs[name], storage=old.layout, storage_dtype=old.block.dtype)
                full = gather_full({name: old.block}, {name: spec}, moves.mesh, comm)[name]
            for leaf in moves.targets.get(name, ()):
                split = gathered or not moves.mesh.ordered(old.layout.axes)
                leaf.block.copy_(local_block(full, leaf.layout, moves.to) if split else full)


def _decoded(
    state: TrainState, before: ResolvedSpecs, after: ResolvedSpecs
) -> tuple[TrainState, ResolvedSpecs, ResolvedSpecs]:
    """A state whose leaves that change their codec are as they are, its specs, and those to move it to."""
    old, new = before.leaves, after.leaves
    changed = {p for p in old if old[p].codec != new[p].codec}
    if not changed:
        return state, before, after
    check_codecs({p: new[p] for p in changed})
    blocks = tree.flatten_with_paths(state.params)[0]

    def plain(specs: ResolvedSpecs) -> ResolvedSpecs:
        return before.with_leaves(_plain(s) if p in changed else s for p, s in specs.leaves.items())

    with torch.no_grad():
        values = [block_of(blocks, p, s) if p in changed else _stored(blocks, p, s) for p, s in old.items()]
    fields = {**state.as_dict(), "params": tree.unflatten(values, before.leaf_structure)}
    return TrainState(**fields, data=state.data), plain(before), plain(after)


def _plain(spec: LayoutSpec) -> LayoutSpec:
    """The same leaf uncoded, for a moment, and so not on disk."""
    if spec.codec is None:
        return spec
    return replace(spec, codec=None, memory="host" if spec.memory == "disk" else spec.memory)


def _stored(blocks: Mapping[str, Tensor], path: str, spec: LayoutSpec) -> Any:
    """A leaf as the tree holds it: a coded one is a dict of its parts."""
    return {n: blocks[f"{path}.{n}"] for n in parts_of(spec)} if is_coded(spec) else blocks[path]


def _coded(
    state: TrainState, plain: ResolvedSpecs, after: ResolvedSpecs, mesh: Mesh, disk_dir: str | None
) -> TrainState:
    """A state of `plain` specs with the codecs of `after`. A collective: all ranks refuse, or none."""
    if plain is after:
        return state
    blocks = tree.flatten_with_paths(state.params)[0]
    changed = {p for p, s in after.leaves.items() if is_coded(s) and not is_coded(plain.leaves[p])}

    def check() -> None:
        unfit = Unfit()
        for path in changed:
            unfit.look(path, after.leaves[path], blocks[path])
        unfit.refuse()

    all_or_none(connection(mesh).gather_object, "coding leaves", check)
    with torch.no_grad():
        values = [
            stored_at_rest(blocks[p], s, mesh, disk_dir) if p in changed else _stored(blocks, p, s)
            for p, s in after.leaves.items()
        ]
    made = state.replace(params=tree.unflatten(values, after.leaf_structure))
    made.where, made.data = (after.tree, mesh), state.data
    return made


@dataclass
class _Moves:
    """`old` leaves by name, with their `specs`; `new`, to be filled; and which of its leaves come from which
    old one (`targets`)."""

    old: dict[str, LocalLeaf]
    specs: Mapping[str, LayoutSpec]
    new: TrainState
    targets: Mapping[str, Sequence[RestoreTarget]]
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
    before: ResolvedSpecs,
    after: ResolvedSpecs,
    mesh: Mesh,
    to: Mesh | None,
    disk_dir: str | None,
    on_paper: bool = False,
) -> _Moves:
    named, others = before.stored, after.stored
    compare_paths(named, others)
    target = to or mesh
    if target.size != mesh.size:
        raise SpecError(f"a state on {mesh} cannot be resharded to {target}: they have not the same ranks.")
    old = state_leaves(state, named, mesh)
    saved = {n: leaf.saved_as() for n, leaf in old.items()}
    params = blank_params(others, target, disk_dir, on_paper=on_paper)
    slots = blank_slots(saved_slots(saved, others, target), others, target, disk_dir, on_paper=on_paper)
    new = TrainState(
        state.step.clone(),
        tree.unflatten(params.values(), after.structure),
        slots,
        {k: v.clone() for k, v in state.loss_scale.items()},
        state.seed.clone(),
        where=(after.tree, target),
        data=state.data,
    )
    leaves = param_leaves(params, others) | slot_leaves(slots, others, target)
    targets: dict[str, list[RestoreTarget]] = {}
    for leaf in restore_targets(leaves, saved, set(after.trainable)).values():
        targets.setdefault(leaf.source, []).append(leaf)
    specs = {n: named[path_of(n)] for n in old if not n.startswith("loss_scale/")}
    return _Moves(old, specs, new, targets, mesh, target)
