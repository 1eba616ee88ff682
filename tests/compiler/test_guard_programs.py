"""Guards of modules and batches: what is compiled again, how often, and the messages that say so."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from guarded import PARAMS, WIDTH, Fn, X, assert_plain, make, scaled
from torch import Tensor, nn
from toys import plain_grads, step_of

import fnshard as fs
from fnshard import LayoutSpec, StateError
from fnshard.compiler.ir.reachable import Reachable
from fnshard.errors import DebugError

# ------------------------------------------------------------------ modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.beta = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x)))) * self.beta


def model_and_loss(blocks: int = 2) -> tuple[nn.Module, dict[str, Tensor], Fn]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)]).double()
    apply, params = fs.make_functional(model)
    return model, params, lambda p, x: apply(p, x).square().mean()


def test_train_and_eval_count_when_they_are_called() -> None:
    model, params, fn = model_and_loss()
    step = step_of(fn, params)
    noisy = step(params, X, rng=(0, 0))[0]
    model.eval()
    assert_plain(step, fn, params)
    with fs.debug.assert_max_compiles(0), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.train()
            assert step(params, X, rng=(0, 0))[0] == noisy
            assert step(params, X, rng=(0, 1))[0] != noisy
            model.eval()
            assert_plain(step, fn, params)
    model[1].drop.train()
    with fs.debug.assert_max_compiles(1) as compiled:
        assert step(params, X)[0] != plain_grads(fn, params, X)[0]
    assert "model.1.drop.training from False to True" in str(compiled)


def test_train_and_eval_of_modules_that_do_not_ask_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    apply, params = fs.make_functional(model)
    fn = lambda p, x: apply(p, x).sum()  # noqa: E731
    step = step_of(fn, params)
    assert_plain(step, fn, params)
    with fs.debug.assert_max_compiles(0):
        model.eval()
        assert_plain(step, fn, params)


def test_attributes_and_submodules_of_a_module_count() -> None:
    model, params, fn = model_and_loss()
    model.eval()
    step = step_of(fn, params)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model[1], "beta", 2.0),
        lambda: setattr(model[0], "drop", nn.Tanh()),
        lambda: setattr(model[0].norm, "eps", 0.1),
    ]
    assert_plain(step, fn, params)
    for change in changes:
        change()
        assert_plain(step, fn, params)


def test_buffers_of_a_module_that_fn_closes_over_count() -> None:
    table = nn.Module()
    table.register_buffer("beta", torch.tensor(2.0, dtype=torch.float64))
    fn = lambda p, x: scaled(p, x, table.beta)  # noqa: E731
    step = make(fn)
    assert_plain(step, fn)
    table.beta = torch.tensor(3.0, dtype=torch.float64)
    assert_plain(step, fn)


def test_a_guard_costs_little() -> None:
    _, params, fn = model_and_loss(blocks=12)
    lowered = step_of(fn, params).lower(params, X)
    guard = lowered.program.guard
    assert guard.holds() and len(guard.entries) < 42 * 12  # microseconds: see the docstring of `guard`


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ((X, torch.stack([X, X])), r"from \[4\] torch.float64 to \[2, 4\] torch.float64\. Pad batches"),
        ((None, X), r"from None to \[4\] torch.float64\. Give all batches the same leaves"),
    ],
)
def test_a_batch_that_is_compiled_anew_says_which_leaf_and_what_to_do(values: Any, advice: str) -> None:
    def fn(p: Any, x: Tensor, rest: Any) -> Tensor:
        return scaled(p, x, 1 if rest["m"] is None else rest["m"])

    step = make(fn)
    step(PARAMS, X, {"m": values[0]})
    with pytest.warns(UserWarning, match=advice):
        step(PARAMS, X, {"m": values[1]})


def test_a_value_that_changes_at_every_step_is_named_once() -> None:
    cfg, trainer = {"beta": 0.1, "gamma": 1.0}, types.SimpleNamespace(beta=2.0)
    fn = lambda p, x: scaled(p, x, trainer.beta) * cfg["beta"] * cfg["gamma"]  # noqa: E731
    step = make(fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            cfg["beta"], trainer.beta = 0.1 * number, max(number, 3)
            torch.testing.assert_close(step(PARAMS, X), plain_grads(fn, PARAMS, X))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "cfg['beta'] was 0.0, 0.1, 0.2" in text
    assert "pass a tensor in the batch" in text
    assert "gamma" not in text
    assert caught[0].filename == __file__


def test_a_count_of_compiles_names_the_value() -> None:
    beta = 2.0
    step = make(lambda p, x: scaled(p, x, beta))
    with (
        pytest.raises(DebugError, match=r"`fn` reads beta from 2\.0 to 3\.0"),
        fs.debug.assert_max_compiles(1),
    ):
        step(PARAMS, X)
        beta = 3.0
        step(PARAMS, X)


def test_a_value_must_not_change_the_collectives() -> None:
    params = {"a": torch.ones(4), "b": torch.ones(4)}
    mesh = fs.make_mesh(shard=2, simulated=True)
    cfg = {"both": True}
    fn = lambda p, x: (p["a"] * x).sum() + ((p["b"] * x).sum() if cfg["both"] else 0)  # noqa: E731
    specs = fs.match_specs(params, [("*", LayoutSpec(fs.P("shard")))])
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        return step(step.init(params), torch.ones(4))

    fs.simulate(mesh, run)
    cfg["both"] = False
    with pytest.raises(StateError, match=r"(?s)a value that `fn` reads.*cfg\['both'\] from True to False"):
        fs.simulate(mesh, run)


def test_simulated_ranks_trace_a_changed_value_once() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    params, cfg = {"w": torch.ones(4)}, {"beta": 1.0}
    fn = lambda p, x: (p["w"] * x).sum() * cfg["beta"]  # noqa: E731
    step = fs.shard_step(
        fn, fs.match_specs(params, [("*", LayoutSpec(fs.P("shard")))]), mesh=mesh, backend="eager"
    )
    with fs.debug.assert_max_compiles(2) as compiled:
        for cfg["beta"] in (1.0, 2.0):
            losses = fs.simulate(mesh, lambda rank: step(step.init(params), torch.ones(4))[0])
            assert [float(x) for x in losses] == [4 * cfg["beta"]] * 2
        assert len(compiled) == 2


def test_an_assert_of_a_function_reaches_nothing_of_pytest() -> None:
    """Pytest has rewritten the assert below: it names a module from which a whole session can be reached."""

    def fn(x: Tensor) -> Tensor:
        assert x is not None
        return x

    owners = [c.owner for c in Reachable(fn, code=True).containers.values()]
    assert [o for o in owners if isinstance(o, ModuleType)] == []
