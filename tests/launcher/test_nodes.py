"""Jobs on several nodes: agents that meet, restart, and end together; here on loopback."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from launched import HEADER, ROOT
from main_job import SMALL
from slurm import step_of

from experiments.training.metrics_file import METRICS
from experiments.training.result import read_result
from experiments.training.resume import memory_name
from fnshard.launcher import meeting_folder
from fnshard.launcher import nodes as nodes_module
from fnshard.launcher.local import LaunchError, launch
from fnshard.launcher.nodes import (
    BEAT_S,
    Ending,
    Nodes,
    NodesError,
    Peers,
    first_host,
    meet,
    under_slurm,
    verdict,
)

TORCHRUN = ("-m", "torch.distributed.run")
WITHIN_S = 60.0  # from one agent's death until all have ended


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def two(folder: Path, **how: Any) -> list[Nodes]:
    options = {"join_s": 60.0, "silent_s": 3.0, "head": "127.0.0.1", **how}
    return [Nodes(2, number, folder / "nodes", **options) for number in range(2)]


def together(work: Callable[[Nodes], Any], nodes: list[Nodes]) -> list[Any]:
    """What `work` gives, or raises, on each node, all at once."""
    results: dict[int, Any] = {}

    def one(node: Nodes) -> None:
        try:
            results[node.number] = work(node)
        except Exception as error:
            results[node.number] = error

    threads = [threading.Thread(target=one, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "an agent hangs"
    return [results[node.number] for node in nodes]


# ------------------------------------------------------------------ what SLURM says


def test_slurm_tells_the_node():
    first, second = (under_slurm(step_of(node, 2), Path("shared")) for node in range(2))
    assert (first.number, second.number) == (0, 1) and first.count == 2
    assert first.folder == second.folder == Path("shared")
    assert first.environment == second.environment == {"GLOO_SOCKET_IFNAME": "lo"}
    elsewhere = {**step_of(0, 2), "SLURM_STEP_NODELIST": "gpu[07-08]"}
    assert under_slurm(elsewhere, Path("shared")).environment == {}


def test_one_node_or_a_batch_script_is_an_ordinary_start():
    assert under_slurm({}, Path()) is None and under_slurm(step_of(0, 1), Path()) is None
    script = {k: v for k, v in step_of(0, 2).items() if "STEP" not in k}
    assert under_slurm({**script, "SLURM_JOB_NUM_NODES": "2"}, Path()) is None


def test_tasks_are_one_a_node():
    with pytest.raises(NodesError, match=r"SLURM started 8 tasks on 2 nodes; .* --ntasks-per-node=1"):
        under_slurm({**step_of(0, 2), "SLURM_STEP_NUM_TASKS": "8"}, Path())


@pytest.mark.parametrize(
    ("listed", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3-5,9],m", "n3"), ("n[09,11-12]", "n09"), ("r[1-2]n[4,6].x,y", "r1n4.x")],
)
def test_the_first_host_of_a_list(listed, first):
    assert first_host(listed) == first


# ------------------------------------------------------------------ meeting, and what agents tell each other


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_alone_does_not_wait_for_ever(number, tmp_path):
    """Files of an earlier job are nobody."""
    met = together(lambda node: meet(node, 0, lambda: None), two(tmp_path))
    for peers in met:
        peers.leave()
    began = time.monotonic()
    told = rf"node {number} of 2 has not met node {1 - number} in .*nodes within 1 s.*Fix: start"
    with pytest.raises(NodesError, match=told):
        meet(two(tmp_path, join_s=1.0)[number], 0, lambda: None)
    assert time.monotonic() - began < 20


def test_a_wait_can_be_given_up(tmp_path):
    calls = []

    def give_up() -> None:
        calls.append(None)
        if len(calls) > 2:
            raise SystemExit(143)

    with pytest.raises(SystemExit, match="143"):
        meet(two(tmp_path)[0], 0, give_up)


def test_all_find_the_same_cause(tmp_path):
    def work(node: Nodes) -> Ending:
        peers = meet(node, 0, lambda: None)
        mine = [Ending("connection closed", echo=2), Ending("rank 1 died", may_go_on=False)][node.number]
        found = peers.settle(mine, lambda: None)
        peers.leave()
        return found

    assert together(work, two(tmp_path)) == [Ending("on node 1 of 2: rank 1 died", False, 0)] * 2


def test_all_ended_well_and_attempts_do_not_mix(tmp_path):
    def work(node: Nodes) -> list[Ending]:
        found, kept = [], []
        for attempt, mine in enumerate([Ending("died"), Ending()]):
            kept.append(meet(node, attempt, lambda: None))
            found.append(kept[-1].settle(mine, lambda: None))
            kept[-1].leave()
        return found

    assert together(work, two(tmp_path)) == [[Ending("on node 0 of 2: died"), Ending()]] * 2


@pytest.mark.parametrize("silent", [pytest.param(0, marks=pytest.mark.long), 1])
def test_who_is_silent_is_gone(silent, tmp_path):
    """A machine without power says nothing, not even that its connection is closed."""
    nodes = two(tmp_path, silent_s=2.5)

    def work(node: Nodes) -> Any:
        peers = meet(node, 0, lambda: None)
        if node.number == silent:
            peers._closed.set()
            return peers
        began = time.monotonic()
        while not peers.trouble():
            assert time.monotonic() - began < 20
            time.sleep(0.05)
        assert time.monotonic() - began > 1  # not at the first beat that is late
        found = peers.settle(Ending("connection closed", echo=2), lambda: None)
        peers.leave()
        return found

    results = together(work, nodes)
    results[silent].leave()
    told = results[1 - silent]
    assert isinstance(told, Ending) and not told.may_go_on, told
    assert told.message.startswith(f"on node {silent} of 2: its agent is gone: it was killed, or nothing")
    assert "goes on from the newest checkpoint" in told.message


@pytest.mark.parametrize("killed", [0, 2])
def test_machines_leave_and_come_back(killed, tmp_path, monkeypatch):
    """Three, then two, then three again; then who leads is started anew. The first, which leads, is no more
    than the others. Nobody waits for who is known to be gone."""
    monkeypatch.setattr(nodes_module, "REJOIN_S", 1e9)
    options = {"join_s": 60.0, "silent_s": 2.5, "counts": frozenset({2, 3})}
    nodes = [Nodes(3, number, tmp_path / "nodes", **options) for number in range(3)]
    left = [node for node in nodes if node.number != killed]
    met = together(lambda node: meet(node, 0, lambda: None), nodes)
    assert [peers.members for peers in met] == [(0, 1, 2)] * 3 and met[0]._leads
    met[killed].leave()
    for ended in together(lambda node: met[node.number].settle(Ending("closed", echo=3), lambda: None), left):
        assert ended.message.startswith(f"on node {killed} of 3: its agent is gone") and ended.may_go_on
    again = dict(
        zip([n.number for n in left], together(lambda n: meet(n, 1, lambda: None), left), strict=True)
    )
    assert {peers.members for peers in again.values()} == {tuple(again)}
    assert sum(peers._leads for peers in again.values()) == 1
    assert not any(peers.trouble() for peers in again.values())

    def at_work(node: Nodes) -> Peers:
        if node.number == killed:
            return meet(node, 0, lambda: None)
        peers = again[node.number]
        while not peers.trouble():
            time.sleep(0.05)
        mine = Ending(peers.interruption, echo=-1, planned=True) if peers.interruption else Ending()
        ended = peers.settle(mine, lambda: None)
        assert (
            re.fullmatch(rf"on node \d of 3: node {killed} is there again", ended.message) and ended.planned
        )
        peers.leave()
        return meet(node, peers.attempt + 1, lambda: None)

    grown = together(at_work, nodes)
    assert {(peers.members, peers.attempt) for peers in grown} == {((0, 1, 2), 2)}
    leader = next(number for number, peers in enumerate(grown) if peers._leads)
    grown[leader].leave()

    def without_leader(node: Nodes) -> Peers:
        if node.number == leader:
            return meet(node, 0, lambda: None)
        assert grown[node.number].settle(Ending("closed", echo=3), lambda: None).may_go_on
        return meet(node, 3, lambda: None)

    last = together(without_leader, nodes)
    assert {(peers.members, peers.attempt) for peers in last} == {((0, 1, 2), 3)}
    for peers in (*met, *again.values(), *grown, *last):
        peers.leave()


def test_who_leads_after_a_wait_waits_for_the_others(tmp_path, monkeypatch):
    """An agent that was started anew waits longer for its turn than others need to come."""
    monkeypatch.setattr(nodes_module, "REJOIN_S", 1.0)
    nodes = two(tmp_path, silent_s=30.0, counts=frozenset({1, 2}))
    alone = meet(nodes[0], 0, lambda: None)
    assert alone.members == (0,)

    def work(node: Nodes) -> Peers:
        if node.number == 1:
            return meet(node, 0, lambda: None)
        while not alone.trouble():
            time.sleep(0.05)
        time.sleep(1.5)
        mine = Ending(alone.interruption, echo=-1, planned=True)
        assert alone.settle(mine, lambda: None).message == "on node 0 of 2: node 1 is there again"
        alone.leave()
        time.sleep(0.5)
        return meet(node, 1, lambda: None)

    met = together(work, nodes)
    assert [(peers.members, peers.attempt, peers._leads) for peers in met] == [
        ((0, 1), 1, False),
        ((0, 1), 1, True),
    ]
    for peers in met:
        peers.leave()


@pytest.mark.parametrize("how", ["overtaken", "mute"])
def test_who_is_left_behind_ends_its_ranks(how, tmp_path, monkeypatch):
    """Else two attempts would run side by side: that of an agent which others took for gone, and theirs."""
    monkeypatch.setattr(nodes_module, "REJOIN_S", 0.0)
    node = two(tmp_path, silent_s=1.5, counts=frozenset({1, 2}))[0]
    peers = meet(node, 0, lambda: None)
    assert peers.members == (0,) and not peers.trouble()
    if how == "overtaken":
        assert meeting_folder.claim(node.folder, "leader-1.json")
        assert not meeting_folder.claim(node.folder, "leader-1.json")
    else:
        monkeypatch.setattr(meeting_folder, "write", lambda *_: os.stat("/nowhere"))
    began = time.monotonic()
    while not peers.trouble():
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    assert {"overtaken": "begun anew", "mute": "could not write"}[how] in peers.interruption
    mine = Ending(peers.interruption, echo=-1, planned=True)
    assert peers.settle(mine, lambda: None).message == f"on node 0 of 2: {peers.interruption}"
    peers.leave()


def test_who_comes_when_the_job_has_ended_ends(tmp_path):
    """Another start of the same command is another job."""
    nodes = two(tmp_path, job="7.0.0")
    met = together(lambda node: meet(node, 0, lambda: None), nodes)
    together(lambda node: met[node.number].settle(Ending(), lambda: None), nodes)
    for peers in met:
        peers.leave()
    for node in nodes:
        assert meet(node, 0, lambda: None) is None
    again = together(lambda node: meet(node, 0, lambda: None), two(tmp_path, job="7.0.1"))
    assert [peers.attempt for peers in again] == [1, 1]
    for peers in again:
        peers.leave()


def test_a_verdict_blames_no_echo():
    endings = {
        0: Ending("reset by peer", echo=2),
        1: Ending("ValueError: seven", may_go_on=False),
        2: Ending(),
    }
    assert verdict(endings, 3) == Ending("on node 1 of 3: ValueError: seven", False, 0)
    assert verdict({0: Ending(), 1: Ending()}, 2) == Ending()


# ------------------------------------------------------------------ agents with real ranks


def agents(tmp_path: Path, body: str, *, max_restarts: int = 0) -> list[Any]:
    """Two agents in this process, a rank each."""
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join([HEADER, textwrap.dedent(body), "run_rank(main, device_type='cpu', timeout_s=60)"])
    )
    return together(
        lambda node: launch(
            [sys.executable, "-u", str(program), str(tmp_path)],
            ranks=1, logs=tmp_path / "ranks", max_restarts=max_restarts,
            env={"PYTHONPATH": str(ROOT)}, nodes=node,
        ),
        two(tmp_path, silent_s=20.0),
    )  # fmt: skip


def test_two_agents_restart_together(tmp_path, capfd):
    """A rank dies on the second; both begin again, and their ranks meet anew."""
    body = """
    def main():
        if attempt() == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        told = [total.item(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], dist.get_world_size()]
        open(f"{out}/{attempt()}-{rank}.json", "w").write(json.dumps(told))
    """
    assert agents(tmp_path, body, max_restarts=1) == [None, None]
    told = {p.name: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert told == {"1-0.json": [3.0, "0", "0", 2], "1-1.json": [3.0, "0", "1", 2]}
    shown = capfd.readouterr().err
    assert shown.count("restart 1 of 1: on node 1 of 2: rank 1 of 2 was killed by signal 9") == 2


@pytest.mark.long
def test_an_exception_on_one_node_ends_both_with_its_words(tmp_path):
    body = """
    def main():
        if rank == 1:
            raise ValueError("seven is not even")
        dist.all_reduce(torch.zeros(1))
    """
    errors = agents(tmp_path, body, max_restarts=2)
    assert all(isinstance(error, LaunchError) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]).startswith("on node 1 of 2: rank 1 of 2 failed: ValueError: seven is not even")


# ------------------------------------------------------------------ what others may do


@pytest.mark.parametrize("how", ["mode", "owner", "link", "file"])
def test_a_folder_that_is_open_to_others_is_refused(how, tmp_path, monkeypatch):
    node = two(tmp_path)[0]
    if how == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        node.folder.symlink_to(tmp_path / "other")
    elif how == "file":
        node.folder.touch()
    else:
        node.folder.mkdir(mode=0o700)
    if how == "mode":
        node.folder.chmod(0o770)
    if how == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: node.folder.stat().st_uid + 1)
    told = r"is open to others \(owner \d+, mode 07[07]0\)" if how in ("mode", "owner") else "is no folder"
    with pytest.raises(NodesError, match=told):
        meet(node, 0, lambda: None)


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses that processes listen on, over TCP."""
    mine = {os.stat(fd).st_ino for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()}
    found = []
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = row.split()
        host, port = columns[1].split(":")
        if columns[3] == "0A" and int(columns[9]) in mine:
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_a_planted_pickle_is_executed_by_nobody(tmp_path):
    """Whatever a stranger reaches of two agents and their ranks: ports, and as if by mistake their files."""
    body = """
    def main():
        dist.all_reduce(torch.ones(1))
        open(f"{out}/pid{rank}", "w").write(str(os.getpid()))
        while not os.path.exists(f"{out}/planted"):
            time.sleep(0.01)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        open(f"{out}/sum{rank}", "w").write(str(total.item()))
    """
    mark = tmp_path / "executed"
    raw = pickle.dumps(Planted(mark))
    ports: list[tuple[str, int]] = []

    def plant() -> None:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.05)
        ports.extend(listening([os.getpid(), *(int(file.read_text()) for file in files)]))
        for host, port in ports:
            with suppress(OSError), socket.create_connection((host, port), timeout=5) as stranger:
                stranger.sendall(raw)
        for _ in range(3):  # the agents write theirs again
            for file in [*(tmp_path / "nodes").glob("*.json"), tmp_path / "nodes" / "2-0.json"]:
                file.write_bytes(raw)
            time.sleep(BEAT_S / 2)
        (tmp_path / "planted").touch()

    stranger = threading.Thread(target=plant, daemon=True)
    stranger.start()
    assert agents(tmp_path, body) == [None, None]
    stranger.join()
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
    assert not mark.exists()
    assert {host for host, _ in ports} <= {"127.0.0.1"}, ports
    assert stat.S_IMODE((tmp_path / "nodes").stat().st_mode) == 0o700


# ------------------------------------------------------------------ whole jobs


TRAIN = (*SMALL, "run.sample_tokens=0",
         "run.timeout_s=300")  # fmt: skip


@contextmanager
def job(folder: Path, arguments: list[str], env: dict[str, str], *before: str) -> Iterator[subprocess.Popen]:
    """One agent, in `folder`."""
    full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    process = subprocess.Popen(
        [sys.executable, *before, "-m", "experiments.train", *arguments], cwd=folder, env=full, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses_of(folder: Path) -> list[tuple[int, str, float]]:
    return [(r["step"], k, r[k]) for r in rows_of(folder) for k in ("loss", "held_out_loss") if k in r]


def on_two_agents(folder: Path, *arguments: str, number: str = "7") -> list[tuple[int, str]]:
    """Exit codes and outputs."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(job(folder, [*TRAIN, *arguments], step_of(node, 2, number)))
            for node in range(2)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in both]
        return [(process.returncode, text) for process, text in zip(both, outputs, strict=True)]


def on_one_agent(folder: Path, *arguments: str) -> None:
    with job(folder, [*TRAIN, "mesh.shard=2", *arguments], {}) as process:
        output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_agents_train_to_the_losses_of_one(tmp_path):
    """Bit for bit: under our agents as SLURM would start them, and under two of torchrun's."""
    on_one_agent(tmp_path, "run.steps=6", "hydra.run.dir=one")
    ended = on_two_agents(tmp_path, "run.steps=6", "mesh.shard=2")
    assert [code for code, _ in ended] == [0, 0], ended
    assert "results: " in ended[0][1] and "results: " not in ended[1][1]
    port = free_port()
    meet_at = (
        f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id 7"
    )
    with ExitStack() as stack:
        arguments = [*TRAIN, "run.steps=6", "hydra.run.dir=torchrun"]
        both = [
            stack.enter_context(job(tmp_path, arguments, {}, *TORCHRUN, *meet_at.split())) for _ in range(2)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    one = losses_of(tmp_path / "one")
    assert len(one) == 7 and one[0][2] != one[5][2]
    assert losses_of(tmp_path / "outputs" / "slurm" / "7.0") == one
    assert losses_of(tmp_path / "torchrun") == one


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [0, 1])
def test_killing_one_agent_ends_both_and_the_same_command_goes_on(killed, tmp_path):
    many = ("mesh.shard=2", "run.steps=400", "run.save_every=5", "run.held_out_every=400")
    folder = tmp_path / "outputs" / "slurm" / "7.0"
    with ExitStack() as stack:
        both = [stack.enter_context(job(tmp_path, [*TRAIN, *many], step_of(node, 2))) for node in range(2)]
        deadline = time.monotonic() + 120
        while len(rows_of(folder)) < 12:
            assert all(p.poll() is None for p in both) and time.monotonic() < deadline, "no step was made"
            time.sleep(0.05)
        os.kill(both[killed].pid, signal.SIGKILL)
        began = time.monotonic()
        said = both[1 - killed].communicate(timeout=WITHIN_S)[0]
        seconds = time.monotonic() - began
    print(f"killed agent {killed}: the other ended after {seconds:.1f} s")
    assert both[1 - killed].returncode == 1 and seconds < WITHIN_S
    assert (
        f"on node {killed} of 2: its agent is gone" in said and "Traceback" not in said.split("error: ")[-1]
    )
    assert not list_of_ranks(folder), "ranks were left behind"
    made = rows_of(folder)[-1]["step"]
    ended = on_two_agents(tmp_path, *many)
    assert [code for code, _ in ended] == [0, 0], ended
    (resumed,) = re.findall(r"resume: step (\d+) of", ended[0][1])
    assert 10 <= int(resumed) <= made
    assert [r["step"] for r in rows_of(folder) if "loss" in r] == list(range(1, 401))
    on_one_agent(tmp_path, *many, "hydra.run.dir=one")
    assert losses_of(folder) == losses_of(tmp_path / "one")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [[0], [1], [0, 1]])
def test_agents_that_are_killed_and_started_again_go_on_from_memory(killed, tmp_path):
    """The first one, or the other one: at most one step is made again. Both, and their memory is lost: the
    newest checkpoint on disk."""
    steps = ("run.steps=300", "run.save_every=10", "run.held_out_every=300", "mesh.shard=2")
    many = [*TRAIN, *steps, "run.replicas=1", "run.max_restarts=9"]
    folder = tmp_path / "outputs" / "slurm" / "7.0"
    with ExitStack() as stack:
        both = [stack.enter_context(job(tmp_path, many, step_of(node, 2))) for node in range(2)]
        deadline = time.monotonic() + 120
        while not rows_of(folder) or rows_of(folder)[-1]["step"] < 12:
            assert all(p.poll() is None for p in both) and time.monotonic() < deadline, "no step was made"
            time.sleep(0.02)
        for node in killed:
            os.kill(both[node].pid, signal.SIGKILL)
        made = rows_of(folder)[-1]["step"]
        memory = memory_name(folder)
        for path in Path("/dev/shm").glob(f"fnshard-memory-{memory}.*") if len(killed) == 2 else ():
            shutil.rmtree(path)
        for node in killed:
            both[node].wait()
            both[node] = stack.enter_context(job(tmp_path, many, step_of(node, 2)))
        said = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    step, found = re.findall(r"resume: step (\d+) of (\S+)", said[0])[-1]
    if len(killed) == 2:
        assert f"replicas: no step is complete in memory, going on from {found}" in said[0]
        assert int(step) == made // 10 * 10 and found == str(folder / "checkpoints")
    else:
        assert made - 1 <= int(step) <= made + 1 and f"fnshard-memory-{memory}.0" in found
        assert f"on node {killed[0]} of 2: its agent is gone" in said[1 - killed[0]]
    on_one_agent(tmp_path, *steps, "hydra.run.dir=one")
    assert losses_of(folder) == losses_of(tmp_path / "one")


ELASTIC = (*TRAIN, "run.save_every=0", "run.held_out_every=100", "data.rows=12", "data.held_out_rows=12")
COPIES = ("run.replicas=1", "run.elastic=true", "run.max_restarts=9")


def until_step(step: int, folder: Path) -> int:
    """Wait until that step is made; the newest."""
    deadline = time.monotonic() + 200
    while not rows_of(folder) or rows_of(folder)[-1]["step"] < step:
        assert time.monotonic() < deadline, f"step {step} was not made"
        time.sleep(0.02)
    return rows_of(folder)[-1]["step"]


def check_losses(folder: Path, place: Path, steps: str) -> None:
    """Those of one rank that nothing happened to, within rounding."""
    with job(place, [*ELASTIC, steps, "mesh.shard=1", "hydra.run.dir=one"], {}) as process:
        assert process.communicate(timeout=200) and process.returncode == 0
    one = losses_of(place / "one")
    assert [row[:2] for row in losses_of(folder)] == [row[:2] for row in one] and len(one) > 100
    assert [row[2] for row in losses_of(folder)] == pytest.approx([row[2] for row in one], rel=1e-3)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_ranks_then_three_then_four(tmp_path):
    """An agent is killed, and started again; the losses are those of one rank that was not."""
    many = [*ELASTIC, *COPIES, "run.steps=200", "mesh.shard=4"]
    folder = tmp_path / "outputs" / "slurm" / "7.0"
    with ExitStack() as stack:
        four = [stack.enter_context(job(tmp_path, many, step_of(node, 4))) for node in range(4)]
        until_step(20, folder)
        os.kill(four[3].pid, signal.SIGKILL)
        killed = rows_of(folder)[-1]["step"]
        until_step(killed + 10, folder)
        four.append(stack.enter_context(job(tmp_path, many, step_of(3, 4))))
        said = [process.communicate(timeout=300)[0] for process in four]
    assert [process.returncode for process in four] == [0, 0, 0, -9, 0], said
    resumed = [int(step) for step in re.findall(r"resume: step (\d+) of /dev/shm", said[0])]
    assert len(resumed) == 2 and killed - 1 <= resumed[0] <= killed + 1 < resumed[1]
    assert re.search(r"restart: on node \d of 4: node 3 is there again", said[0])
    assert not list_of_ranks(folder) and not list(Path("/dev/shm").glob("fnshard-memory-*.3"))
    check_losses(folder, tmp_path, "run.steps=200")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_goes_on_without_the_agent_that_leads(tmp_path):
    """For good; and one that is started in its place when the job has ended, ends."""
    many = [*ELASTIC, *COPIES, "run.steps=100", "mesh.shard=3"]
    folder = tmp_path / "outputs" / "slurm" / "7.0"
    with ExitStack() as stack:
        three = [stack.enter_context(job(tmp_path, many, step_of(node, 3))) for node in range(3)]
        until_step(20, folder)
        leader = meeting_folder.read(folder / "nodes", max((folder / "nodes").glob("leader-*")).name)[
            "number"
        ]
        os.kill(three[leader].pid, signal.SIGKILL)
        killed = rows_of(folder)[-1]["step"]
        said = [process.communicate(timeout=300)[0] for process in three]
        late = stack.enter_context(job(tmp_path, many, step_of(leader, 3)))
        answer = late.communicate(timeout=100)[0]
    assert [p.returncode for p in three] == [-9 if node == leader else 0 for node in range(3)], said
    (resumed,) = re.findall(r"resume: step (\d+) of /dev/shm", "".join(said))
    assert killed - 1 <= int(resumed) <= killed + 1
    assert late.returncode == 0 and f"node {leader} of 3: the job has ended." in answer
    assert read_result(folder)["status"] == "ok" and not list_of_ranks(folder)
    check_losses(folder, tmp_path, "run.steps=100")


def list_of_ranks(folder: Path) -> list[int]:
    """Processes that still work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "experiments.cli.worker" in told and str(folder) in told:
            found.append(int(path.parent.name))
    return found
