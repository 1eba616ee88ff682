"""Lengths that depend on data: sharded, recomputed, compiled, what plain torch makes of the true lengths."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor
from torch.func import grad
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from toys import lower
from zoo import ROWS, WIDTH, Fn, Params, batches, check_compiled, named, params, table

import fnshard as fs
from fnshard import StateError, TraceError

EXPERTS = 4


def hidden(p: Params, x: Tensor) -> Tensor:
    return x @ p["layers.0.w"]


def experts(p: Params, x: Tensor, capacity: int = 0) -> Tensor:
    """Run two of four experts for each token, one after the other, each on the tokens that chose it."""
    weights, chosen = hidden(p, x)[:, :EXPERTS].softmax(-1).topk(2, dim=-1)
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for expert in range(EXPERTS):
        place, token = torch.where(mask[expert])
        token = fs.bounded(token, capacity) if capacity else token
        rows = F.silu(F.linear(x[token], p["layers.1.w"] * (expert + 1))) * weights[token, place, None]
        out.index_add_(0, token, rows)
    return (out @ p["layers.2.w"]).square().mean()


def experts_by_mask(p: Params, x: Tensor) -> Tensor:
    first, out = hidden(p, x)[:, :EXPERTS].argmax(-1), torch.zeros_like(x)
    for expert in range(EXPERTS):
        out[first == expert] = F.linear(x[first == expert], p["layers.1.w"] * (expert + 1)).tanh()
    return (out @ p["layers.2.w"]).square().mean()


def experts_by_sorting(p: Params, x: Tensor) -> Tensor:
    """Sort tokens by expert as MegaBlocks does, one run of rows each, and go back by the inverse order."""
    first = hidden(p, x)[:, :EXPERTS].argmax(-1)
    order, counts = first.argsort(stable=True), torch.bincount(first, minlength=EXPERTS)
    rows, starts, out = x[order], counts.cumsum(0) - counts, torch.zeros_like(x)
    for expert in range(EXPERTS):
        places = fs.bounded(
            torch.repeat_interleave(starts[expert : expert + 1], counts[expert : expert + 1]), 5
        )
        places = places + torch.arange(places.shape[0])
        out = out.index_add(0, order[places], F.gelu(rows[places] @ (p["layers.1.w"] * (expert + 1))))
    return (out @ p["layers.2.w"]).square().mean()


def statistics(p: Params, x: Tensor) -> Tensor:
    h = hidden(p, x)
    chosen = h[h > 0]  # whose logarithm no other element has
    return (
        chosen.log().mean()
        + chosen.sum() / chosen.shape[0]
        + chosen.std()
        + 1 / chosen.var()
        + chosen.amax() / (1 / chosen.shape[0])
    )


def losses(p: Params, x: Tensor) -> Tensor:
    mask = x[:, 0] > 0
    scores, others = hidden(p, x)[mask], (x @ p["layers.1.w"])[mask]
    loss = F.cross_entropy(others, scores.argmax(-1)) + F.mse_loss(scores, others)
    loss = loss + F.smooth_l1_loss(scores, others, reduction="sum") + F.huber_loss(scores, others)
    return loss + scores.view(-1, 2, 4).softmax(-1).square().sum() + F.layer_norm(others, (WIDTH,)).prod()


def joined(p: Params, x: Tensor) -> Tensor:
    first, second = hidden(p, x)[x[:, 0] > 0], x[x[:, 1] > 0] @ p["layers.1.w"]
    rows = torch.cat([first, second])
    shares = rows.softmax(0) * rows
    return shares.sum() + rows.sum(0).square().mean() + rows.amax(0).sum() + rows.cumsum(0).mean()


def products(p: Params, x: Tensor) -> Tensor:
    a = hidden(p, x)[x[:, 0] > 0]
    attended = (a @ a.T).softmax(-1) @ a
    return (a.T @ a).square().mean() + attended.mean()


def nested(p: Params, x: Tensor) -> Tensor:
    a = hidden(p, x)[x[:, 0] > 0]
    b = a[a[:, 1] > 0]
    a[:, 2] = a[:, 3] * 2
    a[:, 4] = 3
    a[:, 5] = a.shape[0]
    return (
        b.square().sum()
        + a.mean()
        + b.sum(0).abs().max()
        + a.flatten().square().mean()
        + (a * 2 + a).square().sum(0).mean()
    )


def scattered(p: Params, x: Tensor) -> Tensor:
    h, mask = hidden(p, x), x[:, 0] > 0
    places = mask.nonzero()[:, 0]
    copied = h.index_add(0, places, h[mask] * 2)
    put = torch.zeros_like(h).index_put((places,), h[places].sin())
    back = torch.zeros_like(h).masked_scatter(mask[:, None], h[mask].cos())
    return (copied * put).sum() + back.square().mean() + (torch.arange(places.shape[0]) * h[mask][:, 0]).sum()


def unique_rows(p: Params, x: Tensor) -> Tensor:
    ids = (10 * x.abs().sum(-1)).long() % 4
    values, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    table = p["layers.1.w"][values]
    chosen = torch.masked_select(hidden(p, x), x > 0.5)
    return (
        (table[inverse] * hidden(p, x)).sum()
        + (table * counts[:, None]).square().mean()
        + chosen.square().mean()
    )


def repeated(p: Params, x: Tensor) -> Tensor:
    counts = (10 * x[:, 0].abs()).long() % 3
    rows = fs.bounded(torch.repeat_interleave(hidden(p, x), counts, dim=0), 12)
    return rows.square().mean()


def broadcast(p: Params, x: Tensor) -> Tensor:
    """Select columns of rows that a mask chooses, and repeat each row as often as one number says."""
    rows = hidden(p, x)[x[:, 0] > 0]
    columns = torch.masked_select(rows.T, (x[0] > 0)[:, None])
    twice = fs.bounded(hidden(p, x).repeat_interleave((x[:1, 0] > 0).long() + 1, 0), 2 * len(x))
    normalized = F.layer_norm(rows, (rows.shape[1],))
    return (
        columns.square().sum()
        + twice.square().sum()
        + normalized.pow(3).sum()
        + rows.norm(3)
        + rows.norm(-1, 1).sum()
    )


def class_means(p: Params, x: Tensor) -> Tensor:
    """Average rows that a mask chooses; in some slices of the batch it chooses none."""
    h, label = hidden(p, x), (10 * x[:, 1].abs()).long() % 3
    chosen = (x[:, 0] > 0) & (x[0, 0] > 0)
    counts = torch.bincount(label[chosen], minlength=3).clamp(min=1)
    return (torch.zeros_like(h[:3]).index_add(0, label[chosen], h[chosen]) / counts[:, None]).square().sum()


def nothing(p: Params, x: Tensor) -> Tensor:
    h = hidden(p, x)
    return h[h > 1e9].log().sum() + h.mean()


def inside_a_transform(p: Params, x: Tensor) -> Tensor:
    slope = grad(lambda z: hidden(p, z)[x[:, 0] > 0].square().mean())(x)
    return slope.square().mean() + hidden(p, x).mean()


def counted(p: Params, x: Tensor) -> fs.Mean:
    h = hidden(p, x)
    return fs.Mean(h[x > 0].square().sum(), x[x > 0].shape[0])


def branches(p: Params, x: Tensor, cond: Any = torch.cond) -> Tensor:
    """Take the root and the logarithm of a negative number in branches that are not taken."""
    w = p["layers.1.w"]

    def root(z: Tensor) -> dict[str, Tensor]:
        return {"h": torch.sqrt(z.abs() * w.sum()).sum(-1)}

    def plain(z: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            scale = w.mean()
        made = torch.where(~(z > 0), z, 2 * z) @ w
        made += 1
        return {"h": made.sum(-1) * scale}

    h = hidden(p, x)
    total = w.sum()
    made = cond(total > 0, root, plain, (h,))["h"].mean()
    return made + cond(total < 0, lambda z: z @ w, lambda z: (z.abs() * total).log(), (h,)).mean()


def attention(p: Params, x: Tensor, attend: Any = flex_attention) -> Tensor:
    """Attend with scores that leaves shift, and a mask of blocks."""
    q, k = ((x.cumsum(0) @ p[f"layers.{i}.w"]).view(1, 1, *x.shape) for i in (0, 1))
    slope = p["layers.0.w"][0, 0]
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, len(x), len(x), device="cpu")
    return attend(q, k, k, lambda s, b, h, i, j: s + slope * (i - j), causal).square().mean()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, score_mod: Fn, mask: Any) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = score_mod(q @ k.mT / q.shape[-1] ** 0.5, 0, 0, i, j)
    return scores.masked_fill(i < j, -torch.inf).softmax(-1) @ v


PROGRAMS = named(
    experts, experts_by_mask, experts_by_sorting, statistics, losses, joined, products,
    nested, scattered, unique_rows, repeated, broadcast, class_means, nothing, inside_a_transform, counted,
    branches, attention,
)  # fmt: skip
TWINS: dict[str, Fn] = {  # what plain torch compiles, in Python
    "attention": partial(attention, attend=plain_attention),
    "branches": partial(branches, cond=lambda pred, yes, no, values: (yes if pred else no)(*values)),
}
test_sharded_gradients_are_those_of_plain_torch = pytest.mark.suite(
    but={
        "experts-*": "experts_by_mask",
        "experts_by_sorting-*": "experts_by_mask",
        "joined-*": "nested",
    }
)(table(PROGRAMS, TWINS))


def test_flex_attention_of_many_scores_is_refused() -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        return flex_attention(*[(x @ p["w"])[None, None]] * 3).mean()

    params, mesh = {"w": torch.zeros(4, 4)}, fs.make_mesh(shard=2, abstract=True)
    step = fs.shard_step(fn, fs.presets.full_shard(params, mesh), mesh=mesh)
    step.lower(params, torch.zeros(1024, 4))
    with raises(TraceError, leaves="1025 queries", fix="fs.attention"):
        step.lower(params, torch.zeros(1025, 4))


def bounded_experts(p: Params, x: Tensor) -> Tensor:
    return experts(p, x, capacity=6)


@pytest.mark.long  # one graph of lengths is compiled by tests/step/test_lengths.py
def test_inductor_compiles_it() -> None:
    check_compiled(bounded_experts)
    check_compiled(branches, TWINS["branches"])


# ------------------------------------------------------------------ bounds


def test_a_bound_is_the_size_that_kernels_have() -> None:
    small, large = (
        lower(lambda p, x, c=c: experts(p, x, c), params(), batches(1)[0], ranks=2).program for c in (3, 0)
    )
    rows = [
        [n.meta["val"].shape[0] for n in g.graph.nodes if "silu" in str(n.target)] for g in (small, large)
    ]
    assert rows == [[3] * EXPERTS, [2 * ROWS] * EXPERTS]
    assert len(small.outputs.limits) == EXPERTS and not large.outputs.limits


def exceeded(p: Params, x: Tensor) -> Tensor:
    chosen = fs.bounded(x[x[:, 0] > -9], 5)
    return (chosen @ p["layers.0.w"]).mean()


EXCEEDED = ["index at", "test_ragged.py:", "bound of 5"]


@pytest.mark.parametrize("kind", ["gradients", "state", "forward"])
def test_more_than_a_bound_is_an_error_on_every_rank(kind: str) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params(), mesh)
    optimizer = fs.optim.sgd(0.1) if kind == "state" else None
    step = fs.shard_step(exceeded, specs, mesh=mesh, backend="eager", optimizer=optimizer)
    forward = fs.shard_forward(exceeded, specs, mesh=mesh, backend="eager")

    def work(rank: int) -> None:
        given = step.init(params()) if kind == "state" else fs.shard(params(), specs, mesh)
        run = forward if kind == "forward" else step
        run(given, batches(1)[0][:5])
        given = step.init(params()) if kind == "state" else given
        with raises(
            StateError, leaves=EXCEEDED, fix="a bound of", says=f"{1 if kind == 'forward' else 2} more"
        ) as caught:
            run(given, batches(1)[0])
        assert "  chosen = " in str(caught.value)  # the user's line

    fs.simulate(mesh, work)


def test_plain_torch_holds_the_bound_too() -> None:
    with raises(StateError, leaves=["dim 0", "[6, 8]"], fix="fs.bounded(x,", says="bound of 5"):
        exceeded(params(), batches(1)[0])
    bound = fs.bounded(torch.ones(3, 4), 4, dim=1)
    assert bound.shape == (3, 4)


@pytest.mark.parametrize(
    ("fn", "leaves", "fix"),
    [
        (lambda p, x: hidden(p, x)[x[:, 0] > 0].flip(0).sum(), ["flip", "along a dim", "test_ragged"], ()),
        (lambda p, x: hidden(p, x)[x[:, 0] > 0][1:].sum(), "slice", ()),
        (lambda p, x: hidden(p, x)[x[:, 0] > 0].roll(len(x[x > 0]), 1).sum(),
         ["tensor's value", "lengths of data"], "torch.where"),
        (lambda p, x: hidden(p, x)[: (x > 0).sum().item()].sum(), "tensor's value", ()),
        (lambda p, x: (hidden(p, x)[x[:, 0] > 0].sum(), {"rows": x[x > 0]}), ["returned", "length"], ()),
        (lambda p, x: hidden(p, x)[x[:, 0] > 0].logsumexp(1).sum(), (), "takes no length"),
        (lambda p, x: F.mse_loss(hidden(p, x)[x > 0], x[x > 0]), (), "one mask"),
        (lambda p, x: fs.bounded(hidden(p, x)[x > 0], x.sum()).sum(), "`size`", "plain Python number"),
        (lambda p, x: fs.bounded(hidden(p, x)[x > 0].sum(), 2), "fs.bounded along dim 0 of []",
         "before it is reduced"),
        (lambda p, x: sum(hidden(p, x)[i].sum() for i in x[:, 0].nonzero()), (), "a fixed number"),
        (lambda p, x: x.repeat_interleave(x[:, 0].abs().long(), 0).sum(), "no bound", ()),
        # Padding would count as a class, in a mean, as a least number, as a position.
        (lambda p, x: F.cross_entropy(x[:3] @ hidden(p, x)[x[:, 0] > 0].T, torch.zeros(3).long()),
         ["classes", "log_softmax"], ()),
        (lambda p, x: F.layer_norm(z := x @ hidden(p, x)[x[:, 0] > 0].T, (z.shape[1],)).sum(),
         "layer_norm", ()),
        (lambda p, x: F.rms_norm(z := x @ hidden(p, x)[x[:, 0] > 0].T, (z.shape[1],)).sum(), "rms_norm", ()),
        (lambda p, x: torch.linalg.vector_norm(hidden(p, x)[x[:, 0] > 0], -1), "negative order", ()),
        (lambda p, x: hidden(p, x)[x[:, 0] > 0].T.argmax() * p["layers.0.w"].sum(), "positions", ()),
        (lambda p, x: torch.take_along_dim(hidden(p, x)[x[:, 0] > 0].T, torch.tensor([5, 9])).sum(),
         "take_along_dim", ()),
        (lambda p, x: torch.cond(x.sum() > 0, lambda z: z[1:], lambda z: z, (x,)).sum(),
         "branches of a torch.cond", "same shapes"),
    ],
)  # fmt: skip
def test_what_has_no_exact_form_is_refused(fn: Fn, leaves: Any, fix: Any) -> None:
    with raises(TraceError, leaves=leaves, fix=fix) as caught:
        lower(fn, params(), batches(1)[0], ranks=2)
    assert not any("/torch/" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))


def write_itself(z: Tensor) -> None:
    """Write to a tensor in each way that leaves other tensors as they are."""
    z.view(-1).add_(1.0)
    z[0] = 2.0
    z.data.mul_(3.0)
    torch.relu_(z)
    torch.add(z, 1.0, out=torch.empty_like(z))
    torch.func.vmap(torch.func.grad(lambda v: v.square().sum()))(z).add_(1.0)


@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.mul_(2),
        lambda z: z.view(-1).mul_(2),
        lambda z: z[:1].fill_(2.0),
        lambda z: z.contiguous().mul_(2),
        lambda z: z.detach().view(-1).mul_(2),
        lambda z: z.view(-1).data.view(-1).mul_(2),
        lambda z: torch.mul(z.detach(), 2, out=z.detach()),
        lambda z: torch.ops.aten._unsafe_view(z, (-1,)).mul_(2),
        lambda z: z.unsafe_chunk(2)[0].mul_(2),
        lambda z: z.unsafe_split(1)[0].mul_(2),
        lambda z: F.relu(z, inplace=True),
        lambda z: torch._foreach_add_([z], 1.0),
        lambda z: z.__setitem__(0, 2.0),
    ],
)
@pytest.mark.parametrize("is_batch", [True, False])
def test_a_branch_that_writes_to_a_tensor_from_outside_is_refused(
    write: Callable[[Tensor], Any], is_batch: bool
) -> None:
    """Both branches run, so the write would be done where the branch is not taken."""

    def write_and_sum(z: Tensor) -> Tensor:
        write(z)
        return z.sum()

    def fn(p: Params, x: Tensor) -> Tensor:
        y = x * 1.0 if is_batch else hidden(p, x)  # with and without a gradient
        return torch.cond(x.sum() > 0, write_and_sum, torch.sum, (y,)) + hidden(p, x).sum() + y.sum()

    with raises(TraceError, says="writes to", fix="clone"):
        lower(fn, params(), batches(1)[0], ranks=2)


def test_a_branch_may_write_to_tensors_of_its_own() -> None:
    def clone_and_write(z: Tensor) -> Tensor:
        own = z.clone()
        write_itself(own)
        return own.sum()

    def fn(p: Params, x: Tensor, cond: Any = torch.cond) -> Tensor:
        y = hidden(p, x)
        return cond(x.sum() > 0, clone_and_write, torch.sum, (y,)) + y.square().sum()

    def call_one(is_true: Tensor, yes: Fn, no: Fn, operands: tuple[Tensor, ...]) -> Tensor:
        return (yes if is_true else no)(*operands)

    mesh = fs.make_mesh(shard=1)
    loss = fs.shard_forward(fn, fs.presets.no_shard(params(), mesh), mesh=mesh, backend="eager")
    for x in (batches(1)[0], -batches(1)[0]):
        torch.testing.assert_close(loss(params(), x), fn(params(), x, cond=call_one))
