"""How the commands here answer a command line. A mistake in it is one message and exit code 2, before
anything is made or started; what goes wrong later is exit code 1, and a bug has its traceback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from experiments.cli.command_spec import CommandSpec, Job, is_mistake, is_outside, run_by_hydra, text_of
from experiments.cli.validation import help_of, validate, with_own_groups, with_own_keys

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def main(job: Job) -> None:
    """Run the command line of a job of ranks."""

    def run() -> None:
        config = validated_arguments(job.spec)
        from experiments.cli.job import run  # and with it torch, which a mistake does not wait for

        run(job, config)

    exiting(run)


def answer(spec: CommandSpec, task: Callable[[Any, Path], Any], *also: type[Exception]) -> None:
    """Run the command line of a command that starts no ranks by itself.

    Args:
        task: what it does with its configuration and the folder for its results.
        also: exceptions that are one line besides mistakes; all else is a bug, with its traceback.
    """

    def run() -> None:
        validated_arguments(spec)
        logging.getLogger("fnshard").setLevel(logging.WARNING)  # else Hydra shows how far a lowering is
        run_by_hydra(
            spec,
            lambda composed: task(
                spec.read_composed(composed), Path(HydraConfig.get().runtime.output_dir).resolve()
            ),
        )

    exiting(run, *also)


def validated_arguments(spec: CommandSpec) -> Any:
    """The configuration that `sys.argv` means, see `validate`; `--help` is answered here.

    Raises:
        ConfigError: what is wrong with it.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_of(spec))
        sys.exit(0)
    sys.argv[1:] = with_own_groups(sys.argv[1:])  # Hydra reads them, too
    config = validate(spec, sys.argv[1:])
    sys.argv[1:] = with_own_keys(spec, sys.argv[1:])
    return config


def exiting(run: Callable[[], None], *also: type[Exception]) -> None:
    """Run, and end the process with the exit code of the outcome; `also` as of `answer`."""
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = MISTAKE if is_mistake(error) else FAILURE
        expected = code == MISTAKE or is_outside(error) or isinstance(error, also)
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not expected:
            raise
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {text_of(error)}", file=sys.stderr, flush=True)
        sys.exit(code)
