"""`fs.debug.bisect`: each planted fault is found at its instruction; and nothing where there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import (
    ADAMW,
    AT,
    PARAMS,
    PRESETS,
    Liar,
    gather_not_waited_for,
    kernel_wrong,
    leaf_wrong,
    loss,
    lying,
    mesh_of,
    planted,
    saved_value_freed,
    schedule_wrong,
    sharded,
    update_before_its_reduction,
    update_with_a_part_of_the_sum,
    update_wrong,
    wrong_leaf_read,
)
from tensor_models import decoder
from toys import rows

import fnshard as fs
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Gather,
    Publish,
    ReduceScalars,
    ReduceScatter,
    Run,
    Update,
    Wait,
)
from fnshard.debug.layouts import BisectReport
from fnshard.errors import DebugError, StateError
from fnshard.runtime.executor.context import ExecutorContext


def bisected(preset: str = "full_shard", policy: Any = None, **how: Any) -> BisectReport:
    mesh = mesh_of(replicate=2, shard=2) if preset == "hybrid_shard" else mesh_of()
    a, b = PRESETS["no_shard"](PARAMS, mesh), PRESETS[preset](PARAMS, mesh)
    b = {p: replace(s, **(policy or {}).get(p, {})) for p, s in b.items()}
    return fs.debug.bisect(loss, a, b, PARAMS, rows(), mesh=mesh, **{"optimizer": ADAMW, **how})


@pytest.mark.parametrize("preset", PRESETS)
def test_bisect_says_nothing_of_what_is_right(preset: str) -> None:
    found = bisected(preset, options_b={"remat": "unit", "prefetch": 0})
    assert not found, found
    assert str(found) == f"no difference in {found.compared} values"
    kinds = {k for k in ("leaf", "kernel", "collective", "first") if getattr(found, k)}
    assert kinds == set()
    assert found.compared > 25


BF16 = {"layers.1.w": {"compute_dtype": torch.bfloat16}}
SWAPPED = lambda got: got[::-1]  # noqa: E731
WRONG: Mapping[str, tuple[Callable[[], Any], AT, type, AT, str]] = {
    "reduce op: twice": (
        lambda: lying("reduce_scatter", 0, lambda r: r * 2), {}, Wait,
        {"of": ReduceScatter, "unit": "layers.2"}, "layers.2.w"),
    "reduce: one rank": (
        lambda: lying("reduce_scatter", 2, lambda r: r + 0.1, 1), {}, Wait,
        {"of": ReduceScatter, "unit": "layers.0"}, "rank 1"),
    "all_reduce: left out": (
        lambda: lying("all_reduce", 2, lambda r: r / 2), {"preset": "hybrid_shard"}, Wait,
        {"of": AllReduce, "unit": "layers.1"}, "layers.1.w"),
    "gather: ranks swapped": (
        lambda: lying("all_gather", 1, SWAPPED), {}, Wait,
        {"of": Gather, "unit": "layers.1"}, "leaf as kernels see it 'layers.1.w'"),
    "gather: for the backward": (
        lambda: lying("all_gather", 3, SWAPPED), {}, Wait,
        {"of": Gather, "unit": "layers.1", "phase": "backward"}, "layers.1.w"),
    "publish": (
        lambda: lying("all_gather", 1, SWAPPED), {"preset": "zero2"}, Wait,
        {"of": Publish}, "updated leaf"),
    "scalars": (
        lambda: lying("all_reduce", 0, lambda r: r * 2), {}, Wait, {"of": ReduceScalars}, "scalar 'loss'"),
    "dtype of a leaf": (
        lambda: planted(lambda c: c), {"policy": BF16}, Wait,
        {"of": Gather, "unit": "layers.1"}, "a has float32, b bfloat16"),
    "kernel": (
        lambda: kernel_wrong("k1", False, 0, lambda v: v + 0.1), {}, Run,
        {"unit": "layers.1", "backward": False}, "value 'matmul_default_1'"),
    "backward: the leaf": (
        lambda: kernel_wrong("k1", True, 1, lambda v: v.T), {}, Run,
        {"unit": "layers.1", "backward": True}, "gradient of leaf 'layers.1.w'"),
    "bad leaf": (lambda: leaf_wrong("layers.1.w"), {}, type(None), {}, "stored leaf 'layers.1.w'"),
    "update": (update_wrong, {}, Update, {"unit": "layers.1"}, "layers.1.w"),
    "the wrong leaf read": (
        lambda: schedule_wrong(wrong_leaf_read), {}, Run, {"unit": "layers.2"}, "value 'mean_default'"),
    "micro-batch": (
        lambda: lying("reduce_scatter", 3, lambda r: r * 2),
        {"options_a": {"accumulate": 2}, "options_b": {"accumulate": 2}}, Wait,
        {"of": ReduceScatter, "unit": "layers.2", "phase": "backward.1"}, "gradient of a micro-batch"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_bisect_names_the_instruction_that_was_made_wrong(fault: str) -> None:
    plant, how, kind, fields, text = WRONG[fault]
    with plant():
        found = bisected(**how)
    assert found
    number = found.first.number
    line = found.schedules[1].instructions[number] if number >= 0 else None
    assert isinstance(line, kind), found
    assert {k: getattr(line, k) for k in fields} == fields, found
    assert text in str(found.first), found
    named = {Run: "kernel", Wait: "collective"}.get(kind)
    if named:
        assert getattr(found, named) is found.first
    if "layers." in text:
        assert found.leaf is found.first


@pytest.mark.parametrize(
    ("spoiled", "line"),
    [
        (gather_not_waited_for, r"forward layers.1 run(.|\n)*KeyError: 'p:layers.1.w"),
        (update_before_its_reduction, r"update reduce/layers.1(.|\n)*KeyError: 'r:"),
        (saved_value_freed, r"backward layers.1 run(.|\n)*KeyError: 'x1"),
    ],
)
def test_bisect_says_at_which_line_a_side_broke_off(spoiled: Any, line: str) -> None:
    with schedule_wrong(spoiled), pytest.raises(DebugError, match=rf"broke off at line \d+: .*{line}"):
        bisected()


def test_bisect_of_other_micro_batches_and_of_a_spec_tree_with_itself() -> None:
    found = bisected(options_b={"accumulate": 2})
    assert not found, found
    assert "gradient of a micro-batch" in found.note
    mesh = mesh_of()
    specs = PRESETS["full_shard"](PARAMS, mesh)
    with lying("reduce_scatter", 0, lambda r: r + 1):  # on both sides
        assert not fs.debug.bisect(loss, specs, specs, PARAMS, rows(), options_b={"remat": "unit"})


def test_bisect_looks_at_every_replica_of_either_side_and_not_at_parts_of_sums() -> None:
    def plant(context: ExecutorContext) -> ExecutorContext:
        if sharded(context) or context.rank == 0:
            return context
        return replace(context, comm=Liar(context.comm, "all_reduce", 2, lambda r: r * 1.5))

    mesh = mesh_of()
    full, cut = (PRESETS[name](PARAMS, mesh) for name in ("no_shard", "full_shard"))
    for sides in ((full, cut), (cut, full)):
        with planted(plant, both=True):
            found = fs.debug.bisect(loss, *sides, PARAMS, rows(), mesh=mesh)
        assert found.first is not None, "a replica that is wrong on rank 1 alone"
        assert found.first.what == "reduced gradient 'layers.1.w'", found
    mesh = mesh_of(replicate=2, shard=2)
    hybrid = PRESETS["hybrid_shard"](PARAMS, mesh)
    found = fs.debug.bisect(loss, hybrid, hybrid, PARAMS, rows(), mesh=mesh, options_b={"prefetch": 0})
    assert not found, found


def test_bisect_takes_the_state_of_one_rank_and_no_other() -> None:
    alone, mesh = fs.make_mesh(shard=1), mesh_of()
    specs = PRESETS["full_shard"](PARAMS, alone)
    state = fs.shard_step(loss, specs, mesh=alone, optimizer=ADAMW, backend="eager").init(PARAMS)
    assert not fs.debug.bisect(loss, specs, specs, state, rows())
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=ADAMW, backend="eager")
    part = fs.simulate(mesh, lambda rank: step.init(PARAMS))[0]
    with pytest.raises(StateError, match=r"one rank's part(.|\n)*fs.unshard"):
        fs.debug.bisect(loss, specs, specs, part, rows())


def test_bisect_under_an_adversary_sees_what_is_read_before_it_was_summed() -> None:
    with schedule_wrong(update_with_a_part_of_the_sum):
        found = bisected("hybrid_shard", adversary="early")
    line = found.schedules[1].instructions[found.first.number]
    assert isinstance(line, Update) and line.unit == "layers.2"


def test_bisect_of_leaves_that_a_tensor_axis_splits() -> None:
    """Their parts are compared with the whole, and with other parts of the same."""
    model, mesh = decoder(layers=1), mesh_of(shard=2, tensor=2)
    tensor = PRESETS["full_shard"](model.params, mesh, tensor="tensor")
    reports = []
    for preset, split in (("no_shard", None), ("zero1", "tensor")):
        other = PRESETS[preset](model.params, mesh, tensor=split)
        how = {"mesh": mesh, "optimizer": ADAMW}
        assert not fs.debug.bisect(model.loss, other, tensor, model.params, model.batch(0), **how)
        with lying("reduce_scatter", 2, lambda got: got * 2, rank=1):
            reports.append(fs.debug.bisect(model.loss, other, tensor, model.params, model.batch(0), **how))
    whole, parts = reports
    assert whole.collective.what.startswith("reduced gradient"), whole
    assert "wait exchange" in str(parts.first), parts
