"""The tokenising job, which writes text files as two folders of shards, one of them held out.

In order: `find_text` lists the files, `split_files` says which are held out, and `_write_shards` reads them
(`read_pieces`), tokenises them and writes arrays. Files appear under their names when they are complete, so
that the same command goes on after any interruption.
"""

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

from experiments.data.rows import Dataset, import_datasets
from experiments.data.shards import (
    COMMAND_FILE,
    TOKENIZER,
    TOKENIZER_FILES,
    Shards,
    open_shards,
    write_header,
)
from experiments.data.text import is_held_out, source_files, standard_library
from experiments.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from experiments.lib.checks import ConfigError, pluralize
from experiments.lib.files import (
    PARTIAL,
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

FORMAT = 2  # a part of the command's identity, which changes when the shards' bytes would
WORK = "work"  # a folder below `out`
WRITTEN = "written.json"  # in a folder that a job is still at: the digests of what it has written there
SIDES = ("held_out", "train")
SHOWN = 8  # the number of lines that an error shows
BATCH = 64  # rows that are tokenised at once


def tokenize(config: TokenizeConfig) -> list[Shards]:
    """Write `out/train` and `out/held_out`, with the same bytes by any number of processes.

    A job that was killed goes on where it was when the same command starts it again. Arrays that are as they
    were written are kept, and every byte of finished shards is compared with its checksum.

    Returns:
        The shards of `SIDES`.

    Raises:
        ConfigError: no text, text that is refused, a tokenizer that is none, a folder of something else, or
            one that cannot be written to.
        MissingExtraError: `datasets` is not installed.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else ByteTokenizer()
    sides = split_files(find_text(config.files), config.held_out_percent, config.held_out)
    out = Path(config.out)

    # Collect all that the shards' bytes depend on, since only the same command may go on in a folder.
    files = [[side, str(s.path), s.name, s.size, s.stamp] for side in SIDES for s in sides[side]]
    command = {
        "format": FORMAT, "tokenizer": tokenizer.key, "shard_mb": config.shard_mb, "broken": config.broken,
        "files": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
    }  # fmt: skip
    try:
        _refuse_taken(out, command)
        # Check the sides that are finished, and write the others.
        began = time.perf_counter()
        finished = [side for side in SIDES if (out / side).exists()]
        for shards in [open_shards(out / side) for side in finished]:
            shards.check(read_all=True)
        if len(finished) < len(SIDES):
            _write_shards(out, config, tokenizer, sides, command)
        # The text that was read is needed no more. An earlier process may have been killed before this line.
        if (out / WORK).exists():
            shutil.rmtree(out / WORK)
        found = [open_shards(out / side) for side in SIDES]
    except OSError as error:
        raise ConfigError(f"{out}: shards cannot be written there: {error}.") from error

    # Print where the shards are, what they hold, and what comes next.
    for shards in found:
        broken = f", {shards.broken} broken" if shards.broken else ""
        held = f"{pluralize(shards.tokens, 'token')}, {pluralize(shards.documents or 0, 'document')}{broken}"
        print(f"{shards.folder}: {held}, in {pluralize(len(shards.files), 'shard')}")
    vocab = max(shards.vocab or 0 for shards in found)
    print(
        f"done in {time.perf_counter() - began:.1f} s\n\nresults: {out}\n"
        f"to train on them: python -m experiments.train data=shards data.root={out} model.vocab={vocab}",
        flush=True,
    )
    return found


def _write_shards(
    out: Path,
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    sides: Mapping[str, Sequence[TextFile]],
    command: Mapping[str, Any],
) -> None:
    """Read and tokenise the files of both sides, and write what an earlier process has not written.

    Raises:
        ConfigError: texts have problems, and `config.broken` refuses them.
    """
    # Read all text first: its problems are reported before anything is tokenised.
    rows = {side: _read_rows(out / WORK / side, sides[side], config.processes, command) for side in SIDES}
    problems = {side: [each for each in rows[side]["problem"][:] if each] for side in SIDES}
    if config.broken == "refuse" and any(problems.values()):
        wrong = [each for side in SIDES for each in problems[side]]
        fix = "mend the text; or broken=skip, which leaves such lines out and replaces such bytes."
        several = "1 place" if len(wrong) == 1 else f"{len(wrong)} places"
        raise ConfigError(report(f"{several} of the text cannot be used:", first_few(wrong, SHOWN), fix))

    # The tokenizer goes beside the shards: a run needs it to write text, and compares it with its digests.
    aside = out / WORK / TOKENIZER
    for folder in (aside, out / TOKENIZER):
        shutil.rmtree(folder, ignore_errors=True)
    aside.mkdir()
    tokenizer.save(aside)
    write_record(out / COMMAND_FILE, {**command, TOKENIZER_FILES: digests_of(aside)}, durable=True)
    commit_folder(aside, out / TOKENIZER)

    # Each side's arrays are written into a folder with another name, which gets its own when it is complete.
    for side in SIDES:
        if (out / side).exists():
            continue
        partial_folder = out / f"{side}.partial"
        partial_folder.mkdir(exist_ok=True)
        # Rows are divided evenly into shards of about the size that is asked for.
        size = sum(source.size for source in sides[side])
        count = min(max(1, round(size / (config.shard_mb * 1e6))), len(rows[side]))
        text = f"{size / 1e6:,.1f} MB of text go into {pluralize(count, 'shard')}"
        print(f"{out / side}: {text}", file=sys.stderr, flush=True)
        written = _keep_intact(partial_folder)
        for number in range(count):
            path = partial_folder / f"{number:06d}.npy"
            if path.name not in written:
                part = rows[side].shard(count, number, keep_in_memory=True)
                _save_array(path, _encode(part, tokenizer, config.processes, out / WORK / f"{side}-{number}"))
                if path.exists():  # rows without text have no array
                    written[path.name] = digest_of(path)
                    write_record(partial_folder / WRITTEN, written, durable=True)
        # The shards are complete: write their header, and give the folder its name.
        (partial_folder / WRITTEN).unlink(missing_ok=True)
        documents = int(np.count_nonzero(rows[side]["end"][:]))
        write_header(
            partial_folder, documents=documents, vocab=tokenizer.vocab, tokenizer=tokenizer.key,
            eos=tokenizer.eos, broken=len(problems[side]),
        )  # fmt: skip
        commit_folder(partial_folder, out / side)


def _keep_intact(folder: Path) -> dict[str, list[int]]:
    """Return the digests of the files that an earlier process has written in a folder.

    Files that are not as it wrote them are deleted. The record of them stays, for a process after this one.
    """
    try:
        known = read_record(folder / WRITTEN, need_checksum=True) or {}
    except DamagedError:
        known = {}
    kept = {
        name: each for name, each in known.items() if not differences(folder, {name: each}, read_all=True)
    }
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != WRITTEN and name not in kept:
            path.unlink()
    return kept


def _read_rows(
    work: Path, files: Sequence[TextFile], processes: int | None, command: Mapping[str, Any]
) -> Dataset:
    """Read the text of files into rows, as `read_pieces` cuts it, or open the rows of an earlier process."""
    datasets = import_datasets()
    kinds = {"text": "large_string", "end": "bool", "problem": "string"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    try:  # an earlier process may have read the text
        known = read_record(work / WRITTEN, need_checksum=True)
    except DamagedError:
        known = None
    if known is None or differences(work, known, read_all=True):
        shutil.rmtree(work, ignore_errors=True)
        known = None
    # `datasets` finds the rows of an earlier process by the fingerprint.
    rows = datasets.Dataset.from_generator(
        read_pieces, gen_kwargs={"files": list(files)}, features=features, cache_dir=str(work),
        num_proc=_count_processes(processes, len(files)), fingerprint=command["files"],
    )  # fmt: skip
    if known is None:
        write_record(work / WRITTEN, digests_of(work))
    return rows


def _encode(rows: Dataset, tokenizer: Tokenizer, processes: int | None, work: Path) -> np.ndarray:
    """Return the tokens of rows, with an end token after each document: uint16 [tokens] if they fit, else
    uint32."""
    datasets = import_datasets()
    shutil.rmtree(work, ignore_errors=True)  # a process that was killed may have left it
    work.mkdir(parents=True)
    encode = partial(_encode_batch, tokenizer=tokenizer)
    encoded = rows.map(
        encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("uint32"))}),
        num_proc=_count_processes(processes, len(rows) // BATCH), cache_file_name=str(work / "tokens.arrow"),
        new_fingerprint=work.name, desc="tokenising",
    )  # fmt: skip
    blocks = encoded.with_format("arrow").iter(1024)
    tokens = [block["tokens"].combine_chunks().flatten().to_numpy() for block in blocks]
    found = np.concatenate(tokens).astype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    shutil.rmtree(work)
    return found


def _encode_batch(batch: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens of each row of a batch, with an end token if its document ends there."""
    end = np.array([tokenizer.eos], np.uint32)
    encoded = tokenizer.encode_many(batch["text"])
    tokens = [
        np.concatenate([ids, end]) if is_end else ids
        for ids, is_end in zip(encoded, batch["end"], strict=True)
    ]
    return {"tokens": tokens}


def _save_array(path: Path, tokens: np.ndarray) -> None:
    """Write an array under another name and rename it, so that it is complete or absent.

    Rows may hold no text at all, and then there is no array.
    """
    if not len(tokens):
        return
    aside = path.with_suffix(".writing")
    with aside.open("wb") as file:
        np.save(file, tokens)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _count_processes(asked: int | None, most: int) -> int | None:
    """Return how many processes share some work; None if this one does it alone."""
    count = min(asked or len(os.sched_getaffinity(0)), most)
    return count if count > 1 else None


def _refuse_taken(out: Path, command: Mapping[str, Any]) -> None:
    """Refuse to write into a folder that holds something else, or the shards of another command."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file. Fix: name a folder.")
    try:
        before = read_record(out / COMMAND_FILE) or {}
    except DamagedError as error:
        raise DamagedError(f"{error} Fix: delete {out}, or another out.") from None
    # A job that was killed before it had written its record has left no other names than these.
    first = {WORK, f"{COMMAND_FILE}{PARTIAL}"}
    others = sorted({p.name for p in out.iterdir()} - first) if out.is_dir() else []
    if others and not before:
        raise ConfigError(
            report(f"out={out} holds something else:", first_few(others, SHOWN), "another out.")
        )
    differ = [f"{k}: {before[k]} there, {v} here" for k, v in command.items() if before.get(k, v) != v]
    if differ:
        fix = "another out, or delete that one."
        raise ConfigError(report(f"{out} holds shards of another command:", differ, fix))


# ------------------------------------------------------------------ texts


TEXT, LINES = (".txt", ".md", ".py"), (".jsonl",)  # taken out of folders; a glob or a name takes any file
WILD = frozenset("*?[")
PIECE = 2**16  # characters of a text that are tokenised at once, and the rest of the line
NO_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as `surrogateescape` reads them


@dataclass(frozen=True)
class TextFile:
    """A file of text.

    Args:
        name: its path below the folder that was named, with forward slashes; whether it is held out follows
            from this name.
        size: its size in bytes.
        stamp: the time of its last change, in nanoseconds.
    """

    name: str
    path: Path
    size: int
    stamp: int

    @property
    def is_jsonl(self) -> bool:
        """Return whether each line is a document; otherwise the file is one document."""
        return self.path.suffix in LINES


def find_text(named: Sequence[str] | None) -> list[TextFile]:
    """Return the files of some folders, globs and names, in their order, and by name within each.

    A file that several of them name is returned once.

    Args:
        named: the folders, globs and names; None is Python's standard library, as the main job reads it.
    """
    if named is None:
        root = standard_library()
        return [_stat_file(name, root / name) for name in source_files(root)]
    files: dict[Path, TextFile] = {}
    wrong = []
    for each in named:
        paths = sorted(_list_files(each))
        if not paths:
            why = "matches no file" if WILD & set(each) else "no such file, or no text in it"
            wrong.append(f"{each}: {why}")
        for name, path in paths:
            files.setdefault(path.resolve(), _stat_file(name, path))
    if wrong:
        known = ", ".join(f"*{suffix}" for suffix in (*TEXT, *LINES))
        fix = f"name folders (their {known} are taken), globs in quotes, or files."
        raise ConfigError(report("no text where files says:", wrong, fix))
    return list(files.values())


def split_files(
    sources: Iterable[TextFile], percent: int, held_out: Sequence[str]
) -> dict[str, list[TextFile]]:
    """Return the files of each side, `{"train": ..., "held_out": ...}`, by a hash of their names or by globs.

    Args:
        percent: how many of a hundred files are held out, about.
        held_out: globs of the names of files that are held out; if there are any, they alone decide.
    """
    sides: dict[str, list[TextFile]] = {"train": [], "held_out": []}
    for source in sources:
        if held_out:
            is_held = any(PurePath(source.name).match(pattern) for pattern in held_out)
        else:
            is_held = is_held_out(source.name, percent)
        sides["held_out" if is_held else "train"].append(source)
    empty = [side for side, files in sides.items() if not sum(source.size for source in files)]
    if empty:
        fix = "files are held out whole: name more of them, another held_out_percent, or some as held_out."
        raise ConfigError(report("the files cannot be split:", [f"{side}: no text" for side in empty], fix))
    return sides


def _list_files(each: str) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the files of a folder, or of those that a glob or a name means."""
    root = Path(each)
    if root.is_dir():
        for path in root.rglob("*"):
            name = path.relative_to(root)
            is_hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.suffix in (*TEXT, *LINES) and not is_hidden and path.is_file():
                yield name.as_posix(), path
    else:
        # A file may have a name that is a glob, too.
        for path in map(Path, [each] if root.is_file() else glob.glob(each, recursive=True)):
            if path.is_file():
                yield path.name, path


def _stat_file(name: str, path: Path) -> TextFile:
    about = path.stat()
    return TextFile(name, path, about.st_size, about.st_mtime_ns)


def read_pieces(files: Sequence[TextFile]) -> Iterator[dict[str, Any]]:
    """Yield the text of files as rows, each with a `text`, whether it is the `end` of a document, and a
    `problem` with it."""
    for source in files:
        with source.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            read = _read_lines if source.is_jsonl else _read_document
            yield from read(source.path, file)


def _read_document(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    """Yield a text, which is one document, cut at ends of lines. Bytes that are no UTF-8 are replaced."""
    line = 1
    while text := file.read(PIECE):
        text += file.readline(PIECE)  # a line is cut only if it is longer than a piece
        wrong = NO_UTF8.search(text)
        problem = ""
        if wrong:
            # Only the first such byte of a piece is reported.
            number = line + text.count("\n", 0, wrong.start())
            problem = f"{path}:{number}: is no UTF-8 (byte 0x{ord(wrong[0]) - 0xDC00:02x})"
        yield {"text": NO_UTF8.sub("\N{REPLACEMENT CHARACTER}", text), "end": False, "problem": problem}
        line += text.count("\n")
    yield {"text": "", "end": True, "problem": ""}


def _read_lines(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the "text" of each line. An empty one is no document."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # fails on half a surrogate pair, and on what is no text
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f'is no object with a "text" ({type(error).__name__}: {error})'
            yield {"text": "", "end": False, "problem": f"{path}:{number}: {why}"}
        else:
            if text:
                yield {"text": text, "end": True, "problem": ""}
