"""Notice draws from random generators of Python and NumPy, whose numbers a trace would keep as constants."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
# The generators that functions of the modules draw from, such as random.random().
_SHARED = (("Python's random", random.random.__self__), ("numpy.random", np.random.random.__self__))


@contextmanager
def refuse_draws(error: Callable[[str], Exception], others: Sequence[Any] = ()) -> Iterator[None]:
    """Refuse a block that draws numbers from the generators of Python and NumPy, or from `others`.

    Draws from a generator that the block makes for itself, and from `os.urandom`, are not noticed.

    Args:
        error: makes the error that is raised, given the generator's name.
        others: further generators, of the types in `GENERATORS`.
    """
    named = [*_SHARED, *((f"a {type(g).__name__} that it closes over", g) for g in others)]
    states = [(name, generator, _read_state(generator)) for name, generator in named]
    yield
    for name, generator, state in states:
        if _read_state(generator) != state:
            raise error(name)


def _read_state(generator: Any) -> bytes:
    """Return a generator's state; b"" for one that reads the operating system's, and has none."""
    return b"" if isinstance(generator, random.SystemRandom) else pickle.dumps(generator)
