"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, counts, is_number, misfits
from fnshard.layout.presets import EMBEDDINGS
from fnshard.optim.contract import Changed, Optimizer, StepInfo
from fnshard.optim.muon import for_matrices
from fnshard.optim.schedules import Rate, as_schedule, call_text, rate_first

__all__ = ["soap"]

SIDES = {"left": -2, "right": -1}  # and the dim of a matrix that each is of


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
    """SOAP, its authors' numerics, for matrices and for stacks of them ("experts"); AdamW for other leaves.

    Averages of G Gᵀ and Gᵀ G, their bases and Adam's moments in these bases lie over ranks in equal
    parts. The owner of a matrix gets its parts with the gradient, computes once, and sends parts back
    (`Optimizer.whole_slots`): of a square matrix seven tensors of its size in fp32, 14 times the bytes of
    `muon`, divided by as many ranks. The first step makes bases and changes no matrix.

    A gradient of less rank than its sides leaves a part of the basis open, which rounding then decides: runs
    on other meshes may differ by more than rounding.

    Args:
        lr: a rate, or a schedule.
        b1, b2, eps: Adam's.
        weight_decay: `lr * weight_decay * param`, after the update.
        shampoo_beta: of the averages; None: `b2`.
        precondition_frequency: bases are made anew, by one power iteration and a QR, every so many steps.
        max_precond_dim: sides longer than it are left as they are.
        others: globs, joined by "|", of matrices that AdamW has: embeddings and heads.
        adamw: of all other leaves; default `adamw(lr, weight_decay=weight_decay)`.

    Raises:
        OptimizerError: numbers that are out of range.

    >>> slots = soap(3e-3).init({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> {name: tuple(slot.shape) for name, slot in slots["w"].items() if "basis" in name}
    {'left_basis': (2, 2), 'right_basis': (3, 3)}
    """
    given = {
        "lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "shampoo_beta": shampoo_beta,
        "precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim,
        "others": others,
    }  # fmt: skip
    defaults = {"shampoo_beta": None, "max_precond_dim": 10000, "others": EMBEDDINGS}
    name = call_text("soap", **{k: v for k, v in given.items() if k not in defaults or v != defaults[k]})
    if wrong := misfits({k: v for k, v in given.items() if k in _EXPECTED}, _EXPECTED):
        raise OptimizerError(f"{name}: no such optimizer:", wrong)
    rate = as_schedule(lr)
    average = 1 - (b2 if shampoo_beta is None else shampoo_beta)

    def turn(info: StepInfo) -> str:
        step = int(info.step)
        return "first" if step == 0 else "keep" if step % precondition_frequency else "refresh"

    def whole(path: str, grad: Tensor, state: Mapping[str, Tensor], turn: str) -> Changed:
        sides = {side: dim for side, dim in SIDES.items() if side in state}
        grams = {side: state[side].lerp(gram(grad, dim), average) for side, dim in sides.items()}
        if turn == "first":
            bases = {f"{side}_basis": eigenbasis(each) for side, each in grams.items()}
            return torch.zeros_like(grad), {**state, **grams, **bases}
        bases = {side: state[f"{side}_basis"] for side in sides}
        rotated = rotate(grad, bases)
        mu = state["mu"].lerp(rotated, 1 - b1)
        nu = state["nu"].lerp(rotated.square(), 1 - b2)
        update = rotate(mu / (nu.sqrt() + eps), bases, back=True)
        if turn == "refresh":
            mu = rotate(mu, bases, back=True)
            for side, dim in sides.items():
                bases[side], nu = refreshed(grams[side], bases[side], nu, dim)
            mu = rotate(mu, bases)
        return update, grams | {f"{side}_basis": each for side, each in bases.items()} | {"mu": mu, "nu": nu}

    def leaf(path: str, update: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        if turn(info) == "first":
            return torch.zeros_like(param), {}
        lr = info.once(rate, lambda: rate(info.step)).to(param.dtype)
        step = info.step.double()
        bias = info.once((leaf, "bias"), lambda: (1 - b2**step).sqrt() / (1 - b1**step)).to(param.dtype)
        made = lr * bias * update
        return -made - lr * weight_decay * (param - made), {}

    def side_of(dim: int) -> Any:
        def make(shape: tuple[int, ...]) -> tuple[int, ...] | None:
            kept = 1 < shape[dim] <= max_precond_dim and 0 not in shape
            return (*shape[:-2], shape[dim], shape[dim]) if kept else None

        return make

    state = {"mu": lambda shape: shape, "nu": lambda shape: shape}
    for side, dim in SIDES.items():
        state |= {side: side_of(dim), f"{side}_basis": side_of(dim)}
    matrices = Optimizer(
        name, leaf, elementwise=False, whole=whole, whole_slots=state, whole_dims=2, turn=turn,
        turns={
            "first": (0.0, 0), "keep": (1 - 1 / precondition_frequency, 1),
            "refresh": (1 / precondition_frequency, precondition_frequency),
        },
        values=lambda info: {"lr": info.once(rate, lambda: rate(info.step))},
    )  # fmt: skip
    return for_matrices(matrices, lr, weight_decay, others, adamw)


_UNIT = lambda v: is_number(v) and 0 <= v < 1, "at least 0 and below 1"
_EXPECTED = {
    "b1": _UNIT, "b2": _UNIT,
    "shampoo_beta": (lambda v: v is None or _UNIT[0](v), _UNIT[1]),
    "eps": (lambda v: is_number(v) and v > 0, "a number above 0"),
    "weight_decay": (lambda v: is_number(v) and v >= 0, "a number from 0"),
    "precondition_frequency": counts(1), "max_precond_dim": counts(1),
    "others": (lambda v: isinstance(v, str), 'globs, joined by "|"'),
}  # fmt: skip


def gram(grad: Tensor, dim: int) -> Tensor:
    """G Gᵀ of matrices for their rows (dim -2), Gᵀ G for their columns (-1)."""
    return grad @ grad.mT if dim == -2 else grad.mT @ grad


def rotate(values: Tensor, bases: Mapping[str, Tensor], back: bool = False) -> Tensor:
    """Matrices in other bases of their sides, or `back` from there."""
    for side, basis in bases.items():
        if SIDES[side] == -2:
            values = (basis if back else basis.mT) @ values
        else:
            values = values @ (basis.mT if back else basis)
    return values


def eigenbasis(grams: Tensor) -> Tensor:
    """Eigenvectors, those of large values first; any, of what is not finite (a step that will be skipped)."""
    grams = torch.nan_to_num(grams)
    scale = grams.abs().amax((-2, -1), keepdim=True)
    return torch.linalg.eigh(grams / torch.where(scale > 0, scale, 1.0)).eigenvectors.flip(-1)


def refreshed(grams: Tensor, basis: Tensor, nu: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """A basis after one step of power iteration, and second moments in the order of its vectors."""
    powers = grams @ basis
    order = (basis * powers).sum(-2).argsort(-1, descending=True)
    powers = powers.take_along_dim(order.unsqueeze(-2), -1)
    nu = nu.take_along_dim(order.unsqueeze(-1 if dim == -2 else -2), dim)
    return torch.linalg.qr(powers).Q, nu
