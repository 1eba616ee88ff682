"""Predicted against measured step times on this machine's CPU.

    python -m experiments.predict --rounds 7

Writes `predict.json`, `predict.png` and a timeline of each plan below the output folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.configs.checks import count
from experiments.predict.plans import PLANS
from experiments.ranks import start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: what other processes took is left out"
    )
    parser.add_argument("--plans", nargs="*", default=[], choices=[p.name for p in PLANS], metavar="PLAN")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "predict")
    args = parser.parse_args()
    folder = args.out.resolve()
    values = {"folder": str(folder), "rounds": args.rounds, "backend": args.backend}
    values |= {"clock": args.clock, "names": args.plans}
    start("experiments.predict.rank", values, folder, args.ranks)


if __name__ == "__main__":
    main()
