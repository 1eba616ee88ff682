"""Offload: a pass that brings what is stored on the host or on disk to where it is read, and back.

Every value is stored on a tier: a stored shard in `memory`, optimizer slots and gradient shards that wait for
the update in `optimizer_memory`, what an offloaded segment saves on the host. Every instruction runs on one,
too: an Update where `update_on` says, sums and norms of gradients that are on the host there, all else on the
device. Where the two differ, a transfer is written between them. The pass keeps numerics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    AllReduce,
    Instruction,
    Norms,
    Run,
    ToDevice,
    ToHost,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule, with_wait


def offload(schedule: Schedule) -> Schedule:
    """Write the transfers that specs and remat ask for, each issued and waited for at once."""
    # Nothing to move: everything is on the device.
    segments = schedule.offloaded
    tiers = {t for s in schedule.specs.values() for t in (s.memory, s.optimizer_memory)}
    if tiers == {"device"} and not segments:
        return schedule
    if segments:
        schedule = _offload_activations(schedule, segments)

    # Stored shards, slots and gradients, line by line. Gradients on the host have another name there.
    walk = _OffloadWalk(schedule)
    for line in schedule.instructions:
        walk.add(line)
    outputs = tuple(walk.host.get(n, n) for n in schedule.outputs)
    reduced = {b: walk.host.get(n, n) for b, n in schedule.reduced.items()}
    return replace(schedule.with_instructions(walk.out), outputs=outputs, reduced=reduced)


@dataclass
class _OffloadWalk:
    """A walk through a schedule that rewrites its lines.

    Args:
        out: the lines that were written.
        host: copies on the host, by the name of their value.
        loaded: copies on the device, by the name of their value; with the number of kernels that had run when
            each was read last, the phase of that reading, and the line at which it was made.
        written: by stored shard, the last line that wrote it.
        runs: the number of kernels so far.
        made: the number of loads so far, which names copies.
    """

    schedule: Schedule
    out: list[Instruction] = field(default_factory=list)
    host: dict[ValueName, ValueName] = field(default_factory=dict)
    loaded: dict[ValueName, tuple[ValueName, int, str, int]] = field(default_factory=dict)
    written: dict[ValueName, int] = field(default_factory=dict)
    runs: int = 0
    made: int = 0

    def __post_init__(self) -> None:
        lines = self.schedule.instructions
        self.updates = {i.bucket: i for i in lines if isinstance(i, Update) and i.number == 0}
        self.has_norms = any(isinstance(i, Norms) for i in lines)
        # Reduced gradients that are read as such. A part of a sum, which an AllReduce completes, is not.
        read = {n for i in lines if not isinstance(i, AllReduce) for n in i.reads}
        self.finals = {n for n in read | set(self.schedule.outputs) if n.kind is Kind.REDUCED}

    def waits_on_host(self, bucket: str) -> bool:
        """Return whether the bucket's gradient shards are on the host until they are used."""
        spec = self.schedule.specs[self.schedule.buckets[bucket].paths[0]]
        update = self.updates.get(bucket)
        at_once = update is not None and self.schedule.accumulate == 1
        at_once = at_once and not (self.has_norms and "scalars" in update.reads)  # norms come at the end
        return spec.optimizer_memory != "device" and not (spec.updated_on == "device" and at_once)

    def is_on_host(self, line: Instruction) -> bool:
        """Return whether the instruction runs on the host."""
        # Full gradients, which a rank sums before ranks do, stay on the device.
        is_of_full = isinstance(line, Accumulate) and line.writes[0].kind is Kind.ACCUMULATED
        if isinstance(line, Accumulate | Norms) and not is_of_full and self.waits_on_host(line.bucket):
            return True
        return line.on_host(self.schedule)

    def find_tier(self, name: ValueName) -> str:
        """Return the tier that a state value is stored on, and "device" for any other value."""
        if not name.is_state:
            return "device"
        spec = self.schedule.specs[name.path]
        return spec.memory if name.kind is Kind.STORED else spec.optimizer_memory

    def add(self, line: Instruction) -> None:
        """Write a line, with the transfers around it."""
        self.runs += isinstance(line, Run)
        if self.is_on_host(line):
            self.add_on_host(line)
        else:
            self.add_on_device(line)
        self.written |= {n: len(self.out) for n in line.writes if n.kind is Kind.STORED}

    def add_on_host(self, line: Instruction) -> None:
        """Write a line that runs on the host.

        Its gradients were sent there before. Shards that it writes and the device stores are sent to the
        device.
        """
        reads = tuple(self.host.get(n, n) for n in line.reads)
        moved = [n for n in line.writes if n.kind is Kind.STORED and self.find_tier(n) == "device"]
        gradients = {n: n.on_host() for n in line.writes if n.kind is Kind.REDUCED}
        self.host |= gradients
        names = gradients | {n: n.on_host() for n in moved}
        self.out.append(replace(line, reads=reads, writes=tuple(names.get(n, n) for n in line.writes)))
        if moved:
            self.out += _transfer(ToDevice, line, [n.on_host() for n in moved], moved, into=True)

    def add_on_device(self, line: Instruction) -> None:
        """Write a line that runs on the device.

        What it reads from elsewhere is loaded before it. What it writes of that, and gradients that wait on
        the host, are sent there behind it.
        """
        # Read copies in the place of what is not on the device.
        away = [n for n in dict.fromkeys(line.reads) if self.find_tier(n) != "device"]
        away += [self.host[n] for n in dict.fromkeys(line.reads) if n in self.host]
        self.load(line, away)
        names = {n: self.loaded[n][0] for n in away} | {
            n: self.loaded[h][0] for n, h in self.host.items() if h in away
        }
        back = [n for n in line.writes if self.find_tier(n) != "device"]
        # A Publish that was issued on a copy is waited for into that copy.
        names |= {n: self.loaded[n][0] for n in back}
        reads, writes = (tuple(names.get(n, n) for n in side) for side in (line.reads, line.writes))
        self.out.append(replace(line, reads=reads, writes=writes))

        # Note when copies were read last, and send back what is stored elsewhere.
        for n in away:
            copy, _, _, at = self.loaded[n]
            self.loaded[n] = (copy, self.runs, line.phase, at)
        if back:
            self.out += _transfer(ToHost, line, [names[n] for n in back], back, into=True)
        for n in line.writes:
            if n in self.finals and self.waits_on_host(line.bucket):
                self.host[n] = n.on_host()
                self.out += _transfer(ToHost, line, [n], [self.host[n]])

    def load(self, line: Instruction, names: Sequence[ValueName]) -> None:
        """Write the load of values in front of a line, for those without a copy that can be read again."""
        fresh = [n for n in names if not self.is_still_loaded(n, line)]
        copies = [n.on_device(self.made) for n in fresh]
        if fresh:
            self.made += 1
            self.out += _transfer(ToDevice, line, fresh, copies)
            self.loaded |= {
                n: (c, self.runs, line.phase, len(self.out)) for n, c in zip(fresh, copies, strict=True)
            }

    def is_still_loaded(self, name: ValueName, line: Instruction) -> bool:
        """Return whether an earlier copy can be read again: no kernel has run since, or its unit is kept."""
        if name not in self.loaded or name.kind is not Kind.STORED:
            return False
        _, last, phase, at = self.loaded[name]
        kept = (
            not self.schedule.specs[name.path].reshard and phase.replace("forward", "backward") == line.phase
        )
        fresh = self.written.get(name, -1) < at
        return (last >= self.runs - isinstance(line, Run) or kept) and fresh


def _transfer(
    kind: type, line: Instruction, reads: Sequence[ValueName], writes: Sequence[ValueName], into: bool = False
) -> tuple[Instruction, Wait]:
    """Return the issue and the Wait of one transfer, next to `line`."""
    flight = ValueName(Kind.FLIGHT, f"{kind.__name__} {reads[0]} {writes[0]}")
    where = {"bucket": getattr(line, "bucket", ""), "into": tuple(writes) if into else ()}
    return with_wait(kind(line.unit, line.phase, tuple(reads), (flight,), **where), *writes)


def _offload_activations(schedule: Schedule, segments: frozenset[int]) -> Schedule:
    """Send what offloaded segments keep to the host, and load it again before the backward.

    It is sent behind its last reader of the forward.
    """
    # Who reads each value, and who makes it.
    lines = list(schedule.instructions)
    known = _describe_values(lines, schedule)
    readers: dict[ValueName, list[int]] = {}
    for index, line in enumerate(lines):
        for name in line.reads:
            readers.setdefault(name, []).append(index)
    made = {n: i for i, line in enumerate(lines) for n in line.writes}

    # By line, what is sent to the host behind it, and what is loaded before it. A value stays if nothing of
    # the backward reads it, if something else reads it after that has begun, or if it has gaps, which a copy
    # closes.
    after: dict[int, list[ValueName]] = {}
    needed: dict[int, list[ValueName]] = {}
    for name, argument in known.items():
        backward = [i for i in readers.get(name, ()) if isinstance(lines[i], Run) and lines[i].of_backward]
        others = [i for i in readers.get(name, ()) if i not in backward]
        last = max([made[name], *others])
        if not backward or last > backward[0] or not _is_dense(argument):
            continue
        # With fewer kernels between, the value would come back as soon as it is gone.
        between = sum(isinstance(line, Run) for line in lines[last + 1 : backward[0]])
        if between < 2 or not all(lines[i].segment in segments for i in backward):
            continue
        after.setdefault(last, []).append(name)
        for i in backward:
            needed.setdefault(i, []).append(name)

    # Write the transfers. Each reader of the backward loads a copy of its own.
    out: list[Instruction] = []
    for index, line in enumerate(lines):
        if index in needed:
            names = needed[index]
            copies = {n: n.on_device(index) for n in names}
            out += _transfer(ToDevice, line, [n.on_host() for n in names], list(copies.values()))
            line = replace(line, reads=tuple(copies.get(n, n) for n in line.reads))
        out.append(line)
        if index in after:
            names = after[index]
            out += _transfer(ToHost, line, names, [n.on_host() for n in names])
    return schedule.with_instructions(out)


def _describe_values(lines: Iterable[Instruction], schedule: Schedule) -> dict[ValueName, Argument]:
    """Return the shapes and strides of the values that forward kernels hand on or save, by name."""
    out: dict[ValueName, Argument] = {}
    for line in lines:
        if isinstance(line, Run) and not line.of_backward:
            kernel = schedule.kernels[line.kernel]
            named = zip(line.writes, (*kernel.source.outputs, *kernel.saved), strict=True)
            out |= {n: a for n, a in named if n.kind is Kind.VALUE}
    return out


def _is_dense(argument: Argument) -> bool:
    """Return whether the strides cover a block of memory without gaps or overlaps."""
    step = 1
    for size, stride in sorted(zip(argument.shape, argument.stride, strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True
