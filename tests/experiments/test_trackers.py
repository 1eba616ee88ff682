"""Trackers: written to for real, read back by their own libraries, gone on with; dropped where they fail."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from main_job import compose

from experiments.configs.train import ConfigError, TrackerConfig
from experiments.trackers import feed as feeds
from experiments.trackers.base import LogPosition, Row, RunInfo
from experiments.trackers.feed import Feed
from experiments.trackers.registry import check_installed, chosen
from experiments.training.metrics_file import METRICS
from experiments.training.progress import Progress
from experiments.training.report import Report

FACTS = {
    "command": "python -m experiments.train",
    "seed": 3,
    "git": {"revision": "abc", "dirty": False},
    "config": {"run": {"steps": 6, "prompt": None}},
}


def soon() -> float:
    return time.monotonic() + 60


def rows_of(first: int, last: int, every: int = 2) -> list[Row]:
    """Rows of steps, some with a held-out loss behind them."""
    rows: list[Row] = []
    for step in range(first, last + 1):
        rows.append({"step": step, "loss": 1 / step, "lr": 0.1})
        if step % every == 0:
            rows.append({"step": step, "held_out_loss": 2 / step})
    return rows


def followed(
    folder: Path, made: Any, rows: Sequence[Row], backlog: Sequence[Row] = (), end: str = ""
) -> None:
    """One process's part of a run; without an `end` it is killed behind its last hand-over."""
    feed = Feed(made, folder, every_s=0.01)
    feed.start(FACTS, backlog)
    for row in rows:
        feed.row(row)
    feed.flush(soon())
    if end:
        picture = folder / "loss.png"
        draw(picture)
        (folder / "sample.txt").write_text("def f():\n    pass\n")
        for path in (picture, folder / "sample.txt"):
            feed.artifact(path)
        feed.close(end, {"seconds": 1.5})
        feed.join(soon())
    assert not feed.dropped


def draw(path: Path) -> None:
    import numpy
    from matplotlib import image

    image.imsave(path, numpy.linspace(0, 1, 16).reshape(4, 4))


def whole(folder: Path, make: Any, killed: Callable[[], None] = lambda: None) -> None:
    """A run of six steps by three processes: one is killed behind step 5, the next goes on from step 3."""
    followed(folder, make(), rows_of(1, 5))
    killed()
    followed(folder, make(), rows_of(4, 6), backlog=rows_of(1, 3))
    killed()
    followed(folder, make(), [], backlog=rows_of(1, 6), end="ok")


LOSSES = [(step, pytest.approx(1 / step, rel=1e-6)) for step in range(1, 7)]
HELD_OUT = [(step, pytest.approx(2 / step, rel=1e-6)) for step in (2, 4, 6)]


# ------------------------------------------------------------------ each of them


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole(tmp_path, lambda: chosen(TrackerConfig(tensorboard=True))[0])
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(read.Tags()["scalars"]) == {"loss", "lr", "held_out_loss"}
    assert [(e.step, e.value) for e in read.Scalars("loss")] == LOSSES
    assert [(e.step, e.value) for e in read.Scalars("held_out_loss")] == HELD_OUT
    assert read.Tags()["images"] == ["loss"]
    texts = {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert '"seed": 3' in texts["run/text_summary"] and "def f():" in texts["sample.txt/text_summary"]
    assert '"seconds": 1.5' in texts["result/text_summary"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store is asked what it holds: a note that was lost with a killed process repeats nothing."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    make = lambda: chosen(TrackerConfig(mlflow=True, project="mine"))[0]  # noqa: E731
    folder = tmp_path / "run"
    folder.mkdir()
    followed(folder, make(), rows_of(1, 5))
    note = folder / feeds.FOLDER / "mlflow.json"
    before = json.loads(note.read_text())
    note.write_text(json.dumps({**before, "at": [3, False]}))  # killed before it was noted
    followed(folder, make(), rows_of(4, 6), backlog=rows_of(1, 3))
    followed(folder, make(), [], backlog=rows_of(1, 6), end="stopped")

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
    whole(tmp_path, lambda: chosen(TrackerConfig(wandb=True, project="mine"))[0], wandb.teardown)
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
    told = {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update if u.key}
    assert told["run"]["steps"] == 6 and told["facts"]["seed"] == 3
    assert list(tmp_path.glob("wandb/offline-run-*/files/sample.txt"))


def wandb_records(file: Path) -> list[Any]:
    """The records of an offline run: a LevelDB log behind a head of seven bytes, each a protobuf message."""
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


class Kept:
    """A tracker in memory. `fails`: what it does at a row of step 3."""

    def __init__(self, fails: Any = None, name: str = "kept"):
        self.fails, self.rows, self.ended, self.name = fails, [], "", name

    def start(self, told: RunInfo) -> tuple[Mapping[str, Any], LogPosition]:
        self.told = told
        return {"id": 7}, told.at

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


def test_rows_come_once_and_in_order(tmp_path: Path) -> None:
    kept = Kept()
    followed(tmp_path, kept, rows_of(1, 4), end="stopped")
    assert kept.rows[:-2] == rows_of(1, 4) and kept.told.known == {} and kept.ended == "stopped"
    assert [row["artifact"] for row in kept.rows[-2:]] == ["loss.png", "sample.txt"]
    again = Kept()
    followed(tmp_path, again, rows_of(4, 5), backlog=rows_of(1, 3))
    assert again.rows == rows_of(5, 5) and again.told.known == {"id": 7}
    late = Kept()  # the held-out loss of step 6 was not told yet
    followed(tmp_path, late, rows_of(6, 6)[:1])
    followed(tmp_path, late, rows_of(6, 6))
    assert late.rows == rows_of(6, 6)


def test_what_was_not_handed_over_comes_from_the_runs_rows(tmp_path: Path) -> None:
    first = Feed(Kept(), tmp_path, every_s=60)
    first.start(FACTS, rows_of(1, 2))
    first.flush(soon())
    first.row(rows_of(3, 3)[0])  # and it is killed
    kept = Kept()
    followed(tmp_path, kept, rows_of(4, 4), backlog=rows_of(1, 3))
    assert kept.rows == rows_of(3, 4)


def test_a_tracker_that_fails_is_told_of_once_and_dropped(tmp_path: Path) -> None:
    shown = io.StringIO()
    report = Report(tmp_path, 6, 10, stream=shown, trackers=[Kept(full), fine := Kept(name="fine")])
    for number in range(1, 7):
        report.step(number, {"loss": 1.0, "lr": 0.1}, 0.5)
        report.sync()
    report.close()
    report.finish("ok")
    lines = [line for line in shown.getvalue().splitlines() if "tracker" in line]
    assert lines == [
        "tracker kept gets no more rows, training goes on: OSError: [Errno 28] No space left on device "
        "(all numbers are in metrics.jsonl)"
    ]
    assert [row["step"] for row in fine.rows] == list(range(1, 7)) and fine.ended == "ok"
    assert len((tmp_path / METRICS).read_text().splitlines()) == 6


def test_a_tracker_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    lines, free = [], threading.Event()
    kept = Kept(lambda: free.wait(60))
    feed = Feed(kept, tmp_path, lines.append, every_s=0.01)
    feed.start(FACTS, rows_of(1, 3))
    began = time.monotonic()
    feed.flush(began + 0.3)
    assert 0.25 < time.monotonic() - began < 10 and feed.dropped
    feed.row(rows_of(4, 4)[0])
    feed.flush(time.monotonic() + 60)
    feed.close("ok", {})
    feed.join(time.monotonic() + 60)
    assert time.monotonic() - began < 10
    assert len(lines) == 1 and "it does not answer" in lines[0]
    free.set()


def test_a_tracker_that_falls_behind_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MOST", 3)
    lines, free = [], threading.Event()
    feed = Feed(Kept(lambda: free.wait(60)), tmp_path, lines.append)
    feed.start(FACTS, rows_of(1, 1))
    for row in rows_of(2, 5, every=9):
        feed.row(row)
    assert feed.dropped and "3 rows behind" in lines[0] and len(lines) == 1
    free.set()
    feed.join(soon())


def test_rows_of_an_earlier_process_are_logged_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "BATCH", 2)
    kept = Kept()
    followed(tmp_path, kept, rows_of(6, 6), backlog=rows_of(1, 5))
    assert kept.rows == rows_of(1, 6)


def test_a_tracker_that_cannot_start_is_dropped(tmp_path: Path) -> None:
    lines, kept = [], Kept()
    kept.start = lambda told: full()
    feed = Feed(kept, tmp_path, lines.append)
    feed.start(FACTS, [])
    feed.close("ok", {})
    feed.join(soon())
    assert feed.dropped and "No space left" in lines[0]


# ------------------------------------------------------------------ choosing


def test_several_are_chosen_by_name() -> None:
    config = compose("tracker=[tensorboard,mlflow]").tracker
    assert config == TrackerConfig(tensorboard=True, mlflow=True)
    assert [t.name for t in chosen(config)] == ["tensorboard", "mlflow"]
    assert compose("tracker=wandb", "tracker.project=x").tracker == TrackerConfig(wandb=True, project="x")
    assert compose().tracker == TrackerConfig() and chosen(TrackerConfig()) == []


def test_what_is_not_installed_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = TrackerConfig(wandb=True, tensorboard=True)
    wanted = r"tracker=tensorboard: .*\n.*tracker=wandb: .*\nFix: pip install 'fnshard\[tensorboard,wandb\]'"
    with pytest.raises(ConfigError, match=wanted):
        check_installed(asked)
    check_installed(TrackerConfig())


# ------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging
    import sys

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    progress = Progress(shown, 4)
    progress.step(1, "loss 1.000")
    print("a line", "of two words")
    print("no end", end="")
    logging.getLogger("somebody").warning("a warning")
    progress.say("said")
    progress.close()
    assert (sys.stdout, sys.stderr) == (shown, shown)
    lines = [line.rsplit("\r", 1)[-1] for line in shown.getvalue().split("\n")]
    for wanted in ("a line of two words", "a warning", "said"):
        assert wanted in lines, lines
    assert re.search(r"1/4 .*loss 1\.000", shown.getvalue()) and shown.getvalue().endswith("no end")
