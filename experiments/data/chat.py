"""Conversations as tokens, by the chat template of transformers, and which of them an assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.data.files import LineError
from experiments.data.tokenizer import DirectoryTokenizer

Messages = Sequence[Mapping[str, Any]]
Sample = tuple[np.ndarray, np.ndarray]  # token ids (uint32), and whether each is learned (uint8)
MARKED = re.compile(r"\{%-?\s*generation\b")  # a template that says what an assistant writes


def conversation(
    tokenizer: DirectoryTokenizer, messages: Messages, first: int = 0, tools: list[Any] | None = None
) -> Sample:
    """A conversation up to its last assistant's turn; what assistants wrote from message `first` on is
    learned.

    A template without `{% generation %}` marks says what that is by its prefixes: an assistant's turn is what
    a rendering has more than the prompt that asked for it.

    Args:
        tools: that the template is shown, as JSON schemas.

    Raises:
        LineError: a message spells a control token, the template refuses the conversation, or a rendering is
            not the beginning of the next one, so that it is unknown what a model would have been asked.
    """
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    messages = messages[: last + 1]
    _check_controls(tokenizer, [*messages, *(tools or [])])
    shown = {"tools": tools, "tool_calls": any(message.get("tool_calls") for message in messages)}
    if hidden := [n for n, there in shown.items() if there and n not in tokenizer.hf.get_chat_template()]:
        raise LineError(f"the chat template does not show {' and '.join(hidden)} (take one that does)")
    paths = [part["image"] for m in messages for part in parts(m) if part.get("type") == "image"]
    if paths and tokenizer.images is None:
        raise LineError("has images, and the model's directory no image processor that is known here")
    if MARKED.search(tokenizer.hf.get_chat_template()):
        encoded = _render(
            tokenizer, messages, tools=tools, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
        ids, learned = (np.array(encoded[name]) for name in ("input_ids", "assistant_masks"))
        if first:
            number = next(n for n in range(first, len(messages)) if messages[n]["role"] == "assistant")
            text = _text(tokenizer, messages, tools)
            prompt = _text(tokenizer, messages[:number], tools, ask=True)
            _check_prefix(text.startswith(prompt), number)
            learned[np.array(encoded["offset_mapping"])[:, 0] < len(prompt)] = 0
        if not paths:
            return ids.astype(np.uint32), learned.astype(np.uint8)
        offsets = np.array(encoded["offset_mapping"])[learned != 0]
        text, spans = _text(tokenizer, messages, tools), [tuple(span) for span in offsets.tolist()]
    else:
        text, spans = _spans(tokenizer, messages, first, tools)
    return rendered(tokenizer, *(tokenizer.images.expanded(text, spans, paths) if paths else (text, spans)))


def parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of a message whose content is a list of them: texts and images."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def rendered(tokenizer: DirectoryTokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
    """A text that a chat template has made: its control tokens are read, and nothing is added.

    `spans`: from where to where it is learned.
    """
    encoded = tokenizer.hf(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, learned = np.array(encoded["input_ids"]), np.zeros(len(encoded["input_ids"]))
    starts, ends = np.array(encoded["offset_mapping"]).T
    for start, end in spans:
        learned[(ends > start) & (starts < end)] = 1
    return ids.astype(np.uint32), learned.astype(np.uint8)


def is_rendered(tokenizer: DirectoryTokenizer, *texts: Any) -> bool:
    """Whether any of these texts spells a control token of the tokenizer."""
    return any(isinstance(text, str) and _controls(tokenizer).search(text) for text in texts)


def opening(tokenizer: DirectoryTokenizer, messages: Messages) -> list[int]:
    """The prompt to which a model answers `messages`."""
    _check_controls(tokenizer, messages)
    return _render(tokenizer, messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def _spans(
    tokenizer: DirectoryTokenizer, messages: Messages, first: int, tools: list[Any] | None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and from where to where an assistant wrote it."""
    full, spans = "", []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number >= first:
            if not number:
                raise LineError("messages[0] is an assistant's, so there is no prompt that asks for it")
            before, prompt = full, _text(tokenizer, messages[:number], tools, ask=True)
            full = _text(tokenizer, messages[: number + 1], tools)
            _check_prefix(prompt.startswith(before) and full.startswith(prompt), number)
            spans.append((len(prompt), _end(tokenizer, full, len(prompt))))
    return full, spans


def _end(tokenizer: DirectoryTokenizer, text: str, start: int) -> int:
    """Where an answer ends: with its last end token, whatever a template writes after it."""
    ends = tokenizer.hf.convert_ids_to_tokens(list(tokenizer.stops))
    return max((at + len(end) for end in ends if (at := text.rfind(end, start)) >= 0), default=len(text))


def _check_prefix(holds: bool, number: int) -> None:
    if not holds:
        raise LineError(
            f"the chat template writes what stands before messages[{number}] in another way than it asks for "
            "it, so the assistant's part is unknown (use prompt and response, or a template with "
            "{% generation %} marks)"
        )


def _text(
    tokenizer: DirectoryTokenizer, messages: Messages, tools: list[Any] | None, ask: bool = False
) -> str:
    return _render(tokenizer, messages, tools=tools, add_generation_prompt=ask, tokenize=False)


def _render(tokenizer: DirectoryTokenizer, messages: Messages, **options: Any) -> Any:
    try:
        return tokenizer.hf.apply_chat_template([dict(m) for m in messages], **options)
    except Exception as error:  # templates are programs: anything can come out of one
        raise LineError(f"the chat template refuses it ({type(error).__name__}: {error})") from error


def _check_controls(tokenizer: DirectoryTokenizer, messages: Messages) -> None:
    """Refuse text that would become a control token: nobody ends a turn by writing how turns end."""
    find = _controls(tokenizer)
    for number, message in enumerate(messages):
        if found := find.search(json.dumps(message, ensure_ascii=False, default=str)):
            raise LineError(
                f"messages[{number}] spells the control token {found[0]!r} (write it otherwise; what a "
                "chat template has rendered goes into text, or prompt and response)"
            )


def _controls(tokenizer: DirectoryTokenizer) -> re.Pattern[str]:
    added = tokenizer.hf.added_tokens_decoder.values()
    return _spelling(tuple(token.content for token in added if token.special))


@lru_cache(maxsize=8)
def _spelling(texts: Sequence[str]) -> re.Pattern[str]:
    """What finds any of some texts; nothing, if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
