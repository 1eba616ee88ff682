"""`experiments.explain`: what it says adds up, for every strategy; what it leaves."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pytest
from errors import raises
from runs import compose, validate

from experiments.explain import report
from experiments.explain.__main__ import write_explanation
from experiments.explain.config import COMMAND, ExplainConfig
from experiments.explain.step_on_paper import StepOnPaper, explain
from experiments.explain.time_report import _put_on_paper
from experiments.lib.checks import ConfigError
from fnshard.analysis.hardware import mfu
from fnshard.errors import BudgetError


def config_of(*overrides: str) -> ExplainConfig:
    return compose(*overrides, spec=COMMAND)


@pytest.fixture(scope="module")
def paper() -> StepOnPaper:
    return explain(config_of("mesh.shard=64", "data.rows=128", "hardware.price_per_hour=3", "tokens=1e9"))


# ------------------------------------------------------------------ numbers


def test_numbers_add_up(paper: StepOnPaper) -> None:
    model = paper.config.model
    assert paper.config.rows == 2 and paper.tokens_per_step == 128 * model.context
    assert sum(math.prod(s.shape) for s in paper.lowered.schedule.specs.values()) == model.parameters
    per_token = paper.timeline.model_flops / (2 * model.context)
    # The formula halves causal attention, as the kernels that are counted do.
    assert per_token == pytest.approx(model.flops_per_token(), rel=1e-9)
    bf16 = paper.hardware.peak_flops["bf16"]
    assert paper.timeline.mfu == mfu(paper.timeline.model_flops, paper.timeline.step_seconds, bf16)
    assert paper.tokens_per_day == pytest.approx(86_400 * paper.timeline.tokens_per_second)
    hours = 64 * 1e9 / paper.timeline.tokens_per_second / 3600
    assert paper.device_hours == pytest.approx(hours) and paper.cost == pytest.approx(3 * hours)


def test_everything_asked_for_is_said(paper: StepOnPaper) -> None:
    text = report.as_text(paper)
    for expected in (
        f"{paper.config.model.parameters:,}", "64 × h100, 8 nodes of 8", "full_shard, no remat", "fits",
        "MFU", "tokens a day", "at $3 an hour", "saved activations", "reduce scatter",
        "layers.*.attn.wq.weight", "gathers 1 and 1 kernels ahead",
    ):  # fmt: skip
        assert expected in text, expected
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.suite({
    "strategy_hybrid_shard-*": "two axes",
})  # fmt: skip
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["strategy=hybrid_shard", "mesh.shard=4"], "(replicate=2, shard=4)"),
        (["strategy=no_shard"], "all reduce"),
        (["strategy=zero2"], "gradient and optimizer P('shard')"),
        (["strategy=offload"], "on the host"),
        (["strategy=full_shard_remat", "run.accumulate=2"], "remat='unit'"),
        (["mesh.tensor=2", "mesh.context=2", "model.kv_heads=2"], "32 × h100, 4 nodes of 8"),
        (["mesh.shard=1", "strategy=no_shard"], "1 × h100, 1 node of 1"),
        (["hardware=cpu", "precision=fp32", "hardware.price_per_hour=null"], "8 × cpu, 4 nodes of 2"),
    ],
    ids=lambda value: value[0].replace("=", "_") if isinstance(value, list) else None,
)
def test_every_kind_of_plan_is_explained(overrides: list[str], expected: str) -> None:
    text = report.as_text(explain(config_of(*overrides)))
    assert expected in text
    assert ("$" in text) == ("an hour" in text)
    assert ("an hour" in text) == ("hardware.price_per_hour=null" not in overrides)


@pytest.mark.long  # two searches
def test_what_does_not_fit_is_reported_and_what_would_is_found() -> None:
    little = ["mesh.shard=2", "data.rows=4", "run.device_gb=0.013"]
    bare = explain(config_of(*little))
    assert (
        not bare.fits
        and "does not fit" in report.as_text(bare)
        and "strategy=auto looks for" in report.as_text(bare)
    )
    found = explain(config_of(*little, "strategy=auto"))
    assert (
        found.fits and "strategy=auto:" in report.as_text(found) and "does not" not in report.as_text(found)
    )
    with raises(BudgetError, says="nothing fits"):
        explain(config_of("mesh.shard=2", "run.device_gb=0.0001", "strategy=auto"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hardware=auto"], "hardware=auto: a job looks what it runs on"),
        (["mesh.shard=null"], "mesh.shard=null: say how many"),
        (["data.rows=9"], "data.rows=9 does not divide over 8 ranks. Fix: data.rows=16"),
        (["mesh.context=3"], "mesh.context=3: has to divide model.context=256"),
        (["run.accumulate=2", "strategy=auto"], "strategy=auto chooses the micro-batches"),
        (["specs=[['*',shard]]", "strategy=auto"], "specs: strategy=auto chooses them by itself"),
        (
            ["model._target_=custom_task.linear", "model.vocab=8"],
            "model.context=None: a model of one's own",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_mistakes_are_reported(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(COMMAND, overrides)
    assert expected in str(caught.value) and len(str(caught.value).splitlines()) == 1


OWN = ("model._target_=custom_task.linear", "model.width=64", "data._target_=custom_task.points",
       "data.count=8", "objective._target_=custom_task.squares", "precision=fp32",
       "mesh.shard=2")  # fmt: skip


@pytest.mark.parametrize("more", [(), ("optimizer=soap",), ("specs=[[w,shard],[b,null]]",)], ids=str)
def test_a_model_of_ones_own_is_explained_as_train_takes_it(more: tuple[str, ...]) -> None:
    found = explain(validate(COMMAND, [*OWN, *more, "data.rows=6"]))
    text = report.as_text(found)
    assert found.subject.parameters == 65 and found.config.rows == 3 and "rows a day" in text
    assert "tokens" not in text and "custom_task.linear" in text


def test_buffers_are_no_parameters_and_text_has_tokens() -> None:
    own = ("model._target_=custom_task.Embedder", "model.context=8", "model.vocab=256", "precision=fp32")
    found = explain(validate(COMMAND, [*own, "mesh.shard=2"]))
    assert found.subject.parameters == 256 * 8 and found.tokens_per_step == 2 * 8


def test_recipes_of_train_are_explained_and_what_has_no_effect_is_said() -> None:
    config = validate(COMMAND, ["experiment=laptop", "mesh.shard=4", "model.layers=1"])
    assert config.mesh.shard == 4 and config.run.device_gb is None
    idle = report.without_effect(config)
    assert {"run.steps", "run.device"} <= set(idle) and "run.accumulate" not in idle


def test_a_run_leaves_text_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("mesh.shard=4")
    write_explanation(config, tmp_path / "run")
    text = (tmp_path / "run" / "explain.txt").read_text(encoding="utf-8")
    assert text.strip() and text in capsys.readouterr().out
    assert (tmp_path / "run" / "memory.svg").read_text().startswith("<?xml")
    assert (tmp_path / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "update" in (tmp_path / "run" / "schedule.txt").read_text()


def test_a_run_by_specs_is_put_on_paper_by_its_specs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("experiments.explain.time_report.explain", lambda config: config)
    run = dataclasses.asdict(compose("mesh.shard=2", "specs=[['*',shard],[embed*,null]]"))
    assert _put_on_paper(run, tmp_path).specs == [("*", "shard"), ("embed*", None)]
    assert (
        _put_on_paper({name: each for name, each in run.items() if name != "specs"}, tmp_path).specs is None
    )


@pytest.mark.long
def test_seventy_billion_parameters_on_1024_ranks_take_less_than_two_minutes(tmp_path: Path) -> None:
    overrides = ["model=70b", "strategy=full_shard", "mesh.shard=1024", "hardware=h100"]
    began = time.perf_counter()
    write_explanation(config_of(*overrides), tmp_path)
    assert time.perf_counter() - began < 120
