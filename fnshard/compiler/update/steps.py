"""Find what each computation of a derived update writes, and which values it hands on to later steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fnshard.compiler.update.derive import Compute, DerivedUpdate, Reduce, Stack
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE


@dataclass(frozen=True)
class Flow:
    """A record of what becomes of the values of a stretch, which is a computation between exchanges.

    In `-lr * m / m.norm(), {"m": m}` with `m = slots["m"].lerp(grad, 0.1)` the first stretch makes the square
    of a norm, "v0", which is summed over ranks to "v1". It commits nothing and keeps ("v0", "grad"). The
    second reads ("grad", "slots.m", "v1") and commits ("update", "slots.m").

    Args:
        commits: results that are written when the stretch has run: its own, or those that came back right
            before it from the rank that has the leaf whole.
        keeps: names of values that later stretches and exchanges read. State is kept as it was before the
            update.
    """

    commits: tuple[str, ...]
    keeps: tuple[str, ...]


def flow_of(derived: DerivedUpdate, number: int) -> Flow:
    """Return the values that are written and kept after step `number`, a `Compute`."""
    # Each result is written by the stretch that computes it, or by the next one if it has come back.
    stretches = [i for i, s in enumerate(derived.steps) if isinstance(s, Compute) and not s.whole]
    commits, keeps = [], dict[str, None]()
    for made_at, step in enumerate(derived.steps):
        names = step.writes if isinstance(step, Compute) else step.receives
        if number == min((i for i in stretches if i >= made_at), default=None):
            commits += [n for n in names if n == UPDATE or is_state(n)]

    # The gradient is scaled once, and then handed on. State that is sent, or that a rank with the whole leaf
    # reads, goes out from the first stretch, before anything is written to it.
    is_first = number == stretches[0]
    here = {*derived.steps[number].writes}
    if is_first:
        here.add(GRAD)
    for step in derived.steps[number + 1 :]:
        names = step.reads if isinstance(step, Compute) else step.sends
        keeps |= dict.fromkeys(n for n in names if n in here and not is_state(n))
        if is_first and not (isinstance(step, Compute) and not step.whole):
            keeps |= dict.fromkeys(n for n in names if is_state(n))
    return Flow(tuple(commits), tuple(keeps))


def is_state(name: str) -> bool:
    """Return whether a value is the parameter, or a slot of it."""
    return name == PARAM or name.startswith("slots.")


def steps_key(derived: DerivedUpdate) -> Hashable:
    """Return a key that is equal for leaves whose updates can run side by side.

    It says the kinds of their steps, and when the parameter and the slots are written.
    """
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


def stacks_of(derived: DerivedUpdate) -> tuple[Stack, Stack] | tuple[None, None]:
    """Return the exchanges to and from the rank that computes a leaf whole, or None twice."""
    stacks = [step for step in derived.steps if isinstance(step, Stack)]
    return (stacks[0], stacks[1]) if stacks else (None, None)
