"""What loaders keep: one global batch on any mesh, exact resume, every row once an epoch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_data import equal, joined, stream

import fnshard as fs
from experiments.data.batches import Samples
from experiments.data.loader import Loader, place_of
from experiments.data.permutation import Permutation
from experiments.data.stdlib_text import ByteStream
from experiments.data.windows import Windows
from fnshard.mesh import simulated_rank

KINDS = ["bytes", "shards", "packed", "rows", "pairs"]


@pytest.fixture(scope="module")
def loaders(samples, numbered):
    """How each kind is made, of eight rows."""
    kinds = {
        "bytes": Windows(ByteStream(stream()), context=16),
        "shards": Windows(numbered(211, 4), context=5),
        "packed": Samples(samples()),
        "rows": Samples(samples(), pack=False),
        "pairs": Samples(samples("pairs")),
    }
    return {
        kind: lambda source=source, **how: Loader(source, **{"rows": 8, **how})
        for kind, source in kinds.items()
    }


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
def test_a_far_step_computes_its_own_places_alone(loaders, kind, monkeypatch):
    loader, computed = loaders[kind](seed=5), []
    permuted = Permutation.__call__
    monkeypatch.setattr(
        Permutation, "__call__", lambda self, at: computed.append(len(at)) or permuted(self, at)
    )
    loader.load_state_dict(loader.state_dict() | {"step": 10**9})
    next(loader)
    assert sum(computed) == 8 and loader.step == 10**9 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_once_an_epoch_in_an_order_of_its_own(loaders, kind, monkeypatch):
    loader, drawn = loaders[kind](seed=1), []
    source = loader.source
    monkeypatch.setattr(type(source), "batch", lambda self, numbers: drawn.extend(numbers.tolist()))
    for _ in range(-(-3 * source.count // 8)):
        next(loader)
    epochs = [drawn[i * source.count : (i + 1) * source.count] for i in range(3)]
    assert all(sorted(epoch) == list(range(source.count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    drawn.clear()
    next(loaders[kind](seed=2))
    assert drawn != epochs[0][:8]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_another_loader_is_refused(loaders, kind):
    loader = loaders[kind](seed=5)
    next(loader)
    state = loader.state_dict()
    other = loaders[kind](seed=6, rows=4)
    with pytest.raises(
        ValueError, match=r"drew other batches \(.*seed: saved 5, here 6; rows: saved 8, here 4"
    ):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="a loader's state has the keys"):
        loader.load_state_dict({"step": 1})
    assert other.step == 0 and loader.state_dict() == state
    for rows in (0, 8):
        with pytest.raises(ValueError, match=f"{rows} rows do not divide over 3 ranks"):
            loaders[kind](rows=rows, ranks=3)


def test_other_data_is_refused(samples, numbered):
    state = Loader(Samples(samples()), rows=8).state_dict()
    for other, message in [
        (Samples(samples(), pack=False), r"\(pack: saved True, here False\)"),
        (Samples(samples(context=64)), r"context: saved 50, here 64"),
        (
            Samples(samples(count=66)),
            r"\(data: its files, the tokenizer, or how .* begin anew with run\.resume=n",
        ),
        (Samples(samples("pairs")), r"data: its files, the tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            Loader(other, rows=8).load_state_dict(state)
    state = Loader(Windows(numbered(211, 4), 5), rows=8).state_dict()
    with pytest.raises(ValueError, match=r"drew other batches \(data: its files"):
        Loader(Windows(numbered(212, 4), 5), rows=8).load_state_dict(state)
    with pytest.raises(ValueError, match="211 tokens are too few: a window takes 301"):
        Windows(numbered(211, 4), 300)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(20, 400), st.integers(1, 9), st.integers(1, 12))
def test_windows_are_every_token_but_the_first_as_a_target(numbered, tokens, parts, context):
    windows = Windows(numbered(tokens, parts), context)
    inputs, targets = windows.batch(np.arange(windows.count))
    assert inputs.flatten().tolist() == list(range(windows.count * context))
    assert targets.flatten().tolist() == list(range(1, windows.count * context + 1))
    assert tokens - windows.count * context <= context


def test_ranks_along_other_axes_read_the_same():
    mesh = fs.make_mesh(data=2, tensor=3, data_axes="data", simulated=True)
    places = []
    for rank in range(6):
        with simulated_rank(rank):
            places.append(place_of(mesh))
    assert places == [{"rank": rank, "ranks": 2} for rank in (0, 0, 0, 1, 1, 1)]
