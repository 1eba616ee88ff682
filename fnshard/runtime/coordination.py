"""Coordination: what all ranks of a mesh do about a checkpoint, on a group of its own."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from fnshard.errors import CheckpointError, CollectiveError
from fnshard.mesh import Mesh
from fnshard.mesh.deadlock import DEFAULT_TIMEOUT, peers
from fnshard.runtime.files.tensorfile import Corrupt

T = TypeVar("T")
Exchange = Callable[..., list[bytes]]  # gives data to all ranks, and returns theirs, or that of ranks `of`
Cause = tuple[str, bool]  # why a rank failed, and whether what it read is corrupt


class Failed(Exception):
    """The failure of some ranks, with its cause by rank: the same error on all ranks."""

    def __init__(self, causes: Mapping[int, Cause]):
        self.causes = causes
        super().__init__("; ".join(self.lines()))

    @property
    def corrupt(self) -> bool:
        """Return whether some rank read other bytes than were written."""
        return any(corrupt for _, corrupt in self.causes.values())

    def lines(self) -> list[str]:
        """Return a line for each rank that failed."""
        return [f"rank {rank}: {message}" for rank, (message, _) in self.causes.items()]


def group_of(mesh: Mesh, timeout: float | None, purpose: str = "checkpoint") -> Exchange | None:
    """Return the exchange by which ranks send each other texts for one purpose; None in a single process."""
    if mesh.kind in ("simulated", "abstract"):
        raise CheckpointError(
            f"mesh {mesh} is {mesh.kind}: its ranks are no processes that could write.",
            fix="save and restore under torchrun or fs.launch, or on a mesh of one.",
        )
    if not dist.is_initialized():
        return None
    seconds = timeout or next(iter(mesh.connections), DEFAULT_TIMEOUT)
    return functools.partial(peers().exchange, purpose, timeout=seconds)


def gather_texts(group: Exchange | None, text: str) -> list[str]:
    """Gather the texts of all ranks, by rank. A collective."""
    return [text] if group is None else [t.decode() for t in group(text.encode())]


def all_or_none(gather: Callable[[str], list[str]], what: str, work: Callable[[], T] | None) -> T | None:
    """Do the work of the ranks that have any; a failure on one rank fails all of them. A collective.

    Raises:
        Exception: what `work` raised here.
        CheckpointError: the work failed on another rank, or here by an error of the system.
    """
    # Do this rank's work; keep an error until the others have learned of it.
    value, failure = None, None
    try:
        value = work() if work is not None else None
    except CollectiveError:  # no peer is left to inform
        raise
    except Exception as error:
        failure = error

    message = "" if failure is None else f"{type(failure).__name__}: {failure}"
    texts = [json.loads(text) for text in gather(json.dumps(message))]
    # A mistake is raised unchanged. For an error of the system the list of all ranks that had one says more.
    if failure is not None and not isinstance(failure, OSError):
        raise failure

    failed = {rank: text for rank, text in enumerate(texts) if text}
    if failed:
        lines = [f"rank {rank}: {text}" for rank, text in failed.items()]
        fix = "mend what is named above, and try again; what has that name is as it was."
        raise CheckpointError(f"{what} failed:", lines, fix) from failure
    return value


def run_together(group: Exchange | None, what: str, work: Callable[[], T]) -> T:
    """Do the same work on all ranks of a group, or fail on all of them: see `all_or_none`."""
    return all_or_none(functools.partial(gather_texts, group), what, work)


def run_on_all(
    group: Exchange | None, local: Callable[[], T], on_first: Callable[[list[T]], None] | None = None
) -> None:
    """Run `local` on every rank, then `on_first` of what they all return on rank 0. A collective.

    Raises:
        Failed: `local` or `on_first` failed on some rank; all ranks raise it.
        BaseException: what is not an `Exception` (Ctrl-C), where it was raised; the other ranks get `Failed`.
        CollectiveError: a peer died, or did not answer in time.
    """
    # Every rank does its own part, and rank 0 gets what all return, or why they failed.
    value, error = _catch_error(local)
    results, is_first = [(value, _describe_cause(error))], group is None or dist.get_rank() == 0
    if group is not None:
        # Only rank 0 reads the others' results; these wait for its answer alone.
        every = group(pickle.dumps(results[0]), of=None if is_first else ())
        results = [pickle.loads(each) for each in every]
    failed = {rank: cause for rank, (_, cause) in enumerate(results) if cause is not None}

    # Rank 0 does the rest, and tells all ranks who failed.
    if results and not failed and on_first is not None:
        _, error = _catch_error(lambda: on_first([result for result, _ in results]))
        failed = {} if error is None else {0: _describe_cause(error)}
    if group is not None:
        (answer,) = group(pickle.dumps(failed) if is_first else b"", of=(0,))
        failed = pickle.loads(answer)

    # Ctrl-C is raised unchanged, after the peers have learned of it.
    if error is not None and not isinstance(error, Exception):
        raise error
    if failed:
        raise Failed(failed) from error


def _catch_error(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return what `work` returns, or the exception that it raises."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _describe_cause(error: BaseException | None) -> Cause | None:
    """Return the cause of a failure in a form that can be sent to other ranks; None if there was none."""
    if error is None:
        return None
    return str(error) or type(error).__name__, isinstance(error, Corrupt)
