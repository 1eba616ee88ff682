"""`lockstep`: ranks whose data end at different steps stop at the same one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from fnshard.errors import StateError
from fnshard.step.step import Step

__all__ = ["lockstep"]

T = TypeVar("T")


def lockstep(loader: Iterable[T], step: Step) -> Iterator[T]:
    """Yield `loader`'s batches while *all* ranks have one; call `step` once for each.

    Each rank takes two batches ahead: one whose next batch is its last raises a flag with the loss of the
    step before, and the others see it a step later, so that nobody waits for a device and no collective is
    added (but one, before the first batch). What the others have left over is not used.

        for tokens, targets in fs.lockstep(loader, step):
            state, metrics = step(state, tokens, targets)
    """
    source = iter(loader)
    ahead = deque(islice(source, 2))
    fewest = min(int(text) for text in step.gather_strings(str(len(ahead))))
    step.clear_flag("out_of_data")
    try:
        while fewest:
            batch = ahead.popleft()
            ahead.extend(islice(source, 1))
            if len(ahead) < 2:
                step.raise_flag("out_of_data")
            before = step.latest
            yield batch
            if step.latest is before:
                raise StateError(
                    "the loop over lockstep went on to the next batch without a step.",
                    fix="call the step once for each batch; filter batches before lockstep sees them.",
                )
            if fewest == 1 or step.flag_raised("out_of_data"):
                return
    finally:
        step.clear_flag("out_of_data")  # the loop was left early: its flag is void
