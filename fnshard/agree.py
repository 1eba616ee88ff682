"""Agreement: ranks compare what they are about to run, once, before the first step.

A rank never acts alone: one that issues other collectives than its peers hangs them all (pytorch
PRs 155558, 193043). So the sequence of collectives is compared first, as text.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.schedule import Schedule
from fnshard.errors import AgreementError, leaves, report
from fnshard.runtime.collectives import Collectives
from fnshard.spec import LayoutSpec


@dataclass(frozen=True)
class Agreement:
    """What all ranks hold alike. `items`: the bound that a Mean's gradients are divided by on the way."""

    items: float


def reach(comm: Collectives, schedule: Schedule, policy: Sequence[str], items: float) -> Agreement:
    """Compare schedules, and whatever else must be alike, over all ranks. A collective.

    Args:
        policy: optimizer, loss scale, seed: a line each.
        items: this rank's guess of how many items a Mean counts; all take the largest.

    Raises:
        AgreementError: on every rank, naming those that differ and the first line that does.
    """
    lines = [*schedule.communication(), f"mesh {schedule.mesh}", f"accumulate {schedule.accumulate}", *policy]
    mine = {"lines": _digest(lines), "items": items}
    texts = [json.loads(t) for t in comm.gather_object(json.dumps(mine))]
    first = texts[0]
    differing = [r for r, t in enumerate(texts) if t["lines"] != first["lines"]]
    if differing:
        _refuse(comm, lines, differing)
    return Agreement(max(t["items"] for t in texts))


def compare_replicas(
    comm: Collectives, blocks: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec]
) -> None:
    """Refuse replicas that start out different: they would stay so, in silence. A collective.

    What a rank stores whole, or shares with others that store the same block, is summed up and
    compared; nothing is moved (DDP broadcasts rank 0's values instead).

    Raises:
        AgreementError: on every rank, naming the leaves.
    """
    mesh, here = comm.mesh, comm.mesh.coordinate()
    held = {p: mesh.ordered(s.storage.axes) for p, s in specs.items()}
    held = {p: axes for p, axes in held.items() if mesh.axes_size(axes) < mesh.size}
    if not held:
        return
    sums = _checksums([blocks[p] for p in held])
    mine = {
        p: f"{[here[a] for a in axes]} {value}" for (p, axes), value in zip(held.items(), sums, strict=True)
    }
    every = [json.loads(text) for text in comm.gather_object(json.dumps(mine))]
    wrong = []
    for path in mine:
        values: dict[str, str] = {}
        for rank, each in enumerate(every):
            place, _, value = each[path].partition("] ")
            if values.setdefault(place, value) != value:
                wrong.append(f"params[{path!r}] on rank {rank}")
                break
    if wrong:
        raise AgreementError(
            report(
                f"{leaves(len(wrong))} replicated over ranks that hold different values:",
                wrong[:12],
                "make the initial values alike: step.init(module_on_meta, seed=...), the same "
                "torch.manual_seed on every rank, or the same checkpoint.",
            )
        )


def _checksums(blocks: Sequence[Tensor]) -> list[str]:
    """Sum and norm of each, to nine digits: what equal tensors have in common on any number of threads."""
    if not blocks:
        return []
    with torch.no_grad():
        sums = torch.stack([b.sum(dtype=torch.float64) for b in blocks])
        norms = torch.stack(
            [
                torch.linalg.vector_norm(b, dtype=torch.float64)
                if b.is_floating_point()
                else (b * 1.0).double().norm()
                for b in blocks
            ]
        )
    return [f"{x:.9e} {y:.9e}" for x, y in zip(sums.tolist(), norms.tolist(), strict=True)]


def _digest(lines: list[str]) -> str:
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
