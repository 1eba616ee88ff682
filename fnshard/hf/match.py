"""Match: which tensor of the files fills which leaf; what is left over on either side; and filling."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fnshard.errors import StateError
from fnshard.hf.files import FileTensor
from fnshard.hf.names import Family, Names, Transposed, computed_buffers, given_name, possible_names
from fnshard.layout.codecs import Unfit, is_coded
from fnshard.layout.partition import block_shape, boxes
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.runtime.files.fileblocks import read_block
from fnshard.runtime.files.tensorfile import Corrupt, read_exactly
from fnshard.runtime.packing import local_block
from fnshard.runtime.tiers import allocate
from fnshard.step.shards import stored_at_rest

SHOWN = 40  # lines of each kind of a problem


@dataclass(frozen=True)
class LeafSource:
    """The tensor that fills a leaf."""

    name: str
    saved: FileTensor
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the leaf."""
        return self.saved.shape[::-1] if self.transposed else self.saved.shape


def match_tensors(
    specs: Mapping[str, LayoutSpec],
    tensors: Mapping[str, FileTensor],
    names: Names,
    family: Family,
    model: nn.Module | None,
    missing: Mapping[str, Tensor],
    ignore: Sequence[str],
) -> tuple[dict[str, LeafSource], dict[str, Tensor]]:
    """What fills each leaf: a tensor of the files, or a full value.

    Raises:
        StateError: names everything that does not fit.
    """
    sources: dict[str, LeafSource] = {}
    values: dict[str, Tensor] = {}
    absent: list[str] = []
    lacking: list[str] = []
    for path, spec in specs.items():
        named = given_name(path, names)
        if named is None and model is not None and not family.saves(path) and path not in missing:
            absent.append(path)  # though a file may hold it: rounded, or of another length
            continue
        tried = possible_names(path, family) if named is None else [getattr(named, "name", named)]
        found = next((name for name in tried if name in tensors), None)
        if found is not None:
            sources[path] = LeafSource(found, tensors[found], isinstance(named, Transposed))
        elif path in missing:
            values[path] = missing[path]
        else:
            lacking.append(f"params[{path!r}] {list(spec.shape)}: no tensor {' or '.join(map(repr, tried))}")
    made, unmade = computed_buffers(model, absent) if model is not None else ({}, [])
    surplus, repeated = _surplus(sources, tensors, family, ignore)
    there = {p: f"the files have it, as {source.name!r}" for p, source in sources.items()}
    unused = [f"missing[{p!r}]: {there.get(p, 'no such leaf')}" for p in missing if p not in values]
    unused += [f"ignore={g!r} matches no tensor" for g in ignore if not fnmatch.filter(tensors, g)]
    kinds = {
        "lacking": lacking + unmade,
        "surplus": [f"{name!r} {tensors[name]}: no leaf takes it" for name in surplus],
        "unfit": [*_unfit(specs, sources, values | made), *_untied(sources, tensors, repeated)],
        "unused": unused,
    }
    _refuse(kinds)
    return sources, values | made


_FIXES = {
    "lacking": "a leaf that is called otherwise: names={path: name}; a buffer that no file holds: model= "
    "(its module makes it); another leaf: missing={path: full value}.",
    "surplus": "ignore=[globs of names] leaves tensors out; model= says which names are tied.",
    "unfit": "load with the configuration the weights were made with; a matrix that is stored [in, out]: "
    "names={path: fs.hf.Transposed(name)}.",
    "unused": "leave out what is not used.",
}


def _refuse(kinds: Mapping[str, list[str]]) -> None:
    count = sum(map(len, kinds.values()))
    if not count:
        return
    lines: list[str] = []
    for found in kinds.values():
        lines += found[:SHOWN] + [f"... and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
    fixes = "\n     ".join(_FIXES[kind] for kind, found in kinds.items() if found)
    what = "1 problem" if count == 1 else f"{count} problems"
    raise StateError(f"files and specs do not fit each other, {what}:", lines, fixes)


def _surplus(
    sources: Mapping[str, LeafSource],
    tensors: Mapping[str, FileTensor],
    family: Family,
    ignore: Sequence[str],
) -> tuple[list[str], dict[str, str]]:
    """Tensors that no leaf takes, and `{tensor: the leaf it repeats}` of tied ones that are saved twice."""
    taken = {source.name for source in sources.values()}
    globs = [*ignore, *family.ignored]
    again = {name: path for path in sources for name in possible_names(path, family)}
    surplus: list[str] = []
    repeated: dict[str, str] = {}
    for name in tensors:
        if name in taken or any(fnmatch.fnmatchcase(name, g) for g in globs):
            continue
        if name in again:
            repeated[name] = again[name]
        else:
            surplus.append(name)
    return surplus, repeated


def _unfit(
    specs: Mapping[str, LayoutSpec], sources: Mapping[str, LeafSource], values: Mapping[str, Tensor]
) -> list[str]:
    wrong = []
    for path, source in sources.items():
        spec, saved = specs[path], source.saved
        if source.transposed and len(saved.shape) != 2:
            wrong.append(f"params[{path!r}]: {source.name!r} {saved} is no matrix to be transposed")
        elif source.shape != spec.shape:
            turned = " (its transpose would fit)" if source.shape[::-1] == spec.shape else ""
            wrong.append(f"params[{path!r}] {list(spec.shape)}: {source.name!r} is {saved}{turned}")
        elif not _castable(saved.dtype, spec.storage_dtype):
            wrong.append(
                f"params[{path!r}] is stored as {spec.storage_dtype}: {source.name!r} is {saved}, which is "
                "no number of that kind (quantised weights are not decoded)"
            )
    for path, value in values.items():
        spec = specs[path]
        if not isinstance(value, Tensor) or value.is_meta:
            wrong.append(
                f"missing[{path!r}] is {'on meta' if isinstance(value, Tensor) else type(value).__name__}"
            )
        elif tuple(value.shape) != spec.shape:
            wrong.append(f"params[{path!r}] {list(spec.shape)}: the value given is {list(value.shape)}")
    return wrong


def _castable(saved: torch.dtype, stored: torch.dtype) -> bool:
    """Between floats of two bytes or more; one-byte floats are codes that need a scale."""

    def kind(dtype: torch.dtype) -> str:
        wide = dtype.is_floating_point and dtype.itemsize > 1
        return "float" if wide else "complex" if dtype.is_complex else str(dtype)

    return kind(saved) == kind(stored)


def _untied(
    sources: Mapping[str, LeafSource], tensors: Mapping[str, FileTensor], repeated: Mapping[str, str]
) -> list[str]:
    """Tied weights of which the files hold two that differ."""
    return [
        f"{name!r} {tensors[name]} is not what {sources[path].name!r} is, and params[{path!r}] is both"
        for name, path in repeated.items()
        if not _equal(tensors[name], sources[path].saved)
    ]


def _equal(one: FileTensor, other: FileTensor, step: int = 4 << 20) -> bool:
    """Whether two tensors are the same bytes, read a piece at a time."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    size = torch.Size(one.shape).numel() * one.dtype.itemsize
    for low in range(0, size, step):
        parts = [bytearray(min(step, size - low)) for _ in range(2)]
        for part, saved in zip(parts, (one, other), strict=True):
            read_exactly(saved.fd, saved.at + low, memoryview(part))
        if parts[0] != parts[1]:
            return False
    return True


def load_block(
    path: str,
    spec: LayoutSpec,
    mesh: Mesh,
    disk_dir: str | None,
    source: LeafSource | None,
    value: Tensor | None,
    unfit: Unfit,
) -> Any:
    """This rank's stored block (or its parts), where it rests, from its slice of a file, or of a full value.

    Args:
        unfit: collects rows that cannot be coded.

    Raises:
        StateError: the file cannot be read any more, or there is no room.
    """
    if source is None:
        unfit.look(path, spec, value)
        return stored_at_rest(local_block(value, spec.storage, mesh), spec, mesh, disk_dir)
    shape = block_shape(spec.shape, spec.storage, mesh)
    if is_coded(spec):  # its rows are there as they were while they are coded
        rows = torch.zeros(shape, dtype=spec.storage_dtype)
        _fill(rows, spec, mesh, source)
        unfit.look(path, spec, rows)
        return stored_at_rest(rows, spec, mesh, disk_dir)
    if spec.memory == "device":
        block = torch.zeros(shape, dtype=spec.storage_dtype, device=mesh.device)
    else:
        block = allocate(shape, spec.storage_dtype, spec.memory, mesh.device, disk_dir).zero_()
    _fill(block, spec, mesh, source)
    return block


def _fill(block: Tensor, spec: LayoutSpec, mesh: Mesh, source: LeafSource) -> None:
    """All but the padding of a block."""
    parts, saved = boxes(spec.shape, spec.storage, mesh), source.saved
    try:
        if not source.transposed and len(parts) == 1:
            read_block(saved.fd, saved.at, saved.dtype, saved.shape, parts[0][0], block)
            return
        for slices, mine in parts:
            turned = slices[::-1] if source.transposed else slices
            part = torch.empty([s.stop - s.start for s in turned], dtype=block.dtype)
            read_block(saved.fd, saved.at, saved.dtype, saved.shape, turned, part)
            block[mine] = part.t() if source.transposed else part
    except (Corrupt, OSError) as error:
        raise StateError(f"{source.name!r} could not be read from {saved.file}: {error}.") from error
