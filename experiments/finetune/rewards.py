"""Rewards: functions (prompts, answers, rows) -> a number for each answer; and the tasks that are built in.

`rows`: the records, `{"prompt": ..., "response": ...}`. A reward of one's own is named by `_target_`.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.files import write_text
from fnshard.errors import report

Rows = Sequence[Mapping[str, str]]
Reward = Callable[[Sequence[str], Sequence[str], Rows], Sequence[float]]


def exact(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """1 for the record's response, but for the blanks around it."""
    return [float(a.strip() == row["response"].strip()) for a, row in zip(answers, rows, strict=True)]


def number(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """1 where the last number of an answer is the last one of the record's response (GSM8K's measure)."""
    found = [(_last_number(a), _last_number(row["response"])) for a, row in zip(answers, rows, strict=True)]
    return [float(mine is not None and mine == theirs) for mine, theirs in found]


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(found[-1].replace(",", "")) if found else None


def form(prompts: Sequence[str], answers: Sequence[str], rows: Rows, *, pattern: str) -> list[float]:
    """1 for an answer that a regular expression matches as a whole."""
    return [float(re.fullmatch(pattern, answer.strip(), re.DOTALL) is not None) for answer in answers]


def length(prompts: Sequence[str], answers: Sequence[str], rows: Rows, *, most: int) -> list[float]:
    """1 for an answer of at most so many characters, less by the share that it is longer."""
    return [min(1.0, most / max(len(answer), 1)) for answer in answers]


def solved(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Of the built-in tasks: as `exact`, and any expression that makes the number is right."""
    right = exact(prompts, answers, rows)
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if task := _MAKE.search(prompt):
            right[place] = float(_makes(answer.strip(), int(task[1]), sorted(task[2].split())))
    return right


REWARDS: Mapping[str, Reward] = {"exact": exact, "number": number, "format": form, "length": length,
                                 "solved": solved}  # fmt: skip


def reward_of(chosen: str | Mapping[str, Any]) -> Reward:
    """A reward by its name, or by a mapping of `_target_` (or `name`) and its arguments.

    Raises:
        ConfigError: there is none of this name, it does not import, or takes other arguments.
    """
    chosen = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    if "_target_" in chosen:
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate

        try:
            return instantiate(chosen, _partial_=True)
        except InstantiationException as error:
            raise ConfigError(f"objective.reward: {str(error).splitlines()[0]}") from error
    name = chosen.pop("name", None)
    if name not in REWARDS:
        raise ConfigError(
            f"objective.reward={name}: one of {', '.join(REWARDS)}, or a mapping with _target_."
        )
    return partial(REWARDS[name], **chosen)


def rewarded(reward: Reward, prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """One finite number for each answer.

    Raises:
        ConfigError: the reward gives something else, by prompt; or raises.
    """
    try:
        found = reward(prompts, answers, rows)
        numbers = [float(value) for value in found]
    except Exception as error:  # the user's own code
        raise ConfigError(f"objective.reward: {type(error).__name__}: {error}") from error
    if len(numbers) != len(prompts):
        what = f"{len(numbers)} numbers for {len(prompts)} answers"
        raise ConfigError(f"objective.reward: {what}, the first of them to {prompts[0]!r}.")
    wrong = [f"{prompts[n]!r} -> {answers[n]!r}: {v}" for n, v in enumerate(numbers) if not math.isfinite(v)]
    if wrong:
        raise ConfigError(report("objective.reward: numbers that are not finite:", wrong[:10]))
    return numbers


# ------------------------------------------------------------------ built-in tasks

PROBLEMS = {"train": 8000, "held_out": 200}
_MAKE = re.compile(r"make (-?\d+) of ((?:\d+ ?)+)=")
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def task_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_tasks.jsonl` and `held_out_tasks.jsonl`, which share no problem: digits reversed, sorted,
    summed, and two numbers of which a third is made."""
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
    digits = [str(draw.randrange(10)) for _ in range(4)]
    text = "".join(digits)
    if kind == 0:
        return f"reverse {text}=", text[::-1]
    if kind == 1:
        return f"sort {text}=", "".join(sorted(text))
    if kind == 2:
        return f"sum {text[:3]}=", str(sum(map(int, text[:3])))
    one, other = (draw.randrange(1, 10) for _ in range(2))
    sign = draw.choice("+-*")
    return (
        f"make {_OPERATORS[sign](one, other)} of {min(one, other)} {max(one, other)}=",
        f"{one}{sign}{other}",
    )


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
