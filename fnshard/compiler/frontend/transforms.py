"""Transforms: `torch.func` inside `fn`, each call as the ATen ops that functorch makes of it.

A trace before autograd does not see what happens on functorch's levels. So a call of `grad`, `vjp`, `jvp`
or `vmap` (and of `jacrev`, `jacfwd`, `hessian`, which call these; nested in any order) is traced
by itself, on the same fake tensors and beneath the levels, and its ops are replayed into the trace of `fn`.
They are then ops like any others: cut, gathered for and differentiated once more. Tensors that the function
closes over are replayed as themselves, so that their gradients are not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch._functorch.apis as apis
import torch._functorch.eager_transforms as eager_transforms
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode,
    disable_proxy_modes_tracing,
    make_fx,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnshard import tree

Transform = Callable[..., Any]
_state = threading.local()


def is_inside() -> bool:
    """Whether this thread traces a transform by itself: what functorch calls within is its own affair."""
    return getattr(_state, "inside", False)


def patches() -> Iterator[tuple[Any, str, Callable[[Any, Callable[[], bool]], Any]]]:
    """What is patched while a trace runs: functorch's entries beneath the public names."""
    yield apis, "vmap_impl", _replayed
    yield eager_transforms, "grad_impl", _replayed
    yield eager_transforms, "grad_and_value_impl", _replayed
    yield eager_transforms, "_jvp_with_argnums", _replayed
    yield eager_transforms, "_vjp_with_argnums", _vjp


def _replayed(original: Transform, here: Callable[[], bool]) -> Transform:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not here() or is_inside():
            return original(*args, **kwargs)
        return inlined(original, args, kwargs)

    return call


def _vjp(original: Transform, here: Callable[[], bool]) -> Transform:
    """The value is `func`'s own; its pullback is the transform, of the primals and what is pulled back."""

    def call(func: Callable[..., Any], *primals: Any, has_aux: bool = False, **kwargs: Any) -> Any:
        if not here() or is_inside():
            return original(func, *primals, has_aux=has_aux, **kwargs)

        def pull(primals: Any, cotangents: Any) -> Any:
            return original(func, *primals, has_aux=has_aux, **kwargs)[1](*cotangents)

        def pullback(*cotangents: Any, **_: Any) -> Any:  # functorch's own takes flags of autograd's
            return _replayed(pull, here)(primals, cotangents)

        value, *aux = func(*primals) if has_aux else (func(*primals),)
        return (value, pullback, *aux)

    return call


def inlined(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace `run(*args, **kwargs)` by itself, beneath autograd, and run its ops where the caller stands."""
    leaves, structure = tree.flatten((args, kwargs), constants=True)
    inputs = [v for v in leaves if isinstance(v, Tensor)]
    made: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(v, Tensor) else v for v in leaves]
        run_args, run_kwargs = tree.unflatten(filled, structure)
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            made[:] = tree.flatten(run(*run_args, **run_kwargs), constants=True)
        return [v for v in made[0] if isinstance(v, Tensor)]

    _state.inside = True
    try:
        outer = _temp_remove_pre_dispatch_torch_function_mode()  # it would note grad modes
        with disable_proxy_modes_tracing(), outer, _uncached(inputs):
            graph = make_fx(flat, _allow_fake_constant=True)(*(v.detach() for v in inputs))
    finally:
        _state.inside = False
    results = iter(fx.Interpreter(graph).run(*inputs))
    values, result_structure = made
    filled = [next(results) if isinstance(v, Tensor) else v for v in values]
    return tree.unflatten(filled, result_structure)


@contextmanager
def _uncached(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Fake tensors without their cache: a view that comes from it has no place in forward-mode AD."""
    mode = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    with mock.patch.object(mode, "cache_enabled", False):
        yield
