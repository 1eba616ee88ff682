"""Real examples every machine has: functions of the standard library and what their authors say they do.

A prompt is a signature and an opened docstring, the response the docstring's summary of one line:

    def basename(p):
        \"\"\"Returns the final component of a pathname

Files are held out by their names, as for the main job; what both sides have in common is not held out.
"""

from __future__ import annotations

import ast
import json
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.data.stdlib_text import is_held_out, source_files, standard_library

HELD_OUT_PERCENT = 10
MOST = {False: 2000, True: 200}  # functions, held out or not
MOST_TEXTS = {False: 12_000, True: 400}  # functions of plain text
LONGEST = 240  # bytes of prompt and response
SHORTEST = 12  # characters of a response; "Run." teaches nothing


@dataclass(frozen=True)
class Function:
    """A documented function: its signature with the docstring opened, the docstring's summary, and the
    first line of its code."""

    prompt: str
    summary: str
    code: str


def sft_files(folder: str | Path) -> tuple[Path, Path]:
    folder = Path(folder)
    train, held_out = _functions(False), _functions(True)
    return (
        _write(folder / "train.jsonl", ({"prompt": f.prompt, "response": f.summary} for f in train)),
        _write(folder / "held_out.jsonl", ({"prompt": f.prompt, "response": f.summary} for f in held_out)),
    )


def pair_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_pairs.jsonl` and `held_out_pairs.jsonl`: chosen is the docstring; rejected is the first
    line of the function's code, which a model that knows nothing of docstrings writes next."""
    folder = Path(folder)
    lines = (
        [{"prompt": f.prompt, "chosen": f.summary, "rejected": f.code} for f in _functions(side) if f.code]
        for side in (False, True)
    )
    names = ("train_pairs.jsonl", "held_out_pairs.jsonl")
    train, held_out = (_write(folder / name, content) for name, content in zip(names, lines, strict=True))
    return train, held_out


@lru_cache(maxsize=2)
def _functions(held_out: bool) -> tuple[Function, ...]:
    """Distinct functions of one side, from files in the order of a hash of their names: a mixture."""
    root = standard_library()
    names = [n for n in source_files(root) if is_held_out(n, HELD_OUT_PERCENT) == held_out]
    known = {(f.prompt, f.summary) for f in _functions(False)} if held_out else set()
    found: dict[str, Function] = {}
    for name in sorted(names, key=lambda n: sha256(n.encode()).digest()):
        for function in _of_file(root / name):
            if (
                function.prompt,
                function.summary,
            ) not in known:  # `close` of two classes may be
                found.setdefault(function.prompt, function)
        if len(found) >= MOST[held_out]:
            break
    return tuple(found.values())[: MOST[held_out]]


def _of_file(path: Path) -> Iterator[Function]:
    for node in _functions_in(_parsed(path)[1]):
        paragraph = (ast.get_docstring(node) or "").strip().partition("\n\n")[0]
        summary = "" if "\n" in paragraph else paragraph.strip()  # one whole sentence, as a rule
        prompt = f'def {node.name}({ast.unparse(node.args)}):\n    """'
        if len(summary) >= SHORTEST and len((prompt + summary).encode()) <= LONGEST:
            code = ast.unparse(node.body[1]).partition("\n")[0] if len(node.body) > 1 else ""
            yield Function(prompt, summary, code if len((prompt + code).encode()) <= LONGEST else "")


def _parsed(path: Path) -> tuple[str, ast.Module]:
    """A file's text and what it is; nothing of those that are there to be broken."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old files
            return source, ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return "", ast.Module([], [])


def _functions_in(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Of modules and classes; those inside functions are left out."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions_in(node)


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """All or nothing: another job may be reading, or writing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")
    partial.write_text(
        "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8"
    )
    partial.replace(path)
    return path


# ------------------------------------------------------------------ plain text, for a tiny base


def text_files(folder: Path) -> tuple[Path, Path]:
    """Write `text.jsonl` and `held_out_text.jsonl`: functions without docstrings, a line each."""
    train, held_out = (({"text": text} for text in _bodies(side)) for side in (False, True))
    return _write(folder / "text.jsonl", train), _write(folder / "held_out_text.jsonl", held_out)


def _bodies(held_out: bool) -> list[str]:
    root, texts = standard_library(), []
    for name in source_files(root):
        if is_held_out(name, HELD_OUT_PERCENT) == held_out:
            texts += _bodies_of(root / name)
        if len(texts) >= MOST_TEXTS[held_out]:
            break
    return texts[: MOST_TEXTS[held_out]]


def _bodies_of(path: Path) -> Iterator[str]:
    source, module = _parsed(path)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            left_out = {n for inner in ast.walk(node) for n in _docstring_lines(inner)}
            kept = [lines[n - 1] for n in range(node.lineno, node.end_lineno + 1) if n not in left_out]
            yield textwrap.dedent("".join(kept))


def _docstring_lines(node: ast.AST) -> range:
    """They are left out: what a base has not seen, tuning shows."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
        return range(0)
    return range(node.body[0].lineno, node.body[0].end_lineno + 1)
