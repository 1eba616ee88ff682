"""Loader speed: `python -m experiments.micro.loader_speed data=shards data.root=FOLDER model=5m`.

How many tokens a second the loader of this configuration delivers, and how many one step of it takes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from experiments.cli.job import accelerators
from experiments.cli.main import answer
from experiments.configs.machine import place
from experiments.configs.train import ConfigError, ShardsConfig, TrainConfig
from experiments.train import JOB
from experiments.training.loop import prepare

SECONDS = 2.0  # that the loader is watched for
STEPS = 5  # the first compiles, and is not counted


def run(config: TrainConfig, _: object) -> None:
    if not isinstance(config.data, ShardsConfig):
        raise ConfigError("the loader of shards is measured. Fix: data=shards data.root=FOLDER.")
    placed = place(config, accelerators=accelerators())
    alone = dataclasses.replace(placed, mesh=dataclasses.replace(placed.mesh, shard=1, replicate=1))
    print(as_text(measure(alone)))


def measure(config: TrainConfig) -> dict[str, float]:
    """Tokens a second: of the loader cut by cut, `alone`, of the step, `step`; and the part of a step that is
    spent waiting for the prefetched batch, `waiting`, in one process."""
    setup = prepare(config)
    tokens = config.data.rows * config.model.context
    loader = dataclasses.replace(setup.dataset.loader(setup.mesh), ahead=0)
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        next(loader)
        batches += 1
    alone = batches * tokens / (time.perf_counter() - began)
    steps, waits = _steps(setup, config)
    return {
        "alone": alone,
        "step": tokens / statistics.median(steps),
        "waiting": statistics.median(waits) / statistics.median(steps),
    }


def _steps(setup: Any, config: TrainConfig) -> tuple[list[float], list[float]]:
    """Seconds of steps, their batches included, and of waiting for these."""
    loader = setup.dataset.loader(setup.mesh)
    state = setup.step.init(setup.model, seed=config.run.seed)
    steps, waits = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        batch = next(loader)
        got = time.perf_counter()
        state, metrics = setup.step(state, *batch)
        metrics["loss"].item()
        steps.append(time.perf_counter() - began)
        waits.append(got - began)
    loader.close()
    return steps[1:], waits[1:]


def as_text(found: dict[str, float]) -> str:
    """The measure in words.

    >>> as_text({"alone": 3e7, "step": 2e4, "waiting": 0.0005})
    'loader 30,000,000 tokens/s, step 20,000 tokens/s: 1500 times; 0.05% of a step waits for its batch'
    """
    return (
        f"loader {found['alone']:,.0f} tokens/s, step {found['step']:,.0f} tokens/s: "
        f"{found['alone'] / found['step']:.0f} times; {found['waiting']:.2%} of a step waits for its batch"
    )


if __name__ == "__main__":
    answer(JOB.spec, run)
