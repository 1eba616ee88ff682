"""Adapters: merged into their weights, and written as PEFT's files.

A directory of PEFT's has `adapter_model.safetensors` and `adapter_config.json`; what is written here is read
by `peft.PeftModel.from_pretrained` on the same base model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fnshard import tree
from fnshard.adapters.lora import Lora
from fnshard.checkpoint.coordination import all_or_none
from fnshard.errors import StateError
from fnshard.layout.codecs import block_of, is_coded
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.files.folder import flush_directory, flush_file
from fnshard.runtime.packing import local_block
from fnshard.step.runner import laid_out
from fnshard.step.shards import unshard

__all__ = ["merge", "save"]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merge(params: Any, settings: Lora, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """The base with its adapters written into it: W + s B A. A collective.

    Args:
        params: `{"base", "adapters"}` of stored blocks, or a state of them.
        settings: the `.lora` of the function that was tuned.
        specs, mesh: their layout; a state knows it.

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
    blocks, specs, mesh = _laid_out(params, specs, mesh)
    base = ResolvedSpecs.of(specs["base"])
    stored = tree.flatten_with_paths(blocks["base"])[0]
    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)
    out = []
    with torch.no_grad():
        for path, spec in base.leaves.items():
            block = block_of(stored, path, spec)
            if path in settings.targets:
                full = _update(adapters[path], settings, path)
                update = local_block(full.to(block.device), spec.storage, mesh)
                block = (block.to(update.dtype) + update).to(spec.storage_dtype)
            out.append(block)
    plain = base.with_leaves(replace(s, codec=None) if is_coded(s) else s for s in base.leaves.values())
    return tree.unflatten(out, base.leaf_structure), plain.tree


def _update(adapter: Mapping[str, Tensor], settings: Lora, path: str) -> Tensor:
    wide = torch.promote_types(adapter["b"].dtype, torch.float32)
    update = settings.scale * (adapter["b"].to(wide) @ adapter["a"].to(wide))
    return update.t() if path in settings.transposed else update


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
        path: of a directory; what is there of a former save is replaced.
        base: what the files are to call the model that they were tuned for.

    Raises:
        CheckpointError: it could not be written.
    """
    blocks, specs, mesh = _laid_out(params, specs, mesh)
    trained = [f"params['base'][{p!r}]" for p in ResolvedSpecs.of(specs["base"]).trainable]
    if trained or (settings.transposed and settings.transposed != settings.targets):
        lines = trained or [f"params['base'][{p!r}] is [in, out]" for p in settings.transposed]
        fix = "merge them, fs.adapters.merge, and save the whole by fs.hf.save; or a checkpoint."
        what = "train with the adapters" if trained else "are transposed while others are not"
        raise StateError(f"PEFT's files have no place for leaves that {what}:", lines, fix)
    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)

    def written() -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {_peft_name(leaf, n): v for leaf, parts in adapters.items() for n, v in parts.items()}
        aside = folder / f".{WEIGHTS}.writing"
        save_file({name: v.contiguous() for name, v in tensors.items()}, aside, {"format": "pt"})
        config = folder / f".{CONFIG}.writing"
        config.write_text(json.dumps(_peft_config(settings, base), indent=2) + "\n")
        flush_file(aside)
        flush_file(config)
        os.replace(aside, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)
        flush_directory(folder)

    work = written if mesh.rank == 0 else None
    all_or_none(connection(mesh).gather_object, f"saving adapters to {str(path)!r}", work)


def _peft_name(leaf: str, part: str) -> str:
    return f"base_model.model.{leaf.removesuffix('.weight')}.lora_{part.upper()}.weight"


def _peft_config(settings: Lora, base: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "inference_mode": True, "r": settings.rank, "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilised, "fan_in_fan_out": bool(settings.transposed),
        "target_modules": sorted(path.removesuffix(".weight") for path in settings.targets),
    }  # fmt: skip


def _laid_out(params: Any, specs: Any, mesh: Mesh | None) -> tuple[Any, Any, Mesh]:
    blocks, specs, mesh = laid_out(params, specs, mesh)
    if specs is None or not isinstance(blocks, Mapping) or set(blocks) != {"base", "adapters"}:
        raise StateError(
            "these are not the base and adapters of fs.lora, with their specs.",
            fix="pass a state of a tuned step, or its params with specs= and mesh=.",
        )
    return blocks, specs, mesh
