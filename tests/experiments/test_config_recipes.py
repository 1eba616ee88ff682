"""Recipes of conf/experiment: each composes, takes overrides, trains for two steps; and what --help says."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import run_in, validate

from experiments import train
from experiments.bench.command import COMMAND as BENCH
from experiments.evaluate.config import COMMAND as EVALUATE
from experiments.explain.config import COMMAND as EXPLAIN
from experiments.finetune import COMMAND as FINETUNE
from experiments.lib.compose import CONF, Command, help_of
from experiments.lib.folder import read_result
from experiments.lib.launch import fit_to_machine, main
from experiments.plan.config import COMMAND as PLAN
from experiments.tokenize.config import COMMAND as TOKENIZE
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.job import tokenize
from experiments.train import COMMAND as TRAIN
from experiments.train import JOB
from fnshard.launcher.rank import Stop

SPECS = (TRAIN, FINETUNE, BENCH, TOKENIZE, EVALUATE, EXPLAIN, PLAN)
SMALL = (
    "model.width=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.context=32",
    "data.rows=4", "data.held_out_rows=4", "run.steps=2",
    "run.held_out_every=2", "run.sample_tokens=1", "run.backend=eager",
    "run.device=cpu", "mesh.shard=1", "mesh.replicate=1", "run.save_every=0",
)  # fmt: skip


def recipes(form: Command) -> list[str]:
    return sorted(path.stem for path in (form.conf / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 40)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", recipes(TRAIN))
def test_a_recipe_trains_for_two_steps(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "shards":  # at the place that the recipe names
        tokenize(TokenizeConfig(out="shards", files=(str(text),), processes=1, held_out_percent=20))
    root = () if name == "shards" else (f"data.root={text}",)
    asked = validate(TRAIN, [f"experiment={name}", *SMALL, *root])
    config = JOB.prepare(fit_to_machine(asked, accelerators={}))
    train.train(config, run_in(tmp_path / "run"), [], Stop())
    result = read_result(tmp_path / "run")
    assert result["status"] == "ok" and math.isfinite(result["held_out_loss"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert (tmp_path / "run" / "plan.json").exists() == (name == "planned")


@pytest.mark.suite({
    "train-zero2_offload": "tiers",
    "train-hybrid": "a mesh",
    "train-planned": "a plan",
    "train-shards": "data",
    "finetune-sft_full": "all trains",
    "finetune-qlora4": "codes",
    "finetune-dpo": "pairs",
})  # fmt: skip
@pytest.mark.parametrize(
    ("form", "name"),
    [(form, name) for form in (TRAIN, FINETUNE) for name in recipes(form)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_recipe_is_whole_and_takes_overrides(form, name):
    """The machine has eight GPUs."""
    asked = validate(form, [f"experiment={name}"])
    fit_to_machine(asked, accelerators={"cpu": 1} if name == "laptop" else {"cuda": 8})
    again = validate(form, [f"experiment={name}", "run.steps=10", "optimizer.lr=0.5"])
    assert (again.run.steps, again.optimizer.lr) == (10, 0.5)


def test_a_recipe_gives_way_to_choices():
    config = validate(TRAIN, ["experiment=fsdp2", "strategy=zero2", "model=tiny"])
    assert (config.strategy.name, config.model.width, config.precision.compute) == ("zero2", 128, "bfloat16")


# ------------------------------------------------------------------ --help


@pytest.mark.parametrize("form", SPECS, ids=lambda form: form.name)
def test_help_names_groups_keys_and_examples_that_compose(form):
    shown = help_of(form)
    for group in ("strategy", "precision", "tracker") if form in (TRAIN, FINETUNE) else ():
        choices = sorted(p.stem for p in (CONF / "shared" / group).glob("*.yaml"))
        assert f"  {group}: {', '.join(choices)}\n" in shown
    for field in dataclasses.fields(form.config):
        assert re.search(rf"^  {field.name}:", shown, re.M), field.name
    assert len(form.examples) >= 3
    for command in form.examples:
        assert command in shown
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", f"experiments.{form.name}"]
        if "device=cuda" not in words:
            validate(form, words[3:])


@pytest.mark.long
def test_other_flags_of_hydra_work(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for arguments, said in {
        ("-h",): help_of(TRAIN) + "\n",
        ("--cfg", "job", "run.steps=7"): "steps: 7",
        ("--hydra-help",): "Hydra",
    }.items():
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        try:
            main(JOB)
        except SystemExit as ended:
            assert ended.code in (0, None)
        shown = capfd.readouterr()
        assert said in shown.out, (arguments, shown)
    assert list(tmp_path.iterdir()) == []
