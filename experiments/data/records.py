"""Records: what an object of JSONL means, as pieces of text that are learned or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.layouts import LineError
from experiments.data.pieces import TextPiece
from experiments.data.tokenizer import Tokenizer

RESPONSES = ("response", "completion", "output")
TOOLS = ("tools", "functions", "tool_calls", "function_call")  # what no template is shown
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Messages = list[Mapping[str, str]]


@dataclass(frozen=True)
class Record:
    """One line.

    Args:
        drafts: the pieces of its samples: one, two of a pair (chosen first), one of every choice.
        answer: which choice is right; -1 where nothing is chosen.
        sizes: bytes of every choice's text, to compare choices of unequal length by.
        chat: it went through the chat template.
    """

    drafts: tuple[Sequence[TextPiece], ...]
    answer: int = -1
    sizes: tuple[int, ...] = ()
    chat: bool = False


def sample(line: Mapping[str, Any], tokenizer: Tokenizer) -> Record:
    """Something to learn: `messages`, a prompt and its response, or `text`.

    An instruction is a prompt that ends in a blank line, behind its input if it has one.
    """
    if "messages" in line:
        messages = _messages(line, "messages")
        if not any(m["role"] == "assistant" for m in messages):
            raise LineError("messages: no assistant's message, so there is nothing to learn")
        return Record((_conversation(tokenizer, messages, 0),), chat=True)
    if "prompt" in line or "instruction" in line:
        name = next((n for n in RESPONSES if n in line), None)
        if name is None:
            raise LineError(f"lacks {' or '.join(map(repr, RESPONSES))}; it has {_keys(line)}")
        prompt, _ = _together(partial(_prompt, line), partial(_response, line, name))
        chat = isinstance(prompt, list) or isinstance(line[name], list)
        return Record((_answered(tokenizer, prompt, line, name),), chat=chat)
    if "text" in line:
        text = _text(line, "text", empty=False)
        return Record(((*_begin(tokenizer), TextPiece(text, True), TextPiece(tokenizer.eos, True)),))
    raise LineError(
        "has none of 'messages', 'prompt' and 'response', 'instruction' and 'output', 'text'; "
        f"it has {_keys(line)}"
    )


def pair(line: Mapping[str, Any], tokenizer: Tokenizer) -> Record:
    """A prompt with a `chosen` and a `rejected` response; texts, or lists of messages, which may begin with
    the prompt. A prompt that is a text is a user's message where a response is a list.

    Without a prompt both are whole conversations, and what they begin with alike is the prompt.

    Raises:
        LineError: a field is missing or is not what it should be, or both responses are the same.
    """
    missing = [n for n in ("chosen", "rejected") if n not in line]
    if missing:
        raise LineError(f"lacks {' and '.join(map(repr, missing))}; it has {_keys(line)}")
    if line["chosen"] == line["rejected"]:
        raise LineError("chosen and rejected are the same")
    if "prompt" in line or "instruction" in line:
        names = ("chosen", "rejected")
        prompt, *_ = _together(partial(_prompt, line), *(partial(_response, line, n) for n in names))
        if isinstance(prompt, str) and any(isinstance(line[n], list) for n in names):
            prompt = _user_message(prompt)
        if isinstance(prompt, list):
            conversations = [_continued(prompt, line, n) for n in names]
            one, other = (_same(messages[:count]) for messages, count in conversations)
            if one != other:
                raise LineError("chosen and rejected answer different prompts")
            return Record(tuple(_conversation(tokenizer, *each) for each in conversations), chat=True)
        return Record(tuple(_answered(tokenizer, prompt, line, n) for n in names))
    if not isinstance(line["chosen"], list):
        raise LineError(f"lacks 'prompt'; it has {_keys(line)}")
    chosen, rejected = _together(*(partial(_messages, line, name) for name in ("chosen", "rejected")))
    alike = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), -1)
    if alike < 0 or any(m[-1]["role"] != "assistant" for m in (chosen, rejected)):
        raise LineError("chosen and rejected: expected to end in different messages of an assistant")
    return Record(tuple(_conversation(tokenizer, m, alike) for m in (chosen, rejected)), chat=True)


def choice(line: Mapping[str, Any], tokenizer: Tokenizer) -> Record:
    """A prompt (or `question`), its `choices`, and the right one as `answer`: an index from 0, or a letter.

    A choice follows its prompt as it is; a question is asked as "Question: ...", "Answer:" and a space.
    """
    missing = [repr(n) for n in ("choices", "answer") if n not in line]
    if "prompt" not in line and "question" not in line:
        missing = ["'prompt' or 'question'", *missing]
    if missing:
        raise LineError(f"lacks {' and '.join(missing)}; it has {_keys(line)}")
    choices = line["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise LineError(f"choices: expected a list of two or more texts, got {_kind(choices)}")
    named = {f"choices[{i}]": text for i, text in enumerate(choices)}
    name, space = ("prompt", "") if "prompt" in line else ("question", " ")
    question, answer, *texts = _together(
        partial(_text, line, name, empty=name == "prompt"),
        partial(_index, line["answer"], len(choices)),
        *(partial(_text, named, each, empty=False) for each in named),
    )
    if name == "question":
        question = f"Question: {question}\nAnswer:"
    begin = (*_begin(tokenizer), TextPiece(question, False))
    drafts = tuple((*begin, TextPiece(space + text, True)) for text in texts)
    return Record(drafts, answer, tuple(len(text.encode()) for text in texts))


KINDS: dict[str, Callable[[Mapping[str, Any], Tokenizer], Record]] = {
    "samples": sample,
    "pairs": pair,
    "choices": choice,
}


# ------------------------------------------------------------------ prompts and responses


def _prompt(line: Mapping[str, Any]) -> str | Messages:
    if "prompt" in line:
        return _messages(line, "prompt") if isinstance(line["prompt"], list) else _text(line, "prompt")
    parts = _together(
        partial(_text, line, "instruction", empty=False),
        lambda: _text(line, "input") if line.get("input") else "",
    )
    return "".join(f"{part}\n\n" for part in parts if part)


def _response(line: Mapping[str, Any], name: str) -> str | Messages:
    return _messages(line, name) if isinstance(line[name], list) else _text(line, name, empty=False)


def _answered(
    tokenizer: Tokenizer, prompt: str | Messages, line: Mapping[str, Any], name: str
) -> Sequence[TextPiece]:
    if isinstance(prompt, str) and isinstance(line[name], list):
        prompt = _user_message(prompt)
    if isinstance(prompt, str):
        response = _text(line, name, empty=False)
        pieces = (TextPiece(prompt, False), TextPiece(response, True), TextPiece(tokenizer.eos, True))
        return (*_begin(tokenizer), *pieces)
    return _conversation(tokenizer, *_continued(prompt, line, name))


def _user_message(prompt: str) -> Messages:
    if not prompt.strip():
        raise LineError("prompt: is empty")
    return [{"role": "user", "content": prompt}]


def _continued(prompt: Messages, line: Mapping[str, Any], name: str) -> tuple[Messages, int]:
    """The conversation, and how many of its messages are the prompt, which the response may begin with."""
    if not isinstance(line[name], list):
        response = [{"role": "assistant", "content": _text(line, name, empty=False)}]
        return prompt + response, len(prompt)
    response = _messages(line, name)
    if not any(m["role"] == "assistant" for m in response):
        raise LineError(f"{name}: no assistant's message, so there is nothing to learn")
    for start in (0, 1):  # behind a system's message, too
        if response[0]["role"] == "system" or not start:
            stop = start + len(prompt)
            if _same(response[start:stop]) == _same(prompt):
                return response, stop
    if prompt[-1]["role"] == response[0]["role"] == "user":
        raise LineError(f"{name}: begins with a user's message that is not the prompt")
    return prompt + response, len(prompt)


def _same(messages: Messages) -> list[tuple[str, str]]:
    return [(m["role"], m["content"].strip()) for m in messages]


def _begin(tokenizer: Tokenizer) -> tuple[TextPiece, ...]:
    return () if tokenizer.bos is None else (TextPiece(tokenizer.bos, False),)


def _conversation(tokenizer: Tokenizer, messages: Messages, first: int) -> Sequence[TextPiece]:
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")  # nothing is learned behind it
    try:
        return tokenizer.conversation(messages[: last + 1], first)
    except ConfigError:  # of the template, whatever the line
        raise
    except ValueError as error:
        raise LineError(str(error)) from error


# ------------------------------------------------------------------ fields


def _together(*parts: Callable[[], Any]) -> list[Any]:
    """What each of them gives; what is wrong with several of them is one error."""
    found, wrong = [], []
    for part in parts:
        try:
            found.append(part())
        except LineError as error:
            wrong.append(str(error))
    if wrong:
        raise LineError("; ".join(wrong))
    return found


def _text(line: Mapping[str, Any], name: str, empty: bool = True) -> str:
    value = line[name]
    if not isinstance(value, str):
        raise LineError(f"{name}: expected a text, got {_kind(value)}")
    if not (empty or value.strip()):
        raise LineError(f"{name}: is empty")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise LineError(f"{name}: half a surrogate pair at character {error.start + 1}") from error
    return value


def _messages(line: Mapping[str, Any], name: str) -> Messages:
    value = line[name]
    if not isinstance(value, list) or not value:
        raise LineError(f"{name}: expected a list of messages, got {_kind(value)}")
    _no_tools(line)
    _together(*(partial(_check_message, message, f"{name}[{n}]") for n, message in enumerate(value)))
    return value


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise LineError(f"{where}: expected an object with 'role' and 'content', got {_kind(message)}")
    _no_tools(message, f"{where}.")
    named = {f"{where}.{k}": message[k] for k in ("role", "content")}
    _together(
        partial(_text, named, f"{where}.role", empty=False),
        partial(_text, named, f"{where}.content", empty=message["role"] != "assistant"),
    )


def _no_tools(fields: Mapping[str, Any], where: str = "") -> None:
    found = next((name for name in TOOLS if fields.get(name)), None)
    if found:
        raise LineError(f"{where}{found}: tools and their calls are not learned; write them as text, or not")


def _index(answer: Any, count: int) -> int:
    index = answer
    if isinstance(answer, str) and len(answer.strip()) == 1:
        index = LETTERS.find(answer.strip().upper())
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        last = f" or A to {LETTERS[count - 1]}" if count <= len(LETTERS) else ""
        raise LineError(f"answer: expected 0 to {count - 1}{last}, got {_short(answer)}")
    return index


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {_keys(value)}"
    sized = f" of {len(value)}" if isinstance(value, list) else ""
    return f"{'null' if value is None else type(value).__name__}{sized}"


def _keys(line: Mapping[str, Any]) -> str:
    return _short(", ".join(map(repr, line))) if line else "no fields"


def _short(value: Any, most: int = 80) -> str:
    text = value if isinstance(value, str) and value.startswith("'") else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
