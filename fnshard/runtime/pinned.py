"""Pinned: page-locked host memory of exact sizes, which a GPU copies from and to during its work.

torch's own allocator rounds every block up to a power of two, so that 1.1 GB of state would lock 2 GB. Here a
block is an anonymous mapping that is registered with CUDA; torch sees by the pointer that it is pinned.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import StateError


class Registered(mmap.mmap):
    """A mapping that is unregistered before it is unmapped, which is when no tensor holds it any more.

    A weak reference's callback would come too late: a mapping is unmapped before its references are cleared.
    """

    unregister: Callable[[], Any] | None = None
    ending = staticmethod(sys.is_finalizing)  # at the process's end the driver does it, and torch is gone

    def __del__(self) -> None:
        if self.unregister is not None and not self.ending():
            self.unregister()


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """An uninitialised pinned uint8[nbytes], `nbytes` above 0; torch's own where there is no registering.

    Nothing records which copies are under way: hold the tensor until they are done.

    Raises:
        StateError: CUDA does not lock so much; with its own words.
    """
    cudart: Any = torch.cuda.cudart() if device.type == "cuda" else None
    if not hasattr(cudart, "cudaHostRegister"):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pages = Registered(-1, nbytes)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    address, process = flat.data_ptr(), os.getpid()
    with torch.cuda.device(device):  # else a thread that is new makes a context on the first GPU
        code = cudart.cudaHostRegister(address, nbytes, 0)
    if int(code):
        raise StateError(
            f"CUDA locks no {nbytes} bytes of host memory: {cudart.cudaGetErrorString(code)} "
            f"(cudaHostRegister, error {int(code)}).",
            fix="keep less on the host (lowered.memory_analysis() says how much a rank keeps there, and "
            "all ranks of a machine share its memory), raise `ulimit -l`, or memory='disk'.",
        )

    def unregister() -> None:
        if os.getpid() == process:  # a forked child has a copy of the mapping, and no CUDA
            with torch.cuda.device(device):
                cudart.cudaHostUnregister(address)

    pages.unregister = unregister
    return flat
