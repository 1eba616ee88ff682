"""Batch: what the tools that run all ranks in one process are given, cut and laid out for these ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, signature_of
from fnshard.errors import SpecError, StateError
from fnshard.layout.pairs import as_pairs
from fnshard.layout.partition import boxes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec
from fnshard.losses import Sequence, Whole, unwrapped
from fnshard.mesh import Mesh, make_mesh
from fnshard.step.state import TrainState

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def tolerance(*dtypes: torch.dtype) -> float:
    """How far results may lie apart, by the largest number, where these dtypes take part."""
    return max(TOLERANCES.get(d, 0.2) if d.is_floating_point else 0.0 for d in dtypes)


def on_device(mesh: Mesh, values: Any) -> Any:
    """The tree's tensors where the mesh's are: what is compared is computed on one device."""

    def moved(value: Any) -> Any:
        if isinstance(value, Whole | Sequence):
            return replace(value, value=moved(value.value))
        return value.to(mesh.device) if isinstance(value, Tensor) else value

    return tree.map(moved, values)


def as_arguments(fn: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] | None) -> Arguments:
    """What `fn` takes after the parameters; a batch that is no tuple is one argument."""
    passed = Arguments(batch if isinstance(batch, tuple) else (batch,), keywords or {})
    return passed.in_order_of(signature_of(fn))


def simulated_mesh(mesh: Mesh | None, *trees: Any) -> Mesh:
    """The mesh as it is, if it is simulated; by default two ranks along every axis that specs name.

    Raises:
        SpecError: a mesh of another kind.
    """
    if mesh is None:
        specs = [s for t in trees for s in ResolvedSpecs.of(t).leaves.values()]
        named = [a for s in specs for p in (s.storage, s.gradient, s.optimizer) if p for a in p.axes]
        return make_mesh(**dict.fromkeys(dict.fromkeys(named) or ["shard"], 2), simulated=True)
    if mesh.kind != "simulated":
        sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.sizes, strict=True))
        raise SpecError(
            f"mesh {mesh} is {mesh.kind}; all its ranks must be in this process.",
            fix=f"fs.make_mesh({sizes}, simulated=True), or smaller.",
        )
    return mesh


def full_params(source: Any, specs: Any) -> tuple[Any, Any]:
    """The parameter tree and specs that know its shapes.

    Raises:
        StateError: a state of several ranks; not the tree that the specs are for.
    """
    if isinstance(source, TrainState):
        where = source.where
        if where is None or where[1].size > 1:
            raise StateError(
                "this TrainState is one rank's part; the full parameters are needed.",
                fix="on every rank: params = fs.unshard(state.params, specs, mesh).",
            )
        source = source.params
    return source, ResolvedSpecs.of(specs).resolve(source).tree


def without_wrapper(batch: Arguments) -> Arguments:
    """A batch as `fn` sees it, without `Whole` around its leaves."""
    return tree.map(unwrapped, batch, constants=True)


def valid_parts(
    block: Tensor, spec: LayoutSpec, layout: Any, mesh: Mesh, rank: int
) -> list[tuple[tuple[slice, ...], Tensor]]:
    """Where a rank's block lies in the full leaf, and the block without its padding; part by part where it is
    `Fused`."""
    return [(f, block[mine]) for f, mine in boxes(spec.shape, layout, mesh, mesh.coordinate(rank))]


def full_tensor(blocks: Mapping[int, Tensor], spec: LayoutSpec, layout: Any, mesh: Mesh) -> Tensor:
    """The full leaf from its ranks' blocks; of replicas, the first rank's."""
    first = next(iter(blocks.values()))
    full = torch.zeros(spec.shape, dtype=first.dtype, device=first.device)
    for rank in reversed(blocks):
        for slices, valid in valid_parts(blocks[rank], spec, layout, mesh, rank):
            full[slices] = valid
    return full


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest absolute difference of two tensors, and the largest number of either.

    NaN or inf at the same places is no difference; at others it is an infinite one.
    """
    if a.shape != b.shape:
        return float("inf"), float("inf")
    if a.numel() == 0:
        return 0.0, 0.0
    x, y = (as_pairs(v).double() for v in (a, b))
    gap = (x - y).abs()
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, gap.nan_to_num(nan=float("inf")))
    finite = [v[v.isfinite()].abs() for v in (x, y)]
    return float(gap.max()), max(float(v.max()) if v.numel() else 0.0 for v in finite)
