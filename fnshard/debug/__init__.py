"""`fs.debug`: replay a step, and compare a step with `fn`, as only pure functions allow.

    check(fn, params, batch, specs)             compare every gradient with the unsharded function's
    nan_hunt(step, state, batch)                find the first instruction, leaf and op that gave NaN or inf
    check_stale(step, state, batch)             compare a step's program with `fn` as it is now, traced again

`check` runs a schedule on the eager backend. `nan_hunt` runs the step's own schedule, and if NaN or inf
arose, once more on the eager backend; for this it gives the executor a `Watch`
(`runtime.executor.context`), which a step does not have otherwise.
"""

from __future__ import annotations

from fnshard.debug.nan_search import nan_hunt
from fnshard.debug.reference import check, check_stale

__all__ = ["check", "check_stale", "nan_hunt"]
