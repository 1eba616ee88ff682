"""Real gloo processes: Inductor against eager, and ranks that differ."""

from __future__ import annotations

from typing import Any

import reference
import sharded
from models import Model
from tensor_models import decoder

import fnshard as fs

HOST = {"memory": "host", "optimizer_memory": "host"}


def model() -> Model:
    return sharded.as_float(decoder(layers=1))


def in_both_backends(rank: int) -> list[reference.Trained]:
    mesh = fs.make_mesh(context=2, device="cpu")
    chained = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1, momentum=0.9))
    ways = ({}, {"backend": "eager"}), (HOST, {"backend": "inductor", "remat": "unit+offload"})
    return [
        sharded.train(rank, mesh, model(), sharded.specs_of(model(), "full_shard", mesh, **policy), chained,
                      context_attention="ring", **options)
        for policy, options in ways
    ]  # fmt: skip


def test_eager_and_compiled_kernels_give_what_one_process_does(ranks: Any) -> None:
    """Attention is a ring; compiled kernels recompute, with all state on the host."""
    steps, rule = sharded.by_steps(model()), reference.sgd(0.1, 0.9)
    expected = reference.train(model().loss, model().params, steps, rule, clip=1.0)
    for of_rank in ranks(2).run(in_both_backends, timeout=300.0):
        for found in of_rank:
            sharded.assert_same(found, expected, atol=2e-5)
    assert expected.losses[-1] < expected.losses[0]
