"""Compiles: what is lowered and compiled inside a `with`, counted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fnshard.errors import DebugError, SpecError
from fnshard.step.batches import BatchKey
from fnshard.step.programs import batch_changes, folded, lines, shown

LOG = logging.getLogger("fnshard")


@dataclass(eq=False)
class Compiles:
    """The lowerings that one `with` has seen, in order: which step, for which batch."""

    most: int
    lines: list[str] = field(default_factory=list)
    seen: list[tuple[Any, BatchKey]] = field(default_factory=list)
    on_paper: set[tuple[int, BatchKey]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.seen)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "nothing compiled"

    def _note(self, cache: Any, key: BatchKey, adopted: bool) -> None:
        if adopted and (id(cache), key) in self.on_paper:
            self.on_paper.discard((id(cache), key))  # counted when it was lowered
            return
        if not adopted:
            self.on_paper.add((id(cache), key))
        self.lines.append(f"{len(self.seen) + 1}: {self._line(cache, key)}")
        self.seen.append((cache, key))
        if len(self.seen) > self.most:
            raise DebugError(
                f"compilation {len(self.seen)}, and at most {self.most} may happen here:",
                self.lines[-8:],
                "pad batches to few shapes, drop the last, ragged one, make the step once, outside the "
                "loop, and pass changing numbers as tensors; shard_step(cache=) keeps more shapes.",
                report=self,
            )

    def _line(self, cache: Any, key: BatchKey) -> str:
        """A lowering, and what changed since the one before it of the same step."""
        name = name_of(cache.fn)
        older = [k for each, k in self.seen if each is cache]
        known = older or cache.programs.keys()
        baked = cache.programs.baked_changes(key)
        if baked:
            return f"{name}: `fn` reads {'; '.join(lines(baked))}"
        if key in older:
            return f"{name}: a batch it had compiled and forgot (cache={cache.options.cache})"
        if not known:
            shapes = ", ".join(f"batch[{n!r}] {shown(d)}" for n, d in folded(key[1:]).items())
            again = " (a new step of a function that has one)" if self._has_other(cache) else ""
            return f"{name}: its first batch{again}: {shapes}"
        return f"{name}: {'; '.join(lines(batch_changes(known[-1], key)))}"

    def _has_other(self, cache: Any) -> bool:
        code = getattr(cache.fn, "__code__", None)
        return code is not None and any(getattr(each.fn, "__code__", None) is code for each, _ in self.seen)


# Of a `with`, not of the process: threads started elsewhere, and other tasks, are not counted.
_counting: ContextVar[tuple[Compiles, ...]] = ContextVar("fnshard_compiles", default=())


def announce(cache: Any, key: BatchKey, *, adopted: bool = False) -> None:
    """A cache is about to lower this batch; `adopted`: to compile what it had on paper. It is logged to
    "fnshard" (INFO).

    Raises:
        DebugError: one more than `assert_max_compiles` allows.
    """
    for counter in _counting.get():
        counter._note(cache, key, adopted)
    if not adopted:
        LOG.info("lowering %s", name_of(cache.fn))


@contextmanager
def assert_max_compiles(n: int) -> Iterator[Compiles]:
    """Refuse, at once, the lowering or compilation inside the `with` that is one too many.

    Yields:
        What was compiled so far: `len(...)`, and `print(...)` says for which batches.

    Raises:
        DebugError: names the step, and what changed of the batch since the lowering before.
        SpecError: `n` is no count.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs, shard_step
    >>> params = {"w": torch.ones(3)}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> step = shard_step(lambda p, x: (p["w"] * x).sum(), specs, backend="eager")
    >>> with assert_max_compiles(1) as compiled:
    ...     for _ in range(3):
    ...         loss, grads = step(params, torch.arange(3.0))
    >>> len(compiled)
    1
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise SpecError(f"assert_max_compiles({n!r}): how many compilations are allowed, 0 or more.")
    counter = Compiles(n)
    token = _counting.set((*_counting.get(), counter))
    try:
        yield counter
    finally:
        _counting.reset(token)


def name_of(fn: Any) -> str:
    """What a user calls a function: without the functions that it was defined in."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]
