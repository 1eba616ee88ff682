"""Gradients: the lines that lead from full gradients to this rank's blocks of their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.buckets import end_to_end
from fnshard.compiler.schedule.instructions.kernels import Run
from fnshard.compiler.schedule.instructions.leaves import cast_together
from fnshard.compiler.schedule.instructions.updates import Update
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Names,
    OfBucket,
    Price,
    Pricer,
    Schedule,
    Wait,
    bucket_of,
    on_arrival,
    reduced_names,
)


@dataclass(frozen=True)
class Reduced:
    """A bucket's reduced gradients, one block per leaf.

    Args:
        flat: the row that the blocks are views of, if there is one.
    """

    blocks: Mapping[str, Tensor]
    flat: Tensor | None = None

    def map_tensors(self, make: Callable[[Tensor], Tensor]) -> Reduced:
        """Return gradients on other tensors, which `make` makes of the row, or of each block.

        Blocks that are views of a row stay so: one tensor is then made, transferred or copied for all.
        """
        if self.flat is None:
            return Reduced({p: make(b) for p, b in self.blocks.items()})
        # The same views, of the other row.
        flat, start = make(self.flat), self.flat.storage_offset()
        return Reduced(
            {
                p: flat.as_strided(b.shape, b.stride(), b.storage_offset() - start + flat.storage_offset())
                for p, b in self.blocks.items()
            },
            flat,
        )

    def pairs(self, other: Reduced) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of tensors that hold the same gradients in the two: their rows, or their blocks."""
        if self.flat is not None:
            return [(self.flat, other.flat)]
        return [(b, other.blocks[p]) for p, b in self.blocks.items()]


def _make_reader(line: OfBucket) -> Callable[[Env], Mapping[str, Tensor]]:
    """Return a function that reads a line's full gradients by path, one each or an accumulator of all."""
    if line.reads and not line.paths:
        (name,) = line.reads
        return lambda env: env[name]
    named = dict(zip(line.paths, line.reads, strict=False))  # behind these it may read an earlier sum
    return lambda env: {p: env[n] for p, n in named.items()}


def _bind_wait(wait: Wait, context: Context) -> Action:
    """Take a row of sums, and make views of it."""
    (out,), packer = wait.writes, context.packer(wait.bucket)

    def take(env: Env, flat: Tensor) -> None:
        env[out] = Reduced(packer.blocks(flat), flat)

    return on_arrival(wait, take)


@dataclass(frozen=True)
class ReduceScatter(OfBucket):
    """The issue of a reduce-scatter, which makes of full gradients this rank's blocks of their sum."""

    # See `Instruction`. No kernel reads what is sent (`outgoing`), so that the Wait may come late.
    lane = COMMUNICATION
    trips = 1
    outgoing = True
    wire_bytes = OfBucket.rows_bytes

    def in_place(self, schedule: Schedule) -> bool:
        """Return whether a transport may read gradients in place: all exist, and none needs a cast.

        The gradients then live until the Wait.
        """
        bucket = schedule.buckets[self.bucket]
        as_made = all(schedule.specs[p].compute_dtype == bucket.dtype for p in bucket.paths)
        complete = set(self.paths) == set(bucket.paths) and all(n.kind is Kind.GRADIENT for n in self.reads)
        return as_made and complete

    def is_updated_at_once(self, schedule: Schedule) -> bool:
        """Return whether nothing but one Update reads the sums, before any kernel or collective runs."""
        lines = schedule.instructions
        wait = next(n for n, i in enumerate(lines) if isinstance(i, Wait) and self.writes[0] in i.reads)
        reduced = set(lines[wait].writes)
        readers = [n for n, i in enumerate(lines) if reduced & set(i.reads)]
        return (
            len(readers) == 1
            and isinstance(lines[readers[0]], Update)
            and not reduced & set(schedule.outputs)
            and not any(isinstance(i, Run) or i.lane == COMMUNICATION for i in lines[wait : readers[0]])
        )

    def bind(self, context: Context) -> Action:
        """Issue the reduction of gradients in place, or packed."""
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        read_full, (flight,), issue = _make_reader(self), self.writes, self._bind_in_place(context)

        def run(env: Env) -> None:
            handle = issue(read_full(env))
            if handle is None:  # pack them, a row for each receiver
                rows = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes, rows=packer.rows)
                packer.pack_full(read_full(env), rows)
                handle = comm.reduce_scatter(rows, bucket.axes)
            env[flight] = handle

        return run

    def _bind_in_place(self, context: Context) -> Callable[[Mapping[str, Tensor]], Any]:
        """Return a function that issues the reduction of gradients in place, or returns None.

        It returns None where the transport cannot, or gradients must be cast.
        """
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        # A transport may lack either of these methods.
        reduce_pair, reduce_leaves = (getattr(comm, n, None) for n in ("reduce_pair", "reduce_leaves"))
        if not self.in_place(context.schedule):
            return lambda grads: None
        if reduce_pair is not None:
            # The sum may be written over the peer's row if it dies before the next collective, which uses
            # that memory again.
            at_once = self.is_updated_at_once(context.schedule)

            def issue(full: Mapping[str, Tensor]) -> Any:
                grads = {p: g.contiguous() for p, g in full.items()}
                pack, add = partial(packer.pack_for_peer, grads), partial(packer.add_to_own, grads)
                return reduce_pair(bucket.numel, bucket.dtype, pack, add, bucket.axes, at_once)

            return issue
        if reduce_leaves is not None and end_to_end(bucket, context.schedule.mesh):
            return lambda grads: reduce_leaves([grads[p].reshape(-1) for p in bucket.paths], bucket.axes)
        return lambda grads: None

    def price(self, pricer: Pricer) -> Price:
        bucket, rows = pricer.bucket(self), self.rows_bytes(pricer.schedule)
        packed = 0.0 if pricer.skips_packing(self) else pricer.leaf_bytes(bucket, "compute_dtype") + rows
        return pricer.copy(packed, **pricer.collective("reduce_scatter", bucket.axes, rows))

    bind_wait = staticmethod(_bind_wait)


@dataclass(frozen=True)
class AllReduce(OfBucket):
    """The issue of a sum of gradients over `axes`.

    It reads full gradients, or the blocks of a ReduceScatter, or nothing: a stage that does not read the
    leaves sends zeros.
    """

    lane = COMMUNICATION
    trips = 2
    outgoing = True

    @property
    def overwrites(self) -> Names:
        """The blocks that are summed in place."""
        return reduced_names(self.reads)

    def wire_bytes(self, schedule: Schedule) -> int:
        return schedule.buckets[self.bucket].row_bytes

    @property
    def _is_of_blocks(self) -> bool:
        """Return whether it sums blocks that a ReduceScatter has left."""
        return bool(self.reads) and self.reads[0].kind is Kind.REDUCED

    def bind(self, context: Context) -> Action:
        """Pack full gradients, or send the row that a ReduceScatter has left."""
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        (flight,), axes, reads = self.writes, self.axes, self.reads
        read_full = None if self._is_of_blocks else _make_reader(self)

        def run(env: Env) -> None:
            if read_full is None:
                flat = env[reads[0]].flat
            else:
                flat = comm.send_buffer(bucket.numel, bucket.dtype, axes)
                if reads:
                    packer.pack_full(read_full(env), flat)
                else:  # another stage reads the leaves, and this one does not
                    flat.zero_()
            env[flight] = comm.all_reduce(flat, axes)

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        full = 0.0 if self._is_of_blocks else pricer.leaf_bytes(bucket, "compute_dtype") + bucket.row_bytes
        return pricer.copy(full, **pricer.collective("all_reduce", self.axes, bucket.row_bytes))

    bind_wait = staticmethod(_bind_wait)


@dataclass(frozen=True)
class Local(OfBucket):
    """A line by which full gradients become the reduced ones, since no other rank has any to add."""

    def bind(self, context: Context) -> Action:
        bucket, device = bucket_of(self, context), context.device
        read_full, (out,) = _make_reader(self), self.writes

        def run(env: Env) -> None:
            # A leaf that no kernel reads has a gradient of zeros.
            grads = read_full(env)
            blocks = [
                grads[p.path] if p.path in grads else torch.zeros(p.block, dtype=bucket.dtype, device=device)
                for p in bucket.pieces
            ]
            cast = cast_together(blocks, bucket.dtype)
            env[out] = Reduced(dict(zip(bucket.paths, cast, strict=True)))

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        same = all(pricer.schedule.specs[n].compute_dtype == bucket.dtype for n in bucket.paths)
        size = 0.0 if same else pricer.leaf_bytes(bucket, "compute_dtype") + bucket.row_bytes
        return pricer.copy(size)


@dataclass(frozen=True)
class Accumulate(OfBucket):
    """A line that adds a micro-batch's gradients to the accumulator, in `LayoutSpec.sum_dtype`.

    The `first` makes the accumulator.
    """

    first: bool = False

    def on_host(self, schedule: Schedule) -> bool:
        return self.reads[0].kind is Kind.HOST

    def aliases(self) -> Mapping[ValueName, Names]:
        """Return the row that has come, whose memory the first sum takes; later ones add in place to that."""
        takes_over = self.first and not self._is_of_full_gradients and self.reads[0].kind is not Kind.HOST
        return {self.writes[0]: self.reads} if takes_over else {}

    @property
    def _is_of_full_gradients(self) -> bool:
        """Return whether it sums full gradients, before ranks do."""
        return self.writes[0].kind is Kind.ACCUMULATED

    def bind(self, context: Context) -> Action:
        if self._is_of_full_gradients:
            return self._bind_full(context)
        specs, (out,), first = context.schedule.specs, self.writes, self.first
        new, *before = self.reads
        take = context.transfers.take if out.kind is Kind.HOST else None
        later = context.later(self)

        def add(env: Env) -> None:
            value: Reduced = env[new]
            if first and take:  # a copy, since what a transfer brought goes back to its pool
                buffers = {p: take(b, specs[p].sum_dtype, for_host=True) for p, b in value.blocks.items()}
                env[out] = Reduced({p: buffers[p].copy_(b) for p, b in value.blocks.items()})
                return
            if first:
                # Gradients of a `Local` have no row, and may share memory with another value: copy them.
                copy = value.flat is None
                env[out] = Reduced({p: b.to(specs[p].sum_dtype, copy=copy) for p, b in value.blocks.items()})
                return
            # The memory of the sum so far becomes that of the new one.
            total: Reduced = env.pop(before[0])
            for path, block in value.blocks.items():
                total.blocks[path].add_(block)
            env[out] = total

        return lambda env: later(lambda: add(env))

    def _bind_full(self, context: Context) -> Action:
        """Sum full gradients by leaf; each stage or segment may add other leaves."""
        specs, (out,), read_full = context.schedule.specs, self.writes, _make_reader(self)
        before = next((n for n in self.reads if n.kind is Kind.ACCUMULATED), None)

        def run(env: Env) -> None:
            new = read_full(env)
            if before is None:
                env[out] = {p: g.to(specs[p].sum_dtype, copy=True) for p, g in new.items()}
                return
            total = env.pop(before)
            for path, gradient in new.items():
                if path in total:
                    total[path].add_(gradient)
                else:  # the sum so far is of other segments, which do not read this leaf
                    total[path] = gradient.to(specs[path].sum_dtype, copy=True)
            env[out] = total

        return run

    def price(self, pricer: Pricer) -> Price:
        if self._is_of_full_gradients:
            specs = pricer.schedule.specs
            size = float(sum(math.prod(specs[p].shape) * specs[p].sum_dtype.itemsize for p in self.paths))
        else:
            size = pricer.block_bytes(pricer.bucket(self), "sum_dtype")
        return pricer.here_or_on_host(self, (2.0 if self.first else 3.0) * size)
