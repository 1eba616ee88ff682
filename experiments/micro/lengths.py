"""What batches of many lengths cost: padded to buckets, beside as many tokens in one shape.

    python -m experiments.micro.lengths --lengths 32 --shortest 100 --longest 1000 --steps 1000

Rounds of mixed steps and of steps of one shape (the mean length) alternate on one rank. Prints how often was
compiled, and the time of mixed steps over that of as many tokens in one shape: of the steps alone, where
nothing is traced or compiled, and of all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import torch

import fnshard as fs
from experiments.configs.checks import count
from experiments.training.decoder import Decoder, DecoderConfig, loss_function

ROUND = 20  # steps
Backend = Literal["inductor", "eager"]


class Side:
    """A step and its state, its seconds, and those of steps that compile nothing."""

    def __init__(self, config: DecoderConfig, rows: int, shapes: fs.Buckets | None, backend: Backend):
        mesh = fs.make_mesh(shard=1, device="cpu")
        torch.manual_seed(0)
        loss, params = loss_function(Decoder(config))
        specs = fs.presets.full_shard(params, mesh)
        self.step = fs.shard_step(
            loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-4), shapes=shapes, backend=backend
        )
        self.state = self.step.init(params)
        self.rows, self.vocab, self.draw = rows, config.vocab, torch.Generator().manual_seed(0)
        self.seconds: list[float] = []
        self.warm: dict[int, list[float]] = {}
        self.known: set[int] = set()

    def run(self, length: int) -> None:
        tokens, targets = torch.randint(self.vocab, (2, self.rows, length), generator=self.draw).unbind()
        began = time.perf_counter()
        self.state, _ = self.step(self.state, tokens, targets)
        self.seconds.append(time.perf_counter() - began)
        if length in self.known:
            self.warm.setdefault(length, []).append(self.seconds[-1])
        self.known.add(length)

    def usual(self, lengths: Sequence[int]) -> float:
        """Seconds of these steps, each at the median of its length where that was run again."""
        medians = {n: statistics.median(s) for n, s in self.warm.items()}
        return sum(medians[n] for n in lengths if n in medians)


def measure(sides: Sequence[Side], lengths: Sequence[int], mean: int) -> None:
    mixed, one = sides
    for start in range(0, len(lengths), ROUND):
        for length in lengths[start : start + ROUND]:
            mixed.run(length)
        for _ in lengths[start : start + ROUND]:
            one.run(mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("lengths", 32), ("shortest", 100), ("longest", 1000), ("steps", 1000),
                          ("multiple", 64), ("rows", 2), ("width", 256), ("layers", 6)):  # fmt: skip
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()
    span, draw = args.longest - args.shortest, random.Random(0)
    choices = [args.shortest + span * i // max(args.lengths - 1, 1) for i in range(args.lengths)]
    lengths = [draw.choice(choices) for _ in range(args.steps)]
    mean = round(sum(lengths) / len(lengths))
    config = DecoderConfig(
        width=args.width, layers=args.layers, heads=8, kv_heads=4, context=2 * args.longest
    )
    buckets = fs.Buckets(args.multiple, pad={"0": 0, "1": fs.losses.IGNORE})
    sides = tuple(Side(config, args.rows, shapes, args.backend) for shapes in (buckets, None))
    with fs.debug.assert_max_compiles(10**6) as compiles:
        measure(sides, lengths, mean)
    mixed, one = sides
    padded = sum(-(-n // args.multiple) * args.multiple for n in lengths) / sum(lengths)
    print(f"{args.steps} steps, {args.lengths} lengths from {args.shortest} to {args.longest}:")
    print(f"padded to {padded:.3f} of the tokens, compiled {len(compiles) - 1} times")
    known = [n for n in lengths if n in mixed.warm]
    alone = mixed.usual(known) / (one.usual([mean]) * len(known)) if known else 1.0
    everything = [sum(side.seconds) for side in sides]
    print(f"time over that of one shape of {mean}: {alone:.3f}")
    print(f"with tracing and compiling: {everything[0]:.0f} s / {everything[1]:.0f} s")


if __name__ == "__main__":
    main()
