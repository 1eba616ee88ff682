"""Passes: functions Schedule -> Schedule, one a file; all of these keep numerics."""

from fnshard.compiler.passes.frees import insert_frees
from fnshard.compiler.passes.graph import updates_last
from fnshard.compiler.passes.offload import offload
from fnshard.compiler.passes.overlap import overlap
from fnshard.compiler.passes.prefetch import prefetch
from fnshard.compiler.passes.reshard import reshard
from fnshard.compiler.passes.updates import update_in_backward

__all__ = ["insert_frees", "offload", "overlap", "prefetch", "reshard", "update_in_backward", "updates_last"]
