"""What fits where: Llama's shapes at many ranks, in the memory of common GPUs, and the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.memory.config import MemoryConfig
from experiments.memory.plans import LLAMA, MIXED, loss_of
from experiments.tables import markdown
from fnshard.errors import BudgetError
from fnshard.step.fit import Search

BUDGETS = {24: "a100", 80: "h100", 141: "h200"}  # GB, and whose speed the times are predicted for
SEARCHED_FOR = "h100"


def run(config: MemoryConfig, folder: Path) -> dict[str, Any]:
    """One search a model and number of ranks, asked for one budget after the other."""
    found: list[dict[str, Any]] = []
    for size in config.models:
        for ranks in config.ranks:
            began = time.perf_counter()
            search = make_search(size, ranks, config.large_rows, config.large_length)
            for gigabytes, hardware in BUDGETS.items():
                entry = {"model": size, "ranks": ranks, "gigabytes": gigabytes, "hardware": hardware}
                found.append({**entry, **_fit(search, gigabytes, hardware)})
            took = time.perf_counter() - began
            found[-1]["search_seconds"] = took
            print(f"... {size} on {ranks}: {len(search.seen)} plans in {took:.0f} s", flush=True)
            (folder / "so_far.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    return {"rows": config.large_rows, "length": config.large_length, "fits": found}


def make_search(size: str, ranks: int, rows: int, length: int) -> Search:
    """The plans of a model at so many ranks; traced here, once."""
    _, loss_fn, params = loss_of(replace(LLAMA[size], context=length))
    mesh = fs.make_mesh(shard=ranks, device="cpu", abstract=True)  # in name: it stands for accelerators
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    specs = fs.presets.full_shard(params, mesh, **MIXED)
    return Search(loss_fn, params, mesh, batch=(tokens, tokens), hardware=SEARCHED_FOR, specs=specs)


def _fit(search: Search, gigabytes: int, hardware: str) -> dict[str, Any]:
    try:
        plan = search.fit(int(gigabytes * 1e9))
    except BudgetError as error:
        return {"fits": False, "why": str(error)}
    timeline = plan.lowered.timeline(fs.Hardware.named(hardware))
    analysis = plan.lowered.memory_analysis()
    return {
        "fits": True,
        "plan": str(plan.chosen.choice),
        "peak_bytes": plan.peak_bytes,
        "host_bytes": analysis.host_bytes,
        "seconds": timeline.step_seconds,
        "mfu": timeline.mfu,
    }


def table(found: Mapping[str, Any]) -> str:
    """A line per model and number of ranks, a column per budget."""
    budgets = dict.fromkeys((e["gigabytes"], e["hardware"]) for e in found["fits"])
    rows = [["model", "ranks", *(f"{gb} GB ({gpu})" for gb, gpu in budgets)]]
    for model, ranks in dict.fromkeys((e["model"], e["ranks"]) for e in found["fits"]):
        mine = [e for e in found["fits"] if (e["model"], e["ranks"]) == (model, ranks)]
        rows.append([model, f"{ranks}", *(cell(e) for e in mine)])
    tokens = f"{found['rows']} x {found['length']}"
    return "\n".join([
        f"{tokens} tokens a rank and step; bf16 parameters and compute, fp32 master copy and moments, "
        "gradients sent in fp32. Peak on the device (and on a rank's host), step time, MFU; the plan.",
        "", markdown(rows),
    ])  # fmt: skip


def cell(entry: Mapping[str, Any]) -> str:
    if not entry["fits"]:
        return f"does not fit: {least(entry['why'])}"
    host = f" + {entry['host_bytes'] / 1e9:,.0f} on the host" if entry["host_bytes"] >= 5e8 else ""
    numbers = f"{entry['peak_bytes'] / 1e9:.1f} GB{host}, {entry['seconds']:.3g} s, {entry['mfu']:.0%}"
    return f"{numbers}<br>{short(entry['plan'])}"


def short(plan: str) -> str:
    """Of a plan what is not plain `full_shard`.

    >>> short("2 micro-batches, no remat, 3 units kept gathered")
    '2 micro-batches, 3 units kept gathered'
    >>> short("1 micro-batch, no remat, all resharded")
    'full_shard as it is'
    """
    plain = ("1 micro-batch", "no remat", "all resharded")
    return ", ".join(part for part in plan.split(", ") if part not in plain) or "full_shard as it is"


def least(why: str) -> str:
    """Of a refusal, the last line: what would do."""
    return why.splitlines()[-1].removeprefix("Fix: ")
