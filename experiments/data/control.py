"""Control tokens that a text spells, and tokenizers for text that stands behind other text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple


class Spelled(NamedTuple):
    """A control token in a text: where its own text begins, what it takes of the text, and its id."""

    at: int
    start: int
    stop: int
    token: int


@dataclass(frozen=True)
class Controls:
    """Control tokens by text.

    Args:
        ids: of each text.
        left, right: those that swallow the white space before them, and behind them.
    """

    ids: dict[str, int]
    left: frozenset[str] = frozenset()
    right: frozenset[str] = frozenset()

    def find(self, text: str, start: int, stop: int) -> Iterator[Spelled]:
        """The tokens that a stretch of a text spells, from left to right; the longest where several begin.

        >>> list(Controls({"<e>": 7}, right=frozenset({"<e>"})).find("<e>a<e> b", 3, 7))
        [Spelled(at=4, start=4, stop=8, token=7)]
        """
        for found in spelling(tuple(self.ids)).finditer(text, start, stop):
            begin, end = found.span()
            if found[0] in self.left:
                begin = len(text[:begin].rstrip())
            if found[0] in self.right:
                end = len(text) - len(text[end:].lstrip())
            yield Spelled(found.start(), begin, end, self.ids[found[0]])


@lru_cache(maxsize=8)
def spelling(texts: Sequence[str]) -> re.Pattern[str]:
    """What finds any of some texts; nothing, if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def controls_of(file: Any, stops: Sequence[int]) -> Controls:
    """The control tokens of an opened `tokenizer.json`.

    What ends a turn is one, even where the file does not say so: it would be read from any text.
    """
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = file.get_added_tokens_decoder()
    lies = [added[stop] for stop in stops if stop in added and not added[stop].special]
    again = [AddedToken(t.content, special=True, **{f: getattr(t, f) for f in flags}) for t in lies]
    if again:
        file.add_special_tokens(again)
    special = [(i, token) for i, token in file.get_added_tokens_decoder().items() if token.special]
    return Controls(
        {token.content: i for i, token in special if token.content},
        frozenset(token.content for _, token in special if token.lstrip),
        frozenset(token.content for _, token in special if token.rstrip),
    )


def behind_others(file: Any) -> tuple[Any, Any]:
    """Tokenizers for text behind a control token, and for text behind other text.

    Many put a space in front of all that they are given. Some do so once, at the beginning of everything;
    others behind every control token too; none in the middle of a text.
    """
    told = json.loads(file.to_str())
    first = _without_prefix(told["normalizer"]), _without_prefix(told["pre_tokenizer"])
    if first == (told["normalizer"], told["pre_tokenizer"]):
        return file, file
    once = _schemes(told["pre_tokenizer"]) == {"first"} and first[0] == told["normalizer"]
    bare = type(file).from_str(json.dumps(told | {"normalizer": first[0], "pre_tokenizer": first[1]}))
    return bare if once else file, bare


def _parts(step: Any) -> list[Any]:
    """A step of normalising or splitting, or those that it is a sequence of."""
    if not step:
        return []
    inner = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else [part for each in inner for part in _parts(each)]


def _schemes(step: Any) -> set[str]:
    """When its parts put something in front."""
    schemes = {
        "Metaspace": lambda p: p["prepend_scheme"],
        "ByteLevel": lambda p: "always" * p["add_prefix_space"],
    }
    return {schemes[p["type"]](p) for p in _parts(step) if p["type"] in schemes} - {"never", ""}


def _without_prefix(step: Any) -> Any:
    """The same step, which puts nothing in front of a text."""
    none = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    if not step or step["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            inner = (_without_prefix(part) for part in step[name])
            return step | {name: [part for part in inner if part]}
    return step | none.get(step["type"], {})
