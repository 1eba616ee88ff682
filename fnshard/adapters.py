"""Adapters: merged into their weights, and in and out of PEFT's files.

A directory of PEFT's has `adapter_model.safetensors` and `adapter_config.json`; what is written here is read
by `peft.PeftModel.from_pretrained` on the same base model, and the other way round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.codecs import block_of, is_coded
from fnshard.errors import StateError, leaves, report
from fnshard.hf.write import write_text
from fnshard.lora import Lora
from fnshard.mesh import Mesh
from fnshard.runner import laid_out
from fnshard.runtime.buckets import local_block
from fnshard.runtime.connect import connection
from fnshard.runtime.folder import flush
from fnshard.runtime.rows import all_or_none
from fnshard.runtime.tensorfile import Corrupt, Entry, Header, open_regular, read_exactly, write
from fnshard.shards import leaf_paths, unshard

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merge(params: Any, asked: Lora, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """The base with its adapters written into it: W + s B A. A collective.

    Args:
        params: `{"base", "adapters"}` of stored blocks, or a state of them.
        asked: the `.lora` of the function that was tuned.
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
    named, structure = leaf_paths(specs["base"])
    stored = tree.flatten_with_paths(blocks["base"])[0]
    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)
    out = []
    with torch.no_grad():
        for path, spec in named.items():
            block = block_of(stored, path, spec)
            if path in asked.targets:
                full = _update(adapters[path], asked, path)
                update = local_block(full.to(block.device), spec.storage, mesh)
                block = (block.to(update.dtype) + update).to(spec.storage_dtype)
            out.append(block)
    plain = [replace(s, codec=None) if is_coded(s) else s for s in named.values()]
    return tree.unflatten(out, structure), tree.unflatten(plain, structure)


def _update(adapter: Mapping[str, Tensor], asked: Lora, path: str) -> Tensor:
    wide = torch.promote_types(adapter["b"].dtype, torch.float32)
    update = asked.scale * (adapter["b"].to(wide) @ adapter["a"].to(wide))
    return update.t() if path in asked.transposed else update


def save(
    params: Any,
    path: str | Path,
    asked: Lora,
    specs: Any = None,
    mesh: Mesh | None = None,
    *,
    base: str | None = None,
) -> None:
    """Write the adapters alone, as PEFT does. A collective; all ranks fail, or none.

    Args:
        params, asked, specs, mesh: as for `merge`.
        path: of a directory; what is there of a former save is replaced.
        base: what the files are to call the model that they were tuned for.

    Raises:
        CheckpointError: it could not be written.
    """
    blocks, specs, mesh = _laid_out(params, specs, mesh)
    trained = [f"params['base'][{p!r}]" for p, s in leaf_paths(specs["base"])[0].items() if s.trainable]
    if trained or (asked.transposed and asked.transposed != asked.targets):
        lines = trained or [f"params['base'][{p!r}] is [in, out]" for p in asked.transposed]
        fix = "merge them, fs.adapters.merge, and save the whole by fs.hf.save; or a checkpoint."
        what = "train beside the adapters" if trained else "are transposed while others are not"
        raise StateError(report(f"PEFT's files have no place for leaves that {what}:", lines, fix))
    adapters = unshard(blocks["adapters"], specs["adapters"], mesh)

    def written() -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        entries = [
            Entry(_peft_name(leaf, part), tuple(v.shape), v.dtype, lambda v=v: v)
            for leaf, parts in adapters.items()
            for part, v in parts.items()
        ]
        aside = folder / f".{WEIGHTS}.writing"
        aside.unlink(missing_ok=True)
        write(aside, entries, {"format": "pt"})
        write_text(folder / f".{CONFIG}.writing", json.dumps(_peft_config(asked, base), indent=2) + "\n")
        os.replace(aside, folder / WEIGHTS)
        os.replace(folder / f".{CONFIG}.writing", folder / CONFIG)
        flush(folder)

    all_or_none(connection(mesh), f"saving adapters to {str(path)!r}", written if mesh.rank == 0 else None)


def load(path: str | Path, shapes: Mapping[str, Tensor]) -> tuple[Lora, dict[str, dict[str, Tensor]]]:
    """Adapters from PEFT's files: what was asked of them, and their full values by leaf.

    Args:
        path: of the directory.
        shapes: the base's leaves by path, on any device.

    Raises:
        StateError: files that are missing or broken; adapters of other leaves or shapes, or of another kind.
    """
    folder = Path(path)
    try:
        config = json.loads((folder / CONFIG).read_text())
        fd = open_regular(folder, WEIGHTS)
        try:
            values = {name: _read(fd, *entry) for name, entry in Header.read(fd).tensors.items()}
        finally:
            os.close(fd)
    except (OSError, ValueError, Corrupt) as error:
        raise StateError(f"{str(folder)!r} holds no adapters of PEFT's: {error}") from error
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise StateError(f"{str(folder)!r} holds {config.get('peft_type')!r} adapters; only LoRA is known.")
    adapters: dict[str, dict[str, Tensor]] = {}
    known = {_peft_name(leaf, part): (leaf, part) for leaf in shapes for part in "ab"}
    surplus = [f"{name!r} {list(v.shape)}: no such leaf" for name, v in values.items() if name not in known]
    for name in values.keys() & known.keys():
        leaf, part = known[name]
        adapters.setdefault(leaf, {})[part] = values[name]
    targets = tuple(leaf for leaf in shapes if leaf in adapters)
    turned = targets if config.get("fan_in_fan_out") else ()
    asked = Lora(
        int(config["r"]), float(config["lora_alpha"]), targets, turned,
        float(config.get("lora_dropout", 0.0)), bool(config.get("use_rslora", False)),
    )  # fmt: skip
    wrong = surplus + [
        line for leaf in targets for line in _misfits(leaf, adapters[leaf], shapes[leaf], asked)
    ]
    if wrong:
        raise StateError(report(f"adapters of another model, {leaves(len(wrong))}:", wrong))
    return asked, {leaf: {part: adapters[leaf][part] for part in "ab"} for leaf in targets}


def _misfits(leaf: str, parts: Mapping[str, Tensor], base: Tensor, asked: Lora) -> list[str]:
    rows, columns = base.shape[::-1] if leaf in asked.transposed else base.shape
    wanted = {"a": (asked.rank, columns), "b": (rows, asked.rank)}
    found = {part: tuple(v.shape) for part, v in parts.items()}
    return [] if found == wanted else [f"params[{leaf!r}] {list(base.shape)}: a, b are {found}, not {wanted}"]


def _read(fd: int, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Tensor:
    value = torch.empty(shape, dtype=dtype)
    if value.numel():
        read_exactly(fd, at, memoryview(value.view(-1).view(torch.uint8).numpy()))
    return value


def _peft_name(leaf: str, part: str) -> str:
    return f"base_model.model.{leaf.removesuffix('.weight')}.lora_{part.upper()}.weight"


def _peft_config(asked: Lora, base: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "inference_mode": True, "r": asked.rank, "lora_alpha": asked.alpha, "lora_dropout": asked.dropout,
        "use_rslora": asked.rank_stabilised, "fan_in_fan_out": bool(asked.transposed),
        "target_modules": sorted(path.removesuffix(".weight") for path in asked.targets),
    }  # fmt: skip


def _laid_out(params: Any, specs: Any, mesh: Mesh | None) -> tuple[Any, Any, Mesh]:
    blocks, specs, mesh = laid_out(params, specs, mesh)
    if specs is None or not isinstance(blocks, Mapping) or set(blocks) != {"base", "adapters"}:
        raise StateError(
            report(
                "these are not the base and adapters of fs.lora, with their specs.",
                fix="pass a state of a tuned step, or its params with specs= and mesh=.",
            )
        )
    return blocks, specs, mesh
