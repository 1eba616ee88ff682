"""Collectives that fail as NCCL's do, on gloo: `wait` returns at once, and what goes wrong shows later.

A thread stands for the stream: it waits for the works in the order in which the host has. An event after a
work happens when that has ended. Where a peer is lost, the stream stands still, or the communicator's
watchdog ends the process by SIGABRT; the host learns nothing before it reads a value (`synchronize`).
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import torch
import torch.distributed as dist

from fnshard.mesh import Mesh
from fnshard.runtime.collectives import base, monitor
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.collectives.monitor import Monitor

PATIENCE_S = 60.0  # of the backend; what it does then comes after who names the rank


class Stream:
    """What this rank's collectives run on; one a process.

    Args:
        aborts: whether the backend sees that a peer is gone, as over a network; else it waits on.
    """

    def __init__(self, aborts: bool):
        self.aborts, self.issued, self.ended = aborts, 0, 0
        self.works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.moved = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self, mesh: Mesh, timeout: float) -> None:
        """Steps on the mesh whose timeout is this use the stream."""
        stream = self
        for owner, name in (
            (base, "_all_gather"),
            (base, "_reduce_scatter"),
            (dist, "all_reduce"),
            (dist, "all_to_all_single"),
        ):
            setattr(owner, name, self._late(getattr(owner, name)))

        class Event:
            def __init__(self, device_type: str):
                self.place = 0

            def record(self) -> None:
                self.place = stream.issued

            def query(self) -> bool:
                return stream.ended >= self.place

        torch.Event = Event
        monitor.ROLL_CALL_S = 1.0
        watch = Monitor(mesh.rank, mesh.size, "late", timeout)
        mesh.connections[timeout] = Group(mesh, PATIENCE_S, monitor=watch)

    def synchronize(self) -> None:
        """The host waits, as where it reads a value; for ever, if the stream stands still."""
        with self.moved:
            self.moved.wait_for(lambda: self.ended == self.issued)

    def _late(self, collective: Any) -> Any:
        def issue(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work

            class Work:
                def wait(_) -> None:
                    self.issued += 1
                    self.works.put(work)

            return Work()

        return issue

    def _run(self) -> None:
        while True:
            try:
                self.works.get().wait()
            except RuntimeError:
                if self.aborts:
                    os.abort()
                return
            with self.moved:
                self.ended += 1
                self.moved.notify_all()
