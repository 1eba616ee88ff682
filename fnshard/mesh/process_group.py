"""Process group: how this process joins the ranks that a launcher started with it, and leaves them.

Ranks that `fs.launch` started on one machine meet through a file below a temporary folder, so that nothing
listens on a network. Ranks that `torchrun` started meet as torchrun says, at `MASTER_ADDR`:`MASTER_PORT`.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fnshard.errors import CollectiveError, SpecError
from fnshard.mesh.waits import LEAVE, STOP_S, Place, peers

MEET_S = 60.0  # that ranks have to come at the least: some import for longer than a collective may take
POLL_S = 0.05
SLACK_S = 5.0  # beyond its timeout, for torch to end by itself and say why
LAUNCHER = "FNSHARD_LAUNCHER"  # the process of `fs.launch` that started this one
RENDEZVOUS = "FNSHARD_RENDEZVOUS"  # folder of the ranks' file store
MEETING = "fnshard-meeting"  # the thread that waits at an address, and may outlive the wait
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # elastic's name, which torchrun sets too
# Launchers that say how many processes they started, but nothing by which these could meet.
OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def under_launcher() -> bool:
    """Whether this process is already a rank (`torchrun` and its like set these)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """How many ranks the launcher started; 1 without a launcher.

    Raises:
        SpecError: several processes were started, and these have nothing to meet by; WORLD_SIZE is no number.
    """
    if "WORLD_SIZE" in os.environ:
        return _number("WORLD_SIZE")
    for variable, launcher in OTHER_LAUNCHERS.items():
        count = os.environ.get(variable, "1")
        if count.isdigit() and int(count) > 1:
            raise SpecError(
                f"{launcher} started {count} processes ({variable}), which do not know each other.",
                fix="start them by torchrun or fs.launch; WORLD_SIZE=1 for separate trainings.",
            )
    return 1


def place_on_host() -> tuple[int, int]:
    """Which of this machine's ranks this process is, and how many there are, as the launcher says."""
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return (_number(names[0]), _number(names[1])) if all(n in os.environ for n in names) else (0, 1)


def _number(variable: str) -> int:
    """The value of an environment variable that counts.

    Raises:
        SpecError: it is no such number.
    """
    value = os.environ[variable]
    if not value.isdecimal():
        raise SpecError(
            f"{variable}={value!r} in the environment is no number of ranks.",
            fix="start the ranks by torchrun or fs.launch, which set it; or unset it.",
        )
    return int(value)


def launcher() -> int:
    """The process that started this rank: `fs.launch`'s, or torchrun's agent."""
    return int(os.environ.get(LAUNCHER, os.getppid()))


def attempt() -> int:
    """How often the ranks of this job were started anew before."""
    return int(os.environ.get(ATTEMPT, "0"))


def accelerator() -> str:
    """The kind of device that computes here: of the accelerator if there is one, else "cpu"."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def join_group(
    device_type: str | None = None, timeout_s: float = 600.0, asked: Callable[[], bool] = lambda: False
) -> None:
    """Set this rank's device and make the default process group; nothing where there is one, or one rank.

    The group is taken down when the process ends.

    Args:
        device_type: "cpu", "cuda", ...; default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
        asked: whether this process was asked to end: then it waits STOP_S for peers that are idle.

    Raises:
        SpecError: the environment names no rank, or no place to meet.
        CollectiveError: a rank did not come within MEET_S, or `timeout_s` where that is more.
    """
    if dist.is_initialized():
        return
    world = world_size()
    device_type = device_type or accelerator()
    if device_type != "cpu":
        names = [name for name in ("LOCAL_RANK", "RANK") if name in os.environ]
        local, there = _number(names[0]) if names else 0, torch.accelerator.device_count()
        if not there:
            raise SpecError(f"device={device_type!r}: this machine has none.", fix='device="cpu".')
        torch.accelerator.set_device_index(local % there)  # one that is visible may be the rank's own
    if world == 1:
        return
    needed = ["RANK"] if RENDEZVOUS in os.environ else ["RANK", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise SpecError(
            f"WORLD_SIZE={world}, and {', '.join(missing)} not set: this rank cannot meet the others.",
            fix="start the ranks by torchrun or fs.launch, which set them; or unset WORLD_SIZE.",
        )
    rank = _number("RANK")
    if rank >= world:
        raise SpecError(
            f"RANK={rank}, and WORLD_SIZE={world}: ranks count from 0.",
            fix="start the ranks by torchrun or fs.launch, which set both.",
        )
    timeout, patience = (datetime.timedelta(seconds=s) for s in (timeout_s, max(timeout_s, MEET_S)))
    if RENDEZVOUS in os.environ:
        store = dist.FileStore(str(Path(os.environ[RENDEZVOUS]) / f"store-{attempt()}"), world)
    else:
        store = _met(rank, world, patience, asked)
        store = dist.PrefixStore(_name_of_start(store, rank, world, patience, asked), store)
    _wait_for_all(store, rank, world, patience, asked, "" if device_type == "cpu" else _name_of_device())
    store.set_timeout(timeout)
    make_group(device_type, store, rank, world, timeout)
    peers().asked, peers().timeout = asked, timeout_s


def make_group(
    device_type: str, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta
) -> None:
    """Make the default process group: gloo for CPU tensors and, on an accelerator, its own backend.

    It is not bound to a device, for that would start a communicator that no step uses, and each group of a
    mesh would be split from it by all ranks.
    """
    backend = "gloo"
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _joined.append(device_type)


def _came(ready: Callable[[], Any], timeout: datetime.timedelta, asked: Callable[[], bool]) -> bool:
    """Wait until it is `ready`; whether it is by then."""
    until = time.monotonic() + timeout.total_seconds()
    while not (came := bool(ready())) and time.monotonic() < until:
        until = min(until, time.monotonic() + STOP_S) if asked() else until
        time.sleep(POLL_S)
    return came


def _name_of_start(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool]
) -> str:
    """A name that the ranks of this start share, and no start before them.

    torchrun's store may outlive its ranks: who reads the addresses of dead ones there hangs. Agents of
    several machines need not count restarts alike, so that rank 0 names each start and answers who comes.

    Raises:
        CollectiveError: rank 0 did not come in time.
    """
    mine = f"fnshard/{uuid.uuid4().hex}"
    if rank > 0:
        store.set(f"fnshard/came/{rank}", mine)
        if not _came(lambda: store.check([f"{mine}/answer"]), timeout, asked):
            raise _not_met(rank, world, timeout, [0], asked)
        return store.get(f"{mine}/answer").decode()
    came = [f"fnshard/came/{other}" for other in range(1, world)]
    here = [f"{mine}/here/{other}" for other in range(1, world)]

    def all_here() -> bool:
        for key in came:
            if store.check([key]):  # what a dead rank has left there is answered, and nobody reads it
                store.set(f"{store.get(key).decode()}/answer", mine)
        return store.check(here)

    _came(all_here, timeout, asked)
    return mine


def _not_met(
    rank: int, world: int, timeout: datetime.timedelta, missing: list[int], asked: Callable[[], bool]
) -> CollectiveError:
    within = "before it was asked to end (SIGTERM)" if asked() else f"within {timeout.total_seconds():g} s"
    message = f"rank {rank} of {world} cannot meet the others {within}."
    who = f"rank {', '.join(map(str, missing))} did not come"
    fix = "look at the ranks that did not come; if they import slowly, raise the timeout."
    return CollectiveError(message, [who], fix)


def _name_of_device() -> str:
    """Of this rank's accelerator, unique among machines."""
    index = torch.accelerator.current_device_index()
    own = torch.cuda.get_device_properties(index).uuid if torch.cuda.is_available() else index
    return f"device {own} of {socket.gethostname()}"


def _wait_for_all(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool],
    device: str,
) -> None:  # fmt: skip
    """Until all ranks have come to the store.

    Args:
        device: the name of this rank's own, "" for a CPU.

    Raises:
        CollectiveError: some did not come in time, by rank.
        SpecError: several ranks have one device, which NCCL cannot serve.
    """
    keys = [f"here/{r}" for r in range(world)]
    if device:
        store.add(device, 1)
    store.set(keys[rank], "")
    if not _came(lambda: store.check(keys), timeout, asked):
        missing = [r for r in range(world) if not store.check([keys[r]])]
        raise _not_met(rank, world, timeout, missing, asked)
    if device and (ranks := store.add(device, 0)) > 1:
        raise SpecError(
            f"one {device} for {ranks} ranks: its collectives need a device for each rank.",
            fix="as many ranks on a machine as it has devices (CUDA_VISIBLE_DEVICES says which they see), or "
            'device="cpu".',
        )


def _met(rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool]) -> dist.Store:
    """The store at `MASTER_ADDR`:`MASTER_PORT`.

    Raises:
        SpecError: at once: there is no such host or port, or the port is taken.
        CollectiveError: rank 0 did not come in time.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    message = f"rank {rank} of {world} cannot meet the others"
    try:
        if not 0 <= int(port) < 1 << 16:
            raise ValueError("a port is a number below 65536")
        socket.getaddrinfo(host, int(port))  # torch would try until time runs out
    except (OSError, ValueError) as error:
        fix = "the name, or address, and port of rank 0's machine, the same on all ranks."
        raise SpecError(f"{message}: there is no such place.", [f"{where}: {error}"], fix) from None
    found: list[dist.Store | Exception] = []

    def meet() -> None:
        try:
            found.append(next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))[0])
        except Exception as error:
            found.append(error)

    # In a thread: if another program listens there, torch waits for its answer without end.
    threading.Thread(target=meet, name=MEETING, daemon=True).start()
    if not _came(lambda: found, timeout + datetime.timedelta(seconds=SLACK_S), asked):
        if asked():
            raise _not_met(rank, world, timeout, [0] if rank else list(range(1, world)), asked)
        found.append(TimeoutError("who listens there does not answer, and may be another program"))
    store = found[0]
    if not isinstance(store, Exception):
        while isinstance(store, dist.PrefixStore):  # of torch's, by each agent's own count of restarts
            store = store.underlying_store
        return store
    fix = "another MASTER_PORT, the same on all ranks; or end who listens there."
    if "EADDRINUSE" in str(store):
        raise SpecError(f"{message}: the port is taken.", [where], fix) from None
    if isinstance(store, (dist.DistError, TimeoutError)):
        within = f"within {timeout.total_seconds():g} s ({str(store).splitlines()[0]})"
        fix = "start all ranks, with one address and a port at which no other program listens."
        raise CollectiveError(f"{message} {within}:", [where], fix) from None
    raise store


_joined: list[str] = []  # the type of device of the groups that this process has made


@atexit.register  # before `saving` registers its own, so it runs after: a save may need the group to the end
def _leave() -> None:
    if dist.is_initialized():
        sign_off(getattr(sys, "last_value", None))  # what ends this program
        if _joined and not peers().abandoned:
            dist.destroy_process_group()


def sign_off(raised: BaseException | None) -> None:
    """Show the others that this rank ends, and why; nothing where there is no group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        why = "" if raised is None else f"{type(raised).__name__}: {raised}".splitlines()[0]
        peers().show("ended", Place("has ended", why, ended=True))


def leave_group() -> None:
    """Wait for all ranks, then take the default process group down; nothing where there is none."""
    if not dist.is_initialized():
        return
    try:
        peers().exchange("leave", b"", peers().timeout, of=(), call=LEAVE)
    except CollectiveError as error:
        if error.__cause__ is None:
            raise  # else the rank with the store has left, when all had come
    if "cpu" not in _joined and torch.accelerator.is_available():  # a CPU rank must not start a driver
        torch.accelerator.synchronize()
    dist.destroy_process_group()
