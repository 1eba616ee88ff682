"""The worked examples train: their loss goes down, on one process and on two ranks; each is one page."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiments.examples import (
    dino,
    ensemble_vmap,
    gpt,
    gradient_penalty_gan,
    maml,
    mlp,
    moe,
    pinn,
    second_try,
    vit,
)


def fell(losses: list[float], by: float) -> bool:
    """Return whether the mean of the last five losses is below that share of the first."""
    return sum(losses[-5:]) / 5 < by * losses[0]


def test_the_mlp_learns() -> None:
    assert fell(mlp.main(steps=30, backend="eager"), by=0.5)


@pytest.mark.long  # test_readme_commands runs it, too
def test_the_vit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "PATCH", 16)  # fewer patches, a quarter of the work
    assert fell(vit.main(steps=40, backend="eager"), by=0.95)


def train_gpt(rank: int) -> list[float]:
    return gpt.train(steps=12, backend="eager")


@pytest.mark.long  # test_the_mlp_learns, and the README's script
def test_the_gpt_learns_on_two_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(train_gpt)
    assert first == second and fell(first, by=0.8)


def in_double(rank: int, train: Callable[..., list[float]], steps: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        return train(steps=steps, backend="eager")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.long  # tests/compiler/test_transforms.py has such programs
@pytest.mark.parametrize(
    ("module", "steps", "by"),
    [
        (maml, 40, 0.85),
        (gradient_penalty_gan, 60, 0.9),
        (ensemble_vmap, 30, 0.6),
        (pinn, 30, 0.8),
        (moe, 30, 0.95),
        (dino, 60, 0.8),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_learns_and_two_ranks_are_one_process(module: Any, steps: int, by: float, ranks: Any) -> None:
    expected = in_double(0, module.train, steps)
    assert fell(expected, by)
    for losses in ranks(2).run(in_double, module.train, 5):
        assert losses == pytest.approx(expected[:5], rel=1e-10)


@pytest.mark.parametrize(
    "module", [dino, ensemble_vmap, gpt, gradient_penalty_gan, maml, mlp, moe, pinn, second_try, vit]
)
def test_an_example_is_one_page(module: Any) -> None:
    assert len(inspect.getsource(module).splitlines()) < 100


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["321"], 1.0),
        ([" 32", "321 "], 0.4 * 5 / 3),
        (["", "320"], 0.4 * 2 / 3),
        (["12", ""], 0.4 / 3),
        (["1", "321321"], 0.2),
    ],
)
def test_a_wrong_answer_is_sent_back_once(answers: list[str], reward: float) -> None:
    left, asked = iter(answers), {"role": "user", "content": "rev 123="}

    def ask(messages: list[Any]) -> dict[str, str]:
        assert messages[0] == asked and len(messages) % 2
        return {"role": "assistant", "content": next(left)}

    messages, found = second_try.rollout({"messages": [asked], "response": "321"}, ask)
    assert found == pytest.approx(reward) and next(left, None) is None
    assert [each["role"] for each in messages] == ["user", "assistant"] * len(answers)
