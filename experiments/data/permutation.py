"""An epoch's order: a permutation of any number of samples, computed where it is needed, never stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 8


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 .. count - 1, chosen by seed and epoch.

    A Feistel network on the least even number of bits that holds `count`; what falls outside walks on along
    its cycle until it is inside (Black and Rogaway, 2002), at most four steps in the mean.

    >>> sorted(Permutation(5, seed=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    count: int
    seed: int
    epoch: int = 0

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Which sample stands at each of `places`; int64."""
        half = max(2, ((self.count - 1).bit_length() + 1) // 2)
        keys = np.random.SeedSequence((self.seed, self.epoch)).generate_state(ROUNDS, np.uint64)
        values = _network(places.astype(np.uint64), half, keys)
        outside = values >= self.count
        while outside.any():
            values[outside] = _network(values[outside], half, keys)
            outside = values >= self.count
        return values.astype(np.int64)


def order(count: int, seed: int, start: int, stop: int) -> np.ndarray:
    """Samples number `start` to `stop` of the endless stream of epochs, each permuted anew; int64.

    >>> order(3, 0, 0, 7).size, sorted(order(3, 0, 3, 6).tolist())
    (7, [0, 1, 2])
    """
    pieces = [np.empty(0, np.int64)]
    while start < stop:
        epoch, place = divmod(start, count)
        many = min(stop - start, count - place)
        pieces.append(Permutation(count, seed, epoch)(np.arange(place, place + many)))
        start += many
    return np.concatenate(pieces)


def _network(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of a value changes half of the result's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
