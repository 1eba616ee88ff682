"""`fs.StepOptions`: options of a step, declared once and passed whole."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from errors import raises

import fnshard as fs
from fnshard.errors import SpecError

PARAMS = {"w": torch.ones(3)}
SPECS = fs.match_specs(PARAMS, [("*", fs.LayoutSpec())])
NAMES = [each.name for each in fields(fs.StepOptions)]


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (params["w"] * x).sum()


def test_functions_that_take_options_show_all_of_them() -> None:
    for function in (fs.shard_step, fs.shard_forward):
        shown = inspect.signature(function).parameters
        assert [name for name in shown if name in NAMES] == NAMES
        assert shown["accumulate"].default == 1 and "options" in shown
        assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())


def test_an_instance_is_passed_whole() -> None:
    options = fs.StepOptions(accumulate=2, remat="unit", save=["matmul"], backend="eager", prefetch=2)
    step = fs.shard_step(loss, SPECS, **options)
    assert step.options == replace(options, overlap=1)  # what a device of CPUs overlaps
    assert fs.shard_step(loss, SPECS, **{**options, "cache": 3}).options.cache == 3
    assert dict(options).keys() == set(NAMES) and "remat" in options and "colour" not in options
    with pytest.raises(KeyError):
        options["inductor"]


def test_equal_options_compare_equal_however_they_were_written() -> None:
    written = fs.StepOptions(prefetch=2, save=["matmul"], remat="unit", passes=None)
    assert written == fs.StepOptions(prefetch=(2, 2), save=("matmul",), remat="unit")
    assert written != fs.StepOptions(prefetch=(2, 1), save=("matmul",), remat="unit")


@pytest.mark.parametrize("function", [fs.shard_step, fs.shard_forward])
def test_a_name_that_no_option_has_is_an_error_that_knows_the_nearest(function: Any) -> None:
    with raises(SpecError, leaves=[function.__name__, "determinstic=", "colour="], says="'deterministic'"):
        function(loss, SPECS, determinstic=True, colour="red")


def test_a_forward_refuses_what_only_a_step_uses() -> None:
    whole = fs.StepOptions(backend="eager", prefetch=0, residual="whole", timeout=5)
    assert fs.shard_forward(loss, SPECS, **whole)(PARAMS, torch.ones(3)) == 3
    with raises(SpecError, leaves=["accumulate=2", "remat='unit'"], fix="leave them out"):
        fs.shard_forward(loss, SPECS, accumulate=2, remat="unit")


def test_passes_and_depths_are_given_one_or_the_other() -> None:
    with raises(
        SpecError,
        leaves=["accumulate=0", "passes=", "prefetch= and overlap="],
        fix="passes=fs.passes.default(",
    ):
        fs.StepOptions(passes=fs.passes.default(), overlap=2, accumulate=0)


def test_programs_name_lines_of_code_where_they_are_asked_for() -> None:
    def named(**options: Any) -> bool:
        step = fs.shard_step(loss, SPECS, mesh=fs.make_mesh(shard=1, abstract=True), **options)
        nodes = step.lower(PARAMS, torch.ones(3)).program.graph.nodes
        return any(__file__ in str(node.meta.get("stack_trace")) for node in nodes)

    assert named(sources=True) and not named()
