"""Check and cut batches, which a step is given besides its state; describe what a lowering reads of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnshard import losses, tree
from fnshard.compiler.frontend.trace import flatten_batch
from fnshard.compiler.ir.arguments import Arguments
from fnshard.errors import StateError, leaves
from fnshard.losses import Whole, rows_of, unwrap_leaf
from fnshard.step.rank_agreement import checksum

Batch = Arguments | Sequence[Any]
BatchKey = tuple[tuple[str, Any], ...]  # what `batch_key` gives


def split_batch(batch: Batch, parts: int, what: str = "micro-batches") -> Iterator[Arguments]:
    """Yield equal parts of a batch, cut along dim 0; each has all `Whole` leaves and constants.

    Args:
        parts: the number of parts.
        what: what an error calls them.

    Raises:
        StateError: leaves have no dim 0, or one that is no multiple of `parts`.
    """
    # Check the leaves that are cut; `Whole` leaves and constants are not.
    named, structure = Arguments.of(batch).leaves
    tensors = {n: unwrap_leaf(v) for n, v in named.items() if isinstance(v, Tensor | losses.Sequence)}
    wrong = [
        f"batch[{n!r}] {list(v.shape)}" for n, v in tensors.items() if v.dim() == 0 or v.shape[0] % parts
    ]
    if wrong and parts > 1:
        raise StateError(
            f"{leaves(len(wrong))} of a batch cannot be cut into {parts} equal {what} along dim 0:",
            wrong,
            f"make their first dim a multiple of {parts}, or wrap what must not be cut in fs.Whole(...).",
        )

    # A single part is the batch itself, whose leaves need no dim 0.
    rows = {n: v.shape[0] // parts for n, v in tensors.items() if parts > 1}
    for i in range(parts):
        cut = [rows_of(v, i * rows[n], rows[n]) if n in rows else v for n, v in named.items()]
        yield tree.unflatten(cut, structure)


def batch_tensors(batch: Batch, names: Sequence[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Return tensors of a batch by name, and the names of those that all micro-batches share (`Whole`)."""
    named = Arguments.of(batch).leaves[0]
    # A conjugate or a negative is a flag on other memory in torch, and programs read the memory.
    tensors = {n: unwrap_leaf(named[n]).detach().resolve_conj().resolve_neg() for n in names}
    return tensors, {n for n in names if isinstance(named[n], Whole)}


def bytes_of_batch(batch: Batch) -> dict[str, int]:
    """Return the bytes of a batch's tensors, by name, for all micro-batches together."""
    named = flatten_batch(batch)[0].items()
    return {n: v.numel() * v.element_size() for n, v in named if isinstance(v, Tensor)}


class TensorShape(NamedTuple):
    """A description of a batch leaf that is a tensor: what a lowering reads of it.

    Args:
        sequence: the dim, or dims, of the sequence.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool
    sequence: int | tuple[int, ...] | None = 1

    def __str__(self) -> str:
        prefix = "whole " if self.whole else ""
        along = "" if self.sequence == 1 else f" sequence {self.sequence}"
        return f"{prefix}{list(self.shape)} {self.dtype}{along}"


class Constant(NamedTuple):
    """A description of a batch leaf that is no tensor: its value is part of the program."""

    kind: type
    value: Any

    @staticmethod
    def of(value: Any) -> Constant:
        """Make the constant of a leaf."""
        return Constant(type(value), value if isinstance(value, Enum) else repr(value))

    @property
    def is_number(self) -> bool:
        """Whether the leaf is a number, whose place a tensor could take."""
        return issubclass(self.kind, Number)

    def __str__(self) -> str:
        return str(self.value)


def batch_key(batch: Batch) -> BatchKey:
    """Return what a lowering depends on: shapes and dtypes of tensors, and the values of all other leaves."""

    def describe(leaf: Any) -> TensorShape | Constant:
        value = unwrap_leaf(leaf)
        if isinstance(value, Tensor):
            sequence = leaf.dim if isinstance(leaf, losses.Sequence) else 1
            return TensorShape(tuple(value.shape), value.dtype, isinstance(leaf, Whole), sequence)
        return Constant.of(value)

    named, structure = Arguments.of(batch).leaves
    return (("(structure)", structure), *((n, describe(v)) for n, v in named.items()))


def texts_of(batch: Batch) -> dict[str, str]:
    """Describe each leaf by a text that is equal for equal leaves: shape or constant, and a checksum."""
    key, named = dict(batch_key(batch)), Arguments.of(batch).leaves[0]
    values = {n: unwrap_leaf(v) for n, v in named.items()}
    sums = {n: checksum(v) for n, v in values.items() if isinstance(v, Tensor)}
    return {f"batch[{n!r}]": f"{key[n]} {sums.get(n)}" for n in named}


def check_leaves(batch: Batch, *, values: bool = False) -> None:
    """Refuse batch leaves that are neither tensors nor constants: a program would keep their first values.

    Args:
        values: whether the batch is to be run: tensors on the meta device, which have no values, are then
            refused too.

    Raises:
        StateError: there are such leaves; it names them all.
    """
    # Leaves of other types, and sequences along dims that they do not have.
    named = Arguments.of(batch).leaves[0]
    inner = {n: unwrap_leaf(v) for n, v in named.items()}
    strange = {n: v for n, v in inner.items() if not isinstance(v, (Tensor, *tree.CONSTANTS))}
    wrong = [
        f"batch[{n!r}] is {'fs.Whole of ' if isinstance(named[n], Whole) else ''}{type(v).__name__}"
        for n, v in strange.items()
    ]
    for name, leaf in named.items():
        if isinstance(leaf, losses.Sequence) and not leaf.fits:
            value = leaf.value
            kind = str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
            wrong.append(f"batch[{name!r}]: fs.Sequence of {kind}, dim {leaf.dim}")

    # Tensors that are sparse, nested or the like, and those without values.
    tensors = {n: v for n, v in inner.items() if isinstance(v, Tensor)}
    unusual = {n: tree.unusual(v) for n, v in tensors.items()}
    odd = [f"batch[{n!r}] is {kind}" for n, kind in unusual.items() if kind]
    if odd:
        raise StateError(
            f"a step cannot cut and differentiate {leaves(len(odd))} of its batch:", odd, tree.DENSE
        )
    wrong += [
        f"batch[{n!r}] {list(v.shape)} is on the meta device, and holds no values to run with"
        for n, v in tensors.items()
        if values and v.is_meta
    ]
    if wrong:
        raise StateError(
            f"a step takes tensors and plain Python constants, and not {leaves(len(wrong))} of its batch:",
            wrong,
            f"{tree.how_to_register(strange.values())}torch.as_tensor(array) for an array; the object's "
            "tensors, in a dict; fs.Whole around each tensor, not around a tree of them; "
            "fs.Sequence(tensor, dim), a dim that it has, or None; of meta tensors, step.lower alone.",
        )


def check_arguments(fn: Callable[..., Any], batch: Batch) -> None:
    """Refuse a batch that lacks an argument of `fn`, or has one too many.

    Raises:
        StateError: it does not fit `fn`'s signature.
    """
    passed = Arguments.of(batch)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin, say, does not tell what it takes
        return
    try:
        passed.call(signature.bind, None)
    except TypeError as error:
        names = f" and {', '.join(f'{n}=' for n in passed.keywords)}" if passed.keywords else ""
        count = f"{len(passed.positional)} batch arguments{names}"
        raise StateError(
            f"the batch does not fit `fn`: {error}.",
            [f"fn{signature}, called with the parameters and {count}"],
            "pass the arguments of `fn` after the parameters, in order or by name: "
            "step(state, tokens, mask=mask).",
        ) from error
