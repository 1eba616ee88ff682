"""Tracing: grad modes, autocast, hooks and derivatives inside `fn`: right, or refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import ROWS, WIDTH, run_chain
from traced import checks_of, programs, refused

from fnshard import TraceError
from fnshard.compiler.frontend.unsupported import refusals

RIGHT, right = programs()
REFUSED, refuse = refused()
test_gradients_are_those_of_autograd, test_refused_with_the_way_out = checks_of(RIGHT, REFUSED)

# ------------------------------------------------------------------ grad modes

RIGHT |= {
    "data of a leaf": lambda p, x: (x @ p["layers.0.w"].data @ p["layers.1.w"]).sum(),
    "fresh leaf inside": lambda p, x: (run_chain(p, x) * nn.Parameter(torch.ones(WIDTH))).sum(),
}  # fmt: skip


@right
def no_grad(p, x):
    def scaled(x: Tensor, i: int) -> Tensor:
        with torch.no_grad():
            largest = x.abs().max()
        return x / largest

    return run_chain(p, x, scaled).sum()


@right
def set_grad_enabled_as_a_function(p, x):
    torch.set_grad_enabled(False)
    a = x @ p["layers.0.w"]
    torch.set_grad_enabled(True)
    return (a * (x @ p["layers.1.w"])).sum()


@right
def detach_in_place(p, x):
    y = x @ p["layers.0.w"]
    y.detach_()
    return (y @ p["layers.1.w"]).sum()


@right
def retain_grad_and_printing(p, x):
    y = run_chain(p, x)
    y.retain_grad()
    assert str(y) and "Tanh" in y.grad_fn.name()
    return y.sum()


@refuse("enters torch.inference_mode")
def inference_mode(p, x):
    with torch.inference_mode():
        largest = x.abs().max()
    return run_chain(p, x).sum() * largest.clone()


@refuse(r"writes values that need a gradient in place to 1 detached tensor.*detach\(\)\.clone\(\)")
def writes_through_detach(p, x):
    h = x @ p["layers.0.w"]
    h.detach().mul_(p["layers.0.w"].mean())
    return h.sum()


@refuse(r"assigns to Tensor\.data")
def set_data(p, x):
    y = x @ p["layers.0.w"]
    y.data = y.data * 2
    return (y @ p["layers.1.w"]).sum()


@refuse(r"changes requires_grad of 1 leaf.*params\['layers.0.w'\]")
def freeze_a_leaf(p, x):
    p["layers.0.w"].requires_grad_(False)
    return run_chain(p, x).sum()


# ------------------------------------------------------------------ autocast, compiled and hooked modules


@right
def autocast_nested(p, x):
    def wide(x: Tensor, i: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sin(x.float() @ x.float().T @ x.float())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run_chain(p, x, wide)
    return y.float().sum()


@right
def compiled_submodule(p, x):
    sine = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")
    return run_chain(p, x, lambda x, i: sine(x)).sum()


@right
def forward_pre_hook(p, x):
    relu = nn.ReLU()
    relu.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    relu.register_forward_hook(lambda module, args, out: out + 1)
    return relu(run_chain(p, x)).sum()


@refuse(r"registers a gradient hook \(grad_fn.register_hook\)")
def old_backward_hook(p, x):
    relu = nn.ReLU()
    relu.register_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    return relu(run_chain(p, x)).sum()


@refuse("enters saved_tensors_hooks")
def saved_tensors_hooks(p, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        y = run_chain(p, x)
    return y.sum()


@right
def save_on_cpu(p, x):
    with torch.autograd.graph.save_on_cpu():
        y = run_chain(p, x)
    return y.sum()


@refuse("chooses attention's kernels.*around all calls of the step")
def kernels_of_attention(p, x):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*[run_chain(p, x)[None]] * 3).sum()


@right
def attention_in_a_derivative_beside_rows_that_are_selected(p, x):
    energy = lambda q: F.scaled_dot_product_attention(q, q, q).square().sum()  # noqa: E731
    q = run_chain(p, x)[None]
    return torch.func.grad(energy)(q.detach()).sum() * energy(q) + q[q > 0].sum()


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


@refuse("calls a torch.jit ScriptFunction")
def scripted(p, x):
    y = run_chain(p, x)
    return y.sum() + _scripted(y).sum()


# ------------------------------------------------------------------ derivatives inside fn, vmap, operators

REFUSED |= {
    "custom op without fake": (
        lambda p, x: run_chain(p, x).sum() + _no_fake(x).sum(),
        "cannot run on tensors without values.*register_fake",
    ),
    "sparse": (
        lambda p, x: torch.sparse.mm(torch.eye(ROWS).to_sparse(), run_chain(p, x)).sum(),
        "makes tensors that.*sparse_coo.*dense",
    ),
}  # fmt: skip


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0]


@torch.library.custom_op("fnshard_test::double_", mutates_args=("x",))
def _double_(x: Tensor) -> None:
    x.mul_(2)


@right
def custom_op_that_writes(p, x):
    y = x.clone()
    _double_(y)
    return (run_chain(p, x) * y).sum()


@torch.library.custom_op("fnshard_test::no_fake", mutates_args=())
def _no_fake(x: Tensor) -> Tensor:
    return x * x


@refuse("is_grads_batched=True")
def batched_gradients(p, x):
    y = run_chain(p, x)
    cotangents = torch.ones(3, *y.shape)
    return torch.autograd.grad(y, [p["layers.0.w"]], cotangents, is_grads_batched=True)[0].sum()


@refuse(r"calls backward\(\), which leaves gradients in .grad")
def backward(p, x):
    y = run_chain(p, x).sum()
    y.backward()
    return y


@refuse("calls while_loop, which is not an ATen operator")
def while_loop(p, x):
    from torch._higher_order_ops.while_loop import while_loop

    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), run_chain(p, x)))
    return y.sum()


def test_refusals_hold_on_the_tracing_thread_alone_and_end_with_the_trace() -> None:
    outcome: list[Any] = []

    def elsewhere() -> None:
        x = torch.ones(2, requires_grad=True)
        y = _Square.apply(x).sum()
        y.backward()
        outcome.append((x.grad.tolist(), x.data.tolist(), vmap(torch.sin)(x.detach()).shape))

    with refusals(torch.device("cpu")):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(TraceError, match="random state"):
            torch.manual_seed(0)
    assert outcome == [([3.0, 3.0], [1.0, 1.0], (2,))]
    assert "data" not in vars(torch.Tensor) and "grad_fn" not in vars(torch.Tensor)
    assert "apply" not in vars(torch.autograd.Function.__base__)
    assert _Square.apply(torch.ones(2)).tolist() == [1.0, 1.0]
