"""Guards: what `fn` reads beside its arguments may change between steps, and each step is plain torch's."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import logging
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from guarded import PARAMS, SPECS, WIDTH, Fn, X, assert_plain, make, scaled
from torch import Tensor, nn

import fnshard as fs
from fnshard.compiler.ir.guard import guard_of
from fnshard.compiler.ir.reachable import Reachable
from fnshard.compiler.ir.recording import Ran, recorded

# ------------------------------------------------------------------ wherever a number lives

PLACES: dict[str, Callable[[], tuple[Fn, list[Callable[[], None]]]]] = {}
Place = tuple[Fn, list[Callable[[], Any]]]  # a function, and what changes the values it reads


def place(make: Callable[[], Place]) -> Callable[[], Place]:
    PLACES[make.__name__] = make
    return make


@place
def a_dict() -> Place:
    cfg = {"beta": 2.0, "step": 0}
    return lambda p, x: scaled(p, x, cfg["beta"]), [lambda: cfg.update(beta=3.0), lambda: cfg.update(beta=3)]


@place
def all_of_a_dict_a_list_and_a_set() -> Place:
    weights, betas, names = {"a": 2.0, "b": 3.0}, [1.0] * 2000, {"x"}

    def fn(p: Any, x: Tensor) -> Tensor:
        named = 2.0 if "x" in names else 3.0
        return scaled(p, x, sum(v for k, v in weights.items()) + sum(betas) * named)

    return fn, [
        lambda: weights.update(b=5.0), lambda: weights.update(c=1.0), lambda: betas.__setitem__(1500, 4.0),
        lambda: betas.append(1), lambda: names.add("y"), lambda: names.discard("x"),
    ]  # fmt: skip


@place
def a_dict_of_which_one_key_is_named() -> Place:
    weights = {"first": 2.0, "b": 3.0}
    return lambda p, x: scaled(p, x, weights["first"] + sum(weights.values())), [
        lambda: weights.update(b=5.0), lambda: weights.update(c=1.0), lambda: weights.update(first=7.0),
    ]  # fmt: skip


@place
def dicts_in_a_dict_by_other_names() -> Place:
    owner = types.SimpleNamespace(tasks={"first": {"weight": 2.0, "b": 3.0}, "c": {"weight": 1.0}})

    def fn(p: Any, x: Tensor) -> Tensor:
        tasks = owner.tasks
        return scaled(p, x, tasks["first"]["weight"] + sum(v for t in tasks for v in tasks[t].values()))

    return fn, [
        lambda: owner.tasks["first"].update(b=5.0), lambda: owner.tasks["c"].update(d=1.0),
        lambda: owner.tasks.update(e={"f": 4.0}),
    ]  # fmt: skip


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2
    BOTH = 3


class Sentinel:
    pass


@place
def an_enum_and_a_sentinel() -> Place:
    default, other = Sentinel(), Sentinel()
    cfg = {"mode": Mode.FAST, "x": default}

    def fn(p: Any, x: Tensor) -> Tensor:
        return scaled(p, x, (2.0 if cfg["mode"] is Mode.FAST else 3.0) + (cfg["x"] is default))

    return fn, [
        lambda: cfg.update(mode=Mode.EXACT),
        lambda: cfg.update(mode=Mode.BOTH),
        lambda: cfg.update(x=other),
    ]


class Factor:
    def __init__(self, value: float):
        self.value = value

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * self.value


@place
def an_operator_of_ones_own() -> Place:
    factor: Any = Factor(2.0)
    return lambda p, x: scaled(p, x, 1.0) * factor, [lambda: setattr(factor, "value", 3.0)]


@place
def the_backward_of_a_function() -> Place:
    slope = 2.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * slope

    def change() -> None:
        nonlocal slope
        slope = 3.0

    return lambda p, x: Scaled.apply(scaled(p, x, 1.0)), [change]


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
    return trainer.loss, [lambda: setattr(trainer, "beta", 3.0), lambda: setattr(trainer, "gamma", 3.0)]


@place
def a_class_and_a_slot() -> Place:
    class Slotted:
        gamma: ClassVar[float] = 2.0
        __slots__ = ("beta",)

    config = Slotted()
    config.beta = 2.0
    return lambda p, x: scaled(p, x, config.beta * Slotted.gamma), [
        lambda: setattr(config, "beta", 3.0), lambda: setattr(Slotted, "gamma", 3.0)
    ]  # fmt: skip


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

    def fn(p: Any, x: Tensor) -> Tensor:
        return scaled(
            p, x, dataclasses.astuple(config)[0] + sum(vars(names).values()) * names.__dict__["beta"]
        )

    return fn, [lambda: object.__setattr__(config, "beta", 3.0), lambda: setattr(names, "beta", 3.0)]


@place
def an_attribute_of_all_by_a_computed_name() -> Place:
    trainer, name = Trainer(), "be"
    return lambda p, x: scaled(p, x, trainer.__dict__[name + "ta"]), [lambda: setattr(trainer, "beta", 3.0)]


@place
def an_attribute_of_a_function() -> Place:
    def helper(x: Tensor) -> Tensor:
        return x * helper.beta

    helper.beta = 2.0
    return lambda p, x: scaled(p, helper(x), 1.0), [lambda: setattr(helper, "beta", 3.0)]


@place
def what_a_tuple_holds() -> Place:
    beta, cfg = (torch.tensor(2.0, dtype=torch.float64),), {"both": (types.SimpleNamespace(gamma=2.0), 1)}

    def change(value: float) -> None:
        nonlocal beta
        beta = (torch.tensor(value, dtype=torch.float64),)

    return lambda p, x: scaled(p, x, beta[0] * cfg["both"][0].gamma), [
        lambda: change(3.0), lambda: cfg.update(both=(types.SimpleNamespace(gamma=3.0), 1))
    ]  # fmt: skip


class Name(str):
    beta: float


class Pair(tuple):
    beta: float


class Table(dict):
    beta: float


@place
def attributes_of_what_has_builtin_types() -> Place:
    def made(kind: type, beta: float) -> Any:
        value = kind()
        value.beta = beta
        return value

    cfg = {"name": made(Name, 2.0), "pair": made(Pair, 2.0)}
    table, weight = made(Table, 2.0), made(Tensor, 2.0)

    def fn(p: Any, x: Tensor) -> Tensor:
        return scaled(p, x, cfg["name"].beta + cfg["pair"].beta * table.beta * weight.beta)

    return fn, [
        lambda: cfg.update(name=made(Name, 3.0)), lambda: cfg.update(pair=made(Pair, 3.0)),
        lambda: setattr(cfg["name"], "beta", 4.0), lambda: setattr(cfg["pair"], "beta", 4.0),
        lambda: setattr(table, "beta", 3.0), lambda: setattr(weight, "beta", 3.0),
    ]  # fmt: skip


@place
def what_is_not_there_yet() -> Place:
    cfg, names, model = {"beta": 2.0, "other": 0}, types.SimpleNamespace(), nn.Module()

    def fn(p: Any, x: Tensor) -> Tensor:
        both = cfg["beta"] * cfg.get("gamma", 1.0) + getattr(names, "delta", 1.0)
        return scaled(p, x, both + hasattr(model, "drop"))

    def replace_other() -> None:
        del cfg["other"]
        cfg["gamma"] = 3.0

    return fn, [
        replace_other, lambda: cfg.update(gamma=4.0), lambda: setattr(names, "delta", 3.0),
        lambda: setattr(model, "drop", nn.Identity()),
    ]  # fmt: skip


@place
def one_of_two_that_were_one() -> Place:
    first = types.SimpleNamespace(beta=2.0)
    cfg = {"first": first, "second": first}
    return lambda p, x: scaled(p, x, cfg["first"].beta + 2 * cfg["second"].beta), [
        lambda: cfg.update(first=types.SimpleNamespace(beta=3.0), second=types.SimpleNamespace(beta=2.0))
    ]


@place
def weights_of_a_frozen_module() -> Place:
    def weight(value: float) -> nn.Parameter:
        return nn.Parameter(torch.full((WIDTH, WIDTH), value, dtype=torch.float64), requires_grad=False)

    teacher = nn.Linear(WIDTH, WIDTH, bias=False)
    teacher.weight = weight(2.0)
    return lambda p, x: scaled(p, teacher(x), 1.0), [lambda: setattr(teacher, "weight", weight(3.0))]


@place
def variables_of_the_environment() -> Place:
    def fn(p: Any, x: Tensor) -> Tensor:
        both = float(os.environ.get("A_BETA", 2)) + float(os.getenv("A_GAMMA", "1"))
        return scaled(p, x, both + ("A_DELTA" in os.environ))

    def change(name: str, value: str) -> Callable[[], None]:
        return lambda: os.environ.__setitem__(name, value)

    def clear() -> None:
        for name in ("A_BETA", "A_GAMMA", "A_DELTA"):
            del os.environ[name]
        os.environ["A_DELTA"] = "2"  # a program is there for none of them

    return fn, [change("A_BETA", "3"), change("A_GAMMA", "4"), change("A_DELTA", "0"), clear]


@place
def the_level_of_a_logger() -> Place:
    log = logging.getLogger("some.losses")
    log.setLevel(logging.WARNING)
    fn = lambda p, x: scaled(p, x, 2.0 if log.isEnabledFor(logging.DEBUG) else 3.0)  # noqa: E731
    return fn, [lambda: log.setLevel(logging.DEBUG)]


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
def the_globals_of_a_function_it_holds() -> Place:
    names: dict[str, Any] = {"beta": 2.0}
    exec("def times_beta(x):\n    return x * beta", names)
    return lambda p, x: scaled(p, names["times_beta"](x), 1), [lambda: names.update(beta=3.0)]


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
    assert_plain(step, fn)
    with fs.debug.assert_max_compiles(len(changes)) as compiled:
        for change in changes:
            change()
            for _ in range(2):
                assert_plain(step, fn)
        assert len(compiled) == len(changes)
    assert "`fn` reads" in str(compiled)


def test_a_profiler_that_runs_already_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, changes = PLACES["a_method"]()
    profile = lambda *event: None  # noqa: E731
    step = make(fn)
    sys.setprofile(profile)
    try:
        assert_plain(step, fn)
        changes[0]()
        assert_plain(step, fn)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_others_pickle_methods_while_one_traces_and_patches_end_with_the_trace() -> None:
    trainer = Trainer()
    with ThreadPoolExecutor(1) as loader, recorded() as ran:
        kept = getattr, vars
        pickled = [pickle.dumps(trainer.record), loader.submit(pickle.dumps, trainer.record).result()]
        assert kept[0](trainer, "beta") == 2.0
    for each in (pickle.loads(p).__self__ for p in pickled):
        assert kept[0](each, "gamma") == 1.0 and kept[1](each) == vars(trainer)
    assert "beta" in ran.computed and "gamma" not in ran.computed


def test_a_tensor_follows_what_is_written_to_it_and_its_copy_does_not_hold() -> None:
    table = torch.ones(WIDTH, dtype=torch.float64)
    fn = lambda p, x: scaled(p, x, table)  # noqa: E731
    step = make(fn)
    copied = guard_of(fn, Ran(), Reachable(fn, code=True), [table])  # as on another device
    for _ in range(2):
        with fs.debug.assert_max_compiles(1):
            assert_plain(step, fn)
        assert copied.holds()
    table.mul_(3)
    with fs.debug.assert_max_compiles(0):
        assert_plain(step, fn)
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
    assert_plain(step, fn)
    with fs.debug.assert_max_compiles(0):
        for number in range(3):
            trainer.record()
            cfg["step"], cfg["unused"], data[1] = number, 2.0, number
            assert_plain(step, fn)


def test_other_attributes_of_functions_objects_and_loggers_trace_nothing_anew() -> None:
    log, names = logging.getLogger("some.model"), types.SimpleNamespace(beta=2.0, other=0)
    listed = Config(2.0)

    def helper(x: Tensor) -> Tensor:
        return x * names.__dict__.get("beta") * helper.gamma

    def chatty(p: Any, x: Tensor) -> Tensor:
        log.debug("loss")
        return scaled(p, x, len(listed.__dict__))

    helper.gamma, helper.other = 1.0, 0
    for fn in (lambda p, x: scaled(p, helper(x), 1), chatty):
        step = make(fn)
        assert_plain(step, fn)
        with fs.debug.assert_max_compiles(0):
            logging.getLogger("some.other").isEnabledFor(10)
            log.addHandler(handler := logging.NullHandler())
            names.other = helper.other = 1
            assert_plain(step, fn)
            log.removeHandler(handler)


def test_equal_values_in_new_objects_trace_nothing_anew() -> None:
    cfg = {"beta": 0.5, "config": Config(2.0, ("a",)), "table": [1.0, [2.0]]}
    fn = lambda p, x: scaled(p, x, cfg["beta"] * cfg["config"].beta * cfg["table"][1][0])  # noqa: E731
    step = make(fn)
    assert_plain(step, fn)
    with fs.debug.assert_max_compiles(0):
        cfg.update(beta=float("0.5"), config=Config(float("2"), tuple("a")), table=[1.0, [float("2")]])
        assert_plain(step, fn)
    with fs.debug.assert_max_compiles(1) as compiled:
        cfg["table"][1][0] = 3.0
        assert_plain(step, fn)
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
                assert_plain(step, fn)
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
    assert_plain(step, fn)
    forward = fs.shard_forward(fn, SPECS, backend="eager")
    for cfg["beta"] in (1.0, 2.0):
        torch.testing.assert_close(forward(PARAMS, X), fn(PARAMS, X), atol=1e-12, rtol=0)
