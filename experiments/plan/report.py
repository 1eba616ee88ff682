"""Report: the best plan in words, numbers and a picture, what it takes, and why its rivals lose."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

import fnshard as fs
from experiments.explain.config import PER_PARAMETER, without_effect
from experiments.explain.report import big, over_nodes
from experiments.lib.checks import pluralize
from experiments.lib.config import StrategyConfig, TrainConfig
from experiments.lib.files import write_json, write_text
from experiments.lib.plan import hardware_of
from experiments.plan.config import DEVICE_SHARE, IN_PLAN, PlanConfig
from experiments.plan.search import DecoderPlan, Planner
from fnshard.analysis.hardware import Hardware, mfu
from fnshard.plot.scales import byte_text, digits, rough, time_text
from fnshard.search.price import PARTS, Candidate

RIVALS = 5  # so many plans that were not taken are shown
WIDE = 10  # an axis whose largest value is so many times its least is logarithmic
# The keys and groups of the main job whose values the plan decides.
DECIDED = ("strategy", "mesh", "specs", "data.rows", "run.accumulate", "run.accumulate_mode",
           "run.micro_order", "run.zero_bubble_memory", "run.device_gb", "run.disk_dir")  # fmt: skip
Say = Callable[[str], None]


def write_plan(config: PlanConfig, folder: Path) -> None:
    """Print the best plan and why it is the best, and write it to a folder with a picture of all plans that
    were priced."""
    hardware = hardware_of(config.hardware.name)
    config = replace(config, precision=config.precision.on("cuda" if hardware.overlap else "cpu", sums=True))

    def say(text: str) -> None:
        print(f"  {text}", flush=True)

    planner, best = find_plan(config, hardware, say)
    text = as_text(planner, best, _read_given_arguments())
    print(text, flush=True)
    write_text(folder / "plan.txt", text + "\n")
    write_json(folder / "plan.json", as_dict(planner, best))
    draw_plans(planner, best, folder / "plan.png")
    print(f"\nresults: {folder}", flush=True)


def _read_given_arguments() -> str:
    """Return the arguments of this command line that the main job takes, too, quoted for a shell.

    Those that the plan decides are left out.
    """
    if not HydraConfig.initialized():
        return ""
    hydra = HydraConfig.get()
    of_plan_alone = {each.name for each in fields(PlanConfig)} - {each.name for each in fields(TrainConfig)}
    kept = []
    for override in hydra.overrides.task:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        is_decided = any(key == name or key.startswith(f"{name}.") for name in DECIDED)
        if key not in of_plan_alone and not is_decided:
            kept.append(override)

    # The precision is always named, since the main job has another default.
    precision = hydra.runtime.choices.get("precision")
    if precision is not None and not any(override.startswith("precision=") for override in kept):
        kept.append(f"precision={precision}")
    folders = [each.path for each in hydra.runtime.config_sources if each.provider == "command-line"]
    return shlex.join([*(f"--config-dir={path}" for path in folders), *kept])


def format_run_line(plan: DecoderPlan, config: PlanConfig, given: str) -> str:
    """Return the command of the main job that runs a plan.

    If a recipe has another value than the plan, the plan's is named, even if it is the main job's default.

    Args:
        given: arguments of the search that the main job takes, too.
    """
    words = plan.overrides(config.batch_rows).split()
    named = {word.partition("=")[0] for word in words}
    run = {"accumulate": 1, "accumulate_mode": "reduce", "micro_order": "depth", "zero_bubble_memory": 1.0,
           "device_gb": None, "disk_dir": None}  # fmt: skip
    # The experts' capacity is given, and no part of the plan.
    capacity = config.mesh.expert_capacity
    if capacity is not None:
        words.append(f"mesh.expert_capacity={capacity}")

    # Values of the plan that are defaults of the main job, but not of the recipe.
    groups = {
        "strategy": vars(StrategyConfig(name=plan.preset, remat=plan.remat, **plan.tiers)),
        "mesh": vars(replace(plan.mesh, expert_capacity=capacity)),
        "run": run,
    }
    for group, values in groups.items():
        for name, value in values.items():
            key, before = f"{group}.{name}", getattr(getattr(config, group), name)
            if key not in named and name != "name" and before != value:
                words.append(f"{key}={'null' if value is None else value}")
    if config.specs is not None:
        words.append("specs=null")
    return " ".join(filter(None, ("python -m experiments.train", given, *words)))


def find_plan(config: PlanConfig, hardware: Hardware, say: Say) -> tuple[Planner, Candidate]:
    """Find the best plan on the devices, or with `days` on the fewest devices that finish in time.

    Raises:
        BudgetError: no plan fits, or is fast enough. The error says what would.
    """
    if config.days is None:
        planner = Planner(config, config.devices, hardware)
        best = planner.find_best(say)
        if best.peak_bytes > planner.budget:
            raise make_too_big_error(planner, best)
        return planner, best

    # The first number of devices is one that could be fast enough at six tenths of the data sheet's FLOPs.
    flops = 0.6 * max(hardware.peak_flops.values())
    least = 6 * config.parameters * config.budget / (flops * 86_400 * config.days)
    powers = [2**n for n in range(config.most_devices.bit_length())]
    slow = "no number of devices that divides the rows of a step was tried"
    for devices in (n for n in powers if least <= n <= config.most_devices):
        say(pluralize(devices, "device"))
        planner = Planner(config, devices, hardware)
        if planner.is_too_small():
            slow = f"{pluralize(devices, 'device')} cannot hold the model"
            continue
        best = planner.find_best(say)
        days = count_days(planner, best)
        if best.peak_bytes <= planner.budget and days <= config.days:
            return planner, best
        slow = f"{pluralize(devices, 'device')} would take {digits(days)} days"
    raise fs.BudgetError(
        f"{big(config.budget)} {config.unit}s are not read in {config.days:g} days: {slow}. Fix: more rows "
        f"in a step (rows={2 * config.batch_rows}), more days, or most_devices={2 * config.most_devices}."
    )


def make_too_big_error(planner: Planner, best: Candidate) -> fs.BudgetError:
    """Make the error that nothing fits. It names the plan that lacks least, and the fewest devices that hold
    the model."""
    config, more = planner.config, planner.devices
    while more < config.most_devices:
        more *= 2
        if not Planner(config, more, planner.hardware).is_too_small():
            fix = f"devices={more}"
            break
    else:
        shorter = "shorter rows (model.context)" if config.unit == "token" else "smaller items"
        fix = f"another model or {shorter}"
    return fs.BudgetError(
        f"nothing fits on {pluralize(planner.devices, 'device')}: the plan that lacks least takes "
        f"{byte_text(best.peak_bytes)} of {byte_text(planner.budget)} "
        f"({best.choice.overrides(config.batch_rows)}). Fix: {fix}."
    )


# ------------------------------------------------------------------ words and numbers


def count_days(planner: Planner, candidate: Candidate) -> float:
    """Return the number of days that the whole training takes by a plan."""
    config = planner.config
    return candidate.seconds * config.budget / (config.batch_rows * config.row_tokens) / 86_400


def as_text(planner: Planner, best: Candidate, given: str = "") -> str:
    """Return the text about a plan: what it is, what it takes and costs, and why its rivals lose.

    Predicted times have two digits. They also have an interval if the hardware's predictions were compared
    with published steps, most of which lie in it.

    Args:
        given: arguments of the search that the main job takes, too.
    """
    config, hardware = planner.config, planner.hardware
    unit, context = config.unit, f", context {config.row_tokens:,}" if config.unit == "token" else ""
    tokens = config.batch_rows * config.row_tokens
    micro, price = planner.count_micro_batches(best.choice), config.hardware.price_per_hour
    shares = hardware.spread or ()

    def between(value: float, text: Callable[[float], str]) -> str:
        if not shares:
            return text(value)
        return f"{text(value)} ({' to '.join(text(value * share) for share in shares)})"

    # The whole training's days and cost.
    training = {}
    if config.budget is not None:
        days = count_days(planner, best)
        duration = between(86_400 * days, format_duration)
        if price is not None:
            total = between(days, lambda d: f"${big(rough(price * 24 * d * planner.devices))}")
            duration += f", {total} at ${price:g} an hour for each device"
        a_parameter = "" if config.tokens else f" ({PER_PARAMETER} a parameter)"
        training["training"] = f"{big(config.budget)} {unit}s{a_parameter}: {duration}"

    # The parts of a step's time, the utilisation, links and memory.
    parts = [f"{time_text(rough(s))} {PARTS[n]}" for n, s in best.parts.items() if s >= 0.005 * best.seconds]
    used = mfu(best.flops, best.seconds, best.peak_flops)
    utilisation = f"MFU {used:.0%}"
    if shares:
        utilisation += f" ({' to '.join(f'{used / share:.0%}' for share in reversed(shares))})"
    near, far = (f"{big(rough(link.gather.best / 1e9))} GB/s" for link in (hardware.node, hardware.network))
    links = f"assumed to send {near} from a device within a node of {hardware.ranks_per_node}"
    if planner.devices > hardware.ranks_per_node:
        links += f", {far} between nodes"
    over = over_nodes(planner.make_mesh(best.choice), hardware)
    in_tokens = f", {big(tokens)} tokens" if unit == "token" else ""
    on_host = f", {byte_text(best.host_bytes)} on the host" if best.host_bytes else ""
    rows = {
        "model": f"{config.parameters:,} parameters{context}",
        "devices": f"{planner.devices:,} × {hardware.name}; {over}",
        "links": links,
        "batch": f"{config.batch_rows:,} rows{in_tokens}; a rank has {micro} times "
        f"{pluralize(best.choice.micro_rows, 'row')}",
        "plan": best.choice.overrides(config.batch_rows),
        "peak memory": f"{byte_text(best.peak_bytes)} of {byte_text(planner.budget)}{on_host}",
        "left over": explain_left_over(planner, best),
        "step time": f"{between(best.seconds, format_duration)}, {utilisation}: {', '.join(parts)}",
        "speed": f"{big(rough(tokens / best.seconds / planner.devices))} {unit}s a second on each device",
        **training,
        "not in it": "restarts, saves, evaluation, loading of data",
        "run": format_run_line(best.choice, config, given),
    }  # fmt: skip
    width = max(map(len, rows)) + 2
    lines = [f"{name.ljust(width)}{text}" for name, text in rows.items()]
    idle = without_effect(config, IN_PLAN)
    if config.specs is not None:
        idle = [*idle, "specs"]
    if idle:
        lines.append(f"chosen by the plan, or without effect on it: {', '.join(idle)}")

    # The rivals, and why they lose.
    cut_short = " before the search was cut short" if planner.work.is_spent() else ""
    lines += ["", f"rivals, of {len(planner.seen)} plans looked at{cut_short}:"]
    for rival in find_rivals(planner, best):
        lines.append(f"  {rival.choice.overrides(config.batch_rows)}")
        lines.append(f"    {explain_loss(rival, best, planner.budget)}")
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Return a time in two digits, in days, hours or smaller units.

    >>> format_duration(20_000_000), format_duration(12_096), format_duration(59.35)
    ('230 days', '3.4 hours', '59 s')
    """
    for unit, name in ((86_400, "days"), (3_600, "hours")):
        if seconds >= 2 * unit:
            return f"{digits(rough(seconds / unit))} {name}"
    return time_text(rough(seconds))


def explain_left_over(planner: Planner, best: Candidate) -> str:
    """Return why a plan leaves memory unused: faster plans take more than there is."""
    left, device_bytes = planner.budget - best.peak_bytes, planner.hardware.memory_bytes
    faster = [c for c in planner.seen.values() if c.seconds < best.seconds and c.peak_bytes > planner.budget]
    text = f"{byte_text(left)}: "
    if faster:
        nearest = min(faster, key=lambda c: c.peak_bytes)
        more = byte_text(nearest.peak_bytes - planner.budget)
        text += f"the smallest plan that is faster needs {more} more than there is"
    else:
        text += "no plan that was looked at is faster, whatever it takes"
    if planner.config.device_gb is None:
        text += (
            f"; a step may take {DEVICE_SHARE:.0%} of {byte_text(device_bytes)} (device_gb=), "
            "the rest is the allocator's and NCCL's"
        )
    return text


def find_rivals(planner: Planner, best: Candidate) -> list[Candidate]:
    """Return the fastest of the plans that were not chosen, some that fit and some that do not.

    Plans that differ only in what they recompute count as one, and the best of them is returned.
    """
    by_frame: dict[DecoderPlan, Candidate] = {}
    for candidate in planner.seen.values():
        frame = replace(candidate.choice, remat="none")
        by_frame[frame] = min(by_frame.get(frame, candidate), candidate, key=planner.walk.cost)
    others = [c for f, c in by_frame.items() if f != replace(best.choice, remat="none")]
    others.sort(key=lambda c: c.seconds)
    fit = [c for c in others if c.peak_bytes <= planner.budget]
    too_large = [c for c in others if c.peak_bytes > planner.budget and c.seconds < best.seconds]
    shown = too_large[: max(2, RIVALS - len(fit))]
    return [*fit[: RIVALS - len(shown)], *shown]


def explain_loss(candidate: Candidate, best: Candidate, budget: int) -> str:
    """Return why a plan was not chosen."""
    slower = candidate.relative_slowdown(best)
    gaps = {n: candidate.parts[n] - best.parts[n] for n in PARTS}
    largest = max(gaps, key=gaps.__getitem__)
    much = f"{digits(rough(abs(100 * slower)))}% {'slower' if slower > 0 else 'faster'}"
    if candidate.peak_bytes > budget:
        return f"{byte_text(candidate.peak_bytes - budget)} too many ({much})"
    if slower < 5e-4:
        return f"as fast, {byte_text(candidate.peak_bytes)}"
    return (
        f"{much}: {time_text(rough(gaps[largest]))} more {PARTS[largest]}; {byte_text(candidate.peak_bytes)}"
    )


def as_dict(planner: Planner, best: Candidate) -> dict[str, Any]:
    """Return the best plan and all that were priced, as plain values."""
    config, rows = planner.config, planner.config.batch_rows

    def plain(candidate: Candidate) -> dict[str, Any]:
        values = {name: value for name, value in vars(candidate).items() if name != "choice"}
        plan = candidate.choice
        return {**values, "plan": vars(plan), "parts": dict(candidate.parts), "run": plan.overrides(rows)}

    return {
        "hardware": planner.hardware.name, "devices": planner.devices, "budget_bytes": planner.budget,
        "rows": rows, "tokens": config.budget,
        "days": None if config.budget is None else count_days(planner, best),
        "interval": planner.hardware.spread, "best": plain(best),
        "looked_at": [plain(c) for c in planner.seen.values()],
    }  # fmt: skip


def draw_plans(planner: Planner, best: Candidate, path: Path) -> None:
    """Draw memory against time of all plans that were priced, with a line through those that no other beats
    in both."""
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    # The plans that were priced, those that are not beaten, the chosen one and the budget.
    candidates = sorted(planner.seen.values(), key=lambda c: c.peak_bytes)
    gigabytes, seconds = [c.peak_bytes / 1e9 for c in candidates], [c.seconds for c in candidates]
    figure, axes = plt.subplots(figsize=(6.5, 4.8), layout="constrained")
    axes.scatter(gigabytes, seconds, s=12, label="looked at")
    front = find_pareto_front(candidates)
    axes.step(
        [c.peak_bytes / 1e9 for c in front], [c.seconds for c in front], where="post", label="not beaten"
    )
    axes.scatter([best.peak_bytes / 1e9], [best.seconds], s=60, marker="*", label="chosen", zorder=3)
    axes.axvline(planner.budget / 1e9, linewidth=0.8, linestyle="--", label="budget")
    title = f"{len(candidates)} plans for {planner.devices:,} × {planner.hardware.name}, by prediction"
    axes.set(xlabel="peak memory of a device, GB", ylabel="time of a step, s", title=title)

    # An axis whose values differ much is logarithmic.
    sizes = [planner.budget, *(c.peak_bytes for c in candidates)]
    for axis, scale, values in (
        (axes.xaxis, axes.set_xscale, sizes),
        (axes.yaxis, axes.set_yscale, seconds),
    ):
        span = max(values) / min(values)
        if span > WIDE:
            scale("log")
            # Few numbers, so that they do not meet, and none at a minor tick.
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if span < 1e4 else (1,)))
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def find_pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans that are faster than all that take less memory.

    Args:
        candidates: plans in the order of their memory, which the result keeps.
    """
    front: list[Candidate] = []
    for each in candidates:
        if not front or each.seconds < front[-1].seconds:
            front.append(each)
    return front
