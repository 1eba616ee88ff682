"""Report: a step on paper as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import fnshard as fs
from experiments.explain.config import PER_PARAMETER, without_effect
from experiments.explain.step_on_paper import StepOnPaper
from experiments.lib.checks import pluralize
from fnshard import plot
from fnshard.analysis.tables import columns
from fnshard.plot.scales import byte_text, digits, time_text

BIG = ((1e15, "e15"), (1e12, "e12"), (1e9, "e9"), (1e6, "e6"))
MOST_RANKS = 1024  # the groups of so many ranks are looked at to count nodes
Table = Sequence[Sequence[str]]  # the first row is the head


def big(value: float) -> str:
    """Return a count in few digits.

    >>> big(70_553_706_496), big(4096)
    ('70.55e9', '4,096')
    """
    least, power = next(((n, p) for n, p in BIG if value >= n), (1.0, ""))
    return f"{digits(value / least)}{power}"


def as_text(paper: StepOnPaper) -> str:
    """Return the whole report on a step, in named parts."""
    rows = summary(paper)
    wide = max(map(len, rows)) + 2
    advice = [] if paper.fits else ["strategy=auto looks for the fastest plan that fits."]
    if idle := without_effect(paper.config):
        advice.append(f"without effect on paper: {', '.join(idle)}")
    parts = {
        "summary": "\n".join([*(f"{name.ljust(wide)}{text}" for name, text in rows.items()), *advice]),
        "layout": plot.text.tree(paper.specs, paper.mesh, width=16),
        "memory": "\n".join([*columns(memory_table(paper)), "", plot.text.memory(paper.over)]),
        "traffic": "\n".join(columns(traffic_table(paper))),
        "time": plot.text.timeline(paper.timeline),
    }
    if paper.timeline.stages:
        parts["stages"] = plot.text.stages(paper.timeline)
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts.items())


# ------------------------------------------------------------------ the summary


def summary(paper: StepOnPaper) -> dict[str, str]:
    """Return the answers to the usual questions, a line each."""
    config, time, memory = paper.config, paper.timeline, paper.memory
    # Numbers that `StepOnPaper` does not have.
    subject, each = paper.subject, time.model_flops * config.mesh.ranks / max(paper.tokens_per_step, 1)
    again = time.hardware_flops / max(time.model_flops, 1) - 1
    near = paper.hardware.ranks_per_node
    # Parts of lines, which are empty where there is nothing to say.
    tokens = f", {big(paper.tokens_per_step)} tokens" if subject.unit == "token" else ""
    micro = f" in {paper.options.accumulate} micro-batches" if paper.options.accumulate > 1 else ""
    over = _list_sizes(
        {"to the device": paper.traffic.to_device_bytes, "from it": paper.traffic.to_host_bytes}
    )
    resting = {"on the host": memory.host_resident_bytes, "on the disk": memory.disk_resident_bytes}
    waits = {
        "for collectives": time.exposed_communication_seconds,
        "for transfers": time.exposed_transfer_seconds,
    }
    between = f" ({' to '.join(map(time_text, time.interval))})" if time.interval else ""
    waited = [f"{time_text(seconds)} {what}" for what, seconds in waits.items() if seconds >= 5e-7]
    return {
        "model": subject.words,
        "parameters": f"{subject.parameters:,}",
        f"FLOPs per {subject.unit}": f"{big(each)} forward and backward, "
        f"{f'{again:.1%} more' if again >= 5e-4 else 'nothing'} recomputed",
        "mesh": f"{paper.mesh}: {config.mesh.ranks:,} × {paper.hardware.name}, "
        f"{pluralize(-(-config.mesh.ranks // near), 'node')} of {min(near, config.mesh.ranks)}; "
        f"{over_nodes(paper.mesh, paper.hardware)}",
        "batch": f"{config.rows * config.mesh.data_ranks:,} rows{tokens}; "
        f"{pluralize(config.rows, 'row')} a rank{micro}",
        "plan": plan_line(paper),
        **({"pipeline": pipeline_line(paper)} if time.stages else {}),
        "peak memory": fits_line(paper),
        "between steps": ", ".join(
            [f"{byte_text(memory.resident_bytes)} on the device", *_list_sizes(resting)]
        ),
        "sent": f"{byte_text(paper.traffic.sent_bytes)} by each rank in a step"
        + (f"; over the host link {' and '.join(over)}" if over else ""),
        "step time": f"{time_text(time.step_seconds)}{between}, MFU {time.mfu:.1%}"
        + (f"; compute waits {' and '.join(waited)}" if waited else ""),
        "speed": f"{big(paper.tokens_per_day)} {subject.unit}s a day, "
        f"{big(paper.tokens_per_day / 86_400 / config.mesh.ranks)} a second on each rank",
        **({"training": _training(paper)} if config.tokens or subject.unit == "token" else {}),
    }


def over_nodes(mesh: fs.Mesh, hardware: fs.Hardware) -> str:
    """Say over how many nodes the groups of each axis lie; ranks of the last axes are neighbours.

    >>> mesh = fs.make_mesh(shard=4, tensor=8, abstract=True)
    >>> over_nodes(mesh, fs.Hardware.named("h100"))
    'shard over 4 nodes, tensor within a node'
    """
    found = {
        name: max(
            len({rank // hardware.ranks_per_node for rank in mesh.group_ranks((name,), each)})
            for each in range(min(mesh.size, MOST_RANKS))
        )
        for name, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1
    }  # fmt: skip
    near = {name: "within a node" if n == 1 else f"over {n:,} nodes" for name, n in found.items()}
    return ", ".join(f"{name} {where}" for name, where in near.items()) or "one device"


def _list_sizes(sizes: Mapping[str, int]) -> list[str]:
    return [f"{byte_text(size)} {where}" for where, size in sizes.items() if size]


def _training(paper: StepOnPaper) -> str:
    config, days = paper.config, paper.budget / paper.tokens_per_day
    text = f"{big(paper.budget)} {paper.subject.unit}s"
    text += ": " if config.tokens else f" ({PER_PARAMETER} a parameter): "
    text += f"{digits(days)} days" if days >= 2 else f"{digits(24 * days)} hours"
    text += f", {big(paper.device_hours)} device hours"
    if paper.cost is None:
        return text
    return f"{text}, ${big(paper.cost)} at ${config.hardware.price_per_hour:g} an hour"


def plan_line(paper: StepOnPaper) -> str:
    strategy, dtypes = paper.config.strategy, paper.config.precision
    if paper.found is not None:
        return f"strategy=auto: {paper.found.chosen.choice}"
    layout = strategy.name if paper.config.specs is None else "by specs"
    tiers = {"memory": strategy.memory, "optimizer memory": strategy.optimizer_memory}
    forward, backward = paper.options.prefetch
    return ", ".join([
        layout,
        f"remat={strategy.remat!r}" if strategy.remat != "none" else "no remat",
        *(f"{name} on the {tier}" for name, tier in tiers.items() if tier != "device"),
        f"gathers {forward} and {backward} kernels ahead in forward and backward",
        *([] if strategy.overlap is None else [f"reductions {strategy.overlap} kernels later"]),
        f"{dtypes.storage} stored, {dtypes.compute} computed, {dtypes.reduce} reduced",
    ])  # fmt: skip


def pipeline_line(paper: StepOnPaper) -> str:
    """Say how many stages there are, and how long they wait for one another."""
    chunks = paper.config.strategy.chunks if paper.found is None else paper.found.chosen.choice.chunks or 1
    return (
        f"{pluralize(paper.mesh.stages, 'stage')} of {pluralize(chunks, 'chunk')}, "
        f"{paper.options.accumulate} micro-batches: stages wait for one another "
        f"{paper.timeline.bubble:.1%} of a step; bytes and waits are those of the fullest and slowest stage"
    )


def fits_line(paper: StepOnPaper) -> str:
    peak, budget = paper.memory.peak_bytes, paper.device_bytes
    left = f"fits, {byte_text(budget - peak)} are left"
    much = f"does not fit, {byte_text(peak - budget)} too many"
    return f"{byte_text(peak)} of {byte_text(budget)} on the device: {left if paper.fits else much}"


# ------------------------------------------------------------------ tables


def memory_table(paper: StepOnPaper) -> Table:
    """Tabulate bytes by category, at the peak and between steps."""
    memory = paper.memory
    names = sorted({*memory.peak, *memory.resident}, key=lambda name: -memory.peak.get(name, 0))
    sizes = [(name, memory.peak.get(name, 0), memory.resident.get(name, 0)) for name in names]
    sizes.append(("device", memory.peak_bytes, memory.resident_bytes))
    for tier in ("host", "disk"):
        sizes.append((tier, getattr(memory, f"{tier}_bytes"), getattr(memory, f"{tier}_resident_bytes")))
    rows = [(name, *(byte_text(n) if n else "-" for n in each)) for name, *each in sizes if any(each)]
    return [("one rank", "at the peak", "between steps"), *rows]


def traffic_table(paper: StepOnPaper) -> Table:
    """Tabulate what one rank sends, by collective, axes and phase; then transfers."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in paper.traffic.rows:
        axes = ", ".join(row.axes) or "host link"
        entry = sums.setdefault((row.verb.replace("_", " "), axes, row.phase), [0, 0, 0])
        for place, number in enumerate((row.count, row.bytes, row.sent_bytes if row.axes else row.bytes)):
            entry[place] += number
    rows = [(*key, f"{n:,}", byte_text(size), byte_text(sent)) for key, (n, size, sent) in sums.items()]
    return [("collective", "axes", "phase", "count", "whole buffers", "sent by one rank"), *rows]
