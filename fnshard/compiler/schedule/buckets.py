"""Buckets: the leaves of one unit that travel together, and how they are packed flat.

A bucket's wire form is one flat tensor per rank; each leaf's block starts at a multiple of 128
bytes, in every rank's row. Blocks are padded to equal size on all ranks; padding is zero wherever it
is summed, and is cut off before `fn`, a checkpoint or a norm can see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnshard.layout.partition import P, block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

ALIGN_bytes = 128


@dataclass(frozen=True)
class Piece:
    """One leaf's place in a bucket: full shape, padded block shape, offset in elements. `slot`: of a slot of
    its state, which goes to the leaf's owner with it."""

    path: str
    shape: tuple[int, ...]
    layout: P
    block: tuple[int, ...]
    offset: int
    slot: str = ""

    @property
    def key(self) -> str | tuple[str, str]:
        """What its tensor is called among those of a bucket: the path, of a slot both."""
        return (self.path, self.slot) if self.slot else self.path

    @property
    def numel(self) -> int:
        """Elements of the padded block."""
        return math.prod(self.block)


@dataclass(frozen=True)
class Bucket:
    """One collective: leaves of `unit` exchanged over `axes` as `dtype`. `numel`: of one rank's row."""

    name: str
    unit: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    numel: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves in it."""
        return tuple(p.path for p in self.pieces if not p.slot)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's row on the wire."""
        return self.numel * self.dtype.itemsize


def make_buckets(
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    layout: Callable[[LayoutSpec], P],
    dtype: Callable[[LayoutSpec], torch.dtype],
    purpose: str,
    apart: Callable[[LayoutSpec], object] = lambda spec: None,
) -> tuple[Bucket, ...]:
    """Group leaves by (unit, axes, dtype), in order of the tree.

    Args:
        layout, dtype: which of a spec's layouts and dtypes travel.
        purpose: first part of the buckets' names ("gather", "reduce", ...).
        apart: leaves for which this differs do not share a bucket either.
    """
    groups: dict[tuple[str, tuple[str, ...], torch.dtype, object], list[str]] = {}
    for path, spec in specs.items():
        key = (spec.unit, mesh.ordered(layout(spec).axes), dtype(spec), apart(spec))
        groups.setdefault(key, []).append(path)
    out: list[Bucket] = []
    for (unit, axes, wire, _), paths in groups.items():
        pieces, numel = _place({p: specs[p] for p in paths}, mesh, layout, wire)
        name = _unused(f"{purpose}/{unit}", {b.name for b in out})
        out.append(Bucket(name, unit, axes, wire, pieces, numel))
    return tuple(out)


def _unused(name: str, taken: set[str]) -> str:
    """`name`, or the first of `name:1`, `name:2`, ... that no other bucket has."""
    return next(n for n in (name, *(f"{name}:{i}" for i in range(1, len(taken) + 2))) if n not in taken)


def _place(
    specs: Mapping[str, LayoutSpec], mesh: Mesh, layout: Callable[[LayoutSpec], P], dtype: torch.dtype
) -> tuple[tuple[Piece, ...], int]:
    blocks = [block_shape(spec.shape, layout(spec), mesh) for spec in specs.values()]
    starts, total = _aligned([math.prod(b) for b in blocks], dtype)
    pieces = tuple(
        Piece(path, spec.shape, layout(spec), block, start)
        for (path, spec), block, start in zip(specs.items(), blocks, starts, strict=True)
    )
    return pieces, total


def summed_whole(bucket: Bucket, specs: Mapping[str, LayoutSpec], axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes`, over which gradients are summed, whose ranks then have the same.

    That is no axis of the bucket, and none that splits its leaves while they compute.
    """
    split = (*bucket.axes, *specs[bucket.paths[0]].compute.axes)
    return tuple(a for a in axes if a not in split)


def end_to_end(bucket: Bucket, mesh: Mesh) -> bool:
    """Whether each leaf is the blocks of the bucket's ranks one after another, and a row blocks without gaps:
    a collective can then read and write leaves where they lie."""
    ranks = mesh.axes_size(bucket.axes)
    split = all(p.layout.axes == p.layout.entries(0) == bucket.axes for p in bucket.pieces)  # none is Fused
    whole = all(math.prod(p.shape) == ranks * p.numel for p in bucket.pieces)
    return split and whole and sum(p.numel for p in bucket.pieces) == bucket.numel


def leaf_runs(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """Where its full leaves lie when they share one memory, (start, length) in elements; of how many."""
    sizes = [math.prod(p.shape) for p in bucket.pieces]
    starts, total = _aligned(sizes, bucket.dtype)
    return list(zip(starts, sizes, strict=True)), total


def _aligned(sizes: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Starts of runs of these sizes, each at a multiple of 128 bytes, and where the next one would start.

    What is shorter than 128 bytes ends where it ends: a scalar is no reason to send so many.
    """
    step = max(1, ALIGN_bytes // dtype.itemsize)
    starts, at, end = [], 0, 0
    for size in sizes:
        starts.append(at)
        end = at + size
        at = -(-end // step) * step
    return starts, at if end > step else end


Part = tuple[str, tuple[int, ...], P]  # of what goes to an owner: "" or a slot, its full shape, its layout


def owner_buckets(
    reduced: Sequence[Bucket],
    dtypes: Mapping[str, torch.dtype],
    parts: Mapping[str, Sequence[Part]],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
) -> dict[str, list[Bucket]]:
    """What goes to the owners of whole leaves, by the reduced bucket after which all of it is there.

    Each of n ranks owns one of n leaves of one shape; as many such groups as there are travel together. What
    is left at the end is spread over the ranks as evenly as it can be: a rank's row may have gaps.

    Args:
        reduced: in the order in which their gradients arrive.
        dtypes: by path, of what is sent of leaves that have owners.
        parts: by path, what is sent: the leaf itself first.
    """
    waiting: dict[Any, dict[Any, list[str]]] = {}  # by what travels together, then by shape
    out: dict[str, list[Bucket]] = {}
    for bucket in reduced:
        for path in (p for p in bucket.paths if p in dtypes):
            spec = specs[path]
            layout = spec.optimizer.contiguous
            tiers = spec.updated_on, spec.optimizer_memory, spec.memory
            together = mesh.ordered(layout.axes), dtypes[path], tiers
            waiting.setdefault(together, {}).setdefault(tuple(parts[path]), []).append(path)
        for together, shapes in waiting.items():
            n, last = mesh.axes_size(together[0]), bucket is reduced[-1]
            rows: list[list[tuple[str, Part]]] = [[] for _ in range(n)]
            turn = 0
            for own_parts, paths in shapes.items():
                while len(paths) >= n or (last and paths):
                    some = [paths.pop(0) for _ in range(min(n, len(paths)))]
                    own = ["" for _ in range(n)]
                    for path in some:
                        own[turn % n], turn = path, turn + 1
                    for row, path in zip(rows, own, strict=True):
                        row += [(path, part) for part in own_parts]
            if rows[0]:
                names = {b.name for some in out.values() for b in some}
                name = _unused(bucket.name.replace("reduce", "owners", 1), names)
                made = _owned(name, bucket.unit, *together[:2], rows, mesh)
                out.setdefault(bucket.name, []).append(made)
    return out


def _owned(
    name: str, unit: str, axes: tuple[str, ...], dtype: torch.dtype,
    rows: Sequence[Sequence[tuple[str, Part]]], mesh: Mesh,
) -> Bucket:  # fmt: skip
    """The bucket of rows, one for each owner: paths, or "", and what is sent of them."""
    blocks = [block_shape(shape, layout, mesh) for _, (_, shape, layout) in rows[0]]
    starts, numel = _aligned([math.prod(b) for b in blocks], dtype)
    pieces = tuple(
        Piece(path, shape, layout, block, owner * numel + start, slot)
        for owner, row in enumerate(rows)
        for (path, (slot, shape, layout)), block, start in zip(row, blocks, starts, strict=True)
        if path
    )
    return Bucket(name, unit, axes, dtype, pieces, numel * len(rows))


def of_owner(bucket: Bucket, place: int, ranks: int) -> Bucket:
    """The leaves that one of the ranks owns, in its row."""
    numel = bucket.numel // ranks
    mine = [p for p in bucket.pieces if p.offset // numel == place]
    return replace(
        bucket, pieces=tuple(replace(p, offset=p.offset - place * numel) for p in mine), numel=numel
    )


def wire_dtype(spec: LayoutSpec) -> torch.dtype:
    """What a gathered leaf travels as: its own choice, or the narrower of storage and compute."""
    return spec.wire_dtype or min(spec.storage_dtype, spec.compute_dtype, key=lambda d: d.itemsize)
