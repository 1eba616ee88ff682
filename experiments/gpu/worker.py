"""One part in a process of its own: `python -m experiments.gpu.worker job.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from experiments.gpu.parts import PARTS
from experiments.gpu.setup import GpuSetup, join
from fnshard.mesh.process_group import leave_group


def work(part: str, setup: GpuSetup, folder: Path) -> dict[str, Any]:
    """What the part finds, and how it was set up."""
    join(setup.device)
    try:
        return {"setup": vars(setup), "found": dict(PARTS[part].run(setup, folder))}
    finally:
        leave_group()


def main(job: Path) -> None:
    """Write the result beside its name, whole or not at all."""
    told = json.loads(job.read_text(encoding="utf-8"))
    result = Path(told["result"])
    found = work(told["part"], GpuSetup(**told["setup"]), result.parent)
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
