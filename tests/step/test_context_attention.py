"""How attention runs over a sequence that the context axis splits: Ulysses, keys gathered, and ring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from models import Model
from sharded import make_step, specs_of
from tensor_models import ROWS, WIDTH, T, decoder
from torch import Tensor

import fnshard as fs
from experiments.lib.decoder import Decoder, DecoderConfig, next_token_loss
from fnshard.compiler.frontend.exchange import OUTGOING
from fnshard.compiler.schedule.instructions import Exchange, Run

ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)
TENSOR = {"shard": 2, "tensor": 2, "context": 2}


@cache
def model_of(layers: int = 2) -> Model:
    return decoder(layers=layers)


def step_on(mesh: fs.Mesh, model: Model, attention: str, preset: str = "full_shard", **options: Any) -> Any:
    specs = specs_of(model, preset, mesh, tensor="tensor" if "tensor" in mesh.names else None)
    return specs, make_step(mesh, model, specs, ADAMW, context_attention=attention, **options)


# ------------------------------------------------------------------ counted


def lower_model(ranks: int, attention: str = "ring", model: Model | None = None, **options: Any) -> Any:
    mesh, model = fs.make_mesh(context=ranks, abstract=True), model or model_of()
    _, step = step_on(mesh, model, attention, "no_shard", **options)
    return step.lower(model.params, *model.batch(0))


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.long), "unit"])
def test_blocks_go_round_once_forward_twice_backward(remat: str) -> None:
    """Keys and values, again for the backward, and their gradients: as many bytes each."""
    ranks, step = 4, lower_model(4, remat=remat)
    lines = [i for i in step.schedule.instructions if isinstance(i, Exchange) and i.unit == "layers.0"]
    found = Counter((line.phase, line.kind, line.dim) for line in lines)
    turns = range(1, ranks)
    assert found == {
        **{("forward", "permute", t): 1 for t in turns},
        **{("backward", "permute", t): 1 for t in turns},
        **{("backward", "permute", -t): 1 for t in turns},
    }
    block = ROWS * T // ranks * 2 * (WIDTH // 2) * 8  # keys and values of half as many heads, fp64
    assert {line.sent_bytes for line in lines} == {block}
    rows = [r for r in step.comm_analysis().rows if r.verb == "exchange" and r.unit == "layers.0"]
    assert sum(r.bytes for r in rows) == sum(r.sent_bytes for r in rows) == 3 * (ranks - 1) * block


def test_the_next_block_travels_beside_the_product_of_this_one() -> None:
    """And nothing of another rank's is kept between forward and backward."""
    lines = lower_model(4).schedule.instructions
    issued = {i.writes[0]: n for n, i in enumerate(lines) if isinstance(i, Exchange)}
    runs = [n for n, i in enumerate(lines) if isinstance(i, Run)]
    waits = {n: issued[i.reads[0]] for n, i in enumerate(lines) if i.verb == "wait" and i.reads[0] in issued}
    assert len(waits) == len(issued) > 0
    assert [n for n, first in waits.items() if not any(first < run < n for run in runs)] == []
    read: dict[Any, set[str]] = {}
    for line in lines:
        for name in line.reads:
            read.setdefault(name, set()).add(line.phase)
    received = [lines[n].writes[0] for n in waits]
    assert all(len(read[name]) == 1 for name in received)


@pytest.mark.long  # a copy more is time alone
@pytest.mark.parametrize("attention", [pytest.param("auto", marks=pytest.mark.long), "ring"])
def test_what_is_sent_is_copied_once(attention: str) -> None:
    """That holds if a second axis converts it first, too."""
    mesh, model = fs.make_mesh(**TENSOR, abstract=True), model_of()
    _, step = step_on(mesh, model, attention)
    graph = step.lower(model.params, *model.batch(0)).program.graph
    copies = graph.find_nodes(op="call_function", target=OUTGOING)
    assert copies and not [n for n in copies if n.args[0].target is OUTGOING]


@pytest.mark.long  # two lowerings for one sum of flops
def test_what_no_query_sees_is_no_work_of_the_model() -> None:
    """Half of a causal mask's blocks are computed in vain."""
    ring, ulysses = (lower_model(2, a).timeline("h100") for a in ("ring", "ulysses"))
    assert ring.model_flops == ulysses.model_flops < ulysses.hardware_flops < ring.hardware_flops


# ------------------------------------------------------------------ long sequences


def long_step(mesh: fs.Mesh, length: int, attention: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    apply, params = fs.make_functional(
        Decoder(DecoderConfig(width=64, layers=2, heads=8, kv_heads=8, context=length))
    )
    step = fs.shard_step(
        lambda p, x, y: next_token_loss(apply(p, x), y), fs.presets.full_shard(params, mesh), mesh=mesh,
        backend="eager", optimizer=fs.optim.adamw(1e-2), context_attention=attention,
    )  # fmt: skip
    return step, {p: v.detach() for p, v in params.items()}, torch.arange(length).unsqueeze(0) % 61


@pytest.mark.long
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_activations_of_64k_tokens_are_shared_by_all_ranks(attention: str) -> None:
    def activations(ranks: int) -> int:
        mesh = fs.make_mesh(context=ranks, abstract=True)
        step, params, tokens = long_step(mesh, 1 << 16, attention)
        analysis = step.lower(params, tokens, tokens).memory_analysis()
        return analysis.peak_bytes - analysis.resident_bytes

    whole, four = map(activations, (1, 4))
    assert four < 0.3 * whole


# ------------------------------------------------------------------ masks of large numbers


@pytest.mark.suite({
    "-10000.0": "what models write",
    "-3.40*": "the least there is",
})  # fmt: skip
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4])
def test_a_ring_of_queries_whose_keys_finite_numbers_mask(fill: float) -> None:
    """The ring gives what a softmax that is spelled out gives; the last rank has fewer of the 7 keys."""

    def loss(p: dict[str, Tensor], x: Tensor, mask: Tensor, fused: bool = True) -> Tensor:
        q, k, v = ((x @ p[n]).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
        shares = (q @ k.mT / 2 + mask).softmax(-1)
        return (F.scaled_dot_product_attention(q, k, v, mask) if fused else shares @ v).square().mean()

    torch.manual_seed(0)
    params, x = {n: torch.randn(8, 8) for n in "qkv"}, torch.randn(2, 7, 8)
    mask = torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1) > 0, fill)
    mask[0, :, :3] = fill
    mesh = fs.make_mesh(simulated=True, context=2)
    step = fs.shard_step(loss, fs.presets.no_shard(params, mesh), mesh=mesh, backend="eager",
                         context_attention="ring")  # fmt: skip
    expected = torch.func.grad(loss)(params, x, mask, False)
    for _, grads in fs.simulate(mesh, lambda rank: step(params, x, mask)):
        torch.testing.assert_close(grads, expected, rtol=0, atol=2e-6)


# ------------------------------------------------------------------ mistakes


def dropped(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = params["embed.weight"][tokens].unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3).square().mean()


def biased(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x, bias = params["embed.weight"][tokens].unsqueeze(1), params["pos"] @ params["pos"].T
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias).square().mean()


WRONG = {
    "an unknown way": (
        {"attention": "flash"},
        ["context_attention='flash'", "'auto', 'ulysses', 'gather'"],
        (),
    ),
    "a bias that trains": (
        {"model": replace(decoder(), loss=biased)},
        ["mask", "gradient", "test_context_attention.py:"],
        (),
    ),
    "dropout": ({"model": replace(decoder(), loss=dropped)}, ["'ring' over", "dropout"], "'auto'"),
    "too few heads": ({"ranks": 8, "attention": "ulysses"}, "4 heads", "'ring'"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_error(mistake: str) -> None:
    chosen, leaves, fix = WRONG[mistake]
    with raises(fs.FnshardError, leaves=leaves, fix=fix):
        lower_model(**{"ranks": 2, **chosen})
