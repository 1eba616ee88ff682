"""The core's tests on other versions of torch: `python tests/versions.py 2.11.0 2.14.1`, by hand.

Each version gets a virtual environment of its own in the user's cache, kept for the next time: 6 GB, as PyPI
has builds for CUDA, which run without a GPU what builds for CPUs run. What follows `--` is pytest's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fnshard", "versions")
FOLDERS = ["compiler", "losses", "optim", "runtime", "step"]
NEEDED = ["numpy", "optree", "safetensors", "einops", "attrs", "transformers", "hypothesis"]
NEEDED += ["hydra-core", "pydantic", "pytest", "pytest-timeout", "pytest-xdist"]


def environment(version: str) -> Path:
    """Return the Python of an environment with this torch, which is made if it is missing."""
    python = CACHE / version / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", CACHE / version], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={version}", *NEEDED], check=True)
    return python


def main(arguments: list[str]) -> int:
    versions, options = arguments, [str(Path("tests", folder)) for folder in FOLDERS]
    if "--" in arguments:
        at = arguments.index("--")
        versions, options = arguments[:at], arguments[at + 1 :]
    failed = 0
    for version in versions:
        command = [environment(version), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        run = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        failed += run.returncode != 0
        print(
            version,
            *re.findall(r"(?m)^(?:FAILED|ERROR) \S+", run.stdout),
            run.stdout.splitlines()[-1],
            sep="\n  ",
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
