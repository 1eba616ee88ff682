"""Files of records: what lines mean, every way they can be wrong, other formats, tokenised once."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import raises
from hypothesis import given
from hypothesis import strategies as st
from made_data import ASSISTANT, BYTES, SYSTEM, USER, show_sample

from experiments.data import builtin, prepared, rows
from experiments.data.prepared import RecordPolicy, open_prepared, prepare
from experiments.data.records import KINDS
from experiments.data.tokenizer import open_directory
from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError
from experiments.tuning import rewards
from fnshard.errors import MissingExtraError

# ------------------------------------------------------------------ what lines mean


@pytest.mark.parametrize(
    ("line", "prompt", "response"),
    [
        ({"prompt": "1+1=", "response": "2"}, "1+1=", "2"),
        ({"prompt": "", "completion": "é☃"}, "", "é☃"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n\n1 1\n\n", "2"),
        ({"instruction": "Add.", "input": "", "response": "2"}, "Add.\n\n", "2"),
        ({"text": "not <|end> yet"}, "", "not <|end> yet"),
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
    asked, learned, ids = show_sample(data)
    assert (asked, learned) == (prompt, response)
    assert ids[0] == BYTES.bos and ids[-1] == BYTES.eos and data.sample(0)[1][-1] == 1
    assert data.samples == data.records == 1 and data.tokens == len(ids)
    assert data.learned == data.sample(0)[1].sum() and data.longest == data.shortest == len(ids) - 1
    assert data.lengths(np.array([0])).tolist() == [len(ids) - 1]


def said(content):
    return {**ASSISTANT, "content": content}


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [said("2")], "rejected": "3"},
        {"prompt": "hi ", "chosen": [USER, said("2")], "rejected": [USER, said("3")]},
        {"prompt": [USER], "chosen": [SYSTEM, USER, said("2")], "rejected": [SYSTEM, USER, said("3")]},
        {"chosen": [USER, ASSISTANT, USER, said("2")], "rejected": [USER, ASSISTANT, USER, said("3")]},
    ],
)
def test_pairs_are_two_samples_of_one_prompt(prepared_from, line):
    data = prepared_from([line], kind="pairs")
    (asked, chosen, _), (again, rejected, _) = show_sample(data, 0), show_sample(data, 1)
    assert asked == again and (chosen, rejected) == ("2", "3")
    assert (260 in data.sample(0)[0]) == (asked != "1+1=")  # a user's message where any of it is one
    assert (data.records, data.samples) == (1, 2)


ASK = "<|begin|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("line", "asked", "learned"),
    [
        ({"text": f"{ASK}yo<|end|>"}, "", [f"{ASK}yo<|end|>"]),
        ({"text": "yo<|end|>"}, "", ["yo<|end|>"]),
        ({"prompt": ASK, "response": "yo<|end|>"}, ASK, ["yo<|end|>"]),
        ({"prompt": ASK, "completion": "yo"}, ASK, ["yo<|end|>"]),
        ({"instruction": ASK, "output": "yo<|end|>"}, f"{ASK}\n\n", ["yo<|end|>"]),
        ({"prompt": ASK, "chosen": "yo<|end|>", "rejected": "no<|end|>"}, ASK, ["yo<|end|>", "no<|end|>"]),
    ],
)
def test_texts_of_a_chat_template_have_its_control_tokens(
    prepared_from, byte_directory, line, asked, learned
):
    """They are read as transformers reads them; the line that is printed says so."""
    data = prepared_from([line], kind="pairs" if "chosen" in line else "samples")
    for number, text in enumerate(learned):
        ids, mask = data.sample(number)
        assert ids.tolist() == byte_directory.hf(asked + text, add_special_tokens=False)["input_ids"]
        assert byte_directory.decode(ids[mask.astype(bool)].tolist(), control=True) == text
    assert "; control tokens are read in the texts of 1" in str(data)
    assert "control" not in str(prepared_from([GOOD["samples"], {"messages": [USER, ASSISTANT]}]))


# ------------------------------------------------------------------ what can be wrong

GOOD = {"samples": {"text": "good"}, "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"}}
WRONG = {
    "samples": [
        (b'{"text": "a"', "is no JSON (Expecting ',' delimiter: line 2 column 1"),
        (b'{"text": "\xff"}', "is no JSON ('utf-8' codec can't decode byte 0xff in position 10"),
        (b"[" * 100_000, "is no JSON (maximum recursion depth"),
        *((b'{"a":' * n + b"1" + b"}" * n, "a: is nested more than") for n in (300, 500)),
        *((b'{"a":' * n + b"1" + b"}" * n, "") for n in (900, 980)),  # which the parser may refuse itself
        (b'{"prompt": "a", "response": "b", "\\ud800": 1}', "\\ud800: holds half of a surrogate pair"),
        (b'{"prompt": "a", "response": "b", "chat_template_kwargs": {"\\ud800": 1}}', "chat_template_kw"),
        (b'{"prompt": "a", "response": "b", "images": ["\\ud800.png"]}', "images: holds half of a surrogate"),
        (b'["text"]', "holds a list, expected an object: {...}"),
        (b'{"text": "\\ud800"}', "text: holds half of a surrogate pair"),
        ({"a": 1}, "has none of 'messages', 'prompt' and 'response', "),
        ({"prompt": "a"}, "has none of "),
        ({"prompt": 3, "response": " \n"}, "prompt: expected a text, got int; response: is empty"),
        ({"prompt": "a", "response": None}, "response: expected a text, got null"),
        ({"instruction": "", "input": 1, "output": "a"}, "input: expected a text, got int"),
        ({"text": ["a"]}, "text: expected a text, got list"),
        ({"messages": []}, "messages: expected a list of messages, got an empty one"),
        ({"messages": ["hi", {"role": "assistant"}]}, "messages: [0]: expected an object with 'role' "),
        ({"messages": [USER, {"role": "assistant"}]}, "messages: [1]: content: expected a text, got null"),
        ({"messages": [USER]}, "there is no assistant's message to learn"),
        ({"messages": [USER, said("")]}, "messages: [1]: content: is empty"),
        ({"messages": [{"role": "tool", "content": "a"}, ASSISTANT]}, "the chat template refuses it (Templ"),
        ({"messages": [{**USER, "content": "a<|end|>"}, ASSISTANT]}, "messages[0] spells the control token"),
        ({"prompt": "bye", "response": [USER, ASSISTANT]}, "a response begins with a user's message that is"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "f"}]}, "the chat template does not show tools"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "messages: [1]: tool_calls: expected"),
        ({"prompt": "a" * 100, "response": "a"}, "takes 102 positions, the context has 64"),
    ],
    "pairs": [
        ({"prompt": "a", "chosen": "b"}, "rejected: expected a text, got null"),
        ({"chosen": "b", "rejected": "c"}, "chosen: expected a list of messages, got str; rejected: "),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": "c" * 80}, "takes 82 positions"),
        ({"prompt": "hi", "chosen": [SYSTEM, USER, ASSISTANT], "rejected": "no"}, "chosen and rejected ans"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, USER]}, "there is no assistant's message to learn"),
        ({"chosen": [USER, ASSISTANT], "rejected": [SYSTEM]}, "chosen and rejected: expected messages that"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_line_is_named_by_file_and_line_or_left_out(prepared_from, kind, tmp_path, capsys):
    content = [GOOD[kind], b"", *(line for line, _ in WRONG[kind]), GOOD[kind]]
    with raises(ConfigError, says=f"{len(WRONG[kind])} lines") as error:
        prepared_from(content, kind=kind)
    lines = str(error.value).splitlines()
    for number, (line, (_, message)) in enumerate(zip(lines[1:-1], WRONG[kind], strict=True), 3):
        assert line.startswith(f"  {tmp_path / 'data.jsonl'}:{number}: {message}")
    assert lines[-1].startswith("Fix: mend the lines, or leave such out with data.broken=skip; leave long re")
    assert not list((tmp_path / "cache").iterdir())  # nothing of a refused file is kept
    long = sum("takes" in message for _, message in WRONG[kind])
    for _ in range(2):  # prepared, then found again
        data = prepared_from(content, kind=kind, broken="skip", too_long="skip")
        assert data.records == 2 and data.left_out == {"broken": len(WRONG[kind]) - long, "too_long": long}
        assert f"{len(WRONG[kind]) - long} broken" in capsys.readouterr().err
    with raises(ConfigError, fix=["mend the lines", "data.broken=skip"], says="150 more"):
        prepared_from([b"{"] * 200, kind=kind)


def test_long_samples_are_cut_if_asked(prepared_from):
    lines = [
        {"prompt": "p" * 10, "response": "r" * 80},
        {"prompt": "p" * 80, "response": "r"},  # nothing to learn is left
        {"text": "t"},
    ]
    data = prepared_from(lines, too_long="truncate")
    assert show_sample(data)[:2] == ("p" * 10, "r" * 54) and data.longest == 64
    assert data.left_out == {"broken": 0, "too_long": 1} and data.samples == 2
    pair = {"prompt": "p", "chosen": "c" * 70 + "a", "rejected": "c" * 70 + "b"}
    with raises(ConfigError, leaves="data.jsonl", says="1 too long"):
        prepared_from([pair], kind="pairs", too_long="truncate")


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5),
       lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(st.sampled_from(["messages", "prompt", "response", "chosen", "rejected", "role",
                                          "content", "text"]), inner, max_size=4),
       max_leaves=12), st.sampled_from(list(GOOD)))  # fmt: skip
def test_any_line_is_a_record_or_one_clear_error(byte_directory, line, kind):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    try:
        KINDS[kind](rows.record_of({rows.LINE: 1, rows.JSON: line}), byte_directory)
    except LineError as error:
        assert str(error)


def test_files_that_cannot_be_read(tmp_path, byte_directory):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "torn.json").write_text('[{"text": "a"}, ')
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and so on")
    cases = {
        "a" * 300: (["a" * 300, "no such file"], "JSONL"),
        "/dev/zero": (["/dev/zero", "no such file"], "JSONL"),
        "": (["a folder", "save_to_disk"], "JSONL"),
        "empty.jsonl": (["empty.jsonl", "no data"], "JSONL"),
        "torn.json": (["torn.json", "JSONDecodeError"], ()),
        "torn.parquet": (["torn.parquet", "ArrowInvalid"], ()),
    }
    for name, (leaves, fix) in cases.items():
        with raises(ConfigError, leaves=leaves, fix=fix):
            prepare(tmp_path / name, byte_directory, RecordPolicy("samples", 9), cache=tmp_path / "cache")
    with raises(ConfigError, leaves=str(tmp_path / "empty.jsonl" / "below")):
        (tmp_path / "good.jsonl").write_text('{"text": "a"}')
        policy, cache = RecordPolicy("samples", 9), tmp_path / "empty.jsonl" / "below"
        prepare(tmp_path / "good.jsonl", byte_directory, policy, cache=cache)


MANY = [{"prompt": f"{n}", "response": "a"} for n in range(60)]
LINES = "".join(f"{json.dumps(record)}\n" for record in MANY)
OTHERS = {  # what does not begin as records do: what is said of it
    "nothing": (b"", "no data"),
    "blanks": (b" \n\n", "no data"),
    "gzip": (gzip.compress(LINES.encode()), r"\x1f\x8b"),
    "utf16": (LINES.encode("utf-16"), r"\xff\xfe"),
    "csv": (b"prompt,response\na,b\n", "prompt,response"),
    "weights": (b"\x40" + bytes(7) + b'{"a":{"dtype":"F32","shape":[1]}}', r"@\x00"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_file_of_records_is_one_error(byte_directory, tmp_path, name):
    content, what = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    for broken in ("refuse", "skip"):
        with pytest.raises(ConfigError) as error:
            policy = RecordPolicy("samples", 9, broken=broken)
            prepare(tmp_path / name, byte_directory, policy, cache=tmp_path / "cache")
        head, fix = str(error.value).split("Fix: ")
        assert (
            "\n" not in str(error.value) and str(tmp_path / name) in head and what in head and "JSONL" in fix
        )


OF_ONE_ERROR = {  # what begins as records do, and holds none
    "one object": json.dumps({"data": MANY}),
    "indented": json.dumps(MANY[0], indent=1),
    "commas": ",\n".join(json.dumps(r, indent=1) for r in MANY[:9]),
    "python": "".join(f"{r}\n" for r in MANY[:9]),
    "texts": '["a",\n"b"]',
    "an empty list": "[]",
}


@pytest.mark.parametrize("name", OF_ONE_ERROR)
def test_a_file_without_a_record_is_one_error(byte_directory, tmp_path, name):
    (tmp_path / "it.json").write_text(OF_ONE_ERROR[name])
    for broken in ("refuse", "skip"):
        with raises(ConfigError, leaves="it.json"):
            policy = RecordPolicy("samples", 9, broken=broken)
            prepare(tmp_path / "it.json", byte_directory, policy, cache=tmp_path / "cache")


LONG = json.dumps({"text": "x" * (1 << 20) + "y"})
LARGE = {  # whose beginning alone says little
    "one long line": LONG,
    "a long line first": f"{LONG}\n{LINES}",
    "a long line behind a blank one": f"\n{LONG}\n",
    "a long list": json.dumps([json.loads(LONG)]),
    "a list": json.dumps([{"text": "x" * 99}] * 20_000),
    "separators of lines in texts": '{"text": "a\u2028b\x85c\u2029d"}\n' * 2,
    "a call that is no JSON": json.dumps(
        {"messages": [USER, {"role": "function_call", "content": "no"}]}, indent=None
    ),
    **{
        f"{n} deep": '{"text": "x", "a":' + '{"a":' * n + "1" + "}" * (n + 1)
        for n in (300, 500, 900, 980, 20_000)
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_what_may_be_records_is_read_line_by_line(tmp_path, monkeypatch, name):
    (tmp_path / "x.jsonl").write_text(LARGE[name])
    for whole in ("read_text", "read_bytes"):  # nor is a file of lines read whole
        monkeypatch.setattr(Path, whole, None)
    found = list(rows._read_json_records(str(rows.readable(tmp_path / "x.jsonl"))))
    several = {"a long line first": 61, "a list": 20_000, "separators of lines in texts": 2}
    assert len(found) == several.get(name, 1)


OF_A_KIND = {
    "samples": {"prompt": "a", "response": "b"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "prompts": {"messages": [USER]},
    "answers": {"prompt": "a", "completion": "b", "label": True},
}


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ("samples", "pairs"),
        ("pairs", "samples"),
        ("prompts", "samples"),
        ("prompts", "pairs"),
        ("answers", "samples"),
    ],
)
def test_a_file_for_another_objective_is_one_error(prepared_from, tmp_path, there, wanted):
    """Whatever becomes of broken lines: there are no others."""
    for broken in ("refuse", "skip"):
        with pytest.raises(ConfigError) as error:
            prepared_from([OF_A_KIND[there]] * 60, kind=wanted, broken=broken)
        (line,) = str(error.value).splitlines()
        objectives = {"samples": "sft", "pairs": "dpo", "prompts": "grpo"}
        assert str(tmp_path / "data.jsonl") in line and "60 records" in line and "data.broken" not in line
        assert f"objective={objectives[wanted]} learns from" in line
        assert there == "answers" or f"Fix: objective={objectives[there]}" in line
    with raises(ConfigError, says="60 lines"):  # some are right: the others are named
        prepared_from([*[OF_A_KIND[there]] * 60, OF_A_KIND[wanted]], kind=wanted)


def test_any_error_of_a_record_has_its_line(prepared_from, tmp_path, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(prepared, "encode", fails)
    with raises(ConfigError, leaves="data.jsonl:2", says="ZeroDivisionError: by hand"):
        prepared_from([b"", GOOD["samples"]])


# ------------------------------------------------------------------ formats, splits, the cache

RECORDS = [{"prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(30)]


def test_other_formats_are_as_good_as_lines(prepared_from, tmp_path, byte_directory):
    """Lists of JSON, Parquet, folders of one and of several splits; what a row of a table does not have is
    null in it."""
    datasets = pytest.importorskip("datasets")
    talk = {"messages": [USER, ASSISTANT]}

    def samples_in(data):
        return [tuple(map(bytes, data.sample(n))) for n in range(data.samples)]

    def from_file(name):
        policy = RecordPolicy("samples", 64)
        return samples_in(prepare(tmp_path / name, byte_directory, policy, cache=tmp_path / "cache")[0])

    expected = samples_in(prepared_from([*RECORDS, talk]))
    (tmp_path / "list.json").write_text("\ufeff\n" + json.dumps([*RECORDS, talk], indent=1))
    table = datasets.Dataset.from_list([{"messages": None, **record} for record in RECORDS] + [talk])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select(range(3))).save_to_disk(tmp_path / "several")
    for name in ("list.json", "rows.parquet", "one", "several"):
        assert from_file(name) == expected
    assert from_file("several/test") == expected[:3]
    datasets.Dataset.from_dict({"text": ["a", ""], "line": ["x", "y"]}).to_parquet(tmp_path / "wrong.parquet")
    with raises(ConfigError, leaves="wrong.parquet:2: text", says="empty"):
        from_file("wrong.parquet")
    datasets.Dataset.from_dict({"line": ["x"], "json": ["y"]}).to_parquet(tmp_path / "ours.parquet")
    with raises(ConfigError, leaves="ours.parquet:1", says="'line', 'json'"):
        from_file("ours.parquet")


@pytest.mark.parametrize("image", [{"bytes": b"x"}, {"bytes": b"x", "path": "of_old.png"}])
def test_images_that_are_bytes_in_a_table_are_named(tmp_path, byte_directory, image):
    datasets = pytest.importorskip("datasets")
    talk = {"messages": [USER, ASSISTANT], "images": [{"path": None, **image}]}
    datasets.Dataset.from_list([talk]).to_parquet(tmp_path / "x.parquet")
    with raises(ConfigError, leaves="x.parquet:1: images", says="path"):
        prepare(tmp_path / "x.parquet", byte_directory, RecordPolicy("samples", 99), cache=tmp_path / "cache")


def test_a_part_of_a_file_is_held_out(prepared_from):
    content = [*({"text": f"{n}"} for n in range(100)), {"text": ""}]
    train, held = prepared_from(content, split=True, broken="skip")
    texts = [[int(show_sample(data, n)[1]) for n in range(data.samples)] for data in (train, held)]
    assert len(texts[1]) == 5 and sorted(texts[0] + texts[1]) == list(range(100))
    assert train.key != held.key and train.left_out["broken"] == 1
    one, other = prepared_from(content[:2], split=True)
    assert (one.samples, other.samples) == (1, 1)
    with raises(ConfigError, leaves="data.jsonl", fix="data.held_out=FILE"):
        prepared_from(content[:1], split=True)


def test_the_second_call_finds_what_the_first_made(prepared_from, monkeypatch, directory, tmp_path):
    first = prepared_from([GOOD["samples"]])
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_prepare_folder", None)
        assert prepared_from([GOOD["samples"]], "another name.jsonl") == first == open_prepared(first.folder)
    other = open_directory(directory(tokenizer_config={"eos_token": "</s>"}))
    keys = {
        prepared_from(content, **how).key
        for content, how in [
            ([{"text": "Good"}], {}),
            ([GOOD["samples"]], {"context": 65}),
            ([GOOD["samples"]], {"too_long": "truncate"}),
            ([GOOD["samples"]], {"tokenizer": other}),
        ]
    }
    assert len(keys - {first.key}) == 4
    with raises(ConfigError, leaves=str(tmp_path), fix="prepare it anew"):
        open_prepared(tmp_path)


def test_several_processes_make_the_same(prepared_from, monkeypatch):
    datasets = pytest.importorskip("datasets")
    content = [{"text": f"{n}" * (n % 7 + 1)} for n in range(40)]
    one = prepared_from(content)
    monkeypatch.setattr(rows, "ROWS_A_PROCESS", 10)
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda _: {0, 1})
    asked, real = [], datasets.Dataset.map

    def count(self: Any, *args: Any, **how: Any) -> Any:
        asked.append(how["num_proc"])
        return real(self, *args, **how)

    monkeypatch.setattr(datasets.Dataset, "map", count)
    two = prepared_from([*content, {"text": "x"}])
    both = [[bytes(data.sample(n)[0]) for n in range(40)] for data in (one, two)]
    assert both[0] == both[1] and two.samples == 41 and 2 in asked


def test_without_datasets_the_extra_is_named(prepared_from, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(MissingExtraError, leaves="datasets", fix="fnshard[finetune]"):
        prepared_from([GOOD["samples"]])


# ------------------------------------------------------------------ built in


@pytest.mark.long
def test_built_in_examples_are_real_split_and_the_same_every_time(tmp_path, byte_directory):
    files = *builtin.write_sft_files(tmp_path), *builtin.write_pair_files(tmp_path)
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len(x) for x in lines[:2]] == [2000, 200] and all(len(x) > 150 for x in lines)
    both = [{(x["prompt"], x["response"]) for x in side} for side in lines[:2]]
    assert not both[0] & both[1]
    assert all(p.startswith("def ") and p.endswith('):\n    """') and "\n" not in r for p, r in both[0])
    assert all((x["prompt"], x["chosen"]) in both[0] and x["chosen"] != x["rejected"] for x in lines[2])
    before = [file.read_bytes() for file in files]
    builtin._list_functions.cache_clear()
    files = *builtin.write_sft_files(tmp_path), *builtin.write_pair_files(tmp_path)
    assert [file.read_bytes() for file in files] == before
    data = prepare(files[3], byte_directory, RecordPolicy("pairs", 256), cache=tmp_path / "cache")[0]
    assert not any(data.left_out.values())


def test_built_in_answers_are_right_and_wrong(tmp_path):
    files = builtin.write_answer_files(tmp_path)
    for file in files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        prompts, rows = [r["prompt"] for r in records], [{"response": r["chosen"]} for r in records]
        assert set(rewards.solved(prompts, [r["chosen"] for r in records], rows)) == {1.0}
        assert set(rewards.solved(prompts, [r["rejected"] for r in records], rows)) == {0.0}
        assert len({p.split(" ")[0] for p in prompts}) == 4 and all(r["rejected"] for r in records)
    # Some wrong expressions have the right digits, such as one with another sign.
    signs = str.maketrans("+-*", "???")
    pairs = [(r["chosen"], r["rejected"]) for r in map(json.loads, files[0].read_text().splitlines())]
    slips = [wrong for right, wrong in pairs if wrong.translate(signs) == right.translate(signs)]
    assert len(slips) >= 10


def test_built_in_twins_share_the_words_of_a_name(tmp_path):
    sides = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in builtin.write_twin_files(tmp_path)
    ]
    assert len(sides[0]) > 500 and len(sides[1]) > 40  # Pythons differ in their standard library
    for twin in [*sides[0], *sides[1]]:
        name = "_".join(twin["query"].split(" "))
        assert "_" in name and name in twin["positive"] and len(twin["positive"]) <= builtin.LONGEST_TWIN
    queries = [twin["query"] for side in sides for twin in side]
    assert len(set(queries)) == len(queries)  # none twice, and none on both sides
