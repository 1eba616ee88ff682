"""A warm pool of real gloo ranks: processes that start once and run many functions.

    results = ranks(2).run(fn, x)  # fn(rank, x) on every rank, results by rank

`fn` is a module-level function; arguments and results are pickled by value. The fixture keeps one pool
per world size for the whole session.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernels import remember_traces
from updates import share_updates

COLLECTIVE_TIMEOUT_S = 60.0
# Ranks are forked from a process that has imported what they need, and has no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["warm", "torch.distributed", "fnshard", "hypothesis", "experiments.finetune",
     "transformers.models.llama.modeling_llama", "matplotlib.figure"]
)  # fmt: skip
# Of a pool that another module may take over: requests that it has served, and threads of a rank.
MOST_SERVED, MOST_THREADS = 8, 48
GRACE_S = 5.0  # what the other ranks get to answer once one has failed


def make_process(target: Callable[..., Any], **how: Any) -> Any:
    """Return a process that is forked from one with these imports. It is not started."""
    _start_server()
    return CONTEXT.Process(target=target, **how)


@cache
def _start_server() -> None:
    """Start the process that is forked, once. Python 3.11 finds `warm` by PYTHONPATH alone."""
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(here)):
        forkserver.ensure_running()


class RankError(AssertionError):
    """An error: some rank raised, died or did not answer; the text holds the remote tracebacks."""


class Pool:
    """A pool of `world` gloo ranks, one thread each. One that lost a rank starts afresh at its next run."""

    def __init__(self, world: int):
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""
        self.served = 0  # requests since it started

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, lost: Sequence[int] = ()
    ) -> list[Any]:
        """Run `fn(rank, *args)` on every rank, and return the results by rank.

        Args:
            timeout: seconds for all of it; then the pool is killed and the test fails.
            lost: ranks that are meant to die in it, not to raise; the result of one that died is None.

        Raises:
            RankError: with the traceback of every rank that raised, named by rank.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((fn, args))
        self.served += 1
        try:
            for pipe in self._pipes:
                pipe.send_bytes(request)
            replies = self._replies(timeout, set(lost))
        except BaseException:  # the test's time is up: what ranks answer later is no answer to the next one
            self.kill()
            raise
        failures = {
            r: text for r, (kind, text) in replies.items()
            if kind == "raised" or (kind != "ok" and r not in lost)
        }  # fmt: skip
        if lost or len(replies) < self.world or (failures and not self._agreed(replies)):
            self.kill()
        if failures:
            names = ", ".join(map(str, sorted(failures)))
            raise RankError("\n".join([f"rank {names} of {self.world} failed:", *failures.values()]))
        return [replies[r][1] if replies[r][0] == "ok" else None for r in range(self.world)]

    def close(self) -> None:
        """Let all ranks end by themselves (barrier, destroy, exit), then make sure of it."""
        for pipe in self._pipes:
            pipe.send_bytes(b"")
        for process in self._processes:
            process.join(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self.served = [], [], 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def threads(self) -> int:
        """Count the threads of the rank that has most."""
        folders = (f"/proc/{process.pid}/task" for process in self._processes)
        return max((len(os.listdir(folder)) for folder in folders if os.path.isdir(folder)), default=0)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world):
            here, there = CONTEXT.Pipe()
            process = make_process(
                _worker, args=(there, rank, self.world, self._folder), name=f"rank-{rank}", daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _replies(self, timeout: float, lost: set[int]) -> dict[int, tuple[str, Any]]:
        deadline, replies = time.monotonic() + timeout, {}
        while len(replies) < self.world:
            open_pipes = [p for r, p in enumerate(self._pipes) if r not in replies]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in set(range(self.world)) - set(replies):
                    replies[rank] = "silent", f"rank {rank}: no answer in time"
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                replies[rank] = self._reply(rank, pipe)
                if replies[rank][0] != "ok" and rank not in lost:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _reply(self, rank: int, pipe: Connection) -> tuple[str, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(GRACE_S)
            return "died", f"rank {rank}: died with exit code {self._processes[rank].exitcode}"

    def _agreed(self, replies: dict[int, tuple[str, Any]]) -> bool:
        """Return whether all ranks raised the same type: then no collective was left half done."""
        last = {
            text.strip().splitlines()[-1].split(":")[0] for kind, text in replies.values() if kind == "raised"
        }
        return all(kind == "raised" for kind, _ in replies.values()) and len(last) == 1


def _worker(pipe: Connection, rank: int, world: int, folder: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    remember_traces()
    share_updates()
    assert "warm" in sys.modules  # else each rank would be as slow as a fresh one
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    code = 1
    try:
        while request := pipe.recv_bytes():
            pipe.send_bytes(_answer(request, rank))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except EOFError:  # the parent is gone
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads may abort a process that exits the ordinary way


def _answer(request: bytes, rank: int) -> bytes:
    try:
        fn, args = pickle.loads(request)  # imports the test's module
        return pickle.dumps(("ok", fn(rank, *args)))
    except BaseException:  # what pytest raises is no Exception
        return pickle.dumps(("raised", f"rank {rank}: {traceback.format_exc()}"))


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Yield the session's warm pools by their size."""
    pools: dict[int, Pool] = {}
    yield pools
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def ranks(pools: dict[int, Pool]) -> Callable[[int], Pool]:
    """Return `ranks(world)`, which gives the session's warm pool of that size."""
    return lambda world: pools.setdefault(world, Pool(world))


@pytest.fixture(scope="module", autouse=True)
def renew_pools(pools: dict[int, Pool]) -> Iterator[None]:
    """End pools that have served many requests, or made many meshes in few, with the module: each mesh has
    left threads of gloo's, which wake a hundred times a second."""
    yield
    for each in pools.values():
        if each.served > MOST_SERVED or each.threads() > MOST_THREADS:
            each.close()
