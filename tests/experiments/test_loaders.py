"""What loaders keep: one global batch on any mesh, exact resume, every row once an epoch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_data import CONTEXT, COUNT, equal, join_batches, stream

import fnshard as fs
from experiments.data import loader as loading
from experiments.data.loader import Loader, permute, place_of
from experiments.data.text import ByteStream, Windows
from experiments.data.tokenizer import ByteTokenizer
from experiments.tuning.dataset import Samples, fill_rows, pack, width_of
from fnshard.losses import IGNORE
from fnshard.mesh import simulated_rank

KINDS = ["bytes", "shards", "packed", "rows", "pairs"]


@pytest.fixture(scope="module")
def loaders(samples, numbered):
    """Return functions that make a loader of each kind, of eight rows."""
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
        assert equal(join_batches([next(part) for part in parts]), next(one))
    assert all(part.state_dict() == one.state_dict() for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_far_step_computes_its_own_places_alone(loaders, kind, monkeypatch):
    loader, computed = loaders[kind](seed=5), []
    monkeypatch.setattr(
        loading, "permute", lambda places, *of: computed.append(len(places)) or permute(places, *of)
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
    with raises(
        ValueError, leaves=["seed: saved 5, here 6", "rows: saved 8, here 4"], fix="run.resume=never"
    ):
        other.load_state_dict(state)
    with raises(ValueError, says=["keys", "step"]):
        loader.load_state_dict({"step": 1})
    assert other.step == 0 and loader.state_dict() == state
    for rows in (0, 8):
        with raises(ValueError, leaves=[f"{rows} rows", "3 ranks"]):
            loaders[kind](rows=rows, ranks=3)


def test_other_data_is_refused(samples, numbered):
    state = Loader(Samples(samples()), rows=8).state_dict()
    for other, leaves in [
        (Samples(samples(), pack=False), "pack: saved True, here False"),
        (Samples(samples(context=64)), "context: saved 50, here 64"),
        (
            Samples(samples(count=66)),
            ["data: its files", "tokenizer"],
        ),
        (Samples(samples("pairs")), ["data: its files", "tokenizer"]),
    ]:
        with raises(ValueError, leaves=leaves, fix="run.resume=never"):
            Loader(other, rows=8).load_state_dict(state)
    state = Loader(Windows(numbered(211, 4), 5), rows=8).state_dict()
    with raises(ValueError, leaves="data: its files", fix="run.resume=never"):
        Loader(Windows(numbered(212, 4), 5), rows=8).load_state_dict(state)
    with raises(ValueError, leaves="211 tokens", says="301"):
        Windows(numbered(211, 4), 300)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(20, 400), st.integers(1, 9), st.integers(1, 12))
def test_each_token_after_the_first_is_a_target_once(numbered, tokens, parts, context):
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


# ------------------------------------------------------------------ orders


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_an_epoch_s_order_is_a_permutation(count, seed, epoch):
    places = np.arange(count)
    values = permute(places, count, seed, epoch)
    assert np.array_equal(np.sort(values), places)


def test_orders_differ_by_seed_and_epoch_and_look_like_chance():
    orders = {tuple(permute(np.arange(60), 60, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    counts = np.zeros((6, 6))
    for seed in range(1500):
        counts[np.arange(6), permute(np.arange(6), 6, seed)] += 1
    assert abs(counts - 250).max() < 5 * 250**0.5  # 36 cells, five sigma
    values = permute(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(values, np.arange(100_000))[0, 1]) < 0.02


# ------------------------------------------------------------------ packing


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=200), st.integers(30, 64))
def test_packing_holds_each_sample_once_and_no_row_is_over(lengths, context):
    rows = pack(np.array(lengths, np.int64), context)
    assert sorted(s for row in rows for s in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[s] for s in row) <= context for row in rows)


@pytest.mark.parametrize(
    ("most", "context", "least"), [(100, 256, 0.99), (256, 256, 0.98), (700, 2048, 0.99), (2048, 2048, 0.98)]
)
def test_rows_are_well_filled(most, context, least):
    lengths = np.random.default_rng(1).integers(1, most + 1, size=4000)
    assert lengths.sum() / (context * len(pack(lengths, context))) > least


# ------------------------------------------------------------------ packed batches


def samples_in(batch):
    """Return the prompt number and the targets of every document in a batch."""
    found = []
    for tokens, targets, documents in zip(
        *(batch[n] for n in ("tokens", "targets", "documents")), strict=True
    ):
        for document in range(1, int(documents.max()) + 1):
            at = documents == document
            found.append((int(bytes(tokens[at][1:5].tolist())), tokens[at].tolist(), targets[at].tolist()))
    return found


def test_a_packed_batch_is_its_samples_and_nothing_leaks_between_them(samples):
    prepared = samples()
    tokenizer = ByteTokenizer()
    batch = fill_rows(prepared, [[3, 9], [], [5]], CONTEXT)
    assert list(batch) == ["tokens", "targets", "positions", "documents"]
    assert all(values.shape == (3, CONTEXT) for values in batch.values())
    assert all(values.dtype == torch.int64 for values in batch.values())
    end = 0
    for document, sample in enumerate((3, 9), 1):
        ids, learned = (a.tolist() for a in prepared.sample(sample))
        start, end = end, end + len(ids) - 1
        assert batch["tokens"][0, start:end].tolist() == ids[:-1]
        expected = [i if mask else IGNORE for i, mask in zip(ids[1:], learned[1:], strict=True)]
        assert batch["targets"][0, start:end].tolist() == expected
        assert batch["targets"][0, end - 1] == tokenizer.eos
        assert batch["targets"][0, start : start + 4].tolist() == [IGNORE] * 4  # begin and a prompt of 4
        assert batch["targets"][0, start + 4] == ord("r")
        assert batch["documents"][0, start:end].tolist() == [document] * (end - start)
        assert batch["positions"][0, start:end].tolist() == list(range(end - start))
    for row, begin in ((0, end), (1, 0)):
        assert (batch["targets"][row, begin:] == IGNORE).all()
        assert (batch["documents"][row, begin:] == 0).all()
        assert (batch["tokens"][row, begin:] == tokenizer.pad).all()
        assert batch["positions"][row, begin:].tolist() == list(range(CONTEXT - begin))


# ------------------------------------------------------------------ pairs, widths, and everything once


def test_pairs_are_two_rows_of_one_prompt(samples):
    prepared = samples("pairs")
    (batch,) = next(Loader(Samples(prepared), rows=8))
    chosen, rejected = batch["chosen"], batch["rejected"]
    assert chosen["tokens"].shape == rejected["targets"].shape == (8, width_of(prepared))
    assert torch.equal(chosen["tokens"][:, :5], rejected["tokens"][:, :5])
    for row in range(8):
        number = int(bytes(chosen["tokens"][row, 1:5].tolist()))
        for side, name in enumerate(("chosen", "rejected")):
            ids, _ = prepared.sample(2 * number + side)
            targets = batch[name]["targets"][row]
            assert targets[targets != IGNORE].tolist() == ids.tolist()[5:]
            assert batch[name]["tokens"][row, : len(ids) - 1].tolist() == ids.tolist()[:-1]


def test_padded_widths_hold_the_longest_and_stay_in_the_context(samples):
    assert samples().longest > 32 and width_of(samples()) == 50  # 64 would be over the context
    assert width_of(samples(context=64)) == 64 and width_of(samples(context=300)) == 64
    assert width_of(samples(longest=20, context=300)) == 32


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_once_is_every_sample_once_and_equally_many_batches(samples, ranks, packed):
    prepared = samples()
    rows = Samples(prepared, packed)
    parts = [list(rows.one_pass(8, most=10**6, rank=r, ranks=ranks)) for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    batches = [join_batches(list(batch)) for batch in zip(*parts, strict=True)]
    assert all(len(batch["tokens"]) == 8 and ("documents" in batch) == packed for batch in batches)
    assert sum(int((batch["targets"] != IGNORE).sum()) for batch in batches) == prepared.learned
    if packed:
        assert sorted(n for batch in batches for n, _, _ in samples_in(batch)) == list(range(COUNT))
    assert len(list(rows.one_pass(8, 9))) == 2 and len(list(rows.one_pass(8, 8))) == 1
