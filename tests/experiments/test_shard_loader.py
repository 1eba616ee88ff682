"""Training on shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import stream_of
from runs import SMALL, compose, rows_of

from experiments import train
from experiments.configs.machine import place
from experiments.configs.train import ConfigError
from experiments.training.dataset import open_tokens
from experiments.training.loop import train as run_training
from experiments.training.resume import RunFolder
from fnshard.launcher.rank import Stop


def trained_on(shard_folder: Path, *more: str):
    overrides = (
        "data=shards", f"data.root={shard_folder}", "model.vocab=264", "run.steps=4", "run.held_out_every=2",
        "run.save_every=2", "mesh.shard=1", "model.layers=1", *more,
    )  # fmt: skip
    return train.prepare(place(compose(*SMALL, *overrides), accelerators={}))


def test_a_run_on_shards_and_one_that_is_cut_off(shard_folder, tmp_path, capsys):
    whole, cut_off = tmp_path / "whole", tmp_path / "cut"
    run_training(trained_on(shard_folder), RunFolder(str(whole)), [], Stop())
    said = capsys.readouterr().out
    assert "held-out loss, nats per byte: model" in said and "trigram" in said
    assert (whole / "sample.txt").read_text().startswith("def ") and (whole / "loss.png").exists()

    half = str(whole / "checkpoints" / "2")
    run_training(trained_on(shard_folder), RunFolder(str(cut_off), source=half), [], Stop())
    assert "resume: step 2 of" in capsys.readouterr().out
    curves = [
        [{k: row[k] for k in ("step", "loss", "held_out_loss") if k in row} for row in rows_of(f)]
        for f in (whole, cut_off)
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 6


def test_a_run_without_a_tokenizer(numbered, tmp_path, capsys):
    for side, parts in (("train", 3), ("held_out", 2)):
        (tmp_path / side).symlink_to(numbered(400, parts).folder)
    run_training(
        trained_on(tmp_path, "model.vocab=400", "run.steps=2"), RunFolder(str(tmp_path / "run")), [], Stop()
    )
    said = capsys.readouterr().out
    assert "held-out loss, nats per token: model" in said and "gram" not in said
    numbers = (tmp_path / "run" / "sample.txt").read_text().split()
    assert numbers[0] == "0" and len(numbers) == 6 and all(n.isdigit() for n in numbers)


def test_shards_that_a_run_cannot_use(shard_folder, numbered, tmp_path):
    with pytest.raises(ConfigError, match=r"data=shards: needs the folder that experiments.tokenize wrote"):
        compose("data=shards")
    with pytest.raises(
        ConfigError, match=r"(?s)vocab=256: .*train: the largest is 257.*Fix: model.vocab=264"
    ):
        trained_on(shard_folder, "model.vocab=256")
    with pytest.raises(ConfigError, match=r"(?s)train holds no shards.*held_out holds no shards"):
        trained_on(tmp_path)
    with pytest.raises(ConfigError, match=r"held_out: \d+ tokens; one window of model.context=900999 needs"):
        trained_on(shard_folder, "model.context=900999")
    for side in ("train", "tokenizer"):
        (tmp_path / side).symlink_to(shard_folder / side)
    (tmp_path / "held_out").symlink_to(numbered(400, 2).folder)
    with pytest.raises(ConfigError, match="are of two tokenizers"):
        trained_on(tmp_path, "model.vocab=400")


def test_tables_are_those_of_the_bytes(shard_folder):
    reading = open_tokens(trained_on(shard_folder))
    held = stream_of(reading.measured)
    inputs, targets = reading.held_out(reading.starts)
    assert reading.starts[0] == 2 and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert targets[-1].tolist() == held[int(reading.starts[-1]) + 1 :][:32].tolist()
    from experiments.training import ngram

    as_bytes = lambda ids: torch.from_numpy(np.where(ids < 256, ids, 0).astype(np.uint8))  # noqa: E731
    at = (reading.starts[:, None] + torch.arange(1, 33)).flatten()
    expected = ngram.table_losses(as_bytes(stream_of(reading.train)), as_bytes(held), at)
    assert reading.tables() == pytest.approx(expected, abs=1e-12)
