"""The context that a schedule's instructions are bound to: everything that they need besides tensors.

An instruction takes from it what it needs when it is bound (collectives, kernels, the optimizer, transfers),
so that running a step looks nothing up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_STREAM
from fnshard.compiler.kernels.inductor import Compiled
from fnshard.compiler.schedule.instructions import (
    Accumulate,
    Action,
    Env,
    Free,
    Instruction,
    Norms,
    ReduceUpdate,
    StackUpdate,
    Update,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.executor.scalars import Scalars
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.host_worker import Worker
from fnshard.runtime.packing import Packer, Stacks
from fnshard.runtime.tiers import Transfers

Watch = Callable[[int, Instruction, Action], Action]  # (line number, line, its action) -> the action to run


@dataclass(frozen=True)
class ExecutorContext:
    """A context that instructions are bound to.

    Args:
        schedule: the schedule that runs.
        kernels: the compiled forward and backward of each segment.
        comm: the collectives.
        rank: this rank's number in the mesh.
        scalars: how the step's scalars are summed.
        updater: runs the optimizer's updates.
        freed: is called with each value that dies (tests poison it).
        transfers: copies between tiers, if something is stored on the host or on disk.
        watch: wraps every instruction, once, when it is bound (`fs.debug`).
        packers: packers of buckets, made when they are first needed.
    """

    schedule: Schedule
    kernels: Compiled
    comm: Collectives
    rank: int
    scalars: Scalars | None = None
    updater: Updater | None = None
    freed: Callable[[str, Any], None] | None = None
    transfers: Transfers | None = None
    watch: Watch | None = None
    packers: dict[str, Packer | Stacks] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    @property
    def device(self) -> torch.device:
        return self.schedule.mesh.device

    @cached_property
    def worker(self) -> Worker | None:
        """The thread that runs lines `on_host`; None if nothing is stored on the host, lines are watched, or
        an update communicates."""
        # Ranks must issue collectives in one order, and a worker would issue its own at any time between the
        # others'.
        communicates = any(
            isinstance(line, ReduceUpdate | StackUpdate) for line in self.schedule.instructions
        )
        if self.transfers is None or self.watch is not None or communicates:
            return None
        return self.transfers.worker

    def on_update_stream(self, action: Action) -> Callable[[Env], Any]:
        """Return an action that runs on the stream of updates and returns the event after it.

        Without such a stream it is the action itself.
        """
        stream, device = None if self.transfers is None else self.transfers.updates, self.device
        if stream is None:
            return action

        def run(env: Env) -> Any:
            # Values that are made once a step are made once on each stream, or a kernel of this stream could
            # read one that the other stream has not computed yet.
            control = env[CONTROL]
            source, on_stream = env.get(CONTROL_ON_STREAM, (None, None))
            if source is not control:
                on_stream = control.on_stream()
                env[CONTROL_ON_STREAM] = control, on_stream
            # The update reads what the compute stream has made so far, and the compute stream waits for the
            # event where it reads what the update makes.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                action({**env, CONTROL: on_stream})
                event = torch.cuda.Event()
                event.record(stream)
            return event

        return run

    def wait_event(self, event: Any) -> None:
        """Let the compute stream wait for an event, if there is one."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        """Return a function that makes a call for a line: on the worker, if there is one and the line is
        `on_host` or a Free; else at once."""
        # Heavy calls hold memory until they have run, so only a few of them may wait (`Worker`).
        worker, heavy = self.worker, isinstance(line, Update | Norms | Accumulate)
        if worker is None or not (isinstance(line, Free) or line.on_host(self.schedule)):
            return lambda call: call()

        def run(call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:
                error.add_note(f"It was in {line.phase} {line.unit} {line.verb}, on the host's thread.")
                raise

        return lambda call: worker.submit(lambda: run(call), heavy=heavy)

    def packer(self, bucket: str) -> Packer:
        """Return the packer of a bucket's leaves, which all instructions on the bucket share."""
        if bucket not in self.packers:
            self.packers[bucket] = Packer(self.schedule.buckets[bucket], self.mesh, self.rank)
        return self.packers[bucket]

    def stacks(self, bucket: str) -> Stacks:
        """Return the packer of a bucket whose leaves single ranks update whole."""
        if bucket not in self.packers:
            self.packers[bucket] = Stacks(self.schedule.buckets[bucket], self.mesh, self.rank)
        return self.packers[bucket]
