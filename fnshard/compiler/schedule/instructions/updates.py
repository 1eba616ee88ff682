"""Updates: the lines at the end of a step: norms, the sum of scalars, the optimizer and its exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, MASTER, Kind, ValueName
from fnshard.compiler.schedule.buckets import row_of_rank
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    OPTIMIZER,
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
    on_arrival,
    reduced_names,
)
from fnshard.compiler.update.derive import Compute


@dataclass(frozen=True)
class Norms(OfBucket):
    """The squared norms of a bucket's reduced gradients, without their padding.

    Args:
        replicas: the number of ranks that hold the same block; norms are divided by it before they are
            summed.
    """

    replicas: int = 1

    def aliases(self) -> Mapping[ValueName, Names]:
        """Return nothing: norms share memory with nothing."""
        return {}

    def on_host(self, schedule: Schedule) -> bool:
        return self.reads[0].kind is Kind.HOST

    def bind(self, context: Context) -> Action:
        (name,), (out,), bucket = self.reads, self.writes, bucket_of(self, context)
        later = context.later(self)

        def norm(env: Env) -> None:
            env[out] = context.scalars.square_norm(bucket, env[name].blocks, self.replicas)

        return lambda env: later(lambda: norm(env))

    def price(self, pricer: Pricer) -> Price:
        return pricer.here_or_on_host(self, float(pricer.bucket(self).row_bytes))


@dataclass(frozen=True)
class ReduceScalars(Instruction):
    """The issue of one small sum of all ranks' losses, counts, aux scalars, squared norms and flags."""

    lane, trips = COMMUNICATION, 2

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return schedule.summed_axes

    def bind(self, context: Context) -> Action:
        """Pack this rank's numbers, and issue the sum."""
        axes, (flight,) = self.axes_of(context.schedule), self.writes
        norms, made_here = [n for n in self.reads if n.kind is Kind.NORMS], frozenset(self.reads)

        def run(env: Env) -> None:
            vector = context.scalars.pack(env, [env[n] for n in norms], made_here)
            env[flight] = context.comm.all_reduce(vector, axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the sums, and hand updates the numbers that they read."""
        (out,) = wait.writes

        def take(env: Env, vector: Tensor) -> None:
            env[out] = context.scalars.unpack(vector)
            if context.updater is not None:
                env[CONTROL] = env[CONTROL].with_summary(env[out])

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        size = 8.0 * pricer.schedule.scalars
        return pricer.copy(size, **pricer.collective("all_reduce", self.axes_of(pricer.schedule), size))


Parts = dict[str, dict[str, Tensor]]  # the tensors of an update, by path and name


@dataclass(frozen=True)
class Update(OfBucket):
    """A stretch of the optimizer on leaves of one bucket, from one exchange to the next, in place.

    It reads gradients, parameters (except where the host updates its master copies), slots, the scalars that
    it must wait for, and what earlier stretches and their exchanges have made; in the order of `paths`.

    Args:
        number: the number of the stretch among the steps of the leaves' families.
        work: the computation of each leaf, by path.
    """

    number: int = 0
    work: Mapping[str, Compute] = field(default_factory=dict, compare=False, repr=False)

    def on_host(self, schedule: Schedule) -> bool:
        return schedule.specs[self.paths[0]].updated_on == "host"

    @property
    def overwrites(self) -> Names:
        """The gradients, which are scaled in place."""
        return reduced_names(self.reads)

    def aliases(self) -> Mapping[ValueName, Names]:
        """Return the state that results may share memory with.

        A master copy that is sent to the device is the slot's own memory. Values that are handed on may be
        state, and are no gradients.
        """
        gradients = reduced_names(self.reads)
        state = tuple(n for n in self.reads if n not in gradients)
        out = {}
        for name in self.writes:
            if name.kind is Kind.UPDATED:
                out[name] = state
            elif not name.is_state:
                out[name] = tuple(n for n in state if n.original.kind is Kind.SLOTS and n.path == name.path)
        return out

    def _find_names(self, kind: Kind) -> dict[str, ValueName]:
        """Return the values of a kind that it reads, by path."""
        return {n.path: n for n in self.reads if n.original.kind is kind}

    def bind(self, context: Context) -> Action:
        # What it reads: gradients, what earlier steps have made, slots and parameters.
        bucket, updater, later = bucket_of(self, context), context.updater, context.later(self)
        update = updater.bind(self.paths, self.number)
        gradients = reduced_names(self.reads)
        earlier = [n for n in self.reads if n.kind is Kind.UPDATED]
        own_slots, params = self._find_names(Kind.SLOTS), self._find_names(Kind.STORED)
        # What it writes: values for later steps, and master copies for the device. State changes in place.
        handed_on = next((n for n in self.writes if n.kind is Kind.UPDATED), None)
        commits = self.writes[0].original.kind is Kind.STORED
        masters = dict(zip(self.paths, self.writes, strict=False)) if commits and not params else {}

        def run(env: Env) -> None:
            # The control is taken now; gradients are read when the line runs, perhaps in the host's worker.
            control, event = updater.control_for(env, bucket)

            def call() -> None:
                if event is not None:
                    event.synchronize()
                blocks = {p: block for n in gradients for p, block in env[n].blocks.items()}
                known = join_parts([env[n] for n in earlier])
                state = [{p: env[n] for p, n in names.items()} for names in (own_slots, params)]
                out = update(blocks, *state, known, control)
                if handed_on is not None:
                    env[handed_on] = out
                for path, name in masters.items():
                    env[name] = updater.valid_part(path, state[0][path][MASTER])

            later(call)

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.update(self)


def join_parts(parts: Sequence[Parts]) -> Parts:
    """Join what several lines have made of leaves, by path and name."""
    out: Parts = {}
    for each in parts:
        for path, own in each.items():
            out[path] = {**out.get(path, {}), **own}
    return out


class Nothing:
    """A flight that carries nothing, of an exchange in a step that all ranks skip."""

    def wait(self) -> None:
        return None

    def release(self) -> None:
        return None


@dataclass(frozen=True)
class ReduceUpdate(OfBucket):
    """The issue of a sum of an update's values, mostly small ones, over `axes` that split leaves.

    Args:
        how: "sum" or "max".
        sends, receives: the names of the values, by path.
        shapes: the shapes of the values, by path.
        dtype: the dtype in which they travel.
    """

    lane, trips, outgoing = COMMUNICATION, 2, True

    how: str = "sum"
    dtype: torch.dtype = torch.float32
    sends: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    receives: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    shapes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for own in self.shapes.values() for shape in own)

    def wire_bytes(self, schedule: Schedule) -> int:
        ranks = schedule.mesh.axes_size(self.axes)
        # A maximum is taken of the gathered rows of all ranks.
        return self.dtype.itemsize * self.numel * (ranks if self.how == "max" else 1)

    def sent_share(self, ranks: int) -> Fraction:
        return Fraction((1 if self.how == "max" else 2) * (ranks - 1), ranks)

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        return f"{self.how} {self.dtype} {self.numel} {self.paths}"

    def bind(self, context: Context) -> Action:
        comm, (flight,) = context.comm, self.writes
        issue = comm.all_gather if self.how == "max" else comm.all_reduce

        def run(env: Env) -> None:
            if env[CONTROL].skip:
                env[flight] = Nothing()
                return
            flat = comm.send_buffer(self.numel, self.dtype, self.axes)
            known = join_parts([env[name] for name in self.reads])
            values = [known[p][n] for p in self.paths for n in self.sends[p]]
            parts = flat.split_with_sizes([v.numel() for v in values])
            torch._foreach_copy_(list(parts), [v.reshape(-1) for v in values])
            env[flight] = issue(flat, self.axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the sums, by path and name."""
        (flight,), (out,) = wait.reads, wait.writes
        issue: ReduceUpdate = context.schedule.issues[flight]

        def take(env: Env, result: Any) -> None:
            if result is None:
                env[out] = {}
                return
            # A gather brings the rows of all ranks. A sum is in the transport's buffer, which is released.
            whole = torch.stack(list(result)).amax(0) if issue.how == "max" else result.clone()
            env[out] = issue.unpack(whole)

        return on_arrival(wait, take)

    def unpack(self, flat: Tensor) -> Parts:
        """Return views of the values in a flat tensor, by path and name."""
        sizes = [math.prod(shape) for path in self.paths for shape in self.shapes[path]]
        parts = iter(flat.split_with_sizes(sizes))
        return {
            path: {
                n: next(parts).view(s) for n, s in zip(self.receives[path], self.shapes[path], strict=True)
            }
            for path in self.paths
        }

    def price(self, pricer: Pricer) -> Price:
        verb = "gather" if self.how == "max" else "all_reduce"
        flight = pricer.collective(verb, self.axes, self.wire_bytes(pricer.schedule))
        return pricer.copy(2.0 * self.dtype.itemsize * self.numel, **flight)


@dataclass(frozen=True)
class StackUpdate(OfBucket):
    """The issue of an all-to-all that brings blocks of leaves to the rank that computes each of them whole.

    Args:
        back: send blocks of the results from there to the ranks that store them.
    """

    lane, trips, outgoing = COMMUNICATION, 1, True

    back: bool = False

    def wire_bytes(self, schedule: Schedule) -> int:
        return schedule.buckets[self.bucket].row_bytes

    def bind(self, context: Context) -> Action:
        bucket, comm, (flight,) = bucket_of(self, context), context.comm, self.writes
        stacks = context.stacks(self.bucket)
        pack = stacks.pack_wholes if self.back else stacks.pack_blocks

        def run(env: Env) -> None:
            if env[CONTROL].skip:
                env[flight] = Nothing()
                return
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            pack(join_parts([env[name] for name in self.reads]), flat)
            env[flight] = comm.all_to_all(flat, bucket.axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take this rank's blocks, or the whole leaves that it computes, by path and name."""
        (out,), stacks = wait.writes, context.stacks(wait.bucket)
        unpack = stacks.blocks if context.schedule.issues[wait.reads[0]].back else stacks.wholes

        def take(env: Env, rows: Tensor | None) -> None:
            env[out] = {} if rows is None else unpack(rows)

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        flight = pricer.collective("all_to_all", bucket.axes, bucket.row_bytes)
        return pricer.copy(2 * bucket.row_bytes, **flight)

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        return pricer.copy(2 * pricer.bucket(wait).row_bytes)


@dataclass(frozen=True)
class ComputeStack(OfBucket):
    """The part of updates that needs whole leaves: each rank computes those that were sent to it.

    Args:
        work: the computation of each leaf, by path.
    """

    work: Mapping[str, Compute] = field(default_factory=dict, compare=False, repr=False)

    def bind(self, context: Context) -> Action:
        (source, *known), (out,) = self.reads, self.writes
        compute = context.updater.bind_whole(bucket_of(self, context))

        def run(env: Env) -> None:
            env[out] = compute(env[source], join_parts([env[name] for name in known]), env[CONTROL])

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        first = row_of_rank(bucket, 0, pricer.schedule.mesh.axes_size(bucket.axes))
        return pricer.graphs([self.work[path].run for path in first.paths])


@dataclass(frozen=True)
class OverlappedUpdate(Update):
    """The issue of an Update on another stream, next to kernels of the backward of other units.

    An update is limited by memory, a product by arithmetic: side by side they take less time than in turn.
    """

    lane, reads_until_waited = OPTIMIZER, True

    @property
    def changes(self) -> Names:
        return tuple(n for n in self.reads if n.is_state)

    def bind(self, context: Context) -> Action:
        update, (flight,) = context.on_update_stream(super().bind(context)), self.writes

        def run(env: Env) -> None:
            env[flight] = update(env)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Let the compute stream see new parameters and slots."""
        (flight,) = wait.reads
        return lambda env: context.wait_event(env.pop(flight))
