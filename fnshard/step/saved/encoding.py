"""Encoding: the stages of a lowered step as JSON, and back.

What a lowering is made of (frozen dataclasses, graphs of ATen operators, fake tensors) is written by value.
Classes and operators are looked up in tables of what fnshard and torch have registered: reading creates
nothing else, imports nothing and runs no code of the file's. Values that have no place in it (a function, a
class of a user's in an output tree) are refused when they are written.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from fnshard import tree
from fnshard.compiler.ir import custom_gradient, program
from fnshard.compiler.ir.guard import Guard
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels import canonical, differentiate, segments
from fnshard.compiler.lower import Stages
from fnshard.compiler.schedule import buckets, build, instructions, ir
from fnshard.compiler.schedule.instructions import Instruction
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import Mesh


class NotSaved(Exception):
    """A step, or what it depends on, has no form in a file; the message says what."""


class PaperTensor(Tensor):
    """Shape, strides, dtype and device without numbers: what a fake tensor is, without its mode, whose import
    takes longer than reading a step."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(
        size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, grad: bool
    ) -> Tensor:
        """One of these."""
        return Tensor._make_wrapper_subclass(
            PaperTensor, size, strides=stride, dtype=dtype, device=device, requires_grad=grad
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} of a value of a loaded step, which has no numbers")

    def __repr__(self) -> str:
        return f"PaperTensor({list(self.shape)}, {self.dtype})"


_CLASSES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(instructions, n) for n in instructions.__all__ if n[0].isupper() and not n.isupper()),
        buckets.Bucket, buckets.Piece, canonical.Argument, canonical.Source,
        custom_gradient.CustomGradient, differentiate.Kernel, differentiate.Ref, build.Plan, program.Input,
        program.Limit, program.Outputs, program.Program, ir.Schedule, segments.Exchanged,
        segments.Segment, segments.Segments, Stages,
    )
    if isinstance(kind, type) and is_dataclass(kind)
}  # fmt: skip
# Objects that several others hold are written once.
_SHARED = (canonical.Source, differentiate.Kernel)
_LEFT_OUT = {(program.Program, "guard"), (program.Program, "fake_mode"), (ir.Schedule, "specs")}
_FUNCTIONS = {f.__name__: f for f in (operator.getitem, operator.add, operator.mul, operator.sub)}
_TORCH = {
    str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype | torch.layout | torch.memory_format)
}
_META = ("val", "autocast")


def encode(stages: Stages) -> tuple[Any, dict[str, Tensor]]:
    """A JSON value, and the tensors that it names: the program's constants.

    Raises:
        NotSaved: something in it cannot be written.
    """
    writer = _Writer()
    return writer.value(stages), writer.tensors


def digest_of(stages: Stages) -> str:
    """SHA-256 of `encode`, in hex."""
    value, tensors = encode(stages)
    found = hashlib.sha256(json.dumps(value).encode())
    for tensor in tensors.values():
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def decode(
    value: Any, tensors: Mapping[str, Tensor], mesh: Mesh, specs: Mapping[str, LayoutSpec], guard: Guard
) -> Stages:
    """The inverse of `encode`.

    Args:
        mesh, specs: the schedule's, which are not in a file: the caller's own.
        guard: of its program.
    """
    local = {p: s.local(mesh) for p, s in specs.items()}
    return _Reader(tensors, {"guard": guard, "fake_mode": None, "specs": local}, mesh).value(value)


@dataclass
class _Writer:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def value(self, each: Any) -> Any:
        """Plain JSON for None, bool, int, float and str; `[tag, ...]` for everything else."""
        kind = type(each)
        if each is None or kind in (bool, int, float, str):
            return each
        write = _WRITE.get(kind)
        if write is not None:
            return write(self, each)
        if isinstance(each, Tensor):
            return self.tensor(each)
        if isinstance(each, fx.GraphModule):
            return ["module", self.graph(each.graph)]
        if isinstance(each, type) and issubclass(each, Instruction):
            return ["class", each.__name__]
        if isinstance(each, Mapping):
            return ["dict", *([self.value(k), self.value(v)] for k, v in each.items())]
        if _CLASSES.get(kind.__name__) is kind:
            return self.object(each)
        raise NotSaved(f"a {kind.__module__}.{kind.__qualname__}")

    def values(self, tag: str, each: Any) -> list[Any]:
        return [tag, *map(self.value, each)]

    def object(self, each: Any) -> Any:
        if isinstance(each, _SHARED):
            if id(each) in self.shared:
                return ["same", self.shared[id(each)][0]]
            self.shared[id(each)] = len(self.shared), each  # kept alive: an id is that of one object
        kind = type(each)
        named = [f.name for f in fields(each) if f.init and (kind, f.name) not in _LEFT_OUT]
        return ["object", kind.__name__, {n: self.value(getattr(each, n)) for n in named}]

    def tensor(self, each: Tensor) -> Any:
        if isinstance(each, FakeTensor | PaperTensor):
            size, stride = [int(n) for n in each.shape], [int(n) for n in each.stride()]
            # While a thread compiles, `device` of a fake tensor may be "meta".
            device = each.fake_device if isinstance(each, FakeTensor) else each.device
            return ["fake", size, stride, str(each.dtype), str(device), each.requires_grad]
        if type(each) not in (Tensor, torch.nn.Parameter) or each.layout != torch.strided:
            raise NotSaved(f"a constant that is a {type(each).__name__}")
        name = f"constant/{len(self.tensors)}"
        self.tensors[name] = each.detach().cpu().contiguous()
        return ["constant", name, str(each.device)]

    def structure(self, each: tree.TreeDef) -> Any:
        leaves = each.nodes.num_leaves - len(each.constants)
        written = self.value(tree.unflatten(range(leaves), tree.TreeDef(each.nodes, each.constants)))
        return ["tree", written, [i for i, _ in each.constants]]

    def graph(self, each: fx.Graph) -> Any:
        index = {n: i for i, n in enumerate(each.nodes)}
        nodes = []
        for node in each.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise NotSaved(f"a graph with {node.op} {node.target}")
            target = self.target(node.target) if node.op == "call_function" else str(node.target)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Place(index[n]))
            meta = {k: self.value(node.meta[k]) for k in _META if node.meta.get(k) is not None}
            nodes.append([node.op, node.name, target, self.value(args), self.value(dict(kwargs)), meta])
        return ["graph", nodes]

    def target(self, each: Any) -> Any:
        if isinstance(each, OpOverload):
            return ["op", *each._schema.name.split("::"), each._overloadname]
        if isinstance(each, custom_gradient.CustomGradient):
            return self.object(each)
        if _FUNCTIONS.get(getattr(each, "__name__", "")) is each:
            return ["function", each.__name__]
        raise NotSaved(f"the operator {each}")


@dataclass(frozen=True)
class _Place:
    """A node of the graph that is written, by its index."""

    index: int


_Write = Callable[[_Writer, Any], Any]
_WRITE: Mapping[type, _Write] = {
    list: lambda w, v: w.values("list", v),
    fx.immutable_collections.immutable_list: lambda w, v: w.values("list", v),
    tuple: lambda w, v: w.values("tuple", v),
    torch.Size: lambda w, v: w.values("tuple", v),
    frozenset: lambda w, v: ["set", *sorted(map(w.value, v))],
    slice: lambda w, v: w.values("slice", (v.start, v.stop, v.step)),
    complex: lambda w, v: ["complex", v.real, v.imag],
    Kind: lambda w, v: ["kind", v.value],
    ValueName: lambda w, v: ["name", v.kind.value, v.path, v.version, w.value(v.source)],
    P: lambda w, v: w.values("layout", v.parts),
    torch.dtype: lambda w, v: ["torch", str(v)],
    torch.layout: lambda w, v: ["torch", str(v)],
    torch.memory_format: lambda w, v: ["torch", str(v)],
    torch.device: lambda w, v: ["device", str(v)],
    tree.TreeDef: _Writer.structure,
    fx.Graph: _Writer.graph,
    Mesh: lambda w, v: ["mesh"],
    _Place: lambda w, v: ["node", v.index],
}


@dataclass
class _Reader:
    tensors: Mapping[str, Tensor]
    added: Mapping[str, Any]  # fields that are not in the file
    mesh: Mesh
    shared: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    def value(self, each: Any) -> Any:
        return _READ[each[0]](self, *each[1:]) if type(each) is list else each

    def values(self, each: Any) -> Any:
        return map(self.value, each)

    def object(self, name: str, given: Mapping[str, Any]) -> Any:
        kind = _CLASSES[name]
        place = len(self.shared)
        if issubclass(kind, _SHARED):
            self.shared.append(None)
        named = {n: self.value(v) for n, v in given.items()}
        made = kind(**named, **{n: self.added[n] for k, n in _LEFT_OUT if k is kind})
        if issubclass(kind, _SHARED):
            self.shared[place] = made
        return made

    def fake(self, size: list[int], stride: list[int], dtype: str, device: str, grad: bool) -> Tensor:
        return PaperTensor.of(size, stride, _TORCH[dtype], torch.device(device), grad)

    def structure(self, written: Any, constants: list[int]) -> tree.TreeDef:
        leaves, structure = tree.flatten(self.value(written), constants=True)
        return tree.TreeDef(structure.nodes, tuple((i, leaves[i]) for i in constants))

    def graph(self, nodes: list[Any]) -> fx.Graph:
        graph, outer, self.nodes = fx.Graph(), self.nodes, []
        for op, name, target, args, kwargs, meta in nodes:
            made_by = self.value(target) if op == "call_function" else target
            node = graph.create_node(op, made_by, self.value(args), self.value(kwargs), name=name)
            node.meta = {k: self.value(v) for k, v in meta.items()}
            self.nodes.append(node)
        self.nodes = outer
        return graph

    def operator(self, namespace: str, name: str, overload: str) -> Any:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


_READ: Mapping[str, Callable[..., Any]] = {
    "list": lambda r, *v: list(r.values(v)),
    "tuple": lambda r, *v: tuple(r.values(v)),
    "dict": lambda r, *v: {r.value(k): r.value(x) for k, x in v},
    "set": lambda r, *v: frozenset(r.values(v)),
    "slice": lambda r, *v: slice(*r.values(v)),
    "complex": lambda r, *v: complex(*v),
    "kind": lambda r, v: Kind(v),
    "name": lambda r, kind, path, version, source: ValueName(
        Kind(kind), path, version, source=r.value(source)
    ),
    "layout": lambda r, *v: P(*r.values(v)),
    "torch": lambda r, v: _TORCH[v],
    "device": lambda r, v: torch.device(v),
    "tree": _Reader.structure,
    "graph": _Reader.graph,
    "module": lambda r, v: fx.GraphModule(torch.nn.Module(), r.value(v)),
    "mesh": lambda r: r.mesh,
    "node": lambda r, v: r.nodes[v],
    "class": lambda r, v: _CLASSES[v],
    "object": _Reader.object,
    "same": lambda r, v: r.shared[v],
    "fake": _Reader.fake,
    "constant": lambda r, name, device: r.tensors[name].to(device),
    "op": _Reader.operator,
    "function": lambda r, v: _FUNCTIONS[v],
}
