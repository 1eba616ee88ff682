"""The main job: its configuration, bad input, and short runs from the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
import torch
import torch.nn.functional as F
import yaml
from commands import Warm
from main_job import SMALL, compose, rows_of
from torch.fx.experimental.proxy_tensor import make_fx

from experiments import train
from experiments.cli import job, schema
from experiments.cli.exceptions import is_mistake
from experiments.cli.validation import validate
from experiments.configs import train as configs
from experiments.configs.machine import check_memory, place, state_bytes
from experiments.configs.train import ConfigError
from experiments.explain.__main__ import SPEC as EXPLAIN
from experiments.explain.paper import explain
from experiments.training.decoder import Attention, Decoder, DecoderConfig, next_token_loss
from experiments.training.sample import Sampler, last_logits, printable
from fnshard.functional import make_functional

ROOT = Path(__file__).resolve().parents[2]
# ------------------------------------------------------------------ configuration


def options(group: str) -> list[str]:
    conf = ROOT / "conf"
    return sorted(path.stem for at in (conf, conf / "shared") for path in (at / group).glob("*.yaml"))


GROUPS = ("model", "strategy", "precision", "optimizer", "schedule", "data", "run", "hardware")


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in options(group)])
def test_every_file_of_conf_composes(choice):
    needs = {"strategy=auto": ["run.device_gb=24"], "data=shards": ["data.root=shards"]}
    placed = place(compose(choice, *needs.get(choice, [])), accelerators={})
    assert schema.build(dataclasses.asdict(placed)) == placed  # as a rank reads it back
    group, name = choice.split("=")
    if group in ("optimizer", "schedule") or name in configs.STRATEGIES:
        assert getattr(placed, group).name == name


def test_every_strategy_has_a_file():
    assert set(options("strategy")) == {*configs.STRATEGIES, "offload", "full_shard_remat"}


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("strategy.remat=unit", "unit"),
        ("strategy.remat=unit+offload", "unit+offload"),
        ("strategy.remat=0.5", 0.5),
        ("strategy.remat={layers.*:offload}", {"layers.*": "offload"}),
        ("strategy=full_shard_remat", "unit"),
    ],
)
def test_remat_is_a_name_a_number_or_a_mapping(override, wanted):
    assert compose(override).strategy.remat == wanted


def test_offload_is_of_parameters_and_optimizer():
    strategy = compose("strategy=offload").strategy
    assert (strategy.name, strategy.memory, strategy.optimizer_memory) == ("full_shard", "host", "host")


def test_sizes_are_what_the_names_say():
    sizes = {name: compose(f"model={name}").model.parameters / 1e6 for name in options("model")}
    assert 0.5 < sizes["tiny"] < 5
    for name, wanted in (("5m", 5), ("25m", 25), ("85m", 85), ("1b", 1100), ("8b", 8030)):
        assert 0.8 < sizes[name] / wanted < 1.25, sizes


NOT_COMPOSED = [
    ("run.stepz=1", "run.stepz"),
    ("mesh.z=1", "mesh.z"),
    ("run.steps=many", "run.steps"),
    ("run.steps=1.5", "run.steps"),
    ("optimizer.b3=0.1", "optimizer.b3"),
    ("optimizer=lion", "optimizer/lion"),
    ("strategy=ddp", "strategy/ddp"),
    ("mesh=3", "mesh"),
]


@pytest.mark.parametrize(("override", "named"), NOT_COMPOSED)
def test_keys_choices_and_types_are_refused(override, named):
    with pytest.raises((hydra.errors.HydraException, ConfigError), match=re.escape(named)):
        compose(override)


REFUSED_BY_US = [
    (["+mesh.z=1"], r"mesh\.z=1: no such key\. mesh has replicate, shard"),
    (["+extra=1"], r"extra=1: no such key\. The top has model, mesh"),
    (["+model.layers_too=1"], r"model\.layers_too=1: no such key\. Did you mean model\.layers\?"),
    (
        ["optimizer=sgd", "+optimizer.b1=0.1"],
        r"optimizer\.b1=0\.1: no such key\. .*optimizer has name, lr, momentum",
    ),
    (["run.steps=0"], r"run\.steps=0: must be 1 or more"),
    (["optimizer.lr=nan"], r"optimizer\.lr=nan: expected a finite number"),
    (["optimizer.lr=null"], r"optimizer\.lr=null: only fine-tuning has defaults"),
    (["optimizer.lr=0"], r"optimizer\.lr=0\.0: must be above 0"),
    (["optimizer.b1=1"], r"optimizer\.b1=1\.0: must be 0 or more and below 1"),
    (["mesh.shard=0"], r"mesh\.shard=0: must be 1 or more"),
    (["strategy.name=ddp"], r"strategy\.name='ddp': must be one of full_shard, "),
    (["precision.compute=int8"], r"precision\.compute='int8': must be one of float64, float32"),
    (["schedule.decay=0.1"], r"schedule: warmup_cosine does nothing with decay"),
    (["schedule=wsd", "schedule.warmup=0.9"], r"warmup \+ decay is more than the whole run"),
    (
        ["model.heads=3"],
        r"model\.width=128 and model\.heads=3: the head size, width / heads, must be a whole",
    ),
    (["model.kv_heads=3"], r"kv_heads must divide heads"),
    (["model.vocab=100"], r"model\.vocab=100: must be 256 or more"),
    (
        ["optimizer=sgd", "optimizer.momentum=0"],
        r"optimizer\.nesterov=true: needs optimizer\.momentum above 0",
    ),
    (["strategy.remat=block"], r"strategy\.remat='block': one of 'none', 'unit', 'offload'"),
    (["strategy.remat=1.5"], r"strategy\.remat=1\.5: one of 'none', .* a fraction from 0 to 1"),
    (["strategy.remat={layers.*:half}"], r"strategy\.remat=\{'layers\.\*': 'half'\}: one of"),
    (["strategy.memory=nvme"], r"strategy\.memory='nvme': must be one of device, host, disk"),
    (["strategy.optimizer_memory=ram"], r"strategy\.optimizer_memory='ram': must be one of device, host"),
    (["strategy.update_on=disk"], r"strategy\.update_on='disk': must be one of device, host\."),
    (["strategy.update_on=host"], r"strategy\.update_on='host': needs strategy\.optimizer_memory=host"),
    (["strategy.memory=disk"], r"run\.disk_dir=None: what rests on disk needs a directory"),
    (["run.disk_dir=there"], r"run\.disk_dir='there': nothing rests on disk"),
    (["strategy=auto"], r"strategy=auto: needs a budget\. Fix: run\.device_gb=24"),
    (["run.device_gb=24"], r"run\.device_gb=24: a budget is for strategy=auto"),
    (["strategy=auto", "run.device_gb=0"], r"run\.device_gb=0\.0: must be above 0"),
    (
        ["strategy=auto", "run.device_gb=1", "hardware.name=tpu"],
        r"hardware\.name='tpu': must be one of auto",
    ),
    (
        ["strategy=auto", "run.device_gb=1", "strategy.remat=unit", "strategy.memory=host"],
        r"strategy=auto chooses remat and memory by itself",
    ),
    (["strategy=auto", "run.device_gb=1", "run.accumulate=2"], r"strategy=auto chooses the micro-batches"),
    (["run.prompt=''"], r"run\.prompt='': a sample needs at least one byte"),
    (["run.save_every=-1"], r"run\.save_every=-1: must be 0 or more"),
    (["run.keep=0"], r"run\.keep=0: must be 1 or more"),
    (["run.keep_every=0"], r"run\.keep_every=0: must be 1 or more"),
    (["run.keep_best=-1"], r"run\.keep_best=-1: must be 0 or more"),
    (["run.max_restarts=-1"], r"run\.max_restarts=-1: must be 0 or more"),
    (["run.stop_grace_s=0"], r"run\.stop_grace_s=0\.0: must be above 0"),
    (["run.resume=''"], r"run\.resume='': must be auto, never, or a path"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED_BY_US)
def test_we_refuse(overrides, message):
    with pytest.raises(ConfigError, match="(?s)^(?!the configuration has).*" + message):
        compose(*overrides)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*model\.heads=5.*mesh\.z.*run\.steps=-1"):
        compose("+mesh.z=1", "run.steps=-1", "model.heads=5")


def test_a_wrong_type_that_reaches_us_is_refused():
    values = dataclasses.asdict(compose())
    values["run"]["steps"] = True
    values["mesh"]["shard"] = "two"
    del values["model"]["width"]
    said = (
        r"(?s)run\.steps=True: expected a whole number.*model\.width=\?\?\?: has to be given.*"
        r"mesh\.shard=two: expected a whole number or null, not 'two'"
    )
    with pytest.raises(ConfigError, match=said):
        schema.build(values)


# ------------------------------------------------------------------ ranks


def placed(*overrides: str, gpus: int = 0, world: int | None = None) -> configs.TrainConfig:
    return place(compose(*overrides), accelerators={"cuda": gpus} if gpus else {}, world=world)


@pytest.mark.parametrize(
    ("overrides", "gpus", "world", "wanted"),
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
    ],
)
def test_ranks_are_all_there_are_or_as_many_as_asked(overrides, gpus, world, wanted):
    config = placed(*overrides, gpus=gpus, world=world)
    assert (config.run.device, config.mesh.replicate, config.mesh.shard) == wanted


@pytest.mark.parametrize(
    ("overrides", "gpus", "world", "message"),
    [
        (
            ["mesh.shard=4"],
            2,
            None,
            r"asks for 4 ranks; this machine has 2 cuda devices\. Fix: a smaller mesh",
        ),
        (
            ["mesh.replicate=2", "mesh.shard=1"],
            1,
            None,
            r"asks for 2 ranks; this machine has 1 cuda device\.",
        ),
        (["mesh.replicate=3"], 8, None, r"mesh\.replicate=3 does not divide 8 ranks"),
        (["mesh.replicate=3"], 0, 4, r"mesh\.replicate=3 does not divide 4 ranks"),
        (["mesh.shard=3", "data.rows=9"], 0, 2, r"asks for 3 ranks; 2 were started\. Fix: torchrun --nproc"),
        (["run.device=cuda"], 0, None, r"run\.device=cuda: this machine has cpu\. Fix: run\.device=auto"),
        (
            ["mesh.shard=3"],
            0,
            None,
            r"(?s)data\.rows=8 does.*data\.held_out_rows=128 does.*Fix: data\.rows=9 data\.held_out_rows=129",
        ),
        (
            ["strategy.optimizer_memory=disk", "run.disk_dir=not_there"],
            0,
            None,
            r"run\.disk_dir='not_there' is no directory\. Fix: make it",
        ),
        (["run.accumulate=3"], 0, None, r"(?s)2 ranks times run\.accumulate=3.*Fix: data\.rows=12"),
    ],
)
def test_ranks_that_cannot_be(overrides, gpus, world, message):
    with pytest.raises(ConfigError, match=message):
        placed(*overrides, gpus=gpus, world=world)


# ------------------------------------------------------------------ its memory


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("full_shard", ("precision=bf16",)),
        ("zero2", ("optimizer=sgd", "optimizer.clip=null")),
        ("zero1", ()),
        ("no_shard", ()),
        ("hybrid_shard", ("mesh.replicate=2",)),
    ],
)
def test_what_is_predicted_from_sizes_is_a_part_of_what_the_step_takes(strategy, more):
    """Nothing is refused that could run."""
    asked = placed(f"strategy={strategy}", "mesh.shard=4", "model.layers=1", "model.context=32", *more)
    least = sum(size for _, size in state_bytes(asked).values())
    same = {name: getattr(asked, name) for name in ("model", "mesh", "strategy", "precision", "optimizer")}
    paper = explain(dataclasses.replace(validate(EXPLAIN, []).config, **same))
    assert 0.2 * paper.memory.peak_bytes < least <= paper.memory.peak_bytes


def test_more_than_the_machine_has_is_refused_with_its_bytes():
    here = {"device": 10**9, "host": 10**9}
    told = (
        r"one of 2, takes more memory than it has:\n  70,553,706,496 parameters\n  device: 564 GB or more "
        r"\(optimizer 282 GB, parameters 141 GB, gradients 141 GB\) of 1\.00 GB\nFix: a smaller model"
    )
    with pytest.raises(ConfigError, match=told):
        check_memory(placed("model=70b", gpus=2), 2, here)
    tiers = ("strategy=zero3", "strategy.memory=host", "strategy.optimizer_memory=host")
    with pytest.raises(ConfigError, match=r"device: 141 GB .*\n  host: 423 GB"):
        check_memory(placed("model=70b", *tiers, gpus=2), 2, here)
    check_memory(placed("model=70b", gpus=2), 2, {"device": 10**12, "host": 10**9})
    with pytest.raises(ConfigError, match=r"(?s)one of 1,000,000, .* memory: 0\.13 GB or more \(process"):
        rows = ("data.rows=1000000", "data.held_out_rows=1000000")
        check_memory(placed("mesh.shard=1000000", *rows), 10**6, {"host": 10**4})


# ------------------------------------------------------------------ the model

TINY = DecoderConfig(width=16, layers=2, heads=4, kv_heads=2, context=12)


@pytest.mark.parametrize("tied", [False, True])
def test_model_is_what_its_config_says(tied):
    torch.manual_seed(0)
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


def test_query_heads_share_keys_as_torch_has_it(monkeypatch):
    """Head h reads key head h // share, as with `enable_gqa=True`."""
    torch.manual_seed(0)
    attention, x, inside = Attention(TINY), torch.randn(2, 12, 16), {}
    plain = F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        inside.update(q=q, k=k[:, ::2], v=v[:, ::2], got=plain(q, k, v, **options))
        return inside["got"]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    attention(x)
    wanted = plain(inside["q"], inside["k"], inside["v"], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(inside["got"], wanted)


def test_model_traces_to_its_own_gradients():
    torch.manual_seed(0)
    model = Decoder(TINY).double()
    apply, params = make_functional(model)
    tokens, targets = torch.randint(256, (2, 2, 12)).unbind()

    def loss_fn(params, tokens, targets):
        return next_token_loss(apply(params, tokens), targets)

    traced = make_fx(loss_fn, tracing_mode="fake", pre_dispatch=True)(params, tokens, targets)
    leaves = list(params.values())
    wanted = torch.autograd.grad(loss_fn(params, tokens, targets), leaves)
    got = torch.autograd.grad(traced(params, tokens, targets), leaves)
    for path, a, b in zip(params, wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=path)


def test_a_sample_is_that_of_plain_decoding():
    """The padded fixed window gives what an unpadded one does, also when text outgrows it."""
    torch.manual_seed(0)
    apply, params = make_functional(Decoder(TINY))
    sampler = Sampler(last_logits(apply), TINY.context, torch.device("cpu"))
    with torch.no_grad():
        sampled = sampler(params, "ab", 20, seed=4)
        random, written = torch.Generator().manual_seed(4), list(b"ab")
        for _ in range(20):
            logits = apply(params, torch.tensor([written[-12:]]))[0, -1]
            written.append(int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=random)))
    assert sampled == sampler(params, "ab", 20, seed=4)
    assert sampled == printable(written) and sampled.startswith("ab")
    broken = {path: torch.full_like(leaf, math.nan) for path, leaf in params.items()}
    with torch.no_grad():
        assert len(sampler(broken, "ab", 3, seed=4)) == 5


# ------------------------------------------------------------------ from the command line


@pytest.fixture
def command(tmp_path: Path, warm: Warm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m experiments.train ...` in a folder, `tmp_path` by default."""

    def run(*arguments: str, cwd: Path = tmp_path, before: tuple[str, ...] = ()):
        return warm.run([*before, "experiments.train", *arguments], cwd)

    return run


BAD_INPUT = {
    "mesh.shard=3": "does not divide over 3 ranks.",
    "data.root=nowhere": "nowhere is no folder. Fix: name one as data.root.",
    "run.resume=nowhere": "run.resume=nowhere: no whole checkpoint is there. Fix: the folder of a run",
}


@pytest.mark.parametrize("argument", BAD_INPUT)
def test_bad_input_is_one_error_before_any_rank_starts(argument, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["train", argument])
    monkeypatch.setattr(job, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit, match="2"):
        train.main(train.JOB)
    shown = capfd.readouterr().err
    assert BAD_INPUT[argument] in shown and "Traceback" not in shown


def test_a_short_run_leaves_everything(tmp_path, command):
    done = command(*SMALL, "run.steps=4", "run.held_out_every=2", "strategy=zero2")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert f"results: {folder}" in done.stdout
    assert re.search(r"model \d\.\d+ .*bigram \d\.\d+, trigram \d\.\d+", done.stdout)
    assert re.search(
        r"step 4/4, loss .*, held-out .*, lr .*, grad norm .*, .* tokens/s, left 0:00", done.stderr
    )

    rows = rows_of(folder)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all({"loss", "lr", "grad_norm", "tokens_per_s"} <= set(row) for row in steps)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["mesh"] == {"replicate": 1, "shard": 2} and config["strategy"]["name"] == "zero2"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "schedule.txt").read_text().strip()
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert {p.name for p in (folder / "ranks").iterdir()} == {"rank0.log", "rank1.log"}
    assert "step 4/4" in (folder / "ranks" / "rank0.log").read_text()


AUTO = ("strategy=auto", "model.layers=3", "run.steps=3")
SMALL_GB = 0.00055  # of the 0.8 MB that full_shard takes: something must give


@pytest.mark.long  # `test_fit` runs what is planned
def test_auto_plans_within_its_budget_and_trains(tmp_path, command):
    done = command(*SMALL, *AUTO, f"run.device_gb={SMALL_GB}", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert 0 < plan["peak_bytes"] <= plan["device_bytes"] == round(SMALL_GB * 1e9)
    assert plan["hardware"] == "cpu" and plan["rejected"] and "<- chosen" in done.stdout
    chosen = plan["plan"]
    assert chosen["accumulate"] > 1 or chosen["recomputed"] or chosen["optimizer"] != "device"
    device = re.search(r"^device +([\d.,]+)", (tmp_path / "memory.txt").read_text(), re.MULTILINE)
    assert float(device[1]) == pytest.approx(plan["peak_bytes"] / 1e6, abs=1e-3)  # the job runs that plan
    assert f"a rank's predicted peak: {plan['peak_bytes'] / 1e6:.1f} MB" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path) if "loss" in row] == [1, 2, 3]


def test_a_budget_that_nothing_fits_into_is_one_error(tmp_path, command):
    done = command(*SMALL, *AUTO, "run.device_gb=0.00001", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1
    assert re.search(r"error: run\.device_gb=1e-05: nothing fits into .*", done.stderr)
    assert re.search(r"Fix: a budget of .* would do", done.stderr)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.long  # `test_offload` and `test_remat` hold it for the library
def test_tiers_and_remat_do_not_change_the_losses(tmp_path, command):
    saving = ("strategy=offload", "strategy.optimizer_memory=disk", "strategy.remat=unit")
    runs = {"plain": (), "disk": (*saving, f"run.disk_dir={tmp_path}")}
    losses = {}
    for name, more in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        done = command(*SMALL, "run.steps=3", *more, f"hydra.run.dir={folder}")
        assert done.returncode == 0, done.stderr
        losses[name] = [row.get("loss", row.get("held_out_loss")) for row in rows_of(folder)]
        assert ("on the disk" if name == "disk" else "on its device") in done.stdout
    assert len(losses["plain"]) == 4
    assert losses["disk"] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.long  # `test_numerics` holds it for the library
def test_ranks_and_micro_batches_do_not_change_the_losses(tmp_path, command):
    fields = ("storage", "compute", "reduce", "optimizer")
    float64 = [f"precision.{field}=float64" for field in fields]
    losses = []
    for name, more in (("two", ["mesh.shard=2"]), ("one", ["mesh.shard=1", "run.accumulate=4"])):
        folder = tmp_path / name
        folder.mkdir()
        done = command(*SMALL, *float64, "run.steps=3", *more, cwd=folder)
        assert done.returncode == 0, done.stderr
        (run,) = folder.glob("outputs/*/*")
        losses.append([row.get("loss", row.get("held_out_loss")) for row in rows_of(run)])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-6)  # 8 digits are kept


@pytest.mark.long  # `test_launch` kills ranks
def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    arguments = [*SMALL, "run.steps=100000", "run.max_restarts=0", f"hydra.run.dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert job.poll() is None and time.monotonic() < deadline, "no step was made"
            time.sleep(0.05)
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        second = [p for p in ranks if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes()]
        os.kill(int(second[0]), signal.SIGKILL)
        killed = time.monotonic()
        _, shown = job.communicate(timeout=60)
    assert job.returncode == 1 and time.monotonic() - killed < 30
    assert "rank 1 of 2 was killed by signal 9" in shown


@pytest.mark.long  # `test_own_script` runs under torchrun
def test_under_torchrun_it_starts_nothing_itself(tmp_path, command):
    before = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = command(*SMALL, "run.steps=2", before=before)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert [row["step"] for row in rows_of(folder) if "loss" in row] == [1, 2]
    assert not (folder / "ranks").exists()
    refused = command("mesh.shard=3", before=before)
    assert refused.returncode == 1 and "asks for 3 ranks; 2 were started" in refused.stderr


def test_a_sweep_ends_with_one_table_and_tells_of_failures(tmp_path, command):
    done = command("--multirun", *SMALL, "run.steps=2", "strategy=full_shard,no_shard", "data.rows=8,7")
    assert done.returncode == 1  # seven rows cannot be cut for two ranks
    (sweep,) = tmp_path.glob("multirun/*/*")
    table = (sweep / "table.txt").read_text()
    assert table in done.stdout
    rows = [re.split(r"\s{2,}", line) for line in table.splitlines()][1:]
    assert {row[1]: row[2] for row in rows} == {
        f"strategy={strategy} data.rows={rows}": status
        for strategy in ("full_shard", "no_shard")
        for rows, status in ((8, "ok"), (7, "failed"))
    }
    assert {folder.parent.name for folder in sweep.glob("*/metrics.jsonl")} == {"0", "2"}


def test_a_mistake_is_told_from_a_bug():
    for error in (ConfigError("x"), hydra.errors.HydraException("x")):
        assert is_mistake(error)
    try:
        raise KeyError("ours")
    except KeyError as error:
        assert not is_mistake(error)
