"""`fs.debug`: what only pure functions allow: a step replayed, and a step against `fn`.

    check(fn, params, batch, specs)             every gradient against the unsharded function
    nan_hunt(step, state, batch)                the first instruction, leaf and op that gave NaN or inf
    check_stale(step, state, batch)             the program of a step against what `fn` does now, traced again

`check` runs a schedule on the eager backend. `nan_hunt` runs that of the step, and where it fails again on
the eager backend, with a `Watch` on the executor (`runtime.executor.context`), which a step lacks otherwise.
"""

from __future__ import annotations

from fnshard.debug.nan_search import nan_hunt
from fnshard.debug.reference import check, check_stale

__all__ = ["check", "check_stale", "nan_hunt"]
