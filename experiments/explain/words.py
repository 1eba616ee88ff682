"""Words: what is known of a step on paper, in plain text; the page has the same rows and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.configs.train import AUTO
from experiments.explain.config import PER_PARAMETER
from experiments.explain.paper import Paper
from fnshard import plot
from fnshard.analysis.tables import columns
from fnshard.compiler.ir.program import short_dtype
from fnshard.plot.scales import byte_text, digits, time_text

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path
BIG = ((1e15, "e15"), (1e12, "e12"), (1e9, "e9"), (1e6, "e6"))
Table = Sequence[Sequence[str]]  # its first row is the head


def big(value: float) -> str:
    """A count in few digits.

    >>> big(70_553_706_496), big(4096)
    ('70.55e9', '4,096')
    """
    least, power = next(((n, p) for n, p in BIG if value >= n), (1.0, ""))
    return f"{digits(value / least)}{power}"


def summary(paper: Paper) -> dict[str, str]:
    """What most people ask, a line each."""
    config, time = paper.config, paper.timeline
    model, each = config.model, paper.timeline.model_flops * config.ranks / max(paper.tokens_per_step, 1)
    rows = config.rows * config.mesh.data_ranks
    nodes = -(-config.ranks // paper.hardware.ranks_per_node)
    return {
        "model": f"{model.layers} layers of width {model.width:,}, vocabulary {model.vocab:,}, "
        f"context {model.context:,}",
        "parameters": f"{model.parameters:,}",
        "FLOPs per token": f"{big(each)} forward and backward, {_again(paper)} recomputed",
        "mesh": f"{paper.mesh}: {config.ranks:,} × {paper.hardware.name}, {nodes:,} "
        f"node{'s' if nodes > 1 else ''} of {min(paper.hardware.ranks_per_node, config.ranks)}",
        "batch": f"{rows:,} rows, {big(paper.tokens_per_step)} tokens a step; "
        f"{config.rows} row{'s' if config.rows > 1 else ''} a rank{_micro(paper)}",
        "plan": plan_line(paper),
        "peak memory": fits_line(paper),
        "between steps": _resting(paper),
        "sent": f"{byte_text(paper.traffic.sent_bytes)} by each rank in a step{_moved(paper)}",
        "step time": f"{time_text(time.step_seconds)}, MFU {time.mfu:.1%}{_waits(paper)}",
        "speed": f"{big(paper.tokens_per_day)} tokens a day, "
        f"{big(paper.tokens_per_day / 86_400 / config.ranks)} a second on each rank",
        "training": _training(paper),
    }


def _again(paper: Paper) -> str:
    share = paper.timeline.hardware_flops / max(paper.timeline.model_flops, 1) - 1
    return f"{share:.1%} more" if share >= 5e-4 else "nothing"


def _micro(paper: Paper) -> str:
    count = paper.options["accumulate"]
    return f" in {count} micro-batches" if count > 1 else ""


def _waits(paper: Paper) -> str:
    waits = {
        "collectives": paper.timeline.exposed_communication_seconds,
        "transfers": paper.timeline.exposed_transfer_seconds,
    }
    parts = [f"{time_text(seconds)} for {what}" for what, seconds in waits.items() if seconds >= 5e-7]
    return f"; compute waits {' and '.join(parts)}" if parts else ""


def _resting(paper: Paper) -> str:
    memory = paper.memory
    tiers = {"host": memory.host_resident_bytes, "disk": memory.disk_resident_bytes}
    parts = [f"{byte_text(memory.resident_bytes)} on the device"]
    return ", ".join(parts + [f"{byte_text(n)} on the {tier}" for tier, n in tiers.items() if n])


def _moved(paper: Paper) -> str:
    moved = {"to": paper.traffic.to_device_bytes, "from": paper.traffic.to_host_bytes}
    parts = [f"{byte_text(n)} {way} the device" for way, n in moved.items() if n]
    return f"; over the host link {' and '.join(parts)}" if parts else ""


def _training(paper: Paper) -> str:
    config = paper.config
    text = f"{big(config.budget)} tokens"
    text += "" if config.tokens else f" ({PER_PARAMETER} a parameter)"
    days = config.budget / paper.tokens_per_day
    text += f": {digits(days)} days" if days >= 2 else f": {digits(24 * days)} hours"
    text += f", {big(paper.device_hours)} device hours"
    cost = paper.cost
    return text if cost is None else f"{text}, ${big(cost)} at ${config.hardware.price_per_hour:g} an hour"


def plan_line(paper: Paper) -> str:
    config, options = paper.config, paper.options
    if paper.found is not None:
        return f"strategy=auto: {paper.found.chosen.choice}"
    strategy, dtypes = config.strategy, config.precision
    parts = [strategy.name, f"remat={strategy.remat!r}" if strategy.remat != "none" else "no remat"]
    parts += [
        f"{name.replace('_', ' ')} on the {tier}"
        for name, tier in (("memory", strategy.memory), ("optimizer_memory", strategy.optimizer_memory))
        if tier != "device"
    ]
    ahead = options["prefetch"]
    parts.append(f"gathers {ahead[0]} and {ahead[1]} kernels ahead in forward and backward")
    parts.append(f"{dtypes.storage} stored, {dtypes.compute} computed, {dtypes.reduce} reduced")
    return ", ".join(parts)


def fits_line(paper: Paper) -> str:
    memory, budget = paper.memory, paper.device_bytes
    text = f"{byte_text(memory.peak_bytes)} of {byte_text(budget)}"
    if paper.fits:
        return f"{text} on the device: fits, {byte_text(budget - memory.peak_bytes)} are left"
    return f"{text} on the device: does not fit, {byte_text(memory.peak_bytes - budget)} too many"


def advice(paper: Paper) -> str:
    """What to do where it does not fit; empty where it does."""
    return "" if paper.fits else "strategy=auto looks for the fastest plan that fits."


def memory_table(paper: Paper) -> Table:
    """Bytes by category, at the peak and between steps."""
    memory = paper.memory
    names = dict.fromkeys([*memory.peak, *memory.resident])
    rows = [(n, _bytes(memory.peak.get(n, 0)), _bytes(memory.resident.get(n, 0))) for n in names]
    rows.sort(key=lambda row: -memory.peak.get(row[0], 0))
    rows.append(("device", byte_text(memory.peak_bytes), byte_text(memory.resident_bytes)))
    for tier in ("host", "disk"):
        peak, rest = getattr(memory, f"{tier}_bytes"), getattr(memory, f"{tier}_resident_bytes")
        rows += [(tier, byte_text(peak), byte_text(rest))] if peak else []
    return [("one rank", "at the peak", "between steps"), *rows]


def _bytes(size: int) -> str:
    return byte_text(size) if size else "-"


def traffic_table(paper: Paper) -> Table:
    """What one rank sends, by collective, axes and phase; then transfers."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in paper.traffic.rows:
        axes = ", ".join(row.axes) or "host link"
        entry = sums.setdefault((row.verb.replace("_", " "), axes, row.phase), [0, 0, 0])
        for place, number in enumerate((row.count, row.bytes, row.sent_bytes if row.axes else row.bytes)):
            entry[place] += number
    rows = [(*key, f"{n:,}", byte_text(size), byte_text(sent)) for key, (n, size, sent) in sums.items()]
    return [("collective", "axes", "phase", "count", "whole buffers", "sent by one rank"), *rows]


def units_table(paper: Paper, most: int = 12) -> Table:
    """Units of the plan: equal ones together, with what is gathered of each."""
    leaves, specs = paper.memory.leaves, paper.lowered.schedule.specs
    sums: dict[str, tuple[dict[str, None], int]] = {}
    for path, sizes in leaves.items():
        name = NUMBER.sub("*", specs[path].unit)
        units, gathered = sums.get(name, ({}, 0))
        sums[name] = {**units, specs[path].unit: None}, gathered + sizes["gathered"]
    rows = [
        (name, f"{len(units):,}", byte_text(gathered / len(units)))
        for name, (units, gathered) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    more = [(f"... and {len(rows) - most} more", "", "")] if len(rows) > most else []
    return [("unit", "count", "gathered"), *rows[:most], *more]


def as_text(paper: Paper) -> str:
    rows = summary(paper)
    wide = max(map(len, rows)) + 2
    parts = {
        "": "\n".join(f"{name.ljust(wide)}{text}" for name, text in rows.items()),
        "advice": advice(paper),
        "layout": plot.text.tree(paper.specs, paper.mesh, width=16),
        "memory": "\n".join(columns(memory_table(paper))),
        "memory over the schedule": plot.text.memory(paper.over),
        "traffic": "\n".join(columns(traffic_table(paper))),
        "time": plot.text.timeline(paper.timeline),
    }
    return "\n\n".join(f"{name}:\n{text}" if name else text for name, text in parts.items() if text)


def numbers(paper: Paper) -> Mapping[str, Any]:
    dtypes = {leaf: short_dtype(spec.compute_dtype) for leaf, spec in paper.lowered.schedule.specs.items()}
    return {
        "parameters": paper.config.model.parameters,
        "ranks": paper.config.ranks,
        "hardware": paper.hardware.name,
        "fits": paper.fits,
        "device_bytes": paper.device_bytes,
        "tokens_per_step": paper.tokens_per_step,
        "tokens_per_day": paper.tokens_per_day,
        "device_hours": paper.device_hours,
        "cost": paper.cost,
        "compute_dtypes": sorted(set(dtypes.values())),
        "plan": paper.found.as_dict() if paper.config.strategy.name == AUTO else None,
        "memory": {k: v for k, v in paper.memory.as_dict().items() if k not in ("leaves", "units")},
        "traffic": paper.traffic.as_dict() | {"units": None},
        "timeline": paper.timeline.as_dict(),
    }
