"""`run.profile=N`: N steps as a trace, next to what was predicted of them, line by line, in `profile/`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fnshard as fs
from experiments.configs.measured import LINES, lines_of
from experiments.data.files import write_record, write_text
from fnshard.analysis.hardware import TABLE
from fnshard.errors import MissingExtraError

FOLDER, TRACE, TEXT, PICTURE = LINES.parent, "trace.json", "timeline.txt", "timeline.png"
FIRST = 3  # step of a process: the first compiles, the second is where memory is measured


@dataclass
class Tracer:
    """Traces `steps` steps of this process; all ranks do, so that who is waited for can be seen.

    Args:
        lowered: the step; `hardware`: what its prediction is for; `base`: what `run.json` predicts with.
        folder: of the run.
    """

    step: Any
    steps: int
    lowered: Any
    hardware: fs.Hardware
    base: fs.Hardware
    folder: Path
    _traced: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._predicted = self.lowered.timeline(self.hardware)  # before the step is compiled

    @contextmanager
    def on(self, here: int) -> Iterator[None]:
        """Around the `here`th step of this process."""
        if here == FIRST:
            self._open.enter_context(fs.profile.traced(self.step, self._trace))
        yield
        self._traced += FIRST <= here < FIRST + self.steps

    def done(self, here: int) -> bool:
        """Whether the `here`th step of this process is the last one that is traced."""
        return here == FIRST + self.steps - 1

    @property
    def _trace(self) -> Path:
        """Of rank 0 it stays; others' are read and removed."""
        rank = self.step.mesh.rank
        return self.folder / FOLDER / (f"rank-{rank}.json" if rank else TRACE)

    def write(self) -> str:
        """End the trace and write what is measured; returns a line about it, or nothing where nothing was.

        All ranks call it together.
        """
        self._open.close()
        if not self._traced:
            return ""
        folder, predicted = self.folder / FOLDER, self._predicted
        measured = fs.profile.measured(self._trace, self.lowered, self.hardware)
        waited = self.step.gather_strings(str(measured.exposed_communication_seconds))
        if self.step.mesh.rank:
            self._trace.unlink()
            return ""
        values = lines_of(self.lowered, self.base, measured)
        write_record(self.folder / LINES, {**values, "exposed_s": [float(text) for text in waited]})
        name = self.hardware.name
        nominal = f"; predicted with the nominal speeds of {name}: hardware=measure takes this machine's"
        note = nominal if name in TABLE else ""
        head = f"{self._traced} steps traced, medians{note}"
        table = fs.profile.table(self.lowered, predicted, measured)
        text = "\n\n".join([head, table, f"predicted:\n{predicted}", f"measured:\n{measured}"])
        write_text(folder / TEXT, f"{text}\n")
        with suppress(MissingExtraError):  # without matplotlib
            fs.plot.timeline(predicted, folder / PICTURE, measured=measured)
        where = f"in {folder / TRACE} (for ui.perfetto.dev) and {folder / TEXT}"
        return f"steps traced: {self._traced}, {where}{note}"
