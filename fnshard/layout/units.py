"""Unit policies: they say which leaves are gathered, freed and reduced together.

A policy is a function `params -> {path: unit}`. FSDP calls these auto-wrap policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from torch import nn

from fnshard import tree
from fnshard.errors import SpecError

__all__ = ["UnitPolicy", "by_class", "numeric"]

UnitPolicy = Callable[[Any], Mapping[str, str]]


def numeric(params: Any) -> dict[str, str]:
    """Return units by the numeric part of paths: "layers.0.attn.wq" is in unit "layers.0". It is the default.

    A leaf with no number in its path goes to the shortest module that holds no numbered unit, so
    "model.embed.weight" next to "model.layers.0..." is in unit "model.embed".

    >>> import torch
    >>> paths = ("model.embed.w", "model.layers.0.a.w", "model.layers.0.b.w", "head.w")
    >>> numeric({path: torch.ones(2) for path in paths})
    {'model.embed.w': 'model.embed', 'model.layers.0.a.w': 'model.layers.0', \
'model.layers.0.b.w': 'model.layers.0', 'head.w': 'head'}
    """
    unit_of = {path: _cut_after_number(path) for path in tree.flatten_with_paths(params)[0]}
    # A module around a unit is no unit itself: a leaf that lies directly in one is a unit of its own.
    outer = _find_outer_modules(unit for unit in unit_of.values() if unit is not None)
    return {path: unit or _find_module(path, outer) for path, unit in unit_of.items()}


def by_class(model: nn.Module, *classes: type[nn.Module]) -> UnitPolicy:
    """Return a policy by module class: each instance of `classes` is a unit (FSDP's `ModuleWrapPolicy`).

    A leaf in nested instances belongs to the innermost. Leaves outside all of them follow `numeric`'s rule
    for paths without a number. The tree may hold the model's parameters below other names, as `fs.lora` does
    below "base", and more than once, as {"actor": params, "critic": params}.

    Raises:
        SpecError: no class is given, something is not a module class, or the model has no such module;
            (when the policy is called) none of them holds a leaf of the tree.
    """
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        given = ", ".join(map(repr, classes)) or "none"
        raise SpecError(f"by_class takes module classes, and got {given}.", fix="by_class(model, Block).")
    modules = list(tree.named_modules(model))
    instances = {name for name, module in modules if isinstance(module, classes) and name}
    names = ", ".join(c.__name__ for c in classes)
    if not instances:
        has = dict.fromkeys(type(m).__name__ for name, m in modules if name)
        raise SpecError(
            f"no module of class {names} in {type(model).__name__}.",
            fix=f"name one that it has: {', '.join(has) or 'it has no submodules'}.",
        )

    own_paths = {
        f"{name}.{key}" if name else key
        for name, module in modules
        for key in (*module._parameters, *module._buffers)
    }

    def policy(params: Any) -> dict[str, str]:
        paths = list(tree.flatten_with_paths(params)[0])
        unit_of = {path: _cut_after_instance(path, instances, own_paths) for path in paths}
        if not any(unit_of.values()):
            raise SpecError(
                f"no leaf of this tree is in a module of class {names} of {type(model).__name__}:",
                [f"params[{path!r}]" for path in paths[:3]],
                "by_class(model, Block), of the model whose parameters the tree holds.",
            )
        outer = _find_outer_modules(unit for unit in unit_of.values() if unit is not None)
        return {path: unit or _find_module(path, outer) for path, unit in unit_of.items()}

    return policy


def _cut_after_instance(path: str, instances: Set[str], own_paths: Set[str]) -> str | None:
    """Return a path up to the innermost instance around the leaf; None if there is none.

    Args:
        instances: the names of instances in the model.
        own_paths: the paths of the model's leaves.
    """
    parts = path.split(".")
    # The longest end that is a path of the model's is the leaf's name there: the names of instances count
    # from where it starts. Those around a leaf that is not the model's count from the root.
    start = next((n for n in range(len(parts)) if ".".join(parts[n:]) in own_paths), 0)
    for end in range(len(parts) - 1, start, -1):
        if ".".join(parts[start:end]) in instances:
            return ".".join(parts[:end])
    return None


def _cut_after_number(path: str) -> str | None:
    """Return a path up to its first number; None if there is no number before the leaf's own name."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _find_outer_modules(units: Iterable[str]) -> set[str]:
    """Return all modules that have one of these units inside."""
    outer: set[str] = set()
    for unit in units:
        parts = unit.split(".")
        outer.update(".".join(parts[:n]) for n in range(1, len(parts)))
    return outer


def _find_module(path: str, outer: set[str]) -> str:
    """Return the shortest module around a leaf that is not among `outer`, or the leaf's own path."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        prefix = ".".join(parts[:n])
        if prefix and prefix not in outer:
            return prefix
    return path
