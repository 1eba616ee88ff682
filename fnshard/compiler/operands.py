"""Operands: products of tensors whose dtypes differ, which fakes let pass and kernels do not."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fnshard.compiler.program import Program, describe
from fnshard.errors import TraceError, report

_aten = torch.ops.aten
PRODUCTS = {
    op.default for op in (_aten.linear, _aten.matmul, _aten.mm, _aten.mv, _aten.addmm, _aten.addmv)
}  # of those that `fn` may call, the ones that torch does not check on tensors without values


def check_dtypes(program: Program) -> None:
    """Refuse products of, say, a float32 batch and a leaf that computes in bfloat16.

    Raises:
        TraceError: all of them, each operand by the leaf or batch leaf that it comes from.
    """
    names = dict(zip(program.placeholders, program.inputs, strict=True))
    wrong = []
    for node in program.graph.nodes:
        if node.target not in PRODUCTS or node.meta.get("autocast"):
            continue
        operands = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        if len({n.meta["val"].dtype for n in operands}) > 1:
            op = str(node.target).removeprefix("aten.").removesuffix(".default")
            wrong.append(f"{op} of " + " and ".join(_named(n, names) for n in operands))
    if wrong:
        raise TraceError(
            report(
                f"`fn` multiplies tensors of different dtypes {len(wrong)} time(s):",
                wrong[:8],
                "a leaf computes in its spec's compute_dtype, and the batch comes as it is: cast what comes "
                "with the batch, or what was computed in another dtype, as in x.to(weight.dtype).",
            )
        )


def _named(node: fx.Node, names: dict[fx.Node, object]) -> str:
    """What it is, and the leaf or batch leaf that it is made of, if of that alone and in its dtype."""
    told, seen = describe(node.meta["val"]), node
    while seen not in names and len(seen.all_input_nodes) == 1:
        seen = seen.all_input_nodes[0]
    place = names.get(seen)
    if place is None or seen.meta["val"].dtype != node.meta["val"].dtype:
        return told
    where = {"leaf": f"params[{place.name!r}]", "batch": f"batch[{place.name!r}]"}.get(place.kind, "")
    return f"{where} {told}".strip()
