"""Shards: make this rank's blocks of a parameter tree, put them together again, and check them.

Each rank makes only its own blocks, and their numbers do not depend on the mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.analysis.slots import Slots
from fnshard.compiler.deferred.deferred_init import check_values, recipe_of, values_of
from fnshard.compiler.deferred.tape import fill_blank, has_blanks, seeded
from fnshard.compiler.schedule.buckets import make_buckets
from fnshard.errors import SpecError, StateError, leaves
from fnshard.functional import make_functional
from fnshard.layout.codecs import Unfit, check_codecs, encoded, is_coded, parts_of
from fnshard.layout.pairs import as_complex, as_pairs, is_complex, paired_specs
from fnshard.layout.partition import block_shape, side_by_side
from fnshard.layout.resolved import PathLeaf, ResolvedSpecs, compare_paths
from fnshard.layout.spec import LayoutSpec, check_specs, is_spec
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.packing import Packer, local_block
from fnshard.runtime.tiers import allocate, check_directory, rest

__all__ = ["shard", "unshard"]

InitFn = Callable[[str, Tensor], Any]


def shard(
    params: Any, specs: Any, mesh: Mesh, *, disk_dir: str | None = None, seed: int | None = None
) -> Any:
    """Full tree -> this rank's stored blocks, padded, in storage dtype, where `LayoutSpec.memory` says.

    Moves nothing between ranks: every rank must hold the same full tree. Leaves of a module built under
    `deferred` are made one at a time, of which only the block is kept.

    Args:
        disk_dir: directory for leaves with memory="disk".
        seed: of deferred leaves, which are those of `torch.manual_seed(seed)` and their constructor;
            default 0.

    Raises:
        SpecError: specs that do not fit the tree or the mesh.
        StateError: leaves of other shapes, or without values; values of coded leaves that are not finite; a
            seed, and no deferred leaf.

    >>> import torch
    >>> from fnshard import LayoutSpec, P, make_mesh, match_specs
    >>> params = {"w": torch.arange(5.0)}
    >>> specs = match_specs(params, [("*", LayoutSpec(P("shard")))])
    >>> shard(params, specs, make_mesh(shard=2, abstract=True))["w"]
    tensor([0., 1., 2.])
    """
    resolved = ResolvedSpecs.of(specs).resolve(params)
    named = resolved.leaves
    check_codecs(named)
    check_specs(paired_specs(named), mesh)
    given = tree.flatten_with_paths(params)[0]
    check_directory(disk_dir, [p for p, s in named.items() if s.memory == "disk"])
    for path, spec in named.items():
        if tuple(given[path].shape) != tuple(spec.shape):
            raise StateError(
                f"params[{path!r}] is {list(given[path].shape)}, its spec was made for {list(spec.shape)}."
            )
    check_values(given)
    if seed is not None:
        check_seed(seed)
        check_is_used(seed, given)
    unfit, blocks = Unfit(), dict[str, Any]()

    def take(path: str, leaf: Tensor) -> None:
        spec = named[path]
        unfit.look(path, spec, leaf)  # the whole leaf, so that all ranks refuse it
        blocks[path] = stored_at_rest(local_block(leaf, spec.storage, mesh), spec, mesh, disk_dir)

    values_of(given, seed or 0, take)
    unfit.refuse()
    return tree.unflatten([blocks[path] for path in named], resolved.leaf_structure)


def check_seed(seed: Any) -> None:
    """Refuse a seed that a state cannot hold.

    Raises:
        StateError: it is no int64.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise StateError(f"seed={seed!r}: an int that fits 64 bits with sign.")


def check_is_used(seed: int, named: Mapping[str, Tensor]) -> None:
    """Refuse a seed where every leaf has its values.

    Raises:
        StateError: no leaf is deferred.
    """
    if not any(map(recipe_of, named.values())):
        raise StateError(
            f"seed={seed}: every leaf has its values already, so the seed would change none.",
            fix="leave seed= out; or build the module in `with fs.deferred():`, which it then fills. For "
            "the random ops of steps (dropout): step.init(params, seed=...), of the tree of values; "
            "without an optimizer, step(params, *batch, rng=(seed, step)).",
        )


def stored_at_rest(block: Tensor, spec: LayoutSpec, mesh: Mesh, disk_dir: str | None) -> Any:
    """A block in its storage dtype and tier; of a coded leaf, the dict of its parts."""
    if is_coded(spec):
        parts = encoded(block, spec)
        return {n: stored_at_rest(parts[n], s, mesh, disk_dir) for n, s in parts_of(spec).items()}
    if spec.memory == "device":
        return block.to(mesh.device, spec.storage_dtype)
    return rest(block.to(spec.storage_dtype), spec.memory, mesh.device, disk_dir)


def unshard(
    shards: Any,
    specs: Any,
    mesh: Mesh,
    *,
    layout: Literal["storage", "gradient", "optimizer"] = "storage",
    comm: Collectives | None = None,
) -> Any:
    """This rank's blocks -> the full tree, on every rank, in the blocks' dtype. A collective.

    Coded leaves come decoded, in `compute_dtype`.

    Args:
        layout: which field of the specs says how the blocks lie: "storage" for parameters; "gradient" for
            the gradients that a step without an optimizer returns; "optimizer" for one slot of each leaf, as
            `fs.optim.ema_params` gives. Of gradients and slots, None stays None, and so do frozen leaves.
        comm: the collectives to use; default those that all steps on the mesh share.

    Raises:
        SpecError: another tree than the specs', or another layout.
        StateError: blocks that lie otherwise; names them all.
    """
    if layout not in ("storage", "gradient", "optimizer"):
        raise SpecError(f"layout={layout!r}: 'storage', 'gradient' or 'optimizer', a field of LayoutSpec.")
    resolved = ResolvedSpecs.of(specs)
    if layout != "optimizer":
        shards = _without_gaps(shards, resolved)
        resolved = resolved.align(shards)
    if not resolved.complete:
        raise SpecError(
            f"the specs of {leaves(len(resolved.incomplete))} do not know the shapes of their leaves:",
            resolved.incomplete,
            "step.specs of a step that has seen the full leaves, or match_specs(params, rules).",
        )
    named = resolved.stored
    given = {p: None if v is _GAP else v for p, v in tree.flatten_with_paths(shards)[0].items()}
    if layout == "optimizer":  # by path, of the leaves that train alone
        given = dict.fromkeys((p for p, s in named.items() if not s.trainable), None) | given
        compare_paths(named, given)
    if layout != "storage":
        named = {p: _stored_as(s, layout) for p, s in named.items() if given[p] is not None}
    check_blocks(named, given, mesh, fix=_UNSHARD)
    out = gather_full({p: given[p] for p in named}, named, mesh, comm or connection(mesh))
    if layout != "storage":  # a coded leaf, which has no gradient, is one leaf of these
        return tree.unflatten([out.get(p) for p in resolved.leaves], resolved.leaf_structure.of_gradients)
    return resolved.decoded(tree.unflatten([out[p] for p in named], resolved.structure))


def gather_full(
    blocks: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec], mesh: Mesh, comm: Collectives
) -> dict[str, Tensor]:
    """The full leaves of stored blocks, on the mesh's device, in the blocks' dtypes. A collective."""
    out: dict[str, Tensor] = {}
    split = {p: s for p, s in paired_specs(specs).items() if mesh.ordered(s.storage.axes)}
    with torch.no_grad():
        stored = lambda s: s.storage.contiguous  # noqa: E731
        for bucket in make_buckets(split, mesh, stored, lambda s: s.storage_dtype, "unshard"):
            packer = Packer(bucket, mesh, mesh.rank)
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            packer.pack_blocks({p: as_pairs(blocks[p]) for p in bucket.paths}, flat)
            handle = comm.all_gather(flat, bucket.axes)
            rows = packer.unpack_rows(handle.wait(), bucket.dtype)
            out |= {p: side_by_side(v, split[p].storage, mesh, inverse=True) for p, v in rows.items()}
            handle.release()
    out = {p: as_complex(full) if is_complex(specs[p]) else full for p, full in out.items()}
    return out | {p: blocks[p].to(mesh.device, copy=True) for p in specs if p not in out}


_GAP = PathLeaf("no gradient")


def _without_gaps(grads: Any, specs: ResolvedSpecs) -> Any:
    """Gradients in which leaves without one are leaves, and constants the specs' own, where None stood."""
    fill = tree.constants_of(specs.tree, is_spec) | dict.fromkeys(specs.stored, _GAP)
    given, form = tree.flatten_with_paths(grads, constants=True)
    return tree.unflatten([fill.get(p) if v is None else v for p, v in given.items()], form)


def _stored_as(spec: LayoutSpec, layout: str) -> LayoutSpec:
    dtype, memory = spec.storage_dtype, "device"
    if layout == "optimizer":
        dtype, memory = spec.optimizer_dtype, spec.optimizer_memory
    return replace(spec, storage=getattr(spec, layout), storage_dtype=dtype, memory=memory)


_SHARD = "pass fs.shard(full_params, specs, mesh), or a state that step.init made on this mesh."
_UNSHARD = (
    "pass the blocks that step.init or fs.shard made with these specs on this mesh; gradients, which a step "
    'without an optimizer returns, lie as LayoutSpec.gradient says: fs.unshard(..., layout="gradient").'
)


def check_blocks(
    specs: Mapping[str, LayoutSpec], blocks: Mapping[str, Any], mesh: Mesh, fix: str = _SHARD
) -> None:
    """Refuse stored blocks of a wrong shape, dtype or device, all at once.

    Raises:
        StateError: names every leaf, what it is and what was expected.
    """
    wrong = []
    for path, spec in specs.items():
        block, dtype = blocks[path], spec.storage_dtype
        shape = block_shape(spec.shape, spec.storage, mesh)
        where = mesh.device_type if spec.memory == "device" else "cpu"
        if not isinstance(block, Tensor):
            wrong.append(f"params[{path!r}] is {type(block).__name__}, expected a tensor")
        elif block.shape != shape or block.dtype != dtype or block.device.type != where:
            wrong.append(
                f"params[{path!r}] is {list(block.shape)} {block.dtype} on {block.device.type}, expected "
                f"a block {list(shape)} {dtype} on {where} "
                f"of {list(spec.shape)} with {spec.storage!r}"
            )
    if wrong:
        raise StateError(f"not this rank's stored blocks on mesh {mesh}, {leaves(len(wrong))}:", wrong, fix)


# ------------------------------------------------------------------ the first blocks


def init_params(
    source: Any,
    resolved: ResolvedSpecs,
    mesh: Mesh,
    *,
    init: InitFn | None,
    seed: int | None,
    disk_dir: str | None = None,
    trains: bool = False,
) -> Any:
    """This rank's stored blocks, of a full tree or an `nn.Module`.

    Args:
        source: its leaves have values; or recipes (`deferred`); or are on meta (fake), for `init(path, leaf)`
            to fill a full leaf in place.
        seed: of deferred leaves, as `torch.manual_seed` before their constructors; with `init`, of the
            random numbers of each leaf, by its path. Default 0.
        disk_dir: for leaves that rest on disk.
        trains: there is an optimizer: the seed is of the random ops of all steps to come, too, and leaves
            with a wider master copy come in its dtype, for it to keep (`narrowed`).

    Raises:
        StateError: leaves without values, or of other shapes than the specs'; leaves that nobody sets; a
            seed that is no int64, or that nothing uses.
    """
    number = 0 if seed is None else seed
    check_seed(number)
    is_module = isinstance(source, nn.Module)
    params = make_functional(source)[1] if is_module else source
    named = tree.flatten_with_paths(params)[0]
    compare_paths(resolved.leaves, named)
    specs = with_masters(resolved.leaves) if trains else resolved.leaves
    structure = resolved.leaf_structure
    if init is None:
        check_values(named)
        if seed is not None and (is_module or not trains):
            check_is_used(seed, named)
        made = number if any(map(recipe_of, named.values())) else None
        return shard(params, tree.unflatten(specs.values(), structure), mesh, disk_dir=disk_dir, seed=made)
    if not any(leaf.is_meta for leaf in named.values()):
        raise StateError(
            "init= was given, and no leaf is on the meta device to be filled.", fix="leave init= out."
        )
    wrong = [
        f"params[{p!r}] {list(named[p].shape)}, its spec says {list(spec.shape)}"
        for p, spec in specs.items()
        if spec.shape is not None and tuple(named[p].shape) != spec.shape
    ]
    if wrong:
        raise StateError(
            f"{len(wrong)} leaves have not the shape of their spec:", wrong, "init from full leaves."
        )
    return tree.unflatten(_from_function(named, specs, mesh, init, number, disk_dir), structure)


def with_masters(specs: Mapping[str, LayoutSpec]) -> dict[str, LayoutSpec]:
    """The specs by which leaves are made: those with a wider master copy in its dtype."""
    wide = {
        p: torch.promote_types(s.storage_dtype, s.optimizer_dtype) for p, s in specs.items() if s.has_master
    }
    return {p: replace(s, storage_dtype=wide[p]) if p in wide else s for p, s in specs.items()}


def narrowed(shards: Any, specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None) -> Any:
    """Blocks in the dtype that they are stored in, once the master copies have been taken of them."""
    blocks, structure = tree.flatten_with_paths(shards)
    stored = [
        b if b.dtype == specs[p].storage_dtype else stored_at_rest(b, specs[p], mesh, disk_dir)
        for p, b in blocks.items()
    ]
    return tree.unflatten(stored, structure)


def _from_function(
    named: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    init: InitFn,
    seed: int,
    disk_dir: str | None,
) -> list[Tensor]:
    """Blocks of the leaves as they are, those on meta filled by `init`."""
    devices = [mesh.device] if mesh.device_type != "cpu" else []
    blocks, unset, unfit = [], [], Unfit()
    for path, spec in specs.items():
        full = named[path].detach()
        if full.is_meta:
            full = torch.empty(full.shape, dtype=spec.storage_dtype, device=mesh.device)
            fill_blank(full)
            digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
            with torch.no_grad(), seeded(int.from_bytes(digest[:7], "big"), devices):
                init(path, full)
            if has_blanks(full):
                unset.append(f"params[{path!r}] {list(full.shape)}")
            else:
                unfit.look(path, spec, full)
        blocks.append(stored_at_rest(local_block(full, spec.storage, mesh), spec, mesh, disk_dir))
    if unset:
        raise StateError(
            f"init left {len(unset)} leaves unset, in whole or in part:",
            unset,
            "fill the leaf it is given in place, as leaf.normal_() does: what it returns is not read.",
        )
    unfit.refuse()
    return blocks


# ------------------------------------------------------------------ blank states, to be filled


def blank_params(specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None) -> dict[str, Tensor]:
    """Zeros where each leaf's stored block rests.

    Raises:
        StateError: no room, or no directory, for what rests on disk.
    """
    check_directory(disk_dir, [p for p, s in specs.items() if "disk" in (s.memory, s.optimizer_memory)])
    return {
        p: _zeros(block_shape(s.shape, s.storage, mesh), s.storage_dtype, s.memory, mesh, disk_dir)
        for p, s in specs.items()
    }


def blank_slots(
    slots: Slots, specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None
) -> dict[str, dict[str, Tensor]]:
    """Zeros where each leaf's optimizer state rests."""
    return {
        path: {
            name: _zeros(shape, dtype, specs[path].optimizer_memory, mesh, disk_dir)
            for name, (shape, dtype) in of_leaf.items()
        }
        for path, of_leaf in slots.items()
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, tier: str, mesh: Mesh, disk_dir: str | None) -> Tensor:
    if tier == "device":
        return torch.zeros(shape, dtype=dtype, device=mesh.device)
    return allocate(shape, dtype, tier, mesh.device, disk_dir).zero_()
