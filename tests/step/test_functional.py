"""`make_functional`: a module, unmodified, as a pure function of its leaves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor, nn

import fnshard as fs
from fnshard.functional import aliases
from fnshard.layout.spec import is_buffer


def test_parameters_and_buffers_each_once_and_known_apart() -> None:
    model = nn.BatchNorm1d(3)
    _, params = fs.make_functional(model)
    assert list(params) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [is_buffer(v) for v in params.values()] == [False, False, True, True, True]
    assert all(isinstance(params[p], nn.Parameter) for p in ("weight", "bias"))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = tied()

    def forward(self, ids: Tensor) -> Tensor:
        return self.parts["head"](self.parts["embed"](ids))


def test_a_tied_weight_is_one_leaf_under_its_first_name() -> None:
    model = Tied()
    apply, params = fs.make_functional(model)
    assert list(params) == ["parts.embed.weight"]
    assert aliases(model) == {"parts.head.weight": "parts.embed.weight"}
    leaf = params["parts.embed.weight"].detach().clone().requires_grad_()
    apply({"parts.embed.weight": leaf}, torch.tensor([0, 1])).pow(2).sum().backward()
    model(torch.tensor([0, 1])).pow(2).sum().backward()
    torch.testing.assert_close(leaf.grad, model.parts.embed.weight.grad)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrap", [None, torch.compile, nn.DataParallel])
def test_what_wraps_a_module_adds_nothing_to_names(wrap: Any) -> None:
    """An attribute that is called `module` is one."""
    model = wrap(Inner()) if wrap else Inner()
    apply, params = fs.make_functional(model)
    assert list(params) == [f"module.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
    assert set(fs.units.by_class(model, nn.Linear)(params).values()) == {"module.0", "module.1"}
    step = fs.shard_step(
        lambda p, x: apply(p, x).sum(), fs.match_specs(params, [("*", fs.LayoutSpec())]), backend="eager"
    )
    assert torch.equal(step(step.init(model), torch.ones(1, 2))[1]["module.1.bias"], torch.ones(2))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("share", [Tensor.detach, lambda w: w.detach().T, lambda w: w.detach()[1:, :2]])
def test_parameters_that_share_memory_are_tied_or_refused(share: Any, deferred: bool) -> None:
    with fs.deferred() if deferred else nullcontext():
        both, model = torch.randn(3, 6), nn.ModuleList([nn.Linear(3, 3, False), nn.Linear(3, 3, False)])
        model[1].weight = nn.Parameter(share(model[0].weight))
        apart = nn.ParameterList([both[:, :3], both[:, 3:]])
    with raises(
        fs.StateError,
        leaves=["params['0.weight']", "params['1.weight']"],
        fix=["b.weight = a.weight", ".clone()"],
    ):
        fs.make_functional(model)
    for module in (apart, model.requires_grad_(False)):
        assert len(fs.make_functional(module)[1]) == 2


def test_memory_is_compared_beyond_the_next_leaf_in_it() -> None:
    whole = torch.randn(10)
    parts = nn.ParameterList([nn.Parameter(t, requires_grad=False) for t in (whole, whole[:2])])
    parts.append(nn.Parameter(whole[5:7]))
    with raises(fs.StateError, leaves=["params['0'] and params['2']"], fix=["b.weight = a.weight"]):
        fs.make_functional(parts)
