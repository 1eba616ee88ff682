"""The bench's command line, as Hydra composes it."""

from __future__ import annotations

from experiments.bench.config import BenchConfig, complete
from experiments.lib.compose import Command

COMMAND = Command(
    "bench",
    BenchConfig,
    "Measurements of fnshard, a case at a time.",
    {
        "python -m experiments.bench": "step time and bytes next to DDP, FSDP2 and others",
        "python -m experiments.bench size=5m rounds=5 losses=0": "a short look",
        "python -m experiments.bench case=gpu device=cuda until=540": "a ladder of measurements on a GPU",
    },
    complete=complete,
)
