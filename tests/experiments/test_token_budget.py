"""Token budgets: micro-batches of so many positions, of samples, pairs and rewarded answers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import raises
from runs import DOUBLE, compose, rows_of, timeless
from tuning import SMALL, assert_same_on_every_mesh, config_of, tune_on_rank, tune_until

import fnshard as fs
from experiments import finetune
from experiments.lib.checks import ConfigError
from experiments.tuning import dataset
from experiments.tuning.budget import find_most_tokens
from experiments.tuning.lm import from_directory
from experiments.tuning.method import make_tuning
from experiments.tuning.rewarded import RewardedData

REWARDED = ("objective.group=4", "objective.tokens=3", "optimizer.lr=0.02")


def parts_of(config: Any) -> tuple[Any, Any, Any]:
    """Return the tuning of a configuration, parameters whose adapters do something, and its data."""
    mesh, lm = fs.make_mesh(shard=1, device="cpu"), from_directory(config.model)
    tuning = make_tuning(config, lm)
    base = fs.hf.load(config.model, fs.presets.full_shard(lm.params, mesh), mesh, model=lm.model)
    adapters = fs.tree.map(lambda v: torch.full_like(v, 0.03), tuning.params["adapters"])
    return tuning, {"base": base, "adapters": adapters}, dataset.open_data(config)


# ------------------------------------------------------------------ losses


@pytest.mark.suite({
    "dpo": "with a reference",
    "simpo": "without",
})  # fmt: skip
@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_packed_pairs_have_the_loss_of_padded_ones(model, data, tmp_path, name):
    config = config_of(model, data, tmp_path, "method=lora", f"objective={name}", "data.tokens=96")
    tuning, params, given = parts_of(config)
    loss_fn = finetune.OBJECTIVES[name](tuning, config.objective, training=False)
    padded, rows = dataset.Samples(given.train), given.rows
    assert rows.packed and rows.count < padded.count / 2
    (batch,) = rows.batch(np.append(np.arange(rows.count), -1))  # the last is a row of padding
    loss, aux = loss_fn(params, batch)
    expected, more = loss_fn(params, padded.batch(np.arange(padded.count))[0])
    assert float(loss.count) == float(expected.count) == padded.count
    assert float(loss.total) == pytest.approx(float(expected.total), rel=1e-5)
    assert aux.keys() == more.keys()
    for each, mean in aux.items():
        assert float(mean.total) == pytest.approx(float(more[each].total), rel=1e-4, abs=1e-5)


@pytest.mark.suite({
    "gspo": "a loss by rows",
    "grpo": "a loss by tokens",
})  # fmt: skip
@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "dapo"])
def test_packed_answers_have_the_loss_of_padded_ones(model, data, tmp_path, name):
    config = config_of(model, data, tmp_path, f"objective={name}", "data.tokens=64", *REWARDED)
    tuning, params, given = parts_of(config)
    answers = RewardedData(config, given, 1, 8, torch.device("cpu"))
    draw = torch.Generator().manual_seed(4)
    shape = (answers.answers, answers.width)
    lengths = torch.randint(5, shape[1] + 1, shape[:1], generator=draw)
    real = torch.arange(shape[1]) < lengths[:, None]
    tokens = torch.where(real, torch.randint(3, 250, shape, generator=draw), 0)
    learned = real & (torch.arange(shape[1]) >= 3)
    batch = {
        "tokens": tokens, "targets": torch.where(learned, tokens.roll(-1, 1), -100),
        "sampler": -torch.rand(shape, generator=draw) * 9, "entropy": torch.rand(shape, generator=draw),
        "advantages": torch.randn(shape[0], 1, generator=draw),
        "rewards": torch.rand(shape[0], generator=draw),
        "each": {"reward_x": torch.rand(shape[0], generator=draw)},
    }  # fmt: skip
    loss_fn = finetune.OBJECTIVES[name](tuning, config.objective, training=False)
    expected, more = loss_fn(params, batch)
    rows = [*answers.rows_of(lengths.tolist()), []]
    assert len(rows) < len(tokens) / 2
    loss, aux = loss_fn(params, answers.pack_answers(batch, lengths.tolist(), rows))
    means = {"": (loss, expected), **{each: (aux[each], more[each]) for each in more}}
    for each, (mine, theirs) in means.items():
        assert float(mine.count) == float(theirs.count), each
        assert float(mine.total) == pytest.approx(float(theirs.total), rel=1e-4, abs=1e-5), each


# ------------------------------------------------------------------ runs


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ("sft", ("data.tokens=64", "data.rows=4")),
        ("dpo", ("data.tokens=64", "data.rows=2")),
        ("grpo", ("data.tokens=32", *REWARDED)),
    ],
)
def test_it_resumes_bit_for_bit_and_is_the_same_on_every_mesh(ranks, model, data, tmp_path, objective, more):
    config = config_of(model, data, tmp_path, f"objective={objective}", "export=none", "run.steps=4",
                       "run.sample_tokens=0", "run.held_out_every=4", *more, *DOUBLE)  # fmt: skip
    config = replace(config, objective=replace(config.objective, reward={"name": "length", "most": 1}))
    one = assert_same_on_every_mesh(config, tmp_path, ranks)
    assert len([row for row in timeless(one) if "loss" in row]) == 4


@pytest.mark.long  # test_it_resumes runs such a step
def test_a_step_has_as_many_micro_batches_as_its_rows(model, data, tmp_path):
    config = config_of(model, data, tmp_path, "data.tokens=64", "data.rows=6")
    parts = finetune.build(config)
    lowered = parts.step.lower(parts.planned.tuning.params, parts.batch)
    assert lowered.options.accumulate == 6 and parts.batch["tokens"].shape == (6, 64)
    assert parts.tokens == 6 * 64
    # Samples that are not packed: as many rows as the budget holds.
    padded = finetune.build(
        config_of(model, data, tmp_path, "data.tokens=128", "data.rows=2", "data.pack=false")
    )
    assert padded.batch["tokens"].shape == (2 * 4, 32) and "documents" not in padded.batch
    assert padded.step.lower(padded.planned.tuning.params, padded.batch).options.accumulate == 2


def test_a_row_has_no_more_documents_than_attention_takes():
    lengths = np.full(1000, 3)
    rows = dataset.pack(lengths, context=4096)
    assert max(map(len, rows)) == dataset.DOCUMENTS and sorted(n for row in rows for n in row) == list(
        range(1000)
    )


# ------------------------------------------------------------------ what fits


@pytest.mark.long
def test_the_most_tokens_that_fit_are_asked_of_the_ledger(model, data, tmp_path):
    """A budget of what 128 tokens take, and a hair more, is found to hold 128."""
    config = config_of(model, data, tmp_path, "data.tokens=128", "data.rows=2")
    named = finetune.build(config)
    peak = named.step.lower(named.planned.tuning.params, named.batch).memory_analysis().peak_bytes
    auto = replace(
        config,
        data=replace(config.data, tokens="auto"),
        run=replace(config.run, device_gb=peak * 1.0001 / 1e9),
    )
    assert finetune.build(auto).config.data.tokens == 128


@pytest.mark.long
def test_a_run_goes_on_with_the_tokens_that_it_began_with(model, data, tmp_path):
    """It goes on on a machine with more memory; one with less is refused."""
    config = config_of(model, data, tmp_path, "data.tokens=auto", "run.device_gb=1", "data.rows=2",
                       "run.steps=4", "run.sample_tokens=0", "export=none")  # fmt: skip
    with_gb = lambda gb: replace(config, run=replace(config.run, device_gb=gb))  # noqa: E731
    named = replace(config, data=replace(config.data, tokens=64), run=replace(config.run, device_gb=None))
    least = finetune.build(named)
    peak = least.step.lower(least.planned.tuning.params, least.batch).memory_analysis().peak_bytes / 1e9
    tune_until(with_gb(1.0001 * peak), tmp_path / "run", 3)
    with raises(
        ConfigError,
        leaves=["data.tokens=auto", "data.tokens=64"],
        fix=["more ranks", "run.device_gb", "run.resume=never"],
    ):
        tune_on_rank(0, with_gb(0.9 * peak), tmp_path / "run")
    tune_on_rank(0, with_gb(10 * peak), tmp_path / "run")
    assert "tokens: 64\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert rows_of(tmp_path / "run")[-1]["step"] == 4


def test_a_search_ends_where_the_line_bends():
    bent = lambda tokens: 1000 + 10 * tokens + max(0, tokens - 500) * 5  # noqa: E731
    assert find_most_tokens(bent, 9000, least=20, most=10_000) == max(
        t for t in range(32, 999, 32) if bent(t) <= 9000
    )
    assert find_most_tokens(bent, 9e9, least=20, most=1000) == 992  # all data fit
    with raises(ConfigError, leaves="data.tokens=auto", fix="strategy.remat", says="20 positions"):
        find_most_tokens(bent, 900, least=20, most=1000)


# ------------------------------------------------------------------ what is refused


def write(path: Path, *records: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("objective", "record", "said"),
    [
        ("sft", {"prompt": "a" * 30, "response": "b" * 5}, r"takes 36 positions"),
        ("dpo", {"prompt": "a" * 12, "chosen": "b" * 4, "rejected": "c" * 5}, r"takes 35 positions"),
        ("grpo", {"prompt": "a" * 30, "response": "b"}, r"takes 33 positions with an answer of 3"),
    ],
)
def test_a_record_above_the_budget_is_named_by_file_and_line(model, data, tmp_path, objective, record, said):
    small = {name: "x" + name for name in record}
    path = write(tmp_path / "mine.jsonl", small, small, record)
    mine, how = {"samples": path, "pairs": path}, (f"objective={objective}", "objective.tokens=3")
    config_of(model, mine, tmp_path, "data.tokens=64", *how)  # all of them fit
    with pytest.raises(ConfigError) as error:
        config_of(model, mine, tmp_path, "data.tokens=32", *how)
    assert re.search(rf"mine\.jsonl:3: {said}, the budget of data\.tokens is 32", str(error.value))
    assert "data.too_long=skip" in str(error.value) and "larger data.context or data.tokens" in str(
        error.value
    )
    config_of(model, mine, tmp_path, "data.tokens=32", "data.too_long=skip", *how)


@pytest.mark.parametrize(
    ("overrides", "leaves"),
    [
        (("data.tokens=1000",), ["data.tokens=1000", "32"]),
        (("data.tokens=64", "run.accumulate=2"), "run.accumulate=2"),
        (("data.tokens=64", "strategy=auto", "run.device_gb=1"), ["data.tokens=64", "strategy=auto"]),
        (("data.tokens=64", "run.device_gb=1"), ["run.device_gb=1", "strategy=auto"]),
        (("data.tokens=64", "objective=ppo"), ["data.tokens=64", "objective=ppo"]),
        (("data.tokens=64", "objective=dpo", "data.pack=false"), "data.pack=false"),
    ],
)
def test_what_a_budget_does_not_go_with(overrides, leaves):
    with raises(ConfigError, leaves=leaves):
        compose(*SMALL, *overrides, spec=finetune.COMMAND)


def test_without_a_budget_of_memory_auto_says_what_it_needs(model, data, tmp_path):
    config = config_of(model, data, tmp_path, "data.tokens=auto")
    with raises(ConfigError, leaves="data.tokens=auto", fix=["run.device_gb=4", "data.tokens=N"]):
        finetune.build(config)


def test_padding_is_less_than_that_of_fixed_rows(model, tmp_path):
    """Samples of very different lengths: a budget holds what rows of one sample each would pad."""
    draw = np.random.default_rng(0)
    sizes = np.minimum(4 + draw.geometric(0.12, 200), 44)
    path = write(tmp_path / "mine.jsonl", *({"prompt": "q", "response": "a" * int(n)} for n in sizes))
    config = config_of(model, {"samples": path}, tmp_path, "data.tokens=256")
    rows = dataset.open_data(config).rows
    real = rows.record_lengths.sum()
    fixed = dataset.Samples(rows.prepared, pack=False)
    assert 1 - real / (rows.count * rows.width) < 0.1 < 1 - real / (fixed.count * fixed.width)
