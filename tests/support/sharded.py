"""The loop of `reference.train` through fnshard, on one rank of any mesh, simulated or in a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from models import Model
from reference import Trained
from torch import Tensor

import fnshard as fs
from fnshard import Mesh
from fnshard.layout.spec import LayoutSpec

ATOL = 1e-10
STEPS = 3


def meshes(world: int, preset: str = "full_shard") -> dict[str, int]:
    """Return the axes of a world: two of them for hybrid_shard."""
    if preset == "hybrid_shard":
        return {"replicate": 2, "shard": world // 2}
    return {"shard": world}


def specs_of(model: Model, preset: str, mesh: Mesh, **policy: Any) -> dict[str, LayoutSpec]:
    """Return a preset's specs; the model's frozen leaves do not train."""
    specs = fs.presets.PRESETS[preset](model.params, mesh, **policy)
    return {**specs, **{p: replace(specs[p], trainable=False) for p in model.frozen}}


def simulated(world: int = 2, **axes: int) -> Mesh:
    return fs.make_mesh(**(axes or {"shard": world}), simulated=True)


def by_steps(model: Model) -> list[list[tuple[Any, ...]]]:
    return [[batch] for batch in model.batches(STEPS)]


def as_float(model: Model) -> Model:
    """Return the model in fp32."""
    params, narrow = {}, {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for path, value in model.params.items():
        cast = value.detach().to(narrow.get(value.dtype, value.dtype))
        kinds = (kind for kind in (torch.nn.Parameter, torch.nn.Buffer) if isinstance(value, kind))
        params[path] = next(kinds, lambda t: t)(cast)
    return replace(model, params=params)


def part(batch: Sequence[Any], index: int, parts: int) -> tuple[Any, ...]:
    """Return this rank's rows of a global batch; what is no tensor, or `Whole`, goes to all."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        size = value.shape[0] // parts
        return value[index * size : (index + 1) * size]

    return tuple(rows(v) for v in batch)


def train(
    rank: int,
    mesh: Mesh,
    model: Model,
    specs: Mapping[str, LayoutSpec],
    optimizer: Any,
    steps: int = STEPS,
    *,
    loss: Callable[..., Any] | None = None,
    step: Any = None,
    seed: int = 0,
    **options: Any,
) -> Trained:
    """Train on this rank's rows of the model's batches; parameters come back whole.

    `step`: a step made before (simulated ranks share one, so that it is lowered once).
    """
    step = step or make_step(mesh, model, specs, optimizer, loss=loss, **options)
    state = step.init(model.params, seed=seed)
    out = Trained()
    for batch in model.batches(steps):
        state, metrics = step(state, *part(batch, mesh.data_rank, mesh.data_size))
        out.losses.append(metrics["loss"].item())
        if "grad_norm" in metrics:
            out.norms.append(metrics["grad_norm"].item())
    out.params = fs.unshard(state.params, specs, mesh)
    return out


def make_step(
    mesh: Mesh, model: Model, specs: Any, optimizer: Any, *, loss: Any = None, **options: Any
) -> Any:
    """Call `shard_step`, on the eager backend unless `options` say otherwise."""
    options = {"backend": "eager", **options}
    return fs.shard_step(loss or model.loss, specs, mesh=mesh, optimizer=optimizer, **options)


def simulate(
    model: Model,
    preset: str,
    axes: int | Mapping[str, int],
    optimizer: Any,
    *,
    adversary: Any = None,
    steps: int = STEPS,
    policy: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Trained]:
    """Run `train` on every rank of a simulated mesh, or world."""
    mesh = fs.make_mesh(**(meshes(axes, preset) if isinstance(axes, int) else axes), simulated=True)
    specs = specs_of(model, preset, mesh, **(policy or {}))
    step = make_step(mesh, model, specs, optimizer, **options)

    def run(rank: int) -> Trained:
        return train(rank, mesh, model, specs, optimizer, steps, step=step)

    return fs.simulate(mesh, run, adversary=adversary)


def assert_floats(got: Sequence[float], expected: Sequence[float], atol: float = ATOL) -> None:
    """Assert that there are equally many numbers, pairwise within `atol`."""
    pair = (torch.tensor(each, dtype=torch.float64) for each in (got, expected))
    torch.testing.assert_close(*pair, rtol=0, atol=atol)


def assert_same(got: Trained, expected: Trained, atol: float = ATOL) -> None:
    """Assert that every loss and every element of every parameter is within `atol`."""
    assert_floats(got.losses, expected.losses, atol)
    assert got.params.keys() == expected.params.keys()
    for path, value in expected.params.items():
        torch.testing.assert_close(
            got.params[path], value, rtol=0, atol=atol, msg=lambda m, path=path: f"{path}: {m}"
        )
