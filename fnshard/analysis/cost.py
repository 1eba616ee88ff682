"""Cost: what every instruction of a schedule takes on a `Hardware`, in seconds and by lane.

Kernels are counted by `flops`; packing, casts and updates by their bytes; collectives by the algorithm
bandwidth of rings: (n - 1) / n of a buffer for a gather, a scatter or an all-to-all, twice that for a sum
(Patarasuk and Yuan, JPDC 2009), within a node or between nodes as the group lies. Transfers go by the bytes
that the ledger counts. The disk tier is mapped files, which are pageable memory: a copy from or to it holds
the host up until it is done (CUDA stages such copies), so nothing is issued meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fnshard.analysis.flops import GraphCost, kernel_cost
from fnshard.analysis.hardware import Hardware, Link
from fnshard.compiler.ir.values import Kind, ValueName, slots, stored
from fnshard.compiler.schedule.buckets import Bucket, Piece
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    TRANSFER,
    Accumulate,
    Add,
    Exchange,
    Instruction,
    Local,
    Names,
    OfBucket,
    Run,
    ToDevice,
    ToHost,
    Update,
    Wait,
    Zeros,
)
from fnshard.compiler.schedule.ir import Price, Schedule
from fnshard.layout.partition import block_shape


@dataclass
class HardwarePricer:
    """Prices the lines of one schedule on one machine.

    Args:
        fused: kernels are compiled by Inductor; else every operator runs by itself.
        slots: tensors of optimizer state per leaf, besides a master copy (AdamW's two).
        moved: bytes of transfers, by the number of their instruction (`Ledger.moved`); without it they are
            added up from the sizes of what is named, state counted as `slots` tensors of a block each.
        fused_update: an update is compiled, and moves gradients, state and stored copies once.
    """

    schedule: Schedule
    hardware: Hardware
    fused: bool = True
    slots: int = 2
    moved: Mapping[int, int] | None = None
    fused_update: bool = False

    def __post_init__(self) -> None:
        self._links: dict[tuple[str, ...], tuple[Link, int]] = {}
        self._kernels: dict[tuple[str, bool], Price] = {}
        self._sums: dict[tuple[str, str], float] = {}
        self._sizes = self._value_bytes()
        lines = self.schedule.instructions
        self._moved = {lines[i].writes[0]: float(size) for i, size in (self.moved or {}).items()}

    def of(self, line: Instruction) -> Price:
        """Of one line."""
        return line.price(self)

    # -------------------------------------------------------------- kernels

    def counted(self, line: Run) -> GraphCost:
        """The work of a kernel, one way."""
        return kernel_cost(self.schedule.kernels[line.kernel], backward=line.backward, fused=self.fused)

    def kernel(self, line: Run) -> Price:
        """Device and host seconds of a kernel, once per kernel and way."""
        key = (line.kernel, line.backward)
        if key not in self._kernels:
            cost, h = self.counted(line), self.hardware
            host = h.instruction_seconds + cost.host_seconds(h)
            self._kernels[key] = Price(cost.seconds(h), host, flops=cost.flops)
        return self._kernels[key]

    # -------------------------------------------------------------- bytes

    def bucket(self, line: OfBucket) -> Bucket:
        """The bucket that a line is about."""
        return self.schedule.buckets[line.bucket]

    def block_bytes(self, bucket: Bucket, dtype: str) -> float:
        """This rank's blocks of a bucket's leaves, in the dtype of that name in their specs."""
        return self._once(bucket, "blocks", dtype, lambda p: p.numel)

    def leaf_bytes(self, bucket: Bucket, dtype: str) -> float:
        """The full leaves of a bucket, likewise."""
        return self._once(bucket, "leaves", dtype, lambda p: math.prod(p.shape))

    def _once(self, bucket: Bucket, what: str, dtype: str, numel: Callable[[Piece], int]) -> float:
        key = (bucket.name, f"{what} {dtype}")
        if key not in self._sums:
            specs = self.schedule.specs
            self._sums[key] = float(
                sum(numel(p) * getattr(specs[p.path], dtype).itemsize for p in bucket.pieces)
            )
        return self._sums[key]

    def bytes_of(self, names: Names) -> float:
        """Of values, by name; what cannot be known here (the batch) counts nothing."""
        return sum(self._bytes(n) for n in names)

    def _bytes(self, name: ValueName) -> float:
        # A copy is as large as what it is a copy of, but for master parameters.
        known = name if name in self._sizes else name.original
        return self._sizes.get(known, 0.0)

    def _value_bytes(self) -> dict[ValueName, float]:
        """Of stored shards, slots, kernels' results and reduced gradients."""
        mesh, sizes = self.schedule.mesh, dict[ValueName, float]()
        for path, spec in self.schedule.specs.items():
            (shard,), (of_slots,) = stored([path]), slots([path])
            sizes[shard] = (
                math.prod(block_shape(spec.shape, spec.storage, mesh)) * spec.storage_dtype.itemsize
            )
            optimizer = (
                math.prod(block_shape(spec.shape, spec.optimizer, mesh)) * spec.optimizer_dtype.itemsize
            )
            sizes[of_slots] = (self.slots + spec.has_master) * optimizer if spec.trainable else 0.0
            sizes[shard.on_host()] = optimizer  # the master copy that the host has updated
        of_kernel: dict[tuple[str, bool], list[float]] = {}
        for line in self.schedule.instructions:
            if isinstance(line, Run):
                key = (line.kernel, line.backward)
                if key not in of_kernel:
                    kernel = self.schedule.kernels[line.kernel]
                    graph = (kernel.backward if line.backward else kernel.forward).graph
                    values = [n.meta["val"] for n in graph.output_node().args[0]]
                    of_kernel[key] = [float(v.numel() * v.dtype.itemsize) for v in values]
                sizes |= zip(line.writes, of_kernel[key], strict=True)
            elif isinstance(line, Add):
                sizes[line.writes[0]] = sizes.get(line.reads[0], 0.0)
            elif isinstance(line, Zeros):
                sizes[line.writes[0]] = math.prod(line.like.shape) * line.like.dtype.itemsize
            elif isinstance(line, Exchange):
                sizes[line.writes[0]] = math.prod(line.received(self.schedule)) * line.like.dtype.itemsize
            elif isinstance(line, Wait) and line.is_for(Exchange):
                sizes[line.writes[0]] = sizes[line.reads[0]]
            elif isinstance(line, Wait | Local) and line.writes and line.writes[0].kind is Kind.REDUCED:
                sizes[line.writes[0]] = float(self.schedule.buckets[line.bucket].row_bytes)
            elif isinstance(line, Accumulate) and line.writes[0].original.kind is Kind.REDUCED:
                sizes[line.writes[0]] = self.block_bytes(self.bucket(line), "sum_dtype")
        return sizes

    # -------------------------------------------------------------- moving

    def copy(self, size: float, **more: Any) -> Price:
        """Packing and unpacking, of bytes read and written."""
        return self.compute(self.hardware.copy.seconds(size), size, **more)

    def streamed(self, size: float) -> Price:
        """A cast, a sum: bytes read and written."""
        return self.compute(self.hardware.memory.seconds(size), size)

    def here_or_on_host(self, line: Instruction, size: float) -> Price:
        """A cast or sum of so many bytes, on the host if what it reads rests there."""
        if not line.on_host(self.schedule):
            return self.streamed(size)
        h = self.hardware
        return Price(size / h.host_update_bytes_per_s, h.instruction_seconds, on_host=True)

    def compute(self, seconds: float, size: float, **more: Any) -> Price:
        """One small operator on the device."""
        h = self.hardware
        launch = h.launch_seconds if size else 0.0
        floor = h.floor_seconds if size else 0.0
        return Price(max(seconds, floor), h.instruction_seconds + launch, **more)

    def collective(self, verb: str, axes: tuple[str, ...], size: float) -> dict[str, Any]:
        """The flight of `size` bytes, the whole buffer."""
        if axes not in self._links:
            ranks = self.schedule.mesh.group_ranks(axes, 0)
            self._links[axes] = self.hardware.link(ranks), len(ranks)
        link, n = self._links[axes]
        if n == 1:
            return {}
        share = (2 if verb == "all_reduce" else 1) * (n - 1) / n
        rate = getattr(link, verb)
        # Meeting takes as long as a tree is deep; what is carried does not depend on it.
        seconds = link.latency_seconds * math.ceil(math.log2(n)) + rate.seconds(share * size)
        return {"lane": COMMUNICATION, "flight_seconds": seconds}

    def transfer_bytes(self, line: ToDevice | ToHost) -> float:
        """What a transfer moves."""
        counted = self._moved.get(line.writes[0])
        return self.bytes_of(line.reads) if counted is None else counted

    def transfer(self, line: ToDevice | ToHost) -> Price:
        """Over the host link; what rests on disk over the disk, too, and with the host waiting."""
        h, size = self.hardware, self.transfer_bytes(line)
        seconds = size / h.host_link_bytes_per_s
        # Where state is written `into`, each value read goes to one home; a master copy rests with its slots.
        homes = line.into if isinstance(line, ToHost) and line.into else line.reads
        disk = [n for n, home in zip(line.reads, homes, strict=True) if self.rests_on_disk(home)]
        known = self.bytes_of(line.reads)
        if disk:
            seconds += size * (self.bytes_of(tuple(disk)) / known if known else 1.0) / h.disk_bytes_per_s
        pageable = bool(disk) or any(
            self.rests_on_disk(n)
            for n in slots(n.path for n in line.reads if n.is_copy(Kind.HOST, Kind.STORED))
        )
        host = h.instruction_seconds + h.launch_seconds
        return Price(0.0, host, TRANSFER, seconds, blocking=pageable)

    def rests_on_disk(self, name: ValueName) -> bool:
        """Whether a state value's home is the disk."""
        if not name.is_state:
            return False
        spec = self.schedule.specs[name.path]
        return (spec.memory if name.kind is Kind.STORED else spec.optimizer_memory) == "disk"

    def update_bytes(self, line: Update) -> float:
        """Gradient, parameter and slots are read, the latter two written; and casts, where not fused."""
        bucket, specs, mesh = self.schedule.buckets[line.bucket], self.schedule.specs, self.schedule.mesh
        size = 0.0
        for path in bucket.paths:
            spec = specs[path]
            count = math.prod(block_shape(spec.shape, spec.optimizer, mesh))
            own, stored = spec.optimizer_dtype.itemsize, spec.storage_dtype.itemsize
            if self.fused_update and spec.updated_on == "device":
                size += count * (
                    bucket.dtype.itemsize + 2 * own * (1 + self.slots) + stored * spec.has_master
                )
                continue
            size += count * own * (1 + 2 * (1 + self.slots))
            if spec.optimizer_dtype != spec.storage_dtype:
                size += count * (own + stored)
            if spec.optimizer_dtype != bucket.dtype:
                size += count * (own + bucket.dtype.itemsize)
        return size

    def update(self, line: Update) -> Price:
        """Of the optimizer on one bucket."""
        size, h = self.update_bytes(line), self.hardware
        if self.schedule.specs[line.paths[0]].updated_on == "host":
            disk = sum(self.bytes_of((n,)) for n in line.reads + line.writes if self.rests_on_disk(n))
            seconds = size / h.host_update_bytes_per_s + disk / h.disk_bytes_per_s
            return Price(seconds, h.instruction_seconds, on_host=True)
        return self.compute(h.update.seconds(size), size)
