"""The kill campaign, in short; and that it would see what it looks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

import fnshard as fs
from experiments.chaos.campaign import FOUND, Campaign, KillOutcome, differences, plan
from experiments.chaos.config import MODES, MOMENTS, SPEC, ChaosConfig
from experiments.chaos.job import MonitoredRun
from experiments.chaos.report import failed, table
from experiments.configs.train import ConfigError
from experiments.data.files import write_json
from experiments.training.metrics_file import METRICS
from experiments.training.result import write_result
from experiments.training.resume import CHECKPOINTS

ROOT = Path(__file__).resolve().parents[2]
SEED = 4467


@pytest.mark.long  # `test_resume` and `test_finetune` kill, too
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_short_campaign(replicas, tmp_path):
    """The only rank is killed, then its launcher: nothing is lost. SEED draws these."""
    told = {"kills": 2, "seed": SEED, "ranks": 1, "steps": 40, "async_save": "true", "moments": "[step,save]",
            "replicas": replicas, "hydra.run.dir": tmp_path / "out"}  # fmt: skip
    drawn = [k.mode for k in islice(plan(ChaosConfig(seed=SEED, ranks=1, moments=("step", "save"))), 2)]
    assert drawn == ["kill_rank", "kill_launcher"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.chaos", *(f"{k}={v}" for k, v in told.items())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "chaos.json").read_text())
    assert [k["kill"]["mode"] for k in found["kills"]] == drawn
    assert found["kills"][0]["inside"] and not found["kills"][1]["inside"]
    assert found["kills"][1]["resumed"] is not None
    assert found["runs"] and not any(found["runs"]) and not failed(found)
    assert (tmp_path / "out" / "chaos.md").read_text().strip() in done.stdout
    assert re.search(r"^\| all \| 2 \|.*\| 0 \|$", done.stdout, re.MULTILINE)


def leave_run(
    folder: Path, *, loss: float = 1.0, weight: float = 1.0, step: int = 2, loader: int = 2
) -> Path:
    """What a run of two steps leaves behind."""
    folder.mkdir()
    rows = [{"step": 1, "loss": 2.0, "seconds": torch.rand(()).item()}, {"step": 2, "loss": loss}]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_result(folder, status="ok", overrides=[], loss=loss)
    params = {"w": torch.full((3,), weight)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    made = fs.shard_step(
        lambda p, x: (p["w"] * x).sum(), specs, optimizer=fs.optim.adamw(0.1), backend="eager"
    )
    state = made.init(params).replace(step=torch.tensor(step))
    fs.checkpoint.save(folder / CHECKPOINTS / "2", state, data={"step": loader})
    return folder


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, r"^$"),
        ({"loss": 1.0 + 2**-52}, r"^metrics differ from row 1 on.*; results differ"),
        ({"weight": 1.0 + 2**-23}, r"^params/w differs$"),
        ({"loader": 3}, r"^data differs$"),
        ({"step": 3}, r"^step differs$"),
    ],
)
def test_the_last_bit_is_seen(tmp_path, changed, told):
    found = differences(leave_run(tmp_path / "a"), leave_run(tmp_path / "b", **changed))
    assert re.search(told, "; ".join(found), re.DOTALL)


def test_a_missing_row_and_a_repeated_one_are_seen(tmp_path):
    unbroken, broken = leave_run(tmp_path / "a"), leave_run(tmp_path / "b")
    lines = (broken / METRICS).read_text().splitlines(keepends=True)
    for wrong in (lines[:1], [*lines, lines[-1]], lines[::-1]):
        (broken / METRICS).write_text("".join(wrong))
        assert differences(unbroken, broken)[0].startswith("metrics differ")


def test_an_unreadable_checkpoint_is_an_error(tmp_path):
    unbroken = leave_run(tmp_path / "a")
    broken = Path(shutil.copytree(unbroken, tmp_path / "b"))
    (data,) = broken.glob(f"{CHECKPOINTS}/2/*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(fs.errors.CheckpointError, match="is not what was written"):
        differences(unbroken, broken)


def test_kills_are_drawn_from_the_seed():
    config = ChaosConfig(ranks=4)
    first, again = (list(islice(plan(config), 200)) for _ in range(2))
    assert first == again != list(islice(plan(ChaosConfig(ranks=4, seed=1)), 200))
    assert {k.mode for k in first} == set(MODES) and {k.moment for k in first} == set(MOMENTS)
    assert {k.rank for k in first} == {0, 1, 2, 3}
    assert {k.after for k in first if k.moment == "step"} == set(range(1, 11))
    assert 0 <= min(k.within for k in first) < 0.05 and 0.95 < max(k.within for k in first) < 1


def test_the_table_tells_what_went_wrong():
    kill = {"mode": "kill_rank", "moment": "save", "rank": 0, "after": 1, "within": 0.5}
    done = {"kill": kill, "step": 12, "committed": 10, "in_save": True, "inside": True, "resumed": 10,
            "lost": 0, "problems": [], "back_s": 7.5, "imports_s": 4.0}  # fmt: skip
    found = {"kills": [done], "runs": [[]], "starts": 2, "seconds": 9.0}
    assert not failed(found)
    assert "| SIGKILL of a rank | 1 | 1 | 0 | 1 | 7.5 | 3.5 | 2.0 | 0 |" in table(found).splitlines()
    worse = {**done, "resumed": 5, "lost": 5, "problems": ["unreadable: the newest"], "back_s": None}
    assert (
        "| all | 2 | 2 | 0 | 2 | 7.5 | 3.5 | 4.5 | 5 |"
        in table({**found, "kills": [done, worse]}).splitlines()
    )
    for bad in (
        {"kills": [{**done, "lost": 1}]},
        {"kills": [{**done, "problems": ["exit code 7"]}]},
        {"config": {"replicas": 1}},
        {"runs": [["params/w differs"]]},
    ):
        assert failed({**found, **bad})
    shown = table({**found, "kills": [worse], "runs": [["params/w differs"]]})
    assert "1 runs finished, 1 unlike the unbroken one; checkpoints that could not be read: 1; other" in shown
    assert "- SIGKILL of a rank at step 12: unreadable: the newest" in shown and "- run 1: params/w" in shown


def test_an_interrupted_campaign_goes_on_behind_the_last_run_that_it_finished(tmp_path):
    """The kills of a run that was not finished are not counted; nobody is drawn twice."""
    config = ChaosConfig(ranks=2, nodes=2, modes=("kill_rank", "kill_launcher"))
    first = Campaign(config, tmp_path)
    kills = list(islice(plan(config), 6))
    first.done = [KillOutcome(kill, run, 9, 5, False, 2, 0) for run, kill in enumerate(kills[:3])]
    first.runs, first.drawn = [[], []], 4
    write_json(tmp_path / FOUND, first.found)
    again = Campaign(config, tmp_path)
    assert again.done == first.done[:2] and again.runs == [[], []]
    assert [again.coming, next(again.kills)] == kills[4:6]
    assert not Campaign(ChaosConfig(seed=1), tmp_path).done


IMPORTS = """
import os, signal, subprocess, sys
held_back = sys.argv[1] == "launcher"
os.write(1, b"0"), os.read(0, 1)
if held_back:
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = subprocess.Popen([sys.executable, __file__, "rank"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    rank.wait()
else:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.write(1, b"1"), os.read(0, 1)
"""


def test_a_process_imports_until_it_hears_sigterm(tmp_path):
    """A launcher until it handles it, a rank until it is no longer held back."""
    program = tmp_path / "program.py"
    program.write_text(IMPORTS)
    with subprocess.Popen(
        [sys.executable, program, "launcher"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        job, seen = MonitoredRun(tmp_path, [], 0, 60.0, processes=[process]), []
        for _ in range(3):  # the launcher has begun, its rank has begun, its rank hears
            process.stdout.read(1)
            seen.append(job.importing)
            process.stdin.write(b".")
    assert seen == [True, True, False]


def test_options_that_cannot_be():
    with pytest.raises(ConfigError, match=r"(?s)2 problems:.*modes=nuke: one of.*ranks=0"):
        SPEC.read({"modes": ["nuke"], "ranks": 0})
    with pytest.raises(ConfigError, match=r"kils=3: no such key\. Did you mean kills\?"):
        SPEC.read({"kils": 3})
    with pytest.raises(ConfigError, match=r"ranks=3 does not divide over nodes=2"):
        SPEC.read({"ranks": 3, "nodes": 2})
    assert [SPEC.read({"replicas": n, "ranks": 4}).nodes for n in (0, 1)] == [1, 2]
    with pytest.raises(ConfigError, match=r"moments: at least one of start, step, save"):
        SPEC.read({"moments": []})
