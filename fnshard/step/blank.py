"""Blank: zeros where each part of a state rests, for a restore or a reshard to fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnshard.analysis.slots import Slots
from fnshard.layout.spec import LayoutSpec, block_shape
from fnshard.mesh import Mesh
from fnshard.runtime.tiers import allocate, check_directory

Specs = Mapping[str, LayoutSpec]


def blank_params(
    specs: Specs, mesh: Mesh, disk_dir: str | None, *, on_paper: bool = False
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
    slots: Slots, specs: Specs, mesh: Mesh, disk_dir: str | None, *, on_paper: bool = False
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
