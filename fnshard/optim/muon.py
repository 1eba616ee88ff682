"""Muon: update each matrix by its orthogonalised momentum (Jordan et al. 2024)."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.layout.presets import EMBEDDINGS
from fnshard.optim.optimizer import Optimizer, Slots, Step, Update
from fnshard.optim.optimizers import Choice, check_kind, choose_by
from fnshard.optim.optimizers import adamw as make_adamw
from fnshard.optim.schedules import Rate, as_schedule, call_text, rate_first
from fnshard.optim.sums import matrix_norm

__all__ = ["muon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, for Newton-Schulz: steep at 0, near 1 elsewhere
SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    # AdamW's updates have this root mean square (Liu et al. 2025, Moonlight), so that its rates can be used.
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
    """Make `torch.optim.Muon` for matrices, and for stacks of them ("experts"); AdamW for all other leaves.

    Ranks that have shards of matrices of one shape exchange them in `dtype`: each rank orthogonalises its
    share of whole matrices, and sends shards back, as in torchtitan's and Moonlight's distributed forms. A
    stack that is split between its matrices is not sent. Momentum is laid out as AdamW's.

    Args:
        lr: a rate, or a schedule.
        momentum, nesterov, weight_decay: as in torch; the decay is `lr * weight_decay * param`.
        ns_steps: steps of Newton-Schulz.
        scale: the factor of updates: "match_rms_adamw", 0.2 sqrt(max(rows, columns)); or "original",
            sqrt(max(1, rows / columns)).
        others: globs, joined by "|", of matrices that AdamW updates: embeddings and heads.
        adamw: the optimizer of all other leaves; by default `adamw(lr, weight_decay=weight_decay)`.
        dtype: the dtype in which Newton-Schulz is computed; None is that of the update.

    Raises:
        OptimizerError: numbers are out of range.

    >>> optimizer = muon(0.02)
    >>> [sorted(optimizer.init("w", torch.zeros(shape))) for shape in ((2, 2), (2,))]
    [['momentum'], ['mu', 'nu']]
    """
    # The name leaves out `others` and `dtype` where they have their defaults.
    given = {
        "lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
        "weight_decay": weight_decay, "scale": scale, "others": others, "dtype": dtype,
    }  # fmt: skip
    defaults = {"others": EMBEDDINGS, "dtype": torch.bfloat16}
    name = call_text("muon", **{k: v for k, v in given.items() if k not in defaults or v != defaults[k]})
    expected = {
        "momentum": (lambda v: is_number(v) and 0 <= v < 1, "at least 0 and below 1"),
        "ns_steps": counts(1),
        "weight_decay": (lambda v: is_number(v) and v >= 0, "a number from 0"),
        "scale": (lambda v: v in SCALES, f"one of {', '.join(SCALES)}"),
        "others": (lambda v: isinstance(v, str), 'globs, joined by "|"'),
    }
    if wrong := misfits({key: given[key] for key in expected}, expected):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate = as_schedule(lr)

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        # Orthogonalise the momentum, or Nesterov's look-ahead, and scale it by the matrix's shape.
        mu = slots["momentum"].lerp(grad, 1 - momentum)
        change = grad.lerp(mu, momentum) if nesterov else mu
        change = orthogonalize(change if dtype is None else change.to(dtype), ns_steps).to(param.dtype)
        factor = SCALES[scale](*param.shape[-2:])
        return -step.host(rate) * (change * factor + weight_decay * param), {"momentum": mu}

    matrices = Optimizer(
        name,
        lambda path, param: {"momentum": torch.zeros_like(param)},
        update,
        rules=(),
        values=lambda step: {"lr": step.host(rate)},
    )
    return for_matrices(matrices, lr, weight_decay, others, adamw)


def for_matrices(
    matrices: Optimizer, lr: Rate, weight_decay: float, others: str, adamw: Optimizer | None
) -> Optimizer:
    """Return an optimizer of matrices and stacks of experts' matrices, with AdamW for all other leaves.

    Args:
        others: globs of matrices that AdamW updates too.
    """
    check_kind(adamw)
    globs = others.split("|")

    def choose_part(path: str, shape: Sequence[int]) -> int:
        is_matrix = len(shape) == 2 or (len(shape) == 3 and "experts" in path)
        return int(not is_matrix or any(fnmatch.fnmatchcase(path, glob) for glob in globs))

    if adamw is None:
        name, adamw = matrices.name, make_adamw(lr, weight_decay=weight_decay)
    else:
        name = f"{matrices.name.removesuffix(')')}, adamw={adamw})"
    choice = Choice((matrices, adamw), choose_part)
    return replace(choose_by(name, choice), values=choice.values)


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return nearly U Vᵀ for matrices U S Vᵀ, [..., M, N], by Newton-Schulz, and zero for zero.

    >>> torch.linalg.svdvals(orthogonalize(torch.diag(torch.tensor([1.0, 0.1])))).round(decimals=1)
    tensor([0.7000, 0.7000])
    """
    a, b, c = COEFFICIENTS
    # x xᵀ is as large as the first side of x, which therefore is the shorter one.
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / matrix_norm(x).to(x.dtype).clamp(min=1e-7)

    # A step is x <- a x + (b s + c s²) x with s = x xᵀ.
    add = torch.addmm if x.dim() == 2 else torch.baddbmm  # rounded once, as in torch
    for _ in range(steps):
        square = x @ x.mT
        x = add(x, add(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
