"""Adapters: merge them into their weights, save them as PEFT's files and load them from PEFT's files.

PEFT writes a directory with `adapter_model.safetensors` and `adapter_config.json`, which `load` reads;
`peft.PeftModel.from_pretrained` reads what `save` writes, on the same base model. PEFT's own `LoraConfig` is
not used: it checks no types, so that the checks below would be needed all the same, and PEFT may be absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fnshard import tree
from fnshard.adapters.lora import Lora, row_scale
from fnshard.errors import StateError, leaves
from fnshard.layout.codecs import block_of, is_coded
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.layout.spec import is_here
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.coordination import all_or_none
from fnshard.runtime.files.folder import flush_directory, flush_file
from fnshard.runtime.packing import local_block
from fnshard.step.runner import find_layout
from fnshard.step.shards import foreign_block, unshard

__all__ = ["load", "merge", "save"]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merge(params: Any, settings: Lora, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """Add the adapters to the weights of the base: W + s B A, with its rows scaled for DoRA. A collective.

    Args:
        params: `{"base", "adapters"}` of stored blocks, or a state of them.
        settings: the `.lora` of the function that was tuned.
        specs, mesh: the blocks' layout; a state knows it.

    Returns:
        The base's blocks, coded leaves decoded, and their specs: what `fs.hf.save` takes.

    >>> import fnshard as fs
    >>> params = {"w": torch.zeros(2, 3)}
    >>> linear = torch.nn.functional.linear
    >>> fn, params = fs.lora(lambda p, x: linear(x, p["w"]), params, rank=1, alpha=2, targets="w")
    >>> _ = params["adapters"]["w"]["a"].data.fill_(1), params["adapters"]["w"]["b"].data.fill_(3)
    >>> specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    >>> merge(params, fn.lora, specs)[0]["w"]
    tensor([[6., 6., 6.],
            [6., 6., 6.]])
    """
    blocks, specs, mesh = _find_layout(params, specs, mesh)
    base = ResolvedSpecs.of(specs["base"])
    stored = tree.flatten_with_paths(blocks["base"])[0]
    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)

    merged = []
    with torch.no_grad():
        for path, spec in base.leaves.items():
            is_target = path in settings.targets
            # DoRA needs the norms of whole leaves: all ranks gather each of them, also those of other stages.
            whole = _gather_leaf(stored, base, path, mesh) if is_target and settings.dora else None
            if not is_here(spec, mesh):
                merged.append(foreign_block(replace(spec, codec=None), mesh))
                continue
            block = block_of(stored, path, spec)
            if is_target:
                # Each rank computes the whole update, and cuts its block out of it.
                full = _compute_update(adapters[path], settings, path)
                update = local_block(full.to(block.device), spec.storage, mesh)
                block = block.to(update.dtype) + update
                if settings.dora:
                    scale = _compute_scale(whole, adapters[path], settings, path in settings.transposed)
                    block = block * local_block(scale.to(block.device).expand_as(full), spec.storage, mesh)
                block = block.to(spec.storage_dtype)
            merged.append(block)

    plain = base.with_leaves(replace(s, codec=None) if is_coded(s) else s for s in base.leaves.values())
    return tree.unflatten(merged, base.leaf_structure), plain.tree


def _compute_update(adapter: Mapping[str, Tensor], settings: Lora, path: str) -> Tensor:
    """Return s B A, in the shape of the leaf."""
    wide = torch.promote_types(adapter["b"].dtype, torch.float32)
    update = settings.scale * (adapter["b"].to(wide) @ adapter["a"].to(wide))
    return update.mT if path in settings.transposed else update


def _compute_scale(
    whole: Tensor, adapter: Mapping[str, Tensor], settings: Lora, is_transposed: bool
) -> Tensor:
    """Return what DoRA multiplies a leaf's rows by, in a shape that broadcasts with the leaf."""
    adapter = {name: value.to(whole.device) for name, value in adapter.items()}
    scale = row_scale(whole, adapter, settings, is_transposed)
    return scale if is_transposed else scale[:, None]


def save(
    params: Any,
    path: str | Path,
    settings: Lora,
    specs: Any = None,
    mesh: Mesh | None = None,
    *,
    base: str | None = None,
) -> None:
    """Write the adapters alone, as PEFT does. A collective; all ranks fail, or none.

    Args:
        params, settings, specs, mesh: as for `merge`.
        path: the directory; files of a former save are replaced.
        base: what the files call the model that the adapters were tuned for.

    Raises:
        CheckpointError: a file could not be written.
    """
    blocks, specs, mesh = _find_layout(params, specs, mesh)
    resolved = ResolvedSpecs.of(specs["base"])

    # Refuse what PEFT's files cannot hold: adapters of experts, trained leaves of the base, and a mixture of
    # transposed and other leaves, for which the configuration has one switch.
    stacks = [f"params['base'][{p!r}]" for p in settings.targets if len(resolved.leaves[p].shape) > 2]
    if stacks:
        fix = "merge them, fs.adapters.merge, and save the whole by fs.hf.save; or a checkpoint."
        raise StateError("adapters of a matrix for each expert are not written as PEFT's:", stacks, fix)
    trained = [f"params['base'][{p!r}]" for p in resolved.trainable]
    if trained or (settings.transposed and settings.transposed != settings.targets):
        lines = trained or [f"params['base'][{p!r}] is [in, out]" for p in settings.transposed]
        fix = "merge them, fs.adapters.merge, and save the whole by fs.hf.save; or a checkpoint."
        what = "train with the adapters" if trained else "are transposed while others are not"
        raise StateError(f"PEFT's files have no place for leaves that {what}:", lines, fix)

    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)
    tensors = {_name_in_file(leaf, n): parts[n] for leaf, parts in adapters.items() for n in "ab"}
    if settings.dora:
        # The files hold the norms of rows, which train in PEFT; here what trains is their share of W's norms.
        stored = tree.flatten_with_paths(blocks["base"])[0]
        for leaf in settings.targets:
            whole = _gather_leaf(stored, resolved, leaf, mesh)
            norms = _compute_row_norms(whole, leaf in settings.transposed)
            share = adapters[leaf]["g"]
            tensors[_name_in_file(leaf, "magnitude")] = share * norms.to(share.device)

    def write() -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        # Write both files aside and rename them: a reader sees the old ones or the new ones.
        weights = folder / f".{WEIGHTS}.writing"
        save_file({name: v.contiguous() for name, v in tensors.items()}, weights, {"format": "pt"})
        config = folder / f".{CONFIG}.writing"
        config.write_text(json.dumps(_make_config(settings, base), indent=2) + "\n")
        flush_file(weights)
        flush_file(config)
        os.replace(weights, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)
        flush_directory(folder)

    all_or_none(
        connection(mesh).gather_object,
        f"saving adapters to {str(path)!r}",
        write if mesh.rank == 0 else None,
    )


def load(
    path: str | Path, shapes: Mapping[str, Tensor], specs: Any = None, mesh: Mesh | None = None
) -> tuple[Lora, dict[str, dict[str, Tensor]]]:
    """Read adapters from PEFT's files: return their settings, and their full values by leaf.

    The values are as `fs.lora` returns them under "adapters".

    Args:
        path: the directory.
        shapes: the base's leaves by path, on any device; or, with `specs`, this rank's stored blocks of them.
            DoRA's files hold norms of rows, which are compared with those of the base: its leaves need
            values, and where they are blocks this is a collective.
        specs, mesh: the layout of the blocks.

    Raises:
        StateError: a file is missing or broken, or the adapters are of other leaves or shapes, or of another
            kind.
    """
    folder = Path(path)
    config, values = _read_files(folder)
    settings = _parse_settings(config, f"{str(folder / CONFIG)!r}")
    resolved = None if specs is None else ResolvedSpecs.of(specs)
    if resolved is None:
        full = {leaf: tuple(v.shape) for leaf, v in shapes.items()}
    else:
        full = {leaf: tuple(spec.shape) for leaf, spec in resolved.leaves.items()}

    # Sort the tensors by leaf and part; what no leaf has is wrong.
    adapters: dict[str, dict[str, Tensor]] = {}
    known = {_name_in_file(leaf, part): (leaf, part) for leaf in full for part in settings.parts}
    wrong = [f"{n!r} {list(v.shape)}: {_describe_foreign(n)}" for n, v in values.items() if n not in known]
    for name in values.keys() & known.keys():
        leaf, part = known[name]
        adapters.setdefault(leaf, {})[part] = values[name]
    targets = tuple(leaf for leaf in full if leaf in adapters)

    # PEFT says of all leaves together whether they are [in, out]. Where some are and others are not, the
    # shapes of their adapters tell; those of a square matrix fit both ways.
    all_transposed = bool(settings.transposed)
    transposed: list[str] = []
    for leaf in targets:
        shapes_of_parts = _list_shapes(adapters[leaf])
        fits_as_is = _expect_shapes(full[leaf], settings, False) == shapes_of_parts
        fits_transposed = _expect_shapes(full[leaf], settings, True) == shapes_of_parts
        is_ambiguous = fits_as_is == fits_transposed
        if (is_ambiguous and all_transposed) or (not is_ambiguous and fits_transposed):
            transposed.append(leaf)
    settings = replace(settings, targets=targets, transposed=tuple(transposed))
    problems = [_explain_misfit(leaf, adapters[leaf], full[leaf], settings) for leaf in targets]
    wrong += [problem for problem in problems if problem is not None]
    if wrong:
        fix = f"load them on the model that they were tuned for; or {_MERGE}."
        raise StateError(f"adapters of another model, {leaves(len(wrong))}:", wrong, fix)
    if not targets:
        fix = "name the directory that PEFT's save_pretrained wrote, with its weights."
        raise StateError(f"{str(folder / WEIGHTS)!r} holds no tensors.", fix=fix)

    # PEFT's files hold norms of rows; adapters here hold their share of the norms of W's rows.
    if settings.dora:
        for leaf in targets:
            adapters[leaf]["g"] = _compute_share(
                leaf, adapters[leaf].pop("magnitude"), settings, shapes, resolved, mesh
            )
    names = ("a", "b", "g")[: len(settings.parts)]
    return settings, {leaf: {name: adapters[leaf][name] for name in names} for leaf in targets}


def _read_files(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the configuration and the tensors of a directory."""
    try:
        return json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        pickled = folder / WEIGHTS.replace(".safetensors", ".bin")
        if pickled.exists() and not (folder / WEIGHTS).exists():
            raise StateError(
                f"{str(pickled)!r} is a pickle, and reading a pickle runs what is in it.",
                fix="have PEFT write safetensors once, where you trust the file: "
                "PeftModel.from_pretrained(base, path).save_pretrained(other).",
            ) from None
        fix = f"name a directory with {CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes them."
        raise StateError(f"{str(folder)!r} holds no adapters of PEFT's: {error}.", fix=fix) from error


def _compute_share(
    leaf: str,
    norms: Tensor,
    settings: Lora,
    base: Mapping[str, Tensor],
    specs: ResolvedSpecs | None,
    mesh: Any,
) -> Tensor:
    """Return the norms of DoRA's rows over those of the base's rows: the share that trains here."""
    whole = base[leaf] if specs is None else _gather_leaf(base, specs, leaf, mesh)
    if whole.is_meta:
        raise StateError(
            f"params[{leaf!r}] is on meta, and its adapter is of DoRA, whose files hold norms of rows of the "
            "base.",
            fix="give the base's values: fs.adapters.load(path, blocks, specs, mesh), with the blocks of "
            "fs.hf.load.",
        )

    base_norms = _compute_row_norms(whole, leaf in settings.transposed).to(norms.device)
    wide = torch.promote_types(norms.dtype, torch.float32)
    # A norm of 0 stays 0, whatever its share.
    lost = (base_norms == 0) & (norms != 0)
    if lost.any():
        raise StateError(
            f"params[{leaf!r}]: {int(lost.sum())} of its rows are 0, and their norms in the adapter are not.",
            fix=f"{_MERGE}.",
        )

    return torch.where(base_norms == 0, 1.0, norms.to(wide) / base_norms.to(wide))


# The options of PEFT's configuration that are read, with a test of their value and what it should be.
_READ: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: type(v) is int and v > 0, "a whole number from 1"),
    "lora_alpha": (lambda v: type(v) in (int, float) and 0 < v < math.inf, "a number above 0"),
    "lora_dropout": (lambda v: type(v) in (int, float) and 0 <= v < 1, "a share from 0, below 1"),
    "use_rslora": (lambda v: type(v) is bool, "true or false"),
    "use_dora": (lambda v: type(v) is bool, "true or false"),
    "fan_in_fan_out": (lambda v: type(v) is bool, "true or false"),
    "init_lora_weights": (lambda v: v in _INITIALISATIONS, "one that leaves the base's weights as they are"),
    "bias": (lambda v: v in (None, "none"), "none: biases of the base have no place in adapters here"),
}
_INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
_DEFAULTS = {"lora_dropout": 0.0, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
# Options that do not change the function that is computed.
_HARMLESS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "runtime_config",
    "ensure_weight_tying",
})  # fmt: skip
# Options that make it another function, and how. Any other switch, of a later version, counts as one, too.
_UNSUPPORTED: Mapping[str, str] = {
    "rank_pattern": "ranks of some leaves",
    "alpha_pattern": "alphas of some leaves",
    "modules_to_save": "whole modules that trained with the adapters",
    "trainable_token_indices": "rows of an embedding that trained",
    "lora_bias": "biases of adapters",
    "target_parameters": "adapters of parameters, as those of experts",
    "layer_replication": "layers that are there twice",
    "alora_invocation_tokens": "adapters that some tokens switch on",
    "megatron_config": "Megatron's own layers",
}


_MERGE = "merge such adapters with PEFT, merge_and_unload, and load the whole by fs.hf.load"


def _parse_settings(config: Any, name: str) -> Lora:
    """Return the settings of a configuration, without its targets.

    Its `transposed` is a glob for all leaves, or nothing, as the configuration says.

    Raises:
        StateError: an option is missing, has a wrong type, or is not supported; it names all of these.
    """
    kind = config.get("peft_type") if isinstance(config, Mapping) else type(config).__name__
    if kind != "LORA":
        raise StateError(f"{name} holds {kind!r} adapters; only LoRA is known.", fix=f"{_MERGE}.")

    # Check the options that are read.
    given = {**_DEFAULTS, **config}
    wrong = [
        f"{key} is {_shorten(given[key]) if key in given else 'missing'}, wanted is {wanted}"
        for key, (fits, wanted) in _READ.items()
        if (key in given or key in ("r", "lora_alpha")) and not fits(given.get(key))
    ]

    # Check that no other option changes the function. Sizes of later versions are numbers and texts, and mean
    # nothing without their switch.
    for key in given:
        if (
            key not in _READ
            and key not in _HARMLESS
            and given[key]
            and (key in _UNSUPPORTED or isinstance(given[key], bool | Mapping | list))
        ):
            what = _UNSUPPORTED.get(key, "another kind of adapters")
            wrong.append(f"{key} is {_shorten(given[key])}: {what}, which is not known here")

    if wrong:
        raise StateError(f"{name} is not one that can be read here:", wrong, f"{_MERGE}.")

    return Lora(
        rank=given["r"],
        alpha=float(given["lora_alpha"]),
        targets=(),
        transposed=("*",) if given["fan_in_fan_out"] else (),
        dropout=float(given["lora_dropout"]),
        rank_stabilised=given["use_rslora"],
        dora=given["use_dora"],
    )


def _shorten(value: Any) -> str:
    """Return a value as JSON, cut to one line."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _describe_foreign(name: str) -> str:
    """Return, in words, what a tensor that no leaf takes seems to be."""
    kinds = {
        "lora_embedding_": "an adapter of an embedding",
        "lora_magnitude_vector": "DoRA's, and use_dora is false; or no such leaf",
        "trainable_tokens_": "rows of an embedding that trained",
        ".bias": "a bias",
        "lora_": "no such leaf",
    }
    return next((what for part, what in kinds.items() if part in name), "a whole weight, no adapter")


def _expect_shapes(shape: tuple[int, ...], settings: Lora, is_transposed: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes that A, B and DoRA's norms have for a matrix; none for a leaf of other dims."""
    if len(shape) != 2:
        return {}
    rows, columns = shape[::-1] if is_transposed else shape
    shapes = {"a": (settings.rank, columns), "b": (rows, settings.rank), "magnitude": (rows,)}
    return {part: shapes[part] for part in settings.parts}


def _list_shapes(parts: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parts that an adapter has."""
    return {part: tuple(parts[part].shape) for part in ("a", "b", "magnitude") if part in parts}


def _explain_misfit(
    leaf: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], settings: Lora
) -> str | None:
    """Return why an adapter does not fit its leaf; None if it does."""
    actual = _list_shapes(parts)
    expected = _expect_shapes(shape, settings, leaf in settings.transposed)
    name = f"params[{leaf!r}] {list(shape)}"
    if actual != expected:
        return f"{name}: {', '.join(settings.parts)} are {actual}, not {expected or 'of a matrix'}"
    dtypes = sorted({str(v.dtype) for v in parts.values() if not v.is_floating_point()})
    if dtypes:
        return f"{name}: its adapter is of {', '.join(dtypes)}, not of floats"
    return None


def _compute_row_norms(whole: Tensor, is_transposed: bool) -> Tensor:
    """Return the norm of each row of W, in fp32 at least."""
    wide = torch.promote_types(whole.dtype, torch.float32)
    return (whole.t() if is_transposed else whole).detach().to(wide).norm(dim=1)


def _gather_leaf(stored: Any, base: ResolvedSpecs, path: str, mesh: Mesh | None) -> Tensor:
    """Return a whole leaf of the base, decoded. A collective."""
    spec = base.leaves[path]
    plain = replace(spec, codec=None)
    if mesh is None or is_here(spec, mesh):
        block = block_of(stored, path, spec)
    else:
        block = foreign_block(plain, mesh)  # this rank's stage does not store the leaf, but takes part
    return unshard({path: block}, {path: plain}, mesh)[path]


def _name_in_file(leaf: str, part: str) -> str:
    """Return the name that PEFT's files have for a part of a leaf's adapter."""
    prefix = f"base_model.model.{leaf.removesuffix('.weight')}.lora_"
    return f"{prefix}magnitude_vector" if part == "magnitude" else f"{prefix}{part.upper()}.weight"


def _make_config(settings: Lora, base: str | None) -> dict[str, Any]:
    """Return the settings as PEFT's configuration names them."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "inference_mode": True, "r": settings.rank, "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilised, "use_dora": settings.dora,
        "fan_in_fan_out": bool(settings.transposed),
        "target_modules": sorted(path.removesuffix(".weight") for path in settings.targets),
    }  # fmt: skip


def _find_layout(params: Any, specs: Any, mesh: Mesh | None) -> tuple[Any, Any, Mesh]:
    """Return the blocks, specs and mesh of a tuned step's params or state.

    Raises:
        StateError: they are not the base and adapters of `fs.lora`, or the specs are missing.
    """
    blocks, specs, mesh = find_layout(params, specs, mesh)
    if specs is None or not isinstance(blocks, Mapping) or not {"base", "adapters"} <= set(blocks):
        raise StateError(
            "these are not the base and adapters of fs.lora, with their specs.",
            fix="pass a state of a tuned step, or its params with specs= and mesh=.",
        )
    return blocks, specs, mesh
