"""`python -m experiments.memory part=zero`, or `--multirun part=zero,recipe,sizes,targets` for all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.cli.main import answer
from experiments.data.files import write_json
from experiments.memory import recipe, sizes, targets, zero
from experiments.memory.config import SPEC, MemoryConfig

Part = tuple[Callable[[MemoryConfig, Path], dict[str, Any]], Callable[[Mapping[str, Any]], str]]
PARTS: dict[str, Part] = {
    "zero": (zero.run, zero.table),
    "recipe": (recipe.run, recipe.table),
    "sizes": (sizes.run, sizes.table),
    "targets": (targets.run, targets.table),
}


def start(config: MemoryConfig, folder: Path) -> dict[str, Any]:
    """One part; its JSON, its table as Markdown and its pictures go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    run, table = PARTS[config.part]
    found = {"config": dataclasses.asdict(config), **run(config, folder)}
    write_json(folder / f"{config.part}.json", found)
    text = table(found)
    (folder / f"{config.part}.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nresults: {folder}", flush=True)
    return found


if __name__ == "__main__":
    answer(SPEC, start)
