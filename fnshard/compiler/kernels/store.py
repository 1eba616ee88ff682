"""Store: make kernels once and keep them in files, for other ranks and for later processes.

Most of the time of lowering goes into differentiating segments, and equal segments become equal kernels. A
kernel's key is a hash of its content: the graph of its segment with all shapes, strides and dtypes, its
policy, and what else decides what it becomes (torch's version and settings, and the sources of fnshard, so
that another compiler reads no kernels of this one). A file holds rows of names and numbers, and nothing is
unpickled (the folder has compiled code, too, see `machine_code`). Kernels with operators that are not torch's
or fnshard's are not kept, since their formulas may change.

The files are in `fnshard/kernels` in the user's cache directory (XDG_CACHE_HOME, or `~/.cache`).
FNSHARD_CACHE names another directory, or is "off". No fault of files is an error: without them kernels are
made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import operator
import os
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from fnshard.compiler.ir.program import OpOverload
from fnshard.compiler.kernels.kernel import Backward, Kernel, Ref
from fnshard.compiler.kernels.remat import Policy
from fnshard.compiler.kernels.segment_source import Argument, SegmentSource
from fnshard.compiler.kernels.segments import Way

MOST_BYTES = 256 << 20  # of all files; the least recently read are removed first
MACHINE_CODE = "code-"  # names of files of compiled graphs begin with it
MOST_IN_MEMORY = 256  # kernels that a process keeps at hand
WAIT_S, POLL_S = 60.0, 0.01  # how long this process waits for a kernel that another one makes
HEADER = b"fnshard kernel 1 "
OFF = "off"
NAMESPACES = ("aten", "prims", "prim", "fnshard", "inductor", "rngprims")  # whose operators do not change
METAS = ("val", "seq_nr", "stack_trace", "original_aten")  # the metadata of a kernel's nodes that is read
NAMED = {  # torch's constants that a graph may hold, by the word that marks them in a file
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
PLAIN = (type(None), bool, int, float, str)


class Recipe(NamedTuple):
    """A recipe for a kernel: the arguments of `differentiate`."""

    source: SegmentSource
    policy: Policy
    trainable: bool
    target: str
    apart: bool


def make_all(recipes: Mapping[str, Recipe], make: Callable[[Recipe], Kernel]) -> dict[str, Kernel]:
    """Return a kernel for each recipe: from memory, from its file, or made by `make` and kept.

    Ranks that make the same kernels at the same time share the work: each makes what no other one is making,
    and then waits for the others' files.
    """
    folder = find_folder()
    keys = {name: key_of(recipe) if folder else None for name, recipe in recipes.items()}
    done: dict[str, Kernel] = {}

    # The first pass makes what no other process is making, and the second waits for the others.
    for patience in (0.0, WAIT_S):
        for name, recipe in recipes.items():
            key = keys[name]
            if name in done or key is None:
                continue
            kernel = _recall(folder, key, recipe.source)
            if kernel is not None:
                done[name] = kernel
                continue
            with _claim(folder, key, patience) as is_claimed:
                if is_claimed:  # perhaps since another process has written the kernel by now
                    kernel = _recall(folder, key, recipe.source)
                    done[name] = kernel or _keep(folder, key, make(recipe))

    # What is left cannot be kept, or the process that makes it has not finished in time.
    for name, recipe in recipes.items():
        if name not in done:
            done[name] = make(recipe)
    return done


# ------------------------------------------------------------------ what decides what a kernel becomes


def key_of(recipe: Recipe) -> str | None:
    """Return a text that tells kernels apart by their content; None for one that must not be kept."""
    source, policy = recipe.source, recipe.policy
    try:
        rows = encode_graph(source.graph, ("val", "stack_trace"))
        ends = [[_encode_argument(a) for a in arguments] for arguments in (source.inputs, source.outputs)]
        choices = [policy.budget, policy.save, recipe.trainable, recipe.target, recipe.apart]
        devices = {a.device for a in source.inputs if a.device.type == "cuda"}
        gpus = sorted((torch.cuda.get_device_name(d), *torch.cuda.get_device_capability(d)) for d in devices)
        text = json.dumps([source.code, rows, ends, choices, [*settings(), gpus]])
    except NotPortableError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def settings() -> list[Any]:
    """Return the versions and settings that decide what becomes of a graph."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    cuda = torch.backends.cuda
    return [
        SOURCES, torch.__version__, torch.version.git_version,
        inductor_config.get_hash().hex(), functorch_config.get_hash().hex(),
        str(torch.get_default_dtype()), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), torch.backends.cpu.get_cpu_capability(),
    ]  # fmt: skip


def hash_sources() -> str:
    """Return a hash of all sources of fnshard: rules, operators and passes decide what a kernel is."""
    digest = hashlib.sha256()
    sources = Path(__file__).parents[2].rglob("*.py")
    for path in sorted(path for path in sources if path.is_file()):  # an editor's lock may be a dangling link
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = hash_sources()  # at import: these are the sources that run, whatever is edited later


# ------------------------------------------------------------------ files


def find_folder() -> Path | None:
    """Return the folder of kernels; None if they are not to be kept, or others may write to the folder."""
    chosen = os.environ.get("FNSHARD_CACHE", "")
    if chosen == OFF:
        return None
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(chosen or Path(cache_home, "fnshard"), "kernels")
    return folder if _make_private_folder(folder) else None


@cache
def _make_private_folder(folder: Path) -> bool:
    """Make a folder if it does not exist, and return whether it belongs to this user alone.

    Its files decide what runs, so that nobody else may write them.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def has_machine_code() -> bool:
    """Return whether this machine has kept a compiled graph."""
    folder = find_folder()
    return folder is not None and any(folder.glob(f"{MACHINE_CODE}*"))


@contextmanager
def _claim(folder: Path, key: str, patience: float) -> Iterator[bool]:
    """Lock a kernel, and yield whether this process may make it: false if another one is making it.

    The system releases the lock of a process that dies.

    Args:
        patience: how long to wait for another process, in seconds.
    """
    # Each kernel has one byte of a file that stays empty: a range beyond the end may be locked, too.
    byte = int(key[:15], 16)
    until = time.monotonic() + patience
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(folder / "locks", "ab"))
        except OSError:  # a read-only folder, in which this process can keep no kernel
            yield True
            return
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(POLL_S)
                    continue
                yield False
                return
            except OSError:  # a file system without locks
                pass
            break
        yield True


_memory: OrderedDict[tuple[Path, str], Kernel] = OrderedDict()


def _recall(folder: Path, key: str, source: SegmentSource) -> Kernel | None:
    """Return a kernel from memory, or from its file if that is whole; None if there is neither."""
    kernel = _memory.get((folder, key))
    if kernel is None:
        body = read_file(folder, key)
        if body is None:
            return None
        try:
            kernel = _decode_kernel(json.loads(zlib.decompress(body)), source)
        except Exception:  # another program has written it
            return None
    _remember(folder, key, kernel)
    return replace(kernel, source=source)


def _remember(folder: Path, key: str, kernel: Kernel) -> None:
    """Keep a kernel in memory; with too many, forget the least recently used one."""
    _memory[folder, key] = kernel
    _memory.move_to_end((folder, key))
    if len(_memory) > MOST_IN_MEMORY:
        _memory.popitem(last=False)


def _keep(folder: Path, key: str, kernel: Kernel) -> Kernel:
    """Write a kernel to its file, if that is possible, and return it."""
    try:
        body = zlib.compress(json.dumps(_encode_kernel(kernel)).encode(), 1)
    except NotPortableError:
        return kernel
    _remember(folder, key, kernel)
    write_file(folder, key, seal(body))
    return kernel


def seal(body: bytes) -> bytes:
    """Return the content of a file that `read_file` knows to be whole."""
    return HEADER + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_file(folder: Path, name: str) -> bytes | None:
    """Return what is sealed in a file; None if the file does not exist, or is cut short."""
    try:
        header, _, body = (folder / name).read_bytes().partition(b"\n")
        if header != HEADER + hashlib.sha256(body).hexdigest().encode():
            return None
    except OSError:
        return None
    with suppress(OSError):  # `_make_room` goes by this time; a read-only folder keeps its times
        os.utime(folder / name)
    return body


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file, if that is possible, and remove old ones if all together are too large.

    Readers see the whole file or none.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:
            temporary = file.name
            file.write(content)
        os.replace(temporary, folder / name)
        _make_room(folder)
    except OSError:  # a full disk, or a read-only folder
        with suppress(OSError):
            if temporary is not None:
                os.unlink(temporary)


def _make_room(folder: Path) -> None:
    """If files are too large, remove the least recently read, down to three quarters of what is allowed."""
    files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.name != "locks"]
    total = sum(stat.st_size for stat, _ in files)
    if total <= MOST_BYTES:
        return
    for stat, path in sorted(files, key=lambda each: each[0].st_mtime):
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= stat.st_size
        if total <= MOST_BYTES * 3 // 4:
            return


# ------------------------------------------------------------------ kernels as rows of plain values


class NotPortableError(Exception):
    """A graph holds something that has no meaning outside of its process."""


def _encode_kernel(kernel: Kernel) -> dict[str, Any]:
    return {
        "graphs": {way: encode_graph(module.graph, METAS) for way, module in kernel.modules.items()},
        "halves": {
            way: [[[ref.kind, ref.index] for ref in half.inputs], half.grads, half.shared]
            for way, half in kernel.halves.items()
        },
        "saved": [_encode_argument(a) for a in kernel.saved],
        "between": [_encode_argument(a) for a in kernel.between],
        "kept": kernel.kept,
    }


def _decode_kernel(values: Mapping[str, Any], source: SegmentSource) -> Kernel:
    """Return the kernel that `_encode_kernel` has written down, for a source of the same code."""
    mode = FakeTensorMode()
    with _use_lazy_graph_module(True):
        modules = {Way(way): _decode_graph(rows, mode) for way, rows in values["graphs"].items()}
    halves = {
        Way(way): Backward(
            modules[Way(way)], tuple(Ref(kind, index) for kind, index in inputs), tuple(grads), tuple(shared)
        )
        for way, (inputs, grads, shared) in values["halves"].items()
    }
    saved, between = (tuple(map(_decode_argument, values[name])) for name in ("saved", "between"))
    return Kernel(
        "", source, modules[Way.FORWARD], halves.get(Way.BACKWARD), saved, halves.get(Way.WEIGHTS), between,
        tuple(values["kept"]),
    )  # fmt: skip


def _encode_argument(a: Argument) -> list[Any]:
    return [a.shape, a.stride, _get_name(a.dtype), str(a.device), a.requires_grad, a.kind]


def _decode_argument(values: list[Any]) -> Argument:
    shape, stride, dtype, device, requires_grad, kind = values
    return Argument(
        tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device), requires_grad, kind
    )


def encode_graph(graph: fx.Graph, metas: tuple[str, ...]) -> list[Any]:
    """Return a row for each node: op, target, arguments, name, and some of its metadata."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise NotPortableError(node.op)
        meta = {key: _encode(node.meta[key], numbers) for key in metas if node.meta.get(key) is not None}
        target, args, kwargs = (
            _encode(value, numbers) for value in (node.target, tuple(node.args), dict(node.kwargs))
        )
        rows.append([node.op, target, args, kwargs, node.name, meta])
    return rows


def _decode_graph(rows: list[Any], mode: FakeTensorMode) -> fx.GraphModule:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs, name, meta in rows:
        target, args, kwargs = (_decode(value, nodes, mode) for value in (target, args, kwargs))
        node = graph.create_node(op, target, args, kwargs, name)
        node.meta = {key: _decode(value, nodes, mode) for key, value in meta.items()}
        nodes.append(node)
    return _make_graph_module(torch.nn.Module(), graph)


def _get_name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")


def _encode(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return a value of a node as JSON has it: plain, a list, or `[word, ...]` for what JSON lacks."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, fx.Node):
        return ["node", numbers[value]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_encode(each, numbers) for each in value)]
    if isinstance(value, dict):
        return ["dict", *([_encode(k, numbers), _encode(v, numbers)] for k, v in value.items())]
    if isinstance(value, OpOverload) and value.namespace in NAMESPACES:
        return ["op", value._schema.name, value._overloadname]
    if value is operator.getitem or getattr(operator, getattr(value, "__name__", ""), None) is value:
        return ["operator", value.__name__]
    if isinstance(value, Tensor):
        return ["fake", *_encode_fake(value)]
    for word, kind in NAMED.items():
        if isinstance(value, kind):
            return [word, _get_name(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, slice):
        return ["slice", *(_encode(each, numbers) for each in (value.start, value.stop, value.step))]
    raise NotPortableError(type(value).__name__)


def _decode(value: Any, nodes: list[fx.Node], mode: FakeTensorMode) -> Any:
    """Return the value that `_encode` has written down, with fake tensors of the given mode."""
    if not isinstance(value, list):
        return value
    word, *rest = value
    if word in ("list", "tuple", "slice"):
        kind = {"list": list, "tuple": tuple, "slice": lambda each: slice(*each)}[word]
        return kind([_decode(each, nodes, mode) for each in rest])
    if word == "dict":
        return {_decode(k, nodes, mode): _decode(v, nodes, mode) for k, v in rest}
    if word == "node":
        return nodes[rest[0]]
    if word == "op":
        space, _, name = rest[0].partition("::")
        if space not in NAMESPACES:
            raise ValueError(space)
        return getattr(getattr(getattr(torch.ops, space), name), rest[1] or "default")
    if word == "operator":
        return getattr(operator, rest[0])
    if word == "fake":
        return _decode_fake(mode, *rest)
    if word in NAMED:
        constant = getattr(torch, rest[0])
        if not isinstance(constant, NAMED[word]):
            raise ValueError(rest[0])
        return constant
    return {"device": torch.device, "complex": complex}[word](*rest)


def _encode_fake(value: Tensor) -> list[Any]:
    """Return a description of a tensor without its values, and of its place in its storage."""
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        raise NotPortableError(type(value).__name__)
    return [
        list(value.shape), list(value.stride()), _get_name(value.dtype), str(value.device),
        value.requires_grad, value.storage_offset(), value.untyped_storage().nbytes(),
    ]  # fmt: skip


def _decode_fake(
    mode: FakeTensorMode, shape: list[int], stride: list[int], dtype_name: str, device: str,
    requires_grad: bool, offset: int, storage_bytes: int,
) -> Tensor:  # fmt: skip
    dtype = getattr(torch, dtype_name)
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # A view of a larger storage becomes a view again.
    if offset or meta.untyped_storage().nbytes() != storage_bytes:
        whole = torch.empty(storage_bytes // dtype.itemsize, dtype=dtype, device="meta")
        meta = whole.as_strided(shape, stride, offset)
    return FakeTensor(mode, meta.requires_grad_(requires_grad), torch.device(device))
