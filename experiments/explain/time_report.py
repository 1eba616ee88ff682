"""Time report: where the time of a run went, what a step could take, and which change would save most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.explain.config import ExplainConfig
from experiments.explain.step_on_paper import StepOnPaper, explain
from experiments.lib.checks import ConfigError, targets_in
from experiments.lib.compose import build
from experiments.lib.config import AUTO, MEASURED
from experiments.lib.files import read_record
from experiments.lib.measured import DAMAGED, LINES, read_measurements
from experiments.lib.record import PARTS, RUN
from fnshard.analysis.tables import columns
from fnshard.compiler.schedule.instructions import Run
from fnshard.errors import FnshardError
from fnshard.plot.scales import byte_text, time_text
from fnshard.search.price import price

WORTH = 0.01  # smaller shares of a step are not shown
MOST = 6  # the most lines, and changes, that are shown
FAR = 2.0  # a prediction that is wrong by this factor is far off
SLOW = 1.25  # a kernel that takes so many times the prediction is slow
SHARED = ("model", "mesh", "strategy", "precision", "optimizer")  # groups of the main job and of `explain`
# The keys, or circumstances, that a part of a run's seconds depends on.
HINTS = {
    "start": "imports, launch of ranks, data, model",
    "lowering": "once a run: tracing the step and planning its schedule",
    "compile": "once; kernels are kept for the next run", "data": "data",
    "rollouts": "objective.group, objective.tokens",
    "evaluation": "run.held_out_every, data.held_out_rows", "samples": "run.prompt",
    "saves": "run.save_every, run.async_save", "tracing": "run.profile", "reports": "tracker, picture",
}  # fmt: skip


def report_time(folder: Path) -> str:
    """Return the report on a run.

    Raises:
        ConfigError: it is no run's folder, or one of its files is damaged.
    """
    # The seconds of the whole run.
    record = _read_run_record(folder)
    parts = [
        f"{folder}: {record['totals'].get('steps', 0)} steps, {record['status']}",
        _tabulate_seconds(record),
    ]
    run = read_measurements(folder)
    if run is None:
        return "\n\n".join([*parts, "no second step was made: nothing is known of a step's time"])

    # The time of a step next to its prediction, if the run's configuration can be predicted.
    why = _explain_not_on_paper(record["config"])
    paper = None if why else _put_on_paper(record["config"], folder)
    named = str(record["config"].get("hardware", {}).get("name", ""))
    is_measured = named == "measure" or named.startswith(MEASURED)
    parts.append(_tabulate_step(run.step.measured, run.step.predicted[""], paper, is_measured))

    # The lines that lose time, if they were measured, and the changes that would save some.
    if (folder / LINES).exists():
        profile = read_record(folder / LINES) or {}
        parts.append(_tabulate_lines(profile, run.step.measured, run.hardware["overlap"]))
    else:
        parts.append("which lines of the schedule: run.profile=3 measures them")
    parts.append(_tabulate_changes(paper) if paper else f"changes of one key: {why}")
    return "\n\n".join(parts)


def _read_run_record(folder: Path) -> Mapping[str, Any]:
    """Read a run's record, after checking that its files are whole."""
    if not (folder / RUN).exists():
        raise ConfigError(f"run={folder}: has no {RUN}; a run of train or finetune writes it.")
    try:
        record = read_record(folder / RUN) or {}
        read_measurements(folder)
        if missing := {"totals", "status", "config"} - record.keys():
            raise KeyError(*missing)
    except DAMAGED as error:
        raise ConfigError(f"run={folder}: its files are damaged: {type(error).__name__}: {error}.") from None
    return record


def _tabulate_seconds(record: Mapping[str, Any]) -> str:
    """Tabulate the seconds of the run by the parts of its work."""
    totals = record["totals"]
    seconds = {name: totals.get(f"{name}_s", 0.0) for name in PARTS}
    whole = max(totals["seconds"], 1e-9)
    rows = [("seconds of the run", "", "", "")]
    for name, each in sorted(seconds.items(), key=lambda pair: -pair[1]):
        if each >= WORTH * whole:
            rows.append((f"  {name}", f"{each:.1f}", f"{each / whole:.0%}", HINTS.get(name, "")))
    return "\n".join(columns(rows))


def _explain_not_on_paper(config: Mapping[str, Any]) -> str:
    """Return why changes of a run are not predicted; "" if they are."""
    if "rows" not in config.get("data", {}) or "width" not in config.get("model", {}):
        return "predicted for the decoder of experiments.train alone"
    run = config["run"]
    if run["backend"] != "inductor":
        return "operators of run.backend=eager are not predicted one by one; run.backend=inductor is"
    if run["accumulate_mode"] != "reduce":
        return "predicted for run.accumulate_mode=reduce"
    if targets_in(config):  # such code must not run: a run's folder is data
        return "code of one's own is not predicted"
    return "strategy=auto has looked for the best plan" if config["strategy"]["name"] == AUTO else ""


def _put_on_paper(config: Mapping[str, Any], folder: Path) -> StepOnPaper:
    """Return the run's step on paper, predicted by the speed that the run has measured."""
    rows, run = config["data"]["rows"], config["run"]
    values = {name: config[name] for name in SHARED}
    values |= {
        "specs": config.get("specs"), "data": {"rows": rows},
        "run": {n: run[n] for n in ("accumulate", "micro_order", "zero_bubble_memory") if n in run},
        "hardware": {"name": f"{MEASURED}{folder}"},
    }  # fmt: skip
    return explain(build(values, ExplainConfig))


def _tabulate_step(measured: float, predicted: float, paper: StepOnPaper | None, is_measured: bool) -> str:
    """Tabulate a step's time, its prediction, and the time of its kernels alone.

    If the prediction is far off and knows nothing of this machine, the text says how it can learn.
    """
    rows = [
        ("a step", ""),
        ("  measured", time_text(measured)),
        ("  predicted by the table", time_text(predicted)),
    ]
    if paper is not None:
        kernels = {n for n, line in enumerate(paper.lowered.schedule.instructions) if isinstance(line, Run)}
        limit = sum(span.end - span.start for span in paper.timeline.spans if span.index in kernels)
        text = f"{time_text(limit)}, so {max(0.0, 1 - limit / measured):.0%} are spent on all else"
        rows.append(("  its kernels alone, by the speed measured", text))
    text = "\n".join(columns(rows))
    factor = max(measured / predicted, predicted / measured)
    if factor > FAR and not is_measured:
        side = "longer" if measured > predicted else "shorter"
        text += (
            f"\nThe step took {factor:.1f} times {side} than predicted: the table has nominal speeds, and "
            f"nothing was measured on this hardware.\nhardware={MEASURED}FOLDER, with a folder of runs such "
            "as this one, predicts with what they measured; hardware=measure measures first."
        )
    return text


def _tabulate_lines(profile: Mapping[str, Any], total: float, overlaps: bool) -> str:
    """Tabulate the lines of the schedule that lose most of a step, and name the rank that is waited for.

    The seconds of collectives that nothing hides are lost, and so are those beyond the prediction.

    Args:
        total: the seconds of a step.
        overlaps: whether the hardware can hide collectives.
    """
    # Lines of one kind in equal units are added up.
    groups: dict[tuple[str, str], tuple[float, float, float]] = {}
    for line in profile["lines"]:
        key = line["kind"], re.sub(r"\.\d+", ".*", line["unit"])
        measured, predicted, exposed = groups.get(key, (0.0, 0.0, 0.0))
        groups[key] = (
            measured + line["measured_s"], predicted + line["predicted_s"], exposed + line["exposed_s"],
        )  # fmt: skip

    # The groups that lose most.
    losses = []
    for (kind, unit), (measured, predicted, exposed) in groups.items():
        lost, why = exposed, "nothing is computed meanwhile"
        if not (overlaps and exposed):
            lost = measured - predicted if measured > SLOW * predicted else 0.0
            why = f"{measured / predicted:.1f} times the prediction" if predicted else "not predicted"
        if lost >= WORTH * total:
            losses.append((lost, (f"  {kind} {unit}", time_text(measured), time_text(lost), why)))
    rows = [("lines of a step", "measured", "lost", "")]
    rows += [row for _, row in sorted(losses, key=lambda pair: -pair[0])[:MOST]]
    text = "\n".join(columns(rows)) if losses else "lines of a step: none loses 1% of it"

    # The rank that waits least is the one that the others wait for.
    waits = profile["exposed_s"]
    if len(waits) > 1 and max(waits) - min(waits) >= WORTH * total:
        least = waits.index(min(waits))
        longer = time_text(max(waits) - min(waits))
        text += f"\nrank {least} is waited for: others wait up to {longer} longer a step"
    return text


# ------------------------------------------------------------------ changes


def _tabulate_changes(paper: StepOnPaper) -> str:
    """Tabulate the changes of one key that fit and gain most tokens a second, by prediction."""
    gains = []
    now = price(paper.config, paper.memory, paper.timeline)
    for words, config in neighbours(paper.config):
        try:
            on_paper = explain(config)
        except FnshardError:  # there is no such step
            continue
        other = price(config, on_paper.memory, on_paper.timeline)
        gain = now.relative_slowdown(other)
        if other.fits(paper.device_bytes) and gain >= WORTH:
            extra = other.peak_bytes - now.peak_bytes
            more = f"{byte_text(abs(extra))} {'more' if extra > 0 else 'less'} on the device"
            gains.append((gain, (f"  {words}", f"{gain:+.1%}", more if extra else "")))
    if not gains:
        return "changes of one key: none makes the step 1% faster, by prediction"
    rows = [("changes of one key", "tokens a second, predicted", "")]
    rows += [row for _, row in sorted(gains, key=lambda pair: -pair[0])[:MOST]]
    return "\n".join(columns(rows))


def neighbours(config: ExplainConfig) -> Iterator[tuple[str, ExplainConfig]]:
    """Yield configurations in which one key is changed, with the words that change it.

    The numbers that a step computes stay the same, except for rounding. Dtypes are not changed, since a dtype
    that no run has measured is not predicted well.
    """
    strategy, rows = config.strategy, config.rows
    for name in ("full_shard", "shard_grad_op", "zero2", "no_shard"):
        yield from _change(config, "strategy", name=name)
    for remat in ("none", 0.5, "unit"):
        yield from _change(config, "strategy", remat=remat)
    if strategy.memory not in (None, "device"):
        yield from _change(config, "strategy", memory="device")
    if strategy.optimizer_memory not in (None, "device"):
        yield from _change(config, "strategy", optimizer_memory="device", update_on=None)
    for key in ("prefetch_forward", "prefetch_backward"):
        yield from _change(config, "strategy", **{key: (getattr(strategy, key) or 0) + 1})
    for accumulate in (config.run.accumulate // 2, config.run.accumulate * 2):
        if accumulate and rows % accumulate == 0:
            yield from _change(config, "run", accumulate=accumulate)


def _change(config: ExplainConfig, group: str, **values: Any) -> Iterator[tuple[str, ExplainConfig]]:
    """Yield a configuration with other values of a group; nothing if it has these values already."""
    before = getattr(config, group)
    if any(getattr(before, key) != value for key, value in values.items()):
        words = " ".join(f"{group}.{k}={'null' if v is None else v}" for k, v in values.items())
        yield words, replace(config, **{group: replace(before, **values)})
