"""What fnshard has promised itself of memory, measured on this machine, with the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.configs.decoders import decoder
from experiments.memory.config import MemoryConfig
from experiments.memory.measured import measure, mega, setting, step_ratio
from experiments.memory.plans import DDP, MemoryJob, MemoryPlan
from experiments.tables import markdown

PLAIN = MemoryPlan("none")
OFFLOADED = MemoryPlan("optimizer on the host", optimizer_memory="host")
ALL_OFFLOADED = replace(OFFLOADED, name="parameters too", memory="host")
FITTED = MemoryPlan("fit", fit_share=0.4)
Row = tuple[str, float, float]  # what, measured, at most


def jobs(config: MemoryConfig) -> dict[str, MemoryJob]:
    job = MemoryJob(config.model, (PLAIN,), 2, config.rows, config.length, config.rounds, config.backend)
    small = decoder("5m") if config.size == "25m" else config.model
    few = replace(job, rows=min(2, job.rows), length=min(256, job.length))
    return {
        "remat": replace(job, steps=2, plans=(PLAIN, MemoryPlan("unit", remat="unit"))),
        "offload": replace(few, plans=(PLAIN, OFFLOADED, ALL_OFFLOADED), rounds=3 * job.rounds),
        "resident": replace(
            few, model=small, ranks=4, rounds=0,
            plans=(MemoryPlan(DDP, DDP), MemoryPlan("no_shard", "no_shard"), MemoryPlan("full_shard")),
        ),
        "fit": replace(job, plans=(PLAIN, FITTED), steps=2, rounds=0, length=min(256, job.length)),
    }  # fmt: skip


def run(config: MemoryConfig, folder: Path) -> dict[str, Any]:
    todo = jobs(config)
    return {"found": {n: measure(todo[n], folder / n, config.timeout_s) for n in config.targets}}


def table(found: Mapping[str, Any]) -> str:
    """A verdict a line, then each measurement."""
    rows, parts = [["target", "measured", "at most", ""]], []
    for name, seen in found["found"].items():
        for what, got, most in VERDICTS[name](seen):
            rows.append([what, f"{got:.3g}", f"{most:g}", "met" if got <= most else "**missed**"])
        parts += ["", f"{name}: {setting(seen)}.", "", _plans(seen)]
        parts += ["", "```", seen["plans"]["fit"]["fit_text"], "```"] if name == "fit" else []
    return "\n".join([markdown(rows), *parts])


def _plans(seen: Mapping[str, Any]) -> str:
    rows = [["MB", "peak", "predicted", "between steps", "predicted", "optimizer on device", "step s"]]
    for name, plan in seen["plans"].items():
        predicted = plan.get("predicted")
        times = sorted(plan["seconds"])
        rows.append([
            name, mega(plan["peak_bytes"]), mega(predicted["peak_bytes"]) if predicted else "-",
            mega(plan["between_bytes"]), mega(predicted["resident_bytes"]) if predicted else "-",
            mega(plan["optimizer_device_bytes"]) if predicted else "-",
            f"{times[len(times) // 2]:.2f}" if times else "-",
        ])  # fmt: skip
    return markdown(rows)


def _remat(seen: Mapping[str, Any]) -> list[Row]:
    peaks = {n: p["peak_bytes"] for n, p in seen["plans"].items()}
    rows = [("remat='unit': peak of none's", peaks["unit"] / peaks["none"], 0.55)]
    return rows + _time(seen, "unit", "remat='unit': step time of none's", 1.35)


def _offload(seen: Mapping[str, Any]) -> list[Row]:
    rows = []
    for plan in (OFFLOADED, ALL_OFFLOADED):
        size = seen["plans"][plan.name]["optimizer_device_bytes"]
        rows.append((f"offload, {plan.name}: optimizer bytes on the device", float(size), 0.0))
        rows += _time(seen, plan.name, f"offload, {plan.name}: step time of none's", 1.5)
    return rows


def _time(seen: Mapping[str, Any], name: str, what: str, most: float) -> list[Row]:
    return [(what, step_ratio(seen, name, "none"), most)] if seen["plans"][name]["seconds"] else []


def _resident(seen: Mapping[str, Any]) -> list[Row]:
    rest = {n: p["between_bytes"] for n, p in seen["plans"].items()}
    return [("full_shard on 4 ranks: bytes at rest of DDP's", rest["full_shard"] / rest[DDP], 0.27)]


def _fit(seen: Mapping[str, Any]) -> list[Row]:
    plans = seen["plans"]
    return [
        (
            "fit within 0.4 of full_shard's predicted peak: measured peak of the budget",
            plans["fit"]["peak_bytes"] / plans["fit"]["budget_bytes"],
            1.0,
        ),
        (
            "fit: measured peak of full_shard's measured",
            plans["fit"]["peak_bytes"] / plans["none"]["peak_bytes"],
            0.4,
        ),
    ]


VERDICTS: dict[str, Callable[[Mapping[str, Any]], list[Row]]] = {
    "remat": _remat,
    "offload": _offload,
    "resident": _resident,
    "fit": _fit,
}
