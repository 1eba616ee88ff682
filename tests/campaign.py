"""Fuzz by hand: `python tests/campaign.py 5000 --seed 1`; what fails is shrunk and printed as a test.

Needs PYTHONPATH=.:tests:tests/support. One rank by default, `--layouts` any layout of simulated ranks,
`--ranks` two processes; `--units 50` lets a loop have so many units; `--families "in place" views leaves`
draws from these rows of the grammar alone. Beside failures it counts which rows of the grammar, and operators
of ATen, ran.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import grammar
import torch
from cases import AXES, Case, cases, check, expected, on_rank, simulated
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import programs
from ranks import pool
from shrink import failure, shrink
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Remembers which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def campaign(
    examples: int, number: int, strategy: Any, runner: Callable[[Case], Any], spent: float = float("inf")
) -> dict[str, list[Case]]:
    """Draw and check so many cases, at most for some seconds; prints a summary; failures by their kind."""
    failures: dict[str, list[Case]] = {}
    results: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    operators, texts, began = Operators(), set(), time.monotonic()

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def run(case: Case) -> None:
        if time.monotonic() - began > spent:
            return
        found = failure(case, lambda c: check(c, runner))
        if "transforms" not in kinds(case):  # torch ends in a segmentation fault under both
            with operators:
                expected(case)
        rows.update(case.program.rows)
        texts.add(case.text)
        results[found.split(":")[0] or "right"] += 1
        if found.startswith("!"):
            failures.setdefault(found, []).append(case)
            print(f"{found}\n{case.text}", flush=True)
        if sum(results.values()) % 50 == 0:
            print(f"{dict(results)} in {time.monotonic() - began:.0f} s", flush=True)

    run()
    everything = {name for family in grammar.FAMILIES.values() for name in family}
    print(f"{dict(results)}, {len(texts)} of them distinct, in {time.monotonic() - began:.0f} s")
    print(f"{len(rows)} rows of {len(everything)}, {len(operators.seen)} operators")
    print(f"rows that never ran: {' '.join(sorted(everything - set(rows)))}")
    return failures


def kinds(case: Case) -> set[str]:
    """The families that a case's rows are of."""
    return {name for name, family in grammar.FAMILIES.items() if family.keys() & set(case.program.rows)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("examples", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--units", type=int, default=3)
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--families", nargs="+", choices=grammar.FAMILIES, default=list(grammar.FAMILIES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    two = tuple(a for a in AXES if a.get("replicate", 1) * a["shard"] == 2)
    strategy = programs(options.units, options.families).map(Case)
    if options.layouts or options.ranks:
        strategy = cases(options.units, two if options.ranks else AXES, options.families)
    with pool(2) as processes:
        runner = (lambda case: processes.run(on_rank, case)) if options.ranks else simulated
        found = campaign(options.examples, options.seed, strategy, runner, options.seconds)
        for kind, failed in found.items():
            small = shrink(
                min(failed, key=lambda c: len(c.text)), lambda c: failure(c, lambda d: check(d, runner))
            )
            print(f"\n{kind} ({len(failed)} times)\n{small.text}")


if __name__ == "__main__":
    main()
