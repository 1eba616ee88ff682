"""Chat templates: a conversation as one text, and which stretches of it an assistant wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

from experiments.data.pieces import Piece
from experiments.data.rendering import Messages, Rendering, rendered
from fnshard.errors import MissingExtraError

DAY = datetime(2024, 7, 26)  # what templates that ask for the date are told: the same text every day


@dataclass(frozen=True)
class Template:
    """A model directory's own template, in jinja.

    Args:
        source: its text.
        names: what else it may read: `bos_token` and the like.
        ends: how turns end; what a template writes behind that is not learned: no model goes on there.
        control: texts of control tokens, which mean nothing in what people wrote.
    """

    source: str
    names: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()
    control: tuple[str, ...] = ()

    def render(self, messages: Messages, *, ask: bool = False) -> str:
        """The text of `messages`; with `ask` also what opens the assistant's next turn.

        Raises:
            ValueError: the template does not take them.
            MissingExtraError: jinja2 is not installed.
        """
        template = compiled(self.source)
        try:
            return template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=ask, **dict(self.names)
            )
        except Exception as error:  # templates are programs: anything can come out of one
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})") from error

    def conversation(self, messages: Messages, first: int = 0) -> list[Piece]:
        """The pieces up to the last assistant's turn; assistants' from message `first` on are learned.

        Raises:
            ValueError: a rendering is not the beginning of the next one, so that nobody can tell what a
                model would have been asked; or text that people wrote cannot be told from the template's.
        """
        pieces, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            asked = self._rendered(messages[:number], ask=True)
            whole = self._rendered(messages[: number + 1])
            if not (asked.text.startswith(done) and whole.text.startswith(asked.text)):
                raise ValueError(self._uncut(messages, number, done, asked.text, whole.text))
            answer = self._end(whole, len(asked.text))
            pieces += asked.pieces(len(done), len(asked.text), learned=False)
            pieces += whole.pieces(len(asked.text), answer, learned=True)
            pieces += whole.pieces(answer, len(whole.text), learned=False)
            done = whole.text
        return pieces

    def opening(self, messages: Messages) -> list[Piece]:
        """What a model is given to answer `messages`."""
        asked = self._rendered(messages, ask=True)
        return asked.pieces(0, len(asked.text), learned=False)

    def _rendered(self, messages: Messages, ask: bool = False) -> Rendering:
        return rendered(partial(self.render, ask=ask), messages, self.control)

    def _end(self, whole: Rendering, asked: int) -> int:
        """Where the answer behind `asked` characters ends: behind the last end that the template wrote."""
        text = whole.blanked
        found = (at + len(end) for end in self.ends if (at := text.rfind(end, asked)) >= 0)
        return max(found, default=len(text))

    def _uncut(self, messages: Messages, number: int, done: str, asked: str, whole: str) -> str:
        """Why the assistant's part cannot be told."""
        before = self.render(messages[:number])
        if all(text.startswith(start) for text in (asked, whole) for start in (done, before)):
            return (
                f"the chat template asks for messages[{number}] with {asked[len(before) :]!r}, and writes "
                f"{_opening(whole[len(before) :])!r} there, so the assistant's part cannot be told (use "
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

    def conversation(self, messages: Messages, first: int = 0) -> list[Piece]:
        """As `Template.conversation`."""
        pieces = [] if self.bos is None else [Piece(self.bos, False)]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                learned = number >= first
                pieces += [Piece("assistant:", False), Piece(f" {message['content']}", learned)]
                pieces.append(Piece(self.eos, learned))
            else:
                pieces.append(Piece(f"{message['role']}: {message['content']}\n\n", False))
        return pieces

    def opening(self, messages: Messages) -> list[Piece]:
        """As `Template.opening`."""
        return [*self.conversation(messages, first=len(messages)), Piece("assistant:", False)]


@lru_cache(maxsize=8)
def compiled(source: str) -> Any:
    """The template as transformers compiles it: sandboxed, blocks trimmed, a few helpers.

    Raises:
        ValueError: it is none.
        MissingExtraError: jinja2 is not installed.
    """
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError(
            "chat templates need jinja2. Fix: pip install fnshard[finetune], or use prompt and response."
        ) from error

    class Generation(Extension):
        """`{% generation %}` marks an assistant's part; prefixes tell us that, so it is passed over."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals |= {"raise_exception": _refuse(jinja2.TemplateError), "strftime_now": DAY.strftime}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error


def _refuse(kind: type[Exception]) -> Any:
    def raise_exception(message: str) -> NoReturn:
        raise kind(message)

    return raise_exception
