"""The parts of the case `gpu`: each is a generator, which yields its findings as soon as there are any."""

from __future__ import annotations

import gzip
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

import fnshard as fs
from experiments import ROOT
from experiments.bench import peers, ranks
from experiments.bench.config import BenchConfig
from experiments.bench.contenders import (
    ADAMW,
    CONTENDERS,
    Batch,
    BenchTask,
    Contender,
    Setup,
    Training,
    batches,
    make_task,
    repeat_step,
)
from experiments.bench.device import DEVICES
from experiments.bench.device_time import list_copies, list_gaps, list_kernels, read_events, time_kinds
from experiments.bench.measure import interleave, ratio, release, say, time_work
from experiments.lib.decoder import Decoder, loss_function, next_token_loss
from fnshard.plot.scales import byte_text, digits

Found = dict[str, Any]  # findings by name, each a number, a text or several; "raw" is not shown
OURS, COMPILED = "full_shard", "fsdp2_compiled"
RACERS = (OURS, "limit", COMPILED)
GROUPED = (COMPILED, "fsdp2", "ddp")  # torch's own, which need a process group


class Trained(Training):
    """A training by `full_shard`, whose `make_step()` takes batches in turn.

    Args:
        host: whether the batches are on the host, rather than on the device.
    """

    def __init__(self, config: BenchConfig, setup: Setup | None = None, host: bool = False):
        task = make_task(config)
        self.config, self.batches = config, list(batches(task, 4))
        if host:  # strided, as README's `rows[:, :-1]`
            self.batches = [(F.pad(x.cpu(), (0, 1))[:, :-1], y.cpu()) for x, y in self.batches]
        super().__init__(task, setup or Setup())

    def begin(self) -> None:
        super().begin()
        self.make_step = repeat_step(self, self.batches)

    def seconds(self, samples: int = 5, steps: int = 1) -> float:
        """Return the seconds of a step: the median of samples of several steps each."""
        return median(
            time_work(self.make_step, steps=steps, device=self.config.device) for _ in range(samples)
        )


def shrink(config: BenchConfig) -> BenchConfig:
    """Return a configuration of the smallest model, for parts that ask whether something works."""
    return replace(config, size="tiny", length=min(config.length, 256))


# ------------------------------------------------------------------ whether it works


def versions(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Name the software and the device."""
    device = DEVICES[config.device]
    software = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    yield {"versions": software + device.describe(), "clock, power": device.clock_and_power()}


def presets(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Make two steps of every preset in fp64, and find the largest difference of a loss or a parameter from
    plain PyTorch's."""
    # Train with plain PyTorch, from a copy of the first parameters.
    config, steps = shrink(config), 2
    torch.manual_seed(config.seed)
    model = Decoder(config.model).to(config.device, torch.float64)
    feed = [
        tuple(torch.randint(config.model.vocab, (2, 2, 64), device=config.device).unbind())
        for _ in range(steps)
    ]
    loss_fn, params = loss_function(model)
    params = {path: leaf.detach().clone() for path, leaf in params.items()}
    truth = train_plainly(model, feed)

    # Train by each preset. One with several names is trained once.
    mesh, differences = fs.make_mesh(shard=1, device=config.device), {}
    names = {preset: name for name, preset in fs.presets.PRESETS.items()}
    for preset, name in names.items():
        specs = preset(params, mesh)
        step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(**ADAMW), backend="eager")
        state, losses = step.init(params), []
        for batch in feed:
            state, metrics = step(state, *batch)
            losses.append(metrics["loss"])
        values = {**{f"loss {i}": loss for i, loss in enumerate(losses)}, **state.params}
        differences[name] = max(
            float((values[key].double().cpu() - truth[key].double().cpu()).abs().max()) for key in truth
        )
        worst = max(differences.values())
        yield {"presets, fp64, off by": f"{worst:.1e}", "raw": {"off by": differences}}


def train_plainly(model: Decoder, feed: Sequence[Batch]) -> dict[str, Tensor]:
    """Train a module as PyTorch's users do, and return its losses and its parameters."""
    optimizer, values = torch.optim.AdamW(model.parameters(), **ADAMW), {}
    for number, (tokens, targets) in enumerate(feed):
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss {number}"] = loss.detach()
    return values | {path: leaf.detach() for path, leaf in model.named_parameters()}


def compiled_steps(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Make five compiled steps of the smallest model, and name the kernels of its attention."""
    began = time.perf_counter()
    training = Trained(shrink(config))
    losses = [training.make_step().item()]
    yield {"first step, s": time.perf_counter() - began}
    losses += [training.make_step().item() for _ in range(4)]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses are not finite: {losses}")
    attention = training.lower(*training.batches[0]).attention
    yield {"losses of five steps": losses, "attention's kernels": [f"{n} {k}" for k, n in attention.items()]}


# Features of a step, each of which might make the host wait for the device.
VARIANTS = {
    "plain": Setup(),
    "dropout": Setup(dropout=0.1),
    "clipping": Setup(clip=1.0),
    "micro-batches": Setup(options={"accumulate": 2}),
}


def syncs(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Find the first place where steps 3 to 6, on batches of the host, wait for the device.

    The result is unknown on a CPU.
    """
    for name, setup in VARIANTS.items():
        yield {name: find_wait(Trained(shrink(config), setup, host=True))}


def find_wait(training: Trained) -> str:
    """Return the place of the first wait, "silent" if there is none, or "unknown" on a CPU."""
    for _ in range(2):  # the first steps compile, and may wait
        training.make_step()
    try:
        with DEVICES[training.config.device].refuse_waits():
            for _ in range(4):
                training.make_step()
    except RuntimeError as error:
        return f"{find_place(error)}: {first_line(error)}"
    return "silent" if training.config.device == "cuda" else "unknown"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; "" if it has none."""
    return next(iter(str(error).strip().splitlines()), "")


def find_place(error: BaseException) -> str:
    """Return the innermost line of fnshard that an error went through; without any, the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}fnshard{os.sep}" in frame.filename]
    frame = ours[-1] if ours else frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


# ------------------------------------------------------------------ how fast it is


@dataclass
class Racer:
    """A contender that has made its first steps.

    Args:
        step: makes the next step.
        rest_bytes, peak_bytes: its own bytes on the device between two steps, and in a step at most, without
            those of contenders that started before it.
        seconds: the seconds of a step, by round.
    """

    contender: Contender | Training
    step: Callable[[], Tensor]
    batch: Batch
    first_step_s: float
    losses: list[float]
    rest_bytes: int
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)

    def leave(self) -> None:
        """Leave the device to others. The numbers stay."""
        self.contender.close()
        self.contender = self.step = self.batch = None


def start_racer(name: str, task: BenchTask) -> Racer:
    """Make a contender, and let it make its first steps."""
    say(f"first step of {name}")
    config, device = task.config, DEVICES[task.config.device]
    if name in GROUPED:
        ranks.join(config)
        task = replace(task, mesh=fs.make_mesh(**config.axes, device=config.device))
    before, began = device.allocated_bytes(), time.perf_counter()
    contender = CONTENDERS[name](task)
    feed = list(batches(task, 4))
    step = repeat_step(contender, feed)
    losses = [step().item()]
    first_step_s = time.perf_counter() - began
    losses += [step().item() for _ in range(config.warmup - 1)]
    rest = device.allocated_bytes() - before
    device.reset_peak()
    step()
    return Racer(contender, step, feed[0], first_step_s, losses, rest, device.peak_bytes() - before)


def race(
    config: BenchConfig,
    folder: Path,
    names: Sequence[str] = RACERS,
    rows: int | None = None,
    alone: bool = False,
) -> Iterator[Found]:
    """Time contenders, and compare `full_shard` with each and with its predictions.

    One that fails, or that this PyTorch lacks, is named, and the others go on.

    Args:
        alone: whether the device has room for only one at a time. Otherwise they take turns in every round.
    """
    config = replace(config, rows=rows or config.rows)
    DEVICES[config.device].prepare()
    task = make_task(config)
    found: Found = {}
    done: dict[str, Racer] = {}
    lost: list[str] = []
    for group in [(name,) for name in names] if alone else [names]:
        # Start each of them, and time a few steps at once, so that a run that is cut off has a number.
        alive: dict[str, Racer] = {}
        for name in group:
            try:
                done[name] = alive[name] = start_racer(name, task)
            except Exception as error:
                traceback.print_exc()
                lost.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            else:
                alive[name].seconds += interleave({name: alive[name].step}, 1, **clock_of(config))[name]
                found |= summarize(config, done)
                yield found
        if OURS in alive:
            found |= predict(config, alive[OURS])
            yield found

        # Time them in rounds.
        for number in range(config.rounds):
            steps = {name: racer.step for name, racer in alive.items()}
            for name, (seconds,) in interleave(steps, 1, seed=number, **clock_of(config)).items():
                if number == 0:
                    alive[name].seconds.clear()  # drop those of its start
                alive[name].seconds.append(seconds)
            found |= summarize(config, done)
            yield found
        yield {"clock, power": DEVICES[config.device].clock_and_power()}

        # Predict by rates that are measured here, and make room for the next.
        if OURS in alive:
            measured = fs.Hardware.measure(alive[OURS].contender.step.mesh)
            found |= predict(config, alive[OURS], {"measured rates": measured})
            yield found
        while alive:
            alive.popitem()[1].leave()
        release()
    if lost:
        raise RuntimeError("; ".join(lost))


def clock_of(config: BenchConfig) -> Found:
    """Return the keywords of `time_work` for a sample."""
    return {"steps": config.steps, "device": config.device}


def summarize(config: BenchConfig, done: Mapping[str, Racer]) -> Found:
    """Return a line for each contender, and quotients of `full_shard`'s numbers and the others'."""
    found: Found = {}
    raw: Found = {}
    for name, racer in done.items():
        middle = median(racer.seconds)
        share = peers.mfu_of(config, middle)
        found[name] = [
            f"{digits(1e3 * middle)} ms", f"{config.tokens / middle:,.0f} tokens/s",
            f"MFU {share:.1%}" if share is not None else "no MFU",
            f"peak {byte_text(racer.peak_bytes)}", f"{byte_text(racer.rest_bytes)} between steps",
        ]  # fmt: skip
        raw[name] = {key: v for key, v in vars(racer).items() if key not in ("contender", "step", "batch")}
    for name, other in done.items():
        if OURS in done and name != OURS:
            ours, count = done[OURS], min(len(done[OURS].seconds), len(other.seconds))
            found[f"tokens/s, {OURS} / {name}"] = ratio(other.seconds[:count], ours.seconds[:count])
            found[f"peak bytes, {OURS} / {name}"] = ours.peak_bytes / other.peak_bytes
            found[f"last loss, {OURS} - {name}"] = ours.losses[-1] - other.losses[-1]
    return {**found, "raw": raw}


def predict(config: BenchConfig, racer: Racer, rates: Mapping[str, Any] | None = None) -> Found:
    """Return the predicted bytes and seconds of a step as shares of the measured ones.

    Args:
        rates: hardware by name; None takes this device's data sheet.
    """
    lowered = racer.contender.lower(*racer.batch)
    if rates is None:
        rates = {"data sheet": DEVICES[config.device].hardware()}
    seconds = median(racer.seconds)
    found = {"peak bytes, predicted / measured": lowered.memory_analysis().peak_bytes / racer.peak_bytes}
    for name, hardware in rates.items():
        if hardware is not None:
            found[f"time, by {name} / measured"] = lowered.timeline(hardware).step_seconds / seconds
    return found


def make_ahead(config: BenchConfig, name: str) -> None:
    """Make one step of a contender, which fills the caches of kernels."""
    start_racer(name, make_task(replace(config, warmup=1)))


# ------------------------------------------------------------------ where the time goes

TRACED = 3  # the steps that are traced


def profile(config: BenchConfig, folder: Path, name: str = OURS) -> Iterator[Found]:
    """Split the milliseconds of a step by kind of work, and list kernels, gaps and copies.

    `full_shard` leaves its trace in `folder`.
    """
    # Time steps as they are, and the launches of some.
    device = DEVICES[config.device]
    racer = start_racer(name, make_task(config))
    seconds = median(time_work(racer.step, steps=config.steps, device=config.device) for _ in range(3))
    share = peers.mfu_of(config, seconds)
    began = time.perf_counter()  # the device is idle, so these launches wait for nothing
    for _ in range(TRACED):
        racer.step()
    launched = (time.perf_counter() - began) / TRACED
    yield {
        "step, ms": 1e3 * seconds,
        "MFU": "" if share is None else f"{share:.1%}",
        "launched in, ms": 1e3 * launched,
        "clock, power": device.clock_and_power(),
    }

    # Trace other steps.
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.json"
        with fs.profile.traced(racer.contender.step, path) if name == OURS else torch_trace(config, path):
            for _ in range(TRACED):
                racer.step()
        text = path.read_bytes()
    trace = read_events(json.loads(text)["traceEvents"], TRACED)
    yield time_kinds(trace)
    yield {"kernels": list_kernels(trace), "gaps": list_gaps(trace), "copies": list_copies(trace)}
    if name == OURS:
        (folder / "trace.json.gz").write_bytes(gzip.compress(text, 5))
    racer.leave()


def torch_trace(config: BenchConfig, path: Path) -> Any:
    """Return a context that traces a contender of torch's."""
    activities = [ProfilerActivity.CPU]
    if config.device == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))

    return torch.profiler.profile(activities=activities, on_trace_ready=write)


# ------------------------------------------------------------------ further measurements


def attention(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Measure the device's own rates: of products, a copy, and each kernel of attention forward and backward.

    Also measure how much of a copy on a stream of lower priority is hidden behind products, as updates would
    be.
    """
    on_cpu, width = config.device == "cpu", config.model.width // config.model.heads
    make = partial(torch.randn, dtype=config.compute_dtype, device=config.device)
    size = 512 if on_cpu else 8192
    a = make(size, size)
    products, copy = (time_call(work, config) for work in (lambda: a @ a, a.clone))
    yield {"products, TFLOP/s": 2e-12 * len(a) ** 3 / products, "a copy, GB/s": 2e-9 * a.nbytes / copy}
    q = make(config.rows, config.model.heads, config.length, width, requires_grad=True)
    flops = 7 * config.rows * config.model.heads * width * config.length**2  # causal; five of the backward

    def attend() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    rates: list[str] = []
    for name in ("MATH",) if on_cpu else ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            rates.append(f"{name.partition('_')[0].lower()} {1e-12 * flops / time_call(attend, config):.3g}")
        yield {"attention, TFLOP/s": rates}
    if not on_cpu:
        both = time_call(partial(use_two_streams, a), config)
        yield {"of a copy, hidden behind a product": 1 - (both - products) / copy}


def use_two_streams(a: Tensor) -> None:
    """Run a product on a fast stream, and a copy on the default one, whose priority is the lowest."""
    default, fast = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    fast.wait_stream(default)
    with torch.cuda.stream(fast):
        out = a @ a
    out.record_stream(default)
    a.clone()
    default.wait_stream(fast)


def time_call(work: Callable[[], Any], config: BenchConfig) -> float:
    """Return the seconds of a warm call: the median of five samples of thirty."""
    work()
    return median(time_work(work, steps=30, device=config.device) for _ in range(5))


GPU_TESTS = (str(Path("tests", "runtime", "test_gpu.py")), "-m", "gpu")


def run_tests(config: BenchConfig, folder: Path, which: Sequence[str] = GPU_TESTS) -> Iterator[Found]:
    """Count the tests that pass, and name those that fail, while they run."""
    # Without `addopts`, since the plugins that `pyproject.toml` names may not be installed.
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-o", "addopts=", *which]
    passed, last = 0, ""
    failed: list[str] = []
    env = {**os.environ, "PYTHONPATH": test_path()}
    with subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
            if ended := re.match(r"(\S+::.*) (PASSED|FAILED|ERROR)\b", line):
                if ended[2] == "PASSED":
                    passed += 1
                else:
                    failed.append(ended[1])
                yield {"passed": passed, "failed": failed or "none"}
    if process.returncode not in (0, 1) or not (passed or failed):
        raise RuntimeError(f"pytest ended with {process.returncode}: {last.strip()}")


def test_path() -> str:
    """Return `PYTHONPATH` for the tests, whose helpers are in two folders."""
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "support")
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def equal_bits(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Compare the bits of two equal runs of 20 steps, plainly and with `deterministic=True`."""
    for name, is_deterministic in (("plain", False), ("deterministic=True", True)):
        training, runs = Trained(config, Setup(options={"deterministic": is_deterministic})), []
        for _ in range(2):
            training.begin()
            losses = torch.stack([training.make_step() for _ in range(20)]).cpu()
            runs.append({"losses": losses} | {p: leaf.cpu() for p, leaf in training.state.params.items()})
        apart = sum(not torch.equal(value, runs[1][path]) for path, value in runs[0].items())
        bits = f"{apart} leaves apart" if apart else "equal"
        yield {f"two runs, {name}": [bits, f"{digits(1e3 * training.seconds(3, 5))} ms a step"]}


def saves(config: BenchConfig, folder: Path) -> Iterator[Found]:
    """Time saves in the background: the call, a step meanwhile, and everything until the save is on disk."""
    training = Trained(config)
    for _ in range(3):
        training.make_step()
    yield {"step": training.seconds(5)}
    with tempfile.TemporaryDirectory() as place:
        for name in ("first", "second"):
            time_work(lambda: None, device=config.device)  # waits for the device
            began = time.perf_counter()
            saving = fs.checkpoint.save_async(Path(place) / name, training.state)
            called, step = time.perf_counter() - began, training.seconds(1)
            saving.wait()
            yield {f"{name} save: call, step, whole, s": [called, step, time.perf_counter() - began]}
