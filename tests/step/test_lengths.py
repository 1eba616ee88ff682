"""Batches of many lengths: padded by rule, traced for each length, compiled once for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernels import no_kernels
from models import generator
from sharded import assert_same, make_step
from tensor_models import VOCAB, WIDTH, block, decoder
from torch import Tensor

import fnshard as fs
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.kernels import symbolic
from fnshard.compiler.kernels.symbolic import Form
from fnshard.step import cache

PAD = {"1": fs.losses.IGNORE, "*": 0}
BUCKETS = fs.Buckets(4, pad=PAD)


def loss(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    """Of tokens without positions."""
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


@given(length=st.integers(1, 40), multiple=st.integers(1, 9))
def test_sequences_grow_to_the_next_multiple(length: int, multiple: int) -> None:
    buckets = fs.Buckets(multiple, pad={"labels": -100, "*.skip": None, "*": 0})
    marked = torch.ones(length, 2, dtype=torch.int64)
    rest = {
        "skip": torch.ones(2, length),
        "whole": fs.Whole(torch.ones(2, length)),
        "n": 3,
        "mask": marked > 0,
    }
    passed = Arguments((rest, fs.Sequence(marked, 0)), {"labels": marked.T})
    (rest, sequence), labels = buckets.padded(passed).positional, buckets.padded(passed).keywords["labels"]
    padded = -(-length // multiple) * multiple
    assert (
        labels.shape == (2, padded) and (labels[:, length:] == -100).all() and (labels[:, :length] == 1).all()
    )
    assert sequence.value.shape == (padded, 2) and not sequence.value[length:].any() and sequence.dim == 0
    assert labels.dtype == sequence.value.dtype == torch.int64 and rest["n"] == 3
    assert rest["skip"].shape == rest["whole"].value.shape == (2, length)


WRONG = {
    "no count": (lambda: fs.Buckets(0), "multiple=0: a whole number, at least 1"),
    "no number": (lambda: fs.Buckets(pad={"*": "0"}), r"pad\['\*'\]='0': a number, or None"),
    "no buckets": (lambda: make_step(fs.make_mesh(shard=1, abstract=True), decoder(), {}, None, shapes=64),
                   "shapes=64: fs.Buckets"),
    "a sequence of a number": (
        lambda: step_of(fs.make_mesh(shard=2, abstract=True)).lower(params(), fs.Sequence(2.0), 1),
        "fs.Sequence of float",
    ),
    "a batch that does not fit": (
        lambda: fs.Buckets(4, pad={"0": 0, "lables": -100, "3": None, "2": 0.5, "4": 1e9}).padded(Arguments((
            *batch(0, 3), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, 3),
            torch.zeros(2, 3, dtype=torch.float16),
        ))),
        r"(?s)pad\['lables'\]=-100 names no leaf.*'1'\] \[2, 3\] torch.int64 has a sequence, dim 1.*"
        r"'2'\].*torch.int64 cannot hold 0.5.*'4'\].* torch.float16 cannot hold 1000000000.0\nFix",
    ),
    "a pattern after one that takes all": (
        lambda: fs.Buckets(4, pad={"*": 0, "1": -100}).padded(Arguments(batch(0, 3))),
        r"pad\['1'\]=-100 names no leaf, or only leaves of a pattern before",
    ),
    "more than two dims, unnamed": (
        lambda: fs.Buckets(4, pad={"*": 0}).padded(Arguments((
            torch.ones(2, 3, 3) > 0, fs.Sequence(torch.ones(2, 3, 8))))),
        r"(?s)batch:\n  batch\['0'\] \[2, 3, 3\] torch.bool has more than two dims.*Fix: .*mask, \(1, 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_error(mistake: str) -> None:
    run, message = WRONG[mistake]
    with pytest.raises(fs.FnshardError, match=message):
        run()


# ------------------------------------------------------------------ training


LENGTHS = ((3, 5), (8, 2), (4, 4), (9, 12))  # of each rank, by step


def trained(rank: int) -> reference.Trained:
    """Ranks take batches of lengths of their own."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    step, out = step_of(mesh, optimizer=fs.optim.sgd(0.1)), reference.Trained()
    state = step.init(params())
    for number, lengths in enumerate(LENGTHS):
        state, metrics = step(state, *batch(2 * number + rank, lengths[rank]))
        out.losses.append(float(metrics["loss"]))
    out.params = fs.unshard(state.params, step.specs, mesh)
    return out


def test_ranks_with_lengths_of_their_own_train_as_one_process_without_padding(ranks: Any) -> None:
    parts = [[batch(2 * n + rank, lengths[rank]) for rank in range(2)] for n, lengths in enumerate(LENGTHS)]
    expected = reference.train(loss, params(), parts, reference.sgd(0.1))
    for got in ranks(2).run(trained):
        assert_same(got, expected)


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
    """Attention of each token to those that a mask [B, T, T] or [B, 1, T, T] names."""
    q, k, v = (F.embedding(tokens, p["table"]) @ p["w"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    mask = mask if mask.dim() == 4 else mask[:, None]
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    scores = F.linear(x, p["head"]).flatten(0, 1)
    return fs.Mean(F.cross_entropy(scores, targets.flatten(), reduction="sum"), (targets != -100).sum())


@pytest.mark.parametrize(
    ("axis", "dims", "fill"), [("context", (1, 2), False), ("shard", (-2, 3), -math.inf)], ids=str
)
def test_a_mask_is_padded_along_both_dims(axis: str, dims: tuple[int, int], fill: Any) -> None:
    leaves = {
        p: v.double() for p, v in floats({"table": (VOCAB, 8), "w": (8, 24), "head": (VOCAB, 8)}).items()
    }
    mesh = fs.make_mesh(**{axis: 2}, simulated=True)
    specs, buckets = fs.presets.full_shard(leaves, mesh), fs.Buckets(4, pad={"mask": fill, **PAD})
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


# ------------------------------------------------------------------ kernels of all lengths


@pytest.fixture(autouse=True)
def without_kernels() -> Iterator[None]:
    """Inductor rewrites the graphs that it compiles."""
    with no_kernels():
        yield


LEAVES = {"table": (VOCAB, WIDTH), "w": (WIDTH, WIDTH)}


def small(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    """Each token with those before it."""
    x = F.embedding(tokens, p["table"])
    x = (x @ p["w"]).cumsum(1).tanh() / torch.arange(1, tokens.shape[1] + 1)[:, None]
    return fs.losses.linear_cross_entropy(x, p["table"], targets)


def branching(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    found = small(p, tokens, targets)
    return fs.Mean(found.total * 3 if tokens.shape[1] == 16 else found.total, found.count)


def quadratic(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    found, t = small(p, tokens, targets), tokens.shape[1]
    return fs.Mean(found.total + p["w"].sum() * torch.ones(t, t).flatten().cumsum(0).mean(), found.count)


def floats(shapes: dict[str, Any]) -> dict[str, Tensor]:
    draw = generator(0)
    return {p: torch.randn(s, generator=draw) * 0.3 for p, s in shapes.items()}


@contextmanager
def counted(by: str = "eager") -> Iterator[mock.Mock]:
    """The calls of Inductor, which go to the backend `by`: which graphs are one does not depend on it."""
    compile_graph = symbolic.compile_graph
    with mock.patch.object(symbolic, "compile_graph") as calls:
        calls.side_effect = lambda graph, **how: compile_graph(graph, **{**how, "backend": by})
        yield calls


def compiled_graphs(
    fn: Any, leaves: dict[str, Tensor], lengths: tuple[int, ...], by: str = "eager"
) -> list[int]:
    """How many there are after each length, at which their gradients are those of the eager step."""
    mesh, counts = fs.make_mesh(shard=1, device="cpu"), list[int]()
    compiled, eager = (step_of(mesh, fn, leaves, backend=backend) for backend in ("inductor", "eager"))
    with counted(by) as calls:
        for number, length in enumerate(lengths):
            found, expected = (step(leaves, *batch(number, length)) for step in (compiled, eager))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            counts.append(calls.call_count)
    return counts


def test_the_second_length_compiles_for_all_others() -> None:
    first, second, *others = compiled_graphs(small, floats(LEAVES), (3, 9, 64, 3), "inductor")
    assert second == 2 * first and set(others) == {second}


@torch.library.custom_op("fnshard_lengths::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    """By rows of two factors; its backward has a constant of its own, of which no argument tells."""
    return x * torch.tensor([factor, 1.0]).repeat(x.shape[-1] // 2)


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * torch.tensor([context.factor, 1.0]).repeat(gradient.shape[-1] // 2), None


def _keep_factor(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(_scaled_backward, setup_context=_keep_factor)


def scaled_thrice(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> fs.Mean:
    x = F.embedding(tokens, p["table"])
    for layer, factor in enumerate((2.0, 3.0, 5.0)):
        x = scaled((x * p[f"layers.{layer}.w"]).tanh(), factor)
    return fs.losses.linear_cross_entropy(x, p["table"], targets)


def test_constants_of_a_backward_are_compared() -> None:
    leaves = floats({"table": (VOCAB, WIDTH), **{f"layers.{i}.w": (WIDTH,) for i in range(3)}})
    _, second, third = compiled_graphs(scaled_thrice, leaves, (3, 9, 6))
    assert second == third


@pytest.mark.parametrize("fn", [branching, quadratic])
def test_what_does_otherwise_at_a_length_is_compiled_for_it(fn: Any) -> None:
    first, second, third, fourth, again = compiled_graphs(fn, floats(LEAVES), (3, 9, 16, 18, 13))
    assert first < second < third <= fourth == again
    assert fn is branching or third < fourth


def test_announced_are_compilations_and_not_lengths() -> None:
    mesh, leaves = fs.make_mesh(shard=1, device="cpu"), floats(LEAVES)
    step = step_of(mesh, small, leaves, backend="inductor")
    with counted(), mock.patch.object(cache, "announce") as announced:
        for length in (3, 9, 6, 16):
            step(leaves, *batch(0, length))
    assert announced.call_count == 2
    lowered = [step.lower(leaves, *batch(0, length)) for length in (3, 9, 16)]
    assert len({each.memory_analysis().peak_bytes for each in lowered}) == 3


@given(data=st.data())
def test_numbers_of_two_lengths_say_those_of_a_third(data: Any) -> None:
    n, m, other = data.draw(st.lists(st.integers(1, 99), min_size=3, max_size=3, unique=True))
    lines = data.draw(st.lists(st.tuples(st.integers(-5, 99), st.integers(-9, 99))))
    at = lambda length: Form((), tuple(a * length + b for a, b in lines))  # noqa: E731
    found = at(n).expressions(n, at(m), m)
    assert found == lines and at(other).fits(found, other)
    assert not lines or not Form((), tuple(v + 1 for v in at(other).numbers)).fits(found, other)


@pytest.mark.parametrize("ranks", [2, 3])
def test_lengths_are_divided_by_the_ranks_that_split_them(ranks):
    """Whatever the multiple: else some lengths would be split and others not, by other collectives."""
    drawn = torch.Generator().manual_seed(0)
    params = {n: torch.randn(11, 8, dtype=torch.float64, generator=drawn) for n in ("embed", "head")}

    def loss(p, ids, labels):
        return fs.losses.linear_cross_entropy(F.embedding(ids, p["embed"]), p["head"], labels)

    def trained(mesh):
        step = fs.shard_step(
            loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=fs.optim.sgd(0.1),
            backend="eager", shapes=fs.Buckets(4, pad={"labels": -100, "*": 0}),
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
