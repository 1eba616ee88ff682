"""Moves: what gathers, reductions, transfers and packing do to memory, line by line; see `effects`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fnshard.analysis.footprint import Entry, Footprint
from fnshard.analysis.lifetimes import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    Flight,
    Held,
    Parts,
    Walk,
    held_in,
)
from fnshard.analysis.transport import Transport
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.buckets import Bucket, Piece, leaf_runs
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    AllReduce,
    Cast,
    Gather,
    Instruction,
    Local,
    Publish,
    ReduceScatter,
    ToDevice,
    ToHost,
    Wait,
    in_place_if_shared,
    keeps_own_row,
    updated_at_once,
)
from fnshard.layout.spec import LayoutSpec, block_slices

FootprintOf = Callable[[str, bool, Sequence[Entry]], Footprint]


@dataclass
class Rank:
    """What effects need beside the walk.

    `footprint`: of a kernel (by name, backward or not). `update_bytes`: what an Update of a bucket takes
    beside what it changes.
    """

    walk: Walk
    transport: Transport
    footprint: FootprintOf
    update_bytes: Callable[[Bucket, bool], int]
    rank: int
    stride_of: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)

    @property
    def specs(self) -> Mapping[str, LayoutSpec]:
        return self.walk.schedule.specs

    @property
    def on_cpu(self) -> bool:
        return self.walk.device.type == "cpu"

    def bucket(self, line: Any) -> Bucket:
        return self.walk.schedule.buckets[line.bucket]


# ------------------------------------------------------------------ leaves


def cast(on: Rank, line: Cast) -> None:
    """Stored leaves -> leaves in compute dtype."""
    for path, stored, out in zip(on.bucket(line).paths, line.reads, line.writes, strict=True):
        on.walk.set(out, on.walk.like(on.walk.names[stored], GATHERED, on.specs[path].compute_dtype))


def gather(on: Rank, line: Gather | Publish) -> None:
    """Pack, or write into leaves that the ranks share; issue."""
    walk, bucket = on.walk, on.bucket(line)
    if on.transport.shares_memory(bucket.axes) and in_place_if_shared(line, walk.schedule):
        total = leaf_runs(bucket)[1] * bucket.dtype.itemsize
        flight = on.transport.gather_leaves(total, len(bucket.pieces), bucket.axes)
        return walk.set(line.writes[0], flight)
    flat = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, bucket.axes)
    if isinstance(line, Publish):
        copies = [_cut_copy(on, p, on.specs[p.path].storage_dtype) for p in bucket.pieces]
        walk.spike(sum(copies), BUFFERS)
    walk.set(line.writes[0], on.transport.all_gather(walk, flat, bucket.axes))


def _cut_copy(on: Rank, piece: Piece, dtype: torch.dtype, flatten: bool = True) -> int:
    """Bytes of this rank's block of a whole leaf, where it is no view: padded, or not contiguous."""
    mesh = on.walk.schedule.mesh
    slices = block_slices(piece.shape, piece.layout, mesh, mesh.coordinate(on.rank))
    extent = tuple(s.stop - s.start for s in slices)
    contiguous = all(n == full for n, full in zip(extent[1:], piece.shape[1:], strict=True))
    if extent == piece.block and (contiguous or not flatten):
        return 0
    return piece.numel * dtype.itemsize


def wait_gather(on: Rank, line: Wait) -> None:
    """Rows -> full leaves, or the leaves where they lie."""
    walk = on.walk
    pieces = on.bucket(line).pieces
    dtype = on.specs[pieces[0].path].compute_dtype
    flight = walk.names[line.reads[0]]
    if flight.slot is not None and flight.slot.views:
        for piece, name in zip(pieces, line.writes, strict=True):
            walk.set(name, walk.view_of(flight.slot, math.prod(piece.shape), dtype))
        return walk.drop(line.reads[0])
    holds = list(flight.holds)
    for held in holds:
        walk.hold(held.block)
    walk.drop(line.reads[0])
    if on.transport.kind == "native":
        walk.release(holds.pop(0).block)  # the row that was sent; what was received is read
    for piece, name in zip(pieces, line.writes, strict=True):
        walk.set(name, walk.tensor(math.prod(piece.shape), dtype, GATHERED))
    on.transport.release(flight)
    for held in holds:
        walk.release(held.block)


def wait_publish(on: Rank, line: Wait) -> None:
    """Rows -> stored leaves, in place."""
    on.transport.release(on.walk.names[line.reads[0]])
    on.walk.drop(line.reads[0])


# ------------------------------------------------------------------ transfers


def to_device(on: Rank, line: ToDevice) -> None:
    """Copies on the device."""
    walk = on.walk
    _count_moved(walk, line)
    if line.into:
        # An accelerator casts on its own side of the link, by way of a temporary in the master's dtype.
        wide = [
            held.bytes for name, held in _named(walk, line) if held.dtype != on.specs[name.path].storage_dtype
        ]
        if wide and not on.on_cpu:
            walk.spike(max(wide), BUFFERS)
        walk.set(line.writes[0], Flight(result=[]))
        return
    made = [_copied(value, lambda h, n=name: walk.like(h, _kind(n))) for name, value in _named(walk, line)]
    walk.set(line.writes[0], Flight(result=made))


def to_host(on: Rank, line: ToHost) -> None:
    """Buffers on the host, from a pool."""
    walk = on.walk
    _count_moved(walk, line)
    if line.into:
        walk.set(line.writes[0], Flight(result=[]))
        return
    made = [
        _copied(value, lambda h, n=name: walk.take_host(h, _kind(n))) for name, value in _named(walk, line)
    ]
    walk.set(line.writes[0], Flight(result=made))


def _count_moved(walk: Walk, line: Instruction) -> None:
    values = [v for _, v in _named(walk, line)]
    whole = [h for v in values for h in ([v.flat] if isinstance(v, Parts) and v.flat else held_in(v))]
    walk.moved[len(walk.moments)] = sum(h.bytes for h in whole)


def _named(walk: Walk, line: Instruction) -> list[tuple[str, Any]]:
    return [(n, walk.names[n]) for n in line.reads]


def _copied(value: Any, make: Callable[[Held], Held]) -> Any:
    """Tensors of a value elsewhere: one for a row and its blocks, or one each; strides stay."""
    if isinstance(value, Held):
        return replace(make(value), shape=value.shape, stride=value.stride)
    if value.flat is not None:
        flat = make(value.flat)
        return Parts({k: replace(v, block=flat.block) for k, v in value.parts.items()}, flat)
    return Parts({k: make(v) for k, v in value.parts.items()})


def _kind(name: ValueName) -> str:
    if name.original.kind is Kind.REDUCED:
        return GRADIENTS
    return BUFFERS if name.original.is_state else ACTIVATIONS


def wait_transfer(on: Rank, line: Wait) -> None:
    """Copies get their names; state was written in place."""
    walk = on.walk
    result = walk.names[line.reads[0]].result
    for name, value in zip(line.writes, result, strict=False):
        if not name.is_state:
            walk.set(name, value)
    walk.drop(line.reads[0])


# ------------------------------------------------------------------ gradients


def _fulls(on: Rank, line: Any) -> dict[str, Held]:
    if line.reads and not line.paths:
        return dict(on.walk.names[line.reads[0]].parts)
    return {p: on.walk.names[n] for p, n in zip(line.paths, line.reads, strict=False)}


def _packed(on: Rank, line: Any) -> None:
    """Gradients that are not contiguous are copied for the packing."""
    on.walk.spike(sum(h.bytes for h in _fulls(on, line).values() if not _contiguous(h)), BUFFERS)


def _contiguous(held: Held) -> bool:
    if held.stride is None or held.shape is None:
        return True
    step = 1
    for size, stride in zip(reversed(held.shape), reversed(held.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def reduce_scatter(on: Rank, line: ReduceScatter) -> None:
    """Pack full gradients; issue."""
    walk, bucket = on.walk, on.bucket(line)
    rows = walk.schedule.mesh.axes_size(bucket.axes)
    if rows == 2 and on.transport.kind == "shared" and keeps_own_row(line, walk.schedule):
        own = [h if _contiguous(h) else walk.like(h, GRADIENTS) for h in _fulls(on, line).values()]
        in_place = updated_at_once(line, walk.schedule)
        flight = on.transport.reduce_pair(bucket.numel, bucket.dtype, bucket.axes, own, in_place)
        return walk.set(line.writes[0], flight)
    packed = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, bucket.axes, rows=rows)
    _packed(on, line)
    walk.set(line.writes[0], on.transport.reduce_scatter(walk, packed, bucket.axes))


def all_reduce(on: Rank, line: AllReduce) -> None:
    """Pack, or send the row that is there."""
    walk, bucket = on.walk, on.bucket(line)
    if line.reads[0].kind is Kind.REDUCED:
        flat = walk.names[line.reads[0]].flat
    else:
        flat = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, line.axes)
        _packed(on, line)
    walk.set(line.writes[0], on.transport.all_reduce(walk, flat, line.axes))


def wait_reduced(on: Rank, line: Wait) -> None:
    """A row of sums, and views of it."""
    walk, bucket = on.walk, on.bucket(line)
    flight = walk.names[line.reads[0]]
    for held in held_in(flight):
        walk.hold(held.block)
    walk.drop(line.reads[0])
    flat = on.transport.reduced(walk, flight)
    value = Parts({p.path: _part(flat, p) for p in bucket.pieces}, flat)
    walk.turn(value, GRADIENTS)
    walk.set(line.writes[0], value)
    for held in held_in(flight):
        walk.release(held.block)


def _part(flat: Held, piece: Piece) -> Held:
    return Held(flat.block, piece.numel, flat.dtype, piece.block)


def local(on: Rank, line: Local) -> None:
    """Full gradients become the reduced ones."""
    walk, bucket = on.walk, on.bucket(line)
    given, parts = _fulls(on, line), {}
    for piece in bucket.pieces:
        if piece.path in given:
            held = given[piece.path]
            parts[piece.path] = (
                walk.like(held, GRADIENTS, bucket.dtype) if held.dtype != bucket.dtype else held
            )
        else:
            parts[piece.path] = walk.tensor(piece.numel, bucket.dtype, GRADIENTS)
    walk.set(line.writes[0], Parts(parts))


def accumulate(on: Rank, line: Accumulate) -> None:
    """The first makes the accumulator, the others add to it."""
    walk, out = on.walk, line.writes[0]
    whole = out.kind is Kind.ACCUMULATED
    new = _fulls(on, line) if whole else dict(walk.names[line.reads[0]].parts)
    dtype = {p: on.specs[p].sum_dtype for p in new}
    if line.first or (whole and not any(n.kind is Kind.ACCUMULATED for n in line.reads)):
        value = None if whole else walk.names[line.reads[0]]
        if out.kind is Kind.HOST:
            made = {p: walk.take_host(replace(h, dtype=dtype[p]), GRADIENTS) for p, h in new.items()}
        else:
            copy = whole or value.flat is None
            made = {
                p: walk.like(h, GRADIENTS, dtype[p]) if copy or h.dtype != dtype[p] else h
                for p, h in new.items()
            }
        walk.set(out, Parts(made, None))
        return
    before = next(n for n in line.reads if n.kind is Kind.ACCUMULATED) if whole else line.reads[1]
    total = walk.names[before]
    if on.on_cpu:  # a CPU adds operands of one dtype
        cast = [h.numel * dtype[p].itemsize for p, h in new.items() if h.dtype != dtype[p]]
        walk.spike(max(cast, default=0))
    walk.set(out, total)
