"""Batches without end: the same global one on any mesh, and exact resume at any step on any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import fnshard as fs
from experiments.data.permutation import order


class Source(Protocol):
    """Rows by number: `Windows` of a stream of tokens, `Samples` of records.

    `count`: rows in an epoch. `key`: what they depend on, in JSON's values.
    """

    count: int
    key: Mapping[str, Any]

    def batch(self, numbers: np.ndarray) -> tuple[Any, ...]:
        """These rows, as arguments of a step."""


@dataclass
class Loader:
    """`for batch in loader`, epoch after epoch, each in an order of its own.

    The global batch of step s depends on (seed, s) alone, and rank r takes its equal part of the rows: 1, 2
    or 4 ranks see the same batches, a resumed run those of an uninterrupted one. No batch is partial: where
    an epoch ends, the next one fills it.

    Args:
        source: the rows.
        rows: of the *global* batch; a multiple of `ranks`.
        seed: of the orders.
        rank, ranks: which part of the rows this loader yields: the place along the mesh's data axes.
        step: the next step to yield; read only.

    Raises:
        ValueError: rows that do not divide over the ranks.
    """

    source: Source
    rows: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % self.ranks:
            raise ValueError(f"{self.rows} rows do not divide over {self.ranks} ranks.")

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        part = self.rows // self.ranks
        first = self.step * self.rows + self.rank * part
        batch = self.source.batch(order(self.source.count, self.seed, first, first + part))
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in JSON's values; independent of the mesh, so another one can resume."""
        return {**self.source.key, "seed": self.seed, "rows": self.rows, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: by a loader that drew other batches.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"a loader's state has the keys {sorted(mine)}; got {sorted(state)}.")
        differ = {
            k: f"{k}: saved {state[k]}, here {v}" for k, v in mine.items() if k != "step" and state[k] != v
        }
        if "data" in differ:  # a key, which says nothing to a reader
            differ["data"] = "data: its files, the tokenizer, or how it is cut are not what they were"
        if differ:
            raise ValueError(
                f"the saved loader drew other batches ({'; '.join(differ.values())}). Fix: put back what was "
                "changed, or begin anew with run.resume=never."
            )
        self.step = int(state["step"])


def place_of(mesh: fs.Mesh) -> dict[str, int]:
    """Which part of a batch is this rank's; ranks that differ along other axes get the same."""
    return {"rank": mesh.data_rank, "ranks": mesh.data_size}
