"""Machine code: keep what Inductor makes of a graph for the CPU in files that run without Inductor.

Inductor's own cache keeps it, too, but to ask that cache one must import Inductor, which takes longer than
importing torch. A file has the Python text of the function that calls the kernels, without the imports that
it does not use, and the names of the shared objects, which lie next to it. The file is found by a hash of the
graph with all shapes, the options, the versions and the processor, in the folder of `store`, which belongs to
this user alone. It is run as the files of Inductor's cache are; nothing is unpickled. What cannot run by
itself is left to Inductor.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import platform
import symtable
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fnshard.compiler.kernels import store

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]
UNUSED = ("get_args", "benchmark_compiled_module")  # functions of a generated module that nobody calls
COPIED = "assert_tensor_metadata"  # a check of Inductor's, in Python, that needs nothing but torch
PROCESSOR = ("vendor", "model", "flags", "CPU", "Features")  # prefixes of /proc/cpuinfo's lines, x86 and Arm
CONSTANTS = ("constants", "torchbind_constants", "frozen_param_names")  # what Inductor puts into a module
SETTING = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # it tells a library where torch reads a tensor's address


class Entry(NamedTuple):
    """A C++ kernel: a Python module in a shared object."""

    library: Path
    name: str

    def load(self) -> Any:
        """Return the function that calls the kernel."""
        module_name = f"{self.library.stem}.{self.name}"
        if module_name not in sys.modules:
            os.environ[SETTING] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)
            spec = importlib.util.spec_from_file_location(module_name, self.library)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[module_name] = module
        return getattr(sys.modules[module_name], self.name)


def key_of(module: fx.GraphModule, options: Mapping[str, Any], is_backward: bool) -> str | None:
    """Return a text that tells compiled graphs apart; None for one that must not be kept."""
    if store.find_folder() is None:
        return None
    try:
        rows = store.encode_graph(module.graph, ("val",))
        machine = [_describe_processor(), torch.get_num_threads(), os.environ.get("CXX"), sys.version]
        text = json.dumps([rows, sorted(options.items()), is_backward, machine, store.settings()])
    except (store.NotPortableError, TypeError):  # an option may be a function
        return None
    return store.MACHINE_CODE + hashlib.sha256(text.encode()).hexdigest()


@cache
def _describe_processor() -> str:
    """Return the model of the processor and its instructions, for which a compiler generates code."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        first_core = itertools.takewhile(str.strip, file)  # an empty line follows each core
        text = "".join(line for line in first_core if line.startswith(PROCESSOR))
        if text:
            return text
    return f"{platform.machine()} {platform.processor()}"


def recall(key: str) -> Boxed | None:
    """Return what was kept under a key, ready to be called."""
    folder = store.find_folder()
    body = store.read_file(folder, key)
    if body is None:
        return None
    try:
        values = json.loads(zlib.decompress(body))

        # Check each library once: its name is the hash of what it holds.
        for name in {library for library, _ in values["entries"].values()}:
            path = folder / name
            if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem:
                return None
            with suppress(OSError):  # a read-only folder keeps its times
                os.utime(path)

        # Run the module's text, with the C++ kernels as its globals.
        module = {"__name__": f"fnshard.{key}"}
        for name, (library, entry) in values["entries"].items():
            module[name] = Entry(folder / library, entry).load()
        exec(compile(values["text"], f"<{key}>", "exec"), module)
        return module["call"]
    except Exception:  # a library is gone, or this machine does not load it
        return None


def keep(key: str, compiled: Any, entries: Mapping[str, Entry]) -> None:
    """Keep a compiled graph, if it can run without Inductor.

    Args:
        compiled: Inductor's callable.
        entries: its C++ kernels, by the names that its module has for them.
    """
    folder, source = store.find_folder(), _find_source(compiled)
    if folder is None or source is None:
        return
    text = _strip_inductor(source, set(entries))
    if text is None:
        return

    # Copy the shared objects under the hash of what they hold, and write the file that names them last.
    try:
        bodies = {entry.library: entry.library.read_bytes() for entry in entries.values()}
    except OSError:  # somebody has emptied Inductor's cache
        return
    names = {path: f"{hashlib.sha256(body).hexdigest()}.so" for path, body in bodies.items()}
    for path, body in bodies.items():
        store.write_file(folder, names[path], body)
    rows = {name: [names[entry.library], entry.name] for name, entry in entries.items()}
    values = json.dumps({"text": text, "entries": rows})
    store.write_file(folder, key, store.seal(zlib.compress(values.encode(), 1)))


def _find_source(compiled: Any) -> str | None:
    """Return the text of a module that Inductor has generated; None if a call needs more than that module."""
    call = getattr(compiled, "current_callable", None)
    function = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType) or set(getattr(compiled, "device_types", ())) != {"cpu"}:
        return None

    # Leave out modules that hold constants or partitions, and functions that Inductor has wrapped.
    module = function.__globals__
    constants = [getattr(compiled, name, None) for name in CONSTANTS]
    partitions = getattr(module.get("runner"), "partitions", None)
    if module.get("call") != call or any(constants) or partitions:
        return None
    try:
        return Path(module["__file__"]).read_text(encoding="utf-8")
    except (KeyError, OSError):
        return None


def _strip_inductor(source: str, kernels: set[str]) -> str | None:
    """Return a generated module without what imports or compiles; None if it needs more of Inductor.

    Args:
        kernels: the names of C++ kernels, which are given to the module before it runs.
    """
    # Leave out the main block, functions that nobody calls, and what compiles kernels.
    body: list[ast.stmt] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) or getattr(node, "name", None) in UNUSED:
            continue
        if "async_compile" not in _find_names(node):
            body.append(node)
        elif isinstance(node, ast.Assign) and not {t.id for t in node.targets} <= kernels | {"async_compile"}:
            return None  # a kernel that is no C++

    # Keep the imports that are used, with substitutes for two of Inductor's that need nothing but torch.
    used = set[str]().union(*(_find_names(n) for n in body if not isinstance(n, ast.Import | ast.ImportFrom)))
    for node in [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]:
        node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
        names, index = {alias.name for alias in node.names}, body.index(node)
        if "extern_kernels" in names:
            if not _calls_torch_alone(body):
                return None
            body[index] = ast.parse("import torch as extern_kernels").body[0]
        elif names == {COPIED}:
            function = getattr(importlib.import_module(node.module), COPIED)
            body[index] = ast.parse(inspect.getsource(function)).body[0]
        elif not node.names:
            body.remove(node)

    # Refuse a text that reads anything of Inductor, or a name that nothing defines.
    text = "from __future__ import annotations\n" + ast.unparse(ast.Module(body, []))
    if "torch._inductor" in text or "torch._dynamo" in text:
        return None
    return text if _find_globals(text) <= kernels | vars(builtins).keys() else None


def _find_globals(text: str) -> set[str]:
    """Return the global names that functions of a module read and nothing in the module defines."""
    module = symtable.symtable(text, "<kept>", "exec")
    defined = {each.get_name() for each in module.get_symbols() if each.is_assigned() or each.is_imported()}
    tables, read = [module], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return read - defined


def _find_names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _calls_torch_alone(body: Sequence[ast.stmt]) -> bool:
    """Return whether each `extern_kernels.name` that a module calls is `torch.name`."""
    from torch._inductor.select_algorithm import extern_kernels

    attributes = [a for node in body for a in ast.walk(node) if isinstance(a, ast.Attribute)]
    called = {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == "extern_kernels"}
    return all(getattr(torch, name, None) is getattr(extern_kernels, name) for name in called)
