"""Async tensor: which exchanges of a step are cut into chunks, as its timeline decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from fnshard.analysis.hardware import TABLE, Hardware
from fnshard.compiler.ir.program import Program
from fnshard.compiler.lower import Rewrite
from fnshard.compiler.place.chunks import chunked, regions
from fnshard.errors import SpecError
from fnshard.mesh import Mesh

AsyncTensor = Literal["off", "auto"] | int | str | Hardware
COUNTS = (2, 4)  # chunks that are tried

Seconds = Callable[[Program], float]


def check(option: Any) -> list[str]:
    """What is wrong with this argument of a step, a line."""
    count = isinstance(option, int) and not isinstance(option, bool) and option >= 1
    named = isinstance(option, str) and option in ("off", "auto", *TABLE)
    if count or named or isinstance(option, Hardware):
        return []
    return [
        f"async_tensor={option!r}: 'off', 'auto', a number of chunks, or a Hardware (or the name of one, "
        f"{', '.join(map(repr, TABLE))}) for which the timeline decides"
    ]


def rewrite_of(option: AsyncTensor, mesh: Mesh, seconds: Seconds) -> Rewrite | None:
    """The rewrite of a placed program, or None where there is none to make.

    Args:
        option: see `shard_step`.
        seconds: of a step of a program, on the hardware that the option names.
    """
    if option in ("off", 1):
        return None
    if isinstance(option, int):
        return partial(chunked, chunks=option, data_axes=mesh.data_axes)
    if not hardware_of(option, mesh).overlap:  # nothing travels beside a product
        return None
    return lambda program: chunked(program, fastest(program, mesh, seconds), mesh.data_axes)


def hardware_of(option: AsyncTensor, mesh: Mesh) -> Hardware:
    """The device for which the timeline decides: the mesh's, where the option is "auto".

    Raises:
        SpecError: nobody knows the mesh's device.
    """
    if option != "auto":
        return Hardware.of(option)
    name = mesh.device_type
    if name == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "h100"
    known = Hardware.named(name) if name == "cpu" else Hardware.of_gpu(name)
    if known is None:
        raise SpecError(
            f"async_tensor='auto': the table of devices has no {name!r}.",
            fix="async_tensor=fs.Hardware.measure(mesh), a number of chunks, or 'off'.",
        )
    return known


def fastest(program: Program, mesh: Mesh, seconds: Seconds) -> Mapping[str, int]:
    """In how many chunks each kind of region is computed: as many as make the step faster, on paper.

    Equal blocks are cut alike. One kind is tried after another, with what has been chosen for those before.
    """
    found: dict[str, list[int]] = {}
    for count in COUNTS:
        for key in dict.fromkeys(r.key for r in regions(program, count, mesh.data_axes)):
            found.setdefault(key, []).append(count)
    chosen: dict[str, int] = {}
    best = seconds(_copy(program)) if found else 0.0
    for key, counts in found.items():
        for count in counts:
            tried = seconds(chunked(program, chosen | {key: count}, mesh.data_axes))
            if tried >= best:
                break
            best, chosen[key] = tried, count
    return chosen


def _copy(program: Program) -> Program:
    """With a graph of its own, for a stage that changes it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return replace(program, graph=graph)
