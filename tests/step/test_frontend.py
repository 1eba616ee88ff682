"""What stands before the compiler: captures that must be exact, and mistakes that must be named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from toys import assert_same_grads, plain_grads, step_of

import fnshard as fs
from fnshard import LayoutSpec, Mean, P, SpecError, StateError, TraceError, optim
from fnshard.layout.spec import check_specs
from fnshard.optim.loss_scale import LossScale

WIDTH = 6
Fn = Callable[..., Any]


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for n in "qr"}


def rows(count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def local() -> fs.Mesh:
    return fs.make_mesh(shard=1, device="cpu")


# ------------------------------------------------------------------ writes under no_grad


def scaled(h: Tensor) -> Tensor:
    h.mul_(2)
    return h


def through_views(h: Tensor) -> Tensor:
    h[:, 0] = 0.5
    h[1].add_(1)
    return h


def chained(h: Tensor) -> Tensor:
    h.add_(h * 3).clamp_(-1, 1)
    return h


def by_out(h: Tensor) -> Tensor:
    torch.mul(h, 3.0, out=h)
    return h


def by_list(h: Tensor) -> Tensor:
    torch._foreach_mul_([h], 2.0)
    return h


@pytest.mark.parametrize("write", [scaled, through_views, chained, by_out, by_list])
def test_a_write_under_no_grad_changes_the_value_and_lets_the_gradient_pass(write: Fn) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x @ p["q"]
        first = h[0]
        with torch.no_grad():
            write(h)
        return (torch.tanh(h) @ p["r"]).square().mean() + first.sum()

    assert_same_grads(loss, weights(), rows(), atol=1e-12, rtol=0)


# ------------------------------------------------------------------ random ops


def drawn(draw: Fn, count: int = 3000) -> tuple[Tensor, Tensor]:
    """Return what `draw(x)` gives in a step on ones, and leaves in x; the gradient reads the same draw."""

    def loss(p: Any, x: Tensor) -> Any:
        x = x * 1.0
        value = draw(x)
        return (value.to(p["w"].dtype).mean() * p["w"]), {"value": value, "x": x}

    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    (_, aux), grads = step_of(loss, params)(params, torch.ones(count, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(grads["w"], aux["value"].double().mean())
    return aux["value"], aux["x"]


@pytest.mark.parametrize(
    ("draw", "mean", "std", "in_place"),
    [
        (lambda x: F.dropout1d(x[:, :, None], 0.25, inplace=True)[:, :, 0], 1.0, 3**-0.5, True),
        (lambda x: x.bernoulli_(torch.full((WIDTH,), 0.3)), 0.3, 0.21**0.5, True),
        (lambda x: torch.bernoulli(x, 0.3), 0.3, 0.21**0.5, False),
        (lambda x: torch.randint_like(x, 2, 5), 3.0, (2 / 3) ** 0.5, False),
        (lambda x: F.gumbel_softmax(x, hard=True), 1 / WIDTH, (1 / WIDTH - WIDTH**-2) ** 0.5, False),
    ],
)  # fmt: skip
def test_draws_have_their_distribution(draw: Fn, mean: float, std: float, in_place: bool) -> None:
    value, left = drawn(draw)
    close = 8 * std / math.sqrt(3000)  # features are drawn whole: as few as 3000 independent draws
    assert abs(value.double().mean() - mean) < close
    assert abs(value.double().std() - std) < 2 * close
    assert torch.equal(value, left) == in_place


def test_alpha_dropout_is_torchs_where_the_mask_is() -> None:
    value, _ = drawn(lambda x: F.alpha_dropout(x, 0.25, True, inplace=True))
    other = F.alpha_dropout(torch.ones(500, dtype=torch.float64), 0.25, True)
    torch.testing.assert_close(value.unique(), other.unique())
    features, _ = drawn(lambda x: F.feature_alpha_dropout(x[..., None].expand(-1, -1, 4), 0.25, True))
    assert torch.equal(features[..., 0], features[..., 3])


def test_a_draw_through_a_view_is_seen_by_its_base() -> None:
    def draw(x: Tensor) -> Tensor:
        x[:, 1].normal_()
        return x

    value, _ = drawn(draw)
    assert (value[:, 0] == 1).all() and value[:, 1].unique().numel() > 100


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_attention_with_dropout_gives_zero_where_nothing_may_be_seen(kind: str) -> None:
    allowed = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first query sees nothing
    additive = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    mask = allowed if kind == "bool" else additive

    def loss(p: Any, x: Tensor, rate: float) -> Tensor:
        q = (x @ p["q"]).view(2, 1, 4, WIDTH)
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=rate)
        return (out @ p["r"]).square().sum()

    # No mask of 48 numbers at this rate: the same value and gradient as without dropout.
    (loss_, grads), (true_loss, true) = (
        step_of(loss, weights())(weights(), rows(8), 1e-30),
        plain_grads(loss, weights(), rows(8), 0.0),
    )
    torch.testing.assert_close(loss_, true_loss)
    torch.testing.assert_close(grads, true)


# ------------------------------------------------------------------ what a trace refuses


@pytest.mark.parametrize(
    ("fn", "leaves", "fix"),
    [
        (lambda p, x: (x @ p["q"]).to("mps").sum(), ["mps by to", "traced on cpu"], "device=x.device"),
        (lambda p, x: (x.cuda() @ p["q"]).sum(), "cuda by cuda", "device=x.device"),
        (lambda p, x: ((x @ p["q"]) * torch.ones(1, device="cuda")).sum(), "cuda by ones", "device=x.device"),
        (lambda p, x: Mean((x @ p["q"]).sum(), torch.ones(3)), ["the loss", "count is f32[3]"], "fs.Mean("),
        (lambda p, x: Mean((x @ p["q"]).sum(), None), "count is NoneType", "fs.Mean("),
        (lambda p, x: Mean((x @ p["q"]).sum(), "3"), "count is str 3", "fs.Mean("),
        (lambda p, x: Mean(x @ p["q"], 3), "total is f64[4, 6]", "fs.Mean("),
        (lambda p, x: Mean((x @ p["q"]).sum(), 3, bound=-1.0), "bound is float -1.0", "fs.Mean("),
        (lambda p, x: ((x @ p["q"]).sum(), {"m": Mean(2.0, 3)}), ["aux", "total is float 2.0"], "fs.Mean("),
        (lambda p, x: (x @ p["q"]).sum() * x.sum().item(), ["item", "test_frontend.py:"], ()),
        (
            lambda p, x: (x @ p["q"])[[True, False]].sum(),
            ["__getitem__", "a mask of 2", "dim 0", "[4, 6]"],
            (),
        ),
    ],
)
def test_refused_by_name(fn: Fn, leaves: Any, fix: Any) -> None:
    with raises(TraceError, leaves=leaves, fix=fix):
        step_of(fn, weights()).lower(weights(), rows())


def test_cpu_tensors_and_device_contexts_are_left_alone() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            one = torch.ones(WIDTH)
        return (x @ p["q"].to("cpu") * one * torch.ones(1, device=x.device)).sum()

    assert_same_grads(loss, weights(), rows(), atol=1e-12, rtol=0)


# ------------------------------------------------------------------ the loss scale


def test_the_policy_says_whether_the_scale_is_dynamic_and_not_the_state() -> None:
    dynamic, constant = LossScale.choose("dynamic", False, True), LossScale.choose(128.0, True, True)
    state = dynamic.init()
    assert constant.scale(state) == 128
    assert dynamic.scale(state) == 2**16
    dynamic.check(state)
    constant.check({})
    with raises(
        StateError, leaves="good_steps, scale", fix="loss_scale=", says=["constant (128)", "needs nothing"]
    ):
        constant.check(state)
    with raises(
        StateError, leaves="loss_scale holds nothing", fix="loss_scale=", says=["dynamic", "good_steps"]
    ):
        dynamic.check({})


# ------------------------------------------------------------------ specs, units, meshes


@pytest.mark.parametrize(
    ("policy", "leaf", "fix"),
    [
        ({"reduce_dtype": torch.int32}, "reduce_dtype=torch.int32", "reduce_dtype=torch.float32"),
        ({"optimizer_dtype": torch.int8}, "optimizer_dtype=torch.int8", "optimizer_dtype=torch.float32"),
        ({"compute_dtype": torch.float8_e4m3fn}, "fp8", "bfloat16"),
    ],
)
def test_dtypes_of_a_trainable_leaf_are_floats(policy: dict[str, Any], leaf: str, fix: str) -> None:
    specs = fs.match_specs(weights(), [("*", LayoutSpec(**policy))])
    with raises(SpecError, leaves=leaf, fix=fix, says="2 leaves"):
        check_specs(specs, local())
    check_specs(fs.match_specs(weights(), [("*", LayoutSpec(trainable=False, **policy))]), local())


def mesh(**arguments: Any) -> Fn:
    return lambda: fs.make_mesh(**arguments)


def specs(params: Any, **options: Any) -> Fn:
    return lambda: fs.match_specs(params, [("*", LayoutSpec())], **options)


MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("make", "leaves", "fix"),
    [
        (mesh(shard=1, device="gpu"), "device='gpu'", '"cpu"'),
        (mesh(shard=2, abstract=True, simulated=True), ["abstract", "simulated"], ()),
        (mesh(shard=True, device="cpu"), "shard", "size of at least 1"),
        (lambda: LayoutSpec(trainable="no"), ["trainable='no'", "True, False"], ()),
        (lambda: LayoutSpec(reshard=2), ["reshard=2", "True, False"], ()),
        (lambda: LayoutSpec(unit=3), ["unit=3", "a name"], ()),
        (lambda: LayoutSpec(buffers=None), ["buffers=None", "True, False"], ()),
        (specs({}), "parameter tree", "dict"),
        (lambda: check_specs({}, local()), "spec tree", "match_specs"),
        (specs(weights(), units=lambda p: {"q": "a"}), ["1 leaf", "params['r'] has none"], ()),
        (specs(weights(), units={"q": "a", "r": "a"}), ["units", "dict"], ()),
        (specs(weights(), units=lambda p: {"q": 1, "r": "b"}), "params['q'] is of unit 1", ()),
        (specs(weights(), units=lambda p: "a"), ["units", "str"], ()),
        (lambda: fs.units.by_class(MODEL), ["by_class", "none"], "by_class(model, Block)"),
        (lambda: fs.units.by_class(MODEL, "Linear"), "'Linear'", "by_class(model, Block)"),
        (lambda: fs.units.by_class(MODEL, nn.Conv2d), "Conv2d", "Linear, ReLU"),
    ],
)  # fmt: skip
def test_mistakes_in_specs_are_named(make: Fn, leaves: Any, fix: Any) -> None:
    with raises(SpecError, leaves=leaves, fix=fix):
        make()


def test_one_data_axis_may_be_a_string() -> None:
    assert fs.make_mesh(replicate=2, shard=2, abstract=True, data_axes="shard").data_axes == ("shard",)


def test_a_schedule_that_returns_no_number() -> None:
    step = step_of(lambda p, x: (x @ p["q"] @ p["r"]).sum(), weights(), optimizer=optim.sgd(lambda s: "0.1"))
    with raises(fs.OptimizerError, leaves="str '0.1'", fix="lambda step:", says=["number", "0-d tensor"]):
        step(step.init(weights()), rows())


@pytest.mark.parametrize(
    ("blocks", "layout", "leaves", "fix"),
    [
        (
            {"q": torch.ones(3, 6), "r": torch.ones(6, 6)},
            "storage",
            "params['q'] is [3, 6]",
            'layout="gradient"',
        ),
        ({"q": torch.ones(6, 6), "r": None}, "storage", "params['r'] is NoneType", 'layout="gradient"'),
        (
            {"q": torch.ones(6, 6), "r": None},
            "gradient",
            ["params['q'] is [6, 6]", "block [3, 6]", "P('shard')"],
            (),
        ),
        ({"r": None}, "gradient", "specs['q']", ()),
        ({"q": None, "r": None}, "grads", ["layout='grads'", "'storage', 'gradient' or 'optimizer'"], ()),
    ],
)
def test_blocks_of_another_layout_than_unshards_are_named(
    blocks: Any, layout: str, leaves: Any, fix: Any
) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {"q": torch.zeros(6, 6), "r": torch.zeros(6, 6)}
    frozen = ("r", LayoutSpec(trainable=False))
    specs = fs.match_specs(params, [frozen, ("*", LayoutSpec(gradient=P("shard"), optimizer=P("shard")))])
    with raises((StateError, SpecError), leaves=leaves, fix=fix):
        fs.simulate(mesh, lambda rank: fs.unshard(blocks, specs, mesh, layout=layout))


def test_unshard_asks_for_specs_that_know_shapes() -> None:
    with raises(SpecError, leaves="specs['w']", fix="step.specs", says="1 leaf"):
        fs.unshard({"w": torch.zeros(3)}, {"w": LayoutSpec()}, fs.make_mesh(shard=1, device="cpu"))


# ------------------------------------------------------------------ init


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, True])
def test_a_seed_is_an_int64(seed: Any) -> None:
    with raises(StateError, leaves=f"seed={seed!r}", says="64 bits"):
        step_of(lambda p, x: (x @ p["q"]).sum(), weights()).init(weights(), seed=seed)


# ------------------------------------------------------------------ tied weights


def test_marks_of_tied_weights_stay_off_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for _ in range(2):
        _, params = fs.make_functional(model)
        assert params["0.weight"].tied_names == ("1.weight",)
        assert params["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert not hasattr(model[0].weight, "tied_names")
    model[0].weight.requires_grad_(False)
    assert not fs.make_functional(model)[1]["0.weight"].requires_grad
    assert fs.match_specs(params, [("*", LayoutSpec(P()))])["0.weight"].trainable
