"""Nine minutes on a GPU, `python -m experiments.bench case=gpu`, as far as a CPU can go."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from commands import forking, popen_here
from errors import raises
from ranks import make_process

import fnshard as fs
from experiments import ROOT
from experiments.bench import device, gpu, gpu_parts
from experiments.bench.config import read
from experiments.bench.device_time import list_copies, list_gaps, list_kernels, read_events, time_kinds
from experiments.bench.gpu import STAGES
from experiments.lib.checks import ConfigError
from fnshard.mesh.process_group import leave_group

WORDS = ("case=gpu", "backend=eager", "length=16", "rounds=2", "steps=1", "warmup=1")
CONFIG = read(WORDS)
# What a bare GPU machine lacks; the case and all that it starts run without.
BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = "hydra omegaconf antlr4 tqdm matplotlib einops yaml pydantic"
        return None if name.split(".")[0] in absent.split() else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_stage(folder: Path, name: str) -> dict[str, Any]:
    return json.loads(gpu.stage_file(folder, name).read_text())


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Fork the processes of the ladder from this one."""
    fork_stages(monkeypatch)
    return monkeypatch


def fork_stages(monkeypatch: pytest.MonkeyPatch) -> None:

    def popen(command: Any, **how: Any) -> Any:
        with mock.patch.multiple(sys, stdout=sys.__stdout__, stderr=sys.__stderr__):
            return popen_here(command, **how)  # which closes the files that pytest has in their place

    monkeypatch.setattr(gpu, "subprocess", forking(popen))
    monkeypatch.setattr(fs.Hardware, "measure", lambda mesh: fs.Hardware.of("cpu"))  # which takes seconds


@pytest.fixture
def toys(forked: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replace each part of the ladder by one that finds the backend's name at once."""

    def toy(config: Any, folder: Path, **how: Any) -> Iterator[dict[str, Any]]:
        yield {"found": config.backend}

    for name in ("versions", "presets", "compiled_steps", "syncs", "race", "profile", "attention"):
        forked.setattr(gpu_parts, name, toy)  # a stage's process makes its table of these
    short = {"attention": STAGES["more"].parts["attention"]}
    forked.setitem(STAGES, "more", replace(STAGES["more"], parts=short))
    return forked


# ------------------------------------------------------------------ the ladder


def test_what_dies_hangs_or_fails_is_named_and_the_rest_goes_on(toys: Any, tmp_path: Path) -> None:
    def dies(config: Any, folder: Path) -> Iterator[dict[str, Any]]:
        yield {"presets, fp64, off by": "0"}
        os.kill(os.getpid(), signal.SIGKILL)

    def fails(config: Any, folder: Path) -> Iterator[dict[str, Any]]:
        raise ValueError("no such thing")
        yield

    def hangs(config: Any, folder: Path, **how: Any) -> Iterator[dict[str, Any]]:
        yield {"full_shard": "7 ms"}
        time.sleep(1000)

    toys.setattr(gpu_parts, "presets", dies)
    toys.setattr(gpu_parts, "compiled_steps", fails)
    toys.setattr(device.Stub, "is_well", lambda self: False)  # so that what fails is the last of its process
    toys.setattr(gpu_parts, "race", hangs)
    wait_or_kill, hung = gpu.wait_or_kill, gpu.stage_file(tmp_path, "speed")

    def wait(children: Any, seconds: float) -> Any:
        """Wait until the part that hangs has found something, and no longer."""
        while children and children[-1].poll() is None and "7 ms" not in read_text(hung):
            time.sleep(0.01)
        is_hung = "7 ms" in read_text(hung) and not gpu.stage_file(tmp_path, "profile").exists()
        return wait_or_kill(children, 0.0 if is_hung else seconds)

    toys.setattr(gpu, "wait_or_kill", wait)
    result = gpu.run(replace(CONFIG, folder=str(tmp_path), until=1e6), tmp_path)
    works, speed = read_stage(tmp_path, "works"), read_stage(tmp_path, "speed")
    assert result.failed and works["done"] == ["versions", "presets", "compiled", "syncs"]
    assert works["parts"]["presets"] == {"presets, fp64, off by": "0"}
    assert works["failures"]["presets"].startswith("ended with -9")
    assert works["failures"]["compiled"].startswith("ValueError: no such thing (test_gpu_ladder.py:")
    assert works["parts"]["syncs"] == {"found": "eager"} and set(works["failures"]) == {"presets", "compiled"}
    assert speed["parts"]["rows-2"] == {"full_shard": "7 ms"} and "not done" in speed["failures"]["rows-2"]
    assert read_stage(tmp_path, "more")["parts"] == {"attention": {"found": "eager"}}
    rows = {(row[0], row[1], row[2]): row[3] for row in result.rows}
    assert rows["works", "syncs", "found"] == "eager" and rows["speed", "rows-2", "full_shard"] == "7 ms"
    assert rows["works", "presets", "failed"] and "7 ms" in (tmp_path / "table.txt").read_text()
    assert len([*tmp_path.iterdir()]) <= 8  # what may come back from such a machine


def test_until_cuts_between_stages(toys: Any, tmp_path: Path) -> None:
    """A stage begins only where its whole budget is left."""
    config = replace(CONFIG, folder=str(tmp_path), until=170.0)
    gpu.run(config, tmp_path)
    failures = {name: read_stage(tmp_path, name)["failures"] for name in STAGES}
    assert failures["works"] == failures["profile"] == failures["more"] == {}
    assert failures["speed"] == {"rows-2": "not started: 180 s are not left before until=170 s"}
    assert gpu.run(replace(config, until=10.0), tmp_path).failed
    assert not any(read_stage(tmp_path, name)["parts"] for name in STAGES)


def test_parts_are_made_once_more(toys: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, folder=str(tmp_path), until=1e6)
    gpu.run(replace(config, parts=("works",)), tmp_path)
    (tmp_path / "works.json").write_text((tmp_path / "works.json").read_text().replace("eager", "old"))
    gpu.run(replace(config, parts=("syncs", "limit")), tmp_path)
    parts = read_stage(tmp_path, "works")["parts"]
    assert parts["syncs"] == {"found": "eager"} and parts["versions"] == {"found": "old"}
    assert read_stage(tmp_path, "profile")["parts"] == {"limit": {"found": "eager"}}
    with raises(ConfigError, leaves="parts=sync", says=["works", "more.attention"]):
        gpu.run(replace(config, parts=("sync",)), tmp_path)


def test_what_failed_before_stays_until_it_is_made_once_more(toys: Any, tmp_path: Path) -> None:
    config, failed = replace(CONFIG, folder=str(tmp_path), until=1e6), {"presets": "old", "syncs": "old"}
    before = {"parts": {"versions": {"found": "old"}}, "failures": failed, "seconds": {"versions": 7.0}}
    gpu.write_stage(tmp_path, "works", before)
    assert gpu.run(replace(config, parts=("syncs",), until=10.0), tmp_path).failed
    works = read_stage(tmp_path, "works")
    assert works["failures"]["presets"] == "old" and "until=10" in works["failures"]["syncs"]
    assert works["parts"] == {"versions": {"found": "old"}} and works["seconds"] == {"versions": 7.0}
    assert gpu.run(replace(config, parts=("syncs",)), tmp_path).failed  # presets, as the table says
    works = read_stage(tmp_path, "works")
    assert works["failures"] == {"presets": "old"} and works["seconds"]["versions"] == 7.0
    assert set(works["parts"]) == set(works["seconds"]) == {"versions", "syncs"}
    assert not gpu.run(replace(config, parts=("presets",)), tmp_path).failed
    assert not gpu.run(config, tmp_path).failed and read_stage(tmp_path, "works")["seconds"]["versions"] < 7.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_ladder_that_is_ended_leaves_what_it_found(toys: Any, tmp_path: Path, number: int) -> None:
    """It leaves no running process."""
    os.mkfifo(tmp_path / "reached")

    def hangs(config: Any, folder: Path, **how: Any) -> Iterator[dict[str, Any]]:
        yield {"full_shard": "7 ms"}
        with (tmp_path / "reached").open("w") as held:
            print("reached", file=held, flush=True)
            time.sleep(1000)

    toys.setattr(gpu_parts, "race", hangs)
    (folder := tmp_path / "out").mkdir()
    reached = os.open(tmp_path / "reached", os.O_RDONLY | os.O_NONBLOCK)
    ladder = os.fork()
    if ladder == 0:
        try:
            gpu.run(replace(CONFIG, folder=str(folder)), folder)
        finally:
            os._exit(3)
    try:
        assert select.select([reached], [], [], 60)[0] and os.read(reached, 99) == b"reached\n"
    finally:
        os.kill(ladder, number)
        os.waitpid(ladder, 0)
    # The pipe ends when nobody holds its other end: the stage has ended, too.
    assert select.select([reached], [], [], 60)[0] and os.read(reached, 99) == b""
    os.close(reached)
    assert read_stage(folder, "works")["done"] == ["versions", "presets", "compiled", "syncs"]
    assert read_stage(folder, "speed")["parts"] == {"rows-2": {"full_shard": "7 ms"}}
    assert "syncs" in (folder / "table.txt").read_text()


def test_without_triton_steps_are_eager(toys: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, device="cuda", backend="inductor")
    util = SimpleNamespace(find_spec=lambda name: None if name == "triton" else object())
    gpu.write_stage(tmp_path, "works", {})
    stage = replace(STAGES["works"], parts={"versions": gpu.Part(gpu_parts.versions)})
    toys.setitem(STAGES, "works", stage)
    toys.setattr(gpu.importlib, "util", util)
    gpu.run_parts("works", ["versions"], config, tmp_path)
    found = read_stage(tmp_path, "works")
    assert found["parts"] == {"versions": {"found": "eager"}} and "Triton is not inst" in found["missing"]


def test_a_device_that_is_gone_takes_a_new_process(toys: Any, tmp_path: Path) -> None:
    def fails(config: Any, folder: Path) -> Iterator[dict[str, Any]]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield

    stage = {"presets": gpu.Part(fails), "syncs": gpu.Part(gpu_parts.syncs)}
    toys.setitem(STAGES, "works", replace(STAGES["works"], parts=stage))
    toys.setattr(device.Stub, "is_well", lambda self: False)
    gpu.write_stage(tmp_path, "works", {})
    assert not gpu.run_parts("works", ["presets", "syncs"], CONFIG, tmp_path)
    assert read_stage(tmp_path, "works")["done"] == ["presets"]


# ------------------------------------------------------------------ its parts, on a CPU


def climb(folder: Path, *chosen: str) -> dict[str, Any]:
    """Run parts of the ladder, and return what they have found, by stage.

    That is in a new process: a fork of one that has used autograd's threads cannot use them.
    """
    process = make_process(_climb, args=(folder, chosen))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    log = folder / "log.txt"
    assert process.exitcode == 0, log.read_text() if log.exists() else process.exitcode
    return {name: read_stage(folder, name)["parts"] for name in STAGES}


def _climb(folder: Path, chosen: tuple[str, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fork_stages(patch)
        for name, stage in STAGES.items():  # on busy cores all takes longer
            patch.setitem(STAGES, name, replace(stage, seconds=stage.seconds and 1e5))
        result = gpu.run(replace(CONFIG, folder=str(folder), parts=chosen, until=1e6), folder)
    sys.exit(result.failed)


@pytest.mark.long
def test_the_ladder_on_a_cpu(tmp_path: Path) -> None:
    parts = climb(tmp_path, "presets", "speed", "profile.full_shard", "attention")
    off = parts["works"]["presets"]["raw"]["off by"]
    assert len(off) == len({*fs.presets.PRESETS.values()}) and max(off.values()) < 1e-10
    rows = parts["speed"]["rows-2"]
    assert {len(racer["seconds"]) for racer in rows["raw"].values()} == {CONFIG.rounds}
    for other in ("limit", "fsdp2_compiled"):
        seconds, ours = rows["raw"][other]["seconds"], rows["raw"]["full_shard"]["seconds"]
        expected = [a / b for a, b in zip(seconds, ours, strict=True)]
        assert rows[f"tokens/s, full_shard / {other}"] == pytest.approx(sum(expected) / 2)
        assert abs(rows[f"last loss, full_shard - {other}"]) < 1e-4
    assert rows["peak bytes, predicted / measured"] > 0 and rows["time, by measured rates / measured"] > 0
    assert parts["profile"]["full_shard"]["casts"] > 0 and parts["profile"]["full_shard"]["kernels"]
    assert (tmp_path / "trace.json.gz").stat().st_size and parts["more"]["attention"]


@pytest.mark.long
def test_the_rest_of_the_ladder_on_a_cpu(tmp_path: Path) -> None:
    works = ("versions", "compiled", "syncs")
    more = ("rows-8", "fp8", "muon", "equal_bits", "saves")
    parts = climb(tmp_path, *works, "speed", "profile", *more)
    assert set(parts["works"]["syncs"].values()) == {"unknown"}
    assert parts["works"]["compiled"]["losses of five steps"]
    for name in ("full_shard", "limit", "fsdp2_compiled"):
        assert parts["profile"][name]["kernels"] and parts["profile"][name]["step, ms"] > 0
    assert parts["more"]["equal_bits"]["two runs, plain"][0] == "equal"
    assert set(parts["more"]) == set(more)


def test_what_this_torch_lacks_is_named(tmp_path: Path, forked: pytest.MonkeyPatch) -> None:
    forked.setitem(sys.modules, "torch.distributed.fsdp", None)
    race = gpu.Part(partial(gpu_parts.race, names=("fsdp2_compiled", "limit")))
    forked.setitem(STAGES, "speed", replace(STAGES["speed"], parts={"rows-2": race}))
    gpu.write_stage(tmp_path, "speed", {})
    try:
        gpu.run_parts("speed", ["rows-2"], CONFIG, tmp_path)
    finally:
        leave_group()
    found = read_stage(tmp_path, "speed")
    assert "fsdp2_compiled: ModuleNotFoundError: import of torch.d" in found["failures"]["rows-2"]
    assert len(found["parts"]["rows-2"]["raw"]["limit"]["seconds"]) == CONFIG.rounds


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BARE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "experiments.bench", *WORDS, f"folder={folder}/out", *overrides]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.long  # imports PyTorch twice
def test_it_runs_on_a_bare_machine(tmp_path: Path) -> None:
    done = run(tmp_path, "parts=[saves,equal_bits]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first save: call, step, whole" in done.stdout
    assert read_stage(tmp_path / "out", "more")["parts"]["equal_bits"]["two runs, plain"][0] == "equal"


@pytest.mark.long  # starts pytest twice
def test_tests_are_counted_and_those_of_a_gpu_are_there(monkeypatch: Any, tmp_path: Path) -> None:
    assert (ROOT / gpu_parts.GPU_TESTS[0]).is_file()
    file = tmp_path / "test_some.py"
    skip = "import pytest\n@pytest.mark.skip\ndef test_three(): pass\n"
    file.write_text(f"{skip}def test_one(): pass\ndef test_two(): assert False\n")
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    *_, found = gpu_parts.run_tests(CONFIG, tmp_path, [str(file)])
    assert found == {"passed": 1, "failed": ["test_some.py::test_two"]}
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        [*gpu_parts.run_tests(CONFIG, tmp_path, [str(tmp_path / "nothing.py")])]


# ------------------------------------------------------------------ waits


@pytest.mark.parametrize("at", [None, 4])
def test_steps_3_to_6_must_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int | None) -> None:
    modes: list[str] = []
    steps: list[list[str]] = []

    def trained(config: Any, plan: Any, host: bool) -> SimpleNamespace:
        assert host  # batches are on the host, as a loader gives them
        steps.append([])

        def step() -> None:
            steps[-1].append(modes[-1] if modes else "default")
            if len(steps[-1]) == at:
                raise RuntimeError("called a synchronizing CUDA operation")

        return SimpleNamespace(config=config, make_step=step)

    monkeypatch.setattr(gpu_parts, "Trained", trained)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found: dict[str, Any] = {}
    for more in gpu_parts.syncs(replace(CONFIG, device="cuda"), tmp_path):
        found |= more
    assert set(found) == {"plain", "dropout", "clipping", "micro-batches"}
    assert modes == ["error", "default"] * 4 and modes[-1] == "default"
    assert steps[0] == ["default"] * 2 + ["error"] * ((at or 6) - 2)
    for place in found.values():
        assert place == "silent" if at is None else "raise RuntimeError" in place and "synchronizing" in place


def test_a_gpu_answers_what_the_stub_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are torch's own, by name and arguments; what they return is made up."""
    real = torch.cuda
    answers = {"get_device_name": "NVIDIA H200", "memory_allocated": 3, "memory_reserved": 5,
               "max_memory_allocated": 4, "synchronize": None, "reset_peak_memory_stats": None}  # fmt: skip
    made = {name: mock.create_autospec(getattr(real, name), return_value=v) for name, v in answers.items()}
    made["nccl"] = SimpleNamespace(version=mock.create_autospec(real.nccl.version, return_value=(2, 28, 9)))
    for name, function in made.items():
        monkeypatch.setattr(torch.cuda, name, function)
    uuid = "7f1c06f2-3c85-4e2b-9a6f-0d1f2a3b4c5d"
    properties = mock.create_autospec(real.get_device_properties, return_value=SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def smi(query: list[str], **how: Any) -> subprocess.CompletedProcess:
        lines = {"--id=GPU-" + uuid: "1980 MHz, 690.01 W\n"}
        return subprocess.CompletedProcess([], 0, stdout=lines.get(query[1], "345 MHz, 70.00 W\n"))

    monkeypatch.setattr(device.subprocess, "run", smi)
    card, stub = device.Gpu(), device.Stub()
    assert card.describe()[0] == "NVIDIA H200" and len(stub.describe()) == len(card.describe())
    card.reset_peak()
    assert (card.allocated_bytes(), card.reserved_bytes(), card.peak_bytes()) == (3, 5, 4)
    assert card.hardware().peak_flops["bf16"] > 9e14 and stub.hardware() is None
    assert card.clock_and_power() == "1980 MHz, 690.01 W" and card.is_well() and stub.is_well()
    made["synchronize"].side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not card.is_well()
    assert stub.peak_bytes() >= stub.allocated_bytes() > 0
    assert made["reset_peak_memory_stats"].called


# ------------------------------------------------------------------ where the time goes


def test_kernels_are_split_by_name_and_by_what_launched_them() -> None:
    lines = {"fnshard 0 forward root cast": 0.0, "fnshard 1 forward root run": 100.0,
             "fnshard 2 update root update": 200.0}  # fmt: skip
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 50.0}
        for name, ts in lines.items()
    ]
    kernels = [
        ("Memcpy DtoD", "gpu_memcpy", 0.0, 1000.0, 20.0),
        ("nvjet_tst_256x128", "kernel", 100.0, 1020.0, 300.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "kernel", 110.0, 1320.0, 100.0),
        ("triton_poi_fused_silu", "kernel", 120.0, 1430.0, 60.0),  # 10 us after the one before it
        ("triton_for_fused_adamw", "kernel", 200.0, 1490.0, 40.0),
        ("fill", "kernel", 170.0, 1530.0, 5.0),  # launched between instructions
    ]
    for number, (name, cat, launched, ts, dur) in enumerate(kernels):
        args = {"correlation": number, "bytes": 4_000_000}
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1.0, "args": args}
        )
        events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args})
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "synchronize", "ts": 210.0, "dur": 1.0})
    events.append({"ph": "X", "cat": "kernel", "name": "unknown", "ts": 1535.0, "dur": 5.0})
    trace = read_events(events, steps=1)
    assert time_kinds(trace) == pytest.approx({
        "products": 0.3, "attention": 0.1, "elementwise": 0.06, "update": 0.04, "casts": 0.02,
        "communication": 0.0, "other": 0.01, "idle": 0.01,
    })  # fmt: skip
    assert list_kernels(trace, 2)[0] == "0.300 ms, 1 calls: nvjet_tst_256x128"
    assert list_copies(trace) == ["0.020 ms, 1 calls, 4 MB: Memcpy DtoD"]
    gaps = list_gaps(trace)
    assert gaps["count"] == 1 and gaps["ms"] == pytest.approx(0.01)
    assert gaps["longest"][0].endswith("flash_bprop -> triton_poi_fused_silu")
    of_torch = time_kinds(read_events(events[3:], steps=1))  # without instructions names alone tell
    assert of_torch["update"] == pytest.approx(0.04) and of_torch["casts"] == pytest.approx(0.02)
    with pytest.raises(ValueError, match="no kernel"):
        read_events([], 1)


# ------------------------------------------------------------------ the table


def test_the_readme_shows_the_rows_with_a_target_and_empty_cells() -> None:
    text = (ROOT / "experiments" / "bench" / "README.md").read_text(encoding="utf-8")
    head, *rows = ["| " + " | ".join(row) + " |" for row in gpu.make_table({}) if row[-1]]
    assert "\n".join([head, "|---|---|---|---|---|", *rows]) in text
