"""Checkpoint: save a training state to disk, complete or not at all, and restore it onto any mesh.

A checkpoint is a directory with one safetensors file for each rank, and a manifest with checksums of all
bytes in them. A root is a directory of checkpoints that are named by their steps. Nothing in them is ever
unpickled. `load_dcp`, `load_deepspeed`, `load_torch` and `save_dcp` are for checkpoints of other libraries.
Checksums guard against corruption, but not against an attacker, who can write wrong numbers and their
checksums.
"""

from __future__ import annotations

import fnmatch
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fnshard.checkpoint.blocks import all_chunks, find_problems, load_blocks
from fnshard.checkpoint.foreign import load_dcp, load_deepspeed, load_torch, save_dcp
from fnshard.checkpoint.manifest_file import Manifest
from fnshard.checkpoint.replicas import Replicas
from fnshard.checkpoint.restoring import specs_and_mesh, state_filler
from fnshard.checkpoint.retention import Keep, find_complete, list_candidates, name_problem, open_checkpoint
from fnshard.checkpoint.saving import Saving, save_job, wait, wait_for_save
from fnshard.checkpoint.state_leaves import (
    check_codecs_alike,
    check_param_leaves,
    resolve_as_saved,
    restore_targets,
    specs_here,
)
from fnshard.errors import CheckpointError, CheckpointWarning, nearest
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.coordination import Failed, gather_texts, group_of, run_together
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

    It is written under another name, flushed, and renamed when it is complete; a kill at any moment leaves
    what was there before. An earlier checkpoint of the name is replaced.

    Args:
        path: the directory of the checkpoint, "ckpt/100", on a file system that all ranks see.
        state: a `TrainState`, or a tree of stored blocks (which then needs `specs`).
        specs, mesh: the layout, if the state does not know it (those of `step.init` and `restore` do).
        data: this rank's position in the data: a loader with `state_dict()`, or what that would return.
        config: the resolved configuration, of values that JSON has.
        metrics: numbers by which `keep` chooses, see `Keep`.
        keep: a rule that says which of the other checkpoints in its folder stay.
        timeout: the seconds after which a silent peer is an error; by default those of the mesh.

    Returns:
        `path`.

    Raises:
        CheckpointError: it could not be written (no room, no permission), and what was there before is
            unchanged. Or an earlier save in the background failed: this is raised when the new one is
            complete.

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

    if before is not None:  # the error of an earlier save; this one is complete
        raise before
    return job.directory.final


def save_async(path: str | Path, state: Any, **options: Any) -> Saving:
    """Write a checkpoint in the background; return when the state is copied to the host.

    The next step may then consume the state. The next save waits for this one, and so do the end of the
    process and `wait`. Leaves that are kept on disk are copied to the host's memory, too.

    Args:
        options: the options of `save`.

    Raises:
        CheckpointError: the errors of `save`. What fails in the background is raised by `Saving.wait`, by
            `wait`, or by the next save (once that one is under way).
    """
    before = wait_for_save()
    saving = Saving(save_job(path, state, **options).stage())
    if before is not None:
        raise before
    return saving


def all_steps(root: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, the lowest first."""
    return sorted(step for step, _, _ in find_complete(as_path(root, "all_steps(root)")))


def latest(root: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a directory, or the directory if it is a complete checkpoint.

    A checkpoint is complete if its manifest is what was written, if all files have their full length, and if
    it still has the number that it was saved under. `verify` compares every byte, `restore` those that it
    reads.
    """
    return next((folder for _, folder, _ in find_complete(as_path(root, "latest(root)"))), None)


def manifest(path: str | Path) -> Manifest:
    """Read the manifest of a checkpoint, or of a root's newest complete one: step, leaves, config, metrics.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    found = next(find_complete(as_path(path, "manifest(path)")), None)
    if found is None:
        raise _explain_nothing(Path(path))
    return found[2]


def verify(path: str | Path) -> Manifest:
    """Read every byte of a checkpoint and compare checksums; this needs neither ranks nor a mesh.

    Raises:
        CheckpointError: something is not what was written; it names every such file and leaf.
    """
    folder = as_path(path, "verify(path)").absolute()
    try:
        found = Manifest.read(folder)
        wrong = find_problems(folder, found, all_chunks(found))
        if problem := name_problem(folder, found):
            wrong.insert(0, problem)
    except (Corrupt, OSError) as error:
        raise _explain_corrupt(folder, [str(error)]) from error
    if wrong:
        raise _explain_corrupt(folder, wrong)
    return found


def restore(
    path: str | Path,
    step_or_specs: Any,
    mesh: Mesh | None = None,
    *,
    disk_dir: str | None = None,
    timeout: float | None = None,
) -> TrainState:
    """Restore a checkpoint as a state of this step, on this mesh, whatever it was saved from. A collective.

    Each rank reads the boxes that it needs and compares their checksums. dtypes and tiers are those of the
    specs given here. A master copy is filled from the saved one, or else from the parameter. A parameter that
    was saved in another dtype is filled from the master copy, if that was saved.

    Args:
        path: a checkpoint; or a root, whose newest checkpoint is restored. If that is not what was written, a
            `CheckpointWarning` says so, and the one before is restored.
        step_or_specs: a step with an optimizer; or a spec tree, with the mesh: optimizer state is then what
            the checkpoint has.
        disk_dir: the directory for leaves that specs keep on disk (a step knows its directory).
        timeout: the seconds after which a silent peer is an error.

    Returns:
        A state; its `data` is the position in the data that was saved with it.

    Raises:
        CheckpointError: there is no checkpoint, or no complete one, or it is of another model or optimizer.
    """
    root = as_path(path, "restore(path, step)")
    target_mesh, fill = state_filler(step_or_specs, mesh, disk_dir)
    return _restore_newest(root, fill, target_mesh, timeout)


def restore_params(
    path: str | Path,
    step_or_specs: Any,
    mesh: Mesh | None = None,
    *,
    only: str | Sequence[str] | None = None,
    disk_dir: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Restore the parameters of a checkpoint as a tree of stored blocks, to evaluate or to tune.

    It is a collective.

    Args:
        path, step_or_specs, mesh, disk_dir, timeout: the arguments of `restore`; the step needs no optimizer.
        only: globs on paths. With them, `{path: block}` of the leaves that match is returned, and the other
            leaves of the specs need not be in the checkpoint.

    Raises:
        CheckpointError: the errors of `restore`; or the globs match nothing.
    """
    root = as_path(path, "restore_params(path, step)")
    globs = [only] if isinstance(only, str) else only
    if globs is not None and not (isinstance(globs, Sequence) and all(isinstance(g, str) for g in globs)):
        raise CheckpointError(f"only={only!r}: a glob of paths, or a list of them.")

    # As in `restore`, but with parameters alone, and perhaps only some.
    resolved, target_mesh = specs_and_mesh(step_or_specs, mesh)

    def make(found: Manifest) -> tuple[Any, dict[str, Any]]:
        # Choose the leaves: all, or those of which a glob matches the path.
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

        # Make blank blocks. A master copy may fill a parameter, so the saved ones are among the sources.
        specs = resolve_as_saved(specs, found)
        masters = {n: leaf for n, leaf in found.leaves.items() if n.startswith("optimizer/")}
        params = specs.tree_of(blank_params(specs.stored, target_mesh, disk_dir))
        leaves = check_param_leaves(params, specs, target_mesh)
        of_other_stages = specs.stored.keys() - specs_here(specs.stored, target_mesh).keys()
        return params, restore_targets(leaves, saved | masters, set(), of_other_stages)

    def fill(folder: Path, found: Manifest, group: Any) -> Any:
        params, targets = run_together(group, f"restoring {folder}", lambda: make(found))
        load_blocks(folder, found, targets, target_mesh, group)
        return params

    return _restore_newest(root, fill, target_mesh, timeout)


def _restore_newest(
    path: Path, fill: Callable[[Path, Manifest, Any], Any], mesh: Mesh, timeout: float | None
) -> Any:
    """Return what `fill` makes of the newest complete checkpoint, the same one on all ranks."""
    before = wait_for_save()
    if before is not None:
        warnings.warn(str(before), CheckpointWarning, stacklevel=3)
    group = group_of(mesh, timeout)

    def list_folders() -> list[Path]:
        list_here = partial(list_candidates, path) if mesh.rank == 0 else list
        texts = run_together(group, f"looking for {path}", lambda: list(map(str, list_here())))
        return list(map(Path, json.loads(gather_texts(group, json.dumps(texts))[0])))

    # All ranks take the folders that rank 0 sees, and pass over those that are incomplete for any rank.
    first_seen = candidates = list_folders()
    passed: dict[Path, CheckpointError] = {}
    while candidates:
        folder = candidates[0]
        if passed and mesh.rank == 0:
            last = list(passed.values())[-1]
            warnings.warn(f"{last}\nTaking {folder} instead.", CheckpointWarning, stacklevel=3)

        # Ranks exchange what is wrong before any of them fills a leaf, which is a collective.
        read, wrong = run_together(group, f"restoring {folder}", partial(open_checkpoint, folder))
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(gather_texts(group, wrong)) if text]
        try:
            if not lines:
                return fill(folder, read, group)
        except Failed as error:
            lines = error.lines()
            if not error.corrupt:
                raise CheckpointError(f"cannot restore {folder}:", lines) from error

        # A save of another process may have deleted the folder after it had written a newer one.
        again = list_folders()
        if folder in again:
            passed[folder] = _explain_corrupt(folder, lines)
        candidates = [each for each in again if each not in passed]

    # A directory without any manifest is not a damaged checkpoint, but no checkpoint.
    if not passed or (first_seen == [path.absolute()] and not any(path.glob("manifest*"))):
        raise _explain_nothing(path)
    errors = list(passed.values())
    raise errors[0] if len(errors) == 1 else CheckpointError("\n".join(map(str, errors)))


def _explain_corrupt(folder: Path, wrong: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{folder} is not what was written:", wrong)


def _explain_nothing(path: Path) -> CheckpointError:
    fix = "name a directory that fs.checkpoint.save wrote, or the one it lies in."
    return CheckpointError(f"there is no checkpoint at {path}.", fix=fix)
