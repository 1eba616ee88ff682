"""Asserting an error by its type, the names it gives and the way out, not by its sentences."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import pytest

Kind = type[BaseException] | tuple[type[BaseException], ...]
Words = str | Iterable[str]

# A way out is the rest of the line behind "Fix: ", and the lines below it that are indented like its text.
WAY_OUT = re.compile(r"Fix: (.*(?:\n {5}.*)*)")


def raises(kind: Kind, *, leaves: Words = (), fix: Words = (), says: Words = ()) -> Expected:
    """Return a context that asserts that its block raises an error of this kind, with these words.

    Args:
        leaves: what the user wrote and is wrong, where the message is no way out: paths of leaves, keys
            of configurations, arguments, files, lines.
        fix: what the user can do, in a way out: an argument, a command, a function.
        says: facts anywhere in the message that are neither: counts, shapes, ranks, what was expected.

    A word of a message that goes on in letters or digits is another word: "rank 1" is not in "rank 12". A
    line of the user's program that the message quotes is left out: in a test it may hold these very words.

    >>> with raises(ValueError, leaves="w", fix="sorted", says="2 leaves") as caught:
    ...     raise ValueError("w: 2 leaves are not in order. Fix: sorted(leaves).")
    >>> str(caught.value)[:1]
    'w'
    """
    several = {
        name: [w] if isinstance(w, str) else [*w] for name, w in zip(PARTS, (leaves, fix, says), strict=True)
    }
    assert all(all(words) for words in several.values()), "an empty word, which every message has"
    return Expected(pytest.raises(kind), several)


PARTS = {  # where the words of each argument have to stand
    "leaves": lambda message: WAY_OUT.sub("", message),
    "fix": lambda message: "\n".join(WAY_OUT.findall(message)),
    "says": lambda message: message,
}


@dataclass
class Expected:
    """An error that a block has to raise; no generator, whose frame would keep the error and its tensors."""

    error: AbstractContextManager[pytest.ExceptionInfo[BaseException]]
    words: dict[str, list[str]]

    def __enter__(self) -> pytest.ExceptionInfo[BaseException]:
        return self.error.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        __tracebackhide__ = True
        is_expected = self.error.__exit__(kind, error, trace)
        if is_expected:
            message, lacking = str(error), []
            for name, part in PARTS.items():
                text = part(drop_quoted_lines(message))
                lack = [word for word in self.words[name] if not re.search(as_whole(word), text)]
                lacking += [f"{name}={lack}"] * bool(lack)
            if lacking:
                pytest.fail(f"a {type(error).__name__} lacks {', '.join(lacking)}. It is:\n{message}")
        return is_expected


def drop_quoted_lines(message: str) -> str:
    """Return a message with the places of lines of a program, "file.py:12", but not the lines themselves."""
    for place, file, number in re.findall(r"((\S+\.py):(\d+)  )", message):
        message = message.replace(place + linecache.getline(file, int(number)).strip(), place)
    return message


def as_whole(word: str) -> str:
    """Return the pattern of a word that no letter or digit goes on with, on either side.

    >>> as_whole("w['a']"), as_whole("3")
    ("(?<!\\\\w)w\\\\['a'\\\\]", '(?<!\\\\w)3(?!\\\\w)')
    """
    before, after = r"(?<!\w)" * bool(re.match(r"\w", word)), r"(?!\w)" * bool(re.search(r"\w$", word))
    return before + re.escape(word) + after
