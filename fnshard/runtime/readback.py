"""Read a step's numbers back from the device to the host.

Loss, norms and flags lie on the device when a step returns, and the device may still be computing them. One
copy after the step's last kernel brings them all to pinned memory, and a reader waits for that copy alone. So
a loop that reads a step's numbers after it has launched the next step leaves the device no gap.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """A copy of 0-d tensors that is under way.

    Args:
        names: the names of all tensors, in order.
        known: the numbers of those that were on the host already.
        sent: the names of the others, and whether each is an integer.
        values: the others' numbers, float64[len(sent)] on the host, which are valid after `event`.
        event: the end of the copy; None on a CPU.
    """

    names: tuple[Hashable, ...] = ()
    known: Mapping[Hashable, float | int] = field(default_factory=dict)
    sent: Mapping[Hashable, bool] = field(default_factory=dict)
    values: Tensor | None = None
    event: Any = None

    @staticmethod
    def of(scalars: Mapping[Hashable, Tensor], device: torch.device) -> Reading:
        """Begin to copy tensors, which may change afterwards; integers beyond 2**53 are rounded."""
        on_host = {n: v for n, v in scalars.items() if device.type != "cpu" and v.device.type == "cpu"}
        under_way = {n: v for n, v in scalars.items() if n not in on_host}
        known = {n: v.item() for n, v in on_host.items()}
        is_integer = {n: not v.is_floating_point() for n, v in under_way.items()}
        reading = Reading(tuple(scalars), known, is_integer)
        if not under_way:
            return reading

        # One dtype for all lets one copy bring them; fp64 has every integer up to 2**53.
        vector = torch.stack([v.detach().to(torch.float64) for v in under_way.values()])
        if device.type == "cpu":
            return replace(reading, values=vector)
        # A copy to memory that is not pinned would make the host wait for it.
        values = torch.empty(len(is_integer), dtype=torch.float64, pin_memory=True)
        values.copy_(vector, non_blocking=True)
        event = torch.Event(device.type)
        event.record()
        return replace(reading, values=values, event=event)

    @property
    def ready(self) -> bool:
        """Return whether `numbers` would not wait."""
        return self.event is None or self.event.query()

    def numbers(self) -> dict[Hashable, float | int]:
        """Return the numbers by name; wait for the copy, but for nothing that was launched after it."""
        if self.event is not None:
            self.event.synchronize()
        arrived = self.values.tolist() if self.values is not None else []
        numbers = dict(self.known)
        for (name, is_integer), value in zip(self.sent.items(), arrived, strict=True):
            numbers[name] = int(value) if is_integer else value
        return {n: numbers[n] for n in self.names}

    def without(self, name: Hashable) -> Reading:
        """Return a reading without one number."""
        return replace(self, names=tuple(n for n in self.names if n != name))
