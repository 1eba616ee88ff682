"""Execution path: which instructions of users' code run, so that two runs can be compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fnshard.compiler.ir.reachable import library
from fnshard.compiler.ir.source_lines import is_users

# What is Python's own of a tensor: the key of a dict, a text. It differs by identity, not by value.
_IDENTITY = {f.__code__ for f in (torch.Tensor.__hash__, torch.Tensor.__repr__, torch.Tensor.__format__)}


@dataclass(eq=False)
class ExecutionPath:
    """A hash of the instructions so far: branches on types and values lead to others."""

    value: int = 0

    def add(self, frame: FrameType) -> None:
        """One more."""
        code = frame.f_code
        self.value = hash((self.value, code.co_filename, code.co_firstlineno, frame.f_lasti))


_path: ContextVar[ExecutionPath | None] = ContextVar("fnshard_execution_path", default=None)


@contextmanager
def execution_path() -> Iterator[ExecutionPath]:
    """The path of `fn` in the traces inside."""
    token = _path.set(path := ExecutionPath())
    try:
        yield path
    finally:
        _path.reset(token)


@contextmanager
def followed() -> Iterator[None]:
    """What runs inside, on this thread, adds to the path, if there is one; a debugger does not see it."""
    path, known = _path.get(), dict[tuple[str, str, Any], bool]()
    if path is None:
        yield
        return

    def is_users_own(frame: FrameType) -> bool:
        key = frame.f_code.co_filename, frame.f_code.co_name, frame.f_globals.get("__name__")
        if key not in known:
            known[key] = is_users(*key[:2]) and not library(key[2])
        return known[key]

    def instruction(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            path.add(frame)
        return instruction

    def call(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code in _IDENTITY and frame.f_back is not None and is_users_own(frame.f_back):
            path.add(frame)
        if not is_users_own(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
