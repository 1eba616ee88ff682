"""Calibration: a `Hardware` corrected by steps that were measured.

Each prediction is kept together with what it becomes if one constant is `STEP` times as large. The difference
gives the part of its seconds that is inversely proportional to that constant. The constants that bring many
predictions nearest to the measurements are a least-squares fit of logarithms by Gauss-Newton. The fit prefers
small changes (ridge regression, Hoerl and Kennard, Technometrics 1970), since measurements say nothing about
a constant that bounds no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from fnshard.analysis.hardware import Curve, Hardware

__all__ = ["CONSTANTS", "Observation", "correct", "fit_constants", "scale", "vary"]

STEP = 1.2  # the factor by which a constant is changed, to see what it does
PRIOR = 1e-3  # the weight of "no change", as a share of the observations' weight
ROUNDS = 20  # rounds of Gauss-Newton
MOST = math.log(5)  # the most by which a constant changes, as a logarithm
FEW = 5  # the number of different steps from which predictions have an interval
# The rates and times of a `Hardware` that go up and down together, by constant.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "matmul": ("flops",),
    "attention": ("attention",),
    "memory": ("memory", "update", "copy", "elementwise", "transcendental", "scatter"),
    "wire": ("node", "network"),
    "tiers": ("host_link_bytes_per_s", "host_update_bytes_per_s", "disk_bytes_per_s"),
    "calls": ("instruction_seconds", "kernel_seconds", "launch_seconds"),
}


@dataclass(frozen=True)
class Observation:
    """A step, or lines of one, whose seconds were predicted and measured.

    Args:
        predicted: the predicted seconds, by the name of the constant that is `STEP` times as large, or by ""
            for unchanged hardware.
        measured: the measured seconds.
        weight: the weight next to other observations.
    """

    predicted: Mapping[str, float]
    measured: float
    weight: float = 1.0

    def share(self, constant: str) -> float:
        """Return the seconds that are inversely proportional to a constant; 0 for one that was not varied."""
        saved = self.predicted[""] - self.predicted.get(constant, self.predicted[""])
        return saved / (1 - 1 / STEP)

    def seconds(self, by: Mapping[str, float]) -> float:
        """Predict the seconds if constants are so many times as large.

        That is exact if nothing overlaps. Otherwise the shares may add up to more than all seconds, and the
        result is at least a thousandth of them.
        """
        base = self.predicted[""]
        return max(base / 1000, base + sum(self.share(c) * (1 / value - 1) for c, value in by.items()))


def scale(hardware: Hardware, by: Mapping[str, float]) -> Hardware:
    """Return hardware whose constants are so many times as large. Rates are multiplied, and times divided.

    >>> h100 = Hardware.named("h100")
    >>> scale(h100, {"calls": 2.0}).launch_seconds / h100.launch_seconds
    0.5
    """
    changes = {n: _scale(n, getattr(hardware, n), f) for c, f in by.items() for n in CONSTANTS[c]}
    return replace(hardware, **changes)


def _scale(name: str, value: Any, factor: float) -> Any:
    """Return a field of `Hardware` that is so many times as fast: rates grow, `_seconds` shrink."""
    if isinstance(value, Curve):
        return Curve(tuple((size, rate * factor) for size, rate in value.points))
    if isinstance(value, Mapping):
        return {key: _scale(key, each, factor) for key, each in value.items()}
    if is_dataclass(value):
        parts = {f.name: _scale(f.name, getattr(value, f.name), factor) for f in fields(value)}
        return replace(value, **parts)
    return value / factor if name.endswith("_seconds") else value * factor


def vary(hardware: Hardware, constants: Sequence[str] = tuple(CONSTANTS)) -> dict[str, Hardware]:
    """Return the hardware by "", and by each constant's name with that one `STEP` times as large.

    Predictions on these make `Observation.predicted`.
    """
    return {"": hardware, **{c: scale(hardware, {c: STEP}) for c in constants}}


def fit_constants(
    observations: Sequence[Observation], constants: Sequence[str] = tuple(CONSTANTS)
) -> dict[str, float]:
    """Find the factors of constants that bring predictions nearest to what was measured.

    >>> step = Observation({"": 1.0, "matmul": 1 / STEP, "wire": 1.0}, measured=2.0)
    >>> {c: round(v, 2) for c, v in fit_constants([step], ["matmul", "wire"]).items()}
    {'matmul': 0.5, 'wire': 1.0}
    """
    logs = torch.zeros(len(constants), dtype=torch.float64)
    weights = torch.tensor([each.weight for each in observations], dtype=torch.float64)
    shares = torch.tensor([[o.share(c) for c in constants] for o in observations], dtype=torch.float64)
    measured = torch.tensor([each.measured for each in observations], dtype=torch.float64)
    prior = PRIOR * weights.sum()
    for _ in range(ROUNDS if observations else 0):
        # The derivatives of the logarithms of predictions by the logarithms of factors.
        by = dict(zip(constants, logs.exp().tolist(), strict=True))
        seconds = torch.tensor([each.seconds(by) for each in observations], dtype=torch.float64)
        slopes = -shares / logs.exp() / seconds[:, None]

        # One step to the solution of the linearised problem, in which the prior pulls factors to 1.
        weighted = slopes.T * weights
        least = weighted @ slopes + prior * torch.eye(len(constants), dtype=torch.float64)
        step = torch.linalg.solve(least, weighted @ (measured / seconds).log() - prior * logs)
        logs = (logs + step).clamp(-MOST, MOST)
    return dict(zip(constants, logs.exp().tolist(), strict=True))


def correct(hardware: Hardware, runs: Sequence[Sequence[Observation]], name: str) -> Hardware:
    """Return hardware as runs have measured it.

    If `FEW` or more different steps were measured, the interval of a prediction has the ratios of measured to
    predicted seconds of all of them, each predicted by constants that were fitted to the others.

    Args:
        runs: the observations of each run, of which the first is of its whole step.
    """
    by = fit_constants([each for run in runs for each in run])

    # Runs with equal predictions are of the same step.
    steps: dict[tuple[float, ...], list[Sequence[Observation]]] = {}
    for run in runs:
        steps.setdefault(tuple(run[0].predicted.values()), []).append(run)

    # Leave one step out, predict it by the constants of the others, and compare.
    ratios = [1.0]
    for key, same in steps.items():
        others: list[Observation] = []
        for other, other_runs in steps.items():
            if other != key:
                others += [each for run in other_runs for each in run]
        constants = fit_constants(others)
        ratios += [run[0].measured / run[0].seconds(constants) for run in same]
    spread = (min(ratios), max(ratios)) if len(steps) >= FEW else None
    return replace(scale(hardware, by), name=name, spread=spread)
