"""What gathers, reduce-scatters, all-to-alls and all-reduces cost on this CPU, by ways of doing them.

    python -m experiments.micro.collectives --world 2 --mb 1 32 --dtype float32

Starts its own gloo ranks over loopback. A time is what the executor would see: pack what is sent,
the collective, copy the result out; the median of interleaved repeats on rank 0. `mb` is the size of
the whole (gathered, or to be reduced) tensor; a rank's shard is a `world`-th of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from experiments.configs.checks import count
from fnshard.mesh import make_mesh
from fnshard.runtime.collectives.base import Collectives, sum_rows
from fnshard.runtime.collectives.connect import connect

AXES = ("shard",)
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class CollectiveCase:
    """One size: this rank's shard [k], all shards [n * k], and where results go."""

    n: int
    rank: int
    shard: Tensor
    full: Tensor
    out: Tensor  # [n * k]


Way = Callable[[CollectiveCase], None]


def case(n: int, rank: int, mb: float, dtype: torch.dtype) -> CollectiveCase:
    k = int(mb * 2**20) // dtype.itemsize // n
    full = torch.arange(n * k, dtype=torch.float32).remainder_(7).add_(rank).to(dtype)
    shard = full[:k].clone()
    return CollectiveCase(n, rank, shard, full, torch.empty_like(full))


# ------------------------------------------------------------------ ways


def gather(by: Collectives, c: CollectiveCase) -> None:
    sent = by.send_buffer(c.shard.numel(), c.shard.dtype, AXES)
    sent.copy_(c.shard)
    handle = by.all_gather(sent, AXES)
    for to, row in zip(c.out.view(c.n, -1), handle.wait(), strict=True):
        to.copy_(row)
    handle.release()


def reduce_scatter(by: Collectives, c: CollectiveCase) -> None:
    sent = by.send_buffer(c.shard.numel(), c.shard.dtype, AXES, rows=c.n)
    sent.copy_(c.full)
    by.reduce_scatter(sent, AXES).wait()


def all_to_all(by: Collectives, c: CollectiveCase) -> None:
    sent = by.send_buffer(c.shard.numel(), c.shard.dtype, AXES, rows=c.n)
    sent.copy_(c.full)
    by.all_to_all(sent, AXES).wait()


def all_reduce(by: Collectives, c: CollectiveCase) -> None:
    c.out.copy_(c.full)
    by.all_reduce(c.out, AXES).wait()


def gather_padded(c: CollectiveCase) -> None:
    """Zeros but for the own row, summed."""
    rows = torch.zeros_like(c.full)
    rows.view(c.n, -1)[c.rank].copy_(c.shard)
    dist.all_reduce(rows)
    c.out.copy_(rows)


def reduce_all_to_all(c: CollectiveCase) -> None:
    """Every rank gets its row of all ranks, and sums them."""
    sent, got = c.full.clone(), torch.empty_like(c.full)
    dist.all_to_all_single(got, sent)
    sum_rows(got.view(c.n, -1).unbind(0), torch.empty_like(c.shard))


def reduce_by_all_reduce(c: CollectiveCase) -> None:
    """All-reduce and keep a row: sends twice what is needed."""
    sent = c.full.clone()
    dist.all_reduce(sent)
    sent.view(c.n, -1)[c.rank].clone()


def all_reduce_in_two(by: Collectives, c: CollectiveCase) -> None:
    """Reduce-scatter, then gather."""
    c.out.copy_(c.full)
    shard = by.reduce_scatter(c.out, AXES).wait()
    for to, row in zip(c.out.view(c.n, -1), by.all_gather(shard, AXES).wait(), strict=True):
        to.copy_(row)


def ways(native: Collectives, p2p: Collectives, auto: Collectives) -> dict[str, dict[str, Way]]:
    """Operation -> way -> what to time."""
    return {
        "all_gather": {
            "native": lambda c: gather(native, c),
            "p2p": lambda c: gather(p2p, c),
            "padded all_reduce": gather_padded,
            "shared memory": lambda c: gather(auto, c),
        },
        "reduce_scatter": {
            "native": lambda c: reduce_scatter(native, c),
            "p2p": lambda c: reduce_scatter(p2p, c),
            "all_to_all + sum": reduce_all_to_all,
            "all_reduce": reduce_by_all_reduce,
            "shared memory": lambda c: reduce_scatter(auto, c),
        },
        "all_to_all": {
            "native": lambda c: all_to_all(native, c),
            "p2p": lambda c: all_to_all(p2p, c),
            "shared memory": lambda c: all_to_all(auto, c),
        },
        "all_reduce": {
            "native": lambda c: all_reduce(native, c),
            "p2p reduce_scatter + all_gather": lambda c: all_reduce_in_two(p2p, c),
            "shared memory": lambda c: all_reduce(auto, c),
        },
    }


# ------------------------------------------------------------------ ranks


def measure(rank: int, world: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = make_mesh(shard=world, device="cpu")
    by = [connect(mesh, transport=transport) for transport in ("native", "p2p", "auto")]
    for dtype in (getattr(torch, name) for name in args.dtype):
        for mb in args.mb:
            c = case(world, rank, mb, dtype)
            for name, by_way in ways(*by).items():
                times = interleaved(by_way, c, args.repeats)
                if rank == 0:
                    best = min(times.values())
                    for way, ms in times.items():
                        mark = " *" if ms == best else ""
                        print(f"| {world} | {mb:g} | {dtype} | {name} | {way} | {ms:.2f}{mark} |", flush=True)
    by[0].barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that exits the ordinary way


def interleaved(by_way: dict[str, Way], c: CollectiveCase, repeats: int) -> dict[str, float]:
    """Median ms of each way; the first two rounds are thrown away."""
    times: dict[str, list[float]] = {way: [] for way in by_way}
    for _ in range(repeats + 2):
        for way, run in by_way.items():
            dist.barrier()
            begin = time.perf_counter()
            run(c)
            times[way].append(1e3 * (time.perf_counter() - begin))
    return {way: statistics.median(ms[2:]) for way, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=count, nargs="+", default=[2, 4], help="ranks")
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 8, 32, 128], help="sizes, MiB")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--repeats", type=count, default=7)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| world | MiB | dtype | collective | way | ms |\n|---|---|---|---|---|---|", flush=True)
    for world in args.world:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measure, (world, folder, args), nprocs=world)


if __name__ == "__main__":
    main()
