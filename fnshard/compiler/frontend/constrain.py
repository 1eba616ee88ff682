"""Constrain: how a value inside `fn` is split, said in `fn`; a placed program has no trace of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fnshard.compiler.frontend.exchange import traced_mesh
from fnshard.errors import TraceError
from fnshard.layout.spec import P

__all__ = ["constrain"]

_LIB = torch.library.Library("fnshard", "FRAGMENT")
_LIB.define("constrain(Tensor x, str[] axes, int[] dims) -> Tensor")
_LIB.impl("constrain", lambda x, axes, dims: torch.ops.aten.alias.default(x), "CompositeImplicitAutograd")
CONSTRAIN = torch.ops.fnshard.constrain.default


def constrain(x: Tensor, layout: P, axes: str | Sequence[str] | None = None) -> Tensor:
    """`x`, split over the tensor and context axes as `layout` says, where `fn` is sharded.

    What is computed stays the same; where it is otherwise split, an exchange brings it there, and in the
    backward its dual. Outside of a step it is `x` itself. As `jax.lax.with_sharding_constraint`.

    Args:
        x: [...].
        layout: the axes by dim of `x`; over one of `axes` that it does not name, `x` is whole on every rank.
        axes: which axes are spoken of; default those that `layout` names, and all where it names none.

    Raises:
        TraceError: an axis that the mesh lacks, or that splits rows; more dims than `x` has.

    >>> import fnshard as fs
    >>> x = torch.ones(2, 4)
    >>> fs.constrain(x, fs.P(None, "tensor")) is x
    True
    """
    mesh = traced_mesh()
    if not isinstance(x, Tensor) or not isinstance(layout, P):
        raise TraceError(
            f"`fn` calls fs.constrain of {type(x).__name__} and {type(layout).__name__}.",
            fix='a tensor and a layout: fs.constrain(x, fs.P(None, "tensor")).',
        )
    if mesh is None:
        return x
    placed = [n for n in mesh.names if n not in mesh.data_axes]
    axes = (axes,) if isinstance(axes, str) else axes
    spoken = list(axes if axes is not None else layout.axes or placed)
    unknown = [a for a in {**dict.fromkeys(spoken), **dict.fromkeys(layout.axes)} if a not in placed]
    shown = ", ".join(mesh.data_axes) or "none"
    if unknown or len(layout.parts) > x.dim():
        problem = (
            f"over {', '.join(map(repr, unknown))}, of mesh {mesh}, data axes {shown}"
            if unknown
            else f"of {list(x.shape)}, which has {x.dim()} dims"
        )
        raise TraceError(
            f"`fn` calls fs.constrain(x, {layout!r}) {problem}.",
            fix=f"name axes that are no data axes ({', '.join(placed) or 'this mesh has none'}), at most one "
            "entry for each dim of x.",
        )
    dims = [next((d for d in range(x.dim()) if axis in layout.of(d)), -1) for axis in spoken]
    return CONSTRAIN(x, spoken, dims)
