"""Plan: one plan of `fit`, what was predicted of it, and what the search found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fnshard.analysis.timeline import Timeline
from fnshard.step.lowered import Lowered

OPTIMIZER = ("device", "streamed", "host")
RECOMPUTE = (0.5, "unit", "unit+offload")  # what a recomputed unit does, from most memory to most time


@dataclass(frozen=True)
class Choice:
    """One plan.

    Args:
        accumulate: micro-batches in a step.
        remat: what recomputed units do.
        recomputed: how many units are, from the first on.
        kept: how many units stay gathered between forward and backward, from the last on.
        optimizer: where its state rests and is updated: "device"; "host"; or "streamed", which rests on the
            host and is updated on the device.
        parameters_on_host: whether stored shards rest there.
        ahead: how many kernels ahead gathers are issued, and later reductions waited for.
    """

    accumulate: int = 1
    remat: str | float = RECOMPUTE[0]
    recomputed: int = 0
    kept: int = 0
    optimizer: str = "device"
    parameters_on_host: bool = False
    ahead: int = 1

    def __str__(self) -> str:
        optimizer = {"device": [], "host": ["optimizer"], "streamed": ["optimizer (streamed)"]}[
            self.optimizer
        ]
        where = optimizer + (["parameters"] if self.parameters_on_host else [])
        parts = [f"{self.accumulate} micro-batch{'es' if self.accumulate > 1 else ''}"]
        parts.append(f"{self.recomputed} units remat={self.remat!r}" if self.recomputed else "no remat")
        parts.append(f"{self.kept} units kept gathered" if self.kept else "all resharded")
        parts += [f"{' and '.join(where)} on the host"] if where else []
        return ", ".join(parts) + ("" if self.ahead else ", no prefetch")


@dataclass(frozen=True)
class Candidate:
    """A plan that was lowered: its predicted peaks on the device and on the host, and its predicted time."""

    choice: Choice
    peak_bytes: int
    seconds: float
    host_bytes: int = 0

    @property
    def cost(self) -> tuple[float, int, int, int, int]:
        """What the search makes small: time to a microsecond, then what is done to save memory."""
        c = self.choice
        moved = (c.optimizer != "device") + c.parameters_on_host
        return round(self.seconds, 6), moved, c.accumulate, c.recomputed, -c.kept

    def __str__(self) -> str:
        host = f" ({size(self.host_bytes)} there)" if self.host_bytes else ""
        return f"{size(self.peak_bytes):>10} {self.seconds * 1e3:10.1f} ms  {self.choice}{host}"


@dataclass(frozen=True)
class Fit:
    """What `fit` chose.

    `specs` and `options` are what `shard_step(fn, specs, mesh=mesh, optimizer=..., **options)` takes;
    `lowered` is that step on paper, `timeline` its predicted run. `rejected`: the plans that differ in one
    decision, with why they were not taken.
    """

    specs: Any
    options: Mapping[str, Any]
    chosen: Candidate
    device_bytes: int
    rejected: tuple[tuple[Candidate, str], ...]
    lowered: Lowered = field(repr=False)
    timeline: Timeline = field(repr=False)
    looked_at: int = 0

    @property
    def peak_bytes(self) -> int:
        """Predicted, on the device."""
        return self.chosen.peak_bytes

    @property
    def seconds(self) -> float:
        """Of one step, predicted."""
        return self.chosen.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "plan": vars(self.chosen.choice) | {},
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.chosen.host_bytes,
            "device_bytes": self.device_bytes,
            "seconds": self.seconds,
            "mfu": self.timeline.mfu,
            "rejected": [
                {"plan": str(c.choice), "peak_bytes": c.peak_bytes, "seconds": c.seconds, "why": why}
                for c, why in self.rejected
            ],
            "looked_at": self.looked_at,
        }

    def __str__(self) -> str:
        lines = [f"within {size(self.device_bytes)}, of {self.looked_at} plans looked at:"]
        lines.append(f"  {self.chosen}  <- chosen")
        lines += [f"  {candidate}: {why}" for candidate, why in self.rejected]
        return "\n".join(lines)


def size(nbytes: float) -> str:
    """In the unit that shows some digits.

    >>> size(79_820_000_000), size(5_300_000)
    ('79.820 GB', '5.300 MB')
    """
    return f"{nbytes / 1e9:.3f} GB" if abs(nbytes) >= 1e9 else f"{nbytes / 1e6:.3f} MB"
