"""Values: what the tools that run all ranks in one process are given, and what a running schedule holds, as
tensors with names: cut and laid out for ranks, compared, and whether they are finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, signature_of
from fnshard.compiler.ir.values import LOSS_TANGENT, SCALARS, Kind, ValueName
from fnshard.compiler.schedule.instructions import Instruction, Reduced
from fnshard.errors import DebugError, FnshardError, SpecError
from fnshard.layout.partition import boxes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec
from fnshard.losses import Sequence, Whole
from fnshard.mesh import Mesh, make_mesh

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
Health = Literal["", "inf", "nan"]  # the worst that a value holds; "" is finite
ORDER: tuple[Health, ...] = ("", "inf", "nan")


def tolerance(*dtypes: torch.dtype) -> float:
    """How far results may lie apart, by the largest number, where these dtypes take part."""
    return max(TOLERANCES.get(d, 0.2) if d.is_floating_point else 0.0 for d in dtypes)


def on_device(mesh: Mesh, values: Any) -> Any:
    """The tree's tensors where the mesh's are: what is compared is computed on one device."""

    def moved(value: Any) -> Any:
        if isinstance(value, Whole | Sequence):
            return dataclasses.replace(value, value=moved(value.value))
        return value.to(mesh.device) if isinstance(value, Tensor) else value

    return tree.map(moved, values)


def as_arguments(fn: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] | None) -> Arguments:
    """What `fn` takes after the parameters; a batch that is no tuple is one argument."""
    passed = Arguments(batch if isinstance(batch, tuple) else (batch,), keywords or {})
    return passed.in_order_of(signature_of(fn))


def simulated_mesh(mesh: Mesh | None, *trees: Any) -> Mesh:
    """The mesh as it is, if it is simulated; by default two ranks along every axis that specs name."""
    if mesh is None:
        specs = [s for t in trees for s in ResolvedSpecs.of(t).leaves.values()]
        named = [a for s in specs for p in (s.storage, s.gradient, s.optimizer) if p for a in p.axes]
        return make_mesh(**dict.fromkeys(dict.fromkeys(named) or ["shard"], 2), simulated=True)
    if mesh.kind != "simulated":
        sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.sizes, strict=True))
        raise SpecError(
            f"mesh {mesh} is {mesh.kind}; all its ranks must be in this process.",
            fix=f"fs.make_mesh({sizes}, simulated=True), or smaller.",
        )
    return mesh


def valid_parts(
    block: Tensor, spec: LayoutSpec, layout: Any, mesh: Mesh, rank: int
) -> list[tuple[tuple[slice, ...], Tensor]]:
    """Where a rank's block lies in the full leaf, and the block without its padding; part by part where it is
    `Fused`."""
    return [(f, block[mine]) for f, mine in boxes(spec.shape, layout, mesh, mesh.coordinate(rank))]


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest absolute difference of two tensors, and the largest number of either.

    NaN or inf at the same places is no difference; at others it is an infinite one.
    """
    if a.shape != b.shape:
        return float("inf"), float("inf")
    if a.numel() == 0:
        return 0.0, 0.0
    x, y = a.double(), b.double()
    gap = (x - y).abs()
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, gap.nan_to_num(nan=float("inf")))
    finite = [v[v.isfinite()].abs() for v in (x, y)]
    return float(gap.max()), max(float(v.max()) if v.numel() else 0.0 for v in finite)


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """What a value holds, by leaf, slot or field; a tensor is itself, under "". In flight: nothing."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Reduced):
        yield from value.blocks.items()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            for name, tensor in tensors(part):
                yield "/".join(filter(None, (str(key), name))), tensor
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "wait"):
        yield from tensors({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif isinstance(value, list | tuple):
        yield from tensors(dict(enumerate(value)))


def health(tensor: Tensor) -> Health:
    """Whether a tensor holds NaN, or infinities, or neither."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return ""
    tensor = widen_float8(tensor)
    if bool(torch.isfinite(tensor).all()):
        return ""
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"


def widen_float8(tensor: Tensor) -> Tensor:
    """8-bit floats in fp32: they have next to no ops of their own."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def worst_health(kinds: Iterator[Health] | list[Health]) -> Health:
    """NaN before inf before finite."""
    return max(kinds, key=ORDER.index, default="")


def count_nonfinite(tensor: Tensor) -> str:
    """`3 of 64 NaN, 1 inf`."""
    tensor = widen_float8(tensor)
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    parts = [f"{n} {word}" for n, word in ((nan, "NaN"), (inf, "inf")) if n]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()}"


def describe_value(name: str, part: str = "") -> str:
    """`gathered 'layers.0.w'`, for a value's name and which part of it."""
    plain = name.original if isinstance(name, ValueName) else ValueName(Kind.VALUE, name)
    if plain in (SCALARS, LOSS_TANGENT):
        return f"the step's {part}" if plain == SCALARS else "the loss scale"
    kind = plain.kind.name.lower()
    return f"{kind} {plain.leaf or plain.path + plain.version!r}" + (f", {part!r}" if part else "")


def describe_line(line: Instruction) -> str:
    """`forward layers.0 run k0.fwd(...)`."""
    return f"{line.phase} {line.unit} {line.verb} {line.detail}"


@contextmanager
def located(number: int, line: Instruction) -> Iterator[None]:
    """Say at which line of the schedule a rank broke off by itself, and not because of a peer."""
    try:
        yield
    except FnshardError:
        raise
    except Exception as error:
        raise DebugError(
            f"the run broke off at line {number}: {describe_line(line)}",
            [f"{type(error).__name__}: {error}".splitlines()[0]],
        ) from error
