"""Renderings: a chat template's text, and which stretches of it are what people wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.data.control import spelling
from experiments.data.pieces import TextPiece

Messages = Sequence[Mapping[str, str]]
PRIVATE = range(0xF0000, 0xFFFFE)  # characters that mean nothing, of which no text holds all


@dataclass(frozen=True)
class Rendering:
    """A text, and the stretches (start, stop) of it in which no control token may be read."""

    text: str
    written: tuple[tuple[int, int], ...] = ()

    @property
    def blanked(self) -> str:
        """As long as the text, without what people wrote."""
        text = self.text
        for start, stop in self.written:
            text = text[:start] + "\0" * (stop - start) + text[stop:]
        return text

    def pieces(self, start: int, stop: int, *, learned: bool) -> list[TextPiece]:
        """A stretch of it.

        >>> pieces = Rendering("<e>a<e>", ((3, 4),)).pieces(0, 4, learned=True)
        >>> [(piece.content, piece.control) for piece in pieces]
        [('<e>', True), ('a', False)]
        """
        out, place = [], start
        for first, last in (*self.written, (stop, stop)):
            first, last = (min(max(at, place), stop) for at in (first, last))
            out += [
                TextPiece(self.text[place:first], learned, True),
                TextPiece(self.text[first:last], learned),
            ]
            place = last
        return [piece for piece in out if piece.content]


def rendered(render: Callable[[Messages], str], messages: Messages, control: Sequence[str]) -> Rendering:
    """A rendering in which contents that spell a control token are told from the template's own text.

    It is rendered once more with signs in the place of such contents; the contents, as they are or without
    the white space around them, have to make the same text again.

    Args:
        render: the template.
        messages: with "role" and "content".
        control: texts of control tokens.

    Raises:
        ValueError: they cannot be told apart.
    """
    spells = spelling(tuple(control)).search
    for number, message in enumerate(messages):
        for key, value in message.items():
            if key != "content" and spells(_told(value)):
                raise ValueError(f"messages[{number}].{key} spells a control token of the chat template")
    text = render(messages)
    found = {n: s[0] for n, message in enumerate(messages) if (s := spells(message["content"]))}
    if not found:
        return Rendering(text)
    sign = next((chr(code) for code in PRIVATE if chr(code) not in text), chr(PRIVATE[0]))
    signed = [{**m, "content": f"{sign}{n}{sign}"} if n in found else m for n, m in enumerate(messages)]
    contents = {str(n): messages[n]["content"] for n in found}
    written = _written(text, re.split(f"{sign}([0-9]+){sign}", render(signed)), contents)
    if written is None:
        raise ValueError(
            "; ".join(f"messages[{n}].content spells the control token {s!r}" for n, s in found.items())
            + ", and the chat template changes contents, so they cannot be told from its own text (write it "
            "otherwise, or use prompt and response)"
        )
    return Rendering(text, written)


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _written(
    text: str, parts: Sequence[str], contents: Mapping[str, str]
) -> tuple[tuple[int, int], ...] | None:
    """Where the contents stand in a text; `parts` are by turns what stands between them, and their names."""
    if not text.startswith(parts[0]):
        return None
    place, found = len(parts[0]), []
    for name, behind in zip(parts[1::2], parts[2::2], strict=True):
        whole = contents.get(name, "")
        ways = (whole, whole.strip(), whole.lstrip(), whole.rstrip())
        content = next((way for way in ways if text.startswith(way + behind, place)), None)
        if content is None:
            return None
        found.append((place, place + len(content)))
        place += len(content) + len(behind)
    return tuple(found) if place == len(text) else None
