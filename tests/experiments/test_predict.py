"""The predict experiment's arithmetic: errors, order, verdict, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import llama, lower

from experiments.predict.plans import PLANS
from experiments.predict.report import spearman, table, verdict, write, wrong_pairs
from fnshard import Hardware


def found(*times: tuple[float, float]) -> dict[str, Any]:
    plans = [{"plan": f"p{i}", "measured_ms": m, "predicted_ms": p} for i, (m, p) in enumerate(times)]
    return {"ranks": 2, "plans": plans}


def test_at_least_eight_plans_of_different_names() -> None:
    assert len({p.name for p in PLANS}) == len(PLANS) >= 8
    assert len({(p.model, p.preset, p.dtype, p.remat, p.accumulate, p.clip) for p in PLANS}) >= 8


def test_plans_that_are_nearly_as_fast_need_no_order() -> None:
    near = found((100, 120), (109, 110))
    assert wrong_pairs(near["plans"]) == []
    far = found((100, 120), (111, 110))
    assert [(a["plan"], b["plan"]) for a, b in wrong_pairs(far["plans"])] == [("p0", "p1")]
    assert "0 of 1 pairs" in verdict(far) and "wrong: p0 < p1" in verdict(far)


@pytest.mark.parametrize(
    ("times", "wanted"), [([(1, 1), (2, 2), (3, 3)], 1.0), ([(1, 3), (2, 2), (3, 1)], -1.0), ([(1, 9)], 1.0)]
)
def test_rank_correlation(times: list[tuple[float, float]], wanted: float) -> None:
    assert spearman(found(*times)["plans"]) == wanted


def test_the_table_says_how_far_off() -> None:
    text = table(found((100, 70), (200, 210)))
    assert "| p0 | 100 | 70 | -30% |" in text and "| p1 | 200 | 210 | +5% |" in text
    assert "1 of 2 within 25%, worst -30.0%" in text


def test_files_are_written(tmp_path: Path) -> None:
    line = lower(*llama(1), ranks=2).timeline(Hardware.named("cpu"))
    write(found((100, 70), (200, 210)), [line, line], tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").rglob("*.*")}
    assert names == {"predict.json", "predict.png", "p0.png", "p1.png"}
    assert json.loads((tmp_path / "out" / "predict.json").read_text())["ranks"] == 2
