"""Buckets: the leaves of one unit that travel together, and how they are packed flat.

A bucket's wire form is one flat tensor per rank; each leaf's block starts at a multiple of 128
bytes, in every rank's row. Blocks are padded to equal size on all ranks; padding is zero wherever it
is summed, and is cut off before `fn`, a checkpoint or a norm can see it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnshard.layout.partition import P, block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import PIPELINE, Mesh

ALIGN_BYTES = 128


@dataclass(frozen=True)
class Piece:
    """One leaf's place in a bucket: full shape, padded block shape, offset in elements.

    Args:
        slot: the name of one of the leaf's values, where an update sends several.
    """

    path: str
    shape: tuple[int, ...]
    layout: P
    block: tuple[int, ...]
    offset: int
    slot: str = ""

    @property
    def key(self) -> str | tuple[str, str]:
        """The key of its tensor among those of a bucket: the path, or the path and the slot."""
        return (self.path, self.slot) if self.slot else self.path

    @property
    def numel(self) -> int:
        """The number of elements of the padded block."""
        return math.prod(self.block)


@dataclass(frozen=True)
class Bucket:
    """The leaves of `unit` that one collective exchanges over `axes` as `dtype`.

    Args:
        numel: the number of elements of one rank's row.
    """

    name: str
    unit: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    numel: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves in it."""
        return tuple(dict.fromkeys(p.path for p in self.pieces))

    @property
    def row_bytes(self) -> int:
        """The bytes of one rank's row on the wire."""
        return self.numel * self.dtype.itemsize


def make_buckets(
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    layout: Callable[[LayoutSpec], P],
    dtype: Callable[[LayoutSpec], torch.dtype],
    purpose: str,
    apart: Callable[[LayoutSpec], object] = lambda spec: None,
) -> tuple[Bucket, ...]:
    """Group leaves by (unit, axes, dtype), in the order of the tree.

    Args:
        layout, dtype: functions that choose the layout and the dtype of a spec that travel.
        purpose: the first part of the buckets' names ("gather", "reduce", ...).
        apart: a function of a spec; leaves for which it differs do not share a bucket either.
    """
    groups: dict[tuple[str, tuple[str, ...], torch.dtype, object], list[str]] = {}
    for path, spec in specs.items():
        key = (spec.unit, mesh.ordered(layout(spec).axes), dtype(spec), apart(spec))
        groups.setdefault(key, []).append(path)

    out: list[Bucket] = []
    for (unit, axes, wire, _), paths in groups.items():
        # Where each leaf's block lies in a row.
        blocks = [block_shape(specs[p].shape, layout(specs[p]), mesh) for p in paths]
        starts, numel = _align_starts([math.prod(b) for b in blocks], wire)
        pieces = tuple(
            Piece(path, specs[path].shape, layout(specs[path]), block, start)
            for path, block, start in zip(paths, blocks, starts, strict=True)
        )
        name = _choose_name(f"{purpose}/{unit}", {b.name for b in out})
        out.append(Bucket(name, unit, axes, wire, pieces, numel))
    return tuple(out)


def _choose_name(name: str, taken: set[str]) -> str:
    """Return `name`, or the first of `name:1`, `name:2`, ... that no other bucket has."""
    numbered = (f"{name}:{i}" for i in itertools.count(1))
    return next(n for n in itertools.chain([name], numbered) if n not in taken)


def gradient_axes(bucket: Bucket, specs: Mapping[str, LayoutSpec], axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which a bucket's gradients are summed.

    No axis that splits its leaves while they compute is among them, nor the pipeline where one stage alone
    has the leaves.

    Args:
        axes: all axes over which gradients are summed.
    """
    # All leaves of a bucket have these settings in common (`make_buckets`).
    spec = specs[bucket.paths[0]]
    apart = (*spec.compute.axes, *(() if spec.chunk == "all" else (PIPELINE,)))
    return tuple(a for a in axes if a not in apart)


def replica_axes(bucket: Bucket, specs: Mapping[str, LayoutSpec], axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which ranks hold replicas of a bucket's summed gradients.

    No axis of the bucket is among them, and none that splits its leaves while they compute.

    Args:
        axes: all axes over which gradients are summed.
    """
    return tuple(a for a in gradient_axes(bucket, specs, axes) if a not in bucket.axes)


def in_rank_order(bucket: Bucket, mesh: Mesh) -> bool:
    """Return whether each leaf is the blocks of the bucket's ranks one after another, without padding."""
    ranks = mesh.axes_size(bucket.axes)
    # Layouts that split dim 0 alone, over all axes of the bucket. None is `Fused`.
    are_rows = all(p.layout.axes == p.layout.entries(0) == bucket.axes for p in bucket.pieces)
    return are_rows and all(math.prod(p.shape) == ranks * p.numel for p in bucket.pieces)


def end_to_end(bucket: Bucket, mesh: Mesh) -> bool:
    """Return whether a collective can read and write the leaves in place, without packing them.

    It can where each leaf is the blocks of the bucket's ranks one after another, and a row is blocks without
    gaps.
    """
    return in_rank_order(bucket, mesh) and sum(p.numel for p in bucket.pieces) == bucket.numel


def leaf_runs(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """Return the places of a bucket's full leaves in one memory: (start, length) of each, and the total.

    All are numbers of elements.
    """
    sizes = [math.prod(p.shape) for p in bucket.pieces]
    starts, total = _align_starts(sizes, bucket.dtype)
    return list(zip(starts, sizes, strict=True)), total


def _align_starts(sizes: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Return the starts of runs of these sizes, each at a multiple of 128 bytes, and the start of the next.

    Runs that are together shorter than 128 bytes are not padded: a scalar is no reason to send so many.
    """
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    starts, at, end = [], 0, 0
    for size in sizes:
        starts.append(at)
        end = at + size
        at = -(-end // step) * step
    return starts, at if end > step else end


Part = tuple[str, tuple[int, ...], P]  # one value of a leaf that is stacked: its name, full shape, layout


def stack_buckets(
    reduced: Sequence[Bucket],
    parts: Mapping[str, tuple[Sequence[Part], Sequence[Part]]],
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]],
    axes: Mapping[str, tuple[str, ...]],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
) -> dict[str, list[tuple[Bucket, Bucket]]]:
    """Spread leaves that are computed whole over ranks, and return the buckets that travel there and back.

    Each of n ranks takes one of n leaves of one form; as many such groups as there are travel together.
    Leaves that are left at the end are spread over the ranks as evenly as possible: a rank's row may have
    gaps.

    Args:
        reduced: the reduced buckets, in the order in which their gradients arrive.
        parts, dtypes: by path, the values and the dtypes of what is sent to the rank that computes a leaf,
            and of what it sends back.
        axes: by path, the axes whose ranks share the work.

    Returns:
        Pairs of buckets, by the reduced bucket after which all that they send is known.
    """
    waiting: dict[Any, dict[Any, list[str]]] = {}  # by what travels together, then by form
    out: dict[str, list[tuple[Bucket, Bucket]]] = {}
    for bucket in reduced:
        # The leaves of this bucket join those that wait for enough others.
        for path in (p for p in bucket.paths if p in parts):
            spec = specs[path]
            tiers = spec.updated_on, spec.optimizer_memory, spec.memory
            together = axes[path], dtypes[path], tiers
            form = tuple(parts[path][0]), tuple(parts[path][1])
            waiting.setdefault(together, {}).setdefault(form, []).append(path)

        # Fill rows for as long as every rank gets a leaf; after the last bucket all others go too.
        for (over, (there, back), _), forms in waiting.items():
            n, is_last = mesh.axes_size(over), bucket is reduced[-1]
            rows: list[list[tuple[str, Any]]] = [[] for _ in range(n)]  # for each rank, paths and their forms
            turn = 0  # the rank that takes the next leaf, so that those with gaps differ
            for form, paths in forms.items():
                while len(paths) >= n or (is_last and paths):
                    column = [""] * n  # the path that each rank takes; "" leaves a gap in its row
                    for _ in range(min(n, len(paths))):
                        column[turn % n] = paths.pop(0)
                        turn += 1
                    for row, path in zip(rows, column, strict=True):
                        row.append((path, form))

            # All ranks' rows have as many leaves or gaps; each becomes one row of both buckets.
            if rows[0]:
                names = {b.name for some in out.values() for pair in some for b in pair}
                name = _choose_name(bucket.name.replace("reduce", "stack", 1), names)
                pair = [
                    _make_stack(f"{name}{mark}", bucket.unit, over, dtype, rows, mesh, side)
                    for side, (mark, dtype) in enumerate((("", there), (" back", back)))
                ]
                out.setdefault(bucket.name, []).append((pair[0], pair[1]))
    return out


def _make_stack(
    name: str, unit: str, axes: tuple[str, ...], dtype: torch.dtype,
    rows: Sequence[Sequence[tuple[str, Any]]], mesh: Mesh, side: int,
) -> Bucket:  # fmt: skip
    """Return the bucket of what goes to each rank's row of leaves (side 0), or comes back (1)."""
    values = [[(path, part) for path, form in row for part in form[side]] for row in rows]
    # The leaves of a column have one form, so that the first row tells where blocks lie in all of them.
    blocks = [block_shape(shape, layout, mesh) for _, (_, shape, layout) in values[0]]
    starts, numel = _align_starts([math.prod(b) for b in blocks], dtype)
    pieces = tuple(
        Piece(path, shape, layout, block, owner * numel + start, slot)
        for owner, row in enumerate(values)
        for (path, (slot, shape, layout)), block, start in zip(row, blocks, starts, strict=True)
        if path
    )
    return Bucket(name, unit, axes, dtype, pieces, numel * len(rows))


def row_of_rank(bucket: Bucket, place: int, ranks: int) -> Bucket:
    """Return the bucket of the leaves that one of the ranks owns, in its row."""
    numel = bucket.numel // ranks
    pieces = [p for p in bucket.pieces if p.offset // numel == place]
    return replace(
        bucket, pieces=tuple(replace(p, offset=p.offset - place * numel) for p in pieces), numel=numel
    )


def common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype in which values of these dtypes travel together.

    fp32 holds no integers of 32 bits, so that these travel in fp64 beside floats.
    """
    wide = functools.reduce(torch.promote_types, dtypes)
    mixed = wide.is_floating_point and not all(dtype.is_floating_point for dtype in dtypes)
    return torch.float64 if mixed and {torch.int32, torch.int64} & {*dtypes} else wide


def wire_dtype(spec: LayoutSpec) -> torch.dtype:
    """Return the dtype of a gathered leaf on the wire: the spec's, or the shorter of storage and compute."""
    # Rounding before the gather gives the numbers that rounding after it would, and sends fewer bytes.
    return spec.wire_dtype or min(spec.storage_dtype, spec.compute_dtype, key=lambda d: d.itemsize)
