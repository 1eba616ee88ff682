"""The fine-tuning job, as command lines and ranks know it.

What needs torch is imported where it is used: a mistake in a command line is reported before that has loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.cli.command_spec import CONF, CommandSpec, Job
from experiments.configs.train import ConfigError
from experiments.finetune.config import FinetuneConfig


def prepare(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with directories in the place of names: of the model, and of tokenised data."""
    from experiments.data.rows import readable
    from experiments.finetune.base_models import PRETRAINED, directory_of
    from experiments.finetune.dataset import prepared

    wrong, model, data = [], config.model, config.data
    for path in filter(None, (data.train, data.held_out)):  # before a base is made
        try:
            readable(path)
        except ConfigError as error:
            wrong.append(str(error))
    try:
        model = model if wrong and model == PRETRAINED else directory_of(config, _pretrain)
    except ConfigError as error:
        wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return prepared(replace(config, model=model))


def _pretrain(config: FinetuneConfig, folder: Path) -> None:
    from experiments.cli.job import start
    from experiments.training.result import STOPPED
    from fnshard.launcher.local import under_launcher

    if under_launcher():
        raise ConfigError(
            "model=stdlib is made by a job of its own, which cannot be started under torchrun. Fix: run "
            "`python -m experiments.finetune` without it once, or name a model directory."
        )
    try:
        if start(JOB, config, folder, [], chosen=True) == STOPPED:
            raise SystemExit(0)
    except ConfigError as error:
        if "another process is at work" in str(error):
            raise ConfigError("model=stdlib: another process makes it. Fix: wait for that.") from None
        raise


# A folder of its own: a group that is called "model", as the main job has, would take `model=` for its own.
SPEC = CommandSpec(
    "finetune",
    FinetuneConfig,
    "Fine-tune a causal language model, whole or by adapters, on JSONL files of prompts and responses (or of "
    "pairs, objective=dpo). With nothing said: a tiny base and docstrings of Python's own library.",
    {
        "python -m experiments.finetune experiment=sft_lora run.steps=50": (
            "a whole recipe; what follows it changes it"
        ),
        "python -m experiments.finetune model=FOLDER data.train=my.jsonl method=qlora4 precision=bf16": (
            "a model and data of your own, the base as 4-bit codes"
        ),
        "python -m experiments.finetune --multirun method=full,lora,qlora8 run.steps=100": (
            "a sweep: three runs, and a table of them"
        ),
    },
    CONF / "finetune",
)
JOB = Job(SPEC, "experiments.finetune.job", "experiments.finetune.loop:finetune", prepare)
