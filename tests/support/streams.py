"""A GPU's streams and NCCL stood in on a CPU: which stream reads and writes which memory after which wait.

The accesses and waits go to torch's own sanitizer for CUDA streams (`torch.cuda._sanitizer`), which needs no
CUDA to find two accesses that nothing orders. What the host itself does is a stream of its own for each
thread, and whatever a thread launches comes after what it has waited for. Memory that a stream allocated and
nobody holds any more is that stream's to write to, as it is to CUDA's caching allocator.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it takes torch.Event as a base, before a function stands in for it
import torch.distributed as dist
from torch import Tensor
from torch.cuda import _sanitizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fnshard as fs
from fnshard.mesh import Mesh, simulated_rank
from fnshard.runtime.collectives import base, connect
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.executor import scalars
from fnshard.runtime.host_worker import Worker
from fnshard.runtime.tiers import Transfers
from fnshard.step import runner, step

COMPUTE, FREE, POOL = 0, 998, 999
CPU = torch.device("cpu")
Sync = tuple[str, str, int]  # the thread, the function that waits, and its how many-th wait


class Log:
    """A log of what happens on streams, and of errors that the sanitizer finds.

    Args:
        dropped: a wait that is left out.
    """

    def __init__(self, dropped: Sync | None = None):
        self.dropped, self.handler = dropped, _sanitizer.EventHandler()
        self.errors: list[str] = []
        self.syncs: list[Sync] = []
        self.needed: list[Sync] = []  # of these, those that order what nothing before them ordered
        self.steps: list[SimpleNamespace] = []  # how many there were when each began
        self._storages: dict[int, tuple[StorageWeakRef, int | None]] = {}  # and the streams that allocated
        self._events, self._lock, self._thread = itertools.count(1), threading.RLock(), threading.local()

    @property
    def host(self) -> int:
        """Return the stream that stands for this thread."""
        if threading.current_thread() is threading.main_thread():
            return -1
        return -threading.get_ident()

    @property
    def stream(self) -> int:
        """Return the current stream; a worker's calls are on the host unless they choose one."""
        return getattr(self._thread, "stream", COMPUTE if self.host == -1 else self.host)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before = self.stream
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def begin_step(self) -> None:
        self.steps.append(SimpleNamespace(syncs=len(self.syncs), errors=len(self.errors)))

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's ops are launches."""
        return Watched(self)

    def record(self, stream: int) -> int:
        """Record an event after what the stream has to do, and after what this thread has waited for."""
        with self._lock:
            self._free()
            event = next(self._events)
            if stream != self.host:
                self.handler.syncs.record_state(0, self.host)
                self.handler.syncs.stream_wait_for_event(stream, 0)
            self.handler.syncs.record_state(event, stream)
            return event

    def wait(self, stream: int, event: int, by: str = "") -> None:
        """Let the stream wait; `by` names who asked for it, if leaving it out would be a mistake."""
        with self._lock:
            if by:
                thread = "main" if self.host == -1 else "worker"
                self.syncs.append((thread, by, sum(s[:2] == (thread, by) for s in self.syncs)))
                now = self.handler.syncs.current_sync_states.get(stream, {})
                state = self.handler.syncs.recorded_sync_states.get(event, {})
                if any(number > now.get(other, -1) for other, number in state.items()):
                    self.needed.append(self.syncs[-1])
            self._free()
            if not by or self.syncs[-1] != self.dropped:
                self.handler.syncs.stream_wait_for_event(stream, event)

    def launch(
        self,
        stream: int,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        made: Sequence[Tensor] = (),
    ) -> None:
        """Launch an op; `made`, of what it writes, is memory that the current stream allocates."""
        with self._lock:
            self.record(stream)
            for tensor in made:
                self._storage(tensor, stream)
            read, written = ({self._storage(t) for t in those if t.numel()} for those in (reads, writes))
            self._access(stream, what, read - written, written)

    def send(self, value: Tensor, device: torch.device) -> Tensor:
        """Send a value through pinned memory, which CUDA's host allocator keeps until the copy is made."""
        if self.place([value], []) >= 0:  # it is there
            return value
        with _disable_current_modes():
            pinned = value.clone()
        self.launch(self.host, "pin", [value], [pinned])
        return pinned

    def place(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        """Return the stream of an op: the host itself, if its threads have made all the op's tensors."""
        known = [self._storages.get(_address(t), (None, None))[1] for t in (*reads, *writes)]
        return self.host if known and all(s is not None and s < 0 for s in known) else self.stream

    def _access(self, stream: int, what: str, read: set[int], written: set[int]) -> None:
        names = {storage: [] for storage in read | written}
        found = self.handler._handle_kernel_launch(stream, read, written, set(), what, names)
        self.errors += [f"{e.previous_access.operator} ({e.previous_access.stream}) -> {what} ({stream})"
                        for e in found]  # fmt: skip

    def _storage(self, tensor: Tensor, allocated_on: int | None = None) -> int:
        """Return a name for a tensor's storage, which is no other's as long as the weak reference stays."""
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._storages.setdefault(storage.cdata, (storage, allocated_on))[0].cdata

    def _free(self) -> None:
        gone = [name for name, (storage, _) in self._storages.items() if storage.expired()]
        for name in gone:
            _, stream = self._storages.pop(name)
            if stream is not None and stream < 0:  # whichever thread did, what threads have read is done
                for thread in [s for s in self.handler.syncs.current_sync_states if s < 0]:
                    self.handler.syncs.record_state(0, thread)
                    self.handler.syncs.stream_wait_for_event(FREE, 0)
                stream = FREE
            if stream is not None:
                self._access(stream, "free", set(), {name})
            self.handler._handle_memory_deallocation(name)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Watched(TorchDispatchMode):
    """A mode that launches the ops of this thread on its current stream."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema, reads, writes = func._schema, [], []
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        for argument in schema.arguments:
            values = [t for t in tree_leaves(given.get(argument.name)) if isinstance(t, Tensor)]
            if argument.alias_info is None:
                reads += values
            elif argument.alias_info.is_write:
                writes += values
        known, made = {_address(t) for t in (*reads, *writes)}, []
        outs = out if isinstance(out, tuple) and len(schema.returns) > 1 else [out]
        for result, value in zip(schema.returns, outs, strict=False):
            if result.alias_info is None:
                outs_of = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
                made += [t for t in outs_of if _address(t) not in known]
        if schema.name.startswith("aten::new_") or schema.name.endswith("_like"):
            reads = []
        if schema.name == "aten::set_":  # what it writes to is no memory
            writes = []
        self.log.launch(self.log.place(reads, writes), schema.name, reads, [*writes, *made], made)
        return out


# ------------------------------------------------------------------ torch.cuda
def _caller() -> str:
    code = sys._getframe(2).f_code
    return getattr(code, "co_qualname", code.co_name)


@dataclass
class Stream:
    log: Log
    id: int = field(default_factory=itertools.count(1000).__next__)

    def wait_stream(self, other: Stream) -> None:
        self.log.wait(self.id, self.log.record(other.id), _caller())

    def wait_event(self, event: Event) -> None:
        self.log.wait(self.id, event.state, _caller())

    def synchronize(self) -> None:
        self.log.wait(self.log.host, self.log.record(self.id), _caller())


@dataclass
class Event:
    log: Log
    state: int = 0

    def record(self, stream: Stream | None = None) -> None:
        self.state = self.log.record(self.log.stream if stream is None else stream.id)

    def synchronize(self) -> None:
        self.log.wait(self.log.host, self.state, _caller())

    def query(self) -> bool:
        return True


# ------------------------------------------------------------------ NCCL
Issued = tuple[str, str, tuple[tuple[torch.dtype, int], ...]]  # communicator, collective, tensors


@dataclass
class Nccl:
    """The communicators of one rank, and what it issues on them, in order."""

    log: Log
    rank: int
    made: list[list[list[int]]] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)

    def new_subgroups(self, ranks: list[list[int]], **_: Any) -> tuple[Communicator, None]:
        self.made.append(ranks)
        assert sum(self.rank in group for group in ranks) == 1
        return Communicator(self, f"communicator {len(self.made)}"), None

    def patches(self) -> Iterator[Any]:
        def gather(out: Tensor, flat: Tensor, group: Communicator, async_op: bool) -> Work:
            return group.issue("all_gather", [flat], [out])

        def scatter(out: Tensor, rows: Tensor, group: Communicator, async_op: bool) -> Work:
            return group.issue("reduce_scatter", [rows], [out])

        def exchange(out: Tensor, sent: Tensor, *_: Any, group: Communicator, async_op: bool) -> Work:
            return group.issue("all_to_all", [sent], [out])

        def reduce(flat: Tensor, group: Communicator, async_op: bool) -> Work:
            return group.issue("all_reduce", [flat], [flat])

        everywhere = lambda group, text: [text] * group.mesh.size  # noqa: E731
        yield mock.patch.object(dist, "new_subgroups_by_enumeration", self.new_subgroups)
        yield mock.patch.object(
            dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), create=True
        )
        yield mock.patch.object(dist, "all_to_all_single", exchange)
        yield mock.patch.object(dist, "all_reduce", reduce)
        yield mock.patch.multiple(
            base,
            _all_gather=gather,
            _reduce_scatter=scatter,
            peers=mock.Mock(return_value=mock.Mock(counts={})),
        )
        yield mock.patch.object(Group, "gather_object", everywhere)
        yield mock.patch.object(connect, "connect", lambda mesh, timeout: Group(mesh, timeout))


class Communicator:
    """A communicator on a stream of its own, as NCCL's. Nothing is sent: a rank gets what it gave."""

    def __init__(self, nccl: Nccl, name: str):
        self.nccl, self.name, self.stream = nccl, name, Stream(nccl.log)

    def issue(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
        log = self.nccl.log
        sizes = tuple((t.dtype, t.numel()) for t in (*reads, *writes))
        self.nccl.issued.append((self.name, kind, sizes))
        with _disable_current_modes():
            for sent, out in zip(reads, writes, strict=True):
                if sent is not out:
                    times = -(-out.numel() // max(sent.numel(), 1))
                    out.copy_(sent.repeat(max(times, 1))[: out.numel()])
        log.wait(self.stream.id, log.record(log.stream))
        log.launch(self.stream.id, kind, reads, writes)
        return Work(log, log.record(self.stream.id), (*reads, *writes))

    def allgather_into_tensor_coalesced(self, out: Sequence[Tensor], flat: Sequence[Tensor]) -> Work:
        return self.issue("gather_coalesced", flat, out)

    def reduce_scatter_tensor_coalesced(self, out: Sequence[Tensor], leaves: Sequence[Tensor]) -> Work:
        return self.issue("scatter_coalesced", leaves, out)


@dataclass
class Work:
    log: Log
    event: int
    tensors: tuple[Tensor, ...]  # which NCCL's holds until it has been waited for

    def wait(self) -> None:
        self.log.wait(self.log.stream, self.event, "Work.wait")
        self.tensors = ()


# ------------------------------------------------------------------ a rank
class _Ordered(Worker):
    """A worker whose calls come after what its caller had waited for, and the other way round."""

    def __init__(self, log: Log):
        super().__init__(CPU)
        self.log = log

    def submit(self, call: Callable[[], Any], *, heavy: bool = False) -> None:
        asked = self.log.record(self.log.host)

        def ordered() -> None:
            self.log.wait(self.log.host, asked)
            with self.log.watching():
                call()
            self.done = self.log.record(self.log.host)

        super().submit(ordered, heavy=heavy)

    def wait(self) -> None:
        super().wait()
        if hasattr(self, "done"):
            self.log.wait(self.log.host, self.done, _caller())


@dataclass
class _Pooled(Transfers):
    """Transfers in which who takes a buffer comes after who gave it back: a lock is between them."""

    log: Log | None = None

    def take(self, *args: Any, **how: Any) -> Tensor:
        buffer = super().take(*args, **how)
        self.log.wait(self.log.host, self.log.record(POOL))
        return buffer

    def _give(self, tensor: Tensor) -> Tensor:
        self.log.record(POOL)
        return super()._give(tensor)


@contextmanager
def gpu(log: Log, nccl: Nccl) -> Iterator[None]:
    """Let this process be one rank of a mesh of GPUs, as far as fnshard sees."""

    def transfers(device: torch.device) -> Transfers:
        made = _Pooled(device, log=log)
        made.worker, made.updates = _Ordered(log), Stream(log)
        made.upward, made.downward = Stream(log), Stream(log)
        return made

    patches = [
        mock.patch.object(scalars, "copy_to_device", log.send),
        mock.patch.object(_sanitizer.traceback, "walk_stack", lambda *_: iter(())),  # slow, and not shown
        mock.patch.object(torch.cuda, "Stream", lambda *_: Stream(log)),
        mock.patch.object(torch.cuda, "Event", lambda *_: Event(log)),
        mock.patch.object(torch, "Event", lambda *_: Event(log)),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: Stream(log, log.stream)),
        mock.patch.object(torch.cuda, "stream", lambda stream: log.on(stream.id)),
        mock.patch.object(Mesh, "device", CPU),
        mock.patch.object(runner, "Transfers", transfers),
        mock.patch.object(step, "check_slots", lambda *_: None),  # they are on the CPU
        mock.patch.object(runner, "check_blocks", lambda *_: None),
        *nccl.patches(),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(simulated_rank(nccl.rank))
        yield


def cuda_mesh(**axes: int) -> Mesh:
    """Make a mesh of GPUs that are not there, for `gpu`."""
    return replace(fs.make_mesh(**axes, simulated=True), device_type="cuda")


def read_state(log: Log, state: fs.TrainState, specs: Mapping[str, fs.LayoutSpec]) -> None:
    """Read all of a state, as anybody may between two steps."""
    for path, spec in specs.items():
        for tensors, tier in (
            ([state.params[path]], spec.memory),
            (list(state.opt_state.get(path, {}).values()), spec.optimizer_memory),
        ):
            log.launch(COMPUTE if tier == "device" else log.host, f"read {path}", tensors, [])
