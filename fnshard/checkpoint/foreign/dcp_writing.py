"""DCP writing: write a folder that `torch.distributed.checkpoint.load` reads on any number of ranks.

Each rank writes a file of `torch.save` streams, one for each box that it has to write; rank 0 writes
`.metadata` when all files are written. Until then the folder has another name.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.checkpoint.blocks import assign_leaves
from fnshard.checkpoint.foreign.dcp import METADATA
from fnshard.checkpoint.foreign.dialects import SLOTS
from fnshard.checkpoint.saving import wait_for_save
from fnshard.checkpoint.state_leaves import LocalLeaf, check_param_leaves, state_leaves
from fnshard.compiler.ir.values import MASTER
from fnshard.errors import CheckpointError, OptimizerError, leaves
from fnshard.hf.names import Names, Transposed, check_names, read_name
from fnshard.layout.codecs import is_coded
from fnshard.layout.partition import P
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.coordination import Failed, group_of, run_on_all, run_together
from fnshard.runtime.files.folder import AtomicDirectory, as_path, flush_directory, flush_file
from fnshard.step.runner import find_layout
from fnshard.step.state import TrainState

Path_ = tuple[Any, ...]  # keys of nested dicts and lists
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, its shape

# By the reader of a folder: functions that return the path, in the saved tree, of a parameter, of a slot, and
# of an option of the parameter's group.
LAYOUTS: Mapping[
    str, tuple[Callable[[str], Path_], Callable[[str, str], Path_], Callable[[str, str], Path_]]
] = {
    "fsdp": (
        lambda name: ("model", name),
        lambda name, slot: ("optim", "state", name, slot),
        lambda name, key: ("optim", "param_groups", 0, key),
    ),
    "accelerate": (
        lambda name: ("model", name),
        lambda name, slot: ("optimizer", "state", name, slot),
        lambda name, key: ("optimizer", "param_groups", 0, key),
    ),
    "torchtitan": (
        lambda name: (name,),
        lambda name, slot: ("optimizer", f"state.{name}.{slot}"),
        lambda name, key: ("optimizer", f"param_groups.{name}.{key}"),
    ),
}
TORCH_SLOTS = {ours: theirs for theirs, ours in SLOTS.items()}


@dataclass(frozen=True)
class Item:
    """An entry of a checkpoint: a tensor, with a function that makes each box to write here; or a value."""

    path: Path_
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    boxes: Sequence[tuple[Box, Callable[[], Tensor]]] = ()
    value: Any = None

    @property
    def name(self) -> str:
        """Return the entry's name, as torch joins paths."""
        return join(self.path)


def join(path: Path_) -> str:
    """Return the name that torch gives an entry of nested dicts and lists."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class WrittenItem:
    """An entry without its data, but with the places of its boxes: (box, file, first byte, bytes).

    A value has one place, whose box is None.
    """

    item: Item
    places: tuple[tuple[Box | None, str, int, int], ...]


def save_dcp(
    path: str | Path,
    state: Any,
    *,
    specs: Any = None,
    mesh: Mesh | None = None,
    names: Names = None,
    layout: str = "fsdp",
    optimizer: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Path:
    """Write a folder that `torch.distributed.checkpoint.load` reads on any number of ranks. A collective.

    Each rank writes its own blocks; parameters with a master copy are written from that. The folder is
    written under another name, flushed, and renamed when it is complete.

    Args:
        path: a folder that does not exist yet, on a file system that all ranks see.
        state: a `TrainState`, or a tree of stored blocks.
        specs, mesh: its layout, if the state does not know it.
        names: a dict or a function from paths to torch's names, or to `fs.hf.Transposed(name)`, which writes
            a matrix and its optimizer state as their transposes; by default a leaf is called by its path.
        layout: the form of the tree that is saved. "fsdp" is `{"model": ..., "optim": ...}`, as
            `torch.distributed.checkpoint.state_dict.get_state_dict` returns it; "accelerate" is `{"model":
            ..., "optimizer": ...}`; "torchtitan" has parameters at the top, and `optimizer` flattened.
        optimizer: arguments of `torch.optim.AdamW` for the saved groups, `{"lr": 3e-4, "weight_decay": 0.1}`.
            With None no groups are saved, and a reader keeps its own
            (`DefaultLoadPlanner(allow_partial_load=True)`).
        timeout: the seconds after which a silent peer is an error; by default those of the mesh.

    Returns:
        `path`.

    Raises:
        CheckpointError: leaves are coded, two leaves get one name, a leaf that is to be transposed is no
            matrix, there is something at `path`, or the folder could not be written. Or an earlier save in
            the background failed: this is raised when the folder is complete.

    >>> import tempfile, torch, fnshard as fs
    >>> import torch.distributed.checkpoint as dcp
    >>> params, mesh = {"w": torch.arange(3.0)}, fs.make_mesh(shard=1)
    >>> specs = fs.presets.full_shard(params, mesh)
    >>> folder = fs.checkpoint.save_dcp(tempfile.mkdtemp() + "/dcp", params, specs=specs, mesh=mesh)
    >>> there = {"model": {"w": torch.zeros(3)}}
    >>> dcp.load(there, checkpoint_id=folder)
    >>> there
    {'model': {'w': tensor([0., 1., 2.])}}
    """
    before = wait_for_save()  # ranks exchange messages about one save at a time
    final = as_path(path, "save_dcp(path, state)").absolute()
    _, specs, mesh = find_layout(state, specs, mesh)
    group = group_of(mesh, timeout)

    def plan() -> tuple[AtomicDirectory, list[Item]]:
        # Refuse what cannot be written, before anything is.
        if specs is None:
            fix = (
                "save_dcp(path, state) of a TrainState; of a tree of blocks also specs=step.specs, mesh=mesh."
            )
            raise CheckpointError(f"a {type(state).__name__} does not say how it is laid out.", fix=fix)
        if layout not in LAYOUTS:
            raise CheckpointError(f"layout={layout!r}: one of {', '.join(map(repr, LAYOUTS))}.")
        if os.path.lexists(final) and (not final.is_dir() or any(final.iterdir())) and mesh.rank == 0:
            raise CheckpointError(
                f"there is something at {str(final)!r}.", fix="save elsewhere, or remove it."
            )
        resolved = ResolvedSpecs.of(specs)
        if coded := [f"params[{p!r}]: codec={s.codec!r}" for p, s in resolved.leaves.items() if is_coded(s)]:
            fix = "fs.reshard(state, specs, specs_without_codec) decodes them."
            raise CheckpointError(f"torch knows no codec of {leaves(len(coded))}:", coded[:20], fix)
        return AtomicDirectory(final), list(items_of(state, resolved, mesh, names, layout, optimizer))

    directory, items = run_together(group, f"saving {path}", plan)

    # Rank 0 makes the folder, all ranks write their files, and rank 0 writes the metadata and renames it.
    def finish(written: list[list[WrittenItem]]) -> None:
        write_metadata(directory.saving, [item for of_rank in written for item in of_rank])
        directory.commit()

    try:
        run_on_all(group, lambda: None, lambda _: directory.begin())
        run_on_all(group, lambda: write_items(directory.saving, mesh.rank, items), finish)
    except Failed as error:
        raise CheckpointError(
            f"cannot save {final}:", error.lines(), "make room, or save elsewhere."
        ) from error
    finally:
        directory.end()

    if before is not None:  # the error of an earlier save; this one is complete
        raise before
    return final


def items_of(
    state: Any,
    specs: ResolvedSpecs,
    mesh: Mesh,
    names: Names,
    layout: str,
    optimizer: Mapping[str, Any] | None,
) -> Iterator[Item]:
    """Yield the entries of a state, each with the boxes that this rank writes."""
    # Each leaf's name in the folder.
    check_names(names, specs.leaves)
    param_path, slot_path, group_path = LAYOUTS[layout]
    torch_names: dict[str, str] = {}
    transposed: list[str] = []
    for path in specs.stored:
        named = read_name(path, names)
        if isinstance(named, Transposed):
            transposed.append(path)
            named = named.name
        torch_names[path] = named or path
    if odd := [p for p in transposed if len(specs.leaves[p].shape) != 2]:
        lines = [f"params[{p!r}] {list(specs.leaves[p].shape)}" for p in odd]
        fix = "names={path: name}, without Transposed."
        raise CheckpointError(f"no matrix to be transposed, {leaves(len(odd))}:", lines, fix)
    values = list(torch_names.values())
    twice = sorted({name for name in values if values.count(name) > 1})
    if twice:
        raise CheckpointError(f"names= gives {twice[0]!r} to several leaves.", fix="give each its own name.")

    # The entries: parameters, from their master copies if they have such, and slots with the step.
    is_training = isinstance(state, TrainState)
    local = (state_leaves if is_training else check_param_leaves)(state, specs, mesh)
    tensors: dict[Path_, LocalLeaf] = {}
    pairs: set[Path_] = set()  # entries of complex leaves
    turned: set[Path_] = set()  # entries that are written as their transposes
    for path, name in torch_names.items():
        if f"params/{path}" not in local:  # another stage has it
            continue
        param, slots = local[f"params/{path}"], state.opt_state.get(path, {}) if is_training else {}
        entries = {param_path(name): local[f"optimizer/{path}/{MASTER}"] if MASTER in slots else param}
        for slot in slots.keys() - {MASTER}:
            entries[slot_path(name, TORCH_SLOTS.get(slot, slot))] = local[f"optimizer/{path}/{slot}"]
        if path in specs.complex:
            pairs |= entries.keys()
        if path in transposed:
            turned |= entries.keys()
        if slots:
            count = torch.tensor(float(state.step))
            entries[slot_path(name, "step")] = LocalLeaf((), P(), count, param.on_all_stages)
        tensors |= entries

    # As in a checkpoint here, all ranks assign the boxes in the same way, without communication.
    mine = assign_leaves({join(key): leaf for key, leaf in tensors.items()}, mesh)
    for key, leaf in tensors.items():
        shape = leaf.shape[:-1] if key in pairs else leaf.shape
        is_turned = key in turned and len(shape) == 2  # a slot may be a number, or a vector
        boxes = []
        for start, part in mine[join(key)].parts(mesh) if join(key) in mine else ():
            # A complex leaf is stored as pairs, and torch's reader expects complex numbers.
            if key in pairs:
                start, part = start[:-1], torch.view_as_complex(part.contiguous())
            if is_turned:
                start, part = start[::-1], part.t()
            boxes.append(((start, tuple(part.shape)), lambda part=part: part))
        dtype = leaf.block.dtype.to_complex() if key in pairs else leaf.block.dtype
        yield Item(key, shape[::-1] if is_turned else shape, dtype, boxes)

    # Options are the same for all ranks, so rank 0 writes them.
    if optimizer is not None and mesh.rank == 0:
        yield from group_items(group_path, [torch_names[p] for p in specs.trainable], optimizer)


def group_items(
    group_path: Callable[[str, str], Path_], names: Sequence[str], optimizer: Mapping[str, Any]
) -> Iterator[Item]:
    """Yield the entries of AdamW's one group of parameters, with torch's defaults for other options."""
    try:
        (group,) = torch.optim.AdamW([torch.zeros(1)], **optimizer).param_groups
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"optimizer={optimizer!r}: no arguments of torch.optim.AdamW ({error})."
        ) from error
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}

    # A flattened layout has the options for each parameter. Others have them once, and a list of parameters.
    by_name = group_path("", "lr") != group_path("other", "lr")
    for name in names if by_name else [""]:
        yield from (Item(group_path(name, key), value=value) for key, value in options.items())
    if not by_name:
        yield Item(group_path("", "params"), value=list(names))


def write_items(folder: Path, rank: int, items: Iterable[Item]) -> list[WrittenItem]:
    """Write a rank's file, one box at a time, and return the items with their places."""
    file, out = f"__{rank}_0.distcp", []
    with (folder / file).open("xb") as stream:
        for item in items:
            is_tensor = item.dtype is not None
            places = []
            for box, make in item.boxes if is_tensor else [(None, lambda item=item: item.value)]:
                value, at = make(), stream.tell()
                if is_tensor:
                    value = value.detach().to("cpu").contiguous()
                    # `torch.save` writes a tensor's whole storage, so a view is copied.
                    if value.untyped_storage().nbytes() != value.nbytes:
                        value = value.clone()
                torch.save(value, stream)
                places.append((box, file, at, stream.tell() - at))
            out.append(WrittenItem(replace(item, boxes=(), value=None), tuple(places)))
        stream.flush()
        os.fsync(stream.fileno())
    if not any(item.places for item in out):
        (folder / file).unlink()
    return out


def write_metadata(folder: Path, written: Iterable[WrittenItem]) -> None:
    """Write `.metadata` of all ranks' entries, and flush the folder."""
    # These import DTensor, which would take a quarter of the time of `import fnshard`.
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    stored: dict[metadata.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path_] = {}
    # The boxes of a tensor are those of all ranks.
    for each in written:
        item, name = each.item, each.item.name
        paths[name] = item.path
        if item.dtype is None:
            entries[name] = metadata.BytesStorageMetadata()
        elif name not in entries:
            properties = metadata.TensorProperties(dtype=item.dtype)
            entries[name] = metadata.TensorStorageMetadata(properties, torch.Size(item.shape), [])
        for box, file, at, length in each.places:
            if box is not None:
                chunk = metadata.ChunkStorageMetadata(*map(torch.Size, box))
                entries[name].chunks.append(chunk)
            index = metadata.MetadataIndex(name, None if box is None else box[0])
            stored[index] = _StorageInfo(file, at, length)
    with (folder / METADATA).open("xb") as file:
        pickle.dump(metadata.Metadata(entries, planner_data=paths, storage_data=stored), file)
    flush_file(folder / METADATA)
    flush_directory(folder)
