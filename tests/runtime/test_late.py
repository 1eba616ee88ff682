"""Where waits return at once: one of three ranks fails and is named as the cause, whatever others report."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest
from commands import forking, popen_from_server
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fnshard.launcher import local, post_mortem
from fnshard.launcher.local import LaunchError

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1.5
PROGRAM = """
import os, signal, sys, threading
import torch
import fnshard as fs
from fnshard.mesh.process_group import attempt
from fnshard.launcher.rank import run_rank
from tests.support.late import Stream

rank, FAILS, ABORTS, TIMEOUT_S = int(os.environ["RANK"]), *sys.argv[2:4], float(sys.argv[4])


def fail():
    if FAILS == "has no memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if FAILS == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAILS == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAILS == "is aborted":
        os.abort()
    if FAILS == "hangs":
        threading.Event().wait()


def main():
    with open(f"{sys.argv[1]}/attempts", "a") as file:
        file.write("+" * (rank == 0))
    turns = 0

    def leaf(path, grad, slots, param, info):
        if rank == 1 and turns == 2:
            fail()
        return -0.1 * grad, {}

    mesh, stream = fs.make_mesh(shard=-1, device="cpu"), Stream(ABORTS == "aborts")
    stream.connect(mesh, TIMEOUT_S)
    params = {f"l.{n}.w": torch.ones(6, 6) for n in range(2)}

    def loss(p, x):
        for weight in p.values():
            x = (x @ weight).tanh()
        return x.sum()

    step = fs.shard_step(
        loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=fs.optim.Optimizer("own()", leaf),
        backend="eager", timeout=TIMEOUT_S,
    )
    state = step.init(params)
    for turns in range(1, 5):
        state, metrics = step(state, torch.ones(2, 6))
        stream.synchronize()
    stream.synchronize()

run_rank(main, device_type="cpu", timeout_s=60)
"""


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Ranks are forked from a process that has imported torch."""
    monkeypatch.setattr(local, "subprocess", forking(popen_from_server))


def launch(tmp_path: Path, fails: str, aborts: str, max_restarts: int = 0) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    local.launch(
        [sys.executable, "-u", str(program), str(tmp_path), fails, aborts, str(TIMEOUT_S)],
        ranks=3, logs=tmp_path / "ranks", max_restarts=max_restarts, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.long
def test_ranks_that_are_well_end_well(tmp_path):
    launch(tmp_path, "nothing", "aborts")
    assert (tmp_path / "attempts").read_text() == "+"


@pytest.mark.parametrize("aborts", ["aborts", pytest.param("waits", marks=pytest.mark.long)])
def test_who_has_no_memory_is_the_cause_and_nothing_is_tried_again(tmp_path, aborts):
    with pytest.raises(
        LaunchError, match=r"^rank 1 of 3 failed: torch.OutOfMemoryError: CUDA out"
    ) as reported:
        launch(tmp_path, "has no memory", aborts, max_restarts=1)
    assert re.search(
        r"(?s)It was in line \d+ of the schedule.*the step's peak is .* by the plan", str(reported.value)
    )
    assert (tmp_path / "attempts").read_text() == "+"


SILENT = (
    r"rank [02] of 3 failed: fnshard.errors.CollectiveError: line \d+ of the schedule, \S+ \S+ wait .*"
    r"\n  rank 1 did not answer within 1.5 s"
)


@pytest.mark.long
def test_a_stopped_rank_is_named(tmp_path):
    with pytest.raises(
        LaunchError, match=rf"(?s)^rank 1 of 3 stood still \(SIGSTOP\) and was killed; {SILENT}"
    ):
        launch(tmp_path, "is stopped", "waits")


def test_who_hangs_is_named(tmp_path):
    with pytest.raises(LaunchError, match=rf"(?s)^{SILENT}.*Still at work, and killed: rank 1 "):
        launch(tmp_path, "hangs", "waits")


@pytest.mark.long
@pytest.mark.parametrize("aborts", ["aborts", "waits"])
def test_who_is_killed_is_the_cause_of_aborted_communicators(tmp_path, aborts, capfd):
    with pytest.raises(LaunchError, match=r"^rank 1 of 3 was killed by signal 9 \(SIGKILL\)"):
        launch(tmp_path, "is killed", aborts, max_restarts=1)
    assert "restart 1 of 1: rank 1 of 3 was killed by signal 9" in capfd.readouterr().err
    assert (tmp_path / "attempts").read_text() == "++"


@pytest.mark.long
def test_a_communicator_that_aborts_by_itself_is_named_and_tried_again(tmp_path):
    with pytest.raises(LaunchError, match=r"^rank 1 of 3 was killed by signal 6 \(SIGABRT\)"):
        launch(tmp_path, "is aborted", "waits", max_restarts=1)
    assert (tmp_path / "attempts").read_text() == "++"


NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:42, "


@pytest.mark.parametrize(
    "text",
    [
        NCCL
        + "remote process exited or there was a network error\nncclRemoteError: A call failed possibly due "
        "to a network error or a remote process exiting prematurely.",
        NCCL + "unhandled system error\nIt can be also caused by unexpected exit of a remote peer",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_what_nccl_says_of_a_peer_is_an_echo(text):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")
    failure.error_file_data = {"message": {"extraInfo": {"py_callstack": text}}}
    assert post_mortem.echo_level(failure) > 1
