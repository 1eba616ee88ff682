"""The bench's case `parity`: it finds a layout equal to plain PyTorch, and a wrong loss unequal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from experiments.bench import parity
from experiments.bench.parity import (
    LAYOUTS,
    MODELS,
    TOLERANCE,
    Errors,
    Layout,
    Training,
    compare,
    train_with_torch,
)
from fnshard import Mean


@pytest.fixture(autouse=True)
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_layouts_have_names_of_their_own():
    names = [layout.name for layout in (*LAYOUTS, *parity.RESUMED)]
    assert len(set(names)) == len(names)


@pytest.mark.long  # test_matrix has layouts
@pytest.mark.parametrize("name", ["full_shard", "expert, shard", "LoRA on nf4"])
def test_a_layout_trains_as_plain_pytorch_does(name):
    (layout,) = (each for each in LAYOUTS if each.name == name)
    assert compare(layout).worst < TOLERANCE


@pytest.mark.long  # a whole case of the bench
def test_a_mean_over_ranks_of_unequal_counts_is_seen(monkeypatch):
    """DDP's users write each rank's own mean."""
    right = MODELS["decoder"]()

    def mean_of_means(params, tokens, labels):
        mean = right.loss(params, tokens, labels)
        return mean.total / mean.count

    monkeypatch.setitem(MODELS, "decoder", lambda: replace(right, loss=mean_of_means))
    errors = compare(Layout("a mean of means", {"shard": 2}))
    assert min(errors.loss, errors.gradient, errors.last_loss, errors.last_gradient) > 1e-6
    assert isinstance(right.loss(right.params, *next(parity.batches())), Mean)


def run_peer(rank: int, kind: str, equal: bool) -> Errors:
    torch.set_default_dtype(torch.float64)
    try:
        model = MODELS["decoder"]()
        truth = parity.train_plainly(model, model.params, equal_counts=equal)
        return Errors.between(train_with_torch(kind, 2, equal), truth)
    finally:
        torch.set_default_dtype(torch.float32)


def train_peer(rank: int, kind: str) -> Training:
    torch.set_default_dtype(torch.float64)
    try:
        return train_with_torch(kind, 1, True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_peer_starts_from_the_parameters_of_the_plain_training(ranks, kind):
    """DDP and FSDP2 update a module in place, and FSDP2 holds a shard of each leaf."""
    start, expected = ranks(2).run(train_peer, kind)[0].start, MODELS["decoder"]().params
    assert start.keys() == expected.keys()
    assert all(torch.equal(start[path], leaf) for path, leaf in expected.items())


@pytest.mark.long
def test_a_peer_is_right_where_counts_are_equal_and_wrong_where_they_are_not(ranks):
    for kind in ("ddp", "fsdp2"):
        equal, unequal = (ranks(2).run(run_peer, kind, flag)[0].worst for flag in (True, False))
        assert equal < TOLERANCE and unequal > 1e-3
