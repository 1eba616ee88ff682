"""Updates: the end of a step: norms, the sum of scalars, the optimizer and what owners compute for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_STREAM, MASTER, Kind, ValueName
from fnshard.compiler.schedule.buckets import Part, of_owner
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
from fnshard.layout.partition import side_by_side
from fnshard.mesh import Mesh


@dataclass(frozen=True)
class Norms(OfBucket):
    """Squared norms of a bucket's reduced gradients, padding counted out, by the number of `replicas`."""

    replicas: int = 1

    def aliases(self) -> Mapping[ValueName, Names]:
        """Numbers share memory with nothing."""
        return {}

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
        (out,) = wait.writes

        def take(env: Env, vector: Tensor) -> None:
            env[out] = context.scalars.unpack(vector)
            if context.updater is not None:
                env[CONTROL] = env[CONTROL].arrived(env[out])

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        size = 8.0 * pricer.schedule.scalars
        return pricer.copy(size, **pricer.collective("all_reduce", self.axes_of(pricer.schedule), size))


@dataclass(frozen=True)
class _OfOptimizer(OfBucket):
    """Reads gradients, then the slots and the parameters of its leaves."""

    def on_host(self, schedule: Schedule) -> bool:
        return schedule.specs[self.paths[0]].updated_on == "host"

    def _named(self, kind: Kind) -> dict[str, ValueName]:
        return {n.path: n for n in self.reads if n.original.kind is kind}

    def _bind_inputs(self, context: Context) -> Callable[[Env], Callable[[], tuple[Any, ...]]]:
        """What begins to bring a step's control to where the update is, and gives what waits for it: blocks
        (or what owners have made), slots and parameters by path, and the control.

        There are no parameters where master copies are updated.
        """
        bucket, updater, source = bucket_of(self, context), context.updater, self.reads[0]
        state_names = [self._named(kind) for kind in (Kind.SLOTS, Kind.STORED)]

        def begin(env: Env) -> Callable[[], tuple[Any, ...]]:
            control, event = updater.control(env, bucket)

            def inputs() -> tuple[Any, ...]:
                if event is not None:
                    event.synchronize()
                state = [{p: env[n] for p, n in names.items()} for names in state_names]
                blocks = env[source] if source.original.kind is Kind.SENT else env[source].blocks
                return blocks, *state, control

            return inputs

        return begin


@dataclass(frozen=True, eq=False)
class OwnerWork:
    """What is computed of a whole leaf: one of `graphs` takes `parts`, sent in `dtype`, and returns as many.

    `graphs`: by turn (`Optimizer.turns`), with the share of steps that have it. `parts`: none where no rank
    sends anything, as each has whole matrices.
    """

    dtype: torch.dtype
    parts: tuple[Part, ...]
    graphs: Mapping[str, tuple[fx.GraphModule, float]]

    def of(self, parts: Mapping[str, Tensor], turn: str, mesh: Mesh) -> dict[str, Tensor]:
        """Of tensors in which each rank's parts lie side by side, as those of the results do."""
        layouts = {name: layout for name, _, layout in self.parts}
        whole = [side_by_side(parts[name], layout, mesh, inverse=True) for name, layout in layouts.items()]
        made = zip(layouts.items(), self.graphs[turn][0](*whole), strict=True)
        return {name: side_by_side(value, layout, mesh) for (name, layout), value in made}


SumShapes = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class UpdateSums(_OfOptimizer):
    """Issue: one round of what the optimizer sums over leaves, of all ranks of `axes`, which split them.
    `shapes`: of whole sums, by path and name."""

    lane, trips, outgoing = COMMUNICATION, 2, True

    number: int = 0
    dtype: torch.dtype = torch.float32
    shapes: SumShapes = field(default_factory=dict, compare=False, repr=False)

    def wire_bytes(self, schedule: Schedule) -> int:
        return self.dtype.itemsize * sum(math.prod(s) for own in self.shapes.values() for s in own.values())

    def bind(self, context: Context) -> Action:
        updater, (flight,), inputs = context.updater, self.writes, self._bind_inputs(context)
        sums, earlier = updater.bind_sums(self.paths, self.number), sums_read(self)
        send = partial(context.comm.all_reduce, axes=self.axes)

        def run(env: Env) -> None:
            parts = sums(*inputs(env)(), earlier(env))
            env[flight] = send(updater.pack_sums(parts, self.shapes, self.dtype))

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """This rank's parts of the sums, by path and name."""
        (flight,), (out,) = wait.reads, wait.writes
        shapes, unpack = context.schedule.issues[flight].shapes, context.updater.unpack_sums

        def take(env: Env, flat: Tensor) -> None:
            env[out] = unpack(flat.clone(), shapes)

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        flight = pricer.collective("all_reduce", self.axes, self.wire_bytes(pricer.schedule))
        return pricer.copy(pricer.bytes_of(self.reads), **flight)


def sums_read(line: UpdateSums | Update) -> Callable[[Env], dict[str, dict[str, Tensor]]]:
    """What earlier rounds have summed, by path and name."""
    names = [n for n in line.reads if n.original.kind is Kind.SUMS]

    def read(env: Env) -> dict[str, dict[str, Tensor]]:
        return {p: {k: v for n in names for k, v in env[n][p].items()} for p in line.paths} if names else {}

    return read


@dataclass(frozen=True)
class UpdateBegin(_OfOptimizer):
    """The optimizer on leaves that have owners, up to what it sends to these: slots change in place, and the
    blocks to be sent are made, in `dtypes`, next to slots that are sent too (`runtime.packing.Parts`)."""

    dtypes: tuple[torch.dtype, ...] = ()

    def aliases(self) -> Mapping[ValueName, Names]:
        """What is sent may be the gradients themselves, and are the slots themselves."""
        return {self.writes[0]: self.reads}

    def bind(self, context: Context) -> Action:
        begin, inputs = context.updater.bind_begin(self.paths), self._bind_inputs(context)
        out, *_ = self.writes

        def run(env: Env) -> None:
            env[out] = begin(*inputs(env)())

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.update(self)


@dataclass(frozen=True)
class UpdateExchange(OfBucket):
    """Issue: every rank's blocks of leaves to the leaves' owners; or `back`, of what these have made."""

    lane, trips, outgoing = COMMUNICATION, 1, True

    back: bool = False

    def wire_bytes(self, schedule: Schedule) -> int:
        return schedule.buckets[self.bucket].row_bytes

    def bind(self, context: Context) -> Action:
        bucket, comm, (flight,) = bucket_of(self, context), context.comm, self.writes
        owners = context.owners(self.bucket)
        pack = owners.pack_wholes if self.back else owners.pack_blocks

        def run(env: Env) -> None:
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            pack({path: sent for name in self.reads for path, sent in env[name].items()}, flat)
            env[flight] = comm.all_to_all(flat, bucket.axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """This rank's blocks by path and slot; or the whole leaves that it owns."""
        (out,), owners = wait.writes, context.owners(wait.bucket)
        unpack = owners.blocks if context.schedule.issues[wait.reads[0]].back else owners.wholes

        def take(env: Env, rows: Tensor) -> None:
            env[out] = unpack(rows)

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        flight = pricer.collective("all_to_all", bucket.axes, bucket.row_bytes)
        return pricer.copy(2 * bucket.row_bytes, **flight)

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        return pricer.copy(2 * pricer.bucket(wait).row_bytes)


@dataclass(frozen=True)
class UpdateWhole(OfBucket):
    """Each owner computes what its leaves need as a whole: `work`, by path."""

    work: Mapping[str, OwnerWork] = field(default_factory=dict, compare=False, repr=False)

    def bind(self, context: Context) -> Action:
        (source,), (out,), mesh, turn = self.reads, self.writes, context.mesh, context.updater.turn

        def run(env: Env) -> None:
            env[out] = {
                path: self.work[path].of(parts, turn(path, self.work[path], env[CONTROL]), mesh)
                for path, parts in env[source].items()
            }

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        first = of_owner(bucket, 0, pricer.schedule.mesh.axes_size(bucket.axes))
        return pricer.graphs([each for path in first.paths for each in self.work[path].graphs.values()])


@dataclass(frozen=True)
class Update(_OfOptimizer):
    """The optimizer on leaves of one bucket, in place: reads the gradients (or what owners have made of
    them), the parameters (but where the host updates its master copies), slots, and the scalars it must wait
    for; in the order of `paths`. `work`: by path, what it computes of whole matrices.
    """

    work: Mapping[str, OwnerWork] = field(default_factory=dict, compare=False, repr=False)

    @property
    def overwrites(self) -> Names:
        """Gradients are scaled in place."""
        return reduced_names(self.reads)

    def aliases(self) -> Mapping[ValueName, Names]:
        """A master copy that is sent to the device is the slot's own memory."""
        return {n: tuple(s for s in self.reads if s.original.kind is Kind.SLOTS and s.path == n.path)
                for n in self.writes if not n.is_state}  # fmt: skip

    def bind(self, context: Context) -> Action:
        updater, later, inputs = context.updater, context.later(self), self._bind_inputs(context)
        owned = self.reads[0].original.kind is Kind.SENT
        summed = any(n.original.kind is Kind.SUMS for n in self.reads)
        bind = updater.bind_end if owned else updater.bind_summed if summed else updater.bind
        update, sums = bind(self.paths), sums_read(self)
        alone = not self._named(Kind.STORED)  # master copies
        masters = dict(zip(self.paths, self.writes[: len(self.paths)], strict=True)) if alone else {}

        def run(env: Env) -> None:
            given = inputs(env)

            def call() -> None:
                blocks, slots, params, control = given()
                update(blocks, slots, params, control, *([sums(env)] if summed else []))
                for path, out in masters.items():
                    env[out] = updater.valid_part(path, slots[path][MASTER])

            later(call)

        return run

    def price(self, pricer: Pricer) -> Price:
        price = pricer.update(self)
        if not self.work:
            return price
        work = pricer.graphs([each for own in self.work.values() for each in own.graphs.values()])
        seconds = price.device_seconds + work.device_seconds, price.host_seconds + work.host_seconds
        return replace(price, device_seconds=seconds[0], host_seconds=seconds[1])


@dataclass(frozen=True)
class OverlappedUpdate(Update):
    """Issue: an Update on a stream of its own, next to kernels of the backward of other units.

    An update is limited by memory, a product by arithmetic: together they take less time than in turn.
    """

    lane, reads_until_waited = OPTIMIZER, True

    @property
    def changes(self) -> Names:
        return tuple(n for n in self.reads if n.is_state)

    def bind(self, context: Context) -> Action:
        update, (flight,), stream = super().bind(context), self.writes, context.update_stream
        device = context.device

        def run(env: Env) -> None:
            env[flight] = None
            if stream is None:
                update(env)
                return
            control, own = env[CONTROL], env.get(CONTROL_ON_STREAM, (None, None))
            if own[0] is not control:
                own = env[CONTROL_ON_STREAM] = control, control.on_stream()
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                update({**env, CONTROL: own[1]})
                env[flight] = torch.cuda.Event()
                env[flight].record(stream)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """The compute stream sees new parameters and slots."""
        (flight,), device = wait.reads, context.device

        def run(env: Env) -> None:
            event = env.pop(flight)
            if event is not None:
                torch.cuda.current_stream(device).wait_event(event)

        return run
