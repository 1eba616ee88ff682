"""Guard: the values beside its arguments that `fn` read when it was traced; a program holds for these alone.

A trace bakes in what it reads: a number in a closure, an attribute, `model.training`. The guard of a program
compares them, as `torch.compile` does, and a step traces anew for others.
"""

from __future__ import annotations

import builtins
import cProfile
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import repeat
from operator import eq, is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch import Tensor

from fnshard.compiler.ir.reachable import ABSENT, LONG, Container, Reachable, library, lookup
from fnshard.compiler.ir.source_lines import is_users
from fnshard.tree import is_constant, is_same

_CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, partial, property, staticmethod, classmethod)
_LENGTH = object()  # the key of a container's length, of a set's elements, of the numbers in an array
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_REGISTRIES = ("_modules", "_buffers")  # dicts of a module: it never replaces them
_SMALL_bytes = 1 << 16  # larger arrays are data: to hash one of these takes 15 microseconds
_ENVIRON = type(os.environ)


@dataclass(frozen=True)
class Ran:
    """What a trace has run and read, as far as the code of `fn` does not tell.

    Args:
        executed: the code that ran; empty where nobody knows, and all code counts that `fn` can reach.
        computed: attributes that it read, or methods that ran, by names which it does not spell.
        variables: those of the environment that it read; "" where it listed all.
    """

    executed: Collection[CodeType] = ()
    computed: Collection[str] = ()
    variables: Collection[str] = ()


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

    def same(self) -> Callable[..., bool]:
        """What compares many such entries fast, of their owners, keys and values."""
        owner, is_size = self.owner, self.key is _LENGTH
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


def _same_lengths(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(eq, map(len, owners), values))


def _same_sizes(owners: Any, keys: Any, values: Any) -> bool:
    return all(map(is_same, map(_size, owners, owners), values))


class Guard:
    """The values that one program has baked in; `ran` is what its trace did."""

    def __init__(self, entries: Iterable[Entry] = (), ran: Ran = Ran()):
        self.entries, self.ran = tuple(entries), ran
        groups: dict[Callable[..., bool], list[Entry]] = {}
        for entry in self.entries:
            if entry.key not in _REGISTRIES:
                groups.setdefault(entry.same(), []).append(entry)
        self._groups = [
            (same, [tuple(getattr(e, part) for e in group) for part in ("owner", "key", "value")])
            for same, group in groups.items()
        ]

    def holds(self) -> bool:
        """Whether all values are what they were, at every step.

        Two lookups and `is` for each (10 microseconds for 300), and a hash of each small array; where one was
        rebound, if only to an equal, `changes` compares all again, which takes eight times as long.
        """
        try:
            return all(same(*parts) for same, parts in self._groups) or not self.changes()
        except (IndexError, ValueError):  # a list is shorter, a cell is empty
            return False

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


def guard_of(
    fn: Any,
    ran: Ran,
    before: Reachable | None = None,
    copied: Sequence[Tensor] = (),
    opaque: bool = False,
) -> Guard:
    """The guard of a program, made right after its trace, or of one that is loaded.

    Args:
        before: what `fn` could reach before it ran; what it has written there itself is its own. None where
            it has not run.
        opaque: have entries too for objects that cannot be compared by what they hold, and for what stays as
            it is in one process: what tuples and partials hold, the order of keys.
        copied: tensors that the program has copies of; others it reads where they are.
    """
    executed = ran.executed
    reached = Reachable(fn, code=True, mentioned=True, executed=executed or None, computed=ran.computed)
    before = reached if before is None else before
    entries = []
    for container in reached.containers.values():
        known = before.containers.get(id(container.owner), container)
        owner = vars(container.owner) if isinstance(container.owner, ModuleType | type) else container.owner
        entries += [
            Entry(owner, key, value, _name(reached, container.owner, key), entered)
            for key, value, entered in _values(container, reached, opaque)
            if _before(known, key) is value or (key is _LENGTH and _before(known, key) == value)
        ]
    for each in copied:
        entries.append(Entry(each, "_version", each._version, f"{_path(reached, each)}._version", False))
    for each in reached.of_type((np.ndarray,)):
        entries.append(Entry(each, _LENGTH, _size(each, each), _path(reached, each), False))
    entries += _immutable(reached) if opaque else []
    for each in reached.of_type((FunctionType,)):
        if each.__code__ in executed and not library(each.__module__):
            name = f"{each.__name__}.{{}}"
            entries += [Entry(each, k, getattr(each, k), name.format(k), False) for k in _OF_FUNCTIONS]
    for name in ran.variables:
        value = lookup(os.environ, name)
        entries.append(Entry(os.environ, name, value, f"os.environ[{name!r}]", False))
    return Guard(entries, ran)


@contextmanager
def recorded() -> Iterator[Ran]:
    """What users' code runs and reads inside: complete behind the `with`."""
    with _executed_code() as executed, _computed_names() as computed, _read_variables() as variables:
        yield Ran(executed, computed, variables)
    computed.update(c.co_name for c in executed if is_users(c.co_filename))  # methods that operators call


@contextmanager
def _computed_names() -> Iterator[set[str]]:
    """Attributes that users' code, on this thread, reads inside by `getattr` and `vars`.

    Their replacements, the whole process's, bear their names: `pickle` looks up what a method reduces to.
    """
    names: set[str] = set()
    read, list_all = getattr, vars
    thread: int | None = threading.get_ident()

    def is_theirs(module: str) -> bool:
        return threading.get_ident() == thread and (module == "dataclasses" or not library(module))

    @wraps(read)
    def reading(each: Any, name: str, *default: Any) -> Any:
        if is_theirs(sys._getframe(1).f_globals.get("__name__", "")):
            names.add(name)
        return read(each, name, *default)

    @wraps(list_all)
    def listing(*each: Any) -> Any:
        caller = sys._getframe(1)
        found = list_all(*each) if each else caller.f_locals
        if each and is_theirs(caller.f_globals.get("__name__", "")):
            names.update(found)
        return found

    with mock.patch.object(builtins, "getattr", reading), mock.patch.object(builtins, "vars", listing):
        try:
            yield names
        finally:
            thread = None  # what was imported by its name while tracing stays patched


@contextmanager
def _read_variables() -> Iterator[set[str]]:
    """Variables of the environment that users' code, on this thread, reads inside."""
    names: set[str] = set()
    thread = threading.get_ident()
    read, list_all = _ENVIRON.__getitem__, _ENVIRON.__iter__

    def note(name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_globals.get("__name__") in ("os", "collections.abc"):  # of `os.getenv`, `in`
            frame = frame.f_back
        if threading.get_ident() == thread and not library(frame.f_globals.get("__name__", "")):
            names.add(name)

    @wraps(read)
    def reading(environ: Any, name: Any) -> Any:
        note(os.fsdecode(name))
        return read(environ, name)

    @wraps(list_all)
    def listing(environ: Any) -> Any:
        note("")
        return list_all(environ)

    with (
        mock.patch.object(_ENVIRON, "__getitem__", reading), mock.patch.object(_ENVIRON, "__iter__", listing)
    ):  # fmt: skip
        yield names


@contextmanager
def _executed_code() -> Iterator[set[CodeType]]:
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


def _values(
    container: Container, reached: Reachable, opaque: bool = False
) -> Iterator[tuple[Any, Any, bool]]:
    """(key, value, whether it is entered) of what a container holds and a program depends on."""
    owner, values = container.owner, container.read()
    holder, role = reached.parents.get(id(owner), (None, None))  # of an object's own dict: (object, None)
    plain = container.only is None and not isinstance(owner, CellType | ContextVar)
    if plain and role not in _REGISTRIES and not (holder is not None and role is None):
        named = {k: v for k, v in values.items() if k in reached.names} if isinstance(owner, dict) else {}
        if not named:  # else the code picks its keys, and others are none of its business
            yield _LENGTH, _size(owner, values.values()), False
            if len(values) > LONG or isinstance(owner, set):
                return
        values = named or values
    for key, value in values.items():
        if isinstance(value, ModuleType | CellType):
            continue
        is_leaf = _is_leaf(value)
        entered = not is_leaf and _is_entered(reached, value)
        if is_leaf or entered or opaque:
            yield key, value, entered
    if isinstance(owner, dict) and role is None and holder is not None:
        yield from ((key, ABSENT, False) for key in _class_defaults(holder, owner, reached))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, type, *_CALLABLE)) or is_constant(value)


def _is_entered(reached: Reachable, value: Any) -> bool:
    return id(value) in reached.containers or id(getattr(value, "__dict__", None)) in reached.containers


def _immutable(reached: Reachable) -> Iterator[Entry]:
    """What cannot change in its holder, and may be another in another process."""
    for each in reached.of_type((tuple, partial)):
        holder, _ = reached.parents.get(id(each), (None, None))
        if isinstance(holder, FunctionType) and library(holder.__module__):
            continue  # its defaults
        values = dict(enumerate(each)) if isinstance(each, tuple) else {"func": each.func, "args": each.args}
        if is_constant(each) or any(isinstance(v, ModuleType | CellType) for v in values.values()):
            continue
        for key, value in values.items():
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
    if key is _LENGTH:
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
    if key is _LENGTH:
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
