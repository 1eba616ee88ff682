"""Saving: run a save, at once or in the background."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnshard.checkpoint.blocks import save_blocks
from fnshard.checkpoint.loader_state import encode
from fnshard.checkpoint.retention import Keep, prune
from fnshard.checkpoint.state_leaves import LocalLeaf, check_param_leaves, make_host_copies, state_leaves
from fnshard.errors import CheckpointError, CheckpointWarning
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.coordination import Failed, gather_texts, group_of, run_together
from fnshard.runtime.files.folder import AtomicDirectory, as_path
from fnshard.step.runner import find_layout
from fnshard.step.state import TrainState

PIECE_BYTES = 64 << 20  # the size of a pinned buffer


@dataclass(frozen=True)
class SaveJob:
    """A save that is ready to run: what is written, where, and with which ranks.

    Args:
        leaves: this rank's leaves, by name.
        group: the ranks that save together.
        fields: the fields of the manifest that are known from the start.
        data: this rank's position in the data, as JSON.
        keep: a rule that says which other checkpoints stay; None keeps all.
    """

    directory: AtomicDirectory
    leaves: Mapping[str, LocalLeaf]
    mesh: Mesh
    group: Any
    fields: Mapping[str, Any]
    data: Any
    keep: Keep | None

    def stage(self) -> SaveJob:
        """Copy the leaves to the host, and return the job of saving the copies."""
        copies = make_host_copies(self.leaves)
        copy_to_host([(copies[name].block, leaf.block) for name, leaf in self.leaves.items()])
        return replace(self, leaves=copies)

    def write(self) -> None:
        """Write the checkpoint, and delete others that need not be kept."""
        try:
            save_blocks(self.directory, self.leaves, self.mesh, self.group, self.fields, self.data)
        except Failed as error:
            fix = "what was saved before is as it was; make room, or save elsewhere."
            raise CheckpointError(f"cannot save {self.directory.final}:", error.lines(), fix) from error
        finally:
            self.directory.end()

        # The checkpoint is complete, so an old one that cannot be deleted is only a warning.
        if self.keep is not None:
            if self.mesh.rank == 0:
                try:
                    prune(self.directory.final, self.keep)
                except OSError as error:
                    warnings.warn(
                        f"old checkpoints were not deleted: {error}", CheckpointWarning, stacklevel=3
                    )
            gather_texts(self.group, "")  # wait for rank 0, so that all ranks return to the same directory


def copy_to_host(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor to the first, which is on the host, and wait for the copies.

    Tensors on a device are copied through two pinned buffers, so that no more than these is pinned however
    large a state is: the device fills one while the host empties the other.
    """
    for copy, block in pairs:
        if block.device.type == "cpu":
            copy.copy_(block)
    from_device = [(copy, block) for copy, block in pairs if block.device.type != "cpu" and block.numel()]
    if from_device:
        device = from_device[0][1].device.type
        size = min(PIECE_BYTES, max(block.nbytes for _, block in from_device))
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copy_through(from_device, buffers, lambda: torch.Event(device))


def copy_through(
    pairs: Iterable[tuple[Tensor, Tensor]], buffers: Sequence[Tensor], event: Callable[[], Any]
) -> None:
    """Copy each second tensor to the first by way of the buffers in turn.

    Args:
        buffers: tensors of uint8, of one size.
        event: a function that makes an event, which is recorded after each copy from the device.

    >>> target, source = torch.zeros(5), torch.arange(5.0)
    >>> from unittest.mock import Mock
    >>> copy_through([(target, source)], [torch.empty(8, dtype=torch.uint8) for _ in range(2)], Mock)
    >>> target
    tensor([0., 1., 2., 3., 4.])
    """
    under_way: deque[tuple[Tensor, Tensor, Any]] = deque()

    def empty_oldest() -> None:
        target, buffer, arrived = under_way.popleft()
        arrived.synchronize()
        target.copy_(buffer)

    # As bytes, tensors of all dtypes are cut into pieces of a buffer's size.
    number = 0
    for pair in pairs:
        target, source = (t.reshape(-1).view(torch.uint8) for t in pair)
        for piece, part in zip(target.split(len(buffers[0])), source.split(len(buffers[0])), strict=True):
            # Both buffers are full, or being filled: empty the older one before the device fills it again.
            if len(under_way) == len(buffers):
                empty_oldest()
            buffer = buffers[number % len(buffers)][: len(part)]
            buffer.copy_(part, non_blocking=True)
            arrived = event()
            arrived.record()
            under_way.append((piece, buffer, arrived))
            number += 1
    while under_way:
        empty_oldest()


def save_job(
    path: str | Path, state: Any, *, specs: Any = None, mesh: Mesh | None = None, data: Any = None,
    config: Any = None, metrics: Mapping[str, float] | None = None, keep: Keep | None = None,
    timeout: float | None = None,
) -> SaveJob:  # fmt: skip
    """Make the job that `fnshard.checkpoint.save` was called for, on all ranks or on none. A collective."""
    final = as_path(path, "save(path, state)").absolute()
    _, specs, mesh = find_layout(state, specs, mesh)
    group = group_of(mesh, timeout)

    # All ranks check their arguments, and fail together, before any of them writes.
    def job() -> SaveJob:
        if specs is None:
            fix = "save(path, state) of a TrainState; of a tree of blocks also specs=step.specs, mesh=mesh."
            raise CheckpointError(f"a {type(state).__name__} does not say how it is laid out.", fix=fix)
        resolved, is_training = ResolvedSpecs.of(specs), isinstance(state, TrainState)
        leaves = (state_leaves if is_training else check_param_leaves)(state, resolved, mesh)

        directory, numbers = AtomicDirectory(final), _read_metrics(metrics)
        if keep is not None:
            _check_keep(keep, directory.final, numbers)

        # The fields of the manifest that are the same on all ranks, and this rank's position in the data.
        axes = dict(zip(mesh.names, mesh.sizes, strict=True))
        fields = {
            "step": int(state.step) if is_training else 0,
            "seed": int(state.seed) if is_training else 0,
            "mesh": {"axes": axes, "data_axes": list(mesh.data_axes)},
            "specs": {path: repr(replace(spec, chunk="all")) for path, spec in resolved.stored.items()},
            "complex": tuple(sorted(resolved.complex)),
            "config": encode(config, "config"),
            "metrics": numbers,
            "versions": {"torch": str(torch.__version__)},
            "number": int(final.name) if final.name.isdecimal() else None,
        }
        position = data.state_dict() if hasattr(data, "state_dict") else data
        return SaveJob(directory, leaves, mesh, group, fields, encode(position), keep)

    return run_together(group, f"saving {path}", job)


def _read_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as numbers by name.

    Raises:
        CheckpointError: they are something else.
    """
    try:
        return {str(k): float(v) for k, v in (metrics or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"metrics={metrics!r}: numbers by name ({error}).") from error


def _check_keep(keep: Any, final: Path, metrics: Mapping[str, float]) -> None:
    """Refuse a `keep=` that is no `Keep`, or that cannot use this checkpoint's name or metrics."""
    if not isinstance(keep, Keep):
        raise CheckpointError(f"keep={keep!r}: a fs.checkpoint.Keep, as Keep(last=3).")
    if not final.name.isdecimal():
        fix = "name checkpoints by their steps: save(f'{root}/{step}', ...)."
        raise CheckpointError(f"keep= goes by numbers, and this is named {final.name!r}.", fix=fix)
    if keep.best and metrics and keep.metric not in metrics:
        known = ", ".join(metrics)
        raise CheckpointError(f"keep= goes by {keep.metric!r}, and this save comes with {known} alone.")


class Saving:
    """A save that runs in the background."""

    def __init__(self, job: SaveJob):
        self.path = job.directory.final
        pool = ThreadPoolExecutor(1, f"saving {self.path}")
        self._written = pool.submit(job.write)
        pool.shutdown(wait=False)  # its thread ends with the job
        _in_flight.append(self)

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._written.done()

    def wait(self) -> Path:
        """Wait until it is complete, and return its path.

        Raises:
            CheckpointError: it could not be written.
        """
        error = self.join()
        if error is not None:
            raise error
        return self.path

    def join(self) -> BaseException | None:
        """Wait until it has ended; return its error. A wait that is interrupted leaves it in flight."""
        wait_all([self._written])
        if self in _in_flight:  # from here on `wait_for_save` does not return its error again
            _in_flight.remove(self)
        return self._written.exception()


_in_flight: list[Saving] = []  # the save that this process still writes: at most one


def wait() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        CheckpointError: the last save in the background failed. It is raised once.
    """
    error = wait_for_save()
    if error is not None:
        raise error


def wait_for_save() -> BaseException | None:
    """Wait for the save in the background; return its error if it failed and nobody has raised that yet."""
    error = None
    for saving in list(_in_flight):  # a copy, since `join` removes the save
        error = saving.join() or error
    return error


@atexit.register
def _report_failure() -> None:
    """Print the error of a failed save at exit, unless it was raised."""
    error = wait_for_save()
    if error is not None:
        print(error, file=sys.stderr, flush=True)
