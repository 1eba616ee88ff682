"""Materials: what a fine-tuning job works on: its data, tokenised, and prompts to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fnshard as fs
from experiments.data.builtin import choice_file, pair_files, sft_files
from experiments.data.loader import PackedLoader, PairLoader
from experiments.data.prepared import Prepared, open_prepared, prepare
from experiments.data.tokenizer import Tokenizer, load_tokenizer
from experiments.finetune.config import FinetuneConfig

DATA = Path("outputs", "data")
OPENING = 32  # tokens of plain text that are shown as a prompt
HELD_OUT_EVERY = 20  # of a file that has no other beside it, one line in so many
KINDS = {"sft": "samples", "dpo": "pairs"}  # of data, by objective
BUILT_IN: dict[str, Callable[[Path], tuple[Path, Path]]] = {"sft": sft_files, "dpo": pair_files}


@dataclass(frozen=True)
class Example:
    """A held-out prompt, and what its author goes on with."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Materials:
    """Data that is tokenised already."""

    tokenizer: Tokenizer
    train: Prepared
    held_out: Prepared
    choices: Prepared | None

    def loader(self, config: FinetuneConfig, mesh: fs.Mesh) -> PackedLoader | PairLoader:
        """This rank's batches, from the first step on."""
        how = {"rows": config.data.rows, "seed": config.run.seed, "rank": mesh.rank, "ranks": mesh.size}
        if self.train.kind == "pairs":
            return PairLoader(self.train, **how)
        return PackedLoader(self.train, **how, pack=config.data.pack)

    def examples(self, count: int) -> list[Example]:
        """Prompts from all over the held-out data; of pairs with the chosen answer."""
        step = 2 if self.held_out.kind == "pairs" else 1
        there = self.held_out.samples // step
        numbers = np.unique(np.linspace(0, there - 1, min(count, there)).astype(int)) * step
        return [self._example(int(n)) for n in numbers]

    def _example(self, number: int) -> Example:
        tokens, learned = self.held_out.sample(number)
        first = max(1, int(np.argmax(learned)))
        if learned[0] or (first == 1 and tokens[0] == self.tokenizer.bos):  # plain text: what it begins with
            first = max(1, min(len(tokens) // 2, OPENING))
        behind = np.flatnonzero(learned[first:] == 0)
        last = first + int(behind[0]) if len(behind) else len(tokens)
        return Example(tokens[:first].tolist(), tokens[first:last].tolist())


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
    folders = {
        "train": prepare([train], tokenizer, kind=kind, **parts[0], **how).folder,
        "held_out": prepare([held_out], tokenizer, kind=kind, **parts[1], **how).folder,
        "choices": None if choices is None else prepare([choices], tokenizer, kind="choices", **how).folder,
    }
    named = {name: None if folder is None else str(folder) for name, folder in folders.items()}
    return replace(config, data=replace(data, **named))


def opened(config: FinetuneConfig) -> Materials:
    """What `prepared` has left; every rank maps it."""
    data = config.data
    choices = None if data.choices is None else open_prepared(data.choices)
    train, held_out = open_prepared(data.train), open_prepared(data.held_out)
    return Materials(load_tokenizer(config.model), train, held_out, choices)
