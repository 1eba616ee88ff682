"""The configuration of an evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from experiments.evaluate.tasks import check_tasks
from experiments.lib.checks import configuration
from experiments.lib.compose import CONF, Command
from experiments.lib.config import AUTO


@configuration
class EvaluateConfig:
    """The model, the tasks and how to measure.

    `model` is a directory, as in `experiments.finetune`. `tasks` are FORMAT:FILE or FORMAT:FILE:FILE, where
    the second file has solved examples. The first `shots` of them that have the question's subject, and are
    not that question itself, are put before it. A task may also be lm-eval:NAME, one of the package lm-eval
    by its name or its YAML file.

    `limit` is the most questions of a task, and `tokens` the most tokens of a generated answer. `rows` are
    the rows of text that a rank computes at once. `ranks` are processes that share the work and the weights
    (null: two on a CPU, or as many as there are GPUs). `device` is the type of device on which they compute,
    such as cpu or cuda (auto: the accelerator of this machine, or the CPU if it has none). `dtype` is that of
    compute (auto: float32 on a CPU, else bfloat16), and `backend` that of `fs.shard_forward`. A rank waits
    for the others for `timeout_s` seconds at most. `folder` keeps answers, and those that are there are not
    computed again (null: a folder below outputs/evaluate by model, tasks and settings).
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
        "python -m experiments.evaluate model=FOLDER tasks=[mmmu:validation.parquet]": (
            "questions with images, for a model that sees"
        ),
        "python -m experiments.evaluate model=FOLDER tasks=[lm-eval:arc_easy]": "a task of lm-eval",
    },
    CONF / "evaluate",  # a group "model", such as the main job's, would take `model=`
)
