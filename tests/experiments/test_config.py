"""Command lines that are wrong: one error that names each key, its value and the nearest valid name; nothing
is started, nothing made."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from commands import OUTPUT, run_command
from errors import raises
from hydra.core.global_hydra import GlobalHydra
from runs import SMALL, compose, validate
from wrong_configs import recipe_of, split

from experiments import NOISE
from experiments.finetune import JOB as FINETUNE
from experiments.lib import launch as jobs
from experiments.lib.checks import ConfigError
from experiments.lib.compose import CONF, answer, from_shell, open_hydra, put_targets_in_place
from experiments.lib.config import HARDWARE, SCHEDULES, STRATEGIES
from experiments.lib.files import lock_folder
from experiments.lib.launch import main
from experiments.lib.metrics import METRICS
from experiments.tokenize.config import COMMAND as TOKENIZE
from experiments.tokenize.config import TokenizeConfig
from experiments.train import JOB as TRAIN
from fnshard.analysis.hardware import TABLE
from fnshard.launcher.local import LaunchError
from fnshard.layout.presets import PRESETS
from fnshard.optim.schedules import SCHEDULES as RATES

# Command lines of several mistakes -> what is said of each.
WRONG_TRAIN = {
    "run.stpes=5 steps=5 lr=0.1 training.steps=5 model.hidden=64 optimizer=sgd optimizer.b1=0.1": (
        r"run\.stpes=5: no such key\. Did you mean run\.steps\? run has steps, accumulate, ",
        r"^  steps=5: no such key\. Did you mean run\.steps\? The top has model, mesh",
        r"^  lr=0\.1: no such key\. Did you mean optimizer\.lr\?",
        r"training\.steps=5: no such key\. Did you mean run\.steps\?",
        r"model\.hidden=64: no such key\. .*model has width, layers, heads",
        r"optimizer\.b1=0\.1: no such key\. .* has name, lr, momentum",
    ),
    "+mesh.z=1 mesh={shart: 2} +new.key=1 ++run.stepz=5 data.held_out_rowz=8 model.width.x=64": (
        r"mesh\.z=1: no such key\. mesh has replicate, .*expert_capacity\.",
        r"mesh\.shart=2: no such key\. Did you mean mesh\.shard\?",
        r"new\.key=1: no such key\. The top has model, mesh",
        r"run\.stepz=5: no such key\. Did you mean run\.steps\?",
        r"Did you mean data\.held_out_rows\?",
        r"model\.width=\{'x': 64\}: Input should be a valid integer\.",
    ),
    "mesh=3 run.steps=many run.resume=null stratgy=zero2 optimizer.eps=nan precision.compute=flaot32": (
        r"mesh=3: expected keys below it\.",
        r"run\.steps=many: Input should be a valid integer",
        r"optimizer\.eps=nan: Input should be a finite number\.",
        r"precision\.compute=flaot32: Input should be .*\. Did you mean float32\?",
        r"run\.resume=null: Input should be a valid string\.",
        r"stratgy=zero2: no such key\. Did you mean strategy\.name\?",
    ),
    "model.heads=3 schedule.decay=1e-1 optimizer=sgd "
    "optimizer.momentum=0 strategy.update_on=host data=shards": (
        r"model\.width=128 and model\.heads=3: the head size, width / heads, must be a whole even number\.",
        r"schedule: warmup_cosine does nothing with decay",
        r"optimizer\.nesterov=true: needs optimizer\.momentum above 0",
        r"strategy\.update_on='host': needs strategy\.optimizer_memory=host or disk\.",
        r"data=shards: needs the folder that experiments\.tokenize wrote\. Fix: data\.root=FOLDER",
    ),
    "model.kv_heads=3 schedule=wsd schedule.warmup=0.9 strategy.remat=block": (
        r"kv_heads must divide heads",
        r"warmup \+ decay is more than the whole run",
        r"strategy\.remat='block': one of 'none', 'unit', 'offload'",
    ),
    "optimizer.lr=null run.device_gb=24 run.replica_every=5 "
    "run.disk_dir=there model.vocab=100 run.prompt=''": (
        r"optimizer\.lr=null: only fine-tuning has defaults",
        r"run\.device_gb=24: a budget is for strategy=auto",
        r"run\.replica_every=5: nothing is copied.*Fix: run\.replicas=1",
        r"run\.disk_dir='there': nothing rests on disk",
        r"model\.vocab=100: must be 256 or more",
        r"run\.prompt='': a sample needs at least one byte",
    ),
    "strategy=auto run.accumulate=2 mesh.tensor=8": (
        r"strategy=auto: needs a budget\. Fix: run\.device_gb=24",
        r"run\.accumulate=2: strategy=auto chooses the micro-batches",
        r"to divide model\.heads=4 and model\.kv_heads=2.*\. Fix: mesh\.tensor=2\.",
    ),
    "strategy.chunks=2": (
        r"strategy\.chunks=2: chunks are of the stages of a pipeline\. Fix: mesh\.pipeline=2",
    ),
    "run.steps=5,10 run.seed=range(3)": (
        r"run\.steps=5,10: several values are a sweep\. Fix: --multirun; or quotes for text, \[a,b\] for",
    ),
    "--multirun strategy=zero1,zer2": (r"Could not find 'strategy/zer2'",),
    "--multirun run.steps=2,many run.seed=1": (r"run\.steps=many: Input should be a valid integer",),
    "--multirun optimizer=adamw,sgd optimizer.b1=0.8": (r"optimizer\.b1=0\.8: no such key",),
}
ALONE_TRAIN = {
    "+run.steps=5": r"Either remove \+ prefix: 'run\.steps=5'\nOr add a second \+ .*: '\+\+run\.steps=5'",
    "hydra.mode=MULTIRUN run.steps=2": r"^error: hydra\.mode=MULTIRUN: does nothing.*Fix: .*--multirun",
    "hydra.verbose=true ++hydra.job.chdir=true hydra.run.dir=x": (
        r"^error: hydra\.verbose=true \+\+hydra\.job\.chdir=true: does nothing in a single run"
    ),
    "hydra/sweeper=optuna": r"^error: hydra/sweeper=optuna: does nothing in a single run",
    "launcher=joblib": r"^error: a launcher \(joblib\) starts the jobs of a sweep.*Fix: add --multirun",
    "model.width=${nope}": r"^error: model\.width: Interpolation key 'nope' not found\.$",
    "strategy.memory=disk": r"run\.disk_dir=None: what rests on disk needs a directory",
    "strategy=auto run.device_gb=1 strategy.remat=unit": r"strategy=auto chooses remat by itself",
    "optimizer=adam": r"Could not find 'optimizer/adam'(?s:.*)adafactor\n\tadamw\n",
    "seed": r"missing EQUAL",
    "model=null": r"^error: model=null: Config group override must be a string",
    "strategy=auto run.device_gb=lots": r"^error: run\.device_gb=lots: Input.*\n\Z",  # brings no others
    "mesh.shard=3 run.device=cpu": r"data\.rows=8 does not divide over 3 ranks",
    "run.device=tpu": r"run\.device=tpu: this machine has cpu",
    "run.replicas=2": r"run\.replicas=2: 1 node can hold 1.*Fix: run\.replicas=1, or more nodes",
    "optimizer={_target_: 5}": r"^error: optimizer=.*: expected a dotted name as _target_",
    "model={_target_: mine.Model, context: 8}": r"model\.vocab=None: a model of one's own names its vocab",
    "--config-dir nowhere": r"--config-dir=nowhere: is no directory",
    "--config-name other run.steps=2": r"^error: --config-name: this command has no such flag\. Fix: ",
    "-cp there": r"^error: --config-path: this command has no such flag",
    "--verbose": r"^error: --verbose: this command has no such flag",
    "--resolve run.steps=2": r"^error: --resolve: is for --cfg\. Fix: add --cfg job\.",
    "--multirun strategy=glob(zer2*) run.steps=2": r"^error: strategy=glob\(zer2\*\): no value is meant",
    "--cfg job model.wdith=5 run.steps=0": r"^error: model\.wdith=5: no such key\. Did you mean model\.wid",
    "--multirun --cfg job": r"^error: --cfg and --multirun: only one of them can be answered",
}
WRONG_FINETUNE = {
    "method.rnak=4 method.alpha=big model.width=64": (
        r"method\.rnak=4: no such key\. Did you mean method\.rank\?",
        r"method\.alpha=big: Input should be a valid number",
        r"model=\{'width': 64\}: Input should be a valid string",
    ),
    "+run._target_=os.system": (r"run\._target_=os\.system: no such key\.",),
    "optimizer=sgd run.device_gb=24 objective=dpo "
    "data.pack=false method=full export=adapters mesh.context=5 mesh.pipeline=2": (
        r"mesh\.pipeline=2: fine-tuning runs no pipelines\. Fix: mesh\.pipeline=1",
        r"optimizer\.lr=null: the defaults are AdamW's",
        r"run\.device_gb=24: a budget is for strategy=auto",
        r"data\.pack=false: pairs are never packed",
        r"export=adapters: method=full has no adapters\. Fix: export=",
        r"mesh\.context=5: has to divide data\.context=256 and 32.*Fix: mesh\.context=1\.",
    ),
    "data.held_out=x.jsonl": (r"data\.held_out: without data\.train there is nothing",),
}
WRONG = [
    *((TRAIN, *each) for each in WRONG_TRAIN.items()),
    *((TRAIN, line, (message,)) for line, message in ALONE_TRAIN.items()),
    *((FINETUNE, *each) for each in WRONG_FINETUNE.items()),
]


@pytest.mark.parametrize(("command", "line", "messages"), WRONG, ids=lambda each: getattr(each, "name", None))
def test_a_wrong_command_line_is_one_error_that_lists_every_mistake(error_of, command, line, messages):
    shown = error_of(command, *split(line))
    for message in messages:
        assert re.search(message, shown, re.M), shown
    if len(messages) > 1:
        assert shown.startswith(f"error: the configuration has {len(messages)} problems:\n"), shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: 5\n  stpes: 6\n", r"run\.stpes=6: no such key\. Did you mean run\.steps\?"),
        ("model:\n  width: 0\n", r"model\.width=0: must be at least 1\."),
        ("strategy:\n  _target_: os.system\n", r"strategy\._target_=os\.system: no such key"),
        ("defaults:\n  - override /strategy: zer2\n", r"Could not find 'strategy/zer2'"),
        ("run: [1\n", r"mine\.yaml"),
        ("run: 5\n", r"run=5: expected keys below it"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path_factory, error_of, text, message):
    folder = recipe_of(tmp_path_factory.mktemp("own"), text)
    assert re.search(message, error_of(TRAIN, "--config-dir", folder, "experiment=mine"))


def test_right_command_lines_are_taken(tmp_path):
    """Whatever looks odd, and is not."""
    for line in (
        "run.steps='5' run.async_save=yes optimizer.lr=1 run.prompt=5 strategy.remat=0.5",
        "hydra/launcher=basic hydra.job.name=other hydra.searchpath=[]",
        "strategy.remat={layers.*:unit} mesh={shard: 2} ++run.steps=5 run.seed=${run.steps} run={keep: 3}",
        "hydra.run.dir=there run.steps=2 run.steps=3 +hydra.job.env_set.LEVEL=3",
    ):
        assert validate(TRAIN.command, split(line)) is not None, line
    line = "run.prompt=5 strategy.remat=0.5 run.steps='2' run.steps=3 run.async_save=yes"
    found = validate(TRAIN.command, split(line))
    assert (found.run.prompt, found.strategy.remat) == ("5", 0.5)
    assert (found.run.steps, found.run.async_save) == (3, True)
    assert validate(TRAIN.command, ["--multirun", "run.seed=range(3)", "strategy=zero1,zero2"]) is None
    assert validate(TRAIN.command, ["--multirun", "strategy=glob(zero*)"]) is None
    assert validate(TRAIN.command, ["--cfg", "job", "run.steps=0"]) is None  # it is to be looked at
    for flag in ("-r", "--run"):
        assert validate(TRAIN.command, [flag, "run.steps=3"]).run.steps == 3
    folder = recipe_of(tmp_path, "run:\n  steps: 7\n  seed: 1\n")
    found = validate(TRAIN.command, ["--config-dir", folder, "experiment=mine", "run.seed=2"])
    assert (found.run.steps, found.run.seed, found.run.sample_length) == (7, 2, 14)
    lengths = [validate(TRAIN.command, split(line)).run.sample_length for line in ("", "run.sample_tokens=9")]
    assert lengths == [256, 9]
    folder = recipe_of(tmp_path / "sizes", "defaults:\n  - /size: flat\n")  # a group that only it has
    (Path(folder) / "size").mkdir()
    for name, layers in {"flat": 1, "deep": 9}.items():
        (Path(folder) / "size" / f"{name}.yaml").write_text(f"# @package model\nlayers: {layers}\n")
    found = validate(TRAIN.command, ["--config-dir", folder, "experiment=mine", "size=deep"])
    assert found.model.layers == 9
    with raises(ConfigError, leaves="processes=many", says="integer"):
        validate(TOKENIZE, ["out=there", "processes=many"])
    with raises(ConfigError, leaves="out=???"):
        validate(TOKENIZE, [])


def test_a_folder_can_be_named_as_the_command_line_is(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("LEVEL", "0")
    folder = "hydra.run.dir='there/${hydra.job.override_dirname}'"
    several = ["strategy=zero2", "++run.steps=2", "run.seed=3", "+hydra.job.env_set.LEVEL=3", folder]
    composed = from_shell(TRAIN.command, several)
    assert composed.folder.name == "++run.steps=2,run.seed=3,strategy=zero2"
    assert composed.overrides == several[:3]
    keys = "hydra.job.config.override_dirname.exclude_keys=[run.seed,run.steps]"
    separators = "hydra.job.config.override_dirname.kv_sep=-"
    assert from_shell(TRAIN.command, [*several, keys, separators]).folder.name == "strategy-zero2"


def test_a_reward_of_ones_own_is_named_key_by_key():
    words = ["objective=grpo", "objective.reward._target_=mine.reward", "objective.reward.most=3"]
    config = compose(*put_targets_in_place(words), spec=FINETUNE.command)  # as Hydra takes them
    assert validate(FINETUNE.command, words).objective.reward == config.objective.reward
    assert config.objective.reward == {"_target_": "mine.reward", "most": 3}


@pytest.mark.parametrize("name", sorted(NOISE))
def test_what_nobody_can_use_is_not_shown(name):
    shown, logger = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger.addHandler(handler)
    logger.warning("before %s after", NOISE[name])
    logger.warning("something else")
    logger.removeHandler(handler)
    assert shown == ["something else"]


def test_the_library_tells_nothing_of_a_sweep_of_a_command_without_ranks(tmp_path, monkeypatch, capfd):
    """Hydra shows what is logged from INFO on, of the jobs of a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tokenize", "--multirun", "out=one,two"])
    library, began = logging.getLogger("fnshard"), []

    def task(config: TokenizeConfig, _: Path) -> None:
        began.append(config.out)
        logging.getLogger("fnshard.step").info("pass 3 of 5")
        logging.getLogger("fnshard.step").warning("a slow kernel")

    try:
        answer(TOKENIZE, task)
    finally:
        library.setLevel(logging.NOTSET)
    shown = "".join(capfd.readouterr())
    assert began == ["one", "two"] and "pass 3 of 5" not in shown and "a slow kernel" in shown


# ------------------------------------------------------------------ processes, and errors that come later


def test_from_a_shell_a_mistake_is_one_line(tmp_path):
    done = run_command(["experiments.train", "run.stpes=5"], tmp_path)
    message = "error: run.stpes=5: no such key. Did you mean run.steps?"
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == set(OUTPUT.values())


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.stpes=5"], "error: run.stpes=5: no such key. Did you mean run.steps?"),
        (
            ["--multirun", "run.steps=1,2"],
            "error: under torchrun only key=value arguments are taken, not --multirun.",
        ),
    ],
    ids=["a key", "a flag"],
)
def test_under_torchrun_a_mistake_is_one_line_and_other_ranks_wait_before_theirs(
    monkeypatch, tmp_path, capfd, words, message, local_rank
):
    """torchrun shows no traceback of ours for a rank that ends so."""
    waited = []
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setattr(jobs.time, "sleep", waited.append)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(TRAIN)
    assert len(waited) == local_rank and list(tmp_path.iterdir()) == []
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 1 and shown[0].startswith(message)


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
    monkeypatch.setattr(jobs, "launch", launch)
    with pytest.raises(SystemExit, match=f"^{code}$"):
        main(TRAIN)
    shown = capfd.readouterr().err.strip()
    assert re.search(message, shown, re.M) and "Error executing" not in shown and "Traceback" not in shown


def test_a_bug_has_its_traceback(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu"])
    monkeypatch.setattr(jobs, "start", broken)
    with pytest.raises(KeyError, match="ours"):
        main(TRAIN)


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("there", ["", "new", "new/run"])
def test_a_mistake_that_ranks_find_removes_what_the_command_made(monkeypatch, tmp_path, there, has_steps):
    """But for the folders that were there, and for a run that has made steps."""

    def launch(command, **_):
        folder = Path(command[-1]).parent
        (folder / "ranks").mkdir()
        (folder / METRICS).write_text("{}\n" * has_steps)
        (folder / jobs.REFUSAL).write_text('{"message": "no plan fits.", "mistake": true}')
        raise LaunchError("rank 0 of 2 ended with exit code 1")

    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, "mesh.shard=1", "hydra.run.dir=new/run"])
    monkeypatch.setattr(jobs, "launch", launch)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(TRAIN)
    assert (tmp_path / "new/run" / METRICS).exists() == (has_steps or there == "new/run")
    assert (tmp_path / "new").exists() == (has_steps or there != "")


def test_a_mistake_of_any_rank_is_told_and_that_of_rank_0_counts(monkeypatch, tmp_path):
    """Also where a rank cannot know whether the others have failed, as their store is gone already."""
    monkeypatch.setenv(jobs.LOGS, str(tmp_path / "ranks"))
    monkeypatch.setattr(jobs, "leave_group", lambda: None)
    for rank, said in (("1", "of rank 1"), ("0", "of rank 0"), ("1", "of rank 0")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match=r"^1$"):
            jobs.end_together(f"of rank {rank}", mistake=True)
        assert json.loads((tmp_path / jobs.REFUSAL).read_text()) == {"message": said, "mistake": True}


def test_a_folder_that_another_process_works_in_is_refused_and_stays(monkeypatch, tmp_path, capfd):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, "mesh.shard=1", "hydra.run.dir=mine"])
    with lock_folder(tmp_path / "mine"), pytest.raises(SystemExit, match=r"^2$"):
        main(TRAIN)
    assert "another process is at work in" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["run.lock"]


@pytest.mark.parametrize("there", ["mine", "mine/run"])
def test_a_mistake_leaves_folders_that_were_there(monkeypatch, tmp_path, there):
    def start(*_, **__):
        raise ConfigError("no.")

    (tmp_path / there).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "run.device=cpu", "hydra.run.dir='mine/run'"])
    monkeypatch.setattr(jobs, "start", start)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(TRAIN)
    assert list((tmp_path / there).iterdir()) == []
    assert sorted(tmp_path.rglob("*")) == sorted({tmp_path / "mine", tmp_path / there})


# ------------------------------------------------------------------ groups


def test_names_are_those_of_the_library():
    assert {path.stem for path in (CONF / "shared" / "hardware").glob("*.yaml")} == set(HARDWARE)
    assert set(HARDWARE) == {*TABLE, "auto", "measure"}
    assert (*PRESETS, "auto") == STRATEGIES and tuple(RATES) == SCHEDULES


def test_jobs_share_groups():
    assert not any(path.is_symlink() for path in CONF.rglob("*"))
    for spec in (TRAIN.command, FINETUNE.command):
        with open_hydra(spec):
            loader = GlobalHydra.instance().config_loader()
            for group in {path.name for path in (CONF / "shared").iterdir()} - {"hydra"}:
                assert loader.get_group_options(group)
            assert loader.get_group_options("hydra/sweeper") == ["basic", "optuna", "search_lr"]
