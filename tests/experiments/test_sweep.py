"""Sweeps: launchers, a failed job among others, the table, the CSV, the picture; and a search by Optuna."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
from hydra.core.utils import JobStatus
from main_job import SMALL
from omegaconf import OmegaConf
from slurm import install

from experiments.cli import job, launchers
from experiments.cli.main import main
from experiments.cli.sweep import TABLE, objective
from experiments.compare import curves
from experiments.compare.__main__ import main as compare
from experiments.compare.outcome import FAILED, OK, Outcome, found, jobs_of, outcome_of
from experiments.compare.table import as_text, differences, ranked, write_csv
from experiments.configs.train import ConfigError
from experiments.train import JOB
from experiments.training.report import METRICS
from experiments.training.result import read_result, write_result
from experiments.training.resume import claimed_sweep
from fnshard.errors import MissingExtraError
from fnshard.launcher.local import LaunchError

ROOT = Path(__file__).resolve().parents[2]


def leave_run(folder: Path, *overrides: str, status: str = "ok", steps: int = 4, **numbers: Any) -> Path:
    """What a run leaves, as far as a comparison reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "loss": 5.0 - 0.1 * n, "tokens_per_s": 10.0} for n in range(1, steps + 1)]
    rows.append({"step": steps, "held_out_loss": numbers.get("held_out_loss", 9.0)})
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows if steps))
    told = {"config": {"run": {"steps": 40}}, "overrides": list(overrides)}
    (folder / "job.json").write_text(json.dumps(told))
    if status != "unfinished":
        write_result(folder, status=status, overrides=list(overrides), **numbers)
    return folder


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
    (tmp_path / ".submitit").mkdir()
    (tmp_path / "notes").mkdir()
    outcomes = [outcome_of(folder, folder.name) for folder in jobs_of(tmp_path)]
    told = [(o.name, o.status, o.overrides, o.reason) for o in outcomes]
    assert told == [
        ("0", "ok", ("a=1",), ""),
        ("1", "unfinished", ("a=2",), "step 4 of 40"),
        ("2", "stopped", ("a=3",), "step 4 of 40"),
        ("3", "failed", ("a=4",), "the configuration has 1 problem: run.steps=0: must be 1 or more."),
        ("10", "no result", ("a=5",), ""),
    ]
    assert outcomes[0].numbers == {"held_out_loss": 2.5, "loss": 2.0}
    assert outcomes[1].numbers == {"held_out_loss": 9.0, "loss": pytest.approx(4.75)}


def test_a_bug_is_told_by_its_last_line(tmp_path):
    write_result(
        tmp_path, status="failed", overrides=[], error="Traceback (most recent call last):\n  x\nKeyError: 3"
    )
    assert outcome_of(tmp_path, "x").reason == "KeyError: 3"


def test_runs_are_found_below_and_by_globs(tmp_path, monkeypatch):
    for name in ("multi/0", "multi/1", "multi/.submitit/9", "out/day/time"):
        leave_run(tmp_path / name)
    (tmp_path / "multi" / "0" / "checkpoints" / "4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert [o.name for o in found(["multi", "out/day/*"])] == ["multi/0", "multi/1", "out/day/time"]
    assert [o.name for o in found(["multi/1", "multi/1/"])] == ["1"]
    assert [o.name for o in found(["multi/*"])] == ["0", "1"]


def test_places_without_runs_are_named_together(tmp_path, capsys):
    leave_run(tmp_path / "0")
    (tmp_path / "empty").mkdir()
    places = [str(tmp_path / name) for name in ("0", "empty", "typo", "no*")]
    with pytest.raises(
        ConfigError, match=r"(?s)nothing to compare:\n  \S+empty: a folder without runs\n  \S+typo: no such"
    ):
        found(places)
    with pytest.raises(SystemExit, match=r"[12]"):
        compare(places)
    told = capsys.readouterr().err
    assert told.startswith("error: there is nothing to compare:") and "Traceback" not in told


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
    ranking = ranked(rows, "held_out_loss")
    text = [re.split(r"\s{2,}", line) for line in as_text(ranking).splitlines()]
    assert text == [
        ["run", "overrides", "status", "held_out_loss", "tokens_per_s", "seconds", "reason"],
        ["2 *", "a=3", "ok", "2.000", "12,346", "-", "-"],
        ["0", "a=1", "ok", "3.000", "-", "10", "-"],
        ["4", "a=5", "ok", "nan", "-", "-", "-"],
        ["3", "a=4", "unfinished", "1.000", "-", "-", "-"],
        ["1", "a=2", "failed", "-", "-", "-", "rank 1 of 2 failed: ValueError: no"],
    ]
    assert ranking.failed == 2
    assert [o.name for o in ranked(rows[:3:2], "tokens_per_s").outcomes] == ["2", "0"]  # the more the better


def test_another_metric_is_a_column_and_an_unknown_one_is_refused():
    rows = [outcome("0", held_out_reward=0.25), outcome("1", held_out_reward=0.5)]
    assert as_text(ranked(rows, "held_out_reward")).splitlines()[1].split() == ["1", "*", "-", "ok", "0.5"]
    with pytest.raises(ConfigError, match=r"metric lost: no run has it; they have held_out_reward"):
        ranked(rows, "lost")


def test_of_overrides_only_what_differs_is_shown():
    rows = [outcome("0", OK, "a=1", "b=2"), outcome("1", OK, "a=1", "b=3", "c=4"), outcome("2", OK, "a=1")]
    assert list(differences(rows).values()) == ["b=2", "b=3 c=4", "-"]
    assert list(differences(rows[:1]).values()) == ["a=1 b=2"]


def test_the_csv_has_a_column_per_option(tmp_path):
    rows = [
        outcome("0", OK, "strategy=zero2", "+x={a:1,b:2}", held_out_loss=3.25),
        outcome("1", FAILED, "strategy=no_shard", reason='it said "no", twice'),
    ]
    write_csv(ranked(rows, "held_out_loss"), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["strategy"], first["x"], first["held_out_loss"], first["best"]) == (
        "zero2",
        "{a:1,b:2}",
        "3.25",
        "yes",
    )
    assert (second["status"], second["x"], second["reason"]) == ("failed", "", 'it said "no", twice')


# ------------------------------------------------------------------ the picture


def with_curve(name: str, *overrides: str, values: list[float]) -> Outcome:
    rows = tuple({"step": n, "loss": v} for n, v in enumerate(values, 1))
    held_out = {"held_out_loss": values[-1]}
    return Outcome(
        Path("/runs", name), name, OK, overrides, held_out, (*rows, {"step": len(values), **held_out})
    )


def drawn(monkeypatch: pytest.MonkeyPatch, rows: list[Outcome], path: Path) -> Any:
    """The figure."""
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
    assert curves.draw(ranked(rows, "held_out_loss"), path)
    return kept[0]


def test_few_runs_are_named_in_the_order_of_the_table(tmp_path, monkeypatch):
    rows = [
        with_curve("0", "a=1", "lr=3", values=[5, 4, 3]),
        with_curve("1", "a=1", "lr=4", values=[5, 3, 2]),
        Outcome(Path("/runs/2"), "2", FAILED, ("a=1", "lr=9")),
    ]
    figure = drawn(monkeypatch, rows, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "1: lr=4 *  (held_out_loss 2)",
        "0: lr=3  (held_out_loss 3)",
    ]
    assert len(figure.axes) == 1


def test_equal_curves_are_one_line_that_the_legend_tells(tmp_path, monkeypatch):
    rows = [with_curve(str(n), f"lr={n}", values=[5, 4, 4 if n == 1 else 3]) for n in range(3)]
    figure = drawn(monkeypatch, rows, tmp_path / "s.png")
    texts = [t.get_text() for t in figure.legends[0].get_texts()]
    assert texts[0] == "0: lr=0 *  (held_out_loss 3, same curve: 2)" and len(texts) == 2
    named = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert len(named) == 2 and len({line.get_linewidth() for line in named}) == 1


def test_many_runs_have_a_colour_map_over_what_differs(tmp_path, monkeypatch):
    rows = [with_curve(str(n), f"optimizer.lr={10.0**-n}", values=[5.0, 5.0 - n / 20]) for n in range(20)]
    figure = drawn(monkeypatch, rows, tmp_path / "s.png")
    _, bar = figure.axes
    assert bar.get_ylabel() == "optimizer.lr" and bar.get_yscale() == "log"
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3 and "the best 3 of 20" in legend.get_title().get_text()
    mixed = [with_curve(str(n), f"a={n}", f"b={n}", values=[5.0]) for n in range(20)]
    assert drawn(monkeypatch, mixed, tmp_path / "m.png").axes[1].get_ylabel().startswith("place in the table")


def test_a_run_that_diverges_does_not_press_the_others_flat(tmp_path, monkeypatch):
    rows = [with_curve("0", values=[5.5, 4, 3]), with_curve("1", values=[5.5, 1e6, 1e9])]
    assert drawn(monkeypatch, rows, tmp_path / "s.png").axes[0].get_ylim()[1] == 11.0


def test_nothing_to_draw_draws_nothing(tmp_path):
    assert not curves.draw(ranked([outcome("0", FAILED)], "held_out_loss"), tmp_path / "s.png")
    assert not (tmp_path / "s.png").exists()


def test_compare_leaves_three_files(tmp_path, capsys, monkeypatch):
    leave_run(tmp_path / "0", "a=1", held_out_loss=2.5)
    leave_run(tmp_path / "1", "a=2", status="unfinished")
    monkeypatch.chdir(tmp_path)
    compare([".", "--out", "there"])
    told = capsys.readouterr().out
    assert (tmp_path / "there" / "compare.txt").read_text() in told
    assert f"* the lowest held_out_loss: {tmp_path / '0'}\n1 of 2 not finished\n" in told
    assert {p.name for p in (tmp_path / "there").iterdir()} == {"compare.txt", "compare.csv", "compare.png"}


# ------------------------------------------------------------------ launchers


def composed(*overrides: str, name: str = "train", conf: str = "conf") -> Any:
    JOB.spec.register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(ROOT / conf)):
        return hydra.compose(name, overrides=list(overrides), return_hydra_config=True)


@pytest.mark.parametrize(
    ("launcher", "target", "kept"),
    [
        ("local", "BasicLauncher", {}),
        ("joblib", "JoblibLauncher", {"n_jobs": 4}),
        ("slurm", "SlurmLauncher", {"nodes": 4, "tasks_per_node": 1}),
        ("slurm_local", "LocalLauncher", {"timeout_min": 5}),
    ],
)
def test_a_launcher_is_a_group_and_its_options_hydras(launcher, target, kept):
    options = [f"hydra.launcher.{key}={value}" for key, value in kept.items()]
    told = composed(f"launcher={launcher}", *options).hydra
    assert told.launcher._target_.endswith(f".{target}")
    assert {key: told.launcher[key] for key in kept} == kept
    assert "launcher" not in OmegaConf.to_container(composed(f"launcher={launcher}"), resolve=False)


def test_a_plugin_that_is_not_there_is_named_with_its_extra():
    def installed(name: str) -> Any:
        raise ModuleNotFoundError(name)

    for argument, extra in (("launcher=slurm", "slurm"), ("hydra/sweeper=search_lr", "optuna")):
        with pytest.raises(
            MissingExtraError, match=rf"(?s)not installed:\n  {argument}: .*fnshard\[{extra}\]"
        ):
            launchers.check_plugins(["-m", argument], installed)
    with pytest.raises(MissingExtraError, match=r"fnshard\[joblib,optuna\]"):
        launchers.check_plugins(["launcher=joblib", "hydra/sweeper=optuna"], lambda name: None)
    launchers.check_plugins(["launcher=local", "optimizer.lr=1"], installed)
    launchers.check_plugins(list(launchers.PLUGINS))  # as installed for tests


def test_the_extras_install_the_plugins():
    text = (ROOT / "pyproject.toml").read_text()
    for package, extra in launchers.PLUGINS.values():
        assert re.search(rf'^{extra} = \["{package.replace("_", "-")}', text, re.MULTILINE), extra
        assert find_spec(f"hydra_plugins.{package}") is not None


def test_a_launcher_without_a_sweep_is_refused():
    launchers.check_used("basic")
    with pytest.raises(
        ConfigError, match=r"a launcher \(joblib\) starts the jobs of a sweep.*Fix: add --multirun"
    ):
        launchers.check_used("joblib")


def test_another_launcher_goes_on_with_the_same_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claimed_sweep(["--multirun", "run.seed=1,2"]) as first:
        pass
    with claimed_sweep(["--multirun", "run.seed=1,2", "launcher=joblib", "hydra.launcher.n_jobs=3"]) as again:
        assert again[-1] == first[-1]


class Gone:
    """A submitit job that SLURM has ended; as far as it is asked."""

    def __init__(self, sweep: Path):
        self.job_id, self.state = "12_1", "OUT_OF_MEMORY"
        self.paths = SimpleNamespace(folder=sweep / ".submitit" / "12_1")

    def stderr(self) -> str:
        return "some warning\nslurmstepd: oom_kill event\n"

    def submission(self) -> Any:
        return SimpleNamespace(args=(["run.seed=2"], "hydra.sweep.dir", 1, "job_id_for_1", {}))


def test_a_job_that_slurm_has_ended_is_one_failure(tmp_path, capsys):
    from submitit.core.utils import UncompletedJobError

    def waits(_: Any) -> list[Any]:
        raise UncompletedJobError("Job 12_1 has not produced any output")

    (returned,) = launchers._results(Gone(tmp_path), waits)
    assert returned.status == JobStatus.COMPLETED and returned.return_value is None
    seen = outcome_of(tmp_path / "1", "1")
    assert (seen.status, seen.overrides) == ("failed", ("run.seed=2",))
    assert seen.reason == "job 12_1 ended as OUT_OF_MEMORY without a result: slurmstepd: oom_kill event"
    assert "job 1 (run.seed=2)" in capsys.readouterr().out


# ------------------------------------------------------------------ whole sweeps, without ranks


@pytest.fixture
def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Any, list[str], Path]]]:
    """Run a sweep in this process whose jobs are a formula: best at a rate of 1e-3, and none for seed 13."""

    def started(_: Any, asked: Any, folder: Path, overrides: list[str], *, chosen: bool) -> str:
        assert chosen
        if asked.run.seed == 13:
            raise LaunchError("rank 1 of 2 was killed by SIGKILL\nLast line of its log: (empty)")
        leave_run(
            folder, *overrides, held_out_loss=abs(asked.optimizer.lr - 1e-3), accuracy=asked.optimizer.lr
        )
        (folder / "identity.json").write_text(json.dumps(_identity(asked)))
        ran.append(folder.name)
        return "ok"

    ran: list[str] = []
    monkeypatch.setattr(job, "start", started)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[Any, Path]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["train", "--multirun", *arguments])
        code: Any = 0
        try:
            main(JOB)
        except SystemExit as ended:
            code = ended.code
        (folder,) = tmp_path.glob("multirun/*/*")
        return code, list(ran), folder

    yield run


def _identity(asked: Any) -> dict[str, Any]:
    from experiments.training.resume import identity_of

    return identity_of(asked)


def test_a_failed_job_stops_no_other_and_makes_the_exit_code_one(sweep, capsys):
    code, ran, folder = sweep("optimizer.lr=0.002,0.001", "run.seed=1,13")
    assert code == 1 and ran == ["0", "2"]
    text = (folder / TABLE).read_text()
    shown = capsys.readouterr()
    assert text in shown.out and f"* the lowest held_out_loss: {folder / '2'}" in shown.out
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()[1:]]
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        ("2 *", "ok", "-"),
        ("0", "ok", "-"),
        ("1", "failed", "rank 1 of 2 was killed by SIGKILL"),
        ("3", "failed", "rank 1 of 2 was killed by SIGKILL"),
    ]
    assert {"sweep.csv", "sweep.png"} <= {p.name for p in folder.iterdir()}
    assert "\n2 of 4 not finished\n" in shown.out


def test_another_metric_sorts_the_table(sweep):
    code, _, folder = sweep("optimizer.lr=0.002,0.001", "hydra.callbacks.table.metric=accuracy")
    assert code == 0 and (folder / TABLE).read_text().splitlines()[1].startswith("0 *")


def test_a_search_goes_on_behind_a_failed_trial(sweep):
    """Optuna's sampler is seeded: the same command again finds its trials finished."""
    arguments = ("hydra/sweeper=search_lr", "hydra.sweeper.n_trials=6", "run.seed=choice(1,13)")
    code, ran, folder = sweep(*arguments, "hydra.sweep.dir=multirun/a/search")
    statuses = [read_result(f)["status"] for f in jobs_of(folder)]
    assert len(statuses) == 6 and set(statuses) == {"ok", "failed"} and code == 1
    best = OmegaConf.load(folder / "optimization_results.yaml")
    values = [objective(f) for f in jobs_of(folder) if objective(f) is not None]
    assert best.best_value == min(values) and len(ran) == len(values)
    assert (folder / TABLE).exists()
    assert sweep(*arguments, "hydra.sweep.dir=multirun/a/search") == (1, [], folder)


def test_a_search_in_which_all_fail_still_has_its_table(sweep, capsys):
    code, _, folder = sweep("hydra/sweeper=search_lr", "hydra.sweeper.n_trials=2", "run.seed=13")
    assert code == 1 and (folder / "sweep.csv").exists()
    assert capsys.readouterr().out.count("rank 1 of 2 was killed by SIGKILL") == 2


def test_the_objective_is_of_finished_runs(tmp_path):
    assert objective(tmp_path) is None
    write_result(tmp_path, status="stopped", overrides=[], held_out_loss=2.0)
    assert objective(tmp_path) is None
    write_result(tmp_path, status="ok", overrides=[], held_out_loss=2, accuracy=0.5)
    assert (objective(tmp_path), objective(tmp_path, "accuracy")) == (2.0, 0.5)
    assert objective(tmp_path, "bleu") is None


# ------------------------------------------------------------------ real jobs


TINY = (*SMALL, "model.layers=1", "mesh.shard=1", "run.steps=2", "run.sample_tokens=0", "data.rows=2")


def real(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, Path]:
    """A sweep of real jobs: exit code, output, folder."""
    root = folder / "text"
    root.mkdir(exist_ok=True)
    for number in range(60):
        (root / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        "--multirun",
        *TINY,
        f"data.root={root}",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=280)
    (sweep,) = folder.glob("multirun/*/*")
    return done.returncode, done.stdout + done.stderr, sweep


def statuses(sweep: Path) -> dict[str, str]:
    return {f.name: read_result(f)["status"] for f in jobs_of(sweep)}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["local", "joblib", "slurm_local", "slurm"])
def test_real_jobs_under_every_launcher(launcher, tmp_path):
    """One of three fails when its ranks run: seven rows are not two's."""
    path = {"PATH": f"{install(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}
    code, output, sweep = real(
        tmp_path, f"launcher={launcher}", "run.seed=1,2", "optimizer.lr=1e-3,-1", env=path
    )
    assert code == 1, output
    assert statuses(sweep) == {"0": "ok", "1": "failed", "2": "ok", "3": "failed"}, output
    table = (sweep / TABLE).read_text()
    assert table in output and table.count("optimizer.lr=-1.0: must be above 0") == 2
    assert {"sweep.csv", "sweep.png"} <= {p.name for p in sweep.iterdir()}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_search(tmp_path):
    code, output, sweep = real(tmp_path, "hydra/sweeper=search_lr", "hydra.sweeper.n_trials=3")
    assert code == 0, output
    best = OmegaConf.load(sweep / "optimization_results.yaml")
    assert best.best_value == min(objective(f) for f in jobs_of(sweep)) and list(best.best_params) == [
        "optimizer.lr"
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_of_two_nodes_under_slurm(tmp_path):
    """Two agents, a rank each; the losses of one agent with two ranks, bit for bit."""
    path = {"PATH": f"{install(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}
    two = ("mesh.shard=2", "run.steps=4")
    code, output, sweep = real(tmp_path, "launcher=slurm", "hydra.launcher.nodes=2", *two, env=path)
    logs = "\n".join(p.read_text() for p in sweep.glob(".submitit/*/*.err"))
    assert code == 0 and statuses(sweep) == {"0": "ok"}, output + logs
    script = next((tmp_path / "bin" / "jobs").glob("*.sbatch")).read_text()
    assert "#SBATCH --nodes=2" in script and "#SBATCH --ntasks-per-node=1" in script
    (tmp_path / "plain").mkdir()
    _, _, plain = real(tmp_path / "plain", *two, f"data.root={tmp_path / 'text'}")
    losses = [
        [json.loads(line).get("loss") for line in (s / "0" / METRICS).read_text().splitlines()]
        for s in (sweep, plain)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert sorted(p.name for p in (sweep / "0" / "ranks").iterdir()) == ["rank0.log", "rank1.log"]
