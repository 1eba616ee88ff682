"""The device of the case `gpu`: a GPU, or on a CPU a stub that answers the same questions."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from fnshard.analysis.hardware import Hardware

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Device(Protocol):
    """A device that runs steps.

    `prepare` is called before anything is measured. `clock_and_power` is one line of nvidia-smi, or "".
    `peak_bytes` counts from `reset_peak` on; on a CPU it is the process's own peak. `refuse_waits` makes it
    an error if the host waits for the device. `is_well` tells whether the device still answers: after an
    illegal access nothing runs on a GPU any more.
    """

    def prepare(self) -> None: ...
    def describe(self) -> list[str]: ...
    def hardware(self) -> Hardware | None: ...
    def allocated_bytes(self) -> int: ...
    def reserved_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def peak_bytes(self) -> int: ...
    def clock_and_power(self) -> str: ...
    def is_well(self) -> bool: ...
    def refuse_waits(self) -> AbstractContextManager[None]: ...


class Gpu:
    """A GPU, the current CUDA device."""

    def prepare(self) -> None:
        """Let cuBLAS allocate the workspace that it keeps, so that no contender's memory contains it."""
        one = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        one.mm(one)

    def describe(self) -> list[str]:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        cudnn = str(torch.backends.cudnn.version())
        return [torch.cuda.get_device_name(), f"CUDA {torch.version.cuda}", f"cuDNN {cudnn}", f"NCCL {nccl}"]

    def hardware(self) -> Hardware | None:
        return Hardware.of_gpu(torch.cuda.get_device_name())

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def clock_and_power(self) -> str:
        # By its id, since nvidia-smi numbers all GPUs of the host whatever CUDA_VISIBLE_DEVICES says.
        place = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
        query = ["nvidia-smi", place, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return next(iter(done.stdout.splitlines()), "")

    def is_well(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        """Raise an error if the host waits for the device within this context."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Stub:
    """A stub, by which a CPU takes the place of a GPU. Bytes are those of the process; nothing waits."""

    def prepare(self) -> None:
        """Do nothing: a CPU keeps no workspace."""

    def describe(self) -> list[str]:
        return [f"{os.cpu_count()} cores {platform.machine()}", *("none",) * 3]

    def hardware(self) -> Hardware | None:
        return None

    def allocated_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES

    def reserved_bytes(self) -> int:
        return self.allocated_bytes()

    def reset_peak(self) -> None:
        """Do nothing: a process has one peak."""

    def peak_bytes(self) -> int:
        # The kernel updates the maximum late, so it may be below the bytes of this moment.
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(most, self.allocated_bytes())

    def clock_and_power(self) -> str:
        return ""

    def is_well(self) -> bool:
        return True

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        yield


DEVICES: dict[str, Device] = {"cuda": Gpu(), "cpu": Stub()}
