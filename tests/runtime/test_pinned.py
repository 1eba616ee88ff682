"""Pinned memory in exact sizes, on a fake of what torch shows of the CUDA runtime."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from errors import raises

from fnshard.errors import StateError
from fnshard.runtime import tiers
from fnshard.runtime.tiers import Transfers, to_tier

CUDA = torch.device("cuda", 0)


class Runtime:
    """A CUDA runtime that notes what is registered; `code` is what it answers."""

    def __init__(self, code: int = 0):
        self.code, self.sizes, self.read = code, {}, []
        self.cudaGetErrorString = {2: "out of memory"}.get

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.sizes[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        nbytes = self.sizes.pop(address)
        self.read.append(ctypes.string_at(address, nbytes))  # a fault, were it unmapped
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def test_a_host_tensor_takes_exactly_its_bytes_until_its_last_view_is_gone(runtime: Runtime) -> None:
    value = torch.arange(5000, dtype=torch.int16).view(50, 100)
    kept = to_tier(value, "host", CUDA)
    assert torch.equal(kept, value) and list(runtime.sizes.items()) == [(kept.data_ptr(), 10_000)]
    view = kept[3:]
    del kept
    gc.collect()
    assert len(runtime.sizes) == 1 and runtime.read == []
    del view
    assert runtime.sizes == {} and runtime.read == [value.numpy().tobytes()]


def test_buffers_are_pinned_once_and_used_again(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: waits.append("stream"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    moves = Transfers(CUDA)
    like = torch.empty(3, 5)
    first = moves.take(like)
    assert list(runtime.sizes.values()) == [60]
    moves.give(first)
    assert moves.take(like.t()).data_ptr() == first.data_ptr() and len(runtime.sizes) == 1
    moves.give(first)
    assert waits == []
    moves.take(like, for_host=True)  # an upload may still read what was given back
    assert waits == ["stream"]


def test_a_refusal_names_its_code_and_leaves_nothing(runtime: Runtime) -> None:
    runtime.code = 2
    with raises(
        StateError, leaves="12 bytes", fix=["ulimit -l", "memory='disk'"], says=["out of memory", "error 2"]
    ):
        tiers.allocate((3,), torch.float32, "host", CUDA)
    runtime.sizes.clear()
    gc.collect()  # what was not registered is not unregistered
    assert runtime.read == []


def test_a_forked_child_leaves_the_parent_s_memory_alone(runtime: Runtime) -> None:
    kept = tiers.allocate_pinned(8, CUDA)
    reported = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        nonlocal kept
        del kept
        reported.put(len(runtime.sizes))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert reported.get() == 1
    process.join()
    del kept
    assert runtime.sizes == {}
