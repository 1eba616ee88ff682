"""One of each from outside of the package: a function and a row of a registry, used in a tiny step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnshard as fs
from experiments.finetune.config import ObjectiveConfig
from experiments.finetune.objectives import OBJECTIVES
from experiments.trackers import registry
from experiments.trackers.base import LogPosition
from experiments.trackers.feed import Feed
from fnshard import LayoutSpec, P
from fnshard.compiler import lower
from fnshard.compiler.frontend import trace
from fnshard.compiler.schedule.instructions import Gather
from fnshard.errors import OptimizerError, SpecError
from fnshard.optim import schedules

ROWS = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def params() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    shapes = {"frozen": (8, 8), "layers.0.w": (8, 8), "layers.1.w": (8, 8)}
    return {n: torch.randn(s, dtype=torch.float64, generator=numbers) for n, s in shapes.items()}


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    x = x @ params["frozen"].T
    for i in range(2):
        x = torch.relu(x @ params[f"layers.{i}.w"].T)
    return x.square().mean()


# ------------------------------------------------------------------ what somebody else writes


def signum(lr: Any) -> fs.optim.Optimizer:
    rate = schedules.as_schedule(lr)

    def leaf(path: str, grad: Tensor, slots: Any, param: Tensor, info: Any) -> Any:
        return -rate(info.step) * grad.sign(), {}

    return fs.optim.Optimizer(f"signum(lr={lr})", leaf)


def staircase(peak: float, every: int) -> Callable[[Tensor], Tensor]:
    return lambda step: peak * 0.5 ** (step // every).double()


def by_columns(params: Any, mesh: fs.Mesh, **policy: Any) -> Any:
    coded = LayoutSpec(P("shard"), codec="half", trainable=False)
    return fs.match_specs(params, [("frozen", coded), ("*", LayoutSpec(P(None, "shard"), **policy))])


HALF = fs.codecs.Codec(
    "half",
    lambda shape: {"halves": (shape, torch.float16)},
    lambda rows: {"halves": rows.half()},
    lambda parts, shape, dtype: parts["halves"].to(dtype),
)


def gathers_first(schedule: Any) -> Any:
    """A pass: all gathers of the forward are issued before its first kernel."""
    lines = schedule.instructions
    early = [line for line in lines if isinstance(line, Gather) and line.phase.startswith("forward")]
    moved = schedule.with_instructions([*early, *(line for line in lines if line not in early)])
    return replace(moved, planned=len(early))  # how many units may be gathered at once


def relu_as_clamp(graph: torch.fx.Graph) -> int:
    """A rewrite."""
    found = [node for node in graph.nodes if node.target is torch.ops.aten.relu.default]
    for node in found:
        node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
    return len(found)


class Notes:
    """A tracker."""

    name = "notes"

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def start(self, told: Any) -> Any:
        return {}, LogPosition()

    def log(self, rows: Any) -> None:
        self.rows += rows

    def artifact(self, path: Path) -> None: ...

    def finish(self, status: str, summary: Any) -> None:
        self.rows.append(status)


def squares(tuning: Any, config: ObjectiveConfig, *, training: bool) -> Any:
    """An objective."""
    policy = tuning.policy(lambda params, batch: loss_fn(params, batch["x"]), training=training)
    return lambda params, batch: (fs.Mean(policy(params, batch) * 3, torch.tensor(3)), {})


# ------------------------------------------------------------------ and how it is used


def trained(make: Callable[[fs.Mesh], Any], steps: int = 3) -> list[float]:
    """Losses of two ranks' steps."""
    mesh = fs.make_mesh(shard=2, simulated=True)
    step = make(mesh)

    def work(rank: int) -> list[float]:
        state, losses = step.init(params()), []
        for _ in range(steps):
            state, metrics = step(state, ROWS[rank])
            losses.append(metrics.numbers()["loss"])
        return losses

    first, second = fs.simulate(mesh, work)
    assert first == second
    return first


def plain(steps: int = 3) -> list[float]:
    """The same in a loop without the library."""
    values, losses = params(), []
    values["frozen"] = values["frozen"].half().double()
    trainable = [values[f"layers.{i}.w"].requires_grad_() for i in range(2)]
    for number in range(steps):
        loss = torch.stack([loss_fn(values, x) for x in ROWS]).mean()
        losses.append(loss.item())
        for leaf, grad in zip(trainable, torch.autograd.grad(loss, trainable), strict=True):
            leaf.data -= 0.01 * 0.5 ** (number // 2) * grad.sign()
    return losses


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (fs.presets, "PRESETS"), (fs.codecs, "CODECS"), (schedules, "SCHEDULES"),
        (fs.optim.optimizers, "OPTIMIZERS"), (fs.optim, "OPTIMIZERS"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))
    monkeypatch.setattr(fs.optim, "OPTIMIZERS", fs.optim.optimizers.OPTIMIZERS)
    fs.presets.register("by_columns", by_columns)
    fs.optim.register("signum", signum)
    fs.schedules.register("staircase", staircase)
    fs.codecs.register(HALF)


def step_of(mesh: fs.Mesh, fn: Any = loss_fn) -> Any:
    """All four, looked up by name."""
    rate = fs.schedules.SCHEDULES["staircase"](0.01, every=2)
    optimizer = fs.optim.OPTIMIZERS["signum"](rate)
    specs = fs.presets.PRESETS["by_columns"](params(), mesh)
    return fs.shard_step(fn, specs, mesh=mesh, optimizer=optimizer, backend="eager")


@pytest.mark.usefixtures("registered")
def test_an_optimizer_a_schedule_a_preset_and_a_codec() -> None:
    assert trained(step_of) == pytest.approx(plain(), abs=1e-10)


@pytest.mark.usefixtures("registered")
def test_a_name_is_taken_once() -> None:
    fs.optim.register("signum", signum)  # again is no harm
    with pytest.raises(OptimizerError, match="an optimizer is called 'adamw' already"):
        fs.optim.register("adamw", signum)
    with pytest.raises(OptimizerError, match="a schedule is called 'wsd' already"):
        fs.schedules.register("wsd", staircase)
    with pytest.raises(SpecError, match="a preset is called 'zero2' already"):
        fs.presets.register("zero2", by_columns)


@pytest.mark.usefixtures("registered")
def test_a_pass_and_a_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each in the compiler's lists; here the lists' functions are replaced."""
    counts: list[int] = []
    monkeypatch.setattr(lower, "prefetch", lambda schedule, *depths: gathers_first(schedule))
    monkeypatch.setattr(trace, "recognise_causal", lambda graph: counts.append(relu_as_clamp(graph)))
    low = step_of(fs.make_mesh(shard=2, abstract=True)).lower(params(), ROWS[0])
    verbs = [type(line).__name__ for line in low.schedule.instructions]
    assert verbs[:3] == ["Gather"] * 3 and verbs.index("Run") > 2 and counts == [2]
    assert trained(step_of) == pytest.approx(plain(), abs=1e-10)


def test_a_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(registry.TRACKERS, "notes", lambda config: Notes())
    config = SimpleNamespace(tensorboard=False, wandb=False, mlflow=False, notes=True)
    (notes,) = registry.chosen(config)
    feed = Feed(notes, tmp_path, every_s=0.01)
    feed.start({}, [])
    feed.row({"step": 1, "loss": 2.0})
    feed.close("ok", {})
    feed.join(time.monotonic() + 60)
    assert notes.rows == [{"step": 1, "loss": 2.0}, "ok"]


@pytest.mark.usefixtures("registered")
def test_an_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "squares", squares)
    tuning = SimpleNamespace(policy=lambda fn, training: fn)
    loss = OBJECTIVES["squares"](tuning, ObjectiveConfig(), training=True)

    def fn(params: Any, x: Tensor) -> Any:
        return loss(params, {"x": x})

    assert trained(lambda mesh: step_of(mesh, fn)) == pytest.approx(plain(), abs=1e-10)
