"""The fine-tuning job, as command lines and ranks know it.

What needs torch is imported where it is used: a mistake in a command line is reported before that has loaded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from experiments.cli.command_spec import CONF, CommandSpec, Job
from experiments.configs.checks import ConfigError, attempt
from experiments.finetune.config import FinetuneConfig


def prepare(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with directories in the place of names: of the model, and of tokenised data."""
    from experiments.data.rows import readable
    from experiments.evaluate.config import check_tasks
    from experiments.evaluate.tasks import tasks_of
    from experiments.finetune.base_models import (
        PRETRAINED,
        check_pretrained,
        directory_of,
        pretrained,
        warmed,
    )
    from experiments.finetune.dataset import prepared
    from experiments.finetune.rewards import rewards_of

    model, data, tasks = config.model, config.data, config.run.evaluate
    wrong: list[str] = []
    for path in filter(None, (data.train, data.held_out)):
        attempt(partial(readable, path), wrong)
    if tasks:
        attempt(lambda: [check_tasks(tasks), *tasks_of(tasks)], of_tasks := [])
        wrong += [f"run.evaluate: {each}" for each in of_tasks]
    if model == PRETRAINED:
        attempt(lambda: check_pretrained(config), wrong)
    else:
        model = attempt(lambda: directory_of(config), wrong)
    reward = config.objective.reward or ("exact" if data.train else "solved")
    attempt(lambda: rewards_of(reward), wrong)  # a mistake is refused before anything runs
    if wrong:
        raise ConfigError("\n".join(wrong))
    if model == PRETRAINED:
        model = pretrained(config, JOB)
        if config.objective.kind.data == "prompts" and data.train is None:
            model = warmed(config, model, JOB)
    tokens = config.objective.tokens or (128 if data.train else 4)
    objective = replace(config.objective, reward=reward, tokens=tokens)
    return prepared(replace(config, model=model, objective=objective))


# A folder of its own: a group that is called "model", as the main job has, would take `model=` for its own.
SPEC = CommandSpec(
    "finetune",
    FinetuneConfig,
    "Fine-tune a causal language model, whole or by adapters, on JSONL files of prompts and responses (or of "
    "pairs, objective=dpo; or of prompts whose answers are rewarded, objective=grpo). "
    "With nothing said: a tiny base and docstrings of Python's own library.",
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
