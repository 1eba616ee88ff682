"""Plan: leaves on their way out, the same on all ranks, and how they get to the one that writes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fnshard.checkpoint.coordination import all_or_none
from fnshard.errors import AgreementError, StateError, leaves
from fnshard.hf.names import Family, Names, Transposed, check_names, given_name
from fnshard.hf.write import LeafWriter, Put
from fnshard.layout.codecs import block_of
from fnshard.layout.pairs import as_complex, as_pairs
from fnshard.layout.partition import Slices, boxes
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.files.tensorfile import NAMES, TensorToWrite

PIECE_bytes = 64 << 20  # of all ranks together, unless one row is more


@dataclass(frozen=True)
class ExportedLeaf:
    """A leaf on its way out: what makes its block, the names it is to have, and how it is to be stored."""

    path: str
    spec: LayoutSpec
    make: Callable[[], Tensor]
    names: tuple[str, ...]
    dtype: torch.dtype
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is written."""
        return self.spec.shape[::-1] if self.transposed else self.spec.shape


@dataclass(frozen=True)
class ExportPlan:
    """What all ranks must mean alike."""

    parts: tuple[ExportedLeaf, ...]

    @staticmethod
    def of(
        blocks: Mapping[str, Tensor],
        specs: Mapping[str, LayoutSpec],
        names: Names,
        family: Family,
        dtype: torch.dtype | None,
    ) -> ExportPlan:
        """Of stored blocks by path.

        Raises:
            StateError: names or a dtype that do not fit.
        """
        check_names(names, specs)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise StateError(f"dtype={dtype!r}: a float dtype, such as torch.bfloat16, or None.")
        parts, wrong, taken = [], [], {}
        for path, spec in specs.items():
            named = given_name(path, names)
            if named is None and not family.saves(path):
                continue
            transposed = isinstance(named, Transposed)
            name = named.name if isinstance(named, Transposed) else named or family.name(path)
            if transposed and len(spec.shape) != 2:
                wrong.append(f"params[{path!r}] {list(spec.shape)} is to be transposed, and is no matrix")
            if name in taken:
                wrong.append(f"{name!r} is to be params[{taken[name]!r}] and params[{path!r}]")
            taken[name] = path
            stored = spec.storage_dtype
            wide = stored.is_floating_point and stored.itemsize > 1
            kind = dtype if dtype is not None and wide else stored
            parts.append(
                ExportedLeaf(path, spec, partial(block_of, blocks, path, spec), (name,), kind, transposed)
            )
        if wrong:
            raise StateError("names= does not fit the leaves:", wrong, "give each leaf its own name.")
        return ExportPlan(tuple(parts))

    @property
    def entries(self) -> list[TensorToWrite]:
        """Every tensor that is written."""
        return [TensorToWrite(name, part.shape, part.dtype) for part in self.parts for name in part.names]

    def copied(self, tied: Mapping[str, str]) -> ExportPlan:
        """The same with tied weights under all their names, `{other name: path}`."""
        more = {p.path: tuple(other for other, path in tied.items() if path == p.path) for p in self.parts}
        return ExportPlan(tuple(replace(p, names=p.names + more[p.path]) for p in self.parts))

    def check_dtypes(self) -> None:
        """Refuse what a safetensors file cannot hold.

        Raises:
            StateError: names all leaves.
        """
        wrong = [f"params[{p.path!r}] is {p.dtype}" for p in self.parts if p.dtype not in NAMES]
        if wrong:
            fix = "export to a .pt file, or store them in another dtype (storage_dtype= of their specs)."
            raise StateError(f"safetensors files have no such dtype, {leaves(len(wrong))}:", wrong, fix)

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        lines = [[p.path, p.names, p.shape, str(p.dtype), repr(p.spec)] for p in self.parts]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def export_leaves(
    what: str, planned: Callable[[], tuple[ExportPlan, LeafWriter]], mesh: Mesh, comm: Collectives
) -> None:
    """Plan, gather, and write on rank 0: each is done by all ranks or by none. A collective.

    Args:
        what: for messages.

    Raises:
        StateError, CheckpointError: on all ranks, if it failed on one.
        AgreementError: plans that differ.
    """
    all_ranks = partial(all_or_none, comm.gather_object, what)
    plan, target = all_ranks(planned)
    digests = comm.gather_object(f"{what} {mesh} {plan.digest}")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise AgreementError(
            f"{what}: rank(s) {', '.join(map(str, odd))} mean another file or other leaves than rank 0.",
            fix="give the same path, specs, names and dtype on every rank.",
        )
    first, put = mesh.rank == 0, None
    try:
        put = all_ranks(target.__enter__ if first else None)
        for part in plan.parts:
            all_ranks(partial(_send, part, mesh, comm, put))
        all_ranks(partial(target.__exit__, None, None, None) if first else None)
    except BaseException as error:
        if put is not None:
            target.__exit__(type(error), error, error.__traceback__)
        raise


def _send(part: ExportedLeaf, mesh: Mesh, comm: Collectives, put: Put | None) -> None:
    """One leaf to the rank that writes. What fails there is raised when the collectives are through."""
    failure, full = None, None
    for first, rows in gather_rows(part.make(), part.spec, mesh, comm, receives=put is not None):
        if failure is not None:
            continue
        try:
            cast = rows.to(part.dtype)
            if part.transposed:
                full = torch.empty(part.spec.shape, dtype=part.dtype) if full is None else full
                full[first : first + rows.shape[0]] = cast
            else:
                _put(put, part, first, cast)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    if full is not None:
        _put(put, part, 0, full.t())


def _put(put: Put, part: ExportedLeaf, first: int, rows: Tensor) -> None:
    for name in part.names:
        put(name, first, rows)


# ------------------------------------------------------------------ leaves by runs of rows


def gather_rows(
    block: Tensor, spec: LayoutSpec, mesh: Mesh, comm: Collectives, *, receives: bool
) -> Iterator[tuple[int, Tensor]]:
    """A leaf in runs of whole rows, (index along dim 0, rows), in any order. A collective, to be run dry.

    The rows must be read before the next ones are requested. A leaf without dims is one row.

    Args:
        block: what this rank stores of it.
        receives: whether this rank gets the rows; all ranks take part.
    """
    axes = mesh.ordered(spec.storage.axes)
    ranks = mesh.group_ranks(axes)
    if not spec.shape:
        parts_of, block = [[((slice(0, 1),), (slice(0, 1),))]] * len(ranks), block.view(1)
    else:
        parts_of = [boxes(spec.shape, spec.storage, mesh, mesh.coordinate(r)) for r in ranks]
    shape = spec.shape or (1,)
    row = math.prod(block.shape[1:])
    if 0 in shape:
        return
    step = max(1, PIECE_bytes // (len(ranks) * row * block.dtype.itemsize))
    for low in range(0, block.shape[0], step):
        piece = block[low : low + step]
        if not axes:
            if receives:
                yield low, piece
            continue
        sent = as_pairs(piece)
        flat = comm.send_buffer(sent.numel(), sent.dtype, axes)
        flat.view(sent.shape).copy_(sent)
        handle = comm.all_gather(flat, axes)
        parts = handle.wait()
        if receives:
            views = [part.view(sent.shape) for part in parts]
            views = list(map(as_complex, views)) if piece.is_complex() else views
            yield from _joined(views, parts_of, low, shape)
        handle.release()


def _joined(
    parts: list[Tensor], boxes_of: list[list[tuple[Slices, Slices]]], low: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Of every rank's rows from `low` of its block on: whole rows, padding cut off."""
    runs: dict[int, Tensor] = {}
    for part, (where, mine) in ((p, box) for p, of in zip(parts, boxes_of, strict=True) for box in of):
        begin, end = max(low, mine[0].start), min(low + part.shape[0], mine[0].stop)
        if begin >= end:
            continue
        first, columns = where[0].start + begin - mine[0].start, where[1:]
        valid = part[(slice(begin - low, end - low), *mine[1:])]
        if valid.shape[1:] == shape[1:]:
            runs[first] = valid
            continue
        if first not in runs:
            runs[first] = part.new_empty((end - begin, *shape[1:]))
        runs[first][(slice(None), *columns)] = valid
    yield from runs.items()
