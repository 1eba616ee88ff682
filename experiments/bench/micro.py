"""The cases `executor`, which times the executor alone, and `starts`, which times whole runs from outside."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments import ROOT
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, interleave, say
from experiments.lib.decoder import Decoder, DecoderConfig, loss_function
from experiments.lib.metrics import METRICS, read_rows
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT
from fnshard.compiler.kernels.inductor import graphs_of
from fnshard.compiler.schedule.instructions import Run
from fnshard.runtime.collectives.base import Done
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.execute import bind
from fnshard.step.settings import scalars_of

# ------------------------------------------------------------------ executor


def executor(config: BenchConfig, folder: Path) -> Result:
    """What does the executor itself cost, for each unit and phase, and for each leaf of a step?

    Kernels and collectives do nothing: what is left is packing, unpacking, bookkeeping and the loop. The last
    row is a whole step of 200 tiny leaves in one unit, its checks, inputs and metrics included.
    """
    # The schedules of two presets, whose kernels and collectives do nothing.
    torch.set_num_threads(1)
    works = {f"{preset}, a unit and phase": schedule_alone(preset) for preset in ("full_shard", "no_shard")}

    # A whole step of tiny leaves.
    params = {f"layers.{i}": torch.ones(4) for i in range(200)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(unit="all"))])
    loss = lambda p, x: (torch.stack(list(p.values())) * x).sum()  # noqa: E731
    step = fs.shard_step(loss, specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    state, batch = step.init(params), torch.ones(4)

    def make_step() -> None:
        nonlocal state
        state, _ = step(state, batch)

    works["a step of 200 leaves"] = make_step, 1
    rows = [["", "CPU us"]]
    for name, (work, parts) in works.items():
        work()
        (seconds,) = interleave({name: work}, config.rounds, clock=time.thread_time).values()
        rows.append([name, f"{1e6 * median(seconds) / parts:.0f}"])
    return Result(rows)


def schedule_alone(preset: str) -> tuple[Callable[[], None], int]:
    """Bind the schedule of a tiny decoder on two ranks, and return a function that runs it.

    Its kernels and collectives do nothing, but give tensors of the right shapes. The second result is the
    number of its units and phases.
    """
    mesh = fs.make_mesh(shard=2, abstract=True)
    loss, params = loss_function(
        Decoder(DecoderConfig(width=8, layers=12, heads=2, kv_heads=1, context=8, vocab=16))
    )
    specs, tokens = fs.presets.PRESETS[preset](params, mesh), torch.zeros(1, 8, dtype=torch.long)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    lowered = step.lower(params, tokens, tokens)

    # A kernel returns the same zeros at every call, and a collective is done when it is issued.
    def make_idle(graph: Any) -> Callable[[Any], list[Tensor]]:
        outs = [torch.zeros(node.meta["val"].shape) for node in graph.graph.output_node().args[0]]
        return lambda args: outs

    kernels = {key: make_idle(module) for key, module in graphs_of(lowered.kernels.values()).items()}
    scalars = scalars_of(lowered.program, lowered.segments, None, step.resolved, mesh, step.options)
    idle_collectives = SimpleNamespace(
        mesh=mesh,
        send_buffer=lambda numel, dtype, axes, rows=1: torch.empty(rows * numel, dtype=dtype),
        all_gather=lambda flat, axes: Done([flat, flat]),
        reduce_scatter=lambda rows, axes: Done(rows[: rows.numel() // 2]),
        all_reduce=lambda flat, axes: Done(flat),
    )
    run = bind(ExecutorContext(lowered.schedule, kernels, idle_collectives, 0, scalars))
    shards = fs.shard(params, specs, mesh)

    def work() -> None:
        env = {f"s:{path}": block for path, block in shards.items()}
        env |= {"batch:0": tokens, "batch:1": tokens, LOSS_TANGENT: torch.ones(()), CONTROL: StepControl()}
        run(env)

    return work, sum(isinstance(line, Run) for line in lowered.schedule.instructions)


# ------------------------------------------------------------------ starts

START = ("run.steps=40", "run.held_out_every=20", "run.sample_tokens=2")
POLL_S = 0.02


def time_first_row(overrides: Sequence[str], place: Path, checkout: Path = ROOT) -> float:
    """Run the main job in a new folder below `place`, which has its caches, too.

    Returns:
        The seconds from the command to its first row of metrics.
    """
    folder, log = Path(tempfile.mkdtemp(dir=place)), place / "log.txt"
    caches = {"XDG_CACHE_HOME": str(place / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
    env = {**os.environ, **caches, "PYTHONPATH": str(checkout)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start finds the bytecode of the first
    command = [sys.executable, "-u", "-m", "experiments.train", f"hydra.run.dir={folder}", *overrides]
    first_row_s, began = 0.0, time.perf_counter()
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            time.sleep(POLL_S)
            if not first_row_s and any(read_rows(folder / METRICS, 2**63)):
                first_row_s = time.perf_counter() - began
    if process.returncode or not first_row_s:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{log.read_text(errors='replace')}")
    return first_row_s


def starts(config: BenchConfig, folder: Path) -> Result:
    """How long is it from the command to the first finished step, with empty caches and once more?

    With `checkout=` another checkout takes turns with this one.
    """
    checkouts = [ROOT]
    if config.checkout:
        checkouts.append(Path(config.checkout).resolve())
    times: dict[str, list[float]] = {}
    for number in range(config.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as place:
                for which in ("first", "second"):
                    words = [*START, *shlex.split(config.overrides)]
                    seconds = time_first_row(words, Path(place), checkout)
                    times.setdefault(f"{checkout.name}, {which} start", []).append(seconds)
                    say(f"round {number + 1}, {checkout.name}, {which} start: {seconds:.1f} s")
    rows = [[name, f"{median(seconds):.1f}", f"{max(seconds):.1f}"] for name, seconds in times.items()]
    return Result([["", "median s", "longest s"], *rows], values={"seconds": times})
