"""Sum all numbers that ranks must know at the end of a step in one small all-reduce.

Losses, counts, aux scalars, squared norms and flags ride on it, so that agreeing on something (an overflow,
the end of the data) costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.ir.program import Limit, Outputs
from fnshard.compiler.ir.values import CONTROL, ValueName
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.layout.spec import LayoutSpec, averaged_axes
from fnshard.mesh import Mesh
from fnshard.optim.sums import sum_squares
from fnshard.runtime.tiers import copy_to_device


@dataclass(frozen=True)
class Summary:
    """The numbers of a step over all ranks.

    Args:
        loss, aux: means over ranks and micro-batches.
        count: the count of the loss's Mean, or None.
        norm: the norm of the summed gradients before they are unscaled, or None.
        flags: by name, the sum over ranks of what they have reported (`Scalars.flags`).
        excesses: by how much each limit of the program is exceeded, summed.
    """

    loss: Tensor
    count: Tensor | None
    aux: tuple[Tensor, ...]
    norm: Tensor | None
    flags: Mapping[str, Tensor]
    excesses: Mapping[Limit, Tensor]


def gradient_factor(
    summary: Summary | None, unscale: float, divisor: float, device: torch.device
) -> Tensor | None:
    """Return the factor by which reduced gradients must be multiplied before use, in fp64; None if it is 1.

    Args:
        summary: the step's numbers, or None while these are still under way.
        unscale: the part of the factor that is known before: it undoes the loss scale, and completes the
            seed.
        divisor: the number by which gradients were divided on the way; a Mean's count takes its place.
    """
    factor = None
    if unscale != 1.0:
        factor = torch.full((), unscale, dtype=torch.float64, device=device)
    # A Mean's count is known only with the scalars: `divisor` undoes what was divided on the way, and the
    # count divides in its place. Where nothing counts, the gradients are zero, and stay so.
    if summary is not None and summary.count is not None:
        safe = summary.count.clamp(min=torch.finfo(torch.float64).tiny)
        mean = torch.where(summary.count > 0, divisor / safe, 0.0)
        factor = mean if factor is None else factor * mean
    return factor


@dataclass(frozen=True)
class Scalars:
    """A layout of the vector that ranks sum, fixed at lowering and equal on all ranks.

    Args:
        outputs: how `fn`'s outputs lie in the program's results.
        results: names of the program's flat results.
        mesh, specs: the mesh, and the leaves' specs.
        accumulate: the number of micro-batches.
        norms: whether squared norms of gradients are summed.
        flags: names of numbers that each rank reports with a step (`StepControl.flags`), and that are summed.
            A flag proper is 1 on a rank that raises it, and else 0, so that its sum is the number of ranks
            that do. A count, such as that of rows, may be reported too.
    """

    outputs: Outputs
    results: Sequence[ValueName]
    mesh: Mesh
    specs: Mapping[str, LayoutSpec]
    accumulate: int
    norms: bool
    flags: tuple[str, ...] = ()

    def square_norm(self, bucket: Bucket, blocks: Mapping[str, Tensor], replicas: int) -> Tensor:
        """Return a bucket's squared norm, 0-d in fp64, divided by its replicas, over which ranks will sum."""
        return sum_squares([blocks[p] for p in bucket.paths]) / replicas

    @property
    def _ranks(self) -> int:
        """Return the number of ranks that each have a part of the loss."""
        return self.mesh.axes_size(averaged_axes(self.specs.values(), self.mesh))

    def pack(self, env: Mapping[str, Any], norms: Sequence[Tensor], own: Collection[str]) -> Tensor:
        """Return the fp64 vector of this rank's summands.

        Args:
            norms: squared norms of gradients; empty on a stage where nothing trains.
            own: the results that this rank's stage makes; the others' summands are zero here.
        """
        device = self.mesh.device
        zero = torch.zeros((), dtype=torch.float64, device=device)

        # The results of `fn`, summed over micro-batches; `unpack` reads the vector in this order.
        parts = []
        for index in self.outputs.summed:
            name = self.results[index]
            names = [name] if self.accumulate == 1 else [name.of(m) for m in range(self.accumulate)]
            is_made_here = any(n in own for n in names)
            parts.append(torch.stack([env[n].double() for n in names]).sum() if is_made_here else zero)

        # Squared norms lie where the gradients do, some of them on the host.
        if self.norms:
            parts.append(torch.stack([copy_to_device(n, device) for n in norms] or [zero]).sum())
        # `full` is a kernel; copying a number to an accelerator would make the host wait.
        for flag in self.flags:
            value = env[CONTROL].flags.get(flag, 0.0)
            parts.append(torch.full((), value, dtype=torch.float64, device=device))
        return torch.stack(parts)

    def unpack(self, vector: Tensor) -> Summary:
        """Read the summed vector, in the order in which `pack` has written it."""
        # The loss, and its count if it is a Mean.
        feed = iter(vector.unbind(0))
        parts = self._ranks * self.accumulate  # the number of losses that are averaged
        loss = next(feed)
        count = next(feed) if self.outputs.count is not None else None
        loss = loss / (parts if count is None else _as_divisor(count))

        # The aux; its constants and tensors do not travel in the vector.
        aux = []
        for kind, *_ in self.outputs.aux:
            if kind == "scalar":
                aux.append(next(feed) / parts)
            elif kind == "complex":
                aux.append(torch.complex(next(feed), next(feed)) / parts)
            elif kind == "mean":
                total = next(feed)
                aux.append(total / _as_divisor(next(feed)))

        # Limits, the norm and the flags.
        excesses = {limit: next(feed) for limit in self.outputs.limits}
        norm = next(feed).sqrt() if self.norms else None
        flags = {f: next(feed) for f in self.flags}
        return Summary(loss, count, tuple(aux), norm, flags, excesses)

    def aux_tree(self, summary: Summary, env: Mapping[str, Any]) -> Any:
        """Return `fn`'s aux with scalars averaged, Means exact, and tensors of the last micro-batch."""
        if self.outputs.aux_structure is None:
            return None
        means = iter(summary.aux)
        last = self.accumulate - 1 if self.accumulate > 1 else None
        leaves = []
        for kind, *details in self.outputs.aux:
            if kind in ("scalar", "complex", "mean"):
                leaves.append(next(means))
            elif kind == "python":  # a constant of the program
                leaves.append(details[0])
            else:
                leaves.append(env[self.results[details[0]].of(last)])
        return tree.unflatten(leaves, self.outputs.aux_structure)


def _as_divisor(count: Tensor) -> Tensor:
    """Return a count as a divisor: a count of zero belongs to a total of zero, whose mean becomes zero."""
    return count.clamp(min=torch.finfo(torch.float64).tiny)
