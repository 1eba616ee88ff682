"""`make_functional` turns an unmodified `nn.Module` into a pure function over a flat `{path: tensor}`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.compiler.deferred.deferred_init import on_meta, recipe_of
from fnshard.compiler.ir.containers import Contents, TensorSnapshot, is_plain, put_back
from fnshard.compiler.ir.program import storage_id
from fnshard.errors import StateError, TraceError, leaves

__all__ = ["make_functional"]


def make_functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Return `apply, params`: `apply(params, *args, **kwargs)` is the module's forward, and pure.

    A call leaves the module as it was: what forward writes to its attributes, containers and submodules (a
    table that it caches, a counter in Python) is undone, also where it raises. While a step traces `fn`, that
    happens when `fn` has returned, so that `fn` may read what forward has left (`model.aux_loss`). During a
    call the module holds the leaves that are passed, wherever it keeps its own; one call runs at a time. In
    eager evaluation, activation checkpointing inside the module recomputes from the module's own leaves:
    leave it off there.

    What forward writes to its buffers, in place or by assigning them (BatchNorm's running statistics, the
    vectors of spectral_norm, a queue), goes into the tensors that were passed, as in
    `torch.func.functional_call`; those of `params` are the module's own memory. In a step they become part
    of its state (`LayoutSpec.aggregation`).

    `params` holds every parameter and buffer once, by path; wrappers (`torch.compile`, DDP) add nothing to
    the path. An `nn.Parameter` stays one, so that a frozen one is known, and a buffer is marked as
    `nn.Buffer`. A tied weight is one leaf, under the first of its names, as an alias of the module's own. If
    the module was built under `deferred`, or on the meta device, `params` is on the meta device. Train or
    eval mode, like every attribute, is what the module has when a step is called: a step traces again for
    another.

    The marks (parameter, frozen, buffer, tied, recipe) are on the tensors and are lost with them: cast by
    `model.to(dtype)` beforehand or by `LayoutSpec(compute_dtype=)`, not by `{k: v.to(dtype) ...}`.

    Raises:
        TraceError: a parameter has gradient hooks; or in `apply` a module assigns its parameters, or buffers
            of other shapes or dtypes, or writes to what requires grad.
        StateError: a parameter that trains shares its memory with another leaf; or `apply` is given other
            leaves than the module's.

    >>> import torch
    >>> apply, params = make_functional(nn.Linear(3, 2))
    >>> {k: tuple(v.shape) for k, v in params.items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> apply(params, torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        fix = "a tree of tensors of one's own is a parameter tree as it is: fs.match_specs(params, rules)."
        raise TraceError(f"make_functional takes a model, an nn.Module, not {kind}.", fix=fix)
    if isinstance(model, tree.PARALLEL):
        model = model.module  # the wrapper's own forward would communicate
    _check_hooks(model)
    _check_memory(model)

    # Leaves are the module's own tensors. Those of a module without memory are meta tensors, and buffers are
    # marked as such.
    params: dict[str, Tensor] = {}
    for path, leaf in leaves_of(model).items():
        if recipe_of(leaf) is not None:
            params[path] = on_meta(leaf)
        elif isinstance(leaf, nn.Parameter | nn.Buffer):
            params[path] = leaf
        else:
            params[path] = nn.Buffer(leaf.detach())

    # A tied weight knows its other names. They are set on an alias, so that the module's own is unchanged.
    other_names: dict[str, list[str]] = {}
    for other, path in aliases(model).items():
        other_names.setdefault(path, []).append(other)
    for path, others in other_names.items():
        leaf = params[path]
        if recipe_of(leaf) is None and isinstance(leaf, nn.Parameter):
            leaf = nn.Parameter(leaf.detach(), requires_grad=leaf.requires_grad)
        elif recipe_of(leaf) is None:
            leaf = nn.Buffer(leaf.detach())
        leaf.tied_names = tuple(others)
        params[path] = leaf

    def apply(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        with _swap_leaves(model, params):
            return model(*args, **kwargs)

    return apply, params


# A module has one place for each leaf, so that one call at a time may fill these places. The lock is
# reentrant, since a forward may call the `apply` of another module.
_swap_lock = threading.RLock()


@contextmanager
def _swap_leaves(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a module other leaves in the block, wherever it keeps its own; afterwards it is as it was."""
    with _swap_lock:
        # Find the places of leaves. A tied leaf is stored under its first name: in reverse that one is kept.
        places = list(_find_places(model))
        stored = {id(place.leaf): place.path for place in reversed(places)}
        _check_paths(model, places, stored, params)
        others = {i: params[path] for i, path in stored.items()}

        # Remember what forward may write to: leaves by their versions, the module's other tensors by
        # their values.
        plain = [path for path, leaf in params.items() if is_plain(leaf)]
        versions = {path: params[path]._version for path in plain if params[path].requires_grad}
        contents = Contents(model)
        # A trace looks after the numbers of what it meets: copied here, they would be part of its program.
        is_traced = len(plain) < len(params)
        numbers = TensorSnapshot(t for t in contents.tensors if not is_traced and id(t) not in others)

        # Replace the leaves, run the forward, and put everything back, also what it wrote.
        try:
            for container in contents.containers:
                container.replace(others)
            yield
            now: dict[str, list[Any]] = {}
            for at in places:
                now.setdefault(stored[id(at.leaf)], []).append(at.owner.get(at.key))
        finally:
            put_back(contents.containers, others)
            written = numbers.put_back()

        # A buffer may be written to or assigned, and takes the new values; nothing else may.
        wrong = [path for path, version in versions.items() if params[path]._version != version]
        buffers = {stored[id(at.leaf)] for at in places if at.is_buffer}
        assigned = {p: values for p, values in now.items() if any(v is not params[p] for v in values)}
        for path, values in assigned.items():
            value, leaf = values[0], params[path]
            is_alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (leaf.shape, leaf.dtype)
            is_one = all(v is value for v in values)  # under all of its names
            if path not in buffers or not is_alike or not is_one:
                wrong.append(path)
        _check_written(wrong, written)
        with torch.no_grad():
            # Copies first: what is assigned to one buffer may be another one.
            for path, value in [(p, values[0].clone()) for p, values in assigned.items()]:
                params[path].copy_(value)


def _check_memory(model: nn.Module) -> None:
    """Refuse a parameter that trains on memory of another leaf: in torch both change, here each by itself."""
    # Group leaves by their storage; the recipe of a deferred leaf has a tensor that stands for it.
    named = leaves_of(model)
    by_storage: dict[int, dict[str, Tensor]] = {}
    for path, leaf in named.items():
        memory = getattr(recipe_of(leaf), "alias", leaf)
        if memory.layout == torch.strided and not nn.parameter.is_lazy(leaf):
            by_storage.setdefault(storage_id(memory), {})[path] = memory

    # Compare each leaf with those that begin before it ends; no other can have an element in common with it.
    wrong: list[str] = []
    for group in by_storage.values():
        starts = {p: t.storage_offset() * t.itemsize for p, t in group.items()}
        in_order = sorted(group, key=lambda p: starts[p])
        for index, first in enumerate(in_order):
            leaf = group[first]
            last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
            end = starts[first] + (last + 1) * leaf.itemsize
            for second in in_order[index + 1 :]:
                if starts[second] >= end:
                    break
                trains = named[first].requires_grad or named[second].requires_grad
                if trains and _has_overlap(leaf, group[second]):
                    wrong.append(f"params[{first!r}] and params[{second!r}]")
    if wrong:
        raise StateError(
            f"leaves of {type(model).__name__} that are no tie share their memory, and would drift apart:",
            wrong,
            "tie them, one nn.Parameter under both names: b.weight = a.weight; or give each its own memory: "
            "b.weight = nn.Parameter(a.weight.detach().clone()).",
        )


def _has_overlap(*tensors: Tensor) -> bool:
    """Return whether two tensors of one storage have an element of it in common."""
    # NumPy knows the exact answer for strided views, and reads none of their memory.
    memory = np.empty(tensors[0].untyped_storage().nbytes(), np.uint8)  # nobody reads it or writes to it
    views = [
        np.lib.stride_tricks.as_strided(
            memory[t.storage_offset() * t.itemsize :],
            (*t.shape, t.itemsize),
            (*(stride * t.itemsize for stride in t.stride()), 1),
        )
        for t in tensors
    ]
    return np.shares_memory(*views)


class _LeafPlace(NamedTuple):
    """A place in a module that holds a parameter or a buffer: `owner[key]` is the `leaf` of this path."""

    path: str
    owner: dict[str, Any]
    key: str
    leaf: Tensor
    is_buffer: bool


def _find_places(model: nn.Module) -> Iterator[_LeafPlace]:
    """Yield the places of parameters and buffers, by all of their names."""
    modules = list(tree.named_modules(model))
    for is_buffer in (False, True):
        for prefix, module in modules:
            owner = module._buffers if is_buffer else module._parameters
            for key, leaf in owner.items():
                if leaf is not None:
                    yield _LeafPlace(f"{prefix}.{key}" if prefix else key, owner, key, leaf, is_buffer)


def _check_paths(
    model: nn.Module, places: Sequence[_LeafPlace], stored: Mapping[int, str], params: Mapping[str, Any]
) -> None:
    """Refuse leaves that are not the module's, or not under the names that store them."""
    paths = dict.fromkeys(reversed(stored.values()))
    tied = {place.path: stored[id(place.leaf)] for place in places}
    wrong = [f"params[{path!r}] is missing" for path in paths if path not in params]
    wrong += [f"params[{p!r}] is stored as {tied[p]!r}" for p in params if tied.get(p, p) != p]
    wrong += [f"params[{p!r}] is no leaf of the module" for p in params if p not in tied]
    if wrong:
        raise StateError(
            f"these are not the leaves of {type(model).__name__}, {leaves(len(wrong))}:",
            wrong,
            "pass a dict with the keys of the one that make_functional returned.",
        )


def _check_hooks(model: nn.Module) -> None:
    """Refuse parameters with gradient hooks, which nothing would call."""
    hooked = [
        f"params[{path!r}]"
        for path, leaf in model.named_parameters()
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks
    ]
    if hooked:
        raise TraceError(
            f"{leaves(len(hooked))} of {type(model).__name__} with a gradient hook, "
            "which a pure function does not run:",
            hooked,
            "remove the hooks; scale or mask gradients in the optimizer, as a transform by path.",
        )


def _check_written(paths: Iterable[str], attributes: Sequence[Tensor]) -> None:
    """Refuse writes that a pure function cannot hand on."""
    wrong = [f"params[{path!r}]" for path in paths]
    wrong += [f"an attribute, {list(t.shape)} {t.dtype}" for t in attributes]
    if wrong:
        raise TraceError(
            f"the module assigns or writes to {leaves(len(wrong))} of its own in forward, which is lost:",
            wrong,
            "register what forward changes as a buffer of one shape and dtype (register_buffer); compute the "
            "rest as local values.",
        )


def leaves_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers, each by the first of its names."""
    first: dict[int, tuple[str, Tensor]] = {}
    for place in _find_places(model):
        first.setdefault(id(place.leaf), (place.path, place.leaf))
    return dict(first.values())


def aliases(model: nn.Module) -> dict[str, str]:
    """Return `{other name: the path it is stored under}` of tied parameters and buffers."""
    first = {id(leaf): path for path, leaf in leaves_of(model).items()}
    named = [(place.path, first[id(place.leaf)]) for place in _find_places(model)]
    return {other: path for other, path in named if other != path}
