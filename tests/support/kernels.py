"""Kernels that a process remembers: equal code is differentiated once for all of its tests.

It is most of what lowering a small step costs, and two steps of one program differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from fnshard.compiler.kernels import differentiate as module

_plain = module.differentiate
_known: dict[Any, Any] = {}


def remember_kernels() -> None:
    """In this process, from now on."""
    module.differentiate = _remembered


@contextmanager
def no_kernels() -> Iterator[None]:
    """Forget them for a block of code, which changes how they are made."""
    with mock.patch.dict(_known, clear=True):
        yield


def _remembered(source: Any, name: str, **how: Any) -> Any:
    key = (source.key, *sorted(how.items()))
    if key not in _known:
        _known[key] = _plain(source, name, **how)
    return replace(_known[key], name=name)
