"""The core suite on other versions of torch: `python tests/versions.py 2.11.0 2.12.1`, by hand.

Each version gets a virtual environment of its own, which is kept for the next time. What PyPI has for Linux
are builds for CUDA, of 5 GB each with their libraries; without a GPU they run what the CPU builds run.

    --into FOLDER   where the environments lie; default the user's cache
    --files NAME... test files without `test_` and `.py`; default the core's
    --only TEXT     what pytest takes for -k
    --long          the long tests, too
    --wheels FOLDER more wheels for pip, for a version that was downloaded before
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CORE = ["trace", "trace_values", "trace_programs", "differentiate", "remat", "step", "schedule", "verify"]
NEEDED = ["numpy", "optree", "safetensors", "einops", "pytest", "pytest-timeout", "hypothesis"]
INTO = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fnshard" / "versions"


def environment(version: str, into: Path, wheels: str | None = None) -> Path:
    """The Python of an environment with this torch; made, or completed, where something is not there."""
    python = into / version / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", into / version], check=True)
    modules = ", ".join(name.replace("-", "_") for name in ["torch", *NEEDED])
    probe = f"import {modules}; print(torch.__version__)"
    found = subprocess.run([python, "-c", probe], capture_output=True)
    if not found.stdout.startswith(version.encode()):
        more = ["--find-links", wheels] if wheels else []
        command = [python, "-m", "pip", "install", "--quiet", *more, f"torch=={version}", *NEEDED]
        subprocess.run(command, check=True)
    return python


def suite(python: Path, files: list[str], only: str = "", long: bool = False) -> tuple[str, list[str]]:
    """Run the files on that Python: pytest's last line, and who failed."""
    marks = "" if long else " -m 'not long'"
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
        "-o", f"addopts=-p no:logging{marks}",
        *(next(HERE.rglob(f"test_{name}.py")) for name in files), "-k", only,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}:{HERE / 'support'}", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=HERE.parent, env=env, stdout=subprocess.PIPE, text=True).stdout
    (python.parents[1] / "pytest.log").write_text(out)
    summary = (out.strip().splitlines() or ["pytest has not begun"])[-1]
    return summary, re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--into", type=Path, default=INTO)
    parser.add_argument("--files", nargs="+", default=CORE)
    parser.add_argument("--only", default="")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--wheels")
    args = parser.parse_args()
    if unknown := [name for name in args.files if not any(HERE.rglob(f"test_{name}.py"))]:
        parser.error(f"--files {' '.join(unknown)}: names of test files, as in {' '.join(CORE[:3])}")
    failed = 0
    for version in args.versions:
        python = environment(version, args.into.resolve(), args.wheels)
        summary, names = suite(python, args.files, args.only, args.long)
        failed += bool(names) or " passed" not in summary
        print(
            f"{version:10} {summary.strip('= ')}",
            *(f"           {name}" for name in names),
            sep="\n",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
