"""The case `gpu`: nine minutes on a GPU, as a ladder of stages that always leaves results.

    python -m experiments.bench case=gpu device=cuda until=540

A stage is a process with a budget of seconds. It has a file, `STAGE.json`, that is written again whenever a
part of it has found something, so nothing is lost if the process or the command ends. A part that fails, or
that needs something that this PyTorch lacks, is named there, and the next part begins, in a new process if
the old one has died. A stage begins only if its whole budget is left before `until=`. While the first stage
checks whether anything works, other processes compile the steps of the second.

A machine without a network needs PyTorch, NumPy, pytest and a wheel of optree. A CPU stands in for the GPU
where the case is rehearsed (`device=cpu`). `python -m experiments.bench.gpu STAGE FOLDER PARTS key=value...`
is one stage.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import ROOT
from experiments.bench import gpu_parts as parts
from experiments.bench import ranks
from experiments.bench.config import BenchConfig, read
from experiments.bench.device import DEVICES
from experiments.bench.device_time import KINDS
from experiments.bench.gpu_parts import COMPILED, OURS, RACERS, Found
from experiments.bench.measure import Result, release, say
from experiments.lib.checks import ConfigError
from experiments.lib.files import read_json, write_json, write_text
from fnshard.analysis.tables import columns
from fnshard.launcher.rank import end_with_parent
from fnshard.plot.scales import digits

LEAST_S = 20.0  # a stage that takes all the time that is left begins only with more than this
AHEAD_S = 60.0  # the second stage waits no longer for the steps that are compiled ahead
AHEAD = "ahead"


@dataclass(frozen=True)
class Part:
    """A part of a stage, which measures something.

    Args:
        run: a function of `(config, folder)` that yields findings. Large ones are written to the folder.
        targets: the names of findings that the table shows, with the values that are expected.
        gpu: whether it needs a GPU.
    """

    run: Callable[[BenchConfig, Path], Iterator[Found]]
    targets: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False


@dataclass(frozen=True)
class Stage:
    """A stage of the ladder: parts that share a process and a budget of seconds.

    Args:
        seconds: the budget; None takes all the time that is left.
    """

    seconds: float | None
    parts: Mapping[str, Part]


# The milliseconds that are expected of a step on an H200, in bf16, with 2 rows of 4096.
EXPECTED = {"products": "78", "attention": "22 to 33", "elementwise": "17", "update": "7 to 8", "casts": "0",
            "communication": "0", "idle": "2 to 3"}  # fmt: skip
SHARES = {
    f"tokens/s, {OURS} / {COMPILED}": "1.05 or more",
    f"peak bytes, {OURS} / {COMPILED}": "0.85 or less",
}
PREDICTED = {
    "peak bytes, predicted / measured": "0.95 to 1.05",
    "time, by data sheet / measured": "0.75 to 1.25",
    "time, by measured rates / measured": "0.75 to 1.25",
}
TOTAL = {"step, ms": "", "MFU": "", "launched in, ms": ""}
LOOK = {**TOTAL, **dict.fromkeys(KINDS, "")}
RATES = ("products, TFLOP/s", "a copy, GB/s", "attention, TFLOP/s", "of a copy, hidden behind a product")
STAGES: dict[str, Stage] = {
    "works": Stage(120, {
        "versions": Part(parts.versions, {"versions": "", "clock, power": ""}),
        "presets": Part(parts.presets, {"presets, fp64, off by": "1e-10 or less"}),
        "compiled": Part(parts.compiled_steps, {"losses of five steps": "finite", "first step, s": "",
                                          "attention's kernels": ""}),
        "syncs": Part(parts.syncs, dict.fromkeys(parts.VARIANTS, "silent")),
    }),
    "speed": Stage(180, {
        "rows-2": Part(parts.race, {
            **dict.fromkeys(RACERS, ""), **SHARES, f"tokens/s, {OURS} / limit": "1.00 or more", **PREDICTED,
            "clock, power": "",
        }),
    }),
    "profile": Stage(120, {
        OURS: Part(parts.profile, {**LOOK, "step, ms": "112", "MFU": "45%", **EXPECTED}),
        "limit": Part(partial(parts.profile, name="limit"), LOOK),
        COMPILED: Part(partial(parts.profile, name=COMPILED), LOOK),
    }),
    "more": Stage(None, {
        "attention": Part(parts.attention, dict.fromkeys(RATES, "")),
        "rows-8": Part(
            partial(parts.race, names=(OURS, COMPILED), rows=8, alone=True),
            {**dict.fromkeys((OURS, COMPILED), ""), **SHARES, **PREDICTED},
        ),
        "tests": Part(parts.run_tests, {"passed": "", "failed": "none"}, gpu=True),
        "fp8": Part(partial(parts.race, names=["full_shard_fp8"]), {"full_shard_fp8": ""}),
        "muon": Part(partial(parts.race, names=["muon"]), {"muon": ""}),
        "equal_bits": Part(
            parts.equal_bits, {"two runs, plain": "", "two runs, deterministic=True": "equal"}
        ),
        "saves": Part(parts.saves, {f"{n} save: call, step, whole, s": "" for n in ("first", "second")}),
    }),
}  # fmt: skip


# ------------------------------------------------------------------ the ladder


def run(config: BenchConfig, folder: Path) -> Result:
    """Does fnshard work on this GPU, how fast is it there, and where does the time of a step go?"""
    end = time.monotonic() + config.until
    place = Path(config.folder or Path("outputs", "gpu")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    todo = choose_parts(config)
    with exit_on_sigterm(), compile_ahead(config, place, todo) as ahead:
        for name, names in todo.items():
            started, left = time.monotonic(), end - time.monotonic()
            budget = STAGES[name].seconds or left
            if left < max(budget, LEAST_S):
                wanted = STAGES[name].seconds or LEAST_S
                reason = f"not started: {wanted:g} s are not left before until={config.until:g} s"
                found = read_earlier(place, name, names) if config.parts else {}
                failures = {**found.get("failures", {}), **dict.fromkeys(names, reason)}
                write_stage(place, name, {**found, "failures": failures})
            else:
                # Later stages measure, and share the machine with no process that compiles.
                if name != next(iter(STAGES)):
                    wait_or_kill(ahead, AHEAD_S)
                    ahead.clear()
                run_stage(name, names, config, place, budget - (time.monotonic() - started))
            write_text(place / "table.txt", "\n".join([*columns(make_table(read_stages(place))), ""]))
    found = read_stages(place)
    failed = any(stage.get("failures") for stage in found.values())
    return Result(make_table(found), values={"stages": found}, failed=failed)


def choose_parts(config: BenchConfig) -> dict[str, list[str]]:
    """Return the names of the parts to run, by stage.

    They are those that the device can run, and that `parts=` names by stage, by name or as "stage.name".

    Raises:
        ConfigError: a name is unknown.
    """
    known = {f"{stage}.{name}": part for stage, own in STAGES.items() for name, part in own.parts.items()}
    wanted, unknown = set(), []
    for word in config.parts:
        matches = [full for full in known if word in (full, *full.split(".", 1))]
        wanted.update(matches)
        if not matches:
            unknown.append(word)
    if unknown:
        raise ConfigError(f"parts={','.join(unknown)}: any of {', '.join([*STAGES, *known])}.")
    wanted = wanted or set(known)
    todo: dict[str, list[str]] = {}
    for full, part in known.items():
        if full in wanted and (config.device == "cuda" or not part.gpu):
            stage, _, name = full.partition(".")
            todo.setdefault(stage, []).append(name)
    return todo


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, so that child processes are killed on the way out."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def compile_ahead(
    config: BenchConfig, place: Path, todo: Mapping[str, Sequence[str]]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Make a step of each racer in a process of its own, so that the second stage finds its kernels cached.

    The processes run beside the first stage.
    """
    names = RACERS if config.backend == "inductor" and {"works", "speed"} <= set(todo) else ()
    children = []
    try:
        for name in names:
            children.append(start_child([AHEAD, str(place), name], config, place / "ahead.txt"))
        yield children
    finally:
        wait_or_kill(children, 0.0)


def start_child(words: Sequence[str], config: BenchConfig, log: Path) -> subprocess.Popen[bytes]:
    """Start a process of this module in a session of its own, which `wait_or_kill` ends."""
    command = [sys.executable, "-u", "-m", "experiments.bench.gpu", *words, *config.words()]
    env = {**os.environ, **ranks.environment(config)}
    with log.open("ab") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_or_kill(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Wait for processes, and kill those that are not done in time, with all that they have started.

    Returns:
        Their exit codes; None for one that was killed.
    """
    end, codes = time.monotonic() + seconds, []
    try:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
            codes.append(child.returncode)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return codes


def run_stage(name: str, names: Sequence[str], config: BenchConfig, place: Path, seconds: float) -> None:
    """Run parts of a stage in a process. If a part ends the process, run those after it in another one."""
    say(f"{name}: {', '.join(names)}, at most {seconds:.0f} s")
    end, log, todo = time.monotonic() + seconds, place / "log.txt", list(names)
    write_stage(place, name, read_earlier(place, name, names) if config.parts else {})
    while todo:
        child = start_child([name, str(place), ",".join(todo)], config, log)
        (code,) = wait_or_kill([child], end - time.monotonic())
        found = read_json(stage_file(place, name))
        failures, left = found["failures"], [part for part in todo if part not in found["done"]]
        if not left:
            return

        # The part that ran when the process ended comes first.
        running = found.pop("running", None)
        last, *later = sorted(left, key=lambda part: part != running)

        # The time is over.
        if code is None:
            failures[last] = f"not done after {seconds:.0f} s"
            failures |= dict.fromkeys(later, f"not started: the stage's {seconds:.0f} s are over")
            write_stage(place, name, found)
            return

        # The part has ended the process. If none ran, the process has left by itself, between two parts.
        if running or left == todo:
            text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            failures[last] = f"ended with {code}: {(text or [''])[-1]:.300}"
            found["done"].append(last)
            left.remove(last)
        write_stage(place, name, found)
        todo = left


# ------------------------------------------------------------------ files


def stage_file(place: Path, name: str) -> Path:
    return place / f"{name}.json"


def write_stage(place: Path, name: str, found: Found) -> None:
    """Write a stage's file."""
    blank = {"parts": {}, "failures": {}, "seconds": {}, "done": []}
    write_json(stage_file(place, name), blank | found)


def read_earlier(place: Path, name: str, names: Sequence[str]) -> Found:
    """Return what an earlier run has found in a stage, without the failures of the parts that run now.

    Args:
        names: the parts that run now.
    """
    before = read_json(stage_file(place, name))
    failures = {part: why for part, why in before.get("failures", {}).items() if part not in names}
    return {"parts": before.get("parts", {}), "failures": failures, "seconds": before.get("seconds", {})}


def read_stages(place: Path) -> dict[str, Found]:
    stages = {name: read_json(stage_file(place, name)) for name in STAGES}
    return {name: found for name, found in stages.items() if found}


def make_table(stages: Mapping[str, Found]) -> list[list[str]]:
    """Return a row for each target and each further finding. A cell is empty if the part has not run, or the
    device cannot tell."""
    rows = [["stage", "part", "what", "measured", "target"]]
    for name, stage in STAGES.items():
        findings, failures = (stages.get(name, {}).get(key, {}) for key in ("parts", "failures"))
        for part_name, part in stage.parts.items():
            found = findings.get(part_name, {})
            if part_name in failures:
                rows.append([name, part_name, "failed", failures[part_name], ""])
            for what, target in part.targets.items():
                rows.append([name, part_name, what, format_value(found.get(what, "")), target])
            for what, value in found.items():
                if what not in part.targets and is_short(value):
                    rows.append([name, part_name, what, format_value(value), ""])
    return rows


def is_short(value: Any) -> bool:
    return isinstance(value, str | float | int)


def format_value(value: Any) -> str:
    """Return a value of a result as text.

    >>> format_value([2.98761, "eager", 12])
    '2.988, eager, 12'
    """
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return digits(value) if isinstance(value, float) else str(value)


# ------------------------------------------------------------------ a stage


def run_parts(name: str, names: Sequence[str], config: BenchConfig, place: Path) -> bool:
    """Run parts one after another, and write what each yields at once.

    Returns:
        Whether the device is well, so that further parts may run in this process.
    """
    record = read_json(stage_file(place, name))
    if config.backend == "inductor" and config.device == "cuda" and not importlib.util.find_spec("triton"):
        record["missing"] = "Triton is not installed: all steps are eager, PyTorch's own too."
        config = replace(config, backend="eager")
    for part in names:
        say(part)
        record["running"], began = part, time.monotonic()
        record["failures"].pop(part, None)
        write_stage(place, name, record)
        found = record["parts"][part] = {}
        try:
            for more in STAGES[name].parts[part].run(config, place):
                found |= more
                record["seconds"][part] = time.monotonic() - began
                write_stage(place, name, record)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {parts.first_line(error)}"
            record["failures"][part] = f"{text} ({parts.find_place(error)})"
        record["done"].append(part)
        record["running"], record["seconds"][part] = None, time.monotonic() - began
        write_stage(place, name, record)

        # After an illegal access no further part could run in this process.
        if part in record["failures"] and not DEVICES[config.device].is_well():
            print(f"{part}: the device does not answer any more", file=sys.stderr)
            return False
        release()
    return True


def main(name: str, place: Path, names: Sequence[str], config: BenchConfig) -> None:
    """Run a stage, or make a contender's step ahead. The process ends with the ladder's."""
    end_with_parent(signal.SIGKILL, os.getppid())
    ranks.join(config, group=False)
    code = 0
    if name == AHEAD:
        parts.make_ahead(config, *names)
    elif not run_parts(name, names, config, place):
        code = 1
    sys.stdout.flush()
    os._exit(code)  # taking a process group of one down might hang, and takes the stage's time


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), read(sys.argv[4:]))
