"""Defaults: the passes of a step, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.passes.gathers import prefetch as gather_early
from fnshard.compiler.schedule.passes.gathers import regather, reshard
from fnshard.compiler.schedule.passes.offload import offload
from fnshard.compiler.schedule.passes.order import update_in_backward
from fnshard.compiler.schedule.passes.overlap import issue_early, overlap_updates, wait_late
from fnshard.compiler.schedule.passes.overlap import overlap as reduce_late

Pass = Callable[[Schedule], Schedule]


def default(prefetch: int | tuple[int, int] = 1, overlap: int = 1) -> list[Pass]:
    """Return the passes that make the plain schedule fast; all of them keep numerics.

    `shard_step(passes=fs.passes.default() + [mine])` adds your own pass. Frees are inserted behind the last
    one.

    Args:
        prefetch: the number of kernels by which gathers are issued early, or a pair (forward, backward); with
            0 they stay where they are.
        overlap: the number of kernels after which a reduction, or on a GPU an update, is waited for. A step
            that is given no passes has 0 for both on CPU ranks that share memory.

    >>> [getattr(each, "func", each).__name__ for each in default()][:4]
    ['reshard', 'regather', 'update_in_backward', 'offload']
    """
    forward, backward = (prefetch, prefetch) if isinstance(prefetch, int) else prefetch
    exchanges_together = [issue_early, wait_late] if overlap else []
    return [
        reshard,
        regather,
        update_in_backward,
        offload,
        *exchanges_together,
        partial(reduce_late, depth=overlap),
        partial(overlap_updates, depth=overlap),
        partial(gather_early, forward=forward, backward=backward),
    ]
