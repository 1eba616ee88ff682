"""Prepared data: files tokenised once, before any rank starts, into a folder that all ranks map."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from experiments.config import ConfigError
from experiments.data.records import KINDS
from experiments.data.tokenizer import Tokenizer
from experiments.data.writer import BROKEN, TOO_LONG, Policy, Writer
from fnshard.errors import report

FORMAT = 1  # a change of what the files mean makes another key
FACTS = "prepared.json"
ARRAYS: dict[str, type] = {"tokens": np.uint32, "learned": np.uint8, "starts": np.int64, "answers": np.int32}
BLOCK = 2**20  # bytes of a file that are hashed at once


@dataclass(frozen=True)
class Prepared:
    """Samples of token ids, mapped: a rank's memory holds what it reads and no more.

    Args:
        folder: where it lies.
        key: equal for equal files, tokenizer and settings.
        kind: "samples", "pairs" or "choices".
        context: the most positions of a sample. One of n tokens has n - 1: the last is only a target.
        pad: the tokenizer's.
        samples: how many; a pair is two, a choice as many as it has options.
        records: lines they come from.
        tokens, learned: of all samples.
        longest, shortest: positions of a sample.
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
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        many = f"{self.records} {self.kind}, {self.tokens} tokens, {self.learned} of them learned"
        told = [f"{count} {reason.replace('_', ' ')}" for reason, count in self.left_out.items() if count]
        return f"{many}; longest {self.longest}" + (f" ({', '.join(told)})" if told else "")

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
    """Tokenise JSONL files into a folder below `cache`, or find the one that an earlier call made of them.

    Files are streamed: memory holds a block of lines. Processes that prepare the same may race.

    Args:
        files: of JSONL, in order.
        tokenizer: of the model.
        context: the most positions of a sample.
        cache: a folder, made if need be.
        kind: "samples", "pairs" or "choices": what `records` makes of a line.
        broken: "refuse", or "skip" lines that cannot be used.
        too_long: "refuse", "skip", or "truncate" what has more positions than the context; a sample that has
            nothing left to learn then is skipped.
        part: (n, held out): of files that have none beside them for evaluation, every n-th line is held out;
            either these are taken, or the others. Mistakes are refused in both.

    Raises:
        ConfigError: a file cannot be read, holds nothing, or has lines that are refused: the first few of
            them by file and line, and how many there are.
    """
    policy = Policy(context, broken, too_long, part)
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}: must be one of {', '.join(KINDS)}.")
    paths = _readable(files)
    sums = [_sum_of(path) for path in paths]
    settings = [FORMAT, kind, context, broken, too_long, part, tokenizer.key, tokenizer.pad, *sums]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    folder = Path(cache) / key
    if not _whole(folder):
        shutil.rmtree(folder, ignore_errors=True)  # torn: another program's doing
        try:
            _make(folder, key, kind, paths, sums, tokenizer, policy)
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
    if not _whole(folder):
        raise ConfigError(f"{folder} holds no prepared data, or not the whole of it. Fix: prepare it anew.")
    facts = json.loads((folder / FACTS).read_text())
    return Prepared(folder=folder, **{k: v for k, v in facts.items() if k != "bytes"})


# ------------------------------------------------------------------ the folder


def _arrays_of(kind: str) -> list[tuple[str, type]]:
    return [(name, dtype) for name, dtype in ARRAYS.items() if name != "answers" or kind == "choices"]


def _whole(folder: Path) -> bool:
    """Whether every file is as long as was written; bits are not summed: this is a cache."""
    try:
        sizes = json.loads((folder / FACTS).read_text())["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(
    folder: Path,
    key: str,
    kind: str,
    paths: Sequence[Path],
    sums: Sequence[str],
    tokenizer: Tokenizer,
    policy: Policy,
) -> None:
    """Write under a name of its own and rename: a folder is whole or absent. The first of two wins."""
    partial = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        with Writer(partial, kind, tokenizer, policy, sum(p.stat().st_size for p in paths)) as writer:
            for path, expected in zip(paths, sums, strict=True):
                if writer.read(path) != expected:
                    raise ConfigError(f"{path} changed while it was read. Fix: wait until it is written.")
        facts = writer.facts()
        _refuse(writer, paths)
        sizes = {f"{n}.bin": (partial / f"{n}.bin").stat().st_size for n, _ in _arrays_of(kind)}
        told = {"key": key, "kind": kind, "context": policy.context, "pad": tokenizer.pad, **facts}
        (partial / FACTS).write_text(json.dumps(told | {"bytes": sizes}, indent=1))
        try:
            partial.rename(folder)
        except OSError:
            if not _whole(folder):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse(writer: Writer, paths: Sequence[Path]) -> None:
    """One error for all lines that may not be passed over, or for files in which nothing is left."""
    refused, counts = writer.problems.refused, writer.problems.counts
    if refused:
        ways = {
            BROKEN: "mend the lines, or leave such out with broken='skip'",
            TOO_LONG: "leave long samples out with too_long='skip', cut them with too_long='truncate', "
            f"or take a context of {writer.longest_seen}",
        }
        several = "1 line" if refused == 1 else f"{refused} lines"
        shown = writer.problems.shown
        rest = [f"and {refused - len(shown)} more"] if refused > len(shown) else []
        fix = "; ".join(ways[reason] for reason in ways if writer.problems.refuses(reason))
        raise ConfigError(report(f"{several} cannot be used:", [*shown, *rest], f"{fix}."))
    if not writer.samples:
        told = [f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count]
        if writer.policy.part and writer.policy.part[1]:
            told.append(f"of every {writer.policy.part[0]}th line, which is held out")
        raise ConfigError(f"{_named(paths)}: nothing to learn from ({', '.join(told) or 'no lines'}).")


# ------------------------------------------------------------------ the files


def _readable(files: Sequence[str | Path]) -> list[Path]:
    if isinstance(files, str | Path):
        files = [files]
    if not files:
        raise ConfigError("no files of data were named.")
    wrong = []
    for path in map(Path, files):
        try:
            if path.is_dir():
                wrong.append(f"{path}: is a folder")
            else:
                path.open("rb").close()
        except OSError as error:
            wrong.append(f"{path}: {error.strerror or error}")
    if wrong:
        raise ConfigError(report("data cannot be read:", wrong, "name files of JSONL."))
    return list(map(Path, files))


def _sum_of(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _named(paths: Sequence[Any]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
