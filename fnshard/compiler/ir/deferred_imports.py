"""Deferred imports: Dynamo and Inductor are imported when something of them is used.

Torch's tracer and its fake tensors import both packages for a few settings, and that takes longer than the
import of torch. Where all kernels of a step come from files, nothing else of the two is used. `defer` puts
stand-ins in their place that have these settings, and import the real packages when anything else is asked
for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

from fnshard.errors import SpecError

# The modules of each package that are imported at once: they import nothing else of it.
LIGHT = {
    "torch._dynamo": ("config",),
    "torch._inductor": ("config", "compiler_bisector", "fx_passes.dedupe_symint_uses"),
}
T = TypeVar("T")
_deferred = set[str]()
# Names that do not load a package: torch looks for this one, in C++, whenever it shows lines of code.
ABSENT = ("codecache",)
# Modules that Dynamo imports, and that the tracer takes for granted.
GRANTED = ("torch._higher_order_ops.triton_kernel_wrap",)
_is_tracing = ContextVar("_is_tracing", default=False)
_lock = threading.RLock()


def defer() -> None:
    """Let this process import Dynamo and Inductor later, if it has not imported them by now."""
    for root in LIGHT:
        if root in sys.modules:
            continue
        before = set(sys.modules)
        try:
            _put_stand_in(root)
        except ImportError:  # another torch has its settings elsewhere
            for name in set(sys.modules) - before:
                if f"{name}.".startswith(f"{root}."):
                    del sys.modules[name]
            importlib.import_module(root)


def load() -> None:
    """Import the packages that are deferred."""
    for root in LIGHT:
        _import_real(root)


class Needed(BaseException):
    """A signal that a trace needs a deferred package, which does not import well in the middle of it."""


def trace_again(trace: Callable[[], T]) -> T:
    """Run a function that traces, and again, from its beginning, if it needs what is deferred, or fails.

    Within another `trace_again`, that one begins again.
    """
    if not _deferred:
        return trace()

    # Try without the packages; `Needed` ends this trace where it asks for one of them.
    token, first = _is_tracing.set(True), None
    try:
        return trace()
    except SpecError:  # a mistake of the user's, whatever is imported
        raise
    except (Needed, Exception) as error:  # torch may miss something that these packages import
        first = error
    finally:
        _is_tracing.reset(token)

    # Import them, and trace from the beginning. An error of the first trace is shown next to the second's.
    load()
    try:
        return trace()
    except Exception as error:
        if isinstance(first, Exception) and str(first) != str(error):
            error.add_note(f"Before that, the first trace failed: {type(first).__name__}: {first}")
        raise


def is_deferred(root: str) -> bool:
    """Return whether a package waits for its first use."""
    return root in _deferred


class _Deferred(ModuleType):
    """A stand-in for a package, or a module in it, that imports the package for a name that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name not in ABSENT:  # tools ask any module for dunder names
            _import_real(".".join(self.__name__.split(".")[:2]))
            real = importlib.import_module(self.__name__)
            if real is not self:
                return getattr(real, name)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder:
    """A finder of modules that imports a deferred package before another module in it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = ".".join(name.split(".")[:2])
        if name == root or root not in _deferred:
            return None
        _import_real(root)
        return ModuleSpec(name, _ImportedLoader(sys.modules[name])) if name in sys.modules else None


class _ImportedLoader:
    """A loader of a module that its package has imported meanwhile."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the finder's spec on the module; give it back its own.
        module.__spec__ = self._spec


def _disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `torch._dynamo.disable`: before Dynamo is imported, no function has to be kept from it.

    Classes, modules and decorators with arguments are left to Dynamo, which is imported for them.
    """
    if not inspect.isroutine(fn):
        _import_real("torch._dynamo")
        return torch._dynamo.disable(fn, *args, **kwargs)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*values: Any, **named: Any) -> Any:
        if is_deferred("torch._dynamo"):
            return fn(*values, **named)
        if not disabled:
            disabled.append(torch._dynamo.disable(fn, *args, **kwargs))
        return disabled[0](*values, **named)

    return call


class _Source:
    """A stand-in for Dynamo's description of where a tensor comes from, which nobody reads in a trace."""

    def __init__(self, *_: Any):
        pass


# What torch uses of the packages where nothing is compiled: functions of the package, and of modules in it.
FUNCTIONS = {"torch._dynamo": {"disable": _disable}, "torch._inductor": {}}
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "torch._dynamo": {
        "utils": {"detect_fake_mode": torch._guards.detect_fake_mode},
        "source": {"ConstantSource": _Source, "RandomValueSource": type("RandomValueSource", (), {})},
        "trace_rules": {"clear_lru_cache": lambda: None},  # a process group calls it; nothing is cached yet
    },
    "torch._inductor": {},
}


def _put_stand_in(root: str) -> None:
    """Put a stand-in for a package, with what torch uses at once, in its place."""
    spec = importlib.util.find_spec(root)
    package = _Deferred(root)
    vars(package).update(
        __spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=root,
        __path__=spec.submodule_search_locations,
    )  # fmt: skip
    sys.modules[root] = package
    setattr(torch, root.rpartition(".")[2], package)

    # Put in stand-ins for what is used where nothing is compiled, and import the light modules.
    vars(package).update(FUNCTIONS[root])
    for name, functions in MODULES[root].items():
        module = sys.modules[f"{root}.{name}"] = _Deferred(f"{root}.{name}")
        vars(module).update(functions)
        setattr(package, name, module)
    for name in LIGHT[root]:
        importlib.import_module(f"{root}.{name}")
    for name in GRANTED:
        importlib.import_module(name)

    # From here on the finder sees imports of the package's other modules.
    _deferred.add(root)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _import_real(root: str) -> None:
    """Import a deferred package in place of its stand-in; do nothing while, or after, that happens."""
    with _lock:
        if root not in _deferred:
            return
        if _is_tracing.get():
            raise Needed(root)
        _deferred.remove(root)  # first, since the package's own imports come here again

        # Others may hold the stand-in: run the package in the same module, without the stand-in's names.
        package = sys.modules[root]
        for name in (*FUNCTIONS[root], *MODULES[root]):
            delattr(package, name)
            sys.modules.pop(f"{root}.{name}", None)
        importlib.reload(package)
        package.__class__ = ModuleType
