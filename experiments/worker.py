"""One rank of the main job: `python -m experiments.worker job.json`, started by `fnshard.launch`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from experiments.config import build
from fnshard.launch import run_rank


def run_job(job: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, train, leave.

    Args:
        job: `config` (nested dicts of a placed `TrainConfig`), `folder`, `overrides`.
    """
    config = build(job["config"])

    def main() -> None:
        from experiments.loop import train

        train(config, _agree(Path(job["folder"])), list(job["overrides"]))

    run_rank(main, device_type=config.run.device, timeout_s=config.run.timeout_s)


def _agree(folder: Path) -> Path:
    """Rank 0's folder: under `torchrun` each rank named one by its own clock."""
    if not dist.is_initialized():
        return folder
    named = [str(folder)]
    dist.broadcast_object_list(named, src=0)
    return Path(named[0])


if __name__ == "__main__":
    run_job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
