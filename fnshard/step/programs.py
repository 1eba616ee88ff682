"""Programs: keep lowered steps, find the one that fits a batch, and warn of batches that need many."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnshard.compiler.ir.arguments import NumberList, fold_lists
from fnshard.compiler.ir.containers import ABSENT
from fnshard.compiler.schedule.instructions import COMMUNICATION, Exchange
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import StateError, report
from fnshard.step.batches import BatchKey, Constant, TensorShape
from fnshard.tree import is_same

LOG = logging.getLogger("fnshard")
Change = tuple[str, Any, Any]  # name, before, now
Leaf = TensorShape | Constant | NumberList  # the leaves of a key
MANY = 3  # how many values of one name are traced before a warning says so


@dataclass(eq=False)
class Programs:
    """A list of at most `size` lowered steps, the one used longest ago first.

    A step fits a batch with its key, as long as `fn` reads the values that its program has baked in.

    Args:
        size: the number of steps that are kept.
        lengths: whether batches have many lengths on purpose.
        entries: pairs of a key and a lowered step.
        warned: whether a warning of batches of other shapes was given.
        seen: by name, the values that were traced.
    """

    size: int
    lengths: bool = False
    entries: list[tuple[BatchKey, Any]] = field(default_factory=list)
    warned: bool = False
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def values(self) -> list[Any]:
        """Return the lowered steps, oldest first."""
        return [lowered for _, lowered in self.entries]

    def get(self, key: BatchKey) -> Any | None:
        """Return the lowered step that fits, or None."""
        # Look at the latest first: a batch is most often like the one before. What fits becomes the latest.
        for index in range(len(self.entries) - 1, -1, -1):
            if fits(self.entries[index], key):
                self.entries.append(self.entries.pop(index))
                return self.entries[-1][1]
        return None

    def put(self, key: BatchKey, lowered: Any) -> None:
        """Keep one more step, and drop the oldest where there are too many."""
        self.entries.append((key, lowered))
        del self.entries[: -self.size]

    def changes(self, key: BatchKey) -> tuple[list[Change], bool]:
        """Return what differs from the last batch, and whether it is values that `fn` reads, not the batch.

        For the first batch there are no changes.
        """
        # A batch with a known key needs a new program since `fn` reads other values than are baked in.
        latest = next((lowered for known, lowered in reversed(self.entries) if known == key), None)
        baked = latest.program.guard.changes() if latest else []
        if baked or not self.entries:
            return baked, bool(baked)
        return _batch_changes(self.entries[-1][0], key), False

    def compare(self, key: BatchKey, lowered: Any) -> str | None:
        """Return what to warn of before one more step is kept, or None. There must be an earlier step.

        Raises:
            StateError: the step has other collectives than those before. This is found here, on each rank,
                and nothing goes over the wire.
        """
        changed, baked = self.changes(key)
        last = self.entries[-1][1]
        # Other numbers of micro-batches have other collectives; `compare_micros` looks after these.
        is_alike = lowered.options.accumulate == last.options.accumulate
        if is_alike and _list_row_collectives(lowered.schedule) != _list_row_collectives(last.schedule):
            raise StateError(
                f"{'a value that `fn` reads' if baked else 'this batch'} makes `fn` a program with other "
                "collectives than the batches before:",
                lines(changed),
                "let `fn` use the same parameters whatever the batch; ranks would hang otherwise.",
            )

        # The value of a constant is another: one of the batch, or one that `fn` reads.
        if baked or all(isinstance(v, Constant | NumberList) for _, *both in changed for v in both):
            return self._explain_repeats(changed)

        # What remains is other leaves or other shapes, some of which differ on purpose: lengths.
        other_leaves = not all(isinstance(n, Leaf) and type(b) is type(n) for _, b, n in changed)
        full = len(self) == self.size  # many lengths are warned of once, when the first of them is dropped
        if (self.lengths and not full) or (self.warned and not other_leaves):
            return None
        self.warned |= not other_leaves
        if self.lengths:
            return (
                f"more than {self.size} lengths: each one more is compiled again. fs.Buckets of fewer "
                "lengths has fewer; shard_step(cache=) keeps more."
            )

        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        remedy = "pad to few shapes, shapes=fs.Buckets([256, 512], pad=...)"
        if other_leaves:
            remedy = "give all the same leaves"
        return (
            f"compiling again for a new batch ({len(self) + 1}, {self.size} are kept): {lines(changed)[0]}"
            f"{more}. So will each one more, without a word: {remedy}; shard_step(cache=) keeps more."
        )

    def _explain_repeats(self, changes: list[Change]) -> str | None:
        """Return a warning of constants that change again and again, once for each of them."""
        many = []
        for name, before, now in changes:
            values = self.seen.setdefault(name, [before])
            if len(values) < MANY and not any(_is_equal(each, now) for each in values):
                values.append(now)
                if len(values) == MANY:
                    many.append(f"{name} was {', '.join(map(describe, values))}")
        if not many:
            return None
        return report(
            f"{len(many)} value(s) that `fn` takes as constants change, and it is traced and compiled again "
            "for each:",
            many,
            "pass a tensor in the batch, torch.tensor(value), which may change from step to step.",
        )


def _list_row_collectives(schedule: Schedule) -> list[str]:
    """List the collectives among ranks with rows of their own.

    Ranks that split the same rows have the same batch, and may exchange other things at another length.
    """
    data_axes = {*schedule.mesh.data_axes}
    issued = [i for i in schedule.instructions if i.lane == COMMUNICATION]
    is_left_out = [isinstance(i, Exchange) and data_axes.isdisjoint(i.axes_of(schedule)) for i in issued]
    texts = schedule.communication()
    return [text for text, left_out in zip(texts, is_left_out, strict=True) if not left_out]


def fits(entry: tuple[BatchKey, Any], key: BatchKey) -> bool:
    """Return whether a lowered step is for such a batch, and all values that it has baked in still hold."""
    return entry[0] == key and entry[1].program.guard.holds()


def _batch_changes(before: BatchKey, key: BatchKey) -> list[Change]:
    """Return (name, before, now) of the leaves in which two batches differ."""
    old, new = _fold_key(before), _fold_key(key)
    changes = [
        (n, old.get(n, ABSENT), new.get(n, ABSENT)) for n in {**old, **new} if old.get(n) != new.get(n)
    ]
    named = [(f"batch[{n!r}]", *both) for n, *both in changes if n != "(structure)"]
    return named or [("the batch's structure", *both) for _, *both in changes]


def _fold_key(key: BatchKey) -> dict[str, Any]:
    """Return a key as a dict by name, in which a list of numbers is one leaf."""
    return fold_lists(dict(key), lambda leaf: isinstance(leaf, Constant) and leaf.is_number)


def lines(changes: list[Change]) -> list[str]:
    """Describe changes, a line each: `batch['0'] from [2, 3] torch.float32 to [5, 3] torch.float32`."""
    return [f"{name} from {describe(before)} to {describe(now)}" for name, before, now in changes]


def describe(value: Any) -> str:
    """Describe a leaf of a key, or a value that `fn` reads, in a few words."""
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = str(value) if isinstance(value, Leaf) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal: leaves of keys as tuples, what `fn` reads by its contents."""
    return value == other if isinstance(value, Constant | NumberList) else is_same(value, other)


def announce(fn: Any, programs: Programs, key: BatchKey) -> None:
    """Tell the logger "fnshard" (INFO) that a batch is about to be lowered, and what has changed."""
    what = "; ".join([name_of(fn), *lines(programs.changes(key)[0])])
    LOG.info("tracing and scheduling %s", what)


def name_of(fn: Any) -> str:
    """Return a function's name as a user says it, without the functions that it was defined in."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]
