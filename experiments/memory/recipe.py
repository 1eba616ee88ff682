"""LitGPT's recipe over its default: block wrap, block remat, bf16, CPU offload, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.memory.config import MemoryConfig
from experiments.memory.measured import giga, measure, mega, setting, step_ratio
from experiments.memory.plans import LLAMA, MemoryJob, MemoryPlan, on_paper
from experiments.tables import markdown

DEFAULT = MemoryPlan("default", one_unit=True)
RANKS, LARGE_RANKS, LARGE_ROWS, LARGE_LENGTH = 2, 8, 1, 4096


def plans() -> tuple[MemoryPlan, ...]:
    """The default (sharded as one unit, fp32, everything kept, on the device), and the ingredients added."""
    wrapped = replace(DEFAULT, name="+ block wrap", one_unit=False)
    recomputed = replace(wrapped, name="+ block remat", remat="unit")
    halved = replace(recomputed, name="+ bf16", dtype="bfloat16")
    return (
        DEFAULT,
        wrapped,
        recomputed,
        halved,
        replace(halved, name="+ CPU offload", memory="host", optimizer_memory="host"),
    )


def run(config: MemoryConfig, folder: Path) -> dict[str, Any]:
    """Measured here, and on paper for a large model on eight ranks."""
    chosen = plans()
    job = MemoryJob(config.model, chosen, RANKS, config.rows, config.length, config.rounds, config.backend)
    measured = measure(replace(job, steps=2, pictures=True), folder, config.timeout_s)
    paper = {}
    for plan in chosen:
        lowered = on_paper(plan, LLAMA[config.large], LARGE_RANKS, LARGE_ROWS, LARGE_LENGTH)
        paper[plan.name] = lowered.memory_analysis().peak_bytes
        if plan in (chosen[0], chosen[-1]):
            fs.plot.memory(lowered, folder / f"{config.large}_{'before' if plan == DEFAULT else 'after'}.png")
    return {"large": config.large, "measured": measured, "paper": paper}


def table(found: Mapping[str, Any]) -> str:
    """A line an ingredient: the peak with it, what it saved, its share of all that was saved."""
    seen = found["measured"]
    names = list(seen["plans"])
    peaks = [seen["plans"][n]["peak_bytes"] for n in names]
    saved = peaks[0] - peaks[-1]
    head = ["", "peak MB", "of default", "saved MB", "share of saving", "predicted MB", "off", "step"]
    rows = [[*head, f"{found['large']} on paper, GB"]]
    for at, name in enumerate(names):
        plan = seen["plans"][name]
        less = peaks[at - 1] - peaks[at] if at else 0
        predicted = plan["predicted"]["peak_bytes"]
        time = f"{step_ratio(seen, name, names[0]):.2f}" if plan["seconds"] else "-"
        rows.append([
            name, mega(peaks[at]), f"{peaks[at] / peaks[0]:.2f}", mega(less) if at else "-",
            f"{less / saved:.0%}" if at else "-", mega(predicted), f"{predicted / peaks[at] - 1:+.1%}", time,
            giga(found["paper"][name]),
        ])  # fmt: skip
    on_paper_saved = 1 - found["paper"][names[-1]] / found["paper"][names[0]]
    return "\n".join([
        f"Measured: {setting(seen)}. Peak: live tensors of the fullest rank, transport slots counted in. "
        "Step: time over the default's, median over rounds.", "", markdown(rows), "",
        f"The whole recipe saves {saved / peaks[0]:.0%} of the default's peak here, {on_paper_saved:.0%} on "
        f"paper for {found['large']} on {LARGE_RANKS} ranks x {LARGE_ROWS} x {LARGE_LENGTH} tokens.",
    ])  # fmt: skip
