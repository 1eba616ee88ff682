"""Training with every pair of features, meshes and presets, against `reference.py`: one matrix."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from models import Model
from models import model_of as model_named
from sharded import as_float, assert_floats, assert_same, by_steps, make_step, specs_of, train
from tensor_models import decoder, logits
from tensor_models import loss as decoder_loss
from torch import Tensor

import fnshard as fs

CLIP = 0.05
HOST = {"memory": "host", "optimizer_memory": "host"}


def masked_mean() -> Model:
    """Make the loss as a Mean over tokens that are not 0, of which ranks have different numbers."""

    def loss(params: Any, tokens: Tensor) -> fs.Mean:
        mask = tokens[:, 1:] != 0
        scores = logits(params, tokens)[:, :-1]
        each = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return fs.Mean((each * mask.flatten()).sum(), mask.sum())

    return replace(decoder(), loss=loss)


def packed() -> Model:
    """Make a model on rows of several documents (token 0 ends one), whose attention does not cross."""

    def loss(params: Any, tokens: Tensor) -> Tensor:
        attend, document = F.scaled_dot_product_attention, (tokens == 0).cumsum(1)
        seen = (document.unsqueeze(1) == document.unsqueeze(2)).tril().unsqueeze(1)  # [B, 1, T, T]

        def masked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
            return attend(q, k, v, attn_mask=seen, enable_gqa=enable_gqa)

        F.scaled_dot_product_attention = masked
        try:
            return decoder_loss(params, tokens)
        finally:
            F.scaled_dot_product_attention = attend

    return replace(decoder(), loss=loss)


def lora() -> Model:
    """Make adapters next to frozen matrices, B not zero."""
    model = decoder()
    loss, params = fs.lora(model.loss, model.params, rank=2, targets="*.q_proj|*.down_proj|*.up_proj")
    named, structure = fs.tree.flatten_with_paths(params)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path in [p for p in named if p.endswith(".b")]:
            named[path].normal_(std=0.2, generator=draw)
    flat = lambda p, *batch: loss(fs.tree.unflatten(list(p.values()), structure), *batch)  # noqa: E731
    return Model(named, flat, model.batch, tuple(p for p in named if p.startswith("base.")))


MODELS = {
    "tied": decoder,
    "untied": lambda: decoder(tied=False),
    "one key head": lambda: decoder(kv_heads=1),
    "uneven vocabulary": lambda: decoder(vocab=19),
    "fused": lambda: decoder(fused=True),
    "masked mean": masked_mean,
    "packed": packed,
    "lora": lora,
    "complex": lambda: model_named("complex_leaves"),
}
RATE = fs.schedules.warmup_cosine(0.1, warmup=2, total=5)


def by_path(path: str) -> dict[str, float]:
    """Return the settings of a leaf's group."""
    return {
        "lr": 0.0 if path.startswith("layers.0.") else 0.01,
        "weight_decay": 0.0 if "norm" in path else 0.1,
    }


RULES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {  # ours, torch's, how the reference trains
    "adamw": (fs.optim.adamw(1e-2, weight_decay=0.1), reference.adamw(1e-2), {}),
    "momentum": (fs.optim.sgd(0.05, momentum=0.9), reference.sgd(0.05, 0.9), {}),
    "clipped": (fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), fs.optim.sgd(0.1)),
                reference.sgd(0.1), {"clip": CLIP}),
    "scheduled": (fs.optim.sgd(RATE), reference.sgd(0.1), {"rate": lambda n: RATE(torch.tensor(n)).item()}),
    "by path": (
        fs.optim.adamw(0.01, weight_decay=[("*norm*", 0.0), ("*", 0.1)],
                       lr_scale=[("layers.0.*", 0.0), ("*", 1.0)]),
        reference.group_leaves(torch.optim.AdamW, by_path), {}),
}  # fmt: skip
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "axes": ({"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"tensor": 2},
             {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2, "shard": 1}, {"shard": 1, "tensor": 4},
             {"context": 3}, {"context": 4}, {"shard": 2, "context": 2},
             {"shard": 2, "tensor": 2, "context": 2}),
    "preset": ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard"),
    "model": tuple(MODELS),
    "optimizer": tuple(RULES),
    "remat": ("none", "unit", 0.5, "offload", "unit+offload"),
    "policy": ({}, HOST, {"optimizer_memory": "host", "update_on": "device"}, {"compute_dtype": "bfloat16"}),
    "accumulate": ((1, "reduce"), (2, "reduce"), (2, "local"), (2, "breadth"), (4, "breadth")),
    "depth": ((0, 0), (1, 1), (2, 2)),  # prefetch, overlap
    "residual": ("split", "whole"),
    "loss_scale": (None, 128.0),
    "grad_norm": (False, True),
    "attention": ("auto", "gather", "ring"),  # over a context axis; "auto" is "ulysses" where it can be
}  # fmt: skip
Row = dict[str, Any]


def valid(row: Row) -> bool:
    """Return whether a row can be run: the batch has four rows (twelve of three ranks), which ranks cut."""
    axes = row["axes"]
    data = axes.get("shard", 1) * axes.get("replicate", 1)
    return (
        (row["preset"] == "hybrid_shard") == ("replicate" in axes)
        and data * row["accumulate"][0] in (1, 2, 3, 4)
        and (row["residual"] == "split" or "tensor" in axes)
        and (row["attention"] == "auto" or "context" in axes)
        and (
            row["model"] != "complex"
            or not ({"tensor", "context"} & axes.keys() or "compute_dtype" in row["policy"])
        )
        and (data != 3 or row["accumulate"][0] == 1)
        and (row["optimizer"] != "by path" or row["model"] not in ("complex", "lora"))  # of other names
    )


ACTS: Mapping[Any, tuple[str, ...]] = {  # what values do to other factors, where that is not themselves
    **dict.fromkeys(("none", "tied", "untied", "one key head", "uneven vocabulary", "fused", "packed"), ()),
    "unit": ("recompute",), 0.5: ("recompute",), "unit+offload": ("recompute", "offload"),
    "adamw": ("slots",), "by path": ("slots",), "momentum": ("slots",), None: (), False: (), (0, 0): (),
    (1, 1): ("early",), (2, 2): ("early",), (1, "reduce"): (), "auto": (), "split": (),
}  # fmt: skip

INNER, OUTER = ("residual", "attention"), ("preset", "optimizer", "loss_scale", "grad_norm")
# Exchanges within a product, and what is of a whole step; test_numerics has the last.
APART = [*({one, other} for one in INNER for other in OUTER), {"preset", "model"}]


def every_pair(row: Row) -> Iterator[Any]:
    """Yield every pair of values."""
    return itertools.combinations(((name, str(value)) for name, value in row.items()), 2)


def acting_pairs(row: Row) -> Iterator[Any]:
    """Yield pairs of all that values do to one another, each model on each axis, and every value once."""
    axes = [axis for axis, size in row["axes"].items() if size > 1]
    policy = [str(row["policy"])] if row["policy"] else []
    acts = {n: ACTS.get(v, (v,)) for n, v in row.items() if n not in ("axes", "policy")}
    acts |= {"axes": axes, "policy": policy}
    for one, other in itertools.combinations(acts.items(), 2):
        if {one[0], other[0]} in APART:
            continue
        yield from itertools.product(((one[0], act) for act in one[1]), ((other[0], act) for act in other[1]))
    yield from itertools.product([row["model"]], axes)
    yield from ((name, str(value)) for name, value in row.items())


def every_value(row: Row) -> Iterator[Any]:
    """Yield each axis and each value of every other factor, alone."""
    yield from (axis for axis, size in row["axes"].items() if size > 1)
    yield from ((name, str(value)) for name, value in row.items() if name != "axes")


def draw_rows(seed: int, number: int = 2000) -> list[Row]:
    draw, rows = random.Random(seed), []
    while len(rows) < number:
        row = {name: draw.choice(values) for name, values in FACTORS.items()}
        if valid(row):
            rows.append(row)
    return rows


def covering(of: Callable[[Row], Iterator[Any]], rows: Sequence[Row]) -> Iterator[Row]:
    """Yield few of the rows, of few ranks, that together have all of `of` that the rows have, by greed."""
    bits: dict[Any, int] = {}
    pool = [(sum({1 << bits.setdefault(each, len(bits)) for each in of(row)}), row) for row in rows]
    missing = (1 << len(bits)) - 1
    while missing:
        value = lambda p: (p[0] & missing).bit_count() / (6 + math.prod(p[1]["axes"].values()))  # noqa: B023, E731
        got, row = max(pool, key=value)
        missing &= ~got
        yield row


def text(row: Row) -> str:
    """Return the name of a test."""
    return "-".join(str(value).replace(" ", "") for value in row.values())


ROWS = list(covering(acting_pairs, draw_rows(6)))
FEW = list(covering(every_value, ROWS))


@cache
def model_of_row(name: str, three: bool) -> Model:
    """Make the model of a row; with `three` it has rows that three ranks divide."""
    model = MODELS[name]()
    if not three or name == "complex":  # which has twelve
        return model
    return replace(model, batch=lambda seed: tuple(torch.cat([v, v[:2]]) for v in model.batch(seed)))


@cache
def truth(name: str, optimizer: str, three: bool) -> reference.Trained:
    model, (_, rule, how) = model_of_row(name, three), RULES[optimizer]
    return reference.train(model.loss, model.params, by_steps(model), rule, frozen=model.frozen, **how)


@cache
def narrow_truth(name: str, optimizer: str, three: bool) -> reference.Trained:
    """Train on one rank, in bfloat16; other meshes are near to that."""
    mesh, model = fs.make_mesh(shard=1, simulated=True), as_float(model_of_row(name, three))
    specs = specs_of(model, "full_shard", mesh, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = make_step(mesh, model, specs, RULES[optimizer][0])
    return fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, None, step=step))[0]


def make_row(row: Row, mesh: fs.Mesh) -> tuple[Model, Any, Any]:
    """Make the model, specs and step of a row."""
    model, policy = model_of_row(row["model"], row["axes"].get("shard") == 3), dict(row["policy"])
    if "compute_dtype" in policy:
        model = as_float(model)
        policy |= {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if "tensor" in row["axes"]:
        policy["tensor"] = "tensor"
    specs = specs_of(model, row["preset"], mesh, **policy)
    accumulate, mode = row["accumulate"]
    options = {
        "remat": row["remat"], "accumulate": accumulate, "prefetch": row["depth"][0],
        **({"micro_order": mode} if mode == "breadth" else {"accumulate_mode": mode}),
        "overlap": row["depth"][1], "residual": row["residual"], "loss_scale": row["loss_scale"],
        "grad_norm": row["grad_norm"], "context_attention": row["attention"],
    }  # fmt: skip
    return model, specs, make_step(mesh, model, specs, RULES[row["optimizer"]][0], **options)


def assert_moved_alike(got: reference.Trained, expected: reference.Trained, row: Row) -> None:
    """Assert that training ends near to where it should, by the way gone: of all leaves, and of each.

    A leaf that is not updated is a whole way off, so that its share is 1. Of adamw, whose first steps are
    signs of gradients, rounding turns too many for leaves alone.
    """
    is_adamw = row["optimizer"] in ("adamw", "by path")
    model = as_float(model_of_row(row["model"], row["axes"].get("shard") == 3))
    start = {path: leaf for path, leaf in model.params.items() if leaf.is_floating_point()}

    def measure_distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], paths: list[str]) -> float:
        return math.sqrt(sum((one[p] - other[p]).double().square().sum().item() for p in paths))

    parts = [(0.2 if is_adamw else 0.03, list(start))]
    if not is_adamw:
        parts += [(0.5, [path]) for path in start]
    for share, paths in parts:
        way = measure_distance(expected.params, start, paths)
        assert measure_distance(got.params, expected.params, paths) <= share * way, paths


def compare(row: Row, ranks: list[reference.Trained]) -> None:
    key = row["model"], row["optimizer"], row["axes"].get("shard") == 3
    narrow = "compute_dtype" in row["policy"]
    expected, atol = (narrow_truth(*key), 3e-2) if narrow else (truth(*key), 1e-10)
    for got in ranks:
        assert_floats(got.losses, expected.losses, atol)
        if narrow:
            assert_moved_alike(got, expected, row)
        else:
            assert_same(got, expected, atol)
        if row["optimizer"] == "clipped" or (row["grad_norm"] and not narrow):
            assert_floats(got.norms, expected.norms, atol)
        if row["optimizer"] == "clipped":
            assert min(expected.norms) > CLIP, "the row would not clip"


def check(row: Row) -> None:
    mesh = fs.make_mesh(**row["axes"], simulated=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sizes that an axis does not divide stay whole
        model, specs, step = make_row(row, mesh)
        compare(row, fs.simulate(mesh, lambda rank: train(rank, mesh, model, specs, None, step=step)))


@pytest.mark.suite(but={
    "{'tensor':2}-zero2-*": "no_shard has this axis, adapters are in tests/adapters",
    "{'context':3}-*": "test_gloo and test_context_attention have this axis",
    "{'shard':2,'context':2}-*": "as these",
    "*-unevenvocabulary-*": "untied has these axes",
})  # fmt: skip
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=text(row), marks=[pytest.mark.long] * (row not in FEW)) for row in ROWS]
)
def test_features_that_meet_train_as_one_process_does(row: Row) -> None:
    """Most values of every factor in the suite; every two that act on one another over all rows."""
    check(row)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 5])
def test_every_pair_of_values(seed: int) -> None:
    for row in covering(every_pair, draw_rows(seed)):
        check(row)


def on_rank(rank: int, row: Row) -> reference.Trained:
    mesh = fs.make_mesh(**row["axes"], device="cpu")
    model, specs, step = make_row(row, mesh)
    return train(rank, mesh, model, specs, None, step=step)


def on_processes(row: Row) -> bool:
    return fs.make_mesh(**row["axes"], abstract=True).size in (2, 4)


OF_AXES = {
    axis: row
    for axis in ("context", "tensor")
    for row in sorted(filter(on_processes, FEW), key=lambda row: -math.prod(row["axes"].values()))
    if axis in row["axes"]
}


@pytest.mark.suite({"tensor": "exchanges of both passes; `test_gloo` has a ring over a context axis"})
@pytest.mark.parametrize("axis", OF_AXES)
def test_processes_train_as_one_process_does(ranks: Any, axis: str) -> None:
    row = OF_AXES[axis]
    world = fs.make_mesh(**row["axes"], abstract=True).size
    compare(row, ranks(world).run(on_rank, row))
