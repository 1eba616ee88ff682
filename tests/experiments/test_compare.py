"""Comparing runs: what each left, the table, the CSV, the picture."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from errors import raises
from runs import leave_run

from experiments.compare.__main__ import main as compare
from experiments.compare.outcome import FAILED, OK, Outcome, find_jobs, find_outcomes, read_outcome
from experiments.compare.table import (
    as_text,
    differences,
    draw,
    name_runs,
    rank_outcomes,
    write_comparison,
    write_csv,
)
from experiments.lib.checks import ConfigError
from experiments.lib.files import write_json
from experiments.lib.folder import write_result
from experiments.lib.metrics import METRICS, Goal, smooth

# ------------------------------------------------------------------ outcomes


def test_every_kind_of_run_is_read(tmp_path):
    leave_run(tmp_path / "0", "a=1", held_out_loss=2.5, loss=2.0)
    leave_run(tmp_path / "1", "a=2", status="unfinished")
    leave_run(tmp_path / "2", "a=3", status="stopped", step=4)
    (tmp_path / "3").mkdir()
    error = "error: the configuration has 1 problem:\n  run.steps=0: must be 1 or more."
    write_result(tmp_path / "3", status="failed", overrides=["a=4"], error=error)
    (tmp_path / "10" / ".hydra").mkdir(parents=True)
    (tmp_path / "10" / ".hydra" / "overrides.yaml").write_text("- a=5\n")
    (tmp_path / "11").mkdir()
    bug = "Traceback (most recent call last):\n  x\nKeyError: 3"
    write_result(tmp_path / "11", status="failed", overrides=[], error=bug)
    (tmp_path / ".submitit").mkdir()
    (tmp_path / "notes").mkdir()
    outcomes = [read_outcome(folder, folder.name) for folder in find_jobs(tmp_path)]
    text = [(o.name, o.status, o.overrides, o.reason) for o in outcomes]
    assert text == [
        ("0", "ok", ("a=1",), ""),
        ("1", "unfinished", ("a=2",), "step 4 of 40"),
        ("2", "stopped", ("a=3",), "step 4 of 40"),
        ("3", "failed", ("a=4",), "the configuration has 1 problem: run.steps=0: must be 1 or more."),
        ("10", "no result", ("a=5",), ""),
        ("11", "failed", (), "KeyError: 3"),
    ]
    assert outcomes[0].numbers == {"held_out_loss": 2.5, "loss": 2.0}
    assert outcomes[1].numbers == {"held_out_loss": 9.0, "loss": pytest.approx(4.75)}  # by `leave_run`


def test_runs_are_found_below_and_by_globs(tmp_path, monkeypatch):
    for name in ("multi/0", "multi/1", "multi/.submitit/9", "out/day/time"):
        leave_run(tmp_path / name)
    (tmp_path / "multi" / "0" / "checkpoints" / "4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert [o.name for o in find_outcomes(["multi", "out/day/*"])[0]] == [
        "multi/0",
        "multi/1",
        "out/day/time",
    ]
    assert [o.name for o in find_outcomes(["multi/1", "multi/1/"])[0]] == ["1"]
    assert [o.name for o in find_outcomes(["multi/*"])[0]] == ["0", "1"]


def test_a_missing_place_ends_the_command_and_one_without_runs_does_not(tmp_path, capsys, monkeypatch):
    leave_run(tmp_path / "0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").touch()
    monkeypatch.chdir(tmp_path)

    # One mistyped place is enough: "0" holds a run.
    with pytest.raises(SystemExit, match=r"^2$"):
        compare(["0", "empty", "typo", "*/lost"])
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "Traceback" not in text and "nothing to compare" not in text
    assert all(f"{place}: no such folder" in text for place in ("typo", "*/lost"))

    with pytest.raises(SystemExit, match=r"^2$"):
        compare(["empty"])
    text = capsys.readouterr().err
    assert text.startswith("error: there is nothing to compare") and "empty: no run is in it" in text

    compare(["0", "empty", "note.txt"])
    assert "passed over: 2 of 3 places hold no run" in capsys.readouterr().out


def test_a_folder_below_a_file_is_refused(tmp_path, capsys):
    leave_run(tmp_path / "0")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"^2$"):
        compare([str(tmp_path / "0"), f"--out={tmp_path / 'file' / 'below'}"])
    assert f"{tmp_path / 'file'} is no folder that can be written to" in capsys.readouterr().err


# ------------------------------------------------------------------ the table


def outcome(name: str, status: str = OK, *overrides: str, reason: str = "", **numbers: float) -> Outcome:
    return Outcome(Path("/runs", name), name, status, overrides, numbers, (), reason)


def test_the_table_is_sorted_and_the_best_is_marked():
    rows = [
        outcome("0", OK, "a=1", "s=3", held_out_loss=3.0, seconds=9.6),
        outcome("1", FAILED, "a=2", "s=3", reason="rank 1 of 2 failed: ValueError: no"),
        outcome("2", OK, "a=3", "s=3", held_out_loss=2.0, tokens_per_s=12345.6),
        outcome("3", "unfinished", "a=4", "s=3", held_out_loss=1.0),
        outcome("4", OK, "a=5", "s=3", held_out_loss=float("nan")),
    ]
    ranking = rank_outcomes(rows, "held_out_loss")
    text = [re.split(r"\s{2,}", line) for line in as_text(ranking).splitlines()]
    assert text == [
        ["run", "overrides", "status", "held_out_loss", "tokens_per_s", "seconds", "reason"],
        ["2 *", "a=3", "ok", "2.000", "12,346", "-", "-"],
        ["0", "a=1", "ok", "3.000", "-", "10", "-"],
        ["4", "a=5", "ok", "nan", "-", "-", "-"],
        ["3", "a=4", "unfinished", "1.000", "-", "-", "-"],
        ["1", "a=2", "failed", "-", "-", "-", "rank 1 of 2 failed: ValueError: no"],
    ]
    assert ranking.not_finished == 2
    alike = [outcome(str(n), OK, bigram=2.4, loss=n, predicted_peak_bytes=2e6, seconds=1) for n in range(2)]
    more = [*alike, replace(alike[0], name="x", numbers={"measured_peak_bytes": 1.5e9})]
    assert [line.split() for line in as_text(rank_outcomes(more, "seconds")).splitlines()] == [
        ["run", "overrides", "status", "loss", "seconds", "measured_peak_MB"],
        ["0", "-", "ok", "0.000", "1", "-"],  # no star: two are as quick
        ["1", "-", "ok", "1.000", "1", "-"],
        ["x", "-", "ok", "-", "-", "1,500.0"],
        ["equal", "in", "all:", "bigram", "2.400,", "predicted_peak_MB", "2.0"],
    ]
    assert list(differences(rows[:1]).values()) == ["a=1 s=3"]  # nothing to compare it with
    assert [o.name for o in rank_outcomes(rows[:3:2], "tokens_per_s").outcomes] == [
        "2",
        "0",
    ]  # the more the better


def test_another_metric_is_a_column_and_an_unknown_one_is_refused():
    rows = [outcome("0", held_out_reward=0.25), outcome("1", held_out_reward=0.5)]
    assert as_text(rank_outcomes(rows, "held_out_reward")).splitlines()[1].split() == [
        "1",
        "*",
        "-",
        "ok",
        "0.5",
    ]
    with raises(ConfigError, leaves="metric lost", says="held_out_reward"):
        rank_outcomes(rows, "lost")


NATS = Goal(unit="nats per byte")
REWARD = Goal("reward", is_maximised=True)


@pytest.mark.parametrize(
    ("goals", "values", "best", "said"),
    [
        ((NATS, NATS), (2.0, 3.0), "0", "* the lowest held_out_loss, nats per byte: "),
        ((REWARD, REWARD), (0.25, 0.5), "1", "* the highest held_out_reward: "),
        ((Goal("yield", is_maximised=True),) * 2, (1.0, 2.0), "1", "* the highest held_out_yield: "),
        ((NATS, NATS), (2.0, 2.0), None, "no star: the best held_out_loss is that of several runs"),
        ((NATS, Goal(unit="nats per token")), (2.0, 3.0), None, "no star: "),
        ((NATS,), (2.0,), "0", "* the lowest held_out_loss"),
    ],
    ids=["loss", "reward", "own", "equal", "other units", "alone"],
)
def test_what_runs_are_after_decides_the_order_the_star_and_the_picture(tmp_path, goals, values, best, said):
    from matplotlib.figure import Figure

    rows = []
    for number, (goal, value) in enumerate(zip(goals, values, strict=True)):
        made = outcome(str(number), OK, f"n={number}", **{goal.held_out: value, "held_out_accuracy": 0.5})
        steps = ({"step": 1, "loss": 0.0, goal.name: value}, {"step": 1, goal.held_out: value})
        rows.append(replace(made, goal=goal, rows=steps))
    with pytest.MonkeyPatch.context() as patch:
        kept = []
        save = Figure.savefig
        patch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
        text, ranking = write_comparison(rows, None, tmp_path, stem="s", table_name="s.txt")
    assert (None if ranking.best is None else ranking.best.name) == best and said in text
    assert goals[0].held_out in text.splitlines()[0] and text.count("*") == (2 if best else 0)
    assert "held_out_accuracy" in text
    (axes,) = kept[0].axes
    shared = len({goal.unit for goal in goals}) == 1
    assert axes.get_ylabel() == (goals[0].label if shared else goals[0].name) and axes.get_title()
    assert axes.get_lines()[0].get_ydata().tolist() in ([value] for value in values)


@pytest.mark.parametrize("status", ["unfinished", "stopped"])
def test_a_run_that_has_not_ended_says_what_it_is_after(tmp_path, status):
    leave_run(tmp_path, status=status)
    write_json(tmp_path / "run.json", {"goal": REWARD.as_dict()})
    rows = [{"step": 1, "loss": 0.0, "reward": 0.5}, {"step": 1, "held_out_reward": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_outcome(tmp_path, "x")
    assert found.goal == REWARD and found.numbers == {"reward": 0.5, "held_out_reward": 0.25}


def test_runs_have_names_and_not_overrides():
    rows = [outcome("a", OK, "optimizer=muon", "optimizer.lr=0.02", "x=1"), outcome("b", OK, "x=1")]
    assert list(name_runs(rows).values()) == ["muon, lr 0.02", "b"]
    assert list(name_runs([outcome("a", OK, "m=x"), outcome("b", OK, "m=x")]).values()) == ["a", "b"]


def test_the_csv_has_a_column_per_option(tmp_path):
    rows = [
        outcome("0", OK, "strategy=zero2", "+x={a:1,b:2}", held_out_loss=3.25),
        outcome("1", FAILED, "strategy=no_shard", reason='it said "no", twice'),
    ]
    write_csv(rank_outcomes(rows, "held_out_loss"), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["strategy"], first["x"], first["held_out_loss"]) == ("zero2", "{a:1,b:2}", "3.25")
    assert (second["status"], second["x"], second["reason"]) == ("failed", "", 'it said "no", twice')
    assert (first["best"], second["best"]) == ("yes", "")


def test_an_override_with_a_space_is_one(tmp_path):
    rows = [outcome(str(n), OK, f"run.prompt=a {n}", held_out_loss=1.0) for n in (1, 2)]
    assert list(name_runs(rows).values()) == ["prompt a 1", "prompt a 2"]


def test_a_curve_may_have_both_infinities(tmp_path):
    means, size = smooth([(1, math.inf), (2, -math.inf), (3, 1.0), (4, 3.0)], 2)
    assert size == 2 and math.isnan(means[0][1]) and means[1] == (3.5, 2.0)
    leave_run(tmp_path, status="unfinished")
    (tmp_path / METRICS).write_text('{"step": 1, "loss": Infinity}\n{"step": 2, "loss": -Infinity}\n')
    assert math.isnan(read_outcome(tmp_path, "").numbers["loss"])


def test_no_star_where_nobody_has_said_what_is_better(tmp_path, capsys):
    rows = [outcome(str(n), OK, held_out_loss=1.0, held_out_worst=float(n), recall=n / 4) for n in (1, 2)]
    text, ranking = write_comparison(rows, "held_out_worst", tmp_path, "s", "s.txt")
    assert ranking.best is None and "*" not in text and "--metric held_out_worst --direction maximize" in text
    for is_maximised, best in ((True, "2"), (False, "1")):
        assert rank_outcomes(rows, "held_out_worst", is_maximised).best.name == best
    assert rank_outcomes(rows, "recall").best.name == "2" and rank_outcomes(rows).best is None
    for number in (1, 2):
        leave_run(tmp_path / "runs" / str(number), held_out_loss=1.0, held_out_worst=float(number))
    said = "--metric=held_out_worst", "--direction=maximize", f"--out={tmp_path / 'o'}"
    compare([str(tmp_path / "runs"), *said])
    assert "* the highest held_out_worst: " in capsys.readouterr().out


# ------------------------------------------------------------------ the picture


@pytest.mark.parametrize("key", ["loss", "held_out_worst", "lr"])
def test_only_the_loss_that_runs_are_after_is_cut_off(tmp_path, monkeypatch, key):
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: kept.append(self))
    made = outcome("0", OK, held_out_loss=1.0, **{key: 9.0})
    draw(
        rank_outcomes([replace(made, rows=({"step": 1, key: 1.0}, {"step": 2, key: 9.0}))], key),
        tmp_path / "s.png",
    )
    assert (kept[0].axes[0].get_ylim()[1] == 2.0) == (key == "loss")


def test_the_best_are_named_and_a_run_that_diverges_is_cut_off(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
    rows = [outcome("failed", FAILED)]
    assert not draw(rank_outcomes(rows, "held_out_loss"), tmp_path / "none.png")
    for n in range(20):
        values = {"step": 1, "loss": 5.5}, {"step": 2, "loss": 1e9 if n == 0 else 5.0 - n / 20}
        made = outcome(str(n), OK, f"lr={n}", held_out_loss=values[1]["loss"])
        rows.append(replace(made, rows=(*values, {"step": 2, "held_out_loss": values[1]["loss"]})))
    assert draw(rank_outcomes(rows, "held_out_loss"), tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (legend,), (axes,) = kept[0].legends, kept[0].axes
    assert len(legend.get_texts()) == 10 and "the best 10 of 20" in legend.get_title().get_text()
    assert legend.get_texts()[0].get_text() == "lr 19 *  (held-out loss 4.05)"
    assert axes.get_ylim()[1] == 11.0


def test_compare_leaves_three_files(tmp_path, capsys, monkeypatch):
    leave_run(tmp_path / "0", "a=1", held_out_loss=2.5)
    leave_run(tmp_path / "1", "a=2", status="unfinished")
    monkeypatch.chdir(tmp_path)
    compare([".", "--out", "there"])
    text = capsys.readouterr().out
    kept = (tmp_path / "there" / "compare.txt").read_text()
    assert text.startswith(kept) and "2.500" in kept
    assert f"* the lowest held_out_loss: {tmp_path / '0'}\n1 of 2 not finished\n" in text
    assert {p.name for p in (tmp_path / "there").iterdir()} == {"compare.txt", "compare.csv", "compare.png"}
