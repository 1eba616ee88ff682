"""Application: a task as Hydra runs it, whose exceptions come out as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from experiments.cli.command_spec import Form


class _Carried(BaseException):
    """A task's exception on its way through Hydra, which would tell of it in its own way."""

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


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
