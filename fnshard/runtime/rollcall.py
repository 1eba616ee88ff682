"""Roll call: after a timeout, ranks that still answer sign the store they met at; who does not is named.

Gloo says that it waited too long, and not for whom.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import _get_default_store

WAIT_S = 2.0  # all who wait for one silent rank run out of time at about the same moment
KEY = "fnshard/roll"


@dataclass
class RollCall:
    """What one rank knows of how often the others have signed."""

    signed: dict[int, int] = field(default_factory=dict)

    def absent(self, rank: int, world: int) -> list[int]:
        """The ranks that have not signed again, soon after this one has; empty where nobody can tell."""
        try:
            return self._absent(rank, world)
        except (RuntimeError, ValueError):  # the store lay with the rank that is gone; there is no group
            return []

    def _absent(self, rank: int, world: int) -> list[int]:
        store = _get_default_store()
        store.add(f"{KEY}/{rank}", 1)
        until = time.monotonic() + WAIT_S
        while True:
            now = {r: store.add(f"{KEY}/{r}", 0) for r in range(world)}
            absent = [r for r, count in now.items() if count <= self.signed.get(r, 0)]
            if not absent or time.monotonic() > until:
                self.signed = now
                return absent
            time.sleep(0.05)
