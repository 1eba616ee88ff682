"""One table of all parts: what is measured, what came out, what is expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from experiments.bench.contenders import GRAPH
from experiments.gpu.checks import VARIANTS
from experiments.gpu.parts import CONTENDERS, LIMIT, ROWS
from experiments.gpu.split import KINDS
from experiments.tables import markdown as table

Found = Mapping[str, Any]
Results = Mapping[str, Found]  # by part
Line = tuple[str, str, Callable[[Results], str], str]  # part, what, its value, what is expected
COMPILED = "fsdp2_compiled"
NAMES = {
    LIMIT: "whole-model torch.compile",
    COMPILED: "FSDP2 + compiled blocks",
    GRAPH: "full_shard, a CUDA graph",
    "fsdp2": "FSDP2",
    "ddp": "DDP",
}
# Estimated for an H200, bf16, 2 rows of 4096.
MILLISECONDS = {
    "products": "78",
    "attention": "22 to 33",
    "elementwise": "17",
    "update": "7 to 8",
    "casts": "0",  # the update writes what the next step reads
    "communication": "0",
    "idle": "2 to 3",
}


def markdown(results: Results, failures: Mapping[str, str] | None = None) -> str:
    """The table; cells are empty where a part has not run or has failed."""
    rows = [("part", "what", "measured", "target")]
    rows += [(part, what, _cell(value, results), target) for part, what, value, target in lines()]
    rows += [(part, "failed", reason, "") for part, reason in (failures or {}).items()]
    return table([[cell.replace("|", "/") for cell in row] for row in rows], left=4)


def _cell(value: Callable[[Results], str], results: Results) -> str:
    try:
        return value(results)
    except KeyError:  # a part without a result, or what a CPU cannot tell
        return ""


def lines() -> Iterator[Line]:
    yield "versions", "torch, CUDA, cuDNN, NCCL", partial(_values, "torch", "cuda", "cudnn", "nccl"), ""
    yield "versions", "device", partial(_values, "device"), ""
    yield (
        "tiny",
        "losses of five steps",
        lambda r: " ".join(f"{x:.3f}" for x in r["tiny"]["losses"]),
        "finite",
    )
    yield "tiny", "attention's kernels", lambda r: _counts(r["tiny"]["attention"]), ""
    yield "tests", "pytest -m gpu", partial(_tests, "tests"), "none failed"
    for name in VARIANTS:
        yield "syncs", name, partial(_sync, name), "silent"
    yield "profile", "step", lambda r: _step(r["profile"]), "128 ms, MFU 45%"
    for kind in KINDS:
        target = f"{MILLISECONDS[kind]} ms" if kind in MILLISECONDS else ""
        yield "profile", kind, partial(_kind, kind), target
    for rows in ROWS:
        yield from _bench(rows)
    yield "cudnn", "full_shard, cuDNN's attention last", lambda r: _contender(r["cudnn"]), ""
    yield "predictions", "peak bytes, predicted / measured", _bytes, "0.95 to 1.05"
    for source in ("data sheet", "measured rates"):
        yield "predictions", f"time by {source} / measured", partial(_time, source), "0.75 to 1.25"
    yield "equal_bits", "two runs as they are", partial(_bits, "plain"), ""
    yield "equal_bits", "two runs, deterministic=True", partial(_bits, "deterministic"), "equal"
    for name in ("first", "second"):
        yield "saves", f"{name} save: call, step beside it, whole", partial(_save, name), ""
    yield "core", "CPU tests, the GPU hidden", partial(_tests, "core"), "none failed"


def _bench(rows: int) -> Iterator[Line]:
    part = f"bench-{rows}"
    for name in CONTENDERS:
        yield part, NAMES.get(name, name), partial(lambda key, r: _contender(r[key]), f"{part}-{name}"), ""
    for base, target in ((COMPILED, "1.05"), (LIMIT, "1.00")):
        value = partial(_against, part, base, "tokens_per_s")
        yield part, f"full_shard's throughput / {NAMES[base]}", value, f"{target} or more"
    value = partial(_against, part, COMPILED, "peak_bytes")
    yield part, f"full_shard's peak bytes / {NAMES[COMPILED]}", value, "0.85 or less"


def _values(*keys_and_results: Any) -> str:
    *keys, results = keys_and_results
    return ", ".join(str(results["versions"][key]) for key in keys if key in results["versions"])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _tests(part: str, results: Results) -> str:
    found = results[part]
    return f"{found['passed']} passed" + (
        f", failed: {', '.join(found['failed'])}" if found["failed"] else ""
    )


def _sync(name: str, results: Results) -> str:
    place = results["syncs"][name]
    return "" if place is None else place or "silent"


def _step(found: Found) -> str:
    return f"{1e3 * found['step_s']:.1f} ms" + (f", MFU {found['mfu']:.1%}" if "mfu" in found else "")


def _kind(kind: str, results: Results) -> str:
    return f"{results['profile']['traced_ms'][kind]:.1f} ms"


def _contender(row: Found) -> str:
    text = f"{row['step_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, {row['peak_bytes'] / 1e9:.2f} GB"
    return text + (f", MFU {row['mfu']:.1%}" if "mfu" in row else "")


def _against(part: str, base: str, key: str, results: Results) -> str:
    return f"{results[f'{part}-full_shard'][key] / results[f'{part}-{base}'][key]:.3f}"


def _bytes(results: Results) -> str:
    found = results["predictions"]
    return f"{found['predicted_peak_bytes'] / found['peak_bytes']:.3f}"


def _time(source: str, results: Results) -> str:
    found = results["predictions"]
    return f"{found['predicted_s'][source] / found['step_s']:.3f}"


def _bits(name: str, results: Results) -> str:
    found = results["equal_bits"][name]
    text = "equal" if found["equal"] else f"{found['leaves_apart']} leaves apart"
    return f"{text}, {1e3 * found['step_s']:.1f} ms a step"


def _save(name: str, results: Results) -> str:
    found = results["saves"]
    return ", ".join(f"{found[f'{name}_{what}_s']:.3f} s" for what in ("call", "step_beside", "whole"))
