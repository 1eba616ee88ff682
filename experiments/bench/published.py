"""Published: the predictor next to rates that others have published, row by row (`published_rows.csv`).

A row's model is lowered for its mesh, without a device, and its schedule is priced as every prediction is.
What hardware reaches of its data sheet is fitted on some sources and tried on the others.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, say
from experiments.configs.decoders import DecoderConfig
from experiments.training.decoder import Decoder, loss_function
from fnshard.analysis.hardware import COLLECTIVES, Curve, Hardware

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
    "h100": "h100", "h200": "h200",
}  # fmt: skip
RECOMPUTE = {  # what `shard_step` takes
    "none": {}, "full": {"remat": "unit"}, "selective": {"remat": "unit", "save": ("matmul", "attention")},
    "per-op selective": {"remat": "unit", "save": ("matmul", "attention")},
    "minimal_flash": {"remat": "unit", "save": ("matmul", "attention")},
}  # fmt: skip
CONSTANTS = ("matmul", "attention", "memory", "wire")
STEP = 1.2  # by how much a constant is changed, to see what it does


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
    rate: float


def published() -> tuple[list[PublishedRow], dict[str, int]]:
    """The rows that can be predicted, and how many cannot, by reason."""
    with ROWS.open(encoding="utf-8") as file:
        found = [_row(each) for each in csv.DictReader(file)]
    reasons: dict[str, int] = {}
    for reason in (each for each in found if isinstance(each, str)):
        reasons[reason] = reasons.get(reason, 0) + 1
    return [each for each in found if not isinstance(each, str)], reasons


def _row(row: Mapping[str, str]) -> PublishedRow | str:
    """A row, or why it is left out."""
    gpu = next((g for part, g in GPUS.items() if row["hardware"].lower().startswith(part)), None)
    rate, sequence = (re.match(r"[\d.]+", row[key]) for key in ("tok_s_gpu", "seq"))
    rows, ways = re.fullmatch(r"\d+", row["mbs"]), row["parallel"]
    problems = {
        "no rate in tokens": rate is None,
        "another device than the table has": gpu is None,
        "fp8 or narrower": "bf16" not in row["precision"].lower(),
        "pipeline or experts": bool(re.search(r"PP=?[1-9]\d|PP=?[2-9]|EP=?\d|pp-[2-9]", ways)),
        "sequence or rows of a batch are not said": sequence is None or rows is None,
        "recomputation is not said": row["recompute"] not in RECOMPUTE,
        "another model than the table has": _model(row["model"], 1) is None,
        "not compiled": "torchtitan" in row["source"] and "compile" not in ways,
        "products in chunks between exchanges": "async" in ways.lower(),
    }
    for reason, is_one in problems.items():
        if is_one:
            return reason
    devices, tensor = int(row["devices"]), re.search(r"TP(\d+)", ways)
    tensors = int(tensor[1]) if tensor else 1
    inner = 8 if "HSDP" in ways else devices // tensors
    axes = {"replicate": devices // tensors // inner, "shard": inner, "tensor": tensors}
    return PublishedRow(
        row["source"], row["model"], gpu, _model(row["model"], int(sequence[0])),
        {name: size for name, size in axes.items() if size > 1 or name == "shard"},
        int(rows[0]), int(row["accum"] or 1), row["recompute"],
        "mp=PURE" in ways or "fms" in row["source"], float(rate[0]),
    )  # fmt: skip


def _model(name: str, sequence: int) -> DecoderConfig | None:
    low = name.lower()
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
def scaled(hardware: Hardware, **by: float) -> Hardware:
    """Hardware that reaches so many times as much of its sheet, by constant."""

    def faster(curve: Curve, constant: str) -> Curve:
        return Curve(tuple((size, rate * by.get(constant, 1.0)) for size, rate in curve.points))

    links = {
        name: replace(link, **{c: faster(getattr(link, c), "wire") for c in COLLECTIVES})
        for name, link in (("node", hardware.node), ("network", hardware.network))
    }
    return replace(
        hardware, **links,
        flops={d: faster(c, "matmul") for d, c in hardware.flops.items()},
        attention={d: faster(c, "attention") for d, c in hardware.attention.items()},
        **{name: faster(getattr(hardware, name), "memory") for name in ("memory", "update", "copy")},
    )  # fmt: skip


def predicted(row: PublishedRow) -> dict[str, float]:
    """Tokens a second and device, as the table says, and where one constant is `STEP` times as large."""
    micro = min(row.micro_batches, MOST_MICRO_BATCHES)
    mesh = fs.make_mesh(**row.axes, device="cpu", abstract=True)
    with torch.device("meta"):
        tokens = torch.empty(row.rows * micro, row.model.context, dtype=torch.int64)
        loss, params = loss_function(Decoder(row.model))
    tensor = {"tensor": "tensor"} if "tensor" in row.axes else {}
    specs = fs.presets.PRESETS["hybrid_shard" if "replicate" in row.axes else "full_shard"](
        params, mesh, **tensor, storage_dtype=torch.float32, optimizer_dtype=torch.float32,
        compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if row.narrow else torch.float32,
    )  # fmt: skip
    step = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-4), accumulate=micro, prefetch=1, overlap=1,
        **RECOMPUTE[row.recompute],
    )  # fmt: skip
    lowered, hardware = step.lower(params, tokens, tokens), Hardware.named(row.hardware)
    count = tokens.numel() / row.axes.get("tensor", 1)
    ways = {"": hardware} | {name: scaled(hardware, **{name: STEP}) for name in CONSTANTS}
    return {name: count / lowered.timeline(each).step_seconds for name, each in ways.items()}


@dataclass(frozen=True)
class Comparison:
    """One row, what is predicted (`predicted`), and by what the fit multiplies the rate."""

    row: PublishedRow
    found: Mapping[str, float]
    gain: float = 1.0

    def error(self, fitted: bool) -> float:
        return abs(self.rate(fitted) / self.row.rate - 1)

    def rate(self, fitted: bool) -> float:
        return self.found[""] * (self.gain if fitted else 1.0)


def run(config: BenchConfig, folder: Path) -> Result:
    """How near are predictions to what others have measured on GPUs, by model and hardware?

    Constants are fitted, in logarithms, on the source with most rows, and tried on the others.
    """
    rows, reasons = published()
    say(f"{len(rows)} rows, {sum(reasons.values())} left out")
    with ProcessPoolExecutor(2) as pool:
        all_rows = [Comparison(*pair) for pair in zip(rows, pool.map(predicted, rows), strict=True)]
    sources = [r.source for r in rows]
    source = max(sources, key=sources.count)
    fits = {
        chip: fitted([c for c in all_rows if c.row.source == source and _chip(c.row) == chip])
        for chip in dict.fromkeys(map(_chip, rows))
    }
    all_rows = [replace(c, gain=_gain(c.found, fits[_chip(c.row)])) for c in all_rows]
    held = sorted(c.row.rate / c.rate(True) for c in all_rows if c.row.source != source)
    constants = "; ".join(
        f"{chip} {', '.join(f'{n} {v:.2f}' for n, v in fit.items())}" for chip, fit in fits.items()
    )
    left_out = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    notes = [
        "", f"constants, times those of the table: {constants}",
        f"held out, measured / predicted: {held[0]:.2f} to {held[-1]:.2f}, four fifths within "
        f"{_quantile(held, 0.1):.2f} and {_quantile(held, 0.9):.2f}",
        f"left out: {left_out}",
    ]  # fmt: skip
    values = [
        {**vars(c.row), "model": vars(c.row.model), "predicted": c.found, "gain": c.gain} for c in all_rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _scatter(all_rows, source, folder)
    return Result(_table(all_rows, source), notes, {"rows": values, "fitted": fits, "left_out": reasons})


def _table(all_rows: Sequence[Comparison], source: str) -> list[list[str]]:
    groups: dict[str, list[Comparison]] = {"fitted on": [], "held out": []}
    for each in all_rows:
        groups["fitted on" if each.row.source == source else "held out"].append(each)
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


def _chip(row: PublishedRow) -> str:
    return row.hardware[:4]


def fitted(rows: Sequence[Comparison]) -> dict[str, float]:
    """The constants, times those of the table, that bring predictions nearest in logarithms; nothing says by
    how much a constant that no row is bound by differs, so small changes are preferred."""
    if not rows:
        return dict.fromkeys(CONSTANTS, 1.0)
    slopes = torch.tensor([[_slope(each.found, c) for c in CONSTANTS] for each in rows], dtype=torch.float64)
    gaps = torch.tensor([math.log(each.row.rate / each.rate(False)) for each in rows], dtype=torch.float64)
    prior = len(rows) * 1e-3 * torch.eye(len(CONSTANTS), dtype=torch.float64)
    logs = torch.linalg.solve(slopes.T @ slopes + prior, slopes.T @ gaps)
    return dict(zip(CONSTANTS, logs.exp().tolist(), strict=True))


def _slope(found: Mapping[str, float], constant: str) -> float:
    return math.log(found[constant] / found[""]) / math.log(STEP)


def _gain(found: Mapping[str, float], fit: Mapping[str, float]) -> float:
    return math.exp(sum(_slope(found, c) * math.log(fit[c]) for c in CONSTANTS))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; 1 of fewer than three.

    >>> rank_correlation([1, 5, 3], [10, 30, 20])
    1.0
    """
    if len(a) < 3:
        return 1.0
    ranks = [[float(sorted(values).index(v)) for v in values] for values in (a, b)]
    return statistics.correlation(*ranks)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _scatter(all_rows: Sequence[Comparison], source: str, folder: Path) -> None:
    """Measured against predicted rates, in `published.png`."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    for label, mark, was_fitted in (("fitted on", ".", True), ("held out", "x", False)):
        some = [c for c in all_rows if (c.row.source == source) is was_fitted]
        axes.loglog([c.row.rate for c in some], [c.rate(True) for c in some], mark, label=label)
    ends = [pick(c.row.rate for c in all_rows) for pick in (min, max)]
    axes.loglog(ends, ends, linewidth=0.8)
    axes.set(xlabel="measured tokens/s and GPU", ylabel="predicted")
    axes.legend()
    figure.savefig(folder / "published.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
