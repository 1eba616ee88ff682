"""Conversations as tokens, by the chat template of transformers, and which tokens an assistant wrote."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np

from experiments.data.fields import DETAIL, LEARNED, OF_A_MESSAGE, THOUGHTS, Messages, read_learned
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.files import LineError

Sample = tuple[np.ndarray, np.ndarray]  # token ids (uint32), and whether each is learned (uint8)
Span = tuple[int, int]  # the first character of a part of a text, and the one after its last
MARKED = re.compile(r"\{%-?\s*generation\b")  # in a template that marks what an assistant writes
ALIASES = {"developer": "system", "function": "tool", "ipython": "tool"}  # for templates that lack the first
FUNCTION = '{"type": "function", "function": {"name": ...}}'
ASKS_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")  # in a template that knows empty contents


def encode_conversation(
    tokenizer: DirectoryTokenizer,
    messages: Messages,
    first: int = 0,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Sample:
    """Tokenise a conversation up to its last message that is an assistant's or is learned.

    The words of assistants from message `first` on are learned, unless a message says otherwise
    (`fields.read_learned`). Where a template has no `{% generation %}` marks, prefixes show which these are:
    a turn is what a rendering has more than the prompt that asked for it.

    Args:
        tools: JSON schemas that the template is shown.
        options: other variables of the template, by name.

    Raises:
        LineError: a message, tool or option spells a control token, the template refuses it or does not show
            all of it, or a rendering is not the beginning of the next one, so that it is unknown what a model
            would have been asked.
    """
    # What follows the last message that may be learned is left out.
    ends = [n for n, m in enumerate(messages) if m["role"] == "assistant" or (n >= first and read_learned(m))]
    messages = messages[: ends[-1] + 1]
    learns = [number >= first and read_learned(message) for number, message in enumerate(messages)]
    if not any(learns):
        raise LineError("no message is learned: their weight, train or loss say so")
    paths = pictures_in(tokenizer, messages)
    shown, variables = _fit_to_template(tokenizer, messages, tools, options)

    # A template without marks: prefixes of the text show what is learned.
    if not MARKED.search(tokenizer.hf.get_chat_template(tools=tools)):
        text = _render_text(tokenizer, shown, variables)
        spans = _find_learned_spans(tokenizer, shown, learns, variables, text)
        if paths:
            text, spans = tokenizer.images.expand(text, spans, paths)
        return encode_rendered(tokenizer, text, spans)

    # A template with marks: transformers returns the mask of all that assistants wrote.
    encoded = _render(
        tokenizer, shown, variables, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )  # fmt: skip
    ids, learned = (np.array(encoded[name]) for name in ("input_ids", "assistant_masks"))
    starts, stops = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
    # Assistants' messages before `first` belong to the prompt, so they are not learned.
    if first:
        number = next(n for n in range(first, len(shown)) if shown[n]["role"] == "assistant")
        prompt = _render_text(tokenizer, shown[:number], variables, ask=True)
        _check_prefix(_render_text(tokenizer, shown, variables).startswith(prompt), number)
        learned[starts < len(prompt)] = 0
    # A message may say otherwise than its role. Its tokens lie between the end of the rendering before it and
    # the end of the one that ends with it.
    for number, message in enumerate(shown):
        if number < first or learns[number] is (message["role"] == "assistant"):
            continue
        whole = _render_text(tokenizer, shown, variables)
        with_it = _render_text(tokenizer, shown[: number + 1], variables)
        start = len(_render_text(tokenizer, shown[:number], variables)) if number else 0
        _check_prefix(whole.startswith(with_it), number)
        learned[(stops > start) & (starts < len(with_it))] = 0
        only = [n == number and each for n, each in enumerate(learns)]
        for start, end in _find_learned_spans(tokenizer, shown, only, variables, whole):
            learned[(stops > start) & (starts < end)] = 1
    if not paths:
        return ids.astype(np.uint32), learned.astype(np.uint8)
    # Image tokens are expanded in the text, so what is learned is carried over by characters.
    spans = [(int(starts[n]), int(stops[n])) for n in np.flatnonzero(learned)]
    return encode_rendered(
        tokenizer, *tokenizer.images.expand(_render_text(tokenizer, shown, variables), spans, paths)
    )


def pictures_in(tokenizer: DirectoryTokenizer, messages: Messages) -> list[Any]:
    """Return the images of messages, in order.

    Raises:
        LineError: there are some, but the tokenizer's model does not see.
    """
    images = [part.get("image") for m in messages for part in parts(m) if part.get("type") == "image"]
    if images and tokenizer.images is None:
        raise LineError("has images, and the model's directory no image processor that is known here")
    return images


def parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message whose content is a list of them: texts and images."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def encode_rendered(tokenizer: DirectoryTokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
    """Tokenise a text that a chat template has made. Its control tokens are read, and nothing is added.

    Args:
        spans: the parts of the text that are learned.
    """
    encoded = tokenizer.hf(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, learned = np.array(encoded["input_ids"]), np.zeros(len(encoded["input_ids"]))
    starts, ends = np.array(encoded["offset_mapping"]).T
    for start, end in spans:
        # A token that is partly inside a span is learned.
        learned[(ends > start) & (starts < end)] = 1
    return ids.astype(np.uint32), learned.astype(np.uint8)


def is_rendered(tokenizer: DirectoryTokenizer, *texts: Any) -> bool:
    """Return whether any of these texts spells a control token of the tokenizer."""
    return any(isinstance(text, str) and _make_control_pattern(tokenizer).search(text) for text in texts)


def encode_chat_prompt(
    tokenizer: DirectoryTokenizer,
    messages: Messages,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    pictures: Sequence[Any] | None = None,
) -> list[int]:
    """Return the tokens of the prompt to which a model answers `messages`.

    Args:
        pictures: the images of the parts of the type "image", in order; by default those that the parts name.

    Raises:
        LineError: the conversation cannot be shown, for one of the reasons of `encode_conversation`.
    """
    named = pictures_in(tokenizer, messages)
    shown, variables = _fit_to_template(tokenizer, messages, tools, options)
    if not named:
        return _render(
            tokenizer, shown, variables, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    text = _render_text(tokenizer, shown, variables, ask=True)
    expanded, _ = tokenizer.images.expand(text, [], named if pictures is None else pictures)
    return encode_rendered(tokenizer, expanded, [])[0].tolist()


def hidden_fields(tokenizer: DirectoryTokenizer, messages: Messages, tools: list[Any] | None) -> set[str]:
    """Return the fields of messages that the chat template does not mention.

    Raises:
        LineError: an assistant's thoughts are among them.
    """
    template = tokenizer.hf.get_chat_template(tools=tools)
    hidden = set()
    for message in messages:
        for name, value in message.items():
            is_extra = value not in (None, "", []) and name not in OF_A_MESSAGE
            if is_extra and not re.search(rf"\b{re.escape(name)}\b", template):
                hidden.add(name)
    if thoughts := sorted(hidden & set(THOUGHTS)):
        raise LineError(
            f"messages: {' and '.join(thoughts)}: the chat template does not show it (write it into content, "
            "or take a template that does)"
        )
    return hidden


# ------------------------------------------------------------------ what a template is shown


def _fit_to_template(
    tokenizer: DirectoryTokenizer,
    messages: Messages,
    tools: list[Any] | None,
    options: Mapping[str, Any] | None,
) -> tuple[Messages, dict[str, Any]]:
    """Return messages and variables as the chat template takes them.

    The fields that say what is learned are left out, and the arguments of calls are objects unless the
    template joins them to texts.

    Raises:
        LineError: the template does not show all of the conversation.
    """
    options = options or {}
    template = tokenizer.hf.get_chat_template(tools=tools)
    _check_controls(tokenizer, messages, tools or [], options)
    # A template ignores a variable that it does not name, without an error.
    has_calls = any(message.get("tool_calls") for message in messages)
    given = {"tools": bool(tools), "tool_calls": has_calls, **dict.fromkeys(options, True)}
    hidden = [
        n for n, is_given in given.items() if is_given and not re.search(rf"\b{re.escape(n)}\b", template)
    ]
    if hidden:
        raise LineError(f"the chat template does not show {' and '.join(hidden)} (take one that does)")
    # An option is passed as a keyword, which must not be one of the tokenizer's own.
    taken = {"messages", *inspect.signature(tokenizer.hf.apply_chat_template).parameters}
    if ours := sorted(options.keys() & taken):
        raise LineError(
            f"{' and '.join(ours)}: is an option of the tokenizer, and no variable of a chat template"
        )

    variables, left_out = {"tools": tools, **options}, {*LEARNED, DETAIL}
    shown = [{name: v for name, v in message.items() if name not in left_out} for message in messages]
    # Templates of models that see no images may know texts alone, so parts are joined.
    for message in shown:
        texts = parts(message)
        if texts and tokenizer.images is None and all(part.get("type") == "text" for part in texts):
            message["content"] = "".join(part["text"] for part in texts)

    # Messages are tried as they are written, and then as those templates take them that know fewer roles, or
    # that join the arguments of calls to texts. If all are refused, the error is that of the first try.
    refused, tried = [], []
    nulls = (None, "") if ASKS_NULL.search(template) else ("",)
    for null, as_text, roles in product(nulls, (False, True), ({}, ALIASES)):
        call = partial(_rewrite_call, as_text=as_text)
        turns = [_replace_calls({**m, "role": roles.get(m["role"], m["role"])}, call) for m in shown]
        turns = [{**m, "content": null if m.get("content") is None else m["content"]} for m in turns]
        if turns in tried:
            continue
        try:
            _check_shown(tokenizer, turns, variables)
        except LineError as error:
            refused.append(error)
            tried.append(turns)
        else:
            return turns, variables
    raise refused[0]


def _check_shown(tokenizer: DirectoryTokenizer, messages: Messages, variables: Mapping[str, Any]) -> None:
    """Check that a chat template shows everything.

    Marks replace each message's words and the names of calls and tools, and the rendered text has to contain
    all of them.

    Raises:
        LineError: some marks are missing, or the template refuses the conversation.
    """
    # If the template refuses the words themselves, its own error says so.
    _render_text(tokenizer, messages, variables)
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        # The number has a letter on both sides, so that mark 1 is not found in mark 11.
        name = f"x{len(marks)}x-stands-here"
        marks[name] = what
        return name

    def mark_name(function: Mapping[str, Any]) -> dict[str, Any]:
        inner = function.get("function", function)
        if not inner.get("name"):
            return dict(function)
        whole = {**inner, "name": mark(f"{inner['name']} (write tools and calls as {FUNCTION})")}
        return {**function, "function": whole} if "function" in function else whole

    # Replace all words and names by marks, each with a description for the error.
    turns = []
    for number, message in enumerate(messages):
        content = message["content"]
        beside = " beside a call" if message.get("tool_calls") else ""
        what = f"messages[{number}], what role {message['role']!r} says{beside}"
        if isinstance(content, str) and content.strip():
            content = mark(f"{what}, {content.strip()[-20:]!r}")
        elif isinstance(content, list):
            content = [
                {**part, "text": mark(what)} if part.get("type") == "text" and part["text"].strip() else part
                for part in content
            ]
        turns.append(_replace_calls({**message, "content": content}, mark_name))
    tools = variables.get("tools") and [mark_name(tool) for tool in variables["tools"]]

    # Every mark has to be in the rendered text.
    text = _render_text(tokenizer, turns, {**variables, "tools": tools})
    if missing := [what for name, what in marks.items() if name not in text]:
        raise LineError(
            f"the chat template shows nothing of {'; '.join(missing[:3])} (write it in a way that the "
            "template knows, or take a template that shows it)"
        )


def _replace_calls(message: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message in which a function has replaced each of its calls."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(function, calls))} if calls else dict(message)


def _rewrite_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, or as the JSON of it."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_text:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    else:
        arguments = arguments or {}
    whole = {**function, "arguments": arguments}
    return {**call, "function": whole} if "function" in call else whole


# ------------------------------------------------------------------ what is learned of a text


def _find_learned_spans(
    tokenizer: DirectoryTokenizer,
    messages: Messages,
    learns: Sequence[bool | list[Mapping[str, Any]]],
    variables: Mapping[str, Any],
    whole: str,
) -> list[Span]:
    """Find the parts of a conversation's text that are learned.

    They are the words of those messages that are learned, with the tokens that end them.

    Args:
        learns: for each message whether it is learned, or which of its characters are (`train_detail`).
        whole: the text of all messages.

    Raises:
        LineError: a rendering is not the beginning of the next one, a message cannot be found in its own, or
            the first message is an assistant's.
    """
    spans: list[Span] = []
    full = ""  # the text up to the last message that was looked at
    for number, learned in enumerate(learns):
        if not learned:
            continue
        message, content = messages[number], messages[number].get("content")
        is_assistant = message["role"] == "assistant"
        if is_assistant and not number:
            raise LineError(
                'messages[0] is an assistant\'s, so there is no prompt that asks for it (write {"text": ...} '
                "where there is none)"
            )
        # An assistant's turn lies between the prompt that asks for it and the end of a rendering up to it.
        prompt = _render_text(tokenizer, messages[:number], variables, ask=is_assistant) if number else ""
        before, full = full, _render_text(tokenizer, messages[: number + 1], variables)
        _check_prefix(prompt.startswith(before) and full.startswith(prompt), number)
        start, end = len(prompt), _find_end(tokenizer, full, len(prompt))
        if is_assistant and learned is True:
            spans.append((start, end))
            continue
        # Otherwise only the content is learned. A rendering with a mark in its place shows where it is.
        mark = f"here-{number}-stands-what-was-said"
        marked = _render_text(tokenizer, [*messages[:number], {**message, "content": mark}], variables)
        at = marked.find(mark)
        words = content if isinstance(content, str) and full.startswith(content, at) else str(content).strip()
        if at < 0 or marked[:at] + words + marked[at + len(mark) :] != full:
            raise LineError(
                f"messages[{number}]: train: the chat template does not write its content as it is"
            )
        if learned is not True:
            # Offsets count from the content's first character, even if the template strips it; `end_offset`
            # is that of the last character which is learned.
            zero, end = at - str(content).find(words), at + len(words)
            spans += [
                (max(at, zero + d["begin_offset"]), min(end, zero + d["end_offset"] + 1))
                for d in learned
                if d["train"]
            ]
            continue
        # The end token right behind the content is learned, too, if the template writes one.
        stops, end = tokenizer.hf.convert_ids_to_tokens(list(tokenizer.stops)), at + len(words)
        spans.append((at, end + max((len(stop) for stop in stops if full.startswith(stop, end)), default=0)))
    _check_prefix(whole.startswith(full), len(messages) - 1)
    return spans


def _find_end(tokenizer: DirectoryTokenizer, text: str, start: int) -> int:
    """Return the end of an answer: that of its last end token, or of the text if it has none.

    What a template writes after it, such as a line break, is never generated.
    """
    ends = []
    for stop in tokenizer.hf.convert_ids_to_tokens(list(tokenizer.stops)):
        at = text.rfind(stop, start)
        if at >= 0:
            ends.append(at + len(stop))
    return max(ends, default=len(text))


def _check_prefix(is_prefix: bool, number: int) -> None:
    if not is_prefix:
        raise LineError(
            f"the chat template writes what stands before messages[{number}] in another way than it asks for "
            "it, so the assistant's part is unknown (use prompt and response, or a template with "
            "{% generation %} marks)"
        )


def _render_text(
    tokenizer: DirectoryTokenizer, messages: Messages, variables: Mapping[str, Any], ask: bool = False
) -> str:
    """Return the text of messages; with `ask` the prompt that makes a model answer them."""
    return _render(tokenizer, messages, variables, add_generation_prompt=ask, tokenize=False)


def _render(
    tokenizer: DirectoryTokenizer, messages: Messages, variables: Mapping[str, Any], **options: Any
) -> Any:
    """Apply the chat template, and turn every error of it into a `LineError`."""
    try:
        return tokenizer.hf.apply_chat_template([dict(m) for m in messages], **variables, **options)
    except Exception as error:  # templates are programs: anything can come out of one
        raise LineError(f"the chat template refuses it ({type(error).__name__}: {error})") from error


def _check_controls(
    tokenizer: DirectoryTokenizer, messages: Messages, tools: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuse text that would become a control token, so that nobody ends a turn by writing how turns end."""
    pattern = _make_control_pattern(tokenizer)
    texts = {f"messages[{number}]": message for number, message in enumerate(messages)}
    texts |= {f"tools[{number}]": tool for number, tool in enumerate(tools)}
    texts |= {f"options.{name}": value for name, value in options.items()}
    for name, value in texts.items():
        # A call's arguments and a tool's schema are searched, too: JSON has all texts of a message.
        if found := pattern.search(json.dumps(value, ensure_ascii=False, default=str)):
            raise LineError(
                f"{name} spells the control token {found[0]!r} (write it otherwise; what a chat template has "
                "rendered goes into text, or prompt and response)"
            )


def _make_control_pattern(tokenizer: DirectoryTokenizer) -> re.Pattern[str]:
    """Return a pattern of the tokenizer's control tokens."""
    added = tokenizer.hf.added_tokens_decoder.values()
    return _compile_spelling(tuple(token.content for token in added if token.special))


@lru_cache(maxsize=8)
def _compile_spelling(texts: Sequence[str]) -> re.Pattern[str]:
    """Make a pattern that finds any of some texts, and nothing if there are none."""
    # The longest alternative is first, since the first that matches counts.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
