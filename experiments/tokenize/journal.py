"""Journal: which shards of a folder are written, so that a job that was killed goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.shardwriter import Made
from fnshard.errors import report

NAME, LOCK = "tokenize.journal", "tokenize.lock"
Place = tuple[str, int]  # a side, and a shard's number


@dataclass
class Journal:
    """A line for each shard that was written; the first says what they are made from."""

    path: Path
    identity: Mapping[str, Any]
    done: dict[Place, Made] = field(default_factory=dict)

    def begin(self) -> None:
        """Take over what stands there, or start."""
        rows = list(_rows(self.path))
        if rows:
            refuse_others(self.path.parent, rows[0], self.identity)
        for row in rows[1:]:
            self.done[row["side"], row["number"]] = Made(**row["made"])
        rows_now = [self.identity, *(_row(place, made) for place, made in self.done.items())]
        partial = self.path.with_suffix(".partial")  # anew, without the line that a kill has torn
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows_now), encoding="utf-8")
        partial.replace(self.path)

    def add(self, place: Place, made: Made) -> None:
        """A shard has been written under its name."""
        self.done[place] = made
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_row(place, made)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> None:
        """The headers say it all."""
        self.path.unlink(missing_ok=True)


def refuse_others(folder: Path, before: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Leave alone what another command wrote."""
    differ = [f"{k}: {_short(before.get(k))} there, {_short(identity[k])} here" for k in identity
              if before.get(k) != identity[k]]  # fmt: skip
    if differ:
        raise ConfigError(
            report(f"{folder} holds shards of another command:", differ, "another out, or delete that one.")
        )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """This process writes to the folder, and no other."""
    path = folder / LOCK
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked processes would hold it, too
        except BlockingIOError:
            raise ConfigError(f"another process is at work in {folder}. Fix: wait, or another out.") from None
        except OSError:  # a file system without locks
            pass
        yield


def _row(place: Place, made: Made) -> dict[str, Any]:
    return {"side": place[0], "number": place[1], "made": asdict(made)}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
