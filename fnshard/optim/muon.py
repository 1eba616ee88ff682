"""Muon: momentum, of each matrix made orthogonal (Jordan et al. 2024)."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.layout.presets import EMBEDDINGS
from fnshard.optim.contract import Changed, Optimizer, StepInfo, check_kind
from fnshard.optim.optimizers import adamw as make_adamw
from fnshard.optim.optimizers import dispatched
from fnshard.optim.schedules import Rate, as_schedule, call_text, rate_first
from fnshard.optim.sums import matrix_norm

__all__ = ["muon", "orthogonalized"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz, by Jordan: steep at 0, near 1 elsewhere
SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    # So large are AdamW's updates, by root mean square (Liu et al. 2025, Moonlight): rates may be AdamW's.
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@rate_first
def muon(
    lr: Rate = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.1,
    scale: str = "match_rms_adamw",
    *,
    others: str = EMBEDDINGS,
    adamw: Optimizer | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Optimizer:
    """`torch.optim.Muon` for matrices, and for stacks of them ("experts"); AdamW for all other leaves.

    Shards of a matrix go to the rank that owns it, in `dtype`, which makes it orthogonal and sends shards
    back, as in torchtitan's and Moonlight's distributed forms; matrices of one shape have different owners. A
    stack that is split between its matrices is not sent. Momentum is laid out as AdamW's.

    Args:
        lr: a rate, or a schedule.
        momentum, nesterov, weight_decay: as in torch; the decay is `lr * weight_decay * param`.
        ns_steps: of Newton-Schulz.
        scale: of updates: "match_rms_adamw", 0.2 sqrt(max(rows, columns)); or "original",
            sqrt(max(1, rows / columns)).
        others: globs, joined by "|", of matrices that AdamW has: embeddings and heads.
        adamw: of all other leaves; default `adamw(lr, weight_decay=weight_decay)`.
        dtype: that Newton-Schulz is computed in; None: the update's own.

    Raises:
        OptimizerError: numbers that are out of range.

    >>> slots = muon(0.02).init({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
    >>> sorted(slots["w"]), sorted(slots["b"])
    (['momentum'], ['mu', 'nu'])
    """
    name = call_text(
        "muon", lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, weight_decay=weight_decay,
        scale=scale, **({} if others == EMBEDDINGS else {"others": others}),
        **({} if dtype == torch.bfloat16 else {"dtype": dtype}),
    )  # fmt: skip
    expected = {
        "momentum": (lambda v: is_number(v) and 0 <= v < 1, "at least 0 and below 1"),
        "ns_steps": counts(1),
        "weight_decay": (lambda v: is_number(v) and v >= 0, "a number from 0"),
        "scale": (lambda v: v in SCALES, f"one of {', '.join(SCALES)}"),
        "others": (lambda v: isinstance(v, str), 'globs, joined by "|"'),
    }
    given = {key: value for key, value in locals().items() if key in expected}
    if wrong := misfits(given, expected):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate = as_schedule(lr)

    def before(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        mu = slots["momentum"].lerp(grad, 1 - momentum)
        step = grad.lerp(mu, momentum) if nesterov else mu
        return step if dtype is None else step.to(dtype), {"momentum": mu}

    def leaf(path: str, update: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        lr = info.once(rate, lambda: rate(info.step)).to(param.dtype)
        factor = SCALES[scale](*info.shape(path, param)[-2:])
        return -lr * (update * factor + weight_decay * param), {}

    matrices = Optimizer(
        name, leaf, {"momentum": torch.zeros_like}, elementwise=False, before=before,
        whole=lambda path, step, *_: (orthogonalized(step, ns_steps), {}), whole_dims=2,
        values=lambda info: {"lr": info.once(rate, lambda: rate(info.step))},
    )  # fmt: skip
    return for_matrices(matrices, lr, weight_decay, others, adamw)


def for_matrices(
    matrices: Optimizer, lr: Rate, weight_decay: float, others: str, adamw: Optimizer | None
) -> Optimizer:
    """An optimizer of matrices, and of stacks of experts'; AdamW for all other leaves, and for `others`."""
    check_kind(adamw)
    globs = others.split("|")

    def which(path: str, dims: int) -> int:
        is_matrix = dims == 2 or (dims == 3 and "experts" in path)
        return int(not is_matrix or any(fnmatch.fnmatchcase(path, glob) for glob in globs))

    rest = make_adamw(lr, weight_decay=weight_decay) if adamw is None else adamw
    name = matrices.name if adamw is None else f"{matrices.name.removesuffix(')')}, adamw={adamw})"
    return dispatched(name, [matrices, rest], which)


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """U Vᵀ of matrices U S Vᵀ, [..., M, N], nearly, by Newton-Schulz; zero of zero.

    >>> torch.linalg.svdvals(orthogonalized(torch.diag(torch.tensor([1.0, 0.1])))).round(decimals=1)
    tensor([0.7000, 0.7000])
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / matrix_norm(x).to(x.dtype).clamp(min=1e-7)
    add = torch.addmm if x.dim() == 2 else torch.baddbmm  # rounded once, as in torch
    for _ in range(steps):
        square = x @ x.mT
        x = add(x, add(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
