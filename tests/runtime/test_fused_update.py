"""The compiled update: the optimizers as Inductor makes them, against themselves and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
import torch
from models import model_of
from optimizers import ALL, SHAPES, assert_close, copy, make_info, random_tree
from torch import Tensor

import fnshard as fs
from fnshard.errors import OptimizerError, SpecError
from fnshard.optim.contract import Optimizer
from fnshard.optim.optimizers import adamw, chain, clip_by_global_norm, ema, sgd
from fnshard.runtime.executor.fused_update import FusedUpdates

LEAVES = {path: shape for path, shape in SHAPES.items() if 0 not in shape}
COMPILABLE = [n for n, o in ALL.items() if all(o.of(p, len(s)).compilable for p, s in LEAVES.items())]


@pytest.mark.parametrize("name", COMPILABLE)
def test_equals_apply(name: str) -> None:
    """Parameters and slots in place, several steps, a scale, rules by path, leaves of every shape."""
    optimizer = ALL[name]
    params = random_tree(0, LEAVES)
    expected, slots = copy(params), optimizer.init(params)
    state = copy(slots)
    run = FusedUpdates(optimizer, {}).bind({p: tuple(slots[p]) for p in LEAVES}, copied=False)
    for step in range(3):
        grads = random_tree(100 + step, LEAVES)
        info = make_info(step, grads, params, scale=None if step == 1 else 0.25)
        optimizer.apply(copy(grads), state, expected, info)
        run({p: [grads[p], params[p], *slots[p].values()] for p in LEAVES}, info)
        assert_close(params, expected)
        assert_close(slots, state)


# ------------------------------------------------------------------ in a step
COMPILED = {"update": "compiled"}  # the rest eager: it is quicker


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("full_shard", {}),
        ("zero2", {"accumulate": 2, "accumulate_mode": "local"}),
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


def test_a_mean_and_its_scale_are_inputs() -> None:
    """What a Mean's count makes of the gradients differs from step to step; so does the rate."""
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
    """Three equal layers."""
    for index in range(3):
        x = torch.tanh(x @ params[f"layers.{index}.w"] + params[f"layers.{index}.b"])
    return x.square().mean()


LAYERS = {
    f"layers.{i}.{n}": torch.randn(4, 4) if n == "w" else torch.zeros(4) for i in range(3) for n in "wb"
}
BF16 = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
MASTER = {**BF16, "storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}


def trained(policy: dict[str, Any], update: str, steps: int = 3) -> tuple[fs.TrainState, list[float], Any]:
    """Some steps of the layers on one rank: the state, losses, and the step."""
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
    _, _, step = trained({}, "compiled", steps=2)
    (leaves,) = step._runner._fused.made
    assert len(leaves) == 2


@pytest.mark.parametrize("update", ["eager", "compiled"])
def test_storage_in_the_compute_dtype_is_the_same_training(update: str) -> None:
    """bf16 storage with an fp32 master: bit for bit what fp32 storage and bf16 compute give, and no casts."""
    wide, losses, first = trained(BF16, update)
    narrow, same, second = trained(MASTER, update)
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
    """The layers' step, lowered on an abstract mesh."""
    mesh = fs.make_mesh(shard=2, abstract=True, device=device)
    step = fs.shard_step(
        lambda params, x: blocks_of(x.to(params["layers.0.w"].dtype), params),
        fs.presets.full_shard(LAYERS, mesh, **MASTER), mesh=mesh, optimizer=adamw(0.1),
        update=update, **options,
    )  # fmt: skip
    return step.lower(LAYERS, torch.zeros(2, 4))


def test_auto_compiles_on_accelerators() -> None:
    """With the backend that compiles."""
    chosen = [
        on_paper("auto", device, backend=backend)._fused_update
        for device in ("cpu", "cuda")
        for backend in ("eager", "inductor")
    ]
    assert chosen == [False, False, False, True]


def test_mistakes() -> None:
    """An option that is none; an optimizer that cannot be compiled, and one that need not be."""
    mesh = fs.make_mesh(shard=1, device="cpu")
    specs = fs.presets.full_shard(LAYERS, mesh)
    with pytest.raises(SpecError, match="update='fast': one of 'auto', 'eager', 'compiled'"):
        fs.shard_step(blocks_of, specs, mesh=mesh, optimizer=adamw(0.1), update="fast")
    own = Optimizer("own()", leaf=lambda path, grad, slots, param, info: (-grad, {}))
    with pytest.raises(OptimizerError, match=r"own\(\) reads more of the step than `numbers`"):
        fs.shard_step(blocks_of, specs, mesh=mesh, optimizer=own, update="compiled")
    fs.shard_step(blocks_of, specs, mesh=mesh, optimizer=chain(own, ema(0.9)), update="auto")
