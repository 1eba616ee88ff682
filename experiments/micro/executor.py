"""What the executor itself costs: a step whose kernels and collectives do nothing.

    python -m experiments.micro.executor --blocks 12

Prints CPU microseconds per unit and phase (forward, backward): everything but kernels and collectives,
so packing, unpacking, updates' bookkeeping and the loop. Copies are of tiny leaves: their bytes are
the collectives' cost, their calls are ours. Then what a step of `--leaves` leaves spends outside of its
schedule: checks, inputs and metrics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.training.decoder import Decoder, DecoderConfig
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT
from fnshard.compiler.schedule.instructions import Run
from fnshard.runtime.collectives.base import Done
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.execute import bind


class Nothing:
    """Collectives among two ranks that are always done: the other rank's row is this one's."""

    def __init__(self, mesh: fs.Mesh):
        self.mesh = mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: tuple[str, ...], rows: int = 1) -> Tensor:
        return torch.empty(rows * numel, dtype=dtype)

    def all_gather(self, flat: Tensor, axes: tuple[str, ...]) -> Done:
        return Done([flat, flat])

    def reduce_scatter(self, rows: Tensor, axes: tuple[str, ...]) -> Done:
        return Done(rows[: rows.numel() // 2])

    def all_reduce(self, flat: Tensor, axes: tuple[str, ...]) -> Done:
        return Done(flat)


def measure(blocks: int, preset: str, repeats: int) -> dict[str, float]:
    """Median microseconds of one step, by what is counted."""
    mesh = fs.make_mesh(shard=2, abstract=True)
    config = DecoderConfig(width=8, layers=blocks, heads=2, kv_heads=1, context=8, vocab=16)
    apply, params = fs.make_functional(Decoder(config))
    specs = fs.presets.PRESETS[preset](params, mesh)
    tokens = torch.zeros(1, 8, dtype=torch.long)

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return apply(p, tokens).sum()

    lowered = fs.shard_step(loss, specs, mesh=mesh, backend="eager").lower(params, tokens)
    outs = {
        (k.name, backward): [torch.zeros(n.meta["val"].shape)
                             for n in (k.backward if backward else k.forward).graph.output_node().args[0]]
        for k in lowered.kernels.values() for backward in (False, True)
    }  # fmt: skip
    kernels = {
        k.name: (lambda args, o=outs[k.name, False]: o, lambda args, o=outs[k.name, True]: o)
        for k in lowered.kernels.values()
    }
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    run = bind(ExecutorContext(lowered.schedule, kernels, Nothing(mesh), 0, step._scalars(lowered)))
    shards = fs.shard(params, specs, mesh)
    units = sum(isinstance(i, Run) for i in lowered.schedule.instructions)
    times = []
    for _ in range(repeats):
        env = {f"s:{p}": v for p, v in shards.items()}
        env |= {"batch:0": tokens, LOSS_TANGENT: torch.ones(()), CONTROL: StepControl()}
        start = time.thread_time()
        run(env)
        times.append(time.thread_time() - start)
    return {"units_and_phases": units, "us_per_unit_and_phase": statistics.median(times) / units * 1e6}


def outside_ms(leaves: int, repeats: int) -> float:
    """Median CPU milliseconds of a step with an optimizer, without those of its schedule."""
    mesh = fs.make_mesh(shard=1, device="cpu")
    params = {f"layers.{i}": torch.ones(4) for i in range(leaves)}
    specs = {p: fs.LayoutSpec(unit="all") for p in params}
    step = fs.shard_step(
        lambda p, x: (torch.stack(list(p.values())) * x).sum(),
        fs.match_specs(params, list(specs.items())), mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager",
    )  # fmt: skip
    state, x, times, inside = step.init(params), torch.ones(4), [], [0.0]
    state, _ = step(state, x)
    (bound,) = step._runner.rank.bound.values()
    run = bound.run

    def timed(env: dict[str, Any]) -> dict[str, Any]:
        start = time.thread_time()
        try:
            return run(env)
        finally:
            inside[0] = time.thread_time() - start

    step._runner.rank.bound = {k: replace(b, run=timed) for k, b in step._runner.rank.bound.items()}
    for _ in range(repeats):
        start = time.thread_time()
        state, _ = step(state, x)
        times.append(time.thread_time() - start - inside[0])
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--preset", default="full_shard", choices=fs.presets.PRESETS)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args.blocks, args.preset, args.repeats)
    print(f"{args.preset}: {result['us_per_unit_and_phase']:.0f} CPU us per unit and phase "
          f"({result['units_and_phases']} of them)")  # fmt: skip
    outside = outside_ms(args.leaves, args.repeats)
    print(f"a step of {args.leaves} leaves: {outside:.2f} CPU ms outside of its schedule")


if __name__ == "__main__":
    main()
