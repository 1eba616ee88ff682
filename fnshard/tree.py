"""Pytrees: the one module that flattens; everything else calls it.

Keeps insertion order (`torch.utils._pytree`); optree sorts keys, and mixing the two permutes parameters in
silence. Constants and functions are part of a tree's structure, as static fields are in Equinox; where they
are values (of a batch, of what `fn` returns), `constants=True` makes leaves of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from numbers import Number
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fnshard.errors import SpecError, report

__all__ = ["register"]

CONSTANTS = (
    Number, str, bytes, type(None), Enum, slice, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def register(
    cls: type,
    flatten: Callable[[Any], Mapping[str, Any]] | None = None,
    unflatten: Callable[[dict[str, Any]], Any] | None = None,
) -> type:
    """Make a class a node of parameter trees, batches and aux; returns it, so that it decorates a class.

    From then on `torch.utils._pytree` knows it, and so does `torch.func`. What these know already stays.

    Args:
        cls: a dataclass, whose fields are its children; or any class, with the two functions.
        flatten: an object's children by name.
        unflatten: the object of such children; they need not be tensors.

    Raises:
        SpecError: no dataclass, and not both functions.

    >>> import dataclasses
    >>> @register
    ... @dataclasses.dataclass
    ... class Batch:
    ...     tokens: torch.Tensor
    ...     mask: torch.Tensor
    >>> list(flatten_with_paths({"x": Batch(torch.ones(2), torch.ones(2))})[0])
    ['x.tokens', 'x.mask']
    """
    by_hand = flatten is not None and unflatten is not None
    if not isinstance(cls, type) or not (by_hand or (is_dataclass(cls) and flatten is unflatten)):
        raise SpecError(
            report(
                f"fs.tree.register({getattr(cls, '__name__', cls)}): no dataclass, and not two functions.",
                fix="fs.tree.register(cls, flatten, unflatten): flatten(object) -> {name: child} and back.",
            )
        )
    if cls in pytree.SUPPORTED_NODES:
        return cls
    if not by_hand:
        pytree.register_dataclass(cls)
        return cls

    def split(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        children = flatten(value)
        return list(children.values()), tuple(children)

    def split_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        children = flatten(value)
        return [(pytree.MappingKey(k), v) for k, v in children.items()], tuple(children)

    def join(children: Iterable[Any], names: tuple[str, ...]) -> Any:
        return unflatten(dict(zip(names, children, strict=True)))

    pytree.register_pytree_node(cls, split, join, flatten_with_keys_fn=split_with_keys)
    return cls


def how_to_register(values: Iterable[Any]) -> str:
    """The way out for leaves that are objects, or nothing where none of them has a class of its own."""
    kinds = {type(v): "" if is_dataclass(v) else ", flatten, unflatten" for v in values}
    calls = [
        f"fs.tree.register({k.__name__}{rest})" for k, rest in kinds.items() if k.__module__ not in _PLAIN
    ]
    return f"for an object of tensors {' and '.join(calls)}, once, behind its class; " if calls else ""


_PLAIN = ("builtins", "numpy")


@dataclass(frozen=True, eq=False, slots=True)
class TreeDef:
    """A tree without its leaves; equal by ==, which the constants in it count for.

    `constants`: (index among all leaves, value).
    """

    nodes: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...] = ()

    @property
    def of_gradients(self) -> TreeDef:
        """The same with None for each constant, which has no gradient."""
        return replace(self, constants=tuple((i, None) for i, _ in self.constants))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TreeDef)
            and bool(self.nodes == other.nodes)
            and len(self.constants) == len(other.constants)
            and all(
                i == j and is_same(a, b)
                for (i, a), (j, b) in zip(self.constants, other.constants, strict=True)
            )
        )

    def __hash__(self) -> int:
        return hash((self.nodes.num_nodes, self.nodes.num_leaves))

    def __repr__(self) -> str:
        return str(self.nodes)


def is_constant(value: Any) -> bool:
    """Whether it is a plain number, string or the like, or a tuple of such."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    return isinstance(value, CONSTANTS) or (
        isinstance(value, tuple | frozenset) and all(is_constant(v) for v in value)
    )


def is_same(then: Any, now: Any) -> bool:
    """The same object, or the same constant: 1, True and 1.0 are three."""
    return then is now or (type(then) is type(now) and is_constant(then) and repr(then) == repr(now))


def is_static(leaf: Any) -> bool:
    """Whether a leaf of a parameter tree is part of its structure: a constant or a function."""
    return not isinstance(leaf, Tensor | nn.Module) and (isinstance(leaf, CONSTANTS) or callable(leaf))


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, constants: bool = False
) -> tuple[list[Any], TreeDef]:
    """Leaves in order, and the structure that `unflatten` takes back.

    Args:
        constants: these, and functions, are leaves too.
    """
    leaves, nodes = pytree.tree_flatten(tree, is_leaf=is_leaf)
    if constants:
        return leaves, TreeDef(nodes)
    return [v for v in leaves if not is_static(v)], TreeDef(nodes, _static(leaves))


def unflatten(leaves: Iterable[Any], structure: TreeDef) -> Any:
    """The inverse of `flatten`."""
    values = list(leaves)
    for index, value in structure.constants:
        values.insert(index, value)
    return pytree.tree_unflatten(values, structure.nodes)


def constants_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """`{path: value}` of the constants and functions in a tree.

    >>> constants_of({"w": torch.ones(2), "scale": 2.0, "bias": None})
    {'scale': 2.0, 'bias': None}
    """
    return {p: v for p, v in flatten_with_paths(tree, is_leaf, constants=True)[0].items() if is_static(v)}


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, constants: bool = False
) -> tuple[dict[str, Any], TreeDef]:
    """`{path: leaf}` in order and the structure; a path is the keys joined by dots.

    Args:
        constants: these, and functions, are leaves too.

    >>> flatten_with_paths({"a": {"w": 1}, "b": [2, 3]}, constants=True)[0]
    {'a.w': 1, 'b.0': 2, 'b.1': 3}
    """
    try:
        pairs, nodes = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError as error:
        if "flatten_with_keys_fn" not in str(error):
            raise
        raise SpecError(
            report(
                f"a class in this tree has no names for its children: {str(error).split('. ')[0]}.",
                fix="torch.utils._pytree.register_pytree_node(..., flatten_with_keys_fn=), or instead of it "
                "fs.tree.register(cls, flatten, unflatten).",
            )
        ) from error
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
    if constants:
        return named, TreeDef(nodes)
    leaves = {p: v for p, v in named.items() if not is_static(v)}
    return leaves, TreeDef(nodes, _static(named.values()))


def map(
    fn: Callable[[Any], Any],
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    constants: bool = False,
) -> Any:
    """Apply `fn` to the leaves; constants stay, or are leaves too."""
    leaves, structure = flatten(tree, is_leaf, constants=constants)
    return unflatten([fn(leaf) for leaf in leaves], structure)


def _static(leaves: Iterable[Any]) -> tuple[tuple[int, Any], ...]:
    return tuple((i, v) for i, v in enumerate(leaves) if is_static(v))


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
