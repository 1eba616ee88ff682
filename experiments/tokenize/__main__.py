"""`python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'`."""

from experiments.lib.compose import answer
from experiments.tokenize.config import COMMAND
from experiments.tokenize.job import tokenize


def main() -> None:
    answer(COMMAND, lambda config, _: tokenize(config))


if __name__ == "__main__":
    main()
