"""A decoder with a mixture of experts, after DeepSeek-V3 (arXiv 2412.19437), in plain PyTorch.

It has what a step's bytes and time depend on: latent attention, a few layers with an MLP, and layers where
each token goes to one expert that all share and to the best of many. The bias that evens out the load, groups
of experts and the prediction of a second token are left out.

Nothing here knows of sharding. Letters in shape comments: B rows, T positions, N of both, D width, H heads, E
experts, C chosen ones, M hidden size of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lib.decoder import Embedding, Linear, RMSNorm, rotary, rotate


class LatentAttention(nn.Module):
    """A causal self-attention whose queries, keys and values are made of a few numbers of each position.

    A query and a key have a part without positions and a rotated one, which for keys all heads share.
    """

    def __init__(
        self, width: int, heads: int, head: int, rotated: int, query_rank: int, key_rank: int, theta: float
    ):
        super().__init__()
        self.heads, self.head, self.rotated, self.key_rank, self.theta = heads, head, rotated, key_rank, theta
        self.q_down = Linear(width, query_rank)
        self.q_norm = RMSNorm(query_rank)
        self.q_up = Linear(query_rank, heads * (head + rotated))
        self.kv_down = Linear(width, key_rank + rotated)
        self.kv_norm = RMSNorm(key_rank)
        self.kv_up = Linear(key_rank, heads * 2 * head)
        self.wo = Linear(heads * head, width)

    def forward(self, x: Tensor) -> Tensor:
        # Queries, and keys with values, are projected down, normed and projected up.
        sizes = (self.head, self.rotated)
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, k_rotary = self.kv_down(x).split((self.key_rank, self.rotated), -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        (q, q_rotary), (k, v) = q.split(sizes, -1), kv.chunk(2, -1)  # [B, H, T, K] each
        # Rotate the parts with positions, and attend.
        angles = rotary(x.shape[1], self.rotated, self.theta, x)
        k_rotary = rotate(k_rotary[:, None], *angles).expand(-1, self.heads, -1, -1)
        q, k = torch.cat([q, rotate(q_rotary, *angles)], -1), torch.cat([k, k_rotary], -1)
        # Flash attention takes only values that are as long as keys.
        out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, self.rotated)), is_causal=True)
        return self.wo(out[..., : self.head].transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """A SwiGLU whose gate and value come from one product."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = Linear(width, 2 * hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Experts(nn.Module):
    """A stack of SwiGLUs, each for the rows that chose it."""

    def __init__(self, width: int, experts: int, hidden: int):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)

    def forward(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return for each row the sum of what its chosen experts make of it, times their shares, [N, D].

        `rows` are [N, D], `shares` and `chosen` [N, C].
        """
        # Sort the rows by expert, so that each expert has a run of them.
        count = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        ends = F.one_hot(chosen.flatten(), len(self.up)).sum(0).cumsum(0).to(torch.int32)
        gate, value = F.grouped_mm(rows[order // count], self.up.mT, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * value, self.down.mT, offs=ends)
        out = out * shares.flatten()[order][:, None]
        # Put the results back in order, and add up those of each row.
        return torch.zeros_like(out).index_copy(0, order, out).unflatten(0, (-1, count)).sum(1)


class Mixture(nn.Module):
    """An MLP that adds a shared expert to the few that a router chooses of many."""

    def __init__(self, width: int, experts: int, chosen: int, hidden: int):
        super().__init__()
        self.chosen = chosen
        self.router = Linear(width, experts)
        self.shared = GatedMLP(width, hidden)
        self.experts = Experts(width, experts, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = self.router(rows).float().sigmoid().topk(self.chosen, -1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        return self.shared(x) + self.experts(rows, shares, chosen).view_as(x)


class Block(nn.Module):
    """A layer, which adds attention and then an MLP or a mixture to x. Each sees x after its own norm."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int):
        super().__init__()
        self.attn_norm = RMSNorm(width)
        self.attn = attention
        self.mlp_norm = RMSNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MixtureDecoder(nn.Module):
    """A decoder from tokens [B, T] (integers below V) to next-token logits [B, T, V].

    Args:
        width: D, the features of a position.
        layers: the number of blocks, of which the first `dense` have an MLP of hidden size `mlp`.
        heads, head: H and K, features of a query's, a key's and a value's part without positions.
        rotated: features of the part that is rotated by its position.
        query_rank, key_rank: features that queries, and keys with values, come from.
        experts, chosen: E of a layer, and C of them that a token goes to.
        expert_mlp: M, hidden size of each, and of the shared one.
        context: longest T that the model is trained for.
        vocab: V.

    >>> sizes = {"width": 16, "layers": 2, "dense": 1, "heads": 2, "head": 8, "rotated": 4, "mlp": 32}
    >>> model = MixtureDecoder(
    ...     **sizes, query_rank=8, key_rank=8, experts=4, chosen=2, expert_mlp=16, context=8, vocab=256
    ... )
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    def __init__(
        self, *, width: int, layers: int, dense: int, heads: int, head: int, rotated: int, query_rank: int,
        key_rank: int, mlp: int, experts: int, chosen: int, expert_mlp: int, context: int, vocab: int,
        theta: float = 10_000.0,
    ):  # fmt: skip
        super().__init__()
        self.embed = Embedding(vocab, width, std=1.0)
        self.layers = nn.ModuleList(
            Block(
                LatentAttention(width, heads, head, rotated, query_rank, key_rank, theta),
                GatedMLP(width, mlp) if layer < dense else Mixture(width, experts, chosen, expert_mlp),
                width,
            )
            for layer in range(layers)
        )
        self.norm = RMSNorm(width)
        self.head = Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))
