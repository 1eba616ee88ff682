"""Batches without end. The global batch is the same on any mesh, and a run resumes on any other mesh, at any
step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import fnshard as fs

ROUNDS = 8  # rounds of the network that permutes an epoch


class Source(Protocol):
    """Rows by number: `Windows` of a stream of tokens, or `Samples` of records.

    Args:
        count: the rows in an epoch.
        key: everything that they depend on, in JSON's values.
    """

    count: int
    key: Mapping[str, Any]

    def batch(self, numbers: np.ndarray) -> tuple[Any, ...]:
        """Return the rows of these numbers, as arguments of a step."""


@dataclass
class Loader:
    """An iterator over batches, epoch after epoch, each in an order of its own.

    The global batch of step s depends on (seed, s) alone, and each rank takes an equal part of its rows. So
    1, 2 or 4 ranks see the same batches, and a resumed run sees those of an uninterrupted one. No batch is
    partial: rows of the next epoch fill the last batch of an epoch.

    Args:
        source: the rows.
        rows: the rows of the *global* batch, a multiple of `ranks`.
        seed: the seed of the orders.
        rank, ranks: the number of this loader and the count of loaders along the mesh's data axes. They say
            which part of the rows it yields.
        repeat: the number of steps that get the same batch (`objective.updates`).
        step: the next step to yield; read only.

    Raises:
        ValueError: rows that do not divide over the ranks.
    """

    source: Source
    rows: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    repeat: int = 1
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % self.ranks:
            raise ValueError(f"{self.rows} rows do not divide over {self.ranks} ranks.")

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def __next__(self) -> tuple[Any, ...]:
        part = self.rows // self.ranks
        # Rows are numbered without end, epoch after epoch, and batches take them one after the other.
        first = self.step // self.repeat * self.rows + self.rank * part
        batch = self.source.batch(order(self.source.count, self.seed, first, first + part))
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader in JSON's values, from which it resumes on any mesh."""
        repeat = {"repeat": self.repeat} if self.repeat > 1 else {}
        return {**self.source.key, "seed": self.seed, "rows": self.rows, **repeat, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the step at which `state_dict` was taken.

        Raises:
            ValueError: it is the state of a loader that drew other batches.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a loader's state is a mapping, not a {type(state).__name__}.")
        # A state says how often a batch is repeated only if it is.
        mine, state = {"repeat": 1, **self.state_dict()}, {"repeat": 1, **state}
        if set(state) != set(mine):
            raise ValueError(f"a loader's state has the keys {sorted(mine)}; got {sorted(state)}.")
        # All but the step has to be equal, since the batches depend on it.
        differ = {
            k: f"{k}: saved {state[k]}, here {v}" for k, v in mine.items() if k != "step" and state[k] != v
        }
        if "data" in differ:  # it is a digest, which says nothing to a reader
            differ["data"] = "data: its files, the tokenizer, or how it is cut are not what they were"
        if differ:
            raise ValueError(
                f"the saved loader drew other batches ({'; '.join(differ.values())}). Fix: put back what was "
                "changed, or begin anew with run.resume=never."
            )
        if type(state["step"]) is not int or state["step"] < 0:
            raise ValueError(f"a loader's step is a count, not {state['step']!r}.")
        self.step = state["step"]


def place_of(mesh: fs.Mesh) -> dict[str, int]:
    """Return `rank` and `ranks` of this rank's `Loader`. Ranks that differ along other than data axes load
    the same rows."""
    return {"rank": mesh.data_rank, "ranks": mesh.data_size}


# ------------------------------------------------------------------ orders


def order(count: int, seed: int, start: int, stop: int) -> np.ndarray:
    """Return the samples at places `start` to `stop` of an endless stream of epochs; int64.

    Each epoch has all `count` samples in an order of its own.

    >>> order(3, 0, 0, 7).size, sorted(order(3, 0, 3, 6).tolist())
    (7, [0, 1, 2])
    """
    pieces = [np.empty(0, np.int64)]
    while start < stop:
        # Take what is left of this epoch, or what is left of the request.
        epoch, place = divmod(start, count)
        taken = min(stop - start, count - place)
        pieces.append(permute(np.arange(place, place + taken), count, seed, epoch))
        start += taken
    return np.concatenate(pieces)


def permute(places: np.ndarray, count: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Find the sample at each of `places`, by a bijection of 0 .. count - 1 that is never stored; int64.

    The bijection is a Feistel network on the least even number of bits, at least four, that holds `count`. A
    value outside of the range is permuted again until it is inside ("cycle walking", Black and Rogaway,
    2002), which takes at most four passes on average if `count` is 4 or more.

    >>> sorted(permute(np.arange(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = max(2, ((count - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)
    values = _run_network(places.astype(np.uint64), half, keys)
    outside = values >= count
    while outside.any():
        values[outside] = _run_network(values[outside], half, keys)
        outside = values >= count
    return values.astype(np.int64)


def _run_network(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Run the Feistel network on values of two halves of `half` bits. Each round mixes one into the other."""
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ key) & mask)
    return (left << bits) | right


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Mix values by SplitMix64's finaliser, in which every bit of a value changes half of the result's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
