"""`fnshard.launch`: real processes that end well, raise, and are killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fnshard import launch
from fnshard.launch import LaunchError

ROOT = Path(__file__).resolve().parents[1]
HEADER = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from fnshard.launch import run_rank
out = sys.argv[1]
rank = int(os.environ["RANK"])
"""


def run(tmp_path: Path, body: str, *, ranks: int = 2, max_restarts: int = 0) -> None:
    """`body` defines `main()`; each rank runs it."""
    program = tmp_path / "program.py"
    ending = "run_rank(main, device_type='cpu', timeout_s=60)"
    program.write_text(HEADER + textwrap.dedent(body) + "\n" + ending + "\n")
    launch.launch(
        [sys.executable, "-u", str(program), str(tmp_path)],
        ranks=ranks,
        logs=tmp_path / "ranks",
        max_restarts=max_restarts,
        env={"PYTHONPATH": str(ROOT)},
    )


REDUCE = """
def main():
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    dist.all_reduce(total, group=mesh.get_group("shard"))
    print("hello from", rank)
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump([total.item(), torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]], file)
"""


def test_normal_job(tmp_path, capfd):
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in launch.SIGNALS]
    run(tmp_path, REDUCE)
    for rank in range(2):
        total, threads, interface = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (total, threads) == (6.0, launch.cpu_threads(2))
        assert interface == launch.LOOPBACK
    shown = capfd.readouterr().out
    assert "hello from 0" in shown and "hello from 1" not in shown
    for rank in range(2):
        assert (tmp_path / "ranks" / f"rank{rank}.log").read_text() == f"hello from {rank}\n"
    assert dict(os.environ) == environment
    assert [signal.getsignal(s) for s in launch.SIGNALS] == handlers


@pytest.mark.long
def test_twenty_jobs_in_a_row_end_well(tmp_path):
    for _ in range(20):
        run(tmp_path, REDUCE)


def test_one_rank_needs_no_group(tmp_path):
    body = """
    def main():
        open(f"{out}/alone", "w").write(str(dist.is_initialized()))
    """
    run(tmp_path, body, ranks=1)
    assert (tmp_path / "alone").read_text() == "False"


def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path, capfd):
    body = """
    def burst():
        raise ValueError("seven is not even\\n  it is odd\\nFix: take eight")

    def main():
        if rank == 1:
            burst()
        dist.all_reduce(torch.zeros(1))
    """
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"(?s)rank 1 of 2 failed: ValueError: seven is not even.*in burst"
    ) as caught:
        run(tmp_path, body)
    assert time.monotonic() - began < 30
    assert str(tmp_path / "ranks" / "rank1.log") in str(caught.value)
    assert "seven is not even" in (tmp_path / "ranks" / "rank1.log").read_text()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_killed_rank_is_named_with_its_last_line(tmp_path):
    body = """
    def main():
        if rank == 1:
            print("about to allocate a lot")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))
    """
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 was killed by SIGKILL.*about to allocate a lot"):
        run(tmp_path, body)
    assert time.monotonic() - began < 30


def test_a_rank_that_exits_early_is_named(tmp_path):
    body = """
    def main():
        if rank == 1:
            os._exit(3)
        dist.all_reduce(torch.zeros(1))
    """
    with pytest.raises(LaunchError, match="rank 1 of 2 ended with exit code 3, without a traceback"):
        run(tmp_path, body)


def test_restart_runs_all_ranks_again(tmp_path):
    body = """
    def main():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        dist.all_reduce(total)
        open(f"{out}/{attempt}-{rank}", "w").write(str(total.item()))
    """
    run(tmp_path, body, max_restarts=1)
    assert {p.name for p in tmp_path.glob("[01]-*")} == {"1-0", "1-1"}


def test_ranks_end_with_their_launcher(tmp_path):
    """SIGTERM ends the launcher and its ranks; SIGKILL of the launcher leaves no rank behind."""
    program = tmp_path / "sleeper.py"
    program.write_text(
        HEADER
        + textwrap.dedent("""
        def main():
            open(f"{out}/pid{rank}.tmp", "w").write(str(os.getpid()))
            os.rename(f"{out}/pid{rank}.tmp", f"{out}/pid{rank}")
            time.sleep(120)

        run_rank(main, device_type="cpu")
        """)
    )
    for number, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        out = tmp_path / number.name
        out.mkdir()
        command = f"[sys.executable, {str(program)!r}, {str(out)!r}]"
        starter = (
            "import sys, pathlib; from fnshard.launch import launch; "
            f"launch({command}, ranks=2, logs=pathlib.Path({str(out)!r}))"
        )
        with subprocess.Popen(
            [sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": str(ROOT)}
        ) as process:
            pids = [int(_wait_for(out / f"pid{rank}").read_text()) for rank in range(2)]
            process.send_signal(number)
            assert process.wait(timeout=30) == code
        deadline = time.monotonic() + 20
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, f"ranks {pids} outlived a launcher ended by {number.name}"
            time.sleep(0.05)


def _wait_for(path: Path, seconds: float = 60) -> Path:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in main\n    main()\n    ^^^^^^\n'


def test_an_echo_is_never_the_cause():
    """Both ranks failed within one poll: the one whose peer died is not to blame."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    def failure(rank: int, exitcode: int, last: str | None, at: int) -> ProcessFailure:
        made = ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file="")
        made.timestamp = at
        if last is not None:
            made.error_file_data = {"message": {"extraInfo": {"py_callstack": FRAMES + last + "\n"}}}
        return made

    echo = failure(0, 1, "RuntimeError: [...] Connection closed by peer [127.0.0.1]:1\nFix: look there", 1)
    told = failure(3, -signal.SIGTERM, None, 1)
    for cause in (
        failure(2, -signal.SIGKILL, None, 9),
        failure(2, 1, "KeyError: 'x'", 9),
        failure(2, 7, None, 9),
    ):
        shown = launch.describe_failure({0: echo, 2: cause, 3: told}, 4, Path("logs"))
        assert shown.startswith("rank 2 of 4 ")
