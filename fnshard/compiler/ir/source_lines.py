"""Find the line of the user's code at which a node was traced, or which an error left."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from fnshard import errors

_LIBRARIES = tuple(str(Path(module.__file__).parent) + os.sep for module in (torch, errors))
_GENERATED = ("<frozen ", "<eval_with_key>", "<attrs ", "<__array_function__")
_PYTHON, _INSTALLED = sysconfig.get_paths()["stdlib"] + os.sep, f"{os.sep}site-packages{os.sep}"


class _Stacks(TorchFunctionMode):
    """A mode that notes the user's line of every torch function; the tracer itself notes forwards alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "from_node" not in fx_traceback.get_current_meta():  # a node that is run again keeps its own line
            fx_traceback.set_stack_trace([user_line()])
        return func(*args, **(kwargs or {}))


@contextmanager
def record() -> Iterator[None]:
    """Have traces in the block note `file:line  code` as `meta["stack_trace"]` of their nodes."""
    with fx_traceback.preserve_node_meta(), _Stacks():
        yield


def user_line() -> str:
    """Return the innermost line on the stack that is neither torch's nor fnshard's; "" if there is none."""
    stack = ((frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(sys._getframe(1)))
    return next((_format_line(file, number) for file, number in stack if is_users(file)), "")


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error came through; "" if there is none.

    If an installed package has that line, add the innermost one outside of installed packages.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename, f.name)]
    not_installed = [f for f in frames if _INSTALLED not in f.filename]
    if not frames:
        return ""
    place = _format_line(frames[-1].filename, frames[-1].lineno)
    if not_installed and not_installed[-1] is not frames[-1]:
        caller = not_installed[-1]
        place += f", called at {_format_line(caller.filename, caller.lineno)}"
    return place


def call_into(package: str, error: BaseException) -> str:
    """Return the function of a package of torch from which an error reached the user's code; "" if none."""
    frames = traceback.extract_tb(error.__traceback__)
    last_of_user = max((i for i, f in enumerate(frames, 1) if is_users(f.filename, f.name)), default=0)
    folder = f"{_LIBRARIES[0]}{package}/"
    inside = [f.name for f in frames[last_of_user:] if f.filename.startswith(folder)]
    return next((name for name in inside if name != "wrapper"), "")


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return an error's traceback through the user's code alone; the whole if it came through none.

    An error of fnshard's that came through none has no traceback.
    """
    entries, entry = [], error.__traceback__
    while entry is not None:
        if is_users(entry.tb_frame.f_code.co_filename, entry.tb_frame.f_code.co_name):
            entries.append(entry)
        entry = entry.tb_next

    # A traceback is a linked list, from the outermost frame to the innermost.
    kept: TracebackType | None = None
    for each in reversed(entries):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or (None if isinstance(error, errors.FnshardError) else error.__traceback__)


def is_users(file: str, name: str = "") -> bool:
    """Return whether code is the user's: not torch's, fnshard's, Python's or Cython's, and not generated."""
    return (
        not file.startswith((*_GENERATED, *_LIBRARIES))
        and (file, name) != ("<string>", "<lambda>")  # make_fx wraps what it traces in one
        and not file.endswith((".pyx", "typing_extensions.py"))  # the latter wraps what is deprecated
        and (not file.startswith(_PYTHON) or _INSTALLED in file)
    )


def _format_line(file: str, number: int | None) -> str:
    """Return `file:number  code`."""
    text = linecache.getline(file, number or 0).strip()
    return f"{file}:{number}" + (f"  {text}" if text else "")
