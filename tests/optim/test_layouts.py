"""Optimizers that see more of a leaf than its elements, in every layout: what one rank computes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import SHAPES, leaves, trained
from torch import Tensor

import fnshard as fs
from fnshard.checkpoint.state_leaves import state_leaves
from fnshard.errors import OptimizerError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.optim import (
    adafactor,
    adamw,
    adamw_8bit,
    by_path,
    chain,
    clip_by_global_norm,
    ema,
    lars,
    muon,
    sgd,
    soap,
)
from fnshard.optim.contract import Optimizer

OWN = {
    "muon": muon(0.05, dtype=None),
    "adamw_8bit": adamw_8bit(0.05, b2=0.9, weight_decay=0.1, block=3),
    "adafactor": adafactor(0.3, weight_decay=0.1),
    "lars": lars(0.3, weight_decay=0.1, trust=0.5),
    # No gradient of longer sides has their rank: rounding would decide about the basis of the rest.
    "soap": soap(0.05, b2=0.9, precondition_frequency=1, max_precond_dim=6),
}
PRESETS = ["full_shard", "zero1", "zero2", "no_shard"]
AXES = [{"shard": 2}, {"shard": 4}, {"shard": 2, "tensor": 2}]
PAIRS = [  # every two of an optimizer, a preset and axes; in the suite two presets of each optimizer
    pytest.param(name, preset, AXES[(i + j) % len(AXES)], marks=[pytest.mark.long] * ((i + j) % 2))
    for i, name in enumerate(OWN)
    for j, preset in enumerate(PRESETS)
]


def some_of(*names: str) -> list[Any]:
    """All optimizers, of which these are in the suite."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.long) for name in OWN]


def around(own: Any) -> Any:
    return chain(clip_by_global_norm(0.5), by_path(("embed*", sgd(0.1)), ("*", own)), ema(0.9))


@cache
def alone(name: str) -> dict[str, Tensor]:
    return trained({"shard": 1}, "no_shard", around(OWN[name]))[0]


def assert_alone(found: list[dict[str, Tensor]], name: str) -> None:
    for params in found:
        for path, leaf in alone(name).items():
            torch.testing.assert_close(params[path], leaf, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("name", "preset", "axes"), PAIRS, ids=str)
def test_every_layout_is_one_rank(name, preset, axes):
    """To 1e-10, clipping and an average around it; also matrices that no rank has evenly many rows of."""
    moved = {path for path, leaf in leaves().items() if (leaf - alone(name)[path]).abs().max() > 1e-3}
    assert moved == set(SHAPES)
    assert_alone(trained(axes, preset, around(OWN[name])), name)


OPTIONS = [
    {"accumulate": 2}, {"remat": "unit"}, {"policy": {"optimizer_memory": "host"}},
    {"policy": {"optimizer_memory": "host", "update_on": "device"}},
    {"policy": {"memory": "host", "optimizer_memory": "host"}},
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [
    pytest.param(name, options, marks=[pytest.mark.long] * ((i + j) % 5 not in (0, 2)))
    for i, name in enumerate(OWN) for j, options in enumerate(OPTIONS)
], ids=str)  # fmt: skip
def test_it_is_so_with_options(name, options):
    assert_alone(trained({"shard": 2}, "full_shard", around(OWN[name]), **options), name)


@pytest.mark.parametrize("name", some_of("muon", "adamw_8bit", "adafactor"))
def test_an_expert_axis_and_replicas_too(name):
    rules = [("experts.*", fs.LayoutSpec(fs.P("expert"), compute=fs.P("expert")))]
    assert_alone(trained({"replicate": 2, "shard": 2}, "hybrid_shard", around(OWN[name])), name)
    with pytest.warns(UserWarning, match="whole stacks of experts"):
        found = trained({"expert": 3}, "full_shard", around(OWN[name]), {"rules": rules})
    assert_alone(found, name)


# ------------------------------------------------------------------ state of other shapes


def full_state(state: fs.TrainState) -> dict[str, Tensor]:
    """Whole leaves of a state, by name, as this rank's parts of them say: the rest is nan."""
    specs, mesh = state.where
    out = {}
    for name, leaf in state_leaves(state, ResolvedSpecs.of(specs), mesh).items():
        out[name] = torch.full(leaf.shape, torch.nan, dtype=torch.float64)
        for start, part in leaf.parts(mesh):
            where = tuple(slice(at, at + n) for at, n in zip(start, part.shape, strict=True))
            out[name][where] = part.double()
    return out


def saving(rank: int, world: int, name: str, folder: str, leaf: tuple[int, ...]) -> dict[str, Tensor]:
    """One step on so many ranks, saved."""
    mesh = fs.make_mesh(shard=world, device="cpu")
    step, params = router_step(mesh, name, leaf)
    state, _ = step(step.init(params), torch.ones(1, leaf[1], dtype=torch.float64))
    fs.checkpoint.save(folder, state)
    return full_state(state)


def router_step(mesh: fs.Mesh, name: str, shape: tuple[int, ...], preset: str = "full_shard") -> Any:
    params = {"router": torch.arange(0.0, shape[0] * shape[1], dtype=torch.float64).view(shape)}
    specs = fs.presets.PRESETS[preset](params, mesh)
    loss = lambda p, x: (p["router"] @ x.T).sin().sum() / len(x)  # noqa: E731
    optimizer = soap(0.05) if name == "soap" else OWN[name]  # no new basis of gradients of one row
    return fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager"), params


def restoring(
    rank: int, world: int, name: str, folder: str, shape: tuple[int, ...]
) -> dict[str, dict[str, Tensor]]:
    """The state by a step's and by specs alone, resharded, and after one more step."""
    mesh = fs.make_mesh(shard=world, device="cpu")
    step, _ = router_step(mesh, name, shape)
    other, _ = router_step(mesh, name, shape, "no_shard")
    out = {"step": fs.checkpoint.restore(folder, step)}
    out["specs"] = fs.checkpoint.restore(folder, step.specs, mesh=mesh)
    moved = fs.reshard(fs.checkpoint.restore(folder, step), step.specs, other.specs, mesh)
    out["reshard"] = moved
    found = {how: full_state(state) for how, state in out.items()}
    x = torch.ones(1, shape[1], dtype=torch.float64)
    for how, on in (("step", step), ("reshard", other)):
        found[f"after {how}"] = full_state(on(out[how], x)[0])
    return found


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("adafactor", (2, 6)),
        ("adamw_8bit", (5, 6)),
        pytest.param("adafactor", (5, 6), marks=pytest.mark.long),
        ("soap", (5, 6)),
    ],
)
def test_state_is_saved_restored_and_resharded(name, shape, ranks, tmp_path: Path):
    """From two ranks to one and two, by a step and by specs alone, and on as if nothing had happened. A leaf
    of as many rows as ranks has blocks of one row, as the mean over its rows has."""
    folder = str(tmp_path / "1")
    parts = ranks(2).run(saving, 2, name, folder, shape)
    expected = joined(parts)
    if name == "adafactor":
        known = {n.rpartition("/")[2]: tuple(v.shape) for n, v in expected.items() if "optimizer" in n}
        assert known == {"rows": (shape[0], 1), "columns": (1, 6), "mean": (1, 1)}
    runs = [[restoring(0, 1, name, folder, shape)], ranks(2).run(restoring, 2, name, folder, shape)]
    for run in runs:
        for how in ("step", "specs", "reshard"):
            torch.testing.assert_close(joined([rank[how] for rank in run]), expected, atol=0, rtol=0)
    afters = [joined([rank[how] for rank in run]) for run in runs for how in ("after step", "after reshard")]
    for after in afters[1:]:
        torch.testing.assert_close(after, afters[0], atol=1e-10, rtol=0)
    assert any((afters[0][n] - expected[n]).abs().max() > 1e-6 for n in expected)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole leaves of what ranks have of them, which is nan elsewhere; where two have some, they agree."""
    out = dict(parts[0])
    for part in parts[1:]:
        for name, own in part.items():
            both = ~out[name].isnan() & ~own.isnan()
            assert torch.equal(out[name][both], own[both])
            out[name] = torch.where(out[name].isnan(), own, out[name])
    assert not any(leaf.isnan().any() for leaf in out.values())
    return out


# ------------------------------------------------------------------ the schedule, and mistakes


def lowered(optimizer: Any, shapes: dict[str, tuple[int, ...]], **axes: int) -> Any:
    """The step of a chain of units, on paper."""
    mesh = fs.make_mesh(**axes, abstract=True)
    params = {path: torch.zeros(shape) for path, shape in shapes.items()}
    specs = fs.presets.full_shard(params, mesh)

    def total(params: Any, x: Tensor) -> Tensor:
        hidden = x
        for leaf in params.values():
            hidden = torch.tanh(hidden) + leaf.square().sum()
        return hidden.sum()

    return fs.shard_step(total, specs, mesh=mesh, optimizer=optimizer, backend="eager").lower(
        params, torch.ones(2)
    )


UNITS = {f"layers.{n}.w": (32, 48) for n in range(4)} | {"layers.0.b": (64,)}


def test_sums_are_small_and_travel_during_the_backward():
    """Of a matrix rows, columns and two numbers, and then one; of a vector a number, twice."""
    made = lowered(adafactor(0.1), UNITS, shard=4)
    lines = made.schedule.instructions
    sums = [line for line in lines if line.verb == "update_sums"]
    assert [line.number for line in sums if line.unit == "layers.2"] == [0, 1]
    assert sum(line.wire_bytes(made.schedule) for line in sums) == 4 * (4 * (32 + 48 + 2 + 1) + 2)
    runs = [n for n, line in enumerate(lines) if line.verb == "run" and line.phase == "backward"]
    first = lines.index(sums[0])
    wait = next(n for n, line in enumerate(lines) if line.verb == "wait" and line.reads == sums[0].writes)
    assert any(first < n < wait for n in runs)  # a kernel runs while they travel
    assert made.comm_analysis()["update_sums"] == {
        "count": len(sums),
        "bytes": 4 * (4 * (32 + 48 + 2 + 1) + 2),
    }


def test_state_in_eight_bits_is_a_quarter():
    wide, eight, factored = (
        lowered(each, UNITS, shard=4).memory_analysis().leaves["layers.1.w"]["optimizer"]
        for each in (adamw(0.1), adamw_8bit(0.1, block=16), adafactor(0.1))
    )
    assert eight == wide * (1 + 4 / 16) / 4 and factored < 0.1 * wide
    shapes = {"w": (64, 128)}
    both = [
        lowered(o, shapes, shard=2).memory_analysis().leaves["w"]["optimizer"]
        for o in (adamw_8bit(0.1), adamw(0.1))
    ]
    assert both[0] <= 0.27 * both[1]


def test_state_goes_to_owners_and_back_with_its_matrix():
    """Of four matrices each rank owns one: its gradient, two moments, one side's average and basis."""
    made = lowered(soap(0.1, max_precond_dim=40), UNITS, shard=4)
    row = 3 * 32 * 48 + 2 * 32 * 32
    assert made.comm_analysis()["update_exchange"] == {"count": 2, "bytes": 2 * 4 * row}
    bucket = next(b for name, b in made.schedule.buckets.items() if name.startswith("owners/"))
    for place, path in enumerate(bucket.paths):
        own = [p for p in bucket.pieces if p.path == path]
        assert [p.slot for p in own] == ["", "mu", "nu", "left", "left_basis"]
        assert {p.offset * 4 // bucket.numel for p in own} == {place}
    often, seldom = (
        lowered(soap(0.1, precondition_frequency=each), UNITS, shard=4).timeline("h100").step_seconds
        for each in (1, 100)
    )
    assert often > seldom


def complex_step(optimizer: Optimizer) -> fs.TrainState:
    """Of a vector, whose pairs are a matrix."""
    params, mesh = {"z": torch.zeros(4, dtype=torch.complex128)}, fs.make_mesh(shard=2, abstract=True)
    loss = lambda p, x: (p["z"].abs().square().sum() * x).sum()  # noqa: E731
    step = fs.shard_step(loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=optimizer)
    return step.lower(params, torch.ones(1))


@pytest.mark.parametrize("own", [soap(0.1, max_precond_dim=6), muon(0.1)])
def test_a_rule_of_matrices_in_a_rule_tells_leaves_of_one_shape_apart(own):
    """An embedding is AdamW's, and a matrix of its shape is not."""
    params, mesh = {"embed.w": torch.ones(6, 6), "w": torch.ones(6, 6)}, fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)
    loss = lambda p, x: (p["embed.w"] @ p["w"] @ x).square().sum()  # noqa: E731
    rules = chain(by_path(("*", own)), ema(0.9))
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=rules, backend="eager")

    def on_rank(_: int) -> list[list[str]]:
        state, _ = step(step.init(params), torch.eye(6))
        return [sorted(own) for own in state.opt_state.values()]

    embedding, matrix = fs.simulate(mesh, on_rank)[0]
    of_matrix = own.parts[0]
    assert embedding == ["ema", "mu", "nu"]
    assert matrix == sorted(["ema", *of_matrix.slots, *of_matrix.whole_slots])


def wrong_state(shape: Any) -> Optimizer:
    return Optimizer(
        "odd()", lambda path, grad, slots, param, info: (-grad, {}), elementwise=False,
        whole=lambda path, grad, state, turn: (grad, state), whole_slots={"s": lambda _: shape},
    )  # fmt: skip


def wrong_sums(shape: Any) -> Optimizer:
    return Optimizer(
        "odd()", lambda path, grad, slots, param, info: (-grad, {}), elementwise=False,
        sums=(lambda path, grad, slots, param, info: {"s": grad.sum(shape)},),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adamw_8bit(0.1, block=0), "block=0"),
        (lambda: adafactor(0.1, d=0), "d=0: a number above 0"),
        (lambda: adafactor(0.1, eps=(1e-3,)), r"eps=\(0.001,\)"),
        (lambda: adafactor(0.1, beta2_decay=0.8), "beta2_decay=0.8: at most 0"),
        (lambda: chain(adafactor(0.1), muon(0.1)), "whole leaves"),
        (
            lambda: lowered(adamw_8bit(0.1, block=32), {"w": (9, 64)}, shard=4),
            r"(?s)cuts in two.*'w'.*\[9, 64\] by P\(None, 'shard'\).*by_path",
        ),
        (lambda: soap(0.1, b1=1.0), "b1=1.0: at least 0 and below 1"),
        (lambda: soap(0.1, precondition_frequency=0), "precondition_frequency=0"),
        (
            lambda: lowered(wrong_state((4, 4, 4)), {"w": (4, 4)}, shard=2),
            r"s \[4, 4, 4\] is no state of matrices of params\['w'\] \[4, 4\]",
        ),
        (lambda: lowered(wrong_state((1, 4)), {"w": (4, 4)}, shard=2), r"(?s)s \[1, 4\].*last two above 1"),
        (lambda: soap(0.1, adamw="adam"), "optimizer= is 'adam'"),
        (lambda: complex_step(soap(0.1)), r"is for real matrices, and params\['z'\] is complex"),
        (lambda: lowered(wrong_sums([0, 1]), {"w": (4, 4)}, shard=2), r"(?s)other shapes.*s \[\].*keepdim"),
    ],
)  # fmt: skip
def test_mistakes_are_named(make, words):
    with pytest.raises(OptimizerError, match=words):
        make()
