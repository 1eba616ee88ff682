"""`python -m experiments.plan model=70b hardware=h100 devices=64`."""

from __future__ import annotations

from pathlib import Path

from experiments.lib.compose import answer
from experiments.plan.config import COMMAND, PlanConfig


def write(config: PlanConfig, folder: Path) -> None:
    """Print the best plan and why, and leave it in a folder with a picture of all that were looked at."""
    many = f"{config.devices:,} ×" if config.days is None else "the fewest"
    print(f"looking for the fastest plan on {many} {config.hardware.name}", flush=True)
    # Behind the first line, as it takes seconds.
    from experiments.plan.report import write_plan

    write_plan(config, folder)


if __name__ == "__main__":
    answer(COMMAND, write)
