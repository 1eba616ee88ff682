"""Recognise an explicit causal mask and hand it to attention as `is_causal`.

Models that are written to be traced build a [B, 1, T, T] mask from aranges where eager code would pass
`is_causal=True`. With such a mask flash attention is lost, and the T x T matrix is kept. A mask that depends
on no input is a constant: it is computed here and compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.deferred.tape import CPU, map_leaves
from fnshard.compiler.ir.program import arguments_of

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_LIMIT = 1 << 27  # a mask of more elements stays explicit


def recognise_causal(graph: fx.Graph) -> int:
    """Rewrite each attention whose mask is causal or lets all through, and return how many were rewritten."""
    known: dict[tuple[fx.Node, tuple[int, ...]], str | None] = {}  # layers share their mask
    rewritten = 0
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        named = arguments_of(node.target, node.args, node.kwargs)
        mask = named["attn_mask"]
        if not isinstance(mask, fx.Node) or named["is_causal"]:
            continue

        scores = (*node.meta["val"].shape[:-1], node.args[1].meta["val"].shape[-2])  # [..., T, S]
        if (mask, scores) not in known:
            known[mask, scores] = _classify_mask(mask, scores)

        kind = known[mask, scores]
        if kind is None:
            continue
        node.args = (*node.args[:3], None, named["dropout_p"], kind == "causal")
        rewritten += 1
    if rewritten:
        graph.eliminate_dead_code()
    return rewritten


def _classify_mask(mask: fx.Node, scores: tuple[int, ...]) -> str | None:
    """Return "causal", "all", or None for any other mask, as it is broadcast to `scores` [..., T, S]."""
    shape = mask.meta["val"].shape
    t, s = scores[-2:]
    if max(shape.numel(), t * s) > _LIMIT or torch.broadcast_shapes(shape, scores) != scores:
        return None
    value = _evaluate_constant(mask)
    if value is None:
        return None

    # A mask of numbers lets through by 0, and hides by the lowest number or minus infinity.
    if value.dtype != torch.bool:
        lowest = torch.finfo(value.dtype).min
        if not bool(((value == 0) | (value <= lowest)).all()):
            return None
        value = value == 0

    if bool(value.all()):
        return "all"
    # Where T and S differ, torch's is_causal aligns the first query with the first key, as `tril` does.
    below = torch.ones(t, s, dtype=torch.bool).tril()
    return "causal" if bool((value == below).all()) else None


def _evaluate_constant(mask: fx.Node) -> Tensor | None:
    """Return the mask's value if it depends on no input, else None."""
    # Collect the nodes that the mask is made of, and stop at the first input.
    needed, to_visit = {mask}, [mask]
    while to_visit:
        node = to_visit.pop()
        if node.op != "call_function":
            return None
        new = set(node.all_input_nodes) - needed
        needed |= new
        to_visit += new

    # Run them on the CPU, whatever device the program is traced for.
    env: dict[fx.Node, Any] = {}
    for node in (node for node in mask.graph.nodes if node in needed):
        called = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = map_leaves(called, torch.device, lambda _: CPU)
        env[node] = node.target(*args, **kwargs)
    return env[mask]
