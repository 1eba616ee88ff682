"""Norms: batch norm by statistics of the whole batch, by one exchange a layer."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fnshard.compiler.frontend.exchange import Axes, all_gather, psum

__all__ = ["batch_norm", "sync_batch_norm"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


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
    """`F.batch_norm` with the statistics of all ranks' rows, and running ones that are alike on all of them.

    Each rank sends its mean, its centred sum of squares and its count, in fp32 at least, and merges all of
    them (Chan, Golub & LeVeque 1983), as `torch.nn.SyncBatchNorm` does. In eval mode, on one rank and outside
    of a step it is `F.batch_norm`.

    Args:
        x: [B, C, ...]; ranks may have different numbers of rows.
        running_mean, running_var: [C], written where `training`; or None.
        axes: as `fs.psum`'s.

    >>> batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True).round()
    tensor([[-1.],
            [ 1.]])
    """
    if not training or psum(1, axes) == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    channels, shape = x.shape[1], (1, -1, *[1] * (x.dim() - 2))
    dims = [0, *range(2, x.dim())]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = x.numel() // channels
    mean = wide.sum(dims) / max(rows, 1)
    squares = (wide - mean.view(shape)).square().sum(dims)
    parts = all_gather(torch.cat([mean, squares, mean.new_full((1,), rows)])[None], axes=axes)  # [n, 2 C + 1]
    means, squares, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
            running_var.copy_(running_var * (1 - momentum) + squares / (count - 1) * momentum)
    scale = (squares / count + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = (wide - mean.view(shape)) * scale.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.dtype)


def sync_batch_norm(model: AnyModule) -> AnyModule:
    """Make every BatchNorm of a model normalise by the whole batch; in place, and returned.

    For `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, whose modules may be here too. They stay the modules
    that they are (a norm with an activation in it keeps that), with the same parameters and buffers; in eval
    mode they compute as before. The gradient and the running statistics are those of one process with all
    rows. A model that was converted cannot be pickled whole.

    >>> import fnshard as fs
    >>> model = fs.sync_batch_norm(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    >>> apply, params = fs.make_functional(model)
    >>> type(model[1]).__name__, isinstance(model[1], nn.BatchNorm1d)
    ('SyncBatchNorm1d', True)
    """
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _AnyShape
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.__class__ = _synchronised(type(module))
    return model


class _AnyShape(nn.BatchNorm1d):
    """What `nn.SyncBatchNorm` takes, without its collectives."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


@cache
def _synchronised(kind: type[nn.Module]) -> type[nn.Module]:
    if hasattr(kind, "synchronised"):
        return kind

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Exchanging():
            return kind.forward(self, *args, **kwargs)

    name = f"Sync{kind.__name__}" if kind is not _AnyShape else "SyncBatchNorm"
    return type(name, (kind,), {"forward": forward, "synchronised": True})


class _Exchanging(TorchFunctionMode):
    """`F.batch_norm` is this module's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))
