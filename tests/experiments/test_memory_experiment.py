"""The memory experiments: their configuration, their arithmetic, and their parts on a tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Warm
from pydantic import TypeAdapter

from experiments.configs.decoders import decoder
from experiments.configs.train import ConfigError
from experiments.memory import recipe, sizes, targets, zero
from experiments.memory.config import DEFAULTS, SPEC
from experiments.memory.measured import measure, step_ratio
from experiments.memory.plans import LLAMA, MemoryJob, MemoryPlan, on_paper
from experiments.memory.zero import bars
from experiments.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(decoder("tiny"), layers=2, width=64)
NEAR = 0.05  # of a measured peak, to be called predicted


@pytest.fixture
def command(tmp_path: Path, warm: Warm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m experiments.memory ...`."""
    return lambda *overrides: warm.run(
        ["experiments.memory", f"hydra.run.dir={tmp_path}", *overrides], tmp_path
    )


# ------------------------------------------------------------------ configuration


def test_null_depends_on_the_part():
    assert (SPEC.read({"part": "recipe"}).size, SPEC.read({"part": "targets"}).length) == ("25m", 512)
    assert SPEC.read({"part": "recipe", "rows": 1}).rows == 1
    assert SPEC.read({"part": "sizes", "models": ["8b"]}).models == ("8b",)


def test_all_mistakes_in_one_error():
    wrong = {"part": "sizes", "models": ["7b"], "ranks": [0], "backend": "xla", "rounds": -1}
    with pytest.raises(ConfigError, match="4 problems") as caught:
        SPEC.read(wrong)
    for told in ("models=7b: one of", "ranks=0: must be 1", "backend=xla", "rounds=-1"):
        assert told in str(caught.value)
    with pytest.raises(ConfigError, match="steps=3: no such key"):
        SPEC.read({"part": "sizes", "steps": 3})


def test_an_unknown_part_names_the_parts():
    with pytest.raises(ConfigError, match=f"part=zero4: one of {', '.join(DEFAULTS)}"):
        SPEC.read({"part": "zero4"})


def test_bad_overrides_are_one_error_from_the_shell(tmp_path, command):
    wrong = ("+mesh.z=1", "rounds=many", "targets=[speed]")
    done = command(*wrong)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert all(override.lstrip("+").split("=")[0] in done.stderr for override in wrong)
    assert not (tmp_path / "ranks").exists()


# ------------------------------------------------------------------ arithmetic


def test_sizes_are_what_the_names_say():
    for name, parameters in (("1b", 1.24e9), ("8b", 8.03e9), ("70b", 70.55e9)):
        assert LLAMA[name].parameters == pytest.approx(parameters, rel=0.01)


def test_ratios_cancel_drift():
    drift = [1.0, 3.0, 10.0, 2.0, 1.0]
    plans = {"a": {"seconds": [2 * d for d in drift]}, "b": {"seconds": drift}}
    assert step_ratio({"plans": plans}, "a", "b") == pytest.approx(2.0)


def test_a_job_survives_json():
    job = MemoryJob(TINY, (MemoryPlan("x", remat=0.5), MemoryPlan("y", fit_share=0.4)), 2, 1, 8, 0, "eager")
    assert TypeAdapter(MemoryJob).validate_python(json.loads(json.dumps(job, default=vars))) == job


def test_a_missed_target_is_called_missed():
    def seen(unit: int) -> dict:
        plan = {"between_bytes": 1, "optimizer_device_bytes": 0, "predicted": None}
        return {
            "plans": {
                "none": {**plan, "peak_bytes": 100, "seconds": [1.0, 4.0]},
                "unit": {**plan, "peak_bytes": unit, "seconds": [1.2, 4.8]},
            },
            "job": {"ranks": 2, "rows": 1, "length": 8, "backend": "eager"},
            "parameters": 1e6,
            "load_average": [0.0, 0.0],
        }

    met = targets.table({"found": {"remat": seen(55)}}).splitlines()
    missed = targets.table({"found": {"remat": seen(56)}}).splitlines()
    assert met[2] == "| remat='unit': peak of none's | 0.55 | 0.55 | met |"
    assert missed[2].endswith("| **missed** |")
    assert met[3] == "| remat='unit': step time of none's | 1.2 | 1.35 | met |"


# ------------------------------------------------------------------ on paper


def test_levels_rest_as_zero_has_it():
    """fp32 parameters and two moments, of which each level shards more."""
    whole = 4 * TINY.parameters
    wanted = {"no_shard": 3, "zero1": 1 + 2 / 4, "zero2": 1 + 2 / 4, "zero3": 3 / 4}
    peaks = []
    for preset, copies in wanted.items():
        plan = MemoryPlan(preset, preset, clip=True)
        analysis = on_paper(plan, TINY, 4, 1, 16).memory_analysis()
        assert analysis.resident_bytes == pytest.approx(copies * whole, rel=0.01), preset
        peaks.append(analysis.peak_bytes)
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


def test_every_ingredient_saves():
    peaks = [on_paper(p, TINY, 2, 4, 128).memory_analysis().peak_bytes for p in recipe.plans()]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_what_fits_and_what_does_not(monkeypatch, tmp_path):
    small = replace(TINY, context=32)
    monkeypatch.setitem(sizes.LLAMA, "1b", small)
    least, plenty = 1e-6, 1.0
    monkeypatch.setattr(sizes, "BUDGETS", {least: "a100", plenty: "h200"})
    config = SPEC.read({"part": "sizes", "models": ["1b"], "ranks": [1, 8], "large_length": 32})
    found = sizes.run(config, tmp_path)
    assert [e["fits"] for e in found["fits"]] == [False, True] * 2
    assert all(e["peak_bytes"] <= plenty * 1e9 and e["seconds"] > 0 for e in found["fits"] if e["fits"])
    text = sizes.table(found)
    assert text.count("does not fit") == 2 and text.count("a budget of ") == 2
    assert text.count("| 1b |") == 2 and text.count("<br>") == 2


def test_bars_are_drawn(tmp_path):
    level = [{"resident_bytes": 10**9, "peak_bytes": 2 * 10**9}]
    bars({"DDP": level, "ZeRO 3": level}, ["2"], tmp_path / "zero.png")
    assert (tmp_path / "zero.png").read_bytes().startswith(b"\x89PNG")


def test_markdown_counts_its_columns():
    assert markdown([["a", "b", "c"], ["x", "1", "2"]]).splitlines()[1] == "|---|---:|---:|"


# ------------------------------------------------------------------ measured


SMALL_JOB = MemoryJob(
    replace(TINY, context=128),
    (
        targets.PLAIN,
        MemoryPlan("unit", remat="unit"),
        targets.ALL_OFFLOADED,
        replace(targets.FITTED, fit_share=0.6),
        MemoryPlan("ddp", "ddp"),
    ),
    ranks=2,
    rows=2,
    length=128,
    rounds=1,
    backend="eager",
)


@pytest.mark.long  # a job of its own; `test_ledger` has samples of it
def test_a_measured_job(tmp_path):
    """Predictions are near; offloaded state is not on the device; the plan found fits; remat saves."""
    measured = measure(SMALL_JOB, tmp_path, 240.0)["plans"]
    for name, plan in measured.items():
        if name != "ddp":
            assert plan["predicted"]["peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=NEAR), name
        assert len(plan["seconds"]) == 1 and plan["seconds"][0] > 0
    offloaded, plain, fitted = (measured[name] for name in (targets.ALL_OFFLOADED.name, "none", "fit"))
    assert offloaded["optimizer_device_bytes"] == 0 < plain["optimizer_device_bytes"]
    assert "optimizer state" not in offloaded["predicted"]["resident"]
    assert offloaded["between_bytes"] < plain["between_bytes"]
    assert fitted["peak_bytes"] <= fitted["budget_bytes"] < 0.65 * plain["peak_bytes"]
    assert fitted["fit"]["peak_bytes"] <= fitted["budget_bytes"]
    assert measured["unit"]["peak_bytes"] < 0.9 * plain["peak_bytes"]


def test_every_target_names_plans_that_its_verdict_reads():
    for name, job in targets.jobs(SPEC.read({"part": "targets"})).items():
        plan = {"peak_bytes": 1, "between_bytes": 1, "optimizer_device_bytes": 0, "budget_bytes": 1}
        seen = {"plans": {p.name: {**plan, "seconds": [1.0] * job.rounds} for p in job.plans}}
        assert targets.VERDICTS[name](seen), name


@pytest.mark.long
def test_zero_beside_torchs_ddp(tmp_path, command):
    done = command(
        "part=zero", "size=tiny", "length=32", "backend=eager", "worlds=[2]", "measured_worlds=[2]"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "zero.json").read_text())
    rest = {n: p["between_bytes"] for n, p in found["measured"]["2"]["plans"].items()}
    assert rest["ddp"] > rest["no_shard"] > rest["zero1"] > rest["zero3"]
    assert set(zero.LEVELS) == set(found["paper"]["2"])
    assert (tmp_path / "zero.png").exists()
