"""Two of torchrun's agents on loopback: ranks, or an agent, that die, and a job that goes on from memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from launched import environment, ranks_of
from runs import SMALL

from experiments.lib.metrics import METRICS

TRAIN = (*SMALL, "run.sample_tokens=0", "run.steps=120", "run.save_every=10", "run.held_out_every=120")
PATIENCE_S = 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def started(folder: Path, *command: str, **env: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env={**environment(), "OMP_NUM_THREADS": "1", **env},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def agent(folder: Path, number: int, port: int, memory: Path) -> Any:
    """Start one of two agents with a rank each, and memory of its own, as each machine has.

    Where agents share torch's store, they publish the place where ranks meet in the first round alone: an
    agent that comes later never finds it.
    """
    memory.mkdir(exist_ok=True)
    where = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id 7"
    return started(
        folder, "-m", "torch.distributed.run", *where.split(), "--max-restarts", "3", "--local-addr",
        "127.0.0.1", "-m", "experiments.train", *TRAIN, "run.replicas=1", "hydra.run.dir=run",
        FNSHARD_MEMORY=str(memory), GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses_of(folder: Path) -> list[tuple[int, str, float]]:
    return [(r["step"], k, r[k]) for r in rows_of(folder) for k in ("loss", "held_out_loss") if k in r]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["rank", "agent"])
def test_two_agents_go_on_from_memory(killed: str, tmp_path: Path) -> None:
    """At most one step is made again; the losses are those of two ranks that nothing happened to."""
    port, folder = free_port(), tmp_path / "run"
    memories = [tmp_path / f"memory{number}" for number in range(2)]
    with ExitStack() as stack:
        agents = []
        for number in range(2):
            agents.append(stack.enter_context(agent(tmp_path, number, port, memories[number])))
            time.sleep(1)  # the first one is where the agents meet
        deadline = time.monotonic() + PATIENCE_S
        while not rows_of(folder) or rows_of(folder)[-1]["step"] < 25:
            assert all(p.poll() is None for p in agents) and time.monotonic() < deadline, "no step was made"
            time.sleep(0.02)
        if killed == "rank":
            (pid,) = ranks_of(agents[1].pid).values()
            os.kill(pid, signal.SIGKILL)
        else:
            agents[1].kill()
            agents[1].wait()
            agents[1] = stack.enter_context(agent(tmp_path, 1, port, memories[1]))
        made = rows_of(folder)[-1]["step"]
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], outputs
    step, found = re.findall(r"resume: step (\d+) of (\S+)", "".join(outputs))[-1]
    assert made - 1 <= int(step) <= made + 1 and "/fnshard-memory-" in found
    assert not [left for memory in memories for left in memory.iterdir()]
    with started(tmp_path, "-m", "experiments.train", *TRAIN, "mesh.shard=2", "hydra.run.dir=one") as one:
        output = one.communicate(timeout=PATIENCE_S)[0]
    assert one.returncode == 0, output
    assert losses_of(folder) == losses_of(tmp_path / "one")
