"""What a step does besides the plain gradient, on a pipeline: optimizers, scales, adapters, codes, ties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import meshes
import pytest
import reference
import sharded
import torch
import torch.nn.functional as F
from errors import raises
from models import gpt, noise, vectors
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P, StateError
from fnshard.compiler.schedule.instructions import AllReduce, Gather, ReduceScatter

pytestmark = pytest.mark.filterwarnings("ignore:accumulate=")  # few micro-batches, on purpose
AXES = {"pipeline": 2, "shard": 2}


# ------------------------------------------------------------------ optimizers
Tried = tuple[str, str, str, str, bool]
SHORT: list[Tried] = [  # optimizer, preset, tier, leaves, whether the gradients of a batch are not finite
    ("muon", "full_shard", "device", "stacked", False),
    ("clip_adamw_ema", "shard_grad_op", "all_host", "wide", True),
]
LONG: list[Tried] = [
    ("clip_muon_ema", "zero1", "streamed", "wide", True),
    ("adafactor", "zero2", "host", "stacked", False),
    ("adamw_8bit", "full_shard", "device", "wide", False),
    ("rank_signs", "no_shard", "device", "stacked", False),
    *(
        (name, "full_shard", "device", leaves, skips)
        for name in ("soap", "lars", "schedule_free", "lion", "clip_soap_ema", "rules_of_optimizers")
        for leaves, skips in (("stacked", False), ("wide", True))
        if not ("soap" in name and leaves == "stacked")  # which has a leaf that stages read out of order
    ),
]


@pytest.mark.parametrize(
    ("name", "preset", "tier", "leaves", "skips"),
    [*SHORT, *(pytest.param(*row, marks=pytest.mark.long) for row in LONG)],
)
def test_optimizers_train_as_on_one_device(
    name: str, preset: str, tier: str, leaves: str, skips: bool
) -> None:
    """Parameters and slots to 1e-10; where steps are skipped, by the loss scale of all stages."""
    expected = meshes.train_whole(name, leaves, skips)
    found = meshes.train_ranks(name, "stages", preset, tier, leaves, skips, accumulate=2)
    meshes.assert_same(found, expected)


# ------------------------------------------------------------------ half precision
def test_a_loss_scale_in_fp16_is_of_all_stages() -> None:
    """Overflows of one stage are skipped on all; losses, scales and leaves are as on one rank."""
    params = {p: v.float() for p, v in noise({f"layers.{i}.w": (12, 12) for i in range(4)}).items()}

    def loss(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for w in p.values():
            x = torch.tanh(x.to(w.dtype) @ w)
        return x.float().square().mean()

    batches = [vectors(seed)[0].float() for seed in range(4)]
    batches[1][3] = torch.inf

    def run(axes: Mapping[str, int]) -> list[Any]:
        mesh = fs.make_mesh(**axes, simulated=True)
        dtypes = {"compute_dtype": torch.float16, "reduce_dtype": torch.float32}
        specs = fs.presets.full_shard(params, mesh, **dtypes)
        step = fs.shard_step(
            loss, specs, mesh=mesh, optimizer=fs.optim.adamw(0.01), loss_scale="dynamic", accumulate=3,
            accumulate_mode="local", backend="eager",
        )  # fmt: skip

        def on_rank(rank: int) -> Any:
            state, numbers = step.init(params), []
            for batch in batches:
                state, metrics = step(state, batch)
                numbers += [metrics[n].item() for n in ("loss", "loss_scale", "skipped_steps")]
            return numbers, fs.unshard(state.params, specs, mesh)

        return fs.simulate(mesh, on_rank)

    ((numbers, leaves),) = run({"shard": 1})
    assert numbers[-1] >= 1
    for found, got in run({"pipeline": 2}):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(numbers), equal_nan=True, rtol=1e-3, atol=0
        )
        torch.testing.assert_close(got, leaves, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ adapters and codes
def blocks_of(layers: int = 2) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        shapes |= {f"layers.{i}.q_proj.weight": (70, 12), f"layers.{i}.down.weight": (12, 70)}
    return noise(shapes)


def objective(p: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    for i in range(len(p) // 2):
        x = x + F.linear(
            torch.tanh(F.linear(x, p[f"layers.{i}.q_proj.weight"])), p[f"layers.{i}.down.weight"]
        )
    return F.mse_loss(x, y)


@pytest.mark.parametrize(
    ("codec", "axes"),
    [
        ("nf4", {"pipeline": 2}),
        *(pytest.param(c, a, marks=pytest.mark.long)
          for c, a in ((None, {"pipeline": 2}), (None, AXES), ("int8", AXES), ("nf4", AXES))),
    ],
)  # fmt: skip
def test_adapters_train_beside_frozen_and_coded_leaves(codec: str | None, axes: Mapping[str, int]) -> None:
    """They train as adapters of whole leaves, decoded once, do; each is on the stage of its leaf."""
    fn, tree = fs.lora(objective, blocks_of(), rank=3, alpha=6, targets="*.q_proj|*.down")
    with torch.no_grad():
        for number, adapter in enumerate(tree["adapters"].values()):
            adapter["b"].normal_(std=0.2, generator=torch.Generator().manual_seed(number))
    mesh = fs.make_mesh(**axes, simulated=True)
    rules = [("base.*", LayoutSpec(P("shard") if "shard" in axes else P(), codec=codec, trainable=False))]
    specs = fs.presets.full_shard(tree, mesh, rules=rules)
    named = fs.tree.flatten_with_paths(specs, is_leaf=lambda s: isinstance(s, LayoutSpec))[0]
    assert all(s.chunk == int("layers.1" in path) for path, s in named.items())
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), accumulate=3, backend="eager")

    def run(rank: int) -> Any:
        state, losses = step.init(tree), []
        for seed in range(3):
            state, metrics = step(state, *sharded.part(vectors(seed), mesh.data_rank, mesh.data_size))
            losses.append(metrics["loss"].item())
        return losses, fs.unshard(state.params, specs, mesh)

    base = dict(tree["base"])
    if codec:
        coder = fs.codecs.CODECS[codec]
        base = {p: coder.decode(coder.encode(v.detach()), tuple(v.shape), v.dtype) for p, v in base.items()}
    adapters = fs.tree.flatten_with_paths(tree["adapters"])[0]
    structure = fs.tree.flatten_with_paths(tree["adapters"])[1]

    def plain(p: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        whole = fs.tree.unflatten([p[path] for path in adapters], structure)
        return fn({"base": base, "adapters": whole}, *batch)

    expected = reference.train(plain, adapters, [[vectors(seed)] for seed in range(3)], reference.sgd(0.1))
    for losses, found in fs.simulate(mesh, run):
        sharded.assert_floats(losses, expected.losses)
        got = fs.tree.flatten_with_paths(found["adapters"])[0]
        for path, value in expected.params.items():
            torch.testing.assert_close(got[path], value, rtol=0, atol=1e-10, msg=path)


# ------------------------------------------------------------------ chunks of leaves
def test_a_rule_without_a_chunk_takes_that_of_its_unit() -> None:
    params = noise({f"layers.{i}.{n}": (4, 4) for i in range(4) for n in ("a", "b")} | {"norm.w": (4,)})
    mesh = fs.make_mesh(**AXES, abstract=True)
    rules = [("*.b", LayoutSpec(P(None, "shard"))), ("norm.w", LayoutSpec(unit="layers.3"))]
    specs = fs.presets.full_shard(params, mesh, rules=rules)
    assert {p: s.chunk for p, s in specs.items()} == {
        **{f"layers.{i}.{n}": i // 2 for i in range(4) for n in ("a", "b")}, "norm.w": 1,
    }  # fmt: skip
    assert all(s.chunk == "all" for s in fs.match_specs(params, [("*", LayoutSpec())]).values())


def test_a_tied_leaf_is_of_all_stages_and_stages_between_have_zeros_of_it() -> None:
    """Embedding and head are one leaf: no rule says so, and a stage that does not read it sums nothing."""
    model = gpt(layers=4, tied=True)
    expected = reference.train(model.loss, model.params, sharded.by_steps(model), reference.adamw(3e-3, 0.1),
                               frozen=model.frozen)  # fmt: skip
    axes, adamw = {"pipeline": 4, "shard": 2}, fs.optim.adamw(3e-3, weight_decay=0.1)
    for got in sharded.simulate(model, "full_shard", axes, adamw, accumulate=3, grad_norm=True):
        sharded.assert_same(got, expected)
        sharded.assert_floats(got.norms, expected.norms)
    mesh = fs.make_mesh(**axes, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh)
    assert specs["embed.weight"].chunk == "all"
    step = sharded.make_step(mesh, model, specs, adamw, accumulate=3)
    batch = sharded.part(model.batch(0), 0, 2)
    for stage, schedule in enumerate(step.lower(model.params, *batch).schedules):
        of_table = [i for i in schedule.instructions if "embed" in getattr(i, "bucket", "")]
        scattered = sum(isinstance(i, ReduceScatter) for i in of_table)
        (summed,) = [i for i in of_table if isinstance(i, AllReduce)]
        assert summed.axes == ("pipeline",) and scattered == (stage in (0, 3)) == bool(summed.reads)


def test_leaves_that_are_not_resharded_are_gathered_once_a_step() -> None:
    """torchtitan's pipelines do so too; other presets gather them for every micro-batch."""
    model = gpt(layers=4)
    mesh = fs.make_mesh(**AXES, abstract=True)
    batch = sharded.part(model.batch(0), 0, 2)
    gathers: dict[str, list[list[str]]] = {}
    for preset in ("full_shard", "shard_grad_op"):
        specs = fs.presets.PRESETS[preset](model.params, mesh)
        step = sharded.make_step(mesh, model, specs, fs.optim.sgd(0.1), accumulate=3)
        schedules = step.lower(model.params, *batch).schedules
        gathers[preset] = [[i.bucket for i in s.instructions if isinstance(i, Gather)] for s in schedules]
    for often, once in zip(gathers["full_shard"], gathers["shard_grad_op"], strict=True):
        assert len(once) == len(set(once)) == len(set(often)) and len(often) > 3 * len(once)


# ------------------------------------------------------------------ products in eight bits, bounded shapes
@pytest.mark.long
def test_products_in_eight_bits_are_those_of_one_stage() -> None:
    """Scales are of a stage's own leaves."""
    leaves = noise({f"layers.{i}.w": (32, 32) for i in range(4)})
    params = {path: nn.Parameter(leaf.float() / 2) for path, leaf in leaves.items()}
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    def loss(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for weight in p.values():
            x = torch.tanh(F.linear(x, weight))
        return x.float().square().mean()

    def losses(axes: dict[str, int]) -> list[float]:
        mesh = fs.make_mesh(**axes, simulated=True)
        specs = fs.presets.full_shard(params, mesh, compute_dtype=torch.float8_e4m3fn)
        step = fs.shard_step(
            loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager", accumulate=2,
            accumulate_mode="local",
        )  # fmt: skip

        def run(rank: int) -> list[float]:
            state, found = step.init(params), []
            for _ in range(2):
                state, metrics = step(state, *sharded.part((x,), mesh.data_rank, mesh.data_size))
                found.append(metrics["loss"].item())
            return found

        return fs.simulate(mesh, run)[0]

    assert losses(AXES) == losses({"shard": 2})


@pytest.mark.long
def test_bounded_rows_are_those_of_one_stage_and_more_are_an_error() -> None:
    params = noise({f"layers.{i}.w": (12, 12) for i in range(4)})

    def loss(p: Mapping[str, Tensor], x: Tensor) -> fs.Mean:
        first, *rest = p.values()
        chosen = fs.bounded(torch.tanh(x @ first)[x.sum(1) > 0], 2)
        for weight in rest:
            chosen = torch.tanh(chosen @ weight)
        return fs.Mean(chosen.square().sum(), (x.sum(1) > 0).sum())

    def losses(axes: dict[str, int], x: Tensor) -> list[float]:
        mesh = fs.make_mesh(**axes, simulated=True)
        specs = fs.presets.full_shard(params, mesh)
        step = fs.shard_step(
            loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager", accumulate=3
        )
        return fs.simulate(mesh, lambda rank: step(step.init(params), x)[1]["loss"].item())

    few = torch.ones(12, 12, dtype=torch.float64).cumsum(0) / 12
    few[::2] *= -1  # of four rows of a micro-batch two are chosen
    assert losses({"pipeline": 2}, few) == losses({"shard": 1}, few) * 2
    with raises(StateError, fix="a bound of 8", says=["6 more", "bound of 2"]):
        losses({"pipeline": 2}, few.abs())


# ------------------------------------------------------------------ ranks that read early or late
@pytest.mark.long  # test_adversary, and test_stages for messages
@pytest.mark.parametrize(
    ("preset", "chunks", "options"),
    [
        ("full_shard", 2, {"remat": "unit+offload", "prefetch": 2}),
        pytest.param("shard_grad_op", 1, {"micro_order": "breadth"}, marks=pytest.mark.long),
    ],
)
def test_ranks_that_read_early_or_late_do_the_same_bitwise(
    preset: str, chunks: int, options: dict[str, Any]
) -> None:
    model, muon = gpt(layers=4, tied=True), fs.optim.muon(0.02, dtype=None)
    common = {"policy": {"chunks": chunks}, "accumulate": 3, "steps": 2, "grad_norm": True, **options}
    modes = [
        sharded.simulate(model, preset, AXES, muon, adversary=mode, **common)
        for mode in (None, "early", "late")
    ]
    for plain, *others in zip(*modes, strict=True):
        for other in others:
            assert other.losses == plain.losses and other.norms == plain.norms
            assert all(torch.equal(other.params[path], value) for path, value in plain.params.items())


# ------------------------------------------------------------------ random ops and statistics
@pytest.mark.long
def test_dropout_draws_on_stages_what_it_draws_on_one() -> None:
    model, adamw = gpt(layers=2, dropout=0.2), fs.optim.adamw(3e-3)
    (one, *_), (two, *_) = (
        sharded.simulate(model, "full_shard", axes, adamw, accumulate=3, accumulate_mode="local")
        for axes in ({"shard": 2}, AXES)
    )
    sharded.assert_same(two, one)


class Normed(nn.Module):
    """A module of matrices with batch norms between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.long
def test_batch_norm_of_all_rows_is_of_a_stages_ranks() -> None:
    """Losses, leaves and statistics are those of one process with all rows."""
    torch.manual_seed(0)
    module = Normed().double()
    expected = reference_of(module)
    apply, params = fs.make_functional(fs.sync_batch_norm(module))
    mesh = fs.make_mesh(**AXES, simulated=True)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(apply, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")

    def run(rank: int) -> Any:
        state = step.init(params)
        for seed in range(3):
            state, _ = step(state, *sharded.part(vectors(seed)[:1], mesh.data_rank, mesh.data_size))
        return fs.unshard(state.params, specs, mesh)

    for got in fs.simulate(mesh, run):
        for path, value in expected.items():
            torch.testing.assert_close(got[path].to(value.dtype), value, rtol=0, atol=1e-10, msg=path)


def reference_of(module: nn.Module) -> dict[str, Tensor]:
    """Return what three steps of plain SGD leave of a copy of a module."""
    plain = Normed().double()
    plain.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        plain(vectors(seed)[0]).backward()
        optimizer.step()
    return {path: value.detach() for path, value in plain.state_dict().items()}
