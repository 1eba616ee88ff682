"""Price: what a step on paper is predicted to take: bytes of a device and of its host, and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fnshard.analysis.memory import MemoryAnalysis
from fnshard.analysis.timeline import Timeline

PARTS = {  # of a step, in seconds: what a plan may lose by
    "compute": "computing",
    "communication": "waiting for collectives",
    "transfer": "waiting for the host link",
    "pipeline": "waiting for other stages",
    "host": "waiting for the host",  # its updates and launches: what is left
}

MAX_KERNELS_AHEAD = 3  # by which gathers are issued earlier, and reductions waited for later
MIN_WAITING_SHARE = 0.01  # of a step, in waits for collectives, from which on one kernel more is tried


@dataclass(frozen=True)
class Candidate:
    """A plan and what is predicted of it.

    Args:
        choice: the plan; of any class that has `effort`, what it does to save memory: of two plans that are
            as fast, the one with less is better.
        peak_bytes: of a rank's device.
        seconds: of a step.
        host_bytes: of a rank's host.
        parts: what the seconds go to, by the names of `PARTS`.
        flops: the model's, of a rank.
        peak_flops: of a device, a second.
    """

    choice: Any
    peak_bytes: float
    seconds: float
    host_bytes: float = 0
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)
    flops: float = 0.0
    peak_flops: float = 1.0

    def cost(self, budget: float) -> tuple[float, ...]:
        """Return what a search makes small: bytes too many, then time to a microsecond, then effort."""
        return max(0, self.peak_bytes - budget), round(self.seconds, 6), *self.choice.effort

    def fits(self, budget: float) -> bool:
        """Return whether its peak is within a budget of bytes."""
        return self.peak_bytes <= budget

    def waits_for_collectives(self) -> bool:
        """Return whether it waits for collectives for so long that one more kernel ahead may pay."""
        return self.parts.get("communication", 0.0) > MIN_WAITING_SHARE * self.seconds

    def relative_slowdown(self, other: Candidate) -> float:
        """Return by which share of another plan's time this one takes longer; below 0 where it is faster."""
        return self.seconds / other.seconds - 1


def price(choice: Any, memory: MemoryAnalysis, timeline: Timeline) -> Candidate:
    """Return a plan with what its step on paper takes."""
    return Candidate(
        choice,
        memory.peak_bytes,
        timeline.step_seconds,
        memory.host_bytes,
        parts_of(timeline),
        timeline.model_flops,
        timeline.peak_flops,
    )


def parts_of(timeline: Timeline) -> dict[str, float]:
    """Return what the seconds of a step go to, by the names of `PARTS`; in a pipeline the mean of stages."""
    stages = timeline.stages or (timeline,)

    def mean(seconds: Iterable[float]) -> float:
        return sum(seconds) / len(stages)

    known = {
        "compute": mean(each.busy_seconds.get("compute", 0.0) for each in stages),
        "communication": mean(each.exposed_communication_seconds for each in stages),
        "transfer": mean(each.exposed_transfer_seconds for each in stages),
        "pipeline": mean(each.bubble_seconds for each in stages),
    }
    return known | {"host": max(0.0, timeline.step_seconds - sum(known.values()))}
