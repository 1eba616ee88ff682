"""The text files that folders, globs and names mean, each with a name that is the same on any machine; and
their text, in pieces."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TextIO

from experiments.configs.train import ConfigError
from experiments.data.stdlib_text import is_held_out, source_files, standard_library
from fnshard.errors import report

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
