"""One of each from outside of the package: a function and a row of a registry, used in a tiny step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.analysis.storages import BUFFERS
from fnshard.compiler.frontend import trace
from fnshard.compiler.schedule.instructions import (
    COMMUNICATION,
    AllReduce,
    Gather,
    OfBucket,
    Reduced,
    ReduceScatter,
    Wait,
)
from fnshard.errors import OptimizerError, ScheduleError, SpecError
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

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Any) -> Any:
        return -step.host(rate) * grad.sign(), {}

    return fs.optim.Optimizer(f"signum(lr={lr})", lambda path, param: {}, update)


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
    """Issue all gathers of the forward before its first kernel: a pass."""
    lines = schedule.instructions
    early = [line for line in lines if isinstance(line, Gather) and line.phase.startswith("forward")]
    moved = schedule.with_instructions([*early, *(line for line in lines if line not in early)])
    return replace(moved, planned=len(early))  # how many units may be gathered at once


@dataclass(frozen=True)
class NarrowAllReduce(OfBucket):
    """An instruction: blocks of gradients are summed over `over` as fp32, whatever they are."""

    lane, trips = COMMUNICATION, 2  # a sum sends everything twice, as rings do

    over: tuple[str, ...] = ()

    def axes_of(self, schedule: Any) -> tuple[str, ...]:
        return self.over

    def wire_bytes(self, schedule: Any) -> int:
        return schedule.buckets[self.bucket].numel * 4

    def bind(self, context: Any) -> Any:
        (blocks,), (flight,) = self.reads, self.writes

        def run(env: Any) -> None:
            env[flight] = context.comm.all_reduce(env[blocks].flat.float(), self.over)

        return run

    @classmethod
    def bind_wait(cls, wait: Any, context: Any) -> Any:
        (flight,), (out,), packer = wait.reads, wait.writes, context.packer(wait.bucket)

        def run(env: Any) -> None:
            handle = env.pop(flight)
            flat = handle.wait().double()
            env[out] = Reduced(packer.blocks(flat), flat)
            handle.release()

        return run

    def price(self, pricer: Any) -> Any:
        size = self.wire_bytes(pricer.schedule)
        return pricer.copy(3 * size, **pricer.collective("all_reduce", self.over, size))


def narrow_sums(schedule: Any) -> Any:
    """Send sums of blocks as fp32: a pass."""

    def narrow(line: Any) -> Any:
        if isinstance(line, AllReduce):
            same = line.unit, line.phase, line.reads, line.writes
            return NarrowAllReduce(*same, bucket=line.bucket, over=line.axes)
        return replace(line, of=NarrowAllReduce) if isinstance(line, Wait) and line.of is AllReduce else line

    return schedule.with_instructions([narrow(line) for line in schedule.instructions])


def relu_as_clamp(graph: torch.fx.Graph) -> int:
    """Replace relu by clamp in a graph: a rewrite."""
    found = [node for node in graph.nodes if node.target is torch.ops.aten.relu.default]
    for node in found:
        node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
    return len(found)


# ------------------------------------------------------------------ and how it is used


def train_ranks(make: Callable[[fs.Mesh], Any], steps: int = 3, **axes: int) -> list[float]:
    """Train on simulated ranks, and return their losses, which are equal on all."""
    mesh = fs.make_mesh(**axes or {"shard": 2}, simulated=True)
    step = make(mesh)

    def work(rank: int) -> list[float]:
        state, losses = step.init(params()), []
        for _ in range(steps):
            state, metrics = step(state, ROWS[rank % 2])
            losses.append(metrics.numbers()["loss"])
        return losses

    first, *others = fs.simulate(mesh, work)
    assert others == [first] * len(others)
    return first


def plain(steps: int = 3) -> list[float]:
    """Train in a loop without the library, and return the losses."""
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
        (fs.optim.optimizers, "OPTIMIZERS"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))
    monkeypatch.setattr(fs.optim, "OPTIMIZERS", fs.optim.optimizers.OPTIMIZERS)
    fs.presets.register("by_columns", by_columns)
    fs.optim.register("signum", signum)
    fs.schedules.register("staircase", staircase)
    fs.codecs.register(HALF)


def step_of(mesh: fs.Mesh, fn: Any = loss_fn, passes: Any = None) -> Any:
    """Make a step of an optimizer, a schedule, a preset and a codec, looked up by name."""
    rate = fs.schedules.SCHEDULES["staircase"](0.01, every=2)
    optimizer = fs.optim.OPTIMIZERS["signum"](rate)
    specs = fs.presets.PRESETS["by_columns"](params(), mesh)
    return fs.shard_step(fn, specs, mesh=mesh, optimizer=optimizer, backend="eager", passes=passes)


@pytest.mark.usefixtures("registered")
def test_an_optimizer_a_schedule_a_preset_and_a_codec() -> None:
    assert train_ranks(step_of) == pytest.approx(plain(), abs=1e-10)


@pytest.mark.usefixtures("registered")
def test_an_instruction() -> None:
    """It runs, and is checked, priced and counted as the library's own are."""

    def step_on(mesh: fs.Mesh, passes: Any = None) -> Any:
        specs = fs.presets.hybrid_shard(params(), mesh) | {"frozen": LayoutSpec(trainable=False)}
        return fs.shard_step(
            loss_fn, specs, mesh=mesh, optimizer=signum(0.01), backend="eager", passes=passes
        )

    axes = {"replicate": 2, "shard": 2}
    wide = step_on(fs.make_mesh(**axes, abstract=True)).lower(params(), ROWS[0])
    expected = train_ranks(step_on, **axes)
    narrowed = partial(step_on, passes=[narrow_sums, *fs.passes.default()])
    low = narrowed(fs.make_mesh(**axes, abstract=True)).lower(params(), ROWS[0])
    assert train_ranks(narrowed, **axes) == pytest.approx(expected, abs=1e-10)  # of a sign nothing is lost
    sums = [n for n, i in enumerate(low.schedule.instructions) if i.verb == "narrow_all_reduce"]
    assert len(sums) == 2
    traffic, of_wide = low.comm_analysis(), wide.comm_analysis()
    assert 2 * traffic["narrow_all_reduce"]["bytes"] == of_wide["all_reduce"]["bytes"]
    assert low.schedule.communication() != wide.schedule.communication()
    narrow, plain_sum = (s.memory_timeline().moments[sums[0]].device[BUFFERS] for s in (low, wide))
    assert narrow > plain_sum  # the copy in fp32
    assert low.timeline("h100").step_seconds > 0


@pytest.mark.usefixtures("registered")
def test_a_name_is_taken_once() -> None:
    fs.optim.register("signum", signum)  # again is no harm
    with raises(OptimizerError, leaves="'adamw'", fix="another name"):
        fs.optim.register("adamw", signum)
    with raises(OptimizerError, leaves="'wsd'", fix="another name"):
        fs.schedules.register("wsd", staircase)
    with raises(SpecError, leaves="'zero2'", fix="another name"):
        fs.presets.register("zero2", by_columns)


@pytest.mark.usefixtures("registered")
def test_a_pass_and_a_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is an argument; a rewrite is a line of the compiler's list, of which a function is replaced."""
    counts: list[int] = []
    monkeypatch.setattr(trace, "recognise_causal", lambda graph: counts.append(relu_as_clamp(graph)))
    own = partial(step_of, passes=[*fs.passes.default(prefetch=0), gathers_first])
    low = own(fs.make_mesh(shard=2, abstract=True)).lower(params(), ROWS[0])
    verbs = [type(line).__name__ for line in low.schedule.instructions]
    assert verbs[:3] == ["Gather"] * 3 and verbs.index("Run") > 2 and counts == [2]
    assert train_ranks(own) == pytest.approx(plain(), abs=1e-10)


def reduces_nothing(schedule: Any) -> Any:
    """Never wait for what is reduced: a pass with a mistake."""
    kept = [
        line for line in schedule.instructions if not (isinstance(line, Wait) and line.is_for(ReduceScatter))
    ]
    return schedule.with_instructions(kept)


def waits_for_nothing(schedule: Any) -> Any:
    """Let a Wait read nothing: a pass with a mistake."""
    return schedule.with_instructions(
        [replace(line, reads=()) if isinstance(line, Wait) else line for line in schedule.instructions]
    )


def fails(schedule: Any) -> Any:
    """Read a field that no line has: a pass with a mistake."""
    return [line.nothing for line in schedule.instructions]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("options", "error", "leaves", "fix"),
    [
        ({"passes": [*fs.passes.default(), reduces_nothing]}, ScheduleError, "reduces_nothing", ()),
        ({"passes": [*fs.passes.default(), waits_for_nothing]}, ScheduleError, "waits_for_nothing", ()),
        ({"passes": [fails]}, ScheduleError, ["fails", "AttributeError"], "return"),
        ({"passes": [print]}, ScheduleError, ["print", "NoneType"], "return schedule."),
        ({"passes": ["prefetch"]}, SpecError, ["passes=", "functions from a schedule"], ()),
        ({"passes": print}, SpecError, ["passes=", "functions from a schedule", "[mine]"], ()),
        ({"passes": 3}, SpecError, ["passes=", "functions from a schedule"], ()),
        ({"passes": fs.passes.default(), "prefetch": 2}, SpecError, "passes=", "default(prefetch"),
    ],
)  # fmt: skip
def test_a_pass_with_a_mistake_is_named(options: Any, error: Any, leaves: Any, fix: Any) -> None:
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(params(), mesh)
    with raises(error, leaves=leaves, fix=fix):
        fs.shard_step(loss_fn, specs, mesh=mesh, **options).lower(params(), ROWS[0])
