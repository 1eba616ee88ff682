"""A step never waits for its device: run on CPU tensors that stand in for a GPU's, which note every wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import GPU, Waits, on_gpu, put_on_gpu
from streams import Nccl, cuda_mesh, gpu
from torch import Tensor

import fnshard as fs
from fnshard.runtime.readback import Reading

ROWS = torch.ones(4, 8), torch.ones(4, 8)
RATE = fs.schedules.warmup_cosine(1e-3, 2, 9)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(RATE))
POLICY = ("compute_dtype", "memory", "optimizer_memory")
Advance = Callable[[fs.TrainState], tuple[fs.TrainState, Any]]


def loss(params: Any, x: Tensor, y: Tensor) -> Any:
    hidden = F.dropout(torch.tanh(x @ params["a"]), 0.1, training=True)
    return fs.Mean((hidden @ params["b"] - y).square().sum(), (y > 0).sum()), {"mean": hidden.detach().mean()}


@contextmanager
def training(waits: Waits, **how: Any) -> Iterator[tuple[Any, fs.TrainState, Advance]]:
    """Yield a step on one GPU, its first state, and a function that makes a step on the device."""
    mesh, params = cuda_mesh(shard=1), {name: torch.ones(8, 8) for name in "ab"}
    policy = {name: how.pop(name) for name in POLICY if name in how}
    specs = fs.presets.full_shard(params, mesh, **policy)
    with gpu(waits, Nccl(waits, 0)):
        step = fs.shard_step(loss, specs, mesh=mesh, **{"optimizer": CLIPPED, "backend": "eager", **how})
        put_on_gpu(step.lower(params, *ROWS))

        def advance(state: fs.TrainState) -> tuple[fs.TrainState, Any]:
            with waits.watching():
                return step(state, *ROWS)

        with on_gpu(waits):
            with waits.watching():
                state = step.init(params)
            waits.errors.clear()
            yield step, state, advance


@pytest.mark.parametrize("how", [{}, {"grad_norm": True}, {"prefetch": 0}, {"accumulate": 2}])
def test_a_step_with_clipping_dropout_a_mean_and_metrics_waits_for_nothing(how: dict[str, Any]) -> None:
    waits = Waits()
    with training(waits, **how) as (_, state, advance):
        for _ in range(3):
            state, _ = advance(state)
            assert waits.errors == []


class Deferred:
    """A worker that begins when somebody waits for it: what the launching thread does is done before."""

    def __init__(self, waits: Waits):
        self.waits, self.calls, self.before = waits, [], []

    def submit(self, call: Any, *, heavy: bool = False) -> None:
        self.calls.append(call)

    def wait(self) -> None:
        self.before.append((len(self.calls), [*self.waits.errors]))
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.mark.parametrize("where", ["optimizer_memory", "memory"])
def test_updates_on_the_host_do_not_stop_the_launching_thread(where: str) -> None:
    waits = Waits()
    how = {"optimizer_memory": "host"} | ({"memory": "host"} if where == "memory" else {})
    with training(waits, optimizer=fs.optim.adamw(RATE), **how) as (step, state, advance):
        step._runner.rank.transfers.worker = worker = Deferred(waits)
        advance(state)
    (count, before), *rest = worker.before
    assert count >= 4 and before == [] and all(n == 0 for n, _ in rest)
    assert "Transfer.wait waits" in waits.errors  # the worker, for gradients that come down
    assert waits.errors[-2:] == ["Transfers.finish waits"] * 2


def test_numbers_and_flags_are_read_a_step_late_and_a_read_waits_for_one_event() -> None:
    waits = Waits()
    with training(waits) as (step, state, advance):
        state, metrics = advance(state)
        assert step.flag_raised("stop") is False and waits.errors == []  # no step came before
        state, _ = advance(state)
        step.flag_raised("stop")
        metrics.numbers()
        assert waits.errors == ["Reading.numbers waits"] * 2


def test_a_dynamic_loss_scale_waits_once_a_step() -> None:
    waits = Waits()
    with training(waits, loss_scale="dynamic") as (_, state, advance):
        advance(state)
        assert waits.errors == ["aten::_local_scalar_dense reads a value"]


def test_numbers_are_those_of_the_step_whatever_comes_after() -> None:
    """Integers stay integers, and what is on the host stays there."""
    lost, rate = torch.tensor(0.1), torch.tensor(3e-4, dtype=torch.float64)
    found = Reading.of({"loss": lost, "rate": rate, "skipped": torch.tensor(3)}, torch.device("cpu"))
    lost.fill_(9.0)
    assert found.numbers() == {"loss": torch.tensor(0.1).item(), "rate": 3e-4, "skipped": 3} and found.ready
    assert isinstance(found.numbers()["skipped"], int)
    assert found.without("loss").numbers() == {"rate": 3e-4, "skipped": 3}


def test_only_numbers_of_the_device_are_sent() -> None:
    waits = Waits()
    with gpu(waits, Nccl(waits, 0)), on_gpu(waits), waits.watching():
        found = Reading.of({"rate": torch.tensor(3e-4), "loss": torch.ones((), device=GPU)}, GPU)
    assert found.known == {"rate": torch.tensor(3e-4).item()} and list(found.sent) == ["loss"]
    assert waits.errors == []
