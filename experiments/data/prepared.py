"""Prepared data: files tokenised once, before any rank starts, into a folder that all ranks map."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from experiments.configs.train import ConfigError
from experiments.data.files import size_of
from experiments.data.layouts import blocks_of, files_of, is_saved
from experiments.data.records import KINDS
from experiments.data.tokenizer import Tokenizer
from experiments.data.writer import ARRAYS, BROKEN, LISTED, TOO_LONG, PreparedWriter, WritePolicy
from fnshard.errors import report

FORMAT = 3  # a change of what the files mean makes another key
FACTS = "prepared.json"
LARGEST_bytes = 2**40  # of a file: what is larger takes hours before a rank starts, or is sparse


@dataclass(frozen=True)
class Prepared:
    """Samples of token ids, mapped: a rank's memory holds what it reads and no more.

    Args:
        folder: with the arrays.
        key: equal for equal files, tokenizer and settings.
        kind: "samples", "pairs" or "choices".
        context: the most positions of a sample. One of n tokens has n - 1: the last is only a target.
        pad: the tokenizer's.
        samples: how many; a pair is two, a choice as many as it has options.
        records: lines they come from.
        tokens, learned: of all samples.
        longest, shortest: positions of a sample.
        chats: lines that went through the chat template.
        left_out: lines by reason: "broken", "too_long"; and samples cut to the context, "truncated".
    """

    folder: Path
    key: str
    kind: str
    context: int
    pad: int
    samples: int
    records: int
    tokens: int
    learned: int
    longest: int
    shortest: int
    chats: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        many = f"{self.records} {self.kind}, {self.tokens} tokens, {self.learned} of them learned"
        notes = [f"{count} {reason.replace('_', ' ')}" for reason, count in self.left_out.items() if count]
        return f"{many}; longest {self.longest}" + (f" ({', '.join(notes)})" if notes else "")

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Positions that samples take in a row; int64."""
        starts = self._arrays["starts"]
        return np.asarray(starts[samples + 1] - starts[samples] - 1)

    def sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (uint32) and whether each is learned (uint8) of one sample."""
        start, stop = (int(s) for s in self._arrays["starts"][number : number + 2])
        return self._arrays["tokens"][start:stop], self._arrays["learned"][start:stop]

    @cached_property
    def options(self) -> np.ndarray:
        """Of choices, a row for each sample: the question it belongs to, whether it is the right answer, and
        the bytes of its text; int32 [samples, 3]."""
        return np.asarray(self._arrays["answers"]).reshape(-1, 3)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {n: np.memmap(self.folder / f"{n}.bin", dtype, "r") for n, dtype in _arrays_of(self.kind)}


def prepare(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    context: int,
    cache: str | Path,
    kind: str = "samples",
    broken: str = "refuse",
    too_long: str = "refuse",
    part: tuple[int, bool] | None = None,
) -> Prepared:
    """Tokenise files of records into a folder below `cache`, or find the one that an earlier call made.

    Files are streamed: memory holds a block of lines. Processes that prepare the same may race.

    Args:
        files: in order; in one of `layouts`.
        tokenizer: of the model.
        context: the most positions of a sample.
        cache: a folder, made if need be.
        kind: "samples", "pairs" or "choices": what `records` makes of a line.
        broken: "refuse", or "skip" lines that cannot be used.
        too_long: "refuse", "skip", or "truncate" what has more positions than the context; a sample that has
            nothing left to learn then is skipped.
        part: (n, held out): of files that have none beside them for evaluation, one line in n is held out,
            drawn by what it holds, and one at least of two; either these are taken, or the others. Both are
            made at one go.

    Raises:
        ConfigError: a file cannot be read, holds nothing, or has lines that are refused: the first few of
            them by file and line, how many there are, and the file that lists them all.
    """
    policy = WritePolicy(context, broken, too_long, part)
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}: must be one of {', '.join(KINDS)}.")
    paths = readable(files)
    sums = [_sum_of(path) for path in paths]
    folders = {}
    for side in policy.sides:
        cut = None if part is None else (part[0], side)
        settings = [FORMAT, kind, context, broken, too_long, cut, tokenizer.key, tokenizer.pad, *sums]
        folders[side] = Path(cache) / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    folder = folders[bool(part and part[1])]
    if not _is_complete(folder):
        try:
            _make(folders, kind, paths, sums, tokenizer, policy)
        except OSError as error:
            raise ConfigError(f"{cache}: prepared data cannot be written there: {error}.") from error
    prepared = open_prepared(folder)
    if any(prepared.left_out.values()):
        print(f"{_named(paths)}: {prepared}", file=sys.stderr, flush=True)
    return prepared


def open_prepared(folder: str | Path) -> Prepared:
    """Map a folder that `prepare` made; every rank calls it.

    Raises:
        ConfigError: it holds something else, or files of other sizes than were written.
    """
    folder = Path(folder)
    if not _is_complete(folder):
        raise ConfigError(f"{folder} holds no prepared data, or not the whole of it. Fix: prepare it anew.")
    facts = json.loads((folder / FACTS).read_text())
    return Prepared(folder=folder, **{k: v for k, v in facts.items() if k != "bytes"})


# ------------------------------------------------------------------ the folder


def _arrays_of(kind: str) -> list[tuple[str, type]]:
    return [(name, dtype) for name, dtype in ARRAYS.items() if name != "answers" or kind == "choices"]


def _is_complete(folder: Path) -> bool:
    """Whether every file is as long as was written; bits are not summed: this is a cache."""
    try:
        sizes = json.loads((folder / FACTS).read_text())["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(
    folders: Mapping[bool, Path],
    kind: str,
    paths: Sequence[Path],
    sums: Sequence[str],
    tokenizer: Tokenizer,
    policy: WritePolicy,
) -> None:
    """Write under a name of its own and rename: a folder is complete or absent. The first of two wins."""
    first = folders[False]
    partial = first.with_name(f"{first.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    parts = {side: partial / folder.name for side, folder in folders.items()}
    size = sum(file.stat().st_size for path in paths for file in files_of(path))
    try:
        with PreparedWriter(parts, partial / "refused.txt", kind, tokenizer, policy, size) as writer:
            for path, expected in zip(paths, sums, strict=True):
                if writer.read(path) != expected:
                    raise ConfigError(f"{path} changed while it was read. Fix: wait until it is written.")
            writer.finish()
        _refuse(writer, paths, first.with_name(f"{first.name}.refused.txt"))
        for side, folder in folders.items():
            _place(parts[side], folder, kind, policy.context, tokenizer.pad, writer.facts(side))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _place(part: Path, folder: Path, kind: str, context: int, pad: int, facts: Mapping[str, Any]) -> None:
    """Write what is known of the arrays beside them, and move all to its place."""
    sizes = {f"{n}.bin": (part / f"{n}.bin").stat().st_size for n, _ in _arrays_of(kind)}
    values = {"key": folder.name, "kind": kind, "context": context, "pad": pad, **facts}
    (part / FACTS).write_text(json.dumps(values | {"bytes": sizes}, indent=1))
    try:
        part.rename(folder)  # onto nothing, or an empty folder
    except OSError:
        if not _is_complete(folder):  # torn, by another program: none is removed that may be in use
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)


def _refuse(writer: PreparedWriter, paths: Sequence[Path], beside: Path) -> None:
    """One error for all lines that may not be passed over, or for files in which nothing is left."""
    problems = writer.problems
    refused, shown = sum(problems.refused.values()), problems.shown
    if refused:
        ways = {
            BROKEN: "mend the lines, or leave such out with data.broken=skip",
            TOO_LONG: "leave long samples out with data.too_long=skip, cut them with data.too_long=truncate, "
            f"or take data.context={writer.longest_seen}",
        }
        rest = []
        if refused > len(shown):
            writer.refused.replace(beside)
            many = "all of them" if refused <= LISTED else f"the first {LISTED} of them"
            rest = [f"and {refused - len(shown)} more; {many}: {beside}"]
        several = "1 line" if refused == 1 else f"{refused} lines"
        fix = "; ".join(way for reason, way in ways.items() if problems.refused[reason])
        raise ConfigError(report(f"{several} cannot be used:", [*shown, *rest], f"{fix}."))
    empty = [side for side, arrays in writer.arrays.items() if not arrays.samples]
    if False in empty:
        counts = {r: sum(c[r] for c in problems.counts.values()) for r in (BROKEN, TOO_LONG)}
        notes = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count]
        raise ConfigError(f"{_named(paths)}: nothing to learn from ({', '.join(notes) or 'no lines'}).")
    if empty:
        raise ConfigError(
            f"{_named(paths)}: one line can be used, so none can be held out of training. Fix: name a file "
            "to evaluate on with data.held_out=FILE, or add lines."
        )


# ------------------------------------------------------------------ the files


def readable(files: Sequence[str | Path]) -> list[Path]:
    """The files, looked at and not read."""
    if isinstance(files, str | Path):
        files = [files]
    if not files:
        raise ConfigError("no files of data were named.")
    wrong = []
    for path in map(Path, files):
        try:
            if path.is_dir() and not is_saved(path):
                wrong.append(f"{path}: is a folder, and none that save_to_disk of datasets has written")
            elif not sum(size_of(each, LARGEST_bytes) for each in files_of(path)):
                wrong.append(f"{path}: is empty")  # files of /proc say so, and some of them never end
        except OSError as error:
            wrong.append(f"{path}: {error.strerror or error}")
    if wrong:
        raise ConfigError(
            report(
                "data cannot be read:",
                wrong,
                "name files: JSONL (one object a line), lists of JSON, Parquet; or a folder of save_to_disk.",
            )
        )
    return list(map(Path, files))


def _sum_of(path: Path) -> str:
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def _named(paths: Sequence[Any]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
