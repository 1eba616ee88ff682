"""Names of values: what they print, what they know, and that nobody else takes the texts apart."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

import fnshard
from fnshard.compiler.ir.values import Kind, ValueName

SHARD = ValueName(Kind.STORED, "l.0.w#1")


@pytest.mark.parametrize(
    ("name", "text", "path", "leaf", "original"),
    [
        (SHARD, "s:l.0.w#1", "l.0.w#1", "l.0.w#1", SHARD),
        (SHARD.on_host(), "h:s:l.0.w#1", "l.0.w#1", "l.0.w#1", SHARD),
        (SHARD.on_host().loaded(3), "t:s:l.0.w#1#3", "l.0.w#1", "l.0.w#1", SHARD),
        (ValueName(Kind.GATHERED, "w", "#f0.2"), "p:w#f0.2", "w", "w", "p:w#f0.2"),
        (
            ValueName(Kind.REDUCED, "reduce/l", "#0").of("#0."),
            "r:reduce/l#0.",
            "reduce/l",
            "",
            "r:reduce/l#0.",
        ),
        (ValueName(Kind.VALUE, "mul_3", "#1").on_host(), "h:mul_3#1", "mul_3", "", "mul_3#1"),
    ],
)
def test_a_name_prints_its_parts_and_knows_them(name, text, path, leaf, original) -> None:
    assert (name, name.path, name.leaf, name.original) == (text, path, leaf, original)
    assert hash(name) == hash(text) and {text: 1}[name] == 1
    twin = copy.deepcopy(name)
    assert (twin, twin.kind, twin.source) == (name, name.kind, name.source)


def test_copies_are_known_by_what_they_are_of() -> None:
    assert SHARD.is_state and not SHARD.on_host().is_state
    assert SHARD.on_host().is_copy(Kind.HOST, Kind.STORED) and not SHARD.is_copy(Kind.HOST, Kind.STORED)
    assert not SHARD.on_host().is_copy(Kind.HOST, Kind.REDUCED)


def test_only_this_module_knows_the_prefixes() -> None:
    """Whoever needs a name's kind asks it; a prefix in another module is a second grammar."""
    kinds = "|".join(k for k in map(str, Kind) if len(k) > 1)
    prefix = re.compile(rf"""(?:\bf|(?<!\w))["'](t:|h:)?({kinds})(\{{|["'])""")
    root = Path(fnshard.__file__).parent
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in root.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if prefix.search(line) and path.name != "values.py"
    ]
    assert found == []
