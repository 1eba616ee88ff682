"""Names of the values that a program's segments and a schedule's instructions read and write.

A name is a `str`, so that it prints, hashes and is looked up as one, and it knows its parts. A schedule
prints `s:path` for a stored shard, `r:bucket#0` for the reduced gradients of micro-batch 0, `h:s:path` for a
copy of the shard on the host. Only this module puts such texts together or takes them apart. It is in `ir`,
below `schedule`, since segments name their inputs by `ValueName`, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Self


class Kind(StrEnum):
    """A kind of value that a name stands for; the enum's value is how the name begins."""

    LEAF = "leaf:"  # an input of a program: in a schedule it is STORED or GATHERED
    BATCH = "batch:"
    KEY = "key:"
    CONSTANT = "constant:"
    AXIS = "axis:"  # this rank's index on an axis of the mesh
    STORED = "s:"  # a leaf's shard (state)
    SLOTS = "o:"  # a leaf's optimizer state
    GATHERED = "p:"  # a leaf, whole, in compute dtype
    WRITTEN = "b:"  # a leaf's new value, whole, where `fn` writes to it
    GRADIENT = "g:"  # of a leaf, whole
    TANGENT = "d:"  # the gradient of a value of the program
    REDUCED = "r:"  # a bucket's gradients, summed over ranks
    ACCUMULATED = "a:"  # a bucket's whole gradients, summed over micro-batches
    NORMS = "n:"  # of a bucket's gradients
    UPDATED = "u:"  # what one stretch of a bucket's update passes to the next; its path is the bucket's name
    FLIGHT = "~"  # a collective or transfer in flight, which nothing has waited for yet
    HOST = "h:"  # a copy on the host
    LOADED = "t:"  # a copy on the device of what is kept on the host or on disk
    VALUE = ""  # of the program, or of the step ("scalars", "loss_tangent")


class ValueName(str):
    """A name of a value, which knows its parts.

    Args:
        kind: the kind of value that it stands for.
        path: the path of a leaf or bucket, or the value's own name.
        version: a suffix that tells this value from others of the path and micro-batch.
        micro: the micro-batch that it belongs to; None if there is only one, or if it belongs to all.
        source: for a copy, the name of the original; `path` is then the original's.

    >>> ValueName(Kind.GRADIENT, "w", "@3", micro=1)
    'g:w#1@3'
    >>> stored = ValueName(Kind.STORED, "layers.0.w")
    >>> stored, stored.on_host(), stored.on_device(3)
    ('s:layers.0.w', 'h:s:layers.0.w', 't:s:layers.0.w#3')
    >>> stored.on_device(3).original is stored
    True
    """

    __slots__ = ("kind", "micro", "path", "source", "version")

    def __new__(
        cls, kind: Kind, path: str, version: str = "", *, micro: int | None = None,
        source: ValueName | None = None,
    ) -> Self:  # fmt: skip
        """Put the text together."""
        batch = "" if micro is None else f"#{micro}"
        name = str.__new__(cls, kind + (path if source is None else source) + batch + version)
        name.kind, name.version, name.micro, name.source = kind, version, micro, source
        name.path = path if source is None else source.path
        return name

    def __getnewargs_ex__(self) -> tuple[Any, ...]:
        return (self.kind, self.path, self.version), {"micro": self.micro, "source": self.source}

    @property
    def original(self) -> ValueName:
        """Return the name of the original that this is a copy of, or the name itself."""
        return self if self.source is None else self.source

    @property
    def is_state(self) -> bool:
        """Return whether it is a stored shard or optimizer state, and no copy of it."""
        return self.kind in (Kind.STORED, Kind.SLOTS)

    @property
    def is_pooled(self) -> bool:
        """Return whether the value is in a buffer of the host's pool, which transfers reuse when it is free.

        All copies on the host are, except `h:s:path`: it is the memory of the leaf's master slot.
        """
        return self.kind is Kind.HOST and self.source.kind is not Kind.STORED

    @property
    def leaf(self) -> str:
        """The path of the leaf whose shard, slots, whole value or gradient this is, or ""."""
        return self.path if self.original.kind in _OF_LEAVES else ""

    def of(self, micro: int | None, version: str = "") -> ValueName:
        """Return the name of the same thing in a micro-batch, or in another version; a copy has none."""
        return ValueName(self.kind, self.path, version, micro=micro)

    def on_host(self) -> ValueName:
        return ValueName(Kind.HOST, self.path, source=self)

    def on_device(self, number: int) -> ValueName:
        """Return the name of a copy on the device, of this or of the original that it is a copy of.

        The number tells loads of one value apart. It is no micro-batch, though it is printed as `#3`, too.
        """
        return ValueName(Kind.LOADED, self.path, f"#{number}", source=self.original)

    def is_copy(self, kind: Kind, *of: Kind) -> bool:
        """Return whether it is a HOST or LOADED copy of one of the kinds."""
        return self.kind is kind and self.source.kind in of


_OF_LEAVES = (Kind.STORED, Kind.SLOTS, Kind.GATHERED, Kind.WRITTEN, Kind.GRADIENT)
MASTER = "master"  # the slot of a leaf's copy in the optimizer's dtype
SCALES = ValueName(Kind.VALUE, "scales")  # by path, of leaves that are gathered in eight bits
SCALARS = ValueName(Kind.VALUE, "scalars")  # the summed ones of a step
LOSS_TANGENT = ValueName(Kind.VALUE, "loss_tangent")  # what the backward begins with
CONTROL = ValueName(Kind.VALUE, "control")  # a step's `runtime.executor.control.StepControl`
CONTROL_ON_HOST = CONTROL.on_host()  # with the event that it has arrived
CONTROL_ON_STREAM = CONTROL.of(None, " on a stream")  # next to the control that it was made of


def stored_names(paths: Iterable[str]) -> tuple[ValueName, ...]:
    """Return the names of the stored shards of leaves."""
    return tuple([ValueName(Kind.STORED, p) for p in paths])


def slots(paths: Iterable[str]) -> tuple[ValueName, ...]:
    """Return the names of the optimizer state of leaves."""
    return tuple([ValueName(Kind.SLOTS, p) for p in paths])
