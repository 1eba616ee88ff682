"""Losses of language models, and types for what `fn` returns and for leaves of a batch.

The losses never hold the logits of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.losses import policy
from fnshard.losses.linear import token_parts
from fnshard.losses.mean import Mean
from fnshard.losses.policy import dpo

__all__ = [
    "IGNORE", "Mean", "Sequence", "Whole", "dpo", "linear_cross_entropy", "linear_token_losses",
    "load_balance", "next_token", "policy", "sequence_logprobs",
]  # fmt: skip

IGNORE = -100  # the target of a token that is not counted


@dataclass(frozen=True)
class Whole:
    """A batch leaf that is whole in every micro-batch, and that the context axis does not split."""

    value: Any


@dataclass(frozen=True)
class Sequence:
    """A batch leaf whose sequence lies along `dim`, which the context axis splits; None if it has none.

    The sequence of any other tensor is its second dim, if it has two. A mask [B, T, T] has several, `(1, 2)`:
    `fs.Buckets` pads them all, and the context axis splits the first.
    """

    value: Any
    dim: int | tuple[int, ...] | None = 1

    @property
    def dims(self) -> tuple[int, ...]:
        """All sequence dims, as they were named."""
        if self.dim is None:
            return ()
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)

    @property
    def fits(self) -> bool:
        """Whether the value is a tensor that has these dims."""
        value = self.value
        return isinstance(value, Tensor) and all(
            isinstance(d, int) and -value.dim() <= d < value.dim() for d in self.dims
        )


def rows_of(leaf: Any, start: int, count: int) -> Any:
    """Return `count` rows of a batch leaf, from `start` on."""
    rows = unwrap_leaf(leaf).narrow(0, start, count)
    return replace(leaf, value=rows) if isinstance(leaf, Sequence) else rows


def unwrap_leaf(leaf: Any) -> Any:
    """Return a batch leaf as `fn` sees it."""
    return leaf.value if isinstance(leaf, Whole | Sequence) else leaf


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore: int = IGNORE, chunk: int = 0
) -> Mean:
    """Compute the cross-entropy after a linear layer, as an exact mean over all counted tokens of all ranks.

    The logits of at most `chunk` tokens exist at once, in the forward and in the backward.

    Args:
        hidden: [..., D], in any float dtype; logits are normalised in fp32.
        weight: [V, D], the head, which may be the tied embedding.
        targets: int64 [...]. Tokens whose target is `ignore` do not count; another target that is no word
            makes the loss infinite.
        chunk: the tokens at once; 0 takes as many as have 128 MiB of logits (1 GiB on a GPU).

    Raises:
        ValueError: the shapes do not fit each other.

    >>> import torch
    >>> hidden, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    >>> mean = linear_cross_entropy(hidden, weight, torch.tensor([[1, 2, -100], [0, 6, 5]]))
    >>> int(mean.count)
    5
    """
    losses = linear_token_losses(hidden, weight, targets, ignore=ignore, chunk=chunk)
    return Mean(losses.sum(), (targets != ignore).sum(), bound=float(targets.numel()))


def linear_token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore: int = IGNORE, chunk: int = 0
) -> Tensor:
    """Return -log p of every target after a linear layer, fp32 [...]; arguments as in `linear_cross_entropy`.

    It is 0 for the target `ignore`, and infinite for one that is no word.
    """
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}: "
            "expected are [..., D], [V, D] and [...]."
        )
    counted = targets != ignore
    # NaN in the hidden states of padding would give 0 * NaN in gradients.
    hidden = torch.where(counted.unsqueeze(-1), hidden, 0.0)
    sums, chosen = token_parts(hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), chunk, 1)
    is_word = (targets >= 0) & (targets < weight.shape[0])
    losses = torch.where(is_word, (sums - chosen).view(targets.shape), torch.inf)
    return torch.where(counted, losses, 0.0)


def next_token(logits: Tensor, tokens: Tensor, *, ignore: int = IGNORE) -> Mean:
    """Compute the cross-entropy of each token given those before it, for models that return logits.

    Args:
        logits: [B, T, V].
        tokens: int64 [B, T], the inputs, or labels of which some are `ignore`.
    """
    targets = tokens[:, 1:]
    counted = targets != ignore
    safe = torch.where(counted.unsqueeze(-1), logits[:, :-1].float(), 0.0)  # padding may hold NaN
    total = F.cross_entropy(safe.flatten(0, 1), targets.flatten(), ignore_index=ignore, reduction="sum")
    return Mean(total, counted.sum(), bound=float(targets.numel()))


def sequence_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore: int = IGNORE, chunk: int = 0
) -> Tensor:
    """Return log p of each sequence's counted targets after a linear layer, fp32 [B].

    Arguments are those of `linear_cross_entropy`, with targets [B, T].
    """
    return -linear_token_losses(hidden, weight, targets, ignore=ignore, chunk=chunk).sum(-1)


def load_balance(
    router_logits: Iterable[Tensor], top_k: int, counted: Tensor | None = None,
    psum: Callable[[Tensor], Tensor] = lambda x: x,
) -> Mean:  # fmt: skip
    """Compute the load balance, the auxiliary loss of a mixture's routers (Fedus et al. 2022, equation 4).

    It is E times a sum over experts: the share of tokens that go to the expert, times its mean probability,
    both over all layers and all rows. It is at least `top_k`, and equals transformers'
    `load_balancing_loss_func`.

    Args:
        router_logits: the router's logits of each layer, [N, E].
        top_k: the number of experts that a token goes to.
        counted: whether each of the N tokens counts; by default all do.
        psum: inside a sharded function `fs.psum`, so that the rows are those of all ranks.

    >>> import torch
    >>> load_balance([torch.zeros(6, 4)], top_k=2).total / 6
    tensor(2.)
    """
    # Probabilities of all layers, in fp32.
    logits = torch.stack(list(router_logits)).float()  # [layers, N, E]
    if counted is not None:  # the logits of padding may be NaN
        logits = torch.where(counted[:, None] != 0, logits, 0.0)
    probs = logits.softmax(-1)

    # Count how many of each token's choices go to each expert; tokens that do not count have the weight 0.
    layers, tokens, experts = probs.shape
    weight = probs.new_ones(tokens) if counted is None else counted.to(probs.dtype)
    chosen = F.one_hot(probs.detach().topk(top_k, -1).indices, experts).sum((0, 2)).to(probs.dtype)  # [N, E]

    # Shares are those of all ranks' tokens, so that the product is one of means over the whole batch.
    count = layers * weight.sum()
    shares = psum(weight @ chosen) / psum(count).clamp(min=1)
    return Mean(experts * (torch.einsum("lne,n->e", probs, weight) * shares).sum(), count)
