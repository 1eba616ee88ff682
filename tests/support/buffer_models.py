"""Modules that write to buffers, trained by plain torch as DDP does and by a step on simulated ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from convolutional import Residual
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fnshard as fs
from fnshard import LayoutSpec

WIDTH, ROWS, LR, STEPS, ATOL = 6, 8, 0.05, 3, 1e-10


# ------------------------------------------------------------------ modules that write, and give a loss


class Blocks(nn.Module):
    """A matrix, a layer that has state, and so on: three units."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList([*blocks, nn.Sequential(nn.Linear(WIDTH, WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Images(nn.Module):
    """Convolutions [B, 3, 4, 4] made of rows, and a norm of images."""

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(1, 3, 1), norm()) for _ in range(1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x[:, None, :, None] * x[:, None, None, :])
        return x.tanh().square().mean()


class Outer(nn.Module):
    """Rows as images [B, 1, WIDTH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Residual(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x[:, :, None] * x[:, None])[:, None]).logsumexp(1).mean()


class Counter(nn.Module):
    """Assigned anew, and read behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = self.count > 0
        self.average = 0.9 * self.average + 0.1 * x.mean(0)  # with its gradient, as torch has it
        return (x - self.average) * self.scale / (self.count + 1)


class Queue(nn.Module):
    """MoCo's (He et al. 2020): keys of earlier batches, a ring with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", F.normalize(torch.randn(4 * ROWS, WIDTH), dim=1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.encode(x), dim=1)
        logits = query @ self.keys.clone().T
        with torch.no_grad():
            rows = (self.at + torch.arange(x.shape[0])) % len(self.keys)
            self.keys[rows] = query
            self.at[0] = (self.at + x.shape[0]) % len(self.keys)
        return logits.logsumexp(1).mean()


class Teacher(nn.Module):
    """An average of the student's weights, written by hand; the student is to give what its teacher gives."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Blocks(nn.Identity).layers
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        pupil = master = x
        for old, new in zip(self.teacher, self.student, strict=True):
            master, pupil = old(master), new(pupil)
        return (pupil - master.detach() * 0.5).square().mean()


class TwoDtypes(nn.Module):
    """Two averages that travel in other sums, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("low", torch.zeros(WIDTH, dtype=torch.float32))
        self.register_buffer("unread", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.lerp_(x.mean(0).float(), 0.5)
            self.unread[1:].copy_(x[0, :2])
        return self.norm(x) * self.low


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: Blocks(lambda: nn.BatchNorm1d(WIDTH)),
    "cumulative": lambda: Blocks(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch_norm_2d": lambda: Images(lambda: nn.BatchNorm2d(3)),
    "instance_norm": lambda: Images(lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "spectral": lambda: Blocks(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "counter": lambda: Blocks(Counter),
    "queue": Queue,
    "teacher": Teacher,
    "residual": Outer,
    "two_dtypes": lambda: Blocks(TwoDtypes),
}


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for leaf in [v for p, v in named.items() if v.is_floating_point() and not p.endswith("low")]:
        leaf.data = leaf.data.double()
    return model


def batches(steps: int = STEPS) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2 * ROWS, WIDTH, dtype=torch.float64) for _ in range(steps)]


# ------------------------------------------------------------------ plain torch


def aggregate(old: Tensor, each: list[Tensor], rule: str | None, weights: list[int]) -> Tensor:
    rule = rule or ("mean" if old.is_floating_point() else "rank0")
    if rule == "sum":
        return old + sum(new - old for new in each)
    if rule == "mean":
        return sum(new * w for new, w in zip(each, weights, strict=True)) / sum(weights)
    return each[0]


def plain(
    model: nn.Module,
    ranks: int,
    accumulate: int = 1,
    rule: str | None = None,
    cut: Callable[[Tensor], list[Tensor]] | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], list[float]]:
    """DDP's arithmetic in one process: each rank a copy of the module; gradients and statistics averaged."""
    model, losses = copy.deepcopy(model), []
    trained = [p for p, v in model.named_parameters() if v.requires_grad]
    for batch in batches(steps):
        parts = cut(batch) if cut else batch.chunk(ranks)
        replicas = [copy.deepcopy(model) for _ in parts]
        total = 0.0
        for replica, part in zip(replicas, parts, strict=True):
            for micro in part.chunk(accumulate):
                loss = replica(micro) / (len(parts) * accumulate)
                loss.backward()
                total += loss.item()
                for buffer in replica.buffers():
                    buffer.detach_()
        states = [r.state_dict(keep_vars=True) for r in replicas]
        with torch.no_grad():
            for path, leaf in model.state_dict().items():
                if path in trained:
                    leaf.sub_(sum(s[path].grad for s in states), alpha=LR)
                else:
                    leaf.copy_(aggregate(leaf, [s[path] for s in states], rule, [len(p) for p in parts]))
        losses.append(total)
    return {p: v.clone() for p, v in model.state_dict().items()}, losses


# ------------------------------------------------------------------ the same, sharded


PRESETS = {
    "ddp": ("no_shard", {"shard": 2}),
    "zero2": ("zero2", {"shard": 2}),
    "full_shard": ("full_shard", {"shard": 2}),
    "hybrid": ("hybrid_shard", {"replicate": 2, "shard": 1}),
}


def training(
    model: nn.Module,
    mesh: fs.Mesh,
    preset: str,
    policy: Mapping[str, Any] = {},
    change: Callable[[str, LayoutSpec], LayoutSpec] = lambda path, spec: spec,
    **options: Any,
) -> Any:
    """A step of the module, and the parameters that it starts from."""
    apply, params = fs.make_functional(copy.deepcopy(model))
    specs = getattr(fs.presets, preset)(params, mesh, **policy)
    specs = {p: change(p, s) for p, s in specs.items()}
    options = {"backend": "eager", "optimizer": fs.optim.sgd(LR), **options}
    return fs.shard_step(lambda p, x: apply(p, x), specs, mesh=mesh, **options), params, specs


def run(
    rank: int,
    mesh: fs.Mesh,
    made: Any,
    cut: Callable[[Tensor], list[Tensor]] | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], list[float]]:
    step, params, specs = made
    state, losses = step.init(params), []
    for batch in batches(steps):
        parts = cut(batch) if cut else batch.chunk(mesh.data_size)
        state, metrics = step(state, parts[rank])
        losses.append(metrics["loss"].item())
    return fs.unshard(state.params, specs, mesh), losses


def simulated(
    model: nn.Module, preset: str, axes: Mapping[str, int] = {"shard": 2}, cut: Any = None, **options: Any
) -> list[tuple[dict[str, Tensor], list[float]]]:
    mesh = fs.make_mesh(**axes, simulated=True)
    made = training(model, mesh, preset, **options)
    return fs.simulate(mesh, lambda rank: run(rank, mesh, made, cut))


def same(got: tuple[Any, Any], expected: tuple[Any, Any], atol: float = ATOL) -> None:
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=atol)
    for path, leaf in got[0].items():
        torch.testing.assert_close(
            leaf.double(), expected[0][path].double(), rtol=0, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )
