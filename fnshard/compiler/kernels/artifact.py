"""Artifacts: a kernel that Inductor has compiled for the CPU, as data that another process loads.

An artifact is the Python wrapper that Inductor generated, cut to what a call needs, the shared objects of its
C++ kernels, and its constants. Loading it imports no part of Inductor unless the wrapper calls one.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.kernels.reuse import FirstResults

_count = itertools.count()


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel. `source` defines `call(args)`; `libraries`: shared objects; `entries`: by the name
    that it calls, the name of a library and of a module in it; `constants`: tensors, by the name that it
    reads; `results`: how many of its results are used, the first ones; None: all."""

    source: str
    libraries: Mapping[str, bytes]
    entries: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    results: int | None = None


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A boxed callable made from an artifact."""

    artifact: Artifact
    current_callable: Any  # as Inductor's own result names it; `analysis.footprint` reads it

    @property
    def constants(self) -> Mapping[str, Tensor]:
        return self.artifact.constants

    def __call__(self, args: list[Tensor]) -> Sequence[Tensor]:
        return self.current_callable(args)


def artifact_of(compiled: Any) -> Artifact | None:
    """What Inductor made, as data; None where it is more than a Python wrapper around C++ kernels."""
    if isinstance(compiled, FirstResults):
        whole = artifact_of(compiled.compiled)
        return None if whole is None else replace(whole, results=compiled.count)
    if isinstance(compiled, LoadedKernel):
        return compiled.artifact
    call = getattr(compiled, "current_callable", None)
    function, runner = getattr(call, "__func__", call), getattr(call, "__self__", None)
    if not isinstance(function, types.FunctionType) or getattr(runner, "partitions", None):
        return None
    made, path = function.__globals__, function.__globals__.get("__file__")
    if path is None or "async_compile" not in (text := Path(path).read_text(encoding="utf-8")):
        return None
    cut = _cut(ast.parse(text), made)
    if cut is None:
        return None
    body, kernels = cut
    libraries, entries = dict[str, bytes](), {}
    for name in kernels:
        spec = getattr(getattr(made.get(name), "__self__", None), "__spec__", None)
        if spec is None or not str(spec.origin).endswith(".so"):
            return None
        library, _, entry = spec.name.rpartition(".")
        libraries[library] = libraries.get(library) or Path(spec.origin).read_bytes()
        entries[name] = library, entry
    constants = dict(getattr(compiled, "constants", None) or {})
    if not all(isinstance(v, Tensor) and v.device.type == "cpu" for v in constants.values()):
        return None
    return Artifact(ast.unparse(ast.Module(body, [])), libraries, entries, constants)


def load_artifact(artifact: Artifact) -> LoadedKernel | FirstResults:
    """The kernel, ready to run; `artifact` is trusted: this executes it."""
    if artifact.results is not None:
        return FirstResults(load_artifact(replace(artifact, results=None)), artifact.results)
    names: dict[str, Any] = {"__name__": "fnshard.kernel"}
    with tempfile.TemporaryDirectory(prefix="fnshard-kernel-") as folder:
        paths = {name: Path(folder) / f"{i}.so" for i, name in enumerate(artifact.libraries)}
        for name, data in artifact.libraries.items():
            paths[name].write_bytes(data)
        for name, (library, entry) in artifact.entries.items():
            names[name] = entry_of(paths[library], f"fnshard_{next(_count)}", entry)
    exec(compile(artifact.source, "<fnshard kernel>", "exec"), names)
    names.update(artifact.constants)
    return LoadedKernel(artifact, names["call"])


def entry_of(path: Path, library: str, entry: str) -> Any:
    """A function of a shared object, that of its module `entry`, which is known as `library.entry` then."""
    guards = torch._C._dynamo.guards
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        guards._torchinductor_pyobject_tensor_data_ptr
    )
    spec = importlib.util.spec_from_file_location(f"{library}.{entry}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, entry)


def _cut(tree: ast.Module, made: Mapping[str, Any]) -> tuple[list[ast.stmt], list[str]] | None:
    """The statements that `call` needs, and the names of C++ kernels; None for kernels of another kind."""
    needed, kept, kernels = {"call"}, list[ast.stmt](), list[str]()
    for statement in reversed(tree.body):
        bound = _bound(statement)
        if not bound & needed:
            continue
        value = getattr(statement, "value", None)
        made_by = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if made_by.startswith("async_compile."):
            if made_by != "async_compile.cpp_pybinding":
                return None
            kernels += bound
            continue
        kept.append(_imported(statement, made, tree) if isinstance(statement, ast.ImportFrom) else statement)
        needed |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    return kept[::-1], kernels


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).partition(".")[0] for a in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _imported(statement: ast.ImportFrom, made: Mapping[str, Any], tree: ast.Module) -> ast.stmt:
    """An import, or for `extern_kernels` that are torch's own functions a class of these."""
    if [a.name for a in statement.names] != ["extern_kernels"]:
        return statement
    calls = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "extern_kernels"
    }
    extern = made["extern_kernels"]
    if not all(getattr(extern, name) is getattr(torch, name, None) for name in calls):
        imports = "from torch._inductor import compile_fx\n"  # registers all of them
        return ast.parse(f"if True:\n  {imports}  {ast.unparse(statement)}").body[0]
    text = "".join(f"\n  {name} = staticmethod(torch.{name})" for name in sorted(calls))
    return ast.parse(f"class extern_kernels:{text}").body[0]
