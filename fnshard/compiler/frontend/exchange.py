"""Exchanges: `psum` and `all_gather`, by which `fn` exchanges values with other ranks; and `constrain`.

Each exchange is one op of a program. By `constrain`, `fn` says that a value is split.

No kernel runs an exchange, and autograd never sees one: `kernels.split` cuts the program there, the schedule
has a line `Exchange` in its place, and in the backward the line of its dual.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend import functions, transforms
from fnshard.errors import TraceError
from fnshard.layout.spec import P
from fnshard.mesh import Mesh

__all__ = ["all_gather", "constrain", "psum"]


@dataclass(frozen=True)
class ExchangeKind:
    """A kind of exchange: how ranks combine a value that each of them has.

    Args:
        collective: the method of `Collectives` that carries it.
        rate: the field of a `Link` that says how fast it goes.
        dual: the kind by which the backward exchanges the cotangent. Each rank has a loss of its own, and
            their sum is minimised.
        splits: whether a dim is cut into as many rows as there are ranks, and each receives its own row;
            otherwise all ranks receive the same.
        joins: whether received rows are concatenated along a dim; otherwise they are summed.
        permutes: whether each rank receives what one other has sent, the one `dim` places before it.
    """

    collective: str
    rate: str
    dual: str
    splits: bool = False
    joins: bool = False
    permutes: bool = False

    @property
    def shared(self) -> bool:
        """Return whether all ranks receive the same."""
        return not self.splits and not self.permutes

    def sent_share(self, ranks: int) -> Fraction:
        """Return how many bytes a rank sends, as a multiple of the exchange's largest buffer."""
        if self.permutes:
            return Fraction(1)
        return Fraction((ranks - 1) * (1 if self.splits or self.joins else 2), ranks)

    def full_share(self, ranks: int) -> int:
        """Return the size of the largest buffer as a multiple of what is sent."""
        return ranks if self.joins and not self.splits else 1

    def dims(self, dim: int, to: int) -> tuple[int | None, int | None]:
        """Return the dim that it splits and the dim that it joins, None where it does not."""
        joined = to if self.splits else dim
        return dim if self.splits else None, joined if self.joins else None

    def dual_dims(self, dim: int, to: int) -> tuple[int, int]:
        """Return `dim` and `to` of its dual."""
        if self.permutes:
            return -dim, to
        return (to, dim) if self.splits and self.joins else (dim, to)

    def dims_text(self, dim: int, to: int) -> str:
        """Return the text of its dims in a schedule: of an all-to-all both, of a permutation the distance."""
        if self.permutes:
            return f" by {dim}"
        return f" dim {dim} to {to}" if self.splits and self.joins else ""

    def row(self, shape: Sequence[int], dim: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of one row of what is sent."""
        return tuple(s // ranks if self.splits and d == dim else s for d, s in enumerate(shape))

    def received_shape(self, shape: Sequence[int], dim: int, to: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of what each rank receives.

        >>> KINDS["all_to_all"].received_shape((4, 6, 8), dim=2, to=1, ranks=2)
        (4, 12, 4)
        """
        _, joined = self.dims(dim, to)
        return tuple(s * ranks if d == joined else s for d, s in enumerate(self.row(shape, dim, ranks)))


KINDS = {
    "psum": ExchangeKind("all_reduce", "all_reduce", dual="psum"),
    "all_gather": ExchangeKind("all_gather", "gather", dual="reduce_scatter", joins=True),
    "reduce_scatter": ExchangeKind("reduce_scatter", "reduce_scatter", dual="all_gather", splits=True),
    "all_to_all": ExchangeKind("all_to_all", "all_to_all", dual="all_to_all", splits=True, joins=True),
    "permute": ExchangeKind("permute", "all_to_all", dual="permute", permutes=True),
}

_LIB = torch.library.Library("fnshard", "FRAGMENT")
# `outgoing` copies what is sent: the message has memory of its own, and counts as an activation.
_LIB.define("outgoing(Tensor x) -> Tensor")
_LIB.impl("outgoing", lambda x: x.clone(memory_format=torch.contiguous_format), "CompositeImplicitAutograd")


@torch.library.custom_op("fnshard::exchange", mutates_args=())
def _exchange(x: Tensor, kind: str, axes: str, dim: int, ranks: int, to: int = 0) -> Tensor:
    # No kernel runs this op of a program. The tracer alone does, where the tensor is a constant.
    raise TraceError(
        f"`fn` calls fs.{kind} of a tensor {list(x.shape)} that does not depend on its arguments.",
        fix="pass the number itself, fs.psum(y.numel()), or compute the tensor of the batch, (y >= 0).sum().",
    )


@_exchange.register_fake
def _(x: Tensor, kind: str, axes: str, dim: int, ranks: int, to: int = 0) -> Tensor:
    return x.new_empty(KINDS[kind].received_shape(x.shape, dim, to, ranks))


def _refuse_derivative(ctx: Any, grad: Tensor) -> None:
    """Refuse inner derivatives: their exchange would be differentiated, and not cut out."""
    raise TraceError(
        "`fn` differentiates through fs.psum or fs.all_gather inside itself.",
        fix="exchange what the inner derivative gives, outside of it; shard_step differentiates the loss.",
    )


_exchange.register_autograd(_refuse_derivative)
EXCHANGE, OUTGOING = torch.ops.fnshard.exchange.default, torch.ops.fnshard.outgoing.default


class _FakeExchange(torch.autograd.Function):
    """An exchange of fake tensors that autograd passes through, and that keeps nothing for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        ctx.shape, ctx.options = x.shape, options
        return _exchange(x, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), *[None] * len(ctx.options)


# Replacements under which a backward of the loss can be tried; inner derivatives of an exchange stay refused.
DIFFERENTIABLE = {EXCHANGE: _FakeExchange.apply}


def permutes(node: fx.Node) -> bool:
    """Return whether a node is an exchange of one block, which is issued at its own place."""
    return node.target is EXCHANGE and KINDS[node.args[1]].permutes


def copy_outgoing(graph: fx.Graph) -> None:
    """Insert a copy before each exchange, so that one segment makes the message that it sends."""
    for node in graph.find_nodes(op="call_function", target=EXCHANGE):
        sent = node.args[0]
        with graph.inserting_before(node):
            copy = graph.call_function(OUTGOING, (sent,))
        value = sent.meta["val"]
        copy.meta["val"] = torch.empty_like(
            value, memory_format=torch.contiguous_format, requires_grad=value.requires_grad
        )
        node.update_arg(0, copy)


_state = threading.local()


def tracing_on(mesh: Mesh) -> AbstractContextManager[Any]:
    """Set the mesh whose axes the exchanges of `fn` name, while this thread traces it."""
    return mock.patch.object(_state, "mesh", mesh, create=True)


Summed = TypeVar("Summed", Tensor, int, float)
Axes = str | Sequence[str] | None


def psum(x: Summed, axes: Axes = None) -> Summed:
    """Sum `x` over the ranks that hold other rows of the batch, inside a function that is sharded.

    Outside of a step there is one process, with all rows, and the sum is `x` itself. So `fn` is the same
    function of the whole batch in both: `psum(x.sum(0)) / psum(len(x))` is the mean over all rows.

    The gradient is that of the function of the whole batch: the cotangent of `x` is the sum of all ranks'
    cotangents. Under `accumulate`, ranks exchange the values of one micro-batch. The result is kept for
    the backward, under `remat` too. It works as `jax.lax.psum` does.

    Args:
        x: a tensor of the same shape on every rank, or a number, which is multiplied by the number of ranks.
            Half precision is summed as the wire sums gradients.
        axes: data axes of the mesh, one name or several; by default all of them.

    Raises:
        TraceError: the mesh lacks an axis, `x` is boolean, or the call is inside a torch.func transform.

    >>> import fnshard as fs
    >>> def fn(params, x):
    ...     mean = fs.psum(x.sum(0)) / fs.psum(len(x))
    ...     return ((x - mean) @ params["w"]).square().mean()
    >>> params, mesh = {"w": torch.ones(3)}, fs.make_mesh(shard=4, abstract=True)
    >>> step = fs.shard_step(fn, fs.presets.full_shard(params, mesh), mesh=mesh)
    >>> step.lower(params, torch.ones(2, 3)).comm_analysis()["exchange"]
    {'count': 1, 'bytes': 12}
    """
    if isinstance(x, int | float) and not isinstance(x, bool):
        return x * _find_group("psum", axes)[1]
    return _trace_exchange("psum", x, axes, 0)


def all_gather(x: Tensor, dim: int = 0, axes: Axes = None) -> Tensor:
    """Join the `x` of all ranks that hold other rows of the batch, one after another along `dim`.

    They are in the order of the batch's rows, so that outside of a step, in one process with all rows, the
    result is `x` itself. Losses that compare with every row of the batch need it (SimCLR, CLIP). In the
    backward each rank gets the sum of all ranks' cotangents of its own rows, by a reduce-scatter. It works as
    `jax.lax.all_gather(tiled=True)` does.

    Args:
        x: [..., n, ...] -> [..., n * ranks, ...]; of the same shape on every rank, not 0-d.
        dim: the dim along which they are joined.
        axes: as in `psum`.

    Raises:
        TraceError: as in `psum`, or `x` has no such dim.
    """
    return _trace_exchange("all_gather", x, axes, dim)


def _trace_exchange(kind: str, x: Any, axes: Axes, dim: int) -> Tensor:
    """Check the call of an exchange by `fn`, and write it into the trace."""
    # Refuse values, mesh axes and dims that an exchange cannot take.
    if not isinstance(x, Tensor):
        fix = "fs.tree.map for a tree; of a length that depends on data its count, as in fs.psum(mask.sum())."
        raise TraceError(f"`fn` calls fs.{kind} of {type(x).__name__}; it takes a tensor.", fix=fix)
    names, ranks = _find_group(kind, axes)
    if not isinstance(dim, int) or (not -x.dim() <= dim < x.dim() and kind != "psum"):
        raise TraceError(
            f"`fn` calls fs.{kind} along dim {dim!r} of {list(x.shape)}.",
            fix="a dim that it has, x.reshape(1) of a 0-d tensor; mesh axes by name, axes='shard'.",
        )

    # Refuse calls where the op itself would be differentiated or batched.
    if getattr(_state, "mesh", None) is not None and transforms.is_nested():
        raise TraceError(
            f"`fn` calls fs.{kind} inside a torch.func transform.",
            fix="call it on what the transform takes or gives; shard_step differentiates the loss by itself.",
        )
    if functions.in_a_backward():
        raise TraceError(
            f"`fn` calls fs.{kind} in a gradient hook or in the backward of an autograd.Function.",
            fix="call it in `fn` itself: fs.psum and fs.all_gather have exact gradients of their own.",
        )

    if ranks == 1:
        return x
    if x.dtype == torch.bool and kind == "psum":
        raise TraceError("`fn` calls fs.psum of booleans.", fix="x.int() to count them.")
    # Collectives move real numbers: a complex number is sent as two, along one more dim at the end.
    if x.is_complex():
        return torch.view_as_complex(
            _trace_exchange(kind, torch.view_as_real(x), names, dim % max(x.dim(), 1))
        )
    return EXCHANGE(x, kind, ",".join(names), dim % max(x.dim(), 1), ranks)


def _find_group(kind: str, axes: Axes) -> tuple[tuple[str, ...], int]:
    """Return the axes of an exchange, those of size one left out, and how many ranks they span."""
    mesh: Mesh | None = getattr(_state, "mesh", None)
    if mesh is None:
        return (), 1
    axes = (axes,) if isinstance(axes, str) else axes
    names = mesh.data_axes if axes is None else tuple(axes)

    unknown = [n for n in names if n not in mesh.names]
    if unknown or len(set(names)) < len(names):
        shown = ", ".join(map(repr, unknown or names))
        raise TraceError(
            f"`fn` calls fs.{kind} over {shown}, which mesh {mesh} "
            + ("does not have." if unknown else "has once."),
            fix=f"axes: some of {', '.join(mesh.names)}, each once; left out, all data axes.",
        )

    others = [n for n in names if n not in mesh.data_axes]
    if others:
        raise TraceError(
            f"`fn` calls fs.{kind} over {', '.join(map(repr, others))}, whose ranks take the same rows.",
            fix=f"leave it out: sums over such axes are derived from `fn`; data axes are "
            f"{', '.join(mesh.data_axes) or 'none here'}.",
        )

    names = tuple(n for n in names if mesh.axis_size(n) > 1)
    return names, math.prod(map(mesh.axis_size, names))


_LIB.define("constrain(Tensor x, str[] axes, int[] dims) -> Tensor")
_LIB.impl("constrain", lambda x, axes, dims: torch.ops.aten.alias.default(x), "CompositeImplicitAutograd")
CONSTRAIN = torch.ops.fnshard.constrain.default


def constrain(x: Tensor, layout: P, axes: str | Sequence[str] | None = None) -> Tensor:
    """Split `x` over the tensor and context axes as `layout` says, where `fn` is sharded.

    The values stay the same. Where `x` is split in another way, an exchange moves it, and in the backward the
    exchange's dual. Outside of a step the result is `x` itself. It works as
    `jax.lax.with_sharding_constraint` does.

    Args:
        x: [...].
        layout: the axes by dim of `x`; over one of `axes` that it does not name, `x` is whole on every rank.
        axes: the axes that this says something of; by default those that `layout` names, or all if it names
            none.

    Raises:
        TraceError: the mesh lacks an axis, an axis splits rows, or `layout` has more dims than `x`.

    >>> import fnshard as fs
    >>> x = torch.ones(2, 4)
    >>> fs.constrain(x, fs.P(None, "tensor")) is x
    True
    """
    mesh = getattr(_state, "mesh", None)  # the one that `fn` is traced for
    if not isinstance(x, Tensor) or not isinstance(layout, P):
        raise TraceError(
            f"`fn` calls fs.constrain of {type(x).__name__} and {type(layout).__name__}.",
            fix='a tensor and a layout: fs.constrain(x, fs.P(None, "tensor")).',
        )
    if mesh is None:
        return x

    # The axes that the call constrains; no data axis may be among them.
    placed = [n for n in mesh.names if n not in mesh.data_axes]
    if axes is None:
        constrained = list(layout.axes or placed)
    else:
        constrained = [axes] if isinstance(axes, str) else list(axes)
    unknown = [a for a in dict.fromkeys([*constrained, *layout.axes]) if a not in placed]
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

    # For each axis the dim that it splits; -1 where `x` is whole.
    dims = [next((d for d in range(x.dim()) if axis in layout.of(d)), -1) for axis in constrained]
    return CONSTRAIN(x, constrained, dims)
