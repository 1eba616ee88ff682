"""Chat templates: a conversation as one text, which stretches of it an assistant wrote, and which people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data import renderer
from experiments.data.pieces import Messages, TextPiece, spelling
from fnshard.errors import MissingExtraError

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
    """A rendering in which contents that spell a control token are kept apart from its own text.

    It is rendered once more with signs in the place of such contents; the contents, as they are or without
    the white space around them, have to make the same text again.

    Raises:
        ValueError: they cannot be distinguished.
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
        full = contents.get(name, "")
        ways = (full, full.strip(), full.lstrip(), full.rstrip())
        content = next((way for way in ways if text.startswith(way + behind, place)), None)
        if content is None:
            return None
        found.append((place, place + len(content)))
        place += len(content) + len(behind)
    return tuple(found) if place == len(text) else None


@dataclass(frozen=True)
class Template:
    """A model directory's own template, in jinja.

    Args:
        source: its text.
        names: what else it may read: `bos_token` and the like.
        ends: how turns end; what a template writes behind that is not learned: no model goes on there.
        control: texts of control tokens, which mean nothing in what people wrote.
        file: that it stands in.
    """

    source: str
    names: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    file: str = field(default="the model's directory", compare=False)

    def check(self) -> None:
        """Compile it.

        Raises:
            ConfigError: it is none, or takes too long already.
            MissingExtraError: jinja2 is not installed.
        """
        try:
            self._run(None)
        except renderer.BrokenError as error:
            raise ConfigError(f"{self.file}: the chat template is broken, {error}.") from error

    def render(self, messages: Messages, *, ask: bool = False) -> str:
        """The text of `messages`; with `ask` also what opens the assistant's next turn.

        Raises:
            ValueError: the template does not take them.
            ConfigError: it takes more time or memory than it may, whatever it is given next.
            MissingExtraError: jinja2 is not installed.
        """
        values = {"messages": [dict(m) for m in messages], "add_generation_prompt": ask, **dict(self.names)}
        try:
            return self._run(values)
        except renderer.BrokenError as error:
            raise ValueError(f"the chat template refuses it ({error})") from error

    def _run(self, values: Any) -> str:
        if find_spec("jinja2") is None:
            raise MissingExtraError(
                "chat templates need jinja2. Fix: pip install fnshard[finetune], or use prompt and response."
            )
        try:
            return renderer.render(self.source, values)
        except renderer.StartError as error:
            raise ConfigError(
                f"{self.file}: the process that renders the chat template did not start ({error}). "
                f"Fix: `python -m {renderer.__name__} 10 {renderer.MEMORY_bytes}` has to start and wait."
            ) from None
        except renderer.CostsError:
            raise ConfigError(
                f"{self.file}: the chat template {renderer.COSTS}. Fix: mend it, or use the directory of "
                "another model."
            ) from None

    def conversation(self, messages: Messages, first: int = 0) -> list[TextPiece]:
        """The pieces up to the last assistant's turn; assistants' from message `first` on are learned.

        Raises:
            ValueError: a rendering is not the beginning of the next one, so that it is unknown what a
                model would have been asked; or people's text cannot be distinguished from the template's.
        """
        pieces, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            prompt = self._rendered(messages[:number], ask=True)
            full = self._rendered(messages[: number + 1])
            if not (prompt.text.startswith(done) and full.text.startswith(prompt.text)):
                raise ValueError(self._uncut(messages, number, done, prompt.text, full.text))
            answer = self._end(full, len(prompt.text))
            pieces += prompt.pieces(len(done), len(prompt.text), learned=False)
            pieces += full.pieces(len(prompt.text), answer, learned=True)
            pieces += full.pieces(answer, len(full.text), learned=False)
            done = full.text
        return pieces

    def opening(self, messages: Messages) -> list[TextPiece]:
        prompt = self._rendered(messages, ask=True)
        return prompt.pieces(0, len(prompt.text), learned=False)

    def _rendered(self, messages: Messages, ask: bool = False) -> Rendering:
        return rendered(partial(self.render, ask=ask), messages, self.control)

    def _end(self, full: Rendering, start: int) -> int:
        """Where the answer behind `start` characters ends: behind the last end that the template wrote."""
        text = full.blanked
        found = (at + len(end) for end in self.ends if (at := text.rfind(end, start)) >= 0)
        return max(found, default=len(text))

    def _uncut(self, messages: Messages, number: int, done: str, prompt: str, full: str) -> str:
        """Why the assistant's part cannot be identified."""
        before = self.render(messages[:number])
        if all(text.startswith(start) for text in (prompt, full) for start in (done, before)):
            return (
                f"the chat template asks for messages[{number}] with {prompt[len(before) :]!r}, and writes "
                f"{_opening(full[len(before) :])!r} there, so the assistant's part cannot be told (use "
                "prompt and response, or mend what the template in the model's directory writes under "
                "add_generation_prompt)"
            )
        return (
            f"the chat template rewrites what stood before messages[{number}], so the assistant's part "
            "cannot be told (use prompt and response, or one assistant's turn a line)"
        )


def _opening(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True)
class Plain:
    """For models that come without a template: a role, a colon and the text; the end token ends an answer."""

    bos: int | None
    eos: int

    def conversation(self, messages: Messages, first: int = 0) -> list[TextPiece]:
        pieces = [] if self.bos is None else [TextPiece(self.bos, False)]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                learned = number >= first
                pieces += [TextPiece("assistant:", False), TextPiece(f" {message['content']}", learned)]
                pieces.append(TextPiece(self.eos, learned))
            else:
                pieces.append(TextPiece(f"{message['role']}: {message['content']}\n\n", False))
        return pieces

    def source(self, text_of: Callable[[int], str]) -> str:
        """The same as a chat template, for who opens an exported model; `text_of` a control token's id."""
        begin = "" if self.bos is None else "{{ " + json.dumps(text_of(self.bos)) + " }}"
        return (
            begin + "{% for message in messages %}{% if message['role'] == 'assistant' %}"
            "{{ 'assistant: ' + message['content'] + " + json.dumps(text_of(self.eos)) + " }}{% else %}"
            "{{ message['role'] + ': ' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        )

    def opening(self, messages: Messages) -> list[TextPiece]:
        return [*self.conversation(messages, first=len(messages)), TextPiece("assistant:", False)]
