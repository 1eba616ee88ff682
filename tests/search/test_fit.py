"""Fit: every plan is within its budget and no neighbour that fits is faster; what cannot fit says so."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from toys import Llama

import fnshard as fs
from experiments.bench.measure import log_live_bytes
from fnshard.analysis.hardware import Link
from fnshard.errors import BudgetError, SpecError
from fnshard.search.fit import Fit, fit, make_space, search_space
from fnshard.search.space import MeshPlans

fit_module, walk_module = map(importlib.import_module, ("fnshard.search.fit", "fnshard.search.walk"))

# blocks, width, hidden, rows, time, ranks, hardware, dtype of compute
SETTINGS = {
    "deep": (5, 64, 128, 4, 32, 8, "h100", torch.float32),
    "wide": (2, 256, 512, 2, 16, 4, "a100", torch.bfloat16),
    "long": (3, 32, 64, 2, 256, 2, "h200", torch.float32),
    "alone": (3, 64, 128, 6, 32, 1, "h100", torch.float32),
    "cpu": (4, 64, 128, 4, 32, 2, "cpu", torch.float32),
    "many": (3, 128, 256, 1, 32, 64, "h100", torch.bfloat16),
}


class Search:
    """The plans of one mesh, with prices that searches for several budgets share."""

    def __init__(self, fn: Any, params: Any, mesh: fs.Mesh, **how: Any):
        self.space, self.seen = make_space(fn, params, mesh, **how), {}
        self.fn, self.mesh, self.batch = fn, mesh, how["batch"]

    def fit(self, budget: Any) -> Fit:
        return search_space(self.space, budget, self.seen)

    @property
    def plans(self) -> MeshPlans:
        return self.space.on(self.mesh)


@cache
def search_of(name: str) -> Search:
    blocks, width, hidden, rows, time, ranks, hardware, dtype = SETTINGS[name]
    with torch.device("meta"):
        model = Llama(blocks, width, hidden, 4, 2, 256)
        tokens = torch.zeros(rows, time, dtype=torch.int64)
    apply, params = fs.make_functional(model)

    def loss(params: Any, tokens: Any) -> Any:
        logits = apply(params, tokens).float()  # [B, T, V]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    mesh = fs.make_mesh(shard=ranks, abstract=True, device="cpu")
    specs = fs.presets.full_shard(params, mesh, compute_dtype=dtype)
    return Search(loss, params, mesh, batch=(tokens,), hardware=hardware, specs=specs)


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_plans_are_within_budget_and_no_neighbour_is_faster(name: str) -> None:
    fit_many(name, 34)  # over 200 triples in all


def fit_many(name: str, budgets: int) -> None:
    """Fit budgets from less than the most frugal plan takes to more than the fastest one does."""
    search, draw = search_of(name), random.Random(name)
    roomy = search.fit(1 << 40)
    with raises(BudgetError, says="nothing fits") as refused:
        search.fit(1)
    assert "would do; or change one thing: " in str(refused.value)
    number, unit = str(refused.value).split("a budget of ")[1].split()[:2]
    named = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
    assert search.fit(int(named)).peak_bytes <= named
    least = min(c.peak_bytes for c in search.seen.values())
    fitted = 0
    low, high = least * 0.8, roomy.peak_bytes * 1.1
    for nth in range(budgets):  # one from each of as many equal parts, so that few are no matter of luck
        budget = int(low + (nth + draw.random()) / budgets * (high - low))
        try:
            plan = search.fit(budget)
        except BudgetError:
            assert all(c.peak_bytes > budget for c in search.seen.values())
            continue
        fitted += 1
        assert plan.lowered.memory_analysis().peak_bytes == plan.peak_bytes <= budget
        for choice in search.space.neighbours(plan.chosen.choice):
            other = search.seen[choice]
            # Sums of the same seconds in another order are no difference.
            slower = other.seconds >= plan.seconds * (1 - 1e-9)
            assert other.peak_bytes > budget or slower, (plan, other)
        assert plan.seconds >= roomy.seconds
    assert fitted >= budgets // 2  # and the rest were refused above, rightly


def test_a_plan_is_what_shard_step_takes() -> None:
    """The step made from specs and options is the step on paper."""
    search = search_of("wide")
    plan = search.fit(int(search.fit(1 << 40).peak_bytes * 0.85))
    assert plan.chosen.choice.recomputed
    step = fs.shard_step(
        search.fn, plan.specs, mesh=search.mesh, optimizer=search.space.optimizer, **plan.options
    )
    _, params = fs.make_functional(Llama(2, 256, 512, 4, 2, 256))
    lowered = step.lower(params, *search.batch)
    assert lowered.as_text() == plan.lowered.as_text()
    assert lowered.memory_analysis().peak_bytes == plan.peak_bytes


def test_it_says_why() -> None:
    plan = search_of("wide").fit(int(search_of("wide").fit(1 << 40).peak_bytes * 0.6))
    text = str(plan)
    assert "<- chosen" in text and "MB too many" in text and "% slower" in text
    found = plan.as_dict()
    assert found["peak_bytes"] <= found["device_bytes"] and len(found["rejected"]) == len(plan.rejected)


def test_a_plan_runs_within_its_budget() -> None:
    """Measured on one CPU rank, eager: half of what the plain step needs."""
    torch.manual_seed(0)
    model = Llama(1, 128, 256, 4, 2, 256)
    apply, params = fs.make_functional(model)
    tokens = torch.randint(0, 256, (2, 256))

    def loss(params: Any, tokens: Any) -> Any:
        logits = apply(params, tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    mesh, optimizer = fs.make_mesh(shard=1), fs.optim.adamw(1e-3)
    how = {"batch": (tokens,), "hardware": "cpu", "optimizer": optimizer, "backend": "eager"}
    search = Search(loss, params, mesh, **how)
    plain = fs.shard_step(loss, search.plans.base, mesh=mesh, optimizer=optimizer, backend="eager")
    budget = plain.lower(params, tokens).memory_analysis().peak_bytes // 2
    plan = search.fit(budget)
    step = fs.shard_step(loss, plan.specs, mesh=mesh, optimizer=optimizer, **plan.options)

    def make() -> Any:
        kept = [step.init(params)]

        def once() -> None:
            kept[0], _ = step(kept[0], tokens)

        return once

    assert log_live_bytes(make, torch.device("cpu"), steps=2).peak <= budget * 1.01


# ------------------------------------------------------------------ mistakes


def test_all_mistakes_are_told_at_once() -> None:
    wrong = {"batch": torch.ones(2), "hardware": 3, "remat": "unit", "colour": "red"}
    with raises(SpecError, leaves=["remat='unit'", "colour=", "mesh=None", "hardware=3"]) as refused:
        fit(search_of("wide").fn, torch.nn.Linear(2, 2), None, **wrong)
    found = str(refused.value)
    for part in (
        "remat='unit': fit chooses it", "colour=: no option", "make_functional", "mesh=None",
        "batch is Tensor", "hardware=3",
    ):  # fmt: skip
        assert part in found
    with raises(SpecError, leaves="device_bytes='24'", says="bytes"):
        search_of("wide").fit("24")


def test_what_rests_on_disk_stays_there() -> None:
    other = search_of("wide")
    specs = {p: replace(s, memory="disk", optimizer_memory="disk") for p, s in other.plans.base.items()}
    params = {p: torch.empty(s.shape, dtype=s.storage_dtype, device="meta") for p, s in specs.items()}
    search = Search(other.fn, params, other.mesh, batch=other.batch, specs=specs)
    tiers = {(s.memory, s.optimizer_memory) for s in search.fit(1 << 40).specs.values()}
    assert tiers == {("disk", "disk")}


def test_micro_batches_on_a_tensor_axis() -> None:
    """Its exchanges are of the same rows; those of `fn` over data axes would be of fewer."""
    params = {"up.w": torch.ones(4, 4, device="meta"), "down.w": torch.ones(4, 4, device="meta")}
    mesh = fs.make_mesh(shard=2, tensor=2, abstract=True, device="cpu")

    def loss(params: Any, x: Any, sums: Any = lambda x: x) -> Any:
        return sums((x @ params["up.w"].T).tanh() @ params["down.w"].T).square().mean()

    specs = fs.presets.no_shard(params, mesh, tensor="tensor")
    how = {"mesh": mesh, "batch": (torch.ones(4, 4),), "specs": specs}
    assert len(Search(loss, params, **how).plans.divisors) > 1
    assert len(Search(partial(loss, sums=fs.psum), params, **how).plans.divisors) == 1


# ------------------------------------------------------------------ meshes too


def small(rows: int) -> Any:
    with torch.device("meta"):
        model, tokens = Llama(2, 64, 128, 4, 2, 64), torch.zeros(rows, 32, dtype=torch.int64)
    apply, params = fs.make_functional(model)

    def loss(params: Any, tokens: Any) -> Any:
        return F.cross_entropy(apply(params, tokens).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return loss, params, tokens


def over(ranks: int, **options: Any) -> Any:
    loss, params, tokens = small(2)
    return fs.fit(loss, params, ranks=ranks, batch=(tokens,), **options)


@cache
def free() -> Any:
    """Return the plan of two ranks with room for any."""
    return over(2)


def on_mesh(axes: dict[str, int], preset: str, **options: Any) -> Any:
    mesh = fs.make_mesh(**axes, abstract=True, device="cpu")
    loss, params, tokens = small(2 // mesh.data_size)
    specs = fs.presets.PRESETS[preset](params, mesh)
    return fs.fit(loss, params, mesh, batch=(tokens,), specs=specs, **options)


@pytest.mark.long
def test_of_all_meshes_the_fastest_that_fits() -> None:
    """No leaf is split if there is room; else the fastest that fits is taken. Other meshes have reasons."""
    roomy = free()
    assert str(roomy.mesh) in ("(replicate=2, shard=1)", "(pipeline=2, shard=1)") and len(roomy.meshes) == 3
    whole = on_mesh({"replicate": 2, "shard": 1}, "hybrid_shard")
    tight = over(2, device_bytes=int(0.4 * whole.peak_bytes))
    assert tight.peak_bytes <= 0.4 * whole.peak_bytes and tight.seconds > roomy.seconds
    assert {str(mesh) for mesh, _ in tight.meshes} | {str(tight.mesh)} == {
        "(replicate=2, shard=1)", "(shard=2)", "(shard=1, tensor=2)", "(pipeline=2, shard=1)",
    }  # fmt: skip
    assert all("slower" in why or "nothing fits" in why for _, why in tight.meshes)
    alone = on_mesh({"shard": 2}, "full_shard", device_bytes=tight.device_bytes)
    assert tight.seconds <= alone.seconds
    assert "<- chosen, on" in str(tight) and tight.as_dict()["mesh"] == dict(
        zip(tight.mesh.names, tight.mesh.sizes, strict=True)
    )


def test_a_mesh_beside_ranks_is_refused() -> None:
    with raises(SpecError, leaves="ranks=2", fix="leave mesh= out"):
        over(2, mesh=fs.make_mesh(shard=2, abstract=True, device="cpu"))


@pytest.mark.long
def test_meshes_that_cannot_be_are_named() -> None:
    with raises(BudgetError, leaves="(shard=3)", fix="more ranks", says=["3 ranks", "into 3"]):
        over(3)
    with raises(BudgetError, leaves="(shard=2)", fix="more ranks", says=["2 ranks", "nothing fits"]):
        over(2, device_bytes=1000)


@pytest.mark.long
def test_a_search_over_meshes_ends_and_says_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is reached at once: there is one plan, and a line for each mesh that was left out."""
    monkeypatch.setattr(fit_module, "LIMIT_LINES", 0)
    monkeypatch.setattr(fit_module, "QUIET_S", 0.0)
    plan = over(2)
    assert plan.looked_at == 1 and len(plan.meshes) == 3
    assert all("cut short" in why for _, why in plan.meshes) and plan.cut_short
    assert "cut short" in str(plan).splitlines()[0] and plan.as_dict()["cut_short"]
    assert f"mesh 1 of 4, {plan.mesh}" in capsys.readouterr().err
    tight = over(2, device_bytes=int(0.9 * plan.peak_bytes))  # no plan yet: it goes on until one fits
    assert tight.peak_bytes <= 0.9 * plan.peak_bytes


@pytest.mark.long
def test_a_search_over_meshes_is_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is an hour after the one before."""
    expected = free()
    late = SimpleNamespace(monotonic=count(0.0, 3600.0).__next__)
    monkeypatch.setattr(fit_module, "time", late)
    monkeypatch.setattr(walk_module, "time", late)
    assert str(over(2)) == str(expected) and not expected.cut_short


@pytest.mark.long
def test_an_optimizer_of_ones_own_that_looks_at_whole_leaves_has_every_mesh() -> None:
    scaled = lambda path, grad, slots, param, step: (-grad / grad.norm(), {})  # noqa: E731
    own = over(2, optimizer=fs.optim.Optimizer("own()", lambda path, param: {}, scaled))
    assert {str(own.mesh), *(str(mesh) for mesh, _ in own.meshes)} == {
        str(free().mesh), *(str(mesh) for mesh, _ in free().meshes)
    }  # fmt: skip
    assert all("slower" in why for _, why in own.meshes), own.meshes


def test_a_plan_goes_further_ahead_only_where_it_waits_for_collectives() -> None:
    mesh, (loss, params, tokens) = fs.make_mesh(shard=8, abstract=True, device="cpu"), small(1)
    h100 = fs.Hardware.named("h100")
    furthest = {}
    for name, hardware in {
        "fast": replace(h100, node=Link.even(0.0, 1e15)), "slow": replace(h100, node=Link.even(0.0, 1e8)),
        "one clock": fs.Hardware.named("cpu"),
    }.items():  # fmt: skip
        seen: dict[Any, Any] = {}
        search_space(make_space(loss, params, mesh, batch=(tokens,), hardware=hardware), 1 << 40, seen)
        furthest[name] = max(choice.prefetch_depth for choice in seen)
    assert furthest["fast"] == furthest["one clock"] == 1 < furthest["slow"] <= 3


def test_passes_of_ones_own_are_what_the_plan_hands_on() -> None:
    mesh, (loss, params, tokens) = fs.make_mesh(shard=2, abstract=True, device="cpu"), small(1)
    how = {"batch": (tokens,), "passes": fs.passes.default()}
    plan = fs.fit(loss, params, mesh, **how)
    assert (plan.options.prefetch, plan.options.overlap) == (None, None)
    step = fs.shard_step(loss, plan.specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), **plan.options)
    assert step.lower(params, tokens).memory_analysis().peak_bytes == plan.peak_bytes


@pytest.mark.long  # test_plan has a plan in this order
def test_micro_batches_that_wait_for_links_run_breadth_first() -> None:
    """Few rows fit at a time: gathers and reductions of each would be most of a step."""
    with torch.device("meta"):
        model = Llama(4, 64, 128, 4, 2, 256)
        tokens = torch.zeros(4, 256, dtype=torch.int64)
    apply, params = fs.make_functional(model)

    def loss(params: Any, tokens: Any) -> Any:
        logits = apply(params, tokens).float()  # [B, T, V]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    mesh = fs.make_mesh(shard=16, abstract=True, device="cpu")
    how = {"batch": (tokens,), "hardware": "h100", "specs": fs.presets.full_shard(params, mesh)}
    search = Search(loss, params, mesh, **how)
    roomy = search.fit(1 << 40)
    tight = search.fit(int(0.45 * roomy.peak_bytes))
    assert tight.options.accumulate > 1 and tight.options.micro_order == "breadth", str(tight)
    depth = replace(tight.chosen.choice, order="depth")
    assert search.space.price(depth).seconds > 1.05 * tight.seconds
