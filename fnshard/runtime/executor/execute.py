"""Run a schedule: a loop over its instructions, each of which is bound once to its context.

Collectives are an argument, so that the same loop runs on a process group, on simulated ranks, and in the
adversarial mode of tests. Buffers are allocated and freed on the compute stream, and collectives are issued
from it; a handle's wait makes that stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.instructions import Action, Env, Instruction, Wait
from fnshard.compiler.schedule.instructions.kernels import is_dropped_by_worker
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import CollectiveError
from fnshard.runtime.executor.context import ExecutorContext


def bind(context: ExecutorContext) -> Callable[[Env], Env]:
    """Return a function that runs the schedule on an environment and returns it.

    If a collective in it fails, the `CollectiveError` begins with the instruction and its unit.
    """
    lines = context.schedule.instructions
    actions: list[Action] = [line.bind(context) for line in lines]

    # Lines that touch what the host's thread makes or reads first wait for it.
    worker = context.worker
    if worker is not None:
        waits = _find_waits(context.schedule)
        actions = [_wait_for_worker(a, context) if w else a for a, w in zip(actions, waits, strict=True)]
    if context.watch is not None:  # `fs.debug` wraps every action; there is no worker then
        actions = [context.watch(n, lines[n], a) for n, a in enumerate(actions)]
    # A stage that returned before others have taken its messages could free them, or end its process.
    flush = context.comm.flush if context.mesh.stages > 1 else None
    finish = context.transfers.finish if context.transfers else None

    def run(env: Env) -> Env:
        number = 0
        try:
            for number, action in enumerate(actions):  # noqa: B007  (known when one fails)
                action(env)
            # The worker may still update state, which the caller reads when the step returns.
            if worker is not None:
                worker.wait()
            if flush is not None:
                flush()
        except CollectiveError as error:
            raise CollectiveError(f"{_name_line(lines[number], number)}: {error}") from error
        except torch.OutOfMemoryError as error:
            if not getattr(error, "__notes__", ()):  # an error of the worker has a note already
                error.add_note(f"It was in {_name_line(lines[number], number)}.")
            raise
        finally:  # after a failure too: transfers under way still write to memory that is about to be freed
            if finish:
                finish()
        return env

    return run


def _wait_for_worker(action: Action, context: ExecutorContext) -> Action:
    """Return an action that first waits for the host's thread, and for the copies that it began."""

    def run(env: Env) -> None:
        context.transfers.join()
        action(env)

    return run


def _find_waits(schedule: Schedule) -> list[bool]:
    """Return for each line whether it has to wait for the worker.

    It does if it reads or drops a value that the worker may still make, or writes one that it may still read.
    """
    waits = []
    made, read = set(), set()  # the values that the worker may still make, and those that it may still read
    for line in schedule.instructions:
        # The worker's own lines follow each other on its thread, and need no wait.
        arrives = isinstance(line, Wait) and any(n.is_copy(Kind.HOST, Kind.REDUCED) for n in line.writes)
        if not arrives and line.on_host(schedule):
            made |= set(line.writes)
            read |= set(line.reads)
            waits.append(False)
            continue

        # Any other line waits once, for all that the worker was given so far.
        dropped = {n for n in getattr(line, "drops", ()) if not is_dropped_by_worker(n)}
        awaits_value = bool(made & {*line.reads, *line.writes, *dropped})
        awaits_reader = bool(read & {*line.writes, *dropped})
        waits.append(awaits_value or awaits_reader)
        if waits[-1]:
            made, read = set(), set()
        if arrives:  # the wait is a stream's, so that the host may not have the value yet
            made |= set(line.writes)
    return waits


def _name_line(line: Instruction, number: int) -> str:
    """Name an instruction for an error."""
    return f"line {number} of the schedule, {line.phase} {line.unit} {line.verb} {line.detail}"


def cut_batch(values: Mapping[str, Tensor], uncut: set[str], parts: int) -> list[dict[str, Tensor]]:
    """Cut a batch into micro-batches: views of leaves' parts along dim 0; leaves in `uncut` stay whole."""
    chunks = {n: [v] * parts if n in uncut or parts == 1 else v.chunk(parts) for n, v in values.items()}
    return [{n: of_leaf[micro] for n, of_leaf in chunks.items()} for micro in range(parts)]
