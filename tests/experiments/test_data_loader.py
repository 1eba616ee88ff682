"""Orders, packing, batches: one global batch on any mesh, exact resume at any step, every sample once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import CONTEXT, COUNT, joined

from experiments.data.batches import Samples, fill, pack, width_of
from experiments.data.loader import Loader
from experiments.data.permutation import Permutation, order
from experiments.data.tokenizer import byte_tokenizer
from fnshard.losses import IGNORE


def samples_in(batch):
    """The prompt number and the targets of every document in a batch."""
    found = []
    for tokens, targets, documents in zip(
        *(batch[n] for n in ("tokens", "targets", "documents")), strict=True
    ):
        for document in range(1, int(documents.max()) + 1):
            at = documents == document
            found.append((int(bytes(tokens[at][1:5].tolist())), tokens[at].tolist(), targets[at].tolist()))
    return found


# ------------------------------------------------------------------ orders


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_an_epoch_s_order_is_a_permutation(count, seed, epoch):
    places = np.arange(count)
    values = Permutation(count, seed, epoch)(places)
    assert np.array_equal(np.sort(values), places)


def test_orders_differ_by_seed_and_epoch_and_look_like_chance():
    orders = {tuple(Permutation(60, seed, epoch)(np.arange(60))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    counts = np.zeros((6, 6))
    for seed in range(1500):
        counts[np.arange(6), Permutation(6, seed)(np.arange(6))] += 1
    assert abs(counts - 250).max() < 5 * 250**0.5  # 36 cells, five sigma
    values = Permutation(100_000, 3)(np.arange(100_000))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(values, np.arange(100_000))[0, 1]) < 0.02


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 40), st.integers(0, 200), st.integers(0, 90), st.integers(0, 90))
def test_any_stretch_of_the_stream_is_a_stretch_of_the_whole(count, start, first, second):
    whole = order(count, 7, start, start + first + second)
    parts = order(count, 7, start, start + first), order(count, 7, start + first, start + first + second)
    assert np.array_equal(whole, np.concatenate(parts))
    epoch = order(count, 7, 3 * count, 4 * count)
    assert sorted(epoch.tolist()) == list(range(count))


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


def test_a_packed_batch_is_its_samples_and_nothing_leaks_between_them(samples):
    prepared = samples()
    tokenizer = byte_tokenizer()
    batch = fill(prepared, [[3, 9], [], [5]], CONTEXT)
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


# ------------------------------------------------------------------ pairs, and everything once


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
    parts = [list(rows.once(8, 10**6, rank=r, ranks=ranks)) for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    batches = [joined(list(batch)) for batch in zip(*parts, strict=True)]
    assert all(len(batch["tokens"]) == 8 and ("documents" in batch) == packed for batch in batches)
    assert sum(int((batch["targets"] != IGNORE).sum()) for batch in batches) == prepared.learned
    if packed:
        assert sorted(n for batch in batches for n, _, _ in samples_in(batch)) == list(range(COUNT))
    assert len(list(rows.once(8, 9))) == 2 and len(list(rows.once(8, 8))) == 1
