"""What tests remember of lowering: equal kernels are differentiated once for all processes of a run, and a
function of the same shapes is traced once a process for all layouts.

They are most of what lowering a small step costs, and two steps of one program differ in nothing else. Ranks
and commands are processes of their own, so kernels lie in files: whoever comes second waits for the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.compiler import lower
from fnshard.compiler.frontend.trace import flatten_batch
from fnshard.compiler.kernels import differentiate as module
from fnshard.compiler.kernels.segments import Way

FOLDER = "FNSHARD_TESTS_KERNELS"  # of the variable that names it
MOST_TRACES = 64
METAS = ("val", "seq_nr", "stack_trace", "original_aten")  # what is read of a kernel's nodes
_plain, _plain_trace = module.differentiate, lower.trace
_folder = ""
_known: dict[Any, Any] = {}
_traces: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()


def remember_kernels(folder: str) -> None:
    """In this process, from now on; `folder`: where all processes of a run keep their kernels."""
    global _folder
    _folder = folder
    module.differentiate, lower.trace = _remembered, _traced


@contextmanager
def no_kernels() -> Iterator[None]:
    """Forget them for a block of code, which changes how they are made."""
    with (
        mock.patch.dict(_known, clear=True),
        mock.patch.dict(_traces, clear=True),
        mock.patch.dict(globals(), _folder=""),
    ):
        yield


def _remembered(source: Any, policy: Any, **how: Any) -> Any:
    key = (source.key, policy.key, *sorted(how.items()))
    if key not in _known:
        make = partial(_plain, source, policy, **how)
        _known[key] = _from_file(key, source, make) if _folder else make()
    return _known[key]


# ------------------------------------------------------------------ kernels in files


def _from_file(key: tuple[Any, ...], source: Any, make: Callable[[], Any]) -> Any:
    path = Path(_folder, hashlib.sha256(repr(key).encode()).hexdigest())
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if written := path.read_bytes():
            # A command's `__main__` has torch, so that pickle may find torch's constants there.
            with suppress(AttributeError):
                return _unpacked(pickle.loads(written), source)
            return make()
        kernel = make()
        with suppress(Unpicklable):
            lock.write(pickle.dumps(_packed(kernel)))
            lock.flush()
        return kernel


class Unpicklable(Exception):
    """A kernel that stays in its process: it has tensors, or graphs of its own."""


@dataclass(frozen=True)
class Place:
    """A node, by its number."""

    number: int


@dataclass(frozen=True)
class Op:
    """An operator, by its name."""

    name: str
    overload: str


@dataclass(frozen=True)
class Fake:
    """A value of a node's."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def _packed(kernel: Any) -> tuple[Any, ...]:
    """The kernel without graphs, and each half of its backward without its own; all graphs by way."""
    halves = {way: replace(half, module=None) for way, half in kernel.halves.items()}
    graphs = {way: _packed_graph(module.graph) for way, module in kernel.modules.items()}
    return replace(kernel, source=None, forward=None, backward=None, weights=None), halves, graphs


def _packed_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    places = {node: Place(number) for number, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        meta = {key: _packed_value(node.meta[key]) for key in METAS if key in node.meta}
        target = _packed_value(node.target)
        if node.op == "get_attr" or (callable(target) and target.__module__ != "_operator"):
            raise Unpicklable
        rows.append((node.op, target, *arguments, node.name, meta))
    return rows


def _packed_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise Unpicklable
        return Fake(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, value.requires_grad)
    if isinstance(value, torch._ops.OpOverload):
        return Op(value._schema.name, value._overloadname)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_packed_value, value))
    if value is None or isinstance(value, (str, int, float, bool)) or callable(value):
        return value
    raise Unpicklable


def _unpacked(packed: tuple[Any, ...], source: Any) -> Any:
    kernel, halves, graphs = packed
    with FakeTensorMode():
        modules = {way: _unpacked_graph(rows) for way, rows in graphs.items()}
    both = {way: replace(half, module=modules[way]) for way, half in halves.items()}
    return replace(
        kernel, source=source, forward=modules[Way.FORWARD], backward=both.get(Way.BACKWARD),
        weights=both.get(Way.WEIGHTS),
    )  # fmt: skip


def _unpacked_graph(rows: list[tuple[Any, ...]]) -> fx.GraphModule:
    graph, nodes = fx.Graph(), []
    for op, target, args, kwargs, name, meta in rows:
        args, kwargs = _placed((args, kwargs), nodes)
        node = graph.create_node(op, _unpacked_value(target), args, kwargs, name)
        node.meta = {key: _unpacked_value(value) for key, value in meta.items()}
        nodes.append(node)
    return fx.GraphModule(torch.nn.Module(), graph)


def _placed(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, Place):
        return nodes[value.number]
    if isinstance(value, dict):
        return {key: _placed(each, nodes) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_placed(each, nodes) for each in value])
    return value


def _unpacked_value(value: Any) -> Any:
    if isinstance(value, Fake):
        fake = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
        return fake.requires_grad_(value.requires_grad) if value.requires_grad else fake
    if isinstance(value, Op):
        space, _, name = value.name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), name), value.overload or "default")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unpacked_value, value))
    return value


# ------------------------------------------------------------------ traces in one process


def _environment() -> list[tuple[str, str]]:
    """What a function may read, and a guard does not compare; but the name of the test."""
    return sorted(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")


def _traced(fn: Any, shapes: Any, structure: Any, specs: Any, batch: Any, **how: Any) -> Any:
    """The program of the same function (not an equal one) on the same shapes, while its guard holds."""
    named, batch_structure = flatten_batch(batch)
    parts = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else (type(v), v) for v in named.values()]
    trainable = [bool(specs[path].trainable) for path in shapes]
    key = (id(fn), *shapes.items(), structure, *trainable, *named, *parts, batch_structure,
           torch.get_default_dtype(), *sorted(how.items()), *_environment())  # fmt: skip
    try:
        of, program = _traces.pop(key, (None, None))
    except TypeError:  # a constant that has no hash
        return _plain_trace(fn, shapes, structure, specs, batch, **how)
    if of is not fn or not program.guard.holds():
        program = _plain_trace(fn, shapes, structure, specs, batch, **how)
    _traces[key] = fn, program
    if len(_traces) > MOST_TRACES:
        _traces.popitem(last=False)
    return program
