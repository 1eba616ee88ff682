"""Pieces: stretches of a sample's text, and whether a model is to learn them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import numpy as np

from experiments.data.control import Spelled

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


class Encoder(Protocol):
    """What makes token ids of texts."""

    def encode_many(
        self, texts: Sequence[str], control: bool = False, behind: str = NOTHING
    ) -> list[np.ndarray]:
        """Token ids of each text; `behind` what it stands: some tokenizers put a space in front."""

    def spelled(self, text: str, start: int, stop: int) -> Iterable[Spelled]:
        """The control tokens that a stretch of a text spells."""


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
    encoder: Encoder, drafts: Sequence[Sequence[TextPiece]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens (uint32) and whether each is learned (uint8) of many samples; texts go to the encoder together.

    Text is cut where a control token stands and where learning begins or ends, so that no token straddles
    what is asked and what is learned. All else is tokenised as the whole text would be: what people wrote
    together with what a template puts around it.
    """
    cut = [_stretches(encoder, joined(pieces)) for pieces in drafts]
    texts: dict[str, list[str]] = {NOTHING: [], CONTROL: [], TEXT: []}
    for stretches in cut:
        for content, _, behind in stretches:
            if isinstance(content, str):
                texts[behind].append(content)
    encoded = {b: iter(encoder.encode_many(t, behind=b) if t else []) for b, t in texts.items()}
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


def _stretches(encoder: Encoder, pieces: Sequence[TextPiece]) -> list[Stretch]:
    out: list[Stretch] = []
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece.content, str)):
        run = list(group)
        out += _of_text(encoder, run) if is_text else [Stretch(p.content, p.learned) for p in run]
    return out


def _of_text(encoder: Encoder, run: Sequence[TextPiece]) -> list[Stretch]:
    text = "".join(piece.content for piece in run)
    ends = list(accumulate(len(piece.content) for piece in run))
    parts = [(piece.learned, start, end) for piece, start, end in zip(run, [0, *ends], ends, strict=False)]
    stretches = [(learned, list(group)) for learned, group in groupby(parts, key=lambda part: part[0])]
    out, place, behind = [], 0, NOTHING
    for token in [*_spelled(encoder, run, text), None]:
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


def _spelled(encoder: Encoder, run: Sequence[TextPiece], text: str) -> Iterator[Spelled]:
    """Control tokens in the stretches that may spell any, by their place in the whole text."""
    place = end = 0
    stretches = [(control, list(group)) for control, group in groupby(run, key=lambda piece: piece.control)]
    for control, group in stretches:
        stop = place + sum(len(piece.content) for piece in group)
        for found in encoder.spelled(text, place, stop) if control else ():
            yield found._replace(start=max(found.start, end))
            end = found.stop
        place = stop
