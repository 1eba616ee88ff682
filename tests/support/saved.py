"""A small state whose every number is known, in any layout: for checkpoints to save, restore and compare."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from fnshard.checkpoint.state_leaves import state_leaves
from fnshard.runtime.packing import local_block

# Uneven on 2 and 4 ranks, a scalar, one that is smaller than any mesh, a buffer, a frozen leaf.
SHAPES = {
    "embed.w": (7, 5),
    "layers.0.w": (6, 4),
    "layers.0.b": (3,),
    "layers.1.w": (2, 9),
    "scale": (),
    "frozen": (5, 2),
}
STORED = {
    "fp32": {},
    "bf16": {"storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32},
    "fp64": {"storage_dtype": torch.float64},
    "host": {"memory": "host", "optimizer_memory": "host"},
    "disk": {"memory": "disk", "optimizer_memory": "disk"},
}
MESHES: Mapping[str, Any] = {
    "full_shard": lambda world: {"shard": world},
    "zero1": lambda world: {"shard": world},
    "no_shard": lambda world: {"shard": world},
    "hybrid_shard": lambda world: {"replicate": max(1, world // 2), "shard": min(world, 2)},
}


def number(name: str, shape: tuple[int, ...]) -> Tensor:
    """The full leaf by that name: values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-128, 128, shape, generator=generator).double() / 64


def params() -> dict[str, Tensor]:
    """Full leaves; "steps" is a buffer, "frozen" does not train."""
    full: dict[str, Any] = {p: torch.nn.Parameter(number(p, s).float()) for p, s in SHAPES.items()}
    full["frozen"].requires_grad_(False)
    return full | {"steps": torch.tensor([3, 4, 5])}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """Uses every leaf that trains."""
    used = sum(p[name].square().sum() for name in SHAPES)
    return used * x.mean()


def step_of(preset: str, stored: str, mesh: Any, optimizer: Any = None, folder: Path | None = None) -> Any:
    """A step in that layout."""
    specs = getattr(fs.presets, preset)(params(), mesh, **STORED[stored])
    chosen = optimizer or fs.optim.adamw(0.1)
    return fs.shard_step(
        loss_fn, specs, mesh=mesh, optimizer=chosen, backend="eager", disk_dir=folder and str(folder)
    )


def mesh_of(preset: str, world: int) -> Any:
    """The preset's axes over all ranks there are."""
    return fs.make_mesh(**MESHES[preset](world), device="cpu")


def known(step: Any, number_of_steps: int = 7) -> fs.TrainState:
    """This rank's part of the known state, in a step's layout."""
    state = step.init(params(), seed=11)
    state.step.fill_(number_of_steps)
    for name, value in expected(state).items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            path, _, slot = rest.rpartition("/")
            state.opt_state[path][slot].copy_(value)
    return state


def expected(state: fs.TrainState) -> dict[str, Tensor]:
    """What every leaf of a state must be, by its name and layout alone: masters are their parameters."""
    specs, mesh = state.where
    out = {}
    for name, leaf in state_leaves(state, specs, mesh).items():
        kind, _, rest = name.partition("/")
        if kind == "loss_scale":
            continue
        path = rest if kind == "params" else rest.rpartition("/")[0]
        source = path if kind == "params" or rest.endswith("/master") else name
        full = torch.tensor([3, 4, 5]) if path == "steps" else number(source, leaf.shape)
        out[name] = local_block(full, leaf.layout, mesh).to(leaf.block.dtype)
    return out


def differences(state: fs.TrainState) -> list[str]:
    """Names of the leaves that are not what they must be, to the bit."""
    specs, mesh = state.where
    leaves = state_leaves(state, specs, mesh)
    return [name for name, value in expected(state).items() if not torch.equal(leaves[name].block, value)]


# ------------------------------------------------------------------ on ranks of a pool


def save_all(rank: int, world: int, root: str, stored: list[str], presets: list[str]) -> None:
    """The known state in every layout, each in a directory of its own."""
    for preset in presets:
        for kind in stored:
            step = step_of(preset, kind, mesh_of(preset, world), folder=Path(root))
            fs.checkpoint.save(f"{root}/{world}-{preset}-{kind}", known(step), data={"position": 5})


def restore_all(
    rank: int, world: int, root: str, names: list[str], stored: list[str], presets: list[str]
) -> list[str]:
    """Every checkpoint in every layout here: what was not as it must be."""
    wrong = []
    for preset in presets:
        for kind in stored:
            step = step_of(preset, kind, mesh_of(preset, world), folder=Path(root))
            for name in names:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", fs.errors.CheckpointWarning)
                    state = fs.checkpoint.restore(f"{root}/{name}", step)
                found = differences(state)
                if (int(state.step), int(state.seed), state.data) != (7, 11, {"position": 5}):
                    found.append(f"step {int(state.step)}, seed {int(state.seed)}, data {state.data}")
                wrong += [f"{name} on {world} {preset} {kind}: {what}" for what in found]
    return wrong
