"""Pairs: few combinations of many choices, so that every two choices of two factors meet in one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def cover_pairs(
    factors: Mapping[str, Sequence[Any]], allows: Callable[[Row], bool] = lambda row: True, tries: int = 20
) -> list[Row]:
    """Return rows, one choice of each factor in each, in which every pair of choices occurs that may.

    Greedily: each row begins with a pair that has not occurred, and is the one of some random completions in
    which most new pairs occur.

    Args:
        allows: whether a row, or the part of one, may be.
        tries: completions to choose from.

    >>> rows = cover_pairs({"a": [1, 2], "b": [1, 2], "c": [1, 2]})
    >>> len(rows) < 8, {(row["a"], row["c"]) for row in rows} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    (True, True)
    """
    draw, names = random.Random(0), list(factors)
    open_pairs = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i, x in enumerate(factors[a])
        for j, y in enumerate(factors[b])
        if allows({a: x, b: y})
    }
    rows = []
    while open_pairs:
        best: tuple[int, dict[str, int]] | None = None
        for _ in range(tries):
            chosen = dict(next(iter(open_pairs)))
            for name in draw.sample(names, len(names)):
                if name in chosen:
                    continue
                choices = [
                    i for i in draw.sample(range(len(factors[name])), len(factors[name]))
                    if allows({n: factors[n][k] for n, k in {**chosen, name: i}.items()})
                ]  # fmt: skip
                if not choices:
                    break
                new = [sum(pair_of(names, (n, k), (name, i)) in open_pairs for n, k in chosen.items())
                       for i in choices]  # fmt: skip
                chosen[name] = choices[new.index(max(new))]
            else:
                count = sum(pair in open_pairs for pair in pairs_of(names, chosen))
                if best is None or count > best[0]:
                    best = count, chosen
        if best is None:  # none of the completions that were tried has it
            del open_pairs[next(iter(open_pairs))]
            continue
        for pair in pairs_of(names, best[1]):
            open_pairs.pop(pair, None)
        rows.append({name: factors[name][best[1][name]] for name in names})
    return rows


Choice = tuple[str, int]


def pair_of(names: Sequence[str], one: Choice, other: Choice) -> tuple[Choice, Choice]:
    """Return a pair of choices in the order of their factors."""
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)


def pairs_of(names: Sequence[str], chosen: Mapping[str, int]) -> list[tuple[Choice, Choice]]:
    """Return all pairs of a row."""
    return [((a, chosen[a]), (b, chosen[b])) for a, b in combinations(names, 2)]
