"""Trace: `fn` on fake leaves -> Program. What a tracer would lose in silence is refused here.

The only module that uses torch's proxy tracer before autograd dispatch, and that makes fake tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard import tree
from fnshard.compiler import stacks
from fnshard.compiler.causal import recognise_causal
from fnshard.compiler.inplace import settle
from fnshard.compiler.normalize import normalize
from fnshard.compiler.operands import check_dtypes
from fnshard.compiler.program import (
    Input,
    OpOverload,
    Outputs,
    Program,
    describe,
    mutated_args,
    replay,
    storage_id,
)
from fnshard.compiler.refuse import higher_order, refusals, user_frame
from fnshard.errors import TraceError, leaves, report
from fnshard.losses import Mean, Whole
from fnshard.spec import LayoutSpec

CLOSURE_LIMIT_bytes = 1 << 20
_lock = threading.RLock()  # the tracer patches torch's globals: one trace at a time


def trace(
    fn: Callable[..., Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    structure: tree.TreeDef,
    specs: Mapping[str, LayoutSpec],
    batch: Sequence[Any],
    *,
    device: torch.device,
    differentiate: bool = True,
    sources: bool = False,
) -> Program:
    """Capture `fn(params, *batch)`.

    Autocast counts where `fn` itself enters it. The mode that the caller happens to be in does not:
    what is traced once must not depend on where it was called from first.

    Args:
        shapes: `{path: (full shape, compute dtype)}`.
        structure: the parameter tree's, in the order of `shapes`.
        specs: resolved; trainable leaves require grad while tracing.
        batch: this rank's micro-batch: tensors (real, meta or fake) and constants.
        differentiate: `fn` is a loss; else any outputs, traced under no_grad.
        sources: keep where each node comes from (`compiler.stacks`), which is slow.

    Raises:
        TraceError: `fn` does what cannot be captured; the message shows the way out.
    """
    with _lock, without_autocast():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = {
            path: _fake(mode, shape, dtype, device, differentiate and bool(specs[path].trainable))
            for path, (shape, dtype) in shapes.items()
        }
        named, batch_structure = flatten_batch(batch)
        tensors = {n: _fake_batch(mode, v, device) for n, v in named.items() if isinstance(v, Tensor)}
        collected: dict[str, Any] = {}

        def flat(leaf_values: list[Tensor], batch_values: list[Tensor]) -> list[Tensor]:
            params = tree.unflatten(leaf_values, structure)
            given = dict(zip(tensors, batch_values, strict=True))
            args = tree.unflatten([given.get(n, v) for n, v in named.items()], batch_structure)
            before = [v.requires_grad for v in leaf_values]
            result = fn(params, *args)
            _check_requires_grad(fakes, before, leaf_values)
            outputs, values = _outputs(result, loss=differentiate)
            collected["outputs"] = outputs
            return values

        given = list(fakes.values()), list(tensors.values())
        graph_module = _capture(flat, *given, differentiate, device, sources)
        inputs = [Input("leaf", p) for p in fakes] + [Input("batch", n) for n in tensors]
        values = {Input("leaf", p): v for p, v in fakes.items()}
        values |= {Input("batch", n): v for n, v in tensors.items()}
        graph, keys, constants = normalize(graph_module, len(inputs))
        _check_constants(constants)
        inputs += [Input("constant", n) for n in constants] + [Input("key", n) for n in keys]
        with mode:
            values |= {Input("constant", n): mode.from_tensor(v.detach()) for n, v in constants.items()}
            key = torch.empty((), dtype=torch.int64, device=device)
        values |= {Input("key", n): key for n in keys}
        with mode, torch.set_grad_enabled(differentiate):
            propagate(graph, [values[i] for i in inputs])
            if _copy_written_inputs(graph, inputs):
                propagate(graph, [values[i] for i in inputs])
        recognise_causal(graph)
        constants = {n: v.detach().to(device) for n, v in constants.items()}
        program = Program(graph, tuple(inputs), constants, collected["outputs"], mode)
        _check_program(program, differentiate)
        with mode, torch.set_grad_enabled(differentiate):
            settle(graph, lambda: propagate(graph, [values[i] for i in inputs]))
        return program


@contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off on every kind of device, and restored behind it."""
    on = [d for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


_AUTOCAST_DEVICES = [d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d)]


def flatten_batch(batch: Sequence[Any]) -> tuple[dict[str, Any], tree.TreeDef]:
    """`{path: leaf}` of a batch, `Whole` taken off, and its structure."""
    named, structure = tree.flatten_with_paths(tuple(batch))
    return {n: v.value if isinstance(v, Whole) else v for n, v in named.items()}, structure


# ------------------------------------------------------------------ fakes


def _fake(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device, grad: bool):
    with mode:
        value = torch.empty(tuple(shape), dtype=dtype, device=device)
    return value.requires_grad_(grad and dtype.is_floating_point)


def _fake_batch(mode: FakeTensorMode, value: Tensor, device: torch.device) -> Tensor:
    with mode:
        return torch.empty_strided(value.shape, _dense(value), dtype=value.dtype, device=device)


def _dense(value: Tensor) -> tuple[int, ...]:
    # Micro-batching and collation may hand over any strides; the step copies those that are odd.
    return torch.empty(value.shape, device="meta").stride()


def propagate(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """Run the graph on fakes, and keep each node's value (with its `requires_grad`) in `meta`."""

    def keep(node: fx.Node, value: Any) -> None:
        node.meta["val"] = value

    replay(graph, inputs, keep)


def _copy_written_inputs(graph: fx.Graph, inputs: Sequence[Input]) -> bool:
    """Give `fn` a private copy of each batch leaf that it writes to; refuse it for constants.

    The tracer has by then run the write on the constant itself, and what `fn` leaves there for the
    next step (a counter, an average) would be lost.
    """
    written = {storage_id(arg.meta["val"]) for node in graph.nodes for arg in mutated_args(node)}
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    touched = [(n, i) for n, i in zip(nodes, inputs, strict=True) if storage_id(n.meta["val"]) in written]
    constants = [describe(n.meta["val"]) for n, i in touched if i.kind == "constant"]
    if constants:
        raise TraceError(
            report(
                f"`fn` writes in place to {len(constants)} tensor(s) that it closes over:",
                constants,
                "clone it first; what must live from step to step comes with the batch and goes out in aux.",
            )
        )
    found = [n for n, i in touched if i.kind == "batch"]
    for node in found:
        with graph.inserting_after(nodes[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return bool(found)


# ------------------------------------------------------------------ capture


def _capture(
    flat: Callable,
    leaf_fakes: list,
    batch_fakes: list,
    differentiate: bool,
    device: torch.device,
    sources: bool = False,
) -> fx.GraphModule:
    try:
        noting = stacks.kept() if sources else nullcontext()
        with refusals(device), torch.set_grad_enabled(differentiate), noting:
            return make_fx(flat, tracing_mode="fake", pre_dispatch=True)(leaf_fakes, batch_fakes)
    except TraceError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(_data_dependent(str(error), error)) from error
    except UnsupportedOperatorException as error:
        raise TraceError(_no_fake(error)) from error
    except RuntimeError as error:
        said = str(error)
        if any(w in said for w in _DATA_DEPENDENT) or "GuardOnDataDependent" in type(error).__name__:
            raise TraceError(_data_dependent(said.splitlines()[0], error)) from error
        if "no fake impl" in said:
            raise TraceError(_no_fake(error)) from error
        if type(error).__module__ == "torch._dynamo.exc":
            raise higher_order("torch.cond or another operator that takes functions") from error
        raise


_DATA_DEPENDENT = ("data-dependent", ".numpy() is not supported")


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _no_fake(error: Exception) -> str:
    return report(
        f"`fn` calls an operator that cannot run on tensors without values: {str(error).splitlines()[0]}",
        fix="write it with plain torch ops; for a torch.library.custom_op add register_fake.",
    )


def _data_dependent(what: str, error: Exception) -> str:
    where = user_frame(error)
    return report(
        f"control flow or a shape in `fn` depends on a tensor's value ({what}){where and f', at {where}'}.",
        fix="choose with torch.where, mask instead of indexing by a condition, and pass numbers that "
        "are known before the step as plain Python arguments.",
    )


# ------------------------------------------------------------------ outputs


def _outputs(result: Any, loss: bool) -> tuple[Outputs, list[Tensor]]:
    values: list[Tensor] = []

    def add(value: Tensor) -> int:
        values.append(value)
        return len(values) - 1

    def aux_entry(leaf: Any) -> tuple[Any, ...]:
        if isinstance(leaf, Mean):
            _check_mean(leaf, "aux")
            return ("mean", add(leaf.total), add(_count(leaf)))
        if isinstance(leaf, Tensor):
            kind = "scalar" if loss and leaf.dim() == 0 else "tensor"
            return (kind, add(leaf))
        return ("python", leaf)

    if not loss:
        flat, structure = tree.flatten(result)
        return Outputs(None, None, structure, tuple(aux_entry(leaf) for leaf in flat)), values
    head, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(head, Mean):
        _check_mean(head, "the loss")
    total = head.total if isinstance(head, Mean) else head
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        what = describe(total) if isinstance(total, Tensor) else type(total).__name__
        raise TraceError(
            report(
                f"`fn` must return a loss that is a 0-d float tensor, or (loss, aux); it returned {what}.",
                fix="reduce it: loss.mean(), or fs.Mean(total, count) for an exact mean over all ranks.",
            )
        )
    index = add(total)
    count = add(_count(head)) if isinstance(head, Mean) else None
    flat, structure = tree.flatten(aux) if aux is not None else ([], None)
    entries = tuple(aux_entry(leaf) for leaf in flat)
    bound = head.bound if isinstance(head, Mean) else None
    return Outputs(index, count, structure, entries, bound), values


def _check_mean(mean: Mean, place: str) -> None:
    wrong = []
    total, count, bound = mean.total, mean.count, mean.bound
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.dtype.is_floating_point:
        wrong.append(f"total is {_kind(total)}, not a 0-d float tensor")
    counted = isinstance(count, Tensor) and count.dim() == 0 and not count.dtype.is_complex
    if not counted and not _is_number(count):
        wrong.append(f"count is {_kind(count)}, not a 0-d tensor or a number")
    if bound is not None and not (_is_number(bound) and 0 < bound < float("inf")):
        wrong.append(f"bound is {_kind(bound)}, not a positive finite number or None")
    if wrong:
        raise TraceError(
            report(
                f"`fn` returns in {place} a Mean that is none:",
                wrong,
                "fs.Mean(losses.sum(), mask.sum()): sums over this rank's items, not vectors of them.",
            )
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {str(value)[:40]}"


def _count(mean: Mean) -> Tensor:
    count = mean.count
    if isinstance(count, Tensor):
        return count.detach().to(torch.float32) if not count.dtype.is_floating_point else count.detach()
    return torch.full((), float(count), device=mean.total.device)


# ------------------------------------------------------------------ checks after the capture


def _check_requires_grad(paths: Iterable[str], before: Sequence[bool], leaf_values: Sequence[Tensor]) -> None:
    changed = [p for p, b, v in zip(paths, before, leaf_values, strict=True) if v.requires_grad != b]
    if changed:
        raise TraceError(
            report(
                f"`fn` changes requires_grad of {leaves(len(changed))}, which a trace loses:",
                [f"params[{p!r}]" for p in changed],
                "say trainable=True or False in the leaf's spec, or read it through .detach().",
            )
        )


def _check_constants(constants: Mapping[str, Tensor]) -> None:
    lost = [describe(v) for v in constants.values() if isinstance(v, FakeTensor)]
    if lost:
        raise TraceError(
            report(
                f"the trace lost sight of {len(lost)} value(s) that `fn` computes:",
                lost,
                "look for torch.jit functions, C++ extensions that are no custom_op, and tensors that a "
                "module kept from an earlier trace (compute such caches beforehand).",
            )
        )
    wrong = [
        f"{describe(v)}" + (" that requires grad" if v.requires_grad else "")
        for v in constants.values()
        if v.requires_grad or _bytes(v) > CLOSURE_LIMIT_bytes
    ]
    if wrong:
        raise TraceError(
            report(
                f"`fn` closes over {len(wrong)} tensor(s) that must be arguments (they require grad, "
                "or are larger than 1 MB):",
                wrong,
                "put them into the parameter tree (trainable=False if frozen), or pass them with the batch.",
            )
        )


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided


def _check_program(program: Program, differentiate: bool) -> None:
    sparse = [n for n in program.graph.nodes if _is_sparse(n.meta.get("val"))]
    if sparse:
        raise TraceError(
            report(
                f"`fn` makes sparse tensors ({', '.join(str(n.target) for n in sparse[:4])}), "
                "which cannot be cut and differentiated.",
                fix="use dense ones: gather and scatter by index.",
            )
        )
    _check_written(program)
    check_dtypes(program)
    if differentiate and not program.results[program.outputs.loss].meta["val"].requires_grad:
        raise TraceError(
            report(
                "the loss depends on no trainable leaf.",
                fix="set trainable=True in the spec of a leaf it reads, and look for detach or no_grad.",
            )
        )


def _check_written(program: Program) -> None:
    """Refuse writes to leaves, and to running statistics wherever they are kept."""
    named: dict[int, str] = {}
    for node, place in zip(program.placeholders, program.inputs, strict=True):
        if place.kind == "leaf":
            named[storage_id(node.meta["val"])] = f"params[{place.name!r}]"
        elif place.kind == "constant":
            named[storage_id(node.meta["val"])] = f"{describe(node.meta['val'])} that it closes over"
    written: dict[int, str] = {}
    for node in program.graph.nodes:
        for arg in [*mutated_args(node), *_running_stats(node)]:
            memory = storage_id(arg.meta["val"])
            if memory in named:
                op = str(node.target).removesuffix(".default")
                written.setdefault(memory, f"{named[memory]} by {op}")
    if written:
        raise TraceError(
            report(
                f"`fn` changes {leaves(len(written))} in place:",
                list(written.values()),
                "a step is a pure function. For BatchNorm: torch.func.replace_all_batch_norm_modules_(model) "
                "or GroupNorm; InstanceNorm: track_running_stats=False; spectral_norm: in eval mode, or "
                "another norm; Embedding: max_norm=None; else return the new value in aux.",
            )
        )


def _running_stats(node: fx.Node) -> list[fx.Node]:
    """What a batch or instance norm in train mode updates, though its schema does not say so."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    given = {
        a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
        for i, a in enumerate(node.target._schema.arguments)
    }
    if not (given.get("training") or given.get("use_input_stats")):
        return []
    return [v for k in ("running_mean", "running_var") if isinstance(v := given.get(k), fx.Node)]
