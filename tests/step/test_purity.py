"""Purity: whatever is done with a module through fnshard, it stays bitwise what it was, failures included."""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from kernels import no_kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from toys import step_of

import fnshard as fs
from fnshard import StateError, TraceError

WIDTH = 4


def rows(count: int = 2, seed: int = 0) -> Tensor:
    """[count, 3, WIDTH]: a batch of sequences."""
    return torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


# ------------------------------------------------------------------ nasty modules

MODULES: dict[str, Callable[[], nn.Module]] = {}


def nasty(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODULES[make.__name__] = make
    return make


@nasty
class OneModuleUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.decoder = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(torch.tanh(self.encoder(x))))


class Rotary(nn.Module):
    """Tables that grow with the sequence, kept as `keep` says."""

    def __init__(self, keep: Callable[[nn.Module, Tensor], None]):
        super().__init__()
        self.linear, self.keep, self.longest = nn.Linear(WIDTH, WIDTH), keep, 0
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.register_buffer("table", None, persistent=False)
        self.tables: dict[str, Any] = {"by length": [], "seen": set()}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.keep(self, torch.arange(x.shape[1])[:, None] * self.frequencies)
        return self.linear(x) * self.last[: x.shape[1]].cos()

    @property
    def last(self) -> Tensor:
        if self.table is not None:
            return self.table
        return self.tables["by length"][-1] if self.tables["by length"] else vars(self)["plain"]


@nasty
def table_in_a_registered_buffer() -> nn.Module:
    return Rotary(lambda self, table: self.register_buffer("table", table, persistent=False))


@nasty
def table_in_a_list_in_a_dict() -> nn.Module:
    def keep(self: nn.Module, table: Tensor) -> None:
        self.tables["by length"].append(table)
        self.tables["seen"].add(table.shape[0])
        self.tables["new"] = {"table": table}

    return Rotary(keep)


class Slotted:
    __slots__ = ("count", "table")


class Kept:
    def __init__(self) -> None:
        self.slotted, self.table = Slotted(), None


@nasty
class TableInAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.calls = nn.Linear(WIDTH, WIDTH), Kept(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kept.table is None:
            self.kept.table = self.kept.slotted.table = torch.arange(WIDTH) * x.shape[0]
        return self.linear(x) + self.kept.slotted.table


@nasty
class Recurrent(nn.Module):
    """`nn.LSTM` keeps its weights in a plain list too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.double())[0].to(x.dtype)


@nasty
class LeavesInPlainContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pairs = [(self.a.weight, self.a.bias), (self.b.weight, self.b.bias)]

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in self.pairs:
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x


@nasty
def parametrised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), block())


def photograph(value: Any, seen: dict[int, int] | None = None) -> Any:
    """All that hangs on a module, objects by identity, numbers by value; fails on a fake."""
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


def fail_behind_it(model: nn.Module) -> None:
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
    with pytest.raises(TraceError, match="depends on a tensor's value"):
        step(params, rows())


USES = [evaluate, lower, train_on_two_ranks, fail_behind_it, fail_in_it, be_refused]


@pytest.mark.parametrize("use", USES, ids=lambda u: u.__name__)
@pytest.mark.parametrize("name", MODULES)
def test_the_module_is_bitwise_what_it_was(name: str, use: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    model = MODULES[name]()
    twin = copy.deepcopy(model)
    before = photograph(model)
    use(model)
    assert photograph(model) == before
    assert torch.equal(model(rows()), twin(rows()))


@pytest.mark.parametrize("name", MODULES)
def test_what_it_computes_is_the_modules(name: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name]().double()
    step, params, _ = stepping(model)
    x = rows().double()
    loss, grads = step(params, x)
    truth = model(x).pow(2).mean()
    trained = dict(model.named_parameters())
    expected = torch.autograd.grad(truth, list(trained.values()))
    torch.testing.assert_close(loss, truth.detach(), atol=1e-12, rtol=0)
    for path, known in zip(trained, expected, strict=True):
        torch.testing.assert_close(grads[path], known, atol=1e-12, rtol=0)


# ------------------------------------------------------------------ caches beside modules

_tables: dict[int, Tensor] = {}
_newest: Tensor | None = None


@functools.lru_cache
def _remembered(length: int) -> Tensor:
    return torch.arange(length) * 2.0


def _with_attribute(length: int) -> Tensor:
    if not hasattr(_with_attribute, "table"):
        _with_attribute.table = torch.arange(length) * 2.0
    return _with_attribute.table


def _with_default(length: int, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    kept[:] = kept or [torch.arange(length) * 2.0]
    return kept[0]


class Tables:
    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.own: Tensor | None = None

    def of(self, length: int) -> Tensor:
        self.own = Tables.shared.setdefault(length, torch.arange(length) * 2.0)
        return self.own


def _in_a_global(length: int) -> Tensor:
    global _newest
    _newest = _tables.setdefault(length, torch.arange(length) * 2.0)
    return _newest


def caches() -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    closed: dict[str, list[Tensor]] = {"tables": []}
    newest = None

    def in_a_closure(length: int) -> Tensor:
        nonlocal newest
        closed["tables"].append(torch.arange(length) * 2.0)
        newest = closed["tables"][0]
        return newest

    kept = types.SimpleNamespace()

    def by_a_computed_name(length: int) -> Tensor:
        setattr(kept, f"of_{length}", torch.arange(length) * 2.0)
        return getattr(kept, f"of_{length}")

    tables, bound = Tables(), functools.partial(lambda kept, n: kept.of(n), Tables())
    yield from {
        "closure": in_a_closure, "global": _in_a_global, "lru_cache": _remembered, "partial": bound,
        "attribute of a function": _with_attribute, "default argument": _with_default,
        "computed name": by_a_computed_name, "method": tables.of,
        "attribute": lambda n: tables.of(n),
    }.items()  # fmt: skip


@pytest.mark.parametrize("cache", [c for _, c in caches()], ids=[n for n, _ in caches()])
def test_no_fake_stays_behind_a_trace(cache: Callable[[int], Tensor]) -> None:
    params = {"w": torch.ones(WIDTH)}
    calls: list[int] = []

    def fn(p: Any, x: Tensor) -> Tensor:
        calls.append(len(calls))
        return (p["w"] * cache(WIDTH) * x).sum()

    for _ in range(2):
        with no_kernels():
            assert step_of(fn, params)(params, torch.ones(WIDTH))[0] == 12
        assert not isinstance(cache(WIDTH), FakeTensor)
        Tables.shared.clear()
    assert calls == [0, 1]  # what holds no fakes stays


def test_a_module_that_fn_calls_by_itself_is_left_alone_too() -> None:
    torch.manual_seed(0)
    model = MODULES["TableInAnObject"]()
    before = photograph(model.kept)
    params = {p: v.detach().clone() for p, v in model.named_parameters()}
    fn = lambda p, x: torch.func.functional_call(model, p, (x,)).sum()  # noqa: E731
    step = step_of(fn, params)
    for count in (2, 3):
        step.lower(params, rows(count))
    assert photograph(model.kept) == before


class Balanced(nn.Module):
    """Leaves a term of the loss on itself and in a list, as mixtures of experts do."""

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
    with fs.debug.assert_max_compiles(0):
        step(params, x)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    assert fs.debug.check(lambda p, x: apply(p, x).pow(2).mean() + terms(model), params, x, specs)


# ------------------------------------------------------------------ what is refused


class Counting(nn.Module):
    """Writes to a plain tensor, a buffer and a parameter."""

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
    named = "an attribute, \\[4\\]" if what == "plain" else rf"params\['{what}'\]"
    with pytest.raises(TraceError, match=rf"(?s)writes to 1 leaf of its own.*{named}.*register_buffer"):
        apply({p: v.detach().clone().requires_grad_() for p, v in params.items()}, rows())
    step = step_of(lambda p, x: apply(p, x).sum(), params)
    with pytest.raises(TraceError, match="in place"):
        step(params, rows())
    assert photograph(model) == before


def test_a_tensor_that_fn_writes_to_has_its_numbers_back() -> None:
    seen = torch.zeros(WIDTH)

    def fn(p: Any, x: Tensor) -> Tensor:
        seen.add_(1)
        return (p["w"] * x * seen).sum()

    with pytest.raises(TraceError, match="writes in place to 1 tensor"):
        step_of(fn, {"w": torch.ones(WIDTH)})({"w": torch.ones(WIDTH)}, torch.ones(WIDTH))
    assert torch.equal(seen, torch.zeros(WIDTH))


def test_leaves_that_are_not_the_modules_are_named() -> None:
    apply, params = fs.make_functional(MODULES["OneModuleUnderTwoNames"]())
    leaf = params["encoder.weight"]
    with pytest.raises(
        StateError,
        match=r"(?s)3 leaves.*'encoder.bias'\] is missing.*'head.weight'\] is stored as 'encoder.weight'"
        r".*'x'\] is no leaf",
    ):
        apply({"encoder.weight": leaf, "head.weight": leaf, "x": leaf}, rows())


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
