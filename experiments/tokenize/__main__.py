"""`python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'`."""

from experiments.cli.main import answer
from experiments.tokenize.config import SPEC
from experiments.tokenize.job import tokenize


def main() -> None:
    answer(SPEC, lambda config, _: tokenize(config))


if __name__ == "__main__":
    main()
