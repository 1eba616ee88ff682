"""A look at a whole file before its lines are read: what it is where it holds no records, and the way out."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

from experiments.data.fields import kinds_of
from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError

KINDS = "JSONL (one object a line), a list of JSON, Parquet; or a folder of save_to_disk"
ONE, SEVERAL = "state.json", "dataset_dict.json"  # files in a folder of `save_to_disk`: one split, or several
PARQUET, BOM = b"PAR1", b"\xef\xbb\xbf"
WAY = "name a file of records: " + KINDS
JSONL = "write it as JSONL: one object a line"
BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (  # what a file begins with, what it is, the way out
    (b"\x1f\x8b", "is compressed by gzip", "gunzip it"),
    (b"BZh", "is compressed by bzip2", "bunzip2 it"),
    (b"\xfd7zXZ\0", "is compressed by xz", "unxz it"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "unzstd it"),
    (b"7z\xbc\xaf\x27\x1c", "is an archive of 7z", "unpack it, and name a file of records in it"),
    (
        b"PK\x03\x04",
        "is a zip archive (as xlsx, npz and .pt are)",
        "unpack it, and name a file of records in it",
    ),
    (b"version https://git-lfs", "is a pointer of Git LFS, not what it points to", "git lfs pull"),
    (b"\xff\xfe\0\0", "is UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    (b"\xff\xfe", "is UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    (b"\xfe\xff", "is UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    (b"ARROW1", "is an Arrow file", "name the folder of save_to_disk that it is in, or write Parquet"),
    (
        b"\xff\xff\xff\xff",
        "is a stream of Arrow",
        "name the folder of save_to_disk that it is in, or write Parquet",
    ),
    (b"ORC", "is an ORC file", "write it as Parquet"),
    (b"Obj\x01", "is an Avro file", "write it as Parquet"),
    (b"SQLite format 3", "is a database of SQLite", JSONL),
    (b"\x89HDF", "is an HDF5 file", JSONL),
    (b"\x93NUMPY", "is an array of NumPy", WAY),
    (b"\x80\x02", "is a pickle", JSONL),
    (b"\x80\x03", "is a pickle", JSONL),
    (b"\x80\x04", "is a pickle", JSONL),
    (b"\x80\x05", "is a pickle", JSONL),
    (b"GGUF", "holds a model's weights (GGUF)", WAY),
    (b"%PDF", "is a PDF", WAY),
    (b"\x89PNG", "is an image", WAY),
    (b"\xff\xd8\xff", "is an image", WAY),
)
LOOKED = 1 << 20  # bytes of the beginning that are looked at
WHOLE = 1 << 28  # bytes of a file that is read whole, where its lines are no objects, to say what it is
FEW = 5  # lines without any JSON say that there is none


def look(path: Path) -> None:
    """Refuse what is no file of records, in one error that says what it is.

    Raises:
        ConfigError: there is no such file; it is empty, compressed, of another format or coding, one object.
    """
    if os.path.isdir(path):  # False of a name that is too long, too
        if not ((path / ONE).is_file() or (path / SEVERAL).is_file()):
            raise ConfigError(f"{path}: {_folder(path)}")
        return
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file. Fix: name a file: {KINDS}.")
    try:
        with path.open("rb") as file:
            start = file.read(LOOKED)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Fix: {WAY}.") from error
    if start[: len(PARQUET)] == PARQUET:
        return
    if not start.removeprefix(BOM).strip():
        what = "there are no data in it" if start else "it is empty, with no data in it"
        raise ConfigError(f"{path} cannot be read: {what}. Fix: {WAY}.")
    if what := foreign(start) or _text(path, start):
        raise ConfigError(f"{path}: {what}")


def foreign(start: bytes) -> str:
    """Return what a file is that begins with some bytes, and the way out; "" of a text in UTF-8."""
    for beginning, what, way in BEGINNINGS:
        if start.startswith(beginning):
            return f"{what}. Fix: {way}."
    if len(start) > 16 and start[8:9] == b"{" and b"dtype" in start[:4096] and not start.startswith(b"{"):
        return f"holds a model's weights (safetensors). Fix: {WAY}."
    if wide := _wide(start):
        return f"is {wide} without a mark. Fix: iconv -f {wide} -t UTF-8 FILE > NEW."
    return f"is no text: it holds bytes that are 0. Fix: {WAY}." if b"\0" in start else ""


def _folder(path: Path) -> str:
    """Return what a folder is that `save_to_disk` did not write."""
    try:
        names = sorted(each.name for each in path.iterdir())
    except OSError as error:
        return f"is a folder that cannot be read ({error.strerror}). Fix: name a file: {KINDS}."
    files = [name for name in names if name.endswith((".jsonl", ".json", ".parquet"))]
    if "config.json" in names:
        return f"is a folder, and none of save_to_disk: it holds a model. Fix: name a file: {KINDS}."
    if "metadata.json" in names or any(name.endswith(".npy") for name in names):
        return f"is a folder, and none of save_to_disk: it holds tokens. Fix: name a file: {KINDS}."
    if len(files) == 1:
        return f"is a folder, and none of save_to_disk. Fix: name the file in it: {path / files[0]}."
    if files:
        few = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        return (
            f"is a folder, and none of save_to_disk. Fix: join its files ({few}) into one, and name a file."
        )
    return f"is a folder, and none of save_to_disk. Fix: name a file: {KINDS}."


def _wide(start: bytes) -> str:
    """Return the coding of a text whose every other byte is 0."""
    for coding, zeros, others in (
        ("UTF-16LE", start[1:512:2], start[:512:2]),
        ("UTF-16BE", start[:512:2], start[1:512:2]),
    ):
        if len(zeros) >= 2 and zeros.count(0) > 0.8 * len(zeros) and 0 not in others:
            return coding
    return ""


def _text(path: Path, start: bytes) -> str:
    """Return what a text is that holds no records, and the way out; "" where its lines may be objects."""
    is_cut = len(start) == LOOKED
    text = start.removeprefix(BOM).decode("utf-8", errors="replace").lstrip()
    lines = [line.strip() for line in text.split("\n") if line.strip()]  # a text may hold other separators
    if text.startswith("["):
        return _list(text, lines)
    if is_cut and len(lines) == 1 and text.startswith("{"):  # a record may be longer than what is looked at
        if path.stat().st_size > WHOLE:
            return ""
        with path.open("rb") as file:
            line = next(each for each in file if each.removeprefix(BOM).strip())
            is_alone = not file.read(LOOKED).strip()
        found = _object(line.removeprefix(BOM).decode("utf-8", errors="replace").strip())
        return _container(found) if found is not None and is_alone else ""
    if is_cut and len(lines) > 1:
        lines.pop()
    objects = [found for line in lines if (found := _object(line)) is not None]
    if objects:
        return _container(objects[0]) if len(lines) == 1 and not is_cut else ""
    if text.startswith("{"):  # one value over several lines, or none
        first, end = _value_at(text, 0)
        if first is None and is_cut and path.stat().st_size <= WHOLE:
            text = path.read_text("utf-8-sig", errors="replace").lstrip()
            first, end = _value_at(text, 0)
        rest = text[end:].lstrip()
        if isinstance(first, dict) and not rest and (what := _container(first)):
            return what
        if isinstance(first, dict) and not rest and not _kinds(first):
            names = ", ".join(map(repr, list(first)[:6]))
            return f"is one object of JSON, and no record ({names}). Fix: {JSONL}."
        if isinstance(first, dict) and rest.startswith(","):
            return "holds objects with commas between them. Fix: write [ before and ] behind them."
        if isinstance(first, dict):
            return "holds objects over several lines. Fix: write one object a line (jq -c . FILE > NEW)."
        if _is_python(lines[0]):
            return (
                "holds objects as Python prints them, in single quotes. Fix: write each line with json.dumps."
            )
        return ""
    if text.lower().startswith(("<!doctype", "<html", "<?xml")):
        return f"is a page of HTML or XML, as a failed download leaves one. Fix: {WAY}."
    for sign, name in {"\t": "TSV", ",": "CSV", ";": "CSV"}.items():
        columns = [column.strip().strip('"') for column in lines[0].split(sign)]
        if len(lines) > 1 and 1 < len(columns) <= 100 and all(c and len(c) < 40 for c in columns):
            way = "pandas.read_csv(FILE).to_json(NEW, orient='records', lines=True)"
            return f"is {name}, with the columns {', '.join(columns[:6])}. Fix: write it as JSONL: {way}."
    if not any(line[0] in '{["' for line in lines[:FEW]):
        return f'is plain text: no line is an object of JSON. Fix: {JSONL}, as {{"text": "..."}}.'
    return ""


def _list(text: str, lines: list[str]) -> str:
    """Return what a list of JSON is whose first element is no object; "" where lines are lists themselves."""
    if text[1:].lstrip().startswith("]"):
        return f"is an empty list of JSON. Fix: {WAY}." if len(lines) == 1 else ""
    first, end = _value_at(text, 1)
    is_whole_line = _value_at(lines[0], 0)[1] == len(lines[0])
    if end and not isinstance(first, dict) and len(lines) > 1 and not is_whole_line:
        return f"is a list of JSON, and not of objects. Fix: {JSONL}."
    return ""


def _value_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value of JSON that stands in a text, and where it ends; None and 0 where there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, len(text) - len(text[start:].lstrip()))
    except (ValueError, RecursionError):
        return None, 0


def _kinds(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds of data that a record may be of: what is wrong with it is said later, by its line."""
    try:
        return kinds_of(record)
    except (LineError, RecursionError):
        return ("samples",)


def _container(whole: dict[str, Any]) -> str:
    """Return where in an object the records are; "" where it may be one itself."""
    names = ", ".join(map(repr, list(whole)[:6]))
    if whole and all(isinstance(v, list) and v and isinstance(v[0], str) for v in whole.values()):
        way = "pandas.read_json(FILE).to_json(NEW, orient='records', lines=True)"
        return (
            f"is one object of JSON, with a list for each column ({names}). Fix: write one a record: {way}."
        )
    if _kinds(whole):
        return ""
    listed = [
        n for n, v in whole.items() if isinstance(v, list) and v and all(isinstance(e, dict) for e in v)
    ]
    if any({"role", "from"} & turn.keys() for name in listed for turn in whole[name]):
        return (
            f"is one object of JSON, and no record ({names}). Fix: call its messages 'messages', and {JSONL}."
        )
    if len(listed) == 1:
        many = len(whole[listed[0]])
        return f"is one object of JSON, whose {listed[0]!r} lists {many} records. Fix: write that list alone."
    if whole and all(isinstance(value, dict) for value in whole.values()):
        return f"is one object of JSON, with a record under each name ({names}). Fix: write them as a list."
    return ""


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_python(line: str) -> bool:
    try:
        return isinstance(ast.literal_eval(line), dict)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
