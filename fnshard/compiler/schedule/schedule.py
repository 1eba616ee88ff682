"""Schedule: the ordered instructions of one step, as data a person can read, check, price and change.

Values are named by `compiler.ir.values.ValueName`: `s:path` prints for a stored shard, `r:bucket` for reduced
gradients; `x2.0` is the first value that segment 2 saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fnshard.compiler.ir.program import short_dtype
from fnshard.compiler.ir.values import ValueName
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.schedule.instructions import COMMUNICATION, COMPUTE, Instruction, Names
from fnshard.layout.spec import LayoutSpec, summed_axes
from fnshard.mesh import Mesh


@dataclass(frozen=True, repr=False)
class Schedule:
    """The instructions of one step and what they name.

    `specs`: of the parts of leaves that a rank computes with (`LayoutSpec.local`).
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
        """The axes over whose ranks losses are averaged."""
        return summed_axes(self.specs.values(), self.mesh)

    def fingerprint(self) -> str:
        """Hash of `communication`."""
        return hashlib.sha256("\n".join((str(self.mesh), *self.communication())).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.instructions)} instructions, {len(self.kernels)} kernels, mesh {self.mesh})"
        )
