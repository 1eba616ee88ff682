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
        found = boxes(self.shape, self.layout, mesh)
        parts = [(tuple(s.start for s in full), self.block[mine]) for full, mine in found]
        return [(start, part) for start, part in parts if part.numel()]

    def to_saved(self, chunks: Sequence[Chunk] = ()) -> SavedLeaf:
        """Return the full leaf as a manifest names it."""
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
    """Return the leaves of all tensors of a state except its two counters, by name."""
    scale = {f"loss_scale/{k}": LocalLeaf((), P(), v) for k, v in state.loss_scale.items()}
    slots = slot_leaves(state.opt_state, state.slot_shapes, specs.stored, mesh)
    return check_param_leaves(state.params, specs, mesh) | slots | scale


def param_leaves(blocks: Mapping[str, Tensor], specs: Specs, mesh: Mesh) -> dict[str, LocalLeaf]:
    """Return the leaves of this rank's blocks of parameters by name, without a check."""
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
        CheckpointError: nobody knows how some slots lie.
    """
    out, odd = {}, []
    for path, slots in state.items():
        spec = specs[path]
        for name, value in slots.items():
            # A slot whose whole shape nobody has noted has its leaf's, or is the same on all ranks.
            own, whole = tuple(value.shape), shapes.get(path, {}).get(name)
            known = whole is not None
            if not known:
                whole = spec.shape if own == block_shape(spec.shape, spec.optimizer, mesh) else own
            layout = slot_layout(whole, spec.shape, spec.optimizer, mesh) or (P() if known else None)
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
    """Return the path that a name is about: that of "params/a.w" and "optimizer/a.w/mu" is "a.w"."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def resolve_as_saved(specs: ResolvedSpecs, found: Manifest) -> ResolvedSpecs:
    """Return specs that know their shapes: their own, or else those of the saved parameters.

    Raises:
        CheckpointError: the checkpoint lacks some of the parameters.
    """
    saved, named = found.leaves, specs.stored
    if specs.complete:
        check_complex_alike(specs.complex, named.keys() & set(found.complex))
        return specs
    missing = [f"params/{p}" for p in named if f"params/{p}" not in saved]
    if missing:
        raise CheckpointError(
            "the checkpoint is of another model; it lacks:",
            missing[:20],
            "restore it with the specs of its model.",
        )
    of = {p: saved[f"params/{p}"] for p in named}
    shapes = {p: torch.empty(s.shape, dtype=STATE_DTYPES[s.dtype], device="meta") for p, s in of.items()}
    shapes |= {p: torch.view_as_complex(shapes[p]) for p in shapes.keys() & set(found.complex)}
    return specs.resolve(tree.unflatten(shapes.values(), specs.structure))


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

        layout = slot_layout(leaf.shape, spec.shape, spec.optimizer, mesh)
        alike = leaf.shape == spec.shape and (dtype.is_floating_point or dtype.is_complex)
        shape = leaf.shape if layout is None else block_shape(leaf.shape, layout, mesh)
        out[path][slot] = shape, spec.optimizer_dtype if alike else dtype

    # A master copy is there where these specs have one, saved or not.
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

    A master copy is filled from the saved one, or from the parameter where none was saved. A parameter whose
    dtype is not the saved one's is filled from the master copy, where that has more digits.

    Args:
        trained: paths of the leaves whose saved state must not be left out.
        foreign: paths of the leaves that other stages have.
        fix: the way out that an error names.

    Raises:
        CheckpointError: the checkpoint is of another model or another optimizer.
    """
    wrong, out = [], {}
    for name, leaf in leaves_here.items():
        source = _find_source(name, leaf, saved)
        if source is None:
            wrong.append(f"{name} {list(leaf.shape)} is not in the checkpoint")
        elif saved[source].shape != leaf.shape:
            wrong.append(f"{name} is {list(leaf.shape)} here and {list(saved[source].shape)} there")
        elif _kind(leaf.block.dtype) != _kind(STATE_DTYPES[saved[source].dtype]):
            wrong.append(f"{name} is {leaf.block.dtype} here and {saved[source].dtype} there")
        else:
            out[name] = RestoreTarget(leaf.shape, leaf.layout, leaf.block, leaf.on_all_stages, source)

    elsewhere = {n for n in saved if path_of(n) in foreign}
    for name in [n for n in saved if n not in leaves_here and n not in elsewhere]:
        # Parameters must not be left out, nor state of leaves that train. A master copy may: its numbers are
        # those of the parameter.
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
    parts: dict[str, set[str]] = {}
    for name in saved:
        path, _, part = name.rpartition(".")
        parts.setdefault(path, set()).add(part)

    wrong: dict[str, tuple[str | None, str | None]] = {}
    for path, spec in specs.items():
        name, shape = f"params/{path}", spec.shape or (1, 1)
        own = [n for n, codec in CODECS.items() if codec.parts(shape).keys() == parts.get(name)]
        found = None if name in saved or not own else own[0]  # no two codecs have parts of the same names
        if found != spec.codec and (found is not None or name in saved):
            wrong[path] = spec.codec, found

    if wrong:
        lines = [f"params[{p!r}]: codec={here!r} here, {there!r} there" for p, (here, there) in wrong.items()]
        codecs = " and ".join(dict.fromkeys(f"codec={there!r}" for _, there in wrong.values()))
        fix = (
            f"specs with {codecs} read it; then fs.reshard(state, those_specs, these_specs) codes or decodes "
            "(of parameters alone: fs.checkpoint.restore_params)."
        )
        what = f"the checkpoint has {leaves(len(wrong))} coded otherwise than the specs say:"
        raise CheckpointError(what, some_of(lines), fix)


def some_of(lines: list[str], most: int = 20) -> list[str]:
    """Return as many lines as one error lists, and a line that says how many more there are."""
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def make_host_copies(leaves: Mapping[str, LocalLeaf]) -> dict[str, LocalLeaf]:
    """Return the leaves with empty blocks in the host's memory, which are to be filled."""
    empty = {n: torch.empty(leaf.block.shape, dtype=leaf.block.dtype) for n, leaf in leaves.items()}
    return {n: replace(leaf, block=empty[n]) for n, leaf in leaves.items()}


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return the kind of a dtype's numbers: floats are cast to other floats, not to integers."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _find_source(name: str, leaf: LocalLeaf, saved: Mapping[str, SavedLeaf]) -> str | None:
    """Return the name of the saved leaf that is to fill a leaf, or None; see `restore_targets`."""
    kind, _, path = name.partition("/")
    if kind == "params":
        master = f"optimizer/{path}/{MASTER}"
        if name in saved and master in saved:
            mine, its = (STATE_DTYPES[saved[n].dtype] for n in (name, master))
            return master if mine != leaf.block.dtype and its.itemsize > mine.itemsize else name
    elif name not in saved and kind == "optimizer" and name.endswith(f"/{MASTER}"):
        name = f"params/{path.removesuffix(f'/{MASTER}')}"
    return name if name in saved else None
