"""Options: everything about a step that is not its function, specs, mesh or optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fnshard.analysis.transport import kind_of
from fnshard.compiler.kernels.remat import check as check_remat
from fnshard.compiler.lower import LowerOptions
from fnshard.compiler.place.strategies import ContextAttention, Residual
from fnshard.compiler.schedule.build import AccumulateMode
from fnshard.errors import SpecError
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer
from fnshard.optim.loss_scale import LossScale
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT
from fnshard.runtime.executor.fused_update import is_compiled
from fnshard.step.buckets import Buckets

Backend = Literal["inductor", "eager"]
UpdateMode = Literal["auto", "eager", "compiled"]


@dataclass(frozen=True)
class Options:
    """Everything about a step that is not its function, specs, mesh or optimizer; see `shard_step`."""

    accumulate: int = 1
    accumulate_mode: AccumulateMode = "reduce"
    lowering: LowerOptions = LowerOptions()
    backend: Backend = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | Literal["dynamic"] | None = None
    grad_norm: bool = False
    cache: int = 8
    timeout: float = DEFAULT_TIMEOUT
    disk_dir: str | None = None
    deterministic: bool = False
    update: UpdateMode = "auto"
    shapes: Buckets | None = None

    def __post_init__(self) -> None:
        low = self.lowering
        wrong = check_remat(low.remat, low.save)
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            wrong.append(f"accumulate={self.accumulate!r}: a whole number of micro-batches, at least 1")
        if self.accumulate_mode not in ("reduce", "local"):
            wrong.append(f"accumulate_mode={self.accumulate_mode!r}: 'reduce' or 'local'")
        if self.backend not in ("inductor", "eager"):
            wrong.append(f"backend={self.backend!r}: 'inductor' or 'eager'")
        if self.update not in get_args(UpdateMode):
            wrong.append(f"update={self.update!r}: 'auto', 'eager' or 'compiled'")
        if low.residual not in get_args(Residual):
            wrong.append(f"residual={low.residual!r}: 'split' or 'whole'")
        if self.shapes is not None and not isinstance(self.shapes, Buckets):
            wrong.append(f"shapes={self.shapes!r}: fs.Buckets(multiple=64, pad=...), or None")
        if low.context_attention not in get_args(ContextAttention):
            choices = ", ".join(map(repr, get_args(ContextAttention)))
            wrong.append(f"context_attention={low.context_attention!r}: one of {choices}")
        if not _counts(low.passes.prefetch, 2):
            wrong.append(f"prefetch={low.passes.prefetch!r}: a number of kernels, or (forward, backward)")
        if not _counts((low.passes.overlap,), 1):
            wrong.append(f"overlap={low.passes.overlap!r}: a whole number of kernels, 0 (none) or more")
        if not _counts((self.cache,), 1) or self.cache < 1:
            wrong.append(f"cache={self.cache!r}: a whole number of batch shapes, at least 1")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            wrong.append(f"timeout={self.timeout!r}: seconds, more than 0")
        if not isinstance(self.deterministic, bool):
            wrong.append(f"deterministic={self.deterministic!r}: True or False")
        if self.disk_dir is not None and not isinstance(self.disk_dir, str | os.PathLike):
            wrong.append(f"disk_dir={self.disk_dir!r}: the path of an existing directory")
        if wrong:
            raise SpecError("invalid options of a step:", wrong)
        LossScale.choose(self.loss_scale, fp16=False)

    def compiles_update(self, optimizer: Optimizer | None, device_type: str) -> bool:
        """Whether Inductor compiles the optimizer, too, for such a device."""
        return is_compiled(self.update, optimizer, self.backend, device_type)


def default_depth(mesh: Mesh) -> int:
    """How many kernels early a step gathers, and how many later it waits for reductions, if nobody says.

    CPU ranks that share memory move bytes on the thread that computes: nothing would travel while a
    kernel runs, and what waits would only take memory.
    """
    return 0 if isinstance(mesh, Mesh) and kind_of(mesh) == "shared" else 1


def _counts(values: Any, length: int) -> bool:
    """Whether these are so many whole numbers, none negative."""
    return (
        isinstance(values, tuple)
        and len(values) == length
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    )
