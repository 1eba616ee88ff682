"""Steps: what runs of a derived update when, and what each stretch hands on to later ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from fnshard.compiler.update.derive import Compute, Derived, Reduce, Stack
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE


@dataclass(frozen=True)
class Flow:
    """What becomes of the results of one stretch of a leaf's update.

    Args:
        commits: by result ("update", a slot), the value that is written when the stretch has run: one of its
            own, or one that had to wait for a reader of what it replaces.
        keeps: values that later stretches and exchanges read, by name; what they are here. A result that
            waits is called "new NAME", state as it was before the update is "old NAME" here.
    """

    commits: Mapping[str, str]
    keeps: Mapping[str, str]


def flow_of(derived: Derived, number: int) -> Flow:
    """Return what is written and kept behind step `number`, a `Compute`.

    A result takes the place of what it was computed of only when nothing reads that any more.
    """
    computes = {i: s for i, s in enumerate(derived.steps) if isinstance(s, Compute) and not s.whole}
    commits, keeps = {}, {}
    for result, made in _made(derived).items():
        replaced = PARAM if result == UPDATE else result
        readers = [
            min(at for at in computes if at >= i)
            for i, step in enumerate(derived.steps)
            if i > made and replaced in (step.reads if isinstance(step, Compute) else step.sends)
        ]
        written = max([min(i for i in computes if i >= made), *readers])
        waits = f"new {result}" if made in computes and written != made else result
        if written == number:
            commits[result] = waits
        elif made == number:
            keeps[waits] = result

    # What later steps read of this one. The gradient is scaled once, and then handed on; state that is sent,
    # or read where leaves are whole, goes out from the first stretch.
    first = number == min(computes)
    here = {*computes[number].writes, *((GRAD,) if first else ())}
    for step in derived.steps[number + 1 :]:
        names = step.reads if isinstance(step, Compute) else step.sends
        keeps |= {n: n for n in names if n in here and not is_state(n)}
        if first and not (isinstance(step, Compute) and not step.whole):
            keeps |= {n: f"old {n}" for n in names if is_state(n)}
    return Flow(commits, keeps)


def is_state(name: str) -> bool:
    """Whether a value is the parameter, or a slot of it."""
    return name == PARAM or name.startswith("slots.")


def _made(derived: Derived) -> dict[str, int]:
    """Return the step that makes each result."""
    out = {}
    for number, step in enumerate(derived.steps):
        names = step.writes if isinstance(step, Compute) else step.receives
        out |= {n: number for n in names if n == UPDATE or is_state(n)}
    return out


def form_of(derived: Derived) -> Hashable:
    """Return what leaves have alike whose updates run side by side: the kinds of their steps, and when the
    parameter and slots are written."""
    forms: list[Hashable] = []
    for number, step in enumerate(derived.steps):
        match step:
            case Compute(whole=True):
                forms.append("whole")
            case Compute():
                commits = flow_of(derived, number).commits
                forms.append(("compute", UPDATE in commits, any(name != UPDATE for name in commits)))
            case Reduce():
                forms.append((step.how, step.axes))
            case Stack():
                forms.append(("stack", step.axes, step.back))
    return tuple(forms)


def stacks_of(derived: Derived) -> tuple[Stack, Stack] | tuple[None, None]:
    """Return the exchanges to and from where a leaf is computed whole, or None twice."""
    stacks = [step for step in derived.steps if isinstance(step, Stack)]
    return (stacks[0], stacks[1]) if stacks else (None, None)
