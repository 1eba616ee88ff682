"""Faults to plant in steps of a chain of three units, for the tests of `fs.debug`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torch import Tensor
from toys import chain, run_chain

import fnshard as fs
from fnshard.compiler import lower as lower_module
from fnshard.compiler.schedule.instructions import (
    Gather,
    Instruction,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.step import runner

PARAMS = chain(3)
ADAMW = fs.optim.adamw(1e-2)
PRESETS = fs.presets.PRESETS


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute a mean over rows of a chain of three units."""
    return run_chain(params, x.to(params["layers.0.w"].dtype)).float().square().mean()


def mesh_of(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**(axes or {"shard": 2}), simulated=True)


AT = Mapping[str, Any]


@dataclass
class Liar:
    """Collectives of which one, the `nth` of a verb, brings a wrong result."""

    comm: Any
    verb: str
    nth: int
    lie: Callable[[Any], Any]
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.comm, name)
        if name != self.verb:
            return real

        def lying(*args: Any) -> Any:
            handle, self.calls = real(*args), self.calls + 1
            return Lied(handle, self.lie) if self.calls == self.nth + 1 else handle

        return lying


@dataclass
class Lied:
    handle: Any
    lie: Callable[[Any], Any]

    def wait(self) -> Any:
        return self.lie(self.handle.wait())

    def release(self) -> None:
        self.handle.release()


@contextmanager
def plant_fault(plant: Callable[[ExecutorContext], ExecutorContext]) -> Iterator[None]:
    """Make steps that are bound in the block wrong."""
    plain = runner.bind
    with mock.patch.object(runner, "bind", lambda context: plain(plant(context))):
        yield


def lying(verb: str, nth: int, lie: Callable[[Any], Any], rank: int | None = None) -> Any:
    """Let a collective bring a wrong result, on all ranks or on one."""

    def plant(context: ExecutorContext) -> ExecutorContext:
        if rank not in (None, context.rank):
            return context
        return replace(context, comm=Liar(context.comm, verb, nth, lie))

    return plant_fault(plant)


@contextmanager
def schedule_wrong(breaker: Callable[[list[Instruction]], None]) -> Iterator[None]:
    """Let schedules come out broken in the block, and `verify` look away."""

    def ignore(schedule: Schedule) -> Schedule:
        lines = list(schedule.instructions)
        breaker(lines)
        return schedule.with_instructions(lines)

    with mock.patch.object(lower_module, "verify", ignore):
        yield


def first(lines: Any, kind: type, **fields: Any) -> int:
    return next(
        i for i, line in enumerate(lines)
        if isinstance(line, kind) and all(getattr(line, k) == v for k, v in fields.items())
    )  # fmt: skip


def leave_out(lines: list[Instruction], number: int) -> None:
    gone = lines.pop(number)
    for i, line in enumerate(lines):
        drops = tuple(n for n in line.drops if n not in gone.writes)
        lines[i] = replace(line, drops=drops)


def gather_not_waited_for(lines: list[Instruction]) -> None:
    leave_out(lines, first(lines, Wait, of=Gather, unit="layers.1"))
