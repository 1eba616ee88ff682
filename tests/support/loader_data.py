"""Data for loaders: prepared samples, shards whose tokens are their places, a stream of bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.shards import open_shards

CONTEXT = 50
COUNT = 67


def stream(size: int = 5000, symbols: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(symbols, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """`numbered(tokens, parts)`: shards whose tokens are their places."""
    folder = tmp_path_factory.mktemp("numbered")

    def make(tokens: int, parts: int):
        path = folder / f"{tokens}-{parts}"
        if not path.exists():
            path.mkdir()
            cuts = np.sort(
                np.random.default_rng(parts).choice(np.arange(1, tokens), parts - 1, replace=False)
            )
            for number, part in enumerate(np.split(np.arange(tokens, dtype=np.uint32), cuts)):
                np.save(path / f"{number}.npy", part)
        return open_shards(path)

    return make


@pytest.fixture(scope="session")
def samples(tmp_path_factory, byte_directory):
    """`samples(kind, ...)`: prepared data of many lengths, its own text in every sample."""
    folder = tmp_path_factory.mktemp("data")

    def make(kind="samples", context=CONTEXT, count=COUNT, longest=40):
        draw = np.random.default_rng(0)
        sizes = draw.integers(1, longest - 10, size=count)
        lines = [{"prompt": f"{i:04d}", "response": "r" * size} for i, size in enumerate(sizes.tolist())]
        if kind == "pairs":
            lines = [{"prompt": x["prompt"], "chosen": x["response"], "rejected": "no"} for x in lines]
        file = folder / f"{kind}{count}{longest}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return prepare(file, byte_directory, RecordPolicy(kind, context), cache=folder / "cache")[0]

    return make


def joined(parts):
    """Ranks' batches as the global one."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], tuple):
        return tuple(map(joined, zip(*parts, strict=True)))
    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
