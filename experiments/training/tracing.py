"""`run.profile=N`: N steps of rank 0 as a trace, beside what was predicted of them, in `profile/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.data.files import write_text
from experiments.training.run_record import TimeSpent
from fnshard.errors import MissingExtraError

FOLDER, TRACE, TEXT, PICTURE = "profile", "trace.json", "timeline.txt", "timeline.png"
FIRST = 3  # step of a process: the first compiles, the second is where memory is measured


@dataclass
class Tracer:
    """Traces steps of this process, on rank 0 alone: spans on one rank tell of all, as all do the same."""

    step: Any
    steps: int
    folder: Path
    say: Callable[[str], None]
    spent: TimeSpent = field(default_factory=TimeSpent)
    _open: ExitStack = field(default_factory=ExitStack)
    _paper: Any = None
    _hardware: Any = None
    _made: int = 0

    @property
    def range(self) -> range:
        """The steps of a process that are traced; the same on all ranks."""
        return range(FIRST, FIRST + self.steps)

    def know(self, lowered: Any, hardware: fs.Hardware) -> None:
        """The step and the hardware of the prediction; called before the step is compiled."""
        if self.steps:
            self._paper, self._hardware = (lowered, lowered.timeline(hardware)), hardware

    @contextmanager
    def on(self, here: int) -> Iterator[None]:
        """Around the `here`th step of this process."""
        mine = self._paper is not None and self.step.mesh.rank == 0 and here in self.range
        if mine and not self._made:
            self._open.enter_context(fs.profile.traced(self.step, self.folder / FOLDER / TRACE))
        yield
        self._made += mine
        if mine and here == self.range[-1]:
            self.close()

    def close(self) -> None:
        """Write what was traced so far; nothing where nothing was, or all is written."""
        if not self._made or self._paper is None:
            return
        with self.spent.on("tracing"):
            self._write()

    def _write(self) -> None:
        self._open.close()
        (lowered, predicted), folder = self._paper, self.folder / FOLDER
        self._paper = None
        measured = fs.profile.measured(folder / TRACE, lowered, self._hardware)
        table = fs.profile.table(lowered, predicted, measured)
        text = [
            f"{self._made} steps traced, medians",
            table,
            f"predicted:\n{predicted}",
            f"measured:\n{measured}",
        ]
        write_text(folder / TEXT, "\n\n".join(text) + "\n")
        draw(predicted, measured, folder / PICTURE)
        self.say(f"steps traced: {self._made}, in {folder / TRACE} (for ui.perfetto.dev) and {folder / TEXT}")


def draw(predicted: Any, measured: Any, path: Path) -> None:
    """The picture of a step's lanes; none where matplotlib is not installed."""
    with suppress(MissingExtraError):
        fs.plot.timeline(predicted, path, measured=measured)
