"""Muon and optimizers by path: compared with torch's own; and mistakes. Layouts: `test_layouts`."""

from __future__ import annotations

import pytest
import torch
from errors import raises
from matrices import leaves

from fnshard.errors import OptimizerError
from fnshard.optim import Step, adamw, by_path, muon, sgd
from fnshard.optim.muon import orthogonalize
from fnshard.optim.optimizer import apply_updates, init_slots

# Below it is given the leaves a*, of which its rule b* matches none.
DECAYED = adamw(0.1, weight_decay=[("b*", 0.0), ("*", 0.1)])


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_and_its_adamw_are_torchs(scale, nesterov):
    mine = {path: leaf for path, leaf in leaves().items() if leaf.dim() < 3}
    theirs = {path: leaf.clone().requires_grad_() for path, leaf in mine.items()}
    matrices = [theirs[path] for path in ("a.weight", "b.weight")]
    both = [
        torch.optim.Muon(matrices, lr=0.05, momentum=0.8, nesterov=nesterov, adjust_lr_fn=scale),
        torch.optim.AdamW([theirs["embed.weight"], theirs["b.bias"]], lr=0.05, weight_decay=0.1),
    ]
    optimizer = muon(0.05, momentum=0.8, nesterov=nesterov, scale=scale)
    slots, draw = init_slots(optimizer, mine), torch.Generator().manual_seed(2)
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
        mine, slots = apply_updates(optimizer, gradients, slots, mine, Step(torch.tensor(step)))
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
    slots = init_slots(muon(0.1), {path: torch.zeros(2, 2) for path in paths})
    assert [path for path in paths if "momentum" in slots[path]] == paths[4:]


def test_newton_schulz_makes_nearly_orthogonal_matrices():
    for shape in ((5, 9), (9, 5), (3, 4, 6)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.min() > 0.6 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert (orthogonalize(matrix, 30) * (u @ v)).sum((-2, -1)).min() > 0.7 * min(shape[-2:])
    assert not orthogonalize(torch.zeros(3, 3)).any()


@pytest.mark.parametrize(
    ("make", "leaves"),
    [
        (lambda: muon(0.1, momentum=1.0), ["momentum=1.0", "at least 0 and below 1"]),
        (lambda: muon(0.1, ns_steps=0), "ns_steps=0"),
        (lambda: muon(0.1, scale="none"), ["scale='none'", "original, match_rms_adamw"]),
        (lambda: muon(0.1, weight_decay=-1), "weight_decay=-1"),
        (
            lambda: init_slots(by_path(("*bias", muon(0.1)), ("*", sgd(1))), leaves()),
            ["none of the leaves", "params['b.bias']", "1 dim"],
        ),
        (lambda: by_path(), ["by_path", "a glob and an optimizer"]),
        (lambda: by_path(("*", 0.1)), "('*', 0.1)"),
        (
            lambda: init_slots(by_path(("a*", sgd(0.1))), leaves()),
            ["4 leaves of 5", "b.weight"],
        ),
        (
            lambda: init_slots(by_path(("*", sgd(0.1)), ("b*", muon(0.1))), leaves()),
            ["by_path", "no leaf"],
        ),
        (
            lambda: init_slots(by_path(("a*", DECAYED), ("*", sgd(1))), leaves()),
            ["weight_decay", "b*"],
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(make, leaves):
    with raises(OptimizerError, leaves=leaves):
        make()
