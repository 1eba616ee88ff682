"""Trace: `fn` on fake leaves -> Program. What a tracer would lose in silence is refused here.

The only module that uses torch's proxy tracer before autograd dispatch, and that makes fake tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard import tree
from fnshard.compiler.deferred.host_random import GENERATORS, undrawn
from fnshard.compiler.frontend.exchange import copy_outgoing, tracing_on
from fnshard.compiler.frontend.functions import HOOK
from fnshard.compiler.frontend.limits import Limits
from fnshard.compiler.frontend.normalize import normalize
from fnshard.compiler.frontend.outputs import check_count, read_outputs
from fnshard.compiler.frontend.ragged import run as ragged_run
from fnshard.compiler.frontend.transforms import Differentiable, Retrace, is_of_a_level
from fnshard.compiler.frontend.unsupported import refusals
from fnshard.compiler.ir import source_lines
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.failures import Call, explain, higher_order, refused_at
from fnshard.compiler.ir.guard import guard_of
from fnshard.compiler.ir.program import (
    Input,
    Program,
    describe,
    mutated_args,
    propagate,
    storage_id,
)
from fnshard.compiler.ir.reachable import is_plain, unspoiled
from fnshard.compiler.ir.recording import recorded
from fnshard.compiler.ir.source_lines import user_traceback
from fnshard.compiler.rewrites.causal_mask import recognise_causal
from fnshard.compiler.rewrites.check_dtypes import check_dtypes
from fnshard.compiler.rewrites.hooks import apply_hooks
from fnshard.compiler.rewrites.in_place import functionalize
from fnshard.compiler.rewrites.rounding import keep_rounding
from fnshard.errors import TraceError, leaves
from fnshard.layout.spec import LayoutSpec
from fnshard.losses import unwrapped
from fnshard.mesh import Mesh

CLOSURE_LIMIT_bytes = 1 << 20
_lock = threading.RLock()  # the tracer patches torch's globals: one trace at a time


def trace(
    fn: Callable[..., Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    structure: tree.TreeDef,
    specs: Mapping[str, LayoutSpec],
    batch: Arguments | Sequence[Any],
    *,
    device: torch.device,
    mesh: Mesh,
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
        mesh: whose axes its exchanges name.
        differentiate: `fn` is a loss; else any outputs, traced under no_grad.
        sources: keep where each node comes from (`compiler.ir.source_lines`), which is slow.

    Raises:
        TraceError: `fn` does what cannot be captured; the message shows the way out.
    """
    run = partial(_trace, fn, shapes, structure, specs, batch, device, differentiate, sources)
    with tracing_on(mesh):
        try:
            return run(lambda flat: flat)
        except Retrace:
            return run(Differentiable)


def _trace(
    fn: Callable[..., Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    structure: tree.TreeDef,
    specs: Mapping[str, LayoutSpec],
    batch: Arguments | Sequence[Any],
    device: torch.device,
    differentiate: bool,
    sources: bool,
    prepared: Callable[[Callable], Callable],
) -> Program:
    runs = with_functions(fn, structure)
    with (
        _lock,
        without_autocast(),
        unspoiled(runs, _is_fake) as reached,
        undrawn(reached.of_type(GENERATORS)),
        Limits() as excesses,
    ):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = {
            path: _fake(mode, shape, dtype, device, differentiate and bool(specs[path].trainable))
            for path, (shape, dtype) in shapes.items()
        }
        named, batch_structure = flatten_batch(batch)
        tensors = {n: _fake_batch(mode, v, device) for n, v in named.items() if isinstance(v, Tensor)}
        collected: dict[str, Any] = {}
        names: dict[int, str] = {}

        def explained(error: Exception, failed: Call | None) -> Exception:
            return explain(error, failed, names, fn, {n: tensors.get(n, v) for n, v in named.items()})

        def flat(leaf_values: list[Tensor], batch_values: list[Tensor]) -> list[Tensor]:
            params = tree.unflatten(leaf_values, structure)
            given = dict(zip(tensors, batch_values, strict=True))
            args = tree.unflatten([given.get(n, v) for n, v in named.items()], batch_structure)
            excesses.clear()
            before = [v.requires_grad for v in leaf_values]
            names.update({id(v): f"params[{p!r}]" for p, v in zip(fakes, leaf_values, strict=True)})
            names.update({id(v): f"batch[{n!r}]" for n, v in given.items()})
            result = args.call(fn, params)
            _check_requires_grad(fakes, before, leaf_values)
            collected["outputs"], values = excesses.append(*read_outputs(result, loss=differentiate))
            return values

        def padded(run: Callable[..., list[Tensor]], *values: list[Tensor]) -> list[Tensor]:
            collected["outputs"], values = excesses.append(collected["outputs"], run(*values))
            return values

        given = list(fakes.values()), list(tensors.values())
        with recorded() as ran:
            graph_module, hooks = _capture(
                prepared(flat), padded, given, differentiate, device, explained, sources
            )
        inputs = [Input("leaf", p) for p in fakes] + [Input("batch", n) for n in tensors]
        values = {Input("leaf", p): v for p, v in fakes.items()}
        values |= {Input("batch", n): v for n, v in tensors.items()}
        graph, keys, constants = normalize(graph_module, len(inputs))
        _check_constants(constants)
        copied = [v for v in constants.values() if v.device.type != device.type and is_plain(v)]
        constants = {n: v.detach().to(device) for n, v in constants.items()}
        inputs += [Input("constant", n) for n in constants] + [Input("key", n) for n in keys]
        with mode:
            values |= {Input("constant", n): mode.from_tensor(v) for n, v in constants.items()}
            key = torch.empty((), dtype=torch.int64, device=device)
        values |= {Input("key", n): key for n in keys}
        with mode, torch.set_grad_enabled(differentiate):
            propagate(graph, _example_inputs(inputs, values))
            program = Program(graph, tuple(inputs), constants, collected["outputs"], mode)
            _check_program(program, specs, differentiate)
            program = _with_writes(program, hooks)
            pure = functionalize(graph)
            if pure is not graph:
                propagate(pure, _example_inputs(inputs, values))
        apply_hooks(pure, hooks)
        for rewrite in (recognise_causal, keep_rounding, copy_outgoing):
            rewrite(pure)
        guard = guard_of(runs, ran, reached, copied, constants.values())
        return replace(program, graph=pure, guard=guard, rows=_rows(batch))


def with_functions(fn: Callable[..., Any], structure: tree.TreeDef) -> Callable[..., Any]:
    """What can run: `fn`, and the functions in its parameter tree."""
    functions = [v for _, v in structure.constants if callable(v)]
    return partial(fn, *functions) if functions else fn


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


_exact: list[tuple[bool, bool]] = []  # of who is within `deterministic`: what was the process's own choice
_exact_lock = threading.Lock()


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Where `on`, torch's deterministic algorithms and Inductor's, and behind it what was before.

    The switch is the process's, and ranks may be threads: the last to leave puts it back. The environment's
    CUBLAS_WORKSPACE_CONFIG stays set: cuBLAS reads it once.
    """
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses cuBLAS
    with _exact_lock:
        chosen = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        _exact.append(_exact[0] if _exact else chosen)
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        with _exact_lock:
            before, warns = _exact.pop()
            if not _exact:
                torch.use_deterministic_algorithms(before, warn_only=warns)


_AUTOCAST_DEVICES = [d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d)]


def flatten_batch(batch: Arguments | Sequence[Any]) -> tuple[dict[str, Any], tree.TreeDef]:
    """`{path: leaf}` of a batch, `Whole` and `Sequence` taken off, and its structure."""
    named, structure = Arguments.of(batch).leaves
    return {n: unwrapped(v) for n, v in named.items()}, structure


# ------------------------------------------------------------------ fakes


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, FakeTensor) or is_of_a_level(value)


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


def _example_inputs(inputs: Sequence[Input], values: Mapping[Input, Tensor]) -> list[Tensor]:
    """What a graph is run on: a write would make a batch leaf's own fake require grad."""
    return [values[i] if i.kind == "leaf" else values[i].detach() for i in inputs]


def _check_written_constants(graph: fx.Graph, inputs: Sequence[Input]) -> None:
    """Refuse writes to tensors that `fn` closes over.

    The tracer has by then run the write on the tensor itself, and what `fn` leaves there for the next step (a
    counter, an average) would be lost.
    """
    written = {storage_id(arg.meta["val"]) for node in graph.nodes for arg in mutated_args(node)}
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    constants = [
        describe(n.meta["val"])
        for n, i in zip(nodes, inputs, strict=True)
        if i.kind == "constant" and storage_id(n.meta["val"]) in written
    ]
    if constants:
        raise TraceError(
            f"`fn` writes in place to {len(constants)} tensor(s) that it closes over:",
            constants,
            "clone it first; what must live from step to step is a leaf of the parameter tree "
            "(trainable=False), which a step stores.",
        )


# ------------------------------------------------------------------ capture


def _capture(
    flat: Callable[..., list[Tensor]],
    padded: Callable[..., list[Tensor]],
    fakes: tuple[list[Tensor], list[Tensor]],
    differentiate: bool,
    device: torch.device,
    explained: Callable[[Exception, Call | None], Exception],
    sources: bool = False,
) -> tuple[fx.GraphModule, int]:
    """The graph that `make_fx` records, and how many of its results, the last ones, are gradient hooks.

    Args:
        padded: as `flat`, of a function that takes its place where lengths depend on data.
        explained: an error that leaves `fn`, as it is to be raised.
    """
    with refusals(device) as calls, torch.set_grad_enabled(differentiate):
        try:
            try:
                with source_lines.kept() if sources else nullcontext():
                    hooked = make_fx(
                        lambda leaves, batch: [*flat(leaves, batch), *calls.hooks],
                        tracing_mode="fake",
                        pre_dispatch=True,
                    )
                    return hooked(*fakes), len(calls.hooks)
            except (DynamicOutputShapeException, DataDependentOutputException):
                calls.hooks.clear()
                run = partial(padded, ragged_run.capture(flat, *fakes))
                if calls.hooks:
                    raise TraceError(HOOK.format(name="where lengths depend on data")) from None
                return make_fx(run, tracing_mode="fake", pre_dispatch=True)(*fakes), 0
        except Exception as error:
            if type(error).__module__ == "torch._dynamo.exc":
                raise higher_order("torch.cond or another operator that takes functions") from error
            found = explained(error, calls.failed)
            trail = None if getattr(found, "placed", False) else user_traceback(error)
    raise found.with_traceback(trail)  # out here, so that torch's own is not chained to it


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


# ------------------------------------------------------------------ checks after the capture


def _check_requires_grad(paths: Iterable[str], before: Sequence[bool], leaf_values: Sequence[Tensor]) -> None:
    changed = [p for p, b, v in zip(paths, before, leaf_values, strict=True) if v.requires_grad != b]
    if changed:
        raise TraceError(
            f"`fn` changes requires_grad of {leaves(len(changed))}, which a trace loses:",
            [f"params[{p!r}]" for p in changed],
            "say trainable=True or False in the leaf's spec, or read it through .detach(); write to "
            "buffers under torch.no_grad(), or what is detached.",
        )


def _check_constants(constants: Mapping[str, Tensor]) -> None:
    lost = [describe(v) for v in constants.values() if _is_fake(v)]
    if lost:
        raise TraceError(
            f"the trace lost sight of {len(lost)} value(s) that `fn` computes:",
            lost,
            "look for torch.jit functions, C++ extensions that are no custom_op, and tensors that a "
            "module kept from an earlier trace (compute such caches beforehand); a backward or a gradient "
            "hook that calls torch.autograd.grad computes again what it differentiates, under "
            "torch.enable_grad() and from detached inputs.",
        )
    wrong = [
        f"{describe(v)}" + (" that requires grad" if v.requires_grad else "")
        for v in constants.values()
        if v.requires_grad or _bytes(v) > CLOSURE_LIMIT_bytes
    ]
    if wrong:
        raise TraceError(
            f"`fn` closes over {len(wrong)} tensor(s) that must be arguments (they require grad, "
            "or are larger than 1 MB):",
            wrong,
            "put them into the parameter tree (trainable=False if frozen), or pass them with the batch.",
        )


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided


def _check_program(program: Program, specs: Mapping[str, LayoutSpec], differentiate: bool) -> None:
    sparse = [n for n in program.graph.nodes if _is_sparse(n.meta.get("val"))]
    if sparse:
        raise refused_at(
            "`fn` makes sparse tensors, which cannot be cut and differentiated:",
            [(n, str(n.target)) for n in sparse],
            "use dense ones: gather and scatter by index.",
        )
    _check_written_constants(program.graph, program.inputs)
    _check_written(program, specs, differentiate)
    check_dtypes(program)
    check_count(program)
    if differentiate and not program.results[program.outputs.loss].meta["val"].requires_grad:
        raise TraceError(
            "the loss depends on no trainable leaf.",
            fix="set trainable=True in the spec of a leaf it reads, and look for detach or no_grad.",
        )


def _writes(program: Program) -> dict[str, fx.Node]:
    """The leaves that `fn` writes to, each with the first node that does; in the order of the inputs."""
    first: dict[int, fx.Node] = {}
    for node in program.graph.nodes:
        for arg in mutated_args(node):
            first.setdefault(storage_id(arg.meta["val"]), node)
    named = zip(program.placeholders, program.inputs, strict=True)
    found = {i.name: first.get(storage_id(n.meta["val"])) for n, i in named if i.kind == "leaf"}
    return {path: node for path, node in found.items() if node is not None}


def _check_written(program: Program, specs: Mapping[str, LayoutSpec], differentiate: bool) -> None:
    """Refuse writes to leaves that train or are rounded, and in a forward to any."""
    wrong, narrow = [], []
    for path, node in _writes(program).items():
        spec, name = specs[path], f"params[{path!r}] by {str(node.target).removesuffix('.default')}"
        if spec.trainable or not differentiate:
            wrong.append((node, name))
        elif torch.promote_types(spec.storage_dtype, spec.compute_dtype) != spec.compute_dtype:
            narrow.append((node, f"{name}, stored in {spec.storage_dtype}"))
    if narrow:
        raise refused_at(
            f"`fn` writes to {leaves(len(narrow))} that it sees in a narrower dtype than they are stored in:",
            narrow,
            "compute_dtype=storage_dtype in their specs: what is added to them would be rounded away.",
        )
    if wrong:
        fix = "a forward stores nothing: model.eval()."
        if differentiate:
            fix = "a step stores what is written to leaves that do not train: buffers, or trainable=False."
        raise refused_at(f"`fn` changes {leaves(len(wrong))} in place:", wrong, fix)


def _with_writes(program: Program, hooks: int) -> Program:
    """The program with the new values of the leaves that it writes to as further results, before hooks."""
    written, end = _writes(program), len(program.results) - hooks
    results, last = program.results[:end], program.results[end:]
    named = zip(program.placeholders, program.inputs, strict=True)
    nodes = [n for n, i in named if i.kind == "leaf" and i.name in written]
    program.graph.output_node().args = ([*results, *nodes, *last],)
    writes = {path: len(results) + number for number, path in enumerate(written)}
    return replace(program, outputs=replace(program.outputs, writes=writes))


def _rows(batch: Arguments | Sequence[Any]) -> int:
    """The rows of a rank's batch: of the first of its leaves that is cut."""
    values = Arguments.of(batch).leaves[0].values()
    return next((v.shape[0] for v in values if isinstance(v, Tensor) and v.dim()), 1)
