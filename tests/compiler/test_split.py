"""Splitting: where a program is cut, what crosses, and that equal blocks stay equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharded
import torch
import torch.nn.functional as F
from models import model_of
from torch import Tensor
from toys import ROWS, WIDTH, assert_same_grads, chain, llama, lower, rows, run_chain, step_of

import fnshard as fs
from fnshard.step.lowered import Lowered


def crossing(low: Lowered) -> list[list[Tensor]]:
    """Return the fake values that leave each segment."""
    return [[low.segments.values[o] for o in s.outputs] for s in low.segments.segments]


def saved_shapes(low: Lowered) -> set[tuple[int, ...]]:
    """Return the shapes of everything that is kept for the backward besides inputs and outputs."""
    return {a.shape for k in low.kernels.values() for a in k.saved}


def units(low: Lowered) -> list[tuple[str, ...]]:
    """Return the units of each segment."""
    return [s.units for s in low.segments.segments]


# ------------------------------------------------------------------ equal blocks


@pytest.mark.suite({
    "True-True-dtype0": "by hand, masked",
})  # fmt: skip
@pytest.mark.parametrize(
    ("by_hand", "masked", "dtype"), [(True, True, torch.float32), (False, False, torch.bfloat16)]
)
def test_one_activation_crosses_between_blocks(by_hand: bool, masked: bool, dtype: torch.dtype) -> None:
    loss, params, tokens = llama(3, dtype, by_hand=by_hand, masked=masked)
    low = lower(loss, params, tokens)
    assert units(low) == [("embed",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm",), ("head",)]
    *boundaries, last = crossing(low)
    assert [(tuple(v.shape), v.dtype) for b in boundaries for v in b] == [((2, 6, 16), dtype)] * len(
        boundaries
    )
    assert [tuple(v.shape) for v in last] == [()]


def test_any_depth_makes_the_same_kernels() -> None:
    kinds = {}
    for blocks in (4, 8):
        loss, params, tokens = llama(blocks)
        low = lower(loss, params, tokens)
        assert len(low.segments.segments) == blocks + 3
        kinds[blocks] = [s.code for s in low.segments.sources.values()]
        runs = [s.source for s in low.segments.segments[1:-2]]
        assert len(set(runs)) == 1
        assert len(low.kernels) == len(kinds[blocks]) == 4
    assert kinds[4] == kinds[8]


# ------------------------------------------------------------------ what may cross


def test_a_skip_connection_crosses_to_where_it_is_read() -> None:
    def fn(p, x):
        early = torch.sin(x @ p["layers.0.w"])
        return (early * run_chain(p, early)).sum()

    low = lower(fn, chain(4), rows())
    assert_same_grads(fn, chain(4), rows())
    last = low.segments.segments[-1]
    assert len([n for n in last.inputs if not n.startswith("leaf:")]) == 2
    # It is read from the segment that made it, not handed through those between.
    made = {o for s in low.segments.segments for o in s.outputs}
    assert sum(len(s.outputs) for s in low.segments.segments) == len(made)


@pytest.mark.parametrize(
    "view",
    [lambda y: y.chunk(2, 1), lambda y: y.unbind(0)[:2], lambda y: (y.view(-1), y.T.reshape(-1)[:3])],
    ids=["chunk", "unbind", "view"],
)
def test_views_are_made_again_in_the_consumer(view: Callable[[Tensor], Any]) -> None:
    def fn(p, x):
        y = torch.sin(x @ p["layers.0.w"])
        a, b = view(y)
        z = torch.tanh(x @ p["layers.1.w"])
        return z.pow(2).sum() * (a.sum() + b.pow(2).sum())

    low = lower(fn, chain(2), rows())
    crossed = [tuple(v.shape) for b in crossing(low)[:-1] for v in b]
    assert crossed == [(ROWS, WIDTH)]
    assert_same_grads(fn, chain(2), rows())


def test_results_of_one_op_with_several_outputs_stay_with_it() -> None:
    def fn(p, x):
        values, where = (x @ p["layers.0.w"]).topk(2)
        return ((x @ p["layers.1.w"]).gather(1, where) * values).sum()

    low = lower(fn, chain(2), rows())
    assert sorted(str(v.dtype) for v in crossing(low)[0]) == ["torch.float32", "torch.int64"]
    assert_same_grads(fn, chain(2), rows())


# ------------------------------------------------------------------ what rests on leaves alone

TALL = 40  # rows of a weight: a shape that no activation has


def tall(blocks: int = 3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    out = {}
    for i in range(blocks):
        out[f"layers.{i}.w"] = torch.randn(TALL, WIDTH, generator=draw) / 4
        out[f"layers.{i}.g"] = torch.rand(TALL, 1, generator=draw) + 0.5
    return out


def run_tall(params: Any, x: Tensor, weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compute tanh(x W^T W / TALL), with W made from two leaves."""
    for i in range(len(params) // 2):
        w = weight(params[f"layers.{i}.w"], params[f"layers.{i}.g"])  # [TALL, WIDTH]
        x = torch.tanh((x @ w.T) @ w / TALL)
    return x


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight norm": lambda w, g: g * w / w.norm(dim=1, keepdim=True),
    "dequantise": lambda w, g: ((w * 16).round() - 3.0) * g,
    "cast": lambda w, g: w.to(torch.float64).to(torch.float32),
    "transposed copy": lambda w, g: w.t().contiguous().t(),
    "sum": lambda w, g: w + g,
    "lookup": lambda w, g: torch.tanh(w)[torch.arange(TALL)],
}


@pytest.mark.suite({
    "lookup": "of rows, by indices that are made of nothing",
    "dequantise": "of two leaves",
    "weight norm": "a reduction, and what is made of it",
})  # fmt: skip
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_rests_on_leaves_alone_neither_crosses_nor_is_saved(kind: str) -> None:
    def fn(p, x):
        return run_tall(p, x, WEIGHTS[kind]).pow(2).sum()

    low = lower(fn, tall(), rows())
    derived = {(TALL, WIDTH), (WIDTH, TALL), (TALL, 1), (TALL,)}
    assert not derived & {tuple(v.shape) for b in crossing(low) for v in b}
    assert not derived & saved_shapes(low)
    assert_same_grads(fn, tall(), rows())


def test_a_penalty_on_leaves_is_computed_in_its_unit() -> None:
    def fn(p, x):
        penalty = sum(leaf.pow(2).sum() for leaf in p.values())
        return run_chain(p, x).sum() + 0.1 * penalty

    low = lower(fn, chain(4), rows())
    assert units(low) == [(f"layers.{i}",) for i in range(4)]
    assert [sorted(v.numel() for v in b) for b in crossing(low)[:-1]] == [[1, ROWS * WIDTH]] * 3
    assert [s.leaves for s in low.segments.segments] == [(f"layers.{i}.w",) for i in range(4)]
    assert_same_grads(fn, chain(4), rows())


def test_constants_made_from_nothing_do_not_cross() -> None:
    def fn(p, x):
        mask = torch.arange(WIDTH) > 3  # at the top, read by all blocks
        scale = torch.linspace(0, 1, WIDTH).exp()
        return run_chain(p, x, lambda x, i: torch.where(mask, x, x * scale)).sum()

    low = lower(fn, chain(4), rows())
    assert [len(b) for b in crossing(low)] == [1, 1, 1, 1]


# ------------------------------------------------------------------ writing in place


def test_a_cache_filled_by_all_blocks_is_cut_between_them() -> None:
    def fn(p, x):
        cache = x.new_zeros(3, ROWS, WIDTH)

        def block(x: Tensor, i: int) -> Tensor:
            cache[i] = x
            return x

        return run_chain(p, x, block).sum() + cache.sum()

    low = lower(fn, chain(3), rows())
    assert units(low) == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert_same_grads(fn, chain(3), rows())


# ------------------------------------------------------------------ odd programs


def test_a_unit_read_early_and_late() -> None:
    torch.manual_seed(0)
    embed = torch.randn(16, WIDTH)
    params = {"embed.w": embed, **chain(2)}

    def fn(p, ids):
        x = F.embedding(ids, p["embed.w"])
        x = run_chain({k: v for k, v in p.items() if k.startswith("layers")}, x)
        return F.cross_entropy(F.linear(x, p["embed.w"]), ids)

    ids = torch.arange(ROWS)
    low = lower(fn, params, ids)
    assert units(low) == [("embed",), ("layers.0",), ("layers.1",), ("embed",)]
    reduced = [i for i in low.schedule.instructions if i.verb == "reduce_scatter"]
    assert sorted(i.unit for i in reduced) == ["embed", "layers.0", "layers.1"]
    assert_same_grads(fn, params, ids)


def test_no_segment_returns_an_alias_of_its_input() -> None:
    def fn(p, x):
        y = torch.sin(x @ p["layers.0.w"])
        return (y.view(-1).sum() * (x @ p["layers.1.w"])).sum(), {
            "y": y.T,
            "x": x[0],
            "w": p["layers.0.w"].view(-1),
        }

    params, x = chain(2), rows()
    (_, aux), _ = step_of(fn, chain(2))(params, x)
    kept = {t.untyped_storage().data_ptr() for t in (*params.values(), x)}
    assert not kept & {t.untyped_storage().data_ptr() for t in aux.values()}
    expected = fn(params, x)[1]
    torch.testing.assert_close(aux, expected)


def test_differentiability_of_what_crosses_is_that_of_the_producer() -> None:
    """A value made under no_grad carries no tangent over the cut, whatever made it."""

    def fn(p, x):
        with torch.no_grad():
            scale = (x @ p["layers.0.w"]).abs().mean()
        return ((x @ p["layers.1.w"]) * scale).sum()

    low = lower(fn, chain(2), rows())
    first = next(iter(low.segments.sources.values()))
    assert [a.requires_grad for a in first.outputs] == [False]
    assert_same_grads(fn, chain(2), rows())


# ------------------------------------------------------------------ the models


@pytest.mark.suite({
    "islands": "values of a unit that is left and entered again",
    "in_place": "written to",
})  # fmt: skip
@pytest.mark.parametrize("name", ["several_outputs", "in_place", "unet", "islands"])
def test_what_crosses_a_cut_fills_its_memory(name: str) -> None:
    """A view of a larger tensor would keep all of it alive, and its copy would have other strides."""
    model = model_of(name)
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    lowered = sharded.make_step(mesh, model, specs, None).lower(model.params, *model.batch(0))
    for segment in lowered.segments.segments:
        for value in (lowered.segments.values[n] for n in segment.outputs):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), segment
