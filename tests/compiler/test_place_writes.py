"""Writes in place to values that an axis splits, those that autograd does not see among them, are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from placed import on_ranks, run_on_ranks, trace_whole
from torch import Tensor

import fnshard as fs
from fnshard.compiler.place.place import Axis, place
from fnshard.compiler.place.placement import Split
from fnshard.compiler.rewrites import pure
from fnshard.compiler.rewrites.in_place import Write
from fnshard.errors import TraceError

f64 = torch.float64
AT, ROWS = torch.tensor([2, 0]), torch.zeros(4, 1, 12, dtype=torch.long)
Writes = dict[str, Callable[[Tensor, Tensor], Any]]  # to h [4, 6, 12], of w [12]

COMPOSITE: Writes = {
    **{
        name: lambda h, w, name=name: getattr(h, name)()
        for name in (
            "square_", "absolute_", "negative_", "arctan_", "fix_", "sinc_", "sgn_", "expm1_",
            "logical_not_", "nan_to_num_", "deg2rad_", "relu_", "tanh_", "zero_",
        )
    },
    **{
        name: lambda h, w, name=name: getattr(h, name)(w.square() + 1.1)
        for name in (
            "divide_", "true_divide_", "multiply_", "subtract_", "xlogy_", "hypot_", "clamp_min_",
            "clamp_max_", "arctan2_", "copysign_", "greater_", "not_equal_", "logical_and_",
            "__iadd__", "__itruediv__",
        )
    },
    "clip": lambda h, w: h.clip_(-0.3, 0.4),
    "clip_tensor": lambda h, w: h.clip_(w - 1, None),
    "float_power": lambda h, w: h.float_power_(2),
    "lerp": lambda h, w: h.lerp_(w.expand_as(h), 0.3),
    "addcmul": lambda h, w: h.addcmul_(w, w, value=0.4),
    "SELU": lambda h, w: torch.nn.SELU(True)(h),
    "ReLU": lambda h, w: torch.nn.ReLU(True)(h),
    "celu": lambda h, w: F.celu(h, inplace=True),
    "threshold": lambda h, w: F.threshold(h, 0.1, 0.3, True),
    "polygamma": lambda h, w: h.detach().abs_().add_(1).polygamma_(1),
}  # fmt: skip

PLACES: Writes = {
    "copy": lambda h, w: h.copy_(w),
    "fill": lambda h, w: h.fill_(w.sum()),
    "masked_fill": lambda h, w: h.masked_fill_(w > 0.1, 0.5),
    "masked_scatter": lambda h, w: h.masked_scatter_(w > 0.1, w.sin().repeat(24)),
    "index_put": lambda h, w: h.index_put_((AT,), w.cos(), accumulate=True),
    "index_add": lambda h, w: h.index_add_(1, AT, w.expand(4, 2, 12)),
    "index_copy": lambda h, w: h.index_copy_(2, AT, w[:2].expand(4, 6, 2)),
    "index_fill": lambda h, w: h.index_fill_(1, AT, 0.5),
    "scatter": lambda h, w: h.scatter_(1, ROWS, w.expand(4, 1, 12)),
    "scatter_add": lambda h, w: h.scatter_add_(1, ROWS, w.expand(4, 1, 12)),
    "setitem": lambda h, w: h.__setitem__((slice(None), AT), w),
    "diagonal": lambda h, w: h[0].fill_diagonal_(0.5),
    "diagonal_wrap": lambda h, w: h[1].mT.fill_diagonal_(2.0, wrap=True),
    "cumsum": lambda h, w: h.cumsum_(1),
    "triu": lambda h, w: h.triu_(1),
    "addr": lambda h, w: h[0].addr_(w[:6], w),
    "foreach": lambda h, w: torch._foreach_add_([h[0], h[1], h[0]], [w, w.sin(), w]),
}

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda h: h[:, 1:5:2],
    "slice_last": lambda h: h[..., 2:],
    "select": lambda h: h[:, 1],
    "select_last": lambda h: h[..., 3],
    "mT": lambda h: h.mT,
    "permute": lambda h: h.permute(2, 0, 1)[1:],
    "movedim": lambda h: h.movedim(0, 2),
    "view": lambda h: h.view(-1)[3:],
    "heads": lambda h: h.unflatten(-1, (3, 4)).transpose(1, 2)[:, 0],
    "flatten": lambda h: h.flatten(0, 1),
    "unsqueeze": lambda h: h[:, None, 2:],
    "diagonal": lambda h: h.diagonal(dim1=1, dim2=2),
    "unfold": lambda h: h.unfold(1, 2, 3)[..., 0],
    "strided": lambda h: h.as_strided((3, 12), (24, 1), 0),
    "complex": lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2))).imag,
    "conj": lambda h: torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2))).mH.mH)[..., 0],
    "narrow": lambda h: h.narrow(2, -4, 3),
}
THROUGH: Writes = {n: lambda h, w, v=v: v(h).mul_(-2).add_(w.sum()) for n, v in VIEWS.items()}
PIECES: Writes = {  # torch takes them under no_grad alone
    "chunk": lambda h, w: h.chunk(2, -1)[1].mul_(2),
    "split": lambda h, w: h.split([1, 5], 1)[1].add_(w),
    "unbind": lambda h, w: h.unbind(1)[2].copy_(w),
    "tensor_split": lambda h, w: h.tensor_split([2], 1)[0].neg_(),
    "hsplit": lambda h, w: h.hsplit(2)[1].square_(),
    "expand": lambda h, w: h[:, :1].expand(4, 6, 12).fill_(0.5),
    "out": lambda h, w: torch.mul(h[:, 1:], w, out=h[:, 1:]),
}


def conj(w: Tensor) -> Tensor:
    """Return six complex numbers that torch conjugates when they are read; their `imag` it negates then."""
    return torch.complex(w[:6], w[6:]).conj()


def pairs(h: Tensor) -> Tensor:
    """View each two numbers of the last dim as a complex one."""
    return torch.view_as_complex(h.unflatten(-1, (-1, 2)))


LAZY: Writes = {
    "view_as_complex": lambda h, w: pairs(h).copy_(conj(w)),
    "slice": lambda h, w: pairs(h)[:, 1:3].copy_(conj(w)),
    "select": lambda h, w: pairs(h)[:, 1].copy_(conj(w)),
    "diagonal": lambda h, w: pairs(h).diagonal(dim1=1, dim2=2).copy_(conj(w)),
    "narrow": lambda h, w: pairs(h).narrow(1, 2, 2).copy_(conj(w)),
    "unbind": lambda h, w: torch.no_grad()(lambda: pairs(h).unbind(1)[2].copy_(conj(w)))(),
    "view_as_real": lambda h, w: torch.view_as_real(pairs(h)).copy_(conj(w).imag[:, None]),
    "real": lambda h, w: pairs(h).real.copy_(conj(w).imag),
    "imag": lambda h, w: pairs(h).imag.copy_(conj(w).imag),
    "mul": lambda h, w: pairs(h).mul_(conj(w)),
    "setitem": lambda h, w: pairs(h).__setitem__((slice(None), 0), conj(w)),
}

HOW: dict[str, Callable[[Callable[..., Any], Tensor, Tensor], Any]] = {
    "seen": lambda write, h, w: write(h, w),
    "no_grad": lambda write, h, w: torch.no_grad()(write)(h, w),
    "data": lambda write, h, w: write(h.data, w.detach()),
    "detach": lambda write, h, w: write(h.detach(), w.detach()),
}


def assert_torchs(fn: Callable[..., Tensor], split: Split, keeps_writes: bool = False) -> None:
    """Assert that loss and gradients on two ranks of an axis that splits the input are those of torch."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, dtype=f64, generator=draw) for s in ((4, 6, 12), (12,)))
    params = {"w": w}
    program = trace_whole(fn, params, (x,))
    named = {i: split for i in program.inputs if i.name == "0"}
    placed = place(program, Axis("tensor", 2, named))
    assert any(isinstance(n.target, Write) for n in placed.graph.nodes) is keeps_writes
    found = []
    for run in ("torch", "ranks"):
        leaf, batch = w.clone().requires_grad_(), x.clone()
        if run == "torch":
            loss = fn({"w": leaf}, batch)
        else:
            values = {"w": leaf, "0": batch} | dict(program.constants)
            results = run_on_ranks(placed.graph, on_ranks(placed, values, named, 2), 2)
            loss = sum(r[program.outputs.loss] for r in results) / 2
        found.append([loss, *torch.autograd.grad(loss, [leaf])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def taken(writes: Writes, turn: int) -> dict[str, str]:
    """Return how each of the writes is made, one way after the other; `turn` moves all of them on."""
    ways = [way for way in HOW if writes is not PIECES or way != "seen"]  # which torch refuses of pieces
    return {name: ways[(number + turn) % len(ways)] for number, name in enumerate(writes)}


def loss_of(how: str, write: Callable[[Tensor, Tensor], Any], p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Write to a value in one of the ways, and read it afterwards."""
    h = x.sin() + p["w"] * 0.3
    HOW[how](write, h, p["w"])
    return h.sum() + h.square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.suite({
    "places-0-S(2)": "what writes to places, which the last dim's parts shift",
    "views-0-S(2)": "writes through views of parts",
    "lazy-0-S(1)": "numbers that are conjugated or negated when they are read",
})  # fmt: skip
@pytest.mark.parametrize("split", [Split(1), Split(2)], ids=str)
@pytest.mark.parametrize("turn", range(len(HOW)))
@pytest.mark.parametrize(
    "writes", [COMPOSITE, PLACES, THROUGH, PIECES, LAZY], ids=["ops", "places", "views", "pieces", "lazy"]
)
def test_a_write_to_a_split_value_is_torchs(writes: Writes, turn: int, split: Split) -> None:
    """Each write is made in each of its ways over all turns; the suite has few of them."""
    ways = taken(writes, turn)

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        losses = [loss_of(ways[name], write, p, x) for name, write in writes.items()]
        return sum(loss * (1 + 0.1 * i) for i, loss in enumerate(losses))

    assert_torchs(fn, split)


def test_what_has_no_form_without_a_write_takes_whole_values() -> None:
    """A view whose elements share a place, of a view: the write stays one node."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = (x.sin() + p["w"]).mT.contiguous().mT
        h.as_strided((2, 3), (6, 2), 1).mul_(2.0)
        return h.square().mean()

    assert_torchs(fn, Split(1), keeps_writes=True)


def test_what_does_not_run_without_a_write_takes_whole_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("the op's own error")

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x.sin() + p["w"]
        h[:, 1].mul_(2.0)
        return h.square().mean()

    monkeypatch.setitem(pure._PUTS, torch.ops.aten.select.int, fail)
    assert_torchs(fn, Split(1), keeps_writes=True)


def test_writes_in_turn_and_through_what_was_made_before() -> None:
    """Some that autograd sees and some that it does not, infinite values among them."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x.sin() + p["w"] * 0.3
        rows, heads = h.mT, h.unflatten(-1, (3, 4))
        h.mul_(2)
        with torch.no_grad():
            rows[:, 2:].clamp_(-1, 1)
            heads[..., 0] = -torch.inf
            h[:, 1].masked_fill_(h[:, 1] > 0.5, 0.5)
        h.data[..., 1:2].add_(0.3)
        rows[1:3].add_(p["w"][:1])
        with torch.no_grad():
            heads[..., 0] = -torch.inf
        return h.softmax(-1).square().sum() + heads[..., 1:].mean() + rows[1].sum()

    for split in (Split(1), Split(2)):
        assert_torchs(fn, split)


@pytest.mark.parametrize("of_batch", [False, True])
def test_a_silent_write_to_what_the_backward_reads_is_refused(of_batch: bool) -> None:
    """Through `.data` torch takes the derivative at what is written, in silence; else it raises."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x * p["w"]
        k = h.exp()
        (x if of_batch else k).data.mul_(2)
        return (h + k).sum()

    with raises(TraceError, leaves="f64[4, 6, 12]", fix="write to a copy", says="1 value"):
        trace_whole(fn, {"w": torch.ones(12, dtype=f64)}, (torch.ones(4, 6, 12, dtype=f64),))


@pytest.mark.parametrize("refused", [False, True])
def test_the_write_that_is_refused_is_the_one_that_the_backward_reads(refused: bool) -> None:
    """Not another silent one, nor one that autograd sees, whose new value has a gradient of its own."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = (x * p["w"]).exp()
        h.mul_(2)
        other, late = torch.zeros(3, dtype=f64), x * p["w"]
        other.data.add_(1)
        late.data.add_(1)
        k = late.sin()
        if refused:
            late[0].data.mul_(2)
        return h.mean() + other.sum() + k.mean()

    args = {"w": torch.ones(12, dtype=f64)}, (torch.ones(4, 6, 12, dtype=f64),)
    if not refused:
        assert trace_whole(fn, *args)
        return
    with raises(TraceError, leaves="f64[6, 12]", says="1 value") as reported:
        trace_whole(fn, *args)
    assert "f64[3]" not in str(reported.value)


@pytest.mark.suite({
    "{'shard': 2, 'tensor': 2}": "a split beside one of rows",
    "{'expert': 2}": "a split of experts",
})  # fmt: skip
@pytest.mark.parametrize("axes", [{"context": 2}, {"shard": 2, "tensor": 2}, {"expert": 2}], ids=str)
def test_a_step_whose_values_are_split_keeps_the_gradient_past_a_write(axes: dict[str, int]) -> None:
    """Generation and constrained losses mask so, without a line that autograd sees."""
    draw = torch.Generator().manual_seed(0)
    params = {n: torch.randn(s, dtype=f64, generator=draw) for n, s in (("w", (12, 8)), ("v", (2, 8, 12)))}
    x = torch.randn(4, 6, 8, dtype=f64, generator=draw)

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.linear(x, p["w"])
        with torch.no_grad():
            h[..., 0] = -1e4
        h.data[:, 1:].clamp_(-1, 1)
        return torch.einsum("btd,ecd->btec", h, p["v"]).softmax(-1).square().sum() / len(x)

    mesh = fs.make_mesh(**axes, simulated=True)
    specs = fs.presets.full_shard(params, mesh)
    if "tensor" in axes:
        specs["w"] = fs.LayoutSpec(fs.P("tensor"), compute=fs.P("tensor"))
    if "expert" in axes:
        specs["v"] = fs.LayoutSpec(fs.P("expert"), compute=fs.P("expert"))
    assert fs.debug.check(fn, params, x, specs, mesh=mesh)
