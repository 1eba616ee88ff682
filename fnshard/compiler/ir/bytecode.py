"""Bytecode: the names that some code spells, and what it does with them."""

from __future__ import annotations

import dis
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

_CALLS = frozenset({"PRECALL", "CALL", "PUSH_NULL", "CACHE"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_LOADS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_ATTR", "IMPORT_FROM"}
)
_STORES = frozenset({"STORE_FAST", "STORE_DEREF"})
# What reads no more than one key, behind a constant: `d["n"] += 1` copies both, `d is None` reads none.
_BY_KEY = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "COPY", "IS_OP"})
_OF_DICTS = frozenset({*vars(dict), *vars(OrderedDict), *vars(Counter)}) - {"setdefault"}


@lru_cache(maxsize=4096)
def mentioned(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """The globals that some code names; the attributes, and the strings that may be keys; these alone; the
    modules that it imports."""
    every = list(codes_in(code))
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    globals_named = {i.argval for c in every for i in dis.get_instructions(c) if i.opname in loads}
    strings = {s for c in every for s in c.co_consts if isinstance(s, str) and len(s) < 64}
    names = {n for c in every for n in c.co_names} | strings
    names -= frozenset() if any(map(_lists_all, every)) else {"__dict__"}
    imported = {i.argval for c in every for i in dis.get_instructions(c) if i.opname == "IMPORT_NAME"}
    return frozenset(globals_named), frozenset(names), frozenset(strings), frozenset(imported)


def _lists_all(code: CodeType) -> bool:
    """Whether it may do more with some `__dict__` than `__dict__["name"]` and `__dict__.get("name")`."""
    if "__dict__" not in (*code.co_names, *code.co_consts):
        return False
    done = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in _CALLS]
    done += [("", ""), ("", "")]
    return any(
        value == "__dict__"
        and not (first in ("LOAD_ATTR", "LOAD_METHOD") and name == "get" and behind == "LOAD_CONST")
        and not (first == "LOAD_CONST" and behind == "BINARY_SUBSCR")
        for (_, value), (first, name), (behind, _) in zip(done, done[1:], done[2:], strict=False)
    )


@lru_cache(maxsize=4096)
def read_whole(code: CodeType) -> frozenset[str]:
    """Variables, attributes and keys whose value some code may read otherwise than by a key that it spells:
    `d.values()`, `d[key]`, `{**d}`, `f(d)`.

    >>> sorted(read_whole((lambda: (a["x"]["y"], "y" in b, c.items(), d[e], f["g"]["h"])).__code__))
    ['c', 'd', 'e', 'h', 'y']
    """
    whole, assigned = set[str](), list[tuple[str, str]]()
    for each in codes_in(code):
        done = [("", ""), *_operations(each), ("", ""), ("", "")]
        windows = zip(done, done[1:], done[2:], done[3:], strict=False)
        for (before, key), (op, name), (first, value), (behind, last) in windows:
            is_key = (before, op) == ("LOAD_CONST", "BINARY_SUBSCR") and isinstance(key, str)
            found = key if is_key else name
            by_key = (first == "LOAD_CONST" and behind in _BY_KEY) or first.endswith("NONE")
            by_key |= first == "CONTAINS_OP" and (
                before == "LOAD_CONST" or op in ("LOAD_ATTR", "BINARY_SUBSCR")
            )
            if op not in _LOADS and found is name:
                continue
            if first in _STORES:
                assigned.append((found, value))
            elif first in _ATTRIBUTES and value in _OF_DICTS:
                whole.add(last if (value, behind) == ("get", "LOAD_CONST") else found)
            elif first not in _ATTRIBUTES and not by_key:
                whole.add(found)
    for name, variable in reversed(assigned):
        if variable in whole:
            whole.add(name)
    return frozenset(whole)


def _operations(code: CodeType) -> Iterator[tuple[str, Any]]:
    """(name, argument) of each, as Python 3.11 has them: 3.13 has two in one, 3.14 other names."""
    for each in dis.get_instructions(code):
        name = each.opname.replace("_BORROW", "").replace("LOAD_SMALL_INT", "LOAD_CONST")
        if isinstance(each.argval, tuple) and name.count("_FAST") == 2:
            first, second = name.split("_FAST")[:2]
            yield f"{first}_FAST", each.argval[0]
            yield f"{second.lstrip('_')}_FAST", each.argval[1]
        elif (name, each.argrepr) == ("BINARY_OP", "[]"):
            yield "BINARY_SUBSCR", None
        elif name not in _CALLS - {"CALL"}:
            yield name, each.argval


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Some code, and that of all functions and classes which it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
