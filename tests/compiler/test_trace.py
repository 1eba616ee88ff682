"""Tracing: programs inside `fn` whose gradients are autograd's, or that are refused with the way out."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from random import randint
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import ROWS, WIDTH, assert_same_grads, chain, our_grads, plain_grads, rows, run_chain, step_of

import fnshard as fs
from fnshard import LayoutSpec, TraceError
from fnshard.compiler.frontend.unsupported import refusals

RIGHT: dict[str, Callable[..., Any]] = {}
REFUSED: dict[str, tuple[Callable[..., Any], str | list[str], str]] = {}


def right(fn: Callable[..., Any]) -> Callable[..., Any]:
    RIGHT[fn.__name__] = fn
    return fn


def refuse(leaves: str | list[str], fix: str) -> Callable[[Callable[..., Any]], None]:
    return lambda fn: REFUSED.update({fn.__name__: (fn, leaves, fix)})


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


@refuse("torch.inference_mode", "torch.no_grad()")
def inference_mode(p, x):
    with torch.inference_mode():
        largest = x.abs().max()
    return run_chain(p, x).sum() * largest.clone()


@refuse(["in place", "1 detached tensor"], ".detach().clone()")
def writes_through_detach(p, x):
    h = x @ p["layers.0.w"]
    h.detach().mul_(p["layers.0.w"].mean())
    return h.sum()


@right
def data_of_a_slice(p, x):
    y = x @ p["layers.0.w"]
    low, high = y[:, :4], y[:, 4:]
    high.data.add_(1.0)
    return (high * 2).sum() + low.sin().sum()


@refuse("multiple views", "write to slices")
def data_of_a_chunk(p, x):
    low, high = (x @ p["layers.0.w"]).chunk(2, -1)
    high.data.add_(1.0)
    return (high * 2).sum() + low.sin().sum()


@refuse("Tensor.data", "buffer.copy_(value)")
def set_data(p, x):
    y = x @ p["layers.0.w"]
    y.data = y.data * 2
    return (y @ p["layers.1.w"]).sum()


@refuse(["requires_grad", "params['layers.0.w']"], "trainable=True or False")
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
def autocast_around_a_transform_of_a_float_island(p, x):
    def wide(z: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(z @ p["layers.0.w"]).square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        slope = torch.func.grad(wide)(x)
    return slope.square().sum() + run_chain(p, x).sum()


@right
def autocast_around_a_transform(p, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slope = torch.func.grad(lambda z: torch.tanh(z @ p["layers.0.w"]).square().sum())(x)
    return slope.square().sum() + run_chain(p, x).sum()


@right
def autocast_begins_with_dropout_that_drops_nothing(p, x):
    y = run_chain(p, x)
    z = y @ y.T  # outside, in the dtype of its operands
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.dropout(z, 0.5, training=False)
    return z.sin().sum()


@right
def bincount_of_half_weights(p, x):
    """torch sums them in fp64: 4096 halves are 2048, and 128 in bf16."""
    weights = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    counts = torch.bincount(torch.zeros(4096, dtype=torch.int64), weights, minlength=2)
    return run_chain(p, x).sum() * counts[0] / 1000


@right
def a_mask_of_a_deep_net(p, x):
    z = x
    for _ in range(300):
        z = torch.tanh(z * 1.01)
    mask = z @ z.T  # a bias of pairs
    return F.scaled_dot_product_attention(run_chain(p, x), x, x, attn_mask=mask).sum()


@right
def a_hook_that_reads_a_deep_net(p, x):
    h = run_chain(p, x)
    z = h
    for _ in range(300):
        z = torch.tanh(z * 1.01)
    scale = z.detach().mean()
    h.register_hook(lambda g: g * scale)
    return h.sum() + z.sum()


@right
def forward_pre_hook(p, x):
    relu = nn.ReLU()
    relu.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    relu.register_forward_hook(lambda module, args, out: out + 1)
    return relu(run_chain(p, x)).sum()


@refuse("grad_fn.register_hook", "Tensor.register_hook")
def old_backward_hook(p, x):
    relu = nn.ReLU()
    relu.register_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    return relu(run_chain(p, x)).sum()


@refuse("saved_tensors_hooks", "custom_op")
def saved_tensors_hooks(p, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        y = run_chain(p, x)
    return y.sum()


@right
def save_on_cpu(p, x):
    with torch.autograd.graph.save_on_cpu():
        y = run_chain(p, x)
    return y.sum()


@refuse("sdpa_kernel", "around all calls of the step")
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


@refuse("torch.jit ScriptFunction", "scripted from")
def scripted(p, x):
    y = run_chain(p, x)
    return y.sum() + _scripted(y).sum()


# ------------------------------------------------------------------ derivatives inside fn, vmap, operators

REFUSED |= {
    "custom op without fake": (
        lambda p, x: run_chain(p, x).sum() + _no_fake(x).sum(),
        "no_fake", "register_fake",
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


@refuse("is_grads_batched=True", "torch.func.jacrev")
def batched_gradients(p, x):
    y = run_chain(p, x)
    cotangents = torch.ones(3, *y.shape)
    return torch.autograd.grad(y, [p["layers.0.w"]], cotangents, is_grads_batched=True)[0].sum()


@refuse(["backward()", ".grad"], "torch.autograd.grad")
def backward(p, x):
    y = run_chain(p, x).sum()
    y.backward()
    return y


@refuse("while_loop", "custom_op")
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
        with raises(TraceError, leaves="manual_seed", fix="seed="):
            torch.manual_seed(0)
    assert outcome == [([3.0, 3.0], [1.0, 1.0], (2,))]
    assert "data" not in vars(torch.Tensor) and "grad_fn" not in vars(torch.Tensor)
    assert not {"setup_context", "forward"} & vars(type(torch.autograd.Function)).keys()
    assert _Square.apply(torch.ones(2)).tolist() == [1.0, 1.0]


# ------------------------------------------------------------------ values that decide

RIGHT |= {
    "item of a constant": lambda p, x: run_chain(p, x).sum() * torch.tensor(2.0).item(),
}  # fmt: skip

REFUSED |= {
    "branch": (lambda p, x: run_chain(p, x).sum() if x.sum() > 0 else x.sum(), "tensor's value",
               "torch.where"),
}  # fmt: skip


# ------------------------------------------------------------------ random numbers

RIGHT |= {
    "lstm in eval mode": lambda p, x: _lstm_eval(run_chain(p, x)[None])[0].sum(),
}  # fmt: skip

REFUSED |= {
    "poisson": (
        lambda p, x: run_chain(p, x).sum() + torch.poisson(x.abs()).sum(),
        "aten.poisson", "torch.randn",
    ),
    "lstm with dropout": (
        lambda p, x: _lstm(run_chain(p, x)[None])[0].sum(),
        "aten.lstm", "torch.randn",
    ),
}  # fmt: skip


_lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5).requires_grad_(False)
_lstm_eval = copy.deepcopy(_lstm).eval()


@refuse("manual_seed", "seed=")
def manual_seed(p, x):
    torch.manual_seed(0)
    return (run_chain(p, x) * torch.rand(WIDTH)).sum()


# ------------------------------------------------------------------ writing in place

REFUSED |= {
    "embedding max norm": (
        lambda p, x: F.embedding(torch.tensor([0, 1]), p["layers.0.w"], max_norm=1.0).sum(),
        ["1 leaf", "params['layers.0.w']", "aten.embedding_renorm_"], "trainable=False",
    ),
    "resize in place": (
        lambda p, x: (run_chain(p, x) * x.new_zeros(2).resize_(ROWS, WIDTH).zero_()).sum(),
        "aten.resize_", "x.new_zeros",
    ),
}  # fmt: skip


@refuse(["1 leaf", "params['layers.0.w']", "aten.mul_"], "trainable=False")
def leaf_data_in_place(p, x):
    p["layers.0.w"].data.mul_(2)
    return run_chain(p, x).sum()


@right
def detached_alias_in_place(p, x):
    y = x @ p["layers.0.w"]
    y.detach().zero_()
    return (y * x).sum()


@right
def writes_between_results_of_one_op(p, x):
    largest, at = (x @ p["layers.0.w"]).max(0)
    largest[1:].mul_(at[1:] * p["layers.1.w"][0, 1:])
    real = torch.view_as_complex((x @ p["layers.2.w"]).view(ROWS, -1, 2)).real
    real.add_(largest[: WIDTH // 2])
    return (largest.sum() * real).sum()


@right
def other_shapes_in_place(p, x):
    y = x @ p["layers.0.w"]
    row, turned = y[0], y.t()
    y.t_().unsqueeze_(0).mul_(p["layers.1.w"][0][:, None])
    y.squeeze_(0).swapaxes_(0, 1)
    return (y * row).sum() + turned.pow(2).sum()


@refuse(["aten.mul.out", "[0] for [4, 8]"], "leave out= away")
def out_of_another_shape(p, x):
    with torch.no_grad():
        out = torch.mul(x, 2, out=x.new_empty(0))
    return (run_chain(p, x) * out).sum()


# ------------------------------------------------------------------ what fn closes over

RIGHT |= {
    "small constant": lambda p, x: (run_chain(p, x) * _small).sum() + (x * torch.tensor([2.0] * WIDTH)).sum(),
}  # fmt: skip

REFUSED |= {
    "constant that requires grad": (
        lambda p, x: (run_chain(p, x) * _trained).sum(),
        ["1 tensor", "requires grad"], "trainable=False",
    ),
    "large constant": (
        lambda p, x: run_chain(p, x).sum() + _large[0].sum(),
        ["1 tensor", "1 MB"], "trainable=False",
    ),
}  # fmt: skip


_small = torch.arange(float(WIDTH))
_trained = torch.ones(WIDTH, requires_grad=True)
_large = torch.ones(600, 600)


@right
def literal_in_place(p, x):
    fresh = torch.tensor([1.0] * WIDTH)
    fresh.add_(1)
    return (run_chain(p, x) * fresh).sum()


# ------------------------------------------------------------------ the host's random numbers

REFUSED |= {
    "pythons random numbers": (
        lambda p, x: (run_chain(p, x) * random.gauss(0, 1)).sum(),
        "Python's random",
        ["draw with torch", "as tensors"],
    ),
    "numpys random numbers": (
        lambda p, x: (run_chain(p, x) * torch.from_numpy(np.random.rand(WIDTH)).float()).sum(),
        "numpy.random",
        "draw with torch",
    ),
    "a function imported by its name": (
        lambda p, x: (run_chain(p, x) * randint(0, 3)).sum(),
        "Python's random",
        "draw with torch",
    ),
    "a generator of ones own": (
        lambda p, x: (run_chain(p, x) * _python.random()).sum(),
        "a Random",
        "draw with torch",
    ),
    "a generator of numpys": (
        lambda p, x: (run_chain(p, x) * _numpy.normal()).sum(),
        "a Generator",
        "draw with torch",
    ),
    "bits of numpys": (
        lambda p, x: (run_chain(p, x) * _bits.random_raw()).sum(),
        "a PCG64",
        "draw with torch",
    ),
}  # fmt: skip

_python, _numpy, _bits = random.Random(0), np.random.default_rng(0), np.random.PCG64(0)


@right
def a_seeded_generator_made_anew(p, x):
    return (run_chain(p, x) * np.random.default_rng(0).normal() * random.Random(0).random()).sum()


# ------------------------------------------------------------------ shapes of programs

RIGHT |= {
    "loss that is a view": lambda p, x: run_chain(p, x).reshape(-1)[0],
    "loss of leaves alone": lambda p, x: torch.linalg.svdvals(p["layers.0.w"]).sum() + p["layers.1.w"][0, 0],
    "loss that is an element": lambda p, x: p["layers.0.w"][0, 0],
}  # fmt: skip


@right
def loss_returned_twice(p, x):
    loss = run_chain(p, x).sum()
    return loss, (
        loss,
        loss.detach(),
        {"twice": loss * 2, "x": x, "w": p["layers.0.w"], "row": p["layers.1.w"][0]},
    )


@right
def replaced_in_the_dict(p, x):
    q = dict(p)
    q["layers.0.w"] = q["layers.0.w"] * 2
    return run_chain(q, x).sum()


def test_aux_holds_values_from_before_the_update() -> None:
    params = chain(2)
    step = step_of(loss_returned_twice, params, optimizer=fs.optim.sgd(1.0))
    state, metrics = step(step.init(params), rows())
    assert torch.equal(metrics["aux"][2]["w"], params["layers.0.w"])
    assert torch.equal(metrics["aux"][2]["row"], params["layers.1.w"][0])
    assert not torch.equal(state.params["layers.0.w"], params["layers.0.w"])


# ------------------------------------------------------------------ losses

REFUSED |= {
    "loss of many": (lambda p, x: run_chain(p, x), ["0-d float tensor", "f32[4, 8]"], "loss.mean()"),
    "integer loss": (lambda p, x: run_chain(p, x).sum().long(), "i64[]", "loss.mean()"),
    "complex loss": (lambda p, x: run_chain(p, x).sum().to(torch.complex64), "complex64[]", "loss.mean()"),
    "loss in a dict": (lambda p, x: {"loss": run_chain(p, x).sum()}, "returned dict", "loss.mean()"),
    "loss without leaf": (lambda p, x: x.sum(), "no trainable leaf", "trainable=True"),
}  # fmt: skip


# ------------------------------------------------------------------ modules


def test_parameters_with_hooks_are_refused_by_make_functional() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 0)
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
    with raises(TraceError, leaves=["Linear", "'weight'", "'bias'"], fix="remove the hooks", says="2 leaves"):
        fs.make_functional(model)


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


def test_a_failed_trace_leaves_the_grad_mode_as_it_was() -> None:
    def fn(p, x):
        torch.set_grad_enabled(False)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        our_grads(fn, chain(), rows())
    assert torch.is_grad_enabled()


def test_autocast_around_a_step_is_refused_at_the_trace_and_after() -> None:
    params = {"w": torch.ones(4, 4)}
    step = fs.shard_step(lambda p, x: (x @ p["w"]).sum(), fs.match_specs(params, [("*", LayoutSpec())]))
    for _ in range(2):
        with (
            torch.autocast("cpu", torch.bfloat16),
            raises(
                TraceError,
                leaves="torch.autocast('cpu')",
                fix=["inside of `fn`", "compute_dtype=torch.bfloat16"],
            ),
        ):
            step(params, torch.ones(2, 4))
        step(params, torch.ones(2, 4))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tracing_inside_an_outer_grad_mode(context: Callable[[], Any]) -> None:
    expected, grads = plain_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
    with context():
        loss, ours = our_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
        torch.testing.assert_close((loss, ours), (expected, grads))


def _sparse_embeddings(p, x):
    ids = torch.tensor([1, 2, 3, 3])
    bags = F.embedding_bag(ids, p["layers.1.w"], torch.tensor([0, 2]), mode="sum", sparse=True)
    return F.embedding(ids, p["layers.0.w"], sparse=True).pow(2).sum() + bags.pow(2).sum()


def test_an_embedding_with_sparse_gradient_gets_a_dense_one() -> None:
    expected, sparse = plain_grads(_sparse_embeddings, chain(), rows())
    loss, grads = our_grads(_sparse_embeddings, chain(), rows())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, {p: g.to_dense() for p, g in sparse.items()})


# ------------------------------------------------------------------ all of them


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_those_of_autograd(name: str) -> None:
    assert_same_grads(RIGHT[name], chain(), rows())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    fn, leaves, fix = REFUSED[name]
    with raises(TraceError, leaves=leaves, fix=fix):
        our_grads(fn, chain(), rows())
