"""What lies on the disk between two runs is compared with what was written before it is used."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from commands import OUTPUT, start_command
from damage import CUTS, FLIPS, Subject, campaign, damages
from errors import raises
from made_data import stream_of, tokenize_config
from runs import RUN, config_of, leave_checkpoint, run_in

import fnshard as fs
from experiments import train
from experiments.compare.outcome import read_outcome
from experiments.data.loader import Loader
from experiments.data.prepared import RecordPolicy, open_prepared, prepare
from experiments.data.shards import BLOCK_BYTES, HEADER, SUMS, open_shards
from experiments.data.text import Windows, open_tokens
from experiments.evaluate.run import read_answers
from experiments.evaluate.tasks import Question, Task
from experiments.generate import read_config
from experiments.lib import metrics, report
from experiments.lib.checks import ConfigError
from experiments.lib.config import ShardsConfig
from experiments.lib.files import (
    SUM,
    DamagedError,
    checksum,
    commit_folder,
    read_record,
    read_sealed,
    write_record,
    write_sealed,
)
from experiments.lib.folder import (
    CHECKPOINTS,
    IDENTITY,
    RESULT,
    claim,
    identity_of,
    is_finished,
    read_result,
    write_result,
)
from experiments.lib.measured import read_measurements
from experiments.lib.metrics import METRICS, read_rows
from experiments.lib.record import RunRecord
from experiments.lib.report import Report
from experiments.lib.run import restore_newest
from experiments.tokenize import job
from experiments.tokenize.job import tokenize
from fnshard.launcher.rank import Stop

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
        found = data.train, data.held_out_stream
        streams = [stream_of(each).tolist() for each in found]
        return streams, [replace(each, folder=Path()) for each in found], data.unit, data.tokenizer.key

    return Subject(folder / "out", look)


def run_folder(folder: Path) -> Subject:
    """Make a run that has ended, with all that other commands read of it."""
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
        ended = is_finished(copy, config)
        with claim(config, copy, chosen=True):
            outcome = replace(read_outcome(copy, ""), folder=Path())
            values, run = read_config(copy), read_measurements(copy)
            known = RunRecord(copy, {})._known
            metrics = copy / METRICS
            made = Report(copy, STEPS, 10, RunRecord(copy, {}, STEPS), STEPS, metrics, stream=said)
            made.close()
            print(said.getvalue(), file=sys.stderr)
            rows = (copy / METRICS).read_bytes()
            return ended, outcome, values, run, known, made.totals, rows

    return Subject(place, look)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory, byte_directory, texts):
    """Return `subjects(name)`, which makes each subject once."""
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


@pytest.mark.suite({
    "cache": "what is made again",
    "run": "files of a run",
    "checkpoint": "files of a state",
})  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_a_few_damages_are_noticed(name, subjects, tmp_path):
    subject = subjects(name)
    some = islice(damages(subject.pristine, 6, 4, seed=1), 14)
    counts, wrong = campaign(subject, tmp_path / "place", some)
    assert wrong == [] and counts.total() == 14 and counts["same"] < 7, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_campaign_of_damages(name, subjects, tmp_path):
    subject = subjects(name)
    counts, wrong = campaign(subject, tmp_path / "place", damages(subject.pristine))
    print(name, dict(counts))
    assert wrong == [] and counts.total() > FLIPS + CUTS and counts["same"] < counts.total(), counts


# ------------------------------------------------------------------ a run's folder


def report_of(folder: Path, made: int = 0, **options) -> Report:
    earlier = folder / METRICS if (folder / METRICS).exists() else None
    tokens = 10  # of a step
    return Report(folder, STEPS, tokens, RunRecord(folder, {}), made, earlier, **options)


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


@pytest.mark.parametrize("summed", [True, False])
def test_a_damaged_row_costs_that_row_alone_and_is_told_of(summed, tmp_path):
    with report_of(tmp_path, stream=io.StringIO()) as first:
        for number in range(1, 8):
            first.step(number, {"loss": 1 / number, "lr": 0.1}, 0.5)
        first.finish("stopped")
    if not summed:  # what an older version leaves
        (tmp_path / metrics.SUMS).unlink()
    lines = (tmp_path / METRICS).read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"step": 3', '"step": 3x')
    if summed:
        lines[4] = lines[4].replace("0.2", "0.3")
    (tmp_path / METRICS).write_text("".join(lines))
    shown = io.StringIO()
    again = report_of(tmp_path, 6, stream=shown)
    left = [1, 2, 4, 6] if summed else [1, 2, 4, 5, 6]
    assert steps_of(tmp_path) == left and again.totals.seconds == 0.5 * len(left)
    assert f"{tmp_path / METRICS}: damaged lines are left out: 3{', 5' * summed}" in shown.getvalue()
    assert (tmp_path / f"{METRICS}.damaged").read_text() == "".join(lines)
    again.step(7, {"loss": 1.0, "lr": 0.1}, 0.5)
    again.close()
    wrong: list[str] = []
    assert [row["step"] for row in read_rows(tmp_path / METRICS, 99, wrong)] == [*left, 7]
    (gap,) = wrong
    assert gap.endswith("no rows of steps 3 to 3, 5 to 5" if summed else "no rows of steps 3 to 3")


def test_rows_that_a_resumed_run_dropped_are_not_missing(tmp_path):
    """The run is resumed three times; each is killed after it wrote a checksum without its line."""
    with report_of(tmp_path, stream=io.StringIO()) as first:
        for number in range(1, 9):
            first.step(number, {"loss": 1 / number, "lr": 0.1}, 0.5)
        first.finish("stopped")
    for _ in range(3):
        shown = io.StringIO()
        again = report_of(tmp_path, 5, stream=shown)
        assert steps_of(tmp_path) == [1, 2, 3, 4, 5] and "missing" not in shown.getvalue()
        assert not (tmp_path / f"{METRICS}.damaged").exists()
        wrong: list[str] = []
        assert len(list(read_rows(tmp_path / METRICS, 2**63, wrong))) == 5 and wrong == []
        again.step(6, {"loss": 1.0, "lr": 0.1}, 0.5)
        with (tmp_path / metrics.SUMS).open("a") as sums:
            sums.write("0badcafe\n")
        again.close()


@pytest.mark.parametrize("stage", range(3))
def test_a_run_that_is_killed_while_it_takes_its_rows_over_has_them_all(stage, tmp_path, monkeypatch):
    with report_of(tmp_path, stream=io.StringIO()) as first:
        for number in range(1, 9):
            first.step(number, {"loss": 1 / number, "lr": 0.1}, 0.5)
        first.finish("stopped")
    count = [0]
    with monkeypatch.context() as patch:
        for name in ("write_bytes", "write_text"):
            patch.setattr(report, name, killed_after(stage, getattr(report, name), count))
        with pytest.raises(KeyboardInterrupt):
            report_of(tmp_path, 5, stream=io.StringIO())
    for made in (5, 2**63):
        wrong: list[str] = []
        steps = [row["step"] for row in read_rows(tmp_path / METRICS, made, wrong)]
        assert steps[:5] == [1, 2, 3, 4, 5] and wrong == []


def killed_after(stage, write, count):
    def writes(*args, **options):
        count[0] += 1
        if count[0] > stage:
            raise KeyboardInterrupt
        write(*args, **options)

    return writes


@pytest.mark.parametrize("left", [0, 3])
def test_checksums_that_are_lost_cost_no_rows(left, tmp_path):
    with report_of(tmp_path, stream=io.StringIO()) as first:
        for number in range(1, 9):
            first.step(number, {"loss": 1 / number, "lr": 0.1}, 0.5)
        first.finish("stopped")
    sums = (tmp_path / metrics.SUMS).read_text().splitlines(keepends=True)
    (tmp_path / metrics.SUMS).write_text("".join(sums[:left]))
    wrong: list[str] = []
    assert len(list(read_rows(tmp_path / METRICS, 8, wrong))) == 8
    assert len(wrong) == 1 and f"{metrics.SUMS}: {left} checksums of 8 lines" in wrong[0]
    report_of(tmp_path, 8, stream=io.StringIO()).close()
    assert (tmp_path / metrics.SUMS).read_text() == "".join(sums)


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(train, "draw_run", lambda *_, **__: None)


@pytest.mark.usefixtures("no_picture")
def test_a_run_whose_metrics_are_gone_ends(tmp_path, capfd):
    config = config_of("run.steps=2", "run.save_every=1", "model.layers=1", "run.sample_tokens=0")
    train.train(config, run_in(tmp_path), [], Stop())
    assert "loss" in read_result(tmp_path)
    for name in (METRICS, metrics.SUMS, RESULT):
        (tmp_path / name).unlink()
    train.train(config, run_in(tmp_path), [], Stop())
    result = read_result(tmp_path)
    assert result["status"] == "ok" and "held_out_loss" in result and "loss" not in result
    assert f"{tmp_path / METRICS} is missing" in capfd.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["[]", "5", '"ok"', "null", '{"a": 1}', '{"status": 3, "overrides": []}', '{"status": "ok"}', "[" * 9999],
)
def test_json_that_is_no_result_counts_as_none(text, tmp_path, capsys):
    (tmp_path / RESULT).write_text(text)
    assert read_result(tmp_path) == {"status": "no result", "overrides": []}
    assert read_outcome(tmp_path, "").status == "no result"
    assert str(tmp_path / RESULT) in capsys.readouterr().err


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_folder_that_is_gone_is_noticed_at_the_next_write_and_not_made_again(how, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with raises(DamagedError, leaves=str(folder)), report_of(folder, stream=io.StringIO()) as report:
        report.step(1, {"loss": 1.0, "lr": 0.1}, 0.5)
        if how == "replaced":
            (folder / METRICS).unlink()
            (folder / METRICS).write_text("")
        else:
            shutil.rmtree(folder) if how == "deleted" else folder.rename(tmp_path / "elsewhere")
        for write in (report.sync, lambda: report.finish("ok"), lambda: report.held_out(1, 1.0, {})):
            with raises(DamagedError, leaves=str(folder)):
                write()
        report.step(2, {"loss": 1.0, "lr": 0.1}, 0.5)
    assert folder.exists() == (how == "replaced")


@pytest.mark.long
def test_a_command_whose_folder_is_deleted_fails(tmp_path):
    options = (
        "mesh.shard=1",
        "run.steps=5000",
        "run.save_every=0",
        "run.max_restarts=2",
        "hydra.run.dir=run",
    )
    process = start_command(["-m", "experiments.train", *RUN, *options], tmp_path)
    until = time.monotonic() + 200
    while not ((file := tmp_path / "run" / METRICS).exists() and file.read_text().count("\n") > 2):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    shutil.rmtree(tmp_path / "run")
    assert process.wait() == 1
    said = (tmp_path / OUTPUT["stderr"]).read_text()
    assert "was deleted while the run was at work in it" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_damaged_identity_is_told_of_and_not_taken_for_another_run(cwd, capsys):
    config, folder = config_of(), cwd / "outputs" / "day" / "first"
    with claim(config, folder, chosen=False):
        leave_checkpoint(folder)
    text = (folder / IDENTITY).read_text()
    (folder / IDENTITY).write_text(text.replace('"seed": 0', '"seed": 1'))
    with claim(config, folder.with_name("second"), chosen=False) as run:
        assert Path(run.folder).name == "second"
    said = capsys.readouterr().err
    assert str(folder / IDENTITY) in said and f"hydra.run.dir={folder}" in said
    with (
        raises(ConfigError, leaves=IDENTITY, fix=["delete it", "hydra.run.dir"]),
        claim(config, folder, chosen=True),
    ):
        pass


@pytest.mark.usefixtures("no_picture")
@pytest.mark.filterwarnings("ignore::fnshard.errors.CheckpointWarning")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence(tmp_path, cwd, capsys):
    config = config_of("run.steps=2", "run.save_every=1", "model.layers=1", "run.sample_tokens=0")
    folder = tmp_path / "outputs" / "day" / "run"
    train.train(config, run_in(folder), [], Stop())
    for path in (folder / CHECKPOINTS).glob("*/manifest.json"):
        path.write_bytes(path.read_bytes()[:-9])
    with raises(fs.errors.CheckpointError, leaves=str(folder)):
        train.train(config, run_in(folder), [], Stop())
    (folder / RESULT).unlink()
    write_record(folder / IDENTITY, identity_of(config))
    with claim(config, folder.with_name("other"), chosen=False) as run:
        assert Path(run.folder).name == "other"
    assert f"no checkpoint in {folder / CHECKPOINTS} is whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (5, "a mapping"),
        ({"step": 1}, "keys"),
        ({"step": -1}, "a count"),
        ({"step": "2"}, "a count"),
        ({"step": True}, "a count"),
        ({"step": 7}, "7 batches"),
    ],
)
def test_an_invalid_position_in_the_data_is_one_error(data, says, numbered, tmp_path):
    class StandInStep:
        mesh = SimpleNamespace(rank=0)
        gather_strings = staticmethod(lambda text: [text])

    loader = Loader(Windows(numbered(212, 4), 5), rows=8)
    if isinstance(data, dict) and says != "keys":
        data = loader.state_dict() | data
    state = SimpleNamespace(step=torch.tensor(2), data=data)
    (tmp_path / "2").mkdir()
    with (
        mock.patch.object(fs.checkpoint, "restore", lambda *_: state),
        raises(ConfigError, leaves=str(tmp_path), says=says),
    ):
        restore_newest(tmp_path, None, StandInStep, loader)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("width: 128", "width: 129"),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "- a\n- b\n",
        lambda text: "a: [",
        lambda text: "a: ${b",
    ],
)
def test_a_configuration_that_is_not_what_a_run_left_is_refused(change, tmp_path):
    text = "model:\n  width: 128\nrun:\n  seed: 3\n"
    write_sealed(tmp_path / "config.yaml", text)
    assert read_config(tmp_path) == {"model": {"width": 128}, "run": {"seed": 3}}
    path = tmp_path / "config.yaml"
    path.write_text(change(path.read_text()))
    with raises(ConfigError, leaves="config.yaml"):
        read_config(tmp_path)
    path.write_text(text)  # an older version's
    assert read_config(tmp_path)["run"]["seed"] == 3


def test_an_answer_that_is_not_what_was_written_is_asked_again(tmp_path):
    values = [{"question": n, "acc": 1.0} for n in range(4)]
    lines = [json.dumps({**each, SUM: checksum(each)}) for each in values]
    lines[1], lines[2] = lines[1].replace("1.0", "0.0"), "[3]"
    (tmp_path / "0.jsonl").write_text("\n".join([*lines, json.dumps({"question": 9, "acc": 1.0}), '{"que']))
    task = Task("arc", (Question("", (), ""),) * 4, ("acc",))
    assert read_answers(tmp_path, task) == {0: {"acc": 1.0}, 3: {"acc": 1.0}}


# ------------------------------------------------------------------ prepared data, shards


def spoil(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_prepared_data_that_are_damaged_are_prepared_anew(subjects, tmp_path, capsys):
    subject = subjects("cache")
    place = tmp_path / "cache"
    shutil.copytree(subject.pristine, place)
    expected, train = subject.look(place), next(place.glob("*/train"))
    assert capsys.readouterr().err == ""
    spoil(train / "tokens.bin")
    assert open_prepared(train).samples  # sizes alone
    with raises(
        DamagedError, leaves=[str(train), "tokens.bin"], fix=f"delete {train.parent}", says="checksum"
    ):
        open_prepared(train, read_all=True)
    assert subject.look(place) == expected and "prepared anew" in capsys.readouterr().err
    assert subject.look(place) == expected and capsys.readouterr().err == ""
    assert [p.name for p in place.iterdir()] == [train.parent.name]
    facts = (train / "prepared.json").read_bytes()
    for damage in (b"", facts[:-9], facts.replace(b"samples", b"sampled")):
        (train / "prepared.json").write_bytes(damage)
        with raises(DamagedError, leaves="prepared.json", fix=f"delete {train.parent}"):
            open_prepared(train)
        assert subject.look(place) == expected and "Fix" not in capsys.readouterr().err
    other = train.with_name("held_out")
    for a, b in ((train, "aside"), (other, "train"), (train.with_name("aside"), "held_out")):
        a.rename(a.with_name(b))
    with raises(DamagedError, leaves="/held_out"):
        open_prepared(train)
    assert subject.look(place) == expected


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (done.append(("rename", str(b))), rename(a, b))[1])
    aside = tmp_path / "aside"
    (aside / "sub").mkdir(parents=True)
    (aside / "sub" / "file").write_text("a")
    commit_folder(aside, tmp_path / "final")
    at = done.index(("rename", str(tmp_path / "final")))
    assert {str(aside / "sub" / "file"), str(aside / "sub"), str(aside)} <= set(done[:at])
    assert str(tmp_path) in done[at:]


def test_a_block_of_a_shard_is_compared_when_it_is_read_first(tmp_path):
    tokens = (np.arange(1_000_000) * 7 % 50_000).astype(np.uint16)
    for number, part in enumerate(np.split(tokens, [300_001])):
        np.save(tmp_path / f"{number}.npy", part)
    assert open_shards(tmp_path) == open_shards(tmp_path)  # the first call writes HEADER, the second reads it
    path = tmp_path / "1.npy"
    spoil(path, 5 * BLOCK_BYTES + 17)
    found = open_shards(tmp_path)
    starts = np.array([0, 299_990, 300_001, 700_000])
    assert (found.windows(starts, 100) == tokens[starts[:, None] + np.arange(100)]).all()
    inside = 300_001 + 5 * BLOCK_BYTES // 2
    with raises(DamagedError, leaves=str(path), says=f"bytes from {5 * BLOCK_BYTES}"):
        found.windows(np.array([inside]), 10)
    with raises(DamagedError, leaves=str(path)):
        open_shards(tmp_path).check(read_all=True)
    spoil(path, 5 * BLOCK_BYTES + 17)
    (tmp_path / HEADER).unlink()
    with raises(DamagedError, leaves=HEADER, fix="delete"):
        open_shards(tmp_path)


def test_shards_of_an_older_version_open_by_their_sizes(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(1000, dtype=np.uint16))
    found = open_shards(tmp_path)
    old = {"key": found.key, "files": dict(found.files), "largest": found.largest}
    (tmp_path / HEADER).write_text(json.dumps(old))
    (tmp_path / SUMS).unlink()
    assert stream_of(open_shards(tmp_path)).tolist() == list(range(1000))
    os.truncate(tmp_path / "0.npy", 1000)
    with raises(ConfigError, leaves="0.npy"):
        open_shards(tmp_path)


@pytest.mark.parametrize("what", ["array", "text"])
def test_what_a_killed_tokenising_job_has_left_is_compared_before_it_is_kept(
    what, texts, tmp_path, monkeypatch
):
    whole = tokenize(tokenize_config(tmp_path / "whole", texts, shard_mb=0.05))
    saved = []

    def dies(path: Path, tokens: np.ndarray) -> None:
        if len(saved) == 4:  # two of each side
            raise KeyboardInterrupt
        saved.append(path)
        save(path, tokens)

    save = job._save_array
    config = tokenize_config(tmp_path / "cut", texts, shard_mb=0.05)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job, "_save_array", dies)
        tokenize(config)
    left = (
        saved[2]
        if what == "array"
        else max((tmp_path / "cut" / "work").rglob("*.arrow"), key=os.path.getsize)
    )
    spoil(left, left.stat().st_size // 2)
    assert [each.key for each in tokenize(config)] == [each.key for each in whole]
    spoil(tmp_path / "cut" / "train" / "000000.npy")
    with raises(DamagedError, leaves="train/000000.npy"):
        tokenize(config)
    shutil.rmtree(tmp_path / "cut" / "train")
    assert [each.key for each in tokenize(config)] == [each.key for each in whole]


# ------------------------------------------------------------------ records


@pytest.mark.parametrize("values", [{}, {"a": 1}, {"b": [1, (2, 0.1)], "crc": {"3": None}}], ids=repr)
def test_a_record_reads_as_it_was_written_or_not_at_all(values, tmp_path):
    """Every bit of it, and every length."""
    path, expected = tmp_path / "record.json", json.loads(json.dumps(values))
    write_record(path, values)
    write_sealed(tmp_path / "text", "a: 1\nb: 2\n")
    for file, read, known in (
        (path, read_record, expected),
        (tmp_path / "text", read_sealed, "a: 1\nb: 2\n"),
    ):
        content = file.read_bytes()
        assert read(file) == known
        changed = [content[:length] for length in range(len(content) - 1)]
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            changed.append(bytes(flipped))
        for each in changed:
            file.write_bytes(each)
            with suppress(DamagedError):
                assert read(file) == known, each
    assert read_record(tmp_path / "none") is None
    path.write_text('{"x": 1}')  # an older version's
    assert read_record(path) == {"x": 1}
    with raises(DamagedError, says="checksum"):
        read_record(path, need_checksum=True)
