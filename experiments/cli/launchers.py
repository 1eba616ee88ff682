"""Launchers: what starts the jobs of a sweep: this process, one by one, or a plugin of Hydra's.

A plugin that is not installed, or would not be used, is refused before anything starts. Hydra's SLURM
launcher gives up all jobs with the first one that left nothing, and has no hook for another way:
`every_job_awaited` is the one place where a library's method (submitit's `Job.results`) is replaced, while a
sweep lasts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.training.result import RESULT, read_result, write_result

LOCAL, SIDE_BY_SIDE = "basic", "joblib"  # Hydra's names
# Option: the plugin's package, and the extra of ours that installs it.
PLUGINS = {
    "launcher=joblib": ("hydra_joblib_launcher", "joblib"),
    "launcher=slurm": ("hydra_submitit_launcher", "slurm"),
    "launcher=slurm_local": ("hydra_submitit_launcher", "slurm"),
    "hydra/launcher=joblib": ("hydra_joblib_launcher", "joblib"),
    "hydra/launcher=submitit_slurm": ("hydra_submitit_launcher", "slurm"),
    "hydra/launcher=submitit_local": ("hydra_submitit_launcher", "slurm"),
    "hydra/sweeper=optuna": ("hydra_optuna_sweeper", "optuna"),
    "hydra/sweeper=search_lr": ("hydra_optuna_sweeper", "optuna"),
}


def check_plugins(arguments: Sequence[str], installed: Callable[[str], Any] = find_spec) -> None:
    """See that what the arguments name is installed."""
    missing = []
    for argument in arguments:
        package, extra = PLUGINS.get(argument, ("", ""))
        if package and not _there(package, installed):
            missing.append((f"{argument}: {package.replace('_', '-')}", extra))
    if missing:
        from fnshard.errors import MissingExtraError, report  # and torch with it

        extras = ",".join(dict.fromkeys(extra for _, extra in missing))
        raise MissingExtraError(
            report("not installed:", [named for named, _ in missing], f"pip install 'fnshard[{extras}]'.")
        )


def check_used(launcher: str) -> None:
    """See that a single run names no launcher."""
    if launcher != LOCAL:
        raise ConfigError(
            f"a launcher ({launcher}) starts the jobs of a sweep, and this is a single run. Fix: add "
            "--multirun, for one job, too; or leave the launcher out."
        )


def _there(package: str, installed: Callable[[str], Any]) -> bool:
    try:
        return installed(f"hydra_plugins.{package}") is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


@contextmanager
def every_job_awaited(arguments: Sequence[str]) -> Iterator[None]:
    """While it lasts, a submitit job that left nothing (killed, out of time) is one failure among many."""
    if not any(argument.startswith(("launcher=slurm", "hydra/launcher=submitit")) for argument in arguments):
        yield
        return
    from submitit.core.core import Job

    waits = Job.results
    Job.results = functools.wraps(waits)(lambda job: _results(job, waits))
    try:
        yield
    finally:
        Job.results = waits


def _results(job: Any, waits: Callable[[Any], list[Any]]) -> list[Any]:
    from hydra.core.utils import JobReturn, JobStatus
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return waits(job)
    except (FailedJobError, UncompletedJobError) as error:
        overrides, _, number, *_ = job.submission().args
        reason = _why(job, error)
        print(f"job {number} ({' '.join(overrides)}): {reason}", flush=True)
        _note_failure(job, number, list(overrides), reason, str(error))
        return [JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=None)]


def _why(job: Any, error: Exception) -> str:
    lines = [line.strip() for line in (job.stderr() or str(error)).splitlines() if line.strip()]
    return f"job {job.job_id} ended as {job.state} without a result: {(lines or ['nothing on stderr'])[-1]}"


def _note_failure(job: Any, number: int, overrides: list[str], reason: str, error: str) -> None:
    """Where the job itself could not: in its folder, `SWEEP/NUMBER`, next to `SWEEP/.submitit`."""
    folder = Path(job.paths.folder).parents[1] / str(number)
    if not (folder / RESULT).exists() or read_result(folder)["status"] == "ok":
        write_result(folder, status="failed", overrides=overrides, error=error, reason=reason)
