"""`torch.autograd.Function`, checkpoints and gradient hooks inside `fn`: what plain torch makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_functions import (
    Bilinear,
    Coupling,
    InPlace,
    LinearLoss,
    Nested,
    NoGradient,
    Reverse,
    Round,
    SavesIntermediates,
    Several,
    Summed,
    Swish,
    Unmaterialized,
    cube,
)
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from toys import lower
from triton_kernels import STORED, SiLU, add_kernel
from triton_kernels import LinearLoss as LaunchedLoss

import fnshard as fs
from fnshard import TraceError
from fnshard.compiler.frontend.launches import stored

Params = dict[str, Tensor]
Fn = Callable[[Params, Tensor], Tensor]
LAYERS, WIDTH, ROWS, SLICES = 3, 4, 3, 4


def params() -> Params:
    numbers = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    return {
        f"layers.{i}.w": torch.randn(shape, dtype=torch.float64, generator=numbers) / 2 for i in range(LAYERS)
    }


def batches(count: int = SLICES) -> Tensor:
    """[count, ROWS, WIDTH]; equal slices are micro-batches or ranks."""
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(count, ROWS, WIDTH, dtype=torch.float64, generator=numbers)


PROGRAMS: dict[str, Fn] = {}


def program(fn: Fn) -> Fn:
    PROGRAMS[fn.__name__] = fn
    return fn


def between(each: Callable[[Tensor], Tensor]) -> Fn:
    """A chain of products, `each` behind every one of them."""

    def fn(p: Params, x: Tensor) -> Tensor:
        for w in p.values():
            x = each(x @ w)
        return (x * x.cos()).mean()

    return fn


# ------------------------------------------------------------------ functions


if torch.__version__ >= "2.12":  # before, torch takes no keywords
    PROGRAMS["gradient_reversal_by_name"] = between(lambda x: Reverse.apply(x, scale=2.0))
PROGRAMS |= {
    "straight_through": between(Round.apply),
    "gradient_reversal": between(Reverse.apply),
    "swish_recomputed": between(lambda x: Swish.apply(x, {"beta": 1.5})),
    "saves_intermediates": between(SavesIntermediates.apply),
    "an_output_unused": between(lambda x: Several.apply(x, x.sin())[0]),
    "outputs_used": between(lambda x: _combined(*Several.apply(x, x.cos()))),
    "unmaterialized": between(lambda x: Unmaterialized.apply(x)[1]),
    "once_differentiable": between(lambda x: NoGradient.apply(x, x)),
    "in_place": between(lambda x: InPlace.apply(x.sin()) + 1),
    "nested": between(Nested.apply),
    "custom_op": between(cube),
    "under_autocast": between(lambda x: _in_half(x).double()),
    "checkpoint_reentrant": between(lambda x: checkpoint(torch.sin, x, use_reentrant=True)),
    "checkpoint_not_reentrant": between(lambda x: checkpoint(torch.sin, x, use_reentrant=False)),
    "checkpoint_of_a_function": between(lambda x: checkpoint(Round.apply, x, use_reentrant=False)),
    "checkpoint_sequence": between(
        lambda x: checkpoint_sequential([torch.sin, Round.apply], 2, x, use_reentrant=True)
    ),
}  # fmt: skip


def _combined(product: Tensor, total: Tensor, text: str, fixed: Tensor, places: Tensor) -> Tensor:
    return product + total * fixed + places.unsqueeze(1)


def _in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Round.apply(x.float() @ torch.eye(WIDTH))


@program
def without_a_gradient(p: Params, x: Tensor) -> Tensor:
    """The first unit's alone is lost: nothing comes back from y."""
    a, b, c = p.values()
    return (NoGradient.apply(x @ b, (x @ a).sin()) @ c + x @ a).square().mean()


@program
def summed(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = Summed.apply(x @ w, w[0]).sin()
    return x.mean()


@program
def fused_linear_loss(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        hidden, x = x, torch.tanh(x @ w)
    return LinearLoss.apply(hidden, w, torch.arange(ROWS) % WIDTH, 2)


@program
def launches(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = SiLU.apply(x @ w, x.sin() + x) + x
    return LaunchedLoss.apply(x, w, torch.tensor([1, -100, 3])) * 3


@program
def reversible(p: Params, x: Tensor) -> Tensor:
    half = WIDTH // 2
    for w in p.values():
        f, g = (lambda z, w=w, i=i: torch.tanh(z @ w[i : i + half, :half]) for i in (0, half))
        x = Coupling.apply(x @ w, f, g)
    return x.square().mean()


@program
def leaves_of_two_units(p: Params, x: Tensor) -> Tensor:
    a, b, c = p.values()
    return (Bilinear.apply(x, a, b).sin() @ c).square().mean()


@program
def quantized_leaves(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        x = torch.tanh(x @ Round.apply(w))
    return x.square().mean()


@program
def a_quantized_leaf_twice(p: Params, x: Tensor) -> Tensor:
    """One that two units read, with a backward that is not linear."""

    class Signed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round(decimals=1)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.sign()

    a, b, c = p.values()
    tied = Signed.apply(a)
    return (torch.tanh(torch.tanh(x @ tied) @ b + x) @ c @ tied.t()).square().mean()


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
    c.register_hook(lambda g: g * 3)
    return (torch.tanh(h @ c) @ a.t()).square().mean()


@program
def a_hook_before_a_write(p: Params, x: Tensor) -> Tensor:
    for w in p.values():
        y = x @ w
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        y.mul_(2)
        y.register_hook(lambda g: g + 1)
        x = y.sin()
    return x.mean()


LINEAR = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
HOOKED = nn.Sequential(LINEAR, nn.Tanh())
HOOKED.register_full_backward_hook(lambda module, grads, _: (grads[0].clamp(-0.1, 0.1),))
HOOKED[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
LINEAR.register_full_backward_pre_hook(lambda module, grads: (grads[0] + 0.1,))


@program
def hooks_of_modules(p: Params, x: Tensor) -> Tensor:
    x = x @ p["layers.0.w"]
    for w in p.values():
        x = functional_call(HOOKED, {"0.weight": w}, (x,))
    return x.square().mean()


# ------------------------------------------------------------------ within transforms


class Curved(Function):
    """With a second derivative that is not the forward's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return g * (2 * x + y)


@program
def differentiated_inside(p: Params, x: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        for w in p.values():
            z = Curved.apply(z @ w)
        return z.sum()

    return (grad(f)(x).square().mean() + vmap(grad(f))(x).square().mean()) + f(x)


@program
def differentiated_by_autograd(p: Params, x: Tensor) -> Tensor:
    """The whole of `fn` is traced on a level; so are the functions that are not differentiated twice."""
    x = x.clone().requires_grad_()
    y = x
    for w in p.values():
        y = Curved.apply(y @ w)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope.square().mean() + Reverse.apply(y).mean()


# ------------------------------------------------------------------ equal to plain torch


@functools.cache
def plain(name: str) -> tuple[Tensor, list[Tensor]]:
    """Of the mean over all slices, each differentiated by itself."""
    total, sums = torch.zeros((), dtype=torch.float64), [torch.zeros_like(v) for v in params().values()]
    for x in batches():
        leaves = {k: v.requires_grad_() for k, v in params().items()}
        loss = PROGRAMS[name](dict(leaves), x) / SLICES
        loss.backward()
        total += loss.detach()
        for each, leaf in zip(sums, leaves.values(), strict=True):
            each += 0 if leaf.grad is None else leaf.grad
    return total, sums


def on_rank(rank: int, name: str, mesh: Any, step: Any, specs: Any) -> tuple[Tensor, list[Tensor]]:
    rows = batches().view(mesh.size, -1, WIDTH)[rank]
    value, grads = step(fs.shard(params(), specs, mesh), rows)
    return value, list(fs.unshard(grads, specs, mesh, layout="gradient").values())


def prepared(name: str, mesh: Any, preset: str, options: dict[str, Any]) -> Callable[[int], Any]:
    specs = fs.presets.PRESETS[preset](params(), mesh)
    step = fs.shard_step(
        PROGRAMS[name], specs, mesh=mesh, accumulate=SLICES // mesh.size, **{"backend": "eager", **options}
    )
    return lambda rank: on_rank(rank, name, mesh, step, specs)


def check(name: str, got: list[tuple[Tensor, list[Tensor]]]) -> None:
    for each in got:
        torch.testing.assert_close(each, plain(name), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", PROGRAMS)
def test_sharded_gradients_are_those_of_plain_torch(name: str) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    other = (("zero2", {}), ("no_shard", {"remat": 0.5}))[list(PROGRAMS).index(name) % 2]
    for preset, options in (("full_shard", {"remat": "unit"}), other):
        check(name, fs.simulate(mesh, prepared(name, mesh, preset, options)))


def on_gloo(rank: int) -> dict[str, Any]:
    mesh = fs.make_mesh(shard=2, device="cpu")
    return {name: prepared(name, mesh, "full_shard", {"remat": "unit"})(rank) for name in ON_GLOO}


ON_GLOO = [
    "straight_through",
    "reversible",
    "launches",
    "leaves_of_two_units",
    "hooks_of_leaves",
    "hooks_of_modules",
]


def test_real_ranks(ranks: Callable[[int], Any]) -> None:
    got = ranks(2).run(on_gloo)
    for name in ON_GLOO:
        check(name, [each[name] for each in got])


@pytest.mark.parametrize(
    "name", ["saves_intermediates", "fused_linear_loss", "reversible", "hooks_of_tensors", "launches"]
)
def test_inductor_compiles_it(name: str) -> None:
    mesh = fs.make_mesh(shard=1, simulated=True)
    check(name, fs.simulate(mesh, prepared(name, mesh, "full_shard", {"backend": "inductor"})))


def test_equal_blocks_share_kernels() -> None:
    leaves = {f"layers.{i}.w": torch.eye(WIDTH, dtype=torch.float64) for i in range(6)}

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * 2)
        return Reverse.apply(Swish.apply(x, {"beta": 1.5}))

    kernels = lower(between(hooked), leaves, batches()[0]).kernels.values()
    assert len(kernels) == 3  # of the first, the last, and all between
    assert not [
        n for k in kernels for g in (k.forward, k.backward) for n in g.graph.nodes if "clone" in str(n)
    ]


@pytest.mark.parametrize("kernel", STORED, ids=lambda k: k.fn.__name__)
def test_a_kernel_stores_to(kernel: Any) -> None:
    tensors = set(kernel.arg_names) - {"width", "stride"}  # numbers may be part of a pointer
    assert stored(kernel.fn) & tensors == STORED[kernel]


def test_a_launch_on_views_that_share_memory_is_refused() -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        both = torch.zeros(2 * ROWS)
        add_kernel[(1,)](both[:ROWS], both[ROWS:])  # one behind the other: taken
        add_kernel[(1,)](both[1:], both)
        return x.sum()

    with pytest.raises(TraceError, match=r"(?s)launches add_kernel, which stores.*both\[1:\], both\).*clone"):
        lower(fn, params(), batches()[0])


def test_equal_launches_share_kernels() -> None:
    leaves = {f"layers.{i}.w": torch.eye(WIDTH, dtype=torch.float64) for i in range(6)}
    lowered = lower(between(lambda x: SiLU.apply(x, x.sin())), leaves, batches()[0])
    assert len(lowered.kernels) == 3


class Noisy(Function):
    """Masks its input, and its gradient by another draw."""

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
                state, _ = step(state, batches()[0])
                moved = state.params["layers.0.w"].clone()
                state, _ = step(state, batches()[0])
                out.append((1 - moved, moved - state.params["layers.0.w"]))
            return out

        return fs.simulate(mesh, work)[0]

    once, again = run("unit")
    assert all(map(torch.equal, once, again)) and not torch.equal(*once)
    for bits in once:
        assert set(bits.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0}
    assert all(torch.equal(a, b) for a, b in zip(once, run("none")[0], strict=True))


def test_a_forward_alone_has_no_backwards() -> None:
    mesh = fs.make_mesh(shard=1, simulated=True)
    specs = fs.presets.full_shard(params(), mesh)
    run = fs.shard_forward(PROGRAMS["swish_recomputed"], specs, mesh=mesh, backend="eager")
    (got,) = fs.simulate(mesh, lambda _: run(params(), batches()[0]))
    torch.testing.assert_close(got, PROGRAMS["swish_recomputed"](params(), batches()[0]))


# ------------------------------------------------------------------ refused


class Wrong(Function):
    """`mistake` says what its backward returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mistake: Callable[[Tensor], Any]) -> Tensor:
        ctx.mistake = mistake
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.mistake(g)


class Once(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def implicit(x: Tensor) -> Tensor:
    """One step from a fixed point, whose derivative a hook makes of that of another such step."""
    start = x.detach().requires_grad_()
    end, made = torch.tanh(start * 0.5), torch.tanh(x * 0.5)
    made.register_hook(lambda g: g + torch.autograd.grad(end, start, g, retain_graph=True)[0])
    return made


def _hooked(register: Callable[[nn.Module], Any]) -> Fn:
    model = nn.Sequential(nn.Tanh())
    register(model)
    return between(model)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (between(lambda x: Wrong.apply(x, lambda g: g)), r"Wrong returns 1 gradient\(s\).*takes 2"),
        (
            between(lambda x: Wrong.apply(x, lambda g: (g[0, :2], None))),
            r"(?s)no gradient.*argument 0: \(2,\) for \(3, 4\)",
        ),
        (between(lambda x: Wrong.apply(x, lambda g: (1.0, None))), "(?s)no gradient.*argument 0: 1.0"),
        (
            between(lambda x: Wrong.apply(x, lambda g: (g * float(g.sum()), None))),
            "depends on a tensor's value",
        ),
        (
            lambda p, x: grad(lambda z: Once.apply(z @ p["layers.0.w"]).sum())(x).sum(),
            "differentiates Once twice",
        ),
        (lambda p, x: grad(lambda z: Swish.apply(z @ p["layers.0.w"], {}).sum())(x).sum(), "a setup_context"),
        (between(lambda x: Round.apply(x[x > 0]).sum() * x), "calls Round.*length that depends on data"),
        (between(lambda x: [x.register_hook(print), x][1]), "gradient hook that returns None"),
        (
            lambda p, x: grad(lambda z: [z.register_hook(torch.neg), z.sum()][1])(x @ p["layers.0.w"]).sum(),
            r"hook \(register_hook\)(.|\n)*Fix: .*inside itself, an autograd.Function",
        ),
        (
            _hooked(lambda m: m.register_full_backward_hook(lambda module, grads, out: None)),
            "gradient hook that returns None",
        ),
        (
            _hooked(lambda m: m.register_full_backward_hook(lambda module, grads, out: (out[0] * 2,))),
            "reads grad_output",
        ),
    ],
)
def test_mistakes_are_refused(fn: Fn, message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        lower(fn, params(), batches()[0])
    assert "test_autograd_functions.py:" in str(error.value)


def test_a_backward_computes_what_it_differentiates() -> None:
    with pytest.raises(TraceError, match=r"(?s)lost sight of \d value.*Fix: .*computes again what it"):
        lower(between(implicit), params(), batches()[0])


def test_hooks_with_lengths_that_depend_on_data_are_refused() -> None:
    fn = between(lambda x: [x.register_hook(torch.neg), x * x[x > 0].sum()][1])
    with pytest.raises(TraceError, match=r"gradient hook .*where lengths depend on data"):
        lower(fn, params(), batches()[0])
