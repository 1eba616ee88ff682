"""Trees of all kinds: registered classes, aux, batches with keywords, parameter trees with constants."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import attrs
import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, SpecError, StateError, TraceError

X = torch.linspace(1, 2, 4, dtype=torch.float64)
ROWS = torch.linspace(-1, 1, 16).reshape(4, 4)


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, atol=1e-10, rtol=0)


def params() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}


def make(fn: Any, tree: Any = None, **options: Any) -> Any:
    specs = fs.match_specs(params() if tree is None else tree, [("*", LayoutSpec())])
    return fs.shard_step(fn, specs, backend="eager", **options)


# ------------------------------------------------------------------ registered classes


@dataclasses.dataclass
class Unknown:
    total: Any
    name: str = ""


class Pair:
    def __init__(self, z: Any, a: Any):
        self.z, self.a = z, a


fs.tree.register(Pair, lambda p: {"z": p.z, "a": p.a}, lambda d: Pair(**d))


@fs.tree.register
@dataclasses.dataclass
class Data:
    z: Any
    a: Any


class Named(NamedTuple):
    z: Any  # not in alphabetical order: optree's own would be
    a: Any


@fs.tree.register
@attrs.define
class Attrs:
    z: Any
    a: Any


class Mapped(dict[str, Any]):
    """A dict that is registered with torch alone, with names, as transformers' outputs are."""

    z, a = property(lambda self: self["z"]), property(lambda self: self["a"])


pytree.register_pytree_node(
    Mapped,
    lambda m: (list(m.values()), list(m)),
    lambda values, names: Mapped(zip(names, values, strict=True)),
    flatten_with_keys_fn=lambda m: ([(pytree.MappingKey(k), v) for k, v in m.items()], list(m)),
)


@pytest.mark.parametrize("make_tree", [Named, Data, Attrs, Pair, lambda z, a: Mapped(z=z, a=a)])
def test_records_are_parameters_batches_aux_and_arguments_of_torch_func(make_tree: Any) -> None:
    tree, batch = make_tree(params()["w"], params()["w"] + 1), make_tree(X, X + 1)

    def fn(p: Any, b: Any) -> Any:
        rows = p.z * b.z + p.a
        return (rows * b.a).square().sum(), make_tree(rows.sum(), {"rows": rows})

    record = type(batch)
    assert list(fs.tree.flatten_with_paths(batch)[0]) == ["z", "a"]
    step = make(fn, tree, optimizer=fs.optim.sgd(0.1))
    state, metrics = step(step.init(tree), batch)
    grads, expected = torch.func.grad_and_value(lambda p: fn(p, batch)[0])(tree)
    torch.testing.assert_close(metrics["loss"].double(), expected, atol=0, rtol=1e-6)
    assert type(state.params) is type(metrics["aux"]) is type(grads) is record
    same(metrics["aux"].a["rows"], fn(tree, batch)[1].a["rows"])
    same((state.params.z, state.params.a), (tree.z - 0.1 * grads.z, tree.a - 0.1 * grads.a))


@fs.tree.register
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A module as Equinox's are: what is no tensor is static."""

    w: Any
    b: Any = None
    act: Any = torch.tanh
    name: str = "linear"


def trees_of_two(w: Tensor, b: Tensor) -> dict[str, tuple[Any, list[str]]]:
    """Return trees of two leaves, and their paths."""
    return {
        "static fields": (
            {"layers": [Linear(w=w), Linear(w=b, act=torch.sin)]},
            ["layers.0.w", "layers.1.w"],
        ),
        "nested": (Data([Pair(w, None)], (b, {})), ["z.0.z", "a.0"]),
        "odd keys": ({"a/b@0,2#1 *[x]": w, "": {"é\n": b}}, ["a/b@0,2#1 *[x]", ".é\n"]),
        "tuple": ((w, "name", [None, {"w": b}], 2.0), ["0", "2.1.w"]),
    }


def kind_loss(p: Any, x: Tensor) -> Tensor:
    h = x
    for leaf in fs.tree.flatten(p)[0]:
        h = torch.tanh(h @ leaf)
    return h.square().mean()


@pytest.mark.parametrize("name", trees_of_two(X, X))
def test_every_kind_of_tree_is_trained_moved_saved_and_named(name: str, tmp_path: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    tree, paths = trees_of_two(*torch.randn(2, 4, 4, generator=draw).double())[name]
    leaves, form = fs.tree.flatten(tree)
    grads = torch.func.grad(lambda p: kind_loss(p, ROWS.double()))(leaves)
    expected = [w - 0.1 * g for w, g in zip(leaves, grads, strict=True)]
    mesh, rows = fs.make_mesh(shard=2, simulated=True), ROWS.double()
    specs, plain = fs.presets.full_shard(tree, mesh), fs.presets.no_shard(tree, mesh)
    step = fs.shard_step(kind_loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")
    forward = fs.shard_forward(kind_loss, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> None:
        part = rows[2 * rank : 2 * rank + 2]
        state = step.init(tree)
        same(forward(state.params, part), kind_loss(tree, part))
        state, _ = step(state, part)
        full = fs.unshard(state.params, specs, mesh)
        moved = fs.reshard(state, specs, plain, mesh).params
        assert fs.tree.flatten(full)[1] == fs.tree.flatten(moved)[1] == form and type(full) is type(tree)
        same((fs.tree.flatten(full)[0], fs.tree.flatten(moved)[0]), (expected, expected))

    fs.simulate(mesh, run)
    assert list(fs.tree.flatten_with_paths(tree)[0]) == paths
    globs = ["".join(f"[{c}]" if c in "*[" else c for c in path) for path in paths]
    one = make(kind_loss, tree, optimizer=fs.optim.sgd(0.1))
    state, _ = one(one.init(tree), rows)
    fs.checkpoint.save(tmp_path / "a", state)
    other = fs.match_specs(tree, [(glob, LayoutSpec(optimizer_memory="host")) for glob in globs])
    step = fs.shard_step(kind_loss, other, optimizer=fs.optim.sgd(0.1), backend="eager")
    restored = fs.checkpoint.restore(tmp_path / "a", step).params
    fs.hf.save(restored, tmp_path / "hf", other)
    for full in (restored, fs.hf.load(tmp_path / "hf", other)):
        assert fs.tree.flatten(full)[1] == form
        same(fs.tree.flatten(full)[0], expected)


class Ordered(collections.OrderedDict[str, Any]):
    pass


class Keyed(dict[str, Any]):
    pass


@pytest.mark.parametrize("value", [Ordered(w=X), Keyed(w=X), Unknown(X)])
def test_subclasses_of_containers_and_classes_that_nobody_registered_are_named(value: Any) -> None:
    name = type(value).__name__
    way = f"fs.tree.register({name}{'' if name == 'Unknown' else ', flatten, unflatten'})"
    with raises(SpecError, leaves=f"params['a'] is {name}", fix=way):
        make(lambda p, x: x, {"a": value})
    with raises(StateError, leaves=f"batch['0.a'] is {name}", fix=way):
        make(lambda p, b: p["w"].sum())(params(), {"a": value})
    with raises(TraceError, leaves=f"aux['a'] is {name}", fix=way):
        make(lambda p, x: ((p["w"] * x).sum(), {"a": value}))(params(), X)
    specs = fs.match_specs(params(), [("*", LayoutSpec())])
    with raises(TraceError, leaves=["output", f"is {name}"], fix=way):
        fs.shard_forward(lambda p, x: {"a": value}, specs, backend="eager")(params(), X)


def test_dicts_keep_their_order_here_and_nowhere_else() -> None:
    tree = {"b": 1, "a": {"d": 2, "c": 3}}
    assert list(fs.tree.flatten_with_paths(tree, constants=True)[0]) == ["b", "a.d", "a.c"]
    assert fs.tree.flatten(tree)[1] != fs.tree.flatten({"a": {"d": 2, "c": 3}, "b": 1})[1]
    assert optree.tree_leaves(tree) == [3, 2, 1]


def test_constants_in_aux_come_back() -> None:
    constants = {"n": 3, "name": "a", "none": None, "dtype": torch.float32, "numpy": np.float32(2)}
    step = make(lambda p, x: ((p["w"] * x).sum(), constants))
    (_, aux), _ = step(params(), X)
    assert aux == constants


# ------------------------------------------------------------------ constants and functions in params


def layered(scale: Any = 2.0, act: Any = F.gelu) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    w, inner = (torch.randn(4, 4, dtype=torch.float64, generator=g) for _ in range(2))
    return {"w": w, "layers": [{"w": inner, "b": None, "act": act, "scale": scale}], "dtype": torch.float64}


def layered_loss(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x.to(p["dtype"]), p["w"])
    for layer in p["layers"]:
        h = layer["act"](F.linear(h, layer["w"], layer["b"])) * layer["scale"]
    return h.square().mean()


def by_autograd(tree: Any) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [tree["w"].clone().requires_grad_(), tree["layers"][0]["w"].clone().requires_grad_()]
    loss = layered_loss({**tree, "w": leaves[0], "layers": [{**tree["layers"][0], "w": leaves[1]}]}, ROWS)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("lowered", [False, True])
def test_other_constants_than_the_specs_were_made_with_are_refused(lowered: bool) -> None:
    step = make(layered_loss, layered())
    if lowered:
        step(layered(), ROWS)
    with raises(SpecError, leaves="params['layers.0.scale'] is 3.0", fix="tensor", says="2.0"):
        step(layered(scale=3.0), ROWS)
    with raises(SpecError, leaves=["params['layers.0.act']", "relu"], says="gelu"):
        step.init(layered(act=F.relu))
    for wrong in (2, True, None):
        with raises(SpecError, leaves="params['layers.0.scale']"):
            step(layered(scale=wrong), ROWS)
    del (less := layered())["dtype"]
    with raises(SpecError, leaves="params['dtype']", says=["nothing", "torch.float64"]):
        step(less, ROWS)


def test_handwritten_specs_take_the_constants_of_the_parameters() -> None:
    specs = {"w": LayoutSpec(), "layers": [{"w": LayoutSpec()}]}
    step = fs.shard_step(layered_loss, specs, backend="eager")
    same(step(step.init(layered()), ROWS)[0], by_autograd(layered())[0])
    with raises(SpecError, leaves="params['layers.0.scale']"):
        step(layered(scale=3.0), ROWS)
