"""`python -m experiments.explain model=70b strategy=full_shard mesh.shard=1024 hardware=h100`."""

from __future__ import annotations

from pathlib import Path

from experiments.cli.main import answer
from experiments.data.files import write_json, write_text
from experiments.explain import words
from experiments.explain.config import SPEC, ExplainConfig
from experiments.explain.paper import explain
from fnshard import plot


def write(config: ExplainConfig, folder: Path) -> None:
    """Print what is known of a configuration, and leave it in a folder with the schedule and two pictures."""
    paper = explain(config)
    text = words.as_text(paper)
    print(text, flush=True)
    write_text(folder / "explain.txt", text + "\n")
    write_text(folder / "schedule.txt", paper.lowered.as_text() + "\n")
    write_json(folder / "explain.json", words.numbers(paper))
    plot.memory(paper.over, folder / "memory.svg", limit=paper.device_bytes)
    plot.timeline(paper.timeline, folder / "timeline.png")
    if paper.found is not None:
        write_text(folder / "search.txt", f"{paper.found}\n")
    print(f"\nresults: {folder}", flush=True)


if __name__ == "__main__":
    answer(SPEC, write)
