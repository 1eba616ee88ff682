"""Shards: make this rank's blocks of a parameter tree, put them together again, and check them.

Each rank makes only its own blocks, and their numbers do not depend on the mesh. A leaf that belongs to
another stage of a pipeline is *foreign*, and this rank's block of it is a tensor without elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.compiler.deferred.deferred_init import Values, recipe_of
from fnshard.compiler.schedule.buckets import make_buckets
from fnshard.compiler.update.slot_shapes import Slots
from fnshard.errors import SpecError, StateError, leaves
from fnshard.functional import make_functional
from fnshard.layout.codecs import Unfit, encode, is_coded, parts_of
from fnshard.layout.partition import boxes, side_by_side
from fnshard.layout.resolved import PathLeaf, ResolvedSpecs, compare_paths
from fnshard.layout.rules import check_params
from fnshard.layout.spec import LayoutSpec, check_specs, is_here, is_spec, stage_of, stored_shape
from fnshard.mesh import Mesh, check_mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.packing import Packer, local_block
from fnshard.runtime.tiers import allocate, check_directory, to_tier
from fnshard.step.rank_agreement import checksum

__all__ = ["shard", "unshard"]


def shard(
    params: Any, specs: Any, mesh: Mesh, *, disk_dir: str | None = None, seed: int | None = None
) -> Any:
    """Cut a full tree into this rank's stored blocks: padded, in storage dtype, on their tier.

    Nothing moves between ranks: every rank must hold the same full tree, bit for bit, which the first step
    checks. Leaves of a module built under `deferred` are made one at a time; where possible, only their
    blocks are made.

    Args:
        disk_dir: the directory for leaves with memory="disk".
        seed: the seed of deferred leaves, whose values are functions of it and of their paths; default 0.

    Raises:
        SpecError: the specs do not fit the tree or the mesh.
        StateError: leaves have other shapes, or no values; values of coded leaves are not finite; or there is
            a seed and no deferred leaf.

    >>> import torch
    >>> from fnshard import LayoutSpec, P, make_mesh, match_specs
    >>> params = {"w": torch.arange(5.0)}
    >>> specs = match_specs(params, [("*", LayoutSpec(P("shard")))])
    >>> shard(params, specs, make_mesh(shard=2, abstract=True))["w"]
    tensor([0., 1., 2.])
    """
    resolved = ResolvedSpecs.of(specs).resolve(params)
    return init_params(params, resolved, mesh, seed=seed, disk_dir=disk_dir)


def check_seed(seed: Any) -> None:
    """Refuse a seed that a state cannot hold.

    Raises:
        StateError: it is not an int that fits 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise StateError(f"seed={seed!r}: an int that fits 64 bits with sign.")


def check_is_used(seed: int, named: Mapping[str, Tensor]) -> None:
    """Refuse a seed where every leaf has its values.

    Raises:
        StateError: no leaf is deferred, so the seed changes nothing.
    """
    if not any(map(recipe_of, named.values())):
        raise StateError(
            f"seed={seed}: every leaf has its values already, so the seed would change none.",
            fix="leave seed= out; or build the module in `with fs.deferred():`, which it then fills. For "
            "the random ops of steps (dropout): step.init(params, seed=...), of the tree of values; "
            "without an optimizer, step(params, *batch, rng=(seed, step)).",
        )


def put_at_rest(block: Tensor, spec: LayoutSpec, mesh: Mesh, disk_dir: str | None) -> Any:
    """Convert a block to its storage dtype and tier; encode a coded leaf as the dict of its parts."""
    if is_coded(spec):
        parts = encode(block, spec)
        return {n: put_at_rest(parts[n], s, mesh, disk_dir) for n, s in parts_of(spec).items()}
    if spec.memory == "device":
        return block.to(mesh.device, spec.storage_dtype)
    return to_tier(block.to(spec.storage_dtype), spec.memory, mesh.device, disk_dir)


def foreign_block(spec: LayoutSpec, mesh: Mesh) -> Any:
    """Return the empty block that stands for another stage's leaf; for a coded leaf, a dict of its parts."""
    if is_coded(spec):
        return {name: foreign_block(part, mesh) for name, part in parts_of(spec).items()}
    device = mesh.device if spec.memory == "device" else torch.device("cpu")
    return torch.empty(stored_shape(spec, mesh), dtype=spec.storage_dtype, device=device)


def unshard(
    shards: Any,
    specs: Any,
    mesh: Mesh,
    *,
    layout: Literal["storage", "gradient", "optimizer"] = "storage",
) -> Any:
    """Put this rank's blocks together to the full tree, on every rank, in the blocks' dtype. A collective.

    Coded leaves are returned decoded, in `compute_dtype`.

    Args:
        layout: the field of the specs that says how the blocks lie: "storage" for parameters; "gradient" for
            the gradients that a step without an optimizer returns; "optimizer" for one slot of each leaf, as
            `fs.optim.ema_params` gives. Among gradients and slots, None stays None, as frozen leaves have it.

    Raises:
        SpecError: the tree is not the specs', or there is no such layout.
        StateError: blocks lie otherwise; it names them all.
    """
    if layout not in ("storage", "gradient", "optimizer"):
        raise SpecError(f"layout={layout!r}: 'storage', 'gradient' or 'optimizer', a field of LayoutSpec.")
    resolved = ResolvedSpecs.of(specs)
    # In a tree of gradients, put the specs' constant, or a gap, in the place of each None.
    if layout != "optimizer":
        fill = tree.constants_of(resolved.tree, is_spec) | dict.fromkeys(resolved.stored, _GAP)
        values, form = tree.flatten_with_paths(shards, constants=True)
        shards = tree.unflatten([fill.get(p) if v is None else v for p, v in values.items()], form)
        resolved = resolved.align(shards)
    if not resolved.complete:
        raise SpecError(
            f"the specs of {leaves(len(resolved.incomplete))} do not know the shapes of their leaves:",
            resolved.incomplete,
            "step.specs of a step that has seen the full leaves, or match_specs(params, rules).",
        )

    # Find the blocks of all leaves, and how they are laid out.
    named = resolved.stored
    given = {p: None if v is _GAP else v for p, v in resolved.blocks_of(shards).items()}
    # Slots are given by path, without frozen leaves and those of other stages.
    if layout == "optimizer":
        given = dict.fromkeys((p for p, s in named.items() if not s.trainable), None) | given
        foreign = {p: _store_as(s, layout) for p, s in named.items() if s.trainable and not is_here(s, mesh)}
        given = {p: foreign_block(s, mesh) for p, s in foreign.items()} | given
        compare_paths(named, given)
    if layout != "storage":
        named = {p: _store_as(s, layout) for p, s in named.items() if given[p] is not None}

    # Check them, and gather the leaves.
    check_blocks(named, given, mesh, fix=_UNSHARD)
    out = gather_full({p: given[p] for p in named}, named, mesh, connection(mesh))
    # A tree of gradients or slots has the form that `fn` sees: a coded leaf is one leaf, and None.
    if layout != "storage":
        full = resolved.as_seen(out)
        return tree.unflatten([full.get(p) for p in resolved.leaves], resolved.leaf_structure.of_gradients)
    return resolved.decode_tree(out)


def gather_full(
    blocks: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec], mesh: Mesh, comm: Collectives
) -> dict[str, Tensor]:
    """Gather the full leaves of stored blocks, on the mesh's device, in the blocks' dtypes. A collective.

    A leaf that one stage of a pipeline has is gathered there, and sent to the other stages.
    """
    out: dict[str, Tensor] = {}
    here = {p: s for p, s in specs.items() if is_here(s, mesh)}
    split = {p: s for p, s in here.items() if mesh.ordered(s.storage.axes)}
    if mesh.stages > 1:
        comm.open_groups([mesh.ordered(s.storage.axes) for s in specs.values()])

    with torch.no_grad():
        # Gather the leaves of this stage, bucket by bucket.
        buckets = make_buckets(
            split, mesh, lambda s: s.storage.contiguous, lambda s: s.storage_dtype, "unshard"
        )
        for bucket in buckets:
            packer = Packer(bucket, mesh, mesh.rank)
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            packer.pack_blocks({p: blocks[p] for p in bucket.paths}, flat)
            handle = comm.all_gather(flat, bucket.axes)
            rows = packer.unpack_rows(handle.wait(), bucket.dtype)
            out |= {p: side_by_side(v, split[p].storage, mesh, inverse=True) for p, v in rows.items()}
            handle.release()
        # Leaves that are whole are copied: what is returned shares no memory with the blocks.
        out |= {p: blocks[p].to(mesh.device, copy=True) for p in here if p not in out}

        # Send each leaf from its stage to all others.
        for path, spec in specs.items():
            owner, what = stage_of(spec, mesh), f"leaf {path}"
            if owner == mesh.stage and mesh.stages > 1:
                for stage in {*range(mesh.stages)} - {owner}:
                    comm.send([out[path]], mesh.partner(stage), what)
                comm.flush()  # this stage must not run ahead of those that take its leaves
            elif path not in here:
                like = tuple(spec.shape), blocks[path].dtype
                (out[path],) = comm.recv([like], mesh.partner(owner), what).wait()
    return {path: out[path] for path in specs}


_GAP = PathLeaf("no gradient")


def _store_as(spec: LayoutSpec, layout: str) -> LayoutSpec:
    """Return the spec of a leaf whose stored blocks would be its gradients, or its optimizer's slots."""
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
    """Refuse stored blocks of a wrong shape, dtype or device.

    Raises:
        StateError: there are such blocks; it names them all.
    """
    check_mesh(mesh)
    wrong = []
    for path, spec in specs.items():
        block, dtype = blocks[path], spec.storage_dtype
        shape = stored_shape(spec, mesh)
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


def init_params(
    source: Any,
    resolved: ResolvedSpecs,
    mesh: Mesh,
    *,
    seed: int | None,
    disk_dir: str | None = None,
    trains: bool = False,
) -> Any:
    """Make this rank's stored blocks of a full tree or an `nn.Module`.

    Args:
        source: the tree or module, whose leaves have values, or recipes (`deferred`).
        seed: the seed of deferred leaves; default 0.
        disk_dir: the directory for leaves that are stored on disk.
        trains: whether there is an optimizer. The seed is then also that of the random ops of all steps to
            come, and leaves with a wider master copy are made in its dtype, so that the copy can be taken of
            them before `narrow_to_storage`.
    """
    # Check the tree, the seed and the specs.
    number = 0 if seed is None else seed
    check_seed(number)
    is_module = isinstance(source, nn.Module)
    named = tree.flatten_with_paths(make_functional(source)[1] if is_module else source)[0]
    compare_paths(resolved.leaves, named)
    check_params(named)

    # With an optimizer the seed is also that of steps, so that it is always used.
    if seed is not None and (is_module or not trains):
        check_is_used(seed, named)
    check_specs(resolved.seen, mesh)

    # A master copy has digits that the stored block lacks, and is taken before these are cut off.
    specs = dict(resolved.leaves)
    for path, spec in specs.items() if trains else ():
        if spec.has_master:
            wide = torch.promote_types(spec.storage_dtype, spec.optimizer_dtype)
            specs[path] = replace(spec, storage_dtype=wide)
    return tree.unflatten(_make_blocks(named, specs, mesh, disk_dir, number), resolved.leaf_structure)


def _make_blocks(
    named: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None, seed: int
) -> list[Any]:
    """Make this rank's blocks of full leaves, in the specs' order; of deferred leaves only what it needs."""
    check_directory(disk_dir, [p for p, s in specs.items() if s.memory == "disk"])
    wrong = [
        f"params[{p!r}] is {list(named[p].shape)}, its spec was made for {list(spec.shape)}"
        for p, spec in specs.items()
        if tuple(named[p].shape) != tuple(spec.shape)
    ]
    if wrong:
        raise StateError(
            f"{leaves(len(wrong))} of other shapes than their specs:", wrong, "pass full leaves."
        )

    # Make one leaf after another; of a leaf that can be cut, only this rank's boxes.
    unfit, blocks, values = Unfit(), [], Values(named, seed)
    for path, spec in specs.items():
        if not is_here(spec, mesh) and not is_coded(spec):
            blocks.append(foreign_block(spec, mesh))
            continue
        if is_coded(spec) or not values.can_be_cut(path):
            leaf = values.of(path)
            unfit.look(path, spec, leaf)  # it looks at the whole leaf, so that all ranks refuse it
            blocks.append(cut_out(leaf, spec, mesh, disk_dir))
            continue
        block = torch.zeros(stored_shape(spec, mesh), dtype=named[path].dtype)
        # What the boxes leave of the block is padding, of zeros.
        for in_leaf, in_block in boxes(spec.shape, spec.storage, mesh):
            block[in_block] = values.part(path, in_leaf)
        blocks.append(put_at_rest(block, spec, mesh, disk_dir))
        if mesh.kind != "abstract" and mesh.ordered(spec.storage.axes):
            _note_checksum(blocks[-1], values.checksum(path))
    unfit.refuse()
    return blocks


def narrow_to_storage(shards: Any, resolved: ResolvedSpecs, mesh: Mesh, disk_dir: str | None) -> Any:
    """Convert blocks to their storage dtype, after the master copies were taken of them."""
    specs = resolved.stored

    def narrow(block: Tensor, spec: LayoutSpec) -> Any:
        if not is_here(spec, mesh):
            return foreign_block(spec, mesh)
        return put_at_rest(block, spec, mesh, disk_dir)

    stored = resolved.as_seen({
        p: b if b.dtype == specs[p].storage_dtype else narrow(b, specs[p])
        for p, b in resolved.blocks_of(shards).items()
    })  # fmt: skip
    # Ranks still compare the full leaves, whose checksums the new blocks carry on.
    for path, given in full_checksums(shards).items():
        _note_checksum(stored[path], given)
    return tree.unflatten(stored.values(), tree.flatten(shards)[1])


def cut_out(leaf: Tensor, spec: LayoutSpec, mesh: Mesh, disk_dir: str | None) -> Any:
    """Cut this rank's stored block out of a full leaf.

    It carries the checksum of the whole leaf, which ranks compare at their first step.
    """
    if not is_here(spec, mesh):
        return foreign_block(spec, mesh)
    block = put_at_rest(local_block(leaf, spec.storage, mesh), spec, mesh, disk_dir)
    if mesh.kind != "abstract" and mesh.ordered(spec.storage.axes):
        _note_checksum(block, checksum(leaf))
    return block


def _note_checksum(block: Any, given: int) -> None:
    """Note the checksum of the full leaf on a block, or its parts, together with the count of writes to it.

    An inference tensor, which counts no writes, gets no such note.
    """
    for part in tree.flatten(block)[0]:
        if not part.is_inference():
            part.given = given, part._version


def full_checksums(params: Any) -> dict[str, int]:
    """Return the checksums of the full leaves that blocks were cut out of, by path.

    A block that was written to since has none: its `_version` has changed.
    """
    checksums = {}
    for path, block in tree.flatten_with_paths(params)[0].items():
        given, version = getattr(block, "given", (None, None))
        if given is not None and block._version == version:
            checksums[path] = given
    return checksums


def blank_params(specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None) -> dict[str, Tensor]:
    """Make zeros for each leaf, of its stored block's shape, in the tier where it is stored."""
    check_directory(disk_dir, [p for p, s in specs.items() if "disk" in (s.memory, s.optimizer_memory)])
    return {
        p: zeros(stored_shape(s, mesh), s.storage_dtype, s.memory, mesh, disk_dir)
        if is_here(s, mesh)
        else foreign_block(s, mesh)
        for p, s in specs.items()
    }


def blank_slots(
    slots: Slots, specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None
) -> dict[str, dict[str, Tensor]]:
    """Make zeros for each leaf's optimizer state, in the tier where it is stored."""
    return {
        p: {n: zeros(*kind, specs[p].optimizer_memory, mesh, disk_dir) for n, kind in own.items()}
        for p, own in slots.items()
    }


def zeros(shape: tuple[int, ...], dtype: torch.dtype, tier: str, mesh: Mesh, disk_dir: str | None) -> Tensor:
    """Make a block of zeros in a tier."""
    if tier == "device":
        return torch.zeros(shape, dtype=dtype, device=mesh.device)
    return allocate(shape, dtype, tier, mesh.device, disk_dir).zero_()
