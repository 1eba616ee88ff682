"""Leaves: lines that cast and gather them for kernels, or gather what an update has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.compiler.ir.values import SCALES, Kind
from fnshard.compiler.rewrites.fp8 import scale_of
from fnshard.compiler.schedule.buckets import end_to_end, in_rank_order, leaf_runs
from fnshard.compiler.schedule.instructions.updates import ReduceUpdate, StackUpdate
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    Action,
    Context,
    Env,
    Instruction,
    OfBucket,
    Price,
    Pricer,
    Schedule,
    Wait,
    bucket_of,
    on_arrival,
)
from fnshard.errors import leaves
from fnshard.layout.partition import block_shape, block_slices
from fnshard.layout.spec import FP8, LayoutSpec
from fnshard.mesh import Mesh


class Scale(NamedTuple):
    """The scales of a leaf that is gathered in eight bits: fp32, 0-d or one for each row [N, 1].

    `own` is for this rank's shard, `full` for all of the leaf.
    """

    own: Tensor
    full: Tensor


@dataclass(frozen=True)
class Scales(Instruction):
    """The issue of a gather of all shards' largest numbers, of leaves or of their rows, once a step."""

    lane, trips = COMMUNICATION, 1

    paths: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        return f"{leaves(len(self.paths))} over {', '.join(self.axes) or 'no axis'}"

    @classmethod
    def wait_detail(cls, wait: Wait) -> str:
        return ", ".join(wait.writes)

    def wire_bytes(self, schedule: Schedule) -> int:
        return 4 * sum(self.counts(schedule)) * schedule.mesh.axes_size(self.axes)

    def counts(self, schedule: Schedule) -> list[int]:
        """Return how many numbers this rank sends of each leaf: one, or one for each row of its shard."""
        specs = [schedule.specs[p] for p in self.paths]
        rows = [block_shape(s.shape, s.storage, schedule.mesh)[0] for s in specs]
        return [n if s.scaling == "rowwise" else 1 for n, s in zip(rows, specs, strict=True)]

    def bind(self, context: Context) -> Action:
        (flight,), reads, axes, comm = self.writes, self.reads, self.axes, context.comm
        counts = self.counts(context.schedule)

        def run(env: Env) -> None:
            shards = [env[n] for n in reads]
            flat = comm.send_buffer(sum(counts), torch.float32, axes)
            largest = [
                s.abs().reshape(count, -1).amax(1) if s.numel() else s.new_zeros(count)
                for s, count in zip(shards, counts, strict=True)
            ]
            env[flight] = comm.all_gather(flat.copy_(torch.cat(largest)), axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Make scales by path (`Scale`)."""
        (out,), issue = wait.writes, context.schedule.issues[wait.reads[0]]
        schedule, coordinate = context.schedule, context.mesh.coordinate(context.rank)
        counts, specs = issue.counts(schedule), [schedule.specs[p] for p in issue.paths]
        by_row = any(s.scaling == "rowwise" for s in specs)

        def take(env: Env, rows: Sequence[Tensor]) -> None:
            sent = torch.stack(list(rows))  # [ranks, numbers]
            # One scale for each leaf, of the largest number of all ranks.
            if not by_row:
                scales = scale_of(sent.amax(0), FP8).unbind()
                env[out] = {path: Scale(s, s) for path, s in zip(issue.paths, scales, strict=True)}
                return
            # Or one for each row of some leaves. All scales are computed by one call.
            parts = zip(sent.split(counts, 1), specs, strict=True)
            largest = [_join_largest(part, spec, context.mesh, issue.axes) for part, spec in parts]
            scales = scale_of(torch.cat(largest), FP8).split([len(each) for each in largest])
            env[out] = {
                path: _make_scale(full, spec, context.mesh, coordinate)
                for path, full, spec in zip(issue.paths, scales, specs, strict=True)
            }

        return on_arrival(wait, take)

    def price(self, pricer: Pricer) -> Price:
        size = float(self.wire_bytes(pricer.schedule))
        return pricer.copy(pricer.bytes_of(self.reads), **pricer.collective("gather", self.axes, size))


def _join_largest(parts: Tensor, spec: LayoutSpec, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """Return the largest number of a leaf, [1], or of each of its rows.

    Args:
        parts: those of all shards, [ranks of `axes`, rows of a shard].
    """
    if spec.scaling != "rowwise":
        return parts.amax().view(1)
    # Ranks along the axes that split rows hold different rows, and all others parts of the same.
    rows = tuple(a for a in spec.storage.of(0) if a in axes)
    order = [axes.index(a) for a in (*rows, *(a for a in axes if a not in rows))]
    parts = parts.view(*map(mesh.axis_size, axes), -1)
    parts = parts.permute(*order, -1).reshape(mesh.axes_size(rows), -1, parts.shape[-1])
    return parts.amax(1).view(-1)[: spec.shape[0]]


def _make_scale(full: Tensor, spec: LayoutSpec, mesh: Mesh, coordinate: Mapping[str, int]) -> Scale:
    """Return a leaf's scales with those of a rank's padded shard.

    Args:
        full: the scales of the leaf, [1] or one for each row.
        coordinate: the rank's place on the mesh.
    """
    if spec.scaling != "rowwise":
        return Scale(full[0], full[0])
    full = full.view(-1, 1)
    own = full[block_slices(spec.shape, spec.storage, mesh, coordinate)[0]]
    padding = block_shape(spec.shape, spec.storage, mesh)[0] - len(own)
    return Scale(F.pad(own, (0, 0, 0, padding), value=1.0) if padding else own, full)


@dataclass(frozen=True)
class Cast(OfBucket):
    """A line that casts stored leaves to their compute dtype, on this rank alone.

    It casts them to the wire's dtype first, where that is narrower, so that all layouts see the same numbers.
    """

    def bind(self, context: Context) -> Action:
        bucket = bucket_of(self, context)
        dtype = context.schedule.specs[bucket.paths[0]].compute_dtype
        reads, writes, scaled = self.reads, self.writes, SCALES in self.reads

        def run(env: Env) -> None:
            tensors = [env[n] for n in reads[: len(writes)]]
            # Eight bits: scale, round to the wire's dtype, and divide by the scale again.
            if scaled:
                scales = [env[SCALES][p] for p in bucket.paths]
                tensors = [(t * s.own).to(bucket.dtype) for t, s in zip(tensors, scales, strict=True)]
            cast = cast_together(tensors, dtype)
            if scaled:
                torch._foreach_div_(cast, [s.full.to(dtype) for s in scales])
            env.update(zip(writes, cast, strict=True))

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket = pricer.bucket(self)
        stored, computed = (pricer.leaf_bytes(bucket, d) for d in ("storage_dtype", "compute_dtype"))
        same = all(s.storage_dtype == s.compute_dtype for s in map(pricer.schedule.specs.get, bucket.paths))
        return pricer.copy(0.0 if same else stored + computed)


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors to a dtype in one call; a tensor that has it already is returned itself."""
    out = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t in tensors]
    pairs = [(o, t) for o, t in zip(out, tensors, strict=True) if o is not t]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
    return out


def _price_blocks(line: OfBucket, pricer: Pricer, copied: bool = True) -> Price:
    """Return the price of packing stored blocks, if they are `copied`, and of gathering them."""
    bucket = pricer.bucket(line)
    packed = pricer.block_bytes(bucket, "storage_dtype") + bucket.row_bytes if copied else 0.0
    return pricer.copy(packed, **pricer.collective("gather", bucket.axes, line.rows_bytes(pricer.schedule)))


@dataclass(frozen=True)
class _Gathering:
    """A gather in flight: of rows, or, `in_place`, of flat leaves.

    Args:
        scales: the scales that shards were multiplied by.
    """

    handle: Any
    in_place: bool
    scales: Mapping[str, Scale] | None


@dataclass(frozen=True)
class Gather(OfBucket):
    """The issue of an all-gather of stored blocks, over the bucket's axes."""

    lane, trips, wire_bytes = COMMUNICATION, 1, OfBucket.rows_bytes

    def in_place(self, schedule: Schedule) -> bool:
        """Return whether a transport may gather into leaves in place of rows, because they need no cast."""
        bucket = schedule.buckets[self.bucket]
        as_sent = all(schedule.specs[p].compute_dtype == bucket.dtype for p in bucket.paths)
        return as_sent and all(n.kind is Kind.STORED for n in self.reads)

    def keeps_place(self, schedule: Schedule) -> bool:
        """Return whether stored blocks may move to where all ranks read the leaves, and stay there.

        They may in a step that takes its state over, if they need no cast, and if all ranks meet between the
        last line that reads a gathered leaf and the first one that writes to its block, or the step's end. So
        no rank changes what another one still reads.
        """
        bucket, lines = schedule.buckets[self.bucket], schedule.instructions
        specs = [schedule.specs[p] for p in bucket.paths]
        as_stored = all(s.storage_dtype == bucket.dtype and s.memory == "device" for s in specs)
        if not (schedule.families and as_stored and self.in_place(schedule)):
            return False
        if not in_rank_order(bucket, schedule.mesh):
            return False
        # Look for a meeting of the bucket's ranks between the last reader and the first writer.
        last_read, first_written = schedule.leaf_lines
        read = max(last_read.get(p, 0) for p in bucket.paths)
        between = lines[read + 1 : min(first_written.get(p, len(lines)) for p in bucket.paths)]
        return any(
            line.lane == COMMUNICATION
            and set(line.axes_of(schedule)) == set(bucket.axes)
            and not isinstance(line, ReduceUpdate | StackUpdate)  # a step may skip these
            for line in between
        )

    def bind(self, context: Context) -> Action:
        """Issue the gather of blocks into leaves in place, or packed."""
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        pairs, (flight,) = list(zip(bucket.paths, self.reads, strict=False)), self.writes
        issue, scaled = self._bind_in_place(context), SCALES in self.reads  # scales come behind the blocks

        def run(env: Env) -> None:
            stored = {p: env[n] for p, n in pairs}
            if scaled:
                stored = {p: shard * env[SCALES][p].own for p, shard in stored.items()}
            # Where stored blocks move into the memory that all ranks read, the state gets the moved ones.
            handle = issue(stored, lambda moved: env.update(zip(self.reads, moved, strict=True)))
            in_place = handle is not None
            if not in_place:
                flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
                packer.pack_blocks(stored, flat)
                handle = comm.all_gather(flat, bucket.axes)
            env[flight] = _Gathering(handle, in_place, env[SCALES] if scaled else None)

        return run

    def _bind_in_place(self, context: Context) -> Callable[..., Any]:
        """Return a function that issues the gather of blocks into leaves in place, or returns None.

        It returns None where the transport cannot, or leaves must be cast. Its arguments are the blocks, and
        a function that takes those which replace them.
        """
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        # A transport may lack either of these methods.
        into_shared, into_own = (getattr(comm, n, None) for n in ("gather_leaves", "gather_blocks"))
        specs, (runs, total) = context.schedule.specs, leaf_runs(bucket)
        if not self.in_place(context.schedule):
            return lambda stored, move: None

        # Ranks that share memory write their blocks into leaves that all of them read.
        if into_shared is not None:
            number = context.mesh.group_ranks(bucket.axes, context.rank).index(context.rank)
            starts = [start + number * p.numel for (start, _), p in zip(runs, bucket.pieces, strict=True)]
            keeps = self.keeps_place(context.schedule)

            def gather(stored: Mapping[str, Tensor], move: Callable[[list[Tensor]], None]) -> Any:
                write = partial(packer.write_blocks, stored)
                blocks = list(zip(stored.values(), starts, strict=True)) if keeps else ()
                return into_shared(runs, total, bucket.dtype, write, bucket.axes, blocks, move)

            return gather
        if into_own is None or not end_to_end(bucket, context.schedule.mesh):
            return lambda stored, move: None

        # Otherwise the transport receives blocks into a rank's own leaves.
        as_stored = all(specs[p].storage_dtype == bucket.dtype for p in bucket.paths)

        def issue(stored: Mapping[str, Tensor], _: Any) -> Any:
            blocks = stored
            if not as_stored:
                flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
                packer.pack_blocks(stored, flat)
                blocks = packer.blocks(flat)
            return into_own([blocks[p].reshape(-1) for p in bucket.paths], bucket.axes)

        return issue

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Take the leaves in place, or unpack every rank's blocks into full leaves."""
        (flight,), writes, packer = wait.reads, wait.writes, context.packer(wait.bucket)
        pieces = bucket_of(wait, context).pieces
        dtype = context.schedule.specs[pieces[0].path].compute_dtype

        def run(env: Env) -> None:
            sent = env.pop(flight)
            if sent.in_place:
                for piece, name, leaf in zip(pieces, writes, sent.handle.wait(), strict=True):
                    env[name] = leaf.view(piece.shape)
                return
            full = packer.unpack_rows(sent.handle.wait(), dtype)
            sent.handle.release()
            if sent.scales is not None:
                torch._foreach_div_(list(full.values()), [sent.scales[p].full.to(dtype) for p in full])
            for piece, name in zip(pieces, writes, strict=True):
                env[name] = full[piece.path]

        return run

    def price(self, pricer: Pricer) -> Price:
        bucket, specs = pricer.bucket(self), pricer.schedule.specs
        if pricer.reads_in_place(self):
            return pricer.copy(0.0, **pricer.collective("gather", bucket.axes, 0.0))
        # Blocks that must be cast are packed into a row first, whose parts are then gathered into leaves.
        as_stored = all(specs[p].storage_dtype == bucket.dtype for p in bucket.paths)
        return _price_blocks(self, pricer, copied=not (as_stored and pricer.skips_packing(self)))

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        issue = pricer.schedule.issues[wait.reads[0]]
        size = pricer.leaf_bytes(pricer.bucket(wait), "compute_dtype")
        copied = not (pricer.skips_packing(issue) or pricer.reads_in_place(issue))
        return pricer.copy(wait.rows_bytes(pricer.schedule) + size if copied else 0.0)


@dataclass(frozen=True)
class Publish(OfBucket):
    """The issue of a gather of updated blocks into the full stored leaf on every rank (ZeRO 1 and 2)."""

    lane, trips, wire_bytes = COMMUNICATION, 1, OfBucket.rows_bytes

    def bind(self, context: Context) -> Action:
        """Pack this rank's block of leaves that are stored in full, and issue the gather."""
        bucket, packer, comm = bucket_of(self, context), context.packer(self.bucket), context.comm
        pairs, (flight,) = list(zip(bucket.paths, self.reads, strict=True)), self.writes

        def run(env: Env) -> None:
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            packer.pack_blocks(packer.cut({p: env[n] for p, n in pairs}), flat)
            env[flight] = comm.all_gather(flat, bucket.axes)

        return run

    @classmethod
    def bind_wait(cls, wait: Wait, context: Context) -> Action:
        """Unpack updated blocks into the stored leaves."""
        packer = context.packer(wait.bucket)
        stored = dict(zip(bucket_of(wait, context).paths, wait.writes, strict=True))

        def take(env: Env, rows: Sequence[Tensor]) -> None:
            packer.unpack_into(rows, {p: env[n] for p, n in stored.items()})

        return on_arrival(wait, take)

    price = _price_blocks

    @classmethod
    def wait_price(cls, wait: Wait, pricer: Pricer) -> Price:
        size = pricer.leaf_bytes(pricer.bucket(wait), "storage_dtype")
        return pricer.copy(wait.rows_bytes(pricer.schedule) + size)
