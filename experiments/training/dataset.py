"""What a run trains on and what its held-out loss is measured on: text as bytes, or token shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.configs.checks import attempt
from experiments.configs.train import ConfigError, ShardsConfig, TrainConfig
from experiments.data.loader import Loader, place_of
from experiments.data.shards import TOKENIZER, check_tokenizer, check_vocab, open_shards
from experiments.data.stdlib_text import load_text
from experiments.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from experiments.data.windows import Batch, TokenStream, Windows, cut, held_out_starts

VOCAB = 256  # of bytes
STRENGTH = 16.0  # in counts: a larger one trusts the shorter context more; 4 to 64 hardly differ
MOST_COUNTED = 2**25  # tokens that tables are counted on: the first of them


@dataclass(frozen=True)
class Dataset:
    """Two streams of tokens.

    `tokenizer`: of the streams, None where it is not known; `unit`: what a token is, "byte" or "token".
    """

    config: TrainConfig
    train: TokenStream
    measured: TokenStream
    tokenizer: Tokenizer | None
    unit: str

    @property
    def starts(self) -> Tensor:
        """Where the held-out windows begin; int64 [rows]."""
        return held_out_starts(self.measured.tokens, self.config.data.held_out_rows, self.config.context)

    def loader(self, mesh: fs.Mesh) -> Loader:
        """This rank's batches, from the first step on."""
        windows = Windows(self.train, self.config.context)
        return Loader(windows, self.config.data.rows, self.config.run.seed, **place_of(mesh))

    @property
    def rows(self) -> int:
        """Of the global batch."""
        return self.config.data.rows

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.config.context

    def held_out(self, mesh: fs.Mesh, rows: int) -> Iterator[Batch]:
        """This rank's held-out windows, at most so many at once; int64 [rows, T] twice."""
        mine = self.starts.chunk(mesh.data_size)[mesh.data_rank]
        for starts in mine.split(math.gcd(len(mine), rows)):
            yield cut(self.measured, starts.numpy(), self.config.context)

    def tables(self) -> dict[str, float]:
        """Losses of n-gram tables at exactly the targets of the held-out windows, nats; none where tokens are
        not bytes.

        They see the bytes before a window too, the model does not: the comparison favours the tables.
        """
        if self.unit != "byte":
            return {}
        train = self.train.windows(np.zeros(1, np.int64), min(self.train.tokens, MOST_COUNTED))
        # Each window, and the two tokens before its first target.
        windows = self.measured.windows(self.starts.numpy() - 2, self.config.context + 3)
        targets = torch.arange(windows.size).reshape(windows.shape)[:, 3:].flatten()
        return table_losses(_as_bytes(train), _as_bytes(windows), targets)

    def encode(self, text: str) -> list[int]:
        """A text's tokens; without a tokenizer, the first held-out token stands for any text."""
        tokens = self.tokenizer.encode(text) if self.tokenizer else []
        return tokens or self.measured.windows(np.zeros(1, np.int64), 1)[0].tolist()

    def decode(self, tokens: list[int]) -> str:
        """Tokens as text; without a tokenizer, numbers."""
        return self.tokenizer.decode(tokens) if self.tokenizer else " ".join(map(str, tokens))


def _as_bytes(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(np.where(tokens < VOCAB, tokens, 0).astype(np.uint8).reshape(-1))


def open_dataset(config: TrainConfig) -> Dataset:
    """What a configuration names.

    Raises:
        ConfigError: it is not there, is not whole, or too little for one window; or holds tokens that the
            model does not know.
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
    """The shards below `data.root`, and the tokenizer next to them."""
    root, least = Path(config.data.root), config.context + 3
    wrong: list[str] = []
    opened = [attempt(lambda name=name: open_shards(root / name), wrong) for name in ("train", "held_out")]
    found = [shards for shards in opened if shards is not None]
    wrong += [
        f"{s.folder}: {s.tokens} tokens; one window of model.context={config.context} needs {least}."
        for s in found
        if s.tokens < least
    ]
    attempt(lambda: check_vocab(found, config.vocab), wrong)
    if len({s.tokenizer for s in found}) > 1:
        wrong.append(f"{root}: train and held_out are of two tokenizers. Fix: write them together.")
    tokenizer, before = None, len(wrong)
    attempt(lambda: check_tokenizer(root), wrong)
    if len(wrong) == before and (root / TOKENIZER).is_dir():
        tokenizer = attempt(lambda: load_tokenizer(root / TOKENIZER), wrong)
    if tokenizer and any(s.tokenizer not in (None, tokenizer.key) for s in found):
        wrong.append(f"{root / TOKENIZER} is not the tokenizer that the shards were made with.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    in_bytes = found[0].tokenizer == ByteTokenizer().key
    return Dataset(config, *found, tokenizer, "byte" if in_bytes else "token")


# ------------------------------------------------------------------ tables: what a model has to beat


def table_losses(train: Tensor, held_out: Tensor, at: Tensor) -> dict[str, float]:
    """Mean -log p of the bytes `held_out[at]`, in nats, by tables of pairs and of triples in `train`.

    p(c | ab) = (n(abc) + s p(c | b)) / (n(ab) + s), down to p(c) and 1 / V: a Dirichlet prior centred on the
    shorter context (MacKay and Peto, 1995), so a proper distribution for every context, seen or not.

    Args:
        train, held_out: uint8 [bytes].
        at: int64 positions, 2 or more: a table reads the bytes before them.
    """
    p = torch.full(at.shape, 1.0 / VOCAB, dtype=torch.float64)
    losses = {}
    for order, name in enumerate(("unigram", "bigram", "trigram"), 1):
        counts = count(train, order)
        index = tuple(held_out[at - back].long() for back in range(order - 1, -1, -1))
        here, total = counts[index].double(), counts.sum(-1)[index[:-1]].double()
        p = (here + STRENGTH * p) / (total + STRENGTH)
        losses[name] = -p.log().mean().item()
    return {name: losses[name] for name in ("bigram", "trigram")}


def count(stream: Tensor, order: int) -> Tensor:
    """How often each run of `order` bytes occurs; int32 [V] * order.

    >>> count(torch.tensor([1, 2, 1, 2], dtype=torch.uint8), 2)[1, 2].item()
    2
    """
    codes = torch.zeros(stream.numel() - order + 1, dtype=torch.int32)
    for back in range(order):
        codes.mul_(VOCAB).add_(stream[back : back + codes.numel()])
    return torch.bincount(codes, minlength=VOCAB**order).to(torch.int32).reshape((VOCAB,) * order)
