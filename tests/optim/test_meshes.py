"""The contract of optimizers: each is written for one device and whole leaves, and is right on every mesh.

The truth is the optimizer itself, run in plain torch on whole leaves and whole gradients (`train_whole`).
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import meshes
import pytest
import torch
from foreign import FOREIGN
from meshes import ACCUMULATE, EVERY, MESHES, PRESETS, SHAPES, TIERS, Result, assert_same, put_together
from pairs import cover_pairs

import fnshard as fs
from fnshard.compiler.schedule.buckets import row_of_rank
from fnshard.compiler.schedule.instructions import ComputeStack, ReduceScalars, StackUpdate, Update
from fnshard.compiler.update.derive import count_flops

LAYOUTS = {
    "mesh": [name for name in MESHES if name != "context"], "preset": PRESETS, "leaves": list(SHAPES),
    "tier": list(TIERS),
    "accumulate": list(ACCUMULATE), "remat": ["none", "unit"], "skips": [False, True], "overlap": [0, 1],
}  # fmt: skip
# Those from papers, and some of each kind of this package's.
SOME = [
    *FOREIGN, "muon", "adafactor", "soap", "lars", "adamw_8bit", "rank_signs", "clip_adamw_ema",
]  # fmt: skip


def allows(row: dict[str, Any]) -> bool:
    """Return whether a row is a layout, and says something of its own."""
    mesh = row.get("mesh", "hybrid")
    if mesh == "experts" and row.get("leaves") == "wide":
        return False
    if mesh == "stages" and row.get("leaves") == "stacked":
        return False  # the first stage's leaf is read last
    if mesh == "sides" and (row.get("leaves") == "stacked" or "soap" in row.get("name", "")):
        return False  # it is of a wide matrix
    return row.get("preset") != "hybrid_shard" or mesh == "hybrid"


def find_short() -> list[dict[str, Any]]:
    """Return rows in which every two choices of a layout on four ranks meet, with optimizers in turn."""
    some = {"mesh": ["four", "hybrid", "tensor", "experts"], "tier": ["device", "host", "streamed"]}
    rows = cover_pairs({**LAYOUTS, **some}, allows, tries=40)
    return [{"name": SOME[number % len(SOME)], **row} for number, row in enumerate(rows)]


LEAVES = "stacked"  # of tests that try one model
SHORT = find_short()
LONG = [row for row in cover_pairs({"name": list(EVERY), **LAYOUTS}, allows, tries=2) if row not in SHORT]


@cache
def truth(name: str, leaves: str, skips: bool) -> Result:
    return meshes.train_whole(name, leaves, skips)


def train(row: dict[str, Any]) -> Result:
    """Return what the ranks of a row make."""
    options = {**ACCUMULATE[row["accumulate"]], "overlap": row["overlap"]}
    if row["remat"] != "none":
        options["remat"] = row["remat"]
    where = {key: row[key] for key in ("name", "mesh", "preset", "tier", "leaves", "skips")}
    return meshes.train_ranks(**where, **options)


@pytest.mark.suite({
    "lamb-four-*": "norms of whole leaves",
    "error_feedback_sign-four-*": "padding that must not count",
    "ademamix-hybrid-*": "on the host",
    "normalized_momentum-*": "one norm over all",
    "clippy-*": "the largest of all elements",
    "muon-tensor-*": "matrices that a compute axis splits",
    "top_k-*": "an order over the whole leaf",
    "adafactor-experts-*": "means of stacks",
    "adamw_8bit-*": "codes",
    "rank_signs-*": "a stack by hand",
    "clip_adamw_ema-*": "what stands around",
    "dion-hybrid-*": "products over ranks",
    "row_normalized-hybrid-*": "norms of rows",
})  # fmt: skip
@pytest.mark.parametrize(
    "row", [*SHORT, *(pytest.param(row, marks=pytest.mark.long) for row in LONG)],
    ids=lambda row: "-".join(map(str, row.values())),
)  # fmt: skip
def test_every_mesh_trains_as_one_device(row: dict[str, Any]) -> None:
    """Parameters and slots to 1e-10, and every leaf moves."""
    name, leaves = row["name"], row["leaves"]
    expected = truth(name, leaves, row["skips"])
    assert_same(train(row), expected)
    start = meshes.make_model(meshes.shapes_of(name, leaves)).params
    still = {
        p for p, leaf in start.items() if leaf.numel() and (leaf - expected.params[p]).abs().max() < 1e-4
    }
    assert not still


@pytest.mark.suite({
    "muon-context-*": "ranks that share rows",
    "hutchinson-*": "draws of a whole leaf",
    "lamb-four-*": "norms of complex leaves",
    "sm3-tensor-*": "blocks that are computed on while a whole leaf comes back",
})  # fmt: skip
@pytest.mark.parametrize(
    ("name", "mesh", "preset", "leaves"),
    [
        ("adafactor", "context", "full_shard", "wide"),
        ("muon", "context", "zero1", "stacked"),
        ("lamb", "four", "full_shard", "complex"),
        ("adafactor", "context", "zero2", "complex"),
        ("sm3", "tensor", "zero2", "wide"),
        ("hutchinson", "four", "full_shard", "wide"),
        pytest.param("shampoo", "context", "shard_grad_op", "wide", marks=pytest.mark.long),
        pytest.param("soap", "context", "full_shard", "stacked", marks=pytest.mark.long),
        pytest.param("clip_adamw_ema", "hybrid", "hybrid_shard", "complex", marks=pytest.mark.long),
        pytest.param("adamw_8bit", "hybrid", "full_shard", "complex", marks=pytest.mark.long),
    ],
)
def test_context_axes_and_complex_leaves_train_as_one_device(
    name: str, mesh: str, preset: str, leaves: str
) -> None:
    assert_same(meshes.train_ranks(name, mesh, preset, leaves=leaves), truth(name, leaves, False))


def test_the_short_rows_meet_all_layouts_and_optimizers() -> None:
    assert {row["name"] for row in SHORT} == set(SOME)
    assert {row["name"] for row in LONG} == set(EVERY)


@pytest.mark.suite({
    "muon-*": "moved to the device for each update",
})  # fmt: skip
@pytest.mark.parametrize(
    ("name", "mesh", "preset", "tier"),
    [
        ("adafactor", "four", "full_shard", "device"),
        ("muon", "hybrid", "zero1", "streamed"),
        pytest.param("lamb", "tensor", "zero2", "device", marks=pytest.mark.long),
        pytest.param("shampoo", "experts", "full_shard", "host", marks=pytest.mark.long),
        pytest.param("adamw_8bit", "four", "zero1", "all_host", marks=pytest.mark.long),
    ],
)
def test_master_copies_train_as_on_one_rank(name: str, mesh: str, preset: str, tier: str) -> None:
    """Parameters in bf16 of masters in fp32: as near as bf16 lets them be."""
    dtypes = {
        "storage_dtype": torch.bfloat16, "compute_dtype": torch.float32, "optimizer_dtype": torch.float32,
    }  # fmt: skip
    found = meshes.train_ranks(name, mesh, preset, tier, LEAVES, dtypes=dtypes)
    expected = meshes.train_ranks(name, "one", "no_shard", leaves=LEAVES, dtypes=dtypes)
    assert_same(found, expected, atol=2e-2)
    assert all(torch.equal(leaf, leaf.bfloat16().double()) for leaf in found.params.values())


# ------------------------------------------------------------------ real ranks, and files between meshes
def train_real(rank: int, names: list[str]) -> list[dict[str, torch.Tensor]]:
    """Train on gloo ranks."""
    out = []
    for name in names:
        mesh = fs.make_mesh(shard=2, device="cpu")
        step, model = meshes.make_step(name, mesh, "full_shard", {}, LEAVES)
        out.append(meshes.run_rank(mesh, step, model)[1])
    return out


def test_real_ranks_train_as_one_device(ranks: Any) -> None:
    names = ["muon", "lamb", "dion"]
    found = ranks(2).run(train_real, names)
    for number, name in enumerate(names):
        assert_same(put_together([of_rank[number] for of_rank in found]), truth(name, LEAVES, False))


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare this rank's parts of a state; what it has not is NaN."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def train_between(
    rank: int, names: list[str], axes: dict[str, int], preset: str, number: int, folder: str
) -> list[dict[str, torch.Tensor]]:
    """Run one step, of what was saved behind the step before, and save what it makes.

    A state is the same by a step, by specs alone, and in another layout and back.
    """
    out = []
    for name in names:
        mesh, layouts = fs.make_mesh(**axes, device="cpu"), MESHES["tensor"][1] if "tensor" in axes else {}
        step, model = meshes.make_step(name, mesh, preset, layouts, LEAVES)
        state = fs.checkpoint.restore(f"{folder}/{name}-{number - 1}", step) if number else None
        state, parts = meshes.run_rank(mesh, step, model, [number], state)
        fs.checkpoint.save(f"{folder}/{name}-{number}", state)
        again = fs.checkpoint.restore(f"{folder}/{name}-{number}", step.specs, mesh=mesh)
        assert_same_bits(meshes.whole_parts(again), parts)
        elsewhere = "full_shard" if preset == "zero2" else "zero2"
        other, _ = meshes.make_step(name, mesh, elsewhere, layouts, LEAVES)
        moved = fs.reshard(again, step.specs, other.specs, mesh)
        assert_same_bits(meshes.whole_parts(fs.reshard(moved, other.specs, step.specs, mesh)), parts)
        out.append(parts)
    return out


@pytest.mark.long  # test_checkpoint: every mesh restores every other
@pytest.mark.parametrize(
    ("names", "last"),
    [
        (["adafactor", "adamw_8bit"], {"tensor": 2}),
        (["muon", "soap", "shampoo"], {"tensor": 2, "shard": 2}),
    ],
    ids=["two", "four"],
)
def test_training_goes_on_on_another_mesh(
    names: list[str], last: dict[str, int], ranks: Any, tmp_path: Path
) -> None:
    """A step on two ranks, one on one, and one on another mesh, with files between."""
    ranks(2).run(train_between, names, {"shard": 2}, "zero2", 0, str(tmp_path), timeout=250.0)
    train_between(0, names, {"shard": 1}, "no_shard", 1, str(tmp_path))
    pool = ranks(math.prod(last.values()))
    found = pool.run(train_between, names, last, "full_shard", 2, str(tmp_path), timeout=250.0)
    for number, name in enumerate(names):
        assert_same(put_together([of_rank[number] for of_rank in found]), truth(name, LEAVES, False))


# ------------------------------------------------------------------ what it costs, on paper
def lower_layers(optimizer: fs.optim.Optimizer, ranks: int, layers: int = 48) -> Any:
    """Return the lowered step of equal matrices with a vector each, a unit a layer."""
    mesh = fs.make_mesh(shard=ranks, abstract=True)
    params = {f"layers.{n}.w": torch.zeros(32, 64) for n in range(layers)}
    params |= {f"layers.{n}.bias": torch.zeros(64) for n in range(layers)}

    def total(params: Any, x: torch.Tensor) -> torch.Tensor:
        for n in range(layers):
            x = torch.tanh(x) + params[f"layers.{n}.w"].square().sum() + params[f"layers.{n}.bias"].sum()
        return x.sum()

    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(total, specs, mesh=mesh, optimizer=optimizer, backend="eager")
    return step.lower(params, torch.ones(2))


@pytest.mark.parametrize("ranks", [2, 16, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 8))])
def test_muon_sends_blocks_there_and_back_and_spreads_its_work(ranks: int) -> None:
    """Only bf16 blocks travel; each matrix is computed once, and no rank computes 1.05 of its share."""
    lowered = lower_layers(fs.optim.muon(0.02), ranks)
    schedule = lowered.schedule
    sent = lowered.comm_analysis()
    of_update = [line for line in schedule.instructions if line.phase == "update" and line.outgoing]
    assert {type(line) for line in of_update} == {StackUpdate}
    numel = 48 * 32 * 64
    assert sent[of_update[0].verb]["bytes"] <= 2 * 2 * numel / ranks

    flops, computed = [0.0] * ranks, []
    for line in schedule.instructions:
        if isinstance(line, ComputeStack):
            for rank in range(ranks):
                own = row_of_rank(schedule.buckets[line.bucket], rank, ranks)
                computed += own.paths
                nodes = [n for path in own.paths for n in line.work[path].graph.nodes]
                flops[rank] += sum(map(count_flops, nodes))
    assert sorted(computed) == sorted(f"layers.{n}.w" for n in range(48))
    assert 0 < flops[0] == max(flops) <= 1.05 * sum(flops) / ranks
    elsewhere = (n for line in schedule.instructions if isinstance(line, Update)
                 for work in line.work.values() for n in work.graph.nodes)  # fmt: skip
    assert not any(map(count_flops, elsewhere))


def test_adamw_says_nothing_and_updates_each_bucket_at_once() -> None:
    schedule = lower_layers(fs.optim.adamw(1e-3), 8, layers=4).schedule
    sent = [line for line in schedule.instructions if line.phase == "update" and line.outgoing]
    assert all(isinstance(line, ReduceScalars) for line in sent)  # of the loss
    of_leaves = [line for line in schedule.instructions if isinstance(line, Update)]
    reduced = [line.bucket for line in schedule.instructions if line.verb == "reduce_scatter"]
    assert [line.bucket for line in of_leaves] == reduced
    assert sorted(path for line in of_leaves for path in line.paths) == sorted(schedule.specs)
