"""Asserting an error by its type, the names it gives and the way out, not by its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

# A way out is the rest of the line behind "Fix: ", and the lines below it that are indented like its text.
WAY_OUT = re.compile(r"Fix: (.*(?:\n {5}.*)*)")


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    *,
    leaves: str | Iterable[str] = (),
    fix: str | Iterable[str] = (),
    says: str | Iterable[str] = (),
) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the block raises an error of this kind whose message holds these words.

    Args:
        leaves: what the user wrote and is wrong, where the message is no way out: paths of leaves, keys
            of configurations, arguments, files, lines.
        fix: what the user can do, in a way out: an argument, a command, a function.
        says: facts anywhere in the message that are neither: counts, shapes, ranks, what was expected.

    A word of a message that goes on in letters or digits is another word: "rank 1" is not in "rank 12".

    >>> with raises(ValueError, leaves="w", fix="sorted", says="2 leaves") as caught:
    ...     raise ValueError("w: 2 leaves are not in order. Fix: sorted(leaves).")
    >>> str(caught.value)[:1]
    'w'
    """
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    parts = {
        "leaves": (leaves, WAY_OUT.sub("", message)),
        "fix": (fix, "\n".join(WAY_OUT.findall(message))),
        "says": (says, message),
    }
    lacking = [f"{name}={[*lack]}" for name, given in parts.items() if (lack := find_lacking(*given))]
    if lacking:
        pytest.fail(f"a {type(caught.value).__name__} lacks {', '.join(lacking)}. It is:\n{message}")


def find_lacking(words: str | Iterable[str], text: str) -> list[str]:
    """Return the words that do not stand in a text as whole words."""
    several = [words] if isinstance(words, str) else [*words]
    return [each for each in several if not re.search(as_whole(each), text)]


def as_whole(word: str) -> str:
    """Return the pattern of a word that no letter or digit goes on with, on either side.

    >>> as_whole("w['a']"), as_whole("3")
    ("(?<!\\\\w)w\\\\['a'\\\\]", '(?<!\\\\w)3(?!\\\\w)')
    """
    before, after = r"(?<!\w)" * bool(re.match(r"\w", word)), r"(?!\w)" * bool(re.search(r"\w$", word))
    return before + re.escape(word) + after
