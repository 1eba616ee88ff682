"""Tracing: what `fn` may return and call, modules, and what it sees of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import chain, our_grads, plain_grads, rows, run_chain, step_of
from traced import checks_of, programs, refused

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


def test_parameters_with_hooks_are_refused_by_make_functional() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 0)
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        TraceError, match=r"(?s)2 leaves of Linear with a gradient hook.*'weight'.*'bias'.*Fix"
    ):
        fs.make_functional(model)


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


def test_a_failed_trace_leaves_the_grad_mode_as_it_was() -> None:
    def fn(p, x):
        torch.set_grad_enabled(False)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        our_grads(fn, chain(), rows())
    assert torch.is_grad_enabled()


def test_autocast_around_a_step_is_refused_at_the_trace_and_after() -> None:
    params = {"w": torch.ones(4, 4)}
    step = fs.shard_step(lambda p, x: (x @ p["w"]).sum(), fs.match_specs(params, [("*", LayoutSpec())]))
    for _ in range(2):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(TraceError, match="enter it inside of `fn`"),
        ):
            step(params, torch.ones(2, 4))
        step(params, torch.ones(2, 4))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tracing_inside_an_outer_grad_mode(context: Callable[[], Any]) -> None:
    expected, grads = plain_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
    with context():
        loss, ours = our_grads(lambda p, x: run_chain(p, x).sum(), chain(), rows())
        torch.testing.assert_close((loss, ours), (expected, grads))


def _sparse_embeddings(p, x):
    ids = torch.tensor([1, 2, 3, 3])
    bags = F.embedding_bag(ids, p["layers.1.w"], torch.tensor([0, 2]), mode="sum", sparse=True)
    return F.embedding(ids, p["layers.0.w"], sparse=True).pow(2).sum() + bags.pow(2).sum()


def test_an_embedding_with_sparse_gradient_gets_a_dense_one() -> None:
    expected, sparse = plain_grads(_sparse_embeddings, chain(), rows())
    loss, grads = our_grads(_sparse_embeddings, chain(), rows())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, {p: g.to_dense() for p, g in sparse.items()})
