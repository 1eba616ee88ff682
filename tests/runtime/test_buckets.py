"""Buckets: packing and unpacking are inverse to each other, over any shapes, layouts and meshes."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.compiler.schedule.buckets import ALIGN_BYTES, make_buckets
from fnshard.runtime.packing import Packer, local_block

AXES = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]


@st.composite
def cases(draw):
    """Draw a mesh of two axes, and leaves with a layout each."""
    mesh = fs.make_mesh(a=draw(st.integers(1, 3)), b=draw(st.integers(1, 4)), abstract=True)
    leaves = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        parts = [None] * len(shape)
        if shape:
            axes = draw(st.sampled_from(AXES))
            parts[draw(st.integers(0, len(shape) - 1))] = axes or None
            if len(shape) > 1 and axes == ("a",) and draw(st.booleans()):
                parts[parts.index(("a",)) - 1] = "b"  # two dims split, each by an axis
        leaves[f"layers.{i % 2}.w{i}"] = (shape, P(*parts))
    return mesh, leaves


def make(mesh, leaves, dtype=torch.float64):
    full = {
        p: torch.arange(math.prod(s), dtype=dtype).reshape(s) + 100 * (i + 1)
        for i, (p, (s, _)) in enumerate(leaves.items())
    }
    rules = [(p, LayoutSpec(layout)) for p, (_, layout) in leaves.items()]
    specs = fs.match_specs(full, rules)
    return full, specs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_gathered_blocks_are_the_full_leaves(case):
    mesh, leaves = case
    full, specs = make(mesh, leaves)
    buckets = make_buckets(specs, mesh, lambda s: s.storage, lambda s: s.storage_dtype, "gather")
    assert sorted(path for bucket in buckets for path in bucket.paths) == sorted(specs)
    for bucket in buckets:
        rank = mesh.size - 1
        rows = []
        for other in mesh.group_ranks(bucket.axes, rank):
            row = torch.full((bucket.numel,), math.nan, dtype=bucket.dtype)
            blocks = {p: local_block(full[p], specs[p].storage, mesh, other) for p in bucket.paths}
            Packer(bucket, mesh, other).pack_blocks(blocks, row)
            rows.append(row)
        leaves_back = Packer(bucket, mesh, rank).unpack_rows(rows, torch.float64)
        for path in bucket.paths:
            assert torch.equal(leaves_back[path], full[path]), path
            assert leaves_back[path].is_contiguous()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_full_gradients_are_packed_as_the_blocks_of_each_rank(case, transposed):
    mesh, leaves = case
    full, specs = make(mesh, leaves)
    if transposed:  # gradients come in any strides
        full = {p: f.t().contiguous().t() if f.dim() == 2 else f for p, f in full.items()}
    buckets = make_buckets(specs, mesh, lambda s: s.gradient, lambda s: s.reduce_dtype, "reduce")
    assert sorted(path for bucket in buckets for path in bucket.paths) == sorted(specs)
    for bucket in buckets:
        packer = Packer(bucket, mesh, 0)
        missing = bucket.paths[0] if len(bucket.paths) > 1 else None
        given_leaves = {p: full[p] for p in bucket.paths if p != missing}
        rows = torch.full((packer.rows * bucket.numel,), math.nan, dtype=bucket.dtype)
        packer.pack_full(given_leaves, rows)
        for index, rank in enumerate(mesh.group_ranks(bucket.axes, 0)):
            row = rows.view(packer.rows, -1)[index]
            blocks = Packer(bucket, mesh, rank).blocks(row)
            for path in bucket.paths:
                expected = local_block(full[path], specs[path].gradient, mesh, rank)
                if path == missing:
                    expected = torch.zeros_like(expected)
                assert torch.equal(blocks[path], expected), path


def test_leaves_start_at_aligned_places_and_dtypes_do_not_mix():
    mesh = fs.make_mesh(shard=2, abstract=True)
    params = {
        "l.0.a": torch.zeros(3, 5),
        "l.0.b": torch.zeros(7),
        "l.0.c": torch.zeros(4, dtype=torch.bfloat16),
    }
    specs = fs.match_specs(params, [("*", LayoutSpec(P("shard")))])
    buckets = make_buckets(specs, mesh, lambda s: s.storage, lambda s: s.storage_dtype, "gather")
    assert [b.paths for b in buckets] == [("l.0.a", "l.0.b"), ("l.0.c",)]
    for bucket in buckets:
        assert all(p.offset * bucket.dtype.itemsize % ALIGN_BYTES == 0 for p in bucket.pieces)
    # A row is padded to a multiple of ALIGN_BYTES, but not one that is shorter than that in all.
    assert [b.row_bytes for b in buckets] == [2 * ALIGN_BYTES, 4]


def test_wire_dtype_casts_on_the_way():
    mesh = fs.make_mesh(shard=2, abstract=True)
    full = {"w": torch.randn(6, 3)}
    specs = fs.match_specs(full, [("*", LayoutSpec(P("shard"), compute_dtype=torch.bfloat16))])
    (bucket,) = make_buckets(specs, mesh, lambda s: s.storage, lambda s: s.compute_dtype, "gather")
    rows = [torch.zeros(bucket.numel, dtype=torch.bfloat16) for _ in range(2)]
    for rank, row in enumerate(rows):
        Packer(bucket, mesh, rank).pack_blocks({"w": local_block(full["w"], P("shard"), mesh, rank)}, row)
    out = Packer(bucket, mesh, 0).unpack_rows(rows, torch.bfloat16)["w"]
    assert torch.equal(out, full["w"].bfloat16())
