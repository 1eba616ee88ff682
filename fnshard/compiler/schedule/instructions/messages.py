"""Messages: the lines by which the stages of a pipeline send one another values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fnshard.compiler.ir.program import short_dtype
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Instruction,
    Names,
    Price,
    Pricer,
    Schedule,
    Wait,
    on_arrival,
)
from fnshard.mesh import PIPELINE


@dataclass(frozen=True)
class Message(Instruction):
    """One end of a message between two stages.

    Args:
        stage: the stage at the other end.
        values: the names of the values that travel, the same at both ends.
        likes: their shapes and dtypes.
    """

    lane = COMMUNICATION

    stage: int = 0
    values: Names = ()
    likes: tuple[Argument, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of all values."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.likes)

    @property
    def shown(self) -> str:
        """The values with their dtypes and shapes, as text."""
        pairs = zip(self.values, self.likes, strict=True)
        return ", ".join(f"{n} {short_dtype(a.dtype)}[{', '.join(map(str, a.shape))}]" for n, a in pairs)

    def axes_of(self, schedule: Schedule) -> tuple[str, ...]:
        return (PIPELINE,)

    def sent_share(self, ranks: int) -> Fraction:
        return Fraction(1)

    def wire_text(self, schedule: Schedule, shapes: bool = False) -> str:
        dtypes = [short_dtype(a.dtype) for a in self.likes]
        return f"stage {self.stage} {self.shown if shapes else f'{[*self.values]} {dtypes}'}"

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        return wait.reads[0].path


@dataclass(frozen=True)
class Send(Message):
    """The issue of a message to the rank of another stage whose other coordinates are this rank's.

    Transports copy the values, so that they may change at once.
    """

    @property
    def detail(self) -> str:
        return f"{self.shown} to stage {self.stage}"

    def wire_bytes(self, schedule: Schedule) -> int:
        return self.size_bytes

    def bind(self, context: Context) -> Action:
        comm, names, (flight,) = context.comm, self.reads, self.writes
        rank, what = context.mesh.partner(self.stage, context.rank), self.shown

        def run(env: Env) -> None:
            env[flight] = comm.send([env[n] for n in names], rank, what)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        return on_arrival(wait, lambda env, _: None)

    def price(self, pricer: Pricer) -> Price:
        # It takes no time of the device, only of the link.
        return pricer.copy(0.0, **pricer.message(self.stage, float(self.size_bytes)))


@dataclass(frozen=True)
class Recv(Message):
    """The issue of room for what a rank of another stage sends; the Wait makes the values of it."""

    @property
    def detail(self) -> str:
        return f"{self.shown} from stage {self.stage}"

    def bind(self, context: Context) -> Action:
        comm, (flight,) = context.comm, self.writes
        rank, what = context.mesh.partner(self.stage, context.rank), self.shown
        shapes = [(a.shape, a.dtype) for a in self.likes]

        def run(env: Env) -> None:
            env[flight] = comm.recv(shapes, rank, what)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the values, with the strides that kernels were compiled for."""
        names, likes = wait.writes, context.schedule.issues[wait.reads[0]].likes

        def take(env: Env, tensors: Sequence[Tensor]) -> None:
            for name, like, value in zip(names, likes, tensors, strict=True):
                env[name] = value
                # A message is dense. A kernel reads any other strides than those it was compiled for wrongly.
                if value.stride() != like.stride and value.numel() > 1:
                    strided = torch.empty_strided(
                        like.shape, like.stride, dtype=like.dtype, device=value.device
                    )
                    env[name] = strided.copy_(value)

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        return pricer.compute(0.0, 0.0)


def pair_of(line: Message, stage: int) -> tuple[int, int]:
    """Return the stages that a message goes from and to.

    Args:
        line: one end of it, at `stage`.
    """
    return (stage, line.stage) if isinstance(line, Send) else (line.stage, stage)
