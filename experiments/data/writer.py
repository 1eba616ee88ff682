"""Prepared data as files: lines in, arrays out, a block at a time, and what is wrong on the way."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np

from experiments.configs.train import ConfigError
from experiments.data.layouts import LineError, lines_of, parse
from experiments.data.pieces import encode_all
from experiments.data.records import KINDS, Record
from experiments.data.tokenizer import Tokenizer

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


BROKEN, TOO_LONG, TRUNCATED = "broken", "too_long", "truncated"
BLOCK_LINES, BLOCK_BYTES = 512, 2**20  # tokenised together
SHOWN = 12  # of refused lines, in the error
LISTED = 100_000  # of them, in the file beside
QUIET_S, EVERY_S = 2.0, 30.0  # before progress is shown; between lines of it without a terminal


Samples = Sequence[tuple[np.ndarray, np.ndarray]]


class LinePosition(NamedTuple):
    """A line's number, and whether it is held out."""

    line: int
    side: bool


@dataclass(frozen=True)
class WritePolicy:
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

    @property
    def sides(self) -> tuple[bool, ...]:
        """What is written: all, as the side that is not held out; or both sides, at one go."""
        return (False,) if self.part is None else (False, True)

    def side(self, line: bytes) -> bool:
        """Whether a line is held out: by its bytes, so that no rhythm of a file shows, and equal lines stay
        together."""
        if self.part is None:
            return False
        digest = hashlib.blake2b(line.strip(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.part[0] == 0


@dataclass
class RefusedLines:
    """Counts of what was found; what is refused goes to a file, and the first few to the error."""

    policy: WritePolicy
    out: TextIO
    counts: dict[bool, dict[str, int]] = field(init=False)
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys((BROKEN, TOO_LONG), 0))
    shown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = {side: dict.fromkeys((BROKEN, TOO_LONG, TRUNCATED), 0) for side in self.policy.sides}
        self._waiting: list[tuple[int, str]] = []

    def add(self, reason: str, where: LinePosition, text: str) -> None:
        """Count a line. One that is refused is listed, whatever side it belongs to: all mistakes at once."""
        self.counts[where.side][reason] += 1
        if getattr(self.policy, reason) == "refuse":
            self.refused[reason] += 1
            self._waiting.append((where.line, text))

    def flush(self) -> None:
        """Write down what has gathered, in the order of lines."""
        gathered = [text for _, text in sorted(self._waiting)]
        self._waiting = []
        self.shown += gathered[: SHOWN - len(self.shown)]
        before = sum(self.refused.values()) - len(gathered)
        self.out.writelines(f"{text}\n" for text in gathered[: max(0, LISTED - before)])


@dataclass
class PreparedWriter:
    """Writes the arrays of every side into folders, and what is refused into a file; a context manager."""

    folders: Mapping[bool, Path]
    refused: Path
    kind: str
    tokenizer: Tokenizer
    policy: WritePolicy
    size: int  # bytes of all files, for the progress

    def __post_init__(self) -> None:
        self.longest_seen = 0
        self._block: list[tuple[LinePosition, Record]] = []
        self._bytes = 0
        self._path = Path()
        self._first: tuple[LinePosition, Record, Samples] | None = (
            None  # waits: its side may be needed elsewhere
        )

    def __enter__(self) -> PreparedWriter:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        self.arrays = {side: enter(Arrays(self.folders[side])) for side in self.policy.sides}
        self.problems = RefusedLines(self.policy, enter(self.refused.open("w", encoding="utf-8")))
        self._progress = enter(WriteProgress(self.size))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self, path: Path) -> str:
        """Take in a file; gives its checksum."""
        digest = hashlib.sha256()
        self._path = path
        for number, line in lines_of(path, digest.update):
            where = LinePosition(number, self.policy.side(line))
            try:
                record = KINDS[self.kind](parse(line), self.tokenizer)
            except LineError as error:
                self.problems.add(BROKEN, where, f"{path}:{number}: {error}")
            else:
                self._block.append((where, record))
            self._bytes += len(line)
            if len(self._block) >= BLOCK_LINES or self._bytes >= BLOCK_BYTES:
                self._flush()
        self._flush()
        return digest.hexdigest()

    def finish(self) -> None:
        """Write the first record, which has waited: to its own side, unless the other has nothing else."""
        if self._first is not None:
            where, record, samples = self._first
            rest = {side: arrays.records for side, arrays in self.arrays.items()}
            alone = not any(rest.values())
            other = not where.side
            if other in rest and not rest[other] and not alone:
                where = where._replace(side=other)
            elif alone:
                where = where._replace(side=False)  # one record is to be learned
            self.arrays[where.side].write(record, samples)

    def facts(self, side: bool) -> dict[str, Any]:
        return self.arrays[side].facts() | {"left_out": self.problems.counts[side]}

    def _flush(self) -> None:
        """Tokenise what has gathered, and write it."""
        encoded = iter(encode_all(self.tokenizer, [d for _, record in self._block for d in record.drafts]))
        for where, record in self._block:
            samples = self._fitting(where, [next(encoded) for _ in record.drafts])
            if not samples:
                continue
            if self._first is None and self.policy.part:
                self._first = (where, record, samples)
            else:
                self.arrays[where.side].write(record, samples)
        self.problems.flush()
        self._progress.advance(self._bytes)
        self._block, self._bytes = [], 0

    def _fitting(self, where: LinePosition, samples: Samples) -> Samples:
        """The samples as they are written; none where the line is left out."""
        most = self.policy.context + 1
        line = f"{self._path}:{where.line}"
        longest = max(len(tokens) for tokens, _ in samples) - 1
        if longest >= most:
            self.longest_seen = max(self.longest_seen, longest)
            if self.policy.too_long != "truncate":
                problem = f"{line}: takes {longest} positions, the context has {self.policy.context}"
                self.problems.add(TOO_LONG, where, problem)
                return ()
            samples = [(tokens[:most], learned[:most]) for tokens, learned in samples]
        # The first token is never a target: nothing stands before it.
        if any(not learned[1:].any() for _, learned in samples):
            reason = TOO_LONG if longest >= most else BROKEN
            self.problems.add(reason, where, f"{line}: no token is left to learn")
            return ()
        if self.kind == "pairs" and np.array_equal(samples[0][0], samples[1][0]):
            problem = f"{line}: chosen and rejected differ only behind the context"
            self.problems.add(TOO_LONG, where, problem)
            return ()
        self.problems.counts[where.side][TRUNCATED] += longest >= most
        return samples


class WriteProgress:
    """Bytes done, on stderr, where that takes long: a bar on a terminal, else a line now and then."""

    def __init__(self, size: int) -> None:
        self._size, self._done = size, 0
        self._told = time.monotonic()

    def __enter__(self) -> WriteProgress:
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
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._told > EVERY_S:
            self._told = now
            print(
                f"tokenised {self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB", file=sys.stderr, flush=True
            )
