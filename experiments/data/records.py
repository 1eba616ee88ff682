"""Records: objects of data as samples of tokens, each of which is learned or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.chat import (
    Sample,
    encode_chat_prompt,
    encode_conversation,
    encode_rendered,
    is_rendered,
    parts,
)
from experiments.data.fields import DETAIL, LEARNED, Exchange, Record, read
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.files import LineError


def encode_sample(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Tokenise messages, a prompt and its response, or a text, as `encode` says."""
    return encode(read(record, "samples"), "samples", tokenizer)


def encode_pair(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Tokenise a prompt with a chosen and a rejected answer, as two samples.

    If there is no prompt, it is the common beginning of both answers.
    """
    return encode(read(record, "pairs"), "pairs", tokenizer)


def encode_prompt(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Tokenise a prompt that is answered later, followed by the record's own answer if it has one."""
    return encode(read(record, "prompts"), "prompts", tokenizer)


KINDS: dict[str, Callable[[Record, DirectoryTokenizer], list[Sample]]] = {
    "samples": encode_sample, "pairs": encode_pair, "prompts": encode_prompt,
}  # fmt: skip


def encode(said: Exchange, kind: str, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Tokenise the content of a record.

    Texts are taken as they are. Those that spell a control token of the tokenizer were written by a chat
    template (see `chat.encode_rendered`). If any part is messages, or there are tools or a system's text,
    texts are messages of a user and an assistant, and the chat template writes all of it.

    Raises:
        LineError: the chat template cannot show it, or the answers of a pair are the same or have different
            prompts.
    """
    turns = [turn for part in (said.prompt, *said.answers) if isinstance(part, list) for turn in part]
    if kind == "pairs" and any(part.get("type") != "text" for turn in turns for part in parts(turn)):
        raise LineError("images: are learned with objective=sft alone")
    # Segments are one text, of which some parts are learned.
    if said.segments:
        text, spans = "", []
        for part, is_learned in said.segments:
            if is_learned:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return [encode_rendered(tokenizer, text, spans)]
    if kind == "prompts":
        return [_encode_question(tokenizer, said)]

    # Answers belong to a chat, are a text without a prompt, follow a prompt that a template has rendered, or
    # follow a plain prompt.
    if said.is_chat:
        found = [_encode_chat(tokenizer, said, answer) for answer in said.answers]
    elif said.prompt is None:
        (text,) = said.answers
        if is_rendered(tokenizer, text):
            return [encode_rendered(tokenizer, text, [(0, len(text))])]
        return [_join(tokenizer.begin, [*tokenizer.encode(text), tokenizer.eos])]
    elif is_rendered(tokenizer, said.prompt, *said.answers):
        # A response that does not spell its end gets the usual one.
        end = tokenizer.hf.convert_ids_to_tokens(tokenizer.eos)
        texts = [said.prompt + each + ("" if is_rendered(tokenizer, each) else end) for each in said.answers]
        found = [encode_rendered(tokenizer, text, [(len(said.prompt), len(text))]) for text in texts]
    else:
        begin = [*tokenizer.begin, *tokenizer.encode(said.prompt)]
        found = [_join(begin, [*tokenizer.encode_after(each), tokenizer.eos]) for each in said.answers]

    # Both answers of a pair have to follow the same tokens.
    if kind == "pairs":
        prompts = [ids[: int(np.argmax(learned))].tolist() for ids, learned in found]
        if np.array_equal(found[0][0], found[1][0]):
            raise LineError("chosen and rejected are the same")
        if prompts[0] != prompts[1]:
            raise LineError("chosen and rejected answer different prompts")
    return found


def _encode_question(tokenizer: DirectoryTokenizer, said: Exchange) -> Sample:
    """Tokenise a prompt as a model is asked it, with the words of its answer behind it."""
    if said.is_chat:
        ids = encode_chat_prompt(tokenizer, _as_messages(said.prompt, "user"), said.tools, said.options)
    elif is_rendered(tokenizer, said.prompt):
        ids = encode_rendered(tokenizer, said.prompt, [])[0].tolist()
    else:
        ids = [*tokenizer.begin, *tokenizer.encode(said.prompt)]
    answer = []
    for words in said.answers:  # one, or none
        answer += [*tokenizer.encode_after(words), tokenizer.eos]
    return _join(ids, answer)


def row_of(record: Record, said: Exchange, tokenizer: DirectoryTokenizer) -> dict[str, Any]:
    """Return a prompt's record as rewards are given it.

    It has all of its fields, `response` with the words of its own answer or "", and `messages` with the
    question, which is None if that is a text that a chat template has rendered.
    """
    row = {name: value for name, value in record.items() if value is not None}
    is_text = isinstance(said.prompt, str) and not said.is_chat and is_rendered(tokenizer, said.prompt)
    hidden = {*LEARNED, DETAIL}
    turns = [{n: v for n, v in turn.items() if n not in hidden} for turn in _as_messages(said.prompt, "user")]
    return {**row, "response": "".join(said.answers), "messages": None if is_text else turns}


def last_number(text: str, whole: bool = False) -> float | None:
    """Return the last number of a text, or that after "####" if there is one, as in GSM8K's answers.

    Args:
        whole: whether nothing else may follow "####", as in a reference.

    >>> last_number("3 and then 4"), last_number("5 + 5 #### -$10"), last_number("#### x then 3")
    (4.0, -10.0, None)
    """
    _, mark, end = text.rpartition("####")
    end = end.strip()
    if not mark:
        numbers = list(re.finditer(NUMBER, text))
        found = numbers[-1] if numbers else None
    elif whole:
        found = re.fullmatch(NUMBER, end.rstrip("."))
    else:
        found = re.match(NUMBER, end)
    return None if found is None else float(re.sub(r"[$,]", "", found[0]))


def _need_response(row: Record) -> None:
    """Check that a prompt's row has an answer of its own."""
    if not str(row.get("response", "")).strip():
        raise LineError("has no response, which objective.reward compares answers with")


def _need_number(row: Record) -> None:
    """Check that a prompt's row has an answer of its own with a number in it."""
    _need_response(row)
    if last_number(row["response"], whole=True) is None:
        where = ' after "####"' if "####" in row["response"] else ""
        raise LineError(
            f"its response has no number{where}, which objective.reward=number compares answers with"
        )


NUMBER = r"(?:-?\$?|\$-)(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)"
NEEDS: Mapping[str, Callable[[Record], None]] = {"response": _need_response, "number": _need_number}


def _encode_chat(tokenizer: DirectoryTokenizer, said: Exchange, response: str | list[Any]) -> Sample:
    """Tokenise messages, and a response to them that may begin with them.

    One of the two may lack the system's message in front.

    Raises:
        LineError: the response begins with another prompt, or no assistant's message is learned.
    """
    before = [] if said.prompt is None else _as_messages(said.prompt, "user")
    answer = _as_messages(response, "assistant")
    whole = [*before, *answer]
    first = 0 if said.learns_prompt else len(before)
    if before:
        # A response may begin with the whole prompt, with a system's message and the prompt, or with the
        # prompt without its system's message.
        system = [turn for turn in before[:1] if turn["role"] == "system"]
        for start, asked in ((0, before), (1, before), (0, before[len(system) :])):
            stop = start + len(asked)
            same = [_comparable_turn(turn) for turn in answer[start:stop]] == [
                _comparable_turn(turn) for turn in asked
            ]
            if asked and same:
                whole = answer if len(asked) == len(before) else [*system, *answer]
                first = len(whole) - len(answer) + stop
                break
        else:
            if before[-1]["role"] == answer[0]["role"] == "user":
                raise LineError("a response begins with a user's message that is not the prompt")
    if not any(message["role"] == "assistant" for message in whole[first:]):
        raise LineError("there is no assistant's message to learn")
    return encode_conversation(tokenizer, whole, first, said.tools, said.options)


def _as_messages(said: str | list[Any], role: str) -> list[Any]:
    """Return messages, or a text as a message of a role."""
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def _comparable_turn(message: Mapping[str, Any]) -> tuple[str, Any]:
    """Return who says what, without blanks around it and without other fields."""
    content = message.get("content") or ""
    return message["role"], content.strip() if isinstance(content, str) else content


def _join(asked: Sequence[int], learned: list[int]) -> Sample:
    """Return tokens of which the first ones are not learned, and the others are."""
    mask = np.repeat(np.array([0, 1], np.uint8), [len(asked), len(learned)])
    return np.array([*asked, *learned], np.uint32), mask


# ------------------------------------------------------------------ images

MARK = "<image>"  # in texts of records with a list of images
PLACES = ("image", "path", "url", "image_url")  # keys of an image among a message's parts


def with_images(said: Exchange, root: Path) -> tuple[Exchange, list[str]]:
    """Return the content of a record with its images as parts of messages, and their paths in order.

    A record may have a list of `images` (or one `image`). They replace "<image>" in its texts, or precede the
    first message of a user if no text has it. A record may instead have parts `{"type": "image", "image":
    path}` in messages.

    Args:
        root: the folder to which paths are relative.

    Raises:
        LineError: images are no paths, or not as many as the texts say.
    """
    listed = [said.images] if isinstance(said.images, (str, Mapping)) else said.images or []
    if not isinstance(listed, list):
        raise LineError(f"images: expected a list of paths, got {type(listed).__name__}")
    if not listed and not said.is_chat:
        return said, []
    if said.segments or (said.prompt is None and not said.is_chat):
        raise LineError("images: are of messages, or of a prompt and its response")
    asked = [] if said.prompt is None else _as_messages(said.prompt, "user")
    messages = [dict(m) for m in (*asked, *_as_messages(said.answers[0], "assistant"))]

    # Each image has a mark in a text; if no text has one, all are put before the first message of a user.
    marks = sum(m["content"].count(MARK) for m in messages if isinstance(m.get("content"), str))
    if listed and not marks:
        first = next((m for m in messages if m.get("role") == "user"), messages[0])
        if not isinstance(first.get("content"), str):
            raise LineError("images: stand beside parts of messages; write them into the parts")
        first["content"] = f"{MARK * len(listed)}{first['content']}"
    elif listed and marks != len(listed):
        raise LineError(f"images: has {len(listed)}, and {MARK} stands {marks} times in its texts")

    # Texts with marks become lists of parts, and the paths in parts are made absolute.
    queue, paths = iter(listed), []
    for message in messages:
        content = message.get("content")
        if listed and isinstance(content, str) and MARK in content:
            first_text, *texts = content.split(MARK)
            content = [{"type": "text", "text": first_text}]
            for text in texts:
                content += [{"type": "image", "image": next(queue)}, {"type": "text", "text": text}]
            content = [part for part in content if part["type"] == "image" or part["text"]]
        if isinstance(content, list):
            content = list(content)  # the record's own list stays as it is
            for n, part in enumerate(content):
                if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                    content[n] = {"type": "image", "image": _find_path(part, root)}
                    paths.append(content[n]["image"])
        message["content"] = content
    if not paths:
        return said, []
    prompt, answer = messages[: len(asked)], messages[len(asked) :]
    return replace(said, prompt=None if said.prompt is None else prompt, answers=(answer,)), paths


def images_in(said: Exchange) -> list[str]:
    """Return the images of a record as it writes them, each cut to 200 characters."""
    listed = said.images or []
    if not isinstance(listed, list):
        listed = [listed]
    turns = [turn for part in (said.prompt, *said.answers) if isinstance(part, list) for turn in part]
    in_turns = [part for turn in turns for part in parts(turn) if part.get("type") != "text"]
    return [f"{image!s:.200}" for image in (*listed, *in_turns)]


def _find_path(image: Any, root: Path) -> str:
    """Return the absolute path of an image, which may be nested in objects."""
    named = image
    while isinstance(named, Mapping):  # {"type": "image_url", "image_url": {"url": ...}}
        path = named.get("path")
        # A table may hold bytes with the path of their file, which is enough if the file is still there.
        if named.get("bytes") is not None and not (isinstance(path, str) and (root / path).is_file()):
            raise LineError(
                "images: bytes are not read; save each as a file, and write its path in their place"
            )
        named = next((named[n] for n in PLACES if named.get(n)), None)
    if not isinstance(named, str) or not named or "://" in named or named.startswith("data:"):
        raise LineError(f"images: expected the path of a file, got {str(named)[:60]!r}")
    return str(root / named)
