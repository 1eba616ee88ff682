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
    AllReduce,
    Free,
    Gather,
    Instruction,
    ReduceScatter,
    Run,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.step import runner

PARAMS = chain(3)
ADAMW = fs.optim.adamw(1e-2)
PRESETS = fs.presets.PRESETS


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A mean over rows of a chain of three units."""
    return run_chain(params, x.to(params["layers.0.w"].dtype)).float().square().mean()


def mesh_of(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**(axes or {"shard": 2}), simulated=True)


AT = Mapping[str, Any]


@dataclass
class Liar:
    """Collectives of which one, the `nth` of a verb, brings something else."""

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


def sharded(context: ExecutorContext) -> bool:
    """Whether this is side `b`: the one that is not no_shard."""
    return any(s.gradient.axes or s.storage.axes for s in context.schedule.specs.values())


@contextmanager
def planted(
    plant: Callable[[ExecutorContext], ExecutorContext],
    before: Callable[[Any], None] | None = None,
    both: bool = False,
) -> Iterator[None]:
    """Steps bound in here are wrong, where they are sharded; `before`: what is done to the environment."""
    plain = runner.bind

    def bind(context: ExecutorContext) -> Callable[[Any], Any]:
        if not (both or sharded(context)):
            return plain(context)
        run = plain(plant(context))

        def wrong(env: Any) -> Any:
            if before:
                before(env)
            return run(env)

        return wrong

    with mock.patch.object(runner, "bind", bind):
        yield


def lying(verb: str, nth: int, lie: Callable[[Any], Any], rank: int | None = None) -> Any:
    """A collective with a wrong result, on all ranks or on one."""

    def plant(context: ExecutorContext) -> ExecutorContext:
        if rank not in (None, context.rank):
            return context
        return replace(context, comm=Liar(context.comm, verb, nth, lie))

    return planted(plant)


def kernel_wrong(name: str, backward: bool, output: int, wrong: Callable[[Tensor], Tensor]) -> Any:
    """A kernel one of whose results is wrong."""

    def plant(context: ExecutorContext) -> ExecutorContext:
        pair = list(context.kernels[name])
        right = pair[backward]

        def run(args: list[Tensor]) -> list[Tensor]:
            out = list(right(args))
            out[output] = wrong(out[output])
            return out

        pair[backward] = run
        return replace(context, kernels={**context.kernels, name: tuple(pair)})

    return planted(plant)


def leaf_wrong(path: str) -> Any:
    return planted(lambda c: c, lambda env: env.update({f"s:{path}": env[f"s:{path}"] * 1.01}))


def update_wrong() -> Any:
    def plant(context: ExecutorContext) -> ExecutorContext:
        right = context.updater.bind

        def bind(bucket: Any) -> Any:
            update = right(bucket)

            def wrong(blocks: Any, *rest: Any) -> None:
                update({p: b * (2 if p == "layers.1.w" else 1) for p, b in blocks.items()}, *rest)

            return wrong

        context.updater.bind = bind
        return context

    return planted(plant)


@contextmanager
def schedule_wrong(breaker: Callable[[list[Instruction]], None]) -> Iterator[None]:
    """Sharded schedules come out broken, and `verify` looks away."""

    def ignore(schedule: Schedule) -> Schedule:
        if not any(s.gradient.axes for s in schedule.specs.values()):
            return schedule
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


def update_before_its_reduction(lines: list[Instruction]) -> None:
    wait = first(lines, Wait, of=ReduceScatter, unit="layers.1")
    lines.insert(wait, lines.pop(first(lines, Update, unit="layers.1")))


def saved_value_freed(lines: list[Instruction]) -> None:
    run = first(lines, Run, backward=True, unit="layers.1")
    value = next(n for n in lines[run].drops if n.startswith("x"))
    lines[run] = replace(lines[run], drops=tuple(n for n in lines[run].drops if n != value))
    lines.insert(run, Free("-", "backward", drops=(value,)))


def wrong_leaf_read(lines: list[Instruction]) -> None:
    """The kernel of unit 2 computes with the leaf of unit 1, which is alive: only a number shows it."""
    run = first(lines, Run, unit="layers.2", backward=False)
    other = next(n for n in lines[first(lines, Run, unit="layers.1")].reads if n.startswith("p:"))
    for i, line in enumerate(lines[:run]):
        lines[i] = replace(line, drops=tuple(n for n in line.drops if n != other))
    swapped = [other if n.startswith("p:") else n for n in lines[run].reads]
    lines[run] = replace(lines[run], reads=tuple(swapped))


def update_with_a_part_of_the_sum(lines: list[Instruction]) -> None:
    """Hybrid: what the reduce-scatter left, and the all-reduce in flight may overwrite."""
    issue = first(lines, AllReduce, unit="layers.2")
    update = first(lines, Update, unit="layers.2")
    lines[update] = replace(lines[update], reads=(lines[issue].reads[0], *lines[update].reads[1:]))
    move = lines.pop(update)
    lines.insert(issue + 1, move)
