"""Real gloo processes: Inductor against eager, and ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import sharded
from models import model_of
from tensor_models import decoder

import fnshard as fs

HOST = {"memory": "host", "optimizer_memory": "host"}


def in_both_backends(rank: int) -> list[reference.Trained]:
    model, mesh = sharded.as_float(decoder(layers=1)), fs.make_mesh(context=2, device="cpu")
    specs = sharded.specs_of(model, "full_shard", mesh)
    chained = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1, momentum=0.9))
    host = sharded.specs_of(model, "full_shard", mesh, **HOST)
    return [
        sharded.train(rank, mesh, model, specs, chained, context_attention="ring"),
        sharded.train(rank, mesh, model, host, chained, context_attention="ring", backend="inductor",
                      remat="unit+offload"),
    ]  # fmt: skip


def test_inductor_follows_eager(ranks: Any) -> None:
    """In a ring, with everything on the host and recomputed; `test_inductor` compiles what is gathered."""
    for eager, compiled in ranks(2).run(in_both_backends, timeout=300.0):
        sharded.assert_same(compiled, eager, atol=2e-5)
        assert compiled.losses[-1] < compiled.losses[0]


def disagree(rank: int) -> str:
    """Another program on rank 1; returns the error."""
    model, mesh = model_of("gpt"), fs.make_mesh(shard=2, device="cpu")
    specs = sharded.specs_of(model, "zero2" if rank else "full_shard", mesh)
    step = sharded.make_step(mesh, model, specs, fs.optim.sgd(0.1), timeout=20.0)
    with pytest.raises(fs.AgreementError) as error:
        step(step.init(model.params), *sharded.part(model.batch(0), rank, 2))
    return str(error.value)


def test_ranks_with_different_programs_are_an_error_at_once(ranks: Any) -> None:
    for text in ranks(2).run(disagree, timeout=60.0):
        assert text.startswith("rank(s) 1 hold another program than rank 0"), text
        assert "rank 0:" in text and "rank 1:" in text and "Fix:" in text, text
