"""Lines of JSONL: what they mean, and every way they can be wrong."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from data_lines import ASSISTANT, GOOD, SYSTEM, TOKENIZER, USER, shown
from hypothesis import given
from hypothesis import strategies as st

from experiments.configs.train import ConfigError
from experiments.data import layouts, prepared, writer
from experiments.data.prepared import prepare

# ------------------------------------------------------------------ what lines mean


@pytest.mark.parametrize(
    ("line", "prompt", "response"),
    [
        ({"prompt": "1+1=", "response": "2"}, "1+1=", "2"),
        ({"prompt": "", "completion": "é☃"}, "", "é☃"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n\n1 1\n\n", "2"),
        ({"instruction": "Add.", "input": "", "response": "2"}, "Add.\n\n", "2"),
        ({"text": "all of it"}, "", "all of it"),
        ({"text": "not <|end|> yet"}, "", "not <|end|> yet"),
        ({"messages": [USER, ASSISTANT]}, "hi", "yo"),
        ({"messages": [USER, ASSISTANT, USER]}, "hi", "yo"),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, "hihi", "yoyo"),
        ({"prompt": [USER], "response": "yo"}, "hi", "yo"),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, "hiyohi", "yo"),
        ({"prompt": "hi", "completion": [ASSISTANT]}, "hi", "yo"),
        ({"prompt": [USER], "completion": [USER, ASSISTANT]}, "hi", "yo"),
        ({"prompt": [SYSTEM], "completion": [USER, ASSISTANT]}, "Be brief.hi", "yo"),
        ({"messages": [USER, ASSISTANT], "tools": []}, "hi", "yo"),
    ],
)
def test_what_is_learned_is_the_response(prepared_from, line, prompt, response):
    data = prepared_from([line])
    asked, learned, ids = shown(data)
    assert (asked, learned) == (prompt, response)
    assert ids[0] == TOKENIZER.bos and ids[-1] == TOKENIZER.eos and data.sample(0)[1][-1] == 1
    assert data.samples == data.records == 1 and data.tokens == len(ids)
    assert data.learned == data.sample(0)[1].sum() and data.longest == data.shortest == len(ids) - 1
    assert data.lengths(np.array([0])).tolist() == [len(ids) - 1]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [{**ASSISTANT, "content": "2"}], "rejected": "3"},
        {
            "prompt": "hi",
            "chosen": [{**ASSISTANT, "content": "2"}],
            "rejected": [{**ASSISTANT, "content": "3"}],
        },
        {
            "prompt": "hi ",
            "chosen": [USER, {**ASSISTANT, "content": "2"}],
            "rejected": [USER, {**ASSISTANT, "content": "3"}],
        },
        {"prompt": "hi", "chosen": [USER, {**ASSISTANT, "content": "2"}], "rejected": "3"},
        {
            "prompt": [USER],
            "chosen": [SYSTEM, USER, {**ASSISTANT, "content": "2"}],
            "rejected": [SYSTEM, USER, {**ASSISTANT, "content": "3"}],
        },
        {
            "chosen": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "2"}],
            "rejected": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "3"}],
        },
    ],
)
def test_pairs_are_two_samples_of_one_prompt(prepared_from, line):
    data = prepared_from([line], kind="pairs")
    (asked, chosen, _), (again, rejected, _) = shown(data, 0), shown(data, 1)
    assert asked == again and (chosen, rejected) == ("2", "3")
    if "prompt" in line:  # once, and as a user's message where an answer is one
        assert asked in ("1+1=", "hi", "Be brief.hi")
        marked = 260 in data.sample(0)[0].tolist()
        assert marked == (asked != "1+1=") == (260 in data.sample(1)[0].tolist())
    assert (data.records, data.samples) == (1, 2)


def test_choices_keep_their_question_answer_and_size(prepared_from):
    lines = [
        {"prompt": "1+1=", "choices": ["2", "3é", "4"], "answer": 1},
        {"question": "Best?", "choices": ["yes", "no"], "answer": "b"},
    ]
    data = prepared_from(lines, kind="choices")
    told = [shown(data, n)[:2] for n in range(5)]
    asked = "Question: Best?\nAnswer:"
    assert told == [("1+1=", "2"), ("1+1=", "3é"), ("1+1=", "4"), (asked, " yes"), (asked, " no")]
    assert data.options.tolist() == [[0, 0, 1], [0, 1, 3], [0, 0, 1], [1, 0, 3], [1, 1, 2]]
    assert all(TOKENIZER.eos not in data.sample(n)[0] for n in range(5))  # only the choice itself is compared


def test_blank_lines_marks_and_windows_line_ends_are_no_mistakes(prepared_from):
    data = prepared_from([b'\xef\xbb\xbf{"text": "a"}\r', b"", b"  \t", b'{"text": "b"}\r'])
    assert [shown(data, n)[1] for n in range(data.samples)] == ["a", "b"]


# ------------------------------------------------------------------ what can be wrong

WRONG = {
    "samples": [
        (b"{'text': 1}", "is no JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'{"text": "a"', "is no JSON (Expecting ',' delimiter at column 13)"),
        (b"\x00\x01", "is no JSON"),
        (b'{"text": "\xff"}', "is no UTF-8 (byte 0xff at column 11)"),
        (b"[" * 100_000, "is no JSON that can be read"),
        (b'{"text": ' + b"1" * 5000 + b"}", "is no JSON that can be read"),
        (b'["text"]', "holds a list, expected an object: {...}"),
        (b"3", "holds a int, expected an object"),
        (b'{"text": "\\ud800"}', "text: half a surrogate pair at character 1"),
        (
            {},
            "has none of 'messages', 'prompt' and 'response', 'instruction' and 'output', 'text'; it ha",
        ),
        ({"a": 1, "b": 2}, "has none of 'messages', "),
        ({"prompt": "a"}, "lacks 'response' or 'completion' or 'output'; it has 'prompt'"),
        ({"prompt": "a", "response": ""}, "response: is empty"),
        ({"prompt": "a", "completion": " \n"}, "completion: is empty"),
        ({"prompt": "a", "response": None}, "response: expected a text, got null"),
        ({"prompt": 3, "response": "a"}, "prompt: expected a text, got int"),
        ({"instruction": "", "output": "a"}, "instruction: is empty"),
        ({"instruction": "a", "input": 1, "output": "a"}, "input: expected a text, got int"),
        ({"text": ""}, "text: is empty"),
        ({"text": ["a"]}, "text: expected a text, got list of 1"),
        ({"messages": []}, "messages: expected a list of messages, got list of 0"),
        ({"messages": "hi"}, "messages: expected a list of messages, got str"),
        ({"messages": ["hi"]}, "messages[0]: expected an object with 'role' and 'content', got str"),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "messages[1]: expected an object with 'role' and 'conten",
        ),
        ({"messages": [USER]}, "messages: no assistant's message, so there is nothing to learn"),
        ({"messages": [USER, {**ASSISTANT, "content": ""}]}, "messages[1].content: is empty"),
        (
            {"messages": [USER, {**ASSISTANT, "content": [1]}]},
            "messages[1].content: expected a text, got list",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}, ASSISTANT]},
            "role 'tool': the byte tokenizer knows",
        ),
        ({"prompt": [USER], "response": [USER]}, "response: no assistant's message"),
        ({"prompt": "", "response": [ASSISTANT]}, "prompt: is empty"),
        (
            {"prompt": "bye", "response": [USER, ASSISTANT]},
            "response: begins with a user's message that is not the prompt",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": [{"name": "f"}]},
            "tools: tools and their calls are not learned",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]},
            "messages[1].tool_calls: tools and their calls are not learned",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[1].tool",
        ),
        ({"text": "a" * 64}, "takes 65 positions, the context has 64"),
        ({"prompt": "a" * 100, "response": "a"}, "takes 102 positions, the context has 64"),
    ],
    "pairs": [
        ({"prompt": "a", "chosen": "b"}, "lacks 'rejected'; it has 'prompt', 'chosen'"),
        ({"prompt": "a"}, "lacks 'chosen' and 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "lacks 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c" * 80}, "takes 82 positions"),
        (
            {"prompt": "hi", "chosen": [SYSTEM, USER, ASSISTANT], "rejected": "no"},
            "chosen and rejected answer different prompts",
        ),
        (
            {"chosen": [USER, ASSISTANT], "rejected": [USER]},
            "chosen and rejected: expected to end in different mess",
        ),
    ],
    "choices": [
        ({"prompt": "a", "choices": ["b", "c"]}, "lacks 'answer'; it has 'prompt', 'choices'"),
        ({"choices": ["b", "c"], "answer": 0}, "lacks 'prompt' or 'question'"),
        (
            {"prompt": "a", "choices": ["b"], "answer": 0},
            "choices: expected a list of two or more texts, got l",
        ),
        ({"prompt": "a", "choices": ["b", ""], "answer": 0}, "choices[1]: is empty"),
        ({"prompt": "a", "choices": ["b", 3], "answer": 0}, "choices[1]: expected a text, got int"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "answer: expected 0 to 1 or A to B, got 2"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": "C"}, "answer: expected 0 to 1 or A to B, got 'C'"),
        (
            {"prompt": "a", "choices": ["b", "c"], "answer": True},
            "answer: expected 0 to 1 or A to B, got True",
        ),
        ({"prompt": "a", "choices": ["b", "c"], "answer": ""}, "answer: expected 0 to 1 or A to B, got ''"),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_line_is_named_by_file_and_line(prepared_from, kind, tmp_path):
    for line, message in WRONG[kind]:
        with pytest.raises(ConfigError, match=r"(?s)^1 line cannot be used:\n.*\nFix: .*\.$") as error:
            prepared_from([GOOD[kind], b"", line, GOOD[kind]], kind=kind)
        assert f"\n  {tmp_path / 'data.jsonl'}:3: {message}" in str(error.value)
    assert not list((tmp_path / "cache").iterdir())  # nothing of a refused file is kept


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_lines_are_skipped_and_counted_if_asked(prepared_from, kind, capsys):
    content = [GOOD[kind], *(line for line, _ in WRONG[kind]), GOOD[kind]]
    long = sum("takes" in message for _, message in WRONG[kind])
    for _ in range(2):  # prepared_from, then found again
        data = prepared_from(content, kind=kind, broken="skip", too_long="skip")
        assert data.records == 2
        assert data.left_out == {"broken": len(WRONG[kind]) - long, "too_long": long, "truncated": 0}
        assert f"{len(WRONG[kind]) - long} broken" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"Fix: mend the lines, or leave such out with data\.broken=skip\.$"
    ):
        prepared_from(content, kind=kind, too_long="skip")


def test_all_mistakes_are_in_one_error_the_first_dozen_shown(prepared_from, tmp_path):
    prepared_from([GOOD["samples"]], "good.jsonl")
    (tmp_path / "one.jsonl").write_text('{"text": ""}\n' * 3)
    (tmp_path / "two.jsonl").write_text('{"text": "%s"}\n{"text": 1}\n' % ("x" * 70) * 600)
    files = [tmp_path / f"{name}.jsonl" for name in ("good", "one", "two")]
    with pytest.raises(ConfigError) as error:
        prepare(files, TOKENIZER, context=64, cache=tmp_path / "cache")
    told = str(error.value).splitlines()
    assert told[0] == "1203 lines cannot be used:"
    assert [line.split(": ")[0].rpartition("/")[2] for line in told[1:13]] == [
        *(f"one.jsonl:{n}" for n in (1, 2, 3)),
        *(f"two.jsonl:{n}" for n in range(1, 10)),
    ]
    listed = next((tmp_path / "cache").glob("*.refused.txt"))
    assert told[13] == f"  and 1191 more; all of them: {listed}"
    assert told[14].startswith("Fix: mend the lines, or leave such out with data.broken=skip;")
    assert "data.too_long=skip, cut them with data.too_long=truncate, or take data.context=71." in told[14]
    assert len(told) == 15
    lines = listed.read_text().splitlines()
    assert [f"  {line}" for line in lines[:12]] == told[1:13]
    assert [int(line.split(":")[1]) for line in lines[3:]] == list(range(1, 1201))


def test_a_line_with_several_wrong_fields_names_them_all(prepared_from):
    talk = [{"role": 1, "content": None}, {"role": "assistant", "content": ""}, {"content": "b"}]
    with pytest.raises(
        ConfigError,
        match=r"messages\[0\]\.role: expected a text, got int; messages\[0\]\.content: expected a text, got "
        r"null; messages\[1\]\.content: is empty; messages\[2\]: expected an object with 'role'",
    ):
        prepared_from([{"messages": talk}])
    with pytest.raises(ConfigError, match=r"prompt: expected a text, got int; response: is empty"):
        prepared_from([{"prompt": 1, "response": ""}])
    with pytest.raises(ConfigError, match=r"prompt: .* int; chosen: is empty; rejected: .* got null"):
        prepared_from([{"prompt": 1, "chosen": "", "rejected": None}], kind="pairs")
    with pytest.raises(ConfigError, match=r"answer: expected 0 to 1.*; choices\[1\]: is empty"):
        prepared_from([{"prompt": "a", "choices": ["b", ""], "answer": 2}], kind="choices")


def test_the_list_of_refused_lines_is_bounded_and_a_few_are_none(prepared_from, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^8 lines cannot be used(?!.*more)"):
        prepared_from([{"text": ""}] * 8)
    assert not list((tmp_path / "cache").iterdir())
    for module in (prepared, writer):
        monkeypatch.setattr(module, "LISTED", 10)
    with pytest.raises(ConfigError, match=r"and 1988 more; the first 10 of them: .*refused\.txt"):
        prepared_from([{"text": ""}] * 2000)
    assert len(next((tmp_path / "cache").glob("*.refused.txt")).read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"part": (1, True)}, r"part=\(1, True\): every how manyth line is held out must be 2 or more"),
        ({"part": (5, True)}, r"one line can be used, so none can be held out"),
        ({"kind": "pear"}, "kind='pear': must be one of samples, pairs, choices"),
        ({"broken": "truncate"}, "broken='truncate': must be one of refuse, skip"),
        (
            {"too_long": "cut", "context": 0},
            r"(?s)too_long='cut': must be.*context=0: must be a whole number",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(prepared_from, how, message):
    with pytest.raises(ConfigError, match=message):
        prepared_from([GOOD["samples"]], **how)


def test_files_that_cannot_be_read_are_all_named(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no\.jsonl: No such file.*: is a folder.*Fix: name files"):
        prepare([tmp_path / "no.jsonl", tmp_path], TOKENIZER, context=9, cache=tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, target in {"zero.jsonl": "/dev/zero", "none.jsonl": "/proc/self/pagemap"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "sparse.jsonl").touch()
    os.truncate(tmp_path / "sparse.jsonl", 2**42)
    told = (
        r"(?s)/dev/zero: is no regular file.*pipe\.jsonl: is no regular file.*zero\.jsonl: is no regular file"
        r".*none\.jsonl: is empty.*sparse\.jsonl: has 4398046511104 bytes, the most is 1099511627776"
    )
    named = [tmp_path / f"{name}.jsonl" for name in ("pipe", "zero", "none", "sparse")]
    with pytest.raises(ConfigError, match=told):
        prepare(["/dev/zero", *named], TOKENIZER, context=9, cache=tmp_path)
    with pytest.raises(ConfigError, match="no files of data"):
        prepare([], TOKENIZER, context=9, cache=tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: nothing to learn from \(no lines\)"):
        prepare(tmp_path / "empty.jsonl", TOKENIZER, context=9, cache=tmp_path)
    with pytest.raises(ConfigError, match="prepared data cannot be written there"):
        prepare(_file(tmp_path), TOKENIZER, context=9, cache=tmp_path / "empty.jsonl" / "below")


def _file(folder):
    (folder / "some.jsonl").write_text('{"text": "a"}\n')
    return folder / "some.jsonl"


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5),
       lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(st.sampled_from(["messages", "prompt", "response", "chosen", "rejected", "choices",
                                          "answer", "role", "content", "text"]), inner, max_size=4),
       max_leaves=12), st.sampled_from(list(GOOD)))  # fmt: skip
def test_any_line_is_a_record_or_one_clear_error(line, kind):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    try:
        writer.KINDS[kind](layouts.parse(line), TOKENIZER)
    except layouts.LineError as error:
        assert str(error)
