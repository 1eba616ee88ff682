"""Steps, checkpoints and reshards of coded leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coded import coded, decoded, full, loss_fn
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import CheckpointError, StateError

# ------------------------------------------------------------------ the step


@pytest.mark.parametrize(("codec", "world"), [("int8", 2), ("nf4", 1), ("nf4", 5)])
def test_losses_and_gradients_are_those_of_the_decoded_weights(codec: str, world: int) -> None:
    """fp64, to 1e-10, whatever the mesh, 96 rows on 5 ranks included; on the host and on disk too."""
    params, x = full(), torch.randn(world * 2, 96, dtype=torch.float64)
    known = {
        p: decoded(v, codec) if p.endswith("w") else v.clone().requires_grad_() for p, v in params.items()
    }
    loss = loss_fn(known, x)
    loss.backward()
    mesh = fs.make_mesh(shard=world, simulated=True)
    for memory in ("device", "host"):
        specs = coded(params, codec, memory=memory)
        step = fs.shard_step(loss_fn, specs, mesh=mesh, backend="eager", remat="unit")

        def work(rank: int, specs: Any = specs, step: Any = step) -> Any:
            got, grads = step(fs.shard(params, specs, mesh), x[2 * rank : 2 * rank + 2])
            expected = fs.shard({p: v.grad if v.requires_grad else v for p, v in known.items()}, specs, mesh)
            worst = max((grads[p] - expected[p]).abs().max() for p in params if not p.endswith("w"))
            return (
                abs(float(got) - loss.item()),
                float(worst),
                [n for n, g in grads["layers.0.w"].items() if g],
            )

        for off, worst, others in fs.simulate(mesh, work):
            assert off < 1e-10
            assert worst < 1e-10
            assert others == []


def test_codes_travel_and_nothing_decoded_is_kept() -> None:
    """Wire bytes of a gathered nf4 unit are about 0.26 of bf16's; the backward gathers codes again."""
    width = 1024
    params = {f"layers.{i}.w": torch.empty(width, width, device="meta") for i in range(4)}
    params |= {f"layers.{i}.{n}": torch.empty(s, device="meta") for i in range(4) for n, s in
               (("a", (4, width)), ("b", (width, 4)))}  # fmt: skip
    mesh, x = fs.make_mesh(shard=8, abstract=True), torch.empty(2, width, dtype=torch.bfloat16, device="meta")

    def loss(p: Any, x: Tensor) -> Tensor:
        for i in range(4):
            w, a, b = (p[f"layers.{i}.{n}"] for n in "wab")
            x = torch.tanh(F.linear(x, w) + F.linear(F.linear(x, a), b))
        return x.float().square().mean()

    def lowered(codec: str | None) -> Any:
        bf16 = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
        specs = fs.match_specs(
            params, [("*.w", LayoutSpec(P("shard"), codec=codec, trainable=False, **bf16)),
                     ("*", LayoutSpec(**bf16))],
        )  # fmt: skip
        return fs.shard_step(loss, specs, mesh=mesh).lower(params, x)

    plain, codes = lowered(None), lowered("nf4")
    ratio = codes.comm_analysis()["gather"]["bytes"] / plain.comm_analysis()["gather"]["bytes"]
    assert ratio < 0.27
    per_row = 1024 / 2 + 1024 / 64 + 8  # codes, 8-bit scales, a scale and a mean for all of them
    passes = 2 * 4 - 2  # the last unit is still gathered, and the first one's input has no gradient
    assert codes.comm_analysis()["gather"]["bytes"] == pytest.approx(passes * 1024 * per_row, rel=0.01)
    adapters = 4 * 2 * 4 * width * 2
    at_rest = [low.memory_analysis().resident_bytes - adapters for low in (codes, plain)]
    assert at_rest[0] < 0.27 * at_rest[1]
    kernels = {line.kernel for line in codes.schedule.instructions if line.verb == "run"}
    for name in kernels:
        saved = codes.schedule.kernels[name].forward.graph.output_node().args[0]
        sizes = [v.meta["val"].numel() for v in saved]
        assert max(sizes) <= 2 * width  # activations: no weight, decoded or not


def in_both_backends(rank: int) -> tuple[list[float], list[float]]:
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = full(dtype=torch.float32)
    specs = coded(params, "nf4")
    losses = []
    for backend in ("eager", "inductor"):
        step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.01), backend=backend)
        state = step.init(params)
        losses.append([])
        for n in range(3):
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(7 * n + rank))
            state, metrics = step(state, x)
            losses[-1].append(metrics["loss"].item())
    return losses[0], losses[1]


@pytest.mark.long  # simulated ranks and `test_gloo` hold it apart
def test_two_processes_and_inductor(ranks: Any) -> None:
    for eager, compiled in ranks(2).run(in_both_backends, timeout=200.0):
        assert eager == pytest.approx(compiled, rel=1e-5)
        assert eager[0] != eager[1]


# ------------------------------------------------------------------ in and out


def test_a_deferred_module_is_coded_leaf_by_leaf_and_checkpointed(tmp_path: Path) -> None:
    with fs.deferred():
        model = nn.Sequential(nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 5))
    apply, params = fs.make_functional(model)
    rules = [
        ("0.weight", LayoutSpec(P("shard"), codec="nf4", trainable=False)),
        ("*", LayoutSpec(P("shard"))),
    ]
    mesh = fs.make_mesh(shard=1)
    specs = fs.match_specs(params, rules)
    step = fs.shard_step(
        lambda p, x: apply(p, x).square().mean(),
        specs,
        mesh=mesh,
        optimizer=fs.optim.adamw(0.1),
        backend="eager",
    )
    state = step.init(model, seed=3)
    assert state.params["0.weight"].keys() == {"codes", "scales", "scale_scales"}
    assert set(state.opt_state) == {"0.bias", "2.weight", "2.bias"}
    plain = fs.shard_step(lambda p, x: apply(p, x).sum(), fs.presets.no_shard(params, mesh), mesh=mesh)
    weight = plain.init(model, seed=3)["0.weight"]
    assert torch.equal(fs.unshard(state.params, specs, mesh)["0.weight"], decoded(weight, "nf4"))
    state, _ = step(state, torch.ones(2, 80))
    fs.checkpoint.save(tmp_path / "1", state)
    again = fs.checkpoint.restore(tmp_path, step)
    assert all(torch.equal(again.params["0.weight"][n], v) for n, v in state.params["0.weight"].items())
    full = fs.checkpoint.restore(tmp_path, specs, mesh)
    assert step(full, torch.ones(2, 80))[1]["loss"] == step(again, torch.ones(2, 80))[1]["loss"]


def test_weights_of_a_directory_are_coded_as_they_are_read(tmp_path: Path) -> None:
    params = {"w": torch.randn(10, 130), "b": torch.randn(10)}
    plain = fs.match_specs(params, [("*", LayoutSpec())])
    fs.hf.save(params, tmp_path / "model", plain, fs.make_mesh(shard=1))
    specs = fs.match_specs(
        params, [("w", LayoutSpec(P("shard"), codec="int8", trainable=False)), ("*", LayoutSpec())]
    )
    mesh = fs.make_mesh(shard=4, simulated=True)

    def work(rank: int) -> Any:
        blocks, cut = fs.hf.load(tmp_path / "model", specs, mesh), fs.shard(params, specs, mesh)
        fs.hf.save(blocks, tmp_path / "again", specs, mesh)
        return all(torch.equal(blocks["w"][n], cut["w"][n]) for n in cut["w"])

    assert fs.simulate(mesh, work) == [True] * 4
    again = fs.hf.load(tmp_path / "again", plain, fs.make_mesh(shard=1))
    assert torch.equal(again["w"], decoded(params["w"], "int8"))
    assert torch.equal(again["b"], params["b"])


# ------------------------------------------------------------------ coded otherwise than before


def three_ways() -> tuple[dict[str, Tensor], dict[str | None, Any]]:
    params = {"w": torch.randn(10, 130, generator=torch.Generator().manual_seed(0)), "b": torch.ones(10)}
    return params, {
        codec: fs.match_specs(
            params,
            [("w", LayoutSpec(P("shard"), codec=codec, trainable=False)), ("*", LayoutSpec(P("shard")))],
        )
        for codec in (None, "int8", "nf4")
    }


@pytest.mark.parametrize("before", [None, "int8", "nf4"])
@pytest.mark.parametrize("after", [None, "int8", "nf4"])
def test_a_state_is_resharded_into_codes_and_out_of_them(before: str | None, after: str | None) -> None:
    params, specs = three_ways()
    mesh = fs.make_mesh(shard=4, simulated=True)
    target = fs.match_specs(
        params,
        [("w", LayoutSpec(P("shard"), codec=after, trainable=False, memory="host")), ("*", LayoutSpec())],
    )
    step = fs.shard_step(
        lambda p, x: (F.linear(x, p["w"]) * p["b"]).sum(), target, mesh=mesh, backend="eager"
    )
    seen = params["w"] if before is None else decoded(params["w"], before)

    def work(rank: int) -> Any:
        blocks = fs.shard(params, specs[before], mesh)
        tree = fs.reshard(blocks, specs[before], target, mesh)
        state = fs.TrainState(torch.tensor(3), blocks, {}, {}, torch.tensor(0))
        moved = fs.reshard(state, specs[before], target, mesh)
        assert int(moved.step) == 3 and moved.where[0] is target
        named = [fs.tree.flatten_with_paths(t)[0] for t in (tree, moved.params)]
        assert all(torch.equal(named[0][p], v) for p, v in named[1].items())
        step(tree, torch.ones(1, 130))  # its blocks are as the specs say
        return fs.unshard(tree, target, mesh)

    for whole in fs.simulate(mesh, work):
        known = seen if after in (None, before) else decoded(seen, after)
        assert torch.equal(whole["w"], known)
        assert torch.equal(whole["b"], params["b"])


def test_a_rank_that_cannot_code_its_block_fails_on_all() -> None:
    params, specs = three_ways()
    params["w"][9, 0] = math.nan
    mesh = fs.make_mesh(shard=2, simulated=True)

    def work(rank: int) -> None:
        blocks = fs.shard(params, specs[None], mesh)
        kind, says = (StateError, r"'w'\] \[10, 130\] with codec='nf4': 1 of 650") if rank else (
            CheckpointError, r"(?s)coding leaves failed.*rank 1: StateError")  # fmt: skip
        with pytest.raises(kind, match=says):
            fs.reshard(blocks, specs[None], specs["nf4"], mesh)

    fs.simulate(mesh, work)


def test_a_checkpoint_that_is_coded_otherwise_says_so_and_the_way_out_works(tmp_path: Path) -> None:
    params, specs = three_ways()
    mesh = fs.make_mesh(shard=1)
    for name, codec in (("plain", None), ("coded", "nf4")):
        state = fs.TrainState(torch.tensor(1), fs.shard(params, specs[codec], mesh), {}, {}, torch.tensor(0))
        fs.checkpoint.save(tmp_path / name, state, specs=specs[codec], mesh=mesh)
    for name, expected, says in (
        (
            "plain",
            "nf4",
            r"(?s)has 1 leaf coded otherwise.*'w'\]: codec='nf4' here, None there.*codec=None read it",
        ),
        (
            "coded",
            None,
            r"(?s)codec=None here, 'nf4' there.*specs with codec='nf4' read it.*fs\.reshard\(state",
        ),
        ("coded", "int8", r"codec='int8' here, 'nf4' there"),
    ):
        for restore in (fs.checkpoint.restore, fs.checkpoint.restore_params):
            with pytest.raises(CheckpointError, match=says):
                restore(tmp_path / name, specs[expected], mesh)
    blocks = fs.checkpoint.restore_params(tmp_path / "plain", specs[None], mesh)
    there = fs.checkpoint.restore_params(tmp_path / "coded", specs["nf4"], mesh)
    again = fs.reshard(blocks, specs[None], specs["nf4"], mesh)
    assert all(torch.equal(again["w"][n], v) for n, v in there["w"].items())
    with pytest.raises(CheckpointError, match=r"only=5: a glob of paths, or a list of them"):
        fs.checkpoint.restore_params(tmp_path / "plain", specs[None], mesh, only=5)
