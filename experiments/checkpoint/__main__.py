"""What checkpoints cost on this machine, beside plain torch.distributed.checkpoint, and what a step pays.

    python -m experiments.checkpoint                       # both parts, 1 and 2 CPU ranks
    python -m experiments.checkpoint --part async --ranks 2 --steps 20

Writes `checkpoint-<ranks>.json` into the output folder. Checkpoints go to `--folder`, the disk that is meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from experiments.checkpoint.job import CheckpointJob
from experiments.configs.checks import count
from experiments.configs.decoders import names
from experiments.ranks import start
from fnshard.layout.presets import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="both", choices=("throughput", "async", "both"))
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="on the disk to be measured; default: below the output folder")
    parser.add_argument("--size", default=CheckpointJob.size, choices=names(), help="a file of conf/model")
    parser.add_argument("--preset", default=CheckpointJob.preset, choices=sorted(PRESETS))
    parser.add_argument("--backend", default=CheckpointJob.backend, choices=("inductor", "eager"))
    numbers = {"rounds": "of each", "steps": "of a window", "every": "steps a save", "rows": "of a rank"}
    for name, help_text in (numbers | {"length": "in tokens"}).items():
        parser.add_argument(f"--{name}", type=count, default=getattr(CheckpointJob, name), help=help_text)
    parser.add_argument("--out", type=Path, default=Path("outputs") / "checkpoint")
    args = vars(parser.parse_args())
    ranks, out, folder = args.pop("ranks"), args.pop("out").resolve(), args.pop("folder")
    out.mkdir(parents=True, exist_ok=True)
    for number in ranks:
        with tempfile.TemporaryDirectory(dir=folder or out) as place:
            values = {"job": dataclasses.asdict(CheckpointJob(folder=place, **args)), "out": str(out)}
            start("experiments.checkpoint.rank", values, out, number)


if __name__ == "__main__":
    main()
