"""Every command of README and the guide does what it is there for; a table says how each is made short.

A command that needs several nodes, SLURM, a GPU or a network is composed and checked, and not run. One that
is not in the table is an error: a new command of a page comes with a row here.
"""
# ruff: noqa: E501  (a command is a line, as it is printed)

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from commands import ROOT, commands, documents, run_command
from runs import validate

from experiments import finetune, train
from experiments.bases import write_model
from experiments.bench import command as bench
from experiments.data.builtin import write_image_files
from experiments.data.tokenizer import ByteTokenizer
from experiments.evaluate import config as evaluate
from experiments.explain import config as explain
from experiments.plan import config as plan
from experiments.tokenize import config as tokenize
from experiments.tuning.model_directory import KEPT
from experiments.web import config as web


@dataclass(frozen=True)
class Row:
    """A row of the table: how a command is tested.

    Args:
        short: arguments that are added; all others are as they are printed, and defaults stay.
        quick: it is run in the suite, the one of an entry point that no other file runs; the others with `-m long`.
        needs: what is not here; with it the command is composed and checked, and not run.
        code: its exit code.
        bases: bases that would be made first, in whose place a small model stands.
    """

    short: str = ""
    quick: bool = False
    needs: str = ""
    code: int = 0
    bases: tuple[str, ...] = ()


SPECS = {
    "experiments.train": train.COMMAND,
    "experiments.finetune": finetune.JOB.command,
    "experiments.explain": explain.COMMAND,
    "experiments.plan": plan.COMMAND,
    "experiments.bench": bench.COMMAND,
    "experiments.evaluate": evaluate.COMMAND,
    "experiments.tokenize": tokenize.COMMAND,
    "experiments.web": web.COMMAND,
}
SMALL = "model.width=16 model.layers=1 model.context=16 data.held_out_rows=4 run.backend=eager"
BRIEF = f"{SMALL} data.rows=4 run.steps=2 run.sample_tokens=1"
TRAIN = Row(f"{BRIEF} data.root=/text")
TUNE = Row(
    "model=/models/llama data.context=96 data.rows=4 data.held_out_rows=2 run.steps=2 run.held_out_every=2 "
    "run.sample_tokens=2 run.backend=eager"
)
TINY = Row(TUNE.short.removeprefix("model=/models/llama data.context=96 "), bases=("stdlib", "tasks"))
SEES = Row("data.context=128 data.rows=4 data.held_out_rows=2 run.steps=2 run.held_out_every=2 "
           "run.sample_tokens=2 run.backend=eager")  # fmt: skip
PAPER = Row("model.layers=2")
SEARCH = Row("model.layers=2 devices=1 rows=1 days=null")
SAMPLE = Row(
    "size=tiny length=16 rounds=1 steps=1 warmup=1 losses=1 memory=1 backend=eager contenders=[ddp,full_shard]"
)
INSTALL, SLURM = "an installation", "SLURM"

TABLE = {
    # -- installing, and this suite
    "pip install -e '.[experiments]'": Row(needs=INSTALL),
    "pip install -e '.[test]'": Row(needs=INSTALL),
    "pip install -e '.[experiments,finetune]'": Row(needs=INSTALL),
    "pip install -e '.[tensorboard,wandb,mlflow]'": Row(needs=INSTALL),
    "pytest": Row(needs="itself"),
    "python train.py": Row(needs="a script, and test_guide.py"),
    "torchrun --nproc-per-node 8 train.py": Row(needs="eight ranks"),
    "wandb sync wandb/offline-run-*": Row(needs="a network"),
    "mlflow ui --backend-store-uri mlruns": Row(needs="a browser"),
    # -- train
    "python -m experiments.train": Row(TRAIN.short),
    "python -m experiments.train --help": Row(quick=True),
    "python -m experiments.train --cfg job": Row(quick=True),
    "python -m experiments.train run.stpes=5 model.heads=many optimizer.lr=-1": Row(quick=True, code=2),
    "python -m experiments.train experiment=laptop": TRAIN,
    "python -m experiments.train strategy=zero2 precision=bf16 run.steps=60 run.accumulate=4 mesh.shard=1": TRAIN,
    "python -m experiments.train tracker=tensorboard": TRAIN,
    "python -m experiments.train run.profile=3": Row(f"{TRAIN.short} run.steps=6"),
    "python -m experiments.train strategy=auto run.device_gb=24": TRAIN,
    "python -m experiments.train strategy=full_shard_remat": TRAIN,
    "python -m experiments.train strategy.remat=0.5 strategy.optimizer_memory=disk run.disk_dir=/fast/disk": TRAIN,
    "python -m experiments.train strategy=zero3 strategy.optimizer_memory=host mesh.shard=8 run.device=cpu": (
        Row(f"{TRAIN.short} data.rows=8 data.held_out_rows=8")
    ),
    "python -m experiments.train strategy=full_shard precision=bf16": TRAIN,
    "python -m experiments.train mesh.tensor=2 run.device=cpu": TRAIN,
    "python -m experiments.train mesh.shard=2 mesh.tensor=2 mesh.context=2 run.device=cpu": TRAIN,
    "python -m experiments.train run.replicas=1": Row(f"{TRAIN.short} mesh.shard=2 run.device=cpu"),
    "python -m experiments.train run.replicas=1 run.replica_every=10 run.save_every=1000 run.max_restarts=100": (
        Row(f"{TRAIN.short} mesh.shard=2 run.device=cpu")
    ),
    "python -m experiments.train run.accumulate=4 run.steps=1000 run.held_out_every=100": (
        Row(f"{TRAIN.short} data.rows=8")
    ),
    "python -m experiments.train run.resume=auto": TRAIN,
    "python -m experiments.train run.save_every=100 run.keep=2 run.keep_best=2": TRAIN,
    "python -m experiments.train data=shards data.root=shards model.vocab=264": Row(BRIEF),
    # -- evaluation
    "python -m experiments.evaluate model=FOLDER 'tasks=[arc:test.jsonl,gsm8k:test.jsonl]'": (
        Row(needs="files, and test_evaluate.py")
    ),
    "python -m experiments.evaluate model=FOLDER 'tasks=[mmlu:anatomy_test.csv:anatomy_dev.csv]' shots=5": (
        Row(needs="files, and test_evaluate.py")
    ),
    "python -m experiments.evaluate model=FOLDER 'tasks=[mmmu:validation.parquet]'": (
        Row(needs="files, and test_evaluate.py")
    ),
    "python -m experiments.evaluate model=FOLDER 'tasks=[lm-eval:arc_easy]'": (
        Row(needs="a network, and test_evaluate.py")
    ),
    # -- checkpoints of others
    "python -m experiments.convert FROM TO": Row(quick=True),
    # -- sweeps
    "python -m experiments.train --multirun strategy=full_shard,zero2,no_shard optimizer.lr=2e-3,4e-3": TRAIN,
    "python -m experiments.train --multirun optimizer.lr=1e-3,3e-3,1e-2 launcher=joblib hydra.launcher.n_jobs=3": TRAIN,
    "python -m experiments.train --multirun hydra/sweeper=search_lr hydra.sweeper.n_trials=20": (
        Row(f"{TRAIN.short} hydra.sweeper.n_trials=2")
    ),
    "python -m experiments.train --multirun hydra/sweeper=search_lr 'optimizer.weight_decay=interval(0,0.3)' "
    "'optimizer.b2=choice(0.95,0.99)'": Row(f"{TRAIN.short} hydra.sweeper.n_trials=2"),
    "python -m experiments.train --multirun hydra/sweeper=optuna 'optimizer.lr=tag(log, interval(1e-4, 1e-2))'": (
        Row(f"{TRAIN.short} hydra.sweeper.n_trials=2")
    ),
    "python -m experiments.compare RUN_DIR...": Row(quick=True),
    "python -m experiments.generate run=RUN_DIR 'prompt=class '": Row("tokens=4", quick=True),
    "python -m experiments.compare multirun/2030-01-31/12-00-00 'outputs/2030-01-31/*' --metric tokens_per_s "
    "--out there": Row(quick=True),
    # -- the page
    "python -m experiments.web": Row(needs="a browser, and test_web_browser.py"),
    "python -m experiments.web folder=FOLDER port=0": Row(needs="a browser, and test_web_browser.py"),
    # -- nodes
    "torchrun --nproc-per-node 2 -m experiments.train": TRAIN,
    "python -m experiments.train --multirun run.seed=1,2,3 launcher=slurm hydra.launcher.nodes=2 "
    "hydra.launcher.gpus_per_node=8 data.rows=16": Row(needs=SLURM),
    "python -m experiments.train --multirun launcher=slurm hydra.launcher.nodes=2 hydra.launcher.gpus_per_node=8 "
    "model=1b data.rows=16": Row(needs=SLURM),
    "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --max-restarts 3 --rdzv-backend "
    "c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -1):29400 -m experiments.train model=1b data.rows=16": (
        Row(needs=SLURM)
    ),
    "srun --cpus-per-task=$SLURM_CPUS_PER_TASK torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend "
    "c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -1):29400 train.py": (
        Row(needs=SLURM)
    ),
    # -- examples
    "python -m experiments.examples.mlp": Row(),
    "python -m experiments.examples.vit": Row(),
    "python -m experiments.examples.gpt": Row(),
    "python -m experiments.examples.moe": Row(),
    "python -m experiments.examples.maml": Row(),
    "python -m experiments.examples.gradient_penalty_gan": Row(),
    "python -m experiments.examples.ensemble_vmap": Row(),
    "python -m experiments.examples.pinn": Row(),
    "python -m experiments.examples.dino": Row(),
    # -- finetune
    "python -m experiments.finetune": TINY,
    "python -m experiments.finetune method=lora": TINY,
    "python -m experiments.finetune method=qlora4 precision=bf16": TINY,
    "python -m experiments.finetune method=lora data.train=mine.jsonl": Row(f"{TUNE.short} mesh.shard=1"),
    "python -m experiments.finetune objective=grpo": replace(TINY, short=f"{TINY.short} objective.group=4"),
    "python -m experiments.finetune objective=grpo model=/models/llama data.train=mine.jsonl "
    "objective.reward=number": replace(TUNE, short=f"{TUNE.short} objective.group=4"),
    "python -m experiments.finetune objective=dpo data.train=pairs.jsonl": TUNE,
    "python -m experiments.finetune objective=dpo data.train=pairs.jsonl model=/models/llama": (
        replace(TUNE, short=f"{TUNE.short} mesh.shard=1")
    ),
    "python -m experiments.finetune model=/models/llama data.train=mine.jsonl method=qlora4 precision=bf16": TUNE,
    "python -m experiments.finetune model=tiny-qwen2.5-vl method=full": SEES,
    "python -m experiments.finetune model=/models/qwen2.5-vl data.train=images.jsonl "
    "method.targets='all-linear|vision-linear'": SEES,
    "python -m experiments.finetune data.train=mine.jsonl model=/models/llama data.tokens=16384": (
        replace(TUNE, short=f"{TUNE.short} data.tokens=512")
    ),
    "python -m experiments.finetune objective=grpo objective.updates=4 data.rows=8 data.context=64 data.tokens=2048 "
    "objective.environment._target_=experiments.examples.second_try.rollout": (
        replace(TINY, short=f"{TINY.short} objective.group=2 run.steps=4")
    ),
    "python -m experiments.finetune objective=distill objective.teacher=stdlib model=tiny method=full": (
        replace(TINY, bases=("stdlib", "tiny"))
    ),
    "python -m experiments.finetune objective=distill objective.teacher=tasks objective.on_policy=true": (
        replace(TINY, short=f"{TINY.short} objective.group=2")
    ),
    "python -m experiments.finetune objective=distill objective.teacher=/models/large model=/models/llama "
    "data.train=mine.jsonl objective.on_policy=true": (
        replace(TUNE, short=f"{TUNE.short} objective.teacher=/models/llama objective.group=2 objective.tokens=4")
    ),
    "python -m experiments.finetune objective=reward data.train=pairs.jsonl model=/models/llama": TUNE,
    "python -m experiments.finetune objective=reward": TINY,
    "python -m experiments.finetune objective=grpo 'objective.reward=[RUN_DIR/model,{name: solved, weight: 0}]'": (
        replace(TINY, short=f"{TINY.short} objective.group=2")
    ),
    "python -m experiments.finetune objective=classify": TINY,
    "python -m experiments.finetune objective=classify objective.level=token": TINY,
    "python -m experiments.finetune objective=embed objective.dims=[16,32]": (
        replace(TINY, short=f"{TINY.short} objective.dims=[8,16]")
    ),
    # -- data
    "python -m experiments.tokenize out=shards": Row("files=/text", quick=True),
    "python -m experiments.tokenize out=shards files=[/text,'/more/*.jsonl'] tokenizer=/models/llama": Row(),
    # -- on paper
    "python -m experiments.explain model=7b mesh.shard=64 hardware=h100": Row("model.layers=2"),
    "python -m experiments.explain model=70b strategy=full_shard mesh.shard=1024 hardware=h100": PAPER,
    "python -m experiments.explain model=70b mesh.shard=32 mesh.context=4 mesh.tensor=8 strategy=full_shard_remat": PAPER,
    "python -m experiments.explain model=7b strategy=auto mesh.shard=8 data.rows=32 run.device_gb=24 hardware=a100": PAPER,
    "python -m experiments.explain model=70b mesh.pipeline=8 mesh.tensor=8 mesh.shard=1 strategy=shard_grad_op strategy.chunks=2 run.accumulate=16": Row("model.layers=16"),
    "python -m experiments.explain run=outputs/2030-01-31/12-00-00": Row(quick=True),
    "python -m experiments.explain hardware=measured:outputs/2030-01-31": PAPER,
    "python -m experiments.plan model=70b devices=64": (
        Row("model.layers=1 model.width=64 model.heads=4 model.kv_heads=2 model.context=64 devices=1 rows=1")
    ),
    "python -m experiments.plan model=405b devices=16384 tokens=15e12 rows=2048": SEARCH,
    "python -m experiments.plan model=8b days=30 tokens=1e12": SEARCH,
    "python -m experiments.plan --config-dir=experiments/examples/deepseek_v3/conf experiment=deepseek_v3 devices=256 rows=2048": Row(
        "model.width=64 model.layers=2 model.dense=1 model.heads=2 model.head=16 model.rotated=8 model.query_rank=32 "
        "model.key_rank=16 model.mlp=64 model.experts=8 model.chosen=2 model.expert_mlp=32 model.context=64 model.vocab=256 "
        "devices=1 rows=1"
    ),
    # -- measuring
    "python -m experiments.bench": SAMPLE,
    "python -m experiments.bench case=parity": Row(),
    "python -m experiments.bench case=budget": Row("rounds=1 backend=eager"),
    "python -m experiments.bench size=85m dtype=bf16 rounds=20": SAMPLE,
    "python -m experiments.bench device=cuda": Row("device=cpu", needs="a GPU"),
    "python -m experiments.bench case=predict ranks=4 "
    "'plans=[5m-zero2-bf16-tensor2-4x256,25m-full_shard-remat-context2]'": Row("rounds=1 memory=0 backend=eager"),
    "python -m experiments.bench case=starts checkout=../before rounds=5": Row("rounds=1", needs="another checkout"),
    "python -m experiments.bench case=gpu device=cuda until=540": Row("device=cpu", needs="a GPU"),
    "python -m experiments.bench case=gpu device=cuda 'parts=[profile,rows-8]'": Row("device=cpu", needs="a GPU"),
}  # fmt: skip
SHOWN = {command: path for path in documents() for command in commands(path.read_text(encoding="utf-8"))}


def test_every_command_of_a_page_has_a_row_and_every_row_a_command() -> None:
    assert {c: str(p.relative_to(ROOT)) for c, p in SHOWN.items() if c not in TABLE} == {}
    assert [command for command in TABLE if command not in SHOWN] == []


# ------------------------------------------------------------------ what commands name


def _lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make what pages name and a reader has: `{as printed: where it is here}`."""
    from tuning import write_llama

    home = tmp_path_factory.mktemp("things")
    ids = {"bos_token_id": ByteTokenizer().bos, "pad_token_id": ByteTokenizer().pad}
    sizes = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 512}
    write_llama(home / "llama", **sizes, **ids)
    write_llama(home / "judge", kind="LlamaForSequenceClassification", num_labels=1, **sizes, **ids)
    (home / "text").mkdir()
    for number in range(20):
        (home / "text" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    (home / "disk").mkdir()
    (home / "more").mkdir()
    _lines(home / "more" / "some.jsonl", *({"text": f"text {n}"} for n in range(5)))
    sums = [(f"{n}+1=", f"{n + 1}", f"{n + 2}") for n in range(60)]
    mine = _lines(home / "mine.jsonl", *({"prompt": q, "response": a} for q, a, _ in sums))
    pairs = _lines(home / "pairs.jsonl", *({"prompt": q, "chosen": a, "rejected": b} for q, a, b in sums))
    write_model("tiny-qwen2.5-vl", home / "qwen2.5-vl")
    images = write_image_files(home)[0]
    _run(f"experiments.tokenize out=shards files={home}/text", home)
    torch.save({"w": torch.ones(2)}, home / "weights.pt")
    run = "outputs/2030-01-31/12-00-00"
    _run(f"experiments.train {BRIEF} mesh.shard=1 data.root={home}/text hydra.run.dir={run}", home)
    (home / "multirun").symlink_to(home / "outputs")
    return {
        "/models/llama": f"{home}/llama", "[RUN_DIR/model": f"[{home}/judge", "/text": f"{home}/text", "/more/": f"{home}/more/",
        "/models/qwen2.5-vl": f"{home}/qwen2.5-vl", "images.jsonl": str(images), "/fast/disk": f"{home}/disk", "mine.jsonl": str(mine), "pairs.jsonl": str(pairs),
        "convert FROM": f"convert {home}/weights.pt", "data.root=shards": f"data.root={home}/shards", "RUN_DIR...": f"{home}/{run}", "run=RUN_DIR": f"run={home}/{run}",
        "=experiments/examples": f"={ROOT}/experiments/examples",
        "multirun/2030": f"{home}/multirun/2030", "outputs/2030": f"{home}/outputs/2030",
    }  # fmt: skip


def _run(arguments: str, folder: Path, row: Row = Row()) -> CompletedProcess[str]:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}
    done = run_command(shlex.split(arguments), folder, timeout=270 if row.quick else 1700, env=env)
    assert done.returncode == row.code, f"python -m {arguments}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


# ------------------------------------------------------------------ each command


def _here() -> list[Any]:
    marked = {True: (), False: (pytest.mark.long, pytest.mark.timeout(1800))}
    return [pytest.param(c, id=c, marks=marked[r.quick]) for c, r in TABLE.items() if not r.needs]


@pytest.mark.parametrize("command", _here())
def test_a_command_runs(command: str, things: dict[str, str], tmp_path: Path) -> None:
    row = TABLE[command]
    line = f"{command} {row.short}".replace("torchrun", "-m torch.distributed.run --standalone")
    line = re.sub("|".join(map(re.escape, things)), lambda found: things[found[0]], line)
    for name in row.bases:
        shutil.copytree(things["/models/llama"], tmp_path / KEPT / name)
    done = _run(line.partition("-m ")[2], tmp_path, row)
    shown = done.stdout + done.stderr
    assert shown.strip()
    if row.code:
        assert re.search(_as_printed(command), shown), shown


def _as_printed(command: str) -> str:
    """Return the lines below a command on its page, as a pattern in which `...` is anything."""
    shown = SHOWN[command].read_text(encoding="utf-8").split(f"{command}\n", 1)[1].split("\n\n", 1)[0]
    return r"\n".join(
        re.escape(line.removeprefix("    ")).replace(r"\.\.\.", ".*") for line in shown.splitlines()
    )


@pytest.mark.parametrize(
    "command", [c for c, r in TABLE.items() if "-m experiments." in c and not r.quick], ids=str
)
def test_a_command_composes(command: str) -> None:
    """It composes with all that is printed and all that makes it short."""
    _, _, after = command.partition("-m experiments.")
    module, *arguments = shlex.split(f"experiments.{after} {TABLE[command].short}")
    assert importlib.util.find_spec(module), module
    if module in SPECS and "--help" not in arguments:
        validate(SPECS[module], arguments)


@pytest.mark.parametrize("command", [c for c in TABLE if "torchrun " in c], ids=str)
def test_torchrun_takes_the_options_of_a_command(command: str) -> None:
    from torch.distributed.run import get_args_parser

    words = re.sub(r"\$\(.*?\)|\$\w+", "2", command.partition("torchrun ")[2].replace("... ", "")).split()
    assert get_args_parser().parse_args(words).training_script in ("experiments.train", "train.py")


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [n for c in TABLE for group in re.findall(r"^pip .*\[(.*)\]", c) for n in group.split(",")]
    assert named and not set(named) - set(project["optional-dependencies"])
