"""Text, batches, and n-gram tables against brute force."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from errors import raises
from made_data import stream

from experiments.data import text as dataset
from experiments.data.text import SEPARATOR, ByteStream, cut_windows, held_out_starts

# ------------------------------------------------------------------ text


@pytest.fixture
def folder(tmp_path):
    for number in range(60):
        name = tmp_path / f"package{number % 3}" / f"module{number}.py"
        name.parent.mkdir(exist_ok=True)
        name.write_text(f"number = {number}\n")
    (tmp_path / "package0" / "tests").mkdir()
    (tmp_path / "package0" / "tests" / "test_it.py").write_text("skipped\n")
    (tmp_path / "package0" / "notes.txt").write_text("skipped\n")
    return tmp_path


def test_split_is_by_file_and_complete(folder):
    names = dataset.source_files(folder)
    assert len(names) == 60 and not any("tests" in name for name in names) and names == sorted(names)
    for side, text in zip((False, True), dataset.load_text(folder, held_out_percent=30), strict=True):
        mine = [name for name in names if dataset.is_held_out(name, 30) == side]
        parts = bytes(text.values.tolist()).split(bytes([SEPARATOR]))
        assert parts == [*((folder / name).read_bytes() for name in mine), b""] and len(parts) > 5


@pytest.mark.parametrize("suffix", [".nothing", ".py"])
def test_too_little_text_is_refused(tmp_path, suffix):
    (tmp_path / "one.py").write_text("x = 1\n")
    with raises(ValueError, leaves="/dev/zero", fix="data.root"):
        dataset.load_text(Path("/dev/zero"))
    with raises(
        ValueError,
        leaves=[str(tmp_path), repr(suffix)],
        fix=["data.root", "data.held_out_percent"],
        says="bytes",
    ):
        dataset.load_text(tmp_path, suffix=suffix)


# ------------------------------------------------------------------ batches


def test_held_out_windows_fit_and_leave_room_for_a_trigram():
    source = stream(1000)
    starts = held_out_starts(source.numel(), rows=10, context=50)
    assert starts[0] == 2 and starts[-1] + 50 == 999
    inputs, targets = cut_windows(ByteStream(source), starts.numpy(), 50)
    assert torch.equal(targets, source[starts[:, None] + torch.arange(1, 51)].long())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


# ------------------------------------------------------------------ n-gram tables


def brute_force(train: bytes, order: int, given: bytes, byte: int) -> float:
    """Compute p(byte | given) from the definition, with dictionaries."""
    p = 1 / 256
    for n in range(1, order + 1):
        context = given[len(given) - (n - 1) :]
        runs = Counter(train[i : i + n] for i in range(len(train) - n + 1))
        total = sum(count for run, count in runs.items() if run[:-1] == context)
        p = (runs[context + bytes([byte])] + dataset.STRENGTH * p) / (total + dataset.STRENGTH)
    return p


def test_tables_equal_brute_force():
    train, held_out = stream(400, symbols=5), stream(60, symbols=7, seed=1)
    losses = dataset.table_losses(train, held_out, torch.arange(2, held_out.numel()))
    text = bytes(held_out.tolist())
    for order, name in ((2, "bigram"), (3, "trigram")):
        p = [brute_force(bytes(train.tolist()), order, text[i - 2 : i], text[i]) for i in range(2, len(text))]
        assert losses[name] == pytest.approx(-sum(map(math.log, p)) / len(p), rel=1e-12)
