"""`python -m experiments.chaos kills=200`: kill runs at random moments, and see whether anything is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.chaos.campaign import Campaign
from experiments.chaos.config import SPEC, ChaosConfig, build
from experiments.chaos.job import ChaosError
from experiments.chaos.report import failed, table
from experiments.cli.main import answer


def main() -> None:
    """Run the command line; a mistake is one message and exit code 2, a run that failed unasked 1."""
    answer(SPEC, _command_line, ChaosError)


def _command_line(composed: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    if failed(start(build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)), folder)):
        raise SystemExit(1)


def start(config: ChaosConfig, folder: Path) -> dict[str, Any]:
    """One campaign; its JSON and its table go to `folder`.

    Raises:
        ChaosError: a run hung, or failed unasked.
    """
    say = lambda line: print(f"... {line}", file=sys.stderr, flush=True)  # noqa: E731
    found = Campaign(config, folder, say).run()
    (folder / "chaos.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table(found)
    (folder / "chaos.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nresults: {folder}", flush=True)
    return found


if __name__ == "__main__":
    main()
