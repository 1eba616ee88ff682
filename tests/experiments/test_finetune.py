"""The fine-tuning job: methods, objectives, exports, resume, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import raises
from runs import DOUBLE, ROOT, compose, rows_of, run_in, timeless
from tuning import SMALL, STEPS, assert_alike, config_of, tune_on_rank, tune_until

import fnshard as fs
from experiments import finetune
from experiments.bases import write_base
from experiments.data.chat import encode_conversation
from experiments.data.tokenizer import open_directory
from experiments.generate import main as generate
from experiments.lib.checks import ConfigError
from experiments.lib.folder import read_result
from experiments.lib.launch import start
from experiments.tuning import dataset, model_directory, objectives
from experiments.tuning.lm import from_directory
from experiments.tuning.method import Tuning, _make_optimizer, default_rate, make_tuning
from experiments.tuning.model_directory import ADAPTERS, EXPORTED, directory_of, export, keep_base
from fnshard.errors import LaunchError
from fnshard.launcher.rank import Stop

transformers = pytest.importorskip("transformers")


# ------------------------------------------------------------------ methods and objectives


@pytest.mark.suite({
    "lora-sft": "both exports; test_what_is_in_the_way has pairs, test_killed codes",
})  # fmt: skip
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("lora", "sft"),
        ("qlora4", "dpo"),
        ("full", "sft"),
        ("lora", "simpo"),
        ("qlora8", "sft"),
        ("full", "dpo"),
    ],
)
def test_a_run_leaves_what_it_promises(model, data, tmp_path, capfd, method, objective):
    """Losses fall; what is exported opens elsewhere, and is what was tuned."""
    rate = {"sft": 0.02}.get(objective, 0.004)
    config = config_of(model, data, tmp_path, f"method={method}", f"objective={objective}",
                       f"optimizer.lr={rate}", "schedule=constant", "schedule.warmup=0",
                       f"export={'merged' if method == 'full' else 'both'}")  # fmt: skip
    folder = tmp_path / "run"
    finetune.finetune(config, run_in(folder), [], Stop())
    result, shown = read_result(folder), capfd.readouterr().out
    assert result["status"] == "ok"
    before = json.loads((folder / finetune.BEFORE).read_text())
    assert result["held_out_loss"] < before["held_out_loss"]
    samples = (folder / "samples.txt").read_text()
    assert samples in shown and "before:" in shown and samples.startswith("<|begin|>")  # as a role would be
    assert (folder / "loss.png").exists() and any("train" in line for line in shown.splitlines()[:3])
    assert re.search(r"<\|begin\|>\d\+\d=«\d+<\|end\|>»", shown)  # what is learned of an example
    assert len([r for r in rows_of(folder) if "loss" in r]) == STEPS
    ids = torch.arange(3, 23).view(2, 10)
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / EXPORTED).eval()
    after = merged(ids).logits
    untouched = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    assert (after - untouched(ids).logits).abs().max() > 1e-3
    assert (folder / EXPORTED / "tokenizer.json").exists()
    generate([f"run={folder}", "prompt='<|user|>1+1='", "tokens=2"])
    again = capfd.readouterr().out
    label = "loss, nats per token" if objective == "sft" else "loss"  # a loss of pairs has no unit
    assert f"held-out {label}: {result['held_out_loss']:.3f}\n" in again
    assert "\n\n<|user|>1+1=\n  answer:" in again
    if method == "lora":
        import peft

        adapted = peft.PeftModel.from_pretrained(untouched, folder / ADAPTERS).eval()
        torch.testing.assert_close(adapted(ids).logits, after, atol=1e-5, rtol=1e-5)


@pytest.mark.long  # test_resume.py kills the same loop
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_killed_and_started_again_it_is_the_same(model, data, tmp_path, monkeypatch, capfd, objective):
    """Bit for bit, with dropout in the adapters and codes beneath them, at the rate that nobody named."""
    config = config_of(model, data, tmp_path, f"objective={objective}", "method=qlora4", "method.dropout=0.1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    setup = finetune.build(config)  # lowered once for all three
    monkeypatch.setattr(finetune, "build", lambda *_, **__: setup)
    finetune.finetune(config, run_in(whole), [], Stop())

    tune_until(config, broken, 4)
    tune_on_rank(0, config, broken)
    assert timeless(whole) == timeless(broken)
    assert (whole / "samples.txt").read_text() == (broken / "samples.txt").read_text()
    printed = rf"optimizer.lr=(\S+), the default of objective={objective} method=qlora4 and a base of"
    (rate,) = set(re.findall(printed, capfd.readouterr().out))
    assert f"lr: {rate}\n" in (whole / "config.yaml").read_text()


# ------------------------------------------------------------------ ranks that split the same rows


DORA = ("method.dora=true", "method.b_rate=4")


@pytest.mark.parametrize(
    ("axes", "more"),
    [
        ({"shard": 2}, DORA),  # ranks with other rows draw other noise
        ({"tensor": 2}, ("method.neftune=5", *DORA)),
        ({"context": 2}, ()),
    ],
    ids=str,
)
@pytest.mark.long
def test_split_over_two_ranks_it_is_the_same(ranks, model, data, tmp_path, axes, more):
    """Losses and answers; test_experts has two ranks of an expert axis, test_rewarded of a shard axis."""
    config = config_of(model, data, tmp_path, "export=none", "run.steps=2", "run.sample_tokens=2",
                       *DOUBLE, *more)  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    tune_on_rank(0, config, one)
    ranks(2).run(tune_on_rank, replace(config, mesh=replace(config.mesh, **axes)), str(two))
    assert_alike(two, one, rel=1e-9)
    assert (one / "samples.txt").read_text() == (two / "samples.txt").read_text()


@pytest.mark.long
def test_noise_rates_and_scales_change_what_is_trained_and_not_what_is_measured(model, data, tmp_path):
    """NEFTune is in the training's loss alone; B has a rate of its own; DoRA's scales train."""
    finals = {}
    for name, more in {
        "plain": (),
        "noise": ("method.neftune=5",),
        "dora": ("method.dora=true", "method.b_rate=16"),
    }.items():
        setup = finetune.build(config_of(model, data, tmp_path, "run.steps=1", *more))
        state = setup.make_state()
        assert setup.evaluate(state.params)[0] == pytest.approx(
            finals.setdefault("at first", setup.evaluate(state.params)[0])
        )
        state, metrics = setup.step(state, *next(setup.make_loader()))
        moved = fs.tree.flatten_with_paths(state.params["adapters"])[0]
        finals[name] = (
            metrics.numbers()["loss"],
            max(v.abs().max().item() for p, v in moved.items() if p.endswith(".b")),
        )
        if name == "dora":
            assert all((v != 1).any() for p, v in moved.items() if p.endswith(".g"))
    assert finals["noise"][0] != finals["plain"][0] == pytest.approx(finals["dora"][0])
    assert finals["dora"][1] == pytest.approx(16 * finals["plain"][1], rel=1e-3)


@pytest.mark.long
def test_what_is_in_the_way_is_kept(model, data, tmp_path, capfd):
    """A folder with the export's name, which may be the base, is kept; another run's answers count as none.

    There are few pairs, one of them held out, no samples, and a run that goes on from another's checkpoint.
    """
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data["pairs"].read_text().splitlines(keepends=True)[:25]))
    folder = tmp_path / "run"
    (folder / EXPORTED).parent.mkdir()
    shutil.copytree(model, folder / EXPORTED)
    (folder / finetune.BEFORE).write_text(
        json.dumps({"of": "another", "answers": ["x"], "held_out_loss": 7.0})
    )
    asked = ("objective=dpo", "method=lora", "export=merged", "run.sample_tokens=0", "run.steps=2",
             "run.save_every=1", "run.held_out_every=1")  # fmt: skip
    config = config_of(folder / EXPORTED, {**data, "pairs": few}, tmp_path, *asked)
    finetune.finetune(config, run_in(folder), [], Stop())
    result = read_result(folder)
    before = json.loads((folder / finetune.BEFORE).read_text())
    assert before["held_out_loss"] == pytest.approx(math.log(2)) and math.isfinite(result["held_out_loss"])
    kept = folder / f"{EXPORTED}.1"
    assert (kept / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert (folder / EXPORTED / "model.safetensors").exists()
    config = replace(config, model=str(kept))
    finetune.finetune(
        config, replace(run_in(tmp_path / "on"), source=str(folder / "checkpoints" / "1")), [], Stop()
    )
    shown = capfd.readouterr().out
    assert "resume: step 1 of" in shown and re.search(r"\nheld-out loss: [\d.]+\n", shown)


@pytest.mark.parametrize("pack", [True, False])
def test_packed_rows_are_told_apart(model, data, tmp_path, pack):
    """The loss of a packed batch, as a step is given it, is that of its samples, each alone."""
    config = config_of(model, data, tmp_path, "method=full", f"data.pack={pack}")
    mesh, lm, given = fs.make_mesh(shard=1, device="cpu"), from_directory(model), dataset.open_data(config)
    (batch,) = next(given.loader(config, mesh))
    assert ("documents" in batch) == pack
    params = fs.hf.load(model, fs.presets.full_shard(lm.params, mesh), mesh, model=lm.model)
    loss, _ = finetune.OBJECTIVES["sft"](
        Tuning(lm, config.method, lm.params), config.objective, training=True
    )(params, batch)
    alone, count = 0.0, 0
    documents = batch.get("documents", torch.ones_like(batch["tokens"]))
    for row, numbers in enumerate(documents):
        for number in set(numbers.tolist()) - {0}:
            one = {n: batch[n][row, numbers == number][None] for n in ("tokens", "targets")}
            alone -= float(objectives.row_logprobs(lm, params, one).sum())
            count += int((one["targets"] != -100).sum())
    assert float(loss.total) == pytest.approx(alone, rel=1e-5) and int(loss.count) == count


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo"])
def test_pairs_are_compared_by_their_rows(model, data, tmp_path, name):
    config = config_of(model, data, tmp_path, "method=lora", f"objective={name}", "objective.beta=0.7")
    mesh, lm, given = fs.make_mesh(shard=1, device="cpu"), from_directory(model), dataset.open_data(config)
    (batch,) = next(given.loader(config, mesh))
    tuning = make_tuning(config, lm)
    loaded = fs.hf.load(model, fs.presets.full_shard(lm.params, mesh), mesh, model=lm.model)
    adapters = fs.tree.map(lambda v: torch.full_like(v, 0.03), tuning.params["adapters"])
    params = {"base": loaded, "adapters": adapters}
    loss, aux = finetune.OBJECTIVES[name](tuning, config.objective, training=False)(params, batch)
    sums = []
    for of in (tuning.policy, tuning.reference):
        for side in ("chosen", "rejected"):
            rows = of(lambda p, b: objectives.row_logprobs(lm, p, b))(params, batch[side])
            lengths = (batch[side]["targets"] != -100).sum(1)
            sums.append(rows if name == "dpo" else rows / lengths.clamp(min=1))
    more = {"margin": 1.0} if name == "simpo" else {}
    numbers = sums if config.objective.kind.reference else sums[:2]
    there = (batch["chosen"]["targets"] != -100).any(1)
    expected, _ = getattr(fs.losses.policy, name)(*numbers, beta=0.7, counted=there, **more)
    assert float(loss.total) == pytest.approx(float(expected.total), rel=1e-5)
    assert float(loss.count) == float(expected.count) and "accuracy" in aux


@pytest.mark.parametrize(
    ("method", "objective", "keys"),
    [
        ("full", "sft", ()),  # the tree is the model's leaves; the others have keys before these
        ("full", "dpo", ("policy",)),
        ("full", "reward", ("policy", "score")),
        ("lora", "sft", ("adapters",)),
        ("lora", "reward", ("adapters", "score")),
    ],
)
def test_the_same_leaves_decay_in_every_method(model, data, tmp_path, method, objective, keys):
    """A leaf of the model's root may have an embedding's name, as "embed_out" of GPT-NeoX has."""
    lm = from_directory(model)
    leaves = {p.replace("lm_head", "embed_out"): leaf for p, leaf in lm.params.items()}
    lm = replace(lm, params=leaves, _head="embed_out.weight")
    targets = ["method.targets=embed_out.weight|*.up_proj.weight"] if method == "lora" else []
    config = config_of(
        model, data, tmp_path, f"method={method}", f"objective={objective}", "optimizer.weight_decay=0.5",
        "schedule=constant", "schedule.warmup=0", *targets,
    )  # fmt: skip
    tuning = make_tuning(config, lm)
    assert {*keys} <= {*tuning.params}
    named, _ = fs.tree.flatten_with_paths(tuning.params)
    start = {path: torch.ones(leaf.shape) for path, leaf in named.items() if leaf.requires_grad}

    # A leaf without a gradient changes by its decay alone.
    optimizer = _make_optimizer(config, tuning)
    zeros = {path: torch.zeros_like(leaf) for path, leaf in start.items()}
    step = fs.optim.Step(torch.tensor(0), norm=torch.tensor(0.0))
    after, _ = fs.optim.apply_updates(optimizer, zeros, fs.optim.init_slots(optimizer, start), start, step)
    kept = {path for path, leaf in start.items() if torch.equal(after[path], leaf)}
    assert kept == {path for path, leaf in start.items() if leaf.dim() < 2 or "embed_" in path}
    assert any("embed_out" in path for path in kept) and kept < start.keys()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_a_beta_of_which_nothing_is_learned_is_refused(model, data, tmp_path, name):
    with raises(ConfigError, leaves="objective.beta=0", says="default"):
        config_of(model, data, tmp_path, f"objective={name}", "objective.beta=0")


def test_orpo_without_its_odds_ratio_is_the_likelihood_of_the_chosen(model, data, tmp_path):
    """A beta of 0 is not the default's 0.1."""
    mesh, lm = fs.make_mesh(shard=1, device="cpu"), from_directory(model)
    params = fs.hf.load(model, fs.presets.full_shard(lm.params, mesh), mesh, model=lm.model)
    totals = []
    for beta in ("0", "null", "0.1"):
        config = config_of(model, data, tmp_path, "method=full", "objective=orpo", f"objective.beta={beta}")
        (batch,) = next(dataset.open_data(config).loader(config, mesh))
        loss = finetune.OBJECTIVES["orpo"](make_tuning(config, lm), config.objective, training=False)
        totals.append(float(loss(params, batch)[0].total))
    assert totals[0] < totals[1] == totals[2]


def test_files_and_directories_that_are_not_what_they_should_be(model, data, tmp_path, monkeypatch):
    """One error each, before any rank starts."""
    monkeypatch.chdir(tmp_path)
    narrow = tmp_path / "narrow"
    shutil.copytree(model, narrow)
    config = json.loads((narrow / "config.json").read_text()) | {"vocab_size": 40}
    (narrow / "config.json").write_text(json.dumps(config))
    cases = {
        "model=nowhere data.train=none.jsonl": (["none.jsonl", "model=nowhere"], "stdlib, tasks, tiny"),
        f"model={model} data.context=65": (["data.context=65", "64 positions"], "data.context=64"),
        f"model={narrow}": ([str(narrow), "261", "40 rows"], ()),
        "model=acme/nothing": ("model=acme/nothing", "hf download acme/nothing"),
    }
    for overrides, (leaves, fix) in cases.items():
        with raises(ConfigError, leaves=leaves, fix=fix):
            config = compose(*SMALL, *overrides.split(), spec=finetune.COMMAND)
            start(finetune.JOB, config, tmp_path / "run", [], chosen=True)
    assert not (tmp_path / "run" / "ranks").exists()
    config = config_of(model, data, tmp_path, "method.rank=99")
    with raises(ConfigError, leaves=["method.rank=99", "rank=99"], says="16"):
        finetune.build(config)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_buffers_are_counted_as_no_parameters(model, data, tmp_path, method):
    """A rotary table is none, neither of a base nor of what trains."""
    setup = finetune.build(config_of(model, data, tmp_path, f"method={method}"))
    tables = sum(buffer.numel() for buffer in setup.planned.tuning.lm.model.buffers())
    whole = sum(leaf.numel() for leaf in setup.planned.tuning.lm.model.parameters())
    adapters = sum(leaf.numel() for parts in setup.planned.tuning.params.get("adapters", {}).values()
                   for leaf in parts.values()) if method == "lora" else 0  # fmt: skip
    why = setup.planned.why
    assert tables > 0 and f"of {whole + adapters:,} parameters train" in why
    assert f"a base of {whole:,} parameters" in why


def test_the_rate_that_nobody_names_is_by_method_objective_and_size():
    """The rate is what the guide's table has."""
    table = re.search(
        r"\| base \|.*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "experiments/guide/finetuning.md").read_text()
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]
    columns = (("sft", "full"), ("sft", "lora"), ("dpo", "full"), ("dpo", "qlora4"),
               ("grpo", "full"), ("grpo", "lora"))  # fmt: skip
    for size, (_, *row) in zip((1e6, 1e9, 8e9, 7e10), cells, strict=True):
        assert [default_rate(*each, int(size)) for each in columns] == [float(cell) for cell in row]


def test_a_model_of_the_hub_is_taken_from_the_local_cache(model, tmp_path, monkeypatch):
    """A snapshot of huggingface_hub opens, which is a folder of links to blobs."""
    from huggingface_hub import constants

    place_of = tmp_path / "models--acme--tiny"
    snapshot = place_of / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (place_of / "blobs").mkdir()
    (place_of / "refs").mkdir()
    (place_of / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, place_of / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert directory_of(compose(*SMALL, "model=acme/tiny", spec=finetune.COMMAND)) == str(snapshot)
    specs = fs.presets.full_shard(from_directory(snapshot).params, mesh := fs.make_mesh(shard=1))
    assert fs.hf.load(snapshot, specs, mesh, model=from_directory(snapshot).model)


def test_a_base_is_made_once_by_a_command_of_its_own(tmp_path, monkeypatch, capfd):
    """A base that is there serves torchrun, too; mistakes are looked for in it.

    Bases that are trained come behind "tiny", in which a mistake shows soon.
    """
    asked = []

    def command(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words[1:])
        Path("outputs", "bases", words[3]).mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_directory.subprocess, "run", command)
    (kept := tmp_path / "outputs" / "bases").mkdir(parents=True)
    write_base("tiny", kept / "tiny")
    for words, name in {(): "stdlib", ("objective=grpo",): "tasks", ("model=100m",): "100m"}.items():
        for _ in range(2):
            with raises(ConfigError, leaves=f"bases/{name}'"):
                finetune.prepare(compose(*SMALL, *words, spec=finetune.COMMAND))
        settings = ["run.backend=eager", "run.device=cpu"]
        assert asked.pop() == ["-m", "experiments.bases", name, *settings] and not asked
        assert f"python -m experiments.bases {name}" in capfd.readouterr().out
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert keep_base("tiny") == str(kept / "tiny")
    with raises(ConfigError, leaves="'tiny-moe'", fix="python -m experiments.bases"):
        keep_base("tiny-moe")


def test_a_base_that_was_not_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_directory.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with raises(LaunchError, leaves="'stdlib'", fix="the same command"):
        keep_base("stdlib")


def test_one_template_in_training_sampling_and_the_exported_model(model, data, tmp_path):
    """A model that comes without one gets that which it learned by: transformers makes the same tokens."""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "talk.jsonl"
    lines = [[{**talk[0], "content": f"{n}+1="}, {**talk[1], "content": f"{n + 1}"}] for n in range(1, 40)]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    config = config_of(bare, data | {"samples": path}, tmp_path, "export=both", "run.prompt='1+1='")
    setup = finetune.build(config)
    trained = [setup.data.train.sample(n)[0].tolist() for n in range(setup.data.train.samples)]
    asked = setup.answers.examples[-1].prompt
    assert any(tokens[: len(asked)] == asked for tokens in trained)
    state = setup.make_state()
    run_in(tmp_path / "run")
    export(setup.config, setup.planned, setup.data.tokenizer, state, setup.step, tmp_path / "run")
    for name in (EXPORTED, ADAPTERS):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / name)
        ids = theirs.apply_chat_template(talk, return_dict=False)
        assert ids in trained
        assert theirs.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False) == asked
        again, _ = encode_conversation(open_directory(tmp_path / "run" / name), talk)
        assert again.tolist() == ids


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises(ConfigError, leaves="transformers", fix="fnshard[finetune]"):
        directory_of(compose(*SMALL, spec=finetune.COMMAND))
