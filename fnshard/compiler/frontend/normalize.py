"""Normalise a traced graph: modes become data, hidden state becomes inputs.

- Nodes under `no_grad` read `aten.detach` of their inputs, so that no grad mode is left to lose when
  the program is cut.
- Nodes under autocast carry the mode in `meta["autocast"]`; a pass that rebuilds them re-enters it.
- Random ops become counter-based ones (`compiler.frontend.random`) that read a key input.
- Constants become inputs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.random import ops
from fnshard.compiler.ir.custom_gradient import CustomGradient
from fnshard.compiler.ir.failures import COMMUNICATES, ONE_DEVICE, error_at, higher_order
from fnshard.compiler.ir.program import (
    OpOverload,
    arguments_of,
    describe,
    eliminate_dead_code,
    mutated_args,
    storage_id,
    tensors_of,
)
from fnshard.errors import TraceError, report

aten = torch.ops.aten

# Ops that read nothing but the shape or dtype of their second tensor, each with the op that takes these
# instead. Otherwise the tensor would be kept for another kernel, which would have to return its gradient.
_LIKE: dict[Any, tuple[Any, Callable[[Tensor], Any]]] = {
    aten.expand_as.default: (aten.expand.default, lambda v: list(v.shape)),
    aten.view_as.default: (aten.view.default, lambda v: list(v.shape)),
    aten.reshape_as.default: (aten.reshape.default, lambda v: list(v.shape)),
    aten.type_as.default: (aten.to.dtype, lambda v: v.dtype),
    aten.to.other: (aten.to.dtype, lambda v: v.dtype),
}


def normalize(module: fx.GraphModule, inputs: int) -> tuple[fx.Graph, list[str], dict[str, Tensor]]:
    """Return a normalised graph, the names of its key inputs, and its constants by name.

    Its placeholders are those of `module` (`inputs` of them), then constants, then keys.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != inputs:
        raise AssertionError(f"traced {len(placeholders)} inputs, expected {inputs}")
    for i, old in enumerate(placeholders):
        env[old] = graph.placeholder(f"in{i}")

    # A collective that `fn` calls itself would have no line in the schedule, which orders and checks them.
    named = ((n, str(n.target)) for n in module.graph.nodes)
    collectives = [(n, name) for n, name in named if re.match(r"_?c10d|_dtensor", name)]
    if collectives:
        raise error_at(f"{COMMUNICATES}:", collectives, ONE_DEVICE)

    # Remove views and constants that nobody reads, before constants become inputs.
    for old in reversed(module.graph.nodes):
        # After a write autograd makes views of the base anew, where the base has no name; nobody reads them.
        if not old.users and (old.op == "get_attr" or getattr(old.target, "is_view", False)):
            module.graph.erase_node(old)

    # Tensors that `fn` closes over become inputs, one for each, however often it is read.
    constants: dict[str, Tensor] = {}
    read: dict[str, fx.Node] = {}
    for old in [n for n in module.graph.nodes if n.op == "get_attr"]:
        value = getattr(module, old.target)
        if not isinstance(value, Tensor):
            if "Generator" in repr(value):
                raise TraceError(_GENERATOR)
            raise higher_order(old.target)
        constants[old.target] = value
        if old.target not in read:
            read[old.target] = graph.placeholder(old.target)
        env[old] = read[old.target]

    # Random ops read keys, which are inputs too.
    random = [n for n in module.graph.nodes if _is_random(n)]
    keys = {old: graph.placeholder(f"key{i}") for i, old in enumerate(random)}
    _copy_body(module, graph, env, keys)
    eliminate_dead_code(graph)
    graph.lint()
    return graph, [f"key{i}" for i in range(len(random))], constants


def _copy_body(module: fx.GraphModule, graph: fx.Graph, env: dict, keys: dict) -> None:
    """Copy all nodes but inputs; grad modes become detaches, autocast modes become `meta["autocast"]`."""
    is_grad_enabled = True
    autocast: dict[fx.Node, tuple[Any, ...]] = {}
    detached: dict[fx.Node, fx.Node] = {}

    def detach(old: fx.Node) -> fx.Node:
        value, node = old.meta.get("val"), env[old]
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return node
        if node not in detached:
            detached[node] = graph.call_function(aten.detach.default, (node,))
        return detached[node]

    for old in module.graph.nodes:
        if old.op == "output":
            flat = old.args[0] if isinstance(old.args[0], list | tuple) else [old.args[0]]
            graph.output([env[n] for n in flat])
        if old.op != "call_function":
            continue

        # Modes of grad and autocast are no ops: they say how later nodes are copied.
        if old.target is torch._C._set_grad_enabled:
            is_grad_enabled = bool(old.args[0])
            detached.clear()
            continue
        if old.target is torch.amp.autocast_mode._enter_autocast:
            autocast[old] = old.args[:3]  # device, dtype, enabled
            continue
        if old.target is torch.amp.autocast_mode._exit_autocast:
            autocast.pop(old.args[0], None)
            continue

        # Some nodes are not copied: a change of shape in place becomes a view, and dropout in eval mode is
        # its input.
        is_known = isinstance(old.target, OpOverload | CustomGradient)
        if not is_known and getattr(old.target, "__module__", "") != "_operator":
            raise higher_order(str(old.target))
        if torch.Tag.inplace_view in getattr(old.target, "tags", ()):
            # The tensor gets another shape, and its memory stays: from here on its name means a view of it.
            args, kwargs = fx.map_arg((old.args, old.kwargs), env.__getitem__)
            env[old] = env[old.args[0]] = graph.call_function(_find_view_form(old.target), args, kwargs)
            continue
        _check_out_shape(old)
        if _is_inactive_dropout(old):
            env[old] = env[old.args[0]]
            continue
        returned = None if is_grad_enabled else _find_returned_input(old)
        if returned is not None:
            env[old] = env[returned]
            continue

        # All others are copied, random ones as ops that read a key.
        args, kwargs = fx.map_arg((old.args, old.kwargs), env.__getitem__ if is_grad_enabled else detach)
        before = set(graph.nodes) if old in keys else set()
        copy = _write_node(graph, old, args, kwargs, keys.get(old))
        fresh = [n for n in graph.nodes if n not in before] if old in keys else [copy]  # a draw is several
        # A write under no_grad goes to an alias. Later nodes read the tensor itself, whose gradient ignores
        # the write, as in torch.
        written = [] if is_grad_enabled else mutated_args(old)
        returns_written = len(written) == 1 and len(old.target._schema.returns) == 1
        env[old] = env[written[0]] if returns_written else copy
        for node in fresh:
            if isinstance(node, fx.Node) and node.op == "call_function" and autocast:
                node.meta["autocast"] = tuple(autocast.values())


def _find_returned_input(node: fx.Node) -> fx.Node | None:
    """Return the input that a node returns unchanged, as a cast to the same dtype does; None if it does not.

    Under no_grad such a value keeps its gradient, and no other does. The tracer names it after the op that
    returned it last, so that a detach would wrongly cut the gradient off.
    """
    source, place = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, None)
    if not isinstance(source.target, OpOverload) or source.target._schema.is_mutable:
        return None
    inputs = {n: n.meta.get("val") for n in source.all_input_nodes}
    memories = {storage_id(v) for v in inputs.values() if isinstance(v, Tensor)}
    if not isinstance(node.meta.get("val"), Tensor) or storage_id(node.meta["val"]) not in memories:
        return None

    # One that shares memory with an input may be a view of it: run the op, and see what it returns.
    args, kwargs = fx.map_arg((source.args, source.kwargs), inputs.__getitem__)
    with torch.no_grad():
        result = source.target(*args, **kwargs)
    value = result if place is None else result[place]
    return next((n for n, v in inputs.items() if v is value), None)


def _find_view_form(target: OpOverload) -> OpOverload:
    """Return `aten.transpose` for `aten.transpose_`, say.

    Raises:
        TraceError: the op (resize_, set_) has no such form, since it changes the memory itself.
    """
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"))
    types = [str(a.type) for a in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        if overload.is_view and [str(a.type) for a in overload._schema.arguments] == types:
            return overload
    raise TraceError(
        f"`fn` changes what memory a tensor has by {target}, which a trace loses.",
        fix="make a new tensor (x.reshape, x.new_zeros, torch.cat) and use that from there on.",
    )


def _check_out_shape(old: fx.Node) -> None:
    """Refuse `out=` of another shape than the result's: torch would give that tensor other memory."""
    if not isinstance(old.target, OpOverload) or not old.target._schema.is_mutable:
        return
    if not any(a.is_out for a in old.target._schema.arguments):
        return
    outs = zip(mutated_args(old), tensors_of(old), strict=False)
    shapes = [(n.meta["val"].shape, result.shape) for n, result in outs]
    wrong = [f"{list(given)} for {list(needed)}" for given, needed in shapes if given != needed]
    if wrong:
        raise TraceError(
            f"`fn` calls {old.target} with an out= of another shape than the result's:",
            wrong,
            "leave out= away, or pass a tensor of the result's shape.",
        )


_GENERATOR = report(
    "`fn` draws from a torch.Generator, whose state a trace loses.",
    fix="leave generator= out: the state's seed replaces it (step.init(..., seed=)).",
)


def _is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers with its arguments."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.scaled_dot_product_attention.default:
        return _get_argument(node, "dropout_p") != 0
    if _is_inactive_dropout(node):
        return False
    if node.target in _RECURRENT and not (_get_argument(node, "train") and _get_argument(node, "dropout")):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target in _RANDOM


def _is_inactive_dropout(node: fx.Node) -> bool:
    """Return whether a node is dropout in eval mode."""
    return node.target in _DROPOUTS and not _get_argument(node, "train")


def _get_argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a node by name, or its default."""
    return arguments_of(node.target, node.args, node.kwargs)[name]


def _write_node(graph: fx.Graph, old: fx.Node, args: tuple, kwargs: dict, key: fx.Node | None) -> Any:
    """Write a node into `graph`, with given arguments; a random one in the form that reads `key`."""
    # An op that draws nothing is copied, or replaced by one that computes the same here.
    if key is None:
        if old.target in _SPARSE_GRADIENT:  # gradients are dense here
            named = zip(old.target._schema.arguments, args, strict=False)
            args = tuple(False if a.name == "sparse" else value for a, value in named)
            kwargs = {k: v for k, v in kwargs.items() if k != "sparse"}
        target = old.target
        if target in _LIKE and isinstance(old.args[1], fx.Node):
            target, read_property = _LIKE[target]
            args = (args[0], read_property(old.args[1].meta["val"]), *args[2:])
        node = graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in old.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return node

    # A random op becomes one that reads the key.
    if old.target not in _RANDOM:
        raise error_at(
            f"`fn` draws random numbers with {old.target}, which has no counter-based form here:",
            [(old, f"{old.name} {describe(old.meta['val'])}")],
            "use dropout, torch.rand, torch.randn, torch.randint, torch.bernoulli, torch.normal, their "
            "*_like and in-place forms, torch.randperm, torch.multinomial, or draw the numbers outside and "
            "pass them with the batch.",
        )

    bound = arguments_of(old.target, args, kwargs)
    if bound.get("generator") is not None:
        raise TraceError(_GENERATOR)
    _check_draw(old)
    target, arguments = _RANDOM[old.target](bound, key, old.meta["val"])
    value = graph.call_function(target, arguments)
    # A draw in place is written back: views of the tensor see it too.
    return graph.call_function(aten.copy_.default, (args[0], value)) if mutated_args(old) else value


def _check_draw(old: fx.Node) -> None:
    """Let torch check the arguments, on tensors without elements: on fake tensors it accepts any."""
    if len(old.all_input_nodes) > 1:
        return  # attention, or probabilities that are a tensor, cannot be checked without values

    def empty(node: fx.Node) -> Tensor:
        return torch.empty((0,) * max(1, node.meta["val"].dim()), dtype=node.meta["val"].dtype)

    arguments = fx.map_arg(arguments_of(old.target, old.args, old.kwargs), empty)
    changed = {"size": [0], "device": "cpu"}
    try:
        old.target(**{n: changed.get(n, v) for n, v in arguments.items()})
    except RuntimeError as error:
        raise TraceError(
            f"`fn` draws by {old.target} what torch refuses: {str(error).splitlines()[0]}",
            fix="give it limits that the dtype has.",
        ) from error


# A rule of a random op: from its arguments, the key and the fake result to the op that reads the key, and its
# arguments.
Draw = Callable[[dict[str, Any], fx.Node, Tensor], tuple[Any, tuple[Any, ...]]]


def _draw_shape(target: Any, *names: str) -> Draw:
    """Return the rule of an op that takes shape, dtype and the arguments of these names."""
    return lambda given, key, val: (target, (key, list(val.shape), val.dtype, *(given[n] for n in names)))


def _draw_integers(given: dict[str, Any], key: fx.Node, val: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Draw integers: the rule of `randint` in all its forms."""
    return ops.integers.default, (key, given.get("low", 0), given["high"], list(val.shape), val.dtype)


def _draw_mask(target: Any, *more: Any) -> Draw:
    """Return the rule of a kind of dropout, which reads its input and the probability of a zero."""

    def rule(given: dict[str, Any], key: fx.Node, val: Tensor) -> tuple[Any, tuple[Any, ...]]:
        x = given["input"] if "input" in given else given["self"]
        return target, (x, key, given["p"], *more)

    return rule


def _draw_below(target: Any, name: str = "p") -> Draw:
    """Return the rule of an op that gives 1 where a uniform number is below the argument of this name."""
    return lambda given, key, val: (target, (given[name], key, list(val.shape), val.dtype))


_RANDOM: dict[Any, Draw] = {
    aten.bernoulli.default: _draw_below(ops.bernoulli.default, "self"),
    aten.bernoulli_.Tensor: _draw_below(ops.bernoulli.default),
    **dict.fromkeys((aten.bernoulli.p, aten.bernoulli_.float), _draw_below(ops.bernoulli_below.default)),
    **dict.fromkeys(
        (aten.rand.default, aten.rand.generator, aten.rand_like.default), _draw_shape(ops.uniform.default)),
    aten.uniform_.default: _draw_shape(ops.uniform.default, "from", "to"),
    **dict.fromkeys(
        (aten.randn.default, aten.randn.generator, aten.randn_like.default), _draw_shape(ops.normal.default)),
    **dict.fromkeys(
        (aten.normal_.default, aten.normal.float_float), _draw_shape(ops.normal.default, "mean", "std")),
    aten.exponential_.default: _draw_shape(ops.exponential.default, "lambd"),
    **dict.fromkeys(
        (aten.randint.default, aten.randint.low, aten.randint.generator, aten.randint.low_generator,
         aten.randint_like.default, aten.randint_like.low_dtype), _draw_integers),
    aten.scaled_dot_product_attention.default: lambda given, key, val: (
        ops.attention.default,
        (given["query"], given["key"], given["value"], given["attn_mask"], key, given["dropout_p"],
         given["is_causal"], given["scale"], given["enable_gqa"])),
}  # fmt: skip
for _end in ("", "_"):
    _RANDOM |= {
        getattr(aten, f"dropout{_end}").default: _draw_mask(ops.dropout.default),
        getattr(aten, f"feature_dropout{_end}").default: _draw_mask(ops.feature_dropout.default),
        getattr(aten, f"alpha_dropout{_end}").default: _draw_mask(ops.alpha_dropout.default, False),
        getattr(aten, f"feature_alpha_dropout{_end}").default: _draw_mask(ops.alpha_dropout.default, True),
    }
_DROPOUTS = {
    getattr(aten, f"{name}{inplace}").default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for inplace in ("", "_")
}
_RECURRENT = {
    getattr(getattr(aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
}
_SPARSE_GRADIENT = {aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx}
