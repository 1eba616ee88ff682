"""Transfers: between the device and where a value rests, host memory or disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.ir import (
    TRANSFER,
    Action,
    Context,
    Env,
    Names,
    OfBucket,
    Price,
    Pricer,
    RankMemory,
    Schedule,
    Wait,
    only_stored,
)
from fnshard.compiler.schedule.paper import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    PaperFlight,
    PaperGroup,
    PaperTensor,
    tensors_in,
)


def _shortened(names: Names) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _bind_wait(wait: Wait, context: Context) -> Action:
    """What was sent is there; gradients that the host reads, for the host too, or for its worker."""
    (flight,), writes, worker = wait.reads, wait.writes, context.worker
    read_there = any(n.is_copy(Kind.HOST, Kind.REDUCED) for n in writes)
    if worker is not None and wait.on_host(context.schedule):  # the end of the step waits for it
        return lambda env: worker.submit(lambda: env.pop(flight))
    state = {n for n in writes if n.is_state}

    def run(env: Env) -> None:
        handle = env.pop(flight)
        targets = handle.wait(on_host=read_there and worker is None)
        if read_there and worker is not None:
            worker.submit(lambda: handle.wait(on_host=True))
        for n, value in zip(writes, targets, strict=True):
            if n not in state:  # written in place
                env[n] = value

    return run


def _wait_memory(wait: Wait, rank: RankMemory) -> None:
    """Copies get their names; state was written in place."""
    result = rank.live.names[wait.reads[0]].result
    for name, value in zip(wait.writes, result, strict=False):
        if not name.is_state:
            rank.live.set(name, value)
    rank.live.drop(wait.reads[0])


def _transfer_memory(line: ToDevice | ToHost, rank: RankMemory, make: Callable[..., PaperTensor]) -> None:
    """Count what is moved; copy it by `make`, unless it is written into state."""
    live = rank.live
    values = [live.names[n] for n in line.reads]
    rows = [(v.flat,) if isinstance(v, PaperGroup) and v.flat else tensors_in(v) for v in values]
    live.moved[len(live.moments)] = sum(t.bytes for some in rows for t in some)
    made = []
    if not line.into:
        for name, value in zip(line.reads, values, strict=True):
            made.append(_copied(value, partial(make, category=_category(name))))
    live.set(line.writes[0], PaperFlight(result=made))


def _copied(value: PaperTensor | PaperGroup, make: Callable[[PaperTensor], PaperTensor]) -> Any:
    """Tensors of a value elsewhere: one for a row and its blocks, or one each; strides stay."""
    if isinstance(value, PaperTensor):
        return replace(make(value), shape=value.shape, stride=value.stride)
    if value.flat is not None:
        flat = make(value.flat)
        return PaperGroup({k: replace(v, storage=flat.storage) for k, v in value.parts.items()}, flat)
    return PaperGroup({k: make(v) for k, v in value.parts.items()})


def _category(name: ValueName) -> str:
    if name.original.kind is Kind.REDUCED:
        return GRADIENTS
    return BUFFERS if name.original.is_state else ACTIVATIONS


@dataclass(frozen=True)
class ToDevice(OfBucket):
    """Issue: what rests on the host or on disk -> copies on the device (`t:`), in order of `reads`.

    `into`: the device tensors that are overwritten (stored shards after an update on the host), else new
    ones are made.
    """

    lane = TRANSFER

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shortened(self.reads)

    def on_host(self, schedule: Schedule) -> bool:
        return only_stored(self.into)

    def bind(self, context: Context) -> Action:
        if self.into:
            return self._bind_restore(context)
        reads, (flight,), transfers = self.reads, self.writes, context.transfers

        def run(env: Env) -> None:
            env[flight] = transfers.to_device([env[n] for n in reads])

        return run

    def _bind_restore(self, context: Context) -> Action:
        """Master copies that the host has updated -> the stored shards on the device, cast there."""
        reads, (flight,), transfers, updater = self.reads, self.writes, context.transfers, context.updater
        into, later = self.into, context.later(self)

        def run(env: Env) -> None:
            stored = [updater.stored_part(n.path, env[n]) for n in into]
            read_last = transfers.mark()

            def call() -> None:
                env[flight] = transfers.to_device([env[n] for n in reads], stored, read_last)

            later(call)

        return run

    def memory(self, rank: RankMemory) -> None:
        live = rank.live
        if self.into and not rank.on_cpu:
            # An accelerator casts on its own side of the link, by way of a temporary in the master's dtype.
            masters = [(live.names[n], rank.specs[n.path].storage_dtype) for n in self.reads]
            live.spike(max((t.bytes for t, dtype in masters if t.dtype != dtype), default=0), BUFFERS)
        _transfer_memory(self, rank, live.like)

    def price(self, pricer: Pricer) -> Price:
        return pricer.transfer(self)

    bind_wait, wait_memory = staticmethod(_bind_wait), staticmethod(_wait_memory)


@dataclass(frozen=True)
class ToHost(OfBucket):
    """Issue: device values -> new copies on the host (`h:`), or `into` state that rests there or on disk."""

    lane, outgoing = TRANSFER, True

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shortened(self.reads)

    def bind(self, context: Context) -> Action:
        reads, (flight,), into, transfers = self.reads, self.writes, self.into, context.transfers

        def run(env: Env) -> None:
            targets = [env[n] for n in into] if into else None
            env[flight] = transfers.to_host([env[n] for n in reads], targets)

        return run

    def memory(self, rank: RankMemory) -> None:
        """Buffers on the host come from a pool."""
        _transfer_memory(self, rank, rank.live.take_host)

    def price(self, pricer: Pricer) -> Price:
        return pricer.transfer(self)

    bind_wait, wait_memory = staticmethod(_bind_wait), staticmethod(_wait_memory)
