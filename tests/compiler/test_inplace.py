"""Writes in place, as torch does them: whole or through a view, in one unit and between units.

Other operators are in the grammar of `test_fuzz`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor
from toys import assert_same_grads, step_of

from fnshard import TraceError

Params = Mapping[str, Tensor]

# ------------------------------------------------------------------ operands of other shapes

AT, SQUARE = torch.tensor([2, 0]), torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]])
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {  # to h [3, 3], of w [3, 3]
    "addmm": lambda h, w: h.addmm_(w[:, :2], w[:2]),
    "addr": lambda h, w: h.addr_(w[0], w[1]),
    "broadcast": lambda h, w: h.copy_(w[0]).mul_(w[:, :1]).clamp_(min=w.mean()),
    "foreach": lambda h, w: torch._foreach_mul_([h[0], h[1]], [w[0], w[1]]),
    "index_add": lambda h, w: h.index_add_(0, AT, w[:2], alpha=0.5),
    "index_copy": lambda h, w: h.index_copy_(1, AT, w[:, :2]),
    "index_fill": lambda h, w: h.index_fill_(0, AT, 0.5),
    "index_put": lambda h, w: h.index_put_((AT,), w[:2], accumulate=True),
    "index_reduce": lambda h, w: h.index_reduce_(0, AT, w[:2], "mean"),
    "masked_fill": lambda h, w: h.masked_fill_(SQUARE > 0, w[0, 0]),
    "masked_scatter": lambda h, w: h.masked_scatter_(SQUARE > 0, w),
    "put": lambda h, w: h.put_(AT, w[0, :2]),
    "scatter": lambda h, w: h.scatter_(1, SQUARE, w),
    "scatter_add": lambda h, w: h.scatter_add_(0, SQUARE, w),
    "scatter_reduce": lambda h, w: h.scatter_reduce_(1, SQUARE, w, "amax"),
}


@pytest.mark.suite({
    "units1-False": "of a value of another unit",
})  # fmt: skip
@pytest.mark.parametrize("through_view", [False, True])
@pytest.mark.parametrize("units", [("a.w", "a.v"), ("a.w", "b.w")])
def test_a_write_is_seen_by_its_base_and_by_earlier_views(units: tuple[str, str], through_view: bool) -> None:
    def loss(p: Params, x: Tensor) -> Tensor:
        total, (written, read) = x.sum(), (p[path] for path in units)
        for write in WRITES.values():
            base = written.expand(2, 3, 3) * x if through_view else written * x
            view = base.view(-1)
            write(base[0] if through_view else base, read)
            total = total + base.square().sum() + view[::2].sum()
        return total

    draw = torch.Generator().manual_seed(0)
    params = {path: torch.rand(3, 3, generator=draw, dtype=torch.float64) + 0.1 for path in units}
    assert_same_grads(loss, params, torch.ones((), dtype=torch.float64), atol=1e-10, rtol=0)


# ------------------------------------------------------------------ strides, and what is refused


NEW = torch.__version__ >= "2.12"


def gaps(x: Tensor) -> Tensor:
    """Make a tensor of 4 numbers, with as much room between them."""
    return torch.empty_strided((4,), (2,), dtype=x.dtype).copy_(x)


def tripled(x: Tensor) -> Tensor:
    return gaps(x).as_strided((2,), (2,)).mul_(3)


def overlap(x: Tensor) -> Tensor:
    base = torch.empty_strided((2, 2), (1, 1), dtype=x.dtype)
    base[:, 0].copy_(x[:2])
    return base.select(0, 1).mul_(2)


def expanded(x: Tensor) -> Tensor:
    h = torch.sin(x)
    h[:1].expand(3).mul_(2)
    return h


def rows(x: Tensor) -> Tensor:
    spaced = gaps(x)
    spaced[::2].mul_(3)
    dense = x.view(2, 2).t().clone()
    dense.as_strided((4,), (1,)).mul_(torch.arange(4, dtype=x.dtype))
    return dense * spaced.sum()


@pytest.mark.parametrize(
    ("write", "says", "fix"),
    [
        (tripled, ["strides [2]", "gaps"], "make it dense"),
        (overlap, "overlaps itself", "make it dense"),
        (expanded, "f64[3] with strides [0] by aten.mul_", "write to a copy"),
        (rows, (), ""),
        (lambda x: x.detach().sigmoid().polygamma_(1) * x, (), ""),
        (lambda x: x.view(2, 2).expand(2, 2, 2).clone()[0].fill_diagonal_(0.5), (), ""),
        (lambda x: torch.no_grad()(x.view(4, 1).expand(4, 3).fill_)(0.5) * x[0], (), ""),
        (
            lambda x: torch.no_grad()(x.view(4, 1).expand(4, 3).masked_fill_)(x[:3] > 0, 0.5),
            (),
            "write to a copy",
        ),
        *[(lambda x: x.sin().index_fill_(0, AT, x.sum()), "values", "torch.where")] * NEW,
    ],
)
def test_strides_beneath_a_write_are_torchs_or_refused(
    write: Callable[..., Tensor], says: Any, fix: str
) -> None:
    params = {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}

    def loss(p: Params, x: Tensor) -> Tensor:
        return write(p["w"] * x).square().sum()

    step, x = step_of(loss, params), torch.arange(1.0, 5.0, dtype=torch.float64)
    if fix:
        with raises(TraceError, says=says, fix=fix):
            step(params, x)
    else:
        torch.testing.assert_close(step(params, x), torch.func.grad_and_value(loss)(params, x)[::-1])
