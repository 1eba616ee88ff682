"""Rounding: warn of leaves whose updates are lost, since their optimizer keeps too few digits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fnshard.errors import leaves, report
from fnshard.layout.spec import LayoutSpec
from fnshard.optim.optimizer import Optimizer, Step, update_leaf

# Steps whose rates are read: the highest rate among them is nearly the highest of the schedule.
COUNTS = (0, *(2**n for n in range(21)))
USUAL = 0.1  # weights of this size have to move; most of a model's are smaller, and those of norms are 1


def warn_of_lost_updates(optimizer: Optimizer, specs: Mapping[str, LayoutSpec]) -> None:
    """Warn, once for all leaves, where updates are too small to move a number of the optimizer's dtype.

    It says nothing where the size of updates depends on that of gradients (`sgd`), nor of optimizers that
    have no rate among their `values`.
    """
    # Find the leaves whose updates are lost. Leaves with the same rule, settings and number of dims have
    # updates of one size.
    lost, largest = {}, 0.0
    known: dict[Any, float | None] = {}
    for path, spec in specs.items():
        dtype = spec.optimizer_dtype
        if not spec.trainable or dtype.itemsize >= 4:
            continue
        rule = optimizer.of(path, spec.shape)
        key = len(spec.shape), rule, rule.trace_key(path)
        if key not in known:
            known[key] = usual_update(rule, path, len(spec.shape))

        # A number moves if the update is at least half of the distance to its neighbour.
        size, half = known[key], torch.finfo(dtype).eps / 2
        if size and size < half * USUAL:  # at a rate of 0 nothing is lost
            lost[path] = (
                f"params[{path!r}] {list(spec.shape)}: {dtype}, nothing above {size / half:.2g} moves"
            )
            largest = max(largest, size)
    if not lost:
        return

    lines = [*lost.values()]
    if len(lines) > 8:
        lines = [*lines[:8], "..."]
    warnings.warn(
        report(
            f"an update of {optimizer} moves a number by {largest:.2g} at most, and the optimizer keeps "
            f"{leaves(len(lost))} in so few digits that this is rounded away:",
            lines,
            "optimizer_dtype=torch.float32 in their specs (presets take it too): the optimizer then has a "
            "master copy, and the leaves stay in storage_dtype.",
        ),
        stacklevel=2,
    )


def usual_update(rule: Optimizer, path: str, dims: int) -> float | None:
    """Return the size of an update at the largest rate; None where it depends on gradients, or is not known.

    The first update whose rate is above 0 is computed, for a parameter of usual size, and scaled to the
    largest rate.
    """
    try:
        # Read the rates; the first step that has one is the one to compute.
        rates = {n: float(rule.values(Step(torch.tensor(n), torch.ones(())))["lr"]) for n in COUNTS}
        first = next((n for n, rate in rates.items() if rate > 0), None)
        if first is None:
            return None
        param, sizes = torch.full([1] * dims, USUAL), []
        # Two gradients tell an update that depends on their size from one that does not.
        for slope in (1e-3, 1e-2):
            grad = torch.full_like(param, slope)
            step = Step(torch.tensor(first), grad.double().norm())
            update, _ = update_leaf(rule, path, grad, rule.init(path, param), param, step)
            sizes.append(float(update.abs().max()))
    except Exception:  # a user's optimizer may not run on such a leaf
        return None

    # Ten times the gradient makes another update: the size is that of gradients, which nobody knows.
    if abs(sizes[1] - sizes[0]) > 0.1 * sizes[0]:
        return None
    return sizes[0] * max(rates.values()) / rates[first]
