"""Exact resume: what is killed, or asked to stop, and started again, is what was never interrupted."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import OUTPUT, start_command
from errors import raises
from runs import (
    DOUBLE,
    RUN,
    STEPS,
    After,
    KilledError,
    compose,
    config_of,
    differences,
    kill_at,
    remember_steps,
    rows_of,
    run_in,
    timeless,
)

import fnshard as fs
from experiments import train
from experiments.lib.checks import ConfigError
from experiments.lib.folder import CHECKPOINTS, RunFolder, claim, memory_name, read_result, source_of
from experiments.lib.metrics import METRICS
from fnshard.errors import CheckpointError
from fnshard.launcher.rank import Stop
from fnshard.mesh.process_group import ATTEMPT
from fnshard.runtime.files.folder import MEMORY

pytestmark = pytest.mark.usefixtures("lowered_once")


@pytest.fixture(scope="module")
def unbroken(lowered_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train.train(config_of(), run_in(folder), [], Stop())
    return folder


# ------------------------------------------------------------------ the loop, in this process


def test_the_unbroken_run_is_whole(unbroken):
    rows = rows_of(unbroken)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in rows if "held_out_loss" in r] == [4, 8, 12, STEPS]
    assert fs.checkpoint.all_steps(unbroken / CHECKPOINTS) == [12, STEPS]
    saved = fs.checkpoint.manifest(unbroken / CHECKPOINTS / "12").metrics
    assert saved["held_out"] == rows[-3]["held_out_loss"]


@pytest.mark.suite({
    "async-8-True-4": "while a save is written",
    "sync-13-True-12": "before the last save",
})  # fmt: skip
@pytest.mark.parametrize(
    ("how", "at", "before_save", "goes_on"),
    [("sync", 3, False, 0), ("async", 6, False, 4), ("async", 8, True, 4),
     ("sync", STEPS, True, 12)],
)  # fmt: skip
def test_killed_and_started_again(unbroken, tmp_path, monkeypatch, capfd, how, at, before_save, goes_on):
    config = config_of(f"run.async_save={str(how == 'async').lower()}")
    with monkeypatch.context() as patch:
        kill_at(patch, at, before_save=before_save)
        with pytest.raises(KilledError, match=r"^$"):
            train.train(config, run_in(tmp_path), [], Stop())
    fs.checkpoint.wait()
    capfd.readouterr()
    train.train(config, run_in(tmp_path), [], Stop())
    said = capfd.readouterr().out
    assert (f"resume: step {goes_on} of {tmp_path / CHECKPOINTS}" in said) == bool(goes_on)
    assert (f"resume: nothing to go on from, a new run in {tmp_path}\n" in said) != bool(goes_on)
    assert differences(unbroken, tmp_path) == []


@pytest.mark.long  # test_killed_and_started_again is killed once
def test_killed_again_and_again(unbroken, tmp_path, monkeypatch):
    for at in (5, 6, 9, 10, STEPS):
        with monkeypatch.context() as patch:
            kill_at(patch, at)
            with pytest.raises(KilledError, match=r"^$"):
                train.train(config_of(), run_in(tmp_path), [], Stop())
    for _ in range(2):  # finished, it stays as it is
        train.train(config_of(), run_in(tmp_path), [], Stop())
        assert differences(unbroken, tmp_path) == []


@pytest.mark.long
def test_with_replicas_no_step_is_made_again(unbroken, tmp_path, monkeypatch, capfd):
    """Killed, it resumes from memory; with memory lost from disk, and says so in one line."""
    memory, run = tmp_path / "memory", run_in(tmp_path / "run")
    memory.mkdir()
    monkeypatch.setenv(MEMORY, str(memory))
    save = fs.checkpoint.Replicas.save  # complete before the kill: else the step before is found

    def saved(self: fs.checkpoint.Replicas, *args: Any) -> None:
        save(self, *args)
        self.wait()

    monkeypatch.setattr(fs.checkpoint.Replicas, "save", saved)
    memory /= f"fnshard-memory-{memory_name(Path(run.folder))}"
    for at, after_held_out in ((3, False), (7, False), (8, True), (STEPS, False)):
        with monkeypatch.context() as patch:
            kill_at(patch, at, before_save=after_held_out)
            with pytest.raises(KilledError, match=r"^$"):
                train.train(config_of("run.replicas=1"), run, [], Stop())
    assert re.findall(r"resume: step (\d+) of (.*)", capfd.readouterr().out) == [
        (at, str(memory)) for at in ("2", "6", "8")
    ]
    for part in memory.glob("*/*.json"):
        part.write_bytes(part.read_bytes()[:-20])
    monkeypatch.setenv(ATTEMPT, "1")
    train.train(config_of("run.replicas=1"), run, [], Stop())
    printed = capfd.readouterr().out
    assert not memory.exists()
    assert f"replicas: no step is complete in memory, going on from {run.checkpoints}\n" in printed
    assert f"resume: step 12 of {run.checkpoints}\n" in printed
    assert "of each node's host memory" in Path(run.folder, "memory.txt").read_text()
    assert differences(unbroken, Path(run.folder)) == []


@pytest.mark.suite({
    "1": "in the first step",
})  # fmt: skip
@pytest.mark.parametrize("at", [1, STEPS - 1])
def test_asked_to_stop(unbroken, tmp_path, capfd, at):
    """The step is finished and saved; no held-out loss is waited for; the next start has them all."""
    train.train(config_of(), run_in(tmp_path), [], After(at))
    said = capfd.readouterr().out
    at += 1  # the flag reaches all ranks a step later
    assert f"stopped: step {at} of {STEPS} is saved; the same command goes on from there" in said
    assert f"run.resume={tmp_path}" in said
    assert read_result(tmp_path) == {"status": "stopped", "overrides": [], "step": at}
    assert fs.checkpoint.all_steps(tmp_path / CHECKPOINTS)[-1] == at
    train.train(config_of(), run_in(tmp_path), [], Stop())
    assert differences(unbroken, tmp_path) == []


def test_a_torn_checkpoint_is_passed_over(unbroken, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        kill_at(patch, 10)
        with pytest.raises(KilledError, match=r"^$"):
            train.train(config_of(), run_in(tmp_path), [], Stop())
    (data,) = (tmp_path / CHECKPOINTS / "8").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 4
    data.write_bytes(content)
    with pytest.warns(fs.errors.CheckpointWarning, match="is not what was written"):
        train.train(config_of(), run_in(tmp_path), [], Stop())
    assert f"resume: step 4 of {tmp_path}" in capfd.readouterr().out
    assert differences(unbroken, tmp_path) == []


def test_a_save_that_fails_is_reported_and_training_continues(unbroken, tmp_path, monkeypatch, capfd):
    save = fs.checkpoint.save

    def full(path: Path, *args: Any, **how: Any) -> Path:
        if path.name == "8":
            raise CheckpointError("cannot save 8: no space left on device")
        return save(path, *args, **how)

    monkeypatch.setattr(fs.checkpoint, "save", full)
    train.train(config_of("run.keep=9"), run_in(tmp_path), [], Stop())
    assert "not saved, training goes on: cannot save 8: no space left" in capfd.readouterr().err
    assert fs.checkpoint.all_steps(tmp_path / CHECKPOINTS) == [4, 12, STEPS]
    assert differences(unbroken, tmp_path) == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_last_save_that_fails_fails_the_run(cwd, how):
    """Nobody would write it again; the run stays unfinished."""
    config = config_of("run.save_every=0", f"run.async_save={str(how == 'async').lower()}")
    with claim(config, cwd / "r", chosen=False) as run:
        (cwd / "r" / CHECKPOINTS).touch()
        with raises(CheckpointError, leaves=[f"{cwd}/r/{CHECKPOINTS}/{STEPS}", "rank 0"]):
            train.train(config, run, [], Stop())
        assert read_result(cwd / "r")["status"] != "ok"
        assert json.loads((cwd / "r" / "run.json").read_text())["status"] == "failed"


@pytest.mark.long
def test_only_at_the_end_and_what_stays(tmp_path):
    train.train(config_of("run.save_every=0"), run_in(tmp_path / "end"), [], Stop())
    assert fs.checkpoint.all_steps(tmp_path / "end" / CHECKPOINTS) == [STEPS]
    more = ("run.save_every=1", "run.keep=1", "run.keep_every=5", "run.keep_best=1")
    train.train(config_of(*more), run_in(tmp_path / "more"), [], Stop())
    rows = [json.loads(line) for line in (tmp_path / "more" / METRICS).read_text().splitlines()]
    best = min((r["held_out_loss"], r["step"]) for r in rows if "held_out_loss" in r)[1]
    assert fs.checkpoint.all_steps(tmp_path / "more" / CHECKPOINTS) == sorted({5, 10, STEPS, best})


@pytest.mark.long
def test_from_another_runs_checkpoint(unbroken, tmp_path, capfd):
    """Its metrics come along; what the configuration changes is changed from there on."""
    source = source_of(str(unbroken))
    assert source == str(unbroken / CHECKPOINTS)
    assert source_of(str(unbroken / CHECKPOINTS / "12")) == str(unbroken / CHECKPOINTS / "12")
    run = replace(run_in(tmp_path), source=str(unbroken / CHECKPOINTS / "12"))
    train.train(config_of("optimizer.lr=0.02"), run, [], Stop())
    assert f"resume: step 12 of {unbroken / CHECKPOINTS / '12'}" in capfd.readouterr().out
    before, after = (rows_of(f) for f in (unbroken, tmp_path))
    assert after[:14] == before[:14] and [r["step"] for r in after] == [r["step"] for r in before]
    assert after[-2]["lr"] == pytest.approx(5 * before[-2]["lr"])
    assert after[-2]["loss"] == before[-2]["loss"]  # it is before the update
    assert after[-1] != before[-1]
    with raises(ConfigError, leaves="rows: saved 8, here 4", fix="run.resume=never"):
        train.train(config_of("data.rows=4"), replace(run_in(tmp_path / "rows"), source=source), [], Stop())
    with raises(CheckpointError, leaves="another model"):
        train.train(
            config_of("model.width=32"), replace(run_in(tmp_path / "wide"), source=source), [], Stop()
        )


# ------------------------------------------------------------------ two ranks


TWO = (*RUN, "model.layers=1", "run.sample_tokens=0", "run.steps=10")
ON_RANK: dict[str, Any] = {}  # what a rank of the pool has prepared


def on_two(rank: int, folder: str, async_save: str, stop_at: int, stops: int) -> None:
    """Train on this rank; rank `stops` alone is asked before its step `stop_at`: all stop after the next."""
    stop = After(stop_at) if rank == stops else Stop()
    config = compose(*TWO, "mesh.shard=2", f"run.async_save={async_save}")
    Path(folder).mkdir(exist_ok=True)
    with remember_steps(ON_RANK):
        train.train(config, RunFolder(folder), [], stop)
    fs.checkpoint.wait()


@pytest.mark.long  # test_the_same_command_again asks all of them
def test_any_rank_that_is_asked_stops_all(ranks: Any, tmp_path: Path) -> None:
    """And the other mesh's run continues from there within rounding."""
    two, whole, one = (tmp_path / name for name in ("two", "whole", "one"))
    ranks(2).run(on_two, str(whole), "false", 99, 0)
    assert read_result(whole)["status"] == "ok"
    for at, (stops, async_save) in enumerate([(1, "false"), (0, "true")], 3):
        ranks(2).run(on_two, str(two), async_save, at, stops)
        assert read_result(two)["status"] == "stopped"
    assert read_result(two)["step"] == 3 + 1 + 4 + 1
    train.train(config_of(*TWO), replace(run_in(one), source=str(two / CHECKPOINTS)), [], Stop())
    ranks(2).run(on_two, str(two), "true", 99, 0)
    assert differences(whole, two) == []
    losses = [
        [json.loads(line).get("loss") for line in (f / METRICS).read_text().splitlines()]
        for f in (whole, one)
    ]
    # Other meshes sum in another order, so the second half differs in its last digits.
    assert losses[1] != losses[0]
    assert losses[1] == [v and pytest.approx(v, rel=1e-5) for v in losses[0]]


SPLIT = (*RUN, "model.layers=1", "run.steps=2", "run.save_every=1", "run.held_out_every=2",
         "run.sample_tokens=0", "model.kv_heads=2", *DOUBLE)  # fmt: skip


def split_in_two(rank: int, folder: str, source: str, axis: str) -> None:
    train.train(compose(*SPLIT, "mesh.shard=1", axis), RunFolder(folder, source=source), [], Stop())


@pytest.mark.long
@pytest.mark.parametrize("axis", ["mesh.context=2", "mesh.tensor=2", "mesh.pipeline=2"])
def test_ranks_that_split_the_same_rows_are_one_rank(ranks: Any, tmp_path: Path, axis: str) -> None:
    """They resume its checkpoint. What loaders give them is test_loaders', numbers are test_matrix's."""
    one, two = tmp_path / "one", tmp_path / "two"
    train.train(compose(*SPLIT, "mesh.shard=1"), run_in(one), [], Stop())
    ranks(2).run(split_in_two, str(run_in(two).folder), str(one / CHECKPOINTS / "1"), axis)
    expected = timeless(one)
    assert len(expected) == 2 + 1
    assert [pytest.approx(row, rel=1e-10) for row in timeless(two)] == expected


# ------------------------------------------------------------------ from the command line


def test_the_same_command_again_after_sigterm_and_after_ctrl_c(tmp_path):
    """The folder is named by the clock, and a signal to the launcher reaches the ranks."""
    command = ["-m", "experiments.train", *RUN, "mesh.shard=1", "run.steps=3000", "run.sample_tokens=0"]
    shown = []
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        job = start_command(command, tmp_path)
        made = len(_rows(tmp_path))
        deadline = time.monotonic() + 120
        while len(_rows(tmp_path)) < made + 5:
            assert job.poll() is None and time.monotonic() < deadline, "no step was made"
            time.sleep(0.02)
        job.send_signal(number)
        assert job.wait(timeout=60) == code
        shown.append((tmp_path / OUTPUT["stdout"]).read_text())
    (folder,) = (f for f in tmp_path.glob("outputs/*/*") if f.is_dir())
    stopped = re.search(r"stopped: step (\d+) of 3000 is saved", shown[0])[1]
    assert f"resume: step {stopped} of {folder / CHECKPOINTS}" in shown[1]
    interrupted = (tmp_path / OUTPUT["stderr"]).read_text()
    reached, saved = map(
        int, re.search(r"interrupted: step (\d+); .* goes on from (\d+)\n", interrupted).groups()
    )
    assert reached >= saved >= int(stopped) and (folder / CHECKPOINTS / str(saved)).is_dir()
    steps = [row["step"] for row in _rows(tmp_path) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > int(stopped)


def _rows(place: Path) -> list[dict]:
    return [
        json.loads(line)
        for path in place.glob(f"outputs/*/*/{METRICS}")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
