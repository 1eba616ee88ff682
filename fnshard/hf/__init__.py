"""hf: weights in and out of the Hugging Face format, leaf by leaf; no rank ever holds the full model.

    with fs.deferred():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    apply, params = fs.make_functional(model)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-5))
    state = step.adopt(fs.hf.load(path, specs, mesh, model=model))
    ...
    fs.hf.save(state, "tuned", model=model, config=path)  # with the tokenizer of that directory

A leaf is called in the files what it is called in the module, but for a prefix that some leave out, and for
tied weights, of which one is kept. Nothing is ever unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.errors import StateError, leaves
from fnshard.hf.attention import register_attention
from fnshard.hf.names import FAMILIES, Family, Names, Transposed, check_config, check_names, family_of
from fnshard.hf.reading import load_block, match_tensors, open_tensors, read_config, stack_experts
from fnshard.hf.writing import LeafToWrite, Put, leaves_to_write, model_directory, write_leaves
from fnshard.layout.codecs import Unfit, check_codecs
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import check_specs
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.coordination import all_or_none
from fnshard.runtime.files.folder import as_path
from fnshard.runtime.tiers import check_directory
from fnshard.step.runner import find_layout
from fnshard.step.shards import check_blocks

__all__ = ["FAMILIES", "Family", "Transposed", "load", "register_attention", "save"]


def load(
    path: str | Path,
    specs: Any,
    mesh: Mesh | None = None,
    *,
    model: nn.Module | None = None,
    names: Names = None,
    missing: Mapping[str, Tensor] | None = None,
    ignore: str | Sequence[str] = (),
    disk_dir: str | None = None,
) -> Any:
    """A model directory's weights -> this rank's stored blocks, for `Step.adopt` or `shard_forward`.

    The files are mapped, and each rank reads its own slices of them. A collective: all ranks fail, or none;
    nothing else moves between them. Float tensors are cast to the specs' `storage_dtype`.

    Args:
        path: a directory with `model.safetensors`, or with several files and their index; or one file.
        specs: what the blocks are laid out by; they know the full shapes.
        mesh: default one axis "shard" over all ranks there are.
        model: the module that the leaves are of, best built under `fs.deferred`. It says which prefix files
            may leave out and which names are tied, and has or makes the buffers that are not saved (rotary
            frequencies).
        names: a dict or a function from paths to names in the files, or `Transposed(name)` (which takes a
            copy of the block); None and what it leaves out: the path.
        missing: full values, by path, of leaves that the files lack.
        ignore: globs of tensors that no leaf takes.
        disk_dir: for leaves that rest on disk.

    Raises:
        StateError: no safetensors files, or broken ones; or, named all together, leaves without a tensor,
            tensors without a leaf, and such as do not fit; values of coded leaves that are not finite; no
            room on disk.
        CheckpointError: it failed on another rank, which has the values that are not finite, say.

    >>> import tempfile
    >>> from fnshard import LayoutSpec, P, make_mesh, match_specs
    >>> params = {"w": torch.arange(5.0)}
    >>> specs = match_specs(params, [("*", LayoutSpec(P("shard")))])
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> save(params, folder, specs, make_mesh(shard=1))
    >>> load(folder, specs, make_mesh(shard=2, abstract=True))["w"]
    tensor([0., 1., 2.])
    """
    mesh, path = mesh or make_mesh(), as_path(path, "load(path, specs)")
    globs, model = [ignore] if isinstance(ignore, str) else list(ignore), tree.unwrapped(model)

    def read() -> Any:
        resolved = check_resolved(specs, mesh)
        named = resolved.leaves
        check_names(names, named)
        family = family_of(read_config(path), model, named)
        check_directory(disk_dir, [p for p, s in named.items() if s.memory == "disk"])
        with open_tensors(path) as files:
            tensors = stack_experts(files, family)
            sources, values = match_tensors(named, tensors, names, family, model, missing or {}, globs)
            unfit, found = Unfit(), {**sources, **values}
            with torch.no_grad():
                blocks = [load_block(p, s, mesh, disk_dir, found[p], unfit) for p, s in named.items()]
            unfit.refuse()
        return tree.unflatten(blocks, resolved.leaf_structure)

    if mesh.kind == "abstract":  # no other rank is there
        return read()
    return all_or_none(connection(mesh).gather_object, f"loading {str(path)!r}", read)


def save(
    params: Any,
    path: str | Path,
    specs: Any = None,
    mesh: Mesh | None = None,
    *,
    model: nn.Module | None = None,
    names: Names = None,
    config: Any = None,
    max_file_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
) -> None:
    """Stored blocks -> a model directory that `transformers` opens. A collective: all ranks fail, or none.

    Leaves are gathered one by one to rank 0, which holds one of them whole, and writes it to another name;
    that is flushed to the disk and renamed when it is complete. A module of one's own takes a file of it by
    `safetensors.torch.load_model(module, "path/model.safetensors")`.

    Args:
        params: a tree of stored blocks, or a `TrainState`.
        path: of a directory that is not there yet, or is empty; where rank 0 sees it.
        specs, mesh: its layout; a state of `step.init` or `step.adopt` knows them.
        model: the module that the leaves are of, on any device: it says which buffers are not saved.
        names: what the files are to call leaves, as for `load`; default their paths.
        config: the configuration (an object with `to_dict`, or a dict), for config.json; or a directory whose
            configuration and tokenizer are copied; default the module's own, if it has one.
        max_file_bytes: of one file, unless one tensor is more.
        dtype: of all float tensors; default the blocks' own.

    Raises:
        StateError: blocks of another tree, mesh or spec; a name for two leaves; a dtype that such files have
            not; with `model=`, a configuration of other leaves; there is something by that name.
        CheckpointError: it could not be written (no room, no permission); nothing has the name then.
        AgreementError: ranks called it with different arguments.
    """
    stored, specs, mesh = find_layout(params, specs, mesh)
    if specs is None:
        raise StateError(
            "the layout of these blocks is not known.",
            fix="give specs, and the mesh; states of step.init and step.adopt know both.",
        )
    blocks = tree.flatten_with_paths(stored)[0]
    final, model = as_path(path, "save(params, path)").absolute(), tree.unwrapped(model)

    def make_plan() -> tuple[list[LeafToWrite], AbstractContextManager[Put]]:
        source = _config(config, model)
        known = read_config(source) if isinstance(source, Path) else source
        resolved = check_resolved(specs, mesh)
        own = resolved.blocks_of(stored)
        compare_paths(resolved.stored, own)
        check_blocks(resolved.stored, own, mesh)
        named = resolved.leaves
        plan = leaves_to_write(blocks, named, family_of(known, model, named), dtype, names=names)
        check_config(known, model, {leaf.path: leaf.spec.shape for leaf in plan})
        if not (isinstance(max_file_bytes, int | float) and max_file_bytes > 0):
            raise StateError(f"max_file_bytes={max_file_bytes!r}: a number of bytes, more than 0.")
        empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
        if mesh.rank == 0 and os.path.lexists(final) and not empty:
            raise StateError(f"there is something at {str(final)!r}: save elsewhere, or remove it.")
        return plan, model_directory(
            final, [entry for leaf in plan for entry in leaf.entries], max_file_bytes, source
        )

    write_leaves(f"saving to {str(final)!r}", make_plan, mesh, connection(mesh))


def check_resolved(specs: Any, mesh: Mesh) -> ResolvedSpecs:
    """Return specs by path; refuse such as do not know their leaves' shapes or do not fit the mesh."""
    resolved = ResolvedSpecs.of(specs)
    if not resolved.complete:
        bare = resolved.incomplete
        raise StateError(
            f"the specs do not know the full shapes of {leaves(len(bare))}:",
            bare[:8] + ["..."] * (len(bare) > 8),
            "make them with match_specs or a preset, from make_functional(model).",
        )
    check_codecs(resolved.leaves)
    check_specs(resolved.leaves, mesh)
    return resolved


def _config(config: Any, model: nn.Module | None) -> Mapping[str, Any] | Path:
    """Return the configuration as a dict, empty where there is none, or as a path that is there."""
    own = getattr(model, "config", None)
    if config is None and hasattr(own, "to_dict"):
        return {**own.to_dict(), "architectures": [type(model).__name__]}
    if config is None or isinstance(config, Mapping):
        return config or {}
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if isinstance(config, str | Path) and Path(config).exists():
        return Path(config)
    raise StateError(
        f"config={config!r} is none.",
        fix="a dict, an object with to_dict(), or the path of an existing directory or config.json.",
    )
