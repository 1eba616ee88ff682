"""`python -m experiments.plan model=70b hardware=h100 devices=64`: print the fastest plan."""

from __future__ import annotations

from pathlib import Path

from experiments.lib.checks import TARGET
from experiments.lib.compose import answer
from experiments.plan.config import COMMAND, PlanConfig


def write(config: PlanConfig, folder: Path) -> None:
    """Print the best plan and why it is the best, and write it to a folder with a picture of all plans."""
    is_own = isinstance(config.model, dict)
    model = config.model[TARGET] if is_own else f"a model of {config.model.parameters:,} parameters"
    rows = f"{config.batch_rows:,} rows"
    if config.unit == "token":
        rows += f" of {config.row_tokens:,} tokens"
    many = f"{config.devices:,} ×" if config.days is None else "the fewest"
    print(
        f"looking for the fastest plan of {model}, {rows} in a step, on {many} {config.hardware.name} "
        "(model=, rows=, devices= and hardware= choose others)",
        flush=True,
    )
    # This import takes seconds, so it follows the first line.
    from experiments.plan.report import write_plan

    write_plan(config, folder)


if __name__ == "__main__":
    answer(COMMAND, write)
