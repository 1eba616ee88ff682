"""Guards: what `fn` reads besides its arguments may change between steps, and each step is plain torch's."""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
import torch
from guarded import PARAMS, WIDTH, Fn, X, assert_plain, make, scaled
from torch import Tensor, nn
from toys import plain_grads, step_of, traces

import fnshard as fs
from fnshard.compiler.ir.guard import MEMBERS, Guard, Reachable
from fnshard.step.programs import lines

# ------------------------------------------------------------------ what is compared: a row a kind

Change = tuple[str, Callable[[], Any]]  # the path that is named, and what changes the value
Row = tuple[Fn, list[Change]]
ROWS: dict[str, Callable[[], Row]] = {}


def row(make: Callable[[], Row]) -> Callable[[], Row]:
    ROWS[make.__name__] = make
    return make


@row
def a_cell() -> Row:
    beta: Any = 2.0

    def change(value: Any) -> Callable[[], None]:
        def run() -> None:
            nonlocal beta
            beta = value

        return run

    fn = lambda p, x: scaled(p, x, 1.0 if beta is None else beta)  # noqa: E731
    return fn, [("beta", change(3.0)), ("beta", change(True)), ("beta", change(None))]


BETA: Any = 2.0


@row
def a_global_that_a_helper_reads() -> Row:
    def helper(x: Tensor) -> Tensor:
        return x if BETA is None else x * BETA

    def change(value: Any) -> Callable[[], None]:
        return lambda: globals().update(BETA=value)

    change(2.0)()
    return lambda p, x: scaled(p, helper(x), 1), [("BETA", change(None)), ("BETA", change(5.0))]


def doubled(x: Tensor, by: float = 2.0, *, twice: float = 1.0) -> Tensor:
    return x * by * twice


@row
def a_function_its_defaults_and_its_code() -> Row:
    original, code = doubled, (lambda x, by=0, *, twice=1.0: x * by * 2).__code__
    return lambda p, x: scaled(p, doubled(x), 1), [
        ("doubled.__defaults__[0]", lambda: setattr(original, "__defaults__", (4.0,))),
        ("doubled.__kwdefaults__['twice']", lambda: original.__kwdefaults__.update(twice=2.0)),
        ("doubled.__code__", lambda: setattr(original, "__code__", code)),
        ("doubled", lambda: globals().update(doubled=lambda x: x * 3.0)),
    ]


@row
def arguments_of_a_partial() -> Row:
    fn = functools.partial(lambda p, x, cfg: scaled(p, x, cfg["beta"]), cfg={"beta": 2.0})
    return fn, [("fn.keywords['cfg']['beta']", lambda: fn.keywords["cfg"].update(beta=3.0))]


@row
def members_of_containers() -> Row:
    cfg, betas, names, queue = {"a": 2.0, "b": 3.0}, [1.0, [2.0]], {"x"}, deque([1.0])

    def fn(p: Any, x: Tensor) -> Tensor:
        numbers = sum(cfg.values()) + betas[0] + sum(betas[1]) + sum(queue)
        return scaled(p, x, numbers * (2.0 if "x" in names else 3.0))

    return fn, [
        ("cfg['b']", lambda: cfg.update(b=5.0)), ("cfg['c']", lambda: cfg.update(c=1.0)),
        ("cfg['a']", lambda: cfg.pop("a")), ("betas[1][0]", lambda: betas[1].__setitem__(0, 4.0)),
        ("betas[1][1]", lambda: betas[1].append(1.0)), ("names['y']", lambda: names.add("y")),
        ("names['x']", lambda: names.discard("x")), ("queue[1]", lambda: queue.append(3.0)),
    ]  # fmt: skip


@row
def the_length_of_a_long_container() -> Row:
    betas = [1.0] * (MEMBERS + 1)
    return lambda p, x: scaled(p, x, len(betas)), [("len(betas)", lambda: betas.append(1.0))]


class Trainer:
    gamma = 1.0

    def __init__(self) -> None:
        self.beta, self.steps, self.history = 2.0, 0, list[float]()

    def loss(self, p: Any, x: Tensor) -> Tensor:
        return scaled(p, x, self.beta * self.gamma)

    def record(self) -> None:
        self.steps += 1
        self.history.append(self.beta)


@row
def attributes_of_an_object_and_its_class() -> Row:
    trainer = Trainer()
    return trainer.loss, [
        ("self.beta", lambda: setattr(trainer, "beta", 3.0)),
        ("Trainer.gamma", lambda: setattr(Trainer, "gamma", Trainer.gamma + 1)),
        ("self.gamma", lambda: setattr(trainer, "gamma", 5.0)),
    ]


@row
def one_of_two_that_were_one() -> Row:
    first = {"beta": 2.0}
    cfg = {"first": first, "second": first}
    change = lambda: cfg.update(first={"beta": 3.0}, second={"beta": 2.0})  # noqa: E731
    return lambda p, x: scaled(p, x, cfg["first"]["beta"] + 2 * cfg["second"]["beta"]), [
        ("cfg['first']['beta']", change)
    ]


@row
def a_python_module() -> Row:
    config = types.ModuleType("config")
    config.beta = 2.0
    return lambda p, x: scaled(p, x, config.beta), [("config.beta", lambda: setattr(config, "beta", 3.0))]


@row
def a_tensor_rebound() -> Row:
    cfg: dict[str, Any] = {"table": torch.full((WIDTH,), 2.0)}
    return lambda p, x: scaled(p, x, cfg["table"]), [
        ("cfg['table']", lambda: cfg.update(table=torch.full((WIDTH,), 3.0))),
        ("cfg['table']", lambda: cfg.update(table=1.0)),
    ]


@row
def the_data_of_a_tensor() -> Row:
    teacher = nn.Linear(WIDTH, WIDTH, bias=False).double().requires_grad_(False)

    def vector() -> None:
        nn.utils.vector_to_parameters(torch.rand(WIDTH**2).double(), teacher.parameters())

    def assign(value: Tensor) -> None:
        teacher.weight.data = value

    return lambda p, x: scaled(p, teacher(x.to(teacher.weight.dtype)).double(), 1.0), [
        ("teacher.weight.data_ptr", lambda: assign(teacher.weight * 2)), ("teacher.weight.data_ptr", vector),
        ("teacher.weight.data_ptr", lambda: teacher.weight.set_(torch.rand(WIDTH, WIDTH).double())),
        ("teacher.weight.dtype", teacher.float),
        ("teacher.weight.shape", lambda: assign(torch.ones(1, WIDTH))),
    ]  # fmt: skip


class Settings(pydantic.BaseModel):  # its class holds stand-ins, whose attributes raise when they are read
    beta: float = 2.0


@row
def objects_whose_attributes_raise() -> Row:
    class Slotted:
        __slots__ = ("absent", "beta")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    class Strict:
        beta = 2.0

        def __getattribute__(self, name: str) -> Any:
            return {"beta": type(self).beta}[name]

    slotted, strict, settings = Slotted(), Strict(), Settings()
    slotted.beta = 2.0
    return lambda p, x: scaled(p, x, slotted.beta * strict.beta * settings.model_dump()["beta"]), [
        ("slotted.beta", lambda: setattr(slotted, "beta", 3.0)),
        ("Strict.beta", lambda: setattr(Strict, "beta", 3.0)),
        ("settings.", lambda: setattr(settings, "beta", 3.0)),
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.extra, self.beta = nn.ModuleList([nn.Identity()]), 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(torch.tanh(self.linear(self.norm(x)))) * self.beta
        for layer in self.extra:
            x = layer(x)
        return x


@row
def a_module_and_its_members() -> Row:
    torch.manual_seed(0)
    block = nn.Sequential(Block()).double().eval().requires_grad_(False)
    block.register_buffer("scale", torch.tensor(2.0).double())
    hook = lambda module, args, output: output * 2  # noqa: E731
    grown = lambda: nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.ReLU()])  # noqa: E731
    return lambda p, x: scaled(p, block(x), block.scale), [
        ("block.0.beta", lambda: setattr(block[0], "beta", 2.0)),
        ("block.0.norm.eps", lambda: setattr(block[0].norm, "eps", 0.1)),
        ("block.0.extra.1", lambda: block[0].extra.append(nn.Tanh())),
        ("block.0.extra", lambda: setattr(block[0], "extra", grown())),
        ("block.0.drop", lambda: setattr(block[0], "drop", nn.Tanh().eval())),
        ("block.scale", lambda: setattr(block, "scale", torch.tensor(3.0).double())),
        ("block.0.linear.", lambda: block[0].linear.register_forward_hook(hook)),
        ("block.0.forward", lambda: setattr(block[0], "forward", torch.relu)),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*that `fn` takes as constants")
@pytest.mark.parametrize("name", ROWS)
def test_a_change_traces_anew_and_is_named(name: str) -> None:
    fn, changes = ROWS[name]()
    step = make(fn)
    assert_plain(step, fn)
    with traces(step, 0):
        assert_plain(step, fn)
    for path, change in changes:
        guard = step.lower(PARAMS, X).program.guard
        change()
        assert any(path in line for line in lines(guard.changes()))
        with traces(step, 1):
            for _ in range(2):
                assert_plain(step, fn)


# ------------------------------------------------------------------ what is not


def test_what_fn_does_not_read_traces_nothing_anew() -> None:
    trainer, output = Trainer(), types.SimpleNamespace(loss=2.0)

    def fn(p: Any, x: Tensor) -> Tensor:
        return trainer.loss(p, x) * output.loss

    fn = types.FunctionType(fn.__code__, globals() | {"loss": 0.0}, closure=fn.__closure__)
    step = make(fn)
    assert_plain(step, fn)
    with traces(step, 0):
        for number in range(3):
            trainer.record()
            fn.__globals__["loss"], trainer.other = torch.tensor(number), number
            assert_plain(step, fn)


def test_equal_values_in_new_objects_trace_nothing_anew_and_are_followed() -> None:
    cfg = {"beta": 0.5, "table": [1.0, [2.0]], "names": ("a", 1)}
    fn = lambda p, x: scaled(p, x, cfg["beta"] * cfg["table"][1][0] * len(cfg["names"]))  # noqa: E731
    step = make(fn)
    assert_plain(step, fn)
    with traces(step, 0):
        cfg.update(beta=float("0.5"), table=[1.0, [float("2")]], names=("a", int("1")))
        assert_plain(step, fn)
    guard = step.lower(PARAMS, X).program.guard
    cfg["table"][1][0] = 3.0
    assert lines(guard.changes()) == ["cfg['table'][1][0] from 2.0 to 3.0"]
    with traces(step, 1):
        assert_plain(step, fn)


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


def test_what_lies_beside_what_fn_writes_is_guarded() -> None:
    """An item that `fn` counts up leaves its neighbours guarded; a list that it appends to is its own."""
    cfg: dict[str, Any] = {"calls": 0, "beta": 1.0, "seen": [0.0], "table": [1.0]}

    def fn(p: Any, x: Tensor) -> Tensor:
        cfg["calls"] += 1
        cfg["seen"].append(0.0)
        return scaled(p, x, cfg["beta"] * cfg["table"][0])

    step = make(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_plain(step, fn)
        for change in ({"beta": 5.0}, {"table": [2.0]}):
            cfg.update(change)
            with traces(step, 1):
                assert_plain(step, fn)


def test_a_tensor_is_read_where_it_is_and_its_copy_on_another_device_is_not() -> None:
    table = torch.ones(WIDTH, dtype=torch.float64)
    fn = lambda p, x: scaled(p, x, table)  # noqa: E731
    step, copied = make(fn), Guard(fn, Reachable(fn), (), (), [table])
    assert_plain(step, fn)
    assert copied.holds()
    table.mul_(3)
    with traces(step, 0):
        assert_plain(step, fn)
    assert not copied.holds() and [path for path, *_ in copied.changes()] == ["table._version"]


def test_nothing_of_pytest_is_reached_through_an_assert_that_it_has_rewritten() -> None:
    def fn(x: Tensor) -> Tensor:
        assert x is not None
        return x

    assert not [c for c in Reachable(fn).containers if "pytest" in str(c)]
    assert len(Reachable(fn).entries) < 20


# ------------------------------------------------------------------ programs


def model_and_loss(blocks: int = 2) -> tuple[nn.Module, dict[str, Tensor], Fn]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)]).double()
    apply, params = fs.make_functional(model)
    return model, params, lambda p, x: apply(p, x).square().mean()


def test_train_and_eval_each_have_a_program() -> None:
    model, params, fn = model_and_loss()
    step = step_of(fn, params)
    noisy = step(params, X, rng=(0, 0))[0]
    model.eval()
    assert_plain(step, fn, params)
    with traces(step, 0), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.train()
            assert step(params, X, rng=(0, 0))[0] == noisy
            assert step(params, X, rng=(0, 1))[0] != noisy
            model.eval()
            assert_plain(step, fn, params)
    guard = step.lower(params, X).program.guard
    model[1].drop.train()
    assert lines(guard.changes()) == ["model.1.drop.training from False to True"]
    with traces(step, 1):
        assert step(params, X)[0] != plain_grads(fn, params, X)[0]


def test_values_of_the_leaves_that_a_step_is_given_do_not_count() -> None:
    """A module that is evaluated with the step's leaves, by `p.data =`, traces nothing anew."""
    model, params, fn = model_and_loss()
    model.eval()
    step = step_of(fn, params)
    assert_plain(step, fn, params)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    with traces(step, 0):
        assert_plain(step, fn, params)


def test_a_guard_costs_little() -> None:
    _, params, fn = model_and_loss(blocks=12)
    guard = step_of(fn, params).lower(params, X).program.guard
    assert guard.holds() and guard._is_untouched()
    assert sum(len(owners) for _, (owners, *_) in guard._groups) < 60 * 12  # 60 ns each


def test_programs_are_kept_and_dropped_like_batches() -> None:
    cfg = {"beta": 1.0}
    fn = lambda p, x: scaled(p, x, cfg["beta"])  # noqa: E731
    step = make(fn, cache=2)

    def run(*betas: float) -> int:
        before = step.compile_stats.traces
        for cfg["beta"] in betas:
            assert_plain(step, fn)
        return step.compile_stats.traces - before

    assert run(1.0, 2.0, 1.0, 2.0) == 2
    with pytest.warns(UserWarning, match="1 value"):
        assert run(3.0, 2.0, 1.0) == 2


# ------------------------------------------------------------------ messages


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
