"""Batch norm with the mean and variance of all ranks' rows, by one exchange a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fnshard.compiler.frontend.exchange import Axes, all_gather, psum
from fnshard.compiler.frontend.transforms import while_tracing
from fnshard.errors import TraceError


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axes: Axes = None,
) -> Tensor:
    """Normalise as `F.batch_norm` does, with statistics of all ranks' rows; running ones are equal too.

    Each rank sends its mean, its centred sum of squares and its count, in fp32 at least, and merges all of
    them (Chan, Golub & LeVeque 1983), as `torch.nn.SyncBatchNorm` does. In eval mode, on one rank and outside
    of a step it is `F.batch_norm`.

    Args:
        x: [B, C, ...]; ranks may have different numbers of rows.
        running_mean, running_var: [C], written where `training`; or None.
        axes: as in `fs.psum`.

    >>> batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True).round()
    tensor([[-1.],
            [ 1.]])
    """
    if not training or psum(1, axes) == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)

    # This rank's own statistics, centred by its own mean so that nothing cancels.
    channels, shape = x.shape[1], (1, -1, *[1] * (x.dim() - 2))
    dims = [0, *range(2, x.dim())]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = x.numel() // channels
    mean = wide.sum(dims) / max(rows, 1)
    squares = (wide - mean.view(shape)).square().sum(dims)

    # Merge those of all ranks.
    parts = all_gather(torch.cat([mean, squares, mean.new_full((1,), rows)])[None], axes=axes)  # [n, 2 C + 1]
    means, squares, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)

    # Update the running statistics with those of all ranks.
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
            # The running variance is the unbiased one, as in torch; rows are normalised by the biased one.
            running_var.copy_(running_var * (1 - momentum) + squares / (count - 1) * momentum)

    # Normalise this rank's rows.
    scale = (squares / count + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = (wide - mean.view(shape)) * scale.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)


class WholeBatch(TorchFunctionMode):
    """A mode in which `F.batch_norm` is this module's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


@while_tracing
def forward_with_exchanges(_: Any, norm: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Run `nn.SyncBatchNorm.forward` on any device and mesh, with exchanges in place of collectives."""
    if norm.process_group not in (None, torch.distributed.group.WORLD):
        raise TraceError(
            "`fn` has an nn.SyncBatchNorm with a process group of its own, which no mesh knows.",
            fix="leave process_group out, for all rows of the batch; or call "
            "fs.adapters.batch_norm(..., axes=) with names of the mesh's axes.",
        )
    with WholeBatch():
        return super(nn.SyncBatchNorm, norm).forward(input)
