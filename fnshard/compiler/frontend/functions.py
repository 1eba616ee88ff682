"""Functions: `torch.autograd.Function`, checkpoints and gradient hooks of tensors inside `fn`.

A forward runs where `fn` calls it, so that its ops are ops of the program: they are cut into segments, which
gather what they read; random ones get keys, and writes are made pure. A backward is traced by itself, and
becomes the derivative of one node, a `CustomGradient`. A hook is such a node whose values are its inputs. A
checkpoint is traced as the function that it calls.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx, FunctionMeta, _SingleLevelFunction, once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.utils.checkpoint import check_backward_validity
from torch.utils.hooks import RemovableHandle

from fnshard.compiler.frontend.normalize import normalize
from fnshard.compiler.frontend.transforms import (
    Patch,
    hide_from_trace,
    is_inside,
    note_grad_mode,
    trace_apart,
    while_tracing,
)
from fnshard.compiler.ir.custom_gradient import Attach, CustomGradient
from fnshard.compiler.ir.failures import COMMUNICATES, ONE_DEVICE
from fnshard.compiler.ir.program import ANY_STRIDES, propagate
from fnshard.compiler.rewrites.in_place import functionalize
from fnshard.compiler.rewrites.rounding import keep_rounding
from fnshard.errors import TraceError, report

HOOK = report(
    "`fn` registers a gradient hook ({name}), which a trace loses.",
    fix="Tensor.register_hook with a function that returns the new gradient; where `fn` differentiates "
    "inside itself, an autograd.Function with a setup_context; or do it in the optimizer, as a transform.",
)
_OBSERVES = report(
    "`fn` has a gradient hook that returns None: what else it does is done once, while `fn` is traced.",
    fix="return the gradient, changed or not; gradients of leaves are what a step without optimizer returns.",
)
_ONCE = report(
    "`fn` differentiates {name} twice, whose backward is once_differentiable.",
    fix="write a backward of differentiable ops, and leave @once_differentiable out.",
)
_OLD_STYLE = report(
    "`fn` differentiates a torch.autograd.Function inside itself, whose forward takes a context.",
    fix="give it a forward without one and a setup_context, as torch.func asks for.",
)
_RAGGED = report(
    "`fn` calls {name}, whose backward is its own, with a length that depends on data.",
    fix="mask rows instead of selecting them, or write plain ops.",
)

Backward = Callable[..., Sequence[Tensor | None]]
IsTracer = Callable[[], bool]


class _State(threading.local):
    """A record of the `Function.apply` calls that run on this thread."""

    gradients: Sequence[Tensor] = ()  # arguments of the backward that is traced now
    called: Any = None  # the class whose `apply` was called last
    enabled = True  # the grad mode of its caller, which `apply` turns off
    # The class whose forward has run, and the inputs that it wrote to.
    returned: tuple[Any, Sequence[Tensor]] | None = None
    no_gradient = False  # whether functorch calls a Function for a caller whose gradients are off


_state = _State()
_WRAPPED_ONCE = once_differentiable(lambda: None).__code__


def patches(hooks: OrderedDict[int, Tensor]) -> Iterator[tuple[Any, str, Patch]]:
    """Yield the patches by which functions, checkpoints and hooks become nodes of the trace.

    Args:
        hooks: takes the value of every hook. They are to be outputs of the trace, for `rewrites.hooks`.
    """
    yield FunctionMeta, "setup_context", _make_setup_context
    yield FunctionMeta, "forward", _make_forward
    yield torch, "equal", _compare
    yield CustomGradient, "__call__", _record_rule
    yield torch.Tensor, "register_hook", while_tracing(partial(_register_hook, hooks))


def attach(values: Sequence[Tensor], inputs: Sequence[Tensor], backward: Backward, name: str) -> list[Tensor]:
    """Return `values` with a derivative of their own with respect to `inputs`.

    Args:
        backward: `backward(*gradients of values) -> gradients of inputs`, None where there is none.
        name: names the function in errors.
    """
    if any(isinstance(size, torch.SymInt) for v in (*values, *inputs) for size in v.shape):
        raise TraceError(_RAGGED.format(name=name))
    receivers: list[Tensor] = []  # the inputs that get a gradient

    def run_backward(*gradients: Tensor) -> list[Tensor]:
        no_autocast = torch.autocast(gradients[0].device.type, enabled=False)
        with mock.patch.object(_state, "gradients", gradients), no_autocast, torch.no_grad():
            pairs = list(zip(inputs, backward(*gradients), strict=True))
        receivers[:] = [x for x, g in pairs if g is not None]
        return [g for _, g in pairs if g is not None]

    # Trace the backward by itself. Tensors that it reads besides gradients and values are its captures.
    with hide_from_trace():
        gradients = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in values]
        module = trace_apart(run_backward, gradients)
        if receivers:
            graph, captured, keys = _make_pure(module, gradients, values)
    if not receivers:  # no input gets a gradient; out here the detach is traced
        return [v.detach() for v in values]

    # Keys of the backward's random ops are drawn here, so that they become inputs of the program.
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    drawn = [torch.randint(lowest, highest, (), device=values[0].device) for _ in range(keys)]
    captured = [c.detach() if c._is_view() and c._version else c for c in captured]  # a view written to
    rule = CustomGradient(name, graph, len(values), len(receivers))
    results = rule(*values, *receivers, *captured, *drawn)
    return [results] if isinstance(results, Tensor) else list(results)


def _make_pure(
    module: fx.GraphModule, gradients: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[fx.Graph, list[Tensor], int]:
    """Return a traced backward as a `CustomGradient.graph`, what it captures, and its number of keys.

    The inputs of the graph are the gradients, then the forward's values, then what it captures, then keys.
    """
    graph, keys, constants = normalize(module, len(gradients))

    # A tensor that the backward closes over is either one of the forward's values, or a captured one.
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[len(gradients) - 1]):
        # All are inserted right after the gradients, so that the last to be made comes first.
        value_nodes = [graph.placeholder(f"value{i}") for i in reversed(range(len(values)))][::-1]
    captured: list[Tensor] = []
    for node, constant in zip(placeholders[len(gradients) :], constants.values(), strict=False):
        place = next((i for i, v in enumerate(values) if v is constant), None)
        if place is None:
            captured.append(constant)
        else:
            node.replace_all_uses_with(value_nodes[place])
            graph.erase_node(node)

    # Make it pure; no op in it may depend on strides, since gradients arrive with any.
    key = torch.empty((), dtype=torch.int64, device=values[0].device)
    examples = [v.detach() for v in (*gradients, *values, *captured)] + [key] * len(keys)
    with torch.no_grad():
        propagate(graph, examples)
        pure = functionalize(graph)
        for node in pure.nodes:
            node.target = ANY_STRIDES.get(node.target, node.target)
        propagate(pure, examples)
    keep_rounding(pure)
    return pure, captured, len(keys)


@while_tracing
def _record_rule(original: Callable[..., Any], rule: CustomGradient, *args: Tensor) -> Any:
    """Record a call of a `CustomGradient` as one node of the trace that runs."""
    if get_proxy_mode() is None:
        return original(rule, *args)
    tracer = get_proxy_mode().tracer
    note_grad_mode()
    with hide_from_trace():
        results = original(rule, *args)
    proxy = tracer.create_proxy("call_function", rule, tuple(map(tracer.unwrap_proxy, args)), {})
    return track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def in_a_backward() -> bool:
    """Return whether the backward of a function is traced."""
    return bool(_state.gradients)


@while_tracing
def _compare(original: Callable[..., bool], a: Tensor, b: Tensor) -> bool:
    """Say that a gradient equals nothing, so that no shortcut of a backward (for ones, say) is traced.

    What a backward does for any gradient is right for a special one too.
    """
    is_of_gradient = any(g is v for g in _state.gradients for v in (a, b))
    return not is_of_gradient and original(a, b)


class _Context(FunctionCtx):
    """A `ctx` for the forward of a Function; `saved_tensors` are the tensors of the trace themselves."""

    to_save = non_differentiable = dirty_tensors = ()
    materialize_grads = True

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self.to_save


# A user may have bound `swish = Swish.apply` before the trace, and `apply` is C in PyTorch 2.14, so `apply`
# itself cannot be patched. But it always reads `cls.setup_context` in the grad mode of its caller, and then
# calls `cls.forward` with gradients off; and properties of the metaclass come before attributes of the class.


def _make_setup_context(_: None, is_tracer: IsTracer) -> property:
    """Return the property that `apply` reads first: it notes who was called, and in which grad mode."""

    def setup_context(cls: Any) -> Any:
        original = _find_inherited(cls, "setup_context")
        if not is_tracer() or cls in (torch.autograd.Function, _SingleLevelFunction):
            return original

        # The forward has run, and `apply` sets up its context: mark what was written to or has no gradient.
        if _state.returned is not None and _state.returned[0] is cls:
            (_, dirty), _state.returned = _state.returned, None
            return lambda ctx, inputs, output: _mark_context(ctx, output, dirty)

        # `apply` begins: note the class for `forward`.
        is_of_user = issubclass(cls, torch.autograd.Function)  # else functorch calls it for one of its levels
        if is_of_user and not _has_setup_context(cls) and torch._C._are_functorch_transforms_active():
            raise TraceError(_OLD_STYLE)
        _state.called, _state.enabled = cls, torch.is_grad_enabled()
        return original

    return property(setup_context)


def _make_forward(_: None, is_tracer: IsTracer) -> property:
    """Return the property that `apply` reads next: a function that runs the forward as the trace needs it."""

    def forward(cls: Any) -> Any:
        original = _find_inherited(cls, "forward")

        @wraps(original)
        def call(*args: Any) -> Any:
            if _state.called is not cls:  # the caller is not `apply`, but functorch, for a vmap
                return original(*args)
            _state.called = None
            return _run_forward(cls, original, args, _state.enabled)

        return call if is_tracer() else original

    return property(forward)


def _find_inherited(cls: Any, name: str) -> Any:
    """Return an attribute of a class, which properties of its metaclass hide."""
    return next(c.__dict__[name] for c in cls.__mro__ if name in c.__dict__).__get__(None, cls)


def _has_setup_context(cls: Any) -> bool:
    """Return whether a Function defines `setup_context`, so that its forward takes no context."""
    return _find_inherited(cls, "setup_context") is not _find_inherited(_SingleLevelFunction, "setup_context")


def _run_forward(cls: Any, forward: Callable[..., Any], args: tuple[Any, ...], enabled: bool) -> Any:
    """Run `cls.forward` in the place of `cls.apply`, whose caller's grad mode is `enabled`."""
    if not issubclass(cls, torch.autograd.Function):  # functorch calls it for one of its levels
        # functorch turns gradients on again for the levels below its own.
        with mock.patch.object(_state, "no_gradient", _state.no_gradient or not enabled):
            return forward(*args)
    is_custom_op = cls.__module__ == "torch._library.autograd"  # which is one op of the trace
    if is_custom_op or cls is Attach:
        return forward(*args)
    if cls.__module__.startswith(("torch.distributed", "torch.nn.modules._functions")):
        raise TraceError(f"{COMMUNICATES} ({cls.__name__}).", fix=ONE_DEVICE)

    # `apply` has turned gradients off: run the forward and attach its backward in the caller's grad mode.
    takes_context = not _has_setup_context(cls)
    with _restore_grad_mode(enabled):
        run = _OF_CHECKPOINTS.get((cls.__module__, cls.__name__), _run_function)
        output, dirty = run(cls, args[takes_context:])
    if takes_context:
        _mark_context(args[0], output, dirty)
    else:
        _state.returned = cls, dirty
    return output


def _mark_context(ctx: Any, output: Any, dirty: Sequence[Tensor]) -> None:
    """Mark the context that `apply` has made: its outputs need gradients where those of the trace do."""
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.mark_dirty(*dirty)
    ctx.mark_non_differentiable(*(o for o in outputs if isinstance(o, Tensor) and not o.requires_grad))


@contextmanager
def _restore_grad_mode(enabled: bool) -> Iterator[None]:
    """Restore the grad mode that `apply` has turned off; the trace sees neither change."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


def _run_checkpoint(cls: Any, args: tuple[Any, ...]) -> tuple[Any, Sequence[Tensor]]:
    """Call a reentrant checkpoint's function; as in torch, without gradients if no input requires grad."""
    function, _, *args = args
    check_backward_validity(args)
    needs_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needs_gradient):
        return function(*args), ()


def _run_function(cls: Any, args: tuple[Any, ...]) -> tuple[Any, Sequence[Tensor]]:
    """Return what `cls.apply(*args)` returns, and the inputs that it wrote to."""
    is_once = getattr(cls.backward, "__code__", None) is _WRAPPED_ONCE
    if is_once and is_inside() and not in_a_backward():
        raise TraceError(_ONCE.format(name=cls.__name__))

    # Run the forward with a context of ours, whose saved tensors are those of the trace.
    ctx, forward = _Context(tuple(_needs_gradient(a) for a in args)), _find_inherited(cls, "forward")
    with torch.no_grad():
        if _has_setup_context(cls):
            output = forward(*args)
            _find_inherited(cls, "setup_context")(ctx, args, output)
        else:
            output = forward(ctx, *args)

    # The forward's ops ran under no_grad. Outputs that have a gradient get the traced backward as derivative.
    outputs = output if isinstance(output, tuple) else (output,)
    results = [o.detach() if isinstance(o, Tensor) and o.requires_grad else o for o in outputs]
    is_recorded = torch.is_grad_enabled() and not _state.no_gradient
    if is_recorded and any(ctx.needs_input_grad):
        for place, value in _attach_backward(cls, ctx, args, outputs).items():
            results[place] = value

    # An output that is an input which was written to stays that tensor, so that other readers see it.
    for place, value in enumerate(outputs):
        if any(value is dirty for dirty in ctx.dirty_tensors):
            results[place] = value.copy_(results[place]) if results[place] is not value else value
    return tuple(results) if isinstance(output, tuple) else results[0], ctx.dirty_tensors


_OF_CHECKPOINTS: dict[tuple[str, str], Callable[..., tuple[Any, Sequence[Tensor]]]] = {
    ("torch.utils.checkpoint", "CheckpointFunction"): _run_checkpoint,
    # PyTorch 2.11 marks the inputs of a checkpoint by this function. Nothing remains of it in a trace.
    ("torch.utils.checkpoint", "_NoopSaveInputs"): lambda cls, args: (args[0].detach(), ()),
}


def _attach_backward(
    cls: Any, ctx: _Context, args: Sequence[Any], outputs: Sequence[Any]
) -> dict[int, Tensor]:
    """Return the outputs that have a gradient, by their place, with `cls.backward` as their derivative."""

    def has_gradient(value: Any) -> bool:
        is_marked = any(value is each for each in ctx.non_differentiable)
        return isinstance(value, Tensor) and _is_smooth(value) and not is_marked

    smooth_outputs = [i for i, value in enumerate(outputs) if has_gradient(value)]
    smooth_inputs = [i for i, needs_gradient in enumerate(ctx.needs_input_grad) if needs_gradient]

    def backward(*gradients: Tensor) -> list[Tensor | None]:
        # The user's backward takes one gradient for each output: zeros, or None, where there is none.
        of_outputs: list[Tensor | None] = [None] * len(outputs)
        if ctx.materialize_grads:
            for i, value in enumerate(outputs):
                if isinstance(value, Tensor):
                    of_outputs[i] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        for i, gradient in zip(smooth_outputs, gradients, strict=True):
            of_outputs[i] = gradient

        run = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
        of_inputs = _check_gradients(cls.__name__, run(ctx, *of_outputs), args)
        return [of_inputs[i] for i in smooth_inputs]

    if not smooth_outputs:
        return {}
    values, inputs = [outputs[i] for i in smooth_outputs], [args[i] for i in smooth_inputs]
    return dict(zip(smooth_outputs, attach(values, inputs, backward, cls.__name__), strict=True))


def _needs_gradient(value: Any) -> bool:
    """Return whether a value needs a gradient.

    Beneath a transform any float does: its caller may differentiate.
    """
    return isinstance(value, Tensor) and (value.requires_grad or (is_inside() and _is_smooth(value)))


def _is_smooth(value: Tensor) -> bool:
    """Return whether a tensor's dtype can have gradients."""
    return value.is_floating_point() or value.is_complex()


def _check_gradients(name: str, returned: Any, args: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients that a backward returned, one for each argument of the forward.

    Raises:
        TraceError: it returned too few or too many, or one that is no tensor of its argument's shape.
    """
    gradients = list(returned) if isinstance(returned, tuple | list) else [returned]
    while len(gradients) > len(args) and gradients[-1] is None:  # as in torch, surplus Nones are dropped
        gradients.pop()
    if len(gradients) != len(args):
        raise TraceError(
            f"the backward of {name} returns {len(gradients)} gradient(s), and its forward takes {len(args)} "
            "argument(s).",
            fix="return one for each, None where there is none.",
        )

    wrong = []
    for i, (gradient, value) in enumerate(zip(gradients, args, strict=True)):
        if gradient is None or not isinstance(value, Tensor):
            continue
        if not isinstance(gradient, Tensor):
            wrong.append(f"argument {i}: {gradient!r}")
            continue
        # A value that was broadcast may get a larger gradient, which autograd sums to its shape.
        sizes = zip(reversed(value.shape), reversed(gradient.shape), strict=False)
        has_dims = value.dim() <= gradient.dim()
        if not has_dims or not all(size in (1, of_gradient) for size, of_gradient in sizes):
            wrong.append(f"argument {i}: {tuple(gradient.shape)} for {tuple(value.shape)}")
    if wrong:
        raise TraceError(
            f"the backward of {name} returns values that cannot be gradients of their arguments:", wrong,
            "a gradient has its argument's shape.",
        )  # fmt: skip
    return gradients


def _register_hook(
    hooks: OrderedDict[int, Tensor], _: Any, value: Tensor, hook: Callable[[Tensor], Tensor | None]
) -> RemovableHandle:
    """Record a hook as a node that returns the tensor, and whose derivative is the hook.

    Its value becomes an output of the trace; `rewrites.hooks` then routes the tensor's readers through it.
    """
    is_multi_grad = getattr(hook, "__module__", "") == torch.autograd.graph.__name__
    if is_inside() or is_multi_grad:
        raise TraceError(HOOK.format(name="register_multi_grad_hook" if is_multi_grad else "register_hook"))
    if not value.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")

    def backward(gradient: Tensor) -> list[Tensor]:
        changed = hook(gradient)
        if changed is None:
            raise TraceError(_OBSERVES)
        return [changed]

    handle = RemovableHandle(hooks)
    with torch.enable_grad():  # under no_grad too a hook counts, since the tensor is read elsewhere
        (hooks[handle.id],) = attach([value], [value], backward, "hook")
    return handle
