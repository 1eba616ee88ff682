"""Memory: the ledger of every byte of a step, from its schedule, before anything runs.

`measure` runs a schedule's bindings on tensors without data (`dry_run`), and finds the storages that are
alive at each instruction, by category, unit and tier. `footprint` counts kernels, by the liveness of their
graphs, or by the code that Inductor generated if they have been compiled.

Some bytes are not counted: those that the caller holds besides the state and the batch; those that libraries
take for themselves (gloo's staging, NCCL's channels, cuBLAS's workspace); allocations that a caching
allocator keeps but does not use; and tensors of a few numbers. Losses, steps and random keys are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fnshard.analysis.dry_run import DryContext
from fnshard.analysis.footprint import constant_bytes, footprint_of
from fnshard.analysis.storages import (
    ACTIVATIONS,
    BUFFERS,
    CATEGORIES,
    GATHERED,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    UNCOUNTED,
    WORKSPACES,
    Moment,
    StorageTracker,
)
from fnshard.analysis.tables import columns, megabytes
from fnshard.analysis.transport import Counting, TransportKind
from fnshard.analysis.updates import UpdateMemory, size_of
from fnshard.compiler.ir.program import Program
from fnshard.compiler.ir.values import LOSS_TANGENT, MASTER, Kind, ValueName
from fnshard.compiler.kernels.inductor import Compiled
from fnshard.compiler.schedule.instructions import Env
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.update.slot_shapes import Slots
from fnshard.errors import report
from fnshard.layout.partition import block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh


@dataclass(frozen=True)
class MemoryAnalysis:
    """The bytes that a step takes of one rank's memory.

    Args:
        peak_bytes: the bytes on the device at the worst moment.
        at: the number of the instruction in which the peak is.
        line: the instruction in words.
        peak: the bytes at that moment by category.
        resident: the bytes on the device between steps by category, without the batch.
        host_bytes, disk_bytes: the bytes on the host and on the disk at their peaks.
        host_resident_bytes, disk_resident_bytes: the bytes there between steps.
        leaves: by path, the bytes of the stored shard, optimizer state, gathered parameter and gradient
            shard.
        kernels: "eager" or "inductor", by whose liveness kernels were counted.

    The name of a value says its category (`storages.category_of`):

    - parameter shards, optimizer state: what the state holds, by spec;
    - gathered units: full leaves in compute dtype; where ranks share memory, these are among the buffers, and
      those that are read where they are stored take nothing more;
    - gradients: full ones, this rank's blocks of their sums, accumulators;
    - saved activations: what kernels return besides gradients, for the backward or the next one;
    - kernel workspaces: what lives only inside a kernel, and temporaries of updates, norms and casts;
    - transfer and bucket buffers: packed rows, what collectives take, copies between tiers;
    - inputs: the batch, constants, random keys.
    """

    peak_bytes: int
    at: int
    line: str
    peak: Mapping[str, int]
    resident: Mapping[str, int]
    host_bytes: int
    host_resident_bytes: int
    disk_bytes: int
    disk_resident_bytes: int
    leaves: Mapping[str, Mapping[str, int]] = field(repr=False)
    kernels: str = "eager"

    @property
    def resident_bytes(self) -> int:
        """Count the bytes on the device between steps."""
        return sum(self.resident.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and dicts."""
        return asdict(self) | {"resident_bytes": self.resident_bytes}

    def __str__(self) -> str:
        rows = [("MB", "at the peak", "between steps")]
        rows += [
            (c, megabytes(self.peak.get(c, 0)), megabytes(self.resident.get(c, 0)))
            for c in CATEGORIES
            if self.peak.get(c) or self.resident.get(c)
        ]
        rows.append(("device", megabytes(self.peak_bytes), megabytes(self.resident_bytes)))
        if self.host_bytes:
            rows.append(("host", megabytes(self.host_bytes), megabytes(self.host_resident_bytes)))
        if self.disk_bytes:
            rows.append(("disk", megabytes(self.disk_bytes), megabytes(self.disk_resident_bytes)))
        return "\n".join([*columns(rows), f"peak in instruction {self.at}: {self.line}"])


@dataclass(frozen=True)
class MemoryTimeline:
    """A step's bytes at every instruction, each at its worst moment."""

    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the worst moment of all."""
        return max((m.bytes for m in self.moments), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return `lines`, then one list per category and tier, each as long as the schedule."""
        out: dict[str, Any] = {"lines": [m.line for m in self.moments]}
        out |= {c: [m.device[c] for m in self.moments] for c in CATEGORIES}
        return out | {"host": [m.host for m in self.moments], "disk": [m.disk for m in self.moments]}


def describe_peak(analysis: MemoryAnalysis, detail: str = "") -> str:
    """Return the peak in words: bytes with a `detail`, the largest parts, the line and the ways out."""
    largest = sorted(analysis.peak.items(), key=lambda item: -item[1])[:3]
    return report(
        f"the step's peak is {megabytes(analysis.peak_bytes)} MB on the device{detail}. It is made of:",
        [
            *(f"{category}: {megabytes(size)} MB" for category, size in largest),
            f"in instruction {analysis.at}: {analysis.line}",
        ],
        " ".join(dict.fromkeys(_WAYS_OUT[category] for category, _ in largest)),
    )


_WAYS_OUT = {
    PARAMETERS: "Shard parameters (full_shard), on more ranks, or memory='host'.",
    GATHERED: "Smaller units, reshard=True, prefetch=0.",
    GRADIENTS: "Shard gradients (zero2, full_shard), overlap=0, optimizer_memory='host'.",
    OPTIMIZER: "Shard optimizer state (zero1, zero2, full_shard), or optimizer_memory='host'.",
    ACTIVATIONS: "remat='unit' or a fraction, more micro-batches (accumulate=), smaller batches.",
    WORKSPACES: "Smaller batches (accumulate=), or a chunked loss.",
    BUFFERS: "Smaller units, prefetch=0, overlap=0, a narrower compute_dtype or reduce_dtype.",
    INPUTS: "A smaller batch.",
}


@dataclass(frozen=True)
class Ledger:
    """A step's memory as `measure` finds it.

    Args:
        sizes: the bytes of all values of the step, by name.
    """

    analysis: MemoryAnalysis
    timeline: MemoryTimeline
    sizes: Mapping[ValueName, int]


class SizesOfMore(dict[ValueName, int]):
    """A dict of the bytes of all values, of a step with more micro-batches than the one that was measured.

    A value is as large as the same value of another micro-batch, and a copy is as large as its original.
    """

    def __init__(self, measured: Mapping[ValueName, int]) -> None:
        super().__init__(measured)
        self._alike = {_drop_micro_batch(n): size for n, size in measured.items() if isinstance(n, ValueName)}

    def __missing__(self, name: ValueName) -> int:
        return self._alike[_drop_micro_batch(name)]


def _drop_micro_batch(name: ValueName) -> ValueName:
    """Return the name of the original of a value, without its micro-batch."""
    original = name.original
    return original.of(None, original.version)


def measure(
    schedule: Schedule,
    program: Program,
    batch_bytes: Mapping[str, int],
    compiled: Compiled | None,
    transport: TransportKind,
    compiled_update: bool,
) -> Ledger:
    """Run the schedule's bindings on tensors without data.

    Args:
        program: the program, for its inputs.
        batch_bytes: the bytes of the whole batch's leaves on this rank, by name.
        compiled: the kernels, if Inductor has compiled them.
        transport: the way in which ranks communicate.
        compiled_update: whether updates are compiled.
    """
    mesh = schedule.mesh
    tracker = StorageTracker(mesh.device_type)
    comm = Counting(mesh, transport, tracker)

    # The shapes and dtypes of the optimizer's state on this rank, master copies included.
    slots = {}
    for path, family in schedule.families.items():
        spec = schedule.specs[path]
        slots[path] = dict(family.blocks)
        if spec.has_master:
            slots[path][MASTER] = block_shape(spec.shape, spec.optimizer, mesh), spec.optimizer_dtype

    # A kernel's footprint depends on how its arguments are held, which is known when it is called.
    context = DryContext(
        schedule,
        tracker,
        comm,
        footprint=lambda name, way, entries: footprint_of(
            schedule.kernels[name], way, entries, compiled, mesh.device_type
        ),
        updates=UpdateMemory(schedule, slots, compiled_update),
        rank=mesh.rank,
    )

    # Run all lines, and find the worst moment. The transport's own buffers are held throughout.
    env, constants = _make_inputs(tracker, schedule, program, batch_bytes, slots)
    context.run(env)
    transport_bytes = comm.transport_bytes()
    moments = tuple(
        replace(m, device={**m.device, BUFFERS: m.device[BUFFERS] + transport_bytes}) for m in tracker.moments
    )
    worst = max(moments, key=lambda m: m.bytes)

    # After the last line only the state is left.
    resident = {c: tracker.categories[c] for c in (PARAMETERS, OPTIMIZER)}
    resident |= {BUFFERS: transport_bytes, INPUTS: constants}
    # Kernels of the eager backend are plain functions. Inductor's are objects, except for empty graphs.
    eager = all(isinstance(run, FunctionType) for run in (compiled or {}).values())
    analysis = MemoryAnalysis(
        peak_bytes=worst.bytes,
        at=worst.index,
        line=worst.line,
        peak={c: n for c, n in worst.device.items() if n},
        resident={c: n for c, n in resident.items() if n},
        host_bytes=tracker.worst["host"],
        host_resident_bytes=tracker.live["host"],
        disk_bytes=tracker.worst["disk"],
        disk_resident_bytes=tracker.live["disk"],
        leaves=_count_leaf_bytes(schedule.specs, slots, mesh),
        kernels="eager" if eager else "inductor",
    )
    return Ledger(analysis, MemoryTimeline(moments), context.sizes)


def _make_inputs(
    tracker: StorageTracker,
    schedule: Schedule,
    program: Program,
    batch_bytes: Mapping[str, int],
    slots: Slots,
) -> tuple[Env, int]:
    """Make state, batch, constants, keys and the seed on "meta". Return them and the bytes of constants."""
    mesh, accumulate, env, constants = schedule.mesh, schedule.accumulate, {}, 0

    def new(shape: Sequence[int], dtype: torch.dtype, *where: str) -> Tensor:
        value = torch.empty(tuple(shape), dtype=dtype, device="meta")
        tracker.adopt(value, *where)
        return value

    # The state: this rank's blocks of parameters, and the optimizer's slots.
    for path, spec in schedule.specs.items():
        shape = block_shape(spec.shape, spec.storage, mesh)
        env[ValueName(Kind.STORED, path)] = new(shape, spec.storage_dtype, PARAMETERS, spec.memory)
    for path, parts in slots.items():
        where = OPTIMIZER, schedule.specs[path].optimizer_memory
        env[ValueName(Kind.SLOTS, path)] = {n: new(*part, *where) for n, part in parts.items()}

    # Micro-batches lie in the storage of the whole batch. Random keys, constants and others have their own.
    whole = {ValueName(Kind.BATCH, n): new((size,), torch.uint8, INPUTS) for n, size in batch_bytes.items()}
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        value, base = node.meta["val"], entry.value_name
        if entry.kind == "leaf":
            continue
        size = value.untyped_storage().nbytes()
        if entry.kind == "constant":
            constants += size
        is_shared = accumulate == 1 or entry.kind in ("constant", "axis")  # by all micro-batches
        for micro in [None] if is_shared else range(accumulate):
            flat = whole[base] if base in whole else new((size,), torch.uint8, INPUTS)
            empty = torch.empty(0, dtype=value.dtype, device="meta")
            env[base.of(micro)] = empty.set_(flat.untyped_storage(), 0, value.shape, value.stride())

    # What kernels hold for themselves, the tangent of the loss, and numbers that are too small to count.
    kernel_constants = 0
    for kernel in schedule.kernels.values():
        kernel_constants += sum(constant_bytes(module) for module in kernel.modules.values())
    env[LOSS_TANGENT] = new((), torch.float32, INPUTS)
    env["kernels' constants"] = new((kernel_constants,), torch.uint8, INPUTS)
    for name in schedule.inputs:
        if name not in env:
            env[name] = new((), torch.float32, INPUTS, UNCOUNTED)
    return env, constants + kernel_constants


def _count_leaf_bytes(specs: Mapping[str, LayoutSpec], slots: Slots, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Return the bytes of each leaf's stored shard, optimizer's slots, gathered leaf and gradient shard."""
    return {
        path: {
            "stored": size_of(block_shape(s.shape, s.storage, mesh), s.storage_dtype),
            "optimizer": sum(size_of(shape, dtype) for shape, dtype in slots.get(path, {}).values()),
            "gathered": size_of(s.shape, s.compute_dtype),
            "gradient": size_of(block_shape(s.shape, s.gradient, mesh), s.reduce_dtype) if s.trainable else 0,
        }
        for path, s in specs.items()
    }
