"""State leaves: the leaves of a state by name and layout, which a checkpoint writes, fills and compares.

Names are `params/<path>`, `optimizer/<path>/<slot>` and `loss_scale/<name>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.checkpoint.manifest_file import Chunk, Manifest, SavedLeaf
from fnshard.compiler.ir.values import MASTER
from fnshard.compiler.update.slot_shapes import Slots
from fnshard.errors import CheckpointError, leaves
from fnshard.layout.codecs import CODECS
from fnshard.layout.partition import P, block_shape, boxes, slot_layout
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import LayoutSpec, is_here
from fnshard.mesh import Mesh
from fnshard.runtime.files.tensorfile import STATE_DTYPES, STATE_NAMES
from fnshard.step.shards import check_blocks
from fnshard.step.state import TrainState

Specs = Mapping[str, LayoutSpec]
SlotShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
RESTORE = (
    "restore it with the model and optimizer it was saved with; or take its parameters alone: "
    "fs.checkpoint.restore_params(path, step, only=...)."
)


@dataclass(frozen=True)
class LocalLeaf:
    """One rank's block of a leaf.

    Args:
        shape: the shape of the full tensor.
        layout: the layout by which the full tensor is split.
        block: this rank's padded block of it.
        on_all_stages: whether all stages of a pipeline have the leaf, and not this rank's alone.
    """

    shape: tuple[int, ...]
    layout: P
    block: Tensor
    on_all_stages: bool = True

    def parts(self, mesh: Mesh) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the block without padding, in boxes of the full tensor: where each begins, and a view."""
        parts = []
        for full_slices, block_slices in boxes(self.shape, self.layout, mesh):
            part = self.block[block_slices]
            if part.numel():
                parts.append((tuple(s.start for s in full_slices), part))
        return parts

    def to_saved(self, chunks: Sequence[Chunk] = ()) -> SavedLeaf:
        """Return the full leaf as a manifest describes it."""
        return SavedLeaf(self.shape, STATE_NAMES[self.block.dtype], repr(self.layout), tuple(chunks))


@dataclass(frozen=True)
class RestoreTarget(LocalLeaf):
    """A leaf that is to be filled from the saved leaf of the name `source`."""

    source: str = ""


def check_param_leaves(params: Any, specs: ResolvedSpecs, mesh: Mesh) -> dict[str, LocalLeaf]:
    """Check a tree of stored blocks against the specs, and return its leaves by name."""
    named, stored = specs.blocks_of(params), specs.stored
    compare_paths(stored, named)
    check_blocks(stored, named, mesh)
    return param_leaves({p: named[p].detach() for p in stored}, stored, mesh)


def state_leaves(state: TrainState, specs: ResolvedSpecs, mesh: Mesh) -> dict[str, LocalLeaf]:
    """Return the leaves of a state by name: all its tensors except the step and the seed."""
    scale = {f"loss_scale/{k}": LocalLeaf((), P(), v) for k, v in state.loss_scale.items()}
    slots = slot_leaves(state.opt_state, state.slot_shapes, specs.stored, mesh)
    return check_param_leaves(state.params, specs, mesh) | slots | scale


def param_leaves(blocks: Mapping[str, Tensor], specs: Specs, mesh: Mesh) -> dict[str, LocalLeaf]:
    """Return the leaves of this rank's blocks of parameters by name, without checking them."""
    here = specs_here(specs, mesh).items()
    return {f"params/{p}": LocalLeaf(s.shape, s.storage, blocks[p], s.chunk == "all") for p, s in here}


def specs_here(specs: Specs, mesh: Mesh) -> dict[str, LayoutSpec]:
    """Return the specs of the leaves that this rank's stage has."""
    return {p: s for p, s in specs.items() if is_here(s, mesh)}


def slot_leaves(
    state: Mapping[str, Mapping[str, Tensor]], shapes: SlotShapes, specs: Specs, mesh: Mesh
) -> dict[str, LocalLeaf]:
    """Return the leaves of an optimizer's slots by name.

    Args:
        shapes: the shapes of whole slots that do not have their leaf's shape.

    Raises:
        CheckpointError: the layout of some slots is not known.
    """
    out, odd = {}, []
    for path, slots in state.items():
        spec = specs[path]
        for name, value in slots.items():
            # A slot whose whole shape is not noted has its leaf's, or is the same on all ranks.
            own, whole = tuple(value.shape), shapes.get(path, {}).get(name)
            is_noted = whole is not None
            if not is_noted:
                whole = spec.shape if own == block_shape(spec.shape, spec.optimizer, mesh) else own

            # It is split as its leaf is. If it cannot be, it is whole on each rank, if its shape is noted.
            layout = slot_layout(whole, spec.shape, spec.optimizer, mesh) or (P() if is_noted else None)
            if layout is not None and own == block_shape(whole, layout, mesh):
                out[f"optimizer/{path}/{name}"] = LocalLeaf(whole, layout, value, spec.chunk == "all")
            else:
                odd.append(f"{path!r}: {name} {list(value.shape)} of a leaf {list(spec.shape)}")

    if odd:
        raise CheckpointError(
            f"nobody knows how {leaves(len(odd))} of optimizer state lie on mesh {mesh}:",
            odd,
            "a slot of a sharded leaf is as large as its block, or one number; others lie as "
            "TrainState.slot_shapes says, of a state that its step has made.",
        )
    return out


def path_of(name: str) -> str:
    """Return the path of a name's parameter: "a.w" for "params/a.w" and for "optimizer/a.w/mu"."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def resolve_as_saved(specs: ResolvedSpecs, manifest: Manifest) -> ResolvedSpecs:
    """Return specs that know their shapes: their own, or else those of the saved parameters.

    Raises:
        CheckpointError: the checkpoint lacks some of the parameters.
    """
    saved, named = manifest.leaves, specs.stored
    if specs.complete:
        check_complex_alike(specs.complex, named.keys() & set(manifest.complex))
        return specs

    # Take shapes and dtypes from the saved parameters, of which pairs may be complex numbers to the model.
    missing = [f"params/{p}" for p in named if f"params/{p}" not in saved]
    if missing:
        raise CheckpointError(
            "the checkpoint is of another model; it lacks:",
            missing[:20],
            "restore it with the specs of its model.",
        )
    likes = {}
    for path in named:
        leaf = saved[f"params/{path}"]
        likes[path] = torch.empty(leaf.shape, dtype=STATE_DTYPES[leaf.dtype], device="meta")
        if path in manifest.complex:
            likes[path] = torch.view_as_complex(likes[path])
    return specs.resolve(tree.unflatten(likes.values(), specs.structure))


def saved_slots(saved: Mapping[str, SavedLeaf], specs: Specs, mesh: Mesh) -> Slots:
    """Return this rank's shapes and dtypes of saved optimizer state, of leaves that train here."""
    # Each leaf that trains has an entry, though its optimizer may hold nothing for it (plain SGD).
    out: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]
    out = {path: {} for path, spec in specs.items() if spec.trainable}
    for name, leaf in saved.items():
        kind, _, rest = name.partition("/")
        path, _, slot = rest.rpartition("/")
        if kind != "optimizer" or path not in out:
            continue
        spec, dtype = specs[path], STATE_DTYPES[leaf.dtype]
        if slot == MASTER and not spec.has_master:
            continue

        # Moments and their like have the optimizer's dtype. Counts, and slots of other shapes, keep theirs.
        layout = slot_layout(leaf.shape, spec.shape, spec.optimizer, mesh)
        is_moment = leaf.shape == spec.shape and (dtype.is_floating_point or dtype.is_complex)
        shape = leaf.shape if layout is None else block_shape(leaf.shape, layout, mesh)
        out[path][slot] = shape, spec.optimizer_dtype if is_moment else dtype

    # Leaves have a master copy where these specs ask for one, saved or not.
    for path in out:
        if (spec := specs[path]).has_master:
            block = block_shape(spec.shape, spec.optimizer, mesh)
            out[path][MASTER] = block, spec.optimizer_dtype
    return out


def saved_slot_shapes(saved: Mapping[str, SavedLeaf], specs: Specs) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of whole slots that were saved and do not have their leaf's shape."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, leaf in saved.items():
        kind, _, rest = name.partition("/")
        path, _, slot = rest.rpartition("/")
        if kind == "optimizer" and path in specs and leaf.shape != specs[path].shape:
            out.setdefault(path, {})[slot] = leaf.shape
    return out


def restore_targets(
    leaves_here: Mapping[str, LocalLeaf],
    saved: Mapping[str, SavedLeaf],
    trained: set[str],
    foreign: Collection[str] = (),
    fix: str = RESTORE,
) -> dict[str, RestoreTarget]:
    """Return the saved leaf that is to fill each leaf.

    A master copy is filled from the saved one, or from the parameter if none was saved. A parameter that was
    saved in another dtype is filled from the master copy, if that has more digits.

    Args:
        trained: paths of the leaves whose saved state must not be left out.
        foreign: paths of the leaves that other stages have.
        fix: the way out that an error names.

    Raises:
        CheckpointError: the checkpoint is of another model or another optimizer.
    """
    # Each leaf here needs a source of its shape and kind.
    wrong, out = [], {}
    for name, leaf in leaves_here.items():
        source = _find_source(name, leaf, saved)
        if source is None:
            wrong.append(f"{name} {list(leaf.shape)} is not in the checkpoint")
        elif saved[source].shape != leaf.shape:
            wrong.append(f"{name} is {list(leaf.shape)} here and {list(saved[source].shape)} there")
        elif _classify(leaf.block.dtype) != _classify(STATE_DTYPES[saved[source].dtype]):
            wrong.append(f"{name} is {leaf.block.dtype} here and {saved[source].dtype} there")
        else:
            out[name] = RestoreTarget(leaf.shape, leaf.layout, leaf.block, leaf.on_all_stages, source)

    # Saved parameters must not be left out, nor state of leaves that train. A master copy may: its numbers
    # are those of the parameter.
    for name in saved:
        if name in leaves_here or path_of(name) in foreign:
            continue
        kind, _, rest = name.partition("/")
        path, _, slot = rest.rpartition("/")
        if kind == "params" or (kind == "optimizer" and slot != MASTER and path in trained):
            wrong.append(f"{name} {list(saved[name].shape)} is in the checkpoint alone")

    if wrong:
        raise CheckpointError(
            f"the checkpoint is of another model or another optimizer, {leaves(len(wrong))}:",
            some_of(wrong),
            fix,
        )
    return out


def check_complex_alike(here: Set[str], there: Set[str]) -> None:
    """Refuse leaves that are complex on one side and real numbers [..., 2] on the other."""
    if wrong := [f"params/{p} is complex {'here' if p in here else 'there'} alone" for p in here ^ there]:
        fix = "give specs in which the same leaves are complex as in what was saved."
        raise CheckpointError("real numbers [..., 2] are no complex ones:", some_of(sorted(wrong)), fix)


def check_codecs_alike(specs: Specs, saved: Mapping[str, SavedLeaf]) -> None:
    """Refuse saved leaves whose codec is not the one that these specs name."""
    # A coded leaf is saved as its parts, PATH.PART.
    parts: dict[str, set[str]] = {}
    for name in saved:
        path, _, part = name.rpartition(".")
        parts.setdefault(path, set()).add(part)

    # The names of its parts say which codec a leaf has, since no two codecs have the same ones.
    wrong: dict[str, tuple[str | None, str | None]] = {}
    for path, spec in specs.items():
        name, shape = f"params/{path}", spec.shape or (1, 1)
        codecs = [n for n, codec in CODECS.items() if codec.parts(shape).keys() == parts.get(name)]
        saved_codec = None if name in saved or not codecs else codecs[0]
        if saved_codec != spec.codec and (saved_codec is not None or name in saved):
            wrong[path] = spec.codec, saved_codec

    if wrong:
        lines = [f"params[{p!r}]: codec={here!r} here, {there!r} there" for p, (here, there) in wrong.items()]
        named = " and ".join(dict.fromkeys(f"codec={there!r}" for _, there in wrong.values()))
        fix = (
            f"specs with {named} read it; then fs.reshard(state, those_specs, these_specs) codes or decodes "
            "(of parameters alone: fs.checkpoint.restore_params)."
        )
        what = f"the checkpoint has {leaves(len(wrong))} coded otherwise than the specs say:"
        raise CheckpointError(what, some_of(lines), fix)


def some_of(lines: list[str], most: int = 20) -> list[str]:
    """Return the lines that one error shows, with a last one that says how many more there are."""
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most} more"]


def make_host_copies(leaves: Mapping[str, LocalLeaf]) -> dict[str, LocalLeaf]:
    """Return the leaves with uninitialised blocks in the host's memory."""
    copies = {}
    for name, leaf in leaves.items():
        copies[name] = replace(leaf, block=torch.empty(leaf.block.shape, dtype=leaf.block.dtype))
    return copies


def _classify(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return the kind of a dtype's numbers. Floats are cast to other floats, but not to integers."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _find_source(name: str, leaf: LocalLeaf, saved: Mapping[str, SavedLeaf]) -> str | None:
    """Return the name of the saved leaf that is to fill a leaf, or None; see `restore_targets`."""
    kind, _, path = name.partition("/")
    if kind == "params":
        master = f"optimizer/{path}/{MASTER}"
        if name in saved and master in saved:
            saved_dtype, master_dtype = (STATE_DTYPES[saved[n].dtype] for n in (name, master))
            is_cast = saved_dtype != leaf.block.dtype
            return master if is_cast and master_dtype.itemsize > saved_dtype.itemsize else name
    elif name not in saved and kind == "optimizer" and name.endswith(f"/{MASTER}"):
        name = f"params/{path.removesuffix(f'/{MASTER}')}"
    return name if name in saved else None
