"""Restoring: make the blank state of a step, and fill it from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fnshard.checkpoint.blocks import load_blocks
from fnshard.checkpoint.loader_state import decode, take_same_rows
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

    def blank(manifest: Manifest) -> TrainState:
        # A step knows its optimizer's slots. Specs alone have those that the checkpoint has.
        specs = resolve_as_saved(resolved, manifest)
        if isinstance(step_or_specs, Step):
            return step_or_specs.blank(specs.tree)
        named = specs.stored
        slots = blank_slots(saved_slots(manifest.leaves, specs_here(named, on), on), named, on, disk_dir)
        params = specs.tree_of(blank_params(named, on, disk_dir))
        loss_scale = {}
        for name, leaf in manifest.leaves.items():
            if name.startswith("loss_scale/"):
                field = name.partition("/")[2]
                loss_scale[field] = torch.zeros((), dtype=STATE_DTYPES[leaf.dtype])
        zero = torch.zeros((), dtype=torch.int64)
        shapes = saved_slot_shapes(manifest.leaves, named)
        where = (specs.tree, on)
        return TrainState(zero, params, slots, loss_scale, zero.clone(), where=where, slot_shapes=shapes)

    def make(manifest: Manifest) -> tuple[TrainState, Targets]:
        check_codecs_alike(resolved.leaves, manifest.leaves)
        state = blank(manifest)
        specs = ResolvedSpecs.of(state.where[0])
        leaves = state_leaves(state, specs, on)
        # A loss scale that was not saved begins anew.
        if not any(n.startswith("loss_scale/") for n in manifest.leaves):
            leaves = {n: leaf for n, leaf in leaves.items() if not n.startswith("loss_scale/")}
        # The step and the seed are in the manifest itself. Leaves of other stages may stay in the checkpoint.
        state.step.fill_(manifest.step)
        state.seed.fill_(manifest.seed)
        foreign = specs.stored.keys() - specs_here(specs.stored, on).keys()
        return state, restore_targets(leaves, manifest.leaves, set(specs.trainable), foreign, fix)

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
        folder: Path, manifest: Manifest, group: Any, fetch: Callable[[Targets], None] | None = None
    ) -> TrainState:
        state, targets = run_together(group, f"restoring {folder}", lambda: make(manifest))
        if fetch is not None:
            fetch(targets)
        load_blocks(folder, manifest, targets, on, group)
        state.data = _find_position(manifest, on)
        return state

    return on, fill


def _find_position(manifest: Manifest, mesh: Mesh) -> Any:
    """Return this rank's position in the data as it was saved; None if it was saved for other rows."""
    if len(manifest.data) < 2:
        return decode(manifest.data[0]) if manifest.data else None

    # Each rank has its own position. It fits if the rank still takes the same slice of each batch.
    fits, count = False, len(manifest.data)
    with suppress(KeyError, TypeError, AttributeError):  # the manifest describes no mesh
        axes, data_axes = manifest.mesh["axes"], tuple(manifest.mesh["data_axes"])
        before = Mesh(tuple(axes), tuple(axes.values()), data_axes, kind="abstract")
        fits = count == before.size and take_same_rows(before, mesh)
    if fits:
        return decode(manifest.data[mesh.rank])
    warnings.warn(
        f"step {manifest.step} was saved with a position in the data for each of {count} ranks, and the "
        f"ranks of {mesh} take other rows: state.data is None. "
        "A loader whose state is alike on all ranks fits any mesh.",
        CheckpointWarning,
        stacklevel=5,
    )
    return None
