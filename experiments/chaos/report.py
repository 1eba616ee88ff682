"""The campaign as one table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.tables import markdown

NAMES = {
    "kill_rank": "SIGKILL of a rank",
    "kill_all": "SIGKILL of all ranks",
    "kill_launcher": "SIGKILL of the launcher",
    "term_launcher": "SIGTERM to the launcher",
    "term_rank": "SIGTERM to a rank",
}
HEAD = (
    "",
    "kills",
    "in a save",
    "before the first step",
    "went on by itself",
    "back after s",
    "beyond imports",
    "steps made again",
    "committed steps lost",
)


def table(found: Mapping[str, Any]) -> str:
    """A row for each way to kill, as Markdown, and what was found in the runs."""
    kills = found["kills"]
    modes = {name: [k for k in kills if k["kill"]["mode"] == mode] for mode, name in NAMES.items()}
    rows = [HEAD, *(_row(name, mine) for name, mine in {**modes, "all": kills}.items())]
    problems = [
        f"- {NAMES[k['kill']['mode']]} at step {k['step']}: {text}" for k in kills for text in k["problems"]
    ]
    problems += [f"- run {n}: {text}" for n, run in enumerate(found["runs"], 1) for text in run]
    unequal = sum(bool(run) for run in found["runs"])
    unreadable = sum("unreadable" in text for k in kills for text in k["problems"])
    again = _again(kills) or [0]
    back, beyond = _back(kills)
    closing = (
        f"{found['starts']} starts, {len(found['runs'])} runs finished, {unequal} unlike the unbroken one; "
        f"checkpoints that could not be read: {unreadable}; other problems: {len(problems) - unreadable}; "
        f"steps made again: median {statistics.median(again):g}, worst {max(again)}; "
        f"{found['seconds']:.0f} s."
    )
    if back:
        closing += (
            f" Seconds from a kill to the next finished step, {len(back)} times: {_spread(back)}; those in "
            f"which no process imports: {_spread(beyond)}."
        )
    return "\n".join([markdown(rows), "", closing, *problems])


def failed(found: Mapping[str, Any]) -> bool:
    """Whether anything was lost, unreadable, unequal, or otherwise not as it should be."""
    repeated = found.get("config", {}).get("replicas", 0) and max(_again(found["kills"]), default=0) > 1
    return repeated or any(found["runs"]) or any(k["problems"] or k["lost"] for k in found["kills"])


def _again(kills: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps that were made a second time, of each kill that was gone on from."""
    return [max(0, k["step"] - k["resumed"]) for k in kills if k["resumed"] is not None]


def _back(kills: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds until a job that went on by itself has made another step, with and without imports."""
    timed = [kill for kill in kills if kill.get("back_s") is not None]
    return [k["back_s"] for k in timed], [k["back_s"] - k["imports_s"] for k in timed]


def _spread(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.1f}, worst {max(seconds):.1f}"


def _row(name: str, kills: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    again, (back, beyond) = _again(kills), _back(kills)
    mean = f"{sum(again) / len(again):.1f}" if again else "-"
    numbers = (
        len(kills),
        sum(k["in_save"] for k in kills),
        sum(k["kill"]["moment"] == "start" for k in kills),
        sum(k["inside"] for k in kills),
    )
    times = (f"{statistics.median(times):.1f}" if times else "-" for times in (back, beyond))
    return (name, *map(str, numbers), *times, mean, str(sum(k["lost"] for k in kills)))
