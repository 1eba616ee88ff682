"""The case `gpu`: the first hour on a GPU, one part after another, each in a process of its own.

A part that crashes or hangs loses nothing: its result is a JSON file in `folder`, and a part that has one is
not made again, unless `parts=` names it. Needs torch, NumPy and optree alone (the parts `tests` and `core`:
pytest). `python -m experiments.bench.gpu PART FOLDER key=value...` is one part.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fnshard as fs
from experiments import ROOT
from experiments.bench import peers, ranks
from experiments.bench.config import BenchConfig, read
from experiments.bench.contenders import Plan, Training, batches, make_task, repeated
from experiments.bench.measure import Result, say, timed
from experiments.lib.checks import ConfigError
from experiments.lib.files import read_json, write_json
from fnshard.debug.profile import DEVICE, LAUNCHES, PREFIX
from fnshard.mesh.process_group import leave_group
from fnshard.plot.scales import byte_text, digits

Found = dict[str, Any]  # by what is measured: a number or a text, or several
Event = Mapping[str, Any]  # of a trace


@dataclass(frozen=True)
class Part:
    """Something that is measured in a process of its own.

    Args:
        run: gives plain values by name; the folder is for what is larger.
        targets: the names that the table shows, and what is expected.
        gpu: whether a CPU has nothing of the kind.
        group: whether it needs a process group, and NCCL.
        env: of its process.
    """

    run: Callable[[BenchConfig, Path], Found]
    targets: Mapping[str, str]
    gpu: bool = False
    group: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------ parts


class Trained(Training):
    """`full_shard`, and a `make_step()` on batches that come in turn, on the device or on the `host`."""

    def __init__(self, config: BenchConfig, plan: Plan | None = None, host: bool = False):
        task = make_task(config)
        self.config, self.batches = config, list(batches(task, 4))
        if host:  # strided, as README's `rows[:, :-1]`
            self.batches = [(F.pad(x.cpu(), (0, 1))[:, :-1], y.cpu()) for x, y in self.batches]
        super().__init__(task, plan or Plan())

    def begin(self) -> None:
        super().begin()
        self.make_step = repeated(self, self.batches)

    def seconds(self, samples: int = 5, steps: int = 1) -> float:
        """Return the seconds of a step: the median of samples of several steps each."""
        return median(timed(self.make_step, steps=steps, device=self.config.device) for _ in range(samples))


def small(config: BenchConfig) -> BenchConfig:
    return replace(config, size="tiny", length=min(config.length, 256))


def versions(config: BenchConfig, folder: Path) -> Found:
    found = [torch.__version__, platform.python_version()]
    if config.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found += [torch.cuda.get_device_name(), torch.version.cuda, str(torch.backends.cudnn.version()), nccl]
    return {"torch, Python, device, CUDA, cuDNN, NCCL": found}


def tiny(config: BenchConfig, folder: Path) -> Found:
    """Five compiled steps of the smallest model, and which kernels its attention was frozen as."""
    training = Trained(small(config))
    losses = [training.make_step().item() for _ in range(5)]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses are not finite: {losses}")
    attention = training.lowered(*training.batches[0]).attention
    return {"losses of five steps": losses, "attention's kernels": [f"{n} {k}" for k, n in attention.items()]}


def pytest(config: BenchConfig, folder: Path, which: Sequence[str], **env: str) -> Found:
    """Count the tests that pass, and name those that fail; the part's log says so test by test. The
    plugins that `pyproject.toml` names need not be there."""
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=no", "-o", "addopts=", *which]
    output: list[str] = []
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, env={**os.environ, **env}, **how) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
    text = "".join(output)
    passed = re.search(r"(\d+) passed", text)
    failed = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", text)
    if process.returncode not in (0, 1) or not (passed or failed):
        raise RuntimeError(f"pytest ended with {process.returncode}: {text[-2000:]}")
    return {"passed": int(passed[1]) if passed else 0, "failed": failed or "none"}


# What a step has besides; each may bring a wait for the device of its own.
VARIANTS = {
    "plain": Plan(),
    "dropout": Plan(dropout=0.1),
    "clipping": Plan(clip=1.0),
    "micro-batches": Plan(options={"accumulate": 2}),
}


def syncs(config: BenchConfig, folder: Path) -> Found:
    """The first place where steps 3 to 6, on batches of the host, wait for the device. A CPU cannot tell."""
    return {name: waits(Trained(small(config), plan, host=True)) for name, plan in VARIANTS.items()}


def waits(training: Trained) -> str:
    on_gpu = training.config.device == "cuda"
    for _ in range(2):
        training.make_step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            training.make_step()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if f"{os.sep}fnshard{os.sep}" in f.filename), frames[-1])
        return f"{Path(place.filename).name}:{place.lineno} {place.line}: {str(error).splitlines()[0]}"
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return "silent" if on_gpu else "unknown"


def contender(name: str, rows: int, config: BenchConfig, folder: Path) -> Found:
    """One contender's row of the case `peers`."""
    own = replace(config, contenders=(name,), rows=rows, losses=0, memory=1)
    found = peers.run(own, folder).values["contenders"][name]
    shown = [f"{digits(found['step_ms'])} ms", f"{digits(found['tokens_per_s'])} tokens/s"]
    shown += [byte_text(found["peak_bytes"])] + ([f"MFU {found['mfu']:.1%}"] if "mfu" in found else [])
    shown += [f"{byte_text(found['reserved_bytes'])} reserved"] if "reserved_bytes" in found else []
    return {**found, "a step": [*shown, *clock_and_power(config)]}


def clock_and_power(config: BenchConfig) -> list[str]:
    """Return the clock and the power of the GPU, right after what was timed."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.getoutput(" ".join(query)).splitlines()[:1] if config.device == "cuda" else []


def ceilings(config: BenchConfig, folder: Path) -> Found:
    """Measure what the device reaches of itself: products, a copy, each kernel of attention forward and
    backward; and what a stream of lower priority hides of a copy behind products, as it would of updates."""
    on_cpu, width = config.device == "cpu", config.model.width // config.model.heads
    make = partial(torch.randn, dtype=config.compute_dtype, device=config.device)
    a = make(*(2 * [512 if on_cpu else 8192]))
    q = make(config.rows, config.model.heads, config.length, width, requires_grad=True)
    flops = 7 * config.rows * config.model.heads * width * config.length**2  # causal; five of the backward

    def attend() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    attention = []
    for name in ("MATH",) if on_cpu else ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            rate = 1e-12 * flops / seconds_of(attend, config)
        attention.append(f"{name.partition('_')[0].lower()} {rate:.3g}")
    products, copy = (seconds_of(work, config) for work in (lambda: a @ a, a.clone))
    hidden = "" if on_cpu else 1 - (seconds_of(partial(two_streams, a), config) - products) / copy
    rates = 2e-12 * len(a) ** 3 / products, 2e-9 * a.nbytes / copy
    return dict(zip(CEILINGS, (*rates, attention, hidden), strict=True))


def two_streams(a: torch.Tensor) -> None:
    """A product, and a copy on the default stream, whose priority is the lowest there is."""
    now, fast = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    fast.wait_stream(now)
    with torch.cuda.stream(fast):
        out = a @ a
    out.record_stream(now)
    a.clone()
    now.wait_stream(fast)


def seconds_of(work: Callable[[], Any], config: BenchConfig) -> float:
    """Return the seconds of a warm call: the median of five samples of ten."""
    work()
    return median(timed(work, steps=10, device=config.device) for _ in range(5))


def equal_bits(config: BenchConfig, folder: Path) -> Found:
    """Whether two equal runs of 20 steps have the same bits, as they are and with `deterministic=True`."""
    found: Found = {}
    for name, on in (("as they are", False), ("deterministic=True", True)):
        training, runs = Trained(config, Plan(options={"deterministic": on})), []
        for _ in range(2):
            training.begin()
            losses = torch.stack([training.make_step() for _ in range(20)]).cpu()
            runs.append({"losses": losses} | {p: leaf.cpu() for p, leaf in training.state.params.items()})
        apart = sum(not torch.equal(value, runs[1][path]) for path, value in runs[0].items())
        bits = f"{apart} leaves apart" if apart else "equal"
        found[f"two runs {name}"] = [bits, f"{digits(1e3 * training.seconds(3, 5))} ms a step"]
    return found


def saves(config: BenchConfig, folder: Path) -> Found:
    """Measure what saves in the background take: the call, the step during it, all until it is on disk."""
    training = Trained(config)
    for _ in range(3):
        training.make_step()
    found: Found = {"step": training.seconds(5)}
    with tempfile.TemporaryDirectory() as place:
        for name in ("first", "second"):
            timed(lambda: None, device=config.device)
            began = time.perf_counter()
            saving = fs.checkpoint.save_async(Path(place) / name, training.state)
            called, step = time.perf_counter() - began, training.seconds(1)
            saving.wait()
            found[f"{name} save: call, step, whole, s"] = [called, step, time.perf_counter() - began]
    return found


def predictions(config: BenchConfig, folder: Path) -> Found:
    """Bytes and seconds of a step, predicted over measured."""
    if config.device == "cuda":  # cuBLAS takes its workspace at the first product
        one = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        one.mm(one)
    peak = peers.memory_of(make_task(config), partial(Training, plan=Plan()), 1)["peak_bytes"]
    training = Trained(config)
    training.make_step()
    lowered, seconds = training.lowered(*training.batches[0]), training.seconds(3, config.steps)
    known = fs.Hardware.of_gpu(torch.cuda.get_device_name()) if config.device == "cuda" else None
    found: Found = {"step": seconds, "peak bytes": lowered.memory_analysis().peak_bytes / peak}
    for name, hardware in {
        "data sheet": known,
        "measured rates": fs.Hardware.measure(training.step.mesh),
    }.items():
        if hardware:
            found[f"time by {name}"] = lowered.timeline(hardware).step_seconds / seconds
    return found


# ------------------------------------------------------------------ where the time goes

TRACED = 3  # steps
# By the name of a kernel, the first that matches; others go by the instruction that launched them.
KERNELS = (
    ("communication", re.compile(r"nccl|c10d|gloo", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|triton_tem", re.I)),
)
VERBS = {"run": "elementwise", "update": "update", "overlapped_update": "update", "norms": "update",
         "reduce_update": "update", "stack_update": "update", "compute_stack": "update",
         "reduce_scalars": "update", "": "other"}  # fmt: skip
# Milliseconds of a step that are expected of an H200, bf16, 2 rows of 4096.
KINDS = {"products": "78", "attention": "22 to 33", "elementwise": "17", "update": "7 to 8",
         "casts": "0", "communication": "0", "other": "", "idle": "2 to 3"}  # fmt: skip


def profile(config: BenchConfig, folder: Path) -> Found:
    """Milliseconds of a step by kind of work, from a trace that is left in `folder`; seconds without one."""
    training, trace = Trained(config, host=True), folder / "trace.json"
    for _ in range(3):
        training.make_step()
    seconds = training.seconds(3, config.steps)
    began = time.perf_counter()  # the device has done all before: these launches wait for nothing
    for _ in range(TRACED):
        training.make_step()
    launched, state = (time.perf_counter() - began) / TRACED, clock_and_power(config)
    with fs.profile.traced(training.step, trace):
        for _ in range(TRACED):
            training.make_step()
    share = peers.mfu_of(config, seconds)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return {
        "step, ms": 1e3 * seconds,
        "MFU": "" if share is None else f"{share:.1%}",
        "launched in, ms": 1e3 * launched,
        "clock, power": state,
        **split(events, TRACED),
    }


def split(events: Iterable[Event], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and what is none of them.

    On a GPU: kernels and copies that the device ran; between them it is idle. On a CPU: instructions.
    """
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    lines = [e for e in spans if e["name"].startswith(f"{PREFIX} ") and e.get("cat") != "gpu_user_annotation"]
    if not lines:
        raise ValueError("no instruction of a step is in the trace.")
    launches = {_correlation(e): e["ts"] for e in spans if e.get("cat") in LAUNCHES}
    launches.pop(None, None)
    worked, starts = [e for e in spans if e.get("cat") in DEVICE] or lines, [e["ts"] for e in lines]
    totals, covered, end = dict.fromkeys(KINDS, 0.0), 0.0, -math.inf
    for event in worked:
        at = event["ts"] if worked is lines else launches.get(_correlation(event), -math.inf)
        line = lines[max(0, bisect_right(starts, at) - 1)]
        inside = line["ts"] <= at <= line["ts"] + line["dur"]
        verb = line["name"].rpartition(" ")[2] if inside else ""
        patterns = KERNELS if worked is not lines else ()
        named = (kind for kind, pattern in patterns if pattern.search(event["name"]))
        totals[next(named, VERBS.get(verb, "casts"))] += event["dur"]
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        covered, end = covered + max(stop - start, 0.0), max(end, stop)
    totals["idle"] = end - worked[0]["ts"] - covered
    return {kind: total / steps / 1e3 for kind, total in totals.items()}


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


# ------------------------------------------------------------------ the hour

COMPILED = "fsdp2_compiled"
FIRST = ("full_shard", COMPILED, "limit")
GROUPED = (COMPILED, "fsdp2", "ddp")  # what torch makes of a process group
ROWS = (2, 8)
# full_shard's number, as a share of a contender's.
SHARES = (
    (COMPILED, "tokens_per_s", "1.05 or more"),
    ("limit", "tokens_per_s", "1.00 or more"),
    (COMPILED, "peak_bytes", "0.85 or less"),
)
CORE = ("trace", "differentiate", "remat", "schedule", "step")
CORE_TESTS = {name: str(next((ROOT / "tests").rglob(f"test_{name}.py"), name)) for name in CORE}
GPU_TESTS = ["tests/runtime/test_gpu.py", "-m", "gpu", "-k", "not bench"]  # the bench is parts of its own
TIMES = dict.fromkeys(("time by data sheet", "time by measured rates"), "0.75 to 1.25")
TESTS = {"passed": "", "failed": "none"}
CEILINGS = ("products, TFLOP/s", "a copy, GB/s", "attention, TFLOP/s", "of a copy, hidden behind a product")


def race(names: Sequence[str], rows: int, **env: str) -> dict[str, Part]:
    """A part for each contender."""
    return {
        f"bench-{rows}-{name}": Part(
            partial(contender, name, rows), {"a step": ""}, group=name in GROUPED, env=env
        )
        for name in names
    }


def core(name: str) -> Part:
    which = [CORE_TESTS[name], "-m", "not long and not gpu"]
    return Part(partial(pytest, which=which, CUDA_VISIBLE_DEVICES=""), TESTS, gpu=True)


# In the order in which they are worth most, where the hour ends early.
PARTS: dict[str, Part] = {
    "versions": Part(versions, {"torch, Python, device, CUDA, cuDNN, NCCL": ""}),
    "tiny": Part(tiny, {"losses of five steps": "finite", "attention's kernels": ""}),
    "syncs": Part(syncs, dict.fromkeys(VARIANTS, "silent")),
    "profile": Part(
        profile, {"step, ms": "112", "MFU": "45%", "launched in, ms": "", "clock, power": "", **KINDS}
    ),
    **race(FIRST, 2),
    "ceilings": Part(ceilings, dict.fromkeys(CEILINGS, "")),
    "predictions": Part(predictions, {"peak bytes": "0.95 to 1.05", **TIMES}),
    **race(FIRST, 8),
    "tests": Part(partial(pytest, which=GPU_TESTS), TESTS, gpu=True),
    **{f"core-{name}": core(name) for name in CORE},
    "equal_bits": Part(equal_bits, {"two runs as they are": "", "two runs deterministic=True": "equal"}),
    "saves": Part(saves, {f"{name} save: call, step, whole, s": "" for name in ("first", "second")}),
    **race(("shard_grad_op", "fsdp2", "ddp"), 2),  # the eager ones have no room for eight rows on 80 GB
    "cudnn": Part(  # cuDNN's attention last
        partial(contender, "full_shard", 2), {"a step": ""}, True, env={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    ),
}


def run(config: BenchConfig, folder: Path) -> Result:
    """Does fnshard work on this GPU, how fast is it there, and where does the time of a step go?"""
    unknown = [name for name in config.parts if name not in PARTS]
    if unknown:
        raise ConfigError(f"parts={','.join(unknown)}: any of {', '.join(PARTS)}.")
    place = Path(config.folder or Path("outputs", "gpu")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    failures, end = {}, math.inf if config.until is None else time.monotonic() + config.until
    results: dict[str, Found] = {}
    for name in config.parts or PARTS:
        if PARTS[name].gpu and config.device != "cuda":
            continue
        if not config.parts and result_of(place, name).exists():
            say(f"{name}: has a result")
        elif reason := run_part(name, config, place, min(60 * config.minutes, end - time.monotonic())):
            failures[name] = reason
        results = {name: found for name in PARTS if (found := read_json(result_of(place, name)))}
        write_json(place / "results.json", {"results": results, "failures": failures})  # all so far in one
    return Result(table(results, failures), values={"results": results}, failed=bool(failures))


def run_part(name: str, config: BenchConfig, folder: Path, seconds: float) -> str:
    """Make one part in a process of its own; "" where it left a result, else why it did not."""
    if seconds <= 0:
        return f"not started before until={config.until:g} s"
    say(name)
    result, log = result_of(folder, name), folder / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", "experiments.bench.gpu", name, str(folder), *config.words()]
    env = {**os.environ, **ranks.environment(config), **PARTS[name].env}
    # An exception: what runs is ended on the way out.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(seconds)
        finally:
            signal.signal(signal.SIGTERM, before)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if result.exists():
        return ""
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
    return f"not done in {seconds / 60:.2g} minutes" if code is None else f"ended with {code}: {last}"


def result_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def table(results: Mapping[str, Found], failures: Mapping[str, str] | None = None) -> list[list[str]]:
    """Cells are empty where a part has not run or has failed, and where a CPU cannot tell."""
    rows = [["part", "what", "measured", "target"]]
    for name, part in PARTS.items():
        found = results.get(name, {})
        rows += [[name, what, shown(found.get(what, "")), target] for what, target in part.targets.items()]
    for count in ROWS:
        ours = results.get(f"bench-{count}-full_shard")
        for base, key, target in SHARES:
            theirs = results.get(f"bench-{count}-{base}")
            share = shown(ours[key] / theirs[key]) if ours and theirs else ""
            rows.append([f"bench-{count}", f"full_shard's {key} / {base}'s", share, target])
    return [*rows, *([name, "failed", reason, ""] for name, reason in (failures or {}).items())]


def shown(value: Any) -> str:
    """A value of a result.

    >>> shown([2.98761, "eager", 12])
    '2.988, eager, 12'
    """
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return digits(value) if isinstance(value, float) else str(value)


if __name__ == "__main__":
    own, part = read(sys.argv[3:]), PARTS[sys.argv[1]]
    ranks.join(own, part.group)
    try:
        write_json(result_of(Path(sys.argv[2]), sys.argv[1]), part.run(own, Path(sys.argv[2])))
    finally:
        leave_group()
