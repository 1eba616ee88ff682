"""Unit policies: which leaves are gathered, freed and reduced together.

A policy is a function `params -> {path: unit}`. FSDP calls these auto-wrap policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fnshard import tree
from fnshard.errors import SpecError

__all__ = ["UnitPolicy", "by_class", "numeric"]

UnitPolicy = Callable[[Any], Mapping[str, str]]


def numeric(params: Any) -> dict[str, str]:
    """Return units by the numeric part of paths: "layers.0.attn.wq" is in unit "layers.0". The default.

    A leaf with no number in its path goes to the shortest module that holds no numbered unit, so
    "model.embed.weight" next to "model.layers.0..." is in unit "model.embed".

    >>> import torch
    >>> paths = ("model.embed.w", "model.layers.0.a.w", "model.layers.0.b.w", "head.w")
    >>> numeric({path: torch.ones(2) for path in paths})
    {'model.embed.w': 'model.embed', 'model.layers.0.a.w': 'model.layers.0', \
'model.layers.0.b.w': 'model.layers.0', 'head.w': 'head'}
    """
    paths = list(tree.flatten_with_paths(params)[0])
    numbered = {path: unit for path in paths if (unit := _through_number(path))}
    # The modules around numbered units hold units of their own: a leaf that lies directly in one goes
    # elsewhere.
    holds = {
        ".".join(unit.split(".")[:n]) for unit in numbered.values() for n in range(1, unit.count(".") + 1)
    }
    return {path: numbered.get(path) or _top(path, holds) for path in paths}


def by_class(model: nn.Module, *classes: type[nn.Module]) -> UnitPolicy:
    """Return a policy by module class: each instance of `classes` is a unit (FSDP's `ModuleWrapPolicy`).

    Of nested instances the innermost holds the leaf. For leaves outside all of them, `numeric`'s rule for
    paths without a number holds.

    Raises:
        SpecError: no class is given, something is not a module class, or the model has no such module.
    """
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        given = ", ".join(map(repr, classes)) or "none"
        raise SpecError(f"by_class takes module classes, and got {given}.", fix="by_class(model, Block).")
    modules = list(tree.named_modules(model))
    roots = [name for name, module in modules if isinstance(module, classes) and name]
    if not roots:
        names = ", ".join(c.__name__ for c in classes)
        has = dict.fromkeys(type(m).__name__ for name, m in modules if name)
        raise SpecError(
            f"no module of class {names} in {type(model).__name__}.",
            fix=f"name one that it has: {', '.join(has) or 'it has no submodules'}.",
        )

    def policy(params: Any) -> dict[str, str]:
        holds = {".".join(r.split(".")[:n]) for r in roots for n in range(1, r.count(".") + 1)}
        out = {}
        for path in tree.flatten_with_paths(params)[0]:
            inside = [r for r in roots if path.startswith(r + ".")]
            out[path] = max(inside, key=len) if inside else _top(path, holds)
        return out

    return policy


def _through_number(path: str) -> str | None:
    """Return a path up to its first number; None if there is no number before the leaf's own name."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _top(path: str, holds: set[str]) -> str:
    """Return the shortest module around a leaf that is not one of `holds`, the modules that hold units."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        prefix = ".".join(parts[:n])
        if prefix and prefix not in holds:
            return prefix
    return path
