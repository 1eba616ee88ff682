"""`fs.launch`: real processes that end well, raise, and are killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Forking

from fnshard.errors import CollectiveError, SpecError
from fnshard.launcher import local as launcher
from fnshard.launcher.local import LaunchError
from fnshard.mesh import process_group
from fnshard.mesh.process_group import RENDEZVOUS, join_group
from fnshard.runtime.files import folder
from fnshard.runtime.files.folder import scratch_directory

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forked(request, monkeypatch):
    """Ranks are forked from a process that has imported torch, but where a test is marked `executed`."""
    if request.node.get_closest_marker("executed") is None:
        monkeypatch.setattr(launcher, "subprocess", Forking(request.getfixturevalue("warm").popen))


HEADER = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from fnshard.mesh.process_group import attempt
from fnshard.launcher.rank import Stop, run_rank
out = sys.argv[1]
rank = int(os.environ["RANK"])
"""


def program_of(tmp_path: Path, body: str, *, timeout_s: float = 60, stop: bool = False) -> Path:
    """`body` defines `main()`; each rank runs it. With `stop` SIGTERM is noted in `stop.asked`."""
    program = tmp_path / "program.py"
    how = f"device_type='cpu', timeout_s={timeout_s}" + ", stop=stop" * stop
    text = [HEADER, "stop = Stop()", textwrap.dedent(body), f"run_rank(main, {how})"]
    program.write_text("\n".join(text) + "\n")
    return program


def run(tmp_path: Path, body: str, *, ranks: int = 2, max_restarts: int = 0, timeout_s: float = 60) -> None:
    """`body` defines `main()`; each rank runs it."""
    program = program_of(tmp_path, body, timeout_s=timeout_s)
    launcher.launch(
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


@pytest.mark.executed
def test_normal_job(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in launcher.SIGNALS]
    run(tmp_path, REDUCE)
    for rank in range(2):
        total, threads, interface = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (total, threads) == (6.0, launcher.cpu_threads(2))
        assert interface == launcher.LOOPBACK
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


@pytest.mark.long
def test_twenty_jobs_in_a_row_end_well(tmp_path):
    for _ in range(20):
        run(tmp_path, REDUCE)


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
    """And with what may have killed it."""
    body = """
    from fnshard.launcher.rank import expect_memory

    def main():
        if rank == 1:
            expect_memory(12_300_000_000)
            print("about to allocate a lot")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))
    """
    began = time.monotonic()
    said = r"rank 1 of 2 was killed by signal 9 \(SIGKILL\): perhaps out of memory "
    memory = r"\(peak predicted 12.3 GB a rank, free at the least \d[\d.]* GB\)\.\n.*about to allocate a lot"
    with pytest.raises(LaunchError, match=said + memory):
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
    meetings, environment = tmp_path / "meetings", {**_environment(), "TMPDIR": str(tmp_path / "meetings")}
    meetings.mkdir()
    ends = ((signal.SIGKILL, -signal.SIGKILL, 1), (signal.SIGTERM, 128 + signal.SIGTERM, 0))
    for number, code, left in ends:
        out = tmp_path / number.name
        out.mkdir()
        command = f"[sys.executable, {str(program)!r}, {str(out)!r}]"
        starter = (
            "import sys, pathlib; from fnshard.launcher.local import launch; "
            f"launch({command}, ranks=2, logs=pathlib.Path({str(out)!r}))"
        )
        with subprocess.Popen([sys.executable, "-c", starter], env=environment) as process:
            pids = [int(_wait_for(out / f"pid{rank}").read_text()) for rank in range(2)]
            assert len(list(meetings.glob("fnshard-*"))) == 1  # what the one before has left is gone
            process.send_signal(number)
            assert process.wait(timeout=30) == code
        assert len(list(meetings.glob("fnshard-*"))) == left
        deadline = time.monotonic() + 20
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, f"ranks {pids} outlived a launcher ended by {number.name}"
            time.sleep(0.05)


def test_folders_that_killed_processes_left_are_cleared(tmp_path, monkeypatch):
    """Those of living ones, of other names, and what links lead to stay."""
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
    told = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("host", "port"), [("no-such-host.invalid", 29500), ("localhost", 70000)])
def test_a_place_that_there_is_not_is_told_at_once(monkeypatch, host, port):
    place_to_meet(monkeypatch, host, port, rank=1)
    began = time.monotonic()
    with pytest.raises(
        SpecError, match=rf"(?s)rank 1 of 2 .*: there is no such place\.\n  MASTER_ADDR={host}, "
    ):
        join_group("cpu", 600.0)
    assert time.monotonic() - began < 30


def test_a_port_that_is_taken_is_told_at_once(monkeypatch):
    for host, family in (("127.0.0.1", socket.AF_INET), ("", socket.AF_INET), ("::", socket.AF_INET6)):
        with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as taken:
            place_to_meet(monkeypatch, "localhost", taken.getsockname()[1])
            began = time.monotonic()
            with pytest.raises(SpecError, match=r"rank 0 of 2 cannot meet the others: the port is taken\."):
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
        why = "who listens there does not answer" if rank else "Timed out.*1/2 clients joined"
        with pytest.raises(CollectiveError, match=rf"rank {rank} of 2 .* within 0.5 s \({why}"):
            join_group("cpu", 0.5)


def test_ranks_may_come_later_than_a_collective_may_take(monkeypatch, tmp_path):
    """They import at different speeds; who never comes is named."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", RENDEZVOUS: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "MEET_S", 0.5)
    with pytest.raises(CollectiveError, match=r"(?s)rank 1 of 3 .* within 0.5 s\.\n  rank 0, 2 did not come"):
        join_group("cpu", 0.1)


# ------------------------------------------------------------------ restarts


def test_an_exception_is_not_tried_again(tmp_path):
    body = """
    def main():
        open(f"{out}/{attempt()}-{rank}", "w").close()
        raise ValueError("this will not get better")
    """
    with pytest.raises(LaunchError, match="ValueError: this will not get better"):
        run(tmp_path, body, ranks=1, max_restarts=2)
    assert [p.name for p in tmp_path.glob("[0-9]-*")] == ["0-0"]


def test_restarts_run_out_and_each_is_told_in_one_line(tmp_path, capfd):
    body = """
    def main():
        open(f"{out}/{attempt()}-{rank}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(LaunchError, match="rank 0 of 1 was killed by signal 9"):
        run(tmp_path, body, ranks=1, max_restarts=1)
    assert sorted(p.name for p in tmp_path.glob("[0-9]-*")) == ["0-0", "1-0"]
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("restart 1 of 1: rank 0 of 1 was killed by signal 9 (SIGKILL)")


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
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("how", "count"), [("launch", 50), ("torchrun", 10)])
def test_every_restart_is_within_ten_seconds_beyond_imports(how, count, tmp_path):
    seconds = []
    for number in range(count):
        out = tmp_path / str(number)
        out.mkdir()
        command = [sys.executable, "-u", str(program_of(out, MEETS_AGAIN)), str(out)]
        started_by = started(command, out, max_restarts=1)
        if how == "torchrun":
            started_by = subprocess.Popen([sys.executable, *TORCHRUN, *command[2:]], env=_environment())
        with started_by as process:
            _lines(out / "times.jsonl", 2, process)
            killed = time.time()
            os.kill(_ranks_of(process.pid)[number % 2], signal.SIGKILL)
            times = _lines(out / "times.jsonl", 4, process)
            assert process.wait(timeout=60) == 0
        seconds.append(max(now - killed - imports for again, _, now, imports in times if again))
    print("beyond imports, seconds:", sorted(round(s, 2) for s in seconds))
    assert max(seconds) < 10


# ------------------------------------------------------------------ ranks that stand still


WAITS = """
def main():
    open(f"{out}/{attempt()}-{rank}", "w").close()
    dist.all_reduce(torch.ones(1))
    if attempt() == 0 and rank == 1:
        HANGS
    dist.all_reduce(torch.ones(1))
"""
SILENT_s = 4.0  # ranks meet within it, too
STANDS_STILL = WAITS.replace("HANGS", "os.kill(os.getpid(), signal.SIGSTOP)")


@pytest.mark.long  # the next names it, too
def test_a_stopped_rank_is_named_and_ends_the_job(tmp_path):
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"^rank 1 of 2 stood still \(SIGSTOP\) and was killed; rank 0 of 2"
    ):
        run(tmp_path, STANDS_STILL, timeout_s=SILENT_s)
    assert time.monotonic() - began < SILENT_s + 7 + 10


def test_a_stopped_rank_is_a_death_like_any_other(tmp_path, capfd):
    run(tmp_path, STANDS_STILL, timeout_s=SILENT_s, max_restarts=1)
    assert {p.name for p in tmp_path.glob("[01]-*")} == {"0-0", "0-1", "1-0", "1-1"}
    assert "restart 1 of 1: rank 1 of 2 stood still (SIGSTOP)" in capfd.readouterr().err


def test_a_silent_rank_is_named(tmp_path):
    with pytest.raises(
        LaunchError, match=r"(?s)rank 0 of 2 failed: .*Still at work, and killed: rank 1 \(log: "
    ):
        run(tmp_path, WAITS.replace("HANGS", "time.sleep(600)"), timeout_s=SILENT_s)


# ------------------------------------------------------------------ signals


@contextmanager
def started(command: list[str], out: Path, **options) -> Iterator[subprocess.Popen]:
    """`launch` in a process of its own, with two ranks."""
    starter = (
        "import pathlib; from fnshard.launcher.local import launch; "
        f"launch({command!r}, ranks=2, logs=pathlib.Path({str(out)!r}, 'ranks'), **{options!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter], env=_environment(), stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


UNTIL_ASKED = """
def main():
    open(f"{out}/ready{rank}", "w").close()
    while not stop.asked:
        time.sleep(0.01)
    open(f"{out}/heard{rank}", "w").close()
    time.sleep(LASTS)
    open(f"{out}/saved{rank}", "w").close()
"""


def test_sigterm_is_handed_on_and_ranks_may_finish(tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0.3"), stop=True)
    with started([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        for rank in range(2):
            _wait_for(tmp_path / f"ready{rank}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert {p.name for p in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_sigterm_during_the_imports_is_kept_for_later(tmp_path):
    """The ranks have no handler yet; nobody dies of it."""
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0"), stop=True)
    program.write_text("import sys; open(sys.argv[1] + '/begun', 'w').close()\n" + program.read_text())
    with started([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        _wait_for(tmp_path / "begun")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert {p.name for p in tmp_path.glob("saved*")} == {"saved0", "saved1"}


@pytest.mark.parametrize("how", ["asked twice", "out of time"])
def test_who_does_not_end_is_ended(how, tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "600"), stop=True)
    options = {"grace_s": 1.0 if how == "out of time" else 600.0}
    with started([sys.executable, str(program), str(tmp_path)], tmp_path, **options) as process:
        for rank in range(2):
            _wait_for(tmp_path / f"ready{rank}")
        ranks = _ranks_of(process.pid)
        process.send_signal(signal.SIGTERM)
        if how == "asked twice":
            _wait_for(tmp_path / "heard0")  # two at once are one
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 128 + signal.SIGTERM
        told = process.stderr.read().decode()
    assert not any(_alive(pid) for pid in ranks.values())
    assert ("had not done so after 1 s and were killed" in told) == (how == "out of time")


def test_a_rank_whose_launcher_died_during_its_imports_does_not_begin(tmp_path):
    program = program_of(tmp_path, UNTIL_ASKED.replace("LASTS", "0"))
    marks = (
        "import os, sys, time; open(f'{sys.argv[1]}/pid' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    )
    waits = "while os.getppid() == int(os.environ['FNSHARD_LAUNCHER']): time.sleep(0.01)"
    program.write_text(f"{marks}\n{waits}\n{program.read_text()}")
    with started([sys.executable, str(program), str(tmp_path)], tmp_path) as process:
        pids = [_wait_for(tmp_path / f"pid{rank}") for rank in range(2)]
        process.kill()
        process.wait(timeout=30)
    deadline = time.monotonic() + 20
    while any(_alive(int(path.read_text() or 0)) for path in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    assert not list(tmp_path.glob("ready*"))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _ranks_of(launcher: int) -> dict[int, int]:
    """Processes by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(pid)
    return found


def _lines(path: Path, count: int, process: subprocess.Popen) -> list:
    deadline = time.monotonic() + 60
    while True:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if len(rows) >= count:
            return rows
        assert time.monotonic() < deadline and process.poll() in (None, 0), f"{len(rows)} of {count} lines"
        time.sleep(0.01)


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
        shown = launcher.describe_failure({0: echo, 2: cause, 3: told}, 4, Path("logs"))
        assert shown.startswith("rank 2 of 4 ")
