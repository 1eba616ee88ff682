"""Traces and compilations: counted, logged, warned of where they repeat."""

from __future__ import annotations

import io
import logging
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from faults import PARAMS, PRESETS, loss, mesh_of
from torch import Tensor
from toys import rows, step_of, traces

import fnshard as fs
from fnshard.compiler.kernels import inductor
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.step import runner


def small_step(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    params = {"w": torch.ones(3)}
    return step_of(lambda p, x: (p["w"] * x).sum(), params, **options), params


def test_a_new_shape_warns_once() -> None:
    step, params = small_step()
    with traces(step, 1):
        for _ in range(3):
            step(params, torch.ones(2, 3))
    with traces(step, 11), pytest.warns(UserWarning, match="^compiling again.{,240}$") as caught:
        for rows in range(5, 16):
            step(params, torch.ones(rows, 3))
    assert len(caught) == 1


def test_what_was_lowered_counts_once_and_what_was_dropped_counts_again() -> None:
    step, params = small_step(cache=1)
    with traces(step, 1):
        assert step.lower(params, torch.ones(2, 3)).compiled is None
        step(params, torch.ones(2, 3))
    with traces(step, 2), pytest.warns(UserWarning, match="compiling again"):
        step(params, torch.ones(4, 3))
        step(params, torch.ones(2, 3))


def test_a_number_of_the_batch_is_a_constant_and_the_third_value_warns_once() -> None:
    """It is like a static argument of `jax.jit`; a list of numbers is one leaf; a tensor is an input."""
    step = step_of(lambda p, x, n, ns: (p["w"] * x / n).sum() * sum(ns), {"w": torch.ones(3)})
    with warnings.catch_warnings(record=True) as caught, traces(step, 4):
        warnings.simplefilter("always")
        for number, scale in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (2, 1.0)):
            loss, _ = step({"w": torch.ones(3)}, torch.ones(2, 3), scale, [number, 1])
            assert loss.item() == 6 / scale * (number + 1)
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(texts) == 1
    assert re.search(r"batch\['1'\] was 0\.5, 1\.0, 2\.0(.|\n)*batch\['2'\] was a list of 2 numbers(.|\n)*"
                     r"pass a tensor", texts[0])  # fmt: skip
    step = step_of(lambda p, x, n: (p["w"] * x / n).sum(), {"w": torch.ones(3)})
    with traces(step, 1):
        for scale in (0.5, 1.0, 2.0):
            step({"w": torch.ones(3)}, torch.ones(2, 3), torch.tensor(scale))


def test_traces_of_simulated_ranks_count_once() -> None:
    mesh = mesh_of()
    step = fs.shard_step(loss, PRESETS["full_shard"](PARAMS, mesh), mesh=mesh, backend="eager")
    with traces(step, 1):
        fs.simulate(mesh, lambda rank: step(step.init(PARAMS), rows()[:2])[0])


def test_a_step_that_nobody_watches_has_no_observer() -> None:
    seen: list[ExecutorContext] = []
    plain = runner.bind

    def bind(context: ExecutorContext) -> Any:
        seen.append(context)
        return plain(context)

    step, params = small_step()
    with mock.patch.object(runner, "bind", bind):
        step(params, torch.ones(2, 3))
    assert [c.watch for c in seen] == [None]


def test_a_logger_hears_how_far_compiling_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(  # what is compiled does not matter here
        inductor, "_generate", lambda graph, *_: (inductor._make_eager(graph), lambda: None)
    )
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # other tests may have left theirs, and a level
    messages: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("fnshard")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        mesh, sgd = mesh_of(), fs.optim.sgd(0.1)
        specs = PRESETS["full_shard"](PARAMS, mesh)
        lowered = fs.shard_step(loss, specs, mesh=mesh, optimizer=sgd, backend="inductor").lower(
            PARAMS, rows()
        )
        for _ in range(2):
            lowered.compile()
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
    count = len(messages) - 2
    assert messages == [
        "tracing and scheduling loss",
        *(f"compiling kernel {n} of {count}" for n in range(1, count + 1)),
        f"compiled {count} kernels",
    ]
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr(inductor.sys, "stderr", shown)
    logger.setLevel(logging.WARNING)
    try:
        inductor.compile_graphs(inductor.graphs_of(lowered.kernels.values()), backend="inductor", options={})
    finally:
        logger.setLevel(logging.NOTSET)
    assert [
        line.strip() for line in re.split(r"\rfnshard: |\x1b\[K", shown.getvalue()) if line.strip()
    ] == messages[1:]
    assert count >= 4  # forward and backward of each


def test_nothing_is_traced_while_a_thread_compiles(monkeypatch: Any) -> None:
    """Torch's tracers share state of the process: a trace during a compilation loses values."""
    compiling, go_on = threading.Event(), threading.Event()

    def compiled(graph: Any, *_: Any) -> Any:
        compiling.set()
        assert go_on.wait(60)
        return inductor._make_eager(graph), lambda: None

    monkeypatch.setattr(inductor, "_generate", compiled)
    (first, params), (second, _) = small_step(backend="inductor"), small_step()
    lowered = first.lower(params, torch.ones(2, 3)).compile_async()
    assert compiling.wait(60)
    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(second.lower, params, torch.ones(2, 3))
        with pytest.raises(TimeoutError):
            tracing.result(timeout=1)
        go_on.set()
        assert tracing.result().program is not None and lowered.compile().compiled is not None
