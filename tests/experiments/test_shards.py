"""Shards: the same tokens however they are made; what is refused; arrays that others made."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import raises
from made_data import EOS, PERCENT, stream_of, tokenize_config
from runs import SMALL, compose, rows_of

import fnshard as fs
from experiments import train
from experiments.data import shards as shards_module
from experiments.data.shards import HEADER, check_vocab, open_shards
from experiments.data.text import is_held_out, open_tokens, table_losses
from experiments.data.tokenizer import load_tokenizer
from experiments.lib.checks import ConfigError
from experiments.lib.folder import RunFolder
from experiments.lib.launch import fit_to_machine
from experiments.tokenize import job
from experiments.tokenize.config import COMMAND
from experiments.tokenize.job import find_text, split_files, tokenize
from experiments.train import train as run_training
from fnshard.launcher.rank import Stop


def compute_tokens(folder: Path, held_out: bool) -> list[int]:
    """Return the tokens of a folder of text, computed the plain way."""
    found: list[int] = []
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in (".txt", ".md", ".py", ".jsonl") or is_held_out(name, PERCENT) != held_out:
            continue
        text = path.read_bytes().decode("utf-8-sig")
        documents = [json.loads(x)["text"] for x in text.split("\n\n")] if path.suffix == ".jsonl" else [text]
        for document in documents:
            if document or path.suffix != ".jsonl":
                found += [*document.encode(), EOS]
    return found


# ------------------------------------------------------------------ from text to shards


@pytest.mark.parametrize(
    ("shard_mb", "processes"), [(0.01, 1), pytest.param(0.01, 2, marks=pytest.mark.long), (64.0, 1)]
)
def test_shards_hold_the_text_whatever_their_size(texts, tmp_path, monkeypatch, shard_mb, processes):
    monkeypatch.setattr(job, "PIECE", 2**9)
    monkeypatch.setattr(job, "BATCH", 4)
    config = tokenize_config(tmp_path / "out", texts, shard_mb=shard_mb, processes=processes)
    for side, shards in zip(job.SIDES, tokenize(config), strict=True):
        stream = stream_of(shards).tolist()
        assert stream == compute_tokens(texts, side == "held_out") and len(stream) > 1000
        opened = open_shards(tmp_path / "out" / side)
        assert opened == shards and opened.tokens == len(stream) and opened.largest == EOS
        assert opened.documents == stream.count(EOS) and opened.vocab == 264
        assert (len(shards.files) == 1) == (shard_mb == 64)
        assert np.load(shards.folder / next(iter(shards.files))).dtype == np.uint16
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*job.SIDES, job.COMMAND_FILE, "tokenizer"]
    )


def test_a_directory_s_tokenizer_makes_shards_that_decode_to_the_text(texts, tmp_path, directory):
    folder = directory(config={"eos_token_id": 1})  # only there
    tokenizer = load_tokenizer(folder)
    out = tmp_path / "out"
    held, trained = tokenize(tokenize_config(out, texts, tokenizer=str(folder)))
    kept = load_tokenizer(out / "tokenizer")
    assert kept.key == tokenizer.key == held.tokenizer == trained.tokenizer and held.eos == 1
    documents, here = [], []
    for token in stream_of(held).tolist():
        here.append(token)
        if token == 1:
            documents.append(kept.decode(here))
            here = []
    plain = bytes(t if t < 256 else 0 for t in compute_tokens(texts, True)).decode().split("\0")
    assert not here and [*documents, ""] == plain
    assert trained.largest < trained.vocab == kept.vocab


def test_files_are_found_once_split_by_name_and_named_without_the_machine(texts):
    all_of_them = find_text([str(texts)])
    assert [s.name for s in all_of_them] == sorted(s.name for s in all_of_them)
    assert "sub/01.md" in {s.name for s in all_of_them} and not any("csv" in s.name for s in all_of_them)
    globbed = find_text([str(texts / "**" / "*.md"), str(texts / "sub"), str(texts / "lines0.jsonl")])
    assert "01.md" in {s.name for s in globbed} and len({s.path for s in globbed}) == len(globbed)
    assert len(find_text(None)) > 100  # the standard library's
    named = split_files(all_of_them, 50, ("lines*.jsonl", "endless.txt"))["held_out"]
    assert {s.name for s in named} == {"endless.txt", *(f"lines{n}.jsonl" for n in range(6))}


def test_a_job_that_was_cut_off_goes_on_and_what_is_written_is_kept(texts, tmp_path, monkeypatch):
    save, room = job._save_array, []

    def dies(path, tokens):
        if not room:
            raise KeyboardInterrupt
        room.pop()
        save(path, tokens)

    whole, cut_off = (tokenize_config(tmp_path / name, texts) for name in ("whole", "cut"))
    before = tokenize(whole)
    with monkeypatch.context() as patch:
        patch.setattr(job, "_save_array", dies)
        for arrays in (3, 3, 0):  # the last process is killed before it has written any
            room[:] = [None] * arrays
            with pytest.raises(KeyboardInterrupt):
                tokenize(cut_off)

    def times(out):
        found = out.glob("*/*.npy")
        return {(p.parent.name.removesuffix(".partial"), p.name): p.stat().st_mtime_ns for p in found}

    kept = times(tmp_path / "cut")
    assert len(kept) == 6 and not (tmp_path / "cut" / "train").exists()
    after = tokenize(cut_off)
    assert [shards.key for shards in after] == [shards.key for shards in before]
    assert kept.items() <= times(tmp_path / "cut").items()
    made = times(tmp_path / "cut")
    assert tokenize(replace(cut_off, processes=2)) == after and times(tmp_path / "cut") == made


def test_a_job_that_was_killed_before_it_removed_its_text_removes_it_later(texts, tmp_path, monkeypatch):
    remove, work = shutil.rmtree, tmp_path / "out" / job.WORK

    def dies(folder, **how):
        if folder == work:
            raise KeyboardInterrupt
        remove(folder, **how)

    config = tokenize_config(tmp_path / "out", texts / "sub")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job.shutil, "rmtree", dies)
        tokenize(config)
    assert {job.WORK, *job.SIDES} <= {path.name for path in (tmp_path / "out").iterdir()}
    tokenize(config)
    assert not work.exists()


def test_a_job_that_was_killed_while_it_wrote_its_record_goes_on(texts, tmp_path, monkeypatch):
    replace_file, out = os.replace, tmp_path / "out"

    def dies(source, target):
        if target == out / job.COMMAND_FILE:
            raise KeyboardInterrupt
        replace_file(source, target)

    config = tokenize_config(out, texts / "sub")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", dies)
        tokenize(config)
    assert {path.name for path in out.iterdir()} == {job.WORK, f"{job.COMMAND_FILE}.partial"}
    tokenize(config)
    assert {path.name for path in out.iterdir()} == {*job.SIDES, job.COMMAND_FILE, "tokenizer"}


def test_two_that_open_new_arrays_at_once_find_one_header(tmp_path, monkeypatch):
    np.save(tmp_path / "0.npy", np.arange(1000, dtype=np.uint16))
    write, found = shards_module.write_record, []

    def write_while_another_opens(*args, **how):
        with suppress(TimeoutError):  # it waits until the header is written
            found.append(others.submit(open_shards, tmp_path))
            found[0].result(timeout=0.5)
        write(*args, **how)

    monkeypatch.setattr(shards_module, "write_record", write_while_another_opens)
    with ThreadPoolExecutor(1) as others:
        mine = open_shards(tmp_path)
        assert len(found) == 1 and found[0].result() == mine


# ------------------------------------------------------------------ what is refused


def test_broken_text_is_refused_by_file_and_line_or_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\n")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "good"}\n\n{"txt": 1}\n{"text": "\\ud800"}\nnone\n{"text": 3}\n' + b'{"text": "x"}\n' * 9
    )
    (tmp_path / "held.txt").write_text("held out")
    config = tokenize_config(tmp_path / "out", tmp_path, held_out=("held.txt",))
    with raises(ConfigError, says="5 places") as caught:
        tokenize(config)
    for line in (
        r"a.txt:2: is no UTF-8 (byte 0xff)",
        "b.jsonl:3: is no object with a \"text\" (KeyError: 'text')",
        'b.jsonl:4: is no object with a "text" (UnicodeEncodeError',
        'b.jsonl:5: is no object with a "text" (JSONDecodeError',
        'b.jsonl:6: is no object with a "text" (AttributeError',
    ):
        assert line in str(caught.value)
    with raises(ConfigError, leaves=str(tmp_path / "out" / "train"), fix="experiments.tokenize"):
        open_shards(tmp_path / "out" / "train")
    _, trained = tokenize(replace(config, broken="skip"))
    text = bytes(t if t < 256 else 0 for t in stream_of(trained).tolist()).decode()
    assert text == "one\ntwo \N{REPLACEMENT CHARACTER}\n\0good\0" + "x\0" * 9 and trained.broken == 5


def test_what_cannot_be_tokenised(texts, shard_folder, tmp_path):
    cases = [
        ({}, (tmp_path / "nowhere", tmp_path / "*.x"), ["nowhere", "*.x"]),
        ({"held_out": ("*.x",)}, (texts,), ["held_out", "no text"]),
        ({"held_out_percent": 1}, (texts / "endless.txt",), ["held_out", "no text"]),
        ({"tokenizer": str(texts)}, (texts,), [str(texts), "tokenizer.json"]),
    ]
    for options, files, leaves in cases:
        with raises(ConfigError, leaves=leaves):
            tokenize(tokenize_config(tmp_path / "o", *files, **options))
    assert not (tmp_path / "o").exists()
    with raises(ConfigError, leaves="endless.txt", fix="a folder"):
        tokenize(tokenize_config(texts / "endless.txt", texts))
    with raises(ConfigError, leaves=["out=", "01.md"], fix="another out"):
        tokenize(tokenize_config(texts / "sub", texts))
    with raises(ConfigError, leaves="shard_mb: 0.01 there, 0.02 here"):
        tokenize(tokenize_config(shard_folder, texts, shard_mb=0.02))
    assert COMMAND.read({"out": "o", "files": "a"}).files == ("a",)


@pytest.mark.parametrize(
    ("spoil", "leaves"),
    [
        (lambda folder: (folder / HEADER).write_text('{"a": 1}'), [HEADER]),
        (lambda folder: (folder / "000001.npy").unlink(), ["000001.npy", "0 of"]),
        (lambda folder: np.save(folder / "000000.npy", np.zeros(5, np.uint16)), ["000000.npy", "5 of"]),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(shard_folder, tmp_path, spoil, leaves):
    shutil.copytree(shard_folder / "train", tmp_path / "train")
    assert open_shards(tmp_path / "train").tokens
    spoil(tmp_path / "train")
    with raises(ConfigError, leaves=leaves):
        open_shards(tmp_path / "train")


# ------------------------------------------------------------------ arrays of others


@pytest.mark.parametrize("dtype", ["<u2", "<u4", ">u2"])
def test_plain_arrays_are_read(tmp_path, dtype):
    stream = np.arange(1000) * 7 % 613
    for number, part in enumerate(np.split(stream, [100, 101, 700])):
        np.save(tmp_path / f"{number}.npy", part.astype(dtype))
    for shards in (open_shards(tmp_path), open_shards(tmp_path)):  # looked through, then by its header
        assert (shards.tokens, shards.largest, shards.vocab, shards.tokenizer) == (1000, 612, None, None)
        assert (stream_of(shards) == stream).all() and (tmp_path / HEADER).exists()
    with raises(ConfigError, leaves="model.vocab=612", fix="model.vocab=613", says="612"):
        check_vocab([shards], 612)
    check_vocab([shards], 613)


def test_arrays_that_are_no_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(3, np.float32))
    (tmp_path / "c.npy").write_bytes(b"no array")
    np.save(tmp_path / "d.npy", np.array([{}]), allow_pickle=True)
    with raises(ConfigError, leaves=["a.npy: uint16 [2, 3]", "b.npy: float32", "c.npy", "d.npy"]):
        open_shards(tmp_path)


# ------------------------------------------------------------------ training on them


def prepare_on(shard_folder: Path, *more: str):
    overrides = (
        "data=shards", f"data.root={shard_folder}", "model.vocab=264", "run.steps=4", "run.held_out_every=2",
        "run.save_every=2", "mesh.shard=1", "model.layers=1", *more,
    )  # fmt: skip
    return train.prepare(fit_to_machine(compose(*SMALL, *overrides), accelerators={}))


def test_a_run_on_shards_and_one_from_its_checkpoint_have_one_curve(shard_folder, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_training(prepare_on(shard_folder), RunFolder(str(whole)), [], Stop())
    said = capsys.readouterr().out
    assert "held-out loss, nats per byte: model" in said and "trigram" in said
    assert (whole / "sample.txt").read_text().startswith("def ") and (whole / "loss.png").exists()

    half = str(whole / "checkpoints" / "2")
    run_training(prepare_on(shard_folder), RunFolder(str(resumed), source=half), [], Stop())
    assert "resume: step 2 of" in capsys.readouterr().out
    curves = [
        [{k: row[k] for k in ("step", "loss", "held_out_loss") if k in row} for row in rows_of(f)]
        for f in (whole, resumed)
    ]
    # Four steps and two held-out losses; rows of the first two steps are copied from the source.
    assert curves[0] == curves[1] and len(curves[0]) == 6


@pytest.mark.long  # test_a_run_on_shards has one
def test_a_run_without_a_tokenizer(numbered, tmp_path, capsys):
    for side, parts in (("train", 3), ("held_out", 2)):
        (tmp_path / side).symlink_to(numbered(400, parts).folder)
    run_training(
        prepare_on(tmp_path, "model.vocab=400", "run.steps=2"), RunFolder(str(tmp_path / "run")), [], Stop()
    )
    said = capsys.readouterr().out
    assert "held-out loss, nats per token: model" in said and "gram" not in said
    numbers = (tmp_path / "run" / "sample.txt").read_text().split()
    assert numbers[0] == "0" and len(numbers) == 6 and all(n.isdigit() for n in numbers)


def test_shards_that_a_run_cannot_use(shard_folder, numbered, tmp_path):
    with raises(ConfigError, leaves=["vocab=256", "train"], fix="model.vocab=264", says="257"):
        prepare_on(shard_folder, "model.vocab=256")
    with raises(
        ConfigError, leaves=[str(tmp_path / "train"), str(tmp_path / "held_out")], fix="experiments.tokenize"
    ):
        prepare_on(tmp_path)
    with raises(ConfigError, leaves=["held_out", "model.context=900999"]):
        prepare_on(shard_folder, "model.context=900999")
    for side in ("train", "tokenizer"):
        (tmp_path / side).symlink_to(shard_folder / side)
    (tmp_path / "held_out").symlink_to(numbered(400, 2).folder)
    with raises(ConfigError, leaves=str(tmp_path), fix="together", says="two tokenizers"):
        prepare_on(tmp_path, "model.vocab=400")


def test_tables_are_those_of_the_bytes(shard_folder):
    reading = open_tokens(prepare_on(shard_folder))
    held = stream_of(reading.held_out_stream)
    batches = list(reading.held_out(fs.make_mesh(shard=1, device="cpu"), 4))
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    assert reading.starts[0] == 2  # a trigram reads two bytes before its target
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert targets[-1].tolist() == held[int(reading.starts[-1]) + 1 :][:32].tolist()
    as_bytes = lambda ids: torch.from_numpy(np.where(ids < 256, ids, 0).astype(np.uint8))  # noqa: E731
    at = (reading.starts[:, None] + torch.arange(1, 33)).flatten()
    expected = table_losses(as_bytes(stream_of(reading.train)), as_bytes(held), at)
    assert reading.ngram_losses() == pytest.approx(expected, abs=1e-12)
