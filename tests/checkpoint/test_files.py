"""What checkpoints are made of: manifests, JSON that is read as dataclasses, positions as JSON, tensor files,
checked bytes, keeping."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
from errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from torch import Tensor

import fnshard as fs
from fnshard import P
from fnshard.checkpoint.blocks import assign_leaves, chunk_reads
from fnshard.checkpoint.loader_state import TAG, decode, encode
from fnshard.checkpoint.manifest_file import Chunk, DataFile, Manifest, merge_leaves
from fnshard.checkpoint.retention import Keep
from fnshard.checkpoint.state_leaves import LocalLeaf, RestoreTarget
from fnshard.errors import CheckpointError
from fnshard.layout.partition import Fused, block_shape
from fnshard.mesh import simulated_rank
from fnshard.runtime.files import tensorfile
from fnshard.runtime.files.json_reader import Count, from_json
from fnshard.runtime.files.tensorfile import (
    DTYPES,
    Corrupt,
    TensorToWrite,
    open_regular,
    read_and_check,
    write,
)

FIELDS: dict[str, Any] = {
    "step": 0, "seed": 0, "mesh": {"axes": {"shard": 1}, "data_axes": ["shard"]}, "data": (), "specs": {},
    "config": None, "metrics": {}, "versions": {},
}  # fmt: skip
LAYOUTS = {
    "rows": ((37, 3), P("shard")),
    "both dims": ((8, 12), P("shard", "tensor")),
    "one dim": ((23,), P(("tensor", "shard"))),
    "replicated": ((5, 2), P()),
    "a number": ((), P()),
    "nothing": ((0, 4), P("shard")),
    "fewer rows than ranks": ((2, 5), P("shard")),
    "fused": ((24, 2), P((Fused("tensor", 3), "shard"))),
    "fused, unevenly": ((18, 2), P((Fused("tensor", 3), "shard"))),
}


def part_of(leaf: LocalLeaf, mesh: fs.Mesh, rank: int) -> Any:
    """Return the leaf with the chunks that a rank writes, of a file of its own."""
    chunks, at = [], 8
    for start, part in leaf.parts(mesh) if assign_leaves({"params/w": leaf}, mesh) else ():
        chunks.append(Chunk(start, tuple(part.shape), f"rank-{rank:05d}.safetensors", at, (0,)))
        at += part.nbytes
    return leaf.to_saved(chunks)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_chunks_are_every_part_once_and_ranks_read_their_own(layout: Any, tmp_path: Path) -> None:
    shape, spec = layout
    mesh = fs.make_mesh(replicate=2, shard=4, tensor=2, simulated=True)
    leaf = LocalLeaf(shape, spec, torch.empty(block_shape(shape, spec, mesh), device="meta"))
    parts = []
    for rank in range(mesh.size):
        with simulated_rank(rank):
            parts.append({"params/w": part_of(leaf, mesh, rank)})
    files = {f"rank-{rank:05d}.safetensors": DataFile(1 << 20, 8, 0) for rank in range(mesh.size)}
    Manifest(leaves=merge_leaves(parts, [0] * len(parts)), files=files, **FIELDS).write(tmp_path)
    found = Manifest.read(tmp_path)
    seen = np.zeros(shape, int)
    for chunk in found.leaves["params/w"].chunks:
        seen[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))] += 1
    assert (seen == 1).all()
    target = RestoreTarget(shape, spec, leaf.block, source="params/w")
    for rank in range(mesh.size):
        with simulated_rank(rank):
            read = sum(read.target.numel() for read in chunk_reads({"params/w": target}, found, mesh))
            assert read == sum(part.numel() for _, part in leaf.parts(mesh))


def test_ranks_that_hold_different_states_are_told() -> None:
    leaf = LocalLeaf((4,), P(), torch.ones(4))
    whole = leaf.to_saved([Chunk((0,), (4,), "rank-00000.safetensors", 8, (0,))])
    other = LocalLeaf((4,), P("shard"), torch.ones(4)).to_saved()
    for parts in ([{"a": whole}, {"a": other}], [{"a": whole}, {"a": whole, "b": whole}], [{"a": other}]):
        with raises(ValueError, says="different states"):
            merge_leaves(parts, [0] * len(parts))


@dataclass(frozen=True)
class Inner:
    at: Count
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_name: Mapping[str, Inner]
    rows: tuple[tuple[int, ...], ...]
    maybe: Inner | None
    number: float
    on: bool
    anything: Any


VALUE = Outer(Inner(3, ("a",)), {"x": Inner(0)}, ((1,), ()), None, 1.5, True, {"a": [None]})
PLAIN = json.loads(json.dumps(asdict(VALUE)))


def test_what_was_written_is_read() -> None:
    assert from_json(Outer, PLAIN) == VALUE
    assert from_json(Outer, PLAIN | {"maybe": {"at": 1}, "more": 1}).maybe == Inner(1)


@pytest.mark.parametrize(
    ("change", "leaves", "says"),
    [
        ({"inner": {"at": -1}}, "inner: at", "-1"),
        ({"inner": {"at": True}}, "inner: at", "True"),
        ({"inner": {}}, "inner: at", "missing"),
        ({"by_name": {"x": {"at": 1, "names": ["a", 2]}}}, "by_name: x: names", ["2", "str"]),
        ({"rows": [[1], [1.5]]}, "rows", ["1.5", "int"]),
        ({"maybe": 3}, "maybe", ["3", "an object"]),
        ({"number": "1"}, "number", ["'1'", "a number"]),
        ({"on": 1}, "on", ["1", "bool"]),
    ],
)
def test_what_is_of_another_type_is_named(change: Any, leaves: str, says: Any) -> None:
    with raises(ValueError, leaves=leaves, says=says):
        from_json(Outer, PLAIN | change)


EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SIZES = st.lists(st.integers(0, 5), max_size=4)
NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: Any, dtypes: Any = None) -> Tensor:
    """Draw a tensor of any dtype, shape and bits, sometimes transposed."""
    dtype, shape = draw(st.sampled_from(dtypes or list(DTYPES.values()))), draw(SIZES)
    count = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        content = bytes(b & 1 for b in content)
    if not count:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    return tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor, NaNs and signs of zero too."""
    flat = tensor.contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), content


# ------------------------------------------------------------------ positions as JSON
NUMBERS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
)
ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(n) for n in (*"bhilBHILefd?F",)]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)  # fmt: skip
KEYS = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.just(TAG) | st.tuples(st.integers())
)
TREES = st.recursive(
    NUMBERS | tensors() | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type and value, bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    return a == b


@EXAMPLES
@given(TREES)
def test_positions_come_back_from_json_as_they_were(tree: Any) -> None:
    text = json.dumps(encode(tree))
    assert same(decode(json.loads(text)), tree)


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (np.float32(1.5), 1.5), (np.int64(-3), -3), (np.bool_(True), True), (np.bytes_(b"ab"), b"ab"),
        (np.str_("a"), "a"), (np.array(5), np.array(5)),
        (np.arange(4, dtype=">i4"), np.arange(4, dtype="i4")),
        (np.arange(6).reshape(2, 3).T[::-1], np.arange(6).reshape(2, 3).T[::-1].copy()),
        (np.broadcast_to(np.array([1.0]), (3,)), np.ones(3)),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    ],
)  # fmt: skip
def test_what_is_nearly_plain_is_made_so(value: Any, back: Any) -> None:
    got = decode(json.loads(json.dumps(encode({"a": [value]}))))["a"][0]
    assert same(got, back), (got, back)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, object(), 1j, np.longdouble(1), np.datetime64("2020"), np.array(["a"]), np.array([None]),
        np.zeros(2, dtype="f8,i4"), np.zeros(2, dtype=complex), np.zeros(2, dtype=np.longdouble),
        torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), lambda: 0,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_not_plain_is_refused_by_name(value: Any) -> None:
    with raises(CheckpointError, leaves="data['a'][1]", fix="tensors and arrays"):
        encode({"a": [0, value]})


# ------------------------------------------------------------------ tensor files
# What the library has names for, in torch, too.
SHARED = [dtype for dtype in DTYPES.values() if dtype != torch.complex64]
FILES = st.dictionaries(NAMES, tensors(SHARED), max_size=6)


def written(path: Path, named: dict[str, Tensor], metadata: Any = None) -> tensorfile.WrittenFile:
    path.unlink(missing_ok=True)
    entries = [TensorToWrite(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in named.items()]
    return write(path, entries, metadata)


@EXAMPLES
@given(FILES, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2), st.integers(1, 40))
def test_the_library_reads_what_we_write(tmp_path: Path, named: Any, metadata: Any, block: int) -> None:
    path = tmp_path / "ours.safetensors"
    with mock.patch.object(tensorfile, "BLOCK_BYTES", block):
        done = written(path, named, metadata)
    back = load_file(path)
    assert {n: bits(t) for n, t in back.items()} == {n: bits(t) for n, t in named.items()}
    with safetensors.safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
    # The sums are those of the bytes in the file.
    content = path.read_bytes()
    assert done.bytes == len(content) and done.header_crc32 == zlib.crc32(content[: done.header_bytes])
    for name, tensor in named.items():
        data = content[done.at[name] :][: tensor.numel() * tensor.dtype.itemsize]
        assert data == bits(tensor)[2] and done.at[name] % tensor.dtype.itemsize == 0
        assert done.crc32[name] == tuple(zlib.crc32(data[i : i + block]) for i in range(0, len(data), block))


@contextmanager
def opened(path: Path) -> Any:
    fd = open_regular(path.parent, path.name)
    try:
        yield fd
    finally:
        os.close(fd)


# ------------------------------------------------------------------ checked bytes
@EXAMPLES
@given(st.data())
def test_any_range_is_read_right_or_refused(tmp_path: Path, data: Any) -> None:
    """The tensor lies among others; a flipped bit is found if and only if its block is touched."""
    size, before, block = (
        data.draw(st.integers(1, 60)),
        data.draw(st.integers(0, 20)),
        data.draw(st.integers(1, 24)),
    )
    content = data.draw(st.binary(min_size=size, max_size=size))
    start = data.draw(st.integers(0, size))
    count = data.draw(st.integers(0, size - start))
    crc32 = [zlib.crc32(content[i : i + block]) for i in range(0, size, block)]
    path = tmp_path / "bytes"
    flipped = data.draw(st.none() | st.integers(0, 8 * size - 1))
    on_disk = bytearray(content)
    if flipped is not None:
        on_disk[flipped // 8] ^= 1 << flipped % 8
    path.write_bytes(bytes(before) + on_disk + b"\0" * data.draw(st.integers(0, 3)))
    out = bytearray(b"?" * count)
    hit = flipped is not None and start // block <= flipped // 8 // block < -(-(start + count) // block)
    with mock.patch.object(tensorfile, "BLOCK_BYTES", block), opened(path) as fd:
        try:
            read_and_check(fd, before, size, crc32, start, memoryview(out))
        except Corrupt as error:
            assert hit and "checksum differs" in str(error)
        else:
            assert not hit and out == content[start : start + count]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/hostname", "../bytes", "a\0", "\ud800", "x" * 300]
)
def test_a_name_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "bytes").write_bytes(b"a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"a")
    with pytest.raises(Corrupt, match=r"no name of a file|too long"):
        open_regular(tmp_path, name)


# ------------------------------------------------------------------ what is kept
METRICS = st.dictionaries(
    st.integers(0, 60),
    st.dictionaries(st.sampled_from(["loss", "other"]), st.floats() | st.just(math.nan), max_size=2),
    max_size=12,
)


@EXAMPLES
@given(
    METRICS,
    st.integers(1, 5),
    st.none() | st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from(["min", "max"]),
)  # fmt: skip
def test_kept_are_the_last_the_multiples_and_the_best(
    metrics: Any, last: int, every: int | None, best: int, mode: Any
) -> None:
    kept = Keep(last=last, every=every, best=best, mode=mode).kept(metrics)
    rated = {s: m["loss"] for s, m in metrics.items() if not math.isnan(m.get("loss", math.nan))}
    better = (lambda a, b: a < b) if mode == "min" else (lambda a, b: a > b)
    for s in metrics:
        newer = sum(other > s for other in metrics)
        # Of equal ones the older is better.
        ahead = [better(r, rated[s]) or (r == rated[s] and o < s) for o, r in rated.items() if s in rated]
        good = s in rated and sum(ahead) < best
        assert (s in kept) == (newer < last or bool(every and s % every == 0) or good)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"best": -1}, {"mode": "low"}])
def test_a_keep_that_cannot_be(wrong: Any) -> None:
    with raises(CheckpointError, leaves=f"{next(iter(wrong))}="):
        Keep(**wrong)


def test_stages_have_leaves_of_their_own_and_ranks_of_one_the_same() -> None:
    """ "b" is of the second stage, whose two ranks both name it."""
    leaf = LocalLeaf((4,), P(), torch.ones(4))
    whole = leaf.to_saved([Chunk((0,), (4,), "rank-00000.safetensors", 8, (0,))])
    found = merge_leaves(
        [{"a": whole}, {"a": leaf.to_saved()}, {"b": whole}, {"b": leaf.to_saved()}], [0, 0, 1, 1]
    )
    assert list(found) == ["a", "b"] and all(len(each.chunks) == 1 for each in found.values())
    with raises(ValueError, leaves="b", says="different states"):
        merge_leaves([{"a": whole}, {"a": leaf.to_saved()}, {"b": whole}, {}], [0, 0, 1, 1])
