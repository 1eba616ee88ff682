"""Compact: optimizers whose state is smaller than their parameters: 8-bit AdamW, Adafactor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.optim.contract import Changed, Optimizer, StepInfo
from fnshard.optim.optimizers import adamw, hyper, rate_of
from fnshard.optim.schedules import ByPath, Rate, call_text, rate_first

__all__ = ["adafactor", "adamw_8bit"]


@rate_first
def adamw_8bit(
    lr: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: ByPath = 1e-2,
    lr_scale: ByPath = 1.0,
    *,
    betas: tuple[float, float] | None = None,
    block: int = 64,
) -> Optimizer:
    """`adamw` with moments in eight bits, a quarter of fp32's memory (Dettmers et al. 2022; bitsandbytes,
    torchao).

    Each run of `block` numbers along a leaf's last dim has one scale, in fp32, and codes of a dynamic map:
    seven decades, 0.1 of each precise. No code of a second moment is 0: what is below all decades is 1e-7 of
    its run's largest, so that its weight moves slowly, where 0 would let it jump. Leaves of one dim, and
    those whose last dim is no multiple of `block`, keep moments in their own dtype. Embeddings are often left
    out, too:
    `by_path(("*embed*", adamw(3e-4)), ("*", adamw_8bit(3e-4)))`.

    Raises:
        OptimizerError: numbers out of range; a layout that cuts a run in two (at `step.init`).

    >>> slots = adamw_8bit(3e-4).init({"w": torch.ones(2, 128), "b": torch.ones(2)})
    >>> {name: (tuple(slot.shape), slot.dtype) for name, slot in slots["w"].items() if "mu" in name}
    {'mu': ((2, 128), torch.uint8), 'mu_scales': ((2, 2), torch.float32)}
    """
    given = {} if block == 64 else {"block": block}
    if wrong := misfits({"block": block}, {"block": counts(1)}):
        raise OptimizerError("adamw_8bit: no such optimizer:", wrong)
    wide = adamw(lr, b1, b2, eps, weight_decay, lr_scale, betas=betas)
    name = wide.name.replace("adamw(", "adamw_8bit(", 1).removesuffix(")")
    name += "".join(f", {key}={value}" for key, value in given.items()) + ")"

    def leaf(path: str, grad: Tensor, slots: Any, param: Tensor, given: Any) -> Changed:
        if "mu_scales" not in slots:
            return wide.leaf(path, grad, slots, param, given)
        moments = {n: decoded(slots[n], slots[f"{n}_scales"], n == "mu") for n in wide.slots}
        update, new = wide.leaf(path, grad, moments, param, given)
        for n in wide.slots:
            new[n], new[f"{n}_scales"] = coded(new[n], block, n == "mu")
        return update, new

    def fits(param: Tensor) -> bool:
        return param.dim() > 1 and param.shape[-1] > 0 and param.shape[-1] % block == 0

    def codes(param: Tensor) -> Tensor:
        return torch.zeros_like(param, dtype=torch.uint8 if fits(param) else None)

    def scales(param: Tensor) -> Tensor | None:
        shape = (*param.shape[:-1], param.shape[-1] // block) if fits(param) else ()
        return param.new_zeros(shape, dtype=torch.float32) if shape else None

    slots = {"mu": codes, "mu_scales": scales, "nu": codes, "nu_scales": scales}
    return replace(wide, name=name, leaf=leaf, slots=slots, kernel=None)


LEAST_MOMENT = 1e-7  # of its run's largest, what the code 0 of a second moment stands for


@cache
def _levels(signed: bool) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return the 256 values of the dynamic map, ascending, in (0, 1] or in [-1, 1]; the bounds between what
    is coded as one of them and as the next; and which of the values has the code 0.

    A second moment is no 0, whatever it is next to the largest of its run: an update divides by its root, and
    would divide by this step's gradient alone (Li, Chen and Zhu 2023). So the least value stands in the place
    of 0, and a moment gets the code whose root's reciprocal is nearest.
    """
    out = [0.0 if signed else LEAST_MOMENT, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (not signed))  # of equal parts of the decade; a level is in the middle of each
        values = [10.0 ** (decade - 6) * (0.1 + 0.9 * (n + 0.5) / count) for n in range(count)]
        out += values + [-value for value in values] * signed
    out.sort()
    pairs = list(itertools.pairwise(out))
    if signed:
        return tuple(out), tuple((a + b) / 2 for a, b in pairs), out.index(0.0)
    return tuple(out), tuple((2 / (a**-0.5 + b**-0.5)) ** 2 for a, b in pairs), 0


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The numbers that codes stand for, in the dtype of the scales."""
    levels, _, zero = _levels(signed)
    levels = torch.tensor([*levels[zero:], *levels[:zero]], dtype=scales.dtype, device=codes.device)
    unit = levels[codes.int()].unflatten(-1, (scales.shape[-1], -1))
    return (unit * scales.unsqueeze(-1)).flatten(-2)


def coded(values: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of the nearest levels, and scales."""
    runs = values.unflatten(-1, (-1, block))
    scales = runs.abs().amax(-1)
    unit = runs / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    _, bounds, zero = _levels(signed)
    bounds = torch.tensor(bounds, dtype=values.dtype, device=values.device)
    codes = torch.bucketize(unit.contiguous(), bounds, out_int32=True) - zero
    return codes.remainder(256).to(torch.uint8).flatten(-2), scales


_EXPECTED = {  # of Adafactor's numbers
    "beta2_decay": (lambda v: is_number(v) and v <= 0, "at most 0"),
    "eps": (
        lambda v: isinstance(v, tuple | list) and len(v) == 2 and (v[0] is None or v[0] > 0) and v[1] > 0,
        "two numbers above 0, the first of them or None",
    ),
    "d": (lambda v: is_number(v) and v > 0, "a number above 0"),
}


@rate_first
def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
) -> Optimizer:
    """`torch.optim.Adafactor` (Shazeer and Stern 2018), its numerics and its defaults: of a matrix's second
    moments the means of rows and columns alone, so that its state is nearly nothing.

    Sums over rows, columns and the whole leaf, of some numbers each, go over ranks (`Optimizer.sums`). Of a
    leaf of more dims the last two are matrices.

    Args:
        lr: the largest rate; it is at most 1 / sqrt(step), and times the root mean square of the parameter.
        beta2_decay: of the weight of a new gradient, `step ** beta2_decay`.
        eps: the least second moment (None: that of the dtype), the least root mean square of a parameter.
        d: updates of a larger root mean square are scaled down to it.
        weight_decay, lr_scale: a number, or `(glob, number)` rules on paths; the decay is
            `lr * weight_decay * param`.

    >>> {n: tuple(slot.shape) for n, slot in adafactor().init({"w": torch.ones(2, 3)})["w"].items()}
    {'rows': (2, 1), 'columns': (1, 3), 'mean': (1, 1)}
    """
    given = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
    name = call_text("adafactor", **given, weight_decay=weight_decay, lr_scale=lr_scale)
    if wrong := misfits({n: given[n] for n in _EXPECTED}, _EXPECTED):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)

    def second_sums(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> dict[str, Tensor]:
        made = normalized(path, grad, slots, param, info)[0]
        return {"update_square": _summed(made.square(), range(param.dim()))}

    def normalized(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        """The gradient over the root of its second moment, and what becomes of the moments."""
        least = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
        weight = info.once((leaf, "weight"), lambda: (info.step + 1).double() ** beta2_decay).to(param.dtype)
        if param.dim() < 2:
            moment = slots["moment"].lerp(grad.square(), weight)
            return grad * moment.clamp(min=least * least).rsqrt(), {"moment": moment}
        height, width = info.shape(path, param)[-2:]
        of = {
            "rows": ("row_square", width),
            "columns": ("column_square", height),
            "mean": ("square", height * width),
        }
        new = {n: slots[n].lerp(slots[sums] / max(count, 1), weight) for n, (sums, count) in of.items()}
        moment = new["rows"] * new["columns"] / new["mean"].clamp(min=least)
        return grad * moment.clamp(min=least * least).rsqrt(), new

    def leaf(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        decay, scale = settings(path)
        made, new = normalized(path, grad, slots, param, info)
        lr = rate_of(rate, scale, info).to(param.dtype)
        numel = max(math.prod(info.shape(path, param)), 1)
        size = (slots["param_square"] / numel).sqrt().clamp(min=eps[1])
        most = (slots["update_square"] / numel).sqrt().div(d).clamp(min=1.0)
        step = size * torch.minimum(lr, (info.step + 1).to(param.dtype).rsqrt()) / most
        update = -step * made
        return (update - lr * decay * param if decay else update), new

    slots = {"rows": _mean_over(-1), "columns": _mean_over(-2), "mean": _mean_over(-2, -1)}
    slots["moment"] = lambda param: torch.zeros_like(param) if param.dim() < 2 else None
    return Optimizer(name, leaf, slots, elementwise=False, sums=(_squares, second_sums), **shared)


def _summed(values: Tensor, dims: Any) -> Tensor:
    """The sum over these dims, which are 1 afterwards; of no dims the tensor itself."""
    return values.sum(list(dims), keepdim=True) if len(dims) else values


def _squares(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> dict[str, Tensor]:
    """Sums of squares: of the parameter; of a matrix's gradient by rows, by columns and in all."""
    out, square = {"param_square": _summed(param.square(), range(param.dim()))}, grad.square()
    if param.dim() > 1:
        out |= {"row_square": _summed(square, [-1]), "column_square": _summed(square, [-2])}
        out |= {"square": _summed(square, [-2, -1])}
    return out


def _mean_over(*dims: int) -> Callable[[Tensor], Tensor | None]:
    """A slot that is 1 along these dims of a matrix; other leaves have none."""

    def make(param: Tensor) -> Tensor | None:
        if param.dim() < 2:
            return None
        left = {dim % param.dim() for dim in dims}
        return param.new_zeros([1 if dim in left else size for dim, size in enumerate(param.shape)])

    return make
