"""Arguments: a batch as it was passed, by position and by keyword, as one tree of named leaves."""

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
    """The arguments of `fn` after the parameters. Paths begin with the position or the keyword.

    `fn` sees keywords in the order in which they are here.

    >>> import torch
    >>> x = torch.ones(2)
    >>> list(Arguments((x, {"a": x}), {"m": x}).leaves[0])
    ['0', '1.a', 'm']
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(batch: Arguments | Sequence[Any]) -> Arguments:
        """A batch that is a sequence has no keywords."""
        return batch if isinstance(batch, Arguments) else Arguments(tuple(batch))

    @cached_property
    def leaves(self) -> tuple[dict[str, Any], tree.TreeDef]:
        """`{path: leaf}`, constants too, and the structure; of a batch as it was when it was asked first."""
        return tree.flatten_with_paths(self, constants=True)

    def in_order_of(self, signature: inspect.Signature | None) -> Arguments:
        """Return the same arguments by position where a signature has a place for them, else by keyword, in
        its order."""
        if not self.keywords or signature is None:
            return self
        try:
            bound = self.call(signature.bind, None)
        except TypeError:  # it does not fit, which is said elsewhere
            return self
        return Arguments(bound.args[1:], bound.kwargs)

    def call(self, fn: Callable[..., Any], *before: Any) -> Any:
        return fn(*before, *self.positional, **self.keywords)


class NumberList(tuple[Any, ...]):
    """The plain numbers of one list in a batch."""

    def __str__(self) -> str:
        return f"a list of {len(self)} numbers"


def fold_lists(named: Mapping[str, Any], is_number: Callable[[Any], bool]) -> dict[str, Any]:
    """Leaves by path, in which the plain numbers of a list, or of lists in it, are one.

    >>> fold_lists({"0": 1, "1.0": 2, "1.1": 3}, lambda leaf: True)
    {'0': 1, '1': (2, 3)}
    """
    found: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for path, leaf in named.items():
        top = re.sub(r"(\.\d+)+$", "", path)
        if top != path and is_number(leaf):
            found[top] = None  # its place
            lists.setdefault(top, []).append(leaf)
        else:
            found[path] = leaf
    return found | {top: NumberList(numbers) for top, numbers in lists.items()}


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return what `fn` itself takes, not what it wraps; None where nobody knows."""
    try:
        return inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def arguments_for(fn: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] | None) -> Arguments:
    """A batch as `fn` takes it; one that is no tuple is one argument."""
    passed = Arguments(batch if isinstance(batch, tuple) else (batch,), keywords or {})
    return passed.in_order_of(signature_of(fn))


def _join(children: dict[Any, Any]) -> Arguments:
    positional = tuple(value for name, value in children.items() if isinstance(name, int))
    return Arguments(positional, {n: v for n, v in children.items() if isinstance(n, str)})


tree.register(Arguments, lambda batch: {**dict(enumerate(batch.positional)), **batch.keywords}, _join)


def sequence_dims(batch: Arguments | Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The dims that are sequences, of each leaf of a batch that has one: the second, if none is named."""
    dims = {}
    for name, leaf in Arguments.of(batch).leaves[0].items():
        if isinstance(leaf, losses.Sequence) and leaf.dims:
            dims[name] = tuple(dim % leaf.value.dim() for dim in leaf.dims)
        elif isinstance(leaf, Tensor) and leaf.dim() > 1:
            dims[name] = (1,)
    return dims
