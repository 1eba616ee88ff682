"""Elementwise: which operators of an optimizer's rules look at more than one element of a leaf.

Ranks run `leaf` and the other rules on their own blocks. That is right where an element's update depends on
nothing of the leaf but that element; a norm of a block is none of the leaf. So the rules are run on fakes, as
the leaf and as a block of it, and what their operators do with the leaf's numbers is noted: all must be on
the list of elementwise operators, and no number may be made of the shape. Both runs must call the same
operators with the same numbers and constants, also on tensors that are not made of the leaf.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnshard.analysis.slots import FakeTensorMode, Numbers, fake_mode, fakes, tensors_of
from fnshard.compiler.ir.source_lines import user_line
from fnshard.compiler.place.elementwise import elementwise
from fnshard.compiler.place.rules import rule_of
from fnshard.errors import OptimizerError, leaves
from fnshard.layout.partition import block_shape
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer, StepInfo, fusable

STEPS = (0, 1, 1000)  # A rule may compute something else in its first steps.

# The order of elements stays: what is computed of two such views is of equal elements.
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "lift_fresh"}
_FILLED = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided", "copy_", "fill_", "zero_",
}  # fmt: skip
_FUSED = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}
_FOREACH_OVER_LEAVES = {"norm", "max", "mm", "powsum"}
# Operators without a tensor that give the same number everywhere; all others of them go by places.
_FILLS = {"zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor"}
# A run may have more of these than another, as a block may lie otherwise than its leaf.
_UNRECORDED = _VIEWS | {"clone", "alias", "detach"}


def check_elementwise(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> None:
    """Refuse an optimizer whose rules would see blocks of leaves and look at more than one element.

    Args:
        specs: of stored tensors.

    Raises:
        OptimizerError: it names leaves, operators and lines.
    """
    known: set[Any] = set()
    blind, mode = [], fake_mode()
    for path, spec in specs.items():
        if not spec.trainable or 0 in spec.shape or not mesh.ordered(spec.optimizer.axes):
            continue
        rule = optimizer.of(path, len(spec.shape))
        foreign = tuple(m for m in rule.members or (rule,) if not _is_of_library(m))
        if not foreign:
            continue
        key = rule, spec.shape, spec.optimizer, spec.optimizer_dtype, rule.settings(path)
        # A rule may branch on the path: leaves that are like one before are looked at as well, but once.
        steps, block = () if key in known else STEPS, block_shape(spec.shape, spec.optimizer, mesh)
        known.add(key)
        found = mixing_ops(
            replace(rule, members=foreign), path, spec.shape, block, spec.optimizer_dtype, steps, mode
        )
        if found:
            blind.append(f"params[{path!r}] {list(spec.shape)} by {spec.optimizer!r}: {', '.join(found)}")
    if blind:
        raise OptimizerError(
            f"{optimizer} computes updates of more than one element, of {leaves(len(blind))} that ranks have "
            "parts of; each would compute them of its part:",
            blind[:12],
            "keep these leaves whole, also where they are updated, LayoutSpec(P(), gradient=P(), "
            "optimizer=P()); or declare what is a sum over a leaf as Optimizer(sums=), and what is computed "
            "of a whole leaf as Optimizer(whole=). If it is elementwise in a way that a trace cannot see, "
            "say so by Optimizer(elementwise=True).",
        )


def _is_of_library(rule: Optimizer) -> bool:
    """Whether all functions of a rule are the library's own, whose tests trace them."""
    own = [rule.leaf, rule.whole, rule.before, rule.kernel, rule.follow, rule.in_place, *rule.sums]
    known = {torch.zeros_like, torch.clone}
    own += [make for make in rule.slots.values() if make not in known]
    return all(getattr(f, "__module__", "").startswith("fnshard.optim.") for f in own if f is not None)


def mixing_ops(
    optimizer: Optimizer, path: str, shape: Sequence[int], block: Sequence[int], dtype: torch.dtype,
    steps: Sequence[int] = STEPS, mode: FakeTensorMode | None = None,
) -> list[str]:  # fmt: skip
    """Return what an optimizer's rules do that is not elementwise, in words: operator, rule and line.

    Args:
        shape, block: of the leaf, and of a part of it.
        dtype: that it is updated in.
        steps: numbers of updates made before; one of each of the optimizer's `turns` is added. Without
            any, the operators of the first update of a part are looked at, and no numbers.
        mode: of the fakes, where many leaves are looked at.
    """
    found, mode = dict[str, None](), mode or fake_mode()
    for member in optimizer.members or (optimizer,):
        if member.elementwise:
            continue
        if not steps:
            found |= _run(member, path, 0, block, shape, dtype, mode).found
        for step in sorted({*steps, *(step for _, step in member.turns.values())}) if steps else ():
            seen = [_run(member, path, step, each, shape, dtype, mode) for each in (shape, block)]
            found |= seen[0].found | seen[1].found
            if not found and not _are_alike(seen[0].calls, seen[1].calls):
                found[f"numbers of its shape, {list(shape)} of the leaf and {list(block)} of a part"] = None
            if found:
                break
    return list(found)


class _Elements(Numbers):
    """Follows what is computed of a leaf's elements.

    Args:
        shape: of the leaf, or of the part of it.
        optimizer: whose rules run.
        kinds: by the id of a tensor, what it is made of: a "leaf", a "sum" over one, a "position" in one; or
            of nothing in a leaf: a "fill" has one number everywhere, a "table" goes by places of its own,
            a "step" is one number of this step. A tensor with data of which nothing is known has none.
        calls: of operators that may meet the leaf: names, their numbers, and their tensors that have data.
        found: what is not elementwise.
    """

    def __init__(self, shape: Sequence[int], optimizer: Optimizer) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.optimizer = optimizer
        self.kinds: dict[int, str] = {}
        self.alive: list[Tensor] = []
        self.calls: list[tuple[str, str, list[Tensor]]] = []
        self.found: dict[str, None] = {}
        self.rule = ""

    def follow(self, values: Any, kind: str = "leaf") -> None:
        """Note what tensors are made of."""
        for tensor in tensors_of([values]):
            self.kinds[id(tensor)] = kind
            self.alive.append(tensor)  # its id stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # what device a tensor is on
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = tensors_of([args, kwargs or {}])
        kind = self._kind(func, args, kwargs or {}, given)
        if func.overloadpacket.__name__ in _FUSED:  # Fakes do not know all of them; they return nothing.
            return None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if kind:
            self.follow([out, given if func._schema.is_mutable else []], kind)
        return out

    def _kind(self, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> str:
        """What the result is made of; an operator that is not elementwise is noted."""
        name = func.overloadpacket.__name__
        own = [t for t in given if self.kinds.get(id(t)) in ("leaf", "sum", "position")]
        kinds = {self.kinds[id(t)] for t in own}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(func, "random ")
            return "leaf"
        with_data = [t for t in given if self.has_data(t)]
        if not own and given and len(with_data) == len(given):
            return self._kind_of_data(func, name, given)
        # What an owner keeps of a whole leaf begins as zeros of another shape.
        if name not in _UNRECORDED and not (self.rule == "slots" and self.optimizer.whole_slots):
            self.calls.append((str(func), repr(_numbers_of(func, args, kwargs)), with_data))
        if not own:
            return self._kind_of_constant(func, name, given)
        if kinds == {"position"}:
            return "position"
        others = [t for t in given if not any(t is each for each in own)]
        # A constant of several numbers goes by places, which are other ones in a view of other dims.
        is_table = any(t.numel() > 1 and self.kinds.get(id(t)) != "fill" for t in others)
        if "position" in kinds or (is_table and not all(map(self._has_its_dims, own))):
            self._note(func, "positions in ")
        elif "sum" in kinds:
            linear = {
                "mul": len(own) == 1, "div": len(own) == 1 and own[0] is args[0],
                "add": len(own) == 2, "sub": len(own) == 2,
            }.get(name, name in _VIEWS | {"neg", "sum", "_to_copy", "clone", "detach", "alias"})  # fmt: skip
            if kinds != {"sum"} or not linear:
                self._note(func, "of a sum, ")
            return "sum"
        elif name == "sum" and self.rule == "sums":
            return "sum"
        elif not _is_elementwise(func, name):
            self._note(func)
        return "leaf"

    def _kind_of_data(self, func: Any, name: str, given: Sequence[Tensor]) -> str:
        """What is made of tensors that have data; it is the same number in both runs, or is found not to be.

        A number of the step that Python has may choose what the rule computes, and no run shows all steps;
        an optimizer with several `turns` is run in each. `kernel` and `follow` count by one: they compute
        what `leaf` does, which is looked at.
        """
        if not any(self.kinds.get(id(t)) == "step" for t in given):
            return ""
        counts = len(self.optimizer.turns) > 1 or self.rule in ("slots", "kernel", "follow")
        if name == "_local_scalar_dense" and not counts:
            self._note(func, "a number of StepInfo, which torch.where takes as a tensor: ")
        return "step"

    def _kind_of_constant(self, func: Any, name: str, given: Sequence[Tensor]) -> str:
        """What is made of fakes that hold nothing of the leaf, or of no tensor."""
        if not given:
            return "fill" if name in _FILLS else "position"
        is_fill = all(t.numel() == 1 or self.kinds.get(id(t)) == "fill" for t in given)
        if _is_elementwise(func, name):
            return "fill" if is_fill else "table"
        return "table" if all(t.numel() == 1 for t in given) else "position"

    def _has_its_dims(self, tensor: Tensor) -> bool:
        """Whether a tensor has the dims of the leaf, or 1 in their places."""
        pairs = zip(reversed(tensor.shape), reversed(self.shape), strict=False)
        return tensor.dim() <= len(self.shape) and all(n in (1, size) for n, size in pairs)

    def _note(self, func: Any, what: str = "") -> None:
        line = user_line()
        self.found[f"{what}{func.overloadpacket.__name__} in {self.rule}{f' ({line})' if line else ''}"] = (
            None
        )


def _numbers_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator is called with, but for tensors and sizes."""
    named = zip((a.name for a in func._schema.arguments), args, strict=False)
    given, types = {**dict(named), **kwargs}, {a.name: str(a.type) for a in func._schema.arguments}
    plain = (bool, int, float, complex, str, torch.dtype)
    return [
        (name, v) for name, v in given.items()
        if isinstance(v, plain)
        or (isinstance(v, list | tuple) and types[name] not in ("List[int]", "Optional[List[int]]")
            and all(isinstance(each, plain) for each in v))
    ]  # fmt: skip


def _are_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two runs call the same operators with the same numbers and data."""
    return len(one) == len(other) and all(
        a[:2] == b[:2] and len(a[2]) == len(b[2]) and all(map(_is_equal, a[2], b[2]))
        for a, b in zip(one, other, strict=True)
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _is_elementwise(func: Any, name: str) -> bool:
    """Whether an operator, in place or not, or one over a list of leaves, looks at each element by itself."""
    if func.namespace != "aten":
        return False
    if name in _VIEWS | _FILLED | _FUSED:
        return True
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_").removesuffix("_")
        packet = getattr(torch.ops.aten, base, None)
        forms = (
            []
            if base in _FOREACH_OVER_LEAVES or packet is None
            else map(packet.__getattr__, packet.overloads())
        )
        return base in ("copy", "zero") or any(rule_of(form) is elementwise for form in forms)
    pure = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return rule_of(func) is elementwise or rule_of(getattr(pure, func._overloadname, None)) is elementwise


def _run(
    rule: Optimizer, path: str, step: int, shape: Sequence[int], whole: Sequence[int], dtype: torch.dtype,
    mode: FakeTensorMode,
) -> _Elements:  # fmt: skip
    """Run all that ranks run on their parts of a leaf, on one of this shape."""
    trace, log = _Elements(shape, rule), logging.getLogger("torch._subclasses.fake_tensor")
    info = StepInfo(
        torch.tensor(step), global_norm=torch.ones((), dtype=torch.float64), shapes={path: tuple(whole)}
    )
    try:
        log.disabled = True  # It writes down the error that is reported here.
        with fakes(trace, mode):
            param, grad = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            trace.follow([param, grad])
            trace.follow([info.step, info.global_norm], "step")
            for trace.rule, run in _rules(rule, path, grad, param, info):
                result = run()
                trace.follow([result])
                if trace.rule == "leaf" and result[0].shape != param.shape:
                    made = f"an update {list(result[0].shape)} of {list(shape)}"
                    trace.found[made] = None
    except Exception as error:  # an optimizer of the user's: any may come
        if not trace.found:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            trace.found[f"{trace.rule} does not run on fake tensors {list(shape)} ({what})"] = None
    finally:
        log.disabled = False
    return trace


def _rules(
    rule: Optimizer, path: str, grad: Tensor, param: Tensor, info: StepInfo
) -> Iterator[tuple[str, Any]]:
    """Yield what of an optimizer runs on a part of a leaf, by the name of the field; each runs before the
    next is made."""
    slots: dict[str, Tensor] = {}
    totals: dict[str, Tensor] = {}
    yield "slots", lambda: slots.update(rule.init_leaf(path, param)) or slots
    given = rule.given(path, info)
    for number in range(len(rule.sums)):

        def add(number: int = number) -> dict[str, Tensor]:
            totals.update(rule.sum_leaf(number, path, grad, {**slots, **totals}, param, given, None))
            return totals

        yield "sums", add
    if rule.whole is not None:
        yield "before", lambda: rule.begin_leaf(path, grad, slots, param, given, None)
        yield "leaf", lambda: rule.end_leaf(path, grad, slots, param, given)
    else:
        yield "leaf", lambda: rule.update_leaf(path, grad, slots, param, given, None, totals)
    if rule.kernel is not None and fusable(param, slots) and rule.takes(param):
        state = {name: [slots[name]] for name in rule.slots}
        yield "kernel", lambda: rule.kernel([param], [grad], state, rule.settings(path), info)
    if rule.follow is not None:
        yield "follow", lambda: rule.follow({path: slots}, {path: param}, info)
    if rule.in_place is not None:
        yield "in_place", lambda: rule.in_place({path: grad}, {path: slots}, {path: param}, info)
