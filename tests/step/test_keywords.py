"""Batches with keywords: part of the batch in any order, named in errors, taken by every entry."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from errors import raises
from torch import Tensor
from toys import traces

import fnshard as fs
from fnshard import LayoutSpec, StateError, TraceError

X = torch.linspace(1, 2, 4, dtype=torch.float64)


def params() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}


def make(fn: Any, tree: Any = None, **options: Any) -> Any:
    specs = fs.match_specs(params() if tree is None else tree, [("*", LayoutSpec())])
    return fs.shard_step(fn, specs, backend="eager", **options)


# ------------------------------------------------------------------ batches with keywords


def masked(p: Any, x: Tensor, *, m: Any = 1.0, scale: Any = 1.0) -> Tensor:
    return (p["w"] * x * m).square().sum() * scale


def test_keywords_are_part_of_the_batch_in_any_order() -> None:
    step = make(masked)
    m, scale = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor(3.0)
    expected = torch.func.grad_and_value(masked)(params(), X, m=m, scale=scale)[::-1]
    with traces(step, 1):
        for _ in range(2):
            torch.testing.assert_close(step(params(), X, m=m, scale=scale), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(step(params(), X, scale=scale, m=m), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(step(params(), x=X, scale=scale, m=m), expected, atol=1e-12, rtol=0)
    with pytest.warns(UserWarning, match=r"batch\['m'\] from \[4\].*to 2"):
        torch.testing.assert_close(step(params(), x=X, m=2)[0], masked(params(), X, m=2), atol=1e-12, rtol=0)


def test_fn_sees_keywords_as_python_passes_them() -> None:
    seen: list[Any] = []

    def fn(p: Any, x: Tensor, m: Any = 1.0, *more: Any, **rest: Any) -> Tensor:
        seen.append((more, list(rest)))
        return (p["w"] * x).sum() * m

    step = make(fn)
    with traces(step, 1):
        for loss in (step(params(), X, 2)[0], step(params(), m=2, x=X)[0]):
            torch.testing.assert_close(loss, (params()["w"] * X).sum() * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(params(), X, b=X, a=X)
    assert seen == [((), []), ((), ["b", "a"])]
    by_name = make(lambda p, **rest: (p["w"] * rest["0"]).sum())(params(), **{"0": X})
    torch.testing.assert_close(by_name[0], (params()["w"] * X).sum())


def test_keywords_are_taken_by_check_nan_hunt_and_fit() -> None:
    rows, specs = torch.stack([X, X + 1]), fs.match_specs(params(), [("*", LayoutSpec(fs.P("shard")))])
    fn = lambda p, x, *, m, flag: (p["w"] * x * m).square().mean() * flag  # noqa: E731
    named = {"keywords": {"flag": 2, "m": rows}}
    assert fs.debug.check(fn, params(), rows, specs, **named)
    found = fs.debug.nan_hunt(make(fn), params(), rows, keywords={"m": rows * float("inf"), "flag": 1})
    assert found.first.kind in ("inf", "nan")
    plan = fs.fit(fn, params(), fs.make_mesh(shard=2, abstract=True), batch=(rows,), **named)
    assert plan.options["remat"] == "none"


def test_keywords_are_lowered_cut_and_taken_by_a_forward() -> None:
    rows = torch.stack([X, X + 1, X - 1, X * 2])
    step = make(lambda p, x, *, m: masked(p, x, m=m) / x.shape[0], accumulate=2, optimizer=fs.optim.sgd(0.1))
    on_paper = step.lower(params(), m=rows, x=rows)
    assert on_paper.batch_bytes == {"0": 128, "m": 128}
    assert step.lower(params(), x=rows, m=rows) is on_paper
    _, metrics = step(step.init(params()), x=rows, m=rows)
    expected = masked(params(), rows, m=rows) / 4
    torch.testing.assert_close(metrics["loss"].double(), expected, atol=1e-6, rtol=0)
    forward = fs.shard_forward(masked, fs.match_specs(params(), [("*", LayoutSpec())]), backend="eager")
    torch.testing.assert_close(forward(params(), X, m=2), masked(params(), X, m=2), atol=1e-12, rtol=0)
    assert forward.lower(params(), X, m=2).program.outputs.loss is None


def test_rng_is_a_keyword_as_others_are_where_a_state_draws() -> None:
    fn = lambda p, x, rng=1.0: (p["w"] * x * rng).sum()  # noqa: E731
    step = make(fn, optimizer=fs.optim.sgd(0.0))
    _, metrics = step(step.init(params()), X, rng=torch.tensor(3.0, dtype=X.dtype))
    torch.testing.assert_close(metrics["loss"], fn(params(), X, 3.0))
    with raises(StateError, leaves="rng", fix="rng=(seed, step)", says="Tensor"):
        make(fn)(params(), X, rng=torch.tensor(3.0))


def test_errors_name_the_keyword() -> None:
    step = make(masked)
    with raises(StateError, leaves=["'n'", "n="], says=["1 batch arguments", "mask="]):
        step(params(), X, n=1)
    with raises(StateError, leaves="batch['m']", says="ndarray"):
        step(params(), X, m=np.ones(4))
    with raises(StateError, leaves="batch['m'] [3]"):
        make(masked, accumulate=2)(params(), X, m=torch.ones(3))
    with raises(TraceError, leaves="batch['m'] f32[3]"):
        step(params(), X, m=torch.ones(3))
