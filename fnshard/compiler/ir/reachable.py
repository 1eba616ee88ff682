"""Reachable: every container that a module or a function can read or write beside its arguments.

A container is what holds values and can be changed: a dict, a list, a set, an object's attributes, a class's,
a closure's cell, the globals that a function names. `make_functional` and a trace put them back as they were.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from fnshard.compiler.ir.bytecode import mentioned, read_whole
from fnshard.tree import is_constant

SMALL_bytes = 1 << 20  # tensors that a function closes over are smaller: larger ones are refused
LONG = 10_000  # longer containers are data: they are put back, and not entered
_CACHE = type(lru_cache(len))
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), type(NotImplemented)})
# An assert that pytest has rewritten names a module of pytest's, from where everything can be reached.
_TESTERS = {"pytest", "_pytest", "pluggy", "hypothesis"}
_LIBRARIES = frozenset({*sys.stdlib_module_names, *_TESTERS, "torch", "numpy", "optree", "fnshard"}) - {
    "types", "argparse", "collections", "weakref",  # their classes hold what users put there
}  # fmt: skip
_ALWAYS = frozenset(
    {"forward", "training", "_modules", "__call__", "__getattr__", "__getitem__", "__setitem__", "__iter__"}
)
# Of a logger: what it tells its user's code. Handlers and the registry of all loggers lead everywhere.
_OF_LOGGERS = frozenset({"level", "disabled", "disable", "parent", "manager", "logger"})
_TENSORS = {"_buffers", "_parameters"}
ABSENT = object()


@dataclass(slots=True, eq=False)
class Container:
    """One container, and all that it held when it was found. `only`: the keys that count, or None for all."""

    owner: Any
    before: dict[Any, Any]
    only: Collection[str] | None = None

    def read(self) -> dict[Any, Any]:
        """What counts of it, by key; all that code lists by `__dict__`."""
        if self.only is None or (type(self.owner) is dict and "__dict__" in self.only):
            return self.before
        return {k: v for k, v in self.before.items() if k in self.only}

    def now(self) -> dict[Any, Any]:
        """What it holds now, by key."""
        return _read(self.owner)

    def is_unchanged(self) -> bool:
        """Whether the same keys hold the same objects, in the same order."""
        now = self.owner if type(self.owner) is dict else self.now()
        before = self.before
        return len(now) == len(before) and all(
            chain(map(is_, now, before), map(is_, now.values(), before.values()))
        )

    def put_back(self, spoiled: Callable[[Any], bool] | None = None) -> None:
        """Undo all changes, or those that left a `spoiled` value."""
        if self.is_unchanged():
            return
        now, before = self.now(), self.before
        keys = [k for k in {**before, **now} if before.get(k, ABSENT) is not now.get(k, ABSENT)]
        if spoiled is not None:
            keys = [k for k in keys if spoiled(now.get(k))]
        if keys and isinstance(self.owner, list | deque | set):
            self.owner.clear()
            (self.owner.update if isinstance(self.owner, set) else self.owner.extend)(before.values())
            return
        for key in keys:
            _write(self.owner, key, before.get(key, ABSENT))
        if spoiled is None and isinstance(self.owner, dict) and list(self.owner) != list(before):
            for key, value in before.items():  # in the order that it had
                _write(self.owner, key, ABSENT)
                _write(self.owner, key, value)

    def replace(self, others: Mapping[int, Any]) -> None:
        """Put other values in the place of those with these ids."""
        if isinstance(self.owner, set | tuple):
            return
        for key, value in self.before.items():
            if id(value) in others:
                _write(self.owner, key, others[id(value)])
            elif type(value) is tuple and any(id(v) in others for v in value):
                _write(self.owner, key, tuple(others.get(id(v), v) for v in value))


def _read(owner: Any) -> dict[Any, Any]:
    if isinstance(owner, dict):  # past what a subclass makes of it: some load modules when they are read
        keys = OrderedDict.__iter__(owner) if isinstance(owner, OrderedDict) else dict.__iter__(owner)
        return {key: dict.__getitem__(owner, key) for key in keys}
    if isinstance(owner, list | deque | set | tuple):
        return dict(enumerate(owner))
    if isinstance(owner, CellType | ContextVar):
        value = lookup(owner, "cell_contents")
        return {} if value is ABSENT else {"cell_contents": value}
    if isinstance(owner, type | ModuleType):
        return dict(vars(owner))
    return {name: getattr(owner, name) for name in _slots(type(owner)) if hasattr(owner, name)}


def lookup(owner: Any, key: Any) -> Any:
    """What a container holds under one key of `Container.before`, or ABSENT."""
    if isinstance(owner, dict):
        return dict.get(owner, key, ABSENT)
    if isinstance(owner, list | deque | tuple):
        return owner[key] if key < len(owner) else ABSENT
    if isinstance(owner, type(os.environ)):
        return owner.get(key, ABSENT)
    if isinstance(owner, type | ModuleType | MappingProxyType):
        return (owner if isinstance(owner, MappingProxyType) else vars(owner)).get(key, ABSENT)
    try:
        return owner.get() if isinstance(owner, ContextVar) else getattr(owner, key, ABSENT)
    except (LookupError, ValueError):  # an empty cell
        return ABSENT


def _write(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict):  # past what a subclass makes of it
        kind = OrderedDict if isinstance(owner, OrderedDict) else dict
        if value is not ABSENT:
            kind.__setitem__(owner, key, value)
        elif key in owner:
            kind.__delitem__(owner, key)
    elif isinstance(owner, list):
        owner[key] = value
    elif isinstance(owner, ContextVar):
        owner.set(None if value is ABSENT else value)
    elif isinstance(owner, type | ModuleType | CellType):
        delattr(owner, key) if value is ABSENT else setattr(owner, key, value)
    elif value is ABSENT:
        object.__delattr__(owner, key)
    else:
        object.__setattr__(owner, key, value)


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(k).get("__slots__", ()) for k in kind.__mro__]
    names = [n for s in found for n in ((s,) if isinstance(s, str) else s)]
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


class Reachable:
    """What can be reached from some roots.

    Args:
        code: enter functions and classes too: closures, defaults, the globals that functions name, and those
            methods of objects whose names occur in the code; of objects that are no modules, enter only the
            attributes that the code names.
        mentioned: of modules too, only those.
        executed: enter only the functions with this code; None is all.
        computed: more names of attributes, which the code does not spell.

    `containers`, by the id of their owner; `parents`: where an object was found first, as (owner, key), by
    its id; `tensors`; `caches` of `functools.lru_cache`; `names`: attributes and strings in the code; `keys`:
    the strings alone, which may be of what is not there; `read_whole`: names of what code reads otherwise
    than by a key that it spells.
    """

    def __init__(
        self,
        *roots: Any,
        code: bool = False,
        mentioned: bool = False,
        executed: Collection[CodeType] | None = None,
        computed: Iterable[str] = (),
    ):
        self.code, self.mentioned, self.executed = code, mentioned, executed
        self.containers: dict[int, Container] = {}
        self.parents: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []
        self.names: set[str] = set(_ALWAYS if executed is None else _ALWAYS - {"training"} | _TENSORS)
        self.keys = set(computed)
        self.names |= self.keys
        self.read_whole: set[str] = set()
        self._holders: dict[int, dict[tuple[int, Any], Any]] = {}  # of a dict: each, by its id and the key
        self._seen: dict[int, Any] = {}  # and kept alive: an id is that of one object
        self._partly: list[Container] = []
        self._todo: list[Any] = list(roots)
        while self._todo:
            self._walk()
            for container in self._partly:  # the code may have named more of them
                for key, value in container.read().items():
                    self._found(value, container.owner, key)

    def is_read_whole(self, each: Any, seen: frozenset[int] = frozenset()) -> bool:
        """Whether code may read a dict otherwise than by keys that it spells, or what the dict is in."""
        if "self" in self.read_whole and not library(type(each).__module__) and isinstance(each, dict):
            return True  # by a method of its own
        for (_, role), holder in self._holders.get(id(each), {}).items():
            if role in self.read_whole or isinstance(holder, _UNNAMED):
                return True
            is_container = id(holder) in self.containers and self.containers[id(holder)].only is None
            if is_container and id(holder) not in seen and self.is_read_whole(holder, seen | {id(each)}):
                return True
        return False

    def of_type(self, kinds: tuple[type, ...]) -> list[Any]:
        """All objects of these types that were met."""
        return [each for each in self._seen.values() if isinstance(each, kinds)]

    def _walk(self) -> None:
        seen, todo = self._seen, self._todo
        while todo:
            each = todo.pop()
            if id(each) not in seen:
                seen[id(each)] = each
                self._visit(each, type(each))

    def _visit(self, each: Any, kind: type) -> None:
        has_entries = self.code and issubclass(kind, tuple) and not is_constant(each)
        if issubclass(kind, Tensor):
            self.tensors.append(each)
        elif has_entries or issubclass(kind, dict | list | set | deque) or kind in (CellType, ContextVar):
            self._enter(each)
        elif issubclass(kind, tuple | frozenset):
            for key, value in enumerate(each):
                self._found(value, each, key)
        elif not self.code and kind in _CODE:
            return
        elif issubclass(kind, type | ModuleType):
            if _users(each.__name__ if issubclass(kind, ModuleType) else each.__module__, each):
                self._enter(each, self.names)
                for above in _above(each) if issubclass(kind, type) else ():
                    if above is not nn.Module:  # whose names are everywhere
                        self._found(above, each, "__class__")
        elif kind in _WRAPPERS:
            for name in _WRAPPERS[kind]:
                self._found(getattr(each, name), each, name)
            if kind is _CACHE:
                self.caches.append(each)
        elif kind is FunctionType:
            self._function(each)
        elif self.code or _users(kind.__module__, kind):
            self._object(each, kind)
        if self.code and issubclass(kind, _DATA):
            is_theirs = kind.__module__ != "collections" and not library(kind.__module__)
            if is_theirs or getattr(each, "__dict__", None):
                self._object(each, kind)

    def _object(self, each: Any, kind: type) -> None:
        all_attributes = not self.code or (issubclass(kind, nn.Module) and not self.mentioned)
        only = None if all_attributes else self.names
        if kind.__module__ == "logging":
            only = _OF_LOGGERS
        self._attributes(each, only)
        if any("__slots__" in vars(k) for k in kind.__mro__[:-1]) and not issubclass(kind, _DATA):
            self._enter(each, only)
        if self.code:
            for each_class in kind.__mro__:
                if _users(each_class.__module__, each_class) and each_class is not nn.Module:
                    self._found(each_class, each, "__class__")

    def _attributes(self, each: Any, only: Collection[str] | None) -> None:
        if hasattr(each, "__dict__"):
            self.parents.setdefault(id(vars(each)), (each, None))
            self._enter(vars(each), only)

    def _function(self, each: FunctionType) -> None:
        if self.executed is not None and each.__code__ not in self.executed:
            if _is_own(each.__code__):
                self._attributes(each, self.names)
            return
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            self._found(cell, each, name)
        self._attributes(each, self.names)
        for values in (each.__defaults__, each.__kwdefaults__):
            self._found(values, each, None)
        globals_named, names, strings, imported = mentioned(each.__code__)
        self.names |= names
        self.keys |= strings
        if _is_own(each.__code__):
            self.read_whole |= read_whole(each.__code__)
        for name in imported if _is_own(each.__code__) else ():
            self._found(sys.modules.get(name), each, name)
        if library(each.__module__):
            return
        if id(each.__globals__) not in self.containers:
            self._enter(each.__globals__, set())
        only = self.containers[id(each.__globals__)].only
        if only is not None:  # else all of them, as of a dict that something holds
            only.update(globals_named)

    def _enter(self, owner: Any, only: set[str] | None = None) -> None:
        container = self.containers[id(owner)] = Container(owner, _read(owner), only)
        if only is not None:
            self._partly.append(container)
            if isinstance(owner, dict):
                self._seen[id(owner)] = owner
        elif len(container.before) <= LONG:
            for key, value in container.before.items():
                self._found(value, owner, key)

    def _found(self, value: Any, owner: Any, key: Any) -> None:
        if type(value) in _ATOMS:
            return
        if isinstance(value, _HOLDS):
            self._holders.setdefault(id(value), {})[id(owner), key] = owner
        if id(value) not in self._seen:
            self.parents.setdefault(id(value), (owner, key))
            self._todo.append(value)


def is_plain(value: Any) -> bool:
    """Whether it is torch's own dense tensor, with numbers, that notes when it is written to."""
    own = type(value) in (Tensor, nn.Parameter)
    return own and value.layout is torch.strided and not value.is_inference()


class TensorSnapshot:
    """Copies of tensors, and which of the tensors were written to since."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.known = [(t, t.detach().clone(), t._version) for t in tensors if is_plain(t)]

    def put_back(self) -> list[Tensor]:
        """Give those that were written to the numbers they had, and return them."""
        written = [(t, copy) for t, copy, version in self.known if t._version != version]
        with torch.no_grad():
            for tensor, copy in written:
                tensor.copy_(copy)
        return [t for t, _ in written]


@contextmanager
def unspoiled(fn: Callable[..., Any], spoiled: Callable[[Tensor], bool]) -> Iterator[Reachable]:
    """Behind the `with`, no `spoiled` tensor is left in what `fn` can reach; what else it wrote there stays.

    Tensors that it wrote to in place have their numbers back if it failed.

    Yields:
        What it can reach.
    """
    reached = Reachable(fn, code=True)
    numbers = TensorSnapshot(t for t in reached.tensors if is_plain(t) and t.nbytes <= SMALL_bytes)
    made = {id(cache): cache.cache_info().misses for cache in reached.caches}
    try:
        yield reached
    except BaseException:
        numbers.put_back()
        raise
    finally:
        for container in reached.containers.values():
            container.put_back(lambda value: any(map(spoiled, Reachable(value).tensors)))
        for cache in reached.caches:
            if cache.cache_info().misses != made[id(cache)]:
                cache.cache_clear()


_WRAPPERS: Mapping[type, tuple[str, ...]] = {
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),  # `table.get`
    MethodWrapperType: ("__self__",),
    partial: ("func", "args", "keywords"),
    partialmethod: ("func", "args", "keywords"),
    property: ("fget",),
    cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    _CACHE: ("__wrapped__",),
}
_HOLDS = (CellType, dict)
_UNNAMED = (list, tuple, deque, BuiltinFunctionType, MethodType)  # defaults too: code has other names for it
_DATA = (Tensor, dict, list, set, deque, tuple, frozenset, partial)  # whose subclasses may have attributes
_CODE = frozenset({*_WRAPPERS, FunctionType, ModuleType, type})


def library(module: Any) -> bool:
    """Whether a module of this name is Python's, torch's, NumPy's or ours."""
    return str(module).partition(".")[0] in _LIBRARIES


def _users(module: Any, kind: Any) -> bool:
    """Whether it is the user's own, or a module of whoever's."""
    return not library(module) or (isinstance(kind, type) and issubclass(kind, nn.Module))


def _above(each: type) -> tuple[type, ...]:
    """The bases and the metaclass of a class that no installed package defines."""
    path = getattr(sys.modules.get(each.__module__), "__file__", None) or ""
    return () if "-packages" in path else (*each.__bases__, type(each))


def _is_own(code: CodeType) -> bool:
    """Whether no package that is installed defines it: these keep ids in attributes, and import much."""
    return "-packages" not in code.co_filename
