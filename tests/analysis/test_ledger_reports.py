"""What the ledger says: its sums, its tables, its budget, its differences; nothing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from torch import Tensor, fx
from toys import chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard.analysis.footprint import CallArgument, eager_footprint
from fnshard.analysis.storages import CATEGORIES
from fnshard.runtime.executor.scalars import Scalars
from fnshard.step.lowered import Lowered

KB = 1024


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


def decoder(ranks: int | dict[str, int] = 4, **options: Any) -> Lowered:
    """Lower a small Llama; one lowering of each layout serves all tests."""
    key = repr((ranks, sorted(options.items())))
    if key not in DECODERS:
        DECODERS[key] = lower(*llama(4), ranks=ranks, **options)
    return DECODERS[key]


DECODERS: dict[str, Lowered] = {}


# ------------------------------------------------------------------ footprints


def trace_module(fn: Any, *args: Tensor) -> fx.GraphModule:
    module = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*args)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module


def footprint(fn: Any, entries: Sequence[CallArgument], *args: Tensor) -> Any:
    return eager_footprint(trace_module(fn, *args), entries, "cpu")


def above_entry(found: Any, argument_bytes: int) -> int:
    alive = sum(found.new_bytes[j] for j in found.alive)
    return found.workspace_bytes + alive - argument_bytes * len(found.freed)


def test_outputs_say_what_they_alias() -> None:
    x, y = torch.zeros(4, KB), torch.zeros(4, KB)
    made = footprint(lambda x, y: (x[1], x + y, (x * y).view(-1)), [CallArgument(0), CallArgument(1)], x, y)
    assert [(o.new, o.argument) for o in made.outputs] == [(None, 0), (0, None), (1, None)]
    assert made.new_bytes == (16 * KB, 16 * KB)


def test_arguments_that_share_a_storage_die_together() -> None:
    x, y = torch.zeros(KB), torch.zeros(KB)
    shared, apart = (
        [CallArgument(0, True, 4 * KB)] * 2,
        [CallArgument(0, True, 4 * KB), CallArgument(1, True, 4 * KB)],
    )
    fn = lambda x, y: ((x.sin() + 1).exp() + y,)  # noqa: E731
    # Apart, the first is gone when the second result is made; shared, it lives as long as the second.
    assert above_entry(footprint(fn, apart, x, y), 4 * KB) == 4 * KB
    assert above_entry(footprint(fn, shared, x, y), 4 * KB) == 8 * KB


# ------------------------------------------------------------------ sums


@pytest.mark.suite({
    "zero2-unit": "recomputed",
})  # fmt: skip
@pytest.mark.parametrize(("preset", "remat"), [
    ("full_shard", "none"), ("zero2", "unit"), ("no_shard", "none"), ("zero1 over tensor", "unit"),
])  # fmt: skip
def test_what_is_added_up_adds_up(preset: str, remat: str, recwarn: pytest.WarningsRecorder) -> None:
    preset, _, axis = preset.partition(" over ")
    split = {"ranks": {"shard": 2, axis: 2}, "policy": {"tensor": axis}} if axis else {}
    clipped = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
    low = decoder(preset=preset, remat=remat, optimizer=clipped, **split)
    found, timeline = low.memory_analysis(), low.memory_timeline()
    assert sum(found.peak.values()) == found.peak_bytes == timeline.peak_bytes
    assert timeline.moments[found.at].bytes == found.peak_bytes
    assert len(timeline.moments) == len(low.schedule.instructions)
    last = timeline.moments[-1].device
    assert last["gathered units"] == last["saved activations"] == 0  # all that was made was freed
    assert last["parameter shards"] == found.resident["parameter shards"]
    assert set(found.peak) <= set(CATEGORIES)
    assert not [w for w in recwarn if "is estimated" in str(w.message)]


def test_state_between_steps_is_counted_from_shapes() -> None:
    params = chain(4, 64)
    low = lower(loss, params, rows(64), ranks=4)
    full = sum(v.numel() * 4 for v in params.values())
    found = low.memory_analysis()
    assert found.resident == {"parameter shards": full // 4, "optimizer state": 2 * full // 4}
    assert found.leaves["layers.0.w"] == {
        "stored": 64 * 64, "optimizer": 2 * 64 * 64, "gathered": 4 * 64 * 64, "gradient": 64 * 64,
    }  # fmt: skip
    assert found.host_bytes == found.disk_bytes == 0


def test_a_master_copy_is_optimizer_state() -> None:
    params = {p: v.bfloat16() for p, v in chain(2, 64).items()}
    low = lower(loss, params, rows(64).bfloat16(), ranks=1, policy={"optimizer_dtype": torch.float32})
    assert low.memory_analysis().resident["optimizer state"] == 3 * 2 * 64 * 64 * 4


def test_tiers_are_counted_apart() -> None:
    params = chain(4, 64)
    size = 4 * 64 * 64 * 4
    low = lower(loss, params, rows(64), ranks=2, policy={"memory": "host", "optimizer_memory": "disk"})
    found = low.memory_analysis()
    assert found.resident_bytes == 0
    assert found.host_resident_bytes >= size // 2
    assert found.disk_bytes == found.disk_resident_bytes == size
    moved = low.comm_analysis()
    assert moved.to_device_bytes >= size // 2 and moved.to_host_bytes > 0
    device = lower(loss, params, rows(64), ranks=2)
    assert device.comm_analysis().to_device_bytes == 0
    # Beside the gradient shards nothing more is on the device than what is read just then.
    assert found.peak_bytes < device.memory_analysis().peak_bytes


def test_abstract_ranks_of_an_accelerator_count_its_own_collectives() -> None:
    low = decoder(8)
    native, p2p, shared = (low.memory_analysis(transport=t) for t in ("native", "p2p", "shared"))
    assert low.memory_analysis().as_dict() == native.as_dict()
    assert shared.resident["transfer and bucket buffers"] > 0
    assert len({native.peak_bytes, p2p.peak_bytes, shared.peak_bytes}) > 1


# ------------------------------------------------------------------ traffic


def test_traffic_adds_up_and_knows_axes_units_and_phases() -> None:
    low = decoder({"replicate": 2, "shard": 4}, preset="hybrid_shard")
    moved = low.comm_analysis()
    by_verb = moved.by("verb")
    assert set(moved) == {"gather", "reduce_scatter", "all_reduce"}
    for what in ("axes", "unit", "phase"):
        assert sum(e["sent_bytes"] for e in moved.by(what).values()) == moved.sent_bytes
    assert set(moved.by("axes")) == {("shard",), ("replicate",)}
    assert set(moved.by("phase")) == {"forward", "backward"}
    assert by_verb["gather"]["sent_bytes"] == by_verb["gather"]["bytes"] * 3 // 4
    assert by_verb["all_reduce"]["sent_bytes"] == by_verb["all_reduce"]["bytes"]  # 2 (n - 1) / n of two
    assert moved["gather"]["count"] == sum(line.verb == "gather" for line in low.schedule.instructions)


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_sum_of_scalars_is_as_long_as_counted(scale: Any, accumulate: int) -> None:
    mesh, params, sent = fs.make_mesh(shard=2, simulated=True), chain(2), []
    specs = fs.presets.full_shard(params, mesh)

    def fn(p: Any, x: Tensor) -> Any:
        out = run_chain(p, x)
        return fs.Mean(out.sum(), out.numel()), {"max": out.max(), "mean": fs.Mean(out.sum(), 3)}

    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))
    how = {"optimizer": optimizer, "loss_scale": scale, "accumulate": accumulate, "grad_norm": True}
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager", **how)
    pack = Scalars.pack

    def packed(self: Scalars, *args: Any) -> Tensor:
        sent.append(pack(self, *args))
        return sent[-1]

    with mock.patch.object(Scalars, "pack", packed):
        fs.simulate(mesh, lambda rank: step(step.init(params), rows()))
    counted = step.lower(params, rows()).comm_analysis().scalar_bytes
    assert {vector.nbytes for vector in sent} == {counted} and counted >= 6 * 8


# ------------------------------------------------------------------ tables, budgets


def test_answers_print_short_and_are_plain_data() -> None:
    low = decoder(policy={"optimizer_memory": "host"})
    json.dumps(low.memory_timeline().as_dict())
    for answer in (low.memory_analysis(), low.comm_analysis()):
        json.dumps(answer.as_dict())
        assert max(map(len, str(answer).splitlines())) < 240
    assert len(str(low.memory_analysis()).splitlines()) < 14
    assert "parameter shards" in str(low.memory_analysis()) and "\nhost" in str(low.memory_analysis())
    timeline = low.memory_timeline().as_dict()
    assert {len(v) for v in timeline.values()} == {len(low.schedule.instructions)}


def test_a_budget_is_kept_or_refused_with_the_ways_out() -> None:
    low = decoder()
    peak = low.memory_analysis().peak_bytes
    low.assert_fits(peak)
    with raises(fs.BudgetError, leaves="the step's peak", says="MB") as caught:
        low.assert_fits(peak - 1)
    text = str(caught.value)
    largest = sorted(low.memory_analysis().peak.items(), key=lambda item: -item[1])[:3]
    assert all(category in text for category, _ in largest)
    assert "Fix: " in text and isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("wrong", ["24GB", 0, True, math.nan])
def test_a_budget_is_a_number(wrong: Any) -> None:
    with raises(fs.SpecError, leaves=f"assert_fits({wrong!r})", says="bytes"):
        decoder().assert_fits(wrong)
    decoder().assert_fits(24e9)


def test_questions_that_make_no_sense() -> None:
    low = decoder()
    for ask in (low.memory_analysis, low.memory_timeline):
        with raises(fs.SpecError, leaves="transport='nonsense'", says="'shared', 'p2p', 'native'"):
            ask(transport="nonsense")
