"""Leaves: the stored bytes of a tree, leaf by leaf, or with equal leaves of all layers together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fnshard.compiler.ir.program import short_dtype
from fnshard.errors import SpecError
from fnshard.layout.partition import block_shape
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, check_specs
from fnshard.mesh import Mesh

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class LeafBytes:
    """One leaf, or `count` leaves whose paths differ in numbers alone.

    `label`: its spec in a few words; `bytes`: stored by the whole, `mine`: by one rank, padding counted.
    """

    path: str
    unit: str
    shape: tuple[int, ...]
    label: str
    bytes: int
    mine: int
    count: int = 1


def leaves_of(specs: Any, mesh: Mesh, params: Any = None) -> list[LeafBytes]:
    """All stored leaves of a spec tree; a coded leaf is replaced by its parts.

    Args:
        params: for specs that were written by hand, and know no shapes yet.

    Raises:
        SpecError: specs without shapes, or that do not fit the mesh or `params`.
    """
    resolved = ResolvedSpecs.of(specs)
    resolved = resolved if params is None else resolved.resolve(params)
    if not resolved.complete:
        lines = [f"{leaf} knows no shape" for leaf in resolved.incomplete]
        raise SpecError("specs were written by hand:", lines, "pass params=, or fs.match_specs.")
    check_specs(resolved.stored, mesh)
    return [
        LeafBytes(
            path,
            spec.unit or "",
            spec.shape,
            label_of(spec),
            math.prod(spec.shape) * spec.storage_dtype.itemsize,
            math.prod(block_shape(spec.shape, spec.storage, mesh)) * spec.storage_dtype.itemsize,
        )
        for path, spec in resolved.stored.items()
    ]


def label_of(spec: LayoutSpec) -> str:
    """A spec in a few words, without fields that have their defaults.

    >>> from fnshard.layout.spec import P
    >>> import torch
    >>> spec = LayoutSpec(P(), gradient=P("shard"), optimizer=P("shard"), compute_dtype=torch.bfloat16)
    >>> label_of(spec.resolve(torch.ones(4), "unit"))
    "P() f32 → bf16, gradient and optimizer P('shard')"
    >>> label_of(LayoutSpec(P(("tensor", "shard")), compute=P("tensor")).resolve(torch.ones(4), "unit"))
    "P(('tensor', 'shard')) f32, computed P('tensor')"
    """
    stored, computed = short_dtype(spec.storage_dtype), short_dtype(spec.compute_dtype)
    parts = [f"{spec.storage!r} {stored}" + ("" if stored == computed else f" → {computed}")]
    if not spec.trainable:
        parts.append("frozen")
    elif spec.gradient == spec.optimizer != spec.storage:
        parts.append(f"gradient and optimizer {spec.gradient!r}")
    else:
        other = {"gradient": spec.gradient, "optimizer": spec.optimizer}
        parts += [f"{name} {layout!r}" for name, layout in other.items() if layout != spec.storage]
    parts += [f"computed {spec.compute!r}"] if spec.compute.axes else []
    parts += [] if spec.reshard or not spec.storage.axes else ["kept gathered"]
    parts += [] if spec.memory == "device" else [f"on the {spec.memory}"]
    if spec.trainable and spec.optimizer_memory != "device":
        streamed = " (streamed)" if spec.updated_on == "device" else ""
        parts.append(f"optimizer on the {spec.optimizer_memory}{streamed}")
    return ", ".join(parts)


def equal_units(leaves: Sequence[LeafBytes]) -> list[tuple[str, list[LeafBytes], int]]:
    """Units in order, equal ones once: name, leaves of one unit, number of equal units.

    Units are equal if their leaves are, but for numbers in their paths: the blocks of a model.
    """
    units: dict[str, list[LeafBytes]] = {}
    for leaf in leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for unit, mine in units.items():
        paths = [(NUMBER.sub("*", leaf.path), leaf.shape, leaf.label) for leaf in mine]
        alike.setdefault((NUMBER.sub("*", unit), *paths), []).append(unit)
    return [
        (same[0], units[same[0]], 1)
        if len(same) == 1
        else (
            key[0],
            [replace(leaf, path=NUMBER.sub("*", leaf.path), unit=key[0]) for leaf in units[same[0]]],
            len(same),
        )
        for key, same in alike.items()
    ]


def together(leaves: Sequence[LeafBytes]) -> list[LeafBytes]:
    """Leaves whose paths differ in numbers alone, with equal shapes and specs, as one; largest first."""
    found: dict[tuple[str, tuple[int, ...], str], LeafBytes] = {}
    for leaf in leaves:
        path, unit = (NUMBER.sub("*", name) for name in (leaf.path, leaf.unit))
        key = path, leaf.shape, leaf.label
        seen = found.get(key)
        found[key] = (
            replace(leaf, path=path, unit=unit)
            if seen is None
            else replace(
                seen, bytes=seen.bytes + leaf.bytes, mine=seen.mine + leaf.mine, count=seen.count + 1
            )
        )
    return sorted(found.values(), key=lambda leaf: -leaf.bytes)


def labels_of(leaves: Sequence[LeafBytes]) -> dict[str, tuple[int, int]]:
    """Bytes of the whole and of one rank by spec, the largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for leaf in leaves:
        whole, mine = sums.get(leaf.label, (0, 0))
        sums[leaf.label] = whole + leaf.bytes, mine + leaf.mine
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))
