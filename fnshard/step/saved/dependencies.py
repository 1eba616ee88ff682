"""Dependencies: all that a lowered step was made from, as text that another process compares.

A step is loaded in place of a trace only where nothing is left that could make the trace another one: this
machine and its libraries, the source of every module, the arguments of `shard_step`, the batch's shapes, and
each value that `fn` reads beside its arguments (`compiler.ir.guard`). As in ccache's direct mode, a key of
what is known at once finds the file, and the file names what else has to be as it was.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.bytecode import codes_in, mentioned
from fnshard.compiler.ir.guard import LENGTH, Entry, Guard, equal_tensors, guard_of
from fnshard.compiler.ir.reachable import ABSENT, LONG, is_plain, library
from fnshard.compiler.ir.recording import Ran
from fnshard.errors import stable_repr
from fnshard.step.saved.encoding import NotSaved

_VARIABLES = (
    "TORCH", "PYTORCH", "TRITON", "OMP_", "MKL_", "KMP_", "GOMP_", "CXX", "CC", "CUDA", "CUBLAS", "NVIDIA",
    "ATEN", "DNNL", "ONEDNN", "LD_PRELOAD",
)  # fmt: skip
_OF_A_RANK = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE")
_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# What `fn` may call that no value tells: a trace that has run such code is made anew in every process.
_READERS = frozenset({
    "open", "read_text", "read_bytes", "get_rank", "get_local_rank", "getpid",
    "gethostname", "urandom", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "input", "argv",
    "load", "load_file", "safe_open", "loadtxt", "genfromtxt", "fromfile", "memmap", "cpu_count", "now",
    "today", "exists", "lexists", "isfile", "isdir", "islink", "ismount", "is_file", "is_dir", "is_symlink",
    "stat", "lstat", "access", "samefile", "getsize", "getmtime", "getatime", "getctime", "readlink",
    "listdir", "scandir", "walk", "iterdir", "glob", "iglob", "rglob", "getcwd", "cwd", "expanduser",
    "expandvars", "which", "popen", "check_output", "uname", "from_file",
})  # fmt: skip
# What a user's own code may read everything through; builtins, and attributes.
_NAMESPACES = frozenset({"globals", "eval", "exec"})
_EVERYTHING = frozenset({"__globals__", "_getframe", "currentframe", "get_objects", "__subclasses__"})


def digest(text: str | bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


# ------------------------------------------------------------------ the machine and its libraries


def environment(device: torch.device) -> dict[str, str]:
    """What compiled code and traces depend on of this process, by name."""
    b = torch.backends
    flags = [
        torch.get_default_dtype(), torch.get_float32_matmul_precision(), b.cudnn.enabled, b.cudnn.benchmark,
        b.cudnn.deterministic, b.cudnn.allow_tf32, b.cuda.matmul.allow_tf32, b.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(), torch.get_default_device(),
        b.cuda.flash_sdp_enabled(), b.cuda.math_sdp_enabled(), b.cuda.mem_efficient_sdp_enabled(),
        b.cuda.cudnn_sdp_enabled(), sys.flags.optimize,
    ]  # fmt: skip
    named = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLES)}
    named = {n: v for n, v in named.items() if n not in _PLACES and not n.startswith(_OF_A_RANK)}
    return {
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.version.cuda} {torch.version.hip}",
        "Python": sys.version,
        "processor": _processor(),
        "device": _device(device),
        "threads": str(torch.get_num_threads()),
        "flags of torch": repr(flags),
        "variables of the environment": repr(named),
        "functions in the place of torch's": repr(_patches()),
        "settings of torch.compile": repr([_settings(n) for n in ("_inductor", "_functorch", "_dynamo")]),
    }


def _patches() -> list[str]:
    """Names of torch's, NumPy's and `math`'s that stand for functions of somebody else's: a trace calls
    these."""
    found = []
    for space in (torch, torch.nn.functional, torch.Tensor, torch.linalg, torch.special, torch.fft, np, math):
        for name, value in vars(space).items():
            code = getattr(value, "__code__", None)
            if isinstance(code, CodeType) and not code.co_filename.startswith(_LIBRARIES):
                found.append(f"{name} {_code_digest(code)}")
    return sorted(found)


def _settings(name: str) -> dict[str, str]:
    """What a module of settings has that is not the default; nothing of one that nobody has imported."""
    config = sys.modules.get(f"torch.{name}.config")
    if config is None:
        return {}
    entries = config._config
    now = config.get_config_copy()
    return {n: stable_repr(v) for n, v in now.items() if n in entries and v != entries[n].default}


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kept = ("model name", "flags", "Features", "CPU part", "vendor_id")
    named = [line for line in lines if line.startswith(kept)]
    return f"{platform.machine()} {platform.libc_ver()} {digest(chr(10).join(named))}"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_properties(device)}"


# ------------------------------------------------------------------ source files


def sources() -> dict[str, str]:
    """By path, what each file was that a loaded module came from.

    Files of installed packages by size and time, others by what they hold.

    Raises:
        NotSaved: a file was changed after this process began: what runs may not be what it holds.
    """
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "\0")
    found, changed = dict[str, str](), list[str]()
    for path in sorted({*_files(), *map(str, torch.ops.loaded_libraries)}):
        if path.startswith(generated):
            continue
        try:
            status = os.stat(path)
        except OSError:
            continue  # in an archive, or gone
        if max(status.st_mtime_ns, status.st_ctime_ns) > _BEGAN_ns:
            changed.append(path)
        found[path] = _version(path, status)
    if changed:
        raise NotSaved(f"source files that changed after the process had begun: {', '.join(changed[:3])}")
    return found


def changed_sources(known: Mapping[str, str]) -> list[str]:
    """The files that are no longer what they were."""
    return [path for path, version in known.items() if _now(path) != version]


def _now(path: str) -> str:
    try:
        return _version(path, os.stat(path))
    except OSError:
        return ""


def _version(path: str, status: os.stat_result) -> str:
    if path.startswith(_INSTALLED):
        return f"{status.st_size} {status.st_mtime_ns}"
    return digest(Path(path).read_bytes())


def _files() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        made = name.startswith("torch._inductor.runtime.compile_tasks") or name.endswith(
            (".kernel", ".kernel_0")
        )
        if isinstance(path, str) and not made:  # by Inductor
            yield os.path.abspath(path)


_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_LIBRARIES = (
    *(f"{folder}{os.sep}" for module in (torch, np, optree) for folder in module.__path__),
    f"{Path(__file__).parents[2]}{os.sep}", "<frozen",
)  # fmt: skip
_INSTALLED = tuple(
    {f"{sysconfig.get_path(n)}{os.sep}" for n in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _began_ns() -> int:
    """When this process began, on the file systems' clock; 0 where nobody knows."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
    running = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(running * 1e9)


_BEGAN_ns = _began_ns()  # a fork has its parent's: what that had imported is as old


# ------------------------------------------------------------------ values that `fn` reads


@dataclass(frozen=True)
class Reading:
    """What `fn` read beside its arguments when it was traced.

    Args:
        executed: digests of the code that ran; computed: attributes that it read by computed names;
            variables: those of the environment that it read.
        values: texts of what was read, by name.
        written: names of what the trace has written, which it will write again.
    """

    executed: tuple[str, ...]
    computed: tuple[str, ...]
    variables: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    written: tuple[str, ...]


def reading_of(fn: Callable[..., Any], guard: Guard, constants: Collection[Tensor]) -> Reading:
    """Of a program's guard and its constants, right behind its trace.

    Raises:
        NotSaved: the trace read what cannot be compared in another process.
    """
    if not guard.ran.executed:
        raise NotSaved("what `fn` runs is not known under a profiler")
    users = [code for code in guard.ran.executed if not _of_library(code)]
    own = [code for code in users if not code.co_filename.startswith((*_INSTALLED, "<"))]
    for code in users:
        read = _READERS & set(code.co_names)
        if code in own:
            read |= _EVERYTHING & set(code.co_names) | _NAMESPACES & mentioned(code)[0]
        if read:
            raise NotSaved(f"{code.co_name} in `fn` calls {', '.join(sorted(read))}")
    if "" in guard.ran.variables:
        raise NotSaved("`fn` lists the variables of the environment")
    again = guard_of(fn, guard.ran, constants=constants, opaque=True)
    for entry in again.entries:  # under another name
        each = entry.value  # of other types, attributes may be made by a `__getattr__`
        named = isinstance(each, FunctionType | types.BuiltinFunctionType | types.MethodType | type)
        if named and each.__name__ in _READERS and library(each.__module__):
            raise NotSaved(f"`fn` calls {each.__name__} as {entry.name}")
        if entry.key is LENGTH and isinstance(each, int) and each > LONG:
            raise NotSaved(f"`fn` reads {entry.name} of {each} values, which are not compared")
    found = {c for e in again.entries if e.key == "__code__" for c in codes_in(e.value)}
    found |= {c for code in own if code.co_name == "<module>" for c in codes_in(code)}
    unknown = sorted(code.co_qualname for code in own if code not in found)
    if unknown:  # a hook, an implementation of an operator: what these read is compared nowhere
        raise NotSaved(f"`fn` runs {', '.join(unknown[:3])}, which is not found from what it names")
    known = {_identity(e) for e in guard.entries}
    comparable = {_identity(e) for e in guard_of(fn, guard.ran, constants=constants).entries}
    written = {e.name for e in again.entries if _identity(e) in comparable and _identity(e) not in known}
    both = sorted(written & {e.name for e in guard.entries})
    if both:
        raise NotSaved(f"`fn` writes {both[0]}, and reads another value of that name")
    values = _texts(e for e in again.entries if e.name not in written)
    executed = tuple(sorted(map(_code_digest, guard.ran.executed)))
    computed, variables = tuple(sorted(guard.ran.computed)), tuple(sorted(guard.ran.variables))
    return Reading(executed, computed, variables, values, tuple(sorted(written)))


def guard_for(
    fn: Callable[..., Any], reading: Reading, constants: Collection[Tensor]
) -> tuple[Guard, list[str]]:
    """The guard of a program that is loaded, and what `fn` reads otherwise than the trace did.

    Args:
        constants: the program's own copies; a tensor of `fn` that is written to later makes it trace anew.
    """
    ran = Ran(_Executed(frozenset(reading.executed)), reading.computed, reading.variables)
    again = guard_of(fn, ran, constants=constants, opaque=True)
    try:
        now = _texts(e for e in again.entries if e.name not in reading.written)
    except NotSaved as error:
        return again, [str(error)]
    names = sorted(n for n in {*now, *reading.values} if now.get(n) != reading.values.get(n))
    tensors = [e.value for e in again.entries if isinstance(e.value, Tensor) and is_plain(e.value)]
    copied = [t for t in tensors if not t.is_meta and any(equal_tensors(t, c) for c in constants)]
    return guard_of(fn, ran, copied=copied, constants=constants), names


def _identity(entry: Entry) -> tuple[int, str, str]:
    return id(entry.owner), repr(entry.key), entry.name


def _texts(entries: Iterable[Entry]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.name.endswith("._version"):
            continue
        value = entry.owner if isinstance(entry.owner, np.ndarray) else entry.value
        found.setdefault(entry.name, []).append(_text(value, entry))
    return {name: tuple(texts) for name, texts in found.items()}


def text_of(value: Any, name: str) -> str:
    """A value as text that is the same in every process, and another for every other value.

    Raises:
        NotSaved: it has none.
    """
    if tree.is_constant(value):
        return f"{type(value).__qualname__} {tree.constant_text(value)}"
    if isinstance(value, Tensor):
        return _tensor_text(value, name)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise NotSaved(f"`fn` reads {name}, an array of objects")
        return f"array {value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, type | types.BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        bound = isinstance(owner, Tensor) or (owner is not None and tree.is_constant(owner))
        return f"{value.__module__}.{value.__qualname__}" + (f" of {text_of(owner, name)}" if bound else "")
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code_digest(value.__code__)}"
    if isinstance(value, CodeType):
        return _code_digest(value)
    if isinstance(value, types.MethodType):
        return f"method {text_of(value.__func__, name)} of {_kind(value.__self__)}"
    if isinstance(value, functools.partial | functools.partialmethod):
        parts = [value.func, *value.args, *value.keywords.values()]
        texts = [text_of(v, name) if callable(v) or tree.is_constant(v) else _kind(v) for v in parts]
        return f"partial {texts} {list(value.keywords)}"
    if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
        inner = [getattr(value, n, None) for n in ("fget", "__func__", "func")]
        return f"{_kind(value)} {[text_of(f, name) for f in inner if f is not None]}"
    if isinstance(value, tuple):  # what is in it has entries of its own
        return f"{_kind(value)} {[_kind(v) for v in value]}"
    if isinstance(value, frozenset):
        raise NotSaved(f"`fn` reads {name}, a frozenset of objects")
    text = stable_repr(value)
    if text != repr(value):
        raise NotSaved(f"`fn` reads {name}, a {_kind(value)}, which cannot be compared")
    return f"{_kind(value)} {text}"


def _text(value: Any, entry: Entry) -> str:
    if value is ABSENT:
        return "absent"
    return _kind(value) if entry.entered else text_of(value, entry.name)


def _tensor_text(value: Tensor, name: str) -> str:
    about = f"{_kind(value)} {value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
    if value.is_meta:
        return about
    if not is_plain(value):
        raise NotSaved(f"`fn` reads {name}, a {_kind(value)} without plain numbers")
    data = value.detach().cpu().contiguous()
    return f"{about} {digest(data.view(-1).view(torch.uint8).numpy().tobytes())}"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True, eq=False)
class _Executed(Collection[CodeType]):
    """The code that ran in another process."""

    digests: frozenset[str]

    def __contains__(self, code: object) -> bool:
        return isinstance(code, CodeType) and _code_digest(code) in self.digests

    def __len__(self) -> int:
        return len(self.digests)

    def __iter__(self) -> Iterator[CodeType]:
        return iter(())


@functools.lru_cache(maxsize=1 << 16)
def _code_digest(code: CodeType) -> str:
    """Of what it does and where it stands; code objects that are equal are the same."""
    inner = [_code_digest(c) if isinstance(c, CodeType) else tree.constant_text(c) for c in code.co_consts]
    parts = [
        code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code.hex(), inner, code.co_names,
        code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags, code.co_argcount,
        code.co_kwonlyargcount, code.co_posonlyargcount,
    ]  # fmt: skip
    return digest(repr(parts))[:16]


def _of_library(code: CodeType) -> bool:
    """Whether it is of Python itself, or of a library that `fn` is written in."""
    path = code.co_filename
    if f"{os.sep}_pytest{os.sep}" in path:  # whose hook runs where `fn` imports
        return True
    return path.startswith(_LIBRARIES) or (path.startswith(_PYTHON) and "-packages" not in path)
