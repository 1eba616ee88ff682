"""Ragged rules: each ATen op that ragged dims pass, as one on known sizes with the same values and gradients.

An op of an unknown kind is refused. `rule_of` finds the rule by the op's name, whatever its overload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.ragged import select
from fnshard.compiler.frontend.ragged.lengths import RaggedOp

Rule = Callable[[RaggedOp], Any]
aten = torch.ops.aten


def rule_of(call: RaggedOp) -> Rule:
    """The rule of a call's op.

    Raises:
        TraceError: there is none.
    """
    name = call.name
    if name in _RULES and not (name in ("max", "min") and "other" in call.arguments):
        return _RULES[name]
    packet = getattr(aten, name, None) if call.node.target.namespace == "aten" else None
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    if name in _PLAIN or any(torch.Tag.pointwise in o.tags for o in overloads):
        return RaggedOp.run
    raise call.refused("has no rule for a length that depends on data")


# ------------------------------------------------------------------ reductions


def _reduced(c: RaggedOp) -> list[int]:
    """The dims that an op reduces, or works along."""
    dim, dims = c.arguments.get("dim", c.arguments.get("dims")), c[next(iter(c.raw))].dim()
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(dims))
    return [d % max(dims, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _filling(fill: Callable[[Tensor], Any]) -> Rule:
    """The op of a tensor in which a neutral number stands for what is no value."""

    def rule(c: RaggedOp) -> Any:
        along = set(_reduced(c)) & c.dims("self").keys()
        return c.run(self=c.filled("self", fill(c["self"]), along)) if along else c.run()

    return rule


def _sorted(c: RaggedOp) -> Any:
    """Values first, and in their order where they are equal; what is none after them."""
    dim = c["dim"] % max(c["self"].dim(), 1)
    if dim not in c.dims("self"):
        return c.run()
    descending = c["largest"] if c.name == "topk" else c["descending"]
    value = c.filled("self", select.extreme(c["self"], -1 if descending else 1), [dim])
    ranked = torch.sort(value, dim=dim, descending=descending, stable=True)
    if c.name == "argsort":
        return ranked.indices
    return tuple(v.narrow(dim, 0, c["k"]) for v in ranked) if c.name == "topk" else tuple(ranked)


def _length(c: RaggedOp, dims: Sequence[int]) -> Any:
    shape = c.raw["self"].meta["val"].shape
    return math.prod([1, *(c.ragged.count(shape[d]) for d in dims)])


def _mean(c: RaggedOp) -> Tensor:
    dims = _reduced(c)
    if not set(dims) & c.dims("self").keys():
        return c.run()
    total = c.filled("self", 0, dims).sum(
        dims, c.arguments.get("keepdim", False), dtype=c.arguments.get("dtype")
    )
    return total / _length(c, dims)


def _variance(c: RaggedOp) -> Tensor:
    dims = _reduced(c)
    if not set(dims) & c.dims("self").keys():
        return c.run()
    correction = c.arguments.get("correction", 1 if c.arguments.get("unbiased", True) else 0)
    correction, count = 1 if correction is None else correction, _length(c, dims)
    mean = c.filled("self", 0, dims).sum(dims, True) / count
    valid = c.ragged.valid(c.raw["self"].meta["val"], dims)
    squares = torch.where(valid, (c["self"] - mean).square(), 0).sum(dims, c.arguments.get("keepdim", False))
    found = squares / (count - correction)
    return found.sqrt() if c.name == "std" else found


def _loss(c: RaggedOp) -> Tensor:
    """A loss of pairs of elements: the sum or the mean of those that are values."""
    if not c.arguments.get("reduction"):
        return c.run()
    each, valid = c.run(reduction=0), None
    tensors = [n for n in c.raw.values() if isinstance(n, fx.Node) and isinstance(n.meta["val"], Tensor)]
    shape = max((n.meta["val"] for n in tensors), key=lambda v: v.dim())
    if any(n.meta["val"].dim() not in (0, shape.dim()) for n in tensors):
        raise c.refused("of tensors of several ranks has no rule")
    for node in tensors:
        own = c.ragged.valid(node.meta["val"])
        valid = own if valid is None or own is None else valid & own
    total = each.sum() if valid is None else torch.where(valid, each, 0).sum()
    return total / math.prod(map(c.ragged.count, shape.shape)) if c["reduction"] == 1 else total


def _cross_entropy(c: RaggedOp) -> Tensor:
    if c["target"].is_floating_point() and c["reduction"]:
        raise c.refused("of probabilities has no rule: take reduction='none', and then the mean")
    valid = None if c["target"].is_floating_point() else c.ragged.valid(c.raw["target"].meta["val"])
    return c.run() if valid is None else c.run(target=torch.where(valid, c["target"], c["ignore_index"]))


# ------------------------------------------------------------------ products


def _product(first: str, second: str, last: bool = False) -> Rule:
    """Entries along a dim that is summed over count as 0.

    Args:
        last: the second factor's is its last one.
    """

    def rule(c: RaggedOp) -> Any:
        dims = c[second].dim()
        mine, other = c[first].dim() - 1, dims - 1 if last or dims == 1 else dims - 2
        return c.run(**{first: c.filled(first, 0, [mine]), second: c.filled(second, 0, [other])})

    return rule


def _einsum(c: RaggedOp) -> Any:
    equation = c["equation"].replace(" ", "")
    if "." in equation:
        raise c.refused("with dots has no rule")
    terms, arrow, out = equation.partition("->")
    out = out if arrow else "".join(sorted(v for v in set(terms) - {","} if terms.count(v) == 1))
    filled = [
        c.ragged.filled(node, 0, [d for d, letter in enumerate(term) if letter not in out])
        for node, term in zip(c.raw["tensors"], terms.split(","), strict=True)
    ]
    return c.run(tensors=filled)


def _attention(c: RaggedOp) -> Any:
    keys = c["key"].dim() - 2
    valid = c.ragged.valid(c.raw["key"].meta["val"], [keys])
    if valid is None:
        return c.run()
    mask = (valid.view(-1) | (c.ragged.count(c.dims("key")[keys]) == 0)).view(1, -1)
    if c["is_causal"]:
        mask = (
            mask
            & torch.ones(c["query"].shape[-2], mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
        )
    given = c["attn_mask"]
    if given is not None and given.dtype != torch.bool:
        mask = torch.where(mask, given, torch.finfo(given.dtype).min)
    elif given is not None:
        mask = mask & given
    return c.run(attn_mask=mask, is_causal=False)


# ------------------------------------------------------------------ shapes


def _beside(c: RaggedOp) -> Any:
    """An op along a dim of one tensor, which must not be a ragged one."""
    if set(_reduced(c)) & c.dims(next(iter(c.raw))).keys():
        raise c.refused("works along a dim whose length depends on data")
    return c.run()


def _part(c: RaggedOp) -> Tensor:
    """Entries from a start to an end, which may depend on data, along a dim that may, too."""
    dim = c["dim"] % c["self"].dim()
    value, length = c.raw["self"].meta["val"], c.node.meta["val"].shape[dim]
    if dim not in c.dims("self") and not isinstance(length, torch.SymInt):
        return c.run()
    if c.arguments.get("step", 1) != 1:
        raise c.refused("with a step has no rule")
    every = c.ragged.count(value.shape[dim])

    def place(bound: Any, otherwise: Any) -> Any:
        bound = torch.as_tensor(otherwise if bound is None else c.ragged.number(bound))
        return torch.where(bound < 0, bound + every, bound).clamp(min=0).clamp(max=torch.as_tensor(every))

    start = place(c.raw["start"], 0)
    end = start + c.ragged.number(c.raw["length"]) if c.name == "narrow" else place(c.raw["end"], every)
    size = c.define(length, (end - start).clamp(min=0), c["self"].shape[dim])
    return c.rows(dim, start, length, size)


def _parts(c: RaggedOp) -> list[Tensor]:
    """One part after the other, of lengths that depend on data."""
    dim, name = c["dim"] % c["self"].dim(), "split_size" if "split_size" in c.arguments else "split_sizes"
    lengths = [v.shape[dim] for v in c.node.meta["val"]]
    if not isinstance(c[name], list | tuple) or (
        dim not in c.dims("self") and all(isinstance(n, int) for n in lengths)
    ):
        return _beside(c)
    start, found = 0, []
    for length in lengths:
        found.append(c.rows(dim, torch.as_tensor(start), length, c.ragged.size(length)))
        start = start + c.ragged.count(length)
    return found


def _select(c: RaggedOp) -> Tensor:
    """One entry, whose place may be a number that depends on data."""
    if not isinstance(c.raw["index"], fx.Node):
        return _beside(c)
    place, dim = c.ragged.number(c.raw["index"]), c["dim"] % c["self"].dim()
    place = torch.where(place < 0, place + c.ragged.count(c.raw["self"].meta["val"].shape[dim]), place)
    return c["self"].index_select(dim, place.view(1)).squeeze(dim)


def _rows(c: RaggedOp) -> Any:
    """An op of a batch of rows, of which the first dim alone may be ragged."""
    if any(c.dims(name).keys() - {0} for name in c.raw):
        raise c.refused("has a rule for a first dim of such a length alone")
    return c.run()


def _pad(c: RaggedOp) -> Any:
    padded = {c["self"].dim() - 1 - i // 2 for i, width in enumerate(c["pad"]) if width}
    if padded & c.dims("self").keys():
        raise c.refused("pads a dim whose length depends on data")
    return c.run()


def _view(c: RaggedOp) -> Any:
    """Rows of a ragged dim stay the outermost of the dims that they are merged with or cut into."""
    before, after = c.raw["self"].meta["val"], c.node.meta["val"]

    def outer(value: Tensor) -> list[int]:
        sizes = [c.ragged.size(n) for n in value.shape]
        return [math.prod(sizes[:d]) for d in c.ragged.dims(value)]

    if outer(before) != outer(after):
        raise c.refused("merges a dim whose length depends on data into one that is before it")
    shape = [c.ragged.size(n) for n in after.shape]
    return c["self"].reshape(shape) if c.name != "view" else c["self"].view(shape)


def _looking_up(name: str) -> Rule:
    """An op of indices that are in range where they are values."""
    return lambda c: c.run(**{name: c.ragged.index(c.raw[name])}) if c.dims(name) else c.run()


def _cat(c: RaggedOp) -> Tensor:
    parts = [n for n in c.raw["tensors"] if n.meta["val"].dim() != 1 or n.meta["val"].shape[0] != 0]
    values = [n.meta["val"] for n in parts]
    dim = c.arguments.get("dim", 0) % values[0].dim()
    if not any(dim in c.ragged.dims(v) for v in values[:-1]):
        return c.run()
    valid = []
    for value in values:
        own = c.ragged.valid(value, [dim])
        size = c.ragged.size(value.shape[dim])
        every = torch.ones(size, dtype=torch.bool, device=value.device)
        valid.append(every if own is None else own.view(-1))
    joined = torch.cat([c.ragged.values[n] for n in parts], dim)
    order = torch.cat(valid).logical_not().argsort(stable=True)
    return joined.index_select(dim, order[: c.ragged.size(c.node.meta["val"].shape[dim])])


def _arange(c: RaggedOp) -> Tensor:
    if c.arguments.get("start", 0) != 0 or c.arguments.get("step", 1) != 1:
        raise c.refused("with a start or a step has no rule")
    (length,) = c.node.meta["val"].shape
    return c.run(end=c.ragged.size(length)).clamp(max=c.ragged.count(length) - 1).clamp(min=0)


def _full(c: RaggedOp) -> Tensor:
    if not isinstance(c["fill_value"], Tensor):
        return c.run()
    return (c.run(fill_value=0) + c["fill_value"]).to(c.node.meta["val"].dtype)


def _scalar(c: RaggedOp) -> Any:
    number = c["s"]
    return number.to(c.node.meta["val"].dtype, copy=True) if isinstance(number, Tensor) else c.run()


def _repeat(c: RaggedOp) -> Any:
    repeated = c.node.meta["val"].shape[len(c.node.meta["val"].shape) - c["self"].dim() :]
    for dim in c.dims("self"):
        if repeated[dim] != c.raw["self"].meta["val"].shape[dim]:
            raise c.refused("repeats a dim whose length depends on data")
    return c.run()


_least, _most = (lambda v: select.extreme(v, -1)), (lambda v: select.extreme(v, 1))
_lowest = lambda v: torch.finfo(v.dtype).min if v.is_floating_point() else select.extreme(v, -1)  # noqa: E731
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere"), select.nonzero),
    **dict.fromkeys(("_unique2", "unique_consecutive"), select.unique),
    "where": select.where, "masked_select": select.masked_select, "bincount": select.bincount,
    "repeat_interleave": select.repeat_interleave, "index": select.index, "index_put": select.index_put,
    "index_add": select.index_add,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_copy"), select.scatter),
    **dict.fromkeys(
        ("sum", "any", "nansum", "count_nonzero", "linalg_vector_norm", "norm"), _filling(lambda _: 0)),
    **dict.fromkeys(("all", "prod"), _filling(lambda _: 1)),
    **dict.fromkeys(("max", "amax", "argmax"), _filling(_least)),
    **dict.fromkeys(("min", "amin", "argmin"), _filling(_most)),
    **dict.fromkeys(("sort", "argsort", "topk"), _sorted),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"), _filling(_lowest)
    ),
    "mean": _mean, "var": _variance, "std": _variance,
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
         "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"), _loss),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss"), _cross_entropy),
    "linear": _product("input", "weight", last=True), "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"), "bmm": _product("self", "mat2"), "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"), "addmm": _product("mat1", "mat2"),
    "baddbmm": _product("batch1", "batch2"), "einsum": _einsum, "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        ("chunk", "unbind", "glu", "flip", "roll", "cosine_similarity", "diff", "kthvalue", "median",
         "unfold", "unflatten"), _beside),
    "pad": _pad, "constant_pad_nd": _pad,
    "select": _select, "slice": _part, "narrow": _part, "split": _parts, "split_with_sizes": _parts,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "group_norm", "max_pool1d", "max_pool2d", "avg_pool2d",
         "adaptive_avg_pool2d", "masked_scatter"), _rows),
    **dict.fromkeys(("view", "reshape", "flatten", "_unsafe_view", "view_as", "reshape_as"), _view),
    **dict.fromkeys(("index_select", "gather"), _looking_up("index")),
    **dict.fromkeys(("embedding", "take_along_dim"), _looking_up("indices")), "one_hot": _looking_up("self"),
    "cat": _cat, "concat": _cat, "arange": _arange, "repeat": _repeat, "tile": _repeat,
    "fill": RaggedOp.run, "scalar_tensor": _scalar,
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
}  # fmt: skip
# Ops whose entries along a ragged dim are made of those of the same place, or of the ones before it.
_PLAIN = {
    "_assert_tensor_metadata", "_to_copy", "alias", "alpha_dropout", "broadcast_tensors", "broadcast_to",
    "clone", "contiguous", "copy", "cummax", "cummin", "cumprod", "cumsum", "detach", "dropout", "empty",
    "empty_like", "expand", "expand_as", "feature_dropout", "floor_divide", "grouped_mm", "layer_norm",
    "logcumsumexp", "mT", "movedim", "new_empty", "new_ones", "new_zeros", "numpy_T", "ones", "ones_like",
    "outer", "permute", "prelu", "rand", "rand_like", "randn", "randn_like", "rms_norm", "rsub", "square",
    "squeeze", "stack", "swapaxes", "swapdims", "t", "to", "transpose", "type_as", "unsqueeze", "zero",
    "zeros", "zeros_like",
}  # fmt: skip
