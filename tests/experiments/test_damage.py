"""What lies on the disk between two runs is compared with what was written before it is used."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import CUTS, FLIPS, Subject, campaign, damages
from made_data import stream_of, tokenize_config
from runs import config_of, leave_checkpoint

import fnshard as fs
from experiments.compare.outcome import outcome_of
from experiments.configs.measured import measured_run
from experiments.configs.train import ShardsConfig
from experiments.data.files import write_record, write_sealed
from experiments.data.prepared import RecordPolicy, prepare
from experiments.generate import read_config
from experiments.tokenize.job import tokenize
from experiments.training.dataset import open_tokens
from experiments.training.metrics_file import METRICS
from experiments.training.report import Report
from experiments.training.result import write_result
from experiments.training.resume import IDENTITY, claimed, finished, identity_of
from experiments.training.run_record import RunRecord

STEPS = 12

# ------------------------------------------------------------------ what lies there


def checkpoint(folder: Path) -> Subject:
    params = {"w": torch.randn(40, 7), "b": torch.zeros(3)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    step = fs.shard_step(
        lambda p, x: (p["w"] * x).sum() + p["b"].sum(), specs, optimizer=fs.optim.adamw(0.1), backend="eager"
    )
    state = step.init(params).replace(step=torch.tensor(5))
    data = {"step": 5, "seen": (1, b"ab"), "random": torch.arange(9)}
    fs.checkpoint.save(folder / "5", state, data=data, config={"a": 1}, metrics={"loss": 2.0})

    def look(copy: Path):
        found = fs.checkpoint.restore(copy, step)
        leaves = fs.tree.flatten_with_paths((found.params, found.opt_state, found.step, found.seed))[0]
        known = fs.checkpoint.manifest(copy)
        return (
            {path: leaf.tolist() for path, leaf in leaves.items()},
            found.data["random"].tolist(),
            found.data["seen"],
            found.data["step"],
            known.config,
            known.metrics,
        )

    return Subject(folder / "5", look, "5")


def cache(folder: Path, tokenizer) -> Subject:
    lines = [{"prompt": f"p{n}", "response": "r" * (n % 9 + 1)} for n in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def prepared(where: Path):
        policy = RecordPolicy("samples", 64)
        return prepare(folder / "data.jsonl", tokenizer, policy, cache=where, split=True)

    def look(copy: Path):
        found = prepared(copy)
        ids = [[list(map(np.ndarray.tolist, each.sample(n))) for n in range(each.samples)] for each in found]
        return ids, [replace(each, folder=Path()) for each in found]

    prepared(folder / "cache")
    return Subject(folder / "cache", look)


def token_shards(folder: Path, texts: Path) -> Subject:
    tokenize(tokenize_config(folder / "out", texts, shard_mb=0.1))

    def look(copy: Path):
        config = config_of("model.vocab=264")
        data = open_tokens(replace(config, data=ShardsConfig(root=str(copy), held_out_rows=8)))
        found = data.train, data.measured
        streams = [stream_of(each).tolist() for each in found]
        return streams, [replace(each, folder=Path()) for each in found], data.unit, data.tokenizer.key

    return Subject(folder / "out", look)


def run_folder(folder: Path) -> Subject:
    """A run that has ended, as far as others read it: resumed, compared, generated from, predicted by."""
    config, place = config_of(), folder / "run"
    place.mkdir()
    record = RunRecord(place, {"seed": 1, "hardware": {"device": "cpu", "ranks": 1, "hosts": ["a"]}})
    with Report(place, STEPS, 10, record, stream=io.StringIO()) as report:
        for number in range(1, STEPS + 1):
            report.step(number, {"loss": 1 / number, "lr": 0.1}, 0.5)
            if number % 4 == 0:
                report.held_out(number, 2.0 / number, {})
        report.close()
        report.finish("ok")
        record.write("ok", STEPS, None, {"hardware": {}, "predicted_s": {"": 0.5}, "measured_s": 0.25})
    write_result(place, status="ok", overrides=["a=1"], held_out_loss=2.0, loss=0.5)
    write_sealed(place / "config.yaml", "model:\n  width: 128\n  depth: 4\nrun:\n  seed: 0\n  prompt: 'a'\n")
    write_record(place / IDENTITY, identity_of(config))
    leave_checkpoint(place, STEPS)

    def look(copy: Path):
        said = io.StringIO()
        ended = finished(copy, config)
        with claimed(config, copy, chosen=True):
            outcome = replace(outcome_of(copy, ""), folder=Path())
            values, run = read_config(copy), measured_run(copy)
            known = RunRecord(copy, {})._known
            metrics = copy / METRICS
            made = Report(copy, STEPS, 10, RunRecord(copy, {}), STEPS, metrics, stream=said)
            made.close()
            print(said.getvalue(), file=sys.stderr)
            rows = (copy / METRICS).read_bytes()
            return ended, outcome, values, run, known, made.totals, rows

    return Subject(place, look)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory, byte_directory, texts):
    """`subjects(name)`: made once."""
    makers = {
        "checkpoint": checkpoint, "cache": lambda f: cache(f, byte_directory),
        "shards": lambda f: token_shards(f, texts), "run": run_folder,
    }  # fmt: skip
    made: dict[str, Subject] = {}

    def make(name: str) -> Subject:
        if name not in made:
            made[name] = makers[name](tmp_path_factory.mktemp(name))
        return made[name]

    return make


NAMES = ("checkpoint", "cache", "shards", "run")


@pytest.mark.parametrize("name", NAMES)
def test_a_few_damages_are_noticed(name, subjects, tmp_path):
    subject = subjects(name)
    some = islice(damages(subject.pristine, 6, 4, seed=1), 14)
    counts, wrong = campaign(subject, tmp_path / "place", some)
    assert wrong == [] and counts.total() == 14, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_campaign_of_damages(name, subjects, tmp_path):
    subject = subjects(name)
    counts, wrong = campaign(subject, tmp_path / "place", damages(subject.pristine))
    print(name, dict(counts))
    assert wrong == [] and counts.total() > FLIPS + CUTS, counts
