"""Tasks: the built-in prompts that are rewarded, and what their answers are worth."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.data.files import write_text

TASK_REWARDS = ["solved", {"name": "places", "weight": 0.5}]  # the second leads to the first
PROBLEMS = {"train": 8000, "held_out": 200}
_MAKE = re.compile(r"make (\d+): (\d)(\d)=")
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def task_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_tasks.jsonl` and `held_out_tasks.jsonl`, which share no problem: digits reversed, sorted,
    summed, and two numbers of which a third is made (as in countdown)."""
    draw, folder = random.Random(0), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{side}_tasks.jsonl" for side in PROBLEMS]
    held_out: dict[str, str] = {}
    while len(held_out) < PROBLEMS["held_out"]:
        held_out.setdefault(*_problem(draw, len(held_out) % 4))
    every = (_problem(draw, number % 4) for number in itertools.count())
    train = itertools.islice((each for each in every if each[0] not in held_out), PROBLEMS["train"])
    for path, problems in zip(paths, (train, held_out.items()), strict=True):
        lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in problems]
        write_text(path, "\n".join(lines) + "\n")
    return paths[0], paths[1]


def _problem(draw: random.Random, kind: int) -> tuple[str, str]:
    digits = [str(draw.randrange(10)) for _ in range(3)]
    text = "".join(digits)
    if kind == 0:
        return f"rev {text}=", text[::-1]
    if kind == 1:
        return f"sort {text}=", "".join(sorted(digits))
    if kind == 2:
        small = [draw.randrange(5) for _ in range(4)]
        return f"sum {''.join(map(str, small))}=", str(sum(small))
    small, large = sorted(draw.randrange(1, 10) for _ in range(2))
    sign = draw.choice("+-*" if small * large > 18 else "+-")  # which of them it is shows in the number
    return f"make {_OPERATORS[sign](large, small)}: {small}{large}=", f"{large}{sign}{small}"


def _makes(text: str, target: int, numbers: list[str]) -> bool:
    """Whether an expression of these numbers, each once, is the target. Only + - * are evaluated."""
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
