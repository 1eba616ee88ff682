"""Functions: `torch.autograd.Function`, checkpoints and gradient hooks of tensors inside `fn`.

A forward runs where `fn` calls it, so that its ops are ops of the program: cut, gathered for, keyed where
random, made pure where they write. A backward is traced by itself, and becomes the derivative of one node, a
`CustomGradient`. A hook is such a node whose values are its inputs; a checkpoint is the function it calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.utils.checkpoint import check_backward_validity

from fnshard.compiler.frontend.normalize import normalize
from fnshard.compiler.frontend.transforms import apart, is_inside, note_grad_mode, untraced
from fnshard.compiler.ir.custom_gradient import Attach, CustomGradient
from fnshard.compiler.ir.failures import communicates
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
Here = Callable[[], bool]
_state = threading.local()
_WRAPPED_ONCE = once_differentiable(lambda: None).__code__


def patches(hooks: list[Tensor]) -> Iterator[tuple[Any, str, Callable[[Any, Here], Any]]]:
    """What is patched while a trace runs.

    Args:
        hooks: takes the value of every hook; to be outputs of the trace, for `rewrites.hooks`.
    """
    yield torch.autograd.Function.__base__, "apply", _apply  # beneath any name that `Function.apply` has
    yield torch.autograd.function, "_is_setup_context_defined", _new_style
    yield torch, "equal", _equal
    yield torch.Tensor, "register_hook", lambda original, here: _register_hook(original, here, hooks)


# ------------------------------------------------------------------ a value with a gradient of its own


def attach(values: Sequence[Tensor], inputs: Sequence[Tensor], backward: Backward, name: str) -> list[Tensor]:
    """`values` with the derivative `backward(*gradients of values) -> gradients of inputs`, each or None."""
    if any(isinstance(size, torch.SymInt) for v in (*values, *inputs) for size in v.shape):
        raise TraceError(_RAGGED.format(name=name))
    receivers: list[Tensor] = []

    def flat(*gradients: Tensor) -> list[Tensor]:
        with _backward_of(gradients):
            found = list(zip(inputs, backward(*gradients), strict=True))
        receivers[:] = [x for x, g in found if g is not None]
        return [g for _, g in found if g is not None]

    with untraced():
        gradients = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in values]
        module = apart(flat, gradients)
        if receivers:
            graph, captured, keys = _pure(module, gradients, values)
    if not receivers:  # no input gets a gradient: out here, where the trace sees it
        return [v.detach() for v in values]
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    drawn = [torch.randint(lowest, highest, (), device=values[0].device) for _ in range(keys)]
    captured = [c.detach() if c._is_view() and c._version else c for c in captured]  # one that was written to
    made = CustomGradient(name, graph, len(values), len(receivers))(*values, *receivers, *captured, *drawn)
    return [made] if isinstance(made, Tensor) else list(made)


def _pure(
    module: fx.GraphModule, gradients: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[fx.Graph, list[Tensor], int]:
    """A traced backward as a `CustomGradient.graph`, what it captures, and how many keys it draws with."""
    graph, keys, constants = normalize(module, len(gradients))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[len(gradients) - 1]):
        given = [graph.placeholder(f"value{i}") for i in reversed(range(len(values)))][::-1]
    captured: list[Tensor] = []
    for node, constant in zip(placeholders[len(gradients) :], constants.values(), strict=False):
        place = next((i for i, v in enumerate(values) if v is constant), None)
        if place is None:
            captured.append(constant)
        else:
            node.replace_all_uses_with(given[place])
            graph.erase_node(node)
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


def _record(rule: CustomGradient, *args: Tensor) -> tuple[Tensor, ...]:
    """One node of the trace that runs."""
    tracer = get_proxy_mode().tracer
    note_grad_mode()
    with untraced():
        made = rule(*args)
    proxy = tracer.create_proxy("call_function", rule, tuple(map(tracer.unwrap_proxy, args)), {})
    made = track_tensor_tree(made, proxy, constant=None, tracer=tracer)
    return (made,) if isinstance(made, Tensor) else made


@contextmanager
def _backward_of(gradients: Sequence[Tensor]) -> Iterator[None]:
    """The backward of a function runs, of these gradients."""
    before, _state.gradients = getattr(_state, "gradients", ()), gradients
    try:
        with torch.autocast(gradients[0].device.type, enabled=False), torch.no_grad():
            yield
    finally:
        _state.gradients = before


def in_a_backward() -> bool:
    """Whether the backward of a function is traced."""
    return bool(getattr(_state, "gradients", ()))


def _equal(original: Callable[..., bool], here: Here) -> Callable[..., bool]:
    """A gradient equals no constant: what a backward does for any gradient is right for 1 too, say."""

    def equal(a: Tensor, b: Tensor) -> bool:
        compared = any(g is v for g in getattr(_state, "gradients", ()) for v in (a, b))
        return False if here() and compared else original(a, b)

    return equal


# ------------------------------------------------------------------ autograd.Function


class _Context(FunctionCtx):
    """The `ctx` of a Function; tensors it keeps are those of the trace."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Tensor | None, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()
        self.dirty_tensors: tuple[Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self.to_save


def _apply(original: Any, here: Here) -> classmethod:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        generated = not issubclass(cls, torch.autograd.Function)  # by functorch, for one of its levels
        operator = cls.__module__ == "torch._library.autograd"  # a custom_op: the tracer keeps it as it is
        if here() and generated and not torch.is_grad_enabled():
            with _no_gradient_beneath():
                return original.__get__(None, cls)(*args, **kwargs)
        if not here() or generated or operator or kwargs:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is Attach:
            recording = get_proxy_mode() is not None
            return _record(*args) if recording else original.__get__(None, cls)(*args)
        if cls.__name__ == "_NoopSaveInputs":  # torch 2.11 marks a checkpoint's inputs by it;
            return args[0].detach()  # without a gradient the checkpoint calls its function and no more
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _checkpoint(*args)
        if cls.__module__.startswith(("torch.distributed", "torch.nn.modules._functions")):
            raise communicates(cls.__name__)
        return _call(cls, args)

    return classmethod(apply)


@contextmanager
def _no_gradient_beneath() -> Iterator[None]:
    """functorch turns gradients on again for the levels beneath its own."""
    before, _state.no_gradient = getattr(_state, "no_gradient", False), True
    try:
        yield
    finally:
        _state.no_gradient = before


def _new_style(original: Callable[..., bool], here: Here) -> Callable[..., bool]:
    def defined(setup_context: Any) -> bool:
        found = original(setup_context)
        if here() and not found and torch._C._are_functorch_transforms_active():
            raise TraceError(_OLD_STYLE)
        return found

    return defined


def _checkpoint(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Reentrant checkpointing: without an input that requires grad, torch warns and gives no gradients."""
    check_backward_validity(args)
    needs = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needs):
        return function(*args)


def _call(cls: Any, args: tuple[Any, ...]) -> Any:
    """`cls.apply(*args)`."""
    once = getattr(cls.backward, "__code__", None) is _WRAPPED_ONCE
    if once and is_inside() and not in_a_backward():
        raise TraceError(_ONCE.format(name=cls.__name__))
    new_style = cls.setup_context is not torch.autograd.Function.setup_context
    ctx = _Context(tuple(_needs_gradient(a) for a in args))
    with torch.no_grad():
        output = cls.forward(*args) if new_style else cls.forward(ctx, *args)
        if new_style:
            cls.setup_context(ctx, args, output)
    outputs = output if isinstance(output, tuple) else (output,)
    results = [o.detach() if isinstance(o, Tensor) and o.requires_grad else o for o in outputs]
    enabled = torch.is_grad_enabled() and not getattr(_state, "no_gradient", False)
    if enabled and any(ctx.needs_input_grad):
        for place, made in _differentiable(cls, ctx, args, outputs).items():
            results[place] = made
    for place, value in enumerate(outputs):
        if any(value is dirty for dirty in ctx.dirty_tensors):
            results[place] = value.copy_(results[place]) if results[place] is not value else value
    return tuple(results) if isinstance(output, tuple) else results[0]


def _differentiable(
    cls: Any, ctx: _Context, args: Sequence[Any], outputs: Sequence[Any]
) -> dict[int, Tensor]:
    """The outputs that have a gradient, by their place."""

    def has_gradient(value: Any) -> bool:
        blocked = any(value is each for each in ctx.non_differentiable)
        return isinstance(value, Tensor) and _is_smooth(value) and not blocked

    places = [i for i, value in enumerate(outputs) if has_gradient(value)]
    takes = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]

    def backward(*gradients: Tensor) -> list[Tensor | None]:
        every: list[Tensor | None] = [
            torch.zeros(v.shape, dtype=v.dtype, device=v.device)
            if isinstance(v, Tensor) and ctx.materialize_grads
            else None
            for v in outputs
        ]
        for place, gradient in zip(places, gradients, strict=True):
            every[place] = gradient
        run = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
        found = _checked(cls.__name__, run(ctx, *every), args)
        return [found[i] for i in takes]

    if not places:
        return {}
    made = attach([outputs[i] for i in places], [args[i] for i in takes], backward, cls.__name__)
    return dict(zip(places, made, strict=True))


def _needs_gradient(value: Any) -> bool:
    """Beneath a transform whatever may have one does: who differentiates it is above."""
    return isinstance(value, Tensor) and (value.requires_grad or (is_inside() and _is_smooth(value)))


def _is_smooth(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _checked(name: str, found: Any, args: Sequence[Any]) -> list[Tensor | None]:
    """What a backward returned, one for each argument of the forward.

    Raises:
        TraceError: too few or too many, no tensors, or of other shapes.
    """
    found = list(found) if isinstance(found, tuple | list) else [found]
    while len(found) > len(args) and found[-1] is None:
        found.pop()
    if len(found) != len(args):
        raise TraceError(
            f"the backward of {name} returns {len(found)} gradient(s), and its forward takes {len(args)} "
            "argument(s).",
            fix="return one for each, None where there is none.",
        )
    wrong = [
        f"argument {i}: {tuple(g.shape)} for {tuple(a.shape)}"
        if isinstance(g, Tensor)
        else f"argument {i}: {g!r}"
        for i, (g, a) in enumerate(zip(found, args, strict=True))
        if g is not None and isinstance(a, Tensor) and not (isinstance(g, Tensor) and _sums_to(g, a))
    ]
    if wrong:
        raise TraceError(
            f"the backward of {name} returns what is no gradient of its argument:", wrong,
            "a gradient has its argument's shape.",
        )  # fmt: skip
    return found


def _sums_to(gradient: Tensor, value: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(gradient.shape, value.shape) == gradient.shape
    except RuntimeError:
        return False


# ------------------------------------------------------------------ hooks


def _register_hook(original: Any, here: Here, hooks: list[Tensor]) -> Any:
    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        if not here():
            return original(self, hook)
        of_several = getattr(hook, "__module__", "") == torch.autograd.graph.__name__
        if is_inside() or of_several:
            raise TraceError(HOOK.format(name="register_multi_grad_hook" if of_several else "register_hook"))
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        (made,) = attach([self], [self], lambda gradient: [_returned(hook(gradient))], "hook")
        hooks.append(made)
        return _Handle(hooks, made)

    return register_hook


class _Handle:
    """What `register_hook` returns."""

    def __init__(self, hooks: list[Tensor], made: Tensor):
        self._hooks, self._made = hooks, made

    def remove(self) -> None:
        self._hooks[:] = [h for h in self._hooks if h is not self._made]


def _returned(gradient: Any) -> Any:
    if gradient is None:
        raise TraceError(_OBSERVES)
    return gradient
