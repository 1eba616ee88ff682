"""A byte-level decoder in plain PyTorch: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Nothing here knows of sharding. Letters in shape comments: B rows, T positions, D width, H query
heads, G key/value heads, K head size, M hidden size of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs
from experiments.configs.decoders import DecoderConfig


class Linear(nn.Linear):
    """`x @ weight.T`, no bias. `gain` scales the initial weights, normal with std gain / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        self.gain = gain
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain / math.sqrt(self.in_features))


class Embedding(nn.Embedding):
    """Rows of normal weights."""

    def __init__(self, vocab: int, width: int, std: float):
        self.std = std
        super().__init__(vocab, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int):
        super().__init__(width, eps=1e-5)


def rotary(positions: int, head: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, K/2], computed in fp32 (bf16 angles are off by radians), in `like`'s dtype.

    Made where they are used, not kept as buffers: nothing to store, to cast wrongly or to lose on
    the meta device.
    """
    at = torch.arange(positions, device=like.device, dtype=torch.float32)
    pair = torch.arange(0, head, 2, device=like.device, dtype=torch.float32)
    angles = at[:, None] * torch.exp(pair * (-math.log(theta) / head))  # [T, K/2]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) by its position's angle (RoFormer). x: [B, H, T, K]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention; `heads / kv_heads` query heads share one key and value head."""

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
        # Written out rather than enable_gqa=True, with which the CPU leaves flash attention.
        share = c.heads // c.kv_heads
        k, v = (z.unsqueeze(2).expand(-1, -1, share, -1, -1).flatten(1, 2) for z in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, K]
        return self.wo(out.transpose(1, 2).flatten(2))  # [B, T, H, K] -> [B, T, D]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate = Linear(config.width, config.hidden)
        self.up = Linear(config.width, config.hidden)
        self.down = Linear(config.hidden, config.width, gain=(2 * config.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, T, M] -> [B, T, D]


class Block(nn.Module):
    """x + attention, then + MLP, each after its norm."""

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
    """Tokens [B, T] (integers below V) to next-token logits [B, T, V].

    >>> model = Decoder(DecoderConfig(width=16, layers=1, heads=2, kv_heads=1, context=8))
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        # A tied table is read as logits too, where unit rows would start them at std sqrt(D).
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
    """Mean cross entropy in nats, in fp32 or wider. logits [B, T, V], targets [B, T]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def loss_function(model: nn.Module) -> tuple[Callable[[Any, Tensor, Tensor], Tensor], dict[str, Tensor]]:
    """`next_token_loss` of a decoder as a pure function of (params, tokens, targets), and its parameters."""
    apply, params = fs.make_functional(model)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(apply(params, tokens), targets)

    return loss_fn, params
