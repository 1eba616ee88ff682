"""Differentiate: make a forward and a backward graph of each distinct segment.

This is the only module that uses AOTAutograd's joint export and its min-cut partitioner (He & Yu, MLSys
2023). Values that depend on leaves alone are recomputed, never saved, since leaves are gathered again for the
backward.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.checkpoint import CheckpointPolicy

from fnshard.compiler.frontend.decompositions import LEFT_OUT, skip_checks
from fnshard.compiler.ir import deferred_imports
from fnshard.compiler.ir.program import OpOverload, arguments_of, describe
from fnshard.compiler.kernels.attention_backends import choose_kernels
from fnshard.compiler.kernels.derived_values import find_derived
from fnshard.compiler.kernels.kernel import Backward, Kernel, Ref, Refs
from fnshard.compiler.kernels.remat import Policy, is_saved
from fnshard.compiler.kernels.segment_source import Argument, SegmentSource
from fnshard.compiler.kernels.segments import Segments
from fnshard.compiler.kernels.store import Recipe, make_all
from fnshard.compiler.kernels.weight_grads import split_backward
from fnshard.compiler.rewrites.rounding import hide_rounding, round_for_joint_decisions, show_rounding
from fnshard.errors import SpecError, TraceError


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph of a segment's forward and backward, in which it is still open what the forward saves.

    Without a backward it is the forward alone, and `is_differentiable` is False.
    """

    module: fx.GraphModule
    mode: FakeTensorMode
    is_differentiable: bool


def differentiate(
    source: SegmentSource, policy: Policy, *, trainable: bool, target: str, apart: bool = False
) -> Kernel:
    """Make the forward and the backward of one source, without a name.

    Args:
        policy: what is saved. (Random ops are functions of a key that is an input, so that recomputation
            draws the same numbers.)
        trainable: whether there is a backward.
        target: the type of device that the kernel will run on; it may be traced on another.
        apart: whether a separate kernel makes the gradients of leaves.
    """
    # These modules import Dynamo and Inductor, which takes seconds, and `import fnshard` should not.
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    # Trace both directions as one graph, tag what must be saved or recomputed, and cut the graph in two.
    traced = trace_joint(source, trainable, target)
    mode = traced.mode
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with context, _use_lazy_graph_module(True), mode, V.set_fake_mode(mode):
        # A copy, since the trace is shared by policies and is rewritten here.
        joint = _make_graph_module(traced.module, copy.deepcopy(traced.module.graph))
        if not traced.is_differentiable:
            _flatten_signature(joint)
            return Kernel("", source, joint, None)
        kept = _tag_saved(joint, source, policy.save) if policy.save else ()
        _tag_recomputed(joint, source)
        has_rounding = hide_rounding(joint.graph)

        # With a budget of 0 the partitioner saves inputs and heeds no tags. With tags on every op it has no
        # choice left, so that the budget may be 1.
        with functorch_config.patch(
            activation_memory_budget=1.0 if kept else policy.budget, ban_recompute_materialized_backward=False
        ):
            forward, backward = min_cut_rematerialization_partition(
                joint,
                (),
                num_fwd_outputs=len(source.outputs),
                static_lifetime_input_indices=[i for i, a in enumerate(source.inputs) if a.kind == "leaf"],
            )

    # Undo what was hidden from the partitioner.
    if has_rounding:
        show_rounding(forward.graph)
        show_rounding(backward.graph)
    for node in [*forward.graph.nodes, *backward.graph.nodes]:
        if isinstance(node.target, _Unseeded):
            node.target = node.target.op
    kernel = replace(_make_kernel(source, forward, backward), kept=kept)
    return _divide_backward(kernel) if apart else kernel


def _divide_backward(kernel: Kernel) -> Kernel:
    """Divide a kernel's backward, so that another kernel makes the gradients of leaves that take products."""
    whole, inputs = kernel.backward, kernel.source.inputs
    kinds = [inputs[ref.index].kind if ref.kind == "input" else ref.kind for ref in whole.inputs]
    halves = split_backward(
        whole.module,
        [inputs[index].kind == "leaf" for index in whole.grads],
        leaves={i for i, kind in enumerate(kinds) if kind == "leaf"},
        on_hand={i for i, kind in enumerate(kinds) if kind in ("batch", "constant", "axis", "key")},
    )

    def make_half(module: fx.GraphModule | None, refs: Refs, grads: Iterable[int]) -> Backward | None:
        if module is None:
            return None
        return Backward(module, refs, tuple(whole.grads[n] for n in grads), _find_shared(module))

    # The second half reads some of the backward's inputs, and then what the first half hands on.
    first_refs = tuple(whole.inputs[n] for n in halves.first_inputs)
    second_refs = tuple(whole.inputs[n] for n in halves.second_inputs)
    second_refs += tuple(Ref("between", number) for number in range(len(halves.between)))
    return replace(
        kernel,
        backward=make_half(halves.first, first_refs, halves.first_grads),
        weights=make_half(halves.second, second_refs, halves.second_grads),
        between=tuple(Argument.of(_get_value(n), "value") for n in halves.between),
    )


@lru_cache(maxsize=16)  # a search makes kernels of a few sources by many policies
def trace_joint(source: SegmentSource, trainable: bool, target: str) -> Joint:
    """Trace the forward and the backward of one source; the arguments are those of `differentiate`."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    # Fake tensors as the source's inputs.
    mode = FakeTensorMode()
    with mode:
        args = tuple(
            torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device).requires_grad_(
                a.requires_grad and trainable
            )
            for a in source.inputs
        )

    # Export the joint graph, and run Inductor's passes over it.
    is_differentiable = trainable and any(a.requires_grad for a in source.outputs)
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with context, _use_lazy_graph_module(True):  # each stage would generate code that nobody runs
        with _explain_refusals(), skip_checks(), choose_kernels(source, target):
            joint = aot_export_joint_simple(
                lambda *values: tuple(map(_lay_out, source(*values), source.outputs)),
                args,
                trace_joint=is_differentiable,
                decompositions={**select_decomp_table(), **LEFT_OUT, **_ZEROS},
            )
        _check_joint(joint)
        with mode, V.set_fake_mode(mode):
            round_for_joint_decisions(joint.graph)
            _promote_scales(joint)
            numbers = {node: node.meta["seq_nr"] for node in joint.graph.nodes if "seq_nr" in node.meta}
            joint_graph_passes(joint)
            # In torch 2.14 a pass that replaces an operation by its input (x * 1) gives the input the
            # metadata of the operation. A node stays the derivative of the operation that it was.
            for node in numbers.keys() & set(joint.graph.nodes):
                node.meta["seq_nr"] = numbers[node]
    return Joint(joint, mode, is_differentiable)


def _make_from_recipe(recipe: Recipe) -> Kernel:
    """Differentiate a recipe's source; `store` calls this for kernels that it does not have."""
    deferred_imports.load()
    return differentiate(
        recipe.source, recipe.policy, trainable=recipe.trainable, target=recipe.target, apart=recipe.apart
    )


def kernel_key(source: str, policy: Policy, apart: bool = False) -> str:
    """Return the key of a kernel, which all segments that share the kernel have in common.

    It is the source's own key where the kernel keeps everything, and makes all gradients in one backward.
    """
    parts = [source, policy.key, "apart" if apart else ""]
    return " ".join(part for part in parts if part)


def differentiate_all(
    segments: Segments,
    policies: Sequence[Policy],
    *,
    trainable: bool,
    known: MutableMapping[str, Kernel] | None,
    target: str,
    apart: bool = False,
) -> dict[str, Kernel]:
    """Make a kernel for each distinct source and policy, and return them by `kernel_key`.

    They are named k0, k1, ... in the order of their first use.

    Args:
        policies: the policy of each segment.
        known: kernels that were made before, by key; new ones are added to them.
        target: the type of device that they will run on.
        apart: whether separate kernels make the gradients of leaves.

    Raises:
        SpecError: a policy saves an op that none of its segments has.
    """
    # Make the kernels that are not known yet, and name all in the order of their first use.
    known = {} if known is None else known
    wanted: dict[str, Recipe] = {}
    for segment, policy in zip(segments.segments, policies, strict=True):
        recipe = Recipe(segments.sources[segment.source], policy, trainable, target, apart)
        wanted.setdefault(kernel_key(segment.source, policy, apart), recipe)
    known |= make_all({key: recipe for key, recipe in wanted.items() if key not in known}, _make_from_recipe)
    kernels = {key: replace(known[key], name=f"k{number}") for number, key in enumerate(wanted)}

    # Ops that `save` names but no kernel has are a mistake.
    requested = {s for p in policies for s in p.save}
    missing = sorted(requested - {s for kernel in kernels.values() for s in kernel.kept})
    if trainable and missing:
        # The fix offers the ops of the kernels that save any.
        pairs = zip(segments.segments, policies, strict=True)
        keys = {kernel_key(segment.source, policy, apart) for segment, policy in pairs if policy.save}
        nodes = [n for k in keys for n in kernels[k].forward.graph.nodes if isinstance(n.target, OpOverload)]
        ops = {n.target._schema.name.replace("::", ".") for n in nodes}
        raise SpecError(
            f"save names {len(missing)} op(s) that no recomputed unit has: {', '.join(missing)}.",
            fix=f"'matmul', 'attention', or a glob on: {', '.join(sorted(ops))}.",
        )
    return kernels


def _promote_scales(joint: fx.GraphModule) -> None:
    """Write out the cast of a scaled value whose maximum is taken, where the scale has a wider dtype.

    Inductor's stable softmax takes the maximum before it scales, and would take it in the narrower dtype.
    """
    ops = torch.ops.aten
    for node in joint.graph.find_nodes(op="call_function", target=ops.amax.default):
        scaled = node.args[0]
        if scaled.target not in (ops.mul.Tensor, ops.div.Tensor):
            continue
        dtype = scaled.meta["val"].dtype
        for operand in dict.fromkeys(a for a in scaled.args if isinstance(a, fx.Node)):
            if operand.meta["val"].dtype != dtype:
                with joint.graph.inserting_before(scaled):
                    cast = joint.graph.call_function(
                        torch.ops.prims.convert_element_type.default, (operand, dtype)
                    )
                cast.meta["val"] = cast.target(operand.meta["val"], dtype)
                scaled.replace_input_with(operand, cast)


def _lay_out(value: Tensor, traced: Argument) -> Tensor:
    """Return an output with the strides that its readers were traced with.

    Where ops are decomposed, other strides may come out (index_select of a permuted value). And a composite
    op may end in a view (some attention does), which the export refuses to return.
    """
    if value.stride() != traced.stride and 0 not in traced.stride:
        empty = torch.empty_strided(traced.shape, traced.stride, dtype=value.dtype, device=value.device)
        return empty.copy_(value)
    return value if value._base is None else value.clone()


@contextmanager
def _explain_refusals() -> Iterator[None]:
    """Turn errors of torch that only show when ops are decomposed into errors that a user understands.

    Such errors come from derivatives of unknown shape, and from writes in place that torch cannot undo.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"the derivative of an op in `fn` has a shape that depends on values ({error}).",
            fix="detach what needs no gradient (a value that index_fill sets), or write torch.where.",
        ) from error
    except RuntimeError as error:
        if "functionaliz" not in str(error):
            raise
        raise TraceError(
            f"`fn` writes in place in a way that torch cannot take apart: {str(error).split('. ')[0]}.",
            fix="use the op's out-of-place form, and no as_strided beneath a write.",
        ) from error


def _check_joint(joint: fx.GraphModule) -> None:
    """Refuse what only shows beneath the composite ops: random numbers, and ops with side effects."""
    # These assertions hold already, and torch 2.11 cannot partition them.
    assertion = torch.ops.aten._assert_tensor_metadata.default
    for node in joint.graph.find_nodes(op="call_function", target=assertion):
        joint.graph.erase_node(node)

    # Ops with side effects are wrapped in `with_effects(token, op, ...)`.
    calls = [n for n in joint.graph.nodes if n.op == "call_function"]
    effects = [str(n.args[1]) for n in calls if getattr(n.target, "__name__", "") == "with_effects"]

    # Attention kernels count as random for torch, and draw only where their dropout is not 0.
    seeded = [n for n in calls if _is_seeded(n)]
    random = [
        str(n.target) for n in seeded if arguments_of(n.target, n.args, n.kwargs).get("dropout_p") != 0.0
    ]

    if effects:
        raise TraceError(
            f"`fn` calls operators that act besides returning values ({', '.join(effects[:4])}).",
            fix="leave checks and prints out.",
        )
    if random:
        raise TraceError(
            f"`fn` draws random numbers inside {', '.join(random[:4])}; recomputation would redraw them.",
            fix="use dropout, torch.rand, torch.randn, torch.randint, torch.bernoulli (or their *_like), "
            "or draw the numbers outside and pass them with the batch.",
        )


# The gradient of `sgn` is a tensor without memory, which fake tensors do not know.
_ZEROS = {torch.ops.aten._efficientzerotensor.default: lambda size, **kind: torch.zeros(size, **kind)}


def _flatten_signature(module: fx.GraphModule) -> None:
    """Let a module take and return flat tensors, as kernels do; an exported module takes pytrees."""
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()


def _tag_recomputed(joint: fx.GraphModule, source: SegmentSource) -> None:
    """Tag values that depend on leaves and constants alone, and views of inputs, to be recomputed.

    The backward has leaves, constants and inputs again.
    """
    # A joint graph has more placeholders than the source has inputs: the tangents.
    described = list(zip(joint.graph.find_nodes(op="placeholder"), source.inputs, strict=False))
    constants = [n for n, a in described if a.kind in ("leaf", "constant", "axis")]
    derived = find_derived(joint.graph, {}, constants)
    of_inputs = {n for n, _ in described}  # the inputs and their views
    for node in [n for n in joint.graph.nodes if n.op == "call_function"]:
        is_view = _is_view(node) and of_inputs.issuperset(node.all_input_nodes)
        if is_view:
            of_inputs.add(node)
        if is_view or node in derived:
            _tag(node)


def _tag_saved(joint: fx.GraphModule, source: SegmentSource, save: Sequence[str]) -> tuple[str, ...]:
    """Tag every op of the forward: results that `save` names are kept, all others are recomputed.

    An op and its several results have one tag, because the partitioner goes by the op's.

    Returns:
        Those of `save` that name an op.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    backward = set(placeholders[len(source.inputs) :])  # the tangents, and all that depends on them
    kept: dict[str, None] = {}
    matches: dict[fx.Node, list[str]] = {}  # remembered, since a tag may hide the op that `save` names
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if backward.intersection(node.all_input_nodes):
            backward.add(node)
            continue
        made_by = node.args[0] if node.target is operator.getitem else node
        if made_by not in matches:
            matches[made_by] = [s for s in save if is_saved(made_by, s)]
        kept |= dict.fromkeys(matches[made_by])
        _tag(node, bool(matches[made_by]))
    return tuple(kept)


def _tag(node: fx.Node, saved: bool = False) -> None:
    """Tell the partitioner to save a node, or to recompute it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
    if _is_seeded(node):
        node.target = _Unseeded(node.target)


def _is_seeded(node: fx.Node) -> bool:
    """Return whether torch counts an op as random."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@dataclass(frozen=True)
class _Unseeded:
    """A stand-in for an op that torch counts as random and that is not (attention without dropout).

    The partitioner would thread a generator's state through the op where it has a tag.
    """

    op: OpOverload

    @property
    def __name__(self) -> str:
        return self.op.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of what it reads, or a result of an op that returns views."""
    target = node.target
    if isinstance(target, OpOverload):
        return target.is_view
    return getattr(target, "__name__", "") == "getitem" and _is_view(node.args[0])


def _make_kernel(source: SegmentSource, forward: fx.GraphModule, backward: fx.GraphModule) -> Kernel:
    """Make a kernel of the partitioner's two graphs.

    A value that is an input or an output is not saved again: the backward reads it as such.
    """
    # Name what the forward has by how the backward may refer to it. A value that is returned twice is read as
    # the first of the two; an input that is returned, as the input.
    flat = list(forward.graph.output_node().args[0])
    refs = {n.name: Ref("output", i) for i, n in reversed(list(enumerate(flat[: len(source.outputs)])))}
    refs |= {n.name: Ref("input", i) for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    saved_nodes = [n for n in flat[len(source.outputs) :] if n.name not in refs]
    refs |= {n.name: Ref("saved", i) for i, n in enumerate(saved_nodes)}
    _set_outputs(forward, flat[: len(source.outputs)] + saved_nodes)
    _flatten_signature(forward)

    # Drop missing gradients and unused inputs of the backward.
    results = backward.graph.output_node().args[0]
    grads = tuple(i for i, n in enumerate(results) if isinstance(n, fx.Node))
    _set_outputs(backward, [results[i] for i in grads])
    for node in backward.graph.find_nodes(op="placeholder"):
        if not node.users:
            backward.graph.erase_node(node)
    _flatten_signature(backward)

    # Describe what the backward reads and the forward saves. The export numbers tangents from 1, over the
    # outputs that take one.
    differentiable = [i for i, a in enumerate(source.outputs) if a.requires_grad]
    refs |= {f"tangents_{number}": Ref("tangent", i) for number, i in enumerate(differentiable, 1)}
    inputs = tuple(refs[n.name] for n in backward.graph.find_nodes(op="placeholder"))
    saved = tuple(Argument.of(_get_value(n), "value") for n in saved_nodes)
    return Kernel("", source, forward, Backward(backward, inputs, grads, _find_shared(backward)), saved)


def _find_shared(backward: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of results that may share memory with another one or with an input."""

    def find_base(node: fx.Node) -> fx.Node:
        while node.op == "call_function" and _is_view(node):
            node = node.args[0]
        return node

    bases = [find_base(n) for n in backward.graph.output_node().args[0]]
    return tuple(i for i, n in enumerate(bases) if n.op == "placeholder" or bases.count(n) > 1)


def _set_outputs(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Let a graph return these nodes."""
    output = module.graph.output_node()
    output.args = (tuple(nodes),)
    # These notes of the export and the partitioner describe the old outputs.
    for key in ("desc", "partitioner_tag"):
        output.meta.pop(key, None)


def _get_value(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node that is saved."""
    value: Any = node.meta["val"]
    if not isinstance(value, Tensor):
        raise AssertionError(f"{node} saves {describe(value)}")
    return value
