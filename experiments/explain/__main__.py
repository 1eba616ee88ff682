"""`python -m experiments.explain model=70b strategy=full_shard mesh.shard=1024 hardware=h100`."""

from __future__ import annotations

import json
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.cli.main import answer
from experiments.cli.schema import build
from experiments.explain import words
from experiments.explain.config import SPEC, ExplainConfig
from experiments.explain.page import page
from experiments.explain.paper import explain


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    answer(SPEC, _command_line)


def _command_line(composed: DictConfig) -> None:
    config = build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True), ExplainConfig)
    here = HydraConfig.get()
    chosen = here.runtime.choices
    write(config, f"{chosen['model']} {chosen['strategy']}", Path(here.runtime.output_dir), composed)


def write(config: ExplainConfig, name: str, folder: Path, composed: DictConfig) -> None:
    """Print what is known of a configuration, and leave `report.html` and `explain.json` in a folder.

    Args:
        name: of the configuration, in a few words.
        composed: what the page shows as the configuration.
    """
    paper = explain(config)
    print(words.told(paper), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "explain.json").write_text(json.dumps(words.numbers(paper), indent=1) + "\n", encoding="utf-8")
    report = folder / "report.html"
    report.write_text(page(paper, name, OmegaConf.to_yaml(composed)), encoding="utf-8")
    print(f"\nreport: {report}", flush=True)


if __name__ == "__main__":
    main()
