"""Layouts: which ranks hold which block of a leaf, and the stored bytes of a tree, leaf by leaf."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fnshard.compiler.ir.program import short_dtype
from fnshard.errors import SpecError
from fnshard.layout.partition import P, block_shape, boxes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, check_specs
from fnshard.mesh import Mesh

FIELDS = ("storage", "gradient", "optimizer")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path


def blocks_of(layout: P, shape: Sequence[int], mesh: Mesh) -> dict[str, list[int]]:
    """The ranks that hold each block of a leaf, by the text of its slices; or "padding".

    >>> from fnshard.mesh import make_mesh
    >>> blocks_of(P("shard"), (3,), make_mesh(replicate=2, shard=2, abstract=True))
    {'[0:2]': [0, 2], '[2:3]': [1, 3]}

    Raises:
        SpecError: an axis that the mesh does not have, or more dims than the leaf has.
    """
    wrong = [f"it has no axis {axis!r}" for axis in layout.axes if axis not in mesh.names]
    if len(layout.parts) > len(shape):
        wrong.append(f"{layout!r} names {len(layout.parts)} dims, the leaf {list(shape)} has {len(shape)}")
    if wrong:
        raise SpecError(f"{layout!r} does not fit mesh {mesh}:", wrong, "fs.match_specs checks both.")
    ranks: dict[str, list[int]] = {}
    for rank in range(mesh.size):
        for full, _ in boxes(shape, layout, mesh, mesh.coordinate(rank)):
            empty = any(each.start >= each.stop for each in full)
            text = f"[{', '.join(f'{each.start}:{each.stop}' for each in full)}]"
            ranks.setdefault("padding" if empty else text, []).append(rank)
    return ranks


def layouts_of(spec: LayoutSpec | P, shape: Sequence[int] | None) -> tuple[dict[P, str], tuple[int, ...]]:
    """The layouts of a spec with the names of the fields that have each, and the leaf's shape.

    Raises:
        SpecError: neither a spec nor a P; no shape.
    """
    if not isinstance(spec, LayoutSpec | P):
        raise SpecError(
            f"a leaf's layout is a LayoutSpec or a P, not {type(spec).__name__}.",
            fix='pass one leaf of the spec tree, such as specs["layers.0.attn.wq.weight"].',
        )
    full = getattr(spec, "shape", None) if shape is None else shape
    if full is None:
        raise SpecError(
            f"{spec!r} knows no shape.",
            fix="shape=leaf.shape; or a spec of fs.match_specs or a preset, which know theirs.",
        )
    if isinstance(spec, P):
        return {spec: "layout"}, tuple(full)
    named: dict[P, list[str]] = {}
    for field in FIELDS if spec.trainable is not False else FIELDS[:1]:
        value = getattr(spec, field)
        named.setdefault(spec.storage if value is None else value, []).append(field)
    if spec.compute.axes:
        named.setdefault(spec.compute, []).append("compute")
    return {layout: ", ".join(fields) for layout, fields in named.items()}, tuple(full)


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
