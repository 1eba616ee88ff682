"""Optimizers whose state is smaller than their parameters: 8-bit AdamW, and Adafactor."""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.optim.optimizer import Optimizer, Slots, Step, Update
from fnshard.optim.optimizers import adamw, hyperparameters
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
    """Make `adamw` with moments in eight bits, a quarter of fp32's memory (Dettmers et al. 2022).

    The scheme is that of bitsandbytes and torchao.

    Each run of `block` numbers along a leaf's last dim has one scale, in fp32, and codes of a dynamic map of
    seven decades. No code of a second moment is 0: one below all decades counts as 1e-7 of its run's largest,
    so that its weight moves slowly, where 0 would let it jump. Leaves of one dim, and those whose last dim is
    no multiple of `block`, keep moments in their own dtype. Embeddings are often left out too:
    `by_path(("*embed*", adamw(3e-4)), ("*", adamw_8bit(3e-4)))`.

    Raises:
        OptimizerError: numbers are out of range, or a layout cuts a run in two (at `step.init`).

    >>> slots = adamw_8bit(3e-4).init("w", torch.ones(2, 128))
    >>> {name: (tuple(slot.shape), slot.dtype) for name, slot in slots.items() if "mu" in name}
    {'mu': ((2, 128), torch.uint8), 'mu_scales': ((2, 2), torch.float32)}
    """
    if wrong := misfits({"block": block}, {"block": counts(1)}):
        raise OptimizerError("adamw_8bit: no such optimizer:", wrong)
    # The update is AdamW's, on decoded moments; so is the name, with "_8bit" and `block` added.
    wide = adamw(lr, b1, b2, eps, weight_decay, lr_scale, betas=betas)
    name = wide.name.replace("adamw(", "adamw_8bit(", 1)
    if block != 64:
        name = f"{name.removesuffix(')')}, block={block})"

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        if param.dim() < 2 or param.shape[-1] == 0 or param.shape[-1] % block:
            return wide.init(path, param)
        *rows, width = param.shape
        codes = torch.zeros_like(param, dtype=torch.uint8)
        scales = param.new_zeros(*rows, width // block, dtype=torch.float32)
        return {"mu": codes, "mu_scales": scales, "nu": codes.clone(), "nu_scales": scales.clone()}

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        if "mu_scales" not in slots:
            return wide.update(path, grad, slots, param, step)
        moments = {
            "mu": decode(slots["mu"], slots["mu_scales"], signed=True),
            "nu": decode(slots["nu"], slots["nu_scales"], signed=False),
        }
        update, new = wide.update(path, grad, moments, param, step)
        mu, mu_scales = encode(new["mu"], block, signed=True)
        nu, nu_scales = encode(new["nu"], block, signed=False)
        return update, {"mu": mu, "mu_scales": mu_scales, "nu": nu, "nu_scales": nu_scales}

    return Optimizer(name, init, update, rules=wide.rules, values=wide.values)


LEAST_MOMENT = 1e-7  # what code 0 of a second moment means, as a part of its run's largest


@cache
def make_levels(signed: bool) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return the dynamic map.

    A second moment is never coded as 0, however small it is next to the largest of its run: an update divides
    by its root, and would divide by this step's gradient alone (Li, Chen and Zhu 2023). So the least value
    takes the place of 0, and a moment gets the code whose root's reciprocal is nearest.

    Returns:
        The 256 values, ascending, in (0, 1], or in [-1, 1] if signed; the bounds between numbers that are
        coded as neighbouring values; and the index of the value that has the code 0.
    """
    levels = [0.0 if signed else LEAST_MOMENT, 1.0]
    for decade in range(7):
        # A decade has equal parts, and a level in the middle of each. Without signs there are twice as many.
        count = 2**decade if signed else 2 ** (decade + 1)
        values = [10.0 ** (decade - 6) * (0.1 + 0.9 * (n + 0.5) / count) for n in range(count)]
        levels += values
        if signed:
            levels += [-value for value in values]
    levels.sort()

    # A signed number gets the nearest level, a second moment the one whose root has the nearest reciprocal.
    pairs = list(itertools.pairwise(levels))
    if signed:
        return tuple(levels), tuple((a + b) / 2 for a, b in pairs), levels.index(0.0)
    return tuple(levels), tuple((2 / (a**-0.5 + b**-0.5)) ** 2 for a, b in pairs), 0


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the numbers that codes mean, in the dtype of the scales."""
    levels, _, zero = make_levels(signed)
    # Codes count from the level that has code 0, and those of the levels below it follow at the end.
    table = torch.tensor([*levels[zero:], *levels[:zero]], dtype=scales.dtype, device=codes.device)
    unit = table[codes.int()].unflatten(-1, (scales.shape[-1], -1))
    return (unit * scales.unsqueeze(-1)).flatten(-2)


def encode(values: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest levels, and the scales of runs."""
    runs = values.unflatten(-1, (-1, block))
    scales = runs.abs().amax(-1)
    unit = runs / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    _, bounds, zero = make_levels(signed)
    table = torch.tensor(bounds, dtype=values.dtype, device=values.device)
    # A code counts from the level that has code 0: levels below it wrap around to codes near 255.
    codes = torch.bucketize(unit.contiguous(), table, out_int32=True) - zero
    return codes.remainder(256).to(torch.uint8).flatten(-2), scales


EXPECTED = {  # the values that Adafactor's arguments may have
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
    """Make `torch.optim.Adafactor` (Shazeer and Stern 2018), with its numerics and its defaults.

    It keeps only the means of rows and columns of a matrix's second moments, so that its state is nearly
    nothing. The last two dims of a leaf are matrices. Ranks exchange sums of a few numbers for each row and
    column.

    Args:
        lr: the largest rate. It is at most 1 / sqrt(step), and is multiplied by the parameter's root mean
            square.
        beta2_decay: a new gradient has the weight `step ** beta2_decay`.
        eps: the least second moment (None is the dtype's), and the least root mean square of a parameter.
        d: the largest root mean square of an update; larger ones are scaled down to it.
        weight_decay, lr_scale: a number, or `(glob, number)` rules on paths; the decay is
            `lr * weight_decay * param`.

    >>> {name: tuple(slot.shape) for name, slot in adafactor().init("w", torch.ones(2, 3)).items()}
    {'rows': (2, 1), 'columns': (1, 3), 'mean': (1, 1)}
    """
    given = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
    name = call_text("adafactor", **given, weight_decay=weight_decay, lr_scale=lr_scale)
    if wrong := misfits({n: given[n] for n in EXPECTED}, EXPECTED):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        if param.dim() < 2:
            return {"moment": torch.zeros_like(param)}
        *stack, height, width = param.shape
        return {
            "rows": param.new_zeros(*stack, height, 1),
            "columns": param.new_zeros(*stack, 1, width),
            "mean": param.new_zeros(*stack, 1, 1),
        }

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        # The second moment of each element: of a matrix, by the means of its row and column.
        least = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
        weight = step.host(lambda count: (int(count) + 1) ** beta2_decay).to(param.dtype)
        square = grad.square()
        if param.dim() < 2:
            moment = slots["moment"].lerp(square, weight)
            new = {"moment": moment}
        else:
            # Means are written as sums over counts, which are right for a leaf without rows, too.
            height, width = param.shape[-2:]
            row = square.sum(-1, keepdim=True) / max(width, 1)
            column = square.sum(-2, keepdim=True) / max(height, 1)
            mean = square.sum((-2, -1), keepdim=True) / max(height * width, 1)
            new = {
                "rows": slots["rows"].lerp(row, weight),
                "columns": slots["columns"].lerp(column, weight),
                "mean": slots["mean"].lerp(mean, weight),
            }
            moment = new["rows"] * new["columns"] / new["mean"].clamp(min=least)
        change = grad * moment.clamp(min=least * least).rsqrt()

        # Scale by the parameter's root mean square, and limit that of the update to `d`.
        numel = max(param.numel(), 1)
        size = (param.square().sum() / numel).sqrt().clamp(min=eps[1])
        excess = ((change.square().sum() / numel).sqrt() / d).clamp(min=1.0)
        lr = step.host(rate) * scales(path)
        most = torch.minimum(lr, step.host(lambda count: (int(count) + 1) ** -0.5))
        update = -(size * most.to(param.dtype) / excess) * change
        decay = decays(path)
        return (update - lr * decay * param if decay else update), new

    return Optimizer(name, init, update, rules=(decays, scales), values=lambda step: {"lr": step.host(rate)})
