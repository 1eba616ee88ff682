"""Tiers of memory below the device, and transfers between them.

With an accelerator, "host" is pinned memory: anonymous mappings that are registered with CUDA. (torch's own
allocator rounds every block up to a power of two, so that 1.1 GB of state would lock 2 GB.) On a CPU it is
mappings apart from torch's allocator, so that the memory of the device and that of the host are counted apart
there too. "disk" is mapped files in a directory that the user names (DeepSpeed's NVMe tier; Rajbhandari et
al. 2021). They are reserved in full when they are made, and unlinked at once, so that nothing stays however
the process ends.

Where memory is scarce, set `MALLOC_MMAP_THRESHOLD_=4194304` in the environment: otherwise glibc's heap keeps
freed pieces of up to 32 MB that aligned requests do not fit again, and may grow to a multiple of the memory
in use.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import StateError, leaves
from fnshard.runtime.host_worker import Worker

KEPT_STEPS = 16  # a host buffer that was not taken for so many steps goes back to the system


def to_tier(value: Tensor, tier: str, device: torch.device, disk_dir: str | None = None) -> Tensor:
    """Return a tensor on a tier: itself if it is known to lie there, or a copy.

    On a CPU nothing tells a host tensor from one on the device, so that "host" copies always, as "disk" does.

    Args:
        tier: "device", "host" or "disk".
        device: the mesh's device.
        disk_dir: the directory for "disk".

    Raises:
        StateError: the directory is missing, read-only or full.
    """
    if tier == "device":
        return value.to(device)
    on_host = tier == "host" and value.device.type == "cpu"
    if on_host and device.type != "cpu" and value.is_pinned():
        return value
    out = allocate(value.shape, value.dtype, tier, device, disk_dir)
    return out.copy_(value)


def allocate(
    shape: Sequence[int], dtype: torch.dtype, tier: str, device: torch.device, disk_dir: str | None = None
) -> Tensor:
    """Allocate an uninitialised tensor of the host or disk tier.

    Raises:
        StateError: the directory is missing, read-only or full.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if tier == "disk":
        return torch.frombuffer(_map_file(disk_dir, nbytes), dtype=dtype).view(tuple(shape))
    if device.type != "cpu":
        return allocate_pinned(nbytes, device).view(dtype).view(tuple(shape))
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(tuple(shape))


class RegisteredMemory(mmap.mmap):
    """A mapping that is unregistered before it is unmapped, once no tensor holds it any more.

    A weak reference's callback would come too late: a mapping is unmapped before its references are cleared.
    """

    unregister: Callable[[], Any] | None = None
    ending = staticmethod(sys.is_finalizing)  # at the process's end torch is gone, and the driver unregisters

    def __del__(self) -> None:
        if self.unregister is not None and not self.ending():
            self.unregister()


def allocate_pinned(nbytes: int, device: torch.device) -> Tensor:
    """Allocate an uninitialised pinned uint8[nbytes], nbytes > 0; by torch if CUDA cannot register memory.

    Nothing records which copies are under way: hold the tensor until they are done.

    Raises:
        StateError: CUDA does not lock so much memory; its own words are quoted.
    """
    cudart: Any = torch.cuda.cudart() if device.type == "cuda" else None
    if not hasattr(cudart, "cudaHostRegister"):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pages = RegisteredMemory(-1, nbytes)
    flat = torch.frombuffer(pages, dtype=torch.uint8)

    # Lock the pages.
    address, process = flat.data_ptr(), os.getpid()
    with torch.cuda.device(device):  # otherwise a new thread makes a context on the first GPU
        code = cudart.cudaHostRegister(address, nbytes, 0)
    if int(code):
        raise StateError(
            f"CUDA cannot lock {nbytes} bytes of host memory: {cudart.cudaGetErrorString(code)} "
            f"(cudaHostRegister, error {int(code)}).",
            fix="keep less on the host (lowered.memory_analysis() says how much a rank keeps there, and "
            "all ranks of a machine share its memory), raise `ulimit -l`, or memory='disk'.",
        )

    # CUDA must forget the pages before they are unmapped.
    def unregister() -> None:
        if os.getpid() == process:  # a forked child has a copy of the mapping, and no CUDA
            with torch.cuda.device(device):
                cudart.cudaHostUnregister(address)

    pages.unregister = unregister
    return flat


def check_directory(disk_dir: str | None, paths: Sequence[str]) -> None:
    """Refuse a directory that cannot hold the leaves on disk, before anything is made.

    Args:
        paths: the paths of these leaves.

    Raises:
        StateError: no directory was named, or it is missing or read-only.
    """
    if not paths:
        return

    # Find what is wrong with the directory; a file is made there to see whether it can be.
    problem = None
    if disk_dir is None:
        problem = "no directory was named for it"
    elif not os.path.isdir(disk_dir):
        problem = f"disk_dir={disk_dir!r} is no directory"
    else:
        try:
            os.close(_make_unnamed_file(disk_dir))
        except OSError as error:
            problem = f"disk_dir={disk_dir!r} cannot be written to ({error.strerror})"

    if problem:
        shown = [f"params[{p!r}]" for p in paths[:4]]
        if len(paths) > 4:
            shown.append("...")
        raise StateError(
            f"the specs want {leaves(len(paths))} on disk, and {problem}:",
            shown,
            "shard_step(..., disk_dir=an existing, writable directory on a fast disk), or memory='host'.",
        )


def _make_unnamed_file(disk_dir: str) -> int:
    """Open a file without a name: it is gone with its last descriptor, also after SIGKILL."""
    fd, name = tempfile.mkstemp(prefix="fnshard-", dir=disk_dir)
    os.unlink(name)
    return fd


def _map_file(disk_dir: str | None, nbytes: int) -> mmap.mmap:
    """Map a new file of a directory.

    Raises:
        StateError: the directory is missing, read-only or full.
    """
    try:
        fd = _make_unnamed_file(disk_dir or "")
        try:
            # Reserve the blocks now: a full disk is an error here, and no SIGBUS at some later write.
            os.posix_fallocate(fd, 0, nbytes)
            return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        why = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"failed ({error.strerror})"
        raise StateError(
            f"disk_dir={disk_dir!r} {why}, with {nbytes} more bytes to be placed there.",
            fix="name a directory with room for all leaves on disk (lowered.memory_analysis() says how "
            "much), or keep less there.",
        ) from error


def copy_to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting; one on the host is made contiguous and pinned first."""
    if device.type != "cpu" and value.device.type == "cpu":
        value = value.contiguous()  # a strided tensor would be copied to pageable memory once more
        value = value if value.is_pinned() else value.pin_memory()
    return value.to(device, non_blocking=True)


@dataclass
class Transfers:
    """Copies between the device and the host, with a stream for each direction.

    On a CPU a transfer is a copy, done when it is issued. Buffers on the host that a step takes and gives
    back are used again, and freed after `KEPT_STEPS` steps that did not take them. To use them again is safe:
    a copy into one is issued after the wait for its last reader, and `_copy` lets its stream wait for all
    that the compute stream has waited for.
    """

    device: torch.device
    upward: Any = None  # the stream of copies to the device
    downward: Any = None
    updates: Any = None  # the stream of optimizer updates that run beside the kernels
    issued: bool = False  # whether this step has issued a copy
    free: dict[int, list[Tensor]] = field(default_factory=dict)
    last_used: dict[int, int] = field(default_factory=dict)  # by size, the step that last took a buffer
    steps: int = 0
    worker: Worker | None = None  # the thread that updates on the host while a device computes
    lock: Any = field(default_factory=threading.Lock)  # the worker takes buffers too

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.worker = Worker(self.device)
            self.upward, self.downward, self.updates = (torch.cuda.Stream(self.device) for _ in range(3))

    def to_device(
        self, values: Sequence[Any], into: Sequence[Any] | None = None, after: Any = None
    ) -> Transfer:
        """Copy host values to the device, or into `into`; see `map_tensors` for what a value is.

        Args:
            after: a `mark` after which the copy may begin; None is now.
        """

        def allocate_like(host: Tensor) -> Tensor:
            return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)

        targets = into or [map_tensors(v, allocate_like) for v in values]
        return self._copy(values, targets, self.upward, after)

    def to_host(self, values: Sequence[Any], into: Sequence[Any] | None = None) -> Transfer:
        """Copy device values to the host, or into `into`."""
        return self._copy(values, into or [map_tensors(v, self.take) for v in values], self.downward)

    def mark(self) -> Any:
        """Return an event at the current end of the compute stream; None on a CPU."""
        if self.upward is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def join(self) -> None:
        """Wait for the worker, and let the compute stream wait for its copies.

        Raises: the worker's error, if one of its calls failed.
        """
        # Wait for the worker first: until it is done it may begin copies on the stream.
        if self.worker is not None:
            self.worker.wait()
        if self.upward is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.upward)

    def take(self, like: Tensor, dtype: torch.dtype | None = None, *, for_host: bool = False) -> Tensor:
        """Return a host buffer of a tensor's shape and dtype, and of its strides if these leave no gaps.

        Args:
            dtype: a dtype in place of the tensor's.
            for_host: whether the host itself writes to it, and no stream. The host then waits for readers.
        """
        # `empty_like` keeps strides that leave no gaps, and closes gaps otherwise; on "meta" it allocates
        # nothing.
        stride = torch.empty_like(like, device="meta").stride()
        dtype = dtype or like.dtype
        nbytes = like.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(like.shape, dtype=dtype)

        # Use a free buffer of that size again, or allocate one.
        with self.lock:
            self.last_used[nbytes] = self.steps
            flat = self.free[nbytes].pop() if self.free.get(nbytes) else None
        if flat is not None and for_host and self.upward is not None:
            self.upward.synchronize()  # a copy from this buffer may still be under way
        if flat is None:
            flat = allocate((nbytes,), torch.uint8, "host", self.device)
        return flat.view(dtype).as_strided(like.shape, stride)

    def give(self, value: Any) -> None:
        """Take back a buffer of `take`, whose reader has been waited for."""
        map_tensors(value, self._give)

    def _give(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            # The buffer is the whole storage, of which the tensor was a view in its own dtype and strides.
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
            with self.lock:
                self.free.setdefault(storage.nbytes(), []).append(flat)
        return tensor

    def finish(self) -> None:
        """Wait at the end of a step until all copies are done, so that state may be read.

        A step that moves nothing between device and host waits for nothing. The compute stream goes on after
        the updates, for which a step that has failed may not have waited.
        """
        if self.updates is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.updates)
        if self.worker is not None:
            with suppress(Exception):  # it was reported before, or another failure is being reported
                self.worker.wait()
        if self.issued and self.upward is not None:
            self.upward.synchronize()
            self.downward.synchronize()
        self.issued = False

        # Free the buffers of sizes that no step took for a while.
        self.steps += 1
        for nbytes in [n for n in self.free if self.last_used.get(n, 0) + KEPT_STEPS < self.steps]:
            del self.free[nbytes]

    def _copy(
        self, sources: Sequence[Any], targets: Sequence[Any], stream: Any, after: Any = None
    ) -> Transfer:
        """Issue a copy of each source to its target on a stream; on a CPU, copy at once.

        Args:
            after: an event after which the copy may begin; None is the current end of the compute stream.
        """
        self.issued = True
        pairs = [pair for s, t in zip(sources, targets, strict=True) for pair in _pair_tensors(s, t)]
        if stream is None:
            if pairs:
                torch._foreach_copy_([t for _, t in pairs], [s for s, _ in pairs])
            return Transfer(targets, self.device)

        # The stream waits for the kernels that made the sources, for the last reader of the memory that new
        # targets were cut from, and for copies of the other direction that the compute stream has waited for.
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return Transfer(targets, self.device, event)


@dataclass(frozen=True)
class Transfer:
    """A transfer in flight. Its sources must not change until it has been waited for."""

    targets: Sequence[Any]
    device: torch.device
    event: Any = None

    def wait(self, *, on_host: bool = False) -> Sequence[Any]:
        """Return the targets, which the compute stream (with `on_host` the host itself) sees from here on."""
        if self.event is not None:
            if on_host:
                self.event.synchronize()
            else:
                torch.cuda.current_stream(self.device).wait_event(self.event)
        return self.targets


def map_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Apply `make` to a value's tensors.

    Args:
        value: a tensor, a dict of them (slots), or an object with a method `map_tensors`.
    """
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, dict):
        return {k: make(v) for k, v in value.items()}
    return value.map_tensors(make)


def _pair_tensors(source: Any, target: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a value, each with its counterpart in another value of the same form."""
    if isinstance(source, Tensor):
        return [(source, target)]
    if isinstance(source, dict):
        return [(v, target[k]) for k, v in source.items()]
    return list(source.pairs(target))
