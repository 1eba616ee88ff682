"""Libraries: the C++ kernels of many graphs, compiled as few shared objects.

Inductor gives each C++ kernel to the compiler by itself, and most of what such a run does is the same for all
of them: headers, their templates, the linker. Here kernels share a translation unit, each in a namespace of
its own, and are Python modules of one shared object.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fnshard.compiler.kernels.artifact import entry_of

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_KERNEL = re.compile(r"\bkernel(?=\s*\()")  # Inductor's name of each
_HOISTED = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n"
# Torch's tracers share state of the process, and Inductor has some: trace or compile, never both at once.
TRACING = threading.RLock()


@dataclass(frozen=True, eq=False)
class _Pending:
    """A C++ kernel that is to be compiled, and the generated module that calls it."""

    argument_types: tuple[str, ...]
    source: str
    scope: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.argument_types, self.source

    def __call__(self, *args: Any) -> Any:
        """By itself, where what was generated behind it has failed: Inductor keeps the module."""
        return _compile([self])[self.key](*args)


@contextmanager
def compiled_together(options: Mapping[str, Any]) -> Iterator[None]:
    """C++ kernels that Inductor generates in here, in this thread, are compiled when it is left.

    Args:
        options: Inductor's, while they are compiled.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    pending: list[_Pending] = []
    owner = threading.get_ident()

    def collected(self: Any, argument_types: Sequence[str], source: str) -> Any:
        if threading.get_ident() != owner:
            return alone(self, argument_types, source)
        pending.append(_Pending(tuple(argument_types), source, sys._getframe(1).f_globals))
        return pending[-1]

    with TRACING:
        alone = AsyncCompile.cpp_pybinding
        AsyncCompile.cpp_pybinding = collected
        try:
            yield
        finally:
            AsyncCompile.cpp_pybinding = alone
        with config.patch(dict(options)):
            _compile(pending)


def _compile(pending: Sequence[_Pending]) -> dict[Any, Any]:
    """Compile the kernels, by key, and put them where they are called."""
    from torch._inductor.async_compile import get_compile_threads

    distinct = {each.key: each for each in pending}
    threads = max(1, get_compile_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    groups: list[list[_Pending]] = [[] for _ in range(min(threads, len(distinct)))]
    for each in sorted(distinct.values(), key=lambda p: -len(p.source)):
        min(groups, key=lambda group: sum(len(p.source) for p in group)).append(each)
    made = dict(kernel for group in _built(groups) for kernel in group)
    for each in pending:
        each.scope.update({n: made[each.key] for n, v in each.scope.items() if v is each})
    return made


def _built(groups: Sequence[Sequence[_Pending]]) -> list[list[tuple[Any, Any]]]:
    """Each group as one shared object: its kernels by key."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if not groups:
        return []
    with ThreadPoolExecutor(len(groups)) as pool:
        loads = []
        for group in groups:
            first = type("Library", (CppPythonBindingsCodeCache,), {"entry_function": _name(0)})
            loads.append(first.load_async(_unit(group), submit_fn=pool.submit))
        libraries = [Path(load().__spec__.origin) for load in loads]
    return [
        [(each.key, entry_of(path, path.stem, _name(i))) for i, each in enumerate(group)]
        for path, group in zip(libraries, groups, strict=True)
    ]


def _name(number: int) -> str:
    return f"kernel_{number}"


def _unit(group: Sequence[_Pending]) -> str:
    """The translation unit of some kernels."""
    parts = [_bound(each, _name(number)) for number, each in enumerate(group)]
    includes = dict.fromkeys(line.strip() for part in parts for line in _INCLUDE.findall(part))
    spaces = [
        f"namespace fnshard_{number} {{\n{_INCLUDE.sub('', part)}\n}}\n" for number, part in enumerate(parts)
    ]
    return _HOISTED + "\n".join([*includes, *spaces])


def _bound(kernel: _Pending, name: str) -> str:
    """A kernel under another name, with Inductor's Python binding."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    found: list[str] = []

    def load_async(cls: Any, code: str, *_: Any, **__: Any) -> Any:
        found.append(code)

    call = f"{name}({{}}); Py_RETURN_NONE;"
    own = {"entry_function": name, "call_entry_function": call, "load_async": classmethod(load_async)}
    binding = type("Binding", (CppPythonBindingsCodeCache,), own)
    binding.load_pybinding_async(list(kernel.argument_types), _KERNEL.sub(name, kernel.source))
    return found[0]


@cache
def vector_settings() -> dict[str, bool]:
    """Options of Inductor that save it trying most vector instructions, by a compiler run and a program each:
    torch itself was built with those of this CPU and runs with them, and the compiler has their flags."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.cpp_builder import get_cpp_compiler

    here, used = cpu_vec_isa.x86_isa_checker(), torch.backends.cpu.get_cpu_capability().lower()
    if config.cpp.vec_isa_ok is not None or used not in here or (used == "avx2" and "avx512" in here):
        return {}
    sets = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in here]
    flags = [flag for isa in sets for flag in isa.build_arch_flags().split()]
    try:
        command = [get_cpp_compiler(), *flags, "-E", "-x", "c++", os.devnull]
        subprocess.run(command, check=True, capture_output=True)
    except Exception:  # no compiler, or an old one: Inductor's own trials find the set that it has
        return {}
    return {"cpp.vec_isa_ok": True}
