"""From what was measured to a table and a JSON file."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.bench.config import BenchConfig
from experiments.data.files import write_json
from experiments.tables import aligned, quartiles, ratio
from fnshard.analysis.hardware import Hardware, mfu

BASELINES = ("limit", "ddp", "fsdp2", "fsdp2_compiled")
RESULT = "bench.json"


def summarise(config: BenchConfig, measured: Mapping[str, Any]) -> dict[str, Any]:
    contenders = {name: _row(config, name, measured["contenders"]) for name in measured["contenders"]}
    return {
        "config": {**dataclasses.asdict(config), "contenders": list(config.contenders)},
        "model": {**dataclasses.asdict(config.model), "parameters": config.model.parameters},
        "machine": machine(config),
        **{key: value for key, value in measured.items() if key != "contenders"},
        "contenders": contenders,
    }


def machine(config: BenchConfig) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if config.device == "cuda" else platform.machine()
    return {"torch": torch.__version__, "python": platform.python_version(), "device": device}


def _row(config: BenchConfig, name: str, all_found: Mapping[str, Any]) -> dict[str, Any]:
    found = all_found[name]
    seconds = found["seconds"]
    typical = median(seconds)
    row = {
        "step_ms": 1e3 * typical,
        "step_ms_quartiles": [1e3 * q for q in quartiles(seconds)[::2]],
        "tokens_per_s": config.tokens / typical,
        "ratios": {
            base: ratio(seconds, all_found[base]["seconds"])
            for base in BASELINES
            if base in all_found and base != name
        },
        **{k: v for k, v in found.items() if k not in ("seconds", "losses")},
        "losses": found["losses"],
        "seconds": seconds,
    }
    known = Hardware.of_gpu(torch.cuda.get_device_name()) if config.device == "cuda" else None
    if known is not None:
        row["mfu"] = mfu(model_flops(config), typical, known.peak_flops[config.dtype.replace("fp", "f")])
    return row


def model_flops(config: BenchConfig) -> float:
    """Of one rank's step, as `fnshard.analysis.hardware.mfu` counts them."""
    return config.model.flops_per_token(config.length) * config.tokens / config.ranks


# ------------------------------------------------------------------ on screen


def table(result: Mapping[str, Any]) -> str:
    """One row a contender; below it what the columns mean."""
    contenders = result["contenders"]
    bases = [base for base in BASELINES if base in contenders]
    head = ["contender", "step ms", "quartiles", *(f"/ {base}" for base in bases), "tokens/s"]
    head += ["peak MB", "between MB", "first step s", "loss diff"]
    gpu = any("mfu" in row for row in contenders.values())
    rows = [head + ["MFU"] * gpu]
    for name, row in contenders.items():
        low, high = row["step_ms_quartiles"]
        cells = [name, f"{row['step_ms']:.1f}", f"{low:.1f} {high:.1f}"]
        cells += [f"{row['ratios'][base]:.2f}" if base in row["ratios"] else "1" for base in bases]
        cells += [f"{row['tokens_per_s']:,.0f}"]
        cells += [_mega(row.get("peak_bytes")), _mega(row.get("between_bytes")), f"{row['first_step_s']:.1f}"]
        cells += [f"{row['max_loss_difference']:.1e}" if "max_loss_difference" in row else "-"]
        rows.append(cells + ([f"{row['mfu']:.1%}"] if gpu else []))
    return "\n".join([title(result), "", *aligned(rows), *_notes(result)])


def title(result: Mapping[str, Any]) -> str:
    config, model = result["config"], result["model"]
    ranks = f"{config['ranks']} rank" + "s" * (config["ranks"] > 1)
    where = result["machine"]["device"] if config["device"] == "cuda" else "CPU, gloo, one thread each"
    wire = config["reduce"] or config["dtype"]
    return (
        f"{model['parameters'] / 1e6:.1f}M parameters, {config['dtype']}, gradients sent in {wire}; "
        f"{ranks} ({where}) x {config['rows']} x {config['length']} tokens; {config['rounds']} rounds"
    )


def _mega(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.0f}"


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = [
        "",
        "/ x: median over rounds of the step's time by x's. MB: live tensors of the fullest rank, transport",
        "slots counted in. first step: of fnshard only the first named compiles its kernels.",
        "loss diff: largest to an fp64 single-process reference.",
    ]
    if any("mfu" in row for row in result["contenders"].values()):
        notes.append("MFU: 6 N + 6 L T D FLOPs per token (causal attention) of the data sheet's dense peak.")
    before, after = result["load_average"]
    notes.append(f"load average before and after: {before:.1f}, {after:.1f}")
    for name, row in result["contenders"].items():
        if "phases" in row:
            notes += ["", *phase_table(name, row["phases"])]
    return notes


def phase_table(name: str, phases: Mapping[str, Any]) -> list[str]:
    """Where a step of fnshard goes, as rank 0 saw it."""
    inside = [f"{key} {ms:.1f}" for key, ms in phases["inside_ms"].items()]
    inside += [f"executor {phases['executor_ms']:.1f}"]
    lines = [f"{name}, a step of {phases['step_ms']:.1f} ms: {', '.join(inside)}; by instruction:"]
    rows = [[key, f"{ms:.2f}"] for key, ms in phases["lines_ms"].items()]
    rows.append(["outside of instructions", f"{phases['outside_lines_ms']:.2f}"])
    return lines + [f"  {line}" for line in aligned(rows)]


def write(result: Mapping[str, Any], folder: Path) -> Path:
    path = folder / RESULT
    write_json(path, result)
    (folder / "bench.txt").write_text(table(result) + "\n", encoding="utf-8")
    return path
