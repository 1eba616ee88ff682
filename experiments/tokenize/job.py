"""The tokenising job: text files to two folders of shards, one of them held out."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TextIO

import numpy as np

from experiments.data.rows import Dataset, library
from experiments.data.shards import COMMAND, TOKENIZER, TOKENIZER_FILES, Shards, describe, open_shards
from experiments.data.text import is_held_out, source_files, standard_library
from experiments.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from experiments.lib.checks import ConfigError
from experiments.lib.files import (
    DamagedError,
    commit_folder,
    differences,
    digest_of,
    digests_of,
    first_few,
    read_record,
    write_record,
)
from experiments.tokenize.config import TokenizeConfig
from fnshard.errors import report

FORMAT = 2
WORK = "work"  # below `out`
WRITTEN = "written.json"  # in a folder that a job is still at: the digests of what it has written there
SIDES = ("held_out", "train")
SHOWN = 8
BATCH = 64  # rows that are tokenised at once


def tokenize(config: TokenizeConfig) -> list[Shards]:
    """Write `out/train` and `out/held_out`; the same bytes with any number of processes.

    A job that was killed goes on where it was, when it is started again as before: arrays that are as they
    were written are kept. Of shards that are finished every byte is compared with its checksum.

    Returns:
        The shards of `SIDES`.

    Raises:
        ConfigError: no text, text that is refused, a tokenizer that is none, a folder of something else, or
            one that cannot be written to.
        MissingExtraError: `datasets` is not installed.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else ByteTokenizer()
    sides = split(find(config.files), config.held_out_percent, config.held_out)
    out, command = Path(config.out), _command(config, tokenizer, sides)
    try:
        _check_free(out, command)
        began = time.perf_counter()
        finished = [side for side in SIDES if (out / side).exists()]
        for shards in [open_shards(out / side) for side in finished]:
            shards.check(read_all=True)
        if len(finished) < len(SIDES):
            _write(out, config, tokenizer, sides, command)
        found = [open_shards(out / side) for side in SIDES]
    except OSError as error:
        raise ConfigError(f"{out}: shards cannot be written there: {error}.") from error
    _print_end(out, found, time.perf_counter() - began)
    return found


def _write(
    out: Path,
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    sides: Mapping[str, Sequence[TextFile]],
    command: Mapping[str, Any],
) -> None:
    rows = {side: _rows(out / WORK / side, sides[side], config.processes, command) for side in SIDES}
    problems = {side: [each for each in rows[side]["problem"][:] if each] for side in SIDES}
    if config.broken == "refuse" and any(problems.values()):
        wrong = [each for side in SIDES for each in problems[side]]
        fix = "mend the text; or broken=skip, which leaves such lines out and replaces such bytes."
        several = "1 place" if len(wrong) == 1 else f"{len(wrong)} places"
        raise ConfigError(report(f"{several} of the text cannot be used:", first_few(wrong, SHOWN), fix))
    aside = out / WORK / TOKENIZER
    for folder in (aside, out / TOKENIZER):
        shutil.rmtree(folder, ignore_errors=True)
    aside.mkdir()
    tokenizer.save(aside)
    write_record(out / COMMAND, {**command, TOKENIZER_FILES: digests_of(aside)}, durable=True)
    commit_folder(aside, out / TOKENIZER)
    for side in SIDES:
        if (out / side).exists():
            continue
        partial_folder = out / f"{side}.partial"
        partial_folder.mkdir(exist_ok=True)
        size = sum(source.size for source in sides[side])
        count = min(max(1, round(size / (config.shard_mb * 1e6))), len(rows[side]))
        text = f"{size / 1e6:,.1f} MB of text go into {_counted(count, 'shard')}"
        print(f"{out / side}: {text}", file=sys.stderr, flush=True)
        written = _keep_intact(partial_folder)
        for number in range(count):
            path = partial_folder / f"{number:06d}.npy"
            if path.name not in written:
                part = rows[side].shard(count, number, keep_in_memory=True)
                _save(path, _encoded(part, tokenizer, config.processes, out / WORK / f"{side}-{number}"))
                if path.exists():
                    written[path.name] = digest_of(path)
                    write_record(partial_folder / WRITTEN, written, durable=True)
        (partial_folder / WRITTEN).unlink(missing_ok=True)
        documents = int(np.count_nonzero(rows[side]["end"][:]))
        describe(
            partial_folder, documents=documents, vocab=tokenizer.vocab, tokenizer=tokenizer.key,
            eos=tokenizer.eos, broken=len(problems[side]),
        )  # fmt: skip
        commit_folder(partial_folder, out / side)
    shutil.rmtree(out / WORK)


def _keep_intact(folder: Path) -> dict[str, list[int]]:
    """Return the digests of the files that an earlier process has written in a folder; those that are not as
    it wrote them are deleted."""
    try:
        known = read_record(folder / WRITTEN, sealed=True) or {}
    except DamagedError:
        known = {}
    kept = {
        name: each for name, each in known.items() if not differences(folder, {name: each}, read_all=True)
    }
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in kept:
            path.unlink()
    return kept


def _rows(
    work: Path, files: Sequence[TextFile], processes: int | None, command: Mapping[str, Any]
) -> Dataset:
    """The text of files, as `pieces` cuts it."""
    datasets = library()
    kinds = {"text": "large_string", "end": "bool", "problem": "string"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    try:  # an earlier process may have read the text
        known = read_record(work / WRITTEN, sealed=True)
    except DamagedError:
        known = None
    if known is None or differences(work, known, read_all=True):
        shutil.rmtree(work, ignore_errors=True)
        known = None
    rows = datasets.Dataset.from_generator(
        pieces, gen_kwargs={"files": list(files)}, features=features, cache_dir=str(work),
        num_proc=_processes(processes, len(files)), fingerprint=command["files"],
    )  # fmt: skip
    if known is None:
        write_record(work / WRITTEN, digests_of(work))
    return rows


def _encoded(rows: Dataset, tokenizer: Tokenizer, processes: int | None, work: Path) -> np.ndarray:
    """The tokens of rows, with an end token after each document; of the smallest type that holds them."""
    datasets = library()
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir(parents=True)
    encode = partial(_tokens, tokenizer=tokenizer)
    encoded = rows.map(
        encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("uint32"))}),
        num_proc=_processes(processes, len(rows) // BATCH), cache_file_name=str(work / "tokens.arrow"),
        new_fingerprint=work.name, desc="tokenising",
    )  # fmt: skip
    blocks = encoded.with_format("arrow").iter(1024)
    tokens = [block["tokens"].combine_chunks().flatten().to_numpy() for block in blocks]
    found = np.concatenate(tokens).astype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    shutil.rmtree(work)
    return found


def _tokens(batch: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    end = {True: np.array([tokenizer.eos], np.uint32), False: np.empty(0, np.uint32)}
    encoded = tokenizer.encode_many(batch["text"])
    return {"tokens": [np.concatenate([i, end[e]]) for i, e in zip(encoded, batch["end"], strict=True)]}


def _save(path: Path, tokens: np.ndarray) -> None:
    """Under another name, then renamed: an array is complete or absent."""
    if len(tokens):
        aside = path.with_suffix(".writing")
        with aside.open("wb") as file:
            np.save(file, tokens)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def _processes(asked: int | None, most: int) -> int | None:
    count = min(asked or len(os.sched_getaffinity(0)), most)
    return count if count > 1 else None


# ------------------------------------------------------------------ what is there


def _command(
    config: TokenizeConfig, tokenizer: Tokenizer, sides: Mapping[str, Sequence[TextFile]]
) -> dict[str, Any]:
    """Return what the shards' bytes depend on."""
    files = [[side, str(s.path), s.name, s.size, s.stamp] for side in SIDES for s in sides[side]]
    own = {"format": FORMAT, "tokenizer": tokenizer.key, "shard_mb": config.shard_mb, "broken": config.broken}
    return {**own, "files": hashlib.sha256(json.dumps(files).encode()).hexdigest()}


def _check_free(out: Path, command: Mapping[str, Any]) -> None:
    """Leave alone what is something else, or what another command wrote."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file. Fix: name a folder.")
    try:
        before = read_record(out / COMMAND) or {}
    except DamagedError as error:
        raise DamagedError(f"{error} Fix: delete {out}, or another out.") from None
    others = sorted(p.name for p in out.iterdir() if p.name != WORK) if out.is_dir() else []
    if others and not before:
        raise ConfigError(
            report(f"out={out} holds something else:", first_few(others, SHOWN), "another out.")
        )
    differ = [f"{k}: {before[k]} there, {v} here" for k, v in command.items() if before.get(k, v) != v]
    if differ:
        fix = "another out, or delete that one."
        raise ConfigError(report(f"{out} holds shards of another command:", differ, fix))


def _counted(number: int, of: str) -> str:
    return f"{number:,} {of}{'s' if number != 1 else ''}"


def _print_end(out: Path, found: Sequence[Shards], seconds: float) -> None:
    """Print where the shards are, and what they hold."""
    for shards in found:
        broken = f", {shards.broken} broken" if shards.broken else ""
        held = f"{_counted(shards.tokens, 'token')}, {_counted(shards.documents or 0, 'document')}{broken}"
        print(f"{shards.folder}: {held}, in {_counted(len(shards.files), 'shard')}")
    vocab = max(shards.vocab or 0 for shards in found)
    print(
        f"done in {seconds:.1f} s\n\nresults: {out}\n"
        f"to train on them: python -m experiments.train data=shards data.root={out} model.vocab={vocab}",
        flush=True,
    )


# ------------------------------------------------------------------ texts


TEXT, LINES = (".txt", ".md", ".py"), (".jsonl",)  # taken out of folders; a glob or a name takes any file
WILD = frozenset("*?[")
PIECE = 2**16  # characters of a text that are tokenised at once, and the rest of the line
NO_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as `surrogateescape` reads them


@dataclass(frozen=True)
class TextFile:
    """One file of text.

    Args:
        name: below the folder that was named, with forward slashes; it says whether the file is held out.
        path: of the file.
        size: in bytes.
        stamp: when it was changed last, in nanoseconds.
    """

    name: str
    path: Path
    size: int
    stamp: int

    @property
    def lines(self) -> bool:
        """JSONL, a document a line; else the file is one document."""
        return self.path.suffix in LINES


def find(named: Sequence[str] | None) -> list[TextFile]:
    """The files of folders, globs and names, in that order, and by name within each; each file once.

    Args:
        named: None is Python's standard library, as the main job reads it.
    """
    if named is None:
        root = standard_library()
        return [_source(name, root / name) for name in source_files(root)]
    found: dict[Path, TextFile] = {}
    wrong = []
    for each in named:
        paths = sorted(_named(each))
        if not paths:
            wrong.append(
                f"{each}: {'matches no file' if WILD & set(each) else 'no such file, or no text in it'}"
            )
        for name, path in paths:
            found.setdefault(path.resolve(), _source(name, path))
    if wrong:
        known = ", ".join(f"*{suffix}" for suffix in (*TEXT, *LINES))
        fix = f"name folders (their {known} are taken), globs in quotes, or files."
        raise ConfigError(report("no text where files says:", wrong, fix))
    return list(found.values())


def split(sources: Iterable[TextFile], percent: int, held_out: Sequence[str]) -> dict[str, list[TextFile]]:
    """`{"train": ..., "held_out": ...}`: by a hash of each file's name, or as globs say.

    Args:
        percent: of the files that are held out, about.
        held_out: globs of names; where there are some, they alone decide.
    """
    sides: dict[str, list[TextFile]] = {"train": [], "held_out": []}
    for source in sources:
        matches = any(PurePath(source.name).match(glob) for glob in held_out)
        held = matches if held_out else is_held_out(source.name, percent)
        sides["held_out" if held else "train"].append(source)
    empty = [side for side, files in sides.items() if not sum(source.size for source in files)]
    if empty:
        fix = "files are held out whole: name more of them, another held_out_percent, or some as held_out."
        raise ConfigError(report("the files cannot be split:", [f"{side}: no text" for side in empty], fix))
    return sides


def _named(each: str) -> Iterator[tuple[str, Path]]:
    root = Path(each)
    if root.is_dir():
        for path in root.rglob("*"):
            name = path.relative_to(root)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.suffix in (*TEXT, *LINES) and not hidden and path.is_file():
                yield name.as_posix(), path
    else:
        for path in map(Path, [each] if root.is_file() else glob.glob(each, recursive=True)):
            if path.is_file():
                yield path.name, path


def _source(name: str, path: Path) -> TextFile:
    about = path.stat()
    return TextFile(name, path, about.st_size, about.st_mtime_ns)


def pieces(files: Sequence[TextFile]) -> Iterator[dict[str, Any]]:
    """The text of files: rows of a `text`, whether it is the `end` of a document, and a `problem` with it."""
    for source in files:
        with source.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            yield from (_documents if source.lines else _parts)(source.path, file)


def _parts(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    """A text is one document, cut at ends of lines; bytes that are no UTF-8 are replaced."""
    line = 1
    while text := file.read(PIECE):
        text += file.readline(PIECE)
        wrong = NO_UTF8.search(text)
        problem = ""
        if wrong:
            number = line + text.count("\n", 0, wrong.start())
            problem = f"{path}:{number}: is no UTF-8 (byte 0x{ord(wrong[0]) - 0xDC00:02x})"
        yield {"text": NO_UTF8.sub("\N{REPLACEMENT CHARACTER}", text), "end": False, "problem": problem}
        line += text.count("\n")
    yield {"text": "", "end": True, "problem": ""}


def _documents(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    """The "text" of each line; one that is empty is no document."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f'is no object with a "text" ({type(error).__name__}: {error})'
            yield {"text": "", "end": False, "problem": f"{path}:{number}: {why}"}
        else:
            if text:
                yield {"text": text, "end": True, "problem": ""}
