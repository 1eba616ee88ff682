"""Contract: an optimizer is pure `(init, update)` in Optax's signs, and `apply`, the same
thing in place.

All trees are flat, `{path: tensor}`, and the tensors are whatever piece of the leaf this rank holds.
An optimizer is a function of *one leaf*, so it may be called for any subset of the leaves, in any
order: a unit is updated as soon as its gradients have arrived. What a leaf cannot know alone (the
step, norms over all ranks) comes in a `StepInfo`. What is a function of a whole leaf (Muon's matrices,
SOAP's bases) is `whole`: ranks send their shards, of state too, to an owner, who computes it once, and sends
shards back; or, of sums over a leaf alone (Adafactor's), `sums`, which ranks add up. The other rules see
blocks: they are elementwise, which a trace proves (`fnshard.analysis.elementwise`), or they are refused on a
leaf that is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, leaves
from fnshard.optim.schedules import PathRules, RateSchedule, counterpart

__all__ = ["Optimizer", "StepInfo", "check"]

Tensors = Mapping[str, Tensor]
Slots = Mapping[str, Mapping[str, Tensor]]
NEEDS = frozenset({"global_norm"})


@dataclass(frozen=True, eq=False)
class StepInfo:
    """The inputs of an update besides its leaves; make a new one for every step.

    All tensors are 0-d and, but for the step, on the device of the leaves (`to` moves them).

    Args:
        step: int64, the number of updates made before this one; on the host, which knows it, so that rates
            are exact and nothing waits for them. A 0-d tensor there may meet tensors of any device.
        global_norm: L2 norm of all gradients of all ranks; where the optimizer needs it.
        grad_scale: all gradients are multiplied by it first. `global_norm` is that of the product.
        shapes: of whole leaves by path, where shards have others.
    """

    step: Tensor
    global_norm: Tensor | None = None
    grad_scale: Tensor | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, made once per step however many units ask (the rate, the clip factor)."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def require(self, name: str) -> Any:
        """The field `name`; an OptimizerError if this step does not have it."""
        value = getattr(self, name)
        if value is None:
            raise OptimizerError(
                f"the optimizer asks for StepInfo.{name}, which this step does not carry.",
                fix=f"declare needs=frozenset({{{name!r}}}), and fill the field where that is declared.",
            )
        return value

    def scaled(self, factor: Tensor) -> StepInfo:
        """The same step with all gradients multiplied by `factor` (not negative) beforehand."""
        return replace(
            self,
            global_norm=None if self.global_norm is None else self.global_norm * factor,
            grad_scale=factor if self.grad_scale is None else self.grad_scale * factor,
        )

    def shape(self, path: str, tensor: Tensor) -> tuple[int, ...]:
        """Of the whole leaf that `tensor` is all or a shard of."""
        return self.shapes.get(path, tuple(tensor.shape))

    def of_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> StepInfo:
        """Return the same step for leaves of these whole shapes; what is made once a step is shared."""
        out = replace(self, shapes=shapes)
        object.__setattr__(out, "_memo", self._memo)
        return out

    def to(self, device: torch.device) -> StepInfo:
        """The same step for leaves on another device (host optimizer state). Nobody waits: on the host its
        numbers are there when a GPU has come so far."""

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, non_blocking=True)

        return replace(self, global_norm=move(self.global_norm), grad_scale=move(self.grad_scale))


Changed = tuple[Tensor, dict[str, Tensor]]  # an update, or what becomes one, and the slots that change
WholeRule = Callable[[str, Tensor, Mapping[str, Tensor], str], Changed]
LeafRule = Callable[[str, Tensor, Mapping[str, Tensor], Tensor, StepInfo], Changed]
SumRule = Callable[[str, Tensor, Mapping[str, Tensor], Tensor, Any], dict[str, Tensor]]
InPlaceKernel = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], Any, StepInfo], None]


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer:
    """One gradient transform; `name` is the call that makes it.

    Args:
        leaf: the whole of the mathematics, pure: `(path, grad, slots, param, info) -> (update, slots)`
            of one leaf, or of the block of it that a rank updates. `param + update` is the new parameter. It
            sees fp32 where the leaf is of a shorter dtype, and gradients that `info.grad_scale` has been
            multiplied into. Where there are
            `numbers`, it takes what they return in the place of `info`.
        slots: state by name, each made from the parameter (a block of it), or None: this leaf has none. It is
            of the parameter's shape, or along some dims of size 1 (it is whole on every rank) or shorter by
            a whole factor (one number for so many of the parameter's: see `slot_layout`).
        needs: what the `StepInfo` must carry: "global_norm".
        elementwise: whether an element's update depends on nothing of the leaf but that element, and those
            that share a number of a slot with it. None: the rules are traced, and an OptimizerError says
            where a leaf that is split meets a norm, a sum, a matrix, a random number, or a number of its
            shape (`info.shape(path, param)` is that of the whole leaf). True: you promise it, and nothing
            is traced: for operators of your own. False: it does not hold.
        whole: `(path, tensor, state, turn) -> (tensor, state)`, a pure function of a whole leaf: its owner
            alone computes it. `leaf` is given this rank's shard of the tensor, whose shape stays, in the
            gradient's place. `state` is what `whole_slots` names, all of it; another `turn` of `turns` may
            compute something else.
        whole_slots: more state by name, zero at first, which `whole` alone reads: from the leaf's shape to
            the slot's, or None: this leaf has none. Its dims before the last two are the leaf's. Ranks keep
            equal shares of it, and send them to the owner and back with the leaf.
        turns, turn: the values of `turn(info)`, which takes the last argument of `leaf`; with the share of
            steps that have each, and one that has it. Put the one that needs the most memory last.
        whole_dims: how many trailing dims `whole` looks along; None: all. Matrices of a stack are two.
        before: as `leaf`, from gradients to what `whole` is computed of; the slots that it gives are written
            before `leaf` runs. Its dtype is that on the wire. None: gradients.
        sums: of an update that needs no more of a whole leaf than sums over it, in rounds: each as `leaf`, to
            `{name: tensor}` with the leaf's dims, of which those that it has summed over are 1. Ranks add
            theirs up; later rounds and `leaf` find the sums among the slots.
        rate: what updates are multiples of, if they are.
        rules: numbers by path, checked against all leaves by `init`.
        values: `info -> {name: 0-d tensor}` for the step's metrics.
        kernel: `leaf` in place on many leaves of one dtype and device whose `settings(path)` are
            equal, `(params, grads, slots by name, settings, info)`; it may spoil the gradients.
        takes: whether the kernel is right for such a parameter; others go through `leaf`.
        factor: set if `leaf` does nothing but multiply by `factor(info)`.
        follow: set if `leaf` hands the update on as it came and keeps something of the new
            parameters: `(slots, params, info) -> None`, in place.
        in_place: takes the place of the whole `apply`.
        members: what `chain` was made of.
        numbers: `(path, info) -> tree of 0-d tensors`: all that `leaf` reads of the step. With them the
            update can be compiled (`shard_step(update=)`): numbers are inputs of the kernel, never constants.
            `leaf` and `numbers` may then depend on the path through `settings(path)` alone: leaves that are
            alike share a kernel.
        parts, which: of an optimizer that leaves each leaf to another one, `parts[which(path, dims)]`, as
            `by_path` does; it has no `leaf` and no `slots` of its own.

    >>> half = Optimizer("half()", leaf=lambda path, grad, slots, param, info: (-0.5 * grad, {}))
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    >>> half.apply(grads, half.init(params), params, StepInfo(step=torch.tensor(0)))
    >>> params["w"]
    tensor([0.5000, 0.5000])
    """

    name: str
    leaf: LeafRule
    slots: Mapping[str, Callable[[Tensor], Tensor | None]] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    elementwise: bool | None = None
    whole: WholeRule | None = None
    whole_slots: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...] | None]] = field(
        default_factory=dict
    )
    turns: Mapping[str, tuple[float, int]] = field(default_factory=lambda: {"": (1.0, 0)})
    turn: Callable[[Any], str] = lambda info: ""
    whole_dims: int | None = None
    before: LeafRule | None = None
    sums: tuple[SumRule, ...] = ()
    rate: RateSchedule | None = None
    rules: tuple[PathRules, ...] = ()
    values: Callable[[StepInfo], dict[str, Tensor]] = lambda info: {}
    kernel: InPlaceKernel | None = None
    settings: Callable[[str], Hashable] = lambda path: None
    takes: Callable[[Tensor], bool] = lambda param: True
    factor: Callable[[StepInfo], Tensor] | None = None
    follow: Callable[[Slots, Tensors, StepInfo], None] | None = None
    in_place: Callable[[Tensors, Slots, Tensors, StepInfo], None] | None = None
    members: tuple[Optimizer, ...] = ()
    numbers: Callable[[str, StepInfo], Any] | None = None
    parts: tuple[Optimizer, ...] = ()
    which: Callable[[str, int], int] | None = None

    def __post_init__(self) -> None:
        unknown = sorted(self.needs - NEEDS)
        if unknown:
            raise OptimizerError(
                f"{self.name} needs {', '.join(map(repr, unknown))}; known are {', '.join(sorted(NEEDS))}."
            )

    def __repr__(self) -> str:
        return self.name

    @torch.no_grad()
    def init(self, params: Tensors) -> dict[str, dict[str, Tensor]]:
        """State for `params`, which must be *all* leaves that this optimizer will see.

        Raises:
            OptimizerError: a rule by path that decides for no leaf, or a leaf without one.
        """
        self.check({path: param.dim() for path, param in params.items()})
        return {path: self.init_leaf(path, param) for path, param in params.items()}

    @torch.no_grad()
    def init_leaf(
        self, path: str, param: Tensor, wholes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Tensor]:
        """State of one leaf; `init` checks the rules by path too.

        Args:
            wholes: shapes of `whole_slots`, where `param` is a block of the leaf.
        """
        made = {n: make(param) for n, make in self.of(path, param.dim()).slots.items()}
        if wholes is None:
            wholes = self.whole_shapes(path, tuple(param.shape))
        made |= {n: param.new_zeros(shape) for n, shape in wholes.items()}
        return {n: value for n, value in made.items() if value is not None}

    def whole_shapes(self, path: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Of the state that `whole` alone reads, of a leaf of this shape."""
        made = {n: make(shape) for n, make in self.of(path, len(shape)).whole_slots.items()}
        return {n: own for n, own in made.items() if own is not None}

    def of(self, path: str, dims: int) -> Optimizer:
        """The optimizer that a leaf of so many dims has."""
        return self if self.which is None else self.parts[self.which(path, dims)].of(path, dims)

    def wholes(self, path: str, dims: int, split: Collection[int]) -> bool:
        """Whether the update of a leaf of which these dims are split needs all of it."""
        own = self.of(path, dims)
        first = 0 if own.whole_dims is None else max(0, dims - own.whole_dims)
        return own.whole is not None and any(dim >= first for dim in split)

    def check(self, dims: Mapping[str, int]) -> None:
        """Check the rules by path against all leaves, of which the numbers of dims are given.

        Raises:
            OptimizerError: a rule that decides for no leaf, a leaf without one, or vectors alone that are
                given to an optimizer of matrices.
        """
        for rules in self.rules:
            rules.check(dims)
        for index, part in enumerate(self.parts):
            own = {path: n for path, n in dims.items() if self.which(path, n) == index}
            if own:
                part.check(own)
            if own and part.which is not None and all(part.which(path, n) for path, n in own.items()):
                raise OptimizerError(
                    f"{self.name} gives {part} none of the leaves that it is for:",
                    [f"params[{path!r}], of {n} dim{'s' * (n != 1)}" for path, n in own.items()][:12],
                    "name these to another optimizer: muon is for matrices that are no embeddings and heads.",
                )

    @torch.no_grad()
    def update(
        self, grads: Tensors, slots: Slots, params: Tensors, info: StepInfo
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """`updates, slots` of the leaves in `grads`, in their dtypes; the arguments are not changed."""
        updates, new = {}, {}
        for path, grad in grads.items():
            updates[path], new[path] = self.update_leaf(
                path, grad, slots[path], params[path], self.given(path, info), info.grad_scale
            )
        return updates, new

    @torch.no_grad()
    def apply(self, grads: Tensors, slots: Slots, params: Tensors, info: StepInfo) -> None:
        """`update` in place, on `slots` and `params` of the leaves in `grads`, which may be spoiled.

        Equal to `params + updates` up to rounding. Allocates nothing where gradients come in the
        parameters' dtype and layout and there is a kernel; else one leaf's or one unit's worth.
        """
        if self.in_place is not None:
            self.in_place(grads, slots, params, info)
            return
        if self.which is not None:
            owned: dict[int, list[str]] = {}
            for path in grads:
                owned.setdefault(self.which(path, params[path].dim()), []).append(path)
            for index, paths in owned.items():
                some = ({path: each[path] for path in paths} for each in (grads, slots, params))
                self.parts[index].apply(*some, info)
            return
        groups: dict[Hashable, list[str]] = {}
        for path, grad in grads.items():
            param, state = params[path], slots[path]
            if self.kernel is not None and fusable(param, state) and self.takes(param):
                if param.numel():
                    groups.setdefault((param.dtype, param.device, self.settings(path)), []).append(path)
                continue
            given = self.given(path, info)
            update, new = self.update_leaf(path, grad, state, param, given, info.grad_scale)
            param.add_(update)
            for name, value in new.items():
                state[name].copy_(value)
        for (_, _, settings), paths in groups.items():
            some = [params[p] for p in paths]
            state_lists = {name: [slots[p][name] for p in paths] for name in self.slots}
            given = ready([grads[p] for p in paths], some, info.grad_scale)
            self.kernel(some, given, state_lists, settings, info)

    def metrics(self, info: StepInfo) -> dict[str, Tensor]:
        """0-d tensors for the step's metrics, such as `lr` and `grad_norm`."""
        return self.values(info)

    @property
    def compilable(self) -> bool:
        """Whether the update (of some leaves, at least) reads nothing of the step but `numbers`, so that it
        can be compiled."""
        if self.which is not None:
            return any(part.compilable for part in self.parts)
        return self.numbers is not None and all(m.compilable for m in self.members)

    def given(self, path: str, info: StepInfo) -> Any:
        """The last argument of `leaf`: its numbers, or the StepInfo."""
        return info if self.numbers is None else self.numbers(path, info)

    def update_leaf(
        self, path: str, grad: Tensor, slots: Mapping[str, Tensor], param: Tensor, given: Any,
        scale: Tensor | None, sums: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Update and new slots of one whole leaf, computed in fp32 at least, in the dtypes of the leaf.

        Args:
            given: what `given` returned.
            scale: the gradient is multiplied by it.
            sums: of all ranks, by name, where the leaf is a shard.
        """
        if self.which is not None:
            part = self.parts[self.which(path, param.dim())]
            return part.update_leaf(path, grad, slots, param, part.given(path, given), scale, sums)
        if self.whole is None:
            totals = {**(sums or {})}
            for number in range(len(self.sums) if sums is None else 0):
                totals |= self.sum_leaf(number, path, grad, {**slots, **totals}, param, given, scale)
            return self._rule(self.leaf, path, grad, {**slots, **totals}, param, given, scale, param.dtype)
        sent, first = self.begin_leaf(path, grad, slots, param, given, scale)
        state = {n: slots[n] for n in self.whole_slots if n in slots}
        dtype = wire_dtype(sent, state)
        state = {n: value.to(dtype) for n, value in state.items()}
        made, kept = self.whole(path, sent.to(dtype), state, self.turn_of(given))
        update, last = self.end_leaf(path, made, {**slots, **first}, param, given)
        return update, first | {n: value.to(slots[n].dtype) for n, value in kept.items()} | last

    def turn_of(self, given: Any) -> str:
        """Which of `turns` a step is.

        Raises:
            OptimizerError: none of them.
        """
        turn = self.turn(given)
        if turn not in self.turns:
            raise OptimizerError(f"{self}: turn gives {turn!r}, and turns are {', '.join(self.turns)}.")
        return turn

    def sum_leaf(
        self, number: int, path: str, grad: Tensor, slots: Mapping[str, Tensor], param: Tensor, given: Any,
        scale: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """This rank's part of a round of sums; those of earlier rounds are among the slots."""
        rule = lambda *args: (grad, self.sums[number](*args))  # noqa: E731
        return self._rule(rule, path, grad, slots, param, given, scale, None)[1]

    def begin_leaf(
        self, path: str, grad: Tensor, slots: Mapping[str, Tensor], param: Tensor, given: Any,
        scale: Tensor | None,
    ) -> Changed:  # fmt: skip
        """What `whole` is computed of, and the slots that change by then."""
        before = self.before or (lambda path, grad, slots, param, given: (grad, {}))
        return self._rule(before, path, grad, slots, param, given, scale, None)

    def end_leaf(
        self, path: str, update: Tensor, slots: Mapping[str, Tensor], param: Tensor, given: Any
    ) -> Changed:
        """Update and the slots that change, of what `whole` has made."""
        return self._rule(self.leaf, path, update, slots, param, given, None, param.dtype)

    def _rule(
        self, rule: LeafRule, path: str, grad: Tensor, slots: Mapping[str, Tensor], param: Tensor, given: Any,
        scale: Tensor | None, dtype: torch.dtype | None,
    ) -> Changed:  # fmt: skip
        wide = torch.promote_types(param.dtype, torch.float32)
        grad = grad.to(wide)
        if scale is not None:
            grad = (grad * scale).to(wide)  # a 0-d leaf takes on the factor's dtype
        state = {n: v.to(wide) if v.is_floating_point() else v for n, v in slots.items()}
        update, new = rule(path, grad, state, param.to(wide), given)
        new = {n: v.to(slots[n].dtype) if n in slots else v for n, v in new.items()}
        return update if dtype is None else update.to(dtype), new


def setting_key(optimizer: Optimizer, path: str) -> Hashable:
    """Return an optimizer's settings for a leaf, which leaves are told apart by.

    Raises:
        OptimizerError: they cannot be hashed.
    """
    settings = optimizer.settings(path)
    try:
        hash(settings)
    except TypeError as error:
        raise OptimizerError(
            f"{optimizer}: settings({path!r}) is {settings!r}, and cannot be hashed.",
            fix="return numbers and strings, or a tuple of these.",
        ) from error
    return settings


def wire_dtype(sent: Tensor, state: Tensors) -> torch.dtype:
    """That in which a leaf's owner gets what ranks send of it, and its state."""
    return functools.reduce(torch.promote_types, [slot.dtype for slot in state.values()], sent.dtype)


def check_kind(optimizer: object) -> None:
    """Check that `optimizer` is None or an `Optimizer` that has an update rule.

    Raises:
        OptimizerError: says what it is, and what takes its place. Clipping or an average alone would add the
            gradients to the parameters.
    """
    if optimizer is None:
        return
    if isinstance(optimizer, Optimizer):
        members = optimizer.members or (optimizer,)
        if all(m.factor is not None or m.follow is not None for m in members):
            before = [f"{m}" for m in members if m.follow is None]
            after = [f"{m}" for m in members if m.follow is not None]
            raise OptimizerError(
                f"optimizer={optimizer} has no update rule: it would add gradients to the parameters.",
                fix=f"chain({', '.join([*before, 'adamw(3e-4)', *after])}).",
            )
        return
    word, way = isinstance(optimizer, str), "optimizer=fs.optim.adamw(3e-4), or another of dir(fs.optim)."
    kind = getattr(optimizer, "__name__", repr(optimizer) if word else f"of type {type(optimizer).__name__}")
    fix = way if word else counterpart(optimizer)
    raise OptimizerError(f"optimizer= is {kind}, and no optimizer of fs.optim.", fix=fix)


def check(optimizer: Optimizer, sharded: Mapping[str, int]) -> None:
    """Check that an optimizer of sharded leaves, of which the numbers of dims are given, does not treat a
    shard as the leaf.

    Raises:
        OptimizerError: it is not elementwise, has no `whole` and no `sums`, and leaves are sharded.
    """
    own = {path: optimizer.of(path, dims) for path, dims in sharded.items()}
    blind = [p for p, each in own.items() if each.elementwise is False and not (each.whole or each.sums)]
    if blind:
        raise OptimizerError(
            f"{optimizer} is not elementwise, and {leaves(len(blind))} it would see are sharded:",
            [f"params[{path!r}]" for path in blind],
            "declare what it computes of a whole leaf as Optimizer(whole=) or Optimizer(sums=), or keep "
            "these leaves whole, also where they are updated: LayoutSpec(P(), gradient=P(), optimizer=P()).",
        )


def fusable(param: Tensor, slots: Mapping[str, Tensor]) -> bool:
    """torch's fused kernels walk memory and never look at strides. Runs per leaf and step: plain loop."""
    if not ((param.is_cpu or param.is_cuda) and param.is_contiguous()):
        return False
    dtype = param.dtype
    for slot in slots.values():  # noqa: SIM110
        if slot.dtype != dtype or not slot.is_contiguous():
            return False
    return True


def ready(grads: list[Tensor], params: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Gradients in the parameters' dtype, contiguous and scaled; in place where that is possible.

    The kernels' own `grad_scale` is not used: it divides, is read as fp32, and writes the quotient
    back, so it costs the same traffic as one foreach multiplication and loses digits in fp64.
    """
    out = [
        g if g.dtype == p.dtype and g.is_contiguous() else torch.empty_like(p)
        for g, p in zip(grads, params, strict=True)
    ]
    if made := [(o, g) for o, g in zip(out, grads, strict=True) if o is not g]:
        torch._foreach_copy_(*map(list, zip(*made, strict=True)))
    if scale is not None:
        # A factor of another dtype costs CUDA a kernel per leaf; one of 16 bits would lose digits.
        dtype = out[0].dtype
        torch._foreach_mul_(out, scale.to(dtype) if dtype.itemsize >= 4 else scale)
    return out
