"""Launches: Triton kernels that `fn` starts by `kernel[grid](...)`, one pure op of the program each.

As `torch.compile` does with kernels of one's own. An op takes the tensors of a launch and returns those that
the kernel stores to; what it returns is written back where the launch stood, so that `rewrites.in_place` sees
plain copies. A launch has no derivative, as in torch: it stands in an `autograd.Function`, or in a backward.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.program import storage_id
from fnshard.errors import TraceError, report

__all__ = ["patches", "stored"]

_SYMBOLIC = report(
    "`fn` launches a Triton kernel on a tensor whose length depends on data.",
    fix="mask rows instead of selecting them, or write plain ops.",
)
_DESCRIPTOR = report(
    "`fn` launches a Triton kernel with a tensor descriptor made on the host.",
    fix="pass the tensor and make the descriptor in the kernel (tl.make_tensor_descriptor), or write a "
    "torch.library.custom_op.",
)
_SHARED = report(
    "`fn` launches {name}, which stores to a tensor whose memory another argument may read or write.",
    fix="give each argument memory of its own (.contiguous() or .clone(), and torch.cat behind the launch).",
)
_LAUNCHES: dict[str, Launch] = {}  # by what `Launch.key` says: an op takes no Python object


def patches() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Patches (see `unsupported`) of Triton, where it is imported."""

    def launching(original: Any, here: Callable[[], bool]) -> Any:
        def getitem(kernel: Any, grid: Any) -> Any:
            if not here():
                return original(kernel, grid)
            return lambda *args, **kwargs: _record(kernel, grid, args, kwargs)

        return getitem

    triton = sys.modules.get("triton.runtime.jit")
    if triton is not None:
        yield triton.KernelInterface, "__getitem__", launching


@dataclass(frozen=True)
class _Place:
    """Of a tensor in a launch's arguments; `number`: one whose value the kernel takes."""

    index: int
    number: bool = False

    def value_in(self, tensors: Sequence[Tensor]) -> Any:
        return tensors[self.index].item() if self.number else tensors[self.index]


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with all that is no tensor.

    Args:
        arguments: by name; a `_Place` where a tensor is.
        strides: of each tensor, as `fn` passed them on.
        written: which tensors the kernel stores to.
    """

    kernel: Any
    grid: Any
    arguments: Mapping[str, Any]
    strides: Sequence[tuple[int, ...]]
    written: Sequence[int]

    @property
    def key(self) -> str:
        """The same for the same launch, on every rank."""
        function = _function(self.kernel)
        constants = [f"{name}={_text(value)}" for name, value in sorted(self.arguments.items())]
        parts = [_source(function), _text(self.grid), *constants, str([*self.strides, *self.written])]
        return f"{function.__qualname__}#{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        values = []
        for i, (tensor, strides) in enumerate(zip(tensors, self.strides, strict=True)):
            if i in self.written or tensor.stride() != strides:
                tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
            values.append(tensor)
        filled = {n: v.value_in(values) if isinstance(v, _Place) else v for n, v in self.arguments.items()}
        self.kernel[self.grid](**filled)
        return [values[i] for i in self.written]


@torch.library.custom_op("fnshard::launch", mutates_args=())
def _launch(tensors: list[Tensor], key: str) -> list[Tensor]:
    return _LAUNCHES[key].run(tensors)


@_launch.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    launch = _LAUNCHES[key]
    return [tensors[i].new_empty_strided(tensors[i].shape, launch.strides[i]) for i in launch.written]


def _record(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A node of the trace that runs, and what it stores."""
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    tensors: list[Tensor] = []
    places: dict[Any, int] = {}  # the same memory twice is one tensor
    for name, value in arguments.items():
        number = isinstance(value, torch.SymInt | torch.SymFloat)
        if number:  # of the data
            kind = torch.int64 if isinstance(value, torch.SymInt) else torch.float64
            value = torch.full((), value, dtype=kind)
        if isinstance(getattr(value, "base", None), Tensor) and not isinstance(value, Tensor):
            raise TraceError(_DESCRIPTOR)
        if isinstance(value, Tensor):
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                raise TraceError(_SYMBOLIC)
            memory = storage_id(value), value.storage_offset(), value.shape, value.stride(), value.dtype
            if memory not in places:
                places[memory] = len(tensors)
                tensors.append(value)
            arguments[name] = _Place(places[memory], number)
    names = stored(_function(kernel))
    written = sorted({v.index for n, v in arguments.items() if isinstance(v, _Place) and n in names})
    if any(_meet(tensors[i], other) for i in written for other in tensors if other is not tensors[i]):
        raise TraceError(_SHARED.format(name=_function(kernel).__name__))
    if callable(grid) and kernel is _innermost(kernel):  # one that is tuned has its grid by configuration
        grid = grid(arguments)
    launch = Launch(kernel, grid, arguments, [t.stride() for t in tensors], written)
    _LAUNCHES[launch.key] = launch
    with torch.no_grad():
        made = _launch([t.detach() for t in tensors], launch.key)
        for place, value in zip(written, made, strict=True):
            tensors[place].copy_(value)


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors' stretches of memory have a place in common."""
    (low, end), (other, last) = (
        (
            x.storage_offset(),
            x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),
        )
        for x in (a, b)
    )
    return storage_id(a) == storage_id(b) and low <= last and other <= end


def _innermost(kernel: Any) -> Any:
    """Without what tunes it."""
    while hasattr(kernel.fn, "arg_names"):
        kernel = kernel.fn
    return kernel


def _function(kernel: Any) -> Callable[..., Any]:
    return _innermost(kernel).fn


def _text(value: Any) -> str:
    """What is the same wherever the same launch is traced: no addresses."""
    if inspect.isfunction(value):
        cells = [_text(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__code__.co_code.hex()}{value.__code__.co_consts}{cells}"
    if hasattr(value, "arg_names"):  # a kernel that another one calls
        return _source(_function(value))
    return repr(value)


@cache
def _source(function: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(function))


# ------------------------------------------------------------------ what a kernel stores to


@cache
def stored(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters whose memory a kernel's source stores or adds to, or that of a kernel it calls.

    A pointer that is computed of several may be any of them. What is loaded is no pointer.
    """
    tree = ast.parse(_source(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    origins = {a.arg: {a.arg} for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)}
    size = -1
    while size != (size := sum(map(len, origins.values()))):  # names assigned in loops feed others above
        for node in ast.walk(tree):
            for target, value in _assigned(node):
                for name in {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}:
                    origins.setdefault(name, set()).update(_origins(value, origins))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for pointer in _written_arguments(node, function):
                found |= _origins(pointer, origins)
    return frozenset(found)


def _assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Targets and values of an assignment, by element where both are tuples."""
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) or node.value is None:
        return []
    pairs = []
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        split = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs += zip(target.elts, node.value.elts, strict=True) if split else [(target, node.value)]
    return pairs


def _origins(value: ast.AST, origins: Mapping[str, set[str]]) -> set[str]:
    if isinstance(value, ast.Call) and _name(value) in ("load", "atomic_add", "atomic_cas", "atomic_xchg"):
        return set()
    if isinstance(value, ast.Name):
        return origins.get(value.id, set())
    return {o for child in ast.iter_child_nodes(value) for o in _origins(child, origins)}


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _resolved(name: ast.AST, function: Callable[..., Any]) -> Any:
    """What a dotted name means in a function, or None."""
    if isinstance(name, ast.Attribute):
        return getattr(_resolved(name.value, function), name.attr, None)
    return function.__globals__.get(name.id) if isinstance(name, ast.Name) else None


def _written_arguments(call: ast.Call, function: Callable[..., Any]) -> list[ast.AST]:
    """The expressions whose memory a call writes to."""
    if _name(call) == "store" or _name(call).startswith("atomic_"):
        keywords = [k.value for k in call.keywords if k.arg == "pointer"]
        return [call.func, *call.args[:1], *keywords]  # `tl.store(pointer, ...)`, or `descriptor.store(...)`
    called = _resolved(call.func, function)
    if not hasattr(called, "fn"):
        return []
    inner = _function(called)
    bound = dict(zip(inspect.signature(inner).parameters, call.args, strict=False))
    bound |= {k.arg: k.value for k in call.keywords}
    return [value for name, value in bound.items() if name in stored(inner)]
