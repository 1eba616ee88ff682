"""Load and save weights in the Hugging Face format, leaf by leaf; no rank ever holds the full model.

    with fs.deferred():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    apply, params = fs.make_functional(model)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-5))
    state = step.adopt(fs.hf.load(path, specs, mesh, model=model))
    ...
    fs.hf.save(state, "tuned", model=model, config=path)  # with the tokenizer of that directory

The files call a leaf what the module calls it, except for a prefix that some leave out, and for tied weights,
of which they keep one. Nothing is ever unpickled.
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
from fnshard.hf.attention_registry import register_attention
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
    """Load a model directory's weights as this rank's stored blocks, for `Step.adopt` or `shard_forward`.

    The files are mapped, and each rank reads its own slices of them. It is a collective: all ranks fail, or
    none; nothing else moves between them. Float tensors are cast to the specs' `storage_dtype`.

    Args:
        path: a directory with `model.safetensors`, or with several files and their index; or one file.
        specs: the specs of the blocks, which know the full shapes.
        mesh: the mesh; by default, one axis "shard" over all ranks.
        model: the module that has the leaves, best built under `fs.deferred`. It says which prefix files may
            leave out and which names are tied, and has or makes the buffers that are not saved (rotary
            frequencies).
        names: a dict or a function from paths to names in the files, or to `Transposed(name)` (which takes a
            copy of the block). A leaf for which it has nothing, or None, is called by its path.
        missing: full values, by path, of leaves that the files lack.
        ignore: globs of tensors that no leaf takes.
        disk_dir: the directory for leaves that are kept on disk.

    Raises:
        StateError: there are no safetensors files, or broken ones; leaves have no tensor, tensors have no
            leaf, or they do not fit, all of which are named together; values of coded leaves are not finite;
            or there is no room on disk.
        CheckpointError: it failed on another rank, for instance on one whose values are not finite.

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
    globs = [ignore] if isinstance(ignore, str) else list(ignore)
    model = tree.unwrap_module(model)

    def read() -> Any:
        # Check what can be checked before a file is opened.
        resolved = check_resolved(specs, mesh)
        named = resolved.leaves
        check_names(names, named)
        family = family_of(read_config(path), model, named)
        check_directory(disk_dir, [p for p, s in named.items() if s.memory == "disk"])

        # Find a tensor or a value for every leaf, and only then read blocks.
        with open_tensors(path) as files:
            tensors = stack_experts(files, family)
            sources, values = match_tensors(named, tensors, names, family, model, missing or {}, globs)
            source_of = {**sources, **values}
            unfit = Unfit()
            with torch.no_grad():
                blocks = [load_block(p, s, mesh, disk_dir, source_of[p], unfit) for p, s in named.items()]
            unfit.refuse()
        return tree.unflatten(blocks, resolved.leaf_structure)

    if mesh.kind == "abstract":  # there is no other rank
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
    """Save stored blocks as a model directory that `transformers` opens.

    It is a collective: all ranks fail, or none.

    Leaves are gathered one by one to rank 0, which holds one of them whole. It writes them to a folder of
    another name, which is flushed to the disk and renamed when it is complete. A plain module loads such a
    file by `safetensors.torch.load_model(module, "path/model.safetensors")`.

    Args:
        params: a tree of stored blocks, or a `TrainState`.
        path: a directory that does not exist or is empty, where rank 0 sees it.
        specs, mesh: the layout of the blocks; a state of `step.init` or `step.adopt` knows them.
        model: the module that has the leaves, on any device: it says which buffers are not saved.
        names: what the files are to call leaves, as in `load`; by default, their paths.
        config: the configuration (an object with `to_dict`, or a dict), for config.json; or a directory whose
            configuration, tokenizer and code (where an `auto_map` names it) are copied; by default the
            module's own, if it has one.
        max_file_bytes: the most bytes of one file, unless one tensor is larger.
        dtype: the dtype of all float tensors in the files; by default that of the blocks.

    Raises:
        StateError: blocks are of another tree, mesh or spec; two leaves have one name; the files cannot hold
            a dtype; the configuration given with `model=` is of other leaves; or the path is taken.
        CheckpointError: the files could not be written (no room, no permission); the path does then not
            exist.
        AgreementError: ranks called it with different arguments.
    """
    stored, specs, mesh = find_layout(params, specs, mesh)
    if specs is None:
        raise StateError(
            "the layout of these blocks is not known.",
            fix="give specs, and the mesh; states of step.init and step.adopt know both.",
        )
    blocks = tree.flatten_with_paths(stored)[0]
    final, model = as_path(path, "save(params, path)").absolute(), tree.unwrap_module(model)

    def make_plan() -> tuple[list[LeafToWrite], AbstractContextManager[Put]]:
        # Check that the blocks are those of the specs.
        source = _find_config(config, model)
        values = read_config(source) if isinstance(source, Path) else source
        resolved = check_resolved(specs, mesh)
        stored_blocks = resolved.blocks_of(stored)
        compare_paths(resolved.stored, stored_blocks)
        check_blocks(resolved.stored, stored_blocks, mesh)

        # Plan what the files hold, and check it against the configuration.
        named = resolved.leaves
        plan = leaves_to_write(blocks, named, family_of(values, model, named), dtype, names=names)
        check_config(values, model, {leaf.path: leaf.spec.shape for leaf in plan})
        if not (isinstance(max_file_bytes, int | float) and max_file_bytes > 0):
            raise StateError(f"max_file_bytes={max_file_bytes!r}: a number of bytes, more than 0.")
        is_empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
        if mesh.rank == 0 and os.path.lexists(final) and not is_empty:
            raise StateError(f"there is something at {str(final)!r}.", fix="save elsewhere, or remove it.")
        entries = [entry for leaf in plan for entry in leaf.entries]
        return plan, model_directory(final, entries, max_file_bytes, source)

    write_leaves(f"saving to {str(final)!r}", make_plan, mesh, connection(mesh))


def check_resolved(specs: Any, mesh: Mesh) -> ResolvedSpecs:
    """Check specs, and return them by path.

    Raises:
        StateError: some do not know the shapes of their leaves.
        SpecError: some do not fit the mesh or their codecs.
    """
    resolved = ResolvedSpecs.of(specs)
    if not resolved.complete:
        incomplete = resolved.incomplete
        raise StateError(
            f"the specs do not know the full shapes of {leaves(len(incomplete))}:",
            incomplete if len(incomplete) <= 8 else [*incomplete[:8], "..."],
            "make them with match_specs or a preset, from make_functional(model).",
        )
    check_codecs(resolved.leaves)
    check_specs(resolved.leaves, mesh)
    return resolved


def _find_config(config: Any, model: nn.Module | None) -> Mapping[str, Any] | Path:
    """Return the configuration as a dict, which is empty where there is none, or as a path that exists."""
    model_config = getattr(model, "config", None)
    if config is None and hasattr(model_config, "to_dict"):
        return {**model_config.to_dict(), "architectures": [type(model).__name__]}
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
