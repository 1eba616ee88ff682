"""Dropout in attention over long rows: the same numbers as spelled out, and nothing that is [T, S]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from fnshard.compiler.frontend import random as draws

T, D = 12, 4


FORMS = {
    "causal": {"is_causal": True}, "mask": {"attn_mask": True}, "all": {}, "grouped": {"enable_gqa": True},
}  # fmt: skip


def dropped(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any = None, **form: Any) -> Tensor:
    """Call the op as programs have it."""
    form = {"is_causal": False, "enable_gqa": False} | form
    key = torch.tensor(7)
    return torch.ops.fnshard.attention(
        q, k, v, attn_mask, key, 0.3, form["is_causal"], None, form["enable_gqa"], None
    )


@pytest.mark.parametrize("kind", FORMS)
def test_by_blocks_it_is_what_it_is_spelled_out(monkeypatch: Any, kind: str) -> None:
    random, form = torch.Generator().manual_seed(0), dict(FORMS[kind])
    q, k, v = torch.randn(3, 2, 4, T, D, generator=random, dtype=torch.float64)
    k, v = (k[:, :2], v[:, :2]) if kind == "grouped" else (k, v)
    if kind == "mask":
        form["attn_mask"] = torch.rand(T, T, generator=random) < 0.7
        form["attn_mask"][3] = False  # a query that sees nothing
    found = []
    for long in (T * T + 1, T * T):
        monkeypatch.setattr(draws, "LONG", long)
        monkeypatch.setattr(draws, "BLOCK_BYTES", 5 * 8 * 8 * T)  # five queries at once
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = dropped(*leaves, **form)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert ("dropout_attention" in type(out.grad_fn).__name__) == (long == T * T)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_half_types_are_summed_in_fp32(monkeypatch: Any) -> None:
    """Next to fp32: no further off than spelled out."""
    random, apart = torch.Generator().manual_seed(0), []
    exact = 3 * torch.randn(3, 1, 2, 64, 16, generator=random)
    for dtype, long in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 1 << 20)):
        monkeypatch.setattr(draws, "LONG", long)
        leaves = [t.to(dtype).requires_grad_() for t in exact]
        key = torch.tensor(7)
        out = torch.ops.fnshard.attention(*leaves, None, key, 0.0, True, None, False, None)  # no draw
        apart.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    reference, ours, spelled = apart
    for a, b, c in zip(reference, ours, spelled, strict=True):
        assert (b.float() - a).norm() < 1.2 * (c.float() - a).norm() + 1e-6


def test_the_mask_is_the_same_over_any_split_and_in_the_backward(monkeypatch: Any) -> None:
    monkeypatch.setattr(draws, "LONG", 1)
    monkeypatch.setattr(draws, "BLOCK_BYTES", 5 * 8 * 8 * T)
    random = torch.Generator().manual_seed(0)
    params = {n: torch.randn(2 * D, 2 * D, generator=random, dtype=torch.float64) for n in ("q", "k", "v")}
    x = torch.randn(4, T, 2 * D, generator=random, dtype=torch.float64)

    def loss(p: Any, x: Tensor) -> Tensor:
        q, k, v = ((x @ p[n]).unflatten(-1, (2, D)).transpose(1, 2) for n in ("q", "k", "v"))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().mean()

    def trained(axes: dict[str, int], **options: Any) -> list[list[Tensor]]:
        mesh = fs.make_mesh(shard=1, **axes, simulated=True)
        specs = fs.presets.full_shard(params, mesh, tensor="tensor" if "tensor" in axes else None)
        step = fs.shard_step(loss, specs, mesh=mesh, backend="eager", **options)

        def work(rank: int) -> list[Tensor]:
            value, grads = step(fs.shard(params, specs, mesh), x, rng=(3, 5))
            return [value, *fs.unshard(grads, specs, mesh, layout="gradient").values()]

        return fs.simulate(mesh, work)

    ((value, *grads),) = trained({})
    for other in (*trained({"context": 2}), *trained({"tensor": 2}), *trained({}, remat="unit")):
        for a, b in zip(other, (value, *grads), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    params["q"] = params["q"] + 1e-6  # the slope is of the same mask
    ((after, *_),) = trained({})
    assert float(after - value) == pytest.approx(1e-6 * float(grads[0].sum()), rel=1e-3)


@pytest.mark.long
def test_its_memory_is_linear_in_the_length() -> None:
    def peak(length: int) -> int:
        x = torch.empty(1, 2, length, 64, device="meta")
        mesh = fs.make_mesh(shard=1, abstract=True)
        params = {"w": torch.empty(64, 64, device="meta")}

        def loss(p: Any, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x @ p["w"], x, x, is_causal=True, dropout_p=0.1).sum()

        step = fs.shard_step(loss, fs.presets.full_shard(params, mesh), mesh=mesh)
        return step.lower(params, x).memory_analysis().peak_bytes

    short, long = peak(4096), peak(8192)
    scores = 2 * 8192 * 8192 * 4
    assert long < 0.6 * scores and long - short < scores / 8
