"""Which folder a run takes, who holds it, what outlives a power cut; and the report of its metrics."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from errors import raises
from runs import config_of, leave_checkpoint

from experiments import finetune
from experiments.lib.checks import ConfigError
from experiments.lib.compose import compose
from experiments.lib.files import write_record
from experiments.lib.folder import (
    CHECKPOINTS,
    IDENTITY,
    RunFolder,
    claim,
    discard,
    is_finished,
    write_result,
)
from experiments.lib.metrics import METRICS, Goal
from experiments.lib.record import RunRecord, TimeSpent, in_words, process_began
from experiments.lib.report import Progress, Report

# ------------------------------------------------------------------ the report


def test_a_report_goes_on_where_its_checkpoint_is(tmp_path):
    shown = io.StringIO()
    first = Report(tmp_path, 6, 10, RunRecord(tmp_path, {}), stream=shown)
    values = {"loss": 1 / 3, "lr": 0.1}
    for number in (1, 2, 3, 4, 5):
        first.step(number, values, 0.5)
        if number % 2 == 0:
            first.held_out(number, 2.0, {})
    first.close()
    path = tmp_path / METRICS
    path.write_text(path.read_text() + '{"step": 6, "lo')  # it was killed there
    again = Report(tmp_path, 6, 10, RunRecord(tmp_path, {}), 4, path, stream=shown)
    again.held_out(4, 2.0, {})
    again.step(5, values, 0.5)
    again.step(6, values, 0.5)
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (again.totals.reached, again.totals.seconds) == (6, 3.0)
    assert [(r["step"], "loss" in r) for r in rows] == [
        (1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (6, True),
    ]  # fmt: skip
    assert rows[0]["loss"] == 1 / 3  # every digit
    assert "step 5/6, loss 0.333, lr" in shown.getvalue().splitlines()[-2]
    assert "left ?" in shown.getvalue().splitlines()[-2] and "left 0:00" in shown.getvalue().splitlines()[-1]


def test_lines_of_steps_have_what_was_measured_in_them_and_held_out_numbers_their_step(tmp_path):
    """Numbers of one's own loss, rows where these count, and nothing of another step."""
    shown, goal = io.StringIO(), Goal("reward", is_maximised=True)
    report = Report(tmp_path, 6, 10, RunRecord(tmp_path, {}), stream=shown, goal=goal, unit="row")
    report.step(1, {"loss": 0.0, "lr": 0.1, "reward": 0.25, "accuracy": 0.5}, 0.5)
    report.held_out(1, 0.75, {"held_out_accuracy": 0.625})
    report.step(2, {"loss": 0.0, "lr": 0.1, "reward": 0.5, "accuracy": 0.75}, 0.5)
    totals = report.finish("ok")
    report.close()
    first, measured, second = shown.getvalue().splitlines()
    assert "step 1/6, reward 0.250" in first and "accuracy 0.5" in first and "20 rows/s" in first
    assert measured == "step 1/6, held-out reward 0.750, held-out accuracy 0.625"
    assert "0.750, " not in second.partition("accuracy 0.75")[0] and "held" not in second
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert rows[0]["rows_per_s"] == 20 and "tokens_per_s" not in rows[0]
    assert rows[1] == {"step": 1, "held_out_reward": 0.75, "held_out_accuracy": 0.625}
    assert totals["rows_per_s"] == 20 and "tokens" not in in_words(totals) and "MFU" not in in_words(totals)


def test_seconds_begin_with_the_command_and_after_a_restart_with_the_process(tmp_path):
    """Imports and launch are of the command; a second process of the same one does not count them again."""
    assert 0 < process_began() <= time.time()
    began = time.time() - 100
    spent, counted = TimeSpent.since(tmp_path, began)
    assert counted == began and spent.parts()["start"] == pytest.approx(100, abs=5)
    RunRecord(tmp_path, {}, 0, spent, began).write("running", 1)
    counted = TimeSpent.since(tmp_path, began)[1]
    assert counted == pytest.approx(process_began(), abs=1)
    assert TimeSpent.since(tmp_path, 0.0)[0].parts()["start"] < 5  # a program of one's own calls the job


@pytest.mark.parametrize(
    "attempts", [5, None, ["x"], [{"seconds": 1}], [{"seconds": "1", "spent_s": {}}]], ids=repr
)
def test_a_record_whose_attempts_are_none_is_told_of_once(attempts, tmp_path, capsys):
    began = time.time() - 100
    write_record(tmp_path / "run.json", {"attempts": attempts, "totals": {}})
    assert TimeSpent.since(tmp_path, began)[1] == began
    record = RunRecord(tmp_path, {}, 3)
    assert "is no record of a run. What earlier" in capsys.readouterr().err
    assert record.write("running", 4)["steps"] == 4


def test_memory_is_shown_where_it_can_be_compared():
    both = {"steps": 1, "seconds": 1.0, "predicted_peak_bytes": 2e6, "measured_peak_bytes": 3e6}
    assert "3.0 MB" in in_words(both) and "2.0 MB" in in_words(both)
    process = {**both, "process_peak_bytes": 9e9}
    del process["measured_peak_bytes"]
    assert "2.0 MB" in in_words(process) and "9000" not in in_words(process)


def test_the_time_that_is_left_has_no_compiling_in_it():
    shown, ticks = io.StringIO(), [0.0]
    spent = TimeSpent(clock=lambda: ticks[0])
    progress = Progress(shown, 6, 0, spent.between_steps)
    for number in range(1, 5):
        with spent.during("steps" if number > 1 else "compile"):
            ticks[0] += 2.0
        progress.step(number, "", 2.0)
        with spent.during("compile"):
            ticks[0] += 100.0
        with spent.during("evaluation" if number == 2 else "compile"):
            ticks[0] += 4.0
    progress.close()
    left = [line.partition("left ")[2] for line in shown.getvalue().splitlines()]
    assert left == ["?", "0:08", "0:12", "0:07"]  # the evaluation after the second step counts


def test_what_comes_before_the_first_step_is_shown(tmp_path):
    """A line in a while; once the report is closed nothing."""
    shown = io.StringIO()
    logger = logging.getLogger("fnshard")
    before = logger.level, logger.propagate, list(logger.handlers)
    with Report(tmp_path, 6, 10, RunRecord(tmp_path, {}), stream=shown) as report:
        for number in (1, 2):
            logger.info("compiling %d of 8 kernels", number)
        report.step(1, {"loss": 1.0, "lr": 0.1}, 0.5)
    logger.info("compiling 3 of 8 kernels")
    assert [f"compiling {n} of 8 kernels" in shown.getvalue() for n in (1, 2, 3)] == [True, False, False]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


# ------------------------------------------------------------------ which folder


@pytest.fixture
def day(cwd: Path) -> Path:
    """Return the folder in which folders of runs lie."""
    return cwd / "outputs" / "day"


def test_the_same_configuration_goes_on_in_its_folder(cwd, day):
    asked = config_of()
    with claim(asked, day / "first", chosen=False) as run:
        assert (run.folder, run.source) == (str(day / "first"), None)
        leave_checkpoint(day / "first")
    free = ("timeout_s=9", "save_every=7", "async_save=true", "keep=5", "max_restarts=0")
    with claim(config_of(*(f"run.{f}" for f in free)), day / "second", chosen=False) as run:
        assert run.folder == str(day / "first") and not (day / "second").exists()
    for other in ("optimizer.lr=0.1", "run.seed=1", "run.steps=99", "mesh.shard=2"):
        with claim(config_of(other), day / "other", chosen=False) as run:
            assert run.folder == str(day / "other")
    with claim(asked, day / "third", chosen=False) as run:
        assert run.folder == str(day / "first")
        write_result(Path(run.folder), status="ok", overrides=[])
    with claim(asked, day / "fourth", chosen=False) as run:
        assert run.folder == str(day / "fourth")


def test_a_fine_tuning_run_goes_on_in_its_folder(cwd):
    """Its default folder lies one deeper than that of the main job."""
    composed = compose(finetune.COMMAND, [])
    fresh = composed.folder
    with claim(composed.config, fresh, chosen=False) as run:
        assert run.folder == str(fresh)
        leave_checkpoint(fresh)
    with claim(composed.config, fresh.with_name("later"), chosen=False) as run:
        assert run.folder == str(fresh)


def test_never_begins_anew_and_is_gone_on_with_itself(cwd, day):
    for name in ("first", "second"):
        with claim(config_of("run.resume=never"), day / name, chosen=False) as run:
            assert run.folder == str(day / name)
            leave_checkpoint(day / name)
    with claim(config_of(), day / "third", chosen=False) as run:
        assert run.folder == str(day / "second")


def test_nothing_saved_is_nothing_to_go_on_from(cwd, day):
    for name in ("first", "second"):
        with claim(config_of(), day / name, chosen=False) as run:
            assert run.folder == str(day / name)
            (day / name / CHECKPOINTS / ".4.saving").mkdir(parents=True)


def test_what_says_that_a_run_is_unfinished_outlives_a_power_cut(cwd, monkeypatch, day):
    """Files are flushed before they have their names, and so are the names of new folders."""
    done: list[tuple[str, str]] = []

    def noted(name: str, place: Callable[..., Any]) -> None:
        plain = getattr(os, name)

        def call(*args: Any, **how: Any) -> Any:
            result = plain(*args, **how)
            done.append((name, str(place(*args))))
            return result

        monkeypatch.setattr(os, name, call)

    noted("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    noted("replace", lambda _, to: to)
    noted("mkdir", lambda path, *_: path)
    with claim(config_of(), day / "time", chosen=False) as run:
        leave_checkpoint(Path(run.folder))
        path = Path(run.folder, IDENTITY)
        at = done.index(("replace", str(path)))
        assert ("fsync", f"{path}.partial") in done[:at]
        assert ("fsync", str(path.parent)) in done[at:]
        for folder in (run.checkpoints, day / "time", cwd / "outputs", day):
            at = done.index(("mkdir", str(folder)))
            assert ("fsync", str(folder.parent)) in done[at:], folder


def test_a_run_that_is_still_at_work_is_left_alone(cwd, capfd, day):
    with claim(config_of(), day / "first", chosen=False):
        leave_checkpoint(day / "first")
        with claim(config_of(), day / "second", chosen=False) as run:
            assert run.folder == str(day / "second")
        assert f"{day / 'first'} is still at work" in capfd.readouterr().err
        with (
            raises(ConfigError, leaves=str(day / "first"), fix="hydra.run.dir"),
            claim(config_of(), day / "first", chosen=True),
        ):
            pass
    with claim(config_of(), day / "third", chosen=False) as run:
        assert run.folder == str(day / "first")


def test_a_folder_that_the_command_names(cwd, day):
    for _ in range(2):
        with claim(config_of(), day / "named", chosen=True) as run:
            assert run.folder == str(day / "named")
    leave_checkpoint(day / "named", 40)
    with claim(config_of("run.save_every=1"), day / "named", chosen=True) as run:
        assert run.folder == str(day / "named")
    with (
        raises(ConfigError, leaves=["named", "optimizer.lr: 0.004 there, 0.1 here"], fix="hydra.run.dir",
               says="step 40"),
        claim(config_of("optimizer.lr=0.1"), day / "named", chosen=True),
    ):  # fmt: skip
        pass
    with (
        raises(
            ConfigError, leaves=["run.resume=never", str(day / "named")], fix="hydra.run.dir", says="step 40"
        ),
        claim(config_of("run.resume=never"), day / "named", chosen=True),
    ):
        pass


def test_a_path_is_where_a_new_run_starts_and_its_own_checkpoints_come_first(cwd, day):
    leave_checkpoint(cwd / "source")
    asked = config_of("run.resume=source")
    with claim(asked, day / "first", chosen=False) as run:
        assert (run.folder, run.source) == (str(day / "first"), str(cwd / "source" / CHECKPOINTS))
        leave_checkpoint(day / "first")
    with claim(config_of(), day / "other", chosen=False) as run:
        assert (run.folder, run.source) == (str(day / "other"), None)
    (cwd / "source").rename(cwd / "gone")
    with claim(asked, day / "second", chosen=False) as run:
        assert run.folder == str(day / "first")
        write_result(Path(run.folder), status="ok", overrides=[])
    with (
        raises(ConfigError, leaves="run.resume=source", fix="the folder of a run"),
        claim(asked, day / "third", chosen=False),
    ):
        pass


def test_a_finished_run_of_a_sweep_is_known(tmp_path):
    config = config_of()
    with claim(config, tmp_path, chosen=True):
        assert not is_finished(tmp_path, config)
        write_result(tmp_path, status="ok", overrides=[])
    assert is_finished(tmp_path, config) and is_finished(tmp_path, config_of("run.keep=9"))
    assert not is_finished(tmp_path, config_of("run.seed=9"))
    write_result(tmp_path, status="stopped", overrides=[])
    assert not is_finished(tmp_path, config)


def test_a_folder_is_discarded_though_those_above_it_cannot_be(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    folder = tmp_path / "new" / "run"
    folder.mkdir(parents=True)
    monkeypatch.setattr(Path, "rmdir", refuse)
    assert discard(RunFolder(str(folder), first_made=str(tmp_path / "new")))
    assert list((tmp_path / "new").iterdir()) == []
