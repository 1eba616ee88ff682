"""Compile the updates of a bucket's leaves into one kernel of Inductor's, which works in place.

The kernel reads the reduced gradients in their dtype on the wire, and writes the parameters (or their master
copies), the slots and the stored copies. With bf16 gradients and storage next to fp32 state that is 28 bytes
a parameter for AdamW, where a cast of the gradient, torch's fused kernel and a copy of the master move 46.
The step's numbers (rates, bias corrections, the clip factor) are a vector of inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.compiler.kernels.inductor import TRACING, Boxed, compile_graph
from fnshard.compiler.update.family import Family
from fnshard.compiler.update.trace import GRAD, PARAM, UPDATE, Branch
from fnshard.optim.fused import DECOMPOSITIONS
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.tiers import copy_to_device

Form = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]  # shape, dtype, strides


def is_compiled(update: str, backend: str, device_type: str) -> bool:
    """Return whether a step with the option `update` compiles its updates."""
    return update == "compiled" or (update == "auto" and backend == "inductor" and device_type != "cpu")


def is_compilable(family: Family) -> bool:
    """Return whether an update is a single graph, without exchange, branch or a rank's index.

    It must not return state that it has read, either: Inductor drops the copy that protects a slot from its
    replacement.
    """
    step, *others = family.derived.steps
    graph = step.graph
    has_branch = any(isinstance(node.target, Branch) for node in graph.nodes)
    results = graph.output_node().args[0]
    clone = torch.ops.aten.clone.default
    returns_state = any(n.target is clone and n.args[0].op == "placeholder" for n in results)
    reads_index = any(name.startswith("index.") for name in step.reads)
    return not (others or has_branch or returns_state or reads_index)


@dataclass(frozen=True)
class LeafForm:
    """A leaf of a bucket as a compiled update sees it; equal leaves are updated by equal code.

    Args:
        family: how the leaf is updated.
        copied: whether the parameter is a master copy, and the stored one is written too.
        tensors_like: the forms of gradient, parameter, the stored copy if any, and the slots.
    """

    family: Family
    copied: bool
    tensors_like: tuple[Form, ...]


def form_of(value: Tensor) -> Form:
    """Return the properties of a tensor that code is compiled for."""
    return tuple(value.shape), value.dtype, value.stride()


def number_dtypes(family: Family) -> dict[str, torch.dtype]:
    """Return the dtypes of the step's numbers that an update reads, by name, in order."""
    nodes = family.traced.placeholders
    return {name: node.meta["val"].dtype for name, node in nodes.items() if name.startswith("number.")}


def stack_numbers(family: Family, control: StepControl, device: torch.device) -> Tensor:
    """Stack a family's numbers of this step and the factor of its gradients, fp64 [n + 1].

    Counts and truth values are exact in fp64 too.
    """

    def make() -> Tensor:
        flat = [*family.traced.prologue.numbers(control.step)]
        flat.append(torch.ones((), dtype=torch.float64) if control.scale is None else control.scale)
        return torch.stack([copy_to_device(n.double(), device) for n in flat])

    return control.once((family, "vector", device), make)


def trace_kernel(leaves: Sequence[LeafForm], device: torch.device) -> fx.GraphModule:
    """Trace the update of leaves of these forms as a graph that writes in place.

    Its inputs are a vector of numbers for each family, then the tensors of each leaf in the order of
    `LeafForm.tensors_like`. It writes to all but gradients and numbers.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    families = list(dict.fromkeys(leaf.family for leaf in leaves))

    # A pure function of all inputs, whose results are written back afterwards.
    def update(*values: Tensor) -> list[Tensor]:
        vectors, tensors = dict(zip(families, values, strict=False)), iter(values[len(families) :])
        out = []
        for leaf in leaves:
            # Name the leaf's tensors and numbers as the traced update does, in the dtypes that it was traced
            # with.
            (step,) = leaf.family.derived.steps
            *numbers, scale = vectors[leaf.family].unbind()
            grad, param, *others = (next(tensors) for _ in leaf.tensors_like)
            copies, slots = others[: leaf.copied], others[leaf.copied :]
            wide = torch.promote_types(param.dtype, torch.float32)
            given = {GRAD: grad.to(wide) * scale, PARAM: param}
            given |= {f"slots.{n}": v for n, v in zip(leaf.family.slots, slots, strict=True)}
            for (name, dtype), number in zip(number_dtypes(leaf.family).items(), numbers, strict=True):
                given[name] = number.to(wide if dtype.is_floating_point else dtype)
            given |= {n: v.to(device) for n, v in leaf.family.traced.constants.items()}

            # Run it, and return new values in the order of the tensors that `_write_back` writes them to.
            results = step.run(*[given[n] for n in step.reads])
            given |= dict(zip(step.writes, results, strict=True))
            new = param + given[UPDATE]
            out += [
                new,
                *(new.to(c.dtype) for c in copies),
                *(given[f"slots.{n}"] for n in leaf.family.slots),
            ]
        return out

    # Trace it on tensors without data, as a graph without views and writes.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for leaf in leaves
            for shape, dtype, stride in leaf.tensors_like
        ]
        vectors = []
        for family in families:
            vectors.append(torch.empty(len(number_dtypes(family)) + 1, dtype=torch.float64, device=device))
        pure = torch.func.functionalize(update, remove="mutations_and_views")
        with TRACING:
            table = {**select_decomp_table(), **DECOMPOSITIONS}
            module = make_fx(pure, decomposition_table=table)(*vectors, *fakes)
    _write_back(module, [leaf.tensors_like for leaf in leaves], len(families))
    return module


def _write_back(module: fx.GraphModule, tensors_like: Sequence[Sequence[Form]], vectors: int) -> None:
    """Let a graph write its results to the inputs whose new values they are, and return nothing.

    Args:
        tensors_like: the forms of each leaf's tensors, of which all but the gradient get new values.
        vectors: the number of vectors of numbers, which are the first inputs.
    """
    inputs = module.graph.find_nodes(op="placeholder")[vectors:]
    targets = []
    for forms in tensors_like:
        of_leaf, inputs = inputs[: len(forms)], inputs[len(forms) :]
        targets += of_leaf[1:]
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        for target, value in zip(targets, output.args[0], strict=True):
            written = module.graph.call_function(torch.ops.aten.copy_.default, (target, value))
            written.meta["val"] = target.meta["val"]
    output.args = ((),)
    module.recompile()


@dataclass
class CompiledUpdates:
    """The compiled updates of a step, by the forms of their leaves; simulated ranks share them.

    Args:
        options: options of Inductor.
        kernels: the kernels so far.
    """

    options: Mapping[str, Any]
    kernels: dict[tuple[LeafForm, ...], Boxed] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def get(self, leaves: tuple[LeafForm, ...], device: torch.device) -> Boxed:
        """Return the kernel for leaves of these forms, which is compiled at the first call."""
        if leaves not in self.kernels:
            with self._lock:
                if leaves not in self.kernels:  # another simulated rank may have compiled it meanwhile
                    graph = trace_kernel(leaves, device)
                    self.kernels[leaves] = compile_graph(
                        graph, backend="inductor", options=self.options, is_backward=False
                    )
        return self.kernels[leaves]

    def run(self, families: Sequence[Family], tensors: Sequence[Sequence[Tensor]], copied: Sequence[bool],
            control: StepControl) -> None:  # fmt: skip
        """Update leaves.

        Args:
            families: how each leaf is updated.
            tensors: the tensors of each leaf, in the order of `LeafForm.tensors_like`.
            copied: whether each has a master copy and a stored one.
        """
        leaves = tuple(
            LeafForm(family, is_copied, tuple(map(form_of, of_leaf)))
            for family, of_leaf, is_copied in zip(families, tensors, copied, strict=True)
        )
        device = tensors[0][0].device
        kernel, vectors = self.get(leaves, device), {}
        for leaf in leaves:
            vectors.setdefault(leaf.family, stack_numbers(leaf.family, control, device))
        kernel([*vectors.values(), *(value for of_leaf in tensors for value in of_leaf)])
