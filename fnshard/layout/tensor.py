"""Tensor: which leaves a tensor axis splits, and along which dim: columns, rows, heads, vocabulary.

By name for the families that people use; else matrices are paired: the outputs of the first are the inputs
of the second, and are split between them (Megatron-LM, Shoeybi et al. 2019). What is chosen here decides how
fast a step is, never what it computes: that is derived in `compiler.place`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fnshard.layout.spec import P, is_buffer
from fnshard.mesh import Mesh

# By the last names of a path. "columns": outputs are split; "rows": inputs, whose products are summed;
# "vocabulary": rows of a table or a head.
_NAMES = {
    "columns": "q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj fc1 c_fc wi wi_0 wi_1 "
    "wq wk wv w1 w3 gate up q k v query key value",
    "rows": "o_proj out_proj down_proj dense fc2 wo w2 down o c_proj",
    "vocabulary": "embed_tokens wte shared lm_head tok_embeddings embed_in embed_out embedding embed head",
}
_KIND = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# transformers' Conv1D of GPT-2 holds [inputs, outputs].
_TRANSPOSED = {"c_fc", "c_proj", "c_attn"}


def tensor_layouts(named: Mapping[str, Tensor], axis: str, mesh: Mesh) -> dict[str, P]:
    """`{path: compute}` of the leaves that `axis` splits; whole is what does not divide.

    Args:
        named: leaves by path; shapes alone are read.

    >>> import torch
    >>> from fnshard.mesh import make_mesh
    >>> leaves = {"mlp.up_proj.weight": torch.empty(8, 4), "mlp.down_proj.weight": torch.empty(4, 8)}
    >>> tensor_layouts(leaves, "tensor", make_mesh(tensor=2, abstract=True))
    {'mlp.up_proj.weight': P('tensor'), 'mlp.down_proj.weight': P(None, 'tensor')}
    """
    ranks, out = mesh.axis_size(axis), {}
    for path, leaf in named.items():
        if is_buffer(leaf) or not leaf.is_floating_point():
            continue
        dim = _split_dim(path, leaf)
        if dim is not None and leaf.shape[dim] % ranks == 0:
            out[path] = P(*[None] * dim, axis)
    return out


def _split_dim(path: str, leaf: Any) -> int | None:
    """Along which dim a leaf is split, by its name."""
    parts = re.split(r"[./]", path)
    names = [p for p in parts if p not in ("weight", "bias")]
    name = names[-1] if names else ""
    kind = _KIND.get(name)
    if kind is None or leaf.dim() not in (1, 2):
        return None
    if leaf.dim() == 1:
        return 0 if kind == "columns" or (kind == "vocabulary" and parts[-1] == "bias") else None
    first = 1 if kind == "rows" else 0
    return 1 - first if name in _TRANSPOSED else first
