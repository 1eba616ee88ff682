"""`shard` and `unshard`: move a parameter tree in and out of its layout by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.deferred.deferred_init import check_values, recipe_of, values_of
from fnshard.compiler.ir.reachable import ABSENT
from fnshard.compiler.schedule.buckets import make_buckets
from fnshard.errors import SpecError, StateError, leaves
from fnshard.layout.codecs import Unfit, check_codecs, decoded, encoded, is_coded, parts_of, stored_specs
from fnshard.layout.rules import check_tree
from fnshard.layout.spec import LayoutSpec, P, block_shape, check_specs, is_spec
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.packing import Packer, local_block
from fnshard.runtime.tiers import check_directory, rest

__all__ = ["shard", "unshard"]


def leaf_paths(specs: Any) -> tuple[dict[str, LayoutSpec], tree.TreeDef]:
    """`{path: spec}` of a spec tree, as it was given.

    Raises:
        SpecError: not a tree of LayoutSpecs.
    """
    named, structure = tree.flatten_with_paths(specs, is_leaf=is_spec)
    wrong = {p: s for p, s in named.items() if not is_spec(s)}
    wrong |= {} if named else tree.constants_of(specs)
    if wrong:
        lines = [f"specs[{path!r}] is {type(value).__name__}" for path, value in wrong.items()]
        fix = "make it with match_specs(params, rules) or a preset, as fs.presets.full_shard(params, mesh)"
        layout = next((value for value in wrong.values() if isinstance(value, P)), None)
        fix += "." if layout is None else f"; a P goes into a LayoutSpec: LayoutSpec({layout!r})."
        raise SpecError("a spec tree holds LayoutSpecs alone:", lines, fix)
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
    """The specs in the tree of `params` (full shapes; real, meta or fake), what they leave open filled in.

    Raises:
        SpecError: trees of other leaves.
    """
    from fnshard.layout.units import numeric

    specs = aligned(specs, params)
    named, structure = leaf_paths(specs)
    if all(s.resolved for s in named.values()):
        return specs
    given = tree.flatten_with_paths(params)[0]
    unit_of = numeric(params)
    return tree.unflatten(
        [s if s.resolved else s.resolve(given[p], unit_of[p]) for p, s in named.items()], structure
    )


def aligned(specs: Any, like: Any) -> Any:
    """A spec tree in the form of another tree of the same leaves: names decide which is which, never order.

    Specs without any constants (handwritten ones) take those of the other tree.

    Args:
        like: full leaves, stored blocks, or specs.

    Raises:
        SpecError: trees of other leaves or constants.
    """
    named, structure = leaf_paths(specs)
    given, form = tree.flatten_with_paths(like, is_leaf=is_spec)
    parts = {f"{p}.{n}": p for p, s in named.items() if is_coded(s) for n in parts_of(s)}
    if not parts.keys().isdisjoint(given):

        def is_one_leaf(node: Any) -> bool:
            of = node.values() if isinstance(node, dict) else ()
            return bool(of) and all(isinstance(v, _Path) and v.name in parts for v in of)

        nodes, form = tree.flatten(tree.unflatten(map(_Path, given), form), is_one_leaf)
        given = dict.fromkeys(
            n.name if isinstance(n, _Path) else parts[next(iter(n.values())).name] for n in nodes
        )
    compare_paths(named, given)
    if structure.constants:
        compare_constants(specs, like)
    return specs if form == structure else tree.unflatten([named[p] for p in given], form)


@dataclass(frozen=True)
class _Path:
    """In the place of a leaf; a string would be a constant."""

    name: str


def compare_constants(specs: Any, params: Any) -> None:
    """Refuse a tree whose constants and functions are not those that the specs were made with.

    Raises:
        SpecError: names them all, with both values.
    """
    known, now = (tree.constants_of(t, is_spec) for t in (specs, params))
    pairs = {p: (known.get(p, ABSENT), now.get(p, ABSENT)) for p in known | now}
    wrong = [
        f"params[{p!r}] is {_shown(is_)}, the specs were made with {_shown(was)}"
        for p, (was, is_) in pairs.items()
        if not tree.is_same(was, is_)
    ]
    if wrong:
        raise SpecError(
            f"the tree's constants, which are part of the program, differ in {leaves(len(wrong))}:",
            wrong,
            "make specs and step anew from this tree; what changes between steps is a tensor, in the "
            "batch or in the tree (trainable=False).",
        )


def _shown(value: Any) -> str:
    return "nothing" if value is ABSENT else repr(value)


def compare_paths(specs: dict[str, Any], params: dict[str, Any]) -> None:
    """Refuse trees whose leaves differ, naming all that do."""
    check_tree(params)
    missing = [f"params[{p!r}] has no spec" for p in params if p not in specs]
    surplus = [f"specs[{p!r}] has no leaf" for p in specs if p not in params]
    if missing or surplus:
        raise SpecError(
            f"the spec tree and the parameter tree differ in {leaves(len(missing) + len(surplus))}:",
            missing + surplus,
            "make the specs from this tree with match_specs(params, rules).",
        )


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
    named, structure = leaf_paths(resolve_specs(specs, params))
    check_codecs(named)
    check_specs(named, mesh)
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
    return tree.unflatten([blocks[path] for path in named], structure)


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
    if layout != "optimizer":
        shards = _without_gaps(shards, specs)
        specs = aligned(specs, shards)
    named, structure = spec_paths(specs)
    open_ = [f"specs[{p!r}]" for p, s in named.items() if not s.resolved]
    if open_:
        raise SpecError(
            f"the specs of {leaves(len(open_))} do not know the shapes of their leaves:",
            open_,
            "step.specs of a step that has seen the full leaves, or match_specs(params, rules).",
        )
    given = {p: None if v is _GAP else v for p, v in tree.flatten_with_paths(shards)[0].items()}
    if layout == "optimizer":  # by path, of the leaves that train alone
        given = dict.fromkeys((p for p, s in named.items() if not s.trainable), None) | given
        compare_paths(named, given)
    if layout != "storage":
        named = {p: _stored_as(s, layout) for p, s in named.items() if given[p] is not None}
    check_blocks(named, given, mesh, fix=_UNSHARD)
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
    out |= {p: given[p].to(mesh.device, copy=True) for p in named if p not in out}
    if layout != "storage":
        paths, structure = leaf_paths(specs)  # a coded leaf, which has none, is one leaf of these
        return tree.unflatten([out.get(p) for p in paths], structure.of_gradients)
    return decoded(tree.unflatten([out[p] for p in named], structure), *leaf_paths(specs))


_GAP = _Path("no gradient")


def _without_gaps(grads: Any, specs: Any) -> Any:
    """Gradients in which leaves without one are leaves, and constants the specs' own, where None stood."""
    constants, named = tree.constants_of(specs, is_spec), spec_paths(specs)[0]
    given, form = tree.flatten_with_paths(grads, constants=True)
    fill = constants | dict.fromkeys(named, _GAP)
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
