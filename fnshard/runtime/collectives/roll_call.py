"""Roll call: after a timeout, ranks that still answer sign the store they met at; who does not is named.

Gloo says that it waited too long, and not for whom. Signatures are counts: no clock is read, for those of
hosts differ.
"""

from __future__ import annotations

import json
import time

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from fnshard.errors import report

WAIT_S = 2.0  # all who wait for one silent rank run out of time at about the same moment
LARGEST = 256  # ranks; more would read too much from one store
KEY = "fnshard/roll"


def absent(rank: int, world: int, wait_s: float | None = None) -> list[int]:
    """The ranks that have not signed since this one's last roll call; empty where nobody can say."""
    if world > LARGEST:
        return []
    try:
        store, mine = _get_default_store(), f"{KEY}/seen/{rank}"
        # What ranks had signed when this one last asked belongs to an earlier failure.
        seen = json.loads(store.get(mine)) if store.check([mine]) else [0] * world
        store.set(f"{KEY}/{rank}", str(_count(store, rank) + 1))
        counts, until = list(seen), time.monotonic() + (WAIT_S if wait_s is None else wait_s)
        while missing := [r for r in range(world) if counts[r] == seen[r]]:
            for each in missing:
                counts[each] = _count(store, each)
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        store.set(mine, json.dumps(counts))
    except (RuntimeError, ValueError):  # the store lay with the rank that is gone; there is no group
        return []
    return missing


def lost(what: str, cause: str) -> str:
    """The text of a `CollectiveError`."""
    return report(
        f"{what}: a peer died, left, or did not answer in time.",
        [cause],
        "look at the rank that failed first, its own error is the cause; if all live, raise the timeout.",
    )


def _count(store: Store, rank: int) -> int:
    """How often a rank has signed."""
    key = f"{KEY}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0
