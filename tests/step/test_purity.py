"""Purity: whatever is done with a module through fnshard, it stays bitwise what it was, failures included."""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from errors import raises
from kernels import no_kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from toys import step_of, traces

import fnshard as fs
from fnshard import StateError, TraceError

WIDTH = 4


def rows(count: int = 2, seed: int = 0) -> Tensor:
    """Draw a batch of sequences [count, 3, WIDTH]."""
    return torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ a nasty module


class Slotted:
    __slots__ = ("count", "table")


class Kept:
    def __init__(self) -> None:
        self.slotted, self.table = Slotted(), None


class Tables(nn.Module):
    """A module of tables that grow with the sequence: in a registered buffer, in containers, in objects."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.kept, self.calls = 0, Kept(), 0
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.register_buffer("table", None, persistent=False)
        self.tables: dict[str, Any] = {"by length": [], "seen": set()}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            table = torch.arange(x.shape[1])[:, None] * self.frequencies
            self.register_buffer("table", table, persistent=False)
            self.tables["by length"].append(table * 2)
            self.tables["seen"].add(table.shape[0])
            self.tables["new"] = {"table": table}
            self.kept.table = self.kept.slotted.table = table * 3
        length = x.shape[1]
        return (
            x * (self.table[:length] + self.tables["by length"][-1][:length]).cos()
            + self.kept.slotted.table[:length]
        )


class Nasty(nn.Module):
    """A module under two names, with leaves in containers, an LSTM, parametrised weights, tables."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.decoder = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.encoder.weight
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pairs = [(self.a.weight, self.a.bias), (self.b.weight, self.b.bias)]
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.tables = Tables()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tables(self.head(self.decoder(torch.tanh(self.encoder(x)))))
        for weight, bias in self.pairs:
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return self.normed(self.lstm(x.double())[0].to(x.dtype))


def photograph(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return all that hangs on a module, objects by identity, numbers by value; fail on a fake."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        assert not isinstance(value, FakeTensor)
        return (id(value), type(value), value.requires_grad, value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return (id(value), [(k, photograph(v, seen)) for k, v in value.items()])
    if isinstance(value, list | tuple | set):
        return (id(value), [photograph(v, seen) for v in value])
    if isinstance(value, Slotted):
        return [(n, photograph(getattr(value, n), seen)) for n in value.__slots__ if hasattr(value, n)]
    if isinstance(value, nn.Module | Kept):
        return (id(value), photograph(vars(value), seen))
    return (type(value), repr(value))


# ------------------------------------------------------------------ whatever is done with it


def evaluate(model: nn.Module) -> None:
    apply, params = fs.make_functional(model)
    others = {p: v.detach() * 3 for p, v in params.items()}
    twice = apply(others, rows())
    assert torch.equal(twice, apply(others, rows()))
    assert not torch.equal(twice, apply(params, rows()))
    torch.func.grad(lambda p: apply(p, rows()).sum())(others)


def stepping(model: nn.Module, world: int = 1, **options: Any) -> tuple[Any, Any, fs.Mesh]:
    apply, params = fs.make_functional(model)
    mesh = fs.make_mesh(shard=world, simulated=world > 1)
    specs = fs.presets.full_shard(params, mesh)
    fn = lambda p, x: apply(p, x).pow(2).mean()  # noqa: E731
    return fs.shard_step(fn, specs, mesh=mesh, backend="eager", **options), params, mesh


def lower(model: nn.Module) -> None:
    step, params, _ = stepping(model)
    for count in (2, 3):
        step.lower(params, rows(count))
    step.lower(params, torch.cat([rows(), rows()], 1))  # longer sequences: a cache must grow


def train_on_two_ranks(model: nn.Module) -> None:
    step, params, mesh = stepping(model, 2, optimizer=fs.optim.adamw(0.1))
    for _, metrics in fs.simulate(mesh, lambda rank: step(step.init(params), rows(seed=rank))):
        assert not isinstance(metrics["loss"], FakeTensor)


def fail_after_it(model: nn.Module) -> None:
    apply, params = fs.make_functional(model)

    def fn(p: Any, x: Tensor) -> Tensor:
        raise KeyError(apply(p, x).shape)

    with pytest.raises(KeyError, match="2, 3, 4"):
        fn(params, rows())
    step = step_of(fn, params)
    with pytest.raises(KeyError, match="2, 3, 4"):
        step(params, rows())


MISFIT = "(?i)shape|size|must match|expected|reduction dim"


def fail_in_it(model: nn.Module) -> None:
    apply, params = fs.make_functional(model)
    with pytest.raises(RuntimeError, match=MISFIT):
        apply(params, rows()[..., :3])
    step, _, _ = stepping(model)
    with pytest.raises((RuntimeError, fs.FnshardError), match=MISFIT):
        step(params, rows()[..., :3])


def be_refused(model: nn.Module) -> None:
    apply, params = fs.make_functional(model)
    step = step_of(lambda p, x: torch.tensor(apply(p, x).sum().item(), requires_grad=True), params)
    with raises(TraceError, leaves="item"):
        step(params, rows())


USES = [evaluate, lower, train_on_two_ranks, fail_after_it, fail_in_it, be_refused]


@pytest.mark.parametrize("use", USES, ids=lambda u: u.__name__)
def test_the_module_is_bitwise_what_it_was(use: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    model = Nasty()
    twin = copy.deepcopy(model)
    before = photograph(model)
    use(model)
    assert photograph(model) == before
    assert torch.equal(model(rows()), twin(rows()))


def test_what_it_computes_is_the_modules() -> None:
    torch.manual_seed(0)
    model = Nasty().double()
    step, params, _ = stepping(model)
    x = rows().double()
    loss, grads = step(params, x)
    truth = model(x).pow(2).mean()
    trained = dict(model.named_parameters())
    expected = torch.autograd.grad(truth, list(trained.values()))
    torch.testing.assert_close(loss, truth.detach(), atol=1e-12, rtol=0)
    for path, known in zip(trained, expected, strict=True):
        torch.testing.assert_close(grads[path], known, atol=1e-12, rtol=0)


# ------------------------------------------------------------------ caches next to modules

_tables: dict[int, Tensor] = {}
_newest: Tensor | None = None


@functools.lru_cache
def _remember(length: int) -> Tensor:
    return torch.arange(length) * 2.0


def _in_a_global(length: int) -> Tensor:
    global _newest
    _newest = _tables.setdefault(length, torch.arange(length) * 2.0)
    return _newest


def _with_default(length: int, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    kept[:] = kept or [torch.arange(length) * 2.0]
    return kept[0]


def in_a_closure() -> Callable[[int], Tensor]:
    closed, kept = list[Tensor](), types.SimpleNamespace()

    def cache(length: int) -> Tensor:
        closed.append(torch.arange(length) * 2.0)
        setattr(kept, f"of_{length}", closed[0])
        return getattr(kept, f"of_{length}")

    return cache


@pytest.mark.parametrize("cache", [_remember, _in_a_global, _with_default, in_a_closure()])
def test_no_fake_stays_after_a_trace(cache: Callable[[int], Tensor]) -> None:
    params = {"w": torch.ones(WIDTH)}
    calls: list[int] = []

    def fn(p: Any, x: Tensor) -> Tensor:
        calls.append(len(calls))
        return (p["w"] * cache(WIDTH) * x).sum()

    for _ in range(2):
        with no_kernels():
            assert step_of(fn, params)(params, torch.ones(WIDTH))[0] == 12
        assert not isinstance(cache(WIDTH), FakeTensor)
    assert calls == [0, 1]  # what holds no fakes stays


def test_a_module_that_fn_calls_by_itself_is_left_alone_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Tables())
    before = photograph(model)
    params = {p: v.detach().clone() for p, v in model.named_parameters()}
    fn = lambda p, x: torch.func.functional_call(model, p, (x,)).sum()  # noqa: E731
    step = step_of(fn, params)
    for count in (2, 3):
        step.lower(params, rows(count))
    assert photograph(model) == before


class Balanced(nn.Module):
    """A module that leaves a term of the loss on itself and in a list, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.terms = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), 0.0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.aux = h.pow(2).mean()
        self.terms.append(self.b.weight.square().sum())
        return self.b(h)


def test_what_forward_leaves_on_a_module_is_read_by_fn_and_gone_after_the_trace() -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    before, x = photograph(model), rows().double()
    apply, params = fs.make_functional(model)
    twin = copy.deepcopy(model)
    terms = lambda m: 10 * m.aux + len(m.terms) * m.terms[-1]  # noqa: E731
    loss_of = lambda m, run: run().pow(2).mean() + terms(m) + run().mean() * m.aux  # noqa: E731
    step = step_of(lambda p, x: loss_of(model, lambda: apply(p, x)), params)
    for _ in range(2):
        loss, grads = step(params, x)
    expected = loss_of(twin, lambda: twin(x))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=0)
    known = {p: v.grad for p, v in twin.named_parameters()}
    torch.testing.assert_close(dict(grads), known, atol=1e-12, rtol=0)
    assert photograph(model) == before
    with traces(step, 0):
        step(params, x)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    assert fs.debug.check(lambda p, x: apply(p, x).pow(2).mean() + terms(model), params, x, specs)


# ------------------------------------------------------------------ what is refused


class Counting(nn.Module):
    """A module that writes to a plain tensor, a buffer and a parameter."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.plain = what, torch.zeros(WIDTH)
        self.register_buffer("buffer", torch.zeros(WIDTH))
        self.parameter = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            getattr(self, self.what).add_(1)
        return x * self.parameter + self.buffer + self.plain


@pytest.mark.parametrize("what", ["plain", "parameter"])
def test_writes_in_place_are_refused_and_undone(what: str) -> None:
    model = Counting(what)
    before = photograph(model)
    apply, params = fs.make_functional(model)
    named = "an attribute, [4]" if what == "plain" else f"params['{what}']"
    with raises(TraceError, leaves=named, fix="register_buffer", says="1 leaf"):
        apply({p: v.detach().clone().requires_grad_() for p, v in params.items()}, rows())
    step = step_of(lambda p, x: apply(p, x).sum(), params)
    with raises(TraceError, leaves="f32[4]" if what == "plain" else named, says="in place"):
        step(params, rows())
    assert photograph(model) == before


def test_a_tensor_that_fn_writes_to_has_its_numbers_back() -> None:
    seen = torch.zeros(WIDTH)

    def fn(p: Any, x: Tensor) -> Tensor:
        seen.add_(1)
        return (p["w"] * x * seen).sum()

    with raises(TraceError, says=["in place", "1 tensor"]):
        step_of(fn, {"w": torch.ones(WIDTH)})({"w": torch.ones(WIDTH)}, torch.ones(WIDTH))
    assert torch.equal(seen, torch.zeros(WIDTH))


def test_leaves_that_are_not_the_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    apply, params = fs.make_functional(model)
    leaf = params["0.weight"]
    leaves = ["'0.bias'] is missing", "'1.weight'] is stored as '0.weight'", "'x'] is no leaf"]
    with raises(StateError, leaves=leaves, says="3 leaves"):
        apply({"0.weight": leaf, "1.weight": leaf, "x": leaf}, rows())


class Hooking(nn.Module):
    """A module that takes the hooks of a part away, and gives it another one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        for _ in range(2):
            self.part.register_forward_hook(lambda module, args, out: out + 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.part(x)
        self.part._forward_hooks.clear()
        self.part.register_forward_hook(lambda module, args, out: out + 2)
        return out + self.part(x)


def test_the_order_of_an_ordered_dict_is_put_back() -> None:
    """It is kept in a list next to the values, which `dict`'s own methods leave as it is."""
    module = Hooking()
    before, known = dict(module.part._forward_hooks), module.part(rows())
    apply, params = fs.make_functional(module)
    out = apply(params, rows())
    assert list(module.part._forward_hooks.items()) == list(before.items())
    torch.testing.assert_close(module.part(rows()), known)
    torch.testing.assert_close(apply(params, rows()), out)


class Lazy(collections.OrderedDict):
    """A mapping that loads each key when it is read, and cannot load all of them."""

    def __iter__(self) -> Any:
        yield "missing"

    def __getitem__(self, key: str) -> Any:
        raise ValueError(f"cannot load {key}")


LAZY = Lazy(scale=2.0)


def test_lazy_mappings_and_tensors_without_dense_numbers_are_left_alone() -> None:
    graph = {"edges": torch.eye(3).to_sparse(), "scale": 2.0}

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).sum() * len(LAZY) * graph["scale"]

    params = {"w": torch.ones(3)}
    step = step_of(loss, params)
    assert step(params, torch.ones(3))[0] == 6 * len(LAZY)
