"""The first hour on a GPU: one part after another, each in a process of its own, and one table.

    python -m experiments.gpu
    python -m experiments.gpu --parts profile bench-2-full_shard --again profile
    python -m experiments.gpu --device cpu --size tiny

Results are JSON files below the output folder; a part that has one is not made again. Needs torch, NumPy and
optree alone (the parts `tests` and `core`: pytest).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments import ROOT, python_path
from experiments.configs.checks import count
from experiments.configs.decoders import names
from experiments.data.files import write_json
from experiments.gpu.parts import PARTS
from experiments.gpu.setup import GpuSetup
from experiments.gpu.table import markdown

TABLE, RESULTS = "table.md", "results.json"
SMALL = {"size": "tiny", "rows": 2, "length": 64, "rounds": 2, "steps": 2}  # on a CPU


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 where every part that was asked for has a result."""
    args = _parser().parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("device=cuda: torch finds no CUDA device here. Fix: --device cpu", file=sys.stderr)
        return 2
    named = {name: getattr(args, name) for name in ("size", "rows", "length", "backend", "rounds", "steps")}
    chosen = {name: value for name, value in named.items() if value is not None}
    setup = GpuSetup(device=args.device, **{**(SMALL if args.device == "cpu" else {}), **chosen})
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failures = {}
    for name in args.parts or PARTS:
        if PARTS[name].gpu and setup.device != "cuda":
            continue
        if result_of(folder, name).exists() and name not in args.again:
            print(f"{name}: has a result", flush=True)
            continue
        reason = run(name, setup, folder, 60.0 * args.minutes)
        if reason:
            failures[name] = reason
    table = markdown(collect(folder), failures)
    (folder / TABLE).write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nresults: {folder / RESULTS}", flush=True)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m experiments.gpu", description=__doc__, formatter_class=raw)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here)
    parser.add_argument("--size", choices=names(), help="a file of conf/model; 1b, on a CPU tiny")
    parser.add_argument("--backend", choices=("inductor", "eager"))
    for name in ("rows", "length", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=count)
    some: dict[str, Any] = {"nargs": "*", "choices": PARTS, "metavar": "PART", "default": []}
    parser.add_argument("--parts", help=f"these alone, of {', '.join(PARTS)}", **some)
    parser.add_argument("--again", help="made once more, though they have a result", **some)
    parser.add_argument("--minutes", type=float, default=8.0, help="that a part may take")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "gpu")
    return parser


def run(name: str, setup: GpuSetup, folder: Path, seconds: float) -> str:
    """Make one part in a process of its own; "" where it left a result, else why it did not."""
    print(f"{name}: {PARTS[name].about}", flush=True)
    result, log, job = result_of(folder, name), folder / f"{name}.log", folder / f"{name}.job"
    result.unlink(missing_ok=True)
    values = {"part": name, "setup": asdict(setup), "result": str(result)}
    job.write_text(json.dumps(values) + "\n", encoding="utf-8")
    threads = {"OMP_NUM_THREADS": "1"} if setup.device == "cpu" else {}
    began = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "experiments.gpu.parts", str(job)],
            cwd=ROOT,
            env={**os.environ, **threads, **PARTS[name].env, "PYTHONPATH": python_path()},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    if result.exists():
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        return ""
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
    reason = f"not done in {seconds:.0f} s" if code is None else f"ended with {code}: {last}"
    print(f"  {reason}; {log}", flush=True)
    return reason


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def result_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def collect(folder: Path) -> dict[str, Any]:
    """What all parts found, this time and before; with how they were set up it is in `results.json`."""
    there = [name for name in PARTS if result_of(folder, name).exists()]
    results = {name: json.loads(result_of(folder, name).read_text(encoding="utf-8")) for name in there}
    write_json(folder / RESULTS, results)
    return {name: each["found"] for name, each in results.items()}


if __name__ == "__main__":
    # An exception: what is running is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
