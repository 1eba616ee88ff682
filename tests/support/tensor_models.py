"""A decoder written by hand for one device; two and four ranks divide its sizes, but for its key heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Model, generator
from torch import Tensor

ROWS, T, WIDTH, HEADS, VOCAB = 4, 8, 8, 4, 16


def decoder(
    kv_heads: int = 2, tied: bool = True, layers: int = 2, vocab: int = VOCAB, fused: bool = False
) -> Model:
    """Make blocks of attention and an MLP with biases; `fused`: q, k and v are one matrix."""
    draw = generator(0)
    kv = kv_heads * WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, WIDTH), "pos": (T, WIDTH), "norm": (WIDTH,)}
    if not tied:
        shapes["head.weight"] = (vocab, WIDTH)
    for i in range(layers):
        block = {
            "q_proj.weight": (WIDTH, WIDTH), "k_proj.weight": (kv, WIDTH), "v_proj.weight": (kv, WIDTH),
            "o_proj.weight": (WIDTH, WIDTH), "o_proj.bias": (WIDTH,), "norm1": (WIDTH,), "norm2": (WIDTH,),
            "up_proj.weight": (4 * WIDTH, WIDTH), "up_proj.bias": (4 * WIDTH,),
            "down_proj.weight": (WIDTH, 4 * WIDTH), "down_proj.bias": (WIDTH,),
        }  # fmt: skip
        if fused:
            block = {n: s for n, s in block.items() if n[:6] not in ("q_proj", "k_proj", "v_proj")}
            block |= {"qkv_proj.weight": (3 * WIDTH, WIDTH), "qkv_proj.bias": (3 * WIDTH,)}
        shapes |= {f"layers.{i}.{n}": s for n, s in block.items()}
    params = {p: torch.randn(s, dtype=torch.float64, generator=draw) * 0.3 for p, s in shapes.items()}
    return Model(params, loss, batch)


def batch(seed: int) -> tuple[Tensor]:
    return (torch.randint(0, VOCAB, (ROWS, T), generator=generator(seed)),)


def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits(p, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def logits(p: dict[str, Tensor], tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
    x = F.embedding(tokens, p["embed.weight"]) + p["pos"]
    for i in range(sum(path.endswith("norm1") for path in p)):
        x = block(p, x, i)
    return F.linear(F.layer_norm(x, (WIDTH,), p["norm"]), p.get("head.weight", p["embed.weight"]))


def block(p: dict[str, Tensor], x: Tensor, i: int) -> Tensor:
    of = lambda name: p[f"layers.{i}.{name}"]  # noqa: E731
    h = F.layer_norm(x, (WIDTH,), of("norm1"))
    if f"layers.{i}.qkv_proj.weight" in p:
        made = F.linear(h, of("qkv_proj.weight"), of("qkv_proj.bias")).chunk(3, dim=-1)
    else:
        made = (F.linear(h, of(f"{n}_proj.weight")) for n in "qkv")
    q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in made)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(a.transpose(1, 2).flatten(2), of("o_proj.weight"), of("o_proj.bias"))
    h = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), of("norm2")), of("up_proj.weight"), of("up_proj.bias")))
    return x + F.linear(h, of("down_proj.weight"), of("down_proj.bias"))
