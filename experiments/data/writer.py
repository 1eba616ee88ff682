"""The writer of prepared data: lines in, arrays out, a block at a time, and what is wrong on the way."""

from __future__ import annotations

import hashlib
import sys
import time
from bisect import insort
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from experiments.config import ConfigError
from experiments.data.lines import LineError, parse, read_lines
from experiments.data.pieces import encode_all
from experiments.data.records import KINDS, Record
from experiments.data.tokenizer import Tokenizer

BROKEN, TOO_LONG, TRUNCATED = "broken", "too_long", "truncated"
BLOCK_LINES, BLOCK_BYTES = 512, 2**20  # tokenised together
SHOWN = 8
QUIET_S, EVERY_S = 2.0, 30.0  # before progress is told; between lines of it where no terminal listens


@dataclass(frozen=True)
class Policy:
    """Which lines are taken, and what is done with those that do not fit; as `prepare` takes them."""

    context: int
    broken: str = "refuse"
    too_long: str = "refuse"
    part: tuple[int, bool] | None = None

    def __post_init__(self) -> None:
        allowed = {BROKEN: ("refuse", "skip"), TOO_LONG: ("refuse", "skip", "truncate")}
        wrong = [f"{n}={getattr(self, n)!r}: must be one of {', '.join(a)}." for n, a in allowed.items()
                 if getattr(self, n) not in a]  # fmt: skip
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 1:
            wrong.append(f"context={self.context!r}: must be a whole number above 0.")
        if self.part is not None and self.part[0] < 2:
            wrong.append(f"part={self.part!r}: every how manyth line is held out must be 2 or more.")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def takes(self, number: int) -> bool:
        """Whether line `number` belongs to the part."""
        return self.part is None or (number % self.part[0] == 0) == self.part[1]


@dataclass
class Problems:
    """Counts of what was found, and the first few that are refused; bounded, however many there are."""

    policy: Policy
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((BROKEN, TOO_LONG, TRUNCATED), 0))
    refused: int = 0
    _first: list[tuple[int, int, str]] = field(default_factory=list)

    def refuses(self, reason: str) -> bool:
        """Whether lines of this kind are refused, and there were some."""
        return bool(self.counts[reason]) and getattr(self.policy, reason, "") == "refuse"

    def add(self, reason: str, where: tuple[int, int], text: str) -> None:
        """Count a line at `where`: its file's number, and its own.

        One that is refused is told of, whatever part it belongs to: all mistakes are told at once.
        """
        refuse = getattr(self.policy, reason) == "refuse"
        self.counts[reason] += refuse or self.policy.takes(where[1])
        if refuse:
            self.refused += 1
            insort(self._first, (*where, text))
            del self._first[SHOWN:]

    @property
    def shown(self) -> list[str]:
        """The first few that are refused, in the order of files and lines."""
        return [text for _, _, text in self._first]


@dataclass
class Writer:
    """Writes `tokens.bin`, `learned.bin`, `starts.bin` and `answers.bin` into a folder; a context manager."""

    folder: Path
    kind: str
    tokenizer: Tokenizer
    policy: Policy
    size: int  # bytes of all files, for the progress

    def __post_init__(self) -> None:
        self.problems = Problems(self.policy)
        self.samples = self.records = self.tokens = self.learned = 0
        self.longest = self.longest_seen = 0
        self.shortest = sys.maxsize
        self._block: list[tuple[tuple[int, int], Record]] = []
        self._bytes = self._file = 0
        self._path = Path()

    def __enter__(self) -> Writer:
        self._stack = ExitStack()
        names = ("tokens", "learned", "starts", "answers")
        self._out = {n: self._stack.enter_context((self.folder / f"{n}.bin").open("wb")) for n in names}
        self._progress = self._stack.enter_context(Progress(self.size))
        self._put("starts", np.zeros(1, np.int64))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self, path: Path) -> str:
        """Take in a file; gives its checksum."""
        digest = hashlib.sha256()
        self._path = path
        for number, line in read_lines(path, digest.update):
            try:
                record = KINDS[self.kind](parse(line), self.tokenizer)
            except LineError as error:
                self.problems.add(BROKEN, (self._file, number), f"{path}:{number}: {error}")
            else:
                self._block.append(((self._file, number), record))
            self._bytes += len(line)
            if len(self._block) >= BLOCK_LINES or self._bytes >= BLOCK_BYTES:
                self._flush()
        self._flush()
        self._file += 1
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What `Prepared` is told of them."""
        names = ("samples", "records", "tokens", "learned", "longest", "shortest")
        return {n: getattr(self, n) for n in names} | {"left_out": self.problems.counts}

    def _flush(self) -> None:
        """Tokenise what has gathered, and write it."""
        encoded = iter(encode_all(self.tokenizer, [d for _, record in self._block for d in record.drafts]))
        for where, record in self._block:
            samples = [next(encoded) for _ in record.drafts]
            fitting = self._fitting(where, samples)
            if fitting and self.policy.takes(where[1]):
                self._write(record, fitting)
        self._progress.advance(self._bytes)
        self._block, self._bytes = [], 0

    def _fitting(self, where: tuple[int, int], samples: Sequence[tuple]) -> Sequence[tuple]:
        """The samples as they are written; none where the line is left out."""
        most = self.policy.context + 1
        line = f"{self._path}:{where[1]}"
        longest = max(len(tokens) for tokens, _ in samples) - 1
        if longest >= most:
            self.longest_seen = max(self.longest_seen, longest)
            if self.policy.too_long != "truncate":
                told = f"{line}: takes {longest} positions, the context has {self.policy.context}"
                self.problems.add(TOO_LONG, where, told)
                return ()
            samples = [(tokens[:most], learned[:most]) for tokens, learned in samples]
        # The first token is never a target: nothing stands before it.
        if any(not learned[1:].any() for _, learned in samples):
            reason = TOO_LONG if longest >= most else BROKEN
            self.problems.add(reason, where, f"{line}: no token is left to learn")
            return ()
        if self.kind == "pairs" and np.array_equal(samples[0][0], samples[1][0]):
            told = f"{line}: chosen and rejected differ only behind the context"
            self.problems.add(TOO_LONG, where, told)
            return ()
        self.problems.counts[TRUNCATED] += longest >= most and self.policy.takes(where[1])
        return samples

    def _write(self, record: Record, samples: Sequence[tuple]) -> None:
        for tokens, learned in samples:
            self._put("tokens", tokens)
            self._put("learned", learned)
            self.tokens += len(tokens)
            self.learned += int(learned[1:].sum())
            self._put("starts", np.array([self.tokens], np.int64))
            self.longest = max(self.longest, len(tokens) - 1)
            self.shortest = min(self.shortest, len(tokens) - 1)
        for option, size in enumerate(record.sizes):
            self._put("answers", np.array([self.records, option == record.answer, size], np.int32))
        self.samples += len(samples)
        self.records += 1

    def _put(self, name: str, values: np.ndarray) -> None:
        self._out[name].write(values.tobytes())


class Progress:
    """Bytes done, on stderr, where that takes long: a bar on a terminal, else a line now and then."""

    def __init__(self, size: int) -> None:
        self._size, self._done = size, 0
        self._told = time.monotonic()

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._size,
            desc="tokenising",
            unit="B",
            unit_scale=True,
            delay=QUIET_S,
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def advance(self, count: int) -> None:
        """So many more bytes were tokenised."""
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._told > EVERY_S:
            self._told = now
            print(
                f"tokenised {self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB", file=sys.stderr, flush=True
            )
