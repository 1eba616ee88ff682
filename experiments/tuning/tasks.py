"""Tasks: the built-in prompts that are rewarded, and what their answers are worth."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.files import write_lines

HELD_OUT, DRAWN = 12, 8000  # one problem in so many; of the others so many are drawn
_MAKE = re.compile(r"make (\d+): (\d)(\d)=")
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def task_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_tasks.jsonl` and `held_out_tasks.jsonl`, which share no problem: digits reversed, sorted,
    summed, and two numbers of which a third is made (as in countdown)."""
    held_out, train = _problems()
    return _written(folder, "train_tasks", train), _written(folder, "held_out_tasks", held_out)


def warming_files(folder: str | Path) -> tuple[Path, Path]:
    """Write the same problems as a careless hand answers them: of five answers in six the last character
    lacks."""
    held_out, train = _problems()
    draw = random.Random(1)
    careless = [(prompt, answer if draw.random() < 1 / 6 else answer[:-1]) for prompt, answer in train]
    careless = [(prompt, answer) for prompt, answer in careless if answer]
    return _written(folder, "train_warming", careless), _written(folder, "held_out_warming", held_out)


def _problems() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """One in `HELD_OUT` of all problems, and draws of the others, as many of each kind."""
    draw, held_out, kinds = random.Random(0), [], []
    for kind in (_reversed, _sorted, _summed, _made):
        problems = list(dict(kind()).items())
        draw.shuffle(problems)
        share = len(problems) // HELD_OUT
        held_out += problems[:share]
        kinds.append(problems[share:])
    return held_out, [draw.choice(kinds[number % len(kinds)]) for number in range(DRAWN)]


def _digits(count: int, base: int) -> Iterator[str]:
    return map("".join, itertools.product(map(str, range(base)), repeat=count))


def _reversed() -> Iterator[tuple[str, str]]:
    return ((f"rev {text}=", text[::-1]) for text in _digits(3, 10))


def _sorted() -> Iterator[tuple[str, str]]:
    return ((f"sort {text}=", "".join(sorted(text))) for text in _digits(3, 10))


def _summed() -> Iterator[tuple[str, str]]:
    return ((f"sum {text}=", str(sum(map(int, text)))) for text in _digits(3, 7))


def _made() -> Iterator[tuple[str, str]]:
    for small, large in itertools.combinations_with_replacement(range(1, 10), 2):
        for sign in "+-*" if small * large > 18 else "+-":  # which of them it is shows in the number
            yield f"make {_OPERATORS[sign](large, small)}: {small}{large}=", f"{large}{sign}{small}"


def _written(folder: str | Path, name: str, problems: list[tuple[str, str]]) -> Path:
    records = ({"prompt": prompt, "response": response} for prompt, response in problems)
    return write_lines(Path(folder, f"{name}.jsonl"), records)


def _makes(text: str, target: int, numbers: list[str]) -> bool:
    """Return whether an expression of these numbers, each once, is the target. Only + - * are evaluated."""
    if not re.fullmatch(r"[\d+\-* ()]{1,40}", text) or sorted(re.findall(r"\d+", text)) != numbers:
        return False
    try:
        return _value(ast.parse(text, mode="eval").body) == target
    except (SyntaxError, KeyError, AttributeError, RecursionError):
        return False


def _value(node: Any) -> int:
    if isinstance(node, ast.Constant):
        return node.value
    operator = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
    return _OPERATORS[operator](_value(node.left), _value(node.right))


def solved(prompts: Sequence[str], answers: Sequence[str], rows: Sequence[Mapping[str, str]]) -> list[float]:
    """A reward: 1 for the record's response, and for any expression that makes the number."""
    return [float(_is_right(*each)) for each in zip(prompts, answers, rows, strict=True)]


def _is_right(prompt: str, answer: str, row: Mapping[str, str]) -> bool:
    task = _MAKE.search(prompt)
    if task is None:
        return answer.strip() == row["response"].strip()
    return _makes(answer.strip(), int(task[1]), sorted(task.groups()[1:]))
