"""Inductor: compile kernels through torch.compile's stack. No other module calls Inductor.

A kernel's graphs are handed to Inductor's inner compiler, beneath Dynamo and AOTAutograd, so that a
call costs a list of tensors and nothing else: no guards, no autograd function. Callables are boxed:
they take a list and empty it, so that an input dies when its last reader has run. Inductor is imported
where it is used, since that takes seconds, and `import fnshard` should not.

Other ranks of the host and later processes find what was compiled: kernels for the CPU in files
(`machine_code`), which run without Inductor, all others in Inductor's cache (TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from fnshard.compiler.ir import deferred_imports
from fnshard.compiler.kernels import machine_code
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.machine_code import Boxed, Entry
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.rewrites.rounding import BITS, drop_rounding
from fnshard.compiler.rewrites.wide_sums import widen_sums
from fnshard.errors import MissingExtraError, SpecError

# Torch's tracers and Inductor have state that is global to the process: each trace and each compilation holds
# this lock.
TRACING = threading.RLock()
LOG = logging.getLogger("fnshard")


def compile_graph(
    module: fx.GraphModule, *, backend: str, options: Mapping[str, Any], is_backward: bool
) -> Boxed:
    """Compile one flat graph module to a boxed callable.

    Args:
        backend: "inductor", or "eager", which interprets the graph.
        options: options as for `torch.compile(options=)`.
    """
    if backend == "eager":
        return _make_eager(module)
    with TRACING:
        compiled, load = _generate(module, options, is_backward)
        load()
        return compiled


def _generate(
    module: fx.GraphModule, options: Mapping[str, Any], is_backward: bool
) -> tuple[Boxed, Callable[[], None]]:
    """Compile a graph by Inductor, or find it compiled.

    Returns:
        A boxed callable, and a function that waits until its C++ is compiled, for before the first call.
    """
    # Take what needs no compilation: a graph that returns its inputs, or one that was compiled before.
    if not any(n.op == "call_function" for n in module.graph.nodes):
        return _make_eager(module), lambda: None
    key = machine_code.key_of(module, options, is_backward)
    known = None if key is None else machine_code.recall(key)
    if known is not None:
        return known, lambda: None
    deferred_imports.load()
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    # Prepare a copy of the graph, since Inductor rewrites what it compiles.
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    _register_rounding()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["val"] for n in placeholders]
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    on_cpu = any(isinstance(f, Tensor) and f.device.type == "cpu" for f in fakes)
    if on_cpu:
        with V.set_fake_mode(mode) if mode is not None else nullcontext():
            widen_sums(module.graph)
        module.recompile()  # Inductor's cache on disk knows a graph by its code

    # The strides of all outputs are kept as traced, since the backward was traced with them.
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))

    # Compile it. Threads compile the C++ meanwhile; `finish` waits for them, and keeps what they have made.
    settings = {**vector_settings(), **options} if on_cpu else dict(options)
    with (
        _explain_missing_compiler(),
        V.set_fake_mode(mode) if mode is not None else nullcontext(),
        inductor_config.patch(settings),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        _provide_shape_env(mode),
        torch.no_grad(),
        _compile_together() as load,
    ):
        compiled = compile_fx_inner(module, fakes, is_backward=is_backward, is_inference=False)

    def finish() -> None:
        entries = load()
        if key is not None:
            with suppress(Exception):  # what cannot be kept is compiled again
                machine_code.keep(key, compiled, entries)

    return compiled, finish


@cache
def _register_rounding() -> None:
    """Tell Inductor how to lower `fnshard.rounded`: as a pass through the bits of the number's type."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.fnshard.rounded.default, type_promotion_kind=None)
    def rounded(x: Any) -> Any:
        dtype = x.get_dtype()
        bits = BITS[dtype]

        def pass_through(value: Any) -> Any:
            whole = ops.bitwise_or(ops.to_dtype_bitcast(value, bits, dtype), ops.constant(0, bits))
            return ops.to_dtype_bitcast(whole, dtype, bits)  # two casts in a row would be optimised away

        return make_pointwise(pass_through)(x)


def _provide_shape_env(mode: Any) -> AbstractContextManager[Any]:
    """Give a fake mode an empty shape environment, which Inductor's cache asks for; all sizes are known."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if mode is None or mode.shape_env is not None:
        return nullcontext()
    return mock.patch.object(mode, "shape_env", ShapeEnv())


@contextmanager
def _explain_missing_compiler() -> Iterator[None]:
    """Raise one clear error where there is no C++ compiler."""
    try:
        yield
    except Exception as error:
        if type(getattr(error, "inner_exception", error)).__name__ != "InvalidCxxCompiler":
            raise
        raise MissingExtraError(
            "kernels for the CPU are compiled by a C++ compiler, and none works here.",
            fix='install g++, or name another one by CXX; backend="eager" (run.backend=eager) needs none.',
        ) from None


@cache
def vector_settings() -> dict[str, bool]:
    """Return options that spare Inductor its trials of vector instructions.

    For each set of instructions it runs a compiler and a program. Torch itself was built with those of this
    CPU and runs with them, so that nothing is left to try but whether the compiler has their flags.
    """
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.cpp_builder import get_cpp_compiler

    # Change nothing where the user has set the option, or where torch runs with less than the CPU has.
    of_cpu, of_torch = cpu_vec_isa.x86_isa_checker(), torch.backends.cpu.get_cpu_capability().lower()
    is_less = of_torch not in of_cpu or (of_torch == "avx2" and "avx512" in of_cpu)
    if config.cpp.vec_isa_ok is not None or is_less:
        return {}
    sets = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in of_cpu]
    flags = [flag for isa in sets for flag in isa.build_arch_flags().split()]
    try:
        command = [get_cpp_compiler(), *flags, "-E", "-x", "c++", os.devnull]
        subprocess.run(command, check=True, capture_output=True)
    except Exception:  # no compiler, or an old one: Inductor's own trials find the set that it has
        return {}
    return {"cpp.vec_isa_ok": True}


def _make_eager(module: fx.GraphModule) -> Boxed:
    """Make a boxed callable that interprets a graph."""
    interpreter = fx.Interpreter(
        fx.GraphModule(module, drop_rounding(module.graph)), garbage_collect_values=True
    )

    def run(args: list[Tensor]) -> Sequence[Tensor]:
        values = list(args)
        args.clear()
        with torch.no_grad():
            results = interpreter.boxed_run(values)
        interpreter.env = {}  # the interpreter would keep the results until the next call
        return results

    return run


def import_compiler(backend: str) -> None:
    """Import what the first lowering and the first compilation import, which takes seconds.

    A process whose ranks are forks of it does so once for all of them.
    """
    deferred_imports.load()
    import torch._dynamo

    if backend == "inductor":
        import torch._inductor.compile_fx  # noqa: F401  (it imports AOTAutograd and its partitioner)


def warm_up(device_type: str, backend: str) -> None:
    """Start the processes that compile for an accelerator.

    They take seconds to start, during which the caller may trace.
    """
    if backend == "inductor" and device_type != "cpu":
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()


Graphs = dict[tuple[str, Way], fx.GraphModule]  # by kernel and way
Compiled = dict[tuple[str, Way], Boxed]  # the same graphs, compiled


def graphs_of(kernels: Iterable[Kernel]) -> Graphs:
    """Return all graphs of kernels, which are to be compiled."""
    return {(kernel.name, way): module for kernel in kernels for way, module in kernel.modules.items()}


def share_of(graphs: Graphs, place: int, parts: int) -> Graphs:
    """Return one of `parts` shares of graphs, which take about equally long to compile."""
    # The largest graph first, each to the share that has the fewest nodes so far.
    sizes, shares = [0] * parts, [Graphs() for _ in range(parts)]
    for key in sorted(graphs, key=lambda k: -len(graphs[k].graph.nodes)):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(graphs[key].graph.nodes)
        shares[smallest][key] = graphs[key]
    return shares[place]


def compile_graphs(graphs: Graphs, *, backend: str, options: Mapping[str, Any]) -> Compiled:
    """Compile each graph to a boxed callable; the logger "fnshard" reports the progress (INFO)."""
    if backend == "eager":
        return {key: _make_eager(graph) for key, graph in graphs.items()}
    if not graphs:
        return {}

    # All graphs are lowered before the first wait, so that C++ is compiled beside the lowering.
    generated: dict[tuple[str, Way], tuple[Boxed, Callable[[], None]]] = {}
    with TRACING:
        for number, ((name, way), graph) in enumerate(graphs.items(), 1):
            _report_progress(f"compiling kernel {number} of {len(graphs)}")
            generated[name, way] = _generate(graph, options, way is not Way.FORWARD)
        for _, load in generated.values():
            load()
    _report_progress(f"compiled {len(graphs)} kernel{'s' if len(graphs) > 1 else ''}", end="\n")
    return {key: compiled for key, (compiled, _) in generated.items()}


def _report_progress(text: str, end: str = "") -> None:
    """Tell the logger; where nobody listens to it, rank 0 prints to a terminal, in one line."""
    LOG.info(text)
    is_unheard = not LOG.isEnabledFor(logging.INFO) and os.environ.get("RANK", "0") == "0"
    is_main = threading.current_thread() is threading.main_thread()  # steps run beside other threads
    if is_unheard and is_main and sys.stderr.isatty():
        print(f"\rfnshard: {text}\x1b[K", end=end, file=sys.stderr, flush=True)


def inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge `mode` and `options`, as `torch.compile` takes them, into one dict.

    Raises:
        SpecError: a mode or an option is unknown, or has CUDA graphs.
    """
    if mode in (None, "default") and not options:
        return {}
    from torch._inductor import list_mode_options, list_options

    # A mode is a set of options, which `options` overrides.
    merged: dict[str, Any] = {}
    if mode not in (None, "default"):
        known = list_mode_options()
        if mode not in known:
            raise SpecError(
                f"mode={mode!r} is not a mode of torch.compile.", fix=f"one of: {', '.join(known)}."
            )
        merged.update(known[mode])
    merged.update(options or {})

    # Refuse what torch does not have, and what the executor cannot run.
    unknown = [f"options[{name!r}]" for name in merged if name not in list_options()]
    if unknown:
        raise SpecError(
            f"{len(unknown)} option(s) that torch.compile does not have:",
            unknown,
            "torch._inductor.list_options() names them all.",
        )
    if merged.get("triton.cudagraphs"):
        raise SpecError(
            "CUDA graphs keep a kernel's outputs in place, and the executor frees and reuses them.",
            fix="mode='max-autotune-no-cudagraphs', or options={'triton.cudagraphs': False}.",
        )
    return merged


# ------------------------------------------------------------------ C++, many kernels a unit
# Inductor gives each C++ kernel to the compiler by itself, and four fifths of each run are spent on the same
# work: the compiler reads the templates of Inductor's headers. Here the kernels of a graph share a
# translation unit, in which each has a namespace, and each becomes a Python module of one shared object.
# Inductor's threads compile units while the next graph is lowered, and its cache keeps them by their text.

KERNELS = 16  # the most kernels of a unit: larger graphs have several units, and use several processors
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
NAME = re.compile(r"\bkernel(?=\s*\()")  # the name that Inductor gives every kernel
HEADER = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n"


@dataclass(frozen=True, eq=False)
class _CppKernel:
    """A C++ kernel as Inductor generates it, with the globals of the module that calls it."""

    argument_types: list[str]
    source: str
    module: dict[str, Any]


@contextmanager
def _compile_together() -> Iterator[Callable[[], dict[str, Entry]]]:
    """Compile the C++ kernels that Inductor generates within this context to few shared objects.

    Kernels of other threads are left to Inductor.

    Yields:
        A function that waits until the kernels are compiled, puts them into the module that calls them, and
        returns them by the names that they have there.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    kernels: list[_CppKernel] = []
    loads: list[Callable[[], dict[str, Entry]]] = []
    compile_alone, owner = AsyncCompile.cpp_pybinding, threading.get_ident()

    def collect(self: Any, argument_types: list[str], source: str) -> Any:
        if threading.get_ident() != owner:  # a torch.compile of the user's runs at the same time
            return compile_alone(self, argument_types, source)
        # The caller is the module that Inductor has generated; it keeps the result under some name.
        kernels.append(_CppKernel(argument_types, source, sys._getframe(1).f_globals))
        return kernels[-1]

    def load_all() -> dict[str, Entry]:
        return {name: entry for load in loads for name, entry in load().items()}

    method = collect if get_compile_threads() > 1 else compile_alone
    with mock.patch.object(AsyncCompile, "cpp_pybinding", method):
        yield load_all
    loads.extend(_start_unit(kernels[i : i + KERNELS]) for i in range(0, len(kernels), KERNELS))


def _start_unit(kernels: list[_CppKernel]) -> Callable[[], dict[str, Entry]]:
    """Start to compile a unit, and return a function that waits for it."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # One translation unit: all includes, then each kernel in a namespace of its own.
    parts = [_bind_source(kernel, f"kernel_{number}") for number, kernel in enumerate(kernels)]
    includes = dict.fromkeys(line.strip() for part in parts for line in INCLUDE.findall(part))
    spaces = [f"namespace n{number} {{\n{INCLUDE.sub('', part)}\n}}\n" for number, part in enumerate(parts)]
    unit = HEADER + "\n".join([*includes, *spaces])

    # Inductor imports a shared object as the module of one kernel; `Entry` loads the others from it.
    library = type("Library", (CppPythonBindingsCodeCache,), {"entry_function": "kernel_0"})
    compiled = library.load_async(unit, submit_fn=AsyncCompile.submit)

    def load() -> dict[str, Entry]:
        path, entries = Path(compiled().__spec__.origin), dict[str, Entry]()
        for number, kernel in enumerate(kernels):
            # Replace the stand-in in the module that calls the kernel, under whatever name it has there.
            entry = Entry(path, f"kernel_{number}")
            names = [name for name, value in kernel.module.items() if value is kernel]
            kernel.module.update(dict.fromkeys(names, entry.load()))
            entries |= dict.fromkeys(names, entry)
        return entries

    return load


def _bind_source(kernel: _CppKernel, name: str) -> str:
    """Return the source of a kernel under another name, with Inductor's Python binding."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # Inductor writes the binding and passes it to `load_async`, which here only takes the text.
    sources: list[str] = []
    attributes = {
        "entry_function": name,
        "call_entry_function": f"{name}({{}}); Py_RETURN_NONE;",
        "load_async": classmethod(lambda _, source, *__, **___: sources.append(source)),
    }
    binding = type("Binding", (CppPythonBindingsCodeCache,), attributes)
    binding.load_pybinding_async(kernel.argument_types, NAME.sub(name, kernel.source))
    return sources[0]
