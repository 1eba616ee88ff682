"""Text: windows of a stream of tokens, which are the bytes of text files or come from shards."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.data.loader import Loader, place_of
from experiments.data.shards import TOKENIZER, check_tokenizer, check_vocab, open_shards
from experiments.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.config import ShardsConfig, TrainConfig

VOCAB = 256  # the number of bytes
STRENGTH = 16.0  # in counts; a larger one trusts the shorter context more, and 4 to 64 hardly differ
MOST_COUNTED = 2**25  # tables are counted on at most so many first tokens
# Tests repeat themselves and each other, and packages next to the library differ by machine.
SKIP = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
SEPARATOR = 0  # one byte that no source file holds ends every file
Batch = tuple[Tensor, Tensor]


class TokenStream(Protocol):
    """Tokens one after the other: `Shards` or a `ByteStream`.

    Args:
        key: a text that is equal for equal tokens.
        tokens: the number of tokens.
    """

    key: str
    tokens: int

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each of `starts` on; int64 [starts, length]."""


def cut_windows(stream: TokenStream, starts: np.ndarray, context: int) -> Batch:
    """Return inputs and the tokens that follow them; int64 [starts, T] each."""
    # One token more than the context, since the targets are the inputs moved by one.
    rows = torch.from_numpy(stream.windows(starts, context + 1))  # [rows, T + 1]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def held_out_starts(length: int, rows: int, context: int) -> Tensor:
    """Return the starts of `rows` windows, spread evenly over a stream and the same in every run; int64
    [rows].

    They are 2 or later, since a trigram table reads a byte before the window for the first target.
    """
    return torch.linspace(2, length - context - 1, rows, dtype=torch.float64).long()


@dataclass(frozen=True)
class Windows:
    """The rows of a stream for a `Loader`: `context` inputs and as many targets, of `context + 1` tokens.

    A window's last token is the next one's first. So every token but the first is a target once an epoch,
    except for those after the last window.

    Raises:
        ValueError: the stream is too short for a window.
    """

    stream: TokenStream
    context: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.stream.tokens} tokens are too few: a window takes {self.context + 1}.")

    @property
    def count(self) -> int:
        return (self.stream.tokens - 1) // self.context

    @property
    def key(self) -> Mapping[str, Any]:
        return {"data": self.stream.key, "context": self.context}

    def batch(self, numbers: np.ndarray) -> Batch:
        """Return windows by number; int64 [numbers, T] twice."""
        return cut_windows(self.stream, numbers * self.context, self.context)


# ------------------------------------------------------------------ text files as bytes


@dataclass(frozen=True)
class ByteStream:
    """A stream of bytes as tokens.

    Args:
        values: uint8 [bytes], in which each file ends in a `SEPARATOR`.
    """

    values: Tensor

    @cached_property
    def key(self) -> str:
        return f"{crc32(self.values.numpy()):08x}"

    @property
    def tokens(self) -> int:
        return self.values.numel()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` bytes from each of `starts` on; int64 [starts, length]."""
        return self.values.numpy()[starts[:, None] + np.arange(length)].astype(np.int64)


def standard_library() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path, suffix: str = ".py") -> list[str]:
    """Return the sorted names, with forward slashes, of files below `root` with `suffix`, outside of
    `SKIP`."""
    names = []
    for folder, folders, files in os.walk(root):
        # `os.walk` goes into the folders that this list has afterwards.
        folders[:] = [f for f in folders if f not in SKIP]
        names += [(Path(folder) / f).relative_to(root).as_posix() for f in files if f.endswith(suffix)]
    return sorted(names)


def is_held_out(name: str, percent: int) -> bool:
    """Return whether a file is held out, by a hash of its name, so that other files never move it.

    >>> is_held_out("asyncio/runners.py", 0), is_held_out("asyncio/runners.py", 100)
    (False, True)
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100 < percent


def load_text(
    root: Path | None = None, *, suffix: str = ".py", held_out_percent: int = 10, least: int = 1
) -> tuple[ByteStream, ByteStream]:
    """Read the files below `root` (default: the standard library) in the order of their names.

    Returns:
        The files to train on, and those that are held out.

    Raises:
        ValueError: there is no such folder, or one side of the split holds fewer than `least` bytes.
    """
    root = root or standard_library()
    if not root.is_dir():
        raise ValueError(f"{root} is no folder. Fix: name one as data.root.")
    sides: tuple[list[str], list[str]] = [], []
    for name in source_files(root, suffix):
        sides[is_held_out(name, held_out_percent)].append(name)

    # Join the files of each side, each with a `SEPARATOR` at its end.
    streams = []
    for names in sides:
        joined = bytearray()
        for name in names:
            joined += (root / name).read_bytes()
            joined.append(SEPARATOR)
        # torch makes no tensor of an empty buffer.
        values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        streams.append(ByteStream(values))
    train, held_out = streams
    if min(train.tokens, held_out.tokens) < least:
        raise ValueError(
            f"{root}: the files that end in {suffix!r} hold {train.tokens} bytes to train on "
            f"({len(sides[0])} files) and {held_out.tokens} held out ({len(sides[1])} files); each side "
            f"needs {least}. Fix: name a folder with more text as data.root, or change data.held_out_percent."
        )
    return train, held_out


# ------------------------------------------------------------------ the data of a run


@dataclass(frozen=True)
class Dataset:
    """The two streams of tokens of a run.

    Args:
        held_out_stream: the stream that is held out.
        tokenizer: the tokenizer of the streams; None if it is not known.
        unit: the word for a token, "byte" or "token".
    """

    config: TrainConfig
    train: TokenStream
    held_out_stream: TokenStream
    tokenizer: Tokenizer | None
    unit: str

    @property
    def starts(self) -> Tensor:
        """Return the starts of the held-out windows; int64 [rows]."""
        rows = self.config.data.held_out_rows
        return held_out_starts(self.held_out_stream.tokens, rows, self.config.context)

    def loader(self, mesh: fs.Mesh) -> Loader:
        """Make the loader of this rank's batches, from the first step on."""
        windows = Windows(self.train, self.config.context)
        return Loader(windows, self.config.data.rows, self.config.run.seed, **place_of(mesh))

    @property
    def rows(self) -> int:
        """Return the rows of the global batch."""
        return self.config.data.rows

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.rows * self.config.context

    def held_out(self, mesh: fs.Mesh, rows: int) -> Iterator[Batch]:
        """Yield this rank's held-out windows, at most `rows` at once; int64 [rows, T] twice."""
        # All batches have the same number of rows, so that one compiled program serves them.
        mine = self.starts.chunk(mesh.data_size)[mesh.data_rank]
        for starts in mine.split(math.gcd(len(mine), rows)):
            yield cut_windows(self.held_out_stream, starts.numpy(), self.config.context)

    def ngram_losses(self) -> dict[str, float]:
        """Return losses of n-gram tables at the targets of the held-out windows, in nats.

        There are none unless tokens are bytes. The comparison favours the tables, which see the bytes before
        a window too, whereas the model does not.
        """
        if self.unit != "byte":
            return {}
        train = self.train.windows(np.zeros(1, np.int64), min(self.train.tokens, MOST_COUNTED))
        # Each window is read with the token before it, so that trigrams have their context at every target.
        windows = self.held_out_stream.windows(self.starts.numpy() - 1, self.config.context + 2)
        targets = torch.arange(windows.size).reshape(windows.shape)[:, 2:].flatten()
        return table_losses(_to_bytes(train), _to_bytes(windows), targets)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens; the first held-out token if it has none, or if there is no tokenizer."""
        tokens = self.tokenizer.encode(text) if self.tokenizer else []
        return tokens or self.held_out_stream.windows(np.zeros(1, np.int64), 1)[0].tolist()

    def decode(self, tokens: list[int]) -> str:
        """Return tokens as text, or as numbers if there is no tokenizer."""
        return self.tokenizer.decode(tokens) if self.tokenizer else " ".join(map(str, tokens))


def _to_bytes(tokens: np.ndarray) -> Tensor:
    """Return the byte of each token. Control tokens of the byte tokenizer become zeros."""
    return torch.from_numpy(np.where(tokens < VOCAB, tokens, 0).astype(np.uint8).reshape(-1))


def open_dataset(config: TrainConfig) -> Dataset:
    """Open the data that a configuration names.

    Raises:
        ConfigError: the data are missing, not whole or too few for one window, or hold tokens that the model
            does not know.
    """
    if isinstance(config.data, ShardsConfig):
        return open_tokens(config)
    text = config.data
    try:
        streams = load_text(
            Path(text.root) if text.root else None,
            suffix=text.suffix,
            held_out_percent=text.held_out_percent,
            least=config.context + 3,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Dataset(config, *streams, ByteTokenizer(), "byte")


def open_tokens(config: TrainConfig) -> Dataset:
    """Open the shards below `data.root`, and the tokenizer next to them."""
    root, least = Path(config.data.root), config.context + 3
    wrong: list[str] = []

    # Open both sides, whose tokens have to fit the model. What is wrong is collected into one error.
    sides = [attempt(partial(open_shards, root / name), wrong) for name in ("train", "held_out")]
    opened = [shards for shards in sides if shards is not None]
    for shards in opened:
        if shards.tokens < least:
            window = f"one window of model.context={config.context} needs {least}"
            wrong.append(f"{shards.folder}: {shards.tokens} tokens; {window}.")
    attempt(lambda: check_vocab(opened, config.vocab), wrong)
    if len({shards.tokenizer for shards in opened}) > 1:
        wrong.append(f"{root}: train and held_out are of two tokenizers. Fix: write them together.")

    # Open the tokenizer, unless it is damaged. Shards of another program may have none.
    tokenizer, before = None, len(wrong)
    attempt(lambda: check_tokenizer(root), wrong)
    if len(wrong) == before and (root / TOKENIZER).is_dir():
        tokenizer = attempt(lambda: load_tokenizer(root / TOKENIZER), wrong)
    if tokenizer and any(shards.tokenizer not in (None, tokenizer.key) for shards in opened):
        wrong.append(f"{root / TOKENIZER} is not the tokenizer that the shards were made with.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    unit = "byte" if opened[0].tokenizer == ByteTokenizer().key else "token"
    return Dataset(config, *opened, tokenizer, unit)


# ------------------------------------------------------------------ tables that a model has to beat


def table_losses(train: Tensor, held_out: Tensor, at: Tensor) -> dict[str, float]:
    """Return the mean -log p of the bytes `held_out[at]`, in nats, by tables of pairs and of triples in
    `train`.

    p(c | ab) = (n(abc) + s p(c | b)) / (n(ab) + s), down to p(c) and 1 / V. This is a Dirichlet prior centred
    on the shorter context (MacKay and Peto, 1995), so a proper distribution for every context, seen or not.

    Args:
        train, held_out: uint8 [bytes].
        at: int64 positions of 2 or more, since a table reads the two bytes before each.
    """
    # Each order's p is the prior of the next one.
    p = torch.full(at.shape, 1.0 / VOCAB, dtype=torch.float64)
    losses = {}
    for order, name in enumerate(("unigram", "bigram", "trigram"), 1):
        counts = count_ngrams(train, order)
        index = tuple(held_out[at - back].long() for back in range(order - 1, -1, -1))
        count, total = counts[index].double(), counts.sum(-1)[index[:-1]].double()
        p = (count + STRENGTH * p) / (total + STRENGTH)
        losses[name] = -p.log().mean().item()
    return {name: losses[name] for name in ("bigram", "trigram")}


def count_ngrams(stream: Tensor, order: int) -> Tensor:
    """Count how often each run of `order` bytes occurs; int32 [V] * order.

    >>> count_ngrams(torch.tensor([1, 2, 1, 2], dtype=torch.uint8), 2)[1, 2].item()
    2
    """
    # A run's code is the number that its bytes are the digits of.
    codes = torch.zeros(stream.numel() - order + 1, dtype=torch.int32)
    for back in range(order):
        codes.mul_(VOCAB).add_(stream[back : back + codes.numel()])
    return torch.bincount(codes, minlength=VOCAB**order).to(torch.int32).reshape((VOCAB,) * order)
