"""The case `budget`: measure the padding and the speed of fine-tuning on records of uneven lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments import finetune
from experiments.bases import write_base
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, interleave, say
from experiments.lib.compose import compose
from experiments.lib.files import write_lines
from experiments.lib.launch import fit_to_machine

RECORDS, LONGEST, POSITIONS = 600, 480, 4096  # characters of the longest response; positions of every step
COMMON = ("method=full", "data.context=512", "run.device=cpu", "mesh.shard=1", "run.sample_tokens=0")
# How the rows of a step are made. A padded pair takes two rows.
WAYS: Mapping[str, tuple[str, ...]] = {
    "sft, a row each": ("data.pack=false", "data.rows=8"),
    "sft, packed rows of data.context": ("data.rows=8",),
    "sft, data.tokens=4096": ("data.tokens=4096", "data.rows=1"),
    "sft, data.tokens=1024": ("data.tokens=1024", "data.rows=4"),
    "dpo, a row each": ("objective=dpo", "data.rows=4"),
    "dpo, data.tokens=4096": ("objective=dpo", "data.tokens=4096", "data.rows=1"),
    "dpo, data.tokens=1024": ("objective=dpo", "data.tokens=1024", "data.rows=4"),
}


def run(config: BenchConfig, folder: Path) -> Result:
    """How many positions are padding, and how many tokens a second are learned, by how rows are made?

    All ways make steps of some 4,096 positions. Tokens are those of records, without padding.
    """
    # Build the job in each way, and make a step, which compiles.
    folder.mkdir(parents=True, exist_ok=True)
    model, files = folder / "model", write_records(folder)
    if not model.exists():
        write_base("tiny", model)
    works: dict[str, Callable[[], None]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, way in WAYS.items():
        say(f"building {name}")
        data = files["pairs" if name.startswith("dpo") else "samples"]
        words = [f"model={model}", f"data.train={data}", f"run.backend={config.backend}", *COMMON, *way]
        composed = fit_to_machine(compose(finetune.COMMAND, words).config)
        parts = finetune.build(finetune.prepare(composed))
        works[name] = make_stepper(parts)
        works[name]()
        rows = parts.data.rows
        lowered = parts.step.lower(parts.planned.tuning.params, parts.batch)
        found[name] = {
            "padding": 1 - int(rows.record_lengths.sum()) / (rows.count * rows.positions),
            "positions": parts.tokens,
            "predicted_peak_bytes": lowered.memory_analysis().peak_bytes,
        }

    # Time their steps.
    say(f"{config.rounds} rounds of {', '.join(works)}")
    table = [["", "padding", "tokens/s", "step ms", "predicted peak MB"]]
    for name, seconds in interleave(works, config.rounds, seed=config.seed).items():
        each = found[name]
        each |= {
            "seconds": seconds,
            "tokens_per_s": each["positions"] * (1 - each["padding"]) / median(seconds),
        }
        cells = [f"{each['tokens_per_s']:.0f}", f"{1e3 * median(seconds):.0f}"]
        table.append([name, f"{each['padding']:.1%}", *cells, f"{each['predicted_peak_bytes'] / 1e6:.0f}"])
    return Result(table, values={"ways": found})


def write_records(folder: Path) -> dict[str, Path]:
    """Write samples and pairs whose lengths are spread like those of instructions: most are short."""
    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(4.0, 0.9, RECORDS), 6, LONGEST).astype(int)

    def text(size: int) -> str:
        return "".join(chr(97 + letter) for letter in random.integers(0, 26, size))

    records = [(f"q: {text(8)}", text(size), text(max(4, size // 2))) for size in sizes]
    samples = [{"prompt": prompt, "response": answer} for prompt, answer, _ in records]
    pairs = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in records]
    return {
        "samples": write_lines(folder / "samples.jsonl", samples),
        "pairs": write_lines(folder / "pairs.jsonl", pairs),
    }


def make_stepper(parts: finetune.Parts) -> Callable[[], None]:
    """Make a function that makes the next step, and waits for its loss."""
    state, loader = parts.make_state(), parts.make_loader()

    def step() -> None:
        nonlocal state
        state, metrics = parts.step(state, *next(loader))
        float(metrics["loss"])

    return step
