"""Transfers: the lines that move values between the device and host memory or disk."""

from __future__ import annotations

from dataclasses import dataclass

from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.ir import (
    TRANSFER,
    Action,
    Context,
    Env,
    Names,
    OfBucket,
    Price,
    Pricer,
    Schedule,
    Wait,
    are_stored,
)


def _shorten(names: Names) -> str:
    """Return the first two names, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _bind_wait(wait: Wait, context: Context) -> Action:
    """Let kernels wait for a transfer, and the host too where it reads gradients.

    A worker waits in its own thread, so that the host goes on to the next line.
    """
    (flight,), writes, worker = wait.reads, wait.writes, context.worker
    is_read_on_host = any(n.is_copy(Kind.HOST, Kind.REDUCED) for n in writes)
    # The worker issues the copies of updated shards, and the end of the step waits for it and for them. Here
    # it only drops their handle, behind the issue.
    if worker is not None and wait.on_host(context.schedule):
        return lambda env: worker.submit(lambda: env.pop(flight))
    state = {n for n in writes if n.is_state}

    def run(env: Env) -> None:
        handle = env.pop(flight)
        targets = handle.wait(on_host=is_read_on_host and worker is None)
        if is_read_on_host and worker is not None:
            worker.submit(lambda: handle.wait(on_host=True))
        for n, value in zip(writes, targets, strict=True):
            if n not in state:  # state was written in place
                env[n] = value

    return run


@dataclass(frozen=True)
class ToDevice(OfBucket):
    """The issue of a transfer from the host or disk to the device: copies (`t:`), in the order of `reads`.

    Args:
        into: the device tensors that are overwritten: stored shards, after an update on the host. If empty,
            new tensors are made.
    """

    lane, reads_until_waited = TRANSFER, True

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shorten(self.reads)

    def on_host(self, schedule: Schedule) -> bool:
        return are_stored(self.into)

    def bind(self, context: Context) -> Action:
        if self.into:
            return self._bind_restore(context)
        reads, (flight,), transfers = self.reads, self.writes, context.transfers

        def run(env: Env) -> None:
            env[flight] = transfers.to_device([env[n] for n in reads])

        return run

    def _bind_restore(self, context: Context) -> Action:
        """Send master copies that the host has updated to the device, cast into the stored shards."""
        reads, (flight,), transfers, updater = self.reads, self.writes, context.transfers, context.updater
        into, later = self.into, context.later(self)

        def run(env: Env) -> None:
            stored = [updater.stored_part(n.path, env[n]) for n in into]
            # The copy overwrites shards that kernels launched so far may still read; it need not wait for
            # later ones.
            read_last = transfers.mark()

            def call() -> None:
                env[flight] = transfers.to_device([env[n] for n in reads], stored, read_last)

            later(call)

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.transfer(self)

    bind_wait = staticmethod(_bind_wait)


@dataclass(frozen=True)
class ToHost(OfBucket):
    """The issue of a transfer from the device to new copies on the host (`h:`).

    Args:
        into: state on the host or on disk, which is overwritten; if empty, new copies are made.
    """

    lane, outgoing, reads_until_waited = TRANSFER, True, True

    into: Names = ()

    @property
    def detail(self) -> str:
        return _shorten(self.reads)

    def bind(self, context: Context) -> Action:
        reads, (flight,), into, transfers = self.reads, self.writes, self.into, context.transfers

        def run(env: Env) -> None:
            targets = [env[n] for n in into] if into else None
            env[flight] = transfers.to_host([env[n] for n in reads], targets)

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.transfer(self)

    bind_wait = staticmethod(_bind_wait)
