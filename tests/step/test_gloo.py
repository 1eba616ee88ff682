"""Real gloo processes: Inductor against eager, and ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
from models import model_of, tokens

import fnshard as fs

HOST = {"memory": "host", "optimizer_memory": "host"}


def in_both_backends(rank: int) -> list[reference.Trained]:
    model = sharded.as_float(model_of("tied"))
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs = sharded.specs_of(model, "full_shard", mesh)
    chained = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1, momentum=0.9))
    host = sharded.specs_of(model, "full_shard", mesh, **HOST)
    return [
        sharded.train(rank, mesh, model, specs, chained, backend="eager"),
        sharded.train(rank, mesh, model, host, chained, backend="inductor", remat="unit+offload"),
    ]


def test_inductor_follows_eager(ranks: Any) -> None:
    """With everything on the host and recomputed; `test_coded_steps` compiles what rests on the device."""
    for eager, compiled in ranks(2).run(in_both_backends, timeout=300.0):
        sharded.assert_same(compiled, eager, atol=2e-5)
        assert compiled.losses[-1] < compiled.losses[0]


# ------------------------------------------------------------------ ranks that differ


def with_shapes(rank: int, lengths: list[list[int]]) -> reference.Trained:
    """This rank's batch of step i is `lengths[i][rank]` tokens long."""
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = sharded.make_step(mesh, model, specs, fs.optim.sgd(0.1), timeout=30.0)
    state, out = step.init(model.params), reference.Trained()
    for number, by_rank in enumerate(lengths):
        ids, targets = sharded.part(tokens(number), rank, 2)
        state, metrics = step(state, ids[:, : by_rank[rank]], targets[:, : by_rank[rank]])
        out.losses.append(metrics["loss"].item())
    out.params = fs.unshard(state.params, specs, mesh)
    return out


@pytest.mark.filterwarnings("ignore:compiling again")
def test_ranks_may_have_batches_of_different_shapes(ranks: Any) -> None:
    """One rank compiles a new shape at a step where the other does not; nobody waits for ever."""
    lengths = [[5, 5], [3, 5], [5, 2], [3, 2]]
    model = model_of("gpt")
    steps = []
    for number, by_rank in enumerate(lengths):
        parts = [sharded.part(tokens(number), r, 2) for r in range(2)]
        steps.append([(i[:, :n], t[:, :n]) for (i, t), n in zip(parts, by_rank, strict=True)])
    expected = reference.train(model.loss, model.params, steps, reference.sgd(0.1), frozen=model.frozen)
    for got in ranks(2).run(with_shapes, lengths):
        sharded.assert_same(got, expected)


def disagree(rank: int, how: str) -> str:
    """Build something else on rank 1; returns the error."""
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=2, device="cpu")
    odd = rank == 1
    specs = sharded.specs_of(model, "zero2" if odd and how == "specs" else "full_shard", mesh)
    rate = 0.2 if odd and how == "optimizer" else 0.1

    def more(params: Any, ids: Any, targets: Any) -> Any:
        value = model.loss(params, ids, targets)
        return (value, {"extra": value * 2}) if odd else value

    loss = more if how == "aux" else model.loss
    step = sharded.make_step(mesh, model, specs, fs.optim.sgd(rate), loss=loss, timeout=20.0)
    try:
        state = step.init(model.params)
        step(state, *sharded.part(model.batch(0), rank, 2))
    except fs.FnshardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("how", ["specs", "optimizer", "aux"])
def test_ranks_with_different_programs_are_an_error_at_once(ranks: Any, how: str) -> None:
    for text in ranks(2).run(disagree, how, timeout=60.0):
        assert text.startswith("AgreementError: rank(s) 1 hold another program than rank 0"), text
        assert "rank 0:" in text and "rank 1:" in text and "Fix:" in text, text
        if how == "optimizer":
            assert "sgd(lr=0.1" in text and "sgd(lr=0.2" in text, text
