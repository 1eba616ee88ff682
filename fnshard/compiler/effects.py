"""Effects: what each instruction does to memory, as `execute` carries it out, line by line.

A table from the type of an instruction to a function that changes a `Walk`. Order matters: what is made
before something else is freed is alive beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fnshard.compiler.footprint import Entry, Footprint, storage_bytes
from fnshard.compiler.schedule import (
    Accumulate,
    Add,
    AllReduce,
    Cast,
    Free,
    Gather,
    Instruction,
    Local,
    Norms,
    Publish,
    ReduceScalars,
    ReduceScatter,
    Run,
    ToDevice,
    ToHost,
    Update,
    Wait,
    Zeros,
)
from fnshard.compiler.transport import Transport
from fnshard.compiler.walk import (
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
from fnshard.runtime.buckets import Bucket, Piece
from fnshard.spec import LayoutSpec, block_slices

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
    update_bytes: Callable[[Bucket], int]
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

    def play(self, line: Instruction) -> None:
        """One line."""
        _EFFECTS[type(line)](self, line)


# ------------------------------------------------------------------ kernels and values


def _run(on: Rank, line: Run) -> None:
    walk = on.walk
    args = [walk.names[n] for n in line.reads]
    for held in args:
        walk.hold(held.block)
    if line.backward:
        args = _as_traced(on, line, args)
    for name in line.drops:
        walk.drop(name)
    held_by_call = Counter(held.block for held in args)
    numbers: dict[int | None, int] = {}
    entries = []
    for place, held in enumerate(args):
        block = held.block
        if block is None:
            entries.append(Entry(-1 - place))
            continue
        only = walk.blocks[block].refs == held_by_call[block]
        number = numbers.setdefault(block, len(numbers))
        entries.append(Entry(number, only, walk.blocks[block].bytes if only else 0))
    footprint = on.footprint(line.kernel, line.backward, tuple(entries))
    _call(on, line, args, numbers, footprint)


def _as_traced(on: Rank, line: Run, args: list[Held]) -> list[Held]:
    """Tangents whose strides are not those of the traced ones are copied."""
    walk = on.walk
    if line.kernel not in on.stride_of:
        on.stride_of[line.kernel] = _tangent_strides(walk.schedule.kernels[line.kernel])
    for place, stride in on.stride_of[line.kernel]:
        held = args[place]
        if held.stride is not None and held.stride != stride:
            args[place] = replace(walk.like(held, ACTIVATIONS), stride=stride)
            walk.hold(args[place].block)
            walk.let_go(args[place])
            walk.release(held.block)
    return args


def _tangent_strides(kernel: Any) -> list[tuple[int, tuple[int, ...]]]:
    nodes = [n for n in kernel.backward.graph.nodes if n.op == "placeholder"]
    return [
        (i, tuple(node.meta["val"].stride()))
        for i, (ref, node) in enumerate(zip(kernel.backward_inputs, nodes, strict=True))
        if ref.kind == "tangent"
    ]


def _call(
    on: Rank, line: Run, args: list[Held], numbers: Mapping[int | None, int], footprint: Footprint
) -> None:
    """Arguments die, results appear: the worst moment, then the end."""
    walk = on.walk
    of_number = {number: block for block, number in numbers.items()}
    category = [GRADIENTS if n.startswith("g:") else ACTIVATIONS for n in line.writes]
    first = {o.new: c for o, c in reversed(list(zip(footprint.outputs, category, strict=True)))}
    for number in footprint.freed:
        for held in args:
            if held.block == of_number[number]:
                walk.release(held.block)
    left = [h for h in args if h.block is None or numbers[h.block] not in footprint.freed]
    made = {j: walk.new(footprint.new_bytes[j], first[j]) for j in footprint.alive}
    walk.spike(footprint.workspace_bytes)
    results = []
    for output in footprint.outputs:
        block = of_number.get(output.given) if output.new is None else None
        results.append((output, block))
        walk.hold(block)
    for held in left:
        walk.release(held.block)
    for j, size in enumerate(footprint.new_bytes):
        if j not in made:
            made[j] = walk.new(size, first[j])
    kernel = walk.schedule.kernels[line.kernel]
    shared = [i for i in kernel.shared if line.writes[i].startswith("g:")] if line.backward else []
    for place, (name, (output, block)) in enumerate(zip(line.writes, results, strict=True)):
        home = block if output.new is None else made[output.new]
        held = Held(home, math.prod(output.shape), output.dtype, output.shape, output.stride)
        walk.set(name, walk.like(held, GRADIENTS) if place in shared else held)
    for _, block in results:
        walk.release(block)


def _free(on: Rank, line: Free) -> None:
    for name in line.drops:
        if name.startswith("h:") and not name.startswith("h:s:"):
            on.walk.give_host(on.walk.names[name])
        on.walk.drop(name)


def _add(on: Rank, line: Add) -> None:
    a, b = (on.walk.names[n] for n in line.reads)
    dtype = torch.promote_types(a.dtype, b.dtype)
    total = a if line.owned else replace(on.walk.like(a, on.walk.blocks[a.block].category, dtype), stride=a.stride)
    on.walk.set(line.writes[0], total)


def _zeros(on: Rank, line: Zeros) -> None:
    like = line.like
    block = on.walk.new(storage_bytes(like.shape, like.stride, like.dtype), ACTIVATIONS)
    on.walk.set(line.writes[0], Held(block, math.prod(like.shape), like.dtype, like.shape, like.stride))


# ------------------------------------------------------------------ leaves


def _cast(on: Rank, line: Cast) -> None:
    for path, stored, out in zip(on.bucket(line).paths, line.reads, line.writes, strict=True):
        held, dtype = on.walk.names[stored], on.specs[path].compute_dtype
        on.walk.set(out, on.walk.like(held, GATHERED, dtype) if dtype != held.dtype else held)


def _gather(on: Rank, line: Gather | Publish) -> None:
    walk, bucket = on.walk, on.bucket(line)
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


def _wait_gather(on: Rank, line: Wait) -> None:
    walk = on.walk
    pieces = on.bucket(line).pieces
    dtype = on.specs[pieces[0].path].compute_dtype
    flight = walk.names[line.reads[0]]
    holds = list(flight.holds)
    for held in holds:
        walk.hold(held.block)
    _popped(on, line)
    if on.transport.kind == "native":
        walk.release(holds.pop(0).block)  # the row that was sent; what was received is read
    for piece, name in zip(pieces, line.writes, strict=True):
        walk.set(name, walk.tensor(math.prod(piece.shape), dtype, GATHERED))
    on.transport.release(flight)
    for held in holds:
        walk.release(held.block)


def _wait_publish(on: Rank, line: Wait) -> None:
    on.transport.release(on.walk.names[line.reads[0]])
    _popped(on, line)


def _popped(on: Rank, line: Wait) -> None:
    on.walk.drop(line.reads[0])


# ------------------------------------------------------------------ transfers


def _to_device(on: Rank, line: ToDevice) -> None:
    walk = on.walk
    _count_moved(walk, line)
    if line.into:
        walk.set(line.writes[0], Flight(result=[]))
        return
    made = [_copied(value, lambda h, n=name: walk.like(h, _kind(n))) for name, value in _named(walk, line)]
    walk.set(line.writes[0], Flight(result=made))


def _to_host(on: Rank, line: ToHost) -> None:
    walk = on.walk
    _count_moved(walk, line)
    if line.into:
        walk.set(line.writes[0], Flight(result=[]))
        return
    made = [_copied(value, lambda h, n=name: walk.take_host(h, _kind(n))) for name, value in _named(walk, line)]
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


def _kind(name: str) -> str:
    plain = name.removeprefix("h:").removeprefix("t:")
    if plain.startswith("r:"):
        return GRADIENTS
    return BUFFERS if plain.startswith(("s:", "o:")) else ACTIVATIONS


def _wait_transfer(on: Rank, line: Wait) -> None:
    walk = on.walk
    result = walk.names[line.reads[0]].result
    for name, value in zip(line.writes, result, strict=False):
        if not name.startswith(("s:", "o:")):
            walk.set(name, value)
    _popped(on, line)


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


def _reduce_scatter(on: Rank, line: ReduceScatter) -> None:
    walk, bucket = on.walk, on.bucket(line)
    rows = walk.schedule.mesh.axes_size(bucket.axes)
    packed = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, bucket.axes, rows=rows)
    _packed(on, line)
    walk.set(line.writes[0], on.transport.reduce_scatter(walk, packed, bucket.axes))


def _all_reduce(on: Rank, line: AllReduce) -> None:
    walk, bucket = on.walk, on.bucket(line)
    if line.reads[0].startswith("r:"):
        flat = walk.names[line.reads[0]].flat
    else:
        flat = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, line.axes)
        _packed(on, line)
    walk.set(line.writes[0], on.transport.all_reduce(walk, flat, line.axes))


def _wait_reduced(on: Rank, line: Wait) -> None:
    walk, bucket = on.walk, on.bucket(line)
    flight = walk.names[line.reads[0]]
    for held in held_in(flight):
        walk.hold(held.block)
    _popped(on, line)
    flat = on.transport.reduced(walk, flight)
    value = Parts({p.path: _part(flat, p) for p in bucket.pieces}, flat)
    walk.turn(value, GRADIENTS)
    walk.set(line.writes[0], value)
    for held in held_in(flight):
        walk.release(held.block)


def _part(flat: Held, piece: Piece) -> Held:
    return Held(flat.block, piece.numel, flat.dtype, piece.block)


def _local(on: Rank, line: Local) -> None:
    walk, bucket = on.walk, on.bucket(line)
    given, parts = _fulls(on, line), {}
    for piece in bucket.pieces:
        if piece.path in given:
            held = given[piece.path]
            parts[piece.path] = walk.like(held, GRADIENTS, bucket.dtype) if held.dtype != bucket.dtype else held
        else:
            parts[piece.path] = walk.tensor(piece.numel, bucket.dtype, GRADIENTS)
    walk.set(line.writes[0], Parts(parts))


def _accumulate(on: Rank, line: Accumulate) -> None:
    walk, out = on.walk, line.writes[0]
    whole = out.startswith("a:")
    new = _fulls(on, line) if whole else dict(walk.names[line.reads[0]].parts)
    dtype = {p: _accumulator(on.specs[p]) for p in new}
    if line.first or (whole and not any(n.startswith("a:") for n in line.reads)):
        value = None if whole else walk.names[line.reads[0]]
        if out.startswith("h:"):
            made = {p: walk.take_host(replace(h, dtype=dtype[p]), GRADIENTS) for p, h in new.items()}
        else:
            copy = whole or value.flat is None
            made = {
                p: walk.like(h, GRADIENTS, dtype[p]) if copy or h.dtype != dtype[p] else h for p, h in new.items()
            }
        walk.set(out, Parts(made, None))
        return
    before = next(n for n in line.reads if n.startswith("a:")) if whole else line.reads[1]
    total = walk.names[before]
    if on.on_cpu:  # a CPU adds operands of one dtype
        cast = [h.numel * dtype[p].itemsize for p, h in new.items() if h.dtype != dtype[p]]
        walk.spike(max(cast, default=0))
    walk.set(out, total)


def _accumulator(spec: LayoutSpec) -> torch.dtype:
    return torch.promote_types(spec.reduce_dtype, spec.optimizer_dtype)


# ------------------------------------------------------------------ scalars and updates


def _norms(on: Rank, line: Norms) -> None:
    walk = on.walk
    blocks = walk.names[line.reads[0]].parts
    if on.on_cpu:  # a norm in fp32 is taken of the block in fp32
        halves = [h.numel * 4 for h in blocks.values() if h.dtype.itemsize < 4]
        walk.spike(max(halves, default=0))
    walk.set(line.writes[0], walk.tensor(1, torch.float64, BUFFERS))


def _reduce_scalars(on: Rank, line: ReduceScalars) -> None:
    walk, mesh = on.walk, on.walk.schedule.mesh
    vector = walk.tensor(len(line.reads) + 2, torch.float64, BUFFERS)
    axes = mesh.ordered(mesh.data_axes)
    walk.set(line.writes[0], on.transport.all_reduce(walk, vector, axes))


def _wait_scalars(on: Rank, line: Wait) -> None:
    walk = on.walk
    flight = walk.names[line.reads[0]]
    on.transport.release(flight)
    walk.set(line.writes[0], flight.result)
    _popped(on, line)


def _update(on: Rank, line: Update) -> None:
    walk = on.walk
    if on.on_cpu or on.specs[line.paths[0]].update_on != "host":
        walk.spike(on.update_bytes(on.bucket(line)))
    for path, out in zip(line.paths, line.writes, strict=False):
        if out.startswith("h:s:"):
            slots = next(n for n in line.reads if n.removeprefix("t:").startswith(f"o:{path}"))
            walk.set(out, walk.names[slots].parts["master"])


_WAITS: dict[str, Callable[[Rank, Wait], None]] = {
    "gather": _wait_gather,
    "publish": _wait_publish,
    "reduce_scatter": _wait_reduced,
    "all_reduce": _wait_reduced,
    "reduce_scalars": _wait_scalars,
    "to_device": _wait_transfer,
    "to_host": _wait_transfer,
}
_EFFECTS: dict[type, Callable[[Rank, Any], None]] = {
    Run: _run, Free: _free, Add: _add, Zeros: _zeros, Cast: _cast, Gather: _gather, Publish: _gather,
    Wait: lambda on, line: _WAITS[line.of](on, line), ReduceScatter: _reduce_scatter, AllReduce: _all_reduce,
    Local: _local, Accumulate: _accumulate, Norms: _norms, ReduceScalars: _reduce_scalars, Update: _update,
    ToDevice: _to_device, ToHost: _to_host,
}  # fmt: skip
