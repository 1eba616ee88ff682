"""Footprint: find what one kernel call does to memory by running it on fake tensors.

Python's own reference counts say when a value dies. So the graph runs on tensors without data in the same
interpreter, or wrapper of generated code, that will run it for real, while a `StorageTracker` follows their
storages. Only the memory that an operator takes for itself while it runs is estimated, by `workspace_bytes`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.analysis.storages import INPUTS, Storage, StorageTracker
from fnshard.analysis.workspace import workspace_bytes
from fnshard.compiler.kernels.inductor import Boxed, Compiled, compile_graph
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Way


@dataclass(frozen=True)
class CallArgument:
    """An argument of a call, as its caller holds it.

    Args:
        storage: a number, which is equal for arguments that share a storage.
        dropped: whether only the call holds that storage.
        bytes: the bytes of a dropped storage.
    """

    storage: int
    dropped: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Output:
    """A result of a call.

    Args:
        new: the number of its storage among those that the call made; None if it lies in another.
        argument: the number of the argument's storage that it lies in; None if it lies in no argument's.
    """

    new: int | None
    argument: int | None
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Footprint:
    """A call's effect on memory.

    Args:
        new_bytes: the bytes of each storage that is made and returned.
        alive: the numbers of those that exist already at the worst moment.
        freed: the numbers of the arguments' storages that are freed by the worst moment.
        workspace_bytes: the bytes that are taken besides at the worst moment.
    """

    outputs: tuple[Output, ...]
    new_bytes: tuple[int, ...]
    alive: tuple[int, ...]
    freed: tuple[int, ...]
    workspace_bytes: int


def eager_footprint(module: fx.GraphModule, entries: Sequence[CallArgument], device: str) -> Footprint:
    """Return the footprint of a graph run node by node (`backend="eager"`).

    Args:
        device: the type of device that it will run on. A graph that was traced for an abstract mesh is on the
            CPU.
    """
    run = compile_graph(module, backend="eager", options={}, is_backward=False)
    return call_footprint(run, _get_inputs(module), entries, StorageTracker(device))


_KNOWN: weakref.WeakKeyDictionary[fx.GraphModule, dict[Any, tuple[Footprint, Any]]] = (
    weakref.WeakKeyDictionary()
)


def footprint_of(
    kernel: Kernel, way: Way, entries: Sequence[CallArgument], compiled: Compiled | None, device: str
) -> Footprint:
    """Return the footprint of one kernel's call on a type of device. Each is computed once.

    It is the footprint of Inductor's code if that has a Python wrapper, and not one in C++ or a CUDA graph.
    Otherwise the graph runs node by node.
    """
    module = kernel.modules[way]
    generated = None if compiled is None else compiled[kernel.name, way]
    known = _KNOWN.setdefault(module, {})
    key = tuple(entries), device, id(generated)
    if key not in known:
        tracker = StorageTracker(device)
        run = None if generated is None else make_fake_wrapper(generated, tracker)
        if run is None:
            footprint = eager_footprint(module, entries, device)
        else:
            footprint = call_footprint(run, _get_inputs(module), entries, tracker)
        known[key] = footprint, generated  # kept alive, so that its id is not taken again
    return known[key][0]


def _get_inputs(module: fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]


def constant_bytes(module: fx.GraphModule) -> int:
    """Count the bytes of tensors that a kernel holds for itself between calls."""
    tensors = [getattr(module, n.target, None) for n in module.graph.nodes if n.op == "get_attr"]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)
    }
    return sum(storages.values())


def call_footprint(
    run: Boxed, likes: Sequence[Tensor], entries: Sequence[CallArgument], tracker: StorageTracker
) -> Footprint:
    """Return the footprint of any boxed callable.

    It is called on fakes that look like `likes` and share storages as `entries` say.
    """
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False), torch.no_grad():
        args = _make_arguments(likes, entries)
        numbers = {
            tracker.adopt(arg, INPUTS, size=entry.bytes): entry.storage
            for entry, arg in zip(entries, args, strict=True)
        }
        # The call may free an argument only if nothing else holds it; boxed code empties the list `args`.
        kept = [a for a, e in zip(args, entries, strict=True) if not e.dropped]
        with tracker:
            tracker.look()
            results = [r for r in run(args) if isinstance(r, Tensor)]
        footprint = _read_footprint(tracker, results, numbers)
        del kept, results
    return footprint


def _read_footprint(
    tracker: StorageTracker, results: Sequence[Tensor], numbers: Mapping[Storage, int]
) -> Footprint:
    """Return the footprint of the call that returned `results`.

    Args:
        numbers: the numbers of the arguments' storages.
    """
    # Number the storages that were made and returned, in the order of results.
    peak, new_numbers, outputs = tracker.peak, {}, []
    for value in results:
        record = tracker.alive.get(value.untyped_storage()._cdata)  # None if it is a constant's
        argument = numbers.get(record)
        new = None
        if record is not None and record not in numbers:
            new = new_numbers.setdefault(record, len(new_numbers))
        outputs.append(Output(new, argument, tuple(value.stride()), tuple(value.shape), value.dtype))

    # What was alive at the worst moment and is not returned counts as workspace.
    alive = set(peak.made)
    return Footprint(
        outputs=tuple(outputs),
        new_bytes=tuple(record.bytes for record in new_numbers),
        alive=tuple(number for record, number in new_numbers.items() if record in alive),
        freed=tuple(sorted(numbers[record] for record in tracker.freed[: peak.freed])),
        workspace_bytes=peak.workspace + sum(record.bytes for record in alive if record not in new_numbers),
    )


def _make_arguments(likes: Sequence[Tensor], entries: Sequence[CallArgument]) -> list[Tensor]:
    """Make arguments of these shapes and strides, of which some share a storage."""
    shared = [e.storage for e in entries]
    bases: dict[int, Tensor] = {}
    out = []
    for like, entry in zip(likes, entries, strict=True):
        size, stride = tuple(like.shape), tuple(like.stride())
        if shared.count(entry.storage) == 1:
            out.append(torch.empty_strided(size, stride, dtype=like.dtype, device=like.device))
            continue

        # A storage that several share has room for the largest of them.
        if entry.storage not in bases:
            size_bytes = entry.bytes
            for each, other in zip(likes, entries, strict=True):
                if other.storage == entry.storage:
                    alone = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
                    size_bytes = max(size_bytes, alone.untyped_storage().nbytes())
            # A multiple of 16 bytes can be viewed in every dtype.
            room = -(-size_bytes // 16) * 16
            bases[entry.storage] = torch.empty(room, dtype=torch.uint8, device=like.device)
        out.append(bases[entry.storage].view(like.dtype).as_strided(size, stride))
    return out


def _make_stand_in(name: str, value: Any, tracker: StorageTracker) -> Any:
    """Return a stand-in for a global of generated code. Kernels do nothing, and allocations are fake."""
    # Functions that allocate or view memory run on fakes.
    if name.startswith("empty_strided_"):
        device = name.removeprefix("empty_strided_").removesuffix("_pinned")
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
    if name == "reinterpret_tensor":
        return lambda x, size, stride, offset=0: x.as_strided(size, stride, x.storage_offset() + offset)
    if name == "extern_kernels":
        return _Extern(value, tracker)

    # Modules, constants and torch's own operators stay. Anything else is a compiled kernel or a check.
    kept = types.ModuleType | torch.dtype | torch.device | Tensor | type | int | float | str
    if isinstance(value, kept) or type(value).__module__.startswith("torch._ops"):
        return value
    if getattr(value, "__module__", None) == "torch" or value is torch.empty_strided:
        return value
    return _Silent()


def _list_global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the functions nested in it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_list_global_names(c) for c in inner))


class _Silent:
    """A stand-in for a compiled kernel, or for a check, that takes any call and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> _Silent:
        return self


class _Extern:
    """A stand-in for `extern_kernels`.

    A kernel that writes into a given buffer does nothing, and one that makes its own runs on fakes.
    """

    def __init__(self, real: Any, tracker: StorageTracker):
        self._real, self._tracker = real, tracker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(self._real, name)(*args, **kwargs)
            self._tracker.look(workspace_bytes(name, args, kwargs, out, self._tracker.device))
            return out

        return call


def make_fake_wrapper(compiled: Any, tracker: StorageTracker) -> Callable[..., Any] | None:
    """Return the Python function that Inductor generated, ready to run on fakes; None if there is none."""
    # Find the wrapper. A graph in partitions, or one without the allocators of a Python wrapper, has none.
    runner = getattr(compiled, "compiled_fn_runner", None)
    if getattr(runner, "partitions", None):
        return None
    call = getattr(runner, "call", None) or getattr(compiled, "current_callable", compiled)
    function = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType) or "empty_strided_cpu" not in function.__globals__:
        return None

    # The code stays Inductor's; the globals that it names are replaced in a copy.
    code, globals_ = function.__code__, dict(function.__globals__)
    for name in _list_global_names(code) & globals_.keys():
        globals_[name] = _make_stand_in(name, globals_[name], tracker)
    made = types.FunctionType(code, globals_, function.__name__, function.__defaults__, function.__closure__)
    runner = getattr(call, "__self__", None)
    return made if runner is None else types.MethodType(made, runner)
