"""Initialisation: each rank its own shards, values that do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import chain, step_of

import fnshard as fs
from fnshard import StateError


class Block(nn.Module):
    """A float, an int and a bool buffer, all set by its reset."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("scale", torch.empty(width))
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(width, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.fill_(0.5)
        self.steps.zero_()
        self.mask.copy_(torch.arange(len(self.mask)) % 2 == 0)


class Net(nn.Module):
    """Two blocks and a tied pair of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            x = torch.tanh(x @ block.weight) * block.scale * block.mask + block.steps
        return self.last(x)


def deferred(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with fs.deferred():
        return make()


def whole(
    source: Any, world: int, *, preset: str = "full_shard", params: Any = None, **options: Any
) -> dict[str, Tensor]:
    """What `step.init(source)` makes on a simulated mesh, put together again; all ranks must agree."""
    mesh = fs.make_mesh(shard=world, simulated=True)
    params = params if params is not None else fs.make_functional(source)[1]
    specs = fs.presets.PRESETS[preset](params, mesh)
    step = fs.shard_step(
        lambda p, x: x.sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager"
    )

    def run(rank: int) -> dict[str, Tensor]:
        state = step.init(source, **options)
        for path, spec in specs.items():
            assert state.params[path].shape == fs.layout.spec.block_shape(spec.shape, spec.storage, mesh)
        return fs.unshard(state.params, specs, mesh)

    first, *others = fs.simulate(mesh, run)
    for other in others:
        assert_equal(first, other)
    return first


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    assert [p for p in a if not torch.equal(a[p], b[p])] == []


@pytest.mark.parametrize("preset", ["full_shard", "zero2", "no_shard"])
def test_a_deferred_module_has_the_same_values_on_every_mesh(preset: str) -> None:
    once = whole(deferred(), 1, preset=preset, seed=3)
    for world in (2, 4):
        assert_equal(whole(deferred(), world, preset=preset, seed=3), once)
    assert once["layers.0.mask"].tolist() == [True, False] * 3
    assert once["layers.1.scale"].tolist() == [0.5] * 6
    assert int(once["layers.0.steps"]) == 0
    assert "last.weight" not in once


def test_a_full_tree_and_a_real_module_keep_their_values() -> None:
    torch.manual_seed(0)
    model = Net()
    params = {p: v.detach().clone() for p, v in fs.make_functional(model)[1].items()}
    for world in (1, 2, 4):
        assert_equal(whole(model, world), params)
        assert_equal(whole(params, world, params=fs.make_functional(model)[1]), params)


def test_leaves_that_have_values_keep_them() -> None:
    model = deferred()
    model.layers[0].scale = torch.full((6,), 7.0)
    assert whole(model, 2)["layers.0.scale"].tolist() == [7.0] * 6


def test_frozen_parameters_have_no_optimizer_state() -> None:
    model = deferred()
    model.first.weight.requires_grad_(False)
    params = fs.make_functional(model)[1]
    mesh = fs.make_mesh(shard=2, abstract=True, device="cpu")
    specs = fs.presets.full_shard(params, mesh)
    assert not specs["first.weight"].trainable and specs["first.bias"].trainable
    step = fs.shard_step(
        lambda p, x: x.sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager"
    )
    assert set(step.init(model).opt_state) == {"first.bias", "layers.0.weight", "layers.1.weight"}


def test_dtypes_and_master_weights() -> None:
    params = fs.make_functional(deferred())[1]
    mesh = fs.make_mesh(shard=2, abstract=True, device="cpu")
    policy = {"storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, **policy)
    step = fs.shard_step(
        lambda p, x: x.sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager"
    )
    state = step.init(deferred())
    assert state.params["first.weight"].dtype == torch.bfloat16
    assert state.params["layers.0.scale"].dtype == torch.float32  # a buffer keeps its own
    slots = state.opt_state["first.weight"]
    assert {s.dtype for s in slots.values()} == {torch.float32}
    # The master has the digits that the stored copy has not.
    plain = fs.shard_step(
        lambda p, x: x.sum(), fs.presets.full_shard(params, mesh), mesh=mesh,
        optimizer=fs.optim.adamw(1e-3), backend="eager",
    ).init(deferred())  # fmt: skip
    assert torch.equal(slots["master"], plain.params["first.weight"])
    assert torch.equal(state.params["first.weight"], slots["master"].bfloat16())
    assert not torch.equal(slots["master"], state.params["first.weight"].float())


def test_without_an_optimizer_init_gives_the_shards_alone() -> None:
    params = chain(2)
    mesh = fs.make_mesh(shard=4, abstract=True, device="cpu")
    specs = fs.presets.full_shard(params, mesh)
    shards = fs.shard_step(lambda p, x: x.sum(), specs, mesh=mesh).init(params)
    assert {p: tuple(v.shape) for p, v in shards.items()} == {"layers.0.w": (2, 8), "layers.1.w": (2, 8)}


# ------------------------------------------------------------------ what cannot be initialised


def init_on_one(source: Any, **options: Any) -> Any:
    params = fs.make_functional(source)[1] if isinstance(source, nn.Module) else source
    return step_of(lambda p, x: x.sum(), params).init(source, **options)


def test_a_meta_tree_names_all_leaves_and_the_way_out() -> None:
    params = {p: v.to("meta") for p, v in chain(2).items()}
    with pytest.raises(
        StateError, match=r"(?s)2 leaves on the meta.*'layers.0.w'.*'layers.1.w'.*fs.deferred"
    ):
        init_on_one(params)


def test_a_tree_of_other_shapes_is_refused() -> None:
    step = step_of(lambda p, x: x.sum(), chain(2))
    with pytest.raises(
        StateError, match=r"params\['layers.0.w'\] is \[3, 3\], its spec was made for \[8, 8\]"
    ):
        step.init({**chain(2), "layers.0.w": torch.zeros(3, 3)})
