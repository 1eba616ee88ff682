"""IR: an instruction, a schedule of instructions, and the contexts that these are bound to and priced by.

An instruction is one class that holds everything about it: its fields and text; `bind`, which makes the
action that the executor runs, and that the memory ledger runs on tensors without data (`analysis.dry_run`);
`price`, its seconds; and `wire_bytes`. A class whose `lane` is COMMUNICATION, TRANSFER or OPTIMIZER issues a
flight, and has a `bind_wait` and a `wait_price` for the Wait of it. `verify`, traffic, the agreement of ranks
and the timeline know a new instruction by these. Passes that move lines of one kind (prefetch, reshard,
offload, updates) name the classes that they move.

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
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.update.family import Family
from fnshard.errors import ScheduleError
from fnshard.layout.spec import LayoutSpec, summed_axes
from fnshard.mesh import Mesh

Names = tuple[ValueName, ...]
Env = dict[str, Any]  # the values of a step that runs, by name
Action = Callable[[Env], None]
COMPUTE, COMMUNICATION, TRANSFER, OPTIMIZER, HOST = LANES = (
    "compute", "communication", "transfer", "optimizer", "host",
)  # fmt: skip


class Context(Protocol):
    """A context that `Instruction.bind` binds a line to.

    The one in `runtime.executor.context` runs a step, the one in `analysis.dry_run` counts its memory.

    Args:
        kernels: compiled kernels by name and way.
        comm: the collectives.
        scalars, updater, transfers: None where no line of the schedule needs them.
        freed: a function that is called with each value that dies.
        worker: the thread that runs what is `on_host`, if there is one.
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
        """The device on which a line makes tensors."""

    @property
    def worker(self) -> Any: ...

    def on_update_stream(self, action: Action) -> Callable[[Env], Any]:
        """Return an action that runs next to kernels where the device has streams, for `wait_event`."""

    def wait_event(self, event: Any) -> None:
        """Let the kernels that follow see what an action beside them has done."""

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        """Return a function that runs a part of a line: at once, or in the worker."""

    def packer(self, bucket: str) -> Any:
        """Return the packer of the bucket of this name, which packs leaves into flat rows."""

    def stacks(self, bucket: str) -> Any:
        """Return the packer of a bucket by name, each of whose rows has the leaves that one rank owns."""


@dataclass(frozen=True)
class Price:
    """The seconds that one instruction takes.

    Args:
        device_seconds: seconds on the compute lane (on the host's, where `on_host`), before it sends a flight
            off.
        host_seconds: seconds until the host is at the next line.
        lane: the lane of the flight.
        flight_seconds: seconds of the flight on its lane.
        blocking: whether the host waits for the flight too.
        communicator: the process group that carries the flights of a collective, one after another.
        link_seconds: by the name of each link between ranks, for how long the flight keeps it busy.
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
    """A pricer that `Instruction.price` asks for seconds and sizes; see `analysis.timeline`."""

    schedule: Schedule

    def bucket(self, line: OfBucket) -> Bucket: ...

    def bytes_of(self, names: Names) -> float: ...

    def block_bytes(self, bucket: Bucket, dtype: str) -> float: ...

    def leaf_bytes(self, bucket: Bucket, dtype: str) -> float: ...

    def compute(self, seconds: float, size: float) -> Price: ...

    def copy(self, size: float, **flight: Any) -> Price: ...

    def skips_packing(self, line: Any) -> bool: ...

    def reads_in_place(self, line: Any) -> bool: ...

    def collective(self, verb: str, axes: tuple[str, ...], size: float) -> dict[str, Any]: ...

    def message(self, stage: int, size: float) -> dict[str, Any]: ...

    def here_or_on_host(self, line: Instruction, size: float) -> Price: ...

    def kernel(self, line: Any) -> Price: ...

    def graphs(self, graphs: Any) -> Price: ...

    def transfer(self, line: Any) -> Price: ...

    def update(self, line: Any) -> Price: ...


@dataclass(frozen=True)
class Instruction:
    """A line of a schedule. `reads` and `writes` are value names; `drops` are read for the last time here.

    `verb` is the class's name in snake case. `lane` is COMPUTE, or the lane on which the flight that the line
    issues travels (HOST is a lane of timelines alone). `trips` says how often a rank sends (n - 1) / n of
    `wire_bytes` in a collective, as rings do. `outgoing` says that no kernel reads what is sent, so that the
    Wait may come later (`overlap`). `reads_until_waited` says that what the line reads must not change until
    its Wait.
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
    axes: tuple[str, ...] = ()  # the mesh axes that it communicates over; if empty, those of its bucket

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # ReduceScatter is printed as reduce_scatter.
        name = cls.__name__
        cls.verb = "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))

    @property
    def detail(self) -> str:
        """The text of the line behind its verb."""
        return f"{', '.join(self.reads)} -> {', '.join(self.writes)}"

    @property
    def overwrites(self) -> Names:
        """The values that nothing may read after this line, since it may write to their memory."""
        return ()

    @property
    def changes(self) -> Names:
        """The state that changes until the line's flight is waited for."""
        return ()

    def aliases(self) -> Mapping[ValueName, Names]:
        """Return, for each value that it writes, the values whose memory that may share.

        A line that computes may hand on all that it reads, unless its class says less. A value that it
        overwrites and hands on (a sum in place) is no alias: the result takes its memory over. `insert_frees`
        gives a buffer back when no alias of it is read any more, and `verify` follows aliases.
        """
        return dict.fromkeys(self.writes, self.reads) if self.lane == COMPUTE else {}

    def on_host(self, schedule: Schedule) -> bool:
        """Return whether it computes on the host next to a device, or sends what such a line has made."""
        return False

    def wire_bytes(self, schedule: Schedule) -> int:
        """Return the bytes that a collective moves: all rows of a gather or scatter, the flat of a sum."""
        return 0

    def sent_share(self, ranks: int) -> Fraction:
        """Return the share of `wire_bytes` that one of so many ranks sends."""
        return Fraction(self.trips * (ranks - 1), ranks)

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        """Return the mesh axes that it communicates over."""
        return self.axes

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        """Return the text in which a collective must agree on all ranks, besides verb and axes.

        Args:
            shapes: include shapes that depend on the batch's.
        """
        return f"{len(self.reads)} values"  # the sum of scalars: as many aux, norms and micro-batches

    def bind(self, context: Context) -> Action:
        """Return the action that the executor runs on an environment."""
        raise self._make_missing_error("bind")

    def price(self, pricer: Pricer) -> Price:
        """Return the seconds that it takes, by lane."""
        raise self._make_missing_error("price")

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Return the action of the Wait for a flight that this class has issued."""
        raise cls._make_missing_error("bind_wait")

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        """Return the price of the Wait for a flight of this class, besides the time in flight."""
        return pricer.compute(0.0, 0.0)

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        """Return the text of the Wait for a flight of this class, behind its verb."""
        return wait.bucket

    @classmethod
    def _make_missing_error(cls, method: str) -> ScheduleError:
        return ScheduleError(f"the instruction {cls.__name__} has no {method}(); see `Instruction`.")


@dataclass(frozen=True)
class OfBucket(Instruction):
    """A line about one bucket.

    Args:
        paths: the leaves whose full gradients it reads, in the order of `reads`; or those that it updates.
    """

    bucket: str = ""
    paths: tuple[str, ...] = ()

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
        """Return the bytes of all ranks' rows of the bucket."""
        bucket = schedule.buckets[self.bucket]
        return bucket.row_bytes * schedule.mesh.axes_size(bucket.axes)


@dataclass(frozen=True)
class Wait(OfBucket):
    """A wait until a flight that a line of the class `of` has issued is done."""

    of: type[Instruction] = Instruction

    @property
    def detail(self) -> str:
        return f"{self.of.verb} {self.of.wait_detail(self)}"

    def is_for(self, *kinds: type[Instruction]) -> bool:
        """Return whether it waits for a line of one of these classes."""
        return issubclass(self.of, kinds)

    def on_host(self, schedule: Schedule) -> bool:
        """Return whether it waits for stored shards, which an update on the host has made."""
        return self.of.lane == TRANSFER and not self.of.outgoing and are_stored(self.writes)

    def bind(self, context: Context) -> Action:
        return self.of.bind_wait(self, context)

    def price(self, pricer: Pricer) -> Price:
        return self.of.wait_price(self, pricer)


def with_wait(issue: Instruction, *results: ValueName) -> tuple[Instruction, Wait]:
    """Return a line that issues a flight, and the Wait that makes `results` of it."""
    bucket = getattr(issue, "bucket", "")
    return issue, Wait(issue.unit, issue.phase, issue.writes, results, bucket=bucket, of=type(issue))


def on_arrival(wait: Wait, take: Callable[[Env, Any], None]) -> Action:
    """Return the action of a Wait for a collective: it takes what has come, then releases its buffer."""
    (flight,) = wait.reads

    def run(env: Env) -> None:
        handle = env.pop(flight)
        take(env, handle.wait())
        handle.release()

    return run


def are_stored(names: Names) -> bool:
    """Return whether these are stored shards, and there are any."""
    return bool(names) and all(n.kind is Kind.STORED for n in names)


def follow_aliases(lines: Sequence[Instruction]) -> dict[ValueName, frozenset[ValueName]]:
    """Return for each value the state, gradients and buffers whose memory it may be a part of.

    These are slots, reduced gradients and buffers of the host's pool. If the value is one, it is among them.
    State keeps its memory, whoever writes to it.
    """
    # Slots are there from the start. Any other value has the roots of its aliases, and may be one itself.
    slots = {n for line in lines for n in line.reads if n.kind is Kind.SLOTS}
    roots_of = {n: frozenset({n}) for n in slots}
    for line in lines:
        aliases = line.aliases()
        for name in line.writes:
            if name.is_state:
                continue
            roots = {root for n in aliases.get(name, ()) for root in roots_of.get(n, ())}
            if name.is_pooled or name.original.kind is Kind.REDUCED:
                roots.add(name)
            if roots:
                roots_of[name] = frozenset(roots)
    return roots_of


def reduced_names(names: Names) -> Names:
    """Return the names of reduced gradients, or of copies of them."""
    return tuple(n for n in names if n.original.kind is Kind.REDUCED)


def bucket_of(line: OfBucket, context: Context) -> Bucket:
    """Return the bucket that a line is about."""
    return context.schedule.buckets[line.bucket]


@dataclass(frozen=True, repr=False)
class Schedule:
    """The instructions of one step, and what these name.

    Args:
        kernels, buckets: the kernels and buckets by name.
        specs: the specs of the parts of leaves that a rank computes with (`LayoutSpec.local`).
        inputs: names of values that are there from the start: stored shards, batch, constants, keys, seeds.
        outputs: names of values that the step returns; they are never dropped.
        accumulate: the number of micro-batches.
        planned: how many units' gathered leaves may be alive at once, besides a tiny one and those that are
            kept on purpose.
        scalars: the number of numbers that ReduceScalars sums, in fp64.
        reduced: by bucket, the value that holds its gradients at the end.
        families: by path, how each leaf that trains is updated.
        offloaded: segments that keep on the host what they keep for their backward.
        recomputed: segments that gather sequences again for their backward.
        rounds: by segment and whether it is its backward, the number of the round that it belongs to: kernels
            that share what is gathered, because all micro-batches run one after another, or because a unit
            runs again for its backward. A segment that is not in it is a round of its own.
        stage: the stage of a pipeline that runs the schedule; `specs`, `kernels`, `buckets` and `families`
            are then those of the stage.
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
        """Return the schedule with other lines."""
        return replace(self, instructions=tuple(instructions))

    def counts(self) -> dict[str, int]:
        """Return the number of lines of each verb: `{"gather": 9, "run": 12, ...}`."""
        out: dict[str, int] = {}
        for i in self.instructions:
            out[i.verb] = out.get(i.verb, 0) + 1
        return out

    def as_text(self) -> str:
        """Return one line per instruction: number, phase, unit, verb, detail and bytes on the wire."""
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
            line = f"{number:4d}  {row}  {i.detail}"
            # What travels: the dtype of a bucket, and the bytes.
            if size := i.wire_bytes(self):
                bucket = self.buckets.get(getattr(i, "bucket", ""))
                dtype = f"{short_dtype(bucket.dtype)} " if bucket else ""
                line += f"  {dtype}{size / 1e6:.3f} MB"
            lines.append(line.rstrip())
        return "\n".join(lines)

    def communication(self, shapes: bool = False) -> tuple[str, ...]:
        """Return the sequence of collectives, which every rank must hold.

        Args:
            shapes: include the shapes of exchanges, which may depend on the batch's.
        """
        lines = [i for i in self.instructions if i.lane == COMMUNICATION]
        return tuple(f"{i.verb} {i.axes_of(self)} {i.wire_text(self, shapes)}" for i in lines)

    @cached_property
    def issues(self) -> Mapping[ValueName, Instruction]:
        """The line that has issued each flight, by the flight's name."""
        return {i.writes[0]: i for i in self.instructions if i.lane != COMPUTE}

    @cached_property
    def leaf_lines(self) -> tuple[dict[str, int], dict[str, int]]:
        """By path, the last line that reads a gathered leaf, and the first that writes to its block."""
        last_read: dict[str, int] = {}
        first_written: dict[str, int] = {}
        for number, line in enumerate(self.instructions):
            for name in (*line.reads, *line.drops):
                if name.kind is Kind.GATHERED:
                    last_read[name.path] = number
            for name in line.writes:
                if name.kind is Kind.STORED:
                    first_written.setdefault(name.path, number)
        return last_read, first_written

    @cached_property
    def summed_axes(self) -> tuple[str, ...]:
        """Return the axes over whose ranks gradients and scalars are summed."""
        return summed_axes(self.specs.values(), self.mesh)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.instructions)} instructions, {len(self.kernels)} kernels, mesh {self.mesh})"
        )
