"""`lockstep`: ranks whose data end at different steps stop at the same one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from fnshard.errors import StateError, report
from fnshard.step import Step

__all__ = ["lockstep"]

T = TypeVar("T")
_END = object()


def lockstep(loader: Iterable[T], step: Step) -> Iterator[T]:
    """Yield `loader`'s batches while *all* ranks have one; call `step` once for each.

    A rank that has run out tells the others with the loss of the step before, so that nobody waits
    for it and no collective is added (but one, before the first batch). What the others have left
    over is not used.

        for tokens, targets in fs.lockstep(loader, step):
            state, metrics = step(state, tokens, targets)
    """
    source = iter(loader)
    upcoming = next(source, _END)
    if "0" in step.gather_text("0" if upcoming is _END else "1"):
        return
    step.forget("out_of_data")
    try:
        while upcoming is not _END:
            batch, upcoming = upcoming, next(source, _END)
            if upcoming is _END:
                step.tell("out_of_data")
            made = step.count
            yield batch
            if step.count == made:
                raise StateError(
                    report(
                        "the loop over lockstep went on to the next batch without a step.",
                        fix="call the step once for each batch; filter batches before lockstep sees them.",
                    )
                )
            if step.heard("out_of_data"):
                return
    finally:
        step.forget("out_of_data")  # the loop was left early: what it meant to say is void
