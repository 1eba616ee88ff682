"""Guard: the values besides its arguments that `fn` could read when it was traced; a program holds for these.

They are found by walking objects: from functions to cells, defaults, partial arguments and the globals that
their code reads; to all members of modules (`nn.Module`) and containers; to those attributes of other objects
that code on the way names. Of installed packages' functions the cells and names count, and no globals.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from itertools import repeat
from operator import attrgetter, eq, is_
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fnshard.compiler.ir.containers import (
    ABSENT,
    CONTAINERS,
    Container,
    is_a,
    is_library,
    is_plain,
    raw_getattr,
    slots,
)
from fnshard.compiler.ir.source_lines import is_users
from fnshard.tree import is_same

MEMBERS = 1_000  # a container with more is data: its length counts, and none of its members
CACHE = type(lru_cache(len))
_WRAPPERS = (MethodType, partial, property, cached_property, staticmethod, classmethod, CACHE)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget", "__wrapped__")
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), CodeType, torch.dtype, torch.device})
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_NOT_COMPARED = vars(nn.Module()).keys() - {"training"}  # what each module has, these five apart
_CALLED_UNNAMED = (
    "forward",
    "backward",
    "setup_context",
    "__call__",
    "__getattr__",
    "__getitem__",
    "__iter__",
)
_item, _attribute = "{}[{!r}]".format, "{}.{}".format
Entry = tuple[Any, Any, Any]  # owner, key or attribute, value; no owner: the length of a long container
Change = tuple[str, Any, Any]  # path, before, now


class Reachable:
    """All that `fn` can reach: `entries` by path, as the user's code says it (`cfg['beta']`, `model.0.p`)."""

    def __init__(self, fn: Any):
        self.entries: dict[str, Entry] = {}
        self.tensors: dict[str, Tensor] = {}
        self.containers: dict[int, tuple[Container, str]] = {}  # by the owner's id, with its path
        self._seen: dict[int, Any] = {}  # kept alive: an id is that of one object
        self._names = set(_CALLED_UNNAMED)
        self._partly: dict[int, Callable[..., str]] = {}
        self._todo = deque([(fn, "fn")])
        while self._todo:
            while self._todo:
                self._visit(*self._todo.popleft())
            for owner, path_of in list(self._partly.items()):  # code may have named more of them
                self._members(*self.containers[owner], path_of, self._names)

    def of_type(self, kinds: type | tuple[type, ...]) -> list[Any]:
        return [each for each in self._seen.values() if is_a(each, kinds)]

    def _found(self, owner: Any, key: Any, value: Any, path: str) -> None:
        while path in self.entries:  # variables of several functions
            if self.entries[path][0] is owner and self.entries[path][1] is key:
                return
            path += "'"
        self.entries[path] = owner, key, value
        if type(value) not in _ATOMS and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append((value, path))

    def _visit(self, each: Any, path: str) -> None:
        if is_a(each, Tensor):
            self.tensors[path] = each
        elif is_a(each, CONTAINERS):
            self._enter(each, path, _item)
        elif is_a(each, type):
            self._classes(each)
        elif is_a(each, ModuleType):
            if not is_library(each.__name__) and "-packages" not in (getattr(each, "__file__", "") or ""):
                self._enter(vars(each), each.__name__, _attribute, partly=True)
        elif type(each) is FunctionType:
            self._function(each)
        elif is_a(each, _WRAPPERS):
            for name in _WRAPPED:
                if (value := raw_getattr(each, name)) is not None:
                    self._found(each, name, value, "self" if name == "__self__" else f"{path}.{name}")
        else:
            self._object(each, path)

    def _object(self, each: Any, path: str) -> None:
        is_module = is_a(each, nn.Module)
        for name in _OF_MODULES if is_module else ():
            if name in vars(each):  # a torch.jit module has none
                self._enter(vars(each)[name], path, _attribute)
        if is_a(attributes := raw_getattr(each, "__dict__"), dict):
            self._enter(attributes, path, _attribute, partly=not is_module)
        if slots(type(each)):
            self._enter(each, path, _attribute, partly=True)
        self._classes(type(each))

    def _classes(self, kind: type) -> None:
        for each in kind.__mro__:
            if not is_library(each.__module__):
                self._enter(each, each.__name__, _attribute, partly=True)

    def _function(self, each: FunctionType) -> None:
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            self._enter(cell, name, lambda name, _: name)
        if not is_users(each.__code__.co_filename):
            return
        names, global_names = _named(each.__code__)
        self._names |= names
        for part in _OF_FUNCTIONS:
            self._found(each, part, getattr(each, part), f"{each.__name__}.{part}")
        self._enter(vars(each), each.__name__, _attribute, partly=True)
        if "-packages" not in each.__code__.co_filename:
            module = self.containers.setdefault(id(each.__globals__), (Container(each.__globals__), ""))
            self._members(*module, lambda _, name: name, global_names)

    def _enter(self, owner: Any, path: str, path_of: Callable[..., str], partly: bool = False) -> None:
        if id(owner) not in self.containers:
            self.containers[id(owner)] = Container(owner), path
        container, path = self.containers[id(owner)]
        if partly:
            self._partly[id(owner)] = path_of
        elif len(container.before) <= MEMBERS:
            self._members(container, path, path_of)
        else:
            self.entries[f"len({path})"] = None, None, len(container.before)

    def _members(self, each: Container, path: str, path_of: Callable[..., str], names: Any = None) -> None:
        without = _NOT_COMPARED if "_modules" in each.before else ()
        for key, value in each.before.items():
            if key not in without if names is None else key in names:
                self._found(each.owner, key, value, path_of(path, key))


class Guard:
    """The values that one program has baked in.

    Args:
        reached: from its `fn`, before the trace; what `fn` has written there is its own.
        closed_over: the tensors that the program reads where they are, and those that it has copied.
    """

    def __init__(self, fn: Any, reached: Reachable, written: Iterable[str], *closed_over: Iterable[Tensor]):
        self._fn, self._written = fn, frozenset(written)
        self._beneath = tuple(path + end for path in self._written for end in ".[")
        few = dict(
            zip(("data_ptr", "_version"), map(_storages, closed_over), strict=True)
        )  # count of few tensors
        self._facts = {}
        for key, fact in _FACTS.items():
            every = reached.tensors.items()
            tensors = {p: t for p, t in every if key not in few or _storages([t]) & few[key]}
            self._facts[key] = fact, tensors, [*map(fact, tensors.values())]
        self._keep(reached)

    def holds(self) -> bool:
        """Whether all values are what they were: a lookup and `is` for each.

        Where one was rebound, if only to an equal, all is walked again; then the new objects are looked up.
        """
        try:
            if self._is_untouched():
                return True
            groups = ((lookup, zip(*group, strict=True)) for lookup, group in self._groups)
            if not all(_is_alike(e[2], lookup(*e[:2], ABSENT)) for lookup, group in groups for e in group):
                return False
        except (IndexError, ValueError):  # a list is shorter, a cell is empty
            return False
        again = Reachable(self._fn)
        if self._changes(again):
            return False
        self._keep(again)
        return True

    def changes(self) -> list[Change]:
        """All that changed, each by its path, with what it was and is."""
        return self._changes(Reachable(self._fn))

    def _changes(self, again: Reachable) -> list[Change]:
        return changes(self._entries, self._counting(again)) + [
            (f"{path}.{key}", value, fact(tensor))
            for key, (fact, tensors, values) in self._facts.items()
            for (path, tensor), value in zip(tensors.items(), values, strict=True)
            if fact(tensor) != value
        ]

    def _is_untouched(self) -> bool:
        owners, lengths = self._sizes
        return (
            all(map(eq, map(len, owners), lengths))
            and all(all(map(eq, map(fact, ts.values()), known)) for fact, ts, known in self._facts.values())
            and all(
                all(map(is_, map(lookup, owners, keys, repeat(ABSENT)), values))
                for lookup, (owners, keys, values) in self._groups
            )
        )

    def _keep(self, reached: Reachable) -> None:
        self._entries = self._counting(reached)
        groups: dict[Any, list[Entry]] = {}
        for owner, key, value in self._entries.values():
            owner = vars(owner) if is_a(owner, type) else owner
            lookup = next((found for kind, found in _LOOKUPS.items() if is_a(owner, kind)), raw_getattr)
            if owner is not None:
                groups.setdefault(lookup, []).append((owner, key, value))
        self._groups = [(lookup, tuple(zip(*group, strict=True))) for lookup, group in groups.items()]
        owners = [each.owner for each, path in reached.containers.values() if self._counts(path)]
        sized = [vars(o) if is_a(o, type) else o for o in owners if is_a(o, (*CONTAINERS, type))]
        self._sizes = sized, [len(o) for o in sized]

    def _counting(self, reached: Reachable) -> dict[str, Entry]:
        return {path: e for path, e in reached.entries.items() if self._counts(path)}

    def _counts(self, path: str) -> bool:
        return path not in self._written and not path.startswith(self._beneath)


def changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[Change]:
    """Return what differs between the entries of two walks."""
    pairs = ((p, *(e.get(p, (None, None, ABSENT))[2] for e in (before, now))) for p in {**before, **now})
    return [change for change in pairs if not _is_alike(*change[1:])]


def written(before: Reachable, now: Reachable) -> Iterator[str]:
    """Paths that were written to; where members of a container came or went, the container's."""
    for path, then, _ in changes(before.entries, now.entries):
        walk = now if then is ABSENT else before
        owner, key, _ = walk.entries[path]
        _, holder = walk.containers.get(id(owner), (None, ""))
        yield holder if path == _item(holder, key) else path


def _is_alike(then: Any, now: Any) -> bool:
    """The same, or containers of one type, whose members have entries of their own."""
    small = type(then) is type(now) and is_a(then, CONTAINERS) and len(then) <= MEMBERS >= len(now)
    return small or is_same(then, now)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if is_plain(t)}


@lru_cache(maxsize=4096)
def _named(code: CodeType) -> tuple[set[str], set[str]]:
    """All `co_names` of code and of the functions defined in it, and those that are read as globals.

    A script's own `loss` is not what `output.loss` reads, and another tensor after each step.
    """
    reads = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    found = [(set(code.co_names), reads), *(_named(c) for c in code.co_consts if isinstance(c, CodeType))]
    return set[str]().union(*(f[0] for f in found)), set[str]().union(*(f[1] for f in found))


_LOOKUPS: dict[Any, Callable[..., Any]] = {
    dict: dict.get,
    MappingProxyType: MappingProxyType.get,
    list | tuple | deque: lambda owner, index, _: owner[index],
    set | frozenset: lambda owner, value, absent: value if value in owner else absent,
}
_FACTS: dict[str, Callable[[Tensor], Any]] = {
    "shape": attrgetter("shape"),
    "dtype": attrgetter("dtype"),
    "data_ptr": Tensor.data_ptr,
    "_version": attrgetter("_version"),
}
