"""A script of one's own, on one rank and on two, however they are started: the same losses."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import OUTPUT, start_command
from errors import raises

import fnshard as fs
from fnshard import LaunchError, SpecError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = """
import sys
import torch, torch.distributed as dist
import fnshard as fs


def loss_fn(params, x, y):
    return (torch.tanh(x @ params["a"]) @ params["b"] - y).square().mean()


def main(rate=1.0):
    mesh = fs.make_mesh(device="cpu")
    assert dist.is_initialized() == (mesh.size > 1)
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 8).double(), "b": torch.randn(8, 2).double()}
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(rate), backend="eager")
    state = step.init(params)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    rows = torch.arange(8).tensor_split(mesh.size)[mesh.rank]
    losses = []
    for _ in range(3):
        state, metrics = step(state, x[rows], y[rows])
        losses.append(metrics["loss"].item())
    if mesh.rank == 0:
        print("LOSSES", mesh.size, *losses, flush=True)


if __name__ == "__main__":
    starts = {
        "bare": lambda: main(0.1),
        "run_rank": lambda: fs.run_rank(lambda: main(0.1)),
        "launch": lambda: fs.launch(main, ranks=2, args=(0.1,)),
    }
    starts[sys.argv[1]]()
"""


def ended(folder: Path, script: str, *arguments: str) -> tuple[int, str]:
    """Fork a script, and return its exit code and all that it printed."""
    (folder / "own.py").write_text(script)
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    code = start_command([str(folder / "own.py"), *arguments], folder, env=env).wait(300)
    return code, "".join((folder / name).read_text() for name in OUTPUT.values())


def losses_of(folder: Path, how: str, before: Sequence[str] = ()) -> list[float]:
    """Run the script, and return world size and losses; `before` is the words that start it, else a fork."""
    if not before:
        code, shown = ended(folder, SCRIPT, how)
    else:
        script = folder / "own.py"
        script.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        run = subprocess.run([*before, str(script), how], env=env, cwd=folder, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, timeout=300)  # fmt: skip
        code, shown = run.returncode, run.stdout
    assert code == 0, shown
    (line,) = [line for line in shown.splitlines() if line.startswith("LOSSES")]
    assert not list(folder.glob("fnshard-*")), "a job that ended well leaves nothing behind"
    return [float(word) for word in line.split()[1:]]


def losses_by_environment(folder: Path) -> list[float]:
    """Run two processes with the variables that torchrun sets; return world size and losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "own.py").write_text(SCRIPT)
    processes = []
    for rank in range(2):
        place = folder / f"rank-{rank}"
        place.mkdir()
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}  # fmt: skip
        env = {name: str(value) for name, value in env.items()}
        processes.append(start_command([str(folder / "own.py"), "bare"], place, env=env))
    assert [process.wait() for process in processes] == [0, 0]
    (line,) = re.findall("^LOSSES (.*)$", (folder / "rank-0" / OUTPUT["stdout"]).read_text(), re.MULTILINE)
    return [float(word) for word in line.split()]


def test_losses_are_equal_however_ranks_are_started(tmp_path):
    one, *losses = losses_of(tmp_path, "bare")
    assert one == 1 and losses[0] > losses[2]
    for started in (losses_by_environment(tmp_path), losses_of(tmp_path, "launch")):
        assert started == pytest.approx([2, *losses], abs=1e-10)


@pytest.mark.long  # executes torchrun, and Python
def test_one_script_for_every_way_to_start_it(tmp_path):
    losses = losses_of(tmp_path, "bare", PYTHON)
    assert losses_of(tmp_path, "bare", TORCHRUN) == pytest.approx([2, *losses[1:]], abs=1e-10)
    assert losses_of(tmp_path, "run_rank", PYTHON) == losses
    assert losses_of(tmp_path, "launch", TORCHRUN) == pytest.approx([2, *losses[1:]], abs=1e-10)


HYDRA = """
import hydra
import fnshard as fs


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(cfg):
    print("RATE", cfg.rate)


if __name__ == "__main__":
    fs.launch(main, ranks=2)
"""


def test_a_function_of_hydra_main_finds_its_configuration(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("rate: 1")
    code, shown = ended(tmp_path, HYDRA, "rate=5")
    assert code == 0 and "RATE 5" in shown, shown


@pytest.mark.parametrize(("program", "ranks"), [("train.py", 2), (["true"], 0)])
def test_a_command_is_words_and_ranks_are_there(program, ranks):
    with raises(LaunchError, leaves=[repr(program), f"ranks={ranks}"], fix="fs.launch([sys"):
        fs.launch(program, ranks=ranks)


@pytest.mark.parametrize("restarts", [-1, 1.0, None])
def test_a_number_of_restarts_is_none_or_more(restarts):
    with raises(LaunchError, leaves=f"max_restarts={restarts}", fix="max_restarts=0"):
        fs.launch(["true"], ranks=1, max_restarts=restarts)


def nested():
    def inside() -> None: ...

    return inside


@pytest.mark.parametrize("function", [lambda: None, nested()], ids=["lambda", "nested"])
def test_a_function_without_an_importable_name_is_refused(function):
    with raises(LaunchError, fix=["def it", "fs.launch(["], leaves="args="):
        fs.launch(function, ranks=2)


@pytest.mark.long  # it is executed, and imports torch twice
def test_a_script_without_a_guard_is_told_so(tmp_path):
    """Python executes it: the ranks of a forked script would not import it again."""
    script = tmp_path / "bare.py"
    script.write_text("import fnshard as fs\ndef main(): ...\nfs.launch(main, ranks=1)\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*PYTHON, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and 'Fix: call it below `if __name__ == "__main__":`' in run.stderr


@pytest.mark.parametrize(
    ("environment", "leaves", "fix"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK, MASTER_ADDR, MASTER_PORT"], "torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["WORLD_SIZE=2", "MASTER_ADDR, MASTER_PORT"], "torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["srun", "8 processes", "SLURM_STEP_NUM_TASKS"], "torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["mpirun", "4 processes"], "torchrun"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc'", "torchrun"),
        (
            {"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ["RANK=5", "WORLD_SIZE=2"],
            (),
        ),
    ],
)
def test_several_processes_that_cannot_meet_are_refused(environment, leaves, fix, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with raises(SpecError, leaves=leaves, fix=fix):
        fs.make_mesh()
    assert fs.make_mesh(shard=4, abstract=True).size == 4  # joins nobody
    assert fs.make_mesh(shard=4, simulated=True).size == 4
    assert not dist.is_initialized()
