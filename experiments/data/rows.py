"""Rows: files of records as a `datasets.Dataset`, and maps over it in several processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError
from fnshard.errors import MissingExtraError

Dataset = Any  # `datasets.Dataset`
ONE, SEVERAL = "state.json", "dataset_dict.json"  # files in a folder of `save_to_disk`: one split, or several
PARQUET, BOM = b"PAR1", b"\xef\xbb\xbf"
PEEKED = 1 << 20  # bytes at the beginning of a file that `readable` looks at
# Columns of files of JSON, whose records have fields of all kinds; no table has such names.
LINE, JSON = "line of the file", "json of the line"
DEEPEST = 100  # lists and objects inside each other
ROWS_A_PROCESS = 4096  # fewer rows are mapped sooner than another process starts


def import_datasets() -> Any:
    """Import the package `datasets`, so set up that it fetches nothing.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            "data are read and tokenised by datasets, which is not installed. Fix: pip install "
            "fnshard[finetune]."
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def readable(path: str | Path) -> Path:
    """Check that data begin as records do, and return their path. Each record is checked later, with its
    line.

    Raises:
        ConfigError: there is no such file or folder, it is empty, or begins as something else.
    """
    path, wrong = Path(path), ""
    if os.path.isdir(path):  # False of a name that is too long, too
        if not ((path / ONE).is_file() or (path / SEVERAL).is_file()):
            wrong = "is a folder, and none of save_to_disk"
    elif not os.path.isfile(path):
        wrong = "there is no such file"
    else:
        try:
            with path.open("rb") as file:
                start = file.read(PEEKED).removeprefix(BOM).strip()
            if not start:
                wrong = "there are no data in it"
            elif not start.startswith((PARQUET, b"{", b"[")):
                wrong = f"holds no records, it begins with {start[:16]!r}"
        except OSError as error:
            wrong = f"cannot be read ({error.strerror})"
    if wrong:
        raise ConfigError(
            f"{path}: {wrong}. Fix: name a file of records: JSONL (one object a line), a list of JSON, "
            "Parquet; or a folder of save_to_disk."
        )
    return path


def rows_of(path: Path, work: Path) -> Dataset:
    """Open the rows of a file, of which `record_of` reads the records.

    Args:
        path: JSONL, a list of JSON, Parquet, or a folder of `save_to_disk`, whose split "train" is taken if
            it has several.
        work: a folder for what `datasets` writes.

    Raises:
        ConfigError: the file is not what it begins as.
    """
    datasets = import_datasets()
    try:
        if path.is_dir():
            name = path / "train" if (path / SEVERAL).is_file() else path
            return _keep_encoded(datasets.load_from_disk(str(name)))
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET
        if is_parquet:
            return _keep_encoded(datasets.Dataset.from_parquet(str(path), cache_dir=str(work)))
        # Each line of JSON is kept as bytes, since a table would give all records the same fields and types.
        features = datasets.Features({LINE: datasets.Value("int64"), JSON: datasets.Value("large_binary")})
        rows = {"gen_kwargs": {"path": str(path)}, "features": features, "cache_dir": str(work)}
        return datasets.Dataset.from_generator(_read_json_records, **rows)
    except Exception as error:  # the library and those below it raise errors of every kind
        cause = error.__cause__ or error
        raise ConfigError(f"{path} cannot be read: {type(cause).__name__}: {cause}.") from error


def _keep_encoded(rows: Dataset) -> Dataset:
    """Return a table whose images and sounds are paths and bytes, so that reading a row opens none of
    them."""
    datasets = import_datasets()
    for name, feature in rows.features.items():
        inner = feature.feature if isinstance(feature, datasets.List) else feature
        if getattr(inner, "decode", False) is True:
            plain = replace(inner, decode=False)
            rows = rows.cast_column(name, datasets.List(plain) if inner is not feature else plain)
    return rows


def _read_json_records(path: str) -> Iterator[dict[str, Any]]:
    """Yield the number and the JSON of each record of a list of JSON, or of each line of JSONL."""
    with open(path, "rb") as file:
        words = file.read(4096).removeprefix(BOM).split()
        file.seek(0)
        # These begin a list of objects, and another "[" a line of JSONL.
        if words and words[0][:2] in (b"[", b"[{", b"[]"):
            for number, record in enumerate(json.load(file), 1):
                yield {LINE: number, JSON: json.dumps(record).encode()}
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield {LINE: number, JSON: line}


def is_json(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a file of JSON, and not of a table."""
    return row.keys() == {LINE, JSON}


def line_of(row: Mapping[str, Any], index: int) -> int:
    """Return the number, from 1, of a row's line in a file of JSON, or of its record in a table."""
    return row[LINE] if is_json(row) else index + 1


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read the record of a row, without the fields for which a table has no value.

    Raises:
        LineError: its JSON is broken, or no object.
    """
    if not is_json(row):
        record = {name: value for name, value in row.items() if value is not None}
        _check_values(record)
        return record
    try:
        record = json.loads(row[JSON])
    except (ValueError, RecursionError) as error:
        raise LineError(f"is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise LineError(f"holds a {type(record).__name__}, expected an object: {{...}}")
    _check_values(record)
    return record


def _check_values(record: Mapping[str, Any]) -> None:
    """Refuse a record with half a surrogate pair, which no file of results could hold, or with too much
    depth."""
    # Values are searched level by level and not by recursion, which would fail on what is nested too deeply.
    # Each value comes with the name of its field.
    level, depth = [(name, (name, value)) for name, value in record.items()], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise LineError(f"{level[0][0]}: is nested more than {DEEPEST} deep")
        below = []
        for name, value in level:
            if isinstance(value, Mapping):  # its keys are texts, too
                below += [(name, each) for pair in value.items() for each in pair]
            elif isinstance(value, list | tuple):
                below += [(name, each) for each in value]
            elif isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
                said = name.encode("utf-8", "backslashreplace").decode()
                raise LineError(f"{said}: holds half of a surrogate pair")
        level = below


def map_rows(rows: Dataset, function: Callable[..., Any], features: Mapping[str, Any], file: Path) -> Dataset:
    """Map a function over rows and their indices, in as many processes as are worth their start.

    Args:
        features: {column of the result: the name of its type, in a list for each level of lists}.
        file: the file that keeps the result.
    """
    datasets = import_datasets()

    def make_type(kind: Any) -> Any:
        return datasets.List(make_type(kind[0])) if isinstance(kind, list) else datasets.Value(kind)

    columns = datasets.Features({name: make_type(kind) for name, kind in features.items()})
    # Count the cores that this process may use, which can be fewer than the machine has.
    processes = min(len(os.sched_getaffinity(0)), len(rows) // ROWS_A_PROCESS)
    return rows.map(
        function, with_indices=True, remove_columns=rows.column_names, features=columns,
        num_proc=processes if processes > 1 else None, cache_file_name=str(file), new_fingerprint=file.stem,
        desc="tokenising",
    )  # fmt: skip
