"""Tables: short reports in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Put cells side by side. The first column is aligned to the left, and numbers to the right.

    >>> columns([("MB", "peak"), ("device", "1.0")])
    ['MB      peak', 'device   1.0']
    """
    count = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(count)]
    numbers = [i > 0 and any(_is_number(row[i]) for row in rows) for i in range(count)]
    return [
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in rows
    ]


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).replace(",", "").isdigit()


def megabytes(size: int) -> str:
    """Return a size in MB (1e6 bytes), as `1,234.567`."""
    return f"{size / 1e6:,.3f}"
