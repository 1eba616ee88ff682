"""Presets: common strategies by name. Each is a function from parameters and a mesh to specs."""

from __future__ import annotations

import fnmatch
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.errors import SpecError, leaves, report
from fnshard.layout.partition import P, block_shape
from fnshard.layout.rules import Rule, apply_rules, check_params, check_rules, find_rule, find_units
from fnshard.layout.spec import FP8, LayoutSpec, check_fields, fits_fp8, is_buffer
from fnshard.layout.tensor import tensor_layouts
from fnshard.layout.units import numeric
from fnshard.mesh import Mesh, check_mesh

__all__ = [
    "PRESETS", "best_split", "full_shard", "hybrid_shard", "no_shard", "register", "shard_grad_op",
    "zero1", "zero2", "zero3",
]  # fmt: skip

Layouts = Callable[[P], dict[str, Any]]
EMBEDDINGS = "*embed*|*token.*|*wte*|*wpe*|*lm_head*|head.*|*.head.*"  # embeddings and heads


def _make_preset(layouts: Layouts, axes: Callable[[Mesh], tuple[str, ...]], doc: str) -> Callable[..., Any]:
    """Make a preset.

    Args:
        layouts: a function from the layout of a leaf that is split to fields of its `LayoutSpec`.
        axes: the mesh axes that split leaves.
        doc: how its docstring begins; that of its arguments is added.
    """

    def preset(
        params: Any,
        mesh: Mesh,
        *,
        rules: Sequence[Rule] = (),
        units: Callable[[Any], Mapping[str, str]] | None = None,
        tensor: str | Mapping[str, P] | None = None,
        expert: str | None = None,
        chunks: int = 1,
        **policy: Any,
    ) -> Any:
        named, _ = tree.flatten_with_paths(params)
        check_mesh(mesh)
        check_params(named)
        check_fields("a preset", policy, ("rules", "units", "tensor", "expert", "chunks"))
        rules = check_rules(rules)

        # The user's rules decide for some leaves; the preset makes a rule for each of the others (`free`).
        by_rule = {p: rules[i][1] for p in named if (i := find_rule(p, rules)) is not None}
        free = {path: leaf for path, leaf in named.items() if path not in by_rule}

        # The spec reads the dtype that the policy asks for, which may be given by its name.
        compute_dtype = LayoutSpec(compute_dtype=policy.get("compute_dtype")).compute_dtype
        asks_for_fp8 = compute_dtype == FP8 and policy.get("trainable") is not False

        # Find the axes that split what leaves compute (`compute`), by the options for tensor and expert axes.
        is_coded = bool(policy.get("codec"))
        computes = {
            **_read_tensor_option(named, free, tensor, mesh, is_coded),
            **_read_expert_option(free, expert, mesh, policy),
        }

        # Find the unit and the chunk of each leaf. A rule may name either, and then decides.
        unit_of = find_units(units or numeric, params, named)
        unit_of = {**unit_of, **{path: spec.unit for path, spec in by_rule.items() if spec.unit}}
        uncut = {p: leaf for p, leaf in named.items() if p in free or by_rule[p].chunk is None}
        chunk_of = cut_chunks(uncut, unit_of, mesh, chunks, computes)

        # Each leaf that no rule of the user's takes gets a rule of its own.
        preset_rules: list[Rule] = []
        in_bf16: list[str] = []
        for path, leaf in free.items():
            compute = computes.get(path, P())
            if is_buffer(leaf) or not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                layout = P()
            else:
                shape = leaf.shape[:1] if is_coded else leaf.shape  # codecs code rows: only dim 0 may be cut
                storing_axes = tuple(a for a in axes(mesh) if a not in compute.axes)
                layout = best_split(shape, storing_axes, mesh, compute)
            fields = {"compute": compute, **layouts(layout), **policy}
            # Where fp8 does not fit, the leaf computes in bf16; a warning names the matrices among these.
            if asks_for_fp8 and not _is_multiplied_in_fp8(path, leaf, compute):
                fields["compute_dtype"] = torch.bfloat16
                if leaf.dim() == 2 and leaf.dtype.is_floating_point and not is_buffer(leaf):
                    in_bf16.append(f"params[{path!r}] {list(leaf.shape)}")
            preset_rules.append((escape(path), LayoutSpec(**fields)))
        if in_bf16:
            message = report(f"{leaves(len(in_bf16))} of two dims stay in bf16, not fp8:", _cut_list(in_bf16))
            warnings.warn(message, stacklevel=2)
        return apply_rules(params, [*rules, *preset_rules], unit_of, chunk_of)

    preset.__doc__ = doc + (
        "\n\n    Args:\n        params: a tree of full shapes; real, meta or fake tensors.\n"
        "        mesh: the mesh, whose axes and sizes are read.\n"
        "        rules: pairs `(glob, LayoutSpec)` that come before the preset's own.\n"
        "        units: a unit policy, see `fnshard.units`.\n"
        "        tensor: a mesh axis that splits what matrices compute (tensor parallelism): columns, rows,\n"
        "            heads, vocabulary, by name or in pairs; or `LayoutSpec.compute` by path. Leaves that\n"
        "            it does not divide stay whole, with a warning.\n"
        '        expert: a data axis that splits stacks of experts, leaves [E, M, N] with "experts" in\n'
        "            their path, while they compute (expert parallelism): see `LayoutSpec.compute`.\n"
        "        chunks: the number of chunks that each stage of a pipeline runs. A chunk is consecutive\n"
        "            units in the order of the tree, and all have about as many bytes; leaves whose rule\n"
        "            names no chunk are cut with them. A tied leaf belongs to all stages; any other leaf\n"
        '            that several stages read takes a rule with LayoutSpec(chunk="all").\n'
        "        policy: further LayoutSpec fields for all leaves, such as compute_dtype. With\n"
        "            float8_e4m3fn, embeddings, heads, leaves that do not train, and whatever is not a\n"
        "            matrix of multiples of 16 stay in bf16.\n"
    )
    return preset


def _is_multiplied_in_fp8(path: str, leaf: Tensor, compute: P) -> bool:
    """Return whether products with a leaf are in eight bits, where the policy asks for fp8."""
    trains = leaf.requires_grad or not isinstance(leaf, nn.Parameter)
    at_the_ends = any(fnmatch.fnmatchcase(path, glob) for glob in EMBEDDINGS.split("|"))
    return trains and fits_fp8(leaf.shape) and not compute.axes and not at_the_ends


def _cut_list(lines: list[str]) -> list[str]:
    """Return the first eight lines of a message, and "..." in place of the others."""
    return lines if len(lines) <= 8 else [*lines[:8], "..."]


def _read_tensor_option(
    named: Mapping[str, Tensor],
    free: Mapping[str, Tensor],
    tensor: str | Mapping[str, P] | None,
    mesh: Mesh,
    is_coded: bool,
) -> Mapping[str, P]:
    """Return `{path: compute}` as `tensor=` says, and warn of leaves that the axis cannot split.

    Args:
        free: the leaves that no rule takes.
        is_coded: whether leaves are coded. Codecs code rows, which then no axis may cut.

    Raises:
        SpecError: `tensor` is no axis whose ranks see the same rows, or a dict that names other leaves or
            axes.
    """
    if tensor is None:
        return {}
    if not isinstance(tensor, str | Mapping):
        raise SpecError(
            f"tensor={tensor!r}: the name of a mesh axis, or a dict from paths to P(...).",
            fix="tensor='tensor', or tensor={'layers.0.up.weight': P('tensor')}.",
        )

    # A dict is taken as it is, once its leaves and axes are known.
    if not isinstance(tensor, str):
        if unknown := [f"tensor[{path!r}]" for path in tensor if path not in free]:
            raise SpecError(
                f"{leaves(len(unknown))} that the preset has no layout for:",
                unknown,
                "name leaves of the tree that no rule takes.",
            )
        rows = {"context", *mesh.data_axes}
        if odd := [f"tensor[{path!r}]={p!r}" for path, p in tensor.items() if rows & {*p.axes}]:
            raise SpecError(
                f"{leaves(len(odd))} split over an axis that splits rows, or sequences, and no leaf:",
                odd,
                "name another axis, as 'tensor' in make_mesh(shard=4, tensor=2).",
            )
        return tensor

    if tensor not in mesh.names or tensor in mesh.data_axes:
        raise SpecError(
            f"tensor={tensor!r} is {'a data' if tensor in mesh.names else 'no'} axis of the mesh {mesh}.",
            fix="name an axis whose ranks see the same rows: make_mesh(shard=4, tensor=2), tensor='tensor'.",
        )

    # For an axis, find layouts by the names of leaves, and warn of leaves that stay whole.
    layouts = tensor_layouts(named, tensor, mesh)
    if is_coded:
        layouts = {path: P(*layout.parts[:1]) for path, layout in layouts.items()}
    whole = {path: free[path] for path, layout in layouts.items() if path in free and not layout.axes}
    ranks = mesh.axis_size(tensor)
    if whole and ranks > 1:
        lines = [f"params[{path!r}] {list(leaf.shape)}" for path, leaf in whole.items()]
        size = sum(leaf.numel() * leaf.element_size() for leaf in whole.values())
        warnings.warn(
            report(
                f"{leaves(len(whole))} of {size / 1e6:.2f} MB cannot be split over {tensor!r}, and are whole "
                f"on each of its {ranks} ranks:",
                _cut_list(lines),
                f"pad the vocabulary or the width to a multiple of {ranks}"
                + (", or leave codec=None: rows are coded whole." if is_coded else "."),
            ),
            stacklevel=3,
        )
    return layouts


def _read_expert_option(
    free: Mapping[str, Tensor], expert: str | None, mesh: Mesh, policy: Mapping[str, Any]
) -> dict[str, P]:
    """Return `{path: compute}` of the stacks of experts that a data axis is to split.

    Raises:
        SpecError: `expert` is no data axis, the leaves are coded, or there is no stack.
    """
    if expert is None:
        return {}
    if expert not in mesh.data_axes:
        raise SpecError(
            f"expert={expert!r} is {'no data' if expert in mesh.names else 'no'} axis of the mesh {mesh}.",
            fix="name an axis whose ranks see other rows: make_mesh(shard=2, expert=4), expert='expert'.",
        )
    if policy.get("codec"):
        raise SpecError(
            f"expert={expert!r}, codec={policy['codec']!r}: codes of experts stay where they are stored.",
            fix="expert=None, which gathers codes, or codec=None.",
        )

    stacks = {p: P(expert) for p, leaf in free.items() if "experts" in p and leaf.dim() == 3}
    if not stacks:
        raise SpecError(
            f'expert={expert!r}: no leaf without a rule is a stack of experts, [E, M, N] with "experts" '
            "in its path.",
            fix="stack the experts of a layer in one leaf, and multiply by F.grouped_mm; experts of another "
            "name take rules=[(glob, LayoutSpec(...))].",
        )
    return stacks


def cut_chunks(
    named: Mapping[str, Tensor],
    unit_of: Mapping[str, str],
    mesh: Mesh,
    chunks: int,
    computes: Mapping[str, P] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the chunk of each leaf in a pipeline.

    A chunk is consecutive units in the order of the tree, and all have about as many bytes that a rank
    computes with. Leaves that are missing in the result belong to all stages: tied ones, which are read at
    several places, and tables of units that hold nothing but buffers.

    Args:
        named: the leaves for which no rule names a chunk.
        chunks: the number of chunks of each stage.
        computes: `LayoutSpec.compute` of leaves that are split while they compute. A rank has only its own
            experts, for example, and only these count.

    Raises:
        SpecError: there are fewer units than chunks.

    >>> from fnshard.mesh import make_mesh
    >>> leaves = {f"layers.{i}.w": torch.empty(4, 4) for i in range(6)}
    >>> units = {path: path[:-2] for path in leaves}
    >>> list(cut_chunks(leaves, units, make_mesh(pipeline=3, abstract=True), 1).values())
    [0, 0, 1, 1, 2, 2]
    """
    if type(chunks) is not int or chunks < 1:
        raise SpecError(f"chunks={chunks!r}: a whole number of chunks for each stage, at least 1.")
    if mesh.stages == 1:
        return {}

    # A unit is as large as its parameters. A unit of buffers alone has no size, and belongs to all stages.
    count = mesh.stages * chunks
    free = {path: leaf for path, leaf in named.items() if not getattr(leaf, "tied_names", ())}
    sizes: dict[str, int] = {}
    for path, leaf in free.items():
        if not is_buffer(leaf) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            parts = mesh.axes_size(computes.get(path, P()).axes)
            size = leaf.numel() * leaf.element_size() // parts
            sizes[unit_of[path]] = sizes.get(unit_of[path], 0) + size
    if not sizes:
        return {}
    if len(sizes) < count:
        raise SpecError(
            f"{mesh.stages} stages of {chunks} {'chunk' if chunks == 1 else 'chunks'} need {count} units, "
            f"and the tree has {len(sizes)}: {', '.join([*sizes][:8]) or 'none'}.",
            fix="a smaller pipeline, fewer chunks, or smaller units (units=).",
        )

    # A unit is in the last chunk that begins at or before it.
    starts = _cut_evenly([*sizes.values()], count)
    chunk_of = {unit: bisect_right(starts, index) for index, unit in enumerate(sizes)}
    return {path: chunk_of[unit_of[path]] for path in free if unit_of[path] in chunk_of}


def _cut_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """Cut sizes into `count` runs whose sums are most even: the sum of the sums' squares is least.

    Returns:
        The index at which each run but the first begins.
    """
    # Dynamic programming: the best cut into one run more follows from the best cuts of all shorter prefixes.
    sums = [0, *accumulate(sizes)]
    # best[n] is the best cut of the first n sizes into `run` runs: its sum of squares, and where runs begin.
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * len(sizes)
    for run in range(1, count + 1):
        longer: list[tuple[float, list[int]] | None] = [None] * (len(sizes) + 1)
        for end in range(run, len(sizes) + 1):
            total, starts, start = min(
                (best[start][0] + float(sums[end] - sums[start]) ** 2, best[start][1], start)
                for start in range(run - 1, end)
                if best[start] is not None
            )
            longer[end] = total, [*starts, start]
        best = longer
    _, starts = best[-1]
    return starts[1:]


def best_split(shape: Sequence[int], axes: tuple[str, ...], mesh: Mesh, compute: P | None = None) -> P:
    """Split the dim that pads least (the first of them) over `axes`; a scalar is replicated.

    Args:
        compute: the layout by which the leaf is split already. A dim that it splits may be split further,
            where the parts are equal.

    >>> from fnshard.mesh import make_mesh
    >>> best_split((50257, 768), ("shard",), make_mesh(shard=8, abstract=True))
    P(None, 'shard')
    """
    ranks = mesh.axes_size(axes)
    compute = compute or P()
    # For each dim that may be split, the share by which it would be padded.
    pads = {
        dim: (-size % ranks) / max(size, 1)
        for dim, size in enumerate(block_shape(shape, compute, mesh))
        if not compute.of(dim) or shape[dim] % (mesh.axes_size(compute.of(dim)) * ranks) == 0
    }
    if not axes or not pads:
        return compute
    split_dim = min(pads, key=lambda dim: pads[dim])
    return P(*(compute.entries(d) + (axes if d == split_dim else ()) for d in range(len(shape))))


def _list_all_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes whose ranks compute with the same leaves, so that each may store a part."""
    return (*mesh.data_axes, *(n for n in mesh.names if n == "context" and n not in mesh.data_axes))


def _list_inner_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of `_list_all_axes` without "replicate", or with it if there is no other."""
    return tuple(a for a in _list_all_axes(mesh) if a != "replicate") or _list_all_axes(mesh)


full_shard = _make_preset(
    lambda s: {"storage": s},
    _list_all_axes,
    """Shard parameters, gradients and optimizer state over all data axes and the context axis.

    Parameters are gathered for forward, freed, and gathered again for backward. FSDP calls this FULL_SHARD,
    DeepSpeed ZeRO 3.""",
)
shard_grad_op = _make_preset(
    lambda s: {"storage": s, "reshard": False},
    _list_all_axes,
    """Shard as `full_shard` does, but gather parameters once and keep them until after backward.

    FSDP calls this SHARD_GRAD_OP.""",
)
zero2 = _make_preset(
    lambda s: {"storage": P(), "gradient": s, "optimizer": s},
    _list_all_axes,
    """Shard gradients and optimizer state, and keep parameters whole: DeepSpeed's ZeRO 2.

    Updated shards are gathered at the end of the step.""",
)
zero1 = _make_preset(
    lambda s: {"storage": P(), "gradient": P(), "optimizer": s},
    _list_all_axes,
    """Shard optimizer state, and keep parameters and gradients whole: DeepSpeed's ZeRO 1.

    Updated shards are gathered at the end of the step.""",
)
no_shard = _make_preset(
    lambda s: {"storage": P()},
    _list_all_axes,
    """Keep everything whole on every rank and sum gradients, as DDP and FSDP's NO_SHARD do.""",
)
hybrid_shard = _make_preset(
    lambda s: {"storage": s},
    _list_inner_axes,
    """Shard as `full_shard` does over the inner data axes, with replicas over the axis "replicate".

    Without an axis "replicate", or with no other to split over, it is `full_shard`. FSDP calls this
    HYBRID_SHARD, or HSDP.""",
)
zero3 = full_shard

PRESETS: dict[str, Callable[..., Any]] = {
    "full_shard": full_shard,
    "zero3": zero3,
    "shard_grad_op": shard_grad_op,
    "zero2": zero2,
    "zero1": zero1,
    "no_shard": no_shard,
    "hybrid_shard": hybrid_shard,
}


def register(name: str, preset: Callable[..., Any]) -> None:
    """Add a preset to `PRESETS`, where programs look presets up by their names.

    Args:
        preset: a function `(params, mesh, **options) -> specs`, which returns a tree of `LayoutSpec` like
            `params`.

    Raises:
        SpecError: another preset has the name.
    """
    if PRESETS.setdefault(name, preset) is not preset:
        raise SpecError(f"a preset is called {name!r} already.", fix="give yours another name.")
