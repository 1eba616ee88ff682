"""The configuration of `experiments.web`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from experiments.lib.checks import configuration
from experiments.lib.compose import Command


@configuration
class WebConfig:
    """The whole configuration of the page.

    Commands run in `folder`, as in a shell, and the page shows the runs below its `outputs` and `multirun`.
    It listens on `port` of 127.0.0.1; 0 takes one that is free. It looks at the runs every `refresh_s`
    seconds. A prediction, a search of `strategy=auto` too, may take `patience_s` seconds.
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
