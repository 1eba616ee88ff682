"""Hardware: the rates of a machine, as published or as measured on the spot.

A rate is a `Curve`, work per second by the size of the work, since small work runs slower (or faster, out of
a cache). Nothing here knows of models or schedules; `Hardware.measure` is micro-benchmarks alone.
"""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from fnshard.analysis.measure import measure
from fnshard.errors import SpecError
from fnshard.mesh import Mesh
from fnshard.runtime.files.json_reader import from_json

__all__ = ["Curve", "Hardware", "Link", "mfu"]


@lru_cache(maxsize=256)  # groups have up to tens of thousands of ranks, and each collective is asked for
def _count_nodes(ranks: tuple[int, ...], ranks_per_node: int) -> int:
    return len({rank // ranks_per_node for rank in ranks})


def mfu(model_flops: float, seconds: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation of a device: model FLOPs / (seconds x the data sheet's dense peak).

    Model FLOPs are those of matrix products, convolutions and attention in the forward, and twice as many in
    the backward; recomputation adds nothing. Causal attention counts the half of all pairs of positions that
    its kernels compute. For a decoder that is 6 N + 6 L T D a token: N parameters in matrices (an embedding
    that is only looked up is none), L layers of width D, T positions. PaLM's 6 N + 12 L T D counts all pairs
    and gives a larger number for the same step.

    Args:
        model_flops: the model FLOPs of one device's step.
        seconds: the seconds of that step.
        peak_flops: the peak per second in the dtype of the products, as in `Hardware.peak_flops`.

    >>> mfu(4e14, 1.0, Hardware.named("h100").peak_flops["bf16"])  # doctest: +ELLIPSIS
    0.404...
    """
    return model_flops / seconds / peak_flops if seconds else 0.0


@dataclass(frozen=True)
class Curve:
    """A rate in units per second by size: `(size, rate)` in rising sizes.

    Between two points it is interpolated linearly in the logarithm of the size.

    >>> Curve(((1e6, 10.0), (1e8, 30.0))).at(1e7)
    20.0
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        wrong = [f"{p}" for p in self.points if not (p[0] > 0 and p[1] > 0 and math.isfinite(p[0]))]
        if wrong or not self.points or list(self.points) != sorted(self.points):
            raise SpecError(
                "a Curve is (size, rate) pairs above 0, sizes rising:", wrong or [f"{self.points}"]
            )

    @staticmethod
    def flat(rate: float) -> Curve:
        """Return a curve of the same rate at all sizes."""
        return Curve(((1.0, float(rate)),))

    def at(self, size: float) -> float:
        """Return the units per second for work of `size` units; beyond an end, that of the end."""
        position = bisect_left(self.points, (size, 0.0))
        if position == 0:
            return self.points[0][1]
        if position == len(self.points):
            return self.points[-1][1]
        (low, below), (high, above) = self.points[position - 1], self.points[position]
        share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
        return below + share * (above - below)

    def seconds(self, size: float) -> float:
        """Return the seconds that `size` units take."""
        return size / self.at(size) if size > 0 else 0.0

    @property
    def best(self) -> float:
        """Return the highest rate."""
        return max(rate for _, rate in self.points)


@dataclass(frozen=True)
class Link:
    """A link that joins the ranks of a group.

    It has a latency, which ranks take to meet, and rates by bytes moved: the bytes per second that one rank
    sends, and receives at the same time, in each collective.
    """

    latency_seconds: float
    gather: Curve
    reduce_scatter: Curve
    all_reduce: Curve
    all_to_all: Curve

    @staticmethod
    def even(latency_seconds: float, bytes_per_s: float) -> Link:
        """Make a link with one rate for all collectives."""
        return Link(latency_seconds, *(Curve.flat(bytes_per_s),) * 4)


COLLECTIVES = tuple(f.name for f in fields(Link)[1:])  # those for which a link has a rate


@dataclass(frozen=True)
class Hardware:
    """The hardware that one rank works with.

    Args:
        memory_bytes: the memory of the rank's device.
        flops: matmul FLOP/s that are reached, by dtype ("f32", "bf16", ...) and FLOPs of one matmul.
        peak_flops: the data sheet's dense peak, by dtype. MFU is a share of it.
        attention: FLOP/s of fused attention, by dtype and sequence length.
        attention_heads: the share of that rate that is left, by dtype and head size.
        memory: bytes/s of streaming kernels, by bytes touched.
        elementwise: cheap elementwise operations/s, if memory does not bound them.
        transcendental: elements/s of exp and its like.
        scatter: bytes/s of additions to rows that an index names (the backward of an embedding).
        update: bytes/s that the optimizer's fused kernel reads and writes.
        copy: bytes/s that packing, unpacking and casts read and write.
        node, network: links among the ranks of one node (or of one NVLink domain, if that is larger), and
            between nodes.
        host_link_bytes_per_s: the rate between device and host in one direction.
        host_update_bytes_per_s: the rate of the optimizer on the host.
        disk_bytes_per_s: the rate between disk and host.
        instruction_seconds: host time for one line of a schedule.
        kernel_seconds: host time to start a compiled graph.
        launch_seconds: host time to start one operator.
        floor_seconds: the least time of one operator on the device.
        overlap: whether collectives and transfers run while the device computes (a CPU's do not).
        spread: the shares of the predicted time between which most compared steps lay.

    >>> Hardware.named("h100").peak_flops["bf16"]
    989000000000000.0
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, Curve]
    peak_flops: Mapping[str, float]
    attention: Mapping[str, Curve]
    attention_heads: Mapping[str, Curve]
    memory: Curve
    elementwise: float
    transcendental: float
    scatter: float
    update: Curve
    copy: Curve
    node: Link
    network: Link
    ranks_per_node: int
    host_link_bytes_per_s: float
    host_update_bytes_per_s: float
    disk_bytes_per_s: float
    instruction_seconds: float
    kernel_seconds: float
    launch_seconds: float
    floor_seconds: float
    overlap: bool
    spread: tuple[float, float] | None = None

    @staticmethod
    def named(name: str) -> Hardware:
        """Return hardware of the table: "h100", "h200", "a100", "b200", "gb200", "mi300x", "l4", "cpu", ...

        Raises:
            SpecError: there is no such name. The error lists the known ones.
        """
        if not isinstance(name, str) or name not in TABLE:
            raise SpecError(
                f"no hardware is called {name!r}.",
                fix=f"one of {', '.join(map(repr, TABLE))}, fs.Hardware.measure() for this machine, or "
                "dataclasses.replace(...) of one of these.",
            )
        return TABLE[name]

    @staticmethod
    def of(hardware: Hardware | str) -> Hardware:
        """Return the hardware itself, or the hardware of this name in the table.

        Raises:
            SpecError: it is neither, or there is no such name.
        """
        return hardware if isinstance(hardware, Hardware) else Hardware.named(hardware)

    @staticmethod
    def of_gpu(name: str) -> Hardware | None:
        """Return the hardware of a GPU that calls itself `name`; None if the table does not have it.

        >>> Hardware.of_gpu("NVIDIA A100-SXM4-40GB").name
        'a100-40gb'
        """
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        known = [key for key in TABLE if words.issuperset(key.split("-"))]
        # The longest key is the most specific one: "a100-40gb" is not "a100".
        return TABLE[max(known, key=len)] if known else None

    @staticmethod
    def measure(mesh: Mesh | None = None, clock: Callable[[], float] = time.perf_counter) -> Hardware:
        """Measure the machine at hand, by micro-benchmarks of a few seconds.

        The disk is not measured (1 GB/s; `dataclasses.replace(..., disk_bytes_per_s=)`). A CPU's memory is
        this rank's share of its host, or of its control group's limit.

        Args:
            mesh: the mesh whose transport is measured, and whose ranks load the machine together, as in a
                step. The call is a collective then, and every rank gets equal numbers. None measures this
                process alone.
            clock: a clock in seconds. On a CPU that others use too, `time.thread_time` leaves out their time.
        """
        return Hardware.from_dict(measure(mesh, clock))

    def link(self, ranks: tuple[int, ...]) -> Link:
        """Return the link of a group of ranks.

        Within a node it is the node's link. Between nodes it is the network, which the group enters through
        its `adapters`, and is never faster than within the node.
        """
        if self.adapters("gather", ranks) == math.inf:
            return self.node

        def join_adapters(name: str) -> Curve:
            network, node = getattr(self.network, name), getattr(self.node, name)
            adapters = self.adapters(name, ranks)
            return Curve(tuple((size, min(rate * adapters, node.at(size))) for size, rate in network.points))

        return Link(self.network.latency_seconds, **{name: join_adapters(name) for name in COLLECTIVES})

    def adapters(self, name: str, ranks: tuple[int, ...]) -> float:
        """Count the adapters that carry what one rank of a group sends.

        A ring of a group that has several ranks on each node sends through all their adapters at once (NCCL's
        parallel rings). In an all-to-all each rank sends to those of other nodes through its own adapter, and
        the rest stays within the node. Within a node the number is infinite, since no adapter carries
        anything.

        Args:
            name: the name of the collective, one of `COLLECTIVES`.
        """
        nodes = _count_nodes(ranks, self.ranks_per_node)
        if nodes == 1:
            return math.inf
        per_node = len(ranks) / nodes
        return (len(ranks) - 1) / (len(ranks) - per_node) if name == "all_to_all" else per_node

    def rate_of(self, curves: Mapping[str, Curve], dtype: str) -> Curve:
        """Return the curve of a dtype.

        A dtype without a curve has another's: fp8 is emulated in bf16, and others have fp32's rate.
        """
        emulated = "bf16" if dtype.startswith("float8") else "f32"
        return curves.get(dtype) or curves.get(emulated) or curves["f32"]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_dict` reads back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Hardware:
        """Make hardware from a result of `as_dict`, also after JSON."""
        return from_json(Hardware, json.loads(json.dumps(values)))

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype} {curve.best / 1e12:.3g}" for dtype, curve in self.flops.items())
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.0f} GB at {self.memory.best / 1e9:.0f} GB/s, "
            f"TFLOP/s {rates}, {self.node.gather.best / 1e9:.3g} GB/s in a node of {self.ranks_per_node}, "
            f"{self.network.gather.best / 1e9:.3g} between nodes"
        )


def _gpu(
    name: str,
    memory: tuple[float, float],
    tflops: tuple[float, float, float, float],
    links: tuple[float, float, float],
    per_node: int,
    reached: tuple[float, float, float, float],
    spread: tuple[float, float] | None,
) -> Hardware:
    """Make a GPU from a row of `SHEETS`: data-sheet rates times the shares of them that training reaches."""
    matmul, attention, streaming, wire = reached
    bf16, f32, f64, fp8 = tflops
    rates = {"bf16": bf16, "f16": bf16, "f32": f32, "f64": f64}
    if fp8:
        rates |= {"float8_e4m3fn": fp8, "float8_e5m2": fp8}
    streamed = Curve.flat(memory[1] * 1e12 * streaming)
    node, network, host = (each * 1e9 * wire for each in links)
    # Rates that no data sheet has are shares of those that it has, or typical values.
    return Hardware(
        name,
        memory_bytes=int(memory[0] * 1e9),
        flops={dtype: Curve.flat(rate * 1e12 * matmul) for dtype, rate in rates.items()},
        peak_flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        attention={dtype: Curve.flat(rate * 1e12 * attention) for dtype, rate in rates.items()},
        # The H100 reaches 330 to 380 TFLOP/s at head size 64, and 490 at 128.
        attention_heads={"f32": Curve(((32.0, 0.45), (64.0, 0.72), (128.0, 1.0)))},
        memory=streamed,
        elementwise=rates["f32"] * 1e12 / 2,
        transcendental=rates["f32"] * 1e12 / 16,
        scatter=streamed.best / 4,
        update=streamed,
        copy=streamed,
        node=Link.even(15e-6, node),
        network=Link.even(30e-6, network),
        ranks_per_node=per_node,
        host_link_bytes_per_s=host,
        host_update_bytes_per_s=20e9,  # a host's memory, some 200 GB/s of it, shared by eight
        disk_bytes_per_s=3e9,  # NVMe
        instruction_seconds=15e-6,
        kernel_seconds=30e-6,
        launch_seconds=4e-6,
        floor_seconds=2.5e-6,
        overlap=True,
        spread=spread,
    )


# The shares that training reaches of products, attention, memory and links were fitted to 227 published rates
# of four sources (llm-foundry has 216 of them, 125M to 70B on 8 to 512 GPUs). `SPREAD` holds nine tenths of
# their times, as shares of what the other sources' constants predict; of four sources that were held out, 10
# of 12 rates lie in it (`experiments.bench case=published`). Chips that were not compared are taken to reach
# the same shares as those nearest to them, without an interval.
AMPERE, HOPPER = (0.71, 0.37, 0.62, 0.77), (0.67, 0.23, 0.54, 0.64)
SPREAD = (0.74, 1.23)
# Data sheets have GB and TB/s of memory; dense TFLOP/s in bf16, fp32 (no TF32), fp64 and fp8; GB/s of a GPU,
# one way, within a node, between nodes and to the host; and the GPUs of an NVLink domain. The shares that
# training reaches and the interval follow.
SHEETS: dict[str, tuple[Any, ...]] = {
    # NVIDIA H100, SXM5: NVLink 900 GB/s, both ways; a 400 Gb/s adapter per GPU (DGX H100); PCIe 5 x16.
    "h100": ((80, 3.35), (989, 67, 67, 1979), (450, 50, 64), 8, HOPPER, SPREAD),
    # NVIDIA H100 PCIe: no NVLink but in pairs, so that groups talk over PCIe 5 x16.
    "h100-pcie": ((80, 2.0), (756, 51, 51, 1513), (64, 50, 64), 8, HOPPER, None),
    # NVIDIA H200, SXM: the H100's cores, with HBM3e.
    "h200": ((141, 4.8), (989, 67, 67, 1979), (450, 50, 64), 8, HOPPER, SPREAD),
    # An H100 of 96 GB HBM2e that is limited to 500 W (torchtitan's benchmarks). No sheet says what the limit
    # costs: 0.8 of the SXM's rates is assumed.
    "h100-500w": ((96, 2.4), (791, 54, 54, 1583), (450, 50, 64), 8, HOPPER, SPREAD),
    # NVIDIA A100, SXM: NVLink 600 GB/s, both ways; 200 Gb/s per GPU (DGX A100); PCIe 4 x16.
    "a100": ((80, 2.039), (312, 19.5, 19.5, 0), (300, 25, 32), 8, AMPERE, SPREAD),
    "a100-40gb": ((40, 1.555), (312, 19.5, 19.5, 0), (300, 25, 32), 8, AMPERE, SPREAD),
    # NVIDIA HGX B200: NVLink 5, 1.8 TB/s both ways; 400 Gb/s per GPU (DGX B200); PCIe 5 x16.
    "b200": ((180, 7.7), (2250, 75, 37, 4500), (900, 50, 64), 8, HOPPER, None),
    # NVIDIA GB200 and GB300 NVL72: 400 and 800 Gb/s per GPU to other racks; NVLink-C2C, 900 GB/s of two GPUs,
    # both ways, to the host's memory. The GB300 has hardly any fp64.
    "gb200": ((186, 8.0), (2500, 80, 40, 5000), (900, 50, 225), 72, HOPPER, None),
    "gb300": ((279, 8.0), (2500, 80, 1.3, 5000), (900, 100, 225), 72, HOPPER, None),
    # AMD Instinct MI300X: seven Infinity Fabric links of 64 GB/s each way; 400 Gb/s per GPU; PCIe 5 x16.
    "mi300x": ((192, 5.3), (1307, 163, 163, 2615), (448, 50, 64), 8, HOPPER, None),
    # NVIDIA L4, eight in a cloud's box: PCIe 4 x16, and one 100 Gb/s adapter for all.
    "l4": ((24, 0.3), (121, 30.3, 0.5, 242), (32, 1.5, 32), 8, AMPERE, None),
    # NVIDIA GeForce RTX 4090, eight in a box: PCIe 4 x16 without peer-to-peer, so what is sent passes the
    # host's memory; one 100 Gb/s adapter for all. Tensor cores with fp32 sums.
    "rtx-4090": ((24, 1.008), (165, 82.6, 1.3, 330), (16, 1.5, 32), 8, AMPERE, None),
}
TABLE: dict[str, Hardware] = {
    **{name: _gpu(name, *sheet) for name, sheet in SHEETS.items()},
    # Two cores of a server CPU with AVX-512 and its bf16 matrices, one rank on each, rounded from
    # `Hardware.measure()` there. For plans that never see a GPU: measure yours instead.
    "cpu": Hardware(
        "cpu",
        memory_bytes=int(8e9),
        flops={
            "f64": Curve.flat(65e9),
            "f32": Curve(((3e6, 65e9), (2e7, 100e9), (2e8, 125e9), (1.5e9, 140e9))),
            "bf16": Curve(((3e6, 65e9), (2e7, 260e9), (2e8, 480e9), (1.5e9, 680e9))),
        },
        peak_flops={"f64": 70e9, "f32": 150e9, "bf16": 700e9},
        attention={
            "f64": Curve.flat(25e9),
            "f32": Curve(((128, 38e9), (512, 56e9), (1024, 75e9))),
            "bf16": Curve(((128, 17e9), (256, 48e9), (512, 65e9), (1024, 110e9))),
        },
        attention_heads={
            "f32": Curve(((32, 0.85), (64, 1.0), (128, 1.1))),
            "bf16": Curve(((32, 0.58), (64, 1.0), (128, 1.5))),
        },
        memory=Curve(((1e6, 90e9), (4e6, 25e9), (50e6, 18e9), (200e6, 6e9))),
        elementwise=70e9,
        transcendental=5e9,
        scatter=15e9,
        update=Curve(((7e6, 16e9), (120e6, 23e9))),
        copy=Curve(((1e5, 8.5e9), (30e6, 11e9), (130e6, 7.5e9))),
        node=Link(35e-6, Curve.flat(18e9), *(Curve.flat(4.5e9),) * 3),
        network=Link.even(200e-6, 1e9),
        ranks_per_node=2,
        host_link_bytes_per_s=13e9,
        host_update_bytes_per_s=20e9,
        disk_bytes_per_s=1e9,
        instruction_seconds=2.5e-6,
        kernel_seconds=10e-6,
        launch_seconds=1e-6,
        floor_seconds=0.0,
        overlap=False,
    ),
}
