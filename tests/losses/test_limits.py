"""What all losses hold to: what does not count is nowhere, and probabilities of 0 and 1 are finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor

from fnshard import losses
from fnshard.errors import FnshardError, StateError
from fnshard.losses import Mean, policy
from fnshard.losses.policy import Correction, PolicyInputs, group_advantages

B, T = 3, 4
NUMBERS = ("logprobs", "old", "reference", "sampler", "advantages", "entropy")
BAD = [math.nan, math.inf, -math.inf]


def of_tokens(name: str, **how: Any) -> Callable[..., tuple[Mean, dict[str, Mean]]]:
    """Return a loss of rewards, of tensors [B, T] by name."""

    def loss(mask: Tensor, **given: Tensor) -> tuple[Mean, dict[str, Mean]]:
        more = [given.pop(n) for n in ("values", "old_values", "returns") if n in given]
        return getattr(policy, name)(PolicyInputs(mask=mask, **given), *more, beta=0.1, **how)

    return loss


def of_rows(name: str, *names: str) -> Callable[..., tuple[Mean, dict[str, Mean]]]:
    """Return a loss of preferences, of tensors [B] by name."""
    return lambda mask, **given: getattr(policy, name)(*(given[n] for n in names), counted=mask)


def kto(mask: Tensor, **given: Tensor) -> tuple[Mean, dict[str, Mean]]:
    good = torch.arange(mask.numel()) % 2
    return policy.kto(given["a"], given["b"], good, torch.tensor(0.5), counted=mask)


REWARDS = {
    **{n: of_tokens(n) for n in ("grpo", "gspo", "bnpo", "dapo")},
    "dr_grpo": of_tokens("dr_grpo", max_length=T),
    "gspo corrected": of_tokens("gspo", correction=Correction(level="sequence")),
    "grpo masked": of_tokens("grpo", correction=Correction("mask")),
    "ppo": of_tokens("ppo"),
}
ROWS = {
    **{n: of_rows(n, "a", "b", "c", "d") for n in ("dpo", "ipo")},
    **{n: of_rows(n, "a", "b") for n in ("orpo", "simpo")},
    "kto": kto,
}


def test_every_loss_is_tried() -> None:
    tried = {name.split()[0] for name in (*REWARDS, *ROWS)}
    assert tried == set(policy.__all__) - {"Correction", "PolicyInputs", "gae", "group_advantages"}
    no_losses = {"IGNORE", "Mean", "Sequence", "Whole", "dpo", "policy"}
    assert {*OF_MODELS, "load_balance"} == set(losses.__all__) - no_losses


def tensors_for(name: str, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    names = ("a", "b", "c", "d") if name in ROWS else NUMBERS
    names += ("values", "old_values", "returns") if name == "ppo" else ()
    shape = (B,) if name in ROWS else (B, T)
    return {n: -torch.rand(shape, generator=random) - 0.1 for n in names}


def compute_step(
    name: str, mask: Tensor, given: dict[str, Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the loss, its metrics and its gradients."""
    given = {n: v.clone().requires_grad_() for n, v in given.items()}
    loss, aux = {**REWARDS, **ROWS}[name](mask, **given)
    slopes = torch.autograd.grad(loss.total, list(given.values()), allow_unused=True)
    metrics = [torch.as_tensor(part) for mean in aux.values() for part in (mean.total, mean.count)]
    return loss.total / loss.count, metrics, [s for s in slopes if s is not None]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", [*REWARDS, *ROWS])
def test_what_does_not_count_is_nowhere(name: str, bad: float) -> None:
    given = tensors_for(name)
    mask = torch.tensor([True, False, True])
    mask = (
        mask if name in ROWS else torch.stack([torch.arange(T) > 1, mask[1:2].expand(T), torch.arange(T) < 3])
    )
    expected = compute_step(name, mask, given)
    spoiled = compute_step(name, mask, {n: v.masked_fill(~mask, bad) for n, v in given.items()})
    torch.testing.assert_close(spoiled, expected, rtol=0, atol=0)
    assert not any(slope[~mask].any() for slope in spoiled[2])


def test_advantages_of_rows_that_do_not_count_are_nowhere() -> None:
    """They have one number a row."""
    given = {**tensors_for("grpo"), "advantages": torch.tensor([[1.0], [math.nan], [0.0]])}
    mask = torch.tensor([[True], [False], [True]]).expand(B, T)
    for name in REWARDS.keys() - {"ppo"}:
        loss, metrics, slopes = compute_step(name, mask, given)
        assert all(part.isfinite().all() for part in (loss, *metrics, *slopes)), name


@pytest.mark.parametrize("name", ROWS)
def test_pairs_of_probabilities_of_0_and_1_are_finite(name: str) -> None:
    values = torch.tensor([0.0, -1e-9, -1e-6, -2.0, -1e4, -1e30, -math.inf])
    given = dict(zip("abcd", torch.cartesian_prod(*[values] * 4).unbind(1), strict=True))
    loss, metrics, slopes = compute_step(name, torch.ones(len(given["a"]), dtype=torch.bool), given)
    assert all(part.isfinite().all() for part in (loss, *metrics, *slopes))


@pytest.mark.parametrize("name", REWARDS)
def test_tokens_of_probability_0_and_1_are_finite(name: str) -> None:
    values = (0.0, -1e-9, -50.0, -700.0, -math.inf)
    rows = torch.tensor(list(itertools.product(values, values, values, values, (-1.0, 0.0, 1.0))))
    given = tensors_for(name)
    given |= {n: rows[:, i : i + 1].expand(-1, T) for i, n in enumerate(NUMBERS[:5])}
    given = {n: v if len(v) == len(rows) else v[:1].expand(len(rows), T) for n, v in given.items()}
    loss, metrics, slopes = compute_step(name, torch.ones(len(rows), T, dtype=torch.bool), given)
    assert all(part.isfinite().all() for part in (loss, *metrics, *slopes))


def test_a_bad_token_that_grew_likely_is_still_pushed_down() -> None:
    """The exponential of a large gap is bounded, and not its slope's sign."""
    gap = torch.full((1, 1), 90.0, requires_grad=True)
    zero, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy.grpo(PolicyInputs(gap, zero, zero - 1, mask))
    (slope,) = torch.autograd.grad(loss.total, gap)
    assert 0 < float(slope) < 1e9


# ------------------------------------------------------------------ losses of hidden states, logits, routers

OF_MODELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear_cross_entropy": lambda x, w, t: losses.linear_cross_entropy(x, w, t).total,
    "linear_token_losses": lambda x, w, t: losses.linear_token_losses(x, w, t).sum(),
    "sequence_logprobs": lambda x, w, t: losses.sequence_logprobs(x, w, t).sum(),
    "next_token": lambda x, w, t: (
        losses.next_token(F.pad(x, (0, 1)) + w.sum(1), torch.cat([t[:, :1], t[:, :-1]], 1)).total
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", OF_MODELS)
def test_tokens_that_are_ignored_may_hold_anything(name: str, bad: float) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=random) for shape in ((2, 5, 6), (7, 6)))
    targets = torch.tensor([[1, 2, 3, losses.IGNORE, losses.IGNORE], [4, 5, losses.IGNORE, 6, losses.IGNORE]])
    ignored = (targets == losses.IGNORE)[..., None]
    results = []
    for number in (0.3, bad):
        x, w = hidden.masked_fill(ignored, number).requires_grad_(), weight.clone().requires_grad_()
        loss = OF_MODELS[name](x, w, targets)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("bad", BAD)
def test_routers_of_tokens_that_do_not_count_may_hold_anything(bad: float) -> None:
    counted = torch.tensor([True, False, True, True])
    results = []
    for number in (0.3, bad):
        logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        logits = logits.masked_fill(~counted[:, None], number).requires_grad_()
        loss = losses.load_balance([logits], 2, counted).total
        results.append((loss, *torch.autograd.grad(loss, logits)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


# ------------------------------------------------------------------ groups


def test_groups_of_one_and_whole_numbers_have_advantages() -> None:
    assert policy.group_advantages(torch.tensor([1.0, 0.0]), 1).tolist() == [0.0, 0.0]
    for whole in (torch.tensor([3, 1, 2, 2]), torch.tensor([True, False, True, True])):
        found = policy.group_advantages(whole, 2)
        assert torch.equal(found, policy.group_advantages(whole.float(), 2)) and found[0] > 0 == found[3]
    strided = torch.tensor([[1.0, 9.0], [0.0, 9.0]])[:, 0]
    assert policy.group_advantages(strided, 2, scale=False).tolist() == [0.5, -0.5]


@pytest.mark.parametrize(("count", "size"), [(3, 2), (4, 0), (4, -2), (4, 2.0), (1, 4)])
def test_groups_that_do_not_come_out_even_are_named(count: int, size: Any) -> None:
    with raises(FnshardError, leaves=f"size={size}", says=f"{count} rewards"):
        policy.group_advantages(torch.ones(count), size)


def test_all_numbers_of_the_inputs_are_tried() -> None:
    others = {"mask", "sequences", "max_sequences"}
    assert {f.name for f in fields(PolicyInputs)} == {*NUMBERS, *others}
    packed = torch.tensor([[0, 0, 1, -5]]).expand(B, T)  # padding may name no sequence
    given = tensors_for("gspo")
    inputs = PolicyInputs(mask=packed >= 0, sequences=packed, max_sequences=2, **given)
    loss, _ = policy.gspo(replace(inputs, logprobs=inputs.logprobs.masked_fill(packed < 0, math.nan)))
    assert loss.total.isfinite() and int(loss.count) == 2 * B


def test_groups_without_a_spread_have_advantage_zero() -> None:
    """Also where nothing is added to it; numpy's numbers are sizes, and True is none."""
    for size, rewards in ((1, [1.0, 2.0, 3.0]), (np.int64(3), [2.0, 2.0, 2.0])):
        assert group_advantages(torch.tensor(rewards), size, eps=0.0).tolist() == [0.0] * 3
    with raises(StateError, leaves="size=True"):
        group_advantages(torch.ones(3), True)
