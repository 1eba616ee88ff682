"""The case `published`: compare predictions with rates that others have published in `published_rows.csv`.

A row's model is lowered for its mesh, without a device, and its schedule is priced as every prediction is.
What hardware reaches of its data sheet is fitted on some sources and tried on the others.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, rank_correlation, say
from experiments.lib.decoder import Decoder, DecoderConfig, loss_function
from experiments.plan.unroll import lower_from, trace_few_layers
from fnshard.analysis.calibrate import Observation, fit_constants, vary
from fnshard.analysis.hardware import Hardware
from fnshard.compiler.lower import Front
from fnshard.step.step import Step

ROWS = Path(__file__).with_name("published_rows.csv")
MOST_MICRO_BATCHES = 4  # in a step that is lowered, since further ones only repeat them
REPORT_EVERY = 30  # traces between two lines that say how many rows are priced
SIZES = ("width", "layers", "heads", "kv_heads", "mlp", "vocab", "context")
AXES = ("pipeline", "replicate", "shard", "tensor", "context")
GENERATION = {"h200": "h100"}  # chips that share the constants of another one
RECOMPUTE = {  # keywords of `shard_step`
    "none": {}, "unit": {"remat": "unit"}, "selective": {"remat": "unit", "save": ("matmul", "attention")},
}  # fmt: skip
CONSTANTS = ("matmul", "attention", "memory", "wire")  # those that are fitted


@dataclass(frozen=True)
class PublishedRow:
    """A published measurement.

    Args:
        axes: the sizes of the mesh's axes.
        rate: tokens a second and device.
        chunks: the number of chunks of each stage of a pipeline, whose leaves stay gathered.
    """

    source: str
    name: str
    hardware: str
    model: DecoderConfig
    axes: Mapping[str, int]
    rows: int
    micro_batches: int
    recompute: str
    compute_dtype: str
    reduce_dtype: str
    rate: float
    chunks: int = 1

    @property
    def preset(self) -> str:
        """Return the name of the row's preset in `fnshard.presets`."""
        if "pipeline" in self.axes:
            return "shard_grad_op"
        return "hybrid_shard" if "replicate" in self.axes else "full_shard"


def read_published() -> tuple[list[PublishedRow], Counter[str]]:
    """Return the rows that can be predicted, and the numbers of those that cannot, by reason.

    The first columns of the file are what the source says. Those from `left_out` on are what that means for a
    step of fnshard. In the pipelines of arXiv 2407.21783 the first chunk has the embedding alone, the last
    the head alone, and all others have equally many of 126 layers, which makes 8 chunks for each of 16
    stages. At a context of 8K nothing is recomputed, leaves stay gathered, and gradients are summed in fp32.
    """
    with ROWS.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    reasons = Counter(line["left_out"] for line in lines if line["left_out"])
    return [_parse_row(line) for line in lines if not line["left_out"]], reasons


def _parse_row(row: Mapping[str, str]) -> PublishedRow:
    return PublishedRow(
        source=row["source"], name=row["model"], hardware=row["gpu"],
        model=DecoderConfig(**{size: int(row[size]) for size in SIZES}, tied=row["tied"] == "1"),
        axes={name: int(row[f"{name}_axis"]) for name in AXES if row[f"{name}_axis"]},
        rows=int(row["rows"]), micro_batches=int(row["micro_batches"]), recompute=row["remat"],
        compute_dtype=row["compute"], reduce_dtype=row["reduce"], rate=float(row["rate"]),
        chunks=int(row["chunks"] or 1),
    )  # fmt: skip


# ------------------------------------------------------------------ predictions


@dataclass(frozen=True)
class Comparison:
    """A comparison of a row with its prediction.

    Args:
        step: the seconds that are predicted, with constants of the table and with changed ones, and those of
            the rate.
        tokens: the tokens of one device's step.
        fit: the factors by which the fit multiplies constants.
    """

    row: PublishedRow
    step: Observation
    tokens: float
    fit: Mapping[str, float] = field(default_factory=dict)

    def rate(self, fitted: bool = True) -> float:
        """Predict the tokens a second and device, with constants as fitted or of the table."""
        return self.tokens / self.step.seconds(self.fit if fitted else {})

    def error(self, fitted: bool = True) -> float:
        return abs(self.rate(fitted) / self.row.rate - 1)


def compare(row: PublishedRow) -> Comparison:
    """Lower a row's step and price it."""
    return compare_alike([row])[0]


def find_alike(rows: Sequence[PublishedRow]) -> list[list[PublishedRow]]:
    """Divide rows into those that one trace serves: it depends on neither data axes nor recomputation."""
    groups: dict[Any, list[PublishedRow]] = {}
    for row in rows:
        split = row.axes.get("tensor"), row.axes.get("context")
        key = row.model, row.rows, row.compute_dtype, row.reduce_dtype, split
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def compare_alike(rows: Sequence[PublishedRow]) -> list[Comparison]:
    """Lower the steps of rows that one trace serves, see `find_alike`, and price them."""
    # Trace few layers without a pipeline, or all of them if they are few.
    first, kernels = rows[0], {}
    alone = replace(first, axes={n: s for n, s in first.axes.items() if n != "pipeline"}, chunks=1)

    def trace(layers: int) -> Front:
        step, _, batch = make_step(replace(alone, model=replace(alone.model, layers=layers)), 1)
        return step.front(*batch)

    front = trace_few_layers(trace, first.model.layers) or trace(first.model.layers)

    # Lower and price each row's step from that trace.
    comparisons = []
    for row in rows:
        # How long stages of a pipeline wait for one another depends on how many micro-batches there are.
        micro = row.micro_batches if "pipeline" in row.axes else min(row.micro_batches, MOST_MICRO_BATCHES)
        step, _, batch = make_step(row, micro)
        lowered = lower_from(front, step, batch, step.options, kernels)
        variants = vary(Hardware.named(row.hardware), CONSTANTS)
        seconds = {name: lowered.timeline(hardware).step_seconds for name, hardware in variants.items()}
        parts = math.prod(row.axes.get(n, 1) for n in ("pipeline", "tensor", "context"))
        tokens = batch[0].numel() / parts
        comparisons.append(Comparison(row, Observation(seconds, tokens / row.rate), tokens))
    return comparisons


def make_step(row: PublishedRow, micro: int) -> tuple[Step, Any, tuple[Tensor, Tensor]]:
    """Make the step of a row with so many micro-batches. Return it with the parameters and a rank's batch."""
    mesh = fs.make_mesh(**row.axes, device="cpu", abstract=True)
    with torch.device("meta"):
        tokens = torch.empty(row.rows * micro, row.model.context, dtype=torch.int64)
        loss, params = loss_function(Decoder(row.model))
    tensor = {"tensor": "tensor"} if "tensor" in row.axes else {}
    specs = fs.presets.PRESETS[row.preset](
        params, mesh, **tensor, chunks=row.chunks, storage_dtype=torch.float32, optimizer_dtype=torch.float32,
        compute_dtype=getattr(torch, row.compute_dtype), reduce_dtype=getattr(torch, row.reduce_dtype),
    )  # fmt: skip
    step = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-4), accumulate=micro, prefetch=1, overlap=1,
        **RECOMPUTE[row.recompute],
    )  # fmt: skip
    step.resolve(params)
    return step, params, (tokens, tokens)


def run(config: BenchConfig, folder: Path) -> Result:
    """Are predictions near to what others have measured on GPUs, by model and hardware?

    Constants of each generation are fitted, in logarithms, on every other source by number of rows, each
    source with the same weight; the interval is that of each of these sources by constants of the others.
    Both are tried on the sources that are held out.
    """
    # Predict all rows.
    rows, reasons = read_published()
    say(f"{len(rows)} rows, {sum(reasons.values())} left out")
    groups = find_alike(rows)
    with ProcessPoolExecutor(2) as pool:
        all_rows: list[Comparison] = []
        for number, comparisons in enumerate(pool.map(compare_alike, groups), 1):
            all_rows += comparisons
            if number % REPORT_EVERY == 0:
                say(f"{len(all_rows)} rows are priced")

    # Fit constants on some sources, and try them on the others.
    fitted_on, held_out = split_sources(rows)
    generations = dict.fromkeys(map(_find_generation, rows))
    fits = {name: _fit_generation(name, all_rows, fitted_on) for name in generations}
    all_rows = [replace(c, fit=fits[_find_generation(c.row)]) for c in all_rows]
    interval = _find_interval(all_rows, fitted_on)
    held = sorted(c.row.rate / c.rate() for c in all_rows if c.row.source in held_out)
    within = sum(interval[0] <= 1 / each <= interval[1] for each in held)

    # Report the constants, the interval and all rows.
    constants = "; ".join(
        f"{chip} {', '.join(f'{n} {v:.2f}' for n, v in fit.items())}" for chip, fit in fits.items()
    )
    left_out = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    notes = [
        "", f"constants, times those of the table: {constants}",
        f"the interval of a step's seconds: {interval[0]:.2f} to {interval[1]:.2f} times what is predicted; "
        f"it holds {within} of {len(held)} rows that are held out ({held[0]:.2f} to {held[-1]:.2f} "
        "of what is predicted, in tokens a second)",
        f"left out: {left_out}",
    ]  # fmt: skip
    values = [
        vars(c.row) | {"model": vars(c.row.model), "predicted": c.rate(False), "fitted": c.rate()}
        for c in all_rows
    ]
    return Result(
        _make_table(all_rows, fitted_on, held_out), notes,
        {"rows": values, "fitted": fits, "interval": interval, "left_out": reasons},
    )  # fmt: skip


def split_sources(rows: Sequence[PublishedRow]) -> tuple[list[str], list[str]]:
    """Divide the sources into those that constants are fitted on and those that they are tried on.

    Ordered by their number of rows, every other source is held out. So are rows with a pipeline.
    """
    counts = Counter(row.source for row in rows if "pipeline" not in row.axes)
    piped = dict.fromkeys(row.source for row in rows if "pipeline" in row.axes and row.source not in counts)
    ordered = sorted(counts, key=lambda source: (-counts[source], source))
    return ordered[::2], [*ordered[1::2], *piped]


def _fit_generation(
    generation: str, all_rows: Sequence[Comparison], sources: Sequence[str]
) -> dict[str, float]:
    """Fit the constants of a generation on the rows of some sources, each source with the same weight."""
    known = [c for c in all_rows if c.row.source in sources and _find_generation(c.row) == generation]
    counts = Counter(c.row.source for c in known)
    return fit_constants([replace(c.step, weight=1 / counts[c.row.source]) for c in known], CONSTANTS)


def _find_interval(all_rows: Sequence[Comparison], sources: Sequence[str]) -> tuple[float, float]:
    """Find the interval, in shares of the predicted seconds, in which nine tenths of the rows lie.

    Each source has the same weight, and is predicted by constants of the others. So the interval is what to
    expect of a source that was never seen.
    """
    # Predict the rows of each source by the other sources, if these have its generation.
    weighted = []
    for source in sources:
        others = [each for each in sources if each != source]
        known = {_find_generation(c.row) for c in all_rows if c.row.source in others}
        rows = [c for c in all_rows if c.row.source == source and _find_generation(c.row) in known]
        fits = {g: _fit_generation(g, all_rows, others) for g in known}
        ratios = (replace(c, fit=fits[_find_generation(c.row)]).rate() / c.row.rate for c in rows)
        weighted += [(ratio, 1 / len(rows)) for ratio in ratios]

    # Leave a twentieth of the weight out at each end.
    weighted.sort()
    total = sum(weight for _, weight in weighted)
    sums = list(itertools.accumulate(weight / total for _, weight in weighted))
    low, high = (weighted[bisect_left(sums, share)][0] for share in (0.05, 0.95))
    return low, high


def _find_generation(row: PublishedRow) -> str:
    chip = row.hardware.partition("-")[0]
    return GENERATION.get(chip, chip)


def _make_table(
    all_rows: Sequence[Comparison], fitted_on: Sequence[str], held_out: Sequence[str]
) -> list[list[str]]:
    """Return a table with a line for each source, and for each name of hardware and model."""
    groups: dict[str, list[Comparison]] = {}
    for name, sources in (("fitted on", fitted_on), ("held out", held_out)):
        groups[name] = [c for c in all_rows if c.row.source in sources]
        for source in sources:
            groups[f"  {source.partition(' [')[0][:60]}"] = [c for c in all_rows if c.row.source == source]
    for key in ("hardware", "name"):
        for each in all_rows:
            groups.setdefault(f"  {getattr(each.row, key).lower()}", []).append(each)
    table = [["", "rows", "rank", "median error", "worst", "before the fit: rank", "median error", "worst"]]
    for name, members in groups.items():
        line = [name, f"{len(members)}"]
        for fit in (True, False):
            errors = [each.error(fit) for each in members]
            rank = rank_correlation([c.row.rate for c in members], [c.rate(fit) for c in members])
            line += [f"{rank:.3f}", f"{statistics.median(errors):.1%}", f"{max(errors):.0%}"]
        table.append(line)
    return table
