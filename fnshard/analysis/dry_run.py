"""Dry run: run a schedule's own bindings on tensors without data, to count the memory that they take.

Stand-ins replace the executor's parts: collectives that send nothing (`transport`), kernels that return what
their graphs would (`footprint`), an optimizer that takes the memory of its update (`updates`), and packing
that moves nothing, since the memory that it takes does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.analysis.footprint import CallArgument, Footprint
from fnshard.analysis.storages import UNCOUNTED, Storage, StorageTracker, category_of, tensors_of
from fnshard.analysis.transport import Counting
from fnshard.analysis.updates import UpdateMemory
from fnshard.compiler.ir.values import CONTROL, SCALARS, ValueName
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.buckets import Bucket, Piece, row_of_rank
from fnshard.compiler.schedule.instructions import (
    Action,
    Env,
    Free,
    Gather,
    Instruction,
    OverlappedUpdate,
    Parts,
    Reduced,
    Run,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.update.steps import flow_of, stacks_of
from fnshard.compiler.update.trace import PARAM
from fnshard.layout.partition import block_slices
from fnshard.mesh import Mesh
from fnshard.optim.sums import CAST
from fnshard.runtime.host_worker import PENDING
from fnshard.runtime.packing import contiguous_strides, pad_to, parts_of
from fnshard.runtime.tiers import Transfer, map_tensors

# The bindings of these lines and of their Waits make no tensors themselves, and the stand-ins that they call
# report theirs to the tracker. So a dispatch mode would only cost time.
QUIET = (Run, Free, Gather, Update, OverlappedUpdate)
FootprintOf = Callable[[str, Way, Sequence[CallArgument]], Footprint]


@dataclass
class DryContext:
    """A context to which lines are bound without devices, see `compiler.schedule.ir.Context`.

    There are no streams and no worker: everything runs at once, in the order of lines.

    Args:
        footprint: a function that returns the footprint of a kernel, by its name and way.
        updates: the memory that updates take besides what they change.
        sizes: the bytes of all values so far, by name.
    """

    schedule: Schedule
    tracker: StorageTracker
    comm: Counting
    footprint: FootprintOf
    updates: UpdateMemory
    rank: int
    freed: None = None
    worker: None = None
    packers: dict[str, Packing] = field(default_factory=dict)
    sizes: dict[ValueName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = {
            (name, way): DryKernel(self, name, way)
            for name, kernel in self.schedule.kernels.items()
            for way in kernel.modules
        }
        self.scalars = self.updater = DryUpdater(self)
        self.transfers = DryTransfers(self.tracker)

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def later(self, line: Instruction) -> Callable[[Callable[[], None]], None]:
        return lambda call: call()

    def on_update_stream(self, action: Action) -> Action:
        return action

    def wait_event(self, event: None) -> None:
        pass

    def packer(self, bucket: str) -> Packing:
        if bucket not in self.packers:
            self.packers[bucket] = Packing(self.schedule.buckets[bucket], self)
        return self.packers[bucket]

    def stacks(self, bucket: str) -> DryStacks:
        return DryStacks(self.schedule.buckets[bucket], self)

    def run(self, env: Env) -> None:
        """Run all lines, on an environment of tensors that the tracker follows."""
        env[CONTROL] = self.updater
        self._note_sizes(env, env)
        for index, line in enumerate(self.schedule.instructions):
            self.tracker.begin(line)
            # A Wait is as quiet as the line that it waits for.
            kind = line.of if isinstance(line, Wait) else type(line)
            with self.tracker if kind not in QUIET else nullcontext():
                line.bind(self)(env)
            self.tracker.end(index, env)
            self._note_sizes(line.writes, env)

    def _note_sizes(self, names: Iterable[Any], env: Env) -> None:
        """Note the bytes of values that are new in the environment."""
        for name in names:
            if name in env and name not in self.sizes:
                self.sizes[name] = sum(t.nbytes for t in tensors_of(env[name]))


@dataclass(frozen=True)
class DryKernel:
    """A kernel that frees arguments and makes results as its footprint says."""

    context: DryContext
    name: str
    way: Way

    def __call__(self, args: list[Tensor]) -> list[Tensor]:
        tracker = self.context.tracker
        records = [tracker.follow(a) for a in args]
        # Memory that is not counted is held over the call, so that it does not count as freed inside.
        kept = [r.reference() for r in records if r.tier == UNCOUNTED]

        # Arguments that nothing else holds are dropped: the kernel may free them inside.
        args.clear()
        numbers: dict[int, int] = {}
        entries = []
        for record in records:
            number = numbers.setdefault(id(record), len(numbers))
            dropped = record.reference() is None
            entries.append(CallArgument(number, dropped, record.bytes if dropped else 0))

        # The storages that the call makes. The name of a value that lies in one says what it is for.
        footprint = self.context.footprint(self.name, self.way, tuple(entries))
        arguments = {numbers[id(r)]: r for r in records}
        unborn = [Storage(n, "", "device") for n in footprint.new_bytes]
        for name, output in zip(tracker.line.writes, footprint.outputs, strict=True):
            if output.new is not None and not unborn[output.new].category:
                unborn[output.new].category = category_of(name)

        # The worst moment inside the call: arguments that died with `args.clear()`, but that the kernel has
        # not freed by then, still count.
        dead = [r for n, r in arguments.items() if r.reference() is None and n not in footprint.freed]
        tracker.look(footprint.workspace_bytes, dead, [unborn[j] for j in footprint.alive])
        del kept
        return self._make_results(footprint, arguments)

    def _make_results(self, footprint: Footprint, arguments: Mapping[int, Storage]) -> list[Tensor]:
        """Make tensors without data for the results of a call, which share storages as the real ones do."""
        tracker, storages, out = self.context.tracker, {}, []

        for output in footprint.outputs:
            shape, stride, dtype = output.shape, output.stride, output.dtype

            # The storage that it lies in: a new one, by its number, or an argument's, by a number below zero.
            key = output.new if output.argument is None else -1 - output.argument
            value = None
            if key not in storages:
                argument = arguments[-1 - key] if key < 0 else None
                storages[key] = argument.reference() if argument else None
                # Make a new storage, or again that of an argument which died with `args.clear()`.
                if storages[key] is None:
                    size = argument.bytes if argument else footprint.new_bytes[key]
                    value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                    if value.untyped_storage().nbytes() < size:  # the value is a part of its storage
                        value = torch.empty(size, dtype=torch.uint8, device="meta")
                    tracker.follow(value)
                    storages[key] = value.untyped_storage()

            # View the storage, unless the tensor that made it has this form already.
            if value is None or value.dtype != dtype or value.shape != shape:
                value = torch.empty(0, dtype=dtype, device="meta").set_(storages[key], 0, shape, stride)
            out.append(value)
        return out


def _iterate_blocks(bucket: Bucket, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the pieces of a bucket, each with its block as a view of the flat."""
    for p in bucket.pieces:
        yield p, flat.as_strided(p.block, contiguous_strides(p.block), p.offset)


class Packing:
    """A `runtime.packing.Packer` that copies nothing, since nothing reads what `rows` hold."""

    def __init__(self, bucket: Bucket, context: DryContext) -> None:
        self.bucket, self.rows = bucket, context.mesh.axes_size(bucket.axes)
        self._context = context

    def blocks(self, flat: Tensor) -> dict[str, Tensor]:
        return {p.path: block for p, block in _iterate_blocks(self.bucket, flat)}

    def cut(self, full_leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mesh = self._context.mesh
        here = mesh.coordinate(self._context.rank)
        slices = {p: block_slices(p.shape, p.layout, mesh, here) for p in self.bucket.pieces}
        return {p.path: pad_to(full_leaves[p.path][block], p.block) for p, block in slices.items()}

    def pack_blocks(self, blocks: Mapping[str, Tensor], out: Tensor) -> None:
        self.pack_full({p.path: blocks[p.path] for p in self.bucket.pieces})

    write_blocks = pack_blocks

    def pack_full(self, full_leaves: Mapping[str, Tensor], *rows: Tensor) -> None:
        # Packing copies leaves that are not contiguous first, and holds the copies until all are packed.
        copied = [self._context.tracker.follow(full.contiguous()) for full in full_leaves.values()]
        self._context.tracker.look()
        del copied

    pack_for_peer = add_to_own = pack_full

    def unpack_rows(self, rows: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return {p.path: self._context.tracker.new(p.shape, dtype) for p in self.bucket.pieces}

    def unpack_into(self, rows: Sequence[Tensor], full_leaves: Mapping[str, Tensor]) -> None:
        pass


class DryStacks:
    """A `runtime.packing.Stacks` that copies nothing."""

    def __init__(self, bucket: Bucket, context: DryContext) -> None:
        ranks = context.mesh.group_ranks(bucket.axes, context.rank)
        self.bucket, self._context = bucket, context
        self._mine = row_of_rank(bucket, ranks.index(context.rank), len(ranks))

    def blocks(self, flat: Tensor) -> Parts:
        return parts_of(self.bucket, {p.key: block for p, block in _iterate_blocks(self.bucket, flat)})

    def pack_blocks(self, *_: Any) -> None:
        pass

    pack_wholes = pack_blocks

    def wholes(self, rows: Tensor) -> Parts:
        new = self._context.tracker.new
        return parts_of(self._mine, {p.key: new(p.shape, self.bucket.dtype) for p in self._mine.pieces})


@dataclass
class DryUpdater:
    """A stand-in for the optimizer and the step's scalars, the executor's `Updater` and `Scalars`."""

    context: DryContext

    @property
    def skip(self) -> bool:
        """Return False: no step on paper is skipped."""
        return False

    def bind(self, paths: tuple[str, ...], number: int) -> Callable[..., Parts]:
        schedule = self.context.schedule

        def update(
            blocks: Mapping[str, Tensor],
            slots: Mapping[str, Any],
            params: Mapping[str, Tensor],
            made: Parts,
            _: Any,
        ) -> Parts:
            spec, line, out = schedule.specs[paths[0]], self.context.tracker.line, {}
            # An update on the host takes no memory of the device, unless the host is the device.
            if spec.updated_on == "device" or self.context.mesh.device_type == "cpu":
                taken = self.context.updates.bytes(paths, number, SCALARS in line.reads)
                self.context.tracker.look(workspace=taken)
            for path in paths:
                keeps = flow_of(schedule.families[path].derived, number).keeps
                out[path] = {name: self._keep(path, name, slots, params) for name in keeps}
            return out

        return update

    def _keep(self, path: str, name: str, slots: Any, params: Any) -> Tensor:
        """Return a value that a stretch of an update hands on: state in place, or a new tensor."""
        slot = name.removeprefix("slots.")
        if slot != name:
            return slots[path][slot]
        if name == PARAM and path in params:
            return params[path]
        return self._new(*self.context.schedule.families[path].shape_and_dtype(name))

    def bind_whole(self, bucket: Bucket) -> Callable[[Parts, Parts, Any], Parts]:
        def compute(parts: Parts, *_: Any) -> Parts:
            out = {}
            for path in parts:
                self.context.tracker.look(workspace=self.context.updates.bytes_of_whole(path))
                _, back = stacks_of(self.context.schedule.families[path].derived)
                named = zip(back.receives, back.shapes, back.dtypes, strict=True)
                out[path] = {name: self._new(shape, dtype) for name, shape, dtype in named}
            return out

        return compute

    def control_for(self, env: Env, bucket: Bucket) -> tuple[DryUpdater, None]:
        return self, None

    def with_summary(self, summary: Any) -> DryUpdater:
        return self

    def stored_part(self, path: str, stored: Tensor) -> Tensor:
        return stored

    valid_part = stored_part

    def square_norm(self, bucket: Bucket, blocks: Mapping[str, Tensor], replicas: int) -> Tensor:
        if self.context.mesh.device_type == "cpu":  # a norm in fp32 is taken of pieces in fp32
            casts = (min(b.numel(), CAST) * 4 for b in blocks.values() if b.dtype.itemsize < 4)
            self.context.tracker.look(workspace=max(casts, default=0))
        return self._new((), torch.float64)

    def pack(self, env: Env, norms: Any, own: Any) -> Tensor:
        return self._new((self.context.schedule.scalars,), torch.float64)

    def unpack(self, vector: Tensor) -> Tensor:
        return vector

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.context.tracker.new(tuple(shape), dtype)


@dataclass
class DryTransfers:
    """A `runtime.tiers.Transfers` that moves nothing.

    Host buffers are taken from a pool, which only grows. Those of gradients are given back when the worker is
    done with them.

    Args:
        free: the buffers that the pool can hand out, by their bytes.
        late: gradients that the worker may still read, the oldest first.
    """

    tracker: StorageTracker
    free: dict[int, list[Tensor]] = field(default_factory=dict)
    late: list[Reduced] = field(default_factory=list)

    def to_device(
        self, values: Sequence[Any], into: Sequence[Any] | None = None, after: Any = None
    ) -> Transfer:
        if into and self.tracker.device != "cpu":
            # An accelerator casts on its own side of the link, by way of a temporary in the master's dtype.
            pairs = zip(values, into, strict=True)
            self.tracker.look(max((v.nbytes for v, t in pairs if v.dtype != t.dtype), default=0))
        new = lambda t: self.tracker.new(t.shape, t.dtype, t.stride())  # noqa: E731
        return self._start_flight(into or [map_tensors(v, new) for v in values])

    def to_host(self, values: Sequence[Any], into: Sequence[Any] | None = None) -> Transfer:
        return self._start_flight(into or [map_tensors(v, self.take) for v in values])

    def _start_flight(self, values: Sequence[Any]) -> Transfer:
        # A copy has the purpose of its original.
        for name, value in zip(self.tracker.line.reads, values, strict=True):
            self.tracker.categorise(name, value)
        return Transfer(values, torch.device("meta"))

    def mark(self) -> None:
        return None

    def take(self, like: Tensor, dtype: torch.dtype | None = None, *, for_host: bool = False) -> Tensor:
        """Take a buffer of the host's pool, which hands out again what was given back."""
        dtype = dtype or like.dtype
        nbytes = like.numel() * dtype.itemsize
        # The buffer has the strides of a copy, which has no gaps.
        stride = like.stride()
        if not like.is_contiguous():
            with self.tracker.place_in(UNCOUNTED):
                stride = torch.empty_like(like).stride()
        if self.free.get(nbytes):
            flat = self.free[nbytes].pop()
        else:
            with self.tracker.place_in("host"):
                flat = self.tracker.new((nbytes,), torch.uint8)
        return flat.view(dtype).as_strided(like.shape, stride)

    def give(self, value: Any) -> None:
        """Give a value's buffers back to the pool, those of gradients once the worker has read them."""
        # At most `PENDING` heavy calls of the worker are under way.
        if isinstance(value, Reduced) and self.tracker.device != "cpu":
            self.late.append(value)
            if len(self.late) <= PENDING:
                return
            value = self.late.pop(0)
        map_tensors(value, self._give)

    def _give(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage, 0, (storage.nbytes(),), (1,))
        self.free.setdefault(storage.nbytes(), []).append(flat)
        return tensor
