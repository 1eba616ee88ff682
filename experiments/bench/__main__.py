"""`python -m experiments.bench case=NAME`: run one case and print its table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from experiments.bench import ranks
from experiments.bench.cases import CASES
from experiments.bench.config import BenchConfig
from experiments.bench.defaults import complete
from experiments.bench.measure import show


def start(config: BenchConfig, folder: Path) -> None:
    """Run the case, on ranks of its own where it takes some."""
    case = CASES[config.case]
    if case.on_ranks:
        ranks.start(config, folder)
    elif show(config, folder, case.run).failed:
        sys.exit(1)


def by_hand(arguments: list[str]) -> BenchConfig:
    """Read `key=value` where Hydra is not installed, as on a bare GPU machine.

    >>> by_hand(["case=gpu", "rows=2", "parts=[tiny,saves]"]).parts
    ('tiny', 'saves')
    """

    def value(text: str) -> object:
        try:
            return json.loads(text)
        except ValueError:
            return tuple(text[1:-1].split(",")) if text[:1] == "[" else text

    return complete(
        BenchConfig(**{key: value(text) for key, _, text in (a.partition("=") for a in arguments)})
    )


def main() -> None:
    if importlib.util.find_spec("hydra") is None:
        return start(by_hand(sys.argv[1:]), Path("outputs", "bench").resolve())
    from experiments.bench.command import SPEC, answer

    answer(SPEC, start)


if __name__ == "__main__":
    main()
