"""What tests remember of lowering: a function of the same shapes is traced once a process for all layouts.

Kernels are the library's to remember (`fnshard.compiler.kernels.store`); processes of a run share a folder.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fnshard.compiler import lower
from fnshard.compiler.frontend.trace import flatten_batch

MOST_TRACES = 64
_plain_trace = lower.trace
_traces: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()


def remember_traces() -> None:
    """Remember traces in this process, from now on."""
    lower.trace = _trace_once


@contextmanager
def no_kernels() -> Iterator[None]:
    """Make all anew in a block of code, which changes how kernels are made."""
    with mock.patch.dict(_traces, clear=True), mock.patch.dict(os.environ, FNSHARD_CACHE="off"):
        yield


def _environment() -> list[tuple[str, str]]:
    """Return what a function may read and no guard compares: the environment but for the test's name."""
    return sorted(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")


def _trace_once(fn: Any, shapes: Any, structure: Any, specs: Any, batch: Any, **how: Any) -> Any:
    """Return the program of this very function on these shapes; it is traced anew if its guard fails."""
    named, batch_structure = flatten_batch(batch)
    parts = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else (type(v), v) for v in named.values()]
    trainable = [bool(specs[path].trainable) for path in shapes]
    key = (id(fn), *shapes.items(), structure, *trainable, *named, *parts, batch_structure,
           torch.get_default_dtype(), *sorted(how.items()), *_environment())  # fmt: skip
    try:
        of, program = _traces.pop(key, (None, None))
    except TypeError:  # a constant that has no hash
        return _plain_trace(fn, shapes, structure, specs, batch, **how)
    if of is not fn or not program.guard.holds():
        program = _plain_trace(fn, shapes, structure, specs, batch, **how)
    _traces[key] = fn, program
    if len(_traces) > MOST_TRACES:
        _traces.popitem(last=False)
    return program
