"""A mixture of experts, in sorted rows and in plain products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Model, generator
from torch import Tensor

ROWS, T, WIDTH, HIDDEN, VOCAB, EXPERTS, CHOSEN = 4, 6, 8, 12, 16, 8, 2


def mixture(skew: float = 0.0, dense: bool = False, layers: int = 2) -> Model:
    """Return a model of blocks of attention and experts, with a tied table.

    Args:
        skew: how much the first expert is preferred, so that others get no rows.
        dense: every expert sees all rows, as the truth has it.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH), "norm": (WIDTH,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.qkv": (3 * WIDTH, WIDTH), f"layers.{i}.norm1": (WIDTH,),
            f"layers.{i}.experts.up": (EXPERTS, 2 * HIDDEN, WIDTH), f"layers.{i}.norm2": (WIDTH,),
            f"layers.{i}.experts.down": (EXPERTS, WIDTH, HIDDEN), f"layers.{i}.router": (EXPERTS, WIDTH),
        }  # fmt: skip
    draw = generator(0)
    params = {p: torch.randn(s, dtype=torch.float64, generator=draw) * 0.3 for p, s in shapes.items()}
    bias = torch.arange(EXPERTS, 0.0, -1.0, dtype=torch.float64) * skew

    def loss(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, p["embed.weight"])
        for i in range(layers):
            h = F.layer_norm(x, (WIDTH,), p[f"layers.{i}.norm1"])
            q, k, v = F.linear(h, p[f"layers.{i}.qkv"]).chunk(3, -1)
            attention = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
            x = x + attention[:, 0]
            router = p[f"layers.{i}.router"]
            rows = F.layer_norm(x, (WIDTH,), p[f"layers.{i}.norm2"]).flatten(0, 1)
            up, down = (p[f"layers.{i}.experts.{name}"] for name in ("up", "down"))
            weights, ids = (rows @ router.T + bias.to(rows.dtype)).softmax(-1).topk(CHOSEN, -1)
            x = x + (by_all if dense else by_experts)(rows, up, down, weights, ids).view_as(x)
        logits = F.linear(F.layer_norm(x, (WIDTH,), p["norm"]), p["embed.weight"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Model(params, loss, lambda seed: (torch.randint(0, VOCAB, (ROWS, T), generator=generator(seed)),))


def by_experts(rows: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Compute each row by its two best experts; rows are sorted by expert, as in transformers."""
    order = ids.flatten().argsort(stable=True)
    ends = F.one_hot(ids.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    gate, value = F.grouped_mm(rows[order // CHOSEN], up.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends) * weights.flatten()[order][:, None]
    return torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOSEN, WIDTH).sum(1)


def by_all(rows: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Compute what `by_experts` does in plain products."""
    gate, value = torch.einsum("nd,efd->enf", rows, up).chunk(2, -1)
    made = torch.einsum("enf,edf->ned", F.silu(gate) * value, down)
    return (made * torch.zeros(len(rows), EXPERTS, dtype=rows.dtype).scatter(1, ids, weights)[..., None]).sum(
        1
    )
