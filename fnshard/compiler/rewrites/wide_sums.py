"""Wide sums: what a kernel for the CPU adds up to one number, it adds in fp64.

Inductor adds in fp32, a lane each: the mean of 6e7 equal numbers is off by 9e-5, where torch's own `sum`,
which adds by halves, is off by 1e-7.
"""

from __future__ import annotations

import torch
from torch import fx

from fnshard.optim.sums import PIECE

aten = torch.ops.aten
SUMS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.linalg_vector_norm.default,
}  # fmt: skip
NARROW = {torch.float32, torch.bfloat16, torch.float16}


def widen_sums(graph: fx.Graph) -> None:
    """Let sums, means and norms of many numbers to one be taken in fp64, and rounded to their dtype."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in SUMS:
            continue
        many, one = node.args[0].meta["val"], node.meta["val"]
        if one.numel() != 1 or many.numel() <= PIECE or many.dtype not in NARROW or one.dtype not in NARROW:
            continue
        users = list(node.users)
        with graph.inserting_after(node):
            rounded = graph.call_function(torch.ops.prims.convert_element_type.default, (node, one.dtype))
        rounded.meta = dict(node.meta)
        node.kwargs = {**node.kwargs, "dtype": torch.float64}
        node.meta = {**node.meta, "val": one.new_empty(one.shape, dtype=torch.float64)}
        for user in users:
            user.replace_input_with(node, rounded)
