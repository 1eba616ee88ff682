"""JSONL in: what lines mean, every way they can be wrong, and files tokenised once."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.configs.train import ConfigError
from experiments.data import builtin, layouts, prepared, writer
from experiments.data.prepared import open_prepared, prepare
from experiments.data.tokenizer import byte_tokenizer, load_tokenizer
from fnshard.errors import MissingExtraError

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def made(tmp_path):
    """`made(lines, **how)`: prepared from a file of these lines; objects, or bytes as they are."""

    def make(content, name="data.jsonl", **how):
        told = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in content]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in told))
        how = {"context": 64, "cache": tmp_path / "cache", "tokenizer": TOKENIZER} | how
        return prepare([tmp_path / name], how.pop("tokenizer"), **how)

    return make


def shown(data, number=0):
    """A sample as (what is not learned, what is learned), control tokens left out; and its ids."""
    ids, learned = data.sample(number)
    told = learned.astype(bool)
    return TOKENIZER.decode(ids[~told].tolist()), TOKENIZER.decode(ids[told].tolist()), ids.tolist()


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
def test_what_is_learned_is_the_response(made, line, prompt, response):
    data = made([line])
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
def test_pairs_are_two_samples_of_one_prompt(made, line):
    data = made([line], kind="pairs")
    (asked, chosen, _), (again, rejected, _) = shown(data, 0), shown(data, 1)
    assert asked == again and (chosen, rejected) == ("2", "3")
    if "prompt" in line:  # once, and as a user's message where an answer is one
        assert asked in ("1+1=", "hi", "Be brief.hi")
        marked = 260 in data.sample(0)[0].tolist()
        assert marked == (asked != "1+1=") == (260 in data.sample(1)[0].tolist())
    assert (data.records, data.samples) == (1, 2)


def test_choices_keep_their_question_answer_and_size(made):
    lines = [
        {"prompt": "1+1=", "choices": ["2", "3é", "4"], "answer": 1},
        {"question": "Best?", "choices": ["yes", "no"], "answer": "b"},
    ]
    data = made(lines, kind="choices")
    told = [shown(data, n)[:2] for n in range(5)]
    asked = "Question: Best?\nAnswer:"
    assert told == [("1+1=", "2"), ("1+1=", "3é"), ("1+1=", "4"), (asked, " yes"), (asked, " no")]
    assert data.options.tolist() == [[0, 0, 1], [0, 1, 3], [0, 0, 1], [1, 0, 3], [1, 1, 2]]
    assert all(TOKENIZER.eos not in data.sample(n)[0] for n in range(5))  # only the choice itself is compared


def test_blank_lines_marks_and_windows_line_ends_are_no_mistakes(made):
    data = made([b'\xef\xbb\xbf{"text": "a"}\r', b"", b"  \t", b'{"text": "b"}\r'])
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
GOOD = {
    "samples": {"text": "good"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "choices": {"prompt": "a", "choices": ["b", "c"], "answer": 0},
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_line_is_named_by_file_and_line(made, kind, tmp_path):
    for line, message in WRONG[kind]:
        with pytest.raises(ConfigError, match=r"(?s)^1 line cannot be used:\n.*\nFix: .*\.$") as error:
            made([GOOD[kind], b"", line, GOOD[kind]], kind=kind)
        assert f"\n  {tmp_path / 'data.jsonl'}:3: {message}" in str(error.value)
    assert not list((tmp_path / "cache").iterdir())  # nothing of a refused file is kept


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_lines_are_skipped_and_counted_if_asked(made, kind, capsys):
    content = [GOOD[kind], *(line for line, _ in WRONG[kind]), GOOD[kind]]
    long = sum("takes" in message for _, message in WRONG[kind])
    for _ in range(2):  # made, then found again
        data = made(content, kind=kind, broken="skip", too_long="skip")
        assert data.records == 2
        assert data.left_out == {"broken": len(WRONG[kind]) - long, "too_long": long, "truncated": 0}
        assert f"{len(WRONG[kind]) - long} broken" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"Fix: mend the lines, or leave such out with data\.broken=skip\.$"
    ):
        made(content, kind=kind, too_long="skip")


def test_all_mistakes_are_in_one_error_the_first_dozen_shown(made, tmp_path):
    made([GOOD["samples"]], "good.jsonl")
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


def test_a_line_with_several_wrong_fields_names_them_all(made):
    talk = [{"role": 1, "content": None}, {"role": "assistant", "content": ""}, {"content": "b"}]
    with pytest.raises(
        ConfigError,
        match=r"messages\[0\]\.role: expected a text, got int; messages\[0\]\.content: expected a text, got "
        r"null; messages\[1\]\.content: is empty; messages\[2\]: expected an object with 'role'",
    ):
        made([{"messages": talk}])
    with pytest.raises(ConfigError, match=r"prompt: expected a text, got int; response: is empty"):
        made([{"prompt": 1, "response": ""}])
    with pytest.raises(ConfigError, match=r"prompt: .* int; chosen: is empty; rejected: .* got null"):
        made([{"prompt": 1, "chosen": "", "rejected": None}], kind="pairs")
    with pytest.raises(ConfigError, match=r"answer: expected 0 to 1.*; choices\[1\]: is empty"):
        made([{"prompt": "a", "choices": ["b", ""], "answer": 2}], kind="choices")


def test_the_list_of_refused_lines_is_bounded_and_a_few_are_none(made, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^8 lines cannot be used(?!.*more)"):
        made([{"text": ""}] * 8)
    assert not list((tmp_path / "cache").iterdir())
    for module in (prepared, writer):
        monkeypatch.setattr(module, "LISTED", 10)
    with pytest.raises(ConfigError, match=r"and 1988 more; the first 10 of them: .*refused\.txt"):
        made([{"text": ""}] * 2000)
    assert len(next((tmp_path / "cache").glob("*.refused.txt")).read_text().splitlines()) == 10


RECORDS = [{"prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(30)]


def samples_in(path, tmp_path, **how):
    data = prepare([path], TOKENIZER, context=40, cache=tmp_path / "cache", **how)
    return [tuple(map(bytes, data.sample(n))) for n in range(data.samples)]


def test_a_list_of_json_is_as_good_as_lines(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    expected = samples_in(lines, tmp_path)
    for number, text in enumerate((json.dumps(RECORDS), "\ufeff\n" + json.dumps(RECORDS, indent=1))):
        path = tmp_path / f"list{number}.json"
        path.write_text(text, encoding="utf-8")
        assert samples_in(path, tmp_path) == expected
        held = [samples_in(path, tmp_path, part=(5, side)) for side in (False, True)]
        assert sorted(held[0] + held[1]) == sorted(expected) and all(held)
    for text, told in (
        ('[{"text": "a"}, {"text": 1}, 5]', r"(?s)json:2: text: expected.*json:3: holds a int"),
        ('[{"text": "a"}, ', r"begins as a list of JSON and is none: Expecting.*Fix: JSONL"),
        ("[]", r"nothing to learn from \(no lines\)"),
    ):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match=told):
            samples_in(tmp_path / "wrong.json", tmp_path)


def test_what_datasets_has_written_is_as_good_as_lines(tmp_path):
    """Parquet, and folders of one and of several splits; columns that a row does not have are null in it."""
    datasets = pytest.importorskip("datasets", reason="pip install fnshard[datasets]")
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in (*RECORDS, talk)))
    expected = samples_in(lines, tmp_path)
    table = datasets.Dataset.from_list([{"messages": None, **record} for record in RECORDS] + [talk])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select(range(3))).save_to_disk(tmp_path / "several")
    datasets.DatasetDict(test=table).save_to_disk(tmp_path / "other")
    for name in ("rows.parquet", "one", "several"):
        assert samples_in(tmp_path / name, tmp_path) == expected
    assert samples_in(tmp_path / "several" / "test", tmp_path) == expected[:3]
    with pytest.raises(ConfigError, match=r"has no split train; it has test\. Fix: name one, .*other/test"):
        samples_in(tmp_path / "other", tmp_path)
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-99])
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    for name in ("torn.parquet", "one"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read by datasets: \w+: "):
            samples_in(tmp_path / name, tmp_path)
    datasets.Dataset.from_dict({"text": ["a", ""]}).to_parquet(tmp_path / "wrong.parquet")
    with pytest.raises(ConfigError, match=r"wrong\.parquet:2: text: is empty"):
        samples_in(tmp_path / "wrong.parquet", tmp_path)


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(MissingExtraError, match=r"rows\.parquet is read by datasets.*fnshard\[datasets\]"):
        samples_in(tmp_path / "rows.parquet", tmp_path)


def test_long_samples_are_cut_if_asked(made, capsys):
    lines = [
        {"prompt": "p" * 10, "response": "r" * 80},
        {"prompt": "p" * 80, "response": "r"},  # nothing to learn is left
        {"text": "t"},
    ]
    data = made(lines, too_long="truncate")
    assert shown(data)[:2] == ("p" * 10, "r" * 54) and data.longest == 64
    assert data.left_out == {"broken": 0, "too_long": 1, "truncated": 1}
    assert "2 samples" in capsys.readouterr().err
    pair = {"prompt": "p", "chosen": "c" * 70 + "a", "rejected": "c" * 70 + "b"}
    with pytest.raises(ConfigError, match=r"nothing to learn from \(1 too long\)"):
        made([pair], kind="pairs", too_long="truncate")


def test_lines_far_too_long_are_no_lines(made, monkeypatch):
    monkeypatch.setattr(layouts, "LONGEST", 100)
    content = [{"text": "a" * 500}, {"text": "b"}, {"text": "c" * 89}]
    data = made(content, context=200, broken="skip")
    assert [shown(data, n)[1] for n in range(data.samples)] == ["b"]
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: is longer than 0 MiB; is this JSONL\?"):
        made(content[:1], context=200)


def test_a_file_without_another_is_cut_in_two_parts(made, monkeypatch):
    content = [{"text": f"{n}"} for n in range(400)]
    content[7], content[8] = {"text": ""}, {"text": "x" * 99}
    taken, encode_all = [], writer.encode_all
    monkeypatch.setattr(writer, "encode_all", lambda t, d: taken.extend(d) or encode_all(t, d))
    train, held = (made(content, part=(5, side), broken="skip", too_long="skip") for side in (False, True))
    assert len(taken) == 399  # tokenised once for both
    told = [[int(shown(data, n)[1]) for n in range(data.samples)] for data in (train, held)]
    assert sorted(told[0] + told[1]) == [n for n in range(400) if n not in (7, 8)]
    assert 45 < len(told[1]) < 120 and len({n % 5 for n in told[1]}) == 5  # a rhythm of the file is not kept
    both = [data.left_out for data in (train, held)]
    assert [both[0][name] + both[1][name] for name in ("broken", "too_long", "truncated")] == [1, 1, 0]
    longer = made([*content, {"text": "more"}], "more.jsonl", part=(5, True), broken="skip", too_long="skip")
    assert set(told[1]) <= set(range(400)) & {
        int(shown(longer, n)[1]) for n in range(longer.samples) if shown(longer, n)[1] != "more"
    }
    with pytest.raises(ConfigError, match=r"^2 lines cannot be used"):  # of both parts, at once
        made(content, part=(5, False))


@pytest.mark.parametrize("every", [2, 20, 10**9])
def test_each_part_of_two_lines_has_one(made, every):
    for seed in range(12):
        content = [{"text": f"{seed} {n}"} for n in range(2)] * 2
        train, held = (made(content[:2], part=(every, side)) for side in (False, True))
        assert (train.samples, held.samples) == (1, 1) and shown(train)[1] != shown(held)[1]
    train, held = (made([{"text": "same"}] * 3, part=(every, side)) for side in (False, True))
    assert train.samples and held.samples and train.samples + held.samples == 3


@pytest.mark.parametrize("every", [2, 20])
def test_one_line_is_learned_and_the_way_out_is_told(made, every):
    for text in "abcdef":
        for side in (False, True):
            with pytest.raises(ConfigError, match=r"none can be held out.*data\.held_out=FILE"):
                made([{"text": text}, {"text": ""}], part=(every, side), broken="skip")


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
def test_settings_that_mean_nothing_are_refused(made, how, message):
    with pytest.raises(ConfigError, match=message):
        made([GOOD["samples"]], **how)


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


# ------------------------------------------------------------------ tokenised once


def test_the_second_call_finds_what_the_first_made(made, monkeypatch, tmp_path):
    first = made([GOOD["samples"]])
    os.utime(tmp_path / "data.jsonl", (1, 1))
    monkeypatch.setattr(prepared, "_make", None)
    again = made([GOOD["samples"]], "another name.jsonl")
    assert again == first == open_prepared(first.folder)
    for content, how in [
        ([{"text": "Good"}], {}),
        ([GOOD["samples"]], {"context": 65}),
        ([GOOD["samples"]], {"broken": "skip"}),
        ([GOOD["samples"]], {"too_long": "truncate"}),
    ]:
        with pytest.raises(TypeError, match="NoneType"):  # it would be made anew
            made(content, **how)


def test_another_tokenizer_is_another_key(made, tmp_path):
    from tokenizer_files import CHATML

    folder = tmp_path / "model"
    folder.mkdir()
    TOKENIZER.save(folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    keys = {made([GOOD["samples"]]).key}
    keys.add(made([GOOD["samples"]], tokenizer=load_tokenizer(folder)).key)
    (folder / "chat_template.jinja").write_text(CHATML)
    data = made([GOOD["samples"]], tokenizer=load_tokenizer(folder))
    assert len({*keys, data.key}) == 3
    assert TOKENIZER.decode(data.sample(0)[0].tolist()) == "good"


def test_torn_folders_are_made_anew_and_refused_by_ranks(made):
    data = made([GOOD["samples"]])
    ids = data.sample(0)[0].tolist()
    (data.folder / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"holds no prepared data, or not the whole of it\. Fix: prepare"):
        open_prepared(data.folder)
    assert made([GOOD["samples"]]).sample(0)[0].tolist() == ids
    (data.folder / "prepared.json").write_text("[")
    assert made([GOOD["samples"]]).sample(0)[0].tolist() == ids
    with pytest.raises(ConfigError, match="holds no prepared data"):
        open_prepared(data.folder / "nowhere")


def test_a_race_is_won_by_one_and_all_get_the_whole(made, tmp_path, monkeypatch):
    made([{"text": f"{n}"} for n in range(500)])
    barrier, found = threading.Barrier(4), []
    make = prepared._make

    def together(*args):
        barrier.wait(timeout=60)  # nobody has found another's folder
        make(*args)

    def run():
        found.append(prepare([tmp_path / "data.jsonl"], TOKENIZER, context=99, cache=tmp_path / "race"))

    monkeypatch.setattr(prepared, "_make", together)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and {data.samples for data in found} == {500}
    assert [p.name for p in (tmp_path / "race").iterdir()] == [found[0].key]  # and nothing partial


def test_a_file_that_grows_meanwhile_is_refused(made, monkeypatch, tmp_path):
    sum_of = prepared._sum_of

    def grows(path):
        told = sum_of(path)
        path.write_text(path.read_text() * 2)
        return told

    monkeypatch.setattr(prepared, "_sum_of", grows)
    with pytest.raises(ConfigError, match=r"data\.jsonl changed while it was read"):
        made([GOOD["samples"]])
    assert not list((tmp_path / "cache").iterdir())


def test_a_large_file_is_streamed(made, tmp_path):
    line = json.dumps({"prompt": "p" * 1000, "response": "r" * 3000}) + "\n"
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(8):
            file.write(line * 1000)
    size = (tmp_path / "large.jsonl").stat().st_size
    tracemalloc.start()
    try:
        began = time.process_time()
        data = prepare([tmp_path / "large.jsonl"], TOKENIZER, context=4096, cache=tmp_path / "cache")
        seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.samples == 8000 and data.tokens == 8000 * 4002 and size > 32e6
    assert peak < 16e6
    assert seconds < 20  # about 2 on an idle machine


def test_progress_is_told_where_it_takes_long(made, monkeypatch, capsys):
    monkeypatch.setattr(writer, "EVERY_S", -1.0)
    made([GOOD["samples"]])
    assert "tokenised 0.0 of 0.0 GB" in capsys.readouterr().err


# ------------------------------------------------------------------ built in


def test_built_in_examples_are_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "MOST", {False: 200, True: 30})
    texts = []
    for name in ("one", "two"):
        builtin._functions.cache_clear()
        files = *builtin.sft_files(tmp_path / name), *builtin.pair_files(tmp_path / name)
        texts.append([f.read_bytes() for f in (*files, builtin.choice_file(tmp_path / name))])
    builtin._functions.cache_clear()
    assert texts[0] == texts[1] and texts[0][0].count(b"\n") == 200


def test_built_in_examples_are_real_and_split(tmp_path):
    train, held = builtin.sft_files(tmp_path)
    files = (train, held, *builtin.pair_files(tmp_path), builtin.choice_file(tmp_path))
    told = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert (
        [len(x) for x in told[:2]] == [2000, 200]
        and len(told[-1]) == 50
        and all(len(x) > 150 for x in told[:-1])
    )
    both = [{(x["prompt"], x["response"]) for x in side} for side in told[:2]]
    assert not both[0] & both[1]
    assert all(p.startswith("def ") and p.endswith('):\n    """') and "\n" not in r for p, r in both[0])
    assert all((x["prompt"], x["chosen"]) in both[0] and x["chosen"] != x["rejected"] for x in told[2])
    assert all((x["prompt"], x["choices"][x["answer"]]) in both[1] for x in told[4])
    assert all(len(set(x["choices"])) == 4 for x in told[4])
    answers = [x["answer"] for x in told[4]]
    assert min(answers.count(n) for n in range(4)) > 6  # no place is the right one more often
    kinds = ("samples", "samples", "pairs", "pairs", "choices")
    for file, kind in zip(files, kinds, strict=True):
        data = prepare([file], TOKENIZER, context=256, cache=tmp_path / "cache", kind=kind)
        assert not any(data.left_out.values())
