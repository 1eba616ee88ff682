"""Programs: the lowered steps that are kept: which one fits a batch, and what to do about many."""

from __future__ import annotations

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
            "are forgotten, and traced again when they return.",
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
