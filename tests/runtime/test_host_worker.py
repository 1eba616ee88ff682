"""Updates on the host by a worker: the same numbers, waited for where a step ends, failures included."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from threading import Event, current_thread
from typing import Any
from unittest import mock

import pytest
import sharded
import torch
from errors import raises
from tiered import CLIPPED, FEATURES, PRESETS, TIERS, Adversary, compute_expected, model_of
from torch import Tensor

import fnshard as fs
from fnshard.errors import StateError
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.host_worker import Worker
from fnshard.runtime.tiers import Transfers
from fnshard.step import runner


# ------------------------------------------------------------------ the worker
def with_worker(kind: type[Transfers], worker: type[Worker] = Worker) -> type[Transfers]:
    """Return transfers that have a worker on a CPU, too."""

    class WithWorker(kind):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.worker = worker(self.device)

    return WithWorker


@pytest.mark.parametrize(
    ("tier", "preset", "kind", "feature"),
    [
        ("all_host", "full_shard", Adversary, "plain"),
        ("streamed", "full_shard", Adversary, "reduce"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in
          product(("optimizer_host", "all_host", "streamed"), PRESETS[:5], (Transfers, Adversary), FEATURES)),
    ],
)  # fmt: skip
def test_updates_off_the_launching_thread_are_the_same(
    tier: str, preset: str, kind: Any, feature: str
) -> None:
    optimizer, options = FEATURES[feature]
    used: list[str] = []

    class Noted(Worker):
        def _run(self, call: Any) -> None:
            used.append(current_thread().name)
            super()._run(call)

    with mock.patch.object(runner, "Transfers", with_worker(kind, Noted)):
        ranks = sharded.simulate(
            model_of("tied"), preset, 2, optimizer, policy=TIERS[tier], remat="offload", **options
        )
    for got in ranks:
        sharded.assert_same(got, compute_expected(optimizer is CLIPPED))
    assert (used or tier == "streamed") and all(name.startswith("fnshard-host") for name in used)


def count_updates(path: str, grad: Tensor, slots: Any, param: Tensor, step: Any) -> Any:
    return -grad, {"seen": slots["seen"] + 1}


def train_by_hand(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None], worker: type[Worker], blocks: int = 2
) -> tuple[Any, fs.TrainState, Tensor]:
    """Make a step on the host, its state and a batch; each update first calls `before` with its path."""
    bind = Updater.bind

    def bind_watched(self: Updater, paths: Any, number: int) -> Any:
        update = bind(self, paths, number)

        def update_watched(*args: Any) -> Any:
            for path in paths:
                before(path)
            return update(*args)

        return update_watched

    monkeypatch.setattr(Updater, "bind", bind_watched)
    params = {f"l.{n}.w": torch.ones(4, 4) for n in range(blocks)}
    mesh = fs.make_mesh(shard=1, device="cpu")
    specs = fs.presets.full_shard(params, mesh, optimizer_memory="host")
    optimizer = fs.optim.Optimizer(
        "own()", lambda path, param: {"seen": torch.zeros_like(param)}, count_updates
    )
    with mock.patch.object(runner, "Transfers", with_worker(Transfers, worker)):
        step = fs.shard_step(
            lambda p, x: (sum(w.tanh().sum() for w in p.values()) * x).sum(), specs, mesh=mesh,
            optimizer=optimizer, backend="eager",
        )  # fmt: skip
        state = step.init(params)
        step._runner.rank  # noqa: B018  (connects)
    return step, state, torch.ones(2)


def test_the_launching_thread_waits_where_the_step_ends_and_not_at_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Event()

    class Launching(Worker):
        def wait(self) -> None:
            launched.set()  # no update is done before
            super().wait()

    def wait(path: str) -> None:
        assert launched.wait(20)

    step, state, x = train_by_hand(monkeypatch, wait, Launching)
    before = {p: v.clone() for p, v in state.params.items()}
    state, _ = step(state, x)
    assert all(slots["seen"].eq(1).all() for slots in state.opt_state.values())
    assert not any(torch.equal(v, before[p]) for p, v in state.params.items())


def test_an_update_that_fails_there_fails_the_step_and_no_later_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def fail_first(path: str) -> None:
        made.append(path)
        if len(made) == 1:
            raise ZeroDivisionError("by the optimizer")

    step, state, x = train_by_hand(monkeypatch, fail_first, Worker, blocks=3)
    params = {p: v.clone() for p, v in state.params.items()}
    with pytest.raises(ZeroDivisionError, match="by the optimizer") as reported:
        step(state, x)
    assert len(made) == 1 and "update" in reported.value.__notes__[0]
    with raises(StateError, leaves="consumed", fix="state.copy()"):
        _ = state.params
    step(step.init(params), x)
    assert len(made) == 4
