"""State that changes: what `fn` writes to leaves is state of the step, equal to plain torch rank by rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import SpecError, TraceError

WIDTH, ROWS, LR, STEPS, ATOL = 6, 8, 0.05, 3, 1e-10


# ------------------------------------------------------------------ modules that write, and give a loss


class Blocks(nn.Module):
    """A matrix, a layer that has state, and so on: three units."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList([*blocks, nn.Sequential(nn.Linear(WIDTH, WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Counter(nn.Module):
    """A module whose buffer is assigned anew, and read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = self.count > 0
        self.average = 0.9 * self.average + 0.1 * x.mean(0)  # with its gradient, as torch has it
        return (x - self.average) * self.scale / (self.count + 1)


class Teacher(nn.Module):
    """An average of the student's weights, written by hand; the student is to give what its teacher gives."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Blocks(nn.Identity).layers
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        pupil = master = x
        for old, new in zip(self.teacher, self.student, strict=True):
            master, pupil = old(master), new(pupil)
        return (pupil - master.detach() * 0.5).square().mean()


class TwoDtypes(nn.Module):
    """A module of two averages that travel in other sums, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("low", torch.zeros(WIDTH, dtype=torch.float32))
        self.register_buffer("unread", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.lerp_(x.mean(0).float(), 0.5)
            self.unread[1:].copy_(x[0, :2])
        return self.norm(x) * self.low


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: Blocks(lambda: nn.BatchNorm1d(WIDTH)),
    "counter": lambda: Blocks(Counter),
    "teacher": Teacher,
    "two_dtypes": lambda: Blocks(TwoDtypes),
}


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for leaf in [v for p, v in named.items() if v.is_floating_point() and not p.endswith("low")]:
        leaf.data = leaf.data.double()
    return model


def batches(steps: int = STEPS) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2 * ROWS, WIDTH, dtype=torch.float64) for _ in range(steps)]


# ------------------------------------------------------------------ plain torch


def aggregate(old: Tensor, each: list[Tensor], rule: str | None, weights: list[int]) -> Tensor:
    rule = rule or ("mean" if old.is_floating_point() else "rank0")
    if rule == "sum":
        return old + sum(new - old for new in each)
    if rule == "mean":
        return sum(new * w for new, w in zip(each, weights, strict=True)) / sum(weights)
    return each[0]


def plain(
    model: nn.Module,
    ranks: int,
    accumulate: int = 1,
    rule: str | None = None,
    cut: Callable[[Tensor], list[Tensor]] | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], list[float]]:
    """Do DDP's arithmetic in one process: a copy of the module a rank; gradients and statistics averaged."""
    model, losses = copy.deepcopy(model), []
    trained = [p for p, v in model.named_parameters() if v.requires_grad]
    for batch in batches(steps):
        parts = cut(batch) if cut else batch.chunk(ranks)
        replicas = [copy.deepcopy(model) for _ in parts]
        total = 0.0
        for replica, part in zip(replicas, parts, strict=True):
            for micro in part.chunk(accumulate):
                loss = replica(micro) / (len(parts) * accumulate)
                loss.backward()
                total += loss.item()
                for buffer in replica.buffers():
                    buffer.detach_()
        states = [r.state_dict(keep_vars=True) for r in replicas]
        with torch.no_grad():
            for path, leaf in model.state_dict().items():
                if path in trained:
                    leaf.sub_(sum(s[path].grad for s in states), alpha=LR)
                else:
                    leaf.copy_(aggregate(leaf, [s[path] for s in states], rule, [len(p) for p in parts]))
        losses.append(total)
    return {p: v.clone() for p, v in model.state_dict().items()}, losses


# ------------------------------------------------------------------ the same, sharded


PRESETS = {
    "ddp": ("no_shard", {"shard": 2}),
    "zero2": ("zero2", {"shard": 2}),
    "full_shard": ("full_shard", {"shard": 2}),
    "hybrid": ("hybrid_shard", {"replicate": 2, "shard": 1}),
}


def training(
    model: nn.Module,
    mesh: fs.Mesh,
    preset: str,
    policy: Mapping[str, Any] = {},
    change: Callable[[str, LayoutSpec], LayoutSpec] = lambda path, spec: spec,
    **options: Any,
) -> Any:
    """Return a step of the module, and the parameters that it starts from."""
    apply, params = fs.make_functional(copy.deepcopy(model))
    specs = getattr(fs.presets, preset)(params, mesh, **policy)
    specs = {p: change(p, s) for p, s in specs.items()}
    options = {"backend": "eager", "optimizer": fs.optim.sgd(LR), **options}
    return fs.shard_step(lambda p, x: apply(p, x), specs, mesh=mesh, **options), params, specs


def run(
    rank: int,
    mesh: fs.Mesh,
    made: Any,
    cut: Callable[[Tensor], list[Tensor]] | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], list[float]]:
    step, params, specs = made
    state, losses = step.init(params), []
    for batch in batches(steps):
        parts = cut(batch) if cut else batch.chunk(mesh.data_size)
        state, metrics = step(state, parts[rank])
        losses.append(metrics["loss"].item())
    return fs.unshard(state.params, specs, mesh), losses


def simulate_ranks(
    model: nn.Module, preset: str, axes: Mapping[str, int] = {"shard": 2}, cut: Any = None, **options: Any
) -> list[tuple[dict[str, Tensor], list[float]]]:
    mesh = fs.make_mesh(**axes, simulated=True)
    made = training(model, mesh, preset, **options)
    return fs.simulate(mesh, lambda rank: run(rank, mesh, made, cut))


def same(got: tuple[Any, Any], expected: tuple[Any, Any], atol: float = ATOL) -> None:
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=atol)
    for path, leaf in got[0].items():
        torch.testing.assert_close(
            leaf.double(), expected[0][path].double(), rtol=0, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )


CASES = [  # three of each model
    (name, *case)
    for number, name in enumerate(MODELS)
    for case in (
        [
            ("ddp", 1, "none", "depth"),
            ("full_shard", 2, "unit", "depth"),
            ("full_shard", 2, "none", "breadth"),
        ],
        [("zero2", 2, "none", "depth"), ("hybrid", 1, "unit", "depth"), ("zero2", 2, "unit", "breadth")],
    )[number % 2]
]


@pytest.mark.suite({
    "batch_norm-full_shard-2-none-breadth": "units one after the other",
    "batch_norm-full_shard-2-unit-depth": "a write that is made again",
    "two_dtypes-hybrid-1-*": "states of two dtypes over two axes",
    "counter-zero2-2-none-depth": "a number that each micro-batch counts",
    "teacher-ddp-*": "a state of trained leaves",
    "teacher-full_shard-2-none-breadth": "the same, sharded",
})  # fmt: skip
@pytest.mark.parametrize(("name", "preset", "accumulate", "remat", "order"), CASES)
def test_state_equals_plain_torch(name: str, preset: str, accumulate: int, remat: str, order: str) -> None:
    """Statistics go from one micro-batch to the next, in whichever order units run."""
    model, (strategy, axes) = model_of(name), PRESETS[preset]
    expected = plain(model, 2, accumulate)
    trained = {p for p, v in model.named_parameters() if v.requires_grad}
    changed = {p for p, v in model.state_dict().items() if not torch.equal(v, expected[0][p])}
    assert changed - trained, "a model that writes nothing"
    how = {"accumulate": accumulate, "remat": remat, "micro_order": order}
    for got in simulate_ranks(model, strategy, axes, **how):
        same(got, expected)


# ------------------------------------------------------------------ rules


pytestmark = pytest.mark.filterwarnings("ignore:compiling again")


def ruled(rule: str) -> Callable[[str, LayoutSpec], LayoutSpec]:
    return lambda path, spec: replace(spec, aggregation=rule)


class Tally(nn.Module):
    """An integer and a float that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.full((WIDTH,), 1e6, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.positive += (x > 0).sum()
            self.total += (x[0] * 8).round().float()
        return (x * self.scale).square().mean()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rule", [None, "sum", "rank0", "local"])
def test_rules_of_what_differs_by_rank(rule: str | None, split: bool) -> None:
    """A leaf that is stored split is cut again."""
    torch.manual_seed(0)
    model, mesh = Tally().double(), fs.make_mesh(shard=2, simulated=True)
    model.total = model.total.float()
    layout = dict.fromkeys(("storage", "gradient", "optimizer"), P("shard")) if split else {}
    change = lambda p, s: replace(s, aggregation=rule, **(layout if p == "total" else {}))  # noqa: E731
    if rule == "local" and split:
        with raises(SpecError, leaves=["params['total']", "aggregation='local'"], fix="storage=P()"):
            training(model, mesh, "no_shard", change=change)
        return
    made = training(model, mesh, "no_shard", change=change)
    got = fs.simulate(mesh, lambda rank: run(rank, mesh, made))
    for rank, each in enumerate(got):
        expected = plain(model, 2, rule=rule)
        if rule == "local":  # every rank's own
            expected = plain(model, 1, cut=lambda b, rank=rank: [b.chunk(2)[rank]])
        for path in ("positive", "total"):
            torch.testing.assert_close(each[0][path], expected[0][path], rtol=0, atol=0.1 * (rule is None))


def lower_model(name: str, **options: Any) -> fs.step.lowered.Lowered:
    mesh = fs.make_mesh(shard=2, abstract=True)
    step, params, _ = training(model_of(name), mesh, "full_shard", **options)
    return step.lower(params, batches()[0][:ROWS])


@pytest.mark.parametrize(
    ("name", "rule", "elements"),
    [
        ("batch_norm", None, {torch.float64: 4 * WIDTH + 1}),
        ("two_dtypes", None, {torch.float64: 4 * WIDTH + 2 * 3 + 1, torch.float32: 2 * WIDTH + 1}),
        ("teacher", None, {}),
        ("batch_norm", "local", {}),
        ("batch_norm", "sum", {torch.float64: 4 * WIDTH, torch.int64: 2}),
    ],
)
def test_what_all_ranks_compute_alike_is_not_sent(name: str, rule: str | None, elements: Any) -> None:
    """And the rest by one sum per dtype, whose bytes are counted (each leaf begins at 128 bytes)."""
    schedule = lower_model(name, change=ruled(rule)).schedule
    lines = [i for i in schedule.instructions if i.verb == "aggregate_buffers"]
    found = {schedule.buckets[i.bucket].dtype: i for i in lines}
    assert found.keys() == elements.keys()
    assert schedule.counts()["store_buffers"] == 1
    for dtype, line in found.items():
        padded = sum(p.numel for p in schedule.buckets[line.bucket].pieces) + ("mean" in line.rules)
        assert padded == elements[dtype]
        assert 0 <= line.wire_bytes(schedule) - padded * dtype.itemsize < 128 * len(line.reads)
        assert len(line.paths) == len(line.rules) and set(line.rules) == {rule or "mean"}


# ------------------------------------------------------------------ what is refused


class Assigning(nn.Module):
    def __init__(self, assign: Callable[[Any, Tensor], None], tied: bool = False):
        super().__init__()
        self.assign, self.weight = assign, nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("a", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("b", self.a if tied else torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.assign(self, x)
        return (x * self.weight * self.a).sum()


def assigned(name: str, value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda module, x: setattr(module, name, value(module, x))


def weight_in_place(module: Any, x: Tensor) -> None:
    module.weight.data.mul_(2)


REFUSED: dict[str, tuple[nn.Module, str, str]] = {
    "another shape": (
        Assigning(assigned("a", lambda m, x: x)),
        "params['a']",
        "one shape and dtype",
    ),
    "one name of two": (
        Assigning(assigned("b", lambda m, x: m.b + 1), tied=True),
        "params['a']",
        "one shape and dtype",
    ),
    "a leaf that trains": (Assigning(weight_in_place), "params['weight']", "trainable=False"),
    "its gradient": (
        Assigning(lambda m, x: m.a.add_(m.weight)),
        "params['a']",
        "detach",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, leaf, fix = REFUSED[name]
    step, params, _ = training(model, fs.make_mesh(shard=1), "no_shard")
    with raises(TraceError, leaves=leaf, fix=fix, says="1 leaf"):
        step.lower(params, batches()[0])


def test_a_coded_leaf_is_not_written_to() -> None:
    model, mesh = model_of("teacher"), fs.make_mesh(shard=1)
    coded = {"codec": "int8", "storage_dtype": None}
    change = lambda p, s: replace(s, **(coded if p == "teacher.0.0.weight" else {}))  # noqa: E731
    step, params, _ = training(model, mesh, "no_shard", change=change)
    with raises(TraceError, leaves="params['teacher.0.0.weight']", fix="codec=None", says="1 leaf"):
        step.lower(params, batches()[0])


def test_a_forward_alone_and_a_narrower_dtype_store_nothing() -> None:
    model, mesh = model_of("batch_norm"), fs.make_mesh(shard=1)
    apply, params = fs.make_functional(copy.deepcopy(model))
    with raises(TraceError, fix="model.eval()", says="6 leaves"):
        fs.shard_forward(apply, fs.presets.no_shard(params, mesh), mesh=mesh)(params, batches()[0])
    narrow = training(
        model_of("teacher"), mesh, "no_shard", policy={"compute_dtype": torch.bfloat16, "buffers": True}
    )
    with raises(TraceError, leaves="teacher.0", fix="compute_dtype=storage_dtype", says="6 leaves"):
        narrow[0].lower(narrow[1], batches()[0].bfloat16())
    with raises(SpecError, leaves="LayoutSpec(aggregation='median')", says=["'mean'", "'sum'", "'rank0'"]):
        LayoutSpec(aggregation="median")
    whole = training(Tally(), fs.make_mesh(shard=2, abstract=True), "no_shard", change=ruled("mean"))
    with raises(SpecError, leaves=["params['positive']", "'mean' of torch.int64"], says="1 leaf"):
        whole[0].lower(whole[1], batches()[0].float())


# ------------------------------------------------------------------ the state


def test_without_an_optimizer_they_are_written_where_they_are_passed() -> None:
    model = model_of("batch_norm")
    step, params, _ = training(model, fs.make_mesh(shard=1), "no_shard", optimizer=None)
    blocks, kept = step.init(params), {p: v.detach().clone() for p, v in params.items()}
    step(blocks, batches()[0])
    expected = plain(model, 1, steps=1)[0]
    for path, _ in model.named_buffers():
        torch.testing.assert_close(blocks[path], expected[path], rtol=0, atol=ATOL)
        assert torch.equal(params[path], kept[path])


def test_a_skipped_step_stores_what_it_has_written() -> None:
    """torch's AMP does so too: the forward is not scaled, and has run."""
    model, mesh = copy.deepcopy(model_of("batch_norm")), fs.make_mesh(shard=1)
    apply, params = fs.make_functional(model)
    specs = fs.presets.no_shard(params, mesh)
    step = fs.shard_step(
        lambda p, x, factor: apply(p, x) * factor, specs, mesh=mesh, backend="eager",
        optimizer=fs.optim.sgd(LR), loss_scale="dynamic",
    )  # fmt: skip
    state = step.init(params)
    state, metrics = step(state, batches()[0], torch.tensor(float("inf")))
    assert int(metrics["skipped_steps"]) == 1
    expected = plain(model, 1, steps=1)[0]
    for path, leaf in state.params.items():
        of_module = params[path] if params[path].requires_grad else expected[path]
        torch.testing.assert_close(leaf, of_module.detach(), rtol=0, atol=ATOL)
