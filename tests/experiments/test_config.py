"""Command lines that are wrong: one error that names the key, its place and the nearest valid one; nothing is
started, nothing made."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from main_job import SMALL
from wrong_configs import CL, is_one_error, recipe_of, split

from experiments import train
from experiments.bench.command import SPEC as BENCH
from experiments.cli import job, provenance, validation
from experiments.cli.command_spec import CONF
from experiments.cli.main import main
from experiments.cli.validation import validate
from experiments.configs.train import HARDWARE, SCHEDULES, STRATEGIES, ConfigError
from experiments.finetune.job import JOB as FINETUNE
from experiments.tokenize.config import SPEC as TOKENIZE
from experiments.train import JOB as TRAIN
from fnshard.analysis.hardware import TABLE
from fnshard.launcher.local import LaunchError
from fnshard.layout.presets import PRESETS
from fnshard.optim.schedules import SCHEDULES as RATES

ROOT = Path(__file__).resolve().parents[2]
RUN_HAS = r"run has steps, accumulate, "

# Arguments of the main job -> what has to be said.
WRONG_TRAIN = {
    # ---- names
    "run.stpes=5": rf"run\.stpes=5{CL}: no such key\. Did you mean run\.steps\? {RUN_HAS}",
    "steps=5": rf"steps=5{CL}: no such key\. Did you mean run\.steps\? The top has model, mesh",
    "lr=0.1": rf"lr=0\.1{CL}: no such key\. Did you mean optimizer\.lr\?",
    "run.LR=0.1": rf"run\.LR=0\.1{CL}: no such key\. Did you mean optimizer\.lr\?",
    "training.steps=5": r"no such key\. Did you mean run\.steps\?",
    "model.hidden=64": rf"model\.hidden=64{CL}: no such key\. .*model has width, layers, heads",
    "model.width.x=64": rf"model\.width=\{{'x': 64\}}{CL}: expected a whole number",
    "optimizer=sgd optimizer.b1=0.1": rf"optimizer\.b1=0\.1{CL}: no such key\. .* has name, lr, momentum",
    "data=stdlib data.held_out_rowz=8": r"Did you mean data\.held_out_rows\?",
    "mesh.pipeline=2": rf"mesh\.pipeline=2{CL}: no such key\. mesh has replicate, .*context_attention\.",
    "mesh={shart: 2}": r"mesh\.shart=2 \(command line\): no such key\. Did you mean mesh\.shard\?",
    "+new.key=1": rf"new\.key=1{CL}: no such key\. The top has model, mesh",
    "++run.stpes=5": r"no such key\. Did you mean run\.steps\?",
    "+run.steps=5": r"An item is already at 'run\.steps'\. Either remove \+ prefix: 'run\.steps=5'",
    "~run.steps": rf"~run\.steps{CL}: every key is needed, nothing can be taken away",
    # ---- groups and choices
    "strategy=zer2": rf"strategy=zer2{CL}: no such choice\. Did you mean strategy=zero2\? strategy has ",
    "stratgy=zero2": rf"stratgy=zero2{CL}: no such key\. Did you mean strategy\?",
    "optimizer=adam": r"no such choice\. Did you mean optimizer=adamw\? optimizer has adamw, sgd\.",
    "model=5": rf"model=5{CL}: no such choice\. .*model has 1b, 25m, 5m, 70b, 7b, 85m, 8b, tiny\.",
    "hardware=b200": r"no such choice\. Did you mean hardware=h[12]00\?",
    "experiment=latop": r"no such choice\. Did you mean experiment=laptop\?",
    "run=null": rf"run=null{CL}: no such choice\. run has default\.",
    "run={steps: 5}": r"expected a choice, one of default; keys of it are set as run\.KEY=VALUE",
    "+strategy=zero2": r"strategy is there already\. Fix: strategy=zero2\.",
    "mesh=3": rf"mesh=3{CL}: expected keys below it",
    "hydra/launcher=slurm_": r"no such choice\. .*hydra/launcher has basic",
    # ---- types
    "run.steps=many": rf"run\.steps=many{CL}: expected a whole number, not 'many'\.",
    "run.steps=99999999999999999999": rf"run\.steps=99999999999999999999{CL}: must be 1000000000 or less",
    "model.layers=1000000000": rf"^error: model\.layers=1000000000{CL}: must be 10000 or less\.$",
    "model.width=10000000000000": rf"{CL}: must be 1048576 or less",
    "model.context=1e13": r"model\.context=10000000000000\.0 \(command line\): must be 16777216 or less",
    "mesh={shard: 10000000000000}": r"mesh\.shard=10000000000000.*: must be 1048576 or less",
    "model.heads=${model.vocab} model.vocab=16777216": r"model\.heads=16777216.*: must be 16384 or less",
    "--multirun run.seed=1,99999999999999999999": r"run\.seed=.*: must be 9223372036854775807 or less",
    "run.timeout_s=1e300": r"run\.timeout_s=10\^300.*: must be 100000000 or less",
    "run.steps=1.5": r"expected a whole number, not 1\.5\.",
    "run.steps=[1,2]": r"expected a whole number, not \[1, 2\]\.",
    "run.async_save=perhaps": r"expected true or false, not 'perhaps'\.",
    "optimizer.lr=fast": r"expected a number or null, not 'fast'\.",
    "run.device_gb=much": r"expected a number or null, not 'much'\.",
    "mesh.shard=all": r"expected a whole number or null, not 'all'\.",
    "run.resume=null": r"expected text, not null\.",
    "model.width=${nope}": r"model\.width=\$\{nope\} \(command line\): Interpolation key 'nope' not found",
    # ---- how it is written
    "run.steps": rf"run\.steps{CL}: expected KEY=VALUE",
    "=5": rf"=5{CL}: expected KEY=VALUE",
    "run.steps=5,10": rf"run\.steps=5,10{CL}: several values are a sweep\. Fix: --multirun",
    "run.seed=range(3)": r"several values are a sweep\. Fix: --multirun",
    "--stpes 5": rf"unrecognized arguments: --stpes{CL}",
    "--multirun strategy=glob(qq*)": rf"strategy=glob\(qq\*\){CL}: matches none of auto, full_shard",
    "--multirun run.steps=interval(1,3)": r"an interval is for a search\. Fix: hydra/sweeper=search_lr",
    "hydra.run.dir=/dev/null/x": rf"hydra\.run\.dir=/dev/null/x{CL}: /dev/null is no folder",
    "hydra.run.dir=''": r"hydra\.run\.dir=.*: names no folder",
    "--multirun strategy=zero1,zer2": r"no such choice\. Did you mean strategy=zero2\?",
    "--multirun run.steps=2,many": r"expected a whole number, not 'many'\.",
    "--multirun run.seed=range(0,10000000000)": rf"seed=range.*{CL}: a sweep of 1e\+10 jobs; 10000 is",
    "--multirun run.seed=shuffle(range(0,99999999999))": rf"{CL}: a sweep of 1e\+11 jobs",
    "--multirun optimizer.lr=range(0,1,1e-30)": rf"{CL}: a sweep of 1e\+30 jobs",
    "--multirun run.seed=range(0,5,0)": rf"range\(0,5,0\){CL}: a sweep of inf jobs",
    "--multirun run.seed=range(0,200) run.steps=range(1,200)": rf"--multirun{CL}: a sweep of 3\.98e\+04 jobs",
    "--multirun hydra.launcher.timeout_min=range(0,10000000000)": rf"{CL}: a sweep of 1e\+10 jobs",
    # ---- values
    "run.steps=0": r"^error: run\.steps=0: must be 1 or more \(command line\)\.$",
    "optimizer.lr=nan": rf"optimizer\.lr=nan{CL}: expected a finite number",
    "optimizer.b1=1": rf"optimizer\.b1=1\.0{CL}: must be 0 or more and below 1",
    "strategy.name=ddp": rf"strategy\.name='ddp'{CL}: must be one of full_shard",
    "precision.compute=int8": r"must be one of float64, float32",
    "strategy.remat=block": r"strategy\.remat='block': one of 'none', 'unit', 'offload'",
    "hardware.price_per_hour=-1": r"hardware\.price_per_hour=-1\.0: must be 0 or more",
    "model.heads=3": (
        r"model\.width=128 and model\.heads=3: the head size, width / heads, must be a whole even number "
        r"\(model\.width: conf/model/tiny\.yaml:2; model\.heads: command line\)\."
    ),
    "run.resume=''": r"run\.resume='': must be auto, never, or a path",
    "optimizer.lr=null": r"optimizer\.lr=null: only fine-tuning has defaults",
    "optimizer.lr=0": r"optimizer\.lr=0\.0: must be above 0",
    "model.kv_heads=3": r"kv_heads must divide heads",
    "strategy.remat=1.5": r"strategy\.remat=1\.5: one of 'none', .* a fraction from 0 to 1",
    "strategy.remat={layers.*:half}": r"strategy\.remat=\{'layers\.\*': 'half'\}: one of",
    "strategy.memory=nvme": r"strategy\.memory='nvme': must be one of device, host, disk",
    "strategy.optimizer_memory=ram": r"strategy\.optimizer_memory='ram': must be one of device, host",
    "strategy.update_on=disk": r"strategy\.update_on='disk': must be one of device, host",
    "run.replica_every=0": r"run\.replica_every=0: must be 1 or more",
    "run.replica_every=5": r"run\.replica_every=5: nothing is copied.*Fix: run\.replicas=1",
    "run.replicas=2": r"run\.replicas=2: 1 node can hold 1 .*Fix: run\.replicas=1, or more nodes",
    "strategy=auto run.device_gb=0": r"run\.device_gb=0\.0: must be above 0",
    "strategy=auto run.device_gb=1 hardware.name=tpu": r"hardware\.name='tpu': must be one of auto",
    "run.prompt=''": r"run\.prompt='': a sample needs at least one byte",
    "run.save_every=-1": r"run\.save_every=-1: must be 0 or more",
    "run.keep=0": r"run\.keep=0: must be 1 or more",
    "run.keep_every=0": r"run\.keep_every=0: must be 1 or more",
    "run.keep_best=-1": r"run\.keep_best=-1: must be 0 or more",
    "run.max_restarts=-1": r"run\.max_restarts=-1: must be 0 or more",
    "run.stop_grace_s=0": r"run\.stop_grace_s=0\.0: must be above 0",
    # ---- what does not go together
    "strategy=auto": r"strategy=auto: needs a budget \(command line\)\. Fix: run\.device_gb=24",
    "run.device_gb=24": rf"run\.device_gb=24{CL}: a budget is for strategy=auto",
    "strategy=auto run.device_gb=1 run.accumulate=2": r"strategy=auto chooses the micro-batches",
    "strategy=auto run.device_gb=1 strategy.remat=unit strategy.memory=host": (
        r"strategy=auto.* chooses remat and memory by itself"
    ),
    "strategy.memory=disk": r"run\.disk_dir=None: what rests on disk needs a directory",
    "run.disk_dir=there": r"run\.disk_dir='there': nothing rests on disk",
    "strategy.update_on=host": r"needs strategy\.optimizer_memory=host or disk \(command line\)\.",
    "schedule.decay=0.1": r"schedule: warmup_cosine does nothing with decay",
    "schedule=wsd schedule.warmup=0.9": r"warmup \+ decay is more than the whole run",
    "optimizer=sgd optimizer.momentum=0": r"optimizer\.nesterov=true.*: needs optimizer\.momentum above 0",
    "model.vocab=100": r"model\.vocab=100: must be 256 or more",
    "data=shards": r"data=shards: needs the folder that experiments\.tokenize wrote \(command line\)\. Fix",
    # ---- the machine
    "mesh.shard=3 run.device=cpu": r"data\.rows=8 does not divide over 3 ranks",
    "model.width=1048576 model.layers=10000 run.device=cpu": (
        r"^error: a rank, one of 2, takes more memory than it has:\n  120,946,.* parameters\n"
        r"  memory: 967,575,77\d GB or more \(optimizer .*\) of .* GB\nFix: a smaller model"
    ),
    "mesh.shard=1048576 data.rows=1048576 data.held_out_rows=1048576 run.device=cpu": r"or more \(process",
    "data.rows=1048576 model.context=16777216 run.device=cpu": r"memory: 140,738 GB or more \(batch",
    "mesh.tensor=8": r"to divide model\.heads=4 and model\.kv_heads=2.*\. Fix: mesh\.tensor=2\.",
    "mesh.tensor=0": rf"mesh\.tensor=0{CL}: must be 1 or more",
    "mesh.shard=0": rf"mesh\.shard=0{CL}: must be 1 or more",
    "run.accumulate=3 run.device=cpu": r"2 ranks times run\.accumulate=3 \(command line\)\.",
    "run.cache=/dev/shm": r"run\.cache=/dev/shm: others than this user may write to the folder",
    "run.device=tpu": rf"run\.device=tpu{CL}: this machine has cpu",
    "data.rows=7 run.device=cpu": rf"data\.rows=7{CL} does not divide over 2 ranks",
}
WRONG_FINETUNE = {
    "run.stpes=5": rf"run\.stpes=5{CL}: no such key\. Did you mean run\.steps\?",
    "method=qlora": r"no such choice\. Did you mean method=qlora[48]\? method has full, lora, ",
    "objective=ppo": r"no such choice\. Did you mean objective=dpo\? objective has dpo, sft\.",
    "method.rnak=4": r"no such key\. Did you mean method\.rank\?",
    "method.rank=1000000000": rf"method\.rank=1000000000{CL}: must be 16384 or less",
    "method.rank=0": rf"method\.rank=0{CL}: must be 1 or more",
    "method.alpha=big": r"expected a number, not 'big'",
    "method.name=dora": r"method\.name='dora'.*: must be one of full, lora",
    "objective.beta=0": r"objective\.beta=0\.0.*: must be above 0",
    "optimizer=sgd": r"optimizer\.lr=null.*: the defaults are AdamW's",
    "run.device_gb=24": r"run\.device_gb=24.*: a budget is for strategy=auto",
    "model={width: 64}": rf"model=\{{'width': 64\}}{CL}: expected text, not ",
    "model.width=64": r"expected text, not ",
    "data=shards": rf"data=shards{CL}: (is no group of this command; it has .*method|expected keys below it)",
    "data.rows=0": rf"data\.rows=0{CL}: must be 1 or more",
    "data.pack=maybe": r"expected true or false, not 'maybe'",
    "data.too_long=cut": r"must be one of refuse, skip, truncate",
    "data.held_out=x.jsonl": r"data\.held_out: without data\.train there is nothing",
    "objective=dpo data.pack=false": r"data\.pack=false.*: pairs are never packed",
    "method=full export=adapters": rf"export=adapters{CL}: method=full has no adapters .*\. Fix: export=",
    "export=onnx": rf"export='onnx'{CL}: must be one of auto, adapters",
    "objective.label_smoothing=0.5": r"objective\.label_smoothing=0\.5: must be below 0\.5",
    "experiment=qlora": r"no such choice\. Did you mean experiment=qlora4\?",
    "mesh.context=5": r"mesh\.context=5: has to divide data\.context=256 and 32.*Fix: mesh\.context=1\.",
    "mesh.shard=3 run.device=cpu": r"data\.held_out_rows=32 does not divide over 3 ranks",
    "+run._target_=os.system": r"run\._target_=os\.system \(command line\): no such key\.",
}
WRONG = [(TRAIN, *each) for each in WRONG_TRAIN.items()] + [
    (FINETUNE, *each) for each in WRONG_FINETUNE.items()
]
# Mistakes that one command line shows at once; each by itself is long.
TOGETHER = [
    (TRAIN, "run.stpes=5", "steps=5", "lr=0.1", "run.LR=0.1", "training.steps=5", "model.hidden=64",
     "model.width.x=64", "optimizer=sgd optimizer.b1=0.1"),
    (TRAIN, "data=stdlib data.held_out_rowz=8", "mesh.pipeline=2", "mesh={shart: 2}", "+new.key=1",
     "++run.stpes=5", "~run.steps", "strategy=zer2", "stratgy=zero2"),
    (TRAIN, "+run.steps=5", "optimizer=adam", "model=5", "hardware=b200", "experiment=latop", "run=null",
     "run={steps: 5}", "+strategy=zero2"),
    (TRAIN, "mesh=3", "hydra/launcher=slurm_", "run.steps=many", "run.async_save=perhaps",
     "optimizer.lr=fast", "run.device_gb=much", "run.resume=null", "run.steps"),
    (TRAIN, "run.steps=99999999999999999999", "model.width=10000000000000", "model.context=1e13",
     "mesh={shard: 10000000000000}", "model.heads=${model.vocab} model.vocab=16777216", "=5",
     "run.steps=5,10", "run.seed=range(3)"),
    (TRAIN, "run.steps=1.5", "mesh.shard=all", "optimizer.lr=nan", "strategy.name=ddp",
     "precision.compute=int8", "hardware.price_per_hour=-1", "model.heads=3", "schedule.decay=0.1"),
    (TRAIN, "run.steps=[1,2]", "optimizer.b1=1", "strategy.remat=block", "model.kv_heads=3",
     "strategy=auto run.device_gb=1 hardware.name=tpu", "schedule=wsd schedule.warmup=0.9", "data=shards",
     "mesh.tensor=0"),
    (FINETUNE, "run.stpes=5", "method=qlora", "objective=ppo", "method.rnak=4", "method.alpha=big",
     "model={width: 64}", "model.width=64", "data=shards"),
    (FINETUNE, "method.rank=0", "objective.beta=0", "data.rows=0", "+run._target_=os.system"),
    (FINETUNE, "optimizer=sgd", "run.device_gb=24", "objective=dpo data.pack=false",
     "method=full export=adapters", "mesh.context=5"),
]  # fmt: skip
SHOWN_TOGETHER = {(job_of.name, line) for job_of, *lines in TOGETHER for line in lines}


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: f"{case[0].name}: {case[1]}")
def test_wrong_command_lines_are_one_error_of_several_lines(error_of, case):
    job_of, *lines = case
    shown = error_of(job_of, *(word for line in lines for word in split(line)))
    is_one_error(shown, r"^error: the configuration has \d+ problems:$")
    messages = {(job_of.name, line): message for job_of, line, message in WRONG}
    for line in lines:
        assert re.search(messages[job_of.name, line], shown, re.M), line


def single(job_of, line, message):
    marks = [pytest.mark.long] if (job_of.name, line) in SHOWN_TOGETHER else []
    return pytest.param(job_of, line, message, marks=marks, id=f"{job_of.name}: {line}")


@pytest.mark.parametrize(("job_of", "line", "message"), [single(*each) for each in WRONG])
def test_a_wrong_command_line_is_one_error(error_of, job_of, line, message):
    shown = error_of(job_of, *split(line))
    is_one_error(shown, message)
    nowhere = r"already at|of the whole run|does nothing|rests on disk|divide over|more memory|is more than"
    assert re.search(r"command line|\.yaml:\d+", shown) or re.search(nowhere, shown)


def test_all_problems_come_at_once(error_of):
    shown = error_of(
        TRAIN, "+mesh.z=1", "run.stpes=5", "strategy=zer2", "run.seed=-1", "model.heads=5", "lr=1"
    )
    assert shown.startswith("error: the configuration has 5 problems:\n") and len(shown.splitlines()) == 6
    for part in ("mesh.z", "run.stpes=5", "strategy=zer2", "model.width=128 and model.heads=5", "lr=1"):
        assert part in shown
    assert "run.seed" not in shown  # of a group that another argument is missing from


def test_one_mistake_brings_no_others(error_of):
    """What a left-out argument would have made right is not reported."""
    assert len(error_of(TRAIN, "strategy=auto", "run.device_gb=lots").splitlines()) == 1
    assert len(error_of(TRAIN, "strategy=auot", "run.device_gb=24").splitlines()) == 1


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: 5\n  stpes: 6\n", r"run\.stpes=6 \(.*experiment/mine\.yaml:4\): no such key\."),
        ("run:\n  steps: many\n", r"run\.steps=many \(.*mine\.yaml:3\): expected a whole number, not 'many'"),
        ("model:\n  width: 0\n", r"model\.width=0: must be at least 1 \(.*mine\.yaml:3\)"),
        ("strategy:\n  _target_: os.system\n", r"strategy\._target_=os\.system \(.*:3\): no such key"),
        ("defaults:\n  - override /strategy: zer2\n", r"Could not find 'strategy/zer2'"),
        ("run: [1\n", r"mine\.yaml"),
        ("just words", r"mine\.yaml: expected lines of `key: value`"),
        ("run: &r\n  steps: *r\n", r"mine\.yaml:3: aliases are not read\. Fix: write out what \*r means\."),
        ("a: &a [" + "1," * 99 + "]\nb: &b [" + "*a," * 99 + "]\nc: [" + "*b," * 99 + "]\n",
         r"mine\.yaml:3: aliases are not read"),
        ("a: &a {" + ",".join(f"k{i}: 1" for i in range(99)) + "}\nb:\n" +
         "".join(f"  - <<: [*a, *a]\n    k: {i}\n" for i in range(99)), r":4: aliases are not read"),
        ("run:\n  steps: " + "[" * 100, r"mine\.yaml:3: more than 32 levels of values"),
        ("# " + "x" * 2**20, r"mine\.yaml: has 10485\d\d bytes, the most is 65536\."),
        ("hydra:\n  sweeper:\n    params:\n      run.seed: range(0,10000000000)\n",
         r"hydra\.sweeper\.params \(.*mine\.yaml:5\): a sweep of 1e\+10 jobs"),
        ("defaults: [mine, _self_]\n", r"cannot be read: RecursionError"),
        ("run: 5\n", r"run=5 \(.*mine\.yaml:2\): expected keys .*\. A choice belongs to the defaults"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path_factory, error_of, text, message):
    folder = recipe_of(tmp_path_factory.mktemp("own"), text)
    more = ["--multirun"] if "sweeper" in text else []
    is_one_error(error_of(TRAIN, "--config-dir", folder, "experiment=mine", *more), message)


def test_an_own_recipe_is_taken_and_its_values_know_their_lines(tmp_path):
    folder = recipe_of(tmp_path, "run:\n  steps: 7\n  seed: 1\n")
    found = validate(TRAIN.spec, ["--config-dir", folder, "experiment=mine", "run.seed=2"])
    assert (found.config.run.steps, found.config.run.seed) == (7, 2)
    assert found.sources["run.steps"].endswith("experiment/mine.yaml:3")
    assert found.sources["run.seed"] == "command line"
    assert found.sources["strategy.name"].startswith("conf/shared/strategy/full_shard.yaml:")
    assert provenance.source_of("run.keep", found.sources) == "default"


def test_right_command_lines_are_taken():
    """Whatever looks odd, and is not."""
    for line in (
        "run.steps='5' run.async_save=yes optimizer.lr=1 run.prompt=5 strategy.remat=0.5 hydra.verbose=true",
        "strategy.remat={layers.*:unit} mesh={shard: 2} ++run.steps=5 run.seed=${run.steps}",
        "hydra.run.dir=there run.steps=2 run.steps=3",
    ):
        assert validate(TRAIN.spec, split(line)).config is not None, line
    assert validate(TRAIN.spec, ["--multirun", "run.seed=range(3)", "strategy=zero1,zero2"]).config is None
    assert validate(TRAIN.spec, ["--cfg", "job", "run.steps=0"]).config is None  # it is to be looked at


# ------------------------------------------------------------------ processes, and errors that come later


def test_from_a_shell_a_mistake_is_one_line_and_does_not_wait_for_torch(tmp_path):
    program = (
        "import sys, runpy; sys.argv = ['x', 'run.stpes=5']\n"
        "try: runpy.run_module('experiments.train', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    message = "error: run.stpes=5 (command line): no such key. Did you mean run.steps?"
    assert done.stdout == "2 False\n" and done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("data.root=nowhere", 2, r"^error: .*nowhere is no folder\. Fix: name one as data\.root\.$"),
        ("run.steps=1", 1, r"^error: rank 1 died\Z"),
    ],
)
def test_an_error_of_the_preparation_or_of_a_rank(monkeypatch, tmp_path, capfd, argument, code, message):
    def launch(*_, **__):
        raise LaunchError("rank 1 died")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, argument])
    monkeypatch.setattr(job, "launch", launch)
    with pytest.raises(SystemExit, match=f"^{code}$"):
        main(TRAIN)
    shown = capfd.readouterr().err.strip()
    assert re.search(message, shown, re.M) and "Error executing" not in shown and "Traceback" not in shown


# ------------------------------------------------------------------ groups


def test_hardware_has_a_file_for_each_name():
    assert {path.stem for path in (CONF / "shared" / "hardware").glob("*.yaml")} == set(HARDWARE)
    assert set(HARDWARE) == {*TABLE, "auto", "measure"}  # read from the source, without torch
    assert (*PRESETS, "auto") == STRATEGIES and tuple(RATES) == SCHEDULES
    for name in HARDWARE:
        hardware = validate(TRAIN.spec, [f"hardware={name}", "hardware.price_per_hour=2.5"]).config.hardware
        assert (hardware.name, hardware.price_per_hour) == (name, 2.5)


def test_jobs_share_groups():
    assert not any(path.is_symlink() for path in CONF.rglob("*"))
    for form in (TRAIN.spec, FINETUNE.spec):
        form.register()
        with validation.loader_of(form) as loader:
            groups = validation.groups_of(form, loader)
        shared = {path.name for path in (CONF / "shared").iterdir()} - {"hydra"}
        assert shared <= set(groups) and groups["hydra/sweeper"] == ["basic", "optuna", "search_lr"]
    assert validate(FINETUNE.spec, ["hardware=h100"]).config.hardware.name == "h100"


def test_a_bug_has_its_traceback(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu"])
    monkeypatch.setattr(job, "start", broken)
    with pytest.raises(KeyError, match="ours"):
        train.main(TRAIN)


@pytest.mark.parametrize("spec", [BENCH, TOKENIZE], ids=lambda spec: spec.name)
def test_numbers_of_any_command_may_be_quoted_and_are_checked(spec, tmp_path):
    key = {"tokenize": "processes"}.get(spec.name, "rounds")
    more = ["out=there"] if spec is TOKENIZE else []
    for quoted in (f"{key}='3'", f'{key}="3"'):  # as `run.steps='5'` of the main job
        assert getattr(validate(spec, [quoted, *more]).config, key) == 3
    wrong_values = {"'-3'": "must be [01] or more", "'many'": "expected a whole number", "''": "whole"}
    for quoted, wrong in wrong_values.items():
        with pytest.raises(ConfigError, match=rf"^{key}=.*: .*{wrong}"):
            validate(spec, [f"{key}={quoted}", *more])


def test_a_group_of_other_commands_is_no_key_of_one_without_groups():
    message = r"^precision=fp32 \(command line\): no such key\. Did you mean dtype\? The top has case"
    with pytest.raises(ConfigError, match=message):
        validate(BENCH, ["precision=fp32"])


def test_configurations_are_built_by_keyword_alone():
    """A field that comes to stand before others must not change what a value of theirs means."""
    files = [*(ROOT / "experiments").rglob("config.py"), *(ROOT / "experiments" / "configs").glob("*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    members = [vars(importlib.import_module(module)).values() for module in modules]
    kinds = {kind for each in members for kind in each if isinstance(kind, type) and is_dataclass(kind)}
    assert {"TrainConfig", "FinetuneConfig", "BenchConfig"} <= {kind.__name__ for kind in kinds}
    named = [f"{kind.__name__}.{f.name}" for kind in kinds for f in fields(kind) if not f.kw_only]
    assert [name for name in named if "Config." in name] == []
