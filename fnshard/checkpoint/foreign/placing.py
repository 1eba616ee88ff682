"""Placing: make a state from another library's: match leaves by name, and read each rank's own blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.checkpoint.foreign.dialects import SavedState, name_numbers
from fnshard.checkpoint.manifest_file import Manifest, SavedLeaf
from fnshard.checkpoint.restoring import specs_and_mesh, state_maker
from fnshard.checkpoint.saving import wait_for_save
from fnshard.errors import CheckpointError, CheckpointWarning, FnshardError
from fnshard.hf import check_resolved
from fnshard.hf.names import Names, check_names, family_of, possible_names
from fnshard.hf.reading import FileTensor, LeafSource, match_tensors, stack_experts
from fnshard.layout.pairs import as_pairs
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.coordination import group_of, run_together
from fnshard.runtime.files.folder import as_path
from fnshard.runtime.files.tensorfile import STATE_NAMES, Corrupt
from fnshard.step.state import TrainState

ANEW = (
    "a step with the optimizer that it was saved with; or begin anew with the parameters: step.adopt("
    "fs.checkpoint.load_dcp(path, step.specs, step.mesh).params), and so for load_deepspeed and load_torch."
)
COPY_AGAIN = "copy it here again, whole; or load an earlier one."
SAVE_AGAIN = "load it by what wrote it, and save parameters and AdamW's state alone, by their names."
Source = LeafSource | Tensor  # what fills a leaf: a tensor of the files, or a full value


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load_dcp`, `load_deepspeed` and `load_torch`, which `load_dcp` explains."""

    model: nn.Module | None
    names: Names
    missing: Mapping[str, Tensor] | None
    ignore: str | Sequence[str]
    disk_dir: str | None
    timeout: float | None


def load_state(
    read: Callable[[Path], SavedState],
    caller: str,
    path: str | Path,
    step_or_specs: Any,
    mesh: Mesh | None,
    options: LoadOptions,
) -> TrainState:
    """Return a state that is filled from another library's files; see `fnshard.checkpoint.load_dcp`.

    Args:
        read: a function that finds a state's tensors in the files at a path.
        caller: the public function, for its errors.
    """
    if unknown := options.keys() - LoadOptions.__annotations__.keys():
        known = ", ".join(LoadOptions.__annotations__)
        raise TypeError(f"{caller}() has no option {', '.join(sorted(unknown))}; it has {known}.")

    # Ranks exchange messages about one checkpoint at a time, so a save in the background ends first.
    before = wait_for_save()
    if before is not None:
        warnings.warn(str(before), CheckpointWarning, stacklevel=3)

    # Read the arguments.
    path = as_path(path, f"{caller}(path, step)")
    resolved, on = specs_and_mesh(step_or_specs, mesh)
    check_resolved(resolved.tree, on)
    model, missing = tree.unwrap_module(options.get("model")), options.get("missing") or {}
    ignore = options.get("ignore", ())
    globs = [ignore] if isinstance(ignore, str) else list(ignore)

    def load() -> TrainState:
        try:
            saved = read_saved(read, path)
            leaves = match_state(saved, resolved, model, options.get("names"), missing, globs)
            # Make a blank state as for a restore, and fill each rank's boxes of its leaves.
            _, make = state_maker(step_or_specs, on, options.get("disk_dir"), ANEW)
            state, targets = make(_make_manifest(saved, leaves))
            with torch.no_grad():
                for target in targets.values():
                    for offset, part in target.parts(on):
                        part.copy_(_read_box(leaves[target.source], offset, part.shape))
            return state
        except Corrupt as error:
            raise explain_corrupt(f"cannot load {str(path)!r}", error) from error

    if on.kind == "abstract":  # there are no other ranks
        return load()
    return run_together(group_of(on, options.get("timeout")), f"loading {str(path)!r}", load)


def read_saved(read: Callable[..., SavedState], path: Path, *others: Any) -> SavedState:
    """Return what a reader makes of a path.

    Raises:
        CheckpointError: there is none, it is damaged, or laid out in another way.
    """
    try:
        return read(path, *others)
    except FnshardError:
        raise
    except Corrupt as error:
        raise explain_corrupt(f"cannot load {str(path)!r}", error) from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        head = f"cannot load {str(path)!r}: it is laid out in another way ({what})."
        raise CheckpointError(head, fix=SAVE_AGAIN) from error


def explain_corrupt(what: str, error: Corrupt) -> CheckpointError:
    """Return the error of files that are damaged, or of a kind that is not read."""
    return CheckpointError(f"{what}: it {error}.", fix=error.fix or COPY_AGAIN)


def match_state(
    saved: SavedState,
    resolved: ResolvedSpecs,
    model: nn.Module | None,
    names: Names,
    missing: Mapping[str, Tensor],
    ignore: Sequence[str],
) -> dict[str, Source]:
    """Return what fills each leaf of a state, by the names that leaves have in checkpoints here.

    Raises:
        StateError: names or shapes do not fit the specs. The error has all of them.
    """
    # Parameters, by the names that the user or the model's family gives them.
    specs = resolved.leaves
    check_names(names, specs)
    family = family_of({}, model, specs)
    sources, values = match_tensors(
        specs, stack_experts(saved.params, family), names, family, model, missing, ignore
    )
    out: dict[str, Source] = {f"params/{p}": s for p, s in {**sources, **values}.items()}

    # If optimizer state has numbers, these count the trained parameters in the order of the file.
    order = {name: number for number, name in enumerate(saved.params)}
    trained = {source.name: p for p, source in sources.items() if specs[p].trainable and source.name in order}
    slots = name_numbers(saved, sorted(trained, key=order.__getitem__))
    by_slot: dict[str, dict[str, FileTensor]] = {}
    for name, own in slots.items():
        for slot, tensor in own.items():
            by_slot.setdefault(slot, {})[name] = tensor

    # A slot may be saved under any of the names that its parameter may have.
    for slot, tensors in by_slot.items():
        tensors = stack_experts(tensors, family)
        for path, source in sources.items():
            names_there = [source.name, *possible_names(path, family)]
            name = next((n for n in names_there if n in tensors), None)
            if name is not None and specs[path].trainable:
                out[f"optimizer/{path}/{slot}"] = LeafSource(name, tensors[name], source.transposed)
    return out


def _make_manifest(saved: SavedState, leaves: Mapping[str, Source]) -> Manifest:
    """Make a manifest of leaves that are in another library's files. It names no chunks."""
    described, complex_paths = {}, []
    for name, source in leaves.items():
        dtype = source.dtype if isinstance(source, Tensor) else source.saved.dtype
        described[name] = SavedLeaf(tuple(source.shape), STATE_NAMES[dtype], "P()", ()).in_pairs()
        if dtype.is_complex and name.startswith("params/"):
            complex_paths.append(name.removeprefix("params/"))
    return Manifest(
        step=saved.step, seed=0, mesh={}, leaves=described, files={}, specs={}, data=(), config=None,
        metrics={}, versions={}, complex=tuple(complex_paths),
    )  # fmt: skip


def _read_box(source: Source, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Read a box of a leaf. Of a complex leaf, whose last dim here is the pair, it has pairs."""
    slices = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
    slices = slices[: len(source.shape)]
    return as_pairs(source[slices] if isinstance(source, Tensor) else source.read(slices))
