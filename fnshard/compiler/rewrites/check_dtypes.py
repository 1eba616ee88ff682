"""Refuse mixed dtypes where an op takes one; fake tensors let them pass, and kernels do not."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.failures import MIXED, error_at
from fnshard.compiler.ir.program import OpOverload, Program, arguments_of, describe, nodes_in

# The ops, in place or not, whose dtypes torch does not check on tensors without values.
_SAME = frozenset([
    "linear", "matmul", "mm", "mv", "addmm", "addmv", "addbmm", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution",
    "_convolution_mode", "index_put", "index_add", "index_copy", "put", "cross", "linalg_cross", "cdist",
    "binary_cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d", "multi_margin_loss", "grid_sampler",
    "embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "polar", "complex",
])  # fmt: skip
# These take parameters and statistics in fp32 with an input in half precision.
_NORMS = frozenset(["layer_norm", "group_norm", "batch_norm", "instance_norm"])
_HALF = (torch.bfloat16, torch.float16)
# These may be integers with floats, but the target of `binary_cross_entropy` is a probability.
_INDICES = frozenset(["index", "indices", "offsets", "target"])
_PROBABILITIES = frozenset(["binary_cross_entropy"])


def check_dtypes(program: Program) -> None:
    """Refuse dtypes that eager torch refuses: say, a float32 batch times a leaf that computes in bfloat16.

    Raises:
        TraceError: lists all such ops, with the leaf or batch leaf that each operand comes from.
    """
    names = dict(zip(program.placeholders, program.inputs, strict=True))
    wrong = []
    for node in program.graph.nodes:
        name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""
        kind = name.rstrip("_")
        if not (kind in _SAME or kind in _NORMS) or node.meta.get("autocast"):
            continue

        indices = _INDICES - {"target"} if kind in _PROBABILITIES else _INDICES
        operands = _find_operands(node, indices)
        dtypes = {n.meta["val"].dtype for n in operands}
        if kind in _NORMS and operands[0].meta["val"].dtype in _HALF:
            dtypes.discard(torch.float32)
        if len(dtypes) > 1:
            wrong.append((node, f"{name} of " + " and ".join(_describe_source(n, names) for n in operands)))
    if wrong:
        raise error_at(
            f"`fn` gives tensors of different dtypes {len(wrong)} time(s) to one op:", wrong, MIXED
        )


def _find_operands(node: fx.Node, indices: Collection[str]) -> list[fx.Node]:
    """Return the tensor operands of a node, without integers that are passed as one of `indices`."""
    operands = []
    for name, argument in arguments_of(node.target, node.args, node.kwargs).items():
        for each in nodes_in(argument):
            if isinstance(each.meta["val"], Tensor):
                dtype = each.meta["val"].dtype
                if dtype.is_floating_point or dtype.is_complex or name not in indices:
                    operands.append(each)
    return operands


def _describe_source(node: fx.Node, names: dict[fx.Node, object]) -> str:
    """Describe a tensor, and name the leaf or batch leaf that it is made of.

    It is named if there is only one, and of the same dtype.
    """
    text, source = describe(node.meta["val"]), node
    while source not in names and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    origin = names.get(source)
    if origin is None or source.meta["val"].dtype != node.meta["val"].dtype:
        return text
    name = {"leaf": f"params[{origin.name!r}]", "batch": f"batch[{origin.name!r}]"}.get(origin.kind, "")
    return f"{name} {text}".strip()
