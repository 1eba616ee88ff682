"""Passes: functions Schedule -> Schedule; all of these keep numerics."""

from fnshard.compiler.schedule.passes.gathers import prefetch, regather, reshard
from fnshard.compiler.schedule.passes.offload import offload
from fnshard.compiler.schedule.passes.order import insert_frees, update_in_backward
from fnshard.compiler.schedule.passes.overlap import issue_early, overlap, overlap_updates, wait_late

__all__ = [
    "insert_frees", "issue_early", "offload", "overlap", "overlap_updates", "prefetch",
    "regather", "reshard", "update_in_backward", "wait_late",
]  # fmt: skip
