"""Compare a sharded step with the unsharded function that it was made from, in one process.

The program that a step keeps is also compared with what that function does now.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, arguments_for
from fnshard.compiler.ir.containers import one_run
from fnshard.compiler.ir.program import Program
from fnshard.errors import DebugError, SpecError, StateError
from fnshard.layout.codecs import is_coded
from fnshard.layout.pairs import as_pairs
from fnshard.layout.partition import boxes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import LayoutSpec, is_here
from fnshard.losses import Mean, Sequence, Whole, unwrap_leaf
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives.simulated import simulate
from fnshard.step.batches import check_leaves, split_batch
from fnshard.step.rank_agreement import checksum
from fnshard.step.shards import unshard
from fnshard.step.step import Step, shard_step

SHOWN = 12  # lines of a message
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class GradientError:
    """The error of one leaf's gradient (or of the loss) against the unsharded function, on the worst rank.

    `relative` is `absolute` divided by the largest number of the leaf.
    """

    leaf: str
    absolute: float
    relative: float
    rank: int
    within: bool

    def __str__(self) -> str:
        mark = "  " if self.within else "! "
        return f"{mark}{self.absolute:9.2e}  {self.relative:9.2e}  rank {self.rank}  {self.leaf}"


@dataclass(frozen=True)
class CheckReport:
    """The answer of `fs.debug.check`: true where all `leaves`, worst first, are within the tolerance."""

    mesh: Mesh = field(repr=False)
    loss: GradientError
    leaves: tuple[GradientError, ...]
    rtol: float

    @property
    def failed(self) -> tuple[GradientError, ...]:
        """The errors beyond the tolerance: the loss, and then the leaves, worst first."""
        return tuple(error for error in (self.loss, *self.leaves) if not error.within)

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        head = (
            f"{len(self.leaves)} gradients and the loss on mesh {self.mesh}, against the unsharded function: "
        )
        head += f"{len(self.failed)} beyond" if self.failed else "all within"
        lines = [f"{head} rtol={self.rtol:g}", "  absolute   relative   worst on  leaf", str(self.loss)]
        lines += [str(error) for error in self.leaves[:SHOWN]]
        if len(self.leaves) > SHOWN:
            lines.append(f"  ... and {len(self.leaves) - SHOWN} more")
        if self.failed:
            lines.append(_WAY_OUT)
        return "\n".join(lines)


_WAY_OUT = (
    "Fix: `fn` returns a mean over rows, as a step gives the mean over the parts of the batch (of a sum, one "
    "part of it): fs.Mean(total, count) where parts count unequally, fs.psum where rows meet. Where a "
    "lower precision is meant, rtol=; NaN is fs.debug.nan_hunt's."
)


def check(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    specs: Any,
    mesh: Mesh | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    strict: bool = True,
    **options: Any,
) -> CheckReport:
    """Compare loss and gradients of the sharded step with those of `fn` on the whole batch, leaf by leaf.

    All ranks are simulated in this process; nothing is compiled.

    Args:
        params: the full tree.
        batch: the global batch: a tuple of what `fn` takes after `params` (or the one argument); it is
            cut along dim 0 over the data axes.
        mesh: a simulated mesh; by default two ranks along each axis that the specs name.
        keywords: the part of the batch that `fn` takes by name.
        rtol: how far a gradient may be off, as a share of the largest number of its leaf; by default one for
            the leaf's dtypes.
        atol: differences below this are ignored; by default 1e-3 of rtol times the largest gradient of all.
        strict: raise where they differ; otherwise the report says so.
        options: options of `shard_step` (remat, accumulate, ...).

    Raises:
        DebugError: they differ; its `.report` is what would be returned otherwise.
        StateError: the batch cannot be cut, or `fn` draws random numbers.

    >>> from fnshard import LayoutSpec, P, match_specs
    >>> params = {"w": torch.ones(4, 4)}
    >>> specs = match_specs(params, [("*", LayoutSpec(P("shard")))])
    >>> bool(check(lambda p, x: (x @ p["w"]).square().mean(), params, torch.ones(4, 4), specs))
    True
    """
    resolved = ResolvedSpecs.of(specs).resolve(params)
    named = resolved.leaves
    mesh = _check_simulated(mesh, named.values())
    params, batch = on_device(mesh, params), on_device(mesh, arguments_for(fn, batch, keywords))
    check_leaves(batch)

    # Run the sharded step, with all ranks in this process.
    parts = list(split_batch(batch, mesh.data_size, "parts, one a rank,"))
    step = shard_step(fn, resolved.tree, mesh=mesh, **{**options, "backend": "eager"})
    program = parts[0].call(step.lower, params).program
    if any(i.kind == "key" for i in program.inputs):
        raise StateError(
            "`fn` draws random numbers, other ones on each rank: there is no one truth to compare with.",
            fix="model.eval() before make_functional, or dropout=0.",
        )
    losses, grads, seen = _run_sharded(step, params, parts)

    # The tolerance is that of the coarsest dtype that rounds a leaf.
    if rtol is None:
        dtypes = [d for s in named.values() for d in _list_rounding_dtypes(s)] or [torch.float32]
        rtol = max(TOLERANCES.get(d, 0.2) for d in dtypes)

    # Compare with the truth: `fn` on the whole batch, and torch's autograd.
    loss, expected = _run_unsharded(fn, seen, named, tree.map(unwrap_leaf, batch, constants=True))
    report = _compare(mesh, losses, grads, loss, expected, named, rtol, atol)
    if report.failed and strict:
        raise DebugError(str(report), report=report)
    return report


def _check_simulated(mesh: Mesh | None, specs: Iterable[LayoutSpec]) -> Mesh:
    """Return the mesh, which must be simulated; without one, two ranks along every axis that specs name."""
    if mesh is None:
        axes: list[str] = []
        for spec in specs:
            for layout in (spec.storage, spec.gradient, spec.optimizer):
                axes += layout.axes
        return make_mesh(**dict.fromkeys(axes or ["shard"], 2), simulated=True)
    if mesh.kind != "simulated":
        sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.sizes, strict=True))
        raise SpecError(
            f"mesh {mesh} is {mesh.kind}; all its ranks must be in this process.",
            fix=f"fs.make_mesh({sizes}, simulated=True), or smaller.",
        )
    return mesh


def on_device(mesh: Mesh, values: Any) -> Any:
    """Move a tree's tensors to the mesh's device: both sides of the comparison are computed on one."""

    def move(value: Any) -> Any:
        if isinstance(value, Whole | Sequence):
            return replace(value, value=move(value.value))
        return value.to(mesh.device) if isinstance(value, Tensor) else value

    return tree.map(move, values)


def _list_rounding_dtypes(spec: LayoutSpec) -> list[torch.dtype]:
    """Return the dtypes that round a leaf's values or its gradient."""
    if not spec.trainable:
        return [spec.compute_dtype] if spec.compute_dtype.is_floating_point else []
    return [spec.storage_dtype, spec.wire_dtype or spec.compute_dtype, spec.compute_dtype, spec.reduce_dtype]


def _run_sharded(
    step: Step, params: Any, parts: list[Arguments]
) -> tuple[list[Tensor], list[dict[str, Tensor]], Any]:
    """Return every rank's loss and blocks of gradients; and the tree that `fn` sees, coded leaves decoded."""
    mesh = step.mesh

    def run(rank: int) -> tuple[Any, dict[str, Tensor], Any]:
        blocks = step.init(params)
        result, grads = parts[mesh.data_rank].call(step, blocks)
        loss = result[0] if isinstance(result, tuple) else result
        # Codes round leaves: what `fn` sees is what they decode to.
        has_codes = any(map(is_coded, step.resolved.leaves.values()))
        seen = unshard(blocks, step.specs, mesh) if has_codes else params
        return loss.detach(), tree.flatten_with_paths(grads)[0], seen

    losses, grads, seen = zip(*simulate(mesh, run), strict=True)
    return list(losses), list(grads), seen[0]


def _run_unsharded(
    fn: Callable[..., Any], params: Any, specs: Mapping[str, LayoutSpec], batch: Arguments
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients of the whole batch, by torch's own autograd."""
    given, structure = tree.flatten_with_paths(params)
    with torch.inference_mode(False), torch.enable_grad(), one_run():
        # Leaves begin in the dtype that they are stored in, so that both sides start from the same numbers.
        stored: dict[str, Tensor] = {}
        for (path, spec), value in zip(specs.items(), given.values(), strict=True):
            dtype = spec.storage_dtype if spec.trainable else value.dtype
            stored[path] = value.detach().to(dtype, copy=True).requires_grad_(spec.trainable)
        seen = {
            p: v.to(specs[p].compute_dtype) if v.is_floating_point() or v.is_complex() else v
            for p, v in stored.items()
        }
        result = batch.call(fn, tree.unflatten(seen.values(), structure))
        loss = result[0] if isinstance(result, tuple) else result
        if isinstance(loss, Mean):
            count = torch.as_tensor(loss.count).double()
            loss = loss.total.double() / count.clamp(min=torch.finfo(torch.float64).tiny)
        loss.backward()  # reentrant checkpoints take no torch.autograd.grad
    trained = {p: v for p, v in stored.items() if v.requires_grad}
    return loss.detach(), {p: torch.zeros_like(v) if v.grad is None else v.grad for p, v in trained.items()}


def _compare(
    mesh: Mesh,
    losses: list[Tensor],
    grads: list[dict[str, Tensor]],
    loss: Tensor,
    expected: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    rtol: float,
    atol: float | None,
) -> CheckReport:
    """Return how far the ranks' losses and gradients are from the expected ones."""
    # A leaf whose gradient is nearly zero is judged by the size of the others.
    floor = 1e-3 * rtol * max(map(_find_largest, expected.values()), default=0.0) if atol is None else atol

    def find_worst(name: str, gaps: Mapping[int, float], whole: Tensor) -> GradientError:
        """Return the error of the rank that is farthest from the unsharded tensor."""
        rank = max(gaps, key=gaps.__getitem__)
        gap, scale = gaps[rank], _find_largest(whole)
        if gap == 0:
            relative = 0.0
        elif scale == 0:
            relative = float("inf")
        else:
            relative = gap / scale
        return GradientError(name, gap, relative, rank, gap <= floor + rtol * scale)

    # Each rank has a block of a leaf's gradient, which is compared with its part of the whole one.
    errors: list[GradientError] = []
    for path, full in expected.items():
        spec = specs[path]
        gaps: dict[int, float] = {}
        for rank, blocks in enumerate(grads):
            # Ranks of other stages have no gradient of the leaf; boxes leave a block's padding out.
            if is_here(spec, mesh, rank):
                rank_boxes = boxes(spec.shape, spec.gradient, mesh, mesh.coordinate(rank))
                gaps[rank] = max(
                    _measure_gap(blocks[path][in_block], full[in_leaf]) for in_leaf, in_block in rank_boxes
                )
        errors.append(find_worst(path, gaps, full))
    errors.sort(key=lambda error: (error.within, -error.relative))
    loss_gaps = {rank: _measure_gap(rank_loss, loss) for rank, rank_loss in enumerate(losses)}
    return CheckReport(mesh, find_worst("(the loss)", loss_gaps, loss), tuple(errors), rtol)


def _find_largest(tensor: Tensor) -> float:
    """Return the largest magnitude among a tensor's finite numbers."""
    numbers = as_pairs(tensor)
    finite = numbers.double()[numbers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _measure_gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference: 0 for NaN or inf at the same places, infinite for one at others."""
    if a.numel() == 0:
        return 0.0
    x, y = (as_pairs(each).double() for each in (a, b))
    # Where both are NaN or the same infinity the difference is NaN, and is no gap.
    gap = (x - y).abs().nan_to_num(nan=float("inf"))
    return float(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, gap).max())


def check_stale(step: Step, state: Any, /, *batch: Any, **keywords: Any) -> None:
    """Trace `fn` again, and compare what it does now with the program that the step runs for this batch.

    Before it runs, a step compares much of what `fn` reads besides its arguments, but not all of it
    (`experiments/guide/limits.md`). This compares everything, files and environment included, as only a trace
    can. It needs no device.

    Args:
        state: the state, as the step takes it.
        batch, keywords: this rank's slice of the batch, passed as `fn` takes it.

    Raises:
        DebugError: the programs differ, or the tensors that `fn` closes over; shows the lines that do.

    >>> import os
    >>> import torch
    >>> import fnshard as fs
    >>> os.environ["SCALE"] = "1"
    >>> params, x = {"w": torch.ones(2)}, torch.ones(2)
    >>> fn = lambda p, x: (p["w"] * x * float(os.environ["SCALE"])).sum()
    >>> step = fs.shard_step(fn, fs.match_specs(params, [("*", fs.LayoutSpec())]), backend="eager")
    >>> fs.debug.check_stale(step, params, x)
    >>> os.environ["SCALE"] = "2"
    >>> fs.debug.check_stale(step, params, x)
    Traceback (most recent call last):
    ...
    fnshard.errors.DebugError: `fn` is no longer what the step runs for this batch, 2 lines differ:
      - mul_tensor_1 = aten.mul.Tensor(mul_tensor, 1.0)  # f32[2]
      + mul_tensor_1 = aten.mul.Tensor(mul_tensor, 2.0)  # f32[2]
    Fix: pass what changes with the batch as a tensor, or make the step again.
    """
    kept = step.lower(state, *batch, **keywords).program
    traced = step.front(*batch, **keywords).program
    # The first two lines of a diff name files; of the others, keep those that were removed or added.
    lines = list(difflib.unified_diff(_write_lines(kept), _write_lines(traced), lineterm="", n=0))[2:]
    lines = [f"{line[0]} {line[1:]}" for line in lines if line[0] in "+-"]
    if not lines:
        return
    shown = lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]
    raise DebugError(
        f"`fn` is no longer what the step runs for this batch, {len(lines)} lines differ:",
        shown,
        "pass what changes with the batch as a tensor, or make the step again.",
    )


def _write_lines(program: Program) -> list[str]:
    """Return a program as lines of text, with its autocast modes and checksums of its constants."""
    nodes = [n for n in program.graph.nodes if n.meta.get("autocast")]
    modes = [f"{n.name} under autocast {n.meta['autocast']}" for n in nodes]
    constants = [f"{name} with the numbers {checksum(v):08x}" for name, v in program.constants.items()]
    return [*program.as_text().splitlines(), *modes, *constants, str(program.outputs)]
