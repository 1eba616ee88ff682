"""Agreement: ranks compare what they are about to run, once, before the first step.

A rank never acts alone: one that issues other collectives than its peers hangs them all (pytorch
PRs 155558, 193043). So the sequence of collectives is compared first, as text.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fnshard.compiler.schedule import Schedule
from fnshard.errors import AgreementError, report
from fnshard.runtime.collectives import Collectives


@dataclass(frozen=True)
class Agreement:
    """What all ranks hold alike. `items`: the bound that a Mean's gradients are divided by on the way."""

    fingerprint: str
    items: int


def reach(comm: Collectives, schedule: Schedule, optimizer: str, items: int) -> Agreement:
    """Compare schedules and optimizers over all ranks. A collective.

    Raises:
        AgreementError: on every rank, naming those that differ and the first line that does.
    """
    lines = [*schedule.communication(), f"optimizer {optimizer}", f"mesh {schedule.mesh}",
             f"accumulate {schedule.accumulate}"]  # fmt: skip
    mine = {"fingerprint": schedule.fingerprint(), "lines": _digest(lines), "items": items}
    texts = [json.loads(t) for t in comm.gather_object(json.dumps(mine))]
    first = texts[0]
    differing = [r for r, t in enumerate(texts) if t["lines"] != first["lines"]]
    if differing:
        _refuse(comm, lines, differing)
    return Agreement(first["fingerprint"], max(t["items"] for t in texts))


def _digest(lines: list[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _refuse(comm: Collectives, lines: list[str], differing: list[int]) -> None:
    """All ranks know that they differ, so all come here: one more exchange shows where."""
    every = [json.loads(t) for t in comm.gather_object(json.dumps(lines))]
    shown = []
    for rank in differing[:4]:
        pairs = enumerate(zip(every[0] + ["(end)"], every[rank] + ["(end)"], strict=False))
        at, (here, there) = next(((i, p) for i, p in pairs if p[0] != p[1]), (0, ("", "")))
        shown += [
            f"collective {at} on rank 0:     {here[:160]}",
            f"collective {at} on rank {rank}:     {there[:160]}",
        ]
    raise AgreementError(
        report(
            f"rank(s) {', '.join(map(str, differing))} hold another program than rank 0.",
            shown,
            "build model, specs and optimizer the same way on every rank (no branch on the rank, no "
            "unordered set); lower(...).as_text() shows the whole schedule.",
        )
    )


def compile_in_turn(comm: Collectives, compile: Callable[[], Any]) -> Any:
    """Compile on the first rank of each host, then on the others, which find its disk cache."""
    if comm.mesh.kind != "group":
        return compile()
    hosts = comm.gather_object(socket.gethostname())
    leads = hosts.index(hosts[comm.mesh.rank]) == comm.mesh.rank
    result = compile() if leads else None
    comm.barrier()
    return result if leads else compile()
