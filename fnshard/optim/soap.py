"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.layout.presets import EMBEDDINGS
from fnshard.optim.muon import for_matrices
from fnshard.optim.optimizer import Optimizer, Slots, Step, Update
from fnshard.optim.schedules import Rate, as_schedule, call_text, rate_first

__all__ = ["soap"]

SIDES = {"left": -2, "right": -1}  # the sides of a matrix, with their dims


@rate_first
def soap(
    lr: Rate = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    shampoo_beta: float | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    others: str = EMBEDDINGS,
    adamw: Optimizer | None = None,
) -> Optimizer:
    """Make SOAP, with its authors' numerics, for matrices and stacks of them ("experts").

    AdamW updates all other leaves.

    The state is averages of G Gᵀ and Gᵀ G, their eigenbases, and Adam's moments in these bases. If ranks
    have shards of a matrix, all its state travels to the rank that computes, and back: for a square matrix
    seven tensors of its size in fp32, 14 times the bytes of `muon`. The first step makes bases and changes
    no matrix.

    A gradient of lower rank than its sides leaves a part of the basis undetermined, which rounding then
    decides: runs on other meshes may differ by more than rounding.

    Args:
        lr: a rate, or a schedule.
        b1, b2, eps: Adam's numbers.
        weight_decay: after Adam's step, `lr * weight_decay` of the new parameter is subtracted.
        shampoo_beta: the decay of the averages; None is `b2`.
        precondition_frequency: the steps after which bases are refreshed, by a power iteration and a QR.
        max_precond_dim: the longest side that gets a basis.
        others: globs, joined by "|", of matrices that AdamW updates: embeddings and heads.
        adamw: the optimizer of all other leaves; by default `adamw(lr, weight_decay=weight_decay)`.

    Raises:
        OptimizerError: numbers are out of range.

    >>> slots = soap(3e-3).init("w", torch.zeros(2, 3))
    >>> {name: tuple(slot.shape) for name, slot in slots.items() if "basis" in name}
    {'left_basis': (2, 2), 'right_basis': (3, 3)}
    """
    given = {
        "lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "shampoo_beta": shampoo_beta,
        "precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim,
        "others": others,
    }  # fmt: skip
    defaults = {"shampoo_beta": None, "max_precond_dim": 10000, "others": EMBEDDINGS}
    # The name shows what was asked for, and leaves these options out where they have their default.
    name = call_text("soap", **{k: v for k, v in given.items() if k not in defaults or v != defaults[k]})
    if wrong := misfits({k: v for k, v in given.items() if k in EXPECTED}, EXPECTED):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate = as_schedule(lr)
    gram_weight = 1 - (b2 if shampoo_beta is None else shampoo_beta)

    def correct_bias(count: Tensor) -> float:
        """Return Adam's factor of an update. Moments have seen `count` gradients: the first is left out."""
        n = int(count)
        return (1 - b2**n) ** 0.5 / (1 - b1**n) if n else 0.0

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        out = {"mu": torch.zeros_like(param), "nu": torch.zeros_like(param)}
        for side, dim in SIDES.items():
            size = param.shape[dim]
            if 1 < size <= max_precond_dim and param.numel():
                out[side] = param.new_zeros(*param.shape[:-2], size, size)
                out[f"{side}_basis"] = torch.zeros_like(out[side])
        return out

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        sides = {side: dim for side, dim in SIDES.items() if side in slots}
        grams = {side: slots[side].lerp(gram(grad, dim), gram_weight) for side, dim in sides.items()}
        bases = {side: slots[f"{side}_basis"] for side in sides}

        # Run Adam in the bases of the step before.
        rotated = rotate(grad, bases)
        mu = slots["mu"].lerp(rotated, 1 - b1)
        nu = slots["nu"].lerp(rotated.square(), 1 - b2)
        change = rotate(mu / (nu.sqrt() + eps), bases, back=True)

        def begin() -> tuple[Tensor, ...]:
            """Return the first bases, and moments that have seen no gradient."""
            new = [find_eigenbasis(grams[side]) for side in sides]
            return slots["mu"].clone(), slots["nu"].clone(), *new

        def refresh() -> tuple[Tensor, ...]:
            """Return new bases, and the moments in them."""
            new, turned = {}, nu
            for side, dim in sides.items():
                new[side], turned = refresh_basis(grams[side], bases[side], turned, dim)
            return rotate(rotate(mu, bases, back=True), new), turned.clone(), *new.values()

        def keep() -> tuple[Tensor, ...]:
            """Return copies: no branch of `torch.cond` may return one of its inputs."""
            return mu.clone(), nu.clone(), *(bases[side].clone() for side in sides)

        # The first step makes bases, and every `precondition_frequency` steps they are refreshed.
        is_first = step.count == 0
        if sides:
            is_due = step.count % precondition_frequency == 0
            later = lambda: torch.cond(is_due, refresh, keep)  # noqa: E731
            mu, nu, *made = torch.cond(is_first, begin, later)
        else:
            mu, nu, made = torch.where(is_first, slots["mu"], mu), torch.where(is_first, slots["nu"], nu), []

        # Apply the update; the first step has no basis, and changes no matrix.
        lr, bias = step.host(rate), step.host(correct_bias)
        change = lr * bias * change
        change = torch.where(is_first, 0.0, -change - lr * weight_decay * (param - change))
        new = {f"{side}_basis": basis for side, basis in zip(sides, made, strict=True)}
        return change, {"mu": mu, "nu": nu, **grams, **new}

    matrices = Optimizer(name, init, update, rules=(), values=lambda step: {"lr": step.host(rate)})
    return for_matrices(matrices, lr, weight_decay, others, adamw)


# A check of an argument, and what its error says was expected.
UNIT_INTERVAL = (lambda v: is_number(v) and 0 <= v < 1, "at least 0 and below 1")
EXPECTED = {
    "b1": UNIT_INTERVAL, "b2": UNIT_INTERVAL,
    "shampoo_beta": (lambda v: v is None or UNIT_INTERVAL[0](v), UNIT_INTERVAL[1]),
    "eps": (lambda v: is_number(v) and v > 0, "a number above 0"),
    "weight_decay": (lambda v: is_number(v) and v >= 0, "a number from 0"),
    "precondition_frequency": counts(1), "max_precond_dim": counts(1),
    "others": (lambda v: isinstance(v, str), 'globs, joined by "|"'),
}  # fmt: skip


def gram(grad: Tensor, dim: int) -> Tensor:
    """Return G Gᵀ of matrices for their rows (dim -2), Gᵀ G for their columns (-1)."""
    return grad @ grad.mT if dim == -2 else grad.mT @ grad


def rotate(values: Tensor, bases: Mapping[str, Tensor], back: bool = False) -> Tensor:
    """Return matrices in the bases of their sides, or from these `back` in the standard basis."""
    for side, basis in bases.items():
        if SIDES[side] == -2:
            values = (basis if back else basis.mT) @ values
        else:
            values = values @ (basis.mT if back else basis)
    return values


def find_eigenbasis(grams: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices, those of the largest eigenvalues first.

    Numbers that are not finite, which only a step that will be skipped has, give arbitrary vectors.
    """
    grams = torch.nan_to_num(grams)
    scale = grams.abs().amax((-2, -1), keepdim=True)
    return torch.linalg.eigh(grams / torch.where(scale > 0, scale, 1.0)).eigenvectors.flip(-1).contiguous()


def refresh_basis(grams: Tensor, basis: Tensor, nu: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a basis after one step of power iteration, and second moments in the order of its vectors."""
    powers = grams @ basis
    order = (basis * powers).sum(-2).argsort(-1, descending=True)
    powers = powers.take_along_dim(order.unsqueeze(-2), -1)
    nu = nu.take_along_dim(order.unsqueeze(-1 if dim == -2 else -2), dim)
    return torch.linalg.qr(powers).Q.contiguous(), nu
