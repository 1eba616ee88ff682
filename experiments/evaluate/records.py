"""Records: one mapping for each question of a benchmark's file, whatever kind of file it is.

It may be JSONL, a list of JSON, CSV with or without a header, or Parquet, which its beginning shows.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.data.rows import PARQUET
from experiments.lib.checks import ConfigError
from fnshard.errors import MissingExtraError

Record = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HEADERLESS = (6, 12)  # the columns of a row without a header: a question, four or ten choices, the letter


class RecordError(ValueError):
    """An error of a record that cannot be a question. Its message says why."""


def read_records(path: Path) -> Iterator[tuple[str, Record | RecordError]]:
    """Yield the place of each record ("line 3") with the record, or with an error that says why there is
    none.

    Raises:
        ConfigError: there is no such file, or it is of another kind.
    """
    if not os.path.isfile(path):  # False of a name that is too long, too
        what = "is a folder. Fix: name a file in it" if os.path.isdir(path) else "there is no such file"
        raise ConfigError(f"{path}: {what}.")
    data = path.read_bytes()
    if data.startswith(PARQUET):
        yield from _read_parquet(path)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: is no UTF-8 ({error.reason}).") from None
    begin, suffix = text.lstrip()[:1], path.suffix.lower()
    if suffix == ".csv" or (begin not in "[{" and not suffix.startswith(".json")):
        yield from _read_csv(text)
    elif begin == "[":
        yield from _read_json_list(text)
    else:
        yield from _read_json_lines(text)


def _read_json_lines(text: str) -> Iterator[tuple[str, Record | RecordError]]:
    """Yield the records of a file of JSON, one on each line."""
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other separators of lines
        if not line.strip():
            continue
        try:
            yield f"line {number}", _check_object(json.loads(line))
        except RecursionError:
            yield f"line {number}", RecordError("is JSON that is nested too deeply")
        except ValueError as error:
            why = f"is no JSON ({error}); expected one object on each line"
            yield f"line {number}", RecordError(why)


def _check_object(value: Any) -> Record | RecordError:
    """Return a value that is an object, or the error that it is none."""
    if isinstance(value, dict):
        return value
    return RecordError(f"expected an object, got {type(value).__name__}")


def _read_json_list(text: str) -> Iterator[tuple[str, Record | RecordError]]:
    """Yield the records of a file that is one list of JSON."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        yield "the file", RecordError(f"is no list of JSON ({why})")
        return
    for number, value in enumerate(values, 1):
        yield f"record {number}", _check_object(value)


def _read_parquet(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows of a table without their nulls, since a table gives each row all fields."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fix = "pip install 'fnshard[finetune]'"
        raise MissingExtraError(f"{path} is Parquet, and pyarrow is not installed. Fix: {fix}.") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: is damaged: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", {name: value for name, value in row.items() if value is not None}


def _read_csv(text: str) -> Iterator[tuple[str, Record | RecordError]]:
    """Yield the rows of a file by the names of its header. MMLU's files have none, and are read by places."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    columns = 0  # the number of columns of every row, which the first one that is not blank has
    while True:
        line = rows.line_num + 1  # a row may take several lines
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"line {line}", RecordError(f"is no CSV ({error})")
            return
        if not any(cell.strip() for cell in row):
            continue
        # The first row is a header, or says how many columns there are.
        if not columns:
            header = _find_header(row)
            columns = len(row) if header or len(row) in HEADERLESS else HEADERLESS[0]
            if header:
                continue
        if len(row) != columns:
            names = header or ["question", *LETTERS[: columns - 2], "letter"]
            note = "" if header else "; other numbers of choices need a header"
            cells = " | ".join(f"{cell:.40}" for cell in row)
            why = f"expected {columns} columns ({', '.join(names)}), got {len(row)}: {cells}{note}"
            yield f"line {line}", RecordError(why)
        elif header:
            yield f"line {line}", dict(zip(header, row, strict=True))
        else:
            question, *choices, letter = row
            yield f"line {line}", {"question": question, "choices": choices, "answer": letter.strip()}


def _find_header(row: list[str]) -> list[str] | None:
    """Return the names of a header's columns as the formats spell them; None if the row is no header."""
    names = [cell.strip() for cell in row]
    lower = [name.lower() for name in names]
    if "answer" not in lower or not {"question", "prompt"} & set(lower):
        return None
    # Columns of choices are capital letters, and a prompt is the question unless there is one.
    header = []
    for name in names:
        if len(name) == 1 and name.isalpha():
            header.append(name.upper())
        elif name.lower() == "prompt" and "question" not in lower:
            header.append("question")
        else:
            header.append(name.lower())
    return header
