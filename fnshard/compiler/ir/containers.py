"""Containers: what holds values and can be changed, and how it becomes again what it was.

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
LONG = 10_000  # a container with more is data: it is put back, and not entered
# An assert that pytest has rewritten names a module of pytest's, from where everything can be reached.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "optree", "fnshard", "_pytest"} - {
    "types", "argparse", "collections",  # their classes hold what users put there
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Container:
    """A container of values that can be changed, and all that it held when it was found."""

    owner: Any
    before: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.before = read(self.owner)

    def replace(self, others: Mapping[int, Any]) -> None:
        """Put other values in the place of those with these ids."""
        for key, value in self.before.items():
            if id(value) in others:
                self._write(key, others[id(value)])
            elif type(value) is tuple and holds(value, others):
                self._write(key, tuple(others.get(id(v), v) for v in value))

    def put_back(self, only: Callable[[Any, Any], bool] | None = None) -> None:
        """Undo all changes, or those of values for which `only(before, now)`."""
        now, before = read(self.owner), self.before
        same_keys = len(now) == len(before) and all(map(is_, now, before))
        if same_keys and all(map(is_, now.values(), before.values())):
            return
        pairs = {k: (before.get(k, ABSENT), now.get(k, ABSENT)) for k in {**before, **now}}
        keys = [k for k, (a, b) in pairs.items() if a is not b and (only is None or only(a, b))]
        if keys and is_a(self.owner, (list, deque, set)):
            self.owner.clear()
            (self.owner.update if is_a(self.owner, set) else self.owner.extend)(before.values())
            return
        for key in keys:
            self._write(key, before.get(key, ABSENT))
        if only is None and is_a(self.owner, dict) and list(self.owner) != list(before):
            for key, value in before.items():  # in the order that it had
                self._write(key, ABSENT)
                self._write(key, value)

    def _write(self, key: Any, value: Any) -> None:
        owner = self.owner
        if is_a(owner, dict):  # past what a subclass makes of it
            kind = OrderedDict if is_a(owner, OrderedDict) else dict  # which keeps its order in a list
            if value is not ABSENT:
                kind.__setitem__(owner, key, value)
            elif key in owner:
                kind.__delitem__(owner, key)
        elif is_a(owner, list):
            owner[key] = value
        elif is_a(owner, (type, CellType)):
            delattr(owner, key) if value is ABSENT else setattr(owner, key, value)
        elif not is_a(owner, CONTAINERS):
            write = object.__delattr__ if value is ABSENT else object.__setattr__
            write(owner, key, *(() if value is ABSENT else (value,)))


def raw_getattr(owner: Any, name: str, default: Any = None) -> Any:
    """An attribute, past what its owner's class makes of reading it: code that may raise, or load modules."""
    try:
        return (type if is_a(owner, type) else object).__getattribute__(owner, name)
    except Exception:  # a property's
        return default


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance`, past what a class makes of reading `__class__`."""
    return issubclass(type(value), kinds)


def holds(value: Any, others: Mapping[int, Any]) -> bool:
    """Whether it has one of these ids, or is a tuple of what has."""
    return id(value) in others or (type(value) is tuple and any(id(v) in others for v in value))


def read(owner: Any) -> dict[Any, Any]:
    """Return what a container holds, by key."""
    if is_a(owner, dict):  # past what a subclass makes of it: some load modules when they are read
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
    found = {name: raw_getattr(owner, name, ABSENT) for name in slots(type(owner))}
    return {name: value for name, value in found.items() if value is not ABSENT}


@lru_cache(maxsize=1024)
def slots(kind: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a class."""
    if issubclass(kind, nn.Module):
        return ()
    found = [vars(k).get("__slots__", ()) for k in kind.__mro__]
    names = [n for s in found for n in ((s,) if isinstance(s, str) else s)]
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def is_library(module: Any) -> bool:
    """Whether a module of this name is Python's, torch's, NumPy's or ours."""
    return str(module).partition(".")[0] in _LIBRARIES


def is_plain(value: Any) -> bool:
    """Whether it is torch's own dense tensor, with numbers, that notes when it is written to."""
    own = type(value) in (Tensor, nn.Parameter)
    return own and value.layout is torch.strided and not value.is_inference()


class Contents:
    """All data that some roots hold, functions and classes apart: `containers` and `tensors`."""

    def __init__(self, *roots: Any):
        self.containers: list[Container] = []
        self.tensors: list[Tensor] = []
        seen: dict[int, Any] = {}  # kept alive: an id is that of one object
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
            elif is_a(each, nn.Module) or not (
                is_a(each, type) or is_library(type(each).__module__)
            ):  # torch's and Python's own objects hold what is theirs
                todo += [attributes] if is_a(attributes := raw_getattr(each, "__dict__"), dict) else []
                todo += self._enter(each) if slots(type(each)) else ()

    def _enter(self, owner: Any) -> Collection[Any]:
        self.containers.append(Container(owner))
        values = self.containers[-1].before.values()
        return values if len(values) <= LONG else ()


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


_here = threading.local()  # `containers`: of modules, by the id of their owner, in the run of this thread


@contextmanager
def one_run(containers: Iterable[Container] = ()) -> Iterator[None]:
    """One run of `fn`: what modules write stays until it ends, and then these and theirs are as they were."""
    outer = getattr(_here, "containers", None)
    _here.containers = {id(c.owner): c for c in containers}
    try:
        yield
    finally:
        found, _here.containers = _here.containers, outer
        for container in found.values():
            container.put_back()


def put_back(containers: Iterable[Container], leaves: Mapping[int, Any]) -> None:
    """Undo what a module wrote: in a run of `fn` the places of its leaves alone, the rest when that ends."""
    run = getattr(_here, "containers", None)
    for container in containers:
        container.put_back(None if run is None else lambda before, _: holds(before, leaves))
        if run is not None:
            run.setdefault(id(container.owner), container)
