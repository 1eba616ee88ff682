"""Pieces: stretches of a sample's text, and whether a model is to learn them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Piece(NamedTuple):
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


class Encoder(Protocol):
    """What makes token ids of texts."""

    def encode_many(self, texts: Sequence[str], control: bool = False) -> list[np.ndarray]:
        """Token ids of each text."""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind become one, as they are tokenised when a model is asked to go on.

    >>> joined([Piece("a", False), Piece("", True), Piece("b", False), Piece("c", True)])
    [Piece(content='ab', learned=False, control=False), Piece(content='c', learned=True, control=False)]
    """
    out: list[Piece] = []
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


def encode_all(encoder: Encoder, drafts: Sequence[Sequence[Piece]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens (uint32) and whether each is learned (uint8) of many samples; texts go to the encoder together.

    Each piece is tokenised by itself: a token never straddles what is asked and what is learned.
    """
    drafts = [joined(pieces) for pieces in drafts]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for pieces in drafts:
        for piece in pieces:
            if isinstance(piece.content, str):
                texts[piece.control].append(piece.content)
    encoded = {c: iter(encoder.encode_many(t, c) if t else []) for c, t in texts.items()}
    return [_one(pieces, encoded) for pieces in drafts]


def _one(pieces: Sequence[Piece], encoded: dict[bool, object]) -> tuple[np.ndarray, np.ndarray]:
    ids = [
        next(encoded[p.control]) if isinstance(p.content, str) else np.array([p.content], np.uint32)
        for p in pieces
    ]
    if not ids:
        return np.empty(0, np.uint32), np.empty(0, np.uint8)
    learned = np.repeat(np.array([p.learned for p in pieces], np.uint8), [len(i) for i in ids])
    return np.concatenate(ids), learned
