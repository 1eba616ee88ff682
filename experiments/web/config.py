"""The configuration of `experiments.web`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from experiments.lib.checks import configuration
from experiments.lib.compose import Command


@configuration
class WebConfig:
    """The whole configuration of the page.

    `folder`: where its commands run, as in a shell; the runs that it shows lie below its `outputs` and
    `multirun`. `port`: of 127.0.0.1; 0: any that is free. `refresh_s`: between two looks at the runs.
    `patience_s`: how long a prediction may take, a search of `strategy=auto` too.
    """

    folder: str = "."
    port: Annotated[int, Field(ge=0, lt=65_536)] = 8421
    refresh_s: PositiveFloat = 1.0
    patience_s: PositiveFloat = 300.0


COMMAND = Command(
    "web",
    WebConfig,
    "A page on this machine alone, to start runs from and to watch them: what a configuration takes before "
    "it runs, the command line that starts it, curves while it trains, runs side by side.",
    {
        "python -m experiments.web": "commands run in this folder",
        "python -m experiments.web folder=FOLDER port=0": "another folder, and any free port",
    },
)
