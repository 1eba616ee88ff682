"""Where fnshard's step goes: milliseconds by instruction, and what the executor itself costs.

The schedule's actions are timed from outside, and inside them what they call: kernels, collectives,
packing, the optimizer's kernel. What of a step is left is the executor's own (`experiments.micro.executor`
measures that by itself). Host time, so it says something on a CPU alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fnshard.compiler.schedule.instructions import Action, Env, Instruction, Wait
from fnshard.runtime.executor import execute
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.step import runner

Seconds = dict[str, float]
KERNELS, PACKING, COLLECTIVES, OPTIMIZER = "kernels", "packing", "collectives", "optimizer"


@dataclasses.dataclass
class PhaseTimer:
    """What was seen since `clear`: seconds by "phase verb", seconds by what was called inside."""

    lines: Seconds = dataclasses.field(default_factory=lambda: defaultdict(float))
    inner: Seconds = dataclasses.field(default_factory=lambda: defaultdict(float))

    def clear(self) -> None:
        """Forget, for instance the steps that compiled."""
        self.lines.clear()
        self.inner.clear()

    def summary(self, steps: int, seconds: float) -> dict[str, Any]:
        """Means of one step, given that `steps` took `seconds` by the clock."""

        def milliseconds(seen: Seconds) -> dict[str, float]:
            return {name: 1e3 * s / steps for name, s in sorted(seen.items(), key=lambda item: -item[1])}

        return {
            "step_ms": 1e3 * seconds / steps,
            "lines_ms": milliseconds(self.lines),
            "inside_ms": milliseconds(self.inner),
            "outside_lines_ms": 1e3 * (seconds - sum(self.lines.values())) / steps,
            "executor_ms": 1e3 * (seconds - sum(self.inner.values())) / steps,
        }


@contextmanager
def watched() -> Iterator[PhaseTimer]:
    """Steps that are called for the first time within are watched, as long as they live."""
    watch = PhaseTimer()

    def bind(context: ExecutorContext, part: slice = slice(None)) -> Callable[[Env], Env]:
        def timed(number: int, line: Instruction, action: Action) -> Action:
            return _timed(action, watch.lines, _name(line))

        return execute.bind(dataclasses.replace(_clocked(context, watch), watch=timed), part)

    with mock.patch.object(runner, "bind", bind):
        yield watch


def _name(line: Instruction) -> str:
    of = f" {line.of.verb}" if isinstance(line, Wait) else ""
    return f"{line.phase.split('.')[0]} {line.verb}{of}"


def _clocked(context: ExecutorContext, watch: PhaseTimer) -> ExecutorContext:
    kernels = {
        name: tuple(fn and _timed(fn, watch.inner, KERNELS) for fn in pair)
        for name, pair in context.kernels.items()
    }
    clocked = dataclasses.replace(
        context, kernels=kernels, comm=_Clocked(context.comm, watch.inner, COLLECTIVES)
    )
    for bucket in context.schedule.buckets:
        clocked.packers[bucket] = _Clocked(context.packer(bucket), watch.inner, PACKING)
    if context.updater is not None:
        optimizer = context.updater.optimizer
        kernel = optimizer.kernel and _timed(optimizer.kernel, watch.inner, OPTIMIZER)
        context.updater.optimizer = dataclasses.replace(optimizer, kernel=kernel)
    return clocked


def _timed(fn: Callable[..., Any], into: Seconds, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began, before = time.perf_counter(), sum(into.values())
        try:
            return fn(*args, **kwargs)
        finally:  # what was timed inside is not counted again
            into[name] += time.perf_counter() - began - (sum(into.values()) - before)

    return run


class _Clocked:
    """An object whose methods are timed, and those of the handles that they return."""

    def __init__(self, inner: Any, into: Seconds, name: str):
        self._inner, self._into, self._name = inner, into, name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._inner, attribute)
        if not callable(value):
            return value
        timed = _timed(value, self._into, self._name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = timed(*args, **kwargs)
            return _Clocked(result, self._into, self._name) if hasattr(result, "release") else result

        self.__dict__[attribute] = call  # looked up once
        return call
