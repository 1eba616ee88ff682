"""Read models: open safetensors files, match their tensors with leaves, and read each rank's slices."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fnshard.errors import StateError, nearest
from fnshard.hf.names import (
    Family,
    Names,
    Transposed,
    compute_buffers,
    family_of,
    possible_names,
    read_name,
)
from fnshard.layout.codecs import Unfit, is_coded
from fnshard.layout.partition import Slices, block_shape, boxes
from fnshard.layout.spec import LayoutSpec, is_here
from fnshard.mesh import Mesh
from fnshard.runtime.files.tensorfile import DTYPES
from fnshard.step.shards import cut_out, foreign_block, put_at_rest, zeros

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHOWN = 40  # how many lines an error has at most for each kind of problem


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a saved model.

    `data[slices]` reads a part of it: a view if the file is mapped, a copy if it is put together of pieces.
    """

    file: str
    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} in {self.file}"


@dataclass(frozen=True)
class _StackedExperts:
    """The data of a leaf that stacks experts, which the files hold one by one.

    Args:
        parts: the matrices of each expert, which lie one below another in the leaf.
    """

    parts: list[list[FileTensor]]

    def __getitem__(self, slices: Any) -> Tensor:
        first = self.parts[0][0]
        experts, rows, *rest = [slice(None)] * (1 + len(first.shape)) if slices is ... else slices
        start, stop, _ = rows.indices(sum(part.shape[0] for part in self.parts[0]))
        # A rank may have no expert, or no row of any.
        if not self.parts[experts] or start >= stop:
            widths = [len(range(*s.indices(n))) for s, n in zip(rest, first.shape[1:], strict=True)]
            return torch.empty(len(self.parts[experts]), max(stop - start, 0), *widths, dtype=first.dtype)
        return torch.stack([_read_rows(parts, start, stop, rest) for parts in self.parts[experts]])


def _read_rows(parts: list[FileTensor], start: int, stop: int, rest: Sequence[slice]) -> Tensor:
    """Read some rows of matrices that lie one below another."""
    pieces = []
    first = 0  # the row at which a matrix begins in the stack of them
    for part in parts:
        begin, end = max(start - first, 0), min(stop - first, part.shape[0])
        if begin < end:
            pieces.append(part.data[(slice(begin, end), *rest)])
        first += part.shape[0]
    return torch.cat(pieces)


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def stack_experts(tensors: Mapping[str, FileTensor], family: Family) -> Mapping[str, FileTensor]:
    """Replace tensors of single experts by stacks of all experts, as leaves have them.

    Other tensors stay, and so do experts of which some are missing or differ in shape.
    """
    if not family.experts:
        return tensors

    # Find the names of single experts' tensors: for each layer, by the expert's number and its part.
    by_layer: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            by_layer.setdefault(match[1], {})[int(match[2]), match[3]] = name

    # Replace those of which every expert exists, alike.
    stacked = dict(tensors)
    for prefix, names in by_layer.items():
        count = 1 + max(number for number, _ in names)
        for leaf, parts in family.experts.items():
            part_names = [[names.get((number, part), "") for part in parts] for number in range(count)]
            experts = [[tensors.get(name) for name in row] for row in part_names]
            if any(None in row for row in experts):
                continue
            if len({tuple((part.shape, part.dtype) for part in row) for row in experts}) > 1:
                continue
            first = experts[0]
            shape = (count, sum(part.shape[0] for part in first), *first[0].shape[1:])
            data = _StackedExperts(experts)
            stacked[f"{prefix}.{leaf}"] = FileTensor(first[0].file, data, first[0].dtype, shape)
            for row in part_names:
                for name in row:
                    del stacked[name]
    return stacked


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, FileTensor]]:
    """Open a model directory, or one file, and yield its tensors by name; the files are open in the block.

    Raises:
        StateError: there are no weights, or files that cannot be read; it names them all.
    """
    # The files of a directory are those that its index names, or one file without an index.
    if path.is_dir():
        folder, index = path, _read_index(path)
        files = sorted(set(index.values())) or [SINGLE]
    elif path.is_file():
        folder, index, files = path.parent, {}, [path.name]
    else:
        raise _explain_nothing(path, "no such directory, and no file of that name")

    tensors: dict[str, FileTensor] = {}
    problems: list[str] = []
    with ExitStack() as stack:
        for name in files:
            try:
                in_file = _open_file(folder, name, stack)
            except (OSError, ValueError, SafetensorError) as error:
                problems.append(f"{name!r}: {error}")
                continue

            # Each name may occur once, in the file that the index says.
            twice = in_file.keys() & tensors.keys()
            problems += [f"{t!r} is in {tensors[t].file} and in {name}" for t in twice]
            lost = [t for t, file in index.items() if file == name and t not in in_file]
            problems += [f"{name}: the index says that {t!r} is there, and it is not" for t in lost]
            tensors |= in_file
        # All files were tried, so that one error names all problems.
        if problems:
            raise StateError(
                f"the weights in {str(path)!r} cannot be read:",
                problems,
                "fetch or copy them once more; all that a directory needs is its *.safetensors files, "
                f"and {INDEX} if there are several.",
            )
        yield tensors


def _open_file(folder: Path, name: str, stack: ExitStack) -> dict[str, FileTensor]:
    """Open one file, which `stack` closes, and return its tensors by name."""
    # The name comes from an index, which may be a stranger's: it must not lead out of the directory.
    path = folder / name
    if path.parent != folder or name == "..":
        raise ValueError("no name of a file in this directory")
    if not path.is_file():  # a pipe would wait for its writer
        raise ValueError("no such file")
    file = stack.enter_context(safe_open(path, "pt"))
    tensors = {}
    for tensor in file.keys():  # noqa: SIM118 - safe_open is no mapping
        data = file.get_slice(tensor)
        if data.get_dtype() not in DTYPES:
            raise ValueError(f"{tensor!r} is of the dtype {data.get_dtype()}, which torch does not have")
        tensors[tensor] = FileTensor(name, data, DTYPES[data.get_dtype()], tuple(data.get_shape()))
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    """Return `{tensor: file}` of the index; it is empty if there is one file alone."""
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        raise _explain_nothing(folder, f"there is neither {SINGLE} nor {INDEX}")
    files = read_json(folder / INDEX).get("weight_map")
    if not files or not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise StateError(
            f"{INDEX} in {str(folder)!r} has no weight_map from tensors to files.",
            fix="fetch or copy it once more.",
        )
    return files


def _explain_nothing(path: Path, why: str) -> StateError:
    """Return the error for a path without weights, which names what the directory has instead."""
    names = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    pickles = [name for name in names if name.endswith(PICKLES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickles and not others:
        return StateError(
            f"{str(path)!r} holds pickled weights alone, which are not read here:",
            pickles,
            "fs.checkpoint.load_torch(path, specs, mesh, model=model).params reads their tensors and runs "
            "nothing; `python -m experiments.convert PATH OTHER to=hf` writes safetensors.",
        )
    if others:
        fix = "name one of these files."
    else:
        fix = (
            "path= is a local directory of a Hugging Face model (of a model on the hub: what "
            "huggingface_hub.snapshot_download returns), or a .safetensors file."
        )
    return StateError(f"no weights in {str(path)!r}: {why}.", others, fix)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        StateError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        where = f"{path.name} in {str(path.parent)!r}"
        raise StateError(f"{where} cannot be read:", [str(error)], "fetch or copy it once more.") from error
    return values


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.json next to the weights; without one, return an empty dict."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_json(file) if file.exists() else {}


def check_model_directory(path: Path, specs: Mapping[str, LayoutSpec], model: nn.Module) -> None:
    """Check, by the headers of a model directory's files alone, that there is a tensor for each leaf.

    Raises:
        StateError: leaves and tensors do not fit, as in `fnshard.hf.load`.
    """
    family = family_of(read_config(path), model, specs)
    with open_tensors(path) as files:
        tensors = stack_experts(files, family)
        match_tensors(specs, tensors, names=None, family=family, model=model, missing={}, ignore=())


@dataclass(frozen=True)
class LeafSource:
    """The tensor that fills a leaf."""

    name: str
    saved: FileTensor
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self.saved.shape[::-1] if self.transposed else self.saved.shape

    def read(self, slices: Slices) -> Tensor:
        """Return the leaf's `slices`, read from the file."""
        if self.transposed:
            return self.saved.data[slices[::-1]].t()
        return self.saved.data[slices]


def match_tensors(
    specs: Mapping[str, LayoutSpec],
    tensors: Mapping[str, FileTensor],
    names: Names,
    family: Family,
    model: nn.Module | None,
    missing: Mapping[str, Tensor],
    ignore: Sequence[str],
) -> tuple[dict[str, LeafSource], dict[str, Tensor]]:
    """Return what fills each leaf: tensors of the files by path, and full values by path.

    Raises:
        StateError: leaves lack a tensor, tensors have no leaf, or they do not fit; it names all of them.
    """
    considered = [n for n in tensors if not any(fnmatch.fnmatchcase(n, g) for g in ignore)]
    codes = find_codes(considered)
    if codes is not None:
        raise StateError(
            f"the files hold codes of {codes[0]}, as {codes[1]!r}, which are not decoded.",
            fix="name the directory that they were made from, whose weights are numbers.",
        )

    # Find for each leaf a tensor of the files, a value given as `missing=`, or a buffer that its module
    # makes.
    sources: dict[str, LeafSource] = {}
    values: dict[str, Tensor] = {}
    unsaved: list[str] = []
    lacking: dict[str, str] = {}
    for path, spec in specs.items():
        named = read_name(path, names)
        if named is None and model is not None and not family.saves(path) and path not in missing:
            unsaved.append(path)  # the module makes it: what a file may hold is rounded, or of another length
            continue
        if named is None:
            candidates = possible_names(path, family)
        else:
            candidates = [named.name if isinstance(named, Transposed) else named]
        name = next((name for name in candidates if name in tensors), None)
        if name is not None:
            sources[path] = LeafSource(name, tensors[name], isinstance(named, Transposed))
        elif path in missing:
            values[path] = missing[path]
        else:
            text = " or ".join(map(repr, candidates))
            lacking[path] = f"params[{path!r}] {list(spec.shape)}: no tensor {text}"
    # For all buffers at once, since this makes a function of the whole module.
    computed, failed = compute_buffers(model, unsaved) if model is not None else ({}, [])

    # Collect all that does not fit, so that one error names it.
    surplus, untied = _find_surplus(sources, tensors, family, ignore)
    unused: list[str] = []
    for path in missing:
        if path in sources:
            unused.append(f"missing[{path!r}]: the files have it, as {sources[path].name!r}")
        elif path not in values:
            unused.append(f"missing[{path!r}]: no such leaf")
    unused += [f"ignore={g!r} matches no tensor" for g in ignore if not fnmatch.filter(tensors, g)]

    # For each leaf that lacks a tensor, suggest the nearest name among the free tensors of its shape.
    taken = {source.name for source in sources.values()}
    free = [n for n in considered if n not in taken]
    lines = list(lacking.values())
    for index, path in enumerate(islice(lacking, SHOWN)):
        alike = [n for n in free if tensors[n].shape == specs[path].shape]
        lines[index] += nearest(path, alike or free)
    _check_problems(
        {
            "lacking": lines + failed,
            "surplus": surplus,
            "unfit": [*_find_unfit(specs, sources), *_find_unfit_values(specs, values | computed), *untied],
            "unused": unused,
        },
        _find_prefix({p: specs[p].shape for p in lacking}, {n: tensors[n].shape for n in free}),
    )
    return sources, values | computed


def _find_prefix(paths: Mapping[str, tuple[int, ...]], names: Mapping[str, tuple[int, ...]]) -> str:
    """Return the `names=` that finds tensors for all leaves that lack one, by a prefix more or less.

    Args:
        paths, names: the shapes of leaves that lack a tensor, by path; and of tensors that no leaf takes.

    Returns:
        Python code, or "" where no prefix does.
    """
    if not paths:
        return ""
    first = next(iter(paths))
    # Try each prefix that the files have and the leaves lack.
    for prefix in dict.fromkeys(name.removesuffix(first) for name in names if name.endswith(f".{first}")):
        if all(names.get(prefix + path) == shape for path, shape in paths.items()):
            return f"names=lambda path: {prefix!r} + path"
    # Then try the one that the leaves have and the files may lack.
    prefix = f"{first.partition('.')[0]}."
    if all(names.get(path.removeprefix(prefix)) == shape for path, shape in paths.items()):
        return f"names=lambda path: path.removeprefix({prefix!r})"
    return ""


# Suffixes of tensors that files hold beside the codes of a matrix, by what writes them.
CODES: Mapping[str, tuple[str, ...]] = {
    "bitsandbytes": (".absmax", ".quant_map", ".SCB", ".weight_format"),
    "GPTQ or AWQ": (".qweight", ".qzeros"),
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "mxfp4": ("_proj_blocks", "_proj_scales"),
}


def find_codes(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the kind of codes that some tensors are, and the name that shows it; None for plain numbers."""
    for name in names:
        for kind, suffixes in CODES.items():
            if name.endswith(suffixes):
                return kind, name
    return None


_FIXES = {
    "lacking": "a leaf that is called otherwise: names={path: name}, or of all names=lambda path: "
    "f'model.{path}'; a buffer that no file holds: model= (its module makes it); another leaf: "
    "missing={path: full value}.",
    "surplus": "ignore=[globs of names] leaves tensors out; model= says which names are tied.",
    "unfit": "load with the configuration the weights were made with; a matrix that is stored [in, out]: "
    "names={path: fs.hf.Transposed(name)}.",
    "unused": "leave out what is not used.",
}


def _check_problems(kinds: Mapping[str, list[str]], names: str = "") -> None:
    """Raise one error for all problems, if there are any.

    Args:
        kinds: lines by kind of problem; the kinds have their ways out in `_FIXES`.
        names: a `names=` that would find all tensors that are lacking.
    """
    count = sum(map(len, kinds.values()))
    if not count:
        return
    lines: list[str] = []
    for problems in kinds.values():
        lines += problems[:SHOWN]
        if len(problems) > SHOWN:
            lines.append(f"... and {len(problems) - SHOWN} more")
    fixes = [_FIXES[kind] for kind, problems in kinds.items() if problems]
    if names:
        fixes.insert(0, f"{names} finds all that are lacking.")
    what = "1 problem" if count == 1 else f"{count} problems"
    raise StateError(f"files and specs do not fit each other, {what}:", lines, "\n     ".join(fixes))


def _find_surplus(
    sources: Mapping[str, LeafSource],
    tensors: Mapping[str, FileTensor],
    family: Family,
    ignore: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Find tensors that no leaf takes, and tied weights of which the files hold two that differ."""
    taken = {source.name for source in sources.values()}
    globs = [*ignore, *family.ignored]
    path_of = {name: path for path in sources for name in possible_names(path, family)}

    surplus: list[str] = []
    untied: list[str] = []
    for name, saved in tensors.items():
        if name in taken or any(fnmatch.fnmatchcase(name, g) for g in globs):
            continue
        if name not in path_of:
            surplus.append(f"{name!r} {saved}: no leaf takes it")
            continue

        # This is another name of a tied weight, which must hold the same numbers.
        path = path_of[name]
        other = sources[path]
        if saved.dtype != other.saved.dtype or not torch.equal(saved.data[...], other.saved.data[...]):
            untied.append(f"{name!r} {saved} is not what {other.name!r} is, and params[{path!r}] is both")
    return surplus, untied


def _find_unfit(specs: Mapping[str, LayoutSpec], sources: Mapping[str, LeafSource]) -> list[str]:
    """Return what is wrong with tensors that leaves take: their shape, or their kind of numbers."""
    wrong = []
    for path, source in sources.items():
        spec, saved = specs[path], source.saved
        if source.transposed and len(saved.shape) != 2:
            wrong.append(f"params[{path!r}]: {source.name!r} {saved} is no matrix to be transposed")
        elif source.shape != spec.shape:
            hint = " (its transpose would fit)" if source.shape[::-1] == spec.shape else ""
            wrong.append(f"params[{path!r}] {list(spec.shape)}: {source.name!r} is {saved}{hint}")
        elif not _can_cast(saved.dtype, spec.storage_dtype):
            wrong.append(
                f"params[{path!r}] is stored as {spec.storage_dtype}: {source.name!r} is {saved}, which is "
                "no number of that kind (quantised weights are not decoded)"
            )
    return wrong


def _find_unfit_values(specs: Mapping[str, LayoutSpec], values: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with full values that leaves take."""
    wrong = []
    for path, value in values.items():
        shape = specs[path].shape
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "on meta" if isinstance(value, Tensor) else type(value).__name__
            wrong.append(f"missing[{path!r}] is {kind}")
        elif tuple(value.shape) != shape:
            wrong.append(f"params[{path!r}] {list(shape)}: the value given is {list(value.shape)}")
    return wrong


def _can_cast(saved: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a tensor can be cast to its leaf's storage dtype.

    Floats of two bytes or more can be cast to each other, and so can complex numbers. Floats of one byte are
    codes, which need a scale.
    """
    if saved.is_complex or stored.is_complex:
        return saved.is_complex and stored.is_complex
    both_wide = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (saved, stored))
    return both_wide or saved == stored


def load_block(
    path: str, spec: LayoutSpec, mesh: Mesh, disk_dir: str | None, source: LeafSource | Tensor, unfit: Unfit
) -> Any:
    """Load this rank's stored block (or its parts), in its tier, from a file or from a full value.

    Args:
        unfit: the collection of leaves that cannot be coded.
    """
    if isinstance(source, Tensor):
        unfit.look(path, spec, source)
        return cut_out(source, spec, mesh, disk_dir)
    if not is_here(spec, mesh):
        return foreign_block(spec, mesh)

    # Read the block's slices into memory of its tier; a coded leaf's are read first, and then coded.
    shape = block_shape(spec.shape, spec.storage, mesh)
    if is_coded(spec):
        block = torch.zeros(shape, dtype=spec.storage_dtype)
    else:
        block = zeros(shape, spec.storage_dtype, spec.memory, mesh, disk_dir)
    for slices, slices_of_block in boxes(spec.shape, spec.storage, mesh):  # padding stays zero
        block[slices_of_block] = source.read(slices)
    if is_coded(spec):
        unfit.look(path, spec, block)
        return put_at_rest(block, spec, mesh, disk_dir)
    return block
