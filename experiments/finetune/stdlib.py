"""Plain text for a tiny base: functions of the standard library without docstrings, a line of JSONL each."""

from __future__ import annotations

import ast
import json
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from experiments.data.stdlib_text import is_held_out, source_files, standard_library

HELD_OUT_PERCENT = 10
MOST = {False: 12_000, True: 400}  # functions


def text_files(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for held, name in ((False, "text.jsonl"), (True, "held_out_text.jsonl")):
        partial = folder / f"{name}.{uuid4().hex[:8]}.partial"
        lines = (json.dumps({"text": text}) + "\n" for text in _functions(held))
        partial.write_text("".join(lines), encoding="utf-8")
        os.replace(partial, folder / name)
        made.append(folder / name)
    return made[0], made[1]


def _functions(held_out: bool) -> list[str]:
    root = standard_library()
    texts: list[str] = []
    for name in source_files(root):
        if is_held_out(name, HELD_OUT_PERCENT) == held_out:
            texts += _of_file(root / name)
        if len(texts) >= MOST[held_out]:
            break
    return texts[: MOST[held_out]]


def _of_file(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old files
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # some files are there to be broken
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            told = {n for inner in ast.walk(node) for n in _docstring(inner)}
            kept = [lines[n - 1] for n in range(node.lineno, node.end_lineno + 1) if n not in told]
            yield textwrap.dedent("".join(kept))


def _docstring(node: ast.AST) -> range:
    """Its lines. They are left out: what a base has not seen, tuning shows."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
        return range(0)
    told = node.body[0]
    return range(told.lineno, told.end_lineno + 1)
