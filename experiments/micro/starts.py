"""What a start costs: seconds from the command to the first finished step, nothing saved and all saved.

    python -m experiments.micro.starts --rounds 5 --beside ../before

A round is, for each checkout, a run of `experiments.train` with a cache folder of its own and the same
command once more. Words behind `--` are overrides of the runs. Prints the seconds of both and their medians.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments import ROOT
from experiments.configs.checks import count

RUN = ("run.steps=40", "run.held_out_every=20", "run.sample_tokens=2")
FIRST_ROW, PROGRAMS = re.compile(r"step 1/"), re.compile(r"programs: .*")


def start(checkout: Path, folder: Path, overrides: list[str]) -> tuple[float, str]:
    """Seconds to the first row of metrics, and what it says of programs."""
    run = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-u", "-m", "experiments.train", *RUN, f"run.cache={folder / 'cache'}",
               f"hydra.run.dir={run}", *overrides]  # fmt: skip
    seconds, programs, text = None, "", []
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(checkout)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for line in process.stdout:
            text.append(line)
            if seconds is None and FIRST_ROW.match(line):
                seconds = time.perf_counter() - began
            programs = found[0] if (found := PROGRAMS.match(line)) else programs
    if process.returncode or seconds is None:
        raise SystemExit(f"{' '.join(command)} has failed:\n{''.join(text)}")
    return seconds, programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout, in turn")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    checkouts = [ROOT, *([args.beside.resolve()] if args.beside else [])]
    taken: dict[tuple[Path, str], list[float]] = {}
    for _ in range(args.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as folder:
                for which in ("first", "second"):
                    seconds, programs = start(checkout, Path(folder), args.overrides)
                    taken.setdefault((checkout, which), []).append(seconds)
                    print(f"{checkout.name}, {which} start: {seconds:.1f} s ({programs})", flush=True)
    for (checkout, which), seconds in taken.items():
        median, most = statistics.median(seconds), max(seconds)
        print(f"{checkout.name}, {which} start: median {median:.1f} s, longest {most:.1f} s")


if __name__ == "__main__":
    main()
