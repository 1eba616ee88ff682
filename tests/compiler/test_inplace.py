"""Writes in place, as torch does them: every op, whole or through a view, in one unit and between units."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec, P, TraceError

aten = torch.ops.aten
Params = Mapping[str, Tensor]


# ------------------------------------------------------------------ every op in place

SKIPPED = ("_", "sparse", "resize", "set_", "requires_grad", "embedding_renorm")  # no writes of numbers


def mutable_ops() -> Iterator[OpOverload]:
    """`aten.add_.Tensor` and the like, from torch's own list, without those that draw numbers."""
    names = {s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.name[:6] == "aten::"}
    for name in sorted(names):
        public = name.startswith(("_foreach", "__i")) or not any(map(name.startswith, SKIPPED))
        if not public or not (name.startswith("__i") or name.endswith("_")):
            continue
        for op in [getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads()]:
            first = (op._schema.arguments or [None])[0]
            written = op._schema.is_mutable and first.alias_info is not None and "Tensor" in str(first.type)
            if (
                written
                and op not in REFUSED
                and not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(op.tags)
            ):
                yield op


REFUSED = {  # torch cannot take these apart, or differentiate them without values
    aten.polygamma_.default: "polygamma_",
    aten.fill_diagonal_.default: r"as_strided\(\)",  # through a view
}
if torch.__version__ >= "2.12":
    REFUSED[aten.index_fill_.int_Tensor] = "shape that depends on values"
TOLERANCE = {aten.hardsigmoid_.default: 1e-7}  # torch's kernel holds 1/6 in fp32
X = torch.ones((), dtype=torch.float64)
SHAPES = [(3, 3), (2, 3, 3), (3,), ()]
INDICES = [torch.tensor([2, 0]), torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]])]
FLOATS = [("float", shape) for shape in [*SHAPES, (2, 3), (2,)]]
INTS = [("int", shape) for shape in SHAPES]


def choices(argument: Any) -> list[Any]:
    """What an argument of this name and type may be; ("float", shape) is made of a leaf."""
    kind, name = str(argument.type), argument.name
    if name in ("min", "max") and "Optional" in kind:
        return [argument.default_value, *([0.4] if "number" in kind else FLOATS)]
    if argument.has_default_value():
        return [argument.default_value]
    table: dict[str, list[Any]] = {
        "List[Optional[Tensor]]": [[INDICES[0]]], "List[Tensor]": [[f, f] for f in FLOATS],
        "List[number]": [[0.5, 2.0], [2, 3]], "Optional[number]": [0.5], "Optional[Tensor]": [None],
        "number": [0.5, 2], "float": [0.5], "int": [0, 1], "bool": [True],
        "str": ["sum", "amax", "add", "floor"],
        "Tensor": INDICES if "index" in name else [INDICES[1] > 0] if "mask" in name else [*FLOATS, *INTS],
    }  # fmt: skip
    return table.get(kind, [None])


@dataclass(frozen=True)
class Case:
    """One op with arguments that torch takes."""

    op: OpOverload
    dtype: str  # of what is written to
    shape: tuple[int, ...]
    arguments: tuple[Any, ...]

    def leaves(self) -> dict[str, Tensor]:
        """What is written to, ["self"], twice over; and the other operands."""
        draw = torch.Generator().manual_seed(len(str(self.op)))
        tensors = [t for a in self.arguments for t in (a if isinstance(a, list) else [a]) if is_leaf(t)]
        shapes = {"self": (2, *self.shape)} | {f"{i}": shape for i, (_, shape) in enumerate(tensors)}
        return {n: torch.rand(s, generator=draw, dtype=torch.float64) * 0.8 + 0.1 for n, s in shapes.items()}

    def base(self, leaf: Tensor, x: Tensor) -> Tensor:
        """What is written to; `x` (ones) is of the batch, so that it is no function of leaves alone."""
        return leaf * x if self.dtype == "float" else (leaf.detach() * 5 * x + 1).long()

    def write(self, base: Tensor, leaves: Iterator[Tensor], through_view: bool) -> None:
        """The op on `base`, or on its first half (of a list: on both halves)."""

        def made(value: Any) -> Any:
            if isinstance(value, list):
                return list(map(made, value))
            if not is_leaf(value):
                return value
            leaf = next(leaves)
            return leaf if value[0] == "float" else (leaf.detach() * 5 + 1).long()

        schema = self.op._schema.arguments
        target = base[0] if through_view or "List" not in str(schema[0].type) else base
        if str(schema[0].type) == "List[Tensor]":
            target = [base[0], base[1]]
        values = list(zip(schema[1:], map(made, self.arguments), strict=True))
        named = {a.name: v for a, v in values if a.kwarg_only}
        self.op(target, *[v for a, v in values if not a.kwarg_only], **named)


def is_leaf(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in ("float", "int")


def accepted(case: Case) -> bool:
    """Whether torch runs and differentiates it, to finite numbers."""
    leaves = {n: v.requires_grad_() for n, v in case.leaves().items()}
    base = case.base(leaves["self"], X)
    rest = [v for n, v in leaves.items() if n != "self"]
    try:
        case.write(base, iter(rest), True)
        if not base.is_floating_point():
            return not base.requires_grad
        grads = torch.autograd.grad(base.square().sum(), list(leaves.values()), allow_unused=True)
    except (RuntimeError, IndexError, NotImplementedError, ValueError):
        return False
    return bool(base.isfinite().all()) and all(g is None or bool(g.isfinite().all()) for g in grads)


@functools.cache
def cases() -> tuple[Case, ...]:
    """For each op the first arguments that torch takes."""
    found = []
    for op in mutable_ops():
        options = [choices(a) for a in op._schema.arguments[1:]]
        tried = (
            Case(op, dtype, shape, arguments)
            for dtype in ("float", "int")
            for shape in SHAPES[:3]
            for arguments in itertools.islice(itertools.product(*options), 400)
        )
        found += [c for c in [next(filter(accepted, tried), None)] if c is not None]
    return tuple(found)


def loss_of(some: Sequence[Case], through_view: bool) -> Callable[..., Any]:
    """All cases in one program: what was written is read through the base and through an earlier view."""

    def loss(p: Params, x: Tensor) -> Any:
        bases = [c.base(p[f"{i}.self"], x) for i, c in enumerate(some)]
        views = [b.view(-1) for b in bases]
        for i, case in enumerate(some):
            rest = (p[n] for n in p if n.startswith(f"{i}.") and n != f"{i}.self")
            case.write(bases[i], rest, through_view)
        sums = [b.square().sum() + v[::2].sum() for b, v in zip(bases, views, strict=True)]
        return sum((s for s in sums if s.is_floating_point()), p["0.self"].sum()), bases

    return loss


def written_step(some: Sequence[Case], through_view: bool, units: int = 2) -> tuple[Any, Params]:
    params = {f"{i}.{n}": v for i, c in enumerate(some) for n, v in c.leaves().items()}
    unit = {p: f"u{int(units == 2 and not p.endswith('self'))}" for p in params}
    layouts = [(p, LayoutSpec(P("shard") if v.dim() else P())) for p, v in params.items()]
    specs = fs.match_specs(params, layouts, units=lambda tree: unit)
    mesh = fs.make_mesh(shard=1, device="cpu")
    return fs.shard_step(loss_of(some, through_view), specs, mesh=mesh, backend="eager"), params


def assert_as_torch(some: Sequence[Case], through_view: bool, units: int) -> None:
    """Values, and gradients of what is written to and of what is read."""
    step, params = written_step(some, through_view, units)
    assert len(step.lower(params, X).segments.segments) == units
    (_, bases), grads = step(params, X)
    leaves = {n: v.clone().requires_grad_() for n, v in params.items()}
    total, expected = loss_of(some, through_view)(leaves, X)
    for case, base, value in zip(some, bases, expected, strict=True):
        atol = TOLERANCE.get(case.op, 1e-10)
        torch.testing.assert_close(base, value.detach(), rtol=0, atol=atol, msg=str(case.op))
    truth = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), truth, strict=True):
        op = some[int(name.split(".")[0])].op
        grad = torch.zeros_like(leaf) if grad is None else grad
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=TOLERANCE.get(op, 1e-10), msg=str(op))


@pytest.mark.parametrize(("through_view", "units"), [(False, 1), (True, 2)])
def test_ops_in_place_whose_operands_have_other_shapes(through_view: bool, units: int) -> None:
    """Indices, matrices and vectors, masks."""

    def other(argument: Any, shape: tuple[int, ...]) -> bool:
        return isinstance(argument, Tensor) or (is_leaf(argument) and argument[1] != shape)

    some = [c for c in cases() if any(other(a, c.shape) for a in c.arguments)]
    assert len(some) > 20
    assert_as_torch(some, through_view, units)


@pytest.mark.long
def test_every_op_in_place() -> None:
    assert len(cases()) > 250
    assert_as_torch(cases(), True, 2)


@pytest.mark.parametrize("op", REFUSED, ids=str)
def test_what_torch_cannot_take_apart_is_refused(op: OpOverload) -> None:
    arguments = {"polygamma_": (1,), "fill_diagonal_": (0.5, False)}.get(
        op._schema.name[6:], (0, INDICES[0], ("float", ()))
    )
    step, params = written_step([Case(op, "float", (3, 3), arguments)], through_view=True)
    with pytest.raises(TraceError, match=f"(?s){REFUSED[op]}.*Fix: "):
        step.lower(params, X)


def gaps(x: Tensor) -> Tensor:
    """A tensor of 4 numbers, with as much room between them."""
    return torch.empty_strided((4,), (2,), dtype=x.dtype).copy_(x)


def tripled(x: Tensor) -> Tensor:
    return gaps(x).as_strided((2,), (2,)).mul_(3)


def overlap(x: Tensor) -> Tensor:
    base = torch.empty_strided((2, 2), (1, 1), dtype=x.dtype)
    base[:, 0].copy_(x[:2])
    return base.select(0, 1).mul_(2)


def expanded(x: Tensor) -> Tensor:
    h = torch.sin(x)
    h[:1].expand(3).mul_(2)
    return h


def rows(x: Tensor) -> Tensor:
    gaps(x)[::2].mul_(3)
    dense = x.view(2, 2).t().clone()
    dense.as_strided((4,), (1,)).mul_(torch.arange(4, dtype=x.dtype))
    return dense


@pytest.mark.parametrize(
    ("write", "refusal"),
    [
        (tripled, r"strides \[2\] has gaps.*Fix: make it dense"),
        (overlap, "overlaps itself.*Fix: make it dense"),
        (expanded, r"f64\[3\] with strides \[0\] by aten.mul_.*Fix: write to a copy"),
        (rows, ""),
    ],
)
def test_strides_beneath_a_write_are_torchs_or_refused(write: Callable[..., Tensor], refusal: str) -> None:
    params = {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}

    def loss(p: Params, x: Tensor) -> Tensor:
        return write(p["w"] * x).square().sum()

    step, x = step_of(loss, params), torch.arange(1.0, 5.0, dtype=torch.float64)
    if refusal:
        with pytest.raises(TraceError, match=f"(?s){refusal}"):
            step(params, x)
    else:
        torch.testing.assert_close(step(params, x), torch.func.grad_and_value(loss)(params, x)[::-1])
