"""The first hour on a GPU, `python -m experiments.bench case=gpu`, as far as a CPU can go."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import ROOT
from experiments.bench import gpu
from experiments.bench.command import COMMAND
from experiments.bench.gpu import PARTS, split

CONFIG = COMMAND.read({"case": "gpu"})
COMPILE = ("limit", "fsdp2_compiled")  # minutes each
ON_CPU = [
    name for name, part in PARTS.items()
    if not (part.gpu or name.startswith("bench-8") or name.endswith(COMPILE))
]  # fmt: skip
# What a bare GPU machine lacks; the case and all that it starts run without.
BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = "hydra omegaconf antlr4 tqdm matplotlib einops yaml"
        return None if name.split(".")[0] in absent.split() else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BARE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "experiments.bench", "case=gpu", f"folder={folder}/out", *overrides]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


# ------------------------------------------------------------------ the case


def test_on_a_bare_machine_a_part_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, "parts=[saves]", "backend=eager", "length=16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first save: call, step, whole" in done.stdout
    assert gpu.versions(CONFIG, tmp_path).keys() == PARTS["versions"].targets.keys()
    for name in PARTS:
        gpu.result_of(tmp_path / "out", name).touch()
    gpu.result_of(tmp_path / "out", "versions").write_text('{"torch, Python, device, CUDA, cuDNN, NCCL": 3}')
    found = gpu.run(replace(CONFIG, folder=str(tmp_path / "out")), tmp_path)
    assert "versions: has a result" in capsys.readouterr().err
    assert set(found.values["results"]) == {"versions", "saves"} and found.rows[1][2] == "3"


def test_a_part_that_hangs_or_dies_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.result_of(tmp_path, "versions").write_text('{"torch, Python, device, CUDA, cuDNN, NCCL": "2.0"}')
    config = replace(CONFIG, folder=str(tmp_path), parts=("tiny",), minutes=0.0001)
    found = gpu.run(config, tmp_path)
    assert found.failed and found.rows[1][2] == "2.0"
    assert found.rows[-1] == ["tiny", "failed", "not done in 0.0001 minutes", ""]
    assert gpu.run(replace(config, until=0.0), tmp_path).rows[-1][2] == "not started before until=0 s"
    assert json.loads((tmp_path / "results.json").read_text())["failures"].keys() == {"tiny"}
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # no Python starts
    assert gpu.run(replace(config, minutes=1.0), tmp_path).rows[-1][2].startswith("ended with 1: ")
    assert not gpu.result_of(tmp_path, "tiny").exists()


HANGS = """
import os, subprocess, sys
if "experiments.bench.gpu" in sys.orig_argv:
    started = open(os.environ["STARTED"], "w")
    subprocess.Popen(["sleep", "1000"], stdout=started)  # as a compiler that a part has started
    print("started", file=started, flush=True)
    os.execvp("sleep", ["sleep", "1000"])
"""


def test_ended_by_a_signal_it_ends_what_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    os.mkfifo(tmp_path / "started")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    child = subprocess.Popen(
        [sys.executable, "-m", "experiments.bench", "case=gpu", f"folder={tmp_path}/out", "parts=[tiny]"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "STARTED": str(tmp_path / "started")},
    )  # fmt: skip
    try:
        with (tmp_path / "started").open() as started:
            assert started.readline() == "started\n"
            child.terminate()
            gone = select.select([started], [], [], 30)[0]  # when nobody holds the other end
            assert gone and started.read() == ""
        assert child.wait(60) != 0
    finally:
        child.kill()


@pytest.mark.long  # ten processes
def test_all_parts_of_a_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "backend=eager", "rounds=1", "steps=2", "length=32", f"parts=[{','.join(ON_CPU)}]")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: json.loads(gpu.result_of(tmp_path / "out", name).read_text()) for name in ON_CPU}
    assert found["equal_bits"]["two runs as they are"][0] == "equal"
    assert found["equal_bits"]["two runs deterministic=True"][0] == "equal"
    assert set(found["syncs"].values()) == {"unknown"}
    assert 0.95 < found["predictions"]["peak bytes"] < 1.05
    kinds = found["profile"]
    assert kinds["elementwise"] > 0 and kinds["update"] > 0 and kinds["casts"] > 0


def test_tests_are_counted_and_those_of_a_gpu_are_there(monkeypatch: Any, tmp_path: Path) -> None:
    assert all(Path(name).is_file() for name in (*gpu.CORE_TESTS.values(), ROOT / gpu.GPU_TESTS[0]))
    file = tmp_path / "test_some.py"
    skip = "import pytest\n@pytest.mark.skip\ndef test_three(): pass\n"
    file.write_text(f"{skip}def test_one(): pass\ndef test_two(): assert False\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    found = gpu.pytest(CONFIG, tmp_path, [str(file)])
    assert found == {"passed": 1, "failed": ["test_some.py::test_two"]}
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        gpu.pytest(CONFIG, tmp_path, [str(tmp_path / "nothing.py")])


# ------------------------------------------------------------------ waits


@pytest.mark.parametrize("at", [None, 4])
def test_steps_3_to_6_must_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int | None) -> None:
    modes: list[str] = []
    steps: list[list[str]] = []

    def trained(config: Any, plan: Any, host: bool) -> SimpleNamespace:
        assert host  # as a loader gives them
        steps.append([])

        def step() -> None:
            steps[-1].append(modes[-1] if modes else "default")
            if len(steps[-1]) == at:
                raise RuntimeError("called a synchronizing CUDA operation")

        return SimpleNamespace(config=config, make_step=step)

    monkeypatch.setattr(gpu, "Trained", trained)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = gpu.syncs(replace(CONFIG, device="cuda"), tmp_path)
    assert set(found) == {"plain", "dropout", "clipping", "micro-batches"}
    assert modes == ["error", "default"] * 4 and modes[-1] == "default"
    assert steps[0] == ["default"] * 2 + ["error"] * ((at or 6) - 2)
    for place in found.values():
        assert place == "silent" if at is None else "raise RuntimeError" in place and "synchronizing" in place


# ------------------------------------------------------------------ where the time goes


def test_kernels_are_split_by_name_and_by_what_launched_them() -> None:
    lines = {"fnshard 0 forward root cast": 0.0, "fnshard 1 forward root run": 100.0,
             "fnshard 2 update root update": 200.0}  # fmt: skip
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 50.0}
        for name, ts in lines.items()
    ]
    kernels = [
        ("Memcpy DtoD", 0.0, 1000.0, 20.0),
        ("nvjet_tst_256x128", 100.0, 1020.0, 300.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 110.0, 1320.0, 100.0),
        ("triton_poi_fused_silu", 120.0, 1430.0, 60.0),  # 10 us after the one before it
        ("triton_for_fused_adamw", 200.0, 1490.0, 40.0),
        ("fill", 170.0, 1530.0, 5.0),  # launched between instructions
    ]
    for number, (name, launched, ts, dur) in enumerate(kernels):
        args = {"correlation": number}
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1.0, "args": args}
        )
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args})
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "synchronize", "ts": 210.0, "dur": 1.0})
    events.append({"ph": "X", "cat": "kernel", "name": "unknown", "ts": 1535.0, "dur": 5.0})
    assert split(events, 1) == pytest.approx({
        "products": 0.3, "attention": 0.1, "elementwise": 0.06, "update": 0.04, "casts": 0.02,
        "communication": 0.0, "other": 0.01, "idle": 0.01,
    })  # fmt: skip
    with pytest.raises(ValueError, match="no instruction"):
        split(events[3:], 1)


# ------------------------------------------------------------------ the table


def test_the_readme_shows_the_rows_with_a_target_and_empty_cells() -> None:
    text = (ROOT / "experiments" / "bench" / "README.md").read_text(encoding="utf-8")
    head, *rows = ["| " + " | ".join(row) + " |" for row in gpu.table({}) if row[-1]]
    assert "\n".join([head, "|---|---|---|---|", *rows]) in text


def test_the_table_compares_parts() -> None:
    row = {"a step": ["100 ms", "MFU 50.0%"], "tokens_per_s": 8e4, "peak_bytes": 2e10}
    other = {"a step": [], "tokens_per_s": 7.5e4, "peak_bytes": 2.5e10}
    rows = gpu.table({
        "bench-2-full_shard": row, "bench-2-fsdp2_compiled": other,
        "syncs": {"plain": "silent"}, "predictions": {"peak bytes": 0.98},
    })  # fmt: skip
    shown = {(part, what): value for part, what, value, _ in rows}
    assert shown["bench-2-full_shard", "a step"] == "100 ms, MFU 50.0%"
    assert shown["bench-2", "full_shard's tokens_per_s / fsdp2_compiled's"] == "1.067"
    assert shown["bench-2", "full_shard's peak_bytes / fsdp2_compiled's"] == "0.8"
    assert (shown["syncs", "plain"], shown["syncs", "dropout"]) == ("silent", "")
    assert shown["predictions", "peak bytes"] == "0.98"
