"""An optimizer is the update of one whole leaf, in plain torch; `compiler.update` derives how it is sharded.

    def sign_sgd(lr):
        def update(path, grad, slots, param, step):
            mean = slots["mean"].lerp(grad, 0.1)
            return -step.host(lr) * mean.sign() * param.norm(), {"mean": mean}

        init = lambda path, param: {"mean": torch.zeros_like(param)}
        return fs.optim.Optimizer("sign_sgd", init, update, rules=())

Sums, norms, products and decompositions of matrices are those of the whole leaf on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError
from fnshard.optim.schedules import PathRules

__all__ = ["Optimizer", "Step", "apply_updates", "init_slots"]

Slots = Mapping[str, Tensor]
Update = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Step:
    """The numbers of one step that an update may read: 0-d tensors.

    Args:
        count: int64, how many updates were made before this one, without steps that loss scaling skipped.
        norm: the L2 norm of all gradients of all ranks; read it as `global_norm`.
        evaluate: calls a function of `count`; see `host`.

    >>> step = Step(torch.tensor(3))
    >>> step.host(lambda count: 0.5 ** int(count)), step.host(0.1)
    (tensor(0.1250, dtype=torch.float64), tensor(0.1000, dtype=torch.float64))
    """

    count: Tensor
    norm: Tensor | None = None
    evaluate: Callable[[Callable[[Tensor], Any], Tensor], Tensor] | None = field(default=None, repr=False)

    @property
    def global_norm(self) -> Tensor:
        """The norm of all gradients, before anything has changed them.

        Raises:
            OptimizerError: a transform earlier in the `chain` has changed the gradients.
        """
        if self.norm is None:
            raise OptimizerError(
                "step.global_norm is the norm of the gradients; this Step has none, or something before has "
                "changed the gradients.",
                fix="put clip_by_global_norm(...) first in the chain; give a Step of your own its norm.",
            )
        return self.norm

    def host(self, function: Callable[[Tensor], Any] | float) -> Tensor:
        """Return `function(count)`, computed on the host once a step, or a number, as a 0-d fp64 tensor.

        The function may branch on the count and convert it, which traced code cannot; a rate's schedule is
        such a function. Cast the result, `.to(param.dtype)`, for an operator that wants operands of one
        dtype; arithmetic with the leaf needs no cast.
        """
        if not callable(function):
            return as_number(function)
        if self.evaluate is not None:
            return self.evaluate(function, self.count)
        return as_number(function(self.count))


def as_number(value: Any) -> Tensor:
    """Return a Python number or a 0-d tensor as a 0-d fp64 tensor."""
    return value.to(torch.float64) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer:
    """An optimizer, written for one device and whole leaves.

    Args:
        name: the text of the call that makes it.
        init: `(path, param) -> {name: tensor}`, the state of a leaf. Slots of the leaf's shape (or of size 1
            along some dims, or shorter by a whole factor) are split as the leaf is, and square ones of a
            matrix's sides by their rows; others are whole on every rank. It may copy the parameter, but must
            not compute with its values.
        update: `(path, grad, slots, param, step) -> (update, slots)`, pure; `param + update` is the new
            parameter. Slots that it does not return stay. It sees fp32 (fp64 if the leaf has that), and
            gradients without the loss scale. All that it reads of the step is a 0-d tensor of `Step`. A
            branch is `torch.where`, or `torch.cond` if one side is expensive.
        rules: all that `init` and `update` take from the path: leaves with the same numbers by these rules
            share a trace. `()` says that they do not read the path, and None says nothing: then each leaf is
            traced by itself, which is slow for many.
        values: 0-d tensors for the step's metrics, such as `lr`, which progress lines show.
        choose: `(path, shape) -> Optimizer`, if it leaves each leaf to another optimizer.

    >>> def update(path, grad, slots, param, step):
    ...     return -0.1 * grad / grad.norm(), {}
    >>> half = Optimizer("normalized()", init=lambda path, param: {}, update=update, rules=())
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> apply_updates(half, grads, init_slots(half, params), params, Step(torch.tensor(0)))[0]
    {'w': tensor([0.9400, 0.9200])}
    """

    name: str
    init: Callable[[str, Tensor], dict[str, Tensor]]
    update: Callable[[str, Tensor, Slots, Tensor, Step], Update]
    rules: Sequence[PathRules] | None = None
    values: Callable[[Step], dict[str, Tensor]] = lambda step: {}
    choose: Callable[[str, Sequence[int]], Optimizer] | None = None

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def traces(self) -> dict[Hashable, Any]:
        """The traces that a compiler has made of it; they live as long as the optimizer."""
        return {}

    def of(self, path: str, shape: Sequence[int]) -> Optimizer:
        """Return the optimizer of a leaf of this path and shape."""
        return self if self.choose is None else self.choose(path, shape).of(path, shape)

    def trace_key(self, path: str) -> Any:
        """Return a key that tells leaves of one shape apart: the numbers of the rules, or the path itself."""
        return path if self.rules is None else tuple(rule(path) for rule in self.rules)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check the rules by path against the shapes of all trained leaves.

        Raises:
            OptimizerError: a rule decides for no leaf, or a leaf has no rule.
        """
        for rule in self.rules or ():
            rule.check(shapes)
        if self.choose is not None:
            # Each optimizer checks the leaves that are left to it.
            parts: dict[Optimizer, dict[str, Sequence[int]]] = {}
            for path, shape in shapes.items():
                parts.setdefault(self.choose(path, shape), {})[path] = shape
            for part, part_shapes in parts.items():
                part.check(part_shapes)


@torch.no_grad()
def init_slots(optimizer: Optimizer, params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the state of whole leaves, by path.

    Raises:
        OptimizerError: a rule by path decides for no leaf, or a leaf has no rule.
    """
    optimizer.check({path: param.shape for path, param in params.items()})
    return {path: optimizer.of(path, param.shape).init(path, param) for path, param in params.items()}


@torch.no_grad()
def apply_updates(
    optimizer: Optimizer,
    grads: Mapping[str, Tensor],
    slots: Mapping[str, Slots],
    params: Mapping[str, Tensor],
    step: Step,
    scale: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return new parameters and new slots of whole leaves on one device.

    Args:
        scale: a factor by which gradients and their norm are multiplied first.
    """
    if scale is not None and step.norm is not None:
        step = replace(step, norm=step.norm * scale)
    new_params, new_slots = {}, {}
    for path, grad in grads.items():
        param = params[path]
        update, changed = update_leaf(optimizer, path, grad, slots[path], param, step, scale)
        new_params[path] = param + update
        new_slots[path] = {**slots[path], **changed}
    return new_params, new_slots


def update_leaf(
    optimizer: Optimizer, path: str, grad: Tensor, slots: Slots, param: Tensor, step: Step,
    scale: Tensor | None = None,
) -> Update:  # fmt: skip
    """Return the update of one leaf and the slots that change, in the dtypes that they are kept in."""
    # Compute in fp32 at least, whatever the parameter and its slots are kept in.
    wide = torch.promote_types(param.dtype, torch.float32)
    grad = grad.to(wide)
    if scale is not None:
        grad = grad * scale.to(wide)
    state = {
        n: v.to(torch.promote_types(v.dtype, wide)) if v.is_floating_point() else v for n, v in slots.items()
    }
    if param.dim() == 0:
        step = narrow_numbers(step, wide)
    leaf_optimizer = optimizer.of(path, param.shape)
    result = leaf_optimizer.update(path, grad, state, param.to(wide), step)
    check_update(leaf_optimizer, path, result, param, slots)
    update, new = result
    return update.to(param.dtype), {n: v.to(slots[n].dtype) for n, v in new.items()}


def narrow_numbers(step: Step, dtype: torch.dtype) -> Step:
    """Return a step whose numbers have this dtype, for a leaf that is a single number.

    By torch's promotion a 0-d fp64 number makes the result of another 0-d tensor fp64, but not that of a
    larger tensor.
    """
    return replace(
        step,
        norm=None if step.norm is None else step.norm.to(dtype),
        evaluate=lambda function, count: replace(step, count=count).host(function).to(dtype),
    )


def check_update(optimizer: Optimizer, path: str, result: Any, param: Tensor, slots: Slots) -> None:
    """Check that an optimizer's `update` has returned an update of the leaf, and slots of it.

    Raises:
        OptimizerError: something has another type, name, shape or kind of numbers. Floats may be wider.
    """
    leaf = f"params[{path!r}] {list(param.shape)}"
    fix = (
        "update(path, grad, slots, param, step) returns (update, slots): a tensor of the leaf's shape, and a "
        "dict of those slots that change, of the shapes and dtypes that init gives them."
    )
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        kind = "one tensor" if isinstance(result, Tensor) else type(result).__name__
        raise OptimizerError(f"{optimizer} returns {kind} for {leaf}.", fix=fix)

    # The update must be like the parameter, and each slot like the one that it replaces.
    update, new = result
    wrong = [f"slot {name!r} is none that init makes" for name in new if name not in slots]
    pairs = {"the update": (update, param)}
    pairs |= {f"slot {name!r}": (value, slots[name]) for name, value in new.items() if name in slots}
    for what, (value, like) in pairs.items():
        if not isinstance(value, Tensor):
            wrong.append(f"{what} is {type(value).__name__}, not a tensor")
        elif value.shape != like.shape:
            wrong.append(f"{what} is {list(value.shape)}, not {list(like.shape)}")
        elif value.dtype != like.dtype and not (value.is_floating_point() and like.is_floating_point()):
            wrong.append(f"{what} is {value.dtype}, not {like.dtype}")
    if wrong:
        raise OptimizerError(f"{optimizer} returns what is no update of {leaf}:", wrong, fix)
