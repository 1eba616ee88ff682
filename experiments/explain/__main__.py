"""`python -m experiments.explain`: predict a step, or tell where the time of a run went.

python -m experiments.explain model=70b strategy=full_shard mesh.shard=1024 hardware=h100
python -m experiments.explain run=outputs/2030-01-31/12-00-00
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.explain import report
from experiments.explain.config import COMMAND, ExplainConfig
from experiments.explain.step_on_paper import explain
from experiments.explain.time_report import report_time
from experiments.lib.checks import ConfigError
from experiments.lib.compose import answer, exit_with
from experiments.lib.files import write_text
from fnshard import plot


def write_explanation(config: ExplainConfig, folder: Path) -> None:
    """Print the report on a configuration, and write it to a folder with the schedule and pictures."""
    paper = explain(config)
    text = report.as_text(paper)
    print(text, flush=True)
    write_text(folder / "explain.txt", text + "\n")
    write_text(folder / "schedule.txt", paper.lowered.as_text() + "\n")
    plot.memory(paper.memory_timeline, folder / "memory.svg", limit=paper.device_bytes)
    plot.timeline(paper.timeline, folder / "timeline.png")
    if paper.timeline.stages:
        plot.stages(paper.timeline, folder / "stages.png")
    if paper.found is not None:
        write_text(folder / "search.txt", f"{paper.found}\n")
    print(f"\nresults: {folder}", flush=True)


def write_time_report(arguments: list[str]) -> None:
    """Print where a run's time went, and write it to the run's folder."""
    if len(arguments) > 1:
        raise ConfigError(f"{' '.join(arguments)}: run=DIR stands alone, a run has its configuration.")
    folder = Path(arguments[0].removeprefix("run="))
    text = report_time(folder)
    print(text, flush=True)
    write_text(folder / "time.txt", text + "\n")


def main(arguments: list[str]) -> None:
    """Explain a run (`run=DIR`) or a configuration."""
    if any(each.startswith("run=") for each in arguments):
        exit_with(lambda: write_time_report(arguments))
    else:
        answer(COMMAND, write_explanation)


if __name__ == "__main__":
    main(sys.argv[1:])
