"""What makes lengths that depend on data, and what puts rows back by an index of such a length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.ragged.lengths import RaggedOp

aten = torch.ops.aten


def extreme(value: Tensor, sign: int) -> Any:
    """The largest, or by -1 the smallest, number of a dtype."""
    if value.dtype == torch.bool:
        return sign > 0
    if value.is_floating_point():
        return sign * math.inf
    info = torch.iinfo(value.dtype)
    return info.max if sign > 0 else info.min


# ------------------------------------------------------------------ what makes ragged dims


def positions(mask: Tensor, size: int, needed: Tensor) -> Tensor:
    """int64 [size]: where a flat mask is True, in order, and then the first of these over again."""
    ends = mask.cumsum(0)
    ordinals = torch.arange(1, size + 1, device=mask.device)
    ordinals = torch.where(ordinals <= needed, ordinals, 1)
    return torch.searchsorted(ends, ordinals).clamp(max=mask.numel() - 1)


def _selected(c: RaggedOp, mask: fx.Node, length: Any) -> tuple[Tensor, ...]:
    """The positions where a mask is not 0, one int64 [size] for each of its dims."""
    true = c.ragged.filled(mask, 0) != 0
    needed = true.sum()
    size = c.ragged.define(c.node, length, needed, true.numel())
    flat, found = positions(true.flatten(), size, needed), []
    for dim in reversed(true.shape):
        found.append(flat % dim)
        flat = flat // dim
    return tuple(reversed(found))


def _gated(c: RaggedOp, value: Tensor, length: Any) -> Tensor:
    """What was selected; 1 where nothing was, so that a logarithm of what is left out spoils no gradient."""
    count = c.ragged.count(length)
    floats = value.is_floating_point() and isinstance(count, Tensor)
    return torch.where(count > 0, value, 1) if floats else value


def nonzero(c: RaggedOp) -> Any:
    """Where a tensor is not 0: as columns, or as a list of indices."""
    value = c.node.meta["val"]
    one = isinstance(value, Tensor)
    found = _selected(c, c.raw[next(iter(c.raw))], (value if one else value[0]).shape[0])
    return torch.stack(found, 1) if one else list(found)


def where(c: RaggedOp) -> Any:
    """`torch.where` of a mask alone is `nonzero`."""
    return nonzero(c) if len(c.arguments) == 1 else c.run()


def masked_select(c: RaggedOp) -> Tensor:
    """The elements of a tensor where a mask that broadcasts to it is True."""
    value, mask = torch.broadcast_tensors(c["self"], c.filled("mask", False))
    needed, (length,) = mask.sum(), c.node.meta["val"].shape
    size = c.ragged.define(c.node, length, needed, mask.numel())
    return _gated(c, value.reshape(-1)[positions(mask.reshape(-1), size, needed)], length)


def unique(c: RaggedOp) -> tuple[Tensor, ...]:
    """Values in order, their inverse and counts: the first of each run of equal ones in sorted order."""
    if c.raw.get("dim") is not None:
        raise c.refused("along a dim has no rule")
    value = c.filled("self", extreme(c["self"], 1)).detach()
    flat = value.reshape(-1)
    valid = c.ragged.valid(c.raw["self"].meta["val"])
    is_sorted = c.name == "unique_consecutive"
    order = torch.arange(flat.numel(), device=flat.device) if is_sorted else flat.argsort(stable=True)
    ranked = flat[order]
    first = torch.cat([torch.ones_like(order[:1], dtype=torch.bool), ranked[1:] != ranked[:-1]])
    counted = torch.ones_like(first)
    if valid is not None:  # where the largest number of all is a value, what is none may stand before it
        counted = valid.expand(value.shape).reshape(-1)[order]
        first = first & (torch.arange(first.numel(), device=flat.device) < counted.sum())
    needed = first.sum()
    (length,) = c.node.meta["val"][0].shape
    size = c.ragged.define(c.node, length, needed, flat.numel())
    rank = (first.cumsum(0) - 1).clamp(min=0, max=size - 1)
    inverse = torch.zeros_like(order).scatter(0, order, rank).reshape(value.shape)
    counts = torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(0, rank, counted.long())
    return ranked[positions(first, size, needed)], inverse, counts


def bincount(c: RaggedOp) -> Tensor:
    """Counts of numbers, as many as the largest one and one more."""
    (length,) = c.node.meta["val"].shape
    needed = c.filled("self", 0).max().long().clamp(min=c["minlength"] - 1) + 1
    size = c.ragged.define(c.node, length, needed, None)
    index = c["self"].long().clamp(max=size - 1)
    ones = torch.ones_like(index) if c["weights"] is None else c["weights"]
    valid = c.ragged.valid(c.raw["self"].meta["val"])
    ones = ones if valid is None else ones.masked_fill(~valid, 0)
    return torch.zeros(size, dtype=ones.dtype, device=index.device).index_add(0, index, ones)


def repeat_interleave(c: RaggedOp) -> Tensor:
    """Rows, or their numbers, each as often as a tensor says."""
    if not isinstance(c.arguments["repeats"], Tensor):
        return c.run()
    repeats = c.filled("repeats", 0).long()
    dim = c.arguments.get("dim")
    lengths = [n for n in c.node.meta["val"].shape if isinstance(n, torch.SymInt)]
    length, ends = lengths[0] if dim is None else c.node.meta["val"].shape[dim], repeats.cumsum(0)
    if not isinstance(length, torch.SymInt):
        return c.run()
    size = c.ragged.define(c.node, length, ends[-1], None)
    places = torch.arange(size, device=repeats.device)
    places = torch.where(places < ends[-1], places, 0)
    rows = torch.searchsorted(ends, places, right=True).clamp(max=repeats.numel() - 1)
    if "self" not in c.arguments:
        return rows
    table = c["self"].reshape(-1) if dim is None else c["self"]
    return table.index_select(0 if dim is None else dim, rows.expand(size))


# ------------------------------------------------------------------ indices


def _indices(c: RaggedOp, lengths: Sequence[Any]) -> list[Tensor | None]:
    """The indices of an `index` or `index_put`, masks as the positions they stand for.

    Args:
        lengths: of the dims of what is indexed or put, among them the masks'.
    """
    found: list[Tensor | None] = []
    for node in c.raw["indices"]:
        if node is None or node.meta["val"].dtype not in (torch.bool, torch.uint8):
            found.append(None if node is None else c.ragged.index(node))
            continue
        for length in lengths:
            if isinstance(length, torch.SymInt):
                found += _selected(c, node, length)
                break
        else:
            raise c.refused("takes a mask and values of another length")
    return found


def index(c: RaggedOp) -> Tensor:
    """A tensor at indices, among them masks and those of a ragged length."""
    value = c.node.meta["val"]
    masks = [
        n for n in c.raw["indices"] if n is not None and n.meta["val"].dtype in (torch.bool, torch.uint8)
    ]
    place = next(i for i, n in enumerate(c.raw["indices"]) if n is not None)
    indices = _indices(c, value.shape[place:])
    for dim, length in c.dims("self").items():
        if not masks and dim < len(indices) and indices[dim] is not None:
            index = indices[dim]
            indices[dim] = torch.where(index < 0, index + c.ragged.count(length), index)
    made = torch.ops.aten.index.Tensor(c["self"], indices)
    return _gated(c, made, value.shape[place]) if masks else made


def index_put(c: RaggedOp) -> Tensor:
    """A tensor into which values are put by a mask or by ragged indices."""
    values = c.raw["values"].meta["val"]
    ragged = [n for n in c.raw["indices"] if n is not None and c.ragged.dims(n.meta["val"])]
    masks = [n for n in c.raw["indices"] if n is not None and n.meta["val"].dtype == torch.bool]
    if masks and not c.ragged.dims(values):
        return c.run()
    if not masks and not ragged:
        return c.run()
    if len(masks) > 1 or (masks and len([n for n in c.raw["indices"] if n is not None]) > 1):
        raise c.refused("takes a mask next to other indices")
    indices = _indices(c, values.shape)
    place = next(i for i, n in enumerate(indices) if n is not None)
    if masks:
        length = next(n for n in values.shape if isinstance(n, torch.SymInt))
        valid = torch.arange(c.ragged.size(length), device=values.device) < c.ragged.count(length)
    else:
        valid = None
        for node in ragged:
            own = c.ragged.valid(node.meta["val"])
            valid = own if valid is None else valid & own
    own = indices[place]
    indices[place] = torch.where(own < 0, own + c["self"].shape[place], own)
    return _beyond(
        c["self"], place, valid, indices[place],
        lambda table, index: table.index_put(
            [index if i == place else v for i, v in enumerate(indices)], c["values"], c["accumulate"]),
    )  # fmt: skip


def _beyond(
    table: Tensor, dim: int, valid: Tensor, index: Tensor, put: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """What is put into a table by an index, where valid: the rest goes into a row after the last one."""
    size = table.shape[dim]
    longer = torch.cat([table, torch.zeros_like(table.narrow(dim, 0, 1))], dim)
    return put(longer, torch.where(valid, index, size)).narrow(dim, 0, size)


def index_add(c: RaggedOp) -> Tensor:
    """A tensor to which rows are added, 0 where they are no values."""
    (length,) = c.raw["index"].meta["val"].shape or (1,)
    if not isinstance(length, torch.SymInt):
        return c.run()
    dim = c["dim"] % c["self"].dim()
    source = c.raw["source"].meta["val"]
    valid = torch.arange(c.ragged.size(length), device=source.device) < c.ragged.count(length)
    rows = torch.where(valid.view(-1, *[1] * (source.dim() - dim - 1)), c["source"], 0)
    index = c.ragged.index(c.raw["index"])
    return torch.index_add(c["self"], c["dim"], index, rows, alpha=c["alpha"])


def scatter(c: RaggedOp) -> Tensor:
    """A tensor into which values are put by a ragged index."""
    valid = c.ragged.valid(c.raw["index"].meta["val"])
    if valid is None:
        return c.run()
    dim = c["dim"] % c["self"].dim()
    if c.name == "index_copy":
        valid = valid.view(-1)
    op = getattr(getattr(aten, c.name), c.node.target._overloadname)

    def put(table: Tensor, index: Tensor) -> Tensor:
        given = c.arguments | {"self": table, "index": index}
        schema = op._schema.arguments
        return op(*(given[a.name] for a in schema if not a.kwarg_only),
                  **{a.name: given[a.name] for a in schema if a.kwarg_only})  # fmt: skip

    return _beyond(c["self"], dim, valid, c["index"], put)
