"""Unit policies: which leaves travel together."""

from __future__ import annotations

import torch
from errors import raises
from torch import nn
from toys import Block, Llama

import fnshard as fs
from fnshard import units
from fnshard.errors import SpecError


def params(*paths: str) -> dict[str, torch.Tensor]:
    return {p: torch.zeros(10) for p in paths}


def test_by_number_in_the_path() -> None:
    assert units.numeric(params("layers.0.a.w", "layers.0.b.w", "layers.10.a.w")) == {
        "layers.0.a.w": "layers.0",
        "layers.0.b.w": "layers.0",
        "layers.10.a.w": "layers.10",
    }


def test_other_leaves_go_to_the_shortest_module_that_has_no_numbered_unit() -> None:
    found = units.numeric(
        params("model.embed.w", "model.norm.w", "model.norm.b", "model.layers.0.w", "head.w", "scale")
    )
    assert found == {
        "model.embed.w": "model.embed",
        "model.norm.w": "model.norm",
        "model.norm.b": "model.norm",
        "model.layers.0.w": "model.layers.0",
        "head.w": "head",
        "scale": "scale",
    }


def test_the_first_number_counts() -> None:
    assert units.numeric(params("blocks.1.experts.2.w"))["blocks.1.experts.2.w"] == "blocks.1"


def test_a_number_at_the_end_is_a_leaf_and_no_module() -> None:
    assert units.numeric(params("weights.0", "weights.1")) == {"weights.0": "weights", "weights.1": "weights"}


def test_by_class_the_innermost_holds() -> None:
    model = Llama(2)
    _, leaves = fs.make_functional(model)
    blocks = units.by_class(model, Block)(leaves)
    assert {blocks[p] for p in leaves if p.startswith("layers.1.")} == {"layers.1"}
    assert (blocks["embed.weight"], blocks["head.weight"], blocks["norm.weight"]) == ("embed", "head", "norm")
    inner = units.by_class(model, Block, nn.Linear)(leaves)
    assert inner["layers.0.q.weight"] == "layers.0.q" and inner["layers.0.norm1.weight"] == "layers.0"


def test_by_class_the_tree_may_hold_the_model_below_other_names() -> None:
    model = Llama(2)
    apply, leaves = fs.make_functional(model)
    policy = units.by_class(model, Block)
    expected = policy(leaves)
    two = policy({"actor": leaves, "critic": leaves})
    assert two == {
        f"{net}.{p}": f"{net}.{unit}" for net in ("actor", "critic") for p, unit in expected.items()
    }
    # An adapter is in the unit of its leaf.
    _, tree = fs.lora(apply, leaves, rank=2, targets="*.q")
    specs = fs.match_specs(tree, [("*", fs.LayoutSpec())], units=policy)
    assert {p: spec.unit for p, spec in specs["base"].items()} == {
        p: f"base.{unit}" for p, unit in expected.items()
    }
    assert specs["adapters"]["layers.1.q.weight"]["a"].unit == "base.layers.1"


def test_by_class_names_that_are_ends_of_others() -> None:
    """A name counts where the model's own path of the leaf starts, and nowhere else in the path."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    _, leaves = fs.make_functional(model)
    policy = units.by_class(model, nn.Linear)
    of = {"0.0.weight": "0.0", "0.0.bias": "0.0", "1.weight": "1", "1.bias": "1"}
    assert policy(leaves) == of
    assert policy([leaves, leaves]) == {f"{n}.{p}": f"{n}.{unit}" for n in range(2) for p, unit in of.items()}
    outer = units.by_class(model, nn.Sequential)  # its instance "0" is no module of "1.0"
    assert set(outer([leaves, leaves]).values()) == {"0.0", "0.1", "1.0", "1.1"}
    # Leaves that the model does not have go by the names from the root.
    assert policy({**leaves, "1.scale": torch.ones(2)})["1.scale"] == "1"


def test_by_class_of_another_model_is_refused() -> None:
    _, leaves = fs.make_functional(nn.Sequential(nn.Linear(2, 2)))
    with raises(SpecError, leaves=["Block", "Llama", "params['0.weight']"], fix="by_class(model, Block)"):
        units.by_class(Llama(2), Block)(leaves)


def test_a_rule_may_name_the_unit() -> None:
    specs = fs.match_specs(
        params("a.x", "b.x"), [("a.*", fs.LayoutSpec(unit="both")), ("*", fs.LayoutSpec())]
    )
    assert (specs["a.x"].unit, specs["b.x"].unit) == ("both", "b")


def test_policies_are_taken_by_match_specs_and_presets() -> None:
    leaves = params("a.b.x", "a.c.x")
    mesh = fs.make_mesh(shard=2, abstract=True)

    def one(params: dict[str, torch.Tensor]) -> dict[str, str]:
        return dict.fromkeys(params, "a")

    assert {s.unit for s in fs.presets.full_shard(leaves, mesh, units=one).values()} == {"a"}
    assert {s.unit for s in fs.match_specs(leaves, [("*", fs.LayoutSpec())], units=one).values()} == {"a"}
