"""Collectives through shared memory, for CPU ranks of one host: peers read what they need in place.

A gather of leaves writes them where all ranks read them (`endpoint`); any other costs one pack and one
unpack, a reduction one pass over the peers' rows. All of it runs on the caller's thread, so that nothing
overlaps with compute; gloo over loopback copies everything through the kernel and stages it in temporaries
(figures: `connect`). `messages` says how ranks read each other's memory; here it is an anonymous memory file
of each rank (memfd, sparse; gone with its last process, so that nothing is left even after SIGKILL), mapped
by all ranks of the host.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Axes, Group, Handle, SingleRank, disconnect
from fnshard.runtime.collectives.endpoint import Add, Endpoint, Runs, Write, address_space
from fnshard.runtime.collectives.messages import Words

TOKEN, CLOSED = 0, 1  # the memory's own words, of those that `messages` leaves to it
SPINS = 200  # looks that only yield the processor; then sleeps, and whether the peer lives


# ------------------------------------------------------------------ memory and meeting


@dataclass(frozen=True, eq=False)
class Mapped:
    """One rank's memory as this process maps it."""

    rank: int
    pid: int
    memory: mmap.mmap
    address: int  # of the first byte

    @staticmethod
    def of(fd: int, rank: int, pid: int) -> Mapped:
        """Map an open memory file of `rank`, a process `pid`."""
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        return Mapped(rank, pid, memory, np.frombuffer(memory, dtype=np.int8, count=1).ctypes.data)

    def words(self, offset: int, count: int) -> Words:
        return memoryview(self.memory)[offset : offset + 8 * count].cast("q")

    def put(self, offset: int, flat: Tensor) -> None:
        self.get(offset, flat.numel() * flat.dtype.itemsize, flat.dtype).copy_(flat)

    def get(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        # A storage of just that size: a slice of one large tensor would be pickled with all of it.
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def drop(self, offset: int) -> None:
        pass  # the slot's memory is used again

    def offset_of(self, flat: Tensor) -> int | None:
        offset = flat.data_ptr() - self.address
        return offset if 0 <= offset < len(self.memory) else None

    def left(self) -> bool:
        """Whether its process has closed it, ended, or is a zombie."""
        return bool(self.words(8 * CLOSED, 1)[0]) or self._process() in "ZX"

    def stopped(self) -> bool:
        """Whether its process stands still (SIGSTOP, or a debugger)."""
        return self._process() in "Tt"

    def _process(self) -> str:
        """Its state, a letter as Linux has it; X where there is none."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except OSError:
            return "X"


@dataclass(frozen=True)
class Polling:
    """A rank that waits looks again and again."""

    timeout: float

    def announce(self) -> None:
        pass

    def wait(self, ready: Callable[[], bool], peer: Mapped, deadline: float) -> str:
        spins = 0
        while not ready():
            spins += 1
            if spins <= SPINS:
                os.sched_yield()
                continue
            time.sleep(1e-4)
            if spins % 256 == 0:
                gone = peer.left()  # before the last look: what it sent and then left is good
                if not ready() and gone:
                    return f"rank {peer.rank} has left"
            if time.monotonic() > deadline:
                still = f"; its process {peer.pid} is stopped" if peer.stopped() else ""
                return f"rank {peer.rank} did not come within {self.timeout:g} s{still}"
        return ""


# ------------------------------------------------------------------ connecting


def _host() -> str:
    """Equal for processes that see each other's `/proc`: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def connect_shared(base: Group) -> Shared | None:
    """Shared memory over the ranks of `base`, or None, on all ranks alike, where it cannot be had.

    Every rank offers its memory, opens that of its host's ranks, and says whether that worked.
    """
    mesh, rank = base.mesh, base.mesh.rank
    token, fd, offer = secrets.randbits(62), -1, ""
    try:
        fd = os.memfd_create("fnshard")
        os.ftruncate(fd, address_space(mesh))  # memory is used only where something was written
        own = Mapped.of(fd, rank, os.getpid())
        own.words(8 * TOKEN, 1)[0] = token
        offer = json.dumps({"host": _host(), "pid": os.getpid(), "fd": fd, "token": token})
    except (OSError, ValueError, AttributeError):  # no Linux, no memfd, a limit on address space
        pass
    try:
        texts = base.gather_object(offer)
        if not all(texts):
            return None
        offers = [json.loads(text) for text in texts]
        hosts = tuple(each["host"] for each in offers)
        memories = {rank: own}
        try:
            for peer, each in enumerate(offers):
                if peer != rank and each["host"] == hosts[rank]:
                    memories[peer] = _open(peer, each)
            answer = "yes"
        except (OSError, ValueError) as error:
            answer = str(error)
        if set(base.gather_object(answer)) != {"yes"} or len(set(hosts)) == mesh.size:
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    return Shared(base, hosts, Endpoint(mesh, memories, Polling(base.timeout)))


def _open(peer: int, offer: dict[str, Any]) -> Mapped:
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR)
    try:
        memory = Mapped.of(fd, peer, offer["pid"])
    finally:
        os.close(fd)
    if memory.words(8 * TOKEN, 1)[0] != offer["token"]:
        raise ValueError(f"rank {peer}'s memory is another process's")
    return memory


# ------------------------------------------------------------------ the collectives


@dataclass(eq=False)
class Shared:
    """Shared memory for groups whose ranks share a host; what spans hosts goes through `base`."""

    base: Group
    hosts: tuple[str, ...]
    endpoint: Endpoint
    spans: dict[tuple[str, ...], bool] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.base.mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        if numel == 0 or not self.shares_memory(axes):
            return self.base.send_buffer(numel, dtype, axes, rows)
        return self.endpoint.send_buffer(rows * numel * dtype.itemsize, dtype, rows)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        return self._carrier(axes).all_gather(flat, axes)

    def gather_leaves(
        self, runs: Runs, total: int, dtype: torch.dtype, write: Write, axes: Axes
    ) -> Handle[list[Tensor]] | None:
        """Gather leaves in place, see `endpoint`; None where the ranks share no memory."""
        if total == 0 or not self.shares_memory(axes):
            return None
        return self.endpoint.gather_leaves(runs, total, dtype, write, axes)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return self._carrier(axes).reduce_scatter(rows, axes)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return self._carrier(axes).all_to_all(rows, axes)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        return self._carrier(axes).permute(flat, axes, distance)

    def reduce_pair(
        self, numel: int, dtype: torch.dtype, pack: Callable[[Tensor], None], add: Add, axes: Axes,
        in_place: bool,
    ) -> Handle[Tensor] | None:  # fmt: skip
        """A reduce-scatter of two ranks in which each keeps its own row; None where they are not two.

        Args:
            pack: fills a flat [numel], the peer's row; called now.
            add: the peer's row for this rank, and a flat [numel] for the sum; called at the wait.
            in_place: the sum is made in the peer's row; it must die before the next collective.
        """
        if numel == 0 or self.mesh.axes_size(axes) != 2 or not self.shares_memory(axes):
            return None
        return self.endpoint.reduce_pair(numel, dtype, pack, add, axes, in_place)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        return self._carrier(axes).all_reduce(flat, axes)

    def gather_object(self, text: str) -> list[str]:
        return self.base.gather_object(text)

    def barrier(self) -> None:
        self.base.barrier()

    def transport_bytes(self) -> int:
        return self.endpoint.bytes_used()

    def close(self) -> None:
        disconnect(self)
        self.endpoint.own.words(8 * CLOSED, 1)[0] = 1
        self.endpoint.close()
        self.base.close()

    def spans_hosts(self, axes: Axes) -> bool:
        """Whether any group over these axes does."""
        axes = tuple(axes)
        if axes not in self.spans:
            groups = {self.mesh.group_ranks(axes, rank) for rank in range(self.mesh.size)}
            self.spans[axes] = any(len({self.hosts[rank] for rank in group}) > 1 for group in groups)
        return self.spans[axes]

    def shares_memory(self, axes: Axes) -> bool:
        """Whether groups over these axes are of several ranks of one host."""
        return self.mesh.axes_size(axes) > 1 and not self.spans_hosts(axes)

    def _carrier(self, axes: Axes) -> SingleRank | Endpoint | Group:
        if self.mesh.axes_size(axes) == 1:
            return SingleRank(self.mesh)
        return self.base if self.spans_hosts(axes) else self.endpoint
