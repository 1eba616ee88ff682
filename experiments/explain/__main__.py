"""`python -m experiments.explain model=70b strategy=full_shard mesh.shard=1024 hardware=h100`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.cli.main import answer
from experiments.data.files import write_json
from experiments.explain import words
from experiments.explain.config import SPEC, ExplainConfig
from experiments.explain.page import page
from experiments.explain.paper import explain


def write(config: ExplainConfig, folder: Path, name: str = "") -> None:
    """Print what is known of a configuration, and leave `report.html` and `explain.json` in a folder.

    Args:
        name: of the configuration, in a few words; "": the choices of model and strategy.
    """
    if not name:
        choices = HydraConfig.get().runtime.choices
        name = f"{choices['model']} {choices['strategy']}"
    paper = explain(config)
    print(words.as_text(paper), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "explain.json", words.numbers(paper))
    report = folder / "report.html"
    report.write_text(page(paper, name, OmegaConf.to_yaml(asdict(config))), encoding="utf-8")
    print(f"\nreport: {report}", flush=True)


if __name__ == "__main__":
    answer(SPEC, write)
