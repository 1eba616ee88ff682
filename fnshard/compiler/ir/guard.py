"""Guard the values besides its arguments that `fn` could read when it was traced.

Its program is valid as long as they are the same. They are found by walking objects: from functions to cells,
defaults, partial arguments and the globals that their code reads; to all members of modules (`nn.Module`) and
containers; to those attributes of other objects that code on the way names. Of functions of installed
packages the walk follows cells and names, but not globals.
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
    list_slots,
    raw_getattr,
)
from fnshard.compiler.ir.source_lines import is_users
from fnshard.tree import is_same

MEMBERS = 1_000  # a container with more members is data: only its length is compared
CACHE = type(lru_cache(len))  # the type of what `functools.lru_cache` returns
_WRAPPERS = (MethodType, partial, property, cached_property, staticmethod, classmethod, CACHE)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget", "__wrapped__")
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), CodeType, torch.dtype, torch.device})
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
# Attributes that each nn.Module has; those of `_OF_MODULES` are entered by themselves.
_NOT_COMPARED = vars(nn.Module()).keys() - {"training"}
# Methods that run although no code names them.
_CALLED_UNNAMED = (
    "forward",
    "backward",
    "setup_context",
    "__call__",
    "__getattr__",
    "__getitem__",
    "__iter__",
)
_format_item, _format_attribute = "{}[{!r}]".format, "{}.{}".format
Entry = tuple[Any, Any, Any]  # owner, key or attribute, value; without an owner, a long container's length
Change = tuple[str, Any, Any]  # path, before, now


class Reachable:
    """A walk to all values that `fn` can reach.

    An object's attributes count only where code that the walk has met names them, and code that is met later
    may name more. So the walk goes on until nothing new is found.

    Attributes:
        entries: all values, by path as the user writes it (`cfg['beta']`, `model.0.p`).
        tensors: those that are tensors, by path.
        containers: the objects that hold them, each with its path, by the object's id.
    """

    def __init__(self, fn: Any):
        self.entries: dict[str, Entry] = {}
        self.tensors: dict[str, Tensor] = {}
        self.containers: dict[int, tuple[Container, str]] = {}
        self._seen: dict[int, Any] = {}  # objects are kept alive, so that their ids stay their own
        self._names = set(_CALLED_UNNAMED)  # all names in code so far
        self._partly: dict[int, Callable[..., str]] = {}  # owners of which named attributes alone count
        self._todo = deque([(fn, "fn")])
        while self._todo:
            while self._todo:
                self._visit(*self._todo.popleft())
            for owner, path_of in list(self._partly.items()):  # code may have named more attributes by now
                self._add_members(*self.containers[owner], path_of, self._names)

    def of_type(self, kinds: type | tuple[type, ...]) -> list[Any]:
        """Return the objects of these types among all that were reached."""
        return [each for each in self._seen.values() if is_a(each, kinds)]

    def _add(self, owner: Any, key: Any, value: Any, path: str) -> None:
        """Note a value by its path, and visit it later if it can hold others."""
        while path in self.entries:  # several functions have a variable of this name
            if self.entries[path][0] is owner and self.entries[path][1] is key:
                return
            path += "'"
        self.entries[path] = owner, key, value
        if type(value) not in _ATOMS and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append((value, path))

    def _visit(self, each: Any, path: str) -> None:
        """Enter one object: its members, and those of its class, module or function."""
        if is_a(each, Tensor):
            self.tensors[path] = each
        elif is_a(each, CONTAINERS):
            self._enter(each, path, _format_item)
        elif is_a(each, type):
            self._visit_classes(each)
        elif is_a(each, ModuleType):
            if not is_library(each.__name__) and "-packages" not in (getattr(each, "__file__", "") or ""):
                self._enter(vars(each), each.__name__, _format_attribute, partly=True)
        elif type(each) is FunctionType:
            self._visit_function(each)
        elif is_a(each, _WRAPPERS):
            for name in _WRAPPED:
                if (value := raw_getattr(each, name)) is not None:
                    self._add(each, name, value, "self" if name == "__self__" else f"{path}.{name}")
        else:
            self._visit_object(each, path)

    def _visit_object(self, each: Any, path: str) -> None:
        """Enter an object's attributes: all of a module's, and of others those that code names."""
        is_module = is_a(each, nn.Module)
        for name in _OF_MODULES:
            if is_module and name in vars(each):  # a torch.jit module has none of them
                self._enter(vars(each)[name], path, _format_attribute)
        if is_a(attributes := raw_getattr(each, "__dict__"), dict):
            self._enter(attributes, path, _format_attribute, partly=not is_module)
        if list_slots(type(each)):
            self._enter(each, path, _format_attribute, partly=True)
        self._visit_classes(type(each))

    def _visit_classes(self, kind: type) -> None:
        """Enter the attributes of a class and its bases, which hold methods."""
        for each in kind.__mro__:
            if not is_library(each.__module__):
                self._enter(each, each.__name__, _format_attribute, partly=True)

    def _visit_function(self, each: FunctionType) -> None:
        """Enter what a function's code can read: cells, defaults, attributes and globals that it names."""
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            self._enter(cell, name, lambda name, _: name)
        if not is_users(each.__code__.co_filename):
            return

        # What the user's own code names may be read from any object, and its globals from its module.
        names, global_names = _find_names(each.__code__)
        self._names |= names
        for part in _OF_FUNCTIONS:
            self._add(each, part, getattr(each, part), f"{each.__name__}.{part}")
        self._enter(vars(each), each.__name__, _format_attribute, partly=True)
        if "-packages" not in each.__code__.co_filename:
            module = self.containers.setdefault(id(each.__globals__), (Container(each.__globals__), ""))
            self._add_members(*module, lambda _, name: name, global_names)

    def _enter(self, owner: Any, path: str, path_of: Callable[..., str], partly: bool = False) -> None:
        """Enter a container, or note its length alone if it is data."""
        if id(owner) not in self.containers:
            self.containers[id(owner)] = Container(owner), path
        container, path = self.containers[id(owner)]
        if partly:
            self._partly[id(owner)] = path_of
        elif len(container.before) <= MEMBERS:
            self._add_members(container, path, path_of)
        else:
            self.entries[f"len({path})"] = None, None, len(container.before)

    def _add_members(
        self, each: Container, path: str, path_of: Callable[..., str], names: Any = None
    ) -> None:
        """Add a container's members: all of them, or those of some names."""
        left_out = _NOT_COMPARED if "_modules" in each.before else ()
        for key, value in each.before.items():
            is_member = key not in left_out if names is None else key in names
            if is_member:
                self._add(each.owner, key, value, path_of(path, key))


class Guard:
    """A guard of the values that one program has baked in.

    Args:
        reached: all that `fn` could reach before the trace.
        written: the paths that `fn` itself has written to, which may change.
        in_place: the tensors that the program reads where they are.
        copied: the tensors of which it has a copy on another device.
    """

    def __init__(
        self,
        fn: Any,
        reached: Reachable,
        written: Iterable[str],
        in_place: Iterable[Tensor],
        copied: Iterable[Tensor],
    ):
        self._fn, self._written = fn, frozenset(written)
        self._written_prefixes = tuple(path + end for path in self._written for end in ".[")

        # A tensor that the program reads in place must stay where it is, and a copied one must not be written
        # to. All other tensors keep only shape and dtype.
        storages = {"data_ptr": _find_storages(in_place), "_version": _find_storages(copied)}
        self._facts = {}
        for key, fact in _FACTS.items():
            tensors = dict(reached.tensors)
            if key in storages:
                tensors = {p: t for p, t in tensors.items() if _find_storages([t]) & storages[key]}
            self._facts[key] = fact, tensors, [*map(fact, tensors.values())]
        self._keep(reached)

    def holds(self) -> bool:
        """Return whether all values are what they were.

        That costs a lookup and an `is` for each value. If a value was replaced by another that may be equal,
        everything is walked again, and from then on the new objects are looked up.
        """
        try:
            if self._is_untouched():
                return True
            # Something changed: a walk is worth its time only if all values that were replaced may be equal.
            groups = ((lookup, zip(*group, strict=True)) for lookup, group in self._groups)
            if not all(_is_alike(e[2], lookup(*e[:2], ABSENT)) for lookup, group in groups for e in group):
                return False
        except (IndexError, ValueError):  # a list is shorter, a cell is empty
            return False

        # The new objects may hold others than the old ones did: compare all that is reached by now.
        again = Reachable(self._fn)
        if self._find_changes(again):
            return False
        self._keep(again)
        return True

    def changes(self) -> list[Change]:
        """Return all changes, each as its path, the former value and the new one."""
        return self._find_changes(Reachable(self._fn))

    def _find_changes(self, again: Reachable) -> list[Change]:
        """Return the changes since the walk that is kept: other values, and other facts of tensors."""
        return changes(self._entries, self._select_guarded(again)) + [
            (f"{path}.{key}", value, fact(tensor))
            for key, (fact, tensors, values) in self._facts.items()
            for (path, tensor), value in zip(tensors.items(), values, strict=True)
            if fact(tensor) != value
        ]

    def _is_untouched(self) -> bool:
        """Return whether every value is still the same object, and every container has its length."""
        # This runs before every step, over thousands of values: `map` keeps the loops in C.
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
        """Keep the values of a walk as columns of owners, keys and values, by how they are looked up."""
        # Entries are grouped, so that one `map` in C looks up all of a group.
        self._entries = self._select_guarded(reached)
        groups: dict[Any, list[Entry]] = {}
        for owner, key, value in self._entries.values():
            owner = vars(owner) if is_a(owner, type) else owner
            lookup = next((read for kind, read in _LOOKUPS.items() if is_a(owner, kind)), raw_getattr)
            if owner is not None:
                groups.setdefault(lookup, []).append((owner, key, value))
        self._groups = [(lookup, tuple(zip(*group, strict=True))) for lookup, group in groups.items()]

        # A member that was added has no entry, but it changes the container's length.
        owners = [each.owner for each, path in reached.containers.values() if self._is_guarded(path)]
        sized = [vars(o) if is_a(o, type) else o for o in owners if is_a(o, (*CONTAINERS, type))]
        self._sizes = sized, [len(o) for o in sized]

    def _select_guarded(self, reached: Reachable) -> dict[str, Entry]:
        """Return the entries of a walk without those that `fn` itself writes to."""
        return {path: e for path, e in reached.entries.items() if self._is_guarded(path)}

    def _is_guarded(self, path: str) -> bool:
        """Return whether a path must not change: `fn` writes neither to it nor to what it is a part of."""
        return path not in self._written and not path.startswith(self._written_prefixes)


def changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[Change]:
    """Return the differences between the entries of two walks."""
    absent = (None, None, ABSENT)
    values = [(p, before.get(p, absent)[2], now.get(p, absent)[2]) for p in {**before, **now}]
    return [(path, then, value) for path, then, value in values if not _is_alike(then, value)]


def find_written(before: Reachable, now: Reachable) -> Iterator[str]:
    """Yield the paths that were written to, and those of containers that gained or lost members."""
    for path, then, value in changes(before.entries, now.entries):
        yield path
        if then is ABSENT or value is ABSENT:
            walk = now if then is ABSENT else before
            owner, key, _ = walk.entries[path]
            _, holder = walk.containers.get(id(owner), (None, ""))
            if path == _format_item(holder, key):
                yield holder


def _is_alike(then: Any, now: Any) -> bool:
    """Return whether two values are the same, or small containers of one type.

    The members of containers have entries of their own.
    """
    are_containers = type(then) is type(now) and is_a(then, CONTAINERS)
    return (are_containers and max(len(then), len(now)) <= MEMBERS) or is_same(then, now)


def _find_storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory of plain tensors."""
    return {t.untyped_storage().data_ptr() for t in tensors if is_plain(t)}


@lru_cache(maxsize=4096)
def _find_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return all `co_names` of code and of functions defined in it, and those that are read as globals.

    The two differ: `output.loss` does not read a script's global `loss`, which is another tensor at each
    step.
    """
    names = set(code.co_names)
    global_names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_names, inner_globals = _find_names(inner)
            names |= inner_names
            global_names |= inner_globals
    return names, global_names


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
