"""Contexts that switch torch's state while `fn` is traced, and put it back afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fnshard.compiler.frontend.transforms import AUTOCAST_DEVICES, is_of_a_level
from fnshard.compiler.ir.containers import Contents, TensorSnapshot, is_plain, one_run
from fnshard.compiler.ir.guard import CACHE, Reachable, find_written
from fnshard.errors import StateError, TraceError

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else torch refuses cuBLAS in a deterministic run
CLOSURE_LIMIT_BYTES = 1 << 20  # the largest tensor that `fn` may close over
LOCK = threading.RLock()  # the tracer patches torch's globals: one trace at a time


def check_autocast() -> None:
    """Refuse torch.autocast around a step, which would not reach its kernels.

    Raises:
        TraceError: autocast is on.
    """
    on = [d for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    if on:
        raise TraceError(
            f"torch.autocast({on[0]!r}) is on around a step, whose kernels have dtypes of their own.",
            fix="enter it inside of `fn`, or leave it out and say LayoutSpec(compute_dtype=torch.bfloat16).",
        )


# The process's own choice, whether to be deterministic and whether only to warn: once for each thread that is
# within `deterministic`.
_process_choices: list[tuple[bool, bool]] = []
_choices_lock = threading.Lock()


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Use deterministic algorithms of torch and Inductor in the block, if `on`.

    The switch belongs to the process, and ranks may be threads: the last to leave puts it back. The
    environment's CUBLAS_WORKSPACE_CONFIG stays set: torch reads it once, at the process's first product on a
    GPU.

    Raises:
        StateError: the process has multiplied on a GPU before, without that variable.
    """
    if not on:
        yield
        return
    for name, value in CUBLAS.items():
        os.environ.setdefault(name, value)

    with _choices_lock:
        current = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # The first to enter sees the process's own choice; those after it would see the block's.
        _process_choices.append(_process_choices[0] if _process_choices else current)
        torch.use_deterministic_algorithms(True)

    try:
        if torch.cuda.is_initialized():
            _check_cublas()
        yield
    finally:
        with _choices_lock:
            was_on, warns_only = _process_choices.pop()
            if not _process_choices:
                torch.use_deterministic_algorithms(was_on, warn_only=warns_only)


@cache
def _check_cublas() -> None:
    """Multiply on the GPU, where torch raises if cuBLAS was set up without its workspace."""
    (name,) = CUBLAS
    matrix = torch.ones(1, 1, device="cuda")
    try:
        matrix.mm(matrix)
    except RuntimeError as error:
        if name not in str(error):
            raise
        raise StateError(
            f"deterministic=True comes too late: this process multiplied on the GPU before, without {name}.",
            fix=f"start it with {name}={CUBLAS[name]}, as fs.launch does, or set it in os.environ before the "
            "first product.",
        ) from error


class Surroundings:
    """A record of the objects that `fn` can reach besides its arguments, and of those that it writes to.

    It is a context: if the block fails, tensors that were written to in it get their numbers back.
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.reached = Reachable(fn)
        self.written: set[str] = set()
        self._modules = Contents(*self.reached.of_type(nn.Module)).containers
        tensors = self.reached.of_type(Tensor)
        small = (t for t in tensors if is_plain(t) and t.nbytes <= CLOSURE_LIMIT_BYTES)
        self._numbers = TensorSnapshot(small)

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is not None:
            self._numbers.put_back()

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Run `fn` on fakes in the block: afterwards modules are as before, and no fake stays anywhere.

        A fake that stayed in a module, a list or a `functools.cache` would end up in the next trace.
        """
        misses = {id(cache): cache.cache_info().misses for cache in self.reached.of_type(CACHE)}
        with one_run(self._modules):
            try:
                yield
                self.written |= {*find_written(self.reached, Reachable(self.fn))}
            finally:
                # Outside of modules undo writes of fakes alone: a counter of the user's, say, stays.
                for container, _ in self.reached.containers.values():
                    container.put_back(lambda _, now: any(map(is_fake, Contents(now).tensors)))
                # A cache does not show what it holds: one that was filled in the block is emptied.
                for cache in self.reached.of_type(CACHE):
                    if cache.cache_info().misses != misses[id(cache)]:
                        cache.cache_clear()


def is_fake(value: Tensor) -> bool:
    """Return whether a tensor belongs to a trace and has no numbers."""
    return isinstance(value, FakeTensor) or is_of_a_level(value)
