"""Optimizers of all kinds, and what a step hands them: for tests of the contract that all of them hold."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import Tensor

from fnshard import schedules
from fnshard.optim.compact import adafactor, adamw_8bit
from fnshard.optim.muon import muon
from fnshard.optim.optimizer import Optimizer, Step, apply_updates, init_slots
from fnshard.optim.optimizers import (
    adamw,
    by_path,
    chain,
    clip_by_global_norm,
    ema,
    lars,
    lion,
    schedule_free_adamw,
    sgd,
)
from fnshard.optim.soap import soap

RULES = {"weight_decay": [("*norm*", 0.0), ("*", 0.1)], "lr_scale": [("embed*", 0.5), ("*", 1.0)]}
SHAPES = {"embed.w": (7, 3), "a.norm.w": (5,), "a.w": (4, 6), "b.scalar": (), "b.empty": (0, 3)}
RATE = schedules.warmup_cosine(0.1, warmup=2, total=6, floor=0.01)


def row_sgd(lr: float) -> Optimizer:
    """Make a user's own optimizer that looks at whole leaves: gradients over their largest element."""

    def update(path, grad, slots, param, step):
        return -lr * grad / ((grad.abs().amax() if grad.numel() else grad.sum()) + 1e-6), {}

    return Optimizer(f"row_sgd(lr={lr})", lambda path, param: {}, update, rules=())


ALL = {
    "sgd": sgd(0.1),
    "sgd_decay": sgd(RATE, weight_decay=0.1),
    "momentum": sgd(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": sgd(RATE, momentum=0.9, nesterov=True),
    "adamw": adamw(1e-2),
    "adamw_rate": adamw(RATE, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.0),
    "adamw_rules": adamw(1e-2, **RULES),
    "sgd_rules": sgd(1e-2, momentum=0.5, **RULES),
    "clip": clip_by_global_norm(0.5),
    "ema": ema(0.9),
    "clip_adamw_ema": chain(clip_by_global_norm(0.5), adamw(RATE), ema(0.9)),
    "two_clips_two_emas": chain(
        clip_by_global_norm(2.0), clip_by_global_norm(0.3), sgd(0.1, 0.9), ema(0.9), ema(0.5)
    ),
    "ema_schedule": chain(sgd(0.1, 0.9), ema(RATE)),
    "two_bodies": chain(sgd(1.0, momentum=0.5), sgd(0.1, momentum=0.9), ema(0.9)),
    "lion": lion(RATE, weight_decay=0.3),
    "schedule_free": schedule_free_adamw(RATE, weight_decay=0.1),
    "clip_schedule_free_rules": chain(clip_by_global_norm(0.5), schedule_free_adamw(1e-2, **RULES)),
    "muon": muon(RATE, dtype=None),
    "clip_muon_ema": chain(clip_by_global_norm(0.5), muon(0.02, ns_steps=3, scale="original"), ema(0.9)),
    "rules_of_optimizers": by_path(
        ("*norm*", sgd(0.1)), ("embed*", adamw(1e-2)), ("*", muon(0.02, dtype=None, others="no"))
    ),
    "rules_of_elementwise": by_path(("a.*", adamw(RATE)), ("*", sgd(0.1, 0.9))),
    "adamw_8bit": adamw_8bit(RATE, b2=0.95, weight_decay=0.1, block=2),
    "clip_adamw_8bit_ema": chain(clip_by_global_norm(0.5), adamw_8bit(1e-2, block=3), ema(0.9)),
    "adafactor": adafactor(RATE, weight_decay=0.1),
    "clip_adafactor_ema": chain(clip_by_global_norm(0.5), adafactor(0.1, d=0.5), ema(0.9)),
    "lars": lars(RATE, weight_decay=0.1, trust=0.5),
    "clip_lars_ema": chain(clip_by_global_norm(0.5), lars(0.1, trust=0.1), ema(0.9)),
    "soap": soap(RATE, precondition_frequency=2),
    "clip_soap_ema": chain(clip_by_global_norm(0.5), soap(0.05, max_precond_dim=4), ema(0.9)),
    "row_sgd": row_sgd(0.1),
    "clip_row_sgd": chain(clip_by_global_norm(0.5), row_sgd(0.1)),
}
WHOLE = ("muon", "soap", "adafactor", "lars", "8bit", "row", "of_optimizers")  # see more than elements
ELEMENTWISE = [name for name in ALL if not any(part in name for part in WHOLE)]


def random_tree(seed: int, shapes=None, dtype=torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for p, s in (shapes or SHAPES).items()
    }


def copy(tree):
    return {k: copy(v) if isinstance(v, dict) else v.clone() for k, v in tree.items()}


def norm_of(tree) -> Tensor:
    return torch.stack([t.double().square().sum() for t in tree.values()]).sum().sqrt()


def plain_cond():
    """Return a context in which `torch.cond` is an if, and needs no Dynamo, which takes seconds."""
    choose = lambda condition, true, false, operands=(): (true if condition else false)(*operands)  # noqa: E731
    return mock.patch.object(torch, "cond", choose)


def make_step(count: int, grads) -> Step:
    """Return what an executor with one rank would fill in."""
    return Step(torch.tensor(count), norm_of(grads))


def train(optimizer, params, steps=6, scale=None):
    """Return `params, slots` after some steps; gradients are multiplied by `scale`."""
    params = copy(params)
    slots = init_slots(optimizer, params)
    scale = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    for step in range(steps):
        grads = random_tree(100 + step, {p: t.shape for p, t in params.items()})
        grads = {p: g.to(params[p].dtype) for p, g in grads.items()}
        with plain_cond():
            params, slots = apply_updates(optimizer, grads, slots, params, make_step(step, grads), scale)
    return params, slots


def assert_close(a, b, atol=1e-12, rtol=1e-12):
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            assert_close(a[key], b[key], atol, rtol)
        else:
            torch.testing.assert_close(a[key], b[key], atol=atol, rtol=rtol, msg=lambda m, k=key: f"{k}: {m}")


def assert_equal(a, b):
    assert_close(a, b, 0, 0)


def hugging_face_cosine(step: int) -> float:
    """Compute `get_cosine_schedule_with_warmup`, with 2 warm-up and 6 steps and floor 0.1."""
    if step < 2:
        return step / 2
    return 0.1 + 0.9 * max(0.0, 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 2) / 4))))
