"""Verify: each planted fault of a schedule is found, and its line is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from kernels import no_kernels
from torch.utils.checkpoint import CheckpointPolicy
from toys import chain, lower, rows, run_chain

from fnshard import ScheduleError
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels import differentiate
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Free,
    Gather,
    Instruction,
    OverlappedUpdate,
    Publish,
    Run,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.passes import prefetch
from fnshard.compiler.schedule.verify import verify


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


@cache
def hybrid() -> Schedule:
    return lower(loss, chain(4), rows(), ranks={"replicate": 2, "shard": 4}, preset="hybrid_shard").schedule


def at(lines: list[Any], kind: type, **values: Any) -> int:
    return next(
        n for n, i in enumerate(lines)
        if isinstance(i, kind) and all(getattr(i, k) == v for k, v in values.items())
    )  # fmt: skip


Lines = list[Any]


def reads_the_dead(lines: Lines) -> None:
    run = at(lines, Run, segment=1)
    lines.insert(run, Free("layers.1", "forward", drops=lines[run].reads[:1]))


def never_waited(lines: Lines) -> None:
    lines.insert(0, replace(lines[at(lines, Gather)], writes=(ValueName(Kind.FLIGHT, "lost"),)))


def waited_for_twice(lines: Lines) -> None:
    lines.insert(at(lines, Wait) + 1, lines[at(lines, Wait)])


def writes_twice(lines: Lines) -> None:
    lines.insert(at(lines, Run, segment=0), lines[at(lines, Run, segment=0)])


def frees_nothing(lines: Lines) -> None:
    lines.append(Free("-", "update"))


def never_freed(lines: Lines) -> None:
    del lines[max(n for n, i in enumerate(lines) if isinstance(i, Free))]


def in_flight_twice(lines: Lines) -> None:
    lines.insert(at(lines, Gather), lines[at(lines, Gather)])


def gathered_again(lines: Lines) -> None:
    place = at(lines, Wait, of=Gather) + 1
    lines[place:place] = _extra_gather(lines)


def gathered_for_nothing(lines: Lines) -> None:
    lines[:0] = _extra_gather(lines)


def read_while_it_is_overwritten(lines: Lines) -> None:
    issue = at(lines, AllReduce)
    reader = Instruction("-", "backward", reads=lines[issue].reads)
    lines[issue : issue + 1] = [replace(lines[issue], drops=()), reader]


def _extra_gather(found: list[Any]) -> list[Instruction]:
    """Add the first gather once more, under names that nobody reads."""
    gather = next(i for i in found if isinstance(i, Gather))
    wait = next(i for i in found if isinstance(i, Wait) and i.of.verb == "gather")
    names = tuple(n.of(n.micro, f"{n.version}!") for n in wait.writes)
    extra = ValueName(Kind.FLIGHT, "extra")
    return [
        replace(gather, writes=(extra,)),
        replace(wait, reads=(extra,), writes=names, drops=(extra,)),
        Free(gather.unit, "forward", drops=names),
    ]


def _update_in_flight() -> Schedule:
    """Make a ZeRO 2 schedule with an update between the issue of its publication and the wait."""
    plan = lower(loss, chain(3), rows(), preset="zero2").schedule
    found = list(plan.instructions)
    publish = next(n for n, i in enumerate(found) if isinstance(i, Publish))
    update = next(i for i in found if isinstance(i, Update) and set(i.writes) >= set(found[publish].reads))
    gone = {n for n in update.reads if n.startswith("r:")}
    found = [replace(i, drops=tuple(d for d in i.drops if d not in gone)) for i in found]
    found = [i for i in found if not (isinstance(i, Free) and not i.drops)]
    publish = next(n for n, i in enumerate(found) if isinstance(i, Publish))
    found.insert(publish + 1, replace(update, drops=tuple(gone)))
    return plan.with_instructions(found)


def _freed_under_an_update() -> Schedule:
    """Let the gradients of an overlapped update die when it is issued."""
    plan = lower(loss, chain(3), rows(), ranks=1, device="cuda").schedule
    found = list(plan.instructions)
    issue = at(found, OverlappedUpdate)
    freed = next(i for i in found[issue:] if isinstance(i, Free) and found[issue].reads[0] in i.drops)
    found.remove(freed)
    found.insert(issue + 1, freed)
    return plan.with_instructions(found)


def _read_while_it_changes() -> Schedule:
    """Add a line that reads a stored leaf between the issue of its update and the wait."""
    plan = lower(loss, chain(3), rows(), ranks=1, device="cuda").schedule
    found = list(plan.instructions)
    issue = at(found, OverlappedUpdate)
    found.insert(issue + 1, Instruction("-", "backward", reads=found[issue].changes[:1]))
    return plan.with_instructions(found)


FAULTS: dict[Callable[[Lines], None], str | list[str]] = {
    reads_the_dead: ["reads", "not alive"],
    never_waited: ["~lost", "never waited for"],
    waited_for_twice: ["writes", "again", "not alive"],
    writes_twice: ["writes", "again", "not alive"],
    frees_nothing: "frees nothing",
    never_freed: "alive at the end",
    in_flight_twice: "already in flight",
    gathered_again: "gathered again",
    gathered_for_nothing: ["gathered", "never read"],
    read_while_it_is_overwritten: ["reads", "may overwrite"],
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_verify_finds(fault: Callable[[Lines], None]) -> None:
    lines = list(hybrid().instructions)
    fault(lines)
    with raises(ScheduleError, says=FAULTS[fault]):
        verify(hybrid().with_instructions(lines))


def test_verify_finds_what_no_line_alone_does() -> None:
    for plan, found in (
        (replace(hybrid(), outputs=(*hybrid().outputs, "nothing")), ["output nothing", "not exist"]),
        (replace(prefetch(hybrid(), 3, 3), planned=1), ["units are gathered", "planned are 1"]),
        (_update_in_flight(), ["changes", "while line", "reads it"]),
        (_freed_under_an_update(), ["changes", "while line", "reads it"]),
        (_read_while_it_changes(), ["touches", "while line", "changes it"]),
    ):
        with raises(ScheduleError, says=found):
            verify(plan)


def test_verify_finds_weights_that_are_saved() -> None:
    def fn(p, x):
        for leaf in p.values():
            x = torch.tanh(x @ torch.tanh(leaf))
        return x.sum()

    def save_derived(joint, source):
        for node in joint.graph.nodes:
            if "tanh" in str(node.target) and node.args[0].op == "placeholder":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    lower(fn, chain(3), rows())
    with (
        no_kernels(),
        mock.patch.object(differentiate, "_tag_recomputed", save_derived),
        raises(ScheduleError, says=["rests on leaves", "saved"]),
    ):
        lower(fn, chain(3), rows())
