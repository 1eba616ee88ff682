"""One rank of the main job: `python -m experiments.worker job.json`, started by `fnshard.launch`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from experiments.config import build
from fnshard.errors import BudgetError
from fnshard.launch import LOGS, leave_group, run_rank

REFUSAL = "refused.txt"  # why no rank began to train; the process that started them reads it


def run_job(job: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, train, leave.

    Args:
        job: `config` (nested dicts of a placed `TrainConfig`), `folder`, `overrides`.
    """
    config = build(job["config"])

    def main() -> None:
        from experiments.loop import train

        folder = _agree(Path(job["folder"]))
        try:
            train(config, folder, list(job["overrides"]))
        except BudgetError as error:  # on all ranks: they agreed on it
            if int(os.environ.get("RANK", "0")) == 0:
                _tell(f"strategy=auto run.device_gb={config.run.device_gb:g}: {error}", folder)
            leave_group()  # nobody ends before it has been told
            sys.exit(1)

    run_rank(main, device_type=config.run.device, timeout_s=config.run.timeout_s)


def _tell(refusal: str, folder: Path) -> None:
    """Leave it to who started this rank, or say it here where nobody of ours did."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REFUSAL).write_text(refusal, encoding="utf-8")
    if LOGS not in os.environ:
        print(f"error: {refusal}", file=sys.stderr, flush=True)


def _agree(folder: Path) -> Path:
    """Rank 0's folder: under `torchrun` each rank named one by its own clock."""
    if not dist.is_initialized():
        return folder
    named = [str(folder)]
    dist.broadcast_object_list(named, src=0)
    return Path(named[0])


if __name__ == "__main__":
    run_job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
