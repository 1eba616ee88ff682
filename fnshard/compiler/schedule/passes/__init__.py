"""Passes: functions `Schedule -> Schedule` that make the plain schedule fast, or change what a step does.

`default()` returns the passes of a step. You can write such a function yourself: `shard_step(passes=...)`
runs it, and verifies the schedule that it returns.
"""

from fnshard.compiler.schedule.passes.defaults import Pass, default
from fnshard.compiler.schedule.passes.gathers import prefetch, regather, reshard
from fnshard.compiler.schedule.passes.offload import offload
from fnshard.compiler.schedule.passes.order import insert_frees, update_in_backward
from fnshard.compiler.schedule.passes.overlap import issue_early, overlap, overlap_updates, wait_late

__all__ = [
    "Pass", "default", "insert_frees", "issue_early", "offload", "overlap", "overlap_updates", "prefetch",
    "regather", "reshard", "update_in_backward", "wait_late",
]  # fmt: skip
