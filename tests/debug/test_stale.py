"""`fs.debug.check_stale`: what a guard does not compare is found by tracing again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises
from guarded import PARAMS, X, make, scaled
from kernels import no_kernels
from torch import Tensor
from toys import traces

import fnshard as fs
from fnshard.errors import DebugError

Unseen = tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], list[str]]


def a_global_by_its_key(_: Path) -> Unseen:
    globals()["w"] = torch.ones(4, dtype=torch.float64)
    change = lambda: globals().update(w=torch.zeros(4, dtype=torch.float64))  # noqa: E731
    return lambda p, x: scaled(p, x, globals()["w"]), change, ["numbers"]


def a_file(folder: Path) -> Unseen:
    file = folder / "scale.txt"
    file.write_text("2.0")
    fn = lambda p, x: scaled(p, x, float(file.read_text()))  # noqa: E731
    return fn, lambda: file.write_text("3.0"), ["2.0)", "3.0)"]


def a_variable_of_the_environment(_: Path) -> Unseen:
    os.environ["A_MODE"] = "tanh"
    fn = lambda p, x: scaled(p, getattr(torch, os.environ["A_MODE"])(x), 1)  # noqa: E731
    return fn, lambda: os.environ.update(A_MODE="relu"), ["tanh"]


def an_autocast(_: Path) -> Unseen:
    os.environ["A_MODE"] = "off"

    def fn(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=os.environ["A_MODE"] == "on"):
            return (p["w"].float() @ x.float()).double()

    return fn, lambda: os.environ.update(A_MODE="on"), ["autocast"]


@pytest.mark.parametrize("unseen", [a_global_by_its_key, a_file, a_variable_of_the_environment, an_autocast])
def test_what_a_guard_does_not_compare_is_found(
    unseen: Callable[..., Unseen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_MODE", "")  # so that it is put back, as is the global
    monkeypatch.setitem(globals(), "w", None)
    fn, change, difference = unseen(tmp_path)
    step = make(fn)
    step(PARAMS, X)
    with no_kernels():
        fs.debug.check_stale(step, PARAMS, X)
    change()
    with traces(step, 0):
        step(PARAMS, X)
        with no_kernels(), raises(DebugError, leaves=difference, fix="make the step again"):
            fs.debug.check_stale(step, PARAMS, X)


def test_a_state_and_a_change_that_the_guard_sees() -> None:
    scale = 2.0
    step = make(lambda p, x: scaled(p, x, scale), optimizer=fs.optim.sgd(0.1))
    state, _ = step(step.init(PARAMS), X)
    scale = 3.0
    fs.debug.check_stale(step, state, X)
