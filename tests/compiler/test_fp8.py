"""fp8: what is rounded, by which scale; products next to plain autograd and the device's; bytes; mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fnshard as fs
from fnshard.compiler.rewrites import fp8
from fnshard.layout.spec import FP8

SHAPES = {"embed.weight": (20, 32), "norm": (32,), "up": (64, 32), "up_bias": (64,), "down": (32, 64),
          "odd": (32, 20)}  # fmt: skip
NARROW = ("up", "down")


def leaves() -> dict[str, Tensor]:
    """Draw leaves; rows of `up` grow, so that each rank's shard has another largest number."""
    draw = torch.Generator().manual_seed(0)
    params = {p: torch.randn(s, generator=draw) * 0.3 for p, s in SHAPES.items()}
    params["up"] *= torch.linspace(0.1, 3, 64)[:, None]
    return params


def loss(p: dict[str, Tensor], tokens: Tensor) -> Any:
    x = F.rms_norm(F.embedding(tokens, p["embed.weight"]), (32,), p["norm"])
    h = F.silu(F.linear(x, p["up"], p["up_bias"]))
    x = x + F.linear(h, p["down"])
    logits = (x @ p["odd"]).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), {"up": p["up"]}


TOKENS = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------ the truth, by hand
def nearest(x: Tensor, dtype: torch.dtype, scaling: str = "tensorwise") -> Tensor:
    """Round x, or each row, to a dtype by the largest power of two that keeps it finite; in fp64."""
    if scaling == "rowwise":
        return torch.stack([nearest(row, dtype) for row in x.flatten(0, -2)]).view(x.shape)
    largest, most = float(x.abs().max()) or 1.0, torch.finfo(dtype).max
    scale = 1.0
    while largest * scale * 2 <= most:
        scale *= 2
    while largest * scale > most:
        scale /= 2
    return (x.double() * scale).to(dtype).double() / scale


class Rounded(torch.autograd.Function):
    """A product of rounded numbers, and of a gradient that is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:
        narrow, turned = (nearest(each, torch.float8_e4m3fn, scaling) for each in (x, weight))
        ctx.scaling = scaling
        ctx.save_for_backward(x.double() if scaling == "rowwise" else narrow, turned)
        return (narrow @ turned.T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        if ctx.scaling == "rowwise":  # rows of the leaf have scales, which the gradient is multiplied by
            scales = torch.stack([fp8.scale_of(row.abs().max(), torch.float8_e4m3fn) for row in weight])
            narrow = nearest((grad.double() / scales).bfloat16(), torch.float8_e5m2, "rowwise")
            to_x, flat = (narrow * scales) @ weight, grad.double().flatten(0, -2)
            return to_x.to(grad.dtype), (flat.T @ x.flatten(0, -2)).to(grad.dtype), None
        narrow = nearest(grad, torch.float8_e5m2)
        to_weight = narrow.flatten(0, -2).T @ x.flatten(0, -2)
        return (narrow @ weight).to(grad.dtype), to_weight.to(grad.dtype), None


def by_hand(
    params: dict[str, Tensor], tokens: Tensor, up: str = "tensorwise", down: str = "tensorwise",
    ranks: int = 1,
) -> dict[str, Tensor]:  # fmt: skip
    """Compute one rank's part of the gradients, in bf16 but for the products; `up`, `down` are scalings."""
    p = {path: leaf.bfloat16().requires_grad_() for path, leaf in params.items()}
    for path, scaling in zip(NARROW, (up, down), strict=True):
        p[path] = nearest(params[path], torch.float8_e4m3fn, scaling).bfloat16().requires_grad_()
    x = F.rms_norm(F.embedding(tokens, p["embed.weight"]), (32,), p["norm"])
    h = F.silu(Rounded.apply(x, p["up"], up) + p["up_bias"])
    x = x + Rounded.apply(h, p["down"], down)
    logits = (x @ p["odd"]).float()
    mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (mean / ranks).backward()  # the step divides before products round, too
    return {path: leaf.grad.float() for path, leaf in p.items()}


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def step_on(
    ranks: int, preset: str = "full_shard", abstract: bool = False, dtype: Any = FP8,
    policy: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    params, axes = leaves(), {"replicate": 2, "shard": 2} if preset == "hybrid_shard" else {"shard": ranks}
    mesh = fs.make_mesh(**axes, **{"abstract" if abstract else "simulated": True})
    dtypes = {"compute_dtype": dtype, "reduce_dtype": torch.float32}
    specs = fs.presets.PRESETS[preset](params, mesh, **dtypes, **(policy or {}))
    return fs.shard_step(loss, specs, mesh=mesh, backend="eager", **options), params, specs, mesh


# One leaf with a scale a row, split along these, and one with a scale, in one line.
MIXED = {"rules": [("up", fs.LayoutSpec(fs.P(None, "shard"), compute_dtype=FP8, scaling="rowwise"))]}


@pytest.mark.suite({
    "2-full_shard-policy7": "rows, gathered in eight bits",
    "3-full_shard-policy11": "rows that three ranks do not divide",
    "2-no_shard-policy9": "rows, whole",
    "2-full_shard-policy12": "a bucket of both",
})  # fmt: skip
@pytest.mark.parametrize(
    ("ranks", "preset", "policy"),
    [
        (ranks, preset, {"scaling": scaling}) for scaling in ("tensorwise", "rowwise")
        for ranks, preset in [
            (1, "no_shard"), (2, "full_shard"), (2, "zero2"), (2, "no_shard"), (4, "hybrid_shard"),
            (3, "full_shard"),
        ]
    ] + [(2, "full_shard", MIXED), (4, "zero2", MIXED)],
)  # fmt: skip
def test_gradients_are_those_of_rounded_products(ranks, preset, policy):
    """They are the sum of all ranks' parts, by hand; `fn` sees what one scale for all shards rounds to."""
    down = policy.get("scaling", "tensorwise")
    up = "rowwise" if policy is MIXED else down
    step, params, specs, mesh = step_on(ranks, preset, policy=policy)
    part = len(TOKENS) // ranks
    by_rank = [by_hand(params, TOKENS[i * part :][:part], up, down, ranks) for i in range(ranks)]
    expected = {path: torch.stack([g[path] for g in by_rank]).sum(0) for path in params}

    def on_rank(rank: int) -> Any:
        (_, aux), grads = step(fs.shard(params, specs, mesh), TOKENS[rank * part :][:part])
        return aux["up"], fs.unshard(grads, specs, mesh, layout="gradient")

    for seen, found in fs.simulate(mesh, on_rank):
        assert torch.equal(seen.double(), nearest(params["up"], torch.float8_e4m3fn, up))
        for path, gradient in expected.items():
            assert apart(found[path], gradient) < 0.02, path  # what bf16 rounds


@pytest.mark.suite({
    "tensorwise": "one scale is of all ranks' rows",
})  # fmt: skip
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_sequences_split_without_an_exchange_for_products(scaling):
    """Ranks round the positions that they have; a scale is a power of two, so rounding is the whole's."""

    def squares(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.silu(F.linear(p["embed.weight"][x], p["up"]))
        return F.linear(h, p["down"]).float().square().mean()

    found = {}
    for context in (1, 2):
        params, mesh = leaves(), fs.make_mesh(shard=1, context=context, simulated=True)
        dtypes = {"compute_dtype": FP8, "reduce_dtype": torch.float32}
        specs = fs.presets.full_shard(params, mesh, scaling=scaling, **dtypes)
        step = fs.shard_step(squares, specs, mesh=mesh, backend="eager")

        def on_rank(_: int) -> Any:
            own = fs.shard(params, specs, mesh)  # noqa: B023
            verbs = [line.verb for line in step.lower(own, TOKENS[:, :8]).schedule.instructions]  # noqa: B023
            assert "exchange" not in verbs
            return fs.unshard(step(own, TOKENS[:, :8])[1], specs, mesh, layout="gradient")  # noqa: B023

        found[context] = fs.simulate(mesh, on_rank)[0]
    for path in NARROW:
        assert apart(found[2][path], found[1][path]) < 0.02, path


def test_rounding_matters():
    """Products that round nothing, or by another scale, are found.

    `test_gradients_are_those_of_rounded_products` would see them.
    """
    step, params, specs, mesh = step_on(1, dtype=torch.bfloat16)
    (_, aux), grads = fs.simulate(mesh, lambda _: step(fs.shard(params, specs, mesh), TOKENS))[0]
    expected = by_hand(params, TOKENS)
    assert apart(grads["up"], expected["up"]) > 0.04
    assert not torch.equal(aux["up"].double(), nearest(params["up"], torch.float8_e4m3fn))


def multiplies_by_rows() -> bool:
    """Return whether torch's product on a CPU takes a scale a row (2.11's does not)."""
    narrow, scale = torch.zeros(16, 16).to(FP8), torch.ones(16, 1)
    try:
        torch._scaled_mm(narrow, narrow.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    "rowwise", [False, pytest.param(True, marks=pytest.mark.skipif(not multiplies_by_rows(), reason="torch"))]
)
@pytest.mark.parametrize("rows", [16, 7])
def test_the_device_s_products_are_the_emulated_ones(rows, rowwise, monkeypatch):
    """Here these are torch's products of a CPU. Rows that the device does not take are emulated."""
    draw = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(s, generator=draw).bfloat16() for s in ((rows, 32), (48, 32), (rows, 48)))
    weight, grad = nearest(weight, FP8).bfloat16() * 8, grad * 1e-4 * torch.linspace(0.01, 1, 48)

    def products() -> tuple[Tensor, ...]:
        if rowwise:
            return fp8.fp8_linear(x, weight, True), fp8.fp8_linear_to_input(grad.bfloat16(), weight)
        return fp8.fp8_linear(x, weight), *fp8.fp8_linear_backward(grad.bfloat16(), x, weight)

    emulated = products()
    called: list[Any] = []
    real = torch._scaled_mm
    monkeypatch.setattr(fp8, "has_products", lambda *_: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: called.append(a) or real(*a, **k))
    found = products()
    assert len(called) == (len(found) if rows == 16 else 0)
    for a, b in zip(found, emulated, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=float(b.abs().max()) * 2**-8)


@given(st.floats(2.0**-90, 2.0**90), st.sampled_from([fp8.E4M3, fp8.E5M2]))
def test_a_scale_is_the_largest_power_of_two_that_fits(largest, dtype):
    scale, most = float(fp8.scale_of(torch.tensor(largest), dtype)), torch.finfo(dtype).max
    assert torch.frexp(torch.tensor(scale))[0] == 0.5
    assert most / 2 * (1 - 1e-6) < float(torch.tensor(largest)) * scale <= most * (1 + 1e-6)


@pytest.mark.parametrize(("scaling", "numbers"), [("tensorwise", 2), ("rowwise", (64 + 32) // 2)])
def test_half_the_bytes_are_gathered_and_one_small_line_has_the_scales(scaling, numbers):
    sizes = {}
    for dtype in (FP8, torch.bfloat16):
        step, params, _, _ = step_on(
            2, abstract=True, dtype=dtype, optimizer=fs.optim.adamw(0.1), accumulate=2,
            policy={"scaling": scaling},
        )  # fmt: skip
        schedule = step.lower(params, TOKENS[:2]).schedule
        sizes[dtype] = {
            path: bucket.dtype.itemsize for name, bucket in schedule.buckets.items()
            for path in bucket.paths if name.startswith("gather/")
        }  # fmt: skip
        lines = [line for line in schedule.instructions if line.verb == "scales"]
        assert [(line.paths, line.axes) for line in lines] == [(("up", "down"), ("shard",))] * (dtype == FP8)
        assert [line.wire_bytes(schedule) for line in lines] == [2 * 4 * numbers] * (dtype == FP8)
    assert sizes[FP8] == sizes[torch.bfloat16] | dict.fromkeys(NARROW, 1)
    assert set(sizes[torch.bfloat16].values()) == {2}


def test_products_are_priced_as_the_device_multiplies():
    """At the rate of eight bits where the device has one, and as bf16's elsewhere."""
    wide = {path: torch.empty(4096, 4096, device="meta") for path in ("up", "down")}
    rows, mesh = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), fs.make_mesh(abstract=True)
    work: dict[Any, Any] = {}
    kinds = {"rowwise": (FP8, "rowwise")} | {d: (d, "tensorwise") for d in (FP8, torch.bfloat16)}
    for kind, (dtype, scaling) in kinds.items():
        specs = fs.presets.full_shard(wide, mesh, compute_dtype=dtype, scaling=scaling)
        step = fs.shard_step(
            lambda p, x: F.linear(F.linear(x, p["up"]), p["down"]).float().sum(), specs, mesh=mesh
        )
        work[kind] = {name: step.lower(wide, rows).timeline(name) for name in ("h100", "a100")}
    assert work[FP8]["h100"].step_seconds < 0.8 * work[torch.bfloat16]["h100"].step_seconds
    by_row = work["rowwise"]["h100"].step_seconds  # a third of its products are in bf16
    assert work[FP8]["h100"].step_seconds < by_row < 0.95 * work[torch.bfloat16]["h100"].step_seconds
    assert work[FP8]["a100"].step_seconds > 0.9 * work[torch.bfloat16]["a100"].step_seconds


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_compiled_it_is_the_same(scaling):
    found = []
    for backend in ("eager", "inductor"):
        params, mesh = leaves(), fs.make_mesh(shard=1, device="cpu")
        dtypes = {"compute_dtype": FP8, "reduce_dtype": torch.float32}
        specs = fs.presets.full_shard(params, mesh, scaling=scaling, **dtypes)
        step = fs.shard_step(loss, specs, mesh=mesh, backend=backend, optimizer=fs.optim.sgd(0.1))
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, TOKENS)
        found.append(metrics["loss"])
    torch.testing.assert_close(*found, rtol=0.02, atol=0)


def test_a_check_knows_how_far_fp8_rounds():
    params, mesh = leaves(), fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh, compute_dtype=FP8)
    assert fs.debug.check(loss, params, (TOKENS,), specs, mesh)


def test_matrices_that_stay_in_bf16_are_listed():
    with pytest.warns(UserWarning, match=r"(?s)2 leaves of two dims.*'embed.weight'.*'odd'\] \[32, 20\]"):
        specs = fs.presets.full_shard(leaves(), fs.make_mesh(abstract=True), compute_dtype=FP8)
    assert [path for path, spec in specs.items() if spec.wire_dtype == FP8] == list(NARROW)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_layer_may_have_one_input(scaling):
    params, mesh = leaves(), fs.make_mesh(shard=1, device="cpu")
    specs = fs.presets.full_shard(params, mesh, compute_dtype=FP8, scaling=scaling)
    one = lambda p, x: F.linear(F.linear(x, p["up"]), p["down"]).float().square().sum()  # noqa: E731
    step = fs.shard_step(one, specs, mesh=mesh, backend="eager")
    _, grads = step(params, torch.ones(32, dtype=torch.bfloat16))
    _, due = step(params, torch.ones(1, 32, dtype=torch.bfloat16))
    assert all(grads[path].any() and torch.equal(grads[path], due[path]) for path in NARROW)


def test_what_no_linear_layer_reads_is_named():
    params, mesh = leaves(), fs.make_mesh(shard=1, device="cpu")
    specs = fs.presets.full_shard(params, mesh, compute_dtype=FP8)
    step = fs.shard_step(lambda p, x: (p["up"].float().sum() * x).sum(), specs, mesh=mesh, backend="eager")
    with pytest.warns(UserWarning, match=r"(?s)2 leaves in fp8 that no linear layer reads.*'down'"):
        step(params, torch.ones(1))


@pytest.mark.parametrize(
    ("path", "spec", "leaf"),
    [
        ("norm", {}, "multiples of 16"),
        ("odd", {}, "multiples of 16"),
        ("up", {"memory": "host"}, "fp8 and memory='host'"),
        ("up", {"storage": fs.P("tensor"), "compute": fs.P("tensor")}, "fp8 and compute=P('tensor')"),
        ("up", {"trainable": False, "compute_dtype": None, "wire_dtype": FP8}, "not train"),
        ("up", {"compute_dtype": None, "wire_dtype": torch.bfloat16}, "wire_dtype=torch.bfloat16"),
    ],
)
def test_mistakes_are_named(path, spec, leaf):
    params, mesh = leaves(), fs.make_mesh(shard=2, tensor=2, abstract=True)
    rules = [(path, fs.LayoutSpec(**{"compute_dtype": FP8, **spec})), ("*", fs.LayoutSpec())]
    with raises(fs.SpecError, leaves=[f"params['{path}']", leaf], fix="compute_dtype=torch.bfloat16"):
        fs.shard_step(loss, fs.match_specs(params, rules), mesh=mesh)
