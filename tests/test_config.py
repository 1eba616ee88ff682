"""Command lines that are wrong: one error that names the key, its place and the nearest valid one; nothing is
started, nothing made."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import asked, checks, job, nearest, schema, sources, targets, train, typed
from experiments import help as helping
from experiments.asked import ask
from experiments.command import main
from experiments.config import HARDWARE, ConfigError
from experiments.finetune.job import JOB as FINETUNE
from experiments.form import CONF, Job
from experiments.train import JOB as TRAIN
from fnshard.hardware import TABLE

ROOT = Path(__file__).resolve().parents[1]
CL = r" \(command line\)"
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
    "model.width.x=64": rf"model\.width\.x=64{CL}: no such key\.",
    "optimizer.b3=0.1": r"no such key\. Did you mean optimizer\.b[12]\? optimizer has name, lr, b1",
    "optimizer=sgd optimizer.b1=0.1": rf"optimizer\.b1=0\.1{CL}: no such key\. .* has name, lr, momentum",
    "data=stdlib data.held_out_rowz=8": r"Did you mean data\.held_out_rows\?",
    "mesh.tensor=2": rf"mesh\.tensor=2{CL}: no such key\. mesh has replicate, shard\.",
    "mesh={shart: 2}": r"mesh\.shart: no such key\. Did you mean mesh\.shard\?",
    "+new.key=1": rf"\+new\.key=1{CL}: no such key\. The top has model, mesh",
    "++run.stpes=5": r"no such key\. Did you mean run\.steps\?",
    "+mesh.z=1": rf"\+mesh\.z=1{CL}: no such key\. mesh has replicate, shard\.",
    "+run.steps=5": rf"\+run\.steps=5{CL}: is there already\. Fix: run\.steps=5\.",
    "~run.steps": rf"~run\.steps{CL}: every key is needed, nothing can be taken away",
    "~strategy": rf"~strategy{CL}: every key is needed",
    # ---- groups and choices
    "strategy=zer2": rf"strategy=zer2{CL}: no such choice\. Did you mean strategy=zero2\? strategy has ",
    "strategy=ddp": rf"strategy=ddp{CL}: no such choice\. strategy has auto, full_shard",
    "stratgy=zero2": rf"stratgy=zero2{CL}: no such key\. Did you mean strategy\?",
    "optimizer=adam": r"no such choice\. Did you mean optimizer=adamw\? optimizer has adamw, sgd\.",
    "model=5": rf"model=5{CL}: no such choice\. .*model has 1b, 25m, 5m, 70b, 7b, 85m, tiny\.",
    "hardware=b200": r"no such choice\. Did you mean hardware=h[12]00\?",
    "experiment=latop": r"no such choice\. Did you mean experiment=laptop\?",
    "run=null": rf"run=null{CL}: no such choice\. run has default\.",
    "run={steps: 5}": r"a choice is wanted, one of default; for keys of it: run\.steps=\.\.\.",
    "+strategy=zero2": r"strategy is there already\. Fix: strategy=zero2\.",
    "mesh=3": rf"mesh=3{CL}: mesh has keys below it, as in mesh\.replicate=",
    "hydra/launcher=slurm_": r"no such choice\. .*hydra/launcher has basic",
    # ---- types
    "run.steps=many": rf"run\.steps=many{CL}: expected a whole number, not 'many'\.",
    "run.steps=99999999999999999999": r"must be below 2\*\*63",
    "run.steps=1.5": r"expected a whole number, not 1\.5\.",
    "run.steps=null": r"expected a whole number, not null\.",
    "run.steps=[1,2]": r"expected a whole number, not \[1, 2\]\.",
    "run.async_save=perhaps": r"expected true or false, not 'perhaps'\.",
    "optimizer.lr=fast": r"expected a number, not 'fast'\.",
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
    # ---- values
    "run.steps=0": rf"^error: run\.steps=0{CL}: must be 1 or more\.$",
    "optimizer.lr=nan": rf"optimizer\.lr=nan{CL}: expected a finite number",
    "optimizer.b1=1": rf"optimizer\.b1=1\.0{CL}: must be 0 or more and below 1",
    "strategy.name=ddp": rf"strategy\.name='ddp'{CL}: must be one of full_shard",
    "precision.compute=int8": r"must be one of float64, float32",
    "strategy.remat=block": r"strategy\.remat='block' \(command line\): one of 'none', 'unit', 'offload'",
    "hardware.price_per_hour=-1": r"hardware\.price_per_hour=-1\.0 \(command line\): must be 0 or more",
    "model.heads=3": (
        r"model\.width=128 \(conf/model/tiny\.yaml:2\) and model\.heads=3 \(command line\): the head size"
    ),
    "run.resume=''": r"run\.resume='' \(command line\): must be auto, never, or a path",
    # ---- what does not go together
    "strategy=auto": rf"strategy=auto{CL}: needs a budget\. Fix: run\.device_gb=24",
    "run.device_gb=24": rf"run\.device_gb=24{CL}: a budget is for strategy=auto",
    "strategy=auto run.device_gb=1 run.accumulate=2": r"strategy=auto chooses the micro-batches",
    "strategy=auto run.device_gb=1 strategy.remat=unit": r"strategy=auto.* chooses remat by itself",
    "strategy.memory=disk": r"run\.disk_dir=None .*: what rests on disk needs a directory",
    "run.disk_dir=there": r"run\.disk_dir='there' .*: nothing rests on disk",
    "strategy.update_on=host": r"needs strategy\.optimizer_memory=host or disk\.",
    "schedule.decay=0.1": r"schedule: warmup_cosine does nothing with decay",
    "schedule=wsd schedule.warmup=0.9": r"warmup \+ decay is more than the whole run",
    "optimizer=sgd optimizer.momentum=0": r"optimizer\.nesterov=true.*: needs optimizer\.momentum above 0",
    "model.vocab=100": r"model\.vocab=100 .*: must be 256 or more",
    "data=shards": r"data=shards .*: needs the folder that experiments\.tokenize wrote\. Fix: data\.root=",
    # ---- the machine
    "mesh.shard=3 run.device=cpu": r"data\.rows=8 \(conf/data/stdlib\.yaml:7\) does not divide over 3 ranks",
    "mesh.shard=0": rf"mesh\.shard=0{CL}: must be 1 or more",
    "run.accumulate=3 run.device=cpu": r"2 ranks times run\.accumulate=3 \(command line\)\.",
    "run.device=tpu": rf"run\.device=tpu{CL}: this machine has cpu",
    "data.rows=7 run.device=cpu": rf"data\.rows=7{CL} does not divide over 2 ranks",
}
WRONG_FINETUNE = {
    "run.stpes=5": rf"run\.stpes=5{CL}: no such key\. Did you mean run\.steps\?",
    "method=qlora": r"no such choice\. Did you mean method=qlora[48]\? method has auto, full, lora, ",
    "objective=ppo": r"no such choice\. Did you mean objective=dpo\? objective has dpo, sft\.",
    "method.rnak=4": r"no such key\. Did you mean method\.rank\?",
    "method.rank=0": rf"method\.rank=0{CL}: must be 1 or more",
    "method.alpha=big": r"expected a number, not 'big'",
    "model={width: 64}": rf"model=\{{width: 64\}}{CL}: expected text, not ",
    "model.width=64": r"no such key\.",
    "data=shards": r"data=shards.*: data has keys below it, as in data\.train=",
    "data.rows=0": rf"data\.rows=0{CL}: must be 1 or more",
    "data.pack=maybe": r"expected true or false, not 'maybe'",
    "data.too_long=cut": r"must be one of refuse, skip, truncate",
    "data.held_out=x.jsonl": r"data\.held_out: without data\.train there is nothing",
    "objective=dpo data.pack=false": r"data\.pack=false.*: pairs are never packed",
    "method=full export=adapters": rf"export=adapters{CL}: method=full has no adapters\. Fix: export=merged",
    "export=onnx": rf"export='onnx'{CL}: must be one of auto, adapters",
    "method=auto": r"method=auto .*: needs a budget\. Fix: run\.device_gb=24",
    "objective.label_smoothing=0.5": r"objective\.label_smoothing=0\.5 .*: must be below 0\.5",
    "experiment=qlora": r"no such choice\. Did you mean experiment=qlora4\?",
    "mesh.shard=3 run.device=cpu": r"data\.held_out_rows=32 does not divide over 3 ranks",
    "+run._target_=os.system": r"\+run\._target_=os\.system \(command line\): no such key\.",
}
WRONG = [(TRAIN, *each) for each in WRONG_TRAIN.items()] + [
    (FINETUNE, *each) for each in WRONG_FINETUNE.items()
]


def split(line: str) -> list[str]:
    """As a shell does, where braces, brackets and calls were quoted."""
    return re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^\s{\[])+", line)


@pytest.fixture(autouse=True, scope="module")
def groups_looked_up_once() -> Iterator[None]:
    """They stand in files that do not change here, but for folders of our own."""
    known, look_up = {}, asked.groups_of

    def groups_of(form, loader):
        key = (form.name, str(loader.get_search_path().get_path()))
        if key not in known:
            known[key] = look_up(form, loader)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked, "groups_of", groups_of)
        yield


@pytest.fixture
def told(tmp_path, monkeypatch, capfd):
    """What a wrong command line prints; nothing may be left behind, or started."""

    def run(of: Job, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", [of.name, *arguments])
        monkeypatch.setattr(job, "launch", lambda *_, **__: pytest.fail("ranks were started"))
        with pytest.raises(SystemExit, match=r"^2$"):
            main(of)
        shown = capfd.readouterr()
        assert shown.out == "" and list(tmp_path.iterdir()) == []
        return shown.err

    return run


@pytest.mark.parametrize(("of", "line", "said"), WRONG, ids=[f"{j.name}: {line}" for j, line, _ in WRONG])
def test_a_wrong_command_line_is_one_error(told, of, line, said):
    shown = told(of, *split(line))
    assert re.search(said, shown, re.M), shown
    assert shown.startswith("error: ") and shown.count("error: ") == 1
    assert "Traceback" not in shown and "Error executing" not in shown and "HYDRA" not in shown


def test_there_are_enough_of_them():
    assert len(WRONG) >= 60


def test_all_problems_come_at_once(told):
    shown = told(TRAIN, "+mesh.z=1", "run.stpes=5", "strategy=zer2", "run.seed=-1", "model.heads=5", "lr=1")
    assert shown.startswith("error: the configuration has 5 problems:\n") and len(shown.splitlines()) == 6
    for said in (
        r"mesh\.z",
        r"run\.stpes=5",
        r"strategy=zer2",
        r"model\.width=128 .* and model\.heads=5",
        r"lr=1",
    ):
        assert re.search(said, shown)
    assert "run.seed" not in shown  # of a group that another argument is missing from


def test_one_mistake_brings_no_others(told):
    """What a left-out argument would have made right is not told of."""
    assert len(told(TRAIN, "strategy=auto", "run.device_gb=lots").splitlines()) == 1
    assert len(told(TRAIN, "strategy=auot", "run.device_gb=24").splitlines()) == 1


# ------------------------------------------------------------------ files


def file_of(folder: Path, text: str) -> str:
    """An own recipe; the argument that takes it from there."""
    path = folder / "more" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{text}")
    return str(path.parent.parent)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:\n  steps: 5\n  stpes: 6\n", r"run\.stpes=6 \(.*experiment/mine\.yaml:4\): no such key\."),
        ("run:\n  steps: many\n", r"run\.steps=many \(.*mine\.yaml:3\): expected a whole number, not 'many'"),
        ("model:\n  width: 0\n", r"model\.width=0 \(.*mine\.yaml:3\): must be at least 1"),
        ("strategy:\n  _target_: os.system\n", r"strategy\._target_=os\.system \(.*:3\): no such key"),
        ("defaults:\n  - override /strategy: zer2\n", r"Could not find 'strategy/zer2'"),
        ("run: [1\n", r"mine\.yaml"),
        ("just words", r"mine\.yaml: expected lines of `key: value`, not "),
        ("run: &r\n  steps: *r\n", r"cannot be read: RecursionError"),
        ("defaults: [mine, _self_]\n", r"cannot be read: RecursionError"),
        ("run: 5\n", r"run=5 \(.*mine\.yaml:2\): has keys below it; a choice belongs to the defaults"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path_factory, told, text, said):
    folder = file_of(tmp_path_factory.mktemp("own"), text)
    shown = told(TRAIN, "--config-dir", folder, "experiment=mine")
    assert re.search(said, shown), shown
    assert shown.count("error: ") == 1 and "Traceback" not in shown


def test_an_own_recipe_is_taken_and_its_values_know_their_lines(tmp_path):
    folder = file_of(tmp_path, "run:\n  steps: 7\n  seed: 1\n")
    found = ask(TRAIN.form, ["--config-dir", folder, "experiment=mine", "run.seed=2"])
    assert (found.config.run.steps, found.config.run.seed) == (7, 2)
    assert found.sources["run.steps"].endswith("experiment/mine.yaml:3")
    assert found.sources["run.seed"] == "command line"
    assert found.sources["run.keep"].startswith("conf/run/default.yaml:")


def test_right_command_lines_are_taken():
    """Whatever looks odd, and is not."""
    for line in (
        "run.steps='5'", "run.async_save=yes", "optimizer.lr=1", "run.prompt=5", "strategy.remat=0.5",
        "strategy.remat={layers.*:unit}", "mesh={shard: 2}", "++run.steps=5", 
        "run.seed=${run.steps}", "hydra.run.dir=there", "run.steps=2 run.steps=3", "hydra.verbose=true",
    ):  # fmt: skip
        assert ask(TRAIN.form, split(line)).config is not None, line
    assert ask(TRAIN.form, ["--multirun", "run.seed=range(3)", "strategy=zero1,zero2"]).config is None
    assert ask(TRAIN.form, ["--cfg", "job", "run.steps=0"]).config is None  # it is to be looked at


# ------------------------------------------------------------------ what Hydra would call


X = "+hydra.callbacks.x._target_="
HANDLER = "+hydra.job_logging.handlers.h"
CANARIES = [
    (
        (f"{X}os.mkdir", "+hydra.callbacks.x.path=canary"),
        r"callbacks\.x\._target_ \(command line\): 'os\.mkdir' is not",
    ),
    (
        ("hydra.callbacks.table._target_=os.mkdir", "+hydra.callbacks.table.path=canary"),
        r"callbacks\.table\._target_ \(",
    ),
    (("hydra.sweeper._target_=os.mkdir", "--multirun"), r"hydra\.sweeper\._target_ \(command line\): "),
    (("hydra.launcher._target_=os.mkdir", "--multirun"), r"hydra\.launcher\._target_ \(command line\): "),
    (
        (HANDLER + ".class=os.mkdir", HANDLER + ".path=canary"),
        r"hydra\.job_logging\.handlers\.h\.class \(command",
    ),
    (
        (HANDLER + ".class=logging.StreamHandler", HANDLER + ".stream=ext://os.mkdir"),
        r"job_logging\.handlers\.h\.stream",
    ),
    (
        ("+hydra.callbacks.x='${oc.create:{_target_: os.mkdir, path: canary}}'",),
        r"hydra\.callbacks\.x \(command line\): ",
    ),
    (
        (X + "'${oc.env:HOME}'",),
        r"hydra\.callbacks\.x\._target_ \(command line\): '\$\{oc\.env:HOME\}' is not",
    ),
    (
        ("hydra/sweeper=optuna", "hydra.sweeper.custom_search_space=os.mkdir", "--multirun"),
        r"sweeper\.custom_search_space",
    ),
    (
        ("+strategy._target_=os.mkdir", "+strategy.path=canary"),
        r"strategy\._target_=os\.mkdir \(command line\): no such key",
    ),
    (("strategy.remat={_target_: os.mkdir, path: canary}",), r"strategy\.remat="),
    (("--experimental-rerun", "canary.pickle"), r"--experimental-rerun"),
]


@pytest.mark.parametrize(("arguments", "said"), CANARIES, ids=[" ".join(each) for each, _ in CANARIES])
def test_nothing_is_called_by_name(told, arguments, said):
    """`told` would find a canary."""
    if "hydra/sweeper=optuna" in arguments:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    shown = told(TRAIN, *arguments)
    assert re.search(said, shown), shown
    assert shown.count("error: ") == 1 and "Traceback" not in shown


def test_nothing_is_called_by_name_from_a_file(told, tmp_path_factory):
    text = "hydra:\n  callbacks:\n    x:\n      _target_: os.mkdir\n      path: canary\n"
    folder = file_of(tmp_path_factory.mktemp("own"), text)
    for flags in ((), ("--multirun",), ("--cfg", "job")):
        shown = told(TRAIN, "--config-dir", folder, "experiment=mine", *flags)
        assert re.search(r"hydra\.callbacks\.x\._target_ \(.*mine\.yaml:5\): 'os\.mkdir' is not made", shown)
    shown = told(TRAIN, "--config-dir", folder, "--multirun", "experiment=laptop,mine")
    assert "hydra.callbacks.x._target_" in shown


def test_no_logger_is_made_by_any_callable(told, tmp_path_factory):
    """`logging.config` calls what "()" names."""
    text = "hydra:\n  job_logging:\n    handlers:\n      h:\n        (): os.mkdir\n        path: canary\n"
    folder = file_of(tmp_path_factory.mktemp("own"), text)
    shown = told(TRAIN, "--config-dir", folder, "experiment=mine")
    assert re.search(r"job_logging\.handlers\.h\.\(\) \(.*mine\.yaml:6\): 'os\.mkdir' is not made", shown), (
        shown
    )


def test_what_hydra_would_have_done():
    """The same canary, without us: Hydra does call it."""
    from hydra.utils import instantiate

    with pytest.raises(Exception, match=r"posix\.mkdir"):
        instantiate({"_target_": "os.mkdir", "path": "/canary/canary"})


# ------------------------------------------------------------------ processes


@pytest.mark.parametrize(
    ("module", "argument", "said"),
    [
        ("train", "run.stpes=5", "error: run.stpes=5 (command line): no such key. Did you mean run.steps?"),
        ("finetune", "method=qlora", "error: method=qlora (command line): no such choice."),
        (
            "tokenize",
            "shards_mb=5 out=x",
            "error: shards_mb=5 (command line): no such key. Did you mean shard_mb?",
        ),
    ],
)
def test_from_a_shell(tmp_path, module, argument, said):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *argument.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(said), done.stderr
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []
    assert time.monotonic() - began < 20  # it is one second; other processes have their share


def test_a_mistake_does_not_wait_for_torch():
    program = (
        "import sys; sys.argv = ['x', 'run.stpes=5']\n"
        "from experiments.train import JOB, main\n"
        "try: main(JOB)\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2 False\n", done.stderr


# ------------------------------------------------------------------ groups


def test_hardware_has_a_file_for_each_name():
    assert {path.stem for path in (CONF / "hardware").glob("*.yaml")} == set(HARDWARE)
    assert set(HARDWARE) == {*TABLE, "auto", "measure"}
    for name in HARDWARE:
        hardware = ask(TRAIN.form, [f"hardware={name}", "hardware.price_per_hour=2.5"]).config.hardware
        assert (hardware.name, hardware.price_per_hour) == (name, 2.5)


def test_finetune_has_the_groups_of_the_main_job():
    linked = [path.name for path in (CONF / "finetune").iterdir() if path.is_symlink()]
    assert {"hardware", "optimizer", "precision", "run", "schedule", "strategy"} <= set(linked)
    assert ask(FINETUNE.form, ["hardware=h100"]).config.hardware.name == "h100"


def test_a_bug_has_its_traceback(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu"])
    monkeypatch.setattr(job, "start", broken)
    with pytest.raises(KeyError, match="ours"):
        train.main(TRAIN)


def test_a_mistake_that_is_found_later_is_told_once(monkeypatch, tmp_path, capfd):
    """By the preparation, within Hydra's run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu", "data.root=nowhere"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main(TRAIN)
    shown = capfd.readouterr().err
    assert (
        shown.startswith("error: ") and "hold 0 bytes to train on" in shown and "Error executing" not in shown
    )


def test_a_rank_that_fails_is_no_mistake(monkeypatch, tmp_path, capfd):
    from fnshard.launch import LaunchError

    def fails(*_, **__):
        raise LaunchError("rank 1 died")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu", "run.steps=1"])
    monkeypatch.setattr(job, "launch", fails)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(TRAIN)
    assert capfd.readouterr().err.splitlines()[-1] == "error: rank 1 died"


def test_problems_are_one_error():
    with pytest.raises(ConfigError, match=r"^run\.stpes=5 \(command line\): no such key"):
        ask(TRAIN.form, ["run.stpes=5"])


@pytest.mark.parametrize("module", [checks, nearest, schema, sources, targets, typed, helping])
def test_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted > 0
