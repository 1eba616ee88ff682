"""Programs: the lowered steps that are kept: which fits a batch, what to say of many, and their count."""

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
Leaf = TensorShape | Constant | NumberList  # of a key
MANY = 3  # values of one name, each traced, before a warning says so


@dataclass(eq=False)
class Programs:
    """At most `size` lowered steps, the one used longest ago first.

    One fits a batch with its key, as long as `fn` reads the values that its program has baked in.
    """

    size: int
    lengths: bool = False  # batches have many, on purpose
    entries: list[tuple[BatchKey, Any]] = field(default_factory=list)
    warned: bool = False  # of batches of other shapes
    seen: dict[str, list[Any]] = field(default_factory=dict)  # values of one name that were traced

    def __len__(self) -> int:
        return len(self.entries)

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

    def changes(self, key: BatchKey) -> tuple[list[Change], bool]:
        """What differs from the last batch, and whether it is what `fn` reads; nothing for the first one."""
        latest = next((lowered for known, lowered in reversed(self.entries) if known == key), None)
        baked = latest.program.guard.changes() if latest else []
        if baked or not self.entries:
            return baked, bool(baked)
        return batch_changes(self.entries[-1][0], key), False

    def compare(self, key: BatchKey, lowered: Any) -> str | None:
        """What to warn of before one more is kept.

        Raises:
            StateError: other collectives than before. They are compared here, not over the wire.
        """
        changed, baked = self.changes(key)
        if _over_rows(lowered.schedule) != _over_rows(self.entries[-1][1].schedule):
            raise StateError(
                f"{'a value that `fn` reads' if baked else 'this batch'} makes `fn` a program with other "
                "collectives than the batches before:",
                lines(changed),
                "let `fn` use the same parameters whatever the batch; ranks would hang otherwise.",
            )
        # Leaves of the batch that were constants of the program, and are others now.
        if baked or all(isinstance(v, Constant | NumberList) for _, *both in changed for v in both):
            return self._repeated(changed)
        other_leaves = not all(isinstance(n, Leaf) and type(b) is type(n) for _, b, n in changed)
        full = len(self) == self.size  # of lengths a warning comes once, where the first is dropped
        if (self.lengths and not full) or (self.warned and not other_leaves):
            return None
        self.warned |= not other_leaves
        if self.lengths:
            return (
                f"more than {self.size} lengths: each one more is traced again. A larger multiple of "
                "fs.Buckets has fewer; shard_step(cache=) keeps more."
            )
        more = f", and {len(changed) - 1} more" * (len(changed) > 1)
        way = (
            "give all the same leaves"
            if other_leaves
            else "pad to few shapes, shapes=fs.Buckets(64, pad=...)"
        )
        return (
            f"compiling again for a new batch ({len(self) + 1}, {self.size} are kept): {lines(changed)[0]}"
            f"{more}. So will each one more, without a word: {way}; shard_step(cache=) keeps more."
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
    return [f"{name} from {shown(before)} to {shown(now)}" for name, before, now in changes]


def shown(value: Any) -> str:
    """A leaf of a key, or a value that `fn` reads, in a few words."""
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = str(value) if isinstance(value, Leaf) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_equal(value: Any, other: Any) -> bool:
    return value == other if isinstance(value, Constant | NumberList) else is_same(value, other)


@dataclass(eq=False)
class Compiles:
    """The lowerings that one `with` has seen, in order: which step, for which batch."""

    most: int
    lines: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "nothing compiled"


# Of a `with`, not of the process: threads started elsewhere, and other tasks, are not counted.
_counting: ContextVar[tuple[Compiles, ...]] = ContextVar("fnshard_compiles", default=())


def announce(fn: Any, programs: Programs, key: BatchKey) -> None:
    """This batch is about to be lowered; it is logged to "fnshard" (INFO).

    Raises:
        DebugError: one more than `assert_max_compiles` allows.
    """
    changed = lines(programs.changes(key)[0])
    if not changed:
        shapes = ", ".join(f"batch[{n!r}] {shown(d)}" for n, d in folded(key[1:]).items())
        changed = [f"{'kernels for' if len(programs) else 'its first batch:'} {shapes}"]
    for counter in _counting.get():
        counter.lines.append(f"{len(counter) + 1}: {name_of(fn)}: {'; '.join(changed)}")
        if len(counter) > counter.most:
            raise DebugError(
                f"compilation {len(counter)}, and at most {counter.most} may happen here:",
                counter.lines[-8:],
                "pad batches to few shapes, drop the last, ragged one, make the step once, outside the "
                "loop, and pass changing numbers as tensors; shard_step(cache=) keeps more shapes.",
                report=counter,
            )
    LOG.info("lowering %s", name_of(fn))


@contextmanager
def assert_max_compiles(n: int) -> Iterator[Compiles]:
    """Refuse, at once, the lowering inside the `with` that is one too many.

    Yields:
        What was lowered so far: `len(...)`, and `print(...)` says for which batches.

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
