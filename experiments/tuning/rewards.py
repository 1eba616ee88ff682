"""Rewards: functions (prompts, answers, rows) -> a number for each answer.

`prompts` are texts; those that a chat template has rendered have their control tokens. `answers` are texts
without control tokens; for a reward that says `control: true` they have all of them, the end of the answer
included. `rows` are the records with all of their fields, among these

- `prompt` and `response`, texts; "" if the record has no response;
- `messages`, the conversation that asks for the answer; a text makes one message of a user, and one that a
  chat template has rendered makes None;
- `conversation`, the same with the answer at its end, whose control tokens are spelled.

Your own reward is named by `_target_`. The directory of a model is a reward, too.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.data.builtin import is_solution
from experiments.data.fields import words_of
from experiments.data.model_files import LOCAL, WEIGHTS, check_reward_model, quiet, read_model_config
from experiments.data.records import last_number
from experiments.lib.checks import TARGET, ConfigError, describe
from experiments.lib.files import first_few
from experiments.lib.task import make_target
from fnshard.errors import report

AT_ONCE = 64  # the most conversations that a reward model reads at once
Rows = Sequence[Mapping[str, Any]]
Reward = Callable[[Sequence[str], Sequence[str], Rows], Sequence[float]]


def exact(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Give 1 for the record's response, whatever blanks are around it."""
    return [float(a.strip() == row["response"].strip()) for a, row in zip(answers, rows, strict=True)]


def number(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Give 1 if the last number of an answer is the last one of the record's response (GSM8K's measure)."""
    pairs = [(last_number(a), last_number(row["response"])) for a, row in zip(answers, rows, strict=True)]
    return [float(mine is not None and mine == theirs) for mine, theirs in pairs]


def form(prompts: Sequence[str], answers: Sequence[str], rows: Rows, *, pattern: str) -> list[float]:
    """Give 1 for an answer that a regular expression matches as a whole."""
    return [float(re.fullmatch(pattern, answer.strip(), re.DOTALL) is not None) for answer in answers]


def length(prompts: Sequence[str], answers: Sequence[str], rows: Rows, *, most: int) -> list[float]:
    """Give 1 for an answer of at most so many characters, and less in proportion for a longer one."""
    return [min(1.0, most / max(len(answer), 1)) for answer in answers]


def places(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Give the share of an answer's characters that are at the same place in the record's response."""
    shares = []
    for answer, row in zip(answers, rows, strict=True):
        response = row["response"]
        equal = sum(map(str.__eq__, answer, response))
        shares.append(equal / max(len(answer), len(response), 1))
    return shares


def solved(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Give 1 for the record's response, and for any expression that makes the number."""
    triples = zip(prompts, answers, rows, strict=True)
    return [float(is_solution(prompt, answer, row["response"])) for prompt, answer, row in triples]


REWARDS: Mapping[str, Reward] = {"exact": exact, "number": number, "format": form, "length": length,
                                 "places": places, "solved": solved}  # fmt: skip
NEEDS = {"exact": "response", "places": "response", "solved": "response", "number": "number"}


@dataclass(frozen=True)
class Weighted:
    """A reward, its name in metrics and its weight in the sum.

    Args:
        control: whether it reads answers with their control tokens.
    """

    name: str
    reward: Reward
    weight: float = 1.0
    control: bool = False


def needs_of(chosen: Any) -> tuple[str, ...]:
    """Return the names, in `records.NEEDS`, of what the records' own answers have to hold for these
    rewards."""
    every = chosen if isinstance(chosen, list | tuple) else [chosen]
    names = [each.get("name") if isinstance(each, Mapping) else each for each in every]
    return tuple(sorted({NEEDS[name] for name in names if name in NEEDS}))


def make_rewards(chosen: Any, device: torch.device | str = "cpu") -> tuple[Weighted, ...]:
    """Make one reward or a list of them.

    Each is chosen by name, by a mapping of `_target_` (or `name`), `weight`, `control` and arguments, or by
    the directory of a model.

    Args:
        device: the device of models.

    Raises:
        ConfigError: there is no reward of a name, it does not import or takes other arguments, there is no
            such model, or two have one name.
    """
    every = chosen if isinstance(chosen, list | tuple) else [chosen]
    rewards = tuple(_make_reward(each, device) for each in every)
    names = [each.name for each in rewards]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"objective.reward: rewards of different names, not {', '.join(names) or 'none'}.")
    return rewards


def _make_reward(chosen: str | Mapping[str, Any], device: torch.device | str) -> Weighted:
    # What remains of `options` in the end are the arguments of the reward.
    options = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    weight = options.pop("weight", 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"objective.reward: weight={weight}: expected a number.")
    control = options.pop("control", False)
    if not isinstance(control, bool):
        raise ConfigError(f"objective.reward: control={control}: expected true or false.")

    # The user's own function.
    if TARGET in options:
        reward = make_target("objective.reward", options, partly=True)
        return Weighted(options[TARGET].rpartition(".")[2], reward, weight, control)

    # The directory of a model.
    name = str(options.pop("name", None))
    if os.path.isdir(name):  # False of a name that is too long, too
        if control:
            options["control"] = control
        if options:
            said = ", ".join(options)
            raise ConfigError(
                f"objective.reward={name}: {said}: a model reads the conversation in its own chat template. "
                "Fix: leave it out; name and weight are known."
            )
        return Weighted(Path(name).name, make_model_reward(name, device), weight)

    # A function of this module, whose arguments are checked before any answer is drawn.
    if name not in REWARDS:
        raise ConfigError(
            f"objective.reward={name:.200}: one of {', '.join(REWARDS)}, a mapping with _target_, or "
            "the directory of a model that gives a number."
        )
    try:
        inspect.signature(REWARDS[name]).bind((), (), (), **options)
        re.compile(options.get("pattern", ""))
        if "most" in options and (type(options["most"]) is not int or options["most"] < 1):
            raise TypeError("most: expected a whole number from 1")
    except (TypeError, re.error, RecursionError, OverflowError) as error:
        said = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"objective.reward={name}: {error}; said was {said or 'nothing'}.") from None
    return Weighted(name, partial(REWARDS[name], **options), weight, control)


def make_model_reward(folder: str, device: torch.device | str) -> Reward:
    """Make a reward of a reward model of transformers, a sequence classifier with one label.

    Each rank holds it whole. It reads the conversation in its own chat template.

    Raises:
        ConfigError: the directory holds no such model.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_reward_model(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        config = read_model_config(Path(folder))
        with quiet():  # what is missing is said below
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder, config=config, output_loading_info=True, **WEIGHTS
            )
    except Exception as error:  # the files may hold anything, so errors are of every kind
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"objective.reward={folder}: {line}") from error
    if model.config.num_labels != 1:
        raise ConfigError(f"objective.reward={folder}: it has {model.config.num_labels} labels; expected: 1.")
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            report(
                f"objective.reward={folder}: it is no reward model; its files lack",
                missing,
                fix="name one, which `python -m experiments.finetune objective=reward` makes.",
            )
        )
    model.to(device).eval().requires_grad_(False)

    # Transformers finds the ends of several rows by the padding token, so without one rows are read singly.
    at_once = 1 if model.config.get_text_config().pad_token_id is None else AT_ONCE

    def encode(prompt: str, answer: str, row: Mapping[str, Any]) -> torch.Tensor:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        turns = row.get("conversation") or turns
        if isinstance(turns, str):  # a text that a chat template has rendered
            ids = tokenizer(turns, add_special_tokens=False, return_tensors="pt")["input_ids"]
            if not set(ids[0].tolist()) & set(tokenizer.all_special_ids):
                raise ConfigError(
                    f"objective.reward={folder}: the records hold texts of another chat template. "
                    "Fix: write them as messages, of which the reward model's own template makes its text."
                )
            return ids
        turns = [{**turn, "content": words_of(turn)} for turn in turns]
        if tokenizer.chat_template:
            return tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
        if len(turns) > 2:
            raise ConfigError(
                f"objective.reward={folder}: it has no chat template, and a prompt is one of several "
                "messages. Fix: write one into its tokenizer_config.json, or take prompts that are texts."
            )
        return tokenizer("".join(turn["content"] for turn in turns), return_tensors="pt")["input_ids"]

    def reward(prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
        every = [encode(*each) for each in zip(prompts, answers, rows, strict=True)]
        numbers = [math.nan] * len(every)
        # Only conversations of one length share a batch, so that none is padded.
        by_length: dict[int, list[int]] = defaultdict(list)
        for n, ids in enumerate(every):
            by_length[ids.shape[1]].append(n)
        for equally_long in by_length.values():
            for low in range(0, len(equally_long), at_once):
                batch = equally_long[low : low + at_once]
                logits = model(torch.cat([every[n] for n in batch]).to(model.device)).logits
                for n, value in zip(batch, logits[:, 0].tolist(), strict=True):
                    numbers[n] = value
        return numbers

    return reward


def run_reward(reward: Reward, prompts: Sequence[str], answers: Sequence[str], rows: Rows) -> list[float]:
    """Compute one finite number for each answer.

    Raises:
        ConfigError: the reward raises, or gives something else, which is named with its prompt.
    """
    try:
        values = list(reward(prompts, answers, rows))
    except ConfigError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(f"objective.reward: {describe(error)}") from error
    if len(values) != len(prompts):
        what = f"{len(values)} numbers for {len(prompts)} answers"
        raise ConfigError(f"objective.reward: {what}, the first of them to {_shorten(prompts[0])}.")
    numbers, wrong = [], []
    for prompt, answer, value in zip(prompts, answers, values, strict=True):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError):
            wrong.append(f"{_shorten(prompt)} -> {_shorten(answer)}: {_shorten(value)}")
    if wrong:
        raise ConfigError(report("objective.reward: expected numbers, got:", first_few(wrong, 10)))
    wrong = [
        f"{_shorten(prompts[n])} -> {_shorten(answers[n])}: {v}"
        for n, v in enumerate(numbers)
        if not math.isfinite(v)
    ]
    if wrong:
        raise ConfigError(report("objective.reward: numbers that are not finite:", first_few(wrong, 10)))
    return numbers


def _shorten(value: Any) -> str:
    """Shorten a value for an error. The end of a prompt says more than its beginning."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:40]}...{text[-77:]}"
