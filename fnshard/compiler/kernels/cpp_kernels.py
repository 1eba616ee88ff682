"""C++ kernels: those of a graph, compiled as one translation unit.

Inductor gives each C++ kernel to the compiler by itself, and four fifths of such a run are the same for all:
the templates of its headers. Here the kernels of a graph share a unit, each in a namespace of its own
and as a Python module of one shared object. Units are compiled by Inductor's threads while the next graph is
lowered, and kept in Inductor's cache by their text, as its own are.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

KERNELS = 16  # of one unit at most: larger graphs use several processors
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
NAME = re.compile(r"\bkernel(?=\s*\()")  # Inductor's, of each
HEADER = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n"


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A C++ kernel as Inductor generates it, and the module that calls it by a name there."""

    argument_types: list[str]
    source: str
    module: dict[str, Any]


@contextmanager
def compiled_together() -> Iterator[Callable[[], None]]:
    """C++ kernels that Inductor generates within become few shared objects; others' are left to Inductor.

    Yields:
        What waits until they are compiled, and puts them into the modules that call them.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    kernels: list[_Kernel] = []
    loads: list[Callable[[], None]] = []

    def collect(self: Any, argument_types: list[str], source: str) -> Any:
        if threading.get_ident() != owner:  # a torch.compile of the user's, at the same time
            return alone(self, argument_types, source)
        kernels.append(_Kernel(argument_types, source, sys._getframe(1).f_globals))
        return kernels[-1]

    alone, owner = AsyncCompile.cpp_pybinding, threading.get_ident()
    with mock.patch.object(AsyncCompile, "cpp_pybinding", collect if get_compile_threads() > 1 else alone):
        yield lambda: [load() for load in loads] and None
    loads.extend(_start(kernels[i : i + KERNELS]) for i in range(0, len(kernels), KERNELS))


def _start(kernels: list[_Kernel]) -> Callable[[], None]:
    """Start to compile a unit; what is returned waits for it."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    parts = [_bound(kernel, f"kernel_{number}") for number, kernel in enumerate(kernels)]
    includes = dict.fromkeys(line.strip() for part in parts for line in INCLUDE.findall(part))
    spaces = [f"namespace n{number} {{\n{INCLUDE.sub('', part)}\n}}\n" for number, part in enumerate(parts)]
    unit = HEADER + "\n".join([*includes, *spaces])
    library = type("Library", (CppPythonBindingsCodeCache,), {"entry_function": "kernel_0"})
    compiled = library.load_async(unit, submit_fn=AsyncCompile.submit)

    def load() -> None:
        path = Path(compiled().__spec__.origin)
        for number, kernel in enumerate(kernels):
            entry = _entry(path, f"kernel_{number}")
            names = [name for name, value in kernel.module.items() if value is kernel]
            kernel.module.update(dict.fromkeys(names, entry))

    return load


def _bound(kernel: _Kernel, name: str) -> str:
    """The source of a kernel under another name, with Inductor's Python binding."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    sources: list[str] = []
    own = {
        "entry_function": name,
        "call_entry_function": f"{name}({{}}); Py_RETURN_NONE;",
        "load_async": classmethod(lambda _, source, *__, **___: sources.append(source)),
    }
    binding = type("Binding", (CppPythonBindingsCodeCache,), own)
    binding.load_pybinding_async(kernel.argument_types, NAME.sub(name, kernel.source))
    return sources[0]


def _entry(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.stem}.{name}", path)
    module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:
        spec.loader.exec_module(module)
    return getattr(module, name)
