"""Pytrees: the one module that flattens; everything else calls it.

Keeps insertion order and treats `None` as a leaf (`torch.utils._pytree`); optree sorts keys and
treats `None` as a node, and mixing the two permutes parameters in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils._pytree as pytree

from fnshard.errors import SpecError, report

TreeDef = pytree.TreeSpec


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """Leaves in order, and the structure that `unflatten` takes back."""
    return pytree.tree_flatten(tree, is_leaf=is_leaf)


def unflatten(leaves: Iterable[Any], structure: TreeDef) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(list(leaves), structure)


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[dict[str, Any], TreeDef]:
    """`{path: leaf}` in order and the structure; a path is the keys joined by dots.

    >>> flatten_with_paths({"a": {"w": 1}, "b": [2, 3]})[0]
    {'a.w': 1, 'b.0': 2, 'b.1': 3}
    """
    pairs, structure = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = {".".join(_key(k) for k in keys) or "value": leaf for keys, leaf in pairs}
    if len(named) != len(pairs):
        seen: set[str] = set()
        double = []
        for keys, _ in pairs:
            path = ".".join(_key(k) for k in keys)
            (double.append(path) if path in seen else seen.add(path))
        raise SpecError(
            report(
                "two leaves have the same path:",
                [repr(path) for path in double],
                "leave dots out of the keys of nested dicts.",
            )
        )
    return named, structure


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply `fn` to matching leaves of all trees."""
    return pytree.tree_map(fn, tree, *rest, is_leaf=is_leaf)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
