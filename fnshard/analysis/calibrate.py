"""Calibration: a `Hardware` corrected by steps that were measured.

A prediction is kept together with what it becomes where one constant is `STEP` times as large. The constants
that bring many predictions nearest to what was measured are a linear fit in logarithms, in which small changes
are preferred (ridge regression, Hoerl and Kennard, Technometrics 1970): nothing says by how much a constant
differs that no step is bound by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from fnshard.analysis.hardware import Curve, Hardware

__all__ = ["CONSTANTS", "Observation", "changed", "corrected", "fitted", "scaled"]

STEP = 1.2  # by how much a constant is changed, to see what it does
PRIOR = 1e-3  # of an observation's weight, against any change
# Which rates and times of a `Hardware` go up and down together.
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
    """Something whose seconds were predicted and measured: a step, or lines of one.

    Args:
        predicted: seconds where a constant is `STEP` times as large, by its name; "": as the hardware is.
        measured: seconds.
        weight: next to other observations.
    """

    predicted: Mapping[str, float]
    measured: float
    weight: float = 1.0

    def slope(self, constant: str) -> float:
        """By which power of a constant the seconds change; a constant that was not tried has none."""
        seconds = self.predicted.get(constant, self.predicted[""])
        return math.log(seconds / self.predicted[""]) / math.log(STEP)

    def seconds(self, by: Mapping[str, float]) -> float:
        """What is predicted where constants are so many times as large, to first order."""
        return self.predicted[""] * math.exp(sum(self.slope(c) * math.log(v) for c, v in by.items()))


def scaled(hardware: Hardware, by: Mapping[str, float]) -> Hardware:
    """Hardware whose constants are so many times as large: rates are multiplied, times divided.

    >>> h100 = Hardware.named("h100")
    >>> scaled(h100, {"calls": 2.0}).launch_seconds / h100.launch_seconds
    0.5
    """
    changes = {n: _faster(n, getattr(hardware, n), f) for c, f in by.items() for n in CONSTANTS[c]}
    return replace(hardware, **changes)


def _faster(name: str, value: Any, factor: float) -> Any:
    if isinstance(value, Curve):
        return Curve(tuple((size, rate * factor) for size, rate in value.points))
    if isinstance(value, Mapping):
        return {key: _faster(key, each, factor) for key, each in value.items()}
    if is_dataclass(value):
        parts = {f.name: _faster(f.name, getattr(value, f.name), factor) for f in fields(value)}
        return replace(value, **parts)
    return value / factor if name.endswith("_seconds") else value * factor


def changed(hardware: Hardware, constants: Sequence[str] = tuple(CONSTANTS)) -> dict[str, Hardware]:
    """The hardware, by "", and with each constant `STEP` times as large: what to predict with, for
    `Observation.predicted`."""
    return {"": hardware, **{c: scaled(hardware, {c: STEP}) for c in constants}}


def fitted(
    observations: Sequence[Observation], constants: Sequence[str] = tuple(CONSTANTS)
) -> dict[str, float]:
    """By what constants are to be multiplied, so that predictions come nearest to what was measured.

    >>> step = Observation({"": 1.0, "matmul": 1 / STEP, "wire": 1.0}, measured=2.0)
    >>> {c: round(v, 2) for c, v in fitted([step], ["matmul", "wire"]).items()}
    {'matmul': 0.5, 'wire': 1.0}
    """
    weights = torch.tensor([each.weight for each in observations], dtype=torch.float64)
    slopes = torch.tensor([[o.slope(c) for c in constants] for o in observations], dtype=torch.float64)
    gaps = [math.log(each.measured / each.predicted[""]) for each in observations]
    if not observations:
        return dict.fromkeys(constants, 1.0)
    prior = PRIOR * weights.sum() * torch.eye(len(constants), dtype=torch.float64)
    weighted = slopes.T * weights
    logs = torch.linalg.solve(weighted @ slopes + prior, weighted @ torch.tensor(gaps, dtype=torch.float64))
    return dict(zip(constants, logs.exp().tolist(), strict=True))


def corrected(
    hardware: Hardware, observations: Sequence[Observation], steps: Sequence[Observation], name: str
) -> Hardware:
    """Hardware as the observations have it.

    Args:
        steps: those that are whole steps: where there are five and more, the interval of a prediction is
            that of what is left between them and their predictions.
    """
    by = fitted(observations)
    left = sorted(step.measured / step.seconds(by) for step in steps)
    spread = (min(left[0], 1.0), max(left[-1], 1.0)) if len(left) >= 5 else None
    return replace(scaled(hardware, by), name=name, spread=spread)
