"""Read JSON values as dataclasses whose fields have the types that they declare."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Read = Callable[[Any], Any]

Count = Annotated[int, range(1 << 63)]  # a size, or a place in a file


def from_json(kind: type[T], value: Any) -> T:
    """Convert the result of `json.loads` to a type.

    Types are dataclasses, `tuple[T, ...]`, `Mapping[str, T]`, `T | None`, `Any`, `str`, `bool`, `int` (no
    bool), `float` (an int too), and `Annotated[int, range(...)]`. Fields that a dataclass does not have are
    ignored; those with a default may be missing.

    Raises:
        ValueError: names the fields and keys that lead to the first value that is missing or of another type.

    >>> from dataclasses import dataclass
    >>> Chunk = type("Chunk", (), {"__annotations__": {"at": Count, "shape": tuple[Count, ...]}})
    >>> Chunk = dataclass(frozen=True)(Chunk)
    >>> from_json(Mapping[str, Chunk], {"w": {"at": 8, "shape": [2, 3]}})
    {'w': Chunk(at=8, shape=(2, 3))}
    >>> from_json(Chunk, {"at": 8, "shape": [2, -3]})
    Traceback (most recent call last):
    ValueError: shape: -3 is not an int in range(0, 9223372036854775808)
    """
    return reader(kind)(value)


@cache
def reader(kind: Any) -> Read:
    """Return the function that reads a type.

    The function is made once for each type, since making it evaluates annotations: so a manifest of a million
    chunks is read fast.
    """
    # Types with arguments are told by their origin; the last line serves `str`, `bool` and `int`.
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        return _make_dataclass_reader(kind)
    if origin is Annotated:
        return lambda value: _check(value, type(value) is int and value in args[1], f"an int in {args[1]}")
    if origin is types.UnionType:
        inner = reader(args[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = reader(args[0])
        return lambda value: tuple(map(item, _check(value, type(value) is list, "a list")))
    if origin is Mapping:
        return _make_mapping_reader(reader(args[1]))
    if kind is float:
        return lambda value: float(_check(value, type(value) in (int, float), "a number"))
    return lambda value: _check(value, type(value) is kind, f"of type {kind.__name__}")


def _check(value: Any, fits: bool, expected: str) -> Any:
    """Return a value that fits, and refuse any other in words."""
    if not fits:
        raise ValueError(f"{value!r:.80} is not {expected}")
    return value


def _make_mapping_reader(item: Read) -> Read:
    """Return a function that reads objects of any keys, whose values `item` reads."""

    def read_items(value: Any) -> Any:
        items = {}
        for name, each in _check(value, type(value) is dict, "an object").items():
            try:
                items[name] = item(each)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return items

    return read_items


def _make_dataclass_reader(kind: Any) -> Read:
    """Return a function that reads objects as a dataclass, field by field."""
    hints = get_type_hints(kind, include_extras=True)
    readers = [  # the name of each field, what reads it, and whether it is required
        (f.name, reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    ]

    def read_fields(value: Any) -> Any:
        given = _check(value, type(value) is dict, "an object")
        arguments: dict[str, Any] = {}
        for name, read, required in readers:
            try:
                if name in given:
                    arguments[name] = read(given[name])
                elif required:
                    raise ValueError("is missing")
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return kind(**arguments)

    return read_fields
