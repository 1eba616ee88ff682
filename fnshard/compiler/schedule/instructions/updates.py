"""Updates: the end of a step: norms, the sum of scalars, the optimizer and what it gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, MASTER, Kind, ValueName
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Instruction,
    Names,
    OfBucket,
    Price,
    Pricer,
    Schedule,
    Wait,
    bucket_of,
    reduced_names,
)


@dataclass(frozen=True)
class Norms(OfBucket):
    """Squared norms of a bucket's reduced gradients, padding counted out, by the number of `replicas`."""

    replicas: int = 1

    def on_host(self, schedule: Schedule) -> bool:
        return self.reads[0].kind is Kind.HOST

    def bind(self, context: Context) -> Action:
        (name,), (out,), bucket = self.reads, self.writes, bucket_of(self, context)
        later = context.later(self)

        def norm(env: Env) -> None:
            env[out] = context.scalars.squares(bucket, env[name].blocks, self.replicas)

        return lambda env: later(lambda: norm(env))

    def price(self, pricer: Pricer) -> Price:
        return pricer.here_or_on_host(self, float(pricer.bucket(self).row_bytes))


@dataclass(frozen=True)
class ReduceScalars(Instruction):
    """Issue: losses, counts, aux scalars, squared norms and flags of all ranks, in one small sum."""

    lane, trips = COMMUNICATION, 2

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return schedule.summed_axes

    def bind(self, context: Context) -> Action:
        """Pack this rank's numbers; issue."""
        axes, (flight,) = self.axes_of(context.schedule), self.writes
        norms = [n for n in self.reads if n.kind is Kind.NORMS]

        def run(env: Env) -> None:
            env[flight] = context.comm.all_reduce(context.scalars.pack(env, [env[n] for n in norms]), axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """The sums, and what the updates read of them."""
        (flight,), (out,) = wait.reads, wait.writes

        def run(env: Env) -> None:
            handle = env.pop(flight)
            env[out] = context.scalars.unpack(handle.wait())
            handle.release()
            if context.updater is not None:
                env[CONTROL] = env[CONTROL].arrived(env[out])

        return run

    def price(self, pricer: Pricer) -> Price:
        size = 8.0 * pricer.schedule.scalars
        return pricer.copy(size, **pricer.collective("all_reduce", self.axes_of(pricer.schedule), size))


@dataclass(frozen=True)
class _OfOptimizer(OfBucket):
    """Reads a bucket's gradients, then the slots and the parameters of its leaves."""

    def _named(self, kind: Kind) -> dict[str, ValueName]:
        return {n.path: n for n in self.reads[1:] if n.original.kind is kind}

    @property
    def slots(self) -> dict[str, ValueName]:
        """By path, the name its slots go by."""
        return self._named(Kind.SLOTS)

    @property
    def params(self) -> dict[str, ValueName]:
        """By path, the name its stored shard goes by; none where master copies are updated."""
        return self._named(Kind.STORED)

    @property
    def gathered(self) -> list[ValueName]:
        """What earlier UpdateGathers brought."""
        return [n for n in self.reads if n.kind is Kind.FULL]


@dataclass(frozen=True)
class UpdateGather(_OfOptimizer):
    """Issue: the next thing that the optimizer gathers of the leaves in `paths` -> every rank's blocks of it.

    Reads what their Update reads: the optimizer is pure, so it is run up to that gather. What earlier ones
    brought is among `reads`.
    """

    lane, trips, wire_bytes = COMMUNICATION, 1, OfBucket.rows_bytes

    def bind(self, context: Context) -> Action:
        """Run the optimizer up to its next gather; pack what it sends; issue."""
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        updater, send = context.updater, context.updater.bind_send(bucket)
        reduced, (flight,) = self.reads[0], self.writes
        slots, params, earlier = self.slots, self.params, self.gathered

        def run(env: Env) -> None:
            control, event = updater.control(env, bucket)
            if event is not None:
                event.synchronize()
            own_slots, own_params = ({p: env[n] for p, n in names.items()} for names in (slots, params))
            shards = send(env[reduced].blocks, own_slots, own_params, gathered(env, earlier), control)
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            packer.pack_blocks(shards, flat)
            env[flight] = comm.all_gather(flat, bucket.axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Every rank's blocks -> full tensors, by path."""
        (flight,), (out,), packer = wait.reads, wait.writes, context.packer(wait.bucket)
        dtype = bucket_of(wait, context).dtype

        def run(env: Env) -> None:
            handle = env.pop(flight)
            env[out] = packer.unpack_rows(handle.wait(), dtype)
            handle.release()

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket, rows = pricer.bucket(self), self.rows_bytes(pricer.schedule)
        return pricer.copy(2 * bucket.row_bytes, **pricer.collective("gather", bucket.axes, rows))

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        return pricer.copy(2 * wait.rows_bytes(pricer.schedule))


@dataclass(frozen=True)
class Update(_OfOptimizer):
    """The optimizer on one bucket's leaves, in place: reads the gradients, the parameters (but where the host
    updates its master copies), slots, the scalars it must wait for, and what an UpdateGather brought; in the
    order of `paths`.
    """

    @property
    def overwrites(self) -> Names:
        """Gradients are scaled in place."""
        return reduced_names(self.reads)

    def on_host(self, schedule: Schedule) -> bool:
        return schedule.specs[self.paths[0]].updated_on == "host"

    def bind(self, context: Context) -> Action:
        bucket, updater = bucket_of(self, context), context.updater
        update, later = updater.bind(bucket), context.later(self)
        reduced, slots, params, earlier = self.reads[0], self.slots, self.params, self.gathered
        masters = {} if params else dict(zip(self.paths, self.writes[: len(self.paths)], strict=True))

        def run(env: Env) -> None:
            control, event = updater.control(env, bucket)

            def call() -> None:
                if event is not None:
                    event.synchronize()
                own_slots, own_params = ({p: env[n] for p, n in names.items()} for names in (slots, params))
                update(env[reduced].blocks, own_slots, own_params, gathered(env, earlier), control)
                for path, out in masters.items():
                    env[out] = updater.valid_part(path, own_slots[path][MASTER])

            later(call)

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.update(self)


def gathered(env: Env, names: Sequence[ValueName]) -> dict[str, list[Tensor]]:
    """By path, what the optimizer has gathered of the leaf, in its order."""
    out: dict[str, list[Tensor]] = {}
    for name in names:
        for path, full in env[name].items():
            out.setdefault(path, []).append(full)
    return out
