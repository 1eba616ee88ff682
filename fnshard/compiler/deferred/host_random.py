"""Random numbers of Python and NumPy, which a trace would keep as constants: who draws them, and whether."""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import dropwhile, takewhile
from typing import Any
from unittest import mock

import numpy as np

from fnshard.errors import TraceError, report

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
DRAWS = report(
    "`fn` draws random numbers by {name}, which a trace keeps as constants.",
    fix="draw with torch (torch.rand, F.dropout), which follows the state's seed and the step; or draw "
    "before the step and pass the numbers as tensors with the batch.",
)
# The generators that the modules' functions share.
_PYTHON, _NUMPY = random.random.__self__, np.random.random.__self__
_NO_DRAWS = ("getstate", "get_state")
_SHARED = {id(_PYTHON): "Python's random", id(_NUMPY): "numpy.random"}


def _draws() -> Iterator[tuple[Any, str, Callable[..., Any], str, Callable[..., bool]]]:
    """(owner, its attribute, the function, its name, whether a call with such arguments is one)."""
    for module, generator in ((random, _PYTHON), (np.random, _NUMPY)):
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is generator and name not in _NO_DRAWS:
                yield module, name, function, f"{module.__name__}.{name}", _always
    for name in ("random", "getrandbits"):  # the methods that were imported by their names draw by these
        yield _PYTHON, name, getattr(_PYTHON, name), "Python's random", _always
    # It seeds generators that have no seed (and a RandomState before it takes its own).
    name = "os.urandom (secrets, a RandomState, a generator without a seed)"
    for module, attribute in ((os, "urandom"), (random, "_urandom")):
        yield module, attribute, os.urandom, name, _by_users
    unseeded = lambda self, a=None, *_, **__: a is None and _by_users()  # noqa: E731
    yield random.Random, "seed", random.Random.seed, "a random.Random without a seed", unseeded


@contextmanager
def refused(error: Callable[[str], Exception], here: Callable[[], bool]) -> Iterator[None]:
    """In the block a draw from a generator that all share, or that has no seed, is an error.

    Args:
        error: made of the draw's name.
        here: whether a call is one of the block's own.
    """

    def instead(function: Callable[..., Any], name: str, when: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if here() and when(*args, **kwargs):
                raise error(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, attribute, function, name, when in _draws():
            stack.enter_context(mock.patch.object(owner, attribute, instead(function, name, when)))
        yield


def _always(*_: Any, **__: Any) -> bool:
    return True


def _by_users(*_: Any) -> bool:
    """Whether no library draws for itself, on the way from `fn`: a file's name, a module under import."""
    stack = traceback.walk_stack(sys._getframe())  # inside first
    packages = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in stack)
    callers = dropwhile("fnshard".__eq__, packages)
    return {"tempfile", "uuid", "importlib"}.isdisjoint(takewhile("fnshard".__ne__, callers))


@contextmanager
def undrawn(own: Sequence[Any]) -> Iterator[None]:
    """Refuse a block that has drawn from some generators of `GENERATORS`, or from those that all share.

    A loader on another thread may draw from the shared ones: they are compared where there is no other.

    Raises:
        TraceError: names the generator.
    """
    shared = (_PYTHON, _NUMPY) if threading.active_count() == 1 else ()
    known = [(g, _state(g)) for g in (*(g for g in own if id(g) not in _SHARED), *shared)]
    yield
    for generator, state in known:
        if _state(generator) != state:
            kind = type(generator).__name__
            raise TraceError(DRAWS.format(name=_SHARED.get(id(generator), f"a {kind} that it closes over")))


def _state(generator: Any) -> bytes:
    return b"" if isinstance(generator, random.SystemRandom) else pickle.dumps(generator)
