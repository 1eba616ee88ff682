"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.trackers.base import LogPosition, Row, RunInfo, numbers

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars by name and step, texts and pictures. `tensorboard --logdir` of a folder of runs shows all."""

    name = "tensorboard"

    def start(self, info: RunInfo) -> tuple[Mapping[str, Any], LogPosition]:
        """A process that goes on purges the last step that was noted, and logs it again with all after it:
        it may have been written in part."""
        from torch.utils.tensorboard import SummaryWriter

        goes_on = bool(info.known)
        where = str(info.folder / FOLDER)
        self._writer = SummaryWriter(where, purge_step=info.at.step if goes_on else None)
        self._step = info.at.step
        if not goes_on:
            self._text("run", info.facts)
            return {"folder": FOLDER}, LogPosition()
        return info.known, LogPosition(info.at.step - 1) if info.at.step else LogPosition()

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
            text = path.read_text(encoding="utf-8", errors="replace")
            self._writer.add_text(path.name, _block(text), self._step)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._text("result", {"status": status, **summary})
        self._writer.close()

    def _text(self, name: str, values: Mapping[str, Any]) -> None:
        self._writer.add_text(name, _block(json.dumps(values, indent=1)), self._step)


def _block(text: str) -> str:
    """As Markdown shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())
