"""Command: how the jobs here answer a command line. A mistake in it is one message and exit code 2, before
anything is made or started; what goes wrong later is exit code 1, and a bug has its traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.asked import Asked, ask
from experiments.config import ConfigError
from experiments.form import Form, Job
from experiments.launchers import check_plugins
from experiments.typed import flags_of

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes
# A folder that cannot be written, a full disk: of the machine, not of the program.
NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
           errno.EEXIST, errno.ENOENT)  # fmt: skip
SAID = (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError)


class _Carried(BaseException):
    """A task's exception on its way through Hydra, which would tell of it in its own way."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


def main(job: Job) -> None:
    """Run a job's command line."""
    concluded(lambda: _run(job))


def _run(job: Job) -> None:
    check_plugins(sys.argv[1:])
    asked = asked_for(job.form)
    from experiments.job import run  # and with it torch, which a mistake does not wait for

    run(job, asked)


def answer(form: Form, task: Callable[[DictConfig], None], *also: type[Exception]) -> None:
    """Run the command line of a job that is no `Job`.

    Args:
        task: it; is told the composed configuration.
        also: what is told in one line beside mistakes; all else is a bug, with its traceback.
    """

    def run() -> None:
        asked_for(form)
        application(form, task)()

    concluded(run, *also)


def asked_for(form: Form) -> Asked:
    """What the arguments ask for; `--help` is answered here.

    Raises:
        ConfigError: what is wrong with them.
    """
    arguments = sys.argv[1:]
    if flags_of(arguments).help:
        from experiments.help import help_of

        print(help_of(form))
        sys.exit(0)
    return ask(form, arguments)


def application(form: Form, task: Callable[[DictConfig], Any]) -> Callable[[], None]:
    """`task` as Hydra runs it, once or for each run of a sweep; its exceptions come out as they are."""

    def carrying(composed: DictConfig) -> Any:
        try:
            return task(composed)  # a sweeper may look at what it gives
        except Exception as error:
            raise _Carried(error) from None

    run = hydra.main(version_base="1.3", config_path=str(form.conf), config_name=form.name)(carrying)

    def application() -> None:
        form.register()
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions of Hydra's own are handed on, too
        try:
            run()
        except _Carried as carried:
            raise carried.error from None
        finally:
            os.environ.pop("HYDRA_FULL_ERROR")
            if before is not None:
                os.environ["HYDRA_FULL_ERROR"] = before

    return application


def concluded(run: Callable[[], None], *also: type[Exception]) -> None:
    """Run, and end the process as the outcome wants it.

    Args:
        also: see `answer`.
    """
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = MISTAKE if is_mistake(error) else FAILURE
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not (
            code == MISTAKE or is_outside(error) or isinstance(error, also)
        ):
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(message(error), file=sys.stderr, flush=True)
        sys.exit(code)


def is_mistake(error: Exception) -> bool:
    """Whether what was asked for is wrong."""
    if isinstance(error, SAID):
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-1:]  # `run=null` and the like
    if any(f"{os.sep}{package}{os.sep}" in frame.filename for frame in innermost for package in
           ("hydra", "omegaconf")):  # fmt: skip
        return True
    from fnshard.errors import BudgetError, MissingExtraError, OptimizerError, SpecError, TraceError

    return isinstance(error, BudgetError | MissingExtraError | OptimizerError | SpecError | TraceError)


def is_outside(error: Exception) -> bool:
    """Whether something else than the program failed: a rank, a disk, an agreement."""
    from fnshard.errors import FnshardError

    return isinstance(error, FnshardError) or (isinstance(error, OSError) and error.errno in NO_ROOM)


def message(error: Exception) -> str:
    """A mistake as it is told."""
    cause = error.__cause__
    more = f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    return f"error: {error}{more}"
