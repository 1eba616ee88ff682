"""Checkpoint: a training state on disk, complete or absent, and back onto any mesh.

A checkpoint is a directory: one safetensors file a rank, and a manifest with a checksum for every byte of
them. A root is a directory of checkpoints that are named by their steps. Nothing in them is ever unpickled.
`load_dcp`, `load_deepspeed`, `load_torch` and `save_dcp` are for checkpoints of others.
Checksums guard against corruption, not against an attacker who writes new ones: he can give wrong numbers.
"""

from __future__ import annotations

import fnmatch
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fnshard.checkpoint.blocks import all_chunks, load_blocks, problems
from fnshard.checkpoint.foreign import load_dcp, load_deepspeed, load_torch, save_dcp
from fnshard.checkpoint.manifest_file import Manifest
from fnshard.checkpoint.replicas import Replicas
from fnshard.checkpoint.restoring import specs_and_mesh, state_filler
from fnshard.checkpoint.retention import Keep, candidates, complete_checkpoints, name_problem, opened
from fnshard.checkpoint.saving import Saving, save_job, wait, wait_for_save
from fnshard.checkpoint.state_leaves import (
    check_codecs_alike,
    checked_param_leaves,
    resolved_as_saved,
    restore_targets,
    specs_here,
)
from fnshard.errors import CheckpointError, CheckpointWarning, nearest
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.coordination import Failed, agreed, group_of, texts
from fnshard.runtime.files.folder import as_path
from fnshard.runtime.files.tensorfile import Corrupt
from fnshard.step.shards import blank_params
from fnshard.step.state import TrainState

__all__ = [
    "Keep", "Manifest", "Replicas", "Saving", "all_steps", "latest", "load_dcp", "load_deepspeed",
    "load_torch", "manifest", "restore", "restore_params", "save", "save_async", "save_dcp", "verify", "wait",
]  # fmt: skip


def save(
    path: str | Path,
    state: Any,
    *,
    specs: Any = None,
    mesh: Mesh | None = None,
    data: Any = None,
    config: Any = None,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
    timeout: float | None = None,
) -> Path:
    """Write a checkpoint. A collective: every rank calls it, and all return, or fail, together.

    It is written to a name of its own, flushed, and renamed when it is complete; a kill at any moment leaves
    what was there. An earlier checkpoint of the name is replaced.

    Args:
        path: of the checkpoint's directory, "ckpt/100": on a file system that all ranks see.
        state: a `TrainState`, or a tree of stored blocks (which then needs `specs`).
        specs, mesh: its layout, if the state does not know it (`step.init` and `restore` make ones that do).
        data: this rank's position in the data: a loader with `state_dict()`, or what that would give.
        config: the resolved configuration, as JSON has it.
        metrics: numbers to choose by, see `Keep`.
        keep: which of the other checkpoints in its folder stay.
        timeout: seconds after which a silent peer is an error; default the mesh's.

    Returns:
        `path`.

    Raises:
        CheckpointError: it could not be written (no room, no permission); what was there is as it was. Or the
            save in the background before it failed: that is raised when this one is complete.

    >>> import tempfile, torch, fnshard as fs
    >>> params = {"w": torch.ones(3)}
    >>> specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    >>> sgd = fs.optim.sgd(0.1)
    >>> step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, optimizer=sgd, backend="eager")
    >>> root = tempfile.mkdtemp()
    >>> _ = fs.checkpoint.save(f"{root}/0", step.init(params))
    >>> fs.checkpoint.restore(root, step).params
    {'w': tensor([1., 1., 1.])}
    """
    before = wait_for_save()
    job = save_job(
        path,
        state,
        specs=specs,
        mesh=mesh,
        data=data,
        config=config,
        metrics=metrics,
        keep=keep,
        timeout=timeout,
    )
    job.write()
    if before is not None:  # this one is complete all the same
        raise before
    return job.directory.final


def save_async(path: str | Path, state: Any, **options: Any) -> Saving:
    """`save` in the background: returns when the state is copied to the host, so that the next step may have
    it. The next save waits for this one; so does the end of the process, and `wait`.

    What rests on disk is copied to the host's memory, too.

    Args:
        options: as for `save`.

    Raises:
        CheckpointError: as for `save`; what fails in the background is raised by `Saving.wait`, by `wait`,
            and by the next save (when that one is under way).
    """
    before = wait_for_save()
    saving = Saving(save_job(path, state, **options).staged())
    if before is not None:
        raise before
    return saving


def all_steps(root: str | Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, rising."""
    return sorted(step for step, _, _ in complete_checkpoints(as_path(root, "all_steps(root)")))


def latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint in a directory; a checkpoint is its own latest.

    Complete means that its manifest is what was written, that all files have their full length, and that it
    still has the number that it was saved under. Every byte is compared when it is restored, or by `verify`.
    """
    return next((folder for _, folder, _ in complete_checkpoints(as_path(root, "latest(root)"))), None)


def manifest(path: str | Path) -> Manifest:
    """The manifest of a checkpoint, or of the newest complete one of a root: step, leaves, config, metrics.

    Raises:
        CheckpointError: there is none.
    """
    found = next(complete_checkpoints(as_path(path, "manifest(path)")), None)
    if found is None:
        raise _nothing(Path(path))
    return found[2]


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare checksums; needs neither ranks nor a mesh.

    Raises:
        CheckpointError: names every file and leaf that is not what was written.
    """
    folder = as_path(path, "verify(path)").absolute()
    try:
        found = Manifest.read(folder)
        wrong = list(filter(None, [name_problem(folder, found)])) + problems(folder, found, all_chunks(found))
    except (Corrupt, OSError) as error:
        raise _unlike(folder, [str(error)]) from error
    if wrong:
        raise _unlike(folder, wrong)
    return found


def restore(
    path: str | Path,
    step_or_specs: Any,
    mesh: Mesh | None = None,
    *,
    disk_dir: str | None = None,
    timeout: float | None = None,
) -> TrainState:
    """A checkpoint as a state of this step, on this mesh, whatever it was saved from. A collective.

    Each rank reads the boxes it needs and compares their checksums. dtypes and tiers are those of the specs
    here: a master copy is filled from the saved one, or from the parameter; a parameter in another dtype from
    the master copy, if there was one.

    Args:
        path: of a checkpoint; or of a root: then of its newest, and where that is not what was written, with
            a `CheckpointWarning`, of the one before.
        step_or_specs: a step with an optimizer; or a spec tree, with the mesh: then optimizer state is what
            the checkpoint has.
        disk_dir: for specs of leaves that rest on disk (a step knows its own).
        timeout: seconds after which a silent peer is an error.

    Returns:
        A state; its `data` is the position in the data that was saved with it.

    Raises:
        CheckpointError: there is none, or none that is complete, or it is of another model or optimizer.
    """
    root = as_path(path, "restore(path, step)")
    on, fill = state_filler(step_or_specs, mesh, disk_dir)
    return _newest(root, fill, on, timeout)


def restore_params(
    path: str | Path,
    step_or_specs: Any,
    mesh: Mesh | None = None,
    *,
    only: str | Sequence[str] | None = None,
    disk_dir: str | None = None,
    timeout: float | None = None,
) -> Any:
    """The parameters of a checkpoint, as a tree of stored blocks: to evaluate or to tune. A collective.

    Args:
        path, step_or_specs, mesh, disk_dir, timeout: as for `restore`; the step needs no optimizer.
        only: globs on paths: gives `{path: block}` of the leaves that match; the other leaves of the specs
            need not be in the checkpoint.

    Raises:
        CheckpointError: as for `restore`; or globs that match nothing.
    """
    root, globs = as_path(path, "restore_params(path, step)"), [only] if isinstance(only, str) else only
    if globs is not None and not (isinstance(globs, Sequence) and all(isinstance(g, str) for g in globs)):
        raise CheckpointError(f"only={only!r}: a glob of paths, or a list of them.")

    resolved, on = specs_and_mesh(step_or_specs, mesh)

    def made(found: Manifest) -> tuple[Any, dict[str, Any]]:
        saved = {n: leaf for n, leaf in found.leaves.items() if n.startswith("params/")}
        if globs is None:
            check_codecs_alike(resolved.leaves, found.leaves)
            specs = resolved
        else:
            some = {p: s for p, s in resolved.seen.items() if any(fnmatch.fnmatchcase(p, g) for g in globs)}
            saved = {n: leaf for n, leaf in saved.items() if n.removeprefix("params/") in some}
            if not some:
                near = "".join(nearest(g, resolved.stored) for g in globs)
                raise CheckpointError(f"only={only!r} matches no leaf of the specs{near}.")
            specs = ResolvedSpecs.of(some)
        specs = resolved_as_saved(specs, found)
        masters = {n: leaf for n, leaf in found.leaves.items() if n.startswith("optimizer/")}
        params = specs.tree_of(blank_params(specs.stored, on, disk_dir))
        leaves = checked_param_leaves(params, specs, on)
        foreign = specs.stored.keys() - specs_here(specs.stored, on).keys()
        return params, restore_targets(leaves, saved | masters, set(), foreign)

    def fill(folder: Path, found: Manifest, group: Any) -> Any:
        params, targets = agreed(group, f"restoring {folder}", lambda: made(found))
        load_blocks(folder, found, targets, on, group)
        return params

    return _newest(root, fill, on, timeout)


def _newest(path: Path, fill: Callable[[Path, Manifest, Any], Any], mesh: Mesh, timeout: float | None) -> Any:
    """Return what `fill` makes of the newest complete checkpoint, the same one on all ranks."""
    before = wait_for_save()
    if before is not None:
        warnings.warn(str(before), CheckpointWarning, stacklevel=3)
    group = group_of(mesh, timeout)

    def list_folders() -> list[Path]:
        work = partial(candidates, path) if mesh.rank == 0 else list
        seen = agreed(group, f"looking for {path}", lambda: list(map(str, work())))
        return list(map(Path, json.loads(texts(group, json.dumps(seen))[0])))

    # All ranks take what rank 0 sees, and pass over what is not complete for any of them.
    found = left = list_folders()
    passed: dict[Path, CheckpointError] = {}
    while left:
        folder = left[0]
        if passed and mesh.rank == 0:
            last = list(passed.values())[-1]
            warnings.warn(f"{last}\nTaking {folder} instead.", CheckpointWarning, stacklevel=3)
        read, wrong = agreed(group, f"restoring {folder}", partial(opened, folder))
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts(group, wrong)) if text]
        try:
            if not lines:
                return fill(folder, read, group)
        except Failed as error:
            lines = error.lines()
            if not error.corrupt:
                raise CheckpointError(f"cannot restore {folder}:", lines) from error
        # A save of another process may have deleted it meanwhile, when it had written a newer one.
        again = list_folders()
        if folder in again:
            passed[folder] = _unlike(folder, lines)
        left = [each for each in again if each not in passed]
    if not passed or (found == [path.absolute()] and not any(path.glob("manifest*"))):
        raise _nothing(path)
    errors = list(passed.values())
    raise errors[0] if len(errors) == 1 else CheckpointError("\n".join(map(str, errors)))


def _unlike(folder: Path, wrong: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{folder} is not what was written:", wrong)


def _nothing(path: Path) -> CheckpointError:
    fix = "name a directory that fs.checkpoint.save wrote, or the one it lies in."
    return CheckpointError(f"there is no checkpoint at {path}.", fix=fix)
