"""What a process remembers of lowering: equal kernels are differentiated once for all of its tests, and a
function of the same shapes is traced once for all layouts.

They are most of what lowering a small step costs, and two steps of one program differ in nothing else.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from fnshard.compiler import lower
from fnshard.compiler.frontend.trace import flatten_batch
from fnshard.compiler.kernels import differentiate as module

MOST_TRACES = 64
_plain, _plain_trace = module.differentiate, lower.trace
_known: dict[Any, Any] = {}
_traces: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()


def remember_kernels() -> None:
    """In this process, from now on."""
    module.differentiate, lower.trace = _remembered, _traced


@contextmanager
def no_kernels() -> Iterator[None]:
    """Forget them for a block of code, which changes how they are made."""
    with mock.patch.dict(_known, clear=True), mock.patch.dict(_traces, clear=True):
        yield


def _remembered(source: Any, name: str, **how: Any) -> Any:
    key = (source.key, *sorted(how.items()))
    if key not in _known:
        _known[key] = _plain(source, name, **how)
    return replace(_known[key], name=name)


def _environment() -> list[tuple[str, str]]:
    """What a function may read, and a guard does not compare; but the name of the test."""
    return sorted(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")


def _traced(fn: Any, shapes: Any, structure: Any, specs: Any, batch: Any, **how: Any) -> Any:
    """The program of the same function (not an equal one) on the same shapes, while its guard holds."""
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
