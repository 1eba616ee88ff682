"""Records: what an object of data means, as samples of tokens that are learned or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.chat import Messages, Sample, conversation, is_rendered, rendered
from experiments.data.files import LineError
from experiments.data.tokenizer import DirectoryTokenizer

Record = Mapping[str, Any]
RESPONSES = ("response", "completion", "output")
OLD_TOOLS = ("functions", "function_call")  # of before `tools` and `tool_calls`: no template is shown them


def sample(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Something to learn: `messages`, a prompt and its response, or `text`.

    `tools` beside messages are shown to the chat template, which also writes an assistant's `tool_calls`.
    An instruction is a prompt that ends in a blank line, after its input if it has one. Texts that spell a
    control token of the tokenizer are of a chat template: see `chat.rendered`.
    """
    if "messages" in record:
        check({"tools": None, **record}, messages=_messages, tools=_tools)
        return [_conversation(tokenizer, record["messages"], 0, record.get("tools"))]
    if "text" in record and "prompt" not in record:
        check(record, text=_text)
        if is_rendered(tokenizer, record["text"]):
            return [rendered(tokenizer, record["text"], [(0, len(record["text"]))])]
        return [_joined(tokenizer.begin, [*tokenizer.encode(record["text"]), tokenizer.eos])]
    prompt, response = _prompt_and_response(record)
    return _answered(tokenizer, prompt, response)


def pair(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """A prompt with a `chosen` and a `rejected` response, as two samples; texts, or lists of messages, which
    may begin with the prompt.

    Without a prompt both are whole conversations, and what they begin with alike is the prompt.
    """
    if "prompt" not in record:
        check(record, chosen=_messages, rejected=_messages)
    else:
        check(record, prompt=_prompt, chosen=_said, rejected=_said)
    prompt, sides = record.get("prompt"), [record["chosen"], record["rejected"]]
    if sides[0] == sides[1]:
        raise LineError("chosen and rejected are the same")
    if prompt is None:
        pairs = enumerate(zip(*sides, strict=False))
        alike = next((n for n, (one, other) in pairs if one != other), 0)
        prompt, sides = sides[0][:alike], [side[alike:] for side in sides]
        if not prompt:
            raise LineError("chosen and rejected: expected messages that both begin with, as the prompt")
    elif any(isinstance(side, list) for side in sides):
        prompt = _as_messages(prompt, "user")
    both = _answered(tokenizer, prompt, *sides)
    asked = [ids[: int(np.argmax(learned))].tolist() for ids, learned in both]
    if asked[0] != asked[1]:
        raise LineError("chosen and rejected answer different prompts")
    return both


KINDS: dict[str, Callable[[Record, DirectoryTokenizer], list[Sample]]] = {"samples": sample, "pairs": pair}


def _prompt_and_response(record: Record) -> tuple[str | list[Any], str | list[Any]]:
    response = next((name for name in RESPONSES if name in record), None)
    if response is None or not {"prompt", "instruction"} & set(record):
        known = "'messages', 'prompt' and 'response', 'instruction' and 'output', 'text'"
        raise LineError(f"has none of {known}; it has {', '.join(map(repr, record)) or 'no fields'}")
    if "prompt" in record:
        check(record, **{"prompt": _prompt, response: _said})
        return record["prompt"], record[response]
    more = record.get("input") or ""
    check({**record, "input": more}, **{"instruction": _text, "input": _string, response: _said})
    return "".join(f"{part}\n\n" for part in (record["instruction"], more) if part), record[response]


def _answered(
    tokenizer: DirectoryTokenizer, prompt: str | list[Any], *responses: str | list[Any]
) -> list[Sample]:
    """A prompt that is not learned, with each of the responses, which are. Texts are taken as they are, of a
    chat template where any of them spells a control token; else they are messages of a user and an assistant,
    in the chat template."""
    if not all(isinstance(said, str) for said in (prompt, *responses)):
        return [_talk(tokenizer, _as_messages(prompt, "user"), said) for said in responses]
    if is_rendered(tokenizer, prompt, *responses):
        end = tokenizer.hf.convert_ids_to_tokens(
            tokenizer.eos
        )  # as ever, where a response does not say its own
        texts = [prompt + said + ("" if is_rendered(tokenizer, said) else end) for said in responses]
        return [rendered(tokenizer, text, [(len(prompt), len(text))]) for text in texts]
    asked = [*tokenizer.begin, *tokenizer.encode(prompt)]
    return [_joined(asked, [*tokenizer.encode_after(said), tokenizer.eos]) for said in responses]


def _talk(tokenizer: DirectoryTokenizer, asked: list[Any], response: str | list[Any]) -> Sample:
    """Messages, and a response to them that may begin with them, also after a system's message."""
    answer = _as_messages(response, "assistant")
    for start in range(2):
        stop = start + len(asked)
        if list(map(_turn, answer[start:stop])) == list(map(_turn, asked)):
            return _conversation(tokenizer, answer, stop)
    if asked[-1]["role"] == answer[0]["role"] == "user":
        raise LineError("a response begins with a user's message that is not the prompt")
    return _conversation(tokenizer, [*asked, *answer], len(asked))


def _conversation(
    tokenizer: DirectoryTokenizer, messages: Messages, first: int, tools: list[Any] | None = None
) -> Sample:
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise LineError("there is no assistant's message to learn")
    return conversation(tokenizer, messages, first, tools)


def _as_messages(said: str | list[Any], role: str) -> list[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _turn(message: Mapping[str, Any]) -> tuple[str, str]:
    return message["role"], (message.get("content") or "").strip()


def _joined(asked: Any, learned: list[int]) -> Sample:
    mask = np.repeat(np.array([0, 1], np.uint8), [len(asked), len(learned)])
    return np.array([*asked, *learned], np.uint32), mask


# ------------------------------------------------------------------ images

MARK = "<image>"  # in texts of records with a list of images
PLACES = ("image", "path", "url", "image_url")  # keys of an image among a message's parts


def with_images(record: Mapping[str, Any], root: Path) -> tuple[Mapping[str, Any], list[str]]:
    """A record whose images are parts of its messages, and their paths in order.

    A record may have a list of `images` (or one `image`), which stand where its texts say "<image>", or else
    before the first message of a user; or parts `{"type": "image", "image": path}` in messages.

    Args:
        root: that paths are relative to.

    Raises:
        LineError: images that are no paths, or not as many as the texts say.
    """
    listed = record.get("images", record.get("image"))
    listed = [listed] if isinstance(listed, (str, Mapping)) else list(listed or [])
    messages = record.get("messages")
    if messages == [] or (not listed and not isinstance(messages, list)):
        return record, []
    messages = messages if isinstance(messages, list) else _as_conversation(record)
    messages = [dict(m) if isinstance(m, Mapping) else {"content": m} for m in messages]
    marks = sum(m["content"].count(MARK) for m in messages if isinstance(m.get("content"), str))
    if listed and not marks:
        first = next((m for m in messages if m.get("role") == "user"), messages[0])
        first["content"] = f"{MARK * len(listed)}{first.get('content')}"
    elif listed and marks != len(listed):
        raise LineError(f"images: has {len(listed)}, and {MARK} stands {marks} times in its texts")
    queue, found = iter(listed), []
    for message in messages:
        content = message.get("content")
        if listed and isinstance(content, str) and MARK in content:
            text, *rest = content.split(MARK)
            content = [{"type": "text", "text": text}]
            for after in rest:
                content += [{"type": "image", "image": next(queue)}, {"type": "text", "text": after}]
            content = [part for part in content if part["type"] == "image" or part["text"]]
        content = list(content) if isinstance(content, list) else content
        for n, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                content[n] = {"type": "image", "image": _path(part, root)}
                found.append(content[n]["image"])
        message["content"] = content
    tools = {name: value for name, value in record.items() if name == "tools"}
    return ({"messages": messages, **tools}, found) if found else (record, [])


def _as_conversation(record: Record) -> list[Any]:
    prompt, response = (None, None) if "text" in record else _prompt_and_response(record)
    if isinstance(prompt, str) and isinstance(response, str):
        return [*_as_messages(prompt, "user"), *_as_messages(response, "assistant")]
    raise LineError("images: are of messages, or of a prompt and its response")


def _path(image: Any, root: Path) -> str:
    named = image
    while isinstance(named, Mapping):  # {"type": "image_url", "image_url": {"url": ...}}
        named = next((named[n] for n in PLACES if named.get(n)), None)
    if not isinstance(named, str) or not named or "://" in named or named.startswith("data:"):
        raise LineError(f"images: expected the path of a file, got {str(named)[:60]!r}")
    return str(root / named)


# ------------------------------------------------------------------ fields


def check(record: Record, **fields: Callable[[Any], str]) -> None:
    """Compare fields of a record with what they have to be.

    Args:
        fields: for each name a function of the value that says what is wrong with it; "" if nothing is.

    Raises:
        LineError: all that is wrong with any of them.
    """
    wrong = [f"{name}: {why}" for name, is_wrong in fields.items() if (why := is_wrong(record.get(name)))]
    wrong += [f"{name}: write it as tools and tool_calls" for name in OLD_TOOLS if record.get(name)]
    if wrong:
        raise LineError("; ".join(wrong))


def _string(value: Any) -> str:
    if not isinstance(value, str):
        return f"expected a text, got {'null' if value is None else type(value).__name__}"
    return "" if value.isprintable() or _is_unicode(value) else "holds half of a surrogate pair"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any) -> str:
    return _string(value) or ("" if value.strip() else "is empty")


def _messages(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, got {'an empty one' if value == [] else type(value).__name__}"
    return "; ".join(f"[{n}]: {why}" for n, message in enumerate(value) if (why := _message(message)))


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return "expected an object with 'role' and 'content'"
    calls = message.get("tool_calls")
    said = _text if message.get("role") == "assistant" and not calls else _string
    content = message.get("content")
    if isinstance(content, list):
        if wrong := _parts(content):
            return f"content: {wrong}"
        content = "".join(part.get("text", " ") for part in content)
    try:
        check({**message, "content": "" if calls and content is None else content}, role=_text, content=said)
    except LineError as error:
        return str(error)
    return "" if calls is None else _calls(calls)


def _parts(value: list[Any]) -> str:
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and _string(part.get("text")):
            return f"a part's text: {_string(part.get('text'))}"
        if kind not in ("text", "image"):
            return "expected a text, or parts of the types 'text' and 'image'"
    return ""


def _calls(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "tool_calls: expected a list of calls"
    functions = [call.get("function", call) if isinstance(call, Mapping) else None for call in value]
    whole = all(isinstance(f, Mapping) and isinstance(f.get("name"), str) for f in functions)
    return "" if whole else "tool_calls: expected objects with a function, which has a name and arguments"


def _tools(value: Any) -> str:
    is_list = isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
    return "" if value is None or is_list else "expected a list of objects"


def _said(value: Any) -> str:
    return _messages(value) if isinstance(value, list) else _text(value)


def _prompt(value: Any) -> str:
    return _messages(value) if isinstance(value, list) else _string(value)
