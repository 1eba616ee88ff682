"""Published: the predictor next to rates that others have published, row by row (`published_rows.csv`).

A row's model is lowered for its mesh, without a device, and its schedule is priced as every prediction is.
What hardware reaches of its data sheet is fitted on some sources and tried on the others.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, rank_correlation, say
from experiments.configs.decoders import DecoderConfig
from experiments.training.decoder import Decoder, loss_function
from fnshard.analysis.calibrate import Observation, changed, fitted
from fnshard.analysis.hardware import Hardware

ROWS = Path(__file__).with_name("published_rows.csv")
MOST_MICRO_BATCHES = 4  # of a step that is lowered; more repeat them
MPT = {  # llm-foundry's configurations: width, heads, layers
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
SIZES = ("width", "layers", "heads", "kv_heads", "mlp", "vocab")
LLAMA = {  # width, layers, heads, kv_heads, mlp, vocab, by a part of the name
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000), "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": (8192, 48, 64, 8, 22016, 32000), "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
    "llama-3-8b": (4096, 32, 32, 8, 14336, 128256), "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": (8192, 80, 64, 8, 28672, 128256), "llama-3.1-70b": (8192, 80, 64, 8, 28672, 128256),
    "tinyllama-1.1b": (2048, 22, 32, 4, 5632, 32000),
}  # fmt: skip
GPUS = {  # a row's hardware, and which of the table it is; the first that the name begins with
    "a100_40gb": "a100-40gb", "a100-40g": "a100-40gb", "a100": "a100", "h100 96gb hbm2e 500w": "h100-500w",
    "h100": "h100", "dgx-h100": "h100", "h200": "h200", "8x b200": "b200", "b200": "b200", "dgx-b200": "b200",
    "dgx-gb200": "gb200", "dgx-gb300": "gb300",
}  # fmt: skip
# Chips that share constants; any other has its own.
GENERATION = {"a100": "a100", "h100": "h100", "h200": "h100"}
RECOMPUTE = {  # what `shard_step` takes
    "none": {}, "full": {"remat": "unit"}, "selective": {"remat": "unit", "save": ("matmul", "attention")},
    "per-op selective": {"remat": "unit", "save": ("matmul", "attention")},
    "minimal_flash": {"remat": "unit", "save": ("matmul", "attention")},
}  # fmt: skip
CONSTANTS = ("matmul", "attention", "memory", "wire")  # that are fitted


@dataclass(frozen=True)
class PublishedRow:
    """What somebody has measured: `rate` in tokens a second and device; `axes` of the mesh."""

    source: str
    name: str
    hardware: str
    model: DecoderConfig
    axes: Mapping[str, int]
    rows: int
    micro_batches: int
    recompute: str
    narrow: bool
    fp8: bool
    rate: float


def published() -> tuple[list[PublishedRow], Counter[str]]:
    """The rows that can be predicted, and how many cannot, by reason."""
    with ROWS.open(encoding="utf-8") as file:
        found = [_row(each) for each in csv.DictReader(file)]
    reasons = Counter(each for each in found if isinstance(each, str))
    return [each for each in found if not isinstance(each, str)], reasons


def _row(row: Mapping[str, str]) -> PublishedRow | str:
    """A row, or why it is left out."""
    gpu = next((g for part, g in GPUS.items() if row["hardware"].lower().startswith(part)), None)
    rate, sequence = (re.match(r"[\d.]+", row[key]) for key in ("tok_s_gpu", "seq"))
    ways, precision, recompute = row["parallel"], row["precision"].lower(), row["recompute"].split(" (")[0]
    rows = _rows(row["mbs"], sequence and int(sequence[0]))
    axes = {name: int(found[1]) if (found := re.search(rf"{short}(\d+)", ways)) else 1
            for name, short in (("context", "CP"), ("tensor", "TP"))}  # fmt: skip
    fp8 = "fp8" in precision
    problems = {
        "no rate in tokens": rate is None,
        "another device than the table has": gpu is None,
        "a power limit that is not said": "power limited" in row["hardware"],
        "products narrower than bf16 in blocks or rows": bool(re.search("mx|nv|row", precision)),
        "precision is not said": "bf16" not in precision and not fp8,
        "pipeline or experts": bool(re.search(r"PP=?[1-9]\d|PP=?[2-9]|EP=?[2-9]|EP=?1\d|pp-[2-9]", ways)),
        "another model than the table has": _model(row["model"], 1) is None,
        "sequence or rows of a batch are not said": sequence is None or rows is None,
        "recomputation is not said": recompute not in RECOMPUTE,
        "not compiled": "torchtitan" in row["source"] and "compile" not in ways,
        "products in chunks between exchanges": "async" in ways.lower(),
        "fp8 on a tensor axis": fp8 and axes["tensor"] > 1,
    }
    for reason, is_one in problems.items():
        if is_one:
            return reason
    outer = int(row["devices"]) // math.prod(axes.values())
    inner = 8 if "HSDP" in ways else outer
    axes = {"replicate": outer // inner, "shard": inner, **axes}
    return PublishedRow(
        row["source"], row["model"], gpu, _model(row["model"], int(sequence[0])),
        {name: size for name, size in axes.items() if size > 1 or name == "shard"},
        rows, int(row["accum"] or 1), recompute, "mp=PURE" in ways or "fms" in row["source"], fp8,
        float(rate[0]),
    )  # fmt: skip


def _rows(text: str, sequence: int | None) -> int | None:
    """Of a micro-batch, that says how many or of how many thousand tokens."""
    tokens = re.match(r"(\d+)k tokens", text)
    if tokens and sequence:
        return 1024 * int(tokens[1]) // sequence
    return int(text) if text.isdigit() else None


def _model(name: str, sequence: int) -> DecoderConfig | None:
    low = re.sub(r"^llama3(?=[-.])", "llama-3", re.sub("[ _]", "-", name.lower()))
    if low.startswith("mpt-"):
        width, heads, layers = MPT[low.removeprefix("mpt-")]
        # Two matrices of 4 D there have as many numbers as three of 8/3 D here.
        return DecoderConfig(
            width=width, layers=layers, heads=heads, kv_heads=heads, context=sequence, vocab=50368,
            mlp=round(8 * width / 3), tied=True,
        )  # fmt: skip
    found = next((sizes for part, sizes in LLAMA.items() if low.startswith(part)), None)
    if found is None:
        return None
    return DecoderConfig(**dict(zip(SIZES, found, strict=True)), context=sequence)


# ------------------------------------------------------------------ predictions


@dataclass(frozen=True)
class Comparison:
    """One row next to what is predicted of it.

    Args:
        step: seconds that are predicted, with constants as they are and changed, and those of the rate.
        tokens: of one device's step.
        fit: by what the fit multiplies constants.
    """

    row: PublishedRow
    step: Observation
    tokens: float
    fit: Mapping[str, float] = field(default_factory=dict)

    def rate(self, fitted: bool = True) -> float:
        """Predicted tokens a second and device."""
        return self.tokens / self.step.seconds(self.fit if fitted else {})

    def error(self, fitted: bool = True) -> float:
        return abs(self.rate(fitted) / self.row.rate - 1)


def compared(row: PublishedRow) -> Comparison:
    """Lower a row's step and price it."""
    micro = min(row.micro_batches, MOST_MICRO_BATCHES)
    mesh = fs.make_mesh(**row.axes, device="cpu", abstract=True)
    with torch.device("meta"):
        tokens = torch.empty(row.rows * micro, row.model.context, dtype=torch.int64)
        loss, params = loss_function(Decoder(row.model))
    tensor = {"tensor": "tensor"} if "tensor" in row.axes else {}
    specs = fs.presets.PRESETS["hybrid_shard" if "replicate" in row.axes else "full_shard"](
        params, mesh, **tensor, storage_dtype=torch.float32, optimizer_dtype=torch.float32,
        compute_dtype=torch.float8_e4m3fn if row.fp8 else torch.bfloat16,
        reduce_dtype=torch.bfloat16 if row.narrow else torch.float32,
    )  # fmt: skip
    step = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-4), accumulate=micro, prefetch=1, overlap=1,
        **RECOMPUTE[row.recompute],
    )  # fmt: skip
    lowered = step.lower(params, tokens, tokens)
    count = tokens.numel() / row.axes.get("tensor", 1) / row.axes.get("context", 1)
    ways = changed(Hardware.named(row.hardware), CONSTANTS)
    seconds = {name: lowered.timeline(each).step_seconds for name, each in ways.items()}
    return Comparison(row, Observation(seconds, count / row.rate), count)


def run(config: BenchConfig, folder: Path) -> Result:
    """How near are predictions to what others have measured on GPUs, by model and hardware?

    Constants of each generation are fitted, in logarithms, on every other source by number of rows, each
    source with the same weight; the interval is that of each of these sources by constants of the others.
    Both are tried on the sources that are held out.
    """
    rows, reasons = published()
    say(f"{len(rows)} rows, {sum(reasons.values())} left out")
    with ProcessPoolExecutor(2) as pool:
        all_rows = list(pool.map(compared, rows))
    sources = halves(rows)
    fits = {name: _fit(name, all_rows, sources[0]) for name in dict.fromkeys(map(_generation, rows))}
    all_rows = [replace(c, fit=fits[_generation(c.row)]) for c in all_rows]
    interval = _interval(all_rows, sources[0])
    held = sorted(c.row.rate / c.rate() for c in all_rows if c.row.source in sources[1])
    within = sum(interval[0] <= 1 / each <= interval[1] for each in held)
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
        {
            **vars(c.row),
            "model": vars(c.row.model),
            "predicted": c.rate(False),
            "fitted": c.rate(),
            "step": vars(c.step),
        }
        for c in all_rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _scatter(all_rows, sources[0], folder)
    return Result(
        _table(all_rows, sources), notes,
        {"rows": values, "fitted": fits, "interval": interval, "left_out": reasons},
    )  # fmt: skip


def halves(rows: Sequence[PublishedRow]) -> tuple[list[str], list[str]]:
    """Sources that constants are fitted on, and those they are tried on: every other, by number of rows."""
    counts = Counter(row.source for row in rows)
    ordered = sorted(counts, key=lambda source: (-counts[source], source))
    return ordered[::2], ordered[1::2]


def _fit(generation: str, all_rows: Sequence[Comparison], sources: Sequence[str]) -> dict[str, float]:
    some = [c for c in all_rows if c.row.source in sources and _generation(c.row) == generation]
    counts = Counter(c.row.source for c in some)
    return fitted([replace(c.step, weight=1 / counts[c.row.source]) for c in some], CONSTANTS)


def _interval(all_rows: Sequence[Comparison], sources: Sequence[str]) -> tuple[float, float]:
    """Between which shares of the predicted seconds nine tenths of the rows lie, each source with the same
    weight and predicted by constants of the others: what to expect of one that was never seen."""
    weighted = []
    for source in sources:
        some = [c for c in all_rows if c.row.source == source]
        others = [each for each in sources if each != source]
        known = {_generation(c.row) for c in all_rows if c.row.source in others}
        some = [c for c in some if _generation(c.row) in known]  # what others say nothing of is left out
        fits = {g: _fit(g, all_rows, others) for g in known}
        ratios = (replace(c, fit=fits[_generation(c.row)]).rate() / c.row.rate for c in some)
        weighted += [(ratio, 1 / len(some)) for ratio in ratios]
    weighted.sort()
    whole = sum(weight for _, weight in weighted)
    sums = list(itertools.accumulate(weight / whole for _, weight in weighted))
    low, high = (weighted[bisect_left(sums, share)][0] for share in (0.05, 0.95))
    return low, high


def _generation(row: PublishedRow) -> str:
    chip = row.hardware.partition("-")[0]
    return GENERATION.get(chip, chip)


def _table(all_rows: Sequence[Comparison], sources: tuple[list[str], list[str]]) -> list[list[str]]:
    groups: dict[str, list[Comparison]] = {}
    for name, some in zip(("fitted on", "held out"), sources, strict=True):
        groups[name] = [c for c in all_rows if c.row.source in some]
        for source in some:
            groups[f"  {source.partition(' [')[0][:60]}"] = [c for c in all_rows if c.row.source == source]
    for key in ("hardware", "name"):
        for each in all_rows:
            groups.setdefault(f"  {getattr(each.row, key).lower()}", []).append(each)
    table = [["", "rows", "rank", "median error", "worst", "before the fit: rank", "median error", "worst"]]
    for name, some in groups.items():
        table.append([name, f"{len(some)}"])
        for fit in (True, False):
            errors = [each.error(fit) for each in some]
            rank = rank_correlation([c.row.rate for c in some], [c.rate(fit) for c in some])
            table[-1] += [f"{rank:.3f}", f"{statistics.median(errors):.1%}", f"{max(errors):.0%}"]
    return table


def _scatter(all_rows: Sequence[Comparison], sources: Sequence[str], folder: Path) -> None:
    """Measured against predicted rates, in `published.png`."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    for label, mark, was_fitted in (("fitted on", ".", True), ("held out", "x", False)):
        some = [c for c in all_rows if (c.row.source in sources) is was_fitted]
        axes.loglog([c.row.rate for c in some], [c.rate() for c in some], mark, label=label)
    ends = [pick(c.row.rate for c in all_rows) for pick in (min, max)]
    axes.loglog(ends, ends, linewidth=0.8)
    axes.set(xlabel="measured tokens/s and GPU", ylabel="predicted")
    axes.legend()
    figure.savefig(folder / "published.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
