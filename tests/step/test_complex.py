"""Complex leaves are refused by path, and pairs of real numbers train in their place."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import sharded
import torch
from models import generator
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, SpecError

WIDTH = 6
REAL = {"gain": torch.ones(WIDTH, dtype=torch.float64)}
FILTERS = {"mix": (WIDTH, WIDTH), "filter": (WIDTH,), "phase": ()}
FIX = r"Fix: leaves are real numbers: keep torch.view_as_real\(w\) .* call torch.view_as_complex in `fn`"


def filters() -> dict[str, Tensor]:
    return {p: torch.randn(s, generator=generator(0), dtype=torch.complex128) for p, s in FILTERS.items()}


def loss(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Of complex filters."""
    z = (torch.fft.fft(x) * p["filter"] + p["phase"]) @ p["mix"]
    return (torch.fft.ifft(z).real * p["gain"]).tanh().square().mean()


def loss_of_pairs(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return loss({"gain": p["gain"], **{n: torch.view_as_complex(p[n]) for n in FILTERS}}, x)


@pytest.mark.parametrize("preset", [None, "full_shard"])
def test_complex_leaves_are_refused_by_path(preset: str | None) -> None:
    params = {**REAL, **filters(), "table": nn.Buffer(torch.ones(3, dtype=torch.complex64))}
    mesh = fs.make_mesh(shard=2, abstract=True)
    rules = [("mix", LayoutSpec(trainable=False)), ("*", LayoutSpec())]
    specs = fs.presets.PRESETS[preset](params, mesh) if preset else fs.match_specs(params, rules)
    by_hand = dict.fromkeys(params, LayoutSpec())
    message = r"(?s)4 leaves cannot .*'mix'\] \[6, 6\] with storage_dtype=torch.complex128.*'phase'.*'table'"
    for make in (
        lambda: fs.shard(params, specs, mesh),
        lambda: fs.shard_step(loss, specs, mesh=mesh),
        lambda: fs.shard_step(loss, by_hand, mesh=mesh).lower(params, torch.ones(2, WIDTH)),
    ):
        with pytest.raises(SpecError, match=f"{message}.*{FIX}"):
            make()


@pytest.mark.parametrize("preset", ["full_shard", "no_shard"])
def test_pairs_train_as_torch_trains_complex_leaves(preset: str) -> None:
    batches = [torch.randn(4, WIDTH, generator=generator(n), dtype=torch.float64) for n in range(1, 4)]
    plain = {p: v.clone().requires_grad_() for p, v in {**REAL, **filters()}.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=0.01, weight_decay=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()

    params = {**REAL, **{p: torch.view_as_real(v) for p, v in filters().items()}}
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.PRESETS[preset](params, mesh)
    step = fs.shard_step(
        loss_of_pairs, specs, mesh=mesh, optimizer=fs.optim.adamw(0.01, weight_decay=0.1), backend="eager"
    )

    def run(rank: int) -> dict[str, Tensor]:
        state = step.init(params)
        for batch in batches:
            state, _ = step(state, *sharded.part((batch,), rank, 2))
        return fs.unshard(state.params, specs, mesh)

    for got in fs.simulate(mesh, run):
        for path, value in got.items():
            expected = plain[path].detach()
            as_pairs = torch.view_as_real(expected) if expected.is_complex() else expected
            torch.testing.assert_close(value, as_pairs, rtol=0, atol=1e-10)
