"""Add in fp64 where a kernel for the CPU adds up many numbers to each result.

Inductor adds in fp32, one running sum for each vector lane: the mean of 6e7 equal numbers is off by 9e-5.
torch's own `sum`, which adds in pairs, is off by 1e-7.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from fnshard.optim.sums import PIECE

aten = torch.ops.aten
# All other sums, such as `logsumexp`, have been decomposed into these by then.
SUMS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.linalg_vector_norm.default,
    aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction,
}  # fmt: skip
ROWS = 16 * PIECE  # the most numbers for each of several results in fp32, such as a row of a model's width
NARROW = {torch.float32, torch.bfloat16, torch.float16}


def widen_sums(graph: fx.Graph) -> None:
    """Take sums, means, variances and norms of many numbers in fp64, and round them to their dtype."""
    convert = torch.ops.prims.convert_element_type.default
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in SUMS:
            continue
        # A norm of these orders is a count, the largest number or the smallest, and loses nothing.
        if node.target is aten.linalg_vector_norm.default:
            order = node.args[1] if len(node.args) > 1 else 2
            if order == 0 or math.isinf(order):
                continue

        # Sums of few numbers lose nothing that matters, and fp64 takes time.
        summed, results = node.args[0].meta["val"], node.meta["val"]
        has_several = not isinstance(results, Tensor)
        result = results[0] if has_several else results
        few = PIECE if result.numel() == 1 else ROWS * result.numel()
        if summed.numel() <= few or {summed.dtype, result.dtype} - NARROW:
            continue

        # Widen the argument; a node with several results has an item for each.
        parts = [u for u in node.users if u.target is operator.getitem] if has_several else [node]
        with graph.inserting_before(node):
            wide = graph.call_function(convert, (node.args[0], torch.float64))
        wide.meta = {**node.args[0].meta, "val": summed.new_empty(summed.shape, dtype=torch.float64)}
        node.args = (wide, *node.args[1:])
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}

        # Round the results, which readers take in their place.
        for part in parts:
            users = list(part.users)
            with graph.inserting_after(part):
                rounded = graph.call_function(convert, (part, result.dtype))
            rounded.meta = dict(part.meta)
            part.meta = {**part.meta, "val": part.meta["val"].to(torch.float64)}
            for user in users:
                user.replace_input_with(part, rounded)
        if has_several:
            node.meta = {**node.meta, "val": type(results)(v.to(torch.float64) for v in results)}
