"""Damages to the files of a folder, and what comes of them: the same data, one of our errors, or worse."""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from experiments.lib.checks import ConfigError
from fnshard.errors import FnshardError

FLIPS, CUTS = 200, 48
Damage = tuple[str, Callable[[Path], None]]  # what it is, and what does it to a copy of the folder


@dataclass(frozen=True)
class Subject:
    """A folder on the disk, and how it is read.

    Args:
        pristine: the folder; never changed.
        look: read a copy of it; gives all that a run would take from it, to be compared by `==`.
        name: of the copy, where that counts.
    """

    pristine: Path
    look: Callable[[Path], Any]
    name: str = "copy"


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def damages(folder: Path, flips: int = FLIPS, cuts: int = CUTS, seed: int = 0) -> Iterator[Damage]:
    """Draw bits and lengths, half by file and half by byte; then for each file: gone, with more at its end,
    noise; and pairs of files with each other's content."""
    rng = random.Random(seed)
    sizes = {name: (folder / name).stat().st_size for name in files_of(folder)}
    sizes = {name: size for name, size in sizes.items() if size}
    names = rng.choices(list(sizes), k=flips // 2)
    names += rng.choices(list(sizes), weights=list(sizes.values()), k=flips - flips // 2)
    for name in names:
        yield f"flip {name}", _flipped(name, rng.randrange(8 * sizes[name]))
    for number, name in enumerate(rng.choices(list(sizes), k=cuts)):
        to = rng.randrange(sizes[name]) if number % 4 else 0
        yield f"cut {name}", _written(name, lambda content, to=to: content[:to])
    for name, size in sizes.items():
        more, noise = rng.randbytes(37), rng.randbytes(size)
        yield f"gone {name}", lambda place, name=name: (place / name).unlink()
        yield f"longer {name}", _written(name, lambda content, more=more: content + more)
        yield f"noise {name}", _written(name, lambda _, noise=noise: noise)
    pairs = [(a, b) for a in sizes for b in sizes if a < b]
    for a, b in rng.sample(pairs, min(len(pairs), 12)):
        yield f"swap {a} {b}", lambda place, a=a, b=b: _swap(place / a, place / b)


def _flipped(name: str, bit: int) -> Callable[[Path], None]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return _written(name, flip)


def _written(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        (place / name).write_bytes(change((place / name).read_bytes()))

    return write


def _swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def campaign(subject: Subject, place: Path, found: Iterator[Damage]) -> tuple[Counter[str], list[str]]:
    """Look at a fresh copy after each damage.

    Returns:
        How many ended how: "same" (the data, nothing said), "said" (the data or others, and a message with a
        path), "error" (one of ours, with a path), "silent" (other data, nothing said), "raw" (another error).
        And a text for each of the last two.
    """
    copy = place / subject.name
    counts, wrong = Counter[str](), []

    def look() -> tuple[str, Any]:
        said = StringIO()
        with warnings.catch_warnings(record=True) as caught, redirect_stderr(said):
            warnings.simplefilter("always")
            got = subject.look(copy)
        texts = [said.getvalue(), *(str(w.message) for w in caught)]
        return "\n".join(text for text in texts if str(place) in text), got

    def fresh() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        shutil.copytree(subject.pristine, copy)

    fresh()
    said, expected = look()
    assert not said, said
    for what, damage in found:
        fresh()
        damage(copy)
        try:
            said, got = look()
            how = "said" if said else "same" if got == expected else "silent"
        except (ConfigError, FnshardError) as error:
            how = "error" if str(place) in str(error) else "raw"
            got = error
        except Exception as error:
            how, got = "raw", error
        counts[how] += 1
        if how in ("silent", "raw"):
            wrong.append(f"{what}: {how}: {type(got).__name__}: {str(got)[:300]}")
    return counts, wrong
