"""The main job: its configuration, bad input, and short runs from the command line."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from commands import run_command
from errors import raises
from runs import SMALL, compose, rows_of

import fnshard as fs
from experiments.lib import compose as schema
from experiments.lib import config as configs
from experiments.lib import plan
from experiments.lib.checks import ConfigError
from experiments.lib.decoder import Decoder, DecoderConfig, Sampler, last_logits
from experiments.lib.launch import find_accelerators, fit_to_machine
from fnshard.functional import make_functional
from fnshard.search.space import Choice

ROOT = Path(__file__).resolve().parents[2]
# ------------------------------------------------------------------ configuration


def options(group: str) -> list[str]:
    conf = ROOT / "conf"
    return sorted(path.stem for at in (conf, conf / "shared") for path in (at / group).glob("*.yaml"))


GROUPS = ("model", "strategy", "precision", "optimizer", "schedule", "data", "run", "hardware",
          "launcher", "tracker")  # fmt: skip


NUMBER = max(len(options(group)) for group in GROUPS)


@pytest.mark.parametrize("number", range(NUMBER))
def test_every_file_of_conf_composes(number):
    """One file of each group at a time."""
    names = {group: options(group)[number % len(options(group))] for group in GROUPS}
    needs = {"strategy=auto": ["run.device_gb=24"], "data=shards": ["data.root=shards"]}
    choices = [f"{group}={name}" for group, name in names.items()]
    more = [each for choice in choices for each in needs.get(choice, [])]
    placed = fit_to_machine(compose(*choices, *more), accelerators={})
    assert schema.build(dataclasses.asdict(placed)) == placed  # as a rank reads it back
    for group in ("optimizer", "schedule", *["strategy"] * (names["strategy"] in configs.STRATEGIES)):
        chosen = getattr(placed, group)  # what has a `_target_` is a mapping
        found = chosen["_target_"].split(".")[-1] if isinstance(chosen, dict) else chosen.name
        assert found == names[group]


def test_choices_mean_what_their_names_say():
    assert set(options("strategy")) == {*configs.STRATEGIES, "offload", "full_shard_remat"}
    offload = compose("strategy=offload").strategy
    assert (offload.name, offload.memory, offload.optimizer_memory) == ("full_shard", "host", "host")
    sizes = {name: compose(f"model={name}").model.parameters / 1e6 for name in options("model")}
    assert 0.5 < sizes["tiny"] < 5
    for name, millions in (("5m", 5), ("25m", 25), ("85m", 85), ("1b", 1100)):
        assert 0.8 < sizes[name] / millions < 1.25, sizes
    exact = {"7b": 6_738_415_616, "8b": 8_030_261_248, "70b": 70_553_706_496}  # as Meta's
    assert {name: round(sizes[name] * 1e6) for name in exact} == exact


def test_remat_is_a_name_a_number_or_a_mapping():
    remat = {"unit+offload": "unit+offload", "0.5": 0.5, "{layers.*:offload}": {"layers.*": "offload"}}
    for value, expected in remat.items():
        assert compose(f"strategy.remat={value}").strategy.remat == expected
    assert compose("strategy=full_shard_remat").strategy.remat == "unit"


# ------------------------------------------------------------------ ranks


def place_run(
    *overrides: str, gpus: int = 0, world: int | None = None, nodes: int = 1
) -> configs.TrainConfig:
    accelerators = {"cuda": gpus} if gpus else {}
    return fit_to_machine(compose(*overrides), accelerators=accelerators, world=world, nodes=nodes)


@pytest.mark.parametrize(
    ("overrides", "gpus", "world", "expected"),
    [
        ([], 0, None, ("cpu", 1, 2)),
        (["mesh.shard=1"], 0, None, ("cpu", 1, 1)),
        (["mesh.shard=4"], 0, None, ("cpu", 1, 4)),
        (["strategy=hybrid_shard", "mesh.shard=2"], 0, None, ("cpu", 2, 2)),
        ([], 8, None, ("cuda", 1, 8)),
        (["mesh.replicate=2"], 8, None, ("cuda", 2, 4)),
        (["mesh.shard=2"], 8, None, ("cuda", 1, 2)),
        (["run.device=cpu"], 8, None, ("cpu", 1, 2)),
        ([], 0, 4, ("cpu", 1, 4)),
        (["strategy=hybrid_shard"], 0, 4, ("cpu", 2, 2)),
        (["mesh.tensor=2", "mesh.context=2"], 8, None, ("cuda", 1, 2)),
    ],
)
def test_ranks_are_all_there_are_or_as_many_as_asked(overrides, gpus, world, expected):
    config = place_run(*overrides, gpus=gpus, world=world)
    assert (config.run.device, config.mesh.replicate, config.mesh.shard) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], 0, ("float32", "float32", "float32")),
        ([], 1, ("bfloat16", "bfloat16", "bfloat16")),  # nothing is summed
        (["run.accumulate=2"], 1, ("bfloat16", "bfloat16", "float32")),
        ([], 8, ("bfloat16", "bfloat16", "float32")),
        (["precision=bf16"], 8, ("float32", "bfloat16", "float32")),
        (["precision.storage=float32"], 1, ("float32", "bfloat16", "bfloat16")),
    ],
)
def test_precision_is_what_the_device_is_fast_in_with_an_fp32_optimizer(overrides, gpus, expected):
    found = place_run(*overrides, gpus=gpus).precision
    assert (found.storage, found.compute, found.reduce) == expected and found.optimizer == "float32"


def test_the_devices_of_a_machine_are_counted(monkeypatch):
    """They are counted by torch's names, which a machine without any never asks for."""
    assert find_accelerators() == {} or torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert find_accelerators() == {"cuda": 3}


def test_several_nodes_have_the_ranks_of_all():
    assert place_run("data.rows=16", gpus=8, nodes=2).mesh.shard == 16


@pytest.mark.parametrize(
    ("overrides", "machine", "leaves", "fix"),
    [
        ("mesh.shard=4", {"gpus": 2}, ["mesh.shard=4", "4 ranks", "2 cuda devices"], "a smaller mesh"),
        ("mesh.replicate=2 mesh.shard=1", {"gpus": 1}, ["2 ranks", "1 cuda device"], "a smaller mesh"),
        ("mesh.replicate=3", {"gpus": 8}, ["mesh.replicate=3", "8 ranks"], "mesh.shard"),
        ("mesh.replicate=3", {"world": 4}, ["mesh.replicate=3", "4 ranks"], "mesh.shard"),
        ("mesh.tensor=2", {"world": 3}, ["mesh.replicate=1", "mesh.tensor=2", "3 ranks"], "mesh.shard"),
        ("mesh.tensor=2", {"gpus": 1}, ["mesh.shard=1", "mesh.tensor=2", "2 ranks"], "a smaller mesh"),
        ("mesh.shard=3 mesh.context=2", {}, ["data.rows=8", "3 ranks that take other rows"], "data.rows=9"),
        (
            "mesh.shard=3 data.rows=9",
            {"world": 2},
            ["3 ranks", "2 were started"],
            "torchrun --nproc-per-node 3",
        ),
        ("run.device=cuda", {}, ["run.device=cuda", "cpu"], "run.device=auto"),
        ("mesh.shard=3", {}, ["data.rows=8", "data.held_out_rows=128"], "data.rows=9 data.held_out_rows=129"),
        ("strategy.optimizer_memory=disk run.disk_dir=nowhere", {}, "run.disk_dir='nowhere'", "make it"),
        (
            "mesh.shard=20",
            {"gpus": 8, "nodes": 2},
            ["20 ranks", "2 nodes", "16 cuda devices"],
            "a smaller mesh",
        ),
        ("mesh.shard=3", {"gpus": 8, "nodes": 2}, ["mesh.shard=3", "2 nodes"], "mesh.shard=16"),
        (
            "run.replicas=3",
            {"gpus": 1, "nodes": 3},
            ["run.replicas=3", "3 nodes"],
            ["run.replicas=2", "more nodes"],
        ),
        ("run.accumulate=3", {}, ["2 ranks", "run.accumulate=3"], "data.rows=12"),
    ],
)
def test_impossible_meshes_are_refused(overrides, machine, leaves, fix):
    with raises(ConfigError, leaves=leaves, fix=fix):
        place_run(*overrides.split(), **machine)


# ------------------------------------------------------------------ plans of several ranks


PAPER = fs.make_mesh(shard=2, abstract=True)


def agreement_of(rank: int, other: Choice | Exception) -> str:
    """Return the error of this rank where rank 1 plans something else, or cannot plan."""

    def fit() -> SimpleNamespace:
        choice = other if rank else Choice(PAPER)
        if isinstance(choice, Exception):
            raise choice
        return SimpleNamespace(chosen=SimpleNamespace(choice=choice))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "fit", fit)
        with raises(fs.AgreementError, leaves=["rank 0", "rank 1"]) as error:
            plan._fit_on_all_ranks()
    return str(error.value)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (Choice(PAPER, prefetch_depth=2), "prefetch_depth=2"),
        (fs.BudgetError("nothing fits"), "nothing fits"),
        (MemoryError("of this rank"), "MemoryError('of this rank')"),
    ],
)
def test_no_rank_acts_on_a_plan_or_gives_up_alone(ranks, other, shown):
    first, second = ranks(2).run(agreement_of, other)
    assert first == second and "rank 0: Choice(" in first and shown in first.partition("rank 1: ")[2]


# ------------------------------------------------------------------ the model

TINY = DecoderConfig(width=16, layers=2, heads=4, kv_heads=2, context=12)


def test_model_is_what_its_config_says():
    torch.manual_seed(0)
    for tied in (False, True):
        config = dataclasses.replace(TINY, tied=tied)
        model = Decoder(config)
        assert sum(p.numel() for p in model.parameters()) == config.parameters
        owners = [m for m in model.modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
        assert all(hasattr(m, "reset_parameters") for m in owners)
        logits = model(torch.randint(256, (3, 12)))
        assert logits.shape == (3, 12, 256) and 0.3 < logits.std() < 3


def test_model_is_causal_and_knows_positions():
    torch.manual_seed(0)
    model = Decoder(TINY)
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    shallow = Decoder(dataclasses.replace(TINY, layers=1))  # deeper ones know order by causality alone
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(shallow(swapped)[:, -1], shallow(tokens)[:, -1])


def test_a_sample_is_that_of_plain_decoding():
    """The padded fixed window gives what an unpadded one does, also when text outgrows it."""
    torch.manual_seed(0)
    apply, params = make_functional(Decoder(TINY))
    sampler = Sampler(last_logits(apply), TINY.context, torch.device("cpu"))
    with torch.no_grad():
        sampled = sampler(params, [b"ab"], 20, seed=4)
        random, written = torch.Generator().manual_seed(4), list(b"ab")
        for _ in range(20):
            logits = apply(params, torch.tensor([written[-12:]]))[0, -1]
            written.append(int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=random)))
        likeliest = apply(params, torch.tensor([list(b"ab")]))[0, -1].argmax()
        assert replace(sampler, temperature=0.0)(params, [b"ab"], 1) == [[int(likeliest)]]
    assert sampled == [written[2:]]
    broken = {path: torch.full_like(leaf, math.nan) for path, leaf in params.items()}
    with torch.no_grad():
        assert len(sampler(broken, [b"ab"], 3, seed=4)[0]) == 3


def test_a_sampler_lowers_the_program_that_it_calls():
    forward, images = mock.Mock(return_value=torch.zeros(2, 5)), torch.zeros(2, 3)
    sampler = Sampler(forward, TINY.context, torch.device("cpu"), more=(images,))
    sampler({}, [b"ab", b"c"], 1)
    sampler.lower({}, rows=2)
    called, lowered = (
        [x.shape for x in call.args[1:]] for call in (forward.call_args, forward.lower.call_args)
    )
    assert called == lowered == [(2, 12), (2,), (2, 3)]


# ------------------------------------------------------------------ from the command line


def test_a_sweep_leaves_every_file_of_its_runs_and_one_table(tmp_path: Path):
    """Seven rows do not divide over two ranks: the second run fails, and the first is whole."""
    more = ("run.steps=4", "run.held_out_every=2", "strategy=zero2", "data.rows=8,7")
    done = run_command(["experiments.train", "--multirun", *SMALL, *more], tmp_path)
    assert done.returncode == 1, done.stderr
    (sweep,) = tmp_path.glob("multirun/*/*")
    table = (sweep / "table.txt").read_text()
    assert table in done.stdout
    cells = [re.split(r"\s{2,}", line)[1:3] for line in table.splitlines()[1:]]
    assert cells == [["data.rows=8", "ok"], ["data.rows=7", "failed"]]
    assert [path.parent.name for path in sweep.glob("*/metrics.jsonl")] == ["0"]

    folder = sweep / "0"
    assert f"results: {folder}" in done.stdout
    assert re.search(r"model \d\.\d+ .*bigram \d\.\d+, trigram \d\.\d+", done.stdout)
    last = r"step 4/4, loss .*, lr .*, grad norm .*, .* tokens/s, left 0:00"
    assert re.search(last, done.stderr) and re.search(last, (folder / "ranks" / "rank0.log").read_text())
    rows = rows_of(folder)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all({"loss", "lr", "grad_norm", "tokens_per_s"} <= set(row) for row in steps)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["mesh"]["shard"] == 2 and config["strategy"]["name"] == "zero2"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "schedule.txt").read_text().strip()
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert {p.name for p in (folder / "ranks").iterdir()} == {"rank0.log", "rank1.log"}


@pytest.mark.long
def test_a_budget_that_nothing_fits_into_is_one_error(tmp_path: Path):
    """Found by the ranks, reported like any mistake."""
    least = ("strategy=auto", "model.layers=1", "mesh.shard=1", "run.device_gb=0.00001")
    done = run_command(["experiments.train", *SMALL, *least, f"hydra.run.dir={tmp_path}"], tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1
    assert re.search(r"error: run\.device_gb=1e-05: nothing fits into .*", done.stderr)
    assert re.search(r"Fix: a budget of .* would do", done.stderr)
    assert not (tmp_path / "metrics.jsonl").exists()
