"""`experiments.plan`: predictions that are carried on are those of the whole step; no neighbour is better."""

from __future__ import annotations

import itertools
import json
import math
import random
import shlex
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import custom_task
import pytest
import torch
from errors import raises
from runs import compose, validate
from toys import lower

from experiments.explain.config import COMMAND as EXPLAIN
from experiments.explain.step_on_paper import explain
from experiments.lib.checks import ConfigError
from experiments.lib.compose import CONF, answer
from experiments.lib.config import StrategyConfig
from experiments.plan import report, search
from experiments.plan.__main__ import write
from experiments.plan.config import COMMAND, layer_of
from experiments.plan.report import (
    as_dict,
    as_text,
    count_days,
    draw_plans,
    find_plan,
    find_rivals,
    make_too_big_error,
)
from experiments.plan.search import TIERS, DecoderPlan, Planner
from experiments.plan.unroll import unroll
from experiments.train import COMMAND as TRAIN
from fnshard.analysis.hardware import Hardware
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segments import Segments
from fnshard.errors import BudgetError
from fnshard.search.price import PARTS, Candidate, price

MODEL = (
    "model.width=64", "model.layers=6", "model.heads=4", "model.kv_heads=2", "model.context=64",
    "model.vocab=128", "model.mlp=128",
)  # fmt: skip
FEW = "model.layers=1"  # so few are lowered as they are
EIGHTHS = 8  # parts of what a backward reads, where every part is tried
H100 = Hardware.named("h100")
HERE = "custom_task"  # a module of tests/support
MIXTURE = CONF.parent / "experiments" / "examples" / "deepseek_v3" / "conf"


def config_of(*overrides: str, spec: Any = COMMAND) -> Any:
    return compose(*MODEL, *overrides, spec=spec)


def planner_of(devices: int, *overrides: str) -> Planner:
    return Planner(config_of(f"devices={devices}", *overrides), devices, H100)


PLANS = [
    DecoderPlan(1, 8), DecoderPlan(1, 8, remat="unit"), DecoderPlan(1, 8, remat=0.5, micro_rows=2),
    DecoderPlan(1, 8, keep=True),
    DecoderPlan(2, 4, optimizer="host"), DecoderPlan(2, 4, optimizer="streamed", remat="unit"),
    DecoderPlan(1, 4, 2),
    DecoderPlan(1, 8, order="breadth", remat="unit"), DecoderPlan(1, 2, 2, 2, remat="unit", optimizer="host"),
    DecoderPlan(2, 2, 2, micro_rows=2), DecoderPlan(8, 1),
]  # fmt: skip


@pytest.mark.suite({
    "*order='breadth'*": "whose gradients are kept over all micro-batches",
})  # fmt: skip
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_few_layers_say_what_all_need(plan: DecoderPlan) -> None:
    """Time, bytes on the device and on the host, to rounding: six layers and four micro-batches, of four
    and five layers, two and three micro-batches. What is streamed from the host may look larger."""
    planner = planner_of(8, "rows=32")
    near, exact = planner.walk.price_once(plan), planner.price_exactly(plan)
    assert near.seconds == pytest.approx(exact.seconds, rel=1e-9)
    alike = near.peak_bytes == exact.peak_bytes
    assert alike or (plan.optimizer == "streamed" and near.peak_bytes > exact.peak_bytes)
    assert near.host_bytes == exact.host_bytes
    assert near.parts == pytest.approx(exact.parts, rel=1e-6, abs=1e-9)


@pytest.mark.long
def test_plans_that_differ_in_tiers_and_recomputation_share_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    # The suite shares the traces of equal optimizers; without that, a plan with one of its own would trace.
    monkeypatch.setattr("updates._known", OrderedDict())
    monkeypatch.setattr("updates.MOST_OPTIMIZERS", 0)
    planner, plain = planner_of(2, "rows=2", FEW), DecoderPlan(1, 2)
    planner.walk.price_once(plain)
    for place in ("fnshard.step.cache.trace_and_split", "fnshard.compiler.update.family.trace_update"):
        monkeypatch.setattr(place, None)
    others = (
        DecoderPlan(1, 2, keep=True, optimizer="host"),
        DecoderPlan(2, 1, remat="unit"),
        DecoderPlan(1, 2, remat=0.5),
    )
    assert all(planner.walk.price_once(each).seconds > 0 for each in others)


def test_more_micro_batches_are_so_many_more() -> None:
    """The price is that of a whole lowering with all eight."""
    planner = planner_of(2, "rows=16", "model.layers=4")
    plan = DecoderPlan(1, 2, remat="unit")
    whole = planner.measure(plan, 4, 8)
    assert planner.walk.price_once(plan).seconds == pytest.approx(whole["seconds"], rel=1e-9)
    assert planner.walk.price_once(plan).peak_bytes == whole["peak"]


PIPELINES = [
    DecoderPlan(1, 2, pipeline=2), DecoderPlan(1, 1, pipeline=8, keep=True),
    DecoderPlan(1, 1, 2, pipeline=4, chunks=2),
    DecoderPlan(2, 1, pipeline=4, remat="unit", optimizer="host"),
    DecoderPlan(1, 1, pipeline=6, micro_rows=2, remat=0.5),
    DecoderPlan(1, 1, 2, pipeline=4, order="zero_bubble", remat=0.5, keep=True),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("plan", PIPELINES, ids=str)
def test_few_stages_layers_and_micro_batches_say_what_a_pipeline_needs(plan: DecoderPlan) -> None:
    devices = math.prod(getattr(plan, axis) for axis in search.AXES)
    planner = planner_of(devices, f"rows={plan.pipeline * 8}", "model.layers=24")
    near, exact = planner.walk.price_once(plan), planner.price_exactly(plan)
    assert near.seconds == pytest.approx(exact.seconds, rel=0.05)
    assert near.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.05)
    assert near.flops == pytest.approx(exact.flops, rel=0.05)


@pytest.mark.parametrize(
    "plan",
    [
        DecoderPlan(1, 1, pipeline=2, order="zero_bubble", keep=True, remat="unit"),
        pytest.param(DecoderPlan(1, 1, pipeline=2, chunks=2, keep=True), marks=pytest.mark.long),
        pytest.param(DecoderPlan(1, 2, pipeline=4, optimizer="host", remat=0.5), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_few_micro_batches_say_how_large_values_of_a_pipeline_are(plan: DecoderPlan) -> None:
    """Next to the ledgers of all stages of the whole step: seconds, parts and bytes, to rounding."""
    devices = math.prod(getattr(plan, axis) for axis in search.AXES)
    planner = planner_of(devices, f"rows={plan.pipeline * plan.data_ranks * 5}", "model.layers=4")
    found = planner.price_exactly(plan)
    whole = planner.lower(plan, 4, plan.pipeline * 5)
    exact = price(plan, whole.memory_analysis(), whole.timeline(H100))
    assert found == exact and found.parts == exact.parts


def test_a_pipeline_takes_micro_batches_in_groups_as_large_as_it_is() -> None:
    planner = planner_of(4, "rows=16")
    assert planner.is_valid(DecoderPlan(1, 1, pipeline=4)) and planner.is_valid(
        DecoderPlan(1, 2, pipeline=2, chunks=3)
    )
    for wrong in (
        DecoderPlan(1, 1, pipeline=4, micro_rows=8), DecoderPlan(1, 4, chunks=2),
        DecoderPlan(1, 2, pipeline=2, chunks=5),
        DecoderPlan(1, 1, pipeline=4, order="breadth"), DecoderPlan(1, 4, order="zero_bubble"),
    ):  # fmt: skip
        assert not planner.is_valid(wrong), wrong


PRINTED = {
    "tiers": DecoderPlan(2, 4, optimizer="host", remat=0.5),
    "tensor": DecoderPlan(1, 4, 2, micro_rows=2, remat="unit", keep=True, optimizer_dtype="bfloat16"),
    "breadth": DecoderPlan(1, 8, order="breadth", remat="unit"),
    "pipeline": DecoderPlan(1, 4, pipeline=2, remat="unit", keep=True),
}  # fmt: skip


@pytest.mark.suite({
    "breadth": "an order",
})  # fmt: skip
@pytest.mark.parametrize("name", PRINTED)
def test_the_line_that_is_printed_is_the_plan(name: str) -> None:
    """`explain` predicts for it what the search did."""
    planner, plan = planner_of(8, "rows=16", two := "model.layers=2"), PRINTED[name]
    found = explain(config_of(two, *plan.overrides(16).split(), spec=EXPLAIN))
    exact = planner.price_exactly(plan)
    assert found.memory.peak_bytes == exact.peak_bytes
    assert found.timeline.step_seconds == pytest.approx(exact.seconds, rel=1e-9)


def outline(segments: Segments) -> list[Any]:
    """Return what segments and exchanges do, their values numbered as they come."""
    numbers: dict[str, int] = {}

    def seen(name: ValueName) -> Any:
        made = name.kind is Kind.VALUE
        return numbers.setdefault(name, len(numbers)) if made else name

    after = segments.exchanges_after()
    return [
        (s.index, s.units, s.source, [seen(n) for n in (*s.inputs, *s.outputs)],
         [(e.kind, e.axes, e.dim, e.to, e.like, seen(e.sent), seen(e.received)) for e in after[s.index]])
        for s in segments.segments
    ]  # fmt: skip


@pytest.mark.suite({
    "*shard=2, tensor=1*": "gathers of each layer",
})  # fmt: skip
@pytest.mark.parametrize(
    "plan",
    [DecoderPlan(1, 2), DecoderPlan(1, 1, 2), DecoderPlan(1, 1, 1, 2)],
    ids=str,
)
def test_few_layers_unrolled_are_what_a_trace_of_all_gives(plan: DecoderPlan) -> None:
    planner = planner_of(2, "rows=4", "model.layers=9")
    traced, few = (
        step.front(*batch).segments for step, batch in (planner.make_step(plan, n, 1) for n in (9, 4))
    )
    made = unroll(few, 9)
    assert outline(made) == outline(traced)
    assert {str(n) for s in made.segments for n in s.outputs} <= made.values.keys()
    shorter = unroll(few, 4)
    assert outline(shorter) == outline(few)


def test_layers_that_are_not_alike_or_read_further_back_are_not_unrolled() -> None:
    def chain(p: Any, x: Any, back: int = 1, odd: int = -1) -> Any:
        xs = [x] * back
        for number, w in enumerate(p.values()):
            xs.append((xs[-1] @ w).tanh() + (xs[-back].exp() if number == odd else xs[-back]))
        return xs[-1].square().mean()

    params = {f"layers.{i}.w": torch.ones(8, 8) for i in range(6)}

    def segments_of(**how: int) -> Segments:
        return lower(partial(chain, **how), params, torch.ones(4, 8)).segments

    assert outline(unroll(segments_of(), 9))[:5] == outline(segments_of())[:5]
    assert unroll(segments_of(back=3), 9) is None
    assert unroll(segments_of(odd=3), 9) is None and unroll(segments_of(odd=4), 9) is None
    assert unroll(lower(chain, dict(list(params.items())[:3]), torch.ones(4, 8)).segments, 9) is None


SEARCHES = [(2, 0.0005), *((n, b) for n in (1, 4, 8) for b in (0.002, 0.001, 0.0007))]


def neighbours_of(planner: Planner, plan: DecoderPlan) -> list[DecoderPlan]:
    """Return all valid plans of which one field differs, or two: axes by a factor, rows by a factor."""

    def factors(size: int) -> list[int]:
        return [size * 2, *([size // 2] if size % 2 == 0 else [])]

    axes = [
        {a: x // 2, b: y * 2}
        for a, x in vars(plan).items() if a in search.AXES and x % 2 == 0
        for b, y in vars(plan).items() if b in search.AXES and b != a
    ]  # fmt: skip
    changes = [
        *axes, *({"micro_rows": n} for n in factors(plan.micro_rows)), {"keep": not plan.keep},
        *({"optimizer": t} for t in TIERS),
    ]  # fmt: skip
    both = [{}, *changes, *(a | b for a in changes for b in changes)]
    return [k for c in both if planner.is_valid(k := replace(plan, **c))]


def check_neighbours(planner: Planner, draw: random.Random, count: int, shares: list[float]) -> None:
    """Check plans of which one or two fields change, and what is recomputed to one of these shares."""
    best = planner.find_best()
    assert best.peak_bytes <= planner.budget
    for plan in draw.choices(neighbours_of(planner, best.choice), k=count):
        each = planner.price_exactly(replace(plan, remat=draw.choice(shares)))
        assert each.peak_bytes > planner.budget or each.seconds >= best.seconds * (1 - 1e-3), each


@pytest.mark.long  # tests/search/test_fit.py looks at neighbours
def test_no_neighbour_is_faster_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHARES", EIGHTHS)
    planner = planner_of(1, "rows=4", "device_gb=0.0007", FEW)
    check_neighbours(planner, random.Random(1), 20, [0.0, 1.0])


@pytest.mark.long
@pytest.mark.parametrize(("devices", "budget"), SEARCHES)
def test_of_many_neighbours_none_is_faster_and_fits(devices: int, budget: float) -> None:
    planner = planner_of(devices, f"rows={4 * devices}", f"device_gb={budget}", FEW)
    check_neighbours(planner, random.Random(devices), 100, [k / 1000 for k in range(1001)])


def test_two_moves_of_which_one_alone_is_not_valid_are_a_pair() -> None:
    planner = planner_of(8, "rows=8")
    rows = planner.moves()["rows"]
    assert planner.walk.one_move_away(DecoderPlan(1, 8), rows) == []  # a rank has one row
    pairs = planner.walk.two_moves_away(DecoderPlan(1, 8))
    assert DecoderPlan(1, 4, 2, micro_rows=2) in pairs and DecoderPlan(1, 2, 2, 2) in pairs
    assert DecoderPlan(2, 4) in planner.walk.two_moves_away(DecoderPlan(1, 8, keep=True))


@pytest.mark.long
def test_a_walk_begins_with_all_rows_and_at_no_split_that_a_lesser_one_rules_out() -> None:
    roomy, tight = (planner_of(4, "rows=16", FEW, f"device_gb={gb}") for gb in (1.0, 1e-6))
    begun = list(roomy.starts())
    plain = [plan for plan in begun if plan.pipeline == 1]
    assert plain[0] == DecoderPlan(1, 4, micro_rows=4) and len(plain) < len(list(roomy.splits()))
    assert list(roomy.starts()) == begun  # also when these have prices
    nothing_fits = list(tight.starts())
    assert [replace(k, micro_rows=1) for k in nothing_fits] == nothing_fits
    assert [k for k in nothing_fits if k.pipeline == 1] == list(tight.splits())


def test_pipelines_begin_with_the_fewest_stages_that_hold_what_they_gather() -> None:
    """Leaves in bf16 and gradients in fp32, which is 6 bytes a parameter. If none fit, it has most stages."""

    def stages_of(gigabytes: float) -> list[int]:
        planner = planner_of(8, "rows=64", f"device_gb={gigabytes}")
        return [plan.pipeline for plan in planner.pipelines_of(tensor=1)]

    kept = 6e-9 * config_of().model.parameters
    assert [stages_of(kept / n) for n in (2, 3, 4, 7)] == [[2, 4, 8], [4, 8], [4, 8], [8]]
    assert stages_of(kept / 100) == [8]


@pytest.mark.long
def test_a_plan_without_a_pipeline_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline is priced in seconds, so that there should be a plan for it to beat."""
    planner = planner_of(4, "rows=16", FEW)
    piped = [DecoderPlan(1, 2, pipeline=2), DecoderPlan(pipeline=4)]
    monkeypatch.setattr(Planner, "pipelines", lambda self: iter(piped))
    first, *others = planner.starts()
    assert first.pipeline == 1 and others[:2] == piped and all(p.pipeline == 1 for p in others[2:])


def test_a_step_goes_further_ahead_only_where_it_waits_for_collectives() -> None:
    """It goes one kernel further at a time, and to three at most; the main job is told to go as far."""
    planner, plan = planner_of(8, "rows=8"), DecoderPlan(1, 8)

    def ahead_of(plan: DecoderPlan, waiting: float) -> set[tuple[int, int]]:
        planner.seen[plan] = Candidate(plan, 1e9, 1.0, parts={"communication": waiting})
        steps = planner.walk.one_move_away(plan, planner.moves()["ahead"])
        return {(k.prefetch, k.overlap) for k in steps}

    assert ahead_of(plan, 0.0) == set() and ahead_of(plan, 0.5) == {(2, 1), (1, 2)}
    assert ahead_of(replace(plan, prefetch=3, overlap=2), 0.5) == {(2, 2), (3, 1), (3, 3)}
    assert ahead_of(replace(plan, prefetch=3, overlap=2), 0.0) == {(2, 2), (3, 1)}
    planner.hardware = Hardware.named("cpu")  # nothing runs beside a kernel
    assert ahead_of(plan, 0.5) == set()


@pytest.mark.long
def test_the_line_of_a_plan_that_goes_further_ahead_is_that_plan() -> None:
    planner = planner_of(8, "rows=8", two := "model.layers=2")
    words = (plan := DecoderPlan(1, 8, prefetch=2, overlap=3)).overrides(8).split()
    run = config_of(two, "model.vocab=256", *words, spec=TRAIN).strategy
    found = explain(config_of(two, *words, spec=EXPLAIN))
    assert (run.prefetch_forward, run.prefetch_backward, run.overlap) == (2, 2, 3)
    exact = planner.price_exactly(plan)
    assert found.memory.peak_bytes == exact.peak_bytes
    assert found.timeline.step_seconds == pytest.approx(exact.seconds, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [(2, 1), (1, 2), (2, 2), (3, 3)], ids=str)
def test_few_layers_say_what_all_need_further_ahead(ahead: tuple[int, int]) -> None:
    planner = planner_of(8, "rows=8", "model.layers=12")
    for plan in (DecoderPlan(1, 8), DecoderPlan(1, 4, 2, remat="unit")):
        plan = replace(plan, prefetch=ahead[0], overlap=ahead[1])
        near, exact = planner.walk.price_once(plan), planner.price_exactly(plan)
        assert near.seconds == pytest.approx(exact.seconds, rel=1e-9)
        assert near.peak_bytes == exact.peak_bytes


@pytest.mark.long
def test_recomputation_is_as_little_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHARES", EIGHTHS)
    planner = planner_of(1, "rows=64", "model.layers=3")
    plan = DecoderPlan(1, 1, micro_rows=64)
    shares = [k / EIGHTHS for k in range(EIGHTHS + 1)]
    tried = [planner.walk.price_once(replace(plan, remat=share)) for share in shares]
    assert tried[-1].peak_bytes > tried[0].peak_bytes
    for budget in sorted({c.peak_bytes for c in tried})[:-1]:
        tight = replace(planner.config, device_gb=budget / 1e9 + 1e-9)
        found = replace(planner, config=tight).walk.within_budget(plan)
        least = min(c.seconds for c in tried if c.peak_bytes <= budget)
        # Bytes and time of so small a model are not monotone in the share: bisection may miss some percent.
        assert found.peak_bytes <= budget and found.seconds <= least * 1.05


@pytest.mark.long
def test_a_budget_is_kept_and_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHARES", EIGHTHS)
    free = planner_of(1, "rows=4", "device_gb=1", FEW)
    fast = free.find_best()
    tight = replace(free, config=replace(free.config, device_gb=0.8e-9 * fast.peak_bytes))
    small = tight.find_best()
    assert small.peak_bytes <= tight.budget < fast.peak_bytes and fast.seconds < small.seconds
    assert len({c.choice for c in find_rivals(tight, small)}) == 5
    said = as_text(tight, small, "model=own")
    assert "too many" in said and "slower" in said and "experiments.train model=own strategy=" in said


def test_a_narrower_optimizer_is_tried_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else fits: the budget lies between the smallest plans in both dtypes."""
    monkeypatch.setattr(search, "SHARES", 1)  # all or nothing is recomputed
    monkeypatch.setattr(search, "TIERS", {"device": {}})
    planner = planner_of(1, "rows=2", "optimizer_dtypes=[bfloat16]", FEW)
    least = DecoderPlan(1, 1, remat="unit")
    wide, narrow = (
        planner.walk.price_once(replace(least, optimizer_dtype=d)).peak_bytes for d in (None, "bfloat16")
    )
    planner.config = replace(planner.config, device_gb=(wide + narrow) / 2e9)
    best = planner.find_best()
    assert best.choice.optimizer_dtype == "bfloat16" and best.peak_bytes <= planner.budget


@pytest.mark.long  # a search for each number of devices
def test_the_fewest_devices_for_so_many_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the devices are twice as fast here."""
    fake = lambda self, plan, depths: Candidate(plan, 1e3, 2e-4 / self.devices)  # noqa: E731
    monkeypatch.setattr(Planner, "_price_layers", fake)
    config, said = config_of("days=0.14", "tokens=1e10", "rows=2", "most_devices=2"), []
    made: list[Planner] = []
    monkeypatch.setattr(report, "Planner", lambda *args: made.append(Planner(*args)) or made[-1])
    planner, best = find_plan(config, H100, said.append)
    fewer = made[-2]
    assert planner.devices == 2 * fewer.devices > 1 and count_days(planner, best) <= 0.14
    fitting = [c for c in fewer.seen.values() if c.fits(fewer.budget)]
    assert fitting and all(count_days(fewer, c) > 0.14 for c in fitting)
    with raises(BudgetError, leaves="1e-09 days", fix=["rows=", "more days", "most_devices="]):
        find_plan(replace(config, days=1e-9), H100, said.append)


@pytest.mark.long  # tests/search/test_fit.py has budgets that nothing fits into
def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHARES", 1)  # all or nothing is recomputed
    with raises(BudgetError, leaves=["7 devices", "8 rows"], fix=["rows=56", "devices=1"]):
        planner_of(7, "rows=8").find_best()
    with raises(BudgetError, leaves="1 device", fix="devices=", says="kB"):
        find_plan(config_of("devices=1", "rows=4", "device_gb=0.0003", FEW), H100, print)


def test_what_the_command_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config_of(FEW, "devices=1", "rows=4", "hardware.price_per_hour=3"), tmp_path)
    text = (tmp_path / "plan.txt").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    for expected in ("1 × h100", " to ", "MFU", "tokens (20 a parameter): ", "$", "rivals, of"):
        assert expected in text, expected
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["best"]["plan"]["optimizer"] in TIERS
    assert kept["best"]["seconds"] == min(
        c["seconds"] for c in kept["looked_at"] if c["peak_bytes"] <= kept["budget_bytes"]
    )
    assert (tmp_path / "plan.png").stat().st_size > 5_000


@pytest.mark.suite({
    "1.05": "numbers that are near",
    "40.0": "some powers of ten",
    "10000000.0": "many",
})  # fmt: skip
@pytest.mark.parametrize("spread", [1.05, 3.0, 9.0, 40.0, 1e3, 1e7], ids=str)
def test_the_picture_of_plans_has_a_title_units_and_numbers_that_do_not_meet(tmp_path, monkeypatch, spread):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    planner = planner_of(8)
    for number, share in enumerate((0.0, 0.4, 0.7, 1.0)):
        plan, size = replace(DecoderPlan(1, 8), micro_rows=2**number), 2e9 * spread**share
        planner.seen[plan] = Candidate(plan, size, 1.3 * spread ** (1 - share))
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: kept.append(self))
    draw_plans(planner, next(iter(planner.seen.values())), tmp_path / "plan.png")
    (axes,) = kept[0].axes
    assert axes.get_title() and axes.get_xlabel().endswith("GB") and axes.get_ylabel().endswith(", s")
    FigureCanvasAgg(kept[0]).draw()
    for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        labels = [t.label1 for t in ticks if t.label1.get_text() and low <= t.get_loc() <= high]
        boxes = [label.get_window_extent() for label in labels]
        ends = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
        assert len(ends) >= 2 and all(a[1] < b[0] for a, b in pairwise(ends))


def test_a_plan_takes_a_model_of_ones_own_and_a_recipe() -> None:
    own = (f"model._target_={HERE}.linear", "model.width=64", f"data._target_={HERE}.points", "data.count=8",
           f"objective._target_={HERE}.squares", "precision=fp32", "devices=2", "data.rows=4")  # fmt: skip
    config = validate(COMMAND, [*own, "experiment=laptop"])
    planner, best = find_plan(config, H100, print)
    text = as_text(planner, best)
    assert config.parameters == 65 and "65 parameters" in text and "rows a second" in text
    assert "tokens" not in text and best.choice.tensor == best.choice.context == 1
    assert "training" not in text and "$" not in text and as_dict(planner, best)["days"] is None
    said = as_text(replace(planner, config=replace(config, tokens=1e6)), best)
    assert "1e6 rows: " in said and "a parameter" not in said and "tokens" not in said
    with raises(ConfigError, leaves="days=3", says="tokens="):
        validate(COMMAND, [*own, "days=3"])
    error = str(make_too_big_error(replace(planner, config=replace(config, most_devices=1)), best))
    assert "smaller items" in error and "model.context" not in error
    assert "run.steps" in text and {k.shard * k.replicate for k in planner.seen} == {2}


@pytest.mark.long
def test_the_peak_of_a_model_of_ones_own_is_that_of_its_whole_step() -> None:
    """No layer of it stands for others. It is built once, and one item is read, for all prices."""
    custom_task.Counted.reads = 0
    own = (f"model._target_={HERE}.Deep", "model.width=64", "model.depth=8", f"data._target_={HERE}.counted",
           "data.width=64", f"objective._target_={HERE}.squares", "precision=fp32", "rows=12")  # fmt: skip
    config = validate(COMMAND, own)
    planner = Planner(config, 2, H100)
    for plan in (
        DecoderPlan(1, 2, micro_rows=2),
        DecoderPlan(1, 2, remat="unit", micro_rows=3),
        DecoderPlan(2, 1, micro_rows=4),
    ):
        whole = planner.lower(plan, 1, planner.count_micro_batches(plan)).memory_analysis()
        found = planner.walk.price_once(plan), planner.price_exactly(plan)
        assert [each.peak_bytes for each in found] == [whole.peak_bytes] * 2
    assert config.parameters == 8 * 64 * 65 and custom_task.Counted.reads == 1


def test_the_first_line_says_what_is_planned(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(report, "write_plan", lambda *_: None)
    config = validate(COMMAND, [])
    write(config, tmp_path)
    said = capsys.readouterr().out
    assert f"a model of {config.model.parameters:,} parameters" in said and "8 × h100" in said
    assert f"{config.batch_rows:,} rows of {config.model.context:,} tokens in a step" in said
    assert config.devices == 8 and config.hardware.name == "h100"
    own = ["model._target_=custom_task.Embedder", "model.context=8", "model.vocab=300", "days=3", "rows=64"]
    write(validate(COMMAND, own), tmp_path)
    assert (
        "plan of custom_task.Embedder, 64 rows of 8 tokens in a step, on the fewest"
        in capsys.readouterr().out
    )


def plan_and_compose(
    monkeypatch: pytest.MonkeyPatch, folder: Path, plan: DecoderPlan, *words: str
) -> tuple[Any, Any]:
    """Return what the command plans for, and what train composes of the line that it prints."""
    kept = []

    def found(config: Any, hardware: Any, say: Any) -> tuple[Planner, Any]:
        kept.append(config)
        parts = dict.fromkeys(PARTS, 0.5)
        return Planner(config, 8, H100), Candidate(plan, 1e9, 2.0, parts=parts)

    monkeypatch.setattr(report, "find_plan", found)
    monkeypatch.setattr(report, "draw_plans", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["plan", *words, f"hydra.run.dir={folder}"])
    answer(COMMAND, write)
    (line,) = [x for x in (folder / "plan.txt").read_text().splitlines() if x.startswith("run  ")]
    return kept[0], validate(TRAIN, shlex.split(line)[4:])


RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
SAID = (
    "strategy=offload", "strategy.remat=unit", "mesh.tensor=2", "mesh.context_attention=ring",
    "run.accumulate=2", "run.accumulate_mode=local", "specs=[['*',shard]]", "run.disk_dir=/d",
)  # fmt: skip


@pytest.mark.suite({
    "None": "no recipe",
    "zero2_offload": "tiers",
    "hybrid": "a mesh",
    "planned": "a plan of its own",
})  # fmt: skip
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_the_run_line_is_the_plan_whatever_a_recipe_says(recipe, tmp_path, monkeypatch) -> None:
    plan = DecoderPlan(1, 8) if recipe else DecoderPlan(2, 4, micro_rows=2, optimizer="host", remat=0.5)
    words = [f"experiment={recipe}"] if recipe else SAID
    more = "rows=16", "hardware=h100", "run.steps=7"
    config, run = plan_and_compose(monkeypatch, tmp_path, plan, *words, *more)
    assert run.strategy == StrategyConfig(name=plan.preset, remat=plan.remat, **plan.tiers)
    assert run.mesh == plan.mesh and run.specs is None and run.data.rows == 16 and run.run.steps == 7
    assert run.run.accumulate * plan.micro_rows * 8 == 16 and run.run.accumulate_mode == "reduce"
    assert run.precision == config.precision and run.model == config.model
    said = (tmp_path / "plan.txt").read_text().partition("chosen by the plan")[2].splitlines()[0]
    assert ("specs" in said) == (config.specs is not None)


def test_the_run_line_keeps_what_the_plan_does_not_decide(tmp_path, monkeypatch) -> None:
    """Groups, a folder of configurations, and values that a shell would split."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny]\nlayers: 3\n")
    _, run = plan_and_compose(
        monkeypatch, tmp_path / "plan", DecoderPlan(1, 8), f"--config-dir={tmp_path}", "model=mine",
        "data=shards",
        "data.root='my shards'", "schedule=wsd", "tracker=tensorboard", "precision=fp32", "devices=8",
    )  # fmt: skip
    assert run.model.layers == 3 and run.data.root == "my shards" and run.schedule.name == "wsd"
    assert run.tracker.tensorboard and run.precision.compute == "float32"


SMALL_MIXTURE = (
    "model.width=64", "model.layers=9", "model.dense=1", "model.heads=2", "model.head=16", "model.rotated=8",
    "model.query_rank=32", "model.key_rank=16", "model.mlp=64", "model.experts=8", "model.chosen=2",
    "model.expert_mlp=32", "model.context=32", "model.vocab=256",
)  # fmt: skip


def mixture_of(*more: str, devices: int = 4) -> tuple[list[str], Planner]:
    """Return the words of a command, and its plans."""
    own = [f"--config-dir={MIXTURE}", "experiment=deepseek_v3", *SMALL_MIXTURE]
    words = [*own, "rows=32", *more, f"devices={devices}"]
    return words, Planner(validate(COMMAND, words), devices, H100)


def test_a_mixture_is_split_by_experts(tmp_path, monkeypatch) -> None:
    words, planner = mixture_of()
    config = planner.config
    assert config.is_layered and config.layers == 9 and config.odd_layers == 1 and config.experts == 8
    assert DecoderPlan(1, 1, expert=4) in planner.splits()
    assert planner.is_valid(DecoderPlan(1, 1, expert=2, pipeline=2, chunks=2))
    assert not planner.is_valid(DecoderPlan(1, 2, 2))
    _, run = plan_and_compose(monkeypatch, tmp_path, DecoderPlan(1, 1, expert=4), *words)
    assert run.mesh.expert == 4 and run.mesh.expert_capacity == 1.5 and run.model == config.model


def test_layers_are_counted_in_the_chunks_that_the_step_has() -> None:
    """Experts that are split among ranks count less than those that each rank has."""
    _, planner = mixture_of()
    for plan in (DecoderPlan(1, 1, pipeline=2, expert=2), DecoderPlan(1, 2, pipeline=2)):
        specs = planner.make_step(plan, 9, 2)[0].specs
        chunk_of = {layer_of(path): spec.chunk for path, spec in specs.items()}
        numbers = [chunk_of[layer] for layer in range(9)]
        assert planner.layers_by_chunk(plan) == [numbers.count(0), numbers.count(1)]


ODD_CHUNKS = ("model.dense=3", "model.mlp=192", "rows=12")  # three first layers, which fill two of six chunks


def test_stages_are_carried_on_from_behind_first_layers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a first layer takes one byte and one second, and any other one ten of each."""
    _, planner = mixture_of(*ODD_CHUNKS, devices=6)
    plan = DecoderPlan(pipeline=6, keep=True, remat="unit")

    def sums_of(layers: Sequence[int]) -> list[float]:
        each = iter([1.0] * planner.config.odd_layers + [10.0] * sum(layers))
        return [sum(itertools.islice(each, count)) for count in layers]

    def measure(
        self: Planner, plan: DecoderPlan, layers: Sequence[int], stages: int, groups: int, first: int
    ) -> dict[Any, float]:
        sums = sums_of(layers)
        peaks = {stage: sums[stage] for stage in (*range(first + 1), -2, -1)}
        return peaks | dict.fromkeys((*PARTS, *search.VALUES), sum(sums))

    monkeypatch.setattr(Planner, "measure_stages", measure)
    counts = planner.layers_by_chunk(plan)
    assert counts == [2, 2, 1, 1, 2, 1]
    found = planner.price(plan)
    as_full = [2, 2, 2, 2, 2, 1]  # chunks between the ends take as long as the fullest of them
    assert (found.peak_bytes, found.seconds) == (max(sums_of(counts)), sum(sums_of(as_full)))


@pytest.mark.long
def test_first_layers_that_differ_fill_more_than_one_chunk_of_a_pipeline() -> None:
    """Few stages say what all need: a stage that is like most others is among them."""
    _, planner = mixture_of(*ODD_CHUNKS, devices=6)
    plan = DecoderPlan(pipeline=6, keep=True, remat="unit")
    near, exact = planner.price(plan), planner.price_exactly(plan)
    assert near.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.05)
    assert near.seconds == pytest.approx(exact.seconds, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", [DecoderPlan(1, 1, expert=4, remat="unit"), DecoderPlan(1, 2, expert=2)], ids=str
)
def test_a_mixture_is_carried_on_from_few_layers(plan: DecoderPlan) -> None:
    """Behind the first layer, which has no experts."""
    _, planner = mixture_of()
    near, exact = planner.walk.price_once(plan), planner.price_exactly(plan)
    assert near.seconds == pytest.approx(exact.seconds, rel=1e-6)
    assert near.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.01)
