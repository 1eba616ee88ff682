"""`python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'`."""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from experiments.command import answer
from experiments.tokenize.config import build, schema
from experiments.tokenize.job import tokenize

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the command line; a mistake is one message and exit code 1."""
    answer(_command_line, tokenize_schema=schema())


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="tokenize")
def _command_line(composed: DictConfig) -> None:
    tokenize(build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)))


if __name__ == "__main__":
    main()
