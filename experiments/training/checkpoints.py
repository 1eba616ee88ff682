"""When a run's checkpoints are written, which are kept, and what follows when one cannot be written."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.configs.train import ConfigError
from experiments.training.goal import Goal
from experiments.training.resume import has_numbered, memory_name
from fnshard.checkpoint.replicas import most_copies
from fnshard.errors import CheckpointError

METRIC = "held_out"


@dataclass(frozen=True)
class Saver:
    """Writes the checkpoints of one run below `root`; all ranks call it together."""

    config: Any
    root: Path
    rank: int
    goal: Goal = Goal()

    def due(self, number: int) -> bool:
        """Whether step `number` is to be saved; the last one always is."""
        every = self.config.run.save_every
        return number == self.config.run.steps or (every > 0 and number % every == 0)

    def save(self, number: int, state: fs.TrainState, loader: Any, held_out: float | None) -> None:
        """Step `number`, with the goal's number on held-out data if there is one for it.

        A step that cannot be written, and is not the last, is reported: training continues, and what was
        saved before is still there.

        Raises:
            CheckpointError: the last step cannot be written: nobody would write it again. In the background
                `fs.checkpoint.wait` raises it.
        """
        run = self.config.run
        self._or_warn(fs.checkpoint.wait)
        save = fs.checkpoint.save_async if run.async_save else fs.checkpoint.save
        write = partial(save, self.root / str(number), state, **self._how(loader, held_out))
        if number == run.steps:
            write()
        else:
            self._or_warn(write)

    def save_last(self, number: int, state: fs.TrainState, loader: Any, held_out: float | None) -> None:
        """Step `number`, after which the process may end."""
        self._or_warn(fs.checkpoint.wait)
        fs.checkpoint.save(self.root / str(number), state, **self._how(loader, held_out))

    def _how(self, loader: Any, held_out: float | None) -> dict[str, Any]:
        run = self.config.run
        return {
            "data": loader,
            "config": dataclasses.asdict(self.config),
            "metrics": {} if held_out is None else {METRIC: held_out},
            "keep": fs.checkpoint.Keep(
                last=run.keep,
                every=run.keep_every,
                best=run.keep_best,
                metric=METRIC,
                mode="max" if self.goal.is_maximised else "min",
            ),
            "timeout": run.timeout_s,
        }

    def _or_warn(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except CheckpointError as error:  # on all ranks
            if self.rank == 0:
                print(f"not saved, training goes on: {error}", file=sys.stderr, flush=True)


def replicas_of(run: Any, step: Any, folder: Path) -> fs.checkpoint.Replicas | None:
    """The replicas of `run.replicas`, or as many as the nodes that are left can hold."""
    if not run.replicas:
        return None
    nodes = step.mesh.size // int(os.environ.get("LOCAL_WORLD_SIZE", step.mesh.size))
    copies = min(run.replicas, most_copies(nodes))
    return fs.checkpoint.Replicas(step, memory_name(folder), copies=copies, timeout=run.timeout_s)


def restored(
    root: Path,
    source: str | None,
    step: Any,
    mesh: fs.Mesh,
    loader: Any,
    replicas: fs.checkpoint.Replicas | None = None,
) -> tuple[fs.TrainState | None, str]:
    """The state to resume, and the directory it was found in; None where there is no checkpoint.

    The newest of memory and `root`, else of `source`. The loader stands after the batches that were seen.

    Raises:
        CheckpointError: none there is whole, or fits the model and the optimizer.
        ConfigError: what was saved has seen other batches.
    """
    steps = fs.checkpoint.all_steps(root) if mesh.rank == 0 else []
    # Where none is whole `restore` says what is wrong: the run must not begin anew in silence.
    found = str(root if steps or (mesh.rank == 0 and has_numbered(root)) else source or "")
    newest, found = json.loads(step.gather_strings(json.dumps([max(steps, default=-1), found]))[0])
    state = None if replicas is None else replicas.restore(newer_than=newest)
    if replicas is not None and replicas.lost and mesh.rank == 0:
        print(f"replicas: no step is complete in memory, going on from {found or 'the start'}", flush=True)
    if state is not None:
        found = str(replicas.memory)
    elif found:
        state = fs.checkpoint.restore(found, step, mesh)
    if state is None:
        return None, ""
    try:
        loader.load_state_dict(state.data or {**loader.state_dict(), "step": int(state.step)})
        if loader.step != int(state.step):  # a step takes one batch
            raise ValueError(f"its loader has drawn {loader.step} batches, its step is {int(state.step)}.")
    except ValueError as error:
        raise ConfigError(f"cannot go on from {found}: {error}") from None
    return state, found
