"""The text files that folders, globs and names mean, each with a name that is the same on any machine."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from experiments.configs.train import ConfigError
from experiments.data.stdlib_text import is_held_out, source_files, standard_library
from fnshard.errors import report

TEXT, LINES = (".txt", ".md", ".py"), (".jsonl",)  # taken out of folders; a glob or a name takes any file
WILD = frozenset("*?[")


@dataclass(frozen=True)
class TextFile:
    """One file of text.

    Args:
        name: relative to what was named, with forward slashes; whether the file is held out hangs on it.
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
        try:
            paths = sorted(_named(each))
            if not paths:
                wrong.append(f"{each}: {_nothing(Path(each))}")
            for name, path in paths:
                found.setdefault(path.resolve(), _source(name, path))
        except OSError as error:
            wrong.append(f"{each}: {error.strerror or error}")
    if wrong or not found:
        known = ", ".join(f"*{suffix}" for suffix in (*TEXT, *LINES))
        fix = f"name folders (their {known} are taken), globs in quotes, or files."
        raise ConfigError(report("no text where files says:", wrong or ["files is empty"], fix))
    return list(found.values())


def split(sources: Iterable[TextFile], percent: int, held_out: Sequence[str]) -> dict[str, list[TextFile]]:
    """`{"train": ..., "held_out": ...}`: by a hash of each file's name, or as globs say.

    Args:
        percent: of the files that are held out, about.
        held_out: globs of names; where there are some, they alone decide.
    """
    sides: dict[str, list[TextFile]] = {"train": [], "held_out": []}
    idle = set(held_out)
    for source in sources:
        matching = {glob for glob in held_out if PurePath(source.name).match(glob)}
        idle -= matching
        held = bool(matching) if held_out else is_held_out(source.name, percent)
        sides["held_out" if held else "train"].append(source)
    if not held_out:  # of few files none, or all, may have been drawn: the smallest changes sides
        for empty, full in (("held_out", "train"), ("train", "held_out")):
            some = sorted((s for s in sides[full] if s.size), key=lambda s: (s.size, s.name))
            if len(some) > 1 and not sum(s.size for s in sides[empty]):
                sides[full].remove(some[0])
                sides[empty].append(some[0])
    wrong = [f"held_out={glob}: matches no file" for glob in held_out if glob in idle]
    for side, files in sides.items():
        if not sum(source.size for source in files):
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            wrong.append(f"{side}: no text in {count}")
    if wrong:
        fix = "files are held out whole: name more of them, another held_out_percent, or some as held_out."
        raise ConfigError(report("the files cannot be split:", wrong, fix))
    return sides


def _named(each: str) -> Iterator[tuple[str, Path]]:
    path = Path(each)
    if path.is_dir():
        yield from _below(path)
    elif path.is_file():
        yield path.name, path
    elif WILD & set(each):
        fixed = Path(*_fixed(path.parts))
        for match in map(Path, glob.glob(each, recursive=True)):
            if match.is_file():
                yield match.relative_to(fixed).as_posix(), match


def _fixed(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if WILD & set(part):
            return
        yield part


def _below(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        for file in files:
            path = Path(folder, file)
            if path.suffix in (*TEXT, *LINES) and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _nothing(path: Path) -> str:
    if path.is_dir():
        return f"a folder without {', '.join((*TEXT, *LINES))}"
    return "matches no file" if WILD & set(str(path)) else "no such file or folder"


def _source(name: str, path: Path) -> TextFile:
    about = path.stat()
    return TextFile(name, path, about.st_size, about.st_mtime_ns)
