"""Price: the predicted bytes of a device and of its host, and the seconds, of a step on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fnshard.analysis.memory import MemoryAnalysis
from fnshard.analysis.timeline import Timeline
from fnshard.compiler.schedule.tasks import MicroOrder

PARTS = {  # the parts of a step's seconds, with words for what a plan loses by them
    "compute": "computing",
    "communication": "waiting for collectives",
    "transfer": "waiting for the host link",
    "pipeline": "waiting for other stages",
    "host": "waiting for the host",  # what is left: its updates and launches
}

# The orders of micro-batches that are tried, with the memory that "zero_bubble" may take.
ORDERS = (*((order, 1.0) for order in get_args(MicroOrder)), ("zero_bubble", 1.5), ("zero_bubble", 2.0))
MAX_KERNELS_AHEAD = 3  # the most kernels by which gathers are issued earlier, and reductions waited for later
MIN_WAITING_SHARE = 0.01  # the share of a step in waits for collectives from which one more kernel is tried


@dataclass(frozen=True)
class Candidate:
    """A plan and the predictions for it.

    Args:
        choice: the plan, of any class that has `effort`, numbers that say what it does to save memory. Of two
            plans that are as fast, the one with less effort is better.
        peak_bytes: the bytes of a rank's device at the peak.
        seconds: the seconds of a step.
        host_bytes: the bytes of a rank's host.
        parts: the parts of the seconds, by the names of `PARTS`.
        flops: the model FLOPs of a rank.
        peak_flops: the peak FLOPs per second of a device.
    """

    choice: Any
    peak_bytes: float
    seconds: float
    host_bytes: float = 0
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)
    flops: float = 0.0
    peak_flops: float = 1.0

    def cost(self, budget: float) -> tuple[float, ...]:
        """Return what a search minimises: bytes too many, then time to a microsecond, then effort."""
        return max(0, self.peak_bytes - budget), round(self.seconds, 6), *self.choice.effort

    def fits(self, budget: float) -> bool:
        """Return whether its peak is within a budget of bytes."""
        return self.peak_bytes <= budget

    def waits_for_collectives(self) -> bool:
        """Return whether it waits for collectives so long that issuing gathers one kernel earlier may pay."""
        return self.parts.get("communication", 0.0) > MIN_WAITING_SHARE * self.seconds

    def relative_slowdown(self, other: Candidate) -> float:
        """Return the share of another plan's time by which this one is slower; below 0 if it is faster."""
        return self.seconds / other.seconds - 1


def price(choice: Any, memory: MemoryAnalysis, timeline: Timeline) -> Candidate:
    """Return a plan with the price of its step on paper."""
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
    """Return the parts of a step's seconds, by the names of `PARTS`.

    In a pipeline they are means over the stages.
    """
    stages = timeline.stages or (timeline,)

    def mean(seconds: Iterable[float]) -> float:
        return sum(seconds) / len(stages)

    # The host's part is what is left: its updates and launches.
    known = {
        "compute": mean(each.busy_seconds.get("compute", 0.0) for each in stages),
        "communication": mean(each.exposed_communication_seconds for each in stages),
        "transfer": mean(each.exposed_transfer_seconds for each in stages),
        "pipeline": mean(each.bubble_seconds for each in stages),
    }
    return known | {"host": max(0.0, timeline.step_seconds - sum(known.values()))}
