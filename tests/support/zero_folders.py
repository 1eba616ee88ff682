"""Folders of DeepSpeed's ZeRO, written by hand by the layout of its code, of any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def split_vector(full: Tensor, ranks: int) -> list[Tensor]:
    """Split as stages 1 and 2 do: one vector, filled up to a multiple of 2 * ranks, in equal parts."""
    size = math.ceil(full.numel() / (2 * ranks)) * 2 * ranks
    return [part.clone() for part in torch.cat([full, full.new_zeros(size - full.numel())]).chunk(ranks)]


def split_each(tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Split as stage 3 does: each tensor by itself, filled up to a multiple of the ranks."""
    rows = []
    for tensor in tensors:
        size = math.ceil(tensor.numel() / ranks) * ranks
        rows.append(torch.cat([tensor.flatten(), tensor.new_zeros(size - tensor.numel())]).view(ranks, -1))
    return [torch.cat([row[rank] for row in rows]) for rank in range(ranks)]


def write_zero(
    folder: Path,
    stage: int,
    ranks: int,
    groups: Sequence[Mapping[str, Tensor]],
    moments: Mapping[str, Mapping[str, Tensor]],
    step: int,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    frozen: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        groups: of parameters that train, by name; `moments` of each, by name and slot.
        extra: whatever else is in the ranks' files.
    """
    folder.mkdir(parents=True)

    def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = [tensor.float().flatten() for tensor in tensors]
        return split_vector(torch.cat(flat), ranks) if stage < 3 else split_each(flat, ranks)

    weights = [parts_of(list(group.values())) for group in groups]
    slots = [
        {slot: parts_of([moments[name][slot] for name in group]) for slot in ("exp_avg", "exp_avg_sq")}
        for group in groups
    ]
    for rank in range(ranks):
        state = {
            number: {"step": torch.tensor(float(step)), **{slot: parts[rank] for slot, parts in own.items()}}
            for number, own in enumerate(slots)
        }
        optimizer = {
            "zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(groups),
            "overflow": False, **(extra or {}),
        }  # fmt: skip
        held = {"state": state, "param_groups": []}
        vectors = [parts[rank] for parts in weights]
        if stage < 3:
            optimizer |= {"single_partition_of_fp32_groups": vectors, "base_optimizer_state": held}
        else:
            optimizer |= {"fp32_flat_groups": vectors, "optimizer_state_dict": held}
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.18"}, file)
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            fragments = {
                n: split_each([value], ranks)[rank] if stage == 3 else value.flatten()
                for n, value in (frozen or {}).items()
            }
            torch.save(
                {
                    "module": dict(buffers or {}),
                    "buffer_names": list(buffers or {}),
                    "param_shapes": [{n: t.shape for n, t in group.items()} for group in groups],
                    "frozen_param_shapes": {n: t.shape for n, t in (frozen or {}).items()},
                    "frozen_param_fragments": fragments,
                    "shared_params": {},
                },
                folder / f"{name}_model_states.pt",
            )
