"""Stale: whether the program that a step keeps for a batch is still what `fn` does."""

from __future__ import annotations

import difflib
from typing import Any

from fnshard.compiler.ir.program import Program
from fnshard.errors import DebugError
from fnshard.step.agreement import checksum
from fnshard.step.step import Step

__all__ = ["check_stale"]
SHOWN = 12  # lines of a message


def check_stale(step: Step, state: Any, /, *batch: Any, **keywords: Any) -> None:
    """Trace `fn` again, and compare what it does now with the program that the step runs for this batch.

    A step compares, before it runs, much of what `fn` reads besides its arguments (README, Limits). This
    compares everything, files and environment included, as only a trace can. Needs no device.

    Args:
        state: as the step takes it.
        batch, keywords: this rank's slice, passed as `fn` takes it.

    Raises:
        DebugError: the programs differ, line by line, or the tensors that `fn` closes over.

    >>> import os
    >>> import torch
    >>> import fnshard as fs
    >>> os.environ["SCALE"] = "1"
    >>> params, x = {"w": torch.ones(2)}, torch.ones(2)
    >>> fn = lambda p, x: (p["w"] * x * float(os.environ["SCALE"])).sum()
    >>> step = fs.shard_step(fn, fs.match_specs(params, [("*", fs.LayoutSpec())]), backend="eager")
    >>> fs.debug.check_stale(step, params, x)
    >>> os.environ["SCALE"] = "2"
    >>> fs.debug.check_stale(step, params, x)
    Traceback (most recent call last):
    ...
    fnshard.errors.DebugError: `fn` is no longer what the step runs for this batch, 2 lines differ:
      - mul_tensor_1 = aten.mul.Tensor(mul_tensor, 1.0)  # f32[2]
      + mul_tensor_1 = aten.mul.Tensor(mul_tensor, 2.0)  # f32[2]
    Fix: pass what changes with the batch as a tensor, or make the step again.
    """
    kept = step.lower(state, *batch, **keywords).program
    traced = step.front(*batch, **keywords).program
    lines = list(difflib.unified_diff(_lines(kept), _lines(traced), lineterm="", n=0))[2:]
    lines = [f"{line[0]} {line[1:]}" for line in lines if line[0] in "+-"]
    if not lines:
        return
    more = [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
    raise DebugError(
        f"`fn` is no longer what the step runs for this batch, {len(lines)} lines differ:",
        lines[:SHOWN] + more,
        "pass what changes with the batch as a tensor, or make the step again.",
    )


def _lines(program: Program) -> list[str]:
    """A program as text, with the modes that its nodes run in and the numbers that it closes over."""
    nodes = [n for n in program.graph.nodes if n.meta.get("autocast")]
    modes = [f"{n.name} under autocast {n.meta['autocast']}" for n in nodes]
    constants = [f"{name} with the numbers {checksum(v):08x}" for name, v in program.constants.items()]
    return [*program.as_text().splitlines(), *modes, *constants, str(program.outputs)]
