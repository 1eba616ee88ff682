"""Optimizers: `sgd`, `adamw`, clipping, averages and chains; contract: `fnshard.optim.contract`.

Inside are torch's own fused kernels where torch has them and they are right; the mathematics of one
leaf, in plain ops, stands next to each and says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, is_number, leaves
from fnshard.optim.contract import Changed, LeafRule, Optimizer, Slots, StepInfo, SumRule, Tensors
from fnshard.optim.schedules import ByPath, PathRules, Rate, RateSchedule, as_schedule, call_text, rate_first
from fnshard.optim.sums import sum_squares

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
    """`torch.optim.SGD`, dampening 0: weight decay is added to the gradient (L2).

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.

    >>> sgd(0.1, weight_decay=[("*norm*", 0.0), ("*", 0.01)])
    sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=[('*norm*', 0.0), ('*', 0.01)], lr_scale=1.0)
    """
    name = call_text(
        "sgd", lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, lr_scale=lr_scale
    )
    _within(name, momentum=momentum)
    if nesterov and momentum == 0:
        raise OptimizerError(f"{name}: nesterov needs a momentum above 0.")
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)

    def numbers(path, info):
        return rate_of(rate, settings(path)[1], info)

    def leaf(path, grad, slots, param, lr):
        decay, _ = settings(path)
        step = grad + decay * param if decay else grad
        if momentum == 0:
            return -lr * step, {}
        trace = momentum * slots["momentum"] + step
        step = step + momentum * trace if nesterov else trace
        return -lr * step, {"momentum": trace}

    def kernel(params, grads, slots, settings, info):
        decay, scale = settings
        torch._fused_sgd_(
            params, grads, slots.get("momentum", []), lr=_kernel_rate(rate, scale, info),
            weight_decay=decay, momentum=momentum, dampening=0.0, nesterov=nesterov,
            maximize=False, is_first_step=False,
        )  # fmt: skip

    def takes(param: Tensor) -> bool:
        # On CPU, up to torch 2.13 at least, the fused sgd kernel skips whole vectors of fp16 and bf16
        # parameters and spoils their momentum, in silence (pytorch issue 191763).
        return not param.is_cpu or param.dtype in (torch.float32, torch.float64)

    return Optimizer(
        name,
        leaf,
        {"momentum": torch.zeros_like} if momentum else {},
        elementwise=True,
        kernel=kernel,
        takes=takes,
        numbers=numbers,
        **shared,
    )


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
    """`sgd` for large batches: the gradient plus `weight_decay * param` is scaled by `trust * |param| /
    (|grad| + weight_decay * |param| + eps)`, norms of whole leaves (You, Gitman and Ginsburg 2017; apex).

    Leaves of one dim, and those that are zero or get no gradient, are not scaled. Squares are summed over
    ranks (`Optimizer.sums`). `weight_decay` and `lr_scale` are numbers, or `(glob, number)` rules on paths.

    >>> lars(0.1).init({"w": torch.ones(2, 2)})["w"]["momentum"].shape
    torch.Size([2, 2])
    """
    name = call_text(
        "lars", lr=lr, momentum=momentum, weight_decay=weight_decay, lr_scale=lr_scale, trust=trust, eps=eps
    )
    _within(name, momentum=momentum)
    if not (trust > 0 and eps > 0):
        raise OptimizerError(f"{name}: trust and eps are above 0.")
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)

    def squares(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> dict[str, Tensor]:
        both = {"param_square": param, "grad_square": grad} if param.dim() > 1 else {}
        ones = [1] * param.dim()
        return {n: sum_squares([value]).to(param.dtype).reshape(ones) for n, value in both.items()}

    def leaf(path: str, grad: Tensor, slots: Any, param: Tensor, info: StepInfo) -> Changed:
        decay, scale = settings(path)
        step = grad + decay * param if decay else grad
        if param.dim() > 1:
            size, slope = slots["param_square"].sqrt(), slots["grad_square"].sqrt()
            ratio = trust * size / (slope + decay * size + eps)
            step = step * torch.where((size > 0) & (slope > 0), ratio, 1.0)
        trace = momentum * slots["momentum"] + step
        return -rate_of(rate, scale, info).to(param.dtype) * trace, {"momentum": trace}

    return Optimizer(
        name, leaf, {"momentum": torch.zeros_like}, elementwise=False, sums=(squares,), **shared
    )  # fmt: skip


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
    """`torch.optim.AdamW`, its numerics and its defaults: the decay is `lr * weight_decay * param`.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.
    `betas=(b1, b2)` is torch's spelling of the two. The decay shrinks a leaf that `fn` does not read; torch
    skips it.

    >>> adamw(3e-4, weight_decay=0.1)
    adamw(lr=0.0003, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.1, lr_scale=1.0)
    """
    if betas is not None:
        b1, b2 = _pair(betas, b1, b2)
    name = call_text("adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, lr_scale=lr_scale)
    _within(name, b1=b1, b2=b2)
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)

    def biases(info: StepInfo) -> tuple[Tensor, Tensor]:
        count = (info.step + 1).to(torch.float64)
        return 1 - torch.pow(b1, count), (1 - torch.pow(b2, count)).sqrt()

    def numbers(path, info):
        decay, scale = settings(path)
        lr = rate_of(rate, scale, info)
        bias1, bias2 = info.once((leaf, "biases"), lambda: biases(info))
        return -(lr / bias1), bias2, lr * decay

    def leaf(path, grad, slots, param, given):
        size, bias2, shrink = given
        mu = slots["mu"].lerp(grad, 1 - b1)
        nu = (slots["nu"] * b2).addcmul_(grad, grad, value=1 - b2)
        update = mu / (nu.sqrt() / bias2).add_(eps) * size
        return (update - shrink * param if settings(path)[0] else update), {"mu": mu, "nu": nu}

    def kernel(params, grads, slots, settings, info):
        decay, scale = settings
        # The kernel wants one fp32 count per leaf, on its device, and only reads it: all leaves share one.
        device, number = params[0].device, int(info.step) + 1
        count = info.once((leaf, device), lambda: torch.full((), number, dtype=torch.float32, device=device))
        torch._fused_adamw_(
            params, grads, slots["mu"], slots["nu"], [], [count] * len(params),
            lr=_kernel_rate(rate, scale, info), beta1=b1, beta2=b2, weight_decay=decay, eps=eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    slots = {"mu": torch.zeros_like, "nu": torch.zeros_like}
    return Optimizer(name, leaf, slots, elementwise=True, kernel=kernel, numbers=numbers, **shared)


@rate_first
def lion(
    lr: Rate = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: ByPath = 0.0,
    lr_scale: ByPath = 1.0,
) -> Optimizer:
    """Lion (Chen et al. 2023, algorithm 2): the sign of a mean of momentum and gradient; one slot.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins; the
    decay is `lr * weight_decay * param`. Rates are a third to a tenth of AdamW's, decays as much larger.

    >>> lion(1e-4).init({"w": torch.ones(2)})["w"]
    {'mu': tensor([0., 0.])}
    """
    name = call_text("lion", lr=lr, b1=b1, b2=b2, weight_decay=weight_decay, lr_scale=lr_scale)
    _within(name, b1=b1, b2=b2)
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)

    def leaf(path, grad, slots, param, lr):
        decay, _ = settings(path)
        step = slots["mu"].lerp(grad, 1 - b1).sign()
        step = step + decay * param if decay else step
        return -lr * step, {"mu": slots["mu"].lerp(grad, 1 - b2)}

    return Optimizer(
        name,
        leaf,
        {"mu": torch.zeros_like},
        elementwise=True,
        numbers=lambda path, info: rate_of(rate, settings(path)[1], info),
        **shared,
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
    """AdamW without a schedule (Defazio et al. 2024, schedulefree's `AdamWScheduleFree`); two slots.

    Gradients are taken between a fast sequence and its average, which `fs.averaged(state)` gives: evaluate
    and export that. A warm-up is the rate's, a function of the step.

    `weight_decay` and `lr_scale` take a number, or `(glob, number)` rules on paths, first match wins.

    >>> schedule_free_adamw(1e-3).init({"w": torch.ones(2)})["w"]
    {'ema': tensor([1., 1.]), 'nu': tensor([0., 0.])}
    """
    name = call_text(
        "schedule_free_adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, lr_scale=lr_scale
    )
    _within(name, b1=b1, b2=b2)
    if not b1 > 0:
        raise OptimizerError(f"{name}: b1 must be above 0: the average would have no part in the parameters.")
    rate, settings, shared = hyper(lr, weight_decay, lr_scale)
    sums = [(0.0, 0.0)]  # by step: the largest rate so far, and the sum of its squares

    def share(info: StepInfo) -> Tensor:
        """Of the newest point in the average: points weigh as the square of the largest rate."""
        step = int(info.step)
        while len(sums) < step + 2:
            most = max(sums[-1][0], float(rate(torch.tensor(len(sums) - 1))))
            sums.append((most, sums[-1][1] + most**2))
        most, total = sums[step + 1]
        return torch.tensor(most**2 / total if total else 0.0, dtype=torch.float64)

    def numbers(path, info):
        count = (info.step + 1).to(torch.float64)
        bias = info.once((leaf, "bias"), lambda: (1 - torch.pow(b2, count)).sqrt())
        return rate_of(rate, settings(path)[1], info), info.once((leaf, "share"), lambda: share(info)), bias

    def leaf(path, grad, slots, param, given):
        (lr, part, bias), decay = given, settings(path)[0]
        nu = (slots["nu"] * b2).addcmul_(grad, grad, value=1 - b2)
        step = grad / (nu.sqrt() / bias).add_(eps)
        step = step + decay * param if decay else step
        fast = (param - b1 * slots["ema"]) / (1 - b1) - lr * step
        average = slots["ema"] + part * (fast - slots["ema"])
        return (1 - b1) * fast + b1 * average - param, {"ema": average, "nu": nu}

    slots = {"ema": torch.clone, "nu": torch.zeros_like}
    return Optimizer(name, leaf, slots, elementwise=True, numbers=numbers, **shared)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """`torch.nn.utils.clip_grad_norm_`: all gradients times `min(1, max_norm / (norm + 1e-6))`.

    Needs "global_norm"; goes before the optimizer in a `chain`. Metric `grad_norm`: before clipping.
    """
    name = call_text("clip_by_global_norm", max_norm=max_norm)
    if not is_number(max_norm) or not max_norm > 0:
        raise OptimizerError(f"{name}: the norm must be a number above 0.")

    def factor(info: StepInfo) -> Tensor:
        norm = info.require("global_norm")
        return info.once(factor, lambda: torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    return Optimizer(
        name,
        leaf=lambda path, grad, slots, param, given: (grad * given, {}),
        needs=frozenset({"global_norm"}),
        elementwise=True,
        values=lambda info: {"grad_norm": info.require("global_norm")},
        factor=factor,
        numbers=lambda path, info: factor(info),
    )


def ema(decay: Rate) -> Optimizer:
    """Keeps `decay * average + (1 - decay) * new parameters`, from the initial ones on.

    Goes last in a `chain`; `fs.averaged(state)` is what to evaluate, save or export. The average has the
    optimizer's dtype: in bf16 it would stand still at a decay of 0.999.

    Args:
        decay: at least 0 and below 1, or a function of how many updates were made before, which warms it up
            (`lambda step: min(0.999, (1 + step) / (10 + step))`, as Adam-trained averages of TensorFlow and
            timm do) or raises it (BYOL's and DINO's cosine).

    >>> chain(sgd(0.1), ema(lambda step: (1 + step) / (10 + step))).init({"w": torch.zeros(2)})["w"].keys()
    dict_keys(['ema'])
    """
    name = call_text("ema", decay=decay)
    fixed = not callable(decay)
    if fixed:
        _within(name, decay=decay)
    rate = as_schedule(decay)

    def leaf(path, update, slots, param, given):
        weight = 1 - decay if fixed else 1 - given.to(param.dtype)
        return update, {"ema": slots["ema"].lerp(param + update, weight)}

    def follow(slots: Slots, params: Tensors, info: StepInfo) -> None:
        averages = [slots[path]["ema"] for path in params]
        if averages:
            weight = 1 - (decay if fixed else _kernel_rate(rate, 1.0, info))
            torch._foreach_lerp_(averages, list(params.values()), weight)

    return Optimizer(
        name, leaf, {"ema": torch.clone}, elementwise=True, follow=follow,
        numbers=lambda path, info: () if fixed else rate_of(rate, 1.0, info),
    )  # fmt: skip


def ema_params(slots: Slots, name: str = "ema") -> dict[str, Tensor]:
    """The averaged parameters out of an optimizer's state, in the layout of that state; see `fs.averaged`."""
    bare = [
        f"params[{path!r}] has {', '.join(own_slots) or 'none'}"
        for path, own_slots in slots.items()
        if name not in own_slots
    ]
    if bare:
        raise OptimizerError(
            f"{leaves(len(bare))} without a slot {name!r}:", bare, "end the chain with ema(decay)."
        )
    return {path: own_slots[name] for path, own_slots in slots.items()}


def chain(*transforms: Optimizer) -> Optimizer:
    """Apply transforms in order, as Optax does: each takes the update of the one before as its gradient.

    A slot name that is taken gets a number: the second `ema` keeps "ema_2".

    Raises:
        OptimizerError: a member needs gradient norms after something else than clipping has changed
            the gradients, or one that keeps new parameters (`ema`) is not at the end.

    >>> chain(clip_by_global_norm(1.0), adamw(3e-4), ema(0.999)).init({"w": torch.zeros(2)})["w"].keys()
    dict_keys(['mu', 'nu', 'ema'])
    """
    strange = [f"{t!r}" for t in transforms if not isinstance(t, Optimizer)]
    if strange:
        raise OptimizerError(
            "chain takes transforms of fnshard.optim, and these are none:",
            strange,
            "chain(clip_by_global_norm(1.0), adamw(3e-4)); torch.optim's are no pure functions.",
        )
    for at, transform in enumerate(transforms):
        if transform.which is not None:  # what comes before and after it is around each of its parts
            parts = [chain(*transforms[:at], part, *transforms[at + 1 :]) for part in transform.parts]
            name = f"chain({', '.join(t.name for t in transforms)})"
            return dispatched(name, parts, transform.which)
    members = tuple(m for t in transforms for m in (t.members or (t,)))
    heads = next((i for i, m in enumerate(members) if m.factor is None), len(members))
    tails = next((i for i, m in reversed(list(enumerate(members))) if m.follow is None), -1) + 1
    _check_order(members, heads, tails)
    names = _slot_names(members)
    made = {own[n]: make for m, own in zip(members, names, strict=True) for n, make in m.slots.items()}
    at = next((i for i, m in enumerate(members) if m.whole is not None), None)
    wholes = {} if at is None else {names[at][n]: make for n, make in members[at].whole_slots.items()}

    def views(info: StepInfo) -> list[StepInfo]:
        """The StepInfo of each member: norms are those of its own input, or None."""
        out = []
        for member in members:
            out.append(info)
            if member.factor is not None:
                info = info.scaled(member.factor(info))
            elif member.follow is None:
                info = replace(info, global_norm=None)
        return out

    def numbers(path, info):
        seen = info.once((leaf, "views"), lambda: views(info))
        return tuple(member.given(path, view) for member, view in zip(members, seen, strict=True))

    def whole(path, tensor, state, turn):
        own = {n: state[o] for n, o in names[at].items() if o in state}
        result, new = members[at].whole(path, tensor, own, turn)
        return result, {names[at][n]: value for n, value in new.items()}

    rates = [m.rate for m in members if m.rate is not None]
    before, rounds, leaf = _stages(members, names, {*made, *wholes})

    def in_place(grads: Tensors, slots: Slots, params: Tensors, info: StepInfo) -> None:
        """Factors ride on the gradients' scale, one member updates, the rest follow."""
        view = info.once((leaf, "views"), lambda: views(info))[heads]
        members[heads].apply(grads, _own(slots, names[heads], grads), params, view)
        for member, own in zip(members[tails:], names[tails:], strict=True):
            member.follow(_own(slots, own, grads), {path: params[path] for path in grads}, view)

    owned = {} if at is None else {
        "whole": whole, "whole_slots": wholes, "whole_dims": members[at].whole_dims,
        "turns": members[at].turns, "turn": lambda given: members[at].turn(given[at]),
    }  # fmt: skip
    return Optimizer(
        f"chain({', '.join(m.name for m in members)})",
        leaf,
        made,
        needs=frozenset().union(*(m.needs for m in members)),
        elementwise=joined([m.elementwise for m in members]),
        **owned,
        before=before,
        sums=rounds,
        rate=rates[0] if len(rates) == 1 else None,
        rules=tuple(r for m in members for r in m.rules),
        values=lambda info: {k: v for m in members for k, v in m.values(info).items()},
        settings=lambda path: tuple(m.settings(path) for m in members),
        in_place=in_place if tails - heads == 1 else None,
        members=members,
        numbers=numbers,
    )


def _stages(
    members: Sequence[Optimizer], names: Sequence[Mapping[str, str]], made: Collection[str]
) -> tuple[LeafRule | None, tuple[SumRule, ...], LeafRule]:
    """A chain's `before`, `sums` and `leaf`, which run its members' in turn.

    Args:
        names: of each member's slots in the chain, by its own.
        made: all slots of the chain; what else is among slots has been summed over ranks.
    """

    def state_of(number: int, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {n: slots[o] for n, o in names[number].items() if o in slots}
        return {n: v for n, v in slots.items() if n not in made} | own

    def through(rules: Mapping[int, Any]) -> LeafRule:
        """One rule of each member of these numbers."""

        def rule(path, grad, slots, param, given):
            new: dict[str, Tensor] = {}
            for number, own_rule in rules.items():
                state = state_of(number, slots)
                grad, part = own_rule(path, grad.to(param.dtype), state, param, given[number])
                new.update({names[number][n]: value for n, value in part.items()})
            return grad, new

        return rule

    rules = {number: member.leaf for number, member in enumerate(members)}
    at = next((n for n, member in enumerate(members) if member.whole or member.sums), None)
    if at is None:
        return None, (), through(rules)
    earlier = {n: rule for n, rule in rules.items() if n < at}
    if members[at].whole:
        before = members[at].before or (lambda path, grad, *_: (grad, {}))
        return through(earlier | {at: before}), (), through({n: r for n, r in rules.items() if n >= at})

    def summed(own_rule: SumRule) -> SumRule:
        def rule(path, grad, slots, param, given):
            grad, _ = through(earlier)(path, grad, slots, param, given)
            return own_rule(path, grad.to(param.dtype), state_of(at, slots), param, given[at])

        return rule

    return None, tuple(map(summed, members[at].sums)), through(rules)


def by_path(*rules: tuple[str, Optimizer]) -> Optimizer:
    """Each leaf by the optimizer of the first glob that its path matches, as `optax.multi_transform`.

    What goes around all of them, clipping first and `ema` last, is a `chain` with this in it.

    Raises:
        OptimizerError: no rules, or something else than pairs of a glob and an optimizer; and with all
            leaves: some that no glob matches, or a glob that is first for none.

    >>> optimizer = by_path(("*bias", sgd(0.1)), ("*", adamw(3e-4)))
    >>> slots = optimizer.init({"bias": torch.zeros(2), "w": torch.ones(2)})
    >>> {path: list(own) for path, own in slots.items()}
    {'bias': [], 'w': ['mu', 'nu']}
    """
    wrong = [
        f"{rule!r}" for rule in rules
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)
                and isinstance(rule[1], Optimizer))
    ]  # fmt: skip
    if wrong or not rules:
        raise OptimizerError(
            "by_path takes pairs of a glob and an optimizer:", wrong or ["there are none"],
            'by_path(("*norm*", adamw(3e-4)), ("*", muon(0.02))).',
        )  # fmt: skip
    name = f"by_path({', '.join(f'({glob!r}, {optimizer.name})' for glob, optimizer in rules)})"
    chosen = PathRules.of(name, [(glob, float(index)) for index, (glob, _) in enumerate(rules)])
    parts = [optimizer for _, optimizer in rules]
    return replace(dispatched(name, parts, lambda path, dims: int(chosen(path))), rules=(chosen,))


def dispatched(name: str, parts: Sequence[Optimizer], which: Callable[[str, int], int]) -> Optimizer:
    """An optimizer that leaves each leaf to `parts[which(path, dims)]`."""

    def leaf(*_: Any) -> Any:
        raise OptimizerError(f"{name} has no update of its own.")

    return Optimizer(
        name, leaf,
        needs=frozenset().union(*(part.needs for part in parts)),
        elementwise=joined([part.elementwise for part in parts]),
        values=lambda info: {k: v for part in reversed(parts) for k, v in part.values(info).items()},
        settings=lambda path: tuple(
            (index := which(path, dims), parts[index].settings(path)) for dims in range(5)
        ),
        parts=tuple(parts), which=which,
    )  # fmt: skip


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
        raise OptimizerError(f"an optimizer is called {name!r} already; give yours another name.")


def joined(each: Sequence[bool | None]) -> bool | None:
    """Whether all are elementwise: none if one is not, and unknown if one is unknown."""
    return False if False in each else None if None in each else True


def _check_order(members: Sequence[Optimizer], heads: int, tails: int) -> None:
    if not members:
        raise OptimizerError("chain() has no members.")
    late = [
        f"{m} at {i}, needs global_norm"
        for i, m in enumerate(members)
        if i > heads and "global_norm" in m.needs
    ]
    early = [f"{m} at {i}" for i, m in enumerate(members[:tails]) if m.follow is not None]
    several = [f"{m} at {i}" for i, m in enumerate(members) if m.whole or m.sums]
    if len(several) > 1:
        raise OptimizerError("one member of a chain may look at whole leaves:", several, "by_path(...).")
    if late or early:
        raise OptimizerError(
            f"{len(late) + len(early)} member(s) of the chain stand in the wrong place:",
            late + early,
            "clip_by_global_norm(...) first, then one optimizer, ema(...) last.",
        )


def _slot_names(members: Sequence[Optimizer]) -> list[dict[str, str]]:
    """For each member, a map from its slot names to the chain's."""
    count: dict[str, int] = {}
    out = []
    for member in members:
        own = {}
        for name in (*member.slots, *member.whole_slots):
            count[name] = count.get(name, 0) + 1
            own[name] = name if count[name] == 1 else f"{name}_{count[name]}"
        out.append(own)
    return out


def _own(slots: Slots, own: Mapping[str, str], paths: Tensors) -> Slots:
    if all(name == outer for name, outer in own.items()):
        return slots
    return {path: {n: slots[path][o] for n, o in own.items() if o in slots[path]} for path in paths}


def hyper(
    lr: Rate, weight_decay: ByPath, lr_scale: ByPath
) -> tuple[RateSchedule, Callable[[str], tuple[float, float]], dict[str, Any]]:
    """A rate, a leaf's (decay, scale of the rate) by its path, and what an `Optimizer` has by these."""
    decays, scales = PathRules.of("weight_decay", weight_decay), PathRules.of("lr_scale", lr_scale)
    rate, settings = as_schedule(lr), cache(lambda path: (decays(path), scales(path)))
    values = lambda info: {"lr": rate_of(rate, 1.0, info)}  # noqa: E731
    return rate, settings, {"rate": rate, "rules": (decays, scales), "settings": settings, "values": values}


def rate_of(rate: RateSchedule, scale: float, info: StepInfo) -> Tensor:
    """Of this step, times a leaf's scale; made once a step."""
    base = info.once(rate, lambda: rate(info.step))
    return base if scale == 1 else info.once((rate, scale), lambda: base * scale)


def _kernel_rate(rate: RateSchedule, scale: float, info: StepInfo) -> float:
    """A number, which is exact: a tensor is read through an fp32 pointer by torch's CUDA kernels."""
    return info.once((rate, scale, "number"), lambda: float(rate_of(rate, scale, info)))


def _within(name: str, **values: float) -> None:
    wrong = [
        f"{key}={value!r}" for key, value in values.items() if not is_number(value) or not 0 <= value < 1
    ]
    if wrong:
        raise OptimizerError(f"{name}: {', '.join(wrong)} must be at least 0 and below 1.")


def _pair(betas: object, b1: float, b2: float) -> tuple[float, float]:
    """`betas` of two numbers, which `b1` and `b2` do not say as well."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptimizerError(f"adamw: betas={betas!r} are not two numbers, as in betas=(0.9, 0.95).")
    if (b1, b2) != (0.9, 0.999):
        raise OptimizerError(f"adamw: betas={betas!r} and b1={b1!r}, b2={b2!r}: give one or the other.")
    return tuple(betas)
