"""Exchange: values of the program, or their tangents, that ranks compute together inside a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fnshard.compiler.frontend.exchange import DUALS, received_shape
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.canonical import Argument
from fnshard.compiler.kernels.segments import Exchanged
from fnshard.compiler.schedule.instructions.base import COMMUNICATION, Action, Env, Instruction, Wait
from fnshard.compiler.schedule.paper import ACTIVATIONS, tensors_in
from fnshard.mesh import Mesh

if TYPE_CHECKING:
    from fnshard.analysis.cost import Price, Pricer
    from fnshard.analysis.rank_memory import RankMemory
    from fnshard.compiler.schedule.schedule import Schedule
    from fnshard.runtime.executor.context import Context

_COLLECTIVES = {"psum": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
_PRICES = {"psum": "all_reduce", "all_gather": "gather", "reduce_scatter": "reduce_scatter"}


@dataclass(frozen=True)
class Exchange(Instruction):
    """Issue: a value -> what `kind` makes of every rank's; see `compiler.frontend.exchange`.

    `like`: what is sent. `dim`: along which it is gathered or scattered.
    """

    lane = COMMUNICATION

    kind: str = "psum"
    axes: tuple[str, ...] = ()
    dim: int = 0
    like: Argument | None = None

    @property
    def trips(self) -> int:
        return 2 if self.kind == "psum" else 1

    @property
    def detail(self) -> str:
        return f"{self.kind}({', '.join(self.reads)} {self.like}) over {', '.join(self.axes)}"

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        return ", ".join(wait.writes)

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return self.axes

    @property
    def sent_bytes(self) -> int:
        """Of one rank's value."""
        return math.prod(self.like.shape) * self.like.dtype.itemsize

    def wire_bytes(self, schedule: Schedule) -> int:
        return self.sent_bytes * (schedule.mesh.axes_size(self.axes) if self.kind == "all_gather" else 1)

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        shape = f" {list(self.like.shape)}" if shapes else ""
        return f"{self.kind} {self.like.dtype} dim {self.dim}{shape}"

    def received(self, schedule: Schedule) -> tuple[int, ...]:
        """The shape of the result."""
        ranks = schedule.mesh.axes_size(self.axes)
        return received_shape(self.like.shape, self.kind, self.dim, ranks)

    def _rows(self, schedule: Schedule) -> int:
        """In how many rows it is packed: one for each receiver where these get different ones."""
        return schedule.mesh.axes_size(self.axes) if self.kind == "reduce_scatter" else 1

    def bind(self, context: Context) -> Action:
        """Pack, in rows where it is scattered; issue."""
        comm, (source,), (flight,), axes, dim = context.comm, self.reads, self.writes, self.axes, self.dim
        rows, shape = self._rows(context.schedule), self.received(context.schedule)
        numel, dtype = math.prod(self.like.shape) // rows, self.like.dtype
        issue: Callable[..., Any] = getattr(comm, _COLLECTIVES[self.kind])

        def run(env: Env) -> None:
            value: Tensor = env[source]
            flat = comm.send_buffer(numel, dtype, axes, rows=rows)
            if rows > 1:
                flat.view(rows, *shape).copy_(value.unflatten(dim, (rows, -1)).movedim(dim, 0))
            else:
                flat.view(value.shape).copy_(value)
            env[flight] = issue(flat, axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """The sum, or the rows of all ranks put together."""
        issue: Exchange = context.schedule.issues[wait.reads[0]]
        (flight,), (out,), shape = wait.reads, wait.writes, issue.received(context.schedule)
        sent, dim = issue.like.shape, issue.dim

        def run(env: Env) -> None:
            handle = env.pop(flight)
            result = handle.wait()
            if isinstance(result, Tensor):
                env[out] = result.view(shape)
            else:
                env[out] = torch.cat([row.view(sent) for row in result], dim)
            handle.release()

        return run

    def memory(self, rank: RankMemory) -> None:
        live, transport, rows = rank.live, rank.transport, self._rows(rank.live.schedule)
        numel = math.prod(self.like.shape) // rows
        flat = transport.send_buffer(live, numel, self.like.dtype, self.axes, rows=rows)
        issue = getattr(transport, _COLLECTIVES[self.kind])
        live.set(self.writes[0], issue(live, flat, self.axes))

    @classmethod
    def wait_memory(cls, wait: Wait, rank: RankMemory) -> None:
        live, flight = rank.live, rank.live.names[wait.reads[0]]
        issue: Exchange = live.schedule.issues[wait.reads[0]]
        shape = issue.received(live.schedule)
        for tensor in tensors_in(flight):
            live.keep(tensor.storage)
        live.drop(wait.reads[0])
        if issue.kind == "all_gather":
            value = live.tensor(math.prod(shape), issue.like.dtype, ACTIVATIONS)
            rank.transport.release(flight)
        else:
            value = rank.transport.reduced(live, flight)
            live.recategorise(value, ACTIVATIONS)
        stride = torch.empty(shape, device="meta").stride()
        live.set(wait.writes[0], replace(value, shape=shape, stride=stride))
        for tensor in tensors_in(flight):
            live.release(tensor.storage)

    def price(self, pricer: Pricer) -> Price:
        size = self.wire_bytes(pricer.schedule)
        return pricer.copy(2 * self.sent_bytes, **pricer.collective(_PRICES[self.kind], self.axes, size))

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        gathered = pricer.schedule.issues[wait.reads[0]].kind == "all_gather"
        return pricer.copy(2 * pricer.bytes_of(wait.writes) if gathered else 0.0)


def exchange(
    each: Exchanged, mesh: Mesh, unit: str, phase: str, sent: ValueName, received: ValueName,
    backward: bool = False,
) -> tuple[Exchange, Wait]:  # fmt: skip
    """Issue and Wait of an exchange, or of its dual: from the cotangent of what was received."""
    kind, like = each.kind, each.like
    if backward:
        shape = received_shape(like.shape, kind, each.dim, mesh.axes_size(each.axes))
        kind, like = DUALS[kind], replace(like, shape=shape, requires_grad=False)
    flight = ValueName(Kind.FLIGHT, f"{sent} {received}")
    issue = Exchange(unit, phase, (sent,), (flight,), kind=kind, axes=each.axes, dim=each.dim, like=like)
    return issue, Wait(unit, phase, (flight,), (received,), of=Exchange)
