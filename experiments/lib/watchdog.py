"""Watchdog: NaN in a run, and where it arose.

Loss and gradient norm are sums over all ranks, so every rank sees a NaN in the same step and none acts alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

import fnshard as fs
from fnshard import tree
from fnshard.errors import CheckpointError, FnshardError

WATCHED = ("loss", "grad_norm")


class DivergedError(RuntimeError):
    """Loss, gradients or state of a run are not finite; the message says where that began."""


def fault_of(values: Mapping[str, float]) -> str:
    """Return what is wrong with a step's values, or "".

    A dynamic loss scale skips an overflow, which is a fault only if the scale cannot go lower.
    """
    wrong = [f"{name} is {values[name]}" for name in WATCHED if not math.isfinite(values.get(name, 0.0))]
    if not wrong or values.get("loss_scale", 0.0) > 1.0:
        return ""
    loss = values.get("loss", math.nan)
    note = f", beside a finite loss of {loss:.6g}" if math.isfinite(loss) else ""
    return " and ".join(wrong) + note


def is_finite(step: Any, state: fs.TrainState) -> bool:
    """Return whether parameters and optimizer state are finite on all ranks, which call it together."""
    leaves = [t for part in (state.params, state.opt_state) for t in tree.flatten(part)[0]]
    largest: dict[torch.device, list[torch.Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
            wide = leaf.float() if leaf.element_size() == 1 else leaf  # fp8 has no norms
            # The largest magnitude is NaN or inf if any element is, and needs no memory of the leaf's size.
            largest.setdefault(leaf.device, []).append(torch.linalg.vector_norm(wide, math.inf).double())
    finite = all(bool(torch.stack(each).isfinite().all()) for each in largest.values())
    return not any(step.gather_strings("" if finite else "not finite"))


Load = Callable[[], tuple[fs.TrainState, Iterator[tuple[Any, ...]]]]


def hunt(step: Any, load_again: Load, number: int, say: Callable[[str], None]) -> str:
    """Return where NaN or inf of step `number` arose, in words. All ranks call it together.

    States are donated, so the one before the step is gone. A resumed run is the same bit for bit: the run's
    newest checkpoint (or its first state) is taken, the steps up to the fault are made again, and that one is
    replayed by `fs.debug.nan_hunt`: as it ran, and on the eager backend.

    Args:
        load_again: a function that returns the state to resume, and a loader that continues from there.
        say: a function that gets lines about what is done.
    """
    began = time.perf_counter()
    with suppress(CheckpointError):  # a failed save was reported, and older ones exist
        fs.checkpoint.wait()
    try:
        state, loader = load_again()
        start = int(state.step)
        count = number - start - 1
        steps = "1 step is" if count == 1 else f"{count} steps are"
        say(f"looking for where it arose: from step {start}, {steps} made again")
        where = _replay_steps(step, state, loader, number)
    except FnshardError as error:
        where = f"where it arose could not be found: {error}"
    return f"{where}\n(looked for in {time.perf_counter() - began:.1f} s)"


def _replay_steps(step: Any, state: fs.TrainState, loader: Iterator[tuple[Any, ...]], number: int) -> str:
    """Make steps again up to step `number`, or to the first whose state is not finite, and hunt there."""
    while True:
        batch = tree.map(lambda part: part.to(step.mesh.device), next(loader))
        here = int(state.step) + 1
        if here == number:
            found = fs.debug.nan_hunt(step, state, batch)
            break
        # A step consumes its state, and the hunt needs the one before the step that went wrong.
        kept = state.copy()
        state, _ = step(state, *batch)
        if not is_finite(step, state):  # an update made it, and the next step's loss showed it
            del state
            found = fs.debug.nan_hunt(step, kept, batch)
            break
    if found:
        return f"In step {here}: {found.first}"
    return (
        f"Made again, step {here} is finite: {found}. It does not come from state and batch: it is the "
        "machine's (try another)."
    )


@dataclass
class Watchdog:
    """A check of every step on one rank.

    Args:
        mode: "hunt" ends the run at a NaN and says where it arose, "stop" only ends it, and "off" checks
            nothing.
        load_again: see `hunt`.
        say: a function that gets lines about what is done, on rank 0.
    """

    step: Any
    mode: str
    load_again: Load
    say: Callable[[str], None]
    fault: str = field(default="", init=False)
    _number: int = field(default=0, init=False)

    def look(self, number: int, values: Mapping[str, float]) -> None:
        """Check what step `number` reports, which may be read when the next one has been launched."""
        if self.mode != "off" and not self.fault:
            self.fault, self._number = fault_of(values), number

    def check_state(self, state: fs.TrainState, number: int) -> None:
        """Note a state that is not finite, so that it replaces no good one. All ranks call it together."""
        if self.mode != "off" and not self.fault and not is_finite(self.step, state):
            self.fault, self._number = "parameters or optimizer state are not finite", number

    def diagnose(self) -> DivergedError:
        """Return the error that ends the run, on all ranks. The caller has released the bad state."""
        number = self._number
        head = f"step {number}: {self.fault}; nothing of it is saved."
        self.say(head)
        where = hunt(self.step, self.load_again, number, self.say) if self.mode == "hunt" else ""
        fix = (
            "Fix: a lower optimizer.lr, optimizer.clip=1, a longer schedule.warmup, or precision=fp32; with "
            "run.resume=FOLDER a new run starts from this one's newest checkpoint. run.watch=off goes on in "
            "spite of it."
        )
        return DivergedError("\n".join(filter(None, [head, where, fix])))
