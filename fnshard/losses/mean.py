"""`Mean`, a loss as a sum and a count."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A mean `total / count` over *all* counted items of all ranks and micro-batches, exactly.

    Args:
        total: 0-d, the sum of the items' losses on this rank.
        count: 0-d, the number of items (a padding mask's sum). A global count of zero gives zero gradients.
        bound: the most items that a micro-batch of this rank can count, if that is known. Gradients are
            divided by it before they are summed; without it, by the size of the batch leaves.

    >>> import torch
    >>> Mean(torch.tensor(6.0), torch.tensor(3)).total
    tensor(6.)
    """

    total: Tensor
    count: Tensor | int | float
    bound: float | None = None
