"""Roll call: after a timeout, ranks that still answer sign the store they met at; who does not is named.

Gloo says that it waited too long, and not for whom.
"""

from __future__ import annotations

import time

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

WAIT_S = 2.0  # all who wait for one silent rank run out of time at about the same moment
RECENT_S = 30.0  # an older signature is of another failure
LARGEST = 256  # ranks; more would read too much from one store
KEY = "fnshard/roll"


def absent(rank: int, world: int) -> list[int]:
    """The ranks that have not signed soon after this one did; empty where nobody can tell."""
    if world > LARGEST:
        return []
    try:
        store = _get_default_store()
        store.set(f"{KEY}/{rank}", str(time.time()))
        until = time.monotonic() + WAIT_S
        while (missing := [r for r in range(world) if not _signed(store, r)]) and time.monotonic() < until:
            time.sleep(0.1)
    except (RuntimeError, ValueError):  # the store lay with the rank that is gone; there is no group
        return []
    return missing


def _signed(store: Store, rank: int) -> bool:
    key = f"{KEY}/{rank}"
    return store.check([key]) and time.time() - float(store.get(key)) < RECENT_S
