"""Join the ranks that a launcher started with this process, and leave them.

Ranks that `fs.launch` started on one machine meet through a file below a temporary folder, so that nothing
listens on a network. Ranks that `torchrun` started meet as it says, at `MASTER_ADDR`:`MASTER_PORT`.
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
from fnshard.mesh.deadlock import LEAVE, STOP_S, RankStatus, peers

MEET_S = 60.0  # the least time that ranks have to meet: some import for longer than a collective may take
POLL_S = 0.05
SLACK_S = 5.0  # how long after its timeout torch may take to end by itself and say why
LAUNCHER = "FNSHARD_LAUNCHER"  # the process of `fs.launch` that started this one
RENDEZVOUS = "FNSHARD_RENDEZVOUS"  # the folder of the ranks' file store
MEETING = "fnshard-meeting"  # the thread that waits at an address, and may outlive the wait
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # the name that torchrun sets too
# Launchers that say how many processes they started, but nothing by which these could meet.
OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def under_launcher() -> bool:
    """Return whether this process is a rank of a launcher, which sets these variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Return how many ranks the launcher started; 1 without a launcher.

    Raises:
        SpecError: the launcher gives its processes nothing to meet by, or WORLD_SIZE is no number.
    """
    if "WORLD_SIZE" in os.environ:
        return _read_number("WORLD_SIZE")
    for variable, launcher in OTHER_LAUNCHERS.items():
        count = os.environ.get(variable, "1")
        if count.isdigit() and int(count) > 1:
            raise SpecError(
                f"{launcher} started {count} processes ({variable}), which do not know each other.",
                fix="start them by torchrun or fs.launch; WORLD_SIZE=1 for separate trainings.",
            )
    return 1


def place_on_host() -> tuple[int, int]:
    """Return this process's number among the ranks of its machine, and how many there are."""
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        return 0, 1
    return _read_number("LOCAL_RANK"), _read_number("LOCAL_WORLD_SIZE")


def _read_number(variable: str) -> int:
    """Read an environment variable that counts something.

    Raises:
        SpecError: its value is no number.
    """
    value = os.environ[variable]
    if not value.isdecimal():
        raise SpecError(
            f"{variable}={value!r} in the environment is no number of ranks.",
            fix="start the ranks by torchrun or fs.launch, which set it; or unset it.",
        )
    return int(value)


def launcher() -> int:
    """Return the process that started this rank: that of `fs.launch`, or torchrun's agent."""
    return int(os.environ.get(LAUNCHER, os.getppid()))


def attempt() -> int:
    """Return how often the ranks of this job were started anew."""
    return int(os.environ.get(ATTEMPT, "0"))


def accelerator() -> str:
    """Return the type of the accelerator if there is one, else "cpu"."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def join_group(
    device_type: str | None = None, timeout_s: float = 600.0, asked: Callable[[], bool] = lambda: False
) -> None:
    """Set this rank's device and make the default process group, unless it exists or there is one rank.

    The group is taken down when the process ends.

    Args:
        device_type: "cpu", "cuda", ...; by default the accelerator if there is one. CPU tensors can be
            communicated on any.
        timeout_s: how long a collective waits for a silent peer.
        asked: says whether this process was asked to end; it then waits only STOP_S for peers that are idle.

    Raises:
        SpecError: the environment names no rank, or no place to meet.
        CollectiveError: a rank did not come within MEET_S, or `timeout_s` if that is more.
    """
    if dist.is_initialized():
        return
    world = world_size()
    device_type = device_type or accelerator()

    # A rank takes the device of its number on this machine.
    if device_type != "cpu":
        names = [name for name in ("LOCAL_RANK", "RANK") if name in os.environ]
        local, count = _read_number(names[0]) if names else 0, torch.accelerator.device_count()
        if not count:
            raise SpecError(f"device={device_type!r}: this machine has none.", fix='device="cpu".')
        # Each rank may see only its own device, as number 0.
        torch.accelerator.set_device_index(local % count)
    if world == 1:
        return

    # Check the environment before waiting for anybody.
    needed = ["RANK"] if RENDEZVOUS in os.environ else ["RANK", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise SpecError(
            f"WORLD_SIZE={world}, and {', '.join(missing)} not set: this rank cannot meet the others.",
            fix="start the ranks by torchrun or fs.launch, which set them; or unset WORLD_SIZE.",
        )
    rank = _read_number("RANK")
    if rank >= world:
        raise SpecError(
            f"RANK={rank}, and WORLD_SIZE={world}: ranks count from 0.",
            fix="start the ranks by torchrun or fs.launch, which set both.",
        )

    # Meet in a store, name this start, wait until all ranks are there, and only then make the group: torch
    # does not say which rank is missing.
    timeout, patience = (datetime.timedelta(seconds=s) for s in (timeout_s, max(timeout_s, MEET_S)))
    if RENDEZVOUS in os.environ:
        store = dist.FileStore(str(Path(os.environ[RENDEZVOUS]) / f"store-{attempt()}"), world)
    else:
        store = _open_store(rank, world, patience, asked)
        store = dist.PrefixStore(_name_start(store, rank, world, patience, asked), store)
    _wait_for_all(store, rank, world, patience, asked, "" if device_type == "cpu" else _name_device())
    store.set_timeout(timeout)
    make_group(device_type, store, rank, world, timeout)
    peers().asked, peers().timeout = asked, timeout_s


def make_group(
    device_type: str, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta
) -> None:
    """Make the default process group: gloo for CPU tensors and, on an accelerator, its own backend.

    It is not bound to a device: that would start a communicator which no step uses, and all ranks would split
    each group of a mesh from it.
    """
    backend = "gloo"
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _joined.append(device_type)


def _wait_until(ready: Callable[[], Any], timeout: datetime.timedelta, asked: Callable[[], bool]) -> bool:
    """Wait until `ready()`, at most until the timeout, and return whether it is."""
    until = time.monotonic() + timeout.total_seconds()
    while not (is_ready := bool(ready())) and time.monotonic() < until:
        if asked():  # a process that was asked to end has little patience left
            until = min(until, time.monotonic() + STOP_S)
        time.sleep(POLL_S)
    return is_ready


def _name_start(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool]
) -> str:
    """Agree on a name that the ranks of this start share with each other, and with no earlier start.

    torchrun's store may outlive its ranks, and a rank that reads the addresses of dead ones there hangs.
    The agents of several machines need not count restarts alike. So rank 0 names each start, and tells the
    name to each rank that comes.

    Raises:
        CollectiveError: rank 0 did not come in time.
    """
    mine = f"fnshard/{uuid.uuid4().hex}"
    if rank > 0:
        store.set(f"fnshard/came/{rank}", mine)
        if not _wait_until(lambda: store.check([f"{mine}/answer"]), timeout, asked):
            raise _make_error(rank, world, timeout, [0], asked)
        return store.get(f"{mine}/answer").decode()

    # Rank 0 answers every rank that comes, until all have found its name.
    came = [f"fnshard/came/{other}" for other in range(1, world)]
    here = [f"{mine}/here/{other}" for other in range(1, world)]

    def all_here() -> bool:
        for key in came:
            if store.check([key]):  # a dead rank's key is answered too, which nobody reads
                store.set(f"{store.get(key).decode()}/answer", mine)
        return store.check(here)

    _wait_until(all_here, timeout, asked)
    return mine


def _make_error(
    rank: int, world: int, timeout: datetime.timedelta, missing: list[int], asked: Callable[[], bool]
) -> CollectiveError:
    """Make the error of a rank that waited in vain, which names the ranks that did not come."""
    within = "before it was asked to end (SIGTERM)" if asked() else f"within {timeout.total_seconds():g} s"
    message = f"rank {rank} of {world} cannot meet the others {within}."
    who = f"rank {', '.join(map(str, missing))} did not come"
    fix = "look at the ranks that did not come; if they import slowly, raise the timeout."
    return CollectiveError(message, [who], fix)


def _name_device() -> str:
    """Name this rank's accelerator, uniquely among all machines."""
    index = torch.accelerator.current_device_index()
    # Ranks that each see a single device all number it 0, but its uuid tells them apart.
    number = torch.cuda.get_device_properties(index).uuid if torch.cuda.is_available() else index
    return f"device {number} of {socket.gethostname()}"


def _wait_for_all(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool],
    device: str,
) -> None:  # fmt: skip
    """Wait until all ranks have come to the store.

    Args:
        device: the name of this rank's device, "" for a CPU.

    Raises:
        CollectiveError: some ranks did not come in time; it names them.
        SpecError: several ranks have the same device, which NCCL does not support.
    """
    # Count this rank at its device before it says that it is here: once all are here, the count is complete.
    keys = [f"here/{r}" for r in range(world)]
    if device:
        store.add(device, 1)
    store.set(keys[rank], "")
    if not _wait_until(lambda: store.check(keys), timeout, asked):
        missing = [r for r in range(world) if not store.check([keys[r]])]
        raise _make_error(rank, world, timeout, missing, asked)
    if device and (ranks := store.add(device, 0)) > 1:
        raise SpecError(
            f"one {device} for {ranks} ranks: its collectives need a device for each rank.",
            fix="as many ranks on a machine as it has devices (CUDA_VISIBLE_DEVICES says which they see), or "
            'device="cpu".',
        )


def _open_store(rank: int, world: int, timeout: datetime.timedelta, asked: Callable[[], bool]) -> dist.Store:
    """Open the store at `MASTER_ADDR`:`MASTER_PORT`.

    Raises:
        SpecError: there is no such host or port, or the port is taken; it is raised at once.
        CollectiveError: rank 0 did not come in time.
    """
    # Check the address first: waiting would not mend a wrong one.
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    message = f"rank {rank} of {world} cannot meet the others"
    try:
        if not 0 <= int(port) < 1 << 16:
            raise ValueError("a port is a number below 65536")
        socket.getaddrinfo(host, int(port))  # torch would try a wrong name until time runs out
    except (OSError, ValueError) as error:
        fix = "the name, or address, and port of rank 0's machine, the same on all ranks."
        raise SpecError(f"{message}: there is no such place.", [f"{where}: {error}"], fix) from None

    # Meet there, in a thread: torch waits without end if another program listens there.
    result: list[dist.Store | Exception] = []

    def meet() -> None:
        try:
            result.append(next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))[0])
        except Exception as error:
            result.append(error)

    threading.Thread(target=meet, name=MEETING, daemon=True).start()
    if not _wait_until(lambda: result, timeout + datetime.timedelta(seconds=SLACK_S), asked):
        if asked():
            raise _make_error(rank, world, timeout, [0] if rank else list(range(1, world)), asked)
        result.append(TimeoutError("who listens there does not answer, and may be another program"))

    # Return the store, or say what went wrong: a taken port is a mistake here, all else may be others' fault.
    store = result[0]
    if not isinstance(store, Exception):
        while isinstance(store, dist.PrefixStore):  # torch's prefix is each agent's own count of restarts
            store = store.underlying_store
        return store
    fix = "another MASTER_PORT, the same on all ranks; or end the program that listens there."
    if "EADDRINUSE" in str(store):
        raise SpecError(f"{message}: the port is taken.", [where], fix) from None
    if isinstance(store, (dist.DistError, TimeoutError)):
        within = f"within {timeout.total_seconds():g} s ({str(store).splitlines()[0]})"
        fix = "start all ranks, with one address and a port at which no other program listens."
        raise CollectiveError(f"{message} {within}:", [where], fix) from None
    raise store


_joined: list[str] = []  # the device types of the groups that this process has made


@atexit.register  # `saving` registers later, and so runs first: a save may need the group until its end
def _leave() -> None:
    """Leave the group when the process ends, and tell the others why."""
    if dist.is_initialized():
        sign_off(getattr(sys, "last_value", None))  # the exception that ends this program, if any
        # A group in which a thread of `Peers.run` still waits is left as it is.
        if _joined and not peers().abandoned:
            dist.destroy_process_group()


def sign_off(raised: BaseException | None) -> None:
    """Show the others that this rank ends, and why; do nothing without a group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        why = "" if raised is None else f"{type(raised).__name__}: {raised}".splitlines()[0]
        peers().show("ended", RankStatus("has ended", why, ended=True))


def leave_group() -> None:
    """Wait for all ranks, then take the default process group down, if there is one."""
    if not dist.is_initialized():
        return
    try:
        peers().exchange("leave", b"", peers().timeout, of=(), call=LEAVE)
    except CollectiveError as error:
        if error.__cause__ is None:
            raise  # otherwise the rank with the store has left after all had come
    if "cpu" not in _joined and torch.accelerator.is_available():  # a CPU rank must not start a driver
        torch.accelerator.synchronize()
    dist.destroy_process_group()
