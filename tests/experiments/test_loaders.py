"""What every loader keeps: one global batch on any mesh, exact resume, other data refused."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_data import equal, joined, stream

from experiments.data.loader import DRAWN, SampleLoader
from experiments.data.permutation import Permutation
from experiments.data.stdlib_text import ByteStream
from experiments.data.windows import WindowLoader


@pytest.fixture(scope="module")
def loaders(samples, numbered):
    """How each kind is made, of eight rows."""
    kinds = {
        "bytes": lambda **how: WindowLoader(ByteStream(stream()), context=16, **how),
        "shards": lambda **how: WindowLoader(numbered(211, 4), context=5, **how),
        "packed": lambda **how: SampleLoader(samples(), **how),
        "rows": lambda **how: SampleLoader(samples(), pack=False, **how),
        "pairs": lambda **how: SampleLoader(samples("pairs"), **how),
    }
    return {kind: lambda kind=kind, **how: kinds[kind](**{"rows": 8, **how}) for kind in kinds}


KINDS = ["bytes", "shards", "packed", "rows", "pairs"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), step=st.integers(0, 40), ranks=st.sampled_from([1, 2, 4, 8]))
def test_any_mesh_goes_on_at_any_step_with_the_same_global_batches(loaders, kind, step, ranks):
    one = loaders[kind](seed=5)
    for _ in range(step):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    parts = [loaders[kind](seed=5, rank=r, ranks=ranks) for r in range(ranks)]
    for part in parts:
        next(part)  # what it did before is forgotten
        part.load_state_dict(state)
        assert part.state_dict() == state and part.step == step
    for _ in range(3):
        assert equal(joined([next(part) for part in parts]), next(one))
    assert all(part.state_dict() == one.state_dict() for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_costs_the_same_at_any_step(loaders, kind, monkeypatch):
    """Places of the order that are computed, and calls of Python, of the first batch behind a resume."""

    def cost(step):
        loader = loaders[kind](seed=5)
        if hasattr(loader, "ahead"):
            loader.ahead = 0  # else a thread works, too
        state = loader.state_dict()
        moved = {"step": step} | ({"drawn": 8 * step} if "drawn" in state else {})
        computed, calls = [], 0
        monkeypatch.setattr(
            Permutation, "__call__", lambda self, at: computed.append(len(at)) or permuted(self, at)
        )

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        loader.load_state_dict(state | moved)
        sys.setprofile(count)
        try:
            next(loader)
        finally:
            sys.setprofile(None)
        assert loader.step == step + 1
        return sum(computed), calls

    permuted = Permutation.__call__
    cost(1)
    near, far = cost(8), cost(10**9)
    assert far[0] <= near[0] + DRAWN and far[1] <= 2 * near[1] + 100


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_step_alone_decide(loaders, kind):
    first, again, other = (loaders[kind](seed=seed) for seed in (1, 1, 2))
    batches = [next(first), next(first)]
    assert not equal(*batches) and not equal(batches[0], next(other))
    assert equal([next(again), next(again)], batches)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_another_loader_is_refused(loaders, kind):
    loader = loaders[kind](seed=5)
    next(loader)
    state = loader.state_dict()
    other = loaders[kind](seed=6, rows=4)
    with pytest.raises(ValueError, match=r"drew other batches \(.*seed: saved 5, here 6"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"drew other batches \(.*rows: saved 8, here 4"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="a loader's state has the keys"):
        loader.load_state_dict({"step": 1})
    assert other.step == 0 and loader.state_dict() == state
    for rows in (0, 8):
        with pytest.raises(ValueError, match=f"{rows} rows do not divide over 3 ranks"):
            loaders[kind](rows=rows, ranks=3)


def test_other_data_is_refused(samples, numbered):
    loader = SampleLoader(samples(), rows=8, seed=5)
    next(loader)
    state = loader.state_dict()
    for other, message in [
        (SampleLoader(samples(), rows=8, seed=5, pack=False), r"\(pack: saved True, here False\)"),
        (SampleLoader(samples(context=64), rows=8, seed=5), r"context: saved 50, here 64"),
        (
            SampleLoader(samples(count=66), rows=8, seed=5),
            r"\(data: its files, the tokenizer, or how .* begin anew with run\.resume=never\.$",
        ),
        (SampleLoader(samples("pairs"), rows=8, seed=5), r"data: its files, the tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert other.step == 0
    for rows in ([[67]], [[-1]], [[]], [[0] * 20], [[0]] * 33):
        with pytest.raises(ValueError, match="open rows are none of this data's"):
            loader.load_state_dict(state | {"open": rows})
    assert loader.state_dict() == state
    state = WindowLoader(numbered(211, 4), 6, 5).state_dict()
    for other, message in (
        (WindowLoader(numbered(212, 4), 6, 5), "data: its files"),
        (WindowLoader(numbered(211, 4), 6, 4), "context: saved 5, here 4"),
    ):
        with pytest.raises(ValueError, match=f"drew other batches .{message}"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="211 tokens are too few: a window takes 301"):
        WindowLoader(numbered(211, 4), 6, 300)
    with pytest.raises(ValueError, match="rank 4 of 4: expected 0 to 3"):
        SampleLoader(samples("pairs"), rows=4, rank=4, ranks=4)
