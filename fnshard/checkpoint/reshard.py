"""Reshard: move a state from one layout to another in memory, leaf by leaf."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.checkpoint.loader_state import encode, take_same_rows
from fnshard.checkpoint.manifest_file import SavedLeaf
from fnshard.checkpoint.state_leaves import (
    LocalLeaf,
    RestoreTarget,
    check_complex_alike,
    param_leaves,
    path_of,
    restore_targets,
    saved_slots,
    slot_leaves,
    specs_here,
    state_leaves,
)
from fnshard.errors import CheckpointError, CheckpointWarning, SpecError
from fnshard.layout.codecs import Unfit, block_of, check_codecs, is_coded, parts_of
from fnshard.layout.partition import P, slot_layout
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh, make_mesh
from fnshard.optim.optimizers import ema_params
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.coordination import all_or_none
from fnshard.runtime.files.tensorfile import STATE_DTYPES
from fnshard.runtime.packing import local_block
from fnshard.step.shards import blank_params, blank_slots, foreign_block, gather_full, put_at_rest
from fnshard.step.state import TrainState

__all__ = ["averaged", "reshard"]


def reshard(
    state: Any,
    before: Any,
    after: Any,
    mesh: Mesh | None = None,
    *,
    to: Mesh | None = None,
    disk_dir: str | None = None,
) -> Any:
    """Return the same state in another layout, without a file. A collective; the old state is consumed.

    The ranks that a leaf is split over gather it, and each takes its block. Old and new state are in memory
    together. dtypes, tiers and master copies are treated as in `fnshard.checkpoint.restore`, and so is the
    position in the data: one that is not alike on all ranks is None where ranks take other rows. A leaf whose
    codec changes is decoded before and coded afterwards, block by block.

    Args:
        state: a state laid out by `before` on `mesh`; or a tree of stored blocks, which returns such a tree.
        before, after: spec trees of the same leaves.
        mesh: the mesh that the state is on; by default, one axis over all ranks.
        to: a mesh of the same ranks with other axes; by default `mesh`.
        disk_dir: the directory for leaves that are kept on disk afterwards.

    Raises:
        SpecError: the trees have other leaves, or the meshes other sizes.
        StateError: the state is not laid out by `before`, or values of leaves that are to be coded are not
            finite.

    >>> import fnshard as fs
    >>> params = {"w": torch.eye(2)}
    >>> plain = fs.match_specs(params, [("*", LayoutSpec())])
    >>> coded = fs.match_specs(params, [("*", LayoutSpec(codec="int8", trainable=False))])
    >>> reshard(params, plain, coded)["w"]["scales"]
    tensor([[0.0079],
            [0.0079]])
    """
    mesh = mesh or make_mesh()
    if not isinstance(state, TrainState):
        zero = torch.zeros((), dtype=torch.int64)
        alone = TrainState(zero, state, {}, {}, zero.clone())
        return reshard(alone, before, after, mesh, to=to, disk_dir=disk_dir).params

    target = to or mesh
    if target.size != mesh.size:
        raise SpecError(
            f"a state on {mesh} cannot be resharded to {target}: they have not the same ranks.",
            fix="save it, and restore it on the other mesh, which may have any size.",
        )

    # Leaves whose codec changes move decoded, from specs `before` to specs `plain`.
    before = ResolvedSpecs.of(before).align(state.params)
    after = ResolvedSpecs.of(after).align(before.tree)
    old, before, plain = _decode_changed(state, before, after)
    compare_paths(before.stored, plain.stored)
    check_complex_alike(plain.complex, before.complex)

    # Describe the old leaves, in the same order on each rank. Stages of a pipeline tell each other theirs.
    leaves = state_leaves(old, before, mesh)
    known = {name: leaf.to_saved() for name, leaf in leaves.items()}
    if mesh.stages > 1:
        own = {name: (leaf.shape, leaf.dtype) for name, leaf in known.items()}
        union: dict[str, Any] = {}
        for text in connection(mesh).gather_object(json.dumps(own)):
            union |= json.loads(text)
        known = {n: SavedLeaf(tuple(shape), dtype, "", ()) for n, (shape, dtype) in sorted(union.items())}
    new, targets = _make_blank(old, known, plain, target, disk_dir)
    new.data = _carry_position(state.data, mesh, target)

    # From here on only `leaves` holds the old blocks, so that each is freed when it has been moved.
    del old
    state.consume(by="fs.reshard")
    if max(mesh.stages, target.stages) > 1:
        _move_between_stages(leaves, known, targets, before.stored, mesh, target)
    else:
        _move(leaves, targets, before.stored, mesh, target)
    return _encode_changed(new, plain, after, target, disk_dir)


def averaged(state: TrainState, name: str = "ema", *, disk_dir: str | None = None) -> TrainState:
    """Return a state whose parameters are the averages that `fs.optim.ema` keeps, to evaluate or save.

    It is a collective where parameters and optimizer state have different layouts. `state` stays usable. The
    new state shares its leaves that do not train, and has no optimizer state.

    Args:
        state: a state of `step.init`, `step.adopt` or a restore.
        name: the slot of the averages; a second `ema` of a chain keeps "ema_2".
        disk_dir: the directory for averages of leaves that are kept on disk; with None they are on the host.

    Raises:
        OptimizerError: leaves that train lack that slot.

    >>> import fnshard as fs
    >>> params, mesh = {"w": torch.ones(2)}, fs.make_mesh(shard=1)
    >>> step = fs.shard_step(
    ...     lambda p, x: (p["w"] * x).sum(), fs.presets.zero1(params, mesh), mesh=mesh,
    ...     optimizer=fs.optim.chain(fs.optim.sgd(1.0), fs.optim.ema(0.75)), backend="eager")
    >>> state, _ = step(step.init(params), torch.ones(2))
    >>> state.params["w"], fs.averaged(state).params["w"]
    (tensor([0., 0.]), tensor([0.7500, 0.7500]))
    """
    (specs, mesh), averages = state.where, ema_params(state.opt_state, name)
    resolved = ResolvedSpecs.of(specs)

    # Averages have the layout of optimizer state, and move to the layout of parameters.
    on_disk = "host" if disk_dir is None else "disk"
    here = specs_here(resolved.stored, mesh)
    after = {p: resolved.stored[p] for p in resolved.trainable if p in averages or p not in here}
    after = {
        p: replace(
            s, memory=on_disk if s.memory == "disk" else s.memory,
            optimizer_memory=on_disk if s.optimizer_memory == "disk" else s.optimizer_memory,
        )
        for p, s in after.items()
    }  # fmt: skip
    before = {
        p: replace(
            s, storage=s.optimizer, memory=s.optimizer_memory,
            storage_dtype=averages[p].dtype if p in averages else s.optimizer_dtype,
        )
        for p, s in after.items()
    }  # fmt: skip

    # Ranks of other stages do not have a leaf, but take part in moving it.
    blocks = {p: averages[p] if p in averages else foreign_block(s, mesh) for p, s in before.items()}
    moved = resolved.as_seen(reshard(blocks, before, after, mesh, disk_dir=disk_dir))

    # Leaves that do not train stay.
    leaves, structure = tree.flatten_with_paths(state.params)
    params = tree.unflatten([moved.get(path, leaf) for path, leaf in leaves.items()], structure)
    return TrainState(state.step.clone(), params, {}, {}, state.seed.clone(), where=state.where)


def _make_blank(
    state: TrainState,
    saved: Mapping[str, SavedLeaf],
    specs: ResolvedSpecs,
    mesh: Mesh,
    disk_dir: str | None,
) -> tuple[TrainState, dict[str, list[RestoreTarget]]]:
    """Make a state of zeros in other specs, and list the leaves of it that each old leaf fills.

    Args:
        saved: descriptions of the old leaves, by name.
    """
    # Blank blocks of parameters, and of the slots that the old state has.
    named = specs.stored
    here = specs_here(named, mesh)
    params = blank_params(named, mesh, disk_dir)
    slots = blank_slots(saved_slots(saved, here, mesh), named, mesh, disk_dir)
    scale = {k: v.clone() for k, v in state.loss_scale.items()}
    new = TrainState(
        state.step.clone(), specs.tree_of(params), slots, scale, state.seed.clone(), where=(specs.tree, mesh),
        slot_shapes=state.slot_shapes,
    )  # fmt: skip

    # A saved leaf may fill several: a parameter fills a master copy that was not kept before, too.
    targets: dict[str, list[RestoreTarget]] = {}
    blank = param_leaves(params, named, mesh) | slot_leaves(slots, state.slot_shapes, named, mesh)
    foreign = named.keys() - here.keys()
    for leaf in restore_targets(blank, saved, set(specs.trainable), foreign).values():
        targets.setdefault(leaf.source, []).append(leaf)
    return new, targets


def _carry_position(data: Any, mesh: Mesh, to: Mesh) -> Any:
    """Return this rank's position in the data on another mesh; None if it is one of other rows.

    It is a collective if ranks take other rows there.
    """
    if take_same_rows(mesh, to):
        return data
    # A position that is alike on all ranks fits any mesh.
    try:
        text = hashlib.sha256(json.dumps(encode(data)).encode()).hexdigest()
    except CheckpointError:  # values that cannot be compared
        text = f"rank {mesh.rank}"
    if len(set(connection(mesh).gather_object(text))) == 1:
        return data
    warnings.warn(
        f"each rank of {mesh} has its own position in the data, and the ranks of {to} take other rows: "
        "state.data is None. A loader whose state is alike on all ranks fits any mesh.",
        CheckpointWarning,
        stacklevel=3,
    )
    return None


def _move(
    leaves: dict[str, LocalLeaf],
    targets: Mapping[str, Sequence[RestoreTarget]],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    to: Mesh,
) -> None:
    """Fill the new state, leaf by leaf. A leaf that is split and changes its layout is gathered."""
    comm, same_mesh = connection(mesh), (mesh.names, mesh.sizes) == (to.names, to.sizes)
    with torch.no_grad():
        for name in list(leaves):
            # Pop the leaf, so that the old block is freed before the next leaf is gathered.
            old = leaves.pop(name)
            filled = targets.get(name, ())
            is_split = bool(mesh.ordered(old.layout.axes))
            stays = same_mesh and all(leaf.layout == old.layout for leaf in filled)
            # A leaf that fills nothing is not gathered. All ranks have the same targets, so none waits.
            full = old.block
            if filled and is_split and not stays:
                spec = replace(
                    specs[path_of(name)], shape=old.shape, storage=old.layout, storage_dtype=full.dtype
                )
                full = gather_full({name: full}, {name: spec}, mesh, comm)[name]
            for leaf in filled:
                leaf.block.copy_(full if is_split and stays else local_block(full, leaf.layout, to))


def _move_between_stages(
    leaves: dict[str, LocalLeaf],
    known: Mapping[str, SavedLeaf],
    targets: Mapping[str, Sequence[RestoreTarget]],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    to: Mesh,
) -> None:
    """Fill the new state, leaf by leaf. All ranks hold each leaf whole for a moment."""
    comm = connection(mesh)
    with torch.no_grad():
        for name, saved in known.items():
            if name.startswith("loss_scale/"):  # all ranks have the loss scale, and keep it
                continue
            # Ranks of other stages do not have the leaf: they take part in its gather with an empty block.
            spec, dtype = specs[path_of(name)], STATE_DTYPES[saved.dtype]
            layout = spec.storage
            if name.startswith("optimizer/"):
                layout = slot_layout(saved.shape, spec.shape, spec.optimizer, mesh) or P()
            spec = replace(spec, shape=saved.shape, storage=layout, storage_dtype=dtype)
            old = leaves.pop(name, None)
            block = foreign_block(spec, mesh) if old is None else old.block
            full = gather_full({name: block}, {name: spec}, mesh, comm)[name]
            for leaf in targets.get(name, ()):
                leaf.block.copy_(local_block(full, leaf.layout, to))


def _decode_changed(
    state: TrainState, before: ResolvedSpecs, after: ResolvedSpecs
) -> tuple[TrainState, ResolvedSpecs, ResolvedSpecs]:
    """Decode the leaves whose codec changes. Return the state, its specs, and the specs to move it to."""
    old, new = before.leaves, after.leaves
    changed = {p for p in old if old[p].codec != new[p].codec}
    if not changed:
        return state, before, after
    check_codecs({p: new[p] for p in changed})
    blocks = tree.flatten_with_paths(state.params)[0]

    def drop_codecs(specs: ResolvedSpecs) -> ResolvedSpecs:
        return before.with_leaves(_drop_codec(s) if p in changed else s for p, s in specs.leaves.items())

    with torch.no_grad():
        values = [
            block_of(blocks, p, s) if p in changed else _get_tree_value(blocks, p, s) for p, s in old.items()
        ]
    fields = {**state.as_dict(), "params": tree.unflatten(values, before.leaf_structure)}
    return state.replace(**fields), drop_codecs(before), drop_codecs(after)


def _drop_codec(spec: LayoutSpec) -> LayoutSpec:
    """Return the spec of a leaf without its codec. It is short-lived, and so not kept on disk."""
    if spec.codec is None:
        return spec
    return replace(spec, codec=None, memory="host" if spec.memory == "disk" else spec.memory)


def _get_tree_value(blocks: Mapping[str, Tensor], path: str, spec: LayoutSpec) -> Any:
    """Return a leaf as the tree holds it: a coded leaf is a dict of its parts."""
    return {n: blocks[f"{path}.{n}"] for n in parts_of(spec)} if is_coded(spec) else blocks[path]


def _encode_changed(
    state: TrainState, plain: ResolvedSpecs, after: ResolvedSpecs, mesh: Mesh, disk_dir: str | None
) -> TrainState:
    """Code the leaves of a state of `plain` specs by the codecs of `after`.

    It is a collective: all ranks refuse, or none.
    """
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
            put_at_rest(blocks[p], s, mesh, disk_dir) if p in changed else _get_tree_value(blocks, p, s)
            for p, s in after.leaves.items()
        ]
    new = state.replace(params=tree.unflatten(values, after.leaf_structure))
    new.where, new.data = (after.tree, mesh), state.data
    return new
