"""Updates of one bucket: by operators in place, by their graphs, and as Inductor makes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import reference
import sharded
import torch
from errors import raises
from models import model_of
from optimizers import ALL, assert_close, copy, make_step, random_tree
from torch import Tensor

import fnshard as fs
from fnshard.compiler.update.family import Family, families_of
from fnshard.errors import SpecError
from fnshard.optim.optimizer import Step, apply_updates, init_slots
from fnshard.optim.optimizers import adamw, chain, clip_by_global_norm, sgd
from fnshard.runtime.executor.compiled_update import CompiledUpdates, is_compilable
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import find_fused
from fnshard.runtime.executor.update import Updater

ONE = fs.make_mesh(shard=1, device="cpu")
# Not SOAP, which chooses by values, and not clip_muon_ema, whose bf16 products a kernel rounds less often.
COMPILABLE = [name for name in ALL if "soap" not in name and name != "clip_muon_ema"]


@cache
def families(name: str) -> Mapping[str, Family]:
    return families_of(ALL[name], fs.presets.full_shard(random_tree(0), ONE), ONE)


def follow_whole_leaves(name: str, compiled: CompiledUpdates | None) -> None:
    """Compare the executor's updates in place, on one rank, with `apply_updates` on whole leaves.

    The leaves have every shape. Gradients are multiplied by a scale, but for one step.
    """
    optimizer, params = ALL[name], random_tree(0)
    expected, slots = copy(params), init_slots(optimizer, params)
    state = copy(slots)
    updater = Updater(families(name), fs.presets.full_shard(params, ONE), ONE, 0, compiled)
    update = updater.bind(list(params), 0)
    for count in range(4):
        grads, scale = random_tree(100 + count), None if count == 1 else torch.tensor(0.25).double()
        step = make_step(count, grads)
        expected, state = apply_updates(optimizer, grads, state, expected, step, scale)
        norm = step.norm if scale is None else step.norm * scale
        # An update that other ranks interrupt hands values on to its next part. On one rank there are none.
        assert update(grads, slots, params, {}, StepControl(step=Step(step.count, norm), scale=scale)) == {
            path: {} for path, family in families(name).items() if _is_updated_by_its_graph(family, compiled)
        }
        assert_close(params, expected)
        assert_close(slots, state)


def _is_updated_by_its_graph(family: Family, compiled: CompiledUpdates | None) -> bool:
    is_compiled = compiled is not None and family.traced is not None and is_compilable(family)
    return find_fused(family) is None and not is_compiled


@pytest.mark.suite(but={
    "soap": "muon has whole matrices, too",
    "clip_s*": "schedule_free alone",
    "clip_muon*": "muon",
    "clip_adamw_8bit*": "adamw_8bit",
    "clip_adafactor*": "adafactor",
    "clip_lars*": "lars",
    "clip_row*": "row_sgd",
})  # fmt: skip
@pytest.mark.parametrize("name", ALL)
def test_blocks_are_updated_in_place_as_whole_leaves_are(name: str) -> None:
    follow_whole_leaves(name, None)


@pytest.mark.suite({
    "adamw": "two slots, and the step's count",
    "adamw_rules": "settings by leaf",
    "two_clips_two_emas": "what stands around",
    "muon": "whole matrices",
})  # fmt: skip
@pytest.mark.parametrize("name", COMPILABLE)
def test_compiled_updates_are_those_of_whole_leaves(name: str) -> None:
    follow_whole_leaves(name, CompiledUpdates({}))


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw_rules", "clip_adamw_ema", "ema_schedule"])
def test_adamw_and_sgd_run_as_fused_operators_whatever_transforms_surround_them(name: str) -> None:
    traced = [family for family in families(name).values() if family.traced]
    assert traced and all(map(find_fused, traced))


@pytest.mark.parametrize("name", ["lion", "adafactor", "two_bodies"])
def test_other_updates_are_no_fused_operators(name: str) -> None:
    assert families(name) and not any(map(find_fused, families(name).values()))


def test_what_chooses_by_values_is_not_compiled() -> None:
    assert not is_compilable(families("soap")["a.w"])


# ------------------------------------------------------------------ in a step
COMPILED = {"update": "compiled"}  # `sharded` makes the rest eager, which is quicker


@pytest.mark.suite({
    "full_shard-options0": "sharded gradients",
    "full_shard-options3": "on the host",
})  # fmt: skip
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("full_shard", {}),
        ("zero2", {"accumulate": 2, "accumulate_mode": "local"}),
        ("zero2", {"accumulate": 2, "micro_order": "breadth"}),
        ("full_shard", {"policy": {"optimizer_memory": "host"}}),
    ],
)
def test_follows_the_reference(preset: str, options: dict[str, Any]) -> None:
    """fp64 to 1e-10: padded blocks, whole and sharded gradients, sums of micro-batches, tiers, clipping."""
    model = model_of("gpt")
    parts = 2 * options.get("accumulate", 1)
    batches = [[sharded.part(b, i, parts) for i in range(parts)] for b in model.batches(sharded.STEPS)]
    expected = reference.train(
        model.loss, model.params, batches, reference.adamw(1e-2), frozen=model.frozen, clip=0.5
    )
    optimizer = chain(clip_by_global_norm(0.5), adamw(1e-2, weight_decay=0.1))
    for trained in sharded.simulate(model, preset, 2, optimizer, **COMPILED, **options):
        sharded.assert_same(trained, expected)


@pytest.mark.long  # test_follows_the_reference has sums and rates
def test_a_mean_and_its_scale_are_inputs() -> None:
    """The factor of a Mean's count differs from step to step, and so does the rate."""
    model = model_of("masked_mean")
    batches = [[sharded.part(b, i, 2) for i in range(2)] for b in model.batches(sharded.STEPS)]
    rate = fs.schedules.warmup_cosine(0.1, warmup=2, total=5)
    expected = reference.train(
        model.loss, model.params, batches, reference.sgd(0.1, momentum=0.9, weight_decay=0.01),
        frozen=model.frozen, rate=lambda step: float(rate(torch.tensor(step))),
    )  # fmt: skip
    optimizer = sgd(rate, momentum=0.9, weight_decay=0.01)
    for trained in sharded.simulate(model, "full_shard", 2, optimizer, **COMPILED):
        sharded.assert_same(trained, expected)


def blocks_of(x: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Compute three equal layers."""
    for index in range(3):
        x = torch.tanh(x @ params[f"layers.{index}.w"] + params[f"layers.{index}.b"])
    return x.square().mean()


LAYERS = {
    f"layers.{i}.{n}": torch.randn(4, 4) if n == "w" else torch.zeros(4) for i in range(3) for n in "wb"
}
BF16 = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
MASTER = {**BF16, "storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}


def train_layers(
    policy: dict[str, Any], update: str, steps: int = 3
) -> tuple[fs.TrainState, list[float], Any]:
    """Make some steps of the layers on one rank; return the state, losses and the step."""
    mesh = fs.make_mesh(shard=1, device="cpu")
    specs = fs.presets.full_shard(LAYERS, mesh, **policy)
    step = fs.shard_step(
        lambda params, x: blocks_of(x.to(params["layers.0.w"].dtype), params), specs, mesh=mesh,
        optimizer=adamw(0.1), backend="eager", update=update,
    )  # fmt: skip
    state, losses = step.init({p: v.clone() for p, v in LAYERS.items()}), []
    for index in range(steps):
        state, metrics = step(state, torch.linspace(-1, 1, 8).view(2, 4) + index)
        losses.append(metrics["loss"].item())
    return state, losses, step


def test_equal_units_share_a_kernel() -> None:
    """Three layers, one kernel; leaves of another size or with other settings would take another."""
    _, _, step = train_layers({}, "compiled", steps=2)
    (leaves,) = step._runner._compiled.kernels  # by the leaves of a unit: w and b
    assert len(leaves) == 2


@pytest.mark.parametrize("update", ["eager", pytest.param("compiled", marks=pytest.mark.long)])
def test_storage_in_the_compute_dtype_is_the_same_training(update: str) -> None:
    """bf16 storage with an fp32 master: bit for bit what fp32 storage and bf16 compute give, and no casts."""
    wide, losses, first = train_layers(BF16, update)
    narrow, same, second = train_layers(MASTER, update)
    assert losses == same
    for path, value in wide.params.items():
        assert torch.equal(narrow.opt_state[path]["master"], value)
        assert torch.equal(narrow.params[path], value.bfloat16())
    casts = [
        sum(type(line).__name__ == "Cast" for line in lowered.schedule.instructions)
        for lowered in (next(iter(s._cache.programs.values())) for s in (first, second))
    ]
    assert casts[0] > 0 and casts[1] == 0


# ------------------------------------------------------------------ the option
def on_paper(update: str, device: str = "cpu", **options: Any) -> Any:
    """Lower the layers' step on an abstract mesh."""
    mesh = fs.make_mesh(shard=2, abstract=True, device=device)
    step = fs.shard_step(
        lambda params, x: blocks_of(x.to(params["layers.0.w"].dtype), params),
        fs.presets.full_shard(LAYERS, mesh, **MASTER), mesh=mesh, optimizer=adamw(0.1),
        update=update, **options,
    )  # fmt: skip
    return step.lower(LAYERS, torch.zeros(2, 4))


def test_auto_compiles_on_accelerators() -> None:
    """An accelerator compiles updates only if the backend is Inductor."""
    chosen = [
        on_paper("auto", device, backend=backend)._is_update_compiled
        for device in ("cpu", "cuda")
        for backend in ("eager", "inductor")
    ]
    assert chosen == [False, False, False, True]


def test_an_option_that_is_none_is_refused() -> None:
    mesh = fs.make_mesh(shard=1, device="cpu")
    with raises(SpecError, leaves="update='fast'", says="'auto', 'eager', 'compiled'"):
        fs.shard_step(
            blocks_of, fs.presets.full_shard(LAYERS, mesh), mesh=mesh, optimizer=adamw(0.1), update="fast"
        )
