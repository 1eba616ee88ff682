"""Fused update: a bucket's optimizer as one kernel of Inductor's, in place.

The optimizer's `leaf` is pure, so it is traced as it is, once for all buckets of equal shapes, dtypes and
settings: the kernel reads the reduced gradients in their dtype on the wire, and writes the parameters (or
their master copies), the slots and the stored copies. With bf16 gradients and storage next to fp32 state that
is 28 bytes a parameter for AdamW, where a cast of the gradient, torch's fused kernel and a copy of the master
move 46. What varies from step to step (rates, bias corrections, the clip factor) is a vector of inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard import tree
from fnshard.compiler.kernels.inductor import TRACING, Boxed, compile_graph
from fnshard.errors import OptimizerError
from fnshard.optim.contract import Optimizer, StepInfo
from fnshard.runtime.tiers import send

Form = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]  # shape, dtype, strides


def is_compiled(update: str, optimizer: Optimizer | None, backend: str, device_type: str) -> bool:
    """Whether updates are compiled where a step has the option `update`.

    Raises:
        OptimizerError: they are to be, and cannot be.
    """
    if optimizer is None or update == "eager":
        return False
    if update == "compiled" and not optimizer.compilable:
        raise OptimizerError(
            f"update='compiled', and {optimizer} reads more of the step than `numbers`.",
            fix="give Optimizer(numbers=), all that its `leaf` reads of the step, or update='auto'.",
        )
    return optimizer.compilable and (update == "compiled" or (backend == "inductor" and device_type != "cpu"))


@dataclass(frozen=True)
class Leaf:
    """One leaf of a bucket as its update sees it; equal leaves are updated by equal code.

    Args:
        settings: the optimizer's, of the leaf's path.
        group: the number of the vector of numbers that it reads.
        slots: their names.
        tensors_like: of gradient, parameter, the stored copy (where the parameter is a master) and the slots.
    """

    slots: tuple[str, ...]
    settings: Hashable
    group: int
    copied: bool
    tensors_like: tuple[Form, ...]


def form_of(value: Tensor) -> Form:
    """What code is made for."""
    return tuple(value.shape), value.dtype, value.stride()


def groups_of(rules: Mapping[str, Optimizer], wides: Mapping[str, torch.dtype]) -> dict[str, int]:
    """By path, which vector of numbers its update reads: leaves of equal settings share one.

    Args:
        rules: the optimizer of each leaf (`Optimizer.of`).
    """
    known: dict[Hashable, int] = {}
    keys = {p: (wides[p], rule, rule.settings(p)) for p, rule in rules.items()}
    return {p: known.setdefault(key, len(known)) for p, key in keys.items()}


def numbers_of(
    optimizer: Optimizer, path: str, wide: torch.dtype, info: StepInfo, device: torch.device
) -> Tensor:
    """The numbers of one group, and after them the factor of its gradients: [n + 1], made once a step."""

    def make() -> Tensor:
        flat = tree.flatten(optimizer.given(path, info))[0]
        if info.grad_scale is None:
            flat.append(torch.ones((), dtype=torch.float64))
        else:
            flat.append(info.grad_scale)
        return torch.stack([send(n.double(), device) for n in flat]).to(wide)

    return info.once((numbers_of, optimizer, optimizer.settings(path), wide), make)


def update_graph(
    optimizer: Optimizer, paths: Sequence[str], leaves: Sequence[Leaf], device: torch.device
) -> fx.GraphModule:
    """The update of leaves like these: of vectors of numbers, by group, and of every leaf's tensors in the
    order of `Leaf.tensors_like`. All but gradients and numbers are written to.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    structures, firsts = _structures(optimizer, paths, leaves), len({leaf.group for leaf in leaves})

    def update(*values: Tensor) -> list[Tensor]:
        vectors, rest, out = values[:firsts], iter(values[firsts:]), []
        for path, leaf in zip(paths, leaves, strict=True):
            *numbers, scale = vectors[leaf.group].unbind()
            grad, param, *others = (next(rest) for _ in leaf.tensors_like)
            copies, own_slots = (
                others[: leaf.copied],
                dict(zip(leaf.slots, others[leaf.copied :], strict=True)),
            )
            inputs = tree.unflatten(numbers, structures[leaf.group][0])
            rule = optimizer.of(path, param.dim())
            change, new = rule.update_leaf(path, grad, own_slots, param, inputs, scale)
            out += [param + change, *((param + change).to(c.dtype) for c in copies)]
            out += [new.get(name, own_slots[name]) for name in leaf.slots]
        return out

    with FakeTensorMode(), torch.no_grad():
        vectors = [torch.empty(n + 1, dtype=wide, device=device) for _, n, wide in structures.values()]
        fakes = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for leaf in leaves
            for shape, dtype, stride in leaf.tensors_like
        ]
        pure = torch.func.functionalize(update, remove="mutations_and_views")
        with TRACING:
            module = make_fx(pure, decomposition_table=select_decomp_table())(*vectors, *fakes)
    _write_back(module, [leaf.tensors_like for leaf in leaves], firsts)
    return module


def _structures(
    optimizer: Optimizer, paths: Sequence[str], leaves: Sequence[Leaf]
) -> dict[int, tuple[tree.TreeDef, int, torch.dtype]]:
    """By group: the tree of its numbers, how many, and their dtype."""
    out = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.group not in out:
            one = torch.ones((), dtype=torch.float64)
            info = StepInfo(torch.tensor(0), global_norm=one)
            like = leaf.tensors_like[1]
            flat, structure = tree.flatten(optimizer.of(path, len(like[0])).given(path, info))
            out[leaf.group] = (
                structure,
                len(flat),
                torch.promote_types(like[1], torch.float32),
            )
    return out


def _write_back(module: fx.GraphModule, tensors_like: Sequence[Sequence[Form]], firsts: int) -> None:
    """What the graph returns is written to the inputs that it is new values of."""
    inputs = module.graph.find_nodes(op="placeholder")[firsts:]
    targets = []
    for each in tensors_like:
        mine, inputs = inputs[: len(each)], inputs[len(each) :]
        targets += mine[1:]
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        for target, value in zip(targets, output.args[0], strict=True):
            written = module.graph.call_function(torch.ops.aten.copy_.default, (target, value))
            written.meta["val"] = target.meta["val"]
    output.args = ((),)
    module.recompile()


@dataclass
class FusedUpdates:
    """The compiled updates of one step, by what they were compiled for; simulated ranks share them.

    Args:
        options: of Inductor.
    """

    optimizer: Optimizer
    options: Mapping[str, Any]
    made: dict[tuple[Leaf, ...], Boxed] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def get(self, paths: Sequence[str], leaves: tuple[Leaf, ...], device: torch.device) -> Boxed:
        """The kernel for leaves like these; compiled where there is none."""
        if leaves not in self.made:
            with self._lock:
                if leaves not in self.made:
                    graph = update_graph(self.optimizer, paths, leaves, device)
                    self.made[leaves] = compile_graph(
                        graph, backend="inductor", options=self.options, is_backward=False
                    )
        return self.made[leaves]

    def bind(self, names: Mapping[str, tuple[str, ...]], copied: bool) -> Callable[..., None]:
        """A function of the tensors of a bucket's leaves, by path in the order of `Leaf.tensors_like`, and of
        the step.

        It is compiled when it is called with tensors of other strides or dtypes than before.

        Args:
            names: of slots, by path, of leaves whose blocks are not empty.
            copied: whether stored copies of master parameters are among the tensors.
        """
        paths = list(names)
        known: dict[Hashable, tuple[Boxed, Callable[[StepInfo], list[Tensor]]]] = {}

        def compiled(by_path: Mapping[str, Sequence[Tensor]]) -> Any:
            wides = {p: torch.promote_types(by_path[p][1].dtype, torch.float32) for p in paths}
            rules = {p: self.optimizer.of(p, by_path[p][1].dim()) for p in paths}
            groups = groups_of(rules, wides)
            leads = {group: path for path, group in reversed(groups.items())}
            first = [leads[group] for group in sorted(leads)]
            leaves = tuple(
                Leaf(
                    names[p],
                    (rules[p], rules[p].settings(p)),
                    groups[p],
                    copied,
                    tuple(map(form_of, by_path[p])),
                )
                for p in paths
            )
            device = by_path[paths[0]][0].device
            return self.get(paths, leaves, device), lambda info: [
                numbers_of(rules[p], p, wides[p], info, device) for p in first
            ]

        def run(by_path: Mapping[str, Sequence[Tensor]], info: StepInfo) -> None:
            values = [value for path in paths for value in by_path[path]]
            key = tuple([(value.stride(), value.dtype) for value in values])
            if key not in known:
                known[key] = compiled(by_path)
            kernel, numbers = known[key]
            kernel([*numbers(info), *values])

        return run
