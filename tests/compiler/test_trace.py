"""Tracing: what a tracer would lose in silence is right, or refused with the way out."""

from __future__ import annotations

import copy
import functools
import random
import secrets
import tempfile
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import randint, uniform
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from numpy.random import rand
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad as func_grad
from torch.func import jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from toys import ROWS, WIDTH, assert_same_grads, chain, llama, our_grads, plain_grads, rows, run_chain

import fnshard as fs
from fnshard import LayoutSpec, TraceError
from fnshard.compiler.frontend.unsupported import refusals

Fn = Callable[[dict[str, Tensor], Tensor], Any]


def programs() -> tuple[dict[str, Fn], Callable[[Fn], Fn]]:
    """A registry and its decorator."""
    found: dict[str, Fn] = {}

    def register(fn: Fn) -> Fn:
        found[fn.__name__] = fn
        return fn

    return found, register


def refused() -> tuple[dict[str, tuple[Fn, str]], Callable[[str], Callable[[Fn], Fn]]]:
    """A registry of programs with the message that refuses them."""
    found: dict[str, tuple[Fn, str]] = {}

    def register(message: str) -> Callable[[Fn], Fn]:
        def keep(fn: Fn) -> Fn:
            found[fn.__name__] = (fn, message)
            return fn

        return keep

    return found, register


RIGHT, right = programs()
REFUSED, refuse = refused()


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_those_of_autograd(name: str) -> None:
    assert_same_grads(RIGHT[name], chain(), rows())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    fn, message = REFUSED[name]
    with pytest.raises(TraceError, match=f"(?s)(?=.*Fix: )(?=.*{message})"):
        our_grads(fn, chain(), rows())


# ------------------------------------------------------------------ grad modes


@right
def detach(p, x):
    return run_chain(p, x, lambda x, i: x + x.detach() * 2).sum()


@right
def data(p, x):
    return run_chain(p, x, lambda x, i: x + x.data * 2).sum()


@right
def data_of_a_leaf(p, x):
    return (x @ p["layers.0.w"].data @ p["layers.1.w"]).sum()


@right
def no_grad(p, x):
    def scaled(x: Tensor, i: int) -> Tensor:
        with torch.no_grad():
            largest = x.abs().max()
        return x / largest

    return run_chain(p, x, scaled).sum()


@torch.no_grad()
def _mean(x: Tensor) -> Tensor:
    return x.abs().mean()


@right
def no_grad_of_complex_numbers(p, x):
    pairs = torch.view_as_complex((x @ p["layers.0.w"]).view(ROWS, WIDTH // 2, 2))
    with torch.no_grad():
        turned = pairs * pairs.conj().abs() + torch.fft.fft(pairs)
    return (pairs * turned).abs().pow(2).sum()


@right
def complex_numbers_across_units(p, x):
    def turn(x: Tensor, i: int) -> Tensor:
        pairs = torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2)).conj()
        return torch.view_as_real(pairs * pairs.abs()).view(ROWS, WIDTH)

    spectrum = torch.fft.fft(x @ p["layers.0.w"]).conj()
    turned = run_chain(p, x, turn)
    return (spectrum * turned).abs().sum()


@right
def no_grad_as_decorator(p, x):
    return run_chain(p, x, lambda x, i: x / _mean(x)).sum()


@right
def no_grad_over_several_units(p, x):
    with torch.no_grad():
        early = x @ p["layers.0.w"] @ p["layers.1.w"]
    return (early * (x @ p["layers.1.w"] @ p["layers.2.w"])).sum()


@right
def enable_grad_in_no_grad(p, x):
    with torch.no_grad():
        a = x @ p["layers.0.w"]
        with torch.enable_grad():
            b = x @ p["layers.1.w"]
    return (a * b).sum()


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
def reading_requires_grad(p, x):
    y = run_chain(p, x)
    with torch.no_grad():
        z = y * 2
    return (
        y.sum() * (2.0 if p["layers.0.w"].requires_grad and y.requires_grad else 1.0) * (1 + z.requires_grad)
    )


@right
def fresh_leaf_inside(p, x):
    return (run_chain(p, x) * nn.Parameter(torch.ones(WIDTH))).sum()


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


@right
def inference_mode_that_is_off(p, x):
    with torch.inference_mode(False):
        return run_chain(p, x).sum()


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
def autocast(p, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run_chain(p, x)
    return y.float().sum()


@right
def autocast_nested(p, x):
    def wide(x: Tensor, i: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sin(x.float() @ x.float().T @ x.float())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run_chain(p, x, wide)
    return y.float().sum()


@right
def autocast_as_decorator(p, x):
    matmul = torch.autocast("cpu", dtype=torch.bfloat16)(torch.matmul)
    return (matmul(x, p["layers.0.w"]).float() @ p["layers.1.w"]).sum()


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


@refuse("a module with a full backward hook")
def full_backward_hook(p, x):
    relu = nn.ReLU()
    relu.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    return relu(run_chain(p, x)).sum()


@refuse(r"registers a gradient hook \(grad_fn.register_hook\)")
def old_backward_hook(p, x):
    relu = nn.ReLU()
    relu.register_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    return relu(run_chain(p, x)).sum()


@refuse(r"registers a gradient hook \(register_hook\)")
def tensor_hook(p, x):
    y = run_chain(p, x)
    y.register_hook(lambda g: g * 2)
    return y.sum()


@refuse(r"registers a gradient hook \(grad_fn.register_prehook\)")
def node_hook(p, x):
    y = run_chain(p, x)
    y.grad_fn.register_prehook(lambda g: (g[0] * 2,))
    return y.sum()


@refuse("registers a gradient hook")
def multi_grad_hook(p, x):
    y = run_chain(p, x)
    torch.autograd.graph.register_multi_grad_hook([y], lambda grads: None)
    return y.sum()


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


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


@refuse("calls a torch.jit ScriptFunction")
def scripted(p, x):
    y = run_chain(p, x)
    return y.sum() + _scripted(y).sum()


# ------------------------------------------------------------------ checkpoint


@right
def checkpoint_not_reentrant(p, x):
    return run_chain(p, x, lambda x, i: checkpoint(torch.sin, x, use_reentrant=False)).sum()


@right
def checkpoint_with_contexts(p, x):
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    again = functools.partial(checkpoint, torch.sin, use_reentrant=False, context_fn=contexts)
    return run_chain(p, x, lambda x, i: again(x)).sum()


@right
def checkpoint_sequence(p, x):
    return checkpoint_sequential([torch.sin, torch.cos], 2, run_chain(p, x), use_reentrant=False).sum()


@refuse("reentrant activation checkpointing")
def checkpoint_reentrant(p, x):
    return run_chain(p, x, lambda x, i: checkpoint(torch.sin, x, use_reentrant=True)).sum()


# ------------------------------------------------------------------ derivatives inside fn, vmap, operators


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0]


@refuse("the torch.autograd.Function _Square")
def autograd_function(p, x):
    return run_chain(p, x, lambda x, i: _Square.apply(x)).sum()


@torch.library.custom_op("fnshard_test::square", mutates_args=())
def _square(x: Tensor) -> Tensor:
    return x * x


_square.register_fake(torch.empty_like)
_square.register_autograd(
    lambda ctx, grad: 3 * grad * ctx.saved_tensors[0],  # not the derivative, to see whether it is used
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@right
def custom_op(p, x):
    return run_chain(p, x, lambda x, i: _square(x)).sum()


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


@refuse("cannot run on tensors without values.*register_fake")
def custom_op_without_fake(p, x):
    return run_chain(p, x).sum() + _no_fake(x).sum()


@refuse("differentiates inside itself")
def torch_func_grad(p, x):
    return (run_chain(p, x) * torch.func.grad(lambda z: (z**2).sum())(x)).sum()


@refuse("differentiates inside itself")
def torch_func_grad_imported_by_name(p, x):
    return (run_chain(p, x) * func_grad(lambda z: (z**2 * p["layers.0.w"].sum()).sum())(x)).sum()


@refuse("differentiates inside itself")
def torch_func_vjp(p, x):
    out, pull = vjp(lambda z: z @ p["layers.0.w"], x)
    return (out * pull(out)[0]).sum()


@refuse(r"differentiates inside itself \(forward-mode AD\)")
def torch_func_jvp(p, x):
    out, tangent = jvp(lambda z: torch.tanh(z @ p["layers.0.w"]), (x,), (x,))
    return (out * tangent).sum()


@refuse(r"differentiates inside itself \(forward-mode AD\)")
def forward_mode(p, x):
    with forward_ad.dual_level():
        dual = torch.tanh(forward_ad.make_dual(x, x) @ p["layers.0.w"])
        return forward_ad.unpack_dual(dual).tangent.sum()


@refuse("vmap|differentiates inside itself")
def torch_func_jacrev(p, x):
    return jacrev(lambda z: (z @ p["layers.0.w"]).sum(0))(x).sum()


@refuse(r"differentiates inside itself \(torch.autograd.grad\)")
def autograd_grad(p, x):
    y = run_chain(p, x).sum()
    (g,) = torch.autograd.grad(y, [p["layers.0.w"]], create_graph=True)
    return g.pow(2).sum()


@refuse("differentiates inside itself")
def autograd_functional(p, x):
    return torch.autograd.functional.jacobian(
        lambda z: (z @ p["layers.0.w"]).sum(0), x, create_graph=True
    ).sum()


@refuse(r"differentiates inside itself \(Tensor.backward\)")
def backward(p, x):
    y = run_chain(p, x).sum()
    y.backward()
    return y


@refuse("calls torch.vmap.*einsum")
def vmap_of_leaves(p, x):
    weights = torch.stack([p["layers.0.w"], p["layers.1.w"]])
    return vmap(lambda w: torch.sin(x @ w).sum())(weights).pow(2).sum()


@refuse("calls torch.vmap")
def vmap_of_constants(p, x):
    mask = vmap(lambda i: torch.where(i > torch.arange(WIDTH), 1.0, 2.0))(torch.arange(ROWS))
    return (run_chain(p, x) * mask).sum()


@refuse("which is not an ATen operator")
def cond(p, x):
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (run_chain(p, x),)).sum()


@refuse("which is not an ATen operator")
def while_loop(p, x):
    from torch._higher_order_ops.while_loop import while_loop

    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), run_chain(p, x)))
    return y.sum()


@right
def unchecked_inverse(p, x):
    return torch.linalg.inv_ex(p["layers.0.w"] + 4 * torch.eye(WIDTH))[0].sum() + run_chain(p, x).sum()


@refuse("makes sparse tensors.*dense")
def sparse(p, x):
    return torch.sparse.mm(torch.eye(ROWS).to_sparse(), run_chain(p, x)).sum()


def test_an_embedding_with_sparse_gradient_gets_a_dense_one() -> None:
    wanted, sparse = plain_grads(_sparse_embeddings, chain(), rows())
    loss, grads = our_grads(_sparse_embeddings, chain(), rows())
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grads, {p: g.to_dense() for p, g in sparse.items()})


def _sparse_embeddings(p, x):
    ids = torch.tensor([1, 2, 3, 3])
    bags = F.embedding_bag(ids, p["layers.1.w"], torch.tensor([0, 2]), mode="sum", sparse=True)
    return F.embedding(ids, p["layers.0.w"], sparse=True).pow(2).sum() + bags.pow(2).sum()


# ------------------------------------------------------------------ values that decide


@refuse("depends on a tensor's value.*torch.where")
def item(p, x):
    return run_chain(p, x).sum() * x.sum().item()


@refuse("depends on a tensor's value")
def branch(p, x):
    return run_chain(p, x).sum() if x.sum() > 0 else x.sum()


@refuse("depends on a tensor's value")
def nonzero(p, x):
    return run_chain(p, x)[x.sum(1).nonzero()[:, 0]].sum()


@refuse("depends on a tensor's value")
def boolean_index(p, x):
    return run_chain(p, x)[x.sum(1) > 0].sum()


@refuse("depends on a tensor's value")
def masked_select(p, x):
    return run_chain(p, x).masked_select(x > 0).sum()


@refuse("depends on a tensor's value")
def assertion(p, x):
    assert torch.isfinite(x).all()
    return run_chain(p, x).sum()


@refuse("depends on a tensor's value")
def numpy_of_a_batch_leaf(p, x):
    return run_chain(p, x).sum() * float(x.numpy().sum())


@right
def item_of_a_constant(p, x):
    return run_chain(p, x).sum() * torch.tensor(2.0).item()


@right
def boolean_assignment(p, x):
    y = run_chain(p, x).clone()
    y[x > 0] = 0
    return y.sum()


# ------------------------------------------------------------------ random numbers


@refuse("draws random numbers with aten.poisson.*torch.randn")
def poisson(p, x):
    return run_chain(p, x).sum() + torch.poisson(x.abs()).sum()


@right
def dropout_in_place_in_eval_mode(p, x):
    return F.dropout(run_chain(p, x).clone(), 0.5, False, inplace=True).sum()


_lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5).requires_grad_(False)
_lstm_eval = copy.deepcopy(_lstm).eval()


@refuse("draws random numbers with aten.lstm")
def lstm_with_dropout(p, x):
    return _lstm(run_chain(p, x)[None])[0].sum()


@right
def lstm_in_eval_mode(p, x):
    return _lstm_eval(run_chain(p, x)[None])[0].sum()


@refuse("a torch.Generator.*seed=")
def generator(p, x):
    return (run_chain(p, x) * torch.rand(WIDTH, generator=torch.Generator())).sum()


@refuse(r"sets torch's random state.*seed=")
def manual_seed(p, x):
    torch.manual_seed(0)
    return (run_chain(p, x) * torch.rand(WIDTH)).sum()


@refuse("sets torch's random state")
def fork_rng(p, x):
    with torch.random.fork_rng():
        noise = torch.rand(WIDTH)
    return (run_chain(p, x) * noise).sum()


# ------------------------------------------------------------------ writing in place


@refuse(r"changes 1 leaf in place.*params\['layers.0.w'\] by aten.mul_")
def leaf_data_in_place(p, x):
    p["layers.0.w"].data.mul_(2)
    return run_chain(p, x).sum()


@refuse("changes 1 leaf in place")
def leaf_in_place_without_grad(p, x):
    with torch.no_grad():
        p["layers.0.w"][0].mul_(2)
    return run_chain(p, x).sum()


@refuse("changes 1 leaf in place.*embedding_renorm")
def embedding_max_norm(p, x):
    return F.embedding(torch.tensor([0, 1]), p["layers.0.w"], max_norm=1.0).sum()


@right
def batch_in_place(p, x):
    x = x.clone()  # the reference's sake: a step works on a copy of its own
    x[0].mul_(2)
    return run_chain(p, x).sum()


@right
def clone_of_a_leaf_in_place(p, x):
    weight = p["layers.0.w"].clone()
    weight[0] = 0
    return (x @ weight).pow(2).sum() + (x @ p["layers.1.w"]).sum()


@right
def activation_in_place(p, x):
    y = x @ p["layers.0.w"] * 3
    y += 1
    y.relu_()
    z = torch.zeros(ROWS, WIDTH)
    z[:2] = y[:2]
    z[2:] = x[2:]
    return (z @ p["layers.1.w"]).pow(2).sum()


@right
def detached_alias_in_place(p, x):
    y = x @ p["layers.0.w"]
    y.detach().zero_()
    return (y * x).sum()


@right
def gathering_buffer_across_units(p, x):
    out = torch.zeros(4, ROWS, WIDTH)
    for i in range(4):
        out[i] = x @ p[f"layers.{i}.w"]
    return out.pow(2).sum()


@right
def accumulating_across_units(p, x):
    total = torch.zeros(ROWS, WIDTH)
    for i in range(4):
        total += x @ p[f"layers.{i}.w"]
    return total.pow(2).sum()


@right
def views_in_place_across_units(p, x):
    y = x @ p["layers.0.w"]
    flat, first = y.view(-1), y[0]
    z = x @ p["layers.1.w"]
    flat.add_(z.view(-1))
    y[:, ::2].mul_(p["layers.2.w"][0, 0])
    y[:, [0, 3]] = first[:2] * 2
    return (y * z).pow(2).sum() + flat[3] * first.sum()


@right
def writes_between_results_of_one_op(p, x):
    largest, at = (x @ p["layers.0.w"]).max(0)
    largest[1:].mul_(at[1:] * p["layers.1.w"][0, 1:])
    real = torch.view_as_complex((x @ p["layers.2.w"]).view(ROWS, -1, 2)).real
    real.add_(largest[: WIDTH // 2])
    return (largest.sum() * real).sum()


@right
def weights_made_in_place(p, x):
    y = x @ p["layers.0.w"]
    mixed = p["layers.0.w"] * 2
    row = mixed[0]
    row.mul_(3)
    y = y @ p["layers.1.w"]
    return (y @ mixed * row).pow(2).sum()


@right
def other_shapes_in_place(p, x):
    y = x @ p["layers.0.w"]
    row, turned = y[0], y.t()
    y.t_().unsqueeze_(0).mul_(p["layers.1.w"][0][:, None])
    y.squeeze_(0).swapaxes_(0, 1)
    return (y * row).sum() + turned.pow(2).sum()


@refuse("what memory a tensor has by aten.resize_")
def resize_in_place(p, x):
    return (run_chain(p, x) * x.new_zeros(2).resize_(ROWS, WIDTH).zero_()).sum()


@refuse(r"aten.mul.out with an out= .*\[0\] for \[4, 8\]")
def out_of_another_shape(p, x):
    with torch.no_grad():
        out = torch.mul(x, 2, out=x.new_empty(0))
    return (run_chain(p, x) * out).sum()


# ------------------------------------------------------------------ what fn closes over


_small = torch.arange(float(WIDTH))
_trained = torch.ones(WIDTH, requires_grad=True)
_large = torch.ones(600, 600)


@right
def small_constant(p, x):
    return (run_chain(p, x) * _small).sum() + (x * torch.tensor([2.0] * WIDTH)).sum()


@right
def small_constant_in_place(p, x):
    fresh = _small + 0
    fresh.add_(1)
    return (run_chain(p, x) * fresh).sum()


@refuse("closes over 1 tensor.*that requires grad")
def constant_that_requires_grad(p, x):
    return (run_chain(p, x) * _trained).sum()


@refuse("closes over 1 tensor.*1 MB.*trainable=False")
def large_constant(p, x):
    return run_chain(p, x).sum() + _large[0].sum()


@refuse("writes in place to 1 tensor.*closes over.*clone it")
def constant_that_is_written_to(p, x):
    _counter.add_(1)
    return (run_chain(p, x) * _counter).sum()


_counter = torch.ones(WIDTH)


@right
def literal_in_place(p, x):
    fresh = torch.tensor([1.0] * WIDTH)
    fresh.add_(1)
    return (run_chain(p, x) * fresh).sum()


# ------------------------------------------------------------------ the host's random numbers

_python, _numpy, _bits = random.Random(0), np.random.default_rng(0), np.random.PCG64(0)


@refuse("draws random numbers by random.gauss.*draw with torch.*pass the numbers as tensors")
def pythons_random_numbers(p, x):
    return (run_chain(p, x) * random.gauss(0, 1)).sum()


@refuse("draws random numbers by numpy.random.rand,")
def numpys_random_numbers(p, x):
    return (run_chain(p, x) * torch.from_numpy(np.random.rand(WIDTH)).float()).sum()


@refuse("draws random numbers by Python's random")
def a_function_imported_by_its_name(p, x):
    return (run_chain(p, x) * randint(0, 3)).sum()


def draws_by(draw: Callable[[], float]) -> Callable[[Any, Tensor], Tensor]:
    return lambda p, x: (run_chain(p, x) * draw()).sum()


UNSEEDED: dict[str, Callable[[], float]] = {
    "a random.Random without a seed": lambda: random.Random().random(),
    "os.urandom .*, at .*np.random.default_rng": lambda: np.random.default_rng().normal(),
    "os.urandom .*a RandomState": lambda: np.random.RandomState().rand(),
    "os.urandom .*a generator without": lambda: np.random.Generator(np.random.PCG64()).normal(),
    "os.urandom ": lambda: random.SystemRandom().random(),
    "os.urandom .*secrets": lambda: secrets.randbelow(3),
    "a PCG64 that it closes over": lambda: _bits.random_raw(),
}
for _number, (_name, _draw) in enumerate(UNSEEDED.items()):
    _refused = draws_by(_draw)
    _refused.__name__ = f"unseeded_{_number}"
    refuse(f"draws random numbers by {_name}")(_refused)


@refuse("draws random numbers by random.seed")
def pythons_seed(p, x):
    random.seed(0)
    return run_chain(p, x).sum()


@refuse("draws random numbers by a Random that it closes over")
def a_generator_of_ones_own(p, x):
    return (run_chain(p, x) * _python.random()).sum()


@refuse("draws random numbers by a Generator that it closes over")
def a_generator_of_numpys(p, x):
    return (run_chain(p, x) * _numpy.normal()).sum()


@right
def a_seeded_generator_made_anew(p, x):
    return (run_chain(p, x) * np.random.default_rng(0).normal() * random.Random(0).random()).sum()


@right
def libraries_that_draw_for_themselves(p, x):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{uuid.uuid4()}.py")
        path.write_text("import random, secrets\nown = random.Random(), secrets.token_bytes()")
        loader = SourceFileLoader("drawing", str(path))
        loader.exec_module(module_from_spec(spec_from_loader("drawing", loader)))
    return run_chain(p, x).sum()


def test_a_draw_that_no_patch_can_see_is_seen_by_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda p, x: (run_chain(p, x) * rand()).sum()  # noqa: E731
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # as in a process of one thread
    with pytest.raises(TraceError, match=r"draws random numbers by numpy.random, "):
        our_grads(fn, chain(), rows())


def test_other_threads_draw_while_one_traces_and_patches_end_with_the_trace() -> None:
    kept: list[Callable[[], float]] = []
    with ThreadPoolExecutor(1) as loader:
        loader.submit(int).result()  # its thread is there before the trace

        def fn(p, x):
            for draw in (random.random, lambda: uniform(0, 1), np.random.rand):
                assert 0 <= loader.submit(draw).result() < 1
            kept.append(random.random)  # what `from random import random` binds in a module imported here
            return run_chain(p, x).sum()

        our_grads(fn, chain(), rows())
    assert 0 <= kept[0]() < 1 and 0 <= random.random() < 1


# ------------------------------------------------------------------ shapes of programs


@right
def complex_numbers(p, x):
    def turn(x: Tensor, i: int) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(ROWS, WIDTH // 2, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(1)

    return torch.fft.irfft(torch.fft.rfft(run_chain(p, x, turn))).pow(2).sum()


@right
def loss_that_is_a_view(p, x):
    return run_chain(p, x).reshape(-1)[0]


@right
def loss_of_leaves_alone(p, x):
    return torch.linalg.svdvals(p["layers.0.w"]).sum() + p["layers.1.w"][0, 0]


@right
def loss_that_is_an_element(p, x):
    return p["layers.0.w"][0, 0]


@right
def loss_returned_twice(p, x):
    loss = run_chain(p, x).sum()
    return loss, (
        loss,
        loss.detach(),
        {"twice": loss * 2, "x": x, "w": p["layers.0.w"], "row": p["layers.1.w"][0]},
    )


@right
def aux_of_views(p, x):
    y = run_chain(p, x)
    return y.sum(), (y.view(-1), y.T, y)


@right
def flattened_leaves(p, x):
    flat = torch.cat([v.flatten() for v in p.values()])
    return (x @ flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)).sum() + flat.norm()


@right
def chosen_attention(p, x):
    y = run_chain(p, x).view(1, 1, ROWS, WIDTH)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).sum()


@right
def multi_head_attention(p, x):
    y = run_chain(p, x)[None]
    return _attention(y, x[None], x[None])[0].sum() + _encoder(y).sum()


_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).requires_grad_(False)
_encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True).requires_grad_(False)


@right
def replaced_in_the_dict(p, x):
    q = dict(p)
    q["layers.0.w"] = q["layers.0.w"] * 2
    return run_chain(q, x).sum()


def test_aux_holds_values_from_before_the_update() -> None:
    params = chain(2)
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    step = fs.shard_step(loss_returned_twice, specs, optimizer=fs.optim.sgd(1.0), backend="eager")
    state, metrics = step(step.init(params), rows())
    assert torch.equal(metrics["aux"][2]["w"], params["layers.0.w"])
    assert torch.equal(metrics["aux"][2]["row"], params["layers.1.w"][0])
    assert not torch.equal(state.params["layers.0.w"], params["layers.0.w"])


# ------------------------------------------------------------------ losses


@refuse(r"0-d float tensor.*it returned f32\[4, 8\]")
def loss_of_many(p, x):
    return run_chain(p, x)


@refuse(r"it returned i64\[\]")
def integer_loss(p, x):
    return run_chain(p, x).sum().long()


@refuse(r"it returned complex64\[\]")
def complex_loss(p, x):
    return run_chain(p, x).sum().to(torch.complex64)


@refuse("it returned dict")
def loss_in_a_dict(p, x):
    return {"loss": run_chain(p, x).sum()}


@refuse("the loss depends on no trainable leaf.*trainable=True")
def loss_without_leaf(p, x):
    return x.sum()


@refuse("the loss depends on no trainable leaf")
def detached_loss(p, x):
    return run_chain(p, x).sum().detach()


# ------------------------------------------------------------------ modules


def _loss_of(model: nn.Module) -> tuple[Fn, dict[str, Tensor]]:
    apply, params = fs.make_functional(model)
    return (lambda p, x: apply(p, x).pow(2).sum()), params


def test_batch_norm_in_train_mode_names_the_way_out() -> None:
    fn, params = _loss_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with pytest.raises(
        TraceError,
        match=r"(?s)3 leaves.*num_batches.*running_mean.*running_var.*replace_all_batch_norm_modules_",
    ):
        our_grads(fn, params, rows())


@pytest.mark.parametrize("way", ["replaced", "eval"])
def test_batch_norm_the_way_out(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = torch.func.replace_all_batch_norm_modules_(model) if way == "replaced" else model.eval()
    fn, params = _loss_of(model)
    loss, grads = our_grads(fn, params, rows())
    wanted = model(rows()).pow(2).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(grads["0.weight"], model[0].weight.grad, atol=1e-4, rtol=1e-4)


class _Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x @ self.weight + self.mean


def test_a_module_that_assigns_to_its_buffer() -> None:
    fn, params = _loss_of(_Average())
    with pytest.raises(TraceError, match=r"(?s)assigns or writes to 1 leaf.*params\['mean'\].*aux"):
        our_grads(fn, params, rows())


def test_parameters_with_hooks_are_refused_by_make_functional() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 0)
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        TraceError, match=r"(?s)2 leaves of Linear with a gradient hook.*'weight'.*'bias'.*Fix"
    ):
        fs.make_functional(model)


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm]
)
def test_parametrised_weights(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).eval()
    fn, params = _loss_of(model)
    loss, grads = our_grads(fn, params, rows())
    wanted = model(rows()).pow(2).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    trained = {p: v.grad for p, v in model.named_parameters()}
    torch.testing.assert_close({p: grads[p] for p in trained}, trained)


def test_spectral_norm_in_train_mode_changes_buffers() -> None:
    fn, params = _loss_of(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(TraceError, match=r"(?s)changes 2 leaves in place.*weight.0._u"):
        our_grads(fn, params, rows())


# ------------------------------------------------------------------ what fn sees


def test_requires_grad_of_leaves_is_what_the_specs_say() -> None:
    seen: dict[str, bool] = {}

    def fn(p, x):
        seen.update({path: leaf.requires_grad for path, leaf in p.items()} | {"x": x.requires_grad})
        return run_chain(p, x).sum()

    rules = [("layers.0.*", LayoutSpec(trainable=False)), ("*", LayoutSpec())]
    step = fs.shard_step(fn, fs.match_specs(chain(), rules), backend="eager")
    _, grads = step(chain(), rows())
    assert seen == {
        "layers.0.w": False,
        "layers.1.w": True,
        "layers.2.w": True,
        "layers.3.w": True,
        "x": False,
    }
    assert grads["layers.0.w"] is None


def test_leaves_come_in_compute_dtype_and_batches_as_they_are() -> None:
    seen: dict[str, torch.dtype] = {}

    def fn(p, x, ids):
        seen.update({"w": p["layers.0.w"].dtype, "x": x.dtype, "ids": ids.dtype})
        return run_chain(p, x.to(torch.bfloat16)).float().sum()

    specs = fs.match_specs(chain(), [("*", LayoutSpec(compute_dtype=torch.bfloat16))])
    fs.shard_step(fn, specs, backend="eager").lower(
        chain(), rows().double(), torch.zeros(3, dtype=torch.int32)
    )
    assert seen == {"w": torch.bfloat16, "x": torch.float64, "ids": torch.int32}


def test_an_error_of_the_users_own_comes_through() -> None:
    with pytest.raises(KeyError, match="nope"):
        our_grads(lambda p, x: p["nope"], chain(), rows())


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
        with pytest.raises(TraceError, match="_Square"):
            _Square.apply(torch.ones(2))
    assert outcome == [([3.0, 3.0], [1.0, 1.0], (2,))]
    assert "data" not in vars(torch.Tensor) and "grad_fn" not in vars(torch.Tensor)
    assert _Square.apply(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_failed_trace_leaves_the_grad_mode_as_it_was() -> None:
    def fn(p, x):
        torch.set_grad_enabled(False)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        our_grads(fn, chain(), rows())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tracing_inside_an_outer_grad_mode(context: Callable[[], Any]) -> None:
    wanted, grads = plain_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
    with context():
        loss, ours = our_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
        torch.testing.assert_close((loss, ours), (wanted, grads))


def test_program_as_text() -> None:
    loss, params, tokens = llama(1)
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    program = fs.shard_step(loss, specs, backend="eager").lower(params, tokens).program
    text = program.as_text()
    assert "leaf layers.0.q.weight f32[16, 16]" in text
    assert "aten.scaled_dot_product_attention(" in text and "aten.linear(" in text
    assert text.splitlines()[-1].startswith("return ")
    assert str(program) == text
