"""Base: what every line of a schedule has, and the Wait for what another line has issued.

An instruction is one class with all that is about it: fields and text; `bind`, what the executor does;
`memory`, what that does to memory, on paper; `price`, what it takes; `wire_bytes`. A class whose `lane` is
COMMUNICATION or TRANSFER issues a flight, and has the same three for its Wait. `verify`, traffic, the
fingerprint and the timeline know a new instruction by these. Passes that move lines of one kind (prefetch,
reshard, offload, updates) name the classes that they move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.errors import ScheduleError

if TYPE_CHECKING:
    from fnshard.analysis.cost import Price, Pricer
    from fnshard.analysis.rank_memory import RankMemory
    from fnshard.compiler.schedule.schedule import Schedule
    from fnshard.runtime.executor.context import Context

Names = tuple[ValueName, ...]
Env = dict[str, Any]  # values by name, as a step runs
Action = Callable[[Env], None]
COMPUTE, COMMUNICATION, TRANSFER, HOST = LANES = ("compute", "communication", "transfer", "host")


@dataclass(frozen=True)
class Instruction:
    """One line. `reads` and `writes` are value names; `drops` are read for the last time here.

    `verb` is the class in snake case. `lane`: COMPUTE, or where the flight that it issues travels (HOST is a
    lane of timelines alone).
    """

    verb: ClassVar[str] = "instruction"
    lane: ClassVar[str] = COMPUTE
    trips: ClassVar[int] = (
        0  # of a collective: how often a rank sends (n - 1) / n of `wire_bytes`, as rings do
    )
    outgoing: ClassVar[bool] = (
        False  # what it sends is read by no kernel: its Wait may come later (`overlap`)
    )

    unit: str
    phase: str  # "forward", "backward" or "update", with the micro-batch where there are several
    reads: Names = ()
    writes: Names = ()
    drops: Names = ()

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

    def on_host(self, schedule: Schedule) -> bool:
        """Whether it computes on the host beside a device, or sends what such a line has made."""
        return False

    def wire_bytes(self, schedule: Schedule) -> int:
        """Size of what a collective moves in all: all rows of a gather or scatter, the flat of a sum."""
        return 0

    def sent_share(self, ranks: int) -> Fraction:
        """How many times `wire_bytes` one of so many ranks sends."""
        return Fraction(self.trips * (ranks - 1), ranks)

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        """The mesh axes that it communicates over."""
        return ()

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        """Of a collective: what all ranks must have alike, beside verb and axes; with `shapes`, what depends
        on the batch's too."""
        return f"{len(self.reads)} values"  # of the scalars: as many aux, norms and micro-batches

    def bind(self, context: Context) -> Action:
        """What the executor does, on an environment."""
        raise self._missing("bind")

    def memory(self, rank: RankMemory) -> None:
        """What `bind` does to memory, on paper, in the same order: what is made before something else is
        freed is alive beside it."""
        raise self._missing("memory")

    def price(self, pricer: Pricer) -> Price:
        """What it takes, in seconds by lane."""
        raise self._missing("price")

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """`bind` of the Wait for what this has issued."""
        raise cls._missing("bind_wait")

    @classmethod
    def wait_memory(cls, wait: Wait, rank: RankMemory) -> None:
        """`memory` of the Wait for what this has issued."""
        raise cls._missing("wait_memory")

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        """`price` of the Wait for what this has issued, beside the time in flight."""
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
        return self.bucket

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return schedule.buckets[self.bucket].axes if self.lane == COMMUNICATION else ()

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
        return self.of.lane == TRANSFER and not self.of.outgoing and only_stored(self.writes)

    def bind(self, context: Context) -> Action:
        return self.of.bind_wait(self, context)

    def memory(self, rank: RankMemory) -> None:
        self.of.wait_memory(self, rank)

    def price(self, pricer: Pricer) -> Price:
        return self.of.wait_price(self, pricer)


def only_stored(names: Names) -> bool:
    """Whether these are stored shards, and there are any."""
    return bool(names) and all(n.kind is Kind.STORED for n in names)


def reduced_names(names: Names) -> Names:
    """Those of reduced gradients, or of copies of them."""
    return tuple(n for n in names if n.original.kind is Kind.REDUCED)


def bucket_of(line: OfBucket, context: Context) -> Bucket:
    """The bucket that a line is about."""
    return context.schedule.buckets[line.bucket]
