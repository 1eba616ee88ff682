"""torch's own FSDP2 on the same model, values and batches: the same losses, in one test that runs both."""

from __future__ import annotations

from typing import Any

import sharded
import torch
from models import GPT, language_model, next_token, seeded, tokens

import fnshard as fs

STEPS, LR, CLIP = 3, 0.01, 1.0


def both(rank: int) -> dict[str, list[float]]:
    """Losses and gradient norms of FSDP2 and fnshard."""
    from torch.distributed.fsdp import fully_shard

    batches = [sharded.part(tokens(n), rank, 2) for n in range(STEPS)]
    out: dict[str, list[float]] = {"fsdp2": [], "fsdp2_norm": []}
    module = seeded(GPT, tied=True).float()
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1)
    for ids, targets in batches:
        optimizer.zero_grad()
        loss = next_token(module(ids), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        out["fsdp2"].append(total.item() / 2)
        out["fsdp2_norm"].append(norm.full_tensor().item())
    model = language_model(seeded(GPT, tied=True).float())
    mesh = fs.make_mesh(shard=2, device="cpu")
    chained = fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), fs.optim.adamw(LR, weight_decay=0.1))
    specs = fs.presets.full_shard(model.params, mesh)
    got = sharded.train(rank, mesh, model, specs, chained, STEPS)
    return out | {"fnshard": got.losses, "fnshard_norm": got.norms}


def test_fsdp2_gives_the_same_losses(ranks: Any) -> None:
    for got in ranks(2).run(both, timeout=200.0):
        sharded.assert_floats(got["fnshard"], got["fsdp2"], atol=1e-5)
        sharded.assert_floats(got["fnshard_norm"], got["fsdp2_norm"], atol=1e-4)
        assert got["fnshard"][-1] < got["fnshard"][0]
