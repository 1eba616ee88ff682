"""Data in other formats, cut in two parts, tokenised once; and the examples that are built in."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import tracemalloc

import pytest
from data_lines import GOOD, TOKENIZER, shown

from experiments.configs.train import ConfigError
from experiments.data import builtin, layouts, prepared, writer
from experiments.data.prepared import open_prepared, prepare
from experiments.data.tokenizer import load_tokenizer
from fnshard.errors import MissingExtraError

# ------------------------------------------------------------------ formats and parts

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


def test_long_samples_are_cut_if_asked(prepared_from, capsys):
    lines = [
        {"prompt": "p" * 10, "response": "r" * 80},
        {"prompt": "p" * 80, "response": "r"},  # nothing to learn is left
        {"text": "t"},
    ]
    data = prepared_from(lines, too_long="truncate")
    assert shown(data)[:2] == ("p" * 10, "r" * 54) and data.longest == 64
    assert data.left_out == {"broken": 0, "too_long": 1, "truncated": 1}
    assert "2 samples" in capsys.readouterr().err
    pair = {"prompt": "p", "chosen": "c" * 70 + "a", "rejected": "c" * 70 + "b"}
    with pytest.raises(ConfigError, match=r"nothing to learn from \(1 too long\)"):
        prepared_from([pair], kind="pairs", too_long="truncate")


def test_lines_far_too_long_are_no_lines(prepared_from, monkeypatch):
    monkeypatch.setattr(layouts, "LONGEST", 100)
    content = [{"text": "a" * 500}, {"text": "b"}, {"text": "c" * 89}]
    data = prepared_from(content, context=200, broken="skip")
    assert [shown(data, n)[1] for n in range(data.samples)] == ["b"]
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: is longer than 0 MiB; is this JSONL\?"):
        prepared_from(content[:1], context=200)


def test_a_file_without_another_is_cut_in_two_parts(prepared_from, monkeypatch):
    content = [{"text": f"{n}"} for n in range(400)]
    content[7], content[8] = {"text": ""}, {"text": "x" * 99}
    taken, encode_all = [], writer.encode_all
    monkeypatch.setattr(writer, "encode_all", lambda t, d: taken.extend(d) or encode_all(t, d))
    train, held = (
        prepared_from(content, part=(5, side), broken="skip", too_long="skip") for side in (False, True)
    )
    assert len(taken) == 399  # tokenised once for both
    told = [[int(shown(data, n)[1]) for n in range(data.samples)] for data in (train, held)]
    assert sorted(told[0] + told[1]) == [n for n in range(400) if n not in (7, 8)]
    assert 45 < len(told[1]) < 120 and len({n % 5 for n in told[1]}) == 5  # a rhythm of the file is not kept
    both = [data.left_out for data in (train, held)]
    assert [both[0][name] + both[1][name] for name in ("broken", "too_long", "truncated")] == [1, 1, 0]
    longer = prepared_from(
        [*content, {"text": "more"}], "more.jsonl", part=(5, True), broken="skip", too_long="skip"
    )
    assert set(told[1]) <= set(range(400)) & {
        int(shown(longer, n)[1]) for n in range(longer.samples) if shown(longer, n)[1] != "more"
    }
    with pytest.raises(ConfigError, match=r"^2 lines cannot be used"):  # of both parts, at once
        prepared_from(content, part=(5, False))


@pytest.mark.parametrize("every", [2, 20, 10**9])
def test_each_part_of_two_lines_has_one(prepared_from, every):
    for seed in range(12):
        content = [{"text": f"{seed} {n}"} for n in range(2)] * 2
        train, held = (prepared_from(content[:2], part=(every, side)) for side in (False, True))
        assert (train.samples, held.samples) == (1, 1) and shown(train)[1] != shown(held)[1]
    train, held = (prepared_from([{"text": "same"}] * 3, part=(every, side)) for side in (False, True))
    assert train.samples and held.samples and train.samples + held.samples == 3


@pytest.mark.parametrize("every", [2, 20])
def test_one_line_is_learned_and_the_way_out_is_told(prepared_from, every):
    for text in "abcdef":
        for side in (False, True):
            with pytest.raises(ConfigError, match=r"none can be held out.*data\.held_out=FILE"):
                prepared_from([{"text": text}, {"text": ""}], part=(every, side), broken="skip")


# ------------------------------------------------------------------ tokenised once


def test_the_second_call_finds_what_the_first_made(prepared_from, monkeypatch, tmp_path):
    first = prepared_from([GOOD["samples"]])
    os.utime(tmp_path / "data.jsonl", (1, 1))
    monkeypatch.setattr(prepared, "_make", None)
    again = prepared_from([GOOD["samples"]], "another name.jsonl")
    assert again == first == open_prepared(first.folder)
    for content, how in [
        ([{"text": "Good"}], {}),
        ([GOOD["samples"]], {"context": 65}),
        ([GOOD["samples"]], {"broken": "skip"}),
        ([GOOD["samples"]], {"too_long": "truncate"}),
    ]:
        with pytest.raises(TypeError, match="NoneType"):  # it would be prepared_from anew
            prepared_from(content, **how)


def test_another_tokenizer_is_another_key(prepared_from, tmp_path):
    from tokenizer_files import CHATML

    folder = tmp_path / "model"
    folder.mkdir()
    TOKENIZER.save(folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    keys = {prepared_from([GOOD["samples"]]).key}
    keys.add(prepared_from([GOOD["samples"]], tokenizer=load_tokenizer(folder)).key)
    (folder / "chat_template.jinja").write_text(CHATML)
    data = prepared_from([GOOD["samples"]], tokenizer=load_tokenizer(folder))
    assert len({*keys, data.key}) == 3
    assert TOKENIZER.decode(data.sample(0)[0].tolist()) == "good"


def test_torn_folders_are_made_anew_and_refused_by_ranks(prepared_from):
    data = prepared_from([GOOD["samples"]])
    ids = data.sample(0)[0].tolist()
    (data.folder / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"holds no prepared data, or not the whole of it\. Fix: prepare"):
        open_prepared(data.folder)
    assert prepared_from([GOOD["samples"]]).sample(0)[0].tolist() == ids
    (data.folder / "prepared.json").write_text("[")
    assert prepared_from([GOOD["samples"]]).sample(0)[0].tolist() == ids
    with pytest.raises(ConfigError, match="holds no prepared data"):
        open_prepared(data.folder / "nowhere")


def test_a_race_is_won_by_one_and_all_get_the_whole(prepared_from, tmp_path, monkeypatch):
    prepared_from([{"text": f"{n}"} for n in range(500)])
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


def test_a_file_that_grows_meanwhile_is_refused(prepared_from, monkeypatch, tmp_path):
    sum_of = prepared._sum_of

    def grows(path):
        told = sum_of(path)
        path.write_text(path.read_text() * 2)
        return told

    monkeypatch.setattr(prepared, "_sum_of", grows)
    with pytest.raises(ConfigError, match=r"data\.jsonl changed while it was read"):
        prepared_from([GOOD["samples"]])
    assert not list((tmp_path / "cache").iterdir())


def test_a_large_file_is_streamed(prepared_from, tmp_path):
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


def test_progress_is_told_where_it_takes_long(prepared_from, monkeypatch, capsys):
    monkeypatch.setattr(writer, "EVERY_S", -1.0)
    prepared_from([GOOD["samples"]])
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
