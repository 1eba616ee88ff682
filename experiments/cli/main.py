"""Command: how the jobs here answer a command line. A mistake in it is one message and exit code 2, before
anything is made or started; what goes wrong later is exit code 1, and a bug has its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from omegaconf import DictConfig

from experiments.cli.application import application
from experiments.cli.command_spec import Form, Job
from experiments.cli.launchers import check_plugins
from experiments.cli.mistakes import is_mistake, is_outside, message
from experiments.cli.overrides import flags_of
from experiments.cli.validate import Asked, ask

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def main(job: Job) -> None:
    """Run a job's command line."""
    concluded(lambda: _run(job))


def _run(job: Job) -> None:
    check_plugins(sys.argv[1:])
    asked = asked_for(job.form)
    from experiments.cli.job import run  # and with it torch, which a mistake does not wait for

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
        from experiments.cli.help import help_of

        print(help_of(form))
        sys.exit(0)
    return ask(form, arguments)


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
