"""ZeRO 1, 2 and 3 against DDP: bytes at rest and at the peak, on paper and measured; tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.memory.config import MemoryConfig
from experiments.memory.measured import giga, measure, mega, setting
from experiments.memory.plans import DDP, LLAMA, MemoryJob, MemoryPlan, on_paper
from experiments.tables import markdown
from fnshard.plot.pictures import COLOURS

LEVELS = {"no_shard": "DDP", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}
ROWS, LENGTH = 1, 2048  # of a rank's batch on paper
BF16 = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def run(config: MemoryConfig, folder: Path) -> dict[str, Any]:
    """Lower every level for every world, then measure those worlds that this machine can hold."""
    paper = {
        str(world): {preset: _paper(preset, config.large, world) for preset in LEVELS}
        for world in config.worlds
    }
    bars(
        {LEVELS[p]: [paper[str(w)][p] for w in config.worlds] for p in LEVELS},
        [str(w) for w in config.worlds],
        folder / "zero.png",
    )
    plans = (MemoryPlan(DDP, DDP), *(MemoryPlan(preset, preset, clip=True) for preset in LEVELS))
    measured = {}
    for world in config.measured_worlds:
        job = MemoryJob(config.model, plans, world, config.rows, config.length, config.rounds, config.backend)
        measured[str(world)] = measure(job, folder / f"world{world}", config.timeout_s)
    return {"large": config.large, "paper": paper, "measured": measured}


def _paper(preset: str, size: str, world: int) -> dict[str, int]:
    plan = MemoryPlan(preset, preset, clip=True)
    analysis = on_paper(plan, LLAMA[size], world, ROWS, LENGTH, **BF16).memory_analysis()
    return {"resident_bytes": analysis.resident_bytes, "peak_bytes": analysis.peak_bytes}


def table(found: Mapping[str, Any]) -> str:
    """What is on paper, then what was measured beside what was predicted for it."""
    worlds = list(found["paper"])
    model = LLAMA[found["large"]]
    rows = [["GB at rest / at the peak", *(f"{w} ranks" for w in worlds)]]
    for preset, name in LEVELS.items():
        cells = [found["paper"][w][preset] for w in worlds]
        rows.append([name, *(f"{giga(c['resident_bytes'])} / {giga(c['peak_bytes'])}" for c in cells)])
    out = [
        f"On paper: {model.parameters / 1e9:.2f}B parameters, {ROWS} x {LENGTH} tokens a rank, fp32 state, "
        "bf16 compute, gradients clipped, no remat.",
        "",
        markdown(rows),
    ]
    for seen in found["measured"].values():
        out += ["", f"Measured: {setting(seen)}.", "", _measured(seen)]
    return "\n".join(out)


def _measured(seen: Mapping[str, Any]) -> str:
    plans = seen["plans"]
    base = plans[DDP]
    rows = [["MB", "at rest", "of DDP's", "at the peak", "of DDP's", "predicted rest", "predicted peak"]]
    for name, got in plans.items():
        predicted = got.get("predicted")
        rows.append([
            "DDP, torch's" if name == DDP else f"fnshard, {LEVELS[name]}",
            mega(got["between_bytes"]), f"{got['between_bytes'] / base['between_bytes']:.2f}",
            mega(got["peak_bytes"]), f"{got['peak_bytes'] / base['peak_bytes']:.2f}",
            *(mega(predicted[n]) if predicted else "-" for n in ("resident_bytes", "peak_bytes")),
        ])  # fmt: skip
    return markdown(rows)


def bars(levels: Mapping[str, Sequence[Mapping[str, int]]], worlds: Sequence[str], path: Path) -> None:
    """A group of bars for each number of ranks, a bar for each level: at rest, and above it the peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(levels)
    for place, (name, found) in enumerate(levels.items()):
        at = [i + (place - (len(levels) - 1) / 2) * width for i in range(len(worlds))]
        rest = [each["resident_bytes"] / 1e9 for each in found]
        peak = [each["peak_bytes"] / 1e9 for each in found]
        axes.bar(at, peak, 0.92 * width, color=COLOURS[place], alpha=0.35)
        axes.bar(at, rest, 0.92 * width, color=COLOURS[place], label=name)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set(xlabel="ranks", ylabel="GB on each (pale: at the peak)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
