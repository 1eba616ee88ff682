"""What a run trains on and what its held-out loss is measured on: text as bytes, or token shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.configs.train import ConfigError, ShardsConfig, TrainConfig
from experiments.data.batches import place_of
from experiments.data.shards import Shards, check_vocab, open_shards
from experiments.data.stdlib_text import ByteStream, Corpus, load_corpus
from experiments.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from experiments.data.windows import Batch, WindowLoader, cut, held_out_starts
from experiments.training import ngram
from experiments.training.sample import printable, safe

TOKENIZER = "tokenizer"  # a folder beside the shards
MOST_COUNTED = 2**25  # tokens that tables are counted on: the first of them


class Dataset(Protocol):
    """What the training loop knows of its data.

    `unit`: what a token is, "byte" or "token". `checksum`: equal for equal data. `starts`: where the held-out
    windows begin; int64 [rows].
    """

    unit: str
    checksum: str
    starts: Tensor

    def loader(self, mesh: fs.Mesh) -> WindowLoader:
        """This rank's batches, from the first step on."""

    def held_out(self, starts: Tensor) -> Batch:
        """The held-out windows at `starts`; int64 [starts, T] twice."""

    def tables(self) -> dict[str, float]:
        """Losses of n-gram tables at exactly the targets of the held-out windows, nats; none where tokens are
        no bytes.

        They see the bytes before a window too, the model does not: the comparison favours the tables.
        """

    def encode(self, text: str) -> list[int]:
        """A text's tokens."""

    def decode(self, tokens: list[int]) -> str:
        """Tokens as text that is safe to show."""


def open_dataset(config: TrainConfig) -> Dataset:
    """What a configuration names.

    Raises:
        ConfigError: it is not there, is not whole, or too little for one window; or holds tokens that the
            model does not know.
    """
    if isinstance(config.data, ShardsConfig):
        return open_tokens(config)
    chosen = config.data
    try:
        corpus = load_corpus(
            Path(chosen.root) if chosen.root else None,
            suffix=chosen.suffix,
            held_out_percent=chosen.held_out_percent,
            least=config.context + 3,
        )
        return ByteDataset(config, corpus)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _drawn_by(config: TrainConfig) -> dict[str, int]:
    return {"rows": config.data.rows, "context": config.context, "seed": config.run.seed}


# ------------------------------------------------------------------ bytes


@dataclass(frozen=True)
class ByteDataset:
    """Files of text, all in memory."""

    config: TrainConfig
    corpus: Corpus
    unit: str = field(default="byte", init=False)

    @property
    def checksum(self) -> str:
        return self.corpus.checksum

    @property
    def starts(self) -> Tensor:
        rows, context = self.config.data.held_out_rows, self.config.context
        return held_out_starts(self.corpus.held_out.numel(), rows, context)

    def loader(self, mesh: fs.Mesh) -> WindowLoader:
        return WindowLoader(ByteStream(self.corpus.train), **_drawn_by(self.config), **place_of(mesh))

    def held_out(self, starts: Tensor) -> Batch:
        return cut(ByteStream(self.corpus.held_out), starts.numpy(), self.config.context)

    def tables(self) -> dict[str, float]:
        targets = self.starts[:, None] + torch.arange(1, self.config.context + 1)
        return _table_losses(self.corpus.train, self.corpus.held_out, targets.flatten())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return printable(tokens)


def _table_losses(stream: Tensor, held_out: Tensor, targets: Tensor) -> dict[str, float]:
    trigram = ngram.fit(stream, 3)
    tables = {"bigram": trigram.shortened(2), "trigram": trigram}
    return {name: table.loss(held_out, targets) for name, table in tables.items()}


# ------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class TokenDataset:
    """Shards, mapped. `tokenizer`: of the shards, None where nobody knows it."""

    config: TrainConfig
    train: Shards
    held_shards: Shards
    tokenizer: Tokenizer | None

    @property
    def unit(self) -> str:
        return "byte" if self._bytes else "token"

    @property
    def checksum(self) -> str:
        return f"{self.train.key} {self.held_shards.key}"

    @property
    def starts(self) -> Tensor:
        rows, context = self.config.data.held_out_rows, self.config.context
        return held_out_starts(self.held_shards.tokens, rows, context)

    def loader(self, mesh: fs.Mesh) -> WindowLoader:
        return WindowLoader(self.train, **_drawn_by(self.config), **place_of(mesh))

    def held_out(self, starts: Tensor) -> Batch:
        return cut(self.held_shards, starts.numpy(), self.config.context)

    def tables(self) -> dict[str, float]:
        if not self._bytes:
            return {}
        width = self.config.context + 3  # each window and the two tokens before its first target
        stream = self.train.windows(np.zeros(1, np.int64), min(self.train.tokens, MOST_COUNTED))
        held = self.held_shards.windows(self.starts.numpy() - 2, width)
        targets = torch.arange(held.size).reshape(held.shape)[:, 3:]
        return _table_losses(_as_bytes(stream), _as_bytes(held), targets.flatten())

    def encode(self, text: str) -> list[int]:
        """As the shards' tokenizer does; without it, the first held-out token stands for any text."""
        found = self.tokenizer.encode(text) if self.tokenizer else []
        return found or self.held_shards.windows(np.zeros(1, np.int64), 1)[0].tolist()

    def decode(self, tokens: list[int]) -> str:
        """As the shards' tokenizer does; without it, numbers."""
        return safe(self.tokenizer.decode(tokens)) if self.tokenizer else " ".join(map(str, tokens))

    @property
    def _bytes(self) -> bool:
        return self.train.tokenizer == self.held_shards.tokenizer == byte_tokenizer().key


def _as_bytes(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(np.where(tokens < ngram.VOCAB, tokens, 0).astype(np.uint8).reshape(-1))


def open_tokens(config: TrainConfig) -> TokenDataset:
    """The shards below `data.root`, and the tokenizer beside them."""
    root, least = Path(config.data.root), config.context + 3
    wrong: list[str] = []
    opened = [_try(lambda name=name: open_shards(root / name), wrong) for name in ("train", "held_out")]
    found = [shards for shards in opened if shards is not None]
    wrong += [
        f"{s.folder}: {s.tokens} tokens; one window of model.context={config.context} needs {least}."
        for s in found
        if s.tokens < least
    ]
    _try(lambda: check_vocab(found, config.vocab), wrong)
    if len({s.tokenizer for s in found}) > 1:
        wrong.append(f"{root}: train and held_out are of two tokenizers. Fix: write them together.")
    tokenizer = None
    if (root / TOKENIZER).is_dir():
        tokenizer = _try(lambda: load_tokenizer(root / TOKENIZER), wrong)
    if tokenizer and any(s.tokenizer not in (None, tokenizer.key) for s in found):
        wrong.append(f"{root / TOKENIZER} is not the tokenizer that the shards were made with.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return TokenDataset(config, *found, tokenizer)


def _try(make: Callable[[], Any], wrong: list[str]) -> Any:
    try:
        return make()
    except ConfigError as error:
        wrong.append(str(error))
        return None
