"""`python -m experiments.web folder=FOLDER`: print the address of a page, and serve it until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from experiments.lib.compose import answer
from experiments.web.config import COMMAND, WebConfig


def main(config: WebConfig, _: Path) -> None:
    """Serve the page."""
    # The process that predicts imports this module as well, and needs no web server.
    from experiments.web.server import serve

    serve(config)


if __name__ == "__main__":
    answer(COMMAND, main)
