"""A batch as it was passed, by position and by keyword, as one tree of named leaves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fnshard import losses, tree


@dataclass(frozen=True, eq=False)
class Arguments:
    """A record of the arguments of `fn` after the parameters. Paths begin with the position or the keyword.

    `fn` gets keywords in the order that they have here.

    >>> import torch
    >>> x = torch.ones(2)
    >>> list(Arguments((x, {"a": x}), {"m": x}).leaves[0])
    ['0', '1.a', 'm']
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(batch: Arguments | Sequence[Any]) -> Arguments:
        """Return a batch as Arguments; a sequence is passed by position."""
        return batch if isinstance(batch, Arguments) else Arguments(tuple(batch))

    @cached_property
    def leaves(self) -> tuple[dict[str, Any], tree.TreeDef]:
        """Return `{path: leaf}`, constants too, and the structure, as they were at the first call."""
        return tree.flatten_with_paths(self, constants=True)

    def in_order_of(self, signature: inspect.Signature | None) -> Arguments:
        """Return the same arguments in a signature's order, by position wherever it has one for them."""
        if not self.keywords or signature is None:
            return self
        try:
            bound = self.call(signature.bind, None)
        except TypeError:  # the arguments do not fit; the call of `fn` itself reports it
            return self
        return Arguments(bound.args[1:], bound.kwargs)

    def call(self, fn: Callable[..., Any], *before: Any) -> Any:
        return fn(*before, *self.positional, **self.keywords)


class NumberList(tuple[Any, ...]):
    """A list of plain numbers in a batch."""

    def __str__(self) -> str:
        return f"a list of {len(self)} numbers"


def fold_lists(named: Mapping[str, Any], is_number: Callable[[Any], bool]) -> dict[str, Any]:
    """Return leaves by path, with all plain numbers of a list, and of lists in it, as one leaf.

    >>> fold_lists({"0": 1, "1.0": 2, "1.1": 3}, lambda leaf: True)
    {'0': 1, '1': (2, 3)}
    """
    folded: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for path, leaf in named.items():
        top = re.sub(r"(\.\d+)+$", "", path)
        if top != path and is_number(leaf):
            folded[top] = None  # keeps the place of the list
            lists.setdefault(top, []).append(leaf)
        else:
            folded[path] = leaf
    return folded | {top: NumberList(numbers) for top, numbers in lists.items()}


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of `fn` itself, not of a function that it wraps; None if it has none."""
    try:
        return inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def arguments_for(fn: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] | None) -> Arguments:
    """Return a batch as the arguments of `fn`; one that is no tuple is a single argument."""
    passed = Arguments(batch if isinstance(batch, tuple) else (batch,), keywords or {})
    return passed.in_order_of(signature_of(fn))


def _join(children: dict[Any, Any]) -> Arguments:
    positional = tuple(value for name, value in children.items() if isinstance(name, int))
    return Arguments(positional, {n: v for n, v in children.items() if isinstance(n, str)})


tree.register(Arguments, lambda batch: {**dict(enumerate(batch.positional)), **batch.keywords}, _join)


def sequence_dims(batch: Arguments | Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the sequence dims of each leaf of a batch that has some: the named ones, or else the second."""
    dims = {}
    for name, leaf in Arguments.of(batch).leaves[0].items():
        if isinstance(leaf, losses.Sequence) and leaf.dims:
            dims[name] = tuple(dim % leaf.value.dim() for dim in leaf.dims)
        elif isinstance(leaf, Tensor) and leaf.dim() > 1:
            dims[name] = (1,)
    return dims
