"""Random programs in random layouts against plain autograd, and the programs that came out wrong once.

`FUZZ=1000 pytest -n 0 --timeout 0 --hypothesis-show-statistics tests/compiler/test_fuzz.py` draws
1000 new programs for each test and counts how they end (right, refused, unstable). What fails is shrunk.
"""

from __future__ import annotations

import os
import textwrap
from typing import Any

import grammar
import pytest
import torch
from cases import AXES, PLACED, Case, cases, check, check_halves, on_rank
from hypothesis import HealthCheck, assume, event, given, settings
from programs import Program, programs
from ranks import pools, ranks, renew_pools  # noqa: F401  (fixtures)

from fnshard import P

EXAMPLES = int(os.environ.get("FUZZ", "0"))


def drawn(examples: int) -> settings:
    """Return settings for so many examples, always the same; with FUZZ, for so many new ones."""
    return settings(
        derandomize=not EXAMPLES, max_examples=EXAMPLES or examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def check_and_count(case: Case, *runner: Any) -> None:
    """Assert that a program is right, refused or unstable, and count which."""
    how = check(case, *runner).split(":")[0] or "right"
    event(how)
    assume(EXAMPLES or how == "right")  # of few, one that proves nothing is drawn again


def test_the_grammar_is_wide() -> None:
    assert sum(map(len, grammar.FAMILIES.values())) > 400


@drawn(1)
@given(programs())
def test_programs_on_one_rank(program: Program) -> None:
    check_and_count(Case(program))


@drawn(2)
@given(cases())
def test_programs_in_layouts(case: Case) -> None:
    check_and_count(case)


@drawn(1)
@given(cases(axes=({"shard": 2},), families=("in place", "silent", "views", "leaves", "constants")))
def test_writes_in_layouts(case: Case) -> None:
    check_and_count(case)


@drawn(1)
@given(cases(axes=PLACED, families=("silent", "in place", "views", "matrices")))
def test_writes_to_values_that_are_split(case: Case) -> None:
    check_and_count(case)


@drawn(1)
@given(cases(axes=({"shard": 2},), families=("functions", "buffers", "pointwise")))
def test_functions_and_buffers_in_layouts(case: Case) -> None:
    check_and_count(case)


HALVES = ("pointwise", "binary", "reductions", "copies", "index")


@pytest.mark.long
@drawn(5)
@given(programs(1, HALVES))
def test_reductions_and_ties_in_half_types_on_both_backends(program: Program) -> None:
    event(check_halves(program).split(":")[0] or "right")


@drawn(1)
@given(case=cases(axes=tuple(a for a in AXES if a.get("replicate", 1) * a["shard"] == 2)))
def test_programs_on_real_ranks(ranks: Any, case: Case) -> None:  # noqa: F811
    check_and_count(case, lambda case: ranks(2).run(on_rank, case))


# ------------------------------------------------------------------ found by it, and kept


def make_kept(body: str, **case: Any) -> Case:
    """Make a case of the lines of `program(p, x, ids, m, y)` and of what `Case` and `Program` take."""
    fields = {k: case.pop(k) for k in ("shapes", "sizes", "buffers") if k in case}
    return Case(Program(tuple(textwrap.dedent(body).strip().splitlines()), **fields), **case)


KEPT = {
    "a function whose only input with a gradient gets None": make_kept(
        """
        v = torch.tanh(x * p["u.w"])
        f = custom.function(lambda a, b: a * b.sin(), lambda g, y, a, b: (g * b, None), "")
        return (x + f(x, v) + v).square().mean()
        """,
        shapes={"u.w": (4,)},
    ),
    "a write to what kron gives, an unsafe view, where fn differentiates by it": make_kept(
        """
        v = torch.kron(x.sum((0, 1)), p["u.w"])
        v.mul_(2.0)
        slope = torch.autograd.grad((v * v * v).sum(), v, create_graph=True)[0]
        return slope.mean()
        """,
        shapes={"u.w": (2,)},
    ),
    "what an op returns as it is, under no_grad": make_kept(
        """
        h = x * p["u.w"]
        with torch.no_grad(): v = h.double()
        with torch.no_grad(): d = F.dropout(h, 0.5, False)
        with torch.no_grad(): a, b = torch.broadcast_tensors(h, x)
        return h.square().sum() + v.sin().sum() + (d * a * b).sum() + p["u.w"].square().sum()
        """,
        shapes={"u.w": (4,)},
    ),
    "two writes to what torch.tensor made": make_kept(
        """
        v = torch.tensor([0.1, 2.0], dtype=torch.float64)
        v.mul_(p["u.w"].mean())
        w = v.mul_(p["v.w"].mean())
        return w.square().sum() + v.sum() + x.sum()
        """,
        shapes={"u.w": (2,), "v.w": (2,)},
    ),
    "masks of Python bools": make_kept(
        """
        v = x * p["u.w"]
        v[..., None, [False, True, True]] = 3.0
        return (v[[True, False]].square() * x[:, [False, True, True]][:1, :1]).sum()
        """,
        shapes={"u.w": (3,)}, sizes=(2, 3, 3),
    ),
    "a view of what is joined with nothing": make_kept(
        """
        h = (x * p["u.w"]).view(2, 3, 2, 2).permute(0, 2, 1, 3)
        return torch.cat([h, h[..., :0]], -1).view(-1, 3, 2).square().mean()
        """,
        shapes={"u.w": (4,)}, sizes=(2, 3, 4),
    ),
    "a cache that layers write to and read": make_kept(
        """
        k = x.new_zeros(3, *x.shape)
        v, h = torch.zeros_like(k), x
        for i, n in enumerate("uvw"):
            k[i].copy_(h @ p[n + ".w"])
            v[i, :, :2] = (h @ p[n + ".w"].T)[:, :2]
            h = h + F.scaled_dot_product_attention(h, k[: i + 1].sum(0), v[i].clone())
        return h.square().mean() + k.mean()
        """,
        shapes={f"{u}.w": (4, 4) for u in "uvw"}, axes={"shard": 2}, options={"remat": "unit"},
    ),
    "slots of a residual, and views of views of it in another unit": make_kept(
        """
        h = x.new_zeros(x.shape[0], 3, 4)
        heads = h.unflatten(-1, (2, 2)).transpose(1, 2)
        for i, n in enumerate("uvw"):
            h[:, i] = torch.sin((x[:, 0] + h.sum(1)) @ p[n + ".w"])
            heads[:, 0].mT[:, 1:].mul_(p[n + ".w"].diagonal()[:3])
            h.diagonal(dim1=1, dim2=2)[:, :2].copy_(p[n + ".w"][0, :2])
        h[:, None, [2]] = 0.5
        h[m] += p["w.w"][1]
        return h.square().mean() + heads[..., 1].sum()
        """,
        shapes={f"{u}.w": (4, 4) for u in "uvw"}, axes={"shard": 2}, preset="zero2",
        options={"accumulate": 2},
    ),
    "softmax of a narrow value with a wide scale": make_kept(
        """
        v = (y * p["u.w"].expand(1)).log_softmax(1)
        return v.square().mean() + (y / p["u.w"].exp().expand(1)).softmax(1).square().mean()
        """,
        shapes={"u.w": ()},
    ),
    "a complex value in aux, copied to be contiguous": make_kept(
        """
        v = torch.view_as_complex(F.linear(x, p["u.w"]))
        return torch.view_as_real(v).sin().sum(), {"view": v}
        """,
        shapes={"u.w": (2, 4)},
    ),
    "writes to windows that leave elements out, and to transposed views of what is read flat": make_kept(
        """
        h = x * p["u.w"]
        h.unfold(-2, 2, 3)[..., 0].mul_(-0.7)
        h.movedim(-2, -1).masked_fill_(h.mT > 0.3, 0.5)
        h.unflatten(1, (2, 2)).transpose(1, 2).cumsum_(0)
        return h.flatten().sin().sum() + F.linear(x, p["u.w"].diag()).square().sum()
        """,
        shapes={"u.w": (2,)}, sizes=(3, 4, 2),
    ),
    "bounds of lengths where fn differentiates what it has computed": make_kept(
        """
        rows = fs.bounded(x.repeat_interleave(m.sum(1), 0), m.numel())
        v = torch.tanh(x @ p["u.w"])
        slope = torch.autograd.grad(v.square().sum(), v, create_graph=True)[0]
        counts = torch.bincount(ids.flatten(), minlength=5)
        return rows.softmax(0).square().sum() + slope.sum() + counts.double().mean()
        """,
        shapes={"u.w": (2, 2)}, sizes=(3, 4, 2),
    ),
    "a buffer gathered with a leaf that trains, in a second micro-batch": make_kept(
        """
        p["u.b"].mul_(0.9)
        return (x * p["u.w"] * p["u.b"]).square().mean()
        """,
        shapes={"u.w": (4,), "u.b": (4,)}, buffers={"u.b": torch.float64}, axes={"shard": 2},
        options={"accumulate": 2},
    ),
    "a buffer made of one that ranks write otherwise": make_kept(
        """
        p["u.b"].copy_(p["u.c"] * 0.5)
        p["u.c"].lerp_(x.mean((0, 1)), 0.5)
        return (x * p["u.w"] * p["u.b"]).square().mean()
        """,
        shapes={"u.w": (4,), "u.b": (4,), "u.c": (4,)}, axes={"shard": 2}, options={"accumulate": 2},
        buffers=dict.fromkeys(["u.b", "u.c"], torch.float64), aggregation={"u.c": "rank0"},
    ),
    "one op that writes to one memory twice, forward": make_kept(
        """
        v = x * 2
        a, b = torch._foreach_mul_([v, v], 0.5)
        return (a + b.cos() * p["u.w"]).square().mean()
        """,
        shapes={"u.w": (4,)},
    ),
    "one_hot where fn differentiates what it has computed": make_kept(
        """
        v = x * p["u.w"]
        slope = torch.func.vjp(lambda v: v.sin(), v)[1](v)[0]
        return (F.one_hot(ids, 5).double() + slope.sum()).square().mean() + x[m].square().mean()
        """,
        shapes={"u.w": (4,)},
    ),
    "the shape of a value that torch cannot differentiate": make_kept(
        """
        v = x.clone().scatter_(0, torch.full((1, 1, 1), 0), (x * p["u.w"].sum()).cos())
        w = p["v.w"].sum()
        return (w.expand_as(v) * x.reshape_as(v) + w.float().type_as(v)).square().mean()
        """,
        shapes={"u.w": (4,), "v.w": (4,)}, axes={"shard": 2},
    ),
    "as_strided of leaves and micro-batches, which lie in larger memory": make_kept(
        """
        w = p["u.w"].as_strided((2,), (2,), p["u.w"].storage_offset()) * p["u.v"][:2]
        return (x[:, 1:].as_strided((2, 1, 2), (1, 2, 1), x.storage_offset()).sin() * w).sum()
        """,
        shapes={"u.v": (3,), "u.w": (4,)}, axes={"shard": 2}, options={"accumulate": 2},
    ),
    "writes to conjugates and negatives, which are lazy views": make_kept(
        """
        a = torch.complex(x, x * p["u.w"])
        b = a.mH
        b[..., 0].mul_(torch.complex(x, x).mT[..., 0])
        a.conj().imag.add_(1.0)
        return ((a.mT * b).real + a.imag.mT).square().mean()
        """,
        shapes={"u.w": (4,)},
    ),
    "statistics of norms of a split value that was written to before": make_kept(
        """
        h = F.linear(x, p["u.w"])
        with torch.no_grad(): h[..., 0].mul_(2.0)
        a = F.batch_norm(h.mT, p["u.b"], p["u.c"].abs_(), training=True, momentum=0.3)
        b = F.instance_norm(h, p["u.d"], p["u.e"].abs_(), use_input_stats=True)
        return (a.sin() * 1.3).sum() + b.square().mean() * h.sum()
        """,
        shapes={"u.w": (4, 4), "u.b": (4,), "u.c": (4,), "u.d": (2,), "u.e": (2,)}, sizes=(3, 2, 4),
        buffers=dict.fromkeys(["u.b", "u.c", "u.d", "u.e"], torch.float64),
        axes={"shard": 1, "context": 2, "tensor": 2}, splits={"u.w": P("tensor"), "u.b": P("tensor")},
        options={"accumulate": 2},
    ),
    "statistics of a norm whose result nobody reads": make_kept(
        """
        F.batch_norm(x, p["u.b"], p["u.c"].abs_(), training=True)
        return p["u.w"].square().mean()
        """,
        shapes={"u.w": (4,), "u.b": (3,), "u.c": (3,)},
        buffers=dict.fromkeys(["u.b", "u.c"], torch.float64),
    ),
}  # fmt: skip


@pytest.mark.suite(but={
    "statistics of norms of a split value*": "test_place_writes has writes to split values",
    "slots of a residual*": "test_place_writes and test_inplace have views of views",
    "writes to windows that leave*": "test_strides",
    "a cache that layers write*": "test_buffers has state that is written",
})  # fmt: skip
@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    assert check(KEPT[name]) == ""
