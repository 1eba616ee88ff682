"""The data of a fine-tuning job, their batches, and prompts whose answers people see.

A packed batch has samples of many lengths in rows of one length. It is a dict of int64 [B, T]: `tokens`;
`targets`, already shifted (the token after each, or IGNORE at prompts, padding and the end of a sample);
`positions`, from 0 in every sample; and `documents`, the sample of its row to which a position belongs, from
1, with 0 for padding. A position may attend to earlier ones of its own document.

A budget of tokens (`data.tokens`) fixes the positions of a micro-batch in the place of a batch's rows. Packed
rows are as wide as the budget or a part of it; padded ones share it, as many as it holds.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.data.builtin import (
    write_answer_files,
    write_image_files,
    write_label_files,
    write_pair_files,
    write_sft_files,
    write_task_files,
    write_twin_files,
    write_word_files,
)
from experiments.data.chat import encode_chat_prompt, encode_rendered, is_rendered
from experiments.data.loader import Loader, order, place_of
from experiments.data.prepared import (
    SIDES,
    Prepared,
    RecordPolicy,
    find_classes,
    open_prepared,
    prepare,
)
from experiments.data.tokenizer import DirectoryTokenizer, Tokenizer, open_directory
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.config import AUTO, MULTIPLE, RunConfig
from experiments.lib.decoder import Sampler, printable
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.rewards import needs_of
from experiments.tuning.vision import Vision
from fnshard.errors import report
from fnshard.losses import IGNORE

DATA = Path("outputs", "data")
MOST_SHOWN = 600  # the most characters that are shown of one stretch of a sample
OPENING = 32  # the first tokens of a plain text, which are shown as a prompt
SHOWN = 4  # the held-out prompts that are shown
BUILT_IN: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "samples": write_sft_files, "pairs": write_pair_files, "prompts": write_task_files,
    "answers": write_answer_files, "labels": write_label_files, "words": write_word_files,
    "twins": write_twin_files, "images": write_image_files,
}  # fmt: skip

DOCUMENTS = 250  # the most documents of a row, since CUDA's kernel takes 256
USUAL_DOCUMENTS = 200  # a budget that would hold more documents is cut into several rows

Batch = dict[str, Tensor]

# ------------------------------------------------------------------ batches


def pack(lengths: np.ndarray, context: int, most: int = DOCUMENTS) -> list[list[int]]:
    """Pack samples into rows of their numbers, by best fit with the longest samples first.

    Each sample occurs once, and no row is longer than `context` or has more than `most` samples.

    >>> pack(np.array([3, 9, 6, 1, 4, 6]), context=10)
    [[1], [2, 0, 3], [5, 4]]
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(context + 1)]  # rows by the room that they have left
    rooms = 0  # a set of bits: bit n is 1 if some row has exactly n positions left
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        # Take the fullest row that has room enough, or a new one.
        fits = rooms >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1  # the lowest bit is the least room
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(sample)

        # A row that is full, or has `most` samples, is not offered again.
        if room > length and len(rows[row]) < most:
            by_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows


def width_of(prepared: Prepared) -> int:
    """Return the positions of a row that is not packed.

    They are the least multiple of 32 that holds every sample, but no more than the context.
    """
    return min(-(-prepared.longest // MULTIPLE) * MULTIPLE, prepared.context)


def next_tokens(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Return the targets of a sample's positions: the token after each, if that is learned."""
    return np.where(learned[1:], ids[1:].astype(np.int64), IGNORE)


def classes_here(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Return the targets of a sample's positions: the class of the text or word that ends at each."""
    return np.where(learned[:-1], learned[:-1].astype(np.int64) - 1, IGNORE)


def last_position(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Return the targets of a sample's positions: 0 at the last one."""
    return np.where(np.arange(len(ids) - 1) == len(ids) - 2, 0, IGNORE)


TARGETS = {"next": next_tokens, "classes": classes_here, "ends": last_position}


def fill_rows(prepared: Prepared, rows: Sequence[Sequence[int]], width: int, kind: str = "next") -> Batch:
    """Make a packed batch of rows of samples; int64 [rows, width] each.

    Args:
        kind: a name of `TARGETS`.
    """
    tokens = np.full((len(rows), width), prepared.pad, np.int64)
    targets = np.full_like(tokens, IGNORE)
    documents = np.zeros_like(tokens)
    positions = np.zeros_like(tokens)
    for row, samples in enumerate(rows):
        end = 0
        for document, sample in enumerate(samples, 1):
            ids, learned = prepared.sample(sample)
            start, end = end, end + len(ids) - 1  # a sample's last token is only a target
            tokens[row, start:end] = ids[:-1]
            targets[row, start:end] = TARGETS[kind](ids, learned)
            documents[row, start:end] = document
            positions[row, start:end] = np.arange(end - start)
        positions[row, end:] = np.arange(width - end)
    parts = {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}
    return {name: torch.from_numpy(values) for name, values in parts.items()}


@dataclass(frozen=True)
class Samples:
    """The rows of prepared data, for a `Loader`.

    A batch of pairs is `{"chosen": {tokens, targets}, "rejected": {tokens, targets}}`, int64 [B, T] each,
    padded on the right to the one width of all batches. Rows of one sample each have no `documents`, so that
    attention keeps its causal kernel. With `tokens` pairs are packed, too. Pair n of a row is its documents
    2n - 1, the chosen one, and 2n, and bool [B, N] `pairs` is True for pairs that are no padding.

    Args:
        pack: whether rows have several samples and the context's width. Otherwise each has one sample and the
            width `width_of(prepared)`. The same samples share a row in every epoch.
        images: `fn(paths of each row's images, tokens)`, which makes a batch's `images`. Rows have one sample
            each then.
        tokens: the budget of a micro-batch, whose rows are `at_once`.
        targets: a name of `TARGETS`.
    """

    prepared: Prepared
    pack: bool = True
    images: Callable[[list[list[str]], Tensor], Batch] | None = None
    tokens: int | None = None
    targets: str = "next"

    @property
    def packed(self) -> bool:
        return self.pack and self.images is None and (self.tokens is not None or not self._has_pairs)

    @property
    def _has_pairs(self) -> bool:
        return self.prepared.kind in SIDES

    @cached_property
    def at_once(self) -> int:
        """Count the rows of a micro-batch under a budget of tokens.

        A packed micro-batch has one, unless that would hold too many documents.
        """
        if not self.packed:
            return self.tokens // width_of(self.prepared)
        usual = self.tokens * self.prepared.samples / self.prepared.tokens / USUAL_DOCUMENTS
        longest = int(self.record_lengths.max())
        # `width` is rounded down to a multiple, and the longest record has to fit into it.
        return max(1, min(math.ceil(usual), self.tokens // (longest + MULTIPLE)))

    @property
    def width(self) -> int:
        if not self.packed:
            return width_of(self.prepared)
        if self.tokens is None:
            return self.prepared.context
        return self.tokens // self.at_once // MULTIPLE * MULTIPLE

    @property
    def count(self) -> int:
        return len(self._rows) if self.packed else self.prepared.records

    @property
    def key(self) -> Mapping[str, Any]:
        budget = {} if self.tokens is None else {"tokens": self.tokens}
        return {"data": self.prepared.key, "context": self.prepared.context, "pack": self.pack, **budget}

    def batch(self, numbers: np.ndarray) -> tuple[Any]:
        """Return rows by number. A negative number makes a row of padding."""
        # Padded pairs: each side is a batch of its own, without what only packed rows need.
        if self._has_pairs and not self.packed:
            sides: dict[str, Any] = {}
            for side, name in enumerate(SIDES[self.prepared.kind]):
                samples = [[2 * n + side] if n >= 0 else [] for n in numbers.tolist()]
                filled = fill_rows(self.prepared, samples, self.width, self.targets)
                sides[name] = {part: filled[part] for part in ("tokens", "targets")}
            if self._has_numbers:
                sides["numbers"] = torch.from_numpy(numbers.astype(np.int64))
            return (sides,)

        # Packed rows: their samples, or both samples of each of their pairs.
        if self.packed:
            rows = [self._rows[n] if n >= 0 else [] for n in numbers.tolist()]
            if not self._has_pairs:
                return (fill_rows(self.prepared, rows, self.width, self.targets),)
            samples = [[2 * n + side for n in row for side in (0, 1)] for row in rows]
            batch = fill_rows(self.prepared, samples, self.width, self.targets)
            # All batches have room for the most pairs of any row, so that their shapes are equal.
            counts = torch.tensor([len(row) for row in rows])[:, None]
            most = max(map(len, self._rows))
            batch["pairs"] = torch.arange(most) < counts
            if self._has_numbers:
                batch["numbers"] = torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows])
            return (batch,)

        # Padded rows of one sample each, with its images.
        samples = [[n] if n >= 0 else [] for n in numbers.tolist()]
        batch = fill_rows(self.prepared, samples, self.width, self.targets)
        del batch["documents"]
        if self.images is not None:
            paths = [self.prepared.images_of(n) if n >= 0 else [] for n in numbers.tolist()]
            batch["images"] = self.images(paths, batch["tokens"])
        return (batch,)

    @property
    def positions(self) -> int:
        """Count the positions of a row, padding included. A padded pair has two sides."""
        return self.width * (2 if self._has_pairs and not self.packed else 1)

    def rows_for(self, rows: int) -> int:
        """Return the number of rows that hold as much as `rows` do without a budget of tokens."""
        if self.tokens is None or not self.packed:
            return rows
        if self._has_pairs:
            return math.ceil(rows * self.count / self.prepared.records)
        return math.ceil(rows * self.prepared.context / self.width)

    def one_pass(self, rows: int, most: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        """Yield batches of `rows` for a held-out loss, equally many on every rank.

        It yields at most `most` rows, each once. Rows of padding, which no mean counts, fill the last batch.
        """
        rows_per_rank = rows // ranks
        numbers = order(self.count, 0, 0, min(most, self.count))
        for low in range(0, len(numbers), rows):
            mine = numbers[low : low + rows][rank * rows_per_rank : (rank + 1) * rows_per_rank]
            yield self.batch(np.pad(mine, (0, rows_per_rank - len(mine)), constant_values=-1))[0]

    @property
    def _has_numbers(self) -> bool:
        """Return whether a batch has the numbers of its records.

        By these a loss knows texts of the same record, which are no negatives of each other.
        """
        return self.prepared.kind == "twins"

    @cached_property
    def record_lengths(self) -> np.ndarray:
        """Return the number of positions of each record. Those of a pair's two sides are added."""
        lengths = self.prepared.lengths(np.arange(self.prepared.samples))
        return lengths.reshape(-1, 2).sum(1) if self._has_pairs else lengths

    @cached_property
    def _rows(self) -> list[list[int]]:
        return pack(self.record_lengths, self.width, DOCUMENTS // 2 if self._has_pairs else DOCUMENTS)


# ------------------------------------------------------------------ the data of a run


@dataclass(frozen=True)
class Example:
    """A held-out prompt, and its author's answer.

    Args:
        row: the record of the prompt, as rewards are given it.
    """

    prompt: list[int]
    answer: list[int]
    images: Sequence[str] = ()
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompts:
    """Samples by their numbers alone, for a `Loader`. Their answers are drawn when they are needed."""

    prepared: Prepared

    @property
    def count(self) -> int:
        return self.prepared.records

    @property
    def key(self) -> Mapping[str, Any]:
        return {"data": self.prepared.key, "prompts": True}

    def batch(self, numbers: np.ndarray) -> tuple[torch.Tensor]:
        return (torch.from_numpy(numbers.astype(np.int64)),)


@dataclass(frozen=True)
class FinetuneData:
    """The data of a run, which are tokenised already.

    Args:
        rows: the rows of batches.
        measured: the rows of the held-out loss.
    """

    tokenizer: DirectoryTokenizer
    train: Prepared
    held_out: Prepared
    rows: Samples | Prompts
    measured: Samples

    def loader(self, config: FinetuneConfig, mesh: fs.Mesh) -> Loader:
        """Make the loader of rows, or of the numbers of prompts."""
        is_budget = isinstance(self.rows, Samples) and self.rows.tokens is not None
        rows = config.data.rows * (self.rows.at_once if is_budget else 1)
        place, repeat = place_of(mesh), config.objective.updates
        return Loader(self.rows, rows, config.run.seed, **place, repeat=repeat)

    @property
    def budget(self) -> str:
        """Say in words what the rows of a budget of tokens hold."""
        rows = self.rows
        if not isinstance(rows, Samples):
            return "as many micro-batches as a step's answers take"
        real = int(rows.record_lengths.sum())
        empty = 1 - real / (rows.count * rows.positions)
        return f"{rows.at_once} x {rows.width} positions a micro-batch, {empty:.1%} of all are padding"

    def examples(self, run: RunConfig, limit: int | None) -> list[Example]:
        """Return prompts from all over the held-out data, and after them the one that `run.prompt` names.

        A prompt of a pair has the chosen answer. The one of `run.prompt` is a user's message if the model
        learns conversations. The result is empty if no token is to be drawn.

        Args:
            limit: the tokens that the model was made for. Longer prompts lose their beginning.
        """
        if not run.sample_length:
            return []
        samples_per_record = 2 if self.held_out.kind in SIDES else 1
        count = self.held_out.records
        records = np.unique(np.linspace(0, count - 1, min(SHOWN, count)).astype(int))
        examples = [self.example(self.held_out, int(n)) for n in records * samples_per_record]
        if run.prompt is not None:
            examples.append(Example(self._encode_prompt(run.prompt), []))
        if limit is None:
            return examples
        most = max(1, limit - run.sample_length)
        # A prompt without its beginning would lack an image.
        examples = [each for each in examples if not each.images or len(each.prompt) <= most]
        return [replace(each, prompt=each.prompt[-most:]) for each in examples]

    def images_of(self, examples: Sequence[Example], width: int, device: torch.device) -> tuple[Any, ...]:
        """Return the images of prompts in rows of `width` tokens, as `LanguageModel.hidden` takes them."""
        if self.measured.images is None or not examples:
            return ()
        tokens = torch.zeros(len(examples), width, dtype=torch.int64)
        for row, example in zip(tokens, examples, strict=True):
            row[: len(example.prompt)] = torch.tensor(example.prompt)
        images = self.measured.images([list(example.images) for example in examples], tokens)
        return ({name: part.to(device) for name, part in images.items()},)

    def show_first(self, colour: bool = False) -> str:
        """Return the first sample of the training data as the model sees it, or both of a pair
        (`mark_learned`)."""
        numbers = range(2 if self.train.kind in SIDES else 1)
        return "\n".join(mark_learned(self.tokenizer, *self.train.sample(n), colour=colour) for n in numbers)

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Encode a prompt in the form in which the model has learned prompts."""
        if is_rendered(self.tokenizer, prompt):
            return encode_rendered(self.tokenizer, prompt, [])[0].tolist()
        if self.train.chats:
            return encode_chat_prompt(self.tokenizer, [{"role": "user", "content": prompt}])
        return [*self.tokenizer.begin, *self.tokenizer.encode(prompt)]

    def example(self, data: Prepared, number: int) -> Example:
        """Return a sample's prompt with its answer."""
        tokens, learned = data.sample(number)
        start = np.argmax(learned) if learned.any() else np.int64(len(tokens))  # a prompt without an answer
        first = int(self._prompt_lengths(start, np.int64(len(tokens))))
        # The answer ends before the first token that is not learned, such as that of a user's next message.
        not_learned = np.flatnonzero(learned[first:] == 0)
        last = first + int(not_learned[0]) if len(not_learned) else len(tokens)
        return Example(
            tokens[:first].tolist(), tokens[first:last].tolist(), data.images_of(number), data.row_of(number)
        )

    def longest_prompt(self, data: Prepared) -> int:
        """Count the tokens of the longest prompt."""
        every = np.arange(data.samples)
        return int(self._prompt_lengths(data.first_learned(), data.lengths(every) + 1).max())

    def _prompt_lengths(self, first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens of prompts, which end before the first learned one.

        A plain text is learned from its first token on; its beginning stands for a prompt.
        """
        plain = first <= len(self.tokenizer.begin)
        return np.where(plain, np.clip(lengths // 2, 1, OPENING), first)


def mark_learned(
    tokenizer: Tokenizer, tokens: np.ndarray, learned: np.ndarray, *, colour: bool = False
) -> str:
    """Return a sample's text with its control tokens. The learned parts are enclosed in « and ».

    Args:
        tokens, learned: the results of `Prepared.sample`. The first token is never a target.
        colour: whether learned parts are also green, as terminals take it.

    >>> from experiments.data.tokenizer import ByteTokenizer
    >>> mark_learned(ByteTokenizer(), np.array([256, 104, 105, 257]), np.array([0, 0, 1, 1]))
    '<|begin|>h«i<|end|>»'
    """
    parts, targets = [], [False, *map(bool, learned[1:])]
    for is_target, group in groupby(zip(targets, tokens.tolist(), strict=True), key=itemgetter(0)):
        text = brief(printable(tokenizer.decode([token for _, token in group], control=True)))
        if len(text) > MOST_SHOWN:
            text = f"{text[:MOST_SHOWN]} [{len(text) - MOST_SHOWN} more] "
        if is_target:
            text = f"\x1b[32m«{text}»\x1b[0m" if colour else f"«{text}»"
        parts.append(text)
    return "".join(parts)


def prepare_data(config: FinetuneConfig) -> FinetuneConfig:
    """Tokenise the data of a configuration, and return it with their folders in the place of files.

    Its model is a directory.

    Raises:
        ConfigError: a file cannot be read, or lines of it cannot be used, all of which are named.
    """
    tokenizer, data = open_directory(config.model), config.data
    kind, cache = config.objective.kind, (DATA / "prepared").resolve()
    needs = needs_of(config.objective.reward) if kind.data == "prompts" else ()
    tokens, answer = data.tokens if data.tokens != AUTO else None, config.objective.tokens
    policy = RecordPolicy(
        kind.data, data.context, data.broken, data.too_long, needs, tokens,
        answer=(answer or 0) if kind.data == "prompts" and tokens is not None else 0,
    )  # fmt: skip

    # Without files of one's own the built-in ones of the objective are written.
    files = [data.train, data.held_out]
    if data.train is None:
        name = "images" if tokenizer.images and kind.data == "samples" else kind.examples
        files = list(map(str, BUILT_IN[name]((DATA / name).resolve())))

    # Labels have to be known classes, and a reward model also sees the last token of a conversation.
    classes = config.objective.classes
    if kind.data == "labels":
        classes = classes or find_classes(files[0])
        policy = replace(policy, classes=classes, words=config.objective.level == "token")
    policy = replace(policy, whole=kind.score and kind.data == "pairs")

    # Each file is prepared, or a single one is split; what is wrong with both is one error.
    split, folders, wrong = files[1] is None, [], []
    for path in files[:1] if split else files:
        prepared = attempt(partial(prepare, path, tokenizer, policy, cache=cache, split=split), wrong)
        folders += [str(each.folder) for each in prepared or ()]
    if wrong:
        raise ConfigError("\n".join(wrong))

    # A class that does not occur would never be learned.
    if kind.data == "labels":
        counts = open_prepared(folders[0]).classes()[: len(classes)]
        if missing := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise ConfigError(
                report(
                    "objective.classes: classes that do not occur in what is trained on:",
                    missing,
                    "leave them out of objective.classes, or add records of them to data.train.",
                )
            )
        config = replace(config, objective=replace(config.objective, classes=tuple(classes)))
    return replace(config, data=replace(data, train=folders[0], held_out=folders[1]))


def open_data(config: FinetuneConfig, vision: Vision | None = None) -> FinetuneData:
    """Open the data of a configuration whose data are tokenised already.

    Args:
        vision: the vision of a model that sees.

    Raises:
        ConfigError: there are images, but nothing looks at them.
    """
    train, held_out = open_prepared(config.data.train), open_prepared(config.data.held_out)
    tokenizer, kind = open_directory(config.model), config.objective.kind.data
    tokens, images = config.data.tokens, None
    packs = config.data.pack and (kind not in SIDES or tokens is not None)
    if train.images or held_out.images:
        wrong = {
            f"model={config.model} does not see": vision is None,
            f"objective={config.objective.name} draws answers to texts alone": kind != "samples",
            f"mesh.context={config.mesh.context}: images are not split": config.mesh.context > 1,
        }
        if any(wrong.values()):
            ways = "objective=sft, mesh.context=1, and a model that sees."
            raise ConfigError(
                report("the data have images:", [line for line, is_wrong in wrong.items() if is_wrong], ways)
            )
        images = partial(vision.rows, tokenizer.images)
    if kind == "prompts":
        return FinetuneData(tokenizer, train, held_out, Prompts(train), Samples(held_out))
    options = {"images": images, "tokens": tokens, "targets": config.objective.kind.targets}
    measured = Samples(held_out, packs or tokens is None, **options)
    return FinetuneData(tokenizer, train, held_out, Samples(train, packs, **options), measured)


def token_limits(config: FinetuneConfig) -> tuple[int, int]:
    """Return the least and the most useful budget of tokens: the longest record, and all records.

    Turns of an environment may have any length up to the context.
    """
    train, held_out = open_prepared(config.data.train), open_prepared(config.data.held_out)
    draws_answers = config.objective.kind.data == "prompts"
    answer = config.objective.tokens if draws_answers else 0
    group = config.objective.group if draws_answers else 1
    longest = max(int(Samples(each, tokens=MULTIPLE).record_lengths.max()) for each in (train, held_out))
    least = longest + answer if config.objective.environment is None else config.data.context
    return least, max(least, (train.tokens + train.records * answer) * group)


# ------------------------------------------------------------------ answers


@dataclass(frozen=True)
class AnswerTable:
    """A table of prompts whose answers people see.

    Answers are greedy, so that two of them differ by the model alone.
    """

    sampler: Sampler
    tokenizer: DirectoryTokenizer
    examples: Sequence[Example]
    tokens: int

    def answers(self, params: object) -> list[str]:
        """Draw the model's answers on every rank. All ranks call it together, with the same prompts."""
        if not self.examples:
            return []
        drawn = self.sampler(params, [example.prompt for example in self.examples], self.tokens)
        ends = set(self.tokenizer.stops)
        return [self.tokenizer.decode(list(takewhile(lambda t: t not in ends, row))) for row in drawn]

    def table(self, answers: Mapping[str, Sequence[str]]) -> str:
        """Return the text of the table: each prompt with the answers of all models and of its author.

        Args:
            answers: the results of `answers`, by the name of the model.
        """
        lines = []
        for number, example in enumerate(self.examples):
            texts = {who: drawn[number] for who, drawn in answers.items()}
            texts["author"] = self.tokenizer.decode(example.answer) or "-"
            # Roles are control tokens as a rule, so these are spelled.
            lines.append(brief(printable(self.tokenizer.decode(example.prompt, control=True))))
            for who, text in texts.items():
                in_one_line = printable(text).replace("\n", "\\n")
                lines.append(f"  {f'{who}:':<7} {in_one_line}")
            lines.append("")
        return "\n".join(lines)


def brief(text: str) -> str:
    """Replace many equal control tokens, such as those of an image, by one with their number.

    >>> brief("<image><image><image><image>?")
    '<image>*4?'
    """
    return re.sub(r"(<[^<>]+>)\1{3,}", lambda run: f"{run[1]}*{len(run[0]) // len(run[1])}", text)


def window_of(examples: Sequence[Example], tokens: int, limit: int | None) -> int:
    """Count the tokens of these prompts with their answers, rounded up to what a context axis divides.

    Args:
        limit: the tokens that the model was made for.
    """
    longest = max([len(each.prompt) for each in examples], default=1) + tokens
    return min(-(-longest // MULTIPLE) * MULTIPLE, limit or sys.maxsize)
