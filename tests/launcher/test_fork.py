"""Ranks that are forks of the process that starts them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from commands import OUTPUT, start_command

PROGRAM = """
import fcntl, json, os, random, signal, sys, threading
import numpy as np, torch, torch.distributed as dist
from fnshard.launcher.local import LaunchError, launch
from fnshard.launcher.rank import run_rank

out, starter = sys.argv[1], os.getpid()
torch.set_num_threads(1)
lock = open(f"{out}/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)

def be():
    run_rank(main, device_type="cpu", timeout_s=60)

%s

command = [sys.executable, "-c", f"import os; open('{out}/command' + os.environ['RANK'], 'w')"]
try:
    launch(command, ranks=2, logs=f"{out}/ranks", env={"OMP_NUM_THREADS": "3"}, fork=be)
except LaunchError as error:
    open(f"{out}/error", "w").write(str(error))
"""


def start(tmp_path: Path, body: str) -> tuple[str, str]:
    """Run a program whose ranks run `main` of the body; return what it prints."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM % textwrap.dedent(body))
    assert start_command([str(program), str(tmp_path)], tmp_path).wait(120) == 0
    return tuple((tmp_path / name).read_text() for name in OUTPUT.values())


def test_ranks_are_forks_with_their_own_environment_log_and_session(tmp_path: Path) -> None:
    shown = start(tmp_path, """
        def main():
            rank, total = dist.get_rank(), torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(total)
            held = any(os.path.realpath(f"/proc/self/fd/{n}") == os.path.realpath(f"{out}/lock")
                       for n in os.listdir("/proc/self/fd"))
            print("hello from", rank)
            seen = {"starter": starter == os.getppid(), "total": total.item(), "held": held,
                    "threads": torch.get_num_threads(), "session": os.getsid(0) == os.getpid(),
                    "drawn": [random.random(), np.random.rand(), torch.rand(()).item()]}
            with open(f"{out}/{rank}.json", "w") as file:
                json.dump(seen, file)
    """)  # fmt: skip
    assert shown == ("hello from 0\n", "")
    assert not (tmp_path / "command0").exists() and not (tmp_path / "error").exists()
    seen: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    drawn = [each.pop("drawn") for each in seen]
    assert all(first != second for first, second in zip(*drawn, strict=True))
    expected = {"starter": True, "total": 3.0, "held": False, "threads": 3, "session": True}
    assert seen == [expected] * 2
    for rank in range(2):
        assert (tmp_path / "ranks" / f"rank{rank}.log").read_text() == f"hello from {rank}\n"


def test_a_fork_that_raises_and_one_that_is_killed_are_named(tmp_path: Path) -> None:
    for body, words in {
        "raise ValueError('seven is not even')": "rank 1 of 2 failed: ValueError: seven is not even",
        "os.kill(os.getpid(), signal.SIGKILL)": "rank 1 of 2 was killed by signal 9",
    }.items():
        start(tmp_path, f"""
            def main():
                if dist.get_rank() == 1:
                    {body}
                dist.all_reduce(torch.zeros(1))
        """)  # fmt: skip
        assert words in (tmp_path / "error").read_text()


def test_files_of_the_launcher_do_not_write_into_those_of_a_rank(tmp_path: Path) -> None:
    """A rank's new files have other numbers than those that the launcher's objects still know."""
    start(tmp_path, """
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()
        before = open(f"{out}/before", "w", buffering=1)

        def main():
            mine = [open(f"{out}/mine{dist.get_rank()}_{n}", "w", buffering=1) for n in range(30)]
            resource_tracker.ensure_running()  # writes to its pipe
            before.write("of the launcher" + chr(10))
            for file in mine:
                file.write("whole" + chr(10))
    """)  # fmt: skip
    assert not (tmp_path / "error").exists()
    assert {path.read_text() for path in tmp_path.glob("mine*")} == {"whole\n"}
    assert len(list(tmp_path.glob("mine*"))) == 60 and (tmp_path / "before").read_text() == ""


def test_a_process_with_threads_runs_the_command_instead(tmp_path: Path) -> None:
    start(tmp_path, """
        main, done = None, threading.Event()
        threading.Thread(target=done.wait, daemon=True).start()
    """)  # fmt: skip
    assert not (tmp_path / "error").exists()
    assert [(tmp_path / f"command{rank}").exists() for rank in range(2)] == [True, True]
