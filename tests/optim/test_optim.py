"""Optimizers against torch's own, `apply` against `update`, and the contract over all of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (
    ALL,
    ELEMENTWISE,
    RATE,
    RULES,
    assert_close,
    assert_equal,
    copy,
    hugging_face_cosine,
    make_info,
    norm_of,
    random_tree,
    row_sgd,
    train,
)
from torch import nn

from fnshard import optim, schedules
from fnshard.optim.contract import StepInfo
from fnshard.optim.optimizers import adamw, chain, clip_by_global_norm, ema, lars, sgd

# ------------------------------------------------------------------ against torch.optim


def torch_train(make, params, steps=6, rate=None, max_norm=None, scale=1.0):
    """torch's optimizer on the same gradients; `make(groups)`, one group per leaf."""
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


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_equals_torch(max_norm):
    grads = random_tree(3)
    leaves = [nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(leaves, max_norm)
    clip = clip_by_global_norm(max_norm)
    info = make_info(0, grads, grads)
    updates, _ = clip.update(grads, clip.init(grads), grads, info)
    assert_close(updates, dict(zip(grads, [leaf.grad for leaf in leaves], strict=True)))
    torch.testing.assert_close(clip.metrics(info)["grad_norm"], norm, atol=1e-12, rtol=1e-12)


def test_the_norms_a_member_sees_are_those_of_its_own_input():
    """Clipping twice, and clipping before LARS, equal the same by hand, one after the other."""
    params, grads = random_tree(0), random_tree(1)
    first = {p: g * torch.clamp(2.0 / (norm_of(grads) + 1e-6), max=1.0) for p, g in grads.items()}
    second = {p: g * torch.clamp(0.3 / (norm_of(first) + 1e-6), max=1.0) for p, g in first.items()}
    for last in (sgd(0.1), lars(0.1, momentum=0.0)):
        optimizer = chain(clip_by_global_norm(2.0), clip_by_global_norm(0.3), last)
        expected, _ = last.update(second, last.init(params), params, make_info(0, second, params))
        got, _ = optimizer.update(grads, optimizer.init(params), params, make_info(0, grads, params))
        assert_close(got, expected)


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


def test_lars_equals_its_formula():
    params = random_tree(0)
    w, trace = params["a.w"].clone(), torch.zeros(4, 6, dtype=torch.float64)
    for step in range(4):
        grad = random_tree(100 + step)["a.w"]
        ratio = 1e-3 * w.norm() / (grad.norm() + 0.01 * w.norm() + 1e-8)
        trace = 0.9 * trace + 0.1 * ratio * (grad + 0.01 * w)
        w = w - trace
    got = train(lars(0.1, weight_decay=0.01), params, 4)[0]["a.w"]
    torch.testing.assert_close(got, w, atol=1e-12, rtol=1e-12)


def test_whole_leaf_norms_and_gather_make_shards_equal_the_whole():
    """Two shards, each with the whole leaf's norms (or a gather), move as the whole does."""
    full = {"w": random_tree(0)["a.w"]}
    grads = {"w": random_tree(1)["a.w"]}
    for optimizer in (lars(0.1), row_sgd(0.1)):
        info = make_info(0, grads, full)
        expected, _ = optimizer.update(grads, optimizer.init(full), full, info)
        parts = []
        for rank in range(2):
            rows = slice(2 * rank, 2 * rank + 2)
            part, grad = {"w": full["w"][rows]}, {"w": grads["w"][rows]}
            sharded = StepInfo(
                info.step,
                leaf_norms=info.leaf_norms,
                gather=lambda path, shard: grads[path],
                cut=lambda path, tensor, rows=rows: tensor[rows],
            )
            parts.append(optimizer.update(grad, optimizer.init(part), part, sharded)[0]["w"])
        torch.testing.assert_close(torch.cat(parts), expected["w"], atol=0, rtol=0)


# ------------------------------------------------------------------ the contract, for all


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_apply_keeps_every_tensor_where_it_is(name, dtype):
    params = random_tree(0, dtype=dtype)
    slots = ALL[name].init(params)
    before = [id(t) for tree in (params, *slots.values()) for t in tree.values()]
    grads = random_tree(1, dtype=dtype)
    info = make_info(0, grads, params)
    assert ALL[name].apply(grads, slots, params, info) is None
    assert [id(t) for tree in (params, *slots.values()) for t in tree.values()] == before


@pytest.mark.parametrize("scale", [None, 0.125])
@pytest.mark.parametrize("name", ALL)
def test_apply_is_params_plus_updates(name, scale):
    params = random_tree(0)
    by_update, by_apply = (train(ALL[name], params, way=way, scale=scale) for way in ("update", "apply"))
    for a, b in zip(by_update, by_apply, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_short_dtypes_agree_to_rounding_and_keep_their_dtype(name, dtype):
    params = random_tree(0, dtype=dtype)
    params["b.empty"] = params["b.empty"].double()  # dtypes may differ from leaf to leaf
    by_update, by_apply = (train(ALL[name], params, 3, way) for way in ("update", "apply"))
    tolerance = 32 * torch.finfo(dtype).eps
    for a, b in zip(by_update, by_apply, strict=True):
        assert_close(a, b, tolerance, tolerance)
    for path, slots in by_apply[1].items():
        assert {t.dtype for t in slots.values()} <= {params[path].dtype}
        assert {t.shape for t in slots.values()} <= {params[path].shape}


@pytest.mark.parametrize("name", ALL)
def test_subsets_in_any_order_are_bitwise_the_whole(name):
    params = random_tree(0)
    full = train(ALL[name], params, 3, "apply", scale=0.5)
    for seed in range(4):
        paths = list(params)
        random.Random(seed).shuffle(paths)
        cut = seed % (len(paths) - 1) + 1
        order = [[p] for p in paths] if seed == 0 else [paths[:cut], paths[cut:]]
        for a, b in zip(full, train(ALL[name], params, 3, "apply", scale=0.5, order=order), strict=True):
            assert_equal({p: a[p] for p in params}, {p: b[p] for p in params})


@pytest.mark.parametrize("name", ALL)
def test_update_is_pure(name):
    params, grads = random_tree(0), random_tree(1)
    slots = train(ALL[name], params, 2)[1]
    before = copy(params), copy(grads), copy(slots)
    info = make_info(2, grads, params, 0.5)
    first = ALL[name].update(grads, slots, params, info)
    second = ALL[name].update(grads, slots, params, info)
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)
    for a, b in zip((params, grads, slots), before, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("name", [n for n in ALL if "rules" not in n])
def test_init_on_a_subset_is_the_subset_of_init(name):
    params = random_tree(0)
    full = ALL[name].init(params)
    for paths in itertools.combinations(params, 2):
        assert_equal(ALL[name].init({p: params[p] for p in paths}), {p: full[p] for p in paths})


@pytest.mark.parametrize("name", [n for n in ALL if ALL[n].elementwise or "lars" in n])
def test_padding_stays_zero(name):
    """Rows past a leaf's end have zero parameters and gradients; nothing may ever move them."""
    optimizer = ALL[name]
    params = {p: torch.cat([t, torch.zeros(2, *t.shape[1:])]) for p, t in random_tree(0).items() if t.dim()}
    slots = optimizer.init(params)
    for step in range(4):
        grads = {
            p: torch.cat([g, torch.zeros(2, *g.shape[1:])]) for p, g in random_tree(step).items() if g.dim()
        }
        optimizer.apply(grads, slots, params, make_info(step, grads, params))
    for path, param in params.items():
        for tensor in (param, *slots[path].values()):
            assert torch.equal(tensor[-2:], torch.zeros_like(tensor[-2:]))


@pytest.mark.parametrize("name", ALL)
def test_apply_minds_strides(name):
    """torch's fused kernels walk memory; transposed and sliced tensors must still be right."""

    def odd(tree):
        sliced = torch.zeros(4, 12, dtype=torch.float64)[:, 3:9]
        return {"embed.w": tree["embed.w"].t().contiguous().t(), "a.w": sliced.copy_(tree["a.w"]),
                "a.norm.w": tree["a.norm.w"].clone()}  # fmt: skip

    plain, grads = random_tree(0), random_tree(1)
    plain, grads = ({p: t[p] for p in odd(t)} for t in (plain, grads))
    info = make_info(0, grads, plain, 0.5)
    updates, expected = ALL[name].update(grads, ALL[name].init(plain), plain, info)
    for params, given_grads in (
        (odd(plain), copy(grads)),
        (copy(plain), odd(grads)),
        (odd(plain), odd(grads)),
    ):
        slots = ALL[name].init(params)
        for kept in slots.values():  # as a state that was restored from elsewhere may be
            kept.update({n: torch.stack([t, t], -1)[..., 0] for n, t in kept.items()})
        around = params["a.w"]._base
        ALL[name].apply(given_grads, slots, params, info)
        assert_close(params, {p: plain[p] + updates[p] for p in plain})
        assert_close(slots, expected)
        if around is not None:
            assert around[:, :3].abs().max() == 0 == around[:, 9:].abs().max()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_is_true(name):
    """A leaf cut in two, with the same step info, moves as the whole."""
    params, grads = {"a.w": random_tree(0)["a.w"]}, {"a.w": random_tree(1)["a.w"]}
    optimizer = ALL[name]
    info = make_info(1, grads, params)
    free = replace(optimizer, rules=())
    full, _ = free.update(grads, free.init(params), params, info)
    for rows in (slice(0, 1), slice(1, 4)):
        part = {"a.w": params["a.w"][rows]}
        update, _ = free.update({"a.w": grads["a.w"][rows]}, free.init(part), part, info)
        assert torch.equal(update["a.w"], full["a.w"][rows])


@pytest.mark.parametrize("name", [n for n in ALL if "row" not in n])
def test_name_reads_back(name):
    scope = {**vars(optim), **vars(schedules)}
    again = eval(repr(ALL[name]), scope)
    assert repr(again) == repr(ALL[name])
    params = random_tree(0)
    assert_equal(train(again, params)[0], train(ALL[name], params)[0])


def test_parameters_that_require_grad_are_updated_in_place():
    params = {"w": nn.Parameter(torch.ones(3))}
    optimizer = adamw(0.1)
    slots = optimizer.init(params)
    optimizer.apply({"w": torch.ones(3)}, slots, params, StepInfo(torch.tensor(0)))
    assert (params["w"] < 1).all() and not slots["w"]["mu"].requires_grad


def test_wire_dtype_gradients_meet_master_parameters():
    """Gradients may come in another dtype than the master parameters; the arithmetic is the master's."""
    params = random_tree(0, dtype=torch.float32)
    grads = {p: g.to(torch.bfloat16) for p, g in random_tree(1).items()}
    optimizer = adamw(0.1)
    info = make_info(0, grads, params, 1 / 3)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, info)
    expected = {p: params[p] + updates[p] for p in params}
    optimizer.apply(grads, optimizer.init(params), params, info)
    assert_close(params, expected, 1e-6, 1e-6)
