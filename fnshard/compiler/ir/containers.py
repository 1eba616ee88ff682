"""Containers: objects that hold values and can be changed, and how to undo changes.

`make_functional` and a trace put back what a module's forward writes to its attributes, containers and
tensors. While a trace runs, a module keeps what it wrote until `fn` has returned.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

ABSENT = object()
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
LONG = 10_000  # a container with more values is data: its changes are undone, and it is not entered
# An assert that pytest has rewritten names a module of pytest's, from where everything can be reached.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "optree", "fnshard", "_pytest"} - {
    "types", "argparse", "collections",  # instances of their classes hold what users put there
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Container:
    """A container of values that can be changed, and all that it held when it was found."""

    owner: Any
    before: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.before = read(self.owner)

    def replace(self, others: Mapping[int, Any]) -> None:
        """Replace the values with these ids by others."""
        for key, value in self.before.items():
            if id(value) in others:
                self._write(key, others[id(value)])
            elif type(value) is tuple and holds(value, others):
                self._write(key, tuple(others.get(id(v), v) for v in value))

    def put_back(self, only: Callable[[Any, Any], bool] | None = None) -> None:
        """Undo all changes, or those of values for which `only(before, now)` is true."""
        # Most containers are unchanged: compare by identity, since `==` of tensors and of users' objects does
        # something else.
        now, before = read(self.owner), self.before
        same_keys = len(now) == len(before) and all(map(is_, now, before))
        if same_keys and all(map(is_, now.values(), before.values())):
            return

        pairs = {k: (before.get(k, ABSENT), now.get(k, ABSENT)) for k in {**before, **now}}
        keys = [k for k, (a, b) in pairs.items() if a is not b and (only is None or only(a, b))]

        # The keys of a list are positions, which may have shifted, and those of a set are its members: both
        # get all members anew.
        if keys and is_a(self.owner, (list, deque, set)):
            self.owner.clear()
            if is_a(self.owner, set):
                self.owner.update(before.values())
            else:
                self.owner.extend(before.values())
            return

        for key in keys:
            self._write(key, before.get(key, ABSENT))
        if only is None and is_a(self.owner, dict) and list(self.owner) != list(before):
            for key, value in before.items():  # written anew, the keys get their former order
                self._write(key, ABSENT)
                self._write(key, value)

    def _write(self, key: Any, value: Any) -> None:
        """Write one value back, or remove it, past methods that a subclass may have overridden."""
        owner = self.owner
        if is_a(owner, dict):  # dict's own methods, not those of a subclass
            kind = OrderedDict if is_a(owner, OrderedDict) else dict  # an OrderedDict keeps its order apart
            if value is not ABSENT:
                kind.__setitem__(owner, key, value)
            elif key in owner:
                kind.__delitem__(owner, key)
        elif is_a(owner, list):
            owner[key] = value
        elif is_a(owner, (type, CellType)):
            if value is ABSENT:
                delattr(owner, key)
            else:
                setattr(owner, key, value)
        elif not is_a(owner, CONTAINERS):  # an object with slots
            if value is ABSENT:
                object.__delattr__(owner, key)
            else:
                object.__setattr__(owner, key, value)


def raw_getattr(owner: Any, name: str, default: Any = None) -> Any:
    """Return an attribute without running the owner's `__getattr__`, which may raise or load modules."""
    try:
        return (type if is_a(owner, type) else object).__getattribute__(owner, name)
    except Exception:  # a property raises
        return default


def is_a(value: Any, kinds: Any) -> bool:
    """Return whether a value's true type is one of these; a class may override what `isinstance` reads."""
    return issubclass(type(value), kinds)


def holds(value: Any, others: Mapping[int, Any]) -> bool:
    """Return whether a value has one of these ids, or is a tuple that holds such a value."""
    return id(value) in others or (type(value) is tuple and any(id(v) in others for v in value))


def read(owner: Any) -> dict[Any, Any]:
    """Return the values that a container holds, by key."""
    if is_a(owner, dict):  # dict's own method: some subclasses load modules when they are read
        return dict(dict.items(owner))
    if is_a(owner, (set, frozenset)):
        return {value: value for value in owner}
    if is_a(owner, CONTAINERS):
        return dict(enumerate(owner))
    if is_a(owner, type):
        return dict(vars(owner))
    if is_a(owner, CellType):
        try:
            return {"cell_contents": owner.cell_contents}
        except ValueError:  # an empty one
            return {}
    values = {name: raw_getattr(owner, name, ABSENT) for name in list_slots(type(owner))}
    return {name: value for name, value in values.items() if value is not ABSENT}


@lru_cache(maxsize=1024)
def list_slots(kind: type) -> tuple[str, ...]:
    """Return the names in the `__slots__` of a class and its bases."""
    if issubclass(kind, nn.Module):
        return ()
    names: list[str] = []
    for each in kind.__mro__:
        declared = vars(each).get("__slots__", ())
        names += [declared] if isinstance(declared, str) else declared
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def is_library(module: Any) -> bool:
    """Return whether a module of this name is Python's, torch's, NumPy's or ours."""
    return str(module).partition(".")[0] in _LIBRARIES


def is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor of torch's own type, which counts writes to it."""
    is_of_torch = type(value) in (Tensor, nn.Parameter)
    return is_of_torch and value.layout is torch.strided and not value.is_inference()


class Contents:
    """All `containers` and `tensors` that some roots reach, except through functions and classes."""

    def __init__(self, *roots: Any):
        self.containers: list[Container] = []
        self.tensors: list[Tensor] = []
        seen: dict[int, Any] = {}  # objects are kept alive, so that their ids stay their own
        todo = list(roots)
        while todo:
            each = todo.pop()
            if id(each) in seen:
                continue
            seen[id(each)] = each
            if is_a(each, Tensor):
                self.tensors.append(each)
            elif is_a(each, CONTAINERS):
                todo += self._enter(each)
            # Other objects of torch and Python hold nothing of the user's.
            elif is_a(each, nn.Module) or not (is_a(each, type) or is_library(type(each).__module__)):
                attributes = raw_getattr(each, "__dict__")
                if is_a(attributes, dict):
                    todo.append(attributes)
                if list_slots(type(each)):
                    todo += self._enter(each)

    def _enter(self, owner: Any) -> Collection[Any]:
        """Note a container and return its values, but for those of one that is data."""
        self.containers.append(Container(owner))
        values = self.containers[-1].before.values()
        return values if len(values) <= LONG else ()


class TensorSnapshot:
    """A set of copies of tensors, which are put back into those that were written to since."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._copies = [(t, t.detach().clone(), t._version) for t in tensors if is_plain(t)]

    def put_back(self) -> list[Tensor]:
        """Put the copies back into tensors that were written to, and return these tensors."""
        written = [(t, copy) for t, copy, version in self._copies if t._version != version]
        with torch.no_grad():
            for tensor, copy in written:
                tensor.copy_(copy)
        return [t for t, _ in written]


_here = threading.local()  # `containers`: those of modules in this thread's run of `fn`, by id of their owner


@contextmanager
def one_run(containers: Iterable[Container] = ()) -> Iterator[None]:
    """Run `fn` in the block: what modules write stays until its end, and is undone then.

    It is undone in these containers, and in those of modules that `fn` calls.
    """
    outer = getattr(_here, "containers", None)
    _here.containers = {id(c.owner): c for c in containers}
    try:
        yield
    finally:
        written, _here.containers = _here.containers, outer
        for container in written.values():
            container.put_back()


def put_back(containers: Iterable[Container], leaves: Mapping[int, Any]) -> None:
    """Undo what a module wrote: all of it, or in a run of `fn` only where the module holds `leaves`.

    `one_run` undoes the other writes, at the end of the run.
    """
    run = getattr(_here, "containers", None)
    for container in containers:
        if run is None:
            container.put_back()
        else:
            container.put_back(lambda before, _: holds(before, leaves))
            run.setdefault(id(container.owner), container)
