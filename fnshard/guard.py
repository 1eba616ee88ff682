"""Guard: the values beside its arguments that `fn` read when it was traced; a program holds for these alone.

A trace bakes in what it reads: a number in a closure, an attribute, `model.training`. The guard of a program
compares them, as `torch.compile` does, and a step traces anew for others.
"""

from __future__ import annotations

import cProfile
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fnshard.reachable import ABSENT, Container, Reachable, lookup
from fnshard.tree import is_constant, is_same

LONG_TABLE = 1000  # longer lists and dicts are data: only their length is compared
_CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, partial)
_LENGTH = object()  # the key of a container's length, or of a set's elements
_REGISTRIES = ("_modules", "_buffers")  # dicts of a module: it never replaces them


class Entry(NamedTuple):
    """One value: `owner[key]`, or what `owner` has under that name. `entered`: it holds other entries."""

    owner: Any
    key: Any
    value: Any
    name: str
    entered: bool

    def now(self, owner: Any) -> Any:
        """What an owner in the place of this one holds now."""
        return _size(owner, owner) if self.key is _LENGTH else lookup(owner, self.key)


class Guard:
    """The values that one program has baked in."""

    def __init__(self, entries: Iterable[Entry] = ()):
        self.entries = tuple(entries)
        compared = [e for e in self.entries if e.key not in _REGISTRIES]
        in_dicts = [e for e in compared if isinstance(e.owner, dict) and e.key is not _LENGTH]
        self._in_dicts = tuple(zip(*((e.owner, e.key, e.value) for e in in_dicts), strict=True))
        self._others = [e for e in compared if not isinstance(e.owner, dict) or e.key is _LENGTH]

    def holds(self) -> bool:
        """Whether all values are what they were. Made for every step: two lookups and `is` for each."""
        if self._in_dicts:
            owners, keys, values = self._in_dicts
            if not all(map(is_, map(dict.get, owners, keys, repeat(ABSENT)), values)):
                return not self.changes()
        return all(is_same(e.value, e.now(e.owner)) for e in self._others) or not self.changes()

    def changes(self) -> list[tuple[str, Any, Any]]:
        """(name, before, now) of all that changed; an object rebound is compared by what it holds."""
        rebound: dict[int, Any] = {}
        changed = []
        for entry in self.entries:
            now = entry.now(rebound.get(id(entry.owner), entry.owner))
            if is_same(entry.value, now):
                continue
            if entry.entered and type(now) is type(entry.value) and not _is_blank(now):
                rebound[id(entry.value)] = now
                if hasattr(now, "__dict__"):
                    rebound[id(vars(entry.value))] = vars(now)
            else:
                changed.append((entry.name, entry.value, now))
        return changed


def guard_of(fn: Any, executed: set[CodeType], before: Reachable) -> Guard:
    """The guard of a program, made right after its trace.

    Args:
        executed: the code that ran; empty where nobody knows, and all code counts that `fn` can reach.
        before: what `fn` could reach before it ran; what it has written there itself is its own.
    """
    reached = Reachable(fn, code=True, mentioned=True, executed=executed or None)
    entries = []
    for container in reached.containers.values():
        known = before.containers.get(id(container.owner))
        owner = vars(container.owner) if isinstance(container.owner, ModuleType) else container.owner
        if known is not None:
            entries += [
                Entry(owner, key, value, _name(reached, container.owner, key), entered)
                for key, value, entered in _values(container, reached)
                if _before(known, key) is value or (key is _LENGTH and _before(known, key) == value)
            ]
    return Guard(entries)


@contextmanager
def recorded() -> Iterator[set[CodeType]]:
    """The code of the Python functions called inside; empty where a profiler runs already."""
    codes: set[CodeType] = set()
    if sys.getprofile() is not None:
        yield codes
        return
    profiler = cProfile.Profile(builtins=False)
    try:
        profiler.enable(subcalls=False, builtins=False)
    except ValueError:  # another tool profiles (Python 3.12 tells so this way)
        yield codes
        return
    try:
        yield codes
    finally:
        profiler.disable()
        codes.update(e.code for e in profiler.getstats() if isinstance(e.code, CodeType))


# ------------------------------------------------------------------ what counts


def _values(container: Container, reached: Reachable) -> Iterator[tuple[Any, Any, bool]]:
    """(key, value, whether it is entered) of what a container holds and a program depends on."""
    owner, values = container.owner, container.before
    holder, role = reached.parents.get(id(owner), (None, None))  # of an object's own dict: (object, None)
    plain = container.only is None and type(owner) is not CellType
    if plain and role not in _REGISTRIES and not (holder is not None and role is None):
        named = {k: v for k, v in values.items() if k in reached.names} if isinstance(owner, dict) else {}
        if not named:  # else the code picks its keys, and others are none of its business
            yield _LENGTH, _size(owner, values.values()), False
            if len(values) > LONG_TABLE or isinstance(owner, set):
                return
        values = named or values
    # Who replaces functions of modules and classes is not heard; those that are values are.
    namespace = isinstance(owner, type | ModuleType) or (container.only is not None and holder is None)
    for key, value in values.items():
        if isinstance(value, ModuleType | CellType) or (namespace and isinstance(value, (type, *_CALLABLE))):
            continue
        whole = isinstance(value, (Tensor, np.ndarray, type, *_CALLABLE)) or is_constant(value)
        entered = not whole and (
            id(value) in reached.containers or id(getattr(value, "__dict__", None)) in reached.containers
        )
        if whole or entered:
            yield key, value, entered
    if isinstance(owner, dict) and role is None and holder is not None:
        yield from ((key, ABSENT, False) for key in _class_defaults(holder, owner, reached))


def _class_defaults(each: Any, own: dict[str, Any], reached: Reachable) -> Iterator[str]:
    """Attributes that the object's class has, and the object may hide."""
    for kind in type(each).__mro__:
        container = reached.containers.get(id(kind))
        for key, value in container.before.items() if container else ():
            if key not in own and not key.startswith("__") and is_constant(value):
                yield key


def _is_blank(each: Any) -> bool:
    """Whether nothing can be compared in an object but its identity, as in a sentinel."""
    return hasattr(each, "__dict__") and not vars(each) and not hasattr(type(each), "__len__")


def _before(known: Container, key: Any) -> Any:
    if key is _LENGTH:
        return _size(known.owner, known.before.values())
    return known.before.get(key, ABSENT)


def _size(owner: Any, values: Collection[Any]) -> Any:
    """What a program knows of a container as a whole: its length; of a set of constants, these."""
    return frozenset(values) if isinstance(owner, set) and all(map(is_constant, values)) else len(values)


def _name(reached: Reachable, owner: Any, key: Any) -> str:
    """As the user's code says it: `beta`, `cfg['beta']`, `model.blocks.0.drop.p`, `len(tables)`."""
    if key is _LENGTH:
        return f"len({_path(reached, owner)})"
    if isinstance(owner, CellType):
        return str(reached.parents[id(owner)][1])
    if isinstance(owner, type | ModuleType):
        return f"{owner.__name__}.{key}"
    holder, role = reached.parents.get(id(owner), (None, None))
    if holder is None:
        return str(key)
    if role is None or role in _REGISTRIES or not isinstance(owner, dict | list | deque | tuple):
        return f"{_path(reached, owner)}.{key}"
    return f"{_path(reached, owner)}[{key!r}]"


def _path(reached: Reachable, each: Any) -> str:
    """Where an object was found; of the dict of its attributes or submodules, the object itself."""
    holder, role = reached.parents.get(id(each), (None, None))
    if holder is None:
        return getattr(each, "__name__", "fn")
    if isinstance(holder, MethodType):
        return "self"
    if isinstance(each, dict) and role is None:
        return _path(reached, holder)
    if role in _REGISTRIES:
        return _path(reached, holder)
    return _name(reached, holder, role)
