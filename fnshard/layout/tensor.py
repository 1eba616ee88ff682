"""Tensor parallelism: which leaves a tensor axis splits, and along which dim.

The names that models give their matrices decide it. Matrices of other names are paired: the outputs of one
are the inputs of a later one, and are split between them (Megatron-LM, Shoeybi et al. 2019). The choice
decides how fast a step is, never what it computes: `compiler.place` derives that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from fnshard.layout.partition import Fused, P, every_rank_has_some
from fnshard.layout.spec import is_buffer
from fnshard.layout.units import numeric
from fnshard.mesh import Mesh

# The kind of a matrix by the last name of its path, or the last two. The axis splits the outputs of
# "columns", the inputs of "rows" (whose products are summed), the rows of "vocabulary" and the columns of
# "heads". "qkv" and "gated" are three and two matrices side by side, and the outputs of each are split.
# Small tables, of positions and token types, stay "whole".
_NAMES = {
    "columns": "q_proj k_proj v_proj q k v query key value wq wk wv q_lin k_lin v_lin to_q to_k to_v "
    "q_b_proj kv_b_proj gate_proj up_proj up fc1 fc_in c_fc wi wi_0 wi_1 w1 w3 lin1 linear1 "
    "intermediate.dense dense_h_to_4h query_key_value",
    "rows": "o_proj out_proj o wo out out_lin to_out down_proj down dense fc2 fc_out c_proj w2 "
    "lin2 linear2 dense_4h_to_h",
    "vocabulary": "embed_tokens wte shared lm_head tok_embeddings embed_in embed_out embedding embed head "
    "word_embeddings token_embedding predictions",
    "heads": "relative_attention_bias",
    "qkv": "c_attn qkv qkv_proj Wqkv in_proj",
    "gated": "gate_up_proj",
    "whole": "wpe pos position_embedding position_embeddings embed_positions token_type_embeddings",
}
_FUSED = {"qkv": 3, "gated": 2}  # how many matrices lie side by side
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def tensor_layouts(named: Mapping[str, Tensor], axis: str, mesh: Mesh) -> dict[str, P]:
    """Return `{path: compute}` of the leaves to split over `axis`.

    A leaf whose dim the axis does not divide has `P()`.

    Args:
        named: leaves by path; only their shapes are read.

    >>> import torch
    >>> from fnshard.mesh import make_mesh
    >>> leaves = {"mlp.up_proj.weight": torch.empty(8, 4), "mlp.down_proj.weight": torch.empty(4, 8)}
    >>> tensor_layouts(leaves, "tensor", make_mesh(tensor=2, abstract=True))
    {'mlp.up_proj.weight': P('tensor'), 'mlp.down_proj.weight': P(None, 'tensor')}
    """
    ranks = mesh.axis_size(axis)

    layouts: dict[str, P] = {}
    for path, dim in split_dims(named).items():
        leaf = named[path]
        size = leaf.shape[dim]
        # An adapter is split as the matrix that it adapts.
        kind = _find_kind(_strip_suffix(getattr(leaf, "adapts", path)))
        count = _FUSED.get(kind, 1)
        # Only a vocabulary may be padded.
        can_pad = kind == "vocabulary" and every_rank_has_some(size, ranks)
        fits = can_pad or size % (count * ranks) == 0
        layouts[path] = P(*[None] * dim, Fused(axis, count)) if fits else P()
    return layouts


def split_dims(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Return `{path: dim}`, the dim along which a tensor axis splits each leaf that it splits.

    >>> import torch
    >>> split_dims({"0.weight": torch.empty(6, 4), "0.bias": torch.empty(6), "2.weight": torch.empty(3, 6)})
    {'0.weight': 0, '0.bias': 0, '2.weight': 1}
    """
    # Matrices and their biases, by the path that they have in common.
    floats = {p: v for p, v in named.items() if v.is_floating_point() and v.dim() in (1, 2)}
    leaves = {p: v for p, v in floats.items() if not is_buffer(v) and not hasattr(v, "adapts")}
    matrices = {_strip_suffix(p): p for p, v in leaves.items() if v.dim() == 2}
    biases = {_strip_suffix(p): p for p, v in leaves.items() if v.dim() == 1 and p.endswith("bias")}

    unit_of = numeric(named)
    sizes = {stem: tuple(leaves[path].shape) for stem, path in matrices.items()}
    # Matrices are [outputs, inputs], as nn.Linear's. If in a unit a bias has the length of dim 1 and not of
    # dim 0, all its matrices are [inputs, outputs] (GPT-2's Conv1D).
    transposed = {
        unit_of[path]
        for stem, path in matrices.items()
        if stem in biases and sizes[stem][0] != len(leaves[biases[stem]]) == sizes[stem][1]
    }
    output_dim = {stem: int(unit_of[path] in transposed) for stem, path in matrices.items()}
    kinds = {stem: kind for stem in (*matrices, *biases) if (kind := _find_kind(stem))}

    # Where keys and values have fewer heads than queries, a fused matrix has unequal parts, and stays whole.
    for stem, (first, last) in sizes.items():
        outputs, inputs = (last, first) if output_dim[stem] else (first, last)
        if kinds.get(stem) == "qkv" and outputs != 3 * inputs:
            kinds[stem] = "whole"

    # Matrices whose names tell nothing are paired by their sizes, unit by unit.
    for group in _group_matrices({stem: unit_of[path] for stem, path in matrices.items()}):
        kinds |= _pair_matrices({s: sizes[s][::-1] if output_dim[s] else sizes[s] for s in group}, kinds)

    # From kinds to dims. A bias of outputs is split where the outputs are.
    dim_of: dict[str, int] = {}
    for stem, kind in kinds.items():
        if stem in matrices and kind != "whole":
            outputs = output_dim[stem]
            dims = {"rows": 1 - outputs, "vocabulary": 0, "heads": 1}
            dim_of[matrices[stem]] = dims.get(kind, outputs)
        if stem in biases and kind in ("columns", "vocabulary", *_FUSED):
            dim_of[biases[stem]] = 0

    # LoRA's `a` is [rank, inputs] and `b` [outputs, rank]: the one that meets the split dim is split with it.
    for path, leaf in named.items():
        base = getattr(leaf, "adapts", None)
        if base not in dim_of:
            continue
        splits_outputs = dim_of[base] == output_dim[_strip_suffix(base)]
        if path.endswith(".b" if splits_outputs else ".a"):
            dim_of[path] = 0 if splits_outputs else 1
    return {path: dim_of[path] for path in named if path in dim_of}


def _strip_suffix(path: str) -> str:
    """Return a path without a final "weight" or "bias": what a matrix and its bias have in common."""
    return re.sub(r"(^|[._])(weight|bias)$", "", path)


def _find_kind(stem: str) -> str | None:
    """Return the kind of a matrix by the last names of its path; None for names that nobody knows."""
    names = stem.split(".")
    return _KINDS.get(".".join(names[-2:])) or _KINDS.get(names[-1])


def _group_matrices(unit_of: Mapping[str, str]) -> Iterable[list[str]]:
    """Group matrices by their unit; pairs are looked for within a group.

    Units of a single matrix beneath one module, as an `nn.Sequential` has them, are one group.
    """
    count = Counter(unit_of.values())
    groups: dict[tuple[str, bool], list[str]] = {}
    for stem, unit in unit_of.items():
        is_alone = count[unit] == 1
        name = unit.rpartition(".")[0] if is_alone else unit
        groups.setdefault((name, is_alone), []).append(stem)
    return groups.values()


def _pair_matrices(sizes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return kinds for matrices that have none: a matrix is "rows", and those that feed it are "columns".

    Several matrices may feed one, as in a gated MLP.

    Args:
        sizes: (outputs, inputs) of each matrix, in the order of the model.
    """
    paired: dict[str, str] = {}
    unpaired: list[str] = []
    for stem, (_, inputs) in sizes.items():
        # All matrices so far that have as many outputs as this one has inputs, and no partner yet.
        feeding = [s for s in unpaired if sizes[s][0] == inputs]
        if kinds.get(stem, "rows") == "rows" and feeding:
            paired |= dict.fromkeys(feeding, "columns") | {stem: "rows"}
            unpaired = [s for s in unpaired if s not in feeding]
        elif stem not in kinds:
            unpaired.append(stem)
    return paired
