"""Watching a run: what it records, NaN hunted down, a trace; with planted faults."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises
from runs import RUN, After, compose, config_of, run_in

import fnshard as fs
from experiments import train
from experiments.lib import task
from experiments.lib.folder import CHECKPOINTS, RunFolder, read_result
from experiments.lib.metrics import METRICS
from experiments.lib.record import PARTS, RunRecord, git_of, in_words
from experiments.lib.record import RUN as RUN_FILE
from experiments.lib.watchdog import DivergedError, fault_of, is_finite
from fnshard.launcher.rank import Stop

pytestmark = pytest.mark.usefixtures("lowered_once")  # equal runs share one lowering, and draw nothing


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RUN_FILE).read_text())


def losses_in(folder: Path) -> list[float]:
    lines = (folder / METRICS).read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


# ------------------------------------------------------------------ what a run records


def test_a_run_records_what_it_is_and_what_it_took(tmp_path: Path, capfd: Any) -> None:
    """Stopped after step 5 and resumed: two processes, one run."""
    train.train(config_of(), run_in(tmp_path), ["run.steps=13"], After(4))  # all ranks know after step 5
    stopped = record_of(tmp_path)
    assert stopped["status"] == "stopped" and stopped["totals"]["steps"] == 5
    train.train(config_of(), run_in(tmp_path), ["run.steps=13"], Stop())
    record, result = record_of(tmp_path), read_result(tmp_path)
    assert record["status"] == "ok" and record["command"] == "python -m experiments.train run.steps=13"
    assert record["seed"] == 0 and record["config"]["run"]["steps"] == 13
    assert record["packages"]["torch"] == torch.__version__
    hardware = record["hardware"]
    assert hardware["device"] == "cpu" and hardware["ranks"] == 1 and len(hardware["hosts"]) == 1
    assert hardware["cores"] >= 1 and hardware["system"]
    assert [a["steps"] for a in record["attempts"]] == [[0, 5], [5, 13]]
    totals = record["totals"]
    assert totals["steps"] == 13 and totals["loss"] == losses_in(tmp_path)[-1]
    assert totals["seconds"] == pytest.approx(sum(a["seconds"] for a in record["attempts"]), abs=1e-3)
    for name in PARTS:
        parts = [a["spent_s"][name] for a in record["attempts"]]
        assert totals[f"{name}_s"] == pytest.approx(sum(parts), abs=1e-3)
        assert totals[f"{name}_s"] > 0 or name in ("compile", "rollouts", "export", "tracing"), name
        assert result[f"{name}_s"] == totals[f"{name}_s"]
    assert sum(totals[f"{name}_s"] for name in PARTS) == pytest.approx(totals["seconds"], abs=0.01)
    assert totals["compile_s"] == 0  # of run.backend=eager
    assert 0 < totals["predicted_peak_bytes"] < totals["process_peak_bytes"]
    assert record["goal"] == {"name": "loss", "unit": "nats per byte", "is_maximised": False}
    assert set(record["attention"]) == {"flash on the CPU"}
    assert "mfu" not in totals and totals["flops_per_token"] > 0
    said = capfd.readouterr().out
    assert "13 steps in" in said and "MFU" not in said and "compile" not in said and "spent on: " in said


def test_the_commit_is_recorded_and_whether_it_is_changed(tmp_path: Path) -> None:
    import subprocess

    def git(*arguments: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.strip()

    file, other = tmp_path / "code.py", tmp_path / "other.py"
    file.write_text("a = 1\n")
    other.write_text("b = 1\n")
    assert git_of(file) is None
    git("init")
    git("add", "code.py")
    git("commit", "-m", "first")
    assert git_of(file) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("a = 2\n")
    assert git_of(file)["dirty"] and git_of(other) is None


def test_a_record_continues_that_of_a_killed_process(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, {"seed": 1})
    first.timer.seconds["data"] = 2.0
    first.write("running", 4, {"flash": 2}, mfu=0.5)
    again = RunRecord(tmp_path, {"seed": 1}, made=4)
    again.timer.seconds["data"] = 3.0
    totals = again.write("ok", 6, mfu=math.nan)
    assert totals["data_s"] == 5.0 and totals["mfu"] == 0.5
    assert [a["steps"] for a in record_of(tmp_path)["attempts"]] == [[0, 4], [4, 6]]
    assert record_of(tmp_path)["attention"] == {"flash": 2}
    assert "MFU 50.0%" in in_words({**totals, "tokens_per_s": 10.0})


# ------------------------------------------------------------------ NaN


def rates(monkeypatch: pytest.MonkeyPatch, at: int, bad: float) -> None:
    """Let the rate be `bad` from step `at` on. Steps count from 1."""
    good, bad = torch.tensor([1e-3, bad], dtype=torch.float64)
    monkeypatch.setattr(task, "make_rate", lambda *_: lambda step: torch.where(step + 1 >= at, bad, good))


def test_nan_is_hunted_down_from_the_newest_checkpoint(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """An update of step 6 is far too large; the loss of step 7 shows it."""
    rates(monkeypatch, 6, 1e30)
    config = config_of("optimizer.clip=null", "run.seed=1")
    # What overflows first, and whether the loss or a gradient shows it, is the processor's kernels' choice.
    with raises(DivergedError, leaves="step 7", says="nan") as caught:
        train.train(config, run_in(tmp_path), [], Stop())
    text = str(caught.value)
    assert re.search(r"In step 7: (inf|NaN) arose at line \d+: \w+ [\w.]+ (run|update) .*\n +in ", text), text
    assert "looked for in" in text and "Fix: " in text
    assert "from step 4, 2 steps are made again" in capfd.readouterr().err
    assert fs.checkpoint.all_steps(tmp_path / CHECKPOINTS) == [4]
    losses = losses_in(tmp_path)
    assert len(losses) == 8 and all(map(math.isfinite, losses[:6]))  # step 8 was launched when 7 was read
    assert record_of(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path: Path, monkeypatch: Any, save_every: int) -> None:
    """The update of step 3 makes it: before its save that is seen, or else by the loss of step 4."""
    rates(monkeypatch, 3, 1e39)
    config = config_of("optimizer.clip=null", "run.seed=2", f"run.save_every={save_every}")
    at = 3 if save_every else 4
    with raises(DivergedError, leaves=f"step {at}") as caught:
        train.train(config, run_in(tmp_path), [], Stop())
    assert "In step 3: " in str(caught.value) and "update" in str(caught.value)
    saved = fs.checkpoint.all_steps(tmp_path / CHECKPOINTS)
    assert saved == ([1, 2] if save_every else [])
    for number in saved:
        assert fs.checkpoint.verify(tmp_path / CHECKPOINTS / str(number))


@pytest.mark.long
def test_stop_only_ends_and_off_goes_on(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    rates(monkeypatch, 2, 1e30)
    more = ("optimizer.clip=null", "run.seed=3", "run.steps=5", "run.sample_tokens=0")
    with raises(DivergedError, leaves="step 3", says="nan"):
        train.train(config_of(*more, "run.watch=stop"), run_in(tmp_path / "stop"), [], Stop())
    assert "looking for" not in capfd.readouterr().err
    train.train(config_of(*more, "run.watch=off"), run_in(tmp_path / "off"), [], Stop())
    assert len(losses_in(tmp_path / "off")) == 5


FAR = ("optimizer.lr=1e30", "optimizer.clip=null", "schedule=constant")


def diverges(rank: int, folder: str) -> tuple[str, list[int]]:
    """Return the message that ends the run on this rank, and the steps of checkpoints."""
    config = compose(*RUN, *FAR, "mesh.shard=2", "run.save_every=1")
    Path(folder).mkdir(exist_ok=True)
    try:
        train.train(config, RunFolder(folder), [], Stop())
    except DivergedError as error:
        return str(error).partition("\n(looked")[0], fs.checkpoint.all_steps(Path(folder) / CHECKPOINTS)
    return "", []


@pytest.mark.long  # test_nan_is_hunted_down is of one rank
def test_all_ranks_report_where_it_arose(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(diverges, str(tmp_path / "two"))
    assert first == second and "In step 2: " in first[0] and first[1] == [1]


def test_what_is_a_fault() -> None:
    assert fault_of({"loss": 1.0, "grad_norm": 2.0}) == "" == fault_of({"loss": 1.0})
    assert fault_of({"loss": math.nan, "grad_norm": math.inf}) == "loss is nan and grad_norm is inf"
    assert fault_of({"loss": math.inf, "lr": 0.1}) == "loss is inf"
    assert fault_of({"loss": 1.0, "grad_norm": math.inf, "loss_scale": 1024.0}) == ""  # that step was skipped
    fault = fault_of({"loss": 1.0, "grad_norm": math.inf, "loss_scale": 1.0})
    assert fault == "grad_norm is inf, beside a finite loss of 1"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["params", "opt_state"])
def test_a_state_is_finite_or_not(bad: float, of: str) -> None:
    step = fs.shard_step(
        lambda p, x: (p["w"] * x).sum(), fs.match_specs({"w": torch.ones(3)}, [("*", fs.LayoutSpec())]),
        optimizer=fs.optim.adamw(1e-3), backend="eager",
    )  # fmt: skip
    state = step.init({"w": torch.ones(3)})
    assert is_finite(step, state)
    fs.tree.flatten(getattr(state, of))[0][-1][1] = bad
    assert not is_finite(step, state)


# ------------------------------------------------------------------ a trace


@pytest.mark.long  # the test below traces, too
def test_profile_traces_steps_from_the_third_on(tmp_path: Path, capfd: Any) -> None:
    config = config_of("run.profile=2", "run.steps=5", "run.save_every=0", "run.seed=5")
    train.train(config, run_in(tmp_path), [], Stop())
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    names = [e["name"] for e in events if e.get("name", "").startswith("fnshard ")]
    lines = (tmp_path / "schedule.txt").read_text().splitlines()[1:]
    assert len(names) == 2 * len(lines) and len(set(names)) == len(lines)
    text = (tmp_path / "profile" / "timeline.txt").read_text()
    assert "2 steps traced" in text and "run forward" in text and "predicted" in text
    assert "nominal speeds of cpu: hardware=measure takes this machine's" in text
    assert (tmp_path / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "steps traced: 2" in capfd.readouterr().err
    assert record_of(tmp_path)["totals"]["tracing_s"] > 0


def test_a_run_too_short_for_its_profile_traces_what_there_is(tmp_path: Path, capfd: Any) -> None:
    config = config_of("run.profile=9", "run.steps=5", "run.save_every=0", "run.seed=5")
    train.train(config, run_in(tmp_path), [], Stop())
    # Steps 3 to 5: step 1 compiles, and memory is measured in step 2.
    assert "steps traced: 3" in capfd.readouterr().err
