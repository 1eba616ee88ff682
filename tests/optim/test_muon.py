"""Muon and optimizers by path: torch's own, what is gathered, mistakes; layouts: `test_layouts`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import SHAPES, leaves
from torch import Tensor

import fnshard as fs
from fnshard.errors import OptimizerError
from fnshard.optim import StepInfo, adamw, by_path, muon, sgd
from fnshard.optim.muon import orthogonalized

DECAYED = adamw(0.1, weight_decay=[("b*", 0.0), ("*", 0.1)])  # of its own leaves the first has none


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs(scale, nesterov):
    mine = {path: leaf for path, leaf in leaves().items() if leaf.dim() < 3}
    theirs = {path: leaf.clone().requires_grad_() for path, leaf in mine.items()}
    matrices = [theirs[path] for path in ("a.weight", "b.weight")]
    both = [
        torch.optim.Muon(matrices, lr=0.05, momentum=0.8, nesterov=nesterov, adjust_lr_fn=scale),
        torch.optim.AdamW([theirs["embed.weight"], theirs["b.bias"]], lr=0.05, weight_decay=0.1),
    ]
    optimizer = muon(0.05, momentum=0.8, nesterov=nesterov, scale=scale)
    slots, draw = optimizer.init(mine), torch.Generator().manual_seed(2)
    assert {path: sorted(own) for path, own in slots.items()} == {
        "embed.weight": ["mu", "nu"], "a.weight": ["momentum"], "b.weight": ["momentum"],
        "b.bias": ["mu", "nu"],
    }  # fmt: skip
    for step in range(3):
        for leaf in theirs.values():
            leaf.grad = torch.randn(leaf.shape, dtype=torch.float64, generator=draw)
        gradients = {path: leaf.grad.clone() for path, leaf in theirs.items()}
        for each in both:
            each.step()
        optimizer.apply(gradients, slots, mine, StepInfo(torch.tensor(step)))
        for path, leaf in mine.items():
            torch.testing.assert_close(leaf, theirs[path].detach(), atol=1e-12, rtol=0)


def test_embeddings_and_heads_are_adamws_and_heads_of_attention_are_not():
    paths = [
        "wte.weight",
        "lm_head.weight",
        "head.weight",
        "a.head.weight",
        "multihead_attn.weight",
        "heads.w",
    ]
    slots = muon(0.1).init({path: torch.zeros(2, 2) for path in paths})
    assert [path for path in paths if "momentum" in slots[path]] == paths[4:]


def schedule_of(shapes: dict[str, tuple[int, ...]], ranks: int, **policy: Any) -> Any:
    mesh = fs.make_mesh(shard=ranks, abstract=True)
    params = {path: torch.zeros(shape) for path, shape in shapes.items()}
    specs = fs.presets.full_shard(params, mesh, **policy)

    def total(params: Any, x: Tensor) -> Tensor:
        hidden = x
        for leaf in params.values():  # one unit after another, so that gradients arrive in turn
            hidden = torch.tanh(hidden) + leaf.square().sum()
        return hidden.sum()

    step = fs.shard_step(total, specs, mesh=mesh, optimizer=muon(0.05), backend="eager")
    return step.lower(params, torch.ones(2)).schedule


def test_matrices_alone_have_owners_and_go_in_their_dtype():
    """bf16 on the wire, twice; nothing of what AdamW has, and no stack that is split between its matrices."""
    shapes = {**SHAPES, "experts.even": (4, 6, 5)}
    schedule = schedule_of(shapes, 2)
    lines = [line for line in schedule.instructions if line.verb == "update_exchange"]
    buckets = [schedule.buckets[line.bucket] for line in lines]
    assert sorted(buckets[0].paths) == ["a.weight", "b.weight", "experts.w"] and buckets[1] is buckets[0]
    assert {bucket.dtype for bucket in buckets} == {torch.bfloat16}


@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 8))])
def test_each_rank_makes_its_share_orthogonal_and_no_matrix_twice(ranks):
    """48 layers: rows of all ranks hold the same work to 5%, every matrix has one owner, and owners begin
    while earlier layers are still in the backward."""
    shapes = {}
    for layer in range(48):
        shapes |= {f"layers.{layer}.{n}": (32, 32) for n in "qkvo"}
        shapes |= {f"layers.{layer}.up": (64, 32), f"layers.{layer}.gate": (64, 32)}
        shapes |= {f"layers.{layer}.down": (32, 64)}
    schedule = schedule_of(shapes, ranks)
    owned: list[list[str]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for bucket in (b for name, b in schedule.buckets.items() if name.startswith("owners/")):
        for piece in bucket.pieces:
            place = piece.offset * ranks // bucket.numel
            owned[place].append(piece.path)
            work[place] += min(piece.shape) ** 2 * max(piece.shape)
    assert sorted(path for paths in owned for path in paths) == sorted(shapes)
    assert max(work) <= 1.05 * sum(work) / ranks
    lines = list(schedule.instructions)
    first = next(n for n, line in enumerate(lines) if line.verb == "update_whole")
    assert sum(line.verb == "reduce_scatter" for line in lines[first:]) >= 48 - ranks
    wire = sum(line.wire_bytes(schedule) for line in lines if line.verb == "update_exchange")
    numel = sum(a * b for a, b in shapes.values())
    assert wire == 2 * 2 * numel / ranks  # of a rank's rows, both ways in bf16, and no padding


def test_orthogonal_is_what_newton_schulz_makes():
    for shape in ((5, 9), (9, 5), (3, 4, 6)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalized(matrix))
        assert values.min() > 0.6 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert (orthogonalized(matrix, 30) * (u @ v)).sum((-2, -1)).min() > 0.7 * min(shape[-2:])
    assert not orthogonalized(torch.zeros(3, 3)).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: muon(0.1, momentum=1.0), r"momentum=1.0: at least 0 and below 1"),
        (lambda: muon(0.1, ns_steps=0), "ns_steps=0"),
        (lambda: muon(0.1, scale="none"), "scale='none': one of original, match_rms_adamw"),
        (lambda: muon(0.1, weight_decay=-1), "weight_decay=-1"),
        (
            lambda: by_path(("*bias", muon(0.1)), ("*", sgd(1))).init(leaves()),
            r"(?s)none of the leaves.*b.bias.*1 dim",
        ),
        (lambda: by_path(), "pairs of a glob and an optimizer"),
        (lambda: by_path(("*", 0.1)), r"\('\*', 0.1\)"),
        (lambda: by_path(("a*", sgd(0.1))).init(leaves()), r"(?s)4 leaves of 5 matched by no rule.*b.weight"),
        (lambda: by_path(("*", sgd(0.1)), ("b*", muon(0.1))).init(leaves()), "rules of by_path.*no leaf"),
        (
            lambda: by_path(("a*", DECAYED), ("*", sgd(1))).init(leaves()),
            r"(?s)rules of weight_decay that match no leaf.*b\*",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(make, words):
    with pytest.raises(OptimizerError, match=words):
        make()
