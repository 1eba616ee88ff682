"""Meshes: a model of leaves of awkward shapes, trained by an optimizer in any layout, and without any.

Leaves are of uneven rows, of fewer rows than ranks, a vector, a scalar, an embedding, a stack of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optimizers
import sharded
import torch
from foreign import FOREIGN
from models import Model
from torch import Tensor

import fnshard as fs
from fnshard.checkpoint.state_leaves import state_leaves
from fnshard.compiler.ir.values import MASTER
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.optim import Optimizer, soap
from fnshard.optim.optimizer import Step, apply_updates, init_slots

F64 = torch.float64
ROWS, STEPS = 16, 3
# Two models: both have an embedding and a vector, one a matrix and a scalar, one a stack and few rows.
SHAPES = {
    "wide": {"embed.weight": (7, 5), "a.weight": (5, 8), "norm.bias": (8,), "scale": (), "empty": (0, 3)},
    "stacked": {"embed.weight": (7, 5), "a.short": (3, 5), "norm.bias": (5,), "experts.w": (4, 3, 5)},
}
# One has leaves of complex numbers, which optimizers see as pairs.
COMPLEX = {"embed.weight": (7, 5), "norm.bias": (5,), "z.mix": (5, 3), "z.scale": ()}
# Gradients have the rank of both their sides: else rounding decides about a part of SOAP's bases.
SQUARE = {
    "wide": {"embed.weight": (7, 5), "a.weight": (5, 5), "norm.bias": (5,), "scale": (), "empty": (0, 3)},
    "stacked": {"embed.weight": (7, 5), "a.short": (3, 3), "norm.bias": (5,), "experts.w": (4, 3, 3)},
}


def rank_signs(lr: float) -> Optimizer:
    """Make an optimizer of integers: a row's elements move by their order, to the side that a count says."""

    def update(path, grad, slots, param, step):
        if param.dim() != 2:
            return -lr * grad / (grad.norm() + 1e-6), {"order": slots["order"]}
        order = (grad @ grad.T @ grad).argsort(-1)
        side = 1 - 2 * ((grad > 0).sum() & 1)
        change = side * (order - slots["order"] + 0.5) * grad.abs().sum() / grad.numel()
        return -lr * change.to(grad.dtype), {"order": order}

    init = lambda path, param: {"order": torch.zeros_like(param, dtype=torch.int64)}  # noqa: E731
    return Optimizer(f"rank_signs({lr})", init, update, rules=())


EVERY: Mapping[str, Optimizer] = {
    "rank_signs": rank_signs(0.01),
    **{name: own for name, own in optimizers.ALL.items() if name not in ("clip", "ema")}, **FOREIGN,
    "clip_soap_ema": optimizers.chain(
        optimizers.clip_by_global_norm(0.5), soap(0.05, precondition_frequency=1), optimizers.ema(0.9)
    ),
}  # fmt: skip

# Axes, and what a preset's specs are told of them.
MESHES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "one": ({"shard": 1}, {}),
    "two": ({"shard": 2}, {}),
    "four": ({"shard": 4}, {}),
    "hybrid": ({"replicate": 2, "shard": 2}, {}),
    "tensor": (
        {"shard": 2, "tensor": 2},
        {"tensor": {"embed.weight": fs.P("tensor"), "a.weight": fs.P(None, "tensor"),
                    "a.short": fs.P(None, "tensor")}},
    ),
    "sides": (
        {"shard": 2, "tensor": 2},
        {"tensor": {"a.weight": fs.P(None, fs.Fused("tensor", 2)), "a.short": fs.P(None, "tensor")}},
    ),
    "experts": ({"shard": 2, "expert": 2}, {"expert": "expert"}),
    "context": ({"shard": 2, "context": 2}, {}),
    "stages": ({"pipeline": 2, "shard": 2}, {}),
}  # fmt: skip
# Presets: those whose names are not here are of `fs.presets`. With replicas, `full_shard` lies over two
# axes on one dim, and of `hybrid_shard` over one.
PRESETS = ("full_shard", "hybrid_shard", "shard_grad_op", "zero2", "zero1", "no_shard")
TIERS: Mapping[str, Mapping[str, str]] = {
    "device": {},
    "host": {"optimizer_memory": "host"},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "all_host": {"memory": "host", "optimizer_memory": "host"},
}
ACCUMULATE: Mapping[str, Mapping[str, Any]] = {
    "once": {},
    "reduce": {"accumulate": 2, "accumulate_mode": "reduce"},
    "local": {"accumulate": 2, "accumulate_mode": "local"},
    "breadth": {"accumulate": 2, "micro_order": "breadth"},
}


def shapes_of(name: str, leaves: str) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the leaves that an optimizer is tried on."""
    return COMPLEX if leaves == "complex" else (SQUARE if "soap" in name else SHAPES)[leaves]


def make_model(shapes: Mapping[str, Sequence[int]], skips: bool = False) -> Model:
    """Return a model of leaves of these shapes; `skips`: the gradients of the second batch are not finite."""
    generator = torch.Generator().manual_seed(0)
    params = {
        p: torch.randn(s, dtype=torch.complex128 if p.startswith("z.") else F64, generator=generator)
        for p, s in shapes.items()
    }

    def loss(params: Any, x: Tensor) -> fs.Mean:
        x = x.to(params["embed.weight"].dtype)
        hidden = torch.tanh(x @ params["embed.weight"])  # [B, 5]
        if "a.weight" in params:
            hidden = torch.tanh(hidden @ params["a.weight"])
        hidden = hidden + params["norm.bias"]
        total = hidden.square().sum()
        if "scale" in params:
            total = total + hidden.sin().sum() * params["scale"] + params["empty"].sum()
        if "z.mix" in params:
            turned = hidden.to(torch.complex128) @ params["z.mix"] * params["z.scale"]
            total = total + turned.real.sin().sum() + turned.imag.square().sum()
        if "a.short" in params:
            short, experts = params["a.short"], params["experts.w"]
            out = hidden[:, : short.shape[1]] @ short.T  # [B, 3]
            each = torch.einsum("bi,eio->beo", out, experts)
            total = total + out.sin().sum() + each.sin().sum()
        return fs.Mean(total, torch.tensor(float(len(x))))

    def batch(seed: int) -> tuple[Tensor]:
        x = torch.randn(ROWS, 7, dtype=F64, generator=torch.Generator().manual_seed(100 + seed))
        if skips and seed == 1:
            x[3] = torch.inf
        return (x,)

    return Model(params, loss, batch)


@dataclass
class Result:
    """A result of training: whole leaves and whole slots, by path and name."""

    params: dict[str, Tensor]
    slots: dict[str, dict[str, Tensor]]


def train_whole(name: str, leaves: str = "wide", skips: bool = False, steps: int = STEPS) -> Result:
    """Return what an optimizer makes of whole leaves, in plain torch."""
    optimizer, model = EVERY[name], make_model(shapes_of(name, leaves), skips)
    pairs = {path for path, value in model.params.items() if value.is_complex()}
    params = {p: torch.view_as_real(v) if p in pairs else v for p, v in model.params.items()}
    slots, count = init_slots(optimizer, params), 0
    for batch in model.batches(steps):
        own = {path: value.clone().requires_grad_() for path, value in params.items()}
        mean = model.loss({p: torch.view_as_complex(v) if p in pairs else v for p, v in own.items()}, *batch)
        loss = mean.total / mean.count
        grads = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
        if not all(g.isfinite().all() for g in grads.values()):
            continue
        step = Step(torch.tensor(count), optimizers.norm_of(grads))
        some = {path: grad for path, grad in grads.items() if grad.numel()}  # not every rule takes none
        new = apply_updates(optimizer, some, slots, params, step)
        params, slots = params | new[0], slots | new[1]
        count += 1
    return Result(params, slots)


def make_step(
    name: str, mesh: fs.Mesh, preset: str, policy: Mapping[str, Any], leaves: str = "wide",
    skips: bool = False, **options: Any,
) -> tuple[Any, Model]:  # fmt: skip
    """Return a step of the model in a layout, and the model."""
    model = make_model(shapes_of(name, leaves), skips)
    if "tensor" in policy:
        own = {path: split for path, split in policy["tensor"].items() if path in model.params}
        policy = {**policy, "tensor": own}
    specs = sharded.specs_of(model, preset, mesh, **policy)
    scale = {"loss_scale": "dynamic"} if skips else {}
    return sharded.make_step(mesh, model, specs, EVERY[name], **scale, **options), model


def train_ranks(
    name: str, mesh: str, preset: str, tier: str = "device", leaves: str = "wide", skips: bool = False,
    dtypes: Mapping[str, torch.dtype] | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Return what simulated ranks make of the same, put together; what several have must agree."""
    axes, layouts = MESHES[mesh]
    made = fs.make_mesh(**axes, simulated=True)
    step, model = make_step(
        name, made, preset, {**layouts, **TIERS[tier], **(dtypes or {})}, leaves, skips, **options
    )
    return put_together([parts for _, parts in fs.simulate(made, lambda rank: run_rank(made, step, model))])


def run_rank(
    mesh: fs.Mesh, step: Any, model: Model, steps: Sequence[int] = range(STEPS), state: Any = None
) -> tuple[fs.TrainState, dict[str, Tensor]]:
    """Run steps on this rank's rows, and return the state and this rank's parts of it."""
    state = step.init(model.params) if state is None else state
    for seed in steps:
        state, _ = step(state, *sharded.part(model.batch(seed), mesh.data_rank, mesh.data_size))
    return state, whole_parts(state)


def whole_parts(state: fs.TrainState) -> dict[str, Tensor]:
    """Return whole leaves and slots by name, as this rank's parts of them say: the rest is NaN."""
    specs, mesh = state.where
    out = {}
    for name, leaf in state_leaves(state, ResolvedSpecs.of(specs), mesh).items():
        if name.startswith("loss_scale/"):
            continue
        out[name] = torch.full(leaf.shape, torch.nan, dtype=F64)
        for start, part in leaf.parts(mesh):
            assert not part.isnan().any(), f"{name}: NaN"
            where = tuple(slice(at, at + n) for at, n in zip(start, part.shape, strict=True))
            out[name][where] = part.double()
    return out


def put_together(parts: Sequence[Mapping[str, Tensor]]) -> Result:
    """Return whole leaves of what ranks have of them; where two have some, these agree."""
    out = Result({}, {})
    for name in dict.fromkeys(name for part in parts for name in part):
        whole, *others = [part[name] for part in parts if name in part]
        for own in others:
            both = ~whole.isnan() & ~own.isnan()
            assert torch.equal(whole[both], own[both]), f"{name}: ranks have other values"
            whole = torch.where(whole.isnan(), own, whole)
        assert not whole.isnan().any(), f"{name}: no rank has all of it"
        kind, _, rest = name.partition("/")
        if kind == "params":
            out.params[rest] = whole
            continue
        path, _, slot = rest.rpartition("/")
        if slot == MASTER:
            narrow = out.params[path]
            as_stored = whole if torch.equal(whole, narrow) else whole.bfloat16().double()
            assert torch.equal(as_stored, narrow), f"{name}: it is not the parameter"
        else:
            out.slots.setdefault(path, {})[slot] = whole
    return out


def assert_same(got: Result, expected: Result, atol: float = 1e-10) -> None:
    """Compare all parameters and all slots; vectors of a basis, and `mu` in it, may point to either side."""
    want, have = (
        {f"params/{p}": v for p, v in result.params.items()}
        | {
            f"{p}/{n}": v.abs() if "left_basis" in own and (n == "mu" or n.endswith("_basis")) else v
            for p, own in result.slots.items() for n, v in own.items()
        }
        for result in (expected, got)
    )  # fmt: skip
    assert have.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            have[name], value.double(), rtol=atol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
