"""IR: an instruction, a schedule of instructions, and what these are bound to and priced by.

An instruction is one class with all that is about it: fields and text; `bind`, what the executor does, and
what the memory ledger runs on tensors without data (`analysis.dry_run`); `price`, what it takes;
`wire_bytes`. A class whose `lane` is COMMUNICATION, TRANSFER or OPTIMIZER issues a flight, and has the same
for its Wait. `verify`, traffic, the agreement of ranks and the timeline know a new instruction by these.
Passes that move lines of one kind (prefetch, reshard, offload, updates) name the classes that they move.

Values are named by `compiler.ir.values.ValueName`: `s:path` prints for a stored shard, `r:bucket` for reduced
gradients; `x2.0` is the first value that segment 2 saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch

from fnshard.compiler.ir.program import short_dtype
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.update.family import Family
from fnshard.errors import ScheduleError
from fnshard.layout.spec import LayoutSpec, summed_axes
from fnshard.mesh import Mesh

Names = tuple[ValueName, ...]
Env = dict[str, Any]  # values by name, as a step runs
Action = Callable[[Env], None]
COMPUTE, COMMUNICATION, TRANSFER, OPTIMIZER, HOST = LANES = (
    "compute", "communication", "transfer", "optimizer", "host",
)  # fmt: skip


class Context(Protocol):
    """What `Instruction.bind` binds a line to: `runtime.executor.context` has the one that runs a step,
    `analysis.dry_run` the one that counts its memory.

    `kernels`: by name and way. `comm`: collectives. `scalars`, `updater`, `transfers`: None where no line of
    the schedule needs them. `freed`: called with each value that dies. `worker`: the thread of what is
    `on_host`, if there is one.
    """

    schedule: Schedule
    kernels: Mapping[tuple[str, Way], Callable[..., Any]]
    comm: Any
    rank: int
    scalars: Any
    updater: Any
    transfers: Any
    freed: Callable[[str, Any], None] | None

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device:
        """Where a line makes tensors."""

    @property
    def worker(self) -> Any: ...

    def beside(self, action: Action) -> Callable[[Env], Any]:
        """Return an action that runs next to kernels where the device has streams, for `join`."""

    def join(self, beside: Any) -> None:
        """Let kernels from here on see what an action beside them has done."""

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        """How a part of a line is run: at once, or by the worker."""

    def packer(self, bucket: str) -> Any:
        """What packs the bucket of this name into flat rows."""

    def stacks(self, bucket: str) -> Any:
        """What packs the bucket of this name, whose rows are of leaves that ranks own."""


@dataclass(frozen=True)
class Price:
    """What one instruction takes.

    `device_seconds`: on the compute lane (on the host's, where `on_host`), before what it sends off.
    `flight_seconds`: of what it sends off, on `lane`. `host_seconds`: until the host is at the next line;
    where `blocking`, the host then waits for the flight too. `communicator`: of a collective, the process
    group that carries its flights, one after another. `link_seconds`: for how long a flight keeps each link
    between ranks busy, by the link's name.
    """

    device_seconds: float = 0.0
    host_seconds: float = 0.0
    lane: str = ""
    flight_seconds: float = 0.0
    on_host: bool = False
    blocking: bool = False
    communicator: str = ""
    link_seconds: Mapping[str, float] = field(default_factory=dict)


class Pricer(Protocol):
    """What `Instruction.price` asks: seconds of work and sizes of values; `analysis.timeline` has the one."""

    schedule: Schedule

    def bucket(self, line: OfBucket) -> Bucket: ...

    def bytes_of(self, names: Names) -> float: ...

    def block_bytes(self, bucket: Bucket, dtype: str) -> float: ...

    def leaf_bytes(self, bucket: Bucket, dtype: str) -> float: ...

    def compute(self, seconds: float, size: float) -> Price: ...

    def copy(self, size: float, **flight: Any) -> Price: ...

    def unpacked(self, line: Any) -> bool: ...

    def collective(self, verb: str, axes: tuple[str, ...], size: float) -> dict[str, Any]: ...

    def message(self, stage: int, size: float) -> dict[str, Any]: ...

    def here_or_on_host(self, line: Instruction, size: float) -> Price: ...

    def kernel(self, line: Any) -> Price: ...

    def graphs(self, graphs: Any) -> Price: ...

    def transfer(self, line: Any) -> Price: ...

    def update(self, line: Any) -> Price: ...


@dataclass(frozen=True)
class Instruction:
    """One line. `reads` and `writes` are value names; `drops` are read for the last time here.

    `verb` is the class in snake case. `lane`: COMPUTE, or where the flight that it issues travels (HOST is a
    lane of timelines alone). `trips`: of a collective, how often a rank sends (n - 1) / n of `wire_bytes`, as
    rings do. `outgoing`: no kernel reads what it sends, so its Wait may come later (`overlap`).
    `reads_until_waited`: what it reads must stay as it is until its Wait.
    """

    verb: ClassVar[str] = "instruction"
    lane: ClassVar[str] = COMPUTE
    trips: ClassVar[int] = 0
    outgoing: ClassVar[bool] = False
    reads_until_waited: ClassVar[bool] = False

    unit: str
    phase: str  # "forward", "backward" or "update", with the micro-batch where there are several
    reads: Names = ()
    writes: Names = ()
    drops: Names = ()
    axes: tuple[str, ...] = ()  # of the mesh, that it communicates over; none: those of its bucket

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        cls.verb = "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))

    @property
    def detail(self) -> str:
        """What the line says beyond its verb."""
        return f"{', '.join(self.reads)} -> {', '.join(self.writes)}"

    @property
    def overwrites(self) -> Names:
        """What it reads last, as it may write to it."""
        return ()

    @property
    def changes(self) -> Names:
        """State that changes until what it issues is waited for."""
        return ()

    def aliases(self) -> Mapping[ValueName, Names]:
        """Return by value that it writes what that may share memory with.

        A line that computes may hand on all that it reads, unless its class says less. What it overwrites and
        hands on (a sum in place) is no alias: the result takes that memory over. `insert_frees` gives a
        buffer back when no alias of it is read any more, and `verify` follows aliases.
        """
        return dict.fromkeys(self.writes, self.reads) if self.lane == COMPUTE else {}

    def on_host(self, schedule: Schedule) -> bool:
        """Whether it computes on the host next to a device, or sends what such a line has made."""
        return False

    def wire_bytes(self, schedule: Schedule) -> int:
        """Size of what a collective moves in all: all rows of a gather or scatter, the flat of a sum."""
        return 0

    def sent_share(self, ranks: int) -> Fraction:
        """How many times `wire_bytes` one of so many ranks sends."""
        return Fraction(self.trips * (ranks - 1), ranks)

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        """The mesh axes that it communicates over."""
        return self.axes

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        """Of a collective: what all ranks must have alike, besides verb and axes; with `shapes`, what depends
        on the batch's too."""
        return f"{len(self.reads)} values"  # of the scalars: as many aux, norms and micro-batches

    def bind(self, context: Context) -> Action:
        """What the executor does, on an environment."""
        raise self._missing("bind")

    def price(self, pricer: Pricer) -> Price:
        """What it takes, in seconds by lane."""
        raise self._missing("price")

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """`bind` of the Wait for what this has issued."""
        raise cls._missing("bind_wait")

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        """`price` of the Wait for what this has issued, besides the time in flight."""
        return pricer.compute(0.0, 0.0)

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        """What the Wait for what this has issued says beyond its verb."""
        return wait.bucket

    @classmethod
    def _missing(cls, method: str) -> ScheduleError:
        return ScheduleError(f"the instruction {cls.__name__} has no {method}(); see `Instruction`.")


@dataclass(frozen=True)
class OfBucket(Instruction):
    """A line about one bucket."""

    bucket: str = ""
    paths: tuple[str, ...] = ()  # whose full gradients are read, in the order of `reads`; of those it updates

    @property
    def detail(self) -> str:
        return f"{self.bucket} over {', '.join(self.axes)}" if self.axes else self.bucket

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        if self.lane != COMMUNICATION:
            return ()
        return self.axes or schedule.buckets[self.bucket].axes

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        bucket = schedule.buckets[self.bucket]
        return f"{bucket.dtype} {self.wire_bytes(schedule)} bytes {bucket.numel} {bucket.paths}"

    def rows_bytes(self, schedule: Schedule) -> int:
        """Of every rank's row of the bucket."""
        bucket = schedule.buckets[self.bucket]
        return bucket.row_bytes * schedule.mesh.axes_size(bucket.axes)


@dataclass(frozen=True)
class Wait(OfBucket):
    """Until what a line of the class `of` has issued is done."""

    of: type[Instruction] = Instruction

    @property
    def detail(self) -> str:
        return f"{self.of.verb} {self.of.wait_detail(self)}"

    def is_for(self, *kinds: type[Instruction]) -> bool:
        """Whether what it waits for is of one of these classes."""
        return issubclass(self.of, kinds)

    def on_host(self, schedule: Schedule) -> bool:
        """Whether it waits for stored shards, which an update on the host has made."""
        return self.of.lane == TRANSFER and not self.of.outgoing and are_stored(self.writes)

    def bind(self, context: Context) -> Action:
        return self.of.bind_wait(self, context)

    def price(self, pricer: Pricer) -> Price:
        return self.of.wait_price(self, pricer)


def with_wait(issue: Instruction, *results: ValueName) -> tuple[Instruction, Wait]:
    """A line that issues a flight, and the Wait that makes `results` of it."""
    bucket = getattr(issue, "bucket", "")
    return issue, Wait(issue.unit, issue.phase, issue.writes, results, bucket=bucket, of=type(issue))


def on_arrival(wait: Wait, take: Callable[[Env, Any], None]) -> Action:
    """The action of a Wait for a collective: `take` what it has brought, then let go of its buffer."""
    (flight,) = wait.reads

    def run(env: Env) -> None:
        handle = env.pop(flight)
        take(env, handle.wait())
        handle.release()

    return run


def are_stored(names: Names) -> bool:
    """Whether these are stored shards, and there are any."""
    return bool(names) and all(n.kind is Kind.STORED for n in names)


def follow_aliases(lines: Sequence[Instruction]) -> dict[ValueName, frozenset[ValueName]]:
    """Return by value which slots, reduced gradients and buffers of the host's pool its memory may be a part
    of, its own too.

    State keeps its memory, whoever writes to it.
    """
    of_slots = {n for line in lines for n in line.reads if n.kind is Kind.SLOTS}
    out = {n: frozenset({n}) for n in of_slots}
    for line in lines:
        aliases = line.aliases()
        for name in line.writes:
            if name.is_state:
                continue
            own = {name} if name.is_pooled or name.original.kind is Kind.REDUCED else set()
            handed_on = {root for n in aliases.get(name, ()) for root in out.get(n, ())}
            if own or handed_on:
                out[name] = frozenset(own | handed_on)
    return out


def reduced_names(names: Names) -> Names:
    """Those of reduced gradients, or of copies of them."""
    return tuple(n for n in names if n.original.kind is Kind.REDUCED)


def bucket_of(line: OfBucket, context: Context) -> Bucket:
    """The bucket that a line is about."""
    return context.schedule.buckets[line.bucket]


@dataclass(frozen=True, repr=False)
class Schedule:
    """The instructions of one step and what they name.

    `specs`: of the parts of leaves that a rank computes with (`LayoutSpec.local`).
    `inputs`: names there from the start (stored shards, batch, constants, keys, seeds); `outputs`:
    names the step returns, never dropped. `kernels`, `buckets` by name. `planned`: how many units'
    gathered leaves may be alive at once, besides a tiny one and those that are kept on purpose. `scalars`:
    how many numbers ReduceScalars sums, in fp64. `reduced`: by bucket, the value that holds its gradients at
    the end. `families`: by path, how leaves that train are updated. `offloaded`, `recomputed`: segments that
    keep on the host what they keep for their backward, and those that keep nothing but their inputs.
    `rounds`: by segment and whether it is its backward, the number of the round in which all micro-batches
    run it one after another; none where each runs alone. `stage`: of a pipeline, which runs it; `specs`,
    `kernels`, `buckets` and `families` are then the stage's own.
    """

    instructions: tuple[Instruction, ...]
    kernels: Mapping[str, Kernel]
    buckets: Mapping[str, Bucket]
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    inputs: Names = ()
    outputs: Names = ()
    accumulate: int = 1
    planned: int = 1
    scalars: int = 0
    reduced: Mapping[str, ValueName] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    rounds: Mapping[tuple[int, bool], int] = field(default_factory=dict)
    stage: int = 0

    def with_instructions(self, instructions: list[Instruction]) -> Schedule:
        """The same schedule with other lines."""
        return replace(self, instructions=tuple(instructions))

    def counts(self) -> dict[str, int]:
        """How many of each verb: `{"gather": 9, "run": 12, ...}`."""
        out: dict[str, int] = {}
        for i in self.instructions:
            out[i.verb] = out.get(i.verb, 0) + 1
        return out

    def as_text(self) -> str:
        """One line per instruction: number, phase, unit, verb, what, bytes on the wire."""
        size = f"{len(self.instructions)} instructions, {len(self.kernels)} kernels"
        stage = f", stage {self.stage}" if self.mesh.stages > 1 else ""
        head = f"# schedule on mesh {self.mesh}{stage}: {size}"
        widths = [
            max((len(getattr(i, a)) for i in self.instructions), default=0) for a in ("phase", "unit", "verb")
        ]
        lines = [head]
        for number, i in enumerate(self.instructions):
            fields = (i.phase, i.unit, i.verb)
            row = "  ".join(f.ljust(w) for f, w in zip(fields, widths, strict=True))
            lines.append(f"{number:4d}  {row}  {i.detail}{self._wire(i)}".rstrip())
        return "\n".join(lines)

    def _wire(self, instruction: Instruction) -> str:
        size = instruction.wire_bytes(self)
        if not size:
            return ""
        bucket = self.buckets.get(getattr(instruction, "bucket", ""))
        return f"  {short_dtype(bucket.dtype) + ' ' if bucket else ''}{size / 1e6:.3f} MB"

    def communication(self, shapes: bool = False) -> tuple[str, ...]:
        """The sequence of collectives, as every rank must hold it.

        Args:
            shapes: those of exchanges too, which may depend on the batch's.
        """
        lines = [i for i in self.instructions if i.lane == COMMUNICATION]
        return tuple(f"{i.verb} {i.axes_of(self)} {i.wire_text(self, shapes)}" for i in lines)

    @cached_property
    def issues(self) -> Mapping[ValueName, Instruction]:
        """By flight, the line that has issued it."""
        return {i.writes[0]: i for i in self.instructions if i.lane != COMPUTE}

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks gradients and scalars are summed."""
        return summed_axes(self.specs.values(), self.mesh)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.instructions)} instructions, {len(self.kernels)} kernels, mesh {self.mesh})"
        )
