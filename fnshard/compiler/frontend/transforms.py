"""Transforms: differentiation inside `fn` (`torch.func`, `torch.autograd.grad`), as ATen ops.

A trace before autograd does not see what happens on functorch's levels, nor in the backward engine. So a
call of `grad`, `jvp` or `vmap` (and of `jacfwd`, `hessian`, which call these; nested in any order) is traced
by itself, on the same fake tensors and below the levels, and its ops are replayed into the trace of `fn`.
They are then ops like any others: cut, gathered for and differentiated once more. Tensors that the function
closes over are replayed as themselves, so that their gradients are not lost.

A call that differentiates values which `fn` has already computed (`torch.autograd.grad`, a pullback of `vjp`,
dual numbers) stops the trace by `Retrace`. Then `fn` as a whole is traced in this way, on a level of its own
(`Differentiable`), where autograd records all that `fn` computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.apis as apis
import torch._functorch.eager_transforms as eager_transforms
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint as checkpoint
from torch import Tensor, fx
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import detect_fake_mode
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard import tree
from fnshard.errors import TraceError

AUTOCAST_DEVICES = [d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d)]

Transform = Callable[..., Any]
# (the original attribute, whether this is the tracing thread) -> the new attribute
Patch = Callable[[Any, Callable[[], bool]], Any]
_state = threading.local()


def _set_state(**state: Any) -> AbstractContextManager[Any]:
    """Set the state of this thread in a block."""
    return mock.patch.multiple(_state, **state, create=True)


def while_tracing(run: Callable[..., Any]) -> Patch:
    """Return a patch of a function by which the tracing thread calls `run(original, *args)` instead."""

    def patch(original: Any, is_tracer: Callable[[], bool]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs) if is_tracer() else original(*args, **kwargs)

        return call

    return patch


def is_inside() -> bool:
    """Return whether this thread traces a transform by itself.

    Patches then leave alone what functorch calls.
    """
    return getattr(_state, "inside", False)


def is_nested() -> bool:
    """Return whether this thread traces a transform that `fn` calls, not all of `fn` (`Differentiable`)."""
    return is_inside() and torch._C._functorch.maybe_current_level() != getattr(_state, "level", None)


def is_of_a_level(value: Tensor) -> bool:
    """Return whether a tensor is a wrapper of functorch, which outlives its level where a module keeps it."""
    return eager_transforms.is_functorch_wrapped_tensor(value)


def patches() -> Iterator[tuple[Any, str, Patch]]:
    """Yield the patches of functorch's entry points, which the public functions call."""
    yield apis, "vmap_impl", _replay
    yield eager_transforms, "grad_impl", _replay
    yield eager_transforms, "grad_and_value_impl", _replay
    yield eager_transforms, "_jvp_with_argnums", _replay
    yield eager_transforms, "_vjp_with_argnums", _retrace
    yield eager_transforms, "lazy_dynamo_disallow", _refuse_linearize
    yield torch.autograd, "_engine_run_backward", _retrace
    yield forward_ad.dual_level, "__enter__", _retrace
    for suffix in ("", "_impl"):  # before PyTorch 2.14, and since
        yield checkpoint, f"_checkpoint_without_reentrant_generator{suffix}", _skip_checkpoint
    yield torch.autograd.Function, "apply", _apply_operator
    yield torch.Tensor, "requires_grad_", _require_grad


@while_tracing
def _replay(original: Transform, *args: Any, **kwargs: Any) -> Any:
    """Trace by itself a transform that `fn` calls; a transform inside of it runs unchanged."""
    return original(*args, **kwargs) if is_inside() else inline(original, args, kwargs)


class Retrace(BaseException):
    """A signal that `fn` differentiates what it has computed so far: trace it again, as `Differentiable`.

    It is no Exception, so that no `except Exception` in `fn` stops it.
    """


@while_tracing
def _retrace(original: Transform, *args: Any, **kwargs: Any) -> Any:
    """Stop a trace in which `fn` differentiates what it has computed, so that it begins anew."""
    if not is_inside():
        raise Retrace
    return original(*args, **kwargs)


@while_tracing
def _refuse_linearize(original: Transform, function: Transform) -> Transform:
    """Refuse `torch.func.linearize`."""
    raise TraceError(
        "`fn` calls torch.func.linearize, which makes constants of what its tangent map closes over.",
        fix="torch.func.jvp, whose gradients are those of the leaves too.",
    )


@while_tracing
def _skip_checkpoint(original: Transform, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Let a checkpoint inside a differentiated region do nothing: the compiler decides what is recomputed."""
    if is_inside():
        yield
    else:
        yield from original(*args, **kwargs)


@while_tracing
def _require_grad(original: Transform, *args: Any, **kwargs: Any) -> Tensor:
    """Allow `requires_grad_` where autograd records `fn` as a whole.

    It is allowed anew at each call, since every backward makes functorch forget that it is.
    """
    is_whole = is_inside() and not is_nested()
    with eager_transforms.enable_inplace_requires_grad(True) if is_whole else nullcontext():
        return original(*args, **kwargs)


def _apply_operator(original: Any, is_tracer: Callable[[], bool]) -> classmethod:
    """Differentiate a custom_op level by level, as torch's ops are.

    functorch would take its autograd for that of a user's Function.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_tracer() and is_inside() and cls.__module__ == "torch._library.autograd"):
            return original.__get__(None, cls)(*args, **kwargs)
        forward, is_grad_enabled = cls.forward, torch.is_grad_enabled()

        # `apply` turns gradients off, and with them those of the levels below.
        def run_forward(*args: Any) -> Any:
            with torch.set_grad_enabled(is_grad_enabled):
                return forward(*args)

        methods = {"forward": staticmethod(run_forward), "backward": staticmethod(cls.backward)}
        with enable_single_level_autograd_function():
            return type(cls.__name__, (_SingleLevelFunction,), methods).apply(*args, **kwargs)

    return classmethod(apply)


@dataclass(frozen=True)
class Differentiable:
    """A form of `run`, from tensors to tensors, on a level of functorch where autograd records what it does.

    Plain autograd is not enough: it detaches the values that it saves, and a second derivative would end
    there.
    """

    run: Callable[..., list[Tensor]]

    def __call__(self, *args: Any) -> list[Tensor]:
        return inline(self._wrap_in_level(args), args, {})

    def capture(self, *args: Any) -> fx.GraphModule:
        """Return the ops of `run` alone."""
        return _capture(self._wrap_in_level(args), args, {})[0]

    def _wrap_in_level(self, inputs: Any) -> Callable[..., list[Tensor]]:
        """Return `run` on a new level, on which those inputs require grad that do so outside."""
        trained = [v.requires_grad for v in tree.flatten(inputs)[0]]

        def run(*args: Any) -> Any:
            with eager_transforms.grad_increment_nesting() as level:
                leaves, structure = tree.flatten(args)
                wrapped = [eager_transforms._wrap_tensor_for_grad(v, level) for v in leaves]
                with _set_state(level=level):
                    for value, requires_grad in zip(wrapped, trained, strict=True):
                        value.requires_grad_(requires_grad)
                    results = self.run(*tree.unflatten(wrapped, structure))
                return eager_transforms._undo_create_differentiable(results, level)

        return run


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for the block, on all devices for which it is on."""
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, AUTOCAST_DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def inline(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace `run(*args, **kwargs)` by itself, below autograd, and run its ops in the caller's trace."""
    graph, inputs, (values, structure) = _capture(run, args, kwargs)
    # The graph may switch gradients off: the block restores the caller's mode. It has the casts of autocast
    # already, which would be made again, and where `run` has switched autocast off.
    with torch.set_grad_enabled(torch.is_grad_enabled()), without_autocast():
        results = iter(fx.Interpreter(graph).run(*inputs))
    return tree.unflatten([next(results) if isinstance(v, Tensor) else v for v in values], structure)


def _capture(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, list[Tensor], Sequence[Any]]:
    """Return the ops of `run`, the tensors that they take, and its result as flat values and structure."""
    leaves, structure = tree.flatten((args, kwargs), constants=True)
    inputs = [v for v in leaves if isinstance(v, Tensor)]
    result: list[Any] = []  # flat values and structure

    def run_flat(*tensors: Tensor) -> list[Tensor]:
        feed = iter(tensors)
        filled = [next(feed) if isinstance(v, Tensor) else v for v in leaves]
        run_args, run_kwargs = tree.unflatten(filled, structure)
        # Fused attention has no second derivative: compute it by plain ops.
        with plain_attention(), _GradModes() as modes, _set_state(grad_modes=modes):
            result[:] = tree.flatten(run(*run_args, **run_kwargs), constants=True)
        return [v for v in result[0] if isinstance(v, Tensor)]

    return trace_apart(run_flat, inputs), inputs, result


def trace_apart(run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace `run(*inputs)` by itself, below autograd; tensors that it closes over are attributes."""
    # A view that comes from the cache of fake tensors has no place in forward-mode AD: turn the cache off.
    fake_mode = detect_fake_mode(inputs)
    no_cache = nullcontext() if fake_mode is None else mock.patch.object(fake_mode, "cache_enabled", False)
    with _set_state(inside=True), hide_from_trace(), no_cache:
        # Without a table, PyTorch 2.14 turns a detach into an alias, which has a gradient.
        trace = make_fx(lambda values: run(*values), decomposition_table={}, _allow_fake_constant=True)
        return trace([v.detach() for v in inputs])


def attention_kernels() -> list[bool]:
    """Return which kernels torch may choose for attention, as a flag for each kind."""
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds]


def get_chosen_kernels() -> list[bool] | None:
    """Return the flags that the compiler itself has set, in `plain_attention`."""
    return getattr(_state, "kernels", None)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Have attention in the block computed by plain ops."""
    with sdpa_kernel(SDPBackend.MATH), _set_state(kernels=attention_kernels()):
        yield


@contextmanager
def hide_from_trace() -> Iterator[None]:
    """Hide the ops and grad modes of the block from the trace that runs."""
    with disable_proxy_modes_tracing(), _temp_remove_pre_dispatch_torch_function_mode():
        yield


def note_grad_mode() -> None:
    """Note the current grad mode in the graph, before a node that is recorded by hand."""
    modes = getattr(_state, "grad_modes", None)
    if modes is not None:
        modes.note()


class _GradModes(TorchDispatchMode):
    """A mode that notes changes of the grad mode in the graph, as a trace before autograd does."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled, self.tracer = torch.is_grad_enabled(), get_proxy_mode().tracer

    def note(self) -> None:
        """Write the grad mode into the graph, if it has changed since the last op."""
        proxies = get_proxy_mode()
        if proxies is None or proxies.tracer is not self.tracer:  # the op belongs to another, inner trace
            return
        if torch.is_grad_enabled() != self.enabled:
            self.enabled = torch.is_grad_enabled()
            self.tracer.create_node("call_function", torch._C._set_grad_enabled, (self.enabled,), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note()
        if func is torch.ops.aten._efficientzerotensor.default:  # a tangent of zeros, which has no memory
            func = torch.ops.aten.zeros.default
        return func(*args, **(kwargs or {}))
