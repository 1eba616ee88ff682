"""Transforms: differentiation inside `fn` (`torch.func`, `torch.autograd.grad`), as ATen ops.

A trace before autograd does not see what happens on functorch's levels, nor in the backward engine. So a
call of `grad`, `jvp` or `vmap` (and of `jacfwd`, `hessian`, which call these; nested in any order) is traced
by itself, on the same fake tensors and beneath the levels, and its ops are replayed into the trace of `fn`.
They are then ops like any others: cut, gathered for and differentiated once more. Tensors that the function
closes over are replayed as themselves, so that their gradients are not lost.

What differentiates values that are already there (`torch.autograd.grad`, a pullback of `vjp`, dual numbers)
stops the trace by `Retrace`: `fn` as a whole is then traced so, on a level of its own (`Differentiable`),
on which autograd records all that `fn` computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

Transform = Callable[..., Any]
Patch = Callable[[Any, Callable[[], bool]], Any]  # (the original attribute, "is it the tracer?") -> new one
_state = threading.local()


def _set(**state: Any) -> AbstractContextManager[Any]:
    """Set the state of this thread in a block."""
    return mock.patch.multiple(_state, **state, create=True)


def while_tracing(run: Callable[..., Any]) -> Patch:
    """A patch of a function: what the tracer calls is `run(original, *args)`."""

    def patch(original: Any, here: Callable[[], bool]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs) if here() else original(*args, **kwargs)

        return call

    return patch


def is_inside() -> bool:
    """Whether this thread traces a transform by itself: what functorch calls within is its own affair."""
    return getattr(_state, "inside", False)


def is_nested() -> bool:
    """Whether this thread traces a transform that `fn` calls, and not `fn` as a whole (`Differentiable`)."""
    return is_inside() and torch._C._functorch.maybe_current_level() != getattr(_state, "level", None)


def is_of_a_level(value: Tensor) -> bool:
    """Whether it is one of functorch's wrappers, which outlive their level where a module keeps them."""
    return eager_transforms.is_functorch_wrapped_tensor(value)


def patches() -> Iterator[tuple[Any, str, Patch]]:
    """Yield what is patched while a trace runs: functorch's entries beneath the public names."""
    yield apis, "vmap_impl", _replayed
    yield eager_transforms, "grad_impl", _replayed
    yield eager_transforms, "grad_and_value_impl", _replayed
    yield eager_transforms, "_jvp_with_argnums", _replayed
    yield eager_transforms, "_vjp_with_argnums", _retraced
    yield eager_transforms, "lazy_dynamo_disallow", _folded
    yield torch.autograd, "_engine_run_backward", _retraced
    yield forward_ad.dual_level, "__enter__", _retraced
    for suffix in ("", "_impl"):  # before PyTorch 2.14, and since
        yield checkpoint, f"_checkpoint_without_reentrant_generator{suffix}", _stored
    yield torch.autograd.Function, "apply", _operator
    yield torch.Tensor, "requires_grad_", _requires_grad


@while_tracing
def _replayed(original: Transform, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if is_inside() else inlined(original, args, kwargs)


class Retrace(BaseException):
    """`fn` differentiates what it has computed so far: it is to be traced as `Differentiable`."""


@while_tracing
def _retraced(original: Transform, *args: Any, **kwargs: Any) -> Any:
    if not is_inside():
        raise Retrace
    return original(*args, **kwargs)


@while_tracing
def _folded(original: Transform, function: Transform) -> Transform:
    raise TraceError(
        "`fn` calls torch.func.linearize, which makes constants of what its tangent map closes over.",
        fix="torch.func.jvp, whose gradients are those of the leaves too.",
    )


@while_tracing
def _stored(original: Transform, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A checkpointed region within what is differentiated: what is recomputed is the compiler's affair."""
    if is_inside():
        yield
    else:
        yield from original(*args, **kwargs)


@while_tracing
def _requires_grad(original: Transform, *args: Any, **kwargs: Any) -> Tensor:
    """Allowed where autograd records `fn` as a whole; every backward has functorch forget that it is."""
    recorded = is_inside() and not is_nested()
    with eager_transforms.enable_inplace_requires_grad(True) if recorded else nullcontext():
        return original(*args, **kwargs)


def _operator(original: Any, here: Callable[[], bool]) -> classmethod:
    """A custom_op's own autograd, level by level as that of torch's ops: functorch takes it for a user's."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not (here() and is_inside() and cls.__module__ == "torch._library.autograd"):
            return original.__get__(None, cls)(*args, **kwargs)
        forward, enabled = cls.forward, torch.is_grad_enabled()

        def recorded(*args: Any) -> Any:  # apply turns gradients off, and with them those of levels beneath
            with torch.set_grad_enabled(enabled):
                return forward(*args)

        methods = {"forward": staticmethod(recorded), "backward": staticmethod(cls.backward)}
        with enable_single_level_autograd_function():
            return type(cls.__name__, (_SingleLevelFunction,), methods).apply(*args, **kwargs)

    return classmethod(apply)


@dataclass(frozen=True)
class Differentiable:
    """`run`, of tensors and to tensors, on a functorch level, where autograd records what it computes.

    Not by plain autograd: that detaches what it saves, and a second derivative would end there.
    """

    run: Callable[..., list[Tensor]]

    def __call__(self, *args: Any) -> list[Tensor]:
        return inlined(self._on_a_level(args), args, {})

    def capture(self, *args: Any) -> fx.GraphModule:
        """Its ops alone."""
        return _capture(self._on_a_level(args), args, {})[0]

    def _on_a_level(self, inputs: Any) -> Callable[..., list[Tensor]]:
        trained = [v.requires_grad for v in tree.flatten(inputs)[0]]

        def run(*args: Any) -> Any:
            with eager_transforms.grad_increment_nesting() as level:
                leaves, structure = tree.flatten(args)
                wrapped = [eager_transforms._wrap_tensor_for_grad(v, level) for v in leaves]
                with _set(level=level):
                    for v, on in zip(wrapped, trained, strict=True):
                        v.requires_grad_(on)
                    made = self.run(*tree.unflatten(wrapped, structure))
                return eager_transforms._undo_create_differentiable(made, level)

        return run


def inlined(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace `run(*args, **kwargs)` by itself, beneath autograd, and run its ops where the caller stands."""
    graph, inputs, (values, structure) = _capture(run, args, kwargs)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        results = iter(fx.Interpreter(graph).run(*inputs))
    return tree.unflatten([next(results) if isinstance(v, Tensor) else v for v in values], structure)


def _capture(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, list[Tensor], Sequence[Any]]:
    """The ops of `run`, the tensors that they take, and what it returned, flat and its structure."""
    leaves, structure = tree.flatten((args, kwargs), constants=True)
    inputs = [v for v in leaves if isinstance(v, Tensor)]
    made: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(v, Tensor) else v for v in leaves]
        run_args, run_kwargs = tree.unflatten(filled, structure)
        # Fused attention has no second derivative.
        with plain_attention(), _GradModes() as modes, _set(grad_modes=modes):
            made[:] = tree.flatten(run(*run_args, **run_kwargs), constants=True)
        return [v for v in made[0] if isinstance(v, Tensor)]

    return apart(flat, inputs), inputs, made


def apart(run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The ops of `run(*inputs)` alone, beneath autograd; tensors that it closes over are attributes."""
    with _set(inside=True), untraced(), _uncached(inputs):
        # A table, or a detach becomes an alias (PyTorch 2.14), which has a gradient.
        trace = make_fx(lambda values: run(*values), decomposition_table={}, _allow_fake_constant=True)
        return trace([v.detach() for v in inputs])


def attention_kernels() -> list[bool]:
    """Which kernels torch may choose for attention."""
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds]


def chosen_kernels() -> list[bool] | None:
    """Those that the compiler itself has chosen, in `plain_attention`."""
    return getattr(_state, "kernels", None)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention in here is plain ops."""
    with sdpa_kernel(SDPBackend.MATH), _set(kernels=attention_kernels()):
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """No op and no grad mode in here is a node of the trace that runs."""
    with disable_proxy_modes_tracing(), _temp_remove_pre_dispatch_torch_function_mode():
        yield


def note_grad_mode() -> None:
    """What is recorded next, by hand, is so in the grad mode that is on."""
    modes = getattr(_state, "grad_modes", None)
    if modes is not None:
        modes.note()


class _GradModes(TorchDispatchMode):
    """Notes in the graph, as a trace before autograd does, where ops run in another grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled, self.tracer = torch.is_grad_enabled(), get_proxy_mode().tracer

    def note(self) -> None:
        proxies = get_proxy_mode()
        if proxies is None or proxies.tracer is not self.tracer:  # another trace, by itself
            return
        if torch.is_grad_enabled() != self.enabled:
            self.enabled = torch.is_grad_enabled()
            self.tracer.create_node("call_function", torch._C._set_grad_enabled, (self.enabled,), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note()
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default
        return func(*args, **(kwargs or {}))


def _uncached(inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Fake tensors without their cache: a view that comes from it has no place in forward-mode AD."""
    mode = detect_fake_mode(inputs)
    return nullcontext() if mode is None else mock.patch.object(mode, "cache_enabled", False)
