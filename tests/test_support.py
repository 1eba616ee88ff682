"""What tests share: pools of ranks, traces of optimizers, rows of matrices, and assertions of errors."""

from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import difference
from errors import raises
from rows import mark_other_rows_long

from fnshard.errors import LaunchError, SpecError, StateError, TraceError
from fnshard.optim import Optimizer, adamw, chain, clip_by_global_norm, ema, muon, schedules, sgd, soap


def give_back(rank: int, value: int) -> int:
    return value


def test_a_run_that_is_broken_off_leaves_no_answer_for_the_next(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test whose time is up is left by an exception, while its ranks go on."""
    pool = ranks(1)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_replies", lambda *_: pytest.fail("the time is up"))
        with pytest.raises(pytest.fail.Exception):
            pool.run(give_back, 1)
    assert pool.run(give_back, 2) == [2]


@pytest.mark.parametrize(
    ("got", "expected", "is_right"),
    [
        ([torch.inf, 1.0], [torch.inf, 1.0], True),
        ([1.0, 2.0], [torch.inf, 2.0], False),
        ([torch.inf, 2.0], [1.0, 2.0], False),
        ([torch.inf, 3.0], [torch.inf, 2.0], False),
        ([-torch.inf, 2.0], [torch.inf, 2.0], False),
        ([torch.nan, 2.0], [torch.nan, 2.0], False),  # which tells nothing
        ([1e6 + 1e-5, 2.0], [1e6, 2.0], True),
        ([1.0 + 1e-5, 2.0], [1.0, 2.0], False),
        ([], [], True),
    ],
)
def test_values_of_a_case_are_compared_as_they_are_large(
    got: list[float], expected: list[float], is_right: bool
) -> None:
    ours, theirs = ({"x": torch.tensor(v, dtype=torch.float64)} for v in (got, expected))
    assert (difference(ours, theirs) == "") is is_right


def make_all(lr: float) -> list[Optimizer]:
    """Return what a matrix has of optimizers of several kinds."""
    several = sgd(lr), adamw(lr), muon(lr), soap(lr), chain(clip_by_global_norm(lr), muon(lr), ema(lr))
    return [each.of("layers.w", (4, 4)) for each in several]


SIGN = 1.0


def make_own(factor: float) -> Optimizer:
    def update(path, grad, slots, param, step):
        return SIGN * factor * grad, {}

    return Optimizer("own()", lambda path, param: {}, update)


def test_equal_optimizers_share_their_traces_and_others_do_not() -> None:
    for one, equal, other in zip(make_all(0.125), make_all(0.125), make_all(0.25), strict=True):
        assert one.traces is equal.traces and one.traces is not other.traces
    rates = [schedules.warmup_cosine(0.1, 1, total) for total in (5, 5, 6)]
    first, second, third = (adamw(rate).traces for rate in rates)
    assert first is second and first is not third


def test_optimizers_of_other_values_of_a_global_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = make_own(2.0).traces, make_own(2.0).traces, make_own(3.0).traces
    monkeypatch.setattr(f"{__name__}.SIGN", -1.0)
    assert first is again and make_own(2.0).traces is not first and other is not first


def test_optimizers_share_nothing_under_another_default_dtype() -> None:
    first = sgd(0.125).traces
    torch.set_default_dtype(torch.float64)
    try:
        assert sgd(0.125).traces is not first
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------ rows of matrices


class Item:
    """A row of a function's matrix, as far as `mark_other_rows_long` looks at it."""

    def __init__(self, row: str, marker: pytest.Mark):
        self.nodeid, self.callspec, self.marker = f"file::test[{row}]", SimpleNamespace(id=row), marker
        self.long = False

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [self.marker] * (name == "suite")

    def add_marker(self, _: pytest.MarkDecorator) -> None:
        self.long = True


@pytest.mark.parametrize(
    ("marker", "kept"),
    [
        (pytest.mark.suite({"adamw-*": "slots", "sgd-[2]": "none"}), ["adamw-[1]", "adamw-[2]", "sgd-[2]"]),
        (pytest.mark.suite(but={"adamw-*": "sgd"}), ["sgd-[1]", "sgd-[2]"]),
    ],
    ids=["rows", "but"],
)
def test_rows_that_a_marker_leaves_out_are_long(marker: pytest.MarkDecorator, kept: list[str]) -> None:
    items = [Item(row, marker.mark) for row in ("adamw-[1]", "adamw-[2]", "sgd-[1]", "sgd-[2]")]
    mark_other_rows_long(items, is_whole=True)
    assert [item.callspec.id for item in items if not item.long] == kept


def test_a_row_that_is_not_there_is_an_error_where_all_are() -> None:
    items = [Item("sgd", pytest.mark.suite({"adamw": "slots"}).mark)]
    with pytest.raises(pytest.UsageError, match="adamw"):
        mark_other_rows_long(items, is_whole=True)
    mark_other_rows_long(items, is_whole=False)


# ------------------------------------------------------------------ assertions of errors

OWN = SpecError(
    "2 leaves are wrong:", ["params['w'] [3, 12]", "params['b'] [3]"], "transposed='w', or fs.merge."
)
TRAVELLED = LaunchError(f"rank 1 of 2 failed:\n  SpecError: {OWN}\nThe log is /tmp/1.log, of rank 1.")
PROBLEMS = ValueError(
    "2 problems:\n  run.steps=0: below 1. Fix: run.steps=1.\n  mesh.z: no key. Fix: mesh.shard."
)
LINE = linecache.getline(__file__, 1).strip()  # as an error quotes a line of the user's program
QUOTED = TraceError("`fn` fails in matmul:", [f"at {__file__}:1  {LINE}: f32[2]"], "x.mT.")
LONG = StateError("1 leaf is lacking:", ["'q'"], "names=NAMES finds it.\n     missing='skip' leaves it out.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OWN,
            {
                "leaves": ["params['w']", "params['b'] [3]"],
                "fix": ["transposed=", "fs.merge"],
                "says": "2 leaves",
            },
        ),
        (TRAVELLED, {"leaves": ["rank 1", "/tmp/1.log", "params['w']"], "fix": "transposed="}),
        (
            PROBLEMS,
            {"leaves": ["run.steps=0", "mesh.z"], "fix": ["run.steps=1", "mesh.shard"], "says": "below 1"},
        ),
        (LONG, {"leaves": "'q'", "fix": ["names=NAMES", "missing='skip'"]}),
        (QUOTED, {"leaves": ["matmul", "test_support.py:1", "f32[2]"], "fix": "x.mT"}),
        (KeyError("w"), {"leaves": "'w'"}),
    ],
    ids=["own", "travelled", "several", "long", "quoted", "plain"],
)
def test_an_error_is_asserted_by_its_leaves_and_ways_out(error: Exception, words: Any) -> None:
    with raises(type(error), **words) as caught:
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "words", "lack"),
    [
        (OWN, {"leaves": ["params['w']", "params['c']"]}, "leaves=[\"params['c']\"]"),
        (OWN, {"leaves": "transposed="}, "leaves=['transposed=']"),  # it is a way out
        (OWN, {"fix": "params['w']"}, "fix=[\"params['w']\"]"),  # it is a leaf
        (OWN, {"says": ["2 leaves", "2"], "fix": "merge.too"}, "fix=['merge.too']"),
        (OWN, {"says": "1"}, "says=['1']"),  # there is a 12
        (OWN, {"says": "eaves"}, "says=['eaves']"),
        (TRAVELLED, {"fix": "/tmp/1.log"}, "fix=['/tmp/1.log']"),
        (PROBLEMS, {"leaves": "mesh.shard", "fix": "mesh.z"}, "leaves=['mesh.shard'], fix=['mesh.z']"),
        (ValueError("w"), {"leaves": "w", "fix": "w"}, "fix=['w']"),
        (QUOTED, {"leaves": "pools of ranks"}, "leaves=['pools of ranks']"),
    ],
)
def test_what_an_error_lacks_is_named_beside_all_that_it_says(
    error: Exception, words: Any, lack: str
) -> None:
    with pytest.raises(pytest.fail.Exception) as failed, raises(type(error), **words):
        raise error
    assert f"{type(error).__name__} lacks {lack}. It is:\n{error}" in str(failed.value)


def test_no_error_and_one_of_another_kind_fail() -> None:
    with pytest.raises(pytest.fail.Exception), raises(ValueError, leaves="w"):
        pass
    with pytest.raises(TypeError), raises(KeyError, leaves="w"):
        raise TypeError("w")
