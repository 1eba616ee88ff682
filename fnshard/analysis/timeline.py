"""Timeline: simulate a schedule on lanes.

The lanes are compute, communicators, transfer, the optimizer next to kernels, and the host's updates. The
host issues lines in order and runs ahead. A lane does one thing at a time, in the order of issue. A
collective starts when its message is packed, and a transfer when the values that it reads are ready. A Wait
holds the compute lane until its flight is done.

Each communicator is a lane. A process group carries one collective after another, and the groups of other
axes, or of sums besides gathers, run side by side, as their streams do on a device. They share the links. A
rank has one link within its node and one to other nodes, and a link serves flights one at a time, in the
order of issue, each for as long as its bytes take there. So an exchange within a node does not wait for a
gather between nodes, whereas two gathers between nodes wait for one another. A group with several ranks on
each of several nodes keeps both links busy, each with its share of the bytes. The time in which ranks meet
occupies no link. (NCCL's flights share a link's rate instead of queueing. The last of them lands at the same
time, and only a small one behind a large one lands earlier than here.) A message between stages of a pipeline
is small and urgent, so it does share the rate: it does not queue, takes up to twice as long if the link is
busy, and delays later flights by its own bytes.

The host itself waits for gradients that it sums or updates with, for a copy from or to the disk tier
(pageable memory, for which CUDA returns when the copy is done), and once for each number of the step (its
count, the summed scalars) that the device makes and an update on the host reads. Where nothing overlaps, as
on a CPU, all lanes share one clock.

The time of kernels is computed by `flops`, and that of packing, casts and updates from their bytes.
Collectives have the algorithm bandwidth of rings: (n - 1) / n of a buffer for a gather, a scatter or an
all-to-all, and twice that for a sum (Patarasuk and Yuan, JPDC 2009), within a node or between nodes, by the
ranks of the group. The ledger gives the sizes of values. The disk tier is mapped files, pageable memory whose
copies CUDA stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fnshard.analysis.flops import GraphCost, graph_cost
from fnshard.analysis.hardware import Hardware, Link, mfu
from fnshard.analysis.transport import transport_of
from fnshard.compiler.ir.values import SCALARS, Kind, ValueName, slots
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.buckets import Bucket, end_to_end
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    LANES,
    OPTIMIZER,
    TRANSFER,
    Gather,
    Instruction,
    Names,
    OfBucket,
    Recv,
    ReduceScatter,
    Run,
    Send,
    ToDevice,
    ToHost,
    Update,
    Wait,
)
from fnshard.compiler.schedule.instructions.messages import pair_of
from fnshard.compiler.schedule.ir import Price, Schedule
from fnshard.compiler.schedule.together import StageLine
from fnshard.compiler.update.steps import flow_of
from fnshard.compiler.update.trace import GRAD, UPDATE, Branch
from fnshard.layout.partition import block_shape
from fnshard.mesh import PIPELINE
from fnshard.runtime.collectives.base import purpose_of
from fnshard.runtime.executor.compiled_update import is_compilable
from fnshard.runtime.host_worker import PENDING

# The time by which an update that reads and writes memory next to kernels delays them, as a share of its own
# time. It is assumed, not measured.
SLOWDOWN = 0.5


@dataclass
class HardwarePricer:
    """A pricer of the lines of one schedule on one machine, whose methods instructions call.

    Args:
        sizes: the bytes of values by name (`Ledger.sizes`).
        fused: whether Inductor compiles kernels. Otherwise every operator runs by itself.
        compiled_update: whether updates are compiled, and move gradients, state and stored copies only once.
    """

    schedule: Schedule
    hardware: Hardware
    sizes: Mapping[ValueName, int]
    fused: bool = True
    compiled_update: bool = False

    def __post_init__(self) -> None:
        self._links: dict[tuple[str, tuple[str, ...]], tuple[Link, int, float]] = {}
        self._kernels: dict[tuple[str, Way], Price] = {}
        self._flights: dict[tuple[Any, ...], dict[str, Any]] = {}  # cached, since many are alike

    def kernel_cost(self, line: Run) -> GraphCost:
        """Return the work of a kernel, one way."""
        return graph_cost(self.schedule.kernels[line.kernel].modules[line.way], fused=self.fused)

    def kernel(self, line: Run) -> Price:
        """Return the device and host seconds of a kernel, which are counted once for each kernel and way."""
        key = (line.kernel, line.way)
        if key not in self._kernels:
            cost, h = self.kernel_cost(line), self.hardware
            host = h.instruction_seconds + cost.host_seconds(h)
            self._kernels[key] = Price(cost.seconds(h), host)
        return self._kernels[key]

    def graphs(self, graphs: Sequence[fx.GraphModule]) -> Price:
        """Return the price of graphs that run one after another, operator by operator.

        The second branch of a `torch.cond` counts, the usual one if the first is taken every n steps.
        """
        queue, costs = list(graphs), []
        while queue:
            graph = queue.pop()
            costs.append(graph_cost(graph, fused=False))
            queue += [n.target.false for n in graph.graph.nodes if isinstance(n.target, Branch)]

        h = self.hardware
        host = h.instruction_seconds + sum(cost.host_seconds(h) for cost in costs)
        return Price(sum(cost.seconds(h) for cost in costs), host)

    def bucket(self, line: OfBucket) -> Bucket:
        return self.schedule.buckets[line.bucket]

    def block_bytes(self, bucket: Bucket, dtype: str) -> float:
        """Count the bytes of this rank's blocks of a bucket, in the field `dtype` of their specs."""
        specs = self.schedule.specs
        return float(sum(p.numel * getattr(specs[p.path], dtype).itemsize for p in bucket.pieces))

    def leaf_bytes(self, bucket: Bucket, dtype: str) -> float:
        """Count the bytes of the full leaves of a bucket, in the field `dtype` of their specs."""
        specs = self.schedule.specs
        return float(sum(math.prod(p.shape) * getattr(specs[p.path], dtype).itemsize for p in bucket.pieces))

    def bytes_of(self, names: Names) -> float:
        return float(sum(self.sizes[n] for n in names))

    def copy(self, size: float, **more: Any) -> Price:
        """Return the price of packing, unpacking, a cast or a sum, by the bytes that it reads and writes."""
        return self.compute(self.hardware.copy.seconds(size), size, **more)

    def skips_packing(self, line: Gather | ReduceScatter) -> bool:
        """Return whether a collective reads and writes leaves in place, as `Group` does on accelerators."""
        is_end_to_end = end_to_end(self.bucket(line), self.schedule.mesh)
        return self.hardware.overlap and is_end_to_end and line.in_place(self.schedule)

    def reads_in_place(self, line: Gather) -> bool:
        """Return whether a gather copies nothing: ranks of this host read leaves where they are stored."""
        return transport_of(self.schedule.mesh) == "shared" and line.keeps_place(self.schedule)

    def here_or_on_host(self, line: Instruction, size: float) -> Price:
        """Return the price of a cast or sum of so many bytes, on the host if the values are kept there."""
        if not line.on_host(self.schedule):
            return self.copy(size)
        h = self.hardware
        return Price(size / h.host_update_bytes_per_s, h.instruction_seconds, on_host=True)

    def compute(self, seconds: float, size: float, **more: Any) -> Price:
        """Return the price of one small operator on the device."""
        h = self.hardware
        launch, floor = (h.launch_seconds, h.floor_seconds) if size else (0.0, 0.0)
        return Price(max(seconds, floor), h.instruction_seconds + launch, **more)

    def collective(self, verb: str, axes: tuple[str, ...], size: float) -> dict[str, Any]:
        """Return the flight of a collective over a whole buffer of `size` bytes, as fields of a `Price`."""
        key = verb, axes, size
        if key not in self._flights:
            self._flights[key] = self._price_collective(*key)
        return self._flights[key]

    def _price_collective(self, verb: str, axes: tuple[str, ...], size: float) -> dict[str, Any]:
        """Price a collective: its seconds, and how long it occupies each kind of link."""
        # Groups along the same axes are taken to be alike: the first rank's is priced.
        if (verb, axes) not in self._links:
            ranks, h = self.schedule.mesh.group_ranks(axes, 0), self.hardware
            self._links[verb, axes] = h.link(ranks), len(ranks), h.adapters(verb, ranks)
        link, n, adapters = self._links[verb, axes]
        if n == 1:
            return {}

        sent = (2 if verb == "all_reduce" else 1) * (n - 1) / n * size  # by a ring
        # Ranks meet in a time that grows with the depth of a tree. Carrying the bytes does not depend on it.
        seconds = link.latency_seconds * math.ceil(math.log2(n)) + getattr(link, verb).seconds(sent)

        leaving = 1 / adapters  # the share of the bytes that goes to other nodes through this rank's adapter
        shares = {"node": 1 - leaving, "network": leaving}
        link_seconds = {
            name: share * getattr(getattr(self.hardware, name), verb).seconds(sent)
            for name, share in shares.items()
            if share
        }
        communicator = f"{purpose_of(verb)} over {', '.join(axes)}"
        return {
            "lane": COMMUNICATION, "flight_seconds": seconds, "communicator": communicator,
            "link_seconds": link_seconds,
        }  # fmt: skip

    def message(self, stage: int, size: float) -> dict[str, Any]:
        """Return the flight of `size` bytes to a rank of another stage, in a queue of its own."""
        key = stage, size
        if key not in self._flights:
            # One sender has one adapter, as in an all-to-all of two ranks.
            mesh, here = self.schedule.mesh, self.schedule.stage
            ranks = mesh.partner(here, 0), mesh.partner(stage, 0)
            link = self.hardware.link(ranks)
            seconds = link.all_to_all.seconds(size)
            name = "node" if self.hardware.adapters("all_to_all", ranks) == math.inf else "network"
            self._flights[key] = {
                "lane": COMMUNICATION, "flight_seconds": link.latency_seconds + seconds,
                "communicator": f"messages from stage {here} to {stage}", "link_seconds": {name: seconds},
            }  # fmt: skip
        return self._flights[key]

    def transfer(self, line: ToDevice | ToHost) -> Price:
        """Return the price of a transfer over the host link.

        Values on disk are read or written there, too, and the host waits for them.
        """
        h = self.hardware
        # The state that is written `into` says where it is kept, and otherwise the values that are read.
        kept_as = line.into if isinstance(line, ToHost) and line.into else line.reads
        disk = tuple(n for n, state in zip(line.reads, kept_as, strict=True) if self.rests_on_disk(state))
        seconds = (
            self.bytes_of(line.reads) / h.host_link_bytes_per_s + self.bytes_of(disk) / h.disk_bytes_per_s
        )

        # A parameter that the host has updated is sent as its master copy, which is kept with its slots.
        host_copies = [n.path for n in line.reads if n.is_copy(Kind.HOST, Kind.STORED)]
        is_pageable = bool(disk) or any(self.rests_on_disk(n) for n in slots(host_copies))
        return Price(0.0, h.instruction_seconds + h.launch_seconds, TRANSFER, seconds, blocking=is_pageable)

    def rests_on_disk(self, name: ValueName) -> bool:
        """Return whether a value is state that is kept on disk."""
        if not name.is_state:
            return False
        spec = self.schedule.specs[name.path]
        return (spec.memory if name.kind is Kind.STORED else spec.optimizer_memory) == "disk"

    def update_bytes(self, line: Update) -> float:
        """Count the bytes that a stretch of updates reads and writes.

        They are the bytes of gradients, state and values of other stretches, and of casts unless these are
        fused into a compiled update.
        """
        bucket, specs, mesh = self.schedule.buckets[line.bucket], self.schedule.specs, self.schedule.mesh
        size = 0.0
        for path, its_slots in zip(line.paths, slots(line.paths), strict=True):
            spec, family = specs[path], self.schedule.families[path]
            derived = family.derived
            count = math.prod(block_shape(spec.shape, spec.optimizer, mesh))
            own, stored, sent = (d.itemsize for d in (spec.optimizer_dtype, spec.storage_dtype, bucket.dtype))

            # Values that one stretch of an update hands to a later one.
            step, flow = derived.steps[line.number], flow_of(derived, line.number)
            for name in (*step.reads, *step.writes):
                if name in derived.values:
                    shape, dtype = derived.values[name]
                    size += math.prod(shape) * dtype.itemsize

            # Gradients have the dtype in which they were sent. A cast is a pass of its own unless fused.
            fused = self.compiled_update and spec.updated_on == "device" and is_compilable(family)
            if GRAD in step.reads or line.number == 0:
                size += count * sent if fused else count * own
                if not fused and spec.optimizer_dtype != bucket.dtype:
                    size += count * (own + sent)

            # State and the parameter are read and written. Where there is a master copy, that is a part of
            # the state, and the parameter is rounded from it.
            if UPDATE in flow.commits:
                size += 2 * self.sizes[its_slots]
                if not spec.has_master:
                    size += 2 * count * own
                if fused and spec.has_master:
                    size += count * stored
                if not fused and spec.optimizer_dtype != spec.storage_dtype:
                    size += count * (own + stored)
        return size

    def update(self, line: Update) -> Price:
        """Return the price of a stretch of updates, on the host or on the device."""
        size, h = self.update_bytes(line), self.hardware
        if self.schedule.specs[line.paths[0]].updated_on == "host":
            disk = sum(self.bytes_of((n,)) for n in line.reads + line.writes if self.rests_on_disk(n))
            seconds = size / h.host_update_bytes_per_s + disk / h.disk_bytes_per_s
            return Price(seconds, h.instruction_seconds, on_host=True)
        price = self.compute(h.update.seconds(size), size)
        if line.lane != OPTIMIZER:
            return price
        return Price(0.0, price.host_seconds, OPTIMIZER, price.device_seconds)


@dataclass(frozen=True)
class Span:
    """A period for which line `index` of the schedule occupies a lane, in seconds since the step began.

    Args:
        communicator: the lane among those for communication, which run side by side.
    """

    index: int
    lane: str
    start: float
    end: float
    verb: str
    unit: str
    phase: str
    communicator: str = ""


_NOT_PLAIN = ("spans", "stages", "bubble_seconds")  # fields that `Timeline.as_dict` leaves out or replaces


@dataclass(frozen=True)
class Timeline:
    """A prediction of how a step runs. It prints as a short table.

    Args:
        busy_seconds: the time for which each lane has anything to do. Communication is busy while any
            communicator is.
        exposed_communication_seconds, exposed_transfer_seconds: the time for which compute waits for a
            collective, or for a transfer.
        model_flops: the FLOPs of one rank's step, forward and backward, without recomputation.
        hardware_flops: the same with recomputation.
        peak_flops: the peak of one device, per second, in the dtype of most FLOPs; NaN if nobody knows it.
        interval: the seconds between which most compared steps lay (`Hardware.spread`), if some were
            compared.
        bubble_seconds: in a pipeline, the time for which compute waits for other stages.
        stages: the timelines of a pipeline's stages. All other fields are then those of the stage that
            computes longest, except for FLOPs and the bubble, which are means.
    """

    hardware: str
    step_seconds: float
    spans: tuple[Span, ...] = field(repr=False)
    busy_seconds: Mapping[str, float]
    exposed_communication_seconds: float
    exposed_transfer_seconds: float
    model_flops: float
    hardware_flops: float
    peak_flops: float
    ranks: int
    tokens_per_second: float | None = None
    interval: tuple[float, float] | None = None
    bubble_seconds: float = 0.0
    stages: tuple[Timeline, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, without the spans."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_PLAIN}
        if self.stages:
            out |= {"bubble": self.bubble, "stages": [stage.as_dict() for stage in self.stages]}
        return out | {"busy_seconds": dict(self.busy_seconds), "mfu": self.mfu}

    @property
    def bubble(self) -> float:
        """Return the share of the step in which stages wait for one another."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Return the MFU as `hardware.mfu` defines it."""
        return mfu(self.model_flops, self.step_seconds, self.peak_flops)

    def __str__(self) -> str:
        step = max(self.step_seconds, 1e-30)
        rows = [("step", self.step_seconds)]
        rows += [(f"  {lane} busy", s) for lane, s in self.busy_seconds.items() if s]
        rows += [
            ("  exposed communication", self.exposed_communication_seconds),
            ("  exposed transfer", self.exposed_transfer_seconds),
        ]
        if self.stages:
            rows.append(("  bubble", self.bubble_seconds))

        lines = [f"{self.ranks} x {self.hardware}"]
        lines += [f"{name:24s} {s * 1e3:12.3f} ms  {s / step:6.1%}" for name, s in rows]
        if self.interval is not None:
            lines[1] += f"  ({' to '.join(f'{s * 1e3:.4g}' for s in self.interval)})"
        lines.append(
            f"{'model FLOPs':24s} {self.model_flops / 1e12:12.3f} T   {self.mfu:6.1%} MFU, hardware "
            f"{self.hardware_flops / 1e12:.3f} T"
        )
        if self.tokens_per_second is not None:
            lines.append(f"{'tokens':24s} {self.tokens_per_second:12,.0f} /s  all ranks")
        return "\n".join(lines)


def simulate(pricer: HardwarePricer, tokens: int | None) -> Timeline:
    """Simulate the pricer's schedule.

    Args:
        tokens: the tokens of one step on all ranks together, if known.
    """
    clock = _OverlappedClock() if pricer.hardware.overlap else _SerialClock()
    for index, line in enumerate(pricer.schedule.instructions):
        clock.step(index, line, line.price(pricer))
    return _make_timeline(pricer, clock, clock.end(), tokens)


def simulate_stages(
    pricers: Sequence[HardwarePricer], order: Sequence[StageLine], tokens: int | None
) -> Timeline:
    """Simulate the stages of a pipeline side by side, with one rank of each.

    A message arrives when the other stage has sent it and it has travelled. A collective over the pipeline
    ends when it does on the last stage to join.

    Args:
        pricers: the pricers of the stages' schedules.
        order: the order of their lines, as `together` merges them.
        tokens: the tokens of one step on all ranks together, if known.
    """
    schedules = [pricer.schedule for pricer in pricers]
    clocks = [_OverlappedClock() if pricer.hardware.overlap else _SerialClock() for pricer in pricers]
    numbers: dict[tuple[Any, ...], int] = {}  # the number of the last meeting, by kind and stage
    landed: dict[tuple[Any, ...], float] = {}  # the time at which each meeting is over
    due: dict[tuple[int, str], tuple[Any, ...]] = {}  # the meeting that each stage's flight is a part of
    for stage, index in order:
        line, clock = schedules[stage].instructions[index], clocks[stage]
        if isinstance(line, Wait) and (stage, line.reads[0]) in due:
            clock.hold(line.reads[0], landed[due[stage, line.reads[0]]])
        clock.step(index, line, line.price(pricers[stage]))
        if line.lane != COMMUNICATION or PIPELINE not in line.axes_of(schedules[stage]):
            continue

        # Number the meetings of each kind: the n-th of one stage is the n-th of the others. Only a sender
        # says when a message lands, and only a receiver waits for it.
        kind = ("message", *pair_of(line, stage)) if isinstance(line, Send | Recv) else ("meeting",)
        number = numbers[kind, stage] = numbers.get((kind, stage), -1) + 1
        if not isinstance(line, Recv):
            end = clock.landing(line.writes[0])
            landed[kind, number] = max(landed.get((kind, number), 0.0), end)
        if not isinstance(line, Send):
            due[stage, line.writes[0]] = kind, number

    # The step takes as long as its slowest stage.
    seconds = max(clock.end() for clock in clocks)
    stages = tuple(_make_timeline(p, c, seconds, tokens) for p, c in zip(pricers, clocks, strict=True))
    slowest = max(stages, key=lambda each: each.busy_seconds[COMPUTE])

    def mean(name: str) -> float:
        return sum(getattr(each, name) for each in stages) / len(stages)

    means = ("model_flops", "hardware_flops", "bubble_seconds")
    return replace(slowest, stages=stages, **{name: mean(name) for name in means})


def _make_timeline(pricer: HardwarePricer, clock: _Clock, seconds: float, tokens: int | None) -> Timeline:
    """Make the timeline of a step of so many seconds from a clock's spans."""
    hardware = pricer.hardware
    busy = {lane: time_alone([s for s in clock.spans if s.lane == lane]) for lane in LANES}
    model, spent, dtype = _count_flops(pricer)
    peak = hardware.peak_flops.get(dtype) or hardware.peak_flops["f32"]
    return Timeline(
        hardware.name,
        seconds,
        tuple(clock.spans),
        busy,
        clock.exposed[COMMUNICATION],
        clock.exposed[TRANSFER],
        model,
        spent,
        peak,
        pricer.schedule.mesh.size,
        None if tokens is None or not seconds else tokens / seconds,
        None if hardware.spread is None else tuple(seconds * share for share in hardware.spread),
        bubble_seconds=clock.idle,
    )


def time_alone(spans: Sequence[Span], covering: Sequence[Span] = ()) -> float:
    """Return the time for which any of the spans runs while none of the `covering` ones does."""
    # Walk through the starts and ends of all spans in order, and count those that run.
    edges = [(s.start, 1, 0) for s in spans] + [(s.end, -1, 0) for s in spans]
    edges += [(s.start, 0, 1) for s in covering] + [(s.end, 0, -1) for s in covering]
    total, running, covers, before = 0.0, 0, 0, 0.0
    for at, change, cover_change in sorted(edges):
        if running and not covers:
            total += at - before
        running, covers, before = running + change, covers + cover_change, at
    return total


def _count_flops(pricer: HardwarePricer) -> tuple[float, float, str]:
    """Return model FLOPs, hardware FLOPs, and the dtype of most of them.

    A backward without recomputation costs twice its forward, or less if leaves are frozen. So the lesser of
    that and its kernels' FLOPs counts.
    """
    runs = [line for line in pricer.schedule.instructions if isinstance(line, Run)]

    # The FLOPs of backward kernels, by segment and micro-batch (the phase is "backward" or "backward.3").
    backward: dict[tuple[int, str], float] = {}
    for run in runs:
        if run.backward:
            key = run.segment, run.phase.rpartition(".")[2]
            backward[key] = backward.get(key, 0.0) + pricer.kernel_cost(run).model_flops

    # Add each forward, and its backward, to the model's FLOPs, and all kernels to the hardware's.
    model = hardware = 0.0
    dtypes: dict[str, float] = {}
    for run in runs:
        cost = pricer.kernel_cost(run)
        hardware += cost.flops
        for dtype, flops in cost.flops_by_dtype().items():
            dtypes[dtype] = dtypes.get(dtype, 0.0) + flops
        if not run.of_backward:
            micro = run.phase.rpartition(".")[2] if "." in run.phase else "backward"
            model += cost.model_flops + min(2 * cost.model_flops, backward.get((run.segment, micro), 0.0))
    return model, hardware, max(dtypes, key=dtypes.__getitem__, default="f32")


@dataclass
class _Clock:
    """A clock of the lanes.

    Args:
        ready: the times at which values in flight, or made on the host, are ready.
        exposed: the seconds for which compute waits for each lane.
        idle: the seconds for which compute waits for other stages of a pipeline.
        held: the flights in which other stages take part.
    """

    spans: list[Span] = field(default_factory=list)
    ready: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    idle: float = 0.0
    held: set[str] = field(default_factory=set)

    def note(
        self, index: int, line: Instruction, lane: str, start: float, seconds: float, communicator: str = ""
    ) -> float:
        """Note a span of a line, if it takes time, and return its end."""
        if seconds > 0:
            about = line.verb, line.unit, line.phase
            self.spans.append(Span(index, lane, start, start + seconds, *about, communicator))
        return start + seconds


@dataclass
class _SerialClock(_Clock):
    """A clock of a single thread, which does one thing after another."""

    now: float = 0.0

    def step(self, index: int, line: Instruction, price: Price) -> None:
        lane = HOST if price.on_host else COMPUTE
        self.now = self.note(index, line, lane, self.now, price.host_seconds + price.device_seconds)
        if price.flight_seconds:
            self.now = self.note(index, line, price.lane, self.now, price.flight_seconds)
            self.exposed[price.lane] += price.flight_seconds

    def landing(self, flight: str) -> float:
        """Return the time at which a flight that this rank has issued is over."""
        return self.now

    def hold(self, flight: str, until: float) -> None:
        """Wait for other stages."""
        self.idle += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def end(self) -> float:
        return self.now


@dataclass
class _OverlappedClock(_Clock):
    """A clock of lanes that run side by side.

    Args:
        host: the time of the thread that launches. The worker's thread computes on the host.
        pending: the times at which the worker is done with the tasks that it was given last.
        free: the times at which lanes and communicators are free.
        free_links: the times at which links between ranks are free.
        numbers_sent: the numbers of the step that the host has been sent: before the scalars, and after.
        began: the times at which flights began.
    """

    host: float = 0.0
    pending: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    free_links: dict[str, float] = field(default_factory=dict)
    numbers_sent: set[bool] = field(default_factory=set)
    began: dict[str, float] = field(default_factory=dict)

    def step(self, index: int, line: Instruction, price: Price) -> None:
        """Issue a line, and let its lanes run it as soon as they are free and its values are ready."""
        self.host += price.host_seconds
        inputs_ready = max((self.ready.get(n, 0.0) for n in line.reads), default=0.0)

        # The worker's thread computes on the host. The issuing thread only waits if too much is pending.
        if price.on_host:
            if len(self.pending) >= PENDING:
                self.host = max(self.host, self.pending.pop(0))
            start = max(self.host, self.free[HOST], inputs_ready, self._send_numbers(line))
            self.free[HOST] = self.note(index, line, HOST, start, price.device_seconds)
            self.pending.append(self.free[HOST])
            self.ready |= dict.fromkeys(line.writes, self.free[HOST])
            return

        # Work on the compute lane. A Wait first holds it until the flight is done. An update that ran next to
        # kernels has delayed them, which is added where it is waited for.
        seconds = price.device_seconds
        if isinstance(line, Wait):
            if line.of.lane == OPTIMIZER:
                overlapped = min(inputs_ready, self.free[COMPUTE]) - self.began[line.reads[0]]
                seconds += SLOWDOWN * max(0.0, overlapped)
            self._wait_for(line, inputs_ready)
        if seconds:
            start = max(self.host, self.free[COMPUTE])
            self.free[COMPUTE] = self.note(index, line, COMPUTE, start, seconds)

        if price.flight_seconds:
            # A flight sends values of the compute lane, or receives into memory that was freed there.
            queue = price.communicator or price.lane
            start = issued = max(self.host, self.free.get(queue, 0.0), inputs_ready, self.free[COMPUTE])
            flight = price.flight_seconds
            for name, link_seconds in price.link_seconds.items():
                # A link goes on with the next flight, even if this one still waits for its other link.
                begins = max(issued, self.free_links.get(name, 0.0))
                self.free_links[name] = begins + link_seconds
                # A message shares the link with earlier flights, and all others queue behind those.
                if isinstance(line, Send):
                    flight += min(link_seconds, begins - issued)
                else:
                    start = max(start, begins)

            # Readers wait until the flight ends, and the host too if the copy is not asynchronous.
            end = self.note(index, line, price.lane, start, flight, price.communicator)
            self.free[queue] = end
            self.ready |= dict.fromkeys(line.writes, end)
            self.began |= dict.fromkeys(line.writes, start)
            if price.blocking:
                self._expose(price.lane, end)
                self.host = end

    def _send_numbers(self, line: Instruction) -> float:
        """Return the time at which an update on the host has the step's numbers.

        They are copied after all work that compute has been given: once without the summed scalars, and once
        with them.
        """
        summed = SCALARS in line.reads
        if not isinstance(line, Update) or summed in self.numbers_sent:
            return 0.0
        self.numbers_sent.add(summed)
        return self.free[COMPUTE]

    def _wait_for(self, line: Wait, end: float) -> None:
        """Hold compute until a flight ends. Only readers wait for stored shards that the worker sends."""
        self.ready |= dict.fromkeys(line.writes, end)
        if line.is_for(ToDevice) and all(n.kind is Kind.STORED for n in line.writes):
            return
        # Time for which compute waits for other stages is idle, and for any other flight it is exposed.
        if line.reads[0] in self.held:
            self.idle += max(0.0, end - max(self.host, self.free[COMPUTE]))
        else:
            self._expose(line.of.lane, end)
        self.free[COMPUTE] = max(self.free[COMPUTE], end)

    def landing(self, flight: str) -> float:
        """Return the time at which a flight that this rank has issued is over."""
        return self.ready.get(flight, self.host)

    def hold(self, flight: str, until: float) -> None:
        """Let a flight last until other stages have done their part. Waiting for it counts as idle."""
        self.ready[flight] = max(self.ready.get(flight, 0.0), until)
        self.held.add(flight)

    def _expose(self, lane: str, until: float) -> None:
        """Count the time until then for which compute has nothing to do, for a lane."""
        self.exposed[lane] += max(0.0, until - max(self.host, self.free[COMPUTE]))

    def end(self) -> float:
        """Wait for the worker and its transfers, and return the time at which the step ends."""
        self.host = max(self.host, self.free[HOST])
        self._expose(TRANSFER, self.free[TRANSFER])
        return max(self.host, *self.free.values())
