"""The configuration of an evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from experiments.lib.checks import ConfigError, configuration
from experiments.lib.compose import CONF, Command
from experiments.lib.config import AUTO

HARNESS = "lm-eval"  # a format of tasks that are that package's own
FORMATS = ("mmlu", "arc", "hellaswag", "gsm8k", "ceval", HARNESS)


@configuration
class EvaluateConfig:
    """`model`: a directory as of `experiments.finetune`. `tasks`: FORMAT:FILE or FORMAT:FILE:FILE, where the
    second file has the `shots` that each question is asked after, the first of its subject that are not that
    question itself; or lm-eval:NAME, a task of the package lm-eval.

    `limit`: questions of a task. `tokens`: the most of a generated answer. `rows`: of text that a rank
    computes at once. `ranks`: processes that share the work and the weights; null: two on a CPU, or as many
    as there are GPUs. `dtype`: of compute. `folder`: answers are kept here, and those that are there are not
    computed again; null: a folder below outputs/evaluate by model, tasks and settings.
    """

    model: str
    tasks: tuple[str, ...]
    shots: NonNegativeInt = 0
    limit: PositiveInt | None = None
    tokens: PositiveInt = 256
    rows: PositiveInt = 16
    ranks: PositiveInt | None = None
    device: str = AUTO
    dtype: Literal["auto", "float32", "bfloat16"] = AUTO
    backend: Literal["inductor", "eager"] = "inductor"
    timeout_s: float = 600.0
    folder: str | None = None

    def __post_init__(self) -> None:
        check_tasks(self.tasks, self.shots)


def check_tasks(tasks: tuple[str, ...], shots: int = 0) -> None:
    """Refuse tasks that name no format, or no file for their shots.

    Raises:
        ConfigError: of all of them.
    """
    wrong = [] if tasks else ["tasks: name some, as tasks=[arc:FILE,gsm8k:FILE]."]
    for task in tasks:
        kind, *files = task.split(":")
        if kind not in FORMATS or not files or not files[0] or len(files) > 2:
            wrong.append(f"tasks={task}: expected FORMAT:FILE, with a format of {', '.join(FORMATS)}.")
        elif shots and kind != HARNESS and len(files) == 1:
            wrong.append(f"shots={shots}: {task} names no file of shots. Fix: {task}:FILE.")
    if wrong:
        raise ConfigError("\n  ".join(wrong))


COMMAND = Command(
    "evaluate",
    EvaluateConfig,
    "Measure a language model on public benchmarks, from files of yours. The same command again goes on "
    "where it was cut off.",
    {
        "python -m experiments.evaluate model=FOLDER tasks=[arc:test.jsonl,gsm8k:test.jsonl]": "two tasks",
        "python -m experiments.evaluate model=FOLDER tasks=[mmlu:anatomy_test.csv:anatomy_dev.csv] shots=5": (
            "each question after five that are answered"
        ),
        "python -m experiments.evaluate model=FOLDER tasks=[lm-eval:arc_easy]": "a task of lm-eval",
    },
    CONF / "evaluate",  # a group named "model", as the main job has, would take `model=`
)
