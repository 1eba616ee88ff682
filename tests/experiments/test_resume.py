"""Exact resume: what is killed, or asked to stop, and started again, is what was never interrupted."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import OUTPUT
from main_job import SMALL, compose

import fnshard as fs
from experiments.chaos.campaign import differences
from experiments.cli.sweep import TABLE
from experiments.configs.train import ConfigError, TrainConfig
from experiments.training import loop, steps
from experiments.training.report import METRICS, Report
from experiments.training.result import read_result, write_result
from experiments.training.resume import (
    CHECKPOINTS,
    IDENTITY,
    RunFolder,
    claimed,
    claimed_sweep,
    finished,
    identity_of,
    locked,
    source_of,
)
from fnshard.errors import CheckpointError
from fnshard.launcher.rank import Stop

ROOT = Path(__file__).resolve().parents[2]
STEPS = 13
RUN = (*SMALL, f"data.root={ROOT / 'experiments'}", f"run.steps={STEPS}", "run.save_every=4",
       "run.held_out_every=4", "run.timeout_s=60", "run.sample_tokens=2")  # fmt: skip


def config_of(*overrides: str) -> TrainConfig:
    """Small, on one rank where nobody says otherwise."""
    return compose(*RUN, "mesh.shard=1", *overrides)


def run_in(folder: Path) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    return RunFolder(str(folder))


class After(Stop):
    """A notice that comes before the `n`th step of this process."""

    def __init__(self, n: int):
        self.left = n

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0

    @asked.setter
    def asked(self, _: bool) -> None:
        pass


class KilledError(Exception):
    """Stands for a SIGKILL: nothing is done any more."""


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int, *, before_save: bool = False) -> None:
    """Training ends without another word in step `number`; or behind it, before it is saved."""
    step, save = steps.one_step, loop.Saver.save

    def stepped(*args: Any) -> Any:
        if args[3] == number and not before_save:
            raise KilledError
        return step(*args)

    def saved(self: Any, at: int, *args: Any) -> None:
        if at == number and before_save:
            raise KilledError
        save(self, at, *args)

    monkeypatch.setattr(steps, "one_step", stepped)
    monkeypatch.setattr(loop.Saver, "save", saved)


@pytest.fixture(autouse=True, scope="module")
def lowered_once() -> Iterator[None]:
    """Steps of equal runs are lowered once in this process; no pictures but the first."""
    prepare, plot, known, plots = loop.prepare, loop.plot_losses, {}, []

    def prepared(config: TrainConfig) -> loop.TrainSetup:
        key = json.dumps(identity_of(config))
        known[key] = known.get(key) or prepare(config)
        return replace(known[key], config=config)

    def plotted(*args: Any, **options: Any) -> None:
        plots.append(args)
        if len(plots) == 1:
            plot(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", prepared)
        patch.setattr(loop, "plot_losses", plotted)
        yield


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    loop.train(config_of(), run_in(folder), [], Stop())
    return folder


# ------------------------------------------------------------------ the loop, in this process


def test_the_unbroken_run_is_whole(unbroken):
    rows = [json.loads(line) for line in (unbroken / METRICS).read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in rows if "held_out_loss" in r] == [4, 8, 12, STEPS]
    assert fs.checkpoint.all_steps(unbroken / CHECKPOINTS) == [12, STEPS]
    assert (
        fs.checkpoint.manifest(unbroken / CHECKPOINTS / "12").metrics["held_out"] == rows[-3]["held_out_loss"]
    )


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(
    ("at", "before_save", "goes_on"),
    [(3, False, 0), (6, False, 4), (8, True, 4), (9, False, 8), (STEPS, True, 12)],
)
def test_killed_and_started_again(unbroken, tmp_path, monkeypatch, capfd, how, at, before_save, goes_on):
    config = config_of(f"run.async_save={str(how == 'async').lower()}")
    with monkeypatch.context() as patch:
        killed_at(patch, at, before_save=before_save)
        with pytest.raises(KilledError, match=r"^$"):
            loop.train(config, run_in(tmp_path), [], Stop())
    fs.checkpoint.wait()
    capfd.readouterr()
    loop.train(config, run_in(tmp_path), [], Stop())
    said = capfd.readouterr().out
    assert (f"resume: step {goes_on} of {tmp_path / CHECKPOINTS}" in said) == bool(goes_on)
    assert ("resume: nothing to go on from" in said) != bool(goes_on)
    assert differences(unbroken, tmp_path) == []


def test_killed_again_and_again(unbroken, tmp_path, monkeypatch):
    for at in (5, 6, 9, 10, STEPS):
        with monkeypatch.context() as patch:
            killed_at(patch, at)
            with pytest.raises(KilledError, match=r"^$"):
                loop.train(config_of(), run_in(tmp_path), [], Stop())
    loop.train(config_of(), run_in(tmp_path), [], Stop())
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("at", [1, 3, 6, STEPS - 1])
def test_asked_to_stop(unbroken, tmp_path, capfd, at):
    """The step is finished and saved; no held-out loss is waited for; the next start has them all."""
    loop.train(config_of(), run_in(tmp_path), [], After(at))
    said = capfd.readouterr().out
    at += 1  # ranks hear of it a step later
    assert f"stopped: step {at} of {STEPS} is saved; the same command goes on from there" in said
    assert f"run.resume={tmp_path}" in said
    assert read_result(tmp_path) == {"status": "stopped", "overrides": [], "step": at}
    assert fs.checkpoint.all_steps(tmp_path / CHECKPOINTS)[-1] == at
    loop.train(config_of(), run_in(tmp_path), [], Stop())
    assert differences(unbroken, tmp_path) == []


def test_a_finished_run_goes_on_to_the_same_end(unbroken, tmp_path):
    loop.train(config_of(), run_in(tmp_path), [], Stop())
    loop.train(config_of(), run_in(tmp_path), [], Stop())
    assert differences(unbroken, tmp_path) == []


def test_a_torn_checkpoint_is_passed_over(unbroken, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        killed_at(patch, 10)
        with pytest.raises(KilledError, match=r"^$"):
            loop.train(config_of(), run_in(tmp_path), [], Stop())
    (data,) = (tmp_path / CHECKPOINTS / "8").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 4
    data.write_bytes(content)
    with pytest.warns(fs.errors.CheckpointWarning, match="is not what was written"):
        loop.train(config_of(), run_in(tmp_path), [], Stop())
    assert f"resume: step 4 of {tmp_path}" in capfd.readouterr().out
    assert differences(unbroken, tmp_path) == []


def test_a_save_that_fails_is_told_and_training_goes_on(unbroken, tmp_path, monkeypatch, capfd):
    save = fs.checkpoint.save

    def full(path: Path, *args: Any, **how: Any) -> Path:
        if path.name == "8":
            raise CheckpointError("cannot save 8: no space left on device")
        return save(path, *args, **how)

    monkeypatch.setattr(fs.checkpoint, "save", full)
    loop.train(config_of("run.keep=9"), run_in(tmp_path), [], Stop())
    assert "not saved, training goes on: cannot save 8: no space left" in capfd.readouterr().err
    assert fs.checkpoint.all_steps(tmp_path / CHECKPOINTS) == [4, 12, STEPS]
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_last_save_that_fails_fails_the_run(here, how):
    """Nobody would write it again; the run stays unfinished."""
    config = config_of("run.save_every=0", f"run.async_save={str(how == 'async').lower()}")
    with claimed(config, here / "r", chosen=False) as run:
        (here / "r" / CHECKPOINTS).touch()
        with pytest.raises(
            CheckpointError, match=rf"cannot save {here}/r/{CHECKPOINTS}/{STEPS}:\n  rank 0: "
        ):
            loop.train(config, run, [], Stop())
        assert Path(run.note).exists() and read_result(here / "r")["status"] != "ok"
        assert json.loads((here / "r" / "run.json").read_text())["status"] == "failed"


def test_only_at_the_end_and_what_stays(tmp_path):
    loop.train(config_of("run.save_every=0"), run_in(tmp_path / "end"), [], Stop())
    assert fs.checkpoint.all_steps(tmp_path / "end" / CHECKPOINTS) == [STEPS]
    more = ("run.save_every=1", "run.keep=1", "run.keep_every=5", "run.keep_best=1")
    loop.train(config_of(*more), run_in(tmp_path / "more"), [], Stop())
    rows = [json.loads(line) for line in (tmp_path / "more" / METRICS).read_text().splitlines()]
    best = min((r["held_out_loss"], r["step"]) for r in rows if "held_out_loss" in r)[1]
    assert fs.checkpoint.all_steps(tmp_path / "more" / CHECKPOINTS) == sorted({5, 10, STEPS, best})


def test_from_another_runs_checkpoint(unbroken, tmp_path, capfd):
    """Its metrics come along; what the configuration changes is changed from there on."""
    source = source_of(str(unbroken))
    assert source == str(unbroken / CHECKPOINTS)
    assert source_of(str(unbroken / CHECKPOINTS / "12")) == str(unbroken / CHECKPOINTS / "12")
    run = replace(run_in(tmp_path), source=str(unbroken / CHECKPOINTS / "12"))
    loop.train(config_of("optimizer.lr=0.02"), run, [], Stop())
    assert f"resume: step 12 of {unbroken / CHECKPOINTS / '12'}" in capfd.readouterr().out
    before, after = (
        [json.loads(line) for line in (f / METRICS).read_text().splitlines()] for f in (unbroken, tmp_path)
    )
    assert after[:14] == before[:14] and [r["step"] for r in after] == [r["step"] for r in before]
    assert after[-2]["lr"] == pytest.approx(5 * before[-2]["lr"])
    assert (
        after[-2]["loss"] == before[-2]["loss"] and after[-1] != before[-1]
    )  # the loss is before the update
    with pytest.raises(ConfigError, match=r"cannot go on from .*rows: saved 8, here 4"):
        loop.train(config_of("data.rows=4"), replace(run_in(tmp_path / "rows"), source=source), [], Stop())
    with pytest.raises(CheckpointError, match="is of another model"):
        loop.train(config_of("model.width=32"), replace(run_in(tmp_path / "wide"), source=source), [], Stop())


# ------------------------------------------------------------------ two ranks


def on_two(rank: int, folder: str, async_save: str, stop_at: int, stops: int) -> None:
    """Train on this rank; rank `stops` alone is asked before its step `stop_at`: all stop behind the next."""
    stop = After(stop_at) if rank == stops else Stop()
    config = compose(*RUN, "mesh.shard=2", f"run.async_save={async_save}")
    Path(folder).mkdir(exist_ok=True)
    loop.train(config, RunFolder(folder), [], stop)
    fs.checkpoint.wait()


def test_any_rank_that_is_asked_stops_all(ranks: Any, tmp_path: Path) -> None:
    """And the other mesh's run goes on from there within rounding."""
    two, whole, one = (tmp_path / name for name in ("two", "whole", "one"))
    ranks(2).run(on_two, str(whole), "false", 99, 0)
    assert read_result(whole)["status"] == "ok"
    for at, (stops, async_save) in enumerate([(1, "false"), (0, "true")], 3):
        ranks(2).run(on_two, str(two), async_save, at, stops)
        assert read_result(two)["status"] == "stopped"
    assert read_result(two)["step"] == 3 + 1 + 4 + 1
    loop.train(config_of(), replace(run_in(one), source=str(two / CHECKPOINTS)), [], Stop())
    ranks(2).run(on_two, str(two), "true", 99, 0)
    assert differences(whole, two) == []
    losses = [
        [json.loads(line).get("loss") for line in (f / METRICS).read_text().splitlines()]
        for f in (whole, one)
    ]
    assert losses[1][-2] != losses[0][-1] and losses[1] == [
        v and pytest.approx(v, rel=1e-5) for v in losses[0]
    ]


# ------------------------------------------------------------------ the report


def test_a_report_goes_on_where_its_checkpoint_is(tmp_path):
    shown = io.StringIO()
    first = Report(tmp_path, 6, 10, {}, stream=shown)
    values = {"loss": 1 / 3, "lr": 0.1}
    for number in (1, 2, 3, 4, 5):
        first.step(number, values, 0.5)
        if number % 2 == 0:
            first.held_out(number, 2.0)
    first.close()
    path = tmp_path / METRICS
    path.write_text(path.read_text() + '{"step": 6, "lo')  # it was killed there
    again = Report(tmp_path, 6, 10, {}, 4, path, stream=shown)
    again.held_out(4, 2.0)
    again.step(5, values, 0.5)
    again.step(6, values, 0.5)
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == again.rows
    assert [(r["step"], "loss" in r) for r in rows] == [
        (1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (6, True),
    ]  # fmt: skip
    assert rows[0]["loss"] == 1 / 3  # every digit
    assert "step 5/6, loss 0.333, held-out 2.000" in shown.getvalue().splitlines()[-2]
    assert "left ?" in shown.getvalue().splitlines()[-2] and "left 0:00" in shown.getvalue().splitlines()[-1]


def test_a_bar_begins_where_the_run_goes_on(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    report = Report(tmp_path, 6, 10, {}, 4, None, stream=shown)
    report.step(5, {"loss": 1.0, "lr": 0.1}, 0.5)
    report.close()
    assert "4/6" in shown.getvalue() and re.search(r"5/6.*loss 1\.000", shown.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_what_comes_before_the_first_step_is_shown(tmp_path, monkeypatch, terminal):
    """On the bar each kernel, among plain lines one in a while; once the report is closed nothing."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal, raising=False)
    logger = logging.getLogger("fnshard")
    before = logger.level, logger.propagate, list(logger.handlers)
    with Report(tmp_path, 6, 10, {}, stream=shown) as report:
        for number in (1, 2):
            logger.info("compiling %d of 8 kernels", number)
        report.step(1, {"loss": 1.0, "lr": 0.1}, 0.5)
    logger.info("compiling 3 of 8 kernels")
    assert [f"compiling {n} of 8 kernels" in shown.getvalue() for n in (1, 2, 3)] == [True, terminal, False]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


# ------------------------------------------------------------------ which folder


def leave_checkpoint(folder: Path, number: int = 4) -> None:
    """A checkpoint of something, whole."""
    specs = fs.match_specs({"w": torch.ones(2)}, [("*", fs.LayoutSpec())])
    params = {"w": torch.ones(2)}
    step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    fs.checkpoint.save(folder / CHECKPOINTS / str(number), step.init(params))


def test_the_same_configuration_goes_on_in_its_folder(here):
    asked = config_of()
    with claimed(asked, here / "first", chosen=False) as run:
        assert (run.folder, run.source) == (str(here / "first"), None)
        leave_checkpoint(here / "first")
    free = ("timeout_s=9", "save_every=7", "async_save=true", "keep=5", "max_restarts=0", "stop_grace_s=3")
    (here / "second" / ".hydra").mkdir(parents=True)
    with claimed(config_of(*(f"run.{f}" for f in free)), here / "second", chosen=False) as run:
        assert run.folder == str(here / "first") and not (here / "second").exists()
    for other in ("optimizer.lr=0.1", "run.seed=1", "run.steps=99", "mesh.shard=2"):
        with claimed(config_of(other), here / "other", chosen=False) as run:
            assert run.folder == str(here / "other")
    with claimed(asked, here / "third", chosen=False) as run:
        assert run.folder == str(here / "first")
        run.finish()
    with claimed(asked, here / "fourth", chosen=False) as run:
        assert run.folder == str(here / "fourth")


def test_never_begins_anew_and_is_gone_on_with_itself(here):
    for name in ("first", "second"):
        with claimed(config_of("run.resume=never"), here / name, chosen=False) as run:
            assert run.folder == str(here / name)
            leave_checkpoint(here / name)
    with claimed(config_of(), here / "third", chosen=False) as run:
        assert run.folder == str(here / "second")


def test_nothing_saved_is_nothing_to_go_on_from(here):
    for name in ("first", "second"):
        with claimed(config_of(), here / name, chosen=False) as run:
            assert run.folder == str(here / name)
            (here / name / CHECKPOINTS / ".4.saving").mkdir(parents=True)


def test_what_says_that_a_run_is_unfinished_outlives_a_power_cut(here, monkeypatch):
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
    with claimed(config_of(), here / "day" / "time", chosen=False) as run:
        leave_checkpoint(Path(run.folder))
        for path in (Path(run.note), Path(run.folder, IDENTITY)):
            at = done.index(("replace", str(path)))
            assert ("fsync", f"{path}.partial") in done[:at]
            assert ("fsync", str(path.parent)) in done[at:]
        for folder in (run.root, here / "day" / "time", here / "outputs", here / "outputs" / "unfinished"):
            at = done.index(("mkdir", str(folder)))
            assert ("fsync", str(folder.parent)) in done[at:], folder


def test_a_run_that_is_still_at_work_is_left_alone(here, capfd):
    with claimed(config_of(), here / "first", chosen=False):
        leave_checkpoint(here / "first")
        with claimed(config_of(), here / "second", chosen=False) as run:
            assert run.folder == str(here / "second") and run.note is None
        assert f"{here / 'first'} is still at work" in capfd.readouterr().err
        with (
            pytest.raises(
                ConfigError, match=r"another process is at work in .*first. Fix: end it, or another"
            ),
            claimed(config_of(), here / "first", chosen=True),
        ):
            pass
    with claimed(config_of(), here / "third", chosen=False) as run:
        assert run.folder == str(here / "first")


def test_a_folder_that_the_command_names(here):
    for _ in range(2):
        with claimed(config_of(), here / "named", chosen=True) as run:
            assert run.folder == str(here / "named") and run.note is None
    leave_checkpoint(here / "named", 40)
    with claimed(config_of("run.save_every=1"), here / "named", chosen=True) as run:
        assert run.folder == str(here / "named")
    with (
        pytest.raises(ConfigError, match=r"(?s)of another configuration, the newest of step 40:\n"
                      r"  optimizer.lr: 0.004 there, 0.1 here\nFix: another hydra.run.dir"),
        claimed(config_of("optimizer.lr=0.1"), here / "named", chosen=True),
    ):  # fmt: skip
        pass
    with (
        pytest.raises(
            ConfigError, match=r"run.resume=never: .*named holds checkpoints, the newest of step 40"
        ),
        claimed(config_of("run.resume=never"), here / "named", chosen=True),
    ):
        pass


def test_a_path_is_where_a_new_run_starts_and_its_own_checkpoints_come_first(here):
    leave_checkpoint(here / "source")
    asked = config_of("run.resume=source")
    with claimed(asked, here / "first", chosen=False) as run:
        assert (run.folder, run.source) == (str(here / "first"), str(here / "source" / CHECKPOINTS))
        leave_checkpoint(here / "first")
    with claimed(config_of(), here / "other", chosen=False) as run:
        assert (run.folder, run.source) == (str(here / "other"), None)
    (here / "source").rename(here / "gone")
    with claimed(asked, here / "second", chosen=False) as run:
        assert run.folder == str(here / "first")
        run.finish()
    with (
        pytest.raises(
            ConfigError, match=r"run\.resume=source: no whole checkpoint is there\. Fix: the folder"
        ),
        claimed(asked, here / "third", chosen=False),
    ):
        pass


def test_a_folder_is_held_by_one(tmp_path):
    with locked(tmp_path) as first, locked(tmp_path) as second:
        assert (first, second) == (True, False)
    with locked(tmp_path) as again:
        assert again


def test_a_sweep_goes_on_in_its_folder(here):
    arguments = ["--multirun", "strategy=full_shard,no_shard", "run.keep=3"]
    with claimed_sweep(arguments) as first:
        folder = first[-1].removeprefix("hydra.sweep.dir=").strip("'")
        assert first[:-1] == arguments and Path(folder).parent.parent == here / "multirun"
    with claimed_sweep(["--multirun", "run.keep=4", arguments[1]]) as again:
        assert again[-1] == first[-1]
        with claimed_sweep(arguments) as beside:  # the first is at work
            assert beside[-1] != first[-1]
        Path(folder, TABLE).write_text("done")
    with claimed_sweep(arguments) as anew, ExitStack():
        assert anew[-1] != first[-1]
    for others in (["strategy=no_shard"], ["-m", "a=1,2", "hydra.sweep.dir=x"]):
        with claimed_sweep(others) as same:
            assert same == others


def test_a_finished_run_of_a_sweep_is_known(tmp_path):
    config = config_of()
    with claimed(config, tmp_path, chosen=True):
        assert not finished(tmp_path, config)
        write_result(tmp_path, status="ok", overrides=[])
    assert finished(tmp_path, config) and finished(tmp_path, config_of("run.keep=9"))
    assert not finished(tmp_path, config_of("run.seed=9"))
    write_result(tmp_path, status="stopped", overrides=[])
    assert not finished(tmp_path, config)


def test_the_identity_is_json_and_knows_its_source():
    identity = identity_of(config_of(), "there")
    assert json.loads(json.dumps(identity)) == identity and identity["starts_from"] == "there"
    assert "resume" not in identity["run"] and "seed" in identity["run"]


# ------------------------------------------------------------------ from the command line


def test_the_same_command_again_after_sigterm(tmp_path, warm):
    """With a folder named by the clock; what the launcher is told reaches the ranks."""
    command = ["experiments.train", *RUN, "run.steps=3000", "run.sample_tokens=0"]
    shown = []
    for _ in range(2):
        job = warm.start(command, tmp_path)
        made = len(_rows(tmp_path))
        deadline = time.monotonic() + 120
        while len(_rows(tmp_path)) < made + 5:
            assert job.poll() is None and time.monotonic() < deadline, "no step was made"
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 0
        shown.append((tmp_path / OUTPUT["stdout"]).read_text())
    (folder,) = (f for f in tmp_path.glob("outputs/*/*") if f.is_dir())
    stopped = re.search(r"stopped: step (\d+) of 3000 is saved", shown[0])[1]
    assert f"resume: step {stopped} of {folder / CHECKPOINTS}" in shown[1]
    steps = [row["step"] for row in _rows(tmp_path) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > int(stopped)
    assert len(list(tmp_path.glob("outputs/unfinished/*.json"))) == 1


def _rows(place: Path) -> list[dict]:
    return [
        json.loads(line)
        for path in place.glob(f"outputs/*/*/{METRICS}")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
