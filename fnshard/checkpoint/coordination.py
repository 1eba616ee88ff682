"""Together: what all ranks of a mesh do about a checkpoint, on a process group of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from fnshard.checkpoint.rows import all_or_none
from fnshard.errors import CheckpointError, report
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT, failing

T = TypeVar("T")


class Failed(Exception):
    """What went wrong, by rank; the same on all ranks."""

    def __init__(self, causes: Mapping[int, BaseException]):
        self.causes = dict(sorted(causes.items()))
        super().__init__("; ".join(self.lines()))

    def lines(self) -> list[str]:
        """One a rank."""
        return [f"rank {rank}: {str(cause) or type(cause).__name__}" for rank, cause in self.causes.items()]


def group_of(mesh: Mesh, timeout: float | None) -> Any:
    """A gloo group of all ranks for checkpoints alone, so that a save in the background meets nobody else.

    None in a process of one. A collective call at first.

    Raises:
        CheckpointError: a mesh whose ranks are no processes.
    """
    if mesh.kind in ("simulated", "abstract"):
        raise CheckpointError(
            report(
                f"mesh {mesh} is {mesh.kind}: its ranks are no processes that could write.",
                fix="save and restore under torchrun or fs.launch, or on a mesh of one.",
            )
        )
    if not dist.is_initialized():
        return None
    return _gloo(dist.group.WORLD, timeout or next(iter(mesh.connections), DEFAULT_TIMEOUT))


@functools.lru_cache(maxsize=8)
def _gloo(world: Any, timeout: float) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def texts(group: Any, text: str) -> list[str]:
    """What every rank says."""
    if group is None:
        return [text]
    out: list[Any] = [None] * dist.get_world_size(group)
    with failing(lambda: "agreement on a checkpoint"):
        dist.all_gather_object(out, text, group=group)
    return out


@dataclass(frozen=True)
class _Told:
    """What `all_or_none` needs of ranks."""

    group: Any

    def gather_object(self, text: str) -> list[str]:
        return texts(self.group, text)


def agreed(group: Any, what: str, work: Callable[[], T]) -> T:
    """`work()` on every rank; if it fails on one, it fails on all. A collective.

    Raises:
        What it raised here; CheckpointError: it failed on another rank, or here by an error of the system.
    """
    return cast(T, all_or_none(cast(Any, _Told(group)), what, work))
