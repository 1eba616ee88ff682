"""Trackers: written to for real, read back by their own libraries, resumed; dropped where they fail."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from errors import raises
from matplotlib import image
from runs import compose

from experiments.lib import trackers as feeds
from experiments.lib.checks import ConfigError
from experiments.lib.config import TrackerConfig
from experiments.lib.files import write_text
from experiments.lib.metrics import METRICS
from experiments.lib.record import RunRecord
from experiments.lib.report import Report
from experiments.lib.trackers import Feed, Row, RunInfo, Tracker, check_installed, choose_trackers

FACTS = {
    "command": "python -m experiments.train",
    "seed": 3,
    "git": {"revision": "abc", "dirty": False},
    "config": {"run": {"steps": 6, "prompt": None}},
}


def rows_of(first: int, last: int) -> list[Row]:
    """Return rows of steps, every second with a held-out loss after it."""
    rows: list[Row] = []
    for step in range(first, last + 1):
        rows.append({"step": step, "loss": 1 / step, "lr": 0.1})
        if step % 2 == 0:
            rows.append({"step": step, "held_out_loss": 2 / step})
    return rows


def process(folder: Path, tracker: Tracker, rows: Sequence[Row], end: str = "") -> None:
    """Follow one process's part of a run, whose file has these rows; without an `end` it is killed."""
    write_text(folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
    feed = Feed("kept", tracker, folder / METRICS, FACTS, print)
    feed.follow(at_once=True)
    if end:
        files = [folder / "loss.png", folder / "sample.txt"]
        image.imsave(files[0], numpy.linspace(0, 1, 16).reshape(4, 4))
        files[1].write_text("def f():\n    pass\n")
        feed.finish(end, files, seconds=1.5)
    assert not feed.failed


def whole(folder: Path, make: Callable[[], Tracker], killed: Callable[[], None] = lambda: None) -> None:
    """Make six steps by three processes: one is killed after step 5, the next resumes from step 3."""
    process(folder, make(), rows_of(1, 5))
    killed()
    process(folder, make(), rows_of(1, 6))
    killed()
    process(folder, make(), rows_of(1, 6), end="stopped")


LOSSES = [(step, pytest.approx(1 / step, rel=1e-6)) for step in range(1, 7)]
HELD_OUT = [(step, pytest.approx(2 / step, rel=1e-6)) for step in (2, 4, 6)]


# ------------------------------------------------------------------ each of them


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole(tmp_path, lambda: choose_trackers(TrackerConfig(tensorboard=True))["tensorboard"])
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(read.Tags()["scalars"]) == {"loss", "lr", "held_out_loss"}
    assert [(e.step, e.value) for e in read.Scalars("loss")] == LOSSES
    assert [(e.step, e.value) for e in read.Scalars("held_out_loss")] == HELD_OUT
    assert read.Tags()["images"] == ["loss"]
    texts = {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert '"seed": 3' in texts["run/text_summary"] and "def f():" in texts["sample.txt/text_summary"]
    assert '"seconds": 1.5' in texts["result/text_summary"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    whole(tmp_path / "run", lambda: choose_trackers(TrackerConfig(mlflow=True, project="mine"))["mlflow"])

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    assert history["loss"] == LOSSES and history["held_out_loss"] == HELD_OUT
    assert run.data.params["config.run.steps"] == "6" and run.data.params["seed"] == "3"
    assert run.data.tags["mlflow.source.git.commit"] == "abc" and run.data.tags["result.seconds"] == "1.5"
    assert run.info.status == "KILLED" and run.info.run_name == "run"
    assert {a.path for a in client.list_artifacts(run.info.run_id)} == {"loss.png", "sample.txt"}


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: three folders, one id; what is in them, by wandb's own messages."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked something"))
    import wandb

    # A process of wandb's own writes; it ends with the one that started it.
    whole(
        tmp_path, lambda: choose_trackers(TrackerConfig(wandb=True, project="mine"))["wandb"], wandb.teardown
    )
    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    starts = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert len(files) == 3 and len({run.run_id for run in starts}) == 1
    assert {run.project for run in starts} == {"mine"}
    rows = [
        {("/".join(i.nested_key) or i.key): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["loss"]) for row in rows if "lr" in row] == LOSSES
    assert [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row] == HELD_OUT
    assert any(key.startswith("pictures/loss") for row in rows for key in row)
    config = {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update if u.key}
    assert config["run"]["steps"] == 6 and config["facts"]["seed"] == 3
    assert list(tmp_path.glob("wandb/offline-run-*/files/sample.txt"))


def wandb_records(file: Path) -> list[Any]:
    """Read the records of an offline run: protobuf messages in a LevelDB log, after a head of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, out, part = file.read_bytes(), 7, [], b""
    block = 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            out.append(record)
            part = b""
    return out


# ------------------------------------------------------------------ the feed


class InMemory:
    """A tracker in memory. `fails`: what it does at a row of step 3."""

    def __init__(self, fails: Any = None):
        self.fails, self.rows, self.ended = fails, [], ""

    def start(self, run: RunInfo) -> str:
        self.run = run
        return "seven"

    def log(self, rows: Sequence[Row]) -> None:
        if self.fails and any(row["step"] == 3 for row in rows):
            self.fails()
        self.rows += rows

    def artifact(self, path: Path) -> None:
        self.rows.append({"step": 0, "artifact": path.name})

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self.ended = status


def full() -> None:
    raise OSError(28, "No space left on device")


def test_rows_come_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in batches; the next process skips what it writes again, and files come after the rows."""
    monkeypatch.setattr(feeds, "BATCH", 2)
    first, second, third = InMemory(), InMemory(), InMemory()
    process(tmp_path, first, rows_of(1, 5))
    assert first.rows == rows_of(1, 5) and first.run.id == ""
    process(tmp_path, second, rows_of(1, 6)[:-1])  # the held-out loss of step 6 is not written yet
    assert second.rows == rows_of(6, 6)[:1] and second.run.id == "seven"
    process(tmp_path, third, rows_of(1, 6), end="stopped")
    assert third.rows[:-2] == rows_of(6, 6)[1:] and third.ended == "stopped"
    assert [row["artifact"] for row in third.rows[-2:]] == ["loss.png", "sample.txt"]


def test_a_tracker_that_fails_is_reported_once_and_dropped(tmp_path: Path) -> None:
    """Training goes on; the others get all rows, also of a line that is only begun when they look."""
    shown, fine, broken = io.StringIO(), InMemory(), InMemory(full)
    report = Report(
        tmp_path, 6, 10, RunRecord(tmp_path, {}), stream=shown, trackers={"full": broken, "fine": fine}
    )
    for feed in report._feeds:
        feed.every_s = 0.0
    for number in range(1, 7):
        report._file.write('{"step": 0, ')
        report._file.flush()
        report._feeds[1].follow()
        report._file.write('"lr": 0.5}\n')
        report.step(number, {"loss": 1.0, "lr": 0.1}, 0.5)
    report.close()
    report.finish("ok")
    assert [line for line in shown.getvalue().splitlines() if "tracker" in line] == [
        "tracker full gets no more rows, training goes on: OSError: [Errno 28] No space left on device "
        "(all numbers are in metrics.jsonl)"
    ]
    assert [row["step"] for row in fine.rows if row["step"]] == list(range(1, 7)) and fine.ended == "ok"
    assert len(broken.rows) == 4 and broken.ended == ""


def test_a_tracker_that_hangs_is_reported_once_and_left_alone(tmp_path: Path) -> None:
    """A library may wait for its server for ever: no row waits for it a second time."""
    said, answered = [], threading.Event()
    tracker = InMemory(answered.wait)
    feed = Feed("slow", tracker, tmp_path / METRICS, FACTS, said.append, answers_s=0.05)
    with (tmp_path / METRICS).open("a") as file:
        for step in (2, 3, 4):
            print(json.dumps({"step": step, "loss": 1.0}), file=file, flush=True)
            feed.follow(at_once=True)
    feed.finish("ok")
    answered.set()
    assert len(said) == 1 and "tracker slow" in said[0] and "0.05 s" in said[0] and tracker.ended == ""


def test_rows_are_handed_over_in_batches_while_steps_are_made(tmp_path: Path) -> None:
    """A tracker is begun when it gets its first rows, which is not before the run has made a step."""
    tracker = InMemory()
    report = Report(tmp_path, 6, 10, RunRecord(tmp_path, {}), stream=io.StringIO(), trackers={"t": tracker})
    report.step(1, {"loss": 1.0, "lr": 0.1}, 0.5)
    assert not hasattr(tracker, "run") and tracker.rows == []
    report.step(2, {"loss": 1.0, "lr": 0.1}, 0.5)
    report.sync()
    assert [row["step"] for row in tracker.rows] == [1, 2]
    report.close()
    report.finish("ok")


# ------------------------------------------------------------------ choosing


def test_several_are_chosen_by_name() -> None:
    config = compose("tracker=[tensorboard,mlflow]").tracker
    assert config == TrackerConfig(tensorboard=True, mlflow=True)
    assert list(choose_trackers(config)) == ["tensorboard", "mlflow"]
    assert compose("tracker=wandb", "tracker.project=x").tracker == TrackerConfig(wandb=True, project="x")
    assert compose().tracker == TrackerConfig() and choose_trackers(TrackerConfig()) == {}


def test_what_is_not_installed_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TrackerConfig(wandb=True, tensorboard=True)
    fix = "pip install 'fnshard[tensorboard,wandb]'"
    with raises(ConfigError, leaves=["tracker=tensorboard", "tracker=wandb"], fix=fix):
        check_installed(config)
    check_installed(TrackerConfig())
