"""An evaluation: what the command does, and what each of its ranks does."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import fnshard as fs
from experiments import python_path
from experiments.configs.machine import CPU_RANKS
from experiments.configs.train import AUTO, ConfigError
from experiments.data.files import append, read_json, write_json, write_text
from experiments.data.tokenizer import open_directory
from experiments.evaluate.config import HARNESS, EvaluateConfig
from experiments.evaluate.scorer import Scorer
from experiments.evaluate.tasks import Task, task_of
from experiments.finetune.lm import from_directory

RESULTS, OF = "results.json", "of.json"


def evaluate(config: EvaluateConfig, folder: Path) -> None:
    """Measure a model on ranks of its own; print a table and leave it in a folder, next to all answers.

    Raises:
        ConfigError: a model, or a task's file, that cannot be read; a folder with answers of something else.
        LaunchError: a rank failed.
    """
    from experiments.finetune.base_models import directory_of_model

    config = replace(config, model=str(directory_of_model(config.model)))
    tasks = [_read(config, text) for text in config.tasks]
    device = config.device if config.device != AUTO else "cuda" if torch.cuda.is_available() else "cpu"
    there = CPU_RANKS if device == "cpu" else torch.accelerator.device_count()
    config = replace(config, device=device, ranks=config.ranks or there)
    of = {"model": _files_of(config.model), "shots": config.shots, "tokens": config.tokens, "tasks": tasks}
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]
    place = Path(config.folder or folder.parents[1] / key)
    place.mkdir(parents=True, exist_ok=True)
    if read_json(place / OF).get("key", key) != key:
        raise ConfigError(f"folder={place}: its answers are of another model, task or setting.")
    write_json(place / OF, {"key": key, **asdict(config)})
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    fs.launch(
        on_rank, ranks=config.ranks, args=(config, str(place)), logs=place / "ranks",
        env={"PYTHONPATH": python_path(), **threads},
    )  # fmt: skip
    print(f"\n{read_json(place / RESULTS)['table']}\n\nresults: {place}", flush=True)


def _read(config: EvaluateConfig, text: str) -> str:
    """What answers to a task depend on: its questions."""
    if text.startswith(f"{HARNESS}:"):
        return text
    questions = task_of(text, config.shots, config.limit).questions
    return hashlib.sha256(repr(questions).encode()).hexdigest()


def _files_of(model: str) -> list[tuple[str, int, int]]:
    found = [*sorted(Path(model).glob("*.safetensors")), Path(model, "config.json")]
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in found]


def on_rank(config: EvaluateConfig, folder: str) -> None:
    """Answer this rank's part; rank 0 writes the results."""
    mesh = fs.make_mesh(shard=-1, device=config.device)
    scorer, blocks = scorer_of(config, mesh)
    barrier = scorer.forward(lambda params: 0).gather_strings
    place, found = Path(folder), {}
    for number, text in enumerate(config.tasks):
        if text.startswith(f"{HARNESS}:"):
            from experiments.evaluate.harness import harness_results

            found |= harness_results(text.partition(":")[2], scorer, blocks, config)
            continue
        task = task_of(text, config.shots, config.limit)
        answers = place / f"{number}-{task.name}"
        answers.mkdir(exist_ok=True)
        known = answered(answers)
        barrier("")  # no rank writes before all have read
        if mesh.rank == 0:
            before = f", {len(known)} of them answered before" if known else ""
            print(f"{task.name}: {len(task.questions)} questions{before}", flush=True)
        mine = answers / f"{mesh.rank}.jsonl"
        append(mine, "\n")  # after a line that a kill has cut short
        for question, result in scorer.results(blocks, task, set(known)):
            append(mine, json.dumps({"question": question, **result}) + "\n")
        barrier("")
        found |= summary(task, answered(answers))
    if mesh.rank == 0:
        write_json(place / RESULTS, {"results": found, "table": table(found)})
        write_text(place / "results.txt", table(found) + "\n")


def scorer_of(config: EvaluateConfig, mesh: fs.Mesh) -> tuple[Scorer, Any]:
    """A model directory as a scorer and this rank's blocks of its leaves."""
    fast = torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    dtype = fast if config.dtype == AUTO else getattr(torch, config.dtype)
    lm, tokenizer = from_directory(config.model, dtype), open_directory(config.model)
    specs = fs.presets.full_shard(lm.params, mesh)
    blocks = fs.hf.load(config.model, specs, mesh, model=lm.model)

    def forward(fn: Any) -> Any:
        return fs.shard_forward(fn, specs, mesh=mesh, backend=config.backend, timeout=config.timeout_s)

    return Scorer(lm, tokenizer, mesh, forward, config.rows, config.tokens), blocks


def answered(folder: Path) -> dict[int, dict[str, Any]]:
    """Results by question, of all ranks; a line that a kill has cut short is none."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                result = json.loads(line)
            except ValueError:
                continue
            found[result.pop("question")] = result
    return found


def summary(task: Task, results: dict[int, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """`{task/metric: {value, stderr, questions}}`; the standard error is the sample's, by sqrt(questions)."""
    out = {}
    for metric in task.metrics:
        values = [result[metric] for result in results.values()]
        spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        out[f"{task.name}/{metric}"] = {"value": fmean(values), "stderr": spread, "questions": len(values)}
    return out


def table(found: dict[str, dict[str, float]]) -> str:
    """A line for each metric.

    >>> print(table({"arc/acc": {"value": 0.5, "stderr": 0.05, "questions": 100}}))
    task/metric  value  std err  questions
    arc/acc      0.500  0.0500   100
    """
    rows = [("task/metric", "value", "std err", "questions")]
    rows += [(n, f"{v['value']:.3f}", f"{v['stderr']:.4f}", str(v["questions"])) for n, v in found.items()]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)
