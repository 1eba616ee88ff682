"""`fs.attention`: documents of packed rows and windows, against a mask of T x T."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard.errors import TraceError

F64 = torch.float64


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, documents: Tensor, window: int | None = None
) -> Tensor:
    """Attend within documents by a mask."""
    run = F.pad((documents[:, 1:] != documents[:, :-1]).long().cumsum(1), (1, 0))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    see = (run[:, :, None] == run[:, None]) & (distance.abs() < (window or q.shape[2]))
    see = see & (distance >= 0) if causal else see
    return F.scaled_dot_product_attention(q, k, v, see[:, None], enable_gqa=True)


def inputs(length: int, heads: int = 2, size: int = 6) -> list[Tensor]:
    made = torch.Generator().manual_seed(length)
    shapes = (2, 4, length, 6), (2, heads, length, 6), (2, heads, length, size)
    return [torch.randn(s, generator=made, dtype=F64).requires_grad_() for s in shapes]


@pytest.mark.suite({
    "True-None-700": "causal",
    "False-None-700": "both ways",
    "True-3-700": "a narrow window",
    "False-300-700": "a wide one",
    "True-300-20": "a window beyond the row",
    "False-1-20": "each its own",
})  # fmt: skip
@pytest.mark.parametrize(
    ("causal", "window", "length"), [*itertools.product([True, False], [None, 1, 3, 300], [20, 700])]
)
def test_values_and_gradients(causal: bool, window: int | None, length: int) -> None:
    """Heads that share keys, values of another size; documents of one token, and longer than a block."""
    tensors = inputs(length, size=8)
    documents = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 2 / length).long()
    documents = documents.cumsum(1) % 2  # an id comes again
    documents[:, 5] = 7
    how: dict[str, Any] = {"causal": causal, "window": window, "documents": documents}
    got, expected = fs.attention(*tensors, **how), attend_masked(*tensors, **how)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, tensors, slope) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def loss_of(
    params: dict[str, Tensor],
    x: Tensor,
    documents: Tensor,
    attend: Any = fs.attention,
    window: int | None = None,
) -> Tensor:
    q, k, v = (x @ params["a.w"]).split([16, 8, 8], -1)
    heads = [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v)]
    out = attend(*heads, documents=documents, window=window).transpose(1, 2).flatten(2)
    return (out @ params["b.w"]).square().mean()


PARAMS = {
    "a.w": torch.randn(6, 32, dtype=F64, generator=torch.Generator().manual_seed(2)),
    "b.w": torch.randn(16, 6, dtype=F64, generator=torch.Generator().manual_seed(3)),
}
X = torch.randn(2, 12, 6, dtype=F64, generator=torch.Generator().manual_seed(4))
DOCUMENTS = torch.tensor([[1] * 3 + [2] * 8 + [0], [1] * 7 + [2, 3, 3, 4, 4]])


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"shard": 2}, {"remat": "unit"}),
    ({"tensor": 4}, {}),  # two heads of keys, of which each rank takes one
    ({"context": 2}, {}),
    ({"context": 2}, {"context_attention": "ulysses"}),
    ({"context": 4}, {"context_attention": "gather"}),
    ({"context": 2, "tensor": 2}, {}),
]


@pytest.mark.suite({
    "axes4-*": "a window over ranks",
    "axes7-*": "no window",
    "axes8-*": "another way to exchange",
})  # fmt: skip
@pytest.mark.parametrize(
    ("axes", "how", "window"), [(*layout, window) for layout in LAYOUTS for window in (3, None)]
)
def test_axes(axes: dict[str, int], how: dict[str, Any], window: int | None) -> None:
    mesh = fs.make_mesh(**{"shard": 1, **axes}, simulated=True)
    rules = [("a.w", fs.LayoutSpec(fs.P("shard"))), ("b.w", fs.LayoutSpec(fs.P("shard")))]
    if "tensor" in axes:
        rules[1] = ("b.w", fs.LayoutSpec(fs.P("tensor"), compute=fs.P("tensor")))
    specs = fs.match_specs(PARAMS, rules)
    step = fs.shard_step(partial(loss_of, window=window), specs, mesh=mesh, backend="eager", **how)

    def run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        at = slice(rank, rank + 1) if axes.get("shard") else slice(None)
        batch = (X[at], DOCUMENTS[at])
        batch = tuple(fs.Sequence(t, 1) for t in batch) if "context" in axes else batch
        loss, grads = step(fs.shard(PARAMS, specs, mesh), *batch)
        return loss, fs.unshard(grads, specs, mesh)

    leaves = {p: v.clone().requires_grad_() for p, v in PARAMS.items()}
    expected = loss_of(leaves, X, DOCUMENTS, attend_masked, window)
    expected.backward()
    for loss, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
        for path, leaf in leaves.items():
            torch.testing.assert_close(grads[path], leaf.grad, rtol=0, atol=1e-10)


@pytest.mark.long
def test_inductor_and_bytes_are_linear() -> None:
    """Twice as long a row takes twice the bytes; a mask takes four times as many."""
    mesh = fs.make_mesh(shard=1, simulated=True)
    specs = fs.presets.full_shard(PARAMS, mesh)

    def peak(attend: Any, length: int) -> int:
        batch = torch.zeros(1, length, 6, dtype=F64), torch.zeros(1, length, dtype=torch.int64)
        step = fs.shard_step(partial(loss_of, attend=attend), specs, mesh=mesh, backend="eager")
        return step.lower(PARAMS, *batch).memory_analysis().peak_bytes

    short, long = (peak(fs.attention, n) for n in (2048, 4096))
    assert 1.9 * short < long < 2.1 * short
    short, long = (peak(attend_masked, n) for n in (2048, 4096))
    assert long > 3 * short
    step = fs.shard_step(loss_of, specs, mesh=mesh)
    lowered = step.lower(PARAMS, X, DOCUMENTS)
    assert lowered.attention == {"by documents": 1}
    loss, _ = fs.simulate(mesh, lambda rank: step(fs.shard(PARAMS, specs, mesh), X, DOCUMENTS))[0]
    torch.testing.assert_close(loss, loss_of(PARAMS, X, DOCUMENTS, attend_masked), rtol=0, atol=1e-10)


def test_mistakes() -> None:
    q, k, v = inputs(8)
    for given, leaves, says in (
        (
            {"documents": torch.zeros(2, 7, dtype=torch.int64)},
            "documents are torch.int64 [2, 7]",
            "integers [2, 8]",
        ),
        ({"documents": torch.zeros(2, 8)}, "documents are torch.float32 [2, 8]", "integers"),
        ({"window": 0}, "window is 0", "at least 1"),
    ):
        with raises(ValueError, leaves=leaves, says=says):
            fs.attention(q, k, v, **given)
    with raises(ValueError, leaves="key is [2, 3, 8, 6]", says="heads that divide 4"):
        fs.attention(q, k[:, [0, 1, 1]], v)
    mesh = fs.make_mesh(shard=1, context=2, simulated=True)
    specs = fs.presets.full_shard(PARAMS, mesh)
    step = fs.shard_step(loss_of, specs, mesh=mesh, context_attention="ring", backend="eager")
    with raises(TraceError, leaves="documents or a window", fix="'ulysses' or 'gather'"):
        step.lower(PARAMS, fs.Sequence(X, 1), fs.Sequence(DOCUMENTS, 1))
