"""Capture `fn` with symbols for lengths that depend on data; run its graph on tensors of known sizes.

Each ATen op that takes or makes ragged dims has a rule: a function that computes the same values and
gradients on known sizes. Rules are found by the op's name, whatever its overload; an op without one is
refused.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard.compiler.frontend.ragged.lengths import Ragged, RaggedOp, Unbounded, make_error, symbols
from fnshard.compiler.frontend.transforms import Differentiable, plain_attention
from fnshard.compiler.ir import source_lines
from fnshard.compiler.ir.program import (
    OpOverload,
    arguments_of,
    eliminate_dead_code,
    mutated_args,
    storage_id,
)

Rule = Callable[[RaggedOp], Any]
aten = torch.ops.aten
_VALUES = ("Tensor", "number", "Scalar")  # types of arguments that take a length as a value


def capture(flat: Callable[..., Any], *inputs: Sequence[Tensor]) -> Callable[..., list[Any]]:
    """Trace `flat` with symbolic lengths, and return a function that runs its graph on known sizes.

    Args:
        inputs: fake tensors by argument.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # here: it brings sympy

    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)

    def copy_fake(value: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    fakes = [[*map(copy_fake, v)] for v in inputs]
    with source_lines.record(), plain_attention():  # fused kernels ask for lengths; the op stays the same
        # Differentiable's ops are captured directly: ops that run again have other symbols, without bounds.
        if isinstance(flat, Differentiable):
            graph = flat.capture(*fakes)
        else:
            graph = make_fx(flat, tracing_mode="fake", pre_dispatch=True)(*fakes)

    def run_on_known_sizes(*inputs: Sequence[Tensor]) -> list[Any]:
        return run(graph, shape_env, [v for values in inputs for v in values])

    return run_on_known_sizes


def run(module: fx.GraphModule, shape_env: Any, inputs: Sequence[Tensor]) -> list[Any]:
    """Run a graph with symbolic lengths on tensors of known sizes."""
    ragged, feed = Ragged(shape_env), iter(inputs)
    # A rule may return a copy where the symbolic trace has a view. A write to either would not reach the
    # other, and is refused. This is the memory of the symbolic trace of which there are such copies.
    copied: set[int] = set()
    eliminate_dead_code(module.graph)
    with fx_traceback.preserve_node_meta():
        for node in module.graph.nodes:
            fx_traceback.set_stack_trace([node.meta.get("stack_trace", "")])
            if node.op == "placeholder":
                ragged.values[node] = next(feed)
            elif node.op == "get_attr":
                ragged.values[node] = getattr(module, node.target)
            elif node.op == "output":
                for result in node.args[0]:
                    if ragged.dims(result.meta["val"]):
                        raise make_error(result, "is returned with a length that depends on data")
                ragged.check_equal()
                return [ragged.values[n] for n in node.args[0]]
            else:
                if any(storage_id(n.meta["val"]) in copied for n in mutated_args(node)):
                    raise make_error(node, "writes to a tensor of which a view is a copy here")
                try:
                    ragged.values[node] = _run_node(ragged, node)
                except Unbounded:
                    text = "makes a length that depends on data, of which no bound is known"
                    raise make_error(node, text) from None
                copied |= _find_copied(ragged, node)
    raise AssertionError("a graph without an output")


def _find_copied(ragged: Ragged, node: fx.Node) -> set[int]:
    """Return the memory that a node shares with its inputs in the symbolic trace, and not on known sizes."""
    tensors = [n for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)]
    if node not in tensors:
        return set()
    memory, own = storage_id(node.meta["val"]), storage_id(ragged.values[node])
    shared = [n for n in tensors if storage_id(n.meta["val"]) == memory]
    return {memory for n in shared if storage_id(ragged.values[n]) != own}


def _run_node(ragged: Ragged, node: fx.Node) -> Any:
    """Run a node: by its op's rule where a ragged tensor or a length is involved, else as it is."""
    # A length as a number is looked up by whoever reads it, through `Ragged.number`.
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return ragged.size(value) if symbols(ragged.expression(value)) <= ragged.sizes.keys() else None
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return None
    involved = [value, *(n.meta.get("val") for n in node.all_input_nodes)]
    if not isinstance(node.target, OpOverload) or not any(map(_is_symbolic, involved)):
        args, kwargs = fx.map_arg((node.args, node.kwargs), ragged.values.__getitem__)
        return node.target(*args, **kwargs)

    schema, raw = node.target._schema.arguments, arguments_of(node.target, node.args, node.kwargs)
    as_value = {a.name: any(name in str(a.real_type) for name in _VALUES) for a in schema}
    arguments = {
        name: fx.map_arg(given, lambda n, v=as_value[name]: _argument(ragged, n, v, value))
        for name, given in raw.items()
    }
    call = RaggedOp(ragged, node, arguments, raw)
    made = _find_rule(call)(call)
    if isinstance(value, Tensor) and list(made.shape) != [ragged.size(n) for n in value.shape]:
        raise call.make_error("has another shape on known sizes")

    # Rules return new tensors; an op in place has to write.
    target = arguments[schema[0].name]
    writes = schema[0].alias_info is not None and schema[0].alias_info.is_write
    return target.copy_(made) if writes and made is not target else made


def _argument(ragged: Ragged, node: fx.Node, as_value: bool, result: Any) -> Any:
    """Return an argument of an op on known sizes: a tensor, or the true value of a length."""
    if not as_value or not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
        return ragged.values[node]
    # A number of Python has no dtype of its own, and neither may this one, where the result is in float.
    number = ragged.number(node)
    is_float = isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())
    return number.to(result.dtype) if is_float and isinstance(number, Tensor) else number


def _is_symbolic(value: Any) -> bool:
    """Return whether a value of the symbolic trace is a length, or has one among its dims."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(v, torch.SymInt | torch.SymFloat)
        or (isinstance(v, Tensor) and any(isinstance(n, torch.SymInt) for n in v.shape))
        for v in values
    )


# ------------------------------------------------------------------ rules
def _find_rule(call: RaggedOp) -> Rule:
    """Return the rule of a call's op.

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
    raise call.make_error("has no rule for a length that depends on data")


def _extreme(value: Tensor, sign: int) -> Any:
    """Return the largest number of a tensor's dtype, or the smallest for a `sign` of -1."""
    if value.dtype == torch.bool:
        return sign > 0
    if value.is_floating_point():
        return sign * math.inf
    info = torch.iinfo(value.dtype)
    return info.max if sign > 0 else info.min


# ------------------------------------------------------------------ ops that make ragged dims
def _positions(mask: Tensor, size: int, needed: Tensor) -> Tensor:
    """Return int64 [size]: where a flat mask is True, in order, then the first of these over and over."""
    ends = mask.cumsum(0)
    ordinals = torch.arange(1, size + 1, device=mask.device)
    ordinals = torch.where(ordinals <= needed, ordinals, 1)
    return torch.searchsorted(ends, ordinals).clamp(max=mask.numel() - 1)


def _select(c: RaggedOp, mask: fx.Node, length: Any) -> tuple[Tensor, ...]:
    """Return the positions where a mask is not 0, one int64 [size] for each of its dims."""
    true = c.ragged.fill(mask, 0) != 0
    needed = true.sum()
    size = c.ragged.define(c.node, length, needed, true.numel())
    flat, found = _positions(true.flatten(), size, needed), []
    for dim in reversed(true.shape):
        found.append(flat % dim)
        flat = flat // dim
    return tuple(reversed(found))


def _gate(c: RaggedOp, value: Tensor, length: Any) -> Tensor:
    """Return selected values, or ones if nothing was selected.

    Padding then holds ones, so that a logarithm of it has a finite gradient.
    """
    count = c.ragged.count(length)
    floats = value.is_floating_point() and isinstance(count, Tensor)
    return torch.where(count > 0, value, 1) if floats else value


def _nonzero(c: RaggedOp) -> Any:
    """Return where a tensor is not 0, as columns or a list of indices; also `torch.where` of a mask alone."""
    if c.name == "where" and len(c.arguments) > 1:
        return c.run()
    value = c.node.meta["val"]
    one = isinstance(value, Tensor)
    found = _select(c, c.raw[next(iter(c.raw))], (value if one else value[0]).shape[0])
    return torch.stack(found, 1) if one else list(found)


def _masked_select(c: RaggedOp) -> Tensor:
    """Return the elements of a tensor where a mask that broadcasts to it is True."""
    value, mask = torch.broadcast_tensors(c["self"], c.fill("mask", False))
    needed, (length,) = mask.sum(), c.node.meta["val"].shape
    size = c.ragged.define(c.node, length, needed, mask.numel())
    return _gate(c, value.reshape(-1)[_positions(mask.reshape(-1), size, needed)], length)


def _unique(c: RaggedOp) -> tuple[Tensor, ...]:
    """Return distinct values in order, their inverse and counts: the heads of runs of equal sorted values."""
    value = c.fill("self", _extreme(c["self"], 1)).detach()
    flat = value.reshape(-1)
    valid = c.ragged.valid(c.raw["self"].meta["val"])
    order = flat.argsort(stable=True)
    ranked = flat[order]
    first = torch.cat([torch.ones_like(order[:1], dtype=torch.bool), ranked[1:] != ranked[:-1]])
    counted = torch.ones_like(first)
    if valid is not None:  # padding sorts last, but among values that are the dtype's largest number
        counted = valid.expand(value.shape).reshape(-1)[order]
        first = first & (torch.arange(first.numel(), device=flat.device) < counted.sum())

    # The heads of runs are the distinct values; each run's number is the rank of its values.
    needed = first.sum()
    (length,) = c.node.meta["val"][0].shape
    size = c.ragged.define(c.node, length, needed, flat.numel())
    rank = (first.cumsum(0) - 1).clamp(min=0, max=size - 1)
    inverse = torch.zeros_like(order).scatter(0, order, rank).reshape(value.shape)
    counts = torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(0, rank, counted.long())
    return ranked[_positions(first, size, needed)], inverse, counts


def _repeat_interleave(c: RaggedOp) -> Tensor:
    """Repeat rows, or their numbers, each as often as a tensor says."""
    if not isinstance(c.arguments["repeats"], Tensor):
        return c.run()
    repeats = c.fill("repeats", 0).long()
    dim = c.arguments.get("dim")
    lengths = [n for n in c.node.meta["val"].shape if isinstance(n, torch.SymInt)]
    length, ends = lengths[0] if dim is None else c.node.meta["val"].shape[dim], repeats.cumsum(0)
    if not isinstance(length, torch.SymInt):
        return c.run()

    # Entry i is a copy of the row whose end is the first beyond i.
    size = c.ragged.define(c.node, length, ends[-1], None)
    places = torch.arange(size, device=repeats.device)
    places = torch.where(places < ends[-1], places, 0)
    rows = torch.searchsorted(ends, places, right=True).clamp(max=repeats.numel() - 1)

    if "self" not in c.arguments:
        return rows
    table = c["self"].reshape(-1) if dim is None else c["self"]
    return table.index_select(0 if dim is None else dim, rows.expand(size))


# ------------------------------------------------------------------ indices
def _is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)


def _indices(c: RaggedOp, lengths: Sequence[Any]) -> list[Tensor | None]:
    """Return the indices of an `index` or `index_put`, with positions in the place of masks.

    Args:
        lengths: the lengths of dims of what is read or put, among them the one that masks make.
    """
    found: list[Tensor | None] = []
    length = next((n for n in lengths if isinstance(n, torch.SymInt)), None)
    for node in c.raw["indices"]:
        if node is None or not _is_mask(node):
            found.append(None if node is None else c.ragged.index(node))
        elif length is not None:
            found += _select(c, node, length)
        else:
            raise c.make_error("takes a mask and values of another length")
    return found


def _index(c: RaggedOp) -> Tensor:
    """Index a tensor, by masks and by indices of a ragged length among others."""
    value = c.node.meta["val"]
    masks = [n for n in c.raw["indices"] if n is not None and _is_mask(n)]
    place = next(i for i, n in enumerate(c.raw["indices"]) if n is not None)
    indices = _indices(c, value.shape[place:])
    # A negative index counts from the true end of a ragged dim, which the padding does not move.
    for dim, length in c.dims("self").items():
        if not masks and dim < len(indices) and indices[dim] is not None:
            index = indices[dim]
            indices[dim] = torch.where(index < 0, index + c.ragged.count(length), index)
    made = torch.ops.aten.index.Tensor(c["self"], indices)
    return _gate(c, made, value.shape[place]) if masks else made


def _index_put(c: RaggedOp) -> Tensor:
    """Put values into a tensor by a mask or by ragged indices."""
    values = c.raw["values"].meta["val"]
    given = [n for n in c.raw["indices"] if n is not None]
    ragged, masks = [n for n in given if c.ragged.dims(n.meta["val"])], list(filter(_is_mask, given))
    if not (c.dims("values") if masks else ragged):
        return c.run()
    if masks and len(given) > 1:
        raise c.make_error("takes a mask next to other indices")

    indices = _indices(c, values.shape)
    place = next(i for i, n in enumerate(indices) if n is not None)
    if masks:
        valid = c.ragged.valid(values, list(c.dims("values"))[:1]).flatten()
    else:
        valid = functools.reduce(operator.and_, (c.ragged.valid(n.meta["val"]) for n in ragged))

    # Entries that are no values go into a row after the last one, which is cut off again.
    table, own, size = c["self"], indices[place], c["self"].shape[place]
    longer = torch.cat([table, torch.zeros_like(table.narrow(place, 0, 1))], place)
    indices[place] = torch.where(valid, torch.where(own < 0, own + size, own), size)
    return longer.index_put(indices, c["values"], c["accumulate"]).narrow(place, 0, size)


def _index_add(c: RaggedOp) -> Tensor:
    """Add rows to a tensor; rows that are no values count as 0."""
    if not c.dims("index"):
        return c.run()
    rows = c.fill("source", 0, [c["dim"] % c["self"].dim()])
    return c.run(index=c.ragged.index(c.raw["index"]), source=rows)


# ------------------------------------------------------------------ reductions
def _reduced_dims(c: RaggedOp) -> list[int]:
    """Return the dims that an op reduces, or works along."""
    dim, dims = c.arguments.get("dim", c.arguments.get("dims")), c[next(iter(c.raw))].dim()
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(dims))
    return [d % max(dims, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _fill_neutral(fill: Callable[[Tensor], Any]) -> Rule:
    """Return the rule of a reduction to which entries that are no values are a neutral number."""

    def rule(c: RaggedOp) -> Any:
        along = set(_reduced_dims(c)) & c.dims("self").keys()
        return c.run(self=c.fill("self", fill(c["self"]), along)) if along else c.run()

    return rule


def _moment(c: RaggedOp) -> Tensor:
    """Return the mean, the variance or the standard deviation of the values."""
    dims, shape = _reduced_dims(c), c.raw["self"].meta["val"].shape
    if not set(dims) & c.dims("self").keys():
        return c.run()
    count, keep = math.prod([1, *(c.ragged.count(shape[d]) for d in dims)]), c.arguments.get("keepdim", False)
    if c.name == "mean":
        return c.fill("self", 0, dims).sum(dims, keep, dtype=c.arguments.get("dtype")) / count
    # The variance of values alone, by their own mean.
    correction = c.arguments.get("correction", 1 if c.arguments.get("unbiased", True) else 0)
    mean = c.fill("self", 0, dims).sum(dims, True) / count
    valid = c.ragged.valid(c.raw["self"].meta["val"], dims)
    squares = torch.where(valid, (c["self"] - mean).square(), 0).sum(dims, keep)
    found = squares / (count - (1 if correction is None else correction))
    return found.sqrt() if c.name == "std" else found


def _loss(c: RaggedOp) -> Tensor:
    """Return a loss of pairs of elements: the sum or the mean over values."""
    if not c.arguments.get("reduction"):
        return c.run()
    each = c.run(reduction=0)
    tensors = [n for n in c.raw.values() if isinstance(n, fx.Node) and isinstance(n.meta["val"], Tensor)]
    shape = max((n.meta["val"] for n in tensors), key=lambda v: v.dim())
    if any(n.meta["val"].dim() not in (0, shape.dim()) for n in tensors):
        raise c.make_error("of tensors of several ranks has no rule")
    valid = [v for n in tensors if (v := c.ragged.valid(n.meta["val"])) is not None]
    total = (torch.where(functools.reduce(operator.and_, valid), each, 0) if valid else each).sum()
    return total / math.prod(map(c.ragged.count, shape.shape)) if c["reduction"] == 1 else total


def _cross_entropy(c: RaggedOp) -> Tensor:
    """Return cross entropy, to which rows that are no values are ignored targets."""
    if c["target"].is_floating_point() and c["reduction"]:
        raise c.make_error("of probabilities has no rule: take reduction='none', and then the mean")
    valid = None if c["target"].is_floating_point() else c.ragged.valid(c.raw["target"].meta["val"])
    return c.run() if valid is None else c.run(target=torch.where(valid, c["target"], c["ignore_index"]))


# ------------------------------------------------------------------ products
def _product(first: str, second: str, last: bool = False) -> Rule:
    """Return the rule of a product, to which padding along the dim that is summed over counts as 0.

    Args:
        last: whether that dim is the last one of the second factor too.
    """

    def rule(c: RaggedOp) -> Any:
        dims = c[second].dim()
        mine, other = c[first].dim() - 1, dims - 1 if last or dims == 1 else dims - 2
        return c.run(**{first: c.fill(first, 0, [mine]), second: c.fill(second, 0, [other])})

    return rule


# ------------------------------------------------------------------ shapes
def _along_dense(c: RaggedOp) -> Any:
    """Run an op that works along a dim of one tensor, which must not be ragged, by known numbers."""
    ragged = set(_reduced_dims(c)) & c.dims(next(iter(c.raw))).keys()
    if ragged or any(isinstance(n.meta["val"], torch.SymInt) for n in c.node.all_input_nodes):
        raise c.make_error("works along a dim whose length depends on data")
    return c.run()


def _slice(c: RaggedOp) -> Any:
    """Cut a slice of a dim that is not ragged, or take all of one that is."""
    dim = c["dim"] % c["self"].dim()
    before, after = (c.ragged.expression(n.meta["val"].shape[dim]) for n in (c.raw["self"], c.node))
    if before != after and symbols(before) | symbols(after):
        raise c.make_error("cuts a part whose place or length depends on data")
    return c.run()


def _rows(c: RaggedOp) -> Any:
    """Run an op of a batch of rows, of which the first dim alone may be ragged."""
    if any(c.dims(name).keys() - {0} for name in c.raw):
        raise c.make_error("has a rule for a first dim of such a length alone")
    return c.run()


def _view(c: RaggedOp) -> Any:
    """View in another shape; a ragged dim stays the outermost of those it is merged with or cut into."""
    before, after = c.raw["self"].meta["val"], c.node.meta["val"]

    def outer(value: Tensor) -> list[int]:
        sizes = [c.ragged.size(n) for n in value.shape]
        return [math.prod(sizes[:d]) for d in c.ragged.dims(value)]

    if outer(before) != outer(after):
        raise c.make_error("merges a dim whose length depends on data into one that is before it")
    shape = [c.ragged.size(n) for n in after.shape]
    return c["self"].reshape(shape) if c.name != "view" else c["self"].view(shape)


def _look_up(name: str) -> Rule:
    """Return the rule of an op of indices; padding is replaced by indices that are in range."""
    return lambda c: c.run(**{name: c.ragged.index(c.raw[name])}) if c.dims(name) else c.run()


def _cat(c: RaggedOp) -> Tensor:
    """Join tensors; along a ragged dim the values of all come first, and padding after them."""
    parts = [n for n in c.raw["tensors"] if n.meta["val"].dim() != 1 or n.meta["val"].shape[0] != 0]
    values = [n.meta["val"] for n in parts]
    dim = c.arguments.get("dim", 0) % values[0].dim()
    if not any(dim in c.ragged.dims(v) for v in values[:-1]):
        return c.run()
    lengths, device = [v.shape[dim] for v in values], values[0].device
    valid = [torch.arange(c.ragged.size(n), device=device) < c.ragged.count(n) for n in lengths]

    joined = torch.cat([c.ragged.values[n] for n in parts], dim)
    order = torch.cat(valid).logical_not().argsort(stable=True)
    return joined.index_select(dim, order[: c.ragged.size(c.node.meta["val"].shape[dim])])


def _arange(c: RaggedOp) -> Tensor:
    """Count to a length that depends on data; padding repeats the last number."""
    if c.arguments.get("start", 0) != 0 or c.arguments.get("step", 1) != 1:
        raise c.make_error("with a start or a step has no rule")
    (length,) = c.node.meta["val"].shape
    return c.run(end=c.ragged.size(length)).clamp(max=c.ragged.count(length) - 1).clamp(min=0)


def _full(c: RaggedOp) -> Tensor:
    """Run an op that fills a tensor with one number, which may be a length."""
    name = "s" if c.name == "scalar_tensor" else "fill_value"
    made = c.run(**{name: 0}) + c[name] if isinstance(c[name], Tensor) else c.run()
    return made.to(c.node.meta["val"].dtype)


_least, _most = (lambda v: _extreme(v, -1)), (lambda v: _extreme(v, 1))
_lowest = lambda v: torch.finfo(v.dtype).min if v.is_floating_point() else _extreme(v, -1)  # noqa: E731
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "where"), _nonzero),
    "_unique2": _unique,
    "masked_select": _masked_select, "repeat_interleave": _repeat_interleave, "index": _index,
    "index_put": _index_put, "index_add": _index_add,
    **dict.fromkeys(
        ("sum", "any", "nansum", "count_nonzero", "linalg_vector_norm", "norm"), _fill_neutral(lambda _: 0)),
    **dict.fromkeys(("all", "prod"), _fill_neutral(lambda _: 1)),
    **dict.fromkeys(("max", "amax", "argmax"), _fill_neutral(_least)),
    **dict.fromkeys(("min", "amin", "argmin"), _fill_neutral(_most)),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"), _fill_neutral(_lowest)
    ),
    "mean": _moment, "var": _moment, "std": _moment,
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
         "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"), _loss),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss"), _cross_entropy),
    "linear": _product("input", "weight", last=True), "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"), "bmm": _product("self", "mat2"), "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"), "addmm": _product("mat1", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    **dict.fromkeys(
        ("chunk", "select", "split", "split_with_sizes", "unbind", "glu",
         "flip", "roll", "sort", "argsort", "topk", "cosine_similarity", "diff", "kthvalue", "median",
         "unfold", "unflatten"), _along_dense),
    "slice": _slice, "narrow": _slice,
    "conv1d": _rows, "conv2d": _rows, "group_norm": _rows, "masked_scatter": _rows,
    **dict.fromkeys(("view", "reshape", "flatten", "_unsafe_view", "view_as", "reshape_as"), _view),
    **dict.fromkeys(("index_select", "gather"), _look_up("index")),
    **dict.fromkeys(("embedding", "take_along_dim"), _look_up("indices")),
    "cat": _cat, "concat": _cat, "arange": _arange,
    "fill": RaggedOp.run,
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _full),
}  # fmt: skip
# Ops that make each entry along a ragged dim of entries at the same place, or before it:
# padding stays behind.
_PLAIN = {
    "_assert_tensor_metadata", "_to_copy", "alias", "alpha_dropout", "broadcast_tensors", "broadcast_to",
    "clone", "contiguous", "copy", "cummax", "cummin", "cumprod", "cumsum", "detach", "dropout", "empty",
    "empty_like", "expand", "expand_as", "feature_dropout", "floor_divide", "grouped_mm", "layer_norm",
    "logcumsumexp", "mT", "movedim", "new_empty", "new_ones", "new_zeros", "numpy_T", "ones", "ones_like",
    "outer", "permute", "prelu", "rand", "rand_like", "randn", "randn_like", "rms_norm", "rsub", "square",
    "squeeze", "stack", "swapaxes", "swapdims", "t", "to", "transpose", "type_as", "unsqueeze", "zero",
    "zeros", "zeros_like",
}  # fmt: skip
