"""`torch.autograd.Function`, checkpoints and gradient hooks inside `fn`: what plain torch makes of them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from autograd_programs import PROGRAMS, SLICES, WIDTH, Fn, Params, batches, between, params
from own_functions import Reverse, Round, Swish
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad
from toys import lower

import fnshard as fs
from fnshard import TraceError

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
    "leaves_of_two_units",
    "hooks_of_leaves",
    "hooks_of_modules",
]


def test_real_ranks(ranks: Callable[[int], Any]) -> None:
    got = ranks(2).run(on_gloo)
    for name in ON_GLOO:
        check(name, [each[name] for each in got])


@pytest.mark.parametrize(
    "name", ["saves_intermediates", "fused_linear_loss", "reversible", "hooks_of_tensors"]
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

    with pytest.raises(TraceError, match=r"(?s)launches a Triton kernel.*torch.library.triton_op"):
        lower(fn, params(), batches()[0])


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
    assert re.search(r"autograd_(functions|programs)\.py:", str(error.value))


def test_a_backward_computes_what_it_differentiates() -> None:
    with pytest.raises(TraceError, match=r"(?s)lost sight of \d value.*Fix: .*computes again what it"):
        lower(between(implicit), params(), batches()[0])


def test_hooks_with_lengths_that_depend_on_data_are_refused() -> None:
    fn = between(lambda x: [x.register_hook(torch.neg), x * x[x > 0].sum()][1])
    with pytest.raises(TraceError, match=r"gradient hook .*where lengths depend on data"):
        lower(fn, params(), batches()[0])
