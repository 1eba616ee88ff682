"""Arrays of prepared data: samples appended to files, and what is counted on the way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from experiments.data.records import Record

ARRAYS: dict[str, type] = {"tokens": np.uint32, "learned": np.uint8, "starts": np.int64, "answers": np.int32}


class Arrays:
    """Writes `tokens.bin`, `learned.bin`, `starts.bin` and `answers.bin` into a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = self.records = self.tokens = self.learned = self.longest = self.chats = 0
        self.shortest = sys.maxsize

    def __enter__(self) -> Arrays:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        self._out = {n: self._stack.enter_context((self.folder / f"{n}.bin").open("wb")) for n in ARRAYS}
        self._put("starts", [0])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def write(self, record: Record, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append a record's samples: token ids, and whether each is learned."""
        for tokens, learned in samples:
            self._put("tokens", tokens)
            self._put("learned", learned)
            self.tokens += len(tokens)
            self.learned += int(learned[1:].sum())
            self._put("starts", [self.tokens])
            self.longest = max(self.longest, len(tokens) - 1)
            self.shortest = min(self.shortest, len(tokens) - 1)
        for option, size in enumerate(record.sizes):
            self._put("answers", [self.records, option == record.answer, size])
        self.samples += len(samples)
        self.records += 1
        self.chats += record.chat

    def facts(self) -> dict[str, Any]:
        names = ("samples", "records", "tokens", "learned", "longest", "shortest", "chats")
        return {name: getattr(self, name) for name in names}

    def _put(self, name: str, values: Any) -> None:
        self._out[name].write(np.asarray(values, ARRAYS[name]).tobytes())
