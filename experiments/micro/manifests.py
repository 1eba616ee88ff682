"""What a checkpoint of thousands of ranks costs rank 0: its manifest planned, written and read.

    python -m experiments.micro.manifests --ranks 4096 --leaves 1000

Every rank has a part of every leaf. No tensors are written; what each rank would send rank 0 is made first,
and not counted. Then a process that is rank 0 plans its own file, gathers what all have sent, writes the
manifest, reads it, and finds what it would read on a mesh of half as many ranks. Prints seconds of each, and
the peak of that process's memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fnshard as fs
from experiments.configs.checks import count
from fnshard.checkpoint.chunks import Chunk, DataFile
from fnshard.checkpoint.manifest_file import NAME, Manifest
from fnshard.checkpoint.read_blocks import chunk_reads
from fnshard.checkpoint.state_leaves import LocalLeaf, RestoreTarget
from fnshard.checkpoint.write_blocks import assigned
from fnshard.checkpoint.written import Written, manifest_of
from fnshard.layout.partition import block_shape
from fnshard.mesh import simulated_rank
from fnshard.runtime.files.folder import data_file
from fnshard.runtime.files.tensorfile import TensorToWrite, file_layout

WIDTH = 8  # columns of a leaf: its data are never there, its sizes hardly matter


def leaves_of(ranks: int, number: int) -> dict[str, LocalLeaf]:
    """Matrices whose last block is shorter, each rank having a part."""
    layout, mesh = fs.P("shard"), fs.make_mesh(shard=ranks, simulated=True)
    out = {}
    for n in range(number):
        shape = (ranks * (n % 7 + 2) - n % 2, WIDTH)
        block = torch.empty(block_shape(shape, layout, mesh), device="meta")
        out[f"params/blocks.{n // 10}.matrix_{n % 10}.weight"] = LocalLeaf(shape, layout, block)
    return out


def written(leaves: dict[str, LocalLeaf], mesh: fs.Mesh, rank: int) -> Written:
    """What this rank plans to write, and would send."""
    with simulated_rank(rank):
        boxes = [
            (f"{name}@{start}", name, leaf, start, tuple(part.shape))
            for name, leaf in assigned(leaves, mesh).items()
            for start, part in leaf.parts(mesh)
        ]
    entries = [TensorToWrite(title, shape, torch.float32) for title, *_, shape in boxes]
    head, at = file_layout(entries)
    file = data_file(rank)
    chunks = [
        (name, leaf.saved_as(), Chunk(start, shape, file, at[title], (hash((rank, title)) & 0xFFFFFFFF,)))
        for title, name, leaf, start, shape in boxes
    ]
    size = len(head) + sum(entry.bytes for entry in entries)
    return Written.of(file, DataFile(size, len(head), 0), chunks)


def all_written(leaves: dict[str, LocalLeaf], mesh: fs.Mesh) -> Iterator[Written]:
    """What each rank would send. All but the last have equal parts: those of rank 1, further down."""
    yield written(leaves, mesh, 0)
    second = written(leaves, mesh, 1)
    for rank in range(1, mesh.size - 1):
        sums = np.random.default_rng(rank).integers(0, 1 << 32, len(second.at), dtype=np.uint32)
        yield replace(second, name=data_file(rank), starts=second.starts * rank, crc32=sums)
    yield written(leaves, mesh, mesh.size - 1)


def first_rank(folder: Path, ranks: int, number: int, out: Any) -> None:
    """Rank 0, in a process of its own: seconds of each part, and its peak memory."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    mesh, leaves = fs.make_mesh(shard=ranks, simulated=True), leaves_of(ranks, number)
    idle = peak()
    with timed("plan"):
        written(leaves, mesh, 0)
    with timed("gather"):
        sent = [path.read_bytes() for path in sorted((folder / "sent").iterdir())]
        parts = [pickle.loads(each) for each in sent]  # as torch.distributed does
        del sent
    fields = {
        "step": 0, "seed": 0, "mesh": {"axes": {"shard": ranks}, "data_axes": ["shard"]}, "data": (),
        "specs": {}, "config": None, "metrics": {}, "versions": {},
    }  # fmt: skip
    with timed("write"):
        manifest_of({n: leaf.saved_as() for n, leaf in leaves.items()}, parts, fields).write(folder)
    del parts
    with timed("read"):
        found = Manifest.read(folder)
    with timed("find"):
        fewer = fs.make_mesh(shard=max(1, ranks // 2), simulated=True)
        targets = {
            name: RestoreTarget(leaf.shape, leaf.layout, torch.empty(
                block_shape(leaf.shape, leaf.layout, fewer), device="meta"), name)
            for name, leaf in leaves.items()
        }  # fmt: skip
        reads = sum(1 for _ in chunk_reads(targets, found, fewer))
    out.put((seconds, idle, peak(), reads))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("ranks", 4096), ("leaves", 1000)):
        parser.add_argument(f"--{name}", type=count, default=default)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: 2 or more")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "sent").mkdir()
        mesh, leaves = fs.make_mesh(shard=args.ranks, simulated=True), leaves_of(args.ranks, args.leaves)
        for rank, each in enumerate(all_written(leaves, mesh)):
            (folder / "sent" / f"{rank:06d}").write_bytes(pickle.dumps(each))
        spawn = multiprocessing.get_context("spawn")
        out = spawn.SimpleQueue()
        process = spawn.Process(target=first_rank, args=(folder, args.ranks, args.leaves, out))
        process.start()
        seconds, idle, most, reads = out.get()
        process.join()
        size = (folder / NAME).stat().st_size
    print(f"{args.ranks} ranks, {args.leaves} leaves: a manifest of {size / 1e6:.1f} MB")
    print(", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()) + f": {sum(seconds.values()):.1f} s")
    print(f"peak {most / 1e9:.2f} GB, before it began {idle / 1e9:.2f} GB; {reads} reads of rank 0")


if __name__ == "__main__":
    main()
