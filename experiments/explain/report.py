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
MOST_RANKS = 1024  # the ranks whose groups are inspected to count nodes
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
    width = max(map(len, rows)) + 2
    advice = [] if paper.fits else ["strategy=auto looks for the fastest plan that fits."]
    if idle := without_effect(paper.config):
        advice.append(f"without effect on paper: {', '.join(idle)}")
    parts = {
        "summary": "\n".join([*(f"{name.ljust(width)}{text}" for name, text in rows.items()), *advice]),
        "layout": plot.text.tree(paper.specs, paper.mesh, width=16),
        "memory": "\n".join([*columns(memory_table(paper)), "", plot.text.memory(paper.memory_timeline)]),
        "traffic": "\n".join(columns(traffic_table(paper))),
        "time": plot.text.timeline(paper.timeline),
    }
    if paper.timeline.stages:
        parts["stages"] = plot.text.stages(paper.timeline)
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts.items())


# ------------------------------------------------------------------ the summary


def summary(paper: StepOnPaper) -> dict[str, str]:
    """Return the answers to the usual questions, a line each."""
    config, time, memory, subject = paper.config, paper.timeline, paper.memory, paper.subject
    ranks, ranks_per_node = config.mesh.ranks, paper.hardware.ranks_per_node

    # FLOPs of a token, and the share of them that is computed twice.
    flops = time.model_flops * ranks / max(paper.tokens_per_step, 1)
    again = time.hardware_flops / max(time.model_flops, 1) - 1
    recomputed = f"{again:.1%} more" if again >= 5e-4 else "nothing"

    # Parts of lines, which are empty if there is nothing to say.
    tokens = f", {big(paper.tokens_per_step)} tokens" if subject.unit == "token" else ""
    micro = f" in {paper.options.accumulate} micro-batches" if paper.options.accumulate > 1 else ""
    transfers = _list_sizes(
        {"to the device": paper.traffic.to_device_bytes, "from it": paper.traffic.to_host_bytes}
    )
    over_link = f"; over the host link {' and '.join(transfers)}" if transfers else ""
    resident = {"on the host": memory.host_resident_bytes, "on the disk": memory.disk_resident_bytes}
    waits = {
        "for collectives": time.exposed_communication_seconds,
        "for transfers": time.exposed_transfer_seconds,
    }
    waited = [f"{time_text(seconds)} {what}" for what, seconds in waits.items() if seconds >= 5e-7]
    waiting = f"; compute waits {' and '.join(waited)}" if waited else ""
    interval = f" ({' to '.join(map(time_text, time.interval))})" if time.interval else ""
    nodes = pluralize(-(-ranks // ranks_per_node), "node")
    return {
        "model": subject.words,
        "parameters": f"{subject.parameters:,}",
        f"FLOPs per {subject.unit}": f"{big(flops)} forward and backward, {recomputed} recomputed",
        "mesh": f"{paper.mesh}: {ranks:,} × {paper.hardware.name}, {nodes} of {min(ranks_per_node, ranks)}; "
        f"{over_nodes(paper.mesh, paper.hardware)}",
        "batch": f"{config.rows * config.mesh.data_ranks:,} rows{tokens}; "
        f"{pluralize(config.rows, 'row')} a rank{micro}",
        "plan": plan_line(paper),
        **({"pipeline": pipeline_line(paper)} if time.stages else {}),
        "peak memory": fits_line(paper),
        "between steps": ", ".join(
            [f"{byte_text(memory.resident_bytes)} on the device", *_list_sizes(resident)]
        ),
        "sent": f"{byte_text(paper.traffic.sent_bytes)} by each rank in a step{over_link}",
        "step time": f"{time_text(time.step_seconds)}{interval}, MFU {time.mfu:.1%}{waiting}",
        "speed": f"{big(paper.tokens_per_day)} {subject.unit}s a day, "
        f"{big(paper.tokens_per_day / 86_400 / ranks)} a second on each rank",
        **({"training": _describe_training(paper)} if config.tokens or subject.unit == "token" else {}),
    }


def over_nodes(mesh: fs.Mesh, hardware: fs.Hardware) -> str:
    """Return over how many nodes the groups of each axis spread. Ranks of the last axes are neighbours.

    >>> mesh = fs.make_mesh(shard=4, tensor=8, abstract=True)
    >>> over_nodes(mesh, fs.Hardware.named("h100"))
    'shard over 4 nodes, tensor within a node'
    """
    texts = []
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        if size == 1:
            continue
        nodes = 1
        for rank in range(min(mesh.size, MOST_RANKS)):
            group = mesh.group_ranks((name,), rank)
            nodes = max(nodes, len({member // hardware.ranks_per_node for member in group}))
        texts.append(f"{name} within a node" if nodes == 1 else f"{name} over {nodes:,} nodes")
    return ", ".join(texts) or "one device"


def _list_sizes(sizes: Mapping[str, int]) -> list[str]:
    """Return a text for each size that is not 0."""
    return [f"{byte_text(size)} {where}" for where, size in sizes.items() if size]


def _describe_training(paper: StepOnPaper) -> str:
    """Return what the whole training takes and costs."""
    config, days = paper.config, paper.budget / paper.tokens_per_day
    text = f"{big(paper.budget)} {paper.subject.unit}s"
    text += ": " if config.tokens else f" ({PER_PARAMETER} a parameter): "
    text += f"{digits(days)} days" if days >= 2 else f"{digits(24 * days)} hours"
    text += f", {big(paper.device_hours)} device hours"
    if paper.cost is None:
        return text
    return f"{text}, ${big(paper.cost)} at ${config.hardware.price_per_hour:g} an hour"


def plan_line(paper: StepOnPaper) -> str:
    """Return the plan that the search chose, or the layout, dtypes and options of the strategy."""
    strategy, dtypes = paper.config.strategy, paper.config.precision
    if paper.found is not None:
        return f"strategy=auto: {paper.found.chosen.choice}"
    words = [strategy.name if paper.config.specs is None else "by specs"]
    words.append("no remat" if strategy.remat == "none" else f"remat={strategy.remat!r}")
    tiers = {"memory": strategy.memory, "optimizer memory": strategy.optimizer_memory}
    words += [f"{name} on the {tier}" for name, tier in tiers.items() if tier != "device"]
    forward, backward = paper.options.prefetch
    words.append(f"gathers {forward} and {backward} kernels ahead in forward and backward")
    if strategy.overlap is not None:
        words.append(f"reductions {strategy.overlap} kernels later")
    words.append(f"{dtypes.storage} stored, {dtypes.compute} computed, {dtypes.reduce} reduced")
    return ", ".join(words)


def pipeline_line(paper: StepOnPaper) -> str:
    """Return the number of stages, and how long they wait for one another."""
    chunks = paper.config.strategy.chunks if paper.found is None else paper.found.chosen.choice.chunks or 1
    return (
        f"{pluralize(paper.mesh.stages, 'stage')} of {pluralize(chunks, 'chunk')}, "
        f"{paper.options.accumulate} micro-batches: stages wait for one another "
        f"{paper.timeline.bubble:.1%} of a step; bytes and waits are those of the fullest and slowest stage"
    )


def fits_line(paper: StepOnPaper) -> str:
    """Return the peak, and whether it fits."""
    peak, budget = paper.memory.peak_bytes, paper.device_bytes
    if paper.fits:
        verdict = f"fits, {byte_text(budget - peak)} are left"
    else:
        verdict = f"does not fit, {byte_text(peak - budget)} too many"
    return f"{byte_text(peak)} of {byte_text(budget)} on the device: {verdict}"


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
    """Tabulate the bytes that one rank sends, by collective, axes and phase, and those of its transfers."""
    sums: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for row in paper.traffic.rows:
        key = row.verb.replace("_", " "), ", ".join(row.axes) or "host link", row.phase
        count, size, sent = sums.get(key, (0, 0, 0))
        sent += row.sent_bytes if row.axes else row.bytes
        sums[key] = count + row.count, size + row.bytes, sent
    rows = [(*key, f"{n:,}", byte_text(size), byte_text(sent)) for key, (n, size, sent) in sums.items()]
    return [("collective", "axes", "phase", "count", "whole buffers", "sent by one rank"), *rows]
