"""`shard_step`: a pure function and its specs -> a compiled, sharded training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fnshard.compiler.kernels.inductor import inductor_options
from fnshard.compiler.kernels.remat import Remat
from fnshard.compiler.lower import LowerOptions, Passes
from fnshard.compiler.place.strategies import ContextAttention, Residual
from fnshard.compiler.schedule.build import AccumulateMode
from fnshard.losses import Mean
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT
from fnshard.runtime.executor.cuda_graph import MODE
from fnshard.step.buckets import Buckets
from fnshard.step.options import Backend, Options, UpdateMode, default_depth
from fnshard.step.runner import default_mesh
from fnshard.step.state import LossT, OptimizerT
from fnshard.step.step import Step

__all__ = ["shard_step"]


def shard_step(
    fn: Callable[..., LossT | Mean],
    specs: Any,
    *,
    mesh: Mesh | None = None,
    optimizer: OptimizerT = None,
    accumulate: int = 1,
    accumulate_mode: AccumulateMode = "reduce",
    prefetch: int | tuple[int, int] | None = None,
    overlap: int | None = None,
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    loss_scale: float | Literal["dynamic"] | None = None,
    grad_norm: bool = False,
    remat: Remat = "none",
    save: Sequence[str] = (),
    disk_dir: str | None = None,
    deterministic: bool = False,
    update: UpdateMode = "auto",
    residual: Residual = "split",
    shapes: Buckets | None = None,
    context_attention: ContextAttention = "auto",
    cache: int = 8,
    timeout: float = DEFAULT_TIMEOUT,
) -> Step[OptimizerT, LossT]:
    """Compile `fn(params, *batch) -> loss` and its specs into a sharded step.

    Without an optimizer `step(params, *batch) -> (loss, grads)`, `grads` laid out as
    `LayoutSpec.gradient` says: the sharded `torch.func.grad_and_value` (with aux:
    `((loss, aux), grads)`). With one, `step(state, *batch) -> (state, metrics)`; see `Step.init`.

    Args:
        fn: written for one device and full shapes; returns a 0-d loss or `Mean`, or `(loss, aux)`. It may
            read numbers, flags and tensors that are no arguments; for other values it is traced again. What
            it writes to leaves that do not train is state: micro-batches hand it on, and the step stores it
            (without an optimizer, in `params`); `LayoutSpec.aggregation` joins what ranks have written.
        specs: a tree of `LayoutSpec`, from `match_specs` or a preset.
        mesh: default one axis "shard" over all ranks there are.
        optimizer: see `fnshard.optim`.
        accumulate: micro-batches per step; batch leaves are cut along dim 0, unless `Whole`.
        accumulate_mode: "reduce" every micro-batch, or accumulate "local" full gradients and reduce once.
        prefetch: how many kernels ahead gathers are issued, (forward, backward); 0 is none. None is 1, and 0
            for CPU ranks that share memory, whose collectives run on the thread that computes.
        overlap: how many kernels later reductions are waited for; None as with `prefetch`.
        backend: "inductor", or "eager": the same graphs uncompiled.
        mode, options: as `torch.compile` takes them. "reduce-overhead" replays all but the updates as one
            CUDA graph from the third step on; on one GPU with all state on it, elsewhere it is an error.
        loss_scale: a number, "dynamic", or None: dynamic where a leaf trains in fp16. A step that
            overflows is skipped: it is no update, for the optimizer's count and for the rate's schedule;
            what `fn` has written to leaves is stored all the same, as BatchNorm's statistics are in torch.
            The host waits for its norm: with a dynamic scale, and no other, a device idles before updates.
        grad_norm: put the global gradient norm into the metrics (clipping does anyway).
        remat: what is kept for the backward: "none" (all that it wants), "unit" (a unit's inputs; the rest
            is computed again), "offload" (all, on the host), "unit+offload", a fraction of what it wants; or
            a dict from unit globs to these, where units that no glob matches keep everything.
        save: with "unit", ops whose results are kept all the same: "matmul", "attention", "aten.mm", globs.
        disk_dir: an existing directory for what rests on disk (`LayoutSpec.memory`, `optimizer_memory`).
        deterministic: torch's deterministic algorithms alone, and no benchmarks in Inductor: the same bits
            again on the same GPUs. An op that has none is an error. CPUs give the same bits without.
        update: "compiled": Inductor makes one kernel of a unit's update, casts and stored copies in it;
            "eager": torch's fused optimizers. "auto" compiles on accelerators with backend "inductor", where
            the optimizer has `numbers`. What the host updates is updated eagerly.
        residual: what activations are between layers that a tensor axis splits (`LayoutSpec.compute`):
            "split" along the sequence (sequence parallelism: less memory, as many bytes), or "whole".
        context_attention: how attention runs over a sequence that the "context" axis splits: "ulysses", by
            all-to-alls from sequence to heads and back; "gather", each rank's queries with all keys and
            values; "ring", keys and values go round the ranks, one block at a time, and what is kept of them
            is the rank's own (Liu et al. 2023; no dropout). "auto" is what moves the fewest bytes of whole
            attention over heads, rows or gathered keys.
        shapes: pads batches of many lengths to few, `fs.Buckets(multiple=64, pad={"labels": -100, "*": 0})`.
            Each length is traced; from the second on, lengths share compiled kernels wherever these differ
            in sizes that follow the length, `a * length + b`.
        cache: how many programs are kept compiled, by batch shape and by the values that `fn` reads; with
            `shapes` at least 64.
        timeout: seconds after which a silent peer is an error.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs
    >>> params = {"w": torch.ones(3)}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> step = shard_step(lambda p, x: (p["w"] * x).sum(), specs, backend="eager")
    >>> step(params, torch.arange(3.0))
    (tensor(3.), {'w': tensor([0., 1., 2.])})

    Gradients come in `storage_dtype`; leaves that do not train have None. They are whole with
    `fs.unshard(grads, specs, mesh, layout="gradient")`.
    """
    mesh = mesh or default_mesh()
    usual = default_depth(mesh)
    ahead, later = usual if prefetch is None else prefetch, usual if overlap is None else overlap
    depth = (ahead, ahead) if isinstance(ahead, int) else ahead
    saved = save if isinstance(save, str) else tuple(save)
    passes = Passes(depth, later, mode == MODE)
    chosen = Options(
        accumulate, accumulate_mode, LowerOptions(passes, remat, saved, residual, context_attention), backend,
        inductor_options(mode, options), loss_scale, grad_norm, cache, timeout, disk_dir, deterministic,
        update, shapes,
    )  # fmt: skip
    return Step(fn, specs, mesh, optimizer, chosen)
