"""JSON as dataclasses: what is read comes back, what is not of its type is refused with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from fnshard.runtime.files.json_reader import Count, JsonError, from_json


@dataclass(frozen=True)
class Inner:
    at: Count
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_name: Mapping[str, Inner]
    rows: list[list[int]]
    kind: Literal["nan", "inf"]
    maybe: Inner | None
    number: float
    on: bool
    anything: Any


VALUE = Outer(Inner(3, ("a",)), {"x": Inner(0)}, [[1], []], "inf", None, 1.5, True, {"a": [None]})
PLAIN = json.loads(json.dumps(asdict(VALUE)))


def test_what_was_written_is_read() -> None:
    assert from_json(Outer, PLAIN) == VALUE
    assert from_json(Outer, PLAIN | {"maybe": {"at": 1}, "more": 1}).maybe == Inner(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {"at": -1}}, r"^inner\.at: -1 is not in range"),
        ({"inner": {"at": True}}, r"^inner\.at: True is not an int"),
        ({"inner": {}}, r"^inner\.at: is missing"),
        ({"by_name": {"x": {"at": 1, "names": ["a", 2]}}}, r"^by_name\.x\.names\[1\]: 2 is not a string"),
        ({"rows": [[1], [1.5]]}, r"^rows\[1\]\[0\]: 1.5 is not an int"),
        ({"kind": "big"}, r"^kind: str is not one of 'nan', 'inf'"),
        ({"maybe": 3}, r"^maybe: 3 is not of "),
        ({"number": "1"}, r"^number: str is not a number"),
        ({"on": 1}, r"^on: 1 is not a bool"),
    ],
)
def test_what_is_of_another_type_is_named(change: Any, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        from_json(Outer, PLAIN | change)
