"""The case `gpu`: the first hour on a GPU, one part after another, each in a process of its own.

A part that crashes or hangs loses nothing: its result is a JSON file in `folder`, and a part that has one is
not made again. Needs torch, NumPy and optree alone (the parts `tests` and `core`: pytest).
`python -m experiments.bench.gpu PART job.json` is one part.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import ROOT, python_path
from experiments.bench import gpu_parts, peers, ranks
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import GRAPH
from experiments.bench.measure import Result, say
from experiments.configs.checks import ConfigError
from experiments.data.files import write_json
from fnshard.mesh.process_group import leave_group

Found = Mapping[str, Any]
Line = tuple[str, Callable[[Found], str], str]  # what, its value in a part's result, what is expected
COMPILED, LIMIT = "fsdp2_compiled", "limit"
CONTENDERS = ("full_shard", COMPILED, LIMIT, GRAPH, "shard_grad_op", "fsdp2", "ddp")
ROWS = (2, 8)
# full_shard's number, as a share of a contender's.
TARGETS = (
    (COMPILED, "tokens_per_s", "1.05 or more"),
    (LIMIT, "tokens_per_s", "1.00 or more"),
    (COMPILED, "peak_bytes", "0.85 or less"),
)


@dataclass(frozen=True)
class Part:
    """Something that is measured in a process of its own.

    Args:
        run: gives plain values; the folder is for what is larger.
        lines: of the table.
        gpu: whether a CPU has nothing of the kind.
        env: of its process.
    """

    run: Callable[[BenchConfig, Path], Found]
    lines: tuple[Line, ...]
    gpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def contender(name: str, rows: int, config: BenchConfig, folder: Path) -> Found:
    """One contender's row of the case `peers`."""
    own = replace(config, contenders=(name,), rows=rows, losses=0, memory=1, profile=False)
    return peers.run(own, folder).values["contenders"][name]


def _row(found: Found) -> str:
    text = f"{found['step_ms']:.1f} ms, {found['tokens_per_s']:,.0f} tokens/s"
    text += f", {found['peak_bytes'] / 1e9:.2f} GB"
    return text + (f", MFU {found['mfu']:.1%}" if "mfu" in found else "")


def _tests(found: Found) -> str:
    return f"{found['passed']} passed" + (
        f", failed: {', '.join(found['failed'])}" if found["failed"] else ""
    )


def _bits(name: str, found: Found) -> str:
    text = "equal" if found[name]["equal"] else f"{found[name]['leaves_apart']} leaves apart"
    return f"{text}, {1e3 * found[name]['step_s']:.1f} ms a step"


def _save(name: str, found: Found) -> str:
    return ", ".join(f"{found[f'{name}_{what}_s']:.3f} s" for what in ("call", "step", "whole"))


def _sync(name: str, found: Found) -> str:
    return "" if found[name] is None else found[name] or "silent"


def _kind(kind: str, found: Found) -> str:
    return f"{found['traced_ms'][kind]:.1f} ms"


def _versions(found: Found) -> str:
    return ", ".join(str(each) for each in found.values())


def _time(source: str, found: Found) -> str:
    return f"{found['predicted_s'][source] / found['step_s']:.3f}"


# Milliseconds are estimates for an H200, bf16, 2 rows of 4096.
KINDS = {"products": "78 ms", "attention": "22 to 33 ms", "elementwise": "17 ms", "update": "7 to 8 ms",
         "casts": "0 ms", "communication": "0 ms", "other": "", "idle": "2 to 3 ms"}  # fmt: skip
PARTS: dict[str, Part] = {
    "versions": Part(gpu_parts.versions, (("torch, Python, device, CUDA, cuDNN, NCCL", _versions, ""),)),
    "tiny": Part(gpu_parts.tiny, (
        ("losses of five steps", lambda f: " ".join(f"{x:.3f}" for x in f["losses"]), "finite"),
        ("attention's kernels", lambda f: ", ".join(f"{n} {kind}" for kind, n in f["attention"].items()), ""),
    )),
    "tests": Part(gpu_parts.tests, (("pytest -m gpu", _tests, "none failed"),), gpu=True),
    "syncs": Part(gpu_parts.syncs, tuple(
        (f"steps 3 to 6, {name}", partial(_sync, name), "silent")
        for name in gpu_parts.VARIANTS
    )),
    "profile": Part(gpu_parts.profile, (
        ("step", lambda f: f"{1e3 * f['step_s']:.1f} ms" + (f", MFU {f['mfu']:.1%}" if f["mfu"] else ""),
         "128 ms, MFU 45%"),
        *((kind, partial(_kind, kind), target) for kind, target in KINDS.items()),
    )),
    **{f"bench-{rows}-{name}": Part(partial(contender, name, rows), ((name, _row, ""),), gpu=name == GRAPH)
       for rows in ROWS for name in CONTENDERS},
    "predictions": Part(gpu_parts.predictions, (
        ("peak bytes, predicted / measured",
         lambda f: f"{f['predicted_peak_bytes'] / f['peak_bytes']:.3f}", "0.95 to 1.05"),
        *((f"time by {name} / measured", partial(_time, name), "0.75 to 1.25")
          for name in ("data sheet", "measured rates")),
    )),
    "cudnn": Part(partial(contender, "full_shard", ROWS[0]), (("cuDNN's attention last", _row, ""),),
                  gpu=True, env={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
    "equal_bits": Part(gpu_parts.equal_bits, (
        ("two runs as they are", partial(_bits, "plain"), ""),
        ("two runs, deterministic=True", partial(_bits, "deterministic"), "equal"),
    )),
    "saves": Part(gpu_parts.saves, tuple(
        (f"{name} save: call, step, whole", partial(_save, name), "") for name in ("first", "second")
    )),
    "core": Part(gpu_parts.core, (("CPU tests, the GPU hidden", _tests, "none failed"),), gpu=True),
}  # fmt: skip


def run(config: BenchConfig, folder: Path) -> Result:
    """Does fnshard work on this GPU, how fast is it there, and where does the time of a step go?"""
    unknown = [name for name in (*config.parts, *config.again) if name not in PARTS]
    if unknown:
        raise ConfigError(f"parts={','.join(unknown)}: any of {', '.join(PARTS)}.")
    place = Path(config.folder or Path("outputs", "gpu")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    failures = {}
    for name in config.parts or PARTS:
        if PARTS[name].gpu and config.device != "cuda":
            continue
        if result_of(place, name).exists() and name not in config.again:
            say(f"{name}: has a result")
            continue
        if reason := run_part(name, config, place):
            failures[name] = reason
    there = [name for name in PARTS if result_of(place, name).exists()]
    results = {name: json.loads(result_of(place, name).read_text(encoding="utf-8")) for name in there}
    return Result(table(results, failures), values={"results": results}, left=4, failed=bool(failures))


def run_part(name: str, config: BenchConfig, folder: Path) -> str:
    """Make one part in a process of its own; "" where it left a result, else why it did not."""
    say(name)
    result, log = result_of(folder, name), folder / f"{name}.log"
    result.unlink(missing_ok=True)
    threads = {"OMP_NUM_THREADS": "1"} if config.device == "cpu" else {}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "experiments.bench.gpu", name, str(ranks.job_file(config, folder))],
            cwd=ROOT, env={**os.environ, **threads, **PARTS[name].env, "PYTHONPATH": python_path()},
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        # An exception: what runs is ended on the way out.
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(60.0 * config.minutes)
        finally:
            signal.signal(signal.SIGTERM, before)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if result.exists():
        return ""
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
    return f"not done in {config.minutes:g} minutes" if code is None else f"ended with {code}: {last}"


def result_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def table(results: Mapping[str, Found], failures: Mapping[str, str] | None = None) -> list[list[str]]:
    """Cells are empty where a part has not run or has failed, and where a CPU cannot tell."""
    rows = [["part", "what", "measured", "target"]]
    for name, part in PARTS.items():
        for what, value, target in part.lines:
            try:
                shown = value(results[name])
            except KeyError:
                shown = ""
            rows.append([name, what, shown, target])
    for rows_ in ROWS:
        ours = results.get(f"bench-{rows_}-full_shard")
        for base, key, target in TARGETS:
            theirs = results.get(f"bench-{rows_}-{base}")
            share = f"{ours[key] / theirs[key]:.3f}" if ours and theirs else ""
            rows.append([f"bench-{rows_}", f"full_shard's {key} / {base}'s", share, target])
    return [*rows, *([name, "failed", reason, ""] for name, reason in (failures or {}).items())]


if __name__ == "__main__":
    values = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    own = ranks.config_of(values["config"])
    ranks.join(own)
    try:
        write_json(result_of(Path(values["folder"]), sys.argv[1]),
                   dict(PARTS[sys.argv[1]].run(own, Path(values["folder"]))))  # fmt: skip
    finally:
        leave_group()
