"""Narrow dtypes in a step: masters, overflows, loss scales, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
import torch
from models import GPT, language_model, noise, seeded
from sharded import by_steps, simulated
from torch import Tensor
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec, Mean, optim, schedules

# ------------------------------------------------------------------ dtypes


@pytest.mark.long
def test_bf16_compute_with_fp32_masters_follows_the_reference() -> None:
    """Rates so small that bf16 storage alone would stand still: the master moves."""
    module = seeded(GPT).float()
    model = language_model(module)
    policy = {
        "storage_dtype": torch.bfloat16,
        "compute_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "optimizer_dtype": torch.float32,
    }
    start = {p: v.detach() for p, v in model.params.items()}
    expected = reference.train(
        model.loss, start, by_steps(model), reference.adamw(1e-4, 0.0), frozen=model.frozen
    )
    mesh = simulated()
    specs = sharded.specs_of(model, "full_shard", mesh, **policy)
    step = sharded.make_step(mesh, model, specs, optim.adamw(1e-4, weight_decay=0.0))

    def run(rank: int) -> Any:
        state, losses = step.init(model.params), []
        for batch in model.batches(sharded.STEPS):
            state, metrics = step(state, *sharded.part(batch, rank, 2))
            losses.append(metrics["loss"].item())
        masters = {p: kept["master"] for p, kept in state.opt_state.items()}
        full = fs.unshard(masters, specs, mesh, layout="optimizer")
        return losses, full, fs.unshard(state.params, specs, mesh)

    for losses, masters, stored in fs.simulate(mesh, run):
        masters = {p: master for p, master in masters.items() if master is not None}
        sharded.assert_floats(losses, expected.losses, atol=0.02)
        moved = same_way = 0
        for path, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(stored[path], master.bfloat16()), path
            step_taken, exact = master - start[path], expected.params[path] - start[path]
            moved += step_taken.numel()
            same_way += (torch.sign(step_taken) == torch.sign(exact)).sum().item()
        assert same_way / moved > 0.95, "masters do not follow the fp32 reference"


HOST = {"memory": "host", "optimizer_memory": "host"}
STREAMED = {**HOST, "update_on": "device"}
RATE = schedules.linear(0.1, warmup=2, total=20)


def train_by_torch(params: dict[str, Tensor], loss: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """Train by torch's GradScaler and AdamW; the rate's schedule goes by updates made."""
    named = {p: v.clone().requires_grad_() for p, v in params.items()}
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    updates = 0
    for batch in batches:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = RATE(torch.tensor(updates)).item()
        scaler.scale(loss(named, batch)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= before
    return {p: v.detach() for p, v in named.items()}


@pytest.mark.suite({
    "device-None": "updated where gradients are",
    "streamed-1000000000.0": "moved there, with a norm",
    "host-None": "updated on the host",
})  # fmt: skip
@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("policy", [{}, HOST, STREAMED], ids=["device", "host", "streamed"])
def test_a_skipped_step_is_no_update(tmp_path: Any, policy: dict[str, str], clip: float | None) -> None:
    """Three overflows come before the first update and one later; on one of two ranks, and on one that
    resumes."""
    params = {p: v.float() for p, v in noise({"layers.0.w": (4, 6), "layers.1.w": (6, 2)}).items()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["layers.0.w"]) @ params["layers.1.w"]).mean() * x[0, 0]

    draw = torch.Generator().manual_seed(0)
    batches = [torch.rand(4, 4, generator=draw) for _ in range(9)]
    for number in (0, 1, 2, 5):
        batches[number][0, 0] = torch.inf
    adamw = optim.adamw(RATE)
    made = adamw if clip is None else optim.chain(optim.clip_by_global_norm(clip), adamw)

    def run(rank: int, mesh: fs.Mesh) -> Any:
        specs = fs.presets.full_shard(params, mesh, **policy)
        step = fs.shard_step(
            loss,
            specs,
            mesh=mesh,
            optimizer=made,
            backend="eager",
            loss_scale="dynamic",
            accumulate=2 // mesh.size,
        )
        state, rates = step.init(params), []
        for number, batch in enumerate(batches):
            if number == 2 and mesh.size == 1:
                fs.checkpoint.save(tmp_path / "2", state)
                state = fs.checkpoint.restore(tmp_path / "2", step)
            state, metrics = step(state, batch.chunk(mesh.size)[rank])
            rates.append(metrics["lr"].item())
        assert int(state.step) == 9 and int(metrics["skipped_steps"]) == 4
        return rates, fs.unshard(state.params, specs, mesh)

    full = lambda params, x: torch.stack([loss(params, part) for part in x.chunk(2)]).mean()  # noqa: E731
    expected, mesh = train_by_torch(params, full, batches), simulated()
    for rates, got in [*fs.simulate(mesh, run, mesh), run(0, fs.make_mesh(shard=1, device="cpu"))]:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert rates == [RATE(torch.tensor(n)).item() for n in (0, 0, 0, 0, 1, 2, 2, 3, 4)]


LOSSES = {"plain": lambda total: total, "mean": lambda total: Mean(total, torch.tensor(7.0), bound=1000)}


@pytest.mark.suite({
    "torch.bfloat16-plain-None-None": "gradients",
    "torch.bfloat16-plain-1000.0-clipped": "a scale, and norms",
    "torch.float16-mean-None-clipped": "an exact mean",
    "torch.float16-mean-1000.0-sgd": "a mean, and a scale",
})  # fmt: skip
@pytest.mark.parametrize("optimizer", [None, "sgd", "clipped"])
@pytest.mark.parametrize("loss_scale", [None, 1000.0])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "plain"), (torch.float16, "mean")], ids=str)
def test_a_loss_in_a_half_type_rounds_no_gradient(
    dtype: torch.dtype, kind: str, loss_scale: float | None, optimizer: str | None
) -> None:
    """The mean over 3 micro-batches scales by 1/3, which bf16 does not have.

    So the backward starts from a power of two, and the rest of the factor is applied to reduced gradients.
    """
    params = {"layers.0.w": torch.full((4, 3), 0.5), "layers.1.w": torch.ones(3)}
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))

    def total(params: Any, x: Tensor) -> Any:
        return (x @ params["layers.0.w"] * params["layers.1.w"]).sum().to(dtype)

    def loss(params: Any, x: Tensor) -> Any:
        return LOSSES[kind](total(params, x))

    parts = 3 if kind == "plain" else 3 * 7
    expected = {p: g / parts for p, g in reference.gradients(total, params, x)[0].items()}
    chosen = {"sgd": optim.sgd(1.0), "clipped": optim.chain(optim.clip_by_global_norm(1e9), optim.sgd(1.0))}
    step = step_of(
        loss, params, optimizer=chosen.get(optimizer), accumulate=3, loss_scale=loss_scale, grad_norm=True
    )
    if optimizer is None:
        _, got = step(params, x)
    else:
        state, metrics = step(step.init(params), x)
        got = {p: params[p] - v for p, v in state.params.items()}
        norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
        torch.testing.assert_close(metrics["grad_norm"].float(), norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-7)


def test_a_loss_in_fp16_starts_from_a_large_number() -> None:
    """Gradients of 2**-26, which fp16 cannot hold, arrive; the first scale, 2**16, is no overflow itself."""
    params = {"layers.0.w": torch.ones(4)}
    specs = fs.match_specs(
        params, [("*", LayoutSpec(compute_dtype=torch.float16, reduce_dtype=torch.float32))]
    )

    def loss(params: Any, x: Tensor) -> Tensor:
        return ((params["layers.0.w"] * x.half()) * 2.0**-13 * 2.0**-13).sum()

    step = fs.shard_step(loss, specs, optimizer=optim.sgd(2.0**20), backend="eager")
    state, metrics = step(step.init(params), torch.ones(4))
    assert int(metrics["skipped_steps"]) == 0
    assert torch.equal(state.params["layers.0.w"], torch.full((4,), 1 - 2.0**-6))
