"""What tests remember of optimizers: those that are equal share what a compiler finds out about them.

An optimizer traces and places its update once for each family of leaves. Tests make many optimizers of the
same numbers, and each would do it again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Hashable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from fnshard.optim.optimizer import Optimizer

MOST_OPTIMIZERS = 256
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_known: OrderedDict[Hashable, dict[Hashable, Any]] = OrderedDict()


def share_updates() -> None:
    """Let equal optimizers of this process share their traces from now on."""
    shared = functools.cached_property(_find_traces)
    shared.__set_name__(Optimizer, "traces")
    Optimizer.traces = shared


def _find_traces(optimizer: Optimizer) -> dict[Hashable, Any]:
    parts = optimizer.name, optimizer.init, optimizer.update, optimizer.rules, optimizer.choose
    key = torch.get_default_dtype(), *(content_of(part) for part in parts)
    traces = _known.setdefault(key, {})
    _known.move_to_end(key)
    if len(_known) > MOST_OPTIMIZERS:
        _known.popitem(last=False)
    return traces


@dataclasses.dataclass(frozen=True)
class Itself:
    """An object that equals no other one: what may change, or is of an unknown kind."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def content_of(thing: Any, within: tuple[Any, ...] = ()) -> Hashable:
    """Return a key that two things share if they are the same functions of the same values.

    >>> make = lambda factor: lambda x: x * factor
    >>> content_of(make(2)) == content_of(make(2)), content_of(make(2)) == content_of(make(2.0))
    (True, False)
    >>> content_of([]) == content_of([])
    False
    """
    if isinstance(thing, VALUES):
        return type(thing), repr(thing)
    for depth, outer in enumerate(within):
        if thing is outer:  # a function that calls itself
            return "within", depth
    inner = (*within, thing)
    if isinstance(thing, tuple):
        return type(thing), *(content_of(each, inner) for each in thing)
    if isinstance(thing, MethodType):
        return "method", content_of(thing.__func__, inner), content_of(thing.__self__, inner)
    if isinstance(thing, FunctionType):
        cells = tuple(_content_of_cell(cell, inner) for cell in thing.__closure__ or ())
        defaults = content_of((thing.__defaults__, *(thing.__kwdefaults__ or {}).items()), inner)
        read = {
            name: thing.__globals__[name] for name in _names_in(thing.__code__) if name in thing.__globals__
        }
        return thing.__code__, *cells, defaults, *((name, Itself(value)) for name, value in read.items())
    if isinstance(thing, functools._lru_cache_wrapper):
        return "cached", content_of(thing.__wrapped__, inner)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = (getattr(thing, field.name) for field in dataclasses.fields(thing))
        return type(thing), *(content_of(field, inner) for field in fields)
    # What may change equals not even itself later; a module's constants are taken to be constant.
    return Itself(object() if isinstance(thing, dict | list | set | bytearray | torch.Tensor) else thing)


def _content_of_cell(cell: Any, within: tuple[Any, ...]) -> Hashable:
    try:
        return content_of(cell.cell_contents, within)
    except ValueError:  # it is empty
        return Itself(cell)


def _names_in(code: CodeType) -> list[str]:
    """Return the names that a function, and those that it defines, may look up among globals."""
    inner = (name for const in code.co_consts if isinstance(const, CodeType) for name in _names_in(const))
    return sorted({*code.co_names, *inner})
