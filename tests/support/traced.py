"""Registries of small programs `fn(p, x)`: those that train as in torch, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor
from toys import assert_same_grads, chain, our_grads, rows

from fnshard import TraceError

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


def checks_of(
    right: Mapping[str, Fn], refused: Mapping[str, tuple[Fn, str]]
) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """The tests that run both registries, with all that is in them when tests are collected."""

    @pytest.mark.parametrize("name", right)
    def test_gradients_are_those_of_autograd(name: str) -> None:
        assert_same_grads(right[name], chain(), rows())

    @pytest.mark.parametrize("name", refused)
    def test_refused_with_the_way_out(name: str) -> None:
        fn, message = refused[name]
        with pytest.raises(TraceError, match=f"(?s)(?=.*Fix: )(?=.*{message})"):
            our_grads(fn, chain(), rows())

    return test_gradients_are_those_of_autograd, test_refused_with_the_way_out
