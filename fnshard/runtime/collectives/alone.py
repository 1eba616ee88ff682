"""Collectives without peers: one rank, and none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import Axes, Done, Handle, empty


@dataclass(frozen=True)
class SingleRank:
    """The one rank of a mesh without a process group; also what every backend does with groups of one."""

    mesh: Mesh

    def send_buffer(self, numel: int, dtype: torch.dtype, axes: Axes, rows: int = 1) -> Tensor:
        return empty(self.mesh, rows * numel, dtype)

    def all_gather(self, flat: Tensor, axes: Axes) -> Handle[list[Tensor]]:
        return Done([flat])

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return Done(rows)

    def all_to_all(self, rows: Tensor, axes: Axes) -> Handle[Tensor]:
        return Done(rows)

    def permute(self, flat: Tensor, axes: Axes, distance: int) -> Handle[Tensor]:
        return Done(flat)

    def all_reduce(self, flat: Tensor, axes: Axes) -> Handle[Tensor]:
        return Done(flat)

    def gather_object(self, text: str) -> list[str]:
        return [text]

    def barrier(self) -> None:
        pass

    def transport_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Abstract:
    """No ranks: everything is refused, with the way out."""

    mesh: Mesh

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CollectiveError(
            f"mesh {self.mesh} is abstract: it can be lowered on, not run.",
            fix="start the ranks and call make_mesh(...) without abstract=True, or try the program "
            "on threads with make_mesh(..., simulated=True) and simulate(mesh, fn).",
        )

    send_buffer = all_gather = reduce_scatter = all_to_all = permute = all_reduce = _refuse
    gather_object = barrier = _refuse

    def transport_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass
