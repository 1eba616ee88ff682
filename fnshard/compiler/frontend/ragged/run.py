"""Capture `fn` with symbols for lengths that depend on data; run its graph on tensors of known sizes.

Each ATen op that takes or makes ragged dims has a rule: a function that computes the same values and
gradients on known sizes. Rules are found by the op's name, whatever its overload; an op without one is
refused. `frontend.ragged` says what the size, the count, the values and the padding of such a dim are.
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
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copy.requires_grad_(value.requires_grad)

    fakes = [[*map(copy_fake, v)] for v in inputs]
    with source_lines.record(), plain_attention():  # fused kernels ask for lengths; the op stays the same
        # Its own graph is captured: a call would run that graph again in this trace, where lengths get new
        # symbols without bounds.
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
    # other, and is refused. These are the memories of the symbolic trace of which there are such copies.
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
    symbolic_memory, real_memory = storage_id(node.meta["val"]), storage_id(ragged.values[node])
    sharing = [n for n in tensors if storage_id(n.meta["val"]) == symbolic_memory]
    return {symbolic_memory for n in sharing if storage_id(ragged.values[n]) != real_memory}


def _run_node(ragged: Ragged, node: fx.Node) -> Any:
    """Run a node: by its op's rule where a ragged tensor or a length is involved, otherwise directly."""
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

    # Gather the arguments by name, and apply the rule.
    schema, raw = node.target._schema.arguments, arguments_of(node.target, node.args, node.kwargs)
    as_value = {a.name: any(name in str(a.real_type) for name in _VALUES) for a in schema}
    arguments = {
        name: fx.map_arg(given, lambda n, v=as_value[name]: _get_argument(ragged, n, v, value))
        for name, given in raw.items()
    }
    call = RaggedOp(ragged, node, arguments, raw)
    result = _find_rule(call)(call)
    if isinstance(value, Tensor) and list(result.shape) != [ragged.size(n) for n in value.shape]:
        raise call.make_error("has another shape on known sizes")

    # Rules return new tensors; an op in place has to write.
    target = arguments[schema[0].name]
    is_in_place = schema[0].alias_info is not None and schema[0].alias_info.is_write
    return target.copy_(result) if is_in_place and result is not target else result


def _get_argument(ragged: Ragged, node: fx.Node, as_value: bool, result: Any) -> Any:
    """Return an argument of an op on known sizes: a tensor, or the true value of a length."""
    if not as_value or not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
        return ragged.values[node]
    # A Python number does not change the dtype of a float result; the length, a tensor, is cast to it.
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
        TraceError: the op has none.
    """
    name = call.name
    if name in _RULES and not (name in ("max", "min") and "other" in call.arguments):
        return _RULES[name]
    packet = getattr(aten, name, None) if call.node.target.namespace == "aten" else None
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    if name in _PLAIN or any(torch.Tag.pointwise in o.tags for o in overloads):
        return RaggedOp.run
    raise call.make_error("has no rule for a length that depends on data")


def _get_extreme(value: Tensor, sign: int) -> Any:
    """Return the largest number of a tensor's dtype, or the smallest for a `sign` of -1."""
    if value.dtype == torch.bool:
        return sign > 0
    if value.is_floating_point():
        return sign * math.inf
    info = torch.iinfo(value.dtype)
    return info.max if sign > 0 else info.min


# ------------------------------------------------------------------ ops that make ragged dims
def _find_positions(mask: Tensor, size: int, needed: Tensor) -> Tensor:
    """Return int64 [size]: where a flat mask is True, in order, then the first of these over and over."""
    # The k-th True is where the running count of them reaches k.
    ends = mask.cumsum(0)
    ordinals = torch.arange(1, size + 1, device=mask.device)
    ordinals = torch.where(ordinals <= needed, ordinals, 1)
    return torch.searchsorted(ends, ordinals).clamp(max=mask.numel() - 1)


def _find_true(call: RaggedOp, mask: fx.Node, length: Any) -> tuple[Tensor, ...]:
    """Return the positions where a mask is not 0, one int64 [size] for each of its dims."""
    is_true = call.ragged.fill(mask, 0) != 0
    needed = is_true.sum()
    size = call.ragged.define(call.node, length, needed, is_true.numel())

    # Take flat positions apart into one index for each dim, from the last dim on.
    flat, indices = _find_positions(is_true.flatten(), size, needed), []
    for dim_size in reversed(is_true.shape):
        indices.append(flat % dim_size)
        flat = flat // dim_size
    return tuple(reversed(indices))


def _fill_if_empty(call: RaggedOp, value: Tensor, length: Any) -> Tensor:
    """Return selected values, or ones if nothing was selected.

    Padding then holds ones, so that a logarithm of it has a finite gradient.
    """
    count = call.ragged.count(length)
    may_be_empty = value.is_floating_point() and isinstance(count, Tensor)
    return torch.where(count > 0, value, 1) if may_be_empty else value


def _nonzero(call: RaggedOp) -> Any:
    """Return where a tensor is not 0, as columns or a list of indices; also `torch.where` of a mask alone."""
    if call.name == "where" and len(call.arguments) > 1:
        return call.run()
    value = call.node.meta["val"]
    is_table = isinstance(value, Tensor)  # one tensor with a column for each dim
    first_argument = call.raw[next(iter(call.raw))]
    indices = _find_true(call, first_argument, (value if is_table else value[0]).shape[0])
    return torch.stack(indices, 1) if is_table else list(indices)


def _masked_select(call: RaggedOp) -> Tensor:
    """Return the elements of a tensor where a mask that broadcasts to it is True."""
    mask, valid = call.fill("mask", False), call.ragged.valid(call.raw["self"].meta["val"])
    if valid is not None:  # a mask that broadcasts along a ragged dim selects none of its padding
        mask = mask & valid
    value, mask = torch.broadcast_tensors(call["self"], mask)
    needed, (length,) = mask.sum(), call.node.meta["val"].shape
    size = call.ragged.define(call.node, length, needed, mask.numel())
    return _fill_if_empty(call, value.reshape(-1)[_find_positions(mask.reshape(-1), size, needed)], length)


def _unique(call: RaggedOp) -> tuple[Tensor, ...]:
    """Return distinct values in order, their inverse and counts: the heads of runs of equal sorted values."""
    # Sort the values, padding last, and find the heads of runs.
    value = call.fill("self", _get_extreme(call["self"], 1)).detach()
    flat = value.reshape(-1)
    valid = call.ragged.valid(call.raw["self"].meta["val"])
    order = flat.argsort(stable=True)
    ranked = flat[order]
    is_head = torch.cat([torch.ones_like(order[:1], dtype=torch.bool), ranked[1:] != ranked[:-1]])
    is_counted = torch.ones_like(is_head)
    if valid is not None:  # padding is sorted among values that are the dtype's largest number, too
        is_counted = valid.expand(value.shape).reshape(-1)[order]
        is_head = is_head & (torch.arange(is_head.numel(), device=flat.device) < is_counted.sum())

    # The heads of runs are the distinct values; each run's number is the rank of its values.
    needed = is_head.sum()
    (length,) = call.node.meta["val"][0].shape
    size = call.ragged.define(call.node, length, needed, flat.numel())
    rank = (is_head.cumsum(0) - 1).clamp(min=0, max=size - 1)
    inverse = torch.zeros_like(order).scatter(0, order, rank).reshape(value.shape)
    counts = torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(0, rank, is_counted.long())
    return ranked[_find_positions(is_head, size, needed)], inverse, counts


def _repeat_interleave(call: RaggedOp) -> Tensor:
    """Repeat rows, or their numbers, each as often as a tensor says."""
    if not isinstance(call.arguments["repeats"], Tensor):
        return call.run()
    repeats = call.fill("repeats", 0).long()
    dim = call.arguments.get("dim")
    lengths = [n for n in call.node.meta["val"].shape if isinstance(n, torch.SymInt)]
    length = lengths[0] if dim is None else call.node.meta["val"].shape[dim]
    if not isinstance(length, torch.SymInt):
        return call.run()

    # One number is the number of all rows.
    if "self" in call.arguments and repeats.numel() == 1 and not call.dims("repeats"):
        if call.dims("self"):
            raise call.make_error("of rows whose number depends on data takes a number for each row")
        repeats = repeats.expand(call["self"].numel() if dim is None else call["self"].shape[dim])
    ends = repeats.cumsum(0)

    # Entry i is a copy of the row whose end is the first beyond i.
    size = call.ragged.define(call.node, length, ends[-1], None)
    places = torch.arange(size, device=repeats.device)
    places = torch.where(places < ends[-1], places, 0)
    rows = torch.searchsorted(ends, places, right=True).clamp(max=repeats.numel() - 1)

    if "self" not in call.arguments:
        return rows
    table = call["self"].reshape(-1) if dim is None else call["self"]
    return table.index_select(0 if dim is None else dim, rows.expand(size))


# ------------------------------------------------------------------ indices
def _is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)


def _find_indices(call: RaggedOp, lengths: Sequence[Any]) -> list[Tensor | None]:
    """Return the indices of an `index` or `index_put`, with positions in the place of masks.

    Args:
        lengths: the lengths of dims of what is read or put, among them the one that masks make.
    """
    indices: list[Tensor | None] = []
    length = next((n for n in lengths if isinstance(n, torch.SymInt)), None)
    for node in call.raw["indices"]:
        if node is None:
            indices.append(None)
        elif not _is_mask(node):
            indices.append(call.ragged.index(node))
        elif length is not None:
            indices += _find_true(call, node, length)
        else:
            raise call.make_error("takes a mask and values of another length")
    return indices


def _index(call: RaggedOp) -> Tensor:
    """Index a tensor, by masks and by indices of a ragged length among others."""
    value = call.node.meta["val"]
    masks = [n for n in call.raw["indices"] if n is not None and _is_mask(n)]
    place = next(i for i, n in enumerate(call.raw["indices"]) if n is not None)
    indices = _find_indices(call, value.shape[place:])

    # A negative index counts from the true end of a ragged dim, which the padding does not move.
    for dim, length in call.dims("self").items():
        if not masks and dim < len(indices) and indices[dim] is not None:
            index = indices[dim]
            indices[dim] = torch.where(index < 0, index + call.ragged.count(length), index)
    result = torch.ops.aten.index.Tensor(call["self"], indices)
    return _fill_if_empty(call, result, value.shape[place]) if masks else result


def _index_put(call: RaggedOp) -> Tensor:
    """Put values into a tensor by a mask or by ragged indices."""
    values = call.raw["values"].meta["val"]
    given = [n for n in call.raw["indices"] if n is not None]
    ragged, masks = [n for n in given if call.ragged.dims(n.meta["val"])], list(filter(_is_mask, given))
    if not (call.dims("values") if masks else ragged):
        return call.run()
    if masks and len(given) > 1:
        raise call.make_error("takes a mask next to other indices")

    # Which entries of the indices are values?
    indices = _find_indices(call, values.shape)
    place = next(i for i, n in enumerate(indices) if n is not None)
    if masks:
        valid = call.ragged.valid(values, list(call.dims("values"))[:1]).flatten()
    else:
        valid = functools.reduce(operator.and_, (call.ragged.valid(n.meta["val"]) for n in ragged))

    # Padding goes into a row after the last one, which is cut off again.
    table, index, size = call["self"], indices[place], call["self"].shape[place]
    longer = torch.cat([table, torch.zeros_like(table.narrow(place, 0, 1))], place)
    indices[place] = torch.where(valid, torch.where(index < 0, index + size, index), size)
    return longer.index_put(indices, call["values"], call["accumulate"]).narrow(place, 0, size)


def _index_add(call: RaggedOp) -> Tensor:
    """Add rows to a tensor; padding rows count as 0."""
    if not call.dims("index"):
        return call.run()
    rows = call.fill("source", 0, [call["dim"] % call["self"].dim()])
    return call.run(index=call.ragged.index(call.raw["index"]), source=rows)


# ------------------------------------------------------------------ reductions
def _find_reduced_dims(call: RaggedOp) -> list[int]:
    """Return the dims that an op reduces, or works along."""
    dim, dims = call.arguments.get("dim", call.arguments.get("dims")), call[next(iter(call.raw))].dim()
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(dims))
    return [d % max(dims, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _make_reduction(fill: Callable[[Tensor], Any]) -> Rule:
    """Return the rule of a reduction, in which `fill(tensor)` is the number that padding counts as."""

    def rule(call: RaggedOp) -> Any:
        along = set(_find_reduced_dims(call)) & call.dims("self").keys()
        return call.run(self=call.fill("self", fill(call["self"]), along)) if along else call.run()

    return rule


def _norm(call: RaggedOp) -> Any:
    """Return a norm, in which padding counts as 0; it would be the least of all for a negative order."""
    order = call.arguments.get("ord", call.arguments.get("p"))
    along = set(_find_reduced_dims(call)) & call.dims("self").keys()
    if isinstance(order, int | float) and order < 0 and along:
        raise call.make_error("of a negative order has no rule")
    return _make_reduction(lambda _: 0)(call)


def _argextreme(call: RaggedOp) -> Any:
    """Return the position of the largest or least number."""
    _refuse_flat_positions(call)
    return _make_reduction(_least if call.name == "argmax" else _most)(call)


def _take_along_dim(call: RaggedOp) -> Any:
    """Take entries by their positions along a dim."""
    _refuse_flat_positions(call)
    return _make_lookup("indices")(call)


def _refuse_flat_positions(call: RaggedOp) -> None:
    """Refuse positions in a flattened tensor, where padding of a dim that is not the first would count."""
    if call.arguments.get("dim") is None and call.dims("self").keys() - {0}:
        raise call.make_error("without a dim counts positions, and a dim that is not the first has padding")


def _normalize(call: RaggedOp) -> Any:
    """Normalise the last dims, of which none may be ragged."""
    first = call["input"].dim() - len(call["normalized_shape"])
    if any(dim >= first for dim in call.dims("input")):
        raise call.make_error("works along a dim whose length depends on data")
    return call.run()


def _moment(call: RaggedOp) -> Tensor:
    """Return the mean, the variance or the standard deviation without padding."""
    dims, shape = _find_reduced_dims(call), call.raw["self"].meta["val"].shape
    if not set(dims) & call.dims("self").keys():
        return call.run()
    count = math.prod([1, *(call.ragged.count(shape[d]) for d in dims)])
    keepdim = call.arguments.get("keepdim", False)
    if call.name == "mean":
        return call.fill("self", 0, dims).sum(dims, keepdim, dtype=call.arguments.get("dtype")) / count

    # The variance of values alone, by their own mean.
    correction = call.arguments.get("correction", 1 if call.arguments.get("unbiased", True) else 0)
    mean = call.fill("self", 0, dims).sum(dims, True) / count
    valid = call.ragged.valid(call.raw["self"].meta["val"], dims)
    squares = torch.where(valid, (call["self"] - mean).square(), 0).sum(dims, keepdim)
    variance = squares / (count - (1 if correction is None else correction))
    return variance.sqrt() if call.name == "std" else variance


def _loss(call: RaggedOp) -> Tensor:
    """Return a loss of pairs of elements: the sum or the mean over values."""
    if not call.arguments.get("reduction"):
        return call.run()
    losses = call.run(reduction=0)
    tensors = [n for n in call.raw.values() if isinstance(n, fx.Node) and isinstance(n.meta["val"], Tensor)]
    shape = max((n.meta["val"] for n in tensors), key=lambda v: v.dim())
    if any(n.meta["val"].dim() not in (0, shape.dim()) for n in tensors):
        raise call.make_error("of tensors of several ranks has no rule")

    # Elements that are padding in any of the tensors count as 0, and the mean is over the others.
    masks = [call.ragged.valid(n.meta["val"]) for n in tensors]
    valid = [mask for mask in masks if mask is not None]
    total = (torch.where(functools.reduce(operator.and_, valid), losses, 0) if valid else losses).sum()
    return total / math.prod(map(call.ragged.count, shape.shape)) if call["reduction"] == 1 else total


def _cross_entropy(call: RaggedOp) -> Tensor:
    """Return cross entropy, in which padding rows have ignored targets."""
    # The log-sum-exp over classes would count padding.
    class_dim = 1 if call["self"].dim() > 1 else 0
    if call.name == "cross_entropy_loss" and class_dim in call.dims("self"):
        raise call.make_error("has no rule for classes whose number depends on data: take log_softmax")
    if call["target"].is_floating_point():
        if call["reduction"]:
            raise call.make_error("of probabilities has no rule: take reduction='none', and then the mean")
        return call.run()
    valid = call.ragged.valid(call.raw["target"].meta["val"])
    if valid is None:
        return call.run()
    return call.run(target=torch.where(valid, call["target"], call["ignore_index"]))


# ------------------------------------------------------------------ products
def _make_product(first: str, second: str, last: bool = False) -> Rule:
    """Return the rule of a product, in which padding along the dim that is summed over counts as 0.

    Args:
        first, second: the names of the factors.
        last: whether that dim is the last one of the second factor too.
    """

    def rule(call: RaggedOp) -> Any:
        first_dim, second_dim = call[first].dim() - 1, call[second].dim() - 1
        if not last and second_dim > 0:  # the rows of a matrix are summed over
            second_dim -= 1
        first_factor, second_factor = call.fill(first, 0, [first_dim]), call.fill(second, 0, [second_dim])
        return call.run(**{first: first_factor, second: second_factor})

    return rule


# ------------------------------------------------------------------ shapes
def _run_along_dense(call: RaggedOp) -> Any:
    """Run an op that works along a dim of one tensor, which must not be ragged, by known numbers."""
    ragged = set(_find_reduced_dims(call)) & call.dims(next(iter(call.raw))).keys()
    if ragged or any(isinstance(n.meta["val"], torch.SymInt) for n in call.node.all_input_nodes):
        raise call.make_error("works along a dim whose length depends on data")
    return call.run()


def _slice(call: RaggedOp) -> Any:
    """Cut a slice of a dim that is not ragged, or take all of one that is."""
    dim = call["dim"] % call["self"].dim()
    before, after = (call.ragged.expression(n.meta["val"].shape[dim]) for n in (call.raw["self"], call.node))
    if before != after and symbols(before) | symbols(after):
        raise call.make_error("cuts a part whose place or length depends on data")
    return call.run()


def _run_on_rows(call: RaggedOp) -> Any:
    """Run an op of a batch of rows, of which the first dim alone may be ragged."""
    if any(call.dims(name).keys() - {0} for name in call.raw):
        raise call.make_error("has a rule for a first dim of such a length alone")
    return call.run()


def _view(call: RaggedOp) -> Any:
    """View in another shape; a ragged dim stays the outermost of those it is merged with or cut into."""
    before, after = call.raw["self"].meta["val"], call.node.meta["val"]

    def count_outer(value: Tensor) -> list[int]:
        """Return for each ragged dim how many entries the dims before it have."""
        sizes = [call.ragged.size(n) for n in value.shape]
        return [math.prod(sizes[:d]) for d in call.ragged.dims(value)]

    if count_outer(before) != count_outer(after):
        raise call.make_error("merges a dim whose length depends on data into one that is before it")
    shape = [call.ragged.size(n) for n in after.shape]
    return call["self"].reshape(shape) if call.name != "view" else call["self"].view(shape)


def _make_lookup(name: str) -> Rule:
    """Return the rule of an op of indices; padding is replaced by indices that are in range."""

    def rule(call: RaggedOp) -> Any:
        return call.run(**{name: call.ragged.index(call.raw[name])}) if call.dims(name) else call.run()

    return rule


def _cat(call: RaggedOp) -> Tensor:
    """Join tensors; along a ragged dim the values of all come first, and padding after them."""
    parts = [n for n in call.raw["tensors"] if n.meta["val"].dim() != 1 or n.meta["val"].shape[0] != 0]
    values = [n.meta["val"] for n in parts]
    dim = call.arguments.get("dim", 0) % values[0].dim()
    if not any(dim in call.ragged.dims(v) for v in values[:-1]):
        return call.run()
    lengths, device = [v.shape[dim] for v in values], values[0].device
    valid = [torch.arange(call.ragged.size(n), device=device) < call.ragged.count(n) for n in lengths]

    # A stable sort by whether an entry is padding keeps the order of values.
    joined = torch.cat([call.ragged.values[n] for n in parts], dim)
    order = torch.cat(valid).logical_not().argsort(stable=True)
    return joined.index_select(dim, order[: call.ragged.size(call.node.meta["val"].shape[dim])])


def _arange(call: RaggedOp) -> Tensor:
    """Count to a length that depends on data; padding repeats the last number."""
    if call.arguments.get("start", 0) != 0 or call.arguments.get("step", 1) != 1:
        raise call.make_error("with a start or a step has no rule")
    (length,) = call.node.meta["val"].shape
    return call.run(end=call.ragged.size(length)).clamp(max=call.ragged.count(length) - 1).clamp(min=0)


def _full(call: RaggedOp) -> Tensor:
    """Run an op that fills a tensor with one number, which may be a length."""
    name = "s" if call.name == "scalar_tensor" else "fill_value"
    # The op takes a Python number alone, and a length is a tensor here.
    is_length = isinstance(call[name], Tensor)
    result = call.run(**{name: 0}) + call[name] if is_length else call.run()
    return result.to(call.node.meta["val"].dtype)


_least, _most = (lambda v: _get_extreme(v, -1)), (lambda v: _get_extreme(v, 1))
# The softmax of -inf alone would be NaN, where a row has no values.
_lowest = lambda v: torch.finfo(v.dtype).min if v.is_floating_point() else _get_extreme(v, -1)  # noqa: E731
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "where"), _nonzero),
    "_unique2": _unique,
    "masked_select": _masked_select, "repeat_interleave": _repeat_interleave, "index": _index,
    "index_put": _index_put, "index_add": _index_add,
    **dict.fromkeys(
        ("sum", "any", "nansum", "count_nonzero"), _make_reduction(lambda _: 0)),
    "linalg_vector_norm": _norm, "norm": _norm,
    **dict.fromkeys(("all", "prod"), _make_reduction(lambda _: 1)),
    **dict.fromkeys(("max", "amax"), _make_reduction(_least)),
    **dict.fromkeys(("min", "amin"), _make_reduction(_most)),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"), _make_reduction(_lowest)
    ),
    "argmax": _argextreme, "argmin": _argextreme,
    "layer_norm": _normalize, "rms_norm": _normalize,
    "mean": _moment, "var": _moment, "std": _moment,
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
         "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"), _loss),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss"), _cross_entropy),
    "linear": _make_product("input", "weight", last=True), "matmul": _make_product("self", "other"),
    "mm": _make_product("self", "mat2"), "bmm": _make_product("self", "mat2"),
    "mv": _make_product("self", "vec"), "dot": _make_product("self", "tensor"),
    "addmm": _make_product("mat1", "mat2"), "baddbmm": _make_product("batch1", "batch2"),
    **dict.fromkeys(
        ("chunk", "select", "split", "split_with_sizes", "unbind", "glu",
         "flip", "roll", "sort", "argsort", "topk", "cosine_similarity", "diff", "kthvalue", "median",
         "unfold", "unflatten"), _run_along_dense),
    "slice": _slice, "narrow": _slice,
    **dict.fromkeys(("conv1d", "conv2d", "group_norm", "masked_scatter"), _run_on_rows),
    **dict.fromkeys(("view", "reshape", "flatten", "_unsafe_view", "view_as", "reshape_as"), _view),
    **dict.fromkeys(("index_select", "gather"), _make_lookup("index")),
    "embedding": _make_lookup("indices"), "take_along_dim": _take_along_dim,
    "cat": _cat, "concat": _cat, "arange": _arange,
    "fill": RaggedOp.run,
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _full),
}  # fmt: skip
# Ops that make each entry along a ragged dim from entries at the same place or before it, so that padding,
# which comes last, does not reach values.
_PLAIN = {
    "_assert_tensor_metadata", "_to_copy", "alias", "alpha_dropout", "broadcast_tensors", "broadcast_to",
    "clone", "contiguous", "copy", "cummax", "cummin", "cumprod", "cumsum", "detach", "dropout", "empty",
    "empty_like", "expand", "expand_as", "feature_dropout", "floor_divide", "grouped_mm",
    "logcumsumexp", "mT", "movedim", "new_empty", "new_ones", "new_zeros", "numpy_T", "ones", "ones_like",
    "outer", "permute", "prelu", "rand", "rand_like", "randn", "randn_like", "rsub", "square",
    "squeeze", "stack", "swapaxes", "swapdims", "t", "to", "transpose", "type_as", "unsqueeze", "zero",
    "zeros", "zeros_like",
}  # fmt: skip
