"""What runs measure corrects the next prediction, and what of a run was lost is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from errors import raises
from runs import config_of, run_in, validate
from toys import llama, lower

import fnshard as fs
from experiments import train
from experiments.explain.config import COMMAND
from experiments.explain.time_report import neighbours, report_time
from experiments.lib.checks import ConfigError
from experiments.lib.measured import LINES, hardware_of_runs, read_measurements
from experiments.lib.plan import hardware_of
from experiments.lib.record import RUN, prediction_of
from fnshard.analysis.calibrate import fit_constants, scale
from fnshard.launcher.rank import Stop

CPU = fs.Hardware.named("cpu")


def record(folder: Path, lowered: Any, hardware: fs.Hardware, truth: fs.Hardware) -> None:
    """Write what a run leaves on a machine that is `truth` and was taken for `hardware`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = prediction_of(lowered, hardware) | {"measured_s": lowered.timeline(truth).step_seconds}
    (folder / RUN).write_text(json.dumps({"prediction": values}))


# ------------------------------------------------------------------ hardware


@pytest.mark.long
def test_hardware_is_what_its_runs_have_measured(tmp_path: Path) -> None:
    """The machine multiplies at half the rate and is joined at a third; the runs are of other plans."""
    truth = scale(CPU, {"matmul": 0.5, "wire": 0.33})
    for layers, ranks in ((1, 1), (2, 2), (2, 4), (4, 2), (3, 8), (1, 8)):
        record(tmp_path / f"{layers}x{ranks}", lower(*llama(layers), ranks=ranks), CPU, truth)
    learned, other = hardware_of_runs(str(tmp_path)), lower(*llama(3), ranks=4)
    first, second, real = (other.timeline(h).step_seconds for h in (CPU, learned, truth))
    assert abs(second / real - 1) < 0.03 < abs(first / real - 1)
    assert learned.name == "cpu as 6 runs measured" and learned.spread is not None
    assert learned.spread[0] <= 1 <= learned.spread[1]
    assert hardware_of(f"measured:{tmp_path}") == learned


def test_runs_on_other_hardware_say_nothing(tmp_path: Path) -> None:
    low = lower(*llama(1), ranks=2)
    record(tmp_path / "a", low, fs.Hardware.named("h100"), scale(fs.Hardware.named("h100"), {"wire": 0.1}))
    record(tmp_path / "b", low, CPU, CPU)
    assert hardware_of_runs(str(tmp_path)).flops == pytest.approx(CPU.flops)


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        (None, "no run"),
        ("{}", "no run"),
        ("{", "damaged"),
        ('{"prediction": {"measured_s": 1.0}}', "damaged"),
    ],
)
def test_a_folder_that_says_nothing_is_one_error(tmp_path: Path, text: str | None, leaves: str) -> None:
    if text is not None:
        (tmp_path / RUN).write_text(text)
    with raises(ConfigError, leaves=[f"hardware=measured:{tmp_path}", leaves]):
        hardware_of_runs(str(tmp_path))
    if text:
        with raises(ConfigError, leaves=f"run={tmp_path}"):
            report_time(tmp_path)


def test_a_profile_without_predictions_is_one_error(tmp_path: Path) -> None:
    low = lower(*llama(1), ranks=2)
    record(tmp_path, low, CPU, CPU)
    (tmp_path / LINES).parent.mkdir()
    kinds = [{"kind": kind, "predicted_s": {"": 0.0}, "measured_s": 1.0} for kind in ("update", "cast")]
    for damaged in ({"lines": [], "kinds": kinds, "exposed_s": [0.0]}, {"lines": [], "kinds": []}):
        (tmp_path / LINES).write_text(json.dumps(damaged))
        with raises(ConfigError, leaves=[f"hardware=measured:{tmp_path}", "damaged"]):
            hardware_of_runs(str(tmp_path))
        with raises(ConfigError, leaves=f"run={tmp_path}"):
            report_time(tmp_path)
    (tmp_path / LINES).write_text(json.dumps({"lines": [], "kinds": [], "exposed_s": [0.0]}))
    assert hardware_of_runs(str(tmp_path)).name == "cpu as 1 run measured"


def test_runs_with_other_ranks_on_a_host_say_nothing(tmp_path: Path) -> None:
    low = lower(*llama(1), ranks=2)
    for name, ranks, speed in (("a", 4, 0.2), ("b", 2, 1.0)):
        record(tmp_path / name, low, CPU, scale(CPU, {"matmul": speed}))
        values = json.loads((tmp_path / name / RUN).read_text())
        there = {"device": "cpu", "cores": 2, "ranks": ranks, "hosts": ["one"]}
        (tmp_path / name / RUN).write_text(json.dumps(values | {"hardware": there}))
    assert hardware_of_runs(str(tmp_path)).flops["f32"].best == pytest.approx(CPU.flops["f32"].best)


def test_the_command_line_takes_a_folder_of_runs(tmp_path: Path) -> None:
    config = validate(COMMAND, [f"hardware=measured:{tmp_path}"])
    assert config.hardware.name == f"measured:{tmp_path}"
    with raises(ConfigError, leaves="hardware.name=measured:"):
        validate(COMMAND, ["hardware=measured:"])


# ------------------------------------------------------------------ this machine


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two runs of the main job on this machine, of other sizes; the first with a profile."""
    folders = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    more = ("run.save_every=0", "run.steps=8", "run.sample_tokens=2")
    train.train(config_of("run.profile=3", "run.backend=inductor", *more), run_in(folders[0]), [], Stop())
    train.train(config_of("data.rows=64", "model.layers=3", *more), run_in(folders[1]), [], Stop())
    return folders


@pytest.mark.long  # two whole runs
def test_the_second_prediction_is_better_than_the_first(runs: tuple[Path, Path]) -> None:
    """The second run is predicted, without what it measured itself."""
    first, second = map(read_measurements, runs)
    learned = second.step.seconds(fit_constants([first.step, *first.kinds]))
    untaught = second.step.predicted[""]
    assert abs(math.log(second.step.measured / learned)) < abs(math.log(second.step.measured / untaught))


@pytest.mark.long  # reads what two whole runs wrote
def test_a_profile_holds_every_line(runs: tuple[Path, Path]) -> None:
    profile = json.loads((runs[0] / LINES).read_text())
    assert len(profile["lines"]) == len((runs[0] / "schedule.txt").read_text().splitlines()) - 1
    assert len(profile["exposed_s"]) == 1 and {"run forward", "update"} <= {
        k["kind"] for k in profile["kinds"]
    }
    measured = sum(line["measured_s"] for line in profile["lines"])
    assert measured == pytest.approx(sum(kind["measured_s"] for kind in profile["kinds"]), rel=0.05)


@pytest.mark.long  # test_the_second_prediction reads what it wrote
def test_where_the_time_of_a_run_went(runs: tuple[Path, Path]) -> None:
    text = report_time(runs[0])
    for expected in (
        "seconds of the run",
        "compile",
        "predicted by the table",
        "its kernels alone",
        "lines of a",
    ):
        assert expected in text, text
    text = report_time(runs[1])
    assert "run.profile=3 measures them" in text and "run.backend=eager" in text and "compile" not in text


@pytest.mark.parametrize(
    ("factor", "name", "is_said"),
    [(22.0, "auto", True), (0.1, "h100", True), (1.1, "auto", False), (22.0, "measure", False),
     (22.0, "measured:there", False)],
)  # fmt: skip
def test_a_prediction_that_is_far_off_says_how_it_learns(tmp_path: Path, factor, name, is_said) -> None:
    record(tmp_path / "run", low := lower(*llama(1), ranks=2), CPU, CPU)
    file = tmp_path / "run" / RUN
    values = json.loads(file.read_text())
    values["prediction"]["measured_s"] = factor * low.timeline(CPU).step_seconds
    config = {"data": {}, "model": {}, "hardware": {"name": name}}
    totals = {"steps": 3, "seconds": 9.0, "steps_s": 3.0, "lowering_s": 6.0}
    file.write_text(json.dumps(values | {"status": "ok", "totals": totals, "config": config}))
    text = report_time(tmp_path / "run")
    assert {"hardware=measured:" in text, "hardware=measure " in text} == {is_said}
    assert "lowering" in text and "compile" not in text


def test_a_host_tier_is_left_with_all_that_goes_with_it() -> None:
    """One key alone would be refused."""
    config = validate(COMMAND, ["strategy.optimizer_memory=host", "strategy.update_on=host"])
    changes = dict(neighbours(config))
    assert changes["strategy.optimizer_memory=device strategy.update_on=null"].strategy.update_on is None
