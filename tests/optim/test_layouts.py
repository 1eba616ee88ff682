"""Optimizers that see more of a leaf than single elements: what they keep, send and compute; mistakes.

That they train right is `test_meshes`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard.compiler.schedule.instructions import ComputeStack, ReduceUpdate, StackUpdate, Wait
from fnshard.errors import OptimizerError
from fnshard.optim import Optimizer, adafactor, adamw, adamw_8bit, by_path, chain, ema, muon, soap


def lower(optimizer: Optimizer, shapes: dict[str, tuple[int, ...]], **axes: int) -> Any:
    """Return the step of a chain of units, on paper."""
    mesh = fs.make_mesh(**axes, abstract=True)
    params = {path: torch.zeros(shape) for path, shape in shapes.items()}
    specs = fs.presets.full_shard(params, mesh)

    def total(params: Any, x: Tensor) -> Tensor:
        hidden = x
        for leaf in params.values():
            hidden = torch.tanh(hidden) + leaf.square().sum()
        return hidden.sum()

    step = fs.shard_step(total, specs, mesh=mesh, optimizer=optimizer, backend="eager")
    return step.lower(params, torch.ones(2))


UNITS = {f"layers.{n}.w": (32, 48) for n in range(4)} | {"layers.0.b": (64,)}


def test_sums_are_small_and_travel_during_the_backward() -> None:
    """A matrix sends means of its columns and some numbers: no more than a row and a few."""
    lowered = lower(adafactor(0.1), UNITS, shard=4)
    lines = lowered.schedule.instructions
    sums = [line for line in lines if isinstance(line, ReduceUpdate)]
    assert not any(isinstance(line, StackUpdate) for line in lines)
    sent = sum(line.wire_bytes(lowered.schedule) for line in sums)
    # In fp32: 48 means and at most four numbers for each of four matrices, two numbers for the bias.
    assert 4 * (4 * 48) < sent <= 4 * (4 * (48 + 4) + 2)
    first = lines.index(sums[0])
    wait = next(n for n, line in enumerate(lines) if isinstance(line, Wait) and line.reads == sums[0].writes)
    runs = [n for n, line in enumerate(lines) if line.verb == "run" and line.phase == "backward"]
    assert any(first < n < wait for n in runs)  # a kernel runs while they travel
    assert lowered.comm_analysis()[sums[0].verb] == {"count": len(sums), "bytes": sent}


def test_state_in_eight_bits_is_a_quarter() -> None:
    wide, eight, factored = (
        lower(each, UNITS, shard=4).memory_analysis().leaves["layers.1.w"]["optimizer"]
        for each in (adamw(0.1), adamw_8bit(0.1, block=16), adafactor(0.1))
    )
    assert eight == wide * (1 + 4 / 16) / 4 and factored < 0.1 * wide
    shapes = {"w": (64, 128)}
    both = [
        lower(each, shapes, shard=2).memory_analysis().leaves["w"]["optimizer"]
        for each in (adamw_8bit(0.1), adamw(0.1))
    ]
    assert both[0] <= 0.27 * both[1]


def test_state_goes_to_where_its_matrix_is_whole_and_back() -> None:
    """Each of four ranks computes one of four matrices.

    A gradient, two moments, and both averages and bases of a matrix are sent. All but the gradient come back,
    and an update.
    """
    layers = {f"layers.{n}.w": (32, 32) for n in range(4)}
    lowered = lower(soap(0.1, precondition_frequency=1), layers, shard=4)
    lines = lowered.schedule.instructions
    stacks = [lowered.schedule.buckets[line.bucket] for line in lines if isinstance(line, StackUpdate)]
    assert {len(bucket.paths) for bucket in stacks} == {4}
    assert len([line for line in lines if isinstance(line, ComputeStack)]) == 1
    there, back = (sum(p.numel for p in bucket.pieces) for bucket in stacks)
    assert there == back == 7 * 32 * 32


@pytest.mark.parametrize("own", [soap(0.1, max_precond_dim=6), muon(0.1)])
def test_a_rule_of_matrices_in_a_rule_tells_leaves_of_one_shape_apart(own: Optimizer) -> None:
    """An embedding is AdamW's, and a matrix of its shape is not."""
    params, mesh = {"embed.w": torch.ones(6, 6), "w": torch.ones(6, 6)}, fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)
    loss = lambda p, x: (p["embed.w"] @ p["w"] @ x).square().sum()  # noqa: E731
    rules = chain(by_path(("*", own)), ema(0.9))
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=rules, backend="eager")

    def on_rank(_: int) -> list[list[str]]:
        state, _ = step(step.init(params), torch.eye(6))
        return [sorted(slots) for slots in state.opt_state.values()]

    embedding, matrix = fs.simulate(mesh, on_rank)[0]
    assert embedding == ["ema", "mu", "nu"]
    assert matrix == sorted(["ema", *own.init("w", params["w"])])


@pytest.mark.parametrize(
    ("make", "leaves"),
    [
        (lambda: adamw_8bit(0.1, block=0), "block=0"),
        (lambda: adafactor(0.1, d=0), ["d=0", "above 0"]),
        (lambda: adafactor(0.1, eps=(1e-3,)), "eps=(0.001,)"),
        (lambda: adafactor(0.1, beta2_decay=0.8), ["beta2_decay=0.8", "at most 0"]),
        (lambda: soap(0.1, b1=1.0), ["b1=1.0", "at least 0 and below 1"]),
        (lambda: soap(0.1, precondition_frequency=0), "precondition_frequency=0"),
        (lambda: soap(0.1, adamw="adam"), "'adam'"),
    ],
)
def test_mistakes_are_named(make: Any, leaves: Any) -> None:
    with raises(OptimizerError, leaves=leaves):
        make()
