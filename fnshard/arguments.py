"""Arguments: a batch as it was passed, by position and by keyword, as one tree of named leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fnshard import tree


@dataclass(frozen=True, eq=False)
class Arguments:
    """What `fn` is called with behind the parameters. Paths begin with the position or the keyword.

    >>> import torch
    >>> x = torch.ones(2)
    >>> list(tree.flatten_with_paths(Arguments((x, {"a": x}), {"m": x}))[0])
    ['0', '1.a', 'm']
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(batch: Arguments | Sequence[Any]) -> Arguments:
        """A batch that is a sequence has no keywords."""
        return batch if isinstance(batch, Arguments) else Arguments(tuple(batch))

    def call(self, fn: Callable[..., Any], *before: Any) -> Any:
        """`fn` of the parameters and this batch."""
        return fn(*before, *self.positional, **self.keywords)


def _children(batch: Arguments) -> dict[str, Any]:
    by_position = {str(i): value for i, value in enumerate(batch.positional)}
    return {**by_position, **{name: batch.keywords[name] for name in sorted(batch.keywords)}}


def _join(children: dict[str, Any]) -> Arguments:
    positional = tuple(value for name, value in children.items() if name.isdigit())
    return Arguments(positional, {n: v for n, v in children.items() if not n.isdigit()})


tree.register(Arguments, _children, _join)
