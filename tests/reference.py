"""The naive truth that everything is compared with: one process, whole tensors, plain autograd, torch.optim.

Knows nothing of fnshard but the name `Mean`, whose meaning it spells out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard import Mean

Params = dict[str, Tensor]
Optimizers = Callable[[Params], torch.optim.Optimizer]


@dataclass
class Trained:
    """A record of a loop: parameters at the end, and one entry per step of the rest."""

    params: Params = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: Params = field(default_factory=dict)  # of the last step, before clipping


def adamw(lr: float, weight_decay: float = 0.1, eps: float = 1e-8) -> Optimizers:
    """Make AdamW over all trainable leaves in one group."""
    return lambda named: torch.optim.AdamW(named.values(), lr=lr, weight_decay=weight_decay, eps=eps)


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizers:
    """Make SGD over all trainable leaves in one group."""
    return lambda named: torch.optim.SGD(named.values(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def group_leaves(make: Any, settings: Callable[[str], Mapping[str, float]], **common: Any) -> Optimizers:
    """Make an optimizer with a parameter group per leaf, with what `settings(path)` says of it."""
    return lambda named: make([{"params": [v], **settings(p)} for p, v in named.items()], **common)


def train(
    loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    steps: Sequence[Sequence[tuple[Any, ...]]],
    optimizers: Optimizers,
    *,
    frozen: Collection[str] = (),
    clip: float | None = None,
    rate: Callable[[int], float] | None = None,
) -> Trained:
    """Train on `steps`, each a list of the parts (ranks times micro-batches) of one global batch."""
    leaves = {p: v.detach().clone() for p, v in params.items()}
    named = {p: v.requires_grad_() for p, v in leaves.items() if p not in frozen and is_number(v)}
    optimizer = optimizers(named)
    out = Trained()
    for number, parts in enumerate(steps):
        optimizer.zero_grad()
        loss = total_loss([loss_fn(leaves, *part) for part in parts])
        loss.backward()
        for leaf in named.values():
            if leaf.grad is None:  # an unused leaf has a zero gradient, and decays
                leaf.grad = torch.zeros_like(leaf)
            leaf.grad = leaf.grad.resolve_conj()  # a lazy conjugate, which torch's clipping refuses
        out.grads = {p: v.grad.clone() for p, v in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), float("inf") if clip is None else clip)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(number)
        optimizer.step()
        out.losses.append(loss.item())
        out.norms.append(norm.item())
    out.params = {p: v.detach() for p, v in leaves.items()}
    return out


def is_number(value: Tensor) -> bool:
    """Return whether a leaf may train: it is of floats, or complex."""
    return value.is_floating_point() or value.is_complex()


def total_loss(results: Sequence[Any]) -> Tensor:
    """Return the mean of plain losses; for Means the sum of totals over the sum of counts (0 / 0 is 0)."""
    losses = [r[0] if isinstance(r, tuple) else r for r in results]
    if not isinstance(losses[0], Mean):
        return torch.stack(losses).mean()
    count = sum(float(each.count) for each in losses)
    return torch.stack([each.total for each in losses]).sum() / (count or 1.0)


def gradients(
    loss_fn: Callable[..., Any], params: Mapping[str, Tensor], *batch: Any
) -> tuple[Params, Tensor]:
    """Call `torch.func.grad_and_value` over the float leaves."""
    floats = {p: v.detach() for p, v in params.items() if is_number(v)}
    rest = {p: v.detach() for p, v in params.items() if p not in floats}

    def of(given: Params) -> Tensor:
        return total_loss([loss_fn({p: given[p] if p in given else rest[p] for p in params}, *batch)])

    return torch.func.grad_and_value(of)(floats)
