"""Coordination: what all ranks of a mesh do about a checkpoint, on a process group of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fnshard.errors import CheckpointError, CollectiveError
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT, failing
from fnshard.runtime.files.tensorfile import Corrupt

T = TypeVar("T")


@dataclass(frozen=True)
class Cause:
    """Why one rank failed, and whether what it read is corrupt."""

    message: str
    corrupt: bool


class Failed(Exception):
    """What went wrong, by rank; the same on all ranks."""

    def __init__(self, causes: Mapping[int, Cause]):
        self.causes = causes
        super().__init__("; ".join(self.lines()))

    @property
    def corrupt(self) -> bool:
        """Whether some rank read what was not written."""
        return any(cause.corrupt for cause in self.causes.values())

    def lines(self) -> list[str]:
        """One for each rank that failed."""
        return [f"rank {rank}: {cause.message}" for rank, cause in self.causes.items()]


def group_of(mesh: Mesh, timeout: float | None, purpose: str = "checkpoint") -> Any:
    """A gloo group of all ranks for this purpose alone, apart from those of a step.

    None in a process of one. A collective call at first.

    Raises:
        CheckpointError: a mesh whose ranks are no processes.
    """
    if mesh.kind in ("simulated", "abstract"):
        raise CheckpointError(
            f"mesh {mesh} is {mesh.kind}: its ranks are no processes that could write.",
            fix="save and restore under torchrun or fs.launch, or on a mesh of one.",
        )
    if not dist.is_initialized():
        return None
    return _gloo(dist.group.WORLD, timeout or next(iter(mesh.connections), DEFAULT_TIMEOUT), purpose)


@functools.lru_cache(maxsize=8)
def _gloo(world: Any, timeout: float, purpose: str) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def texts(group: Any, text: str) -> list[str]:
    """What every rank says."""
    if group is None:
        return [text]
    out: list[Any] = [None] * dist.get_world_size(group)
    with failing(lambda: "agreement on a checkpoint"):
        dist.all_gather_object(out, text, group=group)
    return out


def all_or_none(gather: Callable[[str], list[str]], what: str, work: Callable[[], T] | None) -> T | None:
    """`work()` on the ranks that have any; if it fails on one of them, it fails on all. A collective.

    Args:
        gather: gives every rank the text of each.

    Raises:
        What it raised here; CheckpointError: it failed on another rank, or here by an error of the system.
    """
    value, failure = None, None
    try:
        value = work() if work is not None else None
    except CollectiveError:  # no peer is left to inform
        raise
    except Exception as error:
        failure = error
    message = "" if failure is None else f"{type(failure).__name__}: {failure}"
    texts = [json.loads(text) for text in gather(json.dumps(message))]
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    failed = {rank: text for rank, text in enumerate(texts) if text}
    if failed:
        lines = [f"rank {rank}: {text}" for rank, text in failed.items()]
        fix = "mend what is named above, and try again; what has that name is as it was."
        raise CheckpointError(f"{what} failed:", lines, fix) from failure
    return value


def agreed(group: Any, what: str, work: Callable[[], T]) -> T:
    """`all_or_none` over a group."""
    return all_or_none(functools.partial(texts, group), what, work)


def all_ranks(group: Any, local: Callable[[], T], on_first: Callable[[list[T]], None] | None = None) -> None:
    """Run `local` on every rank, then `on_first` of what they all return on rank 0. A collective.

    Raises:
        Failed: on all ranks, if one of these failed on any.
        What is no `Exception` (Ctrl-C) where it was raised; the other ranks get `Failed`.
        CollectiveError: a peer died, or did not answer in time.
    """
    value, error = _attempt(local)
    results = _gathered(group, (value, _cause_of(error)))
    failed = {rank: cause for rank, (_, cause) in enumerate(results) if cause is not None}
    if results and not failed and on_first is not None:
        _, error = _attempt(lambda: on_first([result for result, _ in results]))
        failed = {} if error is None else {0: _cause_of(error)}
    failed = _broadcast(group, failed)
    if error is not None and not isinstance(error, Exception):
        raise error
    if failed:
        raise Failed(failed) from error


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _cause_of(error: BaseException | None) -> Cause | None:
    if error is None:
        return None
    return Cause(str(error) or type(error).__name__, isinstance(error, Corrupt))


def _gathered(group: Any, value: Any) -> list[Any]:
    """What every rank gives, on rank 0; nothing on the others."""
    if group is None:
        return [value]
    out: list[Any] = [None] * dist.get_world_size(group) * (dist.get_rank(group) == 0)
    with failing(lambda: "gathering results of a checkpoint"):
        dist.gather_object(value, out or None, dst=0, group=group)
    return out


def _broadcast(group: Any, value: T) -> T:
    """Rank 0's value on all ranks."""
    if group is None:
        return value
    values = [value]
    with failing(lambda: "telling all ranks how a checkpoint went"):
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]
