"""What a step on CPU ranks takes without each of its copies: `python tests/ablations.py dtype=bf16`, by hand.

Copies are left out one kind at a time, in interleaved rounds: what a step then saves bounds what any better
way to move these bytes could save. Losses mean nothing. Words are those of `python -m experiments.bench`. The
cores must be quiet. A round has a sample of each variant and of the limit.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.bench import ranks
from experiments.bench.config import BenchConfig, read
from experiments.bench.contenders import Setup, Training, batches, limit, make_task, repeat_step
from experiments.bench.measure import barrier, interleave, rank
from fnshard.analysis.tables import columns
from fnshard.launcher.local import launch
from fnshard.launcher.rank import run_rank
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.packing import Packer

VARIANTS = {
    "as it is": (),
    "no copy into gathered leaves": ("write_blocks",),
    "no packing of gradients": ("pack_for_peer",),
    "no sum with the peer's": ("add_to_own",),
    "none of these three": ("write_blocks", "pack_for_peer", "add_to_own"),
    "no update": ("update",),
}
LEFT_OUT: set[str] = set()
MOVED: Counter[str] = Counter()  # bytes read and written, by what moves them


def make_optional(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a copy out where `LEFT_OUT` says so, and count its bytes where it is made."""

    def call(self: Packer, *args: Any) -> Any:
        if name in LEFT_OUT:
            return None
        sides = bytes_of(args[-1]) if name != "add_to_own" else 2 * bytes_of(args[-1])
        MOVED[name] += sides + self.bucket.numel * itemsize_of(args[0])
        return original(self, *args)

    return call


def bytes_of(value: Any) -> int:
    """Return the bytes of a row, or of this rank's half of whole leaves."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(leaf.nbytes for leaf in value) // 2


def itemsize_of(blocks: dict[str, Tensor]) -> int:
    return next(iter(blocks.values())).itemsize


def make_update_optional(bind: Callable[..., Any]) -> Callable[..., Any]:
    def bound(self: Updater, *args: Any) -> Callable[..., Any]:
        update = bind(self, *args)
        return lambda *values: {} if "update" in LEFT_OUT else update(*values)

    return bound


@contextmanager
def leave_out(names: Sequence[str]) -> Iterator[None]:
    LEFT_OUT.update(names)
    try:
        yield
    finally:
        LEFT_OUT.clear()


def main(config: BenchConfig) -> None:
    """Run one rank; the first prints the table."""
    ranks.join(config)
    torch.set_flush_denormal(True)
    for name in ("write_blocks", "pack_for_peer", "add_to_own"):
        setattr(Packer, name, make_optional(name, getattr(Packer, name)))
    Updater.bind = make_update_optional(Updater.bind)
    task = make_task(config)
    feed = list(batches(task, 4))
    works: dict[str, Callable[[], Any]] = {"limit": repeat_step(limit(task), feed)}
    for name, without in VARIANTS.items():
        step = repeat_step(Training(task, Setup()), feed)
        step()
        works[name] = partial(run_without, step, without)
    for work in works.values():
        work()
        work()
    MOVED.clear()
    works["as it is"]()
    moved = dict(MOVED)
    seconds = interleave(works, config.rounds, steps=config.steps)
    if rank() == 0:
        rows = [["", "step ms", "saves ms", "MB moved", "GB/s"]]
        for name, own in seconds.items():
            saved = median(a - b for a, b in zip(seconds["as it is"], own, strict=True))
            size = sum(moved.get(copy, 0) for copy in VARIANTS.get(name, ()))
            rate = f"{size / saved / 1e9:.1f}" if size and saved > 0 else ""
            cells = [f"{1e3 * median(own):.1f}", f"{1e3 * saved:.1f}", f"{size / 1e6:.0f}" if size else ""]
            rows.append([name, *cells, rate])
        print("\n".join(columns(rows)), flush=True)
    barrier()


def run_without(step: Callable[[], Any], names: Sequence[str]) -> None:
    with leave_out(names):
        step()


if __name__ == "__main__":
    own = read(sys.argv[1:])
    if "RANK" in os.environ:
        run_rank(lambda: main(own), device_type="cpu", timeout_s=ranks.TIMEOUT_S)
    else:
        command = [sys.executable, "-u", __file__, *own.words()]
        launch(command, ranks=own.ranks, logs=Path("outputs", "ablations"), env=ranks.environment(own))
