"""`fs.launch`: real processes that end well, raise, and are killed."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from commands import start_command
from errors import raises
from launched import (
    HEADER,
    environment,
    is_alive,
    program_of,
    ranks_of,
    run,
    start_launch,
    wait_for,
    wait_for_lines,
)

import fnshard as fs
from fnshard.errors import CollectiveError, SpecError
from fnshard.launcher import local as launcher
from fnshard.launcher.local import LaunchError
from fnshard.launcher.rank import Console
from fnshard.mesh import process_group
from fnshard.mesh.process_group import MEETING, RENDEZVOUS, join_group
from fnshard.runtime.files import folder
from fnshard.runtime.files.folder import scratch_directory

pytestmark = pytest.mark.usefixtures("forked")

REDUCE = """
def main():
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    dist.all_reduce(total, group=mesh.get_group("shard"))
    print("hello from", rank)
    with open(f"{out}/{rank}.json", "w") as file:
        names = "GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG"
        json.dump([total.item(), torch.get_num_threads(), *map(os.environ.get, names)], file)
"""


@pytest.mark.executed
def test_normal_job(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in launcher.SIGNALS]
    run(tmp_path, REDUCE)
    for rank in range(2):
        total, threads, interface, workspace = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (total, threads) == (6.0, max(1, len(os.sched_getaffinity(0)) // 2))
        assert interface == launcher.LOOPBACK and workspace == ":4096:8"
    shown = capfd.readouterr().out
    assert "hello from 0" in shown and "hello from 1" not in shown
    for rank in range(2):
        assert (tmp_path / "ranks" / f"rank{rank}.log").read_text() == f"hello from {rank}\n"
    assert dict(os.environ) == environment
    assert [signal.getsignal(s) for s in launcher.SIGNALS] == handlers


def test_one_rank_needs_no_group_and_the_users_number_of_threads_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    body = """
    def main():
        open(f"{out}/seen", "w").write(os.environ["OMP_NUM_THREADS"] + str(dist.is_initialized()))
    """
    run(tmp_path, body, ranks=1)
    assert (tmp_path / "seen").read_text() == "7False"


def test_a_launch_replaces_the_logs_of_ranks_and_no_other_file(tmp_path):
    logs = tmp_path / "ranks"
    logs.mkdir()
    for name in ("rank0.log", "rank12.log", "ranking.log", "rank_correlation.log", "rank1.log.old"):
        (logs / name).write_text("before")
    run(tmp_path, "def main(): ...", ranks=1)
    before = {path.name for path in logs.iterdir() if path.read_text() == "before"}
    assert before == {"ranking.log", "rank_correlation.log", "rank1.log.old"}


def test_a_rank_that_raises_is_named_with_its_traceback_and_not_restarted(tmp_path, capfd):
    body = """
    def burst():
        open(f"{out}/{attempt()}-{rank}", "w").close()
        raise ValueError("seven is not even\\n  it is odd\\nFix: take eight")

    def main():
        if rank == 1:
            burst()
        dist.all_reduce(torch.zeros(1))
    """
    began = time.monotonic()
    with raises(
        LaunchError, leaves="rank 1 of 2", says=["ValueError: seven is not even", "in burst"]
    ) as caught:
        run(tmp_path, body, max_restarts=2)
    assert time.monotonic() - began < 30
    assert [p.name for p in tmp_path.glob("[0-9]-*")] == ["0-1"]
    assert str(tmp_path / "ranks" / "rank1.log") in str(caught.value)
    assert "seven is not even" in (tmp_path / "ranks" / "rank1.log").read_text()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


SAVES = """
import fnshard as fs
from fnshard.errors import CollectiveError
from fnshard.runtime.files import tensorfile

def main():
    mesh = fs.make_mesh(shard=-1, device="cpu")
    full = {"w": torch.ones(8, 4)}
    specs = fs.presets.full_shard(full, mesh)
    real = tensorfile.bytes_of
    tensorfile.bytes_of = lambda t: (time.sleep(SLOW_S), real(t))[1]
    fs.checkpoint.save_async(f"{out}/7", fs.shard(full, specs, mesh), specs=specs, mesh=mesh)
    open(f"{out}/begun{rank}", "w").close()
    if WHO:
        raise ERROR("the loss is NaN")
    dist.all_reduce(torch.zeros(1))
"""


def saves(**words: str) -> str:
    """Return the program in which some ranks raise while a save is under way."""
    body = SAVES
    for word, value in words.items():
        body = body.replace(word, value)
    return body


@pytest.mark.parametrize("who", ["True", "rank == 1"])
def test_a_save_in_the_background_outlives_an_exception(who, tmp_path):
    with raises(LaunchError, leaves="of 2", says="the loss is NaN"):
        run(tmp_path, saves(SLOW_S="1", WHO=who, ERROR="ValueError"))
    assert fs.checkpoint.verify(tmp_path / "7").leaves.keys() == {"params/w"}


def test_a_save_that_fails_after_an_exception_is_told(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "thesis.tex").write_text("not ours")
    with raises(LaunchError, leaves="rank 0", says="the loss is NaN"):
        run(tmp_path, saves(SLOW_S="0.2", WHO="True", ERROR="ValueError"), ranks=1)
    assert str(tmp_path / "7") in (tmp_path / "ranks" / "rank0.log").read_text()


@pytest.mark.parametrize("how", ["lost peers", "Ctrl-C"])
def test_no_rank_waits_for_a_save_that_cannot_end(how, tmp_path):
    """The save would take a day."""
    began = time.monotonic()
    if how == "lost peers":
        with raises(LaunchError, leaves="of 2"):
            run(tmp_path, saves(SLOW_S="86400", WHO="True", ERROR="CollectiveError"))
    else:
        program = program_of(tmp_path, saves(SLOW_S="86400", WHO="True", ERROR="ValueError"))
        process = start_command([str(program), str(tmp_path)], tmp_path, env={"RANK": "0"})
        try:
            wait_for(tmp_path / "begun0")
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 1
        finally:
            process.kill()
    assert time.monotonic() - began < 40
    assert not (tmp_path / "7").exists()


def test_a_killed_rank_is_named_with_its_last_line(tmp_path):
    body = """
    def main():
        if rank == 1:
            print("about to allocate a lot")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))
    """
    began = time.monotonic()
    says = ["signal 9", "SIGKILL", "out of memory", "about to allocate"]
    with raises(LaunchError, leaves="rank 1 of 2", says=says):
        run(tmp_path, body)
    assert time.monotonic() - began < 30


def test_a_rank_that_exits_early_is_named_and_not_restarted(tmp_path):
    body = """
    def main():
        if rank == 1:
            os._exit(3)
        dist.all_reduce(torch.zeros(1))
    """
    with raises(LaunchError, leaves="rank 1 of 2", says="exit code 3"):
        run(tmp_path, body, max_restarts=1)


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
    meetings = tmp_path / "meetings"
    meetings.mkdir()
    ends = ((signal.SIGKILL, -signal.SIGKILL, 1), (signal.SIGTERM, 128 + signal.SIGTERM, 0))
    for number, code, left in ends:
        out = tmp_path / number.name
        out.mkdir()
        command = [sys.executable, str(program), str(out)]
        with start_launch(command, out, {"TMPDIR": str(meetings)}) as process:
            pids = [int(wait_for(out / f"pid{rank}").read_text()) for rank in range(2)]
            assert len(list(meetings.glob("fnshard-*"))) == 1  # what the one before has left is gone
            process.send_signal(number)
            assert process.wait(timeout=30) == code
        assert len(list(meetings.glob("fnshard-*"))) == left
        deadline = time.monotonic() + 20
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, f"ranks {pids} outlived a launcher ended by {number.name}"
            time.sleep(0.05)


def test_folders_that_killed_processes_left_are_cleared(tmp_path, monkeypatch):
    """Folders of living processes and of other names stay, and so does what links lead to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    linked = tmp_path / "elsewhere"
    linked.mkdir()
    with scratch_directory("fnshard-x-") as alive:
        (tmp_path / "fnshard-x-killed" / "deep").mkdir(parents=True)
        with pytest.raises(LaunchError), scratch_directory("fnshard-x-", keep=(LaunchError,)) as kept:
            raise LaunchError("its logs are for the user")
        (tmp_path / "fnshard-logs-1").mkdir()
        (tmp_path / "fnshard-x-link").symlink_to(linked)
        with scratch_directory("fnshard-x-") as mine:
            assert {p.name for p in tmp_path.iterdir()} == {
                alive.name, mine.name, kept.name, "fnshard-logs-1", "fnshard-x-link", "elsewhere"
            }  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {
        kept.name, "fnshard-logs-1", "fnshard-x-link", "elsewhere"
    }  # fmt: skip


@pytest.mark.long  # test_replicas has dead ranks, test_resume memory
@pytest.mark.executed
def test_memory_outlives_a_rank_and_not_the_job(tmp_path, monkeypatch):
    """A restarted rank finds what a dead one wrote; what a killed launcher left is kept, or cleared."""
    body = """
    from fnshard.mesh.process_group import launcher
    from fnshard.runtime.files.folder import memory_directory

    def main():
        memory = memory_directory("job", launcher())
        if attempt() == 0:
            open(memory / "kept", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        open(f"{out}/found", "w").write(" ".join([oct(os.stat(memory).st_mode), *os.listdir(memory)]))
    """
    monkeypatch.setenv("FNSHARD_MEMORY", str(tmp_path))
    left, other, alive = (tmp_path / f"fnshard-memory-{name}" for name in ("job", "killed", "alive"))
    for path, owner in ((left, ended_process()), (other, ended_process()), (alive, os.getppid())):
        path.mkdir(mode=0o700)
        (path / "left").touch()
        (path / "owner").write_text(str(owner))
    run(tmp_path, body, ranks=1, max_restarts=1)
    mode, *names = (tmp_path / "found").read_text().split()
    assert (mode, set(names)) == ("0o40700", {"left", "kept", "owner"})
    assert not left.exists() and not other.exists() and alive.exists()


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("how", ["open", "owned"])
def test_memory_that_others_may_enter_or_use_is_refused(how, tmp_path, monkeypatch):
    monkeypatch.setenv("FNSHARD_MEMORY", str(tmp_path))
    memory = tmp_path / "fnshard-memory-job"
    memory.mkdir()
    memory.chmod(0o755 if how == "open" else 0o700)
    (memory / "owner").write_text(str(os.getppid()))
    with pytest.raises(FileExistsError, match=r"it is in use, or open to others.*fnshard-memory-job"):
        folder.memory_directory("job", os.getpid() if how == "owned" else os.getppid())


def test_a_folder_that_is_cleared_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = []

    def too_late(path):
        opened.append(path)
        if len(opened) == 1:
            path.rmdir()
        return real(path)

    real = folder._open
    monkeypatch.setattr(folder, "_open", too_late)
    with scratch_directory("fnshard-x-") as mine:
        assert mine.is_dir() and opened[-1] == mine != opened[0]


# ------------------------------------------------------------------ meeting at an address
def place_to_meet(monkeypatch: pytest.MonkeyPatch, host: str, port: int, rank: int = 0) -> None:
    for name in (RENDEZVOUS, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("host", "port"), [("no-such-host.invalid", 29500), ("localhost", 70000)])
def test_a_place_that_there_is_not_is_told_at_once(monkeypatch, host, port):
    place_to_meet(monkeypatch, host, port, rank=1)
    began = time.monotonic()
    with raises(SpecError, leaves=["rank 1 of 2", f"MASTER_ADDR={host}"], says="no such place"):
        join_group("cpu", 600.0)
    assert time.monotonic() - began < 30


def test_a_port_that_is_taken_is_told_at_once(monkeypatch):
    for host, family in (("127.0.0.1", socket.AF_INET), ("", socket.AF_INET), ("::", socket.AF_INET6)):
        with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as taken:
            place_to_meet(monkeypatch, "localhost", taken.getsockname()[1])
            began = time.monotonic()
            with raises(SpecError, leaves="rank 0 of 2", says="the port is taken"):
                join_group("cpu", 600.0)
            assert time.monotonic() - began < 30


@pytest.mark.parametrize("rank", [0, 1])
def test_who_meets_nobody_or_a_stranger_is_told_in_time(monkeypatch, rank):
    """Torch waits for ever for another program's answer."""
    monkeypatch.setattr(process_group, "SLACK_S", 2.0)
    monkeypatch.setattr(process_group, "MEET_S", 0.5)
    with socket.create_server(("", 0)) as server:
        place_to_meet(monkeypatch, "localhost", server.getsockname()[1], rank=rank)
        if rank == 0:
            server.close()
        why = "who listens there" if rank else "1/2 clients joined"
        with raises(CollectiveError, leaves=f"rank {rank} of 2", says=["0.5 s", why]):
            join_group("cpu", 0.5)
    for (
        thread
    ) in threading.enumerate():  # torch's, behind a stranger that closes, prints what a later test sees
        if thread.name == MEETING:
            thread.join(60)
            assert not thread.is_alive()


def test_ranks_may_come_later_than_a_collective_may_take(monkeypatch, tmp_path):
    """They import at different speeds; who never comes is named."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", RENDEZVOUS: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "MEET_S", 0.5)
    monkeypatch.setattr(process_group, "STOP_S", 0.1)
    for asked, when in ((False, "within 0.5 s"), (True, "SIGTERM")):
        with raises(CollectiveError, leaves=["rank 1 of 3", "rank 0, 2"], says=when):
            join_group("cpu", 0.1, lambda asked=asked: asked)


@pytest.mark.parametrize("lacks", ["room", "a reader"])
def test_a_console_ends_no_program(lacks, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    target = {"room": "/dev/full", "a reader": writer}[lacks]
    log = tmp_path / "log"
    with suppress(OSError), open(target, "w", encoding="utf-8") as stream, log.open("w") as file:
        for _ in range(2):
            print("« hello »", file=Console(stream, file), flush=True)
    assert log.read_text() == "« hello »\n" * 2


# ------------------------------------------------------------------ restarts
def test_restarts_run_out_and_each_is_told_in_one_line(tmp_path, capfd):
    body = """
    def main():
        open(f"{out}/{attempt()}-{rank}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with raises(LaunchError, leaves="rank 0 of 1", says="signal 9"):
        run(tmp_path, body, ranks=1, max_restarts=1)
    assert sorted(p.name for p in tmp_path.glob("[0-9]-*")) == ["0-0", "1-0"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("restart 1 of 1: rank 0 of 1 was killed by signal 9 (SIGKILL)")


MEETS_AGAIN = """
imported = time.time()
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
begun = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks

def main():
    total = torch.ones(1)
    dist.all_reduce(total)
    with open(f"{out}/times.jsonl", "a") as file:
        file.write(json.dumps([attempt(), rank, time.time(), imported - begun]) + "\\n")
    while attempt() < 1:
        time.sleep(0.01)
        dist.all_reduce(total)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("how", "count"), [("launch", 50), ("torchrun", 10)])
def test_every_restart_is_within_ten_seconds_beyond_imports(how, count, tmp_path):
    seconds = []
    for number in range(count):
        out = tmp_path / str(number)
        out.mkdir()
        command = [sys.executable, "-u", str(program_of(out, MEETS_AGAIN)), str(out)]
        started_by = start_launch(command, out, execute=True, max_restarts=1)
        if how == "torchrun":
            started_by = subprocess.Popen([sys.executable, *TORCHRUN, *command[2:]], env=environment())
        with started_by as process:
            wait_for_lines(out / "times.jsonl", 2, process)
            killed = time.time()
            os.kill(ranks_of(process.pid)[number % 2], signal.SIGKILL)
            times = wait_for_lines(out / "times.jsonl", 4, process)
            assert process.wait(timeout=60) == 0
        seconds.append(max(now - killed - imports for again, _, now, imports in times if again))
    print("beyond imports, seconds:", sorted(round(s, 2) for s in seconds))
    assert max(seconds) < 10


def failing(kind: str) -> None:
    """Fail in a function of this file, in the library by a mistake, or in `fn` under the library."""
    params = {"w": torch.ones(4)}
    if kind == "own":
        json.loads("{")
    if kind == "library":
        fs.match_specs(params, [("nope", fs.LayoutSpec())])
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    step = fs.shard_step(lambda p, x: {}[p["w"].shape], specs, backend="eager")
    step(fs.shard(params, specs, fs.make_mesh(device="cpu")), torch.ones(4))


@pytest.mark.parametrize(
    ("kind", "name"), [("own", "JSONDecodeError"), ("library", "SpecError"), ("fn", "KeyError")]
)
def test_a_failure_shows_frames_of_the_program_alone(kind: str, name: str, tmp_path: Path) -> None:
    with raises(LaunchError, says=name) as error:
        fs.launch(failing, ranks=1, args=(kind,), logs=tmp_path)
    files = re.findall(r'File "(.*?)"', str(error.value))
    assert __file__ in files and not any("/launcher/rank" in f for f in files)
    library = str(Path(fs.__file__).parent)
    assert not any(f.startswith(library) or "elastic" in f for f in files)
    assert library in (tmp_path / "rank0.log").read_text()  # which has them all
