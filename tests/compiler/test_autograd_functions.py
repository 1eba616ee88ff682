"""`torch.autograd.Function`, checkpoints and gradient hooks inside `fn`: what plain torch makes of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from custom_functions import function
from errors import raises
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import grad, vmap
from toys import lower
from zoo import ROWS, WIDTH, Fn, Params, batches, between, check, check_compiled, net, params, step_on, table

import fnshard as fs
from fnshard import TraceError

PROGRAMS: dict[str, Fn] = {}


def program(fn: Fn) -> Fn:
    PROGRAMS[fn.__name__] = fn
    return fn


# ------------------------------------------------------------------ functions: each thing that torch allows


class Reverse(Function):
    @staticmethod
    def forward(x: Tensor, scale: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class SavesIntermediates(Function):
    """A function with tensors on the context, saved outputs, in-place ops, and a view as its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.new_zeros(2, *x.shape)
        wide[0] = x.sin()
        wide[1].add_(x).mul_(2)
        ctx.wide = wide
        out = (wide[0] * wide[1]).view(-1)
        ctx.save_for_backward(out, None)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out, nothing = ctx.saved_tensors
        assert nothing is None
        slope = torch.empty_like(g)
        slope.copy_(ctx.wide[1] * g)
        slope.add_(out.view(g.shape).cos())
        return slope.mul_(2)


class Several(Function):
    """A function of two outputs to read, one that is no tensor, one without derivative, one of integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        fixed = x.sign()
        ctx.mark_non_differentiable(fixed)
        return x * y, x + y, "text", fixed, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, text: None, fixed: Tensor, place: Tensor) -> Any:
        x, y = ctx.saved_tensors
        assert text is None and fixed.shape == x.shape
        to_y = 2 * product * x + total if ctx.needs_input_grad[1] else None
        return 3 * product * y + total + fixed, to_y


class LinearLoss(Function):
    """A loss like Liger's fused linear cross-entropy: the forward computes the gradients chunk by chunk."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        loss = torch.zeros((), dtype=hidden.dtype)
        for low in range(0, len(hidden), chunk):
            part = slice(low, low + chunk)
            logits = hidden[part] @ weight
            slope = logits.softmax(-1)
            chosen = target[part].unsqueeze(1)
            loss += (torch.logsumexp(logits, -1) - logits.gather(1, chosen).squeeze(1)).sum()
            slope.scatter_add_(1, chosen, -torch.ones_like(chosen, dtype=slope.dtype))
            to_hidden[part] = slope @ weight.t()
            to_weight.addmm_(hidden[part].t(), slope)
        ctx.save_for_backward(to_hidden.detach(), to_weight.detach() if weight.requires_grad else None)
        return loss

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> Any:
        to_hidden, to_weight = ctx.saved_tensors
        to_hidden.mul_(g)  # as Liger does
        return to_hidden, to_weight.mul_(g), None, None


quantized = function(lambda x: torch.round(x * 4) / 4, lambda g, y, x: g)  # straight-through
swish = function(
    lambda x: x * torch.sigmoid(x * 1.5),
    lambda g, y, x: g * ((s := torch.sigmoid(x * 1.5)) + x * 1.5 * s * (1 - s)),
)
nested = function(lambda x: quantized(x) + swish(x), lambda g, y, x: quantized(g * x))
bilinear = function(  # its backward reads leaves, of another unit too
    lambda x, a, b: x @ a @ b,
    lambda g, y, x, a, b: (g @ b.t() @ a.t(), x.t() @ g @ b.t(), 2 * (x @ a).t() @ g),
)
curved = function(torch.sin, lambda g, y, x: g * (2 * x + y), "setup")  # another second derivative


if torch.__version__ >= "2.12":  # before, torch takes no keywords
    PROGRAMS["gradient_reversal_by_name"] = between(lambda x: Reverse.apply(x, scale=2.0))
PROGRAMS |= {
    "straight_through": between(quantized),
    "gradient_reversal": between(Reverse.apply),
    "saves_intermediates": between(SavesIntermediates.apply),
    "outputs_used": between(lambda x: _combined(*Several.apply(x, x.cos()))),
    "nested": between(nested),
    "under_autocast": between(lambda x: _in_half(x).double()),
}  # fmt: skip


def _combined(product: Tensor, total: Tensor, text: str, fixed: Tensor, places: Tensor) -> Tensor:
    return product + total * fixed + places.unsqueeze(1)


def _in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return quantized(x.float() @ torch.eye(WIDTH))


@program
def fused_linear_loss(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        hidden, x = x, torch.tanh(x @ w)
    return LinearLoss.apply(hidden, w, torch.arange(ROWS) % WIDTH, 4)


@program
def leaves_of_two_units(p: Params, x: Tensor) -> Tensor:
    a, b, c = p.values()
    return (bilinear(x, a, b).sin() @ c).square().mean()


# ------------------------------------------------------------------ hooks


@program
def hooks_of_tensors(p: Params, x: Tensor) -> Tensor:
    limit = x.abs().mean()
    for i, w in enumerate(p.values()):
        y = x @ w
        early = y.sin()
        mask = (y > 0).double()
        y.register_hook(lambda g, limit=limit: g.clamp(-0.01, 0.01) * limit)
        y.register_hook(lambda g, mask=mask, i=i: g.clone() + mask * (i + 1))
        y.register_hook(lambda g: g * 0).remove()
        x = y * early
    return x.mean()


@program
def hooks_of_leaves(p: Params, x: Tensor) -> Tensor:
    a, b, c = p.values()
    h = torch.tanh(x @ a) @ b
    a.register_hook(lambda g: g.clamp(-0.01, 0.01))
    with torch.no_grad():
        c.register_hook(lambda g: g * 3)
    return (torch.tanh(h @ c) @ a.t()).square().mean()


@program
def hooks_in_a_mean(p: Params, x: Tensor) -> Tensor:
    """Register hooks that see gradients of the mean over all slices, which count more and fewer items."""
    y, counted = net(p, x), x[:, 0] > 0
    y.register_hook(lambda g: g.clamp(-0.01, 0.01) + g * g.abs().max())
    return fs.Mean((y.square().sum(-1) * counted).sum(), counted.sum())


# ------------------------------------------------------------------ within transforms


@program
def differentiated_inside(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        for w in p.values():
            z = curved(z @ w)
        return z.sum()

    return (grad(f)(x).square().mean() + vmap(grad(f))(x).square().mean()) + f(x)


@program
def differentiated_by_autograd(p: Params, x: Tensor) -> Tensor:
    """Differentiate inside of `fn`: all of it is traced on a level, also what is not taken twice."""
    x = x.clone().requires_grad_()
    y = x
    for w in p.values():
        y = curved(y @ w)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.no_grad():
        scale = Reverse.apply(y)
    return slope.square().mean() + (Reverse.apply(y) * scale).mean()


# ------------------------------------------------------------------ equal to plain torch


test_sharded_gradients_are_those_of_plain_torch = pytest.mark.suite(
    but={
        "differentiated_inside-*": "differentiated_by_autograd",
        "leaves_of_two_units-*": "outputs_used",
        "gradient_reversal-*": "gradient_reversal_by_name",
    }
)(table(PROGRAMS))
ON_PROCESSES = ["leaves_of_two_units", "hooks_of_leaves", "hooks_in_a_mean"]


def on_rank(rank: int) -> Any:
    mesh = fs.make_mesh(shard=2, device="cpu")
    return {name: step_on(PROGRAMS[name], mesh, accumulate=2, remat="unit")(rank) for name in ON_PROCESSES}


def test_real_ranks(ranks: Callable[[int], Any]) -> None:
    got = ranks(2).run(on_rank)
    for name in ON_PROCESSES:
        check(PROGRAMS[name], [each[name] for each in got], 4)


@pytest.mark.long  # tests/step/test_gloo.py compiles a step
@pytest.mark.parametrize("name", ["fused_linear_loss", "saves_intermediates", "hooks_of_tensors"])
def test_inductor_compiles_it(name: str) -> None:
    """Plain operators, of whichever program they are."""
    check_compiled(PROGRAMS[name])


def test_equal_blocks_share_kernels() -> None:
    leaves = {f"layers.{i}.w": torch.eye(WIDTH, dtype=torch.float64) for i in range(6)}

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * 2)
        return Reverse.apply(swish(x))

    kernels = lower(between(hooked), leaves, batches(1)[0]).kernels.values()
    assert len(kernels) == 3  # of the first, the last, and all between
    assert not [
        n for k in kernels for g in (k.forward, k.backward) for n in g.graph.nodes if "clone" in str(n)
    ]


def test_a_raw_launch_of_a_triton_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class KernelInterface:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *args: None

    stub: Any = ModuleType("triton.runtime.jit")
    stub.KernelInterface = KernelInterface
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", stub)

    def fn(p: Params, x: Tensor) -> Tensor:
        KernelInterface()[(1,)](x)
        return x.sum()

    with raises(TraceError, leaves="Triton kernel", fix="torch.library.triton_op"):
        lower(fn, params(), batches(1)[0])


class Noisy(Function):
    """A function that masks its input, and its gradient by another draw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = (torch.rand_like(x) < 0.5).double()
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.mask + 2 * (torch.rand(g.shape) < 0.5) + 4 * (torch.rand(g.shape) < 0.5))


def test_random_numbers_are_keyed() -> None:
    """Gradients of ones are bits, of three draws: recomputed the same, and others in a new step."""

    def fn(p: Params, _: Tensor) -> Tensor:
        h = Noisy.apply(p["layers.0.w"].reshape(-1)).sum()
        return h + 0 * sum(w.sum() for w in p.values())

    leaves = {f"layers.{i}.w": torch.ones(8, 8, dtype=torch.float64) for i in range(2)}
    mesh = fs.make_mesh(shard=1, simulated=True)
    specs = fs.presets.full_shard(leaves, mesh)

    def run(remat: str) -> list[tuple[float, Tensor]]:
        options = {"optimizer": fs.optim.sgd(1.0), "backend": "eager", "remat": remat}
        step = fs.shard_step(fn, specs, mesh=mesh, **options)

        def work(_: int) -> list[tuple[float, Tensor]]:
            out = []
            for _ in range(2):
                state = step.init(leaves)
                state, _ = step(state, batches(1)[0])
                moved = state.params["layers.0.w"].clone()
                state, _ = step(state, batches(1)[0])
                out.append((1 - moved, moved - state.params["layers.0.w"]))
            return out

        return fs.simulate(mesh, work)[0]

    once, again = run("unit")
    assert all(map(torch.equal, once, again)) and not torch.equal(*once)
    for bits in once:
        assert set(bits.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0}
    assert all(torch.equal(a, b) for a, b in zip(once, run("none")[0], strict=True))


# ------------------------------------------------------------------ refused


class Wrong(Function):
    """A function whose backward returns what `mistake` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mistake: Callable[[Tensor], Any]) -> Tensor:
        ctx.mistake = mistake
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.mistake(g)


class CallsBackward(Function):
    """A function that calls backward into the leaves that it reads, as checkpoints written by hand do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            x.sin().backward(g)
        return x.grad


HOOKED = nn.Tanh()
HOOKED.register_full_backward_hook(lambda module, grads, out: (grads[0] * 2,))
once_of_one = function(torch.sin, lambda g, *_: g, "setup once")


def implicit(x: Tensor) -> Tensor:
    """Take one step from a fixed point, whose derivative a hook makes of that of another such step."""
    start = x.detach().requires_grad_()
    end, made = torch.tanh(start * 0.5), torch.tanh(x * 0.5)
    made.register_hook(lambda g: g + torch.autograd.grad(end, start, g, retain_graph=True)[0])
    return made


@pytest.mark.parametrize(
    ("fn", "leaves", "fix"),
    [
        (between(lambda x: Wrong.apply(x, lambda g: g)), ["Wrong", "1 gradient(s)", "takes 2"], ()),
        (
            between(lambda x: Wrong.apply(x, lambda g: (g[0, :2], None))),
            ["argument 0", "(2,) for (6, 8)"],
            "shape",
        ),
        (
            between(lambda x: Wrong.apply(x, lambda g: (1.0, None))),
            "argument 0: 1.0",
            "shape",
        ),
        (
            between(lambda x: Wrong.apply(x, lambda g: (g * float(g.sum()), None))),
            "tensor's value",
            (),
        ),
        (
            lambda p, x: grad(lambda z: once_of_one(z @ p["layers.0.w"]).sum())(x).sum(),
            "Custom twice",
            (),
        ),
        (lambda p, x: grad(lambda z: swish(z @ p["layers.0.w"]).sum())(x).sum(), (), "a setup_context"),
        (between(lambda x: quantized(x[x > 0]).sum() * x), ["Custom", "depends on data"], ()),
        (between(lambda x: [x.register_hook(print), x][1]), "hook that returns None", "return the gradient"),
        (
            lambda p, x: grad(lambda z: [z.register_hook(torch.neg), z.sum()][1])(x @ p["layers.0.w"]).sum(),
            "(register_hook)",
            "autograd.Function",
        ),
        (lambda p, x: HOOKED(x @ p["layers.0.w"]).sum(), "(a full backward hook of a module)", ()),
        (between(lambda x: CallsBackward.apply(x)), "backward()", "torch.autograd.grad"),
    ],
)
def test_mistakes_are_refused(fn: Fn, leaves: Any, fix: Any) -> None:
    with raises(TraceError, leaves=leaves, fix=fix) as error:
        lower(fn, params(), batches(1)[0])
    assert re.search(r"((autograd|custom)_functions|zoo)\.py:", str(error.value))


def test_a_backward_computes_what_it_differentiates() -> None:
    with raises(TraceError, says="value(s)", fix="computes again"):
        lower(between(implicit), params(), batches(1)[0])
