"""Movement: leaves brought to where they are read: casts, gathers, and transfers between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.buckets import leaf_runs
from fnshard.compiler.schedule.instructions import (
    Cast,
    Gather,
    Publish,
    ToDevice,
    ToHost,
    Wait,
    in_place_if_shared,
)
from fnshard.runtime.collectives.base import Handle
from fnshard.runtime.executor.context import Action, Context, Env, on_host

# ------------------------------------------------------------------ leaves


def cast(line: Cast, context: Context) -> Action:
    """Stored leaves -> `compute_dtype`, on this rank alone."""
    dtype = context.schedule.specs[context.schedule.buckets[line.bucket].paths[0]].compute_dtype
    reads, writes = line.reads, line.writes

    def run(env: Env) -> None:
        env.update(zip(writes, cast_together([env[n] for n in reads], dtype), strict=True))

    return run


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in a dtype, by one call; one that has it stays itself."""
    out = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t in tensors]
    pairs = [(o, t) for o, t in zip(out, tensors, strict=True) if o is not t]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
    return out


@dataclass(frozen=True)
class InPlace:
    """A gather in flight whose result are flat leaves, not rows."""

    leaves: Handle[list[Tensor]]


def gather(line: Gather | Publish, context: Context) -> Action:
    """Write this rank's blocks into leaves that the ranks share, or pack them; issue."""
    bucket, packer, comm = context.schedule.buckets[line.bucket], context.packer(line.bucket), context.comm
    in_place = getattr(comm, "gather_leaves", None) if in_place_if_shared(line, context.schedule) else None
    runs, total = leaf_runs(bucket)
    pairs, (flight,) = list(zip(bucket.paths, line.reads, strict=True)), line.writes
    publish = isinstance(line, Publish)  # of a leaf that is stored whole: only this rank's block is new

    def run(env: Env) -> None:
        stored = {p: env[n] for p, n in pairs}
        if in_place is not None:
            write = partial(packer.write_blocks, stored)
            handle = in_place(runs, total, bucket.dtype, write, bucket.axes)
            if handle is not None:
                env[flight] = InPlace(handle)
                return
        flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
        packer.pack_blocks(packer.cut(stored) if publish else stored, flat)
        env[flight] = comm.all_gather(flat, bucket.axes)

    return run


def wait_gather(line: Wait, context: Context) -> Action:
    """The leaves in place, or every rank's blocks unpacked into whole leaves."""
    (flight,), packer, specs = line.reads, context.packer(line.bucket), context.schedule.specs
    pieces = context.schedule.buckets[line.bucket].pieces
    writes = {p.path: name for p, name in zip(pieces, line.writes, strict=True)}
    dtype = specs[pieces[0].path].compute_dtype

    def run(env: Env) -> None:
        handle = env.pop(flight)
        if isinstance(handle, InPlace):
            for piece, name, leaf in zip(pieces, line.writes, handle.leaves.wait(), strict=True):
                env[name] = leaf.view(piece.shape)
            return
        leaves = packer.unpack_rows(handle.wait(), dtype)
        handle.release()
        for path, name in writes.items():
            env[name] = leaves[path]

    return run


def wait_publish(line: Wait, context: Context) -> Action:
    """Unpack updated blocks into the stored leaves."""
    (flight,), packer = line.reads, context.packer(line.bucket)
    stored = dict(zip(context.schedule.buckets[line.bucket].paths, line.writes, strict=True))

    def run(env: Env) -> None:
        handle = env.pop(flight)
        packer.unpack_into(handle.wait(), {p: env[n] for p, n in stored.items()})
        handle.release()

    return run


# ------------------------------------------------------------------ transfers


def to_device(line: ToDevice, context: Context) -> Action:
    """Issue copies on the device, or restore stored shards there."""
    reads, (flight,), transfers = line.reads, line.writes, context.transfers
    if line.into:
        return _restore(line, context)

    def run(env: Env) -> None:
        env[flight] = transfers.to_device([env[n] for n in reads])

    return run


def _restore(line: ToDevice, context: Context) -> Action:
    """Master copies that the host has updated -> the stored shards on the device, cast there."""
    reads, (flight,), transfers, updater = line.reads, line.writes, context.transfers, context.updater
    into, later = line.into, context.later(line)

    def run(env: Env) -> None:
        stored = [updater.stored_part(n.path, env[n]) for n in into]
        read_last = transfers.mark()

        def call() -> None:
            env[flight] = transfers.to_device([env[n] for n in reads], stored, read_last)

        later(call)

    return run


def to_host(line: ToHost, context: Context) -> Action:
    """Issue copies on the host, or into state that rests there."""
    reads, (flight,), into, transfers = line.reads, line.writes, line.into, context.transfers

    def run(env: Env) -> None:
        env[flight] = transfers.to_host([env[n] for n in reads], [env[n] for n in into] if into else None)

    return run


def wait_transfer(line: Wait, context: Context) -> Action:
    """What was sent is there; gradients that the host reads, for the host too, or for its worker."""
    (flight,), writes, worker = line.reads, line.writes, context.worker
    read_there = any(n.is_copy(Kind.HOST, Kind.REDUCED) for n in writes)
    if worker is not None and on_host(line, context.schedule):  # the end of the step waits for it
        return lambda env: worker.submit(lambda: env.pop(flight))
    state = {n for n in writes if n.is_state}

    def run(env: Env) -> None:
        handle = env.pop(flight)
        targets = handle.wait(on_host=read_there and worker is None)
        if read_there and worker is not None:
            worker.submit(lambda: handle.wait(on_host=True))
        for n, value in zip(writes, targets, strict=True):
            if n not in state:  # written in place
                env[n] = value

    return run
