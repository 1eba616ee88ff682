"""Pieces: stretches of a sample's text, whether a model is to learn them, and control tokens in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


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
    unmarked = [added[stop] for stop in stops if stop in added and not added[stop].special]
    again = [AddedToken(t.content, special=True, **{f: getattr(t, f) for f in flags}) for t in unmarked]
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
    content = json.loads(file.to_str())
    first = _without_prefix(content["normalizer"]), _without_prefix(content["pre_tokenizer"])
    if first == (content["normalizer"], content["pre_tokenizer"]):
        return file, file
    once = _schemes(content["pre_tokenizer"]) == {"first"} and first[0] == content["normalizer"]
    bare = type(file).from_str(json.dumps(content | {"normalizer": first[0], "pre_tokenizer": first[1]}))
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


Messages = Sequence[Mapping[str, str]]
NOTHING, CONTROL, TEXT = "nothing", "control", "text"  # what a text can stand behind


class TextPiece(NamedTuple):
    """A stretch of a sample.

    Args:
        content: text, or one token's id.
        learned: whether its tokens are targets.
        control: whether text that spells a control token becomes that token. A chat template's does; what
            people wrote does not, so that nobody ends a turn by writing how turns end.
    """

    content: str | int
    learned: bool
    control: bool = False


class Stretch(NamedTuple):
    """Text that is tokenised by itself, or one token's id; and what it stands behind."""

    content: str | int
    learned: bool
    behind: str = NOTHING


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer.

    `vocab`: one more than the largest id; a model's embedding has at least as many rows. `bos`: what a text
    begins with, None where this model's texts begin with nothing. `eos`: what ends a response. `stops`: every
    id that ends a generation. `pad`: fills rows; never a target. `key`: equal for equal tokenizers.
    """

    vocab: int
    bos: int | None
    eos: int
    stops: tuple[int, ...]
    pad: int
    key: str

    def encode(self, text: str) -> list[int]:
        """Token ids; neither begin nor end is added, and no control token is read from the text."""

    def encode_many(
        self, texts: Sequence[str], control: bool = False, behind: str = NOTHING
    ) -> list[np.ndarray]:
        """uint32 ids of each text; with `control`, text that spells a control token becomes one. `behind`:
        what the texts stand behind, as `pieces` names it."""

    def spelled(self, text: str, start: int, stop: int) -> Iterable[Spelled]:
        """The control tokens that a stretch of a text spells."""

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        """Text; control tokens are left out, or with `control` as they are spelled."""

    def conversation(self, messages: Messages, first: int = 0) -> list[TextPiece]:
        """The pieces of a conversation; what assistants said from message `first` on is learned."""

    def opening(self, messages: Messages) -> list[TextPiece]:
        """The prompt to which a model answers `messages`."""

    def save(self, folder: Path) -> None:
        """Write its files into a folder that exists."""


def joined(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Neighbours of one kind become one, as they are tokenised when a model is asked to go on.

    >>> pieces = [TextPiece("a", False), TextPiece("", True), TextPiece("b", False), TextPiece("c", True)]
    >>> [(piece.content, piece.learned) for piece in joined(pieces)]
    [('ab', False), ('c', True)]
    """
    out: list[TextPiece] = []
    for piece in pieces:
        if piece.content == "":
            continue
        last = out[-1] if out else None
        if (
            last
            and isinstance(last.content, str)
            and isinstance(piece.content, str)
            and last[1:] == piece[1:]
        ):
            out[-1] = last._replace(content=last.content + piece.content)
        else:
            out.append(piece)
    return out


def encode_all(
    tokenizer: Tokenizer, drafts: Sequence[Sequence[TextPiece]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens (uint32) and whether each is learned (uint8) of many samples; texts are tokenised together.

    Text is cut where a control token stands and where learning begins or ends, so that no token straddles
    what is asked and what is learned. All else is tokenised as the whole text would be: what people wrote
    together with what a template puts around it.
    """
    cut = [_stretches(tokenizer, joined(pieces)) for pieces in drafts]
    texts: dict[str, list[str]] = {NOTHING: [], CONTROL: [], TEXT: []}
    for stretches in cut:
        for content, _, behind in stretches:
            if isinstance(content, str):
                texts[behind].append(content)
    encoded = {b: iter(tokenizer.encode_many(t, behind=b) if t else []) for b, t in texts.items()}
    return [_one(stretches, encoded) for stretches in cut]


def _one(stretches: Sequence[Stretch], encoded: dict[str, Iterator]) -> tuple[np.ndarray, np.ndarray]:
    ids = [
        next(encoded[s.behind]) if isinstance(s.content, str) else np.array([s.content], np.uint32)
        for s in stretches
    ]
    if not ids:
        return np.empty(0, np.uint32), np.empty(0, np.uint8)
    learned = np.repeat(np.array([s.learned for s in stretches], np.uint8), [len(i) for i in ids])
    return np.concatenate(ids), learned


# ------------------------------------------------------------------ where text is cut


def _stretches(tokenizer: Tokenizer, pieces: Sequence[TextPiece]) -> list[Stretch]:
    out: list[Stretch] = []
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece.content, str)):
        run = list(group)
        out += _of_text(tokenizer, run) if is_text else [Stretch(p.content, p.learned) for p in run]
    return out


def _of_text(tokenizer: Tokenizer, run: Sequence[TextPiece]) -> list[Stretch]:
    text = "".join(piece.content for piece in run)
    ends = list(accumulate(len(piece.content) for piece in run))
    parts = [(piece.learned, start, end) for piece, start, end in zip(run, [0, *ends], ends, strict=False)]
    stretches = [(learned, list(group)) for learned, group in groupby(parts, key=lambda part: part[0])]
    out, place, behind = [], 0, NOTHING
    for token in [*_spelled(tokenizer, run, text), None]:
        stop = token.start if token else len(text)
        for learned, within in stretches:
            start, end = max(place, within[0][1]), min(stop, within[-1][2])
            if start < end:
                out.append(Stretch(text[start:end], learned, behind))
                behind = TEXT
        if token:
            learned = next(learned for learned, _, end in parts if token.at < end)
            out.append(Stretch(token.token, learned))
            place, behind = token.stop, CONTROL
    return out


def _spelled(tokenizer: Tokenizer, run: Sequence[TextPiece], text: str) -> Iterator[Spelled]:
    """Control tokens in the stretches that may spell any, by their place in the whole text."""
    place = end = 0
    stretches = [(control, list(group)) for control, group in groupby(run, key=lambda piece: piece.control)]
    for control, group in stretches:
        stop = place + sum(len(piece.content) for piece in group)
        for found in tokenizer.spelled(text, place, stop) if control else ():
            yield found._replace(start=max(found.start, end))
            end = found.stop
        place = stop
