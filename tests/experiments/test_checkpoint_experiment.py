"""experiments.checkpoint runs, restores what was saved, and its tables hold what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Warm

import fnshard as fs
from experiments.checkpoint import report, throughput, training
from experiments.checkpoint.job import CheckpointJob, world

ROOT = Path(__file__).resolve().parents[2]


def job(folder: Path, **more: Any) -> CheckpointJob:
    return CheckpointJob(
        part="both", folder=str(folder), size="tiny", backend="eager", rounds=2, length=16, **more
    )


def test_both_contenders_save_and_restore_in_turn(tmp_path: Path) -> None:
    found = throughput.measure(job(tmp_path), world())
    kinds = ["save", *(f"restore {kind}, {way}" for kind in ("warm", "cold") for way in ("new", "in place"))]
    assert sorted(found["seconds"]) == sorted(kinds)
    for seconds in found["seconds"].values():
        assert {n: len(s) for n, s in seconds.items()} == {"fnshard": 2, "dcp": 2}
    assert list(tmp_path.iterdir()) == []
    assert f"{found['bytes'] / 1e6:.0f} MB of state" in report.throughput(1, found)


def test_what_was_not_restored_right_is_no_measurement() -> None:
    saved = {"a": torch.ones(2), "b": torch.zeros(2)}
    throughput.compare(saved, dict(saved))
    with pytest.raises(AssertionError, match="b is not what was saved"):
        throughput.compare(saved, {**saved, "b": torch.ones(2)})


def test_windows_with_and_without_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = []
    plain = fs.checkpoint.save
    monkeypatch.setattr(fs.checkpoint, "save", lambda path, state: saves.append(path) or plain(path, state))
    found = training.measure(job(tmp_path, steps=3, every=2), world())
    assert len(saves) == 2 * 3  # two in each of three windows
    assert found["saves"] == 2 and all(len(w["wall"]) == 2 for w in found["windows"].values())
    assert list(tmp_path.iterdir()) == []
    assert report.training(1, found).count("| async |") == 2


def test_a_ratio_is_that_of_pairs() -> None:
    seconds = {"save": {"fnshard": [1.0, 2.0, 4.0], "dcp": [2.0, 2.0, 2.0]}}
    told = report.throughput(2, {"leaves": 1, "bytes": 2_000_000, "seconds": seconds})
    assert "| save | 1 | 1 | 1.00 | 0.75 to 1.50 |" in told


def test_the_command_line(tmp_path: Path, warm: Warm) -> None:
    options = ["--part=throughput", "--ranks=1", "--size=tiny", "--backend=eager", "--rounds=1"]
    done = warm.run(["experiments.checkpoint", *options, f"--out={tmp_path}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout
    assert json.loads((tmp_path / "checkpoint-1.json").read_text())["throughput"]["leaves"] > 0
