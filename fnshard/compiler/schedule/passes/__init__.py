"""Passes: functions Schedule -> Schedule, one a file; all of these keep numerics."""

from fnshard.compiler.schedule.passes.frees import insert_frees
from fnshard.compiler.schedule.passes.graph import updates_last
from fnshard.compiler.schedule.passes.offload import offload
from fnshard.compiler.schedule.passes.overlap import issue_early, overlap, wait_late
from fnshard.compiler.schedule.passes.prefetch import prefetch
from fnshard.compiler.schedule.passes.regather import regather
from fnshard.compiler.schedule.passes.reshard import reshard
from fnshard.compiler.schedule.passes.updates import update_in_backward

__all__ = [
    "insert_frees",
    "issue_early",
    "offload",
    "overlap",
    "prefetch",
    "regather",
    "reshard",
    "update_in_backward",
    "updates_last",
    "wait_late",
]
