"""Init: each rank makes only its own shards, and the numbers do not depend on the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.analysis.slots import Slots
from fnshard.compiler.deferred.deferred_init import check_values, recipe_of
from fnshard.compiler.deferred.tape import fill_blank, has_blanks, seeded
from fnshard.errors import StateError
from fnshard.functional import make_functional
from fnshard.layout.codecs import Unfit
from fnshard.layout.partition import block_shape
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.runtime.packing import local_block
from fnshard.runtime.tiers import allocate, check_directory
from fnshard.step.shards import check_is_used, check_seed, shard, stored_at_rest

InitFn = Callable[[str, Tensor], Any]


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


def blank_params(
    specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None, *, on_paper: bool = False
) -> dict[str, Tensor]:
    """Zeros where each leaf's stored block rests; on the meta device, where it is for the shapes alone.

    Raises:
        StateError: no room, or no directory, for what rests on disk.
    """
    if not on_paper:
        check_directory(disk_dir, [p for p, s in specs.items() if "disk" in (s.memory, s.optimizer_memory)])
    zeros = _meta if on_paper else _zeros
    return {
        p: zeros(block_shape(s.shape, s.storage, mesh), s.storage_dtype, s.memory, mesh, disk_dir)
        for p, s in specs.items()
    }


def blank_slots(
    slots: Slots, specs: Mapping[str, LayoutSpec], mesh: Mesh, disk_dir: str | None, *, on_paper: bool = False
) -> dict[str, dict[str, Tensor]]:
    """Zeros where each leaf's optimizer state rests."""
    zeros = _meta if on_paper else _zeros
    return {
        path: {
            name: zeros(shape, dtype, specs[path].optimizer_memory, mesh, disk_dir)
            for name, (shape, dtype) in of_leaf.items()
        }
        for path, of_leaf in slots.items()
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, tier: str, mesh: Mesh, disk_dir: str | None) -> Tensor:
    if tier == "device":
        return torch.zeros(shape, dtype=dtype, device=mesh.device)
    return allocate(shape, dtype, tier, mesh.device, disk_dir).zero_()


def _meta(shape: tuple[int, ...], dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
