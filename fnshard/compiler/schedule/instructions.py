"""Schedule: the ordered instructions of one step, as data a person can read, check, price and change.

Values are named by `compiler.ir.values.ValueName`: `s:path` prints for a stored shard, `r:bucket` for reduced
gradients; `x2.0` is the first value that segment 2 saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fnshard.compiler.ir.program import short_dtype
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.canonical import Argument
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh

Names = tuple[ValueName, ...]


@dataclass(frozen=True)
class Instruction:
    """One line. `reads` and `writes` are value names; `drops` are read for the last time here."""

    unit: str
    phase: str  # "forward", "backward" or "update", with the micro-batch where there are several
    reads: Names = ()
    writes: Names = ()
    drops: Names = ()

    @property
    def verb(self) -> str:
        """`gather`, `run`, ...: the class in lower case."""
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))

    @property
    def detail(self) -> str:
        """What the line says beyond its verb."""
        return f"{', '.join(self.reads)} -> {', '.join(self.writes)}"


@dataclass(frozen=True)
class _OfBucket(Instruction):
    bucket: str = ""
    paths: tuple[str, ...] = ()  # of the leaves whose full gradients are read, in the order of `reads`

    @property
    def detail(self) -> str:
        return self.bucket


@dataclass(frozen=True)
class Cast(_OfBucket):
    """Stored leaves -> leaves in compute dtype, on this rank alone."""


@dataclass(frozen=True)
class Gather(_OfBucket):
    """Issue: this rank's stored blocks -> every rank's, over the bucket's axes."""


@dataclass(frozen=True)
class ReduceScatter(_OfBucket):
    """Issue: full gradients -> this rank's blocks of their sum."""


@dataclass(frozen=True)
class AllReduce(_OfBucket):
    """Issue: gradients (full, or blocks that a ReduceScatter left) -> their sum over `axes`."""

    axes: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        return f"{self.bucket} over {', '.join(self.axes)}"


@dataclass(frozen=True)
class Publish(_OfBucket):
    """Issue: updated blocks -> the whole stored leaf on every rank (ZeRO 1 and 2)."""


@dataclass(frozen=True)
class UpdateGather(_OfBucket):
    """Issue: the next thing that the optimizer gathers of the leaves in `paths` -> every rank's blocks of it.

    Reads what their Update reads: the optimizer is pure, so it is run up to that gather. What earlier ones
    brought is among `reads`.
    """


@dataclass(frozen=True)
class Wait(_OfBucket):
    """Until the collective is done; `of` is its verb."""

    of: str = ""

    @property
    def detail(self) -> str:
        return f"{self.of} {self.bucket}"


@dataclass(frozen=True)
class ToDevice(_OfBucket):
    """Issue: what rests on the host or on disk -> copies on the device (`t:`), in order of `reads`.

    `into`: the device tensors that are overwritten (stored shards after an update on the host), else new
    ones are made.
    """

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shortened(self.reads)


@dataclass(frozen=True)
class ToHost(_OfBucket):
    """Issue: device values -> new copies on the host (`h:`), or `into` state that rests there or on disk."""

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shortened(self.reads)


@dataclass(frozen=True)
class Local(_OfBucket):
    """Full gradients become the reduced ones: nobody to sum with."""


@dataclass(frozen=True)
class Run(Instruction):
    """A kernel. `segment`: its place in the program."""

    kernel: str = ""
    backward: bool = False
    segment: int = 0
    units: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        def shown(names: Names) -> str:
            leaves = [n for n in names if n.kind in (Kind.GATHERED, Kind.STORED, Kind.GRADIENT)]
            rest = [n for n in names if n not in leaves]
            kinds = sorted({n.kind for n in leaves})
            return ", ".join(rest + [f"{sum(n.kind is k for n in leaves)} {k}" for k in kinds])

        way = "bwd" if self.backward else "fwd"
        return f"{self.kernel}.{way}({shown(self.reads)}) -> {shown(self.writes)}"


@dataclass(frozen=True)
class Free(Instruction):
    """Drop values; nothing reads them any more."""

    @property
    def detail(self) -> str:
        words = {
            (Kind.GATHERED, Kind.GATHERED): "gathered leaves",
            (Kind.GRADIENT, Kind.GRADIENT): "full gradients",
            (Kind.LOADED, Kind.STORED): "loaded shards",
            (Kind.LOADED, Kind.SLOTS): "loaded slots",
        }
        kinds = [(n.kind, n.original.kind) for n in self.drops]
        rest = [n for n, kind in zip(self.drops, kinds, strict=True) if kind not in words]
        return ", ".join(rest + [f"{count} {words[k]}" for k in words if (count := kinds.count(k))])


@dataclass(frozen=True)
class Add(Instruction):
    """Sum of two values; into the first where `owned` says that nobody else holds it."""

    owned: bool = False


@dataclass(frozen=True)
class Zeros(Instruction):
    """A tangent that nobody contributed to."""

    like: Argument | None = None


@dataclass(frozen=True)
class Accumulate(_OfBucket):
    """Add a micro-batch's gradients to the accumulator (in the optimizer's dtype); the first makes it."""

    first: bool = False


@dataclass(frozen=True)
class Norms(_OfBucket):
    """Squared norms of a bucket's reduced gradients, padding and replicas counted out."""


@dataclass(frozen=True)
class ReduceScalars(Instruction):
    """Issue: losses, counts, aux scalars, squared norms and flags of all ranks, in one small sum."""


@dataclass(frozen=True)
class Update(_OfBucket):
    """The optimizer on one bucket's leaves, in place: reads the gradients, the parameters (but where the host
    updates its master copies), slots, the scalars it must wait for, and what an UpdateGather brought; in the
    order of `paths`.
    """

    @property
    def slots(self) -> dict[str, ValueName]:
        """By path, the name its slots go by."""
        return {n.path: n for n in self.reads[1:] if n.original.kind is Kind.SLOTS}

    @property
    def params(self) -> dict[str, ValueName]:
        """By path, the name its stored shard goes by; none where master copies are updated."""
        return {n.path: n for n in self.reads[1:] if n.original.kind is Kind.STORED}


def _shortened(names: Names) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def is_pooled(name: ValueName) -> bool:
    """Whether a value lies in a host buffer that goes back to the pool: all copies but master parameters."""
    return name.kind is Kind.HOST and name.original.kind is not Kind.STORED


def in_place_if_shared(line: Instruction, schedule: Schedule) -> bool:
    """Whether ranks that share memory gather this into leaves that they share (`in_place_gather`).

    Blocks may be read until the gather is waited for, and of what a gather reads only stored leaves live on.
    """
    bucket = schedule.buckets[line.bucket]
    as_sent = all(schedule.specs[p].compute_dtype == bucket.dtype for p in bucket.paths)
    return isinstance(line, Gather) and as_sent and all(n.kind is Kind.STORED for n in line.reads)


def keeps_own_row(line: Instruction, schedule: Schedule) -> bool:
    """Whether two ranks that share memory send but the other's row of this reduction.

    Its gradients live until it is waited for; they need no cast, and none is missing.
    """
    bucket = schedule.buckets[line.bucket]
    as_made = all(schedule.specs[p].compute_dtype == bucket.dtype for p in bucket.paths)
    whole = set(line.paths) == set(bucket.paths) and all(n.kind is Kind.GRADIENT for n in line.reads)
    return isinstance(line, ReduceScatter) and as_made and whole


def updated_at_once(line: ReduceScatter, schedule: Schedule) -> bool:
    """Whether one Update alone reads what this reduces, before any kernel or collective behind its Wait."""
    lines = schedule.instructions
    wait = next(k for k, i in enumerate(lines) if isinstance(i, Wait) and line.writes[0] in i.reads)
    reduced = set(lines[wait].writes)
    readers = [k for k, i in enumerate(lines) if reduced & set(i.reads)]
    return (
        len(readers) == 1
        and isinstance(lines[readers[0]], Update)
        and not reduced & set(schedule.outputs)
        and not any(isinstance(i, (Run, *COLLECTIVES)) for i in lines[wait : readers[0]])
    )


def taken_over(line: Instruction) -> Names:
    """What an instruction reads last, as it may write to it: reduced gradients, scaled or summed in place."""
    if not isinstance(line, Update | AllReduce):
        return ()
    return tuple(n for n in line.reads if n.original.kind is Kind.REDUCED)


COLLECTIVES = (Gather, ReduceScatter, AllReduce, Publish, UpdateGather, ReduceScalars)
TRANSFERS = (ToDevice, ToHost)


@dataclass(frozen=True, repr=False)
class Schedule:
    """The instructions of one step and what they name.

    `inputs`: names there from the start (stored shards, batch, constants, keys, seeds); `outputs`:
    names the step returns, never dropped. `kernels`, `buckets` by name. `planned`: how many units'
    gathered leaves may be alive at once, beside those that are kept on purpose. `scalars`: how many
    numbers ReduceScalars sums, in fp64. `reduced`: by bucket, the value that holds its gradients at the end.
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
        head = f"# schedule on mesh {self.mesh}: {size}"
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
        size = wire_bytes(self, instruction)
        if not size or isinstance(instruction, Wait):
            return ""
        bucket = self.buckets[instruction.bucket]
        return f"  {short_dtype(bucket.dtype)} {size / 1e6:.3f} MB"

    def communication(self) -> tuple[str, ...]:
        """The sequence of collectives, as every rank must hold it; the batch's shape is not in it."""
        out = []
        for i in self.instructions:
            if isinstance(i, COLLECTIVES):
                bucket = self.buckets.get(getattr(i, "bucket", ""))
                what = f"{len(i.reads)} values"  # of the scalars: as many aux, norms and micro-batches
                if bucket:
                    what = f"{bucket.axes} {bucket.dtype} {bucket.numel} {bucket.paths}"
                out.append(f"{i.verb} {getattr(i, 'axes', '')} {what}")
        return tuple(out)

    def fingerprint(self) -> str:
        """Hash of `communication`."""
        return hashlib.sha256("\n".join((str(self.mesh), *self.communication())).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.instructions)} instructions, {len(self.kernels)} kernels, mesh {self.mesh})"
        )


def wire_bytes(schedule: Schedule, instruction: Instruction) -> int:
    """Size of what a collective moves as a whole: all rows of a gather or scatter, the flat of a sum."""
    if isinstance(instruction, Gather | ReduceScatter | Publish | UpdateGather):
        bucket = schedule.buckets[instruction.bucket]
        return bucket.row_bytes * schedule.mesh.axes_size(bucket.axes)
    if isinstance(instruction, AllReduce):
        return schedule.buckets[instruction.bucket].row_bytes
    return 0
