"""An evaluation: the work of the command, and that of each of its ranks."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import fnshard as fs
from experiments import python_path
from experiments.data.tokenizer import open_directory
from experiments.evaluate.config import EvaluateConfig
from experiments.evaluate.harness import check_harness, harness_results
from experiments.evaluate.scorer import Scorer, find_misfits
from experiments.evaluate.tasks import HARNESS, Task, read_tasks
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.config import AUTO
from experiments.lib.files import (
    SUM,
    UNREADABLE,
    DamagedError,
    append,
    checksum,
    read_json,
    read_record,
    write_json,
    write_record,
    write_text,
)
from experiments.lib.launch import CPU_RANKS, device_of, find_accelerators
from experiments.tuning.lm import from_directory
from experiments.tuning.model_directory import find_directory, open_model

RESULTS, OF = "results.json", "of.json"
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")  # weights, and those of a tokenizer


def evaluate(config: EvaluateConfig, folder: Path) -> None:
    """Measure a model on ranks of its own. Print a table, and write it next to all answers.

    Args:
        folder: the command's own folder. The results go to `config.folder`; by default to a folder two
            levels above, whose name is the key of the evaluation.

    Raises:
        ConfigError: the device is missing; the model or files of tasks cannot be read (one error names all);
            or the folder has answers of another evaluation.
        MissingExtraError: a task is of lm-eval, which is not installed.
        LaunchError: a rank failed.
    """
    # Fill in what depends on this machine.
    accelerators = find_accelerators()
    device = device_of("device", config.device, accelerators)
    most = accelerators.get(device)
    if most is not None and (config.ranks or most) > most:
        raise ConfigError(f"ranks={config.ranks}: this machine has {most} of {device}. Fix: ranks=null.")
    fast = "float32" if device == "cpu" else "bfloat16"
    config = replace(
        config, model=str(find_directory(config.model)), device=device,
        dtype=fast if config.dtype == AUTO else config.dtype, ranks=config.ranks or most or CPU_RANKS,
    )  # fmt: skip

    # Model and tasks are opened here, so that all mistakes show before ranks start.
    own = [text for text in config.tasks if not text.startswith(f"{HARNESS}:")]
    wrong: list[str] = []
    if len(own) < len(config.tasks):
        check_harness()
    tasks = attempt(partial(read_tasks, own, config.shots, config.limit), wrong)
    opened = attempt(partial(open_model, config.model), wrong)
    if not wrong:
        for task in tasks:
            wrong += find_misfits(task, *opened, config.tokens)
    if wrong:
        raise ConfigError("\n".join(wrong))

    # The folder's key has everything that answers depend on: the model with its tokenizer, the settings, and
    # the questions as they are asked.
    asked = [task.digest for task in tasks]
    asked += [text for text in config.tasks if text not in own]
    files = sorted(path for path in Path(config.model).iterdir() if path.suffix in MODEL_FILES)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    of = {
        "model": stats, "dtype": config.dtype, "shots": config.shots, "tokens": config.tokens, "tasks": asked,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]

    # Take the folder, unless it has answers of something else.
    place = Path(config.folder or folder.parents[1] / key)
    place.mkdir(parents=True, exist_ok=True)
    try:
        before = read_record(place / OF) or {}
    except DamagedError as error:
        raise ConfigError(f"{error} Fix: another folder, or delete {place}.") from None
    has_answers = any(place.glob("*/*.jsonl"))  # without a record it is not known what they answer
    if before.get("key", None if has_answers else key) != key:
        raise ConfigError(
            f"folder={place}: its answers are of another model, task or setting. Fix: another folder."
        )
    write_record(place / OF, {"key": key, **asdict(config)})

    # The ranks answer what is not answered yet (`on_rank`).
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    fs.launch(
        on_rank, ranks=config.ranks, args=(config, str(place)), logs=place / "ranks",
        env={"PYTHONPATH": python_path(), **threads},
    )  # fmt: skip
    print(f"\n{read_json(place / RESULTS)['table']}\n\nresults: {place}", flush=True)


def on_rank(config: EvaluateConfig, folder: str) -> None:
    """Answer this rank's part of the questions. Rank 0 writes the results."""
    mesh = fs.make_mesh(shard=-1, device=config.device)
    scorer, blocks = make_scorer(config, mesh)
    barrier = scorer.forward(lambda params: 0).gather_strings  # ranks of any program meet there
    place, found = Path(folder), {}
    own = [text for text in config.tasks if not text.startswith(f"{HARNESS}:")]
    tasks = dict(zip(own, read_tasks(own, config.shots, config.limit), strict=True))

    # lm-eval runs its own tasks. In other tasks a rank answers its part of the questions without an answer.
    for number, text in enumerate(config.tasks):
        if text.startswith(f"{HARNESS}:"):
            found |= harness_results(text.partition(":")[2], scorer, blocks, config)
            continue
        task = tasks[text]
        answers = place / f"{number}-{Path(task.name).name}"
        answers.mkdir(exist_ok=True)
        known = read_answers(answers, task)
        barrier("")  # no rank writes before all have read
        if mesh.rank == 0:
            more = f", {len(known)} of them answered before" if known else ""
            more += f"; {task.left_out} open ones are left out" if task.left_out else ""
            print(f"{task.name}: {len(task.questions)} questions{more}", flush=True)
        mine = answers / f"{mesh.rank}.jsonl"
        append(mine, "\n")  # after a line that a kill has cut short
        for question, result in scorer.results(blocks, task, set(known)):
            values = {"question": question, **result}
            append(mine, json.dumps({**values, SUM: checksum(values)}) + "\n")
        barrier("")
        found |= summarise(task, read_answers(answers, task))
    if mesh.rank == 0:
        write_json(place / RESULTS, {"results": found, "table": format_table(found)})
        write_text(place / "results.txt", format_table(found) + "\n")


def make_scorer(config: EvaluateConfig, mesh: fs.Mesh) -> tuple[Scorer, Any]:
    """Open a model directory as a scorer, with this rank's blocks of its leaves."""
    lm = from_directory(config.model, getattr(torch, config.dtype))
    tokenizer = open_directory(config.model)
    specs = fs.presets.full_shard(lm.params, mesh)
    blocks = fs.hf.load(config.model, specs, mesh, model=lm.model)

    def forward(fn: Any) -> Any:
        return fs.shard_forward(fn, specs, mesh=mesh, backend=config.backend, timeout=config.timeout_s)

    return Scorer(lm, tokenizer, mesh, forward, config.rows, config.tokens), blocks


def read_answers(folder: Path, task: Task) -> dict[int, dict[str, Any]]:
    """Read the results of all ranks, by question.

    A line that a kill has cut short, that is not what was written, or that is no result of the task is passed
    over, so that its question is asked again.
    """
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                result = json.loads(line)
                if result.pop(SUM) != checksum(result):
                    continue
                number = result.pop("question")
                whole = all(result[metric] in (0, 1) for metric in task.metrics)
            except (*UNREADABLE, AttributeError, KeyError, TypeError):
                continue
            if whole and type(number) is int and 0 <= number < len(task.questions):
                found[number] = result
    return found


def summarise(task: Task, results: dict[int, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return `{task/metric: {value, stderr, questions}}`, where `stderr` is the sample's standard deviation
    divided by sqrt(questions)."""
    out = {}
    for metric in task.metrics:
        values = [result[metric] for result in results.values()]
        spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        out[f"{task.name}/{metric}"] = {"value": fmean(values), "stderr": spread, "questions": len(values)}
    return out


def format_table(found: dict[str, dict[str, float]]) -> str:
    """Return a table with a line for each metric.

    >>> print(format_table({"arc/acc": {"value": 0.5, "stderr": 0.05, "questions": 100}}))
    task/metric  value  std err  questions
    arc/acc      0.500  0.0500   100
    """
    rows = [("task/metric", "value", "std err", "questions")]
    rows += [(n, f"{v['value']:.3f}", f"{v['stderr']:.4f}", str(v["questions"])) for n, v in found.items()]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)
