"""`python -m experiments.chaos kills=200`: kill runs at random moments, and see whether anything is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.chaos.campaign import Campaign
from experiments.chaos.config import SPEC, ChaosConfig
from experiments.chaos.job import ChaosError
from experiments.chaos.report import failed, table
from experiments.cli.main import answer


def start(config: ChaosConfig, folder: Path) -> dict[str, Any]:
    """One campaign; its JSON and its table go to `folder`. A folder of an interrupted one goes on.

    Raises:
        ChaosError: a run hung, or failed unasked.
    """
    say = lambda line: print(f"... {line}", file=sys.stderr, flush=True)  # noqa: E731
    campaign = Campaign(config, folder, say)
    try:
        return campaign.run()
    finally:  # interrupted, it tells what it has found so far
        text = table(campaign.found)
        (folder / "chaos.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n\nresults: {folder}", flush=True)


def run(config: ChaosConfig, folder: Path) -> None:
    """`start`, with exit code 1 where something was lost."""
    if failed(start(config, folder)):
        raise SystemExit(1)


if __name__ == "__main__":
    answer(SPEC, run, ChaosError)
