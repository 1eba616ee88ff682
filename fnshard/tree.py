"""Flatten pytrees: parameter trees, batches, and what `fn` returns. No other module calls optree.

optree is used in a namespace of its own, in which dicts keep insertion order. Elsewhere optree sorts keys,
and mixing the two permutes parameters in silence. None is a leaf. A class that `torch.utils._pytree` knows
(torch.func flattens by it) is known here too. Constants and functions are part of a tree's structure, as
static fields are in Equinox. Where they are values (in a batch, in what `fn` returns), `constants=True` makes
leaves of them.
"""

from __future__ import annotations

import builtins
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from typing import Any

import optree
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fnshard.errors import SpecError

__all__ = ["register"]

_SPACE = "fnshard"
# A context manager that is never left. It is kept, since optree sorts keys again once it is collected.
_ORDER = optree.dict_insertion_ordered(True, namespace=_SPACE)
_ORDER.__enter__()

CONSTANTS = (
    Number, str, bytes, type(None), Enum, slice, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def register(
    cls: type,
    flatten: Callable[[Any], Mapping[str, Any]] | None = None,
    unflatten: Callable[[dict[str, Any]], Any] | None = None,
) -> type:
    """Make a class a node of parameter trees, batches and aux; return it, so that this decorates a class.

    From then on `torch.utils._pytree` knows it too, and so does `torch.func`. What torch knows already stays.

    Args:
        cls: a dataclass or attrs class, whose fields are its children; or any class, with the two functions.
        flatten: returns an object's children by name.
        unflatten: makes an object of such children, which need not be tensors.

    Raises:
        SpecError: `cls` is neither a dataclass nor an attrs class, and the two functions are not given.

    >>> import dataclasses
    >>> @register
    ... @dataclasses.dataclass
    ... class Batch:
    ...     tokens: torch.Tensor
    ...     mask: torch.Tensor
    >>> list(flatten_with_paths({"x": Batch(torch.ones(2), torch.ones(2))})[0])
    ['x.tokens', 'x.mask']
    """
    has_functions = flatten is not None and unflatten is not None
    has_none = flatten is None and unflatten is None
    if not isinstance(cls, type) or not (has_functions or (has_none and _has_fields(cls))):
        raise SpecError(
            f"fs.tree.register({getattr(cls, '__name__', cls)}): no dataclass or attrs class, and "
            "not two functions.",
            fix="fs.tree.register(cls, flatten, unflatten): flatten(object) -> {name: child} and back.",
        )
    # First torch learns the class, unless it knows it; optree takes the class from torch's registry.
    if cls not in pytree.SUPPORTED_NODES:
        if has_functions:
            _register_with_torch(cls, flatten, unflatten)
        elif is_dataclass(cls):
            pytree.register_dataclass(cls)
        else:
            # attrs may give a field another name in the constructor, its alias.
            fields = {a.name: a.alias for a in cls.__attrs_attrs__ if a.init}
            _register_with_torch(
                cls,
                lambda value: {name: getattr(value, name) for name in fields},
                lambda children: cls(**{fields[name]: child for name, child in children.items()}),
            )
    _register_with_optree(cls)
    return cls


def _has_fields(cls: type) -> bool:
    """Return whether a class says by itself what its children are."""
    return is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")


def _register_with_torch(
    cls: type, flatten: Callable[[Any], Mapping[str, Any]], unflatten: Callable[[dict[str, Any]], Any]
) -> None:
    """Tell `torch.utils._pytree` how to take a class apart by name, and how to put it together."""

    def split(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        children = flatten(value)
        return list(children.values()), tuple(children)

    def split_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        children = flatten(value)
        return [(pytree.MappingKey(k), v) for k, v in children.items()], tuple(children)

    def join(children: Iterable[Any], names: tuple[str, ...]) -> Any:
        return unflatten(dict(zip(names, children, strict=True)))

    pytree.register_pytree_node(cls, split, join, flatten_with_keys_fn=split_with_keys)


def _register_with_optree(cls: type) -> None:
    """Tell optree about a class that torch knows; children that torch has no names for take their index."""
    node = pytree.SUPPORTED_NODES[cls]

    def split(value: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
        children, context = node.flatten_fn(value)
        keys = node.flatten_with_keys_fn(value)[0] if node.flatten_with_keys_fn is not None else None
        if keys:
            names = tuple(_name_torch_key(key) for key, _ in keys)
        else:
            names = tuple(str(index) for index in range(len(children)))
        # Names are part of the metadata, so that trees with other names are not equal.
        return children, (names, context), names

    def join(metadata: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), metadata[1])

    with _lock:  # simulated ranks are threads
        if optree.register_pytree_node.get(cls, namespace=_SPACE) is None:
            optree.register_pytree_node(
                cls, split, join, path_entry_type=optree.FlattenedEntry, namespace=_SPACE
            )


_lock = threading.Lock()


def how_to_register(values: Iterable[Any]) -> str:
    """Return the way out for leaves that are objects; "" where none of them has a class of its own."""
    kinds = {type(v): "" if _has_fields(type(v)) else ", flatten, unflatten" for v in values}
    calls = [
        f"fs.tree.register({cls.__name__}{functions})"
        for cls, functions in kinds.items()
        if cls.__module__ not in _PLAIN
    ]
    return f"for an object of tensors {' and '.join(calls)}, once, after its class; " if calls else ""


_PLAIN = ("builtins", "numpy")


@dataclass(frozen=True, eq=False, slots=True)
class TreeDef:
    """A tree without its leaves. Two are equal if their nodes and their constants are.

    Args:
        nodes: optree's own structure.
        constants: the constants with their index among all leaves.
    """

    nodes: optree.PyTreeSpec
    constants: tuple[tuple[int, Any], ...] = ()

    @property
    def of_gradients(self) -> TreeDef:
        """Return the structure with None for each constant, which has no gradient."""
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


DENSE = (
    "a dense tensor: x.to_dense(), and index_add in place of a sparse product; x.to_padded_tensor(0.0) of a "
    "nested one, and its lengths; x.to_tensor(0.0) of a masked one, and its mask; x.full_tensor() of a "
    "DTensor; x.resolve_conj() of a conjugated view; run a lazy module once, on an example."
)


def unusual(value: Tensor) -> str:
    """Return what an unusual tensor is, "nested" say; "" for one with strides, a shape and plain numbers."""
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return "without a shape yet"
    if value.is_nested:
        return "nested"
    if value.layout != torch.strided:
        return str(value.layout).removeprefix("torch.")
    if value.is_quantized:
        return "quantized"
    # A subclass that handles operators itself, as DTensor does, need not hold plain numbers. A fake tensor
    # stands for a plain one.
    cls = type(value)
    if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ and cls.__name__ != "FakeTensor":
        return f"a {cls.__name__}"
    return ""


def is_constant(value: Any) -> bool:
    """Return whether a value is a plain number, string or the like, or a tuple of such."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    return isinstance(value, CONSTANTS) or (
        isinstance(value, tuple | frozenset) and all(is_constant(v) for v in value)
    )


def is_same(then: Any, now: Any) -> bool:
    """Return whether two leaves are one object, or one constant: 1, True and 1.0 are three.

    >>> is_same(frozenset([0, 8]), frozenset([8, 0])), is_same((1, 2), (1, 2.0))
    (True, False)
    """
    return then is now or (
        type(then) is type(now) and is_constant(then) and constant_text(then) == constant_text(now)
    )


def constant_text(constant: Any) -> str:
    """Return a text that is equal for equal constants; a set's own text depends on how it was made."""
    if isinstance(constant, tuple | frozenset):
        texts = [constant_text(value) for value in constant]
        texts = sorted(texts) if isinstance(constant, frozenset) else texts
        return f"{type(constant).__name__}({', '.join(texts)})"
    return repr(constant)


def is_static(leaf: Any) -> bool:
    """Return whether a leaf of a parameter tree is part of its structure: a constant or a function."""
    return not isinstance(leaf, _NEVER_STATIC) and (isinstance(leaf, CONSTANTS) or callable(leaf))


_NEVER_STATIC = (Tensor, nn.Module)


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, constants: bool = False
) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree in order, and the structure that `unflatten` takes back.

    Args:
        constants: whether constants and functions are leaves too.
    """
    leaves, nodes = _flatten(tree, is_leaf)
    # What is constant belongs to the structure, where it takes part in comparisons.
    static = () if constants else _find_static(leaves)
    return _drop_static(leaves, static), TreeDef(nodes, static)


def unflatten(leaves: Iterable[Any], structure: TreeDef) -> Any:
    """Return the tree of some leaves and a structure; the inverse of `flatten`."""
    values = list(leaves)
    for index, value in structure.constants:
        # Their indices are among all leaves, in order: each is inserted where it was.
        values.insert(index, value)
    return optree.tree_unflatten(structure.nodes, values)


def constants_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return `{path: value}` of the constants and functions in a tree.

    >>> constants_of({"w": torch.ones(2), "scale": 2.0, "bias": None})
    {'scale': 2.0, 'bias': None}
    """
    return {p: v for p, v in flatten_with_paths(tree, is_leaf, constants=True)[0].items() if is_static(v)}


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, constants: bool = False
) -> tuple[dict[str, Any], TreeDef]:
    """Return `{path: leaf}` of a tree in order, and its structure; a path is the keys joined by dots.

    Keys may have dots, as those of a flat dict of a module's parameters do.

    Args:
        constants: whether constants and functions are leaves too.

    Raises:
        SpecError: two leaves have the same path.

    >>> flatten_with_paths({"a": {"w": 1}, "b": [2, 3]}, constants=True)[0]
    {'a.w': 1, 'b.0': 2, 'b.1': 3}
    """
    leaves, nodes = _flatten(tree, is_leaf)
    paths = _list_paths(nodes)
    static = () if constants else _find_static(leaves)
    named = dict(zip(_drop_static(paths, static), _drop_static(leaves, static), strict=True))
    return named, TreeDef(nodes, static)


def map(
    fn: Callable[[Any], Any],
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    constants: bool = False,
) -> Any:
    """Apply `fn` to the leaves of a tree. Constants stay as they are, or are leaves too."""
    leaves, structure = flatten(tree, is_leaf, constants=constants)
    return unflatten([fn(leaf) for leaf in leaves], structure)


PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_WRAPPERS = (*PARALLEL, torch.optim.swa_utils.AveragedModel)
COMPILED = "_orig_mod"  # the name under which torch.compile keeps a module


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by all of their names, to which wrappers (torch.compile, DDP) add nothing."""
    yield name, module
    # The keys under which a wrapper keeps the module that it wraps; "module" is one in these classes alone.
    wrapped_keys = [COMPILED, "_checkpoint_wrapped_module"]
    if isinstance(module, _WRAPPERS):
        wrapped_keys.append("module")
    for key, child in module._modules.items():
        if child is None:
            continue
        if key in wrapped_keys:
            yield from named_modules(child, name)
        else:
            yield from named_modules(child, f"{name}.{key}" if name else key)


def unwrap_module(module: Any) -> Any:
    """Return the module that another one wraps, or the module itself."""
    return dict(named_modules(module))[""] if isinstance(module, nn.Module) else module


def _flatten(tree: Any, is_leaf: Callable[[Any], bool] | None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten by optree, and teach it the classes that only torch knows as they are met."""
    leaves, nodes = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_SPACE)
    find_node = partial(optree.register_pytree_node.get, namespace=_SPACE)
    # optree takes an object of a class that it does not know for a leaf. If torch knows the class, register
    # it, and flatten again.
    unknown = [
        cls
        for cls in set(builtins.map(type, leaves))
        if cls in pytree.SUPPORTED_NODES and find_node(cls) is None
    ]
    if not unknown:
        return leaves, nodes
    for cls in unknown:
        _register_with_optree(cls)
    return _flatten(tree, is_leaf)


@lru_cache(maxsize=256)
def _list_paths(nodes: optree.PyTreeSpec) -> tuple[str, ...]:
    """Return the paths of all leaves and constants; that of a tree which is a single leaf is "value"."""
    paths = tuple(
        ".".join(_name_entry(entry) for entry in accessor) or "value" for accessor in nodes.accessors()
    )
    alike = [repr(path) for path, count in Counter(paths).items() if count > 1]
    if alike:
        raise SpecError(
            "two leaves have the same path:",
            alike,
            "rename keys: those of nested trees are joined by dots, and keys of one dict may print alike.",
        )
    return paths


def _find_static(leaves: list[Any]) -> tuple[tuple[int, Any], ...]:
    """Return the leaves that are part of the structure, with their index."""
    # Most trees hold plain tensors alone, for which the set of their types is enough.
    if set(builtins.map(type, leaves)) <= _TENSORS:
        return ()
    return tuple((i, v) for i, v in enumerate(leaves) if is_static(v))


_TENSORS = {Tensor, nn.Parameter}


def _drop_static(values: Sequence[Any], static: tuple[tuple[int, Any], ...]) -> Sequence[Any]:
    """Return the values, given for all leaves, of the leaves that are not in `static`."""
    if not static:
        return values
    dropped = {i for i, _ in static}
    return [v for i, v in enumerate(values) if i not in dropped]


def _name_entry(entry: Any) -> str:
    """Return the name of a step into a node; a named tuple's entry is an index, and `field` is its name."""
    return str(getattr(entry, "field", entry.entry))


def _name_torch_key(key: Any) -> str:
    """Return the name of a step into a node from torch's MappingKey, SequenceKey or GetAttrKey."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
