"""Batch norm over all ranks: what one process with all rows gives, in losses, gradients and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

import fnshard as fs

D, LR, STEPS, SIDE = torch.float64, 0.05, 3, 5


class Activated(nn.BatchNorm2d):
    """A norm with an activation in it, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        shared = (self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, *shared))


class AnyDim(_BatchNorm):
    """A norm of torch's base class, for inputs of any number of dims."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class Images(nn.Module):
    """A model of two norms, of which the second reads what the first made."""

    def __init__(self, norm: Callable[[int], nn.Module], flat: bool = False):
        super().__init__()
        first = nn.Flatten() if flat else nn.Conv2d(3, 4, 3)
        width = 3 * SIDE * SIDE if flat else 4
        head = [] if flat else [nn.Flatten()]
        norms = [norm(width), norm(width)]
        self.layers = nn.Sequential(first, norms[0], nn.Tanh(), norms[1], *head, nn.LazyLinear(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), torch.arange(len(x)) % 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "2d": lambda: Images(nn.BatchNorm2d),
    "1d": lambda: Images(nn.BatchNorm1d, flat=True),
    "activated": lambda: Images(Activated),
    "any dim": lambda: Images(AnyDim),
    "lazy": lambda: fs.sync_batch_norm(Images(lambda n: nn.LazyBatchNorm2d())),  # before its first batch
    "no statistics": lambda: Images(lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
    "torch's": lambda: Images(nn.SyncBatchNorm),  # which is torch's BatchNorm where there is no process group
}


def batches() -> Tensor:
    """Draw [STEPS, 12, 3, SIDE, SIDE], far from zero: squares alone would lose digits."""
    return torch.randn(STEPS, 12, 3, SIDE, SIDE, dtype=D, generator=torch.Generator().manual_seed(1)) + 100


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model.eval().layers(batches()[0])
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.reset_running_stats()
    return model.train()


def synchronise(name: str) -> nn.Module:
    return model_of(name) if name.startswith(("torch's", "lazy")) else fs.sync_batch_norm(model_of(name))


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process with all rows."""
    model = model_of(name)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {p: v.detach() for p, v in model.state_dict().items()}


def step_of(name: str, mesh: fs.Mesh, preset: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    apply, params = fs.make_functional(synchronise(name))
    specs = fs.presets.PRESETS[preset](params, mesh)
    options = {"backend": "eager", **options}
    step = fs.shard_step(lambda p, x: apply(p, x), specs, mesh=mesh, optimizer=fs.optim.sgd(LR), **options)
    return step, {p: v.detach().clone() for p, v in params.items()}


def train_on_rank(
    rank: int, mesh: fs.Mesh, made: tuple[Any, dict[str, Tensor]], sizes: list[int]
) -> tuple[list[float], dict[str, Tensor]]:
    step, params = made
    state, losses = step.init(params), []
    for batch in batches():
        state, metrics = step(state, batch.split(sizes)[rank])
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(state.params, step.specs, mesh)


@pytest.mark.suite({
    "1d-*": "rows",
    "2d-no_shard-unit": "images, made again",
    "activated-zero2-unit": "with an activation inside",
    "any dim-*": "a class of one's own",
    "lazy-*": "converted before its first batch",
    "torch's-*": "what torch has",
})  # fmt: skip
@pytest.mark.parametrize(
    ("name", "preset", "remat"),
    [
        *((name, "full_shard", "none") for name in MODELS),
        *(("2d", "no_shard", "unit"), ("activated", "zero2", "unit")),
    ],
)
def test_ranks_equal_one_process(name: str, preset: str, remat: str) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    made, sizes = step_of(name, mesh, preset, remat=remat), [12 // mesh.size] * mesh.size
    for got in fs.simulate(mesh, lambda rank: train_on_rank(rank, mesh, made, sizes)):
        torch.testing.assert_close(got, plain(name), rtol=1e-10, atol=1e-10)


def test_uneven_rows_count_as_they_are() -> None:
    """The loss is a Mean here, so that each row counts once, as in one process."""
    x, mesh = batches()[0, :, :, 0, 0], fs.make_mesh(shard=2, simulated=True)
    params = {"w": torch.randn(3, 3, dtype=D), "bias": torch.randn(3, dtype=D)}

    def fn(p: dict[str, Tensor], x: Tensor) -> fs.Mean:
        out = fs.adapters.batch_norm(x @ p["w"], None, None, None, p["bias"], training=True)
        return fs.Mean(out.exp().sum(), out.numel())

    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        loss, grads = step(step.init(params), x.split([5, 7])[rank])
        return loss, fs.unshard(grads, specs, mesh, layout="gradient")

    leaves = {p: v.clone().requires_grad_() for p, v in params.items()}
    whole = fn(leaves, x)
    loss = whole.total / whole.count
    expected = loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for got in fs.simulate(mesh, run):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_process_group_of_ones_own_is_refused() -> None:
    model, x = nn.SyncBatchNorm(3, process_group=object()), batches()[0, ..., 0]
    apply, params = fs.make_functional(model)
    mesh = fs.make_mesh(shard=2, abstract=True)
    step = fs.shard_step(lambda p, x: apply(p, x).mean(), fs.presets.no_shard(params, mesh), mesh=mesh)
    with raises(fs.TraceError, leaves="SyncBatchNorm", fix=["process_group", "fs.adapters.batch_norm("]):
        step.lower(params, x)


def test_one_exchange_a_layer_and_statistics_are_not_sent_again() -> None:
    mesh = fs.make_mesh(shard=4, abstract=True)
    step, params = step_of("2d", mesh, "full_shard")
    lowered = step.lower(params, batches()[0][:3])
    counts = lowered.schedule.counts()
    assert counts["exchange"] == 2 * 2 and "aggregate_buffers" not in counts
    assert lowered.comm_analysis()["exchange"]["bytes"] == 2 * 2 * 4 * (2 * 4 + 1) * 8


def test_a_model_stays_what_it_was_outside_of_a_step() -> None:
    model = model_of("activated")
    same = fs.sync_batch_norm(copy.deepcopy(model))
    assert isinstance(same.layers[1], Activated) and same is fs.sync_batch_norm(same)
    assert same.layers[1].__class__ is copy.deepcopy(same).layers[1].__class__
    for training in (True, False):
        x = batches()[0]
        torch.testing.assert_close(same.train(training)(x), model.train(training)(x), rtol=0, atol=0)
    torch.testing.assert_close(same.state_dict(), model.state_dict(), rtol=0, atol=0)
