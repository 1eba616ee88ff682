"""Saving: one save under way: what is written where, with whom, now or in the background."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from fnshard.errors import CheckpointError, report
from fnshard.held import held_params, held_state
from fnshard.mesh import Mesh
from fnshard.runner import default_mesh
from fnshard.runtime.dcp import Boxes, Held, Writer
from fnshard.runtime.folder import Place
from fnshard.runtime.plain import encode
from fnshard.runtime.root import Keep, prune
from fnshard.runtime.together import Failed, drive, group_of
from fnshard.shards import spec_paths
from fnshard.state import TrainState


@dataclass(frozen=True)
class Job:
    """A save: what, where, and with whom."""

    place: Place
    held: Mapping[str, Held]
    mesh: Mesh
    group: Any
    told: Mapping[str, Any]
    data: Any
    keep: Keep | None

    def staged(self) -> Job:
        """The same of copies on the host."""
        on_host = {n: replace(h, block=_copied(h.block)) for n, h in self.held.items()}
        if any(h.block.device.type == "cuda" for h in self.held.values()):
            torch.cuda.current_stream().synchronize()
        return replace(self, held=on_host)

    def write(self) -> None:
        """Write it; on rank 0 also delete what need not be kept."""
        writer = Writer(self.place, self.mesh.rank, self.held, self.told, self.data)
        try:
            drive(dcp.save, self.held, self.group, planner=Boxes(self.held, self.mesh), storage_writer=writer)
        except Failed as error:
            rest = "what was saved before is as it was; make room, or save elsewhere."
            raise CheckpointError(report(f"cannot save {self.place.final}:", error.lines(), rest)) from error
        finally:
            self.place.end()
        if self.keep is not None and self.mesh.rank == 0:
            prune(self.place.final.parent, self.keep)


def _copied(block: torch.Tensor) -> torch.Tensor:
    on_device = block.device.type != "cpu"
    out = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_device)
    return out.copy_(block, non_blocking=on_device)


def job_of(
    path: str | Path,
    state: Any,
    specs: Any,
    mesh: Mesh | None,
    data: Any,
    config: Any,
    metrics: Mapping[str, float] | None,
    keep: Keep | None,
    timeout: float | None,
) -> Job:
    """What `fnshard.checkpoint.save` was asked for.

    Raises:
        CheckpointError: a state whose layout nobody knows, or a position or config that JSON cannot hold.
    """
    training = isinstance(state, TrainState)
    known = state.where if training and state.where is not None else (None, None)
    specs, mesh = specs or known[0], mesh or known[1] or default_mesh()
    if specs is None:
        raise CheckpointError(
            report(
                "nobody has said how this state is laid out.",
                fix="save(path, state, specs=step.specs, mesh=mesh); states of step.init know it themselves.",
            )
        )
    named = spec_paths(specs)[0]
    held = held_state(state, named, mesh) if training else held_params(state, named, mesh)
    told = {
        "step": int(state.step) if training else 0,
        "seed": int(state.seed) if training else 0,
        "mesh": {
            "axes": dict(zip(mesh.names, mesh.sizes, strict=True)),
            "data_axes": list(mesh.data_axes),
        },
        "specs": {path: repr(spec) for path, spec in named.items()},
        "config": encode(config, "config"),
        "metrics": {k: float(v) for k, v in (metrics or {}).items()},
        "versions": {"torch": str(torch.__version__)},
    }
    position = encode(data.state_dict() if hasattr(data, "state_dict") else data)
    place = Place(Path(path).absolute())
    return Job(place, held, mesh, group_of(mesh, timeout), told, position, keep)


class Saving:
    """A save in the background."""

    def __init__(self, job: Job):
        self.path, self._error = job.place.final, None
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"saving {self.path}")
        _in_flight.append(self)
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            job.write()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is whole.

        Raises:
            CheckpointError: it could not be written; told once.
        """
        self._thread.join()
        if self in _in_flight:
            _in_flight.remove(self)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path


_in_flight: list[Saving] = []  # at most one: what this process still writes


def wait() -> None:
    """Until nothing is being written any more; at once where nothing is.

    Raises:
        CheckpointError: the last save in the background failed.
    """
    for saving in list(_in_flight):
        saving.wait()
