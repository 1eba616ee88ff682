"""Measure: micro-benchmarks of the machine at hand, as the plain values of a `Hardware`.

They measure the parts of a step one by one, and never a step: matmuls, attention, streaming, exponentials,
copies, the fused AdamW, the collectives of a mesh's real transport, and calls. On a mesh of several ranks all
run each benchmark at the same time, since they share memory and caches in a step too. The disk is not
measured.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.mesh.host import control_groups
from fnshard.runtime.collectives.base import Collectives, Handle
from fnshard.runtime.collectives.connect import connection

# The number of samples, of which the median counts, and the least seconds of one. These are longer than the
# scheduler's slice, so that on a busy machine a benchmark loses its core as often as a step does.
SAMPLES, SAMPLE_S = 5, 6e-3
# Columns of products' inputs, and lengths of attention. Rare dtypes get one of each.
MATMULS, LENGTHS = (64, 128, 256, 512), (128, 256, 512, 1024)
COUNTS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # elements streamed
DISK_BYTES_PER_S = 1e9  # assumed: the disk is not measured
COLD_BYTES = 256 << 20  # more than a core's share of the caches
PARTS = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22)  # elements of a rank's part in a collective
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
Points = list[tuple[float, float]]


def measure(mesh: Mesh | None = None, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Return the values of `Hardware.as_dict`, equal on all ranks, see `Hardware.measure`."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = mesh.device if mesh else accelerator or torch.device("cpu")
    comm = connection(mesh) if mesh and mesh.size > 1 else None
    bench = _Bench(device, comm, clock)
    values = bench.compute() | bench.memory() | bench.calls()
    values |= bench.links(mesh, values["copy"])
    if comm is None:
        return values

    # Average floats over ranks. Names, flags and counts are the first rank's, except for memory: all ranks
    # have to fit.
    by_rank = [json.loads(text) for text in comm.gather_object(json.dumps(values))]
    mean = optree.tree_map(lambda *v: statistics.fmean(v) if type(v[0]) is float else v[0], *by_rank)
    return mean | {"memory_bytes": min(each["memory_bytes"] for each in by_rank)}


def _make_curve(points: Points) -> dict[str, Any]:
    return {"points": [[float(size), float(rate)] for size, rate in points]}


@dataclass
class _Bench:
    """A set of benchmarks on one device. With `comm`, all ranks start each of them together."""

    device: torch.device
    comm: Collectives | None
    clock: Callable[[], float]

    @property
    def scale(self) -> int:
        """Return the factor by which an accelerator's work is larger than a CPU's along one dim."""
        return 1 if self.device.type == "cpu" else 8

    @cached_property
    def ranks_here(self) -> int:
        """Count the ranks of the mesh on this host."""
        here = socket.gethostname()
        return 1 if self.comm is None else self.comm.gather_object(here).count(here)

    @cached_property
    def crowded(self) -> bool:
        """Return whether ranks of some host take turns on too few cores, the same on all ranks.

        If so, a step waits for the last rank, and a sample does too.
        """
        if self.device.type != "cpu" or self.comm is None:
            return False
        if hasattr(os, "sched_getaffinity"):
            own_cores = os.sched_getaffinity(0)
        else:
            own_cores = range(os.cpu_count() or 1)
        hosts: dict[str, list[set[int]]] = {}
        for text in self.comm.gather_object(json.dumps([socket.gethostname(), sorted(own_cores)])):
            host, cores = json.loads(text)
            hosts.setdefault(host, []).append(set(cores))
        return any(len(ranks) > len(set().union(*ranks)) for ranks in hosts.values())

    def _meet(self) -> None:
        """Wait for all ranks."""
        if self.comm is not None:
            self.comm.gather_object("")

    def seconds(self, work: Callable[[], Any], device: torch.device | None = None) -> float:
        """Return the median seconds of one call, after a first one that warms up."""
        # Warm up, and begin together with all ranks.
        kind = (device or self.device).type
        wait = (lambda: None) if kind == "cpu" else torch.accelerator.synchronize
        work()
        wait()
        self._meet()

        # Repeat a call often enough that one sample takes `SAMPLE_S`.
        began = self.clock()
        work()
        wait()
        least = SAMPLE_S * (4 if self.crowded else 1)  # long enough for several turns
        repeats = max(1, min(1000, math.ceil(least / (self.clock() - began))))
        if self.comm is not None:  # the work may be a collective itself, so ranks repeat it equally often
            repeats = max(int(text) for text in self.comm.gather_object(str(repeats)))

        samples = []
        for _ in range(SAMPLES):
            began = self.clock()
            for _ in range(repeats):
                work()
            wait()
            if self.crowded:
                self._meet()
            samples.append((self.clock() - began) / repeats)
        return statistics.median(samples)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    # -------------------------------------------------------------- arithmetic
    def compute(self) -> dict[str, Any]:
        """Measure matmuls and attention by dtype, exponentials and scattered additions."""
        flops, attention, heads = {}, {}, {}
        for name, dtype in DTYPES.items():
            # Products by size, and attention by length. Rare dtypes get one of each.
            is_common = name in ("f32", "bf16")
            sizes = MATMULS if is_common else MATMULS[2:3]  # a CPU takes minutes for large ones in f16
            flops[name] = _make_curve([self._measure_matmul(self.scale * n, dtype) for n in sizes])
            lengths = LENGTHS if is_common else LENGTHS[1:2]
            attention[name] = _make_curve([self._measure_attention(self.scale * n, dtype) for n in lengths])

            # Attention by head size, as shares of the rate at 64, the head size of the curves by length.
            if is_common:
                length = self.scale * LENGTHS[1]
                rates = {head: self._measure_attention(length, dtype, head)[1] for head in (32, 64, 128)}
                heads[name] = _make_curve([(float(head), rate / rates[64]) for head, rate in rates.items()])
        peaks = {name: max(rate for _, rate in curve["points"]) for name, curve in flops.items()}

        # Exponentials.
        count = 1 << 16 if self.scale == 1 else 1 << 24
        x, out = self.random(count), torch.empty(count, device=self.device)
        transcendental = count / self.seconds(lambda: torch.exp(x, out=out))

        # Additions to rows that an index names.
        rows, table = self.random(4096, 256), torch.zeros(256, 256, device=self.device)
        index = torch.randint(256, (4096,), device=self.device)
        scatter = rows.nbytes / self.seconds(lambda: table.index_add_(0, index, rows))
        return {
            "flops": flops,
            "attention": attention,
            "attention_heads": heads,
            "peak_flops": peaks,
            "transcendental": transcendental,
            # In registers an elementwise operation costs as much as a multiply-add of a matmul.
            "elementwise": peaks["f32"] / 2,
            "scatter": scatter,
        }

    def _measure_matmul(self, n: int, dtype: torch.dtype) -> tuple[float, float]:
        """Return FLOPs and FLOP/s of a layer's products, [2n, n] @ [n, 11/4 n] as in an MLP.

        Square ones would be up to a quarter faster. The rate is the mean of the forward's and the backward's,
        on operands that no cache holds.
        """
        # Several sets of operands take turns, so that none of them is in a cache.
        rows, hidden = 2 * n, 11 * n // 4
        shapes = (rows, n), (hidden, n), (rows, hidden)
        size = sum(a * b for a, b in shapes) * dtype.itemsize
        operands = [self.random(*shape, dtype=dtype) for shape in shapes]
        copies = [[each.clone() for each in operands] for _ in range(self._count_cold_buffers(size))]
        turn = itertools.cycle(copies)

        # The three products write over their operands, whose values do not matter.
        def forward() -> None:
            x, weight, y = next(turn)
            torch.mm(x, weight.t(), out=y)

        def input_gradient() -> None:
            x, weight, y = next(turn)
            torch.mm(y, weight, out=x)

        def weight_gradient() -> None:
            x, weight, y = next(turn)
            torch.mm(y.t(), x, out=weight)

        seconds = statistics.fmean(map(self.seconds, (forward, input_gradient, weight_gradient)))
        flops = 2.0 * rows * n * hidden
        return flops, flops / seconds

    def _measure_attention(self, length: int, dtype: torch.dtype, head: int = 64) -> tuple[float, float]:
        """Return length and FLOP/s of causal attention [2, 4, length, head], forward and backward.

        Heads have the strides that projections give them.
        """
        *inputs, tangent = [self.random(2, length, 4, head, dtype=dtype).transpose(1, 2) for _ in range(4)]
        q, k, v = (each.requires_grad_() for each in inputs)

        def both() -> None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), tangent)

        # Two products forward and five backward, of which the causal mask leaves half, for 2 x 4 heads.
        flops = 0.5 * (2 + 5) * 2.0 * 8 * length * length * head
        return float(length), flops / self.seconds(both)

    # -------------------------------------------------------------- memory
    def memory(self) -> dict[str, Any]:
        """Measure streaming and copying by size, the optimizer and the host."""
        counts = [self.scale * n for n in COUNTS]
        streamed, copied, updated = [], [], []

        for count in counts:
            a, b = self.random(count), self.random(count)
            streamed.append((12.0 * count, 12.0 * count / self.seconds(lambda a=a, b=b: a + b)))
            copied.append(self._measure_copy(count))
            if count in counts[2:-1]:  # smaller updates would measure the call itself, 50 us of Python
                updated.append(self._measure_update(count, self.device))

        # The link between a device and its host, from pinned memory.
        host = torch.empty(1 << 22)
        device = host.clone() if self.device.type == "cpu" else host.to(self.device)
        host = host if self.device.type == "cpu" else host.pin_memory()
        link = host.nbytes / self.seconds(lambda: device.copy_(host, non_blocking=True))

        return {
            "memory": _make_curve(streamed),
            "copy": _make_curve(copied),
            "update": _make_curve(updated),
            "host_link_bytes_per_s": link,
            "host_update_bytes_per_s": self._measure_update(1 << 20, host.device)[1],
            "disk_bytes_per_s": DISK_BYTES_PER_S,
            "memory_bytes": memory_bytes(self.device, self.ranks_here),
        }

    def _measure_copy(self, count: int) -> tuple[float, float]:
        """Return bytes and bytes/s of a copy and a cast that find nothing in a cache, as with parameters."""
        buffers = self._count_cold_buffers(8 * count)
        pairs = [torch.zeros(2, count, device=self.device).unbind(0) for _ in range(buffers)]
        turn = itertools.cycle(pairs)

        def copy() -> None:
            target, source = next(turn)
            target.copy_(source)

        def cast() -> None:
            next(turn)[1].to(torch.bfloat16)

        return 8.0 * count, (8.0 + 6.0) * count / (self.seconds(copy) + self.seconds(cast))

    def _count_cold_buffers(self, size: int) -> int:
        """Return how many buffers of this size take turns, so that each has left the caches by its turn."""
        cold_bytes = COLD_BYTES if self.scale == 1 else 2 * COLD_BYTES
        return max(1, min(2048, cold_bytes // size))

    def _measure_update(self, count: int, device: torch.device) -> tuple[float, float]:
        """Return bytes and bytes/s of the fused AdamW in fp32, whose tensors no cache holds."""
        size, optimizers = 28.0 * count, []  # it reads four tensors and writes three
        for _ in range(self._count_cold_buffers(28 * count)):
            param = torch.nn.Parameter(torch.zeros(count, device=device))
            param.grad = torch.zeros(count, device=device)
            optimizers.append(torch.optim.AdamW([param], fused=True))
            optimizers[-1].step()
        turn = itertools.cycle(optimizers)
        return size, size / self.seconds(lambda: next(turn).step(), device)

    # -------------------------------------------------------------- calls
    def calls(self) -> dict[str, Any]:
        """Measure the time that the host spends on starting work."""
        # Timed as on a CPU, a call does not wait for the device.
        a, out = self.random(8, 8), self.random(8, 8)
        host = torch.device("cpu")
        launch = self.seconds(lambda: torch.mm(a, a, out=out), host)

        # A line of the executor is a closure that moves a few values of a dict. A kernel costs about four.
        env, names = {f"v{i}": i for i in range(24)}, [f"v{i}" for i in range(24)]

        def line() -> None:
            args = [env[n] for n in names]
            for name in names:
                del env[name]
            env.update(zip(names, args, strict=True))

        seconds = self.seconds(line, host)

        # On a device the floor is the time of the smallest operator, which runs next to the host.
        overlap = self.device.type != "cpu"
        floor = self.seconds(lambda: torch.mm(a, a, out=out)) if overlap else 0.0
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        else:
            name = f"{platform.machine()} {self.device.type}"
        return {
            "launch_seconds": launch,
            "instruction_seconds": seconds,
            "kernel_seconds": 4 * seconds,
            "floor_seconds": floor,
            "overlap": overlap,
            "name": name,
        }

    # -------------------------------------------------------------- collectives
    def links(self, mesh: Mesh | None, copy: dict[str, Any]) -> dict[str, Any]:
        """Measure the transport without packing and unpacking; without peers, rates are those of memory.

        All ranks count as one node, and the link that is measured is used for both kinds.
        """
        axes = mesh.ordered(mesh.names) if mesh else ()
        if self.comm is None or not axes:
            link = {"latency_seconds": 1e-6} | dict.fromkeys(_list_collectives(1), copy)
        else:
            link = self._measure_link(mesh, axes)
        return {"node": link, "network": link, "ranks_per_node": mesh.size if mesh else 1}

    def _measure_link(self, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, Any]:
        """Measure each collective over axes by the bytes that it carries."""
        # The seconds of each collective by bytes, and the least seconds of any.
        n, latency, times = mesh.axes_size(axes), math.inf, dict[str, Points]()
        for verb, (name, rows, share) in _list_collectives(n).items():
            issue: Callable[[Tensor, tuple[str, ...]], Handle] = getattr(self.comm, name)
            times[verb] = []
            for count in PARTS:
                source, spare = self.random(n * count), self.random(n * count)
                outs = [self.random(n * count) for _ in range(n)]

                def once(issue=issue, rows=rows, source=source, outs=outs, verb=verb) -> None:
                    buffer = self.comm.send_buffer(source.numel() // rows, source.dtype, axes, rows=rows)
                    buffer.copy_(source)
                    handle = issue(buffer, axes)
                    result = handle.wait()
                    for out, row in zip(outs, result if verb == "gather" else (), strict=False):
                        out.copy_(row)
                    handle.release()

                # Subtract the copies into and out of buffers. What is left may be less than the noise.
                copy = self.seconds(lambda source=source, spare=spare: spare.copy_(source))
                copies, seconds = (1 + n if verb == "gather" else 1) * copy, self.seconds(once)
                latency = min(latency, seconds)
                times[verb].append((share * source.nbytes, max(seconds - copies, seconds / 20)))

        def find_rates(points: Points) -> Points:
            # The least time is the latency of the meeting. Only the seconds beyond it grow with the bytes.
            return [(size, size / max(seconds - latency, seconds / 20)) for size, seconds in points[1:]]

        curves = {verb: _make_curve(find_rates(points)) for verb, points in times.items()}
        return {"latency_seconds": latency, **curves}


def _list_collectives(n: int) -> dict[str, tuple[str, int, float]]:
    """Return, by rate of a link, the collective, the rows of its buffer, and how often its bytes are sent."""
    share = (n - 1) / n
    return {
        "gather": ("all_gather", 1, n - 1.0),
        "reduce_scatter": ("reduce_scatter", n, share),
        "all_reduce": ("all_reduce", 1, 2 * share),
        "all_to_all": ("all_to_all", n, share),
    }


def memory_bytes(device: torch.device, ranks: int) -> int:
    """Return the memory of one rank's device. CPU ranks share the memory of their host."""
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([total, *(limit for limit, _ in control_groups())]) // ranks
    return torch.accelerator.get_memory_info(device)[1]
