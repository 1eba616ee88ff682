"""Tables of what was measured, and the statistics that stand in them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of columns, the first `left` of them aligned to the left, the others to the right.

    >>> aligned([["a", "b"], ["xyz", "12"]])
    ['a     b', 'xyz  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return ["  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)) for row in rows]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25%, 50%, 75%; of one value itself."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the quotient of two times of one round, so that slow drift cancels.

    >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
