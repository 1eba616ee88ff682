"""One rank of a job: `python -m experiments.cli.worker MODULE job.json`, which the launcher starts."""

from __future__ import annotations

import dataclasses
import errno
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # imports free nothing: to look for what they might have freed takes a tenth of the start

import torch.distributed as dist
from hydra.errors import HydraException

from experiments.cli.command_spec import is_mistake
from experiments.cli.schema import build
from experiments.configs.machine import process_began
from experiments.configs.train import ConfigError
from experiments.data.files import DamagedError, read_json, write_json
from experiments.training.result import RESULT
from experiments.training.resume import RunFolder, claimed
from experiments.training.watchdog import DivergedError
from fnshard.errors import (
    BudgetError,
    CheckpointError,
    LaunchError,
    OptimizerError,
    SpecError,
    TraceError,
    report,
)
from fnshard.launcher.rank import LOGS, Stop, run_rank
from fnshard.mesh.process_group import leave_group

if TYPE_CHECKING:
    from experiments.cli.command_spec import Job

# What depends on inputs that are equal on all ranks.
ALIKE = (SpecError, TraceError, OptimizerError, HydraException)
REFUSAL = "refused.json"  # why the ranks ended together; the process that started them reads it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # of a disk, not of the program


def run_job(job: Job, values: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, do the job's work, leave.

    Args:
        values: `config` (nested dicts of a placed configuration), `overrides`; and `run` (of a `Run`), or
            what finds it: `requested` (the configuration before it was placed), `fresh`, `chosen`; and
            perhaps `began` and `makes` of the command that started these ranks.
    """
    placed = build(values["config"], job.spec.config)
    stop = Stop()

    def main() -> None:
        try:
            with _run_of(job, values) as run:
                if int(os.environ.get("RANK", "0")) == 0 and LOGS in os.environ:
                    for name in (REFUSAL, RESULT):  # an earlier attempt's
                        _refusal().with_name(name).unlink(missing_ok=True)
                config = placed if "run" in values else _prepared(job, placed)
                resolve_name(job.work)(config, run, list(values["overrides"]), stop)
        except BudgetError as error:
            _end_together(f"run.device_gb={placed.run.device_gb:g}: {error}", mistake=True)
        except DamagedError as error:  # perhaps here alone, as below
            sys.exit(f"error: {error}")
        except (CheckpointError, ConfigError, DivergedError, *ALIKE) as error:
            _end_together(str(error), mistake=is_mistake(error))
        except OSError as error:  # here alone: the others end when this rank does
            if error.errno not in FULL:
                raise
            sys.exit(no_room(error))

    run_rank(main, device_type=placed.run.device, timeout_s=placed.run.timeout_s, stop=stop)


def _prepared(job: Job, config: Any) -> Any:
    """What `job.prepare` makes of the configuration, where no process of ours stands above the ranks: the
    first of each machine prepares, the others find it done.
    """
    problem = ""
    for local in (True, False):
        if local == (os.environ.get("LOCAL_RANK", "0") == "0"):
            try:
                config = job.prepare(config)
            except ConfigError as error:
                problem = str(error)
        problems = [problem]
        if dist.is_initialized():
            problems = [""] * dist.get_world_size()
            dist.all_gather_object(problems, problem)
        if any(problems):
            raise ConfigError(next(filter(None, problems)))
    return config


@contextmanager
def _run_of(job: Job, values: Mapping[str, Any]) -> Iterator[RunFolder]:
    """The run of this rank: of its values, or (under `torchrun`, on many nodes) as rank 0 finds it."""
    if "run" in values:
        yield RunFolder(**values["run"])
        return
    answer: list[Any] = [None, ""]
    command = {"began": values.get("began", process_began()), "makes": values.get("makes", "")}
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                found = claimed(
                    build(values["requested"], job.spec.config),
                    Path(values["fresh"]),
                    chosen=values["chosen"],
                )
                answer[0] = dataclasses.asdict(stack.enter_context(found)) | command
            except ConfigError as error:
                answer[1] = str(error)
        if dist.is_initialized():
            dist.broadcast_object_list(answer, src=0)
        if answer[0] is None:
            _end_together(answer[1], mistake=True)
        yield RunFolder(**answer[0])


def no_room(error: OSError) -> str:
    """An error of a disk in words: path, and the way out.

    >>> print(no_room(OSError(28, "No space left on device", "run/metrics.jsonl")))
    cannot write run/metrics.jsonl: No space left on device.
    Fix: make room, or another hydra.run.dir; the same command goes on from the newest checkpoint.
    """
    fix = "make room, or another hydra.run.dir; the same command goes on from the newest checkpoint."
    return report(f"cannot write {error.filename or 'a file'}: {error.strerror}.", fix=fix)


def refused(folder: Path) -> Exception | None:
    """Why the ranks of a run's folder ended together, if they did: a mistake, or a failure."""
    reason = read_json(folder / REFUSAL)
    kind = ConfigError if reason.get("mistake") else LaunchError
    return kind(reason["message"]) if reason else None


def _end_together(message: str, *, mistake: bool) -> NoReturn:
    """End all ranks with exit code 1; the reason goes to a file for the process that started them, or to
    stderr where none of ours did."""
    code: int | str = 1
    if int(os.environ.get("RANK", "0")) == 0:
        if LOGS in os.environ:
            try:
                write_json(_refusal(), {"message": message, "mistake": mistake})
            except OSError:  # on a full disk
                code = message
        else:
            print(f"error: {message}", file=sys.stderr, flush=True)
    leave_group()  # no rank ends before it has the reason
    sys.exit(code)


def _refusal() -> Path:
    return Path(os.environ[LOGS]).parent / REFUSAL


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  (the first operator of any step brings it: here no other rank waits)

    gc.freeze()
    gc.enable()
    named, file = sys.argv[1:]
    run_job(importlib.import_module(named).JOB, json.loads(Path(file).read_text(encoding="utf-8")))
