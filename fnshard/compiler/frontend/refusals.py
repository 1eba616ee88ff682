"""Refuse what `fn` must not do, as seen in its program; `unsupported` refuses calls of torch functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from fnshard import tree
from fnshard.compiler.frontend.contexts import CLOSURE_LIMIT_BYTES, is_fake
from fnshard.compiler.ir.failures import TRAINED, error_at
from fnshard.compiler.ir.program import Program, describe, mutated_args, storage_id
from fnshard.compiler.rewrites.check_dtypes import check_dtypes
from fnshard.errors import TraceError, leaves
from fnshard.layout.spec import LayoutSpec


def check_requires_grad(paths: Iterable[str], before: Sequence[bool], leaf_values: Sequence[Tensor]) -> None:
    """Refuse a `fn` that changes which leaves require grad; `before` says which did when it was called."""
    changed = [p for p, b, v in zip(paths, before, leaf_values, strict=True) if v.requires_grad != b]
    if changed:
        raise TraceError(
            f"`fn` changes requires_grad of {leaves(len(changed))}, which a trace loses:",
            [f"params[{p!r}]" for p in changed],
            "say trainable=True or False in the leaf's spec, or read it through .detach(); write to "
            "buffers under torch.no_grad(), or what is detached.",
        )


def check_constants(constants: Mapping[str, Tensor]) -> None:
    """Refuse tensors that `fn` closes over and that are fakes, require grad or are large."""
    lost = [describe(v) for v in constants.values() if is_fake(v)]
    if lost:
        raise TraceError(
            f"the trace lost sight of {len(lost)} value(s) that `fn` computes:",
            lost,
            "look for torch.jit functions, C++ extensions that are no custom_op, and tensors that a "
            "module kept from an earlier trace (compute such caches beforehand); a backward or a gradient "
            "hook that calls torch.autograd.grad computes again what it differentiates, under "
            "torch.enable_grad() and from detached inputs.",
        )

    # Sparse, nested and other unusual tensors have no strides, and cannot be computed with.
    kinds = [tree.unusual(v) or ("a conjugated view" if v.is_conj() else "") for v in constants.values()]
    odd = [kind for kind in kinds if kind]
    if odd:
        raise TraceError(f"`fn` closes over {len(odd)} tensor(s) it cannot compute with:", odd, tree.DENSE)

    # Constants have no gradients and are not sharded: a tensor that trains or is large is an argument.
    wrong = [
        describe(v) + (" that requires grad" if v.requires_grad else "")
        for v in constants.values()
        if v.requires_grad or v.nbytes > CLOSURE_LIMIT_BYTES
    ]
    if wrong:
        raise TraceError(
            f"`fn` closes over {len(wrong)} tensor(s) that must be arguments (they require grad, "
            "or are larger than 1 MB):",
            wrong,
            "put them into the parameter tree (trainable=False if frozen), or pass them with the batch.",
        )


def check_program(program: Program, specs: Mapping[str, LayoutSpec], differentiate: bool) -> None:
    """Refuse a program with unusual tensors, forbidden writes, or a loss that cannot be differentiated."""
    values = ((n, n.meta.get("val")) for n in program.graph.nodes)
    odd = [
        (n, f"{n.target}, {tree.unusual(v)}") for n, v in values if isinstance(v, Tensor) and tree.unusual(v)
    ]
    if odd:
        raise error_at("`fn` makes tensors that cannot be cut and differentiated:", odd, tree.DENSE)

    # Refuse writes to tensors that `fn` closes over. By now the tracer has run such a write, once and on the
    # tensor itself. A value that `fn` leaves there for the next step (a counter, an average) would be lost.
    written_constants = [describe(program.constants[n]) for n in written_inputs(program, "constant")]
    if written_constants:
        raise TraceError(
            f"`fn` writes in place to {len(written_constants)} tensor(s) that it closes over:",
            written_constants,
            "clone it first; what must live from step to step is a leaf of the parameter tree "
            "(trainable=False), which a step stores.",
        )
    _check_written_leaves(program, specs, differentiate)

    check_dtypes(program)
    if differentiate and not program.results[program.outputs.loss].meta["val"].requires_grad:
        raise TraceError(
            "the loss depends on no trainable leaf.",
            fix="set trainable=True in the spec of a leaf it reads, and look for detach or no_grad.",
        )


def written_inputs(program: Program, kind: str) -> dict[str, fx.Node]:
    """Return the inputs of a kind that `fn` writes to, in their order, each with the first node that does."""
    # A write to a view is one to the input whose memory it shows.
    first: dict[int, fx.Node] = {}
    for node in program.graph.nodes:
        for arg in mutated_args(node):
            first.setdefault(storage_id(arg.meta["val"]), node)
    named = zip(program.placeholders, program.inputs, strict=True)
    writers = {i.name: first.get(storage_id(n.meta["val"])) for n, i in named if i.kind == kind}
    return {name: node for name, node in writers.items() if node is not None}


def _check_written_leaves(program: Program, specs: Mapping[str, LayoutSpec], differentiate: bool) -> None:
    """Refuse writes to leaves that train, or that `fn` sees rounded; a forward may write to none."""
    wrong, narrow = [], []  # leaves that must not be written to; those whose updates would be rounded
    for path, node in written_inputs(program, "leaf").items():
        spec, name = specs[path], f"params[{path!r}] by {str(node.target).removesuffix('.default')}"
        if spec.trainable or not differentiate:
            wrong.append((node, name))
        elif torch.promote_types(spec.storage_dtype, spec.compute_dtype) != spec.compute_dtype:
            narrow.append((node, f"{name}, stored in {spec.storage_dtype}"))

    if narrow:
        raise error_at(
            f"`fn` writes to {leaves(len(narrow))} that it sees in a narrower dtype than they are stored in:",
            narrow,
            "compute_dtype=storage_dtype in their specs: what is added to them would be rounded away.",
        )
    if wrong:
        fix = TRAINED if differentiate else "a forward stores nothing: model.eval()."
        raise error_at(f"`fn` changes {leaves(len(wrong))} in place:", wrong, fix)
