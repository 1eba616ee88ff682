"""Decoder: a language model in plain PyTorch, and a sampler of text from it.

It has RMSNorm, rotary positions, SwiGLU and grouped-query attention. Nothing in the model knows of
sharding. Letters in shape comments: B rows, T positions, D width, H query heads, G key/value heads, K head
size, M hidden size of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs
from experiments.lib.checks import configuration
from fnshard.step.lowered import Lowered
from fnshard.step.step import Forward


@configuration
class DecoderConfig:
    """Sizes of a `Decoder`.

    Args:
        width: D, the features of a position.
        layers: the number of blocks.
        heads: H; D / H is the head size and must be even (rotary turns pairs).
        kv_heads: G, which divides H. G = H is multi-head, G = 1 multi-query attention.
        context: the longest T that the model is trained for.
        vocab: V; 256 for bytes.
        mlp: M; 0 means 8/3 D, rounded up to a multiple of 32.
        tied: whether the output projection is the embedding.
        theta: the base of the rotary wavelengths.

    >>> DecoderConfig(width=64, layers=2, heads=4, kv_heads=2, context=128).hidden
    192
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    vocab: int = 256
    mlp: int = 0
    tied: bool = False
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1.")
        if self.mlp < 0:
            raise ValueError(f"model.mlp={self.mlp}: must be 0 (8/3 of the width) or more.")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"model.theta={self.theta}: must be a positive number.")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width={self.width} and model.heads={self.heads}: the head size, width / heads, "
                "must be a whole even number."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} and model.kv_heads={self.kv_heads}: kv_heads must divide heads."
            )

    @property
    def head(self) -> int:
        """Return K, the features of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Return M, the features inside the MLP."""
        return self.mlp or math.ceil(8 * self.width / 3 / 32) * 32

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + self.width + self.vocab * self.width * (1 if self.tied else 2)

    def flops_per_token(self, length: int = 0) -> int:
        """Return the model FLOPs of a token, forward and backward: 6 N + 6 L T D.

        N counts the parameters of matrices that multiply: the head, but not an embedding that is only looked
        up. Scores and their weighted sum read T / 2 positions on average (PaLM, appendix B, halved for the
        causal mask). See `fnshard.analysis.hardware.mfu`.

        Args:
            length: T; 0 is `context`.
        """
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        matrices = self.layers * (attention + 3 * self.width * self.hidden) + self.vocab * self.width
        return 6 * matrices + 6 * self.layers * (length or self.context) * self.width


class Linear(nn.Linear):
    """A layer `x @ weight.T` without bias. Initial weights are normal with std `gain` / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        self.gain = gain
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain / math.sqrt(self.in_features))


class Embedding(nn.Embedding):
    """A table of rows with normal weights."""

    def __init__(self, vocab: int, width: int, std: float):
        self.std = std
        super().__init__(vocab, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.RMSNorm):
    """A norm x / rms(x) * weight (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int):
        super().__init__(width, eps=1e-5)


def rotary(positions: int, head: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, K/2] in the dtype of `like`.

    They are computed in fp32, since bf16 angles are off by radians. They are made where they are used and not
    kept as buffers, so that nothing is stored, cast wrongly or lost on the meta device.
    """
    position = torch.arange(positions, device=like.device, dtype=torch.float32)
    pair = torch.arange(0, head, 2, device=like.device, dtype=torch.float32)
    angles = position[:, None] * torch.exp(pair * (-math.log(theta) / head))  # [T, K/2]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) by its position's angle (RoFormer). x: [B, H, T, K]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """A causal self-attention, in which `heads / kv_heads` query heads share one key and value head."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        kv = config.kv_heads * config.head
        self.wq = Linear(config.width, config.width)
        self.wk = Linear(config.width, kv)
        self.wv = Linear(config.width, kv)
        self.wo = Linear(config.width, config.width, gain=(2 * config.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        heads = ((self.wq, c.heads), (self.wk, c.kv_heads), (self.wv, c.kv_heads))
        q, k, v = (w(x).unflatten(-1, (n, c.head)).transpose(1, 2) for w, n in heads)  # [B, H or G, T, K]
        cos, sin = rotary(x.shape[1], c.head, c.theta, q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Heads are repeated by hand: with enable_gqa=True the CPU does not use flash attention.
        share = c.heads // c.kv_heads
        k, v = (z.unsqueeze(2).expand(-1, -1, share, -1, -1).flatten(1, 2) for z in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, K]
        return self.wo(out.transpose(1, 2).flatten(2))  # [B, T, H, K] -> [B, T, D]


class MLP(nn.Module):
    """A SwiGLU layer: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate = Linear(config.width, config.hidden)
        self.up = Linear(config.width, config.hidden)
        self.down = Linear(config.hidden, config.width, gain=(2 * config.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, T, M] -> [B, T, D]


class Block(nn.Module):
    """A block that adds attention to x, and then an MLP, each behind its norm."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attn_norm = RMSNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A model from tokens [B, T] (integers below V) to next-token logits [B, T, V].

    >>> model = Decoder(DecoderConfig(width=16, layers=1, heads=2, kv_heads=1, context=8))
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        # A tied table makes the logits, too: rows of unit size would start them at std sqrt(D).
        self.embed = Embedding(config.vocab, config.width, std=config.width**-0.5 if config.tied else 1.0)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = Linear(config.width, config.vocab)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, T, D]
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, in fp32 or wider, of logits [B, T, V] and targets [B, T]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def loss_function(model: nn.Module) -> tuple[Callable[[Any, Tensor, Tensor], Tensor], dict[str, Tensor]]:
    """Return a decoder's `next_token_loss` as a function of (params, tokens, targets), and its parameters."""
    apply, params = fs.make_functional(model)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(apply(params, tokens), targets)

    return loss_fn, params


# ------------------------------------------------------------------ text from a model

Logits = Callable[..., Tensor]


def last_logits(
    hidden: Callable[..., Tensor], head: Callable[[Any, Tensor], Tensor] = lambda _, x: x
) -> Logits:
    """Return `fn(params, tokens [B, T], last [B], *more) -> logits [B, V]`, where the logits are those of the
    token that follows position `last` of each row.

    Args:
        hidden: a function of (params, tokens, *more) that returns [B, T, D], or logits [B, T, V].
        head: a function of (params, [B, 1, D]) that makes the logits [B, 1, V] of one position. By default
            `hidden` has made them.
    """

    def fn(params: Any, tokens: Tensor, last: Tensor, *more: Any) -> Tensor:
        every = hidden(params, tokens, *more)
        # The head makes V numbers of a position, so it gets one position of each row.
        index = last[:, None, None].expand(-1, 1, every.shape[-1])
        return head(params, every.gather(1, index)).squeeze(1)

    return fn


@dataclass(frozen=True)
class Sampler:
    """A sampler of tokens, one by one, from a fixed window: one compiled program serves every token.

    Nothing is cached from token to token: gathering weights that are sharded is most of what a token takes.

    Args:
        forward: the `fs.shard_forward` of `last_logits`. All ranks call it together, each with its rows.
        context: T, the tokens of the window. When there are more, the oldest fall out.
        temperature: the number that logits are divided by; below 1 it keeps closer to the likely tokens, and
            0 takes the likeliest.
        more: further arguments of `forward`, as the images of the prompts.
    """

    forward: Forward
    context: int
    device: torch.device
    temperature: float = 0.8
    more: tuple[Any, ...] = ()

    def lower(self, params: Any, rows: int = 1) -> Lowered:
        """Lower the program that draws a token for each row; `more` has as many rows."""
        return self.forward.lower(params, *self._windows([[0]] * rows), *self.more)

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], length: int, seed: int = 0
    ) -> list[list[int]]:
        """Draw `length` tokens after each prompt, which has at least one, and return them."""
        # Tokens are drawn on the CPU, so that ranks with the same logits and seed draw the same ones.
        random = torch.Generator().manual_seed(seed)
        rows = [list(prompt) for prompt in prompts]
        for _ in range(length):
            logits = self.forward(params, *self._windows(rows), *self.more)  # [B, V]
            # A model that is not finite (run.watch=off) gives noise, not an error, so all ranks continue.
            logits = logits.float().cpu().nan_to_num()
            if self.temperature:
                weights = torch.softmax(logits / self.temperature, dim=-1)
                drawn = torch.multinomial(weights, 1, generator=random)[:, 0]
            else:
                drawn = logits.argmax(-1)
            for row, token in zip(rows, drawn.tolist(), strict=True):
                row.append(token)
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    def _windows(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the arguments [B, T] and [B] of `last_logits`."""
        seen = [row[-self.context :] for row in rows]
        # Attention is causal: the padding after `last` is never read.
        padded = [row + [0] * (self.context - len(row)) for row in seen]
        last = torch.tensor([len(row) - 1 for row in seen], device=self.device)
        return torch.tensor(padded, device=self.device), last


def printable(text: str) -> str:
    """Replace characters that a terminal would take for a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
