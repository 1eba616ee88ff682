"""Matrices of tests: which of their rows the suite runs. The others are `long`.

A matrix that crosses everything with everything finds what a few of its rows find. The marker `suite` names
these rows by their ids, in which `*` is any text, and says of each which mechanism it is that no other has:

    @pytest.mark.suite({"tensor-*": "a table that is split by words", "context-none": "by positions"})
    @pytest.mark.parametrize("remat", ["none", "unit"])
    @pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
    def test_tokens_outside_of_the_table_are_refused(axis, remat): ...

Where few rows are dear, `but` names those that are left out, and which test finds the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

MARKER = "suite(rows, but): the rows of a matrix that the suite runs, or all but some; the others are long"


def mark_other_rows_long(items: Iterable[pytest.Item], is_whole: bool) -> None:
    """Mark the rows that `suite` markers leave out.

    Args:
        is_whole: whether all rows of each function were collected.

    Raises:
        UsageError: a marker names a row that is not there.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for name, rows in functions.items():
        for marker in rows[0].iter_markers("suite"):
            unknown = _mark_rows(rows, *marker.args, **marker.kwargs)
            if unknown and is_whole:
                raise pytest.UsageError(f"{name}: no row is {', '.join(unknown)}")


def _mark_rows(
    items: Iterable[pytest.Item], rows: Mapping[str, str] | None = None, but: Mapping[str, str] | None = None
) -> list[str]:
    """Return the names that no row has."""
    patterns = {text: re.compile(".*".join(map(re.escape, text.split("*")))) for text in rows or but or {}}
    found = set[str]()
    for item in items:
        names = [text for text, pattern in patterns.items() if pattern.fullmatch(item.callspec.id)]
        found.update(names)
        if bool(names) == (rows is None):
            item.add_marker(pytest.mark.long)
    return sorted(patterns.keys() - found)
