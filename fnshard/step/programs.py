"""Programs: the lowered steps that are kept: which fits a batch, what to do about many, and their count."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnshard.compiler.ir.arguments import NumberList, fold_lists
from fnshard.compiler.ir.containers import ABSENT
from fnshard.compiler.schedule.instructions import COMMUNICATION, Exchange
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import DebugError, SpecError, StateError, report
from fnshard.step.batches import BatchKey, Constant, TensorShape
from fnshard.tree import is_same

LOG = logging.getLogger("fnshard")
Change = tuple[str, Any, Any]  # name, before, now
MANY = 3  # values of one name, each traced, before a warning says so


@dataclass(eq=False)
class Programs:
    """At most `size` lowered steps, the one used longest ago first.

    One fits a batch with its key, as long as `fn` reads the values that its program has baked in.
    """

    size: int
    lengths: bool = False  # batches have many, on purpose
    entries: list[tuple[BatchKey, Any]] = field(default_factory=list)
    seen: dict[str, list[Any]] = field(default_factory=dict)  # values of one name that were traced
    crowded: bool = False  # was warned of

    def __len__(self) -> int:
        return len(self.entries)

    def keys(self) -> list[BatchKey]:
        """Of the batches, oldest first."""
        return [key for key, _ in self.entries]

    def values(self) -> list[Any]:
        """The lowered steps, oldest first."""
        return [lowered for _, lowered in self.entries]

    def get(self, key: BatchKey) -> Any | None:
        """The lowered step that fits, or None."""
        for index in range(len(self.entries) - 1, -1, -1):
            if fits(self.entries[index], key):
                self.entries.append(self.entries.pop(index))
                return self.entries[-1][1]
        return None

    def put(self, key: BatchKey, lowered: Any) -> None:
        """Keep one more."""
        self.entries.append((key, lowered))
        del self.entries[: -self.size]

    def baked_changes(self, key: BatchKey) -> list[Change]:
        """What `fn` reads otherwise than at the last trace of such a batch."""
        latest = next((lowered for known, lowered in reversed(self.entries) if known == key), None)
        return latest.program.guard.changes() if latest else []

    def compare(self, key: BatchKey, lowered: Any) -> str | None:
        """What to warn of before one more is kept.

        Raises:
            StateError: other collectives than before. They are compared here, not over the wire.
        """
        before, known = self.entries[-1]
        baked = self.baked_changes(key)
        changed = baked or batch_changes(before, key)
        if _over_rows(lowered.schedule) != _over_rows(known.schedule):
            raise StateError(
                f"{'a value that `fn` reads' if baked else 'this batch'} makes `fn` a program with other "
                "collectives than the batches before:",
                lines(changed),
                "let `fn` use the same parameters whatever the batch; ranks would hang otherwise.",
            )
        if all(map(_is_constant, changed)) or baked:
            return self._repeated(changed)
        if self.lengths:
            return self._crowded()
        return (
            f"compiling again for a new batch ({len(self) + 1}, {self.size} are kept): "
            f"{'; '.join(lines(changed))}. {' '.join(dict.fromkeys(map(_way_out, changed)))}"
        )

    def _crowded(self) -> str | None:
        """A warning, once, of more lengths than are kept."""
        if len(self) < self.size or self.crowded:
            return None
        self.crowded = True
        return report(
            f"batches have more lengths than the {self.size} whose steps are kept; those used longest ago "
            "are dropped, and traced again when they return.",
            fix="a larger multiple in fs.Buckets, or shard_step(cache=), as many as there are.",
        )

    def _repeated(self, changes: list[Change]) -> str | None:
        """A warning of constants that change again and again, once for each."""
        many = []
        for name, before, now in changes:
            values = self.seen.setdefault(name, [before])
            if len(values) < MANY and not any(_is_equal(each, now) for each in values):
                values.append(now)
                many += [f"{name} was {', '.join(map(shown, values))}"] * (len(values) == MANY)
        if not many:
            return None
        return report(
            f"{len(many)} value(s) that `fn` takes as constants change, and it is traced and compiled again "
            "for each:",
            many,
            "pass a tensor in the batch, torch.tensor(value), which may change from step to step.",
        )


def _over_rows(schedule: Schedule) -> list[str]:
    """The collectives among ranks with rows of their own: the others, that split the same rows, have the same
    batch, and may exchange otherwise at another length."""
    rows = {*schedule.mesh.data_axes}
    lines = [i for i in schedule.instructions if i.lane == COMMUNICATION]
    placed = [isinstance(i, Exchange) and rows.isdisjoint(i.axes_of(schedule)) for i in lines]
    texts = schedule.communication()
    return [text for text, alone in zip(texts, placed, strict=True) if not alone]


def fits(entry: tuple[BatchKey, Any], key: BatchKey) -> bool:
    """Whether a lowered step is one for such a batch, and what it has baked in still holds."""
    return entry[0] == key and entry[1].program.guard.holds()


def batch_changes(before: BatchKey, key: BatchKey) -> list[Change]:
    """(name, before, now) of the leaves of two batches that differ."""
    old, new = folded(before), folded(key)
    changes = [
        (n, old.get(n, ABSENT), new.get(n, ABSENT)) for n in {**old, **new} if old.get(n) != new.get(n)
    ]
    named = [(f"batch[{n!r}]", *both) for n, *both in changes if n != "(structure)"]
    return named or [("the batch's structure", *both) for _, *both in changes]


def folded(key: BatchKey) -> dict[str, Any]:
    """A key by name, in which a list of numbers is one leaf."""
    return fold_lists(dict(key), lambda leaf: isinstance(leaf, Constant) and leaf.is_number)


def lines(changes: list[Change]) -> list[str]:
    """`batch['0'] from [2, 3] torch.float32 to [5, 3] torch.float32`."""
    texts = [(name, shown(before), shown(now)) for name, before, now in changes]
    return [
        f"{name} from {a} to {b}" if a != b else f"{name} from one to another that prints alike, {b}"
        for name, a, b in texts
    ]


def shown(value: Any) -> str:
    """A leaf of a key, or a value that `fn` reads, in a few words."""
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = str(value) if isinstance(value, TensorShape | Constant | NumberList) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_constant(change: Change) -> bool:
    """Whether a leaf of the batch was a constant of the program, and is another one now."""
    return all(isinstance(value, Constant | NumberList) for value in change[1:])


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Constant | NumberList):
        return value == other
    return is_same(value, other)


def _way_out(change: Change) -> str:
    name, before, now = change
    if isinstance(before, Constant | NumberList) and isinstance(now, Constant | NumberList):
        return f"Pass {name} as a tensor: each constant is a program of its own."
    if isinstance(before, TensorShape) and isinstance(now, TensorShape) and before.shape != now.shape:
        return "Pad batches to few shapes: shapes=fs.Buckets(64, pad=...)."
    return "Give all batches the same leaves to avoid this."


# ------------------------------------------------------------------ counted


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
            return f"{name}: a batch whose program was dropped (cache={cache.options.cache})"
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
