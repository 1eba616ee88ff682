"""Tracing: what `fn` may return and call, modules, and what it sees of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import (
    ROWS,
    WIDTH,
    chain,
    llama,
    our_grads,
    plain_grads,
    rows,
    run_chain,
    step_of,
)
from traced import Fn, checks_of, programs, refused

import fnshard as fs
from fnshard import LayoutSpec, TraceError

RIGHT, right = programs()
REFUSED, refuse = refused()
test_gradients_are_those_of_autograd, test_refused_with_the_way_out = checks_of(RIGHT, REFUSED)

# ------------------------------------------------------------------ shapes of programs

RIGHT |= {
    "loss that is a view": lambda p, x: run_chain(p, x).reshape(-1)[0],
    "loss of leaves alone": lambda p, x: torch.linalg.svdvals(p["layers.0.w"]).sum() + p["layers.1.w"][0, 0],
    "loss that is an element": lambda p, x: p["layers.0.w"][0, 0],
}  # fmt: skip


@right
def loss_returned_twice(p, x):
    loss = run_chain(p, x).sum()
    return loss, (
        loss,
        loss.detach(),
        {"twice": loss * 2, "x": x, "w": p["layers.0.w"], "row": p["layers.1.w"][0]},
    )


@right
def aux_of_views(p, x):
    y = run_chain(p, x)
    return y.sum(), (y.view(-1), y.T, y)


@right
def flattened_leaves(p, x):
    flat = torch.cat([v.flatten() for v in p.values()])
    return (x @ flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)).sum() + flat.norm()


@right
def chosen_attention(p, x):
    y = run_chain(p, x).view(1, 1, ROWS, WIDTH)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).sum()


@right
def multi_head_attention(p, x):
    y = run_chain(p, x)[None]
    return _attention(y, x[None], x[None])[0].sum() + _encoder(y).sum()


_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).requires_grad_(False)
_encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True).requires_grad_(False)


@right
def replaced_in_the_dict(p, x):
    q = dict(p)
    q["layers.0.w"] = q["layers.0.w"] * 2
    return run_chain(q, x).sum()


def test_aux_holds_values_from_before_the_update() -> None:
    params = chain(2)
    step = step_of(loss_returned_twice, params, optimizer=fs.optim.sgd(1.0))
    state, metrics = step(step.init(params), rows())
    assert torch.equal(metrics["aux"][2]["w"], params["layers.0.w"])
    assert torch.equal(metrics["aux"][2]["row"], params["layers.1.w"][0])
    assert not torch.equal(state.params["layers.0.w"], params["layers.0.w"])


# ------------------------------------------------------------------ losses

REFUSED |= {
    "loss of many": (lambda p, x: run_chain(p, x), r"0-d float tensor.*it returned f32\[4, 8\]"),
    "integer loss": (lambda p, x: run_chain(p, x).sum().long(), r"it returned i64\[\]"),
    "complex loss": (lambda p, x: run_chain(p, x).sum().to(torch.complex64), r"it returned complex64\[\]"),
    "loss in a dict": (lambda p, x: {"loss": run_chain(p, x).sum()}, "it returned dict"),
    "loss without leaf": (lambda p, x: x.sum(), "the loss depends on no trainable leaf.*trainable=True"),
}  # fmt: skip


# ------------------------------------------------------------------ modules


def _loss_of(model: nn.Module) -> tuple[Fn, dict[str, Tensor]]:
    apply, params = fs.make_functional(model)
    return (lambda p, x: apply(p, x).pow(2).sum()), params


@pytest.mark.parametrize("way", ["replaced", "eval"])
def test_batch_norm_that_writes_nothing(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model = torch.func.replace_all_batch_norm_modules_(model) if way == "replaced" else model.eval()
    fn, params = _loss_of(model)
    loss, grads = our_grads(fn, params, rows())
    expected = model(rows()).pow(2).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grads["0.weight"], model[0].weight.grad, atol=1e-4, rtol=1e-4)


def test_parameters_with_hooks_are_refused_by_make_functional() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 0)
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        TraceError, match=r"(?s)2 leaves of Linear with a gradient hook.*'weight'.*'bias'.*Fix"
    ):
        fs.make_functional(model)


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm]
)
def test_parametrised_weights(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).eval()
    fn, params = _loss_of(model)
    loss, grads = our_grads(fn, params, rows())
    expected = model(rows()).pow(2).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    trained = {p: v.grad for p, v in model.named_parameters()}
    torch.testing.assert_close({p: grads[p] for p in trained}, trained)


# ------------------------------------------------------------------ what fn sees


def test_requires_grad_of_leaves_is_what_the_specs_say() -> None:
    seen: dict[str, bool] = {}

    def fn(p, x):
        seen.update({path: leaf.requires_grad for path, leaf in p.items()} | {"x": x.requires_grad})
        return run_chain(p, x).sum()

    rules = [("layers.0.*", LayoutSpec(trainable=False)), ("*", LayoutSpec())]
    step = fs.shard_step(fn, fs.match_specs(chain(), rules), backend="eager")
    _, grads = step(chain(), rows())
    assert seen == {
        "layers.0.w": False,
        "layers.1.w": True,
        "layers.2.w": True,
        "layers.3.w": True,
        "x": False,
    }
    assert grads["layers.0.w"] is None


def test_leaves_come_in_compute_dtype_and_batches_as_they_are() -> None:
    seen: dict[str, torch.dtype] = {}

    def fn(p, x, ids):
        seen.update({"w": p["layers.0.w"].dtype, "x": x.dtype, "ids": ids.dtype})
        return run_chain(p, x.to(torch.bfloat16)).float().sum()

    specs = fs.match_specs(chain(), [("*", LayoutSpec(compute_dtype=torch.bfloat16))])
    fs.shard_step(fn, specs, backend="eager").lower(
        chain(), rows().double(), torch.zeros(3, dtype=torch.int32)
    )
    assert seen == {"w": torch.bfloat16, "x": torch.float64, "ids": torch.int32}


def test_an_error_of_the_users_own_comes_through() -> None:
    with pytest.raises(KeyError, match="nope"):
        our_grads(lambda p, x: p["nope"], chain(), rows())


def test_a_failed_trace_leaves_the_grad_mode_as_it_was() -> None:
    def fn(p, x):
        torch.set_grad_enabled(False)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        our_grads(fn, chain(), rows())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tracing_inside_an_outer_grad_mode(context: Callable[[], Any]) -> None:
    expected, grads = plain_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
    with context():
        loss, ours = our_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
        torch.testing.assert_close((loss, ours), (expected, grads))


def test_program_as_text() -> None:
    loss, params, tokens = llama(1)
    program = step_of(loss, params).lower(params, tokens).program
    text = program.as_text()
    assert "leaf layers.0.q.weight f32[16, 16]" in text
    assert "aten.scaled_dot_product_attention(" in text and "aten.linear(" in text
    assert text.splitlines()[-1].startswith("return ")
    assert str(program) == text


def _sparse_embeddings(p, x):
    ids = torch.tensor([1, 2, 3, 3])
    bags = F.embedding_bag(ids, p["layers.1.w"], torch.tensor([0, 2]), mode="sum", sparse=True)
    return F.embedding(ids, p["layers.0.w"], sparse=True).pow(2).sum() + bags.pow(2).sum()


def test_an_embedding_with_sparse_gradient_gets_a_dense_one() -> None:
    expected, sparse = plain_grads(_sparse_embeddings, chain(), rows())
    loss, grads = our_grads(_sparse_embeddings, chain(), rows())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, {p: g.to_dense() for p, g in sparse.items()})
