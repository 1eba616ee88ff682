"""Effects: what each instruction does to memory, as `execute` carries it out, line by line.

A table from the type of an instruction to a function that changes a `Walk`. Order matters: what is made
before something else is freed is alive beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fnshard.analysis import movement
from fnshard.analysis.footprint import Entry, Footprint, storage_bytes
from fnshard.analysis.lifetimes import ACTIVATIONS, BUFFERS, GRADIENTS, Held, Parts
from fnshard.analysis.movement import Rank
from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.instructions import (
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
    UpdateGather,
    Wait,
    Zeros,
    is_pooled,
)
from fnshard.runtime.executor.update import MASTER


def play(on: Rank, line: Instruction) -> None:
    """One line."""
    _EFFECTS[type(line)](on, line)


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
        only = walk.blocks[block].refs == held_by_call[block] and walk.blocks[block].slot is None
        number = numbers.setdefault(block, len(numbers))
        entries.append(Entry(number, only, walk.blocks[block].bytes if only else 0))
    footprint = on.footprint(line.kernel, line.backward, tuple(entries))
    _call(on, line, args, numbers, footprint)


def _as_traced(on: Rank, line: Run, args: list[Held]) -> list[Held]:
    """Tangents whose strides are not those of the traced ones are copied."""
    walk = on.walk
    if line.kernel not in on.stride_of:
        on.stride_of[line.kernel] = walk.schedule.kernels[line.kernel].tangent_strides
    for place, stride in on.stride_of[line.kernel]:
        held = args[place]
        if held.stride is not None and held.stride != stride:
            args[place] = replace(walk.like(held, ACTIVATIONS), stride=stride)
            walk.hold(args[place].block)
            walk.let_go(args[place])
            walk.release(held.block)
    return args


def _call(
    on: Rank, line: Run, args: list[Held], numbers: Mapping[int | None, int], footprint: Footprint
) -> None:
    """Arguments die, results appear: the worst moment, then the end."""
    walk = on.walk
    of_number = {number: block for block, number in numbers.items()}
    category = [GRADIENTS if n.kind is Kind.GRADIENT else ACTIVATIONS for n in line.writes]
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
    shared = [i for i in kernel.shared if line.writes[i].kind is Kind.GRADIENT] if line.backward else []
    for place, (name, (output, block)) in enumerate(zip(line.writes, results, strict=True)):
        home = block if output.new is None else made[output.new]
        held = Held(home, math.prod(output.shape), output.dtype, output.shape, output.stride)
        walk.set(name, walk.like(held, GRADIENTS) if place in shared else held)
    for _, block in results:
        walk.release(block)


def _free(on: Rank, line: Free) -> None:
    for name in line.drops:
        if is_pooled(name):
            late = name.original.kind is Kind.REDUCED and not on.on_cpu
            on.walk.give_host(on.walk.names[name], late=late)
        on.walk.drop(name)


def _add(on: Rank, line: Add) -> None:
    a, b = (on.walk.names[n] for n in line.reads)
    dtype = torch.promote_types(a.dtype, b.dtype)
    total = (
        a
        if line.owned
        else replace(on.walk.like(a, on.walk.blocks[a.block].category, dtype), stride=a.stride)
    )
    on.walk.set(line.writes[0], total)


def _zeros(on: Rank, line: Zeros) -> None:
    like = line.like
    block = on.walk.new(storage_bytes(like.shape, like.stride, like.dtype), ACTIVATIONS)
    on.walk.set(line.writes[0], Held(block, math.prod(like.shape), like.dtype, like.shape, like.stride))


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
    vector = walk.tensor(walk.schedule.scalars, torch.float64, BUFFERS)
    axes = mesh.ordered(mesh.data_axes)
    walk.set(line.writes[0], on.transport.all_reduce(walk, vector, axes))


def _wait_scalars(on: Rank, line: Wait) -> None:
    walk = on.walk
    flight = walk.names[line.reads[0]]
    on.transport.release(flight)
    walk.set(line.writes[0], flight.result)
    walk.drop(line.reads[0])


def _update(on: Rank, line: Update) -> None:
    walk = on.walk
    if on.on_cpu or on.specs[line.paths[0]].updated_on != "host":
        walk.spike(on.update_bytes(on.bucket(line), "scalars" in line.reads))
    for path, out in zip(line.paths, line.writes, strict=False):
        if out.is_copy(Kind.HOST, Kind.STORED):
            walk.set(out, walk.names[line.slots[path]].parts[MASTER])


def _update_gather(on: Rank, line: UpdateGather) -> None:
    """The optimizer up to its gather; pack; issue."""
    walk, bucket = on.walk, on.bucket(line)
    if on.on_cpu or on.specs[line.paths[0]].updated_on != "host":
        walk.spike(bucket.row_bytes)  # what is sent, before it is packed
    flat = on.transport.send_buffer(walk, bucket.numel, bucket.dtype, bucket.axes)
    walk.set(line.writes[0], on.transport.all_gather(walk, flat, bucket.axes))


def _wait_update_gather(on: Rank, line: Wait) -> None:
    walk, bucket = on.walk, on.bucket(line)
    made = {p.path: walk.tensor(math.prod(p.shape), bucket.dtype, BUFFERS) for p in bucket.pieces}
    walk.set(line.writes[0], Parts(made))
    on.transport.release(walk.names[line.reads[0]])
    walk.drop(line.reads[0])


_WAITS: dict[str, Callable[[Rank, Wait], None]] = {
    "gather": movement.wait_gather,
    "publish": movement.wait_publish,
    "reduce_scatter": movement.wait_reduced,
    "all_reduce": movement.wait_reduced,
    "reduce_scalars": _wait_scalars,
    "update_gather": _wait_update_gather,
    "to_device": movement.wait_transfer,
    "to_host": movement.wait_transfer,
}
_EFFECTS: dict[type, Callable[[Rank, Any], None]] = {
    Run: _run, Free: _free, Add: _add, Zeros: _zeros, Cast: movement.cast, Gather: movement.gather,
    Publish: movement.gather, Wait: lambda on, line: _WAITS[line.of](on, line), Local: movement.local,
    ReduceScatter: movement.reduce_scatter, AllReduce: movement.all_reduce, Accumulate: movement.accumulate,
    Norms: _norms, ReduceScalars: _reduce_scalars, Update: _update, UpdateGather: _update_gather,
    ToDevice: movement.to_device, ToHost: movement.to_host,
}  # fmt: skip
