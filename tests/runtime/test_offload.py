"""Tiers: whatever rests on the host or on disk, training is the same; transfers are what they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import sharded
import torch
from errors import raises
from tiered import CLIPPED, CPU, FEATURES, TIERS, Adversary, compute_expected, model_of
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec
from fnshard.compiler.schedule.instructions import Gather, Norms, Run, ToDevice, ToHost, Update, Wait
from fnshard.errors import SpecError, StateError
from fnshard.runtime.tiers import KEPT_STEPS, Transfers, allocate, to_tier
from fnshard.step import runner


# ------------------------------------------------------------------ training
@pytest.mark.parametrize(
    ("tier", "feature"),
    [("streamed_all", "local"), ("parameters_host", "breadth"), ("all_disk", "plain"), ("mixed", "clip")],
)
def test_training_equals_the_naive_loop(tier: str, feature: str, tmp_path: Path) -> None:
    """Train with tiers that `test_matrix` does not have, each with a feature."""
    optimizer, options = FEATURES[feature]
    ranks = sharded.simulate(
        model_of("tied"), "full_shard", 2, optimizer, policy=TIERS[tier], disk_dir=str(tmp_path), **options
    )
    for got in ranks:
        sharded.assert_same(got, compute_expected(optimizer is CLIPPED))
    assert list(tmp_path.iterdir()) == []  # no file stays


@pytest.mark.long  # test_meshes has masters that are moved
@pytest.mark.parametrize(("preset", "dtypes"), [("full_shard", "bf16 storage"), ("no_shard", "bf16 compute")])
def test_master_copies_in_other_dtypes(preset: str, dtypes: str) -> None:
    """The host does bit for bit what the device does, if the master copy has another dtype."""
    policy = {"optimizer_dtype": torch.float32}
    policy |= {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy |= {"storage_dtype": torch.bfloat16} if dtypes == "bf16 storage" else {}
    model = sharded.as_float(model_of("gpt"))
    optimizer = FEATURES["plain"][0]
    plain, *_ = sharded.simulate(model, preset, 2, optimizer, policy=policy)
    for tier in ("optimizer_host", "all_host", "streamed"):
        got, *_ = sharded.simulate(model, preset, 2, optimizer, policy={**policy, **TIERS[tier]})
        sharded.assert_same(got, plain, atol=0)


@pytest.mark.long
def test_gradients_alone_and_forward_alone() -> None:
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=1)
    batch = model.batches(1)[0]
    want, loss = reference.gradients(model.loss, model.params, *batch)
    for tier in ("all_host", "optimizer_host"):
        specs = sharded.specs_of(model, "full_shard", mesh, **TIERS[tier])
        shards = fs.shard(model.params, specs, mesh)
        got_loss, grads = fs.shard_step(model.loss, specs, mesh=mesh, backend="eager")(shards, *batch)
        torch.testing.assert_close(got_loss, loss, rtol=0, atol=1e-10)
        for path, gradient in want.items():
            if path in model.frozen:
                continue
            torch.testing.assert_close(grads[path], gradient, rtol=0, atol=1e-10)
        forward = fs.shard_forward(model.loss, specs, mesh=mesh, backend="eager")
        torch.testing.assert_close(forward(shards, *batch), loss, rtol=0, atol=1e-10)


# ------------------------------------------------------------------ the adversary
@pytest.mark.long  # test_host_worker has adversaries, test_adversary the host
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tier", ["all_host", "streamed_all", "optimizer_host", "parameters_host"])
def test_transfers_under_the_adversary(tier: str, late: bool) -> None:
    """Nothing is read before its transfer was waited for, nothing is given back while it is read."""
    model = model_of("tied")
    for preset, feature in (("full_shard", "plain"), ("zero2", "reduce"), ("no_shard", "reduce")):
        optimizer, options = FEATURES[feature]
        how = {"policy": TIERS[tier], "remat": "offload", **options}
        plain = sharded.simulate(model, preset, 2, optimizer, **how)
        with mock.patch.object(runner, "Transfers", Adversary), mock.patch.object(Adversary, "late", late):
            got = sharded.simulate(model, preset, 2, optimizer, adversary="late", **how)
        for a, b in zip(got, plain, strict=True):
            sharded.assert_same(a, b, atol=0)


# ------------------------------------------------------------------ the schedule
def lower_model(tier: str, preset: str = "full_shard", **options: Any) -> Any:
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=4, abstract=True)
    specs = sharded.specs_of(model, preset, mesh, **TIERS[tier])
    step = fs.shard_step(model.loss, specs, mesh=mesh, optimizer=FEATURES["plain"][0], **options)
    return step.lower(model.params, *model.batches(1)[0]).schedule


def test_transfers_are_prefetched_a_unit_ahead() -> None:
    """The load of a unit's shards is issued before the kernel in front of its gather's runs."""
    lines = lower_model("all_host").instructions
    loads = [i for i, line in enumerate(lines) if isinstance(line, ToDevice)]
    ahead = 0
    for i in loads:
        names = next(w.writes for w in lines if isinstance(w, Wait) and w.reads == lines[i].writes)
        gather = next(k for k, g in enumerate(lines) if isinstance(g, Gather) and set(g.reads) & set(names))
        ahead += any(isinstance(line, Run) for line in lines[i:gather])
    assert (len(loads), ahead) == (8, 6)  # no kernel runs before the gathers of the first two


def test_gradients_go_to_the_host_once_and_updates_stay_there() -> None:
    schedule = lower_model("optimizer_host")
    counts = schedule.counts()
    updates = [line for line in schedule.instructions if isinstance(line, Update)]
    assert counts["to_host"] == len(updates) > 0  # gradients
    assert counts["to_device"] == len(updates)  # updated parameters
    assert all(line.reads[0].startswith("h:r:") for line in updates)
    sent = [n for i in schedule.instructions if isinstance(i, ToDevice) for n in i.reads]
    assert not any(n.startswith("o:") for n in sent)


def test_streamed_slots_go_there_and_back() -> None:
    schedule = lower_model("streamed")
    sent = [n for i in schedule.instructions if isinstance(i, ToDevice) for n in i.reads]
    back = [n for i in schedule.instructions if isinstance(i, ToHost) for n in i.into]
    trained = sorted(f"o:{p}" for p, s in schedule.specs.items() if s.trainable)
    assert sorted(sent) == sorted(back) == trained != []


def test_norms_are_taken_where_the_gradients_lie() -> None:
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=4, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh, **TIERS["optimizer_host"])
    step = fs.shard_step(model.loss, specs, mesh=mesh, optimizer=CLIPPED)
    lines = step.lower(model.params, *model.batches(1)[0]).schedule.instructions
    reads = [n for i in lines if isinstance(i, Norms) for n in i.reads]
    assert reads and all(n.startswith("h:r:") for n in reads)
    assert sum(i.verb == "reduce_scalars" for i in lines) == 1


# ------------------------------------------------------------------ tensors and mistakes
def test_tiers_keep_values(tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3)
    for tier in ("host", "disk"):
        out = to_tier(value, tier, CPU, str(tmp_path))
        assert torch.equal(out, value) and out.data_ptr() != value.data_ptr()
        assert torch.equal(out.add_(1), value + 1)
    assert to_tier(value, "device", CPU) is value
    assert allocate((0, 3), torch.float32, "disk", CPU, str(tmp_path)).shape == (0, 3)


def test_host_buffers_are_used_again() -> None:
    moves = Transfers(CPU)
    first = moves.take(torch.empty(5, 7))
    moves.give(first)
    second = moves.take(torch.empty(7, 5).t())
    assert second.data_ptr() == first.data_ptr() and second.stride() == (1, 5)
    assert not any(moves.free.values())
    moves.give(second)
    for _ in range(KEPT_STEPS + 1):
        assert moves.free
        moves.finish()
    assert not moves.free


@pytest.mark.parametrize(
    "like", [torch.ones(3, 1).expand(3, 4), torch.ones(8, 6)[::2, ::3], torch.empty(0, 3)]
)
def test_host_buffers_have_no_gaps_or_overlaps(like: Tensor) -> None:
    taken = Transfers(CPU).take(like.to("meta"))
    assert taken.shape == like.shape and not taken.is_meta
    assert torch.equal(taken.copy_(like), like)


def step_on_disk(disk_dir: Any) -> Any:
    params = {"w": torch.zeros(8, 4)}
    specs = fs.match_specs(params, [("*", LayoutSpec(optimizer_memory="disk"))])
    fn = lambda p, x: (p["w"] @ x).sum()  # noqa: E731
    step = fs.shard_step(fn, specs, optimizer=fs.optim.adamw(1e-3), backend="eager", disk_dir=disk_dir)
    return step.init(params)


@pytest.mark.parametrize(
    ("folder", "leaves"),
    [
        (None, "no directory"),
        ("gone", ["disk_dir=", "gone"]),
        ("/proc/self", ["disk_dir='/proc/self'", "written"]),  # even by root, who may write anywhere else
    ],
)
def test_a_directory_that_cannot_be_used(folder: Any, leaves: Any, tmp_path: Path) -> None:
    with raises(StateError, leaves=leaves, fix="disk_dir="):
        step_on_disk(folder and str(tmp_path / folder))


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with (
        mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")),
        raises(StateError, leaves=f"disk_dir={str(tmp_path)!r}", fix="memory_analysis()", says="bytes"),
    ):
        step_on_disk(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_unknown_tiers_and_places() -> None:
    with raises(SpecError, leaves="memory='nvme'", says="'device', 'host', 'disk'"):
        LayoutSpec(memory="nvme")
    with raises(SpecError, leaves="update_on='host'", fix=["optimizer_memory='host'", "update_on=None"]):
        LayoutSpec(update_on="host")
    with raises(SpecError, leaves="update_on='gpu'"):
        LayoutSpec(update_on="gpu")


# ------------------------------------------------------------------ what others broke
def one_step(params: Any, fn: Any, specs: Any, mesh: Any, *batch: Any, **options: Any) -> Any:
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-2), backend="eager", **options)
    return step(step.init(params), *batch)[0].params


@pytest.mark.parametrize("policy", [{"optimizer_memory": "host"}, {**TIERS["streamed"]}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_strided_gradients_on_one_rank(policy: Any, accumulate: int) -> None:
    """Kernels may return gradients with gaps, or expanded ones; alone, they are handed on as they are."""
    mesh = fs.make_mesh(shard=1)
    params = {"w": torch.ones(3, 2).double(), "v": torch.ones(3, 2).double(), "b": torch.ones(4).double()}

    def fn(p: Any, x: Any) -> Any:
        pair = torch.stack([p["w"], p["v"]], -1)[..., 0]
        return (x @ pair).sum() + (p["v"] ** 2).sum() + (x.mean() * p["b"]).sum()

    x = torch.arange(12.0).double().view(4, 3)
    here = fs.presets.no_shard(params, mesh)
    there = fs.presets.no_shard(params, mesh, **policy)
    plain = one_step(params, fn, here, mesh, x, accumulate=accumulate)
    got = one_step(params, fn, there, mesh, x, accumulate=accumulate)
    for path, value in plain.items():
        torch.testing.assert_close(got[path], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tier", ["optimizer_host", "streamed"])
def test_a_leaf_without_elements(tier: str) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {"w": torch.ones(3, 2), "e": torch.ones(0, 2)}
    fn = lambda p, x: (x @ p["w"]).sum() + p["e"].sum()  # noqa: E731

    def train(**tiers: str) -> list[Any]:
        specs = fs.presets.full_shard(params, mesh, **tiers)
        return fs.simulate(mesh, lambda _: one_step(params, fn, specs, mesh, torch.ones(4, 3), accumulate=2))

    for got, want in zip(train(**TIERS[tier]), train(), strict=True):
        assert got["e"].numel() == 0
        torch.testing.assert_close(got["w"], want["w"])


def test_state_of_other_specs_or_another_optimizer_is_refused_and_kept() -> None:
    """A master copy that one step keeps and another does not know would go stale in silence."""
    model, mesh = model_of("gpt"), fs.make_mesh(shard=1)
    here = sharded.specs_of(model, "full_shard", mesh)
    there = sharded.specs_of(model, "full_shard", mesh, optimizer_memory="host")
    batch = model.batches(1)[0]
    device, host = (sharded.make_step(mesh, model, s, fs.optim.adamw(1e-2)) for s in (here, there))
    other = sharded.make_step(mesh, model, here, fs.optim.sgd(1e-2))
    for maker, user, message in (
        (host, device, "has slots master, mu, nu; wanted are mu, nu"),
        (device, host, "has slots mu, nu; wanted are master, mu, nu"),
        (device, other, "wanted are"),
    ):
        state = maker.init(model.params)
        with raises(StateError, leaves="optimizer state", fix=["step.init(", "fs.unshard("]) as refused:
            user(state, *batch)
        assert message in str(refused.value)
        maker(state, *batch)  # it was not consumed
