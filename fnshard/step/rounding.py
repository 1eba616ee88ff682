"""Rounding: a warning for leaves whose updates are lost, as their optimizer keeps too few digits of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fnshard.errors import leaves, report
from fnshard.layout.spec import LayoutSpec
from fnshard.optim.contract import Optimizer, StepInfo

USUAL = 0.1  # Weights of this size are to move; most of a model's are smaller, those of norms are 1.


def warn_of_lost_updates(optimizer: Optimizer, specs: Mapping[str, LayoutSpec]) -> None:
    """Warn, once for all leaves, where updates are too small to move a number of the optimizer's dtype.

    Nothing is said where the size of updates depends on that of gradients (`sgd`), where the rate is a
    function of one's own, and of optimizers that look at whole leaves.
    """
    lost, largest = {}, 0.0
    known: dict[Any, float | None] = {}
    for path, spec in specs.items():
        dtype = spec.optimizer_dtype
        if not spec.trainable or dtype.itemsize >= 4:
            continue
        key = len(spec.shape), optimizer.settings(path)
        if key not in known:
            known[key] = usual_update(optimizer.of(path, len(spec.shape)), path, len(spec.shape))
        size, half = known[key], torch.finfo(dtype).eps / 2
        if size and size < half * USUAL:  # At a rate of 0 nothing is lost.
            lost[path] = (
                f"params[{path!r}] {list(spec.shape)}: {dtype}, nothing above {size / half:.2g} moves"
            )
            largest = max(largest, size)
    if not lost:
        return
    lines = [*lost.values()]
    warnings.warn(
        report(
            f"an update of {optimizer} moves a number by {largest:.2g} at most, and the optimizer keeps "
            f"{leaves(len(lost))} in so few digits that this is rounded away:",
            [*lines[:8], *["..."] * (len(lines) > 8)],
            "optimizer_dtype=torch.float32 in their specs (presets take it too): the optimizer then has a "
            "master copy, and the leaves stay in storage_dtype.",
        ),
        stacklevel=2,
    )


def usual_update(rule: Optimizer, path: str, dims: int) -> float | None:
    """Return the size of an update at the largest rate; None where it depends on gradients, or is not known.

    It is that of the first update whose rate is above 0, of parameters that are 0.
    """
    rate = rule.rate
    if rate is None or not rate.most or rule.whole is not None or rule.sums:
        return None
    step = next((n for n in map(torch.tensor, (0, 1, 2, 10, 100, 1000)) if rate(n) > 0), None)
    if step is None:
        return None
    param, sizes = torch.zeros([1] * dims), []
    for slope in (1e-3, 1e-2):
        grad = torch.full_like(param, slope)
        info = StepInfo(step, global_norm=grad.double().norm())
        try:
            state = rule.init_leaf(path, param)
            update, _ = rule.update_leaf(path, grad, state, param, rule.given(path, info), None)
        except Exception:  # a rule of the user's in a chain, which may not run on such a leaf
            return None
        sizes.append(float(update.abs().max()))
    if abs(sizes[1] - sizes[0]) > 0.1 * sizes[0]:
        return None
    return sizes[0] * rate.most / float(rate(step))
