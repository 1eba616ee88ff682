"""Registries of small programs `fn(p, x)`: those that train as in torch, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Fn = Callable[[dict[str, Tensor], Tensor], Any]


def programs() -> tuple[dict[str, Fn], Callable[[Fn], Fn]]:
    """A registry and its decorator."""
    found: dict[str, Fn] = {}

    def register(fn: Fn) -> Fn:
        found[fn.__name__] = fn
        return fn

    return found, register


def refused() -> tuple[dict[str, tuple[Fn, str]], Callable[[str], Callable[[Fn], Fn]]]:
    """A registry of programs with the message that refuses them."""
    found: dict[str, tuple[Fn, str]] = {}

    def register(message: str) -> Callable[[Fn], Fn]:
        def keep(fn: Fn) -> Fn:
            found[fn.__name__] = (fn, message)
            return fn

        return keep

    return found, register
