"""Buffers: values that `fn` writes to leaves, aggregated over ranks and stored at the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Instruction,
    OfBucket,
    Price,
    Pricer,
    Schedule,
    Wait,
    bucket_of,
    on_arrival,
)
from fnshard.layout.partition import block_slices
from fnshard.layout.spec import Aggregation


@dataclass(frozen=True)
class AggregateBuffers(OfBucket):
    """The issue of one sum over all data axes, of each rank's new values of the leaves in `paths`.

    A mean is weighted by `rows`, this rank's, whose sum travels after the values. For "rank0" the other ranks
    send zeros. A "sum" has the stored value once for each rank; StoreBuffers takes off what is too much.

    Args:
        rules: how each value is aggregated, in the order of `reads`.
    """

    lane, trips = COMMUNICATION, 2

    rules: tuple[Aggregation, ...] = ()
    rows: int = 1

    @property
    def detail(self) -> str:
        counts = {rule: self.rules.count(rule) for rule in dict.fromkeys(self.rules)}
        return f"{self.bucket}: " + ", ".join(f"{n} {rule}" for rule, n in counts.items())

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return schedule.mesh.ordered(schedule.mesh.data_axes)

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        return f"{super().wire_text(schedule)} {' '.join(self.rules)}"

    def numel(self, schedule: Schedule) -> int:
        """Return the elements of the buffer that travels: all values, and the rows where there is a mean."""
        return schedule.buckets[self.bucket].numel + ("mean" in self.rules)

    def wire_bytes(self, schedule: Schedule) -> int:
        return self.numel(schedule) * schedule.buckets[self.bucket].dtype.itemsize

    def bind(self, context: Context) -> Action:
        bucket, comm, axes = bucket_of(self, context), context.comm, self.axes_of(context.schedule)
        packer, numel, (flight,) = context.packer(self.bucket), self.numel(context.schedule), self.writes
        coordinate = context.mesh.coordinate(context.rank)
        is_first = all(coordinate[axis] == 0 for axis in axes)
        pairs, rows = list(zip(self.reads, self.rules, strict=True)), self.rows

        def run(env: Env) -> None:
            # Values overwrite all but gaps, which nobody reads, and the last number, which is the rows.
            flat = comm.send_buffer(numel, bucket.dtype, axes).fill_(rows)
            parts = packer.blocks(flat[: bucket.numel]).values()
            for part, (name, rule) in zip(parts, pairs, strict=True):
                if rule == "rank0" and not is_first:
                    part.zero_()
                else:
                    part.copy_(env[name])
                if rule == "mean":
                    part.mul_(rows)
            env[flight] = comm.all_reduce(flat, axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the sums, and divide those that are means by the rows."""
        packer, bucket = context.packer(wait.bucket), bucket_of(wait, context)
        means = [context.schedule.specs[p].aggregated == "mean" for p in bucket.paths]

        def take(env: Env, flat: Tensor) -> None:
            parts = packer.blocks(flat[: bucket.numel]).values()
            for name, part, mean in zip(wait.writes, parts, means, strict=True):
                env[name] = part.div_(flat[-1]) if mean else part

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        size = float(self.wire_bytes(pricer.schedule))
        return pricer.copy(2 * size, **pricer.collective("all_reduce", self.axes_of(pricer.schedule), size))


@dataclass(frozen=True)
class StoreBuffers(Instruction):
    """A line that copies new values of whole leaves into this rank's stored shards, in place.

    It reads the new values, then the shards, in the order of `writes`.

    Args:
        summed: the leaves whose new value is the sum of those of `ranks` ranks, each of which contains the
            stored one.
    """

    summed: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def detail(self) -> str:
        return f"{len(self.writes)} buffers"

    def bind(self, context: Context) -> Action:
        names = list(zip(self.reads, self.reads[len(self.writes) :], strict=False))
        stores = [self._make_store(name.path, context) for name in self.writes]

        def run(env: Env) -> None:
            for (new, stored), store in zip(names, stores, strict=True):
                store(env[new], env[stored])

        return run

    def _make_store(self, path: str, context: Context) -> Callable[[Tensor, Tensor], None]:
        """Return a function that stores this rank's block of a leaf's new value."""
        # The rank's block of the leaf, and the part of the padded shard that holds it.
        spec, mesh = context.schedule.specs[path], context.mesh
        block = block_slices(spec.shape, spec.storage, mesh, mesh.coordinate(context.rank))
        valid = tuple(slice(0, s.stop - s.start) for s in block)
        surplus = self.ranks - 1 if path in self.summed else 0

        def store(new: Tensor, stored: Tensor) -> None:
            new, stored = new[block], stored[valid]
            stored.copy_(new - surplus * stored.to(new.dtype) if surplus else new)

        return store

    def price(self, pricer: Pricer) -> Price:
        return pricer.copy(2.0 * pricer.bytes_of(self.writes))
