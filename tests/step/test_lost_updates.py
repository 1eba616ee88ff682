"""A warning where an optimizer's digits are too few for its rate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fnshard as fs
from fnshard import optim, schedules

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PARAMS = {"w": torch.ones(4, 4), "norm.w": torch.ones(4), "frozen": torch.ones(4)}


def said(optimizer: Any, stored: torch.dtype = BF16, ranks: int = 2, **policy: Any) -> list[str]:
    """Return the warnings of making a step and lowering it."""
    params = {path: leaf.to(stored) for path, leaf in PARAMS.items()}
    params["frozen"] = torch.nn.Parameter(params["frozen"], requires_grad=False)
    mesh = fs.make_mesh(shard=ranks, abstract=True)
    specs = fs.presets.full_shard(params, mesh, **policy)
    loss = lambda p, x: sum((v * x).sum() for v in p.values())  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
        step.lower(params, torch.ones((), dtype=stored))
    return [str(w.message) for w in caught if "optimizer_dtype" in str(w.message)]


SMALL = {
    "adamw": optim.adamw(1e-5),
    "adamw without a decay": optim.adamw(1e-4, weight_decay=0.0),
    "a schedule": optim.adamw(schedules.warmup_cosine(2e-5, warmup=100, total=1000)),
    "held": optim.adamw(schedules.wsd(2e-5, 10, 100, 10)),
    "straight": optim.lion(schedules.linear(1e-5, 0, 100)),
    "lion": optim.lion(1e-5),
    "8bit": optim.adamw_8bit(1e-5),
    "schedule_free": optim.schedule_free_adamw(1e-5),
    "a chain": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-5), optim.ema(0.9)),
    "scaled": optim.adamw(1e-3, lr_scale=0.01),
    "a function": optim.adamw(lambda step: 1e-5),
    "whole matrices": optim.muon(1e-5),
}


@pytest.mark.suite(but={
    "lion": "scaled",
    "held": "a schedule",
    "adamw without a decay": "adamw",
    "straight": "adamw",
})  # fmt: skip
@pytest.mark.parametrize("name", SMALL)
def test_small_rates_with_few_digits_are_said_once(name: str) -> None:
    (message,) = said(SMALL[name])
    assert "params['w']" in message and "params['norm.w']" in message and "frozen" not in message
    assert "optimizer_dtype=torch.float32" in message
    assert len(said(SMALL[name], FP32, optimizer_dtype=BF16)) == 1  # a master of few digits


SILENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "a master": (optim.adamw(1e-5), {"optimizer_dtype": FP32}),
    "fp32": (optim.adamw(1e-5), {"stored": FP32, "compute_dtype": BF16}),
    "a large rate": (optim.adamw(1e-2), {}),
    "fp16": (optim.adamw(1e-4), {"stored": FP16}),
    "no rate at all": (optim.adamw(0.0), {}),
    "gradients decide": (optim.sgd(1e-5), {}),
    "clipped gradients decide": (optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1e-5, 0.9)), {}),
    "a table that ends": (optim.adamw(lambda step: torch.full((3,), 1e-5)[step]), {}),
    "parameters decide": (optim.adafactor(1e-2), {}),
    "trust ratios": (optim.lars(10.0), {}),
    "a chain with one's own": (
        optim.chain(
            optim.Optimizer(
                "own()", lambda *_: {}, lambda path, grad, *_: (grad.view(2, -1).view_as(grad), {})
            ),
            optim.adamw(1e-5),
        ),
        {"ranks": 1},
    ),
    "one's own": (
        optim.Optimizer("own()", lambda *_: {}, lambda path, grad, *_: (-1e-5 * grad.sign(), {})),
        {},
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_where_it_is_not_known_or_not_so(name: str) -> None:
    optimizer, policy = SILENT[name]
    assert said(optimizer, **policy) == []


def test_rules_of_optimizers_and_of_leaves_are_told_apart() -> None:
    by_path = optim.by_path(("norm*", optim.adamw(1e-5)), ("*", optim.adamw(1e-2)))
    (message,) = said(by_path)
    assert "params['norm.w']" in message and "params['w']" not in message
    (message,) = said(optim.adamw(1e-2, lr_scale=[("norm*", 1e-3), ("*", 1.0)]))
    assert "params['norm.w']" in message and "params['w']" not in message


def test_what_it_says_is_true() -> None:
    """A weight of 1 stays, with a master of fp32 it moves."""

    def moved(**policy: Any) -> Tensor:
        mesh, params = fs.make_mesh(shard=1, device="cpu"), {"w": torch.ones(4, dtype=BF16)}
        specs = fs.presets.full_shard(params, mesh, **policy)
        step = fs.shard_step(
            lambda p, x: (p["w"] * x).sum(), specs, mesh=mesh, optimizer=optim.adamw(1e-4), backend="eager"
        )
        state = step.init(params)
        for _ in range(60):
            state, _ = step(state, torch.ones(4, dtype=BF16))
        return state.params["w"]

    with pytest.warns(UserWarning, match="optimizer_dtype"):
        assert torch.equal(moved(), torch.ones(4, dtype=BF16))
    assert (moved(optimizer_dtype=FP32) < 1).all()


def test_nothing_is_said_of_leaves_that_stay() -> None:
    params = {"w": torch.ones(4, 4, dtype=torch.bfloat16)}
    spec = fs.LayoutSpec(storage_dtype=torch.bfloat16, optimizer_dtype=torch.bfloat16)
    specs = fs.match_specs(params, [("*", spec)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = fs.shard_step(lambda p: p["w"].sum(), specs, optimizer=optim.adamw(1e-3, lr_scale=0.0))
        step.resolve(params)
