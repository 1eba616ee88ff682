"""Launched ranks that stand still, and signals: who gets them, who ends, and who is ended."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from errors import raises
from launched import is_alive, program_of, run, start_launch, wait_for

from fnshard.launcher.local import LaunchError
from fnshard.launcher.post_mortem import PostMortem

pytestmark = pytest.mark.usefixtures("forked")

# ------------------------------------------------------------------ ranks that stand still
WAITS = """
def main():
    open(f"{out}/{attempt()}-{rank}", "w").close()
    dist.all_reduce(torch.ones(1))
    if attempt() == 0 and rank == 1:
        HANGS
    dist.all_reduce(torch.ones(1))
"""
SILENT_S = 3.0  # ranks meet within it, too
STANDS_STILL = WAITS.replace("HANGS", "os.kill(os.getpid(), signal.SIGSTOP)")


def test_a_stopped_rank_is_a_death_like_any_other(tmp_path, capfd):
    run(tmp_path, STANDS_STILL, timeout_s=SILENT_S, max_restarts=1)
    assert {p.name for p in tmp_path.glob("[01]-*")} == {"0-0", "0-1", "1-0", "1-1"}
    assert "restart 1 of 1: rank 1 of 2 stood still (SIGSTOP)" in capfd.readouterr().err


TRAINS = """
import fnshard as fs
def main():
    mesh, params = fs.make_mesh(shard=2, device="cpu"), {"w": torch.ones(8)}
    step = fs.shard_step(lambda p, x: (p["w"] * x).sum(), fs.presets.full_shard(params, mesh),
                         optimizer=fs.optim.sgd(0.1), mesh=mesh, backend="eager", timeout=SECONDS)
    state = step.init(params)
    for _ in range(STEPS):
        state, _ = step(state, torch.ones(8))
    if rank == 1:
        ALONE
    fs.checkpoint.save(f"{out}/saved", state)
"""


@pytest.mark.suite({
    "2 - rank-*": "calls that differ",
    "1-sys.exit()-*": "a rank that has ended",
})  # fmt: skip
@pytest.mark.parametrize(
    ("steps", "alone", "seconds", "says"),
    [
        ("2 - rank", "pass", 600, ["rank 0: step (program.py", "rank 1: checkpoint.save (", "fs.lockstep"]),
        ("1", "sys.exit()", 600, ["only rank 0", "checkpoint.save", "rank 1: has ended"]),
        ("1", "fs.hf.save(out, state)", 600, ["rank 0: checkpoint.save", "rank 1: hf.save"]),
        ("1", "os.kill(os.getpid(), signal.SIGSTOP)", 4, ["rank 1", "4 s", "stopped"]),
    ],
)
def test_who_calls_what_alone_is_named(steps, alone, seconds, says, tmp_path):
    body = TRAINS.replace("STEPS", steps).replace("ALONE", alone).replace("SECONDS", str(seconds))
    with raises(LaunchError, says=says):
        run(tmp_path, body)


def test_a_silent_rank_is_named(tmp_path):
    with raises(LaunchError, leaves=["rank 0 of 2", "rank 1 (log: "]):
        run(tmp_path, WAITS.replace("HANGS", "time.sleep(600)"), timeout_s=SILENT_S)


# ------------------------------------------------------------------ signals
UNTIL_ASKED = """
def main():
    open(f"{out}/ready{rank}", "w").write(str(os.getpid()))
    while not stop.asked:
        time.sleep(0.01)
    open(f"{out}/heard{rank}", "w").close()
    time.sleep(LASTS)
    open(f"{out}/saved{rank}", "w").close()
"""


def test_sigterm_is_handed_on_and_ranks_may_finish(tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0.3"), stop=True)
    with start_launch([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        for rank in range(2):
            wait_for(tmp_path / f"ready{rank}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert {p.name for p in tmp_path.glob("saved*")} == {"saved0", "saved1"}


IMPORTS = """
import os, signal, sys, time
open(f"{sys.argv[1]}/begun" + os.environ["RANK"], "w").close()
while signal.SIGTERM not in signal.sigpending():
    time.sleep(0.01)
"""


def test_sigterm_during_the_imports_is_kept_for_later(tmp_path):
    """The ranks have no handler yet; nobody dies of it."""
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0"), stop=True)
    program.write_text(IMPORTS + program.read_text())
    with start_launch([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        for rank in range(2):
            wait_for(tmp_path / f"begun{rank}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert {p.name for p in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_a_second_sigterm_ends_who_does_not_end(tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "600"), stop=True)
    with start_launch([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        for rank in range(2):
            wait_for(tmp_path / f"ready{rank}")
        process.send_signal(signal.SIGTERM)
        wait_for(tmp_path / "heard0")  # two at once are one
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert not any(is_alive(int((tmp_path / f"ready{rank}").read_text())) for rank in range(2))


def test_a_rank_whose_launcher_died_during_its_imports_does_not_begin(tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0"))
    marks = (
        "import os, sys, time; open(f'{sys.argv[1]}/pid' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    )
    waits = "while os.getppid() == int(os.environ['FNSHARD_LAUNCHER']): time.sleep(0.01)"
    program.write_text(f"{marks}\n{waits}\n{program.read_text()}")
    with start_launch([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        pids = [wait_for(tmp_path / f"pid{rank}") for rank in range(2)]
        process.kill()
        process.wait(timeout=30)
    deadline = time.monotonic() + 20
    while any(is_alive(int(path.read_text() or 0)) for path in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    assert not list(tmp_path.glob("ready*"))


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
    ended = failure(3, -signal.SIGTERM, None, 1)
    for cause in (
        failure(2, -signal.SIGKILL, None, 9),
        failure(2, 1, "KeyError: 'x'", 9),
        failure(2, 7, None, 9),
    ):
        shown = PostMortem({0: echo, 2: cause, 3: ended}).describe(4, Path("logs"))
        assert shown.startswith("rank 2 of 4 ")
