"""Exchange: values of the program, or their tangents, that ranks compute together inside a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.frontend.exchange import KINDS, ExchangeKind
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.kernels.segments import Exchanged
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Instruction,
    Price,
    Pricer,
    Schedule,
    Wait,
    on_arrival,
    with_wait,
)
from fnshard.mesh import Mesh


@dataclass(frozen=True)
class Exchange(Instruction):
    """The issue of an exchange: it makes of every rank's value what `kind` says.

    See `compiler.frontend.exchange` for the kinds.

    Args:
        like: the shape and dtype of the value that is sent.
        dim, to: the dims along which values are split or joined.
    """

    lane = COMMUNICATION

    kind: str = "psum"
    dim: int = 0
    like: Argument | None = None
    to: int = 0

    @property
    def of_kind(self) -> ExchangeKind:
        return KINDS[self.kind]

    def sent_share(self, ranks: int) -> Fraction:
        return self.of_kind.sent_share(ranks)

    @property
    def detail(self) -> str:
        dims = self.of_kind.dims_text(self.dim, self.to)
        return f"{self.kind}({', '.join(self.reads)} {self.like}{dims}) over {', '.join(self.axes)}"

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        return ", ".join(wait.writes)

    @property
    def sent_bytes(self) -> int:
        """The bytes of one rank's value."""
        return math.prod(self.like.shape) * self.like.dtype.itemsize

    def wire_bytes(self, schedule: Schedule) -> int:
        return self.sent_bytes * self.of_kind.full_share(schedule.mesh.axes_size(self.axes))

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        shape = f" {list(self.like.shape)}" if shapes else ""
        dims = self.of_kind.dims_text(self.dim, self.to) or f" dim {self.dim}"
        return f"{self.kind} {self.like.dtype}{dims}{shape}"

    def received_shape(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the shape of the result."""
        return self.of_kind.received_shape(self.like.shape, self.dim, self.to, self._count_ranks(schedule))

    def _count_ranks(self, schedule: Schedule) -> int:
        """Return the number of ranks that take part."""
        return schedule.mesh.axes_size(self.axes)

    def _find_rows(self, schedule: Schedule) -> tuple[int, tuple[int, ...]]:
        """Return the number of rows that a value is packed in, and the shape of a row.

        There is a row for each receiver where the value is split, else one.
        """
        ranks = self._count_ranks(schedule)
        return ranks if self.of_kind.splits else 1, self.of_kind.row(self.like.shape, self.dim, ranks)

    def _find_join_dim(self, schedule: Schedule) -> int | None:
        """Return the dim along which received rows are joined; None if they are the result as they come."""
        # Rows follow one another in memory. If nothing precedes the joined dim, that is their order already.
        _, joined = self.of_kind.dims(self.dim, self.to)
        _, shape = self._find_rows(schedule)
        in_order = self.of_kind.splits and math.prod(shape[:joined]) == 1
        return None if in_order else joined

    def bind(self, context: Context) -> Action:
        """Pack the value, in rows where it is split, and issue the collective."""
        comm, (source,), (flight,), axes, dim = context.comm, self.reads, self.writes, self.axes, self.dim
        rows, shape = self._find_rows(context.schedule)
        numel, dtype = math.prod(shape), self.like.dtype
        issue: Callable[..., Any] = getattr(comm, self.of_kind.collective)
        distance = (dim,) if self.of_kind.permutes else ()  # `dim` says how far a permutation moves values

        def run(env: Env) -> None:
            value: Tensor = env[source]
            flat = comm.send_buffer(numel, dtype, axes, rows=rows)
            # A value that is split is packed so that each receiver's part lies together.
            if rows > 1:
                flat.view(rows, *shape).copy_(value.unflatten(dim, (rows, -1)).movedim(dim, 0))
            else:
                flat.view(value.shape).copy_(value)
            env[flight] = issue(flat, axes, *distance)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the sum, or put the rows of all ranks together."""
        issue: Exchange = context.schedule.issues[wait.reads[0]]
        (out,), shape = wait.writes, issue.received_shape(context.schedule)
        ranks, joined = issue._count_ranks(context.schedule), issue._find_join_dim(context.schedule)
        _, row_shape = issue._find_rows(context.schedule)

        def take(env: Env, result: Any) -> None:
            if joined is None:
                env[out] = result.view(shape)
                return
            # Transports hand out rows in one tensor, or in a list.
            if isinstance(result, Tensor):
                rows = result.view(ranks, *row_shape).unbind(0)
            else:
                rows = [row.view(row_shape) for row in result]
            env[out] = torch.cat(rows, joined)

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        ranks, size = self._count_ranks(pricer.schedule), self.wire_bytes(pricer.schedule)
        if self.of_kind.permutes:  # it is priced as an all-to-all that sends as much
            size = size * ranks / (ranks - 1)
        return pricer.copy(2 * self.sent_bytes, **pricer.collective(self.of_kind.rate, self.axes, size))

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        joined = pricer.schedule.issues[wait.reads[0]]._find_join_dim(pricer.schedule)
        return pricer.copy(0.0 if joined is None else 2 * pricer.bytes_of(wait.writes))


def exchange(
    each: Exchanged, mesh: Mesh, unit: str, phase: str, sent: ValueName, received: ValueName,
    backward: bool = False,
) -> tuple[Instruction, Wait]:  # fmt: skip
    """Return the issue and the Wait of an exchange.

    Args:
        backward: return those of its dual, which brings cotangents of what was received to what was sent.
    """
    kind, like, dims = each.kind, each.like, (each.dim, each.to)
    if backward:
        shape = KINDS[kind].received_shape(like.shape, *dims, mesh.axes_size(each.axes))
        like, dims = replace(like, shape=shape, requires_grad=False), KINDS[kind].dual_dims(*dims)
        kind = KINDS[kind].dual
    flight = ValueName(Kind.FLIGHT, f"{sent} {received}")
    issue = Exchange(
        unit, phase, (sent,), (flight,), kind=kind, axes=each.axes, dim=dims[0], like=like, to=dims[1]
    )
    return with_wait(issue, received)
