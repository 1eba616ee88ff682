"""JSON values as dataclasses: every field is checked, every failure names its path."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Read = Callable[[Any], Any]

Count = Annotated[int, range(1 << 63)]  # what sizes and places in files are


class JsonError(ValueError):
    """A JSON value that is not of the type that is read; `path` says where it stands."""

    def __init__(self, problem: str, path: str = ""):
        self.problem, self.path = problem, path
        super().__init__(f"{path.removeprefix('.')}: {problem}" if path else problem)

    def within(self, step: str) -> JsonError:
        """The same, seen from the value that holds it."""
        return JsonError(self.problem, step + self.path)


def from_json(kind: type[T], value: Any) -> T:
    """A value that `json.loads` gave, as a type.

    Types are dataclasses, `tuple[T, ...]`, `Mapping[str, T]`, unions, `Any`, `str`, `bool`, `int` (no bool),
    `float` (of an int, too), None, and `Annotated[int, range(...)]`. Fields that a dataclass does not have
    are left out; those with a default may be missing.

    Raises:
        JsonError: names the first value that is missing or of another type.

    >>> from dataclasses import dataclass
    >>> Chunk = type("Chunk", (), {"__annotations__": {"at": Count, "shape": tuple[Count, ...]}})
    >>> Chunk = dataclass(frozen=True)(Chunk)
    >>> from_json(Mapping[str, Chunk], {"w": {"at": 8, "shape": [2, 3]}})
    {'w': Chunk(at=8, shape=(2, 3))}
    >>> from_json(Mapping[str, Chunk], {"w": {"at": 8, "shape": [2, -3]}})
    Traceback (most recent call last):
    fnshard.runtime.files.json_reader.JsonError: w.shape[1]: -3 is not in range(0, 9223372036854775808)
    """
    return reader(kind)(value)


@cache
def reader(kind: Any) -> Read:
    """The function that reads a type.

    It is made once, so that a manifest of a million chunks is read fast. Making it evaluates annotations.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is Annotated:
        return _range_reader(reader(args[0]), args[1])
    if origin in (Union, types.UnionType):
        return _union_reader([reader(arg) for arg in args], kind)
    if origin is tuple:
        return _tuple_reader(reader(args[0]))
    if origin is Mapping:
        return _mapping_reader(reader(args[1]))
    if kind is float:
        return lambda value: float(value) if type(value) in (int, float) else _refuse(value, "a number")
    name = {int: "an int", str: "a string", bool: "a bool", types.NoneType: "null"}[kind]
    return lambda value: value if type(value) is kind else _refuse(value, name)


def _member(read: Read, value: Any, step: str, name: Any) -> Any:
    """A value within another, to which `step` leads by its name or number."""
    try:
        return read(value)
    except JsonError as error:
        raise error.within(step.format(name)) from None


def _refuse(value: Any, expected: str) -> Any:
    shown = type(value).__name__ if isinstance(value, list | dict | str) else repr(value)[:80]
    raise JsonError(f"{shown} is not {expected}")


def _range_reader(read: Read, allowed: range) -> Read:
    def ranged(value: Any) -> Any:
        number = read(value)
        return number if number in allowed else _refuse(number, f"in {allowed}")

    return ranged


def _union_reader(readers: Sequence[Read], kind: Any) -> Read:
    def union(value: Any) -> Any:
        for read in readers:
            try:
                return read(value)
            except JsonError:
                continue
        return _refuse(value, f"of {kind}")

    return union


def _tuple_reader(read: Read) -> Read:
    def items(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            _refuse(value, "a list")
        return tuple([_member(read, item, "[{}]", place) for place, item in enumerate(value)])

    return items


def _mapping_reader(read: Read) -> Read:
    def mapping(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            _refuse(value, "an object")
        return {name: _member(read, item, ".{}", name) for name, item in value.items()}

    return mapping


def _dataclass_reader(kind: Any) -> Read:
    hints = get_type_hints(kind, include_extras=True)
    readers = [
        (f.name, reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    ]

    def read_fields(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(value, f"an object of {kind.__name__}")
        found: dict[str, Any] = {}
        for name, read, required in readers:
            if name in value:
                found[name] = _member(read, value[name], ".{}", name)
            elif required:
                raise JsonError("is missing", f".{name}")
        return kind(**found)

    return read_fields
