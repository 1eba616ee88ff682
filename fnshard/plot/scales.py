"""Write bytes, seconds, numbers and ranks as short text."""

from __future__ import annotations

from collections.abc import Sequence

BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SECONDS = ((10.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))  # least seconds, factor, unit
RUNS = 3  # the most runs of ranks that are written out; of more, the middle is left out


def byte_unit(size: float) -> tuple[float, str]:
    """Return the factor from bytes to a unit, and the unit's name, for sizes up to `size`."""
    least, unit = next((row for row in BYTES if size >= row[0]), BYTES[-1])
    return 1 / least, unit


def byte_text(size: float) -> str:
    """Return a size as text, in a unit that leaves few digits.

    >>> byte_text(69_851_020_000), byte_text(512), byte_text(0)
    ('69.85 GB', '512 B', '0 B')
    """
    scale, unit = byte_unit(size)
    return f"{digits(size * scale)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to a unit, and the unit's name, for times up to `seconds`."""
    return next((factor, unit) for least, factor, unit in SECONDS if seconds >= least)


def time_text(seconds: float) -> str:
    """Return a time as text, in a unit that leaves few digits.

    >>> time_text(3.095), time_text(42), time_text(0.00002)
    ('3,095 ms', '42 s', '20 µs')
    """
    scale, unit = time_unit(seconds)
    return f"{digits(seconds * scale)} {unit}"


def digits(value: float) -> str:
    """Return a number as text with four significant digits, without an exponent.

    >>> digits(0.0321), digits(3.14159), digits(123456.7), digits(0)
    ('0.0321', '3.142', '123,457', '0')
    """
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}"


def rough(value: float) -> float:
    """Round to two significant digits, for numbers that are not known more exactly.

    >>> time_text(rough(59.3527)), digits(rough(12_345))
    ('59 s', '12,000')
    """
    return float(f"{value:.2g}")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text: consecutive ranks are joined, long lists are shortened.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([5]), ranks_text([0, 4])
    ('0-3', '5', '0, 4')
    >>> ranks_text(range(0, 1024, 8)), ranks_text([0, 1, 8, 9])
    ('0, 8 … 1016', '0-1, 8-9')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    if len(texts) > RUNS:
        return f"{texts[0]}, {texts[1]} … {texts[-1]}"
    return ", ".join(texts)
