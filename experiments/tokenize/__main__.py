"""`python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'`."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from experiments.cli.main import answer
from experiments.tokenize.config import SPEC, build
from experiments.tokenize.job import tokenize


def main() -> None:
    """Run the command line; a mistake is one message and exit code 2."""
    answer(SPEC, _command_line)


def _command_line(composed: DictConfig) -> None:
    tokenize(build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)))


if __name__ == "__main__":
    main()
