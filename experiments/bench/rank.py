"""One rank of the bench: `python -m experiments.bench.rank job.json`, started by `experiments.bench`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.bench import measure, report
from experiments.bench.config import BenchConfig
from experiments.cli import schema
from experiments.ranks import job_values
from fnshard.launcher.local import run_rank
from fnshard.mesh.process_group import make_group


def bench(config: BenchConfig, folder: Path) -> None:
    """Measure; rank 0 writes to `folder` and prints the table, every rank its own rounds as they end."""
    if not dist.is_initialized():  # a world of one has no group by itself, DDP and FSDP2 want one
        make_group(config.device, dist.HashStore(), 0, 1, timedelta(seconds=config.timeout_s))
    first = dist.get_rank() == 0
    say = (lambda line: print(f"... {line}", file=sys.stderr, flush=True)) if first else lambda line: None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rounds-{dist.get_rank()}.jsonl").open("w", encoding="utf-8") as rounds:
        measured = measure.run(config, say, lambda line: print(json.dumps(line), file=rounds, flush=True))
    if first:
        result = report.summarise(config, measured)
        path = report.write(result, folder)
        print(f"\n{report.table(result)}\n\nresults: {path}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    values = job_values()
    config = schema.build(values["config"], BenchConfig)
    run_rank(
        lambda: bench(config, Path(values["folder"])), device_type=config.device, timeout_s=config.timeout_s
    )
