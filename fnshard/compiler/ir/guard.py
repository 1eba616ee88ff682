"""Guard: the values beside its arguments that `fn` read when it was traced; a program holds for these alone.

A trace bakes in what it reads: a number in a closure, an attribute, `model.training`. The guard of a program
compares them, as `torch.compile` does, and a step traces anew for others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, eq, is_
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fnshard.compiler.ir.reachable import ABSENT, LONG, Container, Reachable, is_plain, library, lookup
from fnshard.compiler.ir.recording import Ran
from fnshard.tree import is_constant, is_same

_CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, partial, property, staticmethod, classmethod)
LENGTH = object()  # the key of a container's length, of a set's elements, of the numbers in an array
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_REGISTRIES = ("_modules", "_buffers", "_parameters")  # dicts of a module: it never replaces them
_SMALL_bytes = 1 << 16  # larger arrays are data: to hash one of these takes 15 microseconds
_ENVIRON = type(os.environ)
_NOTHING = Ran()
_KNOWN_LENGTH, _KNOWN_LAST = attrgetter("length"), attrgetter("last")


@dataclass(eq=False)
class Absent:
    """The key of an entry whose value says which of these a dict has; it had them when it was so long, with
    this last key: a new one goes to the end, also where another has left."""

    keys: Collection[str]
    length: int
    last: Any

    def __repr__(self) -> str:
        return "absent"

    def of(self, owner: Any) -> frozenset[str]:
        """Those that it has."""
        return frozenset(filter(self.keys.__contains__, owner))


class Entry(NamedTuple):
    """One value: `owner[key]`, or what `owner` has under that name. `entered`: it holds other entries."""

    owner: Any
    key: Any
    value: Any
    name: str
    entered: bool

    def now(self, owner: Any) -> Any:
        """What an owner in the place of this one holds now."""
        if isinstance(self.key, Absent):
            found = self.key.of(owner)
            if found != self.value:
                return found
            if owner is self.owner:
                self.key.length, self.key.last = len(owner), _last(owner)  # lest all is compared each time
            return self.value
        return _size(owner, owner) if self.key is LENGTH else lookup(owner, self.key)

    def same(self) -> Callable[..., bool]:
        """What compares many such entries fast, of their owners, keys and values."""
        owner, is_size = self.owner, self.key is LENGTH
        if isinstance(self.key, Absent):
            return _same_keys
        if is_size:
            return _same_lengths if isinstance(self.value, int) else _same_sizes
        kinds = (
            (dict, _same_items), (list, _same_elements), (MappingProxyType, _same_members),
            (_ENVIRON, _same_variables),
        )  # fmt: skip
        others = _same_others if isinstance(owner, deque | ContextVar) else _same_attributes
        return next((same for kind, same in kinds if isinstance(owner, kind)), others)


def _same_items(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_, map(dict.get, owners, keys, repeat(ABSENT)), values))


def _same_members(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_, map(MappingProxyType.get, owners, keys, repeat(ABSENT)), values))


def _same_attributes(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_, map(getattr, owners, keys, repeat(ABSENT)), values))


def _same_elements(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_, map(list.__getitem__, owners, keys), values))


def _same_others(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_, map(lookup, owners, keys), values))


def _same_variables(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_same, map(lookup, owners, keys), values))


def _same_keys(owners: Any, keys: Any, values: Any) -> bool:
    last = map(next, map(dict.__reversed__, owners), repeat(ABSENT))
    same = map(is_, last, map(_KNOWN_LAST, keys))
    return all(map(eq, map(len, owners), map(_KNOWN_LENGTH, keys))) and all(same)


def _last(owner: dict[Any, Any]) -> Any:
    return next(dict.__reversed__(owner), ABSENT)


def _same_lengths(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(eq, map(len, owners), values))


def _same_sizes(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_same, map(_size, owners, owners), values))


class Guard:
    """The values that one program has baked in; `ran` is what its trace did."""

    def __init__(self, entries: Iterable[Entry] = (), ran: Ran = _NOTHING):
        self.entries, self.ran = tuple(entries), ran
        groups: dict[Callable[..., bool], list[Entry]] = {}
        for entry in self.entries:
            if entry.key not in _REGISTRIES and not isinstance(entry.owner, tuple):
                groups.setdefault(entry.same(), []).append(entry)
        self._groups = [
            (same, [tuple(getattr(e, part) for e in group) for part in ("owner", "key", "value")])
            for same, group in groups.items()
        ]
        self._by_owner: dict[int, list[Entry]] = {}
        for entry in self.entries:
            self._by_owner.setdefault(id(entry.owner), []).append(entry)

    def holds(self) -> bool:
        """Whether all values are what they were, at every step.

        Two lookups and `is` for each (20 microseconds for 300), and a hash of each small array; where one was
        rebound, if only to an equal, `changes` compares all again, which takes ten times as long.
        """
        try:
            return all(same(*parts) for same, parts in self._groups) or not self.changes()
        except (IndexError, ValueError):  # a list is shorter, a cell is empty
            return False

    def changes(self) -> list[tuple[str, Any, Any]]:
        """(name, before, now) of all that changed; an object rebound is compared by what it holds."""
        changed, compared = [], set[tuple[int, int]]()
        todo = deque((entries[0].owner, entries[0].owner) for entries in self._by_owner.values())
        while todo:
            before, owner = todo.popleft()
            if (id(before), id(owner)) in compared:
                continue
            compared.add((id(before), id(owner)))
            for entry in self._by_owner.get(id(before), ()):
                value, now = entry.value, entry.now(owner)
                if now is value:
                    continue
                entered = entry.entered and type(now) is type(value) and not _is_blank(now)
                if not entered and not is_same(value, now):
                    changed.append((entry.name, value, now))
                    continue
                todo.append((value, now))
                if hasattr(value, "__dict__"):
                    todo.append((vars(value), vars(now)))
        return changed


def guard_of(
    fn: Any,
    ran: Ran,
    before: Reachable | None = None,
    copied: Sequence[Tensor] = (),
    constants: Collection[Tensor] = (),
    opaque: bool = False,
) -> Guard:
    """The guard of a program, made right after its trace, or of one that is loaded.

    Args:
        before: what `fn` could reach before it ran; what it has written there itself is its own. None where
            it has not run.
        opaque: have entries too for objects that cannot be compared by what they hold, and for what stays as
            it is in one process: what partials hold, the order of keys.
        constants: the program's: parameters of modules count that are one of these, others are replaced by
            leaves, or not read.
        copied: tensors that the program has copies of; others it reads where they are.
    """
    executed = ran.executed
    reached = Reachable(fn, code=True, mentioned=True, executed=executed or None, computed=ran.computed)
    constants = [c for c in constants if c.device.type == "cpu"]
    before = reached if before is None else before
    entries = []
    for container in reached.containers.values():
        known = before.containers.get(id(container.owner), container)
        owner = vars(container.owner) if isinstance(container.owner, ModuleType | type) else container.owner
        entries += [
            Entry(owner, key, value, _name(reached, container.owner, key), entered)
            for key, value, entered in _values(container, reached, constants, opaque)
            if _before(known, key) is value or (key is LENGTH and _before(known, key) == value)
        ]
        if isinstance(owner, dict) and not opaque and _picks(container, reached):
            written = {k for k in reached.keys if known.before.get(k, ABSENT) is not owner.get(k, ABSENT)}
            absent = Absent(reached.keys - written, len(owner), _last(owner))
            name = f"the keys of {_path(reached, owner)}"
            entries.append(Entry(owner, absent, absent.of(owner), name, False))
    for each in copied:
        entries.append(Entry(each, "_version", each._version, f"{_path(reached, each)}._version", False))
    for each in reached.of_type((np.ndarray,)):
        entries.append(Entry(each, LENGTH, _size(each, each), _path(reached, each), False))
    entries += _immutable(reached) if opaque else []
    for each in reached.of_type((FunctionType,)):
        if each.__code__ in executed and not library(each.__module__):
            name = f"{each.__name__}.{{}}"
            entries += [Entry(each, k, getattr(each, k), name.format(k), False) for k in _OF_FUNCTIONS]
    for name in ran.variables:
        value = lookup(os.environ, name)
        entries.append(Entry(os.environ, name, value, f"os.environ[{name!r}]", False))
    return Guard(entries, ran)


# ------------------------------------------------------------------ what counts


def _values(
    container: Container, reached: Reachable, constants: Sequence[Tensor], opaque: bool
) -> Iterator[tuple[Any, Any, bool]]:
    """(key, value, whether it is entered) of what a container holds and a program depends on."""
    owner, values = container.owner, container.read()
    holder, role = reached.parents.get(id(owner), (None, None))  # of an object's own dict: (object, None)
    if isinstance(holder, FunctionType) and library(holder.__module__):
        return  # its defaults
    plain = container.only is None and not isinstance(owner, CellType | ContextVar)
    if plain and role not in _REGISTRIES and not (holder is not None and role is None):
        if _picks(container, reached):  # others are none of its business
            values = {k: v for k, v in values.items() if k in reached.names}
        else:
            yield LENGTH, _size(owner, values.values()), False
            if len(values) > LONG or isinstance(owner, set):
                return
    for key, value in values.items():
        if isinstance(value, ModuleType | CellType):
            continue
        if role == "_parameters" and not any(equal_tensors(value, c) for c in constants):
            continue
        is_leaf = _is_leaf(value)
        entered = not is_leaf and _is_entered(reached, value)
        if is_leaf or entered or opaque:
            yield key, value, entered
    if isinstance(owner, dict) and role is None and holder is not None:
        yield from ((key, ABSENT, False) for key in _class_defaults(holder, owner, reached))


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two are one to a program: numbers, dtype, device."""
    alike = is_plain(a) and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and torch.equal(a, b)


def _picks(container: Container, reached: Reachable) -> bool:
    """Whether the code picks keys of a dict by their names, or attributes of an object."""
    if not isinstance(container.owner, dict):
        return False
    _, role = reached.parents.get(id(container.owner), (None, None))
    if role in _REGISTRIES:
        return role == "_modules"
    named = any(k in reached.names for k in container.before)
    return container.only is not None or (named and not reached.is_read_whole(container.owner))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, type, *_CALLABLE)) or is_constant(value)


def _is_entered(reached: Reachable, value: Any) -> bool:
    return id(value) in reached.containers or id(getattr(value, "__dict__", None)) in reached.containers


def _immutable(reached: Reachable) -> Iterator[Entry]:
    """What cannot change in its holder, and may be another in another process."""
    for each in reached.of_type((partial,)):
        for key, value in {"func": each.func, "args": each.args}.items():
            entered = not _is_leaf(value) and _is_entered(reached, value)
            yield Entry(each, key, value, f"{_path(reached, each)}[{key!r}]", entered)
    for container in reached.containers.values():
        holder, role = reached.parents.get(id(container.owner), (None, None))
        if not isinstance(container.owner, dict) or container.only is not None or (holder and role is None):
            continue
        keys = [k for k in container.before if k in reached.names] or list(container.before)
        order = tuple(k if is_constant(k) else type(k).__qualname__ for k in keys)
        yield Entry(container.owner, "keys", order, f"the order of {_path(reached, container.owner)}", False)


def _class_defaults(each: Any, own: dict[str, Any], reached: Reachable) -> Iterator[str]:
    """Attributes that the object's class has, and the object may hide."""
    for kind in type(each).__mro__:
        container = reached.containers.get(id(kind))
        for key, value in container.before.items() if container else ():
            named = container.only is None or key in container.only
            if named and key not in own and key[:2] != "__" and (is_constant(value) or callable(value)):
                yield key


def _is_blank(each: Any) -> bool:
    """Whether nothing can be compared in an object but its identity, as in a sentinel."""
    return hasattr(each, "__dict__") and not vars(each) and not hasattr(type(each), "__len__")


def _before(known: Container, key: Any) -> Any:
    """What a container held before the trace; of one that was not found then, what it holds."""
    if key is LENGTH:
        return _size(known.owner, known.before.values())
    return known.before.get(key, ABSENT)


def _size(owner: Any, values: Collection[Any]) -> Any:
    """What a program knows of a container as a whole: its length; of a set of constants, these; of a
    small array, its numbers.
    """
    if isinstance(owner, np.ndarray):
        return f"numbers {hash(owner.tobytes()):x}" if owner.nbytes <= _SMALL_bytes else owner.shape
    return frozenset(values) if isinstance(owner, set) and all(map(is_constant, values)) else len(values)


def _name(reached: Reachable, owner: Any, key: Any) -> str:
    """As the user's code says it: `beta`, `cfg['beta']`, `model.blocks.0.drop.p`, `len(tables)`."""
    if key is LENGTH:
        return f"len({_path(reached, owner)})"
    if isinstance(owner, CellType | ContextVar):
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
