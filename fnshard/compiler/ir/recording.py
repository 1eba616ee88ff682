"""Recording: what users' code runs and reads while it is traced, as far as its own text does not tell."""

from __future__ import annotations

import builtins
import cProfile
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import CodeType
from typing import Any
from unittest import mock

from fnshard.compiler.ir.reachable import library
from fnshard.compiler.ir.source_lines import is_users

_ENVIRON = type(os.environ)


@dataclass(frozen=True)
class Ran:
    """What a trace has run and read, as far as the code of `fn` does not tell.

    Args:
        executed: the code that ran; empty where nobody knows, and all code counts that `fn` can reach.
        computed: attributes that it read, or methods that ran, by names which it does not spell.
        variables: those of the environment that it read; "" where it listed all.
    """

    executed: Collection[CodeType] = ()
    computed: Collection[str] = ()
    variables: Collection[str] = ()


@contextmanager
def recorded() -> Iterator[Ran]:
    """What users' code runs and reads inside: complete behind the `with`."""
    with _executed_code() as executed, _computed_names() as computed, _read_variables() as variables:
        yield Ran(executed, computed, variables)
    computed.update(c.co_name for c in executed if is_users(c.co_filename))  # methods that operators call


@contextmanager
def _computed_names() -> Iterator[set[str]]:
    """Attributes that users' code, on this thread, reads inside by `getattr` and `vars`.

    Their replacements, the whole process's, bear their names: `pickle` looks up what a method reduces to.
    """
    names: set[str] = set()
    read, list_all = getattr, vars
    thread: int | None = threading.get_ident()

    def is_theirs(module: str) -> bool:
        return threading.get_ident() == thread and (module == "dataclasses" or not library(module))

    @wraps(read)
    def reading(each: Any, name: str, *default: Any) -> Any:
        if is_theirs(sys._getframe(1).f_globals.get("__name__", "")):
            names.add(name)
        return read(each, name, *default)

    @wraps(list_all)
    def listing(*each: Any) -> Any:
        caller = sys._getframe(1)
        found = list_all(*each) if each else caller.f_locals
        if each and is_theirs(caller.f_globals.get("__name__", "")):
            names.update(found)
        return found

    with mock.patch.object(builtins, "getattr", reading), mock.patch.object(builtins, "vars", listing):
        try:
            yield names
        finally:
            thread = None  # what was imported by its name while tracing stays patched


@contextmanager
def _read_variables() -> Iterator[set[str]]:
    """Variables of the environment that users' code, on this thread, reads inside."""
    names: set[str] = set()
    thread = threading.get_ident()
    read, list_all = _ENVIRON.__getitem__, _ENVIRON.__iter__

    def note(name: str) -> None:
        if threading.get_ident() != thread:
            return
        frame: Any = sys._getframe(2)
        while frame.f_globals.get("__name__") in ("os", "collections.abc"):  # of `os.getenv`, `in`
            frame = frame.f_back
        if not library(frame.f_globals.get("__name__", "")):
            names.add(name)

    @wraps(read)
    def reading(environ: Any, name: Any) -> Any:
        note(os.fsdecode(name))
        return read(environ, name)

    @wraps(list_all)
    def listing(environ: Any) -> Any:
        note("")
        return list_all(environ)

    with (
        mock.patch.object(_ENVIRON, "__getitem__", reading), mock.patch.object(_ENVIRON, "__iter__", listing)
    ):  # fmt: skip
        yield names


@contextmanager
def _executed_code() -> Iterator[set[CodeType]]:
    """The code of the Python functions called inside; empty where a profiler runs already."""
    codes: set[CodeType] = set()
    if sys.getprofile() is not None:
        yield codes
        return
    profiler = cProfile.Profile(builtins=False)
    try:
        profiler.enable(subcalls=False, builtins=False)
    except ValueError:  # another tool profiles (Python 3.12 tells so this way)
        yield codes
        return
    try:
        yield codes
    finally:
        profiler.disable()
        codes.update(e.code for e in profiler.getstats() if isinstance(e.code, CodeType))
