"""A step whose forward and backward are one graph: on a fake graph, which runs again on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from fnshard.compiler import lower
from fnshard.compiler.schedule.instructions import Reduced, Run, Update
from fnshard.errors import SpecError
from fnshard.runtime.collectives.base import Done
from fnshard.runtime.executor import cuda_graph

STEPS, WIDTH = 6, 8
RATE = fs.schedules.warmup_cosine(1e-2, 2, 9)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Reduced):
        return [*value.blocks.values()]
    return [value] if isinstance(value, Tensor) else tensors(value.value) if isinstance(value, Done) else []


class Fake:
    """Captured, it makes its buffers; replayed, it runs on what it read then and writes to them."""

    made: list[Fake]

    def __init__(self) -> None:
        self.made.append(self)
        self.replays = 0

    def capture(self, run: Callable[[], Any]) -> Any:
        self.run = run
        self.out = run()
        for tensor in self._written():
            tensor.fill_(7)  # a capture runs nothing
        return self.out

    def _written(self) -> list[Tensor]:
        return [t for n, v in self.out.items() if n.startswith(("r:", "~", "sin")) for t in tensors(v)]

    def replay(self) -> None:
        self.replays += 1
        new = self.run()
        for name, value in self.out.items():
            for target, source in zip(tensors(value), tensors(new[name]), strict=True):
                target.copy_(source)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fake]]:
    kind = type("Noted", (Fake,), {"made": []})
    monkeypatch.setattr(cuda_graph, "CudaGraph", kind)
    monkeypatch.setattr(cuda_graph, "check", lambda *_: None)  # a CPU
    yield kind.made


def loss(params: Any, x: Tensor, y: Tensor) -> Any:
    hidden = F.dropout(torch.tanh(x @ params["a"]), 0.2, training=True)
    out = hidden @ params["b"]
    return fs.Mean((out - y).square().sum(), (y > 0).sum()), {"seen": out.detach().sin(), "mean": out.mean()}


def batch(number: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(number)
    return tuple(torch.randn(4, WIDTH, generator=seeded, dtype=torch.float64) for _ in range(2))


def trained(mode: str | None, at: int | None = None, **how: Any) -> tuple[Any, ...]:
    """All metrics as they are read after the last step, and the last state; `at`: where the state moves."""
    params = {name: torch.linspace(-1, 1, WIDTH**2, dtype=torch.float64).view(WIDTH, WIDTH) for name in "ab"}
    mesh = fs.make_mesh(shard=1, device="cpu")
    step = fs.shard_step(
        loss, fs.presets.full_shard(params, mesh), mesh=mesh, backend="eager", mode=mode, **how
    )
    state, kept, flags = step.init(params, seed=3), [], []
    for number in range(STEPS):
        if number == at:
            state = state.copy()
        if number == 3:
            step.raise_flag("stop")
        state, metrics = step(state, *batch(number))
        flags.append(step.flag_raised("stop"))
        kept.append(metrics)
    seen = [m["aux"].pop("seen") for m in kept]
    return [m.numbers() for m in kept], seen, flags, {**state.params, **state.opt_state}


ADAMW = fs.optim.adamw(RATE, weight_decay=0.1)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), ADAMW)


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": ADAMW},
        {"optimizer": CLIPPED, "accumulate": 2},
        {"optimizer": CLIPPED, "loss_scale": "dynamic", "remat": "unit"},
        {"optimizer": ADAMW, "accumulate": 2, "accumulate_mode": "local", "grad_norm": True},
        pytest.param({"optimizer": CLIPPED, "update": "compiled"}, marks=pytest.mark.long),
    ],
)
def test_replayed_steps_are_the_same(graphs: list[Fake], how: dict[str, Any]) -> None:
    """Dropout, a schedule, a Mean, aux, clipping: bit for bit, read when all steps are made."""
    numbers, seen, flags, state = trained(None, **how)
    got = trained(cuda_graph.MODE, **how)
    assert got[0] == numbers and got[2] == flags and any(flags)
    torch.testing.assert_close((got[1], got[3]), (seen, state), rtol=0, atol=0)
    assert [g.replays for g in graphs] == [STEPS - cuda_graph.WARM_steps]


def test_a_state_at_other_addresses_is_captured_anew(graphs: list[Fake]) -> None:
    plain, moved = trained(None, optimizer=ADAMW), trained(cuda_graph.MODE, at=4, optimizer=ADAMW)
    assert moved[0] == plain[0] and [g.replays for g in graphs] == [2, 2]
    torch.testing.assert_close(moved[3], plain[3], rtol=0, atol=0)


def test_updates_come_last_and_a_watched_step_is_not_replayed(graphs: list[Fake], tmp_path: Any) -> None:
    params = {name: torch.ones(WIDTH, WIDTH, dtype=torch.float64) for name in "ab"}
    mesh = fs.make_mesh(shard=1, device="cpu")
    specs, how = fs.presets.full_shard(params, mesh), {"optimizer": ADAMW, "mode": cuda_graph.MODE}
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager", **how)
    lines = step.lower(params, *batch(0)).schedule.instructions
    assert max(n for n, i in enumerate(lines) if isinstance(i, Run)) < min(
        n for n, i in enumerate(lines) if isinstance(i, Update)
    )
    state = step.init(params)
    for number in range(3):
        state, _ = step(state, *batch(number))
    assert [g.replays for g in graphs] == [1]
    with fs.profile.traced(step, tmp_path / "trace.json"):
        state, _ = step(state, *batch(3))
    assert [g.replays for g in graphs] == [1]
    step(state, *batch(4))
    assert [g.replays for g in graphs] == [2]


def lowered(mesh: fs.Mesh, optimizer: Any = ADAMW, remat: Any = "none", **policy: Any) -> Any:
    params = {f"l.{n}.w": torch.ones(WIDTH, WIDTH) for n in range(4)}
    specs = fs.presets.full_shard(params, mesh, **policy)

    def chain(p: Any, x: Tensor) -> Tensor:
        for weight in p.values():
            x = (x @ weight).tanh()
        return x.sum()

    step = fs.shard_step(chain, specs, mesh=mesh, optimizer=optimizer, remat=remat, mode=cuda_graph.MODE)
    return step.lower(params, torch.ones(2, WIDTH))


GPU = fs.Mesh(("shard",), (1,), ("shard",), "cuda", "local")


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"mesh": fs.make_mesh(shard=1, device="cpu")}, r"the mesh \(shard=1\) is of cpu devices"),
        (
            {"mesh": fs.Mesh(("shard",), (2,), ("shard",), "cuda", "abstract")},
            "2 ranks: collectives are not captured",
        ),
        ({"optimizer_memory": "host"}, r"4 leaves rest on the host or on disk: params\['l.0.w'\], .*, \."),
        ({"memory": "host"}, "4 leaves rest on the host or on disk"),
        ({"remat": "offload"}, "remat='offload': activations travel"),
        ({"optimizer": None}, "there is no optimizer"),
    ],
)
def test_what_stands_in_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], reported: str
) -> None:
    monkeypatch.setattr(lower, "trace_device", lambda mesh: torch.device("cpu"))
    with pytest.raises(SpecError, match=rf"(?s)mode='reduce-overhead'.*{reported}.*Fix: leave `mode` out"):
        lowered(**{"mesh": GPU} | how)
