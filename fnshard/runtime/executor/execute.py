"""Execute: a loop over a schedule's instructions, each bound once to what it needs.

Collectives are an argument, so the same loop runs on a process group, on simulated ranks, and in
the adversarial mode of tests. Buffers are allocated and freed on the compute stream and collectives
are issued from it; a handle's wait makes that stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import Kind, ValueName
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
    Schedule,
    ToDevice,
    ToHost,
    Update,
    UpdateGather,
    Wait,
    Zeros,
    is_pooled,
    keeps_own_row,
    updated_at_once,
)
from fnshard.errors import CollectiveError
from fnshard.runtime.executor import movement, optimizer_step
from fnshard.runtime.executor.context import Action, Context, Env, Reduced, on_host


def bind(context: Context, part: slice = slice(None)) -> Callable[[Env], Env]:
    """A function that runs the schedule, or a part of its lines, on an environment and returns it.

    A collective that fails in it is a `CollectiveError` that begins with the instruction and its unit.
    """
    numbers, lines = range(len(context.schedule.instructions))[part], context.schedule.instructions
    actions: list[Action] = [_BIND[type(lines[n])](lines[n], context) for n in numbers]
    worker = context.worker
    if worker is not None:
        waits = _meets_worker(context.schedule)[part]
        actions = [_behind_worker(a, context) if w else a for a, w in zip(actions, waits, strict=True)]
    monitor = getattr(context.comm, "monitor", None)
    if monitor is not None:
        actions = [_named(monitor, n, lines[n], a) for n, a in zip(numbers, actions, strict=True)]
    if context.watch is not None:
        actions = [context.watch(n, lines[n], a) for n, a in zip(numbers, actions, strict=True)]
    finish = context.transfers.finish if context.transfers else None

    def run(env: Env) -> Env:
        number = 0
        try:
            for number, action in zip(numbers, actions, strict=True):  # noqa: B007  (known when one fails)
                action(env)
            if worker is not None:
                worker.wait()
        except CollectiveError as error:
            raise CollectiveError(f"{_where(lines[number], number)}: {error}") from error
        except torch.OutOfMemoryError as error:
            if not getattr(error, "__notes__", ()):  # the worker's says where it was
                error.add_note(f"It was in {_where(lines[number], number)}.")
            raise
        finally:  # after a failure too: what is under way still writes to memory that is about to be freed
            if finish:
                finish()
        return env

    return run


def _behind_worker(action: Action, context: Context) -> Action:
    def run(env: Env) -> None:
        context.transfers.join()
        action(env)

    return run


def _meets_worker(schedule: Schedule) -> list[bool]:
    """By line, whether it reads what the worker may still make, or changes what that may still read."""
    out, made, read = [], set(), set()
    for line in schedule.instructions:
        arrives = isinstance(line, Wait) and any(n.is_copy(Kind.HOST, Kind.REDUCED) for n in line.writes)
        if not arrives and on_host(line, schedule):
            made |= set(line.writes)
            read |= set(line.reads)
            out.append(False)
            continue
        gone = {n for n in getattr(line, "drops", ()) if not _is_workers(n)}
        out.append(bool(made & {*line.reads, *line.writes, *gone} or read & {*line.writes, *gone}))
        if out[-1]:
            made, read = set(), set()
        if arrives:  # a stream has it, the host may not
            made |= set(line.writes)
    return out


def _is_workers(name: ValueName) -> bool:
    """Whether the worker drops the value itself: gradients and masters on the host."""
    return name.is_copy(Kind.HOST, Kind.REDUCED, Kind.STORED)


def _named(monitor: Any, number: int, line: Instruction, action: Action) -> Action:
    """What a wait that does not block is for, in case nobody comes."""
    if not isinstance(line, Wait):
        return action
    where = _where(line, number)

    def run(env: Env) -> None:
        monitor.where = where
        action(env)

    return run


def _where(line: Instruction, number: int) -> str:
    return f"line {number} of the schedule, {line.phase} {line.unit} {line.verb} {line.detail}"


# ------------------------------------------------------------------ kernels and values


def _run(line: Run, context: Context) -> Action:
    pair = context.kernels[line.kernel]
    kernel = context.schedule.kernels[line.kernel]
    fn = pair[1] if line.backward else pair[0]
    reads, writes, drops, freed = line.reads, line.writes, line.drops, context.freed
    strides = kernel.tangent_strides if line.backward else ()
    shared = [i for i in kernel.shared if writes[i].kind is Kind.GRADIENT] if line.backward else []

    def run(env: Env) -> None:
        args = [env[n] for n in reads]
        for index, stride in strides:
            if args[index].stride() != stride:
                args[index] = torch.empty_strided(
                    args[index].shape, stride, dtype=args[index].dtype, device=args[index].device
                ).copy_(args[index])
        dead = [env.pop(n) for n in drops] if freed else None
        if not freed:
            for n in drops:
                del env[n]
        outs = fn(args)
        for n, value in zip(writes, outs, strict=True):
            env[n] = value
        for i in shared:
            env[writes[i]] = outs[i].clone()
        if freed:
            for n, value in zip(drops, dead, strict=True):
                freed(n, value)

    return run


def _free(line: Free, context: Context) -> Action:
    drops, freed, transfers = line.drops, context.freed, context.transfers
    pooled = {n for n in drops if is_pooled(n)}
    read_on_host = [n for n in drops if _is_workers(n)]
    others, later = [n for n in drops if n not in read_on_host], context.later(line)

    def let_go(env: Env, names: Sequence[ValueName]) -> None:
        for n in names:
            value = env.pop(n)
            if freed:
                freed(n, value)
            if n in pooled:
                transfers.give(value)

    def run(env: Env) -> None:
        let_go(env, others)
        if read_on_host:
            later(lambda: let_go(env, read_on_host))

    return run


def _add(line: Add, context: Context) -> Action:
    (a, b), (out,), owned = line.reads, line.writes, line.owned

    def run(env: Env) -> None:
        env[out] = env[a].add_(env[b]) if owned else env[a] + env[b]

    return run


def _zeros(line: Zeros, context: Context) -> Action:
    like, (out,) = line.like, line.writes

    def run(env: Env) -> None:
        env[out] = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()

    return run


# ------------------------------------------------------------------ gradients


def _fulls(line: Instruction) -> Callable[[Env], Mapping[str, Tensor]]:
    """How to read full gradients: one value per leaf, or an accumulator of all."""
    if line.reads and not line.paths:
        (name,) = line.reads
        return lambda env: env[name]
    named = dict(zip(line.paths, line.reads, strict=False))  # behind them, an accumulator's earlier value
    return lambda env: {p: env[n] for p, n in named.items()}


def _reduce_scatter(line: ReduceScatter, context: Context) -> Action:
    bucket, packer, comm = context.schedule.buckets[line.bucket], context.packer(line.bucket), context.comm
    fulls, (flight,) = _fulls(line), line.writes
    pair = getattr(comm, "reduce_pair", None) if keeps_own_row(line, context.schedule) else None
    in_place = pair is not None and updated_at_once(line, context.schedule)

    def run(env: Env) -> None:
        if pair is not None:
            given = {p: g.contiguous() for p, g in fulls(env).items()}
            pack, add = partial(packer.pack_for_peer, given), partial(packer.add_to_own, given)
            handle = pair(bucket.numel, bucket.dtype, pack, add, bucket.axes, in_place)
            if handle is not None:
                env[flight] = handle
                return
        rows = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes, rows=packer.rows)
        packer.pack_fulls(fulls(env), rows)
        env[flight] = comm.reduce_scatter(rows, bucket.axes)

    return run


def _all_reduce(line: AllReduce, context: Context) -> Action:
    bucket, packer, comm = context.schedule.buckets[line.bucket], context.packer(line.bucket), context.comm
    (flight,), axes = line.writes, line.axes
    if line.reads[0].kind is Kind.REDUCED:
        (name,) = line.reads

        def run(env: Env) -> None:
            env[flight] = comm.all_reduce(env[name].flat, axes)

        return run
    fulls = _fulls(line)

    def run_packed(env: Env) -> None:
        flat = comm.send_buffer(bucket.numel, bucket.dtype, axes)
        packer.pack_fulls(fulls(env), flat)
        env[flight] = comm.all_reduce(flat, axes)

    return run_packed


def _wait_reduced(line: Wait, context: Context) -> Action:
    (flight,), (out,), packer = line.reads, line.writes, context.packer(line.bucket)

    def run(env: Env) -> None:
        handle = env.pop(flight)
        flat = handle.wait()
        env[out] = Reduced(packer.blocks(flat), flat)
        handle.release()

    return run


def _local(line: Local, context: Context) -> Action:
    bucket, packer, device = (
        context.schedule.buckets[line.bucket],
        context.packer(line.bucket),
        context.mesh.device,
    )
    fulls, (out,) = _fulls(line), line.writes

    def run(env: Env) -> None:
        given = fulls(env)
        missing = {
            p.path: torch.zeros(p.block, dtype=bucket.dtype, device=device)
            for p in bucket.pieces
            if p.path not in given
        }
        blocks = packer.cut({**given}) if not missing else {}
        if missing:
            blocks = {p.path: given.get(p.path, missing.get(p.path)) for p in bucket.pieces}
        cast = movement.cast_together(list(blocks.values()), bucket.dtype)
        env[out] = Reduced(dict(zip(blocks, cast, strict=True)))

    return run


def _accumulate(line: Accumulate, context: Context) -> Action:
    specs, (out,), first = context.schedule.specs, line.writes, line.first
    if out.kind is Kind.ACCUMULATED:
        return _accumulate_local(line, context)
    new, *before = line.reads
    take = context.transfers.take if out.kind is Kind.HOST else None
    later = context.later(line)

    def add(env: Env) -> None:
        value: Reduced = env[new]
        if first and take:  # what a transfer brought goes back to its pool
            like = {p: torch.empty_like(b, dtype=specs[p].sum_dtype, device="meta")
                    for p, b in value.blocks.items()}  # fmt: skip
            env[out] = Reduced({p: take(like[p], for_host=True).copy_(b) for p, b in value.blocks.items()})
            return
        if first:
            copy = value.flat is None  # a local gradient may be somebody else's tensor too
            env[out] = Reduced({p: b.to(specs[p].sum_dtype, copy=copy) for p, b in value.blocks.items()})
            return
        total: Reduced = env.pop(before[0])
        for path, block in value.blocks.items():
            total.blocks[path].add_(block)
        env[out] = total

    return lambda env: later(lambda: add(env))


def _accumulate_local(line: Accumulate, context: Context) -> Action:
    specs, (out,) = context.schedule.specs, line.writes
    fulls = _fulls(line)
    before = next((n for n in line.reads if n.kind is Kind.ACCUMULATED), None)

    def run(env: Env) -> None:
        new = fulls(env)
        if before is None:
            env[out] = {p: g.to(specs[p].sum_dtype, copy=True) for p, g in new.items()}
            return
        total = env.pop(before)
        for path, gradient in new.items():
            total[path].add_(gradient)
        env[out] = total

    return run


# ------------------------------------------------------------------ the table


def _wait(line: Wait, context: Context) -> Action:
    return _WAITS[line.of](line, context)


_WAITS: dict[str, Callable[[Wait, Context], Action]] = {
    "gather": movement.wait_gather,
    "publish": movement.wait_publish,
    "reduce_scatter": _wait_reduced,
    "all_reduce": _wait_reduced,
    "reduce_scalars": optimizer_step.wait_scalars,
    "update_gather": optimizer_step.wait_update_gather,
    "to_device": movement.wait_transfer,
    "to_host": movement.wait_transfer,
}
_BIND: dict[type, Callable[[Any, Context], Action]] = {
    Run: _run, Free: _free, Add: _add, Zeros: _zeros, Cast: movement.cast, Gather: movement.gather,
    Publish: movement.gather, ToDevice: movement.to_device, ToHost: movement.to_host,
    Wait: _wait, ReduceScatter: _reduce_scatter, AllReduce: _all_reduce, Local: _local,
    Accumulate: _accumulate, Norms: optimizer_step.norms, ReduceScalars: optimizer_step.reduce_scalars,
    UpdateGather: optimizer_step.update_gather, Update: optimizer_step.update,
}  # fmt: skip


def cut_batch(values: Mapping[str, Tensor], whole: set[str], parts: int) -> list[dict[str, Tensor]]:
    """Micro-batches: views of each leaf's parts along dim 0; whole ones uncut."""
    cut = {n: [v] * parts if n in whole or parts == 1 else v.chunk(parts) for n, v in values.items()}
    return [{n: each[micro] for n, each in cut.items()} for micro in range(parts)]
