"""What fails inside `fn`: one error in the user's terms, with his line, and nothing of torch's inside."""

from __future__ import annotations

import inspect
import io
import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec, StateError, TraceError
from fnshard.compiler.frontend.unsupported import check_version

BF16, HERE = torch.bfloat16, Path(__file__).name
Fn = Callable[..., Any]


def lower_fn(fn: Fn, params: dict[str, Tensor], *batch: Any, compute: torch.dtype | None = None) -> Any:
    specs = fs.match_specs(params, [("*", LayoutSpec(compute_dtype=compute))])
    return fs.shard_step(fn, specs, backend="eager").lower(params, *batch)


def classify() -> tuple[Fn, dict[str, Tensor]]:
    apply, params = fs.make_functional(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)))

    def loss(p: Any, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, ids), labels)

    return loss, params


def formatted(p: Any, x: Tensor) -> Tensor:
    loss = (x @ p["w"]).sum()
    print(f"{loss:.3f}")
    return loss


W = {"w": torch.zeros(8, 8)}
X = torch.zeros(4, 8)
LOSS, MODEL = classify()
IDS, FLOATS = torch.zeros(4, dtype=torch.long), torch.zeros(4)
with fs.deferred():
    PAPER = torch.arange(8.0)
FAILING = {
    "shapes": (
        lambda p, x: (x @ p["w"]).sum(), W, (X[:, :7],),
        ["matmul(batch['0'] f32[4, 7], params['w'] f32[8, 8])", "x = batch['0'] f32[4, 7]"], "micro",
    ),
    "swapped": (
        LOSS, MODEL, (FLOATS, IDS),
        ["embedding(batch['0'] f32[4], params['0.weight']", "ids = batch['0'] f32",
        "labels = batch['1'] i64"],
        ["integers", "order"],
    ),
    "a list": (
        LOSS, MODEL, (IDS, [1, 2, 3, 4]),
        ["must be Tensor, not list", "[1, 2, 3, 4]"], "torch.as_tensor",
    ),
    "integers": (
        lambda p, x: F.linear(x.long(), p["w"]).sum(), W, (X,),
        ["linear(i64[4, 8], params['w'] f32"], "x.to(weight.dtype)",
    ),
    "a value in a string": (
        formatted, W, (X,),
        ["__format__"], "return it in aux",
    ),
    "classes": (
        lambda p, x, y: (x @ p["w"] * F.one_hot(y)).sum(), W, (X, IDS),
        ["tensor's value"], "num_classes=n",
    ),
    "weights of classes that train": (
        lambda p, x, y: F.cross_entropy(x @ p["w"], y, weight=p["w"][0]), W, (X, IDS),
        ["cross_entropy("], ["detach it", "* weight[labels]"],
    ),
    "a tensor made on paper": (
        lambda p, x: (x @ p["w"] * PAPER).sum(), W, (X,),
        ["cpu and meta"], ["closes over", "fs.deferred()"],
    ),
    "a leaf in place": (
        lambda p, x: (x @ p["w"].mul_(2)).sum(), W, (X,),
        ["mul_(params['w'] f32"], ["params['w'] * scale", "trainable=False"],
    ),
} | {
    name: (lambda p, x, take=take: (x @ p["w"]).sum() * (take(p, x) is x), W, (X,), call, fix)
    for name, (take, call, fix) in {
        "item": (lambda p, x: x.sum().item(), ["item(f32[])"], "aux"),
        "float": (lambda p, x: float(p["w"][0, 0]), ["__float__(f32[])"], "in aux"),
        "NumPy": (lambda p, x: np.exp(x), ["__array__(batch["], "torch.as_tensor"),
        "dlpack": (lambda p, x: np.from_dlpack(x), ["__dlpack__(batch['0']"], "aux"),
        "save": (lambda p, x: torch.save(x, io.BytesIO()), ["__reduce_ex__"], "save goes"),
        "of its own": (lambda p, x: FLOATS.tolist(), ["tolist("], "plain Python"),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_torch_function_that_fails_is_one_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, params, batch, call, fix = FAILING[name]
    logged: list[Any] = []  # torch logs a traceback of its insides
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    with raises(TraceError, leaves=[f"{HERE}:", *call], fix=fix) as caught:
        lower_fn(fn, params, *batch)
    error = caught.value
    assert re.search(rf"{HERE}:\d+  \S", str(error))  # the user's line, as it stands there
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[-1].endswith(HERE) and not any("/torch/" in file for file in files)
    assert error.__cause__ is None and error.__context__ is None
    assert "FakeTensor" not in str(error) and not logged


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_object", "barrier", "monitored_barrier", ""])
def test_a_collective_of_torchs_own_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        hidden = x @ p["w"]
        if not name:
            return funcol.all_reduce(hidden, "sum", dist.group.WORLD).sum()
        arguments = {"all_reduce": (hidden.detach(),), "all_gather_object": ([None], 3)}
        getattr(dist, name)(*arguments.get(name, ()))
        return hidden.sum()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        ops = {
            "all_reduce": "allreduce_",
            "monitored_barrier": "monitored_barrier_",
            "": "_c10d_functional.all_reduce",
        }
        with raises(TraceError, leaves=[ops.get(name, name), f"{HERE}:"], fix="fs.all_gather"):
            lower_fn(fn, W, X)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ several dtypes


def conv(dims: int, transposed: bool = False) -> Fn:
    op = getattr(F, f"conv{'_transpose' * transposed}{dims}d")
    return lambda x: op(torch.zeros(2, 3, *[5] * dims), torch.zeros(3, 3, *[3] * dims, dtype=BF16) + x)


def low(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


def full(*shape: int) -> Tensor:
    return torch.zeros(*shape)


AT = torch.zeros(2, dtype=torch.long)
MIXED: dict[str, Fn] = {
    "conv1d": conv(1), "conv_transpose2d": conv(2, True),
    "conv2d same": lambda x: F.conv2d(full(2, 3, 5, 5), low(3, 3, 3, 3) + x, padding="same"),
    "bmm": lambda x: torch.bmm(full(2, 3, 4), low(2, 4, 3) + x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", full(2, 3), low(3, 4) + x),
    "sdpa": lambda x: F.scaled_dot_product_attention(full(1, 1, 3, 8), low(1, 1, 3, 8) + x, full(1, 1, 3, 8)),
    "layer_norm": lambda x: F.layer_norm(full(2, 8), (8,), low(8) + x),
    "index_put": lambda x: full(4).index_put((AT,), low(2) + x),
    "index_add": lambda x: full(4).index_add(0, AT, low(2) + x),
    "cdist": lambda x: torch.cdist(full(2, 3), low(4, 3) + x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(torch.sigmoid(full(2)), low(2) + x),
    "binary_cross_entropy int": lambda x: F.binary_cross_entropy(torch.sigmoid(low(2) + x), AT),
    "grid_sample": lambda x: F.grid_sample(full(1, 1, 4, 4), low(1, 2, 2, 2) + x, align_corners=False),
    "lstm_cell": lambda x: torch.lstm_cell(full(2, 4), (full(2, 4),) * 2, low(16, 4) + x, low(16, 4))[0],
    "multi_head_attention": lambda x: F.multi_head_attention_forward(
        full(3, 2, 4), full(3, 2, 4), full(3, 2, 4), 4, 2, low(12, 4) + x, low(12), None, None, False, 0.0,
        low(4, 4), low(4), need_weights=False)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_ops_that_take_one_dtype_are_refused_as_eager_torch_refuses_them(name: str) -> None:
    op = MIXED[name]
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)dtype|type|data"):
        op(torch.zeros((), dtype=BF16))
    with raises(TraceError, leaves=["bf16", f"{HERE}:"], fix=["its spec's", "x.to(weight.dtype)"]):
        lower_fn(lambda p, x: op(p["w"]).sum().float() + x.sum(), {"w": torch.zeros(())}, X, compute=BF16)


@pytest.mark.parametrize("op", [
    lambda w: F.layer_norm(low(2, 8), (8,), full(8) * w.float(), full(8)),
    lambda w: F.batch_norm(low(2, 8, 3), full(8), full(8) + 1, full(8) * w.float(), full(8)),
    lambda w: F.rms_norm(full(2, 8), (8,), low(8) * w),
    lambda w: torch.where(full(3) > 0, full(3), low(3) * w),
    lambda w: F.mse_loss(full(3), low(3) * w),
    lambda w: full(4).index_put((AT,), full(2) * w),
])  # fmt: skip
def test_ops_that_take_several_dtypes_are_let_through(op: Fn) -> None:
    op(torch.ones((), dtype=BF16))
    assert lower_fn(lambda p, x: op(p["w"]).sum().float(), {"w": torch.ones(())}, X, compute=BF16)


# ------------------------------------------------------------------ errors of the user's own


class Unhappy(nn.Module):
    def __init__(self, error: BaseException, cause: BaseException | None = None):
        super().__init__()
        self.linear, self.error, self.cause = nn.Linear(8, 8), error, cause

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x)
        raise self.error from self.cause


def test_an_error_of_the_models_own_stays_what_it_is_and_says_where() -> None:
    own, cause = ValueError("the model is unhappy"), KeyError("why")
    apply, params = fs.make_functional(Unhappy(own, cause))
    with pytest.raises(ValueError, match="the model is unhappy") as caught:
        lower_fn(apply, params, X)
    assert caught.value is own and own.__cause__ is cause
    line = inspect.getsourcelines(Unhappy.forward)[1] + 2
    where = f"{__file__}:{line}  raise self.error from self.cause; called with batch['0'] f32[4, 8]"
    assert own.__notes__ == [f"while `fn` was traced, at {where}"]
    assert not any("/torch/" in f.filename for f in traceback.extract_tb(own.__traceback__))


def test_an_error_that_the_model_catches_is_its_own_business() -> None:
    def careful(p: Any, x: Tensor) -> Tensor:
        try:
            return (x @ p["w"][:3]).sum()
        except RuntimeError:
            return (x @ p["w"]).sum() + p["v"]

    with pytest.raises(KeyError, match="'v'"):
        lower_fn(careful, W, X)
    assert lower_fn(careful, {**W, "v": torch.zeros(())}, X)


# ------------------------------------------------------------------ what is passed by mistake


@pytest.mark.parametrize("aux", [False, True])
def test_a_forgotten_optimizer_is_named(aux: bool) -> None:
    def loss(p: Any, x: Tensor) -> Any:
        value = (x @ p["w"]).sum()
        return (value, {"mean": value / 4}) if aux else value

    step = step_of(loss, W)
    state, _ = step(step.init(W), X)
    with raises(StateError, leaves="a loss", fix="optimizer="):
        step(state, X)


def test_a_leaf_that_is_a_number_is_no_forgotten_optimizer() -> None:
    step = fs.shard_step(lambda p, x: p * x.sum(), LayoutSpec(), backend="eager")
    loss, grads = step(torch.tensor(2.0), X + 1)
    assert (loss.item(), grads.item()) == (64.0, 32.0)


def test_a_torch_that_was_not_tried_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"2\.11 to 2\.\d+, and this is 2\.99\.0a0"):
        check_version("2.99.0a0+git")
