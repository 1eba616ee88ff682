"""Where fnshard's step goes: milliseconds by instruction, and what the executor itself costs.

The schedule's actions are timed from outside, and inside them what they call: kernels, collectives,
packing, the optimizer's kernel. What of a step is left is the executor's own. Host time, so it says
something on a CPU alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fnshard.compiler import execute
from fnshard.compiler.execute import Context

Seconds = dict[str, float]
KERNELS, PACKING, COLLECTIVES, OPTIMIZER = "kernels", "packing", "collectives", "optimizer"


@dataclasses.dataclass
class Watch:
    """What was seen since `clear`: seconds by "phase verb", seconds by what was called inside."""

    lines: Seconds = dataclasses.field(default_factory=lambda: defaultdict(float))
    inner: Seconds = dataclasses.field(default_factory=lambda: defaultdict(float))
    places: set[tuple[str, str]] = dataclasses.field(default_factory=set)  # (unit, phase) of the schedule

    def clear(self) -> None:
        """Forget, for instance the steps that compiled."""
        self.lines.clear()
        self.inner.clear()

    def summary(self, steps: int, seconds: float) -> dict[str, Any]:
        """Means of one step, given that `steps` took `seconds` by the clock."""
        own = seconds - sum(self.inner.values())
        return {
            "step_ms": 1e3 * seconds / steps,
            "lines_ms": {k: 1e3 * v / steps for k, v in sorted(self.lines.items(), key=lambda kv: -kv[1])},
            "inside_ms": {k: 1e3 * v / steps for k, v in sorted(self.inner.items(), key=lambda kv: -kv[1])},
            "outside_lines_ms": 1e3 * (seconds - sum(self.lines.values())) / steps,
            "units_times_phases": len(self.places),
            "executor_us": 1e6 * own / steps / max(1, len(self.places)),
            "executor_and_packing_us": 1e6 * (own + self.inner[PACKING]) / steps / max(1, len(self.places)),
        }


@contextmanager
def watched() -> Iterator[Watch]:
    """Steps that are called for the first time within are watched, as long as they live."""
    watch = Watch()
    with mock.patch("fnshard.step.bind", lambda context: _bind(context, watch)):
        yield watch


def _bind(context: Context, watch: Watch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`execute.bind`, with clocks."""
    lines = context.schedule.instructions
    watch.places |= {(line.unit, line.phase) for line in lines if line.unit != "-"}
    context = _clocked(context, watch)
    actions = [_timed(execute._BIND[type(line)](line, context), watch.lines, _name(line)) for line in lines]

    def run(env: dict[str, Any]) -> dict[str, Any]:
        for action in actions:
            action(env)
        return env

    return run


def _name(line: Any) -> str:
    of = f" {line.of}" if isinstance(line, execute.Wait) else ""
    return f"{line.phase.split('.')[0]} {line.verb}{of}"


def _clocked(context: Context, watch: Watch) -> Context:
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
        began = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            into[name] += time.perf_counter() - began

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
