"""Load balance: the auxiliary loss of a mixture's routers (Fedus et al. 2022, Switch Transformer, eq. 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.losses.mean import Mean

__all__ = ["load_balance"]


def load_balance(
    router_logits: Sequence[Tensor], top_k: int, counted: Tensor | None = None,
    psum: Callable[[Tensor], Tensor] = lambda x: x,
) -> Mean:  # fmt: skip
    """E times the sum over experts of the share of tokens that went there times the mean probability of it.

    Both are of all layers, and of all rows. It is at least `top_k`, and equals transformers'
    `load_balancing_loss_func`.

    Args:
        router_logits: of each layer, [N, E].
        top_k: experts that a token goes to.
        counted: whether each of the N tokens counts; default all.
        psum: inside a sharded function `fs.psum`: the rows are those of all ranks then.

    >>> load_balance([torch.zeros(6, 4)], top_k=2).total / 6
    tensor(2.)
    """
    probs = torch.stack(list(router_logits)).float().softmax(-1)  # [layers, N, E]
    layers, tokens, experts = probs.shape
    weight = probs.new_ones(tokens) if counted is None else counted.to(probs.dtype)
    went = F.one_hot(probs.detach().topk(top_k, -1).indices, experts).sum((0, 2)).to(probs.dtype)  # [N, E]
    count = layers * weight.sum()
    shares = psum(weight @ went) / psum(count).clamp(min=1)
    return Mean(experts * (torch.einsum("lne,n->e", probs, weight) * shares).sum(), count)
