"""Guards: what `fn` reads beside its arguments may change between steps, and each step is plain torch's."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, StateError
from fnshard.compiler.ir.guard import computed_names, guard_of
from fnshard.compiler.ir.reachable import Reachable
from fnshard.errors import DebugError

WIDTH = 4
PARAMS = {"w": torch.linspace(-1, 1, WIDTH, dtype=torch.float64)}
SPECS = fs.match_specs(PARAMS, [("*", LayoutSpec())])
X = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
Fn = Callable[[Any, Tensor], Tensor]


def truth(fn: Fn, params: dict[str, Tensor], *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {p: v.detach().clone().requires_grad_() for p, v in params.items()}
    loss = fn(leaves, *batch)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_true(step: Any, fn: Fn, params: dict[str, Tensor] = PARAMS, *batch: Any) -> None:
    """The step's loss and gradients are plain autograd's, now."""
    batch = batch or (X,)
    torch.testing.assert_close(step(params, *batch), truth(fn, params, *batch), atol=1e-12, rtol=0)


def make(fn: Fn, **options: Any) -> Any:
    return fs.shard_step(fn, SPECS, backend="eager", **options)


# ------------------------------------------------------------------ wherever a number lives

PLACES: dict[str, Callable[[], tuple[Fn, list[Callable[[], None]]]]] = {}
Place = tuple[Fn, list[Callable[[], Any]]]  # a function, and what changes the values it reads


def place(make: Callable[[], Place]) -> Callable[[], Place]:
    PLACES[make.__name__] = make
    return make


def scaled(p: Any, x: Tensor, scale: Any) -> Tensor:
    return (p["w"] * x * scale).square().sum()


@place
def a_dict() -> Place:
    cfg = {"beta": 2.0, "step": 0}
    return lambda p, x: scaled(p, x, cfg["beta"]), [lambda: cfg.update(beta=3.0), lambda: cfg.update(beta=3)]


@place
def a_dict_by_computed_keys() -> Place:
    weights = {"a": 2.0, "b": 3.0}
    return lambda p, x: scaled(p, x, sum(v for k, v in weights.items())), [
        lambda: weights.update(b=5.0), lambda: weights.update(c=1.0)
    ]  # fmt: skip


@place
def a_list() -> Place:
    betas = [1.0, 2.0]
    return lambda p, x: scaled(p, x, sum(betas)), [lambda: betas.__setitem__(1, 4.0), lambda: betas.append(1)]


@place
def a_set() -> Place:
    names = {"a"}
    return lambda p, x: scaled(p, x, 2.0 if "a" in names else 3.0), [
        lambda: names.add("b"), lambda: names.discard("a")
    ]  # fmt: skip


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2
    BOTH = 3


@place
def an_enum() -> Place:
    cfg = {"mode": Mode.FAST}
    return lambda p, x: scaled(p, x, 2.0 if cfg["mode"] is Mode.FAST else 3.0), [
        lambda: cfg.update(mode=Mode.EXACT), lambda: cfg.update(mode=Mode.BOTH)
    ]  # fmt: skip


class Sentinel:
    pass


@place
def a_sentinel() -> Place:
    default, other = Sentinel(), Sentinel()
    cfg = {"x": default}
    return lambda p, x: scaled(p, x, 2.0 if cfg["x"] is default else 3.0), [lambda: cfg.update(x=other)]


@place
def a_rebound_class() -> Place:
    kind: Any = nn.ReLU

    def change(value: Any) -> None:
        nonlocal kind
        kind = value

    return lambda p, x: scaled(p, kind()(x - 1.5), 2.0), [lambda: change(nn.GELU)]


@place
def a_nonlocal() -> Place:
    beta: Any = 2.0

    def change(value: Any) -> None:
        nonlocal beta
        beta = value

    return lambda p, x: scaled(p, x, beta), [lambda: change(3.0), lambda: change(True)]


BETA: Any = 2.0


@place
def a_global_of_a_helper() -> Place:
    def helper(x: Tensor) -> Tensor:
        return x if BETA is None else x * BETA

    def change(value: Any) -> None:
        global BETA
        BETA = value

    change(2.0)
    return lambda p, x: scaled(p, helper(x), 1), [lambda: change(None), lambda: change(5.0)]


@place
def a_module() -> Place:
    config = types.ModuleType("config")
    config.beta = 2.0
    return lambda p, x: scaled(p, x, config.beta), [lambda: setattr(config, "beta", 3.0)]


class Trainer:
    gamma = 1.0

    def __init__(self) -> None:
        self.beta, self.steps, self.history = 2.0, 0, list[float]()

    def loss(self, p: Any, x: Tensor) -> Tensor:
        return scaled(p, x, self.beta * self.gamma)

    def record(self) -> None:
        self.steps += 1
        self.history.append(self.beta)


@place
def a_method() -> Place:
    trainer = Trainer()
    return trainer.loss, [lambda: setattr(trainer, "beta", 3.0)]


@place
def a_default_of_a_class() -> Place:
    trainer = Trainer()
    return trainer.loss, [lambda: setattr(trainer, "gamma", 3.0)]


@place
def a_class() -> Place:
    class Config:
        beta: ClassVar[float] = 2.0

    return lambda p, x: scaled(p, x, Config.beta), [lambda: setattr(Config, "beta", 3.0)]


@place
def a_slot() -> Place:
    class Config:
        __slots__ = ("beta",)

    config = Config()
    config.beta = 2.0
    return lambda p, x: scaled(p, x, config.beta), [lambda: setattr(config, "beta", 3.0)]


@dataclasses.dataclass(frozen=True)
class Config:
    beta: float
    names: tuple[str, ...] = ()


@place
def a_frozen_config() -> Place:
    config = Config(2.0)

    def change(value: Config) -> None:
        nonlocal config
        config = value

    return lambda p, x: scaled(p, x, config.beta + len(config.names)), [
        lambda: change(Config(3.0)), lambda: change(Config(3.0, ("a", "b")))
    ]  # fmt: skip


@place
def a_partial() -> Place:
    fn = functools.partial(lambda p, x, cfg: scaled(p, x, cfg["beta"]), cfg={"beta": 2.0})
    return fn, [lambda: fn.keywords["cfg"].update(beta=3.0)]


@place
def a_function_in_a_dict() -> Place:
    chosen = {"act": torch.tanh}
    return lambda p, x: scaled(p, chosen["act"](x), 1), [lambda: chosen.update(act=torch.relu)]


@place
def a_tensor_rebound() -> Place:
    cfg: dict[str, Any] = {"table": torch.full((WIDTH,), 2.0)}
    return lambda p, x: scaled(p, x, cfg["table"]), [
        lambda: cfg.update(table=torch.full((WIDTH,), 3.0)), lambda: cfg.update(table=1.0)
    ]  # fmt: skip


@place
def a_long_list() -> Place:
    weights = [1.0] * 2000
    return lambda p, x: scaled(p, x, sum(weights)), [lambda: weights.__setitem__(1500, 3.0)]


@place
def an_array() -> Place:
    weights = np.ones(8 << 10)  # 64 KB
    return lambda p, x: scaled(p, x, float(weights.sum())), [lambda: weights.__setitem__(1, 3.0)]


@place
def an_attribute_by_a_computed_name() -> Place:
    trainer, name = Trainer(), "be"
    return lambda p, x: scaled(p, x, getattr(trainer, name + "ta")), [lambda: setattr(trainer, "beta", 3.0)]


@place
def all_attributes() -> Place:
    config, names = Config(2.0), types.SimpleNamespace(beta=1.0)
    return lambda p, x: scaled(p, x, dataclasses.astuple(config)[0] + sum(vars(names).values())), [
        lambda: object.__setattr__(config, "beta", 3.0), lambda: setattr(names, "beta", 3.0)
    ]  # fmt: skip


@place
def a_dict_of_attributes() -> Place:
    names = types.SimpleNamespace(beta=1.0)
    return lambda p, x: scaled(p, x, sum(names.__dict__.values())), [lambda: setattr(names, "beta", 3.0)]


@place
def an_optimizers_rate() -> Place:
    optimizer = torch.optim.SGD([nn.Parameter(X)], lr=2.0)
    return lambda p, x: scaled(p, x, optimizer.param_groups[0]["lr"]), [
        lambda: optimizer.param_groups[0].update(lr=3.0)
    ]


@place
def a_value_of_the_context() -> Place:
    beta, here = contextvars.ContextVar("beta", default=2.0), threading.local()
    here.beta = 1.0
    return lambda p, x: scaled(p, x, beta.get() * here.beta), [
        lambda: beta.set(3.0), lambda: setattr(here, "beta", 3.0)
    ]  # fmt: skip


def doubled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


@place
def a_function() -> Place:
    def change() -> None:
        global doubled
        doubled = lambda x: x * 3.0  # noqa: E731

    original = doubled
    return lambda p, x: scaled(p, doubled(x), 1), [
        lambda: setattr(original, "__defaults__", (4.0,)),
        lambda: setattr(original, "__code__", (lambda x, by=0: x * by * 2).__code__),
        change,
    ]


@place
def a_method_of_one_module() -> Place:
    module = nn.Tanh()
    apply, params = fs.make_functional(module)
    return lambda p, x: scaled(p, apply(params, x), 1), [lambda: setattr(module, "forward", torch.relu)]


@pytest.mark.filterwarnings("ignore:`fn` reads")
@pytest.mark.parametrize("name", PLACES)
def test_a_step_reads_what_is_there_now(name: str) -> None:
    fn, changes = PLACES[name]()
    step = make(fn)
    assert_true(step, fn)
    with fs.debug.assert_max_compiles(len(changes)) as compiled:
        for change in changes:
            change()
            for _ in range(2):
                assert_true(step, fn)
        assert len(compiled) == len(changes)
    assert "`fn` reads" in str(compiled)


def test_a_profiler_that_runs_already_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, changes = PLACES["a_method"]()
    profile = lambda *event: None  # noqa: E731
    step = make(fn)
    sys.setprofile(profile)
    try:
        assert_true(step, fn)
        changes[0]()
        assert_true(step, fn)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_others_pickle_methods_while_one_traces_and_patches_end_with_the_trace() -> None:
    trainer = Trainer()
    with ThreadPoolExecutor(1) as loader, computed_names() as names:
        kept = getattr, vars
        pickled = [pickle.dumps(trainer.record), loader.submit(pickle.dumps, trainer.record).result()]
        assert kept[0](trainer, "beta") == 2.0
    for each in (pickle.loads(p).__self__ for p in pickled):
        assert kept[0](each, "gamma") == 1.0 and kept[1](each) == vars(trainer)
    assert names == {"beta"}


def test_a_tensor_follows_what_is_written_to_it_and_its_copy_does_not_hold() -> None:
    table = torch.ones(WIDTH, dtype=torch.float64)
    fn = lambda p, x: scaled(p, x, table)  # noqa: E731
    step = make(fn)
    copied = guard_of(fn, set(), set(), Reachable(fn, code=True), [table])  # as on another device
    for _ in range(2):
        with fs.debug.assert_max_compiles(1):
            assert_true(step, fn)
        assert copied.holds()
    table.mul_(3)
    with fs.debug.assert_max_compiles(0):
        assert_true(step, fn)
    assert [name for name, _, _ in copied.changes()] == ["table._version"]


# ------------------------------------------------------------------ what does not count


def test_what_fn_does_not_read_traces_nothing_anew() -> None:
    trainer, cfg = Trainer(), {"beta": 2.0, "step": 0, "unused": 1.0}
    data = np.ones(9 << 10)  # more than 64 KB

    def unused() -> float:
        return cfg["unused"]

    def fn(p: Any, x: Tensor) -> Tensor:
        if trainer.beta is None:
            trainer.record()
            unused()
        return trainer.loss(p, x) * cfg["beta"] * data[0]

    step = make(fn)
    assert_true(step, fn)
    with fs.debug.assert_max_compiles(0):
        for number in range(3):
            trainer.record()
            cfg["step"], cfg["unused"], data[1] = number, 2.0, number
            assert_true(step, fn)


def test_equal_values_in_new_objects_trace_nothing_anew() -> None:
    cfg = {"beta": 0.5, "config": Config(2.0, ("a",)), "table": [1.0, [2.0]]}
    fn = lambda p, x: scaled(p, x, cfg["beta"] * cfg["config"].beta * cfg["table"][1][0])  # noqa: E731
    step = make(fn)
    assert_true(step, fn)
    with fs.debug.assert_max_compiles(0):
        cfg.update(beta=float("0.5"), config=Config(float("2"), tuple("a")), table=[1.0, [float("2")]])
        assert_true(step, fn)
    with fs.debug.assert_max_compiles(1) as compiled:
        cfg["table"][1][0] = 3.0
        assert_true(step, fn)
    assert "cfg['table'][1][0] from 2.0 to 3.0" in str(compiled)


def test_what_fn_writes_itself_is_its_own() -> None:
    seen: dict[str, Any] = {"calls": 0, "shapes": []}

    def fn(p: Any, x: Tensor) -> Tensor:
        seen["calls"] += 1
        seen["shapes"].append(x.shape)
        return (p["w"] * x).sum()

    step = make(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(PARAMS, X)
            step(PARAMS, torch.stack([X, X]))
    assert seen["calls"] == 2


def test_programs_are_kept_and_forgotten_like_batches() -> None:
    cfg = {"beta": 1.0}
    fn = lambda p, x: scaled(p, x, cfg["beta"])  # noqa: E731
    step = make(fn, cache=2)

    def run(*betas: float) -> int:
        with fs.debug.assert_max_compiles(9) as compiled:
            for cfg["beta"] in betas:
                assert_true(step, fn)
        return len(compiled)

    assert run(1.0, 2.0, 1.0, 2.0) == 2
    with pytest.warns(UserWarning, match="reads 1 value"):
        assert run(3.0, 2.0, 1.0) == 2


def test_a_program_on_paper_is_for_the_values_it_was_lowered_with() -> None:
    cfg = {"beta": 1.0}
    fn = lambda p, x: scaled(p, x, cfg["beta"])  # noqa: E731
    step = make(fn)
    step.lower(PARAMS, X)
    cfg["beta"] = 2.0
    assert_true(step, fn)
    forward = fs.shard_forward(fn, SPECS, backend="eager")
    for cfg["beta"] in (1.0, 2.0):
        torch.testing.assert_close(forward(PARAMS, X), fn(PARAMS, X), atol=1e-12, rtol=0)


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


def step_of(params: dict[str, Tensor], fn: Fn) -> Any:
    return fs.shard_step(fn, fs.match_specs(params, [("*", LayoutSpec())]), backend="eager")


def test_train_and_eval_count_when_they_are_called() -> None:
    model, params, fn = model_and_loss()
    step = step_of(params, fn)
    noisy = step(params, X, rng=(0, 0))[0]
    model.eval()
    assert_true(step, fn, params)
    with fs.debug.assert_max_compiles(0), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.train()
            assert step(params, X, rng=(0, 0))[0] == noisy
            assert step(params, X, rng=(0, 1))[0] != noisy
            model.eval()
            assert_true(step, fn, params)
    model[1].drop.train()
    with fs.debug.assert_max_compiles(1) as compiled:
        assert step(params, X)[0] != truth(fn, params, X)[0]
    assert "model.1.drop.training from False to True" in str(compiled)


def test_train_and_eval_of_modules_that_do_not_ask_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    apply, params = fs.make_functional(model)
    fn = lambda p, x: apply(p, x).sum()  # noqa: E731
    step = step_of(params, fn)
    assert_true(step, fn, params)
    with fs.debug.assert_max_compiles(0):
        model.eval()
        assert_true(step, fn, params)


def test_attributes_and_submodules_of_a_module_count() -> None:
    model, params, fn = model_and_loss()
    model.eval()
    step = step_of(params, fn)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model[1], "beta", 2.0),
        lambda: setattr(model[0], "drop", nn.Tanh()),
        lambda: setattr(model[0].norm, "eps", 0.1),
    ]
    assert_true(step, fn, params)
    for change in changes:
        change()
        assert_true(step, fn, params)


def test_buffers_of_a_module_that_fn_closes_over_count() -> None:
    table = nn.Module()
    table.register_buffer("beta", torch.tensor(2.0, dtype=torch.float64))
    fn = lambda p, x: scaled(p, x, table.beta)  # noqa: E731
    step = make(fn)
    assert_true(step, fn)
    table.beta = torch.tensor(3.0, dtype=torch.float64)
    assert_true(step, fn)


def test_a_guard_costs_little() -> None:
    _, params, fn = model_and_loss(blocks=12)
    lowered = step_of(params, fn).lower(params, X)
    guard = lowered.program.guard
    assert guard.holds() and len(guard.entries) < 30 * 12  # microseconds: see the docstring of `guard`


# ------------------------------------------------------------------ what a user is told


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ((2, 3), r"batch\['1.m'\] from 2 to 3\. Pass a tensor as batch\['1.m'\], torch.tensor\(3\)"),
        (("a", "b"), r"batch\['1.m'\] from 'a' to 'b'\. Take batch\['1.m'\] out of the batch: each str"),
        ((X, torch.stack([X, X])), r"from \[4\] torch.float64 to \[2, 4\] torch.float64\. Pad batches"),
        ((None, X), r"from None to \[4\] torch.float64\. Give all batches the same leaves"),
    ],
)
def test_a_batch_that_is_compiled_anew_says_which_leaf_and_what_to_do(values: Any, advice: str) -> None:
    step = make(lambda p, x, rest: scaled(p, x, 1 if isinstance(rest["m"], str | None) else rest["m"]))
    step(PARAMS, X, {"m": values[0]})
    with pytest.warns(UserWarning, match=advice):
        step(PARAMS, X, {"m": values[1]})


def test_a_value_that_changes_at_every_step_is_named_once() -> None:
    cfg, trainer = {"beta": 0.1, "gamma": 1.0}, Trainer()
    fn = lambda p, x: trainer.loss(p, x) * cfg["beta"] * cfg["gamma"]  # noqa: E731
    step = make(fn)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for number in range(5):
            cfg["beta"], trainer.beta = 0.1 * number, max(number, 3)
            assert_true(step, fn)
    assert len(heard) == 1
    text = str(heard[0].message)
    assert "cfg['beta'] was 0.0, 0.1, 0.2" in text
    assert "pass it as a tensor in the batch" in text
    assert "gamma" not in text
    assert heard[0].filename == __file__


def test_a_count_of_compiles_names_the_value() -> None:
    fn, (change, *_) = PLACES["a_nonlocal"]()
    step = make(fn)
    with (
        pytest.raises(DebugError, match=r"`fn` reads beta from 2\.0 to 3\.0"),
        fs.debug.assert_max_compiles(1),
    ):
        step(PARAMS, X)
        change()
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
