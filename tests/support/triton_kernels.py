"""Kernels in Triton's style, and functions that launch them, as Liger's do; run without Triton.

A kernel is run once for each program of its grid, on pointers that are memory and an offset.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton_kernels
from torch import Tensor
from torch.autograd import Function

try:
    from triton.runtime.jit import KernelInterface
except ImportError:

    class KernelInterface:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    stub: Any = ModuleType("triton.runtime.jit")
    stub.KernelInterface = KernelInterface
    sys.modules["triton.runtime.jit"] = stub


@dataclass(frozen=True)
class Pointer:
    memory: Tensor  # flat
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


def _store(pointer: Pointer, value: Any) -> None:
    pointer.memory[pointer.offset] = value


def _atomic_add(pointer: Pointer, value: Any) -> None:
    pointer.memory[pointer.offset] += value


PROGRAM = [0]
tl = SimpleNamespace(
    load=lambda pointer: pointer.memory[pointer.offset],
    store=_store,
    atomic_add=_atomic_add,
    arange=torch.arange,
    program_id=lambda axis: PROGRAM[axis],
    constexpr=int,
)


class Kernel(KernelInterface):
    def __init__(self, fn: Callable[..., None]):
        self.fn, self.arg_names = fn, list(inspect.signature(fn).parameters)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for place in itertools.product(*map(range, grid(bound) if callable(grid) else grid)):
            PROGRAM[:] = place
            self.fn(**{n: _pointer(v) if isinstance(v, Tensor) else v for n, v in bound.items()})

    def __call__(self, *args: Any) -> None:
        self.fn(*args)


def _pointer(x: Tensor) -> Pointer:
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Pointer(x.detach().as_strided((span,), (1,)))


# ------------------------------------------------------------------ kernels


@Kernel
def silu_kernel(x, y, out, stride, width: tl.constexpr):
    row = tl.program_id(0)
    x += row * stride
    at = tl.arange(0, width)
    gate = tl.load(x + at)
    tl.store(out + row * width + at, gate * gate.sigmoid() * tl.load(y + row * width + at))


@Kernel
def silu_backward_kernel(slope, x, y, stride, width: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, width)
    to_x, to_y = x + row * stride + at, y + row * width + at
    gate, up, g = tl.load(to_x), tl.load(to_y), tl.load(slope + row * width + at)
    s = gate.sigmoid()
    tl.store(to_x, g * up * s * (1 + gate * (1 - s)))
    tl.store(to_y, g * gate * s)


@Kernel
def add_kernel(total, value):
    tl.atomic_add(total, value)


@Kernel
def loss_kernel(logits, target, loss, count, width: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, width)
    label, pointer = tl.load(target + row), logits + row * width + at
    values = tl.load(pointer)
    if label < 0:
        tl.store(pointer, 0 * values)
    else:
        add_kernel(loss, (values.logsumexp(0) - values[label]) / count)
        tl.store(pointer, (values.softmax(0) - (at == label).double()) / count)


@Kernel
def copy_kernel(x, out, other, width: tl.constexpr):
    source, target = x, out
    for _ in range(2):
        triton_kernels.add_kernel(target, tl.load(source))
        target, source = target + 1, source + 1
    tl.store(target + tl.load(other), 0)


@Kernel
def scale_kernel(x, factor, width: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, width)
    tl.store(x + at, tl.load(x + at) * tl.load(factor))


STORED = {
    silu_kernel: {"out"},
    silu_backward_kernel: {"x", "y"},
    add_kernel: {"total"},
    loss_kernel: {
        "logits",
        "loss",
    },  # one by the kernel that it calls; and not the target, whose value it loads
    copy_kernel: {"out"},
    scale_kernel: {"x"},
}


# ------------------------------------------------------------------ functions


class SiLU(Function):
    """Its backward writes into what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        out = torch.empty_like(y)
        silu_kernel[(len(x),)](x, y, out, x.stride(0), width=x.shape[-1])
        ctx.save_for_backward(x, y)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        silu_backward_kernel[lambda meta: (g.numel() // meta["width"],)](
            g.contiguous(), x, y, x.stride(0), width=x.shape[-1]
        )
        return x, y


class LinearLoss(Function):
    """A mean over rows that have a label, by chunks: gradients replace logits, the count is a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        loss, to_x, to_w = x.new_zeros(2), torch.zeros_like(x), torch.zeros_like(w)
        count = (target >= 0).sum().item()
        for low in range(0, len(x), 2):
            part = slice(low, low + 2)
            logits = x[part] @ w
            loss_kernel[(len(logits),)](logits, target[part], loss[1:], count, width=w.shape[1])
            to_x[part] = logits @ w.t()
            to_w.addmm_(x[part].t(), logits)
        ctx.save_for_backward(to_x.detach(), to_w.detach())
        return loss[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = ctx.saved_tensors
        if not torch.equal(g, torch.tensor(1.0, dtype=g.dtype)):
            for each in found:
                scale_kernel[(len(each),)](each, g, each.shape[1])
        return *found, None
