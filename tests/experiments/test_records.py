"""Records of every documented form: what is asked, what is learned, and what cannot be obeyed."""

from __future__ import annotations

import json

import pytest
from errors import raises
from made_data import ASSISTANT, MARKED, SYSTEM, USER

from experiments.data.fields import COUNTS, NAMES, REFUSED
from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.records import KINDS, NEEDS, last_number
from experiments.data.tokenizer import open_directory
from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError
from experiments.tuning.dataset import mark_learned

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}\n{% endif %}{% if style is defined %}S{{ style }}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{% else %}{{ m.content }}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def chat(directory):
    return open_directory(directory(tokenizer_config={"eos_token": "</s>", "chat_template": TEMPLATE}))


def written(tokenizer, record, kind="samples"):
    """Return what is made of a record; what is learned stands between « and »."""
    return [mark_learned(tokenizer, *each) for each in KINDS[kind](record, tokenizer)]


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def of(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [of("add", a=1)]}
AS_TEXT = {**CALL, "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
SHOWN = f"T{json.dumps([ADD])}\n"
CALLED = f'{SHOWN}u:hi</s>a:«add({{"a": 1}})</s>»t:2</s>a:«two</s>»'
TALK = "u:hi</s>a:«yo</s>»"
DOCUMENTED = {
    # OpenAI
    "openai": ({"messages": [SYSTEM, USER, ASSISTANT]}, f"s:Be brief.</s>{TALK}"),
    "openai weights": (
        {"messages": [USER, said("no", weight=0), user("b"), said("right", weight=1)]},
        "u:hi</s>a:no</s>u:b</s>a:«right</s>»",
    ),
    "openai tools": (
        {"messages": [USER, AS_TEXT, {"role": "tool", "tool_call_id": "1", "content": "2"}, said("two")],
         "tools": [ADD], "parallel_tool_calls": False},
        CALLED,
    ),
    "openai completion": ({"prompt": "a", "completion": "b"}, "a«b</s>»"),
    # LLaMA-Factory
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, "a\n\n«b</s>»"),
    "alpaca, whole": (
        {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["d", "e"]]},
        "s:s</s>u:d</s>a:«e</s>»u:a\nb</s>a:«c</s>»",
    ),
    "alpaca, of nothing": ({"instruction": "a", "output": "b", "system": "", "history": []}, "a\n\n«b</s>»"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "s",
         "tools": ""},
        f"s:s</s>{TALK}",
    ),
    "sharegpt tools": (
        {"conversations": [{"from": "human", "value": "hi"},
                           {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                           {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"}],
         "tools": json.dumps([ADD])},
        CALLED,
    ),
    # Databricks
    "dolly": (
        {"instruction": "a", "context": "b", "response": "c", "category": "closed_qa"}, "a\n\nb\n\n«c</s>»",
    ),
    "dolly, without": ({"instruction": "a", "context": "", "response": "c"}, "a\n\n«c</s>»"),
    # What is empty is not there.
    "an empty prompt": ({"prompt": "", "instruction": "a", "response": "b"}, "a\n\n«b</s>»"),
    "an empty system": (
        {"system": "", "system_prompt": "s", "prompt": "hi", "response": "yo"}, f"s:s</s>{TALK}",
    ),
    "no messages": ({"messages": [], "prompt": "a", "response": "b"}, "a«b</s>»"),
    "an empty instruction": ({"instruction": "", "input": "a", "output": "b"}, "a\n\n«b</s>»"),
    "an empty answer": ({"prompt": "a", "response": "", "output": "b"}, "a«b</s>»"),
    # An answer beside the messages that ask for it.
    "messages and an answer": ({"messages": [USER], "response": "yo"}, TALK),
    "messages and an answer's message": ({"messages": [USER], "completion": [ASSISTANT]}, TALK),
    "longer messages and an answer": (
        {"messages": [USER, ASSISTANT, user("b")], "response": "c"}, f"{TALK}u:b</s>a:«c</s>»",
    ),
    "two forms that say the same": (
        {"messages": [USER, ASSISTANT], "prompt": "hi", "response": "yo", "text": "u: hi a: yo"}, TALK,
    ),
    "a short answer": ({"messages": [USER, ASSISTANT], "question": "hi", "answer": "3"}, TALK),
    # ms-swift
    "swift loss": (
        {"messages": [user("hi"), said("no", loss=False), user("b"), said("right", loss=True)]},
        "u:hi</s>a:no</s>u:b</s>a:«right</s>»",
    ),
    "swift rounds": (
        {"system": "s", "conversation": [{"human": "hi", "assistant": "yo"}]}, f"s:s</s>{TALK}",
    ),
    "swift query": (
        {"system": "s", "query": "b", "response": "c", "history": [["hi", "yo"]]},
        f"s:s</s>{TALK}u:b</s>a:«c</s>»",
    ),
    "swift agent": (
        {"tools": json.dumps([ADD]), "messages": [
            USER, {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "tool_response", "content": "2"}, said("two")]},
        CALLED,
    ),
    # axolotl
    "axolotl turns": (
        {"conversations": [{"from": "human", "value": "hi", "train": False},
                           {"from": "gpt", "value": "no", "train": False},
                           {"from": "human", "value": "b", "train": True},
                           {"from": "gpt", "value": "right", "train": True}]},
        "u:hi</s>a:no</s>u:«b</s>»a:«right</s>»",
    ),
    "axolotl, a word that the template writes, too": (
        {"messages": [user("u", train=True), said("a", train=False), user("s", train=True), said("a")]},
        "u:«u</s>»a:a</s>u:«s</s>»a:«a</s>»",
    ),
    "openai parts": (
        {"messages": [user([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), ASSISTANT]}, TALK,
    ),
    "axolotl characters": (
        {"conversations": [user("hi"), said("not this", train_detail=[
            {"begin_offset": 0, "end_offset": 2, "train": False},
            {"begin_offset": 4, "end_offset": 7, "train": True}])]},
        "u:hi</s>a:not «this»</s>",
    ),
    "axolotl segments": (
        {"segments": [{"label": False, "text": "<s>a: "}, {"label": True, "text": "b</s>"}]}, "<s>a: «b</s>»",
    ),
    "axolotl orca": (
        {"system_prompt": "s", "question": "hi", "response": "yo"}, f"s:s</s>{TALK}",
    ),
    "axolotl question": ({"question": "a", "answer": "b"}, "a«b</s>»"),
    # TRL
    "trl text": ({"text": "ab"}, "a«b</s>»"),
    "trl messages": ({"prompt": [USER], "completion": [ASSISTANT]}, TALK),
    "trl tools": (
        {"messages": [USER, CALL, {"role": "tool", "name": "add", "content": "2"}, said("two")],
         "tools": [ADD]},
        CALLED,
    ),
    "trl options": (
        {"prompt": [USER], "completion": [ASSISTANT], "chat_template_kwargs": {"style": "x"}}, f"Sx\n{TALK}",
    ),
    # mistral-finetune
    "mistral": (
        {"interactions": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo", "weight": 1}],
         "system_prompt": "s", "available_tools": []},
        f"s:s</s>{TALK}",
    ),
    "mistral, the last": (
        {"messages": [USER, said("no"), user("b"), said("right")], "only_last": True},
        "u:hi</s>a:no</s>u:b</s>a:«right</s>»",
    ),
    "mistral text": ({"content": "ab"}, "a«b</s>»"),
    # Known fields wherever they can stand.
    "tools beside texts": (
        {"prompt": "hi", "response": "yo", "tools": [ADD]}, f"{SHOWN}{TALK}",
    ),
    "tools beside a prompt": ({"prompt": [USER], "response": [ASSISTANT], "tools": [ADD]}, f"{SHOWN}{TALK}"),
    "no tools": ({"prompt": "hi", "response": "yo", "tools": [], "chat_template_kwargs": {}}, "hi«yo</s>»"),
    "the system's message is there": ({"system": "Be brief.", "messages": [SYSTEM, USER, ASSISTANT]},
                                      f"s:Be brief.</s>{TALK}"),
    "nulls": ({"prompt": "hi", "response": "yo", "system": None, "messages": None}, "hi«yo</s>»"),
    "one message": ({"prompt": [USER], "response": {**ASSISTANT, "tool_calls": []}}, TALK),
}  # fmt: skip
TWO = ["u:hi</s>a:«yo</s>»", "u:hi</s>a:«no</s>»"]
PAIRS = {
    "alpaca": ({"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
               ["a\n\n«b</s>»", "a\n\n«c</s>»"]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yo"},
         "rejected": {"from": "gpt", "value": "no"}},
        TWO,
    ),
    "openai": (
        {"input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
         "preferred_output": [ASSISTANT], "non_preferred_output": [said("no")]},
        TWO,
    ),
    "swift": ({"messages": [USER, ASSISTANT], "rejected_response": "no"}, TWO),
    "swift messages": ({"messages": [USER, ASSISTANT], "rejected_messages": [USER, said("no")]}, TWO),
    "axolotl intel": (
        {"system": "s", "question": "hi", "chosen": "yo", "rejected": "no"},
        [f"s:s</s>{each}" for each in TWO],
    ),
    "axolotl ultra": (
        {"system": "s", "prompt": "hi", "chosen": [USER, ASSISTANT], "rejected": [USER, said("no")]},
        [f"s:s</s>{each}" for each in TWO],
    ),
    "axolotl argilla": ({"instruction": "a", "chosen_response": "b", "rejected_response": "c"},
                        ["a\n\n«b</s>»", "a\n\n«c</s>»"]),
    "axolotl default": ({"messages": [USER], "chosen": ASSISTANT, "rejected": said("no")}, TWO),
    "trl, no prompt": ({"chosen": "it is blue", "rejected": "it is big"},
                       ["it is« blue</s>»", "it is« big</s>»"]),
    "trl tools": (
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [said("no")], "tools": [ADD]},
        [f"{SHOWN}{each}" for each in TWO],
    ),
    "conversations beside it": (
        {"messages": [USER, ASSISTANT], "chosen": [USER, ASSISTANT], "rejected": [USER, said("no")]}, TWO,
    ),
    "history": (
        {"prompt": "hi", "history": [["a", "b"]], "chosen": "yo", "rejected": "no"},
        [f"u:a</s>a:b</s>{each}" for each in TWO],
    ),
}  # fmt: skip
PROMPTS = {
    "trl": ({"prompt": [USER]}, "u:hi</s>a:"),
    "text": ({"prompt": "hi"}, "hi"),
    "a whole text": ({"text": "hi", "answer": "3"}, "hi«3</s>»"),
    "dolly": ({"instruction": "a", "context": "b", "response": "c"}, "a\n\nb\n\n«c</s>»"),
    "swift": ({"messages": [SYSTEM, USER], "solution": "3"}, "s:Be brief.</s>u:hi</s>a:«3</s>»"),
    "the last is the answer": ({"messages": [USER, said("a"), user("b"), said("c")]},
                               "u:hi</s>a:a</s>u:b</s>a:«c</s>»"),
    "gsm8k": ({"question": "hi", "answer": "#### 3"}, "hi«#### 3</s>»"),
    "a number": ({"prompt": "hi", "answer": 3}, "hi«3</s>»"),
    "tools": ({"prompt": "hi", "tools": [ADD]}, f"{SHOWN}u:hi</s>a:"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_samples(chat, name):
    record, expected = DOCUMENTED[name]
    assert written(chat, record) == [expected]


@pytest.mark.parametrize("name", PAIRS)
def test_documented_pairs(chat, name):
    record, expected = PAIRS[name]
    assert written(chat, record, "pairs") == expected


@pytest.mark.parametrize("name", PROMPTS)
def test_documented_prompts(chat, name):
    record, expected = PROMPTS[name]
    assert written(chat, record, "prompts") == [expected]


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        *(({"messages": [USER, ASSISTANT], name: ["x"]}, [name]) for name in REFUSED),
        *(({"messages": [USER, ASSISTANT], name: 0.5}, [name]) for name in COUNTS),
        ({"prompt": "a", "completion": "b", "label": True}, ["label"]),
        ({"instruction": "a", "output": "b", "kto_tag": False}, ["kto_tag"]),
        ({"text": "a", "system": "s"}, ["system"]),
        ({"text": "a", "tools": [ADD]}, ["tools"]),
        ({"segments": [{"text": "a", "label": True}], "chat_template_kwargs": {"style": "x"}}, ["kwargs"]),
        ({"segments": [{"text": "a"}]}, ["segments"]),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "another"}, ["system"]),
        ({"messages": [USER, said("a", weight=0.5)]}, ["messages", "[1]", "weight=0.5"]),
        ({"messages": [USER, said("a", weight=1, train=False)]}, ["[1]", "weight and train"]),
        ({"messages": [USER, said("a", train_detail=[{}])]}, ["[1]", "train_detail"]),
        *(({"messages": [USER, said("abc", train_detail=[
            {"begin_offset": 0, "end_offset": 2, "train": True, name: value}])]},
           ["[1]", "train_detail", name])
          for name, value in (("end_offset", 40), ("begin_offset", -10), ("end_offset", 1.5),
                              ("end_offset", "2"), ("begin_offset", True), ("begin_offset", 3),
                              ("train", "no"), ("train", 1))),
        ({"messages": [user([{"type": "text", "text": "b"}], train_detail=[
            {"begin_offset": 0, "end_offset": 0, "train": True}]), ASSISTANT]}, ["[0]", "train_detail"]),
        ({"messages": [USER, said("a", weight=0)]}, ["weight"]),
        ({"messages": [USER, said("a", reasoning_content="hm")]}, ["reasoning_content", "content"]),
        ({"messages": [USER, ASSISTANT], "tools": "not JSON"}, ["tools"]),
        ({"messages": [USER, ASSISTANT], "tools": [{"function": "add"}]}, ["tools"]),
        ({"messages": [USER, {**CALL, "content": "let me see"}, ASSISTANT]}, ["let me see"]),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": 1}, ["chat_template_kwargs"]),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"unknown": 1}}, ["unknown"]),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"messages": "x"}}, ["messages: is"]),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"chat_template": "x"}}, ["chat_template"]),
        ({"messages": [USER, {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": "a"}}]}]},
         ["tool_calls", "arguments"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "no"}]},
         ["conversations: [1]"]),
        ({"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, ["[1]", "tool_calls"]),
        ({"prompt": "a", "output": "b", "history": [["a"]]}, ["history"]),
        ({"prompt": "<s>a", "response": "b", "system": "s"}, ["<s>"]),
        ({"question": "", "answer": "3"}, ["question"]),
        ({"context": "c", "question": "a", "answer": "b"}, ["context"]),
        *(({asked: "a", name: "c", "response": "b"}, [name])
          for asked in ("prompt", "query", "question", "instruction")
          for name in ("context", "article", "passage", "choices")
          if (asked, name) != ("instruction", "context")),
        ({"instruction": "a", "input": "b", "context": "c", "output": "d"}, ["context"]),
        ({"prompt": "hi", "response": "yo", "messages": [USER, said("no")]}, ["messages", "prompt and resp"]),
        ({"prompt": "hi", "response": "yo", "text": "another"}, ["text", "prompt and response"]),
        ({"images": 5, "prompt": "a", "response": "b"}, ["images"]),
        ({"images": 5}, ["images"]),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_an_error(chat, tmp_path, record, keys):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps(record))
    with pytest.raises(ConfigError) as error:
        prepare(path, chat, RecordPolicy("samples", 99), cache=tmp_path / "cache")
    assert f"{path}:2: " in str(error.value) and all(key in str(error.value) for key in keys)


# ------------------------------------------------------------------ tables, nulls, templates


def test_tables_and_lines_give_equal_tokens(chat, tmp_path):
    """A table gives each object the fields of all, as nulls; JSON in a text keeps its own."""
    datasets = pytest.importorskip("datasets")
    tool = lambda name, **properties: {**ADD, "function": {"name": name, "parameters": properties}}  # noqa: E731
    calling = lambda *calls: {"role": "assistant", "tool_calls": list(calls)}  # noqa: E731
    records = [
        {"messages": [user("hi", name="x"), calling(of("f", a=1), of("g", b="x"))],
         "tools": [tool("f", a={"type": "integer"}), tool("g", b={"type": "string"})]},
        {"messages": [USER, said("no", weight=0), USER, said("yes")]},
        {"messages": [USER, ASSISTANT]},
        {"prompt": "hi", "response": "yo", "tools": []},
        {"prompt": "hi", "response": "yo", "system": "s", "chat_template_kwargs": {"style": "x"}},
        {"prompt": "hi", "response": "yo", "chat_template_kwargs": {"style": None}},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": True}]},
    ]  # fmt: skip
    as_text = json.dumps({"a": None})
    records[0]["messages"][1]["tool_calls"].append({"function": {"name": "h", "arguments": {"a": 2}}})
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    texts = [{"messages": [USER, calling({"function": {"name": "f", "arguments": as_text}})]}]
    (tmp_path / "text.jsonl").write_text(json.dumps(texts[0]))
    for name, of_file in (("x", records), ("text", texts)):
        columns = dict.fromkeys(column for record in of_file for column in record)
        table = datasets.Dataset.from_list([columns | record for record in of_file])
        table.to_parquet(tmp_path / f"{name}.parquet")
        table.save_to_disk(tmp_path / name)
        found = [
            prepare(tmp_path / each, chat, RecordPolicy("samples", 999), cache=tmp_path / f"{each}.cache")[0]
            for each in (f"{name}.jsonl", f"{name}.parquet", name)
        ]
        every = [[mark_learned(chat, *data.sample(n)) for n in range(data.samples)] for data in found]
        assert every[0] == every[1] == every[2] and len(every[0]) == len(of_file)
    assert '«f({"a": null})' in every[0][0]


def test_a_table_that_reorders_arguments_says_so_in_one_line(chat, tmp_path, capsys):
    """A column of objects has one order of fields, and one type of each; JSON in a text keeps its own."""
    datasets = pytest.importorskip("datasets")
    arguments = [{"b": 1, "a": 2}, {"a": 1, "b": 2.5}]
    for name, change in (("objects", dict), ("texts", json.dumps)):
        records = [
            {"messages": [USER, {"role": "assistant", "tool_calls": [of("f") | {
                "function": {"name": "f", "arguments": change(each)}}]}]}
            for each in arguments
        ]  # fmt: skip
        datasets.Dataset.from_list(records).to_parquet(tmp_path / name)
        data = prepare(tmp_path / name, chat, RecordPolicy("samples", 999), cache=tmp_path / "cache")[0]
        every = [mark_learned(chat, *data.sample(n)) for n in range(2)]
        kept = all(json.dumps(each) in text for each, text in zip(arguments, every, strict=True))
        assert kept is (name == "texts")
        assert ("order and types" in str(data)) is (name == "objects")
        assert ("order and types" in capsys.readouterr().err) is (name == "objects")


def test_nulls_that_a_table_would_not_have_are_counted(chat, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    calls = [{"function": {"name": "f", "arguments": {"a": None}}}]
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": calls}]}))
    data = prepare(path, chat, RecordPolicy("samples", 99), cache=tmp_path / "cache")[0]
    assert "«f({})" in mark_learned(chat, *data.sample(0))
    assert "null" in str(data) and "null" in capsys.readouterr().err


def test_fields_that_nothing_reads_are_one_counted_line(prepared_from, capsys):
    lines = [{"prompt": "a", "response": "b", "id": 3, "source": ""}] * 3
    lines += [{"messages": [{**USER, "name": "x"}, ASSISTANT], "id": 4, "label": 2}]
    for _ in range(2):  # prepared, then found again
        data = prepared_from(lines)
        assert data.unread == {"id": 4, "label": 1, "messages.name": 1}
        (line,) = [each for each in capsys.readouterr().err.splitlines() if "nothing reads" in each]
        assert "id (4)" in line and "messages.name (1)" in line
    assert not prepared_from([{"prompt": "a", "response": "b"}]).unread


@pytest.mark.parametrize(("template", "eos"), [(TEMPLATE, "</s>"), (MARKED, "<|im_end|>")])
def test_messages_say_whether_they_are_learned(directory, template, eos):
    """They do with marks in the template, and without."""
    tokenizer = open_directory(directory(tokenizer_config={"eos_token": eos, "chat_template": template}))
    talk = [said("x", loss=False), USER, said("no", weight=0), user("b", train=True), said("yes"), USER]
    ((ids, learned),) = KINDS["samples"]({"messages": talk}, tokenizer)
    kept = tokenizer.decode(ids[learned != 0].tolist(), control=True)
    assert kept == f"b{eos}yes{eos}"
    whole = tokenizer.decode(ids.tolist(), control=True)
    assert all(text in whole for text in ("x", "hi", "no", "b", "yes")) and whole.count(eos) == 5


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("{{ c.function.name + c.function.arguments }}", 'add{"a": 1}'),  # as DeepSeek's does
        ("{{ c.function.name }}{{ c.function.arguments.a }}", "add1"),
        ("{{ c.function | tojson }}", '{"name": "add", "arguments": {"a": 1}}'),
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content or '' }}",
        "{% if m.content is none %}{% else %}{{ m.content }}{% endif %}",
        "{{ m.content }}",
    ],
)
@pytest.mark.parametrize("talk", [[USER, CALL], [USER, AS_TEXT]], ids=["object", "text"])
def test_calls_are_given_as_a_template_takes_them(directory, call, content, expected, talk):
    template = (
        "{% for m in messages %}{{ m.role }}:" + content + "{% for c in m.tool_calls or [] %}" + call
        + "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )  # fmt: skip
    tokenizer = open_directory(directory(tokenizer_config={"eos_token": "</s>", "chat_template": template}))
    assert written(tokenizer, {"messages": talk}) == [f"user:hi</s>assistant:«{expected}</s>»"]


def test_tools_that_a_template_loses_are_refused(directory):
    template = TEMPLATE.replace("{{ tools | tojson }}", "{% for t in tools %}{{ t.function }}{% endfor %}")
    tokenizer = open_directory(directory(tokenizer_config={"eos_token": "</s>", "chat_template": template}))
    with raises(LineError, leaves="add"):
        written(tokenizer, {"messages": [USER, ASSISTANT], "tools": [ADD["function"]]})


# Templates of the kinds that models come with, in short.
QWEN = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) %}"
    "[{{ m.role }}]{{ m.content }}</s>{% elif m.role == 'assistant' %}[assistant]{% if m.content %}"
    "{{ m.content }}{% endif %}{% for c in m.tool_calls %}{% set c = c.function %}"
    '<call>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}{% endfor %}</s>'
    "{% elif m.role == 'tool' %}[user]{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FAMILIES = {
    "qwen2.5": QWEN,
    "qwen3": QWEN.replace(
        "{% for m in messages %}",
        "{% set ns = namespace(last=messages|length - 1) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and m.content is string and not m.content.startswith('<tool_response>') and "
        "ns.last == messages|length - 1 %}{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}",
    ),
    "llama3": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}[system]{{ system }}</s>"
        "{% for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
        "[{{ m.role }}]{{ m.content | trim }}</s>{% elif 'tool_calls' in m %}"
        "{% if not m.tool_calls|length == 1 %}{{ raise_exception('single calls') }}{% endif %}[assistant]"
        "{% set c = m.tool_calls[0].function %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</s>'
        "{% else %}[ipython]{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}</s>"
        "{% elif m.role == 'assistant' %}[assistant]{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "mistral": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in rest %}{% if m.role in ('user', 'assistant') and not "
        "m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if loop.first and system %}{{ system }}\n"
        "{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls %}[CALLS]{% for c in m.tool_calls %}"
        "{{ c.function | tojson }}{% endfor %}</s>{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}"
        "{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ ns.system }}"
        "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.tool_calls %}[assistant]{% for c in m.tool_calls %}"
        "{% if m.content is none %}{{ c.function.name + ':' + c.function.arguments }}{% else %}"
        "{{ m.content + c.function.name + ':' + c.function.arguments }}{% endif %}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}[assistant]{{ m.content.split('</think>')[-1] }}</s>{% endif %}"
        "{% if m.role == 'tool' %}[out]{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
}
FUNCTION = [USER, CALL, {"role": "function", "name": "add", "content": "42 apples"}, said("two")]
TALKS = {  # conversations that each template of FAMILIES has to show whole, or refuse
    "plain": [USER, ASSISTANT],
    "User": [user("hi", role="User"), said("yo", role="Assistant")],
    "system": [SYSTEM, USER, ASSISTANT],
    "developer": [{"role": "developer", "content": "Be brief."}, USER, ASSISTANT],
    "tool": [USER, CALL, {"role": "tool", "content": "42 apples"}, said("two")],
    "function": FUNCTION,
    "ipython": [*FUNCTION[:2], {"role": "ipython", "content": "42 apples"}, FUNCTION[3]],
    "input": [USER, {"role": "input", "content": "quietly"}, ASSISTANT],
    "beside a call": [USER, {**CALL, "content": "let me see"}, {"role": "tool", "content": "2"}, said("two")],
    "thoughts": [USER, said("<think>hm</think>yo"), user("b"), said("c")],
    "two systems": [SYSTEM, {"role": "system", "content": "quietly"}, USER, ASSISTANT],
}
LOST = {  # the talks that are refused, since the template would lose a part of them
    "qwen2.5": ("input",),
    "qwen3": ("input",),
    "llama3": ("beside a call",),
    "phi3": ("system", "developer", "tool", "function", "ipython", "input", "beside a call", "two systems"),
    "mistral": ("input", "beside a call", "two systems"),
    "deepseek": ("input",),
}


@pytest.mark.parametrize("kind", ["samples", "prompts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_message_is_shown_or_refused(directory, family, kind):
    """A template that knows no such role writes nothing of it; some roles are others by another name."""
    template = {"eos_token": "</s>", "chat_template": FAMILIES[family]}
    tokenizer = open_directory(directory(tokenizer_config=template))
    lost = []
    for name, talk in TALKS.items():
        try:
            (text,) = written(tokenizer, {"messages": talk}, kind)
        except LineError as error:
            assert "template" in str(error)
            lost.append(name)
            continue
        for message in talk:
            for part in (message["content"], message.get("tool_calls") and "add"):
                assert not part or part.rpartition("</think>")[2] in text
    assert tuple(lost) == LOST[family]


def test_a_tokenizer_without_a_default_template_is_one_error(directory):
    named = [{"name": "tool_use", "template": TEMPLATE}, {"name": "rag", "template": TEMPLATE}]
    with raises(ConfigError, leaves="rag, tool_use", fix="chat_template"):
        open_directory(directory(tokenizer_config={"eos_token": "</s>", "chat_template": named}))
    named[0]["name"] = "default"
    open_directory(directory(tokenizer_config={"eos_token": "</s>", "chat_template": named}))


# ------------------------------------------------------------------ what rewards compare with


@pytest.mark.parametrize(
    ("record", "need", "is_right"),
    [
        ({"question": "a", "answer": "so #### 1,204"}, "number", True),
        ({"question": "a", "answer": "it is 3."}, "number", True),
        ({"question": "a", "answer": "#### 72 apples"}, "number", False),
        ({"question": "a", "answer": "#### -$5"}, "number", True),
        ({"question": "a", "answer": "#### "}, "number", False),
        ({"question": "a", "answer": "#### x then 3"}, "number", False),
        ({"question": "a", "answer": "three"}, "number", False),
        ({"question": "", "answer": "#### 3"}, None, False),
        ({"prompt": "", "answer": "#### 3"}, None, False),
        ({"prompt": "a"}, None, True),
        ({"prompt": "a"}, "response", False),
        ({"prompt": [USER], "solution": "3"}, "response", True),
        ({"messages": [USER], "answer": ["3", "4"]}, None, True),
        ({"messages": [USER], "answer": ["3", "4"]}, "response", False),
        ({"prompt": "a", "response": ""}, None, True),
    ],
)  # fmt: skip
def test_prompts_hold_what_their_reward_compares_with(chat, tmp_path, record, need, is_right):
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + json.dumps(record))
    policy = RecordPolicy("prompts", 99, needs=() if need is None else (need,))
    if is_right:
        assert prepare(path, chat, policy, cache=tmp_path / "cache")[0].records == 1
        return
    with pytest.raises(ConfigError) as error:
        prepare(path, chat, policy, cache=tmp_path / "cache")
    assert f"{path}:2: " in str(error.value)


def test_every_field_has_names():
    assert set(NEEDS) == {"response", "number"} and all(NAMES.values())


def test_the_last_number_of_a_text():
    numbers = {
        "3 or 4": 4,
        "#### -5": -5,
        "1 #### $1,000": 1000,
        "#### x then 3": None,
        "none": None,
        "5 ####": None,
        "#### -$5": -5,
        "#### $-5": -5,
        "#### .5": 0.5,
        "it is -.5": -0.5,
        "#### 72 apples": 72,
        "so 1,204.50.": 1204.5,
        "section v.5": 5,
    }
    assert {text: last_number(text) for text in numbers} == numbers
    strict = {"#### 72 apples": None, "#### -$5.": -5, "#### .5": 0.5, "72 apples": 72}
    assert {text: last_number(text, whole=True) for text in strict} == strict
