"""One rank of the main job: `python -m experiments.worker job.json`, started by `fnshard.launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from experiments.config import ConfigError, build
from experiments.resume import Run, taken
from fnshard.errors import BudgetError, CheckpointError
from fnshard.rank import LOGS, Stop, leave_group, run_rank

REFUSAL = "refused.txt"  # why the ranks ended together; the process that started them reads it


def run_job(job: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, train, leave.

    Args:
        job: `config` (nested dicts of a placed `TrainConfig`), `overrides`; and `run` (of a `Run`), or what
            finds it: `asked` (the configuration before it was placed), `fresh`, `chosen`.
    """
    config = build(job["config"])
    stop = Stop()

    def main() -> None:
        from experiments.loop import train

        with _run_of(job) as run:
            if int(os.environ.get("RANK", "0")) == 0:
                Path(run.folder, REFUSAL).unlink(missing_ok=True)  # an earlier attempt's
            try:
                train(config, run, list(job["overrides"]), stop)
            except BudgetError as error:
                _end_together(f"strategy=auto run.device_gb={config.run.device_gb:g}: {error}", run)
            except (CheckpointError, ConfigError) as error:
                _end_together(str(error), run)

    run_rank(main, device_type=config.run.device, timeout_s=config.run.timeout_s, stop=stop)


@contextmanager
def _run_of(job: Mapping[str, Any]) -> Iterator[Run]:
    """The run that this rank works on: as told, or (under `torchrun`) as rank 0 finds it."""
    if "run" in job:
        yield Run(**job["run"])
        return
    told: list[Any] = [None, ""]
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                found = taken(build(job["asked"]), Path(job["fresh"]), chosen=job["chosen"])
                told[0] = dataclasses.asdict(stack.enter_context(found))
            except ConfigError as error:
                told[1] = str(error)
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        if told[0] is None:
            _end_together(told[1], None)
        yield Run(**told[0])


def _end_together(refusal: str, run: Run | None) -> NoReturn:
    """All ranks know the reason, and end with exit code 1; it is left to who started this rank, or said here
    where nobody of ours did."""
    if int(os.environ.get("RANK", "0")) == 0:
        if run is not None:
            Path(run.folder).mkdir(parents=True, exist_ok=True)
            Path(run.folder, REFUSAL).write_text(refusal, encoding="utf-8")
        if LOGS not in os.environ:
            print(f"error: {refusal}", file=sys.stderr, flush=True)
    leave_group()  # nobody ends before it has been told
    sys.exit(1)


if __name__ == "__main__":
    run_job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
