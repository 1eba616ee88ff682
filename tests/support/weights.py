"""Weights in safetensors files: a tree of every shape and dtype, its specs, and what files hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P

safetensors = pytest.importorskip("safetensors.torch")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Read everything in a directory's files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = safetensors.load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert that two trees are equal to the bit, names and dtypes too."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert torch.equal(
            value.contiguous().view(-1).view(torch.uint8), other[name].contiguous().view(-1).view(torch.uint8)
        ), name


def tree_of(**leaves: Any) -> dict[str, Tensor]:
    """Draw distinct numbers for every leaf, by shape or (shape, dtype)."""
    out = {}
    for number, (name, what) in enumerate(leaves.items()):
        shape, dtype = what if isinstance(what[-1] if what else None, torch.dtype) else (what, torch.float32)
        made = torch.Generator().manual_seed(number)
        values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=made)
        out[name.replace("__", ".")] = values.to(dtype)
    return out


PARAMS = tree_of(
    embed=(13, 6), layers__0__w=(7, 5), layers__0__b=(5,), layers__1__w=(7, 5), scale=(),
    step=((3,), torch.int64), mask=((2, 2), torch.bool), half=((9, 4), torch.bfloat16), cube=(3, 5, 4),
    none=(0, 3),
)  # fmt: skip


def shard_weights(mesh: fs.Mesh, params: dict[str, Tensor] = PARAMS, **policy: Any) -> dict[str, LayoutSpec]:
    """Return specs that split dims of all sorts; uneven ones among them."""
    wide = "outer" in mesh.names
    rules = [
        ("*0.w", LayoutSpec(P(None, mesh.names[-1]), buffers=True, **policy)),
        ("cube", LayoutSpec(P(None, *(mesh.names if wide else ("shard",))), buffers=True, **policy)),
        ("embed", LayoutSpec(P(mesh.names if wide else "shard"), buffers=True, **policy)),
        ("scale", LayoutSpec(**policy)),
        ("*", LayoutSpec(P("shard"), buffers=True, **policy)),
    ]
    return fs.match_specs(params, [r for r in rules if r[0] == "*" or r[0] in params or r[0] == "*0.w"])


MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 4}, {"outer": 2, "shard": 2}, {"shard": 3, "outer": 2}]


@pytest.fixture
def nothing_is_left_open() -> Iterator[None]:
    """Check that every test closes the files of weights that it opened."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = {
        n: os.readlink(f"/proc/self/fd/{n}") for n in set(os.listdir("/proc/self/fd")) - before if _is_open(n)
    }
    assert not [path for path in left.values() if path.endswith((".safetensors", ".pt", ".json"))], left


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
