"""Shards: the same bytes however they are made; what is refused; arrays that others made."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shard_files import EOS, PERCENT, stream_of, tokenize_config

from experiments.configs.train import ConfigError
from experiments.data import shardwriter
from experiments.data.shardfolder import HEADER, check_vocab, open_shards
from experiments.data.shards import ShardLoader
from experiments.data.shardwriter import dtype_of
from experiments.data.stdlib_text import is_held_out
from experiments.data.text_files import find, split
from experiments.data.tokenizer import load_tokenizer
from experiments.tokenize import __main__ as command
from experiments.tokenize import job
from experiments.tokenize.config import SPEC
from experiments.tokenize.job import tokenize
from experiments.tokenize.journal import NAME


def expected(folder: Path, held_out: bool) -> list[int]:
    """The tokens of a folder of text, the plain way."""
    found: list[int] = []
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in (".txt", ".md", ".py", ".jsonl") or is_held_out(name, PERCENT) != held_out:
            continue
        text = path.read_bytes().decode("utf-8-sig")
        documents = [text] if path.suffix != ".jsonl" else [json.loads(x)["text"] for x in text.split("\n\n")]
        for document in filter(None, documents):
            found += [*document.encode(), EOS]
    return found


# ------------------------------------------------------------------ from text to shards


@pytest.mark.parametrize("shard_mb", [0.002, 0.01, 64.0])
def test_shards_hold_the_text_whatever_their_size(texts, tmp_path, shard_mb):
    found = dict(
        zip(
            ("held_out", "train"),
            tokenize(tokenize_config(tmp_path / "out", texts, shard_mb=shard_mb)),
            strict=True,
        )
    )
    for side, shards in found.items():
        stream = stream_of(shards).tolist()
        assert stream == expected(texts, side == "held_out") and len(stream) > 1000
        opened = open_shards(tmp_path / "out" / side)
        assert opened.key == shards.key and opened.tokens == len(stream) and opened.largest == EOS
        assert opened.documents == stream.count(EOS) and opened.vocab == 264
    assert (len(found["train"].shards) == 1) == (shard_mb == 64)
    assert [dtype_of(v) for v in (264, 2**16, 2**16 + 1)] == ["<u2", "<u2", "<u4"]


def test_a_directory_s_tokenizer_makes_shards_that_decode_to_the_text(texts, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    file = Tokenizer(models.BPE())
    file.pre_tokenizer, file.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    file.train_from_iterator(
        ["the größer x = 1 the größer"] * 9,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    (tmp_path / "model").mkdir()
    file.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 0}')  # only here
    tokenizer = load_tokenizer(tmp_path / "model")
    out = tmp_path / "out"
    held, trained = tokenize(tokenize_config(out, texts, tokenizer=str(tmp_path / "model")))
    kept = load_tokenizer(out / "tokenizer")
    assert kept.key == tokenizer.key == held.tokenizer == trained.tokenizer and held.eos == 0
    documents, here = [], []
    for token in stream_of(held).tolist():
        here.append(token)
        if token == 0:
            documents.append(kept.decode(here))
            here = []
    plain = bytes(t if t < 256 else 0 for t in expected(texts, True)).decode().split("\0")
    assert not here and [*documents, ""] == plain
    assert trained.largest < trained.vocab == kept.vocab


def test_text_is_cut_behind_lines_or_else_between_characters(tmp_path):
    path = tmp_path / "a.txt"
    for text, kind in (("ab\n日本\n" * 40, "lines"), ("日本語𝄞é" * 2000, "characters")):
        path.write_text(text)
        (source,) = find([str(path)])
        with path.open("rb") as file:
            cuts = [shardwriter.cut(file, at, source) for at in range(source.size + 2)]
        assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == source.size
        assert all(at <= found for at, found in enumerate(cuts[:-1]))
        if kind == "lines":
            assert {path.read_bytes()[cut - 1 : cut] for cut in cuts[1:]} == {b"\n"}
        else:
            assert all(found - at <= 3 for at, found in enumerate(cuts))
            assert all(path.read_bytes()[cut:].decode() is not None for cut in set(cuts[:200]))


def test_files_are_found_once_and_named_without_the_machine(texts):
    all_of_them = find([str(texts)])
    assert [s.name for s in all_of_them] == sorted(s.name for s in all_of_them)
    assert "sub/01.md" in {s.name for s in all_of_them} and not any("csv" in s.name for s in all_of_them)
    globbed = find([str(texts / "**" / "*.md"), str(texts / "sub"), str(texts / "lines0.jsonl")])
    assert "sub/01.md" in {s.name for s in globbed} and len({s.path for s in globbed}) == len(globbed)
    assert [s.name for s in globbed][-1] == "lines0.jsonl"
    assert len(find(None)) > 100


def test_named_files_are_held_out(texts, tmp_path):
    held, trained = tokenize(tokenize_config(tmp_path, texts, held_out=("lines*.jsonl", "endless.txt")))
    assert held.documents + trained.documents == sum(expected(texts, side).count(EOS) for side in (0, 1))
    assert {t for t in stream_of(held).tolist() if t < 128} == {ord("z")}


@pytest.fixture(scope="module")
def forked(texts, tmp_path_factory, warm):
    """What tests/support/forks.py saw."""
    folder = tmp_path_factory.mktemp("forks")
    done = warm.run(["tests.support.forks", str(texts), str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_any_number_of_processes_and_kills_leaves_the_same_bytes(forked):
    assert len(forked["by1"]) > 40 and forked["by1"]["status"] == 0
    assert forked["by1"] == forked["by2"] == forked["by5"] == forked["killed"]
    kills = forked["kills"]
    assert [kill["signal"] for kill in kills] == [9] * 5
    assert all(kill["before"] < kill["after"] and not kill["twice"] for kill in kills)  # each start went on
    assert [kill["before"] for kill in kills[1:]] == [kill["after"] for kill in kills[:-1]]


def test_a_crew_ends_with_the_process_that_hands_out_and_tells_how_a_member_ended(forked):
    assert forked["orphans"]
    heard = forked["errors"]
    assert heard["die"] == "CrewError: a process died (SIGKILL, which a machine out of memory sends)."
    assert heard["full"] == "OSError: [Errno 28] No space left on device"
    assert heard["bug"].startswith("RuntimeError: in a process") and "KeyError: 'a bug'" in heard["bug"]


def test_what_is_written_is_not_written_again(texts, tmp_path, capsys):
    out = tmp_path / "out"
    tokenize(tokenize_config(out, texts))
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")}
    tokenize(tokenize_config(out, texts, processes=2))
    assert "nothing left to do" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")} == before


def test_files_larger_than_memory(tmp_path):
    line = b"a line of text that is neither long nor short, again and again\n"
    big, lines = tmp_path / "big.txt", tmp_path / "lines.jsonl"
    big.write_bytes(line * 300_000)
    lines.write_bytes(b'{"text": "' + line[:-1] + b'"}\n' * 1)
    with lines.open("ab") as file:
        file.write((b'{"text": "' + line[:-1] + b'"}\n') * 100_000)
    tracemalloc.start()
    held, trained = tokenize(
        tokenize_config(tmp_path / "out", big, lines, held_out=("*.jsonl",), shard_mb=64.0)
    )
    loader = ShardLoader(trained, rows=8, context=256)
    for _ in range(4):
        next(loader)
    loader.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trained.tokens == big.stat().st_size + 1 and held.documents == 100_001
    assert peak < 6e6 < big.stat().st_size / 3


# ------------------------------------------------------------------ what is refused


def full_disk(*_):
    raise OSError(28, "disk full")


def test_broken_text_is_refused_by_file_and_line_or_skipped(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff\n")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "good"}\n\n{"txt": 1}\n{"text": "\\ud800"}\nnone\n{"text": 3}\n' + b'{"text": "x"}\n' * 9
    )
    (tmp_path / "held.txt").write_text("held out")
    config = tokenize_config(tmp_path / "out", tmp_path, held_out=("held.txt",), shard_mb=0.0001)
    with pytest.raises(ConfigError, match=r"5 places of the text cannot be used") as caught:
        tokenize(config)
    told = str(caught.value)
    for line in (
        r"a.txt:2: is no UTF-8 (byte 0xff)",
        'b.jsonl:3: has no "text" that is a string (it has txt)',
        'b.jsonl:4: "text" holds half of a surrogate pair',
        "b.jsonl:5: is no JSON (Expecting value at column 1)",
        'b.jsonl:6: has no "text"',
    ):
        assert line in told
    with pytest.raises(ConfigError, match=r"holds no shards, or not all yet"):
        open_shards(tmp_path / "out" / "train")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"cannot be written there: .*full"):
        patch.setattr(job, "write_header", full_disk)
        tokenize(replace(config, broken="skip"))
    with pytest.raises(ConfigError, match=r"5 places of the text"):  # those that were skipped are not kept
        tokenize(config)
    _, trained = tokenize(replace(config, broken="skip"))
    text = bytes(t if t < 256 else 0 for t in stream_of(trained).tolist()).decode()
    assert text == "one\ntwo \N{REPLACEMENT CHARACTER}\n\0good\0" + "x\0" * 9 and trained.broken == 5
    with pytest.raises(ConfigError, match=r"train: 5 broken places were skipped there. Fix: broken=skip"):
        tokenize(config)


def test_a_folder_of_another_command_is_left_alone(texts, tmp_path):
    out = tmp_path / "out"
    tokenize(tokenize_config(out, texts))
    with pytest.raises(
        ConfigError, match=r"(?s)holds shards of another command:.*shard_mb: 0.01 there, 0.02"
    ):
        tokenize(tokenize_config(out, texts, shard_mb=0.02))
    with pytest.raises(ConfigError, match=r"(?s)another command:.*files: .*34 files"):
        tokenize(tokenize_config(out, texts, texts / "ignored.csv"))
    for header in out.glob(f"*/{HEADER}"):
        header.unlink()
    (out / NAME).write_text(json.dumps({"format": 1, "files": "none"}) + "\n")
    with pytest.raises(ConfigError, match=r"(?s)another command:.*tokenizer: null there"):
        tokenize(tokenize_config(out, texts))
    with pytest.raises(ConfigError, match=r"(?s)holds something else:.*01\.md.*Fix: an empty"):
        tokenize(tokenize_config(texts / "sub", texts))


def test_of_two_files_one_is_held_out(tmp_path):
    for name, size in (("large", 400), ("small", 40)):
        (tmp_path / f"{name}.txt").write_text("word " * size)
    found = find([str(tmp_path)])
    for percent in (1, 99):
        sides = split(found, percent, ())
        assert [[s.name for s in sides[side]] for side in ("train", "held_out")] in (
            [["large.txt"], ["small.txt"]], [["small.txt"], ["large.txt"]]
        )  # fmt: skip


def test_what_cannot_be_tokenised(texts, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)nowhere: no such file.*\*\.x: matches no file"):
        tokenize(tokenize_config(tmp_path / "o", tmp_path / "nowhere", tmp_path / "*.x", texts))
    with pytest.raises(ConfigError, match=r"held_out=\*\.x: matches no file"):
        tokenize(tokenize_config(tmp_path / "o", texts, held_out=("*.x", "*.md")))
    with pytest.raises(ConfigError, match=r"held_out: no text in 0 files"):
        tokenize(tokenize_config(tmp_path / "o", texts / "endless.txt", held_out_percent=1))
    with pytest.raises(ConfigError, match=r"holds no tokenizer.json"):
        tokenize(tokenize_config(tmp_path / "o", texts, tokenizer=str(texts)))
    with pytest.raises(ConfigError, match=r"is a file"):
        tokenize(tokenize_config(texts / "endless.txt", texts))
    assert not (tmp_path / "o").exists()
    wrong = {"out": "", "files": [], "processes": 0, "broken": "mend", "held_out_percent": 100}
    with pytest.raises(ConfigError, match=r"(?s)5 problems:.*name a folder.*files=\[\].*100: must"):
        SPEC.read(wrong)
    with pytest.raises(ConfigError, match=r"(?s)2 problems:.*files.*surplus=1: no such key"):
        SPEC.read({"surplus": 1, "out": "there", "files": {"a": 1}})


def test_the_command_line(texts, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(
        sys, "argv", ["tokenize", "out=o", f"files={texts}", "processes=1", "held_out_percent=30"]
    )
    command.main()
    said = capfd.readouterr()
    assert "tokens/s" in said.out and "data=shards data.root=o model.vocab=264" in said.out
    assert "2 shards of" in said.err and {p.name for p in tmp_path.iterdir()} == {"o"}
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["tokenize", "out=p", "files=[nowhere,neither]"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    said = capfd.readouterr().err
    assert "nowhere: no such file" in said and "neither: no such" in said and "Traceback" not in said


def link_header_to_zeros(folder: Path) -> None:
    (folder / HEADER).unlink()
    (folder / HEADER).symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / HEADER).unlink(), r"holds no shards, or not all yet: neither"),
        (lambda folder: (folder / HEADER).write_text("{}"), r"is no header of shards"),
        (lambda folder: (folder / HEADER).write_text("[" * 100_000), r"is no header of shards \(.*recursion"),
        (link_header_to_zeros, r"is no header of shards \(shards\.json: is a link"),
        (lambda folder: (folder / "000001.bin").unlink(), r"not whole:\n  000001.bin: No such file"),
        (
            lambda folder: os.truncate(folder / "000000.bin", 10),
            r"000000.bin: has 10 bytes, written were \d+",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(shard_folder, tmp_path, spoil, message):
    for path in (shard_folder / "train").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert open_shards(tmp_path).tokens
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_shards(tmp_path)


FIRST = {  # what a header says of its first array, and what is said of that
    "a file of the machine": ({"file": "/etc/passwd"}, r"'/etc/passwd' is no name of a file"),
    "a file above": ({"file": "../held_out/000000.bin"}, "is no name of a file"),
    "the folder": ({"file": "."}, r"'\.' is no name of a file"),
    "a name that is none": ({"file": "a\0b"}, "is no name of a file"),
    "a link": ({"file": "link.bin"}, r"link\.bin: is a link"),
    "a device": ({"file": "null.bin"}, r"null\.bin: is a link"),
    "a pipe": ({"file": "pipe.bin"}, r"pipe\.bin: is no file"),
    "an array twice": ({"file": "000001.bin"}, "an array is named twice"),
    "more tokens than bytes": ({"tokens": 10**12}, r"holds \d+ tokens, 1000000000000 are told of"),
    "past 64 bits": ({"tokens": 2**63}, "tokens is 9223372036854775808"),
    "less than nothing": ({"tokens": -1}, "tokens is -1"),
    "text for a number": ({"bytes": "8"}, "bytes is '8'"),
    "a key too many": ({"surplus": 1}, "surplus"),
}
TOP = {
    "truth for a number": ({"largest": True}, "largest is True"),
    "a type that is none": ({"dtype": "O"}, "tokens of O"),
    "a list for an object": ({"shards": [[]]}, "is no header of shards"),
    "a small largest": ({"largest": 3}, r"holds the token \d+, and shards\.json says that 3 is the largest"),
    "a sum that is none": ({"tokens": 5}, "5 tokens of <u2"),
}


@pytest.mark.parametrize("lie", [*FIRST, *TOP])
def test_nothing_in_a_header_is_believed(shard_folder, tmp_path, lie):
    for path in (shard_folder / "train").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "link.bin").symlink_to(tmp_path / "000000.bin")
    (tmp_path / "null.bin").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.bin")
    change, message = (FIRST | TOP)[lie]
    header = json.loads((tmp_path / HEADER).read_text())
    if lie in FIRST:
        header["shards"][0] |= change
        header["tokens"] = sum(shard["tokens"] for shard in header["shards"])
    else:
        header |= change
    (tmp_path / HEADER).write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=message):
        check_vocab([open_shards(tmp_path)], 264)


def test_a_token_that_no_header_tells_of_is_met_in_its_window(shard_folder, tmp_path):
    shards = open_shards(shard_folder / "train")
    lying = replace(shards, largest=3)
    with pytest.raises(ValueError, match=r"train: holds the token \d+, and shards\.json says that 3"):
        lying.windows(np.array([0]), shards.tokens)


# ------------------------------------------------------------------ arrays of others


@pytest.mark.parametrize("dtype", ["<u2", "<u4", ">u2"])
def test_plain_arrays_are_read(tmp_path, dtype):
    stream = np.arange(1000) * 7 % 613
    for number, part in enumerate(np.split(stream, [100, 101, 700])):
        np.save(tmp_path / f"{number}.npy", part.astype(dtype))
    for shards in (open_shards(tmp_path), open_shards(tmp_path)):  # looked through, then by its header
        assert (shards.tokens, shards.largest, shards.vocab, shards.tokenizer) == (1000, 612, None, None)
        assert (stream_of(shards) == stream).all() and (tmp_path / HEADER).exists()
    with pytest.raises(ConfigError, match=r"(?s)model.vocab=612: .*the largest is 612.*Fix: model.vocab=613"):
        check_vocab([shards], 612)
    check_vocab([shards], 613)
    np.save(tmp_path / "0.npy", np.zeros(5, np.uint16))
    with pytest.raises(ConfigError, match=r"(?s)0.npy: has .* delete shards.json"):
        open_shards(tmp_path)


def test_arrays_that_are_no_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(3, np.float32))
    (tmp_path / "c.npy").write_bytes(b"no array")
    np.save(tmp_path / "d.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "e.npy").symlink_to("/dev/zero")
    np.save(tmp_path / "f.npy", np.zeros(9, np.uint16))
    os.truncate(tmp_path / "f.npy", 140)
    np.save(tmp_path / "g.npy", np.zeros(9, np.uint16))
    np.save(tmp_path / "h.npy", np.zeros(9, np.uint32))
    told = (
        r"(?s)a.npy: uint16 \[2, 3\].*b.npy: float32.*c.npy: .*d.npy: object.*e.npy: is a link"
        r".*f.npy: is not as long as \[9\] of uint16.*several types"
    )
    with pytest.raises(ConfigError, match=told):
        open_shards(tmp_path)
