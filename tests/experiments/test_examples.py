"""The worked examples train: their loss goes down, on one process and on two ranks; each is one page."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from experiments.examples import gpt, mlp, vit


def fell(losses: list[float], by: float) -> bool:
    """Whether the mean of the last five losses is below that share of the first."""
    return sum(losses[-5:]) / 5 < by * losses[0]


def test_the_mlp_learns() -> None:
    assert fell(mlp.main(steps=30, backend="eager"), by=0.5)


def test_the_vit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "PATCH", 16)  # fewer patches, a quarter of the work
    assert fell(vit.main(steps=40, backend="eager"), by=0.95)


def train_gpt(rank: int) -> list[float]:
    return gpt.train(steps=12, backend="eager")


def test_the_gpt_learns_on_two_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(train_gpt)
    assert first == second and fell(first, by=0.8)


@pytest.mark.parametrize("module", [gpt, mlp, vit], ids=lambda module: module.__name__)
def test_an_example_is_one_page(module: Any) -> None:
    assert len(inspect.getsource(module).splitlines()) < 80
