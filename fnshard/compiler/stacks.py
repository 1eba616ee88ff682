"""Stacks: while a function is traced, each node's line in the user's code."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from fnshard import errors

_LIBRARIES = tuple(str(Path(module.__file__).parent) + os.sep for module in (torch, errors))


class _Stacks(TorchFunctionMode):
    """Notes the caller of every torch function. (The tracer's own stacks are of functions named forward.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fx_traceback.set_stack_trace([user_line()])
        return func(*args, **(kwargs or {}))


@contextmanager
def kept() -> Iterator[None]:
    """Traces in here note `file:line  code` as their nodes' `meta["stack_trace"]`."""
    with fx_traceback.preserve_node_meta(), _Stacks():
        yield


def user_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}" + (f"  {text}" if text else "")
        frame = frame.f_back
    return ""
