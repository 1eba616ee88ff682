"""Restoring: make the blank state of a step, and fill it with what a manifest names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fnshard.checkpoint.blocks import load_blocks
from fnshard.checkpoint.loader_state import decode
from fnshard.checkpoint.manifest_file import Manifest
from fnshard.checkpoint.state_leaves import (
    RESTORE,
    RestoreTarget,
    check_codecs_alike,
    resolve_as_saved,
    restore_targets,
    saved_slot_shapes,
    saved_slots,
    specs_here,
    state_leaves,
)
from fnshard.errors import CheckpointWarning
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh, check_mesh, make_mesh
from fnshard.runtime.coordination import run_together
from fnshard.runtime.files.tensorfile import STATE_DTYPES
from fnshard.step.shards import blank_params, blank_slots
from fnshard.step.state import TrainState
from fnshard.step.step import Step

Targets = Mapping[str, RestoreTarget]


def specs_and_mesh(step_or_specs: Any, mesh: Mesh | None) -> tuple[ResolvedSpecs, Mesh]:
    """Return the specs and the mesh of a step, or those of a spec tree on this mesh or the default one."""
    if isinstance(step_or_specs, Step):
        return step_or_specs.resolved, step_or_specs.mesh
    check_mesh(on := mesh or make_mesh())
    return ResolvedSpecs.of(step_or_specs), on


def state_maker(
    step_or_specs: Any, mesh: Mesh | None, disk_dir: str | None = None, fix: str = RESTORE
) -> tuple[Mesh, Callable[[Manifest], tuple[TrainState, Targets]]]:
    """Return the mesh, and a function from a manifest to a state of zeros and what to fill in it.

    The arguments are those of `fnshard.checkpoint.restore`.

    Args:
        fix: the way out that an error names for a state that does not fit.
    """
    resolved, on = specs_and_mesh(step_or_specs, mesh)

    def blank(found: Manifest) -> TrainState:
        specs = resolve_as_saved(resolved, found)
        if isinstance(step_or_specs, Step):
            return step_or_specs.blank(specs.tree)
        named = specs.stored
        slots = blank_slots(saved_slots(found.leaves, specs_here(named, on), on), named, on, disk_dir)
        params = specs.tree_of(blank_params(named, on, disk_dir))
        scale = {n: n.partition("/")[2] for n in found.leaves if n.startswith("loss_scale/")}
        loss_scale = {k: torch.zeros((), dtype=STATE_DTYPES[found.leaves[n].dtype]) for n, k in scale.items()}
        zero = torch.zeros((), dtype=torch.int64)
        shapes = saved_slot_shapes(found.leaves, named)
        where = (specs.tree, on)
        return TrainState(zero, params, slots, loss_scale, zero.clone(), where=where, slot_shapes=shapes)

    def make(found: Manifest) -> tuple[TrainState, Targets]:
        check_codecs_alike(resolved.leaves, found.leaves)
        state = blank(found)
        specs = ResolvedSpecs.of(state.where[0])
        leaves = state_leaves(state, specs, on)
        # A scale that was not saved begins anew.
        scaled = any(n.startswith("loss_scale/") for n in found.leaves)
        leaves = {n: h for n, h in leaves.items() if scaled or not n.startswith("loss_scale/")}
        foreign = specs.stored.keys() - specs_here(specs.stored, on).keys()
        state.step.fill_(found.step)
        state.seed.fill_(found.seed)
        return state, restore_targets(leaves, found.leaves, set(specs.trainable), foreign, fix)

    return on, make


def state_filler(
    step_or_specs: Any, mesh: Mesh | None, disk_dir: str | None = None
) -> tuple[Mesh, Callable[..., TrainState]]:
    """Return the mesh, and a function that restores a state from (folder, manifest, group, fetch).

    The arguments are those of `fnshard.checkpoint.restore`. The function is a collective. If there is a
    `fetch`, it calls `fetch(targets)` before files are opened.
    """
    on, make = state_maker(step_or_specs, mesh, disk_dir)

    def fill(
        folder: Path, found: Manifest, group: Any, fetch: Callable[[Targets], None] | None = None
    ) -> TrainState:
        state, targets = run_together(group, f"restoring {folder}", lambda: make(found))
        if fetch is not None:
            fetch(targets)
        load_blocks(folder, found, targets, on, group)
        state.data = _find_position(found, on)
        return state

    return on, fill


def _find_position(found: Manifest, mesh: Mesh) -> Any:
    """Return this rank's position in the data as it was saved; None where it was saved for other ranks."""
    if len(found.data) < 2:
        return decode(found.data[0]) if found.data else None
    if len(found.data) == mesh.size:
        return decode(found.data[mesh.rank])
    warnings.warn(
        f"step {found.step} was saved with a position in the data for each of {len(found.data)} ranks, here "
        f"are {mesh.size}: state.data is None. A loader whose state is alike on all ranks fits any mesh.",
        CheckpointWarning,
        stacklevel=5,
    )
    return None
