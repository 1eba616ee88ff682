"""The optimizers `sgd`, `adamw` and others, with clipping, averages, chains and choices by path.

Each is a function of one whole leaf in plain torch; the contract is `fnshard.optim.optimizer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, is_number, leaves
from fnshard.optim.fused import ADAMW, SGD, SGD_MOMENTUM
from fnshard.optim.optimizer import Optimizer, Slots, Step, Update
from fnshard.optim.schedules import (
    ByPath,
    PathRules,
    Rate,
    RateSchedule,
    as_schedule,
    call_text,
    counterpart,
    rate_first,
)

__all__ = [
    "OPTIMIZERS", "adamw", "by_path", "chain", "clip_by_global_norm", "ema", "ema_params", "lars", "lion",
    "register", "schedule_free_adamw", "sgd",
]  # fmt: skip


@rate_first
def sgd(
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
) -> Optimizer:
    """Make `torch.optim.SGD` with dampening 0: weight decay is added to the gradient (L2).

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.

    >>> sgd(0.1, weight_decay=[("*norm*", 0.0), ("*", 0.01)])
    sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=[('*norm*', 0.0), ('*', 0.01)], lr_scale=1.0)
    """
    name = call_text(
        "sgd", lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, lr_scale=lr_scale
    )
    check_fractions(name, momentum=momentum)
    if nesterov and momentum == 0:
        raise OptimizerError(f"{name}: nesterov needs a momentum above 0.")
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(param)} if momentum else {}

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        lr = step.host(rate) * scales(path)
        if momentum == 0:
            return SGD(param, grad, lr, decays(path)), {}
        trace = slots["momentum"]
        update, trace = SGD_MOMENTUM(param, grad, trace, lr, decays(path), momentum, nesterov)
        return update, {"momentum": trace}

    return Optimizer(name, init, update, rules=(decays, scales), values=lambda step: {"lr": step.host(rate)})


@rate_first
def lars(
    lr: Rate,
    momentum: float = 0.9,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
    *,
    trust: float = 1e-3,
    eps: float = 1e-8,
) -> Optimizer:
    """Make `sgd` for large batches (You, Gitman and Ginsburg 2017; apex).

    The gradient plus `weight_decay * param` is scaled by `trust * |param| / (|grad| + weight_decay * |param|
    + eps)`, with norms of whole leaves.

    Leaves of one dim, and those that are zero or get no gradient, are not scaled. `weight_decay` and
    `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.

    >>> lars(0.1).init("w", torch.ones(2, 2))["momentum"].shape
    torch.Size([2, 2])
    """
    name = call_text(
        "lars", lr=lr, momentum=momentum, weight_decay=weight_decay, lr_scale=lr_scale, trust=trust, eps=eps
    )
    check_fractions(name, momentum=momentum)
    if not (trust > 0 and eps > 0):
        raise OptimizerError(f"{name}: trust and eps are above 0.")
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        decay = decays(path)
        change = grad + decay * param if decay else grad
        # Leaves of one dim, biases and norms, are not scaled.
        if param.dim() > 1:
            param_norm, grad_norm = param.square().sum().sqrt(), grad.square().sum().sqrt()
            ratio = trust * param_norm / (grad_norm + decay * param_norm + eps)
            change = change * torch.where((param_norm > 0) & (grad_norm > 0), ratio, 1.0)
        trace = momentum * slots["momentum"] + change
        return -step.host(rate) * scales(path) * trace, {"momentum": trace}

    return Optimizer(
        name,
        lambda path, param: {"momentum": torch.zeros_like(param)},
        update,
        rules=(decays, scales),
        values=lambda step: {"lr": step.host(rate)},
    )


@rate_first
def adamw(
    lr: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: ByPath = 1e-2,
    lr_scale: ByPath = 1.0,
    *,
    betas: tuple[float, float] | None = None,
) -> Optimizer:
    """Make `torch.optim.AdamW`, with its numerics and defaults: the decay is `lr * weight_decay * param`.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.
    `betas=(b1, b2)` is torch's spelling of the two. The decay shrinks a leaf that `fn` does not read; torch
    skips it.

    >>> adamw(3e-4, weight_decay=0.1)
    adamw(lr=0.0003, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.1, lr_scale=1.0)
    """
    # `betas` is another spelling of b1 and b2, which must then have their defaults.
    if betas is not None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise OptimizerError(f"adamw: betas={betas!r} are not two numbers, as in betas=(0.9, 0.95).")
        if (b1, b2) != (0.9, 0.999):
            raise OptimizerError(
                f"adamw: betas={betas!r} and b1={b1!r}, b2={b2!r}.", fix="give one or the other."
            )
        b1, b2 = betas
    name = call_text("adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, lr_scale=lr_scale)
    check_fractions(name, b1=b1, b2=b2)
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        return {"mu": torch.zeros_like(param), "nu": torch.zeros_like(param)}

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        bias1 = step.host(lambda count: 1 - b1 ** (int(count) + 1))
        bias2 = step.host(lambda count: (1 - b2 ** (int(count) + 1)) ** 0.5)
        update, mu, nu = ADAMW(
            param, grad, slots["mu"], slots["nu"], step.host(rate) * scales(path), step.count, bias1, bias2,
            decays(path), b1, b2, eps,
        )  # fmt: skip
        return update, {"mu": mu, "nu": nu}

    return Optimizer(name, init, update, rules=(decays, scales), values=lambda step: {"lr": step.host(rate)})


@rate_first
def lion(
    lr: Rate = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
) -> Optimizer:
    """Make Lion (Chen et al. 2023, algorithm 2): the sign of a mean of momentum and gradient; one slot.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins; the
    decay is `lr * weight_decay * param`. Rates are a third to a tenth of AdamW's, and decays larger by as
    much.

    >>> lion(1e-4).init("w", torch.ones(2))
    {'mu': tensor([0., 0.])}
    """
    name = call_text("lion", lr=lr, b1=b1, b2=b2, weight_decay=weight_decay, lr_scale=lr_scale)
    check_fractions(name, b1=b1, b2=b2)
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        decay = decays(path)
        change = slots["mu"].lerp(grad, 1 - b1).sign()
        change = change + decay * param if decay else change
        return -step.host(rate) * scales(path) * change, {"mu": slots["mu"].lerp(grad, 1 - b2)}

    return Optimizer(
        name,
        lambda path, param: {"mu": torch.zeros_like(param)},
        update,
        rules=(decays, scales),
        values=lambda step: {"lr": step.host(rate)},
    )


@rate_first
def schedule_free_adamw(
    lr: Rate = 2.5e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
) -> Optimizer:
    """Make AdamW without a schedule (Defazio et al. 2024, schedulefree's `AdamWScheduleFree`); two slots.

    Gradients are taken between a fast sequence and its average, which `fs.averaged(state)` gives: evaluate
    and export that. A warm-up is the rate's, a function of the step.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.

    >>> schedule_free_adamw(1e-3).init("w", torch.ones(2))
    {'ema': tensor([1., 1.]), 'nu': tensor([0., 0.])}
    """
    name = call_text(
        "schedule_free_adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, lr_scale=lr_scale
    )
    check_fractions(name, b1=b1, b2=b2)
    if not b1 > 0:
        raise OptimizerError(f"{name}: b1 must be above 0: the average would have no part in the parameters.")
    rate, decays, scales = hyperparameters(lr, weight_decay, lr_scale)

    sums = [(0.0, 0.0)]  # by step: the largest rate so far, and the sum of its squares
    lock = threading.Lock()  # simulated ranks, and the host's worker, are threads

    def weigh_newest(count: Tensor) -> float:
        """Return the newest point's weight in the average; points weigh as the largest rate squared."""
        with lock:
            while len(sums) < int(count) + 2:
                most = max(sums[-1][0], float(rate(torch.tensor(len(sums) - 1))))
                sums.append((most, sums[-1][1] + most**2))
            most, total = sums[int(count) + 1]
        return most**2 / total if total else 0.0

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        # The average has the name under which `fs.averaged` finds it.
        return {"ema": param.clone(), "nu": torch.zeros_like(param)}

    def update(path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        decay, bias = decays(path), step.host(lambda count: (1 - b2 ** (int(count) + 1)) ** 0.5)
        nu = (slots["nu"] * b2).addcmul(grad, grad, value=1 - b2)
        change = grad / (nu.sqrt() / bias + eps)
        change = change + decay * param if decay else change
        # The fast sequence has no slot: parameters lie between it and the average, and so determine it.
        fast = (param - b1 * slots["ema"]) / (1 - b1) - step.host(rate) * scales(path) * change
        average = slots["ema"] + step.host(weigh_newest) * (fast - slots["ema"])
        return (1 - b1) * fast + b1 * average - param, {"ema": average, "nu": nu}

    return Optimizer(name, init, update, rules=(decays, scales), values=lambda step: {"lr": step.host(rate)})


# ------------------------------------------------------------------ around an optimizer


@dataclass(frozen=True, eq=False)
class Clip:
    """The update of `clip_by_global_norm`: gradients become shorter, and so does their norm."""

    max_norm: float

    def factor(self, step: Step) -> Tensor:
        """Return the factor of gradients."""
        return torch.clamp(self.max_norm / (step.global_norm + 1e-6), max=1.0)

    def __call__(self, path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        return grad * self.factor(step), {}


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Make `torch.nn.utils.clip_grad_norm_`: all gradients times `min(1, max_norm / (norm + 1e-6))`.

    It goes before the optimizer in a `chain`. The metric `grad_norm` is the norm before clipping.
    """
    name = call_text("clip_by_global_norm", max_norm=max_norm)
    if not is_number(max_norm) or not max_norm > 0:
        raise OptimizerError(f"{name}: the norm must be a number above 0.")
    return Optimizer(
        name,
        lambda path, param: {},
        Clip(max_norm),
        rules=(),
        values=lambda step: {"grad_norm": step.global_norm},
    )


@dataclass(frozen=True, eq=False)
class Average:
    """The update of `ema`, which passes the update on unchanged, and averages the new parameters."""

    decay: RateSchedule

    def __call__(self, path: str, update: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        weight = (1 - step.host(self.decay)).to(param.dtype)
        return update, {"ema": slots["ema"].lerp(param + update, weight)}


def ema(decay: Rate) -> Optimizer:
    """Keep `decay * average + (1 - decay) * new parameters`, from the initial ones on.

    It goes last in a `chain`; evaluate, save or export `fs.averaged(state)`. The average has the optimizer's
    dtype: in bf16 it would stand still at a decay of 0.999.

    Args:
        decay: at least 0 and below 1, or a function of how many updates were made before, which warms it up
            (`lambda step: min(0.999, (1 + step) / (10 + step))`, as Adam-trained averages of TensorFlow and
            timm do) or raises it (BYOL's and DINO's cosine).

    >>> chain(sgd(0.1), ema(lambda step: (1 + step) / (10 + step))).init("w", torch.zeros(2)).keys()
    dict_keys(['ema'])
    """
    name = call_text("ema", decay=decay)
    if not callable(decay):
        check_fractions(name, decay=decay)
    return Optimizer(name, lambda path, param: {"ema": param.clone()}, Average(as_schedule(decay)), rules=())


def ema_params(slots: Mapping[str, Slots], name: str = "ema") -> dict[str, Tensor]:
    """Return the averaged parameters from an optimizer's state, in its layout; see `fs.averaged`."""
    wrong = [
        f"params[{path!r}] has {', '.join(leaf_slots) or 'none'}"
        for path, leaf_slots in slots.items()
        if name not in leaf_slots
    ]
    if wrong:
        raise OptimizerError(
            f"{leaves(len(wrong))} without a slot {name!r}:", wrong, "end the chain with ema(decay)."
        )
    return {path: leaf_slots[name] for path, leaf_slots in slots.items()}


# ------------------------------------------------------------------ several in order


@dataclass(frozen=True, eq=False)
class Chain:
    """The update of `chain`, in which each member takes the update of the one before as its gradient."""

    members: tuple[Optimizer, ...]

    def init(self, path: str, param: Tensor) -> dict[str, Tensor]:
        """Return the slots of all members, by the chain's names."""
        states = [member.init(path, param) for member in self.members]
        renames = self.name_slots([list(state) for state in states])
        out: dict[str, Tensor] = {}
        for state, rename in zip(states, renames, strict=True):
            out.update({rename[name]: slot for name, slot in state.items()})
        return out

    def name_slots(self, slot_names: Sequence[Sequence[str]]) -> list[dict[str, str]]:
        """Return `{name: name in the chain}` of each member's slots: a name that is taken gets a number."""
        counts: dict[str, int] = {}
        renames: list[dict[str, str]] = []
        for names in slot_names:
            rename: dict[str, str] = {}
            for name in names:
                counts[name] = counts.get(name, 0) + 1
                rename[name] = name if counts[name] == 1 else f"{name}_{counts[name]}"
            renames.append(rename)
        return renames

    def __call__(self, path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step) -> Update:
        # Only the names of slots are asked for, and a tensor on meta takes no memory.
        like = torch.empty_like(param, device="meta")
        renames = self.name_slots([list(member.init(path, like)) for member in self.members])
        new: dict[str, Tensor] = {}
        for member, rename in zip(self.members, renames, strict=True):
            state = {name: slots[name_in_chain] for name, name_in_chain in rename.items()}
            grad, changed = member.update(path, grad.to(param.dtype), state, param, step)
            new.update({rename[name]: value for name, value in changed.items()})
            # The next member sees the norm of the gradients that it gets, if that is known.
            if isinstance(member.update, Clip):
                step = replace(step, norm=step.global_norm * member.update.factor(step))
            elif not isinstance(member.update, Average):
                step = replace(step, norm=None)
        return grad, new


def chain(*transforms: Optimizer) -> Optimizer:
    """Apply transforms in order, as Optax does: each takes the update of the one before as its gradient.

    A slot name that is taken gets a number: the second `ema` keeps "ema_2".

    Raises:
        OptimizerError: clipping is not first, or an `ema` is not last. A member that reads `step.global_norm`
            after one that has changed the gradients raises it when it is used.

    >>> chain(clip_by_global_norm(1.0), adamw(3e-4), ema(0.999)).init("w", torch.zeros(2)).keys()
    dict_keys(['mu', 'nu', 'ema'])
    """
    strange = [f"{t!r}" for t in transforms if not isinstance(t, Optimizer)]
    if strange:
        raise OptimizerError(
            "chain takes transforms of fnshard.optim, and these are none:",
            strange,
            "chain(clip_by_global_norm(1.0), adamw(3e-4)); torch.optim's are no pure functions.",
        )
    # A chain within a chain is taken apart.
    members: tuple[Optimizer, ...] = ()
    for transform in transforms:
        members += transform.update.members if isinstance(transform.update, Chain) else (transform,)
    if not members:
        raise OptimizerError("chain() has no members.")

    # Clipping needs the norm of the gradients themselves, and an average the final update.
    clips = [isinstance(member.update, Clip) for member in members]
    averages = [isinstance(member.update, Average) for member in members]
    wrong = [
        f"{member} at {at}"
        for at, member in enumerate(members)
        if (clips[at] and not all(clips[:at])) or (averages[at] and not all(averages[at:]))
    ]
    if wrong:
        raise OptimizerError(
            f"{len(wrong)} member(s) of the chain stand in the wrong place:",
            wrong,
            "clip_by_global_norm(...) first, then one optimizer, ema(...) last.",
        )
    name = f"chain({', '.join(member.name for member in members)})"
    values = lambda step: {k: v for m in members for k, v in m.values(step).items()}  # noqa: E731

    # If a member leaves each leaf to one of several optimizers, there is a chain around each of these.
    at = next((at for at, member in enumerate(members) if member.choose is not None), None)
    if at is not None:
        chain_around = cache(lambda part: chain(*members[:at], part, *members[at + 1 :]))
        choose = lambda path, shape: chain_around(members[at].choose(path, shape))  # noqa: E731
        return replace(choose_by(name, choose), rules=members[at].rules, values=values)

    # Leaves are alike to the chain if they are alike to each member; one without rules does not say.
    if any(member.rules is None for member in members):
        rules = None
    else:
        rules = tuple(rule for member in members for rule in member.rules)
    combined = Chain(members)
    return Optimizer(name, combined.init, combined, rules=rules, values=values)


def check_kind(optimizer: object) -> None:
    """Check that `optimizer` is None or an `Optimizer` that has an update rule.

    Raises:
        OptimizerError: it is something else; the error says what to use. Clipping or an average alone would
            add the gradients to the parameters.
    """
    if optimizer is None:
        return
    # An optimizer of torch or optax has a counterpart, which the error names.
    if not isinstance(optimizer, Optimizer):
        if isinstance(optimizer, str):
            kind, fix = repr(optimizer), "optimizer=fs.optim.adamw(3e-4), or another of dir(fs.optim)."
        else:
            kind = getattr(optimizer, "__name__", f"of type {type(optimizer).__name__}")
            fix = counterpart(optimizer)
        raise OptimizerError(f"optimizer= is {kind}, and no optimizer of fs.optim.", fix=fix)

    # An optimizer that leaves each leaf to another has no update rule of its own: check the others.
    if isinstance(optimizer.choose, Choice):
        for part in optimizer.choose.parts:
            check_kind(part)
    if optimizer.choose is not None:
        return

    members = optimizer.update.members if isinstance(optimizer.update, Chain) else (optimizer,)
    if all(isinstance(member.update, Clip | Average) for member in members):
        before = [f"{m}" for m in members if isinstance(m.update, Clip)]
        after = [f"{m}" for m in members if isinstance(m.update, Average)]
        raise OptimizerError(
            f"optimizer={optimizer} has no update rule: it would add gradients to the parameters.",
            fix=f"chain({', '.join([*before, 'adamw(3e-4)', *after])}).",
        )


# ------------------------------------------------------------------ one of several


@dataclass(frozen=True, eq=False)
class Choice:
    """The `choose` of an optimizer that leaves each leaf to `parts[which(path, shape)]`."""

    parts: tuple[Optimizer, ...]
    which: Callable[[str, Sequence[int]], int]

    def __call__(self, path: str, shape: Sequence[int]) -> Optimizer:
        return self.parts[self.which(path, shape)]

    def values(self, step: Step) -> dict[str, Tensor]:
        """Return the metrics of all parts; for the same name, those of the first part."""
        return {key: v for part in reversed(self.parts) for key, v in part.values(step).items()}


def choose_by(name: str, choose: Callable[[str, Sequence[int]], Optimizer]) -> Optimizer:
    """Return an optimizer that leaves each leaf to the one that `choose` returns."""
    return Optimizer(
        name,
        lambda path, param: choose(path, param.shape).init(path, param),
        lambda path, grad, slots, param, step: choose(path, param.shape).update(
            path, grad, slots, param, step
        ),
        choose=choose,
    )


@dataclass(frozen=True)
class PartRules(PathRules):
    """The rules of `by_path`, whose numbers say which of its parts updates a leaf."""

    parts: tuple[Optimizer, ...] = ()

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check the globs, and that a part for matrices gets at least one matrix."""
        super().check(shapes)
        for index, part in enumerate(self.parts):
            part_shapes = {path: shape for path, shape in shapes.items() if int(self(path)) == index}
            choice = part.choose
            # The first part of an optimizer for matrices is the one that updates them.
            if not isinstance(choice, Choice) or not part_shapes:
                continue
            if all(choice.which(path, shape) != 0 for path, shape in part_shapes.items()):
                lines = []
                for path, shape in part_shapes.items():
                    dims = "1 dim" if len(shape) == 1 else f"{len(shape)} dims"
                    lines.append(f"params[{path!r}], of {dims}")
                raise OptimizerError(
                    f"{self.name} gives {part} none of the leaves that it is for:",
                    lines[:12],
                    "name these to another optimizer: muon is for matrices that are no embeddings and heads.",
                )


def by_path(*rules: tuple[str, Optimizer]) -> Optimizer:
    """Update each leaf by the optimizer of the first glob that its path matches, as `optax.multi_transform`.

    For clipping and an `ema` of all leaves, put this into a `chain`.

    Raises:
        OptimizerError: there are no rules, or one is not a pair of a glob and an optimizer; and, once all
            leaves are known, no glob matches some of them, or one is first for none.

    >>> optimizer = by_path(("*bias", sgd(0.1)), ("*", adamw(3e-4)))
    >>> {path: list(optimizer.init(path, torch.zeros(2))) for path in ("bias", "w")}
    {'bias': [], 'w': ['mu', 'nu']}
    """
    wrong: list[str] = []
    for rule in rules:
        is_pair = isinstance(rule, tuple) and len(rule) == 2
        if not is_pair or not isinstance(rule[0], str) or not isinstance(rule[1], Optimizer):
            wrong.append(f"{rule!r}")
    if wrong or not rules:
        raise OptimizerError(
            "by_path takes pairs of a glob and an optimizer:", wrong or ["there are none"],
            'by_path(("*norm*", adamw(3e-4)), ("*", muon(0.02))).',
        )  # fmt: skip
    name = f"by_path({', '.join(f'({glob!r}, {optimizer.name})' for glob, optimizer in rules)})"
    # The number of a leaf by these rules is the index of its optimizer.
    globs = tuple((glob, float(index)) for index, (glob, _) in enumerate(rules))
    part_rules = PartRules(name, globs, parts=tuple(optimizer for _, optimizer in rules))
    choice = Choice(part_rules.parts, lambda path, shape: int(part_rules(path)))
    return replace(choose_by(name, choice), rules=(part_rules,), values=choice.values)


# ------------------------------------------------------------------ by name, and what constructors share

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": sgd, "adamw": adamw, "lion": lion, "schedule_free_adamw": schedule_free_adamw,
}  # fmt: skip


def register(name: str, make: Callable[..., Optimizer]) -> None:
    """Add a function that makes an `Optimizer` to `OPTIMIZERS`, for programs that choose by name.

    (Commands have `conf/shared/optimizer/NAME.yaml`, with a `_target_`.)

    Raises:
        OptimizerError: another optimizer has the name.
    """
    if OPTIMIZERS.setdefault(name, make) is not make:
        raise OptimizerError(f"an optimizer is called {name!r} already.", fix="give yours another name.")


def hyperparameters(
    lr: Rate, weight_decay: ByPath, lr_scale: ByPath
) -> tuple[RateSchedule, PathRules, PathRules]:
    """Return the rate, and by path the weight decay and the factor of the rate."""
    return as_schedule(lr), PathRules.of("weight_decay", weight_decay), PathRules.of("lr_scale", lr_scale)


def check_fractions(name: str, **values: Any) -> None:
    """Check that all values are at least 0 and below 1.

    Raises:
        OptimizerError: names those that are not.
    """
    wrong = [f"{key}={v!r}" for key, v in values.items() if not is_number(v) or not 0 <= v < 1]
    if wrong:
        raise OptimizerError(f"{name}: {', '.join(wrong)} must be at least 0 and below 1.")
