"""Checkpoints that aef5a954 has written on two ranks restore bit for bit.

`earlier/NAME/3` is the checkpoint. `expected.safetensors` next to it is what that version restored on one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fnshard as fs

EARLIER = Path(__file__).parent / "earlier"
SHAPES = {"embed.w": (6, 4), "layers.0.w": (8, 4), "layers.1.w": (4, 8), "layers.1.bias": (5,)}
MIXED = {"compute_dtype": torch.bfloat16, "storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}
OPTIMIZERS: dict[str, tuple[Callable[[], fs.optim.Optimizer], dict[str, Any]]] = {
    "adamw_zero1_bf16": (
        lambda: fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2), fs.optim.ema(0.9)),
        MIXED,
    ),
    "adafactor_full_shard": (lambda: fs.optim.adafactor(1e-2), {}),
    "muon_full_shard": (lambda: fs.optim.muon(1e-2), {}),
}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return sum(p.float().square().mean() for p in params.values()) * x.mean()


def differences(_: int, name: str, ranks: int) -> list[str]:
    """Return the leaves and slots of a restored state that are not what was saved."""
    make, policy = OPTIMIZERS[name]
    mesh = fs.make_mesh(shard=ranks, device="cpu")
    params = {path: torch.zeros(shape) for path, shape in SHAPES.items()}
    specs = fs.presets.full_shard(params, mesh, **policy)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=make(), backend="eager")
    state = fs.checkpoint.restore(EARLIER / name, step)
    whole = fs.reshard(state, step.specs, fs.presets.no_shard(params, mesh, **policy))
    found = {f"params/{path}": value for path, value in whole.params.items()}
    found |= {f"{slot}/{path}": v for path, own in whole.opt_state.items() for slot, v in own.items()}
    found |= {"step": whole.step, "seed": whole.seed}
    expected = load_file(EARLIER / name / "expected.safetensors")
    wrong = sorted(expected.keys() ^ found.keys())
    return wrong + [n for n, v in expected.items() if n in found and not torch.equal(v, found[n])]


@pytest.mark.suite({
    "muon_*": "stacks",
    "adamw_*": "masters, whole leaves",
})  # fmt: skip
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_earlier_checkpoint_restores_bit_for_bit(name: str, ranks: Any) -> None:
    assert differences(0, name, 1) == []
    assert ranks(2).run(differences, name, 2) == [[], []]
