"""`shard` and `unshard`: move a parameter tree in and out of its layout by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.codecs import Unfit, check_codecs, decoded, encoded, is_coded, parts_of, stored_specs
from fnshard.errors import SpecError, StateError, leaves, report
from fnshard.mesh import Mesh
from fnshard.runtime.buckets import Packer, local_block, make_buckets
from fnshard.runtime.collectives import Collectives
from fnshard.runtime.connect import connection
from fnshard.runtime.memory import check_directory, rest
from fnshard.spec import LayoutSpec, block_shape, check_specs, is_spec


def leaf_paths(specs: Any) -> tuple[dict[str, LayoutSpec], tree.TreeDef]:
    """`{path: spec}` of a spec tree, as it was given.

    Raises:
        SpecError: not a tree of LayoutSpecs.
    """
    named, structure = tree.flatten_with_paths(specs, is_leaf=is_spec)
    wrong = [f"specs[{p!r}] is {type(s).__name__}" for p, s in named.items() if not is_spec(s)]
    if wrong:
        raise SpecError(report("a spec tree holds LayoutSpecs alone:", wrong, "make it with match_specs."))
    return named, structure


def spec_paths(specs: Any) -> tuple[dict[str, LayoutSpec], tree.TreeDef]:
    """`{path: spec}` of what is stored by a spec tree: coded leaves by their parts.

    Raises:
        SpecError: not a tree of LayoutSpecs; leaves that cannot be coded.
    """
    named, structure = leaf_paths(specs)
    if not any(map(is_coded, named.values())):
        return named, structure
    check_codecs(named)
    return tree.flatten_with_paths(stored_specs(specs), is_leaf=is_spec)


def resolve_specs(specs: Any, params: Any) -> Any:
    """Fill in what handwritten specs leave open from `params` (full shapes; real, meta or fake)."""
    from fnshard.units import numeric

    named, structure = leaf_paths(specs)
    if all(s.resolved for s in named.values()):
        return specs
    given = tree.flatten_with_paths(params)[0]
    compare_paths(named, given)
    unit_of = numeric(params)
    return tree.unflatten(
        [s if s.resolved else s.resolve(given[p], unit_of[p]) for p, s in named.items()], structure
    )


def compare_paths(specs: dict[str, Any], params: dict[str, Any]) -> None:
    """Refuse trees whose leaves differ, naming all that do."""
    missing = [f"params[{p!r}] has no spec" for p in params if p not in specs]
    surplus = [f"specs[{p!r}] has no leaf" for p in specs if p not in params]
    if missing or surplus:
        raise SpecError(
            report(
                f"the spec tree and the parameter tree differ in {leaves(len(missing) + len(surplus))}:",
                missing + surplus,
                "make the specs from this tree with match_specs(params, rules).",
            )
        )


def shard(params: Any, specs: Any, mesh: Mesh, *, disk_dir: str | None = None) -> Any:
    """Full tree -> this rank's stored blocks, padded, in storage dtype, where `LayoutSpec.memory` says.

    Moves nothing between ranks: every rank must hold the same full tree.

    Args:
        disk_dir: directory for leaves with memory="disk".

    Raises:
        SpecError: specs that do not fit the tree or the mesh.
        StateError: leaves of other shapes; values of coded leaves that are not finite.

    >>> import torch
    >>> from fnshard import LayoutSpec, P, make_mesh, match_specs
    >>> params = {"w": torch.arange(5.0)}
    >>> specs = match_specs(params, [("*", LayoutSpec(P("shard")))])
    >>> shard(params, specs, make_mesh(shard=2, abstract=True))["w"]
    tensor([0., 1., 2.])
    """
    named, structure = leaf_paths(resolve_specs(specs, params))
    check_codecs(named)
    check_specs(named, mesh)
    given = tree.flatten_with_paths(params)[0]
    compare_paths(named, given)
    check_directory(disk_dir, [p for p, s in named.items() if s.memory == "disk"])
    rank, unfit = mesh.rank, Unfit()
    for path, spec in named.items():
        unfit.look(path, spec, given[path])  # the whole leaf, so that all ranks refuse it
    unfit.refuse()
    blocks = []
    for path, spec in named.items():
        leaf = given[path].detach()
        if tuple(leaf.shape) != tuple(spec.shape):
            raise StateError(
                f"params[{path!r}] is {list(leaf.shape)}, its spec was made for {list(spec.shape)}."
            )
        block = local_block(leaf, spec.storage, mesh, rank)
        blocks.append(stored_at_rest(block, spec, mesh, disk_dir))
    return tree.unflatten(blocks, structure)


def stored_at_rest(block: Tensor, spec: LayoutSpec, mesh: Mesh, disk_dir: str | None) -> Any:
    """A block in its storage dtype and tier; of a coded leaf, the dict of its parts."""
    if is_coded(spec):
        parts = encoded(block, spec)
        return {n: stored_at_rest(parts[n], s, mesh, disk_dir) for n, s in parts_of(spec).items()}
    if spec.memory == "device":
        return block.to(mesh.device, spec.storage_dtype)
    return rest(block.to(spec.storage_dtype), spec.memory, mesh.device, disk_dir)


def unshard(shards: Any, specs: Any, mesh: Mesh, *, comm: Collectives | None = None) -> Any:
    """This rank's stored blocks -> the full tree, on every rank, in storage dtype. A collective.

    Coded leaves come decoded, in `compute_dtype`.

    Args:
        comm: the collectives to use; default those that all steps on the mesh share.
    """
    named, structure = spec_paths(specs)
    given = tree.flatten_with_paths(shards)[0]
    compare_paths(named, given)
    check_blocks(named, given, mesh)
    comm = comm or connection(mesh)
    out: dict[str, Tensor] = {}
    moved = {p: s for p, s in named.items() if mesh.ordered(s.storage.axes)}
    with torch.no_grad():
        for bucket in make_buckets(moved, mesh, lambda s: s.storage, lambda s: s.storage_dtype, "unshard"):
            packer = Packer(bucket, mesh, mesh.rank)
            flat = comm.send_buffer(bucket.numel, bucket.dtype, bucket.axes)
            packer.pack_blocks({p: given[p] for p in bucket.paths}, flat)
            handle = comm.all_gather(flat, bucket.axes)
            out |= packer.unpack_rows(handle.wait(), bucket.dtype)
            handle.release()
    whole = tree.unflatten(
        [out[p] if p in out else given[p].to(mesh.device, copy=True) for p in named], structure
    )
    return decoded(whole, *leaf_paths(specs))


def expected_blocks(specs: Mapping[str, LayoutSpec], mesh: Mesh) -> dict[str, tuple[tuple[int, ...], Any]]:
    """`{path: (shape, dtype)}` of what a rank stores."""
    return {p: (block_shape(s.shape, s.storage, mesh), s.storage_dtype) for p, s in specs.items()}


def check_blocks(
    specs: Mapping[str, LayoutSpec],
    blocks: Mapping[str, Any],
    mesh: Mesh,
    expected: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
) -> None:
    """Refuse stored blocks of a wrong shape, dtype or device, all at once.

    Args:
        expected: what `expected_blocks` gave, where it is asked for at every step.

    Raises:
        StateError: names every leaf, what it is and what was expected.
    """
    wrong = []
    where = {p: mesh.device_type if s.memory == "device" else "cpu" for p, s in specs.items()}
    for path, (shape, dtype) in (expected or expected_blocks(specs, mesh)).items():
        block = blocks[path]
        if not isinstance(block, Tensor):
            wrong.append(f"params[{path!r}] is {type(block).__name__}, expected a tensor")
        elif block.shape != shape or block.dtype != dtype or block.device.type != where[path]:
            spec = specs[path]
            wrong.append(
                f"params[{path!r}] is {list(block.shape)} {block.dtype} on {block.device.type}, expected "
                f"a block {list(shape)} {dtype} on {where[path]} "
                f"of {list(spec.shape)} with {spec.storage!r}"
            )
    if wrong:
        raise StateError(
            report(
                f"not this rank's stored blocks on mesh {mesh}, {leaves(len(wrong))}:",
                wrong,
                "pass fs.shard(full_params, specs, mesh), or a state that step.init made on this mesh.",
            )
        )
