"""Sweeps: launchers, a failed job among others, a search by Optuna."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from errors import raises
from hydra.types import RunMode
from omegaconf import OmegaConf
from runs import SMALL, compose, leave_run
from slurm import install

from experiments.compare.outcome import find_jobs
from experiments.compare.sweep import TABLE
from experiments.lib import launch
from experiments.lib.checks import ConfigError
from experiments.lib.folder import identity_of, read_result, search_value, write_result
from experiments.lib.launch import main
from experiments.lib.metrics import METRICS, Goal
from experiments.train import JOB
from fnshard.launcher.local import LaunchError

ROOT = Path(__file__).resolve().parents[2]
TINY = (*SMALL, "model.layers=1", "mesh.shard=1", "run.steps=2", "run.sample_tokens=0", "data.rows=2")


# ------------------------------------------------------------------ launchers


def test_a_launcher_without_a_sweep_is_refused(error_of):
    shown = error_of(JOB, "launcher=joblib")
    assert re.search(r"a launcher \(joblib\) starts the jobs of a sweep.*Fix: add --mu", shown)


# ------------------------------------------------------------------ whole sweeps, without ranks


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[str], Path]]:
    """Run a sweep in this process whose jobs are a formula: best at a rate of 1e-3, and none for seed 13."""

    def started(_: Any, asked: Any, folder: Path, overrides: list[str], *, chosen: bool) -> str:
        assert chosen
        if asked.run.seed == 13:
            raise LaunchError("rank 1 of 2 was killed by SIGKILL\nLast line of its log: (empty)")
        leave_run(
            folder, *overrides, held_out_loss=abs(asked.optimizer.lr - 1e-3), accuracy=asked.optimizer.lr
        )
        (folder / "identity.json").write_text(json.dumps(identity_of(asked)))
        ran.append(folder.name)
        return "ok"

    ran: list[str] = []
    monkeypatch.setattr(launch, "start", started)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[Any, list[str], Path]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["train", "--multirun", *arguments])
        code: Any = 0
        try:
            main(JOB)
        except SystemExit as ended:
            code = ended.code
        (folder,) = tmp_path.glob("multirun/*/*")
        return code, list(ran), folder

    return run


def test_a_command_that_srun_starts_on_several_nodes_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    with raises(ConfigError, leaves="2 nodes", fix=["launcher=slurm", "srun"]):
        launch.run(JOB)


def test_each_node_of_a_slurm_job_runs_one_agent(monkeypatch):
    step = {"JOB_ID": "31007", "JOB_NUM_NODES": "2", "NTASKS": "2", "JOB_NODELIST": "gpu[07-08],login"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    agent = launch.torchrun_arguments(ranks=8, max_restarts=3)
    assert agent[2:8] == ["--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "3"]
    assert agent[-1] == "gpu07:21007"  # 20000 and the job's number modulo 10000
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with raises(ConfigError, leaves=["4 tasks", "2 nodes"], fix="hydra.launcher.tasks_per_node=1"):
        launch.torchrun_arguments(ranks=8, max_restarts=3)


def test_ranks_on_several_nodes_know_when_their_command_began(tmp_path, monkeypatch):
    begun: list[Any] = []

    def agent(command: list[str], **_: Any) -> SimpleNamespace:
        values = json.loads(Path(command[-1]).read_text())
        with launch.find_folder(JOB, values) as run:
            begun.append(run.began)
        write_result(tmp_path, status="ok", overrides=[])
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setattr(launch, "count_nodes", lambda: 2)
    monkeypatch.setattr(launch, "torchrun_arguments", lambda *_: ["-m", "torchrun"])
    monkeypatch.setattr(launch.subprocess, "run", agent)
    monkeypatch.setattr(launch, "fit_to_machine", lambda requested, nodes: requested)
    asked = compose(*TINY, "mesh.shard=2")
    assert launch.start(JOB, asked, tmp_path, [], chosen=True, began=12.5) == "ok"
    assert begun == [12.5]


def test_a_worker_whose_sweep_died_before_its_job_begins_ends(tmp_path, monkeypatch):
    """joblib's worker imports for seconds first: nobody would see its run."""
    runtime = SimpleNamespace(output_dir=tmp_path, choices={"hydra/launcher": "joblib"})
    here = SimpleNamespace(runtime=runtime, overrides=SimpleNamespace(task=[]), mode=RunMode.MULTIRUN)
    monkeypatch.setattr(launch.HydraConfig, "get", lambda: here)
    if (pid := os.fork()) == 0:
        try:
            # No process has the number 0: to this child its sweep has died.
            launch.run_of_sweep(JOB, 0, OmegaConf.create())
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert list(tmp_path.iterdir()) == []


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


MINE = """# @package _global_
model: {_target_: custom_task.linear}
data: {_target_: custom_task.points, count: 32, rows: 8, held_out_rows: 8}
objective: {_target_: custom_task.squares}
"""


@pytest.mark.long  # test_custom_parts sweeps the worked example
def test_keys_of_a_recipes_own_model_are_swept_and_shown(sweep, tmp_path, capfd, monkeypatch):
    """They are taken as in a single run; a folder of configurations may have the name of a key."""
    (tmp_path / "data.d" / "experiment").mkdir(parents=True)
    (tmp_path / "data.d" / "experiment" / "mine.yaml").write_text(MINE)
    mine = "--config-dir", "data.d", "experiment=mine", "data.width=64"
    code, ran, folder = sweep(*mine, "model.width=3,64")
    assert code == 0 and ran == ["0", "1"]
    assert json.loads((folder / "1" / "identity.json").read_text())["model"]["width"] == 64
    monkeypatch.setattr(sys, "argv", ["train", "--cfg", "job", *mine, "model.width=5"])
    main(JOB)
    assert "width: 5" in capfd.readouterr().out


@pytest.mark.long  # test_a_failed_job, and a search in which every trial fails
def test_a_search_goes_on_after_a_failed_trial(sweep):
    """Optuna's sampler is seeded: the same command again finds its trials finished."""
    arguments = ("hydra/sweeper=search_lr", "hydra.sweeper.n_trials=6", "run.seed=choice(1,13)")
    code, ran, folder = sweep(*arguments, "hydra.sweep.dir=multirun/a/search")
    statuses = [read_result(f)["status"] for f in find_jobs(folder)]
    assert len(statuses) == 6 and set(statuses) == {"ok", "failed"} and code == 1
    best = OmegaConf.load(folder / "optimization_results.yaml")
    values = [search_value(f) for f in find_jobs(folder) if search_value(f) is not None]
    assert best.best_value == min(values) and len(ran) == len(values)
    assert (folder / TABLE).exists()
    assert sweep(*arguments, "hydra.sweep.dir=multirun/a/search") == (1, [], folder)


@pytest.mark.long
def test_a_search_in_which_every_trial_fails_has_its_table(sweep, capsys):
    search = ("hydra/sweeper=search_lr", "hydra.sweeper.n_trials=2")
    code, ran, folder = sweep(*search, "run.seed=13")
    shown = capsys.readouterr()
    assert code == 1 and ran == []
    assert (folder / TABLE).read_text() in shown.out and "\n2 of 2 not finished\n" in shown.out
    assert "Traceback" not in shown.err and "No trials" not in shown.err


def test_the_objective_is_of_finished_runs(tmp_path):
    assert search_value(tmp_path) is None
    write_result(tmp_path, status="stopped", overrides=[], held_out_loss=2.0)
    assert search_value(tmp_path) is None
    write_result(tmp_path, status="ok", overrides=[], held_out_loss=2, accuracy=0.5)
    assert (search_value(tmp_path), search_value(tmp_path, "accuracy", "maximize")) == (2.0, 0.5)
    assert search_value(tmp_path, "accuracy") == -0.5  # a search that minimises finds the best one, too
    assert search_value(tmp_path, "accuracy", is_said=True) == 0.5  # who wrote minimize wants the least
    # Without a metric the goal says what is better, whoever wrote the direction.
    assert search_value(tmp_path, direction="maximize") == -2.0
    assert search_value(tmp_path, None, "maximize", is_said=True) == -2.0
    goal = Goal("reward", is_maximised=True)
    write_result(tmp_path, status="ok", overrides=[], held_out_reward=0.25, goal=goal.as_dict())
    assert (search_value(tmp_path), search_value(tmp_path, direction="maximize")) == (-0.25, 0.25)
    assert search_value(tmp_path, "bleu") is None


# ------------------------------------------------------------------ real jobs


def real(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, Path]:
    """Run a sweep of real jobs; return exit code, output and folder."""
    root = folder / "text"
    root.mkdir(exist_ok=True)
    for number in range(60):
        (root / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        "--multirun",
        *TINY,
        f"data.root={root}",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    (sweep,) = folder.glob("multirun/*/*")
    return done.returncode, done.stdout + done.stderr, sweep


def statuses(sweep: Path) -> dict[str, str]:
    return {f.name: read_result(f)["status"] for f in find_jobs(sweep)}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["local", "joblib", "slurm_local", "slurm"])
def test_real_jobs_under_every_launcher(launcher, tmp_path):
    """Two of four fail: a width of 16 does not divide over 3 heads, which jobs 2 and 3 have."""
    path = {"PATH": f"{install(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}
    code, output, sweep = real(tmp_path, f"launcher={launcher}", "run.seed=1,2", "model.heads=2,3", env=path)
    assert code == 1, output
    assert statuses(sweep) == {"0": "ok", "1": "ok", "2": "failed", "3": "failed"}, output
    table = (sweep / TABLE).read_text()
    assert table in output and table.count("the head size, width / heads") == 2
    assert {"sweep.csv", "sweep.png"} <= {p.name for p in sweep.iterdir()}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_of_two_nodes_under_slurm(tmp_path):
    """Two agents of torchrun's, a rank each; the losses of one launcher with two ranks, bit for bit."""
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
