"""The data of a fine-tuning job, tokenised, and prompts to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

import fnshard as fs
from experiments.configs.train import ConfigError
from experiments.data.batches import place_of
from experiments.data.builtin import choice_file, pair_files, sft_files
from experiments.data.loader import PackedLoader, PairLoader
from experiments.data.prepared import Prepared, open_prepared, prepare
from experiments.data.tokenizer import Tokenizer, load_tokenizer
from experiments.finetune.config import FinetuneConfig
from experiments.training.sample import safe

DATA = Path("outputs", "data")
MOST_SHOWN = 600  # characters of one stretch of a sample that is shown
OPENING = 32  # tokens of plain text that are shown as a prompt
HELD_OUT_EVERY = 20  # of a file that has no other beside it, one line in so many
KINDS = {"sft": "samples", "dpo": "pairs"}  # of data, by objective
BUILT_IN: dict[str, Callable[[Path], tuple[Path, Path]]] = {"sft": sft_files, "dpo": pair_files}


@dataclass(frozen=True)
class Example:
    """A held-out prompt, and its author's answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class FinetuneData:
    """Data that is tokenised already."""

    tokenizer: Tokenizer
    train: Prepared
    held_out: Prepared
    choices: Prepared | None

    def loader(self, config: FinetuneConfig, mesh: fs.Mesh) -> PackedLoader | PairLoader:
        how = {"rows": config.data.rows, "seed": config.run.seed, **place_of(mesh)}
        if self.train.kind == "pairs":
            return PairLoader(self.train, **how)
        return PackedLoader(self.train, **how, pack=config.data.pack)

    def examples(self, count: int) -> list[Example]:
        """Prompts from all over the held-out data; of pairs with the chosen answer."""
        step = 2 if self.held_out.kind == "pairs" else 1
        there = self.held_out.samples // step
        numbers = np.unique(np.linspace(0, there - 1, min(count, there)).astype(int)) * step
        return [self._example(int(n)) for n in numbers]

    def shown(self, colour: bool = False) -> str:
        """The first sample of the training data as the model sees it, of pairs both; see `marked`."""
        numbers = range(2 if self.train.kind == "pairs" else 1)
        return "\n".join(marked(self.tokenizer, *self.train.sample(n), colour=colour) for n in numbers)

    def _example(self, number: int) -> Example:
        tokens, learned = self.held_out.sample(number)
        first = max(1, int(np.argmax(learned)))
        if learned[0] or (first == 1 and tokens[0] == self.tokenizer.bos):  # plain text: what it begins with
            first = max(1, min(len(tokens) // 2, OPENING))
        behind = np.flatnonzero(learned[first:] == 0)
        last = first + int(behind[0]) if len(behind) else len(tokens)
        return Example(tokens[:first].tolist(), tokens[first:last].tolist())


def marked(tokenizer: Tokenizer, tokens: np.ndarray, learned: np.ndarray, *, colour: bool = False) -> str:
    """A sample's text with its control tokens; what is learned stands between « and », the rest is not.

    Args:
        tokens, learned: as `Prepared.sample` gives them. The first is never a target.
        colour: what is learned is green, too, as terminals take it.

    >>> from experiments.data.tokenizer import byte_tokenizer
    >>> marked(byte_tokenizer(), np.array([256, 104, 105, 257]), np.array([0, 0, 1, 1]))
    '<|begin|>h«i<|end|>»'
    """
    out, targets = [], [False, *map(bool, learned[1:])]
    for is_target, group in groupby(zip(targets, tokens.tolist(), strict=True), key=itemgetter(0)):
        text = safe(tokenizer.decode([token for _, token in group], control=True))
        text = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} [{len(text) - MOST_SHOWN} more] "
        green = f"\x1b[32m«{text}»\x1b[0m" if colour else f"«{text}»"
        out.append(green if is_target else text)
    return "".join(out)


def prepared(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with folders of tokenised data in the place of files. Its model is a directory.

    Raises:
        ConfigError: a file that cannot be read, and all lines of it that cannot be used.
    """
    tokenizer, data = load_tokenizer(config.model), config.data
    kind, cache = KINDS[config.objective.name], (DATA / "prepared").resolve()
    how: dict[str, Any] = {
        "context": data.context, "cache": cache, "broken": data.broken, "too_long": data.too_long,
    }  # fmt: skip
    train, held_out, choices = data.train, data.held_out, data.choices
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if train is None:
        made = BUILT_IN[config.objective.name]((DATA / "stdlib").resolve())
        train, held_out = map(str, made)
        choices = choices or str(choice_file((DATA / "stdlib").resolve()))
    elif held_out is None:
        held_out, parts = train, tuple({"part": (HELD_OUT_EVERY, side)} for side in (False, True))
    files: dict[str, tuple[str | None, str, dict[str, Any]]] = {
        "train": (train, kind, parts[0]), "held_out": (held_out, kind, parts[1]),
        "choices": (choices, "choices", {}),
    }  # fmt: skip
    folders, wrong = dict.fromkeys(files), []
    for name, (path, of, part) in files.items():
        try:
            if path is not None:
                folders[name] = str(prepare([path], tokenizer, kind=of, **part, **how).folder)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:  # one of both parts of a file is one
        raise ConfigError("\n".join(dict.fromkeys(wrong)))
    return replace(config, data=replace(data, **folders))


def opened(config: FinetuneConfig) -> FinetuneData:
    data = config.data
    choices = None if data.choices is None else open_prepared(data.choices)
    train, held_out = open_prepared(data.train), open_prepared(data.held_out)
    return FinetuneData(load_tokenizer(config.model), train, held_out, choices)
