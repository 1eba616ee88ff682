"""Cost: what every instruction of a schedule takes on a `Hardware`, in seconds and by lane.

Kernels are counted by `flops`; packing, casts and updates by their bytes; collectives by the algorithm
bandwidth of rings: (n - 1) / n of a buffer for a gather, a scatter or an all-to-all, twice that for a sum
(Patarasuk and Yuan, JPDC 2009), within a node or between nodes as the group lies. Values are as large as the
ledger found them. The disk tier is mapped files, which are pageable memory: a copy from or to it holds
the host up until it is done (CUDA stages such copies), so nothing is issued meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fnshard.analysis.flops import GraphCost, graph_cost
from fnshard.analysis.hardware import Hardware, Link
from fnshard.compiler.ir.values import Kind, ValueName, slots
from fnshard.compiler.schedule.buckets import Bucket, end_to_end
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    TRANSFER,
    Gather,
    Instruction,
    Names,
    OfBucket,
    ReduceScatter,
    Run,
    ToDevice,
    ToHost,
    Update,
    UpdateBegin,
)
from fnshard.compiler.schedule.ir import Price, Schedule
from fnshard.layout.partition import block_shape


@dataclass
class HardwarePricer:
    """Prices the lines of one schedule on one machine.

    Args:
        sizes: bytes of values, by name (`Ledger.sizes`).
        fused: kernels are compiled by Inductor; else every operator runs by itself.
        fused_update: an update is compiled, and moves gradients, state and stored copies once.
    """

    schedule: Schedule
    hardware: Hardware
    sizes: Mapping[ValueName, int]
    fused: bool = True
    fused_update: bool = False

    def __post_init__(self) -> None:
        self._links: dict[tuple[str, ...], tuple[Link, int]] = {}
        self._kernels: dict[tuple[str, bool], Price] = {}

    def counted(self, line: Run) -> GraphCost:
        """The work of a kernel, one way."""
        kernel = self.schedule.kernels[line.kernel]
        return graph_cost(kernel.backward if line.backward else kernel.forward, fused=self.fused)

    def kernel(self, line: Run) -> Price:
        """Device and host seconds of a kernel, once per kernel and way."""
        key = (line.kernel, line.backward)
        if key not in self._kernels:
            cost, h = self.counted(line), self.hardware
            host = h.instruction_seconds + cost.host_seconds(h)
            self._kernels[key] = Price(cost.seconds(h), host, flops=cost.flops)
        return self._kernels[key]

    def graphs(self, graphs: Sequence[tuple[fx.GraphModule, float]]) -> Price:
        """Graphs that run one after another, operator by operator, each in its share of all steps."""
        h, costs = self.hardware, [(graph_cost(g, fused=False), share) for g, share in graphs if share]
        host = h.instruction_seconds + sum(c.host_seconds(h) * share for c, share in costs)
        seconds = sum(c.seconds(h) * share for c, share in costs)
        return Price(seconds, host, flops=sum(c.flops * share for c, share in costs))

    def bucket(self, line: OfBucket) -> Bucket:
        return self.schedule.buckets[line.bucket]

    def block_bytes(self, bucket: Bucket, dtype: str) -> float:
        """This rank's blocks of a bucket's leaves, in the dtype of that name in their specs."""
        specs = self.schedule.specs
        return float(sum(p.numel * getattr(specs[p.path], dtype).itemsize for p in bucket.pieces))

    def leaf_bytes(self, bucket: Bucket, dtype: str) -> float:
        """The full leaves of a bucket, likewise."""
        specs = self.schedule.specs
        return float(sum(math.prod(p.shape) * getattr(specs[p.path], dtype).itemsize for p in bucket.pieces))

    def bytes_of(self, names: Names) -> float:
        return float(sum(self.sizes[n] for n in names))

    def copy(self, size: float, **more: Any) -> Price:
        """Packing, unpacking, a cast or a sum, of bytes read and written."""
        return self.compute(self.hardware.copy.seconds(size), size, **more)

    def unpacked(self, line: Gather | ReduceScatter) -> bool:
        """Whether a collective reads and writes leaves where they lie, as `Group` does on accelerators."""
        alike = end_to_end(self.bucket(line), self.schedule.mesh) and line.in_place(self.schedule)
        return self.hardware.overlap and alike

    def here_or_on_host(self, line: Instruction, size: float) -> Price:
        """A cast or sum of so many bytes, on the host if what it reads rests there."""
        if not line.on_host(self.schedule):
            return self.copy(size)
        h = self.hardware
        return Price(size / h.host_update_bytes_per_s, h.instruction_seconds, on_host=True)

    def compute(self, seconds: float, size: float, **more: Any) -> Price:
        """One small operator on the device."""
        h = self.hardware
        launch, floor = (h.launch_seconds, h.floor_seconds) if size else (0.0, 0.0)
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

    def transfer(self, line: ToDevice | ToHost) -> Price:
        """Over the host link; what rests on disk over the disk, too, and with the host waiting."""
        h = self.hardware
        # Where state is written `into`, each value read goes to one home; a master copy rests with its slots.
        homes = line.into if isinstance(line, ToHost) and line.into else line.reads
        disk = tuple(n for n, home in zip(line.reads, homes, strict=True) if self.rests_on_disk(home))
        seconds = (
            self.bytes_of(line.reads) / h.host_link_bytes_per_s + self.bytes_of(disk) / h.disk_bytes_per_s
        )
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

    def update_bytes(self, line: Update | UpdateBegin) -> float:
        """Gradient, parameter and slots are read, the latter two written; and casts, where not fused."""
        bucket, specs, mesh = self.schedule.buckets[line.bucket], self.schedule.specs, self.schedule.mesh
        size = 0.0
        for path, its_slots in zip(line.paths, slots(line.paths), strict=True):
            spec = specs[path]
            count = math.prod(block_shape(spec.shape, spec.optimizer, mesh))
            own, at_rest, sent = (
                d.itemsize for d in (spec.optimizer_dtype, spec.storage_dtype, bucket.dtype)
            )
            size += 2 * (self.sizes[its_slots] + (0 if spec.has_master else count * own))
            if self.fused_update and spec.updated_on == "device":
                size += count * (sent + at_rest * spec.has_master)
                continue
            size += count * own
            size += count * (own + at_rest) * (spec.optimizer_dtype != spec.storage_dtype)
            size += count * (own + sent) * (spec.optimizer_dtype != bucket.dtype)
        return size

    def update(self, line: Update | UpdateBegin) -> Price:
        size, h = self.update_bytes(line), self.hardware
        if self.schedule.specs[line.paths[0]].updated_on == "host":
            disk = sum(self.bytes_of((n,)) for n in line.reads + line.writes if self.rests_on_disk(n))
            seconds = size / h.host_update_bytes_per_s + disk / h.disk_bytes_per_s
            return Price(seconds, h.instruction_seconds, on_host=True)
        return self.compute(h.update.seconds(size), size)
