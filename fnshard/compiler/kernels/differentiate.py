"""Differentiate: each distinct segment -> a forward and a backward graph.

The only module that uses AOTAutograd's joint export and its min-cut partitioner (He & Yu, MLSys
2023). What depends on leaves alone is recomputed, never saved: leaves are gathered again for the
backward.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.checkpoint import CheckpointPolicy

from fnshard.compiler.frontend.substitutes import LEFT_OUT, unchecked
from fnshard.compiler.ir.program import OpOverload, arguments_of, describe
from fnshard.compiler.kernels.attention import choosing
from fnshard.compiler.kernels.canonical import Argument, Source
from fnshard.compiler.kernels.derived import derived
from fnshard.compiler.kernels.remat import Policy, is_saved
from fnshard.compiler.kernels.segments import Segments, Way
from fnshard.compiler.kernels.weight_grads import split_backward
from fnshard.compiler.rewrites.rounding import hide_rounding, round_decisions, show_rounding
from fnshard.errors import SpecError, TraceError


@dataclass(frozen=True)
class Ref:
    """A reference to what a backward kernel reads: ("input" | "output" | "saved" | "tangent" | "between",
    index)."""

    kind: str
    index: int


Refs = tuple[Ref, ...]


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward kernel, or a half of one: `module(*inputs) -> (*gradients, *between)`.

    Args:
        inputs: what it reads.
        grads: of each gradient, the source's input that it is of.
        shared: gradients (positions in `grads`) that may be one tensor with another result or with an input,
            so that nobody may write to them.
    """

    module: fx.GraphModule
    inputs: Refs
    grads: tuple[int, ...]
    shared: tuple[int, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @cached_property
    def tangent_strides(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return for each tangent that it reads its place, and the strides it was traced with."""
        nodes = self.graph.find_nodes(op="placeholder")
        return tuple(
            (i, tuple(node.meta["val"].stride()))
            for i, (ref, node) in enumerate(zip(self.inputs, nodes, strict=True))
            if ref.kind == "tangent"
        )


@dataclass(frozen=True, eq=False)
class Kernel:
    """A distinct segment's forward and backward, as graphs of core ATen ops.

    `forward(*inputs) -> (*outputs, *saved)`. `saved` describes what is kept for the backward besides inputs
    and outputs. Where the gradients of leaves are apart, `weights` makes those that take products, and
    `backward` the cotangents and what else there is; either is None where it has nothing to make. `between`
    describes what `backward` then hands on to `weights`. `kept`: the ops of the remat policy's `save` that
    it has.
    """

    name: str
    source: Source
    forward: fx.GraphModule
    backward: Backward | None
    saved: tuple[Argument, ...] = ()
    weights: Backward | None = None
    between: tuple[Argument, ...] = ()
    kept: tuple[str, ...] = ()

    @cached_property
    def halves(self) -> Mapping[Way, Backward]:
        """Return the backward kernels that there are."""
        both = {Way.BACKWARD: self.backward, Way.WEIGHTS: self.weights}
        return {way: half for way, half in both.items() if half is not None}

    @cached_property
    def modules(self) -> Mapping[Way, fx.GraphModule]:
        """Return the graphs that there are."""
        return {Way.FORWARD: self.forward, **{way: half.module for way, half in self.halves.items()}}

    @property
    def grads(self) -> tuple[int, ...]:
        """Indices of the inputs that get a gradient."""
        return tuple(index for half in self.halves.values() for index in half.grads)

    @property
    def tangents(self) -> tuple[int, ...]:
        """Indices of the outputs that take a tangent."""
        return tuple(i for i, a in enumerate(self.source.outputs) if a.requires_grad)

    def as_text(self) -> str:
        """Signature, what is saved, and all graphs."""
        saved = ", ".join(map(str, self.saved))
        codes = [module.code.strip() for module in self.modules.values()]
        return "\n".join([f"{self.name}: saves [{saved}]", *codes])

    __str__ = as_text


@dataclass(frozen=True, eq=False)
class Joint:
    """A segment's forward and backward in one graph, before it is said what is kept between the two.

    Without a backward it is the forward alone (`is_differentiable` is False).
    """

    module: fx.GraphModule
    mode: FakeTensorMode
    is_differentiable: bool


def differentiate(
    source: Source, policy: Policy, *, trainable: bool, target: str, apart: bool = False
) -> Kernel:
    """Forward and backward of one source, without a name.

    Args:
        policy: what is saved. (Random ops are functions of a key that is an input, so that recomputation
            draws the same numbers.)
        trainable: False traces the forward alone.
        target: the type of device that it will run on; it may be traced elsewhere.
        apart: the gradients of leaves are made by a kernel of their own.
    """
    # Imported here: they bring Dynamo and Inductor, which take seconds; `import fnshard` should not.
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    traced = trace_joint(source, trainable, target)
    mode = traced.mode
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with context, _use_lazy_graph_module(True), mode, V.set_fake_mode(mode):
        joint = _make_graph_module(traced.module, copy.deepcopy(traced.module.graph))  # it is rewritten here
        if not traced.is_differentiable:
            _flatten_signature(joint)
            return Kernel("", source, joint, None)
        kept = _must_save(joint, source, policy.save) if policy.save else ()
        _must_recompute(joint, source)
        rounds = hide_rounding(joint.graph)
        # At 0 the partitioner saves inputs and heeds no tags; with tags on every op it has no choice left.
        with functorch_config.patch(
            activation_memory_budget=1.0 if kept else policy.budget, ban_recompute_materialized_backward=False
        ):
            forward, backward = min_cut_rematerialization_partition(
                joint,
                (),
                num_fwd_outputs=len(source.outputs),
                static_lifetime_input_indices=[i for i, a in enumerate(source.inputs) if a.kind == "leaf"],
            )
    for graph in (forward.graph, backward.graph) if rounds else ():
        show_rounding(graph)
    for node in [*forward.graph.nodes, *backward.graph.nodes]:
        if isinstance(node.target, _Unseeded):
            node.target = node.target.op
    kernel = replace(_kernel(source, forward, backward), kept=kept)
    return _put_apart(kernel) if apart else kernel


def _put_apart(kernel: Kernel) -> Kernel:
    """Return the kernel whose gradients of leaves are made apart, as far as they take products."""
    whole, inputs = kernel.backward, kernel.source.inputs
    kinds = [inputs[ref.index].kind if ref.kind == "input" else ref.kind for ref in whole.inputs]
    halves = split_backward(
        whole.module,
        [inputs[index].kind == "leaf" for index in whole.grads],
        leaves={i for i, kind in enumerate(kinds) if kind == "leaf"},
        on_hand={i for i, kind in enumerate(kinds) if kind in ("batch", "constant", "axis", "key")},
    )

    def half(module: fx.GraphModule | None, read: Refs, grads: Iterable[int]) -> Backward | None:
        return module and Backward(module, read, tuple(whole.grads[n] for n in grads), _shared(module))

    first, second = (
        tuple(whole.inputs[n] for n in read) for read in (halves.first_inputs, halves.second_inputs)
    )
    between = tuple(Ref("between", number) for number in range(len(halves.between)))
    return replace(
        kernel,
        backward=half(halves.first, first, halves.first_grads),
        weights=half(halves.second, (*second, *between), halves.second_grads),
        between=tuple(Argument.of(_value(n), "value") for n in halves.between),
    )


@lru_cache(maxsize=16)  # a search makes kernels of a few sources by many policies
def trace_joint(source: Source, trainable: bool, target: str) -> Joint:
    """Trace the forward and the backward of one source; arguments as of `differentiate`."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    mode = FakeTensorMode()
    with mode:
        args = tuple(
            torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device).requires_grad_(
                a.requires_grad and trainable
            )
            for a in source.inputs
        )
    differentiable = trainable and any(a.requires_grad for a in source.outputs)
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with context, _use_lazy_graph_module(True):  # each stage makes code that nobody runs
        with _refusals(), unchecked(), choosing(source, target):
            joint = aot_export_joint_simple(
                lambda *values: tuple(map(_laid_out, source(*values), source.outputs)),
                args,
                trace_joint=differentiable,
                decompositions={**select_decomp_table(), **LEFT_OUT, **_ZEROS},
            )
        _check_joint(joint)
        with mode, V.set_fake_mode(mode):
            round_decisions(joint.graph)
            _promote_scales(joint)
            numbers = {node: node.meta["seq_nr"] for node in joint.graph.nodes if "seq_nr" in node.meta}
            joint_graph_passes(joint)
            # A pass that takes an operation for its input (x * 1) gives the input the operation's metadata in
            # torch 2.14. A node stays the derivative of what it was.
            for node in numbers.keys() & set(joint.graph.nodes):
                node.meta["seq_nr"] = numbers[node]
    return Joint(joint, mode, differentiable)


def kernel_key(source: str, policy: Policy, apart: bool = False) -> str:
    """Return what segments that share a kernel have in common; a source's own key where it keeps
    everything, and makes all gradients in one backward."""
    return " ".join([source, *filter(None, [policy.key, "apart" * apart])])


def differentiate_all(
    segments: Segments,
    policies: Sequence[Policy],
    *,
    trainable: bool,
    known: MutableMapping[str, Kernel] | None,
    target: str,
    apart: bool = False,
) -> dict[str, Kernel]:
    """One kernel per distinct source and policy, by `kernel_key`, named k0, k1, ... in order of first use.

    Args:
        policies: of each segment.
        known: kernels made before, by key; taken from it and added to it.
        target: the type of device that they will run on.
        apart: the gradients of leaves are made by kernels of their own.

    Raises:
        SpecError: a policy saves an op that none of its segments has.
    """
    known = {} if known is None else known
    out: dict[str, Kernel] = {}
    for segment, policy in zip(segments.segments, policies, strict=True):
        key = kernel_key(segment.source, policy, apart)
        if key not in known:
            source = segments.sources[segment.source]
            known[key] = differentiate(source, policy, trainable=trainable, target=target, apart=apart)
        if key not in out:
            out[key] = replace(known[key], name=f"k{len(out)}")
    wanted_tags = {s for p in policies for s in p.save}
    missing = sorted(wanted_tags - {s for kernel in out.values() for s in kernel.kept})
    if trainable and missing:
        saving = [(s, p) for s, p in zip(segments.segments, policies, strict=True) if p.save]
        keys = {kernel_key(s.source, p, apart) for s, p in saving}
        nodes = [n for k in keys for n in out[k].forward.graph.nodes if isinstance(n.target, OpOverload)]
        ops = {n.target._schema.name.replace("::", ".") for n in nodes}
        raise SpecError(
            f"save names {len(missing)} op(s) that no recomputed unit has: {', '.join(missing)}.",
            fix=f"'matmul', 'attention', or a glob on: {', '.join(sorted(ops))}.",
        )
    return out


def _promote_scales(joint: fx.GraphModule) -> None:
    """Write out the cast of a scaled value whose maximum is taken, where the scale has a wider dtype.

    Inductor's stable softmax takes the maximum before it scales, in the dtype of what is scaled.
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


def _laid_out(value: Tensor, traced: Argument) -> Tensor:
    """An output with the strides that those who read it were traced with.

    Where ops are taken apart, other strides may come out (index_select of a permuted value); and a composite
    op may end in a view (some attention does), which the export refuses to return.
    """
    if value.stride() != traced.stride and 0 not in traced.stride:
        return torch.empty_strided(traced.shape, traced.stride, dtype=value.dtype, device=value.device).copy_(
            value
        )
    return value if value._base is None else value.clone()


@contextmanager
def _refusals() -> Iterator[None]:
    """Refuse what only shows where ops are taken apart: derivatives of unknown shape, writes torch cannot
    undo."""
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
    holds = torch.ops.aten._assert_tensor_metadata.default  # already; torch 2.11 cannot partition it
    for check in joint.graph.find_nodes(op="call_function", target=holds):
        joint.graph.erase_node(check)
    calls = [n for n in joint.graph.nodes if n.op == "call_function"]
    effects = [str(n.args[1]) for n in calls if getattr(n.target, "__name__", "") == "with_effects"]
    random = [str(n.target) for n in calls if _draws(n)]
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


# The gradient of `sgn` has no memory, which fake tensors do not know.
_ZEROS = {torch.ops.aten._efficientzerotensor.default: lambda size, **kind: torch.zeros(size, **kind)}


def _draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers; attention kernels only do where their dropout is not 0."""
    return _seeded(node) and arguments_of(node.target, node.args, node.kwargs).get("dropout_p") != 0.0


def _flatten_signature(module: fx.GraphModule) -> None:
    """An exported module takes and returns pytrees; kernels take and return flat tensors."""
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()


def _must_recompute(joint: fx.GraphModule, source: Source) -> None:
    """Tag what rests on leaves and constants alone, and views of inputs: both are there again later."""
    named = list(zip(joint.graph.find_nodes(op="placeholder"), source.inputs, strict=False))
    rests = derived(joint.graph, {}, [n for n, a in named if a.kind in ("leaf", "constant", "axis")])
    of_input = {n for n, _ in named}
    for node in [n for n in joint.graph.nodes if n.op == "call_function"]:
        is_view = _views(node) and of_input.issuperset(node.all_input_nodes)
        of_input.update([node] if is_view else [])
        if is_view or node in rests:
            _tag(node)


def _must_save(joint: fx.GraphModule, source: Source, save: Sequence[str]) -> tuple[str, ...]:
    """Tag every op of the forward: results of `save` are kept, all others made again.

    An op with several results has the tag of these: the partitioner goes by the op's.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    backward = set(placeholders[len(source.inputs) :])  # and all that rests on a tangent
    kept, named = dict[str, None](), dict[fx.Node, list[str]]()  # a tag may take an op's name away
    for node in joint.graph.nodes:
        if node.op != "call_function" or backward.intersection(node.all_input_nodes):
            backward.update([node] if node.op == "call_function" else [])
            continue
        made_by = node.args[0] if node.target is operator.getitem else node
        hits = named.setdefault(made_by, [s for s in save if is_saved(made_by, s)])
        kept |= dict.fromkeys(hits)
        _tag(node, bool(hits))
    return tuple(kept)


def _tag(node: fx.Node, saved: bool = False) -> None:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
    if _seeded(node):
        node.target = _Unseeded(node.target)


def _seeded(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@dataclass(frozen=True)
class _Unseeded:
    """An op that torch takes for random and that is not (attention without dropout): under a tag the
    partitioner would thread a generator's state through it.
    """

    op: OpOverload

    @property
    def __name__(self) -> str:
        return self.op.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _views(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload):
        return target.is_view
    return getattr(target, "__name__", "") == "getitem" and _views(node.args[0])


def _kernel(source: Source, forward: fx.GraphModule, backward: fx.GraphModule) -> Kernel:
    flat = list(forward.graph.output_node().args[0])
    refs = {n.name: Ref("output", i) for i, n in reversed(list(enumerate(flat[: len(source.outputs)])))}
    refs |= {n.name: Ref("input", i) for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    saved_nodes = [n for n in flat[len(source.outputs) :] if n.name not in refs]
    refs |= {n.name: Ref("saved", i) for i, n in enumerate(saved_nodes)}
    _set_outputs(forward, flat[: len(source.outputs)] + saved_nodes)
    _flatten_signature(forward)
    grads = _prune_backward(backward)
    taking = [i for i, a in enumerate(source.outputs) if a.requires_grad]
    refs |= {f"tangents_{number}": Ref("tangent", i) for number, i in enumerate(taking, 1)}
    read = tuple(refs[n.name] for n in backward.graph.find_nodes(op="placeholder"))
    descriptions = tuple(Argument.of(_value(n), "value") for n in saved_nodes)
    return Kernel("", source, forward, Backward(backward, read, grads, _shared(backward)), descriptions)


def _prune_backward(backward: fx.GraphModule) -> tuple[int, ...]:
    """Drop missing gradients and unused inputs; returns which input each gradient is of."""
    flat = list(backward.graph.output_node().args[0])
    kept = tuple(i for i, n in enumerate(flat) if isinstance(n, fx.Node))
    _set_outputs(backward, [flat[i] for i in kept])
    for node in backward.graph.find_nodes(op="placeholder"):
        if not node.users:
            backward.graph.erase_node(node)
    _flatten_signature(backward)
    return kept


def _shared(backward: fx.GraphModule) -> tuple[int, ...]:
    """Return which results may share memory with another one or with an input."""

    def base(node: fx.Node) -> fx.Node:
        while node.op == "call_function" and _views(node):
            node = node.args[0]
        return node

    bases = [base(n) for n in backward.graph.output_node().args[0]]
    return tuple(i for i, n in enumerate(bases) if n.op == "placeholder" or bases.count(n) > 1)


def _set_outputs(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    output = module.graph.output_node()
    output.args = (tuple(nodes),)
    for key in ("desc", "partitioner_tag"):
        output.meta.pop(key, None)


def _value(node: fx.Node) -> Tensor:
    value: Any = node.meta["val"]
    if not isinstance(value, Tensor):
        raise AssertionError(f"{node} saves {describe(value)}")
    return value
