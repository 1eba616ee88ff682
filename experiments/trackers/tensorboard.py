"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.trackers.base import Row, RunInfo, numbers

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars by name and step, texts and pictures. `tensorboard --logdir` of a folder of runs shows all."""

    def start(self, run: RunInfo) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._step = SummaryWriter(str(run.folder / FOLDER)), 0
        if not run.id:
            self._text("run", json.dumps(run.facts, indent=1))
        return FOLDER

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._step = row["step"]
            for name, value in numbers(row).items():
                self._writer.add_scalar(name, value, self._step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        if path.suffix == ".png":
            from matplotlib import image

            self._writer.add_image(path.stem, image.imread(path)[..., :3], self._step, dataformats="HWC")
        else:
            self._text(path.name, path.read_text(encoding="utf-8", errors="replace"))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._text("result", json.dumps({"status": status, **summary}, indent=1))
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown shows it unchanged
        self._writer.add_text(name, indented, self._step)
