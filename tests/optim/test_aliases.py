"""Updates whose results are memory of what they were given: on each mesh what plain torch computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard.errors import OptimizerError
from fnshard.optim import Optimizer, Step, adamw, apply_updates, init_slots


def keep(names: str, update: Any) -> Optimizer:
    """Make an optimizer whose slots of these names are zero at first."""
    init = lambda path, param: {name: torch.zeros_like(param) for name in names.split()}  # noqa: E731
    return Optimizer(f"keeps {names}", init, update, rules=())


def previous(path, grad, slots, param, step):
    return -0.1 * grad + 0.1 * (param - slots["prev"]), {"prev": param}


def history(path, grad, slots, param, step):
    return -0.1 * slots["h1"] - 0.05 * grad, {"h0": grad, "h1": slots["h0"]}


def swap(path, grad, slots, param, step):
    return -0.1 * grad - 0.1 * slots["a"] + 0.01 * grad.norm(), {"a": slots["b"] + grad, "b": slots["a"]}


def view(path, grad, slots, param, step):
    flat = slots["m"].view(-1) * grad.norm()
    return -0.1 * grad - 0.01 * flat.view_as(param), {"m": slots["m"].lerp(grad, 0.5)}


def chooses(path, grad, slots, param, step):
    return torch.where(step.count < 2, -0.1 * grad, -0.2 * grad), {}


def reset(path, grad, slots, param, step):
    factor = step.host(lambda count: float(int(count) % 3 != 0))
    return ADAMW.update(path, grad, {n: v * factor for n, v in slots.items()}, param, step)


def seen(path, grad, slots, param, step):
    own = {n: slots[n] for n in ("mu", "nu")}
    update, new = ADAMW.update(path, grad * step.host(lambda count: 0.5), own, param, step)
    return update, {**new, "seen": slots["seen"].lerp(grad, 0.5)}


def ahead(path, grad, slots, param, step):
    own = {n: slots[n] for n in ("mu", "nu")}
    update, new = ADAMW.update(path, grad, own, param, step)
    return update, {**new, "far": torch.add(param, update, alpha=2)}


def rounded(path, grad, slots, param, step):
    update, new = ADAMW.update(path, grad, slots, param, step)
    return update.bfloat16().to(param.dtype), new


ADAMW = adamw(1e-2)
UPDATES = {
    "prev": previous, "h0 h1": history, "a b": swap, "m": view, "": chooses, "mu nu": reset,
    "mu nu seen": seen, "mu nu far": ahead, "nu mu": rounded,
}  # fmt: skip
PARAMS = {"w": torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6), "b": torch.ones(3).double()}
X = torch.linspace(-2, 2, 48, dtype=torch.float64).view(8, 6).sin()


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"].T).square().mean() + params["b"].square().sum()


def train_whole(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    params, slots = PARAMS, init_slots(optimizer, PARAMS)
    for count in range(4):
        own = {path: param.clone().requires_grad_() for path, param in params.items()}
        grads = dict(zip(own, torch.autograd.grad(loss_fn(own, X), [*own.values()]), strict=True))
        params, slots = apply_updates(optimizer, grads, slots, params, Step(torch.tensor(count)))
    return params, slots


def train_on(
    mesh: fs.Mesh, optimizer: Optimizer, _: int = 0, update: str = "eager", slots: Any = None
) -> dict[str, Tensor]:
    """Train four steps; `slots` is given the state of this rank."""
    specs = fs.presets.full_shard(PARAMS, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, backend="eager", update=update)
    state = step.init(PARAMS)
    for _ in range(4):
        state, _ = step(state, X)
    if slots is not None:
        slots.update(state.opt_state)
    return fs.unshard(state.params, specs, mesh)


@pytest.mark.parametrize("names", UPDATES)
def test_a_result_that_is_memory_of_an_input_is_what_it_was(names: str) -> None:
    optimizer, two = keep(names, UPDATES[names]), fs.make_mesh(shard=2, simulated=True)
    one, slots = fs.make_mesh(shard=1), {}
    trained = [train_on(one, optimizer, slots=slots)]
    expected, expected_slots = train_whole(optimizer)
    torch.testing.assert_close(slots, expected_slots, rtol=1e-10, atol=1e-10)
    trained += fs.simulate(two, partial(train_on, two, optimizer))
    if names in ("h0 h1", ""):  # compiled: slots that are handed on, and a number that is a truth value
        trained.append(train_on(fs.make_mesh(shard=1), optimizer, update="compiled"))
    for params in trained:
        torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-10)


def test_a_short_dtype_is_scaled_before_it_overflows() -> None:
    params = {"w": torch.ones(4, 4, dtype=torch.float16)}
    mesh = fs.make_mesh(shard=1)
    dtypes = {"compute_dtype": torch.float32, "reduce_dtype": torch.float32, "optimizer_dtype": torch.float16}
    specs = fs.presets.full_shard(params, mesh, **dtypes)
    loss = lambda p, x: p["w"].square().sum() * x  # noqa: E731
    step = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=adamw(1e-2), loss_scale=2.0**16, backend="eager"
    )  # fmt: skip
    state, _ = step(step.init(params), torch.ones(()))
    assert bool(state.params["w"].isfinite().all())


def test_a_slot_is_not_called_as_the_master_copy_is() -> None:
    optimizer = keep("master", lambda path, grad, slots, param, step: (-grad, {}))
    with raises(OptimizerError, leaves="'master' of params['w']"):
        train_on(fs.make_mesh(shard=1), optimizer)
