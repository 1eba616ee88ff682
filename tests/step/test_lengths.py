"""Batches of many lengths: padded by rule to named lengths, each of which is compiled once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from errors import raises
from hypothesis import given
from hypothesis import strategies as st
from models import generator
from sharded import assert_same, make_step
from tensor_models import VOCAB, WIDTH, block, decoder
from torch import Tensor

import fnshard as fs
from fnshard.compiler.ir.arguments import Arguments

PAD = {"1": fs.losses.IGNORE, "*": 0}
BUCKETS = fs.Buckets([4, 8, 12, 16], pad=PAD)


def loss(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    """Compute the loss of tokens without positions."""
    hidden = block(p, F.embedding(tokens, p["embed.weight"]), 0)
    scores = F.linear(F.layer_norm(hidden, (WIDTH,), p["norm"]), p["embed.weight"])
    return fs.Mean(
        F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100),
        (targets != fs.losses.IGNORE).sum(),
    )


def params() -> dict[str, Tensor]:
    return {p: v for p, v in decoder(layers=1).params.items() if p != "pos"}


def batch(seed: int, length: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (2, rows, length), generator=generator(seed)).unbind()  # type: ignore[return-value]


def step_of(mesh: fs.Mesh, fn: Any = loss, leaves: Any = None, **options: Any) -> Any:
    specs = fs.presets.full_shard(params() if leaves is None else leaves, mesh)
    return fs.shard_step(fn, specs, mesh=mesh, shapes=BUCKETS, **{"backend": "eager", **options})


# ------------------------------------------------------------------ padding


@given(length=st.integers(1, 40), lengths=st.lists(st.integers(1, 60), min_size=1))
def test_sequences_grow_to_the_next_length(length: int, lengths: list[int]) -> None:
    lengths.append(60)
    buckets = fs.Buckets(lengths, pad={"labels": -100, "*.skip": None, "*": 0})
    marked = torch.ones(length, 2, dtype=torch.int64)
    rest = {
        "skip": torch.ones(2, length),
        "whole": fs.Whole(torch.ones(2, length)),
        "n": 3,
        "mask": marked > 0,
    }
    passed = Arguments((rest, fs.Sequence(marked, 0)), {"labels": marked.T})
    (rest, sequence), labels = buckets.padded(passed).positional, buckets.padded(passed).keywords["labels"]
    padded = min(each for each in lengths if each >= length)
    assert (
        labels.shape == (2, padded) and (labels[:, length:] == -100).all() and (labels[:, :length] == 1).all()
    )
    assert sequence.value.shape == (padded, 2) and not sequence.value[length:].any() and sequence.dim == 0
    assert labels.dtype == sequence.value.dtype == torch.int64 and rest["n"] == 3
    assert rest["skip"].shape == rest["whole"].value.shape == (2, length)
    wide = min(each for each in lengths if each >= 2)  # the mask has its two columns for a sequence
    assert rest["mask"].shape == (length, wide)
    assert rest["mask"][:, :2].all() and not rest["mask"][:, 2:].any()


WRONG = {
    "no list": (lambda: fs.Buckets(64), "lengths=64", "fs.Buckets(["),
    "no lengths": (lambda: fs.Buckets([]), "lengths=[]", "fs.Buckets(["),
    "no count": (lambda: fs.Buckets([4, 0]), ["lengths=[4, 0]", "at least 1"], "fs.Buckets(["),
    "no number": (lambda: fs.Buckets([4], pad={"*": "0"}), "pad['*']='0'", "pad={"),
    "a batch that is too long": (
        lambda: step_of(fs.make_mesh(shard=2, abstract=True)).lower(params(), *batch(0, 17)),
        ["batch['0'] [2, 17]", "17 long", "lengths 16", "batch['1']"], "add its length",
    ),
    "no buckets": (lambda: make_step(fs.make_mesh(shard=1, abstract=True), decoder(), {}, None, shapes=64),
                   ["shapes=64", "fs.Buckets"], ()),
    "a sequence of a number": (
        lambda: step_of(fs.make_mesh(shard=2, abstract=True)).lower(params(), fs.Sequence(2.0), 1),
        "fs.Sequence of float", (),
    ),
    "a batch that does not fit": (
        lambda: fs.Buckets(
            [4], pad={"0": 0, "lables": -100, "3": None, "2": 0.5, "4": 1e9}
        ).padded(Arguments((
            *batch(0, 3), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, 3),
            torch.zeros(2, 3, dtype=torch.float16),
        ))),
        ["pad['lables']=-100", "batch['1'] [2, 3] torch.int64", "dim 1", "batch['2']",
        "torch.int64 cannot hold 0.5",
         "batch['4']", "torch.float16 cannot hold 1000000000.0"], "pad=",
    ),
    "a pattern after one that takes all": (
        lambda: fs.Buckets([4], pad={"*": 0, "1": -100}).padded(Arguments(batch(0, 3))),
        "pad['1']=-100", (),
    ),
    "more than two dims, unnamed": (
        lambda: fs.Buckets([4], pad={"*": 0}).padded(Arguments((
            torch.ones(2, 3, 3) > 0, fs.Sequence(torch.ones(2, 3, 8))))),
        ["batch['0'] [2, 3, 3] torch.bool", "two dims"], "mask, (1, 2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_error(mistake: str) -> None:
    run, leaves, fix = WRONG[mistake]
    with raises(fs.FnshardError, leaves=leaves, fix=fix):
        run()


# ------------------------------------------------------------------ training


LENGTHS = ((3, 5), (8, 2), (4, 4), (9, 12))  # of each rank, by step


def train_lengths(rank: int) -> reference.Trained:
    """Train on ranks that take batches of lengths of their own."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    step, out = step_of(mesh, optimizer=fs.optim.sgd(0.1)), reference.Trained()
    state = step.init(params())
    for number, lengths in enumerate(LENGTHS):
        state, metrics = step(state, *batch(2 * number + rank, lengths[rank]))
        out.losses.append(float(metrics["loss"]))
    out.params = fs.unshard(state.params, step.specs, mesh)
    return out


@pytest.mark.long
def test_ranks_with_lengths_of_their_own_train_as_one_process_without_padding(ranks: Any) -> None:
    parts = [[batch(2 * n + rank, lengths[rank]) for rank in range(2)] for n, lengths in enumerate(LENGTHS)]
    expected = reference.train(loss, params(), parts, reference.sgd(0.1))
    for got in ranks(2).run(train_lengths):
        assert_same(got, expected)


@pytest.mark.long  # test_each_length has one rank
@pytest.mark.parametrize(
    "axes",
    [
        {"context": 2},
        *(pytest.param(a, marks=pytest.mark.long) for a in ({"tensor": 2}, {"tensor": 2, "context": 2})),
    ],
    ids=str,
)
def test_ranks_that_split_the_same_rows_may_exchange_otherwise_at_a_length(axes: dict[str, int]) -> None:
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = fs.presets.full_shard(params(), mesh, tensor="tensor" if "tensor" in axes else None)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager", shapes=BUCKETS)
    batches = [batch(length, length, rows=4) for length in (12, 4)]

    def run(rank: int) -> list[Tensor]:
        return [step(fs.shard(params(), specs, mesh), *each)[0] for each in batches]

    expected = [reference.gradients(loss, params(), *each)[1] for each in batches]
    for losses in fs.simulate(mesh, run):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)


def masked(p: dict[str, Tensor], tokens: Tensor, targets: Tensor, mask: Tensor) -> fs.Mean:
    """Attend from each token to those that a mask [B, T, T] or [B, 1, T, T] names."""
    q, k, v = (F.embedding(tokens, p["table"]) @ p["w"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    mask = mask if mask.dim() == 4 else mask[:, None]
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    scores = F.linear(x, p["head"]).flatten(0, 1)
    return fs.Mean(F.cross_entropy(scores, targets.flatten(), reduction="sum"), (targets != -100).sum())


@pytest.mark.suite({
    "context-*": "dims that an axis splits",
})  # fmt: skip
@pytest.mark.parametrize(
    ("axis", "dims", "fill"), [("context", (1, 2), False), ("shard", (-2, 3), -math.inf)], ids=str
)
def test_a_mask_is_padded_along_both_dims(axis: str, dims: tuple[int, int], fill: Any) -> None:
    leaves = {
        p: v.double() for p, v in floats({"table": (VOCAB, 8), "w": (8, 24), "head": (VOCAB, 8)}).items()
    }
    mesh = fs.make_mesh(**{axis: 2}, simulated=True)
    specs, buckets = fs.presets.full_shard(leaves, mesh), fs.Buckets([4, 8], pad={"mask": fill, **PAD})
    step = fs.shard_step(masked, specs, mesh=mesh, backend="eager", shapes=buckets)
    for length in (3, 8, 5):
        mask = (torch.rand(2, length, length, generator=generator(length)) > 0.5) | torch.eye(length).bool()
        if fill:
            mask = torch.zeros(2, 1, length, length).double().masked_fill(~mask[:, None], fill)
        passed = (*batch(length, length), mask)
        expected, mean = reference.gradients(masked, leaves, *passed)

        def run(rank: int, passed: Any = passed) -> Any:
            tokens, targets, mask = (v[rank:][:1] if axis == "shard" else v for v in passed)
            found = step(fs.shard(leaves, specs, mesh), tokens, targets, mask=fs.Sequence(mask, dims))
            return found[0], fs.unshard(found[1], step.specs, mesh)

        for found in fs.simulate(mesh, run):
            torch.testing.assert_close(found, (mean, expected), rtol=0, atol=1e-10)


def floats(shapes: dict[str, Any]) -> dict[str, Tensor]:
    draw = generator(0)
    return {p: torch.randn(s, generator=draw) * 0.3 for p, s in shapes.items()}


def test_each_length_is_traced_once() -> None:
    mesh, leaves = fs.make_mesh(shard=1, device="cpu"), params()
    step, plain = (
        step_of(mesh),
        make_step(mesh, decoder(layers=1), fs.presets.full_shard(leaves, mesh), None, loss=loss),
    )
    for length, traces in ((3, 1), (9, 2), (12, 2), (4, 2), (16, 3), (2, 3)):
        passed = batch(length, length)
        torch.testing.assert_close(step(leaves, *passed), plain(leaves, *passed), rtol=0, atol=1e-10)
        assert step.compile_stats.traces == traces
    lowered = [step.lower(leaves, *batch(0, length)) for length in (3, 9, 16)]
    assert len({each.memory_analysis().peak_bytes for each in lowered}) == 3


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_lengths_are_divided_by_the_ranks_that_split_them(ranks):
    """Whatever the lengths: else some lengths would be split and others not, by other collectives."""
    drawn = torch.Generator().manual_seed(0)
    params = {n: torch.randn(11, 8, dtype=torch.float64, generator=drawn) for n in ("embed", "head")}

    def loss(p, ids, labels):
        return fs.losses.linear_cross_entropy(F.embedding(ids, p["embed"]), p["head"], labels)

    def trained(mesh):
        step = fs.shard_step(
            loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=fs.optim.sgd(0.1),
            backend="eager", shapes=fs.Buckets([4, 8, 12], pad={"labels": -100, "*": 0}),
        )  # fmt: skip

        def run(rank):
            state, losses = step.init(params), []
            for length in (3, 7, 12, 5):
                ids = torch.arange(2 * length).view(2, length) % 11
                state, metrics = step(state, ids, ids)
                losses.append(metrics["loss"])
            return torch.stack(losses)

        return fs.simulate(mesh, run)

    (expected,) = trained(fs.make_mesh(shard=1, simulated=True))
    for losses in trained(fs.make_mesh(context=ranks, simulated=True)):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
