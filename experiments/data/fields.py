"""Fields: the names that records of many tools give their parts, read as one form.

`NAMES` has the fields that are obeyed, `FORMS` says which of them make a record, and `REFUSED` has those that
mean something that nothing here can do. `as_turns` knows the names of a message's parts. All other fields are
counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.lib.files import LineError

Record = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

NAMES: Mapping[str, tuple[str, ...]] = {  # the first one that holds something is read
    "messages": ("messages", "conversations", "conversation", "interactions"),
    "segments": ("segments",),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "response": ("response", "completion", "output", "answer"),
    "text": ("text", "content"),
    "chosen": ("chosen", "chosen_response", "preferred_output"),
    "rejected": ("rejected", "rejected_response", "rejected_messages", "non_preferred_output"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools", "available_tools"),
    "options": ("chat_template_kwargs",),
    "images": ("images", "image"),
    "only_last": ("only_last",),
}
FORMS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "samples": (
        ("messages", "response"), ("messages",), ("segments",), ("prompt", "response"), ("text",),
    ),
    "pairs": (
        ("prompt", "chosen", "rejected"), ("messages", "chosen", "rejected"), ("messages", "rejected"),
        ("chosen", "rejected"),
    ),
    "prompts": (("messages",), ("prompt",), ("text",)),
}  # fmt: skip
# Rewards compare answers with these.
REFERENCES = (*NAMES["response"], "solution", "ground_truth", "reference_answer")
KNOWN = {
    "samples": "'messages', 'prompt' and 'response', 'instruction' and 'output', 'text'",
    "pairs": "'prompt', 'chosen' and 'rejected'; 'messages' and 'rejected_response'",
    "prompts": "'messages', 'prompt', 'instruction', 'question', 'text'",
}
CALLS = "write it as tools and tool_calls"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("videos", "video", "audios", "audio"), "models here read texts and images alone"),
    "objects": "boxes of images are not read; write the coordinates into the texts",
    **dict.fromkeys(
        ("rejected_images", "rejected_videos", "rejected_audios", "rejected_tools"),
        "both answers of a pair are to one prompt",
    ),
    **dict.fromkeys(("functions", "function_call"), CALLS),
}
# These say how much a record counts. A reward may read them, but no other objective can.
COUNTS = ("weight", "train", "loss", "loss_weight", "sample_weight")
WANTED = ("label", "kto_tag")  # true or false, about one answer alone (KTO)
PARTS_OF_A_QUESTION = ("context", "article", "passage", "choices")

# Fields of a message.
LEARNED = ("weight", "train", "training", "loss", "loss_scale")  # 0 or 1, false or true
DETAIL = "train_detail"  # says which of its characters are learned
OF_ANY_ROLE = ("train", "training")  # the others of `LEARNED` are about an assistant's messages alone
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # an assistant writes these first
OF_A_MESSAGE = ("role", "content", "tool_calls", *LEARNED, DETAIL)
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "tool_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLING = ("function_call", "tool_call")  # roles whose content is the JSON of a call
TURNS = ("user", "assistant")


@dataclass(frozen=True)
class Exchange:
    """The content of a record: a question and the answers to it.

    Args:
        prompt: a text or messages, which are not learned; None if nothing is asked.
        answers: texts or messages, which are learned. A pair has two of them, and a prompt may have none.
        learns_prompt: whether the words of assistants in the prompt are learned, too.
        tools: JSON schemas that the chat template is shown.
        options: variables of the chat template, by name.
        images: the images as the record lists them.
        segments: texts without a template, and whether each is learned.
        unread: fields that nothing reads.
    """

    prompt: str | list[Any] | None = None
    answers: tuple[str | list[Any], ...] = ()
    learns_prompt: bool = False
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    images: Any = None
    segments: tuple[tuple[str, bool], ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Tell whether the chat template writes it."""
        return bool(self.tools or self.options) or any(
            isinstance(p, list) for p in (self.prompt, *self.answers)
        )


def read(record: Record, kind: str) -> Exchange:
    """Read a record of any of the forms that `kind` ("samples", "pairs", "prompts") has.

    Raises:
        LineError: it has none of the forms, or a field has a wrong value or a meaning that cannot be obeyed.
    """
    # Find out which form the record has, and what it calls the parts of it.
    whole = record
    record = without_nulls(_unwrap(record))
    _refuse_fields(record, kind)
    names = _name_parts(record)
    form = _find_form(record, names, kind)
    if form is None:
        raise LineError(_describe_unknown(whole, kind))
    value = {part: record[name] for part, name in names.items()}
    used = {
        names[part] for part in (*form, "system", "history", "tools", "options", "images") if part in names
    }

    # Read what may be beside any form: tools and options for the template, and a system's text and a history,
    # which begin the conversation.
    value["tools"], value["options"] = _decode(value.get("tools")), _decode(value.get("options"))
    if isinstance(value["tools"], list):
        value["tools"] = list(map(_decode, value["tools"]))
    checks = {
        "tools": _check_tools, "options": _check_options, "system": _check_string, "history": _check_history,
    }  # fmt: skip
    present = [part for part in checks if part in names]
    check({names[p]: value[p] for p in present}, **{names[p]: checks[p] for p in present})
    system, history = value.get("system") or "", value.get("history") or []
    before = [{"role": "system", "content": system}] if system.strip() else []
    before += [{"role": r, "content": said} for pair in history for r, said in zip(TURNS, pair, strict=True)]

    # Check the parts of the form. Errors call them by the names that they have in the record.
    is_chat = bool(before or value["tools"] or value["options"] or value.get("images"))
    said = {part: as_turns(value[part], names[part]) for part in form}
    if "prompt" in form:
        said["prompt"] = _join_prompt(record, names["prompt"], said["prompt"], is_chat, used)
    check({names[p]: said[p] for p in form}, **{names[p]: _choose_check(p, names[p], kind) for p in form})

    # Divide them into a prompt and the answers to it.
    segments = ()
    if form == ("segments",):
        segments = tuple((part["text"], bool(part["label"])) for part in said["segments"])
    prompt, answers = _divide(record, form, said, names, kind)
    if "only_last" in record and answers and isinstance(answers[0], list) and kind == "samples":
        used.add("only_last")
        if record["only_last"]:
            answers = (_learn_last_only(answers[0]),)

    if kind == "samples":
        _refuse_other_forms(record, names, form, answers)

    # A text alone and segments have no turns, so nothing would show a system's text, a history, tools or
    # options.
    extra = next(
        (names[p] for p in ("system", "history", "tools", "options") if p in names and value[p]), None
    )
    has_turns = prompt is not None or (answers and isinstance(answers[0], list))
    if extra and not has_turns:
        raise LineError(
            f"{extra}: is obeyed beside messages, or a prompt and its response, and not beside {form[0]}"
        )

    # Put all of it together.
    # A history is learned beside a prompt that is a text, as in LLaMA-Factory and ms-swift.
    learns = bool(history) and isinstance(prompt, str)
    if before and prompt is None:
        answers = (_put_in_front(before, answers[0]),)
    elif before:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        prompt = _put_in_front(before, prompt)
    unread = tuple(name for name in record if name not in used and not is_nothing(record[name]))
    return Exchange(
        prompt, answers, learns and kind == "samples", value["tools"] or None, value["options"] or {},
        value.get("images"), segments, unread,
    )  # fmt: skip


def _divide(
    record: Record, form: Sequence[str], said: Mapping[str, Any], names: Mapping[str, str], kind: str
) -> tuple[Any, tuple[Any, ...]]:
    """Divide the parts of a record into a prompt, which may be None, and the answers to it.

    Args:
        said: the parts of the form, which are checked.
        names: the names of parts in the record.

    Raises:
        LineError: nothing is asked, a chosen answer is no assistant's, or the answers of a pair are equal or
            have no common beginning.
    """
    prompt, answers = said.get("prompt"), ()
    if kind == "samples" and form[0] in ("messages", "text"):
        answers = (said[form[0]],)
        if "response" in form:  # it answers the last message, which is not an assistant's
            response = said["response"]
            if isinstance(response, str):
                response = [{"role": "assistant", "content": response}]
            answers = ([*said["messages"], *response],)
    elif kind == "prompts":  # rewards compare with an answer in another field, or in the last message
        prompt, reference = said.get(form[0]), _find_reference(record)
        if form == ("messages",) and _says(prompt[-1], "assistant"):
            prompt, reference = prompt[:-1], reference or words_of(prompt[-1])
        if not prompt:
            raise LineError(f"{names[form[0]]}: there is no message that asks for an answer")
        answers = (reference,) if reference else ()
    elif form == ("messages", "rejected"):
        prompt, chosen = said["messages"][:-1], said["messages"][-1:]
        if not prompt or not _says(chosen[0], "assistant"):
            raise LineError(
                f"{names['messages']}: expected a prompt, and an assistant's message as its chosen answer"
            )
        answers = (chosen, said["rejected"])
    elif kind == "pairs":
        prompt = said.get("messages", prompt)
        answers = (said["chosen"], said["rejected"])
        if answers[0] == answers[1]:
            raise LineError("chosen and rejected are the same")
        if prompt is None:
            prompt, *answers = _split_common_beginning(*answers)
    elif "response" in form:
        answers = (said["response"],)
    return prompt, tuple(answers)


def kinds_of(record: Record) -> tuple[str, ...]:
    """Return the kinds of data of which a record has a form, the likeliest first; "answers" for KTO's."""
    record = without_nulls(_unwrap(record))
    names = _name_parts(record)
    if "response" in names and any(isinstance(record.get(name), bool) for name in WANTED):
        return ("answers",)
    kinds = [kind for kind in ("pairs", "samples", "prompts") if _find_form(record, names, kind)]
    # Messages without an answer have the form of samples, but nothing in them is learned.
    turns = as_turns(record.get(names.get("messages", "")), names.get("messages", ""))
    is_unanswered = isinstance(turns, list) and not any(_says(turn, "assistant") for turn in turns)
    if is_unanswered and "response" not in names:
        kinds = [kind for kind in kinds if kind != "samples"]
    return tuple(kinds)


def read_learned(message: Mapping[str, Any]) -> bool | list[Mapping[str, Any]]:
    """Return whether a message is learned, or which of its characters are.

    Raises:
        LineError: the message contradicts itself, or says something between yes and no.
    """
    # Weights and flags have to be 0 or 1, and to agree with each other.
    role = message.get("role")
    said = {name: message[name] for name in LEARNED if message.get(name) is not None}
    if wrong := [f"{name}={value!r}" for name, value in said.items() if value not in (0, 1)]:
        raise LineError(
            f"{', '.join(wrong)}: expected 0 or 1, false or true; a part of a weight cannot be given"
        )
    if len(set(map(bool, said.values()))) > 1:
        raise LineError(f"{' and '.join(said)} say different things")
    # Spans of characters override what is said of the whole message.
    if detail := message.get(DETAIL):
        has_objects = isinstance(detail, list) and all(isinstance(part, Mapping) for part in detail)
        needed = {"begin_offset", "end_offset", "train"}
        if not has_objects or not all(needed <= part.keys() for part in detail):
            raise LineError(f"{DETAIL}: expected a list of objects with begin_offset, end_offset and train")
        content = message.get("content")
        if not isinstance(content, str):
            raise LineError(f"{DETAIL}: is of a message whose content is a text")
        for part in detail:
            begin, end, train = (part[name] for name in ("begin_offset", "end_offset", "train"))
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(content):
                raise LineError(
                    f"{DETAIL}: begin_offset={begin!r}, end_offset={end!r}: expected whole numbers, the "
                    f"second not below the first, from 0 to the content's length, {len(content)}"
                )
            if not isinstance(train, bool):
                raise LineError(f"{DETAIL}: train={train!r}: expected true or false")
        return detail
    # Assistants are learned unless a field says otherwise, and others only if one says so.
    if role != "assistant":
        return any(value for name, value in said.items() if name in OF_ANY_ROLE)
    return all(said.values())


# ------------------------------------------------------------------ turns


def as_turns(value: Any, name: str) -> Any:
    """Return messages with `role` and `content`, whatever they call these. Other values stay as they are.

    Raises:
        LineError: a message that calls a tool holds no JSON of the call.
    """
    if isinstance(value, Mapping) and name != "prompt":
        value = [value]
    if not isinstance(value, list) or name == "segments":
        return value
    turns: list[Any] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            turns.append(message)
            continue
        # The role is named, is a flag, or is the key of what is said.
        message = without_nulls(message)
        role = message.get("role", message.get("from"))
        if role is None and "is_user" in message:
            role = "user" if message["is_user"] else "assistant"
        if role is None and "human" in message:  # a question and its answer at once
            both = {"user": message.get("human"), "assistant": message.get("assistant")}
            turns += [{"role": r, "content": said} for r, said in both.items() if said is not None]
            continue
        # All other fields are kept.
        content = next((message[n] for n in ("content", "value", "text") if n in message), None)
        others = {n: v for n, v in message.items() if n not in ("role", "from", "is_user", "value", "text")}
        if isinstance(role, str):
            role = role.strip().lower()
        turn = {"role": ROLES.get(role, role) if isinstance(role, str) else role, **others}
        if "content" not in turn and content is not None:
            turn["content"] = content
        # The content of such a role is the JSON of one call, or of several.
        if role in CALLING:
            try:
                calls = json.loads(content)
                if not isinstance(calls, list):
                    calls = [calls]
                calls = [{"type": "function", "function": dict(call)} for call in calls]
            except (TypeError, ValueError):
                raise LineError(
                    f"{name}: [{number}]: expected the JSON of a call, with name and arguments"
                ) from None
            # Calls that follow each other or an assistant's words belong to one message.
            if turns and isinstance(turns[-1], Mapping) and _says(turns[-1], "assistant"):
                last = turns.pop()
                turn = {**turn, **last, "tool_calls": [*last.get("tool_calls", []), *calls]}
            else:
                turn = {**turn, "content": None, "tool_calls": calls}
        if turn.get("tool_calls") == []:
            del turn["tool_calls"]
        turns.append({"content": None, **turn})
    return turns


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of objects that are null, since a table gives each the fields of
    all."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def has_nulls(record: Record) -> bool:
    """Return whether a record's tools, or its calls, contain a null."""
    schemas = _collect_schemas(record)
    return without_nulls(schemas) != schemas


def has_objects(record: Record) -> bool:
    """Return whether a record's tools, or the arguments of a call, are objects and not JSON in a text."""
    schemas = []
    for value in _collect_schemas(record):
        schemas += value if isinstance(value, list) else [value]
    functions = [schema.get("function", schema) for schema in schemas if isinstance(schema, Mapping)]
    return any(isinstance(f, Mapping) and not isinstance(f.get("arguments"), str) for f in functions)


def _collect_schemas(record: Record) -> list[Any]:
    """Return a record's tools and the calls in its messages."""
    record = _unwrap(record)
    schemas = [record.get(name) for name in NAMES["tools"]]
    for part in ("messages", "prompt", "response", "chosen", "rejected"):
        for turns in (record.get(name) for name in NAMES[part]):
            if isinstance(turns, list):
                schemas += [turn.get("tool_calls") for turn in turns if isinstance(turn, Mapping)]
    return [schema for schema in schemas if schema is not None]


def _find_reference(record: Record) -> str:
    """Return the answer in a prompt's record as text, or "" if it has no words or number for one."""
    for value in map(record.get, REFERENCES):
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        # An answer may be a message, or a conversation that ends in it.
        turn = value[-1] if isinstance(value, list) and value else value
        if _says(turn, "assistant") and words_of(turn):
            return words_of(turn)
    return ""


def words_of(turn: Mapping[str, Any]) -> str:
    """Return the text of a message. If its content is a list of parts, their texts are joined."""
    content = turn.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _put_in_front(before: list[Any], turns: list[Any]) -> list[Any]:
    """Return messages with others in front of them.

    The result has at most one system's message, which is the first.

    Raises:
        LineError: both begin with a system's message, and the two differ.
    """
    if not _says(turns[0], "system") or not _says(before[0], "system"):
        start = 1 if _says(turns[0], "system") else 0
        return [*turns[:start], *before, *turns[start:]]
    if str(turns[0].get("content")).strip() != before[0]["content"].strip():
        raise LineError("system: the messages begin with another system's message; keep one of the two")
    return [*before, *turns[1:]]


def _learn_last_only(turns: list[Any]) -> list[Any]:
    """Return messages with all but the last one of an assistant marked as not learned."""
    last = max((n for n, turn in enumerate(turns) if _says(turn, "assistant")), default=-1)
    return [
        {**turn, "train": False} if n < last and _says(turn, "assistant") else turn
        for n, turn in enumerate(turns)
    ]


def _split_common_beginning(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the common beginning of two answers, and what follows it in each. Texts are divided between
    words.

    Raises:
        LineError: they have no common beginning.
    """
    both = list(enumerate(zip(chosen, rejected, strict=False)))
    alike = next((n for n, (one, other) in both if one != other), len(both))
    # A text is cut before the last blank that both have, so that each answer begins with a whole word.
    if isinstance(chosen, str):
        alike = max((n for n in range(alike) if chosen[n].isspace()), default=0)
    if not alike and isinstance(chosen, list):
        raise LineError("chosen and rejected: expected messages that both begin with, as the prompt")
    if not alike:
        what = "expected a list of messages, got str"
        raise LineError(f"chosen: {what}; rejected: {what} (or write a prompt, or texts that begin with one)")
    return chosen[:alike], chosen[alike:], rejected[alike:]


def _says(turn: Any, role: str) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == role


# ------------------------------------------------------------------ forms


def _unwrap(record: Record) -> Record:
    """Return a record with the fields of its object `input` beside the others, as OpenAI's preferences have
    it."""
    inner = record.get("input")
    if not isinstance(inner, Mapping) or "messages" not in inner:
        return record
    # Whether a model may call several tools at once is a setting of a request, and says nothing of the data.
    unwrapped = {name: value for name, value in inner.items() if name != "parallel_tool_calls"}
    return {**unwrapped, **{name: value for name, value in record.items() if name != "input"}}


def _name_parts(record: Record) -> dict[str, str]:
    """Return the name in a record of each part of `NAMES` that it has."""
    return {part: name for part, known in NAMES.items() if (name := _find_name(known, record))}


def _find_name(known: Sequence[str], record: Record) -> str | None:
    """Return the first of some names that holds something, or the first of those that are empty."""
    present = [name for name in known if record.get(name) is not None]
    filled = [name for name in present if not is_nothing(record[name])]
    return next(iter((*filled, *present)), None)


def _find_form(record: Record, names: Mapping[str, str], kind: str) -> tuple[str, ...] | None:
    """Return the parts of a record that make it one of `kind`."""
    forms = [form for form in FORMS[kind] if all(part in names for part in form)]
    turns = as_turns(record[names["messages"]], names["messages"]) if "messages" in names else None
    is_answered = isinstance(turns, list) and bool(turns) and _says(turns[-1], "assistant")
    # Beside messages that end in an answer, chosen and rejected are whole conversations, too.
    if is_answered and ("messages", "chosen", "rejected") in forms:
        forms = [form for form in forms if form[0] != "messages"]
    # A response answers messages only if they ask.
    if is_answered or not turns:
        forms = [form for form in forms if form != ("messages", "response")]
    # If there are several, the first with the fewest empty parts counts.
    return min(forms, key=lambda form: sum(is_nothing(record[names[p]]) for p in form), default=None)


def _refuse_other_forms(
    record: Record, names: Mapping[str, str], form: Sequence[str], answers: Sequence[str | list[Any]]
) -> None:
    """Refuse a record that says something else in another form, since one of the two would be lost.

    An `answer` beside messages is for rewards to compare with, and may be in other words.
    """
    answer = answers[0] if answers else ""
    learned = answer if isinstance(answer, str) else words_of(answer[-1])
    for other in FORMS["samples"]:
        field = names.get(other[-1], "")
        if set(other) <= set(form) or not set(other) <= names.keys() or field in ("", "answer"):
            continue
        # Only texts can be compared with what is learned.
        said = record[field]
        if (
            other in (("messages", "response"), ("segments",))
            or not isinstance(said, str)
            or not said.strip()
        ):
            continue
        # One may say more than the other, such as a text with the prompt in it.
        if not learned.strip() or (said.strip() not in learned and learned.strip() not in said):
            both = " and ".join(names[part] for part in form)
            raise LineError(
                f"{both}; {' and '.join(names[p] for p in other)}: say different things; keep one"
            )


def _describe_unknown(record: Record, kind: str) -> str:
    """Say what a record of no form lacks."""
    # Unlike in `_find_name`, a null counts, since the error is about it.
    names = {}
    for part, known in NAMES.items():
        present = [name for name in known if name in record]
        if present:
            names[part] = present[0]
    form = next((f for f in FORMS[kind] if all(part in names for part in f)), None)
    if form is None and kind == "pairs" and {"chosen", "rejected"} & names.keys():
        form = ("chosen", "rejected")
    if form is not None:  # all of its fields are there, but some are null
        named = {names.get(part, part): record.get(names.get(part)) for part in form}
        try:
            check(named, **{names.get(p, p): _choose_check(p, names.get(p, p), kind) for p in form})
        except LineError as error:
            return str(error)
    return f"has none of {KNOWN[kind]}; it has {', '.join(map(repr, record)) or 'no fields'}"


def _refuse_fields(record: Record, kind: str) -> None:
    """Refuse fields whose meaning cannot be obeyed, all of them in one error."""
    wrong = {name: why for name, why in REFUSED.items() if not is_nothing(record.get(name))}
    # A reward may read weights and labels, but no loss obeys them.
    if kind != "prompts":
        why = "says how much a record counts, which cannot be obeyed; leave records out, or repeat them"
        wrong |= dict.fromkeys(find_counts(record), why)
        why = "says whether one answer alone is wanted (KTO), which no objective here learns from"
        wrong |= {name: why for name in WANTED if isinstance(record.get(name), bool)}
    if kind == "pairs" and not is_nothing(record.get(_find_name(NAMES["images"], record) or "")):
        wrong[_find_name(NAMES["images"], record)] = "are learned with objective=sft alone"
    # A question's context in a field of its own would be lost.
    asked = _find_name(NAMES["prompt"], record)
    if asked and is_nothing(record.get(_find_name(NAMES["messages"], record) or "")):
        why = "is no part of the prompt here; write all of it into one field, prompt, and leave this one out"
        parts = PARTS_OF_A_QUESTION if kind != "prompts" or asked == "question" else ()
        if asked == "instruction" and is_nothing(record.get("input")):  # in Dolly's the context is the input
            parts = tuple(name for name in parts if name != "context")
        wrong |= {name: why for name in parts if not is_nothing(record.get(name))}
    if wrong:
        raise LineError("; ".join(f"{name}: {why}" for name, why in wrong.items()))


def _join_prompt(record: Record, name: str, prompt: Any, is_chat: bool, used: set[str]) -> Any:
    """Return an instruction with its input, which Dolly calls context. Prompts of other names have none.

    Args:
        name: the field of the prompt.
        used: the fields that are read, to which that of the input is added.
    """
    if "instruction" not in record or name not in ("instruction", "input"):
        return prompt
    if name == "input":  # the instruction is empty
        more = ""
        check(record, input=_check_text)
    else:
        second = "context" if is_nothing(record.get("input")) else "input"
        more = record.get(second) or ""
        used.add(second)
        check({name: prompt, second: more}, **{name: _check_text, second: _check_string})
    # In a chat the template ends the question; a text alone needs a blank line before the answer.
    if is_chat:
        return "\n".join(part for part in (prompt, more) if part)
    return "".join(f"{part}\n\n" for part in (prompt, more) if part)


def find_counts(record: Record) -> list[str]:
    """Return the fields of a record that say how much it counts, but for those that say 1."""
    return [n for n in COUNTS if n in record and record[n] is not True and record[n] not in (1, [], "")]


def is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _decode(value: Any) -> Any:
    """Return the value of a text of JSON, and other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


# ------------------------------------------------------------------ checks


def check(record: Record, **fields: Callable[[Any], str]) -> None:
    """Check fields of a record.

    Args:
        fields: for each name a function that says what is wrong with the value, or "" if nothing is.

    Raises:
        LineError: all that is wrong with any of them.
    """
    faults = {name: find_fault(record.get(name)) for name, find_fault in fields.items()}
    wrong = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    if wrong:
        raise LineError("; ".join(wrong))


def _choose_check(part: str, name: str, kind: str) -> Callable[[Any], str]:
    """Return the function for `check` that says what is wrong with a part of a form."""
    if part == "messages" or (part in ("chosen", "rejected") and name == "messages"):
        return _check_messages
    if part == "prompt":
        return _check_prompt if name == "prompt" and kind != "prompts" else _check_said
    return {"text": _check_text, "segments": _check_segments}.get(part, _check_said)


# Each of these functions returns what is wrong with a value, or "" if nothing is.


def _check_string(value: Any) -> str:
    if not isinstance(value, str):
        return f"expected a text, got {'null' if value is None else type(value).__name__}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    return ""


def _check_text(value: Any) -> str:
    return _check_string(value) or ("" if value.strip() else "is empty")


def _check_messages(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, got {'an empty one' if value == [] else type(value).__name__}"
    return "; ".join(f"[{n}]: {why}" for n, message in enumerate(value) if (why := _check_message(message)))


def _check_message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return "expected an object with 'role' and 'content'"
    calls, content = message.get("tool_calls"), message.get("content")
    # What is learned has to say something, or to call a tool; others may be empty.
    check_content = _check_text if message.get("role") == "assistant" and not calls else _check_string
    if isinstance(content, list):
        if wrong := _check_parts(content):
            return f"content: {wrong}"
        content = "".join(part.get("text", " ") for part in content)
    # These are OpenAI's fields from before there were tools.
    old = [f"{name}: {CALLS}" for name in ("functions", "function_call") if message.get(name)]
    try:
        check(
            {**message, "content": "" if calls and content is None else content},
            role=_check_text,
            content=check_content,
        )
        read_learned(message)
    except LineError as error:
        return "; ".join([str(error), *old])
    return "; ".join(old) or ("" if calls is None else _check_calls(calls))


def _check_parts(value: list[Any]) -> str:
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and _check_string(part.get("text")):
            return f"a part's text: {_check_string(part.get('text'))}"
        if kind not in ("text", "image", "image_url"):
            return "expected a text, or parts of the types 'text' and 'image'"
    return ""


def _check_calls(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "tool_calls: expected a list of calls"
    functions = [call.get("function", call) if isinstance(call, Mapping) else None for call in value]
    if not all(isinstance(f, Mapping) and isinstance(f.get("name"), str) for f in functions):
        return "tool_calls: expected objects with a function, which has a name and arguments"
    if not all(isinstance(_decode(f.get("arguments")) or {}, Mapping) for f in functions):
        return "tool_calls: arguments: expected an object, or the JSON of one"
    return ""


def _check_segments(value: Any) -> str:
    has_objects = isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value)
    if not has_objects or any(
        _check_string(p.get("text")) or not isinstance(p.get("label"), bool) for p in value
    ):
        return "expected a list of objects with a text, and a label that is true or false"
    return ""


def _check_tools(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        return "expected a list of objects, or the JSON of one"
    functions = [tool.get("function", tool) for tool in value]
    are_named = all(isinstance(f, Mapping) and isinstance(f.get("name", ""), str) for f in functions)
    return "" if are_named else "expected objects with a function, which has a name"


def _check_options(value: Any) -> str:
    is_object = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if value is None or is_object:
        return ""
    return "expected an object: a value for each variable of the template"


def _check_history(value: Any) -> str:
    are_pairs = isinstance(value, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    )
    if not are_pairs or any(_check_string(said) for pair in value for said in pair):
        return "expected a list of pairs: what was asked, and what was answered"
    return ""


def _check_said(value: Any) -> str:
    return _check_messages(value) if isinstance(value, list) else _check_text(value)


def _check_prompt(value: Any) -> str:
    return _check_messages(value) if isinstance(value, list) else _check_string(value)
