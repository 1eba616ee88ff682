"""The parts in their order; each runs in a process of its own: `python -m experiments.gpu.parts job.json`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.bench import measure
from experiments.bench.contenders import GRAPH
from experiments.bench.report import summarise
from experiments.data.files import write_json
from experiments.gpu import checks
from experiments.gpu.setup import GpuSetup, join
from experiments.gpu.split import profile
from fnshard.mesh.process_group import leave_group

LIMIT = "limit"  # of the bench: the whole model under `torch.compile`
CONTENDERS = ("full_shard", "fsdp2_compiled", LIMIT, GRAPH, "shard_grad_op", "fsdp2", "ddp")
ROWS = (2, 8)


@dataclass(frozen=True)
class GpuPart:
    """Something that is measured in a process of its own.

    Args:
        about: what it is, one line.
        run: gives plain values; the folder is for what is larger.
        gpu: whether a CPU has nothing of the kind.
        env: of its process.
    """

    about: str
    run: Callable[[GpuSetup, Path], Mapping[str, Any]]
    gpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def bench(contender: str, rows: int, setup: GpuSetup, folder: Path) -> Mapping[str, Any]:
    """One contender's row of the bench's table: samples of several steps, the first step, bytes."""
    config = replace(setup.bench(), contenders=(contender,), rows=rows, losses=0, memory=1, phases=False)
    measured = measure.run(config, lambda line: print(line, flush=True))
    return summarise(config, measured)["contenders"][contender]


def _plain(run: Callable[[GpuSetup], Mapping[str, Any]]) -> Callable[[GpuSetup, Path], Mapping[str, Any]]:
    return lambda setup, folder: run(setup)


PARTS: dict[str, GpuPart] = {
    "versions": GpuPart("versions and the device", _plain(checks.versions)),
    "tiny": GpuPart("five compiled steps of the smallest model", _plain(checks.tiny)),
    "tests": GpuPart("pytest -m gpu", _plain(checks.tests), gpu=True),
    "syncs": GpuPart("steps 3 to 6 with waits for the device forbidden", _plain(checks.syncs)),
    "profile": GpuPart("a step by kind of work", lambda setup, folder: profile(setup, folder / "trace.json")),
    **{
        f"bench-{rows}-{name}": GpuPart(
            f"{name}, {rows} rows", functools.partial(bench, name, rows), gpu=name == GRAPH
        )
        for rows in ROWS
        for name in CONTENDERS
    },
    "predictions": GpuPart("bytes and seconds, predicted and measured", _plain(checks.predictions)),
    "cudnn": GpuPart(
        "full_shard with cuDNN's attention behind the others",
        functools.partial(bench, "full_shard", ROWS[0]),
        gpu=True,
        env={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
    ),
    "equal_bits": GpuPart("two equal runs, bit for bit", _plain(checks.equal_bits)),
    "saves": GpuPart("what a save in the background takes", _plain(checks.saves)),
    "core": GpuPart("the core's tests, the GPU hidden", _plain(checks.core), gpu=True),
}


def work(part: str, setup: GpuSetup, folder: Path) -> dict[str, Any]:
    """What the part finds, and how it was set up."""
    join(setup.device)
    try:
        return {"setup": vars(setup), "found": dict(PARTS[part].run(setup, folder))}
    finally:
        leave_group()


def main(job: Path) -> None:
    """Run the part that a job file names, and write its result."""
    values = json.loads(job.read_text(encoding="utf-8"))
    result = Path(values["result"])
    found = work(values["part"], GpuSetup(**values["setup"]), result.parent)
    write_json(result, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
