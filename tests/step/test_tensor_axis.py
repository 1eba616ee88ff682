"""A tensor axis: whatever it splits, losses and parameters are those of one process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from errors import raises
from sharded import assert_same, make_step, specs_of, train
from tensor_models import ROWS, VOCAB, WIDTH, T, block, decoder
from torch import Tensor

import fnshard as fs
from fnshard import StateError
from fnshard.compiler.schedule.instructions import Exchange, Gather, Wait

# Other meshes: test_matrix, test_context_attention.


@pytest.mark.long
def test_constrain_says_how_a_value_is_split() -> None:
    model = decoder(layers=1)

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return model.loss({**p, "pos": fs.constrain(p["pos"], fs.P(None, "tensor"))}, tokens)

    def counts(fn: Any) -> list[str]:
        mesh = fs.make_mesh(tensor=2, context=2, abstract=True)
        step = make_step(mesh, model, fs.presets.full_shard(model.params, mesh), None, loss=fn)
        lines = step.lower(model.params, *model.batch(0)).schedule.instructions
        return [line.detail for line in lines if isinstance(line, Exchange)]

    assert not any("tensor" in line for line in counts(model.loss))
    assert any("tensor" in line for line in counts(loss))


@pytest.mark.suite({
    "1.0": "where nothing else is made again",
})  # fmt: skip
@pytest.mark.parametrize("remat", ["unit", pytest.param(0.9, marks=pytest.mark.long), 1.0])
def test_what_was_gathered_is_gathered_again_where_a_unit_is_recomputed(remat: Any) -> None:
    """Between forward and backward a split sequence stays split, also where nothing else is made again."""
    model, mesh = decoder(), fs.make_mesh(tensor=2, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, tensor="tensor")

    def lowered(remat: Any) -> Any:
        return make_step(mesh, model, specs, None, remat=remat).lower(model.params, *model.batch(0))

    def gathers(step: Any, phase: str) -> int:
        lines = [i for i in step.schedule.instructions if isinstance(i, Exchange) and i.phase == phase]
        return sum(i.kind == "all_gather" and i.like.shape == (ROWS, T // 2, WIDTH) for i in lines)

    kept, again = lowered("none"), lowered(remat)
    assert gathers(again, "forward") == gathers(kept, "forward")
    assert gathers(again, "backward") == gathers(kept, "backward") + 2 * 2 + 1  # and the head's


@pytest.mark.parametrize(("overlap", "verbs"), [(0, "e w e w e w"), (1, "e e e w w w")])
def test_exchanges_of_one_attention_travel_together(overlap: int, verbs: str) -> None:
    """Queries, keys and values from sequence to heads, and the result back: four all-to-alls a block."""
    model, mesh = decoder(), fs.make_mesh(context=2, abstract=True)
    step = make_step(mesh, model, fs.presets.full_shard(model.params, mesh), None, overlap=overlap)
    lines = step.lower(model.params, *model.batch(0)).schedule.instructions
    block = [i for i in lines if i.phase == "forward" and i.unit == "layers.0"]
    kinds = {"exchange": "e", "wait": "w", "run": "r"}
    found = [kinds[i.verb] for i in block if i.verb in kinds and not (isinstance(i, Wait) and i.of is Gather)]
    assert " ".join(found) == f"r {verbs} r e w r"


@pytest.mark.suite({
    "tensor": "a part of the table on each rank",
})  # fmt: skip
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_tokens_outside_of_the_whole_table_are_refused(axis: str) -> None:
    """A rank that has a part of a table would take them for another rank's."""
    model, mesh = decoder(), fs.make_mesh(**{axis: 2}, simulated=True)
    specs = fs.presets.full_shard(model.params, mesh, tensor="tensor" if axis == "tensor" else None)
    step = make_step(mesh, model, specs, None)
    tokens = model.batch(0)[0].index_fill(1, torch.tensor([3]), VOCAB)

    def run(rank: int) -> None:
        step(fs.shard(model.params, specs, mesh), tokens)

    with raises(StateError, leaves="embedding of leaf 'embed.weight'", says=["0 to 15", "to 16"]):
        fs.simulate(mesh, run)


def lower_with(batch: Any = None, loss: Any = None, **preset: Any) -> Any:
    model, mesh = decoder(), fs.make_mesh(shard=2, tensor=2, context=2, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, **preset)
    step = make_step(mesh, model, specs, None, loss=loss)
    return step.lower(model.params, *(model.batch(0) if batch is None else (batch,)))


TOKENS = torch.zeros(ROWS, T, dtype=torch.int64)
WRONG = {
    "a sequence that is no dim": (
        lambda: lower_with(fs.Sequence(TOKENS, 5)), "fs.Sequence of [4, 8]", "a dim that it has"
    ),
    "a sequence of a number": (lambda: lower_with(fs.Sequence(2.0)), "fs.Sequence of float", ()),
    "a sum over ranks with the same rows": (
        lambda: lower_with(loss=lambda p, t: fs.psum(p["pos"].sum(), "tensor") + t.sum()),
        "fs.psum over 'tensor'", "leave it out",
    ),
    "a leaf computed over context": (
        lambda: lower_with(tensor={"layers.0.up_proj.weight": fs.P("context")}),
        "tensor['layers.0.up_proj.weight']", "another axis",
    ),
    "no name of an axis": (lambda: lower_with(tensor=["tensor"]), "tensor=['tensor']", "tensor='tensor'"),
    "a layout that is a name": (
        lambda: lower_with(loss=lambda p, t: fs.constrain(p["pos"], "tensor").sum() + t.sum()),
        ["fs.constrain", "str"], (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_error(mistake: str) -> None:
    run, leaves, fix = WRONG[mistake]
    with raises(fs.FnshardError, leaves=leaves, fix=fix):
        run()


def test_a_view_of_a_gathered_value_need_not_fit_its_strides() -> None:
    """A gather makes a value contiguous that `fn` has as a transpose, so that its view back is a copy."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        y = fs.constrain((x @ p["w"]).transpose(1, 2), fs.P())
        return (y.transpose(1, 2).view(-1) ** 2).mean()

    params, mesh = {"w": torch.randn(4, 6)}, fs.make_mesh(tensor=2, simulated=True)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(fs.P(), compute=fs.P(None, "tensor")))])
    assert fs.debug.check(loss, params, torch.randn(2, 3, 4), specs, mesh)


def test_a_data_axis_may_have_any_name() -> None:
    """Along "context" that splits rows, no sequence is split."""
    model, mesh = decoder(), fs.make_mesh(context=2, data_axes=["context"], simulated=True)
    specs = fs.presets.full_shard(model.params, mesh)
    assert fs.debug.check(model.loss, model.params, *model.batch(0), specs, mesh)


# ------------------------------------------------------------------ equal to a mesh of one rank


def on_mesh(model: Any, axes: dict[str, int], coded: tuple[str, ...] = ()) -> list[reference.Trained]:
    """Train a model on a mesh; leaves in `coded` are frozen, in codes."""
    mesh = fs.make_mesh(**axes, simulated=True)
    policy = {"tensor": "tensor" if "tensor" in axes else None}
    specs = specs_of(model, "full_shard", mesh, **policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        frozen = {p: model.params[p] for p in coded}
        specs |= fs.presets.full_shard(frozen, mesh, codec="nf4", trainable=False, **policy) if coded else {}
    step = make_step(mesh, model, specs, fs.optim.adamw(1e-2), remat="unit")
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, None, step=step, seed=7))


def dropped(p: dict[str, Tensor], tokens: Tensor) -> fs.Mean:
    """Drop out values that axes split, and compute a loss that holds no logits."""
    x = F.dropout(F.embedding(tokens, p["embed.weight"]) + p["pos"], 0.2)
    x = F.dropout(block(p, F.dropout(block(p, x, 0), 0.4), 1), 0.3, inplace=True)
    x = F.layer_norm(x, (WIDTH,), p["norm"])
    return fs.losses.linear_cross_entropy(x[:, :-1], p["head.weight"], tokens[:, 1:], chunk=5)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 2, "context": 2}], ids=str)
def test_masks_do_not_depend_on_the_mesh(axes: dict[str, int]) -> None:
    model = replace(decoder(tied=False), loss=dropped)
    (expected,) = on_mesh(model, {"shard": 1})
    for got in on_mesh(model, axes):
        assert_same(got, expected)


@pytest.mark.long  # tests/adapters has codes on a tensor axis
def test_frozen_codes_are_split_by_rows() -> None:
    """The codes of a rank's rows are rows of the codes; a matrix whose inputs would be split stays whole."""
    coded = ("layers.0.up_proj.weight", "layers.1.down_proj.weight")
    model = replace(decoder(tied=False), frozen=coded)
    (expected,) = on_mesh(model, {"shard": 1}, coded)
    for got in on_mesh(model, {"tensor": 2}, coded):
        assert_same(got, expected)
