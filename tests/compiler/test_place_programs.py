"""Programs on all ranks of an axis are the program of one device; what views make of placements."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from placed import assert_placed, cut, exchanges, trace_whole
from programs import programs
from torch import Tensor

import fnshard as fs
from fnshard.compiler.place.placement import Split, divides, fits, local_shape, through_view

f64 = torch.float64
MODEST = hypothesis.settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
MLP = {"up": Split(0), "b": Split(0), "down": Split(1)}


def leaves(*, width: int = 6, hidden: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (hidden, width), "b": (hidden,), "down": (width, hidden), "c": (width,), "norm": (width,)}
    return {p: torch.randn(s, dtype=f64, generator=draw) for p, s in shapes.items()}


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(1))


def mlp(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, p["up"], p["b"])), p["down"])


def stacked(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute two residual blocks without biases, whose norms read the residual."""
    for _ in range(2):
        x = x + mlp(p, F.rms_norm(x, (x.shape[-1],), p["norm"])) + 0 * p["c"]
    return F.rms_norm(x, (x.shape[-1],)).square().mean()


def test_what_has_been_summed_stays_split() -> None:
    """Sequence parallelism: each block scatters its sum once and gathers it once, with a norm between."""
    params, batch = leaves(), (rows(4, 6, 6),)
    program = trace_whole(stacked, params, batch)
    placed = assert_placed(program, params, batch, MLP)
    assert Counter(exchanges(placed)) == {"reduce_scatter": 2, "all_gather": 1}
    assert Counter(exchanges(assert_placed(program, params, batch, MLP, residual="whole"))) == {"psum": 2}


def written(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.relu_(F.linear(x, p["up"], p["b"]))
    h += 1.0
    h[0] = 2 * h[1]
    h = F.linear(h, p["down"])
    h += x
    h[:, :2] *= p["c"][:2]
    h[1].fill_(0.5)
    return h.square().mean() + 0 * p["norm"].sum()


def test_writes_in_place() -> None:
    params, batch = leaves(), (rows(4, 6),)
    placed = assert_placed(trace_whole(written, params, batch), params, batch, MLP)
    assert "all_gather" not in exchanges(placed)


def lowered_in_half(p: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = F.layer_norm(F.linear(x, p["up"], p["b"]), (12,))
        h = F.linear(h, p["down"], p["c"])
        assert h.dtype == torch.bfloat16
        return F.cross_entropy(h, torch.arange(6) % 6) + 0 * p["norm"].sum()


def test_composite_ops_of_tensors_that_are_alike_meet_in_one_op() -> None:
    """They share a graph; found by the metric of a policy's loss, which counted one of two."""

    def both(p: dict[str, Tensor], x: Tensor) -> Tensor:
        one = F.linear(x, p["up"], p["b"])
        other = one * 1.5 + 0.1
        low, high = (one < -0.1) & (other < 0), (one > 0.1) & (other > 0)
        return ((low | high) * (F.softsign(one) - F.softsign(other)) + F.mish(one) * F.mish(other)).sum()

    params, batch = leaves(), (rows(4, 6),)
    assert_placed(trace_whole(both, params, batch), params, batch, MLP)


def test_autocast_is_that_of_the_op_that_is_expanded() -> None:
    params = {p: v.float() for p, v in leaves().items()}
    batch = (rows(6, 6).float(),)
    program = trace_whole(lowered_in_half, params, batch)
    placed = assert_placed(program, params, batch, {**MLP, "c": Split(0)}, atol=0.1)
    products = placed.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [n.meta["val"].dtype for n in products] == [torch.bfloat16] * 2


def fused(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Any:
    return fs.losses.linear_cross_entropy(mlp(p, x) + p["c"] + p["norm"], p["head"], targets, chunk=4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fused_loss_of_a_split_vocabulary_holds_no_logits(ranks: int) -> None:
    params = leaves() | {"head": rows(40, 6)}
    targets = torch.randint(40, (4, 3))
    targets[0, 0] = -100
    batch = (rows(4, 3, 6), targets)
    program = trace_whole(fused, params, batch)
    placed = assert_placed(program, params, batch, {"head": Split(0)}, ranks)
    values = [n.meta["val"] for n in placed.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    logits = {(*rows, words) for rows in ((4, 3), (12,)) for words in (40, 40 // ranks)}
    assert not logits & {tuple(value.shape) for value in values}
    parts = placed.graph.find_nodes(op="call_function", target=torch.ops.fnshard.token_parts.default)
    assert [n.args[4] for n in parts] == [1]


def test_ops_without_a_rule_take_whole_values_and_warn() -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.linear(x, p["up"])
        return torch.cdist(h, h + 1.0).mean() + 0 * sum(v.sum() for v in p.values())

    params, batch = leaves(), (rows(5, 6),)
    with pytest.warns(UserWarning, match=r"aten\._cdist_forward"):
        assert_placed(trace_whole(fn, params, batch), params, batch, MLP)


def through_strides(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h, other = F.linear(x, p["up"], p["b"]), F.linear(x, p["up"])
    h.as_strided((3, 12), (24, 1), 0).mul_(2.0)
    h = h + torch.linalg.solve(x @ x.mT + torch.eye(6, dtype=f64), other)
    return F.linear(h, p["down"]).square().mean() + 0 * (p["norm"].sum() + p["c"].sum())


def test_what_no_smaller_ops_define_takes_whole_values() -> None:
    """A write through strides, and an op that checks values."""
    params, batch = leaves(), (rows(6, 6),)
    with pytest.warns(UserWarning, match="linalg_solve"):
        assert_placed(trace_whole(through_strides, params, batch), params, batch, MLP)


class Normalised(torch.autograd.Function):
    """A gradient of length one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def normalised(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.linear(Normalised.apply(x * p["norm"]), p["up"], p["b"])
    return F.linear(Normalised.apply(h), p["down"]).square().mean() + 0 * p["c"].sum()


@pytest.mark.parametrize("inputs", [MLP, {}, {"0": Split(0)}], ids=str)
def test_a_gradient_that_is_not_linear_is_given_the_whole_one(inputs: Any) -> None:
    params, batch = leaves(), (rows(6, 6),)
    assert_placed(trace_whole(normalised, params, batch), params, batch, inputs)


@hypothesis.settings(MODEST, max_examples=4)
@hypothesis.given(programs(), st.randoms(use_true_random=False))
def test_any_program_on_any_split(program: Any, draw: Any) -> None:
    """Programs of the grammar, whose leaves and batch are split somehow."""
    params, batch = program.leaves(), program.part(0)
    try:
        whole = trace_whole(program, params, batch)
    except fs.TraceError:
        hypothesis.assume(False)
    for ranks in (2, 3):
        inputs = {}
        for each, node in zip(whole.inputs, whole.placeholders, strict=True):
            shape = node.meta["val"].shape
            even = fits if each.kind == "batch" else divides
            splits = [
                Split(d, o) for d in range(len(shape)) for o in (1, 2) if even(shape, Split(d, o), ranks)
            ]
            if splits and each.kind in ("leaf", "batch") and draw.random() < 0.6:
                inputs[each.name] = draw.choice(splits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_placed(whole, params, batch, inputs, ranks, draw.choice(["split", "whole"]), 1e-9)


# ------------------------------------------------------------------ random numbers


def drops(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Call every random op that takes a tensor."""
    h = F.dropout(x * p["w"], 0.4)
    h = F.alpha_dropout(h, 0.3) + torch.bernoulli(h.sigmoid())
    h = F.dropout1d(h, 0.4)
    q = h.unsqueeze(2).unflatten(-1, (2, -1)).transpose(1, 3).flatten(2, 3)
    return (h.sum() + F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)).sum()


@pytest.mark.suite({
    "S(1)": "parts",
    "S(2, outer=2)": "parts of several blocks each",
})  # fmt: skip
@pytest.mark.parametrize("split", [Split(0), Split(1), Split(2), Split(0, 2), Split(2, 2)], ids=str)
def test_masks_are_those_of_one_device(split: Split) -> None:
    params, batch = {"w": rows(4, 8, 8)}, (rows(4, 8, 8),)
    program = trace_whole(drops, params, batch)
    for ranks in (2, 4):
        if divides((4, 8, 8), split, ranks):
            assert_placed(program, params, batch, {"0": split, "w": split}, ranks)


# ------------------------------------------------------------------ placements


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))
    out = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(0, len(factors)), max_size=4)) | {0, len(factors)})
        out.append(tuple(torch.Size(factors[a:b]).numel() for a, b in itertools.pairwise(cuts)))
    return out[0], out[1]


@hypothesis.settings(MODEST, max_examples=60)
@hypothesis.given(views(), st.integers(0, 5), st.sampled_from([1, 2, 3]), st.sampled_from([2, 3, 4]))
def test_a_split_behind_a_view_is_the_view_of_a_split(shapes: Any, dim: int, outer: int, ranks: int) -> None:
    before, after = shapes
    split = Split(dim % len(before), outer)
    hypothesis.assume(fits(before, split, ranks))
    moved = through_view(split, before, after, ranks)
    if before == after:
        assert moved == split
    if moved is None:
        return
    x = torch.arange(torch.Size(before).numel())
    parts, expected = cut(x.view(before), split, ranks), cut(x.view(after), moved, ranks)
    for part, other in zip(parts, expected, strict=True):
        assert torch.equal(part.reshape(local_shape(after, moved, ranks)), other)


@pytest.mark.parametrize(("split", "before", "after", "moved"), [
    (Split(2), (2, 3, 12), (2, 3, 4, 3), Split(2)),
    (Split(1), (4, 6), (24,), Split(0, 4)),
    (Split(0, 4), (24,), (4, 6), Split(1)),
])  # fmt: skip
def test_a_split_goes_through_a_view_that_parts_or_joins_dims(
    split: Split, before: tuple[int, ...], after: tuple[int, ...], moved: Split
) -> None:
    assert through_view(split, before, after, 2) == moved


def test_what_a_slice_cuts_off_counts_for_nothing() -> None:
    """Its padding is the last number that is kept: the one that was cut may have no finite slope."""
    params = {"emb": torch.rand(16, 4, dtype=torch.float64)}

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, p["emb"]).square().sum(-1) * (torch.arange(8) < 7)
        return h[:, :-1].sqrt().mean()

    mesh = fs.make_mesh(context=2, simulated=True)
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))
    assert fs.debug.check(loss, params, tokens, fs.presets.full_shard(params, mesh), mesh=mesh)
