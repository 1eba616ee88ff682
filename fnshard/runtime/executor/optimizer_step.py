"""Optimizer step: the lines at the end of a step: norms, scalars, the optimizer and its gathers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import Norms, ReduceScalars, Update, UpdateGather, Wait
from fnshard.runtime.executor.context import Action, Context, Env
from fnshard.runtime.executor.update import MASTER


def norms(line: Norms, context: Context) -> Action:
    """Squared norms of a bucket's gradients."""
    (name,), (out,), bucket = line.reads, line.writes, context.schedule.buckets[line.bucket]
    later = context.later(line)

    def norm(env: Env) -> None:
        env[out] = context.scalars.squares(bucket, env[name].blocks, env)

    return lambda env: later(lambda: norm(env))


def reduce_scalars(line: ReduceScalars, context: Context) -> Action:
    """Pack this rank's numbers; issue."""
    axes = context.mesh.ordered(context.mesh.data_axes)
    (flight,) = line.writes
    made = [n for n in line.reads if n.kind is Kind.NORMS]

    def run(env: Env) -> None:
        vector = context.scalars.pack(env, [env[n] for n in made])
        env[flight] = context.comm.all_reduce(vector, axes)

    return run


def wait_scalars(line: Wait, context: Context) -> Action:
    """The sums, and what the updates read of them."""
    (flight,), (out,) = line.reads, line.writes

    def run(env: Env) -> None:
        handle = env.pop(flight)
        env[out] = context.scalars.unpack(handle.wait())
        handle.release()
        if context.updater is not None:
            context.updater.scalars_arrived(env, env[out])

    return run


def update(line: Update, context: Context) -> Action:
    """The optimizer on one bucket's leaves."""
    bucket, name, count = context.schedule.buckets[line.bucket], line.reads[0], len(line.paths)
    run_optimizer = context.updater.bind(bucket)
    slots, params = line.slots, line.params
    wholes = _wholes(line)
    masters = {} if params else dict(zip(line.paths, line.writes[:count], strict=True))
    later = context.later(line)

    def run(env: Env) -> None:
        numbers, there = context.updater.numbers(env, bucket)

        def call() -> None:
            if there is not None:
                there.synchronize()
            held = {p: env[n] for p, n in slots.items()}
            given = {p: env[n] for p, n in params.items()}
            run_optimizer(env[name].blocks, held, given, gathered(env, wholes), numbers)
            for path, out in masters.items():
                env[out] = context.updater.valid_part(path, held[path][MASTER])

        later(call)

    return run


def update_gather(line: UpdateGather, context: Context) -> Action:
    """Run the optimizer up to its next gather; pack what it sends; issue."""
    bucket, packer, comm = context.schedule.buckets[line.bucket], context.packer(line.bucket), context.comm
    name, (flight,), send, wholes = (
        line.reads[0],
        line.writes,
        context.updater.bind_send(bucket),
        _wholes(line),
    )
    slots = {n.path: n for n in line.reads if n.original.kind is Kind.SLOTS}
    params = {n.path: n for n in line.reads if n.original.kind is Kind.STORED}

    def run(env: Env) -> None:
        numbers, there = context.updater.numbers(env, bucket)
        if there is not None:
            there.synchronize()
        held, given = ({p: env[n] for p, n in names.items()} for names in (slots, params))
        shards = send(env[name].blocks, held, given, gathered(env, wholes), numbers)
        flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
        packer.pack_blocks(shards, flat)
        env[flight] = comm.all_gather(flat, bucket.axes)

    return run


def wait_update_gather(line: Wait, context: Context) -> Action:
    """Every rank's blocks -> whole tensors, by path."""
    (flight,), (out,), packer = line.reads, line.writes, context.packer(line.bucket)
    dtype = context.schedule.buckets[line.bucket].dtype

    def run(env: Env) -> None:
        handle = env.pop(flight)
        env[out] = packer.unpack_rows(handle.wait(), dtype)
        handle.release()

    return run


def _wholes(line: UpdateGather | Update) -> list[ValueName]:
    return [n for n in line.reads if n.kind is Kind.WHOLE]


def gathered(env: Env, names: Sequence[ValueName]) -> dict[str, list[Tensor]]:
    """By path, what the optimizer has gathered of the leaf, in its order."""
    out: dict[str, list[Tensor]] = {}
    for name in names:
        for path, whole in env[name].items():
            out.setdefault(path, []).append(whole)
    return out
