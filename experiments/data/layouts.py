"""Layouts: the ways in which records lie in files, each read as numbered lines of JSON; what a line holds.

JSONL is read line by line, lists of JSON as a whole; Parquet files and folders of `save_to_disk` by Hugging
Face's `datasets`, which is imported where one of them is named.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.files import size_of
from fnshard.errors import MissingExtraError

LONGEST = 2**26  # bytes; a longer "line" is some other file, which would fill the memory
MARK = b"\xef\xbb\xbf"  # what some editors write in front of UTF-8


class LineError(ValueError):
    """A line cannot be used; the message says why."""


def read_lines(path: Path, watch: Callable[[bytes], Any]) -> Iterator[tuple[int, bytes]]:
    """Numbers from 1 and bytes of the lines that are not blank.

    At most `LONGEST` + 1 bytes of a line are handed out; `parse` refuses such a one.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            watch(line)
            if number == 1:
                line = line.removeprefix(MARK)
            rest = line
            while len(rest) > LONGEST and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST + 1)
                watch(rest)
            if line.strip():
                yield number, line


def parse(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    >>> parse(b'{"text": "a"}')
    {'text': 'a'}
    """
    if len(line) > LONGEST:
        raise LineError(f"is longer than {LONGEST // 2**20} MiB; is this JSONL?")
    try:
        found = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise LineError(f"is no UTF-8 ({wrong})") from error
    except json.JSONDecodeError as error:
        raise LineError(f"is no JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise LineError(f"is no JSON that can be read ({error})") from error
    if not isinstance(found, dict):
        raise LineError(f"holds a {type(found).__name__}, expected an object: {{...}}")
    return found


OPENING = 4096  # bytes of a file that are looked at to tell its layout
BLOCK = 2**20  # bytes of a file that are read at once
LARGEST_LIST_bytes = 2**30  # a list of JSON is read at once
PARQUET = b"PAR1"
ONE, SEVERAL = "state.json", "dataset_dict.json"  # in a folder of one split, and above several


def files_of(path: Path) -> list[Path]:
    """The files that a name of data means: itself, or all that `save_to_disk` has written into the folder."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def blocks_of(path: Path) -> Iterator[bytes]:
    for each in files_of(path):
        with each.open("rb") as file:
            while block := file.read(BLOCK):
                yield block


def _plain(value: Any) -> Any:
    """What JSON has no word for: dates and bytes that are text as text; of others their type, for messages.

    >>> [_plain(value) for value in (datetime.date(2024, 7, 26), b"text", bytes([255]))]
    ['2024-07-26', 'text', {'bytes': None}]
    """
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    try:
        return value.decode()
    except (AttributeError, UnicodeDecodeError):
        return {type(value).__name__: None}


def is_saved(path: Path) -> bool:
    return (path / ONE).is_file() or (path / SEVERAL).is_file()


def lines_of(path: Path, watch: Callable[[bytes], Any]) -> Iterator[tuple[int, bytes]]:
    """Numbers from 1 and JSON of all records; of JSONL the lines as they are, without blank ones.

    Args:
        watch: is shown every byte of the files.

    Raises:
        ConfigError: a file is not what it begins as.
        MissingExtraError: `datasets` reads it, and is not installed.
    """
    read = next((read for fits, read in LAYOUTS if fits(path)), None)
    if read is None:
        yield from read_lines(path, watch)
        return
    for number, record in enumerate(read(path), 1):
        yield number, json.dumps(record, default=_plain).encode()
    for block in blocks_of(path):
        watch(block)


# ------------------------------------------------------------------ one each


def _is_list(path: Path) -> bool:
    begin = _opening(path).removeprefix(MARK).split(maxsplit=1)
    return b"".join(begin)[:2] in (b"[", b"[{", b"[]")


def _list(path: Path) -> Sequence[Any]:
    try:
        size_of(path, LARGEST_LIST_bytes)
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} begins as a list of JSON and is none: {error}. Fix: JSONL.") from error
    return found


def _is_parquet(path: Path) -> bool:
    return _opening(path).startswith(PARQUET)


def _parquet(path: Path) -> Iterator[Any]:
    datasets = _datasets(path)
    return _rows_of(
        path,
        lambda: datasets.load_dataset("parquet", data_files=[str(path)], split="train", streaming=True),
    )


def _saved(path: Path) -> Iterator[Any]:
    """Of several splits the one that is called train; another is named as a folder of its own."""
    datasets = _datasets(path)
    if (path / SEVERAL).is_file():
        splits = sorted(p.name for p in path.iterdir() if (p / ONE).is_file())
        if "train" not in splits:
            raise ConfigError(
                f"{path} has no split train; it has {', '.join(splits) or 'none'}. Fix: name one, "
                f"{path / (splits or ['train'])[0]}."
            )
        path = path / "train"
    return _rows_of(path, lambda: datasets.load_from_disk(str(path)))


def _rows_of(path: Path, opened: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """A table has all columns in every row; what a row does not have is null there, and is left out."""
    try:
        for row in opened():
            yield {name: value for name, value in row.items() if value is not None}
    except Exception as error:  # the library and those below it raise errors of every kind
        raise ConfigError(f"{path} cannot be read by datasets: {type(error).__name__}: {error}.") from error


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is read by datasets, which is not installed. Fix: pip install fnshard[datasets]."
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _opening(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(OPENING)


Read = Callable[[Path], Iterable[Any]]
LAYOUTS: tuple[tuple[Callable[[Path], bool], Read], ...] = (
    (is_saved, _saved),
    (_is_parquet, _parquet),
    (_is_list, _list),
)
