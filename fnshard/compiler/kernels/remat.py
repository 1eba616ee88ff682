"""Remat: decide what each segment keeps for its backward, by name or by budget.

"unit" recomputes a whole block from its input (Chen et al. 2016; activation checkpointing in FSDP and
Lightning). A fraction goes to the min-cut partitioner as its memory budget. `save` is torch's selective
checkpointing. "offload" keeps everything on the host.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.kernels.segments import Segments, group_by_unit
from fnshard.errors import SpecError, nearest

Kept = Literal["none", "unit", "offload", "unit+offload"]
Remat = Kept | float | Mapping[str, Kept | float]


@dataclass(frozen=True)
class Policy:
    """A policy of what one segment keeps.

    Args:
        budget: the fraction kept of what the backward wants; 0 keeps nothing but the segment's inputs.
        offload: whether what is kept moves to the host between forward and backward.
        save: ops whose results are kept though the budget is 0.
        gathers_again: whether ranks gather one another's parts of sequences again for the backward, and do
            not keep them.
        runs_again: whether the unit's forward runs again for its backward, with its exchanges (`Rerun`). What
            the first forward saves is not kept.
    """

    budget: float = 1.0
    offload: bool = False
    save: tuple[str, ...] = ()
    gathers_again: bool = False
    runs_again: bool = False

    @property
    def key(self) -> str:
        """A text that tells kernels of one source apart; "" where everything is kept, on any tier."""
        return "" if self.budget == 1 else f"keep {self.budget:g} {'+'.join(self.save)}".strip()


NAMED = {
    "none": Policy(),
    "unit": Policy(0.0, gathers_again=True),
    "offload": Policy(offload=True),
    "unit+offload": Policy(0.0, offload=True, gathers_again=True),
}

GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "convolution", "fp8_linear"),
    "attention": (
        "*scaled_dot_product*",
        "*flex_attention*",
        "*block_attention*",
        "*document_attention*",
        "*dropout_attention*",
    ),
}


def check(remat: Any, save: Any) -> list[str]:
    """Return what is wrong with these arguments of a step, a line each."""
    choices = (
        f"one of {', '.join(map(repr, NAMED))}, a fraction from 0 to 1, or a dict from unit globs to those"
    )
    values_by_glob = list(remat.items()) if isinstance(remat, Mapping) else [("", remat)]

    # Each value must be a policy, and each key of a dict a glob.
    wrong, recomputes = [], False
    for glob, value in values_by_glob:
        policy = _read_policy(value)
        if not isinstance(glob, str) or policy is None:
            text = f"{{{glob!r}: {value!r}}}" if glob else repr(value)
            wrong.append(f"remat={text}: {choices}")
        recomputes |= policy is not None and policy.budget == 0
    if isinstance(remat, Mapping) and not remat:
        wrong.append(f"remat={{}}: {choices}")

    # The ops to save are a list, which only a policy that recomputes can use.
    if isinstance(save, str) or not isinstance(save, Sequence) or not all(isinstance(s, str) for s in save):
        wrong.append(f"save={save!r}: a list of ops, such as ['matmul', 'attention'] or ['aten.mm']")
    elif save and not recomputes:
        wrong.append(f"save={list(save)!r}: nothing is recomputed; it goes with remat='unit'")
    return wrong


def _read_policy(value: Any) -> Policy | None:
    """Return the policy that a name or a fraction stands for; None for any other value."""
    if isinstance(value, str):
        return NAMED.get(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return Policy(float(value), gathers_again=True)
    return None


def policies(
    segments: Segments,
    remat: Remat,
    save: Sequence[str],
    units: Iterable[str],
    data_axes: Iterable[str] = (),
) -> tuple[Policy, ...]:
    """Return the policy of each segment.

    A policy that is given for all does not touch the last segment: its backward runs right after its forward,
    so that recomputing would cost time and save nothing. A dict is followed to the letter.

    Args:
        units: the units of all leaves, which globs are matched with.
        data_axes: the mesh's axes over which rows are split.

    Raises:
        SpecError: a glob matches no unit.
    """
    # All segments but the last have one policy.
    if not isinstance(remat, Mapping):
        policy = _add_save(_read_policy(remat), save)
        chosen = [*[policy] * (len(segments.segments) - 1), Policy()]
        return _run_units_again(segments, chosen, set(data_axes))

    # Each segment has the policy of the first glob that matches one of its units.
    units = list(dict.fromkeys(units))
    unused = [f"remat[{glob!r}]{nearest(glob, units)}" for glob in remat if not fnmatch.filter(units, glob)]
    if unused:
        raise SpecError(f"{len(unused)} remat rule(s) match no unit:", unused, "globs of the units' names.")
    chosen = []
    for segment in segments.segments:
        values = (value for glob, value in remat.items() if fnmatch.filter(segment.units, glob))
        chosen.append(_add_save(_read_policy(next(values, "none")), save))
    return _run_units_again(segments, chosen, set(data_axes))


def _run_units_again(segments: Segments, chosen: Sequence[Policy], data_axes: Set[str]) -> tuple[Policy, ...]:
    """Let those units run again that send rows to experts and keep nothing but their inputs."""
    changed = list(chosen)
    for unit in group_by_unit(segments.segments):
        # Exchanges after the last segment lie between units.
        within = {segment.index for segment in unit[:-1]}
        sends_rows = any(
            each.kind == "all_to_all" and each.after in within and data_axes.issuperset(each.axes)
            for each in segments.exchanges
        )
        if sends_rows and all(chosen[s.index].budget == 0 and not chosen[s.index].save for s in unit):
            for segment in unit:
                changed[segment.index] = replace(chosen[segment.index], budget=1.0, runs_again=True)
    return tuple(changed)


def _add_save(policy: Policy, save: Sequence[str]) -> Policy:
    """Return a policy with the ops to save, which matter only where all else is recomputed."""
    return replace(policy, save=tuple(save) if policy.budget == 0 else ())


def is_saved(node: fx.Node, save: str) -> bool:
    """Return whether `save` (a group, or a glob on "mm" or "aten.mm") names this node's op."""
    if not isinstance(node.target, OpOverload):
        return False
    full_name = node.target._schema.name.replace("::", ".")
    names = (full_name, full_name.split(".", 1)[1])  # "aten.mm" and "mm"
    globs = [glob.removesuffix(".default") for glob in GROUPS.get(save, (save,))]
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs for name in names)
