"""Optimizers on whole leaves against torch's own and their authors'; the contract over all; schedules;
mistakes. Sharded: `test_meshes`; traced: `test_update_trace`."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from errors import raises
from foreign import FOREIGN
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (
    ALL,
    ELEMENTWISE,
    RATE,
    RULES,
    SHAPES,
    assert_close,
    assert_equal,
    copy,
    hugging_face_cosine,
    make_step,
    norm_of,
    plain_cond,
    random_tree,
    row_sgd,
    train,
)
from torch import Tensor, nn

from fnshard import optim, schedules
from fnshard.errors import OptimizerError
from fnshard.optim import Optimizer, Step, compact
from fnshard.optim.compact import decode
from fnshard.optim.optimizer import apply_updates, init_slots
from fnshard.optim.optimizers import adamw, by_path, chain, check_kind, clip_by_global_norm, ema, sgd

EVERY = {**ALL, **FOREIGN}

# ------------------------------------------------------------------ against torch.optim


def torch_train(make, params, steps=6, rate=None, max_norm=None, scale=1.0):
    """Train by torch's optimizer on the same gradients; `make(groups)` has one group per leaf."""
    leaves = {p: nn.Parameter(t.clone()) for p, t in params.items()}
    optimizer = make(leaves)
    scheduler = rate and torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        for p, g in random_tree(100 + step, {p: t.shape for p, t in params.items()}).items():
            leaves[p].grad = g.to(leaves[p].dtype) * scale
        if max_norm:
            nn.utils.clip_grad_norm_(leaves.values(), max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {p: t.detach() for p, t in leaves.items()}


ONE_GROUP = {
    "sgd": (sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "sgd_decay": (sgd(0.1, weight_decay=0.2), lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.2)),
    "momentum": (
        sgd(0.1, momentum=0.9, weight_decay=0.2),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.2),
    ),
    "nesterov": (
        sgd(0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", ONE_GROUP)
def test_equals_torch_optim(name):
    ours, theirs = ONE_GROUP[name]
    params = random_tree(0)
    expected = torch_train(lambda leaves: theirs(list(leaves.values())), params)
    assert_close(train(ours, params)[0], expected)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5),
    lr=st.floats(0, 1),
    b1=st.floats(0, 0.99),
    b2=st.floats(0, 0.999),
    decay=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_adamw_equals_torch_on_random_trees(shapes, lr, b1, b2, decay, seed):
    params = random_tree(seed, {f"leaf{i}": s for i, s in enumerate(shapes)})
    expected = torch_train(
        lambda leaves: torch.optim.AdamW(leaves.values(), lr, (b1, b2), 1e-6, decay, foreach=False), params, 3
    )
    assert_close(train(adamw(lr, b1, b2, 1e-6, decay), params, 3)[0], expected)


def test_rules_schedule_clip_and_scale_equal_torch():
    params = random_tree(0)

    def groups(leaves):
        rates = {"lr": 0.1, "weight_decay": 0.1}
        by_hand = {"embed.w": {**rates, "lr": 0.05}, "a.norm.w": {**rates, "weight_decay": 0.0}}
        return torch.optim.AdamW(
            [{"params": [t], **by_hand.get(p, rates)} for p, t in leaves.items()], foreach=False
        )

    expected = torch_train(groups, params, rate=hugging_face_cosine, max_norm=0.5, scale=0.25)
    ours = chain(clip_by_global_norm(0.5), adamw(RATE, **RULES))
    assert_close(train(ours, params, scale=0.25)[0], expected)
    unscaled = train(ours, params)[0]
    assert (unscaled["a.w"] - expected["a.w"]).abs().max() > 1e-9, "the scale made no difference"


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_schedule_free_is_its_authors(warmup, decay):
    """Parameters, and the average that they evaluate."""
    schedulefree = pytest.importorskip("schedulefree")
    params = random_tree(0)
    made = []

    def make(leaves):
        numbers = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": decay, "warmup_steps": warmup}
        made.append(schedulefree.AdamWScheduleFree(leaves.values(), **numbers, foreach=False))
        made[0].train()
        return made[0]

    rate = (lambda step: 0.05 * min(1.0, (float(step) + 1) / warmup)) if warmup else 0.05
    optimizer = optim.schedule_free_adamw(rate, b1=0.8, b2=0.95, weight_decay=decay)
    found, slots = train(optimizer, params)
    expected = torch_train(make, params)
    assert_close(found, expected)
    made[0].eval()  # which changes the leaves in place
    assert_close(optim.ema_params(slots), expected)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_torchs(decay):
    """Vectors, matrices, numbers and a stack."""
    shapes = {**SHAPES, "stack": (3, 4, 5)}
    del shapes["b.empty"]
    params = random_tree(0, shapes)

    def make(leaves):
        return torch.optim.Adafactor(leaves.values(), 0.3, weight_decay=decay, foreach=False)

    assert_close(train(optim.adafactor(0.3, weight_decay=decay), params)[0], torch_train(make, params))


def test_lars_is_the_paper_s():
    """Equation 6, then momentum: by hand, of a matrix, and of a vector as SGD."""
    params = {"w": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    by_hand, traces = {p: leaf.clone() for p, leaf in params.items()}, dict.fromkeys(params, 0.0)
    found, _ = train(optim.lars(0.2, 0.9, 0.1, trust=0.01), params)
    for step in range(6):
        for path, grad in random_tree(100 + step, {"w": (3, 4), "b": (3,)}).items():
            leaf, rate = by_hand[path], 1.0
            if leaf.dim() > 1:
                rate = 0.01 * leaf.norm() / (grad.norm() + 0.1 * leaf.norm() + 1e-8)
            traces[path] = 0.9 * traces[path] + rate * (grad + 0.1 * leaf)
            by_hand[path] = leaf - 0.2 * traces[path]
    assert_close(found, by_hand)


@pytest.mark.long
def test_adamw_8bit_is_torchaos():
    """Codes, scales and parameters; with one scale a row, whose numbers are few."""
    torchao = pytest.importorskip("torchao.optim")
    params = {"w": torch.randn(64, 256, generator=torch.Generator().manual_seed(0))}
    theirs = nn.Parameter(params["w"].clone())
    own = torchao.AdamW8bit([theirs], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, block_size=256)
    found, slots = train(optim.adamw_8bit(0.01, 0.8, 0.95, weight_decay=0.1, block=256), params)
    for step in range(6):
        theirs.grad = random_tree(100 + step, {"w": (64, 256)})["w"].float()
        own.step()
    state = own.state[theirs]
    for name, key in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        made = decode(slots["w"][name], slots["w"][f"{name}_scales"], name == "mu")
        off = (made - state[key].dequantize()).abs() / made.abs().amax()
        # Ties go the other way, and second moments to the code whose root's reciprocal is nearest.
        assert off.max() < 0.02 and (off > 1e-6).float().mean() < 0.05
    apart = (found["w"] - theirs.detach()).abs()
    assert apart.max() < 0.05 * 0.01 * 6 and (apart > 1e-3 * 0.01 * 6).float().mean() < 0.03


def decades(kind: str) -> list[Tensor]:
    """Draw gradients of 200 steps, whose sizes differ within runs of 64 numbers."""
    random = torch.Generator().manual_seed(0)
    order, one = torch.randperm(256, generator=random), torch.logspace(-1, 0, 256)
    sizes = {
        "2 decades": lambda t: one**2,
        "4 decades": lambda t: one**4,
        "8 decades": lambda t: one**8,
        "they grow alike": lambda t: one ** (4 - t / 50),
        "they trade places": lambda t: one**3 if t < 100 else one.flip(0) ** 3,
        "few have any": lambda t: one**3 * (torch.rand(8, 256, generator=random) < 0.05),
        "some begin late": lambda t: one**4 * ((one < 0.5) | (t > 100)),
        "a spike": lambda t: one * (1e4 if t == 50 else 1.0),
    }
    return [torch.randn(8, 256, generator=random) * sizes[kind](t)[..., order] for t in range(200)]


KINDS_OF_DECADES = [
    "2 decades", "4 decades", "8 decades", "they grow alike", "they trade places", "few have any",
    "some begin late", "a spike",
]  # fmt: skip


def move_weights(optimizer: Optimizer, gradients: list[Tensor]) -> tuple[Tensor, float]:
    """Return the weights that begin at 0, and the largest step of one."""
    params, largest = {"w": torch.zeros(8, 256)}, 0.0
    slots = init_slots(optimizer, params)
    for count, grad in enumerate(gradients):
        before = params["w"]
        params, slots = apply_updates(optimizer, {"w": grad}, slots, params, Step(torch.tensor(count)))
        largest = max(largest, float((params["w"] - before).abs().max()))
    return params["w"], largest


@pytest.mark.suite({
    "8 decades": "the widest range",
    "they trade places": "scales that change",
    "a spike": "one that is far off",
})  # fmt: skip
@pytest.mark.parametrize("kind", KINDS_OF_DECADES)
def test_adamw_8bit_stays_near_adamw_over_decades(kind):
    """A positive second moment is never coded as 0: no weight jumps."""
    gradients = decades(kind)
    exact, step = move_weights(adamw(1e-3, weight_decay=0.0), gradients)
    for block in (64, 256):
        own, largest = move_weights(optim.adamw_8bit(1e-3, weight_decay=0.0, block=block), gradients)
        assert largest < 1.7 * step and own.abs().max() < 1.4 * exact.abs().max()
    bitsandbytes = pytest.importorskip("bitsandbytes")
    theirs = nn.Parameter(torch.zeros(8, 256))
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, weight_decay=0.0, min_8bit_size=1)
    for grad in gradients:
        theirs.grad = grad.clone()
        optimizer.step()
    assert (own - exact).norm() < (theirs.detach() - exact).norm()  # both with one scale for 256


def test_codes_of_checkpoints_of_before_make_no_weight_jump():
    """Their second moments below 1.6e-7 of a run's largest have the code 0, their first moments have not."""
    gradients, params = decades("4 decades"), {"w": torch.zeros(8, 256)}
    optimizer = optim.adamw_8bit(1e-3, weight_decay=0.0)
    slots = init_slots(optimizer, params)
    for step, grad in enumerate(gradients):
        if step == 100:
            exact = compact.decode(slots["w"]["nu"], slots["w"]["nu_scales"], False)
            share = exact.unflatten(-1, (-1, 64)) / slots["w"]["nu_scales"].unsqueeze(-1)
            old = slots["w"]["nu"].masked_fill((share < 3e-6).flatten(-2), 0)
            assert 0.05 < (old == 0).float().mean() < 0.5
            slots["w"]["nu"] = old
        before = params["w"]
        params, slots = apply_updates(optimizer, {"w": grad}, slots, params, Step(torch.tensor(step)))
        assert (params["w"] - before).abs().max() < 5e-3, step
    values = torch.logspace(-30, 0, 256).expand(1, 256)
    assert (compact.decode(*compact.encode(values, 64, False), False) > 0).all()
    none = torch.zeros(1, 64)
    assert torch.equal(compact.decode(*compact.encode(none, 64, False), False), none)


@pytest.mark.parametrize(("frequency", "tolerance"), [(10, 1e-10), (2, 1e-5)])
def test_soap_is_another_implementation(frequency, tolerance):
    """Its QR is in fp32. A matrix with both sides, of full rank, and one of which the longer side stays."""
    package, shapes = pytest.importorskip("pytorch_optimizer"), {"w": (6, 6), "v": (6, 9)}
    params = random_tree(0, shapes)
    numbers = {"weight_decay": 0.1, "shampoo_beta": 0.7, "precondition_frequency": frequency}
    made = []

    def make(leaves):
        own = package.SOAP(leaves.values(), lr=0.05, betas=(0.8, 0.95), max_precondition_dim=8, **numbers)
        made.append(own.state[leaves["w"]])
        return own

    found, slots = train(optim.soap(0.05, 0.8, 0.95, max_precond_dim=8, **numbers), params)
    assert_close(found, torch_train(make, params), tolerance, tolerance)
    assert "right" not in slots["v"]
    assert_close({"w": slots["w"]["left"]}, {"w": made[0]["GG"][0]})


def test_lion_is_its_paper():
    """Algorithm 2, line by line."""
    params, lr, b1, b2, decay = random_tree(0), 0.02, 0.8, 0.95, 0.3
    found, slots = train(optim.lion(lr, b1, b2, weight_decay=decay), params)
    for path, leaf in params.items():
        mean = torch.zeros_like(leaf)
        for step in range(6):
            gradient = random_tree(100 + step, {p: t.shape for p, t in params.items()})[path]
            interpolated = b1 * mean + (1 - b1) * gradient
            leaf = leaf - lr * (interpolated.sign() + decay * leaf)
            mean = b2 * mean + (1 - b2) * gradient
        torch.testing.assert_close(found[path], leaf, atol=1e-12, rtol=0)
        torch.testing.assert_close(slots[path]["mu"], mean, atol=1e-12, rtol=0)


def test_the_norms_a_member_sees_are_those_of_its_own_input():
    """Clipping twice equals the same by hand, one after the other."""
    params, grads = random_tree(0), random_tree(1)
    first = {p: g * torch.clamp(2.0 / (norm_of(grads) + 1e-6), max=1.0) for p, g in grads.items()}
    second = {p: g * torch.clamp(0.3 / (norm_of(first) + 1e-6), max=1.0) for p, g in first.items()}
    last = sgd(0.1)
    optimizer = chain(clip_by_global_norm(2.0), clip_by_global_norm(0.3), last)
    slots = init_slots(last, params)
    expected, _ = apply_updates(last, second, slots, params, make_step(0, second))
    got, _ = apply_updates(optimizer, grads, slots, params, make_step(0, grads))
    assert_close(got, expected)


def test_behind_what_changes_gradients_there_is_no_norm_of_them():
    params, grads = random_tree(0), random_tree(1)
    for optimizer in (
        chain(sgd(1.0), FOREIGN["normalized_momentum"]),
        chain(sgd(1.0), sgd(1.0), reads_norm()),
    ):
        slots = init_slots(optimizer, params)
        with raises(OptimizerError, leaves="step.global_norm", fix="clip_by_global_norm(...) first"):
            apply_updates(optimizer, grads, slots, params, make_step(0, grads))
    clipped = chain(clip_by_global_norm(0.5), reads_norm())
    found, _ = apply_updates(clipped, grads, init_slots(clipped, params), params, make_step(0, grads))
    torch.testing.assert_close(found["a.w"] - params["a.w"], torch.full((4, 6), 0.5).double())


def reads_norm() -> Optimizer:
    update = lambda path, grad, slots, param, step: (torch.ones_like(grad) * step.global_norm, {})  # noqa: E731
    return Optimizer("reads_norm()", lambda path, param: {}, update)


def warming(step):
    return min(0.9, (1 + float(step)) / (4 + float(step)))


@pytest.mark.parametrize("decay", [0.9, warming])
def test_ema_equals_torch(decay):
    params = random_tree(0)
    expected = params
    for steps in range(1, 6):
        average = torch.optim.swa_utils.get_ema_avg_fn(decay if decay == 0.9 else warming(steps - 1))
        new = train(sgd(0.1, 0.9), params, steps)[0]
        expected = {p: average(expected[p], new[p], 1) for p in params}
    _, slots = train(chain(sgd(0.1, 0.9), ema(decay)), params, 5)
    assert_close(optim.ema_params(slots), expected)


# ------------------------------------------------------------------ the contract, for all


@pytest.mark.parametrize("name", EVERY)
def test_update_is_pure(name):
    shapes = {path: shape for path, shape in SHAPES.items() if 0 not in shape}
    params, grads = random_tree(0, shapes), random_tree(1, shapes)
    slots = train(EVERY[name], params, 2)[1]
    before = copy(params), copy(grads), copy(slots)
    with plain_cond():
        first, second = (
            apply_updates(EVERY[name], grads, slots, params, make_step(2, grads), torch.tensor(0.5))
            for _ in range(2)
        )
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)
    for a, b in zip((params, grads, slots), before, strict=True):
        assert_equal(a, b)
    moved = {path for path, param in params.items() if not torch.equal(first[0][path], param)}
    assert moved == set(shapes)


@pytest.mark.parametrize("name", EVERY)
def test_slots_keep_their_shapes_and_dtypes(name):
    shapes = {path: shape for path, shape in SHAPES.items() if 0 not in shape}
    params = random_tree(0, shapes, torch.bfloat16)
    slots = init_slots(EVERY[name], params)
    new, after = train(EVERY[name], params, 1)
    form = lambda tree: {p: (v.shape, v.dtype) for p, v in tree.items()}  # noqa: E731
    assert form(new) == form(params)
    assert {p: form(own) for p, own in after.items()} == {p: form(own) for p, own in slots.items()}


@pytest.mark.parametrize("name", [n for n in ALL if "rules" not in n])
def test_init_on_a_subset_is_the_subset_of_init(name):
    params = random_tree(0)
    full = init_slots(ALL[name], params)
    for paths in itertools.combinations(params, 2):
        assert_equal(init_slots(ALL[name], {p: params[p] for p in paths}), {p: full[p] for p in paths})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_padding_stays_zero(name):
    """Rows past a leaf's end have zero parameters and gradients; nothing may ever move them."""
    optimizer = ALL[name]
    pad = lambda tree: {p: torch.cat([t, torch.zeros(2, *t.shape[1:])]) for p, t in tree.items() if t.dim()}  # noqa: E731
    params = pad(random_tree(0))
    slots = {path: optimizer.of(path, param.shape).init(path, param) for path, param in params.items()}
    for count in range(4):
        grads = pad(random_tree(count))
        params, slots = apply_updates(optimizer, grads, slots, params, make_step(count, grads))
    for path, param in params.items():
        for tensor in (param, *slots[path].values()):
            assert torch.equal(tensor[-2:], torch.zeros_like(tensor[-2:]))


@pytest.mark.parametrize("name", [n for n in ALL if "row" not in n])
def test_name_reads_back(name):
    scope = {**vars(optim), **vars(schedules)}
    again = eval(repr(ALL[name]), scope)
    assert repr(again) == repr(ALL[name])
    params = random_tree(0)
    assert_equal(train(again, params)[0], train(ALL[name], params)[0])


def test_leaves_of_equal_settings_share_a_trace():
    """An optimizer takes from a path the numbers of its rules alone, and so do those around it."""
    own = chain(clip_by_global_norm(1.0), adamw(0.1, **RULES), ema(0.9))
    of_matrix, of_norm, of_table = (own.trace_key(p) for p in ("a.w", "a.norm.w", "embed.w"))
    assert of_matrix == own.trace_key("b.w")
    assert len({of_matrix, of_norm, of_table}) == 3
    assert sgd(0.1).trace_key("a") == sgd(0.1).trace_key("b")
    assert Optimizer("mine()", own.init, own.update).trace_key("a.w") == "a.w"
    chosen = chain(by_path(("*norm*", sgd(0.1)), ("*", optim.muon(0.02))), ema(0.9))
    leaves = [chosen.of(path, (2, 2)) for path in ("a.w", "b.w", "a.norm.w", "embed.w")]
    assert leaves[0] is leaves[1] and len({*leaves}) == 3
    assert all(leaf.choose is None for leaf in leaves)


def test_gradients_of_a_short_dtype_meet_parameters_of_a_long_one():
    """The arithmetic is the parameters'."""
    params = random_tree(0, dtype=torch.float32)
    grads = {p: g.to(torch.bfloat16) for p, g in random_tree(1).items()}
    wide = {p: g.float() for p, g in grads.items()}
    optimizer, scale = adamw(0.1), torch.tensor(1 / 3, dtype=torch.float64)
    slots, step = init_slots(optimizer, params), make_step(0, grads)
    found, expected = (apply_updates(optimizer, g, slots, params, step, scale) for g in (grads, wide))
    assert_equal(found[0], expected[0])


# ------------------------------------------------------------------ schedules


def test_schedules_equal_their_formulas():
    steps = torch.arange(0, 12)
    cosine = schedules.warmup_cosine(0.1, 2, 6, floor=0.01)
    for step in steps:
        assert cosine(step).item() == pytest.approx(0.1 * hugging_face_cosine(int(step)), abs=1e-15)
    values = [schedules.wsd(1.0, warmup=2, total=10, decay=4, floor=0.2)(s).item() for s in steps]
    assert values == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    values = [schedules.linear(1.0, warmup=2, total=6)(s).item() for s in steps[:8]]
    assert values == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])
    assert schedules.constant(0.3)(steps[4]).item() == 0.3
    large = schedules.linear(1.0, warmup=1e2, total=np.int64(100_000))  # whole numbers, of whatever type
    assert large(torch.tensor(50)).item() == 0.5


def test_a_schedule_of_ones_own_may_return_python_numbers():
    for rate in (lambda step: 0.1 * 0.9 ** int(step), lambda step: np.float32(0.25), lambda step: 1):
        value = schedules.as_schedule(rate)(torch.tensor(3))
        assert value.shape == () and value.dtype == torch.float64
        assert value.item() == pytest.approx(float(rate(3)))


def test_betas_are_b1_and_b2():
    assert adamw(0.1, betas=(0.8, 0.95)).name == adamw(0.1, b1=0.8, b2=0.95).name
    assert adamw(betas=(0.9, 0.95)).name == adamw(1e-3, b2=0.95).name  # torch's own default rate


def test_schedules_never_read_the_step_back():
    """A meta step has no value: `.item()` or a Python branch on it would raise."""
    for made in (RATE, schedules.linear(1.0, 2, 6), schedules.wsd(1.0, 2, 6, 2), schedules.constant(1.0)):
        value = made(torch.empty((), dtype=torch.int64, device="meta"))
        assert value.shape == () and value.dtype == torch.float64


def test_the_rate_and_the_norm_are_metrics():
    optimizer = adamw(lambda step: 0.5 * (int(step) + 1))
    step = make_step(3, random_tree(1))
    assert optimizer.values(step)["lr"].item() == 2.0
    both = chain(clip_by_global_norm(1.0), clip_by_global_norm(0.1), optimizer, ema(0.9))
    assert both.values(step).keys() == {"lr", "grad_norm"}
    assert both.values(step)["grad_norm"] is step.global_norm
    named = chain(clip_by_global_norm(1.0), by_path(("*norm*", sgd(0.1)), ("*", optim.muon(0.2))))
    assert {key: value.item() for key, value in named.values(step).items() if key == "lr"} == {"lr": 0.1}
    assert FOREIGN["normalized_momentum"].values(step)["size"] is step.global_norm


# ------------------------------------------------------------------ mistakes


def test_rules_that_do_not_meet_the_leaves_are_refused():
    params = random_tree(0)
    with raises(OptimizerError, leaves=["weight_decay", "'*nrm*'"]):
        init_slots(adamw(1e-3, weight_decay=[("*nrm*", 0.0), ("*", 0.1)]), params)
    with raises(OptimizerError, leaves="'*norm*'", fix="narrow globs first"):
        init_slots(chain(sgd(0.1, lr_scale=[("*", 1.0), ("*norm*", 0.0)]), ema(0.9)), params)
    with raises(OptimizerError, leaves="params['a.w']", fix='("*", value)', says="4 leaves of 5"):
        init_slots(adamw(1e-3, weight_decay=[("*norm*", 0.0)]), params)


@pytest.mark.parametrize(
    ("make", "leaves"),
    [
        (lambda: adamw(-1.0), "lr=-1.0"),
        (lambda: adamw("3e-4"), "lr='3e-4'"),
        (lambda: adamw(1e-3, betas=(1.0, 0.9)), ["b1=1.0", "at least 0 and below 1"]),
        (lambda: adamw(1e-3, betas=0.9), ["betas=0.9", "betas=(0.9, 0.95)"]),
        (lambda: adamw(1e-3, b2=0.95, betas=(0.9, 0.95)), ["betas=", "b1=0.9, b2=0.95"]),
        (lambda: adamw(1e-3, b1=1.0), ["b1=1.0", "at least 0 and below 1"]),
        (lambda: adamw(1e-3, weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: sgd(0.1, nesterov=True), ["nesterov", "a momentum"]),
        (lambda: optim.lars(0.1, trust=0), ["lars", "trust and eps"]),
        (lambda: optim.lars(0.1, eps=0), ["lars", "trust and eps"]),
        (lambda: clip_by_global_norm(0.0), ["clip_by_global_norm", "above 0"]),
        (lambda: clip_by_global_norm("1"), ["clip_by_global_norm", "above 0"]),
        (lambda: optim.schedule_free_adamw(0.1, b1=0.0), ["b1", "above 0"]),
        (lambda: ema(1.5), "decay=1.5"),
        (lambda: ema("0.9"), "decay='0.9'"),
        (lambda: chain(torch.optim.SGD), ["chain", "SGD"]),
        (lambda: schedules.warmup_cosine(0.1, 10, 5), "5 updates"),
        (lambda: schedules.wsd(0.1, 3, 5, 3), "5 updates"),
        (lambda: schedules.linear(0.1, -1, 5), "warmup=-1"),
        (lambda: schedules.linear(0.1, 0, 0), "0 updates"),
        (lambda: schedules.warmup_cosine(1.0, warmup=0.1, total=1000), "warmup=0.1"),
        (lambda: schedules.linear(1.0, warmup=True, total="9"), ["warmup=True", "total='9'"]),
        (lambda: schedules.wsd(1.0, warmup=10, total=1000, decay=0.2), "decay=0.2"),
        (
            lambda: schedules.linear(math.nan, 10, math.inf, floor=-0.1),
            ["peak=nan", "total=inf", "floor=-0.1"],
        ),
        (lambda: schedules.warmup_cosine(-1.0, 10, 100), "peak=-1.0"),
        (lambda: chain(), "chain()"),
        (lambda: chain(adamw(0.1), clip_by_global_norm(1.0)), "clip_by_global_norm(max_norm=1.0) at 1"),
        (lambda: chain(ema(0.9), adamw(0.1)), "ema(decay=0.9) at 0"),
        (lambda: optim.ema_params({"w": {"mu": torch.zeros(1)}}), ["params['w']", "mu"]),
    ],
)
def test_mistakes_are_named(make, leaves):
    with raises(OptimizerError, leaves=leaves):
        make()


@pytest.mark.parametrize(
    "alone", [clip_by_global_norm(1.0), ema(0.9), chain(clip_by_global_norm(1.0), ema(0.9))]
)
def test_a_chain_without_an_update_rule_is_refused(alone: Optimizer) -> None:
    with raises(OptimizerError, leaves="optimizer=", fix="adamw(3e-4)"):
        check_kind(alone)
    check_kind(chain(clip_by_global_norm(1.0), sgd(0.1), ema(0.9)))
    check_kind(None)
    check_kind(row_sgd(0.1))


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ("adamw", "'adamw'"),
        (adamw, "adamw"),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "SGD"),
    ],
)
def test_what_is_no_optimizer_is_refused(given, leaves):
    with raises(OptimizerError, leaves=leaves, fix="fs.optim.adamw"):
        check_kind(given)
