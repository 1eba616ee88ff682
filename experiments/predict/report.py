"""Tables and pictures of predicted against measured step times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.data.files import write_json
from experiments.tables import markdown
from fnshard.analysis.timeline import Timeline

TARGET, APART = 0.25, 0.10  # how far off a prediction may be; how far apart plans must be to be ordered


def table(found: Mapping[str, Any]) -> str:
    rows = [["plan", "measured ms", "predicted ms", "error"]]
    for plan in found["plans"]:
        times = f"{plan['measured_ms']:.0f}", f"{plan['predicted_ms']:.0f}"
        rows.append([plan["plan"], *times, f"{error(plan):+.0%}"])
    return f"{markdown(rows)}\n\n{verdict(found)}"


def error(plan: Mapping[str, Any]) -> float:
    return plan["predicted_ms"] / plan["measured_ms"] - 1


def verdict(found: Mapping[str, Any]) -> str:
    plans = found["plans"]
    worst = max(map(error, plans), key=abs, default=0.0)
    near = sum(abs(error(p)) <= TARGET for p in plans)
    wrong = wrong_pairs(plans)
    text = f"{near} of {len(plans)} within {TARGET:.0%}, worst {worst:+.1%}; "
    text += f"rank correlation {spearman(plans):.3f}; "
    pairs = len(list(clear_pairs(plans)))
    text += f"{pairs - len(wrong)} of {pairs} pairs more than {APART:.0%} apart in the right order"
    return text + "".join(f"\n  wrong: {a['plan']} < {b['plan']}" for a, b in wrong)


def clear_pairs(plans: Sequence[Mapping[str, Any]]):
    """Faster and slower, where the measured times are clearly apart."""
    for a, b in itertools.combinations(sorted(plans, key=lambda p: p["measured_ms"]), 2):
        if b["measured_ms"] > (1 + APART) * a["measured_ms"]:
            yield a, b


def wrong_pairs(plans: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Clear pairs that were predicted the other way round."""
    return [(a, b) for a, b in clear_pairs(plans) if a["predicted_ms"] >= b["predicted_ms"]]


def spearman(plans: Sequence[Mapping[str, Any]]) -> float:
    """Rank correlation of predicted and measured times."""
    n = len(plans)
    if n < 2:
        return 1.0
    ranks = [
        {p["plan"]: i for i, p in enumerate(sorted(plans, key=lambda p, k=key: p[k]))}
        for key in ("measured_ms", "predicted_ms")
    ]
    return 1 - 6 * sum((ranks[0][p["plan"]] - ranks[1][p["plan"]]) ** 2 for p in plans) / (n * (n * n - 1))


def write(found: Mapping[str, Any], timelines: Sequence[Timeline], folder: Path) -> None:
    """`predict.json`, a picture of all plans, one of each plan's timeline; prints the table."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "predict.json", found)
    scatter(found, folder / "predict.png")
    for plan, line in zip(found["plans"], timelines, strict=True):
        name = plan["plan"].replace(" ", "_").replace("=", "")
        fs.plot.timeline(line, folder / "timelines" / f"{name}.png")
    print(table(found), flush=True)


def scatter(found: Mapping[str, Any], path: Path) -> None:
    """Predicted over measured, both logarithmic, the band of the target shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plans = found["plans"]
    figure, axes = pyplot.subplots(figsize=(7.5, 6), layout="constrained")
    times = [p[key] for p in plans for key in ("measured_ms", "predicted_ms")]
    ends = [0.7 * min(times), 1.5 * max(times)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends, [e * (1 - TARGET) for e in ends], [e * (1 + TARGET) for e in ends], color="#0072B2", alpha=0.12
    )
    axes.scatter(
        [p["measured_ms"] for p in plans], [p["predicted_ms"] for p in plans], color="#D55E00", zorder=3
    )
    for place, plan in enumerate(sorted(plans, key=lambda p: p["measured_ms"])):
        axes.annotate(
            plan["plan"],
            (plan["measured_ms"], plan["predicted_ms"]),
            xytext=(8, -3) if place % 2 else (-8, 3),
            ha="left" if place % 2 else "right",
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="measured ms a step", ylabel="predicted ms a step")
    axes.set_title(f"{found['ranks']} CPU ranks, band: within {TARGET:.0%}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
